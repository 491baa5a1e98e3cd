"""search.py: trials, resumed and shared studies, refusals, the set it writes and the command it prints."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shlex
import signal
import subprocess
import time
from typing import Any
from wsgiref.util import setup_testing_defaults

import matplotlib.image
import numpy as np
import optuna
import optuna_dashboard
import pandas as pd
import pytest

from self_speculation import searching
from self_speculation.config import GenerationConfig, UsageError
from self_speculation.generation import Generator
from self_speculation.loading import load
from self_speculation.modeling import SkipSet
from self_speculation.searching import shortfall, starting_sets
from self_speculation.skip_search import TRIAL_COLUMNS, SearchConfig, break_even_report, verdict
from self_speculation.study import Proposer, SkipStudy, to_params, to_skip
from tests.runs import arguments, call, exit_friendly, save_exit_friendly, start, tables

SMALL = {"num_samples": 2, "max_steps": 20, "n_trials": 14, "most_speculations": 4, "confirm": 1}
LAYERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_exit_friendly(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def measure_costs_quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "COST_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def searched(model, measure_costs_quickly, tmp_path_factory):
    """The folder of a finished search whose drafts are followed to their end, and what it printed."""
    out, printed = tmp_path_factory.mktemp("searched"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert call("search", arguments(model, out, **SMALL, depth=4, ignore_eos=True)) == 0
    return out, printed.getvalue()


def found_set(out):
    (path,) = out.glob("search_*_skip_layer_ids.json")
    return path, json.loads(path.read_text())


def study_of(out, name=None):
    storage = f"sqlite:///{out}/search.db"
    return optuna.load_study(study_name=name or optuna.get_all_study_names(storage)[0], storage=storage)


def test_a_search_leaves_everything_one_needs(searched, capsys):
    out, shown = searched
    found = tables(out, "search")
    trials, samples, harms, evens = (found[name] for name in ("", "samples", "sensitivity", "break_even"))
    assert tuple(trials.columns) == TRIAL_COLUMNS and list(trials.trial) == list(range(14))
    assert (trials.best_value == trials.value.cummin()).all() and set(trials.origin) <= {"start", "search"}
    assert len(harms) == 2 * LAYERS and harms.agreement.between(0, 1).all()
    assert list(evens.num_speculations) == [1, 2, 3, 4]
    steps = (evens.num_speculations * evens.draft_step + evens.verification) / evens.step  # of a round
    assert np.allclose(evens.acceptance_needed, (steps - 1) / evens.num_speculations)
    assert evens.acceptance_reached.between(0, 1).all() and (evens.predicted_speedup > 0).all()
    path, chosen = found_set(out)
    names = list(samples.strategy.unique())
    assert names[0] == "autoregressive" and names[2] == f"{names[1]}_alone" and samples.identical[:1].all()
    own = samples[samples.strategy == names[1]]
    assert chosen["measured"]["acceptance_rate"] == pytest.approx(own.accepted.sum() / own.drafted.sum())
    assert matplotlib.image.imread(next(out.glob("search_*.png"))).ndim == 3
    assert "acceptance needed" in shown and "draft alone" in shown
    command = shlex.split(shown.strip().splitlines()[-1])
    assert command[:2] == ["python", "benchmark.py"] and command[command.index("--skip_layers") + 1] == str(path)
    assert call("benchmark", command[2:]) == 0  # the printed command runs
    assert "skip_layer: a step of the whole model takes" in capsys.readouterr().out
    rows = tables(out, "benchmark")[""]
    drafted = rows[rows.strategy == "skip_layer"]
    assert drafted.accepted.sum() == own.accepted.sum() and drafted.drafted.sum() == own.drafted.sum()
    skipped = drafted.skip_attn.fillna("").astype(str).iloc[0]
    assert skipped.removesuffix(".0") == ",".join(map(str, chosen["attn"]))


def test_optunas_dashboard_shows_the_study(searched):
    statuses: list[str] = []
    request: dict[str, Any] = {"PATH_INFO": "/api/studies"}
    setup_testing_defaults(request)
    app = optuna_dashboard.wsgi(f"sqlite:///{searched[0]}/search.db")
    answer = b"".join(app(request, lambda status, headers, error=None: statuses.append(status)))
    assert statuses == ["200 OK"] and len(json.loads(answer)["study_summaries"]) == 1


def test_predicted_acceptance_is_that_of_decoding_when_drafts_are_followed_to_their_end(searched):
    _, chosen = found_set(searched[0])
    for name in ("acceptance_rate", "tokens_per_round"):
        assert chosen["predicted"][name] == pytest.approx(chosen["measured"][name])


def test_a_second_run_adds_up_to_the_total_and_keeps_the_best(model, tmp_path):
    argv = {**SMALL, "confirm": 0, "num_samples": 1}
    assert call("search", arguments(model, tmp_path, **{**argv, "n_trials": 5})) == 0
    best = study_of(tmp_path).best_value
    time.sleep(1.1)  # the files of a run are named by the second
    for _ in range(2):
        assert call("search", arguments(model, tmp_path, **{**argv, "n_trials": 9})) == 0
        assert len(study_of(tmp_path).trials) == 9 and study_of(tmp_path).best_value <= best
        time.sleep(1.1)
    newest = sorted(tmp_path.glob("search_*-*[0-9].csv"))[-1]
    assert len(pd.read_csv(newest)) == 9


def test_equal_seeds_try_equal_sets(model, tmp_path):
    flags = {**SMALL, "objective": "acceptance", "min_skipped": 3, "n_trials": 15, "confirm": 0, "num_samples": 1}
    tried = []
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert call("search", arguments(model, tmp_path / out, **flags, seed=seed, random_shuffle=False)) == 0
        tried.append([trial.params for trial in study_of(tmp_path / out).trials])
    assert tried[0] == tried[1] != tried[2]
    _, chosen = found_set(tmp_path / "a")
    assert len(chosen["attn"]) + len(chosen["mlp"]) >= 3 and chosen["predicted"]["acceptance_rate"] > 0


ONE = {**SMALL, "n_trials": 1, "confirm": 0, "study_name": "mine"}


@pytest.fixture(scope="module")
def begun(model, measure_costs_quickly, tmp_path_factory):
    """A study of one trial."""
    out = tmp_path_factory.mktemp("begun")
    assert call("search", arguments(model, out, **ONE)) == 0
    return out / "search.db"


@pytest.mark.parametrize(("change", "named"), [
    ({"num_samples": 3}, "samples was"), ({"dtype": "float64"}, "dtype was"), ({"model": None}, "weights was"),
    ({"most_speculations": 5}, "most_speculations was"), ({"max_steps": 21}, "generation was"),
])  # fmt: skip
def test_another_model_or_other_samples_are_refused(model, begun, tmp_path, capsys, change, named):
    if change.get("model", 0) is None:
        other = exit_friendly()
        other.model.layers[0].mlp.up_proj.weight.data += 0.1
        other.save_pretrained(tmp_path / "other")
        for file in model.glob("*token*"):
            (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
        change = {"model": tmp_path / "other"}
    flags = {"model": model, "out": tmp_path, **ONE, "storage": begun, **change}
    assert call("search", arguments(**flags)) == 2
    message = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(message) == 1 and named in message[0] and "--study_name" in message[0]
    assert study_of(begun.parent, "mine").user_attrs["made_with"]["model"] == str(model)


def test_decoding_every_candidate(model, tmp_path):
    flags = {**SMALL, "objective_mode": "generate", "n_trials": 4, "num_speculations": 3}
    assert call("search", arguments(model, tmp_path, **flags)) == 0
    trials = tables(tmp_path, "search")[""]
    assert len(trials) == 4 and (trials.num_speculations == 3).all()
    _, chosen = found_set(tmp_path)
    assert chosen["as_searched"]["acceptance_rate"] == pytest.approx(chosen["measured"]["acceptance_rate"])
    loaded = load(str(model), dtype="float32")
    config = GenerationConfig(generation_strategy="self_speculative", sample=False, num_speculations=3, max_steps=20,
                              skip_layers=str(found_set(tmp_path)[0]))  # fmt: skip
    assert Generator(loaded, config).drafter.skip == SkipSet.of(chosen["attn"], chosen["mlp"])


def new_study(path, total_layers=3, **changes):
    made = {"model": "m", **changes}
    return SkipStudy(str(path), "s", made, total_layers, maximize=False, folder=path.parent)


def row_of(skip):
    return {"skipped": len(skip), "speedup": 1.0}


@pytest.mark.parametrize("file", ["s.db", "s.log"])
def test_a_study_holds_no_more_than_the_total(tmp_path, file):
    studies = [new_study(tmp_path / file) for _ in range(2)]
    proposers = [Proposer(study, [], seed) for seed, study in enumerate(studies)]
    for _ in range(12):
        for study, proposer in zip(studies, proposers, strict=True):
            skip = proposer.next()
            study.add(skip, 10.0 - len(skip), row_of(skip), total=15)
    assert studies[0].count() == studies[1].count() == 15
    assert studies[0].add(SkipSet.of([0]), 0.0, {}, total=15) is None
    best = studies[0].best(3, lambda skip: len(skip) < 6)
    assert len({skip for skip, _ in best}) == 3 and [len(skip) for skip, _ in best] == sorted(
        (len(skip) for skip, _ in best), reverse=True
    )
    with pytest.raises(UsageError, match="model was m, now n"):
        new_study(tmp_path / file, model="n")


def test_running_trials_that_were_left_are_closed(tmp_path):
    study = new_study(tmp_path / "s.db")
    study.study.ask()
    study.study.enqueue_trial(to_params(SkipSet.of([0]), 3))
    assert new_study(tmp_path / "s.db").count() == 0
    states = {trial.state.name for trial in study.study.get_trials()}
    assert states == {"FAIL"}


def test_proposals_are_new_and_get_better(tmp_path):
    study = new_study(tmp_path / "s.log", 8)
    proposer = Proposer(study, [SkipSet.of([0, 1])], seed=3)
    weights = {name: random.Random(name).uniform(-1, 1) for name in study.space}
    tried, values = [], []
    for _ in range(60):
        skip = proposer.next()
        tried.append(skip)
        values.append(sum(weights[name] for name, skipped in to_params(skip, 8).items() if skipped))
        study.add(skip, values[-1], row_of(skip), total=60)
    assert tried[0] == SkipSet.of([0, 1]) and len(set(tried)) == 60
    assert all(to_skip(to_params(skip, 8)) == skip for skip in tried)
    assert sum(values[-20:]) < sum(values[:20]) - 10


def test_starting_sets_grow_by_the_least_harmful():
    harms = (("attn", 0, 0.9), ("attn", 1, 0.1), ("mlp", 0, 0.2), ("mlp", 1, 0.3))
    rows = [{"kind": kind, "layer": layer, "harm": harm, "saved": 1.0} for kind, layer, harm in harms]
    last = SkipSet.of([1], [1])
    assert starting_sets(rows, SearchConfig()) == [SkipSet.of([1]), SkipSet.of([1], [0]), SkipSet.of([1], [0, 1]), last]
    assert starting_sets(rows, SearchConfig(min_skipped=3)) == [SkipSet.of([1], [0, 1]), last]
    assert shortfall(SkipSet.of([1]), 2, 3) == 2 and shortfall(SkipSet.of([0, 1], [0, 1]), 2, 1) == 1


def test_the_verdict_says_why_drafting_does_not_pay():
    row = {"num_speculations": 2, "step": 10.0, "draft_step": 8.0, "verification": 11.0, "acceptance_needed": 0.85,
           "acceptance_reached": 0.6, "predicted_speedup": 0.8, "tokens_per_round": 2.2}  # fmt: skip
    assert verdict({**row, "predicted_speedup": 1.2}, None) == []
    assert verdict(row, {"speedup": 1.1, "acceptance_rate": 0.9}) == []
    (line,) = verdict(row, None)
    assert line.startswith("warning") and "0.80 of a step" in line and "needs 85.0%" in line and "60.0%" in line
    assert "busy" in verdict(row, {"speedup": 0.9, "acceptance_rate": 0.9})[0]
    assert "no acceptance" in verdict({**row, "acceptance_needed": 1.2}, {"speedup": 0.7, "acceptance_rate": 0.6})[0]
    assert "85.0%" in break_even_report([row])


def test_resume_wants_the_same_settings_but_for_trials_and_time(model, tmp_path, capsys):
    flags = {**SMALL, "confirm": 0, "n_trials": 3}
    assert call("search", arguments(model, tmp_path, **flags)) == 0
    stem = next(tmp_path.glob("search_*.json"))
    assert call("search", arguments(model, tmp_path, **{**flags, "n_trials": 6}, timeout=100, resume=stem)) == 0
    assert len(tables(tmp_path, "search")[""]) == 6
    capsys.readouterr()
    assert call("search", arguments(model, tmp_path, **flags, resume=stem, depth=1)) == 2
    assert "depth was 2, now 1" in capsys.readouterr().err
    assert SearchConfig().n_trials == 300


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_trial(model, tmp_path):
    flags = {**SMALL, "n_trials": 40, "confirm": 0}
    argv, draws, kills, best = arguments(model, tmp_path, **flags), random.Random(0), 0, []
    database = tmp_path / "search.db"
    for attempt in range(30):
        child = start("search", argv)
        while child.poll() is None and not database.exists():
            time.sleep(0.02)
        try:
            child.wait(timeout=draws.uniform(4, 9))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.communicate()
        done = study_of(tmp_path).get_trials(states=(optuna.trial.TrialState.COMPLETE,))
        best += [min(trial.value for trial in done)] if done else []
        if child.returncode == 0:
            break
        assert attempt < 29
    assert kills >= 1 and best == sorted(best, reverse=True)
    trials = study_of(tmp_path).trials
    assert len(trials) == 40 and all(trial.state.name == "COMPLETE" for trial in trials)


@pytest.mark.slow
def test_processes_and_runs_share_a_study(model, tmp_path):
    flags = {**SMALL, "n_trials": 30}
    together = [
        start("search", arguments(model, tmp_path / name, **flags, storage=tmp_path / "shared.db"), processes)
        for name, processes in (("a", 2), ("b", 1))
    ]
    for child in together:
        _, errors = child.communicate()
        assert child.returncode == 0, errors
    for name in ("a", "b"):
        found = tables(tmp_path / name, "search")
        assert list(found[""].trial) == list(range(30))
        assert len(found["samples"]) == 6


@pytest.mark.parametrize("rule", [{}, {"adaptive_draft_exit": True}])
def test_candidates_are_decoded_with_drafts_of_usual_length_where_none_is_given(model, tmp_path, rule):
    """Which may be longer than the longest that scoring would choose from."""
    few = {**SMALL, "n_trials": 4, "most_speculations": 2}
    given = arguments(model, tmp_path, **few, objective_mode="generate", ignore_eos=True, **rule)
    assert call("search", given) == 0
    evens = tables(tmp_path, "search")["break_even"]
    assert evens.num_speculations.max() == (12 if rule else 6)
