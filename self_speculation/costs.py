"""What the parts of a round cost on this machine, measured, and what acceptance makes drafting worth it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .drafters.base import Context, Draft
from .drafters.layers import EarlyExitDrafter
from .modeling import SelfSpeculativeModel
from .sampling import Sampler
from .stats import now

QUANTILE = 0.25  # of repeated times: what other programs do to the clock only ever adds


@dataclass(frozen=True)
class Costs:
    """Seconds, with choosing the tokens included; between the measured points costs are taken as linear.

    Attributes:
        step: one token of autoregressive decoding.
        head: final norm and LM head on one token (part of all others).
        exits, lengths: where the others were measured.
        draft: [exits][lengths] drafting so many tokens.
        verify: [exits][lengths] verifying them, given the states that drafting kept.
        context: tokens before the round.
    """

    step: float
    head: float
    exits: tuple[int, ...]
    lengths: tuple[int, ...]
    draft: tuple[tuple[float, ...], ...]
    verify: tuple[tuple[float, ...], ...]
    context: int

    def draft_step(self, exit_layer: int, length: int = 1) -> float:
        """Drafting one of `length` tokens with the first `exit_layer` layers."""
        return self._between(self.draft, exit_layer, length) / length

    def verification(self, exit_layer: int, length: int) -> float:
        """Verifying a draft of `length` tokens."""
        return self._between(self.verify, exit_layer, length)

    def round(self, exit_layer: int, length: int) -> float:
        """A whole round; without a draft it is a step of autoregressive decoding."""
        if length == 0:
            return self.step
        return length * self.draft_step(exit_layer, length) + self.verification(exit_layer, length)

    def break_even(self, exit_layer: int, length: int) -> float:
        """The acceptance rate above which rounds of `length` drafts beat autoregressive decoding; above 1, none does.

        A round costs `round / step` target tokens and gives 1 + length x acceptance tokens.
        """
        return (self.round(exit_layer, length) / self.step - 1) / length

    def _between(self, table: Sequence[Sequence[float]], exit_layer: int, length: int) -> float:
        """`table` at (exit_layer, length), linear between its points; drafts shorter than any measured go to 0."""
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
    exits: Sequence[int],
    lengths: Sequence[int],
    *,
    seconds: float = 5.0,
    least_repeats: int = 3,
    most_repeats: int = 25,
) -> Costs:
    """Time rounds after `tokens` as the decoding loop plays them, all kinds in turn so that drift hits them alike.

    Args:
        tokens: the text before the round; as long as those that will be decoded.
        exits, lengths: exit layers and draft lengths to measure; cells between them are interpolated. Length 1 is
            always measured.
        seconds: about how long to go on once everything was timed `least_repeats` times.
    """
    exits, lengths = sorted(set(exits)), sorted({1, *lengths} - {0})
    context = Context(model, model.new_cache(len(tokens) + lengths[-1] + 1), sampler, list(tokens), (), lengths[-1])
    model.prefill(model.ids(tokens), context.cache)
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    begun = now(model.device)
    for repeat in range(most_repeats + 1):
        if repeat > least_repeats and (now(model.device) - begun) / repeat * (repeat + 1) > seconds:
            break
        if repeat == 1:
            times.clear()  # the first repeat warmed up
        for exit_layer in exits:
            drafter = EarlyExitDrafter(exit_layer)
            _play(context, None, 0)  # in decoding, a step follows a step
            times["step", 0, 0] += [_play(context, None, 0)[1] for _ in range(2)]
            for length in lengths:
                draft, verify = _play(context, drafter, length)
                times["draft", exit_layer, length].append(draft)
                times["verify", exit_layer, length].append(verify)
        times["head", 0, 0].append(_time_head(model))
    part = {kind: float(np.quantile(values, QUANTILE)) for kind, values in times.items()}
    return Costs(
        step=part["step", 0, 0],
        head=part["head", 0, 0],
        exits=tuple(exits),
        lengths=tuple(lengths),
        draft=tuple(tuple(part["draft", e, k] for k in lengths) for e in exits),
        verify=tuple(tuple(part["verify", e, k] for k in lengths) for e in exits),
        context=len(tokens),
    )


def _play(context: Context, drafter: EarlyExitDrafter | None, length: int) -> tuple[float, float]:
    """Seconds of drafting `length` tokens, and of verifying them; None drafts nothing."""
    model, device = context.model, context.model.device
    started = now(device)
    draft = drafter.propose(context, length) if drafter else Draft()
    drafted = now(device) if drafter else started
    block = model.ids([context.tokens[-1], *draft.tokens])
    logits = model.verify(block, context.cache, context.position, draft.kept)
    context.sampler.verify(logits, context.tokens, draft.tokens, draft.probs)
    return drafted - started, now(device) - drafted


def _time_head(model: SelfSpeculativeModel) -> float:
    hidden = torch.zeros(
        1, 1, model.hf_model.config.get_text_config().hidden_size, dtype=model.dtype, device=model.device
    )
    started = now(model.device)
    model.head(hidden)
    return now(model.device) - started
