"""Where the time of one round goes: draft layers, suffix layers, heads, sampling, and everything outside the layers.

Every part is measured by itself on a prefilled cache (medians of repeated calls), and the whole round by the real loop.
The floor is the time that reading the weights takes at the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from self_speculation import GenerationConfig, Generator, load
from self_speculation.modeling import ExitStates
from self_speculation.sampling import Sampler

PROMPT = "def fibonacci(n):\n    " * 12


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, after three calls that do not count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def bandwidth(megabytes: int = 256) -> float:
    """Bytes a second that a sum over a large tensor reads."""
    data = torch.ones(megabytes << 18)
    return data.nbytes / (1e-3 * median_ms(data.sum, 10))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--exit_layer", type=int, default=None)
    parser.add_argument("--num_speculations", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    loaded = load(options.model, dtype=options.dtype)
    model, k, repeats = loaded.model, options.num_speculations, options.repeats
    exit_layer = options.exit_layer or max(1, model.num_layers // 4)
    ids = model.ids(loaded.encode(PROMPT))
    position = ids.shape[1]
    cache = model.new_cache(position + 64)
    model.prefill(ids, cache)
    one, block = ids[:, :1], ids[:, : k + 1]
    hidden = model.run(one, cache, position, stop=exit_layer)
    states = model.run(block, cache, position, stop=exit_layer)
    logits = model.verify(block, cache, position)
    sampler = Sampler(GenerationConfig(sample=False))
    draft = logits[:-1].argmax(-1).tolist()
    layers = model.backbone.layers
    parts = {
        f"draft: {k} x {exit_layer} layers": k
        * median_ms(lambda: model.run(one, cache, position, stop=exit_layer), repeats),
        f"draft: {k} x norm and head": k * median_ms(lambda: model.head(hidden), repeats),
        f"draft: {k} x greedy choice": k * median_ms(lambda: sampler.draw(logits[:1], []), repeats),
        f"verify: {exit_layer} layers, 1 token": median_ms(
            lambda: model.run(one, cache, position, stop=exit_layer), repeats
        ),
        f"verify: {len(layers) - exit_layer} layers, {k + 1} tokens": median_ms(
            lambda: model.run(block, cache, position, start=exit_layer, hidden=states), repeats
        ),
        f"verify: norm and head, {k + 1} tokens": median_ms(lambda: model.head(states), repeats),
        "verify: acceptance": median_ms(lambda: sampler.verify(logits, [], draft, None), repeats),
    }
    one_token = median_ms(lambda: model.run(one, cache, position), repeats)
    cold = median_ms(lambda: model.verify(block, cache, position, ExitStates(exit_layer, states)), repeats)
    settings = {"sample": False, "max_steps": 16 * (k + 1), "num_speculations": k, "exit_layer": exit_layer}
    generator = Generator(loaded, GenerationConfig(generation_strategy="self_speculative", **settings))
    decoded = [generator(ids[0].tolist()).stats for _ in range(3)]
    whole = statistics.median(1e3 * stats.decode_s / len(stats.rounds) for stats in decoded)
    print(f"{loaded.name}, {str(model.dtype).removeprefix('torch.')}, exit layer {exit_layer}, {k} speculations, "
          f"{'layers called directly' if model.backbone.direct else 'layers through a view'}")  # fmt: skip
    for name, milliseconds in parts.items():
        print(f"{milliseconds:9.2f} ms  {name}")
    print(f"{sum(parts.values()):9.2f} ms  sum of the parts")
    print(f"{whole:9.2f} ms  a round of the real loop ({whole / sum(parts.values()):.2f} x the sum)")
    print(f"{cold:9.2f} ms  verification as one call")
    print(f"{one_token:9.2f} ms  all layers, 1 token")
    weights = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
    print(f"{1e3 * weights / bandwidth():9.2f} ms  floor: {weights / 1e6:.0f} MB of layer weights at memory bandwidth")


if __name__ == "__main__":
    main()
