"""Schedules as data: built, checked, simulated, written and read back before any tensor exists."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, islice, pairwise, product
from types import EllipsisType
from typing import Any

from seq1f1b import _C, torch_csv
from seq1f1b.families import Family, build_schedule, families, schedules
from seq1f1b.flat import MOST, flat, held_bytes, numbers, pass_and_link_seconds, unit_seconds, whole
from seq1f1b.simulation import Costs, Links, Noise, PeakMemory, Simulation, StepMemory
from seq1f1b.unit import Timeline, Unit

__all__ = [
    "Costs",
    "Family",
    "Links",
    "Noise",
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


_CELL_KINDS = ".RL"  # by the core's number: F's saved tensors are kept, recomputed or moved
_CELL_LETTERS = bytes.maketrans(bytes(range(len(_CELL_KINDS))), _CELL_KINDS.encode())


class Schedule:
    """The order in which every rank runs its units.

    Made by :func:`build_schedule`, :meth:`from_text`, :meth:`from_csv`, or from the units of every rank. Making an
    order checks its placement alone (a stage lives on one rank); :meth:`check`, called by :meth:`simulate` and by the
    engine, checks all other rules.

    Args:
        ranks: the units of every rank in run order.
        num_segments: segments of every micro-batch; 0: every micro-batch has the segments of its units.
    Attributes:
        prefetch: receive places of an edge beyond the order's own need; None: by time, see :meth:`replace`.
        fills: whether a rank runs W while waiting for a message, see :meth:`replace`.
        parents: parent of each segment, [micro-batch][segment], -1 for the first segment; None: segments follow one
            another in every micro-batch.
        kinds: letters of the order's passes, such as F and B.
    """

    def __init__(self, ranks: Iterable[Iterable[Unit]], *, num_segments: int = 0) -> None:
        orders = tuple(map(tuple, ranks))
        for rank, order in enumerate(orders):
            if not order:
                raise ValueError(f"rank {rank} has no units")
        lines = (" ".join(f"[{stage}]{kind}{m}.{s}" for kind, stage, m, s in order) for order in orders)
        self._adopt(_C.schedule_from_text("\n".join(lines), whole("num_segments", num_segments, 0, MOST)))

    def _adopt(self, handle: Any, like: Schedule | None = None) -> None:
        self.handle = handle  # the C core's order, lowered to a program by the engine
        self.prefetch: int | None = None if like is None else like.prefetch
        self._times: array[float] | None = None if like is None else like._times  # to count places by time
        self.fills: bool = like is not None and like.fills
        counts, of_stages, bounds, parents, self._num_units, passes = _C.schedule_facts(handle)
        self.num_ranks, self.num_stages, self.num_microbatches, self.num_segments = counts
        self.rank_of_stage = tuple(of_stages)
        self.kinds = frozenset(kind for number, kind in enumerate(_C.PASSES) if passes >> number & 1)
        # Index of each micro-batch's first segment among all segments; the last entry is the number of segments.
        M, k = self.num_microbatches, self.num_segments
        self._first_cells: Sequence[int] = tuple(bounds) or range(0, M * k + 1, k)
        rows = tuple(b - a for a, b in pairwise(bounds))
        self.rows: tuple[int, ...] | None = rows or None
        each = iter(parents)
        trees = tuple(tuple(islice(each, k)) for k in rows)
        self.parents: tuple[tuple[int, ...], ...] | None = trees if parents else None
        self._units: dict[int, tuple[Unit, ...]] = {}
        self._peak: tuple[int, ...] | None = None  # most live units of each rank

    @classmethod
    def _from_handle(cls, handle: Any, like: Schedule | None = None) -> Schedule:
        """Returns an order around the core's handle, with the receive places and fills of ``like``."""
        schedule = cls.__new__(cls)
        schedule._adopt(handle, like)
        return schedule

    def replace(
        self,
        *,
        prefetch: int | EllipsisType | None = ...,
        costs: Costs | None = None,
        weights: str | None = None,
    ) -> Schedule:
        """Returns the order with equal units, but with other receive places, or with W in waits.

        Args:
            prefetch: receive places of an edge beyond the order's own need; a sender without a free place waits. More
                places are never slower. None: by time: at least one, and enough that no sender waits if units take the
                seconds of ``costs`` and messages come at once. Each waiting message belongs to a unit held by one of
                the two stages anyway, and is small beside the unit's saved tensors. ``...``: unchanged.
            costs: seconds of units and messages to count places if ``prefetch`` is None; equal on all ranks. None: the
                costs given to :func:`build_schedule` (options ``costs`` and ``transfer``), or else 1 for F, I, W and R,
                and 2 for B.
            weights: when weight gradients are made. ``"planned"``: at W's place in the order. ``"fill"``: also while a
                rank waits for a message, product by product and in the order's own sequence, so gradients are bit-equal
                from run to run; at the latest at W's place, so memory stays as planned. With ``"fill"``, the engine
                splits whole backwards by :meth:`defer_weights`. None: unchanged.
        Raises:
            ValueError, TypeError: ``prefetch`` is below 0 or no int, or an int although ``costs`` are given,
                ``weights`` is unknown.
        """
        other = self._from_handle(self.handle, like=self)
        if prefetch is not ...:
            other.prefetch = None if prefetch is None else whole("prefetch", prefetch, 0, MOST)
        if costs is None and other.prefetch == self.prefetch and "_lowered" in vars(self):
            other._lowered = self._lowered
        if costs is not None:
            if other.prefetch is not None:
                raise ValueError(
                    f"costs count places where prefetch is None, not {other.prefetch}: give one of the two"
                )
            other._times = self._seconds_of(costs)
        if weights is not None:
            if weights not in ("planned", "fill"):
                raise ValueError(f"weights is {weights!r}, must be 'planned' or 'fill'")
            other.fills = weights == "fill"
        return other

    @property
    def places(self) -> tuple[int, ...]:
        """Receive places of every edge, a pair of stages on two ranks, in the core's order of the edges.

        Raises:
            ScheduleError: the order breaks a rule.
        """
        return tuple(num_places for *_, num_places, _ in _C.program_edges(self._lowered))  # see ProgramEdge

    @property
    def _places_text(self) -> str:
        """Text for comparing receive places among ranks: equal orders with equal texts have equal places."""
        if self.prefetch is not None or self._times is None:
            return f"{self.prefetch}"
        return f"None (places {zlib.crc32(repr(self.places).encode()):08x} by costs)"

    @property
    def segments_of(self) -> tuple[int, ...]:
        """Number of segments of every micro-batch, also in an order without ``rows``."""
        return self.rows or (self.num_segments,) * self.num_microbatches

    def units_of(self, rank: int) -> tuple[Unit, ...]:
        """Returns the units of one rank in run order."""
        units = self._units.get(rank)
        if units is None:
            numbers = _C.schedule_units(self.handle, rank)
            kinds = map(_C.PASSES.__getitem__, numbers[::4])
            units = self._units[rank] = tuple(map(Unit, kinds, numbers[1::4], numbers[2::4], numbers[3::4]))
        return units

    @cached_property
    def ranks(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of every rank in run order."""
        return tuple(map(self.units_of, range(self.num_ranks)))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, equal in every process for equal units, different (but by chance) for other units."""
        return f"{_C.schedule_digest(self.handle):016x}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule) or (self.prefetch, self.fills) != (other.prefetch, other.fills):
            return False
        if self.digest != other.digest or self.to_text() != other.to_text():
            return False
        return self._times == other._times or self.prefetch is not None or self.places == other.places

    def __hash__(self) -> int:
        return hash((self.prefetch, self.fills, _C.schedule_digest(self.handle)))

    def __getstate__(self) -> tuple[Any, ...]:
        """Returns the text for copies and pickles; a first line marks an order of rows without trees."""
        rows = "parents" + " -" * self.num_microbatches + "\n" if self.rows is not None and self.parents is None else ""
        return rows + self.to_text(), self.prefetch, self._times, self.fills

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        text, prefetch, times, fills = state
        self._adopt(_C.schedule_from_text(text, 0))
        self.prefetch, self._times, self.fills = prefetch, times, fills

    def __repr__(self) -> str:
        return (
            f"<Schedule: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{self.num_segments if self.rows is None else self.rows} segments>"
        )

    def forward_only(self) -> Schedule:
        """Returns the order without backward units, for evaluation."""
        order = self._from_handle(_C.schedule_forward_only(self.handle), like=self)
        order._times = None  # without backwards a fast stage may run any number of forwards ahead of a slow stage
        return order

    def defer_weights(self, max_live_units: int | None = None) -> Schedule:
        """Returns the order with every backward split, and W as late as memory allows.

        Each W stands where its rank would otherwise hold more units; the Ws of a rank stand in the order of its Is.
        Late Ws leave most work for waits (``weights="fill"`` of :meth:`replace`).

        Args:
            max_live_units: cap on the units of one rank between their forward and their W; None: the peak of this
                order's largest rank, so no rank holds more than this peak.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: ``max_live_units`` is below 1, or below the least number of units that a rank must hold.
        """
        most = 0 if max_live_units is None else whole("max_live_units", max_live_units, 1)
        return self._from_handle(_C.schedule_defer_weights(self.handle, most), like=self)

    def recompute(self, units: str | Callable[[Unit], bool] = "all") -> Schedule:
        """Returns the order with an R just before the backward of each chosen unit.

        R needs no message, and so runs while the backward's gradient is on the way. An existing R keeps its place, and
        a unit moved to a tier stays moved; from text an order may have Rs anywhere between F and the backward.

        Args:
            units: ``"all"``, ``"none"``, or a callable that gets each unit's F and says whether to recompute the unit.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: ``units`` is unknown.
        """
        return self._changed("R", units)

    def offload(self, units: str | Callable[[Unit], bool] = "all") -> Schedule:
        """Returns the order with saved tensors of chosen units in a tier between forward and backward.

        O stands right after F, A one unit later and L one unit before the backward: the rank runs one unit during the
        move out, and another during the move back. A unit stays if no other unit would run between A and L, or if R
        recomputes the unit. From text an order may have O, A and L anywhere between F and the backward, in this
        sequence, with at most one unit of a rank on the way out, and two on the way back.

        Args:
            units: ``"all"``, ``"none"``, or a callable that gets each unit's F and says whether to move the unit.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: ``units`` is unknown, or this order moves units already.
        """
        return self._changed("L", units)

    def fit(
        self,
        memory: StepMemory,
        room: int | Sequence[int],
        by: Sequence[str] = ("recompute",),
        costs: Costs = Costs(),
        tier_room: int | Sequence[int] | None = None,
    ) -> Schedule:
        """Returns the order with as few units as possible recomputed, or moved to a tier, to fit into ``room``.

        Whenever a rank would hold more than its room, the live unit with the furthest backward gives up its saved
        tensors. If both ways are allowed, a unit moves if the tier brings the tensors back in time, and is recomputed
        otherwise. If no choice fits, the returned order exceeds the room: ask ``peak_memory``.

        Args:
            memory: bytes that units hold.
            room: most bytes of a rank in units and receive places; a number, or a number for each rank. Weights, the
                optimizer and ``memory.logits`` come on top.
            by: allowed ways, ``"recompute"``, ``"offload"``, or both.
            costs: bytes of messages; if both ways are allowed, also the seconds of passes, messages and the tier.
            tier_room: most bytes of moved units in a rank's tier at once; a number, or a number for each rank; None:
                any. Units without room in the tier are recomputed, if ``by`` allows.
        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: the order recomputes or moves units already, ``by`` is unknown, or a number is out of range.
        """
        if not by or not set(by) <= {"recompute", "offload"}:
            raise ValueError(f"by is {by!r}, must hold 'recompute', 'offload' or both")
        rooms = flat(self, "room", _C.PER_RANK, room, "q")
        most = None if tier_room is None else flat(self, "tier_room", _C.PER_RANK, tier_room, "q")
        held, tier = held_bytes(self, memory, costs.links), flat(self, "tier", _C.PER_CELL, costs.tier)
        start = unit_seconds(self, self.simulate(costs).start) if len(set(by)) == 2 else None
        ways = "recompute" in by, "offload" in by
        kinds = _C.program_fit(self._lowered, held, rooms, tier, start, most, *ways)
        return self._from_handle(_C.schedule_change_cells(self.handle, kinds), like=self)

    def cell_kinds(self) -> tuple[str, ...]:
        """Returns a text for each stage, with a letter for each segment and a blank between micro-batches.

        The letters say that the unit's saved tensors are kept (``.``), recomputed (``R``) or moved to a tier (``L``).
        :meth:`with_cell_kinds` reads the texts.
        """
        letters = _C.schedule_cell_kinds(self.handle).translate(_CELL_LETTERS).decode()
        cells = self._first_cells
        starts = range(0, len(letters), cells[-1])
        return tuple(" ".join(letters[at + a : at + b] for a, b in pairwise(cells)) for at in starts)

    def with_cell_kinds(self, rows: Sequence[str]) -> Schedule:
        """Returns the order with an R, or with O, A and L, for units marked in texts of :meth:`cell_kinds`.

        Raises:
            ScheduleError: this order breaks a rule.
            ValueError: the texts have other counts than the order, or the order recomputes or moves units already.
        """
        S, M, counts = self.num_stages, self.num_microbatches, list(self.segments_of)
        words = [row.split(" ") for row in rows]
        if len(rows) != S or any(list(map(len, row)) != counts for row in words):
            each = counts[0] if len(set(counts)) == 1 else counts
            raise ValueError(f"units must be {S} texts, one per stage, each of {M} words of {each} letters")
        letters = "".join(map("".join, words))
        if not set(letters) <= set(_CELL_KINDS):
            raise ValueError(f"units are {sorted(set(letters))}, must be '.', 'R' or 'L'")
        kinds = bytes(map(_CELL_KINDS.index, letters))
        return self._from_handle(_C.schedule_change_cells(self.handle, kinds), like=self)

    def _changed(self, letter: str, units: str | Callable[[Unit], bool]) -> Schedule:
        check_units("units", units)
        if units == "none":
            return self
        kind, segments = _CELL_KINDS.index(letter), [(m, s) for m, n in enumerate(self.segments_of) for s in range(n)]
        cells = (Unit("F", stage, *segment) for stage, segment in product(range(self.num_stages), segments))
        kinds = bytes(kind * (isinstance(units, str) or bool(units(unit))) for unit in cells)
        return self._from_handle(_C.schedule_change_cells(self.handle, kinds), like=self)

    def spread_vocabulary(
        self, ahead: int | None = None, costs: Costs = Costs(), *, head: bool = True, embedding: bool = False
    ) -> Schedule:
        """Returns the order with the rows of the vocabulary spread over the ranks.

        The last stage waits for S and T of a segment between its forward and its backward, so forwards go ahead of all
        other units. The first stage waits for E.

        Args:
            ahead: number of further Fs of a rank ahead of every unit other than F; None: the best of 0, 1 and 2 for
                the time of a step, if the order allows so many; 0 without ``head``.
            head, embedding: whether the output layer is spread (S and T), and the input embedding (E and G).
            costs: seconds of the passes: the new units stand where each rank can run them earliest.
        Raises:
            ScheduleError: the order breaks a rule, holds S, T, E or G already, or rank r does not hold stage r; or
                ``ahead`` is so large that ranks would wait for each other, for a B behind further forwards.
            ValueError: a number is out of range.
        Source: vocabulary parallelism, arXiv:2411.05288.
        """
        (seconds, *_), orders = pass_and_link_seconds(self, costs), list[Schedule]()
        for more in (0, 1, 2) if ahead is None and head else (ahead or 0,):
            try:
                spread = _C.schedule_spread_vocabulary(self.handle, head + 2 * embedding, more, seconds)
            except _C.ScheduleError:
                if not orders:
                    raise
                continue  # an order with few live units may not let Fs go ahead
            orders.append(self._from_handle(spread, like=self))
        return min(orders, key=lambda order: order.simulate(costs).makespan)

    def check(self, max_live_units: int | None = None) -> None:
        """Checks the order's rules.

        Args:
            max_live_units: cap on the units of one rank between their forward and the end of their backward.
        Raises:
            ScheduleError: names the rule and the units.
            ValueError: ``max_live_units`` is below 1.
        """
        _C.schedule_check(self.handle, 0 if max_live_units is None else whole("max_live_units", max_live_units, 1))

    def to_text(self) -> str:
        """Returns one line per rank: ``F0.0 F0.1 B0.1 B0.0``.

        A unit names its stage, ``[2]F1.0``, unless every rank ``r`` holds stage ``r`` alone.
        """
        return _C.schedule_to_text(self.handle)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads a text of :meth:`to_text`.

        One line per rank, units separated by blanks; ``#`` starts a comment and empty lines do not count. Placement is
        read from the stage prefixes: for two ranks with stages in V order, the first line holds ``[0]`` and ``[3]``,
        the second ``[1]`` and ``[2]``. Without prefixes rank ``r`` holds stage ``r``.

        Raises:
            ValueError: names line and unit.
        """
        return cls._from_handle(_C.schedule_from_text(text, 0))

    def to_csv(self) -> str:
        """Returns torch's action CSV, one line per rank: ``0F3`` has flat index 3 = microbatch * num_segments +
        segment.

        Raises:
            ValueError: torch's CSV has no cells for the order, with recomputed or moved units, unequal micro-batches,
                or trees of segments.
        """
        return torch_csv.to_csv(self)

    @classmethod
    def from_csv(cls, text: str, *, num_segments: int) -> Schedule:
        """Reads torch's compute-only action CSV, for instance a file of ``_dump_csv`` read as text.

        Empty cells are bubbles, and ignored. A cell ``(0F3;7B1)OVERLAP_F_B`` stands for two units, one after another.
        Raises for cells that move data or parameters.

        Raises:
            ValueError: names line and cell.
        """
        return cls(torch_csv.from_csv(text, num_segments), num_segments=num_segments)

    def simulate(
        self,
        costs: Costs = Costs(),
        *,
        memory: StepMemory | None = None,
        durations: Sequence[Sequence[float]] | None = None,
        noise: Noise = Noise(),
        steps: int = 1,
        optimizer_sync: bool | None = None,
        critical: bool = False,
    ) -> Simulation:
        """Returns the start and end of every unit under the given times.

        Simulates the engine's program, with receive places, and senders that wait for free places. If the order fills
        waits, W's block shows only the part that runs at W's own place.

        Args:
            costs: seconds of the units, of messages, of the tier and of the optimizer.
            memory: bytes held by units and ranks, for ``memory`` of the result.
            durations: seconds of every unit, per rank in run order, in place of the passes' seconds, to replay a
                measured step.
            noise: random variation of times.
            steps: number of steps in a row, for ``period``; all other results describe the first step.
            optimizer_sync: whether the optimizer waits for all ranks, for instance for a norm; needed with steps.
            critical: whether to find ``slack`` and ``critical_path``; refused with a tier that takes time, and for an
                order that fills waits.
        Raises:
            ScheduleError: the order breaks a rule.
            ValueError: a cost is negative or not finite, or of the wrong shape.
        """
        whole("steps", steps, 1, MOST)
        if steps > 1 and optimizer_sync is None:
            raise ValueError("optimizer_sync must be True or False where there is more than one step")
        whole("seed", noise.seed, 0, 2**64 - 1)
        program, counts = self._lowered, self._num_units
        tier, links = flat(self, "tier", _C.PER_CELL, costs.tier), costs.links
        passes, latency, per_byte = pass_and_link_seconds(self, costs)
        optimizer = flat(self, "optimizer", _C.PER_RANK, costs.optimizer)
        makespan, period, span, busy, wait, times, path = _C.program_simulate(
            program,
            passes + (latency + per_byte + optimizer + numbers("send", "d", [links.send])),
            flat(self, "message_bytes", _C.PER_SEGMENT, links.message_bytes, "q")
            + flat(self, "statistics_bytes", _C.PER_SEGMENT, links.statistics_bytes, "q"),
            tier if any(tier) else None,
            None if durations is None else unit_seconds(self, durations),
            numbers("jitter", "d", [noise.jitter]) + numbers("transfer_jitter", "d", [noise.transfer_jitter]),
            noise.seed,
            self.fills,
            steps,
            bool(optimizer_sync),
            critical,
        )
        held = None if memory is None else self.peak_memory(memory, costs)
        if self._peak is None:
            self.peak_memory(StepMemory())
        bounds = pairwise(accumulate(3 * counts, initial=0))
        rows = [array("d", times[begin:end].tobytes()) for begin, end in bounds]  # quicker than number by number
        start, ends, slack = (tuple(rows[i * len(counts) :][: len(counts)]) for i in range(3))
        return Simulation(
            makespan=makespan,
            span=tuple(span),
            busy=tuple(busy),
            wait=tuple(wait),
            bubble=tuple(makespan - seconds for seconds in busy),
            peak=self._peak or (),
            memory=held,
            given=memory,
            period=period if steps > 1 else None,
            slack=tuple(map(tuple, slack)) if critical else None,
            critical_path=tuple(self.units_of(rank)[i] for rank, i in path) if critical else None,
            schedule=self,
            start=start,
            end=ends,
        )

    def peak_memory(self, memory: StepMemory, costs: Costs = Costs()) -> PeakMemory:
        """Returns the most bytes of each rank, as in :meth:`simulate`; times do not matter.

        Takes arguments and raises errors of :meth:`simulate`; ``costs`` holds the bytes of messages.
        """
        constant = dict.fromkeys(("weights", "optimizer", "logits"), (0,) * self.num_ranks)
        for name in [name for name in constant if getattr(memory, name)]:
            given, held = getattr(memory, name), [0] * self.num_ranks
            of_stages = [0] * (self.num_stages - 1) + [given] if name == "logits" else given
            values = flat(self, name, _C.PER_STAGE, of_stages, "q")
            if min(values) < 0:
                raise ValueError(f"{name} holds {min(values)} bytes, must be at least 0")
            for rank, value in zip(self.rank_of_stage, values, strict=True):
                held[rank] += value
            constant[name] = tuple(held)
        found = _C.program_memory(self._lowered, held_bytes(self, memory, costs.links)).cast("B")
        rows: Any = found.cast("q", (self.num_ranks, len(_C.HOLDINGS) + 3)).tolist()
        # The number of live units does not depend on costs and bytes.
        self._peak, *of_holdings, receive, totals = zip(*rows, strict=True)
        return PeakMemory(
            receive=receive,
            total=tuple(map(sum, zip(totals, *constant.values(), strict=True))),
            **constant,
            **{name: of_holdings[h] for h, (name, _, counts_with) in enumerate(_C.HOLDINGS) if counts_with == h},
        )

    def peak_tokens(self, segment_sizes: Sequence[Any]) -> tuple[int, ...]:
        """Returns the most tokens in live units of each rank at once.

        Args:
            segment_sizes: tokens of each segment; in an order of rows ``[micro-batch][segment]``.
        """
        sizes = flat(self, "segment_sizes", _C.PER_SEGMENT, segment_sizes, "q")  # raises under the argument's name
        if min(sizes) < 0:
            raise ValueError(f"segment_sizes holds {min(sizes)} tokens, must be at least 0")
        return self.peak_memory(StepMemory(activations=[segment_sizes] * self.num_stages)).activations

    def _byte_changes(self, memory: StepMemory) -> list[Any]:
        """Returns bytes [rank][i][holding]: a pair, taken at the start of unit i and freed at its end."""
        found = _C.program_changes(self._lowered, held_bytes(self, memory, Links())).cast("B")
        rows = iter(found.cast("q", (sum(self._num_units), len(_C.HOLDINGS), 2)).tolist())
        return [list(islice(rows, count)) for count in self._num_units]

    def _seconds_of(self, costs: Costs) -> array[float]:
        most = max(flat(self, "message_bytes", _C.PER_SEGMENT, costs.links.message_bytes, "q"))
        passes, latency, per_byte = pass_and_link_seconds(self, costs)
        return passes + array("d", map(lambda a, b: a + max(most, 0) * b, latency, per_byte))

    def _lower_for(self, with_receives: bool, rank: int) -> Any:
        """Returns the core's program for one rank's engine; ``with_receives``: for transports with a rendezvous."""
        return _C.program_lower(self.handle, self.prefetch, with_receives, rank, self._times)

    @cached_property
    def _lowered(self) -> Any:
        """The lowered program, for all simulations."""
        return _C.program_lower(self.handle, self.prefetch, False, _C.NO_RANK, self._times)


def check_units(name: str, units: object) -> None:
    """Raises unless ``units`` is "none", "all" or a callable."""
    if not (units in ("none", "all") if isinstance(units, str) else callable(units)):
        raise ValueError(f"{name} is {units!r}, must be 'none', 'all' or a callable of a unit")
