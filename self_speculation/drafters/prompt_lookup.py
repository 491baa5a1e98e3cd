"""Draft by looking up the last few tokens earlier in the text (prompt lookup decoding)."""

from __future__ import annotations

from .base import Context, Draft, Drafter

PER_MATCHED = 2  # tokens proposed for every token matched


class PromptLookupDrafter(Drafter):
    """Proposes what followed the latest earlier occurrence of the last n tokens, for the longest n that occurs.

    Short matches are often chance, so they propose little: 2 n tokens; a match of `max_ngram` tokens, all that may be
    drafted. Matches shorter than `min_ngram` are passed over: another drafter in a chain does better. An index from
    n-grams to where they last occurred grows with the text, so a look-up costs the same at any length.
    """

    def __init__(self, max_ngram: int = 5, min_ngram: int = 1):
        self.max_ngram, self.min_ngram = max_ngram, min(min_ngram, max_ngram)

    def start(self, context: Context) -> None:
        self.index: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self.indexed = 0  # tokens whose n-grams are in the index

    def propose(self, context: Context, limit: int) -> Draft:
        tokens = context.tokens
        for end in range(self.indexed + 1, len(tokens)):  # the n-gram that ends the text is not its own match
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self.index[tuple(tokens[end - n : end])] = end
        self.indexed = max(self.indexed, len(tokens) - 1)
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            found = self.index.get(tuple(tokens[-n:]))
            if found is not None:
                count = limit if n == self.max_ngram else min(limit, PER_MATCHED * n)
                return Draft(_copy(tokens, found, count))
        return Draft()


def _copy(tokens: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end it goes on with what it has copied, so that a loop repeats."""
    copied = tokens[start : start + count]
    while len(copied) < count:
        copied += copied[: count - len(copied)]
    return copied
