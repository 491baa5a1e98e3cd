"""generate.py as its users run it: prompts from everywhere, rows, and every mistake in one line."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import generate as script
from self_speculation import cli, generate, generate_each, load
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, UsageError, from_options
from tests.folders import save_tiny_model

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = (ModelConfig, GenerationConfig, script.PromptConfig, RunConfig)
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """Run generate.py in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)

    def run_script(*arguments: str, model: Path | str | None = folder) -> tuple[int, str, str]:
        given = [*arguments]
        if "--output_dir" not in given:
            given += ["--output_dir", str(tmp_path / "logs")]
        if model is not None:
            given += ["--model", str(model)]
        with pytest.raises(SystemExit) as stop:
            cli.run(script.main, CONFIGS, given)
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run_script


def rows(tmp_path: Path) -> list[dict[str, str]]:
    (table,) = (tmp_path / "logs").glob("generate_*.csv")
    return list(csv.DictReader(table.open()))


GREEDY = ("--sample", "False", "--max_steps", "12", "--prompt", "hello there")


def test_speculative_text_equals_autoregressive(run, tmp_path):
    arguments = ("--generation_strategy", "self_speculative", "--exit_layer", "3", "--num_speculations", "4")
    code, _, err = run(*GREEDY, *arguments, "--compare_autoregressive")
    assert code == 0
    assert "texts identical" in err
    plain, speculative = rows(tmp_path)
    assert plain["exit_layer"] == "" == plain["acceptance_rate"]
    assert (speculative["exit_layer"], speculative["num_speculations"], speculative["drafter"]) == (
        "3",
        "4",
        "early_exit",
    )
    assert int(speculative["new_tokens"]) == 12 == int(speculative["decode_tokens"]) + 1
    predictions = [json.loads(line) for line in next((tmp_path / "logs").glob("*.jsonl")).read_text().splitlines()]
    assert predictions[0]["prediction"] == predictions[1]["prediction"]


def test_what_is_compared_with_is_the_whole_model(run, tmp_path):
    """Also where a skip set is given, with which autoregressive decoding would take the draft for the model."""
    arguments = ("--generation_strategy", "self_speculative", "--skip_mlp_layers", "1,2", "--num_speculations", "2")
    code, _, err = run(*GREEDY, *arguments, "--compare_autoregressive")
    assert code == 0 and "texts identical" in err
    plain, speculative = rows(tmp_path)
    assert (plain["skip_mlp"], speculative["skip_mlp"]) == ("", "1,2")


@pytest.mark.parametrize("ask", [generate, generate_each, load])
def test_python_names_the_nearest_option(ask):
    name, near = ("dtpe", "dtype") if ask is load else ("max_step", "max_steps")
    with pytest.raises(UsageError, match=f"no setting {name}; did you mean {near}"):
        ask("nowhere", **({} if ask is load else {"prompt": "x"} if ask is generate else {"prompts": []}), **{name: 3})
    with pytest.raises(UsageError, match="exit_layer '4': must be a whole number"):
        generate("nowhere", "x", exit_layer="4")


def test_python_may_give_paths_and_numpy_s_numbers():
    options = {"exit_layer": np.int64(3), "top_p": np.float32(0.5), "skip_layers": None, "adapter": Path("a/b")}
    config = from_options(GenerationConfig, options)
    assert (config.exit_layer, config.top_p, config.adapter) == (3, 0.5, "a/b")
    for name, value in {"exit_layer": True, "sample": 1, "stop_words": "x", "top_k": 2.0}.items():
        with pytest.raises(UsageError, match=f"^{name} "):
            from_options(GenerationConfig, {name: value})


def test_zero_speculations_is_autoregressive(run, tmp_path):
    """LayerSkip's flag with nothing drafted."""
    _, plain, _ = run(*GREEDY)
    for path in (tmp_path / "logs").iterdir():
        path.unlink()
    _, nothing_drafted, _ = run(*GREEDY, "--generation_strategy", "self_speculative", "--num_speculations", "0")
    assert nothing_drafted == plain
    assert rows(tmp_path)[0]["rounds"] == "11"
    assert rows(tmp_path)[0]["drafted"] in ("", "0")


def test_exit_layer_is_chosen_and_said(run):
    """Case LayerSkip #28: self_speculative without --exit_layer."""
    code, _, err = run(*GREEDY, "--generation_strategy", "self_speculative")
    assert code == 0
    assert "exit_layer" in err


@pytest.mark.parametrize("streamer", ["none", "standard", "speculative"])
def test_text_is_printed(run, streamer):
    code, out, _ = run(*GREEDY, "--streamer", streamer)
    assert code == 0
    assert len(out.strip()) > 0


