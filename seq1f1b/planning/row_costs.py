"""Costs of the units of a step of rows: micro-batches of their own documents, lengths and segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from seq1f1b import _C
from seq1f1b.ops.packing import pack_documents
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.planning.cost import CostModel, RankBytes, Span, UnitSeconds
from seq1f1b.planning.profile import pairs_of
from seq1f1b.planning.unit_costs import UnitCosts
from seq1f1b.schedule import Costs, Links, Schedule, StepMemory

__all__ = ["Row", "RowCosts", "padded_rows", "spans_of"]

T = TypeVar("T")


class Row(NamedTuple):
    """One micro-batch of a step.

    Attributes:
        documents: tokens of each of its documents, in their order.
        sizes: tokens of each of its segments.
    """

    documents: tuple[int, ...]
    sizes: tuple[int, ...]


class RowCosts(UnitCosts):
    """Seconds and bytes of the units of a step of rows, as an order of them takes both.

    Args:
        cost: of the model; its own length and documents do not count.
        rows: of the step.
    Raises:
        ValueError: the layout copies prefixes.
    """

    def __init__(self, cost: CostModel, rows: Sequence[Row]) -> None:
        if cost.layout.copies_prefix:
            raise ValueError("rows of a step share a cache: the layout copies prefixes")
        self.cost, self._counts = cost, [len(row.sizes) for row in rows]
        self._sizes = [size for row in rows for size in row.sizes]
        self.rows = rows
        self._slot_tokens = sum(self.longest)

    @cached_property
    def seconds(self) -> Any:
        known: dict[Span, int] = {}
        places = [known.setdefault(span, len(known)) for row in self.rows for span in spans_of(row)]
        found = self.cost.seconds_of(list(known))
        each: dict[int, list[list[float]]] = {}  # equal stages are one list: it is spread once
        nested: list[Any] = [[self._spread(row, places, each) for row in table] for table in found]
        return UnitSeconds(*nested)

    def _spread(self, values: list[float], places: list[int], each: dict[int, list[list[float]]]) -> list[list[float]]:
        spread = each.get(id(values))
        if spread is None:
            spread = each[id(values)] = self._nest([values[place] for place in places])
        return spread

    def _nest(self, values: Sequence[T]) -> list[list[T]]:
        """Values of all segments, one after the other, by row."""
        ends = list(accumulate(self._counts))
        return [list(values[end - count : end]) for count, end in zip(self._counts, ends, strict=True)]

    @property
    def longest(self) -> list[int]:
        return list(max((row.sizes for row in self.rows), key=sum))

    @property
    def imbalance(self) -> float:
        """By how much F and B of the longest unit take longer than the mean of all units', over all stages."""
        tables = (*self.seconds.forward, *self.seconds.backward)
        units = list(map(sum, zip(*([unit for row in stage for unit in row] for stage in tables), strict=True)))
        return float(max(units) * len(units) / sum(units) - 1.0)

    def memory(self, schedule: Schedule) -> StepMemory:
        flat: Any = self.cost.unit_memory(self._sizes, schedule.rank_of_stage, self._slot_tokens)
        tables = {row.name: getattr(flat, row.name) for row in _C.HOLDINGS if row.per == _C.PER_CELL}
        nested: dict[str, Any] = {name: [self._nest(row) for row in table] for name, table in tables.items() if table}
        return StepMemory(**nested)

    @property
    def message_bytes(self) -> list[Any]:
        return self._nest(self.cost.message_bytes(self._sizes))

    def held_bytes(self) -> list[Any]:
        first = [end - count for end, count in zip(accumulate(self._counts), self._counts, strict=True)]
        return [self._nest(row) for row in self.cost.held_bytes(self._sizes, first, self._slot_tokens)]

    def microbatches(self, row: list[Any]) -> list[list[Any]]:
        return row

    def costs(self, schedule: Schedule, *, moves: bool = False) -> Costs:
        """Without the optimizer."""
        latencies, rates = self.cost.links(schedule.rank_of_stage)
        tables = self.cost.moving_seconds(self._sizes) if moves else {}
        moving: dict[str, Any] = {name: [self._nest(row) for row in table] for name, table in tables.items()}
        links = Links(latencies, rates, message_bytes=self.message_bytes)
        return Costs(**self.seconds._asdict(), **moving, links=links)

    def rank_bytes(self, schedule: Schedule) -> list[RankBytes]:
        """Slots of the cache are as long as the longest row."""
        longest = max(self._sizes)
        return self.cost.rank_bytes_of(schedule, self.memory(schedule), self.message_bytes, longest, self._slot_tokens)


def padded_rows(lengths: Sequence[int], num_segments: int, model: ModelShape) -> list[Row]:
    """The documents packed into rows of the longest one, in so many segments of equal FLOPs each: what planned rows are
    compared with. Padding is a document."""
    longest = max(lengths)
    sizes = tuple(partition_sequence(longest, min(num_segments, longest), model=model))
    rows = []
    for packed in pack_documents(lengths, longest).rows:
        documents = [lengths[index] for index in packed]
        padding = longest - sum(documents)
        rows.append(Row((*documents, padding) if padding else tuple(documents), sizes))
    return rows


def spans_of(row: Row) -> list[Span]:
    """The segments of a row."""
    spans, begin = [], 0
    for size in row.sizes:
        end = begin + size
        spans.append(Span(size, pairs_of(row.documents, begin, end), end))
        begin = end
    return spans
