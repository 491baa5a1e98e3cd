"""What happened while decoding: counts a round and times by synchronised clocks."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Round:
    """One draft and its verification. Tokens thrown away after a stop are in none of the counts."""

    drafted: int
    accepted: int
    new_tokens: int


@dataclass
class Stats:
    """Counts and seconds of one generation, or of several added up with `pooled`."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0  # in neither of the two
    rounds: list[Round] = field(default_factory=list, repr=False)

    @property
    def decode_tokens(self) -> int:
        """New tokens that rounds gave; the first one comes from the prefill."""
        return sum(r.new_tokens for r in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.decode_tokens / len(self.rounds) if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens by decode seconds; None without rounds."""
        return self.decode_tokens / self.decode_s if self.rounds and self.decode_s else None

    def note(self) -> str | None:
        """What a row should say beside its figures."""
        return f"compiling took {self.compile_s:.1f} s, not counted" if self.compile_s else None

    def row(self) -> dict[str, float | int | None]:
        """These figures under their column names."""
        names = ("prompt_tokens", "new_tokens", "decode_tokens", "drafted", "accepted", "acceptance_rate",
                 "tokens_per_round", "prefill_s", "decode_s", "tokens_per_second")  # fmt: skip
        return {"rounds": len(self.rounds)} | {name: getattr(self, name) for name in names}


def pooled(parts: Iterable[Stats]) -> Stats:
    """Counts and times of several generations together, so that rates are pooled and not averaged."""
    total = Stats()
    for part in parts:
        total.prompt_tokens += part.prompt_tokens
        total.new_tokens += part.new_tokens
        total.prefill_s += part.prefill_s
        total.decode_s += part.decode_s
        total.compile_s += part.compile_s
        total.rounds += part.rounds
    return total


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, once all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def machine(device: torch.device) -> str:
    """What is measured on: the GPU's name, or the processor's kind and the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"
