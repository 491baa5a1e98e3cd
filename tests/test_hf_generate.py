"""`model.generate(custom_generate=...)` gives what `model.generate` gives, and says what it cannot do."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from self_speculation import custom_generate
from self_speculation.config import UsageError
from tests.tiny import hf_model, new_hf_model, prompt_ids

WAYS = {
    "early_exit": {"exit_layer": 2, "num_speculations": 4},
    "skip_layer": {"skip_attn_layers": "1,3", "skip_mlp_layers": "2"},
    "prompt_lookup": {"drafter": "prompt_lookup"},
    "prompt_lookup+early_exit": {"drafter": "prompt_lookup+early_exit", "exit_layer": 3},
    "nothing drafted": {"exit_layer": 2, "num_speculations": 0},
}
MODEL = "llama"


def ids(length: int = 20) -> torch.Tensor:
    return torch.tensor([prompt_ids(length)])


def both(way: str = "early_exit", family: str = MODEL, **arguments) -> tuple[list[int], list[int]]:
    model = hf_model(family)
    given = {"do_sample": False, "max_new_tokens": 24, **arguments}
    own = custom_generate(**WAYS[way])
    ours = model.generate(ids(), custom_generate=own, **given)
    assert own.stats.new_tokens == ours.shape[1] - 20
    return ours[0].tolist(), model.generate(ids(), **given)[0].tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_sliding"])
def test_greedy_ids_are_those_of_generate(way, family):
    ours, plain = both(way, family)
    assert ours == plain


class Ban(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, input_ids[0, -1:] // 2 * 2, -torch.inf)


class EndsWith(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


FIFTH = hf_model(MODEL).generate(ids(), do_sample=False, max_new_tokens=5)[0, -1].item()


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 1},
        {"max_length": 27, "max_new_tokens": None},
        {"eos_token_id": FIFTH},
        {"eos_token_id": [FIFTH, 3], "min_new_tokens": 9},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [FIFTH]},
        {"logits_processor": [Ban()]},
        {"stopping_criteria": [EndsWith(FIFTH)]},
        {"prefix_allowed_tokens_fn": lambda row, seen: list(range(int(seen[-1]) % 7, 96, 3))},
        {"begin_suppress_tokens": [5, 6], "forced_eos_token_id": 4},
        {"attention_mask": torch.ones(1, 20, dtype=torch.long)},
        {"do_sample": True, "top_k": 1},
        {"do_sample": True, "top_k": 50, "temperature": 1e-3},
    ],
    ids=lambda arguments: "+".join(arguments),
)
def test_what_generate_is_told_is_kept(arguments):
    ours, plain = both(**arguments)
    assert ours == plain


def test_a_dictionary_is_returned_where_asked_for():
    model = hf_model(MODEL)
    given = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True}
    ours = model.generate(ids(), custom_generate=custom_generate(**WAYS["early_exit"]), **given)
    assert ours.sequences.tolist() == model.generate(ids(), **given).sequences.tolist()


def test_one_callable_serves_several_models_and_prompts():
    own = custom_generate(exit_layer=2)
    for family in ("llama", "qwen2", "llama"):
        for length in (1, 9):
            given = {"do_sample": False, "max_new_tokens": 8}
            model = hf_model(family)
            ours = model.generate(ids(length), custom_generate=own, **given)
            assert ours.tolist() == model.generate(ids(length), **given).tolist()


@pytest.mark.slow
def test_sampling_follows_the_same_distribution():
    """The second and third token together, 500 draws of each; a chi-squared test over the commonest pairs."""
    from scipy.stats import chi2_contingency

    model = hf_model(MODEL, torch.float32)
    given = {"do_sample": True, "temperature": 0.8, "top_k": 4, "top_p": 0.95, "max_new_tokens": 3, "min_new_tokens": 3}
    own = custom_generate(exit_layer=2, num_speculations=3)
    torch.manual_seed(0)
    draws = 500
    counts: list[dict[tuple[int, ...], int]] = [{}, {}]
    for side, more in enumerate(({"custom_generate": own}, {})):
        for _ in range(draws):
            pair = tuple(model.generate(ids(4), **given, **more)[0, -2:].tolist())
            counts[side][pair] = counts[side].get(pair, 0) + 1
    common = [pair for pair in {**counts[0], **counts[1]} if sum(c.get(pair, 0) for c in counts) >= 20]
    table = [[c.get(pair, 0) for pair in common] for c in counts]
    table = [[*row, draws - sum(row) + 1] for row in table]
    assert len(common) > 2
    assert chi2_contingency(table).pvalue > 1e-4


def test_the_seed_makes_a_sampled_text_again():
    model, own = hf_model(MODEL), custom_generate(exit_layer=2)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids(), custom_generate=own, do_sample=True, top_k=0, max_new_tokens=20).tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"inputs": torch.ones(2, 5, dtype=torch.long)}, "not 2 rows"),
        ({"do_sample": True, "num_return_sequences": 3}, "not 3 rows"),
        ({"attention_mask": torch.tensor([[0] * 3 + [1] * 17])}, "padded"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"position_ids": torch.arange(5, 25)[None]}, "position_ids"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_done_is_said(arguments, message):
    with pytest.raises(UsageError, match=message):
        hf_model(MODEL).generate(
            **{"inputs": ids(), "max_new_tokens": 4, "custom_generate": custom_generate(exit_layer=2), **arguments}
        )


def test_a_filled_cache_is_refused():
    model, cache = hf_model(MODEL), DynamicCache()
    model(ids()[:, :10], past_key_values=cache, use_cache=True)
    with pytest.raises(UsageError, match="filled cache"):
        model.generate(ids(), past_key_values=cache, max_new_tokens=4, custom_generate=custom_generate(exit_layer=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "early_exit needs exit_layer"),
        ({"exit_layer": 0}, "exit_layer 0"),
        ({"exit_layer": 2, "temperature": 0.5}, r"custom_generate\(temperature"),
        ({"exit_layer": 2, "max_steps": 5}, r"custom_generate\(max_steps"),
        ({"exit_layr": 2}, "exit_layr"),
        ({"drafter": "magic"}, "choose one of"),
    ],
    ids=str,
)
def test_settings_are_checked_at_once(settings, message):
    with pytest.raises(UsageError, match=message):
        custom_generate(**settings)


def test_an_exit_that_the_model_does_not_have_is_refused():
    with pytest.raises(UsageError, match="between 1 and 5"):
        hf_model(MODEL).generate(ids(), max_new_tokens=4, custom_generate=custom_generate(exit_layer=6))


def test_a_model_that_was_moved_or_cast_is_split_anew():
    model, own = new_hf_model(MODEL), custom_generate(**WAYS["early_exit"])
    given = {"do_sample": False, "max_new_tokens": 12}
    model.generate(ids(), custom_generate=own, **given)
    model.float()
    ours = model.generate(ids(), custom_generate=own, **given)
    assert torch.equal(ours, model.generate(ids(), **given)) and own.model.dtype is torch.float32
