"""Random families, drafts, stops, budgets, processors and seeds through the real loop, for a given time.

    python -m tests.fuzz --seconds 600
    python -m tests.fuzz --seed 123          one case again, with its settings shown

Greedy texts must be those of `model.generate`; sampled ones must follow the target's law (on table models, where it is
known exactly) and come again with the same seed. Always: the budget, what is streamed, the counts, and the cache.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import time
from functools import partial
from typing import Any

import torch
import transformers

from self_speculation.batching import decode_batch
from self_speculation.config import GenerationConfig
from self_speculation.decoding import Decoded, Observer, Text
from self_speculation.drafters import Draft, Drafter
from self_speculation.sampling import Sampler
from self_speculation.stopping import Stopper
from self_speculation.streaming import StandardStreamer
from tests import tiny
from tests.enumeration import distance, law
from tests.table_model import TableModel, random_tables
from tests.test_sampling import OFF, PROMPT, exact_law, processed


class RandomDrafter(Drafter):
    """Drafts of random length: what would come next, or anything else; as point masses or with distributions."""

    def __init__(self, seed: int, truth: list[int], prompt_length: int, sampled: bool):
        self.rng, self.truth, self.start_at, self.sampled = random.Random(seed), truth, prompt_length, sampled

    def propose(self, context: Any, limit: int) -> Draft:
        done = len(context.tokens) - self.start_at
        right = self.truth[done : done + self.rng.randint(0, limit)]
        tokens = [token if self.rng.random() < 0.8 else self.rng.randrange(tiny.VOCAB) for token in right]
        if not tokens or not self.sampled or self.rng.random() < 0.5:
            return Draft(tokens)
        probs = torch.full((len(tokens), tiny.VOCAB), 0.5 / tiny.VOCAB, dtype=torch.float64)
        probs[range(len(tokens)), tokens] += 0.5
        return Draft(tokens, probs)


class CountCheck(Observer):
    """Adds up what the loop says it did."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.file = io.StringIO()
        self.streamer = StandardStreamer(self.file)

    def on_block(self, draft: Any, accepted: int, block: Any, stopper: Stopper) -> None:
        assert 0 <= accepted <= len(draft)
        self.tokens += block
        self.streamer.on_block(draft, accepted, block, stopper)

    def on_end(self, stopper: Stopper) -> None:
        self.streamer.on_end(stopper)


def letters(tokens: list[int]) -> str:
    return "".join(chr(0x4E00 + token) for token in tokens)


def random_processors(rng: random.Random, sampled: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"sample": sampled}
    if rng.random() < 0.4:
        settings["repetition_penalty"] = rng.choice((0.8, 1.1, 1.5))
    if rng.random() < 0.3:
        settings["no_repeat_ngram_size"] = rng.choice((2, 3))
    if sampled:
        settings |= {"temperature": rng.choice((0.3, 0.7, 1.0, 1.6)), "top_p": rng.choice((0.5, 0.9, 1.0))}
        settings |= {"top_k": rng.choice((0, 2, 5)), "min_p": rng.choice((0.0, 0.0, 0.1))}
    return settings


@torch.inference_mode()
def reference(family: str, prompt: list[int], steps: int, processors: dict[str, Any]) -> list[int]:
    """The greedy tokens of `model.generate`."""
    given = {
        name: value for name, value in processors.items() if name in ("repetition_penalty", "no_repeat_ngram_size")
    }
    ids = torch.tensor([prompt])
    output = tiny.hf_model(family).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=steps, **given
    )
    return output[0, len(prompt) :].tolist()


def run_model_case(rng: random.Random, show: bool) -> None:
    """One text of one model, greedy or sampled."""
    case: dict[str, Any] = {
        "family": rng.choice(tiny.FAMILIES), "way": rng.choice(tiny.WAYS), "exit_layer": rng.randrange(1, tiny.LAYERS),
        "num_speculations": rng.choice((0, 1, 2, 3, 5, 8, 13)), "steps": rng.randint(1, 40),
        "drafter": rng.choice((*tiny.DRAFTERS, "random", "random")), "seed": rng.randrange(1 << 30),
        "prompt": tiny.prompt_ids(rng.choice((1, 2, 3, 7, 8, 9, 17, 33)), seed=rng.randrange(50)),
        "processors": random_processors(rng, sampled=rng.random() < 0.4),
    }  # fmt: skip
    family, steps, prompt, k = case["family"], case["steps"], case["prompt"], case["num_speculations"]
    truth = reference(family, prompt, steps, case["processors"])
    case["end"] = rng.sample(truth, 1) if rng.random() < 0.3 else []
    start = rng.randrange(len(truth))
    stops = [letters(truth[start : start + rng.randint(1, 4)])] if rng.random() < 0.3 else []
    case["stops"] = [[ord(c) - 0x4E00 for c in stop] for stop in stops]
    if show:
        print(case)
    model = tiny.split(family, case["way"])

    def answer() -> tuple[Decoded, CountCheck, Drafter, Any]:
        if case["drafter"] == "random":
            made: Drafter = RandomDrafter(case["seed"], truth, len(prompt), case["processors"]["sample"])
        else:
            made = tiny.new_drafter(case["drafter"], model, case["exit_layer"], k)
        caches: list[Any] = []
        start_of = made.start
        made.start = lambda context: caches.append(context) or start_of(context)  # type: ignore[method-assign, func-returns-value]
        watch = CountCheck()
        decoded = tiny.run(
            model, made, prompt, steps=steps, num_speculations=k, seed=case["seed"], end=case["end"],
            stop_strings=stops, decode_text=letters, observer=watch, **case["processors"],
        )  # fmt: skip
        return decoded, watch, made, caches[-1]

    decoded, watch, made, context = answer()
    assert watch.tokens == decoded.tokens and watch.file.getvalue() == decoded.text + "\n", "streamed"
    stats = decoded.stats
    assert stats.new_tokens == len(decoded.tokens) <= steps and 0 <= stats.accepted <= stats.drafted
    if case["processors"]["sample"]:
        assert answer()[0].tokens == decoded.tokens, "the same seed gives another text"
    else:
        stopper = Stopper(eos_ids=case["end"], stop_strings=stops, budget=steps, decode=letters)
        for token in truth:
            if stopper.reason is None:
                stopper.push([token])
        assert decoded.tokens == stopper.tokens, f"{decoded.tokens} instead of {stopper.tokens}"
        assert (decoded.text, decoded.stop_reason) == (stopper.text(), stopper.reason)
    check_cache(model, made, context)
    if rng.random() < 0.5:
        check_batch(rng, model, case, truth, stops, decoded)


