"""The ruler's arithmetic by hand, and one run of it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ruler import FORMS, markdown, pooled, put_into, tables
from self_speculation.config import RunError
from tests.runs import call

ROOT = Path(__file__).resolve().parent.parent


def row(strategy: str, sample_id: str, tokens: int, seconds: float, **more: object) -> dict[str, object]:
    return {
        "model": "m", "dtype": "float32", "sample": False, "dataset": "chat", "strategy": strategy,
        "sample_id": sample_id, "max_steps": 10,
        "decode_tokens": tokens, "decode_s": seconds, "tokens_per_second": tokens / seconds,
        "drafted": None, "accepted": None, "rounds": None, "identical": None, "repeated_4grams": None, **more,
    }  # fmt: skip


ROWS = [
    row("autoregressive", "a", 10, 1.0), row("autoregressive", "b", 10, 2.0), row("autoregressive", "c", 10, 1.0),
    row("early_exit", "a", 10, 0.5, drafted=8, accepted=6, rounds=4, identical=True, repeated_4grams=0.5),
    row("early_exit", "b", 10, 0.5, drafted=8, accepted=2, rounds=8, identical=False, repeated_4grams=0.0),
    row("early_exit", "c", 10, 1.0, drafted=4, accepted=2, rounds=3, identical=True, repeated_4grams=0.1),
    row("hf", "a", 10, 2.0), row("hf", "b", 10, 2.0), row("hf", "c", 10, 2.0),
]  # fmt: skip


def test_speed_ups_are_medians_over_prompts_and_rates_are_pooled():
    plain, early, hf = pooled(ROWS)
    assert early["x autoregressive"] == pytest.approx(2.0) and early["spread"] == pytest.approx((1.0, 4.0))
    assert early["x hf"] == pytest.approx(4.0) and early["x economize"] is None
    assert early["tokens/s"] == pytest.approx(15.0) and early["acceptance"] == pytest.approx(0.5)
    assert early["tokens/round"] == pytest.approx(2.0) and early["identical"] == pytest.approx(2 / 3)
    assert early["repeated 4-grams"] == pytest.approx(0.2)
    assert plain["x hf"] == pytest.approx(2.0) and hf["acceptance"] is None and hf["tokens/round"] is None


def test_greedy_and_sampled_rows_have_tables_of_their_own():
    both = [*ROWS, *(one | {"sample": True} for one in ROWS)]
    assert [title for title, _ in tables(both)] == ["m, float32, greedy, chat", "m, float32, sampled, chat"]
    text = markdown(both, "head")
    assert text.startswith("head\n") and text.count("| early_exit | 15.0 | 2.00 | 1.00-4.00 | 4.00 |") == 2
    assert all(line.count("|") == len(FORMS) + 1 for line in text.splitlines() if line.startswith("|"))


def test_tables_go_into_a_part_of_a_file(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- eager -->\nold\n<!-- /eager -->\nb\n<!-- compiled -->\n<!-- /compiled -->\n")
    put_into(f"{path}#eager", "new\n")
    expected = "a\n<!-- eager -->\nnew\n<!-- /eager -->\nb\n<!-- compiled -->\n<!-- /compiled -->\n"
    assert path.read_text() == expected
    with pytest.raises(RunError, match="--into .*#other"):
        put_into(f"{path}#other", "new\n")
    assert path.read_text() == expected


@pytest.mark.slow
def test_it_runs(tmp_path):
    command = [
        sys.executable, "benchmarks/ruler.py", "--model", "selfspec-16l", "--num_samples", "1", "--max_steps", "6",
        "--without_economize", "--output_dir", str(tmp_path),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    (table,) = tmp_path.glob("ruler_*.csv")
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 * 4 * 2 and all(int(one["new_tokens"]) == 6 for one in rows)
    assert {one["dataset"] for one in rows} == {"human_eval", "source", "chat", "summary"}
    assert table.with_suffix(".png").stat().st_size > 0 and table.with_suffix(".md").read_text().count("###") == 8


def test_a_missing_economize_is_said_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call("benchmarks.ruler", ["--quick", "--output_dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: economize is not installed: pip install --no-deps economize, or --without_economize True"
    ]
    assert not list(tmp_path.iterdir())


def test_packing_and_compiling_are_refused_together_before_anything_is_measured(tmp_path, capsys):
    flags = ["--quick", "--pack_weights", "--compile", "--without_economize", "--output_dir", str(tmp_path)]
    assert call("benchmarks.ruler", flags) == 2
    assert "--pack_weights" in capsys.readouterr().err and not list(tmp_path.iterdir())
