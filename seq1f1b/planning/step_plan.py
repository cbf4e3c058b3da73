"""A plan for one step: which documents share a row, how long ones are cut, and the order of the rows.

Short documents are packed into rows of one segment each. A longer one has a row to itself, in segments of equal FLOPs,
each at most as costly as a row that one document fills. Rows go longest first.
[ChunkFlow, arXiv:2503.02356: one size for packed and for split sequences]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from seq1f1b.ops.packing import pack_documents
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.schedule import Schedule, Simulation, build_schedule

__all__ = ["StepPlan", "plan_step"]


@dataclass(frozen=True)
class StepPlan:
    """What :func:`plan_step` found.

    Attributes:
        lengths: tokens of each document.
        rows: indices of the documents of each row, in their order.
        segment_sizes: for each row the tokens of its segments: what a step is given.
        schedule: the order of the step.
        costs: FLOPs of the forward of each segment of each row, of the whole model.
    """

    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    segment_sizes: tuple[tuple[int, ...], ...]
    schedule: Schedule
    costs: tuple[tuple[float, ...], ...]

    @cached_property
    def simulation(self) -> Simulation:
        """The step simulated, in FLOPs in place of seconds, with equal stages and messages that take no time."""
        stages = self.schedule.num_stages
        forward = [[cost / stages for cost in row] for row in self.costs]
        backward = [[2.0 * cost for cost in row] for row in forward]
        return self.schedule.simulate([forward] * stages, [backward] * stages)

    @property
    def doc_ids(self) -> list[Tensor]:
        """For each row and token the position of its document's first token in the row, (1, tokens) for each row."""
        ids = []
        for row in self.rows:
            whole = torch.tensor([self.lengths[index] for index in row])
            ids.append((whole.cumsum(0) - whole).repeat_interleave(whole).to(torch.int32)[None])
        return ids

    def join(self, documents: Sequence[Tensor]) -> list[Tensor]:
        """Puts something that each token has, such as its id or label, into rows.

        Args:
            documents: one-dimensional tensors of the lengths that were planned.
        Returns:
            For each row, (1, tokens).
        Raises:
            ValueError: the documents are not as many or not as long as those that were planned.
        """
        if tuple(map(len, documents)) != self.lengths:
            raise ValueError("the documents are not as many or not as long as those that were planned")
        return [torch.cat([documents[index] for index in row])[None] for row in self.rows]


def plan_step(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    segment_tokens: int,
    model: ModelShape,
    schedule: str = "seq1f1b",
    stages_per_rank: int = 1,
) -> StepPlan:
    """Plans a step over documents of any length.

    The same arguments give the same plan, so every rank may make it by itself.

    Args:
        lengths: tokens of each document.
        num_ranks: P.
        segment_tokens: tokens of a segment at most: of a packed row, and of each part of a longer document.
        model: shape of the whole model, whose FLOPs segments are balanced by.
        schedule, stages_per_rank: a family that takes rows, see :func:`seq1f1b.build_schedule`.
    Raises:
        ValueError: there is no document, one is empty, or ``segment_tokens`` is below 1.
        ScheduleError: the family cannot be built for these rows.
    """
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens is {segment_tokens}, must be at least 1")
    if not lengths:
        raise ValueError("there are no documents to plan a step of")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"document {index} has {length} tokens, must have at least 1")
    flops = {length: model.flops(0, length) for length in {*lengths, segment_tokens}}
    short = [index for index, length in enumerate(lengths) if length <= segment_tokens]
    packed = pack_documents([lengths[index] for index in short], segment_tokens).rows if short else ()
    found: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []  # documents, tokens, FLOPs
    for places in packed:
        row = tuple(short[i] for i in places)
        found.append((row, (sum(lengths[i] for i in row),), (sum(flops[lengths[i]] for i in row),)))
    cuts: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
    for index, length in enumerate(lengths):
        if length <= segment_tokens:
            continue
        if length not in cuts:
            cuts[length] = _cut(length, segment_tokens, flops[length] / flops[segment_tokens], model)
        found.append(((index,), *cuts[length]))
    found.sort(key=lambda entry: (-len(entry[1]), -sum(entry[2])))
    order = build_schedule(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=len(found),
        num_segments=[len(sizes) for _, sizes, _ in found],
        stages_per_rank=stages_per_rank,
    )
    documents, sizes, costs = zip(*found, strict=True)
    return StepPlan(tuple(lengths), documents, sizes, order, costs)


def _cut(length: int, most: int, least_count: float, model: ModelShape) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and FLOPs of the segments of a document, of at most so many tokens each."""
    count = max(2, -int(-least_count // 1))
    sizes = partition_sequence(length, count, model=model)
    while max(sizes) > most:
        count += 1
        sizes = partition_sequence(length, count, model=model)
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return tuple(sizes), tuple(model.flops(begin, end) for begin, end in pairwise(ends))
