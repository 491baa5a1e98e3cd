"""Drafters, and the one place that makes them from settings."""

from __future__ import annotations

import torch

from ..adapters import load_adapter
from ..config import GenerationConfig
from ..modeling import Adapter, DraftHead, SelfSpeculativeModel, SkipSet
from .adapter import AdapterDrafter
from .base import Context, Draft, Drafter, Turn
from .chain import ChainDrafter, NoDrafter
from .draft_exit import make_draft_exit
from .layers import EarlyExitDrafter, SkipLayerDrafter
from .prompt_lookup import PromptLookupDrafter

__all__ = ["AdapterDrafter", "Context", "Draft", "Drafter", "Turn", "make_drafter", "skip_set"]

MIN_NGRAM_BEFORE = 2  # of a look-up before another drafter, which is right more often than a match of one token


def make_drafter(
    config: GenerationConfig,
    model: SelfSpeculativeModel,
    adapter: Adapter | None = None,
    token_ids: torch.Tensor | None = None,
) -> Drafter:
    """The drafter that `config` asks for; its exit layer and number of speculations are chosen already.

    Args:
        adapter: takes the place of the one that `config` names.
        token_ids: what a draft's head scores, most frequent first; None for all, or what an adapter was trained for.

    Raises:
        UsageError: an exit layer that the model does not have, or a head that cannot be divided.
    """
    if config.generation_strategy == "autoregressive" or config.num_speculations == 0:
        return NoDrafter()
    head = None if token_ids is None else model.draft_head(token_ids)
    *before, last = config.drafters() or (config.usual_drafter(),)
    parts = [_make_part(name, config, model, adapter, head, MIN_NGRAM_BEFORE) for name in before]
    parts.append(_make_part(last, config, model, adapter, head))
    return parts[0] if len(parts) == 1 else ChainDrafter(parts)


def _make_part(
    name: str,
    config: GenerationConfig,
    model: SelfSpeculativeModel,
    adapter: Adapter | None,
    head: DraftHead | None,
    min_ngram: int = 1,
) -> Drafter:
    if name == "prompt_lookup":
        return PromptLookupDrafter(config.lookup_ngram, min_ngram)
    draft_exit = make_draft_exit(config)
    if name == "skip_layer":
        return SkipLayerDrafter(skip_set(config, model), draft_exit, head)
    if name == "adapter":
        return AdapterDrafter(adapter or load_adapter(model, config.adapter), draft_exit, head)
    model.check_exit_layer(config.exit_layer)
    return EarlyExitDrafter(config.exit_layer, draft_exit, head)


def skip_set(config: GenerationConfig, model: SelfSpeculativeModel) -> SkipSet:
    """The sub-layers that `config` skips, checked against the model: none only where part of the head is skipped."""
    attn, mlp = config.skipped()
    skip = SkipSet.of(attn, mlp)
    if len(skip) or not config.draft_vocabulary:
        skip.check(model.num_layers, config.skip_layers)
    return skip
