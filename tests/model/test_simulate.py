"""Does the simulation give the makespans of the formulas, and the times and bytes of plain Python from the rules?"""

import itertools
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import pytest
from flat_costs import simulation_of
from orders import random_order, with_moves, with_recomputation

from seq1f1b import _C, Costs, Links, Noise, Schedule, Unit, build_schedule
from seq1f1b.schedule import PeakMemory, StepMemory
from seq1f1b.view import style

# -- small cases by hand -----------------------------------------------------------------------------------------------


def test_timeline_of_two_ranks() -> None:
    simulation = Schedule.from_text("F0.0 B0.0\nF0.0 B0.0").simulate(Costs(1.0, 2.0, links=Links(latency=0.5)))
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


SPLIT = "[0]F0.0 [1]F0.0 [1]I0.0 [0]I0.0 [1]W0.0 [0]W0.0"


def test_a_split_backward_takes_as_long_as_a_whole_one() -> None:
    schedule = Schedule.from_text(SPLIT)
    assert schedule.simulate(Costs(1.0, 4.0)).makespan == 2 * 5.0
    with pytest.raises(ValueError, match="weight is more than backward, of which it is a part"):
        schedule.simulate(Costs(1.0, 4.0, weight=5.0))
    # I has seconds of its own where I and W together are not B; a whole B of the same order takes ``backward``.
    run = Schedule.from_text("F0.0 F1.0 I0.0 W0.0 B1.0").simulate(Costs(1.0, 4.0, weight=5.0, input=2.5))
    assert list(run.start[0]) == [0.0, 1.0, 2.0, 4.5, 9.5]


# -- against a simulation that asks for each time backwards from its causes --------------------------------------------


