"""Self-speculative decoding: a model drafts with part of itself and verifies with the whole.

from self_speculation import generate, load

model = load("smollm2-135m")
answer = generate(model, "def fib(n):", generation_strategy="self_speculative", drafter="prompt_lookup")
print(answer.text, answer.tokens, answer.stats.acceptance_rate)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["GenerationConfig", "Generator", "ModelConfig", "custom_generate", "generate", "generate_each", "load"]

if TYPE_CHECKING:
    from .config import GenerationConfig, ModelConfig
    from .generation import Generator, generate, generate_each
    from .hf_generate import custom_generate
    from .loading import load


def __getattr__(name: str) -> Any:
    """Import on first use, so that `--help` and usage errors need not wait for torch."""
    from importlib import import_module

    homes = {"GenerationConfig": "config", "ModelConfig": "config", "Generator": "generation", "generate": "generation",
             "generate_each": "generation", "load": "loading", "custom_generate": "hf_generate"}  # fmt: skip
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{homes[name]}", __name__), name)
