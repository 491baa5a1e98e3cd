"""Decoding a data set by one or more strategies side by side, and what comes of it: rows, pooled rows and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from . import datasets, distributed, metrics
from .config import GenerationConfig
from .datasets import DataConfig, Example
from .decoding import Decoded
from .forecast import Forecast
from .generation import Generator
from .loading import Loaded
from .records import SAMPLE_COLUMNS, RunLog
from .strategies import AUTOREGRESSIVE, Strategy

Row = dict[str, Any]

WARM_UP_STEPS = 8
BATCHES = 4  # batches that a strategy decodes in its turn, where several take turns
UNITS = 4  # parts of the work a process, so that none idles long at the end
KEY = ("sample_id", "strategy")
NOT_POOLED = ("first_difference", "top2_gap")  # columns beyond the fixed ones whose mean means nothing


@dataclass(frozen=True)
class Sample:
    """A prompt ready for the model."""

    number: int
    example: Example
    ids: list[int]
    note: str

    @property
    def id(self) -> str:
        return self.example.id


def read_examples(data: DataConfig, seed: int, notify: Callable[[str], None]) -> list[Example]:
    """The examples, read by the main process only."""
    examples, notes = distributed.on_main(lambda: datasets.load(data, seed))
    for text in notes:
        notify(text)
    return examples


def prepare(loaded: Loaded, examples: Sequence[Example], max_steps: int) -> list[Sample]:
    """Prompts as token ids, through the chat template where example and tokenizer have one; too long ones are cut.

    Raises:
        UsageError: `max_steps` leaves no position for a prompt.
    """
    samples = []
    for number, example in enumerate(examples):
        chat = example.messages is not None and bool(loaded.tokenizer.chat_template)
        ids = loaded.encode_chat(example.messages or []) if chat else loaded.encode(example.prompt)
        ids, note = datasets.fit(ids, loaded.model.max_positions, max_steps, loaded.tokenizer.bos_token_id)
        samples.append(Sample(number, example, ids, note))
    return samples


def measure(
    loaded: Loaded,
    strategies: Sequence[Strategy],
    samples: Sequence[Sample],
    log: RunLog,
    *,
    dataset: DataConfig,
    score: Callable[[str, Example], Row] = lambda text, example: {},
    identity: bool = True,
    again: bool = False,
) -> None:
    """Decode every sample by every strategy and write the rows, sharing the work with the other processes.

    Sample by sample (with batches, a few batches at a time) all strategies take their turn, in an order that rotates,
    so that drift hits all alike. Rows that `log` has already are skipped; with `identity`, a sample of which one is
    missing is done anew, and its rows are written together.

    Args:
        samples, strategies: all there are, in every process.
        identity: compare greedy texts with those of the autoregressive strategy.
        again: decode also what `log` has.
    """
    todo = []
    for sample in samples:
        missing = [s for s in strategies if again or (str(sample.id), s.name) not in log.done]
        if missing:
            todo.append((sample, strategies if identity else missing))
    if todo:
        warm_up(loaded, strategies, todo[0][0])
    plain = next((s.generator.config for s in strategies if s.name == AUTOREGRESSIVE), None)
    with distributed.Progress(sum(len(turn) for _, turn in todo), unit="text") as progress:
        for unit in _units(todo, strategies, identity):
            for sample, turn, texts in _decode(unit, strategies, identity):
                reference = texts.get(AUTOREGRESSIVE) if identity and len(turn) > 1 else None
                for strategy in turn:
                    decoded = texts[strategy.name]
                    row = sample_row(strategy, sample, decoded, dataset)
                    if reference is not None and same_greedy_text(strategy.generator.config, plain):
                        row |= compare(loaded, sample.ids, reference.tokens, decoded.tokens)
                    if distributed.follows():
                        continue
                    row |= score(decoded.text, sample.example)
                    log.write(row, prediction=decoded.text, reference=sample.example.reference, tokens=decoded.tokens)
                progress.add(len(turn))


Turns = list[tuple[Sample, Sequence[Strategy]]]  # samples, and the strategies that each is decoded by


def _units(todo: Turns, strategies: Sequence[Strategy], identity: bool) -> Iterator[Iterable[Any]]:
    """This process's work in parts, in which each strategy takes one turn.

    A single strategy has one part, whose samples come one by one as there is place for them in its batch.
    """
    batch = max(strategy.generator.config.batch_size for strategy in strategies)
    if len(strategies) == 1:
        yield distributed.pull(todo)
        return
    if batch > 1:
        fair = -(-len(todo) // (2 * distributed.workers()))
        size = max(batch, min(fair, BATCHES * batch))
        yield from distributed.pull([todo[first : first + size] for first in range(0, len(todo), size)])
        return
    pieces = 1
    if not identity and distributed.workers() > 1:  # a sample's strategies may be shared out too
        pieces = min(len(strategies), -(-UNITS * distributed.workers() // max(1, len(todo))))
    parts = [[(sample, turn[piece::pieces])] for sample, turn in todo for piece in range(pieces)]
    yield from distributed.pull([part for part in parts if part[0][1]])


def _decode(
    unit: Iterable[tuple[Sample, Sequence[Strategy]]], strategies: Sequence[Strategy], together: bool
) -> Iterator[tuple[Sample, Sequence[Strategy], dict[str, Decoded]]]:
    """Let each strategy decode its samples of one unit; (sample, strategies, texts) as soon as they can be written.

    Args:
        together: a sample's texts are handed out together, else each by itself.
    """
    if len(strategies) > 1:
        unit = list(unit)
        first = unit[0][0].number % len(strategies)
        strategies = [*strategies[first:], *strategies[:first]]
    held: dict[str, dict[str, Decoded]] = {}
    for strategy in strategies:
        mine: dict[object, tuple[Sample, Sequence[Strategy]]] = {}

        def prompts(strategy: Strategy = strategy, mine: dict = mine) -> Iterator[tuple[object, list[int]]]:
            for sample, turn in unit:
                if strategy in turn:
                    mine[sample.id] = sample, turn
                    yield sample.id, sample.ids

        for sample_id, decoded in strategy.generator.each(prompts()):
            decoded.complete()
            sample, turn = mine.pop(sample_id)
            if not together:
                yield sample, [strategy], {strategy.name: decoded}
                continue
            texts = held.setdefault(sample.id, {})
            texts[strategy.name] = decoded
            if len(texts) == len(turn):
                yield sample, turn, held.pop(sample.id)


def warm_up(loaded: Loaded, strategies: Sequence[Strategy], sample: Sample) -> None:
    """Let every strategy write a few tokens after one sample, in a full batch."""
    for strategy in strategies:
        config = strategy.generator.config
        short = strategy.with_steps(loaded, min(WARM_UP_STEPS, config.max_steps or 1))
        for _, decoded in short.each([(sample.id, sample.ids)] * config.batch_size):
            decoded.complete()


def sample_row(strategy: Strategy, sample: Sample, decoded: Decoded, dataset: DataConfig) -> Row:
    """One sample's row, without metrics of its text."""
    return {
        "dataset": dataset.dataset,
        "n_shot": dataset.n_shot,
        "sample_id": sample.id,
        **strategy.generator.columns(),
        **decoded.stats.row(),
        "stop_reason": decoded.stop_reason,
        "note": "; ".join(filter(None, (sample.note, decoded.stats.note()))) or None,
        "strategy": strategy.name,
        "batch_size": strategy.generator.config.batch_size,
        "repeated_4grams": metrics.repeated_4grams(decoded.tokens),
    }


