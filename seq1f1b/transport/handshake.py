"""Connections between processes of one host, with checks of their identity."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence

from seq1f1b import _C
from seq1f1b.transport.descriptors import accept, mapping, memory, receive

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"{_TOKEN_BYTES}sq")  # the greeted rank's token, the greeter's rank


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def receive_all(connection: socket.socket, size: int) -> bytes:
    """Returns ``size`` bytes. Raises OSError if fewer bytes come."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


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
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
                token, answered_by = _HELLO.unpack(receive_all(self._met[peer], _HELLO.size))
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
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
            token, rank = _HELLO.unpack(receive_all(connection, _HELLO.size))
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
