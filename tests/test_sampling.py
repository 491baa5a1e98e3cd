"""Sampling is lossless: exact laws by enumeration, a Monte-Carlo run, and broken versions that must be noticed.

The joint law of the first four tokens over a vocabulary of 16 is followed through the real loop, branch by branch
(see enumeration.py), and compared with the product of the target's processed probabilities: total variation below
1e-9. Only float64 rounding and left-out branches of 1e-14 separate the two.
"""

import math
from functools import cache
from itertools import product

import pytest
import torch

from self_speculation import sampling
from self_speculation.config import GenerationConfig, RunError
from self_speculation.drafters import Draft, Drafter
from self_speculation.sampling import Sampler, residual, sample_seed, speculative_sample
from tests import tiny
from tests.enumeration import distance, law
from tests.pairwise import pairwise
from tests.table_model import VOCAB, TableModel, random_tables

BOUND = 1e-9
PROMPT = (9, 3, 12, 3, 1, 7, 14, 10, 3, 7, 5, 3, 7)  # tokens with a past, so that looking them up finds something
OFF = {"sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}

PROCESSORS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.35},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "top_p_and_repetition_penalty": {"top_p": 0.8, "repetition_penalty": 1.4},
    "together": {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3,
                 "no_repeat_ngram_size": 2},
}  # fmt: skip


def processed(logits, tokens, *, temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size=0, **_):
    """Probabilities by hand, in Hugging Face's order, in plain Python."""
    scores = list(map(float, logits))
    for token in set(tokens):
        if repetition_penalty != 1:
            scores[token] *= repetition_penalty if scores[token] < 0 else 1 / repetition_penalty
    n = no_repeat_ngram_size
    if n:
        for start in range(len(tokens) - n + 1):
            if tokens[start : start + n - 1] == tokens[len(tokens) - n + 1 :]:
                scores[tokens[start + n - 1]] = -math.inf
    scores = [score / temperature for score in scores]
    if top_k:
        least = sorted(scores)[-top_k]
        scores = [score if score >= least else -math.inf for score in scores]
    if top_p < 1:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        probs, before = softmax(scores), 0.0
        for i in order:
            if before >= top_p:
                scores[i] = -math.inf
            before += probs[i]
    if min_p:
        probs = softmax(scores)
        scores = [s if p >= min_p * max(probs) else -math.inf for s, p in zip(scores, probs, strict=True)]
    return softmax(scores)


def softmax(scores):
    top = max(scores)
    exps = [math.exp(score - top) for score in scores]
    return [e / sum(exps) for e in exps]


def exact_law(next_probs, prompt, count):
    """The joint law of `count` tokens drawn one after the other."""
    joint = {(): 1.0}
    for _ in range(count):
        joint = {
            (*tokens, token): probability * chance
            for tokens, probability in joint.items()
            for token, chance in enumerate(next_probs([*prompt, *tokens]))
            if probability * chance > 1e-14
        }
    return joint


def table_law(drafter, settings, *, count=4, num_speculations=2, seed=0, support=3):
    """The law of what the real loop gives on the table model, and the exact law."""
    target, draft = random_tables(seed, support)
    model = TableModel(target, draft)
    settings = {**OFF, **settings}
    made = tiny.new_drafter(drafter, model, 2, num_speculations) if isinstance(drafter, str) else drafter

    def run():
        return tiny.run(model, made, PROMPT, steps=count, num_speculations=num_speculations, **settings).tokens

    return law(run), exact_law(lambda tokens: processed(target(tokens), tokens, **settings), PROMPT, count)


@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_joint_law_is_the_target_s(drafter, name):
    """Cases: EAGLE #215 (top_p with a repetition penalty)."""
    got, expected = table_law(drafter, PROCESSORS[name], count=3 if not drafter else 4)
    assert abs(sum(expected.values()) - 1) < BOUND
    assert distance(got, expected) < BOUND


@pytest.mark.parametrize("drafter", ("early_exit", "skip_layer"))
@pytest.mark.parametrize(
    "settings",
    ({"draft_exit_threshold": 0.5}, {"adaptive_draft_exit": True}, {"adaptive_draft_exit": True, "draft_exit_b2": 0.1}),
    ids=("fixed", "adaptive", "quick"),
)
def test_joint_law_when_confidence_ends_drafts(drafter, settings):
    """Design, correctness rule 3: the token that ends a draft is kept and verified."""
    model = TableModel(*random_tables(0))
    made = tiny.new_drafter(drafter, model, 2, 3, **settings)
    got, expected = table_law(made, {"temperature": 0.8, "top_p": 0.95}, num_speculations=3)
    assert distance(got, expected) < BOUND


