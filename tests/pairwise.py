"""Few rows in which every pair of values of any two columns occurs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairwise(*columns: Sequence[Any], seed: int = 0) -> list[tuple[Any, ...]]:
    """Rows that take one value of each column, such that each pair of values occurs in at least one of them.

    Greedy: each row begins with a pair that is still missing, and is filled up with the values that add most pairs.
    """
    rng = random.Random(seed)
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(columns)), 2)
        for a in range(len(columns[i]))
        for b in range(len(columns[j]))
    }
    rows = []
    while missing:
        row = _best_row(missing, [len(column) for column in columns], rng)
        missing -= set(_pairs(row))
        rows.append(tuple(column[value] for column, value in zip(columns, row, strict=True)))
    return rows


def _best_row(missing: set[tuple[int, int, int, int]], sizes: list[int], rng: random.Random) -> list[int]:
    i, a, j, b = min(missing)
    row = {i: a, j: b}
    for column in rng.sample(range(len(sizes)), len(sizes)):
        if column not in row:
            gains = [
                sum(_pair(column, value, *other) in missing for other in row.items()) for value in range(sizes[column])
            ]
            best = max(gains)
            row[column] = rng.choice([value for value, gain in enumerate(gains) if gain == best])
    return [row[column] for column in range(len(sizes))]


def _pairs(row: Sequence[int]) -> list[tuple[int, int, int, int]]:
    return [(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)]


def _pair(i: int, a: int, j: int, b: int) -> tuple[int, int, int, int]:
    return (i, a, j, b) if i < j else (j, b, i, a)
