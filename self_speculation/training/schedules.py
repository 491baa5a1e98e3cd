"""The numbers of the LayerSkip recipe (arXiv 2404.16710, section 4.1) as pure functions, and the learning rate.

l is a layer's index, 0 to L-1; exit layer E is the exit after layer l = E - 1. t is the step, 0 to T-1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

OTHER_EXITS = 0.1  # what an exit that drafting will not use weighs under the loss scale `draft`


def layer_dropout_rates(layers: int, p_max: float, time_scale: float = 1.0) -> list[float]:
    """p_{l,t} = S(t) D(l) p_max of every layer (equation 1), with D(l) = exp(l ln 2 / (L-1)) - 1."""
    if layers == 1:
        return [0.0]
    return [time_scale * p_max * math.expm1(layer * math.log(2) / (layers - 1)) for layer in range(layers)]


def dropout_time_scale(step: int, steps: int, exponential: bool) -> float:
    """S(t): 1, or S_exp(t) = exp(t ln 2 / (T-1)) - 1, which rises from 0 to 1 over a training from scratch."""
    if not exponential or steps == 1:
        return 1.0
    return math.expm1(min(step, steps - 1) * math.log(2) / (steps - 1))


def dropped_layers(seed: int, sample: int, rates: Sequence[float]) -> list[bool]:
    """Which layers the sample skips: the same whichever process trains on it."""
    draws = np.random.Generator(np.random.Philox(key=[seed, sample])).random(len(rates))
    return [bool(draw < rate) for draw, rate in zip(draws, rates, strict=True)]


def enabled_layers(
    curriculum: str,
    step: int,
    steps: int,
    layers: int,
    rotation: int = 1,
    draft_layers: Sequence[int] = (),
    seed: int = 0,
) -> list[int]:
    """C(t, l): layers whose exit learns at step t, in rising order. The last layer always does.

    - rotational: every R-th layer, rolled by one each step;
    - gradual: from layer L-1 down, one more every T / (2 L) steps, so that all learn from half of the training on;
    - random: one of `draft_layers` (by default any but the last), drawn anew each step;
    - draft: every one of `draft_layers`.
    """
    last = layers - 1
    if curriculum == "none":
        early: Sequence[int] = []
    elif curriculum == "all":
        early = range(last)
    elif curriculum == "draft":
        early = draft_layers
    elif curriculum == "rotational":
        early = [layer for layer in range(last) if (layer - step) % rotation == 0]
    elif curriculum == "gradual":
        early = range(max(0, last - 2 * layers * step // steps), last)
    else:
        choices = list(draft_layers) or list(range(last))
        draw = np.random.Generator(np.random.Philox(key=[seed, step], counter=1)).integers(max(1, len(choices)))
        early = choices[draw : draw + 1]
    return sorted({*early, last})


def exit_weights(
    scale: str, enabled: Sequence[int], layers: int, e_scale: float = 1.0, draft_layers: Sequence[int] = ()
) -> dict[int, float]:
    """Weight of each enabled layer's loss, normalised over the enabled ones (equations 4 to 6).

    - paper: e(l) = e_scale * sum_{i<=l} i for an early exit, e(L-1) = (L-1) + e_scale * sum_{i<=L-2} i;
    - uniform: all alike;
    - balanced: the last layer weighs as much as all early exits together;
    - draft: the last layer and `draft_layers` weigh alike, other exits a tenth.
    """
    last = layers - 1
    early = [layer for layer in enabled if layer != last]
    weights = dict.fromkeys(early, 1.0) | {last: 1.0}
    if scale == "paper":
        weights = {layer: e_scale * layer * (layer + 1) / 2 for layer in early}
        weights[last] = last + e_scale * (last - 1) * last / 2
    elif scale == "balanced" and early:
        weights[last] = float(len(early))
    elif scale == "draft" and draft_layers:
        weights |= {layer: OTHER_EXITS for layer in early if layer not in draft_layers}
    total = sum(weights.values()) or 1.0  # a model of one layer weighs 0 under `paper`
    return {layer: weight / total for layer, weight in weights.items() if weight > 0} or {last: 1.0}


def learning_rate_scale(step: int, steps: int, warmup: int, final: float) -> float:
    """Linear warm-up, then a cosine from 1 down to `final` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
