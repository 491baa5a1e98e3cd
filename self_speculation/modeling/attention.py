"""Attention of a few new tokens to many cached ones, on a CPU.

Query heads that share a key/value head (grouped queries, arXiv 2305.13245) become rows of one product with it, so that
keys and values are neither copied for each query head nor multiplied by one row at a time. PyTorch's kernel for CPUs
does the latter slowly: in bfloat16 one token takes longer than five.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grouped_sdpa"
MOST_ROWS = 32  # of a product; the kernel takes more of them in two parts


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; what is not a few tokens with a mask, or one token, goes to SDPA.

    Args:
        query: [batch, heads, n, head size].
        key, value: [batch, heads / g, keys, head size].
        attention_mask: [batch or 1, 1, n, keys], booleans or numbers to add.

    Returns:
        [batch, n, heads, head size].
    """
    batch, heads, n, size = query.shape
    shared = key.shape[1]
    rows = heads // shared * n
    plain = not dropout and all(kwargs.get(name) is None for name in ("position_bias", "softcap"))
    known = n == 1 if attention_mask is None else attention_mask.shape[1] == 1
    few = torch.compiler.is_compiling() or rows <= MOST_ROWS
    slow = rows > n or (n == 1 and query.dtype != torch.float32)
    if not (plain and known and few and slow):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    grouped = query.reshape(batch, shared, rows, size)
    if rows == 1:
        grouped = grouped.expand(-1, -1, 2, -1)  # two rows are faster than one
    elif attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, rows // n, 1)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out[:, :, :rows].reshape(batch, heads, n, value.shape[-1]).transpose(1, 2).contiguous(), None


class GroupedAttention:
    """Within it, a model on a CPU that uses SDPA uses `grouped_sdpa`. Whoever else runs the model is left alone."""

    def __init__(self, config: Any, device: torch.device):
        AttentionInterface.register(NAME, grouped_sdpa)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self.config, self.on_cpu = config, device.type == "cpu"

    def __enter__(self) -> None:
        self.before = self.config._attn_implementation
        if self.on_cpu and self.before == "sdpa":
            self.config._attn_implementation = NAME

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.config._attn_implementation = self.before
