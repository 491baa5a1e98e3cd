"""What the parts of a round cost on this machine, measured, and what acceptance makes drafting worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .drafters.base import Context
from .drafters.layers import EarlyExitDrafter
from .modeling import ExitStates, SelfSpeculativeModel
from .sampling import Sampler
from .stats import now

DRAFTS = 2  # tokens drafted in a row to time a draft step
QUANTILE = 0.25  # of repeated times: what other programs do to the clock only ever adds


@dataclass(frozen=True)
class Costs:
    """Seconds, with choosing the tokens included; between the measured points costs are taken as linear.

    Attributes:
        step: one token of autoregressive decoding.
        head: final norm and LM head on one token (part of all others).
        exits, lengths: where the others were measured.
        draft: [exits] one drafted token.
        verify: [exits][lengths] verifying a draft of that length, given the states that drafting kept.
        context: tokens before the round.
    """

    step: float
    head: float
    exits: tuple[int, ...]
    lengths: tuple[int, ...]
    draft: tuple[float, ...]
    verify: tuple[tuple[float, ...], ...]
    context: int

    def draft_step(self, exit_layer: int) -> float:
        """Drafting one token with the first `exit_layer` layers."""
        return float(np.interp(exit_layer, self.exits, self.draft))

    def verification(self, exit_layer: int, length: int) -> float:
        """Verifying a draft of `length` tokens."""
        at_exits = [np.interp(length, self.lengths, row) for row in self.verify]
        return float(np.interp(exit_layer, self.exits, at_exits))

    def round(self, exit_layer: int, length: int) -> float:
        """A whole round; without a draft it is a step of autoregressive decoding."""
        if length == 0:
            return self.step
        return length * self.draft_step(exit_layer) + self.verification(exit_layer, length)

    def break_even(self, exit_layer: int, length: int) -> float:
        """The acceptance rate above which rounds of `length` drafts beat autoregressive decoding; above 1, none does.

        A round costs `round / step` target tokens and gives 1 + length x acceptance tokens.
        """
        return (self.round(exit_layer, length) / self.step - 1) / length


def spread(first: int, last: int, count: int) -> tuple[int, ...]:
    """About `count` whole numbers evenly between `first` and `last`, both included."""
    return tuple(sorted({round(value) for value in np.linspace(first, last, min(count, last - first + 1))}))


@torch.inference_mode()
def measure_costs(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    tokens: Sequence[int],
    exits: Sequence[int],
    lengths: Sequence[int],
    *,
    seconds: float = 5.0,
    least_repeats: int = 3,
    most_repeats: int = 15,
) -> Costs:
    """Time steps, drafts and verifications after `tokens`, all in turn so that drift hits them alike.

    Args:
        tokens: the text before the round; as long as those that will be decoded.
        exits, lengths: exit layers and draft lengths to measure; cells between them are interpolated.
        seconds: about how long to go on once everything was timed `least_repeats` times.
    """
    exits, lengths = sorted(set(exits)), sorted(set(lengths) - {0})
    most = max(lengths)
    context = Context(model, model.new_cache(len(tokens) + most + 1), sampler, list(tokens), (), most)
    model.prefill(model.ids(tokens), context.cache)
    calls = _calls(context, exits, lengths)
    for call in (calls[kind] for kind in list(calls)[: 2 + len(lengths)]):
        call()  # warm-up
    times: dict[tuple[str, int, int], list[float]] = {kind: [] for kind in calls}
    begun = now(model.device)
    for repeat in range(most_repeats):
        if repeat >= least_repeats and (now(model.device) - begun) / repeat * (repeat + 1) > seconds:
            break
        for kind, call in calls.items():
            started = now(model.device)
            call()
            times[kind].append(now(model.device) - started)
    part = {kind: float(np.quantile(values, QUANTILE)) for kind, values in times.items()}
    return Costs(
        step=part["step", 0, 0],
        head=part["head", 0, 0],
        exits=tuple(exits),
        lengths=tuple(lengths),
        draft=tuple(part["draft", e, DRAFTS] / DRAFTS for e in exits),
        verify=tuple(tuple(part["verify", e, k] for k in lengths) for e in exits),
        context=len(tokens),
    )


def _calls(
    context: Context, exits: Sequence[int], lengths: Sequence[int]
) -> dict[tuple[str, int, int], Callable[[], object]]:
    """What is timed: (part, exit layer, length) -> a call that does it as the decoding loop does."""
    model, sampler, position = context.model, context.sampler, context.position
    filler = [context.tokens[i % len(context.tokens)] for i in range(max(lengths))]

    def verify(drafts: list[int], probs: torch.Tensor | None, kept: ExitStates | None) -> None:
        block = model.ids([context.tokens[-1], *drafts])
        sampler.verify(model.verify(block, context.cache, position, kept), context.tokens, drafts, probs)

    states = model.run(model.ids(context.tokens[-1:]), context.cache, position)
    calls: dict[tuple[str, int, int], Callable[[], object]] = {
        ("step", 0, 0): partial(verify, [], None, None),
        ("head", 0, 0): partial(model.head, states),
    }
    for exit_layer in exits:
        drafter = EarlyExitDrafter(exit_layer)
        calls["draft", exit_layer, DRAFTS] = partial(drafter.propose, context, DRAFTS)
        block = model.ids([context.tokens[-1], *filler[:-1]])
        hidden = model.run(block, context.cache, position, stop=exit_layer)
        probs = None
        if not sampler.greedy:
            probs = model.head(hidden).float().softmax(-1)
        for length in lengths:
            kept = ExitStates(exit_layer, hidden[:, :length])
            few = None if probs is None else probs[:length]
            calls["verify", exit_layer, length] = partial(verify, filler[:length], few, kept)
    return calls
