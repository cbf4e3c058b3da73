"""Do orders whose vocabulary lies on all ranks keep the rules, and are they timed and held as written down here?"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from orders import random_order, small_schedules
from trees import makers_of

from seq1f1b import Costs, Links, Schedule, ScheduleError, Unit, build_schedule, schedules
from seq1f1b.schedule import StepMemory
from seq1f1b.unit import inputs_of as core_inputs_of

TWO = "F0.0 S0.0 T0.0 B0.0"
CROSSED = "F0.0 B0.0 F1.0 F2.0 B2.0 B1.0\nF0.0 B0.0 F2.0 B2.0 F1.0 B1.0"


def random_orders(count: int) -> list[Schedule]:
    """Those that spread; S and T anywhere that the rules allow, by random durations."""
    rng, found = random.Random(4), []
    while len(found) < count:
        order = random_order(rng)
        seconds = {name: rng.choice((0.1, 0.5, 1.0, 4.0)) for name in ("statistics", "loss", "forward", "backward")}
        head, embedding = rng.choice(((True, False), (True, True), (False, True)))
        found.append(order.spread_vocabulary(rng.randint(0, 3), Costs(**seconds), head=head, embedding=embedding))
    return found


def test_what_cannot_be_spread() -> None:
    order = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="the order spreads its vocabulary already: it holds S and T"):
        order.spread_vocabulary().spread_vocabulary()
    with pytest.raises(ScheduleError, match="the order spreads its embedding already: it holds E and G"):
        order.spread_vocabulary(embedding=True).spread_vocabulary(head=False, embedding=True)
    with pytest.raises(ScheduleError, match="stage 0 lies on rank 1"):
        Schedule.from_text("[1]F0.0 [1]B0.0\n[0]F0.0 [0]B0.0").spread_vocabulary()
    with pytest.raises(ScheduleError, match=r"B0\.0 is missing"):
        Schedule.from_text("F0.0 F1.0 B1.0").spread_vocabulary()
    with pytest.raises(ValueError, match="ahead is -1, must be at least 0"):
        order.spread_vocabulary(-1)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"the duration of a unit is .*, must be finite and at least 0"):
            order.spread_vocabulary(0, costs=Costs(loss=bad))


# -- spreading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules())
def test_every_family_spreads(name: str) -> None:
    """S and T of every segment once on every rank; of the rest the Fs, and all others, stay in their order."""
    for plain in small_schedules(name, (1, 2, 4), (2, 4), (1, 2)):
        cells = set(itertools.product(range(plain.num_microbatches), range(plain.num_segments)))
        for ahead, kinds in ((0, "ST"), (1, "STEG"), (3, "ST"), (None, "STEG"), (0, "EG")):
            order = plain.spread_vocabulary(ahead, head="S" in kinds, embedding="E" in kinds)
            order.check()
            order.simulate()
            assert Schedule.from_text(order.to_text()).ranks == order.ranks
            forward = order.forward_only()
            forward.check()
            forward.simulate()
            for rank, (before, after, evaluated) in enumerate(
                zip(plain.ranks, order.ranks, forward.ranks, strict=True)
            ):
                for kind in kinds:
                    found = [u for u in after if u.kind == kind]
                    assert {u[2:] for u in found} == cells and len(found) == len(cells)
                    assert {u.stage for u in found} == {rank}
                assert [u for u in after if u.kind == "F"] == [u for u in before if u.kind == "F"]
                assert [u for u in after if u.kind not in "F" + kinds] == [u for u in before if u.kind != "F"]
                assert list(evaluated) == [u for u in after if u.kind in "FSTE"]
                if ahead == 0:
                    assert [u for u in after if u.kind not in kinds] == list(before)


def test_forwards_cannot_go_ahead() -> None:
    """Rank 1 would run F2 before B0, and wait for F2 of rank 0, which waits there for the same B0 of rank 1."""
    plain = Schedule.from_text(CROSSED)
    costs = Costs(statistics=0.25, loss=0.5)
    with pytest.raises(ScheduleError, match="with every unit behind 1 more Fs of its rank the ranks wait for each oth"):
        plain.spread_vocabulary(1)
    found = [plain.spread_vocabulary(ahead, costs).simulate(costs).makespan for ahead in (0, 2)]
    assert plain.spread_vocabulary(costs=costs).simulate(costs).makespan == min(found)


def test_a_place_that_is_freed_in_no_time() -> None:
    """As places are counted, S and T take no time: T0.0 frees a place for S0.2 of the other rank in the moment in
    which that is sent, and both ranks send S0.2 before their T0.0."""
    text = "F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 T0.0 T0.1 T0.2"
    order = Schedule.from_text(f"{text}\n{text}")
    assert order.simulate(Costs(forward=1.0, statistics=0.0, loss=0.0)).makespan == 6.0  # each F waits for an S
    for rank in range(2):
        order._lower_for(True, rank)


# -- times and bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", random_orders(12), ids=str)
def test_times(order: Schedule) -> None:
    """Against times found by going over all units until none can start earlier."""
    transfer, ends = 0.5, {}
    seconds = {"F": 1.0, "S": 0.25, "T": 0.375, "B": 2.0, "I": 1.5, "W": 0.5, "E": 0.125, "G": 0.25}
    chains = [list(range(-1, order.num_segments - 1))] * order.num_microbatches

    def inputs_of(unit: Unit) -> set[Unit]:
        return makers_of(unit, chains, order.num_stages, order.kinds, order.num_ranks)

    while len(ends) < sum(map(len, order.ranks)):
        before = len(ends)
        for units in order.ranks:
            now = 0.0
            for unit in units:
                if unit not in ends:
                    makers = inputs_of(unit)
                    if not makers <= ends.keys():
                        break
                    rank = order.rank_of_stage
                    come = [ends[m] + transfer * (rank[m.stage] != rank[unit.stage]) for m in makers]
                    ends[unit] = max([now, *come]) + seconds[unit.kind] * (1 + 0.125 * unit.segment)
                now = ends[unit]
        assert len(ends) > before, "the order ends in a circle"
    durations = [[seconds[unit.kind] * (1 + 0.125 * unit.segment) for unit in units] for units in order.ranks]
    for rank in range(order.num_ranks):
        order._lower_for(True, rank)  # raises where ranks wait for each other's places
    ample = order.num_microbatches * order.num_segments  # places, so that no sender waits for one
    run = order.replace(prefetch=ample).simulate(Costs(links=Links(latency=transfer)), durations=durations)
    for units, times in zip(order.ranks, run.end, strict=True):
        assert list(times) == [ends[unit] for unit in units]
    drawn = core_inputs_of(ends)
    for each in ends:
        known = inputs_of(each)
        assert set(drawn[each]) <= known and {i for i in known if {i.kind, each.kind} & set("STEG")} <= set(drawn[each])


def test_bytes_by_hand() -> None:
    """A shard holds the logits of the segments between their S and T; each edge has a place of its own kind."""
    text = "F0.0 F0.1 S0.0 S0.1 T0.0 T0.1 B0.1 B0.0"
    order = Schedule.from_text(f"{text}\n{text}")
    memory = StepMemory(activations=10, shard_logits=[7, 8])
    peak = order.replace(prefetch=0).peak_memory(
        memory, costs=Costs(links=Links(message_bytes=[3, 2], statistics_bytes=1))
    )
    assert peak.shard_logits == (15, 15) and peak.activations == (20, 20)
    # Rank 0: a place for gradients, and two hidden states. Rank 1: two activations, and two hidden gradients, used the
    # other way round. Statistics: a place each, and one more: both ranks would wait in their second S for the other's
    # first T.
    assert peak.receive == (3 + (3 + 2) + 1, (3 + 2) + (3 + 2) + 2)
    assert peak.total == (20 + 15 + 9, 20 + 15 + 12)


def test_messages_of_statistics_are_small() -> None:
    order = Schedule.from_text(f"{TWO}\n{TWO}")
    slow = Costs(forward=1.0, backward=1.0, statistics=1.0, loss=1.0)
    links = (Links(bandwidth=1.0, message_bytes=10, statistics_bytes=n) for n in (2, 30))
    found = [order.simulate(replace(slow, links=each)).makespan for each in links]
    # F, activation, F, hidden state, S, T, hidden gradient, B, gradient, B; the last rank waits in its T meanwhile, for
    # statistics that take as long as the other's T and hidden gradient, or longer.
    assert found == [6 + 4 * 10, 6 + 4 * 10 + (30 - 10)]
    with pytest.raises(ValueError, match=r"statistics_bytes holds -1 bytes, must be in 0\.\."):
        order.simulate(Costs(links=Links(statistics_bytes=-1)))
