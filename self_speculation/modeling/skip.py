"""Layers without their attention or their MLP (Draft & Verify, arXiv 2309.08168, section 3.2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import UsageError
from .views import view_of

ATTENTION_NAMES = ("self_attn", "attention", "attn")
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe")


@dataclass(frozen=True)
class SkipSet:
    """Layers whose attention, and layers whose MLP, a draft leaves out. Indices are 0-based."""

    attn: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(cls, attn: Collection[int] = (), mlp: Collection[int] = ()) -> SkipSet:
        return cls(frozenset(attn), frozenset(mlp))

    def __len__(self) -> int:
        return len(self.attn) + len(self.mlp)

    def shared(self, num_layers: int) -> int:
        """How many of the first layers are whole: what leaves them is what leaves the target's."""
        return min((*self.attn, *self.mlp), default=num_layers)

    def columns(self) -> dict[str, Any]:
        """The set as columns of a result row, empty kinds left out."""
        return {"skip_attn": tuple(sorted(self.attn)) or None, "skip_mlp": tuple(sorted(self.mlp)) or None}

    def check(self, num_layers: int, file: str | None = None) -> None:
        """Raise `UsageError` unless the set, which may come from a file, fits a model of `num_layers` layers and leaves
        out some, not all."""
        for kind, ids in (("attn", self.attn), ("mlp", self.mlp)):
            if beyond := sorted(index for index in ids if not 0 <= index < num_layers):
                given = f"--skip_{kind}_layers" if file is None else f"--skip_layers {file}: {kind}"
                raise UsageError(
                    f"{given} {beyond[0]}: a model of {num_layers} layers has layers 0 to {num_layers - 1}"
                )
        if not len(self):
            raise UsageError("--skip_attn_layers: the skip_layer drafter needs a sub-layer to skip; give "
                             "--skip_attn_layers, --skip_mlp_layers or --skip_layers FILE (search.py)")  # fmt: skip
        if len(self) == 2 * num_layers:
            raise UsageError("--skip_attn_layers: skipping every sub-layer leaves no draft")

    def apply(self, layers: Sequence[nn.Module]) -> list[nn.Module]:
        """The same layers, with views that share their parameters where something is left out."""
        return [without(layer, i in self.attn, i in self.mlp) for i, layer in enumerate(layers)]


class PassBy(nn.Module):
    """A layer of which nothing is left: hidden states leave as they came."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class NoAttention(nn.Module):
    """Attention that adds nothing and leaves the cache alone."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoMLP(nn.Module):
    """An MLP that adds nothing."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


def without(layer: nn.Module, attn: bool, mlp: bool) -> nn.Module:
    """The layer without its attention, its MLP, or both; what is left are the same parameters."""
    if attn and mlp:
        return PassBy()
    if not (attn or mlp):
        return layer
    names, nothing = (ATTENTION_NAMES, NoAttention()) if attn else (MLP_NAMES, NoMLP())
    name = next((name for name in names if name in layer._modules), None)
    if name is None:
        raise UsageError(f"--drafter skip_layer: {type(layer).__name__} has no sub-layer named {' or '.join(names)}")
    return view_of(layer, **{name: nothing})
