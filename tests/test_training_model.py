"""A model with the losses of its exits: dropped layers, gradients, targets, and the attention it trains with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from folders import tiny_llama
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GraniteConfig

from self_speculation.training.attention import NAME, CausalAttention, use_blockwise_attention
from self_speculation.training.exit_model import ExitModel, exit_loss


@pytest.fixture
def tokens():
    return torch.randint(0, 250, (3, 11), generator=torch.Generator().manual_seed(1))


def exit_model() -> ExitModel:
    return ExitModel(tiny_llama().double().train())


def test_last_exit_is_the_model_itself(tokens):
    model = exit_model()
    loss = model(tokens, [5])
    plain = F.cross_entropy(model.model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(loss, plain[None])


def test_without_dropout_and_early_exits_it_is_plain_training(tokens):
    ours, plain = exit_model(), tiny_llama().double().train()
    steps = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, plain)]
    for _ in range(3):
        ours(tokens, [5]).sum().backward()
        F.cross_entropy(plain(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(ours.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-9)


def test_an_exit_is_the_model_cut_short(tokens):
    model, shorter = exit_model(), exit_model().model
    shorter.model.layers = shorter.model.layers[:2]
    shorter.config.num_hidden_layers = 2
    plain = F.cross_entropy(shorter(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(model(tokens, [1, 5])[0], plain)


SHARED = {
    "vocab_size": 258, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "granite": lambda: GraniteConfig(
        **SHARED, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SHARED, layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=4,
        final_logit_softcapping=2.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_keep_their_scaling(family, tokens):
    torch.manual_seed(0)
    hf_model = AutoModelForCausalLM.from_config(FAMILIES[family]()).double()
    plain = F.cross_entropy(hf_model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(ExitModel(hf_model)(tokens, [2]), plain[None])


def test_a_dropped_layer_passes_its_input_on_for_that_sample_only(tokens):
    model = exit_model()
    dropped = torch.zeros(3, 6, dtype=torch.bool)
    dropped[1, 2] = dropped[1, 4] = True
    with torch.no_grad():
        whole = model.hidden_states(tokens, range(6))
        some = model.hidden_states(tokens, range(6), dropped)
    assert all(torch.equal(whole[layer][[0, 2]], some[layer][[0, 2]]) for layer in range(6))
    assert torch.equal(some[2][1], some[1][1]) and torch.equal(some[4][1], some[3][1])  # as they were, not rescaled
    assert not torch.equal(some[3][1], whole[3][1])


def test_gradients_reach_what_each_exit_runs_through(tokens):
    for exit_layer in range(6):
        model = exit_model()
        losses = model(tokens, sorted({exit_layer, 5}))
        losses[0].backward()
        reached = [bool(layer.mlp.up_proj.weight.grad.abs().sum() > 0) for layer in model.layers]
        assert reached == [index <= exit_layer for index in range(6)]
        assert model.model.lm_head.weight.grad.abs().sum() > 0 and model.model.model.norm.weight.grad is not None


def test_a_dropped_layer_gets_no_gradient_but_those_below_do(tokens):
    model = exit_model()
    dropped = torch.zeros(3, 6, dtype=torch.bool)
    dropped[:, 3] = True
    model(tokens, [5], dropped).sum().backward()
    assert [bool(layer.mlp.up_proj.weight.grad.abs().sum() > 0) for layer in model.layers] == [True] * 3 + [
        False, True, True,
    ]  # fmt: skip


def test_self_distillation_learns_the_last_layers_distribution_and_leaves_it_alone(tokens):
    model = exit_model()
    early = model(tokens, [1, 5], None, 1.0)[0]
    with torch.no_grad():
        hidden = model.hidden_states(tokens[:, :-1], [1, 5])
        wanted, got = (model.backbone.head(hidden[layer]) for layer in (5, 1))
    by_hand = -(wanted.softmax(-1) * got.log_softmax(-1)).sum(-1).mean()
    assert torch.allclose(early, by_hand)
    early.backward()
    assert not model.layers[5].mlp.up_proj.weight.grad.any()


def test_the_last_layer_learns_from_the_early_exits_and_leaves_them_alone(tokens):
    """Deep mutual learning's other direction: `last_mix` of the last layer's target is the exits' mean."""
    model = exit_model()
    last = model(tokens, [1, 3, 5], None, 0.0, 0.4)[-1]
    with torch.no_grad():
        hidden = model.hidden_states(tokens[:, :-1], [1, 3, 5])
        first, second, final = (model.backbone.head(hidden[layer]) for layer in (1, 3, 5))
        soft = -((first.softmax(-1) + second.softmax(-1)) / 2 * final.log_softmax(-1)).sum(-1).mean()
        data = F.cross_entropy(final.flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(last, 0.4 * soft + 0.6 * data)
    assert torch.equal(model(tokens, [5], None, 0.0, 0.4)[-1], data)  # no early exit to learn from at this step
    last.backward()
    weights = model.layers[5].mlp.up_proj.weight
    assert weights.grad.any()
    grad = weights.grad.clone()
    model.zero_grad()
    model(tokens, [5])[0].backward()
    assert not torch.allclose(grad, weights.grad)


def test_targets_mix():
    logits, teacher = torch.randn(2, 1, 4, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4]])
    data, soft = exit_loss(logits, labels, None, 0.0), exit_loss(logits, labels, teacher, 1.0)
    assert torch.allclose(exit_loss(logits, labels, teacher, 0.25), 0.25 * soft + 0.75 * data)


@pytest.mark.parametrize("length", [5, 256, 300])
def test_blockwise_attention_has_the_gradients_of_sdpa(length):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, length, 8, requires_grad=True) for _ in range(3)]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    ours = CausalAttention.apply(*inputs, 0.4)
    theirs = F.scaled_dot_product_attention(*copies, is_causal=True, scale=0.4)
    assert torch.allclose(ours, theirs, atol=1e-5)
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    for mine, other in zip(inputs, copies, strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-4)


def test_a_model_trains_alike_with_blockwise_attention(tokens):
    plain, ours = (ExitModel(tiny_llama().train()) for _ in range(2))
    use_blockwise_attention(ours.model)
    assert ours.model.config._attn_implementation == NAME
    plain(tokens, [2, 5]).sum().backward()
    ours(tokens, [2, 5]).sum().backward()
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)


@pytest.mark.slow
def test_compiled_losses_and_gradients_are_the_same(tokens):
    plain, compiled = (ExitModel(tiny_llama().train(), compiled=flag) for flag in (False, True))
    dropped = torch.tensor([[False] * 6, [False, True] * 3, [True] * 6])
    ours, theirs = (model(tokens, [1, 5], dropped, 0.5) for model in (compiled, plain))
    assert torch.allclose(ours, theirs, atol=1e-5)
    ours.sum().backward()
    theirs.sum().backward()
    for mine, other in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-4)


def test_eager_models_keep_their_attention():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    use_blockwise_attention(model)
    assert model.config._attn_implementation == "eager"
