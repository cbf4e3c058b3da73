"""How the ranks of a pipeline meet: who maps which memory, and which transport is behind each edge.

Only set-up is here. Messages, waiting, progress and failures are C (``csrc/group.c``, ``csrc/transport/arena.c``).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import fcntl
import functools
import gc
import hmac
import ipaddress
import json
import os
import pickle
import queue
import re
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from seq1f1b import _core

__all__ = ["ARENA_BYTES", "DTYPES", "LoopbackGroup", "RankGroup", "connect", "resolve_group"]

ARENA_BYTES = 1 << 40
"""Address space of one edge; memory appears as it is touched."""

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
"""Position = code of the type in C (``csrc/dtype.h``)."""

_T = TypeVar("_T")

REQUIRES_GRAD, NONE = 1, 2  # flags of a tensor in a message: csrc/p2p.h
_GATHER_BYTES = 4032  # S1F_GATHER_BYTES


def memory_fd(size: int) -> int:
    """Descriptor of anonymous shared memory: no name in the file system, and gone with its last user.

    Sealed against shrinking, which would turn a peer's read into SIGBUS.
    """
    fd = os.memfd_create("seq1f1b", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_fd(fd: int, size: int) -> object:
    """Maps a descriptor and closes it; the mapping stays until its last user is gone."""
    try:
        return _core.mapping_create(fd, size)
    except MemoryError:  # address space: engines that are garbage may still hold some
        gc.collect()
        return _core.mapping_create(fd, size)
    finally:
        os.close(fd)


def place_tensor(owner: object, address: int, dtype: int, sizes: tuple[int, ...], gpu: int = -1) -> Tensor:
    """Tensor over memory of a place; ``owner`` (an edge end or a mapping) lives as long as the tensor does.

    Args:
        gpu: on which the memory is; -1: host memory.
    """
    return torch.utils.dlpack.from_dlpack(_core.place_tensor_capsule(owner, address, dtype, sizes, gpu))


class RankGroup(ABC):
    """One rank's membership in a pipeline: progress, failures, edges and small collectives.

    A step that fails on one rank ends on all: everyone gets one :class:`PipelineError`. The next :meth:`begin_step`
    waits until all ranks have left the failed step, then goes on.
    """

    is_thread = False  # True: the ranks are threads of one process

    def __init__(self, rank: int, size: int, group: object, *, arena_bytes: int, local_size: int) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.arena_bytes = arena_bytes
        self.step = 0
        self._local_size = local_size
        self._epoch = self._round = 0
        self._acknowledged = False  # this rank's user has seen the standing failure
        self._ends: dict[tuple[int, int], object] = {}
        self._edge_texts: dict[int, str] = {}  # of an edge to each neighbour: for errors
        self._peers: dict[tuple[int, int], int] = {}
        self.set_limits(300.0)

    # -- limits, progress, failure

    def set_limits(self, timeout_s: float, spin_us: float | None = None) -> None:
        """Longest silence of a peer, and how long to spin before sleeping.

        Args:
            spin_us: None: 20, or 0 where the ranks of this host have more threads than there are cores.
        """
        if spin_us is None:
            crowded = self._local_size * torch.get_num_threads() > len(os.sched_getaffinity(0))
            spin_us = 0.0 if crowded else 20.0
        self.timeout_s = timeout_s
        _core.group_set_limits(self.group, timeout_s, spin_us)

    def fail(self, text: str) -> None:
        """Ends the step on every rank, in this rank's name; the first failure wins."""
        _core.group_fail(self.group, self.rank, text)

    def lose(self, rank: int, why: str, edge: str | None = None) -> str:
        """Ends the step on every rank: another one is gone. Returns the text."""
        what, age, _ = _core.group_get_progress(self.group, rank)
        edge = edge or self._edge_texts.get(rank, "set-up")
        text = f"rank {rank} is gone{f', last seen in {what}' if age >= 0 else ''} ({edge}): {why}"
        _core.group_fail(self.group, rank, text, what, edge.partition(",")[0])
        return text

    def check_progress(self, rank: int, waiting_for: str) -> None:
        """PipelineError on every rank, unless a rank made progress within the time-out."""
        what, age, _ = _core.group_get_progress(self.group, rank)
        if not 0 <= age <= self.timeout_s:
            since = f"has been in {what} for {age:.0f} s" if age >= 0 else "has not entered a step"
            raise self._failure(rank, f"rank {rank} {since} (waiting for {waiting_for})")

    def _failure(self, rank: int, text: str) -> _core.PipelineError:
        """Ends the step on every rank. The error is this one also where an earlier failure stands."""
        _core.group_fail(self.group, rank, text)
        error = _core.PipelineError(text)
        error.rank = rank
        return error

    def check(self) -> None:
        """Raises PipelineError once any rank failed."""
        _core.group_check(self.group)

    # -- steps

    def begin_step(self) -> int:
        """Enters a step, after recovery from a failed one. Returns its number, which all ranks agree on.

        Raises:
            PipelineError: another rank failed since this one left its last step; or a rank is gone.
        """
        if _core.group_failure(self.group) is not None:
            if not self._acknowledged:
                self._acknowledged = True
                self.check()
            self._recover()
        self.step += 1
        _core.group_begin_step(self.group, self.step)
        return self.step

    def end_step(self, failed: bool) -> None:
        """Leaves a step. Does not wait for the others."""
        if failed:
            if _core.group_failure(self.group) is None:
                self.fail("left the step without a reason")
            self._acknowledged = True
        _core.group_progress(self.group, f"code after step {self.step}")

    @property
    def epoch(self) -> int:
        """Counts the failed steps that all ranks have left; equal on all of them within a step."""
        return self._epoch

    def _recover(self) -> None:
        """All ranks have left the failed step once they meet here; nobody enters a new one before it is forgotten."""
        self._epoch += 1
        self._round = 0
        steps = self._gather(struct.pack("q", self.step), recovering=True)
        self._forget_failure()
        self._gather(b"", recovering=True)
        self.step = max(struct.unpack("q", step)[0] for step in steps)
        self._acknowledged = False

    def _forget_failure(self) -> None:
        if self.rank == 0:
            _core.group_clear(self.group)

    # -- small collectives: control values, not data

    def _gather_round(self, data: bytes, recovering: bool) -> list[bytes]:
        self._round += 1
        fds = self._hangup_fds()
        return _core.group_gather(self.group, self._epoch, self._round - 1, recovering, data, fds)

    def _hangup_fds(self) -> list[int]:
        return [-1] * self.size

    def _gather(self, data: bytes, recovering: bool = False) -> list[bytes]:
        """Everyone's bytes, of any length: the first round carries the lengths."""
        head = struct.calcsize("q")
        room = _GATHER_BYTES - head
        parts = self._gather_round(struct.pack("q", len(data)) + data[:room], recovering)
        lengths = [struct.unpack_from("q", part)[0] for part in parts]
        whole = [bytearray(part[head:]) for part in parts]
        for start in range(room, max(lengths), _GATHER_BYTES):
            more = self._gather_round(data[start : start + _GATHER_BYTES], recovering)
            for body, part in zip(whole, more, strict=True):
                body += part
        return [bytes(body) for body in whole]

    def barrier(self) -> None:
        self._gather(b"")

    def all_gather_object(self, value: Any) -> list[Any]:
        return [pickle.loads(data) for data in self._gather(pickle.dumps(value))]

    def _all_gather_floats(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        gathered = self._gather(struct.pack(f"{len(values)}d", *values))
        rows = [struct.unpack(f"{len(data) // 8}d", data) for data in gathered]
        if any(len(row) != len(values) for row in rows):
            raise ValueError(f"the ranks gave {[len(row) for row in rows]} values to one reduction")
        return rows

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sums by position, in rank order on every rank, so that all get the same bits."""
        return [sum(column) for column in zip(*self._all_gather_floats(values), strict=True)]

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self._all_gather_floats(values), strict=True)]

    # -- gradients of tied parameters

    def exchange(
        self, mine: Tensor | None, receivers: Sequence[int], senders: Sequence[int], like: Tensor
    ) -> dict[int, Tensor]:
        """Tensors of a few ranks, by rank, this rank's own among them. Called by all of these, in one order.

        Args:
            mine: sent to the receivers; None: nothing is sent.
            senders: other ranks that send, each a tensor of the shape of ``like``, a parameter, in the dtype of its
                gradients; or in its own, where it is not one.
        """
        found = {} if mine is None else {self.rank: mine.contiguous()}
        places = {rank: torch.empty(like.shape, dtype=like.grad_dtype or like.dtype) for rank in senders}
        transfers = [self._begin_receive(place, rank) for rank, place in places.items()]
        if mine is not None:
            data = found[self.rank].cpu()  # a device's travel through host memory
            transfers += [self._begin_send(data, rank) for rank in receivers]
        for transfer in transfers:
            transfer.wait()
        return found | {rank: place.to(like.device) for rank, place in places.items()}

    @abstractmethod
    def _begin_send(self, data: Tensor, rank: int) -> Any: ...

    @abstractmethod
    def _begin_receive(self, data: Tensor, rank: int) -> Any: ...

    # -- edges

    def edge_end(
        self, source_stage: int, destination_stage: int, peer_rank: int, is_receiver: bool, text: str
    ) -> object:
        """This rank's end of a directed edge. All ranks open their edges in one order that they agree on.

        Args:
            text: names the edge in errors: "activations of stage 0 to 1".
        """
        key = source_stage, destination_stage
        self._peers[key] = peer_rank
        self._edge_texts.setdefault(peer_rank, text)
        if key not in self._ends:
            self._ends[key] = self._open_end(source_stage, destination_stage, peer_rank, is_receiver, text)
        return self._ends[key]

    @abstractmethod
    def _open_end(
        self, source_stage: int, destination_stage: int, peer_rank: int, is_receiver: bool, text: str
    ) -> object: ...

    def peer_of(self, edge: tuple[int, int]) -> int:
        """The rank at the other end of an edge (source stage, destination stage) of this rank."""
        return self._peers[edge]

    @abstractmethod
    def transport_to(self, peer_rank: int) -> str:
        """What carries the edges to a neighbour: "loopback", "shm" or "c10d"."""

    @staticmethod
    def place_views(
        end: object, payload: int, tensors: Sequence[tuple[int, int, tuple[int, ...], int]], gpu: int = -1
    ) -> tuple[list[Tensor | None], list[bool]]:
        """Tensors over a message that has come, and which of them require grad; None for a gradient that is none.

        Args:
            payload: address of the message's payload.
            tensors: (dtype code, flags, sizes, offset in the payload) of each.
            gpu: on which the payload is; -1: host memory.
        """
        views = [
            None if flags & NONE else place_tensor(end, payload + offset, dtype, sizes, gpu)
            for dtype, flags, sizes, offset in tensors
        ]
        return views, [bool(flags & REQUIRES_GRAD) for _, flags, _, _ in tensors]

    def close(self) -> None:
        """Drops the edges; tensors that still lie in their places stay valid."""
        self._ends.clear()


class LoopbackGroup:
    """A pipeline whose ranks are threads of this process: ``LoopbackGroup(P)[rank]`` is one rank's group.

    For tests, and for looking at a schedule without launching anything.
    """

    def __init__(self, size: int, *, arena_bytes: int = ARENA_BYTES) -> None:
        if size < 1:
            raise ValueError(f"a pipeline has at least 1 rank, got {size}")
        memory = _LoopbackMemory(size, arena_bytes)
        self._ranks = [_LoopbackRank(memory, rank, size, arena_bytes) for rank in range(size)]

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: int) -> RankGroup:
        return self._ranks[rank]


class _LoopbackMemory:
    """What the ranks of one loopback share. It knows none of them, so that all goes with the last one."""

    def __init__(self, size: int, arena_bytes: int) -> None:
        self._lock = threading.Lock()
        self._arena_bytes = arena_bytes
        self._arenas: dict[tuple[int, int], object] = {}
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {}
        block_bytes = _core.group_block_bytes(size)
        self.block = map_fd(memory_fd(block_bytes), block_bytes)

    def arena(self, source_stage: int, destination_stage: int) -> object:
        """The memory of an edge: whichever end comes first makes it."""
        key = source_stage, destination_stage
        with self._lock:
            if key not in self._arenas:
                self._arenas[key] = map_fd(memory_fd(self._arena_bytes), self._arena_bytes)
            return self._arenas[key]

    def box(self, source: int, destination: int) -> queue.SimpleQueue[Tensor]:
        """Tensors on their way from one rank to another."""
        with self._lock:
            return self._boxes.setdefault((source, destination), queue.SimpleQueue())


class _LoopbackReceive:
    def __init__(self, group: RankGroup, box: queue.SimpleQueue[Tensor], place: Tensor) -> None:
        self._group, self._box, self._place = group, box, place

    def wait(self) -> None:
        while True:
            self._group.check()
            with contextlib.suppress(queue.Empty):
                self._place.copy_(self._box.get(timeout=0.1))
                return


class _Done:
    def wait(self) -> None: ...


class _LoopbackRank(RankGroup):
    is_thread = True

    def transport_to(self, peer_rank: int) -> str:
        return "loopback"

    def __init__(self, memory: _LoopbackMemory, rank: int, size: int, arena_bytes: int) -> None:
        group = _core.group_create(memory.block, size, rank)
        super().__init__(rank, size, group, arena_bytes=arena_bytes, local_size=size)
        self._memory = memory

    def _begin_send(self, data: Tensor, rank: int) -> Any:
        self._memory.box(self.rank, rank).put(data.clone())
        return _Done()

    def _begin_receive(self, data: Tensor, rank: int) -> Any:
        return _LoopbackReceive(self, self._memory.box(rank, self.rank), data)

    def _open_end(
        self, source_stage: int, destination_stage: int, peer_rank: int, is_receiver: bool, text: str
    ) -> object:
        arena = self._memory.arena(source_stage, destination_stage)
        return _core.arena_end(self.group, arena, -1, peer_rank, is_receiver, text)


# -- processes of one host ---------------------------------------------------------------------------------------------

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"{_TOKEN_BYTES}sq")  # token of whom is greeted, rank of who greets
_ARENA = struct.Struct("qqq")  # source stage, destination stage, bytes
_SETUP_TIMEOUT = 120.0  # seconds for all ranks to arrive at set-up


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


class Meeting:
    """Connects a rank with others of its host over abstract Unix sockets, which have no name in the file system.

    Such a name exists in one network namespace only, so whom a rank cannot :meth:`dial` is on another host, or behind
    what keeps containers apart. The names are visible to every user of the host, so either side checks the other's user
    id and a random 128-bit token that travelled through the process group.
    """

    def __init__(self, rank: int, timeout_s: float = _SETUP_TIMEOUT) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.name = f"\0seq1f1b-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.name)
        self._listener.listen(1024)  # those who dial before anyone is accepted
        self._listener.settimeout(timeout_s)
        self._dialled: dict[int, socket.socket] = {}

    def dial(self, names: Sequence[str], tokens: Sequence[bytes]) -> dict[int, str]:
        """Greets all lower ranks. Returns whom it cannot meet, and why."""
        unmet = {}
        for peer in range(self.rank):
            try:
                self._dialled[peer] = self._dial(names[peer])
                self._dialled[peer].sendall(_HELLO.pack(tokens[peer], self.rank))
            except OSError as error:
                unmet[peer] = str(error)
        return unmet

    def accept(self, dialled_by: set[int], tokens: Sequence[bytes]) -> dict[int, socket.socket]:
        """One connection per rank of the host, once both sides have checked the other.

        Args:
            dialled_by: higher ranks that dialled this one.
        """
        connections = self._dialled
        try:
            while dialled_by:
                connection, _ = self._listener.accept()
                greeter = self._greeted_by(connection, dialled_by)
                if greeter is None:
                    connection.close()
                    continue
                dialled_by = dialled_by - {greeter}
                connections[greeter] = connection
                connection.sendall(_HELLO.pack(tokens[greeter], self.rank))
            for peer in [rank for rank in connections if rank < self.rank]:
                token, answered_by = _HELLO.unpack(_receive(connections[peer], _HELLO.size))
                if not hmac.compare_digest(token, self.token) or answered_by != peer:
                    raise ConnectionError(f"who answers in the name of rank {peer} is not rank {peer}")
        except BaseException:
            self.close()
            raise
        self._listener.close()
        self._dialled = {}
        return connections

    def close(self) -> None:
        self._listener.close()
        for connection in self._dialled.values():
            connection.close()

    def _dial(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout_s)
            deadline = time.monotonic() + self.timeout_s
            while True:
                try:
                    connection.connect(name)
                    break
                except BlockingIOError:  # the peer's backlog is full
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            if _peer_uid(connection) != os.getuid():
                raise ConnectionError("another user answers")
        except BaseException:
            connection.close()
            raise
        return connection

    def _greeted_by(self, connection: socket.socket, expected: set[int]) -> int | None:
        """The rank behind a connection; None where it is a stranger, who learns nothing and delays little."""
        if _peer_uid(connection) != os.getuid():
            return None
        connection.settimeout(5.0)
        try:
            token, rank = _HELLO.unpack(_receive(connection, _HELLO.size))
        except OSError:
            return None
        connection.settimeout(self.timeout_s)
        return rank if hmac.compare_digest(token, self.token) and rank in expected else None


def _first_line(error: BaseException) -> str:
    """Without gloo's source file and advice."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[/\S+\] ", "", line).partition(". This is typically")[0]


_WATCH_PERIOD = 0.05  # seconds between two looks of a watcher into the store

_next_generation = 0  # of pipelines whose edges go over a process group
_TAGS = 1 << 14  # of one generation: two per edge, two transfers each; torch's tags are 31 bits

_open_groups: weakref.WeakSet[_ShmRank | _StoreRank] = weakref.WeakSet()


def _close_at_exit() -> None:
    """A watcher thread that is inside torch's store when the interpreter goes would end the process with SIGABRT."""
    for group in list(_open_groups):
        group.timeout_s = 1.0
        with contextlib.suppress(Exception):
            group.close()


atexit.register(_close_at_exit)


def _forget_sockets_after_fork() -> None:
    """A forked child (a data loader's worker) that kept the sockets would hide its parent's death from the peers."""
    for group in _open_groups:
        for connection in group._connections.values():
            connection.close()


os.register_at_fork(after_in_child=_forget_sockets_after_fork)


_EXCHANGE_TAG = (1 << 31) - 1  # of gradients of tied parameters: no edge of any generation has it
_EXCHANGE = "gradients of tied parameters"


class _Transfer:
    """Of the process group, whose own waits end with the peer's connection and otherwise with the group's time-out."""

    def __init__(self, group: RankGroup, peer: int, work: Any) -> None:
        self._group, self._peer, self._work = group, peer, work

    def wait(self) -> None:
        done: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                self._work.wait(_FOREVER)
                done.put(None)
            except Exception as error:
                done.put(_first_line(error))

        threading.Thread(target=work, name="seq1f1b tied parameters", daemon=True).start()
        start, group = time.monotonic(), self._group
        while True:
            with contextlib.suppress(queue.Empty):
                error = done.get(timeout=0.05)
                if error is None:
                    return
                group.lose(self._peer, error, _EXCHANGE)
            group.check()
            if time.monotonic() - start > group.timeout_s:
                group.check_progress(self._peer, _EXCHANGE)


class _ProcessRank(RankGroup):
    """A rank that is a process of a torch process group."""

    _process_group: Any

    def _begin_send(self, data: Tensor, rank: int) -> Any:
        work = dist.isend(data, group=self._process_group, group_dst=rank, tag=_EXCHANGE_TAG)
        return _Transfer(self, rank, work)

    def _begin_receive(self, data: Tensor, rank: int) -> Any:
        work = dist.irecv(data, group=self._process_group, group_src=rank, tag=_EXCHANGE_TAG)
        return _Transfer(self, rank, work)


class _ShmRank(_ProcessRank):
    """A rank whose peers are processes of the same host: one shared block, and an arena per edge."""

    def __init__(
        self,
        rank: int,
        size: int,
        process_group: Any,
        block: object,
        connections: dict[int, socket.socket],
        arena_bytes: int,
    ) -> None:
        super().__init__(rank, size, _core.group_create(block, size, rank), arena_bytes=arena_bytes, local_size=size)
        self._process_group = process_group
        self._connections = connections
        _open_groups.add(self)

    def transport_to(self, peer_rank: int) -> str:
        return "shm"

    def _hangup_fds(self) -> list[int]:
        return [self._connections[rank].fileno() if rank in self._connections else -1 for rank in range(self.size)]

    def _open_end(
        self, source_stage: int, destination_stage: int, peer_rank: int, is_receiver: bool, text: str
    ) -> object:
        connection = self._connections[peer_rank]
        arena = _share_arena(
            connection, source_stage, destination_stage, self.arena_bytes, is_receiver, text, peer_rank
        )
        return _core.arena_end(self.group, arena, connection.fileno(), peer_rank, is_receiver, text)

    def close(self) -> None:
        super().close()
        _core.group_progress(self.group, "close()")
        for connection in self._connections.values():
            connection.close()


def _share_arena(
    connection: socket.socket, source: int, destination: int, size: int, is_receiver: bool, text: str, peer_rank: int
) -> object:
    """Memory of an edge: the receiver makes it and hands its descriptor to the sender."""
    try:
        if is_receiver:
            fd = memory_fd(size)
            try:
                arena = _core.mapping_create(fd, size)
                socket.send_fds(connection, [_ARENA.pack(source, destination, size)], [fd])
            finally:
                os.close(fd)
            return arena
        data, fds, _, _ = socket.recv_fds(connection, _ARENA.size, 1)
    except OSError as error:
        raise _core.PipelineError(f"{text}: rank {peer_rank} did not open its end: {error}") from error
    if not fds:
        raise _core.PipelineError(f"{text}: rank {peer_rank} left while the edges were opened")
    found_source, found_destination, size = _ARENA.unpack(data)
    if (found_source, found_destination) != (source, destination):
        os.close(fds[0])
        raise _core.PipelineError(
            f"{text}: rank {peer_rank} opened the edge of stage {found_source} to {found_destination} instead; "
            "all ranks must open their edges in one order"
        )
    return map_fd(fds[0], size)


def _connect_shm(
    rank: int, size: int, process_group: Any, connections: dict[int, socket.socket], arena_bytes: int
) -> _ShmRank:
    block_bytes = _core.group_block_bytes(size)
    if rank == 0:
        fd = memory_fd(block_bytes)
        for connection in connections.values():
            socket.send_fds(connection, [b"b"], [fd])
    else:
        _, fds, _, _ = socket.recv_fds(connections[0], 1, 1)
        if not fds:
            raise _core.PipelineError("rank 0 left during set-up")
        fd = fds[0]
    return _ShmRank(rank, size, process_group, map_fd(fd, block_bytes), connections, arena_bytes)


# -- any torch process group -------------------------------------------------------------------------------------------

_HEADER_BYTES = 2048  # S1F_HEADER_BYTES
_UINT8 = DTYPES.index(torch.uint8)
_FOREVER = datetime.timedelta(days=365)  # of a helper thread; who waits for the message itself has the time-out


class C10dRelay:
    """One end of an edge whose messages a torch process group moves between two private arenas.

    Message ``n`` is one transfer of the header and as many payload bytes as message ``n`` of the edge's last step had,
    which both ends know, and a second one of what is longer. So from the second step of a shape on, a receive is posted
    in full before its message is sent.

    gloo cannot be polled, a wait of it that times out closes the pair, and aborting the group does not end a wait
    (torch 2.13). So one helper thread per end waits without limit, and reports each message to the arena in C; the
    engine's thread waits there, where failures, time-outs and signals end a wait. What a failed step left in flight is
    completed by :meth:`drain`, as nothing can cancel it.
    """

    def __init__(
        self, group: _StoreRank, process_group: Any, peer: int, tag: int, is_receiver: bool, text: str
    ) -> None:
        self._group, self._process_group, self._tag = group, process_group, tag
        self.peer = peer
        self._is_receiver, self._text = is_receiver, text
        self._mapping = map_fd(memory_fd(group.arena_bytes), group.arena_bytes)
        self.end: object = _core.relay_end(group.group, self._mapping, self, peer, is_receiver, text)
        self._step = self._num_places = 0
        self._expected: dict[int, int] = {}  # payload bytes by message number, of the step before
        self._sizes: dict[int, int] = {}  # of this step
        self._started: tuple[list[int], list[int]] = ([], [])  # bytes of first and second transfers begun in this step
        self._draining = False
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"seq1f1b {text}", daemon=True)
        self._thread.start()

    # called by the arena

    def begin_step(self, step: int, num_places: int) -> None:
        self._expected = self._sizes if num_places == self._num_places else {}
        self._sizes = {}
        self._step, self._num_places = step, num_places
        self._started = ([], [])

    def post(self, sequence: int, place: int) -> None:
        step, first = self._step, _HEADER_BYTES + self._expected.get(sequence, 0)
        work = self._transfer(0, place, first)
        self._queue.put((sequence, lambda: self._receive_rest(step, sequence, place, first, work)))

    def send(self, sequence: int, place: int, payload_bytes: int) -> None:
        step, first = self._step, _HEADER_BYTES + self._expected.get(sequence, 0)
        self._sizes[sequence] = payload_bytes
        works = [self._transfer(0, place, first)]
        rest = _HEADER_BYTES + payload_bytes - first
        if rest > 0:
            works.append(self._transfer(1, place + first, rest))

        def finish() -> None:
            for work in works:
                work.wait(_FOREVER)
            _core.relay_done(self.end, step, sequence)

        self._queue.put((sequence, finish))

    def _transfer(self, which: int, address: int, size: int) -> Any:
        """Begins a transfer from or to memory of the arena; first and second ones of an edge have a tag each."""
        work = self._start(place_tensor(self._mapping, address, _UINT8, (size,)), which)
        self._started[which].append(size)
        return work

    def _start(self, data: Tensor, which: int) -> Any:
        tag = 2 * self._tag + which
        if self._is_receiver:
            return dist.irecv(data, group=self._process_group, group_src=self.peer, tag=tag)
        return dist.isend(data, group=self._process_group, group_dst=self.peer, tag=tag)

    # the helper thread

    def _receive_rest(self, step: int, sequence: int, place: int, first: int, work: Any) -> None:
        work.wait(_FOREVER)
        payload_bytes = _core.message_payload_bytes(place)  # -1: not a message, which the one who waits will say
        rest = _HEADER_BYTES + payload_bytes - first
        if rest > 0:
            with self._lock:
                if self._draining:
                    return
                work = self._transfer(1, place + first, rest)
            work.wait(_FOREVER)
        self._sizes[sequence] = max(payload_bytes, 0)
        _core.relay_done(self.end, step, sequence)

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            sequence, task = entry
            try:
                task()
            except Exception as error:
                self._group.suspect(self.peer, _first_line(error), f"{self._text}, message {sequence}")
            del entry, task  # or the last message's tensors live on

    # after a failed step, and at the end

    def started(self) -> tuple[list[int], list[int]]:
        """Transfers that this end began in the failed step; it begins no more."""
        with self._lock:
            self._draining = True
            return list(self._started[0]), list(self._started[1])

    def drain(self, theirs: tuple[list[int], list[int]]) -> None:
        """Completes the transfers that only the other end began, and waits until this end has none in flight."""
        for which in (0, 1):
            for size in theirs[which][len(self._started[which]) :]:
                work = self._start(torch.zeros(size, dtype=torch.uint8), which)
                self._queue.put((-1, functools.partial(work.wait, _FOREVER)))
        idle = threading.Event()
        self._queue.put((-1, idle.set))
        if not idle.wait(self._group.timeout_s):
            raise _core.PipelineError(f"{self._text}: rank {self.peer} did not complete what the failed step left")
        if not self._is_receiver:  # every place may be written again
            _core.relay_done(self.end, self._step, (1 << 32) - 2)
        self._sizes, self._started = {}, ([], [])
        self._draining = False

    def flush(self) -> None:
        """Waits until the peer has everything."""
        if not self._is_receiver:
            _core.relay_flush(self.end)

    def settle(self) -> None:
        """Every transfer of the step is complete: a step that fails before it begins here left nothing in flight."""
        self._started = ([], [])

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(0.2)  # a thread that waits for a peer that is gone stays: a daemon
        self.end = None


