"""One key/value cache for draft and target, in which rolling back is setting a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class PositionedLayer(CacheLayerMixin):
    """Keys and values of one layer, each [batch, heads, capacity, head_dim], written at the cache's current position.

    `window` is the width of a sliding-window layer, None for full attention. Everything written is kept, so any
    position can be returned to; a sliding layer hands out only the part that its window can see.
    """

    keys: torch.Tensor  # set at the first write
    values: torch.Tensor
    is_sliding = False  # to transformers every layer is a full one: masks are then right for any position

    def __init__(self, cache: KVCache, window: int | None = None):
        super().__init__()
        self.cache = cache
        self.window = window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_empty((*key_states.shape[:2], self.cache.capacity, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], self.cache.capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, heads, n, head_dim] at the current position; return all that the new tokens may attend to."""
        start = self.cache.position
        end = start + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if end > self.keys.shape[2]:
            self._grow(end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        first = self.first_visible()
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def _grow(self, length: int) -> None:
        capacity = max(length, self.keys.shape[2] * 3 // 2)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def first_visible(self) -> int:
        """First position that the next token may attend to."""
        return 0 if self.window is None else max(0, self.cache.position - self.window + 1)

    def get_seq_length(self) -> int:
        return self.cache.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self.first_visible()
        return self.cache.position + query_length - first, first

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13


class KVCache(Cache):
    """A cache whose layers all read and write at `position`.

    Setting `position` is the whole of rolling back: what lies at or behind it is overwritten by the next pass, and
    until then never attended to. A layer that a pass leaves out is simply not written.

    Args:
        windows: for each layer the width of its sliding window, or None for full attention.
        capacity: tokens to make room for; the buffers grow when it does not suffice.
    """

    def __init__(self, windows: Sequence[int | None], capacity: int):
        self.position = 0
        self.capacity = capacity
        super().__init__(layers=[PositionedLayer(self, window) for window in windows])
