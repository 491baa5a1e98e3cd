"""Drafters that run part of the model's own layers for each token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..modeling import Batch, DraftHead, ExitStates, SkipSet
from ..sampling import draw_each
from ..stats import Round
from .base import Context, Draft, Drafter, Turn
from .draft_exit import DraftExit


class LayersDrafter(Drafter):
    """Draws tokens one after the other from a part of the model, until `limit`, an end, or `draft_exit` stops it.

    Args:
        head: takes the place of the model's.
    """

    def __init__(self, draft_exit: DraftExit | None = None, head: DraftHead | None = None):
        self.draft_exit, self.head = draft_exit, head
        self.limit = 0

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """Which part of the model drafts, as arguments of its `run`."""

    def run(self, context: Context, token: int, position: int) -> torch.Tensor:
        """Hidden states [1, 1, H], before the final norm, of `token` at `position`."""
        return context.model.run(context.model.ids([token]), context.cache, position, **self.part())

    def logits(self, context: Context, hidden: torch.Tensor) -> torch.Tensor:
        """[1, vocabulary] logits from what `run` returned."""
        return context.model.head(hidden) if self.head is None else self.head.whole(hidden).to(context.model.device)

    def keep(self, context: Context, states: list[torch.Tensor]) -> ExitStates | None:
        """What verification can go on from."""
        return None

    def start(self, context: Context) -> None:
        if self.draft_exit is not None:
            self.draft_exit.start()
        if self.head is not None:
            self.head.start()

    def propose(self, context: Context, limit: int) -> Draft:
        self.begin(context, limit)
        position = context.position
        tokens: list[int] = []
        probs: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        last = context.tokens[-1]
        while len(tokens) < limit:
            hidden = self.run(context, last, position + len(tokens))
            logits = self.logits(context, hidden)
            last, distribution = context.sampler.draw(logits, [*context.tokens, *tokens])
            tokens.append(last)
            states.append(hidden)
            if distribution is not None:
                probs.append(distribution)
            if last in context.end_ids or self.doubts(logits, last):
                break
        return Draft(tokens, torch.stack(probs) if probs else None, self.keep(context, states))

    @classmethod
    def propose_each(cls, turns: Sequence[Turn], batch: Batch) -> list[Draft]:
        """Token by token for all rows at once, until the last of them has enough; the others are padded."""
        drafters: list[Any] = [turn.drafter for turn in turns]
        part = drafters[0].part()
        tokens: list[list[int]] = [[] for _ in turns]
        probs: list[list[torch.Tensor]] = [[] for _ in turns]
        states: list[torch.Tensor] = []
        for turn in turns:
            turn.drafter.begin(turn.context, turn.limit)  # type: ignore[attr-defined]
        going = [row for row, turn in enumerate(turns) if turn.limit > 0]
        while going:
            last = [[(tokens[row] or turn.context.tokens)[-1]] for row, turn in enumerate(turns)]
            states.append(batch.run(last, [turn.context.position + len(states) for turn in turns], **part))
            contexts = [turns[row].context for row in going]
            if drafters[0].head is None:
                logits = batch.head(states[-1], [int(row in going) for row in range(len(turns))])
            else:
                rows = zip(going, contexts, strict=True)
                logits = torch.cat([drafters[row].logits(context, states[-1][row : row + 1]) for row, context in rows])
            prefixes = [[*context.tokens, *tokens[row]] for row, context in zip(going, contexts, strict=True)]
            drawn = draw_each([context.sampler for context in contexts], logits, prefixes)
            for place, (row, (token, distribution)) in enumerate(zip(list(going), drawn, strict=True)):
                tokens[row].append(token)
                if distribution is not None:
                    probs[row].append(distribution)
                ended = len(tokens[row]) == turns[row].limit or token in turns[row].context.end_ids
                if ended or drafters[row].doubts(logits[place : place + 1], token):
                    going.remove(row)
        if not states:
            return [Draft() for _ in turns]
        hidden = torch.cat(states, dim=1)
        return [
            Draft(
                tokens[row],
                torch.stack(probs[row]) if probs[row] else None,
                drafter.keep(turns[row].context, [hidden[row : row + 1, : len(tokens[row])]]) if tokens[row] else None,
            )
            for row, drafter in enumerate(drafters)
        ]

    def begin(self, context: Context, limit: int) -> None:
        """A draft of up to `limit` tokens begins."""
        self.limit = limit
        if self.head is not None:
            self.head.follow(context.tokens)

    def doubts(self, logits: torch.Tensor, token: int) -> bool:
        """Whether the draft ends with this token, by its logits [1, vocabulary]."""
        return self.draft_exit is not None and self.draft_exit.stops(confidence(logits, token))

    def observe(self, context: Context, outcome: Round) -> None:
        if self.draft_exit is not None and outcome.drafted and self.limit == context.num_speculations:
            self.draft_exit.observe(outcome.drafted, outcome.accepted, self.limit)

    def columns(self) -> dict[str, Any]:
        threshold = {} if self.draft_exit is None else {"draft_exit_threshold": self.draft_exit.threshold}
        size = {"draft_vocabulary": self.head.size} if self.head is not None and self.head.size else {}
        return threshold | size


class EarlyExitDrafter(LayersDrafter):
    """Runs layers 0..exit_layer-1 (LayerSkip, arXiv 2404.16710, section 4.3).

    Keys and values of these layers stay in the cache, and the hidden states that leave them are handed on, so that
    verification runs only the layers from `exit_layer` on.
    """

    def __init__(self, exit_layer: int, draft_exit: DraftExit | None = None, head: DraftHead | None = None):
        super().__init__(draft_exit, head)
        self.exit_layer = exit_layer

    def part(self) -> dict[str, Any]:
        return {"stop": self.exit_layer}

    def keep(self, context: Context, states: list[torch.Tensor]) -> ExitStates:
        return ExitStates(self.exit_layer, torch.cat(states, dim=1))


class SkipLayerDrafter(LayersDrafter):
    """Runs all layers but the sub-layers in `skip` (Draft & Verify, arXiv 2309.08168).

    It attends to the target's own keys and values of the past. The layers before the first skipped sub-layer are the
    target's own, so the hidden states that leave them are handed on, as an early exit does, and verification runs only
    the layers from there on, overwriting what the draft wrote in them. `skip` may be changed between rounds.
    """

    def __init__(self, skip: SkipSet, draft_exit: DraftExit | None = None, head: DraftHead | None = None):
        super().__init__(draft_exit, head)
        self.skip = skip
        self.shared: list[torch.Tensor] = []  # states [1, 1, H] leaving the target's own layers, a drafted token each

    def part(self) -> dict[str, Any]:
        return {"skip": self.skip}

    def begin(self, context: Context, limit: int) -> None:
        super().begin(context, limit)
        self.shared = []

    def run(self, context: Context, token: int, position: int) -> torch.Tensor:
        model, first = context.model, self.skip.shared(context.model.num_layers)
        if first in (0, model.num_layers):
            return super().run(context, token, position)
        ids = model.ids([token])
        self.shared.append(model.run(ids, context.cache, position, stop=first))
        return model.run(ids, context.cache, position, start=first, hidden=self.shared[-1], skip=self.skip)

    def keep(self, context: Context, states: list[torch.Tensor]) -> ExitStates | None:
        first = self.skip.shared(context.model.num_layers)
        if first < context.model.num_layers:
            states = self.shared  # none in a batch, whose rows have run together
        return ExitStates(first, torch.cat(states, dim=1)) if states else None

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), **self.skip.columns()}


def confidence(logits: torch.Tensor, token: int) -> float:
    """The raw probability at temperature 1 of `token`, by logits [1, vocabulary]."""
    logits = logits.float()
    return float(torch.exp(logits[0, token] - logits[0].logsumexp(0)))
