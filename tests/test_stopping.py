"""The earliest of end-of-sequence, stop id, stop string and budget ends the text, at every offset inside a block."""

import random
from functools import cache
from itertools import product

import pytest
import torch

from self_speculation.config import GenerationConfig
from self_speculation.generation import Generator
from self_speculation.loading import Loaded, end_ids
from self_speculation.stopping import Stopper
from tests import folders, tiny
from tests.table_model import VOCAB, TableModel


def letters(tokens):
    return "".join(chr(ord("a") + token) for token in tokens)


def one_by_one(tokens, *, eos=(), stop_ids=(), stops=(), budget=100):
    """What a text of `tokens` must become, token by token: (tokens, text, reason)."""
    kept = []
    for token in tokens:
        if token in eos or token in stop_ids:
            return kept, letters(kept), "eos" if token in eos else "stop_id"
        kept.append(token)
        starts = [letters(kept).find(stop) for stop in stops if stop in letters(kept)]
        if starts:
            return kept, letters(kept)[: min(starts)], "stop_string"
        if len(kept) == budget:
            return kept, letters(kept), "budget"
    return kept, letters(kept), None


def in_blocks(tokens, sizes, *, eos=(), stop_ids=(), stops=(), budget=100):
    stopper = Stopper(eos_ids=eos, stop_ids=stop_ids, stop_strings=stops, budget=budget, decode=letters)
    tokens, before = list(tokens), 0
    for size in sizes:
        block, tokens = tokens[:size], tokens[size:]
        if not block or stopper.reason is not None:
            break
        used = stopper.push(block)
        assert 0 < used <= len(block)
        ended_by_id = stopper.reason in ("eos", "stop_id")
        assert len(stopper.tokens) - before == used - ended_by_id
        assert used == len(block) or stopper.reason is not None
        before = len(stopper.tokens)
    return stopper.tokens, stopper.text(), stopper.reason


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("stop", ("d", "de", "cdef", "fg", "efghij"))
def test_a_stop_string_at_every_offset_of_a_block(stop, size):
    for first in range(1, size + 1):
        sizes = [first, *[size] * 20]
        assert in_blocks(range(16), sizes, stops=[stop]) == one_by_one(range(16), stops=[stop])


def test_blocks_give_what_single_tokens_give():
    """Random texts over few letters, random ends of every kind, random blocks."""
    rng = random.Random(0)
    for _ in range(1500):
        tokens = [rng.randrange(4) for _ in range(14)]
        settings = {
            "eos": rng.sample(range(4), rng.choice((0, 0, 1))),
            "stop_ids": rng.sample(range(4), rng.choice((0, 0, 1))),
            "stops": ["".join(rng.choices("abcd", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))],
            "budget": rng.choice((1, 3, 7, 100)),
        }
        sizes = [rng.randint(1, 6) for _ in range(14)]
        assert in_blocks(tokens, sizes, **settings) == one_by_one(tokens, **settings), (tokens, settings, sizes)


@pytest.mark.parametrize("end", ({"eos": [4]}, {"stop_ids": [4]}, {"stops": ["e"]}))
def test_the_budget_on_the_same_token_as_a_stop(end):
    """The stop is named, whether the budget ends there, one before or one after."""
    name = {"eos": "eos", "stop_ids": "stop_id", "stops": "stop_string"}[next(iter(end))]
    for size in range(1, 8):
        assert in_blocks(range(10), [size] * 10, budget=5, **end)[1:] == ("abcd", name)
        assert in_blocks(range(10), [size] * 10, budget=6, **end)[1:] == ("abcd", name)
        assert in_blocks(range(10), [size] * 10, budget=4, **end)[1:] == ("abcd", "budget")


def test_several_stop_ids_and_strings():
    assert in_blocks(range(10), [10], stop_ids=[7, 3, 5]) == ([0, 1, 2], "abc", "stop_id")
    assert in_blocks(range(10), [10], stops=["gh", "ef", "hi"]) == ([0, 1, 2, 3, 4, 5], "abcd", "stop_string")
    assert in_blocks(range(10), [10], stops=["cdef", "de"])[1] == "abc"  # the one that is complete first
    assert in_blocks(range(10), [10], stops=["bcde", "de"])[1] == "a"  # both complete at once: the longer one
    assert in_blocks(range(10), [10], eos=[6], stops=["de"])[2] == "stop_string"
    assert in_blocks(range(10), [10], eos=[2], stops=["de"])[2] == "eos"


def test_end_of_sequence_ids_come_from_the_generation_config_else_the_tokenizer():
    assert end_ids([2, 3], 1) == (2, 3) and end_ids(5, 1) == (5,)
    assert end_ids(None, 1) == (1,) and end_ids(None, None) == () and end_ids(0, 1) == (0,)


COUNTING = TableModel(
    lambda tokens: torch.eye(VOCAB)[(tokens[-1] + 1) % VOCAB] * 9.0,
    lambda tokens: torch.eye(VOCAB)[(tokens[-1] + (2 if tokens[-1] % 5 == 4 else 1)) % VOCAB] * 9.0,
)


