"""The loop on hand-written logits and drafts, and what it leaves in the cache."""

import pytest
import torch

from self_speculation.config import RunError, UsageError
from self_speculation.decoding import Observer
from self_speculation.drafters import Draft, Drafter
from self_speculation.modeling import SelfSpeculativeModel
from self_speculation.sampling import Sampler
from self_speculation.stats import Round
from tests import tiny
from tests.pairwise import pairwise
from tests.table_model import VOCAB, TableModel


def counting(step: int):
    """Logits that make each token the one before it plus `step`, around the vocabulary."""
    return lambda tokens: torch.eye(VOCAB, dtype=torch.float64)[(tokens[-1] + step) % VOCAB] * 9.0


TARGET = TableModel(counting(1), counting(1))


def scripted(*drafts: list[int]) -> tiny.ScriptedDrafter:
    """Proposes these drafts, one a round, then nothing."""
    left = list(drafts)
    return tiny.ScriptedDrafter(lambda tokens, limit: left.pop(0) if left else [])


@pytest.mark.parametrize("sample", (False, True))
def test_drafts_that_are_never_accepted(sample):
    drafter = tiny.ScriptedDrafter(lambda tokens, limit: [(tokens[-1] + 2) % VOCAB] * limit)
    decoded = tiny.run(TARGET, drafter, [0], steps=10, num_speculations=3, sample=sample)
    assert decoded.tokens == list(range(1, 11))
    assert drafter.outcomes == [Round(3, 0, 1)] * 6 + [Round(2, 0, 1), Round(1, 0, 1), Round(0, 0, 1)]
    assert (decoded.stats.acceptance_rate, decoded.stats.tokens_per_round) == (0, 1)


@pytest.mark.parametrize("sample", (False, True))
def test_drafts_that_are_always_accepted(sample):
    drafter = tiny.ScriptedDrafter(lambda tokens, limit: [(tokens[-1] + i) % VOCAB for i in range(1, limit + 1)])
    decoded = tiny.run(TARGET, drafter, [0], steps=10, num_speculations=3, sample=sample, temperature=0.1)
    assert decoded.tokens == list(range(1, 11))
    assert drafter.outcomes == [Round(3, 3, 4), Round(3, 3, 4), Round(0, 0, 1)]
    assert decoded.stats.acceptance_rate == 1 and decoded.stats.tokens_per_round == 3


@pytest.mark.parametrize("sample", (False, True))
def test_drafts_that_are_sometimes_accepted(sample):
    drafter = scripted([2, 9, 4], [4, 5, 6], [8], [])
    decoded = tiny.run(TARGET, drafter, [0], steps=12, num_speculations=3, sample=sample, temperature=0.1)
    assert decoded.tokens == list(range(1, 13))
    assert drafter.outcomes[:4] == [Round(3, 1, 2), Round(3, 3, 4), Round(1, 1, 2), Round(0, 0, 1)]
    assert decoded.stats.drafted == 7 and decoded.stats.accepted == 5
    assert decoded.stats.decode_tokens == 11 and decoded.stats.new_tokens == 12


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("num_speculations", (0, 1, 2, 5))
def test_exactly_as_many_tokens_as_asked_for(steps, num_speculations):
    """Case: Kangaroo's source came up to K+1 tokens short."""
    drafter = tiny.ScriptedDrafter(lambda tokens, limit: [(tokens[-1] + i) % VOCAB for i in range(1, limit + 1)])
    decoded = tiny.run(TARGET, drafter, [0], steps=steps, num_speculations=num_speculations)
    assert decoded.tokens == list(range(1, steps + 1)) and decoded.stop_reason == "budget"


def test_a_drafter_is_never_asked_for_what_the_budget_cannot_use():
    asked = []
    drafter = tiny.ScriptedDrafter(lambda tokens, limit: asked.append(limit) or [])
    tiny.run(TARGET, drafter, [0], steps=5, num_speculations=3)
    assert asked == [3, 2, 1]


@pytest.mark.parametrize("exit_layer", (1, 3, 5))
@pytest.mark.parametrize("family", ("llama", "gemma2", "qwen3_sliding", "olmo2"))
def test_a_draft_that_is_the_target_is_always_accepted(family, exit_layer):
    """Layers from the exit on are made to add nothing, so the early exit is the whole model."""
    model = flattened(family, exit_layer)
    drafter = tiny.new_drafter("early_exit", model, exit_layer, 5)
    decoded = tiny.run(model, drafter, tiny.prompt_ids(11), steps=40, num_speculations=5)
    assert decoded.stats.acceptance_rate == 1.0 and decoded.stats.drafted > 20
    assert decoded.tokens == tiny.run(model, tiny.new_drafter("", model), tiny.prompt_ids(11), steps=40).tokens


