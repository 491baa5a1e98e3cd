"""Decode a data set, measure speed and quality, and compare strategies side by side."""

from __future__ import annotations

from dataclasses import dataclass

from self_speculation import cli, distributed
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, as_dict, flag
from self_speculation.datasets import DataConfig


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is compared."""

    compare: str | None = flag(
        None,
        "strategies to run on the same samples, separated by commas: autoregressive, a drafter or a chain, hf, "
        "hf_early_exit, hf_prompt_lookup; each may carry settings, as in early_exit:exit_layer=4:num_speculations=3",
    )
    allow_code_execution: bool = flag(False, "run the programs the model writes, for pass@1 of human_eval")
    resume: str | None = flag(None, "go on with the run that this file belongs to")


def main(
    model: ModelConfig, data: DataConfig, generation: GenerationConfig, benchmark: BenchmarkConfig, run: RunConfig
) -> None:
    """Decode a data set, measure speed and quality, and compare strategies side by side."""
    distributed.join()
    from self_speculation import metrics
    from self_speculation.benchmarking import KEY, explain, measure, prepare, read_examples, summarize, table
    from self_speculation.loading import load
    from self_speculation.records import SAMPLE_COLUMNS, RunLog
    from self_speculation.strategies import make_strategies, parse_strategies

    name = generation.drafter or generation.generation_strategy
    parsed = {name: ("", generation)} if benchmark.compare is None else parse_strategies(benchmark.compare, generation)
    examples = read_examples(data, run.seed, cli.note)
    loaded = load(model)
    samples = prepare(loaded, examples, generation.resolved().max_steps or 1)
    prompts = [sample.ids for sample in samples]
    strategies = make_strategies(loaded, parsed, seed=run.seed, notify=cli.note, prompts=prompts)
    config = as_dict(model, data, generation, benchmark, run)
    log = RunLog("benchmark", run.output_dir, SAMPLE_COLUMNS, config, resume=benchmark.resume, key=KEY)
    if data.dataset == "human_eval" and not benchmark.allow_code_execution:
        cli.note("pass@1 is left out; it needs --allow_code_execution True, which runs programs the model wrote")
    with log.kept(cli.note), distributed.own_work():
        measure(
            loaded, strategies, samples, log, dataset=data,
            score=lambda text, example: metrics.score(data.dataset, text, example, benchmark.allow_code_execution),
        )  # fmt: skip
    rows = log.finish(order=[(sample.id, strategy.name) for sample in samples for strategy in strategies])
    if distributed.is_main():
        summary = summarize(rows, [strategy.name for strategy in strategies])
        log.append_run(*summary)
        print(table(summary), flush=True)
        for strategy, pool in zip(strategies, summary, strict=True) if not model.tp else ():
            for line in explain(loaded, strategy, samples[0], pool):
                print(line, flush=True)
        if loaded.model.compile_seconds:
            cli.note(f"compiling took {loaded.model.compile_seconds:.0f} s, which is in no figure")
        cli.note(f"rows in {log.path}")


if __name__ == "__main__":
    cli.run(main, (ModelConfig, DataConfig, GenerationConfig, BenchmarkConfig, RunConfig))
