"""What `--exit_layer -1` and `--num_speculations -1` mean: the best cell of a prediction on a few prompts.

They are the first of the data set, if there is one, else built in.

For a skip set only the number of speculations is left to choose.

The first choice for a model takes a few seconds; what was found is kept for it, its dtype and its device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers

from . import distributed
from .config import GenerationConfig, UsageError
from .costs import RoundCosts, measure_costs, spread
from .decoding import decode
from .drafters.chain import NoDrafter
from .loading import Loaded, cache_folder, fingerprint
from .modeling import SelfSpeculativeModel, SkipSet
from .prediction import Part, Rounds, read, simulate, trace
from .sampling import Sampler, sample_seed
from .skip_scores import follow, measure_skip_costs
from .stopping import Stopper
from .vocabulary import draft_token_ids

VERSION = 6  # of what is kept
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
    """One exit layer (None for a skip set) and number of speculations, as predicted. Times are in steps of
    autoregressive decoding."""

    exit_layer: int | None
    num_speculations: int
    acceptance_rate: float
    tokens_per_round: float
    speedup: float
    draft_step: float
    verification: float
    break_even: float


def choose_cell(
    loaded: Loaded,
    config: GenerationConfig,
    notify: Callable[[str], None],
    skip: SkipSet | None = None,
    prompts: Sequence[Sequence[int]] = (),
) -> Cell | None:
    """The cell to decode with, None when autoregressive decoding is faster; `notify` is told what and why.

    Every process must come here; the first decides. What `config` fixes (either number) stays fixed. With `skip`, that
    set drafts in the place of an early exit. The first of `prompts` (token ids) take the place of the built-in ones.
    """
    if distributed.one_model():
        raise UsageError("--tp True: give --exit_layer and --num_speculations; choosing them measures one process")
    distributed.join()
    texts = [list(prompt) for prompt in prompts[:TEXTS]] or [loaded.encode(prompt) for prompt in PROMPTS]
    cells = distributed.on_main(lambda: _kept(loaded, config, skip, texts))
    best = max(cells, key=lambda cell: cell.speedup)
    costs = (
        f"a draft costs {best.draft_step:.2f} and verifying {best.verification:.2f} steps of the whole model, "
        f"acceptance is {best.acceptance_rate:.0%}, break-even at {best.break_even:.0%}"
    )
    cell = f"--num_speculations {best.num_speculations}"
    if skip is None:
        cell = f"--exit_layer {best.exit_layer} {cell}"
    if best.speedup <= 1:
        what = "early exit" if skip is None else "this skip set"
        notify(
            f"chose autoregressive decoding: {what} does not pay; the best cell tried, {cell}, would run at "
            f"{best.speedup:.2f} x ({costs})"
        )
        return None
    notify(f"chose {cell}: {best.speedup:.2f} x predicted ({costs})")
    return best


def _kept(loaded: Loaded, config: GenerationConfig, skip: SkipSet | None, prompts: Sequence[list[int]]) -> list[Cell]:
    """The predicted cells, from the file kept for this model and these settings if there is one."""
    model = loaded.model
    parts: Sequence[Part] = (config.exit_layer,)
    if skip is not None:
        parts = (skip,)
    elif config.exit_layer == -1:
        parts = spread(1, max(1, model.num_layers * 3 // 4), EXITS)
    lengths = tuple(range(1, MOST_SPECULATIONS + 1))
    if config.num_speculations != -1:
        lengths = (config.num_speculations,)
    path = cache_folder() / "auto" / f"{_fingerprint(loaded, config, parts, lengths, prompts)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return [Cell(**cell) for cell in json.loads(path.read_text())["cells"]]
    cells = predict(loaded, config, parts, lengths, prompts)
    _keep(path, {"model": loaded.name, "cells": [asdict(cell) for cell in cells]})
    return cells


def predict(
    loaded: Loaded,
    config: GenerationConfig,
    parts: Sequence[Part],
    lengths: Sequence[int],
    prompts: Sequence[list[int]],
    seconds: float = SECONDS,
) -> list[Cell]:
    """Predict every cell from texts that the target writes after `prompts`.

    Args:
        parts: exit layers, or one skip set.
        prompts: token ids.
    """
    skip = parts[0] if isinstance(parts[0], SkipSet) else None
    exits = [part for part in parts if isinstance(part, int)]
    model, most = loaded.model, max(lengths)
    config = replace(config.resolved(), ignore_eos=True)
    token_ids = draft_token_ids(config, loaded)
    room = model.max_positions - LEAST_TOKENS - most - 1
    prompts = [prompt[: max(1, room)] for prompt in prompts]
    started = time.perf_counter()
    rounds: dict[tuple[Part, int], Rounds] = {(part, length): Rounds() for part in parts for length in lengths}
    budget, tokens = LEAST_TOKENS, prompts[0]
    for number, prompt in enumerate(prompts):
        budget = max(1, min(budget, model.max_positions - len(prompt)))
        sampler = Sampler(config, seed=sample_seed(0, number), device=model.device, vocab_limit=len(loaded.tokenizer))
        stopper = Stopper(budget=budget)
        decoded = decode(model, NoDrafter(), prompt, sampler=sampler, stopper=stopper)
        if skip is not None:
            text = read(model, prompt, decoded, budget=budget)
            found = follow(model, sampler, text, skip, most, token_ids=token_ids)
        else:
            found = trace(model, sampler, prompt, decoded, exits, budget=budget, most_speculations=most,
                          token_ids=token_ids)  # fmt: skip
        for (part, length), sums in rounds.items():
            sums += simulate(found, part, length, seed=number)
        tokens = [*prompt, *decoded.tokens]
        left = (seconds - (time.perf_counter() - started)) / max(1, len(prompts) - number - 1)
        speed = budget / max(1e-6, (time.perf_counter() - started) / (number + 1))
        budget = max(LEAST_TOKENS, min(MOST_TOKENS, int(left * speed)))
    tokens = tokens[: max(1, model.max_positions - most - 1)]
    measured = _costs(model, sampler, tokens, skip, exits, most, seconds, token_ids)
    return [
        Cell(
            part if isinstance(part, int) else None,
            length,
            sums.acceptance_rate or 0.0,
            sums.tokens_per_round or 0.0,
            sums.speedup(measured, part) or 0.0,
            measured.draft_step(part, length) / measured.step,
            measured.verification(part, length) / measured.step,
            measured.break_even(part, length),
        )
        for (part, length), sums in rounds.items()
    ]


def _costs(
    model: SelfSpeculativeModel, sampler: Sampler, tokens: Sequence[int], skip: SkipSet | None, exits: Sequence[int],
    most: int, seconds: float, token_ids: torch.Tensor | None,
) -> RoundCosts:  # fmt: skip
    lengths = sorted({1, 2, (1 + most) // 2, most})
    if skip is not None:
        return measure_skip_costs(model, sampler, tokens, lengths, seconds, token_ids)
    ends = min(exits), max(exits)
    return measure_costs(model, sampler, tokens, ends, lengths, seconds=seconds, token_ids=token_ids)


def _keep(path: Path, content: dict[str, object]) -> None:
    """Write a file that may be read by others at any time; a folder that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(path)


def _fingerprint(
    loaded: Loaded,
    config: GenerationConfig,
    parts: Sequence[Part],
    lengths: Sequence[int],
    prompts: Sequence[list[int]],
) -> str:
    """What the prediction depends on: weights, dtype, device, settings, prompts, and what was tried."""
    model = loaded.model
    cuda = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
    settings = config.resolved()
    sampling = None if settings.greedy else (
        settings.temperature, settings.top_k, settings.top_p, settings.min_p
    )  # fmt: skip
    history = (settings.repetition_penalty, settings.no_repeat_ngram_size)
    tried = tuple(part.columns() if isinstance(part, SkipSet) else part for part in parts)
    facts = (
        VERSION, fingerprint(model.hf_model), str(model.dtype), model.device.type, cuda, platform.machine(),
        platform.node(), os.cpu_count(), torch.get_num_threads(), torch.__version__, transformers.__version__, sampling,
        history, tried, tuple(lengths), prompts, model.hf_model.config.to_json_string(), model.compiled,
        config.draft_vocabulary,
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]
