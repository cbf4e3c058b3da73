"""Set-up of a pipeline from a torch process group: connections within a host, shared memory, each edge's transport."""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from seq1f1b import _C
from seq1f1b.transport.descriptors import accept, address_space, mapping, memory, receive
from seq1f1b.transport.edges import ARENA_BYTES
from seq1f1b.transport.group import RankGroup
from seq1f1b.transport.loopback import LoopbackGroup
from seq1f1b.transport.meeting import Meeting
from seq1f1b.transport.processes import ProcessRank
from seq1f1b.transport.store import StoreRank


def connect(
    group: Any,
    transport: str = "auto",
    *,
    arrival_timeout: float = 1800.0,
    timeout: float = 120.0,
    meeting: Meeting | None = None,
) -> RankGroup:
    """Joins the processes of a torch process group into a pipeline, for an engine's ``group=``. Collective.

    Args:
        group: torch's group, used only for set-up and the gradients of tied parameters, unless c10d carries edges; a
            rank of a loopback, which is returned; None: the default group, without one a pipeline of one rank.
        transport: "shm" (all processes on one host, as one user), "c10d", or "auto": shm on every edge within a host;
            "nccl" and "copy" (:mod:`seq1f1b.device.edges`) use the transports of "auto". Equal on all ranks.
        arrival_timeout: seconds for all ranks to come. timeout: seconds for each later part.
        meeting: result of :func:`meeting_of`, if the caller has called it.
    Raises:
        ValueError: the transport is impossible here; raised on every rank.
        PipelineError: a rank failed or did not come.
    """
    if isinstance(group, RankGroup):
        return group
    if isinstance(group, LoopbackGroup):
        raise TypeError("group= takes one rank of a LoopbackGroup: LoopbackGroup(P)[rank]")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group= takes a ProcessGroup, LoopbackGroup(P)[rank] or None, got {type(group).__name__}")
    if meeting is None and (meeting := meeting_of(group)) is None:
        return LoopbackGroup(1)[0]
    backends = dist.get_backend_config(group)
    if "cpu:" not in backends:
        raise ValueError(
            f"the pipeline's process group has no backend for CPU tensors ({backends}); messages of every device go "
            'through host memory: use init_process_group("cpu:gloo,cuda:nccl"), or name no backend'
        )

    joined = None
    try:
        meeting.begin(arrival_timeout, timeout)
        joined = _connect(meeting, transport, timeout)
        meeting.gather(None)  # every rank has a group now
        return joined
    except BaseException as error:
        if isinstance(error, (ConnectionError, _C.PipelineError)):  # gives the failed rank time to report the cause
            time.sleep(0.3)
        first = meeting.fail(error)
        if joined is not None:
            joined.fail(f"set-up ended: {type(error).__name__}: {error}")  # close() then waits for no rank
            joined.timeout_s = 0.5  # the store may be stopped
            joined.close()
        if first is not None and isinstance(error, (_C.PipelineError, OSError)):  # perhaps a result of the first error
            raise first from error
        raise
    finally:
        meeting.close()


def _connect(meeting: Meeting, transport: str, timeout: float) -> RankGroup:
    rank, size = meeting.rank, meeting.size
    handshake = Handshake(rank, timeout)
    try:
        own = transport, handshake.name, handshake.token, address_space(ARENA_BYTES)
        wishes, names, tokens, allowed = zip(*meeting.gather(own), strict=True)
        if len(set(wishes)) > 1:
            raise ValueError(f"the ranks ask for different transports: {list(wishes)}")
        unmet: list[dict[int, str]] = meeting.gather({} if transport == "c10d" else handshake.dial(names, tokens))
        if transport == "c10d":
            return StoreRank(meeting, {}, min(allowed), None)
        for above, missed in enumerate(unmet):
            for below, why in missed.items() if transport == "shm" else ():
                raise ValueError(
                    f'transport="shm" needs all ranks on one host, in one network namespace and of one user: rank '
                    f'{above} cannot meet rank {below} ({why}); with "auto" the process group carries such edges'
                )
        dialled_by = {above for above in range(rank + 1, size) if rank not in unmet[above]}
        connections = handshake.accept(dialled_by, tokens)
    finally:
        handshake.close()
    arena_bytes = min(allowed)  # either end maps an edge
    if not any(unmet):
        block = share_on_host(rank, connections, _C.group_block_bytes(size))
        return ProcessRank(meeting, connections, arena_bytes, block)
    host = {rank, *connections}
    # All ranks of a host meet the same ranks, unless a connection was refused; memory is not shared then.
    is_whole = all(
        (min(one, other) not in unmet[max(one, other)]) == (other in host) for one in host for other in range(size)
    )
    spoiled = share_on_host(rank, connections, mmap.PAGESIZE) if connections and is_whole else None
    return StoreRank(meeting, connections, arena_bytes, spoiled)


