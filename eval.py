"""Run lm-eval tasks with any strategy and drafter, and report scores beside the speed."""

from __future__ import annotations

from self_speculation import cli, distributed
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, as_dict
from self_speculation.evaluating import EvalConfig


def main(model: ModelConfig, generation: GenerationConfig, tasks: EvalConfig, run: RunConfig) -> None:
    """Run lm-eval tasks with any strategy and drafter, and report scores beside the speed."""
    from self_speculation import evaluating
    from self_speculation import scores as result_rows
    from self_speculation.records import SAMPLE_COLUMNS, RunLog
    from self_speculation.task_settings import parse_gen_kwargs

    if distributed.is_main() and (text := evaluating.listing(tasks)) is not None:
        print(text)
    if set(tasks.names()) & set(evaluating.LISTS):
        return
    distributed.join()
    loaded_tasks: list[evaluating.Tasks] = []  # in the main process only, which runs lm-eval; the others serve it
    distributed.on_main(lambda: loaded_tasks.append(evaluating.load_tasks(tasks)))
    from self_speculation.harness import SelfSpeculativeLM
    from self_speculation.loading import load

    lm = SelfSpeculativeLM(
        load(model), generation, gen_kwargs=parse_gen_kwargs(tasks.gen_kwargs), seed=run.seed,
        use_cache=tasks.use_cache, notify=cli.note,
        on_text=lambda row, text: samples.write(row, prediction=text),
    )  # fmt: skip
    scores = RunLog("eval", run.output_dir, result_rows.SCORE_COLUMNS, as_dict(model, generation, tasks, run),
                    key=("task", "filter", "metric"))  # fmt: skip
    samples = scores.table("samples", SAMPLE_COLUMNS, key=("dataset", "sample_id"))
    results, order = {}, []
    try:
        with scores.kept(cli.note, f"the texts so far are in {samples.path}"):
            if distributed.is_main():
                try:
                    results = evaluating.run_tasks(lm, loaded_tasks[0], tasks)
                    for row, prediction in result_rows.sample_rows(results, lm.rows, lm.settings(), tasks.log_samples):
                        samples.write(row, **prediction)
                        order.append((row["dataset"], row["sample_id"]))
                finally:
                    lm.dismiss()
            else:
                lm.serve()
    finally:
        lm.close()
        sample_rows = samples.finish(order)
        if results:
            rows = result_rows.score_rows(results, sample_rows, lm.settings())
            for row in rows:
                scores.write(row)
        scores.finish()
    if distributed.is_main():
        scores.append_run(result_rows.run_row(sample_rows, rows))
        print(result_rows.table(results, rows), flush=True)
        cli.note(f"scores in {scores.path}")


if __name__ == "__main__":
    cli.run(main, (ModelConfig, GenerationConfig, EvalConfig, RunConfig))
