"""A search for sub-layers to skip: what it is asked for, and how what it found is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import flag, require, require_choice

Row = dict[str, Any]

OBJECTIVES = ("speed", "acceptance")
OBJECTIVE_MODES = ("score", "generate")

TRIAL_COLUMNS = (
    "trial", "value", "best_value", "skipped", "skip_attn", "skip_mlp", "num_speculations", "acceptance_rate",
    "tokens_per_round", "time_per_token", "speedup", "draft_step", "origin", "seconds",
)  # fmt: skip
"""A trial; `draft_step` and `time_per_token` in seconds, `speedup` over autoregressive decoding, `origin` is start for
sets made from the sensitivities and search for others, `seconds` is what scoring it took."""
SENSITIVITY_COLUMNS = ("kind", "layer", "agreement", "harm", "saved")
"""A sub-layer skipped alone: share of tokens at which the draft agrees, 1 less that, seconds saved a drafted token."""
BREAK_EVEN_COLUMNS = (
    "num_speculations", "step", "draft_step", "verification", "acceptance_needed", "acceptance_reached",
    "tokens_per_round", "predicted_speedup",
)  # fmt: skip


@dataclass(frozen=True)
class SearchConfig:
    """What is searched for, and for how long."""

    objective: str = flag("speed", "speed: least time a token; acceptance: most drafts accepted, given --min_skipped")
    objective_mode: str = flag(
        "score", "score: one pass of the draft over texts the target wrote, and measured costs; generate: decode every "
        "candidate (Draft & Verify's way)"
    )  # fmt: skip
    min_skipped: int = flag(1, "fewest sub-layers that are skipped")
    n_trials: int = flag(300, "trials in all, those of earlier runs of the study included")
    timeout: float | None = flag(None, "seconds after which no new trial begins", unset="none")
    storage: str | None = flag(
        None, "where the study is kept: an SQLite or journal (.log) file, or the URL of a database",
        unset="search.db in the output folder",
    )  # fmt: skip
    study_name: str | None = flag(None, "name of the study", unset="model, data set, objective and mode")
    most_speculations: int = flag(10, "longest draft considered where --num_speculations is -1")
    depth: int = flag(2, "tokens of a draft that scoring follows; deeper ones count as the last of these")
    confirm: int = flag(3, "how many of the best sets to confirm by decoding; 0 takes the best as scored")
    resume: str | None = flag(None, "go on with the run that this file belongs to")

    def __post_init__(self) -> None:
        require_choice("objective", self.objective, OBJECTIVES)
        require_choice("objective_mode", self.objective_mode, OBJECTIVE_MODES)
        for name in ("min_skipped", "n_trials", "most_speculations", "depth"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
        for name in ("storage", "study_name"):
            require(getattr(self, name) != "", name, "", "name one, or leave the flag out for the default")
        require(self.confirm >= 0, "confirm", self.confirm, "must be 0 or more")
        require(self.timeout is None or self.timeout > 0, "timeout", self.timeout, "must be above 0")
        if self.objective == "acceptance":
            require(self.min_skipped > 1, "min_skipped", self.min_skipped,
                    "must be 2 or more for acceptance, or the best is to skip next to nothing")  # fmt: skip


def break_even_report(rows: Sequence[Row]) -> str:
    """The break-even table for reading."""
    lines = ["   K  draft step  verification  acceptance needed  reached  predicted speed-up"]
    for row in rows:
        reached = "none" if row["acceptance_reached"] is None else f"{row['acceptance_reached']:.1%}"
        lines.append(
            f"{row['num_speculations']:>4}{row['draft_step'] / row['step']:>12.2f}"
            f"{row['verification'] / row['step']:>14.2f}{row['acceptance_needed']:>19.1%}"
            f"{reached:>9}{row['predicted_speedup']:>20.2f}"
        )
    lines.append("(draft step and verification in steps of the whole model)")
    return "\n".join(lines)


def verdict(best: Row, measured: Row | None) -> list[str]:
    """Whether drafting pays, and why not where it does not.

    Args:
        best: the row of the break-even table for the number of speculations that was chosen.
        measured: speedup and acceptance_rate by decoding, if the set was decoded.
    """
    found = measured or {"speedup": best["predicted_speedup"], "acceptance_rate": best["acceptance_reached"]}
    how = "measured" if measured else "predicted"
    if found["speedup"] is None or found["speedup"] > 1:
        return []
    needed = best["acceptance_needed"]
    reached = found["acceptance_rate"] or 0.0
    why = f"break-even needs {needed:.1%} of drafts accepted, {reached:.1%} are"
    if reached >= needed:
        why += ", so the times measured while decoding were other than those of single rounds: was the machine busy?"
    if needed > 1:
        why = "no acceptance could pay for it: a round costs more than the tokens it can give"
    return [
        f"warning: drafting does not pay: {how} {found['speedup']:.2f} x autoregressive decoding. A draft step costs "
        f"{best['draft_step'] / best['step']:.2f} of a step of the whole model, verifying {best['num_speculations']} "
        f"drafts {best['verification'] / best['step']:.2f}; {why}"
    ]


def draw(
    trials: Sequence[Row], sensitivity: Sequence[Row], chosen: Row | None, layers: int, stem: Path, title: str,
    notify: Callable[[str], None],
) -> None:  # fmt: skip
    """The chosen sub-layers, the harm of each sub-layer alone and the history of the search, as `<stem>.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(max(6.0, 0.28 * layers + 2), 7.5), layout="constrained", height_ratios=(1, 1.4, 2)
    )
    top.set_title(title, fontsize=9)
    for y, kind in enumerate(("attn", "mlp")):
        skipped = set((chosen or {}).get(f"skip_{kind}") or ())
        for layer in range(layers):
            color = "tab:red" if layer in skipped else "tab:green"
            top.barh(y, 0.9, left=layer - 0.45, height=0.8, color=color, alpha=0.85)
        of_kind = {row["layer"]: row["harm"] for row in sensitivity if row["kind"] == kind}
        places = [layer + (y - 0.5) * 0.4 for layer in of_kind]
        middle.bar(places, list(of_kind.values()), width=0.4, label=kind)
    top.set_yticks((0, 1), ("attention", "MLP"))
    top.set_xlim(-0.7, layers - 0.3)
    top.set_xlabel("layer (red: skipped while drafting)")
    middle.set_xlim(-0.7, layers - 0.3)
    middle.set_ylabel("drafts lost when\nskipped alone")
    if sensitivity:
        middle.legend(fontsize=8)
    numbers = [row["trial"] for row in trials]
    bottom.scatter(numbers, [row["speedup"] for row in trials], s=6, alpha=0.5, label="trials")
    best: list[float] = []
    for row in trials:
        best.append(max([*best[-1:], row["speedup"]]))
    bottom.plot(numbers, best, color="tab:red", label="best so far")
    bottom.axhline(1.0, color="gray", linewidth=0.8)
    bottom.set_xlabel("trial")
    bottom.set_ylabel("speed-up")
    bottom.legend(fontsize=8)
    figure.savefig(f"{stem}.png", dpi=150)
    pyplot.close(figure)
    notify(f"picture in {stem}.png")
