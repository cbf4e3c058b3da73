"""A plan for one step over documents of any length: rows, their segments, the order, and what of it is recomputed.

A row is a micro-batch. A document that takes more time than one unit should has a row to itself, cut into segments of
equal time; the last of them may share its row with short documents, which fill it up. The other short documents are
packed into rows of one segment, by time and not by length. So all units take about the same time, whatever the lengths.
[ChunkFlow, arXiv:2503.02356: one size for packed and for split sequences, and K of them kept; InfiniPipe,
arXiv:2509.21275: packing and splitting mixed]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import ScheduleError
from seq1f1b.ops.packing import best_fit, pack_documents
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.planning.cost import CostModel, PackedRow, Price, RankBytes
from seq1f1b.planning.fitting import LEVELS, Made, fit_under, order_for_costs, order_with_remedies
from seq1f1b.schedule import Schedule, Simulation, build_schedule
from seq1f1b.schedule import families as known_families
from seq1f1b.seconds import Span, seconds_of

__all__ = ["StepPlan", "plan_step", "share_documents"]

_MOST_TOKENS = 1 << 40  # of a document, as of a sequence
_STRETCH = 0.05  # a unit may take so much longer than the others, rather than leave a small rest
_PARTS = 1 << 20  # of a unit's time, as packing counts it
_SCALES = (1.0, 2**-0.5, 2**0.5, 0.5, 2.0)  # units tried, of the time that the bound prefers
_SMALLER = (0.35, 0.25, 0.125, 0.0625)  # tried, too, where memory is short
_SEARCH_SECONDS = 4e-5  # of a unit: a quarter of what the search for an order takes, on a thread beside the step before
_MOST_UNITS = 12_000  # of all ranks in all orders that one call builds, beyond the first


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step, from :func:`plan_step`: ``engine.step(..., plan=plan)`` runs it.

    Attributes:
        lengths: tokens of each document.
        rows: indices of the documents of each row, in their order.
        segment_sizes: for each row the tokens of its segments.
        schedule: the order of the step; units that it recomputes or moves have an R, or O, A and L.
        ranks: predicted bytes of every rank at its peak.
        simulation: of the step, without the optimizer.
        costs: what the units were taken to cost.
    """

    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    segment_sizes: tuple[tuple[int, ...], ...]
    schedule: Schedule
    ranks: tuple[RankBytes, ...]
    simulation: Simulation = field(compare=False, repr=False)
    costs: Price = field(compare=False, repr=False)

    @property
    def parents(self) -> None:
        """Each segment follows the one before it."""

    @property
    def seconds(self) -> float:
        """The step's predicted time, without the optimizer."""
        return self.simulation.makespan

    @property
    def remedied(self) -> int:
        """How many units are recomputed, or moved, of all stages."""
        return sum(row.count("R") + row.count("L") for row in self.schedule.cell_kinds())

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans alone. A step compares those of all ranks."""
        order = self.schedule
        text = f"{self.rows} {self.segment_sizes} {order.digest} {order._places_text} {order.fills}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def imbalance(self) -> float:
        """By how much F and B of the longest unit take longer than the mean of all units', over all stages."""
        return self.costs.imbalance

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
    cost: CostModel,
    *,
    schedule: str | Sequence[str] = ("seq1f1b", "auto"),
    unit_tokens: int | None = None,
    segment_tokens: int | None = None,
    memory: float | None = None,
    remedies: Sequence[str] = ("recompute",),
    prefetch: int | None = None,
) -> StepPlan:
    """Plans a step over documents of any length.

    Tries units of a few sizes around the one that a bound prefers: long units make the pipeline's ends long, short ones
    cost the engine's own time more often. The order that is fastest in simulation, of those that fit, is the plan. The
    same arguments give the same plan, so every rank may make it by itself.

    Args:
        lengths: tokens of each document.
        cost: of the model on a machine, for this pipeline; its own ``seq_len`` and documents do not count.
        schedule: families that are tried, of those that take rows, see :func:`seq1f1b.build_schedule`. Beside others,
            "auto" is tried last, with the rows that were best, where memory was so short that units had to give way,
            and where it could gain more than the search for it takes.
        unit_tokens: units take as long as a document of so many tokens, or less where memory is short; None: what is
            fastest by ``cost``, which takes a profile of the model on the machine to be true.
        segment_tokens: tokens of a segment at most; None: any number.
        memory: bytes that a rank may hold in all; None: any number. Units are recomputed, or moved, until the step
            fits, as few of them as possible, see :meth:`seq1f1b.Schedule.fit`.
        remedies: which of both: "recompute", "offload". The latter needs a machine with a tier.
        prefetch: receive places of the order, see :meth:`seq1f1b.Schedule.replace`.
    Raises:
        ValueError: there is no document, one is empty or too long, or a number is out of range; nothing fits: names the
            smallest budget.
        ScheduleError: no family can be built for these rows.
    """
    _check(lengths, unit_tokens, segment_tokens, memory)
    rates = _rates(cost)
    work = [rates.of(length) for length in lengths]
    families = (schedule,) if isinstance(schedule, str) else tuple(schedule)
    limit = math.inf if memory is None else memory
    search = _Search(lengths, work, cost, families, limit, tuple(remedies), prefetch)
    best = rates.best_unit(sum(work), cost.num_ranks) if unit_tokens is None else rates.of(unit_tokens)
    made, tried = 0.0, set()
    for scales in (_SCALES if unit_tokens is None else (1.0,), _SMALLER):
        for scale in scales:
            most = max(1, sum(work) / (scale * best)) * 2 * cost.num_stages * len(search.first)  # units, about
            if search.found is not None and made + most > _MOST_UNITS:
                continue
            made += most
            rows = _rows_of(lengths, work, scale * best, segment_tokens or _MOST_TOKENS, rates)
            if rows not in tried:
                tried.add(rows)
                search.consider(rows)
        if search.found is not None and not search.found.remedied:
            break
    search.finish()
    if search.found is None:
        raise search.nothing_fits()
    return search.found


