"""Do orders hold whose micro-batches, rows, have each its own number of segments?"""

import itertools
import pickle
import random

import pytest

from seq1f1b import Costs, Links, Schedule, ScheduleError, Unit, build_schedule
from seq1f1b.schedule import Family, StepMemory, families
from seq1f1b.view.page import memory_changes

ONE_STAGE = ["seq1f1b", "1f1b", "gpipe", "terapipe", "kfkb", "seq-zb-h1", "seq-zb-h2"]
V_SHAPED = ["seq-zbv", "seq-v-half", "seq-v-min"]
TAKE_ROWS = [*ONE_STAGE, *V_SHAPED, "auto"]
ROWS = [rows for M in (1, 2, 3, 4) for rows in itertools.product((1, 2, 4), repeat=M)]


def built(name: str, num_ranks: int, rows: tuple[int, ...]) -> Schedule | None:
    family = next(family for family in families() if family.name == name)
    counts = {
        "num_ranks": num_ranks,
        "num_microbatches": len(rows),
        "num_segments": rows,
        "stages_per_rank": family.stages_per_rank,
    }
    return None if family.broken_rule(**counts) else build_schedule(name, **counts)


def cells(rows: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(m, s) for m, count in enumerate(rows) for s in range(count)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*ONE_STAGE, *V_SHAPED])
def test_every_small_order_holds(name: str, num_ranks: int) -> None:
    num_built = 0
    for rows in ROWS:
        order = built(name, num_ranks, rows)
        if order is None:
            continue
        num_built += 1
        assert order.segments_of == rows
        v, longest = order.num_stages // num_ranks, max(rows)
        cap = {"seq1f1b": num_ranks - 1 + longest, "seq-zb-h1": num_ranks - 1 + longest}.get(name)
        order.check(max_live_units=cap or {"1f1b": num_ranks * longest}.get(name))
        splits = any(unit.kind == "W" for unit in order.ranks[0])
        expected = {
            Unit(kind, stage, *cell)
            for kind in ("FIW" if splits else "FB")
            for stage in range(order.num_stages)
            for cell in cells(rows)
        }
        assert {unit for rank in order.ranks for unit in rank} == expected
        assert order.simulate().busy == (3.0 * v * sum(rows),) * num_ranks
    assert num_built >= len(ROWS) // 3


@pytest.mark.parametrize("name", TAKE_ROWS)
def test_equal_rows_are_todays_order(name: str) -> None:
    for num_ranks, M, k in itertools.product((1, 2, 3, 4), (1, 2, 4, 7), (1, 2, 5)):
        order = built(name, num_ranks, (k,) * M)
        if order is not None:
            v = order.num_stages // num_ranks
            plain = build_schedule(name, num_ranks=num_ranks, num_microbatches=M, num_segments=k, stages_per_rank=v)
            assert order.ranks == plain.ranks and (order.rows, plain.rows) == ((k,) * M, None)
            assert order.simulate().makespan == plain.simulate().makespan
            assert pickle.loads(pickle.dumps(order)) == order and pickle.loads(pickle.dumps(order)).rows == order.rows


def test_auto_is_never_longer_than_a_family() -> None:
    """Under costs of every row, and caps in units or bytes; and it keeps the caps."""
    rng = random.Random(2)
    for _ in range(25):
        P, v = rng.randint(1, 3), rng.randint(1, 2)
        rows = tuple(rng.choice((1, 1, 2, 4)) for _ in range(rng.randint(1, 5)))

        def table(rows: tuple[int, ...] = rows, num_stages: int = P * v) -> list[list[list[int]]]:
            return [[[rng.randint(1, 9) for _ in range(count)] for count in rows] for _ in range(num_stages)]

        costs, sizes = [table() for _ in "FIW"], table()
        on_rank = [[r] if v == 1 else [r, 2 * P - 1 - r] for r in range(P)]
        largest = [max(sum(sum(sizes[s][m]) for s in own) for m in range(len(rows))) for own in on_rank]
        counts = {"num_ranks": P, "num_microbatches": len(rows), "num_segments": rows, "stages_per_rank": v}
        options = {"costs": costs, "unit_bytes": sizes, "cap_bytes": [2 * n for n in largest], "placement": "v"}
        order = build_schedule("auto", **counts, options=options)
        held = order.peak_memory(StepMemory(activations=sizes)).activations
        assert all(peak <= 2 * most for peak, most in zip(held, largest, strict=True))
        with pytest.raises(ScheduleError, match=rf"cap_bytes >= {largest[0]} on rank 0"):
            build_schedule("auto", **counts, options=options | {"cap_bytes": [n - 1 for n in largest]})
        given = Costs(costs[0], whole(costs), weight=costs[2], input=costs[1])
        free = build_schedule("auto", **counts, options={"costs": costs, "placement": "v" if v == 2 else "loop"})
        best = free.replace(prefetch=64).simulate(given).makespan
        for name in (*ONE_STAGE, *V_SHAPED):
            named = built(name, P, rows)
            if named is not None and named.num_stages == P * v:
                assert best <= named.replace(prefetch=64).simulate(given).makespan * (1 + 1e-9)
        units = build_schedule("auto", **counts, options={"cap": v * max(rows)})
        units.check(max_live_units=v * max(rows))


