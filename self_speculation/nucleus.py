"""Drawing tokens on a CPU at a cost that does not drown a draft step.

Sorting a vocabulary of 49,152 takes 3 ms, `torch.multinomial` over it 1 ms. A round pays that for every token it drafts
or verifies, and the layers of a small model take not much longer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

FIRST, MORE = 128, 16  # most probable tokens looked at first; how many times as many next


class Nucleus(LogitsProcessor):
    """Top-p (arXiv 1904.09751, section 3.1): keeps the tokens before which, by probability, less than p has gone.

    Keeps what transformers' `TopPLogitsWarper` keeps, but for ties and rounding; only the most probable tokens are
    sorted, and more of them where they do not make up p.
    """

    def __init__(self, top_p: float):
        self.top_p, self.by_sorting = top_p, TopPLogitsWarper(top_p)

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        """Scores [n, vocabulary], the others -inf."""
        if scores.device.type == "cpu":
            size, total = FIRST, scores.logsumexp(-1, keepdim=True)
            while MORE * size <= scores.shape[-1]:
                best, ids = scores.topk(size)
                probs = (best - total).exp()
                kept = probs.cumsum(-1) - probs < self.top_p
                kept[:, 0] = True
                if not kept[:, -1].any():
                    return torch.full_like(scores, -torch.inf).scatter_(1, ids, best.masked_fill_(~kept, -torch.inf))
                size *= MORE
        return self.by_sorting(input_ids, scores)


def without_sorting(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The same processors, with `Nucleus` in place of what does the same by sorting."""
    same = (TopPLogitsWarper, -torch.inf, 1)
    return LogitsProcessorList(
        Nucleus(each.top_p)
        if (type(each), getattr(each, "filter_value", 0), getattr(each, "min_tokens_to_keep", 0)) == same
        else each
        for each in processors
    )


def draw(probs: torch.Tensor, generator: torch.Generator) -> int:
    """An id, by probabilities [vocabulary] whose sum need not be 1."""
    if probs.device.type != "cpu":
        return int(torch.multinomial(probs, 1, generator=generator))
    sums = probs.cumsum(-1, dtype=torch.float64)
    place = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    found = int(torch.searchsorted(sums, place, right=True))
    return found if found < len(probs) else int(probs.nonzero()[-1])  # rounded up to the whole sum
