"""Ranks that are processes of a torch process group."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import queue
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.group import RankGroup

_T = TypeVar("_T")
_open_groups: weakref.WeakSet[ProcessRank] = weakref.WeakSet()


def start_helper(name: str, work: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that may be inside torch, for ever, when the interpreter ends."""

    def run() -> None:
        _C.thread_is_helper()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def within(limit_s: float, call: Callable[[], _T], what: str) -> _T:
    """Runs a call that nothing else can end, and gives what it returns or raises.

    Raises:
        TimeoutError: it has not ended in so many seconds. Its thread goes on.
    """
    found: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            found.put((call(), None))
        except BaseException as error:
            found.put((None, error))

    start_helper(f"seq1f1b {what}", work)
    try:
        value, error = found.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"{what} has not answered for {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value] # there is no error


class Worker:
    """A daemon thread that runs tasks in the order in which it was given them.

    Python runs signal handlers in the main thread only, so an interrupt (Ctrl-C) comes before or after a task is given,
    never in the middle of one.

    Args:
        failed: hears, in the thread, what a task raised.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = start_helper(name, self._work)

    def put(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def wait(self, timeout_s: float | None = None, look: Callable[[], None] | None = None) -> bool:
        """Waits until everything that it was given so far is done. Returns False if that takes longer.

        Args:
            look: called now and then while it waits; may raise.
        """
        done = threading.Event()
        self.put(done.set)
        if look is None or timeout_s is None:
            return done.wait(timeout_s)
        deadline = time.monotonic() + timeout_s
        while not done.wait(min(0.1, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                return False
            look()
        return True

    def close(self) -> None:
        """Ends the thread after its tasks; one that waits for a peer that is gone stays."""
        self._tasks.put(None)
        self._thread.join(0.2)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                self._failed(error)
            del task  # or the last message's tensors live on


def _close_at_exit() -> None:
    """Nobody waits for this rank any more; and a thread that is inside torch then ends with the process."""
    _C.thread_interpreter_ends()
    for group in list(_open_groups):
        group.timeout_s = 1.0
        with contextlib.suppress(Exception):
            group.close()
    _let_torch_finish(3.0)


def _let_torch_finish(limit_s: float) -> None:
    """Waits until gloo's threads have dropped the tensors of operations that are done.

    DDP may hold their group longer than ``destroy_process_group``. Before Python 3.14, one that wants the interpreter
    once that has ended is unwound, which gives up the main thread's state and ends the process by SIGABRT or SIGSEGV.
    """
    deadline, times_quiet = time.monotonic() + limit_s, 0
    while times_quiet < 3 and time.monotonic() < deadline:
        own = {thread.ident for thread in threading.enumerate()}
        is_busy = sys._current_frames().keys() - own or any(map(_is_running_gloo, os.listdir("/proc/self/task")))
        times_quiet = 0 if is_busy else times_quiet + 1
        time.sleep(0.005)  # without the interpreter, which such a thread may wait for


def _is_running_gloo(task: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat", encoding="utf-8") as file:
        name, _, state = file.read().partition(") ")
        return name.endswith("(pt_gloo_runloop") and not state.startswith("S")
    return False


atexit.register(_close_at_exit)


def _forget_sockets_after_fork() -> None:
    """A forked child (a data loader's worker) that kept the sockets would hide its parent's death from the peers."""
    for group in _open_groups:
        for connection in group._connections.values():
            connection.close()
    _open_groups.clear()  # they are the parent's to close


os.register_at_fork(after_in_child=_forget_sockets_after_fork)


def first_line(error: BaseException) -> str:
    """First line of an error, without gloo's source file and advice."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[/\S+\] ", "", line).partition(". This is typically")[0]


FOREVER = datetime.timedelta(days=365)  # of a helper thread; who waits for the message itself has the time-out
_EXCHANGE_TAGS = 1 << 30  # from here on, so many less one, that of the set-up; edges are below for 2^14 pipelines
_EXCHANGE = "gradients of tied parameters"


class _Transfer:
    """A transfer of the process group. Its own wait ends with the peer's connection or with the group's time-out."""

    def __init__(self, group: RankGroup, peer: int, work: Any) -> None:
        self._group, self._peer, self._work = group, peer, work

    def wait(self) -> None:
        start, group, errors = time.monotonic(), self._group, list[Exception]()
        worker = Worker("seq1f1b tied parameters", errors.append)
        try:
            worker.put(functools.partial(self._work.wait, FOREVER))
            while not worker.wait(0.1):
                group.check()
                if time.monotonic() - start > group.timeout_s:
                    group.check_progress(self._peer, _EXCHANGE)
        finally:
            worker.close()
        if errors:
            group.lose(self._peer, first_line(errors[0]), _EXCHANGE)
            group.check()


class ProcessRank(RankGroup):
    """A rank that is a process of a torch process group.

    Args:
        connections: sockets to the ranks of the same host, by rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: object,
        process_group: Any,
        connections: dict[int, socket.socket],
        *,
        arena_bytes: int,
        local_size: int,
    ) -> None:
        super().__init__(rank, size, group, arena_bytes=arena_bytes, local_size=local_size)
        self.process_group, self._connections = process_group, connections
        _open_groups.add(self)

    def _exchange_tag(self) -> int:
        return _EXCHANGE_TAGS + self._exchanges % (_EXCHANGE_TAGS - 1)

    def _begin_send(self, data: Tensor, rank: int) -> Any:
        work = dist.isend(data, group=self.process_group, group_dst=rank, tag=self._exchange_tag())
        return _Transfer(self, rank, work)

    def _begin_receive(self, data: Tensor, rank: int) -> Any:
        work = dist.irecv(data, group=self.process_group, group_src=rank, tag=self._exchange_tag())
        return _Transfer(self, rank, work)

    def leave(self) -> None:
        self.timeout_s = 1.0
        with contextlib.suppress(Exception):
            within(3.0, self.close, "the other ranks")  # the collector may run in a thread that close() waits for

    def close(self) -> None:
        """Lets go of the process group, too: ``destroy_process_group`` ends its threads once nobody holds it."""
        super().close()
        self.process_group = None
