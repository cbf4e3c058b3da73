"""Few cases out of many, for the plain run; `pytest -m full` runs all."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

__all__ = [
    "by_family",
    "each_value",
    "every_pair",
    "full_only",
    "is_in_slice",
    "one_in",
    "pairs_of",
    "slice_of",
    "whole",
]

takes_full = True  # whether the run takes cases of the full mark; tests/conftest.py says so


def full_only(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases that the plain run leaves out."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def slice_of(grid: Iterable[tuple[Any, ...]], kept: Collection[tuple[Any, ...]]) -> list[Any]:
    """All cases of a grid. Those that are not kept are for the full run."""
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.full) for case in grid]


def whole(grid: Iterable[Any]) -> list[Any]:
    """All cases of a grid, for a test of the full mark.

    The plain run gets none: each of its processes would make thousands of cases and leave them out.
    """
    return list(grid) if takes_full else []


def pairs_of(*columns: Sequence[Any]) -> list[Any]:
    """All cases of columns that are crossed. Those of the plain run hold every pair of values of two columns.

    A value that is a tuple fills several parameters.
    """
    grid = list(map(_flat, itertools.product(*columns)))
    return slice_of(grid, every_pair(grid))


def _flat(case: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(itertools.chain(*(value if isinstance(value, tuple) else (value,) for value in case)))


def each_value(*columns: Sequence[Any]) -> list[Any]:
    """All cases of columns that are crossed. The plain run has as many as the longest column, so each value once.

    A value that is a tuple fills several parameters.
    """
    kept = [_flat(column[i % len(column)] for column in columns) for i in range(max(map(len, columns)))]
    return slice_of(map(_flat, itertools.product(*columns)), kept)


def by_family(grid: Iterable[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """Neighbouring cases of one schedule, whose name comes first."""
    return [list(group) for _, group in itertools.groupby(grid, key=lambda case: case[0])]


def is_in_slice(count: int, name: str) -> bool:
    """True for one name in so many, the same ones whatever names are added."""
    return zlib.crc32(name.encode()) % count == 0


def one_in(count: int, names: Collection[str], *, always: Collection[str] = ()) -> list[Any]:
    """Each name as a parameter. One in so many stays in the plain run, the same ones whatever names are added."""
    kept = [(name,) for name in names if name in always or is_in_slice(count, name)]
    return slice_of(((name,) for name in names), kept)


def every_pair(grid: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Cases of a grid, one after another that which adds most: each pair of values that the grid holds is in one.

    Three columns of ten values have 1,000 cases, and about 100 of them hold all pairs. What fails only where three
    values meet is for the whole grid.
    """
    parts = [_values_and_pairs(case) for case in grid]
    left = set().union(*parts)
    chosen = []
    while left:
        best = max(range(len(grid)), key=lambda i: len(parts[i] & left))
        chosen.append(grid[best])
        left -= parts[best]
    return chosen


def _values_and_pairs(case: tuple[Any, ...]) -> set[Any]:
    values = list(enumerate(map(repr, case)))
    return {*values, *itertools.combinations(values, 2)}
