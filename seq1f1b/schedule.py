"""Schedules as data: built, checked, simulated, written and read back before any tensor exists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from seq1f1b import _core
from seq1f1b.draw import timeline_text

__all__ = ["Family", "Schedule", "Simulation", "Timeline", "Unit", "build_schedule", "families", "schedules"]


class Unit(NamedTuple):
    """One pass of one stage over one segment of one micro-batch; ``str(unit)`` is its text, ``F1.0``.

    ``kind`` is ``"F"`` (forward), ``"B"`` (backward), or, where an order splits the backward, ``"I"`` and ``"W"``
    (gradients of the input and of the weights).
    """

    kind: str
    stage: int
    microbatch: int
    segment: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.segment}"


Timeline = Sequence[Sequence[tuple[Unit, float, float]]]
"""Per rank, its units in run order with start and end in seconds: simulated or measured."""

Costs = float | Sequence[Sequence[float]]
"""Seconds per unit: one number, or ``[stage][segment]``."""


class Schedule:
    """The order in which every rank runs its units.

    Made by :func:`build_schedule`, :meth:`from_text`, :meth:`from_csv`, or from the units of every rank. Nothing is
    checked beyond the placement (a stage lives on one rank) until :meth:`check`, which :meth:`simulate` and the engine
    call.
    """

    def __init__(self, ranks: Iterable[Iterable[Unit]]) -> None:
        lines = [" ".join(f"[{unit.stage}]{unit}" for unit in order) for order in ranks]
        for rank, line in enumerate(lines):
            if not line:
                raise ValueError(f"rank {rank} has no units")
        self._adopt(_core.schedule_from_text("\n".join(lines)))

    def _adopt(self, handle: Any) -> None:
        self.handle = handle  # of the C core; the engine lowers it
        self.num_ranks, self.num_stages, self.num_microbatches, self.num_segments = _core.schedule_counts(handle)
        self.rank_of_stage = tuple(_core.schedule_placement(handle))
        self._ranks: tuple[tuple[Unit, ...], ...] | None = None
        self.pairs = tuple(tuple(_core.schedule_pairs(handle, rank)) for rank in range(self.num_ranks))
        """Per rank the positions i at which units i, an F, and i + 1, a B of another micro-batch, are a pair."""

    @classmethod
    def _from_handle(cls, handle: Any) -> Schedule:
        schedule = cls.__new__(cls)
        schedule._adopt(handle)
        return schedule

    @property
    def ranks(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of every rank in run order."""
        if self._ranks is None:
            self._ranks = tuple(
                tuple(map(Unit._make, _core.schedule_units(self.handle, rank))) for rank in range(self.num_ranks)
            )
        return self._ranks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.ranks == other.ranks and self.pairs == other.pairs

    def __hash__(self) -> int:
        return hash(self.ranks)

    def __repr__(self) -> str:
        return (
            f"<Schedule: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{self.num_segments} segments>"
        )

    def forward_only(self) -> Schedule:
        """The same order without backward units: what evaluation runs."""
        return self._from_handle(_core.schedule_forward_only(self.handle))

    def check(self, max_live_units: int | None = None) -> None:
        """Holds the order to its rules.

        Args:
            max_live_units: cap on the units of one rank between their forward and the end of their backward.
        Raises:
            ScheduleError: names the rule and the units.
            ValueError: ``max_live_units`` is below 1.
        """
        if max_live_units is not None and max_live_units < 1:
            raise ValueError(f"max_live_units is {max_live_units}, must be at least 1")
        _core.schedule_check(self.handle, max_live_units or 0)

    def simulate(
        self,
        forward: Costs = 1.0,
        backward: Costs = 2.0,
        weight: Costs | None = None,
        transfer: float = 0.0,
        *,
        bandwidth: float | None = None,
        message_bytes: int | Sequence[int] = 0,
        send: float = 0.0,
        prefetch: int = 1,
        overlap: float = 0.0,
        durations: Sequence[Sequence[float]] | None = None,
        segment_sizes: Sequence[int] | None = None,
        unit_bytes: int | Sequence[Sequence[int]] | None = None,
    ) -> Simulation:
        """When every unit starts and ends if it takes the given time.

        Simulates the program that the engine runs, with its places and credits.

        Args:
            forward, backward: seconds per unit, a number or ``[stage][segment]``; ``backward`` is the full B.
            weight: share of ``backward`` that is W where the order splits it (the rest is I); default: half.
            transfer: seconds from the end of a message's transfer to its arrival (latency).
            bandwidth: bytes per second of each directed edge between two stages; None: infinite.
            message_bytes: bytes of one message, a number or one per segment; gradients are as large as activations.
            send: seconds that a sender itself spends on a message.
            prefetch: places of a receiver beyond those it needs; a sender without a free place waits.
            overlap: share of the shorter unit of a pair that the other one hides, 0 to 1.
            durations: seconds of every unit, per rank in run order, in place of ``forward``, ``backward``, ``weight``:
                replays what was measured.
            segment_sizes: tokens of each segment, for ``peak_tokens``.
            unit_bytes: activation bytes of a unit, a number or ``[stage][segment]``, for ``peak_bytes``.
        Raises:
            ScheduleError: the order breaks a rule.
            ValueError: a cost is negative or not finite, or of the wrong shape.
        """
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"bandwidth is {bandwidth}, must be above 0")
        fully = self._per_unit(backward, "backward")
        weights = self._per_unit(weight, "weight") if weight is not None else [0.5 * cost for cost in fully]
        inputs = [cost - part for cost, part in zip(fully, weights, strict=True)]
        if weight is not None and min(inputs) < 0:
            raise ValueError("weight is more than backward, of which it is a part")
        if segment_sizes is not None and len(segment_sizes) != self.num_segments:
            raise ValueError(f"segment_sizes holds {len(segment_sizes)} values, must hold {self.num_segments}")
        sizes = message_bytes if isinstance(message_bytes, Sequence) else [message_bytes] * self.num_segments
        program = _core.program_lower(self.handle, prefetch)
        makespan, span, busy, wait, start, end = _core.program_simulate(
            program,
            (self._per_unit(forward, "forward"), fully, inputs, weights),
            durations,
            transfer,
            0.0 if bandwidth is None else 1.0 / bandwidth,
            sizes,
            send,
            overlap,
        )
        timeline = tuple(tuple(zip(*track, strict=True)) for track in zip(self.ranks, start, end, strict=True))
        num_cells = self.num_stages * self.num_segments
        return Simulation(
            makespan=makespan,
            span=tuple(span),
            busy=tuple(busy),
            wait=tuple(wait),
            bubble=tuple(makespan - seconds for seconds in busy),
            peak=self._peak(program, [1] * num_cells),
            peak_tokens=None if segment_sizes is None else self._peak(program, [*segment_sizes] * self.num_stages),
            peak_bytes=None if unit_bytes is None else self._peak(program, self._per_unit(unit_bytes, "unit_bytes")),
            timeline=timeline,
        )

    def _per_unit(self, costs: Any, name: str) -> list[Any]:
        """One value per (stage, segment), flat."""
        return _per_unit(costs, name, self.num_stages, self.num_segments)

    def _peak(self, program: Any, weights: list[int]) -> tuple[int, ...]:
        return tuple(_core.program_rank_peak(program, rank, weights) for rank in range(self.num_ranks))

    def to_text(self) -> str:
        """One line per rank: ``F0.0 F0.1 B0.1 B0.0``.

        A unit names its stage, ``[2]F1.0``, unless every rank ``r`` holds stage ``r`` and no other. Units that are a
        pair stand in brackets, ``(F5.0;B1.0)``.
        """
        return _core.schedule_to_text(self.handle)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads what :meth:`to_text` writes.

        One line per rank, units separated by blanks; ``#`` starts a comment and empty lines do not count. Placement is
        read from the stage prefixes: for two ranks with stages in V order, the first line holds ``[0]`` and ``[3]``,
        the second ``[1]`` and ``[2]``. Without prefixes rank ``r`` holds stage ``r``.

        Raises:
            ValueError: names line and unit.
        """
        return cls._from_handle(_core.schedule_from_text(text))

    def to_csv(self) -> str:
        """Torch's action CSV, one line per rank: ``0F3`` has flat index 3 = microbatch * num_segments + segment.

        A pair is ``(0F3;7B1)OVERLAP_F_B``.
        """
        return _core.schedule_to_csv(self.handle)

    @classmethod
    def from_csv(cls, text: str, *, num_segments: int) -> Schedule:
        """Reads torch's compute-only action CSV, for instance a file of ``_dump_csv`` read as text.

        Empty cells are bubbles: they say nothing about the order. Cells that move data or parameters are refused.

        Raises:
            ValueError: names line and cell.
        """
        return cls._from_handle(_core.schedule_from_csv(text, num_segments))


def _per_unit(costs: Any, name: str, num_stages: int, num_segments: int) -> list[Any]:
    """One value per (stage, segment), flat."""
    if not hasattr(costs, "__len__"):
        return [costs] * (num_stages * num_segments)
    if len(costs) != num_stages or any(len(row) != num_segments for row in costs):
        raise ValueError(f"{name} must be a number or hold {num_stages} stages of {num_segments} segments each")
    return [cost for row in costs for cost in row]


@dataclass(frozen=True)
class Simulation:
    """What one step costs. Tuples hold one value per rank; times in seconds.

    Attributes:
        makespan: first start to last end over all ranks.
        span: first start to last end of the rank.
        busy: sum of its units.
        wait: time it waits for messages and for free places of its receivers, between its units and around them.
        bubble: makespan less busy.
        peak: most units live at once, from forward to the end of backward.
        peak_tokens: the same in tokens, where segment sizes were given.
        peak_bytes: the same in bytes, where bytes per unit were given.
        timeline: (unit, start, end) of every unit in run order.
    """

    makespan: float
    span: tuple[float, ...]
    busy: tuple[float, ...]
    wait: tuple[float, ...]
    bubble: tuple[float, ...]
    peak: tuple[int, ...]
    peak_tokens: tuple[int, ...] | None
    peak_bytes: tuple[int, ...] | None
    timeline: Timeline

    @property
    def bubble_ratio(self) -> float:
        """Share of the ranks' time that is bubble."""
        return sum(self.bubble) / (self.makespan * len(self.bubble)) if self.makespan > 0 else 0.0

    def to_text(self, width: int = 100) -> str:
        """The timeline as text, one line per rank, in ``width`` columns."""
        return timeline_text(self.timeline, width=width)


