"""Does the simulation give the makespans of the formulas, and those of a second one that works backwards?"""

import itertools
import math
import random
from functools import cache

import pytest
from orders import random_order

from seq1f1b import Schedule, Unit, _core, build_schedule

GRID = list(itertools.product(range(1, 9), range(1, 9), (1, 2, 3, 4, 8)))

# -- formulas: F = 1 and B = 2 per segment, M k segments of work, P - 1 of them to fill and drain ----------------------


@pytest.mark.parametrize("name", ["seq1f1b", "gpipe"])
def test_makespan_and_peak_over_segments(name: str) -> None:
    for P, M, k in GRID:
        if (M >= P) if name == "seq1f1b" else (M * k >= P):
            simulation = build_schedule(name, num_ranks=P, num_microbatches=M, num_segments=k).simulate()
            assert simulation.makespan == 3 * M * k + 3 * (P - 1)
            assert max(simulation.peak) == (min(P - 1 + k, M * k) if name == "seq1f1b" else M * k)
            assert simulation.busy == (3.0 * M * k,) * P
            assert simulation.bubble == (3.0 * (P - 1),) * P


def test_makespan_and_peak_of_1f1b() -> None:
    for P, M in itertools.product(range(1, 9), repeat=2):
        if M >= P:
            simulation = build_schedule("1f1b", num_ranks=P, num_microbatches=M).simulate()
            assert simulation.makespan == 3 * M + 3 * (P - 1)
            assert simulation.peak == tuple(P - p for p in range(P))


def test_segments_divide_the_bubble() -> None:
    """The work of a micro-batch stays the same: the bubble is 1 / k of that of 1F1B."""
    plain = build_schedule("1f1b", num_ranks=4, num_microbatches=8).simulate(1.0, 2.0)
    for k in (2, 4, 8):
        schedule = build_schedule("seq1f1b", num_ranks=4, num_microbatches=8, num_segments=k)
        assert schedule.simulate(1 / k, 2 / k).bubble == tuple(bubble / k for bubble in plain.bubble)


@pytest.mark.parametrize(("transfer", "bubble"), [(0.0, 9.0), (0.25, 14.5), (0.5, 20.0)])
def test_transfers_in_1f1b(transfer: float, bubble: float) -> None:
    """Known values for P = 4, M = 12, whose receivers have one place more than they need."""
    simulation = build_schedule("1f1b", num_ranks=4, num_microbatches=12).simulate(transfer=transfer)
    assert simulation.makespan - 36 == bubble


# -- small cases by hand -----------------------------------------------------------------------------------------------


def test_timeline_of_two_ranks() -> None:
    simulation = Schedule.from_text("F0.0 B0.0\nF0.0 B0.0").simulate(1.0, 2.0, transfer=0.5)
    assert simulation.timeline == (
        ((Unit("F", 0, 0, 0), 0.0, 1.0), (Unit("B", 0, 0, 0), 5.0, 7.0)),
        ((Unit("F", 1, 0, 0), 1.5, 2.5), (Unit("B", 1, 0, 0), 2.5, 4.5)),
    )
    assert simulation.makespan == 7.0
    assert simulation.span == (7.0, 3.0)
    assert simulation.busy == (3.0, 3.0)
    assert simulation.wait == (4.0, 1.5)
    assert simulation.bubble == (4.0, 4.0)
    assert simulation.bubble_ratio == 8 / 14


def test_a_link_passes_one_message_after_the_other() -> None:
    """Two messages of 8 bytes at 2 bytes per second leave at 1 and 2, pass until 5 and 9, and take 0.5 to arrive."""
    simulation = Schedule.from_text("F0.0 F1.0\nF0.0 F1.0").simulate(transfer=0.5, bandwidth=2.0, message_bytes=8)
    assert [start for _, start, _ in simulation.timeline[1]] == [5.5, 9.5]


def test_bytes_of_each_segment() -> None:
    simulation = Schedule.from_text("F0.0 F0.1\nF0.0 F0.1").simulate(bandwidth=1.0, message_bytes=[3, 1])
    assert [start for _, start, _ in simulation.timeline[1]] == [4.0, 5.0]


