"""Edges in memory that processes of one host share, and the ranks that have no others."""

from __future__ import annotations

import socket
import struct
from typing import Any

from seq1f1b import _C
from seq1f1b.transport.descriptors import edge_memory, mapping, memory, receive
from seq1f1b.transport.group import Edge, RankGroup
from seq1f1b.transport.processes import ProcessRank

_ARENA = struct.Struct("qqqq")  # source stage, destination stage, channel, bytes


class ShmRank(ProcessRank):
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
        group = _C.group_create(block, size, rank)
        super().__init__(rank, size, group, process_group, connections, arena_bytes=arena_bytes, local_size=size)

    def transport_to(self, peer_rank: int) -> str:
        return "shm"

    def _hangup_fds(self) -> list[int]:
        return [self._connections[rank].fileno() if rank in self._connections else -1 for rank in range(self.size)]

    def _open_end(self, edge: Edge, peer_rank: int, is_receiver: bool, text: str) -> object:
        return open_shm_end(self, self._connections[peer_rank], edge, peer_rank, is_receiver, text)

    def close(self) -> None:
        super().close()
        _C.group_progress(self.group, "close()")
        for connection in self._connections.values():
            connection.close()


def open_shm_end(
    group: RankGroup, connection: socket.socket, edge: Edge, peer_rank: int, is_receiver: bool, text: str
) -> object:
    """One end of an edge between two processes that hold the ends of ``connection``; see :meth:`RankGroup.edge_end`.

    The receiver makes its memory, and hands the descriptor to the sender.
    """
    try:
        if is_receiver:
            made, arena, size = edge_memory(group.arena_bytes)
            socket.send_fds(connection, [_ARENA.pack(*edge, size)], [made.number])
            return _C.arena_end(group.group, arena, connection.fileno(), peer_rank, is_receiver, text)
        data, handed = receive(connection, _ARENA.size)
    except OSError as error:
        raise _C.PipelineError(f"{text}: rank {peer_rank} did not open its end: {error}") from error
    if handed is None:
        raise _C.PipelineError(f"{text}: rank {peer_rank} left while the edges were opened")
    *found, size = _ARENA.unpack(data)
    if found != [*edge]:
        raise _C.PipelineError(
            f"{text}: rank {peer_rank} opened the edge of stage {found[0]} to {found[1]} instead; "
            "all ranks must open their edges in one order"
        )
    return _C.arena_end(group.group, mapping(handed, size), connection.fileno(), peer_rank, is_receiver, text)


def share_on_host(rank: int, connections: dict[int, socket.socket], size: int) -> object:
    """Memory of all ranks of a host, which the first of them makes. Each has a connection to each."""
    first = min([rank, *connections])
    if rank == first:
        made = memory(size)
        for connection in connections.values():
            socket.send_fds(connection, [b"b"], [made.number])
        return mapping(made, size)
    try:
        _, handed = receive(connections[first], 1)
    except ConnectionError as error:
        raise _C.PipelineError(f"rank {first} left during set-up: {error}") from error
    if handed is None:
        raise _C.PipelineError(f"rank {first} left during set-up")
    return mapping(handed, size)
