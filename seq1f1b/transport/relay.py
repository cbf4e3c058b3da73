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

    gloo ends the process if two ends ask for different sizes, so each part of a message has its own tag:

    - the header;
    - the first bytes of the payload, as many as message ``n`` had in the edge's last training step, or last evaluation.
      Each of the two has a tag, because two ends that both ran a step well agree on the sizes. From a shape's second
      step on, a receive is therefore posted in full before the send of the message;
    - the rest, with a size from the header.

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

    TAGS = 4
    _HEADER, _EVALUATING, _TRAINING, _REST = range(TAGS)

    def __init__(
        self,
        group: RankGroup,
        peer: int,
        tag: int,
        is_receiver: bool,
        text: str,
        beginner: Worker,
        broken: Callable[[str, str], None],
    ) -> None:
        self._group, self._process_group, self._tag = group, group.process_group, tag
        self.peer, self._broken = peer, broken
        self._is_receiver, self._text = is_receiver, text
        self._beginner = beginner
        self._waiter = Worker(f"seq1f1b {text}", failed=self._lose)
        self._lock = threading.Lock()  # between the two threads; no other thread uses the attributes below
        self._step, self._known, self._most_payload = 0, self._EVALUATING, 0
        self._last: dict[int, tuple[int, dict[int, int]]] = {}  # by part: room of a place, sizes by message
        self._expected: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # sizes of this step, by message
        # By part: bytes of the transfers begun by this end in the step before and this step; number of all earlier
        # transfers; number of transfers in the step before. When the peer fails in a step, this end may have left the
        # step well, or be in the next step.
        self._started: tuple[list[int], ...] = ([], [], [], [])
        self._before = [0] * self.TAGS
        self._of_last_step = [0] * self.TAGS
        self._draining = False
        try:
            _, self._mapping, _ = edge_memory(group.arena_bytes)
            # Last, because end and relay hold each other until close().
            self.end: object = _C.arena_end(group.group, self._mapping, -1, peer, is_receiver, text, self)
        except BaseException:
            self._waiter.close()
            raise

    # called by the arena

    def begin_step(self, step: int, _place: int, most_payload: int) -> None:
        known = self._TRAINING if self._group.training else self._EVALUATING
        self._beginner.put(functools.partial(self._begin_step, step, known, most_payload))

    def post(self, sequence: int, place: int, _payload_bytes: int) -> None:
        self._beginner.put(functools.partial(self._begin, self._begin_receive, sequence, place))

    def send(self, sequence: int, place: int, payload_bytes: int) -> None:
        self._beginner.put(functools.partial(self._begin, self._begin_send, sequence, place, payload_bytes))

    # in the beginner's thread

    def _begin_step(self, step: int, known: int, most_payload: int) -> None:
        last_most, last = self._last.get(known, (0, {}))
        self._expected = last if last_most == most_payload else {}
        self._step, self._known, self._most_payload, self._sizes = step, known, most_payload, {}
        self._of_last_step = [len(sizes) for sizes in self._started]

    def _begin(self, begin: Callable[..., Callable[[], None]], *message: int) -> None:
        try:
            self._waiter.put(begin(*message))
        except Exception as error:
            self._lose(error)

    def _begin_receive(self, sequence: int, place: int) -> Callable[[], None]:
        known, expected = self._known, self._expected.get(sequence, 0)
        header, payload = place, place + _C.HEADER_BYTES
        works = [self._transfer(self._HEADER, header, _C.HEADER_BYTES)]
        if expected > 0:
            works.append(self._transfer(known, payload, expected))
        step, sizes, most = self._step, self._sizes, self._most_payload

        def finish() -> None:
            works[0].wait(FOREVER)
            payload_bytes, trains = _C.message_head(place)
            if 0 <= payload_bytes <= most and trains == (known == self._TRAINING):
                sizes[sequence] = payload_bytes
            else:  # a wrong header: the reader of the message raises the error
                payload_bytes = 0
            if payload_bytes > expected:
                with self._lock:
                    if self._draining:
                        return
                    works.append(self._transfer(self._REST, payload + expected, payload_bytes - expected))
            for work in works[1:]:
                work.wait(FOREVER)
            _C.relay_done(self.end, step, sequence)

        return finish

    def _begin_send(self, sequence: int, place: int, payload_bytes: int) -> Callable[[], None]:
        expected, payload = self._expected.get(sequence, 0), place + _C.HEADER_BYTES
        works = [self._transfer(self._HEADER, place, _C.HEADER_BYTES)]
        if expected > 0:
            works.append(self._transfer(self._known, payload, expected))
        if payload_bytes > expected:
            works.append(self._transfer(self._REST, payload + expected, payload_bytes - expected))
        step = self._step
        self._sizes[sequence] = payload_bytes

        def finish() -> None:
            for work in works:
                work.wait(FOREVER)
            _C.relay_done(self.end, step, sequence)

        return finish

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

    # in either thread

    def _lose(self, error: BaseException) -> None:
        self._broken(first_line(error), self._text)

    # after a step, and at the end

    def flush(self) -> None:
        """Waits until the peer has all messages."""
        if not self._is_receiver:
            _C.relay_flush(self.end)

    def settle(self) -> None:
        """Records a good end of the step: no message is in flight, and both ends know the sizes."""

        def settle() -> None:
            self._last[self._known] = self._most_payload, self._sizes
            self._drop(self._of_last_step)

        self._beginner.put(settle)

    def _drop(self, counts: list[int]) -> None:
        for part, count in enumerate(counts):
            self._before[part] += count
            del self._started[part][:count]
        self._of_last_step = [0] * self.TAGS

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
        self._beginner.put(self._forget)
        if not self._is_receiver:  # makes every place writable again
            _C.relay_done(self.end, self._step, (1 << 32) - 2)

    def _forget(self) -> None:
        self._last, self._sizes, self._draining = {}, {}, False  # settle() may come before the next step of this edge
        self._drop([len(sizes) for sizes in self._started])

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
