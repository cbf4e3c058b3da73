"""Comparison of families over equal ranks, micro-batches and work: time, memory and messages of each family."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

from seq1f1b.families import schedules
from seq1f1b.partition import ModelShape, check_segment_sizes
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import Orders, families_named
from seq1f1b.planning.search import STEPS
from seq1f1b.schedule import Costs, Family, Links, Schedule, StepMemory, build_schedule
from seq1f1b.table import rounded, table_text

__all__ = ["Comparison", "FamilyRow", "compare"]


@dataclass(frozen=True)
class FamilyRow:
    """Figures of one family. Times in seconds; span and peaks belong to the worst rank.

    Attributes:
        stages_per_rank, num_segments: counts of the order; 1 segment if the family runs whole micro-batches.
        makespan: first start to last end over all ranks.
        span: first start to last end of one rank.
        period: time per step in a row of steps, without a wait for all ranks between steps.
        bubble_ratio: bubble's share of the ranks' time within the makespan.
        peak_units: most (stage, segment) units live at once.
        peak_microbatches: peak_units in whole micro-batches of a rank.
        peak_tokens: peak in tokens of one stage; None without sizes of segments.
        peak_bytes: peak of activation bytes, None without bytes of a token; with a model, peak of a device's bytes.
        messages: activations and gradients that pass between ranks in a step.
        sent_bytes: bytes of all messages; None without bytes of a token's message.
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
        refused: the broken rule, or cap, of each family left out.
        device: name and memory bytes of the model's machine, whose times are good for three digits; None: no model.
    """

    rows: tuple[FamilyRow, ...]
    refused: dict[str, str] = field(default_factory=dict)
    device: tuple[str, float] | None = None

    def to_json(self) -> str:
        """Returns the rows in order, and the refused families."""
        return json.dumps({"rows": [asdict(row) for row in self.rows], "refused": self.refused}, indent=1)

    def to_text(self) -> str:
        """Returns a table with one line per family, followed by the families left out."""
        rows, seconds = self.rows, "{:.6g}".format if self.device is None else rounded
        (held, of_held), (sent, of_sent) = (_unit(self._most(name)) for name in ("peak_bytes", "sent_bytes"))
        is_period_another = any(abs(row.period / row.makespan - 1) > 0.01 for row in rows)
        tokens = [None if self.device is not None else row.peak_tokens for row in rows]
        columns = {
            "family": [row.family for row in rows],
            "v": [str(row.stages_per_rank) for row in rows],
            "k": [str(row.num_segments) for row in rows],
            "makespan": [seconds(row.makespan) for row in rows],
            "period": [seconds(row.period) if is_period_another else "" for row in rows],
            "bubble": [f"{row.bubble_ratio:.1%}" for row in rows],
            "units": [str(row.peak_units) for row in rows],
            "held": [f"{row.peak_microbatches:.2f}" for row in rows],
            "tokens": ["" if count is None else str(count) for count in tokens],
            held: ["" if row.peak_bytes is None else f"{row.peak_bytes / of_held:.1f}" for row in rows],
            "sends": [str(row.messages) for row in rows],
            f"sent {sent}": ["" if row.sent_bytes is None else f"{row.sent_bytes / of_sent:.1f}" for row in rows],
        }
        table = table_text([tuple(columns), *zip(*columns.values(), strict=True)])
        lines = ["", "v: stages per rank; k: segments; held: activations in micro-batches;"]
        last = held if self._most("peak_bytes") else "held"
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


def _unit(most: int) -> tuple[str, int]:
    """Returns name and size of the unit that gives a column at most four digits before the point."""
    return ("MiB", 2**20) if most < 10_000 * 2**20 else ("GiB", 2**30)


def _bytes(count: int | None) -> str:
    """Returns bytes as text, rounded up, since a printed least cap must fit if a user asks for it."""
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

    Every family has equal work per rank and micro-batch: stages and segments share the work equally, or have the costs
    of a model on a machine. Families without segments run whole micro-batches. A family that cannot have
    ``stages_per_rank`` gets the fewest stages possible. Families that place W by costs get the costs; ``auto`` also
    gets the tighter of two caps.

    Args:
        names: families; empty: all.
        num_ranks, num_microbatches, num_segments: P, M, k.
        stages_per_rank: v; None: each family's fewest.
        forward, backward, weight: seconds of one rank for a micro-batch; ``weight`` is the part of ``backward`` that a
            split backward puts off (None: half).
        transfer, bandwidth: seconds and bytes per second of a message, as in :meth:`seq1f1b.Schedule.simulate`.
        segment_sizes: tokens of each segment.
        token_bytes: activation bytes that a token keeps on a rank, over all stages; needs ``segment_sizes``.
        message_bytes: bytes of a token between two stages; needs ``segment_sizes``.
        model, hardware, layout, seq_len: source of costs, messages and bytes, instead of the seconds and bytes above:
            a :class:`seq1f1b.planning.cost.CostModel`, in segments of equal time unless ``segment_sizes`` are given.
            ``peak_bytes`` and ``cap_bytes`` are then all bytes of a device, as in ``seq1f1b.planning.search``.
        cap_microbatches, cap_bytes: most activations that a rank may hold, in whole micro-batches of a rank, in bytes.
    Raises:
        ValueError: unknown name, a number out of range, a missing size, a model without hardware or seq_len or beside
            token bytes; or no family fits: the message names the least cap that lets a family fit.
    """
    work = _Work(**{name: value for name, value in locals().items() if name != "names"})
    work.layout = layout or Layout()
    work.check()
    wanted = families_named(dict.fromkeys(names or schedules()))
    rows, refused = work.rows(wanted)
    fitting = [row for row in rows if work.excess(row) is None]
    refused |= {row.family: why for row in rows if (why := work.excess(row)) is not None}
    if not fitting:
        raise ValueError(work.nothing_fits(wanted, rows, refused))
    fitting.sort(key=lambda row: (row.makespan, row.peak_microbatches))
    return Comparison(tuple(fitting), refused, None if model is None else (work.hardware.name, work.hardware.memory))


