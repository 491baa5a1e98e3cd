"""How fast drafting would be for larger models: rounds of their shapes, with random weights, timed.

What a round of K drafts costs depends on the shape of a model alone, and what it gives, 1 + K x acceptance tokens, on
the acceptance alone. So gains of models that cannot be had, at an acceptance that a paper reports or that one hopes
for, are known once rounds are timed.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from self_speculation import GenerationConfig, cli
from self_speculation.config import DTYPES, flag, require, require_choice
from self_speculation.costs import time_rounds
from self_speculation.drafters.layers import EarlyExitDrafter, LayersDrafter, SkipLayerDrafter
from self_speculation.loading import choose_device
from self_speculation.modeling import SelfSpeculativeModel, SkipSet
from self_speculation.sampling import Sampler
from self_speculation.stats import machine, now

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
RATES = (0.41, 0.6, 0.7, 0.8, 0.9)  # 0.41 is what a published rebuild of Draft & Verify reports for Gemma 2


@dataclass(frozen=True)
class ShapesConfig:
    """What is measured."""

    shape: str = flag("llama-1b", f"one of {', '.join(SHAPES)}")
    exit_layer: int | None = flag(None, "layers that an early exit drafts with", unset="a quarter of them")
    skipped: float = flag(0.4, "share of all sub-layers that a skip set leaves out, those of the second half first")
    num_speculations: list[int] | None = flag(
        None, "tokens drafted a round, one or more numbers beside 1", unset="2 4 8"
    )
    acceptance: list[float] | None = flag(
        None, "shares of the drafted tokens that are accepted", unset=" ".join(map(str, RATES))
    )
    prompt_tokens: int = flag(256, "tokens before a round")
    seconds: float = flag(60.0, "about how long to time rounds, once all were timed a few times")
    dtype: str = flag("bfloat16", "of the weights")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    compile: bool = flag(False, "compile draft steps and verification")
    debug: bool = flag(False, "show the traceback of an error")

    def __post_init__(self) -> None:
        require_choice("shape", self.shape, tuple(SHAPES))
        require_choice("dtype", self.dtype, DTYPES)
        require(self.prompt_tokens >= 1, "prompt_tokens", self.prompt_tokens, "must be 1 or more")
        require(0 < self.skipped < 1, "skipped", self.skipped, "must be above 0 and below 1")
        for length in self.num_speculations or ():
            require(length >= 1, "num_speculations", length, "must be 1 or more")
        for rate in self.acceptance or ():
            require(0 <= rate <= 1, "acceptance", rate, "must be from 0 to 1")


def spread_set(layers: int, share: float) -> SkipSet:
    """A skip set of `share` of all sub-layers: the second half's attentions, then its MLPs, then whole layers before,
    each from the last layer down."""
    count = max(1, round(share * 2 * layers))
    order = [(kind, layer) for kind in ("attn", "mlp") for layer in range(layers - 1, layers // 2 - 1, -1)]
    order += [(kind, layer) for layer in range(layers // 2 - 1, 0, -1) for kind in ("attn", "mlp")]
    chosen = order[:count]
    return SkipSet.of(*([layer for kind, layer in chosen if kind == wanted] for wanted in ("attn", "mlp")))


def hf_seconds(model: Any, prompt: torch.Tensor, steps: int = 8) -> float:
    """Seconds a decoded token by `model.generate`: what a call for several takes beyond one for the first."""
    times = []
    for tokens in (1, 1 + steps):
        started = now(prompt.device)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
                       min_new_tokens=tokens, pad_token_id=0)  # fmt: skip
        times.append(now(prompt.device) - started)
    return (times[1] - times[0]) / steps


def main(options: ShapesConfig) -> None:
    """Time rounds of a model of a real shape with random weights; what they would gain by acceptance."""
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
    drafters: dict[str, LayersDrafter] = {
        f"early_exit, {exit_layer} of {model.num_layers} layers": EarlyExitDrafter(exit_layer),
        f"skip_layer, {len(skip)} of {2 * model.num_layers} sub-layers": SkipLayerDrafter(skip),
    }
    tokens = torch.randint(model.vocab_size, (options.prompt_tokens,), device="cpu").tolist()
    lengths = sorted({1, *(options.num_speculations or (2, 4, 8))})
    sampler = Sampler(GenerationConfig(sample=False), device=model.device)
    with torch.inference_mode():
        took = time_rounds(model, sampler, tokens, drafters, lengths, options.seconds)
        theirs = statistics.median(hf_seconds(hf_model, model.ids(tokens)) for _ in range(3))
    step = took["step", 0, 0]
    way = ", compiled" if model.compiled else ""
    print(f"{options.shape}, {options.dtype}{way}, {machine(device)}, after {len(tokens)} tokens: "
          f"a step takes {1e3 * step:.1f} ms, {theirs / step:.2f} x as fast as model.generate's\n")  # fmt: skip
    rates = options.acceptance or RATES
    columns = ["drafts with", "K", "drafting", "verifying", "break-even", *(f"{rate:.0%}" for rate in rates)]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in drafters:
        for length in lengths:
            draft, verify = (took[kind, name, length] / step for kind in ("draft", "verify"))
            gains = [f"{(1 + rate * length) / (draft + verify):.2f}" for rate in rates]
            cells = [name, length, f"{draft:.2f}", f"{verify:.2f}", f"{(draft + verify - 1) / length:.0%}", *gains]
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    cli.run(main, (ShapesConfig,))
