"""Searching which sub-layers a draft leaves out (Draft & Verify, arXiv 2309.08168, section 3.2)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tqdm import tqdm

from . import distributed
from .benchmarking import Sample
from .config import GenerationConfig, RunError, UsageError, require
from .costs import spread
from .decoding import Decoded
from .drafters.layers import SkipLayerDrafter
from .generation import Generator, usual_speculations
from .loading import Loaded, fingerprint
from .modeling import SkipSet
from .prediction import read
from .records import RunLog
from .sampling import Sampler
from .skip_scores import Score, SkipCosts, SkipScorer, measure_skip_costs
from .skip_search import Row, SearchConfig
from .stats import Stats, pooled
from .study import Proposer, SkipStudy
from .vocabulary import draft_token_ids

STARTS = 8  # sizes of each kind of starting sets
LARGEST_START = 0.8  # of all sub-layers
LEAST_HARM = 0.002  # taken for sub-layers that do none on the texts
COST_SECONDS = 8.0
VERSION = 3  # of what the values of a study mean


def base_config(config: GenerationConfig, search: SearchConfig) -> GenerationConfig:
    """The generation settings that all candidates share.

    Raises:
        UsageError: a setting that has no place in a search.
    """
    require(config.drafter in (None, "skip_layer"), "drafter", config.drafter, "a search is for skip_layer")
    require(
        config.exit_layer == -1, "exit_layer", config.exit_layer, "a search is for skip_layer, which runs to the end"
    )
    require(config.num_speculations != 0, "num_speculations", 0, "a search needs drafts; -1 chooses the number")
    require(config.max_steps not in (1, 2), "max_steps", config.max_steps,
            "neither the first nor the last token is drafted; allow more")  # fmt: skip
    require(config.batch_size == 1, "batch_size", config.batch_size, "a search is for one prompt at a time")
    for name in ("skip_attn_layers", "skip_mlp_layers", "skip_layers"):
        require(getattr(config, name) is None, name, getattr(config, name), "a search finds this")
    require(config.adapter is None, "adapter", config.adapter, "a search is for skip_layer, which has no adapter")
    if search.objective_mode == "score" and (config.draft_exit_threshold is not None or config.adaptive_draft_exit):
        raise UsageError("--objective_mode score: drafts of a fixed length are scored; leave out the draft exit rule, "
                         "or use --objective_mode generate")  # fmt: skip
    return replace(config.resolved(), generation_strategy="self_speculative", drafter="skip_layer")


def with_skip(config: GenerationConfig, skip: SkipSet, num_speculations: int) -> GenerationConfig:
    """The settings that draft with this set."""
    attn, mlp = (",".join(map(str, sorted(ids))) or None for ids in (skip.attn, skip.mlp))
    return replace(config, skip_attn_layers=attn, skip_mlp_layers=mlp, num_speculations=num_speculations)


@dataclass
class Task:
    """What candidates are scored on: the model, the settings, and the texts that the target wrote."""

    loaded: Loaded
    config: GenerationConfig
    search: SearchConfig
    samples: Sequence[Sample]
    texts: list[Decoded]
    seed: int

    @property
    def length(self) -> int:
        """The number of speculations where none is to be chosen."""
        given = self.config.num_speculations
        return usual_speculations(self.config) if given == -1 else given

    @property
    def lengths(self) -> list[int]:
        """Numbers of speculations to choose from. By acceptance the shortest drafts would always win, and decoding
        every candidate with every number would take too long."""
        search = self.search
        if self.config.num_speculations != -1 or (search.objective, search.objective_mode) != ("speed", "score"):
            return [self.length]
        return list(range(1, search.most_speculations + 1))

    @property
    def plain(self) -> Stats:
        """Autoregressive decoding of all samples."""
        return pooled(text.stats for text in self.texts)

    def scorer(self, costs: SkipCosts, lengths: Sequence[int], depth: int) -> SkipScorer:
        """Scores sets on the texts."""
        loaded, config = self.loaded, self.config
        end_ids = {*(() if config.ignore_eos else loaded.eos_ids), *(config.stop_token_ids or ())}
        texts = [
            read(loaded.model, sample.ids, text, budget=config.max_steps or 0, end_ids=end_ids)
            for sample, text in zip(self.samples, self.texts, strict=True)
        ]
        return SkipScorer(
            loaded.model, self.sampler(), texts, costs, lengths, depth, draft_token_ids(config, loaded)
        )  # fmt: skip

    def sampler(self) -> Sampler:
        return Sampler(self.config, device=self.loaded.model.device, vocab_limit=len(self.loaded.tokenizer))

    def measure_costs(self) -> SkipCosts:
        """Costs after a text of middle length, half written."""
        middle = sorted(self.samples, key=lambda sample: len(sample.ids))[len(self.samples) // 2]
        text = self.texts[self.samples.index(middle)].tokens
        tokens = [*middle.ids, *text[: len(text) // 2]]
        lengths = spread(1, max(self.search.most_speculations, *self.lengths), 5)
        room = max(1, self.loaded.model.max_positions - lengths[-1] - 1)
        token_ids = draft_token_ids(self.config, self.loaded)
        return measure_skip_costs(self.loaded.model, self.sampler(), tokens[:room], lengths, COST_SECONDS, token_ids)

    def made_with(self) -> dict[str, Any]:
        """What the values of a study depend on."""
        model, config, search = self.loaded.model, self.config, self.search
        samples = hashlib.sha256(repr([sample.ids for sample in self.samples]).encode()).hexdigest()[:16]
        settings = {field.name: getattr(config, field.name) for field in fields(config)
                    if getattr(config, field.name) != field.default}  # fmt: skip
        return {
            "version": VERSION, "model": self.loaded.name, "weights": fingerprint(self.loaded.model.hf_model),
            "samples": samples,
            "dtype": model.dtype_name, "objective": search.objective,
            "objective_mode": search.objective_mode, "min_skipped": search.min_skipped,
            "most_speculations": search.most_speculations, "depth": search.depth, "generation": settings,
        }  # fmt: skip


def open_study(task: Task, log: RunLog, dataset: str) -> SkipStudy:
    """The study that the search adds its trials to; the main process makes it, where it is not there.

    Raises:
        UsageError: it was made with something else.
        RunError: the storage cannot be used.
    """
    search, folder = task.search, log.stem.parent
    name = search.study_name or f"{task.loaded.name}_{dataset}_{search.objective}_{search.objective_mode}"
    storage = search.storage or str(folder / "search.db")

    def opened() -> SkipStudy:
        layers = task.loaded.model.num_layers
        return SkipStudy(
            storage, name, task.made_with(), layers, maximize=search.objective == "acceptance", folder=folder
        )

    distributed.on_main(lambda: opened() and None)
    return opened()


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        costs: of rounds.
        sensitivity: a row a sub-layer, skipped alone.
        best: the best sets that may be used, with their trials, best first.
    """

    costs: SkipCosts
    sensitivity: list[Row]
    best: list[tuple[SkipSet, Row]]