def test_prompt_files_and_standard_input(run, tmp_path, monkeypatch):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert run("--prompt_file", str(lines), "--max_steps", "2")[0] == 0
    assert [row["sample_id"] for row in rows(tmp_path)] == ["0", "1"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("three\nfour"))
    assert run("--prompt_file", "-", "--max_steps", "2")[0] == 0


def test_no_prompt_leaves_no_files(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("--max_steps", "2")[0] == 0
    assert list((tmp_path / "logs").iterdir()) == []


def test_interactive_blocks_end_with_an_empty_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond line\n\n\nnext\n"))
    code, _, _ = run("--max_steps", "2", "--chat")
    assert code == 0
    assert len(rows(tmp_path)) == 2


def test_sampling_is_reproducible_by_seed(run):
    """Case vLLM #6038: a seed is respected."""
    sampled = ("--prompt", "hello", "--max_steps", "16", "--temperature", "2", "--top_p", "1")
    first, again, other = (run(*sampled, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other


def bad_folder(tmp_path: Path, folder: Path, weights: bytes | None) -> Path:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (bad / file.name).write_bytes(file.read_bytes())
    if weights is not None:
        (bad / "model.safetensors").write_bytes(weights)
    return bad


def test_models_that_cannot_be_read_are_one_line_and_exit_1(run, tmp_path, folder):
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(200))
    weights = next(folder.glob("*.safetensors")).read_bytes()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for model, message in [
        (bad_folder(tmp_path / "a", folder, None), "no weights"),
        (bad_folder(tmp_path / "b", folder, weights[: len(weights) // 2]), "cannot be loaded"),
        (corrupt, "corrupt.gguf"),
        (tmp_path / "missing.gguf", "no such file"),
    ]:
        code, out, err = run("--prompt", "x", model=model)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert message in err


def test_unreachable_hub_says_what_to_do(run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = run("--prompt", "x", model="facebook/layerskip-llama2-7B")
    assert (code, err.count("\n")) == (1, 1)
    assert "local folder" in err


def test_gated_hub_model_says_what_to_do(run, monkeypatch):
    from self_speculation import loading

    def refuse(*arguments: object, **settings: object) -> None:
        raise OSError("You are trying to access a gated repo. 401 Client Error.")

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", refuse)
    code, _, err = run("--prompt", "x", model="facebook/layerskip-llama2-7B")
    assert (code, err.count("\n")) == (1, 1)
    assert "hf auth login" in err


def test_debug_shows_the_traceback(folder, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    from self_speculation.config import UsageError

    with pytest.raises(UsageError):
        cli.run(
            script.main, (ModelConfig, GenerationConfig, script.PromptConfig, RunConfig), ["--debug", "--top_p", "0"]
        )


def test_debug_may_be_refused(run):
    code, _, err = run("--debug", "False", "--top_p", "0")
    assert code == 2 and err.count("\n") == 1


def test_help_names_every_flag(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    with pytest.raises(SystemExit) as stop:
        cli.run(script.main, CONFIGS, ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code in (0, None)
    for name in ("--exit_layer", "--streamer", "--temperature", "--output_dir", "--model_args"):
        assert name in text


def launched(folder: Path, tmp_path: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable,), **options):
    command = [*launcher, "generate.py", "--model", str(folder), "--output_dir", str(tmp_path / "logs"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_in_an_answer_keeps_its_row(folder, tmp_path, number):
    process = launched(folder, tmp_path, "--prompt", "x", "--max_steps", "240", "--model_args", "torch_dtype=float64",
                       "--streamer", "speculative", stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(8)  # the answer has begun
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130), err
    (row,) = rows(tmp_path)
    assert row["stop_reason"] in ("interrupted", "budget", "eos")


def test_ctrl_d_at_a_terminal_ends_cleanly(folder, tmp_path):
    master, slave = pty.openpty()
    process = launched(folder, tmp_path, "--max_steps", "4", stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    while b"Ctrl-D" not in shown and time.monotonic() < deadline:
        shown += os.read(master, 1000)
    os.write(master, b"hello\n\n")
    while b"ended by" not in shown and time.monotonic() < deadline:
        shown += os.read(master, 1000)
    os.write(master, b"\x04")
    assert process.wait(60) == 0
    assert len(rows(tmp_path)) == 1
    os.close(master)


def test_torchrun_talks_on_rank_0_only(folder, tmp_path):
    process = launched(folder, tmp_path, *GREEDY, launcher=TORCHRUN, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err.count("ended by") == 1
    assert len(rows(tmp_path)) == 1


def test_torchrun_prints_a_usage_error_once(folder, tmp_path):
    process = launched(
        folder, tmp_path, "--top_p", "2", launcher=TORCHRUN, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert err.count("error: --top_p 2.0: must be above 0 and at most 1") == 1