def flattened(family: str, exit_layer: int) -> SelfSpeculativeModel:
    """A model whose layers from `exit_layer` on leave the hidden states as they are."""
    model = tiny.new_hf_model(family)
    for layer in model.model.layers[exit_layer:]:
        ends = [layer.self_attn.o_proj, layer.mlp.down_proj]
        for end in ends:
            end.weight.data.zero_()
    return SelfSpeculativeModel(model)


class CacheCheck:
    """After each round, the keys and values of each layer equal those of a fresh forward over the text so far."""

    def __init__(self, drafter: Drafter, bound: float):
        self.drafter, self.bound, self.rounds = drafter, bound, 0
        original = drafter.observe

        def observe(context, outcome):
            original(context, outcome)
            self.check(context)

        drafter.observe = observe

    def check(self, context) -> None:
        model, known = context.model, context.position  # all but the last token have been through the model
        fresh = model.new_cache(known)
        model.run(model.ids(context.tokens[:known]), fresh, 0)
        for kept, wanted in zip(context.cache.layers, fresh.layers, strict=True):
            for name in ("keys", "values"):
                ours, theirs = getattr(kept, name)[:, :, :known], getattr(wanted, name)[:, :, :known]
                assert float((ours - theirs).abs().max()) <= self.bound
        assert tiny.adapter_cache_error(self.drafter, context) <= self.bound
        self.rounds += 1


@pytest.mark.parametrize(("family", "way", "drafter", "dtype", "exit_layer"), pairwise(
    ("llama", "gemma2", "gemma3", "qwen3_sliding", "phi3", "granite", "mixtral", "smollm3"),
    tiny.WAYS, tuple(tiny.DRAFTERS), (torch.float64, torch.float32), (1, 3, 5),
))  # fmt: skip
def test_keys_and_values_are_those_of_a_fresh_forward(family, way, drafter, dtype, exit_layer):
    """Design, correctness rule 5: 1e-9 in float64, 1e-4 in float32. Cases: transformers #47447, #48280."""
    model = tiny.split(family, way, dtype)
    made = tiny.new_drafter(drafter, model, exit_layer, 4)
    exact = dtype == torch.float64 and model.backbone.config._attn_implementation != "eager"  # eager: float32 softmax
    check = CacheCheck(made, 1e-9 if exact else 1e-4)
    tiny.run(model, made, tiny.prompt_ids(14), steps=24, seed=5, sample=True, temperature=1.0)
    assert check.rounds >= 5


@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
@pytest.mark.parametrize("sample", (False, True))
def test_prompt_b_after_prompt_a_gives_what_b_alone_gives(drafter, sample):
    """The same drafter answers both. Cases: transformers #32189 (rows as if alone), vLLM #9441 (no leaking seeds)."""
    model = tiny.split("gemma2")
    first, second = tiny.prompt_ids(30, seed=1), tiny.prompt_ids(9, seed=2)

    def answer(made, prompt):
        return tiny.run(model, made, prompt, steps=30, seed=7, sample=sample)

    used = tiny.new_drafter(drafter, model, 3, 4)
    answer(used, first)
    after, alone = answer(used, second), answer(tiny.new_drafter(drafter, model, 3, 4), second)
    assert after.tokens == alone.tokens and after.stats.rounds == alone.stats.rounds


@pytest.mark.parametrize("way", tiny.WAYS)
@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
@pytest.mark.parametrize("prompt_length", (1, 20, 25, 28, 29, 30, 31))
def test_no_position_beyond_the_model_s_last_is_used(way, drafter, prompt_length, monkeypatch):
    """A model of 32 positions: text stops at the last one, drafts before it, and identity holds up to there."""
    model = tiny.split("llama", way)
    monkeypatch.setattr(model.backbone.config, "max_position_embeddings", 32)
    seen = []
    run = model.backbone.run

    def watched(input_ids, cache, position, *args, **kwargs):
        seen.append(position + input_ids.shape[1])
        return run(input_ids, cache, position, *args, **kwargs)

    monkeypatch.setattr(model.backbone, "run", watched)
    prompt = tiny.prompt_ids(prompt_length)
    decoded = tiny.run(model, tiny.new_drafter(drafter, model, 3, 6), prompt, steps=100, num_speculations=6)
    new = 32 - prompt_length + 1  # the last token needs no position: nothing follows it
    monkeypatch.undo()
    assert decoded.tokens == tiny.oracle("llama", tuple(prompt), new)
    assert decoded.stop_reason == "length" and max(seen) == 32


def test_a_prompt_without_room_is_refused():
    model = TableModel(counting(1), counting(1), max_positions=4)
    with pytest.raises(UsageError, match="4 tokens, the model has 4 positions"):
        tiny.run(model, scripted(), [1, 2, 3, 4])
    with pytest.raises(UsageError, match="empty"):
        tiny.run(model, scripted(), [])