def test_a_send_takes_the_senders_time() -> None:
    simulation = Schedule.from_text("F0.0 F1.0\nF0.0 F1.0").simulate(send=0.25)
    assert [start for _, start, _ in simulation.timeline[0]] == [0.0, 1.25]
    assert [start for _, start, _ in simulation.timeline[1]] == [1.25, 2.5]


def test_a_sender_without_credit_waits() -> None:
    """The receiver is ten times slower and has prefetch + 1 places: the sender runs ahead by that much, no further."""
    schedule = Schedule.from_text("F0.0 F1.0 F2.0 F3.0 F4.0\nF0.0 F1.0 F2.0 F3.0 F4.0")
    for prefetch, starts in {
        0: [0.0, 1.0, 11.0, 21.0, 31.0],
        1: [0.0, 1.0, 2.0, 11.0, 21.0],
        9: [0.0, 1.0, 2.0, 3.0, 4.0],
    }.items():
        simulation = schedule.simulate([[1.0], [10.0]], prefetch=prefetch)
        assert [start for _, start, _ in simulation.timeline[0]] == starts
        assert simulation.makespan == 51.0


def test_split_backward() -> None:
    schedule = Schedule.from_text("[0]F0.0 [1]F0.0 [1]I0.0 [0]I0.0 [1]W0.0 [0]W0.0")
    starts = [start for _, start, _ in schedule.simulate(1.0, 4.0, weight=1.0).timeline[0]]
    assert starts == [0.0, 1.0, 2.0, 5.0, 8.0, 9.0]
    assert schedule.simulate(1.0, 4.0).makespan == 2 * 5.0
    with pytest.raises(ValueError, match="weight is more than backward, of which it is a part"):
        schedule.simulate(1.0, 4.0, weight=5.0)


def test_measured_durations_are_replayed() -> None:
    rng = random.Random(3)
    schedule = build_schedule("seq1f1b", num_ranks=3, num_microbatches=4, num_segments=2)
    durations = [[rng.random() for _ in order] for order in schedule.ranks]
    simulation = schedule.simulate(durations=durations, transfer=0.1)
    for track, order, expected in zip(simulation.timeline, schedule.ranks, durations, strict=True):
        assert tuple(unit for unit, _, _ in track) == order
        assert [end - start for _, start, end in track] == pytest.approx(expected)
    per_unit = schedule.simulate([[1, 2], [3, 4], [5, 6]], 7.0)
    again = schedule.simulate(durations=[[end - start for _, start, end in track] for track in per_unit.timeline])
    assert again.timeline == per_unit.timeline


# -- against a simulation that asks for each time backwards from its causes --------------------------------------------


def reference(
    schedule: Schedule,
    seconds: list[list[float]],
    latency: float,
    per_byte: float,
    sizes: list[int],
    send: float,
    prefetch: int,
) -> tuple[list[list[tuple[float, float]]], list[float]]:
    """Start and end of every unit, and the time that each rank waits."""
    edges = _core.program_edges(_core.program_lower(schedule.handle, prefetch))
    places = {(source, destination): count for source, destination, _, _, _, count, _ in edges}
    where = {unit: (rank, i) for rank, order in enumerate(schedule.ranks) for i, unit in enumerate(order)}
    has_backward = any(unit.kind != "F" for unit in where)

    def target(unit: Unit) -> tuple[int, int] | None:
        step = {"F": 1, "B": -1, "I": -1}.get(unit.kind)
        edge = (unit.stage, unit.stage + step) if step else None
        return edge if edge in places else None

    def source(unit: Unit) -> Unit | None:
        if unit.kind == "W":
            return None
        stage = unit.stage + (-1 if unit.kind == "F" else 1)
        if (stage, unit.stage) not in places:
            return None
        kinds = ["F"] if unit.kind == "F" else ["B", "I"]
        return next(u for kind in kinds if (u := Unit(kind, stage, *unit[2:])) in where)

    sent = {edge: [u for order in schedule.ranks for u in order if target(u) == edge] for edge in places}
    last = "BW" if has_backward else "F"
    frees = {  # in the order of the receiver
        (a, b): [u for u in schedule.ranks[schedule.rank_of_stage[b]] if u.stage == b and u.kind in last]
        for a, b in places
    }

    @cache
    def start(unit: Unit) -> float:
        rank, i = where[unit]
        message = source(unit)
        return max(
            left(schedule.ranks[rank][i - 1]) if i > 0 else 0.0,
            passed(message) + latency if message is not None else 0.0,
        )

    @cache
    def end(unit: Unit) -> float:
        rank, i = where[unit]
        return start(unit) + seconds[rank][i]

    @cache
    def left(unit: Unit) -> float:
        """When its rank is through with it: at once, or when the message could be put into a place."""
        edge = target(unit)
        if edge is None:
            return end(unit)
        n = sent[edge].index(unit)
        credit = left(frees[edge][n - places[edge]]) if n >= places[edge] else 0.0
        return max(end(unit), credit) + send

    @cache
    def passed(unit: Unit) -> float:
        edge = target(unit)
        n = sent[edge].index(unit)
        return max(left(unit), passed(sent[edge][n - 1]) if n > 0 else 0.0) + sizes[unit.segment] * per_byte

    for order in schedule.ranks:  # from the first on, so that no recursion is deep
        for unit in order:
            left(unit)
    times = [[(start(unit), end(unit)) for unit in order] for order in schedule.ranks]
    waits = [
        left(order[-1]) - sum(row) - send * sum(target(u) is not None for u in order)
        for order, row in zip(schedule.ranks, seconds, strict=True)
    ]
    return times, waits


