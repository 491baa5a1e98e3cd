"""The grid exit_layer x num_speculations: run on the same samples, or predicted and only its best cells run.

What drafts without an exit layer is swept over the number of speculations alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from . import distributed, metrics
from .benchmarking import Sample, measure
from .config import GenerationConfig, ModelConfig, UsageError, require
from .costs import spread
from .datasets import DataConfig
from .forecast import Forecast
from .generation import Generator
from .grid import PREDICTED_COLUMNS, Cell, Row, cell_name
from .loading import Loaded
from .prediction import Rounds, simulate
from .records import RunLog
from .sampling import sample_seed
from .strategies import AUTOREGRESSIVE, Strategy

ROUND_COLUMNS = (
    "sample_id", "exit_layer", "num_speculations", "prompt_tokens", "decode_tokens", "rounds", "drafted", "accepted",
    "rounds_by_length", "exact", "autoregressive_s",
)  # fmt: skip
"""Predicted rounds of a sample in a cell; rounds_by_length counts rounds with 0, 1, 2, ... drafts, autoregressive_s is
the decode time of the pass that all cells are predicted from."""
MEASURING = 0.045  # of the time that the grid would take without any gain, spent on measuring what rounds cost


def base_config(config: GenerationConfig) -> GenerationConfig:
    """The generation settings that all cells share.

    Raises:
        UsageError: a setting that has no place in a sweep.
    """
    for name in ("exit_layer", "num_speculations"):
        value = getattr(config, name)
        require(value == -1, name, value, f"a sweep sets it; give --{name}_first and --{name}_last")
    drafter = config.drafter or config.usual_drafter()
    return replace(config, generation_strategy="self_speculative", drafter=drafter)


def check_predictable(config: GenerationConfig, model: ModelConfig) -> None:
    """Refuse what `--predict` cannot foretell.

    Raises:
        UsageError: several processes hold one model, drafts end by a rule, or their drafter's are not foretold.
    """
    if model.tp:
        raise UsageError("--predict True: what predicts measures one process; leave it out with --tp True")
    if config.draft_exit_threshold is not None or config.adaptive_draft_exit:
        raise UsageError("--predict True: drafts of a fixed length are predicted; leave out the draft exit rule")
    if config.drafter not in ("early_exit", "skip_layer", "adapter"):
        raise UsageError(f"--predict True: {config.drafter} is not predicted; early_exit, skip_layer and adapter are")


def strategies(loaded: Loaded, config: GenerationConfig, cells: Sequence[Cell], seed: int) -> list[Strategy]:
    """Each cell, and among them autoregressive decoding, evenly, as often as the root of the number of cells: all are
    compared with it, so its own error is in every speed-up (Dunnett 1955, doi:10.1080/01621459.1955.10501294)."""
    plain, made = Generator(loaded, config.autoregressive(), seed=seed), []
    often = max(1, round(len(cells) ** 0.5))
    for number in range(often):
        made.append(Strategy(AUTOREGRESSIVE + (f"#{number + 1}" if number else ""), plain))
        for exit_layer, length in cells[number * len(cells) // often : (number + 1) * len(cells) // often]:
            cell = replace(config, exit_layer=exit_layer or -1, num_speculations=length)
            name = cell_name(config.drafter or "", (exit_layer, length))
            made.append(Strategy(name, Generator(loaded, cell, seed=seed)))
    return made


def run_cells(
    loaded: Loaded, config: GenerationConfig, cells: Sequence[Cell], samples: Sequence[Sample], log: RunLog,
    data: DataConfig, seed: int,
) -> list[Row]:  # fmt: skip
    """Run autoregressive decoding and the cells, shared out over the processes; all sample rows, in the main one, with
    one name for all autoregressive decoding."""
    made = strategies(loaded, config, cells, seed)
    with distributed.own_work():
        measure(loaded, made, samples, log, dataset=data, identity=False)
    rows = log.finish(order=[(sample.id, strategy.name) for sample in samples for strategy in made])
    return [{**row, "strategy": str(row["strategy"]).partition("#")[0]} for row in rows]


def cell_rows(rows: Sequence[Row], drafter: str, cells: Sequence[Cell], samples: int) -> list[Row]:
    """The measured columns of the cells that were run on all samples, pooled over their rows."""
    pools = {name: [row for row in rows if row["strategy"] == name] for name in {row["strategy"] for row in rows}}
    plain = _speed(pools.get(AUTOREGRESSIVE, []))
    found = []
    for cell in cells:
        group = pools.get(cell_name(drafter, cell), [])
        row: Row = {"exit_layer": cell[0], "num_speculations": cell[1]}
        if len(group) == samples:
            seconds, tokens = _total(group, "decode_s"), _total(group, "decode_tokens")
            row |= {
                "acceptance_rate": metrics.ratio(_total(group, "accepted"), _total(group, "drafted")),
                "tokens_per_round": metrics.ratio(tokens, _total(group, "rounds")),
                "total_time": seconds / len(group),
                "time_per_token": metrics.ratio(seconds, tokens),
                "tokens_per_second": _speed(group),
                "speedup": metrics.ratio(_speed(group), plain),
            }
        found.append(row)
    return found


def _total(rows: Sequence[Row], column: str) -> float:
    return sum(row[column] or 0 for row in rows)


def _speed(rows: Sequence[Row]) -> float | None:
    return metrics.ratio(_total(rows, "decode_tokens"), _total(rows, "decode_s"))


def predict_rounds(
    forecast: Forecast, cells: Sequence[Cell], samples: Sequence[Sample], log: RunLog, seed: int
) -> None:
    """Decode this process's share of the samples autoregressively and write the rounds of every cell."""
    loaded, config = forecast.loaded, forecast.config
    plain = strategies(loaded, config, [], seed)[0].generator
    end_ids = {*(() if config.ignore_eos else loaded.eos_ids), *(config.stop_token_ids or ())}
    exits, most = sorted({cell[0] or 0 for cell in cells}), max(cell[1] for cell in cells)
    keys = ({"sample_id": s.id, "exit_layer": e, "num_speculations": k} for s in samples for e, k in cells)
    missing = {key["sample_id"] for key in keys if log.key_of(key) not in log.done}
    todo = [sample for sample in samples if sample.id in missing]
    with distributed.Progress(len(todo), desc="predict", unit="text") as progress:
        for sample in distributed.pull(todo):
            decoded = plain(sample.ids, sample_id=sample.id).complete()
            found = forecast.follow(
                forecast.sampler(), sample.ids, decoded, exits, budget=config.max_steps or 0, most=most, end_ids=end_ids
            )
            for exit_layer, length in cells:
                rounds = simulate(found, forecast.part(exit_layer), length, seed=sample_seed(seed, sample.id))
                by_length = [rounds.by_length[i] for i in range(most + 1)]
                log.write({
                    "sample_id": sample.id, "exit_layer": exit_layer, "num_speculations": length,
                    "prompt_tokens": len(sample.ids), "decode_tokens": rounds.decode_tokens, "rounds": rounds.rounds,
                    "drafted": rounds.drafted, "accepted": rounds.accepted, "exact": found.exact,
                    "rounds_by_length": " ".join(map(str, by_length)), "autoregressive_s": decoded.stats.decode_s,
                })  # fmt: skip
            progress.add()


