"""Greedy output is token for token that of `model.generate`: family x way x drafter x exit x K x prompt x budget."""

from itertools import product

import pytest
import torch

from self_speculation.config import DRAFTERS, RunError
from self_speculation.decoding import DraftAlone
from self_speculation.modeling import SelfSpeculativeModel, Unsupported
from tests import tiny
from tests.pairwise import pairwise

EXITS = (1, tiny.LAYERS // 2, tiny.LAYERS - 1)
SPECULATIONS = tuple(range(1, 9))
PROMPTS = (1, 2, tiny.WINDOW - 1, 3 * tiny.WINDOW)
BUDGETS = ("1", "2", "K", "K+1", "K+2", "60")
COLUMNS = (tiny.FAMILIES, tiny.WAYS, tuple(tiny.DRAFTERS), EXITS, SPECULATIONS, PROMPTS, BUDGETS)


def check(family, way, drafter, exit_layer, num_speculations, prompt_length, budget):
    model = tiny.split(family, way)
    assert (model.backbone.direct is None) == (way == "view")
    prompt = tiny.prompt_ids(prompt_length)
    steps = eval(budget, {"K": num_speculations})
    made = tiny.new_drafter(drafter, model, exit_layer, num_speculations)
    decoded = tiny.run(model, made, prompt, steps=steps, num_speculations=num_speculations)
    assert decoded.tokens == tiny.oracle(family, tuple(prompt), steps)
    assert decoded.stop_reason == "budget" and len(decoded.tokens) == steps == decoded.stats.new_tokens


@pytest.mark.parametrize("row", pairwise(*COLUMNS), ids=lambda row: "-".join(map(str, row)))
def test_greedy_equals_generate(row):
    """Every pair of values of two columns. Cases: transformers #47447, #48280 (sliding windows), Kangaroo (budget)."""
    check(*row)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_equals_generate_everywhere(family):
    """The full cross, without what a drafter does not look at; every other row takes the other way."""
    for places in product(*(range(len(column)) for column in COLUMNS[2:])):
        drafter, exit_layer, num_speculations, *rest = (
            column[place] for column, place in zip(COLUMNS[2:], places, strict=True)
        )
        if "early_exit" not in drafter and exit_layer != EXITS[0]:
            continue
        if not drafter and num_speculations != SPECULATIONS[0]:
            continue
        check(family, tiny.WAYS[sum(places) % 2], drafter, exit_layer, num_speculations, *rest)


def test_every_drafter_of_the_command_line_is_covered():
    assert set(DRAFTERS) <= {part for name in tiny.DRAFTERS for part in name.split("+")}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_family_takes_the_direct_way(family):
    """A silent fallback to the slower view would be noticed here."""
    assert SelfSpeculativeModel(tiny.hf_model(family)).backbone.direct is not None


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_text_is_lively_and_early_exits_are_sometimes_right(family):
    """Identity would mean little for a model that repeats one token or whose drafts are always wrong."""
    prompt = tiny.prompt_ids(24)
    assert len(set(tiny.oracle(family, tuple(prompt), 16))) >= 4
    model = tiny.split(family)
    drafter = tiny.new_drafter("early_exit", model, 2)
    assert 0 < tiny.run(model, drafter, prompt, steps=16).stats.acceptance_rate < 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_float32_differs_only_at_near_ties(family):
    """Design, correctness rule 1. Case: EAGLE #75, #212: the gap at the first divergence decides."""
    model = tiny.split(family, "direct", torch.float32)
    prompt = tuple(tiny.prompt_ids(24))
    expected = tiny.oracle(family, prompt, 16, torch.float32)
    got = tiny.run(model, tiny.new_drafter("early_exit", model, 3, 5), prompt, steps=16).tokens
    first = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
    if first is not None:
        with torch.inference_mode():
            logits = tiny.hf_model(family, torch.float32)(torch.tensor([[*prompt, *expected[:first]]])).logits[0, -1]
        top = logits.topk(2).values
        assert float(top[0] - top[1]) < 1e-4


@pytest.mark.parametrize("way", tiny.WAYS)
@pytest.mark.parametrize("family", ("llama", "gemma2", "qwen3_sliding", "mixtral", "llama_eager"))
@pytest.mark.parametrize("exit_layer", EXITS)
def test_draft_alone_is_the_shorter_model(family, way, exit_layer):
    """Autoregressive decoding with an exit layer gives what the first layers, norm and head give."""
    model = tiny.split(family, way)
    prompt = tiny.prompt_ids(13)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            cache = model.new_cache(len(tokens))
            hidden = model.run(model.ids(tokens), cache, 0, stop=exit_layer)
            tokens.append(int(model.head(hidden)[-1].argmax()))
    none = tiny.new_drafter("", model)
    assert tiny.run(model, none, prompt, steps=12, draft_alone=DraftAlone(exit_layer)).tokens == tokens[len(prompt) :]


def refused_configs():
    import transformers as t

    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    yield "mamba", t.MambaConfig(**small, state_size=4)
    yield "lfm2", t.Lfm2Config(**small, **heads, layer_types=["conv", "conv", "full_attention", "conv"])
    yield "qwen3_next", t.Qwen3NextConfig(
        **small, **heads, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    yield "jamba", t.JambaConfig(**small, **heads, num_experts=2, mamba_d_state=4, use_mamba_kernels=False)
    yield "recurrent_gemma", t.RecurrentGemmaConfig(**small, **heads, head_dim=8, lru_width=32)
    yield "gpt2", t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)


@pytest.mark.parametrize(
    ("name", "config"), refused_configs(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_models_that_cannot_be_split_or_rolled_back_are_refused_by_name(name, config):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(Unsupported, match=name) as caught:
        SelfSpeculativeModel(model)
    assert isinstance(caught.value, RunError) and "\n" not in str(caught.value)
