"""Search which attention and MLP sub-layers a draft leaves out, and say what that is worth."""

from __future__ import annotations

import time
from pathlib import Path

from self_speculation import cli, distributed
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, RunError, UsageError, as_dict, require
from self_speculation.datasets import DataConfig
from self_speculation.grid import command
from self_speculation.skip_search import (
    BREAK_EVEN_COLUMNS,
    SENSITIVITY_COLUMNS,
    TRIAL_COLUMNS,
    SearchConfig,
    break_even_report,
    draw,
    verdict,
)


def main(
    model: ModelConfig, data: DataConfig, generation: GenerationConfig, search: SearchConfig, run: RunConfig
) -> None:
    """Search which attention and MLP sub-layers a draft leaves out, and say what that is worth."""
    distributed.join()
    from self_speculation import searching as s
    from self_speculation.benchmarking import KEY, prepare, read_examples, summarize, table
    from self_speculation.loading import load
    from self_speculation.records import SAMPLE_COLUMNS, RunLog
    from self_speculation.study import SkipStudy

    if model.tp:
        raise UsageError("--tp True: a search measures one process and shares work among several")
    base = s.base_config(generation, search)
    examples = read_examples(data, run.seed, cli.note)
    loaded = load(model)
    layers = loaded.model.num_layers
    require(search.min_skipped < 2 * layers, "min_skipped", search.min_skipped,
            f"must be below {2 * layers}: {loaded.name} has that many sub-layers, and one must stay")  # fmt: skip
    samples = prepare(loaded, examples, base.max_steps or 1)
    log = RunLog("search", run.output_dir, TRIAL_COLUMNS, as_dict(model, data, generation, search, run), search.resume,
                 "trial")  # fmt: skip
    folder = log.stem.parent
    task = s.Task(loaded, base, search, samples, [], run.seed)
    name = search.study_name or f"{loaded.name}_{data.dataset}_{search.objective}_{search.objective_mode}"
    storage = search.storage or str(folder / "search.db")
    settings = (storage, name, task.made_with(), layers)
    maximize = search.objective == "acceptance"
    distributed.on_main(lambda: SkipStudy(*settings, maximize=maximize, folder=folder) and None)
    study = SkipStudy(*settings, maximize=maximize, folder=folder)
    deadline = time.monotonic() + (search.timeout or float("inf"))
    cli.note(f"study {name} in {storage}: {study.count()} of {search.n_trials} trials are done")
    try:
        task.texts = s.write_texts(loaded, base, samples, run.seed)
        costs = s.costs_of(study, task)
        scorer = task.scorer(costs, task.lengths, search.depth)
        harms = s.sensitivities(study, scorer, costs)
        starts = s.starting_sets(harms, search)
        with distributed.own_work():
            s.run_trials(task, study, starts, s.make_evaluate(task, scorer), log, deadline)
        distributed.barrier()
        candidates = distributed.on_main(
            lambda: study.best(max(1, search.confirm), lambda skip: not s.shortfall(skip, layers, search.min_skipped))
        )
        if not candidates:
            raise RunError(
                f"--n_trials {search.n_trials}: no set that may be used was tried; allow more trials or time"
            )
        decoded = log.table("samples", SAMPLE_COLUMNS, KEY)
        rows, names = s.confirmed(task, candidates if search.confirm else [], decoded, data)
    except BaseException:
        cli.note(f"trials are kept in {storage}; the same command goes on with them")
        raise
    sensitivities = log.table("sensitivity", SENSITIVITY_COLUMNS, ("kind", "layer"))
    evens = log.table("break_even", BREAK_EVEN_COLUMNS, "num_speculations")
    if not distributed.is_main():
        for each in (log, sensitivities, evens):
            each.finish()
        return
    trials = study.rows()
    summary = summarize(rows, names)
    skip, row = s.choose(candidates, summary, search.objective) if search.confirm else candidates[0]
    measured = s.figures(summary, s.set_name(skip)) if search.confirm else None
    even_rows = s.break_even_rows(task, costs, skip)
    for each, found in ((log, trials), (sensitivities, harms), (evens, even_rows)):
        for one in found:
            each.write(one)
        each.finish(order=None if each is not log else [one["trial"] for one in trials])
    log.append_run(*summary)
    path = Path(f"{log.stem}_skip_layer_ids.json")
    s.write_result(path, task, skip, row, measured, data, len(trials))
    draw(trials, harms, row, layers, log.stem, f"{loaded.name}, {data.dataset}", cli.note)
    if summary:
        print(table(summary))
    print(break_even_report(even_rows))
    print("\n".join(s.describe(skip, row, measured)))
    at_chosen = next(one for one in even_rows if one["num_speculations"] == row["num_speculations"])
    print("\n".join(verdict(at_chosen, measured)))
    chosen = {"skip_layers": path, "num_speculations": row["num_speculations"], "compare": "skip_layer"}
    print(command(chosen, model, data, generation, run), flush=True)
    cli.note(f"trials in {log.path}, the set in {path}")


if __name__ == "__main__":
    cli.run(main, (ModelConfig, DataConfig, GenerationConfig, SearchConfig, RunConfig))
