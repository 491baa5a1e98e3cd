"""Skip-layer drafting and the draft exit (Draft & Verify)."""

from __future__ import annotations

import json

import pytest
import torch

from self_speculation import auto, skip_sets
from self_speculation.config import GenerationConfig, RunError, UsageError
from self_speculation.drafters.draft_exit import AdaptiveDraftExit, make_draft_exit
from self_speculation.forecast import Forecast
from self_speculation.generation import Generator
from self_speculation.loading import Loaded, fingerprint
from self_speculation.modeling import SelfSpeculativeModel, SkipSet
from tests.folders import byte_tokenizer, tiny_llama

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded("tiny", SelfSpeculativeModel(tiny_llama().double()), byte_tokenizer())


def answer(loaded: Loaded, **settings: object):
    defaults = {"sample": False, "max_steps": 40, "generation_strategy": "self_speculative"}
    return Generator(loaded, GenerationConfig(**{**defaults, **settings}))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
def test_any_skip_set_gives_the_models_own_text(loaded, direct, adaptive, monkeypatch):
    if not direct:
        monkeypatch.setattr(loaded.model.backbone, "direct", None)
    ids = torch.tensor([loaded.encode(PROMPT)])
    theirs = loaded.model.hf_model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        attn, mlp = (torch.rand(6, generator=generator).lt(0.4).nonzero().flatten().tolist() for _ in range(2))
        if not attn + mlp:
            continue
        skipped = {"skip_attn_layers": ",".join(map(str, attn)), "skip_mlp_layers": ",".join(map(str, mlp))}
        speculative = answer(loaded, **skipped, adaptive_draft_exit=adaptive, num_speculations=4)
        decoded = speculative(PROMPT)
        assert [t for t in theirs if t != 257] == decoded.tokens
        assert decoded.stats.drafted > 0
        assert speculative.columns()["drafter"] == "skip_layer"


@pytest.mark.parametrize("skipped, first", [
    ({"skip_attn_layers": "3", "skip_mlp_layers": "4"}, 3), ({"skip_mlp_layers": "0"}, 0),
    ({"skip_attn_layers": "5"}, 5), ({"skip_attn_layers": "2,3,4,5", "skip_mlp_layers": "2,3,4,5"}, 2),
])  # fmt: skip
def test_verification_goes_on_from_the_first_skipped_layer(loaded, skipped, first, monkeypatch):
    starts, real = [], loaded.model.verify

    def verify(ids, cache, position, kept=None, states=None):
        starts.append(kept.exit_layer if kept else 0)
        if kept:  # what it goes on from is what the target's own layers give
            done = kept.hidden.shape[1]
            own = loaded.model.run(ids[:, :done], cache, position, stop=first)
            torch.testing.assert_close(kept.hidden, own)
        return real(ids, cache, position, kept, states)

    monkeypatch.setattr(loaded.model, "verify", verify)
    drafting = answer(loaded, **skipped, num_speculations=3)(PROMPT)
    assert set(starts[:-1]) == {first}  # at the end of the budget nothing is drafted
    assert drafting.tokens == answer(loaded, generation_strategy="autoregressive")(PROMPT).tokens


def test_a_set_of_the_last_layers_is_an_early_exit(loaded):
    last = ",".join(map(str, range(2, 6)))
    skipping = answer(loaded, skip_attn_layers=last, skip_mlp_layers=last, num_speculations=3)(PROMPT)
    leaving = answer(loaded, exit_layer=2, num_speculations=3)(PROMPT)
    assert skipping.tokens == leaving.tokens
    assert [round.accepted for round in skipping.stats.rounds] == [round.accepted for round in leaving.stats.rounds]


