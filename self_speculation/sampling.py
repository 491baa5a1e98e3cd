"""Logits -> processed scores -> tokens, and lossless verification of drafts. Tensors in, tensors out.

Processors are transformers' own but for top-p (`nucleus.py`), in transformers' order, alike on draft and target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from .config import GenerationConfig, RunError
from .nucleus import Nucleus, draw

NAN = "the model's logits are not numbers (NaN); try --dtype float32 or --dtype bfloat16"


def sample_seed(seed: int, sample_id: object) -> int:
    """The seed of one sample: depends on the run's seed and the sample's id, on nothing that ran before."""
    digest = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Sampler:
    """Draws tokens by one set of sampling settings.

    Args:
        config: sampling settings; missing ones are resolved to their defaults.
        seed: seed of this sample's own random generator.
        device: where logits live.
        vocab_limit: ids at or above it do not exist in the tokenizer and are never drawn.
    """

    def __init__(
        self,
        config: GenerationConfig,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        vocab_limit: int | None = None,
    ):
        config = config.resolved()
        self.greedy = config.greedy
        self.vocab_limit = vocab_limit
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.history = LogitsProcessorList()  # look at the tokens before, so each position is processed by itself
        self.warpers = LogitsProcessorList()  # look at one position's scores only
        _add(self.history, config.repetition_penalty != 1, RepetitionPenaltyLogitsProcessor, config.repetition_penalty)
        _add(self.history, config.no_repeat_ngram_size, NoRepeatNGramLogitsProcessor, config.no_repeat_ngram_size)
        if not self.greedy:
            _add(self.warpers, config.temperature != 1, TemperatureLogitsWarper, config.temperature)
            _add(self.warpers, config.top_k, TopKLogitsWarper, config.top_k)
            _add(self.warpers, config.top_p != 1, Nucleus, config.top_p)
            _add(self.warpers, config.min_p, MinPLogitsWarper, config.min_p)

    def scores(self, logits: torch.Tensor, prefix: Sequence[int], block: Sequence[int] = ()) -> torch.Tensor:
        """Processed scores [n, vocabulary] of raw logits [n, vocabulary], in float32 or better.

        Row i is the position after `prefix + block[:i]`.
        """
        if self.greedy and not self.history and self._all_exist(logits):
            return logits
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self._all_exist(logits):
            scores = scores.clone() if scores is logits else scores
            scores[:, self.vocab_limit :] = -torch.inf
        if self.history:
            ids: Any = torch.tensor([[*prefix, *block]], device=logits.device)
            start = len(prefix)
            rows: list[Any] = [self.history(ids[:, : start + i], scores[i : i + 1]) for i in range(len(scores))]
            scores = torch.cat(rows)
        return self.warpers(None, scores)  # type: ignore[arg-type]

    def draw(self, logits: torch.Tensor, prefix: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        """A token after `prefix` from raw logits [1, vocabulary], and the distribution [vocabulary] it was drawn from
        (None when greedy: a point mass)."""
        scores = self.scores(logits, prefix)
        if self.greedy:
            return greedy_tokens(scores)[0], None
        probs = distribution(scores)[0]
        return draw(probs, self.generator), probs

    def verify(
        self, logits: torch.Tensor, prefix: Sequence[int], draft: Sequence[int], draft_probs: torch.Tensor | None
    ) -> tuple[int, int]:
        """How many of k drafted tokens the target accepts, and the token it adds after them.

        Args:
            logits: the target's raw logits [k + 1, vocabulary] for the positions of the drafts and the one after.
            prefix: all tokens before the drafts.
            draft_probs: [k, vocabulary] distributions that the drafts were drawn from; None for point masses.
        """
        scores = self.scores(logits, prefix, draft)
        if self.greedy:
            return accept_greedy(greedy_tokens(scores), draft)
        return speculative_sample(distribution(scores), draft, draft_probs, self.generator)

    def _all_exist(self, logits: torch.Tensor) -> bool:
        return self.vocab_limit is None or self.vocab_limit >= logits.shape[-1]


def draw_each(
    samplers: Sequence[Sampler], logits: torch.Tensor, prefixes: Sequence[Sequence[int]]
) -> list[tuple[int, torch.Tensor | None]]:
    """`Sampler.draw` for several texts at once: raw logits [texts, vocabulary]. All samplers have the same settings."""
    scores = _scores_each(samplers, logits, prefixes, [()] * len(samplers))
    if samplers[0].greedy:
        return [(token, None) for token in greedy_tokens(scores)]
    rows = zip(samplers, distribution(scores), strict=True)
    return [(draw(probs, sampler.generator), probs) for sampler, probs in rows]


def verify_each(
    samplers: Sequence[Sampler],
    logits: torch.Tensor,
    prefixes: Sequence[Sequence[int]],
    drafts: Sequence[tuple[Sequence[int], torch.Tensor | None]],
) -> list[tuple[int, int]]:
    """`Sampler.verify` for several texts at once.

    Args:
        samplers: one a text, with the same settings.
        logits: raw logits [sum of k + 1, vocabulary], one text after the other.
        drafts: each text's drafted tokens and the distributions they were drawn from.
    """
    blocks = [tokens for tokens, _ in drafts]
    scores = _scores_each(samplers, logits, prefixes, blocks)
    ends = list(accumulate(len(block) + 1 for block in blocks))
    rows = [slice(end - len(block) - 1, end) for end, block in zip(ends, blocks, strict=True)]
    if samplers[0].greedy:
        targets = greedy_tokens(scores)
        return [accept_greedy(targets[part], block) for part, block in zip(rows, blocks, strict=True)]
    probs = distribution(scores)
    texts = zip(samplers, rows, drafts, strict=True)
    return [speculative_sample(probs[part], *draft, sampler.generator) for sampler, part, draft in texts]


def _scores_each(
    samplers: Sequence[Sampler], logits: torch.Tensor, prefixes: Sequence[Sequence[int]],
    blocks: Sequence[Sequence[int]],
) -> torch.Tensor:  # fmt: skip
    """`Sampler.scores` for several texts, at once where the tokens before do not matter."""
    if not samplers[0].history:
        return samplers[0].scores(logits, ())
    parts = logits.split([len(block) + 1 for block in blocks])
    texts = zip(samplers, parts, prefixes, blocks, strict=True)
    return torch.cat([sampler.scores(*text) for sampler, *text in texts])


def accept_greedy(targets: Sequence[int], draft: Sequence[int]) -> tuple[int, int]:
    """How many of k drafted tokens are the k + 1 most probable ones, and the first that is not drafted."""
    accepted = next((i for i, token in enumerate(draft) if token != targets[i]), len(draft))
    return accepted, targets[accepted]


def greedy_tokens(scores: torch.Tensor) -> list[int]:
    """The most probable token of each row of scores [n, vocabulary], the first of equals."""
    best, tokens = scores.max(dim=-1)
    found: list[int] = torch.where(best.isnan(), -1, tokens).tolist()  # one transfer from the device
    if min(found, default=0) < 0:
        raise RunError(NAN)
    return found


def distribution(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension."""
    probs = scores.softmax(dim=-1)
    if torch.isnan(probs[..., 0]).any():
        raise RunError(NAN)
    return probs