def meeting_of(group: Any) -> Meeting | None:
    """Returns the meeting of an engine's ``group=``; None if the rank has no other processes to meet.

    Raises ValueError if the process is not in the group.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the pipeline's process group")
    return Meeting(group) if dist.get_world_size(group) > 1 else None


# -- connections within a host ----------------------------------------------------------------------------------------

_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET  # a message comes whole
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"{_TOKEN_BYTES}sq")  # the greeted rank's token, the greeter's rank


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _hello(connection: socket.socket) -> tuple[bytes, int]:
    """Returns the token and the rank of a greeting. Raises OSError for anything else."""
    if len(data := connection.recv(_HELLO.size)) != _HELLO.size:
        raise ConnectionError("the peer closed the connection")
    token, rank = _HELLO.unpack(data)
    return token, rank


class Handshake:
    """Connections from a rank to the ranks of its host over abstract Unix sockets, without names in the file system.

    The name of an abstract socket exists in one network namespace only, so a rank out of reach of :meth:`dial` is on
    another host or in another container. Every user of the host sees the names, so both sides check the peer's user id
    and a random 128-bit token, sent through the process group.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.name = f"\0seq1f1b-{secrets.token_hex(16)}"
        self._listener = socket.socket(*_KIND)
        self._listener.bind(self.name)
        self._listener.listen(1024)  # ranks may dial before the first accept()
        self._listener.settimeout(timeout_s)
        self._met: dict[int, socket.socket] = {}

    def dial(self, names: Sequence[str], tokens: Sequence[bytes]) -> dict[int, str]:
        """Greets all lower ranks. Returns the ranks out of reach, each with the reason."""
        unmet = {}
        for peer in range(self.rank):
            try:
                self._met[peer] = self._dial(names[peer])
                self._met[peer].sendall(_HELLO.pack(tokens[peer], self.rank))
            except OSError as error:
                unmet[peer] = str(error)
        return unmet

    def accept(self, dialled_by: set[int], tokens: Sequence[bytes]) -> dict[int, socket.socket]:
        """Returns one connection per rank of the host, once both sides have checked each other.

        Args:
            dialled_by: higher ranks that have dialled this rank.
        """
        while left := dialled_by - self._met.keys():
            connection = accept(self._listener)
            if (greeter := self._greeted_by(connection, left)) is None:
                connection.close()
            else:
                self._met[greeter] = connection
        for peer in sorted(self._met, reverse=True):
            try:
                if peer > self.rank:
                    self._met[peer].sendall(_HELLO.pack(tokens[peer], self.rank))
                    continue
                token, answered_by = _hello(self._met[peer])
            except OSError as error:
                raise ConnectionError(f"rank {peer} did not answer: {error}") from error
            if not hmac.compare_digest(token, self.token) or answered_by != peer:
                raise ConnectionError(f"another process answers in the name of rank {peer}")
        met, self._met = self._met, {}
        return met

    def close(self) -> None:
        """Closes the listener and all connections not returned by :meth:`accept`."""
        for each in (self._listener, *self._met.values()):
            each.close()

    def _dial(self, name: str) -> socket.socket:
        connection = socket.socket(*_KIND)
        try:
            connection.settimeout(self.timeout_s)
            connection.connect(name)
            if _peer_uid(connection) != os.getuid():
                raise ConnectionError("another user answers")
        except BaseException:
            connection.close()
            raise
        return connection

    def _greeted_by(self, connection: socket.socket, expected: set[int]) -> int | None:
        """Returns the rank behind a connection; None for a stranger, who gets no answer and causes a short delay."""
        if _peer_uid(connection) != os.getuid():
            return None
        connection.settimeout(5.0)
        try:
            token, rank = _hello(connection)
        except OSError:
            return None
        connection.settimeout(self.timeout_s)
        return rank if hmac.compare_digest(token, self.token) and rank in expected else None


def share_on_host(rank: int, connections: dict[int, socket.socket], size: int) -> object:
    """Returns memory of all ranks of a host, made by the lowest rank. Every two ranks have a connection."""
    first = min([rank, *connections])
    if rank == first:
        made = memory(size)
        for connection in connections.values():
            socket.send_fds(connection, [b"b"], [made.number])
        return mapping(made, size)
    try:
        _, handed = receive(connections[first], 1)
    except OSError as error:
        raise _C.PipelineError(f"rank {first} left during set-up: {error}") from error
    return mapping(handed, size)