class Reference:
    """The rules of times in plain Python: who waits for whom, with the places of the lowered program."""

    def __init__(self, schedule: Schedule, prefetch: int) -> None:
        self.schedule = schedule
        self.where = {unit: (rank, i) for rank, order in enumerate(schedule.ranks) for i, unit in enumerate(order)}
        last_readers = "BW" if any(unit.kind != "F" for unit in self.where) else "F"
        program = _C.program_lower(schedule.handle, prefetch)
        self.places = {(a, b): num_places for a, b, _, _, _, num_places, _ in _C.program_edges(program)}
        self.edges = list(self.places)
        self.sent = {
            edge: [u for order in schedule.ranks for u in order if self.target(u) == edge] for edge in self.edges
        }
        self.frees = {  # units that free a place of the edge, in the order of its receiver
            (a, b): [u for u in schedule.ranks[schedule.rank_of_stage[b]] if u.stage == b and u.kind in last_readers]
            for a, b in self.edges
        }

    def target(self, unit: Unit) -> tuple[int, int] | None:
        """The edge on which its message leaves."""
        step = {"F": 1, "B": -1, "I": -1}.get(unit.kind, 0)
        edge = (unit.stage, unit.stage + step)
        return edge if edge in self.edges else None

    def source(self, unit: Unit) -> Unit | None:
        """The unit whose message it waits for."""
        stage = unit.stage + {"F": -1, "B": 1, "I": 1}.get(unit.kind, 0)
        if (stage, unit.stage) not in self.edges:
            return None
        kinds = ["F"] if unit.kind == "F" else ["B", "I"]
        return next(u for kind in kinds if (u := Unit(kind, stage, *unit[2:])) in self.where)

    def message_scale(self, scales: dict[tuple[int, int], list[float]], step: int, unit: Unit) -> float:
        edge = self.target(unit)
        assert edge is not None
        return scales[edge][step * len(self.sent[edge]) + self.sent[edge].index(unit)]

    def simulate(
        self,
        seconds: list[list[list[float]]],
        latency: list[float],
        per_byte: list[float],
        sizes: list[int],
        send: float,
        optimizer: list[float] | None = None,
        sync: bool = False,
        scales: dict[tuple[int, int], list[float]] | None = None,
        tier: list[list[float]] | None = None,
    ) -> tuple[list[list[list[tuple[float, float]]]], list[float]]:
        """Start and end of every unit, [step][rank][i], for seconds [step][rank][i]; the first step's waits.

        Latency and seconds per byte of the edges between stages s and s + 1 are those at [s]; ``scales`` multiply
        both for every message of an edge, counted over all steps."""
        ranks, where = self.schedule.ranks, self.where
        moves = [[unit for unit in order if unit.kind in "OL"] for order in ranks]

        @cache
        def moved(step: int, unit: Unit) -> float:
            """When the tier is through with this O or L, one of a rank after the other."""
            mine = moves[where[unit][0]]
            i = mine.index(unit)
            before = moved(step, mine[i - 1]) if i else moved(step - 1, mine[-1]) if step else 0.0
            return max(end(step, unit), before) + (tier[unit.stage][unit.segment] if tier else 0.0)

        def at_tier(step: int, unit: Unit) -> float:
            """When what the unit reads, or has to be gone, is there."""
            awaited = unit._replace(kind={"A": "O", "B": "L", "I": "L"}.get(unit.kind, "-"))
            return moved(step, awaited) if awaited in where else 0.0

        def scale(step: int, unit: Unit) -> float:
            return self.message_scale(scales, step, unit) if scales else 1.0

        def arrived(step: int, unit: Unit) -> float:
            edge = self.target(unit)
            assert edge is not None
            return passed(step, unit) + latency[min(edge)] * scale(step, unit)

        @cache
        def begin(step: int, rank: int) -> float:
            """When the rank begins the step: posts its places, and may run its first unit."""
            if step == 0:
                return 0.0
            through = [left(step - 1, ranks[r][-1]) for r in (range(len(ranks)) if sync else [rank])]
            return max(through) + (optimizer or [0.0] * len(ranks))[rank]

        @cache
        def start(step: int, unit: Unit) -> float:
            rank, i = where[unit]
            message = self.source(unit)
            return max(
                left(step, ranks[rank][i - 1]) if i > 0 else begin(step, rank),
                arrived(step, message) if message is not None else 0.0,
                at_tier(step, unit),
            )

        @cache
        def end(step: int, unit: Unit) -> float:
            rank, i = where[unit]
            return start(step, unit) + seconds[step][rank][i]

        @cache
        def left(step: int, unit: Unit) -> float:
            """When its rank is through with it: at once, or when the message could be put into a place."""
            edge = self.target(unit)
            if edge is None:
                return end(step, unit)
            n = self.sent[edge].index(unit) - self.places[edge]
            credit = left(step, self.frees[edge][n]) if n >= 0 else begin(step, self.schedule.rank_of_stage[edge[1]])
            return max(end(step, unit), credit) + send

        @cache
        def passed(step: int, unit: Unit) -> float:
            edge = self.target(unit)
            assert edge is not None
            n = self.sent[edge].index(unit)
            before = passed(step, self.sent[edge][n - 1]) if n > 0 else passed_last(step - 1, edge)
            return max(left(step, unit), before) + sizes[unit.segment] * per_byte[min(edge)] * scale(step, unit)

        def passed_last(step: int, edge: tuple[int, int]) -> float:
            return passed(step, self.sent[edge][-1]) if step >= 0 else 0.0

        times = []
        for step in range(len(seconds)):
            for order in ranks:  # from the first on, so that no recursion is deep
                for unit in order:
                    left(step, unit)
            times.append([[(start(step, unit), end(step, unit)) for unit in order] for order in ranks])
        waits = [
            left(0, order[-1]) - sum(row) - send * sum(self.target(u) is not None for u in order)
            for order, row in zip(ranks, seconds[0], strict=True)
        ]
        return times, waits


