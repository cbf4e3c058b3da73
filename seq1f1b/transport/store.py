"""Ranks anywhere: a store carries what processes of one host share, and a thread watches it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import ipaddress
import json
import os
import pickle
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined] # taken from C by a star, which is no export

from seq1f1b import _C
from seq1f1b.transport.group import map_fd, memory_fd
from seq1f1b.transport.meeting import SETUP_TIMEOUT
from seq1f1b.transport.processes import ProcessRank, first_line
from seq1f1b.transport.relay import C10dRelay, Lifeline
from seq1f1b.transport.shm import open_shm_end

_T = TypeVar("_T")
_WATCH_PERIOD = 0.05  # seconds between two looks of a watcher into the store
_TAGS = 1 << 14  # of one generation: two per edge, two transfers each; torch's tags are 31 bits


class StoreRank(ProcessRank):
    """A rank whose peers are anywhere: the block is this process's own, and a store carries what it would share.

    One thread, the watcher, talks to the store: torch's own calls of it wait without limit while the link to it is down
    (torch 2.13). It copies failures and progress between block and store, and finds out who is gone. Edges between
    processes that could meet use shared memory, the others the process group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        process_group: Any,
        store: Any,
        connections: dict[int, socket.socket],
        generation: int,
        arena_bytes: int,
    ) -> None:
        self._generation = generation
        block_bytes = _C.group_block_bytes(size)
        group = _C.group_create(map_fd(memory_fd(block_bytes), block_bytes), size, rank)
        local_size = 1 + len(connections)
        super().__init__(rank, size, group, process_group, connections, arena_bytes=arena_bytes, local_size=local_size)
        self._store = store
        self._relays: dict[tuple[int, int], C10dRelay] = {}
        self._lifelines: dict[int, Lifeline] = {}
        self._suspects: queue.SimpleQueue[tuple[int, str, str | None]] = queue.SimpleQueue()
        self._read: dict[int, bytes] = {}  # others' progress as last read
        self._lost: str | None = None  # who is gone for good, in words
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._closing, self._closed_store = threading.Event(), threading.Event()
        self._watching = True
        self._watcher = threading.Thread(target=self._watch, name="seq1f1b watcher", daemon=True)
        self._watcher.start()
        self._ask(self._publish_progress)
        self.barrier()  # everyone's progress can be read from here on

    # -- the watcher's

    def _watch(self) -> None:
        hang_ups = select.poll()
        for connection in self._connections.values():
            hang_ups.register(connection, select.POLLRDHUP)
        turns, between_progress = 0, 4 * max(1, self.size // 16)
        turn_at = time.monotonic()
        while not self._closing.is_set():
            try:
                do, answer = self._requests.get(timeout=max(0.0, turn_at - time.monotonic()))
            except queue.Empty:
                turns += 1
                turn_at = time.monotonic() + _WATCH_PERIOD
                try:
                    self._find_the_lost(hang_ups)
                    if self._watching:
                        self._exchange_failure()
                    if turns % between_progress == 0:
                        self._exchange_progress()
                except Exception as error:
                    self._lose_store(error)
                    break
            else:
                try:
                    answer.put(do())
                except Exception as error:
                    self._lose_store(error)
                    break
        self._closed_store.set()

    def _lose_store(self, error: Exception) -> None:
        if not self._closing.is_set():
            self._lost = self.lose(0, f"its store does not answer: {first_line(error)}")

    def _publish_progress(self) -> None:
        self._store.set(f"progress/{self.rank}", json.dumps(_C.group_get_progress(self.group, self.rank)))

    def _exchange_failure(self) -> None:
        """Publishes this process's failure, or learns of another's; the first one in the store stays."""
        key = f"failure/{self._epoch}"
        failure = _C.group_failure(self.group)
        if failure is not None:
            self._store.compare_set(key, "", json.dumps(failure))
        elif self._store.check([key]):
            _C.group_fail(self.group, *json.loads(self._store.get(key)))

    def _exchange_progress(self) -> None:
        self._publish_progress()
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank, value in zip(others, self._store.multi_get([f"progress/{rank}" for rank in others]), strict=True):
            if value == self._read.get(rank):  # cut off, or asleep: its age is of when it was published
                continue
            self._read[rank] = value
            what, age, waiting_for = json.loads(value)
            if age >= 0:
                _C.group_set_progress(self.group, rank, what, age, waiting_for)

    def _find_the_lost(self, hang_ups: select.poll) -> None:
        """Finds ranks whose connection ended though they have not closed, and tells all."""
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for fd, _ in hang_ups.poll(0):
            hang_ups.unregister(fd)
            self._suspect(ranks[fd], "it closed its socket")
        while not self._suspects.empty():
            rank, why, edge = self._suspects.get()
            if edge is None and self._store.check([f"closed/{rank}"]):
                continue
            self._exchange_progress()
            self._lost = self.lose(rank, why, edge)
            self._store.compare_set("lost", "", self._lost)

    def _suspect(self, rank: int, why: str, edge: str | None = None) -> None:
        """A connection ended, from any thread. edge: on which a message was under way; None: perhaps it was closed."""
        self._suspects.put((rank, why, edge))

    # -- asking it

    def _ask(self, do: Callable[[], _T], limit_s: float | None = None, *, recovering: bool = False) -> _T:
        """Returns what a call of the store returns. Raises PipelineError on a failure, or without an answer in time."""
        answer: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self._requests.put((do, answer))
        limit_s = self.timeout_s if limit_s is None else limit_s
        start = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=0.05)
            if not recovering:
                self.check()
            if self._closed_store.is_set():
                raise self._failure(0, self._lost or "the pipeline is closed")
            if time.monotonic() - start > limit_s:
                raise self._failure(0, f"rank 0 does not answer: its store was asked {limit_s:.0f} s ago")

    # -- steps

    def end_step(self, failed: bool) -> None:
        if not failed:
            for relay in self._relays.values():
                relay.flush()
                relay.settle()
        super().end_step(failed)
        if failed:
            with contextlib.suppress(RuntimeError):  # the store may be what failed
                self._ask(self._exchange_failure, 5.0, recovering=True)
            if self.rank == 0:  # the store ends with this process, perhaps at once: let the others read why
                time.sleep(4 * _WATCH_PERIOD)

    def _recover(self) -> None:
        self._ask(lambda: self._set_watching(False), recovering=True)
        super()._recover()
        self._set_watching(True)

    def _set_watching(self, watching: bool) -> None:
        self._watching = watching

    def _forget_failure(self) -> None:
        started = {edge: relay.started() for edge, relay in self._relays.items()}
        everyones = [pickle.loads(data) for data in self._gather(pickle.dumps(started), recovering=True)]
        for edge, relay in self._relays.items():
            relay.drain(everyones[relay.peer].get(edge, ([], [])))
        _C.group_clear(self.group)

    # -- collectives and edges

    def _gather_round(self, data: bytes, recovering: bool) -> list[bytes]:
        store, turn = self._store, f"gather/{self._epoch}/{self._round}"
        keys = [f"{turn}/{rank}" for rank in range(self.size)]

        def look() -> list[bytes] | None:
            if recovering and self._lost is None and store.check(["lost"]):
                self._lost = store.get("lost").decode()
            return store.multi_get(keys) if store.check(keys) else None

        self._ask(lambda: store.set(keys[self.rank], data), recovering=recovering)
        start, pause = time.monotonic(), 1e-4
        while (values := self._ask(look, recovering=recovering)) is None:
            if not recovering:
                self.check()
            elif self._lost is not None:
                raise _C.PipelineError(self._lost)
            self._check_time(keys, time.monotonic() - start)
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        if self._round >= 2:  # all have read it: they were all at the round before this one
            read = f"gather/{self._epoch}/{self._round - 2}/{self.rank}"
            self._ask(lambda: store.delete_key(read), recovering=recovering)
        self._round += 1
        return [bytes(value) for value in values]

    def _check_time(self, keys: list[str], waited: float) -> None:
        if waited <= self.timeout_s:
            return
        there = self._ask(lambda: [self._store.check([key]) for key in keys], recovering=True)
        for rank in (rank for rank, is_there in enumerate(there) if not is_there):
            self.check_progress(rank, "all ranks to meet")

    def transport_to(self, peer_rank: int) -> str:
        return "shm" if peer_rank in self._connections else "c10d"

    def _open_end(
        self, source_stage: int, destination_stage: int, peer_rank: int, is_receiver: bool, text: str
    ) -> object:
        if peer_rank in self._connections:
            connection = self._connections[peer_rank]
            return open_shm_end(self, connection, source_stage, destination_stage, peer_rank, is_receiver, text)
        # Stages of an edge are neighbours. Tags of their own per pipeline: receives that an earlier one on this process
        # group left behind after a failure never match.
        first_tag = self._generation * _TAGS
        broken = functools.partial(self._suspect, peer_rank)
        if peer_rank not in self._lifelines:
            self._lifelines[peer_rank] = Lifeline(self._process_group, peer_rank, 2 * (first_tag + _TAGS - 1), broken)
        tag = first_tag + 2 * min(source_stage, destination_stage) + (source_stage > destination_stage)
        relay = C10dRelay(self, self._process_group, peer_rank, tag, is_receiver, text, broken)
        self._relays[source_stage, destination_stage] = relay
        return relay.end

    def close(self) -> None:
        """Leaves together: rank 0, whose store the others need, waits a while for them."""
        if self._closing.is_set():
            return
        failed = _C.group_failure(self.group) is not None
        if failed and self._relays:  # complete what the failed step left in flight, if the others close as well
            self.timeout_s = min(self.timeout_s, 5.0)
            with contextlib.suppress(RuntimeError):
                self._recover()
        super().close()
        _C.group_progress(self.group, "close()")
        limit_s = 1.0 if failed else min(self.timeout_s, 30.0)
        with contextlib.suppress(RuntimeError):
            if failed:  # perhaps just now: whoever meets the others waits for this
                self._ask(self._exchange_failure, limit_s, recovering=True)
            self._ask(lambda: self._store.set(f"closed/{self.rank}", ""), limit_s, recovering=True)
        for lifeline in self._lifelines.values():
            lifeline.close()
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + limit_s
            keys = [f"closed/{rank}" for rank in range(self.size)]
            while self.rank == 0 and not self._ask(lambda: self._store.check(keys), limit_s, recovering=True):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        self._closing.set()
        self._watcher.join(1.0)
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()
        for connection in self._connections.values():
            connection.close()


