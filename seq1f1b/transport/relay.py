"""Edges over a torch process group, and the detection of a peer's death there."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.descriptors import edge_memory
from seq1f1b.transport.edges import DTYPES, place_tensor
from seq1f1b.transport.group import RankGroup
from seq1f1b.transport.workers import FOREVER, Worker, first_line

_UINT8 = DTYPES.index(torch.uint8)


class C10dRelay:
    """One end of an edge over a torch process group, which moves messages between two private arenas.

    gloo ends the process if two ends ask for different sizes, so a message is two transfers, each with a tag: a header
    of a fixed size, and the payload, received once the header has told its size.

    gloo cannot be polled, a wait with a time-out closes the pair, and aborting the group does not end a wait (torch
    2.13). So one thread per end waits without limit, and reports each message to the arena in C. The engine's thread
    waits in the arena, where failures, time-outs and signals end a wait. Messages in flight after a failed step cannot
    be cancelled, and :meth:`drain` completes them. For this purpose both ends must count equal transfers, so transfers
    begin, and are counted, in a thread out of reach of interrupts.

    Args:
        tag: number of the edge; the end uses the tags from ``TAGS * tag`` on.
        beginner: thread for the begin of transfers, shared by all ends of a rank.
        broken: gets the reason of a failed transfer, and the edge; called from another thread.
    """

    TAGS = 2
    _HEADER, _PAYLOAD = range(TAGS)

    def __init__(
        self,
        group: RankGroup,
        process_group: Any,
        peer: int,
        tag: int,
        is_receiver: bool,
        text: str,
        beginner: Worker,
        broken: Callable[[str, str], None],
    ) -> None:
        self._group, self._process_group, self._tag = group, process_group, tag
        self.peer, self._broken = peer, broken
        self._is_receiver, self._text = is_receiver, text
        self._beginner = beginner
        self._waiter = Worker(f"seq1f1b {text}", failed=self._lose)
        self._lock = threading.Lock()  # between the two threads; no other thread uses the attributes below
        # By part: the number of transfers surely begun by both ends, and the bytes of this end's later ones.
        self._before = [0] * self.TAGS
        self._started: tuple[list[int], ...] = ([], [])
        self._draining = False
        try:
            _, self._mapping, _ = edge_memory(group.arena_bytes)
            # Last, because end and relay hold each other until close().
            self.end: object = _C.arena_end(group.group, self._mapping, self, peer, is_receiver, text)
        except BaseException:
            self._waiter.close()
            raise

    def move(self, position: int, place: int, payload_bytes: int) -> None:
        """Receives a message of at most so many bytes, or sends one of just so many. Called by the arena."""
        self._beginner.put(functools.partial(self._begin, position, place, payload_bytes))

    # in the beginner's thread

    def _begin(self, position: int, place: int, payload_bytes: int) -> None:
        try:
            works = [self._transfer(self._HEADER, place, _C.HEADER_BYTES)]
            if not self._is_receiver and payload_bytes > 0:
                works.append(self._transfer(self._PAYLOAD, place + _C.HEADER_BYTES, payload_bytes))
        except Exception as error:
            self._lose(error)
        else:
            self._waiter.put(functools.partial(self._finish, works, position, place, payload_bytes))

    def _transfer(self, part: int, address: int, size: int) -> Any:
        """Begins the transfer of a part of a message from or to memory of the arena."""
        work = self._start(place_tensor(self._mapping, address, _UINT8, (size,)), part)
        self._started[part].append(size)
        return work

    def _start(self, data: Tensor, part: int) -> Any:
        tag = self.TAGS * self._tag + part
        if self._is_receiver:
            return dist.irecv(data, group=self._process_group, group_src=self.peer, tag=tag)
        return dist.isend(data, group=self._process_group, group_dst=self.peer, tag=tag)

    # in the waiter's thread

    def _finish(self, works: list[Any], position: int, place: int, most_payload: int) -> None:
        for work in works:
            work.wait(FOREVER)
        if self._is_receiver and (payload := self._begin_payload(place, most_payload)) is not None:
            payload.wait(FOREVER)
        _C.relay_done(self.end, position)

    def _begin_payload(self, place: int, most_payload: int) -> Any:
        """Begins to receive what the header announces; None if that is nothing.

        After a wrong header, whose reader raises the error, no payload would have the size that is sent.
        """
        size = _C.message_payload_bytes(place)
        with self._lock:
            self._draining = self._draining or not 0 <= size <= most_payload
            if self._draining or size == 0:
                return None
            return self._transfer(self._PAYLOAD, place + _C.HEADER_BYTES, size)

    def _lose(self, error: BaseException) -> None:
        self._broken(first_line(error), self._text)

    # after a step, and at the end

    def flush(self) -> None:
        """Waits until the peer has all messages."""
        if not self._is_receiver:
            _C.relay_flush(self.end)

    def settle(self) -> None:
        """Records that no message is in flight: both ends have begun all transfers of this end."""

        def settle() -> None:
            for part, sizes in enumerate(self._started):
                self._before[part] += len(sizes)
                sizes.clear()
            self._draining = False

        self._beginner.put(settle)

    def started(self) -> list[tuple[int, list[int]]]:
        """Returns, by part, the number of transfers surely begun by both ends, and the sizes of this end's later ones.

        Afterwards this end begins transfers only in :meth:`drain`.
        """

        def look() -> list[tuple[int, list[int]]]:
            with self._lock:
                self._draining = True
                return [(before, list(sizes)) for before, sizes in zip(self._before, self._started, strict=True)]

        return self._beginner.ask(look)

    def drain(
        self,
        theirs: Sequence[tuple[int, list[int]]],
        limit_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Completes the transfers begun only by the peer's end, and waits until no transfer is in flight here.

        Afterwards neither end depends on an earlier step. A second call may follow a failure elsewhere: completed
        transfers count as begun by both ends.

        Args:
            theirs: result of :meth:`started` at the peer's end.
            look: called now and then during the wait; may raise.
        Raises:
            PipelineError: the peer did not begin this end's transfers for ``limit_s`` seconds.
        """

        def complete() -> None:
            for part, (before, sizes) in enumerate(theirs):
                begun = self._before[part] + len(self._started[part])
                assert begun >= before, f"{begun} transfers of part {part} here, {before} before the others"
                for size in sizes[begun - before :]:
                    work = self._start(torch.zeros(size, dtype=torch.uint8, device="cpu"), part)
                    self._started[part].append(size)
                    self._waiter.put(functools.partial(work.wait, FOREVER))

        self._beginner.put(complete)
        self._beginner.ask(lambda: None)
        try:
            self._waiter.ask(lambda: None, limit_s, look)
        except TimeoutError as error:
            text = f"{self._text}: rank {self.peer} did not complete what the failed step left"
            raise _C.PipelineError(text) from error
        self.settle()
        if not self._is_receiver:  # makes every place writable again: no message of this step has begun
            _C.relay_done(self.end, self._group.step << 32)

    def close(self) -> None:
        self._waiter.close()
        self.end = None
        del self._process_group  # no further transfer can begin


