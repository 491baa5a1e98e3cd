"""eval.py as its users run it: files, several processes, mistakes in one line; lm-eval's own command line."""

from __future__ import annotations

import csv
import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import eval as script
from self_speculation import cli, evaluating, harness
from self_speculation import scores as result_rows
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig
from self_speculation.evaluating import EvalConfig
from self_speculation.loading import load
from tests.evaluation import LOCAL, ROOT, make
from tests.folders import save_tiny_model

CONFIGS = (ModelConfig, GenerationConfig, EvalConfig, RunConfig)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=768)


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """Run eval.py in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.chdir(ROOT)

    def run_script(*arguments: str) -> tuple[int, str, str]:
        given = [*arguments, "--output_dir", str(tmp_path / "logs"), "--model", str(folder), "--dtype", "float32"]
        with pytest.raises(SystemExit) as stop:
            cli.run(script.main, CONFIGS, given)
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run_script


def read(tmp_path, pattern):
    (path,) = (tmp_path / "logs").glob(pattern)
    return list(csv.DictReader(path.open())) if path.suffix == ".csv" else [json.loads(line) for line in path.open()]


MATH = ("--tasks", "local_math", "--include_path", LOCAL)
SPECULATIVE = ("--generation_strategy", "self_speculative", "--exit_layer", "3", "--num_speculations", "4")


def test_files_and_table(run, tmp_path):
    """LayerSkip's command on a task like gsm8k that works offline."""
    tasks = ("--tasks", "local_math,local_choice", "local_perplexity", "--include_path", "data/tasks", "--limit", "3")
    code, out, err = run(*tasks, *SPECULATIVE, "--max_steps", "8", "--log_samples", "True")
    assert code == 0, err
    assert "|local_math" in out
    assert "local_math: 24 tokens" in out
    scores = read(tmp_path, "eval_*[0-9].csv")
    assert {(row["task"], row["filter"], row["metric"]) for row in scores} == {
        ("local_math", "strict-match", "exact_match"), ("local_math", "flexible-extract", "exact_match"),
        ("local_choice", "none", "acc"), ("local_choice", "none", "acc_norm"),
        *(("local_perplexity", "none", name) for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")),
    }  # fmt: skip
    math = next(row for row in scores if row["task"] == "local_math")
    assert (math["value"], math["stderr"], math["num_samples"], math["n_shot"]) == ("0.0", "0.0", "3", "2")
    assert (math["drafter"], math["exit_layer"], math["new_tokens"]) == ("early_exit", "3", "24")
    choice = next(row for row in scores if row["task"] == "local_choice")
    assert choice["new_tokens"] == "" != choice["stderr"]
    samples = read(tmp_path, "eval_*_samples.csv")
    assert [(row["dataset"], row["sample_id"]) for row in samples] == [
        (task, str(n)) for task in ("local_math", "local_choice", "local_perplexity") for n in range(3)
    ]
    assert samples[0]["max_steps"] == "8" == samples[0]["new_tokens"]
    assert samples[0]["exact_match,strict-match"] == "0.0"
    assert samples[3]["max_steps"] == "" == samples[3]["new_tokens"]
    assert samples[3]["acc"] in ("0.0", "1.0")
    predictions = read(tmp_path, "eval_*_samples.jsonl")
    assert predictions[0]["prompt"].startswith("Question: Ida has")
    assert predictions[3]["prediction"] in ("honey", "iron", "paper money", "rain")
    (pool,) = read(tmp_path, "runs.csv")
    assert (pool["num_samples"], pool["new_tokens"]) == ("9", "24")
    assert json.loads(pool["metrics"])["local_choice/acc,none"] == pytest.approx(float(choice["value"]))


def test_chat_with_system_instruction_and_turns(run, tmp_path):
    chat = ("--apply_chat_template", "True", "--system_instruction", "Be brief.", "--log_samples", "True")
    code, _, err = run(*MATH, "--limit", "1", "--max_steps", "4", *chat)
    assert code == 0, err
    (line,) = read(tmp_path, "eval_*_samples.jsonl")
    assert line["prompt"].startswith("<system>Be brief.</s><user>Question: Ida")
    assert line["prompt"].count("<assistant>") == 3


def test_write_out_shows_the_first_prompt(run, caplog):
    code, _, _ = run(*MATH, "--limit", "1", "--max_steps", "2", "--write_out", "True")
    assert code == 0
    assert "document 0; context prompt" in caplog.text


def test_predict_only(run, tmp_path):
    code, _, err = run(
        "--tasks", "local_math", "--include_path", LOCAL, "--limit", "2", "--max_steps", "4", "--predict_only", "True"
    )
    assert code == 0, err
    assert read(tmp_path, "eval_*[0-9].csv") == []
    assert len(read(tmp_path, "eval_*_samples.jsonl")) == 2


@pytest.fixture
def only_included(monkeypatch):
    """lm-eval without its own tasks, whose index takes many seconds."""
    import lm_eval.tasks as tasks

    monkeypatch.setattr(tasks, "TaskManager", _without_defaults(tasks.TaskManager))


def _without_defaults(kind):
    return functools.partial(lambda include_path=None, include_defaults=False, metadata=None: kind(
        include_path=include_path, include_defaults=False, metadata=metadata
    ))  # fmt: skip


def test_unknown_task_and_list(run, only_included):
    code, _, err = run("--tasks", "local_maths", "--include_path", LOCAL)
    assert code == 2
    assert "did you mean local_math?" in err
    code, out, _ = run("--tasks", "list", "--include_path", LOCAL)
    assert code == 0
    assert "local_perplexity" in out
    assert "loglikelihood_rolling" in out


def write_task(folder, **more):
    settings = {
        "task": "remote",
        "dataset_path": "openai/gsm8k",
        "test_split": "test",
        "doc_to_text": "q",
        "doc_to_target": "a",
    }
    (folder / "remote.yaml").write_text("\n".join(f"{name}: {value}" for name, value in {**settings, **more}.items()))
    return "--tasks", "remote", "--include_path", str(folder)


def test_unreachable_hub_names_the_data_set_and_the_way_out(run, tmp_path, monkeypatch):
    def unreachable(*arguments, **settings):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    code, _, err = run(*write_task(tmp_path))
    assert code == 1
    assert err.count("\n") == 1
    assert "task remote: data set openai/gsm8k" in err
    assert "--include_path data/tasks" in err


def test_code_is_not_run_without_leave(run, tmp_path):
    """Case lm-eval #2954."""
    code, _, err = run(*write_task(tmp_path, unsafe_code="true"))
    assert code == 2
    assert err.count("\n") == 1
    assert "--confirm_run_unsafe_code True" in err


def test_lm_evals_own_command_line(folder, tmp_path, capsys, monkeypatch, only_included):
    model = f"pretrained={folder},dtype=float32,generation_strategy=self_speculative,exit_layer=3,num_speculations=4"
    arguments = f"""--model self_speculation --model_args {model} --tasks local_math,local_choice --include_path {LOCAL}
        --limit 2 --gen_kwargs max_gen_toks=6"""
    monkeypatch.setattr(sys, "argv", ["lm-eval", *arguments.split()])
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    harness.main()
    out, _ = capsys.readouterr()
    assert "local_choice" in out
    assert "exact_match" in out


def test_processes_share_the_requests(folder, tmp_path):
    """Scores and texts of two processes equal one's, also where there are fewer documents than processes."""
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2")
    tasks = ("--tasks", "local_math,local_choice,local_perplexity", "--include_path", LOCAL, "--limit", "1")
    given = [*tasks, *SPECULATIVE, "--max_steps", "8", "--model", str(folder), "--dtype", "float32", "--seed", "1"]
    together = [*torchrun, "eval.py", *given, "--limit", "3", "--output_dir", str(tmp_path / "logs")]
    run = subprocess.run(together, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("|local_math") == 1
    rows = read(tmp_path, "eval_*_samples.csv")
    assert {row["rank"] for row in rows if row["dataset"] == "local_math"} == {"0", "1"}
    scores, lines = read(tmp_path, "eval_*[0-9].csv"), read(tmp_path, "eval_*_samples.jsonl")
    shared = {(row["task"], row["filter"], row["metric"]): float(row["value"]) for row in scores}
    said = {line["sample_id"]: line["prediction"] for line in lines if line["dataset"] == "local_math"}
    lm = make(load(str(folder), dtype="float32"), max_steps=8)
    config = EvalConfig(tasks=["local_math,local_choice,local_perplexity"], include_path=LOCAL, limit=3)
    results = evaluating.run_tasks(lm, evaluating.load_tasks(config), config)
    for row in result_rows.score_rows(results, [], lm.settings()):
        assert shared[row["task"], row["filter"], row["metric"]] == row["value"]
    for sample in results["samples"]["local_math"]:
        assert said[str(sample["doc_id"])] == sample["resps"][0][0]


@pytest.mark.slow
def test_code_tasks_of_lm_eval_itself_are_refused_without_leave(run):
    code, _, err = run("--tasks", "humaneval")
    assert code == 2
    assert "--confirm_run_unsafe_code True" in err
