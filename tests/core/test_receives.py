"""Do transfers that need both ends (NCCL's) ever wait for ever, whatever shares a queue and whenever a host waits?

A model of hosts and GPUs walks lowered programs, as it says below; it knows nothing of how receives were placed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

from core_extension import instructions_of
from orders import random_order, small_schedule

from seq1f1b import _C, Schedule, Unit
from seq1f1b.unit import edges_of

Instruction = tuple[str, int, Unit, int]  # opcode, edge, unit, sequence


def programs(
    schedule: Schedule, prefetch: int | None = 1, receives: bool = True
) -> tuple[list[list[Instruction]], list]:
    handle = _C.program_lower(schedule.handle, prefetch, receives)
    of_ranks = (instructions_of(handle, rank) for rank in range(schedule.num_ranks))
    return [[(*each[:3], each[-1]) for each in instructions] for instructions in of_ranks], edges_of(handle)


class Machine:
    """Hosts that start work in the order of their programs, and GPUs that do it.

    A host goes past a SEND once the receiver's host has posted the message, and past a RECEIVE once the sender's host
    has started the send (its header has come). Now and then a host waits until its GPU has done all that it started.
    A GPU has queues, in which work is done in the order in which it was started. A transfer takes place when both its
    ends are at the head of their queues. With one queue everything shares it; else units have one, and so has each end
    of an edge.
    """

    def __init__(self, ranks: list[list[Instruction]], edges: list, queues: int, sync: float, rng: random.Random):
        self.ranks, self.edges, self.rng, self.sync = ranks, edges, rng, sync
        self.one_queue = queues == 1
        self.at = [0] * len(ranks)
        self.waits_for_gpu = [False] * len(ranks)
        self.queues: list[dict[int, list[Instruction]]] = [{} for _ in ranks]  # -1: units'; else an edge's
        self.posted, self.send_started = [[0] * len(edges) for _ in range(2)]
        self.transferred: set[tuple[int, int]] = set()
        self.needed: list[dict[Unit, list[tuple[int, int]]]] = [{} for _ in ranks]  # messages that a unit waits for
        self.ran: set[tuple[int, Unit]] = set()

    def start(self, rank: int, work: Instruction) -> None:
        queue = -1 if self.one_queue or work[0] == "RUN" else work[1]
        self.queues[rank].setdefault(queue, []).append(work)

    def host(self, rank: int) -> bool:
        if self.waits_for_gpu[rank]:
            if any(self.queues[rank].values()):
                return False
            self.waits_for_gpu[rank] = False
        if self.at[rank] == len(self.ranks[rank]):
            return False
        instruction = self.ranks[rank][self.at[rank]]
        op, edge, unit, sequence = instruction
        if op == "POST":
            self.posted[edge] += 1
        elif op == "RECEIVE":
            assert sequence < self.posted[edge], "received into a place that is not free"
            if self.send_started[edge] <= sequence:
                return False
            self.start(rank, instruction)
        elif op == "WAIT":
            self.needed[rank].setdefault(unit, []).append((edge, sequence))
            started = {i[1:] for i in self.ranks[rank][: self.at[rank]] if i[0] == "RECEIVE"}
            assert any(e == edge and s == sequence for e, _, s in started), "waited for before its receive has started"
        elif op == "RUN":
            self.start(rank, instruction)
        elif op == "SEND":
            if self.posted[edge] <= sequence:
                return False
            self.start(rank, instruction)
            self.send_started[edge] += 1
        self.at[rank] += 1
        self.waits_for_gpu[rank] = self.rng.random() < self.sync
        return True

    def heads(self, rank: int) -> list[tuple[int, Instruction]]:
        return [(queue, work[0]) for queue, work in self.queues[rank].items() if work]

    def gpu(self, rank: int) -> bool:
        heads = self.heads(rank)
        self.rng.shuffle(heads)
        for queue, (op, edge, unit, sequence) in heads:
            if op == "RUN":
                if all(message in self.transferred for message in self.needed[rank].get(unit, ())):
                    self.queues[rank][queue].pop(0)
                    self.ran.add((rank, unit))
                    return True
            elif op == "SEND" and (rank, unit) in self.ran:
                receiver = self.edges[edge][3]
                for other, (their_op, their_edge, _, their_sequence) in self.heads(receiver):
                    if (their_op, their_edge, their_sequence) == ("RECEIVE", edge, sequence):
                        self.queues[rank][queue].pop(0)
                        self.queues[receiver][other].pop(0)
                        self.transferred.add((edge, sequence))
                        return True
        return False

    def run(self) -> str | None:
        """None, or who waits for what at the end."""
        actors = [(self.host, rank) for rank in range(len(self.ranks))]
        actors += [(self.gpu, rank) for rank in range(len(self.ranks))]
        while True:
            self.rng.shuffle(actors)
            if not any(act(rank) for act, rank in actors):
                break
        stuck = [
            f"rank {r}: host at {self.ranks[r][self.at[r]] if self.at[r] < len(self.ranks[r]) else 'its end'}, "
            f"GPU at {self.heads(r)}"
            for r in range(len(self.ranks))
            if self.at[r] < len(self.ranks[r]) or any(self.queues[r].values())
        ]
        return "; ".join(stuck) or None


def check(schedule: Schedule, rng: random.Random, prefetches: Iterable[int | None] = (0, 1, None)) -> None:
    for prefetch in prefetches:
        ranks, edges = programs(schedule, prefetch)
        without, _ = programs(schedule, prefetch, receives=False)
        assert [[i for i in rank if i[0] != "RECEIVE"] for rank in ranks] == without
        for queues, sync in itertools.product((1, 2), (0.0, 0.2)):
            machine = Machine(ranks, edges, queues, sync, rng)
            assert machine.run() is None
            assert len(machine.transferred) == sum(edge[6] for edge in edges)


def test_random_orders() -> None:
    """Programs of families with receives are pinned in test_pinned_orders.py."""
    rng = random.Random(1)
    for _ in range(100):
        check(random_order(rng), rng)
    for name in ("seq1f1b", "zbv", "seq1f1b-interleaved", "dualpipev"):
        for P, k in itertools.product((3, 5), (1, 2)):
            schedule = small_schedule(name, P, 2 * P, k)
            if schedule is not None:
                check(schedule, rng, (0, 1))
                check(schedule.forward_only(), rng, (1,))