class Lifeline:
    """A message of the process group, sent by a peer at its close; the receive fails if the peer dies.

    So every waiting rank learns of the peer's death, also between steps, when edges have no posted receive. A receive
    never ends if the sender has not existed (torch 2.13), so a lifeline begins once both ranks have one.
    """

    def __init__(self, process_group: Any, peer: int, tag: int, broken: Callable[[str], None]) -> None:
        self._broken = broken
        to_peer = {"group": process_group, "tag": tag}
        data = [torch.zeros(1, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._receive: Any = functools.partial(dist.irecv, data[0], group_src=peer, **to_peer)
        self._say_farewell: Any = functools.partial(dist.isend, data[1], group_dst=peer, **to_peer)
        self._has_begun = False
        self._worker = Worker(f"seq1f1b lifeline to rank {peer}")

    def begin(self) -> None:
        self._has_begun = True
        self._worker.put(self._wait)

    def _wait(self) -> None:
        try:
            work, self._receive = self._receive(), None  # drops the process group before the wait
            work.wait(FOREVER)
        except Exception as error:
            self._broken(first_line(error))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the peer, or the process group, may be gone
            if self._has_begun:
                self._worker.put(functools.partial(self._say_farewell().wait, FOREVER))
        self._say_farewell = None
        self._worker.close()