def share_documents(lengths: Sequence[int], num_replicas: int, cost: CostModel) -> tuple[tuple[int, ...], ...]:
    """Shares the documents of a step among data-parallel replicas, so that their work is about equal.

    The most work first, each document to the replica that has the least.

    Args:
        lengths: tokens of each document.
        cost: of the model on a machine.
    Returns:
        Indices of the documents of each replica, ascending.
    Raises:
        ValueError: there are fewer documents than replicas, or a length is out of range.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}, must be at least 1")
    _check(lengths)
    if len(lengths) < num_replicas:
        raise ValueError(f"{len(lengths)} documents are too few for {num_replicas} replicas: each needs one at least")
    rates = _rates(cost)
    work = [rates.of(length) for length in lengths]
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    done = [0.0] * num_replicas
    for index in sorted(range(len(lengths)), key=lambda i: -work[i]):
        least = min(range(num_replicas), key=lambda replica: (done[replica], len(shares[replica])))
        shares[least].append(index)
        done[least] += work[index]
    return tuple(tuple(sorted(share)) for share in shares)


def _check(
    lengths: Sequence[int],
    unit_tokens: int | None = None,
    segment_tokens: int | None = None,
    memory: float | None = None,
) -> None:
    for name, value in (("unit_tokens", unit_tokens), ("segment_tokens", segment_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    if memory is not None and not memory >= 1:
        raise ValueError(f"memory is {memory}, must be at least 1 byte")
    if not lengths:
        raise ValueError("there are no documents to plan a step of")
    for index, length in enumerate(lengths):
        if not isinstance(length, int):
            raise TypeError(f"document {index} has {length!r} tokens, must be a whole number")
        if not 1 <= length <= _MOST_TOKENS:
            raise ValueError(f"document {index} has {length} tokens, must have 1 to {_MOST_TOKENS}")


class _Rates(NamedTuple):
    """Seconds of F and B together on the mean stage: of a token, of a pair of tokens that attend, of a unit itself."""

    token: float
    pair: float
    unit: float

    def of(self, tokens: int) -> float:
        """A whole document, without the unit's own."""
        return self.token * tokens + self.pair * tokens * (tokens + 1) / 2

    def position(self, seconds: float) -> float:
        """The token of a document up to which it takes so long."""
        b = self.token + self.pair / 2
        return 2 * seconds / (b + math.sqrt(b * b + 2 * self.pair * seconds))

    def best_unit(self, work: float, num_ranks: int) -> float:
        """The time of a unit for the shortest step, if rows could be cut anywhere.

        Units of u seconds make a step of work + work / u * unit + (num_ranks - 1) (u + unit), least at the root.
        """
        return math.sqrt(work * self.unit / max(1, num_ranks - 1))


