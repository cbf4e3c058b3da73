"""Costs and bytes of a step as plain data, and the simulation of an order by the core."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

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
        latency: seconds from the end of a message's transfer to the arrival; a number, or ``[stage]`` for both
            directions between ``stage`` and ``stage + 1``.
        bandwidth: bytes per second of each directed edge between two stages, a number or ``[stage]`` as above; None:
            infinite.
        send: seconds of the sending rank's own time per message.
        message_bytes: bytes of a message, a number or a number per segment; gradients are as large as activations.
        statistics_bytes: bytes of a message from shard to shard of the vocabulary, a number or a number per segment.
    """

    latency: float | Sequence[float] = 0.0
    bandwidth: float | Sequence[float] | None = None
    send: float = 0.0
    message_bytes: int | Sequence[Any] = 0
    statistics_bytes: int | Sequence[Any] = 0


@dataclass(frozen=True)
class Costs:
    """Seconds of the units of an order, of messages, of moves to a tier, and of the optimizer.

    Attributes:
        forward, backward: seconds of F, and of the full B.
        weight: W if the order splits ``backward``; None: half of ``backward``.
        input: I if the order splits ``backward``; None: ``backward`` less ``weight``.
        recompute: R if the order recomputes; None: ``forward``.
        statistics, loss, embed, embed_gradient: S, T, E and G of a vocabulary spread over the ranks.
        move_out, move_in: seconds of the rank's own time in O, and in L.
        links: costs of messages.
        tier: seconds for moving a unit's saved tensors, out or back. A rank's tier moves one unit at a time, beside the
            running units. A, and the backward of a moved unit, wait for the tier.
        optimizer: seconds of a rank's work between two steps; a number, or a number per rank.
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
        jitter: every unit's seconds are multiplied by a number drawn evenly from ``1 - jitter`` to ``1 + jitter``.
        transfer_jitter: varies time on the link and latency of every message likewise.
        seed: equal seeds draw equal times.
    """

    jitter: float = 0.0
    transfer_jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class StepMemory:
    """Bytes held in a step. "Per stage": a number or ``[stage]``; "per unit": a number or ``[stage][segment]``.

    Attributes:
        activations: bytes saved by F of a unit beyond the input in the receive place; held to the end of B. If the unit
            is recomputed, R saves these bytes; if the unit is moved, the rank does not hold them from A to L.
        kept_activations: the part of ``activations`` read by W, if the backward is split; I frees the rest. None: all.
        output_gradients: gradients inside the stage, left to W by I, per unit.
        kv: keys and values of one micro-batch, per stage; held from F of segment 0 to the end of B of segment 0.
        kv_rows: keys and values written by a unit, per unit; held from F to the end of B or I. Replaces ``kv`` if the
            cache gives back pages as backwards end, as on CPUs from 8192 tokens on.
        kv_gradients: gradients of keys and values, per stage; held from B of the last segment to the end of B of
            segment 0.
        kv_gradient_rows: gradients of the keys and values written by a unit, per unit; held from B of the last segment
            to the end of the unit's own. Replaces ``kv_gradients`` if ``kv_rows`` replaces ``kv``.
        inputs: bytes kept for R by a recomputed unit beyond the receive place; held from F to the end of B or I.
        staying: bytes of every unit, held from F to the end of B or I, even if activations are recomputed or moved: an
            input from a stage of the same rank, the gradient of a loss within F. Counts with ``inputs`` in peaks.
        weights: weights and their gradients, per stage; held throughout.
        optimizer: state of the optimizer, per stage; held throughout.
        logits: logits of one unit of the last stage, and temporary bytes of the loss; held throughout.
        shard_logits: logits of a shard of the vocabulary, a number or ``[segment]``; held from S to the end of T.
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
    kv_gradient_rows: int | Sequence[Sequence[int]] = 0


@dataclass(frozen=True)
class PeakMemory:
    """Most bytes of each rank, one value per rank; every kind of :class:`StepMemory` at its own peak.

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


@dataclass(frozen=True)
class Simulation:
    """Times and peaks of one simulated step. Tuples hold a value per rank; times are in seconds.

    Attributes:
        makespan: first start to last end over all ranks.
        span: first start to last end of the rank.
        busy: sum of the rank's units.
        wait: time waiting for messages, for free places of receivers and for the tier.
        bubble: makespan less busy.
        peak: most live units at once; a unit lives from F (R, if recomputed) to the end of its backward, unless away.
        memory: peaks of every kind of memory, if given.
        given: the given memory.
        period: seconds per step in a row of steps, from the first step's last end to the last step's last end.
        slack: seconds by which each unit alone may take longer at an equal makespan, per rank in run order; None
            without ``critical``.
        critical_path: a chain of units, each waiting for the previous unit, from a first start to the last end; times
            and transfers of the chain add up to the makespan. None without ``critical``.
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
