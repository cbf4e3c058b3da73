"""A model in a pipeline on a machine: layers, links and parameters of its stages, and where a sequence is cut."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from seq1f1b.balance import balanced
from seq1f1b.partition import ModelShape, layers_of, partition_sequence
from seq1f1b.plan import INSIDE, Layout
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.price import PackedRow, Price, RankBytes
from seq1f1b.runtime.unit_times import MeasuredUnits, Terms
from seq1f1b.seconds import Source, Span, span_of

__all__ = ["CostModel", "PackedRow", "Price", "RankBytes"]

_PIECES = 1024  # of the sequence whose costs a split balances
_WHOLE = {"tensor": "heads", "expert": "experts of the model, and data"}


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
        self.source: Source = self.parts
        self._last: tuple[tuple[int, ...], Price] | None = None  # by sizes: it is asked for repeatedly

    @classmethod
    def balanced(
        cls, model: ModelShape, hardware: Hardware, *, stages_per_rank: int = 1, layout: Layout, **counts: int
    ) -> CostModel:
        """A model with :meth:`balanced_layers`, unless the layout gives the layers. Arguments as of the class."""
        cost = cls(model, hardware, stages_per_rank=stages_per_rank, layout=layout, **counts)
        return cost if layout.layers is not None else cost._changed(hardware, cost.balanced_layers())

    def on(self, hardware: Hardware) -> CostModel:
        """A model of these stages on another machine."""
        return self._changed(hardware, self.layers)

    def _changed(self, hardware: Hardware, layers: tuple[int, ...]) -> CostModel:
        counts = {"num_ranks": self.num_ranks, "stages_per_rank": self.num_stages // self.num_ranks}
        layout = replace(self.layout, layers=layers)
        return CostModel(self.model, hardware, seq_len=self.seq_len, layout=layout, **counts)

    def measured(self, terms: Terms) -> CostModel:
        """A model of these stages, whose units take what an engine measured; bytes and messages stay."""
        other = copy.copy(self)
        other.source, other._last = MeasuredUnits(terms, self.source), None
        return other

    def price(self, sizes: Sequence[int]) -> Price:
        """Seconds and bytes of the units of a step whose sequences are alike, in segments of so many tokens."""
        if self._last is None or self._last[0] != tuple(sizes):
            documents = self.layout.documents or (self.seq_len,)
            self._last = tuple(sizes), Price(self, [PackedRow(documents, tuple(sizes))], is_alike=True)
        return self._last[1]

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
        return span_of(self.layout.documents or (self.seq_len,), begin, end, self.parts.windows)

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
        costs = []
        for begin, end in itertools.pairwise(bounds):
            span = self.span(begin, end)
            embedding, head = self.parts.ends(span, floor=False)
            layers = sum(n * self.parts.flow(span, kind) for kind, n in enumerate(self.parts.counts) if n)
            costs.append(layers + head.total + embedding.total)
        return costs

    def balanced_layers(self) -> tuple[int, ...]:
        """Layers of each stage such that the slowest stage, the one with the head included, is as fast as can be."""
        whole = self.span(0, self.seq_len)
        layer, head = self.parts.flow(whole), self.parts.ends(whole)[1].total
        if len(self.parts.counts) > 1:
            return tuple(balanced(self.parts.flows(whole), head, self.num_stages))
        others = self.num_stages - 1
        if others == 0:
            return (self.model.layers,)
        most = self.model.layers - others  # each stage but the last has one

        def slowest(last: int) -> float:
            return max(last * layer + head, -(-(self.model.layers - last) // others) * layer)

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
