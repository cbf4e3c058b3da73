"""The tier of a GPU: pinned host memory. Copies run on two streams of their own, one for each way.

The host waits for no copy; streams wait for events:

- out: the stream waits for the work that the computing stream has been given so far, then copies;
- wait: the computing stream waits for the end of that copy, and later work there may use the memory that has gone;
- in: memory has been taken on the computing stream; the other stream waits for the work given there, then copies;
- wait: the computing stream waits for the end of that copy.

So a load's room is written only after the computing stream has waited for the last copy that used the room.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import where
from seq1f1b.engine.offload import Load, Tier, TierFacts
from seq1f1b.transport import RankGroup

__all__: list[str] = []

_PIECE = 8 << 20  # bytes pinned at once: a power of two, to which torch rounds pinned memory up
_FAREWELL_S = 5.0  # for copies that are given up to end
_stuck: list[object] = []  # memory of copies that do not end: to free the memory would wait for them


class _Copy(NamedTuple):
    """A load's copy that has been started: the events around it, and the bytes."""

    begin: Any
    end: Any
    bytes: int


class HostTier(Tier):
    """A tier of pinned host memory.

    The room grows in the first step of a shape, because equal steps take equal room: later no memory is pinned.

    Args:
        device: GPU of the stages.
    """

    cuda: Any = torch.cuda  # streams and events

    def __init__(self, device: torch.device, group: RankGroup) -> None:
        super().__init__(device, 1)
        launched = os.environ.get("LOCAL_WORLD_SIZE", "")  # counts ranks of other pipelines on this host, too
        self._host_ranks = max(group.local_size, int(launched) if launched.isdigit() else 1)
        self._pieces: list[Tensor] | None = []  # None: closed
        self._most_loads = 0
        self._copies: dict[tuple[int, bool], _Copy] = {}  # of the step, by load and whether the copy goes out
        self._held: dict[int, list[torch.UntypedStorage]] = {}  # by load, memory that a copy may use
        self._broken = ""  # why copies have failed for good
        self._compute: Any = None  # the stream on which units compute
        self._in: Any = self.cuda.Stream(device)
        self._out: Any = self.cuda.Stream(device)

    @staticmethod
    def check(device: torch.device) -> None:
        """Raises ValueError if the stages lie on no GPU."""
        where.check("host", "Memory.offload=seq1f1b.HOST", device)

    def begin_step(self, most_loads: int) -> None:
        self.reset()  # again, if an interrupt ended the last one
        if self._broken:
            raise RuntimeError(
                f"Memory(offload=HOST) on {self.device}: copies have failed ({self._broken}), and what waits for them "
                "cannot go on: end this process and start it again"
            )
        self._most_loads = most_loads
        self._copies.clear()
        self._compute = self.cuda.current_stream(self.device)
        # The computing stream may be another one now, which has not waited for the copies that read the room last.
        self._out.wait_stream(self._in)

    def step_facts(self) -> TierFacts | None:
        if self._pieces is None:
            return None
        moved, ns = [0, 0], [0, 0]  # in and out
        for (_, is_out), copy in self._copies.items():
            if copy.end.query():
                moved[is_out] += copy.bytes
                ns[is_out] += int(copy.begin.elapsed_time(copy.end) * 1e6)
        return TierFacts(len(self._pieces) * _PIECE, *reversed(moved), *reversed(ns))

    def came_back(self, number: int) -> int:
        copy = self._copies.get((number, False))
        return 0 if copy is None else int(copy.end.cuda_event)

    def reset(self) -> None:
        """Waits for copies under way: afterwards none touches the memory of a load."""
        if self._held or self._loads:  # else the computing stream has waited for all copies
            self._broken = self._broken or self._await_copies()
            if self._broken:
                _stuck.append((dict(self._held), self._pieces))
        self._held.clear()
        super().reset()

    def close(self) -> None:
        self.reset()
        self._pieces = self._in = self._out = self._compute = None
        self._copies.clear()

    def _begin(self, number: int, load: Load, storages: list[torch.UntypedStorage], addresses: list[int]) -> None:
        is_out, size = not load.comes_in, sum(size for _, size in load.parts)
        self._grow(load)
        stream = self._out if is_out else self._in
        begin, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self._held[number] = storages
        stream.wait_stream(self._compute)
        begin.record(stream)
        for storage, (offset, count) in zip(storages, load.parts, strict=True):
            data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for piece, there in self._spans(offset, count):
                here = data[there.start - offset : there.stop - offset]
                self._copy(*((piece, here) if is_out else (here, piece)), stream)
        end.record(stream)
        self._copies[number, is_out] = _Copy(begin, end, size)

    def _wait(self, number: int) -> None:
        self._compute.wait_event(self._copies[number, not self._loads[number].comes_in].end)
        del self._held[number]

    def _await_copies(self) -> str:
        """Waits for the end of all copies. Returns why they cannot be waited for; "" normally."""
        until = time.monotonic() + _FAREWELL_S
        try:
            while not (self._out.query() and self._in.query()):
                if time.monotonic() > until:
                    return "they do not end"
                time.sleep(1e-3)
        except RuntimeError as error:
            return str(error)
        return ""

    # -- the room

    def _grow(self, load: Load) -> None:
        """Pins missing memory for a load. The first load of a step tells how much all loads need, so that a host
        without room is found before its memory is full.

        Raises MemoryError, with a remedy, if the host lacks the memory.
        """
        assert self._pieces is not None
        room = len(self._pieces) * _PIECE
        missing = -(-(load.end - room) // _PIECE) * _PIECE
        if missing <= 0:
            return
        check_host(self._host_ranks, max(self._most_loads * (load.end - load.begin) - room, missing))
        try:
            while len(self._pieces) * _PIECE < load.end:
                self._pieces.append(self._pin(_PIECE))
        except RuntimeError as error:
            raise MemoryError(
                f"Memory(offload=HOST) on {self.device} could not pin {missing} bytes of host memory beside {room}: "
                f"{error}; move fewer units by Memory(units=), or use shorter segments"
            ) from error

    def _spans(self, offset: int, count: int) -> Iterator[tuple[Tensor, range]]:
        """Yields the pinned memory at a range of the room, piece by piece, each with its part of the range."""
        assert self._pieces is not None
        end = offset + count
        while offset < end:
            number, begin = divmod(offset, _PIECE)
            stop = min(_PIECE, begin + end - offset)
            yield self._pieces[number][begin:stop], range(offset, offset + stop - begin)
            offset += stop - begin

    def _pin(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _copy(self, to: Tensor, source: Tensor, stream: Any) -> None:
        with self.cuda.stream(stream):
            to.copy_(source, non_blocking=True)


def check_host(host_ranks: int, needed: int, root: str = "") -> None:
    """Raises MemoryError if the host lacks the needed bytes for each rank. Without this check, a container is killed.

    Args:
        host_ranks: number of ranks on the host, each with the need of this rank. root: folder of /proc and /sys.
    """
    left, what = host_room(root)
    if needed > left / host_ranks:
        raise MemoryError(
            f"Memory(offload=HOST) needs {needed} bytes of pinned host memory more for each of {host_ranks} ranks of "
            f"this host, and {what} leaves {left:.0f}: move fewer units by Memory(units=), use shorter segments, or "
            "allow more memory"
        )


def host_room(root: str) -> tuple[float, str]:
    """Returns the bytes left on the host, and the name of the limit: free memory, or the tightest control group of this
    process. A sixteenth of each limit stays reserved for other programs."""
    found = [(math.inf, "")]
    memory = _numbers(f"{root}/proc/meminfo")
    if memory.keys() >= {"MemTotal:", "MemAvailable:"}:
        found.append((1024 * (memory["MemAvailable:"] - memory["MemTotal:"] // 16), "free memory"))
    with contextlib.suppress(OSError), open(f"{root}/proc/self/cgroup", encoding="utf-8") as file:
        paths = [line.rstrip("\n").split(":", 2)[2] for line in file if line.startswith("0::")]  # version 2
        # In a container, the path may exist on the host only; the root of the groups then counts.
        for group in (each for path in paths for each in (PurePosixPath(path), *PurePosixPath(path).parents)):
            own = f"{root}/sys/fs/cgroup{group}/"
            limit, used = (_numbers(own + name).get("", math.inf) for name in ("memory.max", "memory.current"))
            if used < math.inf > limit:
                spared = _numbers(f"{own}memory.stat").get("inactive_file", 0)  # the kernel frees these pages first
                found.append((limit - used + spared - limit // 16, f"the limit of control group {group}"))
    left, what = min(found)
    return max(0, left), what


def _numbers(path: str) -> dict[str, int]:
    """Returns the number of each line of a file, by the words before the number; empty if there is no file."""
    found = {}
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        for line in file:
            *words, number = line.removesuffix(" kB\n").split() or [""]
            if number.isdigit():
                found[" ".join(words)] = int(number)
    return found
