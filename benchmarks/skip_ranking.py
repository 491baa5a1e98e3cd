"""How well the cheap score of search.py ranks random skip sets, against the speed of decoding with them.

    python -m benchmarks.skip_ranking --model selfspec-16l --dtype float32
    python -m benchmarks.skip_ranking --model smollm2-135m --dtype bfloat16 --sets 50 --size 8 --measure 5 --known FILE

Sets of random size (or of `--size` sub-layers) are scored as `search.py` scores them, then decoded, each with the
number of speculations that its score chose. `--known` is a set of search.py's, compared with the random ones.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from self_speculation import cli, searching
from self_speculation.benchmarking import prepare, read_examples
from self_speculation.config import GenerationConfig, ModelConfig, flag, require
from self_speculation.datasets import DataConfig
from self_speculation.generation import Generator
from self_speculation.loading import load
from self_speculation.modeling import SkipSet
from self_speculation.skip_search import SearchConfig


@dataclass(frozen=True)
class RankingConfig:
    """What is scored and decoded."""

    data_path: str | None = flag(None, "as benchmark.py takes it, for human_eval")
    num_samples: int = flag(4, "prompts")
    max_steps: int = flag(64, "tokens a text")
    sets: int = flag(30, "random sets that are scored")
    size: int | None = flag(None, "sub-layers in a random set", unset="1 to three quarters of all")
    measure: int | None = flag(None, "how many of the best are decoded", unset="all")
    depth: int = flag(SearchConfig().depth, "as search.py takes it")
    known: str | None = flag(None, "a set of search.py's, compared with the random ones", metavar="FILE")
    seed: int = flag(0, "of the random sets")
    debug: bool = flag(False, "show the traceback of an error")

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_steps", "sets", "size", "measure", "depth"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be 1 or more")


def random_set(rng: random.Random, layers: int, size: int | None) -> SkipSet:
    """Sub-layers at random; without a size, between 1 and three quarters of all."""
    everything = [(kind, layer) for kind in ("attn", "mlp") for layer in range(layers)]
    chosen = rng.sample(everything, size or rng.randint(1, 2 * layers * 3 // 4))
    return SkipSet.of(*([layer for kind, layer in chosen if kind == wanted] for wanted in ("attn", "mlp")))


def main(model: ModelConfig, arguments: RankingConfig) -> None:
    """How well the cheap score of search.py ranks random skip sets, against the speed of decoding with them."""
    loaded = load(model)
    require((arguments.size or 1) <= 2 * loaded.model.num_layers, "size", arguments.size,
            f"the model has {2 * loaded.model.num_layers} sub-layers")  # fmt: skip
    data = DataConfig("human_eval", data_path=arguments.data_path, num_samples=arguments.num_samples)
    search = SearchConfig(depth=arguments.depth)
    given = GenerationConfig(sample=False, ignore_eos=True, max_steps=arguments.max_steps)
    base = searching.base_config(given, search)
    samples = prepare(loaded, read_examples(data, 42, cli.note), arguments.max_steps)
    task = searching.Task(loaded, base, search, samples, [], 42)
    task.texts = searching.write_texts(loaded, base, samples, 42)
    scorer = task.scorer(task.measure_costs(), task.lengths, search.depth)
    rng = random.Random(arguments.seed)
    sets = [random_set(rng, loaded.model.num_layers, arguments.size) for _ in range(arguments.sets)]
    started = time.perf_counter()
    scores = [scorer(skip) for skip in sets]
    scoring = (time.perf_counter() - started) / len(sets)
    ranked = sorted(range(len(sets)), key=lambda i: -scores[i].speedup)
    print(f"{len(sets)} random sets by score: best {scores[ranked[0]].speedup:.3f} x, median "
          f"{scores[ranked[len(sets) // 2]].speedup:.3f} x, worst {scores[ranked[-1]].speedup:.3f} x")  # fmt: skip
    rows: list[tuple[str, SkipSet, Any]] = [("random", sets[i], scores[i]) for i in ranked[: arguments.measure]]
    if arguments.known:
        found = json.loads(Path(arguments.known).read_text(encoding="utf-8"))
        known = SkipSet.of(found["attn"], found["mlp"])
        rows.insert(0, ("known", known, scorer(known)))
    generators = [Generator(loaded, searching.with_skip(base, skip, score.num_speculations)) for _, skip, score in rows]
    plain = Generator(loaded, base.autoregressive())
    for generator in (plain, generators[0]):
        generator(samples[0].ids)  # warm-up
    seconds, taken = [0.0] * len(rows), 0.0
    base_seconds = 0.0
    for sample in samples:  # sample by sample, so that drift hits all alike
        base_seconds += plain(sample.ids).stats.decode_s
        for place, generator in enumerate(generators):
            begun = time.perf_counter()
            seconds[place] += generator(sample.ids).stats.decode_s
            taken += time.perf_counter() - begun
    speeds = [base_seconds / each for each in seconds]
    for (name, skip, score), speed in zip(rows, speeds, strict=True):
        print(f"{name:>6} {len(skip):>3} skipped, K {score.num_speculations}: acceptance {score.acceptance_rate:.1%}, "
              f"predicted {score.speedup:.3f} x, measured {speed:.3f} x")  # fmt: skip
    decoding = taken / len(rows)
    print(f"Spearman {spearmanr([score.speedup for _, _, score in rows], speeds).statistic:.3f} over {len(rows)} sets; "
          f"a score takes {scoring:.2f} s, decoding {decoding:.2f} s ({decoding / scoring:.1f} times)")  # fmt: skip


if __name__ == "__main__":
    cli.run(main, (ModelConfig, RankingConfig))
