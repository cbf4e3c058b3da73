"""Steps of rows: micro-batches that have each their own length and number of segments."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from seq1f1b.runtime.arguments import check_agreement, check_int
from seq1f1b.transport import RankGroup

__all__: list[str] = []

Rows: TypeAlias = Sequence[Sequence[int]]
"""Tokens of the segments of every micro-batch."""

PlannedRows: TypeAlias = Any
"""A planned step of rows: a :class:`seq1f1b.planning.step_plan.StepPlan`, which a higher room makes."""

MOST_TOKENS = 1 << 40  # of a segment, as of a sequence (csrc/core/partition.h)
MOST_SHOWN = 200  # characters of the rows in a message


def check_rows(rows: object, num_parts: int = 1) -> None:
    """Raises unless these are the tokens of the segments of every micro-batch."""
    if isinstance(rows, str) or not isinstance(rows, Sequence) or not rows:
        raise TypeError("segment_sizes of a step must be a list: for every micro-batch the tokens of its segments")
    for m, row in enumerate(rows):
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"segment_sizes[{m}] of a step must be a list of token counts, got {type(row).__name__}")
        if not row:
            raise ValueError(f"segment_sizes[{m}] is empty: every micro-batch has at least one segment")
        for s, size in enumerate(row):
            if isinstance(size, (list, tuple)):
                raise TypeError(f"segment_sizes[{m}][{s}] is {size}, siblings in one unit: they need parents=")
            check_int(f"segment_sizes[{m}][{s}]", size, 1)
            if size > MOST_TOKENS:
                raise ValueError(f"segment_sizes[{m}][{s}] is {size}, must be at most {MOST_TOKENS}")
            if size % num_parts:
                whose = f"the {num_parts} ranks of sequence_parallel="
                raise ValueError(f"segment_sizes[{m}][{s}] is {size}, which {whose} do not divide")


def check_equal_rows(group: RankGroup, rows: Rows | None, trees: object, plan: PlannedRows | None, order: str) -> None:
    """Raises, on every rank, unless all were given the same rows and plan, or none, and built one order. Collective."""
    planned, some = "None" if plan is None else plan.digest, rows or ()
    long = f"{len(some)} micro-batches of {sum(map(sum, some))} tokens"
    own = {
        "segment_sizes": _shown(repr(None if rows is None else [list(row) for row in rows]), long),
        "plan": (planned, planned),
        "parents": _shown(str(trees), "trees of " + long),
        "schedule": (order, f"order {order}"),
    }
    check_agreement(group.all_gather_object(own))


def _shown(text: str, long: str) -> tuple[str, str]:
    """A digest to compare, and the text that a message shows: other words where it would be long."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return digest, text if len(text) <= MOST_SHOWN else f"{long} ({digest})"
