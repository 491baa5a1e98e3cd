"""What the parts of a round cost on this machine, measured, and what acceptance makes drafting worth it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from .decoding import clock
from .drafters.base import Context, Draft, Drafter
from .drafters.layers import LayersDrafter
from .modeling import KeptStates, SelfSpeculativeModel
from .sampling import Sampler
from .stats import now

STEPS = 3  # timed in a row before each round
LEAST_REPEATS, MOST_REPEATS = 2, 25  # of every kind of round


class RoundCosts:
    """Seconds that rounds take when a part of the model (an exit layer or a skip set) drafts."""

    step: float  # one token of autoregressive decoding

    def draft_step(self, part: Any, length: int = 1) -> float:
        """Drafting one of `length` tokens."""
        raise NotImplementedError

    def verification(self, part: Any, length: int) -> float:
        """Verifying a draft of `length` tokens."""
        raise NotImplementedError

    def round(self, part: Any, length: int) -> float:
        """A whole round; without a draft it is a step of autoregressive decoding."""
        if length == 0:
            return self.step
        return length * self.draft_step(part, length) + self.verification(part, length)

    def break_even(self, part: Any, length: int) -> float:
        """The acceptance rate above which rounds of `length` drafts beat autoregressive decoding; above 1, none does.

        A round costs `round / step` target tokens and gives 1 + length x acceptance tokens.
        """
        return (self.round(part, length) / self.step - 1) / length


@dataclass(frozen=True)
class Costs(RoundCosts):
    """Seconds, with choosing the tokens included; between the measured points costs are taken as linear.

    Attributes:
        step: one token of autoregressive decoding.
        exits, lengths: where the others were measured.
        draft: [exits][lengths] drafting so many tokens.
        verify: [exits][lengths] verifying them, given the states that drafting kept.
    """

    step: float
    exits: tuple[int, ...]
    lengths: tuple[int, ...]
    draft: tuple[tuple[float, ...], ...]
    verify: tuple[tuple[float, ...], ...]

    def draft_step(self, part: int, length: int = 1) -> float:
        """Drafting one of `length` tokens with the first `part` layers."""
        return self._between(self.draft, part, length) / length

    def verification(self, part: int, length: int) -> float:
        """Verifying a draft of `length` tokens."""
        return self._between(self.verify, part, length)

    def _between(self, table: Sequence[Sequence[float]], exit_layer: int, length: int) -> float:
        """`table` at (exit_layer, length), linear between its points, and beyond them as at the nearest."""
        at_exits = [np.interp(length, self.lengths, row) for row in table]
        return float(np.interp(exit_layer, self.exits, at_exits))


def spread(first: int, last: int, count: int) -> tuple[int, ...]:
    """About `count` whole numbers evenly between `first` and `last`, both included."""
    return tuple(sorted({round(value) for value in np.linspace(first, last, min(count, last - first + 1))}))


@torch.inference_mode()
def measure_costs(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    tokens: Sequence[int],
    drafters: Mapping[int, LayersDrafter],
    lengths: Sequence[int],
    *,
    seconds: float = 5.0,
) -> Costs:
    """Time rounds after `tokens` as the decoding loop plays them, all kinds in turn so that drift hits them alike.

    Args:
        tokens: the text before the round; as long as those that will be decoded.
        drafters: what drafts at each exit layer to measure.
        lengths: draft lengths to measure. Length 1 is always measured.
        seconds: about how long to go on, once everything was timed a few times.
    """
    exits, lengths = sorted(drafters), sorted({1, *lengths} - {0})
    part = time_rounds(model, sampler, tokens, drafters, lengths, seconds)
    return Costs(
        step=part["step", 0, 0],
        exits=tuple(exits),
        lengths=tuple(lengths),
        draft=tuple(tuple(part["draft", e, k] for k in lengths) for e in exits),
        verify=tuple(tuple(part["verify", e, k] for k in lengths) for e in exits),
    )


def time_rounds(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    tokens: Sequence[int],
    drafters: Mapping[Any, LayersDrafter],
    lengths: Sequence[int],
    seconds: float,
) -> dict[tuple[str, Any, int], float]:
    """Times of ("step", 0, 0), ("head", 0, 0) and, for each name of a drafter and each length, ("draft", name, length)
    and ("verify", name, length).

    All but the step are medians of ratios to steps just before them, for a shared machine is now fast, now slow, for
    seconds at a time.
    """
    capacity = len(tokens) + lengths[-1] + 1
    context = Context(model, model.new_cache(capacity), sampler, list(tokens), (), lengths[-1])
    depth = next((drafter.depth for drafter in drafters.values() if drafter.depth is not None), None)
    context.states = None if depth is None else KeptStates(depth, capacity)
    model.prefill(model.ids(tokens), context.cache, states=context.states)
    for drafter in drafters.values():
        drafter.start(context)
    steps: list[float] = []
    ratios: dict[tuple[str, Any, int], list[float]] = defaultdict(list)  # to the steps just before
    begun = clock(model)
    for repeat in range(MOST_REPEATS + 1):
        if repeat > LEAST_REPEATS and (clock(model) - begun) / repeat * (repeat + 1) > seconds:
            break
        if repeat == 1:  # the first repeat warmed up
            steps.clear()
            ratios.clear()
        for name, drafter in drafters.items():
            for length in lengths:
                here = [verify for _, verify in _in_a_row(context, None, 0, STEPS)]
                steps += here
                near = median(here)
                [(draft, verify)] = _in_a_row(context, drafter, length, 1)
                ratios["draft", name, length].append(draft / near)
                ratios["verify", name, length].append(verify / near)
                ratios["head", 0, 0].append(_time_head(context, drafter) / near)
    step = median(steps)
    times = {("step", 0, 0): step, **{kind: step * median(values) for kind, values in ratios.items()}}
    for name in drafters:
        drafts = [times["draft", name, length] for length in lengths]
        times.update({("draft", name, k): time for k, time in zip(lengths, _on_a_line(lengths, drafts), strict=True)})
    return times


def _on_a_line(lengths: Sequence[int], times: Sequence[float]) -> list[float]:
    """The times on the line through (length, time) of least relative error: a draft is so many equal steps, and what
    it begins with takes no less than nothing."""
    if len(lengths) < 3:
        return list(times)
    each = np.asarray(lengths) / np.asarray(times)
    slope, start = np.polyfit(lengths, times, 1, w=1 / np.asarray(times))
    if start < 0:
        slope, start = each.sum() / (each**2).sum(), 0.0
    return [float(start + slope * length) for length in lengths]


def _in_a_row(context: Context, drafter: Drafter | None, length: int, count: int) -> list[tuple[float, float]]:
    """What `_play` gives, `count` times after a first one: in decoding a round follows one of its own kind, and one
    that follows another kind is up to a tenth slower."""
    return [_play(context, drafter, length) for _ in range(count + 1)][1:]


def _play(context: Context, drafter: Drafter | None, length: int) -> tuple[float, float]:
    """Seconds of drafting `length` tokens, and of verifying them; None drafts nothing."""
    model, device = context.model, context.model.device
    started = now(device)
    draft = drafter.propose(context, length) if drafter else Draft()
    drafted = now(device) if drafter else started
    block = model.ids([context.tokens[-1], *draft.tokens])
    logits = model.verify(block, context.cache, context.position, draft.kept, context.states)
    context.sampler.verify(logits, context.tokens, draft.tokens, draft.probs)
    return drafted - started, now(device) - drafted


def _time_head(context: Context, drafter: LayersDrafter) -> float:
    model = context.model
    hidden = torch.zeros(
        1, 1, model.hf_model.config.get_text_config().hidden_size, dtype=model.dtype, device=model.device
    )
    started = now(model.device)
    drafter.logits(context, hidden)
    return now(model.device) - started
