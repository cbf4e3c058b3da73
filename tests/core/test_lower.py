"""Can lowered programs be walked blindly: no deadlock, nothing overwritten while needed, planned peaks exact?"""

import itertools
import random
from collections.abc import Callable

import pytest
from core_extension import instructions_of
from orders import random_order, small_schedules, with_moves, with_recomputation

from seq1f1b import _C, Schedule, Unit, build_schedule, schedules
from seq1f1b.unit import edges_of


class Lowered:
    def __init__(self, schedule: Schedule, prefetch: int | None = 1) -> None:
        self.schedule = schedule
        self.handle = _C.program_lower(schedule.handle, prefetch)
        self.edges = edges_of(self.handle)
        self.ranks = [instructions_of(self.handle, rank) for rank in range(schedule.num_ranks)]

    def places(self) -> dict[tuple[int, int], int]:
        return {(edge.source_stage, edge.destination_stage): edge.num_places for edge in self.edges}


class Replay:
    """The programs of all ranks, walked one instruction of a rank at a time; trusts nothing."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered, self.schedule, self.edges = lowered, lowered.schedule, lowered.edges
        self.has_backward = any(unit.kind != "F" for order in self.schedule.ranks for unit in order)
        self.granted: list[list[int]] = [[] for _ in self.edges]  # place of message n
        self.sent = [0] * len(self.edges)
        # posted places and the unit whose result they hold
        self.in_place: list[dict[int, Unit | None]] = [{} for _ in self.edges]
        self.read_from: dict[tuple[int, Unit], int] = {}  # place of the message that a unit consumes, by edge
        self.slots: dict[tuple[str, int, int], int] = {}  # (cache, stage, slot) -> micro-batch
        self.slots_peak: dict[tuple[str, int], int] = {}
        self.ran: list[list[Unit]] = [[] for _ in lowered.ranks]
        self.coming: set[tuple[int, int, int]] = set()  # cells, from L until they are back
        self.live = [0] * self.schedule.num_stages
        self.live_peak = [0] * self.schedule.num_stages
        self.at = [0] * len(lowered.ranks)

    def edge_into(self, stage: int, gradient: bool) -> int | None:
        found = [
            e for e, edge in enumerate(self.edges) if edge.destination_stage == stage and bool(edge.channel) is gradient
        ]
        assert len(found) <= 1
        return found[0] if found else None

    def producer(self, unit: Unit) -> Unit | None:
        """The unit of a neighbouring stage on another rank whose result this one consumes."""
        stage = unit.stage - 1 if unit.kind == "F" else unit.stage + 1
        rank_of_stage = self.schedule.rank_of_stage
        if (
            unit.kind in "WROAL"
            or not 0 <= stage < self.schedule.num_stages
            or rank_of_stage[stage] == rank_of_stage[unit.stage]
        ):
            return None
        whole = unit._replace(stage=stage)
        if unit.kind == "F" or whole._replace(kind="B") in self.schedule.ranks[rank_of_stage[stage]]:
            return whole if unit.kind == "F" else whole._replace(kind="B")
        return whole._replace(kind="I")

    def hold(self, cache: str, unit: Unit, slot: int, first: bool, last: bool) -> None:
        key = (cache, unit.stage, slot)
        if first:
            assert key not in self.slots, f"{unit} takes a slot in use"
            self.slots[key] = unit.microbatch
            held = sum(1 for other in self.slots if other[:2] == key[:2])
            self.slots_peak[key[:2]] = max(self.slots_peak.get(key[:2], 0), held)
        assert self.slots[key] == unit.microbatch
        if last:
            del self.slots[key]

    def still_there(self, unit: Unit) -> None:
        source = self.producer(unit)
        if source is not None:
            e = self.edge_into(unit.stage, unit.kind != "F")
            assert self.in_place[e][self.read_from[e, unit]] == source, f"the input of {unit} is gone"

    def step(self, rank: int) -> bool:
        """Runs the rank's next instruction; False: it must wait."""
        op, e, unit, place, kv_slot, grad_slot, sequence = self.lowered.ranks[rank][self.at[rank]]
        if op in ("SEND", "WAIT") and sequence >= (len(self.granted[e]) if op == "SEND" else self.sent[e]):
            return False
        if op == "POST":
            assert self.edges[e][3] == rank and sequence == len(self.granted[e])
            assert 0 <= place < self.edges[e][5] and place not in self.in_place[e], "a place is granted while in use"
            self.granted[e].append(place)
            self.in_place[e][place] = None
        elif op == "SEND":
            assert self.edges[e][2] == rank and sequence == self.sent[e] and unit == self.ran[rank][-1]
            assert self.granted[e][sequence] == place and self.in_place[e][place] is None
            self.in_place[e][place] = unit
            self.sent[e] += 1
        elif op == "WAIT":
            follows = next(i[0] for i in self.lowered.ranks[rank][self.at[rank] + 1 :] if i[0] != "BACK")
            assert self.edges[e][3] == rank and follows in ("WAIT", "RUN")
            assert self.lowered.ranks[rank][self.at[rank] + 1][2] == unit
            assert self.in_place[e][place] == self.producer(unit), "another message than expected"
            self.read_from[e, unit] = place
        elif op == "RUN":
            self.run(rank, unit, kv_slot, grad_slot)
        elif op == "FREE":
            self.free(rank, unit)
        elif op == "BACK":
            assert self.lowered.ranks[rank][self.at[rank] + 1][:3] == ("RUN", -1, unit) and unit.kind in "BI"
            self.coming.remove(unit[1:])
        else:
            raise AssertionError(op)
        self.at[rank] += 1
        return True

    def run(self, rank: int, unit: Unit, kv_slot: int, grad_slot: int) -> None:
        last_segment = self.schedule.num_segments - 1
        if unit.kind in "OAL":
            self.move(rank, unit, kv_slot, grad_slot)
            return
        assert unit.kind not in "BI" or unit[1:] not in self.coming, f"{unit} runs before what it reads is back"
        self.still_there(unit._replace(kind="F"))
        self.still_there(unit if unit.kind != "W" else unit._replace(kind="I"))
        saves = "R" if unit._replace(kind="R") in self.schedule.ranks[rank] else "F"
        self.ran[rank].append(unit)
        if unit.kind == saves:
            self.live[unit.stage] += 1
            self.live_peak[unit.stage] = max(self.live_peak[unit.stage], self.live[unit.stage])
        if unit.kind == "W":
            assert kv_slot == grad_slot == -1
        else:
            last = (unit.kind in "BI" and unit.segment == 0) or (not self.has_backward and unit.segment == last_segment)
            self.hold("kv", unit, kv_slot, unit.kind == "F" and unit.segment == 0, last)
        if unit.kind in "BI":
            self.hold("grad", unit, grad_slot, unit.segment == last_segment, unit.segment == 0)
        else:
            assert grad_slot == -1

    def move(self, rank: int, unit: Unit, kv_slot: int, grad_slot: int) -> None:
        assert kv_slot == grad_slot == -1
        before = unit._replace(kind={"O": "F", "A": "O", "L": "A"}[unit.kind])
        assert before in self.ran[rank]
        self.ran[rank].append(unit)
        if unit.kind == "L":
            self.coming.add(unit[1:])
            self.live[unit.stage] += 1
            self.live_peak[unit.stage] = max(self.live_peak[unit.stage], self.live[unit.stage])

    def free(self, rank: int, unit: Unit) -> None:
        if unit.kind == "A":
            self.live[unit.stage] -= 1
            return
        assert unit == self.ran[rank][-1] and unit.kind != "I" and (self.has_backward or unit.kind == "F")
        self.live[unit.stage] -= 1
        for message_of in {unit._replace(kind="F"), unit if unit.kind == "B" else unit._replace(kind="I")}:
            e = self.edge_into(unit.stage, message_of.kind != "F")
            if e is not None and (e, message_of) in self.read_from:
                del self.in_place[e][self.read_from.pop((e, message_of))]


