"""Batches: every row is what its prompt gives alone, whatever its neighbours, its place, and the rows before it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from self_speculation.batching import decode_batch
from self_speculation.config import GenerationConfig
from self_speculation.decoding import DraftAlone, Text
from self_speculation.drafters import Drafter
from self_speculation.modeling import Batch, SelfSpeculativeModel, why_not
from self_speculation.modeling.compiled import Compiled
from self_speculation.sampling import Sampler
from self_speculation.stopping import Stopper
from tests import tiny
from tests.fuzz import letters
from tests.pairwise import pairwise

LENGTHS = (1, 300, 2, 40, tiny.WINDOW + 1, 7, 17, 3, tiny.WINDOW)  # of prompts; some windows are 8 wide
SIZES = (1, 3, 8)
FAMILIES = ("llama", "qwen3_sliding", "gemma2", "gemma3", "granite", "mixtral")
SAMPLING = ({}, {"sample": True, "temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.3})


def budget(number: int) -> int:
    return 3 + 5 * number % 11


def texts(model, drafter, *, seeds=range(100), k=4, end=(), stop_strings=(), prompts=LENGTHS, **more):
    """What makes each text: those decoded together and those decoded alone are made alike."""

    def begin(number, length, new_cache=None):
        made = drafter() if callable(drafter) else tiny.new_drafter(drafter, model, 2, k)
        config = GenerationConfig(**{"sample": False, **more})
        stopper = Stopper(eos_ids=end, stop_strings=stop_strings, budget=budget(number), decode=letters)
        return Text(
            model, made, tiny.prompt_ids(length, seed=number), sampler=Sampler(config, seed=seeds[number]),
            stopper=stopper, num_speculations=k if drafter else 0, new_cache=new_cache,
        )  # fmt: skip

    return [partial(begin, number, length) for number, length in enumerate(prompts)]


def together(model, size, waiting, draft_alone=None):
    """Tokens, text, reason and rounds of each text of a batch, in the order of the prompts."""
    found = dict(decode_batch(model, waiting, size, draft_alone))
    return [
        (d.tokens, d.text, d.stop_reason, d.stats.rounds) for d in (found[number] for number in range(len(waiting)))
    ]


def alone(model, waiting, draft_alone=None):
    return [together(model, 1, [begin], draft_alone)[0] for begin in waiting]


def one_by_one(model, drafter, **settings):
    """The same from the loop for one prompt."""
    end, stops = settings.pop("end", ()), settings.pop("stop_strings", ())
    found = []
    for number, length in enumerate(LENGTHS):
        d = tiny.run(
            model, tiny.new_drafter(drafter, model, 2, 4), tiny.prompt_ids(length, seed=number), steps=budget(number),
            num_speculations=4 if drafter else 0, seed=number, end=end, stop_strings=stops, decode_text=letters,
            **settings,
        )  # fmt: skip
        found.append((d.tokens, d.text, d.stop_reason, d.stats.rounds))
    return found


@pytest.mark.parametrize(("family", "way", "drafter", "size", "sampling", "dtype"), pairwise(
    FAMILIES, tiny.WAYS, tuple(tiny.DRAFTERS), SIZES, tuple(range(len(SAMPLING))), (torch.float64, torch.float32),
))  # fmt: skip
def test_rows_are_those_decoded_alone(family, way, drafter, size, sampling, dtype):
    """Nine prompts of 1 to 300 tokens, some past their sliding window. Cases: transformers #32189, vllm-metal #447."""
    model = tiny.split(family, way, dtype)
    settings = SAMPLING[sampling]
    got = together(model, size, texts(model, drafter, **settings))
    assert got == one_by_one(model, drafter, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("way", tiny.WAYS)
def test_rows_are_those_decoded_alone_everywhere(family, way):
    for drafter in tiny.DRAFTERS:
        for settings in SAMPLING:
            model = tiny.split(family, way)
            expected = one_by_one(model, drafter, **settings)
            for size in SIZES:
                assert together(model, size, texts(model, drafter, **settings)) == expected


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("way", tiny.WAYS)
def test_every_family_can(family, way):
    """A silent fallback to one row at a time would be noticed here."""
    assert why_not(tiny.split(family, way)) is None


@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
def test_stops_inside_a_batch(drafter):
    """An end id and a stop string end some rows early, in the middle of blocks; others take their places."""
    model = tiny.split("gemma2")
    plain = one_by_one(model, drafter)
    end, word = [plain[2][0][4]], letters(plain[7][0][3:5])
    expected = one_by_one(model, drafter, end=end, stop_strings=[word])
    assert {reason for _, _, reason, _ in expected} == {"eos", "stop_string", "budget"}
    assert together(model, 3, texts(model, drafter, end=end, stop_strings=[word])) == expected


def test_a_sample_does_not_depend_on_its_neighbours():
    """Case: vLLM #9441. Other seeds for the others, other neighbours, another order: the text stays."""
    model, settings = tiny.split("llama"), SAMPLING[1]
    waiting = texts(model, "early_exit", **settings)
    before = together(model, 4, waiting)
    other_seeds = texts(model, "early_exit", seeds=[3 if n == 3 else n + 50 for n in range(9)], **settings)
    after = together(model, 4, other_seeds)
    assert after[3] == before[3] and after[4] != before[4]
    assert together(model, 3, [waiting[8], waiting[3]])[1] == before[3]
    assert together(model, 8, waiting[::-1])[5] == before[3]


def test_a_waiting_prompt_takes_the_place_of_a_row_that_has_ended():
    model, sizes = tiny.split("llama"), []
    waiting, taken = texts(model, "early_exit"), []

    def queue():
        for number, begin in enumerate(waiting):
            taken.append(number)
            yield begin

    run = Batch.run

    def watched(self, tokens, *args, **kwargs):
        sizes.append(len(tokens))
        return run(self, tokens, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "run", watched)
        finished = []
        for number, _ in decode_batch(model, queue(), 3):
            assert len(taken) - len(finished) <= 3, "no prompt is taken before there is a place for it"
            finished.append(number)
    assert sorted(finished) == list(range(9)) and finished != sorted(finished)
    assert max(sizes) == 3 and sizes[: len(sizes) // 2].count(3) >= len(sizes) // 2 - 1


@pytest.mark.parametrize("way", tiny.WAYS)
def test_part_of_the_model_alone(way):
    model = tiny.split("qwen3_sliding", way)
    for alone_part in (DraftAlone(stop=3), DraftAlone(skip=tiny.new_drafter("skip_layer", model).skip)):
        expected = [
            tiny.run(
                model, tiny.new_drafter("", model), tiny.prompt_ids(length, seed=number), steps=budget(number),
                draft_alone=alone_part,
            ).tokens
            for number, length in enumerate(LENGTHS)
        ]  # fmt: skip
        assert [tokens for tokens, *_ in together(model, 4, texts(model, ""), alone_part)] == expected


def test_drafts_that_stop_early_and_adapt():
    """Each row has a threshold of its own, and rows whose draft is over wait for the others."""
    model = tiny.split("llama")
    for settings in ({"draft_exit_threshold": 0.3}, {"adaptive_draft_exit": True}):
        make = partial(tiny.new_drafter, "early_exit", model, 3, 4, **settings)
        expected = []
        for number, length in enumerate(LENGTHS):
            drafter = make()
            d = tiny.run(model, drafter, tiny.prompt_ids(length, seed=number), steps=budget(number), seed=number)
            expected.append((d.tokens, d.text, d.stop_reason, d.stats.rounds))
        assert len({r.drafted for *_, rounds in expected for r in rounds}) >= 4
        got = together(model, 3, texts(model, make))
        assert [(tokens, reason, rounds) for tokens, _, reason, rounds in got] == [
            (tokens, reason, rounds) for tokens, _, reason, rounds in expected
        ]


def test_a_drafter_that_knows_nothing_of_batches_is_asked_row_by_row():
    model = tiny.split("gemma3")

    class Alone(type(tiny.new_drafter("early_exit", model))):
        propose_each = Drafter.propose_each

    got = together(model, 3, texts(model, partial(Alone, 2)))
    assert got == one_by_one(model, "early_exit")


@torch.inference_mode()
@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
@pytest.mark.parametrize("family", ("llama", "gemma2", "qwen3_sliding"))
def test_keys_and_values_are_those_of_a_fresh_forward(family, drafter, monkeypatch):
    """Design, correctness rule 5, for every row after every round."""
    from self_speculation import batching

    model, original, checked = tiny.split(family), batching._round, 0

    def checking(batch, rows, part):
        nonlocal checked
        original(batch, rows, part)
        for row, text in enumerate(rows):
            known, cache = text.context.position, model.new_cache(text.context.position)
            if text.ended:
                known = min(known, len(text.context.tokens) - 1)
            model.run(model.ids(text.context.tokens[:known]), cache, 0)
            for ours, theirs in zip(batch.cache.layers, cache.layers, strict=True):
                for name in ("keys", "values"):
                    difference = getattr(ours, name)[row, :, :known] - getattr(theirs, name)[0, :, :known]
                    assert float(difference.abs().max()) <= (1e-4 if family == "gemma2" else 1e-9)
            checked += 1

    monkeypatch.setattr(batching, "_round", checking)
    together(model, 3, texts(model, drafter, prompts=(1, 40, 9, 17, 2)))
    assert checked >= 12


def test_positions_end_for_some_rows(monkeypatch):
    """A model of 32 positions: rows near the last one draft less and end there, the others go on."""
    model = tiny.split("llama")
    monkeypatch.setattr(model.backbone.config, "max_position_embeddings", 32)
    prompts = (30, 5, 31, 20)
    waiting = texts(model, "early_exit", prompts=prompts)
    got = together(model, 4, waiting)
    assert [reason for *_, reason, _ in got] == ["budget", "budget", "length", "budget"]
    assert got == alone(model, waiting)


def test_what_cannot_run_in_batches_says_so():
    import transformers as t

    from self_speculation.modeling import SelfSpeculativeModel

    config = tiny.CONFIGS["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = SelfSpeculativeModel(t.AutoModelForCausalLM.from_config(config))
    assert "rotary" in why_not(model)


def test_shares_of_a_round_add_up_to_the_time_of_the_batch():
    import time

    model = tiny.split("llama")
    started = time.perf_counter()
    stats = [decoded.stats for _, decoded in decode_batch(model, texts(model, "early_exit"), 4)]
    wall = time.perf_counter() - started
    spent = sum(s.prefill_s + s.decode_s for s in stats)
    assert all(s.decode_s > 0 for s in stats if s.rounds) and 0.5 * wall < spent <= wall


def test_a_batch_has_no_more_rows_than_there_are_prompts(monkeypatch):
    sizes, made = [], Batch

    def counted(model, size):
        sizes.append(size)
        return made(model, size)

    monkeypatch.setattr("self_speculation.batching.Batch", counted)
    model = tiny.split("llama")
    assert together(model, 100_000, texts(model, "early_exit", prompts=(3, 5, 4)))
    assert together(model, 2, texts(model, "early_exit", prompts=(3, 5, 4)))
    assert sizes == [3, 2]


@pytest.mark.parametrize("drafter", ["adapter", "early_exit"])
def test_compiled_models_decode_batches_too(drafter, monkeypatch):
    """An adapter behind an exit drafts row by row, and a row's tensors move where the batch grows or a row ends."""
    monkeypatch.setattr(Compiled, "backend", "eager")
    model = SelfSpeculativeModel(tiny.hf_model("llama", torch.float64))
    model.compile()
    assert together(model, 3, texts(model, drafter)) == one_by_one(tiny.split("llama"), drafter)
