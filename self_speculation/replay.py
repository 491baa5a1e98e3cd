"""What a drafter would do on a text that the target wrote, by letting it draft at every place of the text.

That is as slow as drafting, and needs nothing from the drafter but its drafts. The rounds follow as in `prediction`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from .decoding import Decoded
from .drafters import AdapterDrafter, Context, Draft
from .modeling import KeptStates, SelfSpeculativeModel
from .prediction import NEVER, Trace, Written, read
from .sampling import Sampler, distribution


@torch.inference_mode()
def replay(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    prompt: Sequence[int],
    decoded: Decoded,
    drafter: AdapterDrafter,
    *,
    budget: int,
    end_ids: Collection[int] = (),
    most_speculations: int = 6,
) -> Trace:
    """Follow an adapter along a text that the target wrote; in the trace it goes by its depth.

    Under greedy decoding the rounds are those of a run, to the token.

    Args:
        sampler: the settings the text was decoded with.
        budget: the most new tokens that were allowed.
        end_ids: ids at which a draft ends.
        most_speculations: the longest draft that will be asked for.
    """
    text = read(model, prompt, decoded, budget=budget, end_ids=end_ids)
    n, most = len(text.tokens), most_speculations
    chance, wrong_length = np.zeros((n, most)), np.full((n, most), NEVER)
    target = _Target(model, sampler, text)
    capacity = len(prompt) + n + most + 1
    context = Context(
        model, model.new_cache(capacity), sampler if sampler.greedy else _Along(sampler, [*prompt, *text.tokens]),
        list(prompt), end_ids, most, KeptStates(drafter.depth, capacity),
    )  # fmt: skip
    model.prefill(model.ids(prompt), context.cache, states=context.states)
    drafter.start(context)
    for place in range(1, n):
        context.tokens.append(text.tokens[place - 1])
        limit = min(most, text.positions - place)
        draft = drafter.propose(context, limit) if limit > 0 else Draft()
        for depth, token in enumerate(draft.tokens[: n - place]):
            if draft.probs is not None:
                chance[place + depth, depth] = target.overlap(place + depth, draft.probs[depth])
            elif token == text.tokens[place + depth]:
                chance[place + depth, depth] = 1
            else:
                if len(draft.tokens) < limit:
                    wrong_length[place + depth, depth] = len(draft.tokens) - depth
                break
        last = model.ids(context.tokens[-1:])
        model.verify(last, context.cache, context.position, None, context.states)
    return Trace((drafter.depth,), chance[None], wrong_length[None], text.closed, budget, text.positions,
                 sampler.greedy)  # fmt: skip


class _Along(Sampler):
    """Draws the tokens of a text, so that drafts go along it, with the distributions they would be drawn from."""

    def __init__(self, sampler: Sampler, text: Sequence[int]):
        self.__dict__.update(vars(sampler))
        self.text = text

    def draw(self, logits: torch.Tensor, prefix: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        return self.text[min(len(prefix), len(self.text) - 1)], distribution(self.scores(logits, prefix))[0]


class _Target:
    """The target's distributions along a text that it wrote; a few are held at once."""

    def __init__(self, model: SelfSpeculativeModel, sampler: Sampler, text: Written):
        self.model, self.sampler, self.text = model, sampler, text
        self.held: dict[int, torch.Tensor] = {}

    def overlap(self, place: int, draft: torch.Tensor) -> float:
        """The chance that a token drawn from `draft` [vocabulary] is accepted at a place, sum(min(p, q))."""
        if place not in self.held:
            prefix = [*self.text.prompt, *self.text.tokens[:place]]
            logits = self.model.head(self.text.states[-1:, place : place + 1])
            self.held = {near: probs for near, probs in self.held.items() if place - near < 16}
            self.held[place] = distribution(self.sampler.scores(logits, prefix))[0]
        return float(torch.minimum(self.held[place], draft).sum())
