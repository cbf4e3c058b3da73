"""Can lowered programs be walked blindly: no deadlock, nothing overwritten while needed, planned peaks exact?"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from orders import random_order, small_schedule

from seq1f1b import _C, ModelShape, Schedule, ScheduleError, Unit, build_schedule, partition_sequence, schedules
from seq1f1b.schedule import unit_of


class Lowered:
    def __init__(self, schedule: Schedule, prefetch: int = 1) -> None:
        self.schedule = schedule
        self.handle = _C.program_lower(schedule.handle, prefetch)
        self.edges = _C.program_edges(self.handle)
        self.ranks = [
            [
                (_C.OPCODES[op], edge, unit_of(unit), *rest)
                for op, edge, unit, *rest in _C.program_instructions(self.handle, rank)
            ]
            for rank in range(schedule.num_ranks)
        ]

    def places(self) -> dict[tuple[int, int], int]:
        return {(source, destination): places for source, destination, _, _, _, places, _ in self.edges}


def replay(lowered: Lowered, choose: Callable[[list[int]], int]) -> None:
    """Walks the programs of all ranks, one instruction of a rank that ``choose`` names at a time; trusts nothing."""
    schedule, edges = lowered.schedule, lowered.edges
    S, k = schedule.num_stages, schedule.num_segments
    has_backward = any(unit.kind != "F" for order in schedule.ranks for unit in order)
    granted: list[list[int]] = [[] for _ in edges]  # place of message n
    sent = [0] * len(edges)
    in_place: list[dict[int, Unit | None]] = [{} for _ in edges]  # posted places and the unit whose result they hold
    read_from: dict[tuple[int, Unit], int] = {}  # place of the message that a unit consumes, by edge
    slots: dict[tuple[str, int, int], int] = {}  # (cache, stage, slot) -> micro-batch
    slots_peak: dict[tuple[str, int], int] = {}
    ran: list[list[Unit]] = [[] for _ in lowered.ranks]
    live = [0] * S
    live_peak = [0] * S
    at = [0] * len(lowered.ranks)

    def edge_into(stage: int, gradient: bool) -> int | None:
        found = [e for e, edge in enumerate(edges) if edge[1] == stage and bool(edge[4]) is gradient]
        assert len(found) <= 1
        return found[0] if found else None

    def producer(unit: Unit) -> Unit | None:
        """The unit of a neighbouring stage on another rank whose result this one consumes."""
        stage = unit.stage - 1 if unit.kind == "F" else unit.stage + 1
        if (
            unit.kind == "W"
            or not 0 <= stage < S
            or schedule.rank_of_stage[stage] == schedule.rank_of_stage[unit.stage]
        ):
            return None
        whole = unit._replace(stage=stage)
        if unit.kind == "F" or whole._replace(kind="B") in schedule.ranks[schedule.rank_of_stage[stage]]:
            return whole if unit.kind == "F" else whole._replace(kind="B")
        return whole._replace(kind="I")

    def hold(cache: str, unit: Unit, slot: int, first: bool, last: bool) -> None:
        key = (cache, unit.stage, slot)
        if first:
            assert key not in slots, f"{unit} takes a slot in use"
            slots[key] = unit.microbatch
            held = sum(1 for other in slots if other[:2] == key[:2])
            slots_peak[key[:2]] = max(slots_peak.get(key[:2], 0), held)
        assert slots[key] == unit.microbatch
        if last:
            del slots[key]

    def still_there(unit: Unit) -> None:
        source = producer(unit)
        if source is not None:
            e = edge_into(unit.stage, unit.kind != "F")
            assert in_place[e][read_from[e, unit]] == source, f"the input of {unit} is gone"

    def step(rank: int) -> bool:
        op, e, unit, place, kv_slot, grad_slot, sequence = lowered.ranks[rank][at[rank]]
        if op == "POST":
            assert edges[e][3] == rank and sequence == len(granted[e])
            assert 0 <= place < edges[e][5] and place not in in_place[e], "a place is granted while in use"
            granted[e].append(place)
            in_place[e][place] = None
        elif op == "SEND":
            assert edges[e][2] == rank and sequence == sent[e] and unit == ran[rank][-1]
            if sequence >= len(granted[e]):
                return False
            assert granted[e][sequence] == place and in_place[e][place] is None
            in_place[e][place] = unit
            sent[e] += 1
        elif op == "WAIT":
            assert edges[e][3] == rank and lowered.ranks[rank][at[rank] + 1][:3] == ("RUN", -1, unit)
            if sequence >= sent[e]:
                return False
            assert in_place[e][place] == producer(unit), "another message than expected"
            read_from[e, unit] = place
        elif op == "RUN":
            forward = unit._replace(kind="F")
            still_there(forward)
            still_there(unit if unit.kind != "W" else unit._replace(kind="I"))
            ran[rank].append(unit)
            if unit.kind == "F":
                live[unit.stage] += 1
                live_peak[unit.stage] = max(live_peak[unit.stage], live[unit.stage])
            if unit.kind == "W":
                assert kv_slot == grad_slot == -1
            else:
                last = (unit.kind != "F" and unit.segment == 0) or (not has_backward and unit.segment == k - 1)
                hold("kv", unit, kv_slot, unit.kind == "F" and unit.segment == 0, last)
            if unit.kind in "BI":
                hold("grad", unit, grad_slot, unit.segment == k - 1, unit.segment == 0)
            elif unit.kind == "F":
                assert grad_slot == -1
        elif op == "FREE":
            assert unit == ran[rank][-1] and unit.kind == ("F" if not has_backward else unit.kind) and unit.kind != "I"
            live[unit.stage] -= 1
            for message_of in {unit._replace(kind="F"), unit if unit.kind == "B" else unit._replace(kind="I")}:
                e = edge_into(unit.stage, message_of.kind != "F")
                if e is not None and (e, message_of) in read_from:
                    del in_place[e][read_from.pop((e, message_of))]
        else:
            raise AssertionError(op)
        at[rank] += 1
        return True

    unfinished = [rank for rank, program in enumerate(lowered.ranks) if program]
    while unfinished:
        waiting: list[int] = []
        while True:
            able = [rank for rank in unfinished if rank not in waiting]
            assert able, f"deadlock: {[lowered.ranks[rank][at[rank]] for rank in unfinished]}"
            rank = choose(able)
            if step(rank):
                break
            waiting.append(rank)
        if at[rank] == len(lowered.ranks[rank]):
            unfinished.remove(rank)

    assert tuple(map(tuple, ran)) == schedule.ranks
    assert not slots and not any(live) and not read_from
    for e, edge in enumerate(edges):
        assert sent[e] == len(granted[e]) == edge[6] and not in_place[e]
    for stage in range(S):
        peak = (live_peak[stage], slots_peak["kv", stage], slots_peak.get(("grad", stage), 0))
        assert _C.program_stage_peak(lowered.handle, stage) == peak


@pytest.mark.parametrize("name", schedules())
def test_families_replay_in_any_interleaving(name: str) -> None:
    rng = random.Random(name)
    built = 0
    for P, M, k in itertools.product((1, 2, 3, 5), (1, 2, 4), (1, 2, 3)):
        schedule = small_schedule(name, P, M, k)
        if schedule is None:
            continue
        built += 1
        for order, prefetch in itertools.product((schedule, schedule.forward_only()), (0, 1, 2)):
            replay(Lowered(order, prefetch), rng.choice)
    assert built > 0


def test_random_orders_replay_in_any_interleaving() -> None:
    rng = random.Random(1)
    for _ in range(150):
        lowered = Lowered(random_order(rng), rng.randint(0, 2))
        for choose in (rng.choice, min, max):
            replay(lowered, choose)


def test_program_of_two_ranks() -> None:
    """P = 2, M = 1, k = 2, rank 1, in full."""
    lowered = Lowered(build_schedule("seq1f1b", num_ranks=2, num_microbatches=1, num_segments=2))
    assert lowered.edges == [(0, 1, 0, 1, False, 2, 2), (1, 0, 1, 0, True, 2, 2)]

    def written(rank: int) -> list[Any]:
        names = ("place", "kv_slot", "grad_slot", "sequence")
        return [
            " ".join(
                [op, str(unit), *(f"{name}={value}" for name, value in zip(names, rest, strict=True) if value >= 0)]
            )
            for op, _, unit, *rest in lowered.ranks[rank]
        ]

    assert written(1) == [
        "POST F0.0 place=0 sequence=0",
        "POST F0.1 place=1 sequence=1",
        "WAIT F0.0 place=0 sequence=0",
        "RUN F0.0 kv_slot=0",
        "WAIT F0.1 place=1 sequence=1",
        "RUN F0.1 kv_slot=0",
        "RUN B0.1 kv_slot=0 grad_slot=0",
        "SEND B0.1 place=0 sequence=0",
        "FREE B0.1",
        "RUN B0.0 kv_slot=0 grad_slot=0",
        "SEND B0.0 place=1 sequence=1",
        "FREE B0.0",
    ]


# -- planned peaks -----------------------------------------------------------------------------------------------------


def test_places_are_the_receivers_peak_and_the_prefetch() -> None:
    for P, M, k, prefetch in itertools.product((2, 3, 5, 8), (1, 2, 4, 8), (1, 2, 4), (0, 1, 3)):
        schedule = build_schedule("seq1f1b", num_ranks=P, num_microbatches=M, num_segments=k)
        expected = {}
        for p in range(P - 1):
            receiver_peak = min(P - (p + 1) - 1 + k, M * k)
            expected[p, p + 1] = min(receiver_peak + prefetch, M * k)
            expected[p + 1, p] = min(1 + prefetch, M * k)
        assert Lowered(schedule, prefetch).places() == expected


def test_live_units_of_every_stage() -> None:
    for P, M, k in itertools.product(range(1, 9), range(1, 9), (1, 2, 3, 4, 8)):
        handle = _C.program_lower(build_schedule("seq1f1b", num_ranks=P, num_microbatches=M, num_segments=k).handle, 1)
        for p in range(P):
            assert _C.program_stage_peak(handle, p)[0] == min(P - p - 1 + k, M * k)
            assert _C.program_stage_peak(handle, p)[2] == 1  # backwards of a micro-batch are consecutive


def test_caches_of_eight_ranks_and_four_segments() -> None:
    """Four micro-batches hold their KV cache at the first stage, where eleven segments are live; two at the last."""
    handle = _C.program_lower(build_schedule("seq1f1b", num_ranks=8, num_microbatches=8, num_segments=4).handle, 1)
    assert _C.program_stage_peak(handle, 0)[1] == 4
    assert _C.program_stage_peak(handle, 7)[1] == 2


def test_evaluation_keeps_one_cache_and_no_unit() -> None:
    schedule = build_schedule("seq1f1b", num_ranks=4, num_microbatches=4, num_segments=3).forward_only()
    lowered = Lowered(schedule)
    for stage in range(4):
        assert _C.program_stage_peak(lowered.handle, stage) == (1, 1, 0)
    assert set(lowered.places().values()) == {2}  # one in use, one on its way
    assert [edge[4] for edge in lowered.edges] == [False] * 3


def peak_weight(order: tuple[Unit, ...], weights: dict[tuple[int, int], int]) -> int:
    """Most weight held at once, from a forward to its last backward (its own end where no unit goes back)."""
    closing = "BW" if any(unit.kind != "F" for unit in order) else "F"
    held = most = 0
    for unit in order:
        weight = weights[unit.stage, unit.segment]
        held += weight * (unit.kind == "F")
        most = max(most, held)
        held -= weight * (unit.kind in closing)
    return most


def test_peaks_of_uneven_segments() -> None:
    rng = random.Random(2)
    for _ in range(60):
        schedule = random_order(rng)
        S, k = schedule.num_stages, schedule.num_segments
        sizes = [rng.randint(1, 50) for _ in range(k)]
        unit_bytes = [[rng.randint(0, 9) for _ in range(k)] for _ in range(S)]
        cells = list(itertools.product(range(S), range(k)))
        handle = _C.program_lower(schedule.handle, 1)
        for stage, rank in enumerate(schedule.rank_of_stage):
            tokens = {(other, s): sizes[s] * (other == stage) for other, s in cells}
            assert _C.program_peak_tokens(handle, stage, sizes) == peak_weight(schedule.ranks[rank], tokens)
        simulation = schedule.simulate(segment_sizes=sizes, unit_bytes=unit_bytes)
        for rank, order in enumerate(schedule.ranks):
            assert simulation.peak[rank] == peak_weight(order, dict.fromkeys(cells, 1))
            assert simulation.peak_tokens[rank] == peak_weight(order, {(i, s): sizes[s] for i, s in cells})
            assert simulation.peak_bytes[rank] == peak_weight(order, {(i, s): unit_bytes[i][s] for i, s in cells})


def test_balanced_segments_hold_more_tokens_than_equal_ones() -> None:
    """A 7B model at 64k tokens, P = 4, M = 8, k = 4: 2.01 micro-batches at stage 0, where equal segments hold 1.75."""
    shape = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=32000)
    handle = _C.program_lower(build_schedule("seq1f1b", num_ranks=4, num_microbatches=8, num_segments=4).handle, 1)
    balanced = partition_sequence(65536, 4, model=shape)
    assert _C.program_peak_tokens(handle, 0, balanced) / 65536 == pytest.approx(2.01, abs=0.01)
    assert _C.program_peak_tokens(handle, 0, [16384] * 4) / 65536 == 1.75


# -- credits -----------------------------------------------------------------------------------------------------------


def test_messages_used_late_take_the_places_they_need() -> None:
    """The receiver uses the last message first, so all of them must be posted before it can go on."""
    schedule = Schedule.from_text("F0.0 F1.0 F2.0 F3.0\nF3.0 F0.0 F1.0 F2.0")
    lowered = Lowered(schedule, 0)
    assert lowered.places() == {(0, 1): 4}
    replay(lowered, max)


def completes(orders: list[list[Unit]], places: dict[tuple[int, int], int]) -> bool:
    """Whether orders of forwards get through: a message needs a free place, which is free again after its use."""
    done: set[Unit] = set()
    sent, used = dict.fromkeys(places, 0), dict.fromkeys(places, 0)
    at, has_run = [0] * len(orders), [False] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            unit = order[at[rank]]
            into, out = (unit.stage - 1, unit.stage), (unit.stage, unit.stage + 1)
            if not has_run[rank] and (into not in places or unit._replace(stage=unit.stage - 1) in done):
                has_run[rank] = moved = True
            elif has_run[rank] and (out not in places or sent[out] < used[out] + places[out]):
                sent[out] = sent.get(out, 0) + 1
                used[into] = used.get(into, 0) + 1
                done.add(unit)
                at[rank], has_run[rank], moved = at[rank] + 1, False, True
    return all(at[rank] == len(order) for rank, order in enumerate(orders))


@pytest.mark.parametrize("M", [2, 6, 10])
def test_places_grow_only_where_credits_would_close_a_cycle(M: int) -> None:
    """Two ranks, four stages, breadth first: rank 0 takes messages of stage 1 only when it has sent all of stage 0."""
    orders = [[Unit("F", stage, m, 0) for stage in stages for m in range(M)] for stages in ((0, 2), (1, 3))]
    lowered = Lowered(Schedule(orders), 0)
    places = lowered.places()
    assert completes(orders, places)
    assert M == 2 or not completes(orders, dict.fromkeys(places, 1))
    for edge, count in places.items():
        assert not completes(orders, {**places, edge: count - 1})
    replay(lowered, min)
    replay(lowered, max)


def test_prefetch_below_zero() -> None:
    with pytest.raises(ValueError, match="prefetch is -1, must be at least 0"):
        Lowered(build_schedule("gpipe", num_ranks=2, num_microbatches=2), -1)


def test_a_broken_order_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="a segment goes back after its own forward"):
        Lowered(Schedule.from_text("B0.0 F0.0"))


def test_arguments_out_of_range() -> None:
    handle = _C.program_lower(build_schedule("gpipe", num_ranks=2, num_microbatches=2, num_segments=3).handle, 1)
    for call in (_C.program_stage_peak, _C.program_instructions):
        for index in (-1, 2):
            with pytest.raises(ValueError, match=f"is {index}, must be in 0..1"):
                call(handle, index)
    with pytest.raises(ValueError, match="segment_sizes holds 2 values, must hold 3"):
        _C.program_peak_tokens(handle, 0, [1, 2])
    with pytest.raises(TypeError, match=r"expected a seq1f1b\.program handle"):
        _C.program_edges(build_schedule("gpipe", num_ranks=2, num_microbatches=2).handle)
