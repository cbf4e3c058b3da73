"""Ranks on any host: a store replaces the shared memory of processes on one host, and a thread watches the store."""

from __future__ import annotations

import contextlib
import functools
import queue
import select
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from seq1f1b import _C
from seq1f1b.transport.descriptors import private_mapping
from seq1f1b.transport.edges import Edge
from seq1f1b.transport.failure import Failure
from seq1f1b.transport.meeting import Meeting, poll
from seq1f1b.transport.processes import ProcessRank
from seq1f1b.transport.relay import C10dRelay, Lifeline
from seq1f1b.transport.values import pack, unpack
from seq1f1b.transport.workers import Worker, first_line

_T = TypeVar("_T")
_CLOSED = "close()"  # progress of a rank from close() on
_WATCH_PERIOD = 0.05  # seconds between two looks of a watcher into the store
_TAGS = 1 << 14  # tags of one generation: two per edge; a relay makes four of each. torch's tags have 31 bits


def _tag_of(edge: Edge) -> int:
    """Returns a tag unique among edges of one direction between two ranks; the lifeline has :data:`_TAGS` - 1.

    Activations and gradients join neighbouring stages. In every further channel, two ranks have one edge each way.
    """
    if edge.channel > 1:
        return _TAGS - edge.channel
    return 2 * min(edge.source, edge.destination) + (edge.source > edge.destination)


