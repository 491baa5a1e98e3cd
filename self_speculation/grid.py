"""The cells of a sweep, exit_layer x num_speculations: which there are, and how they are shown.

A drafter without an exit layer has one row of cells, with None in its place.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .config import flag, require

Row = dict[str, Any]
Cell = tuple[int | None, int]  # exit layer, number of speculations

CELL_COLUMNS = (
    "exit_layer", "num_speculations", "acceptance_rate", "tokens_per_round", "total_time", "time_per_token",
    "tokens_per_second", "speedup",
)  # fmt: skip
"""Measured; total_time and time_per_token are mean seconds of decoding a sample and a token."""
PREDICTED_COLUMNS = tuple(
    f"predicted_{name}" for name in ("drafted", "accepted", "acceptance_rate", "tokens_per_round", "speedup")
)


@dataclass(frozen=True)
class SweepConfig:
    """Which cells."""

    exit_layer_first: int = flag(1, "first exit layer")
    exit_layer_last: int = flag(15, "last exit layer; at most the model's layers less one")
    exit_layer_step: int = flag(1, "step of exit layers")
    num_speculations_first: int = flag(1, "first number of speculations")
    num_speculations_last: int = flag(6, "last number of speculations")
    num_speculations_step: int = flag(1, "step of numbers of speculations")
    predict: bool = flag(
        False, "predict every cell from one autoregressive pass over the samples and run only the best ones"
    )
    predict_best: int = flag(3, "how many of the predicted cells to run; 0 runs the whole grid")
    resume: str | None = flag(None, "go on with the run that this file belongs to")

    def __post_init__(self) -> None:
        for name in ("exit_layer", "num_speculations"):
            first, last, step = (getattr(self, f"{name}_{part}") for part in ("first", "last", "step"))
            require(first >= 1, f"{name}_first", first, "must be 1 or more")
            require(last >= first, f"{name}_last", last, f"must be at least --{name}_first {first}")
            require(step >= 1, f"{name}_step", step, "must be 1 or more")
        require(self.predict_best >= 0, "predict_best", self.predict_best, "must be 0 or more")


def grid(config: SweepConfig, drafter: str, num_layers: int) -> list[Cell]:
    """The cells, exit layers clipped to those the model has.

    Raises:
        UsageError: no exit layer is left.
    """
    exits: Sequence[int | None] = [None]
    if "early_exit" in drafter.split("+"):
        last = min(config.exit_layer_last, num_layers - 1)
        exits = range(config.exit_layer_first, last + 1, config.exit_layer_step)
        require(len(exits) > 0, "exit_layer_first", config.exit_layer_first,
                f"must be between 1 and {num_layers - 1} for a model of {num_layers} layers")  # fmt: skip
    first, last, step = (getattr(config, f"num_speculations_{part}") for part in ("first", "last", "step"))
    return [(exit_layer, length) for exit_layer in exits for length in range(first, last + 1, step)]


def cell_name(drafter: str, cell: Cell) -> str:
    """As `--compare` writes it."""
    exit_layer = f":exit_layer={cell[0]}" if cell[0] is not None else ""
    return f"{drafter}{exit_layer}:num_speculations={cell[1]}"


def best_row(rows: Sequence[Row]) -> Row | None:
    """The fastest measured cell."""
    return max((row for row in rows if row.get("speedup")), key=lambda row: row["speedup"], default=None)


def report(rows: Sequence[Row], predicted: bool) -> str:
    """Speed-ups as a grid of text, and the best cell."""
    exits = list(dict.fromkeys(row["exit_layer"] for row in rows))
    lengths = sorted({row["num_speculations"] for row in rows})
    by_cell = {(row["exit_layer"], row["num_speculations"]): row for row in rows}
    lines = ["speed-up" + (", ~ where only predicted" if predicted else "")]
    lines.append("exit \\ K" + "".join(f"{length:>8}" for length in lengths))
    for exit_layer in exits:
        cells = [_shown(by_cell[exit_layer, length]) for length in lengths]
        lines.append(f"{exit_layer or '':>8}" + "".join(f"{cell:>8}" for cell in cells))
    if predicted:
        lines.append(prediction_report(rows))
    best = best_row(rows)
    if best is not None:
        exit_layer = f"--exit_layer {best['exit_layer']} " if best["exit_layer"] else ""
        cell = f"{exit_layer}--num_speculations {best['num_speculations']}"
        lines.append(f"best: {cell}, {best['speedup']:.2f} x autoregressive")
        if best["speedup"] <= 1:
            why = (
                "the model is not made for early exit" if exit_layer else "acceptance is too low for what a draft costs"
            )
            lines.append(f"warning: no cell beats autoregressive decoding; {why}")
    return "\n".join(lines)


def _shown(row: Row) -> str:
    if row.get("speedup"):
        return f"{row['speedup']:.2f}"
    return f"~{row['predicted_speedup']:.2f}" if row.get("predicted_speedup") else ""


def prediction_report(rows: Sequence[Row]) -> str:
    """How well the cells that ran were predicted, in one line a figure."""
    both = [row for row in rows if row.get("speedup") and row.get("predicted_speedup")]
    errors = sorted(abs(row["predicted_speedup"] / row["speedup"] - 1) for row in both)
    off = [
        abs(row["predicted_acceptance_rate"] - row["acceptance_rate"])
        for row in both
        if row["acceptance_rate"] is not None and row["predicted_acceptance_rate"] is not None
    ]
    if not errors:
        return "no predicted cell was run"
    within = sum(error <= 0.1 for error in errors)
    middle = errors[len(errors) // 2]
    return (
        f"predicted against measured: speed-up within 10% in {within} of {len(errors)} cells (median error "
        f"{middle:.1%}, largest {errors[-1]:.1%}); acceptance off by at most {max(off, default=0):.3f}"
    )


def command(settings: Row, *configs: Any) -> str:
    """The command line that benchmarks `settings` with all else as in this run."""
    parts = ["python", "benchmark.py"]
    for config in configs:
        for field in fields(config):
            if field.name in settings or getattr(config, field.name) == field.default:
                continue
            value = getattr(config, field.name)
            several = value if isinstance(value, list) else [value]
            if value is not None and field.name != "debug":
                parts += [f"--{field.name}", *map(str, several)]
    for name, value in settings.items():
        parts += [f"--{name}", str(value)]
    return shlex.join(parts)


def heat_map(rows: Sequence[Row], stem: Path, title: str, notify: Callable[[str], None]) -> None:
    """Speed-up of each cell as `<stem>.png` and `<stem>.pdf`, the best one framed; predicted where it was not run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    exits = list(dict.fromkeys(row["exit_layer"] for row in rows))
    lengths = sorted({row["num_speculations"] for row in rows})
    values = [[float("nan")] * len(exits) for _ in lengths]
    best = best_row(rows)
    figure, axes = pyplot.subplots(figsize=(2.2 + 0.55 * len(exits), 1.8 + 0.45 * len(lengths)), layout="constrained")
    for row in rows:
        x, y = exits.index(row["exit_layer"]), lengths.index(row["num_speculations"])
        value = row.get("speedup") or row.get("predicted_speedup")
        if value is None:
            continue
        values[y][x] = value
        style = "normal" if row.get("speedup") else "italic"
        axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, style=style, color="black")
    image = axes.imshow(values, aspect="auto", origin="lower", cmap="viridis", alpha=0.75)
    if best is not None:
        corner = exits.index(best["exit_layer"]) - 0.5, lengths.index(best["num_speculations"]) - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2.5))
    axes.set_xticks(range(len(exits)), [str(e or "") for e in exits])
    axes.set_yticks(range(len(lengths)), [str(k) for k in lengths])
    axes.set_xlabel("exit layer" if exits[0] else "")
    axes.set_ylabel("number of speculations")
    predicted = any(row.get("predicted_speedup") is not None and not row.get("speedup") for row in rows)
    axes.set_title(title + (" (italics: predicted)" if predicted else ""), fontsize=9)
    figure.colorbar(image, label="speed-up over autoregressive")
    for ending in ("png", "pdf"):
        figure.savefig(f"{stem}.{ending}", dpi=150)
    pyplot.close(figure)
    notify(f"heat map in {stem}.png and .pdf")