def _own_address(process_group: Any) -> str:
    """A name or address of this host by which processes on others reach it.

    All of them reached the host of the process group's own store. Where that is this one, its name is known to be good
    (here it may mean a loopback address, as Debian's 127.0.1.1); elsewhere, the address from which packets leave for
    it.
    """
    store = process_group.get_group_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR")  # a file, as a store, has no host
    for name in [host] if host else ["192.0.2.1", socket.gethostname()]:  # the first leads to the default route
        with contextlib.suppress(OSError):
            for family, kind, protocol, _, there in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                    probe.connect(there)  # sends nothing
                    source = str(probe.getsockname()[0])
                    local = source == there[0] or ipaddress.ip_address(source.partition("%")[0]).is_loopback
                    return name if local else source
    raise _C.PipelineError(
        f"rank 0 of the pipeline finds no address of its own: {host or socket.gethostname()!r} does not resolve here; "
        "give the launcher an address instead of a name"
    )


def connect_store(
    rank: int,
    size: int,
    process_group: Any,
    gather: Callable[[Any], list[Any]],
    address: str | None,
    connections: dict[int, socket.socket],
    generation: int,
    arena_bytes: int,
) -> StoreRank:
    """address: that reaches rank 0 from everywhere; None: what it finds out."""
    error: Exception | None = None
    store: Any = None
    place: tuple[str, int] | None = None
    if rank == 0:
        try:
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            place = address or _own_address(process_group), store.port
        except (RuntimeError, OSError) as caught:
            error = caught
    place = gather(place)[0]
    if error is not None:
        raise error
    if place is None:
        raise _C.PipelineError("rank 0 of the pipeline could not open its store; its own error says why")
    unreached = None
    if rank != 0:
        try:
            host, port = place
            store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=SETUP_TIMEOUT))
        except RuntimeError as caught:
            unreached = first_line(caught)
    for other, why in enumerate(gather(unreached)):
        if why is not None:
            raise _C.PipelineError(
                f"rank {other} cannot reach the store of rank 0 at {place[0]} port {place[1]} ({why}): hosts of a "
                "pipeline must reach each other on all ports, on the network that leads to the launcher's address"
            )
    return StoreRank(rank, size, process_group, store, connections, generation, arena_bytes)
