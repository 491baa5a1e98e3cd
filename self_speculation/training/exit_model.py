"""A model whose every layer can be an exit: one forward pass, the losses of the enabled exits, layers dropped a sample.

The model's code is its family's own. Hooks on its decoder layers keep hidden states and put a layer's input back in
place of its output where a sample drops the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..modeling import Backbone


class ExitModel(nn.Module):
    """`model` with the losses of its exits. `forward` is what DistributedDataParallel wraps."""

    def __init__(self, model: PreTrainedModel, compiled: bool = False):
        super().__init__()
        self.model = model
        with torch.no_grad():
            self.backbone = Backbone(model)
        self.layers = self.backbone.layers
        self.loss_of = torch.compile(exit_loss, dynamic=False) if compiled else exit_loss
        if compiled:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(self.layers))
            for layer in self.layers:
                layer.forward = torch.compile(layer.forward, dynamic=False)
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(self._hook(index))
        self._kept: dict[int, torch.Tensor] | None = None
        self._dropped: torch.Tensor | None = None

    def forward(
        self,
        tokens: torch.Tensor,
        enabled: Sequence[int],
        dropped: torch.Tensor | None = None,
        mix: float = 0.0,
        last_mix: float = 0.0,
    ) -> torch.Tensor:
        """Losses of the exits after the `enabled` layers, the last layer's among them and at the end.

        Args:
            tokens: [B, T+1] ids; position i predicts i+1.
            enabled: layers l, rising, ending in L-1.
            dropped: [B, L] True where a sample skips a layer (section 4.1.1); None drops nothing.
            mix: what early exits learn: 0 the data, 1 the last layer's distribution.
            last_mix: what the last layer learns: 0 the data, 1 the mean of the early exits' distributions; with
                `mix` this is deep mutual learning (arXiv 1706.00384) between the exits.

        Returns:
            [len(enabled)] means over all positions.
        """
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        hidden = self.hidden_states(inputs, enabled, dropped)
        *early, final = [self.backbone.head(hidden[layer]) for layer in enabled]
        losses = [self.loss_of(logits, labels, final.detach() if mix else None, mix) for logits in early]
        if last_mix and early:
            each = [self.loss_of(final, labels, logits.detach(), last_mix) for logits in early]
            return torch.stack([*losses, torch.stack(each).mean()])
        return torch.stack([*losses, self.loss_of(final, labels, None, 0.0)])

    def hidden_states(
        self, inputs: torch.Tensor, wanted: Sequence[int], dropped: torch.Tensor | None = None
    ) -> dict[int, torch.Tensor]:
        """Hidden states [B, T, H] leaving the `wanted` layers, before the final norm."""
        with self._keeping(wanted, dropped) as kept:
            self.backbone.decoder(input_ids=inputs, use_cache=False)
        return kept

    @contextlib.contextmanager
    def _keeping(self, wanted: Sequence[int], dropped: torch.Tensor | None) -> Iterator[dict[int, torch.Tensor]]:
        self._kept, self._dropped = {layer: torch.empty(0) for layer in wanted}, dropped
        try:
            yield self._kept
        finally:
            self._kept = self._dropped = None

    def _hook(self, index: int) -> Any:
        def after_layer(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self._kept is None:
                return output
            if self._dropped is not None:
                output = torch.where(self._dropped[:, index, None, None], args[0], output)
            if index in self._kept:
                self._kept[index] = output
            return output

        return after_layer


def exit_loss(logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None, mix: float) -> torch.Tensor:
    """Cross-entropy of an exit, averaged over positions, against the data and another exit's distribution.

    Args:
        logits: [B, T, V] of the exit.
        labels: [B, T] ids that the data has.
        teacher: [B, T, V] logits of the other exit, without gradient; None for the data alone.
        mix: weight of the teacher, 0 to 1.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide).flatten(0, 1)
    if teacher is None:
        return F.cross_entropy(logits, labels.flatten())
    wanted = mix * torch.softmax(teacher.to(wide).flatten(0, 1), -1)
    log_p = torch.log_softmax(logits, -1)
    soft = -(wanted * log_p).sum(-1).mean()
    return soft + (1 - mix) * F.nll_loss(log_p, labels.flatten()) if mix < 1 else soft
