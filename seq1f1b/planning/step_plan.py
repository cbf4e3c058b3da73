"""Plan of one step over documents of any length: rows, segments, the order, and recomputed units.

A row is a micro-batch. A document longer than a unit's wanted time begins a row and is cut into segments of equal time.
Short documents fill the last segment of a long document's row, or are packed into rows of one segment, by time instead
of length. All units then take about equal time, for any lengths. A tree has a row to itself: a long node is a chain of
units, and short leaves of one parent share a unit.
[ChunkFlow, arXiv:2503.02356: one size for packed and for split sequences, and K of them kept; InfiniPipe,
arXiv:2509.21275: packing and splitting mixed]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from seq1f1b import ScheduleError
from seq1f1b.attention.packing import pack_documents
from seq1f1b.families import families_named
from seq1f1b.flat import whole
from seq1f1b.nested import tensors_of
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.planning.cost import CostModel, PackedRow, Price, RankBytes
from seq1f1b.planning.orders import Orders
from seq1f1b.planning.prefix_trees import PrefixTrees
from seq1f1b.planning.step_rows import Rates, Tree, TreeShape, best_unit, rows_of, tokens_of
from seq1f1b.schedule import Family, Schedule, Simulation

__all__ = ["StepPlan", "plan_step", "share_documents"]

_SCALES = (1.0, 2**-0.5, 2**0.5, 0.5, 2.0)  # times of a unit to try, in times of the unit that the bound prefers
_SMALLER = (0.35, 0.25, 0.125, 0.0625)  # further times to try if memory is short
_SEARCH_SECONDS = 4e-5  # per unit: a quarter of the search's seconds, since the search runs beside the step before
_MOST_UNITS = 12_000  # units of all ranks in all orders of one call, beyond the first order


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step, from :func:`plan_step`; ``engine.step(..., plan=plan)`` runs the plan.

    Attributes:
        lengths: tokens of each document, or of all nodes of a tree.
        rows: indices of the documents of each row, in order; a tree has a row to itself.
        segment_sizes: tokens of each segment, by row; a tuple for leaves that share a segment.
        schedule: the order of the step; recomputed units have an R, moved units have O, A and L.
        ranks: predicted bytes of every rank at the peak.
        simulation: simulation of the step, without the optimizer.
        costs: predicted costs of the units, and the rows.
    """

    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    segment_sizes: tuple[tuple[int | tuple[int, ...], ...], ...]
    schedule: Schedule
    ranks: tuple[RankBytes, ...]
    simulation: Simulation = field(compare=False, repr=False)
    costs: Price = field(compare=False, repr=False)

    @property
    def parents(self) -> tuple[tuple[int, ...] | None, ...] | None:
        """Parent segment of each segment, by row, None for a row without a tree; None if no row is a tree."""
        return self.costs.parents

    @property
    def pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Begin and size of runs of a tree's data, in the order of the row, by row; () for a row without a tree."""
        return tuple([row.pieces for row in self.costs.rows])

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step, without the optimizer."""
        return self.simulation.makespan

    @property
    def remedied(self) -> int:
        """Number of recomputed and moved units, over all stages."""
        return sum(row.count("R") + row.count("L") for row in self.schedule.cell_kinds())

    @cached_property
    def digest(self) -> str:
        """Digest by which a step checks that all ranks have equal plans."""
        order = self.schedule
        text = f"{self.rows} {self.segment_sizes} {order.digest} {order._places_text} {order.fills}"
        if self.parents is not None:
            text += f" {self.parents} {self.pieces}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def imbalance(self) -> float:
        """Relative excess of the slowest unit over the mean unit, each with F and B of all stages."""
        return self.costs.imbalance

    @property
    def doc_ids(self) -> list[Tensor]:
        """Position in the row of the first token of each token's document, (1, tokens) for each row."""
        ids = []
        for row in self.rows:
            whole = torch.tensor([self.lengths[index] for index in row])
            ids.append((whole.cumsum(0) - whole).repeat_interleave(whole).to(torch.int32)[None])
        return ids

    def join(self, documents: Sequence[Any]) -> list[Any]:
        """Joins documents' tensors with a value per token, such as ids or labels, into rows.

        Args:
            documents: a tensor (tokens, ...) of the planned length for each document, or dicts and tuples of tensors,
                with one structure for all documents: ``PrefixTrees.tokens`` and ``PrefixTrees.targets``, for instance.
        Returns:
            A tensor (1, tokens, ...) for each row, or dicts and tuples of tensors.
        Raises:
            ValueError: number or lengths of the documents differ from the plan.
        """
        if [{len(tensor) for tensor in tensors_of(document)} for document in documents] != [
            {length} for length in self.lengths
        ]:
            raise ValueError("the documents are not as many or not as long as those that were planned")
        return [
            tree_map(partial(_joined, pieces), *[documents[index] for index in row])
            for row, pieces in zip(self.rows, self.pieces, strict=True)
        ]

    def split(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Splits rows into documents, the reverse of :meth:`join`; ``PrefixTrees.rows`` takes the results of trees.

        Args:
            rows: a tensor (1, tokens, ...) for each row.
        Returns:
            A tensor (tokens, ...) for each document.
        Raises:
            ValueError: number or lengths of the rows differ from the plan.
        """
        lengths = [sum(self.lengths[index] for index in row) for row in self.rows]
        if [tuple(row.shape[:2]) for row in rows] != [(1, length) for length in lengths]:
            none = "" if rows else "; only the rank of the last stage has values, others get none"
            raise ValueError(
                f"the rows are not as many or not as long as those of the plan: give (1, tokens, ...) each{none}"
            )
        found: dict[int, Tensor] = {}
        for row, indices, pieces in zip(rows, self.rows, self.pieces, strict=True):
            parts = torch.split(row[0], [size for _, size in pieces] or [self.lengths[index] for index in indices])
            if pieces:
                begins = sorted(range(len(pieces)), key=lambda i: pieces[i][0])
                parts = (torch.cat([parts[i] for i in begins]),)
            found.update(zip(indices, parts, strict=True))
        return [found[index] for index in range(len(self.lengths))]


def _joined(pieces: Sequence[tuple[int, int]], *documents: Tensor) -> Tensor:
    """Returns a row of documents, or of a tree in pieces, (1, tokens, ...)."""
    if pieces:
        (tree,) = documents
        documents = tuple(tree[begin : begin + size] for begin, size in pieces)
    return torch.cat(documents)[None]


def plan_step(
    lengths: Sequence[int | TreeShape] | PrefixTrees,
    cost: CostModel,
    *,
    schedule: str | Sequence[str] = ("seq1f1b", "auto"),
    unit_tokens: int | None = None,
    memory: float | None = None,
    remedies: Sequence[str] = ("recompute",),
    siblings: bool = True,
) -> StepPlan:
    """Plans a step over documents of any length, and trees.

    Tries units of a few sizes around the size that a bound prefers: long units make the pipeline's ends long, short
    units pay the engine's own time more often. The plan is the order that fits and is fastest in simulation. Equal
    arguments give equal plans, so every rank may call ``plan_step`` by itself.

    Args:
        lengths: tokens of each document; or trees; or a mix, with tokens for documents and shapes for trees:
            ``[*lengths, *trees.shapes]``.
        cost: the model on a machine, for the pipeline; rows replace the model's ``seq_len`` and documents.
        schedule: families to try, see :func:`seq1f1b.build_schedule` for families with rows. If listed with further
            families, "auto" is tried last, on the best rows, and only if memory was so short that units recompute or
            move, and if "auto" could gain more time than the search takes.
        unit_tokens: units take as long as a document of so many tokens, or less if memory is short; None: the fastest
            time by ``cost``, which is only right with a profile of the model on the machine.
        memory: bytes that a rank may hold in all; None: any number. As few units as possible recompute, or move, until
            the step fits, see :meth:`seq1f1b.Schedule.fit`.
        remedies: ways to save memory: "recompute", "offload", or both. "offload" needs a machine with a tier.
        siblings: short leaves of one parent may share a unit. False for models with a window, ALiBi or state carried
            along a row: such models need separate leaves.
    Raises:
        ValueError: no documents, an empty document, a document that is too long, or a number out of range; or no order
            fits: the message names the smallest budget.
        ScheduleError: no family can be built for the rows.
    """
    whole("unit_tokens", 1 if unit_tokens is None else unit_tokens, 1)
    if memory is not None and not memory >= 1:
        raise ValueError(f"memory is {memory}, must be at least 1 byte")
    rates = Rates.from_cost(cost)
    items, work = _items(lengths, rates)
    tokens = tuple(item.shape.tokens if isinstance(item, Tree) else item for item in items)
    nodes = sum(len(item.seconds) for item in items if isinstance(item, Tree))
    families, limit = families_named((schedule,) if isinstance(schedule, str) else schedule), memory or math.inf
    first = [each for each in families if each.name != "auto"] or families  # families tried with all rows
    if nodes and first == families_named(["auto"]):  # auto holds whole trees; nested orders hold a path
        first = families_named(["seq1f1b", "auto"])
    found: StepPlan | None = None
    least, refused = math.inf, ValueError("there is no family to plan a step with")  # bytes of the smallest order

    def consider(family: Family, price: Price, is_quick: bool = False) -> None:
        """Keeps the family's order if the order fits and is the fastest so far; as few units as possible recompute or
        move."""
        nonlocal found, least, refused
        rows = price.rows
        orders = Orders(family, [price], len(rows), limit, tuple(remedies), is_quick=is_quick, is_whole=is_quick)
        try:
            tried = [orders.within_cap()]
            if "cap_bytes" in tried[0].options and remedies:  # the cap has cost time: remedies may cost less
                tried.append(orders.with_remedies())
            for made in tried:
                if made.peak > limit and not made.schedule.kinds & {"R", "L"}:
                    made = orders.fit(made)
                least = min(least, made.peak)
                if made.peak > limit:
                    continue
                _, (run,) = orders.run(made.schedule)
                if found is None or run.makespan < found.seconds:
                    of_rows = tuple([row.indices for row in rows]), tuple([row.segment_sizes for row in rows])
                    found = StepPlan(tokens, *of_rows, made.schedule, tuple(made.ranks), run, price)
        except ScheduleError as error:
            refused = error

    best = best_unit(items, work, rates, cost.num_ranks) if unit_tokens is None else rates.of(unit_tokens)
    made, known = 0.0, set[tuple[PackedRow, ...]]()
    for scales in (_SCALES if unit_tokens is None else (1.0,), _SMALLER):
        for scale in scales:
            units = max(1, sum(work) / (scale * best)) + nodes / 2  # an estimate
            if found is not None and made + units * 2 * cost.num_stages * len(first) > _MOST_UNITS:
                continue
            made += units * 2 * cost.num_stages * len(first)
            rows = rows_of(items, work, scale * best, rates, siblings)
            if rows not in known:
                known.add(rows)
                price = cost.price_rows(rows)
                for family in first:
                    consider(family, price)
        if found is not None and not found.remedied:
            return found
    if found is None:
        if least == math.inf:
            raise refused
        longest = max(range(len(tokens)), key=tokens.__getitem__)
        raise ValueError(
            f"no order of these documents fits in {limit:,.0f} bytes a rank: the smallest budget that does is "
            f"{math.ceil(least):,} bytes; the longest document, {longest}, has {tokens[longest]} tokens"
        )
    work_of_ranks = np.bincount(found.schedule.rank_of_stage, found.costs.seconds.total.sum(1))  # in any order
    if found.seconds - work_of_ranks.max() > _SEARCH_SECONDS * 2 * cost.num_stages * len(found.costs.sizes):
        for family in families:
            if family not in first:
                consider(family, found.costs, is_quick=True)
    return found


def share_documents(
    lengths: Sequence[int | TreeShape] | PrefixTrees, num_replicas: int, cost: CostModel
) -> tuple[tuple[int, ...], ...]:
    """Shares the documents and trees of a step among data-parallel replicas, with about equal work for each replica.

    Documents with the most work come first; each document goes to the replica with the least work so far.

    Args:
        lengths: documents and trees, as in :func:`plan_step`. ``PrefixTrees.take`` takes a share.
        cost: the model on a machine.
    Returns:
        Indices of the documents of each replica, ascending.
    Raises:
        ValueError: fewer documents than replicas, or a length out of range.
    """
    whole("num_replicas", num_replicas, 1)
    rates = Rates.from_cost(cost)
    items, work = _items(lengths, rates)
    if len(items) < num_replicas:
        raise ValueError(f"{len(items)} documents are too few for {num_replicas} replicas: each needs one at least")
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    done = [0.0] * num_replicas
    for index in sorted(range(len(items)), key=lambda i: -work[i]):
        least = min(range(num_replicas), key=lambda replica: (done[replica], len(shares[replica])))
        shares[least].append(index)
        done[least] += work[index]
    return tuple(tuple(sorted(share)) for share in shares)


def _items(lengths: Sequence[int | TreeShape] | PrefixTrees, rates: Rates) -> tuple[list[int | Tree], list[float]]:
    """Returns the tokens of each document, or a tree, and the seconds of each, without the seconds per unit. A tree
    without a branch counts as a document."""
    given = lengths.shapes if isinstance(lengths, PrefixTrees) else lengths
    items = [
        Tree(document, rates) if isinstance(document, TreeShape) and not document.is_chain else tokens
        for document, tokens in zip(given, tokens_of(given), strict=True)
    ]
    return items, [sum(item.seconds) if isinstance(item, Tree) else rates.of(item) for item in items]


def padded_rows(lengths: Sequence[int], num_segments: int, model: ModelShape) -> list[PackedRow]:
    """Packs documents into rows as long as the longest document, each in ``num_segments`` segments of equal FLOPs, for
    a comparison with planned rows. Padding counts as a document."""
    longest = max(lengths)
    sizes = tuple(partition_sequence(longest, min(num_segments, longest), model=model))
    rows = []
    for packed in pack_documents(lengths, longest).rows:
        documents = [lengths[index] for index in packed]
        padding = longest - sum(documents)
        rows.append(PackedRow((*documents, padding) if padding else tuple(documents), sizes))
    return rows
