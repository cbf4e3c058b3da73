"""Candidates of a search: ways to train on a machine, with prices of units, orders and seconds, and their plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import BuiltOrder, Orders
from seq1f1b.planning.result import Uncertain
from seq1f1b.schedule import Family

__all__ = ["Candidate", "Length", "Rated", "group_lengths", "mean_of"]

_MOST_LENGTHS = 8  # groups of lengths; sequences are padded to the longest of a group
_UNCERTAIN_BYTES = ("activation_factor", "allocator_reserve", "context_bytes")


class Candidate(NamedTuple):
    family: Family
    stages_per_rank: int
    num_segments: int
    mix: float
    inside: str  # recomputation inside of blocks, of Layout
    balance: int  # sequence length at which all stages, head included, take equal time; 0: equal numbers of layers
    remedies: tuple[str, ...] = ()  # members of REMEDIES: single units recompute or move until the order fits
    vocabulary: str = "ends"  # Layout's field

    def __str__(self) -> str:
        return f"{self.family.name} with {self.counts}"

    @property
    def counts(self) -> str:
        """Text of the candidate without the family's name."""
        said = [f"k {self.num_segments}", f"v {self.stages_per_rank}", f"inside {self.inside}"]
        if self.vocabulary == "ranks":
            said.append("vocabulary over the ranks")
        return ", ".join(said + [f"{remedy} by units" for remedy in self.remedies])

    @property
    def is_searched(self) -> bool:
        """Whether the search for the order includes the choice of remedies."""
        return bool(self.remedies) and "cap_bytes" in self.family.options


class Length(NamedTuple):
    """Steps of one length: padded length, share of all steps, mean tokens of a sequence before padding."""

    seq_len: int
    share: float
    tokens: float


def group_lengths(seq_len: int | None, lengths: Mapping[int, int] | None, layout: Layout | None) -> list[Length]:
    """Returns the lengths, ascending, in at most ``_MOST_LENGTHS`` groups of about equal numbers of tokens."""
    if (seq_len is None) == (lengths is None):
        raise ValueError("give seq_len, or lengths where sequences differ: one of the two")
    if lengths is None:
        lengths = {seq_len or 0: 1}
    elif layout is not None and layout.documents is not None:
        raise ValueError("documents are packed into sequences of one length: give seq_len, not lengths")
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"{'seq_len' if seq_len is not None else 'a length'} is {min(lengths, default=0)}, must be at least 1"
        )
    if min(lengths.values()) < 1:
        raise ValueError(f"a length has {min(lengths.values())} sequences, must have at least 1")
    total, before = sum(length * count for length, count in lengths.items()), 0
    groups: dict[int, list[tuple[int, int]]] = {}
    for number, (length, count) in enumerate(sorted(lengths.items())):
        group = number if len(lengths) <= _MOST_LENGTHS else _MOST_LENGTHS * before // total
        groups.setdefault(group, []).append((length, count))
        before += length * count
    grouped = []
    for members in groups.values():
        sequences = sum(count for _, count in members)
        tokens = sum(length * count for length, count in members)
        grouped.append(Length(members[-1][0], sequences / sum(lengths.values()), tokens / sequences))
    return grouped


def mean_of(lengths: Sequence[Length], values: Iterable[float]) -> float:
    """Returns the mean over the steps of values given for each length."""
    return sum([each.share * value for each, value in zip(lengths, values, strict=True)])


