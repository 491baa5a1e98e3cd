"""A small module through which a frozen model drafts: hidden states in, hidden states that the model's head reads out.

- `attention` (Kangaroo, arXiv 2404.18911, section 3.1), `mlp` and `layer` take the states leaving an early exit.
- `feature` takes the states leaving the last layer at the position before, and the embedding of the token that was
  chosen there (EAGLE, arXiv 2401.15077, section 3.1). It runs no layer of the model to draft.

All are decoder layers of the model's own family, started from one of the model's layers, so that masks, positions,
caches and norms are the family's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .backbone import Backbone
from .cache import KVCache
from .skip import without

KINDS = ("attention", "mlp", "layer", "feature")


@dataclass(frozen=True)
class AdapterShape:
    """What an adapter is made of.

    Attributes:
        kind: one of `KINDS`.
        exit_layer: number of the model's layers that run before it; all of them for `feature`.
        from_layer: the layer of the model whose shape it has and whose weights it starts from.
        vocabulary: tokens that the draft's head knows, 0 for all.
    """

    kind: str
    exit_layer: int
    from_layer: int
    vocabulary: int = 0


class Adapter(nn.Module):
    """An adapter of `backbone`'s model, with the weights of its layer `shape.from_layer`, in that model's dtype.

    Attributes:
        name: the folder it came from.
        token_ids: [vocabulary] ids that the draft's head knows, most frequent first; None for all.
    """

    token_ids: torch.Tensor | None

    def __init__(self, backbone: Backbone, shape: AdapterShape, token_ids: torch.Tensor | None = None):
        super().__init__()
        self.shape, self.name = shape, ""
        shared = {id(backbone.config): backbone.config}  # the copy keeps to it, so that it attends as the model does
        layer = copy.deepcopy(backbone.layers[shape.from_layer], shared)
        self.layer = without(layer, attn=shape.kind == "mlp", mlp=shape.kind == "attention")
        weight = next(self.layer.parameters())
        self.fuse: nn.Linear | None = None
        if shape.kind == "feature":
            width = backbone.config.hidden_size
            self.fuse = nn.Linear(2 * width, width, bias=False, device=weight.device, dtype=weight.dtype)
            with torch.no_grad():  # the mean of both
                self.fuse.weight.copy_(torch.eye(width).repeat(1, 2) / 2)
        self.register_buffer("token_ids", None if token_ids is None else token_ids.to(weight.device, torch.long))

    @property
    def ahead(self) -> int:
        """How many tokens an input knows beyond the states in it: 1 for `feature`, whose states are one token old."""
        return 1 if self.fuse is not None else 0

    def forward(
        self, backbone: Backbone, tokens: torch.Tensor, cache: KVCache, position: int, states: torch.Tensor
    ) -> torch.Tensor:
        """Run on states [B, n, H] of positions `position`, ...; the results [B, n, H] go through the model's head.

        Args:
            tokens: [B, n] the tokens of these positions; for `feature`, those that follow them.
            cache: the adapter's own, with keys and values of the positions before.
        """
        if self.fuse is not None:
            states = self.fuse(self.mixed(backbone, tokens, states))
        return backbone.run(tokens, cache, position, self.shape.from_layer, [self.layer], states)

    def mixed(self, backbone: Backbone, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What the linear map of `feature` takes: [B, n, 2 H], embeddings and states by their root mean squares."""
        width = states.shape[-1:]
        embedded = backbone.decoder.embed_tokens(tokens).to(states)
        return torch.cat([F.rms_norm(embedded, width), F.rms_norm(states, width)], dim=-1)
