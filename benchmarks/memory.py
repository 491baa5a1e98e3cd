"""Peak memory of each way of decoding, in a process of its own each, against autoregressive decoding."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from self_speculation import GenerationConfig, Generator, cli, load  # noqa: E402
from self_speculation.config import ModelConfig, RunError, flag, require, require_choice  # noqa: E402

STRATEGIES: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "early_exit": {"generation_strategy": "self_speculative", "drafter": "early_exit"},
    "prompt_lookup": {"generation_strategy": "self_speculative", "drafter": "prompt_lookup"},
}


@dataclass(frozen=True)
class MemoryConfig:
    """What is measured."""

    exit_layer: int = flag(4, "layers a draft runs")
    num_speculations: int = flag(4, "tokens drafted a round")
    only: str | None = flag(None, f"measure this process, one of {', '.join(STRATEGIES)}", unset="a process for each")
    debug: bool = flag(False, "show the traceback of an error")

    def __post_init__(self) -> None:
        require(self.num_speculations >= 1, "num_speculations", self.num_speculations, "must be 1 or more")
        if self.only is not None:
            require_choice("only", self.only, tuple(STRATEGIES))


def measure(name: str, model: ModelConfig, options: MemoryConfig) -> int:
    """Bytes of this process at its peak, after decoding a prompt of 256 tokens: on a GPU torch's, else all of it."""
    loaded = load(model)
    drafting = {"exit_layer": options.exit_layer, "num_speculations": options.num_speculations}
    if name != "early_exit":
        del drafting["exit_layer"]
    settings = {**STRATEGIES[name], **(drafting if STRATEGIES[name] else {})}
    generator = Generator(loaded, GenerationConfig(sample=False, ignore_eos=True, max_steps=128, **settings))
    generator((loaded.encode("def fibonacci(n):\n    ") * 256)[:256])
    if loaded.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(model: ModelConfig, options: MemoryConfig) -> None:
    """Peak memory of each way of decoding, in a process of its own each, against autoregressive decoding."""
    if options.only:
        print(json.dumps(measure(options.only, model, options)))
        return
    base = 0
    for name in STRATEGIES:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RunError(run.stderr.strip().removeprefix("error: "))
        peak = json.loads(run.stdout.splitlines()[-1])
        base = base or peak
        print(f"{peak / 1e6:9.1f} MB  {peak / base:.3f} x  {name}", flush=True)


if __name__ == "__main__":
    cli.run(main, (ModelConfig, MemoryConfig))
