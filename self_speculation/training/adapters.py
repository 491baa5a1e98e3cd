"""`train.py --recipe adapter`: an exit adapter for a frozen model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .. import cli, distributed
from ..adapters import save_adapter
from ..config import ModelConfig, RunConfig, UsageError, as_dict
from ..loading import Loaded, load
from ..modeling import AdapterShape
from ..records import RunLog
from .adapter_model import AdapterModel
from .build import build_optimizers
from .config import AdapterTrainConfig, DataConfig, TrainConfig
from .data import TokenFile, token_files
from .own_text import OwnText, own_text
from .trainer import Row, Trainer

COLUMNS = (
    "run_id", "timestamp", "model", "data", "kind", "exit_layer", "step", "split", "steps", "tokens", "learning_rate",
    "tokens_per_second", "grad_norm", "loss", "cross_entropy", "agreement",
)  # fmt: skip
FIT_SEQUENCES = 32  # that the linear map of `feature` is fitted to
Sequences = tuple[torch.Tensor, torch.Tensor | None]  # tokens [B, T+1], and states [B, T, H] of the last layer if known


class Source(Protocol):
    """Sequences by number."""

    length: int

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Sequences: ...


class TextSource:
    """Text as people wrote it; the model's states are computed when it is used."""

    def __init__(self, file: TokenFile):
        self.file, self.length = file, file.length

    def __len__(self) -> int:
        return len(self.file)

    def batch(self, numbers: Sequence[int]) -> Sequences:
        return torch.stack([self.file.sequence(number) for number in numbers]), None


class OwnSource:
    """Rows of the model's own text, with the states it had while writing."""

    def __init__(self, text: OwnText, rows: Sequence[int], length: int):
        self.text, self.rows, self.length = text, rows, length

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int]) -> Sequences:
        tokens, states = zip(*(self.text.row(self.rows[number]) for number in numbers), strict=True)
        return torch.stack(tokens), torch.stack(states)