def predicted_cells(
    forecast: Forecast, cells: Sequence[Cell], samples: Sequence[Sample], rows: Sequence[Row]
) -> list[Row]:
    """The predicted columns of every cell; the costs behind them are measured now."""
    sums = {cell: Rounds() for cell in cells}
    for row in rows:
        counts = enumerate(map(int, str(row["rounds_by_length"]).split()))
        by_length = Counter({length: count for length, count in counts if count})
        sums[row["exit_layer"], row["num_speculations"]] += Rounds(
            row["rounds"], row["drafted"], row["accepted"], row["decode_tokens"], by_length
        )
    exits, lengths = sorted({cell[0] or 0 for cell in cells}), sorted({cell[1] for cell in cells})
    middle = sorted(samples, key=lambda sample: len(sample.ids))[len(samples) // 2]
    written = round(_total(rows, "decode_tokens") / max(1, len(rows)) / 2)  # on average half the text is there
    ids = [middle.ids[i % len(middle.ids)] for i in range(len(middle.ids) + written)]
    few = spread(lengths[0], lengths[-1], 6)
    seconds = MEASURING * _total(rows, "autoregressive_s")  # a row a cell: about what the grid would take
    costs = forecast.costs(ids, spread(exits[0], exits[-1], 3), few, seconds)
    found = []
    for (exit_layer, _), rounds in sums.items():
        values = (
            rounds.drafted, rounds.accepted, rounds.acceptance_rate, rounds.tokens_per_round,
            rounds.speedup(costs, forecast.part(exit_layer)),
        )  # fmt: skip
        found.append(dict(zip(PREDICTED_COLUMNS, values, strict=True)))
    return found


def forecast_of(loaded: Loaded, config: GenerationConfig, cells: Sequence[Cell]) -> Forecast:
    """What drafts in the cells, of a kind that `check_predictable` lets pass."""
    config = config.resolved()
    cell = replace(config, exit_layer=cells[0][0] or -1, num_speculations=1)
    forecast = Forecast.of(loaded, config, Generator(loaded, cell).drafter)
    assert forecast is not None
    return forecast


def best_predicted(cells: Sequence[Cell], predicted: Sequence[Row], count: int) -> list[Cell]:
    """The `count` cells of highest predicted speed (0: all of them), in the order of the grid."""
    if count == 0:
        return list(cells)
    ranked = sorted(zip(cells, predicted, strict=True), key=lambda pair: -(pair[1]["predicted_speedup"] or 0))
    chosen = {cell for cell, _ in ranked[:count]}
    return [cell for cell in cells if cell in chosen]
