"""Directed edges between stages, their transports, and tensors over the memory of their messages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.transport.values import sendable

__all__: list[str] = []


class Transport(NamedTuple):
    over: tuple[str, ...]  # for the edge, or its headers if payloads stay on GPUs; names of ``transport_to``
    between_gpus: bool = False


TRANSPORTS = {
    "auto": Transport(("loopback", "shm", "c10d")),  # the first possible transport
    "shm": Transport(("loopback", "shm")),
    "c10d": Transport(("loopback", "c10d")),
    "nccl": Transport(("loopback", "shm", "c10d"), between_gpus=True),
    "copy": Transport(("loopback", "shm"), between_gpus=True),  # GPUs of one host
}


@sendable
class Edge(NamedTuple):
    """A directed edge between two stages, at most one of each channel (``csrc/core/unit.h``)."""

    source: int
    destination: int
    channel: int = 0


ARENA_BYTES = _C.ARENA_BYTES
"""Address space of one edge; memory appears as it is touched."""

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _C.DTYPES)
"""The position of a type is its code in C."""

_SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def place_tensor(owner: object, address: int, dtype: int, sizes: tuple[int, ...], gpu: int = -1) -> Tensor:
    """Returns a tensor over memory of a place; ``owner`` (an edge end or a mapping) lives as long as the tensor.

    Args:
        gpu: GPU with the memory; -1: host memory.
    """
    return torch.utils.dlpack.from_dlpack(_C.place_tensor_capsule(owner, address, dtype, array("q", sizes), gpu))


def leave_place(views: Sequence[Tensor | None]) -> bool:
    """Copies received tensors with further holders before the next message overwrites their place.

    Hooks keep received tensors, and a state may be a view of one. The copy replaces the tensor's memory, so the tensor,
    its views and graphs with the saved tensor stay valid.

    Args:
        views: the place's tensors of its message; None for a missing gradient.
    Returns:
        Whether any tensor was copied: the views then no longer lie over the place.
    """
    found = False
    for view in views:
        if view is None or not (storage := view.untyped_storage()).nbytes():
            continue
        if torch._C._storage_Use_Count(storage._cdata) == 2:  # the view and ``storage`` are the only holders
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


def place_views(
    end: object, payload: int, tensors: Sequence[tuple[int, int, tuple[int, ...], int]], gpu: int = -1
) -> tuple[list[Tensor | None], list[bool]]:
    """Returns tensors over a received message (None for a missing gradient), and a list of their requires_grad.

    Args:
        payload: address of the message's payload.
        tensors: (dtype code, flags, sizes, offset in the payload) of each.
        gpu: GPU with the payload; -1: host memory.
    """
    views = [
        None if flags & _C.TENSOR_NONE else place_tensor(end, payload + offset, dtype, sizes, gpu)
        for dtype, flags, sizes, offset in tensors
    ]
    return views, [bool(flags & _C.TENSOR_REQUIRES_GRAD) for _, flags, _, _ in tensors]
