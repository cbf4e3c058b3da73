"""One rank's membership in a pipeline, whatever lies behind its edges, and the memory that edges are made of."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.values import pack, sendable, unpack

ARENA_BYTES = _C.ARENA_BYTES
"""Address space of one edge; memory appears as it is touched."""

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _C.DTYPES)
"""The position of a type is its code in C."""


_SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
_ROUND = struct.Struct("qq")  # before what a rank gives to a gather: epoch and round


def place_tensor(owner: object, address: int, dtype: int, sizes: tuple[int, ...], gpu: int = -1) -> Tensor:
    """Tensor over memory of a place; ``owner`` (an edge end or a mapping) lives as long as the tensor does.

    Args:
        gpu: on which the memory is; -1: host memory.
    """
    return torch.utils.dlpack.from_dlpack(_C.place_tensor_capsule(owner, address, dtype, sizes, gpu))


def holders(storage: torch.UntypedStorage) -> int:
    """Tensors and others that hold the storage, without the object given."""
    return torch._C._storage_Use_Count(storage._cdata) - 1


def leave_place(views: Sequence[Tensor | None]) -> bool:
    """Tensors over a place that will hold the next message get a copy, where somebody holds them beside the place.

    Such are what a hook has kept, and a state that is a view of what the stage received. The copy takes the place of
    their memory, so they, their views and graphs that saved them stay valid.

    Args:
        views: those that the place keeps of its message; None for a gradient that is none.
    Returns:
        Whether any has been copied: then the views are not over the place any more.
    """
    found = False
    for view in views:
        if view is None or holders(storage := view.untyped_storage()) == 1 or not storage.nbytes():
            continue
        found = True
        if _SWAPS:
            copy = storage.clone()  # type: ignore[no-untyped-call] # torch's has no types
            storage._swap_data_ptr_(copy)  # type: ignore[attr-defined]
        elif storage.device.type == "cpu":  # torch before 2.12: each copy has a file descriptor
            storage.share_memory_()
        else:
            raise RuntimeError(
                "the stage, or a hook, keeps a tensor that came from another stage, and the next message would "
                "overwrite it: keep a clone, or use torch 2.12 or later"
            )
    return found


@sendable
class Edge(NamedTuple):
    """A directed edge between two stages; there may be one of each channel (``csrc/core/unit.h``)."""

    source: int
    destination: int
    channel: int = 0


class Superseded(Exception):
    """Another rank tries to meet in a later epoch: it has left this one."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"epoch {epoch}")
        self.epoch = epoch


