"""The decoder inside a causal language model, seen as embedding, numbered layers, and head.

Two ways of running a range of layers stand behind one method, `Backbone.run`:

- *view*: the family's own forward, with slots in place of its layers that run a layer, pass it by, or put in hidden
  states kept from before. Masks, rotary embeddings and multipliers are whatever the family computes.
- *direct*: the layers are called one after the other. Rotary tables come from the family's own forward, once for many
  positions; masks are made here. It spares the 1-2 ms that a forward spends outside its layers, and is used only
  where a check at load finds masks, embeddings and hidden states equal to the view's.
"""

from __future__ import annotations

import inspect
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
from .masks import as_mask, visible_keys
from .views import view_of

TABLE_STEP = 1024  # rotary tables grow by this many positions


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
        self.attention = GroupedAttention(self.config, model.device)
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
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
            pass  # the family does something that the direct way does not know: the view does it

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


class DirectLayers:
    """Calls layers directly, with what the family's forward would have given them."""

    ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        self.attention = str(backbone.config._attn_implementation)
        self.windows = layer_windows(backbone.config, len(backbone.layers))
        if self.attention not in self.ATTENTION or length_dependent_rope(backbone.config):
            raise Unsupported("masks or rotary embeddings that depend on the length")
        self.tables: list[tuple[torch.Tensor, ...]] = []  # distinct rotary tables, each (cos, sin), [1, positions, d]
        self.table_of_layer: list[int] = []
        self.keywords: list[dict[str, Any]] = []  # what each layer is given beside what run() fills in
        self._learn(TABLE_STEP)
        self.scale = self._embedding_scale()

    def run(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        start: int,
        layers: list[nn.Module],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `Backbone.run`, at the cache's position."""
        position, n = cache.position, input_ids.shape[1]
        self.cover(position + n)
        if hidden is None:
            hidden = self.embed(input_ids)
        rotary = [tuple(part[:, position : position + n] for part in table) for table in self.tables]
        masks: dict[int | None, torch.Tensor | None] = {}
        for index, layer in enumerate(layers, start):
            window = self.windows[index]
            if window not in masks:
                masks[window] = self.mask(position, n, window, hidden)
            positions = self.position_ids[:, position : position + n]
            hidden = self.call(index, layer, hidden, masks[window], rotary, positions, cache)
        return hidden

    def call(
        self,
        index: int,
        layer: nn.Module,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        rotary: list[tuple[torch.Tensor, ...]],
        positions: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Run the layer in slot `index`; `rotary` holds each table's rows of the `positions` [rows, n]."""
        given = {
            "attention_mask": mask,
            "position_embeddings": rotary[self.table_of_layer[index]],
            "position_ids": positions,
            self.backbone.cache_name: cache,
        }
        return layer(hidden, **{**self.keywords[index], **given})

    def cover(self, positions: int) -> None:
        """Let the rotary tables reach this many positions."""
        if positions > self.tables[0][0].shape[1]:
            self._learn(positions // TABLE_STEP * TABLE_STEP + TABLE_STEP)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings [1, n, H] as they enter the first layer."""
        embedded = self.backbone.decoder.embed_tokens(input_ids)
        return embedded if self.scale is None else embedded * self.scale

    def mask(self, position: int, n: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Which keys each of n new tokens sees: None where the attention function knows by itself, else
        [1, 1, n, keys], True (sdpa) or 0 (eager) where visible; keys begin where the layer's window begins."""
        plain = position == 0 and (window is None or n <= window) and self.attention == "sdpa"
        if n == 1 or plain or self.attention.startswith("flash"):
            return None
        first = 0 if window is None else max(0, position - window + 1)
        keys = torch.arange(first, position + n, device=like.device)
        queries = torch.arange(position, position + n, device=like.device)[:, None]
        return as_mask(visible_keys(keys, queries, window)[None, None], like, self.attention)

    def _record(self, tokens: int, position: int, **kwargs: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """What the family's forward gives each layer for `tokens` tokens at `position`."""
        seen: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def visit(index: int, hidden: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            seen.append((hidden, given))
            return hidden

        cache = KVCache([None] * len(self.windows), 1)  # transformers asks one layer for the sizes of all masks
        cache.position = position
        ids = torch.arange(tokens, device=self.backbone.model.device)[None] % self.backbone.config.vocab_size
        self.backbone.forward_slots(ids, cache, visit, **kwargs)
        return seen

    def _learn(self, positions: int) -> None:
        """Fill the rotary tables for `positions` positions, and note each layer's other arguments."""
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.backbone.model.device)  # taken as a ready mask
        seen = self._record(positions, 0, attention_mask=nothing)
        self.tables, self.table_of_layer, self.keywords = [], [], []
        for _, given in seen:
            table = given["position_embeddings"]
            if not all(part.ndim == 3 and part.shape[1] == positions for part in table):
                raise Unsupported("rotary tables of an unknown shape")
            known = next((i for i, other in enumerate(self.tables) if other[0] is table[0]), None)
            if known is None:
                known = len(self.tables)
                self.tables.append(tuple(table))
            self.table_of_layer.append(known)
            filled_in = ("attention_mask", "position_embeddings", "position_ids", self.backbone.cache_name)
            others = {name: value for name, value in given.items() if name not in filled_in}
            if any(isinstance(value, torch.Tensor) for value in others.values()):
                raise Unsupported("tensors of unknown meaning")
            self.keywords.append(others)
        self.position_ids = torch.arange(positions, device=self.backbone.model.device)[None]

    def _embedding_scale(self) -> torch.Tensor | float | None:
        """The factor between embed_tokens and what enters the first layer, None for 1."""
        entering, _ = self._record(8, 0)[0]
        embedded = self.backbone.decoder.embed_tokens(torch.arange(8, device=entering.device)[None])
        for factor in (None, getattr(self.backbone.config, "embedding_multiplier", None)):
            if torch.equal(entering, embedded if factor is None else embedded * factor):
                return factor
        raise Unsupported("embeddings that are more than scaled")

    def agrees(self) -> bool:
        """Whether masks, tables and hidden states equal those of the family's own forward."""
        beyond = max((window or 0 for window in self.windows), default=0) + 3
        for position in (3, beyond):
            if not self.attention.startswith("flash") and not self._same_masks(position):
                return False
        backbone = self.backbone
        ids = torch.arange(1, 6, device=backbone.model.device)[None] % backbone.config.vocab_size
        cache = KVCache(self.windows, 8)
        ours = self.run(ids, cache, 0, backbone.layers, None)
        theirs = backbone.run_view(ids, KVCache([None] * len(backbone.layers), 8), 0, backbone.layers)
        return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))

    def _same_masks(self, position: int) -> bool:
        for index, (hidden, given) in enumerate(self._record(2, position)):
            ours = self.mask(position, 2, self.windows[index], hidden)
            theirs = given["attention_mask"]
            if ours is None or theirs is None or ours.shape[-1] > theirs.shape[-1]:
                return False
            outside = theirs.shape[-1] - ours.shape[-1]  # keys before the window, which the cache does not hand out
            lowest = 0 if theirs.dtype == torch.bool else torch.finfo(theirs.dtype).min
            if not torch.equal(ours, theirs[..., outside:]) or not (theirs[..., :outside] == lowest).all():
                return False
        return True


def length_dependent_rope(config: Any) -> bool:
    """Whether rotary embeddings change with the length of the text."""
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    return "dynamic" in rope or "longrope" in rope


def layer_windows(config: Any, layers: int) -> list[int | None]:
    """Each layer's sliding window by the configuration, None for full attention."""
    width = getattr(config, "sliding_window", None)
    if kinds := getattr(config, "layer_types", None):
        return [width if kind == "sliding_attention" else None for kind in kinds]
    return [width] * layers


def _parameters(function: Callable[..., Any]) -> Any:
    return inspect.signature(inspect.unwrap(function)).parameters
