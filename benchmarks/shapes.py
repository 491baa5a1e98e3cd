"""How fast drafting would be for larger models: real shapes, random weights, and an acceptance that is imposed.

What a round costs depends on the shape of a model alone, and how many tokens it gives on the acceptance alone. So
speeds of models that cannot be had here, at acceptances that papers report or that one hopes for, can be measured:
every pass is run as it is, only which drafts are accepted is left to chance.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from self_speculation import GenerationConfig, cli
from self_speculation.config import DTYPES, flag, require, require_choice
from self_speculation.decoding import decode
from self_speculation.drafters import Drafter
from self_speculation.drafters.chain import NoDrafter
from self_speculation.drafters.layers import EarlyExitDrafter, SkipLayerDrafter
from self_speculation.loading import choose_device
from self_speculation.modeling import SelfSpeculativeModel, SkipSet
from self_speculation.sampling import Sampler
from self_speculation.stats import Stats, now
from self_speculation.stopping import Stopper

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "llama-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "gemma2-2b": {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    "gemma2-9b": {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336,
        "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
}  # fmt: skip
"""As the models' own configuration files have them: Llama 3.2 1B and 3.1 8B, Gemma 2 2B and 9B."""


@dataclass(frozen=True)
class ShapesConfig:
    """What is measured."""

    shape: str = flag("llama-1b", f"one of {', '.join(SHAPES)}")
    exit_layer: int | None = flag(None, "layers that an early exit drafts with", unset="a quarter of them")
    skipped: float = flag(0.4, "share of all sub-layers that a skip set leaves out, spread over the second half")
    num_speculations: list[int] | None = flag(None, "tokens drafted a round, one or more numbers", unset="2 6")
    acceptance: list[float] | None = flag(None, "rates at which a draft is accepted", unset="0.41 0.6 0.7 0.8 0.9")
    prompt_tokens: int = flag(256, "tokens of the prompt")
    max_steps: int = flag(64, "tokens a text")
    repeats: int = flag(3, "texts of each kind; medians are shown")
    dtype: str = flag("bfloat16", "of the weights")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    compile: bool = flag(False, "compile draft steps and verification")
    debug: bool = flag(False, "show the traceback of an error")

    def __post_init__(self) -> None:
        require_choice("shape", self.shape, tuple(SHAPES))
        require_choice("dtype", self.dtype, DTYPES)
        for name in ("prompt_tokens", "repeats"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
        require(self.max_steps >= 3, "max_steps", self.max_steps, "must be 3 or more")
        require(0 < self.skipped < 1, "skipped", self.skipped, "must be above 0 and below 1")
        for length in self.num_speculations or ():
            require(length >= 1, "num_speculations", length, "must be 1 or more")
        for rate in self.acceptance or ():
            require(0 <= rate <= 1, "acceptance", rate, "must be from 0 to 1")


class ChanceSampler(Sampler):
    """Chooses greedily, but which drafts are accepted is left to chance: each with probability `rate`, up to the first
    that is not."""

    def __init__(self, rate: float, seed: int, device: torch.device):
        super().__init__(GenerationConfig(sample=False), device=device)
        self.rate, self.chance = rate, random.Random(seed)

    def verify(
        self, logits: torch.Tensor, prefix: Sequence[int], draft: Sequence[int], draft_probs: torch.Tensor | None
    ) -> tuple[int, int]:
        _, added = super().verify(logits, prefix, draft, draft_probs)
        accepted = next((i for i in range(len(draft)) if self.chance.random() >= self.rate), len(draft))
        return accepted, added


def spread_set(layers: int, share: float) -> SkipSet:
    """A skip set of `share` of all sub-layers, attention and MLP in turn, from the last layer down."""
    count = max(1, round(share * 2 * layers))
    order = [(kind, layer) for kind in ("attn", "mlp") for layer in range(layers - 1, layers // 2 - 1, -1)]
    order += [(kind, layer) for layer in range(layers // 2 - 1, 0, -1) for kind in ("attn", "mlp")]
    chosen = order[:count]
    return SkipSet.of(*([layer for kind, layer in chosen if kind == wanted] for wanted in ("attn", "mlp")))


def hf_seconds(model: Any, prompt: torch.Tensor, steps: int) -> float:
    """Seconds a decoded token by `model.generate`: what a call for all takes beyond one for the first."""
    times = []
    for tokens in (1, steps):
        started = now(prompt.device)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
                       min_new_tokens=tokens, pad_token_id=0)  # fmt: skip
        times.append(now(prompt.device) - started)
    return (times[1] - times[0]) / (steps - 1)


def main(options: ShapesConfig) -> None:
    """Measure drafting on a model of a real shape with random weights, at acceptances that are imposed."""
    torch.manual_seed(0)
    device = choose_device(options.device)
    with device:
        hf_model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**SHAPES[options.shape]), dtype=getattr(torch, options.dtype)
        )
    hf_model.generation_config.eos_token_id = None
    model = SelfSpeculativeModel(hf_model)
    if options.compile:
        model.compile()
    exit_layer = max(1, model.num_layers // 4) if options.exit_layer is None else options.exit_layer
    model.check_exit_layer(exit_layer)
    skip = spread_set(model.num_layers, options.skipped)
    drafters: dict[str, Drafter] = {
        f"early_exit, {exit_layer} of {model.num_layers} layers": EarlyExitDrafter(exit_layer),
        f"skip_layer, {len(skip)} of {2 * model.num_layers} sub-layers": SkipLayerDrafter(skip),
    }
    prompt = torch.randint(model.vocab_size, (options.prompt_tokens,), device="cpu").tolist()

    def text(drafter: Drafter, length: int, rate: float, seed: int) -> Stats:
        sampler, stopper = ChanceSampler(rate, seed, model.device), Stopper(budget=options.max_steps)
        return decode(model, drafter, prompt, sampler=sampler, stopper=stopper, num_speculations=length).stats

    kinds = [
        (name, length, rate)
        for name in drafters
        for length in options.num_speculations or (2, 6)
        for rate in options.acceptance or (0.41, 0.6, 0.7, 0.8, 0.9)
    ]
    plain, hf, found = [], [], {kind: [] for kind in kinds}  # type: ignore[var-annotated]
    for repeat in range(options.repeats + 1):
        if repeat == 1:  # the first warmed up
            plain, hf, found = [], [], {kind: [] for kind in kinds}
        hf.append(hf_seconds(hf_model, model.ids(prompt), options.max_steps))
        for number, kind in enumerate(kinds):
            if number % 5 == 0:
                plain.append(text(NoDrafter(), 0, 0.0, repeat))
            found[kind].append(text(drafters[kind[0]], kind[1], kind[2], repeat))
    step = statistics.median(stats.decode_s / stats.decode_tokens for stats in plain)
    theirs = statistics.median(hf)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.shape}, {options.dtype}{', compiled' if model.compiled else ''}, {where}, prompt of "
          f"{options.prompt_tokens} tokens, texts of {options.max_steps}\n")  # fmt: skip
    print("| strategy | K | acceptance | tokens/round | tokens/s | x autoregressive | x hf |")
    print("|---" * 7 + "|")
    print(f"| autoregressive | | | 1.00 | {1 / step:.1f} | 1.00 | {theirs / step:.2f} |")
    print(f"| hf | | | | {1 / theirs:.1f} | {step / theirs:.2f} | 1.00 |")
    for (name, length, rate), texts in found.items():
        tokens = sum(stats.decode_tokens for stats in texts)
        rounds = sum(len(stats.rounds) for stats in texts)
        seconds = statistics.median(stats.decode_s / len(stats.rounds) for stats in texts) * rounds / tokens
        print(f"| {name} | {length} | {rate:.0%} | {tokens / rounds:.2f} | {1 / seconds:.1f} | {step / seconds:.2f} | "
              f"{theirs / seconds:.2f} |")  # fmt: skip


if __name__ == "__main__":
    cli.run(main, (ShapesConfig,))