def test_joint_law_with_longer_drafts_that_are_rejected_anywhere():
    got, expected = table_law("early_exit", {"top_k": 2, "repetition_penalty": 1.4}, count=5, num_speculations=3)
    assert distance(got, expected) < BOUND


@pytest.mark.parametrize("seed", range(3))
def test_joint_law_for_drafts_that_are_certain(seed):
    """Point masses that the target finds likely, unlikely and impossible."""
    target, _ = random_tables(seed)

    def script(tokens, limit):
        tokens = list(tokens)
        for step in range(limit):
            likely = target(tokens).topk(4).indices.tolist()
            tokens.append(likely[(len(tokens) + seed + step) % 4])
        return tokens[-limit:]

    got, expected = table_law(tiny.ScriptedDrafter(script), {"temperature": 0.8}, seed=seed)
    assert distance(got, expected) < BOUND


def test_the_prompt_is_looked_up_in_these_tests():
    target, draft = random_tables(0)
    drafter = tiny.new_drafter("prompt_lookup", TableModel(target, draft), 2, 2)
    decoded = [tiny.run(TableModel(target, draft), drafter, PROMPT, steps=4, seed=s, **OFF) for s in range(20)]
    assert sum(d.stats.drafted for d in decoded) > 10 and sum(d.stats.accepted for d in decoded) > 0


def test_a_drawn_token_verified_as_a_point_mass_is_still_lossless():
    got, expected = table_law(Changed(without_q), {"temperature": 0.8})
    assert distance(got, expected) < BOUND


class Changed(Drafter):
    """What the early exit drafts, changed by `change` before it is handed on."""

    def __init__(self, change):
        self.change = change

    def propose(self, context, limit):
        return self.change(tiny.new_drafter("early_exit", context.model, 2, limit).propose(context, limit))


def unchanged(draft):
    return draft


def low_confidence_dropped(draft):
    """Leaves out the last token when its probability is low, after it was drawn."""
    if draft.probs[-1][draft.tokens[-1]] < 0.4:
        return Draft(draft.tokens[:-1], draft.probs[:-1] if len(draft.tokens) > 1 else None, None)
    return draft


def other_q(draft):
    """Probabilities that are not those the tokens were drawn from."""
    root = draft.probs.sqrt()
    return Draft(draft.tokens, root / root.sum(-1, keepdim=True), draft.kept)


def without_q(draft):
    """Calls a drawn token a point mass. Accepts less often than it could, but whatever the token, the law is p."""
    return Draft(draft.tokens, None, draft.kept)


def without_residual(p, token, q):
    return p


def residual_of_the_token_only(p, token, q):
    rest = p.clone()
    rest[token] = 0
    return rest / rest.sum()


def scores_without_drafts(self, logits, prefix, block=()):
    return original_scores(self, logits, prefix[: len(PROMPT)], [0] * len(block))


def accepted_greedily(target, draft, draft_probs, generator):
    accepted = next((i for i, token in enumerate(draft) if token != int(target[i].argmax())), len(draft))
    return accepted, sampling.draw(target[accepted], generator)


original_scores = Sampler.scores

