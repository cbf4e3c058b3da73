"""A plan: one way to train a model, in a file of ``seq1f1b plan`` for ``PipelineEngine``.

The module imports nothing of ``seq1f1b.planning``, which finds plans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from seq1f1b.files import json_fields, load, read, write_whole
from seq1f1b.partition import ModelShape, check_model, check_segment_sizes
from seq1f1b.schedule import Costs, Schedule, build_schedule

__all__ = ["Layout", "Plan", "StepLength", "TunedOrder"]

INSIDE = ("none", "ffn", "full")
"""Recomputation inside the backward: nothing, the feed-forward's inner activations, or all but each layer's input."""


@dataclass(frozen=True)
class Layout:
    """The layout of a model over devices, beside the pipeline.

    Attributes:
        tensor, context, expert, data: degrees. Tensor parallelism shards activations along the sequence too; context
            parallelism passes keys and values round a ring; experts are spread over ``expert`` of the ``data`` devices;
            the optimizer's state is sharded over ``data``.
        layers: number of layers of every stage; None: as even as possible, earlier stages have one more.
        inside: recomputation inside of blocks, "none", "ffn" or "full".
        documents: lengths of the documents packed into the sequence; attention stays within a document. None: one
            document.
        head_in_loss: True: one segment's logits live at a time (``loss_fn`` is a module that holds the head); False:
            the logits of all live segments.
        vocabulary: "ends": the first stage has the embedding, the last one the head; "ranks": each rank has a shard of
            both, by :class:`seq1f1b.VocabularyParallelHead` and its embedding.
        lora: rank of the low-rank adapters (arXiv:2106.09685) beside the matrices of layers, which alone are trained;
            matrices of experts have none. 0: no adapters. On a CPU, by a profile of adapters of rank 8, memory was 0.9
            to 1.03 of the plan, and steps took 0.97 to 1.3 of the time (``benchmarks/results/caps-lora8.txt``).
        frozen: whether no weight of the shape is trained; with adapters none is.
        weight_bits: bits of a frozen weight, 4, 8 or 16; products read it in the dtype of activations. None: as
            activations.
        copies_prefix: instead of one cache per micro-batch, every segment copies the keys and values of earlier
            segments, as the Seq1F1B authors' code does.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    layers: tuple[int, ...] | None = None
    inside: str = "none"
    documents: tuple[int, ...] | None = None
    head_in_loss: bool = True
    copies_prefix: bool = False
    vocabulary: str = "ends"
    lora: int = 0
    frozen: bool = False
    weight_bits: int | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the weights of the model's shape are not trained."""
        return self.frozen or self.lora > 0


@dataclass(frozen=True)
class StepLength:
    """Steps of one length, in a plan for a mix of lengths.

    Attributes:
        seq_len: length in tokens of the step's padded sequences.
        share: share of steps of this length, and of their sequences, among all.
        tokens: mean tokens of a sequence, without padding.
        segment_sizes: segments of the padded sequence.
        seconds, tokens_per_second: time and rate of a step; padding does not count as tokens.
        peak: bytes of each rank.
    """

    seq_len: int
    share: float
    tokens: float
    segment_sizes: tuple[int, ...]
    seconds: float
    tokens_per_second: float
    peak: tuple[int, ...]


