"""Measurements of a step: times and peaks of one rank or of all ranks, beside the order's planned peaks."""

from __future__ import annotations

import json
import os
import resource
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

from seq1f1b import _C
from seq1f1b.documents.rows import runs_of
from seq1f1b.engine.measure import Activations
from seq1f1b.engine.pipeline import EdgeReport
from seq1f1b.engine.step import StepRecord
from seq1f1b.partition import ModelShape
from seq1f1b.report.idle import CAUSES, Idle, StepTimes, advice, idle_of_ranks, mean_idle
from seq1f1b.schedule import Schedule, Simulation, StepMemory
from seq1f1b.table import table_text
from seq1f1b.transport.values import pack, sendable, unpack
from seq1f1b.unit import Unit, edges_of, unit_of

__all__ = ["EdgeReport", "Idle", "PipelineReport", "Report", "StageReport"]

FORMAT = "seq1f1b report 1"
_RUN = _C.OPCODES.index("RUN")
_AWAY = _C.PASSES.index("A")
Track: TypeAlias = tuple[tuple[Unit, float, float], ...]
sendable(Unit)


@sendable
@dataclass(frozen=True)
class StageReport:
    """Figures of one stage. Units and tokens are live from the start of F, or R, to the end of B, or W.

    Attributes:
        peak_live_units, peak_live_tokens: measured.
        planned_live_units, planned_live_tokens: predicted by the lowered program and the segment sizes.
        planned_kv_slots, planned_grad_slots: most micro-batches with K/V, and with dK/dV, held at once.
        activation_bytes: most bytes held at once by the graphs of live units, measured in the first step of the last
            new shape; None if not measured (compiled modules).
        planned_activation_bytes: bytes held in the order, by the step's mean bytes per token.
        gradient_bytes, planned_gradient_bytes: measured and planned bytes of layers' output gradients, left to W by I.
        deferred_weights: elements of the weights with gradients left to W by I, in whole or in part.
        fused_weights: elements of the weights with gradients summed by the product itself, in W or in whole backwards;
            for other weights autograd needs a cast and an addition in each unit.
        trained_weights: elements of all parameters that require grad.
        attention_layers: calls of ``causal_attention`` in one forward, each with a handle of its own.
    """

    stage: int
    peak_live_units: int
    planned_live_units: int
    peak_live_tokens: int
    planned_live_tokens: int
    planned_kv_slots: int
    planned_grad_slots: int
    activation_bytes: int | None
    planned_activation_bytes: int | None
    gradient_bytes: int | None
    planned_gradient_bytes: int | None
    deferred_weights: int
    fused_weights: int
    trained_weights: int
    attention_layers: int = 0


