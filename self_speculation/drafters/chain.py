"""Several drafters, asked in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..modeling import Batch
from ..stats import Round
from .base import Context, Draft, Drafter, Turn


class NoDrafter(Drafter):
    """Proposes nothing: the decoding loop is then ordinary autoregressive decoding."""

    def propose(self, context: Context, limit: int) -> Draft:
        return Draft()


class ChainDrafter(Drafter):
    """Asks its parts in order and takes the first proposal that is not empty."""

    def __init__(self, parts: Sequence[Drafter]):
        self.parts = list(parts)
        self.depth = next((part.depth for part in parts if part.depth is not None), None)
        self.chosen: Drafter | None = None

    def start(self, context: Context) -> None:
        for part in self.parts:
            part.start(context)

    def propose(self, context: Context, limit: int) -> Draft:
        for part in self.parts:
            self.chosen = part
            draft = part.propose(context, limit)
            if draft.tokens:
                return draft
        return Draft()

    @classmethod
    def propose_each(cls, turns: Sequence[Turn], batch: Batch) -> list[Draft]:
        """Each part is asked for the rows that the parts before it had nothing for."""
        drafts = [Draft() for _ in turns]
        chains = [turn.drafter for turn in turns]
        for parts in zip(*(chain.parts for chain in chains), strict=True):  # type: ignore[attr-defined]
            asked = [
                Turn(part, turn.context, 0 if draft.tokens else turn.limit)
                for part, turn, draft in zip(parts, turns, drafts, strict=True)
            ]
            if not any(turn.limit > 0 for turn in asked):
                break
            for row, draft in enumerate(parts[0].propose_each(asked, batch)):
                if asked[row].limit > 0:
                    chains[row].chosen, drafts[row] = parts[row], draft  # type: ignore[attr-defined]
        return drafts

    def observe(self, context: Context, outcome: Round) -> None:
        if self.chosen is not None:
            self.chosen.observe(context, outcome)

    def columns(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.columns().items()}