@pytest.mark.parametrize("num_speculations", range(1, 7))
@pytest.mark.parametrize("end", range(1, 12))
@pytest.mark.parametrize("kind", ("eos", "string"))
def test_the_loop_stops_inside_accepted_blocks(kind, end, num_speculations):
    """Case: LayerSkip's standard streamer showed text past a stop inside an accepted block."""
    stop = {"end": [end]} if kind == "eos" else {"stop_strings": [letters([end - 1, end]) if end > 1 else "b"]}
    drafter = tiny.new_drafter("early_exit", COUNTING, 2, num_speculations)
    decoded = tiny.run(COUNTING, drafter, [0], num_speculations=num_speculations, decode_text=letters, **stop)
    if kind == "eos":
        assert decoded.tokens == list(range(1, end)) and decoded.text == letters(range(1, end))
    else:
        assert decoded.tokens == list(range(1, end + 1)) and decoded.text == letters(range(1, max(1, end - 1)))
    assert decoded.stop_reason == {"eos": "eos", "string": "stop_string"}[kind]
    stats = decoded.stats
    assert stats.new_tokens == len(decoded.tokens) == stats.decode_tokens + bool(decoded.tokens)
    assert stats.accepted <= stats.drafted


@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
@pytest.mark.parametrize("place", (0, 1, 2, 5, 11))
def test_end_of_sequence_as_in_generate(drafter, place):
    """The tokens of `model.generate` with the same EOS ids, but for the closing one."""
    model, prompt = tiny.split("llama"), tiny.prompt_ids(13)
    text = tiny.oracle("llama", tuple(prompt), 24)
    ends = [text[place], text[place + 4]]
    ids = torch.tensor([prompt])
    whole = (
        tiny.hf_model("llama")
        .generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=ends,
            pad_token_id=0,
        )[0, len(prompt) :]
        .tolist()
    )
    decoded = tiny.run(model, tiny.new_drafter(drafter, model, 3, 6), prompt, steps=24, end=ends, num_speculations=6)
    assert decoded.tokens == [token for token in whole if token not in ends]
    assert decoded.stop_reason == "eos"


byte_tokenizer = cache(folders.byte_tokenizer)


class Tiny(TableModel):
    """A table model that a `Generator` takes."""

    class hf_model:
        generation_config = None

    dtype = torch.float32
    dtype_name = "float32"


def byte_generator(text: str, draft: str | None = None, **settings) -> Generator:
    """Answers any prompt with `text`, a byte a token, then EOS (257); drafts say `draft`."""
    tokenizer = byte_tokenizer()

    def saying(answer: str):
        ids = [*tokenizer(answer)["input_ids"], 257]

        def table(tokens):
            done = len(tokens) - tokens.index(256) - 1 if 256 in tokens else 0
            return torch.eye(258)[ids[min(done, len(ids) - 1)]] * 9.0

        return table

    model = Tiny(saying(text), saying(text if draft is None else draft), vocab_size=258)
    config = GenerationConfig(
        generation_strategy="self_speculative", exit_layer=2, sample=False, **{"num_speculations": 4, **settings}
    )
    return Generator(Loaded("tiny", model, tokenizer), config)


def prompt(text: str) -> list[int]:
    """A prompt that ends in BOS, after which the answer of `byte_generator` begins."""
    return [*byte_tokenizer()(text)["input_ids"], 256]


def test_end_of_sequence_as_the_first_token():
    """Case: LayerSkip divides by zero. Here: empty text, a finite row, stop_reason eos."""
    decoded = byte_generator("")(prompt("hello"))
    assert (decoded.tokens, decoded.text, decoded.stop_reason) == ([], "", "eos")
    row = decoded.stats.row()
    assert row["new_tokens"] == row["rounds"] == row["drafted"] == 0
    assert row["acceptance_rate"] is row["tokens_per_round"] is row["tokens_per_second"] is None
    assert all(value is None or 0 <= value < float("inf") for value in row.values())


@pytest.mark.parametrize("num_speculations", (0, 1, 3, 6))
def test_a_prompt_that_ends_in_the_stop_string(num_speculations):
    """Stop strings are looked for in the new text only."""
    generator = byte_generator("abc\n\nxyz", num_speculations=num_speculations, stop_words=["\n\n"])
    assert generator(prompt("def f():\n\n")).text == "abc"
    generator = byte_generator("\nabc\n\nxyz", num_speculations=num_speculations, stop_words=["\n\n"])
    decoded = generator(prompt("def f():\n"))
    assert decoded.text == "\nabc" and decoded.stop_reason == "stop_string"


@pytest.mark.parametrize(("num_speculations", "draft"), product((1, 2, 5), ("naïve café ☕ 𝄞 end", "naive cafe")))
def test_stop_strings_of_several_bytes_and_what_remains(num_speculations, draft):
    for stop, expected in (("é", "naïve caf"), ("☕", "naïve café "), ("𝄞 e", "naïve café ☕ "), ("zzz", None)):
        text = "naïve café ☕ 𝄞 end"
        generator = byte_generator(text, draft, num_speculations=num_speculations, stop_words=[stop])
        decoded = generator(prompt("x"))
        assert decoded.text == (text if expected is None else expected)
        assert decoded.stop_reason == ("eos" if expected is None else "stop_string")


def test_stop_ids_given_by_the_user_beside_the_model_s_own():
    generator = byte_generator("abcdef", stop_token_ids=[byte_tokenizer()("d")["input_ids"][0]])
    decoded = generator(prompt("x"))
    assert (decoded.text, decoded.stop_reason) == ("abc", "stop_id")