def search(task: Task, study: SkipStudy, log: RunLog) -> Found:
    """Write the texts, then try sets until the study has its trials; all processes take part.

    Raises:
        RunError: no set was tried that may be used.
    """
    wanted = task.search
    deadline = time.monotonic() + (wanted.timeout or float("inf"))
    task.texts = write_texts(task.loaded, task.config, task.samples, task.seed)
    costs = costs_of(study, task)
    scorer = task.scorer(costs, task.lengths, wanted.depth)
    harms = sensitivities(study, scorer, costs)
    with distributed.own_work():
        run_trials(task, study, starting_sets(harms, wanted), make_evaluate(task, scorer), log, deadline)
    distributed.barrier()
    best = distributed.on_main(
        lambda: study.best(max(1, wanted.confirm), lambda skip: not shortfall(skip, study.layers, wanted.min_skipped))
    )
    if not best:
        raise RunError(f"--n_trials {wanted.n_trials}: no set that may be used was tried; allow more trials or time")
    return Found(costs, harms, best)


def write_texts(loaded: Loaded, config: GenerationConfig, samples: Sequence[Sample], seed: int) -> list[Decoded]:
    """What the target writes after each sample; the processes share the work and all have the result."""
    generator = Generator(loaded, config.autoregressive(), seed=seed)
    own: dict[str, Decoded] = {}
    with distributed.own_work(), distributed.Progress(len(samples), desc="texts", unit="text") as progress:
        for sample in distributed.pull(samples):
            own[sample.id] = generator(sample.ids, sample_id=sample.id).complete()
            progress.add()
    texts = _merged(own)
    if not any(text.stats.decode_tokens for text in texts.values()):
        raise UsageError("--max_steps: the target's texts have no token to draft; allow more, or take other samples")
    return [texts[sample.id] for sample in samples]


def _merged(own: dict[Any, Any]) -> dict[Any, Any]:
    """What the processes found, in all of them."""
    return distributed.broadcast({key: value for part in distributed.gather(own) for key, value in part.items()})


def costs_of(study: SkipStudy, task: Task) -> SkipCosts:
    """The costs that the study is made with: measured by the first process that opens it, then kept in it, so that
    values stay comparable."""
    kept: dict[str, Any] = distributed.on_main(lambda: study.kept("costs", lambda: asdict(task.measure_costs())))
    tuples: Row = {name: tuple(value) for name, value in kept.items() if isinstance(value, list)}
    return SkipCosts(**{**kept, **tuples})


