"""`--draft_vocabulary`: which tokens a head scores, that it scores them as the whole head does, and its limits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from self_speculation.config import GenerationConfig, UsageError
from self_speculation.drafters import Draft, make_drafter
from self_speculation.generation import Generator
from self_speculation.hf_generate import custom_generate
from self_speculation.loading import Loaded
from self_speculation.modeling import OUTSIDE, DraftVocabulary, SelfSpeculativeModel, SkipSet
from self_speculation.modeling.compiled import Compiled
from self_speculation.prediction import read, simulate, trace
from self_speculation.sampling import Sampler
from self_speculation.skip_scores import follow
from self_speculation.vocabulary import draft_token_ids, ranked
from tests import tiny
from tests.folders import byte_tokenizer, tiny_llama
from tests.runs import exit_friendly

LENGTHS = (1, 2, 5)
PROMPT = "the quick brown fox"
GREEDY = GenerationConfig(sample=False, max_steps=24, generation_strategy="self_speculative", draft_vocabulary=12)


@pytest.fixture(scope="module")
def loaded():
    return Loaded("tiny", SelfSpeculativeModel(exit_friendly(max_position_embeddings=256)), byte_tokenizer())


def test_tokens_of_the_text_take_the_places_of_the_rarest():
    vocabulary = DraftVocabulary([10, 11, 12, 13, 14, 15])
    assert vocabulary.follow([11, 20, 15]) == {5, 4} and vocabulary.ids == [10, 11, 12, 13, 15, 20]
    assert vocabulary.follow([11, 20, 15]) == set()
    assert vocabulary.follow([11, 20, 15, 21, 22]) == {3, 5} and vocabulary.ids == [10, 11, 12, 21, 15, 22]
    assert vocabulary.start() == {3, 4, 5} and vocabulary.ids == vocabulary.ranked


@pytest.mark.parametrize("size", (1, 2, 7, 12))
def test_the_frequent_half_and_the_latest_tokens_are_always_in(size):
    text = [(7 * i * i + i) % 50 for i in range(60)]
    whole, steps = DraftVocabulary(range(100, 100 + size)), DraftVocabulary(range(100, 100 + size))
    whole.follow(text)
    for end in range(len(text) + 1):
        steps.follow(text[:end])
        assert len(set(steps.ids)) == size and set(steps.ids) == steps.known
        assert set(range(100, 100 + size // 2)) <= steps.known
        assert not end or text[end - 1] in steps.known
    assert steps.ids == whole.ids


def bpe(vocab: list[str], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    model = models.BPE({text: number for number, text in enumerate(vocab)}, merges)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


def test_merges_and_log_probabilities_rank_tokens():
    letters_behind = bpe(["xyz", "xy", "ab", "y", "x", "b", "a", "z"], [("a", "b"), ("x", "y"), ("xy", "z")])
    assert ranked(letters_behind) == [3, 2, 1, 0, 4, 5, 6, 7]  # a letter, what merges make, the other letters
    unigram = Tokenizer(models.Unigram([("<unk>", -9.0), ("a", -2.0), ("b", -1.0)], unk_id=0))
    assert ranked(PreTrainedTokenizerFast(tokenizer_object=unigram)) == [2, 1, 0]
    slow = type("Slow", (), {"__len__": lambda self: 3})()
    assert ranked(slow) == [0, 1, 2]
    assert sorted(ranked(byte_tokenizer())) == list(range(258))


def test_which_tokens_a_head_begins_with(loaded):
    ids = draft_token_ids(GREEDY, loaded).tolist()
    assert len(set(ids)) == 12 and set(loaded.eos_ids) <= set(ids)
    for size in (0, 258, 5000):
        assert draft_token_ids(replace(GREEDY, draft_vocabulary=size), loaded) is None
    own = SimpleNamespace(token_ids=torch.arange(40, 60))
    assert draft_token_ids(GREEDY, loaded, own).tolist() == list(range(40, 52))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_part_has_the_logits_of_the_whole(family):
    """Soft-capping, logit scales and biases are the family's own; the model's head stays as it is."""
    model = tiny.split(family)
    hidden = torch.randn(1, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = model.hf_model.get_output_embeddings().weight.clone()
    with torch.inference_mode():
        whole = model.head(hidden)
        head, other = model.draft_head(torch.arange(40, 50)), model.draft_head(torch.arange(10))
        for text in ([], [3, 44, 90, 5, 6, 7], [3, 44, 90, 5, 6, 7, 8, 9]):
            head.follow(text)
            part = head.whole(hidden)
            known = sorted(head.vocabulary.ids)
            torch.testing.assert_close(part[:, known], whole[:, known])
            assert (part == OUTSIDE).sum() == 3 * (tiny.VOCAB - 10)
            torch.testing.assert_close(other.whole(hidden)[:, :10], whole[:, :10])  # two heads of a size stay apart
        head.start()
        torch.testing.assert_close(head.whole(hidden)[:, 40:50], whole[:, 40:50])
    assert torch.equal(model.hf_model.get_output_embeddings().weight, before)


@pytest.mark.parametrize("drafter", ("early_exit/12", "skip_layer/12"))
def test_compiled_heads_of_a_size_are_compiled_once(drafter, monkeypatch):
    monkeypatch.setattr(Compiled, "backend", "eager")
    model = SelfSpeculativeModel(tiny.hf_model("llama"))
    model.compile()
    for seed in range(2):
        prompt = tiny.prompt_ids(9, seed)
        decoded = tiny.run(model, tiny.new_drafter(drafter, model), prompt, steps=20)
        assert decoded.tokens == tiny.oracle("llama", tuple(prompt), 20)
        plain = tiny.run(tiny.split("llama"), tiny.new_drafter(drafter, tiny.split("llama")), prompt, steps=20)
        assert decoded.stats.rounds == plain.stats.rounds
    heads = [name for name in model.backbone.compiled.regions if name[0] == "head"]
    assert model.compiled and len(heads) <= 3  # the whole head for one and for several tokens, the draft's for one


def test_with_nothing_skipped_drafts_are_right_where_their_head_knows_the_token(monkeypatch):
    """Verification then goes on behind the last layer, so layers run once a token."""
    model, prompt = tiny.split("gemma2"), tiny.prompt_ids(12)
    known, kept = [], []
    propose = type(tiny.new_drafter("skip_layer/12", model)).propose

    def watched(self, context, limit) -> Draft:
        draft = propose(self, context, limit)
        known.append((list(context.tokens), draft.tokens, set(self.head.vocabulary.known)))
        kept.append(draft.kept.exit_layer)
        return draft

    drafter = tiny.new_drafter("skip_layer/12", model)
    monkeypatch.setattr(type(drafter), "propose", watched)
    decoded = tiny.run(model, drafter, prompt, steps=40)
    truth = [*prompt, *tiny.oracle("gemma2", tuple(prompt), 44)]
    assert decoded.tokens == truth[12:52] and set(kept) == {tiny.LAYERS}
    for tokens, draft, scored in known:
        following = truth[len(tokens) : len(tokens) + len(draft)]
        right = next((i for i, token in enumerate(following) if token not in scored), len(draft))
        assert draft[:right] == following[:right]
    assert 0 < decoded.stats.acceptance_rate < 1
    assert drafter.columns()["draft_vocabulary"] == 12


def test_processors_may_forbid_every_token_of_the_part():
    settings = {"no_repeat_ngram_size": 1, "sample": True, "temperature": 1.0, "top_p": 1.0}
    model = tiny.split("llama")
    make = make_drafter(replace(GREEDY, exit_layer=2, num_speculations=4), model, token_ids=torch.arange(2))
    decoded = tiny.run(model, make, tiny.prompt_ids(5), steps=60, **settings)
    assert len(set(decoded.tokens)) == 60


@pytest.mark.parametrize("change", [
    {}, {"max_steps": 3}, {"repetition_penalty": 1.3, "stop_token_ids": [101, 97, 33]}, {"no_repeat_ngram_size": 2},
])  # fmt: skip
@pytest.mark.parametrize("drafter", ("early_exit", "skip_layer"))
def test_predicted_counts_are_those_of_a_run(loaded, drafter, change):
    config = replace(GREEDY, **change, drafter=drafter, exit_layer=2 if drafter == "early_exit" else -1)
    config = replace(config, draft_vocabulary=40)
    plain = Generator(loaded, config.autoregressive())
    end_ids = {*loaded.eos_ids, *(config.stop_token_ids or ())}
    sampler, ids = Sampler(config, vocab_limit=len(loaded.tokenizer)), loaded.encode(PROMPT)
    decoded, token_ids = plain(ids), draft_token_ids(config, loaded)
    if drafter == "early_exit":
        part, found = 2, trace(loaded.model, sampler, ids, decoded, [2], budget=config.max_steps, end_ids=end_ids,
                               token_ids=token_ids)  # fmt: skip
    else:
        part, text = SkipSet(), read(loaded.model, ids, decoded, budget=config.max_steps, end_ids=end_ids)
        found = follow(loaded.model, sampler, text, part, max(LENGTHS), end_ids, token_ids)
    for length in LENGTHS:
        rounds, stats = simulate(found, part, length), Generator(loaded, replace(config, num_speculations=length))(ids)
        assert (rounds.rounds, rounds.drafted, rounds.accepted) == (
            len(stats.stats.rounds), stats.stats.drafted, stats.stats.accepted
        )  # fmt: skip


@pytest.mark.parametrize("drafter", ("early_exit", "skip_layer", "prompt_lookup+early_exit"))
def test_everything_is_chosen_when_left_open(loaded, drafter):
    said: list[str] = []
    generator = Generator(loaded, replace(GREEDY, drafter=drafter), notify=said.append)
    assert generator(PROMPT).tokens == Generator(loaded, GREEDY.autoregressive())(PROMPT).tokens
    assert any("chose" in line for line in said)


def test_what_cannot_be_done_is_refused_in_one_line(loaded):
    with pytest.raises(UsageError, match=r"--draft_vocabulary -1: must be 0"):
        GenerationConfig(draft_vocabulary=-1)
    with pytest.raises(UsageError, match=r"--draft_vocabulary 12: prompt_lookup has no head"):
        Generator(loaded, replace(GREEDY, drafter="prompt_lookup"))
    with pytest.raises(UsageError, match=r"--draft_vocabulary 12: autoregressive decoding drafts nothing"):
        Generator(loaded, replace(GREEDY, generation_strategy="autoregressive"))
    with pytest.raises(UsageError, match="draft_vocabulary needs the tokenizer"):
        custom_generate(exit_layer=2, draft_vocabulary=12)
    model = SelfSpeculativeModel(tiny_llama())
    model.hf_model.lm_head = nn.Sequential(model.hf_model.lm_head)
    with pytest.raises(UsageError, match=r"--draft_vocabulary 3: the head of this model is not a plain matrix"):
        model.draft_head(torch.arange(3))
    model.hf_model.lm_head = nn.Linear(48, 100)
    with pytest.raises(UsageError, match=r"--draft_vocabulary 3: --device_map or --tp"):
        model.draft_head(torch.arange(3))
