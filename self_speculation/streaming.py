"""What the terminal shows while text is generated. All colour lives here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from .decoding import Observer
from .stopping import Stopper

GREEN, RED_STRUCK, BOLD, RESET = "\x1b[32m", "\x1b[31;9m", "\x1b[1;36m", "\x1b[0m"


class StandardStreamer(Observer):
    """Prints the text as soon as no later token can change it; what is printed in all is the text returned."""

    def __init__(self, file: TextIO | None = None):
        self.file = file or sys.stdout
        self.printed = 0

    def on_block(self, draft: Sequence[int], accepted: int, block: Sequence[int], stopper: Stopper) -> None:
        self.show(self.fresh(stopper))

    def on_end(self, stopper: Stopper) -> None:
        self.show(self.fresh(stopper) + "\n")
        self.printed = 0

    def fresh(self, stopper: Stopper) -> str:
        """The settled text that has not been printed yet."""
        text = stopper.text() if stopper.reason else stopper.settled_text()
        fresh, self.printed = text[self.printed :], max(self.printed, len(text))
        return fresh

    def show(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


class SpeculativeStreamer(StandardStreamer):
    """Shows each round: accepted drafts, rejected drafts, then the token the target put instead or added.

    On a terminal these are green, red struck through, and bold. Elsewhere, rejected drafts stand in [-...-] and the
    target's own tokens in {+...+}, as word-diff tools write them.
    """

    def __init__(self, file: TextIO | None = None, colour: bool | None = None):
        super().__init__(file)
        terminal = self.file.isatty() and "NO_COLOR" not in os.environ
        coloured = terminal if colour is None else colour
        self.marks = (
            {"accepted": (GREEN, RESET), "rejected": (RED_STRUCK, RESET), "added": (BOLD, RESET)}
            if coloured
            else {"accepted": ("", ""), "rejected": ("[-", "-]"), "added": ("{+", "+}")}
        )

    def on_block(self, draft: Sequence[int], accepted: int, block: Sequence[int], stopper: Stopper) -> None:
        before = stopper.tokens[: len(stopper.tokens) - len(block)]
        drafted_end = len(stopper.decode([*before, *block[:accepted]]).rstrip("\ufffd"))
        start = self.printed
        fresh = self.fresh(stopper)
        split = min(max(drafted_end - start, 0), len(fresh))
        self.show(self.mark("accepted", fresh[:split]))
        if accepted < len(draft) and len(block) > accepted:
            kept = stopper.decode([*before, *draft[:accepted]])
            rejected = stopper.decode([*before, *draft])[len(kept) :]
            self.show(self.mark("rejected", rejected.replace("\n", "\u23ce")))  # a rejected line end breaks no line
        self.show(self.mark("added", fresh[split:]))

    def mark(self, kind: str, text: str) -> str:
        opening, closing = self.marks[kind]
        return f"{opening}{text}{closing}" if text else ""


def make_streamer(name: str) -> Observer | None:
    """The streamer of that name: none, standard or speculative."""
    if name == "none":
        return None
    return SpeculativeStreamer() if name == "speculative" else StandardStreamer()
