"""What `--exit_layer -1` and `--num_speculations -1` mean: the best cell of a prediction on a few prompts.

They are the first of the data set, if there is one, else built in.

For a skip set or an adapter only the number of speculations is left to choose.

The first choice for a model takes a few seconds; what was found is kept for it, its dtype and its device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
import transformers

from . import distributed
from .config import UsageError
from .costs import spread
from .decoding import clock, decode
from .drafters.chain import NoDrafter
from .files import replacing
from .forecast import Forecast
from .loading import cache_folder, fingerprint
from .modeling.packing import is_packed
from .prediction import Rounds, simulate
from .sampling import sample_seed
from .stopping import Stopper

VERSION = 8  # of what is kept
PROMPTS = (
    "Article: The harbour town of Wenlow has opened a bridge for walkers and cyclists, two years later than planned. "
    "It joins the old market to the station and cost eleven million pounds. The mayor said that it would shorten the "
    "way to school for four hundred children.\nSummary:",
    'def moving_average(values, width):\n    """The mean of each `width` neighbouring numbers in a list."""\n',
    "Question: How does a bicycle stay upright while it is moving?\n\nAnswer:",
)
EXITS = 12  # exit layers tried, spread over the first three quarters of the model
MOST_SPECULATIONS = 8
SECONDS = 3.0  # about what writing the texts takes, within the bounds below; measuring costs takes as long again
LEAST_TOKENS, MOST_TOKENS = 12, 96  # a text
TEXTS = 3  # of a data set


@dataclass(frozen=True)
class Cell:
    """An exit layer (None for a skip set or an adapter) and a number of speculations, as predicted. Times are in steps
    of autoregressive decoding."""

    exit_layer: int | None
    num_speculations: int
    acceptance_rate: float
    tokens_per_round: float
    speedup: float
    draft_step: float
    verification: float
    break_even: float


def choose_cell(
    forecast: Forecast, notify: Callable[[str], None], prompts: Sequence[Sequence[int]] = ()
) -> Cell | None:
    """The cell to decode with, None when autoregressive decoding is faster; `notify` is told what and why.

    Every process must come here; the first decides. What the settings fix (either number) stays fixed. The first of
    `prompts` (token ids) take the place of the built-in ones.
    """
    if distributed.one_model():
        raise UsageError("--tp True: give --exit_layer and --num_speculations; choosing them measures one process")
    distributed.join()
    texts = [list(prompt) for prompt in prompts[:TEXTS]] or [forecast.loaded.encode(prompt) for prompt in PROMPTS]
    cells = distributed.on_main(lambda: _kept(forecast, texts))
    best = max(cells, key=lambda cell: cell.speedup)
    costs = (
        f"a draft costs {best.draft_step:.2f} and verifying {best.verification:.2f} steps of the whole model, "
        f"acceptance is {best.acceptance_rate:.0%}, break-even at {best.break_even:.0%}"
    )
    cell = f"--num_speculations {best.num_speculations}"
    if forecast.by_exit:
        cell = f"--exit_layer {best.exit_layer} {cell}"
    if best.speedup <= 1:
        what = "early exit" if forecast.by_exit else "this skip set" if forecast.skip is not None else "this adapter"
        notify(
            f"chose autoregressive decoding: {what} does not pay; the best cell tried, {cell}, would run at "
            f"{best.speedup:.2f} x ({costs})"
        )
        return None
    notify(f"chose {cell}: {best.speedup:.2f} x predicted ({costs})")
    return best


def _kept(forecast: Forecast, prompts: Sequence[list[int]]) -> list[Cell]:
    """The predicted cells, from the file kept for this model and these settings if there is one."""
    config, model = forecast.config, forecast.loaded.model
    exits: Sequence[int] = (config.exit_layer,) if forecast.by_exit else ()
    if forecast.by_exit and config.exit_layer == -1:
        exits = spread(1, max(1, model.num_layers * 3 // 4), EXITS)
    lengths = tuple(range(1, MOST_SPECULATIONS + 1))
    if config.num_speculations != -1:
        lengths = (config.num_speculations,)
    path = cache_folder() / "auto" / f"{_fingerprint(forecast, exits, lengths, prompts)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return [Cell(**cell) for cell in json.loads(path.read_text())["cells"]]
    cells = predict(forecast, exits, lengths, prompts, SECONDS)
    _keep(path, {"model": forecast.loaded.name, "cells": [asdict(cell) for cell in cells]})
    return cells


def predict(
    forecast: Forecast,
    exits: Sequence[int],
    lengths: Sequence[int],
    prompts: Sequence[list[int]],
    seconds: float,
) -> list[Cell]:
    """Predict every cell from texts that the target writes after `prompts`.

    Args:
        exits: exit layers, none where a skip set or an adapter drafts.
        prompts: token ids.
        seconds: about how long to take for the texts, and as long again for the costs, compiling apart.
    """
    forecast = replace(forecast, config=replace(forecast.config.resolved(), ignore_eos=True))
    model, most = forecast.loaded.model, max(lengths)
    room = model.max_positions - LEAST_TOKENS - most - 1
    prompts = [prompt[: max(1, room)] for prompt in prompts]
    started = clock(model)
    cells: list[tuple[int | None, int]] = list(product(exits or (None,), lengths))
    rounds = [Rounds() for _ in cells]
    budget, tokens = LEAST_TOKENS, prompts[0]
    for number, prompt in enumerate(prompts):
        budget = max(1, min(budget, model.max_positions - len(prompt)))
        sampler = forecast.sampler(sample_seed(0, number))
        decoded = decode(model, NoDrafter(), prompt, sampler=sampler, stopper=Stopper(budget=budget))
        found = forecast.follow(sampler, prompt, decoded, exits, budget=budget, most=most)
        for (exit_layer, length), sums in zip(cells, rounds, strict=True):
            sums += simulate(found, forecast.part(exit_layer), length, seed=number)
        tokens = [*prompt, *decoded.tokens]
        left = (seconds - (clock(model) - started)) / max(1, len(prompts) - number - 1)
        speed = budget / max(1e-6, (clock(model) - started) / (number + 1))
        budget = max(LEAST_TOKENS, min(MOST_TOKENS, int(left * speed)))
    ends = sorted({min(exits), max(exits)}) if exits else []
    measured = forecast.costs(tokens, ends, sorted({1, 2, (1 + most) // 2, most}), seconds)
    return [
        Cell(
            exit_layer,
            length,
            sums.acceptance_rate or 0.0,
            sums.tokens_per_round or 0.0,
            sums.speedup(measured, part) or 0.0,
            measured.draft_step(part, length) / measured.step,
            measured.verification(part, length) / measured.step,
            measured.break_even(part, length),
        )
        for (exit_layer, length), sums in zip(cells, rounds, strict=True)
        for part in [forecast.part(exit_layer)]
    ]


def _keep(path: Path, content: dict[str, object]) -> None:
    """Write a file that may be read by others at any time; a folder that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            json.dump(content, file, indent=1)


def _fingerprint(forecast: Forecast, exits: Sequence[int], lengths: Sequence[int], prompts: Sequence[list[int]]) -> str:
    """What the prediction depends on: weights, dtype, device, settings, prompts, and what was tried."""
    model, settings = forecast.loaded.model, forecast.config.resolved()
    cuda = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
    sampling = None if settings.greedy else (
        settings.temperature, settings.top_k, settings.top_p, settings.min_p
    )  # fmt: skip
    history = (settings.repetition_penalty, settings.no_repeat_ngram_size)
    skip = forecast.skip.columns() if forecast.skip is not None else None
    adapter = fingerprint(forecast.adapter) if forecast.adapter is not None else None
    facts = (
        VERSION, fingerprint(model.hf_model), str(model.dtype), model.device.type, cuda, platform.machine(),
        platform.node(), os.cpu_count(), torch.get_num_threads(), torch.__version__, transformers.__version__, sampling,
        history, skip, adapter, tuple(exits), tuple(lengths), prompts, model.hf_model.config.to_json_string(),
        model.compiled, is_packed(model.hf_model), settings.draft_vocabulary,
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]