@dataclass(eq=False)
class Rated:
    """Candidate with the search's results so far.

    Attributes:
        lengths: lengths of the sequences, ascending.
        orders: prices of the units for each length, the longest last, and orders for the units.
        bounds: lower bound of the seconds of every order of the units, for each length; ``bound``: mean over the steps.
        units: number of F and B of all ranks.
        made: the order; if no order fits, the order with the least memory; None before an order was built.
        periods: period of the step of each length; ``seconds``: mean period; inf if the order does not fit.
        bubble: share of ``seconds`` in which ranks neither compute nor update.
        sort_key: key that sorts by time, and by memory where times differ by less than about 0.2 %.
        least: bytes of the order with the least memory if no order fits, else 0.
    """

    candidate: Candidate
    lengths: Sequence[Length]
    orders: Orders
    bounds: Sequence[float]
    bound: float
    units: int
    made: BuiltOrder | None = None
    periods: Sequence[float] = ()
    seconds: float = math.inf
    bubble: float = 0.0
    sort_key: tuple[int, int] = (0, 0)
    least: int = 0

    @property
    def built(self) -> BuiltOrder:
        """The order of a candidate that has one."""
        assert self.made is not None
        return self.made

    def is_alike(self, other: Rated) -> bool:
        """Returns whether the two candidates differ only in the split, or only in the family's name."""
        mine, its = self.candidate, other.candidate._replace(mix=self.candidate.mix)
        if mine == its:
            return True
        counts = mine._replace(family=its.family, remedies=its.remedies)
        return counts == its and self.built.schedule == other.built.schedule

    def uncertain(self, hardware: Hardware) -> tuple[Uncertain, ...]:
        """Returns the machine's uncertain numbers that change the step, largest change first, each varied alone."""
        schedule, orders = self.built.schedule, self.orders
        seconds = orders.seconds(schedule)

        def change(name: str, end: float) -> float:
            """Returns by how many seconds the step takes longer if the named number has the value ``end``."""
            changed: dict[str, Any] = {name: end}
            machine = replace(hardware, **changed)
            prices = [price.cost.on(machine).price(price.sizes) for price in orders.prices]
            return orders._replace(prices=prices).seconds(schedule) - seconds

        terms = []
        for name, (low, high) in hardware.spread.items():
            if name in _UNCERTAIN_BYTES and "L" not in schedule.kinds:  # the seconds of moves alone depend on bytes
                continue
            moved = change(name, low), change(name, high)
            if any(moved):
                terms.append(Uncertain(name, low, high, *moved))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    def plan(self, hardware: Hardware, faster: float, slower: float) -> Plan:
        """Returns the plan of a candidate with an order.

        faster, slower: shares of the seconds by which a step may be faster, and slower.
        """
        candidate, orders, made = self.candidate, self.orders, self.built
        spread, price, cost = hardware.spread, orders.price, orders.price.cost
        ends: dict[str, Any] = {name: spread[name][1] for name in _UNCERTAIN_BYTES if name in spread}
        high = cost.on(replace(hardware, **ends)).price(price.sizes).rank_bytes(made.schedule)
        sequences = orders.num_microbatches * cost.layout.data
        lengths = [
            StepLength(
                **each._asdict(),
                segment_sizes=tuple(price.sizes),
                seconds=period,
                tokens_per_second=sequences * each.tokens / period,
                peak=tuple([rank.total for rank in price.rank_bytes(made.schedule)]),
            )
            for each, price, period in zip(self.lengths, orders.prices, self.periods, strict=True)
        ]
        return Plan(
            model=cost.model,
            hardware=hardware.name,
            seq_len=cost.seq_len,
            layout=replace(cost.layout, layers=cost.layers),
            schedule=candidate.family.name,
            num_ranks=cost.num_ranks,
            num_microbatches=orders.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            segment_sizes=lengths[-1].segment_sizes,
            mix=candidate.mix,
            seconds=self.seconds,
            low=max(0.0, (1 - faster) * self.seconds),
            high=(1 + slower) * self.seconds,
            bubble=self.bubble,
            tokens_per_second=sequences * mean_of(self.lengths, [each.tokens for each in self.lengths]) / self.seconds,
            peak=tuple([rank.total for rank in made.ranks]),
            peak_high=tuple([rank.total for rank in high]),
            cap=int(orders.cap),
            optimizer_sync=orders.steps["optimizer_sync"],
            options=_lists(made.options),
            prefetch=made.schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=made.schedule.cell_kinds() if made.schedule.kinds & {"R", "L"} else (),
            spread=_lists(price._spread_seconds),
        )


def _lists(value: Any) -> Any:
    """Returns arrays, also those within lists and dicts, as lists of numbers."""
    if isinstance(value, dict):
        return {name: _lists(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_lists, value))
    return value.tolist() if hasattr(value, "tolist") else value
