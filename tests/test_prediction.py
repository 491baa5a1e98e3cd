"""Prediction: drafted and accepted of every cell without running it, what rounds cost, and what auto chooses."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from self_speculation import auto, costs
from self_speculation.config import GenerationConfig
from self_speculation.costs import Costs, measure_costs, spread
from self_speculation.drafters.layers import EarlyExitDrafter
from self_speculation.forecast import Forecast
from self_speculation.generation import Generator
from self_speculation.loading import Loaded
from self_speculation.modeling import SelfSpeculativeModel
from self_speculation.prediction import NEVER, Rounds, Trace, simulate, trace
from self_speculation.sampling import Sampler
from tests.folders import byte_tokenizer
from tests.runs import exit_friendly

EXITS, LENGTHS = (1, 2, 3, 5), (1, 2, 3, 6)
PROMPTS = ("the quick brown fox", "a", "abcabcabcabc")
GREEDY = GenerationConfig(sample=False, max_steps=20, generation_strategy="self_speculative")


@pytest.fixture(scope="module")
def loaded():
    model = exit_friendly(max_position_embeddings=256)
    return Loaded("tiny", SelfSpeculativeModel(model), byte_tokenizer())


def predicted_and_measured(loaded, config, prompt, end_ids=None):
    """{(exit, speculations): (predicted counts, measured counts)} of one prompt."""
    ids = loaded.encode(prompt)
    plain = Generator(loaded, replace(config, generation_strategy="autoregressive"))(ids)
    end_ids = {*loaded.eos_ids, *(config.stop_token_ids or ())}
    sampler = Sampler(config, vocab_limit=len(loaded.tokenizer))
    found = trace(loaded.model, sampler, ids, plain, EXITS, budget=config.max_steps, end_ids=end_ids,
                  most_speculations=max(LENGTHS))  # fmt: skip
    assert found.exact
    cells = {}
    for exit_layer, length in itertools.product(EXITS, LENGTHS):
        cell = replace(config, exit_layer=exit_layer, num_speculations=length)
        stats = Generator(loaded, cell)(ids).stats
        rounds = simulate(found, exit_layer, length)
        cells[exit_layer, length] = (
            (rounds.rounds, rounds.drafted, rounds.accepted, rounds.decode_tokens),
            (len(stats.rounds), stats.drafted, stats.accepted, stats.decode_tokens),
        )
    return cells


def most_drafted(loaded, config, prompt, exit_layer=1):
    """Ids that drafts hold most often, which as end ids cut many drafts short."""
    tokens = Generator(loaded, replace(config, generation_strategy="autoregressive", exit_layer=exit_layer))(prompt)
    return list(dict.fromkeys(tokens.tokens))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_counts_are_those_of_a_run_in_every_cell(loaded, prompt):
    cells = predicted_and_measured(loaded, GREEDY, prompt)
    assert all(predicted == measured for predicted, measured in cells.values()), cells
    assert any(accepted for _, (_, _, accepted, _) in cells.values())


@pytest.mark.parametrize("number", range(3))
def test_an_end_id_that_only_drafts_hold_cuts_them(loaded, number):
    prompt = PROMPTS[number]
    stops = most_drafted(loaded, GREEDY, prompt)[number : number + 2]
    cells = predicted_and_measured(loaded, replace(GREEDY, stop_token_ids=stops), prompt)
    assert all(predicted == measured for predicted, measured in cells.values()), cells


@pytest.mark.parametrize("change", [
    {"max_steps": 1}, {"max_steps": 2}, {"max_steps": 7}, {"repetition_penalty": 1.3, "stop_token_ids": [101, 97]},
    {"no_repeat_ngram_size": 2},
])  # fmt: skip
def test_budgets_positions_and_processors(loaded, change):
    cells = predicted_and_measured(loaded, replace(GREEDY, **change), PROMPTS[0])
    assert all(predicted == measured for predicted, measured in cells.values()), cells


def test_the_last_positions_of_the_model(loaded):
    cells = predicted_and_measured(loaded, GREEDY, "z" * 246)
    assert all(predicted == measured for predicted, measured in cells.values()), cells


def test_stop_string(loaded):
    plain = Generator(loaded, replace(GREEDY, generation_strategy="autoregressive"))(PROMPTS[0])
    for place in (3, 4, 9):
        stop = loaded.decode(plain.tokens[place : place + 2])
        if not stop.strip("\ufffd"):
            continue
        cells = predicted_and_measured(loaded, replace(GREEDY, stop_words=[stop]), PROMPTS[0])
        assert all(predicted == measured for predicted, measured in cells.values()), cells


def by_hand(chance, **changes):
    chance = np.array(chance, dtype=float)[None, :, None]
    made = {"closed": False, "budget": chance.shape[1], "positions": 1000, "exact": True}
    return Trace((4,), chance, np.full(chance.shape, NEVER), **{**made, **changes})


def test_rounds_worked_out_by_hand():
    found = simulate(by_hand([0, 1, 1, 0, 1, 1, 1, 1]), 4, 3)  # [1 1 0]+1, then [1 1 1]: the budget leaves room for 3
    assert (found.rounds, found.drafted, found.accepted, found.decode_tokens) == (2, 6, 5, 7)
    assert found.by_length == {3: 2}
    never = simulate(by_hand([0] * 5), 4, 2)
    assert (never.rounds, never.drafted, never.accepted) == (4, 5, 0) and never.by_length == {2: 2, 1: 1, 0: 1}
    closed = simulate(by_hand([1] * 5, closed=True, budget=99), 4, 9)  # the draft ends with the end id
    assert (closed.rounds, closed.drafted, closed.accepted, closed.decode_tokens) == (1, 4, 4, 3)
    assert simulate(by_hand([0]), 4, 3) == Rounds()


def test_costs_between_measured_points_and_break_even():
    costs = Costs(10.0, (2, 6), (1, 3), ((2.0, 6.0), (6.0, 18.0)), ((8.0, 10.0), (4.0, 6.0)))
    assert costs.draft_step(4) == 4 and costs.verification(4, 2) == 7 and costs.round(4, 2) == 15
    assert costs.round(4, 0) == 10 and costs.break_even(4, 2) == 0.25
    rounds = Rounds(rounds=10, drafted=20, accepted=5, decode_tokens=15)
    rounds.by_length[2] = 10
    assert rounds.speedup(costs, 4) == 1  # at break-even acceptance
    assert spread(1, 5, 3) == (1, 3, 5) and spread(4, 4, 3) == (4,)


def test_costs_are_measured(loaded):
    drafters = {5: EarlyExitDrafter(5), 1: EarlyExitDrafter(1)}
    costs = measure_costs(loaded.model, Sampler(GREEDY), [1, 2, 3], drafters, [1, 4], seconds=0)
    assert costs.exits == (1, 5) and costs.lengths == (1, 4)
    assert all(value > 0 for value in (costs.step, *costs.draft[0], *costs.draft[1], *costs.verify[0]))


def cell(exit_layer, length, speedup):
    return auto.Cell(exit_layer, length, 0.5, 2.0, speedup, 0.3, 1.1, 0.6)


@pytest.fixture
def chosen(loaded, monkeypatch, tmp_path):
    """A function that lets the toolkit choose among given cells: (settings, what was said)."""
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(tmp_path))

    def choose(cells, prompts=(), **settings):
        asked = []
        monkeypatch.setattr(auto, "predict", lambda *a, **k: asked.append(a[1:]) or cells)
        said = []
        config = GenerationConfig(generation_strategy="self_speculative", sample=False, max_steps=4, **settings)
        return Generator(loaded, config, notify=said.append, prompts=prompts).config, " ".join(said), asked

    return choose


def test_auto_takes_the_fastest_predicted_cell_and_says_why(chosen):
    config, said, asked = chosen([cell(2, 3, 1.2), cell(3, 4, 1.5), cell(4, 1, 1.1)])
    assert (config.exit_layer, config.num_speculations) == (3, 4)
    assert "--exit_layer 3 --num_speculations 4" in said and "1.50 x" in said and "break-even at 60%" in said
    assert len(asked) == 1
    config, said, asked = chosen([cell(1, 1, 9.0)])  # kept for the model: not predicted again
    assert (config.exit_layer, config.num_speculations) == (3, 4) and not asked


def test_auto_chooses_by_the_first_prompts_it_is_given(chosen, loaded):
    _, _, asked = chosen([cell(2, 3, 1.2)])
    assert asked[0][2] == [loaded.encode(text) for text in auto.PROMPTS]
    config, _, asked = chosen([cell(3, 4, 1.5)], prompts=[(1, 2), [3], [4], [5]])  # not what was kept for others
    assert asked[0][2] == [[1, 2], [3], [4]] and config.exit_layer == 3


def test_auto_keeps_what_was_given(chosen):
    _, _, asked = chosen([cell(2, 5, 1.2)], num_speculations=5)
    assert asked[0][1] == (5,)
    _, _, asked = chosen([cell(4, 2, 1.2)], exit_layer=4)
    assert asked[0][0] == (4,)
    _, said, asked = chosen([], exit_layer=4, num_speculations=2)
    assert not said and not asked


def test_auto_decodes_autoregressively_when_nothing_pays(chosen, loaded):
    config, said, _ = chosen([cell(2, 3, 0.8), cell(3, 4, 0.9)])
    assert config.num_speculations == 0 and "autoregressive" in said and "break-even" in said
    stats = Generator(loaded, config)("abc").stats
    assert stats.drafted == 0 and stats.new_tokens == 4
    config, _, _ = chosen([cell(2, 3, 0.8)], drafter="prompt_lookup+early_exit")
    assert config.drafter == "prompt_lookup" and config.num_speculations == 10


def test_auto_predicts_a_real_model(loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(tmp_path))
    prompts = [loaded.encode(text) for text in auto.PROMPTS]
    cells = auto.predict(Forecast(loaded, GREEDY), (1, 3, 5), (1, 4), prompts, seconds=0)
    assert len(cells) == 6 and all(c.speedup > 0 and 0 <= c.acceptance_rate <= 1 for c in cells)
    by_exit = {c.exit_layer: c.acceptance_rate for c in cells if c.num_speculations == 4}
    assert by_exit[5] > by_exit[1]
    Generator(loaded, GenerationConfig(generation_strategy="self_speculative", max_steps=4))("abc")  # sampling too
    assert len(list((tmp_path / "auto").glob("*.json"))) == 1


@pytest.mark.parametrize(("times", "line"), [
    ([3.0, 5.0, 9.0], [3.0, 5.0, 9.0]),  # 1 + 2 k
    ([2.0, 4.0, 8.0], [2.0, 4.0, 8.0]),
    ([1.0, 4.0, 10.0], [1.35, 2.7, 5.39]),  # what a draft begins with cannot take less than nothing: through 0
])  # fmt: skip
def test_times_of_drafts_lie_on_a_line(times, line):
    found = costs._on_a_line([1, 2, 4], times)
    assert found == pytest.approx(line, abs=0.01) and found == sorted(found) and found[0] > 0
