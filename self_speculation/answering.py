"""One answer of generate.py: generated, shown, and written down."""

from __future__ import annotations

import sys

from . import distributed
from .decoding import Decoded
from .generation import Generator
from .loading import Loaded
from .prompts import Prompt
from .records import RunLog
from .streaming import make_streamer
from .trace_page import TracePage

KEY = ("sample_id", "generation_strategy")


def encode(loaded: Loaded, prompt: Prompt) -> list[int]:
    """A prompt as token ids."""
    return loaded.encode_chat(prompt) if isinstance(prompt, list) else loaded.encode(prompt)


def answer(
    generator: Generator, ids: list[int], number: int, streamer: str, log: RunLog, page: TracePage | None = None
) -> Decoded:
    """Generate one answer, show it and its figures, and write its row and its part of the page."""
    if distributed.follows():
        streamer = "none"
    if streamer == "speculative" and generator.config.generation_strategy == "autoregressive":
        streamer = "standard"
    observer = make_streamer(streamer)
    if page is None:
        decoded = generator(ids, sample_id=number, observer=observer)
    else:
        decoded = page.trace(generator, ids, number, observer)
    if streamer == "none" and distributed.is_main():
        print(decoded.text, flush=True)
    stats = decoded.stats
    row = {"sample_id": number, **generator.columns(), **stats.row(), "stop_reason": decoded.stop_reason}
    row["note"] = stats.note()
    log.write(row, prediction=decoded.text)
    figures = [
        f"{generator.config.generation_strategy}: {stats.new_tokens} tokens",
        f"prefill {stats.prefill_s:.3f} s",
        f"decode {stats.decode_s:.3f} s",
    ]
    if stats.compile_s:
        figures.append(f"compiling {stats.compile_s:.1f} s, not counted")
    if stats.tokens_per_second is not None:
        figures.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.acceptance_rate is not None:
        figures.append(f"acceptance {stats.acceptance_rate:.1%} ({stats.accepted}/{stats.drafted})")
    if stats.drafted and stats.tokens_per_round is not None:
        figures.append(f"{stats.tokens_per_round:.2f} tokens/round")
    if distributed.is_main():
        print(f"[{', '.join(figures)}; ended by {decoded.stop_reason}]", file=sys.stderr, flush=True)
    return decoded


def compare(plain: Decoded, speculative: Decoded) -> None:
    """Say how much faster the second answer came, and whether both are the same."""
    speeds = plain.stats.tokens_per_second, speculative.stats.tokens_per_second
    ratio = f"{speeds[1] / speeds[0]:.2f} x the autoregressive speed, " if speeds[0] and speeds[1] else ""
    equal = "identical" if plain.tokens == speculative.tokens else "DIFFERENT"
    print(f"[{ratio}texts {equal}]", file=sys.stderr, flush=True)