class RandomCase:
    """A random order with random costs: the arguments of ``simulate``, flat, and what the reference makes of them."""

    def __init__(self, rng: random.Random, *, recomputes: bool = False, moves: bool = False) -> None:
        self.schedule = with_recomputation(random_order(rng), rng) if recomputes else random_order(rng)
        if moves:
            self.schedule = with_moves(self.schedule, rng)
        S, k = self.schedule.num_stages, self.schedule.num_segments

        def costs(scale: float) -> list[list[float]]:
            return [
                [rng.choice([0.0, scale * rng.random(), 5 * scale * rng.random()]) for _ in range(k)] for _ in range(S)
            ]

        edges = range(S - 1)
        latency, send = rng.choice([0.0, rng.random()]), rng.choice([0.0, 0.3 * rng.random()])
        bandwidth = rng.choice([None, 1 + 20 * rng.random()])
        if rng.random() < 0.5:  # edges that are not alike
            latency = [rng.choice([0.0, rng.random()]) for _ in edges]
        if rng.random() < 0.5:
            bandwidth = [rng.choice([math.inf, 1 + 20 * rng.random()]) for _ in edges]
        sizes = [rng.randint(0, 30) for _ in range(k)]
        prefetch = rng.randint(0, 2)
        self.schedule = self.schedule.replace(prefetch=prefetch)
        self.arguments = {
            "latency": latency, "bandwidth": bandwidth, "message_bytes": sizes, "send": send,
        }  # fmt: skip
        rates = bandwidth if isinstance(bandwidth, list) else [bandwidth or math.inf] * (S - 1)
        latencies = latency if isinstance(latency, list) else [latency] * (S - 1)
        self.transfers = (latencies, [1 / rate for rate in rates], sizes, send)
        if rng.random() < 0.5:
            self.seconds = [[rng.choice([0.0, rng.random(), 5 * rng.random()]) for _ in o] for o in self.schedule.ranks]
            self.arguments["durations"] = self.seconds
        else:
            forward, inputs, weight = costs(1.0), costs(1.0), costs(0.5)
            backward = [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weight, strict=True)]
            table = {"F": forward, "B": backward, "W": weight}
            table["I"] = [[b - w for b, w in zip(*rows, strict=True)] for rows in zip(backward, weight, strict=True)]
            self.arguments |= {"forward": forward, "backward": backward, "weight": weight}
            table["R"] = forward
            table |= dict.fromkeys("OAL", [[0.0] * k] * S)
            if recomputes and rng.random() < 0.5:
                table["R"] = self.arguments["recompute"] = costs(1.0)
            if moves and rng.random() < 0.5:
                table["O"] = self.arguments["move_out"] = costs(0.3)
                table["L"] = self.arguments["move_in"] = costs(0.3)
            self.seconds = [[table[u.kind][u.stage][u.segment] for u in order] for order in self.schedule.ranks]
        self.tier = costs(1.0) if moves else None
        if moves:
            self.arguments["tier"] = self.tier
        self.reference = Reference(self.schedule, prefetch)


def close(value: object) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def test_random_orders_and_costs() -> None:
    rng = random.Random(4)
    for number in range(450):
        case = RandomCase(rng, recomputes=number >= 250 and number % 2 == 0, moves=number >= 350)
        simulation = case.schedule.simulate(**simulation_of(case.arguments))
        (times,), waits = case.reference.simulate([case.seconds], *case.transfers, tier=case.tier)
        for track, expected in zip(simulation.timeline, times, strict=True):
            assert [pair for _, *pair in track] == [close(list(pair)) for pair in expected]
        ends = [row[-1][1] for row in times]
        assert simulation.makespan == close(max(ends) - min(row[0][0] for row in times))
        assert simulation.span == close(tuple(end - row[0][0] for end, row in zip(ends, times, strict=True)))
        assert simulation.busy == close(tuple(map(sum, case.seconds)))
        assert simulation.wait == close(tuple(waits))


# -- steps in a row, jitter --------------------------------------------------------------------------------------------


