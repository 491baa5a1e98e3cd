"""Whether a model can run rows of different length at once."""

from __future__ import annotations

from typing import Any

import torch

from .backbone import Backbone
from .batch import Batch
from .cache import KVCache
from .direct import layer_windows, length_dependent_rope
from .masks import visible_keys
from .model import SelfSpeculativeModel

ATTENTION = ("sdpa", "eager")  # attention functions that take a mask of any shape


@torch.inference_mode()
def why_not(model: SelfSpeculativeModel) -> str | None:
    """Why this model cannot run several rows at once; None when it can. The answer is found once a model."""
    reasons = model.__dict__.setdefault("_batch_refusal", {})
    way = model.backbone.direct is None
    if way not in reasons:
        reasons[way] = _why_not(model)
    return reasons[way]


def _why_not(model: SelfSpeculativeModel) -> str | None:
    backbone = model.backbone
    attention = str(backbone.config._attn_implementation)
    if attention not in ATTENTION:
        return f"--attn_implementation {attention} takes no mask for rows of different length; choose sdpa or eager"
    if length_dependent_rope(backbone.config):
        return f"{backbone.family}: rotary embeddings depend on the length of the longest row"
    try:
        same = _same_masks(backbone) and _same_states(model)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        same = False
    return None if same else f"{backbone.family} computes rows of different length in another way than rows alone"


def _same_masks(backbone: Backbone) -> bool:
    """Whether windows and masks are those of the family's own forward, beyond the window too."""
    windows = layer_windows(backbone.config, len(backbone.layers))
    given: list[torch.Tensor] = []

    def visit(index: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        given.append(kwargs["attention_mask"])
        return hidden

    position = max((window or 0 for window in windows), default=0) + 3
    cache = KVCache([None] * len(windows), 1)
    cache.position = position
    ids = torch.ones(1, 2, dtype=torch.long, device=backbone.device)
    backbone.forward_slots(ids, cache, visit)
    keys = torch.arange(position + 2, device=ids.device)
    places = torch.tensor([[position], [position + 1]], device=ids.device)
    for window, mask in zip(windows, given, strict=True):
        visible = visible_keys(keys, places, window)
        if not torch.equal(mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0, visible):
            return False
    return True


def _same_states(model: SelfSpeculativeModel) -> bool:
    """Whether two rows of different length leave the layers with the states that each has alone."""
    batch = Batch(model, 2)
    texts = [[i % model.vocab_size for i in range(1, length + 1)] for length in (8, 5)]
    alone = []
    for text in texts:
        known = len(text) - 2
        model.run(model.ids(text[:known]), batch.add(12), 0)
        cache = model.new_cache(12)
        alone.append(model.run(model.ids(text), cache, 0)[:, known:])
    together = batch.run([text[-2:] for text in texts], [len(text) - 2 for text in texts])
    wanted = torch.cat(alone)
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    return torch.allclose(together, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
