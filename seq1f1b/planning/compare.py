"""Families side by side: equal ranks, micro-batches and work; what each takes in time, memory and messages."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from seq1f1b.files import nearest_name
from seq1f1b.partition import ModelShape, check_segment_sizes
from seq1f1b.plan import Layout
from seq1f1b.planning.case import STEPS
from seq1f1b.planning.cost import CostModel, Price
from seq1f1b.planning.fitting import order_for_costs
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.layout import INSIDE
from seq1f1b.schedule import (
    Costs,
    Family,
    Links,
    Schedule,
    Simulation,
    StepMemory,
    build_schedule,
    families,
)
from seq1f1b.table import rounded, table_text

__all__ = ["Comparison", "FamilyRow", "compare"]


@dataclass(frozen=True)
class FamilyRow:
    """One family at its counts. Times in seconds; span and peaks are those of the worst rank.

    Attributes:
        stages_per_rank, num_segments: as it was built; 1 segment where the family cuts none.
        makespan: first start to last end over all ranks.
        span: first start to last end of one rank.
        period: time per step over several steps where ranks do not wait for each other between steps.
        bubble_ratio: share of the ranks' time within the makespan that is bubble.
        peak_units: (stage, segment) units live at once.
        peak_microbatches: the same as activations of whole micro-batches of a rank.
        peak_tokens: the same in tokens of one stage, where the segments' sizes were given.
        peak_bytes: activation bytes, where the bytes of a token were given too; of a model all bytes of a device.
        messages: activations and gradients that pass between ranks in a step.
        sent_bytes: bytes of these, where the bytes of a token's message were given.
    """

    family: str
    stages_per_rank: int
    num_segments: int
    makespan: float
    span: float
    period: float
    bubble_ratio: float
    peak_units: int
    peak_microbatches: float
    peak_tokens: int | None
    peak_bytes: int | None
    messages: int
    sent_bytes: int | None


@dataclass(frozen=True)
class Comparison:
    """Families side by side.

    Attributes:
        rows: families that fit, fastest first.
        refused: the rule that each of the others breaks.
        device: of a model, whose times are good for three digits: the machine's name and the bytes of its memory.
    """

    rows: tuple[FamilyRow, ...]
    refused: dict[str, str] = field(default_factory=dict)
    device: tuple[str, float] | None = None

    def to_json(self) -> str:
        """Rows in order, and what is refused."""
        return json.dumps({"rows": [asdict(row) for row in self.rows], "refused": self.refused}, indent=1)

    def to_text(self) -> str:
        """A table, one line per family, and below it those that are left out."""
        head = ("family", "v", "k", "makespan", "period", "bubble", "units", "held", "tokens")
        held, sent = (_unit(most) for most in (self._most("peak_bytes"), self._most("sent_bytes")))
        rows = [self._line(row, held[1], sent[1]) for row in self.rows]
        table = table_text([(*head, held[0], "sends", f"sent {sent[0]}"), *rows])
        last = held[0] if self._most("peak_bytes") else "held"
        lines = ["", "v: stages per rank; k: segments; held: activations in micro-batches;"]
        lines.append(f"units to {last}: the most that a rank holds at once")
        if self.device is not None:
            name, memory = self.device
            above = sum(row.peak_bytes is not None and row.peak_bytes > memory for row in self.rows)
            if above:
                lines.append(f"{above} of {len(rows)} hold more than the {memory / 2**30:.1f} GiB of {name}")
        if self.refused:
            widest = max(map(len, self.refused))
            lines += ["", "left out:", *(f"{name:<{widest}}  {rule}" for name, rule in self.refused.items())]
        return table + "".join(line + "\n" for line in lines)

    def _most(self, field: str) -> int:
        return max((getattr(row, field) or 0 for row in self.rows), default=0)

    def _line(self, row: FamilyRow, held: int, sent: int) -> tuple[str, ...]:
        seconds = "{:.6g}".format if self.device is None else rounded
        is_period_another = any(abs(each.period / each.makespan - 1) > 0.01 for each in self.rows)
        return (
            row.family,
            str(row.stages_per_rank),
            str(row.num_segments),
            seconds(row.makespan),
            seconds(row.period) if is_period_another else "",
            f"{row.bubble_ratio:.1%}",
            str(row.peak_units),
            f"{row.peak_microbatches:.2f}",
            "" if row.peak_tokens is None or self.device is not None else str(row.peak_tokens),
            "" if row.peak_bytes is None else f"{row.peak_bytes / held:.1f}",
            str(row.messages),
            "" if row.sent_bytes is None else f"{row.sent_bytes / sent:.1f}",
        )


def _unit(most: int) -> tuple[str, int]:
    """In which a column of bytes has at most four digits before the point."""
    return ("MiB", 2**20) if most < 10_000 * 2**20 else ("GiB", 2**30)


def _bytes(count: int | None) -> str:
    """Rounded up, so that the least possible fits as a cap."""
    count = count or 0
    name, unit = _unit(count)
    return f"{count} bytes" if count < 2**20 else f"{-(-10 * count // unit) / 10:.1f} {name}"


def compare(
    names: Sequence[str] = (),
    *,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int = 1,
    stages_per_rank: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    transfer: float = 0.0,
    bandwidth: float | None = None,
    segment_sizes: Sequence[int] | None = None,
    token_bytes: int | None = None,
    message_bytes: int | None = None,
    model: ModelShape | None = None,
    hardware: Hardware | None = None,
    layout: Layout | None = None,
    seq_len: int | None = None,
    cap_microbatches: float | None = None,
    cap_bytes: int | None = None,
) -> Comparison:
    """Builds and simulates families over the same work.

    The work of a rank per micro-batch is the same for all: its stages and the segments share it equally, or cost what
    a model costs on a machine. A family that cuts no segments runs whole micro-batches; one that cannot have
    ``stages_per_rank`` has the fewest that it can. Families that time their W by costs are given them, and ``auto`` the
    cap, too, the tighter one of two.

    Args:
        names: families; none: all.
        num_ranks, num_microbatches, num_segments: P, M, k.
        stages_per_rank: v; None: each family's fewest.
        forward, backward, weight: seconds of one rank for a micro-batch; ``weight`` is the part of ``backward`` that a
            split backward puts off (None: half).
        transfer, bandwidth: of a message, as in :meth:`seq1f1b.Schedule.simulate`.
        segment_sizes: tokens of each segment.
        token_bytes: activation bytes that a token keeps on a rank, over all of its stages; needs ``segment_sizes``.
        message_bytes: bytes of a token between two stages; needs ``segment_sizes``.
        model, hardware, layout, seq_len: in place of all those: costs, messages and bytes of
            :class:`seq1f1b.planning.cost.CostModel`, in segments of equal time unless ``segment_sizes`` are given.
            ``peak_bytes`` and ``cap_bytes`` are then all bytes of a device, as in ``seq1f1b.planning.search``.
        cap_microbatches, cap_bytes: most activations that a rank may hold, in whole micro-batches of its own, in bytes.
    Raises:
        ValueError: unknown name, a number out of range, a size that is missing, a model without the rest of its four
            arguments or beside token bytes; or no family is left, which names the least cap that one fits.
    """
    work = _Work(num_ranks, num_microbatches, num_segments, segment_sizes, cap_microbatches, cap_bytes)
    work.check()
    costs: _GivenCosts | _ModelCosts
    if model is None:
        costs = _GivenCosts(work, forward, backward, weight, transfer, bandwidth, token_bytes, message_bytes)
    else:
        if hardware is None or seq_len is None:
            raise ValueError("a model's costs need hardware and seq_len")
        if token_bytes is not None or message_bytes is not None or bandwidth is not None:
            raise ValueError("token_bytes, message_bytes and bandwidth are the model's, where a model is given")
        costs = _ModelCosts(work, model, hardware, layout or Layout(), seq_len)
    costs.check()
    rows, refused = [], {}
    for family in families_named(dict.fromkeys(names)):
        found = _build(family, work, stages_per_rank, costs)
        if isinstance(found, str):
            refused[family.name] = f"needs {found}"
        else:
            rows.append(_row(family.name, found, work, costs))
    fitting = [row for row in rows if work.excess(row) is None]
    refused |= {row.family: why for row in rows if (why := work.excess(row)) is not None}
    if not fitting:
        with_less = []
        if isinstance(costs, _ModelCosts) and rows and cap_bytes is not None:
            [(_, least), *with_less] = _least_rows(costs, names, stages_per_rank)
            rows = [least]
        raise ValueError(_nothing_fits(rows, refused, cap_bytes, with_less))
    fitting.sort(key=lambda row: (row.makespan, row.peak_microbatches))
    device = None if model is None or hardware is None else (hardware.name, hardware.memory)
    return Comparison(tuple(fitting), refused, device)


def families_named(names: Collection[str]) -> list[Family]:
    """The families of these names; all where none is named."""
    known = {family.name: family for family in families()}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no schedule named {name!r}{nearest_name(name, known)}")
    return [known[name] for name in names] or list(known.values())


@dataclass(frozen=True)
class _Work:
    """The work that every family does, and the caps that it has to keep."""

    num_ranks: int
    num_microbatches: int
    num_segments: int
    segment_sizes: Sequence[int] | None
    cap_microbatches: float | None
    cap_bytes: int | None

    def check(self) -> None:
        for name, cap in (("cap_microbatches", self.cap_microbatches), ("cap_bytes", self.cap_bytes)):
            if cap is not None and not cap > 0:
                raise ValueError(f"{name} is {cap}, must be above 0")
        if (sizes := self.segment_sizes) is not None:
            if len(sizes) != self.num_segments:
                raise ValueError(f"segment_sizes holds {len(sizes)} values, must hold {self.num_segments}")
            check_segment_sizes(sizes, sum(sizes))

    def excess(self, row: FamilyRow) -> str | None:
        """Why a row does not keep the caps; None where it does."""
        if self.cap_microbatches is not None and row.peak_microbatches > self.cap_microbatches:
            return f"holds {row.peak_microbatches:.2f} micro-batches, the cap is {self.cap_microbatches:g}"
        if self.cap_bytes is not None and row.peak_bytes is not None and row.peak_bytes > self.cap_bytes:
            return f"holds {_bytes(row.peak_bytes)}, the cap is {_bytes(self.cap_bytes)}"
        return None

    def sizes(self, k: int) -> Sequence[int] | None:
        """Tokens of each of k segments, or of the whole sequence if the family cuts none."""
        sizes = self.segment_sizes
        return sizes if sizes is None or k == self.num_segments else [sum(sizes)]

    def cap_option(self, family: Family, v: int, k: int) -> dict[str, Any]:
        """The option of "auto" for the cap in micro-batches. Its row tells if the cap is below one micro-batch."""
        most = self.cap_microbatches
        if family.name != "auto" or most is None or most >= self.num_microbatches:
            return {}
        return {"cap": max(int(most * v * k), v * k)}


class _Run(NamedTuple):
    simulation: Simulation
    peak_bytes: int | None
    message_bytes: Sequence[int] | None  # of each segment


_NO_ROOM = 1  # a cap in bytes, for which orders hold as little as they can
_STEPS: dict[str, Any] = {"steps": STEPS[False], "optimizer_sync": False}


@dataclass(frozen=True)
class _GivenCosts:
    """Seconds of a rank for a micro-batch and bytes of a token, which stages and segments share."""

    work: _Work
    forward: float
    backward: float
    weight: float | None
    transfer: float
    bandwidth: float | None
    token_bytes: int | None
    message_bytes: int | None

    most_stages = None

    def check(self) -> None:
        if self.work.segment_sizes is None and (self.token_bytes is not None or self.message_bytes is not None):
            raise ValueError("bytes of a token need the tokens of each segment: give segment_sizes")
        if self.work.cap_bytes is not None and self.token_bytes is None:
            raise ValueError("a cap in bytes needs the bytes of a token: give token_bytes, or a model")
        for name, value in (("token_bytes", self.token_bytes), ("message_bytes", self.message_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, must be at least 0")
        if self.weight is not None and self.weight > self.backward:
            raise ValueError("weight is more than backward, of which it is a part")

    def build(self, family: Family, counts: dict[str, Any]) -> Schedule:
        return build_schedule(family.name, **counts)

    def options(self, family: Family, v: int, k: int) -> dict[str, Any]:
        """The costs, where a family takes them; and "auto", whose order is made for its cap, that and the transfer."""
        put_off = self.backward / 2 if self.weight is None else self.weight
        seconds = (self.forward, self.backward - put_off, put_off)
        options: dict[str, Any] = {"costs": tuple(x / (v * k) for x in seconds), "transfer": self.transfer}
        held, cap = self._unit_bytes(v, k), self.work.cap_bytes
        most = math.inf if self.work.cap_microbatches is None else self.work.cap_microbatches
        if held is not None and cap is not None and cap < most * v * sum(held):  # the tighter one of two
            options |= {"unit_bytes": [held] * (self.work.num_ranks * v), "cap_bytes": max(cap, v * sum(held))}
        else:
            options |= self.work.cap_option(family, v, k)
        return {name: value for name, value in options.items() if name in family.options}

    def simulate(self, schedule: Schedule, v: int, k: int) -> _Run:
        sizes, held, messages = self.work.sizes(k), self._unit_bytes(v, k), None
        if sizes is not None and self.message_bytes is not None:
            messages = [size * self.message_bytes for size in sizes]
        costs = Costs(
            self.forward / (v * k),
            self.backward / (v * k),
            None if self.weight is None else self.weight / (v * k),
            links=Links(self.transfer, self.bandwidth, message_bytes=messages or 0),
        )
        run = schedule.simulate(costs, memory=StepMemory(activations=[held or [0] * k] * schedule.num_stages), **_STEPS)
        assert run.memory is not None
        return _Run(run, None if held is None else max(run.memory.activations), messages)

    def sizes(self, v: int, k: int) -> Sequence[int] | None:
        """Tokens of the segments, where they were given."""
        return self.work.sizes(k)

    def _unit_bytes(self, v: int, k: int) -> list[int] | None:
        """Activations of the units of one stage, where the bytes of a token were given."""
        sizes = self.work.sizes(k)
        return None if sizes is None or self.token_bytes is None else [-(-n * self.token_bytes // v) for n in sizes]


@dataclass(frozen=True)
class _ModelCosts:
    """Seconds and bytes of a model on a machine."""

    work: _Work
    model: ModelShape
    hardware: Hardware
    layout: Layout
    seq_len: int

    @property
    def most_stages(self) -> int:
        return self.model.layers

    def check(self) -> None:
        sizes = self.work.segment_sizes
        if sizes is not None and sum(sizes) != self.seq_len:
            raise ValueError(f"segment_sizes holds {sum(sizes)} tokens, seq_len is {self.seq_len}")
        if self.layout.vocabulary != "ends":
            raise ValueError(
                f"vocabulary is {self.layout.vocabulary!r}, must be 'ends': families are compared as they are"
            )

    def options(self, family: Family, v: int, k: int) -> dict[str, Any]:
        return self.work.cap_option(family, v, k)

    def build(self, family: Family, counts: dict[str, Any]) -> Schedule:
        """Costs come here, for only counts that can be built have them."""
        if "costs" not in family.options:
            return build_schedule(family.name, **counts)
        price = self._price(counts["stages_per_rank"], counts["num_segments"])

        def build_for(given: dict[str, Any]) -> Schedule:
            in_bytes = "cap_bytes" in given
            limits = {name: value for name, value in counts["options"].items() if not (in_bytes and name == "cap")}
            return build_schedule(family.name, **{**counts, "options": limits | given})

        def seconds(schedule: Schedule) -> float:
            return schedule.simulate(price.costs(schedule)).makespan

        cap = math.inf if self.work.cap_bytes is None else self.work.cap_bytes
        made = order_for_costs(family, price, cap, build_for, seconds)
        if made.peak > cap:  # nothing is made for such a cap: the same order for each of them
            made = order_for_costs(family, price, _NO_ROOM, build_for, seconds)
        return made.schedule

    def simulate(self, schedule: Schedule, v: int, k: int) -> _Run:
        price = self._price(v, k)
        run = schedule.simulate(price.costs(schedule), **_STEPS)
        return _Run(run, max(rank.total for rank in price.rank_bytes(schedule)), price.message_bytes)

    def sizes(self, v: int, k: int) -> Sequence[int]:
        """Tokens of the segments."""
        return self._price(v, k).sizes

    def _price(self, v: int, k: int) -> Price:
        cost = CostModel.balanced(
            self.model,
            self.hardware,
            num_ranks=self.work.num_ranks,
            stages_per_rank=v,
            seq_len=self.seq_len,
            layout=self.layout,
        )
        return cost.price(self.work.sizes(k) or cost.split(k))


def _build(family: Family, work: _Work, v: int | None, costs: _GivenCosts | _ModelCosts) -> Schedule | str:
    """The family with v stages per rank and k segments, or what it can have in their place; or the rule it breaks."""
    rule = None
    for stages, segments in product(
        dict.fromkeys((family.stages_per_rank if v is None else v, family.stages_per_rank)),
        (work.num_segments, 1) if family.has_segments else (1,),
    ):
        counts: dict[str, Any] = {
            "num_ranks": work.num_ranks,
            "num_microbatches": work.num_microbatches,
            "num_segments": segments,
            "stages_per_rank": stages,
            "options": costs.options(family, stages, segments) if stages > 0 and segments > 0 else {},
        }
        broken = family.broken_rule(**counts)
        if broken is None and costs.most_stages is not None and work.num_ranks * stages > costs.most_stages:
            broken = f"P v <= {costs.most_stages} layers: here P = {work.num_ranks}, v = {stages}"
        if broken is None:
            return costs.build(family, counts)
        rule = rule or broken
    assert rule is not None
    return rule


def _row(name: str, schedule: Schedule, work: _Work, costs: _GivenCosts | _ModelCosts) -> FamilyRow:
    v, k = schedule.num_stages // work.num_ranks, schedule.num_segments
    run, peak_bytes, messages = costs.simulate(schedule, v, k)
    sizes = costs.sizes(v, k)
    crossings = 2 * work.num_microbatches * sum(a != b for a, b in pairwise(schedule.rank_of_stage))  # of a segment
    return FamilyRow(
        family=name,
        stages_per_rank=v,
        num_segments=k,
        makespan=run.makespan,
        span=max(run.span),
        period=run.period or 0.0,
        bubble_ratio=run.bubble_ratio,
        peak_units=max(run.peak),
        peak_microbatches=max(run.peak) / (v * k),
        peak_tokens=None if sizes is None else max(schedule.peak_tokens(sizes)),
        peak_bytes=peak_bytes,
        messages=crossings * k,
        sent_bytes=None if messages is None else crossings * sum(messages),
    )


def _least_rows(costs: _ModelCosts, names: Collection[str], stages_per_rank: int | None) -> list[tuple[str, FamilyRow]]:
    """The row of least bytes whatever the cap, as it is asked for, and under each kind of more recomputation."""
    found = []
    for kind in INSIDE[INSIDE.index(costs.layout.inside) :]:
        layout, work = replace(costs.layout, inside=kind), replace(costs.work, cap_bytes=_NO_ROOM)
        again, rows = replace(costs, layout=layout, work=work), []
        for family in families_named(dict.fromkeys(names)):
            order = _build(family, work, stages_per_rank, again)
            if isinstance(order, Schedule):
                rows.append(_row(family.name, order, work, again))
        found.append((kind, min(rows, key=lambda row: row.peak_bytes or 0)))
    return found


def _nothing_fits(
    rows: Sequence[FamilyRow],
    refused: dict[str, str],
    cap_bytes: int | None,
    with_less: Sequence[tuple[str, FamilyRow]],
) -> str:
    if not rows:
        return "no family can be built: " + "; ".join(f"{name} {rule}" for name, rule in refused.items())
    if cap_bytes is None:
        least = min(rows, key=lambda row: row.peak_microbatches)
        return (
            f"no family fits the cap; the least possible is {least.peak_microbatches:.2f} micro-batches, of "
            f"{least.family}"
        )
    least = min(rows, key=lambda row: row.peak_bytes or 0)
    text = (
        f"no family fits the cap of {_bytes(cap_bytes)}; the least possible is {_bytes(least.peak_bytes)}, of "
        f"{least.family}"
    )
    for kind, row in with_less:
        if (row.peak_bytes or 0) <= cap_bytes:
            return f"{text}. With --inside {kind} it holds {_bytes(row.peak_bytes)}, which fits"
    if not with_less:
        return text
    kind, row = with_less[-1]
    return (
        f"{text}, and {_bytes(row.peak_bytes)} with --inside {kind}: more segments, more ranks, or a higher tensor "
        "or context degree need less"
    )
