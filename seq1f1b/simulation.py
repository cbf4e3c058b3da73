"""Costs and bytes of a step as plain data, and the simulation of an order by the core."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from seq1f1b import _C
from seq1f1b.flat import HOLDINGS, MOST, flat, held_bytes, numbers, pass_seconds, seconds_per_byte, whole
from seq1f1b.timeline_text import timeline_text
from seq1f1b.unit import Timeline, Unit

if TYPE_CHECKING:
    from seq1f1b.schedule import Schedule

__all__ = ["Costs", "Links", "Noise", "PeakMemory", "Simulation", "StepMemory"]

Seconds = float | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
"""Seconds of units: one number, or ``[stage][segment]``; ``[stage][micro-batch][segment]`` in an order of rows."""


@dataclass(frozen=True)
class Links:
    """Times and bytes of messages between stages.

    Attributes:
        latency: seconds from the end of a message's transfer to its arrival; a number, or ``[stage]``, one for the
            edges between ``stage`` and ``stage + 1``, either way.
        bandwidth: bytes per second of each directed edge between two stages, a number or ``[stage]`` as above; None:
            infinite.
        send: seconds that a sender itself spends on a message.
        message_bytes: bytes of one message, a number or one per segment; gradients are as large as activations.
        statistics_bytes: bytes of a message from shard to shard of the vocabulary, a number or one per segment.
    """

    latency: float | Sequence[float] = 0.0
    bandwidth: float | Sequence[float] | None = None
    send: float = 0.0
    message_bytes: int | Sequence[Any] = 0
    statistics_bytes: int | Sequence[Any] = 0


@dataclass(frozen=True)
class Costs:
    """Seconds of the units of an order, of its messages and of a rank's further work in a step.

    Attributes:
        forward, backward: seconds of F, and of the full B.
        weight: W if the order splits ``backward``; None: half of ``backward``.
        input: I if the order splits ``backward``; None: ``backward`` less ``weight``.
        recompute: R if the order recomputes; None: ``forward``.
        statistics, loss, embed, embed_gradient: S, T, E and G of a vocabulary spread over the ranks.
        move_out, move_in: seconds that moving takes of the rank's own time: of O, and of L.
        links: costs of messages.
        tier: seconds that a rank's tier takes to move a unit's saved tensors, out or back. A tier moves one unit at a
            time, beside the running units. A, and the backward of a moved unit, wait for the tier.
        optimizer: seconds that every rank, or each, needs after a step before it begins the next.
    """

    forward: Seconds = 1.0
    backward: Seconds = 2.0
    weight: Seconds | None = None
    input: Seconds | None = None
    recompute: Seconds | None = None
    statistics: Seconds = 0.25
    loss: Seconds = 0.5
    embed: Seconds = 0.0
    embed_gradient: Seconds = 0.0
    move_out: Seconds = 0.0
    move_in: Seconds = 0.0
    links: Links = Links()
    tier: Seconds = 0.0
    optimizer: float | Sequence[float] = 0.0


@dataclass(frozen=True)
class Noise:
    """Random variation of times.

    Attributes:
        jitter: every unit takes its seconds times a number drawn evenly from ``1 - jitter`` to ``1 + jitter``.
        transfer_jitter: varies every message's time on its link and its latency likewise.
        seed: equal seeds draw equal times.
    """

    jitter: float = 0.0
    transfer_jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a step holds. Per stage: a number or one for each; per unit: a number or ``[stage][segment]``.

    Attributes:
        activations: bytes that F of a unit saves beyond its input, which lies in its receive place; held to the end of
            B. If the unit is recomputed, R saves them; if it is moved, they are not held from A to L.
        kept_activations: the part of ``activations`` that W reads, if the backward is split; I frees the rest. None:
            all.
        output_gradients: gradients inside the stage that I leaves to W, per unit.
        kv: keys and values of one micro-batch, per stage; held from F of segment 0 to the end of B of segment 0.
        kv_rows: keys and values that a unit writes, per unit; held from its F to the end of its B or I. Replaces ``kv``
            if the cache gives back pages as backwards end, as on CPUs from 8192 tokens on.
        kv_gradients: their gradients, per stage; held from B of the last segment to the end of B of segment 0.
        kv_gradient_rows: gradients of the keys and values that a unit writes, per unit; held from B of the last segment
            to the end of the unit's own. Replaces ``kv_gradients`` if ``kv_rows`` replaces ``kv``.
        inputs: bytes that a recomputed unit keeps for R beyond its receive place; held from F to the end of B or I.
        staying: bytes of every unit held from its F to the end of its B or I, even if activations are recomputed or
            moved: an input from a stage of the same rank, the gradient of a loss within F. Counts with ``inputs`` in
            peaks.
        forward_work, backward_work: temporary bytes of F or R, and of B or I, per unit; held while they run.
        weights: with their gradients, per stage. Held throughout.
        optimizer: its state, per stage. Held throughout.
        logits: of one unit of the last stage, with its loss's needs; held throughout.
        shard_logits: of a shard of the vocabulary, a number or one per segment; held from S to the end of T.
    """

    activations: int | Sequence[Sequence[int]] = 0
    kept_activations: int | Sequence[Sequence[int]] | None = None
    output_gradients: int | Sequence[Sequence[int]] = 0
    kv: int | Sequence[int] = 0
    kv_gradients: int | Sequence[int] = 0
    weights: int | Sequence[int] = 0
    optimizer: int | Sequence[int] = 0
    logits: int = 0
    inputs: int | Sequence[Sequence[int]] = 0
    shard_logits: int | Sequence[int] = 0
    kv_rows: int | Sequence[Sequence[int]] = 0
    staying: int | Sequence[Sequence[int]] = 0
    forward_work: int | Sequence[Sequence[int]] = 0
    backward_work: int | Sequence[Sequence[int]] = 0
    kv_gradient_rows: int | Sequence[Sequence[int]] = 0


