"""Is every family's order, its lowered program and its simulated step what it was before?

``data/orders.json`` holds the number of cases and a SHA-256 digest for each family and kind of result:

    order     the order as text
    program   instructions, edges and stage peaks for three prefetches, and those of the forward-only order
    receives  the same with receives, which transports with a rendezvous need
    times     starts, ends, totals and peaks of simulated steps under several costs
    critical  slack and critical path of every unit
    memory    peaks of every kind of bytes

A digest that changes means that behaviour changed: a commit that rewrites one says which order changed and why.

    export PYTHONPATH=tests/support
    python tests/schedules/test_pinned_orders.py --write              compute and write all digests
    python tests/schedules/test_pinned_orders.py --write zbv auto     only those of some families
    python tests/schedules/test_pinned_orders.py --list zbv times     a digest for each case: compare two commits
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from core_extension import instructions_of
from flat_costs import simulation_of
from orders import random_order

from seq1f1b import _C, Costs, Links, Schedule, Unit, build_schedule, schedules
from seq1f1b.schedule import Family, StepMemory, families

FILE = Path(__file__).parents[1] / "data" / "orders.json"
FAMILIES = {family.name: family for family in families()}
RANDOM_ORDERS = "random orders"  # orders that keep the rules and belong to no family
NAMES = (*schedules(), RANDOM_ORDERS)

# -- cases -------------------------------------------------------------------------------------------------------------

Case = tuple[str, Schedule]
SMALL = 160  # forward units of the largest schedule whose program and times are computed
LARGE = 1500  # above it only every third schedule is built, and none with options
SEGMENTS, STAGES = (1, 2, 3, 4, 8), (1, 2, 3, 4, 6)


def cases(name: str) -> Iterator[Case]:
    """Labelled schedules in a fixed order."""
    if name == RANDOM_ORDERS:
        rng = random.Random(19)
        for number in range(60):
            yield f"{name} {number}", random_order(rng)
        return
    for counts, options in problems_of_auto() if name == "auto" else problems(FAMILIES[name]):
        if FAMILIES[name].broken_rule(**counts, options=options) is None:
            yield f"{name} {counts} {options}", build_schedule(name, **counts, options=options)


def problems(family: Family) -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
    """Counts and options, some of which break the family's rule; of the largest orders only some, for the time."""
    for P in range(1, 9):
        grid = itertools.product(range(1, 3 * P + 2), SEGMENTS, STAGES)
        for number, (M, k, v) in enumerate(grid):
            counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
            if P * M * k * v <= LARGE or number % 3 == 0:
                yield counts, {}
            if P * M * k * v <= LARGE and number % 7 == 0:
                yield from ((counts, options) for options in options_of(family, P, M, k, v))


def options_of(family: Family, P: int, M: int, k: int, v: int) -> Iterator[dict[str, Any]]:
    """Values of each option that the family takes, alone and together with another."""
    if "extra_warmup" in family.options:
        yield from ({"extra_warmup": extra} for extra in (1, 2))
    if "group" in family.options:
        yield from ({"group": group} for group in (1, 3))
        yield {"group": 3, "extra_warmup": 1}
    if "round" in family.options:
        yield from ({"round": least} for least in (P, P + 1))
    if "cap" in family.options:
        yield from ({"cap": cap} for cap in (v * (P + k), 2 * v * P + k))
    if "costs" in family.options:
        costs = random_costs(random.Random(f"{family.name} {P} {M} {k} {v}"), (10, 21, 3), P * v, k)
        yield {"costs": (1, 1.3, 0.8)}
        yield {"costs": costs}
        yield {"costs": costs, "cap": v * (P + k)}


def problems_of_auto() -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
    for P, M, k, v in itertools.product((1, 2, 3, 4), (1, 2, 5), (1, 2), (1, 2)):
        counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
        yield counts, {}
        yield counts, {"backward": "whole"}
    rng = random.Random(19)
    for _ in range(60):
        P, M, k, v = rng.randint(1, 5), rng.randint(1, 7), rng.randint(1, 3), rng.randint(1, 3)
        counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
        base = rng.choice([(1, 1, 1), (10, 21, 3), (1, 0.9, 0), (2, 3, 4)])
        options: dict[str, Any] = {"costs": random_costs(rng, base, P * v, k)}
        options["transfer"] = rng.choice([0, 0.25, 2]) * base[0]
        options["backward"] = rng.choice(["split", "whole"])
        if rng.random() < 0.7:
            options["placement"] = rng.choice(["loop", "v"])
        most = v * k * M
        cap = rng.choice(["none", "units", "bytes"])
        if cap == "units":
            options["cap"] = rng.randint(v * k, most)
        elif cap == "bytes":
            options["unit_bytes"] = [[rng.randint(1, 9) for _ in range(k)] for _ in range(P * v)]
            options["cap_bytes"] = [rng.randint(9 * v * k, 9 * most) for _ in range(P)]
        yield counts, options