def test_drafting_stops_after_a_drafted_end():
    drafted = []

    class Watch(Observer):
        def on_draft(self, draft):
            drafted.append(list(draft))

    model = TableModel(counting(1), counting(1))
    drafter = tiny.new_drafter("early_exit", model, 2, 6)
    decoded = tiny.run(model, drafter, [0], num_speculations=6, end=[4], observer=Watch())
    assert drafted == [[2, 3, 4]] and decoded.tokens == [1, 2, 3]
    assert (decoded.stats.drafted, decoded.stats.accepted, decoded.stop_reason) == (3, 3, "eos")


def test_tokens_thrown_away_after_a_stop_are_not_counted():
    drafter = scripted([2, 3, 4, 5, 6])
    decoded = tiny.run(TARGET, drafter, [0], num_speculations=5, end=[4])
    assert decoded.tokens == [1, 2, 3]
    assert decoded.stats.rounds == [Round(drafted=3, accepted=3, new_tokens=2)]


def test_an_empty_draft_in_every_round_is_autoregressive_decoding():
    decoded = tiny.run(TARGET, scripted(), [0], steps=5)
    assert decoded.stats.acceptance_rate is None and decoded.stats.tokens_per_round == 1
    assert decoded.stats.row()["acceptance_rate"] is None


def test_ctrl_c_keeps_what_is_there():
    def interrupt(tokens, limit):
        if len(tokens) > 4:
            raise KeyboardInterrupt
        return []

    decoded = tiny.run(TARGET, tiny.ScriptedDrafter(interrupt), [0], steps=50)
    assert decoded.tokens == [1, 2, 3, 4] and decoded.stop_reason == "interrupted"


@pytest.mark.parametrize("sample", (False, True))
@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
def test_weights_that_give_nan_stop_the_run(drafter, sample):
    """The hint names the dtype; a model that is broken from the start still loads."""
    hf = tiny.new_hf_model("llama", torch.float32)
    hf.model.norm.weight.data[0] = float("nan")
    model = SelfSpeculativeModel(hf)
    with pytest.raises(RunError, match="--dtype float32"):
        tiny.run(model, tiny.new_drafter(drafter, model), [5, 6, 7], sample=sample)


def test_ids_outside_the_tokenizer_are_masked_on_a_model():
    model = tiny.split("llama")
    prompt = tiny.prompt_ids(12)
    free = tiny.run(model, tiny.new_drafter("early_exit", model), prompt, steps=20).tokens
    limit = max(free)
    texts = [
        tiny.run(model, tiny.new_drafter(name, model), prompt, steps=20, vocab_limit=limit).tokens
        for name in tiny.DRAFTERS
    ]
    assert all(tokens == texts[0] for tokens in texts) and max(texts[0]) < limit <= max(free)


def test_half_precision_differs_only_by_a_rounding_step():
    """bf16: a one-row and a many-row forward may break a near-tie differently. Case: EAGLE #75, #212."""
    model = tiny.split("llama", "direct", torch.bfloat16)
    prompt = tiny.prompt_ids(12)
    plain = tiny.run(model, tiny.new_drafter("", model), prompt, steps=40).tokens
    drafted = tiny.run(model, tiny.new_drafter("early_exit", model, 3), prompt, steps=40).tokens
    first = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
    if first is not None:
        with torch.inference_mode():
            logits = tiny.hf_model("llama", torch.bfloat16)(model.ids([*prompt, *plain[:first]])).logits[0, -1].float()
        top = logits.topk(2).values
        assert float(top[0] - top[1]) <= float(top[0].abs()) * 2**-7


def test_one_sampler_draws_the_first_token_and_verifies(monkeypatch):
    """The first token comes from the prefill by the same settings: a stop set of one token is never left."""
    calls = []
    original = Sampler.scores
    monkeypatch.setattr(Sampler, "scores", lambda self, *a, **k: calls.append(len(a)) or original(self, *a, **k))
    tiny.run(TARGET, scripted([2]), [0], steps=4)
    assert len(calls) == 3


def test_probabilities_that_a_drafter_hands_on_are_those_it_drew_from():
    """Design, correctness rule 2: q is the processed distribution, over the whole vocabulary."""
    seen: list[Draft] = []

    model = tiny.split("llama")
    made = tiny.new_drafter("early_exit", model, 3, 4)
    propose = made.propose
    made.propose = lambda context, limit: seen.append(propose(context, limit)) or seen[-1]
    tiny.run(model, made, tiny.prompt_ids(12), steps=12, sample=True, top_k=5, top_p=1.0, temperature=1.0)
    for draft in seen:
        assert draft.probs.shape == (len(draft.tokens), tiny.VOCAB)
        assert torch.allclose(draft.probs.sum(-1), torch.ones(len(draft.tokens), dtype=torch.float64))
        assert ((draft.probs > 0).sum(-1) == 5).all()
        assert all(draft.probs[i, token] > 0 for i, token in enumerate(draft.tokens))
