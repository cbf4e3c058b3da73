"""Ranks in threads of one process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.descriptors import edge_memory, private_mapping
from seq1f1b.transport.edges import ARENA_BYTES, Edge
from seq1f1b.transport.group import OfOneProcess, RankGroup


class LoopbackGroup(OfOneProcess):
    """A pipeline with ranks in threads of the process: ``LoopbackGroup(P)[rank]`` is one rank's group.

    Useful for tests, and to run a schedule without a launcher.

    Args:
        arena_bytes: most address space of one edge; a limit of the process may reduce it.
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
    """Memory shared by the ranks of one loopback. It holds no reference to a rank, so the last rank frees it."""

    def __init__(self, size: int, arena_bytes: int) -> None:
        self._lock = threading.Lock()
        self._arena_bytes = arena_bytes
        self._arenas: dict[Edge, object] = {}
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = {}
        self.block = private_mapping(_C.group_block_bytes(size))

    def arena(self, edge: Edge) -> object:
        with self._lock:
            if edge not in self._arenas:
                _, self._arenas[edge], _ = edge_memory(self._arena_bytes)
            return self._arenas[edge]

    def box(self, source: int, destination: int, epoch: int) -> queue.SimpleQueue[Tensor]:
        with self._lock:
            return self._boxes.setdefault((source, destination, epoch), queue.SimpleQueue())


class _LoopbackRank(RankGroup):
    is_thread = True

    def transport_to(self, peer_rank: int) -> str:
        return "loopback"

    def __init__(self, memory: _LoopbackMemory, rank: int, size: int, arena_bytes: int) -> None:
        group = _C.group_create(memory.block, size, rank)
        super().__init__(rank, size, group, arena_bytes=arena_bytes, local_size=size)
        self._memory = memory

    def _begin_transfer(self, data: Tensor, rank: int, *, sends: bool) -> Callable[[], None]:
        source, destination = (self.rank, rank) if sends else (rank, self.rank)
        box = self._memory.box(source, destination, self.epoch)
        if sends:
            box.put(data.clone())
            return lambda: None

        def wait() -> None:
            while True:
                self.check()
                with contextlib.suppress(queue.Empty):
                    data.copy_(box.get(timeout=0.1))
                    return

        return wait

    def _open_end(self, edge: Edge, peer_rank: int, is_receiver: bool, text: str) -> object:
        arena = self._memory.arena(edge)
        return _C.arena_end(self.group, arena, -1, peer_rank, is_receiver, text)