def replay(lowered: Lowered, choose: Callable[[list[int]], int]) -> None:
    """Walks the programs to their ends, one instruction of a rank that ``choose`` names at a time."""
    walk, schedule = Replay(lowered), lowered.schedule
    unfinished = [rank for rank, program in enumerate(lowered.ranks) if program]
    while unfinished:
        waiting: list[int] = []
        while True:
            able = [rank for rank in unfinished if rank not in waiting]
            assert able, f"deadlock: {[lowered.ranks[rank][walk.at[rank]] for rank in unfinished]}"
            rank = choose(able)
            if walk.step(rank):
                break
            waiting.append(rank)
        if walk.at[rank] == len(lowered.ranks[rank]):
            unfinished.remove(rank)

    assert tuple(map(tuple, walk.ran)) == schedule.ranks
    assert not walk.coming and not walk.slots and not any(walk.live) and not walk.read_from
    for e, edge in enumerate(lowered.edges):
        assert walk.sent[e] == len(walk.granted[e]) == edge.num_messages and not walk.in_place[e]
    for stage in range(schedule.num_stages):
        peak = (walk.live_peak[stage], walk.slots_peak["kv", stage], walk.slots_peak.get(("grad", stage), 0))
        assert _C.program_stage_peak(lowered.handle, stage) == peak


