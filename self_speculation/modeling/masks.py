"""Which keys a token sees, and how attention functions want to be told."""

from __future__ import annotations

import torch


def visible_keys(keys: torch.Tensor, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether a token at each of the positions `queries` [..., 1] sees the keys at the positions `keys` [k]: none that
    come after it, and none before its window. Booleans [..., k]."""
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def as_mask(visible: torch.Tensor, like: torch.Tensor, attention: str) -> torch.Tensor:
    """As the attention function wants it: booleans (sdpa), or in the dtype of `like` 0 where visible and else a lowest
    number (eager)."""
    if attention != "eager":
        return visible
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)
