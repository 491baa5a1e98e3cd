"""Weights in the layout that oneDNN multiplies fastest (`--pack_weights`), for models on a CPU.

PyTorch's linear layers hand oneDNN weights as they lie in the checkpoint, to be reordered for every product. Here each
is reordered once. Whatever runs the model gains, `model.generate` too, and passes over several tokens gain most. In
float32 one row is multiplied by the weights as they lie, which is as fast or faster.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..config import UsageError

DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight. A deep copy of it is a plain one."""

    packed: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype == torch.float32 and input.numel() == self.in_features:
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        plain = nn.Linear.__new__(nn.Linear)
        plain.__dict__ = copy.deepcopy({name: value for name, value in self.__dict__.items() if name != "packed"}, memo)
        return plain


def pack_weights(model: nn.Module) -> None:
    """Let every linear layer of `model` multiply by a packed copy of its weight; the weights themselves stay.

    Raises:
        UsageError: the model is not in bfloat16 or float32 on a CPU, or this PyTorch or processor cannot pack it.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if any(layer.weight.device.type != "cpu" or layer.weight.dtype not in DTYPES for layer in layers):
        raise UsageError(
            "--pack_weights True: the model must be on a CPU in bfloat16 or float32 (--device cpu --dtype bfloat16)"
        )
    packed: dict[int, torch.Tensor] = {}  # a weight that two layers share is packed once
    try:
        with torch.inference_mode():
            for layer in layers:
                if id(layer.weight) not in packed:
                    packed[id(layer.weight)] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
                layer.__class__ = PackedLinear
                layer.packed = packed[id(layer.weight)]
                layer(torch.zeros(1, 2, layer.in_features, dtype=layer.weight.dtype))
    except (AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--pack_weights True: oneDNN cannot pack these weights here ({reason})") from None


def is_packed(model: nn.Module) -> bool:
    """Whether `pack_weights` was here."""
    return any(isinstance(module, PackedLinear) for module in model.modules())
