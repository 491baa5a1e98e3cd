"""Rounds and their costs foretold, whatever drafts: early exits, a skip set or an adapter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from .config import GenerationConfig
from .costs import RoundCosts, measure_costs
from .decoding import Decoded
from .drafters import AdapterDrafter, Drafter
from .drafters.layers import EarlyExitDrafter, LayersDrafter, SkipLayerDrafter
from .loading import Loaded
from .modeling import Adapter, DraftHead, SkipSet
from .prediction import Part, Trace, read, trace
from .replay import replay
from .sampling import Sampler
from .skip_scores import follow, measure_skip_costs
from .vocabulary import draft_token_ids


@dataclass(frozen=True)
class Forecast:
    """What drafts on a loaded model under some settings: `skip` or `adapter` where one is given, else early exits."""

    loaded: Loaded
    config: GenerationConfig
    skip: SkipSet | None = None
    adapter: Adapter | None = None

    @classmethod
    def of(cls, loaded: Loaded, config: GenerationConfig, drafter: Drafter) -> Forecast | None:
        """The forecast of a drafter; None where there is none for its kind."""
        if isinstance(drafter, SkipLayerDrafter):
            return cls(loaded, config, skip=drafter.skip)
        if isinstance(drafter, AdapterDrafter):
            return cls(loaded, config, adapter=drafter.adapter)
        return cls(loaded, config) if isinstance(drafter, EarlyExitDrafter) else None

    @property
    def by_exit(self) -> bool:
        """Whether there are exit layers to choose from."""
        return self.skip is None and self.adapter is None

    def part(self, exit_layer: int | None) -> Part:
        """What goes by this exit layer in traces and costs."""
        if self.skip is not None:
            return self.skip
        return self.adapter.shape.exit_layer if self.adapter is not None else exit_layer or 0

    def sampler(self, seed: int = 0) -> Sampler:
        device, limit = self.loaded.model.device, len(self.loaded.tokenizer)
        return Sampler(self.config, seed=seed, device=device, vocab_limit=limit)

    def follow(
        self, sampler: Sampler, prompt: Sequence[int], decoded: Decoded, exits: Sequence[int], *, budget: int,
        most: int, end_ids: Collection[int] = (),
    ) -> Trace:  # fmt: skip
        """Follow what drafts along a text that the target wrote.

        Args:
            exits: exit layers, where early exits draft.
            budget: the most new tokens that were allowed.
            most: the longest draft that will be asked for.
            end_ids: ids at which a draft ends.
        """
        model = self.loaded.model
        if self.adapter is not None:
            drafter = AdapterDrafter(self.adapter, head=self._head())
            return replay(model, sampler, prompt, decoded, drafter, budget=budget, end_ids=end_ids,
                          most_speculations=most)  # fmt: skip
        if self.skip is not None:
            text = read(model, prompt, decoded, budget=budget, end_ids=end_ids)
            return follow(model, sampler, text, self.skip, most, end_ids, self._token_ids())
        return trace(model, sampler, prompt, decoded, exits, budget=budget, end_ids=end_ids, most_speculations=most,
                     token_ids=self._token_ids())  # fmt: skip

    def costs(
        self, text: Sequence[int], exits: Sequence[int], lengths: Sequence[int], seconds: float = 2.0
    ) -> RoundCosts:
        """Measured costs after a text, shortened where the model's positions leave no room for a draft.

        Args:
            exits: exit layers to measure, where early exits draft; between them costs are taken as linear.
            lengths: draft lengths to measure, likewise.
            seconds: about how long to take, once everything was timed a few times.
        """
        model = self.loaded.model
        tokens = list(text)[: max(1, model.max_positions - max(lengths) - 1)]
        if self.skip is not None:
            return measure_skip_costs(model, self.sampler(), tokens, lengths, seconds, self._token_ids())
        head = self._head()
        drafters: dict[int, LayersDrafter] = {layer: EarlyExitDrafter(layer, head=head) for layer in exits}
        if self.adapter is not None:
            drafters = {self.adapter.shape.exit_layer: AdapterDrafter(self.adapter, head=head)}
        return measure_costs(model, self.sampler(), tokens, drafters, lengths, seconds=seconds)

    def _token_ids(self) -> torch.Tensor | None:
        return draft_token_ids(self.config, self.loaded, self.adapter)

    def _head(self) -> DraftHead | None:
        token_ids = self._token_ids()
        return None if token_ids is None else self.loaded.model.draft_head(token_ids)
