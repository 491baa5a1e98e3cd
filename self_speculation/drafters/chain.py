"""Several drafters, asked in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..stats import Round
from .base import Context, Draft, Drafter


class NoDrafter(Drafter):
    """Proposes nothing: the decoding loop is then ordinary autoregressive decoding."""

    def propose(self, context: Context, limit: int) -> Draft:
        return Draft()


class ChainDrafter(Drafter):
    """Asks its parts in order and takes the first proposal that is not empty."""

    def __init__(self, parts: Sequence[Drafter]):
        self.parts = list(parts)
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

    def observe(self, context: Context, outcome: Round) -> None:
        if self.chosen is not None:
            self.chosen.observe(context, outcome)

    def columns(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.columns().items()}
