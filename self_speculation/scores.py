"""What lm-eval's results become: rows of scores, rows of samples, the run's row, and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .metrics import pooled
from .records import SAMPLE_COLUMNS

Row = dict[str, Any]

SPEED_COLUMNS = ("new_tokens", "acceptance_rate", "tokens_per_round", "tokens_per_second")
SCORE_COLUMNS = (
    "run_id", "timestamp", "script", "git_sha", "model", "dtype", "device", "torch", "transformers", "world_size",
    "seed", "task", "version", "n_shot", "filter", "metric", "higher_is_better", "value", "stderr", "num_samples",
    "generation_strategy", "drafter", "exit_layer", "num_speculations", "skip_attn", "skip_mlp",
    *SPEED_COLUMNS,
)  # fmt: skip
"""Columns of a score. Speed is pooled over the texts of its task, empty where the task has none."""


def score_rows(results: dict[str, Any], samples: Sequence[Row], settings: Row) -> list[Row]:
    """One row for each task or group, filter and metric. `settings` are the generator's columns."""
    rows = []
    for task, values in results["results"].items():
        own = [row for row in samples if row["dataset"] == task and row.get("new_tokens") is not None]
        speed = {name: pooled(own, SAMPLE_COLUMNS)[name] if own else None for name in SPEED_COLUMNS}
        for name, value in values.items():
            metric, comma, filter_name = name.partition(",")
            if not comma or metric.endswith("_stderr") or metric == "bypass":
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            rows.append(
                {
                    **{column: settings.get(column) for column in SCORE_COLUMNS if column in settings},
                    "task": task,
                    "version": results["versions"].get(task),
                    "n_shot": results["n-shot"].get(task),
                    "filter": filter_name,
                    "metric": metric,
                    "higher_is_better": results.get("higher_is_better", {}).get(task, {}).get(metric),
                    "value": value,
                    "stderr": error if isinstance(error, (int, float)) and math.isfinite(error) else None,
                    "num_samples": values.get("sample_len"),
                    **speed,
                }
            )
    return rows


def run_row(samples: Sequence[Row], scores: Sequence[Row]) -> Row:
    """The run's row of `runs.csv`: figures pooled over all samples, and the scores as metrics."""
    pool = pooled(samples, SAMPLE_COLUMNS)
    metrics = {name: value for name, value in pool["metrics"].items() if name.startswith("time_per_token")}
    for row in scores:
        metrics[f"{row['task']}/{row['metric']},{row['filter']}"] = row["value"]
        metrics[f"{row['task']}/{row['metric']}_stderr,{row['filter']}"] = row["stderr"]
    return pool | {"metrics": metrics}


def sample_rows(
    results: dict[str, Any], figures: dict[tuple[str | None, str], Row], settings: Row, log_samples: bool
) -> Iterator[tuple[Row, Row]]:
    """(row, prediction) of each sample: its figures, if text was generated, and its metrics.

    A metric of a filter that has a name is called `metric,filter`, as in lm-eval's results.
    """
    for task, samples in results["samples"].items():
        documents: dict[int, list[Row]] = {}
        for sample in samples:
            documents.setdefault(sample["doc_id"], []).append(sample)
        for number, filtered in documents.items():
            sample_id = str(number)
            row = dict(figures.get((task, sample_id), {"dataset": task, "sample_id": sample_id, **settings}))
            row["n_shot"] = results["n-shot"].get(task)
            prediction = _prediction(filtered[0])
            for sample in filtered:
                suffix = "" if sample["filter"] == "none" else f",{sample['filter']}"
                for metric in sample["metrics"]:
                    if isinstance(sample[metric], (bool, int, float)) and metric != "bypass":
                        row[metric + suffix] = float(sample[metric])
                if isinstance(sample["filtered_resps"][0], str):
                    prediction["filtered" + suffix] = sample["filtered_resps"][0]
            if log_samples:
                first = filtered[0]
                prompt = first["arguments"][0][0] if len(first["arguments"][0]) > 1 else ""
                prediction |= {"prompt": prompt, "reference": first["target"], "doc": first["doc"]}
            yield row, prediction


def _prediction(sample: Row) -> Row:
    """What the model said: its text, or the most probable choice with the log-likelihoods of all."""
    answers = [answers[0] for answers in sample["resps"]]
    if isinstance(answers[0], str):
        more = {"predictions": sample["resps"][0]} if len(sample["resps"][0]) > 1 else {}
        return {"prediction": answers[0], **more}
    if isinstance(answers[0], (tuple, list)):
        likelihoods = [answer[0] for answer in answers]
        best = likelihoods.index(max(likelihoods))
        return {"prediction": sample["arguments"][best][1].strip(), "loglikelihoods": likelihoods}
    return {"prediction": None, "loglikelihoods": answers}


def table(results: dict[str, Any], rows: Sequence[Row]) -> str:
    """Scores with standard errors, and the speed of the tasks that generate text."""
    from lm_eval.utils import make_table

    parts = [make_table(results)] if rows else []
    if "groups" in results and rows:
        parts.append(make_table(results, "groups"))
    for task, row in {row["task"]: row for row in rows}.items():
        if row["new_tokens"] is not None:
            speed = [f"{task}: {row['new_tokens']} tokens"]
            speed += [f"{row['tokens_per_second']:.1f} tokens/s"] if row["tokens_per_second"] else []
            speed += [f"acceptance {row['acceptance_rate']:.1%}"] if row["acceptance_rate"] is not None else []
            speed += [f"{row['tokens_per_round']:.2f} tokens/round"] if row["acceptance_rate"] is not None else []
            parts.append(", ".join(speed))
    return "\n".join(parts)