@dataclass(frozen=True)
class Family:
    """A named way to order units.

    Attributes:
        name: as :func:`build_schedule` takes it.
        description, source: one line each.
        validity: the rule of its counts, in P, M, k, v (ranks, micro-batches, segments, stages per rank).
        stages_per_rank: least v that it builds.
        options: names of the options that it takes.
    """

    name: str
    description: str
    source: str
    validity: str
    stages_per_rank: int
    options: tuple[str, ...]

    def broken_rule(
        self,
        *,
        num_ranks: int,
        num_microbatches: int,
        num_segments: int = 1,
        stages_per_rank: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """The rule that these counts and options break, None where the schedule can be built.

        Raises:
            ValueError: a count below 1, an option that the family does not take.
        """
        counts = (num_ranks, num_microbatches, num_segments, stages_per_rank)
        return _core.schedule_broken_rule(self.name, *counts, _flat_options(options, num_ranks, *counts[2:]))


def families() -> tuple[Family, ...]:
    """Every family that :func:`build_schedule` knows, with what is known of it."""
    return tuple(
        Family(name, description, source, validity, stages_per_rank, tuple(options))
        for name, description, source, validity, stages_per_rank, options in _core.schedule_families()
    )


def _flat_options(
    options: Mapping[str, Any] | None, num_ranks: int, num_segments: int, stages_per_rank: int
) -> dict[str, Any]:
    """The options with costs and bytes as flat lists, [stage * num_segments + segment], as the core reads them."""
    flat = dict(options or {})
    num_stages = num_ranks * stages_per_rank
    if "costs" in flat:
        names = ("F", "I", "W")
        if not isinstance(flat["costs"], Sequence) or len(flat["costs"]) != len(names):
            raise ValueError("costs must hold the costs of F, I and W")
        flat["costs"] = [
            _per_unit(costs, f"costs of {name}", num_stages, num_segments)
            for name, costs in zip(names, flat["costs"], strict=True)
        ]
    if "unit_bytes" in flat:
        flat["unit_bytes"] = _per_unit(flat["unit_bytes"], "unit_bytes", num_stages, num_segments)
    if "cap_bytes" in flat and not hasattr(flat["cap_bytes"], "__len__"):
        flat["cap_bytes"] = [flat["cap_bytes"]] * num_ranks
    return flat


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int = 1,
    stages_per_rank: int = 1,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """The order of a named family; :func:`families` says what each is, from whom, and for which counts.

    Args:
        name: one of :func:`schedules`.
        num_ranks, num_microbatches, num_segments, stages_per_rank: P, M, k, v.
        options: what a family may be told beyond its counts; it takes those that ``families()`` lists.
            ``group``: micro-batches that go forward, and back, together.
            ``round``: interleaving, a round holds at least so many micro-batches.
            ``extra_warmup``: more forwards before the first backward, for each stage behind the rank's own: with slow
            transfers it trades memory for time.
            ``cap``: (stage, segment) units that a rank holds at most, where the backward is split; more than the
            family's own lets W wait for a bubble.
            ``unit_bytes``, ``cap_bytes``: the same in bytes: of a unit, from F to the end of W, a number or
            ``[stage][segment]``, and of a rank, a number or one per rank.
            ``transfer``: seconds of a message between two ranks.
            ``placement``: ``"loop"`` or ``"v"``, for ``"auto"``; it takes the better one unless given.
            ``costs``: of F, I and W, each a number or ``[stage][segment]``, where the backward is split: W go where
            these leave bubbles; the order is never worse under them than the one for equal costs. ``"auto"`` takes the
            whole order from them, and is never worse than a named family within the same cap.

    Raises:
        ValueError: unknown name or option, or a number out of range.
        ScheduleError: the family cannot be built for these counts; names its rule.
    """
    if name not in schedules():
        raise ValueError(f"there is no schedule named {name!r}; there are {', '.join(schedules())}")
    counts = (num_ranks, num_microbatches, num_segments, stages_per_rank)
    flat = _flat_options(options, num_ranks, num_segments, stages_per_rank)
    return Schedule._from_handle(_core.schedule_build(name, *counts, flat))


def schedules() -> tuple[str, ...]:
    """Names that :func:`build_schedule` takes."""
    return tuple(family.name for family in families())