class StoreRank(ProcessRank):
    """A rank with peers on any host: each process has a private block, and a store carries the shared state.

    The store's thread copies failures and progress between block and store, and finds dead ranks. An edge uses shared
    memory if its two processes could meet, and the process group otherwise.

    Args:
        meeting: provides the store.
    """

    def __init__(
        self,
        meeting: Meeting,
        connections: dict[int, socket.socket],
        arena_bytes: int,
        spoiled: object | None,
    ) -> None:
        rank, size = meeting.rank, meeting.size
        super().__init__(meeting, connections, arena_bytes, private_mapping(_C.group_block_bytes(size)), spoiled)
        self._store = meeting.store.part(f"{self._generation}")
        self._relays: dict[Edge, C10dRelay] = {}
        self._beginner = Worker("seq1f1b transfers", failed=lambda error: self.fail(first_line(error)))
        self._lifelines: dict[int, Lifeline] = {}
        self._suspects: queue.SimpleQueue[tuple[int, str, str | None]] = queue.SimpleQueue()
        self._passed = Failure(rank, "", "", "", 0)  # no peer can meet this rank in the failure's step or before
        self._read: dict[int, bytes] = {}  # by peer, the progress as last read
        self._begun = dict.fromkeys(range(size), 0)  # by rank, the last step known to have begun
        self._lost: str | None = None  # the text about a rank gone for good
        self._closed: set[int] = set()  # closed ranks; a later step of this rank would wait for them
        self._gone: set[int] = set()  # ranks found dead by this rank's connections
        self._closing = False
        self._begins: bool | None = None  # whether the pipeline begins; None until all ranks agree
        self._watching = True
        self._turns = 0
        self._hang_ups = select.poll()
        for connection in self._connections.values():
            self._hang_ups.register(connection, select.POLLRDHUP)
        self._worker = Worker(f"seq1f1b the launcher's store{self._store.place}", self._watch, _WATCH_PERIOD)
        self._ask(self._publish_progress)

    # -- in the watcher's thread

    def _watch(self) -> None:
        try:
            self._find_the_lost()
            if self._watching:
                self._exchange_failure()
            self._turns += 1
            if self._turns % (4 * max(1, self.size // 16)) == 0:
                self._exchange_progress()
        except Exception as error:  # the store is lost
            if self._closing:
                raise
            try:  # without the store, only the neighbours of a dead rank know its number
                self._lost = self.lose(*self._suspects.get(timeout=_WATCH_PERIOD * 10))
            except queue.Empty:
                self._lost = f"rank {self.rank} lost the launcher's store{self._store.place}: {first_line(error)}"
                self.fail(self._lost)
            raise

    def _publish_progress(self) -> None:
        what, age, waiting_for = _C.group_get_progress(self.group, self.rank)
        value = what, age, waiting_for, self._begun[self.rank], tuple(self._passed)
        self._store.set(f"progress/{self.rank}", pack(value))

    def _read_progress(self) -> dict[int, bytes]:
        """Returns the peers' published values by rank; empty until all peers have published one."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = self._store.get_all([f"progress/{rank}" for rank in others])
        return dict(zip(others, found or (), strict=False))

    def _find_closed(self) -> set[int]:
        return {rank for rank, value in self._read_progress().items() if unpack(value)[0] == _CLOSED}

    def _exchange_failure(self) -> None:
        """Publishes the process's failure, or reads a peer's. The first failure in the store stays.

        The failure's step becomes the earliest step in which any rank failed.
        """
        key = f"failure/{self.epoch}"
        failure = _C.group_failure(self.group)
        if failure is not None:
            *first, step = unpack(self._store.swap(key, b"", pack(failure)))
            if failure[-1] < step:  # if two ranks write at once, the next look corrects the step
                self._store.set(key, pack((*first, failure[-1])))
        elif (other := self._store.get(key)) is not None:
            _C.group_fail(self.group, *unpack(other))

    def _exchange_progress(self) -> None:
        self._publish_progress()
        for rank, value in self._read_progress().items():
            if value == self._read.get(rank):  # the rank is cut off or asleep, and the value's age is outdated
                continue
            self._read[rank] = value
            what, age, waiting_for, self._begun[rank], _ = unpack(value)
            if age >= 0:
                _C.group_set_progress(self.group, rank, what, age, waiting_for)
            if what == _CLOSED:
                self._closed.add(rank)

    def _find_the_lost(self) -> None:
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for fd, _ in self._hang_ups.poll(0):
            self._hang_ups.unregister(fd)
            self._suspect(ranks[fd], "it closed its socket")
        for rank in [r for r in self._closed if self.step > self._left and self.step >= self._begun[r]]:
            self._closed.remove(rank)
            self._lost = self.lose(rank, "it has closed")
        while not self._suspects.empty():
            rank, why, edge = self._suspects.get()
            if edge is None and rank in self._find_closed():
                continue
            self._gone.add(rank)
            if self._watching:  # the rank may have published a failure before its end
                self._exchange_failure()
            self._exchange_progress()
            self._lost = self.lose(rank, why, edge)
            self._store.swap("lost", b"", self._lost.encode())

    def _suspect(self, rank: int, why: str, edge: str | None = None) -> None:
        """Records a connection's end, from any thread. ``edge`` had a message under way; None: perhaps a close."""
        self._suspects.put((rank, why, edge))

    # -- calls of the store

    def _ask(self, do: Callable[[], _T], limit_s: float | None = None, *, recovering: bool = False) -> _T:
        """Returns the result of a call of the store. Raises PipelineError on a failure, or without an answer."""
        try:
            limit_s = self.timeout_s if limit_s is None else limit_s
            return self._worker.ask(do, limit_s, (lambda: None) if recovering else self.check)
        except _C.PipelineError:
            raise
        except Exception as error:
            raise self._failure(0, self._lost or first_line(error)) from error

    # -- steps

    def begin_step(self, training: bool = True) -> int:
        step = self._begun[self.rank] = super().begin_step(training)
        self._worker.put(self._publish_progress)
        return step

    def finish_units(self, first_stage_rank: int) -> None:
        """Returns at once: the store is slower than a message. A rank past the step hears of a failure in the next."""

    def end_step(self, failed: bool) -> None:
        if not failed:
            for relay in self._relays.values():
                relay.flush()
                relay.settle()
            deadline = time.monotonic() + self.timeout_s
            while _C.group_is_spoiled(self.group):  # a rank of this host has failed in this step, and its GPU went on
                self.check()
                if time.monotonic() > deadline:
                    self.fail("a rank of this host has failed in this step, and has not told why")
                time.sleep(0.001)
        super().end_step(failed)
        self._worker.put(self._publish_progress)
        if failed and self.rank == 0:  # the store may end with this process: the ranks get time to read the reason
            time.sleep(4 * _WATCH_PERIOD)

    def _tell(self, left: Failure | None = None) -> None:
        def tell() -> None:
            self._exchange_failure()
            if left is not None:
                self._pass(left)

        with contextlib.suppress(RuntimeError):  # the store itself may have failed
            self._ask(tell, 5.0, recovering=True)

    def _pass(self, failure: Failure) -> None:
        if self._passed.step < failure.step:
            self._passed = failure
            self._publish_progress()

    def _look_passed(self) -> Failure | None:
        found = (Failure(*unpack(value)[-1]) for value in self._read_progress().values())
        return next((failure for failure in found if failure.step >= self.step), None)

    def _check_passed(self) -> None:
        if (failure := self._ask(self._look_passed, recovering=True)) is not None:
            raise self._will_not_meet(failure)

    def _recover(self) -> None:
        def come() -> None:
            self._watching = False
            self._pass(Failure(self.rank, "", "", "", self.step - 1))

        self._ask(come, recovering=True)
        try:
            super()._recover()
        finally:
            self._watching = not self._acknowledged  # the failure is forgotten

    def _forget_failure(self) -> None:
        everyones = [unpack(data) for data in self._gather(self._pack_started(), recovering=True)]
        for edge, relay in self._relays.items():
            relay.drain(everyones[relay.peer].get(edge, ()), self.timeout_s, self._check_passed)
        _C.group_clear(self.group)

    def _pack_started(self) -> bytes:
        return pack({edge: relay.started() for edge, relay in self._relays.items()})

    def _drain_with_neighbours(self, limit_s: float) -> None:
        """Completes a failed step's messages in flight, together with closing neighbours."""
        data = self._pack_started()
        self._ask(lambda: self._store.set(f"in flight/{self.rank}", data), limit_s, recovering=True)
        deadline = time.monotonic() + limit_s
        peers = {relay.peer for relay in self._relays.values()}

        def look() -> list[tuple[int, bytes]]:
            closed = self._find_closed()  # first: a closed rank has published its messages in flight before
            told = {peer: self._store.get(f"in flight/{peer}") for peer in peers}
            return [(peer, theirs or pack({})) for peer, theirs in told.items() if theirs or peer in closed]

        while (peers := peers - self._gone) and (left_s := deadline - time.monotonic()) > 0:
            for peer, theirs in self._ask(look, limit_s, recovering=True):
                peers.remove(peer)
                for edge, relay in self._relays.items():
                    if relay.peer == peer:
                        relay.drain(unpack(theirs).get(edge, ()), left_s)
            time.sleep(0.01)

    # -- collectives and edges

    def _gather_round(self, data: bytes, recovering: bool) -> list[bytes]:
        store, keys, start = self._store, self._gather_keys(self._round), time.monotonic()

        def look() -> tuple[list[bytes] | None, Failure | None]:
            if recovering and self._lost is None and (lost := store.get("lost")) is not None:
                self._lost = lost.decode()
            values = store.get_all(keys)
            return values, self._look_passed() if recovering and values is None else None

        def meet() -> list[bytes] | None:
            values, passed = self._ask(look, recovering=recovering)
            if values is not None:
                return values
            if passed is not None:
                raise self._will_not_meet(passed)
            if recovering and self._lost is not None:
                raise _C.PipelineError(self._lost)
            if not recovering:
                self.check()
                self._check_skips(keys)
            if time.monotonic() - start > self.timeout_s:
                for rank in self._missing(keys, recovering=True):
                    self.check_progress(rank, "all ranks to meet")
            return None

        self._ask(lambda: store.set(keys[self.rank], data), recovering=recovering)
        found = poll(meet, 0.01)
        if self._round > 0:  # all ranks are in this round, so all have read the round before
            read = self._gather_keys(self._round - 1)[self.rank]
            self._ask(lambda: store.delete(read), recovering=recovering)
        self._round += 1
        return found

    def _missing(self, keys: list[str], recovering: bool = False) -> list[int]:
        return self._ask(lambda: [i for i, key in enumerate(keys) if not self._store.has(key)], recovering=recovering)

    def _check_skips(self, keys: list[str]) -> None:
        """Raises PipelineError for a missing rank in a later step than this rank: the missing rank will not come."""
        later = [rank for rank, begun in self._begun.items() if begun > self._begun[self.rank]]
        for rank in self._missing(keys) if later else ():
            if rank not in later:
                continue
            if rank in self._closed:
                raise self._failure(rank, self.lose(rank, "it has closed", "waiting for all ranks to meet"))
            step = f"has begun step {self._begun[rank]}"
            raise self._failure(rank, f"rank {rank} {step} without a collective that rank {self.rank} waits in")

    def _gather_keys(self, turn: int) -> list[str]:
        return [f"gather/{self.epoch}/{turn}/{rank}" for rank in range(self.size)]

    def transport_to(self, peer_rank: int) -> str:
        return "shm" if peer_rank in self._connections else "c10d"

    def _open_end(self, edge: Edge, peer_rank: int, is_receiver: bool, text: str) -> object:
        if peer_rank in self._connections:
            return super()._open_end(edge, peer_rank, is_receiver, text)
        # Each pipeline has different tags, so receives left by a failed pipeline on this process group never match.
        first_tag = self._generation * _TAGS
        broken = functools.partial(self._suspect, peer_rank)
        if peer_rank not in self._lifelines:
            tag = C10dRelay.TAGS * (first_tag + _TAGS - 1)
            self._lifelines[peer_rank] = Lifeline(self.process_group, peer_rank, tag, broken)
        tag = first_tag + _tag_of(edge)
        self._relays[edge] = C10dRelay(self, peer_rank, tag, is_receiver, text, self._beginner, broken)
        return self._relays[edge].end

    def begin(self) -> None:
        super().begin()
        if not self._agree_whether_it_begins("yes"):
            self._ask(self._exchange_failure)
            self.check()
            raise self._failure(self.rank, "another rank ended in the pipeline's set-up")
        for lifeline in self._lifelines.values():
            lifeline.begin()

    def _agree_whether_it_begins(self, wish: str) -> bool:
        """Returns whether the pipeline begins, equal on all ranks: a rank may give up after all have come.

        The first wish counts. A rank that begins waits for its neighbours' farewells; only a farewell ends this wait.
        """
        if self._begins is None:
            found = self._ask(lambda: self._store.swap("begins", b"", wish.encode()), recovering=True)
            self._begins = found == b"yes"
        return self._begins

    def close(self) -> None:
        """Leaves the pipeline. Rank 0 waits a while for all ranks, because the store may end with its process."""
        if self._closing:
            return
        failed = self.has_failed
        with contextlib.suppress(RuntimeError):  # without the store no rank says farewell
            if self._begins is None and self._agree_whether_it_begins("no"):
                for lifeline in self._lifelines.values():
                    lifeline.begin()
        if failed and self._relays and self._begins:
            with contextlib.suppress(RuntimeError):
                self._drain_with_neighbours(min(self.timeout_s, 5.0))
        super().close()

    def _say_farewell(self) -> None:
        failed = self.has_failed
        self._begun[self.rank] = self.step + 1  # this step never ends, so a rank in it must not wait
        limit_s = 1.0 if failed else min(self.timeout_s, 30.0)
        with contextlib.suppress(RuntimeError):
            if failed:  # maybe just now: ranks in a meeting wait for the failure
                self._ask(self._exchange_failure, limit_s, recovering=True)
            self._ask(self._publish_progress, limit_s, recovering=True)
        for lifeline in self._lifelines.values():
            lifeline.close()

        def is_over() -> bool:
            have_closed = len(self._find_closed()) == self.size - 1
            if have_closed:  # no rank could delete these before
                for key in ("begins", *(self._gather_keys(self._round - 1) if self._round else ())):
                    self._store.delete(key)
            return have_closed

        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + limit_s
            while self.rank == 0 and not self._ask(is_over, limit_s, recovering=True) and time.monotonic() < deadline:
                time.sleep(0.01)
        if failed and self._connections:  # a waiting peer would take the end of a connection for this rank's death
            time.sleep(4 * _WATCH_PERIOD)
        self._closing = True
        self._worker.close(1.0)
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()
        self._beginner.close()
