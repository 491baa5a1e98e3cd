"""The model as drafters and the decoding loop see it: prefill, draft steps and verification over one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..config import UsageError
from .adapter import Adapter
from .backbone import Backbone, Unsupported
from .cache import KVCache
from .compiled import Compiled
from .draft_head import DraftHead
from .skip import SkipSet

REMEMBERED_SETS = 16  # of layers with something skipped, so that strategies that take turns make each once


@dataclass(frozen=True)
class ExitStates:
    """Hidden states [1, n, H] that left layer `exit_layer - 1`, kept so that verifying runs only the layers after it.

    Together with the key/value cache this is LayerSkip's KVQ cache (arXiv 2404.16710, section 4.3).
    """

    exit_layer: int
    hidden: torch.Tensor


class KeptStates:
    """Hidden states leaving layer `depth - 1` of all verified positions, which an adapter goes on from.

    Like the key/value cache it is written at positions: what a rejected draft left is overwritten by the next pass.
    """

    def __init__(self, depth: int, capacity: int):
        self.depth, self.capacity = depth, capacity
        self.states: torch.Tensor | None = None

    def write(self, position: int, hidden: torch.Tensor) -> None:
        """Keep [1, n, H] for positions `position`, `position + 1`, ..."""
        end = position + hidden.shape[1]
        if self.states is None or end > self.states.shape[1]:
            grown = hidden.new_empty((1, max(self.capacity, end), hidden.shape[2]))
            if self.states is not None:
                grown[:, : self.states.shape[1]] = self.states
            self.states = grown
        self.states[:, position:end] = hidden

    def read(self, start: int, end: int) -> torch.Tensor:
        """[1, end - start, H]"""
        assert self.states is not None
        return self.states[:, start:end]


class SelfSpeculativeModel:
    """A loaded causal language model split at its layers.

    Raises:
        Unsupported: the architecture cannot be split, named in one line.
    """

    def __init__(self, model: PreTrainedModel):
        self.hf_model = model.eval()
        self._skipping: dict[SkipSet, list[torch.nn.Module]] = {}
        with torch.inference_mode():
            self.backbone = Backbone(self.hf_model)
            self._check_split()

    def compile(self) -> None:
        """Have what drafting and verifying run compiled when it is first needed; a warning says where that fails."""
        self.backbone.compiled = Compiled(self.backbone)

    @property
    def compiled(self) -> bool:
        """Whether draft steps and verification are compiled."""
        return self.backbone.compiled is not None and self.backbone.compiled.failure is None

    @property
    def compile_seconds(self) -> float:
        """What compiling has taken so far."""
        return self.backbone.compiled.seconds if self.backbone.compiled else 0.0

    @property
    def num_layers(self) -> int:
        return len(self.backbone.layers)

    @property
    def vocab_size(self) -> int:
        return self.backbone.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for."""
        return getattr(self.backbone.config, "max_position_embeddings", None) or 1 << 30

    @property
    def device(self) -> torch.device:
        """Where token ids and logits live; layers may be elsewhere (`device_map`)."""
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf_model.dtype

    @property
    def dtype_name(self) -> str:
        """As `--dtype` writes it."""
        return str(self.dtype).removeprefix("torch.")

    def check_exit_layer(self, exit_layer: int) -> None:
        """Raise `UsageError` unless 1 <= exit_layer <= L-1."""
        if not 1 <= exit_layer < self.num_layers:
            raise UsageError(
                f"--exit_layer {exit_layer}: must be between 1 and {self.num_layers - 1} "
                f"for a model of {self.num_layers} layers"
            )

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache with room for `capacity` tokens."""
        return KVCache(self.backbone.windows, capacity)

    def ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """[1, n] token ids on the model's device."""
        return torch.tensor([tokens], dtype=torch.long, device=self.device)

    def run(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        position: int,
        start: int = 0,
        stop: int | None = None,
        hidden: torch.Tensor | None = None,
        skip: SkipSet | None = None,
    ) -> torch.Tensor:
        """Run layers start..stop-1 on [1, n] tokens at `position`, without the sub-layers in `skip`.

        Returns:
            The hidden states [1, n, H] leaving the last of them, before the final norm.
        """
        layers = self.backbone.layers if skip is None else self.layers_without(skip)
        return self.backbone.run(input_ids, cache, position, start, layers[start:stop], hidden)

    def layers_without(self, skip: SkipSet) -> list[torch.nn.Module]:
        """The model's layers without the sub-layers in `skip`; the last few sets asked for are remembered."""
        if skip not in self._skipping:
            if len(self._skipping) == REMEMBERED_SETS:
                del self._skipping[next(iter(self._skipping))]
            self._skipping[skip] = skip.apply(self.backbone.layers)
        return self._skipping[skip]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: [1, n, H] -> logits [n, vocabulary]."""
        return self.backbone.head(hidden)[0].to(self.device)

    def run_keeping(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        position: int,
        states: KeptStates | None,
        start: int = 0,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers from `start` on to the last, writing the states that are to be kept into `states`."""
        if states is None:
            return self.run(input_ids, cache, position, start=start, hidden=hidden)
        if hidden is None or start < states.depth:
            hidden = self.run(input_ids, cache, position, start, states.depth, hidden)
            start = states.depth
        if start == states.depth:
            states.write(position, hidden)
        return self.run(input_ids, cache, position, start, hidden=hidden) if start < self.num_layers else hidden

    def prefill(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        stop: int | None = None,
        skip: SkipSet | None = None,
        states: KeptStates | None = None,
    ) -> torch.Tensor:
        """Run the prompt [1, n] into the empty cache; logits [1, vocabulary] of the token after it."""
        if states is not None:
            return self.head(self.run_keeping(input_ids, cache, 0, states)[:, -1:])
        return self.head(self.run(input_ids, cache, 0, stop=stop, skip=skip)[:, -1:])

    def verify(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        position: int,
        kept: ExitStates | None = None,
        states: KeptStates | None = None,
    ) -> torch.Tensor:
        """The target's logits [n, vocabulary] for a block [1, n] at `position`.

        With `kept` only the layers from its exit on are run. Its states may lack the last tokens of the block, such
        as the last draft, which nothing was drafted from: those pass the early layers here.
        """
        if kept is None:
            return self.head(self.run_keeping(input_ids, cache, position, states))
        hidden, done = kept.hidden, kept.hidden.shape[1]
        if done < input_ids.shape[1]:
            rest = self.run(input_ids[:, done:], cache, position + done, stop=kept.exit_layer)
            hidden = torch.cat([hidden, rest], dim=1)
        return self.head(self.run_keeping(input_ids, cache, position, states, kept.exit_layer, hidden))

    def run_adapter(
        self, adapter: Adapter, tokens: torch.Tensor, cache: KVCache, position: int, states: torch.Tensor
    ) -> torch.Tensor:
        """`Adapter.forward` over the adapter's own `cache`."""
        return adapter(self.backbone, tokens, cache, position, states)

    def draft_head(self, token_ids: torch.Tensor | None) -> DraftHead:
        """A final norm and head over the tokens in `token_ids`, None for all; each text being decoded needs its own."""
        return DraftHead(self.backbone, token_ids)

    def _check_split(self) -> None:
        """Compare early layers + the rest with the model's own forward on a few tokens."""
        ids = torch.arange(1, 7, device=self.device)[None] % self.vocab_size
        plain = self.hf_model(input_ids=ids).logits[0].float()
        if torch.isnan(plain).any():
            return  # reported with a hint about the dtype once decoding meets it
        middle = max(1, self.num_layers // 2)
        cache = self.new_cache(8)
        self.run(ids[:, :2], cache, 0)
        early = self.run(ids[:, 2:5], cache, 2, stop=middle)
        split = self.verify(ids[:, 2:], cache, 2, ExitStates(middle, early)).float()
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        if not torch.allclose(split, plain[2:], rtol=0, atol=tolerance * max(1.0, float(plain.abs().max()))):
            raise Unsupported(
                f"{self.backbone.family} models are not supported: running their layers in two parts changes the logits"
            )
