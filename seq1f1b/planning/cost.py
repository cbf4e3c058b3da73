"""A model in a pipeline on a machine, and the price of a step: its units' seconds and bytes, and peaks of the ranks."""

from __future__ import annotations

import copy
import itertools
import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from seq1f1b import _C
from seq1f1b.partition import ModelShape, balanced, layers_of, partition_sequence
from seq1f1b.plan import INSIDE, Layout
from seq1f1b.planning.by_parts import ByParts, UnitBytes
from seq1f1b.planning.hardware import Hardware
from seq1f1b.schedule import Costs, Links, Schedule, StepMemory
from seq1f1b.seconds import PassSeconds, Span, arrays_of, seconds_of, shards_of, span_of, spans_of
from seq1f1b.unit_times import MeasuredUnits, Terms

__all__ = ["CostModel", "PackedRow", "Price", "RankBytes"]

T = TypeVar("T")

_PIECES = 1024  # of the sequence whose costs a split balances
_WHOLE = {"tensor": "heads", "expert": "experts of the model, and data"}
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
        _check_layout(self.layout, model, num_stages, seq_len)
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
        counts = {"num_ranks": self.num_ranks, "stages_per_rank": self.num_stages // self.num_ranks}
        layout = replace(self.layout, layers=self.layers)
        return CostModel(self.model, hardware, seq_len=self.seq_len, layout=layout, **counts)

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
        return span_of(self._documents, begin, end, self.parts.windows)

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
        spans = arrays_of([self.span(begin, end) for begin, end in itertools.pairwise(bounds)])
        embedding, head = self.parts.ends(spans, floor=False)
        layers = sum(n * self.parts.layer(spans, kind, False).total for kind, n in enumerate(self.parts.counts) if n)
        found: list[float] = np.broadcast_to(layers + head.total + embedding.total, pieces).tolist()
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
        most = self.model.layers - others  # each stage but the last has one

        def slowest(last: int) -> float:
            return max(last * layers[0] + head, -(-(self.model.layers - last) // others) * layers[0])

        last = min(range(most + 1), key=lambda n: (slowest(n), -n))
        rest = self.model.layers - last
        return (*(rest // others + (stage < rest % others) for stage in range(others)), last)

    # -- links and the optimizer

    def links(self, rank_of_stage: Sequence[int]) -> tuple[list[float], list[float]]:
        """Latency and bytes per second of the edges between stages s and s + 1, [s]: ``Schedule.simulate`` takes them.

        Ranks lie side by side, node after node, each on the devices that share its stages; a node holds whole ranks.
        The next data-parallel replica comes behind the last rank.
        """
        hw, inside = self.hardware, self._inside(rank_of_stage)
        latencies = [hw.inside_latency if near else hw.between_latency for near in inside]
        rates = [hw.link_efficiency * (hw.inside_bandwidth if near else hw.between_bandwidth) for near in inside]
        return latencies, rates

    def send_seconds(self, rank_of_stage: Sequence[int]) -> float:
        """Seconds of its sender's own time that a message takes, in the mean over all edges."""
        hw = self.hardware
        each = [hw.inside_send if near else hw.between_send for near in self._inside(rank_of_stage)]
        return sum(each) / len(each) if each else 0.0

    def _inside(self, rank_of_stage: Sequence[int]) -> list[bool]:
        """Whether stages s and s + 1 are in one node, [s]."""
        ranks_per_node = max(1, int(self.hardware.node_size) // self.parts.shards)
        nodes = [rank // ranks_per_node for rank in rank_of_stage]
        return [a == b for a, b in itertools.pairwise(nodes)]

    def optimizer_seconds(self) -> list[float]:
        """Seconds after the pipeline in every step, for each stage; a rank needs the sum of its stages.

        They are the exposed part of the gradients' reduction, and the optimizer.
        """
        hw, d = self.hardware, self.layout.data
        moved = (d - 1) / d * (hw.gradient_bytes + hw.element_bytes)
        rate = hw.link(d * self.parts.shards * self.num_ranks)
        touched = (hw.gradient_bytes + hw.element_bytes + 2 * hw.optimizer_bytes) / d
        of_parameter = hw.data_exposed * moved / rate + touched / hw.bandwidth
        return [of_parameter * self.parts.parameters(stage) for stage in range(self.num_stages)]


def _check_layout(layout: Layout, model: ModelShape, num_stages: int, seq_len: int) -> None:
    """Raises ``ValueError`` unless the model can be laid over so many stages, and the sequence over its documents."""
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}, must be at least 1")
    model.flops(0, seq_len)  # raises unless shape and length are sound
    if num_stages < 1 or num_stages > model.layers:
        raise ValueError(f"there are {num_stages} stages, must be in 1..{model.layers}, the model's layers")
    for name in ("tensor", "context", "expert", "data"):
        degree = getattr(layout, name)
        if degree < 1:
            raise ValueError(f"{name} is {degree}, must be at least 1")
    layers, _ = layers_of(model)
    if layout.context > 1 and any(layer.scan or layer.state or layer.tail for layer in layers):
        raise ValueError(
            f"context is {layout.context}, must be 1: the model has layers that keep a state along the sequence"
        )
    for degree, name, whole in (
        *((layout.tensor, "tensor", layer.heads) for layer in layers),
        *((layout.expert, "expert", experts) for experts in {layer.experts for layer in layers} - {1} or {1}),
        (layout.expert, "expert", layout.data),
    ):
        if whole % degree != 0:
            raise ValueError(f"{name} is {degree}, must divide {whole} ({_WHOLE[name]})")
    if layout.inside not in INSIDE:
        raise ValueError(f"inside is {layout.inside!r}, must be one of {', '.join(INSIDE)}")
    if layout.vocabulary not in ("ends", "ranks"):
        raise ValueError(f"vocabulary is {layout.vocabulary!r}, must be 'ends' or 'ranks'")
    if layout.vocabulary == "ranks" and (model.vocab == 0 or not layout.head_in_loss):
        raise ValueError("a vocabulary over the ranks needs a vocabulary, and has its loss in its shards: head_in_loss")
    if layout.layers is not None and (
        len(layout.layers) != num_stages or sum(layout.layers) != model.layers or min(layout.layers) < 0
    ):
        raise ValueError(
            f"layers are {list(layout.layers)}: must be {num_stages} numbers, one per stage, "
            f"that sum to the model's {model.layers}"
        )
    documents = layout.documents
    if documents is not None and (sum(documents) != seq_len or min(documents, default=0) < 1):
        raise ValueError(f"documents hold {sum(documents)} tokens, each must be at least 1 and all together {seq_len}")


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
        return sum(getattr(self, part.name) for part in fields(self))


class Price:
    """Seconds and bytes of the units of a step, as an order of them takes both. :meth:`CostModel.price` makes one.

    A table is [stage][segment] where all micro-batches are alike, and else [stage][micro-batch][segment].

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

    def _nest(self, values: Sequence[T]) -> list[Any]:
        """Values of all segments, one after the other, by row."""
        if self._is_alike:
            return list(values)
        return [list(values[begin:end]) for begin, end in itertools.pairwise([0, *self._ends])]

    def _table(self, by_kind: Sequence[Sequence[T]]) -> list[list[Any]]:
        """A row for each stage, from those of the kinds of stages; equal stages share one."""
        rows = [self._nest(values) for values in by_kind]
        return [rows[kind] for kind in self.cost.parts.kinds]

    def microbatches(self, row: list[Any]) -> list[list[Any]]:
        """The row of a stage in a table, by micro-batch; those that are alike are one."""
        return [row] if self._is_alike else row

    @cached_property
    def _spans(self) -> list[Span]:
        return [span for row in self.rows for span in row.spans_in(self.cost.parts.windows)]

    @cached_property
    def seconds(self) -> Any:
        """Seconds of each pass, a ``PassSeconds`` of tables."""
        tables = seconds_of(self.cost.source, self._spans)
        return PassSeconds._make(list(map(self._nest, table)) for table in tables)

    @cached_property
    def shard_seconds(self) -> dict[str, list[list[float]]]:
        """Seconds of S, T, E and G of a vocabulary over the ranks, tables; {} where it is not, and in rows."""
        is_spread = self.cost.parts.spreads and self._is_alike
        return shards_of(self.cost.source, self._spans) if is_spread else {}

    @property
    def imbalance(self) -> float:
        """By how much F and B of the longest unit take longer than the mean of all units', over all stages."""
        tables = (*self.seconds.forward, *self.seconds.backward)
        flat = [[unit for row in self.microbatches(stage) for unit in row] for stage in tables]
        units = list(map(sum, zip(*flat, strict=True)))
        return float(max(units) * len(units) / sum(units) - 1.0)

    def moving_seconds(self) -> dict[str, list[list[Any]]]:
        """Fields of :class:`seq1f1b.Costs`, tables: what a rank's tier takes for what a unit saves, out or back, and
        what that takes of the rank's own time.

        Raises:
            ValueError: the machine has no tier.
        """
        hw = self.cost.hardware
        if not hw.tier_bandwidth:
            raise ValueError(f"{hw.name} has no tier to which units could move: its tier_bandwidth is 0")
        rates = {"tier": 1 / hw.tier_bandwidth, "move_out": hw.move_out, "move_in": hw.move_in}
        return {
            name: self._table([[rate * unit.saved for unit in units] for units in self._held])
            for name, rate in rates.items()
        }

    @cached_property
    def message_bytes(self) -> list[Any]:
        """Bytes of a message on one of the devices that share a stage, a table of one stage."""
        return self._nest([math.ceil(size * self.cost.parts.message_bytes) for size in self.sizes])

    def costs(self, schedule: Schedule, *, moves: bool = False) -> Costs:
        """Costs of a step of the order; of rows without the optimizer, and what a message takes of its sender.

        Args:
            moves: units may move to a tier, as far as the machine has one.
        """
        latencies, rates = self.cost.links(schedule.rank_of_stage)
        links = Links(latencies, rates, message_bytes=self.message_bytes)
        optimizer: float | list[float] = 0.0
        if self._is_alike:
            optimizer = [0.0] * schedule.num_ranks
            for rank, value in zip(schedule.rank_of_stage, self.cost.optimizer_seconds(), strict=True):
                optimizer[rank] += value
            c, spreads = self.cost.layout.context, self.cost.parts.spreads
            statistics = [_STATISTICS_BYTES * size // c for size in self.sizes] if spreads else 0
            send = self.cost.send_seconds(schedule.rank_of_stage)
            links = replace(links, send=send, statistics_bytes=statistics)
        more = self.moving_seconds() if moves else {}
        return Costs(**self.seconds._asdict(), **self.shard_seconds, **more, links=links, optimizer=optimizer)

    # -- bytes of units

    @cached_property
    def _held(self) -> list[list[UnitBytes]]:
        """Bytes of all units, by kind of stage."""
        parts, copies = self.cost.parts, self.cost.layout.copies_prefix
        known = {size: parts.held(size) for size in dict.fromkeys(self.sizes)}
        held = [[known[size][kind] for size in self.sizes] for kind in range(len(parts.stages))]
        for kind, units in zip(parts.stages, held, strict=True) if copies else ():
            whole = math.ceil(parts.cached(kind.counts, self.cost.seq_len)[0])  # the last copy is of all keys
            units[-1] = units[-1]._replace(saved=units[-1].saved + whole)
        return held

    def _cache_rows(self, part: int) -> list[list[int]]:
        """Bytes of the cache of all segments, or (1) of its gradients, by kind of stage."""
        parts = self.cost.parts
        return [[math.ceil(parts.cached(kind.counts, n)[part]) for n in self.sizes] for kind in parts.stages]

    def held_bytes(self) -> list[list[Any]]:
        """Most that a unit holds before or after I, a table; the first segment's also its micro-batch's cache, which
        goes when it is through. For orders made for a cap in bytes."""
        parts, found = self.cost.parts, []
        for kind, units in zip(parts.stages, self._held, strict=True):
            row = [max(saved, kept + added) for saved, kept, added in units]
            for first in [] if self.cost.layout.copies_prefix else [0, *self._ends[:-1]]:
                row[first] += math.ceil(parts.cached(kind.counts, self._slot_tokens)[0])
            found.append(row)
        return self._table(found)

    def least_bytes(self) -> float:
        """A bound that no order can go below: weights and one micro-batch, of a tree its longest path, in the mean over
        the ranks."""
        cost, hw = self.cost, self.cost.hardware
        static = _state_bytes(cost) * sum(map(cost.parts.parameters, range(cost.num_stages)))
        begin, end = [0, *self._ends][self._longest], self._ends[self._longest]
        units = [self._held[kind][begin:end] for kind in cost.parts.kinds]  # [stage][segment]
        parents, paths = self.rows[self._longest].parents or range(-1, end - begin - 1), list[int]()
        for parent, of_stages in zip(parents, zip(*units, strict=True), strict=True):
            paths.append(sum(unit.saved for unit in of_stages) + (paths[parent] if parent >= 0 else 0))
        return (static + (1 + hw.allocator_reserve) * max(paths)) / cost.num_ranks

    def memory(self, rank_of_stage: Sequence[int]) -> StepMemory:
        """Bytes of what units hold. With the cache where its pages come and go with units; else all of it is held all
        through the step, and is not counted here."""
        cost, parts = self.cost, self.cost.parts
        saved, kept, added = (self._table([[unit[i] for unit in units] for units in self._held]) for i in range(3))
        more: dict[str, Any] = {}
        work = [parts.work(size) for size in self.sizes]
        for i, name in enumerate(("forward_work", "backward_work") if any(work) else ()):
            more[name] = self._table([[each[i] for each in units] for units in zip(*work, strict=True)])
        if parts.spreads and self._is_alike:
            more["shard_logits"] = [math.ceil(parts.logits(size) / cost.num_ranks) for size in self.sizes]
        if self._releases:
            more["kv_rows"] = self._table(self._cache_rows(0))
            more["kv_gradient_rows"] = self._table(self._cache_rows(1))
        elif self._is_alike:  # the last copy of a prefix and its gradient, from the first backward to the last
            copies, stages = 2 * cost.layout.copies_prefix, map(parts.counts_of, range(cost.num_stages))
            more["kv_gradients"] = [math.ceil(copies * parts.cached(counts, cost.seq_len)[0]) for counts in stages]
        return StepMemory(saved, kept, added, staying=self._staying(rank_of_stage), **more)

    def step_memory(self, rank_of_stage: Sequence[int]) -> StepMemory:
        """Bytes of every tensor that a step holds; :meth:`rank_bytes` adds recomputation's and the allocator's."""
        cost, hw, parts = self.cost, self.cost.hardware, self.cost.parts
        slots = [parts.cached(parts.counts_of(stage), self._slot_tokens) for stage in range(cost.num_stages)]
        if cost.layout.copies_prefix:  # the last copy and its gradient
            slots = [(0.0, 2 * keys) for keys, _ in slots]
        kv, gradients = ([math.ceil(slot) for slot in column] for column in zip(*slots, strict=True))
        parameters = [parts.parameters(stage) for stage in range(cost.num_stages)]
        return replace(
            self.memory(rank_of_stage),
            kv=kv,
            kv_gradients=gradients,
            kv_rows=0,
            kv_gradient_rows=0,
            forward_work=0,
            backward_work=0,
            weights=[math.ceil(n * (hw.element_bytes + hw.gradient_bytes)) for n in parameters],
            optimizer=[math.ceil(n * hw.optimizer_bytes / cost.layout.data) for n in parameters],
            logits=0 if parts.spreads else math.ceil(parts.logits(max(self.sizes))),
        )

    def _staying(self, rank_of_stage: Sequence[int]) -> list[Any]:
        """Inputs that a stage of the same rank handed over, and gradients of the last stage's output that a loss
        within F has left. Each is as large as a message."""
        in_loss, last = self.cost.layout.head_in_loss and not self.cost.parts.spreads, self.cost.num_stages - 1
        sent = [math.ceil(size * self.cost.parts.message_bytes) for size in self.sizes]
        found = []
        for stage, rank in enumerate(rank_of_stage):
            count = (stage > 0 and rank_of_stage[stage - 1] == rank) + (in_loss and stage == last)
            found.append(self._nest([count * message for message in sent]))
        return found

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
        peaks = schedule.peak_memory(replace(memory, forward_work=0, backward_work=0), costs)
        with_work = schedule.peak_memory(memory, costs) if memory.forward_work else peaks
        places = list(enumerate(schedule.rank_of_stage))
        stages_of = [[stage for stage, at in places if at == rank] for rank in range(schedule.num_ranks)]
        kv, gradients = self._slot_bytes(schedule, stages_of)  # held all through the step
        pools, longest, state = self._pool_bytes(schedule, memory.activations), max(self.sizes), _state_bytes(cost)
        ranks = []
        for rank, stages in enumerate(stages_of):
            work = (
                with_work.total[rank] - peaks.total[rank] + parts.standing_work(longest, cost.num_stages - 1 in stages)
            )
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
                    static=math.ceil(sum(map(parts.parameters, stages)) * state),
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
        kv, gradients = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
        if self._releases or self.cost.layout.copies_prefix:
            return kv, gradients
        tokens = [self._slot_tokens] * schedule.num_ranks
        if schedule.parents is not None:
            sizes = array("q", self.sizes)
            tokens = [_C.schedule_assign_rows(schedule.handle, rank, sizes)[1] for rank in range(schedule.num_ranks)]
        for number in range(max(map(len, stages_of))):  # of the stage on its rank
            counted = [0] * schedule.num_stages
            for stages in stages_of:
                counted[stages[number]] = 1
            slots = schedule.peak_memory(StepMemory(kv=counted, kv_gradients=counted))
            for rank, stages in enumerate(stages_of):
                counts = self.cost.parts.counts_of(stages[number])
                slot, gradient_slot = self.cost.parts.cached(counts, tokens[rank])
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

        sums = [0] * schedule.num_ranks
        for length in lengths:
            alone = [
                [held * (size == length) for held, size in zip(row, self.sizes, strict=True)] for row in activations
            ]
            sums = list(map(operator.add, sums, peaks(alone)))
        parts, copies = self.cost.parts, 0.0
        if self.cost.layout.copies_prefix:
            prefixes = list(itertools.accumulate(self.sizes))[1:-1]
            copies = max(parts.cached(kind.counts, sum(prefixes))[0] for kind in parts.stages)
        return [math.ceil(share * (x - y + copies)) for x, y in zip(sums, peaks(activations), strict=True)]


def _state_bytes(cost: CostModel) -> float:
    """Weight, gradient and optimizer state of one parameter."""
    hw = cost.hardware
    return hw.element_bytes + hw.gradient_bytes + hw.optimizer_bytes / cost.layout.data
