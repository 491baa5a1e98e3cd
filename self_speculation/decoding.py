"""The one decoding loop: propose, verify, accept, cut at a stop, roll back, tell the drafter.

Autoregressive decoding is this loop with a drafter that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .config import UsageError
from .drafters import AdapterDrafter, Context, Draft, Drafter
from .modeling import KeptStates, KVCache, SelfSpeculativeModel, SkipSet
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

    def complete(self) -> Decoded:
        """This text; `KeyboardInterrupt` where Ctrl-C cut it short."""
        if self.stop_reason == "interrupted":
            raise KeyboardInterrupt
        return self


@dataclass(frozen=True)
class DraftAlone:
    """What is taken for the whole model: its first layers, all but the sub-layers in `skip`, or an adapter's draft.

    An adapter of the kind feature goes on from states of the last layer: the whole model reads the prompt for it and
    gives the first token; from there on the adapter goes on from its own states.
    """

    stop: int | None = None
    skip: SkipSet | None = None
    adapter: AdapterDrafter | None = None

    def read(self, model: SelfSpeculativeModel, tokens: torch.Tensor) -> torch.Tensor:
        """Its logits [n, vocabulary] on a text [1, n].

        Raises:
            UsageError: an adapter that cannot read without the whole model.
        """
        cache = model.new_cache(tokens.shape[1])
        if self.adapter is None:
            return model.head(model.run(tokens, cache, 0, stop=self.stop, skip=self.skip))
        return self.adapter.read(model, tokens, cache)


def check_prompts(model: SelfSpeculativeModel, prompts: Iterable[Sequence[int]]) -> None:
    """Raise `UsageError` when a prompt is empty, leaves no position for a new token, or has ids that there are not."""
    prompts = list(prompts)
    for number, prompt in enumerate(prompts, 1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UsageError(f"{which} is empty")
        if len(prompt) >= model.max_positions:
            raise UsageError(f"{which} has {len(prompt)} tokens, the model has {model.max_positions} positions")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < model.vocab_size:
                raise UsageError(f"{which} has the token id {token}, the model has ids 0 to {model.vocab_size - 1}")


class Text:
    """One text that is being decoded: its tokens, its drafter, when it ends, and what it cost.

    Args:
        new_cache: makes the cache, from the tokens it needs room for; the model's own kind when not given.

    Raises:
        UsageError: the prompt is empty, leaves no position for a new token, or has ids that there are not.
    """

    def __init__(
        self,
        model: SelfSpeculativeModel,
        drafter: Drafter,
        prompt: Sequence[int],
        *,
        sampler: Sampler,
        stopper: Stopper,
        num_speculations: int = 0,
        observer: Observer | None = None,
        new_cache: Callable[[int], KVCache] | None = None,
    ):
        check_prompts(model, [prompt])
        self.last_position = model.max_positions - 1
        self.capacity = min(len(prompt) + stopper.budget, model.max_positions) + num_speculations + 1
        cache = (new_cache or model.new_cache)(self.capacity)
        self.context = Context(model, cache, sampler, list(prompt), stopper.end_ids, num_speculations)
        self.drafter, self.stopper, self.observer = drafter, stopper, observer or Observer()
        self.stats = Stats(prompt_tokens=len(prompt))

    def prefill(self, draft_alone: DraftAlone | None) -> None:
        """Run the prompt and draw the first token."""
        context, part = self.context, draft_alone or DraftAlone()
        model = context.model
        depth = part.adapter.depth if part.adapter else self.drafter.depth
        context.states = None if depth is None else KeptStates(depth, self.capacity)
        started = clock(model)
        logits = _prefill(context, part)
        first, _ = context.sampler.draw(logits, context.tokens)
        self.stats.prefill_s = clock(model) - started
        self._add([], 0, [first])
        self.drafter.start(context)

    @property
    def ended(self) -> bool:
        return self.stopper.reason is not None

    def room(self) -> int:
        """How many tokens may be drafted: the budget and the model's positions leave room for one more after them."""
        context = self.context
        return min(context.num_speculations, self.stopper.room - 1, self.last_position - context.position)

    def take(self, draft: Draft, accepted: int, added: int) -> None:
        """Add a verified draft, and the token that the target adds, to the text; counts leave out what a stop cuts."""
        outcome = self._add(draft.tokens, accepted, [*draft.tokens[:accepted], added])
        self.stats.rounds.append(outcome)
        self.drafter.observe(self.context, outcome)
        if not self.ended and self.context.position > self.last_position:
            self.stopper.reason = "length"

    def decoded(self) -> Decoded:
        """What has become of it, once it has ended."""
        self.stats.new_tokens = len(self.stopper.tokens)
        self.observer.on_end(self.stopper)
        assert self.stopper.reason is not None
        return Decoded(self.stopper.tokens, self.stopper.text(), self.stopper.reason, self.stats)

    def _add(self, draft: Sequence[int], accepted: int, block: Sequence[int]) -> Round:
        before = len(self.stopper.tokens)
        used = self.stopper.push(block)
        new = self.stopper.tokens[before:]
        self.context.tokens += new
        self.observer.on_block(draft, min(accepted, used), new, self.stopper)
        if self.ended and used <= accepted:
            return Round(drafted=used, accepted=used, new_tokens=len(new))
        return Round(drafted=len(draft), accepted=accepted, new_tokens=len(new))


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
        UsageError: the prompt is empty, leaves no position for a new token, or has ids that there are not.
    """
    text = Text(
        model, drafter, prompt, sampler=sampler, stopper=stopper, num_speculations=num_speculations, observer=observer
    )
    context, started, compiled = text.context, None, model.compile_seconds
    try:
        text.prefill(draft_alone)
        started = clock(model)
        while not text.ended:
            room = text.room()
            draft = drafter.propose(context, room) if room > 0 else Draft()
            text.observer.on_draft(draft.tokens)
            logits = _verify(context, draft, draft_alone or DraftAlone())
            text.take(draft, *sampler.verify(logits, context.tokens, draft.tokens, draft.probs))
    except KeyboardInterrupt:
        stopper.reason = "interrupted"
    if started is not None:
        text.stats.decode_s = clock(model) - started
    text.stats.compile_s = model.compile_seconds - compiled
    return text.decoded()


def clock(model: SelfSpeculativeModel) -> float:
    """Seconds of a clock that stands still while something is compiled."""
    return now(model.device) - model.compile_seconds


def _prefill(context: Context, part: DraftAlone) -> torch.Tensor:
    """Logits [1, vocabulary] after the prompt."""
    model, prompt = context.model, context.model.ids(context.tokens)
    if part.adapter is not None:
        part.adapter.start(context)
        if not part.adapter.adapter.ahead:
            assert context.states is not None
            context.states.write(0, model.run(prompt, context.cache, 0, stop=part.adapter.depth))
            return _adapter_alone(context, part.adapter)
    return model.prefill(prompt, context.cache, part.stop, part.skip, context.states)


def _verify(context: Context, draft: Draft, part: DraftAlone) -> torch.Tensor:
    """The target's logits after the last token and after each draft, [k + 1, vocabulary]."""
    if part.adapter is not None:
        return _adapter_alone(context, part.adapter)
    model, block = context.model, context.model.ids([context.tokens[-1], *draft.tokens])
    if part.stop is not None or part.skip is not None:
        return model.head(model.run(block, context.cache, context.position, stop=part.stop, skip=part.skip))
    return model.verify(block, context.cache, context.position, draft.kept, context.states)


def _adapter_alone(context: Context, drafter: AdapterDrafter) -> torch.Tensor:
    """Logits [1, vocabulary] after the last token, by the adapter."""
    hidden = drafter.run(context, context.tokens[-1], context.position)
    if drafter.adapter.ahead:
        assert context.states is not None
        context.states.write(context.position, hidden)
    return drafter.logits(context, hidden)
