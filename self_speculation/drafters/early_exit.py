"""Draft with the first layers of the model itself (LayerSkip, arXiv 2404.16710, section 4.3)."""

from __future__ import annotations

import torch

from ..modeling import ExitStates
from .base import Context, Draft, Drafter


class EarlyExitDrafter(Drafter):
    """Runs layers 0..exit_layer-1, the final norm and the LM head for each drafted token.

    Keys and values of these layers stay in the cache, and the hidden states that leave them are handed on, so that
    verification runs only the layers from `exit_layer` on.
    """

    def __init__(self, exit_layer: int):
        self.exit_layer = exit_layer

    def propose(self, context: Context, limit: int) -> Draft:
        model, position = context.model, context.position
        tokens: list[int] = []
        probs: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        last = context.tokens[-1]
        while len(tokens) < limit:
            hidden = model.run(model.ids([last]), context.cache, position + len(tokens), stop=self.exit_layer)
            last, distribution = context.sampler.draw(model.head(hidden), [*context.tokens, *tokens])
            tokens.append(last)
            states.append(hidden)
            if distribution is not None:
                probs.append(distribution)
            if last in context.end_ids:
                break
        kept = ExitStates(self.exit_layer, torch.cat(states, dim=1))
        return Draft(tokens, torch.stack(probs) if probs else None, kept)