class _File:
    """Base of plans, tuned orders and profiles: a dataclass with a file format.

    A class names the kind of file for errors, the format, and for profiles the least value of every number.
    """

    _kind: ClassVar[str]
    _format: ClassVar[str]
    _again: ClassVar[str] = ""  # advice about a file of another version
    _least: ClassVar[float | None] = None

    def to_json(self) -> str:
        """Returns the text of the file."""
        fields = asdict(self)  # type: ignore[call-overload]
        return json.dumps({"format": self._format, **plain(fields)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a text of :meth:`to_json`.

        Raises:
            ValueError: no such text; names the field.
            ScheduleError: the order cannot be built.
        """
        fields = json_fields(text, cls._kind, cls._format, again=cls._again)
        found: Self = load(cls, fields, cls._kind, least=cls._least)
        found._check()
        return found

    def _check(self) -> None:
        """Raises the errors of :meth:`from_json` for fields that do not fit together."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole, or not at all."""
        write_whole(path, (self.to_json() + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file of ``save``. Raises errors of ``from_json``, with the file's name, and ``OSError``."""
        return read(path, cls.from_json)


def plain(value: Any) -> Any:
    """Returns a value for JSON: lists in place of arrays, and objects, which name fields, in place of named tuples."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class TunedOrder(_File):
    """The order found by a tuned engine, :meth:`seq1f1b.PipelineEngine.found_order`.

    ``save`` writes a file; ``PipelineEngine(schedule=file)`` runs it from the first step on, on any machine.

    Attributes:
        schedule, num_ranks, num_microbatches, num_segments, stages_per_rank, options, weights: of
            :func:`seq1f1b.build_schedule`.
        seq_len: tokens of the sequences of the search.
        segment_sizes: tokens of the segments of ``seq_len`` tokens; (): an even split, of sequences of any length.
    """

    _kind, _format = "tuned order", "seq1f1b tuned order 1"

    schedule: str
    num_ranks: int
    num_microbatches: int
    num_segments: int
    stages_per_rank: int
    seq_len: int
    segment_sizes: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "planned"

    def build(self) -> Schedule:
        """Returns the order."""
        return _order_of(self, weights=self.weights)

    def _check(self) -> None:
        _check_order(self, (self,) if self.segment_sizes else ())

    def engine_arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of ``PipelineEngine``."""
        return {
            "schedule": self.build(),
            "num_microbatches": self.num_microbatches,
            "num_segments": self.num_segments,
            "segment_sizes": {self.seq_len: list(self.segment_sizes)} if self.segment_sizes else None,
        }


def _order_of(found: Plan | TunedOrder, **how: Any) -> Schedule:
    return build_schedule(
        found.schedule,
        num_ranks=found.num_ranks,
        num_microbatches=found.num_microbatches,
        num_segments=found.num_segments,
        stages_per_rank=found.stages_per_rank,
        options=found.options,
        **how,
    )


def _check_order(found: Plan | TunedOrder, parts: Iterable[Plan | TunedOrder | StepLength]) -> None:
    """Raises unless the parts' segment sizes fit, and the order can be built."""
    kind = found._kind
    for part in parts:
        check_segment_sizes(part.segment_sizes, part.seq_len)
        if len(part.segment_sizes) != found.num_segments:
            raise ValueError(f"a {kind} of {found.num_segments} segments has {len(part.segment_sizes)} segment_sizes")
    try:
        found.build()
    except TypeError as error:
        raise ValueError(f"a {kind} has wrong options: {error}") from None


def load_plan(path: str | os.PathLike[str]) -> Plan | TunedOrder:
    """Reads the file of a plan or of a tuned order. Raises the errors of ``Plan.load`` or ``TunedOrder.load``."""

    def parse(text: str) -> Plan | TunedOrder:
        is_tuned = f'"{TunedOrder._format}"' in text[:100]
        return TunedOrder.from_json(text) if is_tuned else Plan.from_json(text)

    return read(path, parse)


@dataclass(frozen=True)
class Plan(_File):
    """One way to train, with its predicted costs. ``save`` writes a file; ``PipelineEngine(schedule=file)`` runs it.

    Attributes:
        model, hardware, seq_len, layout: the planned case.
        schedule, num_ranks, num_microbatches, num_segments, stages_per_rank, options: of
            :func:`seq1f1b.build_schedule`.
        segment_sizes: tokens.
        mix: balance of the split, 1 equal time, 0 equal length.
        seconds, low, high: time of a step in a row of equal steps, including the optimizer; the ends of the interval
            take the uncertain terms to be independent.
        bubble: share of the step's time in which ranks neither compute nor update.
        tokens_per_second: rate of all data-parallel replicas together.
        optimizer_sync: whether the optimizer waits for all ranks.
        peak: bytes of each rank.
        peak_high: bytes of each rank with the uncertain bytes at their high ends.
        cap: bytes of a device, the plan's limit.
        prefetch: receive places beyond the peak of live ones; None: by time, see :meth:`seq1f1b.Schedule.replace`.
        spread: seconds of passes under the names of :class:`seq1f1b.Costs`, which decide where S, T, E and G of a
            vocabulary over the ranks stand in the order; {} if the vocabulary is at the ends.
        units: letters for units with kept, recomputed or moved tensors, as in
            :meth:`seq1f1b.Schedule.cell_kinds`; () if all units keep tensors.
        lengths: lengths of a mix, ascending; () if all steps have ``seq_len``. In a mix, ``seq_len``, ``segment_sizes``
            and ``peak_high`` describe the longest length, ``peak`` is the most of any, times and rates the mean of all.
    """

    _kind, _format = "plan", "seq1f1b plan 1"

    model: ModelShape
    hardware: str
    seq_len: int
    layout: Layout
    schedule: str
    num_ranks: int
    num_microbatches: int
    num_segments: int
    stages_per_rank: int
    segment_sizes: tuple[int, ...]
    mix: float
    seconds: float
    low: float
    high: float
    bubble: float
    tokens_per_second: float
    peak: tuple[int, ...]
    peak_high: tuple[int, ...]
    cap: int
    optimizer_sync: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    prefetch: int | None = None
    lengths: tuple[StepLength, ...] = ()
    units: tuple[str, ...] = ()
    spread: Mapping[str, Any] = field(default_factory=dict)

    @property
    def margin(self) -> tuple[int, ...]:
        """Bytes of the cap left over on each rank."""
        return tuple(self.cap - peak for peak in self.peak)

    def build(self) -> Schedule:
        """Returns the order."""
        order = _order_of(self, prefetch=self.prefetch)
        if self.spread:
            order = order.spread_vocabulary(costs=Costs(**self.spread), embedding=True)
        return order.with_cell_kinds(self.units) if self.units else order

    def _check(self) -> None:
        check_model(self.model, "plan: model")
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch of a plan is {self.prefetch!r}, must be a whole number from 0 on, or null")
        _check_order(self, (self, *self.lengths))

    def engine_arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of ``PipelineEngine``.

        Raises:
            ValueError: the engine lacks a feature of the plan; names the feature.
        """
        layout = self.layout
        if layout.inside != "none":
            raise ValueError(
                f"the plan recomputes inside of blocks ({layout.inside!r}), which the engine leaves to the module: "
                "plan with inside 'none', or wrap the blocks in torch.utils.checkpoint and give the engine the plan's "
                "schedule, num_microbatches, num_segments and segment_sizes. Whole units are recomputed by "
                "Memory(recompute=...)"
            )
        return {
            "schedule": self.build(),
            "num_microbatches": self.num_microbatches,
            "num_segments": self.num_segments,
            "segment_sizes": {each.seq_len: list(each.segment_sizes) for each in self.lengths}
            or list(self.segment_sizes),
        }
