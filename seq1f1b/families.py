"""The named ways to order units; ``csrc/schedules`` builds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seq1f1b import _C

__all__ = ["OPTION_KINDS", "Family", "families", "schedules"]


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
