"""A model in a pipeline on a machine, and the price of a step: its units' seconds and bytes, and peaks of the ranks."""

from __future__ import annotations

import copy
import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from seq1f1b import _C
from seq1f1b.partition import ModelShape, balanced, partition_sequence
from seq1f1b.plan import Layout
from seq1f1b.planning.by_parts import ByParts, UnitBytes, check_layout, whole_bytes
from seq1f1b.planning.hardware import Hardware
from seq1f1b.schedule import Costs, Links, Schedule, StepMemory
from seq1f1b.seconds import Span, arrays_of, seconds_of, shards_of, spans_between, spans_of
from seq1f1b.unit_times import MeasuredUnits, Terms

__all__ = ["CostModel", "PackedRow", "Price", "RankBytes"]

_PIECES = 1024  # of the sequence whose costs a split balances
_STATISTICS_BYTES = 12  # of a token: a maximum, a sum of exponentials, the target's logit


class CostModel:
    """A model in a pipeline on a machine. :meth:`price` tells the seconds and bytes of its units.

    On a ``ProfiledHardware`` seconds, activations, cache and messages are the measured ones.

    Args:
        model: a shape; hardware: a machine; layout: degrees and choices.
        num_ranks, stages_per_rank: of the pipeline. seq_len: tokens of a micro-batch, of which there is one sequence.
    Attributes:
        layers: of each stage.
        parts: what the model's parts cost.
        source: of the seconds of units: the parts, or :meth:`measured` ones.
    Raises:
        ValueError: a degree below 1 or one that does not divide what it shards, layers that do not sum to the model's,
            documents that do not sum to the sequence, an unknown ``inside``; a profile of another model, or of less
            than the layout asks for.
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
        check_layout(self.layout, model, num_stages, seq_len)
        self.layers = self.layout.layers or tuple(
            model.layers // num_stages + (stage < model.layers % num_stages) for stage in range(num_stages)
        )
        self.parts = hardware.parts(model, self.layout, self.layers, num_ranks)
        self.source: ByParts | MeasuredUnits = self.parts

    @classmethod
    def balanced(
        cls, model: ModelShape, hardware: Hardware, *, stages_per_rank: int = 1, layout: Layout, **counts: int
    ) -> CostModel:
        """A model with :meth:`balanced_layers`, unless the layout gives the layers. Arguments as of the class."""
        cost = cls(model, hardware, stages_per_rank=stages_per_rank, layout=layout, **counts)
        if layout.layers is not None:
            return cost
        layout = replace(layout, layers=cost.balanced_layers())
        return cls(model, hardware, stages_per_rank=stages_per_rank, layout=layout, **counts)

    def on(self, hardware: Hardware) -> CostModel:
        """A model of these stages on another machine."""
        other = copy.copy(self)
        other.hardware, other.parts = hardware, self.parts.on(hardware)
        other.source, _ = other.parts, other.__dict__.pop("_piece_seconds", None)
        return other

    def measured(self, terms: Terms) -> CostModel:
        """A model of these stages, whose units take what an engine measured; bytes and messages stay."""
        other = copy.copy(self)
        other.source = MeasuredUnits(terms, self.source)
        return other

    def price(self, sizes: Sequence[int]) -> Price:
        """Seconds and bytes of the units of a step whose sequences are alike, in segments of so many tokens."""
        return Price(self, [PackedRow(self._documents, tuple(sizes))], is_alike=True)

    def price_rows(self, rows: Sequence[PackedRow]) -> Price:
        """Seconds and bytes of the units of a step of rows; the own length and documents do not count.

        Raises:
            ValueError: the layout copies prefixes.
        """
        if self.layout.copies_prefix:
            raise ValueError("rows of a step share a cache: the layout copies prefixes")
        return Price(self, rows, is_alike=False)

    # -- the sequence and the layers

    def span(self, begin: int, end: int) -> Span:
        """Tokens ``[begin, end)`` of the sequence."""
        tokens, pairs, ends, within = spans_between(self._documents, (begin, end), self.parts.windows)
        return Span(tokens.item(), pairs.item(), ends.item(), tuple([each.item() for each in within]))

    @property
    def _documents(self) -> tuple[int, ...]:
        return self.layout.documents or (self.seq_len,)

    def split(self, num_segments: int, *, mix: float = 1.0, multiple_of: int = 1) -> list[int]:
        """Segment sizes of equal time of F and B together, by this model's rates, mixed with equal length."""
        costs = self._piece_seconds if any(self._piece_seconds) else [1.0]  # floors alone: all cuts are alike
        return partition_sequence(
            self.seq_len, num_segments, strategy="profiled", costs=costs, mix=mix, multiple_of=multiple_of
        )

    @cached_property
    def _piece_seconds(self) -> list[float]:
        """F and B of equal pieces of the sequence."""
        pieces = min(self.seq_len, _PIECES)
        bounds = [self.seq_len * i // pieces for i in range(pieces + 1)]
        spans = spans_between(self._documents, bounds, self.parts.windows)
        embedding, head = self.parts.ends(spans, floor=False)
        layers = sum(n * self.parts.layer(spans, kind, False).total for kind, n in enumerate(self.parts.counts) if n)
        found: list[float] = (layers + head.total + embedding.total + 0.0 * spans.tokens).tolist()
        return found

    def balanced_layers(self) -> tuple[int, ...]:
        """Layers of each stage such that the slowest stage, the one with the head included, is as fast as can be."""
        whole = self.span(0, self.seq_len)
        of_kinds = [self.parts.layer(whole, kind, False).total for kind in range(len(self.parts.counts))]
        layers, head = [of_kinds[place] for place in self.parts.places], self.parts.ends(whole)[1].total
        if len(self.parts.counts) > 1:
            return tuple(balanced(layers, head, self.num_stages))
        others = self.num_stages - 1
        if others == 0:
            return (self.model.layers,)
        lasts = np.arange(self.model.layers - others, -1, -1)  # each stage but the last has one layer at least
        slowest = np.maximum(lasts * layers[0] + head, -(-(self.model.layers - lasts) // others) * layers[0])
        last = int(lasts[slowest.argmin()])
        rest = self.model.layers - last
        return (*(rest // others + (stage < rest % others) for stage in range(others)), last)

    # -- links and the optimizer

    def links(self, rank_of_stage: Sequence[int]) -> tuple[list[float], list[float]]:
        """Latency and bytes per second of the edges between stages s and s + 1, [s]: ``Schedule.simulate`` takes them.

        Ranks lie side by side, node after node, each on the devices that share its stages; a node holds whole ranks.
        The next data-parallel replica comes behind the last rank.
        """
        return self._edges(rank_of_stage)[:2]

    def send_seconds(self, rank_of_stage: Sequence[int]) -> float:
        """Seconds of its sender's own time that a message takes, in the mean over all edges."""
        return self._edges(rank_of_stage)[2]

    def _edges(self, rank_of_stage: Sequence[int]) -> tuple[list[float], list[float], float]:
        """:meth:`links` and :meth:`send_seconds`."""
        hw, ranks_per_node = self.hardware, max(1, int(self.hardware.node_size) // self.parts.shards)
        nodes = [rank // ranks_per_node for rank in rank_of_stage]
        inside = [a == b for a, b in itertools.pairwise(nodes)]
        latencies = [hw.inside_latency if near else hw.between_latency for near in inside]
        rates = [hw.link_efficiency * (hw.inside_bandwidth if near else hw.between_bandwidth) for near in inside]
        sends = [hw.inside_send if near else hw.between_send for near in inside]
        return latencies, rates, sum(sends) / len(sends) if sends else 0.0

    def optimizer_seconds(self) -> list[float]:
        """Seconds after the pipeline in every step, for each stage; a rank needs the sum of its stages.

        They are the exposed part of the gradients' reduction, and the optimizer.
        """
        hw, d = self.hardware, self.layout.data
        moved = (d - 1) / d * (hw.gradient_bytes + hw.element_bytes)
        rate = hw.link(d * self.parts.shards * self.num_ranks)
        touched = (hw.gradient_bytes + hw.element_bytes + 2 * hw.optimizer_bytes) / d
        of_parameter = hw.data_exposed * moved / rate + touched / hw.bandwidth
        return [of_parameter * parameters for parameters in self.parts.stage_parameters]


class PackedRow(NamedTuple):
    """One micro-batch of a step.

    Attributes:
        documents: tokens of each of its documents, in their order.
        sizes: tokens of each of its segments.
        parents: of a tree, the segment that each follows; None: the one before it.
        parts: of a tree, for each segment its tokens, or those of each leaf that shares it.
    """

    documents: tuple[int, ...]
    sizes: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    parts: tuple[tuple[int, ...], ...] | None = None

    def spans_in(self, windows: Sequence[int] = ()) -> list[Span]:
        """Spans of the segments, for layers with these windows."""
        documents = self.documents if self.parents is None else None
        return spans_of(self.sizes, documents, windows, self.parents, self.parts)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at its peak.

    Attributes:
        static: weights, gradients, optimizer state.
        activations: of live units, with their logits and, where the backward is split, what I leaves to W.
        kv, kv_gradients: slots of the cache.
        receive: places of incoming messages.
        workspace: one unit's own.
        reserve: the allocator's share, and what is held beside tensors.
    """

    static: int
    activations: int
    kv: int
    kv_gradients: int
    receive: int
    workspace: int
    reserve: int

    @property
    def total(self) -> int:
        """Their sum."""
        held = self.static + self.activations + self.kv + self.kv_gradients
        return held + self.receive + self.workspace + self.reserve


class Price:
    """Seconds and bytes of the units of a step, as an order of them takes both. :meth:`CostModel.price` makes one.

    A table is an array [stage, unit]. The units are the segments of all rows, one after another; of micro-batches that
    are alike, those of one.

    Attributes:
        cost: of the model on a machine.
        rows: of the step; of micro-batches that are alike, one of them.
        sizes: tokens of all segments, row after row.
        longest: tokens of the segments of the longest row.
    """

    def __init__(self, cost: CostModel, rows: Sequence[PackedRow], *, is_alike: bool) -> None:
        self.cost, self.rows, self._is_alike = cost, rows, is_alike
        self.sizes = [size for row in rows for size in row.sizes]
        self._ends = list(itertools.accumulate(len(row.sizes) for row in rows))
        self._longest = max(range(len(rows)), key=lambda index: sum(rows[index].sizes))
        self.longest = list(rows[self._longest].sizes)
        self._slot_tokens = cost.seq_len if is_alike else sum(self.longest)  # of the cache's slots

    @property
    def parents(self) -> list[tuple[int, ...] | None] | None:
        """Parents of the segments of each row, as ``build_schedule`` takes it; None: no row is a tree."""
        found = [row.parents for row in self.rows]
        return None if self._is_alike or all(own is None for own in found) else found

    # -- tables

    def _table(self, by_kind: Iterable[Any]) -> Any:
        """A row for each stage, from values of all units of each kind of stages."""
        return np.array(list(by_kind))[self.cost.parts.kinds]

    def microbatches(self, row: Any) -> list[Any]:
        """The row of a stage in a table, by micro-batch; those that are alike are one."""
        return np.split(row, self._ends[:-1])

    @cached_property
    def _span(self) -> Span:
        """All segments, one span of arrays."""
        windows = self.cost.parts.windows
        if self._is_alike:
            return spans_between(self.rows[0].documents, list(itertools.accumulate(self.sizes, initial=0)), windows)
        return arrays_of([span for row in self.rows for span in row.spans_in(windows)])

    @cached_property
    def seconds(self) -> Any:
        """Seconds of each pass, a ``PassSeconds`` of tables."""
        return seconds_of(self.cost.source, self._span)

    @cached_property
    def shard_seconds(self) -> dict[str, Any]:
        """Seconds of S, T, E and G of a vocabulary over the ranks, tables; {} where it is not, and in rows."""
        is_spread = self.cost.parts.spreads and self._is_alike
        return shards_of(self.cost.source, self._span) if is_spread else {}

    @property
    def imbalance(self) -> float:
        """By how much F and B of the longest unit take longer than the mean of all units', over all stages."""
        units = self.seconds.total.sum(0)
        return float(units.max() / units.mean() - 1.0)

    def moving_seconds(self) -> dict[str, Any]:
        """Fields of :class:`seq1f1b.Costs`, tables: what a rank's tier takes for what a unit saves, out or back, and
        what that takes of the rank's own time.

        Raises:
            ValueError: the machine has no tier.
        """
        hw = self.cost.hardware
        if not hw.tier_bandwidth:
            raise ValueError(f"{hw.name} has no tier to which units could move: its tier_bandwidth is 0")
        rates = {"tier": 1 / hw.tier_bandwidth, "move_out": hw.move_out, "move_in": hw.move_in}
        return {name: rate * self._held.saved for name, rate in rates.items()}

    @cached_property
    def message_bytes(self) -> Any:
        """Bytes of a message on one of the devices that share a stage, an array [unit]."""
        return whole_bytes(self._span.tokens * self.cost.parts.message_bytes)

    def costs(self, schedule: Schedule, *, moves: bool = False) -> Costs:
        """Costs of a step of the order; of rows without the optimizer, and what a message takes of its sender.

        Args:
            moves: units may move to a tier, as far as the machine has one.
        """
        cost = self.cost
        latencies, rates, send = cost._edges(schedule.rank_of_stage)
        links = Links(latencies, rates, message_bytes=self.message_bytes)
        seconds = self.seconds._asdict() | {"statistics": 0.0, "loss": 0.0} | self.shard_seconds
        if moves:
            seconds |= self.moving_seconds()
        if not self._is_alike:
            return Costs(**seconds, links=links)
        if cost.parts.spreads:
            links = replace(links, statistics_bytes=[_STATISTICS_BYTES * n // cost.layout.context for n in self.sizes])
        optimizer = [0.0] * schedule.num_ranks
        for rank, value in zip(schedule.rank_of_stage, cost.optimizer_seconds(), strict=True):
            optimizer[rank] += value
        return Costs(**seconds, links=replace(links, send=send), optimizer=optimizer)

    # -- bytes of units

    @cached_property
    def _held(self) -> UnitBytes:
        """Bytes of all units, tables."""
        held = UnitBytes(*map(self._table, zip(*self.cost.parts.held(self._span.tokens), strict=True)))
        if self.cost.layout.copies_prefix:
            held.saved[:, -1] += whole_bytes(self._cached(self.cost.seq_len)[0])  # the last copy: of all keys
        return held

    def _cached(self, tokens: Any) -> tuple[Any, Any]:
        """Keys and values of so many tokens on each stage, and their gradients; tokens may be those of all units."""
        parts = self.cost.parts
        keys, gradients = zip(*(parts.cached(kind.counts, tokens) for kind in parts.stages), strict=True)
        return self._table(keys), self._table(gradients)

    def held_bytes(self) -> Any:
        """Most that a unit holds before or after I, a table; the first segment's also its micro-batch's cache, which
        goes when it is through. For orders made for a cap in bytes."""
        first = [] if self.cost.layout.copies_prefix else [0, *self._ends[:-1]]
        saved, kept, added = self._held
        most = np.maximum(saved, kept + added)
        most[:, first] += whole_bytes(self._cached(self._slot_tokens)[0])[:, None]
        return most

    def least_bytes(self) -> float:
        """A bound that no order can go below: weights and one micro-batch, of a tree its longest path, in the mean over
        the ranks."""
        cost, hw = self.cost, self.cost.hardware
        static = _state_bytes(cost) * sum(cost.parts.stage_parameters)
        begin, end = [0, *self._ends][self._longest], self._ends[self._longest]
        of_segments = self._held.saved[:, begin:end].sum(0).tolist()
        parents, paths = self.rows[self._longest].parents or range(-1, end - begin - 1), list[int]()
        for parent, saved in zip(parents, of_segments, strict=True):
            paths.append(saved + (paths[parent] if parent >= 0 else 0))
        return float((static + (1 + hw.allocator_reserve) * max(paths)) / cost.num_ranks)

    @cached_property
    def _unit_bytes(self) -> dict[str, Any]:
        """Fields of :class:`seq1f1b.StepMemory` that no placement changes. With the cache where its pages come and go
        with units; else all of it is held all through the step, and is not counted here."""
        cost, parts, layout = self.cost, self.cost.parts, self.cost.layout
        names = ("activations", "kept_activations", "output_gradients")
        found: dict[str, Any] = dict(zip(names, self._held, strict=True))
        if work := parts.work(self._span.tokens):
            forward, backward = map(self._table, zip(*work, strict=True))
            found |= {"forward_work": forward, "backward_work": backward}
        if parts.spreads and self._is_alike:
            found["shard_logits"] = [math.ceil(parts.logits(size) / cost.num_ranks) for size in self.sizes]
        if self._releases:
            found["kv_rows"], found["kv_gradient_rows"] = map(whole_bytes, self._cached(self._span.tokens))
        elif self._is_alike:  # the last copy of a prefix and its gradient, from the first backward to the last
            copies = 2 * layout.copies_prefix * self._cached(cost.seq_len)[0]
            found["kv_gradients"] = whole_bytes(copies).tolist()
        return found

    def memory(self, rank_of_stage: Sequence[int]) -> StepMemory:
        """Bytes of what units hold. What stays beside activations is as large as a message: an input that a stage of
        the same rank handed over, and the gradient of the last stage's output that a loss within F has left."""
        in_loss, last = self.cost.layout.head_in_loss and not self.cost.parts.spreads, self.cost.num_stages - 1
        counts = [
            (stage > 0 and rank_of_stage[stage - 1] == rank) + (in_loss and stage == last)
            for stage, rank in enumerate(rank_of_stage)
        ]
        staying: Any = np.outer(counts, self.message_bytes)
        return StepMemory(**self._unit_bytes, staying=staying)

    def step_memory(self, rank_of_stage: Sequence[int]) -> StepMemory:
        """Bytes of every tensor that a step holds; :meth:`rank_bytes` adds recomputation's and the allocator's."""
        cost, hw, parts = self.cost, self.cost.hardware, self.cost.parts
        kv, gradients = self._cached(self._slot_tokens)
        if cost.layout.copies_prefix:  # the last copy and its gradient
            kv, gradients = 0.0 * kv, 2 * kv
        return replace(
            self.memory(rank_of_stage),
            kv=whole_bytes(kv).tolist(),
            kv_gradients=whole_bytes(gradients).tolist(),
            kv_rows=0,
            kv_gradient_rows=0,
            forward_work=0,
            backward_work=0,
            weights=[math.ceil(n * (hw.element_bytes + hw.gradient_bytes)) for n in parts.stage_parameters],
            optimizer=[math.ceil(n * hw.optimizer_bytes / cost.layout.data) for n in parts.stage_parameters],
            logits=0 if parts.spreads else math.ceil(parts.logits(max(self.sizes))),
        )

    @property
    def _releases(self) -> bool:
        """Whether the cache gives pages back as backwards end."""
        hw = self.cost.hardware
        return not self.cost.layout.copies_prefix and 0 < hw.release_tokens <= self._slot_tokens

    # -- bytes of ranks

    def rank_bytes(self, schedule: Schedule) -> list[RankBytes]:
        """The peak of every rank under an order. Slots of the cache are as long as the longest row, or, where rows are
        trees, as the order needs on that rank."""
        cost, hw, parts = self.cost, self.cost.hardware, self.cost.parts
        memory, costs = self.memory(schedule.rank_of_stage), Costs(links=Links(message_bytes=self.message_bytes))
        with_work = peaks = schedule.peak_memory(memory, costs)
        if "forward_work" in self._unit_bytes:
            peaks = schedule.peak_memory(replace(memory, forward_work=0, backward_work=0), costs)
        P, last, longest, state = schedule.num_ranks, cost.num_stages - 1, max(self.sizes), _state_bytes(cost)
        pools = self._pool_bytes(schedule, memory.activations)
        standing = [parts.standing_work(longest, has_last) for has_last in (False, True)]
        stages_of = [[stage for stage, at in enumerate(schedule.rank_of_stage) if at == rank] for rank in range(P)]
        kv, gradients = self._slot_bytes(schedule, stages_of)  # held all through the step
        ranks = []
        for rank, stages in enumerate(stages_of):
            work = with_work.total[rank] - peaks.total[rank] + standing[last in stages]
            if cost.layout.tensor > 1:  # whole hidden states that collectives of one unit have gathered or will scatter
                layers = max(cost.layers[stage] for stage in stages)
                whole = longest / cost.layout.context * cost.model.hidden * hw.element_bytes
                work += hw.collective_buffers * layers * whole
            live = peaks.total[rank] - peaks.receive[rank]
            rows = min(live, peaks.kv[rank])
            gradient_rows = min(live - rows, peaks.kv_gradients[rank])
            changing = peaks.total[rank] + kv[rank] + gradients[rank] + work
            ranks.append(
                RankBytes(
                    static=math.ceil(sum([parts.stage_parameters[stage] for stage in stages]) * state),
                    activations=live - rows - gradient_rows,
                    kv=math.ceil(kv[rank]) + rows,
                    kv_gradients=math.ceil(gradients[rank]) + gradient_rows,
                    receive=peaks.receive[rank],
                    workspace=math.ceil(work),
                    reserve=math.ceil(hw.allocator_reserve * changing + hw.context_bytes) + pools[rank],
                )
            )
        return ranks

    def _slot_bytes(self, schedule: Schedule, stages_of: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
        """The cache of every rank, and its gradients: each stage has the slots that it needs at its own peak, all
        through the step. Zeros where pages come and go, or segments copy their prefix."""
        P, parts = schedule.num_ranks, self.cost.parts
        kv, gradients, tokens = [0.0] * P, [0.0] * P, [self._slot_tokens] * P
        if self._releases or self.cost.layout.copies_prefix:
            return kv, gradients
        if schedule.parents is not None:
            sizes = array("q", self.sizes)
            tokens = [_C.schedule_assign_rows(schedule.handle, rank, sizes)[1] for rank in range(P)]
        for stages in zip(*stages_of, strict=True):  # one of each rank
            counted = [int(stage in stages) for stage in range(schedule.num_stages)]
            slots = schedule.peak_memory(StepMemory(kv=counted, kv_gradients=counted))
            for rank, stage in enumerate(stages):
                slot, gradient_slot = parts.cached(parts.stages[parts.kinds[stage]].counts, tokens[rank])
                kv[rank] += slots.kv[rank] * slot
                gradients[rank] += slots.kv_gradients[rank] * gradient_slot
        return kv, gradients

    def _pool_bytes(self, schedule: Schedule, activations: Any) -> list[int]:
        """Bytes beyond the peak that an allocator keeps if blocks of one length serve no other: the peaks of segments
        of each length together, less that of all, and copies of each prefix but the first and the last."""
        share, lengths = self.cost.hardware.length_pools, set(self.sizes)
        if share == 0 or len(lengths) == 1 or not self._is_alike:
            return [0] * schedule.num_ranks

        def peaks(table: Any) -> tuple[int, ...]:
            return schedule.peak_memory(StepMemory(activations=table)).activations

        alone = [peaks(activations * (np.array(self.sizes) == length)) for length in lengths]
        sums = map(sum, zip(*alone, strict=True))
        copies = 0.0
        if self.cost.layout.copies_prefix:
            prefixes = list(itertools.accumulate(self.sizes))[1:-1]
            copies = self._cached(sum(prefixes))[0].max()
        return [math.ceil(share * (x - y + copies)) for x, y in zip(sums, peaks(activations), strict=True)]


def _state_bytes(cost: CostModel) -> float:
    """Weight, gradient and optimizer state of one parameter."""
    hw = cost.hardware
    return hw.element_bytes + hw.gradient_bytes + hw.optimizer_bytes / cost.layout.data
