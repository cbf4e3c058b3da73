"""How close is ``auto`` to the shortest order there is, and is the exact solver right where the answer is known?"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from exact_cases import chosen_cases, counts_of, options_of, read_cases
from test_auto import makespan

from seq1f1b import Schedule, ScheduleError, Unit, build_schedule
from seq1f1b.schedule import StepMemory

CASES = read_cases()


def test_the_file_holds_the_cases_of_its_rule() -> None:
    assert [{name: case[name] for name in chosen} for case, chosen in zip(CASES, chosen_cases(), strict=True)] == (
        chosen_cases()
    )
    assert len(CASES) >= 100
    values: dict[str, set[Any]] = {name: {case[name] for case in CASES} for name in chosen_cases()[0]}
    assert values["num_ranks"] == set(range(2, 9)) and values["num_segments"] == {1, 2, 4}
    assert values["placement"] == {"loop", "v"} and values["costs"] == {"equal", "32k", "128k", "slow"}
    assert values["cap"] == {"least", "middle", "none"} and values["transfer"] == {0, 0.25}
    assert all(
        {1, 2, P, 2 * P} >= {case["num_microbatches"] for case in CASES if case["num_ranks"] == P} for P in range(9)
    )
    assert all(case["proved"] == (case["bound"] == case["makespan"]) for case in CASES)
    assert sum(not case["proved"] for case in CASES) <= 0.1 * len(CASES)


def test_gap_of_auto() -> None:
    """Over the cases whose optimum is proved: mean below 2 %, worst below 8 %; never below the solver's bound."""
    gaps = []
    for case in CASES:
        options = options_of(case)
        schedule = build_schedule("auto", **counts_of(case), options=options)
        schedule.check()
        if "cap_bytes" in options:
            held = schedule.peak_memory(StepMemory(activations=options["unit_bytes"]))
            assert max(held.activations) <= options["cap_bytes"]
        taken = makespan(schedule, options)
        assert taken >= case["bound"], case
        if case["proved"]:
            gaps.append(taken / case["makespan"] - 1)
    assert statistics.mean(gaps) < 0.02 and max(gaps) < 0.08


# -- the solver itself -------------------------------------------------------------------------------------------------


def solve(**arguments: Any) -> Any:
    pytest.importorskip("ortools", reason='needs OR-tools: pip install "seq1f1b[exact]"')
    from exact_solver import shortest_schedule

    return shortest_schedule(**arguments)


@pytest.mark.parametrize(
    ("counts", "options", "optimum"),
    [  # twice the optima of reference values with F = I = W = 1/2; and formulas that are bounds, too
        ((4, 4, 1, 2), {"cap": 8, "placement": "v"}, 27),
        ((1, 3, 2, 1), {"costs": (2, 3, 4)}, 54),  # one rank is never idle
        ((3, 1, 1, 1), {"costs": (2, 3, 4)}, 3 * 2 + 3 * 3 + 4),  # one unit goes all the way
        ((3, 1, 1, 1), {"costs": (2, 3, 4), "transfer": 7}, 3 * 2 + 3 * 3 + 4 + 4 * 7),
        ((2, 3, 1, 1), {"costs": (1, 1, 1), "cap": 1}, 15),  # one micro-batch at a time: F F I I, then the W of rank 0
        ((4, 4, 1, 1), {}, 3 * 4 + 3),
    ],
)
def test_known_optima(counts: tuple[int, int, int, int], options: dict[str, Any], optimum: int) -> None:
    names = ("num_ranks", "num_microbatches", "num_segments", "stages_per_rank")
    found = solve(**dict(zip(names, counts, strict=True)), options=options, seconds=60)
    found.schedule.check(max_live_units=options.get("cap"))
    assert (found.makespan, found.bound, found.proved) == (optimum, optimum, True)
    assert makespan(found.schedule, {"costs": (1, 1, 1)} | options) == optimum


def rank_orders(left: list[Unit]) -> Iterator[list[Unit]]:
    """Every order of the units of one rank that keeps the rules between units of one stage."""
    if not left:
        yield []
    for unit in left:
        earlier = {"F": "", "I": "F", "W": "FI"}[unit.kind]
        if not any(
            other[1:3] == unit[1:3]
            and (
                (other.kind in earlier and (unit.kind != "W" or other.segment == unit.segment))
                or (other.kind == unit.kind == "F" and other.segment < unit.segment)
                or (other.kind == unit.kind == "I" and other.segment > unit.segment)
            )
            for other in left
        ):
            yield from ([unit, *rest] for rest in rank_orders([other for other in left if other != unit]))


@pytest.mark.parametrize(("P", "M", "k", "v"), [(2, 2, 1, 1), (3, 2, 1, 1), (2, 1, 2, 1), (3, 1, 2, 1), (2, 1, 1, 2)])
def test_no_order_at_all_is_shorter(P: int, M: int, k: int, v: int) -> None:
    """Against every order there is, micro-batches out of turn included."""
    rng = random.Random(P * 100 + M * 10 + k)
    counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
    for cap in (v * k, v * k * M):
        costs = [[[rng.randint(1, 9) for _ in range(k)] for _ in range(P * v)] for _ in range(3)]
        options = {"costs": costs, "transfer": rng.randint(0, 4), "cap": cap, "placement": "v"}
        found = solve(**counts, options=options, seconds=60)
        units = [Unit(*unit) for unit in itertools.product("FIW", range(P * v), range(M), range(k))]
        place = found.schedule.rank_of_stage
        shortest = float("inf")
        for orders in itertools.product(
            *(list(rank_orders([unit for unit in units if place[unit.stage] == rank])) for rank in range(P))
        ):
            schedule = Schedule(orders)
            try:
                schedule.check(max_live_units=cap)
            except ScheduleError:
                continue
            shortest = min(shortest, makespan(schedule, options))
        assert (found.makespan, found.proved) == (shortest, True)
        assert makespan(build_schedule("auto", **counts, options=options), options) >= shortest
