"""File descriptors, protected against loss by an interrupt.

A signal handler may raise at any line of the main thread, even between the call that opens a descriptor and the
assignment of its number.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from seq1f1b import _C

__all__: list[str] = []

_LEAST_BYTES = 1 << 26  # the smallest edge


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back an interrupt (SIGINT) until the block ends. For code without waits."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets interrupts
        yield
        return
    came: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(*came[0])


class Descriptor:
    """An open file descriptor, closed with the last reference.

    Args:
        open_one: opens the descriptor, and returns its number without further work.
    """

    def __init__(self, open_one: Callable[[], int]) -> None:
        with uninterrupted():
            self.number = open_one()
            self._owner = _C.descriptor_own(self.number)


def memory(size: int) -> Descriptor:
    """Returns anonymous shared memory: without a name in the file system, and gone with its last user.

    The memory is sealed against shrinking: otherwise a peer's read might end in SIGBUS.
    """
    found = Descriptor(lambda: os.memfd_create("seq1f1b", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(found.number, size)
    fcntl.fcntl(found.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return found


def mapping(descriptor: Descriptor, size: int) -> object:
    """Maps memory; the mapping stays until its last user is gone."""
    try:
        return _C.mapping_create(descriptor.number, size)
    except MemoryError:  # uncollected engines may still hold address space
        gc.collect()
        return _C.mapping_create(descriptor.number, size)


def address_space(most: int) -> int:
    """Returns the bytes for one edge: a sixteenth of the process's limit (``ulimit -v``), at most ``most``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return most if limit == resource.RLIM_INFINITY else min(most, max(limit // 16, _LEAST_BYTES))


def edge_memory(most: int) -> tuple[Descriptor, object, int]:
    """Returns the memory of an edge, its mapping and its size: ``most`` bytes, or fewer if address space is short.

    Address space may be short without a limit of the process: on a kernel of 39-bit addresses, or beside many engines.
    """
    size = address_space(most)
    while True:
        made = memory(size)
        try:
            return made, mapping(made, size), size
        except MemoryError as error:
            if size <= _LEAST_BYTES:
                limit, _ = resource.getrlimit(resource.RLIMIT_AS)
                limited = "" if limit == resource.RLIM_INFINITY else f", it may have {limit >> 20} MiB (ulimit -v)"
                raise MemoryError(
                    f"this process has no {size >> 20} MiB of address space left{limited}, and each edge of a pipeline "
                    "reserves as much; lift the limit: ulimit -v unlimited"
                ) from error
            size = max(size // 16, _LEAST_BYTES)


def private_mapping(size: int) -> object:
    """Returns mapped memory private to the process."""
    return mapping(memory(size), size)


def accept(listener: socket.socket) -> socket.socket:
    """Returns the next connection. Raises TimeoutError after the listener's time-out."""
    _wait_for_data(listener)
    with uninterrupted():
        connection, _ = listener.accept()
    return connection


def receive(connection: socket.socket, size: int) -> tuple[bytes, Descriptor]:
    """Returns up to ``size`` bytes and the accompanying descriptor. Raises OSError without a descriptor."""
    _wait_for_data(connection)
    with uninterrupted():
        data, numbers, _, _ = socket.recv_fds(connection, size, 1)
        if numbers:
            return data, Descriptor(lambda: numbers[0])
    raise ConnectionError("too many open files here" if data else "the peer closed the connection")


def _wait_for_data(connection: socket.socket) -> None:
    timeout_s = connection.gettimeout()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(None if timeout_s is None else 1e3 * timeout_s):
        raise TimeoutError("timed out")
