"""Ranks in processes of a torch process group."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.descriptors import edge_memory, mapping, receive
from seq1f1b.transport.edges import Edge
from seq1f1b.transport.group import RankGroup
from seq1f1b.transport.meeting import Meeting
from seq1f1b.transport.workers import FOREVER, Worker, first_line

_open_groups: weakref.WeakSet[ProcessRank] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """Closes all groups before the interpreter ends."""
    # Ranks then stop waiting for this one, and threads inside torch end with the process.
    _C.thread_interpreter_ends()
    for group in list(_open_groups):
        group.timeout_s = 1.0
        with contextlib.suppress(Exception):
            group.close()
    _let_torch_finish(3.0)


def _let_torch_finish(limit_s: float) -> None:
    """Waits until gloo's threads have dropped the tensors of finished operations.

    DDP may hold the threads' group longer than ``destroy_process_group``. Before Python 3.14, a thread in need of the
    interpreter after its end is unwound: the main thread's state is lost, and the process ends by SIGABRT or SIGSEGV.
    """
    deadline, times_quiet = time.monotonic() + limit_s, 0
    while times_quiet < 3 and time.monotonic() < deadline:
        own = {thread.ident for thread in threading.enumerate()}
        is_busy = sys._current_frames().keys() - own or any(map(_is_running_gloo, os.listdir("/proc/self/task")))
        times_quiet = 0 if is_busy else times_quiet + 1
        time.sleep(0.005)  # releases the interpreter for threads that wait for it


def _is_running_gloo(task: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat", encoding="utf-8") as file:
        name, _, state = file.read().partition(") ")
        return name.endswith("(pt_gloo_runloop") and not state.startswith("S")
    return False


def _forget_sockets_after_fork() -> None:
    """Closes the sockets in a forked child, as a data loader's worker: open copies would hide the parent's death."""
    for group in _open_groups:
        for connection in group._connections.values():
            connection.close()
    _open_groups.clear()  # the parent closes its groups


os.register_at_fork(after_in_child=_forget_sockets_after_fork)


_EXCHANGE_TAGS = 1 << 30  # first tag, and number of tags plus the set-up's; edges of 2^14 pipelines have lower tags
_EXCHANGE = "gradients of tied parameters"


_ARENA = struct.Struct("qqqq")  # source stage, destination stage, channel, bytes


class ProcessRank(RankGroup):
    """A rank in a process of a torch process group. All peers are on one host, except in a subclass.

    Args:
        meeting: the ranks' meeting; its attempt is the pipeline's number, unique in the process group.
        connections: sockets to the ranks of the host, by rank.
        block: shared memory of all ranks.
        spoiled: memory of all ranks of the host, if not in the block; marks steps with worthless messages.
    """

    def __init__(
        self,
        meeting: Meeting,
        connections: dict[int, socket.socket],
        arena_bytes: int,
        block: object,
        spoiled: object | None = None,
    ) -> None:
        rank, size = meeting.rank, meeting.size
        group = _C.group_create(block, size, rank, spoiled)
        super().__init__(rank, size, group, arena_bytes=arena_bytes, local_size=1 + len(connections))
        self.process_group, self._generation, self._connections = meeting.process_group, meeting.attempt, connections
        for peer, connection in connections.items():
            self.hangup_fds[peer] = connection.fileno()
        _open_groups.add(self)

    # -- edges in memory shared by two processes of a host

    def transport_to(self, peer_rank: int) -> str:
        return "shm"

    def _open_end(self, edge: Edge, peer_rank: int, is_receiver: bool, text: str) -> object:
        connection = self._connections[peer_rank]
        try:
            if is_receiver:  # makes the memory, and hands the descriptor to the sender
                made, arena, size = edge_memory(self.arena_bytes)
                socket.send_fds(connection, [_ARENA.pack(*edge, size)], [made.number])
                return _C.arena_end(self.group, arena, connection.fileno(), peer_rank, is_receiver, text)
            data, handed = receive(connection, _ARENA.size)
        except OSError as error:
            raise _C.PipelineError(f"{text}: rank {peer_rank} did not open its end: {error}") from error
        *found, size = _ARENA.unpack(data)
        assert found == [*edge], f"{text}: rank {peer_rank} opened edge {found}; all ranks open edges in one order"
        return _C.arena_end(self.group, mapping(handed, size), connection.fileno(), peer_rank, is_receiver, text)

    # -- gradients of tied parameters

    def _begin_transfer(self, data: Tensor, rank: int, *, sends: bool) -> Callable[[], None]:
        begin, end = (dist.isend, "group_dst") if sends else (dist.irecv, "group_src")
        # A message left by a failed exchange never matches a later tag.
        tag = _EXCHANGE_TAGS + (1000003 * self._generation + self.epoch) % (_EXCHANGE_TAGS - 1)
        work = begin(data, group=self.process_group, tag=tag, **{end: rank})
        return functools.partial(self._wait_for, work, rank)

    def _wait_for(self, work: Any, peer: int) -> None:
        """Waits for a transfer of the process group."""
        start = time.monotonic()  # the transfer's own wait ends only with the connection or torch's time-out

        def look() -> None:
            self.check()
            if time.monotonic() - start > self.timeout_s:
                self.check_progress(peer, _EXCHANGE)

        try:
            Worker("seq1f1b tied parameters").ask(functools.partial(work.wait, FOREVER), look=look)
        except _C.PipelineError:
            raise
        except Exception as error:
            self.lose(peer, first_line(error), _EXCHANGE)
            self.check()

    def leave(self) -> None:
        self.timeout_s = 1.0
        with contextlib.suppress(Exception):
            # A thread of its own: the collector may run in a thread that close() waits for.
            Worker("seq1f1b the other ranks").ask(self.close, 3.0)

    def close(self) -> None:
        """Closes the edges and drops the process group, so that ``destroy_process_group`` can end its threads."""
        super().close()
        self.process_group = None
        _C.group_progress(self.group, "close()")
        self._say_farewell()
        for connection in self._connections.values():
            connection.close()

    def _say_farewell(self) -> None:
        """Says farewell; without it, the peers would take the end of the connections for the rank's death."""