def _rates(cost: CostModel) -> _Rates:
    """From units so large that no floor of theirs counts."""
    tokens, pairs = 1 << 20, 1 << 30
    spans = [Span(tokens, 0, tokens), Span(2 * tokens, 0, tokens), Span(tokens, pairs, tokens)]
    found = seconds_of(cost.source, spans)
    once, twice, attending = (
        sum(f[i] + b[i] for f, b in zip(found.forward, found.backward, strict=True)) / cost.num_stages for i in range(3)
    )
    return _Rates((twice - once) / tokens, (attending - once) / pairs, max(2 * once - twice, 1e-9))


_Rows = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""For each row, the indices of its documents and the tokens of its segments."""


def _rows_of(lengths: Sequence[int], work: Sequence[float], unit: float, most: int, rates: _Rates) -> _Rows:
    """Rows whose units take about so long, and hold so many tokens at most; those with the most work first."""

    parts = [max(seconds / unit, length / most) for seconds, length in zip(work, lengths, strict=True)]  # of a unit
    long = [index for index, share in enumerate(parts) if share > 1]
    short = [index for index, share in enumerate(parts) if share <= 1]
    counts = [max(1, math.ceil(work[i] / unit - _STRETCH), -(-lengths[i] // most)) for i in long]
    taken = [min(_PARTS, math.ceil((parts[i] - count + 1) * _PARTS)) for i, count in zip(long, counts, strict=True)]
    rows = []
    for place, bin_ in enumerate(best_fit([math.ceil(parts[i] * _PARTS) for i in short], _PARTS, taken)):
        documents, count = [short[i] for i in bin_], 1
        if place < len(long):
            documents, count = [long[place], *documents], counts[place]
        rows.append((tuple(documents), _cut([lengths[i] for i in documents], count, most, rates)))
    totals = {row: sum(work[i] for i in row[0]) for row in rows}
    return tuple(sorted(rows, key=lambda row: (-len(row[1]), -totals[row])))


def _cut(documents: Sequence[int], count: int, most: int, rates: _Rates) -> tuple[int, ...]:
    """Tokens of the segments of a row, of which the first document may be a long one: of equal time, at most so many
    tokens each."""
    tokens = sum(documents)
    if count == 1 and tokens <= most:
        return (tokens,)
    share = sum(map(rates.of, documents)) / count
    ends = [min(documents[0], round(rates.position(share * i))) for i in range(1, count)]
    sizes = [end - begin for begin, end in zip([0, *ends], [*ends, tokens], strict=True)]
    if min(sizes) < 1 or max(sizes) > most:
        return _cut(documents, count + 1, most, rates) if count < tokens else (1,) * tokens
    return tuple(sizes)


class _Search:
    """Builds orders of rows, and keeps the fastest that fits."""

    def __init__(
        self,
        lengths: Sequence[int],
        work: Sequence[float],
        cost: CostModel,
        families: Sequence[str],
        memory: float,
        remedies: Sequence[str],
        prefetch: int | None,
    ) -> None:
        self._lengths, self._work, self._cost = tuple(lengths), work, cost
        self.first = tuple(name for name in families if name != "auto") or families  # tried with all rows
        self._last = tuple(name for name in families if name not in self.first)
        self._memory, self._remedies, self._prefetch = memory, remedies, prefetch
        self._least: float | None = None  # bytes that some order needs
        self._refused: ScheduleError | None = None
        self.found: StepPlan | None = None

    def consider(self, rows: _Rows) -> None:
        """Takes these rows if they make a faster step than those before, and fit."""
        costs = self._cost.price_rows(
            [PackedRow(tuple(self._lengths[i] for i in documents), sizes) for documents, sizes in rows]
        )
        for name in self.first:
            self._try(name, rows, costs)

    def finish(self) -> None:
        """Tries ``auto`` where the best order has units that give way, if it could gain more than the search takes."""
        found = self.found
        if found is None or not found.remedied:
            return
        ranks = [0.0] * self._cost.num_ranks  # what each has to do in any order
        for stage, rank in enumerate(found.schedule.rank_of_stage):
            ranks[rank] += sum(map(sum, found.costs.seconds.forward[stage] + found.costs.seconds.backward[stage]))
        units = 2 * self._cost.num_stages * sum(map(len, found.segment_sizes))
        if found.seconds - max(ranks) > _SEARCH_SECONDS * units:
            for name in self._last:
                self._try(name, tuple(zip(found.rows, found.segment_sizes, strict=True)), found.costs, is_quick=True)

    def _try(self, name: str, rows: _Rows, costs: Price, *, is_quick: bool = False) -> None:
        try:
            orders = self._orders(name, costs, is_quick)
        except ScheduleError as error:
            self._refused = error
            return
        for order, ranks in orders:
            peak = max(rank.total for rank in ranks)
            self._least = peak if self._least is None else min(self._least, peak)
            if peak > self._memory:
                continue
            simulation = self._simulate(order, costs)
            if self.found is None or simulation.makespan < self.found.seconds:
                documents, sizes = zip(*rows, strict=True)
                self.found = StepPlan(self._lengths, documents, sizes, order, tuple(ranks), simulation, costs)

    def _simulate(self, order: Schedule, costs: Price) -> Simulation:
        moves = "offload" in self._remedies and "L" in order.kinds
        return order.simulate(costs.costs(order, moves=moves))

    def _orders(self, name: str, costs: Price, is_quick: bool) -> list[tuple[Schedule, list[RankBytes]]]:
        """Orders of a family, each with its bytes: with as few units recomputed or moved as fit."""
        family = next((each for each in known_families() if each.name == name), None)

        def build(options: dict[str, Any]) -> Schedule:
            return build_schedule(
                name,
                num_ranks=self._cost.num_ranks,
                num_microbatches=len(costs.message_bytes),
                num_segments=[len(row) for row in costs.message_bytes],
                stages_per_rank=self._cost.num_stages // self._cost.num_ranks,
                options=options or None,
                prefetch=self._prefetch,
            )

        def fit(made: Made) -> Made:
            order = fit_under(self._memory, made.schedule, made.ranks, costs, self._remedies)
            return made._replace(schedule=order, ranks=costs.rank_bytes(order))

        def seconds(order: Schedule) -> float:
            return self._simulate(order, costs).makespan

        if family is None or "costs" not in family.options:
            order = build({})
            made = [Made(order, {}, costs.rank_bytes(order))]
        else:
            made = [order_for_costs(family, costs, self._memory, build, seconds, is_quick)]
            if "cap_bytes" in made[0].options and self._remedies:  # it gave up time for room
                way: dict[str, Any] = {"levels": LEVELS[:1] if is_quick else LEVELS, "is_whole": is_quick}
                made.append(order_with_remedies(family, costs, self._memory, build, fit, seconds, **way))
        made = [each if each.peak <= self._memory or each.schedule.kinds & {"R", "L"} else fit(each) for each in made]
        return [(each.schedule, each.ranks) for each in made]

    def nothing_fits(self) -> Exception:
        """The error where no order was found."""
        if self._least is None:
            return self._refused or ValueError("there is no family to plan a step with")
        longest = max(range(len(self._lengths)), key=self._lengths.__getitem__)
        return ValueError(
            f"no order of these documents fits in {self._memory:,.0f} bytes a rank: the smallest budget that does is "
            f"{math.ceil(self._least):,} bytes; the longest document, {longest}, has {self._lengths[longest]} tokens"
        )


def padded_rows(lengths: Sequence[int], num_segments: int, model: ModelShape) -> list[PackedRow]:
    """The documents packed into rows of the longest one, in so many segments of equal FLOPs each: what planned rows are
    compared with. Padding is a document."""
    longest = max(lengths)
    sizes = tuple(partition_sequence(longest, min(num_segments, longest), model=model))
    rows = []
    for packed in pack_documents(lengths, longest).rows:
        documents = [lengths[index] for index in packed]
        padding = longest - sum(documents)
        rows.append(PackedRow((*documents, padding) if padding else tuple(documents), sizes))
    return rows
