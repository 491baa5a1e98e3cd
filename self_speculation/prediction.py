"""What drafting would do on a text, foretold from passes over the text that the target wrote.

Greedy decoding writes the same text whatever drafts it. So the draft of every exit layer at every place of the text
is known from one pass: norm and head on the hidden states leaving that layer. Where it agrees with the text it is
accepted. Runs of agreement then give the rounds of every (exit layer, number of speculations) without running them.
A skip set is foretold in the same way, from passes of its own (`skip_scores`).

When tokens are sampled, each place has a chance of acceptance instead, sum(min(p, q)); rounds are drawn from these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .costs import RoundCosts
from .decoding import Decoded
from .modeling import OUTSIDE, DraftVocabulary, KVCache, SelfSpeculativeModel, SkipSet
from .modeling.branches import Branches, branching_cache
from .sampling import Sampler, distribution, greedy_tokens

ROWS = 64  # positions whose logits are held at once
NEVER = 1 << 30


Part = int | SkipSet  # what drafts: the layers before an exit, or all but the sub-layers of a skip set


@dataclass(frozen=True)
class Written:
    """A text that the target wrote.

    Attributes:
        tokens: the n new tokens, with the id that closed the text where one did.
        closed: the last of them is an id that ended the text and is not part of it.
        budget: the most new tokens that were allowed.
        positions: the most new tokens that the model's positions leave room for.
        cached: the tokens whose keys and values `cache` holds; `cache` may be branched.
        states: [exits + 1, n, H], the hidden states that chose the new tokens, leaving each exit and the whole model.
    """

    prompt: list[int]
    tokens: list[int]
    closed: bool
    budget: int
    positions: int
    cached: list[int]
    cache: KVCache
    states: torch.Tensor


@dataclass(frozen=True)
class Trace:
    """What parts of the model would draft along one text of n new tokens.

    Attributes:
        parts: exit layers or skip sets.
        chance: [parts, n, depths], with what probability the target accepts each new token as the first, second, ...
            token of a draft; 0 or 1 when greedy. Deeper drafts are as the last of the depths. The first token comes
            from the prefill and is never drafted.
        wrong_length: [parts, n, depths], how many tokens a draft has from its first wrong token (at this place and
            depth) on, since a drafted end-of-sequence id ends it; `NEVER` where none does.
        closed, budget, positions: as in `Written`.
        exact: drafts that go on after a wrong token were followed, so that `drafted` is exact under greedy decoding.
    """

    parts: tuple[Part, ...]
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

    def seconds(self, costs: RoundCosts, part: Part) -> float:
        """Predicted decode time."""
        return sum(count * costs.round(part, length) for length, count in self.by_length.items())

    def speedup(self, costs: RoundCosts, part: Part) -> float | None:
        """Predicted speed relative to autoregressive decoding."""
        seconds = self.seconds(costs, part)
        return self.decode_tokens * costs.step / seconds if seconds else None


@torch.inference_mode()
def read(
    model: SelfSpeculativeModel,
    prompt: Sequence[int],
    decoded: Decoded,
    exits: Sequence[int] = (),
    *,
    budget: int,
    end_ids: Collection[int] = (),
) -> Written:
    """Pass the target over a text that it wrote.

    Args:
        budget: the most new tokens that were allowed.
        end_ids: ids that may have closed the text.
    """
    closed = decoded.stop_reason in ("eos", "stop_id")
    tokens = list(decoded.tokens)
    text = [*prompt, *tokens]
    n = len(tokens) + closed
    cache = branching_cache(model, len(text))
    states = _states(model, cache, text, exits, first=len(prompt) - 1)[:, :n]
    if closed:
        last = model.head(states[-1:, n - 1 :])[0]
        tokens.append(max(end_ids, key=lambda id: float(last[id])))
    positions = model.max_positions - len(prompt)
    return Written(list(prompt), tokens, closed, budget, positions, text, cache, states)


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
    token_ids: torch.Tensor | None = None,
) -> Trace:
    """Follow every exit layer along a text that the target wrote.

    Args:
        sampler: the settings the text was decoded with.
        budget: the most new tokens that were allowed.
        end_ids: ids at which a draft ends.
        most_speculations: the longest draft that will be asked for.
        token_ids: what a draft's head scores at first; None for all.
    """
    written = read(model, prompt, decoded, exits, budget=budget, end_ids=end_ids)
    tokens, states, n = written.tokens, written.states, len(written.tokens)
    chance = np.zeros((len(exits), n))
    drafts = np.zeros((len(exits), n), dtype=np.int64)
    scored = scored_tokens(model, written, token_ids)
    for start in range(0, n, ROWS):
        rows = slice(start, min(start + ROWS, n))
        prefix, block = [*prompt, *tokens[:start]], tokens[rows]
        target = None
        if not sampler.greedy:
            target = distribution(sampler.scores(model.head(states[-1:, rows]), prefix, block))
        for index in range(len(exits)):
            logits = _within(model.head(states[index : index + 1, rows]), scored, rows)
            scores = sampler.scores(logits, prefix, block)
            if target is None:
                drafts[index, rows] = greedy_tokens(scores)
                chance[index, rows] = drafts[index, rows] == block
            else:
                chance[index, rows] = torch.minimum(target, distribution(scores)).sum(-1).double().cpu().numpy()
    wrong_length = np.full((len(exits), n), NEVER)
    follow = sampler.greedy and bool(end_ids)
    exact = sampler.greedy and (not follow or Branches.possible(model))
    if follow:
        for index, exit_layer in enumerate(exits):
            wrong = [i for i in range(1, n) if not chance[index, i]]
            first = [int(drafts[index, i]) for i in wrong]
            steps = most_speculations - 1 if exact else 0
            wrong_length[index, wrong] = _wrong_lengths(model, sampler, written, exit_layer, wrong, first, end_ids,
                                                        steps, scored)  # fmt: skip
    return Trace(tuple(exits), chance[:, :, None], wrong_length[:, :, None], written.closed, budget,
                 written.positions, exact)  # fmt: skip


def scored_tokens(model: SelfSpeculativeModel, text: Written, token_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Which tokens a draft's head scores at each of the n new places, [n, vocabulary]; None for all.

    Tokens that were drafted and accepted change nothing, so this holds for all drafts on the way to a place.
    """
    if token_ids is None:
        return None
    vocabulary = DraftVocabulary(token_ids.tolist())
    scored = torch.zeros(len(text.tokens), model.vocab_size, dtype=torch.bool, device=model.device)
    for place, row in enumerate(scored):
        vocabulary.follow([*text.prompt, *text.tokens[:place]])
        row[vocabulary.ids] = True
    return scored