class AdapterTrainer(Trainer):
    """Trains the adapter of an `AdapterModel`; sequences, positions and drift depend on seed and step alone."""

    model: Any  # AdapterModel
    held_out: Any  # Source
    source: Source

    def step(self, step: int) -> Row:
        """One optimiser step; averages over processes."""
        config, device = self.config, self.model.model.device
        sums = torch.zeros(3, device=device)
        for part in range(config.accumulation):
            place = part * distributed.world_size() + distributed.rank()
            first = step * self.sequences + place * config.batch_size
            numbers = [self.data.number(n) for n in range(first, first + config.batch_size)]
            inputs = self.inputs(self.source, numbers)
            generator = torch.Generator().manual_seed((self.seed << 32) + step * 4096 + place)
            last = part == config.accumulation - 1
            with contextlib.nullcontext() if last or self.parallel is self.model else self.parallel.no_sync():
                loss, cross_entropy, agreement = self.parallel(*inputs, generator)
                (loss / config.accumulation).backward()
            sums += torch.stack([loss.detach(), cross_entropy, agreement]) / config.accumulation
        update = self._update(step, sums)
        loss, cross_entropy, agreement = sums.tolist()
        return {"loss": loss, "cross_entropy": cross_entropy, "agreement": agreement, **update}

    def inputs(self, source: Source, numbers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """What `AdapterModel.forward` takes, for these sequences."""
        return self.model.frozen(*to_device(self.model.model, source.batch(numbers)))

    def held_out_row(self) -> Row:
        """The share of held-out positions at which the draft is what the model says."""
        agreeing = total = 0
        count = min(self.config.eval_sequences, len(self.held_out))
        for start in range(0, count, self.config.batch_size):
            numbers = range(start, min(start + self.config.batch_size, count))
            same, of = self.model.agreement(*self.inputs(self.held_out, numbers))
            agreeing, total = agreeing + same, total + of
        return {"agreement": agreeing / total}


def train_adapter(
    train: TrainConfig, adapter: AdapterTrainConfig, data: DataConfig, model: ModelConfig, run: RunConfig
) -> None:
    """Train an adapter, measure it, and save it."""
    distributed.join()
    loaded = load(model)
    shape = adapter_shape(adapter, loaded)
    source, held_out = sources(loaded, adapter, data, train, run.seed)
    made = new_adapter(loaded, adapter, shape, source, run.seed)
    settings = as_dict(train, adapter, data, model, run)  # what is wrong with the input is known before there are files
    log = RunLog("train", run.output_dir, COLUMNS, settings, train.resume, key=("step", "split"))
    names = {"model": loaded.name, "data": data.data, "kind": shape.kind, "exit_layer": shape.exit_layer}
    try:
        trainer = AdapterTrainer(
            train, made, build_optimizers(made, train), source, held_out, log.stem, run.seed, autocast(loaded),
            lambda row: log.write({**names, **row}),
        )  # fmt: skip
        trainer.source = source
        trainer.resume()
        trainer.run()
        trainer.write_row(trainer.steps, "held_out", distributed.on_main(trainer.held_out_row))
        folder = Path(adapter.save_adapter or log.stem / "adapter")
        trained = {"tokens": trainer.steps * trainer.sequences * source.length, "steps": trainer.steps,
                   "own_text": adapter.own_text, "data": data.data}  # fmt: skip
        distributed.on_main(lambda: save_adapter(folder, made.adapter, loaded.model.hf_model, loaded.name, trained))
        cli.note(f"adapter in {folder}")
    finally:
        table = log.finish()
    picture = log.path.with_suffix(".png")
    if distributed.is_main():
        plot_agreement(picture, table, f"{loaded.name}: {shape.kind}")
    cli.note(f"losses in {log.path}, agreement over tokens in {picture}")


def new_adapter(
    loaded: Loaded, config: AdapterTrainConfig, shape: AdapterShape, source: Source, seed: int
) -> AdapterModel:
    """The adapter before training."""
    torch.manual_seed(seed)
    made = AdapterModel(
        loaded.model.hf_model, shape, draft_vocabulary(source, config.draft_vocabulary, loaded), autocast(loaded),
        config.scored_positions, config.regression, config.drifted,
    )  # fmt: skip
    if shape.kind == "feature":
        count = min(FIT_SEQUENCES, len(source))
        made.fit([to_device(made.model, source.batch([number * len(source) // count])) for number in range(count)])
    return made


def adapter_shape(adapter: AdapterTrainConfig, loaded: Loaded) -> AdapterShape:
    """The adapter that the settings ask for, with what they leave open."""
    layers = loaded.model.num_layers
    feature = adapter.adapter_kind == "feature"
    exit_layer = layers if feature else adapter.adapter_exit if adapter.adapter_exit != -1 else max(1, layers // 8)
    if not feature:
        if not 1 <= exit_layer < layers:
            raise UsageError(f"--adapter_exit {exit_layer}: must be between 1 and {layers - 1}, or -1")
    elif adapter.adapter_exit != -1:
        raise UsageError(f"--adapter_exit {adapter.adapter_exit}: the kind feature runs no layers to draft")
    from_layer = adapter.adapter_from if adapter.adapter_from != -1 else layers - 1
    if not int(feature) <= from_layer < layers:
        raise UsageError(f"--adapter_from {from_layer}: must be between {int(feature)} and {layers - 1}, or -1")
    vocabulary = adapter.draft_vocabulary if adapter.draft_vocabulary < loaded.model.vocab_size else 0
    return AdapterShape(adapter.adapter_kind, exit_layer, from_layer, vocabulary)


def sources(
    loaded: Loaded, adapter: AdapterTrainConfig, data: DataConfig, train: TrainConfig, seed: int
) -> tuple[Source, Source]:
    """(training, held out): the model's own text where it is asked for, else text as people wrote it."""
    if not adapter.own_text:
        training, held_out = token_files(data, loaded.tokenizer)
        return TextSource(training), TextSource(held_out)
    if adapter.prompt_tokens >= data.sequence_length:
        raise UsageError(
            f"--prompt_tokens {adapter.prompt_tokens}: must be below --sequence_length {data.sequence_length}"
        )
    if adapter.own_batch < 2:
        raise UsageError(f"--own_batch {adapter.own_batch}: must be 2 or more, as one text of a batch is held out")
    text = own_text(loaded, adapter, data, seed)
    kept = max(1, min(train.eval_sequences * text.batch // len(text), text.batch // 20))  # the last of every batch
    last = [row % text.batch >= text.batch - kept for row in range(len(text))]
    return (
        OwnSource(text, [row for row, out in enumerate(last) if not out], data.sequence_length),
        OwnSource(text, [row for row, out in enumerate(last) if out], data.sequence_length),
    )


def to_device(model: Any, sequences: Sequences) -> Sequences:
    """The same where the model is, states in its dtype."""
    tokens, final = sequences
    return tokens.to(model.device), None if final is None else final.to(model.device, model.dtype)


def draft_vocabulary(source: Source, size: int, loaded: Loaded) -> torch.Tensor | None:
    """The `size` most frequent ids of the training text, ends of sequence among them; None for all ids."""
    if not size or size >= loaded.model.vocab_size:
        return None
    counts = np.zeros(loaded.model.vocab_size, dtype=np.int64)
    for number in range(min(len(source), 20_000)):
        tokens, _ = source.batch([number])
        counts += np.bincount(tokens.numpy().ravel(), minlength=len(counts))
    counts[list(loaded.eos_ids)] = counts.max() + 1
    return torch.from_numpy(np.argsort(-counts, kind="stable")[:size].copy())


def autocast(loaded: Loaded) -> Callable[[], Any]:
    """What the adapter runs in beside a frozen model of this dtype; its weights are float32."""
    model = loaded.model
    if model.dtype == torch.float16:
        raise UsageError("--dtype float16: training needs bfloat16, float32 or float64")
    if model.dtype == torch.bfloat16:
        return lambda: torch.autocast(model.device.type, torch.bfloat16)
    return contextlib.nullcontext


def plot_agreement(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw the agreement over the tokens trained on into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for split, style in (("train", "-"), ("held_out", "o-")):
        points = [(row["tokens"], row["agreement"]) for row in rows if row["split"] == split]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=split.replace("_", " "))
    axes.set(xlabel="tokens", ylabel="agreement with the model", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
