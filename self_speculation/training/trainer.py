"""The training loop. What is random depends on seed, step and sample alone, so a resumed run is the same run."""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import distributed
from ..config import RunError
from . import schedules
from .checkpoint import load_checkpoint, save_checkpoint, trained
from .config import TrainConfig
from .data import Shuffled
from .evaluation import evaluate_exits

TIMED_STEPS = 4, 12  # the steps whose median time --max_minutes is divided by; the ones before compile and warm up
Row = dict[str, Any]


class Trainer:
    """Trains `model` (an `ExitModel`) on `data` by the recipe. `write(row)` is given the losses as they come.

    `data` and `held_out` are `TokenFile`s, or, in a recipe of its own kind, what has a length and a number
    of sequences.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        data: Any,
        held_out: Any,
        folder: Path,
        seed: int,
        autocast: Callable[[], Any],
        write: Callable[[Row], None],
    ):
        self.config, self.model, self.optimizers, self.folder = config, model, optimizers, folder
        self.data, self.held_out, self.seed, self.autocast, self.write = (
            Shuffled(data, seed), held_out, seed, autocast, write,
        )  # fmt: skip
        self.layers = len(model.layers)
        self.draft_layers = [exit_layer - 1 for exit_layer in config.exits_for_drafting()]
        self.rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        self.parameters = [parameter for _, parameter in trained(model)]
        self.parallel: Any = DistributedDataParallel(model) if distributed.world_size() > 1 else model
        self.sequences = config.batch_size * config.accumulation * distributed.world_size()  # a step
        self.steps, self.first, self.stopping = config.train_steps, 0, False
        self.fitted = not config.max_minutes  # whether `steps` will stay as it is

    def resume(self) -> None:
        """Go on from the newest checkpoint in the run's folder; without one, from the start."""
        if state := load_checkpoint(self.folder, self.model, self.optimizers):
            self.first, self.steps, self.fitted = state["step"], state["steps"], state["fitted"]

    def run(self) -> None:
        """Train to the last step. Ctrl-C (or a launcher's SIGTERM) ends it after the step, with a checkpoint."""
        from tqdm import tqdm

        began, times, window = time.monotonic(), [], Window()
        bar = tqdm(initial=self.first, total=self.steps, unit="step", disable=not distributed.is_main())
        with bar, self._signals_noted():
            step = self.first
            while step < self.steps:
                start = time.monotonic()
                losses = self.step(step)
                times.append(time.monotonic() - start)
                window.add(losses, times[-1])
                step += 1
                if not math.isfinite(losses["loss"]):
                    raise RunError(f"step {step}: the loss is not a number; lower --learning_rate, or see to the data")
                if not self.fitted and len(times) == TIMED_STEPS[1]:
                    self.steps, self.fitted = step + self._steps_left(began, times[TIMED_STEPS[0] :]), True
                    bar.total = self.steps
                bar.update()
                self._after(step, window, bar)

    def step(self, step: int) -> Row:
        """One optimiser step; returns losses (averaged over processes), learning rate and gradient norm."""
        config = self.config
        enabled = schedules.enabled_layers(
            config.exit_curriculum, step, self.steps, self.layers, config.rotation, self.draft_layers, self.seed
        )
        weights = schedules.exit_weights(
            config.loss_scale, enabled, self.layers, config.early_exit_scale, self.draft_layers
        )
        counted = [layer for layer in enabled if layer in weights or layer == self.layers - 1]
        scale = torch.tensor([weights.get(layer, 0.0) for layer in counted], device=self.model.model.device)
        losses = torch.zeros_like(scale)
        for part in range(config.accumulation):
            tokens, dropped = self._batch(step, part)
            last = part == config.accumulation - 1
            with contextlib.nullcontext() if last or self.parallel is self.model else self.parallel.no_sync():
                with self.autocast():
                    each = self.parallel(
                        tokens, counted, dropped, config.self_distillation, config.last_layer_distillation
                    )
                ((each * scale).sum() / config.accumulation).backward()
            losses += each.detach() / config.accumulation
        update = self._update(step, losses)
        by_exit = {f"loss_exit_{layer + 1}": loss for layer, loss in zip(counted, losses.tolist(), strict=True)}
        return {"loss": float((losses * scale).sum()), **update, **by_exit}

    def _update(self, step: int, sums: torch.Tensor) -> Row:
        """Take the step that the gradients point to, and average `sums` over the processes, in place."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm or float("inf"))
        rate = self._set_learning_rates(step)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if distributed.world_size() > 1:
            torch.distributed.all_reduce(sums)
            sums /= distributed.world_size()
        return {"grad_norm": float(norm), "learning_rate": rate}

    def _batch(self, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This process's sequences [B, T+1] of a part of a step, and which layers each drops [B, L]."""
        config, device = self.config, self.model.model.device
        first = step * self.sequences + (part * distributed.world_size() + distributed.rank()) * config.batch_size
        samples = range(first, first + config.batch_size)
        tokens = torch.stack([self.data[sample] for sample in samples]).to(device)
        if not config.layer_dropout:
            return tokens, None
        time_scale = schedules.dropout_time_scale(step, self.steps, config.exponential_dropout())
        rates = schedules.layer_dropout_rates(self.layers, config.layer_dropout, time_scale)
        dropped = [schedules.dropped_layers(self.seed, sample, rates) for sample in samples]
        return tokens, torch.tensor(dropped, device=device)

    def _set_learning_rates(self, step: int) -> float:
        scale = schedules.learning_rate_scale(
            step, self.steps, self.config.warmup_steps, self.config.final_learning_rate
        )
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * scale
        return self.config.learning_rate * scale

    def _steps_left(self, began: float, times: Sequence[float]) -> int:
        """How many more steps fit into --max_minutes; the main process's clock decides."""
        left = 60 * self.config.max_minutes - (time.monotonic() - began)
        return distributed.broadcast(max(1, int(left / statistics.median(times))))

    def _after(self, step: int, window: Window, bar: Any) -> None:
        """Rows, evaluation, checkpoint and Ctrl-C, after `step` steps."""
        config = self.config
        if step % config.log_every == 0 or step == self.steps:
            row = window.take()
            row["tokens_per_second"] = row.pop("per_second") * self.sequences * self.data.file.length
            self.write_row(step, "train", row)
            bar.set_postfix(loss=f"{row['loss']:.3f}", tok_s=f"{row['tokens_per_second']:.0f}")
        if config.eval_every and step % config.eval_every == 0 and step < self.steps:
            self.write_row(step, "held_out", self.held_out_row())
        stop = self._anyone_stopping()
        if stop or (config.save_every and (step % config.save_every == 0 or step == self.steps)):
            if distributed.is_main():
                state = {"steps": self.steps, "fitted": self.fitted}
                save_checkpoint(self.folder, step, self.model, self.optimizers, state)
            distributed.barrier()
        if stop:
            raise KeyboardInterrupt

    def evaluate(self) -> list[Row]:
        """Every exit on held-out text."""
        return evaluate_exits(
            self.model, self.held_out, self.config.eval_sequences, self.config.batch_size, self.autocast
        )

    def held_out_row(self) -> Row:
        """An evaluation as one row of the losses table."""
        return held_out_row(self.evaluate())

    def write_row(self, step: int, split: str, row: Row) -> None:
        """A row of the losses table, after `step` steps."""
        tokens = step * self.sequences * self.data.file.length
        if distributed.is_main():
            self.write({"step": step, "split": split, "steps": self.steps, "tokens": tokens, **row})

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        before = {name: signal.signal(name, self._note_signal) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _note_signal(self, *_: Any) -> None:
        if self.stopping:  # the second time: now
            raise KeyboardInterrupt
        self.stopping = True

    def _anyone_stopping(self) -> bool:
        if distributed.world_size() == 1:
            return self.stopping
        flag = torch.tensor(int(self.stopping), device=self.model.model.device)
        torch.distributed.all_reduce(flag)
        return bool(flag)


class Window:
    """Means over the steps since the last row: of each exit's loss over the steps that had it enabled."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.seconds = 0.0

    def add(self, row: Row, seconds: float) -> None:
        self.rows.append(row)
        self.seconds += seconds

    def take(self) -> Row:
        names = dict.fromkeys(name for row in self.rows for name in row)
        means = {name: statistics.fmean(row[name] for row in self.rows if name in row) for name in names}
        means["learning_rate"] = self.rows[-1]["learning_rate"]
        speed = len(self.rows) / self.seconds
        self.rows, self.seconds = [], 0.0
        return {**means, "per_second": speed}


def held_out_row(rows: Sequence[Row]) -> Row:
    """An evaluation as one row of the losses table."""
    by_exit = {f"{name}_exit_{row['exit_layer']}": row[name] for name in ("loss", "agreement") for row in rows}
    return {"loss": rows[-1]["loss"], **by_exit}