def same_greedy_text(config: GenerationConfig, other: GenerationConfig | None) -> bool:
    """Whether both settings ask for the same greedy text."""
    names = ("max_steps", "repetition_penalty", "no_repeat_ngram_size", *GenerationConfig.STOPS)
    if other is None or not (config.greedy and other.greedy):
        return False
    return all(getattr(config.resolved(), name) == getattr(other.resolved(), name) for name in names)


@torch.inference_mode()
def compare(loaded: Loaded, prompt: Sequence[int], expected: Sequence[int], tokens: Sequence[int]) -> Row:
    """Whether two greedy texts are the same, else where they part and how close the target's two best logits are."""
    if list(expected) == list(tokens):
        return {"identical": True, "first_difference": None, "top2_gap": None}
    pairs = zip(expected, tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(tokens)))
    ids = [*prompt, *expected[:place]]
    model = loaded.model
    best = model.prefill(model.ids(ids), model.new_cache(len(ids)))[0].float().topk(2).values
    return {"identical": False, "first_difference": place, "top2_gap": float(best[0] - best[1])}


def summarize(rows: Iterable[Row], names: Sequence[str]) -> list[Row]:
    """One pooled row a strategy, in the columns of runs.csv; `metrics` also says the strategy and its speed-up."""
    by_name: dict[str, list[Row]] = {name: [] for name in names}
    for row in rows:
        by_name.setdefault(row["strategy"], []).append(row)
    plain = {row["sample_id"]: row.get("tokens_per_second") for row in by_name.get(AUTOREGRESSIVE, [])}
    pools = {name: metrics.pooled(group, SAMPLE_COLUMNS) for name, group in by_name.items() if group}
    summary = []
    for name, pool in pools.items():
        pairs = [(row.get("tokens_per_second"), plain.get(row["sample_id"])) for row in by_name[name]]
        ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
        if AUTOREGRESSIVE in pools and len(pools) > 1:
            base = pools[AUTOREGRESSIVE]["tokens_per_second"]
            speedups = {
                "speedup": metrics.ratio(pool["tokens_per_second"], base),
                "speedup_median": median(ratios) if ratios else None,
            }
        else:
            speedups = {}
        found = {key: value for key, value in pool["metrics"].items() if key not in NOT_POOLED}
        pool["metrics"] = {"strategy": name, **speedups, **found}
        summary.append({key: value for key, value in pool.items() if value is not None})
    return summary


