"""The recipe's numbers against values worked out by hand (LayerSkip, section 4.1)."""

from __future__ import annotations

import math

import pytest

from self_speculation.config import UsageError
from self_speculation.training.config import DataConfig, TrainConfig
from self_speculation.training.schedules import (
    dropout_time_scale,
    dropped_layers,
    enabled_layers,
    exit_weights,
    layer_dropout_rates,
    learning_rate_scale,
)


def test_dropout_rises_exponentially_over_the_layers():
    rates = layer_dropout_rates(3, p_max=0.2)
    assert rates == pytest.approx([0.0, 0.2 * (math.sqrt(2) - 1), 0.2])
    assert layer_dropout_rates(5, 0.1, time_scale=0.5)[-1] == pytest.approx(0.05)
    assert layer_dropout_rates(1, 0.5) == [0.0]


def test_time_scale_of_dropout():
    assert dropout_time_scale(7, 100, exponential=False) == 1
    assert [dropout_time_scale(t, 3, True) for t in range(3)] == pytest.approx([0, math.sqrt(2) - 1, 1])
    assert dropout_time_scale(0, 1, True) == 1


def test_dropped_layers_depend_on_seed_and_sample_alone_and_follow_the_rates():
    rates = [0.0, 0.25, 0.75]
    draws = [dropped_layers(3, sample, rates) for sample in range(4000)]
    assert draws[17] == dropped_layers(3, 17, rates)
    assert draws != [dropped_layers(4, sample, rates) for sample in range(4000)]
    shares = [sum(column) / 4000 for column in zip(*draws, strict=True)]
    assert shares == pytest.approx(rates, abs=0.03)


def test_rotational_curriculum_rolls_every_third_layer():
    assert [enabled_layers("rotational", t, 100, 7, rotation=3) for t in range(4)] == [
        [0, 3, 6],
        [1, 4, 6],
        [2, 5, 6],
        [0, 3, 6],
    ]


def test_gradual_curriculum_adds_a_layer_every_t_over_2l_steps():
    # L = 4, T = 80: one more each 10 steps, all from half of the training on
    steps = [0, 9, 10, 20, 29, 30, 40, 79]
    expected = [[3], [3], [2, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [enabled_layers("gradual", t, 80, 4) for t in steps] == expected


def test_other_curricula():
    assert enabled_layers("none", 5, 10, 4) == [3]
    assert enabled_layers("all", 5, 10, 4) == [0, 1, 2, 3]
    drawn = [enabled_layers("random", t, 100, 6, draft_layers=(1, 3), seed=1) for t in range(100)]
    assert {tuple(each) for each in drawn} == {(1, 5), (3, 5)}
    assert {each[0] for t in range(100) for each in [enabled_layers("random", t, 100, 6)]} == {0, 1, 2, 3, 4}
    assert enabled_layers("random", 0, 10, 1) == [0]
    assert enabled_layers("draft", 3, 10, 6, draft_layers=(1, 3)) == [1, 3, 5]


def test_paper_scale_by_hand():
    # L = 12, e_scale = 1: e(2) = 0+1+2 = 3 and e(11) = 11 + (0+...+10) = 66
    assert exit_weights("paper", [2, 11], 12) == pytest.approx({2: 3 / 69, 11: 66 / 69})
    # e_scale = 0.5, L = 4: e(1) = 0.5, e(2) = 1.5, e(3) = 3 + 0.5 * 3 = 4.5; e(0) = 0 is left out
    weights = exit_weights("paper", [0, 1, 2, 3], 4, e_scale=0.5)
    assert weights == pytest.approx({1: 0.5 / 6.5, 2: 1.5 / 6.5, 3: 4.5 / 6.5})
    assert exit_weights("paper", [1, 3], 4, e_scale=0.0) == {3: 1.0}


def test_other_scales_by_hand():
    assert exit_weights("uniform", [0, 2, 3], 4) == pytest.approx({0: 1 / 3, 2: 1 / 3, 3: 1 / 3})
    assert exit_weights("balanced", [0, 2, 3], 4) == pytest.approx({0: 1 / 4, 2: 1 / 4, 3: 1 / 2})
    weights = exit_weights("draft", [0, 1, 2, 3], 4, draft_layers=(1,))
    assert weights == pytest.approx({0: 0.1 / 2.2, 1: 1 / 2.2, 2: 0.1 / 2.2, 3: 1 / 2.2})


@pytest.mark.parametrize("scale", ["paper", "uniform", "balanced", "draft"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_weights_sum_to_one_and_the_last_layer_always_counts(scale, layers):
    for enabled in ([layers - 1], list(range(layers))):
        weights = exit_weights(scale, enabled, layers, draft_layers=(0,))
        assert sum(weights.values()) == pytest.approx(1)
        assert layers == 1 or weights[layers - 1] > 0


def test_learning_rate_warms_up_and_falls_as_a_cosine():
    scales = [learning_rate_scale(t, 11, warmup=2, final=0.1) for t in range(11)]
    assert scales[:3] == [0.5, 1.0, 1.0]
    assert scales[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert scales[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("recipe", "x"),
        ("loss_scale", "x"),
        ("exit_curriculum", "x"),
        ("dropout_schedule", "x"),
        ("optimizer", "sgd"),
        ("layer_dropout", 1.0),
        ("self_distillation", 1.5),
        ("last_layer_distillation", 1.0),
        ("rotation", 0),
        ("train_steps", 0),
        ("learning_rate", 0.0),
        ("max_minutes", -1.0),
        ("draft_exits", "a-b"),
    ],
)
def test_settings_that_cannot_be_used_name_their_flag(flag, value):
    with pytest.raises(UsageError, match=f"--{flag} {value}"):
        TrainConfig(**{flag: value})


def test_dropout_schedule_follows_from_where_training_starts():
    assert TrainConfig(config="c.json").exponential_dropout()
    assert not TrainConfig().exponential_dropout()
    assert TrainConfig(dropout_schedule="exponential").exponential_dropout()
    with pytest.raises(UsageError, match="--held_out 0"):
        DataConfig(held_out=0)
    with pytest.raises(UsageError, match="--lora_rank"):
        TrainConfig(config="c.json", lora_rank=4)
