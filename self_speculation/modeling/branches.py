"""Many continuations of one cached text at once, each from a place of its own (as tree attention does)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cache import KVCache
from .model import SelfSpeculativeModel


class Branches:
    """Continuations of a text of `length` tokens whose keys and values `cache` holds, run through the first layers.

    Branch w leaves the text after its first `starts[w]` tokens. New keys and values are put behind the text, so the
    text stays as it is; each token sees its branch and the text before it. `possible` says whether the model allows
    this: its layers must be called directly, with masks that may be given, and see the whole text.
    """

    def __init__(
        self, model: SelfSpeculativeModel, cache: KVCache, length: int, starts: Sequence[int], exit_layer: int
    ):
        direct = model.backbone.direct
        assert direct is not None
        self.model, self.direct, self.cache, self.exit_layer = model, direct, cache, exit_layer
        self.length, self.steps = length, 0
        self.starts = torch.tensor(starts, device=model.device)
        self.visible = torch.arange(length, device=model.device)[None] < self.starts[:, None]  # [branches, keys]

    @staticmethod
    def possible(model: SelfSpeculativeModel, length: int) -> bool:
        """Whether a text that with all its branches has `length` tokens can be branched."""
        direct = model.backbone.direct
        if direct is None or direct.attention not in ("sdpa", "eager"):
            return False
        return all(window is None or length <= window for window in direct.windows)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Add one token to every branch; the hidden states [1, branches, H] leaving layer `exit_layer - 1`."""
        direct, count = self.direct, len(tokens)
        positions = self.starts + self.steps
        self.visible = torch.cat([self.visible, torch.eye(count, dtype=torch.bool, device=self.visible.device)], dim=1)
        self.cache.position = self.length + self.steps * count
        self.steps += 1
        hidden = direct.embed(self.model.ids(tokens))
        mask = self.visible[None, None]
        if direct.attention == "eager":
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, lowest)
        direct.cover(int(positions.max()) + 1)
        rotary = [tuple(part[:, positions] for part in table) for table in direct.tables]
        for index, layer in enumerate(direct.backbone.layers[: self.exit_layer]):
            given = {
                "attention_mask": mask,
                "position_embeddings": rotary[direct.table_of_layer[index]],
                "position_ids": positions[None],
                direct.backbone.cache_name: self.cache,
            }
            hidden = layer(hidden, **{**direct.keywords[index], **given})
        return hidden
