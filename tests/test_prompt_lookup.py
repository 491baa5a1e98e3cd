"""Prompt look-up by hand-written texts: which match is taken, and how many tokens it proposes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from self_speculation.config import GenerationConfig
from self_speculation.drafters import make_drafter
from self_speculation.drafters.prompt_lookup import PromptLookupDrafter
from tests.tiny import split


def propose(text, limit=10, drafter=None, **settings):
    drafter = drafter or PromptLookupDrafter(**settings)
    context = SimpleNamespace(tokens=[ord(letter) for letter in text])
    if not hasattr(drafter, "index"):
        drafter.start(context)
    return "".join(map(chr, drafter.propose(context, limit).tokens))


@pytest.mark.parametrize(("text", "draft"), [
    ("abcde", ""),
    ("a", ""),
    ("aXYZWa", "XY"),  # one token matched: two proposed
    ("abXYZWVUab", "XYZW"),
    ("abcXYZWVUTSabc", "XYZWVU"),
    ("abcdXYZWVUTSRQabcd", "XYZWVUTS"),
    ("abcdeXYZWVUTSRQPabcde", "XYZWVUTSRQ"),  # the longest n-gram: all that may be drafted
    ("abX1234abY5678ab", "Y567"),  # the latest
    ("abX1234bY1234ab", "X123"),  # the longest before the latest
    ("abcdeabcdeabcde", "abcdeabcde"),  # goes on beyond its end with what it copied
])  # fmt: skip
def test_which_match_and_how_much_of_it(text, draft):
    assert propose(text) == draft


def test_the_limit_holds():
    assert propose("abXYZWVUab", 3) == "XYZ"
    assert propose("abcdeXYZWVUTSRQPabcde", 4) == "XYZW"


def test_the_longest_ngram_can_be_set():
    assert propose("aXYZWVUTSRQa", max_ngram=1) == "XYZWVUTSRQ"
    assert propose("abX1234bY1234ab", max_ngram=1) == "Y1234abY12"  # the latest b


def test_short_matches_can_be_passed_over():
    assert propose("aXYZWa", min_ngram=2) == ""
    assert propose("abXYZWab", min_ngram=2) == "XYZW"
    assert propose("aXYZWa", max_ngram=1, min_ngram=2) == "XYZWaXYZWa"  # there are no longer ones


def test_the_index_follows_the_text():
    drafter = PromptLookupDrafter()
    assert propose("abXY", drafter=drafter) == ""
    assert propose("abXYab", drafter=drafter) == "XYab"
    assert propose("abXYabXYZab", drafter=drafter) == "XYZa"
    drafter.start(SimpleNamespace(tokens=[]))
    assert propose("ab", drafter=drafter) == ""


def test_in_front_of_another_drafter_a_match_of_one_token_counts_for_nothing():
    settings = {"generation_strategy": "self_speculative", "exit_layer": 2, "num_speculations": 4}
    alone = make_drafter(GenerationConfig(drafter="prompt_lookup", **settings), split("llama"))
    first = make_drafter(GenerationConfig(drafter="prompt_lookup+early_exit", **settings), split("llama")).parts[0]
    last = make_drafter(GenerationConfig(drafter="early_exit+prompt_lookup", **settings), split("llama")).parts[1]
    for text, drafts in (("aXYZWa", ("XY", "", "XY")), ("abXYZWab", ("XYZW",) * 3)):
        for drafter, draft in zip((alone, first, last), drafts, strict=True):
            drafter.start(SimpleNamespace(tokens=[]))
            assert propose(text, drafter=drafter) == draft
