"""Costs and bytes of a step, and the result of a simulation: plain data."""

from __future__ import annotations

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
        latency: seconds from the end of a message's transfer to its arrival; a number, or ``[stage]``, one for the
            edges between ``stage`` and ``stage + 1``, either way.
        bandwidth: bytes per second of each directed edge between two stages, a number or ``[stage]`` as above; None:
            infinite.
        send: seconds that a sender itself spends on a message.
        message_bytes: bytes of one message, a number or one per segment; gradients are as large as activations.
        statistics_bytes: the same of a message from shard to shard of the vocabulary.
    """

    latency: float | Sequence[float] = 0.0
    bandwidth: float | Sequence[float] | None = None
    send: float = 0.0
    message_bytes: int | Sequence[Any] = 0
    statistics_bytes: int | Sequence[Any] = 0


@dataclass(frozen=True)
class Costs:
    """Seconds of the units of an order, of its messages and of what else a rank does in a step.

    Attributes:
        forward, backward: seconds of F, and of the full B.
        weight: W where the order splits ``backward``; None: half of it.
        input: I where the order splits ``backward``; None: what ``weight`` leaves of it.
        recompute: R where the order recomputes; None: ``forward``.
        statistics, loss, embed, embed_gradient: S, T, E and G where the vocabulary is spread over the ranks.
        move_out, move_in: seconds that moving takes of the rank's own time: of O, and of L.
        links: what messages take.
        tier: seconds that a rank's tier takes to move what a unit saved, out or back. It moves one at a time, beside
            the units. A, and the backward of a unit that was moved, wait for it.
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
    """Times that vary by chance.

    Attributes:
        jitter: every unit takes its seconds times a number drawn evenly from ``1 - jitter`` to ``1 + jitter``.
        transfer_jitter: the same of every message's time on its link and its latency.
        seed: the same one draws the same times.
    """

    jitter: float = 0.0
    transfer_jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a step holds. Per stage: a number or one for each; per unit: a number or ``[stage][segment]``.

    Attributes:
        activations: what F of a unit saves beyond its input, which lies in its receive place; held to the end of B. If
            the unit is recomputed, R saves it; if it is moved, it is not held from A to L.
        kept_activations: the part of them that W reads, where the backward is split; I frees the rest. None: all.
        output_gradients: gradients inside the stage that I leaves to W, per unit.
        kv: keys and values of one micro-batch, per stage; held from F of segment 0 to the end of B of segment 0.
        kv_rows: keys and values that a unit writes, per unit; held from its F to the end of its B or I: what is held in
            place of ``kv`` where the cache gives back pages as backwards end, as on CPUs from 8192 tokens on.
        kv_gradients: their gradients, per stage; held from B of the last segment to the end of B of segment 0.
        kv_gradient_rows: gradients of the keys and values that a unit writes, per unit; held from B of the last segment
            to the end of the unit's own: in place of ``kv_gradients`` where ``kv_rows`` stands in for ``kv``.
        inputs: what a recomputed unit keeps for R beyond its receive place; held from F to the end of B or I.
        staying: what stays of every unit from its F to the end of its B or I, whatever becomes of its activations: an
            input that came from a stage of the same rank, the gradient that a loss within F has left. Counts with
            ``inputs`` in peaks.
        forward_work, backward_work: what F or R, and B or I, of a unit allocate for a while, per unit; held while they
            run.
        weights: with their gradients, per stage. Held throughout.
        optimizer: its state, per stage. Held throughout.
        logits: of one unit of the last stage, with what its loss needs; held throughout.
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
        receive: places of the receivers, each as large as the largest message that comes into it.
        total: most of all kinds together at one time; the sum of the peaks may be more.
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
        busy: sum of its units.
        wait: time it waits for messages, for free places of its receivers and for its tier.
        bubble: makespan less busy.
        peak: most units live at once, from forward (R, if they are recomputed) to the end of backward, unless away.
        memory: peaks of every kind of memory, where these were given.
        given: what was given.
        period: seconds per step where several were simulated: from the last end of the first step to that of the last.
        slack: where asked for, per rank in run order: seconds by which a unit alone may take longer while the makespan
            stays.
        critical_path: where asked for, units each of which waited for the one before it, from a first start to the last
            end: the makespan is theirs and their transfers'.
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
    start: tuple[memoryview[float], ...] = field(repr=False, hash=False)
    end: tuple[memoryview[float], ...] = field(repr=False, hash=False)

    @cached_property
    def timeline(self) -> Timeline:
        """(unit, start, end) of every unit in run order."""
        tracks = zip(self.schedule.ranks, self.start, self.end, strict=True)
        return tuple(tuple(zip(*track, strict=True)) for track in tracks)

    @property
    def bubble_ratio(self) -> float:
        """Share of the ranks' time that is bubble."""
        return sum(self.bubble) / (self.makespan * len(self.bubble)) if self.makespan > 0 else 0.0

    def to_text(self, width: int = 100) -> str:
        """The timeline as text, one line per rank, in ``width`` columns."""
        return timeline_text(self.timeline, width=width)