def speculative_sample(
    target: torch.Tensor, draft: Sequence[int], draft_probs: torch.Tensor | None, generator: torch.Generator
) -> tuple[int, int]:
    """Speculative sampling (arXiv 2211.17192, algorithm 1): the result is distributed as the target's own draws.

    Args:
        target: the target's distributions p, [k + 1, vocabulary].
        draft: k drafted tokens.
        draft_probs: the distributions q they were drawn from, [k, vocabulary]; None for point masses.

    Returns:
        The number of accepted drafts, and the next token: from the residual after a rejection, else from p.
    """
    accepted = len(draft)
    if draft:
        rows, ids = range(len(draft)), list(draft)
        p = target[rows, ids]
        q = torch.ones_like(p) if draft_probs is None else draft_probs[rows, ids]
        uniform = torch.rand(len(draft), generator=generator, device=target.device, dtype=p.dtype)
        rejected = (uniform * q >= p).tolist()  # one transfer from the device
        accepted = rejected.index(True) if True in rejected else accepted
    final = target[accepted]
    if accepted < len(draft):
        final = residual(final, draft[accepted], None if draft_probs is None else draft_probs[accepted])
    return accepted, draw(final, generator)


def residual(p: torch.Tensor, token: int, q: torch.Tensor | None) -> torch.Tensor:
    """norm(max(0, p - q)) over the vocabulary, p itself where that is zero; q None is the point mass on `token`."""
    if q is None:
        rest = p.clone()
        rest[token] = 0
    else:
        rest = (p - q).clamp_(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p


def _add(processors: LogitsProcessorList, wanted: object, kind: type[LogitsProcessor], value: object) -> None:
    if wanted:
        processors.append(kind(value))  # type: ignore[call-arg]
