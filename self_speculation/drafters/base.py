"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..modeling import Batch, ExitStates, KeptStates, KVCache, SelfSpeculativeModel
from ..sampling import Sampler
from ..stats import Round


@dataclass
class Context:
    """One text being decoded, as a drafter sees it.

    `tokens` are the prompt and all new tokens. The cache holds keys and values of all but the last of them.
    """

    model: SelfSpeculativeModel
    cache: KVCache
    sampler: Sampler
    tokens: list[int]
    end_ids: Collection[int] = ()  # drafting past one of these is in vain
    num_speculations: int = 0  # most tokens drafted a round; near the end of the budget fewer are asked for
    states: KeptStates | None = None  # of all tokens but the last, where the drafter has a `depth`

    @property
    def position(self) -> int:
        """Where the last token, which no pass has seen yet, will stand."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Draft:
    """Proposed tokens.

    Attributes:
        tokens: k token ids.
        probs: the distributions [k, vocabulary] that they were drawn from; None for point masses.
        kept: hidden states that verification can go on from.
    """

    tokens: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None
    kept: ExitStates | None = None


@dataclass(frozen=True)
class Turn:
    """A row of a batch, with a drafter of its own, is asked for up to `limit` tokens; 0 asks for none."""

    drafter: Drafter
    context: Context
    limit: int


class Drafter(ABC):
    """Proposes tokens that the target then verifies in one pass.

    Attributes:
        depth: number of the first layers behind which it wants the hidden states of all verified tokens kept; None
            keeps nothing.
    """

    depth: int | None = None

    def start(self, context: Context) -> None:
        """A new prompt begins; forget the one before."""

    @abstractmethod
    def propose(self, context: Context, limit: int) -> Draft:
        """Up to `limit` (at least 1) tokens that may follow `context.tokens`.

        It may write to the cache at `context.position` and after; verification overwrites that.
        """

    @classmethod
    def propose_each(cls, turns: Sequence[Turn], batch: Batch) -> list[Draft]:
        """`propose` for every row of a batch, whose drafters are alike: here one row after the other."""
        return [turn.drafter.propose(turn.context, turn.limit) if turn.limit > 0 else Draft() for turn in turns]

    def observe(self, context: Context, outcome: Round) -> None:
        """What came of the last proposal; `context.tokens` has grown."""

    def columns(self) -> dict[str, Any]:
        """What a result row should know of the drafter's state after a text."""
        return {}