def table(summary: Sequence[Row]) -> str:
    """The summary for reading: speed and, where texts have references, quality."""
    of = [(pool, pool["metrics"]) for pool in summary]
    strategies = [found["strategy"] for _, found in of]
    speed = {
        "strategy": (strategies, ""),
        "exit": ([pool.get("exit_layer") for pool, _ in of], ""),
        "K": ([pool.get("num_speculations") for pool, _ in of], ""),
        "tokens/s": ([pool.get("tokens_per_second") for pool, _ in of], ".1f"),
        "speed-up": ([found.get("speedup") for _, found in of], ".2f"),
        "median": ([found.get("speedup_median") for _, found in of], ".2f"),
        "acceptance": ([pool.get("acceptance_rate") for pool, _ in of], ".1%"),
        "tokens/round": ([pool.get("tokens_per_round") for pool, _ in of], ".2f"),
        "p50 s/token": ([found.get("time_per_token_p50") for _, found in of], ".4f"),
        "p90": ([found.get("time_per_token_p90") for _, found in of], ".4f"),
        "identical": ([found.get("identical") for _, found in of], ".0%"),
        "repeated": ([found.get("repeated_4grams") for _, found in of], ".0%"),
    }
    names = (*metrics.ROUGE, "bleu", "exact_match", "edit_similarity", "answer_match", "pass_at_1")
    quality = {name: ([found.get(name) for _, found in of], ".1f" if name == "bleu" else ".3f") for name in names}
    tables = [speed]
    if any(value is not None for values, _ in quality.values() for value in values):
        tables.append({"strategy": (strategies, ""), **quality})
    return "\n\n".join(map(_columns, tables))


def _columns(columns: dict[str, tuple[list[Any], str]]) -> str:
    """Columns (title -> values and how to write them) side by side, empty ones left out."""
    shown = {
        title: ["" if value is None else format(value, form) for value in values]
        for title, (values, form) in columns.items()
        if any(value is not None for value in values)
    }
    widths = [max(map(len, (title, *cells))) for title, cells in shown.items()]
    lines = [list(shown), *map(list, zip(*shown.values(), strict=True))]
    first, rest = widths[0], widths[1:]
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], rest)]) for line in lines)


def explain(loaded: Loaded, strategy: Strategy, sample: Sample, pool: Row) -> list[str]:
    """What the rounds of an early exit, a skip set or an adapter cost and what acceptance would pay for them; [] for
    other strategies and for batches.

    The costs are measured on the spot, on the sample's prompt.
    """
    generator, rate = strategy.generator, pool.get("acceptance_rate")
    if not isinstance(generator, Generator) or rate is None or generator.config.batch_size > 1:
        return []
    forecast = Forecast.of(loaded, generator.config, generator.drafter)
    if forecast is None:
        return []
    part, length = forecast.part(generator.config.exit_layer), generator.config.num_speculations
    costs = forecast.costs(sample.ids, [generator.config.exit_layer], [length])
    draft, verify = costs.draft_step(part, length), costs.verification(part, length)
    even = costs.break_even(part, length)
    lines = [
        f"{strategy.name}: a step of the whole model takes {1e3 * costs.step:.1f} ms, a draft step {1e3 * draft:.1f} "
        f"ms, verifying {length} drafts {1e3 * verify:.1f} ms; acceptance {rate:.1%}, break-even {even:.1%}"
    ]
    return lines + slowness(strategy.name, rate, even, pool["metrics"].get("speedup"), _instead(forecast))


def slowness(name: str, rate: float, even: float, speedup: float | None, other: str) -> list[str]:
    """A warning where a strategy is slower than autoregressive decoding, [] elsewhere.

    Args:
        rate, even: the acceptance reached, and the one above which rounds pay by their measured costs.
        speedup: over autoregressive decoding in the same run; None where that was not run.
        other: what to try in its place.
    """
    if rate < even if speedup is None else speedup < 1:
        if rate < even:
            why = (f"acceptance is too low for what a round costs, so this is slower than autoregressive decoding; "
                   f"{other}, or fewer --num_speculations")  # fmt: skip
        else:
            why = (f"{speedup:.2f} x autoregressive decoding in this run although acceptance is above break-even; "
                   "other load on the machine may be why: measure again, with more samples")  # fmt: skip
        return [f"warning: {name}: {why}"]
    return []


def _instead(forecast: Forecast) -> str:
    """What may draft better."""
    if forecast.skip is not None:
        return "use a set that search.py finds"
    return "use a model trained for early exit, another --exit_layer" if forecast.by_exit else "use another adapter"
