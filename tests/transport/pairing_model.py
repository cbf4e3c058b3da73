"""How ranks pair their calls after errors: a model of csrc/run/group.c and transport/group.py that is small enough to
try every interleaving of the ranks.

Each rank makes calls 1, 2, ..., and catches what they raise. A fault is an error of one rank at one place of one call:

- ``args``: before it has met anyone;
- ``early``: in the units, before the others have what they need of it;
- ``late``: in the units, when the others may have left the call well;
- ``gap``: between this call and the next one, in a collective that others have left;
- ``meet``: an interrupt while it meets the others after an earlier error.
"""

from __future__ import annotations

from typing import NamedTuple

PLACES = ("args", "early", "late", "gap", "meet")
Faults = frozenset[tuple[int, int, str]]  # (rank, call, place)


class Rank(NamedTuple):
    """State of a rank.

    Attributes:
        at: what it does next.
        turn: the call that a failure must have ended, or one before, to end this rank's.
        acknowledged: it has seen a failure, and has not met the others since.
        passed: the last call in which nobody can meet it.
        given: call and round of its last two meetings. units: the last call whose units it has begun.
        results: of its calls, each with what follows it up to the next one: "ok", "own" error, or "heard".
    """

    at: str = "enter"
    call: int = 0
    turn: int = 1
    acknowledged: bool = False
    passed: int = 0
    given: tuple[tuple[int, int], ...] = ()
    units: int = 0
    results: tuple[str, ...] = ()


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    failed: int = 0  # the first call that the standing failure ends; 0: none stands


def fail(world: World, call: int) -> int:
    """What stands once a rank has told a failure: the first one wins, but an earlier call ends as well."""
    return call if world.failed == 0 else min(world.failed, call)


def moves(world: World, r: int, faults: Faults, calls: int, without: str = "") -> list[World]:
    """Every state that the next step of a rank may lead to; [] where it waits, or has ended.

    Args:
        without: a part of the protocol to leave out: "second look" or "passed".
    """
    me, ranks = world.ranks[r], world.ranks
    others = [rank for i, rank in enumerate(ranks) if i != r]

    def to(at: str, failed: int | None = None, **changes: object) -> World:
        changed = me._replace(at=at, **changes)  # type: ignore[arg-type]
        return World((*ranks[:r], changed, *ranks[r + 1 :]), world.failed if failed is None else failed)

    hears = world.failed != 0 and world.failed <= me.turn
    is_passed = without != "passed" and any(rank.passed >= me.call for rank in others)

    if me.at == "enter":
        if me.call == calls:
            return []
        call, unheard = me.call + 1, not me.acknowledged
        if unheard and world.failed != 0 and world.failed <= call:
            return [to("leave heard", call=call, turn=call)]
        return [to("args", call=call, turn=call)]
    if me.at == "args":
        if (r, me.call, "args") in faults:
            return [to("tell")]
        return [to("give 0" if me.acknowledged else "units")]
    if me.at in ("give 0", "give 1"):
        turn = int(me.at[-1])
        given = (*(pair for pair in me.given[-2:] if pair[0] < me.call), (me.call, turn))
        return [to(f"meet {turn}", given=given[-2:], passed=max(me.passed, me.call - 1))]
    if me.at in ("meet 0", "meet 1"):
        turn = int(me.at[-1])
        found = []
        if (r, me.call, "meet") in faults and turn == 1:
            found.append(to("tell"))
        if is_passed:
            found.append(to("leave heard"))
        if all(any(call == me.call and given >= turn for call, given in rank.given) for rank in ranks):
            after = "units" if turn else "forget" if r == 0 else "give 1"
            found.append(to(after, acknowledged=me.acknowledged and not turn))
        return found
    if me.at == "forget":
        return [to("give 1" if without == "second look" else "look again", failed=0)]
    if me.at == "look again":
        return [to("give 1", failed=fail(world, me.call) if is_passed else world.failed)]
    if me.at == "units":
        if (r, me.call, "early") in faults:
            return [to("tell")]
        return [to("wait", units=me.call)]
    if me.at == "wait":
        found = [to("leave heard")] if hears else []
        if all(rank.units >= me.call for rank in ranks):
            found.append(to("end"))
        return found
    if me.at == "end":
        if (r, me.call, "late") in faults:
            return [to("tell")]
        return [to("gap", turn=me.call + 1, results=(*me.results, "ok"))]
    if me.at == "gap":
        if (r, me.call, "gap") in faults:
            results = (*me.results[:-1], "own")
            return [to("enter", failed=fail(world, me.turn), acknowledged=True, results=results)]
        return [to("enter")]
    if me.at == "tell":  # RankGroup.fail
        return [to("leave own", failed=fail(world, me.call))]
    if me.at.startswith("leave "):  # RankGroup.end_step(failed=True): first that it has left, then that it failed
        return [to(f"left {me.at[6:]}", passed=max(me.passed, me.call), acknowledged=True)]
    assert me.at.startswith("left "), me.at
    return [to("enter", failed=fail(world, me.call), results=(*me.results, me.at[5:]))]


def explore(
    size: int, faults: Faults, calls: int, without: str = ""
) -> tuple[set[tuple[tuple[str, ...], ...]], list[World], int]:
    """Every way in which the calls of all ranks may end, states in which ranks wait for ever, and a count of states."""
    start = World((Rank(),) * size)
    seen, todo = {start}, [start]
    ends: set[tuple[tuple[str, ...], ...]] = set()
    stuck = []
    while todo:
        world = todo.pop()
        after = [next_ for r in range(size) for next_ in moves(world, r, faults, calls, without)]
        if not after:
            if all(rank.at == "enter" and rank.call == calls for rank in world.ranks):
                ends.add(tuple(rank.results for rank in world.ranks))
            else:
                stuck.append(world)
        for next_ in after:
            if next_ not in seen:
                seen.add(next_)
                todo.append(next_)
    return ends, stuck, len(seen)


def breach(results: tuple[tuple[str, ...], ...], faults: Faults, calls: int) -> str:
    """The rule that the ends of all calls break; "" if they keep all."""
    is_well = [[results[r][call - 1] == "ok" for r in range(len(results))] for call in range(1, calls + 1)]
    faulty = {call for _, call, place in faults if place != "meet"}
    for call in range(1, calls):
        now, after = is_well[call - 1], is_well[call]
        if any(now) and not all(now) and any(after):
            return f"call {call} ended well on some ranks alone, and call {call + 1} does not end on all"
    for call in range(1, calls + 1):
        before = call == 1 or all(is_well[call - 2])
        if before and call not in faulty and not all(is_well[call - 1]):
            return f"call {call} fails, and nothing was wrong"
    last = max((call for _, call, _ in faults), default=0)
    for call in range(last + 3, calls + 1):
        if not all(is_well[call - 1]):
            return f"call {call} fails, the last fault was in call {last}"
    return ""
