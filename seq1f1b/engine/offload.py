"""Offload: moves tensors saved by F of a unit to a tier, and back before the unit's backward.

The order says when (``csrc/core/unit.h``): O begins to move a unit out, A waits for the move and frees the memory, L
begins to load the unit, and the backward waits for the load. A tier moves the bytes: a thread to a file, or a GPU's
copy engines to pinned host memory (``device/host_tier.py``). On a GPU a wait holds up the computing stream, not the
host: a tensor is dropped as soon as the stream is told to wait for the copy, because only later work on the stream can
get the freed memory. Nothing here decides about the order.
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
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seq1f1b import _C
from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine.features import Feature, Pass, Received
from seq1f1b.engine.measure import SavedBytes, storages_of
from seq1f1b.engine.stage import StageStep
from seq1f1b.transport.descriptors import Descriptor
from seq1f1b.transport.group import OfOneProcess
from seq1f1b.transport.workers import Worker

__all__: list[str] = []

BLOCK = 4096  # bytes, also of the smallest storage that moves
_PLAIN = (Tensor, nn.Parameter)


class TierFacts(NamedTuple):
    """Facts of a tier: room in bytes, and bytes and ns of the last step's moves."""

    room_bytes: int
    bytes_out: int
    bytes_in: int
    ns_out: int
    ns_in: int


@dataclass
class Load:
    """A moved unit's room in a tier, from ``begin`` to ``end``; ``parts``: offset and size of each storage."""

    begin: int
    end: int
    parts: list[tuple[int, int]]
    comes_in: bool = False


