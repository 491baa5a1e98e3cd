"""What early-exit drafting would do on a text, foretold from one pass of the target over it.

Greedy decoding writes the same text whatever drafts it. So the draft of every exit layer at every place of the text
is known from one pass: norm and head on the hidden states leaving that layer. Where it agrees with the text it is
accepted. Runs of agreement then give the rounds of every (exit layer, number of speculations) without running them.

When tokens are sampled, each place has a chance of acceptance instead, sum(min(p, q)); rounds are drawn from these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .costs import Costs
from .decoding import Decoded
from .modeling import KVCache, SelfSpeculativeModel
from .modeling.branches import Branches
from .sampling import Sampler, distribution, greedy_tokens

ROWS = 64  # positions whose logits are held at once
NEVER = 1 << 30


@dataclass(frozen=True)
class Trace:
    """What each exit layer would draft along one text.

    Attributes:
        exits: the exit layers.
        chance: [exits, n], with what probability the target accepts each of the n new tokens as a draft; 0 or 1 when
            greedy. The first comes from the prefill and is never drafted.
        wrong_length: [exits, n], how many tokens a draft has from its first wrong token (at this place) on, since a
            drafted end-of-sequence id ends it; `NEVER` where none does.
        closed: the last of the n tokens is an id that ended the text and is not part of it.
        budget: the most new tokens that were allowed.
        positions: the most new tokens that the model's positions leave room for.
        exact: drafts that go on after a wrong token were followed, so that `drafted` is exact under greedy decoding.
    """

    exits: tuple[int, ...]
    chance: np.ndarray
    wrong_length: np.ndarray
    closed: bool
    budget: int
    positions: int
    exact: bool


@dataclass
class Rounds:
    """The rounds of one or more texts. Counts leave out what a stop throws away; `by_length` does not.

    Attributes:
        by_length: length of a draft -> how many rounds had one that long.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_tokens: int = 0
    by_length: Counter[int] = field(default_factory=Counter)

    def __iadd__(self, other: Rounds) -> Rounds:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.decode_tokens += other.decode_tokens
        self.by_length += other.by_length
        return self

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.decode_tokens / self.rounds if self.rounds else None

    def seconds(self, costs: Costs, exit_layer: int) -> float:
        """Predicted decode time."""
        return sum(count * costs.round(exit_layer, length) for length, count in self.by_length.items())

    def speedup(self, costs: Costs, exit_layer: int) -> float | None:
        """Predicted speed relative to autoregressive decoding."""
        seconds = self.seconds(costs, exit_layer)
        return self.decode_tokens * costs.step / seconds if seconds else None


@torch.inference_mode()
def trace(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    prompt: Sequence[int],
    decoded: Decoded,
    exits: Sequence[int],
    *,
    budget: int,
    end_ids: Collection[int] = (),
    most_speculations: int = 6,
) -> Trace:
    """Follow every exit layer along a text that the target wrote.

    Args:
        sampler: the settings the text was decoded with.
        budget: the most new tokens that were allowed.
        end_ids: ids at which a draft ends.
        most_speculations: the longest draft that will be asked for.
    """
    closed = decoded.stop_reason in ("eos", "stop_id")
    n = len(decoded.tokens) + closed
    text = [*prompt, *decoded.tokens]
    cache = model.new_cache(len(text))
    states = _states(model, cache, text, exits, first=len(prompt) - 1)[:, :n]
    tokens = list(decoded.tokens)
    if closed:
        last = model.head(states[-1:, n - 1 :])[0]
        tokens.append(max(end_ids, key=lambda id: float(last[id])))
    chance = np.zeros((len(exits), n))
    drafts = np.zeros((len(exits), n), dtype=np.int64)
    for start in range(0, n, ROWS):
        rows = slice(start, min(start + ROWS, n))
        prefix, block = [*prompt, *tokens[:start]], tokens[rows]
        target = None
        if not sampler.greedy:
            target = distribution(sampler.scores(model.head(states[-1:, rows]), prefix, block))
        for index in range(len(exits)):
            scores = sampler.scores(model.head(states[index : index + 1, rows]), prefix, block)
            if target is None:
                drafts[index, rows] = greedy_tokens(scores)
                chance[index, rows] = drafts[index, rows] == block
            else:
                chance[index, rows] = torch.minimum(target, distribution(scores)).sum(-1).double().cpu().numpy()
    wrong_length = np.full((len(exits), n), NEVER)
    follow = sampler.greedy and bool(end_ids)
    exact = sampler.greedy and (not follow or Branches.possible(model, len(text) + n * most_speculations))
    if follow:
        for index, exit_layer in enumerate(exits):
            wrong = [i for i in range(1, n) if not chance[index, i]]
            first = [int(drafts[index, i]) for i in wrong]
            steps = most_speculations - 1 if exact else 0
            wrong_length[index, wrong] = _wrong_lengths(
                model, sampler, cache, [*prompt, *tokens], len(text), exit_layer, [len(prompt) + i for i in wrong],
                first, end_ids, steps,
            )  # fmt: skip
    positions = model.max_positions - len(prompt)
    return Trace(tuple(exits), chance, wrong_length, closed, budget, positions, exact)


