"""correctness.py: what it calls identical, a near-tie and an error, and that a broken decoder does not pass."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import correctness as script
from self_speculation import cli, correctness, sampling
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig
from self_speculation.datasets import DataConfig
from self_speculation.loading import Loaded
from self_speculation.sampling import Sampler
from tests import tiny
from tests.folders import save_tiny_model
from tests.test_sampling import without_residual

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = (ModelConfig, DataConfig, GenerationConfig, script.ResumeConfig, RunConfig)
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2")
LAYERSKIP = (
    "--dataset", "human_eval", "--data_path", "data/human_eval.jsonl", "--num_samples", "3",
    "--generation_strategy", "self_speculative", "--exit_layer", "2", "--num_speculations", "4", "--max_steps", "16",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """Run correctness.py in this process: (exit code, standard output and error, verdicts)."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(correctness, "DRAWS", 800)

    def run_script(*arguments):
        given = [*LAYERSKIP, "--model", str(folder), "--output_dir", str(tmp_path), *arguments]
        with pytest.raises(SystemExit) as stop:
            cli.run(script.main, CONFIGS, given)
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out + err, verdicts(tmp_path)

    return run_script


def verdicts(folder: Path) -> list[dict[str, str]]:
    tables = sorted(folder.glob("correctness_*[0-9].csv"), key=lambda path: path.stat().st_mtime_ns)
    return list(csv.DictReader(tables[-1].open())) if tables else []


def test_greedy_is_compared_token_by_token(run, tmp_path):
    code, shown, rows = run("--sample", "False", "--dtype", "float64")
    assert code == 0 and "token by token" in shown and "3 of 3 texts identical" in shown
    assert {(row["test"], row["against"], row["verdict"]) for row in rows} == {
        ("tokens", "autoregressive", "identical"), ("tokens", "generate", "identical")
    }  # fmt: skip
    assert all(row["compared_tokens"] == "16" and row["gap"] == "" and row["dtype"] == "float64" for row in rows)
    (samples,) = tmp_path.glob("correctness_*_samples.csv")
    texts = list(csv.DictReader(samples.open()))
    assert len(texts) == 9 and len({row["sample_id"] for row in texts}) == 3
    assert len(samples.with_suffix(".jsonl").read_text().splitlines()) == 9


def test_sampling_is_checked_by_distribution_and_says_so(run):
    """Case: LayerSkip's correctness.py reports errors that are only other random draws."""
    code, shown, rows = run("--dtype", "float32")
    assert code == 0 and "draws are not compared" in shown and "the distribution is" in shown
    assert len(rows) >= 6 and {(row["test"], row["verdict"]) for row in rows} == {("distribution", "passed")}
    assert all(float(row["p_value"]) > 1e-8 and float(row["forward_distance"]) < 1e-3 for row in rows)


def test_a_decoder_without_the_residual_is_an_error(run, monkeypatch):
    monkeypatch.setattr(sampling, "residual", without_residual)
    code, shown, rows = run("--dtype", "float32", "--temperature", "1.0", "--top_p", "1.0")
    assert code == 1 and "error: sample" in shown and "error" in {row["verdict"] for row in rows}


def test_a_decoder_that_accepts_too_much_is_an_error(run, monkeypatch):
    def lenient(self, logits, prefix, draft, draft_probs):
        return len(draft), int(logits[-1].argmax())

    monkeypatch.setattr(Sampler, "verify", lenient)
    code, shown, rows = run("--sample", "False", "--dtype", "float64")
    assert code == 1 and "error: sample" in shown
    wrong = [row for row in rows if row["verdict"] == "error"]
    assert wrong and all(float(row["gap"]) > 0 and row["first_difference"] != "" for row in wrong)


@pytest.mark.parametrize("arguments", (
    ("--drafter", "prompt_lookup", "--exit_layer", "-1"),
    ("--drafter", "skip_layer", "--skip_attn_layers", "1,3", "--exit_layer", "-1"),
    ("--drafter", "prompt_lookup+early_exit", "--repetition_penalty", "1.3"), ("--stop_words", "a", "e"),
))  # fmt: skip
def test_every_drafter_passes(run, arguments):
    """Design, correctness rule 7."""
    for sample in ("False", "True"):
        code, _, rows = run(*arguments, "--sample", sample, "--dtype", "float64", "--num_samples", "1")
        assert code == 0 and rows


def test_autoregressive_decoding_is_compared_with_generate(run):
    code, shown, rows = run(
        "--generation_strategy", "autoregressive", "--exit_layer", "-1", "--sample", "False", "--dtype", "float64"
    )
    assert code == 0 and {row["against"] for row in rows} == {"generate"} and "model.generate" in shown


