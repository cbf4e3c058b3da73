"""TCP connections between two ranks of different hosts, at the addresses by which gloo has them meet."""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import socket
import struct
import time
from contextlib import suppress

from seq1f1b.transport.descriptors import accept
from seq1f1b.transport.handshake import receive_all
from seq1f1b.transport.values import pack, unpack

__all__: list[str] = []

_TOKEN_BYTES = 16
_STRANGER_S = 5.0  # most that one who dials and says nothing delays the others
_SIOCGIFADDR = 0x8915


def _own_addresses() -> list[str]:
    """Addresses of this host, as torch finds them for gloo: of the interfaces that are named, else of its name."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = (struct.pack("256s", name.strip().encode()[:15]) for name in names.split(","))
            found = [fcntl.ioctl(any_socket, _SIOCGIFADDR, each) for each in asked]
        return [socket.inet_ntoa(each[20:24]) for each in found]
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return ["127.0.0.1"]
    return [str(info[4][0]) for info in infos]


class Listener:
    """Waits for one rank.

    Attributes:
        offer: what that rank dials; it travels through the process group.
    """

    def __init__(self) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        error = OSError("this host has no address")
        for address in _own_addresses():
            try:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                self._socket = socket.create_server((address, 0), family=family)
                break
            except OSError as caught:
                error = caught
        else:
            raise error
        self.offer = pack((*self._socket.getsockname()[:2], self._token))

    def accept(self, limit_s: float) -> socket.socket:
        """The connection. Raises TimeoutError if the rank does not dial in time; strangers may."""
        end = time.monotonic() + limit_s
        while True:
            self._socket.settimeout(max(1e-3, end - time.monotonic()))  # 0 would not wait at all
            try:
                connection = accept(self._socket)
            except TimeoutError:
                raise TimeoutError(f"the other rank has not dialled for {limit_s:.1f} s") from None
            connection.settimeout(_STRANGER_S)
            with suppress(OSError):
                if hmac.compare_digest(receive_all(connection, _TOKEN_BYTES), self._token):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return connection
            connection.close()

    def close(self) -> None:
        self._socket.close()


def dial(offer: bytes, limit_s: float) -> socket.socket:
    """Connects to a listener; does not wait until it accepts."""
    address, port, token = unpack(offer)
    try:
        connection = socket.create_connection((address, port), limit_s)
        connection.sendall(token)
    except OSError as error:
        raise ConnectionError(f"{address}, port {port}: {error}") from error
    return connection