def test_random_orders_and_costs() -> None:
    rng = random.Random(4)
    for _ in range(250):
        schedule = random_order(rng)
        seconds = [[rng.choice([0.0, rng.random(), 5 * rng.random()]) for _ in order] for order in schedule.ranks]
        latency, send = rng.choice([0.0, rng.random()]), rng.choice([0.0, 0.3 * rng.random()])
        bandwidth = rng.choice([None, 1 + 20 * rng.random()])
        sizes = [rng.randint(0, 30) for _ in range(schedule.num_segments)]
        prefetch = rng.randint(0, 2)
        simulation = schedule.simulate(
            durations=seconds, transfer=latency, bandwidth=bandwidth, message_bytes=sizes, send=send, prefetch=prefetch
        )
        per_byte = 0.0 if bandwidth is None else 1 / bandwidth
        times, waits = reference(schedule, seconds, latency, per_byte, sizes, send, prefetch)
        for track, expected in zip(simulation.timeline, times, strict=True):
            assert [pair for _, *pair in track] == [pytest.approx(pair, rel=1e-12, abs=1e-12) for pair in expected]
        ends = [row[-1][1] for row in times]
        assert simulation.makespan == pytest.approx(max(ends) - min(row[0][0] for row in times), rel=1e-12)
        assert simulation.span == pytest.approx(
            [end - row[0][0] for end, row in zip(ends, times, strict=True)], rel=1e-12
        )
        assert simulation.wait == pytest.approx(waits, rel=1e-9, abs=1e-9)


# -- bad costs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("argument", "name"),
    [("forward", "the duration of a unit"), ("transfer", "the latency of a transfer"), ("send", "the time of a send")],
)
def test_costs_that_are_no_time(argument: str, name: str, value: float) -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match=f"{name} is -?(1|nan|inf), must be finite and at least 0"):
        schedule.simulate(**{argument: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [[1.0]]}, "forward must be a number or hold 2 stages of 3 segments each"),
        ({"backward": [[1.0, 1.0, 1.0], [1.0, 1.0]]}, "backward must be a number or hold 2 stages of 3 segments each"),
        ({"durations": [[1.0]]}, "durations hold 1 ranks, the schedule has 2"),
        ({"durations": [[1.0], [1.0]]}, "durations of one rank holds 1 values, must hold 12"),
        ({"message_bytes": [1, 2]}, "message_bytes holds 2 values, must hold 3"),
        ({"message_bytes": -1}, "message_bytes of segment 0 is -1, must be at least 0"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0, must be above 0"),
        ({"segment_sizes": [1, 2]}, "segment_sizes holds 2 values, must hold 3"),
        ({"prefetch": -1}, "prefetch is -1, must be at least 0"),
    ],
)
def test_costs_of_the_wrong_shape(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        build_schedule("1f1b", num_ranks=2, num_microbatches=2, num_segments=3).simulate(**arguments)
    assert str(error.value) == message
