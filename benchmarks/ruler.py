"""The ruler: our ways of decoding against `model.generate`, its own speculation and the package economize.

Every model decodes every set of prompts by every strategy, prompt by prompt in an order that rotates, at a forced
equal length, greedily and sampling. `<output_dir>/ruler_<time>.csv` has a row a text and strategy, `.md` the tables,
`.png` a chart. `--quick` takes about six minutes on two CPU cores. Let nothing else run meanwhile.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.economize_peer import KINDS, EconomizeGenerator, EconomizeStrategy  # noqa: E402
from self_speculation import GenerationConfig, cli, load  # noqa: E402
from self_speculation.benchmarking import Sample, measure, prepare  # noqa: E402
from self_speculation.config import (  # noqa: E402
    DTYPES,
    RunConfig,
    RunError,
    as_dict,
    flag,
    require,
    require_choice,
)
from self_speculation.datasets import DataConfig, Example  # noqa: E402
from self_speculation.datasets import load as load_examples  # noqa: E402
from self_speculation.loading import Loaded, choose_device  # noqa: E402
from self_speculation.records import SAMPLE_COLUMNS, RunLog  # noqa: E402
from self_speculation.stats import machine  # noqa: E402
from self_speculation.strategies import Strategy, make_strategies, parse_strategies  # noqa: E402

Row = dict[str, Any]
PEERS = "hf,hf_early_exit,hf_prompt_lookup:num_speculations=10"
SETS = ("human_eval", "source", "chat", "summary")
SOURCES = ("decoding.py", "records.py", "metrics.py", "datasets.py", "sampling.py", "harness.py")
SUMMARY_TOKENS = 1000
SPEED = ("hf", "economize")  # what the others are also compared with, beside our own autoregressive decoding


@dataclass(frozen=True)
class Setting:
    """How a model is measured: our strategies, and the exit layer and number of drafts that they and the peers take
    where nothing else is said."""

    model: str
    dtype: str
    exit_layer: int
    num_speculations: int
    ours: tuple[str, ...]
    quick: tuple[tuple[str, ...], int, int]  # with --quick: sets of prompts, prompts a set, tokens a text


LOOKUP = "prompt_lookup:num_speculations=10"
UNSURE = "early_exit:draft_exit_threshold=0.4"  # hf_early_exit ends its drafts by this rule
AUTO = "early_exit:exit_layer=-1:num_speculations=-1"
SETTINGS = (
    Setting("selfspec-16l", "float32", 4, 6, (
        "early_exit", AUTO, "skip_layer:num_speculations=8", LOOKUP, "prompt_lookup+early_exit",
        "prompt_lookup+early_exit:num_speculations=10:draft_exit_threshold=0.2",
    ), (SETS, 2, 48)),
    Setting("smollm2-135m", "bfloat16", 24, 4, (
        UNSURE, AUTO, "skip_layer:num_speculations=1", "adapter:num_speculations=2", LOOKUP,
        "prompt_lookup+adapter:num_speculations=10:draft_exit_threshold=0.4",
    ), (SETS[:1], 1, 32)),
    Setting("gemma3-270m", "bfloat16", 14, 4, (
        UNSURE, AUTO, "skip_layer:draft_vocabulary=16384:num_speculations=6", LOOKUP,
        "prompt_lookup+skip_layer:draft_vocabulary=16384:num_speculations=6",
    ), (SETS[:1], 1, 32)),
)  # fmt: skip


MODELS = tuple(setting.model for setting in SETTINGS)


@dataclass(frozen=True)
class RulerConfig:
    """What is measured."""

    model: list[str] | None = flag(None, f"one or more of {', '.join(MODELS)}", unset="all")
    prompts: list[str] | None = flag(
        None, f"one or more of {', '.join(SETS)}", unset="all; the larger models with --quick human_eval"
    )
    sample: str = flag("both", "True samples, False decodes greedily, both does one after the other")
    dtype: str | None = flag(
        None, "of every model", unset=", ".join(f"{setting.model} {setting.dtype}" for setting in SETTINGS)
    )
    compile: bool = flag(False, "compile our strategies (peers stay as they are)")
    pack_weights: bool = flag(False, "pack the weights, for all strategies alike")
    without_economize: bool = flag(False, "leave economize out")
    num_samples: int | None = flag(None, "prompts a set", unset="6; with --quick 2, of the larger models 1")
    max_steps: int | None = flag(None, "tokens a text", unset="128; with --quick 48, of the larger models 32")
    quick: bool = flag(False, "few prompts and short texts")
    into: str | None = flag(None, "put the tables into that part of a Markdown file too", metavar="FILE#PART")

    def __post_init__(self) -> None:
        for name, choices in (("model", MODELS), ("prompts", SETS)):
            for value in getattr(self, name) or ():
                require_choice(name, value, choices)
        require_choice("sample", self.sample, ("both", "True", "False"))
        if self.dtype is not None:
            require_choice("dtype", self.dtype, DTYPES)
        for name in ("num_samples", "max_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be 1 or more")
        require(not (self.compile and self.pack_weights), "pack_weights", True, "does not go with --compile")
        if self.into is not None:
            part_of(self.into)

    def extent(self, setting: Setting) -> tuple[tuple[str, ...], int, int]:
        """Sets of prompts, prompts a set, and tokens a text."""
        sets, count, steps = setting.quick if self.quick else (SETS, 6, 128)
        return tuple(self.prompts or sets), self.num_samples or count, self.max_steps or steps


def prompts(name: str, loaded: Loaded, count: int, max_steps: int) -> list[Sample]:
    """`count` prompts of one set, as token ids."""
    if name == "human_eval":
        examples, _ = load_examples(DataConfig(name, str(ROOT / "data"), count), 42)
    elif name == "chat":
        examples, _ = load_examples(DataConfig("mt_bench", str(ROOT / "data"), count), 42)
    elif name == "source":  # the beginnings of this repository's own files
        texts = [(ROOT / "self_speculation" / file).read_text(encoding="utf-8") for file in SOURCES[:count]]
        examples = [Example(file, text[:1200]) for file, text in zip(SOURCES, texts, strict=False)]
    else:
        examples = _articles(loaded, count, min(SUMMARY_TOKENS, loaded.model.max_positions - max_steps - 16))
    return prepare(loaded, examples, max_steps)


def _articles(loaded: Loaded, count: int, tokens: int) -> list[Example]:
    """News articles put together to one of so many tokens, to be summed up."""
    found, _ = load_examples(DataConfig("cnn_dm_summarization", str(ROOT / "data")), 42)
    texts = [str(example.row["article"]) for example in found]
    examples = []
    for first in range(count):
        turned = " ".join([*texts[first % len(texts) :], *texts[: first % len(texts)]] * 3)
        ids = loaded.tokenizer(turned, add_special_tokens=False)["input_ids"][: tokens - 12]
        examples.append(Example(f"article-{first}", f"Article: {loaded.decode(ids)}\nSummary:"))
    return examples


def strategies(loaded: Loaded, setting: Setting, sample: bool, max_steps: int, peers: bool) -> list[Strategy]:
    """All strategies of one table."""
    base = GenerationConfig(
        exit_layer=setting.exit_layer, num_speculations=setting.num_speculations, sample=sample, ignore_eos=True,
        max_steps=max_steps,
    )  # fmt: skip
    made = make_strategies(loaded, parse_strategies(",".join((*setting.ours, PEERS)), base), seed=42)
    economize = KINDS if peers else ()
    return made + [EconomizeStrategy(kind, EconomizeGenerator(kind, loaded, base)) for kind in economize]


def run_model(setting: Setting, ruler: RulerConfig, log: RunLog) -> None:
    """All tables of one model."""
    dtype = ruler.dtype or setting.dtype
    loaded = load(setting.model, dtype=dtype, compile=ruler.compile, pack_weights=ruler.pack_weights)
    sets, count, steps = ruler.extent(setting)
    for sample in {"both": (False, True), "True": (True,), "False": (False,)}[ruler.sample]:
        made = strategies(loaded, setting, sample, steps, not ruler.without_economize)
        for name in sets:
            samples = prompts(name, loaded, count, steps)
            told: Any = SimpleNamespace(dataset=name, n_shot=None)
            measure(loaded, made, samples, log, dataset=told, again=True)
    if loaded.model.compile_seconds:
        cli.note(f"{setting.model}: compiling took {loaded.model.compile_seconds:.0f} s, not counted")


def tables(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by model, dtype, mode and prompts, with a title each."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        mode = "sampled" if row["sample"] in (True, "True") else "greedy"
        found.setdefault(f"{row['model']}, {row['dtype']}, {mode}, {row['dataset']}", []).append(row)
    return list(found.items())


def pooled(rows: list[Row]) -> list[Row]:
    """One row a strategy: medians over prompts of the speed-ups, their spread, and pooled rates."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_name.setdefault(row["strategy"], {})[row["sample_id"]] = row
    pools = []
    for name, texts in by_name.items():
        ratios: dict[str, list[float]] = {}
        for base in ("autoregressive", *SPEED):
            others = by_name.get(base, {})
            pairs = [(row, others[key]) for key, row in texts.items() if key in others]
            ratios[base] = [float(a["tokens_per_second"]) / float(b["tokens_per_second"]) for a, b in pairs]
        drafted = sum(int(row["drafted"] or 0) for row in texts.values())
        rounds = sum(int(row["rounds"] or 0) for row in texts.values())
        tokens = sum(int(row["decode_tokens"]) for row in texts.values())
        identical = [str(row["identical"]) == "True" for row in texts.values() if row.get("identical") is not None]
        repeated = [float(row["repeated_4grams"]) for row in texts.values() if row["repeated_4grams"] is not None]
        pools.append({
            "strategy": name,
            "tokens/s": tokens / sum(float(row["decode_s"]) for row in texts.values()),
            **{f"x {base}": median(values) if values else None for base, values in ratios.items()},
            "spread": (min(ratios["autoregressive"]), max(ratios["autoregressive"])),
            "acceptance": sum(int(row["accepted"] or 0) for row in texts.values()) / drafted if drafted else None,
            "tokens/round": tokens / rounds if rounds else None,
            "identical": sum(identical) / len(identical) if identical else None,
            "repeated 4-grams": sum(repeated) / len(repeated) if repeated else None,
        })  # fmt: skip
    return pools


