"""Top-p without sorting, and drawing: what transformers keeps is kept, and ids come by their probabilities."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

from self_speculation import nucleus
from self_speculation.nucleus import FIRST, MORE, Nucleus, draw, without_sorting

VOCAB = 3 * FIRST * MORE


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])  # from a nucleus of nearly all tokens to one of a single one
@pytest.mark.parametrize("vocabulary", [5, FIRST, VOCAB])
def test_it_keeps_what_sorting_keeps(top_p, spread, vocabulary):
    scores = spread * torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = scores.clone()
    kept = Nucleus(top_p)(None, scores)
    assert torch.equal(scores, before)
    torch.testing.assert_close(kept, TopPLogitsWarper(top_p)(None, scores), rtol=0, atol=0)


def test_every_size_is_reached(monkeypatch):
    """None that does is tried in vain, and the whole vocabulary is sorted where nothing less makes up p."""
    sizes, real = [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda scores, size: sizes.append(size) or real(scores, size))
    for inside, tried in (
        (FIRST // 2, [FIRST]),
        (2 * FIRST, [FIRST, MORE * FIRST]),
        (VOCAB - 1, [FIRST, MORE * FIRST]),
    ):
        sizes.clear()
        scores = torch.full((1, MORE * VOCAB), -20.0, dtype=torch.float64)
        scores[0, -inside:] = 20 + torch.rand(inside, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        kept = Nucleus(0.9)(None, scores)
        assert sizes == tried
        assert torch.equal(kept, TopPLogitsWarper(0.9)(None, scores))


def test_forbidden_tokens_stay_forbidden_and_what_is_no_number_is_not_hidden():
    scores = torch.randn(2, VOCAB, dtype=torch.float64)
    scores[:, ::2] = -torch.inf
    kept = Nucleus(0.9)(None, scores)
    assert torch.equal(kept, TopPLogitsWarper(0.9)(None, scores))
    assert (kept[:, ::2] == -torch.inf).all()
    for bad in (torch.full((1, VOCAB), -torch.inf), torch.full((1, VOCAB), torch.nan)):
        assert Nucleus(0.9)(None, bad).softmax(-1).isnan().all()


def test_tokens_of_equal_probability_fill_the_nucleus():
    kept = Nucleus(0.5)(None, torch.zeros(1, VOCAB, dtype=torch.float64))
    assert abs(int(kept.isfinite().sum()) - VOCAB // 2) <= 1  # rounding


def test_generate_s_processors_are_taken_over():
    ours = without_sorting(LogitsProcessorList([
        TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.8), TopPLogitsWarper(0.8, min_tokens_to_keep=2),
        TopPLogitsWarper(0.8, filter_value=-100.0), MinPLogitsWarper(0.1),
    ]))  # fmt: skip
    assert [type(each) for each in ours] == [
        TemperatureLogitsWarper, Nucleus, TopPLogitsWarper, TopPLogitsWarper, MinPLogitsWarper
    ]  # fmt: skip
    assert ours[1].top_p == 0.8


@pytest.fixture
def uniform(monkeypatch):
    """Sets what `torch.rand` gives next."""
    value = SimpleNamespace(next=0.0)
    fake = SimpleNamespace(**{name: getattr(torch, name) for name in ("float64", "searchsorted", "multinomial")})
    fake.rand = lambda *args, **kwargs: torch.tensor(value.next, dtype=torch.float64)
    monkeypatch.setattr(nucleus, "torch", fake)
    return value


@pytest.mark.parametrize("total", [1.0, 0.7, 3.0])
def test_ids_come_by_their_probabilities(uniform, total):
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.0, 0.125, 0.0]) * total
    counts, draws = [0] * len(probs), 4000
    for number in range(draws):
        uniform.next = (number + 0.5) / draws
        counts[draw(probs, None)] += 1
    assert counts == [0, 1000, 0, 2000, 500, 0, 500, 0]


@pytest.mark.parametrize(("point", "drawn"), [(0.0, 1), (1 - 2**-53, 6), (1.0, 6)])
def test_no_id_of_probability_zero_is_drawn_at_the_ends(uniform, point, drawn):
    uniform.next = point
    assert draw(torch.tensor([0.0, 0.1, 0.0, 0.3, 0.1, 0.0, 0.1, 0.0]), None) == drawn


def test_the_generator_decides():
    probs = torch.rand(50, generator=torch.Generator().manual_seed(0))
    texts = [[draw(probs, generator) for _ in range(20)] for generator in map(torch.Generator().manual_seed, (3, 3, 4))]
    assert texts[0] == texts[1] != texts[2]
