"""One rank's membership in a pipeline, whatever lies behind its edges."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.edges import Edge
from seq1f1b.transport.failure import Failure, error_of, mark_as_told
from seq1f1b.transport.values import pack, unpack

__all__: list[str] = []


class OfOneProcess:
    """Base of objects bound to the process and to its place among the ranks, which a copy would not have."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError on a copy or pickle."""
        raise TypeError(
            f"a {type(self).__name__} is bound to its process and its place among the ranks, so it is neither copied "
            "nor pickled: copy engine.stages or their state_dict(), and make a PipelineEngine in each process"
        )


class RankGroup(OfOneProcess, ABC):
    """One rank's membership in a pipeline: progress, failures, edges and small collectives.

    Every rank counts its steps, also steps that end before they begin, and the ranks pair by this count. A step that
    fails on one rank ends on all: everyone gets one :class:`PipelineError`. A rank that is still in the step before
    finishes that step first; a rank that has left the failed step well hears in its next step, which then ends on all
    ranks. The next :meth:`begin_step` waits until all ranks have come to the same step, then goes on. It ends with an
    error, at once, if another rank has left this step by an error.
    """

    is_thread = False  # True: the ranks are threads of one process
    process_group: Any = None  # torch's, if the ranks are processes of one

    def __init__(self, rank: int, size: int, group: object, *, arena_bytes: int, local_size: int) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.arena_bytes = arena_bytes
        self.step, self.training = 0, True
        self.local_size = local_size  # ranks of this host
        self.epoch = 0  # the step in which all ranks have met after a failure, equal on all within a step
        self._round = 0
        self._has_entered = False
        self._first_step = 0  # of the user's call, which may have several
        self._is_several = False
        self._acknowledged = False  # this rank's user has seen the standing failure
        self._own_text = ""  # of an error of this rank
        self._met_failure: Failure | None = None  # instead of meeting all ranks
        self.hangup_fds = [-1] * size  # by rank, descriptors that tell of a dead peer; -1: there is none
        self._ends: dict[Edge, object] = {}
        self._edge_texts: dict[int, str] = {}  # of an edge to each neighbour: for errors
        self._peers: dict[Edge, int] = {}
        self.set_limits(300.0)

    # -- limits, progress, failure

    def set_limits(self, timeout_s: float, spin_us: float | None = None) -> None:
        """Sets the longest silence of a peer, and the time to spin before sleeping.

        Args:
            spin_us: None: 20, or 0 where the ranks of this host have more threads than there are cores.
        """
        if spin_us is None:
            crowded = self.local_size * torch.get_num_threads() > len(os.sched_getaffinity(0))
            spin_us = 0.0 if crowded else 20.0
        self.timeout_s = timeout_s
        _C.group_set_limits(self.group, timeout_s, spin_us)

    def fail(self, text: str) -> None:
        """Ends the rank's step on every rank, in the rank's name; between two steps, the next step.

        The first failure wins.
        """
        self._own_text = text
        _C.group_fail(self.group, self.rank, text, "", "", 0)

    def lose(self, rank: int, why: str, edge: str | None = None) -> str:
        """Ends the step on every rank because another rank is gone. Returns the text."""
        what, age, _ = _C.group_get_progress(self.group, rank)
        edge = edge or self._edge_texts.get(rank, "set-up")
        text = f"rank {rank} is gone{f', last seen in {what}' if age >= 0 else ''} ({edge}): {why}"
        if what == "close()":
            text = f"the script of rank {rank} has ended, or closed its engine ({edge}): did its data end earlier?"
        _C.group_fail(self.group, rank, text, what, edge.partition(",")[0], 0)
        return text

    def check_progress(self, rank: int, waiting_for: str) -> None:
        """Raises PipelineError on every rank, unless a rank made progress within the time-out."""
        what, age, _ = _C.group_get_progress(self.group, rank)
        if not 0 <= age <= self.timeout_s:
            since = f"has been in {what} for {age:.0f} s" if age >= 0 else "has not entered a step"
            raise self._failure(rank, f"rank {rank} {since} (waiting for {waiting_for})")

    def _failure(self, rank: int, text: str) -> _C.PipelineError:
        """Ends the step on every rank. Returns this error even if an earlier failure stands."""
        _C.group_fail(self.group, rank, text, "", "", 0)
        return error_of(rank, text)

    def check(self) -> None:
        """Raises PipelineError once a failure ends the step that the rank is in, or enters next."""
        _C.group_check(self.group)

    @property
    def has_failed(self) -> bool:
        """Returns whether a failure ends the step that the rank is in or enters next."""
        return _C.group_failure(self.group) is not None

    # -- steps

    def enter(self) -> None:
        """Comes to the next step, which counts from here on, however it ends.

        Raises:
            PipelineError: another rank failed since the rank left its last step; or a rank is gone.
        """
        self.step += 1
        self._has_entered = True
        self._first_step = self._first_step if self._is_several else self.step
        _C.group_enter(self.group, self.step)
        if not self._acknowledged:
            _C.group_check(self.group)

    def begin_step(self, training: bool = True) -> int:
        """Begins the step that the rank has come to, or comes to the next one. Returns its number.

        After a failed step waits until all ranks have come to this step.

        Args:
            training: whether the step trains; equal on all ranks, unless they err.
        Raises:
            PipelineError: as of :meth:`enter`; or another rank has left this step by an error.
        """
        if not self._has_entered:
            self.enter()
        if self._acknowledged:
            self._recover()
        self.training = training
        _C.group_begin_step(self.group, self.step)
        return self.step

    def finish_units(self, first_stage_rank: int) -> None:
        """Ends the units of a training step once those of the first stage's rank, on which backwards end, have ended.

        So no rank leaves a step well, and updates its weights, if the last backwards fail. The wait costs nothing: the
        next step needs that rank first, too.
        """
        _C.group_finish_step(self.group, first_stage_rank, self.hangup_fds[first_stage_rank])

    def end_step(self, failed: bool) -> None:
        """Leaves a step. Does not wait for the others.

        Args:
            failed: by an error: the rank's own, told by :meth:`fail`, or one it has heard of.
        """
        if failed:
            self._leave()
        else:
            _C.group_end_step(self.group)
        self._has_entered = False
        _C.group_progress(self.group, f"code after step {self.step}")

    def _leave(self) -> Failure:
        """Tells ranks waiting to meet the rank in this step, or an earlier one, that it will not come."""
        standing = _C.group_failure(self.group)
        failure = self._met_failure or (Failure(*standing) if standing is not None else None)
        if self._own_text or failure is None:
            what, _, _ = _C.group_get_progress(self.group, self.rank)
            failure = Failure(self.rank, self._own_text or "left the step without a reason", what, "", self.step)
        elif failure.step < self._first_step:
            late = f" (in step {failure.step}; rank {self.rank} heard of it in step {self.step})"
            failure = failure._replace(text=failure.text + late)
        failure = failure._replace(step=self.step)
        self._acknowledged, self._own_text, self._met_failure = True, "", None
        _C.group_leave(self.group, self.step, *failure[:4])
        return failure

    def _tell(self) -> None:
        """Returns once the other ranks can hear of the standing failure, whatever the rank does next."""
        return

    def give_up(self, reason: str) -> None:
        """Fails in place of the rank's next step; the other ranks' step ends with this reason."""
        self.step += 1
        self._first_step = self.step
        _C.group_enter(self.group, self.step)
        self.fail(reason)
        self.end_step(failed=True)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Surrounds a collective between two steps: an error of the rank ends the others' waiting.

        All ranks then come to the same next step, and meet there. Until then each collective ends at once, because
        ranks left the failed step after different numbers of exchanges.
        """
        if self._acknowledged:
            raise _C.PipelineError(
                "a step has failed, and the ranks meet again in the next step or eval: call it first"
            )
        try:
            yield
        except BaseException as error:
            if not isinstance(error, _C.PipelineError):
                self.fail(f"{type(error).__name__}: {error}")
                self._own_text = ""
            self._acknowledged = True
            self._tell()
            mark_as_told(error)
            raise

    @contextmanager
    def as_one(self, steps: int) -> Iterator[None]:
        """Surrounds at most ``steps`` steps that form one call: all ranks leave the call as if it had been so many.

        So ranks that leave the call by errors in different steps come to the same step afterwards.
        """
        last = self.step + steps
        self._first_step, self._is_several = self.step + 1, True
        try:
            self.begin_step()
            self.end_step(failed=False)
            yield
        except BaseException as error:
            if not isinstance(error, _C.PipelineError):
                self.fail(f"{type(error).__name__}: {error}")
            self.fail_step(last)
            mark_as_told(error)
            raise
        finally:
            self._is_several = False
        assert self.step <= last, f"step {self.step} of a call that has those up to {last}"
        self.step = last
        _C.group_enter(self.group, last + 1)

    def fail_step(self, step: int) -> None:
        """Leaves a step by an error; the rank may be in this step, or not have come to it."""
        self.step = step
        self.end_step(failed=True)

    def _recover(self) -> None:
        """Waits until all ranks have left the failed step; forgets the failure before any rank begins a new step.

        A rank that has left this step by an error, or has come to a later step, cannot be met: then this step ends with
        an error here, too, until all ranks come to the same step.
        """
        self.epoch, self._round = self.step, 0
        try:
            self._gather(b"", recovering=True)
            self._forget_failure()
            self._gather(b"", recovering=True)
        except _C.PipelineError as error:
            rank = getattr(error, "rank", None)
            failure = Failure(self.rank if rank is None else rank, str(error), "", "", self.step)
            self._met_failure = self._met_failure or failure
            raise
        self._acknowledged = False

    def _forget_failure(self) -> None:
        if self.rank == 0:
            _C.group_clear(self.group)

    def _will_not_meet(self, failure: Failure) -> _C.PipelineError:
        """Returns the error of a rank that cannot meet all ranks in this step, because a rank has passed the step."""
        if not failure.text:
            failure = failure._replace(text=f"it has come to a later step, this rank is in step {self.step}")
        self._met_failure = failure._replace(step=self.step)
        return failure.error()

    # -- small collectives: control values, not data

    def _gather_round(self, data: bytes, recovering: bool) -> list[bytes]:
        self._round += 1
        fds = array("i", self.hangup_fds)
        try:
            return _C.group_gather(self.group, self.epoch, self._round - 1, recovering, data, fds)
        except _C.PipelineError as error:
            passed = _C.group_passed(self.group, self.step) if recovering else None
            if passed is None:
                raise
            raise self._will_not_meet(Failure(*passed)) from error

    def _gather(self, data: bytes, recovering: bool = False) -> list[bytes]:
        """Returns the bytes of all ranks, of any length: the first round carries the lengths."""
        head = struct.calcsize("q")
        room = _C.GATHER_BYTES - head
        parts = self._gather_round(struct.pack("q", len(data)) + data[:room], recovering)
        lengths = [struct.unpack_from("q", part)[0] for part in parts]
        whole = [bytearray(part[head:]) for part in parts]
        for start in range(room, max(lengths), _C.GATHER_BYTES):
            more = self._gather_round(data[start : start + _C.GATHER_BYTES], recovering)
            for body, part in zip(whole, more, strict=True):
                body += part
        return [bytes(body) for body in whole]

    def barrier(self) -> None:
        self._gather(b"")

    def all_gather_object(self, value: Any) -> list[Any]:
        """Values of :mod:`seq1f1b.transport.values`, by rank."""
        return [unpack(data) for data in self._gather(pack(value))]

    # -- gradients of tied parameters

    def exchange(
        self, mine: Tensor | None, receivers: Sequence[int], senders: Sequence[int], like: Tensor
    ) -> dict[int, Tensor]:
        """Returns tensors of a few ranks, by rank, with the rank's own. All these ranks call it, in one order.

        Args:
            mine: sent to the receivers; None: nothing is sent.
            senders: other ranks that send, each a tensor in the shape of ``like``: for a parameter in the dtype of its
                gradients, else in the dtype of ``like``.
        """
        found = {} if mine is None else {self.rank: mine.contiguous()}
        dtype = like.grad_dtype or like.dtype
        places = {rank: torch.empty(like.shape, dtype=dtype, device="cpu") for rank in senders}
        transfers = [self._begin_receive(place, rank) for rank, place in places.items()]
        if mine is not None and receivers:
            data = found[self.rank].cpu()  # a device's travel through host memory
            transfers += [self._begin_send(data, rank) for rank in receivers]
        for wait in transfers:
            wait()
        return found | {rank: place.to(like.device) for rank, place in places.items()}

    @abstractmethod
    def _begin_send(self, data: Tensor, rank: int) -> Callable[[], None]: ...  # which waits for its end

    @abstractmethod
    def _begin_receive(self, data: Tensor, rank: int) -> Callable[[], None]: ...

    # -- edges

    def edge_end(self, edge: tuple[int, ...], peer_rank: int, is_receiver: bool, text: str) -> object:
        """Returns the rank's end of a directed edge. All ranks open their edges in one agreed order.

        Args:
            edge: its source stage and destination stage, and its channel if not 0.
            text: names the edge in errors: "activations of stage 0 to 1".
        """
        key = Edge(*edge)
        self._peers[key] = peer_rank
        self._edge_texts.setdefault(peer_rank, text)
        if key not in self._ends:
            self._ends[key] = self._open_end(key, peer_rank, is_receiver, text)
        return self._ends[key]

    @abstractmethod
    def _open_end(self, edge: Edge, peer_rank: int, is_receiver: bool, text: str) -> object: ...

    def begin(self) -> None:
        """Waits until all ranks have opened their edges. Collective. Raises PipelineError on all if a rank failed."""
        self.barrier()

    def peer_of(self, edge: Edge) -> int:
        """Returns the rank at the other end of an edge."""
        return self._peers[edge]

    @abstractmethod
    def transport_to(self, peer_rank: int) -> str:
        """Returns the name of the transport to a neighbour: "loopback", "shm" or "c10d"."""

    def leave(self) -> None:
        """Closes soon the group of an engine that was dropped without ``close``."""
        return

    def close(self) -> None:
        """Drops the edges; tensors that still lie in their places stay valid."""
        self._ends.clear()
