"""The frozen model, an adapter, and what the adapter learns: to say what the model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..modeling import Adapter, AdapterShape, Backbone, DraftHead, KVCache

RIDGE = 0.01  # of the mean square of the inputs


class AdapterModel(nn.Module):
    """`forward` is what DistributedDataParallel wraps; only the adapter's parameters are trained, in float32.

    Args:
        autocast: what the adapter runs in; the frozen model runs in its own dtype.
        scored: share of the positions whose distributions are compared.
        regression: weight of the distance between the adapter's states and the model's.
        drifted: for `feature`, share of the inputs that are the adapter's own states in place of the model's, as they
            are from the second drafted token on (HASS, arXiv 2408.15766, trains on such inputs too).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: AdapterShape,
        token_ids: torch.Tensor | None,
        autocast: Callable[[], Any],
        scored: float = 1.0,
        regression: float = 0.0,
        drifted: float = 0.0,
    ):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        with torch.no_grad():
            self.backbone = Backbone(model)
            self.head = DraftHead(self.backbone, token_ids)
        self.adapter = Adapter(self.backbone, shape, token_ids).float().requires_grad_(True)
        self.autocast, self.scored, self.regression, self.drifted = autocast, scored, regression, drifted
        self.layers: list[nn.Module] = []  # none is an exit that is trained
        self._leave_out_what_has_no_effect()

    def forward(
        self, tokens: torch.Tensor, entering: torch.Tensor, target: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, its cross-entropy, and the share of positions at which both find the same token most probable.

        Args:
            tokens, entering: what `Adapter.forward` takes, [B, n] and [B, n, H].
            target: [B, n, H] states leaving the model's last layer where the adapter's results stand for them.
            generator: chooses the scored positions and the drifted inputs.
        """
        if self.adapter.ahead and self.drifted:
            with torch.no_grad(), self.autocast():
                own = self.draft(tokens, entering).to(entering.dtype)
            swap = torch.rand(tokens.shape, generator=generator).to(tokens.device)[:, 1:, None] < self.drifted
            entering = torch.cat([entering[:, :1], torch.where(swap, own[:, :-1], entering[:, 1:])], dim=1)
        with self.autocast():
            drafted = self.draft(tokens, entering).flatten(0, 1)
            count = max(1, round(self.scored * len(drafted)))
            rows = torch.randperm(len(drafted), generator=generator)[:count].to(drafted.device)
            drafted, target = drafted[rows], target.flatten(0, 1)[rows]
            with torch.no_grad():
                wanted = self.head(target[None])[0].float()
            logits = self.head(drafted[None])[0].float()
        soft = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        agreement = (wanted.argmax(-1) == logits.argmax(-1)).float().mean()
        loss = soft
        if self.regression:
            width = drafted.shape[-1:]
            distance = F.smooth_l1_loss(F.rms_norm(drafted.float(), width), F.rms_norm(target.float(), width))
            loss = soft + self.regression * distance
        return loss, soft.detach(), agreement

    def draft(self, tokens: torch.Tensor, entering: torch.Tensor) -> torch.Tensor:
        """The adapter's states [B, n, H] for whole sequences."""
        return self.adapter(self.backbone, tokens, self._new_cache(tokens.shape[1]), 0, entering)

    @torch.no_grad()
    def frozen(self, tokens: torch.Tensor, final: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """(tokens, entering, target) for `forward`, from sequences [B, T+1].

        Args:
            final: states [B, T, H] leaving the last layer, where they are known already.
        """
        backbone, exit_layer, inputs = self.backbone, self.adapter.shape.exit_layer, tokens[:, :-1]
        cache = self._new_cache(inputs.shape[1])
        entering = None
        if not self.adapter.ahead:
            entering = backbone.run(inputs, cache, 0, 0, backbone.layers[:exit_layer])
        if final is None:
            first = 0 if entering is None else exit_layer
            final = backbone.run(inputs, cache, 0, first, backbone.layers[first:], entering)
        if entering is None:
            return inputs[:, 1:], final[:, :-1], final[:, 1:]
        return inputs, entering, final

    @torch.no_grad()
    def fit(self, sequences: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Start the linear map of `feature` as the ridge regression onto the states entering layer `from_layer`.

        So the layer that follows meets states like those it was made for.

        Args:
            sequences: tokens [B, T+1], and states [B, T, H] leaving the last layer where they are known.
        """
        assert self.adapter.fuse is not None
        backbone, width = self.backbone, self.adapter.fuse.weight.shape[0]
        inputs_by_inputs = torch.zeros(2 * width, 2 * width, dtype=torch.float64)
        inputs_by_targets = torch.zeros(2 * width, width, dtype=torch.float64)
        for tokens, final in sequences:
            next_tokens, before, _ = self.frozen(tokens, final)
            first = backbone.layers[: self.adapter.shape.from_layer]
            wanted = backbone.run(tokens[:, :-1], self._new_cache(tokens.shape[1]), 0, 0, first)
            inputs = self.adapter.mixed(backbone, next_tokens, before).flatten(0, 1).double().cpu()
            inputs_by_inputs += inputs.T @ inputs
            inputs_by_targets += inputs.T @ wanted[:, 1 : 1 + before.shape[1]].flatten(0, 1).double().cpu()
        inputs_by_inputs.diagonal().add_(RIDGE * float(inputs_by_inputs.diagonal().mean()))
        self.adapter.fuse.weight.copy_(torch.linalg.solve(inputs_by_inputs, inputs_by_targets).T)

    @torch.no_grad()
    def agreement(self, tokens: torch.Tensor, entering: torch.Tensor, target: torch.Tensor) -> tuple[int, int]:
        """At how many positions the draft is the model's most probable token of all, and of how many."""
        with self.autocast():
            drafts = self.head(self.draft(tokens, entering)).argmax(-1)
            answers = self.backbone.head(target).argmax(-1)
        if self.head.token_ids is not None:
            drafts = self.head.token_ids[drafts]
        return int((drafts == answers).sum()), answers.numel()

    def _new_cache(self, capacity: int) -> Any:
        return KVCache(self.backbone.windows, capacity)

    def _leave_out_what_has_no_effect(self) -> None:
        """A norm in front of a sub-layer that was taken out has no gradient, and must not be waited for."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.model.device)
        states = self.backbone.decoder.embed_tokens(ids)
        with self.autocast():
            self.draft(ids, states).float().sum().backward()
        for parameter in self.adapter.parameters():
            parameter.requires_grad_(parameter.grad is not None)
            parameter.grad = None
