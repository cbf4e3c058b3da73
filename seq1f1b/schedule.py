"""Schedules as data: built, checked, simulated, written and read back before any tensor exists."""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from seq1f1b import _C
from seq1f1b.simulation import PeakMemory, Simulation, StepMemory
from seq1f1b.tables import flat_rows, per_place, per_unit

__all__ = [
    "Family",
    "PeakMemory",
    "Schedule",
    "Simulation",
    "StepMemory",
    "Timeline",
    "Unit",
    "build_schedule",
    "families",
    "schedules",
]


class Unit(NamedTuple):
    """One pass of one stage over one segment of one micro-batch; ``str(unit)`` is its text, ``F1.0``.

    ``kind`` is ``"F"`` (forward), ``"B"`` (backward), or, where an order splits the backward, ``"I"`` and ``"W"``
    (gradients of the input and of the weights). ``"R"`` recomputes: its F kept the stage's input alone, and R runs the
    stage again for the backward. Where the vocabulary is spread over the ranks, each has ``"S"`` (logits of its shard)
    and ``"T"`` (the loss, from the statistics of all shards, and the shard's gradients); their stage is the rank. So it
    is with ``"E"`` (a shard's rows of the input embedding) and ``"G"`` (their gradients). What F saved may be moved to
    a tier, a file: it begins to go at ``"O"``, its memory is free from ``"A"`` on, at ``"L"`` it begins to come back.
    """

    kind: str
    stage: int
    microbatch: int
    segment: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.segment}"


def unit_of(unit: tuple[int, int, int, int]) -> Unit:
    """The unit that the C core calls (number of the pass, stage, micro-batch, segment)."""
    number, stage, microbatch, segment = unit
    return Unit(_C.PASSES[number], stage, microbatch, segment)


def inputs_of(units: Iterable[Unit]) -> dict[Unit, list[Unit]]:
    """Those of the units whose results each of them takes, as the core has it."""
    units = set(units)
    num_stages = 1 + max(unit.stage for unit in units)
    num_microbatches = 1 + max(unit.microbatch for unit in units)
    segments_of: dict[int, int] = {}
    for unit in units:
        segments_of[unit.microbatch] = max(segments_of.get(unit.microbatch, 0), unit.segment + 1)
    passes = sum(1 << _C.PASSES.index(kind) for kind in {unit.kind for unit in units})
    num_shards = 1 + max((unit.stage for unit in units if unit.kind in "SE"), default=0)
    after = {}
    for unit in units:
        number = _C.PASSES.index(unit.kind), *unit[1:]
        k = segments_of[unit.microbatch]
        inputs = _C.unit_inputs(num_stages, num_microbatches, k, passes, number, num_shards)
        after[unit] = [other for other in map(unit_of, inputs) if other in units]
    return after


Timeline = Sequence[Sequence[tuple[Unit, float, float]]]
"""Per rank, its units in run order with start and end in seconds: simulated or measured."""

Costs = float | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
"""Seconds per unit: one number, or ``[stage][segment]``; ``[stage][micro-batch][segment]`` in an order of rows."""


_CELL_KINDS = ".RL"  # by the core's number: what F saves is kept, recomputed, moved
_CELL_LETTERS = bytes.maketrans(bytes(range(len(_CELL_KINDS))), _CELL_KINDS.encode())


