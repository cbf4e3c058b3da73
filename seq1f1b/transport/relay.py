"""Edges that a torch process group carries, and how a peer's death is heard on it."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.group import DTYPES, RankGroup, map_fd, memory_fd, place_tensor
from seq1f1b.transport.processes import FOREVER, first_line

_UINT8 = DTYPES.index(torch.uint8)


class C10dRelay:
    """One end of an edge whose messages a torch process group moves between two private arenas.

    A message is two transfers: its header, whose receive is posted before it is sent, and then the payload, whose size
    the header tells. So both ends always ask for the same bytes, whatever steps their ranks run: gloo ends the process
    where they do not.

    gloo cannot be polled, a wait of it that times out closes the pair, and aborting the group does not end a wait
    (torch 2.13). So one helper thread per end waits without limit, and reports each message to the arena in C; the
    engine's thread waits there, where failures, time-outs and signals end a wait. What a failed step left in flight is
    completed by :meth:`drain`, as nothing can cancel it.

    Args:
        broken: hears, from the helper thread, why a transfer failed, and of which message on which edge.
    """

    def __init__(
        self,
        group: RankGroup,
        process_group: Any,
        peer: int,
        tag: int,
        is_receiver: bool,
        text: str,
        broken: Callable[[str, str], None],
    ) -> None:
        self._group, self._process_group, self._tag = group, process_group, tag
        self.peer, self._broken = peer, broken
        self._is_receiver, self._text = is_receiver, text
        self._mapping = map_fd(memory_fd(group.arena_bytes), group.arena_bytes)
        self.end: object = _C.relay_end(group.group, self._mapping, self, peer, is_receiver, text)
        self._step = self._most_payload = 0
        self._started: tuple[list[int], list[int]] = ([], [])  # bytes of headers and payloads begun in this step
        self._draining = False
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"seq1f1b {text}", daemon=True)
        self._thread.start()

    # called by the arena

    def begin_step(self, step: int, most_payload: int) -> None:
        self._step, self._most_payload = step, most_payload
        self._started = ([], [])

    def post(self, sequence: int, place: int) -> None:
        step, most_payload, work = self._step, self._most_payload, self._transfer(0, place, _C.HEADER_BYTES)
        self._queue.put((sequence, lambda: self._receive_payload(step, sequence, place, most_payload, work)))

    def send(self, sequence: int, place: int, payload_bytes: int) -> None:
        step, works = self._step, [self._transfer(0, place, _C.HEADER_BYTES)]
        if payload_bytes > 0:
            works.append(self._transfer(1, place + _C.HEADER_BYTES, payload_bytes))

        def finish() -> None:
            for work in works:
                work.wait(FOREVER)
            _C.relay_done(self.end, step, sequence)

        self._queue.put((sequence, finish))

    def _transfer(self, which: int, address: int, size: int) -> Any:
        """Begins a transfer from or to memory of the arena; headers (0) and payloads (1) of an edge have a tag each."""
        work = self._start(place_tensor(self._mapping, address, _UINT8, (size,)), which)
        self._started[which].append(size)
        return work

    def _start(self, data: Tensor, which: int) -> Any:
        tag = 2 * self._tag + which
        if self._is_receiver:
            return dist.irecv(data, group=self._process_group, group_src=self.peer, tag=tag)
        return dist.isend(data, group=self._process_group, group_dst=self.peer, tag=tag)

    # the helper thread

    def _receive_payload(self, step: int, sequence: int, place: int, most_payload: int, work: Any) -> None:
        work.wait(FOREVER)
        payload_bytes = _C.message_payload_bytes(place)  # -1: not a message, which the one who waits will say
        if 0 < payload_bytes <= most_payload:  # one that is longer, too
            with self._lock:
                if self._draining:
                    return
                work = self._transfer(1, place + _C.HEADER_BYTES, payload_bytes)
            work.wait(FOREVER)
        _C.relay_done(self.end, step, sequence)

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            sequence, task = entry
            try:
                task()
            except Exception as error:
                self._broken(first_line(error), f"{self._text}, message {sequence}")
            del entry, task  # or the last message's tensors live on

    # after a failed step, and at the end

    def started(self) -> tuple[list[int], list[int]]:
        """Transfers that this end began in the failed step, and since; it begins no more, but in :meth:`drain`."""
        with self._lock:
            self._draining = True
            return list(self._started[0]), list(self._started[1])

    def drain(self, theirs: tuple[list[int], list[int]]) -> None:
        """Completes the transfers that only the other end began, and waits until this end has none in flight.

        Again after an attempt that failed elsewhere: what has been completed is among those that both ends began.
        """
        for which in (0, 1):
            for size in theirs[which][len(self._started[which]) :]:
                work = self._start(torch.zeros(size, dtype=torch.uint8), which)
                self._started[which].append(size)
                self._queue.put((-1, functools.partial(work.wait, FOREVER)))
        idle = threading.Event()
        self._queue.put((-1, idle.set))
        if not idle.wait(self._group.timeout_s):
            raise _C.PipelineError(f"{self._text}: rank {self.peer} did not complete what the failed step left")
        if not self._is_receiver:  # every place may be written again
            _C.relay_done(self.end, self._step, (1 << 32) - 2)

    def flush(self) -> None:
        """Waits until the peer has everything."""
        if not self._is_receiver:
            _C.relay_flush(self.end)

    def settle(self) -> None:
        """Every transfer of the step is complete: a step that fails before it begins here left nothing in flight."""
        self._started, self._draining = ([], []), False

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(0.2)  # a thread that waits for a peer that is gone stays: a daemon
        self.end = None


class Lifeline:
    """A message of the process group that a peer sends when it closes, and that fails when it dies.

    So whoever waits, for whatever, learns of the peer's death; an edge has a receive posted within a step only.
    """

    def __init__(self, process_group: Any, peer: int, tag: int, broken: Callable[[str], None]) -> None:
        self._process_group, self._peer, self._tag, self._broken = process_group, peer, tag, broken
        self._farewells: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._data = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        self._thread = threading.Thread(target=self._wait, name=f"seq1f1b lifeline to rank {peer}", daemon=True)
        self._receive: Any = dist.irecv(self._data[0], group=process_group, group_src=peer, tag=tag)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._receive.wait(FOREVER)
        except Exception as error:
            self._broken(first_line(error))
            return
        with contextlib.suppress(Exception):
            self._farewells.get().wait(FOREVER)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the peer, or the process group, may be gone
            self._farewells.put(
                dist.isend(self._data[1], group=self._process_group, group_dst=self._peer, tag=self._tag)
            )
        self._thread.join(0.2)
