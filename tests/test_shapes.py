"""`benchmarks/shapes.py`: what rounds of a model of any shape would gain."""

from __future__ import annotations

import signal

import pytest

from benchmarks import shapes
from self_speculation import cli
from self_speculation.modeling import SkipSet

TINY = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def test_what_a_round_gains(monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setitem(shapes.SHAPES, "llama-1b", TINY)
    given = "--acceptance 0 1 --num_speculations 3 --prompt_tokens 8 --seconds 0 --dtype float32"
    with pytest.raises(SystemExit) as stop:
        cli.run(shapes.main, (shapes.ShapesConfig,), given.split())
    assert not stop.value.code
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [(row[0].split(",")[0], row[1]) for row in rows] == [
        (name, length) for name in ("early_exit", "skip_layer") for length in "13"
    ]
    for _, length, draft, verify, even, nothing, all_of_it in rows:
        steps = float(draft) + float(verify)
        assert float(nothing) == pytest.approx(1 / steps, rel=0.05)
        assert float(all_of_it) == pytest.approx((1 + int(length)) / steps, rel=0.05)
        assert float(even.rstrip("%")) / 100 == pytest.approx((steps - 1) / int(length), abs=0.05)


def test_skip_sets_grow_from_the_last_layer_down():
    assert shapes.spread_set(4, 0.25) == SkipSet.of(attn=[2, 3])
    assert shapes.spread_set(4, 0.5) == SkipSet.of([2, 3], [2, 3])
    assert shapes.spread_set(4, 0.75) == SkipSet.of([1, 2, 3], [1, 2, 3])
