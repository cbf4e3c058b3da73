"""Steps of rows: micro-batches that have each their own length and number of segments; and the orders of such steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from seq1f1b.runtime.arguments import check_agreement, check_int
from seq1f1b.runtime.orders import has_units
from seq1f1b.runtime.stage import Stage
from seq1f1b.schedule import Schedule, build_schedule
from seq1f1b.transport import RankGroup

__all__: list[str] = []

Rows: TypeAlias = Sequence[Sequence[int]]
"""Tokens of the segments of every micro-batch."""

MOST_TOKENS = 1 << 40  # of a segment, as of a sequence (csrc/core/partition.h)
MOST_ORDERS = 16  # kept with their programs
MOST_SHOWN = 200  # characters of the rows in a message


def check_rows(rows: object, num_shards: int = 1) -> None:
    """Raises unless these are the tokens of the segments of every micro-batch."""
    if isinstance(rows, str) or not isinstance(rows, Sequence) or not rows:
        raise TypeError("segment_sizes of a step must be a list: for every micro-batch the tokens of its segments")
    for m, row in enumerate(rows):
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"segment_sizes[{m}] of a step must be a list of token counts, got {type(row).__name__}")
        if not row:
            raise ValueError(f"segment_sizes[{m}] is empty: every micro-batch has at least one segment")
        for s, size in enumerate(row):
            check_int(f"segment_sizes[{m}][{s}]", size, 1)
            if size > MOST_TOKENS:
                raise ValueError(f"segment_sizes[{m}][{s}] is {size}, must be at most {MOST_TOKENS}")
            if size % num_shards:
                raise ValueError(f"segment_sizes[{m}][{s}] is {size}, which {num_shards} shards do not divide")


class PlannedRows(Protocol):
    """A planned step of rows: a :class:`seq1f1b.planning.step_plan.StepPlan`, for one."""

    @property
    def segment_sizes(self) -> Rows:
        """Of every micro-batch the tokens of its segments."""

    @property
    def schedule(self) -> Schedule:
        """The order of the step."""

    @property
    def digest(self) -> str:
        """Equal for equal plans alone."""


def check_equal_rows(group: RankGroup, rows: Rows | None, plan: PlannedRows | None) -> None:
    """Raises, on every rank, unless all were given the same rows and plan, or none. Collective."""
    text = repr(None if rows is None else [list(row) for row in rows])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    if rows is not None and len(text) > MOST_SHOWN:
        text = f"{len(rows)} micro-batches of {sum(map(sum, rows))} tokens ({digest})"
    planned = "None" if plan is None else plan.digest
    own = {"segment_sizes": (digest, text), "plan": (planned, planned)}
    check_agreement(group.all_gather_object(own))


class RankOrder(NamedTuple):
    """An order as one rank runs it: its stages under it, the lowered program and the executor."""

    schedule: Schedule
    stages: Mapping[int, Stage]
    program: Any
    executor: Any


class RowOrders:
    """The orders of a rank's steps of rows, which are kept: by plan, or without one by the numbers of segments.

    Args:
        family: the name of the engine's schedule; None where it was given an order.
        rank, num_ranks: this rank, and how many there are.
    """

    def __init__(self, family: str | None, rank: int, num_ranks: int) -> None:
        self._family, self._rank, self._num_ranks = family, rank, num_ranks
        self._known: dict[tuple[bool, tuple[int, ...] | str], RankOrder] = {}  # the one that was used last at the end

    def find(
        self,
        rows: Rows,
        plan: PlannedRows | None,
        training: bool,
        stages: Mapping[int, Stage],
        complete: Callable[[Schedule], Schedule],
        make: Callable[[Schedule, bool], tuple[Any, Any]],
    ) -> RankOrder:
        """The order of a step of these rows.

        Args:
            plan: brings the order; None: it is that of the engine's family.
            stages: this rank's.
            complete: adds to an order what the engine's options ask for.
            make: the program of an order, and its executor: (schedule, training).
        """
        counts = tuple(map(len, rows))
        key = training, counts if plan is None else plan.digest
        found = self._known.pop(key, None)
        if found is None:
            schedule = complete(self._build(counts, len(stages)) if plan is None else _order_of(plan, counts))
            order, first, recomputes = schedule.ranks[self._rank], schedule.first_cells, has_units(schedule, "R")
            own = {index: stage.with_order(order, first, recomputes) for index, stage in stages.items()}
            found = RankOrder(schedule, own, *make(schedule, training))
            if len(self._known) == MOST_ORDERS:
                del self._known[next(iter(self._known))]
        self._known[key] = found
        return found

    def clear(self) -> None:
        """Forgets them all."""
        self._known.clear()

    def _build(self, counts: tuple[int, ...], stages_per_rank: int) -> Schedule:
        if self._family is None:
            raise ValueError("a step of rows builds an order of its own: give the engine the name of a schedule")
        return build_schedule(
            self._family,
            num_ranks=self._num_ranks,
            num_microbatches=len(counts),
            num_segments=counts,
            stages_per_rank=stages_per_rank,
        )


def _order_of(plan: PlannedRows, counts: tuple[int, ...]) -> Schedule:
    """A plan's order, checked."""
    schedule = plan.schedule
    if schedule.segments_of != counts:
        raise ValueError(f"the plan's rows have {counts} segments, its schedule is for {schedule.segments_of}")
    schedule.check()
    return schedule
