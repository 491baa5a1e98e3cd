"""The exact distribution of what a program with random draws returns, by following every branch.

`law(run)` runs `run` again and again. Each time it draws, by `draw` or by comparing `torch.rand` with something, the
outcome is chosen here; the probabilities of all outcomes along a path multiply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from self_speculation import sampling

NEGLIGIBLE = 1e-14  # branches less probable than this are left out; the law's total says how much is missing

Law = dict[tuple[int, ...], float]


class Branches:
    """The choice points of one run; `path` says which branch to take at the first ones, later ones take branch 0."""

    def __init__(self, path: list[int]):
        self.path = path
        self.points: list[list[tuple[Any, float]]] = []

    def choose(self, outcomes: list[tuple[Any, float]]) -> Any:
        """One of the (value, probability) outcomes that are not negligible."""
        outcomes = [outcome for outcome in outcomes if outcome[1] > NEGLIGIBLE]
        self.points.append(outcomes)
        return outcomes[self.taken(len(self.points) - 1)][0]

    def taken(self, point: int) -> int:
        return self.path[point] if point < len(self.path) else 0

    def probability(self) -> float:
        """Of all choices but the last."""
        result = 1.0
        for point, outcomes in enumerate(self.points[:-1]):
            result *= outcomes[self.taken(point)][1]
        return result

    def next_path(self) -> list[int] | None:
        """The next path in depth-first order; the last choice point needs no runs of its own."""
        for point in range(len(self.points) - 2, -1, -1):
            if self.taken(point) + 1 < len(self.points[point]):
                return [*(self.taken(earlier) for earlier in range(point)), self.taken(point) + 1]
        return None


class Uniform:
    """Numbers drawn uniformly from [0, 1), times `scale`: what a comparison with them gives is a choice point."""

    def __init__(self, branches: Branches, scale: torch.Tensor):
        self.branches, self.scale = branches, scale

    def __mul__(self, factor: torch.Tensor) -> Uniform:
        return Uniform(self.branches, self.scale * factor)

    __rmul__ = __mul__

    def __lt__(self, bound: torch.Tensor) -> torch.Tensor:
        below = torch.where(self.scale > 0, bound / self.scale, (bound > 0).to(self.scale.dtype)).clamp(0, 1).tolist()
        outcomes = []
        for pattern in product((True, False), repeat=len(below)):
            probability = 1.0
            for is_below, chance in zip(pattern, below, strict=True):
                probability *= chance if is_below else 1 - chance
            outcomes.append((pattern, probability))
        return torch.tensor(self.branches.choose(outcomes))

    def __ge__(self, bound: torch.Tensor) -> torch.Tensor:
        return ~(self < bound)

    __le__, __gt__ = __lt__, __ge__  # a single point has probability 0


class ChosenTorch:
    """torch, but for its random draws."""

    def __init__(self, branches: Branches):
        self.branches = branches

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def rand(self, count: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Uniform:
        return Uniform(self.branches, torch.ones(count, dtype=dtype))


@contextmanager
def _drawing(branches: Branches) -> Iterator[None]:
    def chosen(probs: torch.Tensor, generator: torch.Generator | None) -> int:
        assert probs.ndim == 1
        probs = probs.double() / probs.double().sum()
        return branches.choose(list(enumerate(probs.tolist())))

    real = sampling.draw
    sampling.torch, sampling.draw = ChosenTorch(branches), chosen  # type: ignore[assignment]
    try:
        yield
    finally:
        sampling.torch, sampling.draw = torch, real


def law(run: Callable[[], list[int]]) -> Law:
    """Probability of each token sequence that `run` may return; its last token must be the last thing it draws."""
    result: Law = defaultdict(float)
    path: list[int] | None = []
    while path is not None:
        branches = Branches(path)
        with _drawing(branches):
            tokens = run()
        last = branches.points[-1]
        assert tokens[-1] == last[0][0]
        for token, probability in last:
            result[(*tokens[:-1], token)] += branches.probability() * probability
        path = branches.next_path()
    return dict(result)


def distance(first: Law, second: Law) -> float:
    """Total variation: half the sum of the differences."""
    return sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second}) / 2
