"""What an adapter is foretold to do on a text, against what decoding does."""

from __future__ import annotations

import pytest

from self_speculation.config import GenerationConfig
from self_speculation.decoding import decode
from self_speculation.drafters import AdapterDrafter, NoDrafter
from self_speculation.modeling import Adapter, AdapterShape, SelfSpeculativeModel
from self_speculation.prediction import Rounds, simulate
from self_speculation.replay import replay
from self_speculation.sampling import Sampler
from self_speculation.stopping import Stopper
from tests.runs import exit_friendly

PROMPT = [5, 9, 17, 40, 41, 5, 9]
LENGTHS = (1, 2, 5)


@pytest.fixture(scope="module")
def model():
    return SelfSpeculativeModel(exit_friendly(max_position_embeddings=64))


def drafter(model, kind):
    depth = model.num_layers if kind == "feature" else 4
    return AdapterDrafter(Adapter(model.backbone, AdapterShape(kind, depth, 5)))


def run(model, chosen, config, length, budget, end_ids=(), seed=0):
    stopper = Stopper(budget=budget, stop_ids=end_ids)
    sampler = Sampler(config, seed=seed)
    return decode(model, chosen, PROMPT, sampler=sampler, stopper=stopper, num_speculations=length)


@pytest.mark.parametrize("kind", ["layer", "mlp", "attention", "feature"])
@pytest.mark.parametrize(("budget", "closes"), [(40, False), (40, True), (2, False), (99, False)])
def test_greedy_rounds_are_those_of_a_run(model, kind, budget, closes):
    config = GenerationConfig(sample=False)
    plain = run(model, NoDrafter(), config, 0, budget)
    end_ids = (
        [max(plain.tokens, key=plain.tokens.index)] if closes else []
    )  # the token that occurs last for the first time
    plain = run(model, NoDrafter(), config, 0, budget, end_ids)
    assert (plain.stop_reason == "stop_id") == closes
    found = replay(model, Sampler(config), PROMPT, plain, drafter(model, kind), budget=budget, end_ids=end_ids,
                   most_speculations=max(LENGTHS))  # fmt: skip
    assert found.exact and (budget == 2 or 0 < found.chance[0, :, 0].mean() < 1)
    for length in LENGTHS:
        stats = run(model, drafter(model, kind), config, length, budget, end_ids).stats
        rounds = simulate(found, found.parts[0], length)
        measured = (len(stats.rounds), stats.drafted, stats.accepted, stats.decode_tokens)
        assert (rounds.rounds, rounds.drafted, rounds.accepted, rounds.decode_tokens) == measured, length


def test_sampled_texts_have_a_chance_of_acceptance(model):
    config = GenerationConfig(sample=True, temperature=1.0, top_k=0, top_p=1.0)
    predicted, drafted, accepted = Rounds(), 0, 0
    for seed in range(12):
        plain = run(model, NoDrafter(), config, 0, 50, seed=seed)
        found = replay(model, Sampler(config), PROMPT, plain, drafter(model, "layer"), budget=50, most_speculations=3)
        assert ((found.chance >= 0) & (found.chance <= 1 + 1e-6)).all() and not found.exact
        predicted += simulate(found, 4, 3, seed=seed)
        stats = run(model, drafter(model, "layer"), config, 3, 50, seed=100 + seed).stats
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    assert predicted.acceptance_rate == pytest.approx(accepted / drafted, abs=0.1)