def whole(costs: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """I and W of every unit together."""
    return [
        [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(*stages, strict=True)]
        for stages in zip(costs[1], costs[2], strict=True)
    ]


def test_costs_of_every_row() -> None:
    rows, lengths = (3, 1, 2), ((4, 3, 3), (9,), (1, 2))
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=3, num_segments=rows)
    forward = [[[float(size) for size in row] for row in lengths] for _ in range(2)]
    backward = [[[2.0 * size for size in row] for row in lengths] for _ in range(2)]
    run = order.simulate(Costs(forward, backward), memory=StepMemory(activations=forward_bytes(lengths)))
    assert run.busy == (3.0 * 22, 3.0 * 22)
    assert run.memory is not None
    assert run.memory.activations == tuple(8 * peak for peak in order.peak_tokens(lengths))
    starts = {unit: (start, end) for unit, start, end in run.timeline[0]}
    for (m, s), size in zip(cells(rows), itertools.chain.from_iterable(lengths), strict=True):
        start, end = starts[Unit("F", 0, m, s)]
        assert end - start == pytest.approx(size)
    message = [[8 * size for size in row] for row in lengths]
    slow = order.simulate(Costs(forward, backward, links=Links(bandwidth=8.0, message_bytes=message)))
    assert slow.makespan > run.makespan
    given = StepMemory(activations=forward_bytes(lengths), kv=7)
    memory = order.simulate(Costs(forward, backward, links=Links(message_bytes=message)), memory=given)
    assert memory.memory is not None and max(memory.memory.kv) <= 3 * 7
    changes = [by for _, by, name in memory_changes(memory)[0] if name == "activations"]
    assert max(itertools.accumulate(changes)) == memory.memory.activations[0]
    with pytest.raises(ValueError, match=r"forward must be a number or hold 2 x 3 x \(3, 1, 2\) values, one of each"):
        order.simulate(Costs([[1.0, 1.0, 1.0]] * 2))
    with pytest.raises(ValueError, match=r"segment_sizes must be a number or hold 3 x \(3, 1, 2\) values"):
        order.peak_tokens([1, 2, 3])


def forward_bytes(lengths: tuple[tuple[int, ...], ...]) -> list[list[list[int]]]:
    return [[[8 * size for size in row] for row in lengths] for _ in range(2)]


def test_costs_of_a_split_order() -> None:
    """Rows of equal k may differ in length: W goes where the costs of each leave bubbles."""
    rows = (2, 2, 2, 2, 2)
    costs = [[[[1.0 + m, 2.0] for m in range(5)] for _ in range(3)] for _ in "FIW"]
    order = build_schedule(
        "seq-zb-h1", num_ranks=3, num_microbatches=5, num_segments=rows, options={"costs": costs, "cap": 6}
    )
    plain = build_schedule("seq-zb-h1", num_ranks=3, num_microbatches=5, num_segments=2, options={"cap": 6})
    order.check(max_live_units=6)
    forward, backward = costs[0], [[[2 * cost for cost in row] for row in stage] for stage in costs[0]]
    text = Schedule.from_text(plain.to_text())  # the same units, as an order of rows, for the same costs
    times = [each.simulate(durations=durations(each, forward)).makespan for each in (order, text)]
    assert times[0] <= times[1] * (1 + 1e-9)
    assert order.simulate(Costs(forward, backward)).makespan == pytest.approx(times[0])


def durations(order: Schedule, costs: list[list[list[float]]]) -> list[list[float]]:
    return [[costs[u.stage][u.microbatch][u.segment] for u in rank] for rank in order.ranks]


def test_a_text_has_the_segments_that_it_names() -> None:
    order = Schedule.from_text("F0.0 F0.1 F1.0 B0.1 B0.0 B1.0")
    assert (order.segments_of, order.num_segments, order.rows) == ((2, 1), 2, (2, 1))
    order.check()
    with pytest.raises(ScheduleError, match=r"B1\.1 is missing"):
        Schedule.from_text("F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.0").check()
    with pytest.raises(ScheduleError, match=r"F1\.0 is missing"):
        Schedule.from_text("F0.0 B0.0 F2.0 F2.1 B2.1 B2.0").check()
    with pytest.raises(ValueError, match="all micro-batches alike, and micro-batch 1 has 1 of 2"):
        order.to_csv()
    equal = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=(2, 2))
    assert Schedule.from_csv(equal.to_csv(), num_segments=2) == equal


@pytest.mark.parametrize("family", [f for f in families() if f.name not in TAKE_ROWS], ids=lambda f: f.name)
def test_a_family_that_needs_one_k_says_so(family: Family) -> None:
    M = 2 if family.name == "hanayo" else 4
    counts = {"num_ranks": 2, "num_microbatches": M, "stages_per_rank": family.stages_per_rank}
    with pytest.raises(ScheduleError, match=rf"{family.name} needs (the same k for all micro-batches|k = 1 )"):
        build_schedule(family.name, num_segments=[1, 2, 1, 1][:M], **counts)
    build_schedule(family.name, num_segments=[1 if "k = 1" in family.validity else 2] * M, **counts)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 2], "num_segments holds 2 values, must be one number or one for each of 3 micro-batches"),
        ([1, 0, 2], r"num_segments\[1\] is 0, must be at least 1"),
        ([1, -3, 2], r"num_segments\[1\] is -3"),
        ([1, 2**40, 2], "num_segments holds a number that is too large: 1099511627776"),
        ([], "num_segments holds 0 values"),
        ([2**30] * 3, "units"),
    ],
)
def test_bad_rows(rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule("seq1f1b", num_ranks=2, num_microbatches=3, num_segments=rows)