def splitmix64(state: int) -> Iterator[float]:
    """Numbers in 0 .. 1."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        yield ((z ^ z >> 31) >> 11) / 2**53


def test_random_steps_in_a_row() -> None:
    rng = random.Random(5)
    for _ in range(60):
        case = RandomCase(rng)
        steps, sync, jitter, seed = rng.randint(2, 4), rng.random() < 0.5, rng.choice([0.0, 0.3]), rng.getrandbits(64)
        optimizer = [rng.random() for _ in case.schedule.ranks]
        draws = [splitmix64((seed + rank * 0xD1342543DE82EF95) % 2**64) for rank in range(case.schedule.num_ranks)]
        seconds = [
            [
                [s * (1 + jitter * (2 * next(draw) - 1)) for s in row]
                for draw, row in zip(draws, case.seconds, strict=True)
            ]
            for _ in range(steps)
        ]
        transfer_jitter, P = rng.choice([0.0, 0.8]), case.schedule.num_ranks
        scales = {}
        for a, b in case.reference.edges:
            stream = splitmix64((seed + (P + 2 * min(a, b) + (b < a)) * 0xD1342543DE82EF95) % 2**64)
            count = steps * len(case.reference.sent[a, b])
            scales[a, b] = [1 + transfer_jitter * (2 * u - 1) for u in itertools.islice(stream, count)]
        times, _ = case.reference.simulate(seconds, *case.transfers, optimizer, sync, scales)
        ends = [max(row[-1][1] for row in step) for step in times]
        noise = {"jitter": jitter, "transfer_jitter": transfer_jitter, "seed": seed}
        arguments = case.arguments | noise | {"steps": steps, "optimizer": optimizer, "optimizer_sync": sync}
        simulation = case.schedule.simulate(**simulation_of(arguments))
        assert simulation.period == close((ends[-1] - ends[0]) / (steps - 1))
        assert simulation.makespan == close(ends[0])
        for start, end, expected in zip(simulation.start, simulation.end, times[0], strict=True):
            assert list(zip(start, end, strict=True)) == [close(pair) for pair in expected]


# -- slack and critical path -------------------------------------------------------------------------------------------


def test_slack_is_what_a_unit_may_take_longer() -> None:
    """By as much the makespan stays; by one more second it takes one more second."""
    rng = random.Random(6)
    for _ in range(40):
        case = RandomCase(rng)
        arguments = case.arguments | {"durations": case.seconds, "transfer_jitter": rng.choice([0.0, 0.5])}
        simulation = case.schedule.simulate(**simulation_of(arguments), critical=True)
        assert simulation.slack is not None
        chosen = rng.sample(list(case.reference.where.values()), min(12, len(case.reference.where)))
        for rank, i in chosen:
            for more in (0.0, 1.0):
                longer = [list(row) for row in case.seconds]
                longer[rank][i] += simulation.slack[rank][i] + more
                makespan = case.schedule.simulate(**simulation_of(arguments | {"durations": longer})).makespan
                assert makespan == close(simulation.makespan + more)


def test_slack_with_a_vocabulary_over_the_ranks() -> None:
    """The statistics of the shards have bytes of their own."""
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2).spread_vocabulary()
    durations = [[1.0] * len(rank) for rank in order.ranks]
    costs = Costs(links=Links(bandwidth=8.0, message_bytes=1, statistics_bytes=20))
    simulation = order.simulate(costs, durations=durations, critical=True)
    assert simulation.slack is not None
    for rank, slack in enumerate(simulation.slack):
        for i, more in itertools.product(range(len(slack)), (0.0, 1.0)):
            longer = [list(row) for row in durations]
            longer[rank][i] += slack[i] + more
            assert order.simulate(costs, durations=longer).makespan == close(simulation.makespan + more)


def test_the_critical_path_alone_takes_the_makespan() -> None:
    """Its units in order of time, without slack; were all others to take no time, nothing would end earlier."""
    rng = random.Random(7)
    for _ in range(80):
        case = RandomCase(rng)
        arguments = case.arguments | {"durations": case.seconds, "transfer_jitter": rng.choice([0.0, 0.5])}
        simulation = case.schedule.simulate(**simulation_of(arguments), critical=True)
        path = simulation.critical_path
        assert simulation.slack is not None and path is not None and len(set(path)) == len(path)
        places = [case.reference.where[unit] for unit in path]
        assert [simulation.slack[rank][i] for rank, i in places] == close([0.0] * len(path))
        starts = [simulation.start[rank][i] for rank, i in places]
        assert starts[0] == 0 and starts == sorted(starts)
        alone = [
            [s if (rank, i) in places else 0.0 for i, s in enumerate(row)] for rank, row in enumerate(case.seconds)
        ]
        makespan = case.schedule.simulate(**simulation_of(arguments | {"durations": alone})).makespan
        assert makespan == close(simulation.makespan)


# -- moves -------------------------------------------------------------------------------------------------------------


def test_moves_by_hand() -> None:
    """Beside each way one unit runs: a tier that takes longer than that is waited for."""
    order = Schedule.from_text("F0.0 F0.1 F0.2 B0.2 B0.1 B0.0").offload()
    assert order.to_text() == "F0.0 O0.0 F0.1 A0.0 F0.2 B0.2 L0.0 B0.1 B0.0\n"
    assert order.simulate(Costs(tier=1.0)).makespan == order.simulate().makespan == 9
    assert order.simulate(Costs(tier=1.5)).wait == (0.5,), "A waits; B takes 2, so the way back is hidden"
    slow = order.simulate(Costs(tier=3.0))
    assert slow.makespan == 12 and slow.wait == (3,)
    assert [start for unit, start, _ in slow.timeline[0] if unit.kind in "AB"] == [4, 5, 7, 10]
    with pytest.raises(ValueError, match="slack is not known where the tier takes time"):
        order.simulate(Costs(tier=1.0), critical=True)
    assert order.simulate(critical=True).slack is not None
    assert order.simulate(Costs(move_out=0.25, move_in=0.5)).makespan == 9.75
    assert order.simulate(Costs(tier=3.0, move_out=0.25)).makespan == 12.25
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="the time of the tier is"):
            order.simulate(Costs(tier=bad))
    with pytest.raises(
        ValueError, match="tier must be a number or hold 1 x 3 values, one of each segment of each stage"
    ):
        order.simulate(Costs(tier=[[1.0]]))
    assert order.simulate(memory=StepMemory(activations=10)).memory.activations == (20,)


# -- bad costs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("argument", "name"),
    [("forward", "the duration of a unit"), ("latency", "the latency of a transfer"), ("send", "the time of a send")],
)
def test_costs_that_are_no_time(argument: str, name: str, value: float) -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match=f"{name} is -?(1|nan|inf), must be finite and at least 0"):
        schedule.simulate(**simulation_of({argument: value}))


OF_UNITS = "must be a number or hold 2 x 3 values, one of each segment of each stage"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [[1.0]]}, f"forward {OF_UNITS}: it holds 1"),
        ({"backward": [1.0, 1.0]}, f"backward {OF_UNITS}: [0] is a number"),
        ({"durations": [[1.0]]}, "durations hold 1 ranks, the schedule has 2"),
        ({"durations": [[1.0], [1.0]]}, "durations of one rank holds 1 values, must hold 12"),
        ({"message_bytes": [1, 2]}, "message_bytes must be a number or hold 3 values, one of each segment: it holds 2"),
        ({"message_bytes": -1}, "message_bytes holds -1 bytes, must be in 0..9223372036854775807"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0, must be above 0"),
        (
            {"latency": []},
            "latency must be a number or hold 1 values, one of each pair of neighbouring stages: it holds 0",
        ),
        ({"latency": [-1.0]}, "the latency of a transfer is -1, must be finite and at least 0"),
        (
            {"transfer_jitter": -0.5},
            "transfer_jitter is -0.5, must be in 0..1: a share of a message's seconds",
        ),
        ({"jitter": 1.5}, "jitter is 1.5, must be in 0..1: a share of a unit's seconds"),
        ({"seed": -1}, "seed is -1, must be at least 0"),
        ({"steps": 0}, "steps is 0, must be at least 1"),
        ({"steps": 2}, "optimizer_sync must be True or False where there is more than one step"),
        ({"optimizer": -1.0}, "the time of an optimizer is -1, must be finite and at least 0"),
        (
            {"optimizer": [1.0]},
            "optimizer must be a number or hold 2 values, one of each rank: it holds 1",
        ),
        ({"memory": StepMemory(kv=[1])}, "kv must be a number or hold 2 values, one of each stage: it holds 1"),
        ({"memory": StepMemory(weights=-1)}, "weights holds -1 bytes, must be at least 0"),
        (
            {"memory": StepMemory(activations=-1)},
            "activations holds -1 bytes, must be in 0..69874030582233150",
        ),
        (
            {"memory": StepMemory(activations=1, kept_activations=2)},
            "kept_activations hold 2 bytes, more than the 1 of activations",
        ),
    ],
)
def test_costs_of_the_wrong_shape(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        build_schedule("1f1b", num_ranks=2, num_microbatches=2, num_segments=3).simulate(**simulation_of(arguments))
    assert str(error.value) == message


# -- progress ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_long_simulation():
    """A second after it began, of a minute or so."""
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"  # a background job ignores it
        "from seq1f1b import build_schedule;"
        "order = build_schedule('seq1f1b', num_ranks=64, num_microbatches=600, num_segments=16);"
        "print('begins', flush=True); order.simulate(steps=2000, optimizer_sync=False)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "begins\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert err.endswith("KeyboardInterrupt\n") and child.returncode != 0


# -- W in waits --------------------------------------------------------------------------------------------------------


def filled_by_hand(schedule: Schedule, seconds: dict[Unit, float], transfer: float) -> list[float]:
    """The end of every rank where W runs in waits, rank by rank as far as what it waits for is known."""
    S, rank_of = schedule.num_stages, schedule.rank_of_stage
    ends: dict[Unit, float] = {}
    left = dict(seconds)
    now, at = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks

    def arrival(unit: Unit) -> float | None:
        """When the last thing that the unit waits for is there; None: not known yet."""
        stage = unit.stage + {"F": -1, "I": 1, "B": 1, "W": S}[unit.kind]
        if not 0 <= stage < S:
            return 0.0
        makers = [unit._replace(stage=stage, kind=kind) for kind in ("F" if unit.kind == "F" else "IB")]
        known = [ends[maker] for maker in makers if maker in ends]
        return known[0] + transfer * (rank_of[stage] != rank_of[unit.stage]) if known else None

    while any(at[rank] < len(order) for rank, order in enumerate(schedule.ranks)):
        for rank, order in enumerate(schedule.ranks):
            while at[rank] < len(order) and (come := arrival(order[at[rank]])) is not None:
                unit = order[at[rank]]
                for weight in [u for u in order if u.kind == "W" and left[u] > 0]:
                    if now[rank] >= come or weight._replace(kind="I") not in ends:
                        break  # in the order of the Ws: a later one does not overtake
                    part = min(left[weight], come - now[rank])
                    now[rank] += part
                    left[weight] -= part
                now[rank] = max(now[rank], come) + left[unit]
                left[unit] = 0.0
                ends[unit] = now[rank]
                at[rank] += 1
    return now


@pytest.mark.parametrize("seed", range(8))
def test_w_fills_waits(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(["seq1f1b", "seq-zb-h1", "zbv", "seq-zbv", "dualpipev", "1f1b"])
    order = build_schedule(
        name,
        num_ranks=3,
        num_microbatches=6,
        num_segments=2 if name.startswith("seq") else 1,
        stages_per_rank=2 if "v" in name.removeprefix("seq-") else 1,
    )
    order = order if rng.random() < 0.5 and "zb" in name else order.defer_weights()
    durations = [[rng.uniform(0.1, 2.0) for _ in rank] for rank in order.ranks]
    seconds = {u: d for rank, row in zip(order.ranks, durations, strict=True) for u, d in zip(rank, row, strict=True)}
    ample = order.num_microbatches * order.num_segments
    run = order.replace(prefetch=ample, weights="fill").simulate(Costs(links=Links(latency=0.25)), durations=durations)
    ends = filled_by_hand(order, seconds, 0.25)
    assert [row[-1] for row in run.end] == pytest.approx(ends)
    planned = order.replace(prefetch=ample).simulate(Costs(links=Links(latency=0.25)), durations=durations)
    assert run.makespan <= planned.makespan * (1 + 1e-12)
    assert run.busy == pytest.approx(planned.busy)


def test_filling_draws_the_same_jitter() -> None:
    order = build_schedule("zb-h1", num_ranks=3, num_microbatches=6)
    plain, filled = (
        order.replace(weights=weights, prefetch=9).simulate(Costs(1.0, 2.0), noise=Noise(jitter=0.3, seed=5))
        for weights in ("planned", "fill")
    )
    assert filled.busy == pytest.approx(plain.busy) and filled.makespan <= plain.makespan
    with pytest.raises(ValueError, match="slack is not known where W fills waits"):
        order.replace(weights="fill").simulate(critical=True)


def test_what_is_held_has_a_field_of_its_name() -> None:
    constant = {"weights", "optimizer", "logits"}  # held throughout a step, so that no unit takes or frees them
    assert {name for name, _, _ in _C.HOLDINGS} | constant == {field.name for field in fields(StepMemory)}
    shown = {name for h, (name, _, counts_with) in enumerate(_C.HOLDINGS) if counts_with == h}
    assert shown | constant | {"receive", "total"} == {field.name for field in fields(PeakMemory)}
    assert shown | constant | {"receive"} == {row["name"] for row in style.page_facts()["holdings"]}