class Lifeline:
    """A message of the process group that a peer sends when it closes, and that fails when it dies.

    So whoever waits, for whatever, learns of the peer's death; an edge has a receive posted within a step only.
    """

    def __init__(self, process_group: Any, peer: int, tag: int, broken: Callable[[str], None]) -> None:
        self._process_group, self._peer, self._tag, self._broken = process_group, peer, tag, broken
        self._farewells: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._data = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        self._thread = threading.Thread(target=self._wait, name=f"seq1f1b lifeline to rank {peer}", daemon=True)
        self._receive: Any = dist.irecv(self._data[0], group=process_group, group_src=peer, tag=tag)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._receive.wait(_FOREVER)
        except Exception as error:
            self._broken(_first_line(error))
            return
        with contextlib.suppress(Exception):
            self._farewells.get().wait(_FOREVER)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the peer, or the process group, may be gone
            self._farewells.put(
                dist.isend(self._data[1], group=self._process_group, group_dst=self._peer, tag=self._tag)
            )
        self._thread.join(0.2)


class _StoreRank(_ProcessRank):
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
        block_bytes = _core.group_block_bytes(size)
        group = _core.group_create(map_fd(memory_fd(block_bytes), block_bytes), size, rank)
        super().__init__(rank, size, group, arena_bytes=arena_bytes, local_size=1 + len(connections))
        self._process_group, self._connections = process_group, connections
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
        _open_groups.add(self)
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
            self._lost = self.lose(0, f"its store does not answer: {_first_line(error)}")

    def _publish_progress(self) -> None:
        self._store.set(f"progress/{self.rank}", json.dumps(_core.group_get_progress(self.group, self.rank)))

    def _exchange_failure(self) -> None:
        """Publishes this process's failure, or learns of another's; the first one in the store stays."""
        key = f"failure/{self._epoch}"
        failure = _core.group_failure(self.group)
        if failure is not None:
            self._store.compare_set(key, "", json.dumps(failure))
        elif self._store.check([key]):
            _core.group_fail(self.group, *json.loads(self._store.get(key)))

    def _exchange_progress(self) -> None:
        self._publish_progress()
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank, value in zip(others, self._store.multi_get([f"progress/{rank}" for rank in others]), strict=True):
            if value == self._read.get(rank):  # cut off, or asleep: its age is of when it was published
                continue
            self._read[rank] = value
            what, age, waiting_for = json.loads(value)
            if age >= 0:
                _core.group_set_progress(self.group, rank, what, age, waiting_for)

    def _find_the_lost(self, hang_ups: select.poll) -> None:
        """Those whose connection ended though they have not closed, told to all."""
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for fd, _ in hang_ups.poll(0):
            hang_ups.unregister(fd)
            self.suspect(ranks[fd], "it closed its socket")
        while not self._suspects.empty():
            rank, why, edge = self._suspects.get()
            if edge is None and self._store.check([f"closed/{rank}"]):
                continue
            self._exchange_progress()
            self._lost = self.lose(rank, why, edge)
            self._store.compare_set("lost", "", self._lost)

    def suspect(self, rank: int, why: str, edge: str | None = None) -> None:
        """A connection ended, from any thread. edge: on which a message was under way; None: perhaps it was closed."""
        self._suspects.put((rank, why, edge))

    # -- asking it

    def _ask(self, do: Callable[[], _T], limit_s: float | None = None, *, recovering: bool = False) -> _T:
        """What a call of the store returns, or PipelineError: a failure, or no answer for so many seconds."""
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
        _core.group_clear(self.group)

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
                raise _core.PipelineError(self._lost)
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
            arena = _share_arena(
                connection, source_stage, destination_stage, self.arena_bytes, is_receiver, text, peer_rank
            )
            return _core.arena_end(self.group, arena, connection.fileno(), peer_rank, is_receiver, text)
        # Stages of an edge are neighbours. Tags of their own per pipeline: receives that an earlier one on this process
        # group left behind after a failure never match.
        first_tag = self._generation * _TAGS
        if peer_rank not in self._lifelines:
            self._lifelines[peer_rank] = Lifeline(
                self._process_group,
                peer_rank,
                2 * (first_tag + _TAGS - 1),
                functools.partial(self.suspect, peer_rank),
            )
        tag = first_tag + 2 * min(source_stage, destination_stage) + (source_stage > destination_stage)
        relay = C10dRelay(self, self._process_group, peer_rank, tag, is_receiver, text)
        self._relays[source_stage, destination_stage] = relay
        return relay.end

    def close(self) -> None:
        """Leaves together: rank 0, whose store the others need, waits a while for them."""
        if self._closing.is_set():
            return
        failed = _core.group_failure(self.group) is not None
        if failed and self._relays:  # complete what the failed step left in flight, if the others close as well
            self.timeout_s = min(self.timeout_s, 5.0)
            with contextlib.suppress(RuntimeError):
                self._recover()
        super().close()
        _core.group_progress(self.group, "close()")
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
    raise _core.PipelineError(
        f"rank 0 of the pipeline finds no address of its own: {host or socket.gethostname()!r} does not resolve here; "
        "give the launcher an address instead of a name"
    )


