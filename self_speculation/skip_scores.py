"""What drafting with a skip set would do on a text that the target wrote, and what it would cost.

At every place of the text at once, a draft is begun: each position attends to the target's keys and values of the past
and to the draft's own since it began, as in decoding. One forward pass gives the first drafted tokens of all places.
The drafts that agree with the text go on for a second pass, and so on; drafts deeper than that are taken to agree as
often as the deepest that was followed. The rounds follow as in `prediction`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .costs import RoundCosts, time_rounds
from .drafters.layers import SkipLayerDrafter
from .modeling import SelfSpeculativeModel, SkipSet
from .modeling.branches import branch
from .prediction import NEVER, Rounds, Trace, Written, row_scores, scored_tokens, simulate
from .sampling import Sampler, distribution, greedy_tokens


@torch.inference_mode()
def follow(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    text: Written,
    skip: SkipSet,
    depth: int,
    end_ids: Collection[int] = (),
    token_ids: torch.Tensor | None = None,
) -> Trace:
    """Follow a skip set along a text that the target wrote.

    Args:
        sampler: the settings the text was decoded with.
        depth: how many tokens of a draft are followed. With the longest draft that will be asked for, greedy rounds
            are those of a run, to the token.
        end_ids: ids at which a draft ends. With these, greedy drafts are followed past their first wrong token.
        token_ids: what the draft's head scores at first; None for all.
    """
    n, first = len(text.tokens), len(text.prompt)
    before = [*text.prompt, *text.tokens]
    chance, wrong_length = np.zeros((n, depth)), np.full((n, depth), NEVER)
    begins = list(range(1, n))  # place of each branch's first draft
    lefts = [depth] * len(begins)  # depth at which it left the text; `depth` while it has not
    written: list[list[int]] = [[] for _ in begins]  # what it drafted after leaving
    starts = [first + begin - 1 for begin in begins]
    branches = branch(model, text.cache, text.cached, starts, model.layers_without(skip))
    tokens = [before[start] for start in starts]
    scored = scored_tokens(model, text, token_ids)
    for step in range(depth):
        if not begins:
            break
        hidden = branches.step(tokens)
        prefixes = [
            [*before[: first + begin + min(left, step)], *own]
            for begin, left, own in zip(begins, lefts, written, strict=True)
        ] if sampler.history else []  # fmt: skip
        places = [min(begin + step, n - 1) for begin in begins]
        drafts, chances = _drafts(model, sampler, text, hidden, prefixes, places, scored, begins)
        kept, tokens = [], []
        for row, (begin, draft) in enumerate(zip(begins, drafts, strict=True)):
            place, left = begin + step, lefts[row]
            if left == depth:
                chance[place, step] = chances[row]
                if draft != text.tokens[place]:
                    left = lefts[row] = step
            if left < depth:
                written[row].append(draft)
                if draft in end_ids:
                    wrong_length[begin + left, left] = step - left + 1
                elif end_ids:
                    kept.append(row)
                    tokens.append(draft)
            elif place + 1 < n:
                kept.append(row)
                tokens.append(draft)
        branches.keep(kept)
        begins, lefts = [begins[row] for row in kept], [lefts[row] for row in kept]
        written = [written[row] for row in kept]
    exact = sampler.greedy
    return Trace((skip,), chance[None], wrong_length[None], text.closed, text.budget, text.positions, exact)


def _drafts(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    text: Written,
    hidden: torch.Tensor,
    prefixes: Sequence[Sequence[int]],
    places: Sequence[int],
    scored: torch.Tensor | None,
    begins: Sequence[int],
) -> tuple[list[int], list[float]]:
    """What each row drafts, and the chance that the target accepts a draft there. When sampling, the text's own token
    stands for the draft."""
    expected = [text.tokens[place] for place in places]
    if sampler.greedy:
        rows = row_scores(model, sampler, hidden, prefixes, scored, begins)
        drafts = [token for _, some in rows for token in greedy_tokens(some)]
        return drafts, [float(a == b) for a, b in zip(drafts, expected, strict=True)]
    chances: list[float] = []
    target = text.states[-1:, places]
    ours = row_scores(model, sampler, hidden, prefixes, scored, begins)
    for (_, draft), (_, scores) in zip(ours, row_scores(model, sampler, target, prefixes), strict=True):
        chances += torch.minimum(distribution(draft), distribution(scores)).sum(-1).tolist()
    return expected, chances


KINDS = ("draft", "attn", "mlp", "layer")


@dataclass(frozen=True)
class SkipCosts(RoundCosts):
    """Seconds, with choosing the tokens included; between the measured lengths costs are taken as linear.

    Attributes:
        step: one token of autoregressive decoding.
        head: final norm and head of a draft on one token.
        lengths: draft lengths that the others were measured at.
        draft: [lengths] drafting so many tokens with nothing skipped.
        attn, mlp, layer: [lengths] what that saves for each layer whose attention, MLP, or both are skipped.
        verify: [lengths] verifying so many tokens with all layers.
        verify_kept: [lengths] the same after a draft with nothing skipped, whose states verification goes on from.
        layers: of the model.
    """

    step: float
    head: float
    lengths: tuple[int, ...]
    draft: tuple[float, ...]
    attn: tuple[float, ...]
    mlp: tuple[float, ...]
    layer: tuple[float, ...]
    verify: tuple[float, ...]
    verify_kept: tuple[float, ...]
    layers: int

    def draft_step(self, part: SkipSet, length: int = 1) -> float:
        """Drafting one of `length` tokens without the sub-layers in `part`."""
        draft, attn, mlp, layer = (self._at(length, getattr(self, kind)) / length for kind in KINDS)
        both = len(part.attn & part.mlp)
        saved = (len(part.attn) - both) * attn + (len(part.mlp) - both) * mlp + both * layer
        return max(self.head, draft - saved)

    def verification(self, part: SkipSet, length: int) -> float:
        """Verifying a draft of `length` tokens, from the first layer on in which something was skipped."""
        kept = part.shared(self.layers) / self.layers
        return (1 - kept) * self._at(length, self.verify) + kept * self._at(length, self.verify_kept)

    def _at(self, length: int, values: Sequence[float]) -> float:
        return float(np.interp(length, self.lengths, values))


@torch.inference_mode()
def measure_skip_costs(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    tokens: Sequence[int],
    lengths: Sequence[int],
    seconds: float = 5.0,
    token_ids: torch.Tensor | None = None,
) -> SkipCosts:
    """Time rounds after `tokens` as the decoding loop plays them, with nothing skipped and with the attention, the MLP
    or both of every other layer skipped: what a sub-layer costs is the mean over these.

    Args:
        tokens: the text before the round; as long as those that will be decoded.
        lengths: draft lengths to measure. Length 1 is always measured.
        seconds: about how long to take, once everything was timed a few times.
        token_ids: what a draft's head scores; None for all.
    """
    lengths = sorted({1, *lengths} - {0})
    half = range(0, model.num_layers, 2)
    sets = (SkipSet(), SkipSet.of(attn=half), SkipSet.of(mlp=half), SkipSet.of(half, half))
    head = None if token_ids is None else model.draft_head(token_ids)
    drafters = {kind: SkipLayerDrafter(skip, head=head) for kind, skip in zip(KINDS, sets, strict=True)}
    took = time_rounds(model, sampler, tokens, drafters, lengths, seconds)
    draft = [took["draft", "draft", length] for length in lengths]
    attn, mlp, layer = (
        tuple(max(0.0, whole - took["draft", kind, n]) / len(half) for whole, n in zip(draft, lengths, strict=True))
        for kind in KINDS[1:]
    )
    verify = tuple(float(np.mean([took["verify", kind, length] for kind in KINDS[1:]])) for length in lengths)
    kept = tuple(took["verify", "draft", length] for length in lengths)
    return SkipCosts(
        took["step", 0, 0], took["head", 0, 0], tuple(lengths), tuple(draft), attn, mlp, layer, verify, kept,
        model.num_layers,
    )  # fmt: skip


@dataclass(frozen=True)
class Score:
    """What a skip set is worth at its best number of speculations: pooled over texts, as predicted or measured.

    Attributes:
        time_per_token: seconds of decoding a token.
        speedup: over autoregressive decoding.
        draft_step: seconds of drafting a token; None where it was not measured apart.
    """

    num_speculations: int
    acceptance_rate: float
    tokens_per_round: float
    time_per_token: float
    speedup: float
    draft_step: float | None = None


class SkipScorer:
    """Scores skip sets on texts that the target wrote.

    Args:
        lengths: numbers of speculations to choose from.
        depth: how many tokens of a draft are followed.
        token_ids: what a draft's head scores at first; None for all.
    """

    def __init__(
        self,
        model: SelfSpeculativeModel,
        sampler: Sampler,
        texts: Sequence[Written],
        costs: SkipCosts,
        lengths: Sequence[int],
        depth: int,
        token_ids: torch.Tensor | None = None,
    ):
        self.model, self.sampler, self.texts, self.costs = model, sampler, texts, costs
        self.token_ids = token_ids
        self.lengths, self.depth = sorted(lengths), min(depth, max(lengths))

    def rounds(self, skip: SkipSet) -> dict[int, Rounds]:
        """Number of speculations -> the rounds of all texts."""
        found = {length: Rounds() for length in self.lengths}
        for number, text in enumerate(self.texts):
            traced = follow(self.model, self.sampler, text, skip, self.depth, token_ids=self.token_ids)
            for length, sums in found.items():
                sums += simulate(traced, skip, length, seed=number)
        return found

    def agreement(self, skip: SkipSet) -> float:
        """The share of tokens that the set would draft right as the first of a draft."""
        traces = [
            follow(self.model, self.sampler, text, skip, depth=1, token_ids=self.token_ids) for text in self.texts
        ]
        chances = np.concatenate([traced.chance[0, 1:, 0] for traced in traces])
        return float(chances.mean())

    def __call__(self, skip: SkipSet) -> Score:
        """The score at the number of speculations that is fastest."""
        scores = [self._score(skip, length, rounds) for length, rounds in self.rounds(skip).items()]
        return min(scores, key=lambda score: score.time_per_token)

    def _score(self, skip: SkipSet, length: int, rounds: Rounds) -> Score:
        seconds = rounds.seconds(self.costs, skip) / max(1, rounds.decode_tokens)
        return Score(
            length, rounds.acceptance_rate or 0.0, rounds.tokens_per_round or 0.0, seconds,
            self.costs.step / seconds if seconds else 0.0, self.costs.draft_step(skip, length),
        )  # fmt: skip
