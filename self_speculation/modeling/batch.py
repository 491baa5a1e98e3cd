"""Rows of different lengths run through the model's layers at once, over one cache.

Each row has positions and a mask of its own, so what a row computes does not depend on the others. Rows are padded on
the right to the longest; what padding writes to the cache lies behind a row's text and is overwritten before any token
attends to it, as all that is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache import KVCache, PositionedLayer
from .direct import layer_windows
from .masks import as_mask, visible_keys
from .model import ExitStates, KeptStates, SelfSpeculativeModel
from .skip import SkipSet


class BatchLayer(CacheLayerMixin):
    """Keys and values of one layer for all rows, each [slots, heads, capacity, head_dim].

    They begin as zeros: attention gives keys behind a row's end no weight, but no weight times NaN would be NaN.
    """

    keys: torch.Tensor  # set at the first write
    values: torch.Tensor
    is_sliding = False

    def __init__(self, batch: BatchCache, window: int | None):
        super().__init__()
        self.batch, self.window = batch, window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self.batch.slots, states.shape[1], self.batch.capacity, states.shape[3])
            setattr(self, name, states.new_zeros(shape))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, heads, n, head_dim] at the rows' places; return all that any of the new tokens may attend to."""
        batch, rows = self.batch, key_states.shape[0]
        self.reserve(batch.end)
        index = torch.arange(rows, device=key_states.device)[:, None]
        places = batch.places.to(key_states.device)
        self.keys[index, :, places] = key_states.transpose(1, 2)
        self.values[index, :, places] = value_states.transpose(1, 2)
        visible = slice(batch.first_visible(self.window), batch.end)
        return self.keys[:rows, :, visible], self.values[:rows, :, visible]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens a row."""
        if length <= self.keys.shape[2]:
            return
        capacity = max(length, self.batch.capacity, self.keys.shape[2] * 3 // 2)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def move(self, source: int, target: int, length: int) -> None:
        """Let row `target` hold the first `length` tokens of row `source`."""
        if self.is_initialized:
            length = min(length, self.keys.shape[2])
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def get_seq_length(self) -> int:
        return self.batch.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.batch.end, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13


class BatchCache(Cache):
    """Keys and values of up to `slots` rows. Rows 0, 1, ... are in use; each is also a cache by itself."""

    def __init__(self, windows: Sequence[int | None], slots: int):
        self.slots, self.capacity = slots, 1
        self.rows: list[RowCache] = []
        self.places = torch.zeros(0, 0, dtype=torch.long)  # [rows, n], where the tokens of the current pass stand
        self.start = self.end = 0  # the first of these places, and the one after the last
        self.wholes = [BatchLayer(self, window) for window in windows]
        super().__init__(layers=[*self.wholes])

    def add(self, windows: Sequence[int | None], capacity: int) -> RowCache:
        """A new, empty row behind the others, which will hold up to `capacity` tokens."""
        self.capacity = max(self.capacity, capacity)
        self.rows.append(RowCache(self, len(self.rows), windows))
        return self.rows[-1]

    def remove(self, row: int, length: int) -> None:
        """Free a row; the last row, which holds `length` tokens, takes its place."""
        last = self.rows.pop()
        if last.row != row:
            for layer in self.wholes:
                layer.move(last.row, row, length)
            last.row = row
            self.rows[row] = last

    def at(self, positions: Sequence[int], n: int, device: torch.device) -> torch.Tensor:
        """Let the next pass have n tokens a row from these positions on; their places [rows, n]."""
        self.start, self.end = min(positions), max(positions) + n
        first = torch.tensor(positions, dtype=torch.long, device=device)
        self.places = first[:, None] + torch.arange(n, device=device)
        return self.places

    def first_visible(self, window: int | None) -> int:
        """First position that any token of the pass may attend to."""
        return 0 if window is None else max(0, self.start - window + 1)


class RowCache(KVCache):
    """One row of a batch as a cache by itself: what it writes is the row's part of the batch's cache."""

    def __init__(self, batch: BatchCache, row: int, windows: Sequence[int | None]):
        super().__init__(windows, batch.capacity)
        self.batch, self.row = batch, row
        self.layers = [RowLayer(self, window, whole) for window, whole in zip(windows, batch.wholes, strict=True)]


class RowLayer(PositionedLayer):
    """The part of a `BatchLayer` that is one row's."""

    def __init__(self, cache: RowCache, window: int | None, whole: BatchLayer):
        super().__init__(cache, window)
        self.row_cache, self.whole = cache, whole

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.whole.is_initialized:
            self.whole.lazy_initialization(key_states, value_states)
        self.whole.reserve(self.row_cache.position + key_states.shape[2])
        row = slice(self.row_cache.row, self.row_cache.row + 1)
        self.keys, self.values, self.is_initialized = self.whole.keys[row], self.whole.values[row], True
        return super().update(key_states, value_states)