@sendable
@dataclass(frozen=True)
class Report:
    """Figures of one rank's last step. Times are in seconds.

    Stages on the CPU take the host's clock. On a GPU times come from events on the computing stream: in the time beside
    ``busy``, ``wait``, ``send`` and ``tier``, the GPU had all inputs of a unit and waited for the host to start the
    unit. Reading times of a GPU waits for the step's end.

    Attributes:
        start: time of the step's first instruction, on the machine's monotonic clock; on a GPU, when the GPU began it.
        seconds: the whole step, from ``start`` to the end of the last instruction: busy + wait + send + tier + the
            engine's own time.
        busy: time in the units, parts of W in waits included.
        wait: time waiting for messages, without the units in waits.
        send: time of credits and copies.
        tier: time waiting for moves to the tier and back, in A and before backwards of moved units.
        moved_bytes: bytes sent to the tier, and brought back.
        move_out_rate, move_in_rate: bytes per second of moves, without waiting time; 0 without moves.
        recomputed_blocks: number of blocks computed again in backwards of kept and moved units, over all units.
        bubble: share of ``seconds`` in which the rank is not ``busy``; :class:`PipelineReport` has the share of all
            ranks.
        kv_bytes, grad_bytes: bytes of the slabs of keys and values, and of the gradients' slabs. Planned bytes are
            slots times the bytes of the step's layers; held bytes include slabs of an earlier, longer step.
        receive_places: places of all incoming edges.
        process_peak_bytes: the most resident memory of the process so far, in host memory.
        timeline: (unit, start, end) on the machine's monotonic clock. A W in the timeline is the part run at W's place.
        fills: (unit, start, end) of the parts of W in waits, if the order fills waits.
        edges: edges from and to the rank.
        logit_bytes: most bytes of logits in the rank's shard of the vocabulary at once, between S and T.
        look_seconds: time of the last check of the rank's stages by values, after a first step and outside of
            ``seconds``; 0 without a check.
        clock: owner of the times, "host" or "device".
        tokens: tokens of all sequences of the step, on the rank of the first stage; 0 elsewhere.
        device_peak_bytes, device_reserved_bytes: most bytes of the process's tensors on its GPU so far, and most bytes
            taken by torch's allocator; 0 on the CPU. ``torch.cuda.reset_peak_memory_stats`` begins anew.
        siblings: tokens of the siblings in each segment, () for a segment without; () if no segment has siblings.
    """

    rank: int
    step: int
    training: bool
    segment_sizes: tuple[int, ...]
    start: float
    seconds: float
    busy: float
    wait: float
    send: float
    bubble: float
    stages: tuple[StageReport, ...]
    kv_bytes: int
    planned_kv_bytes: int
    grad_bytes: int
    planned_grad_bytes: int
    receive_places: int
    process_peak_bytes: int
    timeline: Track
    fills: Track
    edges: tuple[EdgeReport, ...]
    tier: float = 0.0
    moved_bytes: int = 0
    logit_bytes: int = 0
    recomputed_blocks: int = 0
    look_seconds: float = 0.0
    clock: str = "host"
    tokens: int = 0
    device_peak_bytes: int = 0
    device_reserved_bytes: int = 0
    move_out_rate: float = 0.0
    move_in_rate: float = 0.0
    siblings: tuple[tuple[int, ...], ...] = ()

    @property
    def _unit_seconds(self) -> dict[Unit, float]:
        """Seconds of every unit in run order, in and out of waits; 0 for A, which only waits."""
        seconds = {unit: (end - start) * (unit.kind != "A") for unit, start, end in self.timeline}
        for unit, start, end in self.fills:
            seconds[unit] += end - start
        return seconds

    @property
    def _shared_seconds(self) -> dict[Unit, float]:
        """Seconds of every unit, with an equal share of the engine's own time."""
        units = self._unit_seconds
        return {unit: seconds + self._own_seconds / len(units) for unit, seconds in units.items()}

    @property
    def _own_seconds(self) -> float:
        """Seconds of the engine itself: neither in units nor in waits nor in sends."""
        return max(self.seconds - self.busy - self.wait - self.send - self.tier, 0.0)

    def _count(self, kind: str) -> int:
        return sum(unit.kind == kind for unit, _, _ in self.timeline)

    @property
    def moved_units(self) -> int:
        """Number of units whose saved activations were away for a while."""
        return self._count("O")

    @property
    def kept_units(self) -> int:
        """Number of units neither recomputed nor moved."""
        return self._count("F") - self._count("R") - self._count("O")

    @property
    def recomputed_units(self) -> int:
        """Number of units recomputed before the backward."""
        return self._count("R")


