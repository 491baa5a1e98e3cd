"""A model whose logits are looked up in tables, in place of `SelfSpeculativeModel`: exact, fast, and easy to oppose.

Hidden states are logits. Part of the layers gives the draft's table, all of them give the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from self_speculation.modeling import OUTSIDE, DraftVocabulary

VOCAB = 16
UNLIKELY = -60.0

Table = Callable[[Sequence[int]], torch.Tensor]  # tokens so far -> logits [vocabulary] of the next


@dataclass
class TableCache:
    tokens: list[int] = field(default_factory=list)


class TableHead:
    """`DraftHead` where hidden states are logits."""

    def __init__(self, token_ids: torch.Tensor | None):
        self.token_ids = token_ids
        self.vocabulary = DraftVocabulary(range(VOCAB) if token_ids is None else token_ids.tolist())

    def start(self) -> None:
        self.vocabulary.start()

    def follow(self, tokens: Sequence[int]) -> None:
        self.vocabulary.follow(tokens)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full_like(hidden[0], OUTSIDE)
        logits[:, self.vocabulary.ids] = hidden[0][:, self.vocabulary.ids]
        return logits


@dataclass
class TableModel:
    """The methods of `SelfSpeculativeModel` that decoding and drafters use."""

    target: Table
    draft: Table
    max_positions: int = 1 << 20
    num_layers: int = 4
    vocab_size: int = VOCAB
    device: torch.device = torch.device("cpu")
    compile_seconds: float = 0.0

    def check_exit_layer(self, exit_layer: int) -> None:
        assert 1 <= exit_layer < self.num_layers

    def new_cache(self, capacity: int) -> Any:
        return TableCache()

    def ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(tokens)])

    def run(
        self, input_ids: torch.Tensor, cache: Any, position: int, start: int = 0, stop: int | None = None,
        hidden: torch.Tensor | None = None, skip: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        table = self.target if stop is None and skip is None else self.draft
        assert len(cache.tokens) >= position, "positions must not be left out"
        cache.tokens[position:] = input_ids[0].tolist()
        rows = [table(cache.tokens[: position + i + 1]) for i in range(input_ids.shape[1])]
        return torch.stack(rows)[None]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[0]

    def prefill(
        self, input_ids: torch.Tensor, cache: Any, stop: int | None = None, skip: Any = None, states: Any = None
    ) -> torch.Tensor:
        hidden = self.run(input_ids, cache, 0, stop=stop, skip=skip)
        if states is not None:
            states.write(0, hidden)
        return self.head(hidden[:, -1:])

    def verify(
        self, input_ids: torch.Tensor, cache: Any, position: int, kept: Any = None, states: Any = None
    ) -> torch.Tensor:
        if kept is not None:
            assert 1 <= kept.hidden.shape[1] <= input_ids.shape[1]
        hidden = self.run(input_ids, cache, position)
        if states is not None:
            states.write(position, hidden)
        return self.head(hidden)

    def run_adapter(
        self, adapter: Any, tokens: torch.Tensor, cache: Any, position: int, states: torch.Tensor
    ) -> torch.Tensor:
        """The draft's table, by the tokens that the adapter has seen."""
        assert states.shape[1] == tokens.shape[1]
        return self.run(tokens, cache, position, stop=1)

    def draft_head(self, token_ids: Any) -> Any:
        return TableHead(token_ids)


def random_tables(seed: int = 0, support: int = 3) -> tuple[Table, Table]:
    """Target and draft that look at the last two tokens.

    Each gives `support` tokens of 16 a real chance; the draft shares all but one of them, with other probabilities.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = torch.full((2, VOCAB, VOCAB, VOCAB), UNLIKELY, dtype=torch.float64)
    for first in range(VOCAB):
        for second in range(VOCAB):
            likely = torch.randperm(VOCAB, generator=generator)[: support + 1]
            for table, ids in ((0, likely[:-1]), (1, likely[1:])):
                logits = torch.randn(support, generator=generator, dtype=torch.float64)
                tables[table, first, second, ids] = logits + (second % 3)  # positive and negative: penalties differ

    def look_up(table: torch.Tensor) -> Table:
        return lambda tokens: table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]

    return look_up(tables[0]), look_up(tables[1])
