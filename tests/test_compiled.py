"""`--compile`: the same tokens and the same cache, no region compiled twice, and a way out where it cannot be done.

Quick tests trace and run the graphs as they are; the slow ones have them turned into machine code.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from self_speculation.decoding import DraftAlone
from self_speculation.drafters import Drafter
from self_speculation.modeling import SelfSpeculativeModel
from self_speculation.modeling.compiled import Compiled
from tests import tiny
from tests.fuzz import check_cache


def compiled(family: str, monkeypatch, backend: str = "eager", dtype: torch.dtype = torch.float64):
    monkeypatch.setattr(Compiled, "backend", backend)
    model = SelfSpeculativeModel(tiny.hf_model(family, dtype))
    model.compile()
    return model


def contexts_of(drafter: Drafter) -> list:
    """The contexts of the texts that `drafter` will take part in."""
    seen: list = []
    start = drafter.start
    drafter.start = lambda context: seen.append(context) or start(context)  # type: ignore[method-assign]
    return seen


def check(model, family: str, names: tuple[str, ...], dtype: torch.dtype = torch.float64) -> None:
    for name in names:
        for length, speculations in ((24, 4), (3, 2), (9, 1)):
            prompt = tiny.prompt_ids(length)
            drafter = tiny.new_drafter(name, model, 2, speculations)
            contexts = contexts_of(drafter)
            decoded = tiny.run(model, drafter, prompt, steps=30, num_speculations=speculations)
            assert decoded.tokens == tiny.oracle(family, tuple(prompt), 30, dtype)
            if dtype == torch.float64:
                check_cache(model, drafter, contexts[0])


@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("gemma2", marks=pytest.mark.slow), pytest.param("qwen3_sliding", marks=pytest.mark.slow)],
)
def test_greedy_equals_generate(family, monkeypatch):
    """Of whatever length prompt and draft are, a region is compiled once for one token and once for several.

    The families have sdpa; eager attention with soft-capping; windows of two kinds.
    """
    model = compiled(family, monkeypatch)
    names = ("early_exit", "prompt_lookup") if family == "llama" else ("early_exit", "skip_layer")
    check(model, family, names)
    regions = model.backbone.compiled.regions
    assert model.compiled and len([name for name in regions if name[0] == "head"]) == 2
    before = len(regions), model.compile_seconds
    check(model, family, names)
    assert (len(regions), model.compile_seconds) == before


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("gemma2", torch.float64)], ids=str)
def test_greedy_equals_generate_by_machine_code(family, dtype, monkeypatch):
    model = compiled(family, monkeypatch, "inductor", dtype)
    check(model, family, ("early_exit", "prompt_lookup"), dtype)
    assert model.compiled


def test_draft_alone_and_budget_are_as_without(monkeypatch):
    model, prompt = compiled("llama", monkeypatch), tiny.prompt_ids(9)
    alone = DraftAlone(2)
    expected = tiny.run(tiny.split("llama"), tiny.new_drafter("", model), prompt, steps=12, draft_alone=alone)
    got = tiny.run(model, tiny.new_drafter("", model), prompt, steps=12, draft_alone=alone)
    assert got.tokens == expected.tokens and len(got.tokens) == 12


def test_sampled_texts_are_as_without(monkeypatch):
    model, prompt = compiled("llama", monkeypatch), tiny.prompt_ids(9)
    settings = {"sample": True, "temperature": 0.8, "steps": 20, "seed": 3}
    texts = [
        tiny.run(each, tiny.new_drafter("early_exit", each), prompt, **settings).tokens
        for each in (model, tiny.split("llama"))
    ]
    assert texts[0] == texts[1]


def test_compiling_is_timed_apart(monkeypatch):
    model, prompt = compiled("llama", monkeypatch), tiny.prompt_ids(9)
    first, second = (tiny.run(model, tiny.new_drafter("", model), prompt, steps=5).stats for _ in range(2))
    assert first.compile_s == pytest.approx(model.compile_seconds) and first.decode_s < first.compile_s
    assert "not counted" in first.note() and second.compile_s == 0 and second.note() is None


def the_warning(caplog) -> str:
    """The one line that was logged."""
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("self_speculation")]
    assert len(lines) == 1 and "\n" not in lines[0]
    return lines[0]


def long_rope_model() -> SelfSpeculativeModel:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rope_parameters=rope,
    )  # fmt: skip
    return SelfSpeculativeModel(transformers.LlamaForCausalLM(config))


def test_what_is_not_called_directly_is_not_compiled(caplog):
    model = long_rope_model()
    model.compile()
    assert not model.compiled and model.backbone.compiled.failure
    assert "--compile: llama models cannot be compiled" in the_warning(caplog)


def test_what_cannot_be_compiled_is_run_as_without(monkeypatch, caplog):
    """Which expert a token goes to depends on its data."""
    model, prompt = compiled("mixtral", monkeypatch), tiny.prompt_ids(9)
    decoded = tiny.run(model, tiny.new_drafter("early_exit", model), prompt, steps=12)
    assert decoded.tokens == tiny.oracle("mixtral", tuple(prompt), 12)
    assert not model.compiled
    assert "--compile: mixtral models cannot be compiled" in the_warning(caplog)