@dataclass(frozen=True)
class PipelineReport:
    """Figures of all ranks' last step. ``str(report)`` says why the step is slow: :attr:`idle` and :attr:`advice`.

    Attributes:
        ranks: one :class:`Report` each.
        makespan: first start to last end over all ranks (ranks of several hosts: the longest rank).
        bubble: share of ``makespan`` in which ranks are not busy, the mean over ranks.
        simulated: a simulation of the step's order with the measured units and free messages: the least time of the
            order for these units. No prediction, because the units come from the step.
        tuning: words about a tuned engine's tried and found orders, or about progress; else empty. Not saved.
        is_tuned: whether a tuned engine has found an order. Not saved.
    """

    ranks: tuple[Report, ...]
    makespan: float
    bubble: float
    simulated: Simulation
    tuning: str = ""
    is_tuned: bool = False

    @property
    def timeline(self) -> tuple[Track, ...]:
        """Timeline of each rank, with the first start of all ranks at 0."""
        return tuple(tuple((u, a - self._start, b - self._start) for u, a, b in r.timeline) for r in self.ranks)

    @property
    def timeline_with_waits(self) -> tuple[Track, ...]:
        """:attr:`timeline` per rank, with the parts of W in waits, each before its unit's own place."""
        tracks = [sorted((*r.timeline, *r.fills), key=lambda entry: entry[1]) for r in self.ranks]
        return tuple(tuple((u, a - self._start, b - self._start) for u, a, b in track) for track in tracks)

    @property
    def _start(self) -> float:
        return min(r.timeline[0][1] for r in self.ranks if r.timeline)

    @property
    def segment_seconds(self) -> tuple[float, ...]:
        """Busy seconds of each segment, over all passes, stages and micro-batches.

        If segments are equally long, ``partition_sequence(costs=)`` cuts by these seconds into segments of equal
        measured cost.
        """
        seconds = [0.0] * self.simulated.schedule.num_segments
        for rank in self.ranks:
            for unit, start, end in (*rank.timeline, *rank.fills):
                seconds[unit.segment] += end - start
        return tuple(seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step over its makespan; 0 in a report saved by an older version."""
        return sum(rank.tokens for rank in self.ranks) / self.makespan

    def flops_utilization(self, model: ModelShape, peak: float) -> float:
        """Returns the model FLOP of the step over the devices' peak FLOP in the step's time (MFU).

        Counts three forwards of the model, with causal attention, and no recomputation.

        Args:
            peak: FLOP per second of one rank's device, in the dtype of the products.
        Raises:
            ValueError: ``peak`` is not positive, or the shape is unsound.
        """
        if not peak > 0:
            raise ValueError(f"peak is {peak}, must be the FLOP per second of a device")
        schedule, sizes = self.simulated.schedule, self.ranks[0].segment_sizes
        rows: list[tuple[int, ...]] = [(sum(sizes),)] * schedule.num_microbatches
        if len(sizes) == schedule._first_cells[-1]:  # a step of rows, even if the order's text does not show rows
            rows = [sizes[a:b] for a, b in pairwise(schedule._first_cells)]
        pieces = runs_of(rows, schedule.parents, self.ranks[0].siblings)
        sequences = sum(rank.tokens for rank in self.ranks) / sum(length for _, length in pieces)
        whole = 3.0 * sequences * sum(model.flops(first, first + length) for first, length in pieces)
        return whole / (self.makespan * len(self.ranks) * peak)

    def scalars(self) -> dict[str, float]:
        """Returns figures for a log, such as TensorBoard's or wandb's, by name.

        The figures are the step's seconds, tokens per second and bubble, each idle cause's share of the step
        (``"idle/schedule"``), and the most bytes over the ranks of processes, of GPUs' tensors and of live units'
        activations.
        """
        mean = mean_idle(self.idle)
        found = {"seconds": self.makespan, "tokens_per_second": self.tokens_per_second, "bubble": self.bubble}
        found |= {f"idle/{name}": getattr(mean, name) / self.makespan for name in CAUSES}
        most = {
            name: float(max(getattr(rank, name) for rank in self.ranks))
            for name in ("process_peak_bytes", "device_peak_bytes", "device_reserved_bytes")
        }
        most["activation_bytes"] = float(max(sum(s.activation_bytes or 0 for s in rank.stages) for rank in self.ranks))
        return found | {name: value for name, value in most.items() if value}

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Idle seconds of the makespan per rank, split into causes."""
        return idle_of_ranks(self._times)

    @property
    def advice(self) -> str:
        """The main cause of idle time in numbers, with a remedy, in one sentence."""
        return advice(self._times, self.idle)

    @cached_property
    def _times(self) -> StepTimes:
        schedule = self.simulated.schedule
        layers = {stage.stage: stage.attention_layers for rank in self.ranks for stage in rank.stages}
        return StepTimes(
            schedule=schedule,
            units=[list(r._unit_seconds.values()) for r in self.ranks],
            own=[r._own_seconds for r in self.ranks],
            late=[max(r.start - self._start, 0.0) for r in self.ranks],
            makespan=self.makespan,
            sizes=self.ranks[0].segment_sizes,
            layers=tuple(layers[index] for index in sorted(layers)),
            is_tuned=bool(self.tuning),
        )

    def __str__(self) -> str:
        rows = [("rank", "busy s", "busy", *CAUSES)]
        names = (*(str(rank.rank) for rank in self.ranks), "mean")
        for name, idle in zip(names, (*self.idle, mean_idle(self.idle)), strict=True):
            busy = self.makespan - idle.total
            rows.append((name, f"{busy:.4g}", f"{busy / self.makespan:.1%}", *idle.shares(self.makespan)))
        moves = ""
        for r in self.ranks:
            if r.recomputed_units + r.moved_units + r.recomputed_blocks == 0:
                continue
            moves += (
                f"rank {r.rank} kept {r.kept_units} units, recomputed {r.recomputed_units} and moved {r.moved_units} "
                f"({r.moved_bytes / 2**20:.4g} MiB at {r.move_out_rate / 1e9:.3g} GB/s out and "
                f"{r.move_in_rate / 1e9:.3g} back), for which it waited {r.tier:.3g} s; {r.recomputed_blocks} blocks "
                "were computed again\n"
            )
        step = f"step {self.ranks[0].step}: {self.makespan:.4g} s, of which ranks are busy or wait because of"
        tuning = f"\n{self.tuning}" * bool(self.tuning)
        return f"{step}\n{table_text(rows)}{moves}{self.advice}{tuning}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Appends the report to a file, as one line of JSON; ``seq1f1b report FILE`` prints the file.

        A unit takes about 100 bytes.
        """
        order = self.simulated.schedule
        line = {"format": FORMAT, "schedule": order.to_text(), "prefetch": order.prefetch}
        line["ranks"] = json.loads(pack(self.ranks))
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelineReport:
        """Reads the last report of a file written by :meth:`save`.

        Raises:
            ValueError: the file holds no report, or a line that is no report.
        """
        *_, last = cls.load_all(path)
        return last

    @classmethod
    def load_all(cls, path: str | os.PathLike[str]) -> Iterator[PipelineReport]:
        """Yields every report of a file, in the order of saving.

        Raises:
            ValueError: the file holds no report, or a line that is no report.
        """
        number = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _read_line(line)
                except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
                    raise ValueError(f"{os.fspath(path)}, line {number}: no report of a step: {error}") from error
        if not number:
            raise ValueError(f"{os.fspath(path)} holds no report; PipelineReport.save writes one")


def _read_line(line: bytes) -> PipelineReport:
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'must be a JSON object whose "format" is {FORMAT!r}; PipelineReport.save writes one')
    schedule, ranks = Schedule.from_text(data["schedule"]), unpack(json.dumps(data["ranks"]).encode())
    schedule = schedule.replace(prefetch=data.get("prefetch", 1))  # 1 in files of older versions
    if not isinstance(ranks, tuple) or not all(isinstance(r, Report) for r in ranks):
        raise ValueError("its ranks are no reports")
    if tuple(tuple(unit for unit, *_ in r.timeline) for r in ranks) != schedule.ranks:
        raise ValueError("its units are not those of its order")
    return _of_ranks(ranks, schedule)


def make_report(runner: Any, gather: Callable[[Any], list[Any]] | None) -> Report | PipelineReport:
    """Returns the report of a runner's last step; with ``gather`` (an all-gather of objects), of all ranks."""
    if runner.last_step is None:
        raise RuntimeError("there is nothing to report before the first step")
    own, tuner = _rank_report(runner, runner.last_step), runner.tuner
    if gather is None:
        return own
    joined = _of_ranks(tuple(gather(own)), runner.last_step.order.schedule)
    return joined if tuner is None else replace(joined, tuning=tuner.text, is_tuned=tuner.has_found)


def _of_ranks(ranks: tuple[Report, ...], schedule: Schedule) -> PipelineReport:
    tracks = [r.timeline for r in ranks if r.timeline]
    makespan = max(track[-1][2] for track in tracks) - min(track[0][1] for track in tracks)
    simulated = schedule.simulate(durations=[list(r._unit_seconds.values()) for r in ranks])
    return PipelineReport(ranks, makespan, 1.0 - sum(r.busy for r in ranks) / (makespan * len(ranks)), simulated)


def _rank_report(runner: Any, record: StepRecord) -> Report:
    pipeline, cache, rank, order = runner.pipeline, runner.cache, runner.pipeline.rank, record.order
    is_on_gpu, is_cuda = _C.executor_settle(order.executor), pipeline.device.type == "cuda"
    moved = None if pipeline.tier is None else pipeline.tier.step_facts()
    walked, walked_fills = _C.executor_timeline(order.executor, rank)
    spent = dict.fromkeys(_C.OPCODES, 0)  # ns
    for opcode, (number, *_), begin, end in walked:
        name = "BACK" if opcode == _RUN and number == _AWAY else _C.OPCODES[opcode]  # A only waits
        spent[name] += end - begin
    filled = sum(end - begin for _, begin, end in walked_fills)
    seconds, busy = (walked[-1][3] - walked[0][2]) * 1e-9, (spent["RUN"] + filled) * 1e-9

    def track(entries: Iterable[Any]) -> Track:
        return tuple((unit_of(unit), begin * 1e-9, end * 1e-9) for unit, begin, end in entries)

    layers = _C.kv_cache_layers(cache)  # stage, bytes per token of keys and values, and of their gradients
    counts = Counter(stage for stage, _, _ in layers)
    stages = {stage: _stage_report(runner, record, stage, counts[stage]) for stage in order.stages}
    kv_bytes, grad_bytes = _C.kv_cache_bytes(cache)
    length = record.length  # tokens of the longest micro-batch
    if order.schedule.parents is not None:  # the most tokens of trees in a slot at once
        _, length = _C.schedule_assign_rows(order.schedule.handle, rank, array("q", record.sizes))
    return Report(
        rank=rank,
        step=record.number,
        training=record.training,
        segment_sizes=tuple(record.sizes),
        siblings=tuple(tuple(record.siblings[0][a:b]) for a, b in pairwise(record.siblings[1])),
        start=walked[0][2] * 1e-9,
        seconds=seconds,
        busy=busy,
        wait=(spent["WAIT"] - filled) * 1e-9,
        send=spent["SEND"] * 1e-9,
        bubble=1.0 - busy / seconds if seconds > 0 else 0.0,
        stages=tuple(stages.values()),
        kv_bytes=kv_bytes,
        planned_kv_bytes=length * sum(stages[i].planned_kv_slots * of_token for i, of_token, _ in layers),
        grad_bytes=grad_bytes,
        planned_grad_bytes=length * sum(stages[i].planned_grad_slots * of_token for i, _, of_token in layers),
        receive_places=sum(edge.num_places for edge in edges_of(order.program) if edge.destination_rank == rank),
        process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        timeline=track(entry for opcode, *entry in walked if opcode == _RUN),
        fills=track(walked_fills),
        edges=pipeline.edges,
        tier=spent["BACK"] * 1e-9,
        moved_bytes=record.total("moved_bytes"),
        logit_bytes=record.logit_bytes,
        recomputed_blocks=record.total("blocks_again"),
        look_seconds=sum(own.get("look_seconds", 0) for own in runner.first_figures.values()),
        clock="device" if is_on_gpu else "host",
        tokens=record.tokens,
        device_peak_bytes=torch.cuda.max_memory_allocated(pipeline.device) if is_cuda else 0,
        move_out_rate=moved.bytes_out / moved.ns_out * 1e9 if moved and moved.ns_out else 0.0,
        move_in_rate=moved.bytes_in / moved.ns_in * 1e9 if moved and moved.ns_in else 0.0,
        device_reserved_bytes=torch.cuda.max_memory_reserved(pipeline.device) if is_cuda else 0,
    )


def _stage_report(runner: Any, record: StepRecord, stage: int, layers: int) -> StageReport:
    live_units, live_tokens = _C.executor_stage_measure(record.order.executor, stage)
    planned_units, kv_slots, grad_slots = _C.program_stage_peak(record.order.program, stage)
    schedule = record.order.schedule
    rank: int = runner.pipeline.rank

    def planned(logits: int = 0, **per_token: float) -> int:
        """Returns the most bytes of the stage's units, as planned."""
        tables: dict[str, Any] = {}
        for name, each in per_token.items():
            tables[name] = np.zeros((schedule.num_stages, len(record.sizes)), np.int64)
            tables[name][stage] = np.rint(each * np.array(record.sizes))
        return schedule.peak_memory(StepMemory(logits=logits, **tables)).total[rank]

    measured: Activations | None = runner.first_figures[stage].get("activations")
    saved = gradients = None
    if measured is not None:
        logits = round(measured.head * max(record.sizes))
        saved = planned(logits, activations=measured.saved, kept_activations=measured.kept)
        gradients = planned(output_gradients=measured.gradients)
    return StageReport(
        stage=stage,
        peak_live_units=live_units,
        planned_live_units=planned_units,
        peak_live_tokens=live_tokens,
        planned_live_tokens=planned(activations=1.0),
        planned_kv_slots=kv_slots,
        planned_grad_slots=grad_slots,
        activation_bytes=None if measured is None else measured.peak_saved,
        planned_activation_bytes=saved,
        gradient_bytes=None if measured is None else measured.peak_gradients,
        planned_gradient_bytes=gradients,
        deferred_weights=record.figures[stage].get("deferred_weights", 0),
        fused_weights=record.figures[stage].get("fused_weights", 0),
        trained_weights=runner.stages[stage].trained_weights,
        attention_layers=layers,
    )