class Schedule:
    """The order in which every rank runs its units.

    Made by :func:`build_schedule`, :meth:`from_text`, :meth:`from_csv`, or from the units of every rank. Nothing is
    checked beyond the placement (a stage lives on one rank) until :meth:`check`, which :meth:`simulate` and the engine
    call.

    Attributes:
        prefetch: receive places of a rank beyond the most that the order needs at once.
        fills: whether a rank that waits for a message runs W meanwhile, see :meth:`replace`.
    """

    def __init__(self, ranks: Iterable[Iterable[Unit]]) -> None:
        orders = tuple(map(tuple, ranks))
        for rank, order in enumerate(orders):
            if not order:
                raise ValueError(f"rank {rank} has no units")
        self._adopt(_C.schedule_from_units(orders, 0))

    def _adopt(self, handle: Any, like: Schedule | None = None) -> None:
        self.handle = handle  # of the C core; the engine lowers it
        self.prefetch: int = 1 if like is None else like.prefetch
        self.fills: bool = like is not None and like.fills
        self.num_ranks, self.num_stages, self.num_microbatches, self.num_segments = _C.schedule_counts(handle)
        self.rank_of_stage = tuple(_C.schedule_placement(handle))
        rows = _C.schedule_rows(handle)
        self.rows: tuple[int, ...] | None = None if rows is None else tuple(rows)
        self._units: dict[int, tuple[Unit, ...]] = {}
        self._lowered: Any = None  # what the core reads again in every simulation

    @classmethod
    def _from_handle(cls, handle: Any, like: Schedule | None = None) -> Schedule:
        """An order of the core. like: one that runs with the places, and fills waits, as this one is to."""
        schedule = cls.__new__(cls)
        schedule._adopt(handle, like)
        return schedule

    def replace(self, *, prefetch: int | None = None, weights: str | None = None) -> Schedule:
        """The same units in the same order, but run with other places, or with W elsewhere.

        Args:
            prefetch: receive places of a rank beyond the most that the order needs at once; a sender without a free
                place waits. None: as they are.
            weights: when weight gradients are made. ``"planned"``: where the order has them. ``"fill"``: also while a
                rank waits for a message, product by product and in the order's own sequence, so that gradients are
                bit-equal from run to run; at the latest where the order has them, so that memory stays as planned. The
                engine runs an order of whole backwards with ``"fill"`` as :meth:`defer_weights` of it. None: as it is.
        Raises:
            ValueError, TypeError: ``prefetch`` is below 0 or no int, ``weights`` is something else.
        """
        other = copy.copy(self)
        if prefetch is not None:
            if not isinstance(prefetch, int) or isinstance(prefetch, bool):
                raise TypeError(f"prefetch must be an int, got {type(prefetch).__name__}")
            if prefetch < 0:
                raise ValueError(f"prefetch is {prefetch}, must be at least 0")
            other.prefetch, other._lowered = prefetch, self._lowered if prefetch == self.prefetch else None
        if weights is not None:
            if weights not in ("planned", "fill"):
                raise ValueError(f"weights is {weights!r}, must be 'planned' or 'fill'")
            other.fills = weights == "fill"
        return other

    @property
    def segments_of(self) -> tuple[int, ...]:
        """Segments of every micro-batch. In an order of rows, ``rows`` holds the same; it is None in others."""
        return self.rows or (self.num_segments,) * self.num_microbatches

    @property
    def first_cells(self) -> tuple[int, ...]:
        """For each micro-batch the number of its first segment, if those of all are counted on; at the end, of all."""
        return tuple(accumulate(self.segments_of, initial=0))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Letters of the passes that the order has: those of an order with whole backwards are F and B."""
        return frozenset(_C.schedule_kinds(self.handle))

    def units_of(self, rank: int) -> tuple[Unit, ...]:
        """The units of one rank in run order."""
        units = self._units.get(rank)
        if units is None:
            units = self._units[rank] = tuple(map(unit_of, _C.schedule_units(self.handle, rank)))
        return units

    @cached_property
    def ranks(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of every rank in run order."""
        return tuple(map(self.units_of, range(self.num_ranks)))

    @property
    def digest(self) -> str:
        """16 digits of the units and their order: alike in equal schedules of any process, and by chance in others."""
        return f"{_C.schedule_digest(self.handle):016x}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule) or (self.prefetch, self.fills) != (other.prefetch, other.fills):
            return False
        return _C.schedule_equal(self.handle, other.handle)

    def __hash__(self) -> int:
        return hash((self.prefetch, self.fills, _C.schedule_digest(self.handle)))

    def __repr__(self) -> str:
        return (
            f"<Schedule: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{self.num_segments if self.rows is None else self.rows} segments>"
        )

    def forward_only(self) -> Schedule:
        """The same order without backward units: what evaluation runs."""
        return self._from_handle(_C.schedule_forward_only(self.handle), like=self)

    def defer_weights(self, max_live_units: int | None = None) -> Schedule:
        """The same order with every backward split, and W as late as memory allows.

        Each W stands where its rank would else hold more units; the Ws of a rank stand in the order of its Is. If W
        runs in waits (``weights="fill"`` of :meth:`replace`), such an order has most to fill them with.

        Args:
            max_live_units: cap on the units of one rank between their forward and their W; None: the most that any rank
                of this order holds, so that the largest rank holds no more than before.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: ``max_live_units`` is below 1, or below what a rank holds whenever its Ws run.
        """
        if max_live_units is not None and max_live_units < 1:
            raise ValueError(f"max_live_units is {max_live_units}, must be at least 1")
        return self._from_handle(_C.schedule_defer_weights(self.handle, max_live_units or 0), like=self)

    def recompute(self, units: str | Callable[[Unit], bool] = "all") -> Schedule:
        """The same order with an R just before the backward of each of these units.

        R needs no message, so it runs while the gradient that the backward waits for is on its way. A unit that has an
        R keeps it where it is, and one that is moved to a tier stays so; from text an order may have its Rs anywhere
        between F and the backward.

        Args:
            units: ``"all"``, ``"none"``, or a callable that is given each unit's F and says whether it is recomputed.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: ``units`` is something else.
        """
        check_units("recompute", units)
        if units == "none":
            return self
        return self._from_handle(_C.schedule_recompute(self.handle, self._chosen(units)), like=self)

    def offload(self, units: str | Callable[[Unit], bool] = "all") -> Schedule:
        """The same order, in which what these units save is away, in a tier, while nobody reads it.

        O stands right after F, A one unit later and L one unit before the backward: the rank runs one unit beside the
        way out, and one beside the way back. A unit stays here if it would not be away while another one runs, or if it
        is recomputed. From text an order may have them elsewhere: O, A and L in this order between F and the backward,
        at most one unit of a rank on its way out, and two on their way back.

        Args:
            units: ``"all"``, ``"none"``, or a callable that is given each unit's F and says whether it is moved.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: ``units`` is something else, or this order moves units already.
        """
        check_units("offload_units", units)
        if units == "none":
            return self
        return self._from_handle(_C.schedule_offload(self.handle, self._chosen(units)), like=self)

    def fit(
        self,
        memory: StepMemory,
        room: int | Sequence[int],
        by: Sequence[str] = ("recompute",),
        *,
        message_bytes: int | Sequence[int] = 0,
        statistics_bytes: int | Sequence[int] = 0,
        tier: Costs | None = None,
        **seconds: Any,
    ) -> Schedule:
        """The same order, in which as few units as possible are recomputed, or moved to a tier, so that it fits.

        Whenever a rank would hold more than its room, the live unit whose backward is furthest away gives up what its F
        has saved. With both ways open a unit moves where the tier is back in time for it, and is recomputed elsewhere.
        If the room is too little for any choice the order still holds more: ``peak_memory`` tells.

        Args:
            memory: bytes of what units hold.
            room: bytes that a rank may hold, of the kinds that live in units or in receive places; a number, or one
                for each rank. Weights, the optimizer and ``memory.logits`` come on top.
            by: what units may do, ``"recompute"``, ``"offload"``, or both.
            message_bytes, statistics_bytes: as of :meth:`simulate`.
            tier: seconds of a unit's way out, or back, as of :meth:`simulate`; needed for both ways together.
            seconds: of the passes, of moving, and of messages, as of :meth:`simulate`; used for both ways together.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: it recomputes or moves units already, ``by`` is something else, or a number is out of range.
        """
        if not by or not set(by) <= {"recompute", "offload"}:
            raise ValueError(f"by is {by!r}, must hold 'recompute', 'offload' or both")
        sizes, statistics_sizes = self._per_segment(message_bytes), self._per_segment(statistics_bytes)
        start = None
        if len(set(by)) == 2:
            start = self.simulate(**seconds, message_bytes=message_bytes).start
        kinds = _C.program_fit(
            self._lower(),
            self._bytes(memory, sizes, statistics_sizes),
            self._room(room),
            "recompute" in by,
            "offload" in by,
            start,
            None if tier is None else self._per_unit(tier, "tier"),
        )
        return self._with_kinds(kinds)

    def _room(self, room: int | Sequence[int]) -> list[int]:
        rooms = per_place(room, "room", self.num_ranks, "rank")
        if min(rooms) < 0:
            raise ValueError(f"room holds {min(rooms)} bytes, must be at least 0")
        return rooms

    def _with_kinds(self, kinds: bytes) -> Schedule:
        """Changes the cells of all stages: a byte says 0 it stays as it is, 1 it is recomputed, 2 it is moved."""
        order = self
        for kind, change in ((1, _C.schedule_recompute), (2, _C.schedule_offload)):
            if kind in kinds:
                order = self._from_handle(change(order.handle, bytes(x == kind for x in kinds)), like=self)
        return order

    def cell_kinds(self) -> tuple[str, ...]:
        """What becomes of what each unit saves: a text for each stage, with a letter for each segment, and a blank
        between micro-batches. ``.`` it is kept, ``R`` the unit is recomputed, ``L`` it is moved, and comes back.

        :meth:`with_cell_kinds` is the way back.
        """
        letters = _C.schedule_cell_kinds(self.handle).translate(_CELL_LETTERS).decode()
        cells = self.first_cells
        starts = range(0, len(letters), cells[-1])
        return tuple(" ".join(letters[at + a : at + b] for a, b in pairwise(cells)) for at in starts)

    def with_cell_kinds(self, rows: Sequence[str]) -> Schedule:
        """The same order with an R, or with O, A and L, of the units that :meth:`cell_kinds` names so.

        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: the texts are not of this order's counts, or it has such units already.
        """
        S, M, counts = self.num_stages, self.num_microbatches, list(self.segments_of)
        words = [row.split(" ") for row in rows]
        if len(rows) != S or any(list(map(len, row)) != counts for row in words):
            each = counts[0] if len(set(counts)) == 1 else counts
            raise ValueError(f"units must be {S} texts, one per stage, each of {M} words of {each} letters")
        letters = "".join(map("".join, words))
        if not set(letters) <= set(_CELL_KINDS):
            raise ValueError(f"units are {sorted(set(letters))}, must be '.', 'R' or 'L'")
        return self._with_kinds(bytes(map(_CELL_KINDS.index, letters)))

    def _cells(self) -> Iterator[tuple[int, int, int]]:
        """Stage, micro-batch and segment of each cell of all stages, as the core numbers them."""
        for stage, microbatch in product(range(self.num_stages), range(self.num_microbatches)):
            for segment in range(self.segments_of[microbatch]):
                yield stage, microbatch, segment

    def _chosen(self, units: str | Callable[[Unit], bool]) -> bytes | None:
        """A byte for each cell of all stages; None: all."""
        if isinstance(units, str):
            return None
        return bytes(bool(units(Unit("F", *cell))) for cell in self._cells())

    def spread_vocabulary(
        self, ahead: int | None = None, *, head: bool = True, embedding: bool = False, **seconds: Any
    ) -> Schedule:
        """The same order with the rows of the vocabulary spread over the ranks.

        With S and T of every segment, the last stage waits for them between its forward and its backward, so forwards
        go ahead of all else. With E and G, the first stage waits for E.

        Args:
            ahead: every unit that is no F stands behind so many more Fs of its rank; None: 0, 1 or 2, whichever this
                order allows and makes it shortest; 0 without ``head``.
            head, embedding: whether the output layer is spread (S and T), and the input embedding (E and G).
            seconds: of the passes, ``forward`` to ``embed_gradient`` of :meth:`simulate`: the new units stand where
                each rank can run them first.
        Raises:
            ScheduleError: this order breaks a rule, holds such units already, or rank r does not hold stage r; with Fs
                so far ``ahead`` ranks would wait for each other, as one of them needs a B that it went ahead of.
            ValueError: a number is out of range.
        Source: vocabulary parallelism, arXiv:2411.05288.
        """
        in_order = tuple(map(self._pass_seconds(**seconds).__getitem__, _C.PASSES))

        def spread(more: int) -> Schedule:
            spread_over = _C.schedule_spread_vocabulary(self.handle, head + 2 * embedding, more, in_order)
            return self._from_handle(spread_over, like=self)

        orders = [spread(ahead or 0)]
        for more in (1, 2) if ahead is None and head else ():
            with contextlib.suppress(_C.ScheduleError):  # an order with few live units may not let Fs go ahead
                orders.append(spread(more))
        return min(orders, key=lambda order: order.simulate(**seconds).makespan)

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
        _C.schedule_check(self.handle, min(max_live_units or 0, 2**63 - 1))

    def to_text(self) -> str:
        """One line per rank: ``F0.0 F0.1 B0.1 B0.0``.

        A unit names its stage, ``[2]F1.0``, unless every rank ``r`` holds stage ``r`` and no other.
        """
        return _C.schedule_to_text(self.handle)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads what :meth:`to_text` writes.

        One line per rank, units separated by blanks; ``#`` starts a comment and empty lines do not count. Placement is
        read from the stage prefixes: for two ranks with stages in V order, the first line holds ``[0]`` and ``[3]``,
        the second ``[1]`` and ``[2]``. Without prefixes rank ``r`` holds stage ``r``.

        Raises:
            ValueError: names line and unit.
        """
        return cls._from_handle(_C.schedule_from_text(text))

    def to_csv(self) -> str:
        """Torch's action CSV, one line per rank: ``0F3`` has flat index 3 = microbatch * num_segments + segment.

        Raises:
            ValueError: the order recomputes or moves units, which torch has no cell for, or its micro-batches differ in
                their segments.
        """
        from seq1f1b.adapters import torch_csv

        return torch_csv.to_csv(self)

    @classmethod
    def from_csv(cls, text: str, *, num_segments: int) -> Schedule:
        """Reads torch's compute-only action CSV, for instance a file of ``_dump_csv`` read as text.

        Empty cells are bubbles: they say nothing about the order. A cell ``(0F3;7B1)OVERLAP_F_B`` is read as its two
        units, one after the other. Cells that move data or parameters are refused.

        Raises:
            ValueError: names line and cell.
        """
        from seq1f1b.adapters import torch_csv

        return torch_csv.from_csv(text, num_segments)

    def simulate(
        self,
        forward: Costs = 1.0,
        backward: Costs = 2.0,
        weight: Costs | None = None,
        transfer: float | Sequence[float] = 0.0,
        *,
        input: Costs | None = None,
        recompute: Costs | None = None,
        tier: Costs = 0.0,
        move_out: Costs = 0.0,
        move_in: Costs = 0.0,
        bandwidth: float | Sequence[float] | None = None,
        message_bytes: int | Sequence[int] = 0,
        send: float = 0.0,
        durations: Sequence[Sequence[float]] | None = None,
        segment_sizes: Sequence[int] | None = None,
        unit_bytes: int | Sequence[Sequence[int]] | None = None,
        memory: StepMemory | None = None,
        critical: bool = False,
        jitter: float = 0.0,
        transfer_jitter: float = 0.0,
        seed: int = 0,
        steps: int = 1,
        optimizer: float | Sequence[float] = 0.0,
        optimizer_sync: bool | None = None,
        progress: Callable[[int], object] | None = None,
        statistics: Costs = 0.25,
        loss: Costs = 0.5,
        embed: Costs = 0.0,
        embed_gradient: Costs = 0.0,
        statistics_bytes: int | Sequence[int] = 0,
    ) -> Simulation:
        """When every unit starts and ends if it takes the given time.

        Simulates the program that the engine runs, with its places and credits. If the order fills waits, the block of
        a W is what is left of it.

        Args:
            forward, backward: seconds per unit, a number or ``[stage][segment]``; ``backward`` is the full B.
            weight: W where the order splits ``backward``; default: half of it.
            input: I where the order splits ``backward``; default: what ``weight`` leaves of it.
            recompute: R where the order recomputes; default: ``forward``.
            tier: seconds that a rank's tier takes to move what a unit saved, out or back. It moves one at a time,
                beside the units. A, and the backward of a unit that was moved, wait for it. Not with ``critical``.
            move_out, move_in: seconds that moving takes of the rank's own time: of O, and of L.
            transfer: latency of a message, seconds from the end of its transfer to its arrival; a number, or
                ``[stage]``, one for the edges between ``stage`` and ``stage + 1``, either way.
            bandwidth: bytes per second of each directed edge between two stages, a number or ``[stage]`` as above;
                None: infinite.
            message_bytes: bytes of one message, a number or one per segment; gradients are as large as activations.
            send: seconds that a sender itself spends on a message.
            durations: seconds of every unit, per rank in run order, in place of those of the passes:
                replays what was measured.
            segment_sizes: tokens of each segment, for ``peak_tokens``.
            unit_bytes: activation bytes of a unit, a number or ``[stage][segment]``, for ``peak_bytes``.
            memory: bytes of everything a step holds, for ``memory``.
            critical: also find ``slack`` and ``critical_path``. Not of an order that fills waits.
            jitter: every unit takes its seconds times a number drawn evenly from ``1 - jitter`` to ``1 + jitter``.
            transfer_jitter: the same of every message's time on its link and its latency.
            seed: the same one draws the same times.
            steps: simulates so many steps in a row, for ``period``; all else is of the first.
            optimizer: seconds that every rank, or each, needs after a step before it begins the next.
            optimizer_sync: whether the optimizer waits for all ranks, as a norm over them makes it; needed with steps.
            progress: called some times a second with the units that have run; what it raises ends the simulation.
            statistics, loss, embed, embed_gradient: S, T, E and G where the vocabulary is spread over the ranks.
            statistics_bytes: of one message from shard to shard of the vocabulary, a number or one per segment.
        Raises:
            ScheduleError: the order breaks a rule.
            ValueError: a cost is negative or not finite, or of the wrong shape.
        """
        _check_steps(steps, optimizer_sync, seed)
        tokens = None if segment_sizes is None else self._tokens(segment_sizes)
        sizes, statistics_sizes = self._per_segment(message_bytes), self._per_segment(statistics_bytes)
        program = self._lower()
        seconds = self._pass_seconds(
            forward, backward, weight, input, recompute, statistics, loss, embed, embed_gradient, move_out, move_in
        )
        times = _C.program_simulate(
            program,
            tuple(map(seconds.get, _C.PASSES)),
            durations,
            (self._per_edge(transfer, "transfer"), self._seconds_per_byte(bandwidth), send, self._tier_seconds(tier)),
            (sizes, statistics_sizes),
            (jitter, transfer_jitter, seed, self.fills),
            (steps, bool(optimizer_sync), per_place(optimizer, "optimizer", self.num_ranks, "rank")),
            _C.KEEP_CAUSES if critical else _C.KEEP_TIMELINE,
            progress or _ignore,
        )
        peaks = self._peaks(program, tokens, unit_bytes, memory, sizes, statistics_sizes)
        return Simulation(**self._times(times, many_steps=steps > 1), **peaks, schedule=self)

    def _peaks(
        self,
        program: Any,
        tokens: list[int] | None,
        unit_bytes: Any,
        memory: StepMemory | None,
        sizes: Sequence[int],
        statistics_sizes: Sequence[int],
    ) -> dict[str, Any]:
        """The fields of a simulation that tell what is held."""
        peak, peak_memory = self._memory(program, memory or StepMemory(), sizes, statistics_sizes)
        return {
            "peak": peak,
            "peak_tokens": None if tokens is None else self._peak(program, tokens),
            "peak_bytes": None if unit_bytes is None else self._peak(program, self._per_unit(unit_bytes, "unit_bytes")),
            "memory": peak_memory if memory is not None else None,
            "given": memory,
        }

    def _per_segment(self, values: int | Sequence[int]) -> Sequence[int]:
        """One value per segment; in an order of rows one per segment of every micro-batch, flat."""
        if not isinstance(values, Sequence):
            return [values] * (self.num_segments if self.rows is None else sum(self.rows))
        return values if self.rows is None else flat_rows(values, "values of segments", self.rows)

    def _tokens(self, segment_sizes: Sequence[int]) -> list[int]:
        """Tokens of every unit, flat."""
        if self.rows is not None:
            return flat_rows(segment_sizes, "segment_sizes", self.rows) * self.num_stages
        if len(segment_sizes) != self.num_segments:
            raise ValueError(f"segment_sizes holds {len(segment_sizes)} values, must hold {self.num_segments}")
        return [*segment_sizes] * self.num_stages

    def _seconds_per_byte(self, bandwidth: float | Sequence[float] | None) -> list[float]:
        """One value for each two neighbouring stages; 0 where the bandwidth is infinite."""
        rates = self._per_edge(math.inf if bandwidth is None else bandwidth, "bandwidth")
        for rate in rates:
            if not rate > 0:
                raise ValueError(f"bandwidth is {rate}, must be above 0")
        with _naming_overflow("bandwidth"):
            return [1.0 / rate for rate in rates]

    def _tier_seconds(self, tier: Costs) -> list[float] | None:
        """Seconds that the tier needs for each unit, flat; None if moving is free."""
        seconds = self._per_unit(tier, "tier")
        return seconds if any(seconds) else None

    def _pass_seconds(
        self,
        forward: Costs = 1.0,
        backward: Costs = 2.0,
        weight: Costs | None = None,
        input: Costs | None = None,
        recompute: Costs | None = None,
        statistics: Costs = 0.25,
        loss: Costs = 0.5,
        embed: Costs = 0.0,
        embed_gradient: Costs = 0.0,
        move_out: Costs = 0.0,
        move_in: Costs = 0.0,
    ) -> dict[str, list[Any]]:
        """By the letter of the pass: seconds of every unit, flat."""
        whole = self._per_unit(backward, "backward")
        with _naming_overflow("backward"):
            weights = self._per_unit(weight, "weight") if weight is not None else [0.5 * cost for cost in whole]
        if input is not None:
            inputs = self._per_unit(input, "input")
        else:
            inputs = [cost - part for cost, part in zip(whole, weights, strict=True)]
            if weight is not None and min(inputs) < 0:
                raise ValueError("weight is more than backward, of which it is a part")
        again = forward if recompute is None else recompute
        return {
            "F": self._per_unit(forward, "forward"),
            "B": whole,
            "I": inputs,
            "W": weights,
            "R": self._per_unit(again, "recompute"),
            "O": self._per_unit(move_out, "move_out"),
            "A": self._per_unit(0.0, "the end of moving"),
            "L": self._per_unit(move_in, "move_in"),
            "S": self._per_unit(statistics, "statistics"),
            "T": self._per_unit(loss, "loss"),
            "E": self._per_unit(embed, "embed"),
            "G": self._per_unit(embed_gradient, "embed_gradient"),
        }

    def _times(self, found: Any, *, many_steps: bool) -> dict[str, Any]:
        """The fields of a simulation that tell times, from what the core found."""
        makespan, period, span, busy, wait, start, end, slack, path = found
        return {
            "makespan": makespan,
            "span": tuple(_doubles(span)),
            "busy": tuple(_doubles(busy)),
            "wait": tuple(_doubles(wait)),
            "bubble": tuple(makespan - seconds for seconds in _doubles(busy)),
            "period": period if many_steps else None,
            "slack": None if slack is None else tuple(tuple(_doubles(row)) for row in slack),
            "critical_path": None if path is None else tuple(self.units_of(rank)[i] for rank, i in path),
            "start": tuple(map(_doubles, start)),
            "end": tuple(map(_doubles, end)),
        }

    def peak_memory(
        self,
        memory: StepMemory,
        *,
        message_bytes: int | Sequence[int] = 0,
        statistics_bytes: int | Sequence[int] = 0,
    ) -> PeakMemory:
        """Most bytes that each rank holds: what :meth:`simulate` tells of them, which does not depend on times.

        Args and errors are those of :meth:`simulate`.
        """
        sizes, statistics_sizes = self._per_segment(message_bytes), self._per_segment(statistics_bytes)
        return self._memory(self._lower(), memory, sizes, statistics_sizes)[1]

    def _lower(self) -> Any:
        if self._lowered is None:
            self._lowered = _C.program_lower_edges(self.handle, self.prefetch)
        return self._lowered

    def _per_unit(self, costs: Any, name: str) -> list[Any]:
        """One value per (stage, segment), flat."""
        return per_unit(costs, name, self.num_stages, self.num_segments, self.rows)

    def _per_edge(self, values: Any, name: str) -> list[Any]:
        """One value for each two neighbouring stages."""
        return per_place(values, name, self.num_stages - 1, "pair of neighbouring stages")

    def _peak(self, program: Any, activations: list[int]) -> tuple[int, ...]:
        return tuple(peak[1] for peak in _C.program_memory(program, (activations,)))

    def _per_stage(self, values: Any, name: str) -> list[int]:
        return per_place(values, name, self.num_stages, "stage")

    def _bytes(self, given: StepMemory, sizes: Sequence[int], statistics_sizes: Sequence[int]) -> tuple[Any, ...]:
        """What units hold, and their messages, as the core takes them."""
        kept = given.kept_activations
        return (
            self._per_unit(given.activations, "activations"),
            None if kept is None else self._per_unit(kept, "kept_activations"),
            self._per_unit(given.output_gradients, "output_gradients"),
            self._per_stage(given.kv, "kv"),
            self._per_stage(given.kv_gradients, "kv_gradients"),
            self._per_unit(given.inputs, "inputs"),
            self._per_unit(given.kv_rows, "kv_rows"),
            self._per_unit(given.staying, "staying"),
            self._per_unit(given.forward_work, "forward_work"),
            self._per_unit(given.backward_work, "backward_work"),
            self._per_unit(given.kv_gradient_rows, "kv_gradient_rows"),
            self._per_segment(given.shard_logits),
            sizes,
            statistics_sizes,
        )

    def _memory(
        self, program: Any, given: StepMemory, sizes: Sequence[int], statistics_sizes: Sequence[int]
    ) -> tuple[tuple[int, ...], PeakMemory]:
        """Peak of live units, and of bytes; what is constant is added here."""

        def per_rank(name: str, values: Sequence[int]) -> tuple[int, ...]:
            for value in values:
                if not isinstance(value, int):
                    raise TypeError(f"{name} holds {value!r}, must be whole numbers of bytes")
            if min(values) < 0:
                raise ValueError(f"{name} holds {min(values)} bytes, must be at least 0")
            held = [0] * self.num_ranks
            for rank, value in zip(self.rank_of_stage, values, strict=True):
                held[rank] += value
            return tuple(held)

        live = _C.program_memory(program, self._bytes(given, sizes, statistics_sizes))
        units, activations, output_gradients, kv, kv_gradients, inputs, shard_logits, receive, together = zip(
            *live, strict=True
        )
        weights = per_rank("weights", self._per_stage(given.weights, "weights"))
        optimizer = per_rank("optimizer", self._per_stage(given.optimizer, "optimizer"))
        logits = per_rank("logits", [0] * (self.num_stages - 1) + [given.logits])
        total = tuple(map(sum, zip(together, weights, optimizer, logits, strict=True)))
        return units, PeakMemory(
            activations,
            output_gradients,
            kv,
            kv_gradients,
            receive,
            weights,
            optimizer,
            logits,
            total,
            inputs,
            shard_logits,
        )


@contextlib.contextmanager
def _naming_overflow(name: str) -> Iterator[None]:
    try:
        yield
    except OverflowError as error:
        raise ValueError(f"{name} holds a number that is too large: {error}") from None


def check_units(name: str, units: object) -> None:
    """Raises unless this says which units an order recomputes, or moves."""
    if not (units in ("none", "all") if isinstance(units, str) else callable(units)):
        raise ValueError(f"{name} is {units!r}, must be 'none', 'all' or a callable of a unit")


def _check_steps(steps: int, optimizer_sync: bool | None, seed: int) -> None:
    if not 1 <= steps < 2**31:
        raise ValueError(f"steps is {steps}, must be in 1..{2**31 - 1}")
    if steps > 1 and optimizer_sync is None:
        raise ValueError("optimizer_sync must be True or False where there is more than one step")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}, must be in 0..2**64 - 1")


def _ignore(num_run: int) -> None:
    """Progress that nobody wants to see; the call lets Ctrl-C through."""


def _doubles(row: bytes) -> memoryview[float]:
    return memoryview(row).cast("d")


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
        return _C.schedule_broken_rule(self.name, *counts, _flat_options(options, num_ranks, *counts[1:]))


def families() -> tuple[Family, ...]:
    """Every family that :func:`seq1f1b.build_schedule` knows, with what is known of it."""
    return tuple(Family(*facts) for facts in _C.schedule_families())


OPTION_KINDS = dict(_C.FAMILY_OPTIONS)
"""By the name of an option: whether it is a number, a word, or costs, or bytes of units or of ranks."""


def _flat_options(
    options: Mapping[str, Any] | None,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int | Sequence[int],
    stages_per_rank: int,
) -> dict[str, Any]:
    """The options with costs and bytes as flat lists, by stage and segment, as the core reads them."""
    flat = dict(options or {})
    if flat:  # the lists are as long as the counts say
        _C.schedule_broken_rule("seq1f1b", num_ranks, num_microbatches, num_segments, stages_per_rank, {})
    rows = num_segments if isinstance(num_segments, Sequence) else None
    k = num_segments if isinstance(num_segments, int) else max(num_segments, default=0)
    num_stages = num_ranks * stages_per_rank
    for name, kind in OPTION_KINDS.items():
        if name not in flat:
            continue
        value = flat[name]
        if kind == "costs":
            passes = ("F", "I", "W")
            if not isinstance(value, Sequence) or len(value) != len(passes):
                raise ValueError(f"{name} must hold the costs of F, I and W")
            tables = zip(passes, value, strict=True)
            flat[name] = [per_unit(costs, f"{name} of {letter}", num_stages, k, rows) for letter, costs in tables]
        elif kind == "units":
            flat[name] = per_unit(value, name, num_stages, k, rows)
        elif kind == "ranks" and not hasattr(value, "__len__"):
            flat[name] = [value] * num_ranks
    return flat


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int | Sequence[int] = 1,
    stages_per_rank: int = 1,
    options: Mapping[str, Any] | None = None,
    recompute: str | Callable[[Unit], bool] = "none",
    offload_units: str | Callable[[Unit], bool] = "none",
    prefetch: int = 1,
    weights: str = "planned",
) -> Schedule:
    """The order of a named family; :func:`seq1f1b.schedule.families` says what each is and for which counts.

    Args:
        name: one of :func:`schedules`.
        num_ranks, num_microbatches, num_segments, stages_per_rank: P, M, k, v. ``num_segments`` may be a sequence, one
            for each micro-batch: an order of rows. Its costs and bytes are ``[stage][micro-batch][segment]``. In rules
            k is then the largest, and ``M k`` the sum of all. A family that needs one k for all says so.
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
            ``backward``: ``"split"`` into I and W, or ``"whole"``, a B, which the engine runs, for ``"auto"``; it
            splits unless told otherwise. Times take it that messages find a place: give it as large a ``prefetch`` as
            still shortens the step.
            ``costs``: of F, I and W, each a number or ``[stage][segment]``, where the backward is split: W go where
            these leave bubbles; the order is never worse under them than the one for equal costs. ``"auto"`` takes the
            whole order from them, and is never worse than a named family within the same cap.
        recompute: ``"none"``, ``"all"``, or a callable of a unit: which units the order recomputes, see
            :meth:`Schedule.recompute`.
        offload_units: the same: which units the order moves to a tier and back, see :meth:`Schedule.offload`.
        prefetch, weights: how many receive places there are beyond the most that the order needs, and whether W fills
            waits (``"fill"``) or not (``"planned"``), see :meth:`Schedule.replace`.

    Raises:
        ValueError: unknown name or option, or a number out of range.
        ScheduleError: the family cannot be built for these counts; names its rule.
    """
    if name not in schedules():
        raise ValueError(f"there is no schedule named {name!r}{nearest_name(name, schedules())}")
    counts = (num_ranks, num_microbatches, num_segments, stages_per_rank)
    flat = _flat_options(options, *counts)
    schedule = Schedule._from_handle(_C.schedule_build(name, *counts, flat))
    return schedule.replace(prefetch=prefetch, weights=weights).recompute(recompute).offload(offload_units)


def schedules() -> tuple[str, ...]:
    """Names that :func:`build_schedule` takes."""
    return tuple(family.name for family in families())


def nearest_name(name: str, known: Iterable[str]) -> str:
    """How a message that refuses an unknown name goes on: with the nearest known one, or with all."""
    known = tuple(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