class Tier(OfOneProcess, ABC):
    """The tier of one rank, which holds loads: each the storages of one unit, under a number.

    A load takes the first gap with enough room. So the tier is as large as the loads that are out at once, and equal
    steps take equal room. Transfers of each way run one after the other, in the order of the calls.

    Args:
        device: device of the tensors that move.
        alignment: bytes by which the memory of loaded tensors is aligned.
    """

    def __init__(self, device: torch.device, alignment: int) -> None:
        self.device, self.alignment = device, alignment
        self._loads: dict[int, Load] = {}  # that are out

    def begin_step(self, most_loads: int) -> None:
        """Prepares the tier for a step with so many loads out at once. Raises RuntimeError if the tier is broken."""

    def out(self, number: int, storages: list[torch.UntypedStorage]) -> None:
        """Begins to move storages out. Their memory must stay until :meth:`wait` or :meth:`reset`."""
        sizes = [storage.nbytes() for storage in storages]
        *offsets, room = accumulate((-(-size // BLOCK) * BLOCK for size in sizes), initial=0)
        begin = 0
        for other in sorted(self._loads.values(), key=lambda load: load.begin):
            if other.begin - begin >= room:
                break
            begin = max(begin, other.end)
        parts = [(begin + offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        self._loads[number] = Load(begin, begin + room, parts)
        self._begin(number, self._loads[number], storages, [storage.data_ptr() for storage in storages])

    def load(self, number: int, storages: list[torch.UntypedStorage], addresses: list[int]) -> None:
        """Begins to move storages back, to aligned addresses within new ones."""
        self._loads[number].comes_in = True
        self._begin(number, self._loads[number], storages, addresses)

    def wait(self, number: int) -> None:
        """Waits for the load's last move: the host or, on a GPU, the computing stream."""
        self._wait(number)
        if self._loads[number].comes_in:
            del self._loads[number]

    def came_back(self, number: int) -> int:
        """Returns the CUevent at which a load was back in this step; 0 if the host waited for the load."""
        return 0

    @abstractmethod
    def step_facts(self) -> TierFacts | None:
        """Returns facts with the last step's ended moves; None once the tier is closed."""

    def reset(self) -> None:
        """Ends moves under way, and drops all loads."""
        self._loads.clear()

    @abstractmethod
    def close(self) -> None:
        """Releases the tier's room."""

    @abstractmethod
    def _begin(self, number: int, load: Load, storages: list[torch.UntypedStorage], addresses: list[int]) -> None: ...

    @abstractmethod
    def _wait(self, number: int) -> None: ...


class Offloading(Feature):
    """The feature that moves saved tensors of units to the rank's tier, and back: passes O, A and L."""

    serves = "O"

    def start(self, step: StageStep) -> bool:
        self._bytes = 0  # moved out, over all units
        # A load's number is the cell counted over all stages, for the executor, too.
        self._first = step.stage.index * len(step.order.places)
        return bool(step.order.moved)

    def passes(self) -> Mapping[str, Pass]:
        return {"O": self.move_out, "A": self.wait_until_out, "L": self.load}

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        if unit.cell not in self._step.order.moved:
            return None
        modules = self._step.stage.modules if self._step.measure is not None else ()
        unit.away = MovedTensors(modules, inputs, self._step.stage.device)
        return unit.away  # type: ignore[no-any-return]

    def move_out(self, cell: int, received: Received) -> None:
        """O(m.s): begins to move the tensors saved by F to the tier."""
        away: MovedTensors = self._step.units[cell].away
        away.out(self._step.stage.tier, self._first + cell)
        self._bytes += away.moved_bytes

    def wait_until_out(self, cell: int, received: Received) -> None:
        """A(m.s): waits until the tensors are in the tier, and frees their memory."""
        self._step.units[cell].away.gone(self._step.stage.tier, self._first + cell)

    def load(self, cell: int, received: Received) -> None:
        """L(m.s): allocates memory, and begins to move the tensors back."""
        self._step.units[cell].away.load(self._step.stage.tier, self._first + cell)
        if self._step.measure is not None:
            self._step.measure.note()

    def figures(self) -> Mapping[str, Any]:
        return {"moved_bytes": self._bytes}


class SavedTensor:
    """Stand-in for a tensor in a graph: the tensor, or its place in a storage that is away."""

    __slots__ = ("__weakref__", "_form", "_version", "is_changed", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._version, self.is_changed = tensor._version, False
        self._form = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def look(self) -> bool:
        """Returns whether the tensor is unchanged since F."""
        self.is_changed |= self.tensor is not None and self.tensor._version != self._version
        return not self.is_changed

    def place(self, storage: torch.UntypedStorage, skipped: int) -> None:
        """Makes the tensor anew in a loaded storage, whose data begin after ``skipped`` bytes."""
        dtype, offset, size, stride = self._form
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        self.tensor = tensor.set_(storage, skipped // dtype.itemsize + offset, size, stride)
        self._version = self.tensor._version


class MovedTensors(SavedBytes):
    """Saved tensors of a unit's graph, from F to the backward; collected while the context is open.

    A storage moves once, with all its tensors. Small storages stay. So do storages with another owner, because memory
    would not fall (parameters, tensors received by F, a carried state, a cast in autocast's cache), and storages of a
    tensor changed in place since F, an error only if the backward reads the tensor.
    """

    def __init__(self, modules: Iterable[nn.Module], excluded: Iterable[Any], device: torch.device) -> None:
        super().__init__(modules, excluded)  # for the count alone
        self._device = device  # tensors on other devices stay
        self._saved: list[weakref.ref[SavedTensor]] = []
        self._moved: list[tuple[int, list[SavedTensor]]] = []  # bytes of a storage, and the tensors in it
        self.moved_bytes = 0
        self.away_bytes = 0  # moved bytes that lie in the tier alone

    def pack(self, tensor: Tensor) -> Any:
        is_strided = type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested
        is_here = tensor.device == self._device and bool(storages_of(tensor))
        if not (is_strided and is_here) or tensor.is_conj() or tensor.is_neg():
            return super().pack(tensor)
        saved = SavedTensor(self.count(tensor))
        self._saved.append(weakref.ref(saved))
        return saved

    def unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, SavedTensor):
            return super().unpack(kept)
        if not kept.look():
            raise RuntimeError(
                "a tensor that the stage's backward needs was changed in place after F: let it work on a copy"
            )
        assert kept.tensor is not None, "read while it is away"
        return kept.tensor

    def out(self, tier: Tier, number: int) -> None:
        """O: begins to send out storages without other owners."""
        by_storage: dict[int, list[SavedTensor]] = {}
        for reference in self._saved:
            saved = reference()
            if saved is not None and saved.tensor is not None:
                by_storage.setdefault(saved.tensor.untyped_storage().data_ptr(), []).append(saved)
        self._saved.clear()
        storages = []
        for own in by_storage.values():
            assert own[0].tensor is not None
            storage = own[0].tensor.untyped_storage()
            if storage.nbytes() >= BLOCK and _holders(storage) == len(own) and all(s.look() for s in own):
                storages.append(storage)
                self._moved.append((storage.nbytes(), own))
        self.moved_bytes = sum(size for size, _ in self._moved)
        tier.out(number, storages)

    def gone(self, tier: Tier, number: int) -> None:
        """A: waits until the storages are out (on a GPU lets the stream wait), and releases their memory."""
        tier.wait(number)
        self.away_bytes = self.moved_bytes
        for _, own in self._moved:
            for saved in own:
                saved.look()
                saved.tensor = None

    def load(self, tier: Tier, number: int) -> None:
        """L: allocates memory, and begins to bring the storages back."""
        storages, addresses = [], []
        self.away_bytes = 0
        for size, own in self._moved:
            more = 2 * tier.alignment if tier.alignment > 1 else 0
            room = torch.empty(size + more, dtype=torch.uint8, device=self._device).untyped_storage()
            skipped = -room.data_ptr() % tier.alignment
            storages.append(room)
            addresses.append(room.data_ptr() + skipped)
            for saved in own:
                saved.place(room, skipped)
        tier.load(number, storages, addresses)

    def back(self) -> None:
        """Drops references to loaded tensors, so that the backward frees each tensor after the last use."""
        self._moved.clear()


def _holders(storage: torch.UntypedStorage) -> int:
    """Returns the number of tensors and other holders of the storage, without the given object."""
    return torch._C._storage_Use_Count(storage._cdata) - 1


# -- a tier in a file --------------------------------------------------------------------------------------------------

_CHUNK = 1 << 20  # bytes of one transfer: long enough for a disk, soon over
_IN_MEMORY = ("tmpfs", "ramfs")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileTier(Tier):
    """A tier in a file, for stages on the CPU. A thread makes the transfers, and holds the memory that they use.

    The file has no name, so that nothing of the file stays when the process ends, however it ends. Transfers go around
    the page cache if the file system takes them so (``O_DIRECT``): pages of the cache count against a container's
    memory. Elsewhere the pages are given up after each move.

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
            for flags in (os.O_DIRECT, 0):
                self._is_direct = bool(flags)
                try:
                    fcntl.fcntl(made.number, fcntl.F_SETFL, flags)
                    for is_out in (True, False):
                        self._transfer(is_out, self._chunk_address, BLOCK, 0)
                    break
                except OSError as error:
                    if error.errno != errno.EINVAL or not flags:
                        raise
        except OSError as error:
            raise OSError(
                f"offload directory {self._directory}: no file can be made there: {error.strerror}"
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
