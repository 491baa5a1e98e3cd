"""Attention of a few tokens: the same as PyTorch's, in our passes only."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from self_speculation.modeling import AdapterShape, SelfSpeculativeModel
from self_speculation.modeling import attention as attention_module
from self_speculation.modeling.adapter import Adapter
from self_speculation.modeling.attention import MOST_ROWS, NAME, grouped_sdpa
from self_speculation.modeling.masks import visible_keys
from tests.tiny import new_hf_model

KEYS = 37


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("kind", [bool, float, None])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_attends_as_sdpa_does(dtype, heads, shared, n, kind, batch):
    if kind is None and n != 1:
        pytest.skip("only one token needs no mask")
    torch.manual_seed(0)
    query = torch.randn(batch, n, heads, 16, dtype=dtype).transpose(1, 2)  # as layers make it
    room = torch.randn(2, batch, shared, 2 * KEYS, 16, dtype=dtype)
    key, value = room[0, :, :, :KEYS], room[1, :, :, :KEYS]  # a part of the cache
    mask = visible_keys(torch.arange(KEYS), torch.arange(KEYS - n, KEYS).clamp(min=0)[:, None], 20)[None, None]
    mask = {bool: mask, float: torch.where(mask, 0.0, -torch.inf).to(dtype), None: None}[kind]
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    ours, _ = grouped_sdpa(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert ours.shape == (batch, n, heads, 16) and ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=0, atol={torch.bfloat16: 0.02}.get(dtype, 1e-5))


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of every product that `grouped_sdpa` makes itself."""
    rows = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(query, *args, **kwargs):
        rows.append(query.shape[2])
        return real(query, *args, **kwargs)

    monkeypatch.setattr(attention_module, "F", SimpleNamespace(scaled_dot_product_attention=counted))
    return rows


@pytest.mark.parametrize("way", ["direct", "view"])
def test_our_passes_use_it_and_the_model_itself_does_not(calls, way):
    model = SelfSpeculativeModel(new_hf_model("llama"))
    if way == "view":
        model.backbone.direct = None
    config = model.backbone.config
    groups = config.num_attention_heads // config.num_key_value_heads
    assert groups > 1 and config._attn_implementation == "sdpa"
    cache = model.new_cache(64)
    calls.clear()  # of the checks at load
    model.run(model.ids(range(1, 6)), cache, 0)
    assert not calls  # a prompt has no mask: it is causal
    model.run(model.ids([7]), cache, 5)
    model.run(model.ids([8, 9, 10]), cache, 6)
    assert calls == [groups] * model.num_layers + [3 * groups] * model.num_layers
    calls.clear()
    few = MOST_ROWS // groups
    model.run(model.ids(range(1, few + 2)), cache, 9)
    model.hf_model(input_ids=model.ids([1, 2, 3]))
    assert not calls and config._attn_implementation == "sdpa"


def test_what_is_asked_for_otherwise_stays(calls):
    model = SelfSpeculativeModel(new_hf_model("llama"))
    model.hf_model.set_attn_implementation("eager")
    with pytest.raises(ZeroDivisionError), model.backbone.attention:
        assert model.backbone.config._attn_implementation == "eager"
        _ = 1 / 0
    model.hf_model.set_attn_implementation("sdpa")
    with pytest.raises(ZeroDivisionError), model.backbone.attention:
        assert model.backbone.config._attn_implementation == NAME
        _ = 1 / 0
    assert model.backbone.config._attn_implementation == "sdpa"
    calls.clear()
    model.run(model.ids([1]), model.new_cache(8), 0)
    assert calls


def test_an_adapter_attends_in_the_same_way(calls):
    model = SelfSpeculativeModel(new_hf_model("llama"))
    adapter = Adapter(model.backbone, AdapterShape("layer", 1, model.num_layers - 1))
    cache = model.new_cache(8)
    states = torch.randn(1, 1, model.backbone.config.hidden_size, dtype=model.dtype)
    calls.clear()
    with torch.inference_mode():
        model.run_adapter(adapter, model.ids([1]), cache, 0, states)
    assert len(calls) == 1
    assert copy.deepcopy(adapter).layer is not adapter.layer
