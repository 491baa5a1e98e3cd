"""`train.py` as its users run it: resumed, on two processes, from scratch and continued, and its files."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from folders import byte_tokenizer, save_tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from self_speculation import cli
from self_speculation.config import ModelConfig, RunConfig, RunError
from self_speculation.training.config import AdapterTrainConfig, DataConfig, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
CLASSES = (TrainConfig, AdapterTrainConfig, DataConfig, ModelConfig, RunConfig)
CONFIG = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
RECIPE = "--layer_dropout 0.3 --self_distillation 0.5 --rotation 2 --loss_scale uniform --warmup_steps 2".split()


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a configuration, a tokenizer and text; the cache is in it too."""
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(tmp_path / "cache"))
    byte_tokenizer().save_pretrained(tmp_path / "scratch")
    (tmp_path / "scratch" / "config.json").write_text(json.dumps(CONFIG))
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"line {number} of text: one, two, three and {number * 7}\n" * 3)
    return tmp_path


def flags(work: Path, *more: str) -> list[str]:
    return [
        "--config", str(work / "scratch"), "--data", str(work / "*.txt"), "--held_out", "0.2", "--output_dir",
        str(work / "logs"), "--sequence_length", "16", "--batch_size", "2", "--train_steps", "6", "--log_every", "1",
        "--eval_sequences", "4", "--dtype", "float64", *RECIPE, *more,
    ]  # fmt: skip


def run(arguments: list[str]) -> None:
    train.main(*cli.parse(CLASSES, "", arguments))


