"""A tier in a file without a name, so that nothing of the file stays when the process ends, however it ends.

Transfers go around the page cache if the file system takes them so (``O_DIRECT``): pages of the cache count against a
container's memory. Elsewhere the pages are given up after each move.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from seq1f1b import _C
from seq1f1b.engine.offload import BLOCK, Load, Tier, TierFacts
from seq1f1b.transport.descriptors import Descriptor
from seq1f1b.transport.workers import Worker

__all__: list[str] = []

_CHUNK = 1 << 20  # bytes of one transfer: long enough for a disk, soon over
_IN_MEMORY = ("tmpfs", "ramfs")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileTier(Tier):
    """A tier in a file, for stages on the CPU. A thread makes the transfers, and holds the memory that they use.

    Args:
        directory: folder of the file.
        group: handle of the rank's group: a failure of the group ends a wait.
    Raises:
        OSError: no file can be made, written and read in the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], group: object) -> None:
        super().__init__(torch.device("cpu"), BLOCK)
        self._directory, self._group = os.fspath(directory), group
        self._chunk = mmap.mmap(-1, _CHUNK)  # for memory that O_DIRECT does not take
        self._chunk_address = ctypes.addressof(ctypes.c_char.from_buffer(self._chunk))
        self._descriptor: Any = self._open()  # None: closed
        self._medium = _file_system(self._directory)
        self._worker = Worker(f"seq1f1b offload directory {self._directory}")
        self._is_over, self._answers = threading.Event(), dict[int, Any]()  # of the step's moves; by load
        self._room = 0
        self._bytes, self._ns = [0, 0], [0, 0]  # of the step's moves in and out
        if self._medium in _IN_MEMORY:
            warnings.warn(
                f"Memory.offload={self._directory!r} lies in memory ({self._medium}): what moves there frees none",
                RuntimeWarning,
                stacklevel=6,  # where the engine is made
            )

    def begin_step(self, most_loads: int) -> None:
        self._bytes, self._ns = [0, 0], [0, 0]

    def step_facts(self) -> TierFacts | None:
        if self._descriptor is None:
            return None
        return TierFacts(self._room, *reversed(self._bytes), *reversed(self._ns))

    def reset(self) -> None:
        super().reset()
        self._is_over.set()  # the thread stops within a chunk, before moves of the next step
        self._is_over = threading.Event()
        self._answers.clear()

    def close(self) -> None:
        self.reset()
        self._worker.close()
        self._descriptor = None

    def _begin(self, number: int, load: Load, storages: list[torch.UntypedStorage], addresses: list[int]) -> None:
        self._room = max(self._room, load.end)
        move = partial(self._move, self._is_over, load, not load.comes_in, addresses, list(storages))
        self._answers[number] = self._worker.put(move)

    def _wait(self, number: int) -> None:
        self._worker.wait(self._answers.pop(number), look=lambda: _C.group_check(self._group))

    # -- in the thread

    def _move(
        self, is_over: threading.Event, load: Load, is_out: bool, addresses: list[int], storages: list[Any]
    ) -> None:
        """Moves a load, unless the step is over. Raises OSError with a remedy.

        Args:
            storages: own the memory at the addresses; emptied at the end.
        """
        start, done = time.monotonic_ns(), 0
        try:
            for address, (offset, size) in zip(addresses, load.parts, strict=True):
                for at in range(0, size, _CHUNK):
                    if is_over.is_set():
                        return
                    count = min(_CHUNK, size - at)
                    self._transfer(is_out, address + at, count, offset + at)
                    done += count
            if not self._is_direct and self._medium not in _IN_MEMORY:  # gives up the pages of the page cache
                if is_out:
                    os.fdatasync(self._descriptor.number)  # pages must be on the disk first
                os.posix_fadvise(self._descriptor.number, load.begin, load.end - load.begin, os.POSIX_FADV_DONTNEED)
            self._bytes[is_out] += done
            self._ns[is_out] += time.monotonic_ns() - start
        except OSError as error:
            raise OSError(self._describe(error, is_out, load.end - load.begin, done)) from error
        finally:
            storages.clear()

    def _transfer(self, is_out: bool, address: int, count: int, offset: int) -> None:
        """Writes or reads bytes of the file. O_DIRECT takes whole blocks of memory; a read may overwrite up to a block.

        Raises:
            OSError: of the file system; also if the file ends too early.
        """
        file, whole = self._descriptor.number, -(-count // BLOCK) * BLOCK if self._is_direct else count
        if is_out and self._is_direct and (address % BLOCK or count < whole):
            ctypes.memmove(self._chunk_address, address, count)
            address = self._chunk_address
        left = memoryview((ctypes.c_char * whole).from_address(address))
        while left:
            moved = os.pwrite(file, left, offset) if is_out else os.preadv(file, [left], offset)
            if moved == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            left, offset = left[moved:], offset + moved

    def _describe(self, error: OSError, is_out: bool, size: int, done: int) -> str:
        """Returns the text of a failed move, with a remedy."""
        remedy = ": give Memory(offload=) a directory on another disk"
        if error.errno in _NO_ROOM and self._descriptor is not None:
            found = os.fstatvfs(self._descriptor.number)
            remedy = (
                f"; the file holds up to {self._room} bytes, and {found.f_bavail * found.f_frsize} are free: give "
                "Memory(offload=) a directory with more room, or move fewer units by Memory(units=)"
            )
        way = "writing" if is_out else "reading"
        where = f"offload directory {self._directory} ({self._medium})"
        return f"{where}: {way} {size} bytes failed after {done}: {error.strerror}{remedy}"

    # -- the file

    def _open(self) -> Descriptor:
        """Makes the file, and tries a block: a directory may have no room, or refuse transfers around the cache."""
        try:
            made = self._descriptor = Descriptor(partial(_open_without_name, self._directory))
        except OSError as error:
            raise OSError(
                f"offload directory {self._directory}: no file can be made there: {error.strerror}"
            ) from error
        for flags in (os.O_DIRECT, 0):
            self._is_direct = bool(flags)
            try:
                fcntl.fcntl(made.number, fcntl.F_SETFL, flags)
                for is_out in (True, False):
                    self._transfer(is_out, self._chunk_address, BLOCK, 0)
                break
            except OSError as error:
                if error.errno != errno.EINVAL or not flags:
                    raise OSError(
                        f"offload directory {self._directory}: no file can be written and read there: {error.strerror}"
                    ) from error
        return made


def _open_without_name(directory: str) -> int:
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return os.dup(file.fileno())


def _file_system(directory: str) -> str:
    """Returns the type of a directory's file system, such as "ext4"."""
    place, found = Path(directory).resolve(), (0, "unknown file system")
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for _, point, kind, *_ in (line.split() for line in file):
            if place.is_relative_to(point.replace("\\040", " ")) and len(point) >= found[0]:
                found = len(point), kind
    return found[1]
