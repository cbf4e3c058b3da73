"""Edges whose payloads stay in the memory of GPUs: by NCCL, or by copies between ranks of one host.

Only set-up is here; how host, streams and events are ordered is C (``csrc/device/device_end.h``). Headers and
credits go over the edges of host memory that :mod:`seq1f1b.transport` opens. Processes of one GPU
have run this, never two GPUs; tests run it over stand-ins for the CUDA driver and for NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from seq1f1b import _C
from seq1f1b.transport import RankGroup
from seq1f1b.transport.group import Edge
from seq1f1b.transport.table import TRANSPORTS

__all__: list[str] = []


def find_nccl() -> str | None:
    """Path of the NCCL to use; None: the copy that torch has loaded, or the loader's.

    ``SEQ1F1B_NCCL`` names one; else torch's, so that the process has a single copy, else that of the Python package
    ``nvidia-nccl``.
    """
    if named := os.environ.get("SEQ1F1B_NCCL"):
        return named
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
        return None
    with contextlib.suppress(ModuleNotFoundError):
        package = importlib.util.find_spec("nvidia.nccl")
        for folder in (package.submodule_search_locations if package else None) or ():
            library = Path(folder) / "lib" / "libnccl.so.2"
            if library.exists():
                return str(library)
    return None


def _warn_of_few_queues(num_streams: int) -> None:
    """Streams that share a hardware queue wait for each other: right, as receives are ordered for that, but slow."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if queues.isdigit() and int(queues) < num_streams + 2:  # torch computes on one, and copies on another
        warnings.warn(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}: the {num_streams} streams of this rank's edges share hardware "
            "queues with its units and wait for them; unset it, or raise it to 32",
            stacklevel=2,
        )


class DeviceEdges:
    """One rank's ends of the edges of a pipeline on GPUs."""

    driver: str | None = None  # library; None: the system's libcuda

    def __init__(self, transport: str, group: RankGroup, device: torch.device) -> None:
        self.transport, self._group, self._torch_device = transport, group, device
        self._ends: dict[Edge, object] = {}
        self.gpu = _C.device_create(self.driver, self.ordinal())
        self._watchdog = _C.watchdog_create(group.group, self.gpu, group.timeout_s)

    def ordinal(self) -> int:
        """Number of the GPU, as the driver counts. Raises ValueError if the stages are not on one."""
        if self._torch_device.type != "cuda":
            raise ValueError(
                f"transport={self.transport!r} moves messages between GPUs, the stages lie on {self._torch_device}: "
                'use "auto", or move the stages'
            )
        index = self._torch_device.index
        return torch.cuda.current_device() if index is None else index

    def stream(self) -> int:
        """The CUstream on which units compute."""
        return int(torch.cuda.current_stream(self._torch_device).cuda_stream)

    def place_views(self) -> Callable[..., Any]:
        return functools.partial(self._group.place_views, gpu=self.ordinal())

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What the executor calls for every unit, from what runs one."""
        return run

    def open(self, controls: Mapping[Edge, object], is_receiver: Mapping[Edge, bool]) -> dict[Edge, object]:
        """Ends over the given ones, which carry headers. Collective: all ranks of the pipeline are here at once."""
        _warn_of_few_queues(len(controls))
        for edge in controls:
            other = self._group.transport_to(self._group.peer_of(edge))
            if other not in TRANSPORTS[self.transport].over:
                raise ValueError(
                    f'transport="{self.transport}" is for ranks of one host; the edge of stage {edge[0]} to {edge[1]} '
                    f'goes over {other}: use "nccl"'
                )
        if self.transport == "copy":
            in_process = self._group.is_thread
            self._ends = {edge: _C.copy_end(control, self._watchdog, in_process) for edge, control in controls.items()}
            return self._ends
        path = find_nccl()
        mine = {edge: _C.nccl_unique_id(path) for edge in controls if not is_receiver[edge]}
        ids: dict[Edge, bytes] = {}
        for theirs in self._group.all_gather_object((_C.nccl_find(path)[0], mine)):
            ids |= theirs[1]
        self._ends = {edge: _C.nccl_end(path, ids[edge], control, self._watchdog) for edge, control in controls.items()}
        for end in self._ends.values():  # all communicators are on their way, so no order among edges can block
            _C.nccl_connect(end)
        return self._ends

    def begin_step(self, timeout_s: float) -> None:
        _C.watchdog_set_timeout(self._watchdog, timeout_s)
        _C.device_begin_step(self.gpu, self.stream())

    def free_bytes(self) -> int:
        """Memory of the GPU that is free now."""
        return _C.device_free_bytes(self.gpu)

    def close(self) -> None:
        """Leaves together with the other ranks, where these still can."""
        self._meet()  # a receiver whose last message is on its way takes a sender that left for one that is lost
        copies = self.transport == "copy"  # each end uses events, and a sender memory, that the other one owns
        for end in () if copies else self._ends.values():
            _C.nccl_leave(end)
        for end in self._ends.values():
            _C.device_end_close(end)
        if copies:
            self._meet()
        self._ends.clear()

    def _meet(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody may be gone
            self._group.barrier()
