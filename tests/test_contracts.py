"""What the code takes for granted about transformers, one test a fact: a new release that changes one fails here."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin

from self_speculation.modeling import KVCache, SelfSpeculativeModel
from self_speculation.modeling.backbone import Slots
from self_speculation.modeling.cache import PositionedLayer
from tests import tiny

IDS = torch.tensor([[5, 9, 33, 7, 70, 2, 8, 41, 11, 60, 3, 22]])


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def recorded(family: str, ids: torch.Tensor = IDS, position: int = 0, **kwargs):
    """What each layer of the family's decoder is given."""
    seen = []
    backbone = tiny.split(family).backbone

    def visit(index, hidden, given):
        seen.append((hidden, given))
        return hidden

    cache = KVCache([None] * tiny.LAYERS, 1)
    cache.position = position
    backbone.forward_slots(ids, cache, visit, **kwargs)
    return backbone, seen


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_model_is_a_decoder_with_embed_tokens_layers_and_norm_and_a_head(family):
    model = tiny.hf_model(family)
    found = [m for m in model.children() if all(hasattr(m, name) for name in ("embed_tokens", "layers", "norm"))]
    assert len(found) == 1 and len(found[0].layers) == tiny.LAYERS


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_decoder_takes_a_cache_under_one_of_two_names(family):
    forward = inspect.unwrap(type(tiny.hf_model(family).model).forward)
    assert {"cache", "past_key_values"} & set(inspect.signature(forward).parameters)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layers_return_a_plain_tensor(family):
    model = tiny.split(family)
    seen = []
    hooks = [layer.register_forward_hook(lambda m, a, out: seen.append(type(out))) for layer in model.backbone.layers]
    tiny.hf_model(family)(input_ids=IDS)
    for hook in hooks:
        hook.remove()
    assert seen == [torch.Tensor] * tiny.LAYERS


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layers_are_called_with_hidden_states_and_these_keywords(family):
    """And the decoder goes through `self.layers[:n]` or `self.layers`, so that slots may take their place."""
    backbone, seen = recorded(family)
    assert len(seen) == tiny.LAYERS
    for hidden, given in seen:
        assert hidden.shape == (1, IDS.shape[1], 32)
        assert {"attention_mask", "position_embeddings", "position_ids", backbone.cache_name} <= set(given)
        cos, sin = given["position_embeddings"]
        assert cos.shape == sin.shape and cos.shape[:2] == (1, IDS.shape[1])
    assert isinstance(backbone.view.layers, Slots)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_mask_of_four_dimensions_is_taken_as_it_is(family):
    ready = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    _, seen = recorded(family, attention_mask=ready)
    assert all(given["attention_mask"] is ready for _, given in seen)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rotary_tables_of_a_position_do_not_depend_on_the_others(family):
    _, whole = recorded(family)
    _, part = recorded(family, IDS[:, 5:8], position=5)
    for (_, a), (_, b) in zip(whole, part, strict=True):
        for ours, theirs in zip(a["position_embeddings"], b["position_embeddings"], strict=True):
            assert torch.equal(ours[:, 5:8], theirs)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_masks_follow_the_cache_s_position_and_sizes(family):
    """One layer's sizes make all masks: a cache whose layers are all full gives masks over every position."""
    backbone, seen = recorded(family, IDS[:, :3], position=11)
    for window, (_, given) in zip(backbone.direct.windows, seen, strict=True):
        mask = given["attention_mask"]
        assert mask.shape == (1, 1, 3, 14)
        visible = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        for query in range(3):
            last = 11 + query
            first = 0 if window is None else max(0, last - window + 1)
            assert visible[query].nonzero()[:, 0].tolist() == list(range(first, last + 1))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_need_only_the_normed_hidden_states(family):
    """The head with a decoder that only norms gives the model's logits: scaling and soft-capping are in it."""
    model = tiny.split(family)
    hidden = model.run(IDS, model.new_cache(12), 0)
    assert torch.allclose(model.head(hidden), tiny.hf_model(family)(input_ids=IDS).logits[0], atol=1e-9)


def test_a_cache_layer_needs_no_more_than_what_ours_has():
    assert not getattr(PositionedLayer, "__abstractmethods__", None)
    assert issubclass(PositionedLayer, CacheLayerMixin) and issubclass(KVCache, Cache)


