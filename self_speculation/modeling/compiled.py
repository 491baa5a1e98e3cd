"""Layers, norm and head as compiled regions (`--compile`), in place of calling them one operation at a time.

A region is a range of layers, or the head, for one token or for any number of tokens above one. The lengths of text,
cache and block are symbols in it, so that a region is compiled once. It reads and writes the same key/value cache as
the layers called directly. Prompts, batches and whatever else does not fit are left to those.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .cache import KVCache
from .masks import as_mask, visible_keys

if TYPE_CHECKING:
    from .backbone import Backbone

MOST_TOKENS = 64  # of a block; longer ones are prompts
TOKENS, LENGTH, CAPACITY = 5, 23, 41  # sizes to compile with, all different so that none is taken for another

log = logging.getLogger(__name__)


class Compiled:
    """Compiled regions of one backbone, made when first needed.

    Attributes:
        backend: what torch.compile hands graphs to.
        seconds: what compiling has taken so far.
        failure: why compiling was given up, in one line; None while it works.
    """

    backend = "inductor"

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        self.seconds = 0.0
        self.regions: dict[Any, Callable[..., torch.Tensor]] = {}
        self.failure: str | None = None
        self.columns = torch.arange(0)
        if backbone.direct is None or backbone.direct.attention not in ("sdpa", "eager"):
            self._give_up("they run by their own forward, or by an attention that has no masks")

    def run(
        self, input_ids: torch.Tensor, cache: KVCache, start: int, layers: list[nn.Module], hidden: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `Backbone.run`, at the cache's position; None when the layers must be called directly."""
        position, n = cache.position, input_ids.shape[1]
        entering = input_ids if hidden is None else hidden
        if position == 0 or not layers or not self._fits(entering):
            return None
        if type(cache) is not KVCache:
            return None  # a row of a batch, whose tensors move
        slots: Any = cache.layers[start : start + len(layers)]
        if not all(slot.is_initialized and slot.keys.shape[2] == slots[0].keys.shape[2] for slot in slots):
            return None
        keys, values = [slot.keys for slot in slots], [slot.values for slot in slots]
        if keys[0].shape[2] < position + n:
            return None  # the cache has to grow
        name = (start, n == 1, hidden is None, *map(id, layers))
        if name not in self.regions:
            few = 1 if n == 1 else TOKENS
            sample = (
                _sample(entering, 1, few),
                *self._places(LENGTH - few, LENGTH, entering.device),
                [_sample(tensor, 2, CAPACITY) for tensor in keys],
                [_sample(tensor, 2, CAPACITY) for tensor in values],
            )
            _mark(sample[2], 0)
            for tensor, dim in ((sample[1], 0), *((part, 1) for table in sample[3] for part in table)):
                _mark(tensor, dim)
            if not self._compile(name, _layers_region(self.backbone, start, layers, hidden is None), sample):
                return None
        return self.regions[name](entering, *self._places(position, position + n, entering.device), keys, values)

    def head(self, hidden: torch.Tensor, view: Any) -> torch.Tensor | None:
        """As `Backbone.head`; None when it must be called directly."""
        if not self._fits(hidden):
            return None
        n = hidden.shape[1]
        name = ("head", id(view), n == 1)
        if name not in self.regions:
            sample = _sample(hidden, 1, 1 if n == 1 else TOKENS)
            if not self._compile(name, lambda states: view(inputs_embeds=states).logits, (sample,)):
                return None
        return self.regions[name](hidden)

    def _fits(self, entering: torch.Tensor) -> bool:
        """Whether these token ids or hidden states, [batch, tokens, ...], are what regions are made for."""
        block = len(entering) == 1 and entering.shape[1] <= MOST_TOKENS
        return block and self.failure is None and torch.is_inference_mode_enabled()

    def _places(self, position: int, end: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        """Positions [n] of the new tokens, positions [end] of all keys, and each table's rotary rows [1, n, d]."""
        direct = self.backbone.direct
        assert direct is not None
        direct.cover(end)
        if len(self.columns) < end:
            self.columns = torch.arange(2 * end, device=device)
        rotary = [tuple(part[:, position:end] for part in table) for table in direct.tables]
        return self.columns[position:end], self.columns[:end], rotary

    def _compile(self, name: Any, function: Callable[..., torch.Tensor], sample: tuple[Any, ...]) -> bool:
        """Compile a region on arguments of its own, so that none of its symbols takes the place of another."""
        # a region is only ever called with arguments of the same kind, so what dynamo would check always holds
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        region = torch.compile(_with_own_code(function), backend=self.backend, fullgraph=True, options=options)
        started = time.perf_counter()
        try:
            region(*sample)
            self.regions[name] = region
        except Exception as error:  # dynamo, inductor and the C++ compiler each have errors of their own
            lines = [line for line in str(error).splitlines() if line.strip()]
            self._give_up(f"{type(error).__name__}: {lines[0][:200] if lines else ''}")
        self.seconds += time.perf_counter() - started
        return self.failure is None

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        log.warning("--compile: %s models cannot be compiled, so they are run as without it (%s)",
                    self.backbone.family, reason)  # fmt: skip


def _layers_region(
    backbone: Backbone, start: int, layers: Sequence[nn.Module], embeds: bool
) -> Callable[..., torch.Tensor]:
    """The function to compile: `layers` from slot `start` on, for token ids if `embeds`, else for hidden states."""
    direct = backbone.direct
    assert direct is not None
    layers = list(layers)  # keeps them alive, and with them their ids

    def region(
        entering: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
        rotary: list[tuple[torch.Tensor, ...]],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        hidden = direct.embed(entering) if embeds else entering
        cache = _Places(start, positions, columns.shape[0], keys, values)
        masks = {window: _mask(positions, columns, window, hidden, direct.attention) for window in set(direct.windows)}
        for index, layer in enumerate(layers, start):
            mask = masks[direct.windows[index]]
            hidden = direct.call(index, layer, hidden, mask, rotary, positions[None], cache)
        return hidden

    return region


def _mask(
    positions: torch.Tensor, columns: torch.Tensor, window: int | None, like: torch.Tensor, attention: str
) -> torch.Tensor | None:
    """Which of the keys at `columns` each new token sees, as `DirectLayers.mask` gives it, from the first key on."""
    if len(positions) == 1 and window is None:
        return None
    return as_mask(visible_keys(columns, positions[:, None], window)[None, None], like, attention)


class _Places:
    """The cache as a region sees it: keys and values are written at `positions`, the first `length` are handed out."""

    def __init__(
        self, start: int, positions: torch.Tensor, length: int, keys: list[torch.Tensor], values: list[torch.Tensor]
    ):
        self.start, self.positions, self.length, self.keys, self.values = start, positions, length, keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer - self.start], self.values[layer - self.start]
        keys.index_copy_(2, self.positions, key_states)
        values.index_copy_(2, self.positions, value_states)
        return keys[:, :, : self.length], values[:, :, : self.length]


def _with_own_code(function: Any) -> Any:
    """The same function with a code object of its own: by that dynamo keeps what it has compiled."""
    code = function.__code__.replace(co_name=f"own_{function.__code__.co_name}")
    return types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


def _sample(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Zeros like `tensor` with another size in one dimension, which is a symbol unless it is 1."""
    sample = tensor.new_zeros([size if i == dim else own for i, own in enumerate(tensor.shape)])
    _mark(sample, dim)
    return sample


def _mark(tensor: torch.Tensor, dim: int) -> None:
    if tensor.shape[dim] != 1:
        torch._dynamo.mark_dynamic(tensor, dim)
