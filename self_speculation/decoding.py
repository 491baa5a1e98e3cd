"""The one decoding loop: propose, verify, accept, cut at a stop, roll back, tell the drafter.

Autoregressive decoding is this loop with a drafter that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .config import UsageError
from .drafters import Context, Draft, Drafter
from .modeling import SelfSpeculativeModel, SkipSet
from .sampling import Sampler
from .stats import Round, Stats, now
from .stopping import Stopper


class Observer:
    """Is told what the loop does as it does it; all methods do nothing until overridden. Streamers are observers."""

    def on_draft(self, draft: Sequence[int]) -> None:
        """These tokens were drafted and are about to be verified."""

    def on_block(self, draft: Sequence[int], accepted: int, block: Sequence[int], stopper: Stopper) -> None:
        """`block` (drafts accepted, then the target's own token, cut at a stop) has been added to the text."""

    def on_end(self, stopper: Stopper) -> None:
        """The text is complete."""


@dataclass(frozen=True)
class Decoded:
    """One decoded text.

    Attributes:
        tokens: new token ids, without the closing end-of-sequence or stop id.
        text: their text, cut before a stop string.
        stop_reason: eos, stop_id, stop_string, budget, length (the model's positions ran out) or interrupted.
    """

    tokens: list[int]
    text: str
    stop_reason: str
    stats: Stats


@dataclass(frozen=True)
class DraftAlone:
    """The part of the model that is taken for the whole: its first layers, or all but the sub-layers in `skip`."""

    stop: int | None = None
    skip: SkipSet | None = None


@torch.inference_mode()
def decode(
    model: SelfSpeculativeModel,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    sampler: Sampler,
    stopper: Stopper,
    num_speculations: int = 0,
    draft_alone: DraftAlone | None = None,
    observer: Observer | None = None,
) -> Decoded:
    """Decode one prompt until `stopper` ends the text. Ctrl-C ends it too, keeping what is there.

    Args:
        prompt: token ids, at least one.
        num_speculations: most tokens drafted a round.
        draft_alone: take this part of the model for the whole.

    Raises:
        UsageError: the prompt is empty or leaves no position for a new token.
    """
    observer = observer or Observer()
    if not prompt:
        raise UsageError("the prompt is empty")
    if len(prompt) >= model.max_positions:
        raise UsageError(f"the prompt has {len(prompt)} tokens, the model has {model.max_positions} positions")
    last_position = model.max_positions - 1
    capacity = min(len(prompt) + stopper.budget, model.max_positions) + num_speculations + 1
    context = Context(model, model.new_cache(capacity), sampler, list(prompt), stopper.end_ids, num_speculations)
    stats = Stats(prompt_tokens=len(prompt))
    started = now(model.device)
    try:
        part = draft_alone or DraftAlone()
        logits = model.prefill(model.ids(prompt), context.cache, part.stop, part.skip)
        first, _ = sampler.draw(logits, context.tokens)
        stats.prefill_s, started = now(model.device) - started, now(model.device)
        _take(context, stopper, observer, [], 0, [first])
        drafter.start(context)
        while stopper.reason is None:
            room = min(num_speculations, stopper.room - 1, last_position - context.position)
            draft = drafter.propose(context, room) if room > 0 else Draft()
            observer.on_draft(draft.tokens)
            logits = _verify(model, context, draft, draft_alone)
            accepted, added = sampler.verify(logits, context.tokens, draft.tokens, draft.probs)
            outcome = _take(context, stopper, observer, draft.tokens, accepted, [*draft.tokens[:accepted], added])
            stats.rounds.append(outcome)
            drafter.observe(context, outcome)
            if stopper.reason is None and context.position > last_position:
                stopper.reason = "length"
    except KeyboardInterrupt:
        stopper.reason = "interrupted"
    if stats.prefill_s:
        stats.decode_s = now(model.device) - started
    stats.new_tokens = len(stopper.tokens)
    observer.on_end(stopper)
    return Decoded(stopper.tokens, stopper.text(), stopper.reason, stats)


def _verify(
    model: SelfSpeculativeModel, context: Context, draft: Draft, draft_alone: DraftAlone | None
) -> torch.Tensor:
    """The target's logits after the last token and after each draft, [k + 1, vocabulary]."""
    block = model.ids([context.tokens[-1], *draft.tokens])
    if draft_alone is not None:
        part = model.run(block, context.cache, context.position, stop=draft_alone.stop, skip=draft_alone.skip)
        return model.head(part)
    return model.verify(block, context.cache, context.position, draft.kept)


def _take(
    context: Context,
    stopper: Stopper,
    observer: Observer,
    draft: Sequence[int],
    accepted: int,
    block: Sequence[int],
) -> Round:
    """Add a verified block to the text, up to a stop; counts leave out what the stop threw away."""
    before = len(stopper.tokens)
    used = stopper.push(block)
    new = stopper.tokens[before:]
    context.tokens += new
    observer.on_block(draft, min(accepted, used), new, stopper)
    if stopper.reason is not None and used <= accepted:
        return Round(drafted=used, accepted=used, new_tokens=len(new))
    return Round(drafted=len(draft), accepted=accepted, new_tokens=len(new))