def test_part_of_the_model_alone_is_refused(run):
    code, shown, _ = run("--generation_strategy", "autoregressive")
    assert code == 2 and "--exit_layer" in shown


def test_layerskip_s_command_under_torchrun(folder, tmp_path):
    """Two processes share the samples, one table comes out."""
    command = [*TORCHRUN, "correctness.py", *LAYERSKIP, "--model", str(folder), "--output_dir", str(tmp_path)]
    done = subprocess.run([*command, "--sample", "False"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = verdicts(tmp_path)
    assert len(rows) == 6 and {row["rank"] for row in rows} == {"0", "1"}
    assert done.stdout.count("token by token against model.generate: 3 of 3") == 1


def loaded(family="llama", dtype=torch.float64):
    class Tokenizer:
        def __len__(self):
            return tiny.VOCAB

    return Loaded(family, tiny.split(family, "direct", dtype), Tokenizer())


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_the_gap_decides_what_a_difference_is(dtype):
    """Case: EAGLE #75, #212, transformers #39421: mismatches waved away as ties."""
    model, prompt = loaded(dtype=dtype), tiny.prompt_ids(9)
    sampler = Sampler(GenerationConfig(sample=False))
    text = tiny.run(model.model, tiny.new_drafter("", model.model), prompt, steps=8).tokens
    assert correctness.compare(model, sampler, prompt, text, text) == {"compared_tokens": 8, "verdict": "identical"}
    with torch.inference_mode():
        scores = model.model.hf_model(input_ids=model.model.ids([*prompt, *text[:5]])).logits[0, -1].double()
    other = int(scores.topk(2).indices[1])
    found = correctness.compare(model, sampler, prompt, [*text[:5], other, 1, 1], text)
    assert found["first_difference"] == 5 and found["verdict"] == "error"
    assert found["gap"] == pytest.approx(float(scores.max() - scores[other]))
    shorter = correctness.compare(model, sampler, prompt, text[:5], text, ends=[other])
    assert shorter["gap"] == found["gap"]
    assert correctness.compare(model, sampler, prompt, text[:5], text)["verdict"] == "error"


def test_a_step_of_the_logit():
    assert correctness.allowed_gap(torch.float64, 20.0) == 0
    assert correctness.allowed_gap(torch.float32, 20.0) == 1e-4
    assert correctness.allowed_gap(torch.bfloat16, 20.0) == 0.125  # 20 and 20.125 are neighbours
    assert correctness.allowed_gap(torch.bfloat16, -1.5) == 2**-7
    assert correctness.allowed_gap(torch.float16, 20.0) == 2**-6


def test_near_ties_are_told_from_errors():
    """Two tokens whose rows of the head are all but equal."""
    model, prompt = tiny.new_hf_model("llama", torch.float32), tiny.prompt_ids(9)
    with torch.inference_mode():
        best = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        twin = (best + 1) % tiny.VOCAB
        model.lm_head.weight.data[twin] = model.lm_head.weight.data[best] * (1 - 1e-6)
    wrapped = Loaded("llama", tiny.SelfSpeculativeModel(model), loaded().tokenizer)
    found = correctness.compare(wrapped, Sampler(GenerationConfig(sample=False)), prompt, [twin], [best])
    assert found["verdict"] == "near_tie" and 0 < found["gap"] < 1e-4


def test_goodness_of_fit():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    assert correctness.goodness_of_fit(probs * 4000, probs) == 1
    assert correctness.goodness_of_fit(torch.tensor([2050.0, 1160, 600, 190, 0]), probs) > 0.01
    assert correctness.goodness_of_fit(torch.tensor([2300.0, 950, 550, 200, 0]), probs) < 1e-8
    assert correctness.goodness_of_fit(torch.tensor([2000.0, 1200, 600, 199, 1]), probs) == 0
    assert correctness.goodness_of_fit(torch.tensor([4000.0, 0, 0, 0, 0]), torch.tensor([1.0, 0, 0, 0, 0])) == 1


def test_repeated_verifications_have_the_target_s_distribution(monkeypatch):
    monkeypatch.setattr(correctness, "DRAWS", 1200)
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 40, generator=generator).mul(2).softmax(-1)
    for draft, probs in (([3], q), ([3], None), ([int(p.argmax())], None), ([], None)):
        counts = correctness.repeat_verification(p, draft, probs, generator)
        assert counts.sum() == correctness.DRAWS and correctness.goodness_of_fit(counts, p) > 1e-4
        assert correctness.goodness_of_fit(counts, q) < 1e-8