def test_a_cache_hands_keys_and_values_to_the_layer_of_that_index():
    cache = KVCache([None, None, 4], 8)
    keys = torch.arange(12.0).reshape(1, 1, 6, 2)
    for index in range(3):
        cache.update(keys, -keys, index)
    cache.position = 6
    for index, seen in ((0, 7), (2, 4)):
        new = torch.full((1, 1, 1, 2), 99.0)
        got, values = cache.update(new, -new, index)
        assert got.shape[2] == seen and torch.equal(got, -values) and torch.equal(got[:, :, -1:], new)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("family", ("llama", "gemma2", "qwen3_sliding"))
def test_one_new_token_without_a_mask_sees_all_it_is_given(family):
    """Attention is causal only where several tokens come without a mask."""
    model = tiny.split(family)
    cache = model.new_cache(12)
    model.run(IDS[:, :-1], cache, 0)
    one = model.run(IDS[:, -1:], cache, 11)
    assert torch.allclose(one, model.run(IDS, model.new_cache(12), 0)[:, -1:], atol=1e-6)


def test_layer_kinds_and_state_are_declared():
    """By these recurrent and hybrid models are refused."""
    assert set(tiny.CONFIGS["gemma2"]().layer_types) == {"full_attention", "sliding_attention"}
    assert "conv" in transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]).layer_types
    assert transformers.MambaForCausalLM._is_stateful and not transformers.LlamaForCausalLM._is_stateful


def test_sliding_windows_are_declared():
    assert tiny.CONFIGS["mistral_sliding"]().sliding_window == tiny.WINDOW
    assert tiny.CONFIGS["mistral"]().sliding_window is None
    assert getattr(tiny.CONFIGS["qwen3"](), "sliding_window", None) is None


@pytest.mark.parametrize("kind", ("dynamic", "longrope"))
def test_rotary_embeddings_that_depend_on_the_length_take_the_view(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rope_parameters=rope,
    )  # fmt: skip
    assert SelfSpeculativeModel(transformers.LlamaForCausalLM(config)).backbone.direct is None


def test_loading_reports_missing_weights(tmp_path):
    tiny.hf_model("llama").save_pretrained(tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, use_safetensors=True, dtype=torch.float64
    )
    assert not report["missing_keys"] and model.dtype == torch.float64


def test_processors_take_rows_and_leave_them_alone():
    """Two-dimensional ids and scores; what they are given may be used again."""
    ids, scores = torch.tensor([[1, 2, 1]]), torch.randn(1, 8)
    before = scores.clone()
    for processor in (
        transformers.RepetitionPenaltyLogitsProcessor(1.3), transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.TemperatureLogitsWarper(0.7), transformers.TopKLogitsWarper(3),
        transformers.TopPLogitsWarper(0.9), transformers.MinPLogitsWarper(0.1),
    ):  # fmt: skip
        assert processor(ids, scores).shape == (1, 8)
        assert torch.equal(scores, before)


def test_warpers_treat_rows_alike_and_need_no_ids():
    scores = torch.randn(3, 8)
    warpers = (transformers.TemperatureLogitsWarper(0.7), transformers.TopKLogitsWarper(3),
               transformers.TopPLogitsWarper(0.9), transformers.MinPLogitsWarper(0.1))  # fmt: skip
    for warper in warpers:
        rows = torch.cat([warper(None, scores[i : i + 1]) for i in range(3)])
        assert torch.equal(warper(None, scores), rows)


def test_generate_orders_processors_as_the_sampler_does():
    """By name; that the outcome is the same is tested in test_sampling.py."""
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2, no_repeat_ngram_size=2
    )
    from self_speculation.config import GenerationConfig
    from self_speculation.nucleus import without_sorting
    from self_speculation.sampling import Sampler

    theirs = tiny.hf_model("llama")._get_logits_processor(config, input_ids_seq_length=3)
    sampler = Sampler(GenerationConfig(
        sample=True, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2, no_repeat_ngram_size=2
    ))  # fmt: skip
    assert [type(p) for p in without_sorting(theirs)] == [type(p) for p in (*sampler.history, *sampler.warpers)]