class Batch:
    """Runs the rows of one batch. Row r of every call is row r of the cache.

    Args:
        slots: most rows.
    """

    def __init__(self, model: SelfSpeculativeModel, slots: int):
        self.model, self.backbone = model, model.backbone
        self.windows = layer_windows(self.backbone.config, model.num_layers)
        self.cache = BatchCache(self.windows, slots)

    def add(self, capacity: int) -> RowCache:
        """A new last row, with room for `capacity` tokens; the prompt is to be run into it as into any cache."""
        return self.cache.add(self.backbone.windows, capacity)

    def remove(self, row: int, length: int) -> None:
        """Free a row; the last row, of `length` tokens, moves to its place."""
        self.cache.remove(row, length)

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int],
        start: int = 0,
        stop: int | None = None,
        hidden: torch.Tensor | None = None,
        skip: SkipSet | None = None,
    ) -> torch.Tensor:
        """Run layers start..stop-1, without the sub-layers in `skip`, on tokens that follow each row's position.

        Args:
            tokens: each row's tokens; shorter rows are padded.
            hidden: hidden states [rows, n, H] entering layer `start`; None embeds the tokens.

        Returns:
            The hidden states [rows, n, H] leaving the last of the layers.
        """
        device, n = self.model.device, max(map(len, tokens))
        ids = torch.tensor([[*row, *[0] * (n - len(row))] for row in tokens], dtype=torch.long, device=device)
        layers = self.backbone.layers if skip is None else self.model.layers_without(skip)
        places = self.cache.at(positions, n, device)
        run = self._run_view if self.backbone.direct is None else self._run_direct
        with self.backbone.attention:
            return run(ids, places, start, layers[start:stop], hidden)

    def head(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Logits [sum of lengths, vocabulary] of the first `lengths[r]` tokens of each row r, one row after the other.

        Args:
            hidden: [rows, n, H].
        """
        real = [r * hidden.shape[1] + i for r, length in enumerate(lengths) for i in range(length)]
        flat = hidden.reshape(1, -1, hidden.shape[2])
        return self.model.head(flat if len(real) == flat.shape[1] else flat[:, real])

    def verify(
        self,
        blocks: Sequence[Sequence[int]],
        positions: Sequence[int],
        kept: Sequence[ExitStates | None] = (),
        states: Sequence[KeptStates | None] = (),
    ) -> torch.Tensor:
        """The target's logits [sum of lengths, vocabulary] for each row's block, one row after the other.

        Early layers are run only on tokens that `kept` (one a row) has no hidden states of. Into `states` (one a row,
        of one depth) go the states that are to be kept.
        """
        lengths = [len(block) for block in blocks]
        exit_layer = next((states.exit_layer for states in kept if states is not None), None)
        if exit_layer is None:
            return self.head(self._run_keeping(blocks, positions, states), lengths)
        done = [0 if known is None else known.hidden.shape[1] for known in kept]
        rest = self.run(
            [block[d:] for block, d in zip(blocks, done, strict=True)],
            [position + d for position, d in zip(positions, done, strict=True)],
            stop=exit_layer,
        )
        hidden = rest.new_zeros(len(blocks), max(lengths), rest.shape[2])
        for row, known in enumerate(kept):
            if known is not None:
                hidden[row, : done[row]] = known.hidden[0]
            hidden[row, done[row] : lengths[row]] = rest[row, : lengths[row] - done[row]]
        return self.head(self._run_keeping(blocks, positions, states, exit_layer, hidden), lengths)

    def _run_keeping(
        self,
        blocks: Sequence[Sequence[int]],
        positions: Sequence[int],
        states: Sequence[KeptStates | None],
        start: int = 0,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `SelfSpeculativeModel.run_keeping`, for every row."""
        depth = next((row.depth for row in states if row is not None), None)
        if depth is None:
            return self.run(blocks, positions, start, hidden=hidden)
        if hidden is None or start < depth:
            hidden, start = self.run(blocks, positions, start, depth, hidden), depth
        for row, place, block, out in zip(states, positions, blocks, hidden, strict=True):
            if row is not None and start == depth:
                row.write(place, out[None, : len(block)])
        return self.run(blocks, positions, start, hidden=hidden) if start < self.model.num_layers else hidden

    def _run_direct(
        self, ids: torch.Tensor, places: torch.Tensor, start: int, layers: list[nn.Module], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """The layers called one after the other, as `DirectLayers.run` does for one row."""
        direct = self.backbone.direct
        assert direct is not None
        direct.cover(self.cache.end)
        hidden = direct.embed(ids) if hidden is None else hidden
        rotary = [tuple(part[0, places] for part in table) for table in direct.tables]
        masks = self._masks(places, hidden)
        for index, layer in enumerate(layers, start):
            hidden = direct.call(index, layer, hidden, masks[self.windows[index]], rotary, places, self.cache)
        return hidden

    def _run_view(
        self, ids: torch.Tensor, places: torch.Tensor, start: int, layers: list[nn.Module], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """The layers within the family's own forward, which is told the positions; the masks are put in here."""
        states = hidden
        masks: dict[int | None, torch.Tensor] = {}

        def visit(index: int, entering: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
            nonlocal states, masks
            if not start <= index < start + len(layers):
                return entering
            if index > start or hidden is None:
                states = entering
            assert states is not None
            masks = masks or self._masks(places, states)
            states = layers[index - start](states, **{**kwargs, "attention_mask": masks[self.windows[index]]})
            return states

        ready = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)  # a mask of four dimensions is not remade
        self.backbone.forward_slots(ids, self.cache, visit, position_ids=places, attention_mask=ready)
        assert states is not None
        return states

    def _masks(self, places: torch.Tensor, like: torch.Tensor) -> dict[int | None, torch.Tensor]:
        """For each window, which keys each token sees: [rows, 1, n, keys]."""
        masks = {}
        for window in dict.fromkeys(self.windows):
            keys = torch.arange(self.cache.first_visible(window), self.cache.end, device=places.device)
            visible = visible_keys(keys, places[..., None], window)
            masks[window] = as_mask(visible[:, None], like, str(self.backbone.config._attn_implementation))
        return masks
