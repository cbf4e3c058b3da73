"""How processes of one host find and check each other."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from seq1f1b.transport.descriptors import accept

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"{_TOKEN_BYTES}sq")  # token of whom is greeted, rank of who greets


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def receive_all(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError if they do not come."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Errors of a connection say whose it is."""
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"rank {peer} did not answer: {error}") from error


class Handshake:
    """Connects a rank with others of its host over abstract Unix sockets, which have no name in the file system.

    Such a name exists in one network namespace only, so whom a rank cannot :meth:`dial` is on another host, or behind
    what keeps containers apart. The names are visible to every user of the host, so either side checks the other's user
    id and a random 128-bit token that travelled through the process group.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
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
                connection = accept(self._listener)
                greeter = self._greeted_by(connection, dialled_by)
                if greeter is None:
                    connection.close()
                    continue
                dialled_by = dialled_by - {greeter}
                connections[greeter] = connection
                with _naming(greeter):
                    connection.sendall(_HELLO.pack(tokens[greeter], self.rank))
            for peer in [rank for rank in connections if rank < self.rank]:
                with _naming(peer):
                    token, answered_by = _HELLO.unpack(receive_all(connections[peer], _HELLO.size))
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
            token, rank = _HELLO.unpack(receive_all(connection, _HELLO.size))
        except OSError:
            return None
        connection.settimeout(self.timeout_s)
        return rank if hmac.compare_digest(token, self.token) and rank in expected else None