def sensitivities(study: SkipStudy, scorer: SkipScorer, costs: SkipCosts) -> list[Row]:
    """What skipping each sub-layer alone does to the agreement with the target; kept in the study."""
    known = distributed.on_main(lambda: study.study.user_attrs.get("sensitivity"))
    if known is not None:
        return known
    todo = [(kind, layer) for kind in ("attn", "mlp") for layer in range(study.layers)]
    own: dict[tuple[str, int], float] = {}
    with distributed.own_work(), distributed.Progress(len(todo), desc="sub-layers") as progress:
        for kind, layer in distributed.pull(todo):
            own[kind, layer] = scorer.agreement(SkipSet.of(**{kind: [layer]}))
            progress.add()
    agreements = _merged(own)
    rows = []
    for kind, layer in todo:
        saved = costs.draft_step(SkipSet()) - costs.draft_step(SkipSet.of(**{kind: [layer]}))
        agreement = agreements[kind, layer]
        rows.append({"kind": kind, "layer": layer, "agreement": agreement, "harm": 1 - agreement, "saved": saved})
    return distributed.on_main(lambda: study.kept("sensitivity", lambda: rows))


def starting_sets(sensitivity: Sequence[Row], search: SearchConfig) -> list[SkipSet]:
    """Sets of several sizes: the sub-layers that do least harm, for the objective speed those that do least harm for
    the time they save, and the last layers, which are the set to skip where a model was trained for early exit."""
    least = search.min_skipped
    layers, most = len(sensitivity) // 2, int(LARGEST_START * len(sensitivity))
    sizes = spread(max(1, least), max(1, least, most), STARTS)
    sets: list[SkipSet] = []
    orders = [sorted(sensitivity, key=lambda row: row["harm"])]
    if search.objective == "speed":
        orders.append(sorted(sensitivity, key=lambda row: (row["harm"] + LEAST_HARM) / max(row["saved"], 1e-9)))
    for ranked in orders:
        for size in sizes:
            chosen = ranked[:size]
            ids = [[row["layer"] for row in chosen if row["kind"] == kind] for kind in ("attn", "mlp")]
            sets.append(SkipSet.of(*ids))
    for size in sizes:
        last = range(layers - max(1, size // 2), layers)
        sets.append(SkipSet.of(last, last))
    return list(dict.fromkeys(sets))


def generate_score(task: Task, generator: Generator, skip: SkipSet) -> Score:
    """The score of a set by decoding all samples with it."""
    drafter = generator.drafter
    assert isinstance(drafter, SkipLayerDrafter)
    drafter.skip = skip
    stats = pooled(generator(sample.ids, sample_id=sample.id).complete().stats for sample in task.samples)
    seconds = stats.decode_s / max(1, stats.decode_tokens)
    plain = task.plain.decode_s / max(1, task.plain.decode_tokens)
    return Score(
        generator.config.num_speculations, stats.acceptance_rate or 0.0, stats.tokens_per_round or 0.0, seconds,
        plain / seconds if seconds else 0.0,
    )  # fmt: skip


def make_evaluate(task: Task, scorer: SkipScorer) -> Callable[[SkipSet], Score]:
    """How candidates are scored."""
    if task.search.objective_mode == "score":
        return scorer
    config = with_skip(task.config, SkipSet.of(attn=[0]), task.length)
    generator = Generator(task.loaded, config, seed=task.seed)
    return lambda skip: generate_score(task, generator, skip)


def run_trials(
    task: Task, study: SkipStudy, starts: Sequence[SkipSet], evaluate: Callable[[SkipSet], Score], log: RunLog,
    deadline: float,
) -> None:  # fmt: skip
    """Try sets until the study has all its trials or no time is left. All processes work on the same study."""
    search, layers = task.search, study.layers
    rank, world = distributed.rank(), distributed.world_size()
    proposer = Proposer(study, starts[rank::world], seed=task.seed + 1_000_003 * rank + 7919 * study.count())
    known = set(starts)
    with tqdm(total=search.n_trials, initial=min(study.count(), search.n_trials), desc="search", unit="trial",
              disable=not distributed.is_main()) as bar:  # fmt: skip
        while (done := study.count()) < search.n_trials and time.monotonic() < deadline:
            bar.n = done
            skip = proposer.next()
            started = time.perf_counter()
            score = evaluate(skip)
            row = {
                "skipped": len(skip), **asdict(score), "origin": "start" if skip in known else "search",
                "seconds": time.perf_counter() - started,
            }  # fmt: skip
            lacking = shortfall(skip, layers, search.min_skipped)
            value = score.time_per_token * (1 + lacking)
            if search.objective == "acceptance":
                value = score.acceptance_rate - lacking
            added = study.add(skip, value, row, search.n_trials)
            if added is not None:
                log.write(added)
            best = json.loads(study.best_trial().user_attrs["row"])
            bar.set_postfix_str(f"best {best['speedup']:.2f} x, {best['skipped']} skipped, acceptance "
                                f"{best['acceptance_rate']:.0%}")  # fmt: skip
        bar.n = study.count()
        bar.refresh()


def shortfall(skip: SkipSet, layers: int, least: int) -> int:
    """How many sub-layers too few (or, where none is left, too many) a set skips; 0 for a set that may be used."""
    return max(0, least - len(skip)) + (len(skip) == 2 * layers)
