"""What the parts of a round cost on this machine, measured, and what acceptance makes drafting worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from .drafters import Context, Draft
from .drafters.layers import EarlyExitDrafter
from .modeling import SelfSpeculativeModel
from .sampling import Sampler
from .stats import now


@dataclass(frozen=True)
class Costs:
    """Seconds, with choosing the tokens included; between the measured points costs are taken as linear.

    Attributes:
        step: one token of autoregressive decoding.
        head: final norm and LM head on one token (part of the others).
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
    most_repeats: int = 9,
) -> Costs:
    """Time real rounds after `tokens`, all kinds in turn so that drift hits them alike; medians count.

    Args:
        tokens: the text before the round; as long as those that will be decoded.
        exits, lengths: exit layers and draft lengths to measure; cells between them are interpolated.
        seconds: about how long to go on once every kind was run three times.
    """
    exits, lengths = sorted(set(exits)), sorted(set(lengths) - {0})
    context = Context(model, model.new_cache(len(tokens) + max(lengths) + 1), sampler, list(tokens))
    model.prefill(model.ids(tokens), context.cache)
    kinds: list[tuple[int, int]] = [(0, 0), *((e, k) for e in exits for k in lengths)]
    times: dict[tuple[int, int], list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for kind in kinds[: 1 + len(lengths)]:  # warm-up
        _time_round(context, *kind)
    started = now(model.device)
    for repeat in range(most_repeats):
        if repeat >= 3 and (now(model.device) - started) / repeat * (repeat + 1) > seconds:
            break
        for kind in kinds:
            times[kind].append(_time_round(context, *kind))
    part = {kind: [median(values) for values in zip(*rows, strict=True)] for kind, rows in times.items()}
    return Costs(
        step=part[0, 0][1],
        head=part[0, 0][2],
        exits=tuple(exits),
        lengths=tuple(lengths),
        draft=tuple(median(part[e, k][0] / k for k in lengths) for e in exits),
        verify=tuple(tuple(part[e, k][1] for k in lengths) for e in exits),
        context=len(tokens),
    )


def _time_round(context: Context, exit_layer: int, length: int) -> tuple[float, float, float]:
    """Seconds of drafting, of verifying and, without a draft, of the head alone."""
    model, device = context.model, context.model.device
    started = now(device)
    draft = EarlyExitDrafter(exit_layer).propose(context, length) if length else Draft()
    drafted = now(device)
    block = model.ids([context.tokens[-1], *draft.tokens])
    logits = model.verify(block, context.cache, context.position, draft.kept)
    context.sampler.verify(logits, context.tokens, draft.tokens, draft.probs)
    verified = now(device)
    head = 0.0
    if not length:
        hidden = torch.zeros(1, 1, model.backbone.config.hidden_size, device=device, dtype=model.dtype)
        begun = now(device)
        model.head(hidden)
        head = now(device) - begun
    return drafted - started, verified - drafted, head