@pytest.mark.parametrize("name", schedules())
def test_families_replay_in_any_interleaving(name: str) -> None:
    rng = random.Random(name)
    built = 0
    for schedule in small_schedules(name, (1, 2, 3, 5), (1, 2, 4), (1, 2, 3)):
        built += 1
        for order, prefetch in itertools.product((schedule, schedule.forward_only()), (0, 1, 2, None)):
            replay(Lowered(order, prefetch), rng.choice)
    assert built > 0


def test_random_orders_replay_in_any_interleaving() -> None:
    rng = random.Random(1)
    moved = 0
    for number in range(250):
        order = random_order(rng)
        if number >= 150:  # units are recomputed and moved
            order = with_moves(with_recomputation(order, rng, 0.3) if number % 2 else order, rng)
            moved += "O" in order.kinds
        lowered = Lowered(order, rng.randint(0, 2))
        for choose in (rng.choice, min, max):
            replay(lowered, choose)
    assert moved > 30


# -- planned peaks -----------------------------------------------------------------------------------------------------


def test_evaluation_keeps_one_cache_and_no_unit() -> None:
    schedule = build_schedule("seq1f1b", num_ranks=4, num_microbatches=4, num_segments=3).forward_only()
    lowered = Lowered(schedule)
    for stage in range(4):
        assert _C.program_stage_peak(lowered.handle, stage) == (1, 1, 0)
    assert set(lowered.places().values()) == {2}  # one in use, one on its way
    assert [edge.channel for edge in lowered.edges] == [False] * 3


def test_one_rank_gets_the_program_that_it_has_among_all() -> None:
    """And the peaks of its stages; others have no instructions."""
    rng = random.Random(11)
    orders = [random_order(rng) for _ in range(40)]
    orders.append(build_schedule("seq-zb-h1", num_ranks=4, num_microbatches=5, num_segments=2).spread_vocabulary())
    orders.append(build_schedule("zbv", num_ranks=3, num_microbatches=6, stages_per_rank=2).recompute())
    for schedule in orders:
        prefetch = rng.choice((0, 1, 2, None))
        whole = _C.program_lower(schedule.handle, prefetch)
        for rank in range(schedule.num_ranks):
            alone = _C.program_lower(schedule.handle, prefetch, False, rank)
            assert edges_of(alone) == edges_of(whole)
            for other in range(schedule.num_ranks):
                assert instructions_of(alone, other) == (instructions_of(whole, other) if other == rank else [])
            for stage in (s for s, holder in enumerate(schedule.rank_of_stage) if holder == rank):
                assert _C.program_stage_peak(alone, stage) == _C.program_stage_peak(whole, stage)
    with pytest.raises(ValueError, match=r"^rank is 3, must be in 0\.\.2$"):
        _C.program_lower(schedule.handle, 1, False, 3)


# -- credits -----------------------------------------------------------------------------------------------------------


def test_messages_used_late_take_the_places_they_need() -> None:
    """The receiver uses the last message first, so all of them must be posted before it can go on."""
    schedule = Schedule.from_text("F0.0 F1.0 F2.0 F3.0\nF3.0 F0.0 F1.0 F2.0")
    lowered = Lowered(schedule, 0)
    assert lowered.places() == {(0, 1): 4}
    replay(lowered, max)
