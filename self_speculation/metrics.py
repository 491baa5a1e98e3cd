"""Scores of a text against its reference, pass@1, and figures pooled over samples.

ROUGE, exact match, edit similarity, answer match and pass@1 lie between 0 and 1, BLEU between 0 and 100, as their
libraries give them; each is perfect when the prediction equals the reference. None stands for "does not apply".
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any

from .config import UsageError
from .datasets import Example

Row = dict[str, Any]

ROUGE = ("rouge1", "rouge2", "rouge3", "rougeL")
CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\nassert", "\n@", "\n```")
"""A completion of a function ends before the first of these."""

SUMMED = ("prompt_tokens", "new_tokens", "decode_tokens", "rounds", "drafted", "accepted", "prefill_s", "decode_s")
PERCENTILES = (50, 90, 99)

PASSED = 93  # exit code of a program that ran to its end; nothing else counts, such as sys.exit(0) half way


def score(dataset: str, prediction: str, example: Example, allow_code_execution: bool = False) -> Row:
    """The metrics of one sample: column -> value; {} for a data set without references.

    `pass_at_1` is there only with `allow_code_execution`.
    """
    if example.reference is None:
        return {}
    scores = text_scores(prediction, example.reference)
    if dataset == "gsm8k":
        scores["answer_match"] = answer_match(prediction, example.reference)
    if dataset == "human_eval" and allow_code_execution:
        scores["pass_at_1"] = float(run_human_eval(prediction, example.row, allow_code_execution) == "passed")
    return scores


def text_scores(prediction: str, reference: str) -> Row:
    """ROUGE-1/2/3/L, BLEU, exact match and edit similarity, in this order."""
    return {
        **rouge(prediction, reference),
        "bleu": bleu(prediction, reference),
        "exact_match": exact_match(prediction, reference),
        "edit_similarity": edit_similarity(prediction, reference),
    }


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """F-measures of rouge-score without stemming, 0 to 1. Equal texts score 1, however short they are."""
    if _same(prediction, reference):
        return dict.fromkeys(ROUGE, 1.0)
    scores = _rouge_scorer().score(reference, prediction)
    return {name: scores[name].fmeasure for name in ROUGE}


def bleu(prediction: str, reference: str) -> float:
    """Sentence BLEU of sacrebleu, 0 to 100, with n-grams no longer than the text."""
    if _same(prediction, reference):
        return 100.0
    import sacrebleu

    return sacrebleu.sentence_bleu(prediction, [reference], use_effective_order=True).score


def exact_match(prediction: str, reference: str) -> float:
    """1 when the texts are equal but for space around them, else 0."""
    return float(_same(prediction, reference))


def edit_similarity(prediction: str, reference: str) -> float:
    """1 minus the Levenshtein distance in characters over the longer length, without space around the texts."""
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.normalized_similarity(prediction.strip(), reference.strip())


def answer_match(prediction: str, reference: str) -> float:
    """GSM8K: 1 when the first `#### number`, or else the last number, is that of the reference."""
    answer = _final_number(prediction)
    return float(answer is not None and answer == _final_number(reference))


def repeated_4grams(tokens: Sequence[Hashable]) -> float | None:
    """Share of 4-grams that occurred before in the same text, 0 to 1; None below four tokens."""
    grams = list(zip(*(tokens[start:] for start in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else None


def percentiles(values: Iterable[float | None], name: str) -> dict[str, float | None]:
    """`<name>_p50`, `_p90` and `_p99` (interpolated), in the values' unit; None without values."""
    import numpy

    known = [value for value in values if value is not None]
    points = numpy.percentile(known, PERCENTILES).tolist() if known else [None] * len(PERCENTILES)
    return {f"{name}_p{percent}": point for percent, point in zip(PERCENTILES, points, strict=True)}


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole, None when either is missing or the whole is 0."""
    return part / whole if whole and part is not None else None


def pooled(rows: Sequence[Row], fixed: Iterable[str]) -> Row:
    """One row for many samples, with the columns of `runs.csv`.

    `fixed` are the columns of a sample, whose other columns are its metrics. Counts and seconds are sums, rates are
    ratios of sums, columns in which all samples agree are kept and others left empty, and `metrics` holds the mean of
    each metric over the samples that have it, and the percentiles of the seconds a token of the samples.
    """
    pool: Row = {"num_samples": len(rows)}
    for column in fixed:
        values = {json.dumps(row.get(column), default=str): row.get(column) for row in rows}
        pool[column] = next(iter(values.values())) if len(values) == 1 else None
    for column in ("sample_id", "rank", "stop_reason", "note"):
        pool.pop(column, None)
    for column in SUMMED:
        known = [row[column] for row in rows if row.get(column) is not None]
        pool[column] = sum(known) if known else None
    pool["acceptance_rate"] = ratio(pool["accepted"], pool["drafted"])
    pool["tokens_per_round"] = ratio(pool["decode_tokens"], pool["rounds"])
    pool["tokens_per_second"] = ratio(pool["decode_tokens"], pool["decode_s"])
    pool["metrics"] = {
        **mean_metrics(rows, fixed),
        **percentiles((ratio(r.get("decode_s"), r.get("decode_tokens")) for r in rows), "time_per_token"),
    }
    return pool


def mean_metrics(rows: Sequence[Row], fixed: Iterable[str]) -> dict[str, float]:
    """Mean of every numeric column outside `fixed`, over the rows that have it."""
    known = set(fixed)
    names = dict.fromkeys(name for row in rows for name in row if name not in known)
    values = {name: [row[name] for row in rows if isinstance(row.get(name), (int, float))] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items() if numbers}


def cut_completion(text: str) -> str:
    """What belongs to the function: the text before the first of `CODE_STOPS`."""
    return text[: min([place for stop in CODE_STOPS if (place := text.find(stop)) >= 0], default=len(text))]


def run_human_eval(completion: str, problem: Row, allow_code_execution: bool, **limits: float) -> str:
    """Run a HumanEval problem's tests on a completion: "passed", "timed out" or what went wrong.

    `problem` has prompt, test and entry_point. Raises `UsageError` unless running the model's code was allowed.
    """
    if not allow_code_execution:
        raise UsageError(
            "--allow_code_execution: pass@1 runs programs that the model wrote, which must be allowed first"
        )
    program = f"{problem['prompt']}{cut_completion(completion)}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    return run_program(program, **limits)


def run_program(program: str, timeout_s: float = 10, memory_mb: float = 1024) -> str:
    """Run Python source in a process of its own: "passed", "timed out" or the last line of its error.

    It has an empty folder, no input, no environment, limits on time, memory and file size, no network where the
    system lets it be taken away, and its whole process group is killed at the end. This contains accidents; it is no
    sandbox against code that means harm.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, str(int(timeout_s) + 1), str(int(memory_mb * 2**20))],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, cwd=folder, start_new_session=True,
            env={"HOME": folder, "TMPDIR": folder},
        )  # fmt: skip
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == PASSED:
            return "passed"
        if process.returncode == -signal.SIGXCPU:
            return "timed out"
        errors.seek(0)
        lines = errors.read()[-2000:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"ended with exit code {process.returncode}"


_RUNNER = f"""
import contextlib, ctypes, os, resource, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
source = sys.stdin.read()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.argv = ["program"]
with contextlib.suppress(Exception):
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # own user and network: an empty one
for limit, value in [
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 10 << 20),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 512),
]:
    with contextlib.suppress(Exception):
        resource.setrlimit(limit, (value, value))
exec(compile(source, "program", "exec"), {{"__name__": "__main__"}})
os._exit({PASSED})
"""


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(ROUGE)


def _same(prediction: str, reference: str) -> bool:
    return prediction.strip() == reference.strip()


def _final_number(text: str) -> float | None:
    marked = re.search(r"####\s*\$?(-?\d[\d,]*\.?\d*)", text)
    numbers = [marked[1]] if marked else re.findall(r"-?\d[\d,]*\.?\d*", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
