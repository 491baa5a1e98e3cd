"""sweep.py: the grid, its table and heat map, prediction, killed and resumed runs, several processes."""

import json
import random
import shlex
import signal
import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from self_speculation.adapters import save_adapter
from self_speculation.config import UsageError
from self_speculation.grid import CELL_COLUMNS, SweepConfig, grid, prediction_report
from self_speculation.loading import load
from self_speculation.modeling import Adapter, AdapterShape
from self_speculation.records import SAMPLE_COLUMNS
from tests.runs import arguments, call, save_exit_friendly, start, steady, tables

SMALL = {"exit_layer_first": 2, "exit_layer_last": 3, "num_speculations_last": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_exit_friendly(tmp_path_factory.mktemp("model"))


def test_grid_is_layerskips_clipped_to_the_model():
    assert len(grid(SweepConfig(), "early_exit", 32)) == 15 * 6
    assert grid(SweepConfig(num_speculations_last=1), "prompt_lookup+early_exit", 4) == [(1, 1), (2, 1), (3, 1)]
    steps = SweepConfig(exit_layer_first=4, exit_layer_step=4, num_speculations_first=3, num_speculations_step=3)
    assert grid(steps, "early_exit", 17) == [(4, 3), (4, 6), (8, 3), (8, 6), (12, 3), (12, 6)]
    with pytest.raises(UsageError, match="--exit_layer_first 6: must be between 1 and 5"):
        grid(SweepConfig(exit_layer_first=6), "early_exit", 6)
    assert grid(SweepConfig(exit_layer_first=6, num_speculations_last=2), "skip_layer", 6) == [(None, 1), (None, 2)]


@pytest.mark.parametrize("flags", [
    {"exit_layer_first": 0}, {"exit_layer_first": 5, "exit_layer_last": 4}, {"num_speculations_step": 0},
    {"num_speculations_first": 0}, {"predict_best": -1},
])  # fmt: skip
def test_mistakes_name_the_flag(flags):
    with pytest.raises(UsageError, match=f"--{list(flags)[-1]}"):
        SweepConfig(**flags)


def test_every_cell_has_the_same_samples_and_follows_from_them(model, tmp_path, capsys):
    assert call("sweep", arguments(model, tmp_path, **SMALL)) == 0
    found = tables(tmp_path, "sweep")
    cells, samples = found[""], found["samples"]
    assert tuple(cells.columns) == CELL_COLUMNS and tuple(samples.columns[: len(SAMPLE_COLUMNS)]) == SAMPLE_COLUMNS
    assert list(zip(cells.exit_layer, cells.num_speculations, strict=True)) == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert cells.exit_layer.dtype == int and cells.acceptance_rate.dtype == float
    ids = {name: tuple(group.sample_id) for name, group in samples.groupby("strategy", sort=False)}
    assert [name.startswith("autoregressive") for name in ids] == [True, False, False, True, False, False]
    assert len(set(ids.values())) == 1
    plain = samples[samples.generation_strategy == "autoregressive"]
    assert len(plain) == 2 * 3  # every speed-up is against it, so it is decoded oftener than a cell
    base = plain.decode_tokens.sum() / plain.decode_s.sum()
    for _, cell in cells.iterrows():
        group = samples[(samples.exit_layer == cell.exit_layer) & (samples.num_speculations == cell.num_speculations)]
        tokens, seconds = group.decode_tokens.sum(), group.decode_s.sum()
        assert cell.acceptance_rate == pytest.approx(group.accepted.sum() / group.drafted.sum())
        assert cell.tokens_per_round == pytest.approx(tokens / group.rounds.sum())
        assert cell.total_time == pytest.approx(seconds / 3) and cell.time_per_token == pytest.approx(seconds / tokens)
        assert cell.speedup == pytest.approx(tokens / seconds / base)
    stem = next(tmp_path.glob("sweep_*.json")).with_suffix("")
    assert matplotlib.image.imread(f"{stem}.png").ndim == 3
    assert Path(f"{stem}.pdf").read_bytes().startswith(b"%PDF")
    shown = capsys.readouterr().out
    best = cells.loc[cells.speedup.idxmax()]
    command = shlex.split(shown.strip().splitlines()[-1])
    assert command[:2] == ["python", "benchmark.py"]
    assert command[command.index("--exit_layer") + 1] == str(int(best.exit_layer))
    runs = pd.read_csv(tmp_path / "runs.csv")
    assert [json.loads(text)["strategy"].split(":")[0] for text in runs.metrics] == ["autoregressive", "early_exit"]
    assert call("benchmark", command[2:]) == 0  # the printed command runs


def test_one_by_n_works(model, tmp_path):
    flags = {"exit_layer_first": 2, "exit_layer_last": 2, "num_speculations_last": 3, "num_samples": 1}
    assert call("sweep", arguments(model, tmp_path, **flags)) == 0
    assert len(tables(tmp_path, "sweep")[""]) == 3 and list(tmp_path.glob("*.png"))


def test_prediction_equals_the_run_in_every_cell_of_four_by_four(model, tmp_path, capsys):
    flags = {"exit_layer_last": 4, "num_speculations_last": 4, "predict": True, "predict_best": 0, "num_samples": 2}
    assert call("sweep", arguments(model, tmp_path, **flags)) == 0
    found = tables(tmp_path, "sweep")
    cells = found[""]
    assert len(cells) == 16 and cells.predicted_speedup.gt(0).all() and found["rounds"].exact.all()
    columns = ["rounds", "drafted", "accepted", "decode_tokens"]
    keys = ["sample_id", "exit_layer", "num_speculations"]
    measured = found["samples"].dropna(subset=["exit_layer"]).astype({"exit_layer": int, "num_speculations": int})
    measured, predicted = (
        table.astype({"sample_id": str}).set_index(keys)[columns].sort_index().astype(int)
        for table in (measured, found["rounds"])
    )
    pd.testing.assert_frame_equal(measured, predicted)
    np.testing.assert_allclose(cells.predicted_acceptance_rate, cells.acceptance_rate)
    assert "predicted against measured" in capsys.readouterr().out


def test_only_the_best_predicted_cells_are_run(model, tmp_path, capsys):
    flags = {"exit_layer_last": 3, "num_speculations_last": 3, "predict": True, "predict_best": 2, "num_samples": 2}
    assert call("sweep", arguments(model, tmp_path, **flags)) == 0
    cells = tables(tmp_path, "sweep")[""]
    ran = cells[cells.speedup.notna()]
    assert len(cells) == 9 and len(ran) == 2
    assert set(ran.index) == set(cells.predicted_speedup.nlargest(2).index)
    assert "~" in capsys.readouterr().out


@pytest.mark.parametrize("drafter", [
    {"skip_attn_layers": "2,3"}, {"drafter": "prompt_lookup"}, {"drafter": "prompt_lookup+early_exit"},
])  # fmt: skip
def test_any_drafter_is_swept(model, tmp_path, capsys, drafter):
    assert call("sweep", arguments(model, tmp_path, **SMALL, **drafter)) == 0
    found = tables(tmp_path, "sweep")
    exits = 2 if "early_exit" in drafter.get("drafter", "") else 1
    drafting = found["samples"].query("generation_strategy != 'autoregressive'")
    assert len(found[""]) == 2 * exits == drafting.strategy.nunique()
    assert list(found[""].num_speculations) == [1, 2] * exits and found[""].speedup.gt(0).all()
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    assert ("--exit_layer" in command) == (exits == 2)
    assert call("benchmark", command[2:]) == 0
    row = pd.read_csv(tmp_path / "runs.csv").iloc[-1]
    assert row.drafter == drafter.get("drafter", "skip_layer")


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    loaded, folder = load(str(model), dtype="float32"), tmp_path_factory.mktemp("adapter")
    save_adapter(folder, Adapter(loaded.model.backbone, AdapterShape("layer", 4, 5)), loaded.model.hf_model, "tiny", {})
    return folder


@pytest.mark.parametrize("drafter", ["skip_layer", "adapter"])
def test_the_prediction_of_a_part_equals_its_run(model, adapter, tmp_path, drafter):
    part = {"skip_attn_layers": "2,3"} if drafter == "skip_layer" else {"adapter": adapter}
    flags = {**part, "num_speculations_last": 4, "predict": True, "predict_best": 0, "dtype": "float32"}
    assert call("sweep", arguments(model, tmp_path, **flags)) == 0
    found = tables(tmp_path, "sweep")
    columns, keys = ["rounds", "drafted", "accepted", "decode_tokens"], ["sample_id", "num_speculations"]
    measured = found["samples"].dropna(subset=["num_speculations"])
    measured, predicted = (
        table.astype({"sample_id": str}).set_index(keys)[columns].sort_index().astype(int)
        for table in (measured, found["rounds"])
    )
    pd.testing.assert_frame_equal(measured, predicted, check_index_type=False)
    assert found[""].exit_layer.isna().all() and found[""].predicted_speedup.gt(0).all()


def test_the_number_of_speculations_of_an_adapter_is_chosen(model, adapter, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("self_speculation.auto.SECONDS", 0.2)
    flags = {"adapter": adapter, "generation_strategy": "self_speculative", "dtype": "float32"}
    for _ in range(2):
        assert call("benchmark", arguments(model, tmp_path, **flags)) == 0
        assert " --num_speculations " in next(line for line in capsys.readouterr().err.splitlines() if "chose" in line)
    assert len(list((tmp_path / "cache" / "auto").iterdir())) == 1


def test_report_counts_what_lies_within_ten_per_cent():
    row = {"acceptance_rate": 0.5, "predicted_acceptance_rate": 0.47}
    rows = [{**row, "speedup": 1.0, "predicted_speedup": 1.05}, {**row, "speedup": 1.0, "predicted_speedup": 1.3}]
    text = prediction_report([*rows, {"predicted_speedup": 2.0}])
    assert "1 of 2" in text and "largest 30.0%" in text and "0.030" in text


def test_sampling_predicts_acceptance_by_its_chance(model, tmp_path):
    flags = {"exit_layer_first": 2, "exit_layer_last": 4, "exit_layer_step": 2, "num_speculations_last": 2,
             "predict": True, "predict_best": 0, "sample": True, "max_steps": 40}  # fmt: skip
    assert call("sweep", arguments(model, tmp_path, **flags)) == 0
    cells = tables(tmp_path, "sweep")[""]
    assert (cells.predicted_acceptance_rate - cells.acceptance_rate).abs().max() < 0.25


@pytest.mark.slow
def test_two_processes_write_the_rows_of_one(model, tmp_path):
    for count in (1, 2):
        for predict in (True, False):
            out = tmp_path / f"{count}{predict}"
            child = start("sweep", arguments(model, out, **SMALL, predict=predict, predict_best=0), count)
            _, errors = child.communicate()
            assert child.returncode == 0, errors
    for predict in (True, False):
        one, two = (tables(tmp_path / f"{count}{predict}", "sweep") for count in (1, 2))
        assert set(one) == set(two)
        for name in one:
            pd.testing.assert_frame_equal(steady(one[name]), steady(two[name]))


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(model, tmp_path):
    flags = {**SMALL, "num_samples": 8, "max_steps": 60}
    assert call("sweep", arguments(model, tmp_path / "whole", **flags)) == 0
    expected, draws = tables(tmp_path / "whole", "sweep"), random.Random(0)
    out = tmp_path / "killed"
    argv, kills = arguments(model, out, **flags), 0
    for attempt in range(40):
        child = start("sweep", argv)
        while child.poll() is None and not list(out.glob("sweep_*.json")):
            time.sleep(0.02)
        try:
            child.wait(timeout=draws.uniform(0, 1.5))
        except Exception:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.communicate()
        argv = arguments(model, out, **flags, resume=next(out.glob("sweep_*.json")))
        if child.returncode == 0 or kills == 10:
            break
        assert attempt < 39
    assert kills >= 1
    assert call("sweep", argv) == 0
    found = tables(out, "sweep")
    assert set(found) == set(expected)
    for name in expected:
        pd.testing.assert_frame_equal(steady(found[name]), steady(expected[name]))
