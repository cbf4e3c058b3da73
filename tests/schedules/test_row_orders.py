"""Do orders hold whose micro-batches, rows, have each its own number of segments?"""

import itertools
import pickle

import pytest
from orders import small_schedule

from seq1f1b import Costs, Links, Schedule, ScheduleError, Unit, build_schedule
from seq1f1b.schedule import Family, StepMemory, families
from seq1f1b.view.page import memory_changes

ONE_STAGE = ["seq1f1b", "1f1b", "gpipe", "terapipe", "kfkb", "seq-zb-h1", "seq-zb-h2"]
V_SHAPED = ["seq-zbv", "seq-v-half", "seq-v-min"]
TAKE_ROWS = [*ONE_STAGE, *V_SHAPED, "auto"]


def cells(rows: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(m, s) for m, count in enumerate(rows) for s in range(count)]


@pytest.mark.parametrize("name", TAKE_ROWS)
def test_equal_rows_are_todays_order(name: str) -> None:
    for num_ranks, M, k in itertools.product((1, 2, 3, 4), (1, 2, 4, 7), (1, 2, 5)):
        order, plain = (small_schedule(name, num_ranks, M, segments) for segments in ((k,) * M, k))
        assert (order is None) == (plain is None)
        if order is not None and plain is not None:
            assert order.ranks == plain.ranks and (order.rows, plain.rows) == ((k,) * M, None)
            assert order.simulate().makespan == plain.simulate().makespan
            assert pickle.loads(pickle.dumps(order)) == order and pickle.loads(pickle.dumps(order)).rows == order.rows


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
