"""What a unit costs: seconds and bytes of F, I and W of every (stage, segment), from a model's shape and a machine."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.plan import Layout
from seq1f1b.planning.hardware import Hardware, ProfiledHardware
from seq1f1b.planning.layout import check_layout, check_profile
from seq1f1b.planning.profile import Part, PassSeconds, Profile, pairs_of
from seq1f1b.schedule import Costs, Links, Schedule, StepMemory

__all__ = ["CostModel", "RankBytes", "Span", "UnitSeconds"]

_ATTENTION_BACKWARD = 2.5  # products of flash attention's backward over those of its forward: 5 / 2


class UnitSeconds(NamedTuple):
    """Seconds of every unit, each [stage][segment]; ``backward`` is the whole B, in place of I and W. ``recompute`` is
    R, which may come on top."""

    forward: list[list[float]]
    input: list[list[float]]
    weight: list[list[float]]
    backward: list[list[float]]
    recompute: list[list[float]]


class Span(NamedTuple):
    """Tokens of a segment, pairs of one of them and a token that it attends to, and tokens up to its end."""

    tokens: int
    pairs: float
    end: int


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


class CostModel:
    """Seconds and bytes of the units of a pipeline.

    One layer, per token, h = hidden, q = heads * head_dim, g = kv_heads * head_dim, f = ffn of a token's experts:
    F is 2 (2 h q + 2 h g + 3 h f) FLOP of products and 4 q per earlier token of attention; I and W each repeat the
    products, and I has the 2.5-fold attention, W none. To each pass come its elementwise traffic, exposed collectives
    (4 in F, 6 in I, which gathers two inputs again), what few rows take as long as many for (the ends of attention's
    tiles, latencies, sums of weight gradients), and the floor of its kernel launches. The first stage has the embedding
    (bytes only), the last the head.
    On a ``ProfiledHardware`` seconds, activations, cache and messages are the measured ones, and F of the last
    stage holds the head's backward as well where the layout has it in the loss, as the engine runs it.

    Args:
        model: a shape; hardware: a machine; layout: degrees and choices.
        num_ranks, stages_per_rank: of the pipeline. seq_len: tokens of a micro-batch, of which there is one sequence.
    Raises:
        ValueError: a degree below 1 or one that does not divide what it shards, layers that do not sum to the model's,
            documents that do not sum to the sequence, an unknown recompute; a profile of another model, or of less
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
        self.profile = hardware.profile if isinstance(hardware, ProfiledHardware) else None
        check_layout(self.layout, model, num_stages, seq_len)
        if self.profile is not None:
            check_profile(self.profile, model, self.layout)
        self.layers = self.layout.layers or tuple(
            model.layers // num_stages + (stage < model.layers % num_stages) for stage in range(num_stages)
        )
        head_dim = model.head_dim or model.hidden // model.heads
        self._q, self._g = model.heads * head_dim, model.kv_heads * head_dim
        self._f = model.ffn * model.experts_per_token
        self._shards = self.layout.tensor * self.layout.context  # of a token's work
        self._spreads = self.layout.vocabulary == "ranks"
        self._last_seconds: tuple[tuple[int, ...], UnitSeconds] | None = None  # by sizes: they are asked for repeatedly

    @classmethod
    def balanced(
        cls, model: ModelShape, hardware: Hardware, *, stages_per_rank: int = 1, layout: Layout, **counts: int
    ) -> CostModel:
        """A model with :meth:`balanced_layers`, unless the layout gives the layers. Arguments as of the class."""
        cost = cls(model, hardware, stages_per_rank=stages_per_rank, layout=layout, **counts)
        if layout.layers is None:
            layout = replace(layout, layers=cost.balanced_layers())
            cost = cls(model, hardware, stages_per_rank=stages_per_rank, layout=layout, **counts)
        return cost

    # -- seconds

    def pairs(self, begin: int, end: int) -> float:
        """Pairs of a token of ``[begin, end)`` and a token that it attends to, itself included."""
        return pairs_of(self.layout.documents or (self.seq_len,), begin, end)

    def _span(self, begin: int, end: int) -> Span:
        return Span(end - begin, self.pairs(begin, end), end)

    def _layer_work(self, span: Span) -> tuple[PassSeconds, tuple[float, float]]:
        """One layer, without floors, and the collectives of F and of I."""
        hw, h, tokens = self.hardware, self.model.hidden, span.tokens / self._shards
        if self.profile is not None:
            return self._measured(self.profile.layer, span, floor=False), (0.0, 0.0)
        linear = 2 * (2 * h * self._q + 2 * h * self._g + 3 * h * self._f) * tokens / (hw.peak * hw.linear_efficiency)
        attention, attention_back = self._attention_seconds(span)
        # What is saved was written once, and is read once by what follows; backward reads it and moves its gradient.
        traffic = hw.saved_moves * self._saved_bytes("none") * tokens / hw.bandwidth
        experts = self._expert_seconds(tokens)
        collectives = self._tensor_seconds(span.tokens, _COLLECTIVES) + experts
        collectives_back = self._tensor_seconds(span.tokens, _COLLECTIVES_BACK) + experts
        forward = linear + attention + traffic
        again = {"none": 0.0, "ffn": 2 / 3 * self._ffn_share() * linear, "full": forward + collectives}
        back = linear + attention_back + 1.5 * traffic + again[self.layout.recompute]
        return PassSeconds(forward, back, linear, back + linear), (collectives, collectives_back)

    def _fixed_seconds(self, span: Span) -> PassSeconds:
        """What F, I and W of one layer take however few rows a unit has: the begin and end of attention's tiles, the
        latency of collectives, sums of weight gradients, a copied prefix."""
        hw = self.hardware
        attention, attention_back = self._attention_seconds(span)
        rows = max(span.tokens / self.layout.context, 1.0)
        latency = hw.collective_latency * hw.tensor_exposed * (self.layout.tensor > 1)
        prefix = 0.0
        if self.layout.copies_prefix:  # read and written in F; read, read and written in the sum of gradients
            prefix = 2 * self._g * hw.element_bytes * span.end / self._shards / hw.bandwidth
        summed = 2 * hw.gradient_bytes * self._layer_parameters() / hw.bandwidth
        forward = attention * hw.attention_forward_rows / rows + _COLLECTIVES * latency + 2 * prefix
        back = attention_back * hw.attention_backward_rows / rows + _COLLECTIVES_BACK * latency + 3 * prefix
        if self.layout.recompute == "full":
            back += forward
        return PassSeconds(forward, back, summed, back + summed, forward)

    def _attention_seconds(self, span: Span) -> tuple[float, float]:
        """Attention's part of F and of I, in one layer."""
        hw = self.hardware
        head_dim = hw.head_tile * math.ceil(self._q / self.model.heads / hw.head_tile)
        flops = 4 * self.model.heads * head_dim * span.pairs / self._shards
        back = _ATTENTION_BACKWARD * flops / (hw.peak * hw.attention_backward_efficiency)
        return flops / (hw.peak * hw.attention_forward_efficiency), back

    def layer_seconds(self, begin: int, end: int) -> PassSeconds:
        """One layer over tokens ``[begin, end)``."""
        return self._layer_seconds(self._span(begin, end))

    def _layer_seconds(self, span: Span) -> PassSeconds:
        hw = self.hardware
        if self.profile is not None:
            return self._measured(self.profile.layer, span)
        (work, collectives), fixed = self._layer_work(span), self._fixed_seconds(span)
        attention, attention_back = self._attention_seconds(span)
        ring = self._ring_seconds(span)  # hidden behind attention as far as that lasts
        forward = max(work.forward + fixed.forward, hw.launch * hw.forward_kernels)
        back = max(work.input + fixed.input, hw.launch * hw.input_kernels)
        weight = max(work.weight + fixed.weight, hw.launch * hw.weight_kernels)
        forward += collectives[0] + max(0.0, ring - attention)
        back += collectives[1] + max(0.0, 2 * ring - attention_back)
        return PassSeconds(forward, back, weight, back + weight, forward)

    def _measured(self, part: Part | None, span: Span, floor: bool = True) -> PassSeconds:
        """The passes of a part of the profile."""
        hw = self.hardware
        assert isinstance(hw, ProfiledHardware)
        if part is None or span.tokens == 0:
            return _NOTHING
        seconds = part.seconds(span.tokens, span.pairs, floor)
        factors = [hw.measured_runs * hw.measured_ends] * len(seconds)
        if self.profile is not None and part is self.profile.layer:
            factors = [hw.measured_runs * getattr(hw, f"measured_{name}") for name in PassSeconds._fields]
        return PassSeconds(*map(operator.mul, seconds, factors))

    def _ffn_share(self) -> float:
        h = self.model.hidden
        return 3 * h * self._f / (2 * h * self._q + 2 * h * self._g + 3 * h * self._f)

    def _link(self, devices: int) -> float:
        """Bytes per second among so many neighbouring devices."""
        hw = self.hardware
        return (hw.inside_bandwidth if devices <= hw.node_size else hw.between_bandwidth) * hw.link_efficiency

    def _tensor_seconds(self, tokens: int, count: int) -> float:
        """So many all-gathers and reduce-scatters of hidden states."""
        hw, t = self.hardware, self.layout.tensor
        moved = count * (t - 1) / t * tokens / self.layout.context * self.model.hidden * hw.element_bytes
        return hw.tensor_exposed * moved / self._link(t)

    def _expert_seconds(self, tokens: float) -> float:
        """Tokens to their experts and back."""
        hw, e = self.hardware, self.layout.expert
        if self.model.experts == 1:
            return 0.0
        moved = 2 * (e - 1) / e * tokens * self.model.experts_per_token * self.model.hidden * hw.element_bytes
        return hw.expert_exposed * moved / self._link(e * self.layout.tensor * self.layout.context)

    def _ring_seconds(self, span: Span) -> float:
        """Keys and values of the prefix that the other devices of the ring hold."""
        c, hw = self.layout.context, self.hardware
        moved = (c - 1) / c * span.end * 2 * self._g / self.layout.tensor * hw.element_bytes
        return moved / self._link(c * self.layout.tensor)

    def unit_seconds(self, sizes: Sequence[int]) -> UnitSeconds:
        """Costs of every unit for these segment sizes."""
        key = tuple(sizes)
        if self._last_seconds is None or self._last_seconds[0] != key:
            spans = [self._span(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
            self._last_seconds = key, self.seconds_of(spans)
        return self._last_seconds[1]

    def seconds_of(self, spans: Sequence[Span]) -> UnitSeconds:
        """Costs of units over these tokens, of any rows."""
        hw = self.hardware
        layer = [self._layer_seconds(span) for span in spans]
        head = [self._head_seconds(span) for span in spans]
        embedding = [self._embedding_seconds(span) for span in spans]
        split = 1 + hw.split_backward_extra
        factors = PassSeconds(forward=1.0, input=split, weight=split, backward=1.0, recompute=1.0)
        of_unit = self._unit_seconds()
        by_kind: dict[tuple[int, bool, bool], list[list[float]]] = {}
        rows = []
        for stage, layers in enumerate(self.layers):
            is_first, is_last = stage == 0, stage == self.num_stages - 1
            kind = (layers, is_first, is_last)
            if kind not in by_kind:
                by_kind[kind] = [
                    [
                        (layers * costs[i] + is_first * embedding[s][i] + is_last * head[s][i]) * factor
                        + (layers > 0) * of_unit[i]
                        + hw.unit_overhead
                        for s, costs in enumerate(layer)
                    ]
                    for i, factor in enumerate(factors)
                ]
            rows.append(by_kind[kind])
        return UnitSeconds(*([row[i] for row in rows] for i in range(len(factors))))

    def _unit_seconds(self) -> PassSeconds:
        """Seconds that a unit takes beyond its layers."""
        if not isinstance(self.hardware, ProfiledHardware) or self.profile is None:
            return _NOTHING
        return PassSeconds(*(self.hardware.measured_runs * seconds for seconds in self.profile.unit))

    def moving_seconds(self, sizes: Sequence[int]) -> dict[str, list[list[float]]]:
        """Fields of :class:`seq1f1b.Costs`, [stage][segment]: what a rank's tier takes for what a unit saves, out or
        back, and what that takes of the rank's own time.

        Raises:
            ValueError: the machine has no tier.
        """
        hw = self.hardware
        if not hw.tier_bandwidth:
            raise ValueError(f"{hw.name} has no tier to which units could move: its tier_bandwidth is 0")
        rates = {"tier": 1 / hw.tier_bandwidth, "move_out": hw.move_out, "move_in": hw.move_in}
        saved = self._unit_bytes(sizes)[0]
        found = {}
        for name, rate in rates.items():
            rows = {id(row): [rate * unit for unit in row] for row in saved}  # equal stages share one
            found[name] = [rows[id(row)] for row in saved]
        return found

    def shard_seconds(self, sizes: Sequence[int]) -> dict[str, list[list[float]]]:
        """Seconds of S, T, E and G of a vocabulary over the ranks, [stage][segment], as :class:`seq1f1b.Costs` has
        them: what the head and the embedding take, by as many as there are ranks, and the unit's own time."""
        parts: dict[str, list[float]] = {"statistics": [], "loss": [], "embed": [], "embed_gradient": []}
        of_unit = self.hardware.unit_overhead
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
            span = self._span(end - size, end)
            head, embedding = self._whole_head(span), self._whole_embedding(span)
            parts["statistics"].append(head.forward / self.num_ranks + of_unit)
            parts["loss"].append((head.total - head.forward) / self.num_ranks + of_unit)
            parts["embed"].append(embedding.forward / self.num_ranks + of_unit)
            parts["embed_gradient"].append((embedding.total - embedding.forward) / self.num_ranks + of_unit)
        return {name: [row] * self.num_stages for name, row in parts.items()}

    def _head_seconds(self, span: Span, floor: bool = True) -> PassSeconds:
        """The head as far as the last stage has it."""
        if self._spreads:
            return _NOTHING
        if self.profile is not None and self.layout.head_in_loss:
            return _NOTHING._replace(forward=self._whole_head(span, floor).total)
        return self._whole_head(span, floor)

    def _whole_head(self, span: Span, floor: bool = True) -> PassSeconds:
        """The head: F, I and W are each a product, and logits written and read in fp32."""
        if self.profile is not None:
            return self._measured(self.profile.head, span, floor)
        hw, words = self.hardware, self.model.vocab / self._shards * span.tokens
        each = 2 * self.model.hidden * words / (hw.peak * hw.linear_efficiency)
        each += hw.saved_moves * 4 * words / hw.bandwidth
        return PassSeconds(each, each, each, 2 * each, 0.0 if self.layout.head_in_loss else each)

    def _embedding_seconds(self, span: Span, floor: bool = True) -> PassSeconds:
        """The embedding as far as the first stage has it."""
        return _NOTHING if self._spreads else self._whole_embedding(span, floor)

    def _whole_embedding(self, span: Span, floor: bool = True) -> PassSeconds:
        """The embedding, whose traffic counts only where it was measured."""
        return _NOTHING if self.profile is None else self._measured(self.profile.embedding, span, floor)

    def split(self, num_segments: int, *, mix: float = 1.0, multiple_of: int = 1) -> list[int]:
        """Segment sizes of equal time of F and B together, by this model's rates, mixed with equal length."""
        costs = self._piece_seconds
        return partition_sequence(
            self.seq_len, num_segments, strategy="profiled", costs=costs, mix=mix, multiple_of=multiple_of
        )

    @cached_property
    def _piece_seconds(self) -> list[float]:
        """F and B of equal pieces of the sequence."""
        pieces = min(self.seq_len, _PIECES)
        bounds = [self.seq_len * i // pieces for i in range(pieces + 1)]
        costs = []
        for begin, end in itertools.pairwise(bounds):
            span = self._span(begin, end)
            layer, collectives = self._layer_work(span)
            head, embedding = (of(span, floor=False) for of in (self._head_seconds, self._embedding_seconds))
            costs.append(self.model.layers * (layer.total + sum(collectives)) + head.total + embedding.total)
        return costs

    def balanced_layers(self) -> tuple[int, ...]:
        """Layers of each stage such that the slowest stage, the one with the head included, is as fast as can be."""
        whole = self._span(0, self.seq_len)
        work, collectives = self._layer_work(whole)
        layer, head = work.total + sum(collectives), self._head_seconds(whole).total
        others = self.num_stages - 1
        if others == 0:
            return (self.model.layers,)
        most = self.model.layers - others  # each stage but the last has one

        def slowest(last: int) -> float:
            return max(last * layer + head, -(-(self.model.layers - last) // others) * layer)

        last = min(range(most + 1), key=lambda n: (slowest(n), -n))
        rest = self.model.layers - last
        return (*(rest // others + (stage < rest % others) for stage in range(others)), last)

    def message_bytes(self, sizes: Sequence[int]) -> list[int]:
        """Bytes of the message of each segment, on one of the devices that share a stage."""
        if self.profile is not None:
            return [math.ceil(size * self.profile.layer.message_bytes) for size in sizes]
        scale = self.model.hidden * self.hardware.element_bytes / self._shards
        return [math.ceil(size * scale) for size in sizes]

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
        """What a message takes of its sender's own time, in the mean over all edges."""
        hw = self.hardware
        each = [hw.inside_send if near else hw.between_send for near in self._inside(rank_of_stage)]
        return sum(each) / len(each) if each else 0.0

    def _inside(self, rank_of_stage: Sequence[int]) -> list[bool]:
        """Whether stages s and s + 1 are in one node, [s]."""
        ranks_per_node = max(1, int(self.hardware.node_size) // self._shards)
        nodes = [rank // ranks_per_node for rank in rank_of_stage]
        return [a == b for a, b in itertools.pairwise(nodes)]

    def optimizer_seconds(self) -> list[float]:
        """Seconds after the pipeline in every step, for each stage; a rank needs the sum of its stages.

        They are the exposed part of the gradients' reduction, and the optimizer.
        """
        hw, d = self.hardware, self.layout.data
        moved = (d - 1) / d * (hw.gradient_bytes + hw.element_bytes)
        rate = self._link(d * self._shards * self.num_ranks)
        touched = (hw.gradient_bytes + hw.element_bytes + 2 * hw.optimizer_bytes) / d
        of_parameter = hw.data_exposed * moved / rate + touched / hw.bandwidth
        return [of_parameter * self.parameters(stage) for stage in range(self.num_stages)]

    def costs(self, schedule: Schedule, sizes: Sequence[int], *, moves: bool = False) -> Costs:
        """Costs of a step of the order. ``moves``: units may move to a tier, as far as the machine has one."""
        latencies, rates = self.links(schedule.rank_of_stage)
        optimizer = [0.0] * schedule.num_ranks
        for rank, value in zip(schedule.rank_of_stage, self.optimizer_seconds(), strict=True):
            optimizer[rank] += value
        statistics = [_STATISTICS_BYTES * size // self.layout.context for size in sizes] if self._spreads else 0
        return Costs(
            **self.unit_seconds(sizes)._asdict(),
            **(self.shard_seconds(sizes) if self._spreads else {}),
            **(self.moving_seconds(sizes) if moves else {}),
            links=Links(
                latencies,
                rates,
                send=self.send_seconds(schedule.rank_of_stage),
                message_bytes=self.message_bytes(sizes),
                statistics_bytes=statistics,
            ),
            optimizer=optimizer,
        )

    def step_seconds(self) -> float:
        """:meth:`optimizer_seconds` of the slowest rank, stages going round the ranks."""
        seconds = self.optimizer_seconds()
        return max(sum(seconds[rank :: self.num_ranks]) for rank in range(self.num_ranks))

    # -- bytes

    def parameters(self, stage: int) -> float:
        """Parameters that one device of those that share the stage holds."""
        m, h, layer = self.model, self.model.hidden, self._layer_parameters()
        if self._spreads:  # a shard of each, on the first stage of every rank
            of_rank = (2 - m.tied) * h * m.vocab / self.num_ranks / self.layout.tensor
            return self.layers[stage] * layer + (stage < self.num_ranks) * of_rank
        ends = (stage == 0) + (stage == self.num_stages - 1)
        if m.tied and self.num_stages == 1:
            ends = 1
        return self.layers[stage] * layer + ends * h * m.vocab / self.layout.tensor

    def _layer_parameters(self) -> float:
        m, h = self.model, self.model.hidden
        dense = 2 * h * self._q + 2 * h * self._g + 2 * h + (h * m.experts if m.experts > 1 else 0)
        return (dense + 3 * h * m.ffn * m.experts / self.layout.expert) / self.layout.tensor

    def _saved_bytes(self, recompute: str) -> float:
        """Activations of one token and layer: norms' inputs and outputs, q, attention's output and its sums, gate, up
        and their product. Keys and values are counted with the cache."""
        m, e = self.model, self.hardware.element_bytes
        if recompute == "full":
            return e * m.hidden
        saved = e * (4 * m.hidden + 2 * self._q) + 4 * m.heads
        if recompute == "none":
            saved += e * 3 * self._f
        if m.experts > 1:
            saved += 2 * e * m.hidden * m.experts_per_token  # tokens as sent to the experts, and what came back
        return saved

    def _left_bytes(self) -> tuple[float, float]:
        """Bytes that W reads of one token and layer: inputs that F saved, and what I leaves beside them.

        I leaves gradients of q, k, v, gate, up and two outputs, and inputs that were computed again.
        """
        m, e = self.model, self.hardware.element_bytes
        routed = e * m.hidden * m.experts_per_token if m.experts > 1 else 0.0
        inputs = {"norms": e * (2 * m.hidden + self._q) + routed, "ffn": e * self._f}
        gradients = e * (2 * m.hidden + self._q + 2 * self._g + 2 * self._f) + routed
        again = {"none": (), "ffn": ("ffn",), "full": ("norms", "ffn")}[self.layout.recompute]
        left = gradients + sum(inputs[name] for name in again)
        return sum(inputs.values()) + gradients - left, left

    def step_memory(self, sizes: Sequence[int], rank_of_stage: Sequence[int]) -> StepMemory:
        """Bytes of every tensor that a step holds; :meth:`rank_bytes` adds recomputation's and the allocator's."""
        hw = self.hardware
        activations, kept, left = self._unit_bytes(sizes)
        slot, gradient_slot = (0.0, self._copied_bytes()) if self.layout.copies_prefix else self._cache_bytes()
        parameters = [self.parameters(stage) for stage in range(self.num_stages)]
        return StepMemory(
            activations=activations,
            kept_activations=kept,
            output_gradients=left,
            kv=[math.ceil(n * self.seq_len * slot) for n in self.layers],
            kv_gradients=[math.ceil(n * self.seq_len * gradient_slot) for n in self.layers],
            weights=[math.ceil(n * (hw.element_bytes + hw.gradient_bytes)) for n in parameters],
            optimizer=[math.ceil(n * hw.optimizer_bytes / self.layout.data) for n in parameters],
            logits=math.ceil(self._logit_work(max(sizes))),
            shard_logits=self._shard_logits(sizes),
            staying=self._staying_bytes(sizes, rank_of_stage),
        )

    def held_bytes(
        self, sizes: Sequence[int], first: Sequence[int] = (0,), slot_tokens: int | None = None
    ) -> list[list[int]]:
        """Most that a unit holds before or after I, [stage][segment]; the first segment's also its micro-batch's cache,
        which goes when it is through. For orders made for a cap in bytes.

        Args:
            first: which of the segments are the first of a micro-batch.
            slot_tokens: of the cache's slots; None: a sequence.
        """
        tables, slot_tokens = zip(*self._unit_bytes(sizes), strict=True), slot_tokens or self.seq_len
        held = [[max(a, kept + left) for a, kept, left in zip(*rows, strict=True)] for rows in tables]
        if not self.layout.copies_prefix:
            for row, layers in zip(held, self.layers, strict=True):
                for segment in first:
                    row[segment] += math.ceil(layers * slot_tokens * self._cache_bytes()[0])
        return held

    def least_bytes(self, sizes: Sequence[int]) -> float:
        """What no order can go below: weights and one micro-batch, in the mean over the ranks."""
        hw = self.hardware
        state = hw.element_bytes + hw.gradient_bytes + hw.optimizer_bytes / self.layout.data
        static = state * sum(map(self.parameters, range(self.num_stages)))
        held = (1 + hw.allocator_reserve) * sum(map(sum, self._unit_bytes(sizes)[0]))
        return (static + held) / self.num_ranks

    def unit_memory(
        self, sizes: Sequence[int], rank_of_stage: Sequence[int], slot_tokens: int | None = None
    ) -> StepMemory:
        """Bytes of what units hold. With the cache where its pages come and go with units; else all of it is held all
        through the step, and is not counted here. ``slot_tokens``: of the cache's slots; None: a sequence."""
        tables, slot_tokens = self._unit_bytes(sizes), slot_tokens or self.seq_len
        copied = [math.ceil(n * self.seq_len * self._copied_bytes()) for n in self.layers]
        staying, (forward, backward) = self._staying_bytes(sizes, rank_of_stage), self._work_bytes(sizes)
        if not self._releases(slot_tokens):
            return StepMemory(
                *tables,
                kv_gradients=copied,
                staying=staying,
                forward_work=forward,
                backward_work=backward,
                shard_logits=self._shard_logits(sizes),
            )
        row, gradient_row = self._cache_bytes()
        return StepMemory(
            *tables,
            staying=staying,
            forward_work=forward,
            backward_work=backward,
            shard_logits=self._shard_logits(sizes),
            kv_rows=[[math.ceil(layers * size * row) for size in sizes] for layers in self.layers],
            kv_gradient_rows=[[math.ceil(layers * size * gradient_row) for size in sizes] for layers in self.layers],
        )

    def _staying_bytes(self, sizes: Sequence[int], rank_of_stage: Sequence[int]) -> list[list[int]]:
        """Inputs that a stage of the same rank handed over, and gradients of the last stage's output that a loss
        within F has left. Each is as large as a message."""
        tensors = [stage > 0 and rank_of_stage[stage - 1] == rank_of_stage[stage] for stage in range(self.num_stages)]
        in_loss = self.layout.head_in_loss and not self._spreads
        left = [in_loss and stage + 1 == self.num_stages for stage in range(self.num_stages)]
        messages = self.message_bytes(sizes)
        return [[(a + b) * message for message in messages] for a, b in zip(tensors, left, strict=True)]

    def _releases(self, slot_tokens: int) -> bool:
        """Whether the cache gives pages back as backwards end."""
        return not self.layout.copies_prefix and 0 < self.hardware.release_tokens <= slot_tokens

    def _unit_bytes(self, sizes: Sequence[int]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Activations, what of them stays until W, and what I adds to all of them."""
        if self.profile is not None:
            return self._measured_bytes(self.profile, sizes)
        saved = self._saved_bytes(self.layout.recompute)
        kept, left = self._left_bytes()
        own = 2 * self._g * self.hardware.element_bytes if self.layout.copies_prefix else 0.0
        whole = [0] * self.num_stages
        if self.layout.copies_prefix:  # the last copy is of all keys and values
            whole = [math.ceil(n * self.seq_len * self._cache_bytes()[0]) for n in self.layers]
        words = self._saved_logit_bytes()
        logit_gradients = 0.0 if self.layout.head_in_loss else self.model.vocab * self.hardware.element_bytes
        activations = [
            [*row[:-1], row[-1] + more]
            for row, more in zip(self._per_unit(sizes, saved + own, words), whole, strict=True)
        ]
        return (
            activations,
            self._per_unit(sizes, kept),
            self._per_unit(sizes, left, logit_gradients / self._shards),
        )

    def _per_unit(self, sizes: Sequence[int], layer: float, head: float = 0.0) -> list[list[int]]:
        """[stage][segment] bytes: of a layer per token, and of the last stage's head."""
        per_token, last = self.hardware.activation_factor * layer / self._shards, self.num_stages - 1
        kinds = [(layers, s == last) for s, layers in enumerate(self.layers)]
        rows = {
            (layers, is_last): [math.ceil(layers * per_token * n + (head * n if is_last else 0.0)) for n in sizes]
            for layers, is_last in dict.fromkeys(kinds)
        }
        return [rows[kind] for kind in kinds]

    def _measured_bytes(
        self, profile: Profile, sizes: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        head = None if self.layout.head_in_loss else profile.head
        tables: tuple[list[list[int]], list[list[int]], list[list[int]]] = ([], [], [])
        for stage, layers in enumerate(self.layers):
            parts = [(layers, profile.layer), (stage == 0, profile.embedding), (stage == self.num_stages - 1, head)]
            held = [(count, part.unit_bytes) for count, part in parts if part is not None]
            units = [[of(size, count) for count, of in held] for size in sizes]  # by part, then by kind
            for kind, table in enumerate(tables):
                table.append([math.ceil(sum(part[kind] for part in unit)) for unit in units])
        return tables

    def _work_bytes(self, sizes: Sequence[int]) -> tuple[Any, Any]:
        """Most that F, and B or I, of a unit allocate for a while, as it was measured. F of a head in the loss goes
        back, too, so that it saves for a while."""
        if self.profile is None:
            return 0, 0
        forward: list[list[int]] = []
        backward: list[list[int]] = []
        for stage in range(self.num_stages):
            ends = {"embedding": stage == 0, "head": stage == self.num_stages - 1}
            if self._spreads:
                ends = dict.fromkeys(ends, False)
            parts = [part for name, part in self.profile.parts().items() if ends.get(name, True)]
            of_forward = [[part.forward_workspace(size) for part in parts] for size in sizes]
            if self.layout.head_in_loss and ends["head"] and self.profile.head is not None:
                head = parts.pop()
                for size, work in zip(sizes, of_forward, strict=True):
                    work.append(head.workspace(size) + head.unit_bytes(size)[0])
            forward.append([math.ceil(max(work)) for work in of_forward])
            backward.append([math.ceil(max(part.workspace(size) for part in parts)) for size in sizes])
        return forward, backward

    def _cache_bytes(self) -> tuple[float, float]:
        """Keys and values of one token and layer, and their gradients."""
        if self.profile is not None:
            return self.profile.layer.kv_bytes, self.profile.layer.kv_gradient_bytes
        row, element = 2 * self._g / self._shards, self.hardware.element_bytes
        return row * element, row * 4

    def _copied_bytes(self) -> float:
        """The last copy of one token and layer and its gradients, where segments copy their prefix. They stay from the
        first backward of a micro-batch to its last."""
        return 2 * self._cache_bytes()[0] if self.layout.copies_prefix else 0.0

    def _shard_logits(self, sizes: Sequence[int]) -> int | list[int]:
        """Logits of a shard of the vocabulary, by segment; 0 where the last stage has the head."""
        return [math.ceil(self._logit_bytes(size) / self.num_ranks) for size in sizes] if self._spreads else 0

    def _logit_bytes(self, tokens: int) -> float:
        """Logits, their fp32 copy, and its gradient."""
        return self.model.vocab / self._shards * tokens * (self.hardware.element_bytes + 8)

    def _saved_logit_bytes(self) -> float:
        """What a loss apart from the head saves of one token: fp32 probabilities."""
        return 0.0 if self.layout.head_in_loss else self.model.vocab / self._shards * 4

    def _logit_work(self, tokens: int) -> float:
        """The other logits of a unit of the last stage, for a while."""
        return 0.0 if self._spreads else self._logit_bytes(tokens) - self._saved_logit_bytes() * tokens

    def rank_bytes(self, schedule: Schedule, sizes: Sequence[int]) -> list[RankBytes]:
        """The peak of every rank under an order."""
        memory, messages = self.unit_memory(sizes, schedule.rank_of_stage), self.message_bytes(sizes)
        ranks = self.rank_bytes_of(schedule, memory, messages, max(sizes), self.seq_len)
        pools = self._pool_bytes(schedule, memory.activations, sizes)
        return [replace(rank, reserve=rank.reserve + pool) for rank, pool in zip(ranks, pools, strict=True)]

    def _pool_bytes(self, schedule: Schedule, activations: Any, sizes: Sequence[int]) -> list[int]:
        """What an allocator keeps beyond the peak if blocks of one length do not serve another: the peaks of segments
        of each length together, less that of all, and copies of each prefix but the first and the last."""
        share, lengths = self.hardware.length_pools, set(sizes)
        if share == 0 or len(lengths) == 1:
            return [0] * schedule.num_ranks

        def peaks(table: Any) -> tuple[int, ...]:
            return schedule.peak_memory(StepMemory(activations=table)).activations

        sums = [0] * schedule.num_ranks
        for length in lengths:
            alone = [[held * (size == length) for held, size in zip(row, sizes, strict=True)] for row in activations]
            sums = list(map(operator.add, sums, peaks(alone)))
        copies = sum(list(itertools.accumulate(sizes))[1:-1]) * max(self.layers) * self._copied_bytes() / 2
        return [math.ceil(share * (x - y + copies)) for x, y in zip(sums, peaks(activations), strict=True)]

    def rank_bytes_of(
        self,
        schedule: Schedule,
        memory: StepMemory,
        message_bytes: Sequence[Any],
        longest: int,
        slot_tokens: int,
    ) -> list[RankBytes]:
        """The peak of every rank, from what units hold, messages, and the tokens of the longest segment and a slot."""
        hw = self.hardware
        stages_of: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
        for stage, rank in enumerate(schedule.rank_of_stage):
            stages_of[rank].append(stage)
        costs = Costs(links=Links(message_bytes=message_bytes))
        peaks = schedule.peak_memory(replace(memory, forward_work=0, backward_work=0), costs)
        with_work = () if self.profile is None else schedule.peak_memory(memory, costs).total
        kv, gradients = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks  # held all through the step
        if not self._releases(slot_tokens):
            kv, gradients = self._slot_bytes(schedule, stages_of, slot_tokens)
        state = hw.element_bytes + hw.gradient_bytes + hw.optimizer_bytes / self.layout.data
        ranks = []
        for rank, stages in enumerate(stages_of):
            work = 0.0 if self.layout.recompute == "none" else self._saved_bytes("none") * longest / self._shards
            if self.profile is not None:
                work = with_work[rank] - peaks.total[rank]
            elif self.num_stages - 1 in stages:
                work = max(work, self._logit_work(longest))
            if self.layout.tensor > 1:
                work += self._gathered_bytes(max(self.layers[stage] for stage in stages), longest)
            live = peaks.total[rank] - peaks.receive[rank]
            rows = min(live, peaks.kv[rank])
            gradient_rows = min(live - rows, peaks.kv_gradients[rank])
            changing = peaks.total[rank] + kv[rank] + gradients[rank] + work
            ranks.append(
                RankBytes(
                    static=math.ceil(sum(map(self.parameters, stages)) * state),
                    activations=live - rows - gradient_rows,
                    kv=math.ceil(kv[rank]) + rows,
                    kv_gradients=math.ceil(gradients[rank]) + gradient_rows,
                    receive=peaks.receive[rank],
                    workspace=math.ceil(work),
                    reserve=math.ceil(hw.allocator_reserve * changing + hw.context_bytes),
                )
            )
        return ranks

    def _gathered_bytes(self, layers: int, tokens: int) -> float:
        """Whole hidden states that collectives of one unit have gathered or will scatter."""
        whole = tokens / self.layout.context * self.model.hidden * self.hardware.element_bytes
        return self.hardware.collective_buffers * layers * whole

    def _slot_bytes(
        self, schedule: Schedule, stages_of: Sequence[Sequence[int]], slot_tokens: int
    ) -> tuple[list[float], list[float]]:
        """The cache of every rank, and its gradients: each stage has the slots that it needs at its own peak, all
        through the step."""
        kv, gradients = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
        if self.layout.copies_prefix:
            return kv, gradients
        slot, gradient_slot = (slot_tokens * size for size in self._cache_bytes())  # of one layer
        for number in range(max(map(len, stages_of))):  # of the stage on its rank
            counted = [0] * schedule.num_stages
            for stages in stages_of:
                counted[stages[number]] = 1
            slots = schedule.peak_memory(StepMemory(kv=counted, kv_gradients=counted))
            for rank, stages in enumerate(stages_of):
                layers = self.layers[stages[number]]
                kv[rank] += layers * slots.kv[rank] * slot
                gradients[rank] += layers * slots.kv_gradients[rank] * gradient_slot
        return kv, gradients


_NOTHING = PassSeconds(0.0, 0.0, 0.0, 0.0)
_STATISTICS_BYTES = 12  # of a token: a maximum, a sum of exponentials, the target's logit
_COLLECTIVES, _COLLECTIVES_BACK = 4, 6  # of a layer: backward gathers the inputs of two products again
_PIECES = 1024  # of the sequence whose costs a split balances
