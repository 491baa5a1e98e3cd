"""Where the time of one round goes: draft layers, suffix layers, heads, and everything outside them.

Early exit and autoregressive decoding take turns on one prompt, with clocks around the layers, the head and drafting,
so that every part is timed where it runs. The floor is the time that reading the weights takes at the measured memory
bandwidth. With `--compile` layers are timed in ranges, as they are compiled.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from self_speculation import GenerationConfig, Generator, cli, load
from self_speculation.config import ModelConfig, flag, require
from self_speculation.decoding import Observer
from self_speculation.modeling import SelfSpeculativeModel
from self_speculation.stats import machine, now

PROMPT = "def fibonacci(n):\n    " * 12


@dataclass(frozen=True)
class BreakdownConfig:
    """What is timed."""

    exit_layer: int | None = flag(None, "layers a draft runs", unset="a quarter of them")
    num_speculations: int = flag(4, "tokens drafted a round")
    repeats: int = flag(6, "texts of each kind; medians are shown")
    max_steps: int = flag(48, "tokens a text")
    debug: bool = flag(False, "show the traceback of an error")

    def __post_init__(self) -> None:
        for name, least in (("num_speculations", 1), ("repeats", 1), ("max_steps", 2)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"must be {least} or more")


class Clocks:
    """Seconds spent in calls that were wrapped, by name."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.drafting = False

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed under `name`; under "draft: " or "verify: " and the name while drafting is watched."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = now(self.device)
            result = call(*args, **kwargs)
            self.seconds[f"{'draft' if self.drafting else 'verify'}: {name}"] += now(self.device) - started
            return result

        return timed

    def around_draft(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started, self.drafting = now(self.device), True
            result = propose(*args, **kwargs)
            self.drafting = False
            self.seconds["draft"] += now(self.device) - started
            return result

        return timed


class FromFirstBlock(Observer):
    """Sets the clocks back when the first token, which the prefill gives, is there."""

    def __init__(self, clocks: Clocks):
        self.clocks, self.begun = clocks, False

    def on_block(self, *args: Any) -> None:
        if not self.begun:
            self.clocks.seconds.clear()
        self.begun = True


def watch(model: SelfSpeculativeModel, generator: Generator, clocks: Clocks) -> None:
    """Put clocks around the model's layers and head, and around drafting."""
    backbone: Any = model.backbone
    if model.compiled:
        backbone.run = clocks.around("layers", backbone.run)
    else:
        backbone.layers = [clocks.around("layers", layer) for layer in backbone.layers]
    backbone.head = clocks.around("head", backbone.head)
    drafter: Any = generator.drafter
    drafter.propose = clocks.around_draft(drafter.propose)


def bandwidth(device: torch.device, megabytes: int = 256, repeats: int = 10) -> float:
    """Bytes a second that a sum over a large tensor reads."""
    data = torch.ones(megabytes << 18, device=device)
    times = []
    for _ in range(repeats):
        started = now(device)
        data.sum()
        times.append(now(device) - started)
    return data.nbytes / statistics.median(times)


def main(chosen: ModelConfig, options: BreakdownConfig) -> None:
    """Time the parts of a round of early exit and of a step of autoregressive decoding where they run."""
    loaded = load(chosen)
    model, k = loaded.model, options.num_speculations
    exit_layer = max(1, model.num_layers // 4) if options.exit_layer is None else options.exit_layer
    weights = sum(parameter.nbytes for layer in model.backbone.layers for parameter in layer.parameters())
    settings: dict[str, Any] = {"sample": False, "max_steps": options.max_steps, "ignore_eos": True}
    plain = Generator(loaded, GenerationConfig(**settings))
    early = Generator(loaded, GenerationConfig(
        generation_strategy="self_speculative", exit_layer=exit_layer, num_speculations=k, **settings
    ))  # fmt: skip
    prompt = loaded.encode(PROMPT)
    for generator in (plain, early):
        generator(prompt)  # warm-up, and compiling
    clocks = Clocks(model.device)
    watch(model, early, clocks)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.repeats):
        for name, generator in (("step", plain), ("round", early)):
            stats = generator(prompt, observer=FromFirstBlock(clocks)).stats
            found[name].append(stats.decode_s / len(stats.rounds))
            for part, seconds in clocks.seconds.items():
                found[f"{name} {part}"].append(seconds / len(stats.rounds))
            if stats.drafted:
                found["draft step"].append(clocks.seconds["draft"] / stats.drafted)
    middle: dict[str, float] = defaultdict(float, {name: statistics.median(values) for name, values in found.items()})
    parts = {name: seconds for name, seconds in middle.items() if name.startswith("round ") and ":" in name}
    layers, head = middle["step verify: layers"], middle["step verify: head"]
    way = "compiled" if model.compiled else "direct" if model.backbone.direct else "view"
    floor = weights / bandwidth(model.device)
    drafted = exit_layer / model.num_layers * layers + head
    print(f"{loaded.name}, {model.dtype_name}, {way}, exit layer {exit_layer} of "
          f"{model.num_layers}, {k} speculations, {machine(model.device)}")  # fmt: skip
    for name, seconds in parts.items():
        print(f"{1e3 * seconds:9.2f} ms  {name.removeprefix('round ')}")
    whole = middle["round"]
    print(f"{1e3 * whole:9.2f} ms  a round: {whole / sum(parts.values()):.3f} x its layers and heads")
    print(f"{1e3 * middle['draft step']:9.2f} ms  a draft step: {middle['draft step'] / drafted:.3f} x "
          f"({exit_layer}/{model.num_layers} of a step's layers + head)")  # fmt: skip
    step = middle["step"]
    print(f"{1e3 * step:9.2f} ms  an autoregressive step: {step / (layers + head):.3f} x its layers and head")
    print(f"{1e3 * layers:9.2f} ms  its layers: {layers / floor:.1f} x the floor")
    print(f"{1e3 * floor:9.2f} ms  floor: {weights / 1e6:.0f} MB of layer weights at memory bandwidth")


if __name__ == "__main__":
    cli.run(main, (ModelConfig, BreakdownConfig))