def _states(
    model: SelfSpeculativeModel, cache: KVCache, text: Sequence[int], exits: Sequence[int], first: int
) -> torch.Tensor:
    """Hidden states [exits + 1, tokens from `first` on, H] leaving each exit and, last, the whole model."""
    ids, hidden, start, states = model.ids(text), None, 0, []
    for stop in [*exits, model.num_layers]:
        hidden = model.run(ids, cache, 0, start=start, stop=stop, hidden=hidden)
        states.append(hidden[0, first:])
        start = stop
    return torch.stack(states)


def _wrong_lengths(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    cache: KVCache,
    text: Sequence[int],
    cached: int,
    exit_layer: int,
    starts: list[int],
    tokens: list[int],
    end_ids: Collection[int],
    steps: int,
) -> list[int]:
    """How long drafts are that leave the text at `starts` with the wrong `tokens`, `NEVER` if no end id ends them.

    All of them go on together, token by token, for at most `steps` more tokens.
    """
    lengths = [1 if token in end_ids else NEVER for token in tokens]
    if not starts or not steps:
        return lengths
    branches = Branches(model, cache, cached, starts, exit_layer)
    written = [[token] for token in tokens]
    for step in range(steps):
        hidden = branches.step(tokens)
        if sampler.history:
            rows = [
                sampler.scores(model.head(hidden[:, w : w + 1]), [*text[: starts[w]], *written[w]])
                for w in range(len(starts))
            ]
            tokens = greedy_tokens(torch.cat(rows))
        else:
            tokens = []
            for place in range(0, len(starts), ROWS):
                tokens += greedy_tokens(sampler.scores(model.head(hidden[:, place : place + ROWS]), ()))
        for w, token in enumerate(tokens):
            written[w].append(token)
            if token in end_ids and lengths[w] == NEVER:
                lengths[w] = step + 2
    return lengths


def simulate(trace: Trace, exit_layer: int, num_speculations: int, seed: int = 0) -> Rounds:
    """The rounds of `decoding.decode` on the traced text, counted as it counts them.

    Args:
        seed: of the draws of acceptance, where it is a matter of chance.
    """
    index = trace.exits.index(exit_layer)
    chance, n = trace.chance[index], trace.chance.shape[1]
    agrees = np.random.default_rng(seed).random(n) < chance
    runs = _runs(agrees.tolist())
    result = Rounds()
    done = 1  # tokens written; the first comes from the prefill
    while done < n:
        limit = max(0, min(num_speculations, trace.budget - done - 1, trace.positions - done))
        right = runs[done]
        accepted = min(right, limit)
        length = limit
        if trace.closed and right >= n - done:  # the draft ends with the id that ends the text
            length = min(limit, n - done)
        elif right < limit and done + right < n:
            length = min(limit, right + int(trace.wrong_length[index, done + right]))
        left = n - done
        ended = accepted >= left  # the end lies among the accepted drafts
        result.rounds += 1
        result.by_length[length] += 1
        result.drafted += left if ended else length
        result.accepted += min(accepted, left)
        done += min(accepted + 1, left)
    result.decode_tokens = max(0, n - 1 - trace.closed)
    return result


def _runs(agrees: Sequence[bool]) -> list[int]:
    """How many places in a row agree, from each place on."""
    runs = [0] * (len(agrees) + 1)
    for i in range(len(agrees) - 1, -1, -1):
        runs[i] = runs[i + 1] + 1 if agrees[i] else 0
    return runs