def launch(arguments: list[str], processes: int = 1, **more) -> subprocess.Popen:
    if processes == 1:
        command = [sys.executable, "train.py", *arguments]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        command = [*launcher, "--master_addr=127.0.0.1", f"--master_port={port}", "train.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE, **more)


def losses(work: Path, folder: str = "logs", split: str = "train") -> dict[int, dict[str, float]]:
    path = next(path for path in (work / folder).glob("train_*.csv") if "_exits" not in path.name)
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    names = [name for name in rows[0] if name.startswith(("loss", "grad", "agree", "learning"))]
    return {int(row["step"]): {name: float(row[name]) for name in names if row[name]} for row in rows}


def weights(work: Path, folder: str = "logs") -> dict[str, torch.Tensor]:
    newest = max((work / folder).glob("train_*/step-*"), key=lambda path: int(path.name[5:]))
    return load_file(newest / "trained.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], atol: float = 0.0) -> bool:
    return first.keys() == second.keys() and all(torch.allclose(first[n], second[n], rtol=0, atol=atol) for n in first)


def test_from_scratch_writes_model_losses_and_exits(work, capsys):
    run(flags(work, "--save_model", str(work / "made"), "--eval_every", "3"))
    model = AutoModelForCausalLM.from_pretrained(work / "made")
    assert model.dtype == torch.bfloat16 and model.config.num_hidden_layers == 4
    assert model.config.eos_token_id == 257 and AutoTokenizer.from_pretrained(work / "made").eos_token_id == 257
    trained = losses(work)
    assert list(trained) == [1, 2, 3, 4, 5, 6]
    assert {"loss_exit_1", "loss_exit_3", "loss_exit_4"} <= trained[1].keys() and "loss_exit_2" not in trained[1]
    assert "loss_exit_2" in trained[2]
    held_out = losses(work, split="held_out")
    assert list(held_out) == [3, 6] and held_out[6]["agreement_exit_4"] == 1
    assert held_out[6]["loss"] == held_out[6]["loss_exit_4"]
    (table,) = (work / "logs").glob("*_exits.csv")
    with table.open() as file:
        assert [row["exit_layer"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]
    (picture,) = (work / "logs").glob("*_exits.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "| exit layer | loss |" in capsys.readouterr().out
    assert not list((work / "made").glob("*.tmp")) and not list((work / "made").glob(".written*"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_killed_and_resumed_equals_unbroken(work, optimizer):
    more = ["--save_every", "2", "--optimizer", optimizer, "--exit_curriculum", "random", "--accumulation", "2"]
    run(flags(work, *more))
    shutil.move(work / "logs", work / "unbroken")
    script = (
        "import os, signal\nfrom self_speculation.training.trainer import Trainer\nimport train, sys\n"
        "step = Trainer.step\ndef dying(self, n):\n    if n == 5:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self, n)\nTrainer.step = dying\n"
        "train.cli.run(train.main, (train.TrainConfig, train.AdapterTrainConfig, train.DataConfig, train.ModelConfig, "
        "train.RunConfig))"
    )
    killed = subprocess.run([sys.executable, "-c", script, *flags(work, *more)], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    (stem,) = (work / "logs").glob("train_*.json")
    assert [path.name for path in (work / "logs" / stem.stem).glob("step-*")] == ["step-4"]
    run(flags(work, *more, "--resume", str(stem.with_suffix(""))))
    assert same(weights(work), weights(work, "unbroken"))
    assert losses(work) == losses(work, "unbroken")


def test_resume_refuses_another_recipe(work):
    run(flags(work, "--save_every", "2"))
    (stem,) = (work / "logs").glob("train_*.json")
    with pytest.raises(cli.UsageError, match="--resume .*learning_rate was 0.001, now 0.5"):
        run(flags(work, "--save_every", "2", "--learning_rate", "0.5", "--resume", str(stem)))


def test_ctrl_c_keeps_what_was_learnt(work):
    more = ["--train_steps", "100000", "--save_every", "0"]
    process = launch(flags(work, *more))
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 2000 for path in (work / "logs").glob("*.part.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    (state,) = (work / "logs").glob("train_*/step-*/state.pt")
    step = torch.load(state, weights_only=True)["step"]
    assert max(losses(work)) == step > 3


def test_two_processes_equal_one_with_twice_the_accumulation(work):
    more = ["--save_every", "6", "--max_grad_norm", "0.5"]
    two = launch(flags(work, *more, "--output_dir", str(work / "two")), processes=2)
    run(flags(work, *more, "--accumulation", "2", "--output_dir", str(work / "one")))
    assert two.wait(timeout=120) == 0, two.stderr.read()
    assert same(weights(work, "one"), weights(work, "two"), atol=1e-9)
    for step, row in losses(work, "one").items():
        assert losses(work, "two")[step] == pytest.approx(row, abs=1e-5)


def test_continue_from_a_checkpoint(work):
    save_tiny_model(work / "tiny")
    arguments = flags(work, "--model", str(work / "tiny"))[2:]
    run(arguments)
    (made,) = (work / "logs").glob("train_*/model")
    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (work / "tiny", made))
    assert not torch.equal(before.model.layers[0].mlp.up_proj.weight, after.model.layers[0].mlp.up_proj.weight)


def test_lora_trains_only_its_matrices_and_is_merged_at_the_end(work):
    save_tiny_model(work / "tiny")
    run(flags(work, "--model", str(work / "tiny"), "--lora_rank", "2", "--learning_rate", "0.05")[2:])
    assert all(".lora_" in name for name in weights(work)) and len(weights(work)) == 6 * 7 * 2
    (made,) = (work / "logs").glob("train_*/model")
    before, after = (load_file(path / "model.safetensors") for path in (work / "tiny", made))
    assert before.keys() == after.keys()
    changed = {name for name in before if (before[name].float() - after[name].float()).abs().max() > 0.02}
    assert changed and all("_proj" in name for name in changed)


def test_bfloat16_keeps_weights_in_float32_and_learns(work):
    run(flags(work, "--dtype", "bfloat16", "--train_steps", "40", "--learning_rate", "0.01"))
    assert weights(work)["model.model.norm.weight"].dtype == torch.float32
    trained = losses(work)
    assert trained[40]["loss"] < trained[1]["loss"] - 1


def test_minutes_set_the_number_of_steps(work, monkeypatch):
    from self_speculation.training.trainer import Trainer

    monkeypatch.setattr(Trainer, "_steps_left", lambda self, began, times: len(times))
    more = flags(work, "--max_minutes", "5", "--train_steps", "1000", "--save_every", "15")
    run(more)
    assert max(losses(work)) == 20  # after 12 steps, of which 8 were timed, came 8 more
    assert losses(work)[20]["learning_rate"] == pytest.approx(1e-3 * 0.05)
    monkeypatch.setattr(Trainer, "_steps_left", lambda self, began, times: 1 / 0)
    (stem,) = (work / "logs").glob("train_*.json")
    run([*more, "--resume", str(stem)])  # the number stays as it is
    assert max(losses(work)) == 20


def test_a_tokenizer_is_trained_where_there_is_none(work):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (work / "scratch" / name).unlink()
    (work / "scratch" / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    run(flags(work))
    assert (work / "scratch" / "tokenizer.json").is_file()


def test_evaluate_exits(work, capsys):
    save_tiny_model(work / "tiny")
    run(flags(work, "--model", str(work / "tiny"), "--recipe", "evaluate_exits")[2:])
    (table,) = (work / "logs").glob("train_*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["exit_layer"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert float(rows[-1]["agreement"]) == 1 and float(rows[0]["agreement"]) < 1
    assert table.with_suffix(".png").is_file() and "100.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "somewhere"], "--config: give either"),
        (["--draft_exits", "2,4"], "--draft_exits 2,4: this model has the exit layers 1 to 3"),
        (["--dtype", "float16"], "--dtype float16: training needs"),
        (["--exit_curiculum", "all"], "did you mean --exit_curriculum"),
    ],
)
def test_mistakes_are_named(work, more, message):
    with pytest.raises(cli.UsageError, match=message):
        run(flags(work, *more))


def test_a_missing_configuration_is_named(work):
    with pytest.raises(RunError, match="--config .*nothing.json: cannot be read"):
        run(flags(work, "--config", str(work / "nothing.json")))


def test_a_loss_that_is_no_number_ends_the_training(work):
    with pytest.raises(cli.RunError, match="the loss is not a number; lower --learning_rate"):
        run(flags(work, "--learning_rate", "1e30", "--warmup_steps", "0"))
    assert not list(work.rglob("model/config.json"))


def test_lora_s_matrices_alone_may_be_trained_by_muon(work):
    save_tiny_model(work / "tiny")
    run(flags(work, "--model", str(work / "tiny"), "--lora_rank", "2", "--optimizer", "muon")[2:])
    assert all(".lora_" in name for name in weights(work)) and len(losses(work)) == 6


def test_data_that_cannot_be_read_leaves_nothing_behind(work):
    (work / "torn.jsonl").write_text('{"text": "a"}\n{"te')
    with pytest.raises(RunError, match="torn"):
        run([*flags(work), "--data", str(work / "torn.jsonl")])
    assert not list((work / "cache").rglob("*.tmp"))
