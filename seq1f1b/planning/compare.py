"""Comparison of families over equal ranks, micro-batches and work: time, memory and messages of each family."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from typing import Any

from seq1f1b.families import families_named, schedules
from seq1f1b.partition import ModelShape, check_segment_sizes, partition_sequence
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import Orders
from seq1f1b.planning.search import STEPS
from seq1f1b.schedule import Costs, Family, Links, Schedule, build_schedule
from seq1f1b.table import rounded, table_text

__all__ = ["Comparison", "FamilyRow", "compare"]

_NO_ROOM = 1  # a cap in bytes that makes orders hold as little as possible


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
        peak_tokens: peak in tokens of one stage; None without a model, as the fields of bytes.
        peak_bytes: peak of a device's bytes.
        messages: activations and gradients that pass between ranks in a step.
        sent_bytes: bytes of all messages.
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
        (held, of_held), (sent, of_sent) = (
            _unit(max([getattr(row, name) or 0 for row in rows], default=0)) for name in ("peak_bytes", "sent_bytes")
        )
        is_period_another = any(abs(row.period / row.makespan - 1) > 0.01 for row in rows)
        columns = {
            "family": [row.family for row in rows],
            "v": [str(row.stages_per_rank) for row in rows],
            "k": [str(row.num_segments) for row in rows],
            "makespan": [seconds(row.makespan) for row in rows],
            "period": [seconds(row.period) if is_period_another else "" for row in rows],
            "bubble": [f"{row.bubble_ratio:.1%}" for row in rows],
            "units": [str(row.peak_units) for row in rows],
            "held": [f"{row.peak_microbatches:.2f}" for row in rows],
            held: ["" if row.peak_bytes is None else f"{row.peak_bytes / of_held:.1f}" for row in rows],
            "sends": [str(row.messages) for row in rows],
            f"sent {sent}": ["" if row.sent_bytes is None else f"{row.sent_bytes / of_sent:.1f}" for row in rows],
        }
        table = table_text([tuple(columns), *zip(*columns.values(), strict=True)])
        lines = ["", "v: stages per rank; k: segments; held: activations in micro-batches;"]
        lines.append(f"units to {'held' if self.device is None else held}: the most that a rank holds at once")
        if self.device is not None:
            name, memory = self.device
            above = sum((row.peak_bytes or 0) > memory for row in rows)
            if above:
                lines.append(f"{above} of {len(rows)} hold more than the {memory / 2**30:.1f} GiB of {name}")
        if self.refused:
            widest = max(map(len, self.refused))
            lines += ["", "left out:", *(f"{name:<{widest}}  {rule}" for name, rule in self.refused.items())]
        return table + "".join(line + "\n" for line in lines)


def _unit(most: int) -> tuple[str, int]:
    """Returns name and size of the unit that gives a column at most four digits before the point."""
    return ("MiB", 2**20) if most < 10_000 * 2**20 else ("GiB", 2**30)


def _bytes(count: int) -> str:
    """Returns bytes as text, rounded up, since a printed least cap must fit if a user asks for it."""
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
    segment_sizes: Sequence[int] | None = None,
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
    gets the cap.

    Args:
        names: families; empty: all.
        num_ranks, num_microbatches, num_segments: P, M, k.
        stages_per_rank: v; None: each family's fewest.
        forward, backward, weight: seconds of one rank for a micro-batch; ``weight`` is the part of ``backward`` that a
            split backward puts off (None: half).
        transfer: seconds of a message, as in :class:`seq1f1b.Links`.
        model, hardware, layout, seq_len: source of costs, messages and bytes, instead of the seconds above: a
            :class:`seq1f1b.planning.cost.CostModel`. ``peak_bytes`` are all bytes of a device, as in
            ``seq1f1b.planning.search``.
        segment_sizes: with a model, tokens of each segment; None: segments of equal time.
        cap_microbatches: most activations that a rank may hold, in whole micro-batches of a rank.
        cap_bytes: with a model, most bytes of a device.
    Raises:
        ValueError: unknown name, a number out of range, a model without hardware or seq_len, sizes or bytes without a
            model; or no family fits: the message names the least cap that lets a family fit.
    """
    most = math.inf if cap_microbatches is None else cap_microbatches
    for name, cap in (("cap_microbatches", cap_microbatches), ("cap_bytes", cap_bytes)):
        if cap is not None and not cap > 0:
            raise ValueError(f"{name} is {cap}, must be above 0")
    if model is None:
        if segment_sizes is not None or cap_bytes is not None:
            raise ValueError("segment_sizes and cap_bytes are of a model: give model, hardware and seq_len")
        if weight is not None and weight > backward:
            raise ValueError("weight is more than backward, of which it is a part")
    elif hardware is None or seq_len is None:
        raise ValueError("a model's costs need hardware and seq_len")
    elif layout is not None and layout.vocabulary != "ends":
        raise ValueError(f"vocabulary is {layout.vocabulary!r}, must be 'ends': families are compared as they are")
    elif segment_sizes is not None:
        if len(segment_sizes) != num_segments:
            raise ValueError(f"segment_sizes holds {len(segment_sizes)} values, must hold {num_segments}")
        check_segment_sizes(segment_sizes, seq_len)

    counts: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}

    def row_of(family: Family, v: int, k: int) -> FamilyRow:
        is_capped = family.name == "auto" and most < num_microbatches
        options: dict[str, Any] = {"cap": max(int(most * v * k), v * k)} if is_capped else {}
        if model is not None and hardware is not None and seq_len is not None:
            of_cost = {"num_ranks": num_ranks, "stages_per_rank": v, "seq_len": seq_len}
            cost = CostModel.balanced(model, hardware, layout=layout or Layout(), **of_cost)
            whole = segment_sizes if k == num_segments else [seq_len]
            price = cost.price(whole or partition_sequence(cost.seq_len, k, strategy="profiled", profile=cost))
            orders = Orders(family, [price], num_microbatches, cap_bytes or math.inf, options=options)
            made = orders.within_cap()
            if made.peak > orders.cap and "costs" in family.options:  # the order that holds least, for all such caps
                made = orders._replace(cap=_NO_ROOM).within_cap()
            return _row(family, made.schedule, price.costs(made.schedule), price.sizes, made.peak)
        put_off = backward / 2 if weight is None else weight
        options |= {"costs": [x / (v * k) for x in (forward, backward - put_off, put_off)], "transfer": transfer}
        taken = {name: value for name, value in options.items() if name in family.options}
        schedule = build_schedule(family.name, **counts, num_segments=k, stages_per_rank=v, options=taken)
        seconds = forward / (v * k), backward / (v * k), None if weight is None else weight / (v * k)
        return _row(family, schedule, Costs(*seconds, links=Links(transfer)))

    rows, refused = list[FamilyRow](), dict[str, str]()
    for family in families_named(dict.fromkeys(names or schedules())):
        fewest, broken = family.stages_per_rank, list[str]()
        stages = dict.fromkeys((fewest if stages_per_rank is None else stages_per_rank, fewest))
        for v, k in product(stages, (num_segments, 1) if family.has_segments else (1,)):
            rule = family.broken_rule(**counts, num_segments=k, stages_per_rank=v)
            if rule is None and model is not None and num_ranks * v > model.layers:
                rule = f"P v <= {model.layers} layers: here P = {num_ranks}, v = {v}"
            if rule is None:
                rows.append(row_of(family, v, k))
                break
            broken.append(rule)
        else:
            refused[family.name] = f"needs {broken[0]}"
    if not rows:
        raise ValueError("no family can be built: " + "; ".join(f"{name} {rule}" for name, rule in refused.items()))
    fitting = []
    for row in rows:
        if row.peak_microbatches > most:
            refused[row.family] = f"holds {row.peak_microbatches:.2f} micro-batches, the cap is {most:g}"
        elif cap_bytes is not None and (row.peak_bytes or 0) > cap_bytes:
            refused[row.family] = f"holds {_bytes(row.peak_bytes or 0)}, the cap is {_bytes(cap_bytes)}"
        else:
            fitting.append(row)
    if not fitting:
        least = min(rows, key=lambda row: row.peak_microbatches if cap_bytes is None else row.peak_bytes or 0)
        if cap_bytes is None:
            held = f"{least.peak_microbatches:.2f} micro-batches, of {least.family}"
            raise ValueError(f"no family fits the cap; the least possible is {held}")
        raise ValueError(
            f"no family fits the cap of {_bytes(cap_bytes)}; the least possible is {_bytes(least.peak_bytes or 0)}, "
            f"of {least.family}. More segments, more ranks, a higher tensor or context degree, or more "
            "recomputation (--inside full) need less"
        )
    fitting.sort(key=lambda row: (row.makespan, row.peak_microbatches))
    return Comparison(tuple(fitting), refused, None if hardware is None else (hardware.name, hardware.memory))


def _row(
    family: Family, schedule: Schedule, costs: Costs, sizes: Sequence[int] | None = None, peak: int | None = None
) -> FamilyRow:
    v, k = schedule.num_stages // schedule.num_ranks, schedule.num_segments
    run = schedule.simulate(costs, steps=STEPS[False], optimizer_sync=False)
    crossings = 2 * schedule.num_microbatches * sum(a != b for a, b in pairwise(schedule.rank_of_stage))  # per segment
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
        sent_bytes=None if sizes is None else crossings * int(sum(costs.links.message_bytes)),  # type: ignore[arg-type]
    )