BROKEN = {
    "no residual": ((sampling, "residual", without_residual), unchanged),
    "wrong residual": ((sampling, "residual", residual_of_the_token_only), unchanged),
    "history without drafts": ((Sampler, "scores", scores_without_drafts), unchanged),
    "typical acceptance": ((sampling, "speculative_sample", accepted_greedily), unchanged),
    "q of another temperature": (None, other_q),
    "a drawn token dropped": (None, low_confidence_dropped),  # design, correctness rule 3
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_version_is_noticed(name, monkeypatch):
    """What the tests above would miss would pass here."""
    patch, change = BROKEN[name]
    if patch is not None:
        monkeypatch.setattr(*patch)
    got, expected = table_law(Changed(change), {"temperature": 0.8, "repetition_penalty": 1.3, "top_k": 2})
    assert distance(got, expected) > 1e6 * BOUND


@pytest.mark.parametrize("broken", (False, True))
def test_monte_carlo_with_the_real_generator(broken, monkeypatch):
    """1200 runs, chi-square on the joint of the first two tokens.

    The bound is the quantile 1 - 1e-7: one false alarm in ten million draws of the seeds. Without the residual the
    statistic is far beyond it.
    """
    from scipy.stats import chi2

    if broken:
        monkeypatch.setattr(sampling, "residual", without_residual)
    target, draft = random_tables(1, support=4)
    model = TableModel(target, draft)
    drafter = tiny.new_drafter("early_exit", model, 2, 2)
    settings = {**OFF, "temperature": 0.9}
    counts = {}
    runs = 1200
    for number in range(runs):
        pair = tuple(tiny.run(model, drafter, PROMPT, steps=4, num_speculations=2, seed=number, **settings).tokens[:2])
        counts[pair] = counts.get(pair, 0) + 1
    expected = exact_law(
        lambda tokens: processed(target(tokens), tokens, no_repeat_ngram_size=0, **settings), PROMPT, 2
    )
    assert set(counts) <= set(expected)
    cells = {pair: (counts.get(pair, 0), runs * chance) for pair, chance in expected.items()}
    rare = [cell for cell in cells.values() if cell[1] < 5]
    pooled = [cell for cell in cells.values() if cell[1] >= 5]
    if rare:
        pooled.append((sum(c for c, _ in rare), max(sum(e for _, e in rare), 1e-3)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pooled)
    assert (statistic < chi2.ppf(1 - 1e-7, len(pooled) - 1)) is not broken


SMALL = ("llama", "gemma2", "qwen3_moe")


@cache
def generate_probs(family, tokens, settings):
    """The next token's distribution by `model.generate`: transformers' own choice and order of processors."""
    ids = torch.tensor([tokens])
    out = tiny.hf_model(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=True, output_scores=True,
        return_dict_in_generate=True, **dict(settings),
    )  # fmt: skip
    return out.scores[0][0].softmax(-1).tolist()


@pytest.mark.parametrize(("family", "way", "drafter", "name"), pairwise(
    SMALL, tiny.WAYS, ("early_exit", "skip_layer", "prompt_lookup+early_exit"), ("a", "b", "c")
))  # fmt: skip
def test_joint_law_on_a_model_equals_generate_s(family, way, drafter, name):
    """The same, with real models and drafters, against the distributions that `model.generate` draws from.

    It casts logits to float32, so the bound is 1e-6.
    """
    settings = {
        "a": {"temperature": 0.7, "top_k": 3, "top_p": 0.95},
        "b": {"temperature": 1.5, "top_k": 3, "repetition_penalty": 1.5},
        "c": {"temperature": 1.0, "top_k": 4, "min_p": 0.2, "no_repeat_ngram_size": 2, "repetition_penalty": 0.8},
    }[name]
    model = tiny.split(family, way)
    prompt = tiny.prompt_ids(12)
    made = tiny.new_drafter(drafter, model, 3, 2)
    full = {**OFF, **settings}

    def run():
        return tiny.run(model, made, prompt, steps=3, num_speculations=2, **full).tokens

    asked = tuple({"top_p": 1.0, **settings}.items())
    expected = exact_law(lambda tokens: generate_probs(family, tuple(tokens), asked), prompt, 3)
    assert distance(law(run), expected) < 1e-6


def test_verification_alone_is_exact_for_any_p_and_q():
    """One call, full support: accepted drafts and the added token together have the law of p, whatever q is."""
    generator = torch.Generator().manual_seed(0)
    for case in range(6):
        p, q = torch.randn(2, 2, VOCAB, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
        if case == 1:
            q = p
        if case == 2:  # disjoint
            p[:, : VOCAB // 2], q[:, VOCAB // 2 :] = 0, 0
        if case == 3:  # q covers less than p
            q[:, ::2] = 0
        if case == 4:  # p covers less than q
            p[:, ::2] = 0
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)

        def run(p=p, q=q):
            token = sampling.draw(q[0], None)
            accepted, added = speculative_sample(p, [token], q[:1], None)
            return [token, added] if accepted else [added]

        got = law(run)
        first = {}
        for tokens, probability in got.items():
            first[tokens[:1]] = first.get(tokens[:1], 0) + probability
        assert distance(first, {(token,): float(p[0, token]) for token in range(VOCAB)}) < BOUND
        for token, following in product(range(VOCAB), repeat=2):  # after an accepted draft, the next is drawn from p
            accepted = min(float(p[0, token]), float(q[0, token]))
            assert got.get((token, following), 0) == pytest.approx(accepted * float(p[1, following]), abs=BOUND)


def test_residual_is_p_where_the_difference_is_zero():
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert torch.equal(residual(p, 0, p.clone()), p)
    assert torch.equal(residual(torch.tensor([0.0, 1.0]), 1, None), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("q_is_known", (True, False))
def test_a_draft_the_target_gives_no_chance_is_never_accepted(q_is_known):
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q = torch.tensor([[1.0, 0.0]])
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        assert speculative_sample(p, [0], q if q_is_known else None, generator) == (0, 1)


@pytest.mark.parametrize("settings", ({"sample": False}, {"sample": True, "temperature": 0}, {"temperature": 0.0}))
def test_temperature_zero_is_greedy(settings):
    """Case: lm-eval #1329, #1416, #1800."""
    sampler = Sampler(GenerationConfig(**settings))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    assert sampler.draw(logits, [1]) == (int(logits.argmax()), None)


def test_scores_of_half_precision_logits_are_float32():
    sampler = Sampler(GenerationConfig(temperature=0.7))
    scores = sampler.scores(torch.randn(2, VOCAB).bfloat16(), [1, 2], [3])
    assert scores.dtype == torch.float32


@pytest.mark.parametrize("sample", (False, True))
@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
def test_ids_outside_the_tokenizer_are_never_drawn(sample, drafter):
    """The model's vocabulary may be padded: those ids are masked in draft and target, before everything else."""
    target, draft = random_tables(0)
    limit = 9

    def raised(table):
        return lambda tokens: table(tokens) + 40.0 * (torch.arange(VOCAB) >= limit)

    model = TableModel(raised(target), raised(draft))
    made = tiny.new_drafter(drafter, model, 2, 3)
    settings = {**OFF, "sample": sample}
    for seed in range(5):
        decoded = tiny.run(model, made, (3, 7), steps=30, vocab_limit=limit, seed=seed, **settings)
        assert max(decoded.tokens) < limit
        unmasked = tiny.run(model, made, (3, 7), steps=30, seed=seed, **settings)
        assert max(unmasked.tokens) >= limit
    kept = {"top_k": 2, "top_p": 0.9, "repetition_penalty": 1.3, "temperature": 0.7}
    scores = Sampler(GenerationConfig(**kept), vocab_limit=limit).scores(model.target([1, 2])[None], [1, 2])
    assert int(torch.isfinite(scores).sum()) == 2 and not torch.isfinite(scores[0, limit:]).any()


@pytest.mark.parametrize("sample", (False, True))
@pytest.mark.parametrize("where", ("target", "draft"))
def test_logits_that_are_not_numbers_stop_the_run_with_a_hint(sample, where):
    target, draft = random_tables(0)

    def spoiled(tokens):
        return torch.full((VOCAB,), math.nan)

    model = TableModel(spoiled if where == "target" else target, spoiled if where == "draft" else draft)
    with pytest.raises(RunError, match="--dtype"):
        tiny.run(model, tiny.new_drafter("early_exit", model, 2, 3), (3, 7), steps=5, **{**OFF, "sample": sample})


def test_seeds_belong_to_samples_and_do_not_leak():
    """Case: vLLM #6038, #9441: reproducible, seeded a sample, whatever ran before."""
    model = TableModel(*random_tables(0))

    def sample(seed, steps=12):
        return tiny.run(
            model, tiny.new_drafter("early_exit", model, 2, 3), (3, 7), steps=steps, seed=seed, **OFF
        ).tokens

    torch.manual_seed(1)
    first = sample(sample_seed(42, "a"))
    torch.manual_seed(2)
    sample(sample_seed(42, "b"), steps=3)
    state = torch.random.get_rng_state()
    assert sample(sample_seed(42, "a")) == first
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len({sample_seed(seed, name) for seed in (1, 2) for name in ("a", "b", 0, "0")}) == 6  # 0 and "0" are one id