FORMS = {
    "strategy": "", "tokens/s": ".1f", "x autoregressive": ".2f", "spread": "", "x hf": ".2f", "x economize": ".2f",
    "acceptance": ".0%", "tokens/round": ".2f", "identical": ".0%", "repeated 4-grams": ".0%",
}  # fmt: skip


def markdown(rows: list[Row], head: str) -> str:
    """All tables, under a line that says what was run and where."""
    lines = [head, ""]
    for title, group in tables(rows):
        texts = len({row["sample_id"] for row in group})
        lines += [f"### {title}", "", f"{texts} texts of {group[0]['max_steps']} tokens.", ""]
        lines += [f"| {' | '.join(FORMS)} |", "|---" * len(FORMS) + "|"]
        for pool in pooled(group):
            cells = {name: "" if pool[name] is None else format(pool[name], form) for name, form in FORMS.items()
                     if name != "spread"}  # fmt: skip
            cells["spread"] = "{:.2f}-{:.2f}".format(*pool["spread"])
            lines.append("| " + " | ".join(cells[name] for name in FORMS) + " |")
        lines.append("")
    return "\n".join(lines)


def part_of(place: str) -> tuple[Path, str, str]:
    """The Markdown file that `place` (file#part) names, and what stands in it before and after `<!-- part -->` to
    `<!-- /part -->`.

    Raises:
        RunError: there is no such part.
    """
    name, _, part = place.partition("#")
    path, first, last = Path(name), f"<!-- {part} -->\n", f"<!-- /{part} -->"
    whole = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, found, rest = whole.partition(first)
    _, ended, after = rest.partition(last)
    if not (found and ended):
        raise RunError(f"--into {place}: no such file, or no lines {first.strip()} and {last} in it")
    return path, before + first, last + after


