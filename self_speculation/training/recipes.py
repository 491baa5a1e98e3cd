"""`train.py --recipe ...`: what each recipe builds, runs and writes."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import cli, distributed
from ..config import ModelConfig, RunConfig, UsageError, as_dict
from ..loading import choose_device, choose_dtype, cpu_has_amx, load
from ..records import RunLog
from .attention import use_blockwise_attention
from .build import build_model, build_optimizers
from .checkpoint import save_model
from .config import DataConfig, TrainConfig
from .data import token_files
from .evaluation import EXIT_COLUMNS, evaluate_exits, exit_table, plot_exits
from .exit_model import ExitModel
from .trainer import Row, Trainer, held_out_row

LOSS_COLUMNS = (
    "run_id", "timestamp", "model", "data", "step", "split", "steps", "tokens", "learning_rate", "tokens_per_second",
    "grad_norm", "loss",
)  # fmt: skip
"""Columns of the losses table; `loss_exit_<E>` and `agreement_exit_<E>` follow."""


def layerskip(train: TrainConfig, data: DataConfig, model: ModelConfig, run: RunConfig) -> None:
    """Train, save the model, and measure its exits."""
    distributed.join()
    hf_model, tokenizer = build_model(train, model, data, run.seed)
    autocast = autocast_for(model, hf_model)
    if hf_model.dtype == torch.float32:
        use_blockwise_attention(hf_model)
    exits = ExitModel(hf_model, model.compile)
    check_exits(train, len(exits.layers))
    training, held_out = token_files(data, tokenizer)
    settings = as_dict(train, data, model, run)  # what is wrong with the input is known before there are files
    log = RunLog("train", run.output_dir, LOSS_COLUMNS, settings, train.resume, key=("step", "split"))
    names = {"model": model.model or train.config, "data": data.data}
    try:
        trainer = Trainer(
            train, exits, build_optimizers(exits, train), training, held_out, log.stem, run.seed, autocast,
            lambda row: log.write({**names, **row}),
        )  # fmt: skip
        trainer.resume()
        trainer.run()
        finish(trainer, tokenizer, log, names)
    finally:
        log.finish()
    cli.note(f"losses in {log.path}")


def finish(trainer: Trainer, tokenizer: Any, log: RunLog, names: Row) -> None:
    """Measure the exits of the trained model and save it. The main process does the work."""
    rows = distributed.on_main(trainer.evaluate)
    trainer.write_row(trainer.steps, "held_out", held_out_row(rows))
    write_exits(log, rows, names, "exits")
    folder = Path(trainer.config.save_model or log.stem / "model")
    distributed.on_main(lambda: save_model(folder, trainer.model.model, tokenizer, torch.bfloat16))
    cli.note(f"model in {folder}")


def evaluate(train: TrainConfig, data: DataConfig, model: ModelConfig, run: RunConfig) -> None:
    """Measure every layer of a trained model as an exit, on the held-out part of the data."""
    distributed.keep_only_main()
    loaded = load(model)
    _, held_out = token_files(data, loaded.tokenizer, trains=False)
    log = RunLog("train", run.output_dir, EXIT_COLUMNS, as_dict(train, data, model, run), train.resume, "exit_layer")
    try:
        exits = ExitModel(loaded.model.hf_model)
        rows = evaluate_exits(exits, held_out, train.eval_sequences, train.batch_size, contextlib.nullcontext)
        write_exits(log, rows, {"model": loaded.name, "data": data.data})
    finally:
        log.finish()


def write_exits(log: RunLog, rows: list[Row], names: Row, suffix: str = "") -> None:
    """The exits' figures as a table on the terminal, a CSV and a PNG."""
    table = log.table(suffix, EXIT_COLUMNS, key="exit_layer") if suffix else log
    picture = table.path.with_suffix(".png")
    if distributed.is_main():
        for row in rows:
            table.write({**names, **row})
        plot_exits(picture, rows, str(names["model"]))
        print(exit_table(rows), flush=True)
    table.finish()
    cli.note(f"exits in {table.path} and {picture}")


def check_exits(train: TrainConfig, layers: int) -> None:
    """The exits named on the command line must be there."""
    for exit_layer in train.exits_for_drafting():
        if not 1 <= exit_layer < layers:
            raise UsageError(f"--draft_exits {train.draft_exits}: this model has the exit layers 1 to {layers - 1}")


def autocast_for(model: ModelConfig, hf_model: Any) -> Any:
    """What a forward pass runs in, weights staying in float32: bfloat16 where the device multiplies matrices faster so.

    Of CPUs those with AMX do; with AVX-512 alone bfloat16 products of many rows are slower than float32 ones.
    """
    device = choose_device(model.device)
    if model.dtype == "float16":
        raise UsageError("--dtype float16: training needs bfloat16, float32 or float64")
    if model.dtype == "auto" and device.type in ("cuda", "cpu"):
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_amx()
        dtype = torch.bfloat16 if fast else torch.float32
    else:
        dtype = choose_dtype(model.dtype, device, hf_model.config)
    if dtype == torch.bfloat16:
        return partial(torch.autocast, device.type, dtype)
    hf_model.to(dtype)
    return contextlib.nullcontext


RECIPES = {"layerskip": layerskip, "evaluate_exits": evaluate}
