"""The most frequent tokens of a vocabulary, which need no text to be counted: a tokenizer knows them.

Byte-pair encoding is trained by merging the most frequent pair again and again, so the order of its merges ranks the
tokens that they make; single characters, which nothing is merged into, come first in their own order. Unigram
tokenizers know how probable each token is. Of others the order of ids is taken.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from .config import GenerationConfig
from .loading import Loaded
from .modeling import Adapter

SINGLE = 8  # one place in so many goes to a single character, until there are no more


def draft_token_ids(config: GenerationConfig, loaded: Loaded, adapter: Adapter | None = None) -> torch.Tensor | None:
    """The `--draft_vocabulary` tokens that a draft's head begins with, most frequent first; None for all, or for those
    that the adapter was trained for. With an adapter they are the first of its own."""
    size = config.draft_vocabulary
    if not 0 < size < loaded.model.vocab_size:
        return None
    if adapter is not None and adapter.token_ids is not None:
        return adapter.token_ids[:size]
    ids = dict.fromkeys([*loaded.eos_ids, *ranked(loaded.tokenizer)])
    return torch.tensor([id for id in ids if id < loaded.model.vocab_size][:size])


@lru_cache(maxsize=4)
def ranked(tokenizer: Any) -> list[int]:
    """All ids of the tokenizer, the most frequent first as far as it knows."""
    count = len(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    first: list[int] = []
    if model.get("merges"):
        first = _by_merges(model["vocab"], model["merges"])
    elif isinstance(model.get("vocab"), list):  # of [token, log probability]
        first = sorted(range(len(model["vocab"])), key=lambda id: -model["vocab"][id][1])
    return [id for id in dict.fromkeys([*first, *range(count)]) if id < count]


def _by_merges(vocab: dict[str, int], merges: list[Any]) -> list[int]:
    """Ids in the order in which merges make them, single characters among the first."""
    pairs = (merge if isinstance(merge, list) else merge.split(" ") for merge in merges)
    made = list(dict.fromkeys(vocab[text] for text in map("".join, pairs) if text in vocab))
    merged = set(made)
    single = iter(sorted(id for text, id in vocab.items() if len(text) == 1 and id not in merged))
    order: list[int] = []
    for place, id in enumerate(made):
        if place % (SINGLE - 1) == 0:
            order += [character for character in [next(single, None)] if character is not None]
        order.append(id)
    return order + list(single)
