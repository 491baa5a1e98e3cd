"""Search which attention and MLP sub-layers a draft leaves out, and say what that is worth."""

from __future__ import annotations

from self_speculation import cli, distributed
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, UsageError, as_dict, require
from self_speculation.datasets import DataConfig
from self_speculation.grid import command
from self_speculation.skip_search import TRIAL_COLUMNS, SearchConfig


def main(
    model: ModelConfig, data: DataConfig, generation: GenerationConfig, search: SearchConfig, run: RunConfig
) -> None:
    """Search which attention and MLP sub-layers a draft leaves out, and say what that is worth."""
    distributed.join()
    from self_speculation import searching, skip_results
    from self_speculation.benchmarking import prepare, read_examples
    from self_speculation.loading import load
    from self_speculation.records import RunLog

    if model.tp:
        raise UsageError("--tp True: a search measures one process and shares work among several")
    base = searching.base_config(generation, search)
    examples = read_examples(data, run.seed, cli.note)
    loaded = load(model)
    layers = loaded.model.num_layers
    require(search.min_skipped < 2 * layers, "min_skipped", search.min_skipped,
            f"must be below {2 * layers}: {loaded.name} has that many sub-layers, and one must stay")  # fmt: skip
    samples = prepare(loaded, examples, base.max_steps or 1)
    config = as_dict(model, data, generation, search, run)
    log = RunLog("search", run.output_dir, TRIAL_COLUMNS, config, search.resume, "trial")
    task = searching.Task(loaded, base, search, samples, [], run.seed)
    with log.kept(cli.note, "trials are kept in the study; the same command goes on with them"):
        study = searching.open_study(task, log, data.dataset)
        cli.note(f"study {study.name} in {study.storage}: {study.count()} of {search.n_trials} trials are done")
        found = searching.search(task, study, log)
        summary = skip_results.confirm(task, found.best, log, data)
    lines, chosen = skip_results.write(task, study, found, summary, log, data, cli.note)
    if distributed.is_main():
        print("\n".join([*lines, command(chosen, model, data, generation, run)]), flush=True)
        cli.note(f"trials in {log.path}, the set in {chosen['skip_layers']}")


if __name__ == "__main__":
    cli.run(main, (ModelConfig, DataConfig, GenerationConfig, SearchConfig, RunConfig))