def check_batch(
    rng: random.Random, model: Any, case: dict[str, Any], truth: list[int], stops: list[str], alone: Decoded
) -> None:
    """The same text comes out in a batch of any size, among random neighbours."""
    k, sampled, neighbours = case["num_speculations"], case["processors"]["sample"], rng.randint(0, 4)
    place = rng.randint(0, neighbours)

    def begin(number: int, new_cache: Any) -> Text:
        own = number == place
        other = random.Random(case["seed"] + number + 1)
        prompt = case["prompt"] if own else tiny.prompt_ids(other.randint(1, 40), seed=other.randrange(50))
        if case["drafter"] == "random":
            known = truth if own else [other.randrange(tiny.VOCAB) for _ in range(40)]
            made: Drafter = RandomDrafter(case["seed"], known, len(prompt), sampled)
        else:
            made = tiny.new_drafter(case["drafter"], model, case["exit_layer"], k)
        stopper = Stopper(eos_ids=case["end"], stop_strings=stops, decode=letters,
                          budget=case["steps"] if own else other.randint(1, 30))  # fmt: skip
        sampler = Sampler(GenerationConfig(**case["processors"]), seed=case["seed"] + (number - place))
        return Text(
            model, made, prompt, sampler=sampler, stopper=stopper, num_speculations=k, new_cache=new_cache
        )  # fmt: skip

    size = rng.randint(1, neighbours + 1)
    found = dict(decode_batch(model, [partial(begin, number) for number in range(neighbours + 1)], size))
    assert found[place].tokens == alone.tokens, f"in a batch {found[place].tokens} instead of {alone.tokens}"
    assert found[place].stop_reason == alone.stop_reason and found[place].stats.rounds == alone.stats.rounds


@torch.inference_mode()
def check_cache(model: Any, drafter: Drafter, context: Any) -> None:
    """Keys and values of the text so far equal those of a fresh forward."""
    known = min(context.position, len(context.tokens) - 1)
    if known < 1:
        return
    fresh = model.new_cache(known)
    model.run(model.ids(context.tokens[:known]), fresh, 0)
    bound = 1e-4 if model.backbone.config._attn_implementation == "eager" else 1e-9
    for kept, wanted in zip(context.cache.layers, fresh.layers, strict=True):
        for name in ("keys", "values"):
            difference = getattr(kept, name)[:, :, :known] - getattr(wanted, name)[:, :, :known]
            assert float(difference.abs().max()) <= bound, f"cache {name} differ by {float(difference.abs().max())}"
    error = tiny.adapter_cache_error(drafter, context)
    assert error <= bound, f"the adapter's cache differs by {error}"


def run_law_case(rng: random.Random, show: bool) -> None:
    """The exact joint law of three tokens on a table model."""
    settings = {**OFF, **random_processors(rng, sampled=True)}
    case = {
        "tables": rng.randrange(1 << 30), "drafter": rng.choice([name for name in tiny.DRAFTERS if name]),
        "num_speculations": rng.randint(1, 3), "settings": settings,
    }  # fmt: skip
    if show:
        print(case)
    target, draft = random_tables(case["tables"])
    model = TableModel(target, draft)
    made = tiny.new_drafter(case["drafter"], model, 2, case["num_speculations"])

    def run() -> list[int]:
        return tiny.run(model, made, PROMPT, steps=3, num_speculations=case["num_speculations"], **settings).tokens

    expected = exact_law(lambda tokens: processed(target(tokens), tokens, **settings), PROMPT, 3)
    assert distance(law(run), expected) < 1e-9, "another law"


def run_case(seed: int, show: bool = False) -> None:
    rng = random.Random(seed)
    (run_law_case if rng.random() < 0.15 else run_model_case)(rng, show)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="run this one case")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if given.seed is not None:
        run_case(given.seed, show=True)
        return 0
    first, count, until = int(time.time()), 0, time.monotonic() + given.seconds
    while time.monotonic() < until:
        try:
            run_case(first + count)
        except Exception as error:
            print(f"MISMATCH after {count} cases: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"again: python -m tests.fuzz --seed {first + count}", file=sys.stderr)
            return 1
        count += 1
    print(f"{count} cases in {given.seconds:g} s without a mismatch, seeds {first} to {first + count - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
