"""Many continuations of one cached text at once, each from a place of its own (as tree attention does)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .cache import KVCache
from .masks import as_mask
from .model import SelfSpeculativeModel


def branch(
    model: SelfSpeculativeModel,
    cache: KVCache,
    text: Sequence[int],
    starts: Sequence[int],
    layers: Sequence[nn.Module],
) -> Branches | OneByOne:
    """Continuations of `text`, whose keys and values `cache` (made by `branching_cache`) holds.

    Branch w leaves the text after its first `starts[w]` tokens and runs `layers`, the model's first layers or views of
    them: a branch of a draft attends to the target's keys and values of the text before it and to its own.
    """
    if Branches.possible(model):
        return Branches(model, cache, len(text), starts, layers)
    return OneByOne(model, cache, text, starts, layers)


def branching_cache(model: SelfSpeculativeModel, capacity: int) -> KVCache:
    """A cache for a text that is to be branched, and for the text alone."""
    windows = [None] * model.num_layers if Branches.possible(model) else model.backbone.windows
    return KVCache(windows, capacity)  # where branches stand behind the text, windows are a matter of masks


class Branches:
    """All branches in one pass a step. `possible` says whether the model allows this: its layers must be called
    directly, with masks that may be given. New keys and values are put behind the text, so the text stays as it is.
    """

    def __init__(
        self,
        model: SelfSpeculativeModel,
        cache: KVCache,
        length: int,
        starts: Sequence[int],
        layers: Sequence[nn.Module],
    ):
        direct = model.backbone.direct
        assert direct is not None
        self.model, self.direct, self.cache, self.layers = model, direct, cache, layers
        self.positions = torch.tensor(starts, device=model.device)  # [branches], of the next token
        self.key_positions = torch.arange(length, device=model.device)  # [keys]
        self.visible = self.key_positions < self.positions[:, None]  # [branches, keys]

    @staticmethod
    def possible(model: SelfSpeculativeModel) -> bool:
        """Whether all branches of a text can go on in one pass."""
        direct = model.backbone.direct
        return direct is not None and direct.attention in ("sdpa", "eager")

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these branches only."""
        self.positions, self.visible = self.positions[rows], self.visible[rows]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Add one token to every branch; the hidden states [1, branches, H] leaving the layers."""
        direct, positions = self.direct, self.positions
        own = torch.eye(len(tokens), dtype=torch.bool, device=positions.device)
        self.cache.position = len(self.key_positions)
        self.visible = torch.cat([self.visible, own], dim=1)
        self.key_positions = torch.cat([self.key_positions, positions])
        self.positions = positions + 1
        hidden = direct.embed(self.model.ids(tokens))
        direct.cover(int(positions.max()) + 1)
        rotary = [tuple(part[:, positions] for part in table) for table in direct.tables]
        masks: dict[int | None, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            window = direct.windows[index]
            if window not in masks:
                masks[window] = self._mask(positions, window, hidden)
            hidden = direct.call(index, layer, hidden, masks[window], rotary, positions[None], self.cache)
        return hidden

    def _mask(self, positions: torch.Tensor, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """[1, 1, branches, keys], as `DirectLayers.mask` makes it."""
        visible = self.visible
        if window is not None:
            visible = visible & (self.key_positions > positions[:, None] - window)
        return as_mask(visible[None, None], like, self.direct.attention)


class OneByOne:
    """The same for any model, branch after branch. Each overwrites the text from its own start on, so the latest start
    goes first, and every step begins by putting the text back."""

    def __init__(
        self,
        model: SelfSpeculativeModel,
        cache: KVCache,
        text: Sequence[int],
        starts: Sequence[int],
        layers: Sequence[nn.Module],
    ):
        self.model, self.cache, self.text, self.layers = model, cache, text, list(layers)
        self.branches: list[tuple[int, list[int]]] = [(start, []) for start in starts]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these branches only."""
        self.branches = [self.branches[row] for row in rows]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Add one token to every branch; the hidden states [1, branches, H] leaving the layers."""
        model = self.model
        model.run(model.ids(self.text), self.cache, 0)
        hidden = [torch.empty(0)] * len(tokens)
        for row in sorted(range(len(tokens)), key=lambda row: -self.branches[row][0]):
            start, written = self.branches[row]
            written.append(tokens[row])
            ran = model.backbone.run(model.ids(written), self.cache, start, 0, self.layers)
            hidden[row] = ran[:, -1:]
        return torch.cat(hidden, dim=1)