@dataclass(frozen=True)
class PeakMemory:
    """Most bytes that each rank holds, one value per rank; every kind of :class:`StepMemory` at its own peak.

    Attributes:
        receive: places of the receivers, each as large as its largest message.
        total: most bytes of all kinds together at one time; the sum of the peaks may be more.
    """

    activations: tuple[int, ...]
    output_gradients: tuple[int, ...]
    kv: tuple[int, ...]
    kv_gradients: tuple[int, ...]
    receive: tuple[int, ...]
    weights: tuple[int, ...]
    optimizer: tuple[int, ...]
    logits: tuple[int, ...]
    total: tuple[int, ...]
    inputs: tuple[int, ...]
    shard_logits: tuple[int, ...]
    forward_work: tuple[int, ...]
    backward_work: tuple[int, ...]


@dataclass(frozen=True)
class Simulation:
    """Times and peaks of one simulated step. Tuples hold one value per rank; times in seconds.

    Attributes:
        makespan: first start to last end over all ranks.
        span: first start to last end of the rank.
        busy: sum of the rank's units.
        wait: time waiting for messages, for free places of receivers and for the tier.
        bubble: makespan less busy.
        peak: most units live at once, from forward (R, if recomputed) to the end of backward, unless away.
        memory: peaks of every kind of memory, if given.
        given: the given memory.
        period: seconds per step in a row of several: from the last end of the first step to that of the last.
        slack: if asked for, per rank in run order: seconds by which a unit alone may take longer while the makespan
            stays.
        critical_path: if asked for, units each of which waited for the one before it, from a first start to the last
            end: their times and transfers make the makespan.
        start, end: seconds of every unit in run order.
    """

    makespan: float
    span: tuple[float, ...]
    busy: tuple[float, ...]
    wait: tuple[float, ...]
    bubble: tuple[float, ...]
    peak: tuple[int, ...]
    memory: PeakMemory | None
    given: StepMemory | None = field(repr=False)
    period: float | None
    slack: tuple[tuple[float, ...], ...] | None
    critical_path: tuple[Unit, ...] | None
    schedule: Schedule = field(repr=False)
    start: tuple[array[float], ...] = field(repr=False, hash=False)
    end: tuple[array[float], ...] = field(repr=False, hash=False)

    @cached_property
    def timeline(self) -> Timeline:
        """(unit, start, end) of every unit in run order."""
        tracks = zip(self.schedule.ranks, self.start, self.end, strict=True)
        return tuple(tuple(zip(*track, strict=True)) for track in tracks)

    @property
    def bubble_ratio(self) -> float:
        """Share of the bubble in the ranks' time."""
        return sum(self.bubble) / (self.makespan * len(self.bubble)) if self.makespan > 0 else 0.0

    def to_text(self, width: int = 100) -> str:
        """Returns the timeline as text, one line per rank, in ``width`` columns."""
        return timeline_text(self.timeline, width=width)