def _connect_store(
    rank: int,
    size: int,
    process_group: Any,
    gather: Callable[[Any], list[Any]],
    address: str | None,
    connections: dict[int, socket.socket],
    generation: int,
    arena_bytes: int,
) -> _StoreRank:
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
        raise _core.PipelineError("rank 0 of the pipeline could not open its store; its own error says why")
    unreached = None
    if rank != 0:
        try:
            host, port = place
            store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=_SETUP_TIMEOUT))
        except RuntimeError as caught:
            unreached = _first_line(caught)
    for other, why in enumerate(gather(unreached)):
        if why is not None:
            raise _core.PipelineError(
                f"rank {other} cannot reach the store of rank 0 at {place[0]} port {place[1]} ({why}): hosts of a "
                "pipeline must reach each other on all ports, on the network that leads to the launcher's address"
            )
    return _StoreRank(rank, size, process_group, store, connections, generation, arena_bytes)


# -- set-up ------------------------------------------------------------------------------------------------------------


def connect(process_group: Any, transport: str = "auto", *, arena_bytes: int = ARENA_BYTES) -> RankGroup:
    """Joins the processes of a torch process group into a pipeline. Collective.

    Args:
        process_group: of at least one rank; None: the default group. Used for set-up and for the gradients of tied
            parameters only, unless c10d carries edges.
        transport: "shm" (all processes on one host, as one user), "c10d", or "auto": shm on every edge where it can be;
            "nccl" and "copy" (:mod:`seq1f1b.device_edges`) go over what "auto" gives. The same on all ranks.
        arena_bytes: address space of one edge; a smaller one only where address space is limited.
    """
    if transport not in ("auto", "shm", "c10d", "nccl", "copy"):
        raise ValueError(f'transport must be "auto", "shm", "c10d", "nccl" or "copy", got {transport!r}')
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("this process is not in the pipeline's process group")
    if size == 1:
        return LoopbackGroup(1, arena_bytes=arena_bytes)[0]
    backends = dist.get_backend_config(process_group)
    if "cpu:" not in backends:
        raise ValueError(
            f"the pipeline's process group has no backend for CPU tensors ({backends}); messages of every device go "
            'through host memory: use init_process_group("cpu:gloo,cuda:nccl"), or name no backend'
        )

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=process_group)
        return values

    global _next_generation
    meeting = Meeting(rank)
    try:
        wishes, names, tokens, generations = zip(
            *gather((transport, meeting.name, meeting.token, _next_generation)), strict=True
        )
        generation = max(generations)
        _next_generation = generation + 1
        if len(set(wishes)) > 1:
            raise ValueError(f"the ranks ask for different transports: {list(wishes)}")
        unmet: list[dict[int, str]] = gather(meeting.dial(names, tokens))
        for above, missed in enumerate(unmet):
            for below, why in missed.items() if transport == "shm" else ():
                raise ValueError(
                    f'transport="shm" needs all ranks on one host, in one network namespace and of one user: rank '
                    f'{above} cannot meet rank {below} ({why}); with "auto" the process group carries such edges'
                )
        dialled_by = {above for above in range(rank + 1, size) if rank not in unmet[above]}
        connections = meeting.accept(dialled_by, tokens)
    finally:
        meeting.close()
    one_host = not any(unmet)
    if one_host and transport != "c10d":
        return _connect_shm(rank, size, process_group, connections, arena_bytes)
    if transport == "c10d":
        for connection in connections.values():
            connection.close()
        connections = {}
    address = "127.0.0.1" if one_host else None
    process_group = process_group or dist.group.WORLD
    return _connect_store(rank, size, process_group, gather, address, connections, generation, arena_bytes)


def resolve_group(group: Any, transport: str = "auto") -> RankGroup:
    """What an engine's ``group=`` means: a ProcessGroup, a loopback's rank, or None: the default group, else P = 1."""
    if isinstance(group, RankGroup):
        return group
    if isinstance(group, LoopbackGroup):
        raise TypeError("group= takes one rank of a LoopbackGroup: LoopbackGroup(P)[rank]")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group= takes a ProcessGroup, LoopbackGroup(P)[rank] or None, got {type(group).__name__}")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return LoopbackGroup(1)[0]
    return connect(group, transport)
