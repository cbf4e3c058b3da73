"""The named ways to order units; ``csrc/schedules`` builds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from seq1f1b import _C

__all__ = ["OPTION_KINDS", "Family", "counts_of_trees", "families", "schedules"]


@dataclass(frozen=True)
class Family:
    """A named way to order units.

    Attributes:
        name: as :func:`seq1f1b.build_schedule` takes it.
        description, source: one line each.
        validity: the rule of its counts, in P, M, k, v (ranks, micro-batches, segments, stages per rank).
        stages_per_rank: least v that it builds.
        options: names of the options that it takes.
        splits_backward: whether its orders have I and W, unless an option says otherwise.
        has_segments: whether its source cuts micro-batches into segments; the others are drawn and compared with whole
            ones.
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
        """The rule that these counts and options break, None where the schedule can be built.

        Raises:
            ValueError: a count below 1, an option that the family does not take.
        """
        counts = (num_ranks, num_microbatches, num_segments, stages_per_rank)
        return _C.schedule_broken_rule(self.name, *counts, dict(options or {}))


def families() -> tuple[Family, ...]:
    """Every family that :func:`seq1f1b.build_schedule` knows, with what is known of it."""
    return tuple(Family(*facts) for facts in _C.schedule_families())


OPTION_KINDS = dict(_C.FAMILY_OPTIONS)
"""By the name of an option: whether it is a number, a word, or costs, or bytes of units or of ranks."""


def schedules() -> tuple[str, ...]:
    """Names that :func:`build_schedule` takes."""
    return tuple(family.name for family in families())


def counts_of_trees(
    counts: tuple[int, int, int | Sequence[int], int], parents: Sequence[Sequence[int] | None]
) -> tuple[tuple[int, int, Sequence[int], int], list[int]]:
    """Writes out what is short for several, one number of segments or None for a chain; the parents of all segments."""
    if isinstance(parents, int) or any(isinstance(own, int | str) for own in parents):
        raise TypeError(f"parents must hold a list for each micro-batch, or None for a chain, got {parents!r:.80}")
    num_ranks, num_microbatches, segments, stages_per_rank = counts
    rows = [segments] * num_microbatches if isinstance(segments, int) else list(segments)
    if len(parents) != num_microbatches:
        raise ValueError(
            f"parents hold {len(parents)} lists, must hold one for each of {num_microbatches} micro-batches"
        )
    whole = [range(-1, k - 1) if own is None else own for k, own in zip(rows, parents, strict=False)]
    for m, (k, own) in enumerate(zip(rows, whole, strict=False)):
        if len(own) != k:
            raise ValueError(f"parents of micro-batch {m} are {len(own)}, must be one for each of its {k} segments")
    return (num_ranks, num_microbatches, rows, stages_per_rank), [*chain.from_iterable(whole)]
