"""The PyPI package economize as a strategy to compare with (`pip install economize`; only the ruler needs it)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from self_speculation.config import GenerationConfig
from self_speculation.decoding import Decoded
from self_speculation.loading import Loaded
from self_speculation.peers import Peer, PeerStats
from self_speculation.sampling import sample_seed
from self_speculation.stats import now
from self_speculation.stopping import Stopper
from self_speculation.strategies import Strategy

KINDS = ("economize", "economize_early_exit", "economize_hybrid", "economize_layer_skip")
LOOKUP = 10  # most tokens that a look-up of `economize_hybrid` proposes


class EconomizeGenerator(Peer):
    """Answers prompts with economize, at full length: ends of a text are not looked for.

    Args:
        kind: one of `KINDS`; `economize_layer_skip` skips every other layer of the middle half.
        config: settings without anything left open; `exit_layer` and `num_speculations` as ours.
    """

    def __init__(self, kind: str, loaded: Loaded, config: GenerationConfig, seed: int = 42):
        import economize
        from economize.techniques.early_exit import EarlyExitConfig
        from economize.techniques.hybrid import HybridConfig
        from economize.techniques.layer_skip import LayerSkipConfig

        self.kind, self.loaded, self.config, self.seed = kind, loaded, config.resolved(), seed
        layers, drafts = loaded.model.num_layers, config.num_speculations
        exits = EarlyExitConfig(exit_layer=config.exit_layer, head="shared")
        techniques: dict[str, Any] = {
            "economize_early_exit": exits,
            "economize_hybrid": HybridConfig(fallback=exits, max_proposal=LOOKUP, max_drafts=drafts),
            "economize_layer_skip": LayerSkipConfig(skip_layers=tuple(range(layers // 4 + 1, 3 * layers // 4 + 1, 2))),
        }
        length = max(LOOKUP, drafts) if kind == "economize_hybrid" else drafts if kind in techniques else 0
        self.selected: Any = {}
        if not self.config.greedy:
            self.selected = {"temperature": self.config.temperature, "top_p": self.config.top_p}
        verifier: dict[str, Any] = {} if self.config.greedy or not length else {"verifier": "rejection"}
        self.decoding = economize.DecodeConfig(cycle_length=length + 1, **verifier)
        base = copy.copy(loaded.model.hf_model)  # what it attaches to the model must not be seen by others
        base._modules = dict(base._modules)
        self.model = economize.apply(base, *([techniques[kind]] if kind in techniques else []))

    def __call__(self, prompt: Sequence[int], *, sample_id: object = 0) -> Decoded:
        import economize

        device, budget = self.loaded.model.device, self.config.max_steps or 1
        ids, stats = self.loaded.model.ids(prompt)[0], PeerStats(prompt_tokens=len(prompt))

        def decode(count: int) -> list[int]:
            given = self.selected and {
                "selector": economize.TopPSampler(
                    **self.selected, seed=sample_seed(self.seed, sample_id) % (1 << 31), device=str(device)
                )
            }
            return self.model.decode(ids, count, decoding=self.decoding, **given).tokens.tolist()

        started = now(device)
        decode(1)
        stats.prefill_s, started = now(device) - started, now(device)
        tokens = decode(budget)
        stats.decode_s = max(0.0, now(device) - started - stats.prefill_s)
        stopper = Stopper(budget=budget, decode=self.loaded.decode)
        return self.answer(tokens, stopper, stats)

    def columns(self) -> dict[str, Any]:
        """The settings as columns of a result row; those that do not apply are left out."""
        config, model = self.config, self.loaded.model
        drafts = self.kind != "economize"
        exits = self.kind in ("economize_early_exit", "economize_hybrid")
        return {
            "model": self.loaded.name, "dtype": model.dtype_name, "device": str(model.device),
            "seed": self.seed, "generation_strategy": self.kind, "exit_layer": config.exit_layer if exits else None,
            "num_speculations": config.num_speculations if drafts else None, "sample": not config.greedy,
            "temperature": None if config.greedy else config.temperature, "max_steps": config.max_steps,
            "top_p": None if config.greedy else config.top_p,
        }  # fmt: skip


@dataclass(frozen=True)
class EconomizeStrategy(Strategy):
    """A strategy of `KINDS`."""

    def with_steps(self, loaded: Loaded, max_steps: int) -> EconomizeGenerator:
        config = replace(self.generator.config, max_steps=max_steps)
        return EconomizeGenerator(self.name, loaded, config)
