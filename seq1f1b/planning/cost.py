"""A model in a pipeline on a machine, and the price of a step: seconds and bytes of units, peaks of ranks."""

from __future__ import annotations

import copy
import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from seq1f1b import _C
from seq1f1b.partition import ModelShape, balanced
from seq1f1b.plan import Layout
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.tables import ByParts, check_layout
from seq1f1b.schedule import Costs, Links, Schedule, StepMemory
from seq1f1b.seconds import MeasuredUnits, Terms, arrays_of, spans_of

__all__ = ["CostModel", "PackedRow", "Price", "RankBytes"]

_STATISTICS_BYTES = 12  # per token: a maximum, a sum of exponentials, the target's logit


class CostModel:
    """A model in a pipeline on a machine. :meth:`price` returns the seconds and bytes of units.

    On a ``ProfiledHardware``, seconds, activations, cache and messages are measured.

    Args:
        model: a shape; hardware: a machine; layout: degrees and choices.
        num_ranks, stages_per_rank: counts of the pipeline. seq_len: tokens of a micro-batch, a single sequence.
    Attributes:
        layers: number of layers of each stage.
        parts: costs of the model's parts.
        source: source of the seconds of units: the parts, or :meth:`measured` units.
    Raises:
        ValueError: a degree below 1, or a degree that does not divide the heads, experts or replicas; layers that do
            not sum to the model's, documents that do not sum to the sequence, an unknown ``layout.inside``; a profile
            of another model, or without a measurement for the layout.
    """

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        *,
        num_ranks: int,
        seq_len: int,
        stages_per_rank: int = 1,
        layout: Layout | None = None,
    ) -> None:
        self.model, self.hardware, self.layout = model, hardware, layout or Layout()
        num_stages = num_ranks * stages_per_rank
        self.num_ranks, self.num_stages, self.seq_len = num_ranks, num_stages, seq_len
        self.documents = self.layout.documents or (seq_len,)
        check_layout(self.layout, model, num_stages, seq_len)
        self.layers = self.layout.layers or tuple(
            model.layers // num_stages + (stage < model.layers % num_stages) for stage in range(num_stages)
        )
        self.parts = hardware._parts(model, hardware, self.layout, self.layers, num_ranks)
        self.source: ByParts | MeasuredUnits = self.parts

    @classmethod
    def balanced(
        cls, model: ModelShape, hardware: Hardware, *, stages_per_rank: int = 1, layout: Layout, **counts: int
    ) -> CostModel:
        """Makes a model with :meth:`balanced_layers`, unless the layout gives layers. Arguments as for the class."""
        cost = cls(model, hardware, stages_per_rank=stages_per_rank, layout=layout, **counts)
        if layout.layers is not None:
            return cost
        layout = replace(layout, layers=cost.balanced_layers())
        return cls(model, hardware, stages_per_rank=stages_per_rank, layout=layout, **counts)

    def on(self, hardware: Hardware) -> CostModel:
        """Returns a model with equal stages on another machine."""
        other = copy.copy(self)
        other.hardware = hardware
        other.source = other.parts = hardware._parts(self.model, hardware, self.layout, self.layers, self.num_ranks)
        return other

    def measured(self, terms: Terms) -> CostModel:
        """Returns a model with equal stages and bytes, and with the seconds of units that an engine measured."""
        other = copy.copy(self)
        other.source = MeasuredUnits(terms, self.source)
        return other

    def price(self, sizes: Sequence[int]) -> Price:
        """Returns the price of a step of equal sequences. sizes: tokens of each segment."""
        return Price(self, [PackedRow(self.documents, tuple(sizes))], is_alike=True)

    def price_rows(self, rows: Sequence[PackedRow]) -> Price:
        """Returns the price of a step of rows, which replace the model's ``seq_len`` and documents.

        Raises:
            ValueError: the layout copies prefixes.
        """
        if self.layout.copies_prefix:
            raise ValueError("rows of a step share a cache: the layout copies prefixes")
        return Price(self, rows, is_alike=False)

    # -- the sequence and the layers

    def piece_costs(self, seq_len: int, num_pieces: int) -> list[float]:
        """Returns the seconds of F and B of the whole model for each of ``num_pieces`` equal pieces of the sequence,
        without the costs that do not depend on a unit's length, for :func:`seq1f1b.partition_sequence`."""
        sizes = [seq_len * (i + 1) // num_pieces - seq_len * i // num_pieces for i in range(num_pieces)]
        seconds, _ = self.parts.seconds(spans_of(sizes, self.documents, self.parts.windows), floor=False)
        return list(seconds.total.sum(0).tolist())

    def balanced_layers(self) -> tuple[int, ...]:
        """Returns the layers of each stage that make the slowest stage fastest, head included."""
        parts, whole = self.parts, spans_of((self.seq_len,), self.documents, self.parts.windows)
        seconds: list[Any] = [parts.layer(whole, kind, False).total for kind in range(len(parts.layer_kinds))]
        of_kinds = [each.item() for each in seconds]
        layers = [of_kinds[place] for place in parts.places]
        head = float(np.sum(parts.last * parts.vocabulary(whole)[1].total))
        if len(of_kinds) > 1:
            return tuple(balanced(layers, head, self.num_stages))
        others = self.num_stages - 1
        if others == 0:
            return (self.model.layers,)
        lasts = np.arange(self.model.layers - others, -1, -1)  # every stage but the last has at least one layer
        slowest = np.maximum(lasts * layers[0] + head, -(-(self.model.layers - lasts) // others) * layers[0])
        last = int(lasts[slowest.argmin()])
        rest = self.model.layers - last
        return (*(rest // others + (stage < rest % others) for stage in range(others)), last)

    # -- links and the optimizer

    def links(self, rank_of_stage: Sequence[int]) -> tuple[list[float], list[float], float]:
        """Returns the edges between stages s and s + 1: latency and bytes per second of each edge, and the mean seconds
        for which a message occupies the sender.

        Ranks fill one node after another, each rank on the devices that share a stage; a node holds whole ranks. The
        next data-parallel replica follows the last rank.
        """
        hw, ranks_per_node = self.hardware, max(1, int(self.hardware.node_size) // self.parts.devices)
        nodes = [rank // ranks_per_node for rank in rank_of_stage]
        inside = [a == b for a, b in itertools.pairwise(nodes)]
        latencies = [hw.inside_latency if near else hw.between_latency for near in inside]
        rates = [hw.link_efficiency * (hw.inside_bandwidth if near else hw.between_bandwidth) for near in inside]
        sends = [hw.inside_send if near else hw.between_send for near in inside]
        return latencies, rates, sum(sends) / len(sends) if sends else 0.0

    def optimizer_seconds(self) -> list[float]:
        """Returns the seconds of each stage after the pipeline's part of a step; the stages of a rank add up."""
        return self.parts.optimizer_seconds


class PackedRow(NamedTuple):
    """One micro-batch of a step.

    Attributes:
        documents: tokens of each document, in order.
        sizes: tokens of each segment.
        parents: for a tree, the parent segment of each segment; None: a chain.
        parts: for a tree, the tokens of each segment, by leaf where leaves share a segment.
        indices: number of each document in the step, in order; a single number for a tree.
        pieces: for a tree, begin and size of runs of the tree's data, in the order of the row.
    """

    documents: tuple[int, ...]
    sizes: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    parts: tuple[tuple[int, ...], ...] | None = None
    indices: tuple[int, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def segment_sizes(self) -> tuple[int | tuple[int, ...], ...]:
        """Tokens of each segment, a tuple by leaf where leaves share a segment, as ``engine.step`` takes them."""
        return self.sizes if self.parts is None else tuple(part[0] if len(part) == 1 else part for part in self.parts)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at its peak.

    Attributes:
        static: weights, gradients, optimizer state.
        activations: activations and logits of live units; with a split backward also the tensors that I leaves to W.
        kv, kv_gradients: slots of the cache.
        receive: places of incoming messages.
        workspace: temporary bytes of one unit.
        reserve: the allocator's share, and memory held beside tensors.
        total: sum of all others.
    """

    static: int
    activations: int
    kv: int
    kv_gradients: int
    receive: int
    workspace: int
    reserve: int
    total: int


class Price:
    """Seconds and bytes of the units of a step, for building and simulating orders; :meth:`CostModel.price` makes it.

    A table is an array [stage, unit]. The units are the segments of all rows, one row after another. Equal
    micro-batches are one row.

    Attributes:
        cost: the model on a machine.
        rows: rows of the step; a single row stands for equal micro-batches.
        sizes: tokens of all segments, row after row.
        longest: tokens of the segments of the longest row.
        parents: parents of the segments of each row, for ``build_schedule``; None if no row is a tree.
        seconds: seconds of each pass, as a ``PassSeconds`` of tables.
        shard_seconds: tables of the seconds of S, T, E and G of a vocabulary over the ranks; {} for rows or without
            such passes.
        message_bytes: bytes of a message on one of the devices of a stage, an array [unit].
        least_bytes: lower bound of the fullest rank's peak under orders that neither recompute nor move units: the mean
            over the ranks of weights, their training, and activations of the longest micro-batch, or path of a tree.
    """

    def __init__(self, cost: CostModel, rows: Sequence[PackedRow], *, is_alike: bool) -> None:
        self.cost, self.rows, self._is_alike = cost, rows, is_alike
        counts = [len(row.sizes) for row in rows]
        self.num_segments = counts[0] if is_alike else counts  # for build_schedule
        self.sizes = [size for row in rows for size in row.sizes]
        self._ends = list(itertools.accumulate(counts))
        self._longest = max(range(len(rows)), key=lambda index: sum(rows[index].sizes))
        self.longest = list(rows[self._longest].sizes)
        self._slot_tokens = cost.seq_len if is_alike else sum(self.longest)  # tokens of one slot of the cache
        parents, parts = tuple([row.parents for row in rows]), cost.parts
        self.parents = None if is_alike or not any(parents) else parents
        # Whether the cache frees pages as backwards end.
        self._releases = not cost.layout.copies_prefix and 0 < cost.hardware.release_tokens <= self._slot_tokens
        spans = [spans_of(row.sizes, row.documents, parts.windows, row.parents, row.parts) for row in rows]
        span = spans[0] if len(spans) == 1 else arrays_of(spans)
        self.seconds, shards = cost.source.seconds(span)
        self.shard_seconds = shards if is_alike and parts.spreads else {}
        self.message_bytes: Any = _whole_bytes(span.tokens * parts.message_bytes)
        # Tables of bytes: saved activations, the part kept until W, and the gradients that I adds for W.
        self._held: Any = _whole_bytes(parts.held(span.tokens))
        if cost.layout.copies_prefix:  # the last copy has all keys
            self._held[0][:, -1] += _whole_bytes(parts.cache_bytes[0] * cost.seq_len)
        row, end = rows[self._longest], self._ends[self._longest]
        saved, paths = self._held[0][:, end - len(row.sizes) : end].sum(0).tolist(), list[int]()
        for number, parent in enumerate(row.parents or range(-1, len(saved) - 1)):
            paths.append(saved[number] + (paths[parent] if parent >= 0 else 0))
        static = sum(parts.trained_parameters) * parts.trained_bytes + sum(parts.frozen_bytes)
        self.least_bytes = float((static + (1 + cost.hardware.allocator_reserve) * max(paths)) / cost.num_ranks)

    # -- tables

    def microbatches(self, row: Any) -> list[Any]:
        """Splits the row of a stage in a table by micro-batch; equal micro-batches are one part."""
        return np.split(row, self._ends[:-1])

    @property
    def imbalance(self) -> float:
        """Relative excess of the slowest unit over the mean unit, each with F and B of all stages."""
        units = self.seconds.total.sum(0)
        return float(units.max() / units.mean() - 1.0)

    def moving_seconds(self) -> dict[str, Any]:
        """Returns fields of :class:`seq1f1b.Costs`, tables of seconds to move a unit's saved bytes: of the tier, out or
        back, and of the rank itself, out and back.

        Raises:
            ValueError: the machine has no tier.
        """
        hw = self.cost.hardware
        if not hw.tier_bandwidth:
            raise ValueError(f"{hw.name} has no tier to which units could move: its tier_bandwidth is 0")
        rates = {"tier": 1 / hw.tier_bandwidth, "move_out": hw.move_out, "move_in": hw.move_in}
        return {name: rate * self._held[0] for name, rate in rates.items()}

    def costs(self, schedule: Schedule, *, moves: bool = False) -> Costs:
        """Returns the costs of a step of the order; for rows, without optimizer and without seconds of senders.
        Args:
            moves: adds the seconds of units that move to a tier.
        """
        cost = self.cost
        latencies, rates, send = cost.links(schedule.rank_of_stage)
        links = Links(latencies, rates, message_bytes=self.message_bytes)
        seconds = self.seconds._asdict() | {"statistics": 0.0, "loss": 0.0} | self.shard_seconds
        if moves:
            seconds |= self.moving_seconds()
        if not self._is_alike:
            return Costs(**seconds, links=links)
        if cost.parts.spreads:
            links = replace(links, statistics_bytes=[_STATISTICS_BYTES * n // cost.layout.context for n in self.sizes])
        optimizer: Any = np.bincount(schedule.rank_of_stage, cost.parts.optimizer_seconds)
        return Costs(**seconds, links=replace(links, send=send), optimizer=optimizer)

    # -- bytes of units

    def held_bytes(self) -> Any:
        """Returns a table of the most bytes that a unit holds before or after I, for orders with a cap in bytes. The
        first segment includes the micro-batch's cache, which is freed after the first segment's backward."""
        first = [] if self.cost.layout.copies_prefix else [0, *self._ends[:-1]]
        saved, kept, added = self._held
        most = np.maximum(saved, kept + added)
        most[:, first] += _whole_bytes(self.cost.parts.cache_bytes[0] * self._slot_tokens)[:, None]
        return most

    def memory(self, rank_of_stage: Sequence[int]) -> StepMemory:
        """Returns the bytes that units hold. ``staying`` counts tensors of a message's size beside activations: an
        input from a stage of the same rank, and the gradient of the last stage's output from a loss within F. The cache
        is included if pages come and go with units; a cache that is held throughout the step is counted in
        ``rank_bytes``."""
        parts, layout, last = self.cost.parts, self.cost.layout, self.cost.num_stages - 1
        counts = [
            (stage > 0 and rank_of_stage[stage - 1] == rank)
            + (layout.head_in_loss and not parts.spreads and stage == last)
            for stage, rank in enumerate(rank_of_stage)
        ]
        saved, kept, added = self._held
        found: dict[str, Any] = {"staying": np.outer(counts, self.message_bytes)}
        if parts.spreads and self._is_alike:
            found["shard_logits"] = _whole_bytes(parts.logit_bytes * np.array(self.sizes) / self.cost.num_ranks)
        if self._releases:
            found["kv_rows"], found["kv_gradient_rows"] = _whole_bytes(np.multiply.outer(parts.cache_bytes, self.sizes))
        elif self._is_alike:  # last copy of a prefix and the copy's gradient, from first to last backward
            copies = 2 * layout.copies_prefix * parts.cache_bytes[0] * self.cost.seq_len
            found["kv_gradients"] = _whole_bytes(copies).tolist()
        return StepMemory(activations=saved, kept_activations=kept, output_gradients=added, **found)

    def step_memory(self, rank_of_stage: Sequence[int]) -> StepMemory:
        """Returns the bytes of all tensors of a step; :meth:`rank_bytes` adds workspace and the allocator's reserve."""
        cost, hw, parts = self.cost, self.cost.hardware, self.cost.parts
        kv, gradients = parts.cache_bytes * self._slot_tokens
        if cost.layout.copies_prefix:  # the last copy and the copy's gradient
            kv, gradients = 0.0 * kv, 2 * kv
        return replace(
            self.memory(rank_of_stage),
            kv=_whole_bytes(kv).tolist(),
            kv_gradients=_whole_bytes(gradients).tolist(),
            kv_rows=0,
            kv_gradient_rows=0,
            weights=[
                math.ceil(frozen + n * (hw.element_bytes + hw.gradient_bytes))
                for frozen, n in zip(parts.frozen_bytes, parts.trained_parameters, strict=True)
            ],
            optimizer=[math.ceil(n * hw.optimizer_bytes / cost.layout.data) for n in parts.trained_parameters],
            logits=0 if parts.spreads else math.ceil(parts.logit_bytes * max(self.sizes)),
        )

    # -- bytes of ranks

    def rank_bytes(self, schedule: Schedule) -> list[RankBytes]:
        """Returns the peak of every rank under an order. A slot of the cache is as long as the longest row; with trees,
        as long as the order needs on the rank."""
        cost, hw, parts, P = self.cost, self.cost.hardware, self.cost.parts, schedule.num_ranks
        rank_of_stage, costs = schedule.rank_of_stage, Costs(links=Links(message_bytes=self.message_bytes))
        memory = self.memory(rank_of_stage)
        peaks = schedule.peak_memory(memory, costs)
        stages_of = [[stage for stage, at in enumerate(rank_of_stage) if at == rank] for rank in range(P)]
        slots = np.zeros((2, P))  # of the cache and its gradients: unless pages come and go, held all through the step
        if not self._releases and not cost.layout.copies_prefix:
            tokens = [self._slot_tokens] * P
            if schedule.parents is not None:
                sizes = array("q", self.sizes)
                tokens = [_C.schedule_assign_rows(schedule.handle, rank, sizes)[1] for rank in range(P)]
            of_slots = np.multiply.outer(parts.cache_bytes, tokens)  # [2, stage, rank]
            for stages in zip(*stages_of, strict=True):  # one stage of each rank, with slots for the stage's own peak
                counted: Any = np.array([int(stage in stages) for stage in range(schedule.num_stages)])
                live_slots = schedule.peak_memory(StepMemory(kv=counted, kv_gradients=counted))
                slots += np.array([live_slots.kv, live_slots.kv_gradients]) * of_slots[:, list(stages), list(range(P))]
        of_stages: Any = np.maximum(parts.least_work, parts.work_bytes * max(self.sizes))
        work = np.array([max(of_stages[stages]) for stages in stages_of])
        if cost.layout.tensor > 1:  # gathered whole hidden states, inputs and outputs of a unit's collectives
            whole = max(self.sizes) / cost.layout.context * cost.model.hidden * hw.element_bytes
            layers = np.array([max(cost.layers[stage] for stage in stages) for stages in stages_of])
            work = work + hw.collective_buffers * layers * whole
        total, receive = np.array(peaks.total), np.array(peaks.receive)
        live = total - receive
        rows = np.minimum(live, peaks.kv)
        gradient_rows = np.minimum(live - rows, peaks.kv_gradients)
        reserve = hw.allocator_reserve * (total + slots[0] + slots[1] + work) + hw.context_bytes
        kv, gradients, work, reserve = _whole_bytes([*slots, work, reserve])
        lengths, copies = set(self.sizes), 0.0
        if hw.length_pools and len(lengths) > 1 and self._is_alike:
            # Blocks of one length serve no other length: the allocator keeps the sum of the peaks by length less the
            # joint peak, and copies of prefixes, but for first and last.
            held = memory.activations
            tables = [held, *(held * (np.array(self.sizes) == length) for length in lengths)]
            joint, *alone = (schedule.peak_memory(StepMemory(activations=table)).activations for table in tables)
            if cost.layout.copies_prefix:
                copies = (parts.cache_bytes[0] * sum(list(itertools.accumulate(self.sizes))[1:-1])).max()
            reserve += _whole_bytes(hw.length_pools * (np.sum(alone, axis=0) - joint + copies))
        fields = live - rows - gradient_rows, kv + rows, gradients + gradient_rows, receive, work, reserve
        trained, frozen = (np.bincount(rank_of_stage, each) for each in (parts.trained_parameters, parts.frozen_bytes))
        columns = np.array([_whole_bytes(trained * parts.trained_bytes + frozen), *fields])
        return list(map(RankBytes, *columns.tolist(), columns.sum(0).tolist()))


def _whole_bytes(size: Any) -> Any:
    """Rounds a number or an array up to whole bytes."""
    return np.ceil(size).astype(np.int64)