def simulated(
    schedule: Schedule,
    costs: Costs,
    memory: StepMemory | None,
    durations: Sequence[Sequence[float]] | None,
    noise: Noise,
    steps: int,
    optimizer_sync: bool | None,
    critical: bool,
    progress: Callable[[int], object] | None,
) -> Simulation:
    """Runs an order in the core; arguments and errors are those of :meth:`seq1f1b.Schedule.simulate`."""
    if not 1 <= steps <= MOST:
        whole("steps", steps, 1, MOST)
    if steps > 1 and optimizer_sync is None:
        raise ValueError("optimizer_sync must be True or False where there is more than one step")
    if not 0 <= noise.seed < 2**64:
        whole("seed", noise.seed, 0, 2**64 - 1)
    program, counts = schedule._lower(), schedule._num_units
    tier, links = flat(schedule, "tier", _C.PER_CELL, costs.tier) if costs.tier else None, costs.links
    [send] = numbers("send", "d", [links.send])
    jitters = numbers("jitter", "d", [noise.jitter]) + numbers("transfer_jitter", "d", [noise.transfer_jitter])
    makespan, period, span, busy, wait, times, path = _C.program_simulate(
        program,
        (
            pass_seconds(schedule, costs),
            flat(schedule, "latency", _C.PER_PAIR, links.latency),
            seconds_per_byte(schedule, links),
            flat(schedule, "message_bytes", _C.PER_SEGMENT, links.message_bytes, "q"),
            flat(schedule, "statistics_bytes", _C.PER_SEGMENT, links.statistics_bytes, "q"),
            tier if tier is not None and any(tier) else None,
            flat(schedule, "optimizer", _C.PER_RANK, costs.optimizer),
            None if durations is None else unit_seconds(schedule, durations),
        ),
        send,
        jitters,
        noise.seed,
        schedule.fills,
        steps,
        bool(optimizer_sync),
        critical,
        progress or _ignore,
    )
    if schedule._peak is None:  # the same whatever units cost and hold
        schedule._peak = tuple(row[0] for row in _peaks(schedule, StepMemory(), Links()))
    rows = [array("d") for _ in 3 * counts]
    for row, (begin, end) in zip(rows, pairwise(accumulate(3 * counts, initial=0)), strict=True):
        row.frombytes(times[begin:end].cast("B"))  # an array made of numbers would look at each
    start, ends, slack = (tuple(rows[i * len(counts) :][: len(counts)]) for i in range(3))
    return Simulation(
        makespan=makespan,
        span=tuple(span),
        busy=tuple(busy),
        wait=tuple(wait),
        bubble=tuple(makespan - seconds for seconds in busy),
        peak=schedule._peak,
        memory=None if memory is None else memory_of(schedule, memory, links),
        given=memory,
        period=period if steps > 1 else None,
        slack=tuple(map(tuple, slack)) if critical else None,
        critical_path=tuple(schedule.units_of(rank)[i] for rank, i in path) if critical else None,
        schedule=schedule,
        start=start,
        end=ends,
    )


def unit_seconds(schedule: Schedule, rows: Sequence[Sequence[float]]) -> array[float]:
    """Returns the seconds of every unit, rank after rank."""
    counts = schedule._num_units
    if len(rows) != len(counts):
        raise ValueError(f"durations hold {len(rows)} ranks, the schedule has {len(counts)}")
    for count, row in zip(counts, rows, strict=True):
        if len(row) != count:
            raise ValueError(f"durations of one rank holds {len(row)} values, must hold {count}")
    return numbers("durations", "d", chain.from_iterable(rows))


def _peaks(schedule: Schedule, memory: StepMemory, links: Links) -> list[list[int]]:
    """Returns for each rank, at their peaks, units, bytes of each holding, of receive places, and of all."""
    found = _C.program_memory(schedule._lower(), held_bytes(schedule, memory, links)).cast("B")
    rows: Any = found.cast("q", (schedule.num_ranks, len(HOLDINGS) + 3))
    return rows.tolist()  # type: ignore[no-any-return]


def memory_of(schedule: Schedule, memory: StepMemory, links: Links) -> PeakMemory:
    """Returns the peaks of every rank, with memory held throughout a step."""

    constant = dict.fromkeys(("weights", "optimizer", "logits"), (0,) * schedule.num_ranks)
    for name in [name for name in constant if getattr(memory, name)]:
        given, held = getattr(memory, name), [0] * schedule.num_ranks
        of_stages = [0] * (schedule.num_stages - 1) + [given] if name == "logits" else given
        values = whole_values(schedule, name, _C.PER_STAGE, of_stages)
        for rank, value in zip(schedule.rank_of_stage, values, strict=True):
            held[rank] += value
        constant[name] = tuple(held)
    _, *of_holdings, receive, totals = zip(*_peaks(schedule, memory, links), strict=True)
    found = {row.name: of_holdings[h] for h, row in enumerate(HOLDINGS) if row.counts_with == h}
    return PeakMemory(
        receive=receive,
        total=tuple(map(sum, zip(totals, *constant.values(), strict=True))),
        **constant,
        **found,
    )


def whole_values(schedule: Schedule, name: str, per: int, given: Any) -> array[int]:
    """Returns bytes or tokens of each rank, stage or segment; raises for numbers below 0."""
    values = flat(schedule, name, per, given, "q")
    if min(values) < 0:
        raise ValueError(f"{name} holds {min(values)} bytes, must be at least 0")
    return values


def costs_of_options(options: Mapping[str, Any]) -> Costs:
    """Returns the seconds of units and messages for which an order is built."""
    forward, inputs, weight = options.get("costs", (1.0, 1.0, 1.0))
    return Costs(
        forward,
        _sum(inputs, weight),
        weight,
        inputs,
        statistics=0.0,
        loss=0.0,
        links=Links(latency=options.get("transfer", 0.0)),
    )


def _sum(a: Any, b: Any) -> Any:
    if not hasattr(a, "__len__"):
        return [_sum(a, y) for y in b] if hasattr(b, "__len__") else a + b
    return [_sum(x, y) for x, y in zip(a, b if hasattr(b, "__len__") else [b] * len(a), strict=True)]


def _ignore(num_run: int) -> None:
    """Ignores the progress; the call lets Ctrl-C through."""