_NO_ROOM = 1  # a cap in bytes that makes orders hold as little as possible


class _Work(SimpleNamespace):
    """Work and caps common to all families: the arguments of :func:`compare`, by name."""

    def check(self) -> None:
        sizes, of_token = self.segment_sizes, {name: getattr(self, name) for name in ("token_bytes", "message_bytes")}
        for name in ("cap_microbatches", "cap_bytes"):
            if (cap := getattr(self, name)) is not None and not cap > 0:
                raise ValueError(f"{name} is {cap}, must be above 0")
        if sizes is not None:
            if len(sizes) != self.num_segments:
                raise ValueError(f"segment_sizes holds {len(sizes)} values, must hold {self.num_segments}")
            check_segment_sizes(sizes, sum(sizes))
        if self.model is not None:
            if self.hardware is None or self.seq_len is None:
                raise ValueError("a model's costs need hardware and seq_len")
            if {*of_token.values(), self.bandwidth} != {None}:
                raise ValueError("token_bytes, message_bytes and bandwidth are the model's, where a model is given")
            if sizes is not None and sum(sizes) != self.seq_len:
                raise ValueError(f"segment_sizes holds {sum(sizes)} tokens, seq_len is {self.seq_len}")
            if (vocabulary := self.layout.vocabulary) != "ends":
                raise ValueError(f"vocabulary is {vocabulary!r}, must be 'ends': families are compared as they are")
            return
        if sizes is None and set(of_token.values()) != {None}:
            raise ValueError("bytes of a token need the tokens of each segment: give segment_sizes")
        if self.cap_bytes is not None and self.token_bytes is None:
            raise ValueError("a cap in bytes needs the bytes of a token: give token_bytes, or a model")
        for name, value in of_token.items():
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, must be at least 0")
        if self.weight is not None and self.weight > self.backward:
            raise ValueError("weight is more than backward, of which it is a part")

    def rows(self, wanted: Sequence[Family]) -> tuple[list[FamilyRow], dict[str, str]]:
        """Returns a row for each family that can be built, and the broken rule for each family that cannot.

        A family has the wanted stages and segments, else the fewest stages or one segment.
        """
        rows, refused = [], dict[str, str]()
        for family in wanted:
            least, broken = family.stages_per_rank, list[str]()
            stages = dict.fromkeys((least if self.stages_per_rank is None else self.stages_per_rank, least))
            for v, k in product(stages, (self.num_segments, 1) if family.has_segments else (1,)):
                if (rule := self._broken_rule(family, v, k)) is None:
                    rows.append(self._of_seconds(family, v, k) if self.model is None else self._of_model(family, v, k))
                    break
                broken.append(rule)
            else:
                refused[family.name] = f"needs {broken[0]}"
        return rows, refused

    def _broken_rule(self, family: Family, v: int, k: int) -> str | None:
        counts = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        rule = family.broken_rule(**counts, num_segments=k, stages_per_rank=v)
        if rule is None and self.model is not None and self.num_ranks * v > self.model.layers:
            return f"P v <= {self.model.layers} layers: here P = {self.num_ranks}, v = {v}"
        return rule

    def _sizes(self, k: int) -> Sequence[int] | None:
        """Returns the tokens of each of k segments, or of the whole sequence if k is 1; None if no sizes were given."""
        sizes = self.segment_sizes
        return sizes if sizes is None or k == self.num_segments else [sum(sizes)]

    def _cap(self, family: Family, v: int, k: int) -> dict[str, int]:
        """Returns the option ``cap`` of "auto": at least one micro-batch. The row shows that an order exceeds less."""
        most = math.inf if self.cap_microbatches is None else self.cap_microbatches
        is_capped = family.name == "auto" and most < self.num_microbatches
        return {"cap": max(int(most * v * k), v * k)} if is_capped else {}

    def _of_model(self, family: Family, v: int, k: int) -> FamilyRow:
        """Returns the row of an order for the model's costs, with all bytes of a device."""
        counts = {"num_ranks": self.num_ranks, "stages_per_rank": v, "seq_len": self.seq_len}
        cost = CostModel.balanced(self.model, self.hardware, layout=self.layout, **counts)
        price = cost.price(self._sizes(k) or cost.split(k))
        cap = math.inf if self.cap_bytes is None else self.cap_bytes
        orders = Orders(family, [price], self.num_microbatches, cap, options=self._cap(family, v, k))
        made = orders.made_for(cap)
        if made.peak > cap and "costs" in family.options:  # all caps that are too low get one and the same order
            made = orders.made_for(_NO_ROOM)
        return self._row(family, made.schedule, price.costs(made.schedule), price.sizes, made.peak)

    def _of_seconds(self, family: Family, v: int, k: int) -> FamilyRow:
        """Returns the row of an order for equal stages and segments, with bytes of activations."""
        sizes, parts, held = self._sizes(k), v * k, None
        put_off = self.backward / 2 if self.weight is None else self.weight
        seconds = (self.forward, self.backward - put_off, put_off)
        options = {"costs": tuple(x / parts for x in seconds), "transfer": self.transfer} | self._cap(family, v, k)
        if sizes is not None and self.token_bytes is not None:
            held = [-(-n * self.token_bytes // v) for n in sizes]  # by each unit of a stage
            most = math.inf if self.cap_microbatches is None else self.cap_microbatches
            if self.cap_bytes is not None and self.cap_bytes < most * v * sum(held):  # the tighter of two caps
                options.pop("cap", None)
                options["unit_bytes"] = [held] * (self.num_ranks * v)
                options["cap_bytes"] = max(self.cap_bytes, v * sum(held))
        counts = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches, "num_segments": k}
        taken = {name: value for name, value in options.items() if name in family.options}
        schedule = build_schedule(family.name, **counts, stages_per_rank=v, options=taken)
        messages = None if sizes is None or self.message_bytes is None else [n * self.message_bytes for n in sizes]
        costs = Costs(
            self.forward / parts,
            self.backward / parts,
            None if self.weight is None else self.weight / parts,
            links=Links(self.transfer, self.bandwidth, message_bytes=0 if messages is None else messages),
        )
        memory = StepMemory([held or [0] * k] * schedule.num_stages)
        peak = max(schedule.peak_memory(memory).activations) if held is not None else None
        return self._row(family, schedule, costs, sizes, peak)

    def _row(
        self, family: Family, schedule: Schedule, costs: Costs, sizes: Sequence[int] | None, peak: int | None
    ) -> FamilyRow:
        v, k = schedule.num_stages // self.num_ranks, schedule.num_segments
        run = schedule.simulate(costs, steps=STEPS[False], optimizer_sync=False)
        crossings = 2 * self.num_microbatches * sum(a != b for a, b in pairwise(schedule.rank_of_stage))  # per segment
        messages: Any = costs.links.message_bytes  # a number of each segment, or 0: unknown
        return FamilyRow(
            family=family.name,
            stages_per_rank=v,
            num_segments=k,
            makespan=run.makespan,
            span=max(run.span),
            period=run.period or 0.0,
            bubble_ratio=run.bubble_ratio,
            peak_units=max(run.peak),
            peak_microbatches=max(run.peak) / (v * k),
            peak_tokens=None if sizes is None else max(schedule.peak_tokens(sizes)),
            peak_bytes=peak,
            messages=crossings * k,
            sent_bytes=None if isinstance(messages, int) else crossings * int(sum(messages)),
        )

    def excess(self, row: FamilyRow) -> str | None:
        """Returns how a row exceeds a cap; None if the row keeps both caps."""
        if self.cap_microbatches is not None and row.peak_microbatches > self.cap_microbatches:
            return f"holds {row.peak_microbatches:.2f} micro-batches, the cap is {self.cap_microbatches:g}"
        if self.cap_bytes is not None and row.peak_bytes is not None and row.peak_bytes > self.cap_bytes:
            return f"holds {_bytes(row.peak_bytes)}, the cap is {_bytes(self.cap_bytes)}"
        return None

    def nothing_fits(self, wanted: Sequence[Family], rows: Sequence[FamilyRow], refused: dict[str, str]) -> str:
        """Returns an error text with the least cap that fits, and with ways to need less."""
        if not rows:
            return "no family can be built: " + "; ".join(f"{name} {rule}" for name, rule in refused.items())
        if self.cap_bytes is None:
            least = min(rows, key=lambda row: row.peak_microbatches)
            held = f"{least.peak_microbatches:.2f} micro-batches"
            return f"no family fits the cap; the least possible is {held}, of {least.family}"
        of_any_cap, _ = _Work(**vars(self) | {"cap_bytes": _NO_ROOM}).rows(wanted)
        least = min(of_any_cap, key=lambda row: row.peak_bytes or 0)
        text = f"no family fits the cap of {_bytes(self.cap_bytes)}; the least possible is {_bytes(least.peak_bytes)}"
        more = (
            "segments, more ranks, a higher tensor or context degree, or more recomputation (--inside full) need less"
        )
        return f"{text}, of {least.family}" + f". More {more}" * (self.model is not None)
