"""`benchmarks/shapes.py`: rounds of a model of any shape, with acceptance left to chance."""

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


def test_the_table_has_what_was_imposed(monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setitem(shapes.SHAPES, "llama-1b", TINY)
    given = "--acceptance 0 1 --num_speculations 3 --prompt_tokens 8 --max_steps 18 --repeats 1 --dtype float32"
    with pytest.raises(SystemExit) as stop:
        cli.run(shapes.main, (shapes.ShapesConfig,), given.split())
    assert not stop.value.code
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rounds = {(cells[0].split(",")[0], cells[2]): float(cells[3]) for cells in lines[3:]}
    assert rounds[("| early_exit", "0%")] == rounds[("| skip_layer", "0%")] == 1
    assert rounds[("| early_exit", "100%")] == rounds[("| skip_layer", "100%")] == pytest.approx(17 / 5)
    assert all(float(cells[4]) > 0 for cells in lines[3:])


def test_skip_sets_grow_from_the_last_layer_down():
    assert shapes.spread_set(4, 0.25) == SkipSet.of(attn=[2, 3])
    assert shapes.spread_set(4, 0.5) == SkipSet.of([2, 3], [2, 3])
    assert shapes.spread_set(4, 0.75) == SkipSet.of([1, 2, 3], [1, 2, 3])
