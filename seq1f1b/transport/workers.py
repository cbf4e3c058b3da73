"""Threads for calls without a way to end them: calls of torch's store, and of gloo."""

from __future__ import annotations

import contextlib
import datetime
import math
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from seq1f1b import _C

_T = TypeVar("_T")

FOREVER = datetime.timedelta(days=365)  # a worker's wait; the thread that waits for the message has the time-out


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, without gloo's source file and advice."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[/\S+\] ", "", line).partition(". This is typically")[0]


class Worker:
    """A daemon thread that runs tasks in order. It ends with the last reference to the worker.

    Python runs signal handlers in the main thread only, so an interrupt (Ctrl-C) never comes in the middle of a task.

    Args:
        turn: called at once, and after each ``period`` in seconds, until it raises. No period: never.
        failed: called in the thread with an error of a task or a turn.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], None] = lambda: None,
        period: float = math.inf,
        *,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._failed = failed
        self._turn, self._period, self._turn_at = turn, period, math.inf
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if period < math.inf:
            self._tasks.put((None, queue.SimpleQueue()))
        weakref.finalize(self, self._tasks.put, None).atexit = False  # a group that closes at exit needs it
        self._thread = threading.Thread(target=_run, args=(self._tasks, weakref.ref(self)), name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        """Gives the thread a task. Returns a queue for the task's answer, (result, None) or (None, error)."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tasks.put((task, answer))
        return answer

    def ask(self, task: Callable[[], _T], limit_s: float = math.inf, look: Callable[[], None] = lambda: None) -> _T:
        """Gives the thread a task; returns the result or raises the task's error.

        Args:
            look: called repeatedly during the wait; may raise.
        Raises:
            TimeoutError: no answer within ``limit_s`` seconds; the task may still run.
            ConnectionError: the thread has ended.
        """
        found: _T = self.wait(self.put(task), limit_s, look)
        return found

    def wait(
        self, answer: queue.SimpleQueue[Any], limit_s: float = math.inf, look: Callable[[], None] = lambda: None
    ) -> Any:
        """Waits for the answer to a task given by :meth:`put`, as :meth:`ask` does."""
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(queue.Empty):
                value, error = answer.get(timeout=0.05)
                if error is not None:
                    raise error
                return value
            look()
            if not self._thread.is_alive() and answer.empty():
                raise ConnectionError(f"{self._thread.name} has ended")
            if time.monotonic() > deadline:
                name = self._thread.name.removeprefix("seq1f1b ")
                raise TimeoutError(f"{name} was asked {limit_s:.0f} s ago and does not answer")

    def close(self, wait_s: float = 0.2) -> None:
        """Ends the thread after its tasks. A thread stuck inside torch stays."""
        self._tasks.put(None)
        self._thread.join(wait_s)

    def _do(self, task: Callable[[], Any] | None, answer: queue.SimpleQueue[Any]) -> float | None:
        """Runs a task or, without a task, takes a turn. Returns the seconds until the next turn, if any."""
        try:
            if task is not None:
                answer.put((task(), None))
            else:
                self._turn_at = math.inf
                self._turn()
                self._turn_at = time.monotonic() + self._period
        except BaseException as error:
            answer.put((None, error))
            self._failed(error)
        return None if self._turn_at == math.inf else max(0.0, self._turn_at - time.monotonic())


def _run(tasks: queue.SimpleQueue[Any], find: Callable[[], Worker | None]) -> None:
    """Runs the thread's loop, with a reference to the worker only during work."""
    _C.thread_is_helper()
    seconds = None
    while True:
        try:
            entry = tasks.get(timeout=seconds)
        except queue.Empty:
            entry = None, queue.SimpleQueue()
        if entry is None or (worker := find()) is None:
            return
        seconds = worker._do(*entry)
        del entry, worker  # frees the last message's tensors
