"""Layers called one after the other, without the family's own forward around them.

Rotary tables come from that forward, once for many positions; masks are made here. It spares the 1-2 ms that a forward
spends outside its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .cache import KVCache
from .masks import as_mask, visible_keys

if TYPE_CHECKING:
    from .backbone import Backbone

TABLE_STEP = 1024  # rotary tables grow by this many positions


class Unknown(ValueError):
    """The family does something between its layers that is not known here; its own forward must run them."""


class DirectLayers:
    """Calls layers directly, with what the family's forward would have given them."""

    ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        self.attention = str(backbone.config._attn_implementation)
        self.windows = layer_windows(backbone.config, len(backbone.layers))
        if self.attention not in self.ATTENTION or length_dependent_rope(backbone.config):
            raise Unknown("masks or rotary embeddings that depend on the length")
        self.tables: list[tuple[torch.Tensor, ...]] = []  # distinct rotary tables, each (cos, sin), [1, positions, d]
        self.table_of_layer: list[int] = []
        self.keywords: list[dict[str, Any]] = []  # what each layer is given beside what run() fills in
        self._learn(TABLE_STEP)
        self.scale = self._embedding_scale()

    def run(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        start: int,
        layers: list[nn.Module],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `Backbone.run`, at the cache's position."""
        position, n = cache.position, input_ids.shape[1]
        self.cover(position + n)
        if hidden is None:
            hidden = self.embed(input_ids)
        rotary = [tuple(part[:, position : position + n] for part in table) for table in self.tables]
        masks: dict[int | None, torch.Tensor | None] = {}
        for index, layer in enumerate(layers, start):
            window = self.windows[index]
            if window not in masks:
                masks[window] = self.mask(position, n, window, hidden)
            positions = self.position_ids[:, position : position + n]
            hidden = self.call(index, layer, hidden, masks[window], rotary, positions, cache)
        return hidden

    def call(
        self,
        index: int,
        layer: nn.Module,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        rotary: list[tuple[torch.Tensor, ...]],
        positions: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Run the layer in slot `index`; `rotary` holds each table's rows of the `positions` [rows, n]."""
        given = {
            "attention_mask": mask,
            "position_embeddings": rotary[self.table_of_layer[index]],
            "position_ids": positions,
            self.backbone.cache_name: cache,
        }
        return layer(hidden, **{**self.keywords[index], **given})

    def cover(self, positions: int) -> None:
        """Let the rotary tables reach this many positions."""
        if positions > self.tables[0][0].shape[1]:
            self._learn(positions // TABLE_STEP * TABLE_STEP + TABLE_STEP)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings [1, n, H] as they enter the first layer."""
        embedded = self.backbone.decoder.embed_tokens(input_ids)
        return embedded if self.scale is None else embedded * self.scale

    def mask(self, position: int, n: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Which keys each of n new tokens sees: None where the attention function knows by itself, else
        [1, 1, n, keys], True (sdpa) or 0 (eager) where visible; keys begin where the layer's window begins."""
        plain = position == 0 and (window is None or n <= window) and self.attention == "sdpa"
        if n == 1 or plain or self.attention.startswith("flash"):
            return None
        first = 0 if window is None else max(0, position - window + 1)
        keys = torch.arange(first, position + n, device=like.device)
        queries = torch.arange(position, position + n, device=like.device)[:, None]
        return as_mask(visible_keys(keys, queries, window)[None, None], like, self.attention)

    def _record(self, tokens: int, position: int, **kwargs: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """What the family's forward gives each layer for `tokens` tokens at `position`."""
        seen: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def visit(index: int, hidden: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            seen.append((hidden, given))
            return hidden

        cache = KVCache([None] * len(self.windows), 1)  # transformers asks one layer for the sizes of all masks
        cache.position = position
        ids = torch.arange(tokens, device=self.backbone.device)[None] % self.backbone.config.vocab_size
        self.backbone.forward_slots(ids, cache, visit, **kwargs)
        return seen

    def _learn(self, positions: int) -> None:
        """Fill the rotary tables for `positions` positions, and note each layer's other arguments."""
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.backbone.device)  # taken as a ready mask
        seen = self._record(positions, 0, attention_mask=nothing)
        self.tables, self.table_of_layer, self.keywords = [], [], []
        for _, given in seen:
            table = given["position_embeddings"]
            if not all(part.ndim == 3 and part.shape[1] == positions for part in table):
                raise Unknown("rotary tables of an unknown shape")
            known = next((i for i, other in enumerate(self.tables) if other[0] is table[0]), None)
            if known is None:
                known = len(self.tables)
                self.tables.append(tuple(table))
            self.table_of_layer.append(known)
            filled_in = ("attention_mask", "position_embeddings", "position_ids", self.backbone.cache_name)
            others = {name: value for name, value in given.items() if name not in filled_in}
            if any(isinstance(value, torch.Tensor) for value in others.values()):
                raise Unknown("tensors of unknown meaning")
            self.keywords.append(others)
        device = self.backbone.device  # a table may come from another, where `device_map` has put it
        self.tables = [tuple(part.to(device) for part in table) for table in self.tables]
        self.position_ids = torch.arange(positions, device=device)[None]

    def _embedding_scale(self) -> torch.Tensor | float | None:
        """The factor between embed_tokens and what enters the first layer, None for 1."""
        entering, _ = self._record(8, 0)[0]
        embedded = self.backbone.decoder.embed_tokens(torch.arange(8, device=entering.device)[None])
        for factor in (None, getattr(self.backbone.config, "embedding_multiplier", None)):
            if torch.equal(entering, embedded if factor is None else embedded * factor):
                return factor
        raise Unknown("embeddings that are more than scaled")

    def agrees(self) -> bool:
        """Whether masks, tables and hidden states equal those of the family's own forward."""
        beyond = max((window or 0 for window in self.windows), default=0) + 3
        for position in (3, beyond):
            if not self.attention.startswith("flash") and not self._same_masks(position):
                return False
        backbone = self.backbone
        ids = torch.arange(1, 6, device=backbone.device)[None] % backbone.config.vocab_size
        cache = KVCache(self.windows, 8)
        ours = self.run(ids, cache, 0, backbone.layers, None)
        theirs = backbone.run_view(ids, KVCache([None] * len(backbone.layers), 8), 0, backbone.layers)
        return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))

    def _same_masks(self, position: int) -> bool:
        for index, (hidden, given) in enumerate(self._record(2, position)):
            ours = self.mask(position, 2, self.windows[index], hidden)
            theirs = given["attention_mask"]
            if ours is None or theirs is None or ours.shape[-1] > theirs.shape[-1]:
                return False
            outside = theirs.shape[-1] - ours.shape[-1]  # keys before the window, which the cache does not hand out
            lowest = 0 if theirs.dtype == torch.bool else torch.finfo(theirs.dtype).min
            if not torch.equal(ours, theirs[..., outside:]) or not (theirs[..., :outside] == lowest).all():
                return False
        return True


def length_dependent_rope(config: Any) -> bool:
    """Whether rotary embeddings change with the length of the text."""
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    return "dynamic" in rope or "longrope" in rope


def layer_windows(config: Any, layers: int) -> list[int | None]:
    """Each layer's sliding window by the configuration, None for full attention."""
    width = getattr(config, "sliding_window", None)
    if kinds := getattr(config, "layer_types", None):
        return [width if kind == "sliding_attention" else None for kind in kinds]
    return [width] * layers
