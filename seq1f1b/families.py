"""Families of orders by name; ``csrc/schedules`` builds them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from seq1f1b import _C
from seq1f1b.flat import MOST, Counts, flat, numbers, whole

__all__ = ["OPTION_KINDS", "Family", "families", "schedules"]


@dataclass(frozen=True)
class Family:
    """A named way to order units.

    Attributes:
        name: name for :func:`seq1f1b.build_schedule`.
        description, source: one line each.
        validity: the rule of the family's counts, in P, M, k, v (ranks, micro-batches, segments, stages per rank).
        stages_per_rank: least v.
        options: names of the family's options.
        splits_backward: whether orders have I and W, unless an option says otherwise.
        has_segments: whether the source cuts micro-batches into segments; drawings and comparisons give other families
            whole micro-batches.
    """

    name: str
    description: str
    source: str
    validity: str
    stages_per_rank: int
    options: tuple[str, ...]
    splits_backward: bool
    has_segments: bool

    def broken_rule(
        self,
        *,
        num_ranks: int,
        num_microbatches: int,
        num_segments: int | Sequence[int] = 1,
        stages_per_rank: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Returns the rule broken by the counts and options; None if the schedule can be built.

        Raises:
            ValueError: a count below 1, an option of another family.
        """
        counts = (num_ranks, num_microbatches, num_segments, stages_per_rank)
        return _C.schedule_broken_rule(*self.request(counts, options or {}))

    def request(
        self,
        counts: tuple[int, int, Any, int],
        options: Mapping[str, Any],
        parents: Sequence[Sequence[int] | None] | None = None,
    ) -> tuple[Any, ...]:
        """Returns the core's arguments: counts, options in the core's order, segments and parents of micro-batches."""
        num_ranks, num_microbatches, segments, stages_per_rank = counts
        rows = of_all = None
        if parents is not None:
            segments = segments if hasattr(segments, "__len__") else [segments] * num_microbatches
            of_all = _parents_of_all(num_microbatches, segments, parents)
        if hasattr(segments, "__len__"):
            rows, segments = numbers("num_segments", "i", segments), max(segments, default=0)
            if len(rows) != num_microbatches:
                rule = f"one number or one for each of {num_microbatches} micro-batches"
                raise ValueError(f"num_segments holds {len(rows)} values, must be {rule}")
        for name in options:
            if name not in self.options:
                raise ValueError(f"{self.name} takes no option '{name}'; it takes {', '.join(self.options) or 'none'}")
        whole("num_ranks", num_ranks, 1, MOST)
        whole("num_microbatches", num_microbatches, 1, MOST)
        whole("num_segments", segments, 1, MOST)
        whole("stages_per_rank", stages_per_rank, 1, MOST)
        form = Counts(num_ranks, num_ranks * stages_per_rank, segments, rows)
        read = tuple(
            _option(form, options[row[0]], *row) if row[0] in options else _LEFT_OUT[row[0]]
            for row in _C.FAMILY_OPTIONS
        )
        return self.name, num_ranks, num_microbatches, segments, stages_per_rank, read, rows, of_all


_LEFT_OUT = {name: None if kind in ("costs", "units", "ranks") else 0 for name, kind, _, _ in _C.FAMILY_OPTIONS}


def _option(form: Counts, value: Any, name: str, kind: str, least: int, words: tuple[str, str]) -> Any:
    """Returns an option in the core's form: a number, 1 or 2 for a word, or an array. The core refuses wrong counts."""
    is_table = kind in ("costs", "units", "ranks")
    columns = form.num_segments if form.rows is None else sum(form.rows)
    if is_table and not 0 < form.num_stages * columns < 2**31:
        return _LEFT_OUT[name]
    if kind == "costs":
        if not hasattr(value, "__len__") or len(value) != 3:
            raise ValueError("costs must hold the costs of F, I and W")
        tables = (flat(form, f"costs of {p}", _C.PER_CELL, table) for p, table in zip("FIW", value, strict=True))
        return sum(tables, array("d"))
    if is_table:
        return flat(form, name, _C.PER_CELL if kind == "units" else _C.PER_RANK, value, "q")
    if kind == "word":
        if value not in words:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{name} is {value!r}, must be '{words[0]}' or '{words[1]}'")
        return words.index(value) + 1
    if kind == "seconds":
        return numbers(name, "d", [value])[0]
    return whole(name, value, least, MOST if kind == "int32" else 2**63 - 1)


@cache
def families() -> tuple[Family, ...]:
    """Returns every family of :func:`seq1f1b.build_schedule`, with its facts."""
    return tuple(Family(*facts) for facts in _C.schedule_families())


OPTION_KINDS = {name: kind for name, kind, _, _ in _C.FAMILY_OPTIONS}
"""By the name of an option: what kind of number it is, a word, costs, or bytes of units or of ranks."""


def schedules() -> tuple[str, ...]:
    """Returns the names for :func:`build_schedule`."""
    return tuple(family.name for family in families())


def _parents_of_all(num_microbatches: int, rows: Any, parents: Sequence[Sequence[int] | None]) -> array[int]:
    if isinstance(parents, int) or any(isinstance(own, int | str) for own in parents):
        raise TypeError(f"parents must hold a list for each micro-batch, or None for a chain, got {parents!r:.80}")
    if len(parents) != num_microbatches:
        raise ValueError(
            f"parents hold {len(parents)} lists, must hold one for each of {num_microbatches} micro-batches"
        )
    whole = [range(-1, k - 1) if own is None else own for k, own in zip(rows, parents, strict=False)]
    for m, (k, own) in enumerate(zip(rows, whole, strict=False)):
        if len(own) != k:
            raise ValueError(f"parents of micro-batch {m} are {len(own)}, must be one for each of its {k} segments")
    return numbers("parents", "i", chain.from_iterable(whole))
