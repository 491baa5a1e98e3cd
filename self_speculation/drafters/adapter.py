"""Draft through an adapter, a small module trained beside a frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..config import UsageError
from ..modeling import Adapter, Batch, DraftHead, ExitStates, KVCache, SelfSpeculativeModel
from .base import Context, Draft, Turn
from .draft_exit import DraftExit
from .layers import LayersDrafter

ROOM = 256  # tokens beyond the prompt that the adapter's cache has room for at first


class AdapterDrafter(LayersDrafter):
    """Runs the layers in front of the adapter, the adapter, then norm and head (`modeling.adapter` names the kinds).

    The adapter has a key/value cache of its own. What it wrote while drafting counts until verification; at the next
    draft it first runs over the model's own states of the tokens that were verified since, whoever drafted them. Its
    head, where none is given, scores the tokens that it was trained for.
    """

    depth: int

    def __init__(self, adapter: Adapter, draft_exit: DraftExit | None = None, head: DraftHead | None = None):
        super().__init__(draft_exit, head)
        self.adapter, self.depth = adapter, adapter.shape.exit_layer

    def start(self, context: Context) -> None:
        self._own_head(context.model)
        super().start(context)
        self.cache = context.model.new_cache(len(context.tokens) + ROOM)
        self.known = 0  # positions of the adapter's cache that come from the model's own states
        self.exits: list[torch.Tensor] = []
        self.last = torch.empty(0)

    def _own_head(self, model: SelfSpeculativeModel) -> DraftHead:
        if self.head is None:
            self.head = model.draft_head(self.adapter.token_ids)
        return self.head

    def part(self) -> dict[str, Any]:
        return {"stop": self.depth}

    def run(self, context: Context, token: int, position: int) -> torch.Tensor:
        begins = position == context.position
        if self.adapter.ahead:
            start, tokens, states = position - 1, [token], self.last
            if begins:
                assert context.states is not None
                start = min(self.known, position - 1)  # the last one again, where nothing was verified since
                tokens, states = context.tokens[start + 1 :], context.states.read(start, position)
        else:
            start, tokens = position, [token]
            states = super().run(context, token, position)
            self.exits = [states] if begins else [*self.exits, states]
            if begins and self.known < position:
                assert context.states is not None
                start = self.known
                tokens = context.tokens[start:]
                states = torch.cat([context.states.read(start, position), states], dim=1)
        result = context.model.run_adapter(self.adapter, context.model.ids(tokens), self.cache, start, states)
        if begins:
            self.known = start + len(tokens)
        self.last = result[:, -1:]
        return self.last

    def read(self, model: SelfSpeculativeModel, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """The draft's logits [n, vocabulary] on a text [1, n]."""
        if self.adapter.ahead:
            raise UsageError(
                f"--adapter {self.adapter.name}: an adapter of the kind feature goes on from states of the whole "
                "model, so it cannot score a text in its place"
            )
        states = model.run(tokens, cache, 0, stop=self.depth)
        own = model.new_cache(tokens.shape[1])
        return self._own_head(model).whole(model.run_adapter(self.adapter, tokens, own, 0, states))

    @classmethod
    def propose_each(cls, turns: Sequence[Turn], batch: Batch) -> list[Draft]:
        """One row after the other: each has states and an adapter's cache of its own."""
        return super(LayersDrafter, cls).propose_each(turns, batch)

    def keep(self, context: Context, states: list[torch.Tensor]) -> ExitStates | None:
        return None if self.adapter.ahead else ExitStates(self.adapter.shape.exit_layer, torch.cat(self.exits, dim=1))

    def columns(self) -> dict[str, Any]:
        exit_layer = {} if self.adapter.ahead else {"exit_layer": self.depth}
        return {**super().columns(), "adapter": self.adapter.name, **exit_layer}
