"""What a search ends with: its best sets decoded, one of them chosen, and all that is written and said of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import distributed, metrics
from .benchmarking import KEY, measure, summarize, table
from .datasets import DataConfig
from .generation import Generator
from .loading import fingerprint
from .modeling import SkipSet
from .records import SAMPLE_COLUMNS, RunLog
from .searching import Found, Task, with_skip
from .skip_scores import SkipCosts
from .skip_search import BREAK_EVEN_COLUMNS, SENSITIVITY_COLUMNS, Row, break_even_report, draw, verdict
from .strategies import AUTOREGRESSIVE, Strategy
from .study import SkipStudy


def confirm(task: Task, best: Sequence[tuple[SkipSet, Row]], log: RunLog, data: DataConfig) -> list[Row]:
    """Decode the samples autoregressively, with each set and with each set's draft alone, side by side.

    Returns:
        One pooled row a strategy, in the main process.
    """
    decoded = log.table("samples", SAMPLE_COLUMNS, KEY)
    if not task.search.confirm:
        return summarize(decoded.finish(), [])
    strategies = [Strategy(AUTOREGRESSIVE, Generator(task.loaded, task.config.autoregressive(), seed=task.seed))]
    for skip, row in best:
        config = with_skip(task.config, skip, row["num_speculations"])
        alone = replace(config.autoregressive(), skip_attn_layers=config.skip_attn_layers,
                        skip_mlp_layers=config.skip_mlp_layers)  # fmt: skip
        strategies.append(Strategy(set_name(skip), Generator(task.loaded, config, seed=task.seed)))
        strategies.append(Strategy(f"{set_name(skip)}_alone", Generator(task.loaded, alone, seed=task.seed)))
    with distributed.own_work():
        measure(task.loaded, strategies, task.samples, decoded, dataset=data)
    names = [strategy.name for strategy in strategies]
    return summarize(decoded.finish(order=[(sample.id, name) for sample in task.samples for name in names]), names)


def write(
    task: Task, study: SkipStudy, found: Found, summary: Sequence[Row], log: RunLog, data: DataConfig,
    notify: Callable[[str], None],
) -> tuple[list[str], dict[str, Any]]:  # fmt: skip
    """Choose a set, and write the run's tables, the set and a picture.

    Returns:
        What to print, and the settings that draft with the set; nothing in processes other than the main one.
    """
    sensitivities = log.table("sensitivity", SENSITIVITY_COLUMNS, ("kind", "layer"))
    evens = log.table("break_even", BREAK_EVEN_COLUMNS, "num_speculations")
    if not distributed.is_main():
        for each in (log, sensitivities, evens):
            each.finish()
        return [], {}
    trials = study.rows()
    skip, row = choose(found.best, summary, task.search.objective) if task.search.confirm else found.best[0]
    measured = figures(summary, set_name(skip)) if task.search.confirm else None
    even_rows = break_even_rows(task, found.costs, skip)
    for each, rows in ((log, trials), (sensitivities, found.sensitivity), (evens, even_rows)):
        for one in rows:
            each.write(one)
        each.finish(order=None if each is not log else [one["trial"] for one in trials])
    log.append_run(*summary)
    path = Path(f"{log.stem}_skip_layer_ids.json")
    write_result(path, task, skip, row, measured, data, len(trials))
    draw(trials, found.sensitivity, row, study.layers, log.stem, f"{task.loaded.name}, {data.dataset}", notify)
    at_chosen = next(one for one in even_rows if one["num_speculations"] == row["num_speculations"])
    lines = [table(summary)] if summary else []
    lines += [break_even_report(even_rows), *describe(skip, row, measured), *verdict(at_chosen, measured)]
    return lines, {"skip_layers": path, "num_speculations": row["num_speculations"], "compare": "skip_layer"}


def set_name(skip: SkipSet) -> str:
    """A short name of a set, the same in every run."""
    ids = repr((sorted(skip.attn), sorted(skip.mlp)))
    return f"skip_{hashlib.sha256(ids.encode()).hexdigest()[:6]}"


def figures(summary: Sequence[Row], name: str) -> Row:
    """What was measured of a set: speed and acceptance beside the target's and the draft's alone."""
    pools = {pool["metrics"]["strategy"]: pool for pool in summary}
    own, alone = pools[name], pools[f"{name}_alone"]
    plain = pools[AUTOREGRESSIVE]["tokens_per_second"]
    return {
        "speedup": metrics.ratio(own["tokens_per_second"], plain),
        "acceptance_rate": own.get("acceptance_rate"),
        "tokens_per_round": own.get("tokens_per_round"),
        "tokens_per_second": own["tokens_per_second"],
        "autoregressive_tokens_per_second": plain,
        "draft_alone_tokens_per_second": alone["tokens_per_second"],
    }


def break_even_rows(task: Task, costs: SkipCosts, skip: SkipSet) -> list[Row]:
    """For each draft length, the acceptance needed by measured costs and the acceptance reached on the texts."""
    lengths = list(range(1, max(task.search.most_speculations, *task.lengths) + 1))
    rounds = task.scorer(costs, lengths, depth=lengths[-1]).rounds(skip)
    return [
        {
            "num_speculations": length, "step": costs.step, "draft_step": costs.draft_step(skip, length),
            "verification": costs.verification(skip, length), "acceptance_needed": costs.break_even(skip, length),
            "acceptance_reached": rounds[length].acceptance_rate, "tokens_per_round": rounds[length].tokens_per_round,
            "predicted_speedup": rounds[length].speedup(costs, skip),
        }
        for length in lengths
    ]  # fmt: skip


def write_result(
    path: Path, task: Task, skip: SkipSet, row: Row, measured: Row | None, data: DataConfig, trials: int
) -> None:
    """The chosen set and what is known of it, as `--skip_layers` reads it."""
    predicted = {name: row[name] for name in ("speedup", "acceptance_rate", "tokens_per_round", "time_per_token")}
    found = {
        "attn": sorted(skip.attn), "mlp": sorted(skip.mlp), "num_speculations": row["num_speculations"],
        "model": task.loaded.name, "fingerprint": fingerprint(task.loaded.model.hf_model),
        "dtype": task.loaded.model.dtype_name, "dataset": data.dataset,
        "num_samples": len(task.samples), "trials": trials, "objective": task.search.objective,
        "predicted" if task.search.objective_mode == "score" else "as_searched": predicted, "measured": measured,
    }  # fmt: skip
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def describe(skip: SkipSet, row: Row, measured: Row | None) -> list[str]:
    """The chosen set in words."""
    attn, mlp = (",".join(map(str, sorted(ids))) or "none" for ids in (skip.attn, skip.mlp))
    lines = [
        f"best: skip {len(skip)} sub-layers, attention {attn}, MLP {mlp}, with {row['num_speculations']} speculations: "
        f"as searched {row['speedup']:.2f} x autoregressive, acceptance {row['acceptance_rate']:.1%}"
    ]
    if measured:
        lines.append(
            f"measured: {measured['speedup']:.2f} x, acceptance {measured['acceptance_rate'] or 0:.1%}; tokens/s "
            f"self-speculative {measured['tokens_per_second']:.1f}, target alone "
            f"{measured['autoregressive_tokens_per_second']:.1f}, draft alone "
            f"{measured['draft_alone_tokens_per_second']:.1f}"
        )
    return lines


def choose(candidates: Sequence[tuple[SkipSet, Row]], summary: Sequence[Row], objective: str) -> tuple[SkipSet, Row]:
    """The best of the candidates by what was measured."""
    name = "tokens_per_second" if objective == "speed" else "acceptance_rate"
    pools = {pool["metrics"]["strategy"]: pool for pool in summary}
    return max(candidates, key=lambda candidate: pools[set_name(candidate[0])].get(name) or 0.0)
