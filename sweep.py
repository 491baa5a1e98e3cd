"""Find the fastest exit layer and number of speculations, by running the grid or by predicting it."""

from __future__ import annotations

from self_speculation import cli, distributed
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, as_dict
from self_speculation.datasets import DataConfig
from self_speculation.grid import CELL_COLUMNS, SweepConfig, best_row, cell_name, command, grid, heat_map, report


def main(
    model: ModelConfig, data: DataConfig, generation: GenerationConfig, sweep: SweepConfig, run: RunConfig
) -> None:
    """Find the fastest exit layer and number of speculations, by running the grid or by predicting it."""
    distributed.join()
    from self_speculation import sweeping as s
    from self_speculation.benchmarking import KEY, prepare, read_examples, summarize
    from self_speculation.loading import load
    from self_speculation.records import SAMPLE_COLUMNS, RunLog

    base = s.base_config(generation)
    drafter = base.drafter or ""
    if sweep.predict:
        s.check_predictable(base, model)
    examples = read_examples(data, run.seed, cli.note)
    loaded = load(model)
    cells = grid(sweep, drafter, loaded.model.num_layers)
    samples = prepare(loaded, examples, generation.resolved().max_steps or 1)
    config = as_dict(model, data, generation, sweep, run)
    log = RunLog("sweep", run.output_dir, CELL_COLUMNS, config, sweep.resume, ("exit_layer", "num_speculations"))
    table = log.table("samples", SAMPLE_COLUMNS, KEY)
    predicted: list[s.Row] = [{} for _ in cells]
    chosen = cells
    with log.kept(cli.note):
        if sweep.predict:
            rounds = log.table("rounds", s.ROUND_COLUMNS, ("sample_id", "exit_layer", "num_speculations"))
            forecast = s.forecast_of(loaded, base, cells)
            with distributed.own_work():
                s.predict_rounds(forecast, cells, samples, rounds, run.seed)
            found = rounds.finish(order=[(sample.id, *cell) for sample in samples for cell in cells])
            predicted = distributed.on_main(lambda: s.predicted_cells(forecast, cells, samples, found))
            chosen = s.best_predicted(cells, predicted, sweep.predict_best)
        rows = s.run_cells(loaded, base, chosen, samples, table, data, run.seed)
    if distributed.is_main():
        measured = s.cell_rows(rows, drafter, cells, len(samples))
        for row, more in zip(measured, predicted, strict=True):
            row.update(more)
            log.write(row)
    log.finish(order=cells)
    if distributed.is_main():
        best = best_row(measured)
        heat_map(measured, log.stem, f"{loaded.name}, {data.dataset}", cli.note)
        if best is not None:
            name = cell_name(drafter, (best["exit_layer"], best["num_speculations"]))
            log.append_run(*summarize([r for r in rows if r["strategy"] in (s.AUTOREGRESSIVE, name)],
                                      [s.AUTOREGRESSIVE, name]))  # fmt: skip
        print(report(measured, sweep.predict), flush=True)
        if best is not None:
            chosen_cell = {name: best[name] for name in ("exit_layer", "num_speculations") if best[name] is not None}
            print(command({"generation_strategy": "self_speculative", **chosen_cell}, model, data, generation, run),
                  flush=True)  # fmt: skip
        cli.note(f"rows in {log.path}")


if __name__ == "__main__":
    cli.run(main, (ModelConfig, DataConfig, GenerationConfig, SweepConfig, RunConfig))
