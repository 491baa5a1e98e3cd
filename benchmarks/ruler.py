"""The ruler: our ways of decoding against `model.generate` and its own speculation, side by side in one run each.

Runs `benchmark.py --compare` on HumanEval prompts at a forced equal length, then writes one Markdown table to
`<output_dir>/ruler_<model>.md`. `--quick` takes a few minutes on two CPU cores. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = (
    "autoregressive,early_exit:exit_layer={exit_layer},prompt_lookup:num_speculations=10,"
    "prompt_lookup+early_exit:exit_layer={exit_layer},"
    "hf,hf_early_exit:exit_layer={exit_layer},hf_prompt_lookup:num_speculations=10"
)
MODELS = {  # short name -> exit layer, number of speculations
    "selfspec-16l": (4, 4),
    "smollm2-135m": (24, 4),
}


def measure(model: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """One comparison; the pooled rows of its strategies."""
    exit_layer, length = MODELS.get(model, (options.exit_layer, options.num_speculations))
    command = [
        sys.executable, "benchmark.py", "--model", model, "--dtype", options.dtype, "--dataset", "human_eval",
        "--num_samples", str(4 if options.quick else 20), "--max_steps", str(64 if options.quick else 256),
        "--ignore_eos", "True", "--num_speculations", str(length), "--output_dir", options.output_dir,
        "--compare", STRATEGIES.format(exit_layer=exit_layer), "--sample", str(options.sample),
    ]  # fmt: skip
    table = Path(options.output_dir, "runs.csv")
    before = {row["run_id"] for row in read(table)} if table.exists() else set()
    subprocess.run(command, cwd=ROOT, check=True)
    return [row for row in read(table) if row["run_id"] not in before]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def markdown(model: str, rows: list[dict[str, str]]) -> str:
    """The pooled rows as a table; speed-ups are medians over prompts, against our own autoregressive decoding."""
    lines = [
        f"### {model}, {rows[0]['dtype']}, {rows[0]['device']}, torch {rows[0]['torch']}, {rows[0]['timestamp'][:10]}",
        "",
        "| strategy | exit | K | tokens/s | speed-up | acceptance | tokens/round | identical | repeated 4-grams |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        metrics = json.loads(row["metrics"])
        cells = [
            metrics["strategy"].split(":")[0],
            row["exit_layer"],
            row["num_speculations"],
            number(row["tokens_per_second"], ".1f"),
            number(metrics.get("speedup_median"), ".2f"),
            number(row["acceptance_rate"], ".1%"),
            number(row["tokens_per_round"], ".2f"),
            number(metrics.get("identical"), ".0%"),
            number(metrics.get("repeated_4grams"), ".0%"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def number(value: object, form: str) -> str:
    return "" if value in (None, "") else format(float(str(value)), form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="default: each of " + ", ".join(MODELS))
    parser.add_argument("--exit_layer", type=int, default=4, help="of a model that is not one of the default ones")
    parser.add_argument("--num_speculations", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sample", default="False", help="True measures sampling at temperature 0.6, top-p 0.9")
    parser.add_argument("--quick", action="store_true", help="4 prompts of 64 tokens instead of 20 of 256")
    parser.add_argument("--output_dir", default="./logs")
    options = parser.parse_args()
    for model in options.model or MODELS:
        table = markdown(model, measure(model, options))
        path = Path(options.output_dir, f"ruler_{Path(model).name}.md")
        path.write_text(table, encoding="utf-8")
        print(f"\n{table}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    main()