def put_into(place: str, text: str) -> None:
    """Let `text` stand in that part of a file."""
    path, before, after = part_of(place)
    path.write_text(before + text + after, encoding="utf-8")


def chart(rows: list[Row], path: Path) -> None:
    """Speed-ups against `model.generate`, a panel a table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = tables(rows)
    figure, axes = pyplot.subplots(len(groups), 1, figsize=(8, 2.6 * len(groups)), squeeze=False)
    for axis, (title, group) in zip(axes[:, 0], groups, strict=True):
        pools = [pool for pool in pooled(group) if pool["x hf"] is not None][::-1]
        colours = ["tab:gray" if pool["strategy"].startswith(SPEED) else "tab:blue" for pool in pools]
        axis.barh([pool["strategy"] for pool in pools], [pool["x hf"] for pool in pools], color=colours)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
    axes[-1, 0].set_xlabel("x model.generate")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(ruler: RulerConfig, run: RunConfig) -> None:
    """Measure our ways of decoding against model.generate, its own speculation and the package economize."""
    if not ruler.without_economize and importlib.util.find_spec("economize") is None:
        raise RunError("economize is not installed: pip install --no-deps economize, or --without_economize True")
    config = {**as_dict(ruler, run), "script": "ruler"}
    log = RunLog("ruler", run.output_dir, SAMPLE_COLUMNS, config,
                 key=("model", "dataset", "sample", "sample_id", "strategy"))  # fmt: skip
    for setting in SETTINGS:
        if setting.model in (ruler.model or MODELS):
            run_model(setting, ruler, log)
    rows = log.finish()
    head = (
        f"`python {' '.join(['benchmarks/ruler.py', *sys.argv[1:]])}`, {date.today()}, "
        f"{machine(choose_device('auto'))}, torch {torch.__version__}{', ours compiled' if ruler.compile else ''}"
        f"{', weights packed' if ruler.pack_weights else ''}"
    )
    text = markdown(rows, head)
    log.path.with_suffix(".md").write_text(text, encoding="utf-8")
    if ruler.into:
        put_into(ruler.into, text)
    chart(rows, log.path.with_suffix(".png"))
    print(f"{text}\nwritten to {log.path.with_suffix('.md')}, .csv and .png", flush=True)


if __name__ == "__main__":
    cli.run(main, (RulerConfig, RunConfig))