def test_draft_alone_is_the_model_without_those_sub_layers(loaded):
    alone = answer(loaded, generation_strategy="autoregressive", skip_attn_layers="1,2", skip_mlp_layers="3")
    changed = tiny_llama().double()
    for layer, projection in ((1, "self_attn.o_proj"), (2, "self_attn.o_proj"), (3, "mlp.down_proj")):
        changed.get_submodule(f"model.layers.{layer}.{projection}").weight.data.zero_()
    plain = Loaded("changed", SelfSpeculativeModel(changed), byte_tokenizer())
    assert alone(PROMPT).tokens == answer(plain, generation_strategy="autoregressive")(PROMPT).tokens
    assert alone(PROMPT).tokens != answer(loaded, generation_strategy="autoregressive")(PROMPT).tokens


def test_a_skip_set_can_be_changed_on_a_loaded_model(loaded):
    generator = answer(loaded, skip_attn_layers="0", num_speculations=3)
    first = generator(PROMPT)
    generator.drafter.skip = SkipSet.of(mlp=[1, 2, 3])
    second = generator(PROMPT)
    assert first.tokens == second.tokens
    assert first.stats.accepted != second.stats.accepted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_attn_layers": "6"}, "--skip_attn_layers 6: a model of 6 layers has layers 0 to 5"),
        ({"skip_mlp_layers": "2,40"}, "--skip_mlp_layers 40"),
        ({"drafter": "skip_layer"}, "needs a sub-layer to skip"),
        ({"skip_attn_layers": "0-5", "skip_mlp_layers": "0-5"}, "skipping every sub-layer"),
        ({"skip_attn_layers": "one"}, "write ids such as 3,5-8"),
        ({"draft_exit_threshold": 1.5}, "must be between 0 and 1"),
        ({"draft_exit_rule": "mine"}, "choose one of paper, blog"),
    ],
)
def test_unusable_skip_sets(loaded, settings, message):
    with pytest.raises(UsageError, match=message):
        answer(loaded, **settings)


def test_skip_sets_from_a_file(loaded, tmp_path):
    path = tmp_path / "skip_layer_ids.json"
    path.write_text(json.dumps({"attn": [1, 4], "mlp": [2]}))
    generator = answer(loaded, skip_layers=str(path), num_speculations=3)
    assert generator.drafter.skip == SkipSet.of([1, 4], [2])
    assert generator.columns()["skip_attn"] == (1, 4)
    path.write_text("[1, 2]")
    with pytest.raises(RunError, match="must be JSON"):
        answer(loaded, skip_layers=str(path), num_speculations=3)


def test_the_set_found_for_these_weights_is_chosen(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(skip_sets, "FOLDER", tmp_path)
    (tmp_path / "a.json").write_text(json.dumps({"attn": [0], "mlp": [0], "fingerprint": "of other weights"}))
    (tmp_path / "b.json").write_text("not JSON")
    with pytest.raises(UsageError, match="needs a sub-layer to skip"):
        answer(loaded, drafter="skip_layer", num_speculations=3)
    ready = {"attn": [1, 4], "mlp": [2], "fingerprint": fingerprint(loaded.model.hf_model)}
    (tmp_path / "c.json").write_text(json.dumps(ready))
    assert answer(loaded, drafter="skip_layer", num_speculations=3).drafter.skip == SkipSet.of([1, 4], [2])
    alone = answer(loaded, drafter="skip_layer", generation_strategy="autoregressive")
    assert alone.draft_alone.skip == SkipSet.of([1, 4], [2])
    given = answer(loaded, drafter="skip_layer", skip_mlp_layers="3", num_speculations=3)
    assert given.drafter.skip == SkipSet.of(mlp=[3])


@pytest.mark.parametrize(("speedup", "expected"), [(1.4, 3), (0.9, 0)])
def test_the_number_of_speculations_is_predicted(loaded, monkeypatch, tmp_path, speedup, expected):
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(tmp_path))
    asked, said = [], []
    cells = [auto.Cell(None, 3, 0.5, 2.0, speedup, 0.3, 1.1, 0.6), auto.Cell(None, 2, 0.5, 2.0, 0.8, 0.3, 1.1, 0.6)]
    monkeypatch.setattr(auto, "predict", lambda *given: asked.append(given[0].skip) or cells)
    config = GenerationConfig(generation_strategy="self_speculative", skip_mlp_layers="1", sample=False, max_steps=5)
    for _ in range(2):  # kept for the model and the set
        generator = Generator(loaded, config, notify=said.append)
        assert generator.config.num_speculations == expected
    assert asked == [SkipSet.of(mlp=[1])]
    assert ("skip set does not pay" in said[0]) == (expected == 0) and "--num_speculations 3" in said[0]
    assert len(generator(PROMPT).tokens) == 5
    Generator(loaded, GenerationConfig(generation_strategy="self_speculative", skip_mlp_layers="2"))
    assert len(asked) == 2


