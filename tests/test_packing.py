"""Packed weights: the same model, multiplied by in another layout."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from self_speculation import GenerationConfig, load
from self_speculation.config import ModelConfig, UsageError
from self_speculation.generation import Generator
from self_speculation.loading import fingerprint
from self_speculation.modeling.packing import PackedLinear, is_packed, pack_weights
from tests.folders import save_tiny_model
from tests.runs import call

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float32, 1e-5)])
def test_products_are_the_same_but_for_rounding(dtype, tolerance):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 96, dtype=dtype), nn.Linear(96, 32, bias=False, dtype=dtype))
    packed = copy.deepcopy(plain)
    pack_weights(packed)
    assert is_packed(packed) and not is_packed(plain)
    with torch.inference_mode():
        for shape in ((1, 1, 48), (1, 7, 48), (3, 5, 48)):
            states = torch.randn(shape).to(dtype)
            torch.testing.assert_close(packed(states), plain(states), rtol=tolerance, atol=tolerance)


def test_a_copy_is_a_plain_layer_with_weights_of_its_own():
    """An adapter starts from a copy of a layer and is then trained: it must not multiply by the model's weights."""
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))
    pack_weights(model)
    other = copy.deepcopy(model)[0]
    assert type(other) is nn.Linear and other.weight is not model[0].weight
    with torch.no_grad():
        other.weight.zero_()
        assert float(other(torch.ones(1, 8, dtype=torch.bfloat16)).sub(other.bias).abs().max()) == 0
        assert float(model(torch.ones(1, 8, dtype=torch.bfloat16)).abs().max()) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_packed_model_decodes_by_every_drafter(folder, dtype):
    loaded = load(str(folder), dtype=dtype, pack_weights=True)
    plain = load(str(folder), dtype=dtype)
    linear = [module for module in loaded.model.hf_model.modules() if isinstance(module, nn.Linear)]
    assert linear and all(isinstance(module, PackedLinear) for module in linear)
    assert fingerprint(loaded.model.hf_model) == fingerprint(plain.model.hf_model)
    base = {"sample": False, "max_steps": 12, "ignore_eos": True}
    early = {"exit_layer": 2, "num_speculations": 3}
    for drafting in ({}, early, {"skip_attn_layers": "1", "num_speculations": 2}, {"drafter": "prompt_lookup"},
                     {**early, "draft_vocabulary": 64}):  # fmt: skip
        strategy = {"generation_strategy": "self_speculative"} if drafting else {}
        assert len(Generator(loaded, GenerationConfig(**base, **strategy, **drafting))(PROMPT).tokens) == 12


@pytest.mark.parametrize(("settings", "said"), [
    ({"dtype": "float64"}, "bfloat16"), ({"dtype": "bfloat16", "compile": True}, "--compile"),
    ({"dtype": "bfloat16", "device_map": "auto"}, "--device_map"),
])  # fmt: skip
def test_what_cannot_be_packed_is_refused(folder, settings, said):
    with pytest.raises(UsageError, match=f"--pack_weights.*{said}"):
        load(ModelConfig(str(folder), pack_weights=True, **settings))


def test_training_refuses_packed_weights(folder, tmp_path, capsys):
    flags = ["--model", str(folder), "--data", __file__, "--pack_weights", "True", "--output_dir", str(tmp_path)]
    assert call("train", flags) == 2
    assert "--pack_weights" in capsys.readouterr().err and not list(tmp_path.iterdir())