def random_costs(rng: random.Random, base: Iterable[float], num_stages: int, k: int) -> list[list[list[float]]]:
    """Costs of F, I and W, each [stage][segment]."""
    return [[[rng.uniform(0.5, 1.5) * cost for _ in range(k)] for _ in range(num_stages)] for cost in base]


# -- what is pinned of a schedule --------------------------------------------------------------------------------------


def unit_text(unit: Unit) -> str:
    return f"[{unit.stage}]{unit}"


def floats(values: Iterable[float]) -> str:
    return " ".join(map(float.hex, map(float, values)))


def program_lines(schedule: Schedule, prefetch: int, receives: bool) -> Iterator[str]:
    """The whole program. No other function here reads the private interface of programs."""
    handle = _C.program_lower(schedule.handle, prefetch, receives)
    for edge in _C.program_edges(handle):
        yield f"edge {tuple(map(int, edge))}"
    for stage in range(schedule.num_stages):
        yield f"peak {tuple(_C.program_stage_peak(handle, stage))}"
    for rank in range(schedule.num_ranks):
        yield f"rank {rank}"
        for op, edge, unit, place, kv_slot, grad_slot, sequence in instructions_of(handle, rank):
            yield f"{op} {edge} {unit_text(unit)} {place} {kv_slot} {grad_slot} {sequence}"


def programs(schedule: Schedule, label: str, receives: bool = False) -> Iterator[str]:
    for order in (schedule, schedule.forward_only()):
        for prefetch in (0, 1, 3):
            yield f"prefetch {prefetch}"
            yield from program_lines(order, prefetch, receives)


