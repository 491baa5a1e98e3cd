"""Causal attention whose backward pass is fast on a CPU.

PyTorch's flash attention for CPUs has a good forward pass, but its backward pass takes a third of a training step of a
small model. Here the forward pass is PyTorch's, and the backward pass is written with matrix products over blocks of
queries, each with the keys up to its end (FlashAttention-2, arXiv 2307.08691, algorithm 2, without tiling the keys).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "blockwise_causal"
BLOCK = 256


class CausalAttention(torch.autograd.Function):
    """softmax(scale Q K^T + causal mask) V on a CPU; q, k, v: [batch, heads, tokens, head size], of one dtype."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, out, grad = (x.flatten(0, 1) for x in (*ctx.saved_tensors[:4], grad))  # [batch * heads, tokens, d]
        logsumexp = ctx.saved_tensors[4].reshape(*q.shape[:2], 1).float()
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        scaled = q * ctx.scale
        grad_q = []
        grad_k, grad_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        tokens = q.shape[1]
        for start in range(0, tokens, BLOCK):
            end = min(start + BLOCK, tokens)
            rows = slice(start, end)
            scores = scaled[:, rows] @ k[:, :end].transpose(1, 2)
            visible = torch.arange(start, end)[:, None] >= torch.arange(end)
            p = torch.where(visible, torch.exp(scores.float() - logsumexp[:, rows]), 0.0)
            grad_p = grad[:, rows] @ v[:, :end].transpose(1, 2)
            grad_scores = (p * (grad_p.float() - delta[:, rows])).to(q.dtype)
            grad_v[:, :end] += p.to(v.dtype).transpose(1, 2) @ grad[:, rows]
            grad_k[:, :end] += grad_scores.transpose(1, 2) @ scaled[:, rows]
            grad_q.append((grad_scores @ k[:, :end]) * ctx.scale)
        shape = ctx.saved_tensors[0].shape
        return torch.cat(grad_q, 1).view(shape), grad_k.to(k.dtype).view(shape), grad_v.to(v.dtype).view(shape), None


def blockwise_causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; whatever is not plain causal attention on a CPU goes to SDPA."""
    plain = attention_mask is None and not dropout and query.shape[2:] == key.shape[2:] == value.shape[2:]
    if not plain or query.device.type != "cpu" or kwargs.get("position_bias") is not None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    groups = query.shape[1] // key.shape[1]
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embedding under autocast gives float32
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return CausalAttention.apply(query, key, value, scale).transpose(1, 2).contiguous(), None


def use_blockwise_attention(model: Any) -> None:
    """Let a model that would use SDPA on a CPU train with `blockwise_causal`."""
    AttentionInterface.register(NAME, blockwise_causal)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if model.config._attn_implementation == "sdpa" and model.device.type == "cpu":
        model.set_attn_implementation(NAME)
