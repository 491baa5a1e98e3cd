"""Prediction: drafted and accepted of every cell without running it, what rounds cost, and what auto chooses."""

import itertools
from dataclasses import replace

import pytest
import torch
from folders import byte_tokenizer, tiny_llama

from self_speculation.config import GenerationConfig
from self_speculation.generation import Generator
from self_speculation.loading import Loaded
from self_speculation.modeling import SelfSpeculativeModel
from self_speculation.prediction import simulate, trace
from self_speculation.sampling import Sampler

EXITS, LENGTHS = (1, 2, 3, 5), (1, 2, 3, 6)
PROMPTS = ("the quick brown fox", "a", "abcabcabcabc")
GREEDY = GenerationConfig(sample=False, max_steps=20, generation_strategy="self_speculative")


@pytest.fixture(scope="module")
def loaded():
    model = tiny_llama()
    with torch.no_grad():  # later layers change little, so that early exits are often right
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight *= 0.5**number
            layer.mlp.down_proj.weight *= 0.5**number
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