def step_arguments(schedule: Schedule, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Arguments of simulate, flat, and the order's prefetch.

    Equal costs; random ones, links and credits; several jittery steps; measured durations.
    """
    S, k = schedule.num_stages, schedule.num_segments
    yield {}
    forward, inputs, weight = random_costs(rng, (1, 1.2, 0.8), S, k)
    random_units = {
        "forward": forward,
        "backward": [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weight, strict=True)],
        "weight": weight,
    }
    yield {"latency": 0.5, "bandwidth": 3.0, "message_bytes": 2, "prefetch": 3}
    links = {
        "latency": [rng.random() for _ in range(S - 1)],
        "bandwidth": [rng.uniform(1, 5) for _ in range(S - 1)],
        "message_bytes": [rng.randint(0, 3) for _ in range(k)],
        "send": 0.1 * rng.random(),
    }
    sizes = {
        "segment_sizes": [rng.randint(1, 9) for _ in range(k)],
        "unit_bytes": [[rng.randint(0, 9) for _ in range(k)] for _ in range(S)],
    }
    yield random_units | links | sizes | {"prefetch": 0}
    steps = {"steps": 3, "optimizer": [rng.random() for _ in range(schedule.num_ranks)]}
    noise = {"jitter": 0.3, "transfer_jitter": 0.2, "seed": rng.randint(0, 2**32)}
    yield random_units | links | noise | steps | {"optimizer_sync": rng.random() < 0.5}
    yield {"durations": [[rng.random() for _ in order] for order in schedule.ranks], "latency": 0.1}


def times(schedule: Schedule, label: str) -> Iterator[str]:
    rng = random.Random(label)
    for order in (schedule, schedule.forward_only()):
        for arguments in step_arguments(order, rng):
            sizes, unit_bytes = arguments.pop("segment_sizes", None), arguments.pop("unit_bytes", None)
            tokens = None if sizes is None else order.peak_tokens(sizes)
            held = None if unit_bytes is None else order.peak_memory(StepMemory(activations=unit_bytes)).activations
            placed = order.replace(prefetch=arguments.pop("prefetch", 1))
            step = placed.simulate(**simulation_of(arguments))
            yield f"step {floats([step.makespan, step.makespan if step.period is None else step.period])}"
            yield f"peak {step.peak} {tokens} {held}"
            assert step.start is not None and step.end is not None
            for values in (step.span, step.busy, step.wait, step.bubble, *step.start, *step.end):
                yield floats(values)


def critical(schedule: Schedule, label: str) -> Iterator[str]:
    for arguments in step_arguments(schedule, random.Random(label)):
        arguments = {name: value for name, value in arguments.items() if name not in ("segment_sizes", "unit_bytes")}
        placed = schedule.replace(prefetch=arguments.pop("prefetch", 1))
        step = placed.simulate(**simulation_of(arguments), critical=True)
        assert step.slack is not None and step.critical_path is not None
        yield from map(floats, step.slack)
        yield " ".join(map(unit_text, step.critical_path))


PEAKS = ("activations", "output_gradients", "kv", "kv_gradients", "receive", "weights", "optimizer", "logits", "total")


def memory(schedule: Schedule, label: str) -> Iterator[str]:
    rng = random.Random(label)
    S, k = schedule.num_stages, schedule.num_segments
    for order, prefetch in itertools.product((schedule, schedule.forward_only()), (0, 1, 3)):
        kept = [[rng.randint(0, 50) for _ in range(k)] for _ in range(S)]
        given = StepMemory(
            activations=[[most + rng.randint(0, 50) for most in row] for row in kept],
            kept_activations=rng.choice([None, kept]),
            output_gradients=[[rng.randint(0, 20) for _ in range(k)] for _ in range(S)],
            kv=[rng.randint(0, 200) for _ in range(S)],
            kv_gradients=[rng.randint(0, 200) for _ in range(S)],
            weights=[rng.randint(0, 99) for _ in range(S)],
            optimizer=rng.randint(0, 99),
            logits=rng.randint(0, 99),
        )
        message_bytes = [rng.randint(0, 30) for _ in range(k)]
        peaks = order.replace(prefetch=prefetch).peak_memory(
            given, costs=Costs(links=Links(message_bytes=message_bytes))
        )
        yield " ".join(f"{name} {getattr(peaks, name)}" for name in PEAKS)


# Each kind's lines of a schedule, and how many of a family's small cases it takes; None: all cases of any size.
KINDS: dict[str, tuple[Callable[[Schedule, str], Iterable[str]], int | None]] = {
    "order": (lambda schedule, label: [schedule.to_text()], None),
    "program": (programs, 24),
    "receives": (partial(programs, receives=True), 12),
    "times": (times, 48),
    "critical": (critical, 48),
    "memory": (memory, 64),
}

# -- digests -----------------------------------------------------------------------------------------------------------


def lines_of(name: str, kind: str, of_family: list[Case]) -> Iterator[tuple[str, list[str]]]:
    """Label and lines of each case that the kind takes."""
    make, most = KINDS[kind]
    if most is not None:
        small = [
            (label, order)
            for label, order in of_family
            if order.num_stages * order.num_microbatches * order.num_segments <= SMALL
        ]
        of_family = sorted(small, key=lambda case: hashlib.sha256(case[0].encode()).digest())[:most]  # a fixed mixture
    for label, schedule in of_family:
        yield label, list(make(schedule, label))


def digests(name: str) -> dict[str, list[Any]]:
    """[number of cases, SHA-256] of each kind."""
    all_cases = list(cases(name))
    found = {}
    for kind in KINDS:
        digest, count = hashlib.sha256(), 0
        for label, lines in lines_of(name, kind, all_cases):
            digest.update("\n".join((label, *lines, "")).encode())
            count += 1
        found[kind] = [count, digest.hexdigest()]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_same_as_at_the_pinned_commit(name: str) -> None:
    pinned, found = json.loads(FILE.read_text())[name], digests(name)
    changed = [f"{kind}: {pinned[kind]} is now {found[kind]}" for kind in KINDS if pinned[kind] != found[kind]]
    assert not changed, f"{name} is not as {FILE.name} says. {'; '.join(changed)}"


def test_every_family_and_kind_is_pinned() -> None:
    pinned = json.loads(FILE.read_text())
    assert list(pinned) == list(NAMES)
    assert all(
        list(kinds) == list(KINDS) and all(count > 0 for count, _ in kinds.values()) for kinds in pinned.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", nargs="*", metavar="FAMILY", help="write the digests of these families, or of all")
    action.add_argument("--list", nargs=2, metavar=("FAMILY", "KIND"), help="print a digest for each case")
    options = parser.parse_args()
    if options.list:
        name, kind = options.list
        for label, lines in lines_of(name, kind, list(cases(name))):
            print(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16], label)
        return
    pinned = json.loads(FILE.read_text()) if options.write else {}
    pinned |= {name: digests(name) for name in options.write or NAMES}
    rows = {name: ",\n".join(f'  "{kind}": {json.dumps(row)}' for kind, row in pinned[name].items()) for name in NAMES}
    FILE.write_text("{\n" + ",\n".join(f' "{name}": {{\n{row}\n }}' for name, row in rows.items()) + "\n}\n")


if __name__ == "__main__":
    main()
