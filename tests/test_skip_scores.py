"""What a skip set is foretold to do on a text, against what decoding does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from self_speculation.config import GenerationConfig
from self_speculation.generation import Generator
from self_speculation.loading import Loaded
from self_speculation.modeling import SelfSpeculativeModel, SkipSet
from self_speculation.modeling.branches import Branches, OneByOne, branching_cache
from self_speculation.prediction import Rounds, read, simulate
from self_speculation.sampling import Sampler
from self_speculation.skip_scores import SkipCosts, SkipScorer, follow, measure_skip_costs
from tests import tiny
from tests.folders import byte_tokenizer
from tests.runs import exit_friendly

SKIP = SkipSet.of(attn=[1, 4], mlp=[3, 4])
SKIPPED = {"skip_attn_layers": "1,4", "skip_mlp_layers": "3,4"}
LENGTHS = (1, 2, 5)
PROMPT = "the quick brown fox"
GREEDY = GenerationConfig(sample=False, max_steps=24, generation_strategy="self_speculative", **SKIPPED)


@pytest.fixture(scope="module")
def loaded():
    return Loaded("tiny", SelfSpeculativeModel(exit_friendly(max_position_embeddings=256)), byte_tokenizer())


def written(loaded, config, prompt=PROMPT):
    """A text of the target and the ids at which drafts end."""
    plain = replace(config, generation_strategy="autoregressive", skip_attn_layers=None, skip_mlp_layers=None)
    end_ids = {*(() if config.ignore_eos else loaded.eos_ids), *(config.stop_token_ids or ())}
    ids = loaded.encode(prompt)
    decoded = Generator(loaded, plain)(ids)
    return read(loaded.model, ids, decoded, budget=config.max_steps, end_ids=end_ids), end_ids


def counts(rounds):
    return rounds.rounds, rounds.drafted, rounds.accepted, rounds.decode_tokens


def measured(loaded, config, length):
    stats = Generator(loaded, replace(config, num_speculations=length))(PROMPT).stats
    return len(stats.rounds), stats.drafted, stats.accepted, stats.decode_tokens


@pytest.mark.parametrize("change", [
    {}, {"ignore_eos": True}, {"max_steps": 2}, {"repetition_penalty": 1.3, "stop_token_ids": [101, 97]},
    {"stop_token_ids": [10, 98, 99]}, {"no_repeat_ngram_size": 2},
])  # fmt: skip
def test_followed_to_their_full_length_drafts_are_those_of_a_run(loaded, change):
    config = replace(GREEDY, **change)
    text, end_ids = written(loaded, config)
    sampler = Sampler(config, vocab_limit=len(loaded.tokenizer))
    traced = follow(loaded.model, sampler, text, SKIP, max(LENGTHS), end_ids)
    assert traced.exact
    for length in LENGTHS:
        assert counts(simulate(traced, SKIP, length)) == measured(loaded, config, length), length
    assert change.get("max_steps") == 2 or 0 < traced.chance[0, :, 0].mean() < 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_all_places_at_once_are_each_place_by_itself(family):
    model = tiny.split(family)
    text = tiny.prompt_ids(tiny.WINDOW + 9)
    cache = branching_cache(model, len(text))
    layers = model.layers_without(SKIP)
    starts = list(range(4, len(text)))
    assert Branches.possible(model)
    model.run(model.ids(text), cache, 0)
    plain = model.new_cache(len(text))
    together, apart = (
        Branches(model, cache, len(text), starts, layers), OneByOne(model, plain, text, starts, layers)
    )  # fmt: skip
    tokens = [text[start] for start in starts]
    near = 1e-5 if model.backbone.direct.attention == "eager" else 1e-9  # eager attention rounds to float32
    for _ in range(3):
        torch.testing.assert_close(together.step(tokens), apart.step(tokens), rtol=near, atol=near)
        kept = list(range(0, len(tokens), 2))
        tokens = [(token * 7 + 1) % tiny.VOCAB for token in tokens][::2]
        together.keep(kept)
        apart.keep(kept)


def test_a_model_that_cannot_be_branched_is_followed_place_by_place(loaded, monkeypatch):
    expected = follow(loaded.model, Sampler(GREEDY), written(loaded, GREEDY)[0], SKIP, 3)
    monkeypatch.setattr(loaded.model.backbone, "direct", None)
    found = follow(loaded.model, Sampler(GREEDY), written(loaded, GREEDY)[0], SKIP, 3)
    assert (found.chance == expected.chance).all() and found.chance.any()


def test_one_pass_takes_deeper_drafts_to_agree_as_the_first(loaded):
    text, _ = written(loaded, GREEDY)
    shallow, deep = (follow(loaded.model, Sampler(GREEDY), text, SKIP, depth) for depth in (1, 5))
    assert (shallow.chance[..., 0] == deep.chance[..., 0]).all()
    assert simulate(shallow, SKIP, 1) == simulate(deep, SKIP, 1)
    assert simulate(shallow, SKIP, 5).decode_tokens == simulate(deep, SKIP, 5).decode_tokens


def test_sampled_texts_have_a_chance_of_acceptance(loaded):
    config = replace(GREEDY, sample=True, temperature=1.0, max_steps=150, ignore_eos=True)
    text, _ = written(loaded, config)
    traced = follow(loaded.model, Sampler(config, vocab_limit=len(loaded.tokenizer)), text, SKIP, 4)
    assert ((traced.chance >= 0) & (traced.chance <= 1 + 1e-6)).all() and not traced.exact
    predicted = Rounds()
    for seed in range(20):
        predicted += simulate(traced, SKIP, 4, seed=seed)
    assert predicted.acceptance_rate == pytest.approx(measured_rate(loaded, config), abs=0.1)


def measured_rate(loaded, config):
    stats = [Generator(loaded, replace(config, num_speculations=4), seed=seed)(PROMPT).stats for seed in range(4)]
    return sum(s.accepted for s in stats) / sum(s.drafted for s in stats)


COSTS = SkipCosts(10.0, 1.0, (1, 3), (10.0, 24.0), (0.5, 1.5), (1.0, 3.0), (2.0, 6.0), (12.0, 14.0), (6.0, 7.0), 6)


def test_costs_of_a_round_by_hand():
    assert SKIP.shared(6) == 1 and SkipSet().shared(6) == 6
    assert COSTS.draft_step(SKIP) == 10 - 0.5 - 1.0 - 2.0  # attention of 1, MLP of 3, the whole of 4
    assert COSTS.draft_step(SKIP, 3) == 8 - 0.5 - 1.0 - 2.0
    verify = 13 - 6.5 / 6  # layer 0 is whole, so its share of verifying 2 is saved: 13 with all layers, 6.5 with none
    assert COSTS.verification(SKIP, 2) == pytest.approx(verify)
    assert COSTS.round(SKIP, 2) == pytest.approx(17 - 1 - 2 - 4 + verify)
    assert COSTS.verification(SkipSet.of(attn=[0]), 2) == 13 and COSTS.verification(SkipSet(), 2) == 6.5
    assert COSTS.round(SKIP, 0) == 10 and COSTS.break_even(SKIP, 2) == pytest.approx(verify / 20)
    assert COSTS.draft_step(SkipSet.of(range(6), range(6))) == 1  # no less than the head


def test_costs_are_measured(loaded):
    for config in (GREEDY, replace(GREEDY, sample=True)):
        costs = measure_skip_costs(loaded.model, Sampler(config), [1, 2, 3], [1, 4], seconds=0)
        assert costs.lengths == (1, 4)
        assert min(costs.step, costs.head, *costs.draft, *costs.verify) > 0 and min(*costs.attn, *costs.mlp) >= 0


def test_the_score_is_that_of_the_fastest_number_of_speculations(loaded):
    text, _ = written(loaded, GREEDY)
    scorer = SkipScorer(loaded.model, Sampler(GREEDY), [text, text], COSTS, LENGTHS, depth=5)
    score = scorer(SKIP)
    times = {length: rounds.seconds(COSTS, SKIP) / rounds.decode_tokens
             for length, rounds in scorer.rounds(SKIP).items()}  # fmt: skip
    assert score.num_speculations == min(times, key=times.get) and score.time_per_token == min(times.values())
    assert score.speedup == pytest.approx(10 / score.time_per_token)
    nothing = scorer(SkipSet())
    assert nothing.acceptance_rate == 1 and nothing.tokens_per_round > score.tokens_per_round
