"""What became of every token of a text: who proposed it, how probable it was, and when its round ran.

A trace listens at two places: as the loop's observer, and as the sampler that draws drafts and verifies them. Decoding
without a trace knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from .decoding import Observer
from .sampling import Sampler, distribution
from .stats import now
from .stopping import Stopper

KINDS = {
    "prefill": "the first token, from the prompt's own pass",
    "accepted": "drafted, and the target agreed",
    "rejected": "drafted, and the target did not agree",
    "discarded": "drafted after a rejected token",
    "correction": "the target's token in place of a rejected draft",
    "bonus": "the target's token after drafts that were all accepted",
    "target": "the target's token of a round without a draft",
}


@dataclass(frozen=True)
class TracedToken:
    """One token, in the text or rejected.

    Attributes:
        kind: one of `KINDS`.
        text: what it adds to the text; for a part of a character, its bytes.
        round: 0 is the prefill.
        depth: its place in the draft, from 1; None for the target's own tokens.
        draft_probability, target_probability: of this token at this place. Under sampling these are the processed
            ones (q and p) that decide acceptance, under greedy decoding those at temperature 1; None where a drafter
            has none, as when it looked the token up.
    """

    kind: str
    text: str
    id: int
    round: int
    depth: int | None = None
    draft_probability: float | None = None
    target_probability: float | None = None


@dataclass(frozen=True)
class TracedRound:
    """Counts of a round, less what a stop threw away, and its seconds; `start_s` counts from the first token."""

    start_s: float
    draft_s: float
    verify_s: float
    drafted: int
    accepted: int
    new_tokens: int


@dataclass
class Trace(Observer):
    """One text. Pass it to a generator as `observer`, together with a `TracedSampler` that has it as `trace`."""

    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    tokens: list[TracedToken] = field(default_factory=list)
    rounds: list[TracedRound] = field(default_factory=list)
    drawn: list[tuple[int, float]] = field(default_factory=list)  # in this round: token, probability
    target: list[float] = field(default_factory=list)  # in this round, by the target: of each draft, of its own token
    first: float | None = None
    times: list[float] = field(default_factory=list)  # the round's start, end of drafting, end of verifying

    def on_draft(self, draft: Sequence[int]) -> None:
        self.times.append(now(self.device))

    def on_block(self, draft: Sequence[int], accepted: int, block: Sequence[int], stopper: Stopper) -> None:
        before = stopper.tokens[: len(stopper.tokens) - len(block)]
        used = len(block) + (stopper.reason in ("eos", "stop_id"))  # the id that ended the text is not part of it
        drafted = draft[:used] if stopper.reason is not None and used <= accepted else draft
        if self.first is None:
            self.first = now(self.device)
            self.target = [self.drawn[-1][1]]
        else:
            start, drafted_at, verified_at = self.times
            self.rounds.append(
                TracedRound(start - self.first, drafted_at - start, verified_at - drafted_at, len(drafted), accepted,
                            len(block))
            )  # fmt: skip
        round_number = len(self.rounds)
        kinds = ["accepted"] * accepted + ["rejected"] + ["discarded"] * len(draft)
        mine = [p for _, p in self.drawn] if [token for token, _ in self.drawn] == list(draft) else [None] * len(draft)
        shown = [*block[:accepted], *drafted[accepted:]]  # without a drafted id that ended the text
        for place, (token, text) in enumerate(zip(shown, self.spell(before, shown, stopper), strict=True)):
            self.tokens.append(
                TracedToken(kinds[place], text, token, round_number, place + 1, mine[place], self.target[place])
            )
        if len(block) > accepted:
            kind = "prefill" if not self.rounds else "correction" if len(draft) > accepted else "bonus"
            kind = "target" if self.rounds and not draft else kind
            (text,) = self.spell([*before, *block[:accepted]], block[accepted:], stopper)
            self.tokens.append(TracedToken(kind, text, block[accepted], round_number, None, None, self.target[-1]))
        self.drawn, self.target, self.times = [], [], [now(self.device)]

    def spell(self, before: Sequence[int], tokens: Sequence[int], stopper: Stopper) -> list[str]:
        """What each of `tokens` adds to the text; a part of a character, or a special token, by its name."""
        texts = []
        settled = _settled(stopper, before)
        for end in range(1, len(tokens) + 1):
            longer = _settled(stopper, [*before, *tokens[:end]])
            texts.append(longer[len(settled) :] or self.name(tokens[end - 1]))
            settled = longer
        return texts

    def name(self, token: int) -> str:
        """A token that is no text by itself: the bytes it stands for, such as ⟨E2 98⟩, or a special token's name."""
        name = str(self.tokenizer.convert_ids_to_tokens(token) or f"⟨{token}⟩")
        if token in self.tokenizer.all_special_ids:
            return name
        if name.startswith("<0x") and name.endswith(">"):  # byte fallback
            return f"⟨{name[3:-1]}⟩"
        if all(symbol in _BYTES for symbol in name):
            return f"⟨{' '.join(f'{_BYTES[symbol]:02X}' for symbol in name)}⟩"
        return name

    def by_depth(self) -> list[tuple[int, int]]:
        """(drafted, accepted) at depth 1, 2, ..., which add up to those of the text."""
        deepest = max((each.drafted for each in self.rounds), default=0)
        return [
            (sum(each.drafted >= depth for each in self.rounds), sum(each.accepted >= depth for each in self.rounds))
            for depth in range(1, deepest + 1)
        ]


class TracedSampler(Sampler):
    """Draws what a `Sampler` draws, and tells `trace` how probable it was."""

    trace: Trace

    def draw(self, logits: torch.Tensor, prefix: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        token, probs = super().draw(logits, prefix)
        known = distribution(self.scores(logits, prefix).float())[0] if probs is None else probs
        self.trace.drawn.append((token, float(known[token])))
        return token, probs

    def verify(
        self, logits: torch.Tensor, prefix: Sequence[int], draft: Sequence[int], draft_probs: torch.Tensor | None
    ) -> tuple[int, int]:
        self.trace.times.append(now(logits.device))
        probs = distribution(self.scores(logits, prefix, draft).float())
        accepted, added = super().verify(logits, prefix, draft, draft_probs)
        self.trace.target = [float(probs[place, token]) for place, token in enumerate(draft)]
        self.trace.target.append(float(probs[accepted, added]))
        return accepted, added


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, parts: Sequence[Observer]):
        self.parts = parts

    def on_draft(self, draft: Sequence[int]) -> None:
        for part in self.parts:
            part.on_draft(draft)

    def on_block(self, draft: Sequence[int], accepted: int, block: Sequence[int], stopper: Stopper) -> None:
        for part in self.parts:
            part.on_block(draft, accepted, block, stopper)

    def on_end(self, stopper: Stopper) -> None:
        for part in self.parts:
            part.on_end(stopper)


def _settled(stopper: Stopper, tokens: Sequence[int]) -> str:
    return stopper.decode(list(tokens)).rstrip("\ufffd")


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level BPE writes bytes (GPT-2): printable ones as they are, others from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_alphabet()
