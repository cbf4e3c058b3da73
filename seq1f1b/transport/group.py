"""One rank's membership in a pipeline, common to all transports."""

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
    """Base of objects bound to the process and its place among the ranks; a copy would have no place."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: copies and pickles are refused."""
        raise TypeError(
            f"a {type(self).__name__} is bound to its process and its place among the ranks, so it is neither copied "
            "nor pickled: copy engine.stages or their state_dict(), and make a PipelineEngine in each process"
        )


class RankGroup(OfOneProcess, ABC):
    """One rank's membership in a pipeline: progress, failures, edges and small collectives.

    Every rank counts its steps, including steps that end before their begin, and ranks pair by the count. A failure on
    one rank ends the step on all: every rank gets one :class:`PipelineError`. A rank still in the step before finishes
    its step first. A rank already past the failed step hears of the failure in its next step, which then ends on all
    ranks. The next :meth:`begin_step` waits until all ranks have come to an equal step, and ends at once with an error
    if a rank has left the step by an error.
    """

    is_thread = False  # True: the ranks are threads of one process
    process_group: Any = None  # torch's process group, if the ranks are its processes

    def __init__(self, rank: int, size: int, group: object, *, arena_bytes: int, local_size: int) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.arena_bytes = arena_bytes
        self.step, self.training = 0, True
        self.local_size = local_size  # number of ranks on this host
        self.epoch = 0  # the step in which all ranks have met after a failure; equal on all ranks within a step
        self._round = 0
        self._left = 0  # the last step that this rank has left
        self._acknowledged = False  # whether this rank's user has seen the standing failure
        self._own_text = ""  # text of this rank's own error
        self._met_failure: Failure | None = None  # the failure that prevented a meeting of all ranks
        self.hangup_fds = array("i", [-1] * size)  # by rank, a descriptor that signals the peer's death; -1: none
        self._ends: dict[Edge, object] = {}
        self._edge_texts: dict[int, str] = {}  # by neighbour, the text of an edge, for errors
        self._peers: dict[Edge, int] = {}
        self.set_limits(300.0)

    # -- limits, progress, failure

    def set_limits(self, timeout_s: float) -> None:
        """Sets the longest silence of a peer. A rank spins before sleeping if the host has a core for each thread."""
        crowded = self.local_size * torch.get_num_threads() > len(os.sched_getaffinity(0))
        self.timeout_s = timeout_s
        _C.group_set_limits(self.group, timeout_s, 0.0 if crowded else 20.0)  # microseconds

    def fail(self, text: str) -> None:
        """Ends the rank's current or next step on every rank, in the rank's name. The first failure wins."""
        self._own_text = text
        _C.group_fail(self.group, self.rank, text, "", "", 0)

    def lose(self, rank: int, why: str, edge: str | None = None) -> str:
        """Ends the step on every rank because a peer is gone. Returns the error's text."""
        what, age, _ = _C.group_get_progress(self.group, rank)
        edge = edge or self._edge_texts.get(rank, "set-up")
        text = f"rank {rank} is gone{f', last seen in {what}' if age >= 0 else ''} ({edge}): {why}"
        if what == "close()":
            text = f"the script of rank {rank} has ended, or closed its engine ({edge}): did its data end earlier?"
        _C.group_fail(self.group, rank, text, what, edge, 0)
        return text

    def check_progress(self, rank: int, waiting_for: str) -> None:
        """Raises PipelineError on every rank, unless a rank made progress within the time-out."""
        what, age, _ = _C.group_get_progress(self.group, rank)
        if not 0 <= age <= self.timeout_s:
            since = f"has been in {what} for {age:.0f} s" if age >= 0 else "has not entered a step"
            raise self._failure(rank, f"rank {rank} {since} (waiting for {waiting_for})")

    def _failure(self, rank: int, text: str) -> _C.PipelineError:
        """Ends the step on every rank. Returns the error, even if an earlier failure stands."""
        _C.group_fail(self.group, rank, text, "", "", 0)
        return error_of(rank, text)

    def check(self) -> None:
        """Raises PipelineError if a failure ends the rank's current or next step."""
        _C.group_check(self.group)

    @property
    def has_failed(self) -> bool:
        """Returns whether a failure ends the rank's current or next step."""
        return _C.group_failure(self.group) is not None

    # -- steps

    def enter(self) -> None:
        """Comes to the next step. From here on the step counts, even if it fails.

        Raises:
            PipelineError: a rank has failed since this rank left its last step; or a rank is gone.
        """
        self.step = self._left + 1
        _C.group_enter(self.group, self.step)
        if not self._acknowledged:
            _C.group_check(self.group)

    def begin_step(self, training: bool = True) -> int:
        """Begins the step entered by :meth:`enter`, or enters and begins the next step. Returns the step's number.

        After a failed step, waits until all ranks have come to this step.

        Args:
            training: whether the step trains; equal on all ranks without a mistake of the user.
        Raises:
            PipelineError: an error of :meth:`enter`; or a rank has left this step by an error.
        """
        if self.step == self._left:
            self.enter()
        if self._acknowledged:
            self._recover()
        self.training = training
        _C.group_begin_step(self.group, self.step)
        return self.step

    def finish_units(self, first_stage_rank: int) -> None:
        """Ends the units of a training step once the units of the first stage's rank have ended.

        The last backwards run there: if one fails, no rank leaves the step well and updates its weights. The wait costs
        nothing, because the next step starts on the first stage's rank.
        """
        _C.group_finish_step(self.group, first_stage_rank, self.hangup_fds[first_stage_rank])

    def end_step(self, failed: bool) -> None:
        """Leaves a step without a wait for other ranks.

        Args:
            failed: whether an error ends the step: the rank's own, reported by :meth:`fail`, or a peer's.
        """
        if failed:
            self.step = max(self.step, self._left + 1)  # an interrupt may have ended the step before its begin
            self._leave()
        else:
            _C.group_enter(self.group, self.step + 1)
        self._left = self.step
        _C.group_progress(self.group, f"code after step {self.step}")

    def _leave(self) -> None:
        """Tells peers that the rank will not meet them in this step or an earlier step."""
        standing = _C.group_failure(self.group)
        failure = self._met_failure or (Failure(*standing) if standing is not None else None)
        if self._own_text or failure is None:
            what, _, _ = _C.group_get_progress(self.group, self.rank)
            failure = Failure(self.rank, self._own_text or "left the step without a reason", what, "", self.step)
        elif failure.step < self.step:
            late = f" (in step {failure.step}; rank {self.rank} heard of it in step {self.step})"
            failure = failure._replace(text=failure.text + late)
        failure = failure._replace(step=self.step)
        self._acknowledged, self._own_text, self._met_failure = True, "", None
        _C.group_leave(self.group, self.step, *failure[:4])
        self._tell(failure)

    def _tell(self, left: Failure | None = None) -> None:
        """Returns once all ranks can hear of the standing failure, even if this rank ends next.

        Args:
            left: the failure by which the rank leaves its step; None: the rank is between two steps.
        """
        return

    def give_up(self, reason: str) -> None:
        """Fails in place of the rank's next step; the step of all ranks ends with the reason."""
        self.step = self._left + 1
        _C.group_enter(self.group, self.step)
        self.fail(reason)
        self.end_step(failed=True)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Surrounds a collective between two steps: an error of the rank ends the wait of its peers.

        All ranks then come to an equal next step, and meet there. Until then each collective ends at once, because
        ranks left the failed step after different numbers of exchanges.
        """
        if self._acknowledged:
            raise _C.PipelineError(
                "a step has failed, and the ranks meet again in the next step or eval: call step or eval first"
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
        """Surrounds a call of at most ``steps`` steps: every rank leaves the call with this number of steps counted.

        So ranks with errors in different steps of the call come to an equal step afterwards.
        """
        last = self.step + steps
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
        assert self.step <= last, f"step {self.step} of a call that has those up to {last}"
        self.step = self._left = last
        _C.group_enter(self.group, last + 1)

    def fail_step(self, step: int) -> None:
        """Leaves a step by an error, entered or not."""
        self.step = step
        self.end_step(failed=True)

    def _recover(self) -> None:
        """Waits until all ranks have left the failed step; forgets the failure before any rank begins a new step.

        A rank that has left this step by an error, or has come to a later step, cannot be met: then this step ends with
        an error on this rank as well, until all ranks come to an equal step.
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
        """Returns the error for a failed meeting in this step, because a rank has passed the step."""
        if not failure.text:
            failure = failure._replace(text=f"the rank has come to a later step, this rank is in step {self.step}")
        self._met_failure = failure._replace(step=self.step)
        error = error_of(failure.rank, f"rank {failure.rank} ended the step: {failure.text}")
        error.unit, error.edge = failure.unit or None, failure.edge or None
        return error

    # -- small collectives: control values, not data

    def _gather_round(self, data: bytes, recovering: bool) -> list[bytes]:
        self._round += 1
        try:
            return _C.group_gather(self.group, self.epoch, self._round - 1, recovering, data, self.hangup_fds)
        except _C.PipelineError as error:
            passed = _C.group_passed(self.group, self.step) if recovering else None
            if passed is None:
                raise
            raise self._will_not_meet(Failure(*passed)) from error

    def _gather(self, data: bytes, recovering: bool = False) -> list[bytes]:
        """Returns the bytes of all ranks, of any length. The first round carries the lengths."""
        head, most = struct.calcsize("q"), _C.GATHER_BYTES
        message = struct.pack("q", len(data)) + data
        found = list(map(bytearray, self._gather_round(message[:most], recovering)))
        longest = head + max(struct.unpack_from("q", part)[0] for part in found)
        for start in range(most, longest, most):
            more = self._gather_round(message[start : start + most], recovering)
            for whole, part in zip(found, more, strict=True):
                whole += part
        return [bytes(whole[head:]) for whole in found]

    def barrier(self) -> None:
        self._gather(b"")

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks (types of :mod:`seq1f1b.transport.values`), by rank. Collective."""
        return [unpack(data) for data in self._gather(pack(value))]

    # -- gradients of tied parameters

    def exchange(
        self, mine: Tensor | None, receivers: Sequence[int], senders: Sequence[int], like: Tensor
    ) -> dict[int, Tensor]:
        """Exchanges tensors between a few ranks. Returns tensors by rank, including the rank's own.

        All participants call the method, in one order.

        Args:
            mine: tensor for the receivers; None: this rank does not send.
            senders: peers that send a tensor in the shape of ``like`` and its dtype; for a parameter, in the dtype of
                its gradients.
        """
        found = {} if mine is None else {self.rank: mine.contiguous()}
        dtype = like.grad_dtype or like.dtype
        places = {rank: torch.empty(like.shape, dtype=dtype, device="cpu") for rank in senders}
        transfers = [self._begin_transfer(place, rank, sends=False) for rank, place in places.items()]
        if mine is not None and receivers:
            data = found[self.rank].cpu()  # tensors of a device travel through host memory
            transfers += [self._begin_transfer(data, rank, sends=True) for rank in receivers]
        for wait in transfers:
            wait()
        return found | {rank: place.to(like.device) for rank, place in places.items()}

    @abstractmethod
    def _begin_transfer(self, data: Tensor, rank: int, *, sends: bool) -> Callable[[], None]:
        """Begins to send a tensor to a rank, or to receive one. Returns a wait for the transfer's end."""

    # -- edges

    def edge_end(self, edge: tuple[int, ...], peer_rank: int, is_receiver: bool, text: str) -> object:
        """Returns the rank's end of a directed edge. All ranks open edges in one agreed order.

        Args:
            edge: source stage, destination stage, and the channel if not 0.
            text: name of the edge in errors: "activations of stage 0 to 1".
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
        """Waits until all ranks have opened all edges. Collective. Raises PipelineError on all if a rank failed."""
        self.barrier()

    def peer_of(self, edge: Edge) -> int:
        """Returns the rank at the other end of an edge."""
        return self._peers[edge]

    @abstractmethod
    def transport_to(self, peer_rank: int) -> str:
        """Returns the name of the transport to a neighbour: "loopback", "shm" or "c10d"."""

    def leave(self) -> None:
        """Closes the group of an engine dropped without ``close``, with a short wait."""
        return

    def close(self) -> None:
        """Drops the edges; tensors in their places stay valid."""
        self._ends.clear()
