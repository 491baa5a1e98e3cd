"""Check that self-speculative decoding changes nothing: greedy texts token by token, sampled ones by distribution."""

from __future__ import annotations

from dataclasses import dataclass

from self_speculation import cli, distributed
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, as_dict, flag
from self_speculation.datasets import DataConfig


@dataclass(frozen=True)
class ResumeConfig:
    """An earlier run to complete."""

    resume: str | None = flag(None, "go on with the run that this file belongs to")


def main(
    model: ModelConfig, data: DataConfig, generation: GenerationConfig, resume: ResumeConfig, run: RunConfig
) -> int:
    """Check that self-speculative decoding changes nothing: greedy texts token by token against autoregressive decoding
    and model.generate, sampled ones by their distribution. Exit code 1 when an error is found."""
    distributed.join()
    from self_speculation.benchmarking import KEY as SAMPLE_KEY
    from self_speculation.benchmarking import prepare, read_examples
    from self_speculation.correctness import KEY, VERDICT_COLUMNS, check, check_settings, make_checked, report
    from self_speculation.loading import load
    from self_speculation.records import SAMPLE_COLUMNS, RunLog

    check_settings(generation)
    examples = read_examples(data, run.seed, cli.note)
    loaded = load(model)
    strategies = make_checked(loaded, generation.resolved(), seed=run.seed, notify=cli.note)
    samples = prepare(loaded, examples, generation.resolved().max_steps or 1)
    config = as_dict(model, data, generation, resume, run)
    verdicts = RunLog("correctness", run.output_dir, VERDICT_COLUMNS, config, resume=resume.resume, key=KEY)
    texts = verdicts.table("samples", SAMPLE_COLUMNS, key=SAMPLE_KEY)
    with verdicts.kept(cli.note), distributed.own_work():
        check(loaded, strategies, samples, data, verdicts, texts)
    order = [sample.id for sample in samples]
    texts.finish(order)
    rows = verdicts.finish(order)
    if distributed.is_main():
        print("\n".join(report(rows)), flush=True)
        cli.note(f"verdicts in {verdicts.path}, texts in {texts.path}")
    return distributed.broadcast(int(any(row["verdict"] == "error" for row in rows)))


if __name__ == "__main__":
    cli.run(main, (ModelConfig, DataConfig, GenerationConfig, ResumeConfig, RunConfig))
