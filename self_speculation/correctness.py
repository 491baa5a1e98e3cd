"""Is the output unchanged? Greedy texts token by token, sampled ones by their distribution.

Greedy: a strategy's text is compared with our autoregressive one and with that of `model.generate`. Where two part,
what counts is how far the token that lost lies below the best one: nothing in float64, 1e-4 in float32, one rounding
step of the logit in bfloat16 and float16, where one row and many rows may break a near-tie differently.

Sampled: two correct decoders draw different texts, so comparing draws says nothing. Instead the verifications of a
real run are taken: the drafter's distributions and the target's logits. Each is repeated many times with drafts
drawn anew, and the tokens that come out must have the target's distribution; the target's logits must be those of a
plain forward over the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import distributed
from .benchmarking import Sample, sample_row
from .config import GenerationConfig, UsageError, require
from .datasets import DataConfig
from .decoding import Decoded
from .generation import Generator
from .loading import Loaded
from .records import RunLog
from .sampling import Sampler, speculative_sample
from .strategies import AUTOREGRESSIVE, Strategy, make_strategies

Row = dict[str, Any]

VERDICT_COLUMNS = (
    "run_id", "timestamp", "script", "git_sha", "model", "dtype", "device", "torch", "transformers", "world_size",
    "rank", "seed", "dataset", "sample_id", "generation_strategy", "drafter", "exit_layer", "num_speculations",
    "skip_attn", "skip_mlp", "adapter", "sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "no_repeat_ngram_size", "max_steps", "test", "against", "place", "compared_tokens", "first_difference", "gap",
    "allowed_gap", "draws", "p_value", "forward_distance", "allowed_distance", "verdict", "note",
)  # fmt: skip
"""Columns of a verdict. `test` is tokens or distribution; `verdict` is identical, near_tie, passed or error."""
KEY = ("sample_id", "against", "place")

DRAWS = 4000  # repetitions of one verification
PLACES = 4  # verifications taken from a text
FALSE_ALARM = 1e-8  # probability that a correct verification is called an error
SLICE = 12  # tokens counted one by one; the others count together
DISTANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # total variation between verification and a plain forward
HALF_DISTANCE = 0.1


def check_settings(config: GenerationConfig) -> None:
    """Raise `UsageError` for settings with which the output is meant to differ."""
    require(config.batch_size == 1, "batch_size", config.batch_size,
            "prompts are checked one at a time; `identical` of benchmark.py --compare checks batches")  # fmt: skip
    by_adapter = config.adapter or config.drafter == "adapter"
    if config.generation_strategy == AUTOREGRESSIVE and (
        config.exit_layer != -1 or any(config.skipped()) or by_adapter
    ):
        flag = "exit_layer" if config.exit_layer != -1 else "adapter" if by_adapter else "skip_attn_layers"
        raise UsageError(
            f"--{flag}: autoregressive decoding with part of the model is meant to differ from the whole; "
            "add --generation_strategy self_speculative"
        )


def make_checked(
    loaded: Loaded, config: GenerationConfig, *, seed: int, notify: Callable[[str], None]
) -> list[Strategy]:
    """The strategy under test first, then those that it must agree with."""
    plain = config.autoregressive()
    tested = Strategy("tested", Generator(loaded, config, seed=seed, notify=notify))
    if not config.greedy:
        return [tested]
    parsed = {"generate": ("hf", plain)}
    if config.generation_strategy != AUTOREGRESSIVE:
        parsed = {AUTOREGRESSIVE: (AUTOREGRESSIVE, plain), **parsed}
    return [tested, *make_strategies(loaded, parsed, seed=seed)]


def check(
    loaded: Loaded,
    strategies: Sequence[Strategy],
    samples: Sequence[Sample],
    data: DataConfig,
    verdicts: RunLog,
    texts: RunLog,
) -> None:
    """Check the samples that are not done, sharing the work; what was generated goes to `texts`."""
    tested = strategies[0]
    done = {key[0] for key in verdicts.done}
    todo = [sample for sample in samples if str(sample.id) not in done]
    with distributed.Progress(len(todo), unit="text") as progress:
        for sample in distributed.pull(todo):
            if len(strategies) > 1:
                decoded, found = check_tokens(loaded, strategies, sample)
            else:
                decoded, found = check_distribution(loaded, tested, sample)
            for strategy in strategies:
                text = decoded[strategy.name]
                texts.write(sample_row(strategy, sample, text, data), prediction=text.text, tokens=text.tokens)
            about = {"dataset": data.dataset, "sample_id": sample.id, **tested.generator.columns()}
            for verdict in found:
                verdicts.write({"place": None, **about, **verdict})
            progress.add()


def check_tokens(
    loaded: Loaded, strategies: Sequence[Strategy], sample: Sample
) -> tuple[dict[str, Decoded], list[Row]]:
    """The greedy texts of one sample, and a verdict on the first against each of the others."""
    decoded: dict[str, Decoded] = {}
    for strategy in strategies:
        decoded[strategy.name] = strategy.generator(sample.ids, sample_id=sample.id).complete()
    tested, *others = strategies
    ends = (*loaded.eos_ids, *(tested.generator.config.stop_token_ids or ()))
    sampler = Sampler(tested.generator.config, device=loaded.model.device, vocab_limit=len(loaded.tokenizer))
    verdicts = [
        {
            "test": "tokens",
            "against": other.name,
            **compare(loaded, sampler, sample.ids, decoded[tested.name].tokens, decoded[other.name].tokens, ends),
        }
        for other in others
    ]
    return decoded, verdicts


@torch.inference_mode()
def compare(
    loaded: Loaded,
    sampler: Sampler,
    prompt: Sequence[int],
    tokens: Sequence[int],
    reference: Sequence[int],
    ends: Sequence[int] = (),
) -> Row:
    """Where `tokens` first differ from `reference`, the gap there, and whether the dtype explains it.

    The gap is how far the lower of the two tokens lies below the best one, by a plain forward over the text before
    them. A text that is over where the other goes on has chosen one of `ends`.
    """
    place = next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), None)
    if place is None and len(tokens) == len(reference):
        return {"compared_tokens": len(tokens), "verdict": "identical"}
    place = min(len(tokens), len(reference)) if place is None else place
    text = [*prompt, *reference[:place]]
    scores = sampler.scores(loaded.model.hf_model(input_ids=loaded.model.ids(text)).logits[0, -1:], text)[0].double()
    rivals = [
        float(scores[side[place]])
        if place < len(side)
        else max((float(scores[end]) for end in ends), default=-math.inf)
        for side in (tokens, reference)
    ]
    best = float(scores.max())
    gap, allowed = best - min(rivals), allowed_gap(loaded.model.dtype, best)
    return {
        "compared_tokens": place,
        "first_difference": place,
        "gap": gap,
        "allowed_gap": allowed,
        "verdict": "near_tie" if gap <= allowed else "error",
    }


def allowed_gap(dtype: torch.dtype, logit: float) -> float:
    """How far two logits may lie apart that two correct forwards order differently."""
    if dtype == torch.float64:
        return 0.0
    if dtype == torch.float32:
        return 1e-4
    exponent = math.floor(math.log2(max(abs(logit), torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * 2.0**exponent  # the distance to the next number


@dataclass(frozen=True)
class Verification:
    """What one verification was given."""

    logits: torch.Tensor  # [k + 1, vocabulary]
    prefix: list[int]
    draft: list[int]
    draft_probs: torch.Tensor | None


class RecordingSampler(Sampler):
    """Keeps what verifications are given."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seen: list[Verification] = []

    def verify(
        self, logits: torch.Tensor, prefix: Sequence[int], draft: Sequence[int], draft_probs: torch.Tensor | None
    ) -> tuple[int, int]:
        self.seen.append(Verification(logits, list(prefix), list(draft), draft_probs))
        return super().verify(logits, prefix, draft, draft_probs)