def test_a_real_prediction_of_a_skip_set(loaded):
    prompts = [loaded.encode(text) for text in auto.PROMPTS]
    forecast = Forecast(loaded, GenerationConfig(sample=False), skip=SkipSet.of(mlp=[4, 5]))
    cells = auto.predict(forecast, (), (1, 4), prompts, seconds=0)
    assert [(cell.exit_layer, cell.num_speculations) for cell in cells] == [(None, 1), (None, 4)]
    assert all(cell.speedup > 0 and 0 < cell.acceptance_rate <= 1 for cell in cells)


def test_threshold_one_drafts_a_single_token_and_zero_the_full_length(loaded):
    for threshold, drafted in ((1.0, 1), (0.0, 4)):
        generator = answer(loaded, skip_mlp_layers="1", num_speculations=4, draft_exit_threshold=threshold)
        rounds = generator(PROMPT).stats.rounds
        assert {r.drafted for r in rounds[:-3]} == {drafted}


# ten rounds by hand: (drafted, accepted) of K = 4, then g after the round, for alpha 0.9, eps 0.01, b1 0.5, b2 0.9
ROUNDS = [(4, 4), (4, 4), (4, 4), (4, 4), (4, 4), (2, 2), (3, 0), (1, 1), (4, 2), (2, 2)]
# m: .5 .75 .875 .9375 .96875 .984375 .4921875 .74609375 .623046875 .8115234375
# paper moves: up, up, up, stay (full), stay (full), down, up, up, up, up
PAPER = [0.601, 0.602, 0.603, 0.603, 0.603, 0.602, 0.603, 0.604, 0.605, 0.606]
# blog moves: a full draft stays whatever its acceptance; else down above alpha, up at or below it
BLOG = [0.5, 0.5, 0.5, 0.5, 0.5, 0.499, 0.5, 0.501, 0.501, 0.502]


@pytest.mark.parametrize(("rule", "expected"), [("paper", PAPER), ("blog", BLOG)])
def test_ten_rounds_by_hand(rule, expected):
    adaptive = make_draft_exit(GenerationConfig(adaptive_draft_exit=True, draft_exit_rule=rule))
    assert isinstance(adaptive, AdaptiveDraftExit)
    adaptive.start()
    seen = []
    for drafted, accepted in ROUNDS:
        adaptive.observe(drafted, accepted, 4)
        seen.append(adaptive.threshold)
    assert seen == pytest.approx(expected, abs=1e-12)
    adaptive.start()
    assert adaptive.threshold == adaptive.first


def test_the_threshold_is_carried_over_only_when_asked(loaded):
    settings = {"skip_mlp_layers": "1,2", "adaptive_draft_exit": True}
    starts = []
    for carry in (False, True):
        generator = answer(loaded, **settings, carry_draft_exit=carry)
        generator(PROMPT)
        after = generator.columns()["draft_exit_threshold"]
        assert after != 0.6
        generator.drafter.draft_exit.start()
        starts.append(generator.drafter.draft_exit.threshold == after)
    assert starts == [False, True]


def test_sets_that_take_turns_are_made_once(loaded):
    sets = [SkipSet.of(attn=[layer]) for layer in (1, 2)]
    first = [loaded.model.layers_without(skip) for skip in sets]
    assert all(loaded.model.layers_without(skip) is layers for skip, layers in zip(sets, first, strict=True))