def _within(logits: torch.Tensor, scored: torch.Tensor | None, places: Any) -> torch.Tensor:
    """Logits [rows, vocabulary] of the whole head as a head over part of the vocabulary gives them at these places."""
    return logits if scored is None else logits.masked_fill(~scored[places], OUTSIDE)


def _states(
    model: SelfSpeculativeModel, cache: KVCache, text: Sequence[int], exits: Sequence[int], first: int
) -> torch.Tensor:
    """Hidden states [exits + 1, tokens from `first` on, H] leaving each exit and, last, the whole model."""
    ids, hidden, start, states = model.ids(text), None, 0, []
    for stop in [*exits, model.num_layers]:
        hidden = model.run(ids, cache, 0, start=start, stop=stop, hidden=hidden)
        states.append(hidden[0, first:].to(model.device))  # exits may be on several (`device_map`)
        start = stop
    return torch.stack(states)


def _wrong_lengths(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    text: Written,
    exit_layer: int,
    places: list[int],
    tokens: list[int],
    end_ids: Collection[int],
    steps: int,
    scored: torch.Tensor | None,
) -> list[int]:
    """How long drafts are that leave the text at `places` with the wrong `tokens`, `NEVER` if no end id ends them.

    All of them go on together, token by token, for at most `steps` more tokens.
    """
    lengths = [1 if token in end_ids else NEVER for token in tokens]
    if not places or not steps:
        return lengths
    starts = [len(text.prompt) + place for place in places]
    branches = Branches(model, text.cache, len(text.cached), starts, model.backbone.layers[:exit_layer])
    written = [[token] for token in tokens]
    before = [*text.prompt, *text.tokens]
    for step in range(steps):
        prefixes = [[*before[: starts[w]], *written[w]] for w in range(len(starts))] if sampler.history else []
        scores = row_scores(model, sampler, branches.step(tokens), prefixes, scored, places)
        tokens = [token for _, some in scores for token in greedy_tokens(some)]
        for w, token in enumerate(tokens):
            written[w].append(token)
            if token in end_ids and lengths[w] == NEVER:
                lengths[w] = step + 2
    return lengths


def row_scores(
    model: SelfSpeculativeModel,
    sampler: Sampler,
    hidden: torch.Tensor,
    prefixes: Sequence[Sequence[int]],
    scored: torch.Tensor | None = None,
    places: Sequence[int] = (),
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Processed scores [few, vocabulary] of hidden states [1, rows, H], a few rows at a time. Each row stands after a
    prefix of its own, which is looked at only where a processor looks at the tokens before.

    Args:
        scored: what `scored_tokens` gives; each row is that of a draft on the way to one of the `places`.
    """
    few = 1 if sampler.history else ROWS
    for start in range(0, hidden.shape[1], few):
        rows = slice(start, min(start + few, hidden.shape[1]))
        logits = _within(model.head(hidden[:, rows]), scored, places[rows])
        yield rows, sampler.scores(logits, prefixes[start] if sampler.history else ())


def simulate(trace: Trace, part: Part, num_speculations: int, seed: int = 0) -> Rounds:
    """The rounds of `decoding.decode` on the traced text, counted as it counts them.

    Args:
        seed: of the draws of acceptance, where it is a matter of chance.
    """
    index = trace.parts.index(part)
    _, n, depths = trace.chance.shape
    agrees = (np.random.default_rng(seed).random((n, 1)) < trace.chance[index]).tolist()
    result = Rounds()
    done = 1  # tokens written; the first comes from the prefill
    while done < n:
        limit = max(0, min(num_speculations, trace.budget - done - 1, trace.positions - done))
        accepted = 0
        while accepted < min(limit, n - done) and agrees[done + accepted][min(accepted, depths - 1)]:
            accepted += 1
        length = limit
        if trace.closed and accepted == n - done:  # the draft ends with the id that ends the text
            length = n - done
        elif accepted < limit and done + accepted < n:
            wrong_length = trace.wrong_length[index, done + accepted, min(accepted, depths - 1)]
            length = min(limit, accepted + int(wrong_length))
        left = n - done
        ended = accepted >= left  # the end lies among the accepted drafts
        result.rounds += 1
        result.by_length[length] += 1
        result.drafted += left if ended else length
        result.accepted += min(accepted, left)
        done += min(accepted + 1, left)
    result.decode_tokens = max(0, n - 1 - trace.closed)
    return result
