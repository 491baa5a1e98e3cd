"""The decoder inside a causal language model, seen as embedding, numbered layers, and head.

Two ways of running a range of layers stand behind one method, `Backbone.run`:

- *view*: the family's own forward, with slots in place of its layers that run a layer, pass it by, or put in hidden
  states kept from before. Masks, rotary embeddings and multipliers are whatever the family computes.
- *direct* (`direct.py`): the layers are called one after the other. It is faster, and used only where a check at load
  finds masks, embeddings and hidden states equal to the view's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..config import RunError
from .attention import GroupedAttention
from .cache import KVCache
from .compiled import Compiled
from .direct import DirectLayers
from .views import view_of

log = logging.getLogger(__name__)


class Unsupported(RunError):
    """The model's architecture cannot be split into layers here."""


class Backbone:
    """Runs parts of `model`'s decoder. All tensors are [1, tokens, hidden] unless said otherwise."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.family = str(model.config.model_type)
        self.config = model.config.get_text_config()
        self.decoder = self._find_decoder()
        self.layers: list[nn.Module] = list(self.decoder.layers)
        self.attention = GroupedAttention(self.config, self.device)
        self.slots = Slots(len(self.layers))
        self.view = view_of(self.decoder, layers=self.slots)
        self.cache_name = next(
            name for name in ("cache", "past_key_values") if name in _parameters(type(self.decoder).forward)
        )
        self.head_view = view_of(model, **{self._decoder_name(): NormOnly(self.decoder.norm)})
        self.draft_views: dict[int, tuple[Any, Any]] = {}  # heads over part of the vocabulary, by size
        self.compiled: Compiled | None = None  # set by `SelfSpeculativeModel.compile`
        self.direct: DirectLayers | None = None
        try:
            direct = DirectLayers(self)
            if direct.agrees():
                self.direct = direct
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            log.debug("%s layers are run by their own forward (%s)", self.family, error)

    @property
    def device(self) -> torch.device:
        """Where token ids and logits live; layers may be elsewhere (`device_map`)."""
        main = getattr(getattr(self.model, "_hf_hook", None), "execution_device", None)
        return self.model.device if main is None else torch.device(main)

    @property
    def windows(self) -> list[int | None]:
        """Each layer's sliding window as the cache needs it (the view leaves windows to the family's masks)."""
        return self.direct.windows if self.direct else [None] * len(self.layers)

    def run(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        position: int,
        start: int,
        layers: list[nn.Module],
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run `layers`, which stand in slots `start`, `start + 1`, ..., on tokens at `position`, `position + 1`, ...

        Args:
            input_ids: [1, n] token ids.
            hidden: hidden states [1, n, H] entering slot `start`; None embeds `input_ids` (then start is 0).

        Returns:
            The hidden states [1, n, H] leaving the last of the layers, before the final norm.
        """
        cache.position = position
        with self.attention:
            if self.compiled is not None:
                compiled = self.compiled.run(input_ids, cache, start, layers, hidden)
                if compiled is not None:
                    return compiled
            if self.direct is not None:
                return self.direct.run(input_ids, cache, start, layers, hidden)
            return self.run_view(input_ids, cache, start, layers, hidden)

    def run_view(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        start: int,
        layers: list[nn.Module],
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`run` through the family's own forward."""
        kept = SimpleNamespace(hidden=hidden)

        def visit(index: int, states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
            if index == start and hidden is not None:
                states = hidden
            if start <= index < start + len(layers):
                states = layers[index - start](states, **kwargs)
                kept.hidden = states
            return states

        self.forward_slots(input_ids, cache, visit)
        return kept.hidden

    def forward_slots(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        visit: Callable[[int, torch.Tensor, dict[str, Any]], torch.Tensor],
        **kwargs: Any,
    ) -> None:
        """Run the family's forward, calling `visit(index, hidden, kwargs)` in place of each layer."""
        with self.slots.visited_by(visit):
            self.view(input_ids=input_ids, use_cache=True, **{self.cache_name: cache}, **kwargs)

    def head(self, hidden: torch.Tensor, view: Any = None) -> torch.Tensor:
        """Final norm, LM head and whatever the family does to its logits: [1, n, H] -> [1, n, vocabulary].

        Args:
            view: a view of the model that is only that, in the place of `head_view`.
        """
        view = self.head_view if view is None else view
        compiled = None if self.compiled is None else self.compiled.head(hidden, view)
        return view(inputs_embeds=hidden).logits if compiled is None else compiled

    def _decoder_name(self) -> str:
        return next(name for name, module in self.model.named_children() if module is self.decoder)

    def _find_decoder(self) -> Any:
        """The module with embed_tokens, layers and norm; refuse by name what cannot be split or rolled back."""
        kinds = set(getattr(self.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds or getattr(self.model, "_is_stateful", False):
            what = ", ".join(sorted(kinds)) or "a recurrent state"
            raise Unsupported(f"{self.family} models cannot be rolled back: they use {what}")
        for module in self.model.children():
            if all(hasattr(module, name) for name in ("embed_tokens", "layers", "norm")):
                return module
        raise Unsupported(f"{self.family} models are not supported: no decoder with embed_tokens, layers and norm")


class Slots(list):
    """What stands in a decoder view in place of its layers."""

    def __init__(self, count: int):
        self.visit: Callable[..., torch.Tensor] | None = None
        super().__init__(self._slot(index) for index in range(count))

    def _slot(self, index: int) -> Callable[..., torch.Tensor]:
        def slot(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            assert self.visit is not None
            return self.visit(index, hidden_states, kwargs)

        return slot

    def visited_by(self, visit: Callable[..., torch.Tensor]) -> Slots:
        self.visit = visit
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.visit = None


class NormOnly(nn.Module):
    """A decoder that has run already: what it is given goes through the final norm only."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return _Output(last_hidden_state=self.norm(inputs_embeds))


class _Output:
    def __init__(self, last_hidden_state: torch.Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        """Anything a family looks for beside the hidden states (router logits, attentions) is absent."""


def _parameters(function: Callable[..., Any]) -> Any:
    return inspect.signature(inspect.unwrap(function)).parameters
