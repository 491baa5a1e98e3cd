"""Peak memory of each way of decoding, in a process of its own each, against autoregressive decoding."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from self_speculation import GenerationConfig, Generator, load  # noqa: E402

STRATEGIES: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "early_exit": {"generation_strategy": "self_speculative", "drafter": "early_exit"},
    "prompt_lookup": {"generation_strategy": "self_speculative", "drafter": "prompt_lookup"},
}


def measure(name: str, options: argparse.Namespace) -> int:
    """Bytes of this process at its peak, after decoding a prompt of 256 tokens: on a GPU torch's, else all of it."""
    loaded = load(options.model, dtype=options.dtype)
    drafting = {"exit_layer": options.exit_layer, "num_speculations": options.num_speculations}
    if name != "early_exit":
        del drafting["exit_layer"]
    settings = {**STRATEGIES[name], **(drafting if STRATEGIES[name] else {})}
    generator = Generator(loaded, GenerationConfig(sample=False, ignore_eos=True, max_steps=128, **settings))
    generator((loaded.encode("def fibonacci(n):\n    ") * 256)[:256])
    if loaded.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="selfspec-16l")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--exit_layer", type=int, default=4)
    parser.add_argument("--num_speculations", type=int, default=4)
    parser.add_argument("--only", choices=list(STRATEGIES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    base = 0
    for name in STRATEGIES:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        peak = json.loads(output.splitlines()[-1])
        base = base or peak
        print(f"{peak / 1e6:9.1f} MB  {peak / base:.3f} x  {name}", flush=True)


if __name__ == "__main__":
    main()