class RankGroup(ABC):
    """One rank's membership in a pipeline: progress, failures, edges and small collectives.

    A step that fails on one rank ends on all: everyone gets one :class:`PipelineError`. A rank that is still in the
    step before leaves that one well first. The next :meth:`begin_step` waits until all ranks have left the failed step,
    then goes on.
    """

    is_thread = False  # True: the ranks are threads of one process
    process_group: Any = None  # torch's, if the ranks are processes of one

    def __init__(self, rank: int, size: int, group: object, *, arena_bytes: int, local_size: int) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.arena_bytes = arena_bytes
        self.step, self.training = 0, True
        self._local_size = local_size
        self._epoch = self._round = 0
        self._acknowledged = False  # this rank's user has seen the standing failure
        self._ends: dict[Edge, object] = {}
        self._edge_texts: dict[int, str] = {}  # of an edge to each neighbour: for errors
        self._peers: dict[Edge, int] = {}
        self.set_limits(300.0)

    # -- limits, progress, failure

    def set_limits(self, timeout_s: float, spin_us: float | None = None) -> None:
        """Longest silence of a peer, and how long to spin before sleeping.

        Args:
            spin_us: None: 20, or 0 where the ranks of this host have more threads than there are cores.
        """
        if spin_us is None:
            crowded = self._local_size * torch.get_num_threads() > len(os.sched_getaffinity(0))
            spin_us = 0.0 if crowded else 20.0
        self.timeout_s = timeout_s
        _C.group_set_limits(self.group, timeout_s, spin_us)

    def fail(self, text: str) -> None:
        """Ends this rank's step on every rank, in this rank's name; between two steps, the next one.

        The first failure wins.
        """
        _C.group_fail(self.group, self.rank, text)

    def lose(self, rank: int, why: str, edge: str | None = None) -> str:
        """Ends the step on every rank: another one is gone. Returns the text."""
        what, age, _ = _C.group_get_progress(self.group, rank)
        edge = edge or self._edge_texts.get(rank, "set-up")
        text = f"rank {rank} is gone{f', last seen in {what}' if age >= 0 else ''} ({edge}): {why}"
        _C.group_fail(self.group, rank, text, what, edge.partition(",")[0])
        return text

    def check_progress(self, rank: int, waiting_for: str) -> None:
        """PipelineError on every rank, unless a rank made progress within the time-out."""
        what, age, _ = _C.group_get_progress(self.group, rank)
        if not 0 <= age <= self.timeout_s:
            since = f"has been in {what} for {age:.0f} s" if age >= 0 else "has not entered a step"
            raise self._failure(rank, f"rank {rank} {since} (waiting for {waiting_for})")

    def _failure(self, rank: int, text: str) -> _C.PipelineError:
        """Ends the step on every rank. The error is this one also where an earlier failure stands."""
        _C.group_fail(self.group, rank, text)
        error = _C.PipelineError(text)
        error.rank = rank
        return error

    def check(self) -> None:
        """Raises PipelineError once a failure ends the step that this rank is in, or enters next."""
        _C.group_check(self.group)

    @property
    def has_failed(self) -> bool:
        """Whether a failure stands, which ends the step that this rank is in or enters next."""
        return _C.group_failure(self.group) is not None

    # -- steps

    def begin_step(self, training: bool = True) -> int:
        """Enters a step, after recovery from a failed one. Returns its number, which all ranks agree on.

        Args:
            training: whether it trains; all ranks agree on that too, unless they err.
        Raises:
            PipelineError: another rank failed since this one left its last step; or a rank is gone.
        """
        if _C.group_failure(self.group) is not None and not self._acknowledged:
            self._acknowledged = True
            self.check()
        if self._acknowledged:  # also where rank 0 has forgotten the failure: this rank did not get to the end then
            self._recover()
        self.step += 1
        self.training = training
        _C.group_begin_step(self.group, self.step)
        return self.step

    def end_step(self, failed: bool) -> None:
        """Leaves a step. Does not wait for the others."""
        if failed:
            if _C.group_failure(self.group) is None:
                self.fail("left the step without a reason")
            self._acknowledged = True
        else:
            _C.group_end_step(self.group)
        _C.group_progress(self.group, f"code after step {self.step}")

    @property
    def epoch(self) -> int:
        """Counts the failed steps that all ranks have left; equal on all of them within a step."""
        return self._epoch

    def _recover(self) -> None:
        """All ranks have left the failed step once they meet here; nobody enters a new one before it is forgotten.

        A rank may give up and come again, with a new epoch each time. All go to the latest one.
        """
        epoch = self._enter_epoch(self._epoch + 1)
        while True:
            self._epoch, self._round = epoch, 0
            try:
                steps = self._gather(struct.pack("q", self.step), recovering=True)
                self._forget_failure()
                self._gather(b"", recovering=True)
                break
            except Superseded as later:
                epoch = later.epoch
        self.step = max(struct.unpack("q", step)[0] for step in steps)
        self._acknowledged = False

    def _enter_epoch(self, epoch: int) -> int:
        """Tells the others of an epoch. Returns the latest that this rank knows."""
        return epoch

    def _forget_failure(self) -> None:
        if self.rank == 0:
            _C.group_clear(self.group)

    # -- small collectives: control values, not data

    def _gather_round(self, data: bytes, recovering: bool) -> list[bytes]:
        head = _ROUND.pack(self._epoch, self._round)
        self._round += 1
        fds = self._hangup_fds()
        everyones, epoch = _C.group_gather(self.group, self._epoch, self._round - 1, recovering, head + data, fds)
        if epoch > self._epoch:
            raise Superseded(epoch)
        for rank, given in enumerate(everyones):
            if not given.startswith(head):  # it meets in a later epoch already: what it gave to this one is gone
                text = f"rank {rank} has left the step, to meet all ranks again (waiting for all ranks to meet)"
                raise self._failure(rank, text)
        return [given[_ROUND.size :] for given in everyones]

    def _hangup_fds(self) -> list[int]:
        return [-1] * self.size

    def _gather(self, data: bytes, recovering: bool = False) -> list[bytes]:
        """Everyone's bytes, of any length: the first round carries the lengths."""
        head = struct.calcsize("q")
        whole_room = _C.GATHER_BYTES - _ROUND.size
        room = whole_room - head
        parts = self._gather_round(struct.pack("q", len(data)) + data[:room], recovering)
        lengths = [struct.unpack_from("q", part)[0] for part in parts]
        whole = [bytearray(part[head:]) for part in parts]
        for start in range(room, max(lengths), whole_room):
            more = self._gather_round(data[start : start + whole_room], recovering)
            for body, part in zip(whole, more, strict=True):
                body += part
        return [bytes(body) for body in whole]

    def barrier(self) -> None:
        self._gather(b"")

    def all_gather_object(self, value: Any) -> list[Any]:
        """Values of :mod:`seq1f1b.transport.values`, by rank."""
        return [unpack(data) for data in self._gather(pack(value))]

    def _all_gather_floats(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        gathered = self._gather(struct.pack(f"{len(values)}d", *values))
        rows = [struct.unpack(f"{len(data) // 8}d", data) for data in gathered]
        if any(len(row) != len(values) for row in rows):
            raise ValueError(f"the ranks gave {[len(row) for row in rows]} values to one reduction")
        return rows

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sums by position, in rank order on every rank, so that all get the same bits."""
        return [sum(column) for column in zip(*self._all_gather_floats(values), strict=True)]

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self._all_gather_floats(values), strict=True)]

    # -- gradients of tied parameters

    def exchange(
        self, mine: Tensor | None, receivers: Sequence[int], senders: Sequence[int], like: Tensor
    ) -> dict[int, Tensor]:
        """Tensors of a few ranks, by rank, this rank's own among them. Called by all of these, in one order.

        Args:
            mine: sent to the receivers; None: nothing is sent.
            senders: other ranks that send, each a tensor of the shape of ``like``, a parameter, in the dtype of its
                gradients; or in its own, where it is not one.
        """
        found = {} if mine is None else {self.rank: mine.contiguous()}
        dtype = like.grad_dtype or like.dtype
        places = {rank: torch.empty(like.shape, dtype=dtype, device="cpu") for rank in senders}
        transfers = [self._begin_receive(place, rank) for rank, place in places.items()]
        if mine is not None:
            data = found[self.rank].cpu()  # a device's travel through host memory
            transfers += [self._begin_send(data, rank) for rank in receivers]
        for transfer in transfers:
            transfer.wait()
        return found | {rank: place.to(like.device) for rank, place in places.items()}

    @abstractmethod
    def _begin_send(self, data: Tensor, rank: int) -> Any: ...

    @abstractmethod
    def _begin_receive(self, data: Tensor, rank: int) -> Any: ...

    # -- edges

    def edge_end(self, edge: tuple[int, ...], peer_rank: int, is_receiver: bool, text: str) -> object:
        """This rank's end of a directed edge. All ranks open their edges in one order that they agree on.

        Args:
            edge: its source stage and destination stage, and its channel if that is not 0.
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
        """All ranks have opened their edges, or none begins. Collective. Raises PipelineError where one has failed."""
        self.barrier()

    def peer_of(self, edge: Edge) -> int:
        """The rank at the other end of an edge of this rank."""
        return self._peers[edge]

    @abstractmethod
    def transport_to(self, peer_rank: int) -> str:
        """Name of what carries the edges to a neighbour: "loopback", "shm" or "c10d"."""

    @staticmethod
    def place_views(
        end: object, payload: int, tensors: Sequence[tuple[int, int, tuple[int, ...], int]], gpu: int = -1
    ) -> tuple[list[Tensor | None], list[bool]]:
        """Tensors over a message that has come, and which of them require grad; None for a gradient that is none.

        Args:
            payload: address of the message's payload.
            tensors: (dtype code, flags, sizes, offset in the payload) of each.
            gpu: on which the payload is; -1: host memory.
        """
        views = [
            None if flags & _C.TENSOR_NONE else place_tensor(end, payload + offset, dtype, sizes, gpu)
            for dtype, flags, sizes, offset in tensors
        ]
        return views, [bool(flags & _C.TENSOR_REQUIRES_GRAD) for _, flags, _, _ in tensors]

    def close(self) -> None:
        """Drops the edges; tensors that still lie in their places stay valid."""
        self._ends.clear()
