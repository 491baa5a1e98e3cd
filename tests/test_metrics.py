"""Metrics: perfect on equal texts, empty where they do not apply, and programs that cannot do harm by accident."""

import json
import os
import time
from pathlib import Path

import pytest

from self_speculation import metrics
from self_speculation.config import UsageError
from self_speculation.datasets import DataConfig, Example, load
from self_speculation.records import RUN_COLUMNS, SAMPLE_COLUMNS

DATA = str(Path(__file__).parent.parent / "data")
PERFECT = dict.fromkeys((*metrics.ROUGE, "exact_match", "edit_similarity"), 1.0) | {"bleu": 100.0}


@pytest.mark.parametrize(
    "text", ["The cat sat on the mat .", "Paris", "two words", "...", "猫が座った", "", "a b c\nd e"]
)
def test_equal_texts_are_perfect(text):
    assert metrics.text_scores(text, text) == PERFECT
    assert metrics.text_scores(f" {text}\n", text) == PERFECT


def test_different_texts_are_not():
    scores = metrics.text_scores("the cat sat here", "the cat sat there")
    assert scores["rouge1"] == 0.75 and scores["rouge2"] == pytest.approx(2 / 3) and scores["rouge3"] == 0.5
    assert scores["rougeL"] == 0.75 and 0 < scores["bleu"] < 100 and scores["exact_match"] == 0
    assert scores["edit_similarity"] == pytest.approx(1 - 1 / 17)
    for prediction, reference in [("", "something"), ("abc", "xyz")]:
        assert set(metrics.text_scores(prediction, reference).values()) == {0.0}


@pytest.mark.parametrize(
    "prediction, value",
    [("6 * 12 = 72\n#### 22", 1), ("so 22.0 rolls", 1), ("It is $22. No: 23.", 0), ("none", 0), ("#### 22\n#### 5", 1)],
)
def test_gsm8k_answers(prediction, value):
    assert metrics.answer_match(prediction, "72 - 50 = <<72-50=22>>22\n#### 22") == value
    assert metrics.answer_match("#### 1,200", "#### 1200") == 1


def test_repeated_4grams_and_percentiles():
    assert metrics.repeated_4grams([1, 2, 3]) is None and metrics.repeated_4grams(range(4)) == 0
    assert metrics.repeated_4grams([7] * 8) == 0.8 and metrics.repeated_4grams("abcdabcd".split()) is None
    assert metrics.percentiles([], "x") == {"x_p50": None, "x_p90": None, "x_p99": None}
    points = metrics.percentiles([float(i) for i in range(101)] + [None], "x")
    assert points == {"x_p50": 50.0, "x_p90": 90.0, "x_p99": 99.0}


def test_pooled_rows():
    rows = [
        {"drafted": 10, "accepted": 1, "decode_tokens": 4, "rounds": 2, "decode_s": 1.0, "model": "m", "rouge1": 0.0},
        {"drafted": 30, "accepted": 29, "decode_tokens": 36, "rounds": 6, "decode_s": 2.0, "model": "m", "rouge1": 1.0},
        {"drafted": None, "accepted": None, "model": "m", "seed": 3},
    ]
    pool = metrics.pooled(rows, SAMPLE_COLUMNS)
    assert (pool["drafted"], pool["accepted"], pool["acceptance_rate"]) == (40, 30, 0.75)
    assert pool["tokens_per_round"] == 5 and pool["tokens_per_second"] == pytest.approx(40 / 3)
    assert pool["model"] == "m" and pool["seed"] is None and pool["prompt_tokens"] is None and pool["num_samples"] == 3
    assert pool["metrics"]["rouge1"] == 0.5 and 1 / 18 < pool["metrics"]["time_per_token_p50"] < 0.25
    assert set(pool) <= set(RUN_COLUMNS) and json.dumps(pool)
    empty = metrics.pooled([{"accepted": 0, "drafted": 0}], SAMPLE_COLUMNS)
    assert empty["acceptance_rate"] is None and empty["drafted"] == 0 and empty["tokens_per_second"] is None


def test_scores_of_a_sample():
    examples, _ = load(DataConfig("gsm8k", data_path=DATA), 42)
    assert metrics.score("gsm8k", examples[0].reference, examples[0]) == {**PERFECT, "answer_match": 1.0}
    assert metrics.score("mt_bench", "text", Example("0", "prompt")) == {}


def test_human_eval_passes_with_the_solution_only_when_allowed():
    example = load(DataConfig("human_eval", data_path=DATA), 42)[0][0]
    solution = example.row["canonical_solution"]
    assert "pass_at_1" not in metrics.score("human_eval", solution, example)
    with pytest.raises(UsageError, match="--allow_code_execution"):
        metrics.run_human_eval(solution, example.row, allow_code_execution=False)
    assert metrics.score("human_eval", solution, example, True) == {**PERFECT, "pass_at_1": 1.0}
    more = solution + "\n\ndef other(:\n"
    assert metrics.score("human_eval", more, example, True)["pass_at_1"] == 1.0
    assert metrics.score("human_eval", "    return None\n", example, True)["pass_at_1"] == 0.0


@pytest.mark.parametrize(
    "completion, kept",
    [
        ("    return 1\n\n\ndef g():\n", "    return 1\n\n"),
        ("    if x:\n        print(1)\n# end", "    if x:\n        print(1)"),
        ("    return 1", "    return 1"),
        ("    return 1\n```\ntext\nclass A", "    return 1"),
    ],
)
def test_completions_end_with_the_function(completion, kept):
    assert metrics.cut_completion(completion) == kept


@pytest.mark.parametrize(
    "program, outcome",
    [
        ("assert 1 + 1 == 2", "passed"),
        ("assert 1 + 1 == 3, 'sum'", "AssertionError: sum"),
        ("import sys; sys.exit(0)", "ended with exit code 0"),
        ("import os; os._exit(0)", "ended with exit code 0"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("x = bytearray(4 << 30)", "MemoryError"),
        ("input()", "EOFError: EOF when reading a line"),
        ("import os; assert os.listdir() == [] and 'PATH' not in os.environ", "passed"),
        ("open('big', 'wb').write(b'x' * (20 << 20))", "OSError: [Errno 27] File too large"),
        ("print('x' * 10_000_000)", "passed"),
    ],
)
def test_programs_run_on_their_own(program, outcome):
    assert metrics.run_program(program) == outcome


def test_programs_that_do_not_end(tmp_path):
    started = time.monotonic()
    assert metrics.run_program("while True: pass", timeout_s=1) == "timed out"
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(pid_file)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    assert metrics.run_program(code, timeout_s=2) == "timed out"
    assert time.monotonic() - started < 15
    assert gone(int(pid_file.read_text())), "a program's own child outlived it"


def gone(pid):
    """True once a process has ended, even if nobody has collected it."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False
