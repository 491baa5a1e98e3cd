"""When a text ends: end-of-sequence ids, stop ids, stop strings and the budget, whichever comes first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[list[int]], str]


class Stopper:
    """Takes new tokens block by block and cuts the block where the text ends.

    Tokens are those `model.generate` would give, without the closing end-of-sequence or stop id; with a stop string
    they include the token that completes it, and the text ends before it.

    Args:
        eos_ids, stop_ids: ids that end the text and are not part of it.
        stop_strings: looked for in the new text only, across blocks.
        budget: most tokens.
        decode: new tokens -> text; needed for stop strings and for `text`.
    """

    def __init__(
        self,
        *,
        eos_ids: Collection[int] = (),
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        budget: int,
        decode: Decode | None = None,
    ):
        self.eos_ids = frozenset(eos_ids)
        self.end_ids = self.eos_ids | frozenset(stop_ids)
        self.stop_strings = tuple(stop_strings)
        self.budget = budget
        self.decode: Decode = decode or (lambda tokens: "")
        self.tokens: list[int] = []
        self.reason: str | None = None  # eos, stop_id, stop_string or budget once the text has ended
        self._cut: int | None = None  # where the text ends, when a stop string was found

    @property
    def room(self) -> int:
        """Tokens left in the budget."""
        return self.budget - len(self.tokens)

    def push(self, block: Sequence[int]) -> int:
        """Take the tokens of a block up to the end of the text.

        Returns:
            How many of them were used up: those kept, and the id that ended the text.
        """
        before = len(self.tokens)
        for used, token in enumerate(block, 1):
            if token in self.end_ids:
                self.reason = "eos" if token in self.eos_ids else "stop_id"
                block = block[: used - 1]
                break
            if before + used == self.budget:
                self.reason = "budget"
                block = block[:used]
                break
        else:
            used = len(block)
        self.tokens += block
        if self.stop_strings and self._found(len(self.tokens)):
            used = next(n for n in range(1, len(block) + 1) if self._found(before + n))
            del self.tokens[before + used :]
            self.reason = "stop_string"
            self._cut = min(self._ends(self.decode(self.tokens)))
        return used

    def text(self) -> str:
        """The text so far, without a stop string."""
        return self.decode(self.tokens)[: self._cut]

    def settled_text(self) -> str:
        """The part of the text that no later token can change or cut off."""
        text = self.text()
        if self.reason is not None:
            return text
        text = text.rstrip("\ufffd")  # the first bytes of a character whose last have not come yet
        held = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        return text[: len(text) - held]

    def _found(self, length: int) -> bool:
        return bool(self._ends(self.decode(self.tokens[:length])))

    def _ends(self, text: str) -> list[int]:
        return [start for start in (text.find(stop) for stop in self.stop_strings) if start >= 0]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