@torch.inference_mode()
def check_distribution(loaded: Loaded, tested: Strategy, sample: Sample) -> tuple[dict[str, Decoded], list[Row]]:
    """The sampled text of one sample, and verdicts on a few of its verifications."""
    generator = tested.generator
    assert isinstance(generator, Generator)
    sampler = generator.sampler(sample.id, RecordingSampler)
    assert isinstance(sampler, RecordingSampler)
    text = generator(sample.ids, sample_id=sample.id, sampler=sampler).complete()
    with_drafts = [seen for seen in sampler.seen if seen.draft] or sampler.seen
    chosen = with_drafts[:: max(1, len(with_drafts) // PLACES)][:PLACES]
    verdicts = [check_verification(loaded, sampler, seen, len(sample.ids)) for seen in chosen]
    nothing = {"test": "distribution", "against": "target", "verdict": "passed", "note": "the text has no rounds"}
    return {tested.name: text}, verdicts or [nothing]


def check_verification(loaded: Loaded, sampler: Sampler, seen: Verification, prompt_length: int) -> Row:
    """Repeat the verification of one drafted token, and compare its logits with those of a plain forward.

    The token is the last of the draft that the draft's own distribution is known for: the one after most others.
    """
    place = max(0, len(seen.draft) - 1)
    before = [*seen.prefix, *seen.draft[:place]]
    target = sampler.scores(seen.logits[place : place + 1], before).softmax(-1)[0]
    plain = loaded.model.hf_model(input_ids=loaded.model.ids(before)).logits[0, -1]
    dtype = torch.promote_types(plain.dtype, torch.float32)
    distance = float((seen.logits[place].to(dtype).softmax(-1) - plain.to(dtype).softmax(-1)).abs().sum() / 2)
    q = seen.draft_probs[place] if seen.draft and seen.draft_probs is not None else None
    drawn = repeat_verification(target, seen.draft[place : place + 1], q, sampler.generator)
    p_value = goodness_of_fit(drawn, target)
    bound = DISTANCE.get(loaded.model.dtype, HALF_DISTANCE)
    return {
        "test": "distribution",
        "against": "target",
        "place": len(before) - prompt_length,
        "draws": DRAWS,
        "p_value": p_value,
        "forward_distance": distance,
        "allowed_distance": bound,
        "verdict": "passed" if p_value >= FALSE_ALARM and distance <= bound else "error",
    }


def repeat_verification(
    target: torch.Tensor, draft: Sequence[int], q: torch.Tensor | None, generator: torch.Generator
) -> torch.Tensor:
    """How often each token comes out first, in `DRAWS` verifications of one token drafted anew each time.

    Args:
        target: the target's distribution [vocabulary].
        draft: the drafted token, or nothing when none was drafted.
        q: the distribution it was drawn from; None when it was certain.
    """
    alive = (target > 0) if q is None else (target > 0) | (q > 0)
    if draft:
        alive[draft[0]] = True
    ids = alive.nonzero()[:, 0]  # the others can neither be drafted nor drawn
    rows = target[ids].expand(2, -1)
    q = q[ids] if q is not None else None
    certain = [int((ids == token).nonzero()) for token in draft]
    if q is None:
        drafts = certain * DRAWS
    else:
        drafts = torch.multinomial(q, DRAWS, replacement=True, generator=generator).tolist()
    counts = torch.zeros(len(target), dtype=torch.float64)
    for number in range(DRAWS):
        tokens = drafts[number : number + 1]
        accepted, added = speculative_sample(rows[: len(tokens) + 1], tokens, None if q is None else q[None], generator)
        counts[int(ids[tokens[0] if accepted else added])] += 1
    return counts


def goodness_of_fit(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square: the probability that draws from `probs` stray at least as far as `counts` do.

    The `SLICE` most probable tokens are counted one by one, the others together; a token without a chance that was
    drawn gives 0.
    """
    probs = probs.double().cpu() / probs.double().sum().cpu()
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    mean = probs * counts.sum()
    top = [int(i) for i in probs.topk(min(SLICE, len(probs))).indices if mean[i] >= 5]
    seen = [float(counts[i]) for i in top]
    wanted = [float(mean[i]) for i in top]
    rest = float(counts.sum()) - sum(seen), float(counts.sum()) - sum(wanted)
    if rest[1] >= 5:
        seen.append(rest[0])
        wanted.append(rest[1])
    elif len(seen) > 0:  # too rare for a cell of their own
        seen[-1] += rest[0]
        wanted[-1] += rest[1]
    if len(seen) < 2:
        return 1.0
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, wanted, strict=True))
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def report(rows: Iterable[Row]) -> list[str]:
    """What was found, in lines for the terminal."""
    rows = list(rows)
    tokens = [row for row in rows if row["test"] == "tokens"]
    lines = []
    for name in dict.fromkeys(row["against"] for row in tokens):
        group = [row for row in tokens if row["against"] == name]
        counts = {
            verdict: sum(row["verdict"] == verdict for row in group) for verdict in ("identical", "near_tie", "error")
        }
        what = "model.generate" if name == "generate" else "autoregressive decoding"
        lines.append(
            f"greedy, token by token against {what}: {counts['identical']} of {len(group)} texts identical, "
            f"{counts['near_tie']} parted at a near-tie, {counts['error']} errors"
        )
    for row in tokens:
        if row["verdict"] != "identical":
            lines.append(
                f"  {row['verdict']}: sample {row['sample_id']} against {row['against']} from token "
                f"{row['first_difference']} on, gap {row['gap']:.3g}, allowed {row['allowed_gap']:.3g}"
            )
    drawn = [row for row in rows if row["test"] == "distribution"]
    if drawn:
        values = [row["p_value"] for row in drawn if row.get("p_value") is not None]
        lines.append(
            "sampled: draws are not compared, since two correct decoders draw differently; the distribution is. "
            f"{len(values)} verifications, {DRAWS} draws each: smallest p-value {min(values, default=1):.2g} "
            f"(an error below {FALSE_ALARM:g}), {sum(row['verdict'] == 'error' for row in drawn)} errors"
        )
        for row in drawn:
            if row["verdict"] == "error":
                lines.append(
                    f"  error: sample {row['sample_id']}, token {row['place']}: p-value {row['p_value']:.2g}, "
                    f"distance from a plain forward {row['forward_distance']:.2g}, allowed {row['allowed_distance']:g}"
                )
    return lines
