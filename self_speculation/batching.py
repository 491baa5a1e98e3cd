"""Several prompts decoded at once, each as if alone.

A batch has a number of rows. A round drafts and verifies for all of them together; each row accepts what it accepts,
so rows have lengths, stops and random states of their own. A row that has ended leaves, and the next waiting prompt is
run into its place, so that the batch stays full as long as prompts wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

import torch

from .decoding import Decoded, DraftAlone, Text, clock
from .drafters import Turn
from .modeling import Batch, KVCache, SelfSpeculativeModel
from .sampling import verify_each

Begin = Callable[[Callable[[int], KVCache]], Text]
"""Makes a text whose cache the given function makes. The texts of one batch have the same settings, drafters included;
samplers, stoppers and drafters are their own."""


@torch.inference_mode()
def decode_batch(
    model: SelfSpeculativeModel, waiting: Iterable[Begin], size: int, draft_alone: DraftAlone | None = None
) -> Iterator[tuple[int, Decoded]]:
    """Decode all waiting texts, at most `size` at a time; (number of the text, what became of it) as each ends.

    A text's `decode_s` is its share of the rounds it took part in: the seconds of a round are divided evenly among its
    rows. So the sums of tokens and seconds of many texts give the batch's throughput.
    """
    waiting = iter(waiting)
    first = list(islice(waiting, size))
    batch = Batch(model, len(first))
    rows: list[tuple[int, Text]] = []  # in the order of the batch's rows
    queue = enumerate(chain(first, waiting))
    more = True
    while more or rows:
        while more and len(rows) < size:
            number, begin = next(queue, (0, None))
            if begin is None:
                more = False
                break
            text = begin(batch.add)
            text.prefill(draft_alone)
            rows.append((number, text))
            yield from _ended(rows, batch)
        if rows:
            _round(batch, [text for _, text in rows], draft_alone)
            yield from _ended(rows, batch)


def _ended(rows: list[tuple[int, Text]], batch: Batch) -> Iterator[tuple[int, Decoded]]:
    """Take out the rows that have ended; the last row moves to where one was taken out."""
    for place in range(len(rows) - 1, -1, -1):
        number, text = rows[place]
        if text.ended:
            rows[place] = rows[-1]
            last = rows.pop()[1]
            batch.remove(place, last.context.position)
            yield number, text.decoded()


def _round(batch: Batch, texts: list[Text], draft_alone: DraftAlone | None) -> None:
    """One draft and one verification for every row."""
    started = clock(batch.model)
    turns = [Turn(text.drafter, text.context, text.room()) for text in texts]
    drafts = turns[0].drafter.propose_each(turns, batch)
    blocks = [[turn.context.tokens[-1], *draft.tokens] for turn, draft in zip(turns, drafts, strict=True)]
    positions = [turn.context.position for turn in turns]
    if draft_alone is None:
        kept, states = [draft.kept for draft in drafts], [turn.context.states for turn in turns]
        logits = batch.verify(blocks, positions, kept, states)
    else:
        hidden = batch.run(blocks, positions, stop=draft_alone.stop, skip=draft_alone.skip)
        logits = batch.head(hidden, [len(block) for block in blocks])
    verdicts = verify_each(
        [turn.context.sampler for turn in turns],
        logits,
        [turn.context.tokens for turn in turns],
        [(draft.tokens, draft.probs) for draft in drafts],
    )
    for text, draft, verdict in zip(texts, drafts, verdicts, strict=True):
        text.take(draft, *verdict)
    share = (clock(batch.model) - started) / len(texts)
    for text in texts:
        text.stats.decode_s += share
