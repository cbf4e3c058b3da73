"""Edges between GPUs, each by the way that proves itself there: copies, NCCL, or host memory.

Set-up is here; how host, streams and events are ordered is C (``csrc/device/device_end.h``). Headers and credits go
over the edges of host memory that :mod:`seq1f1b.transport` opens. Copies and NCCL have run between processes of one
GPU, never between two GPUs; the proof and what follows from it, over stand-ins for driver and NCCL alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from seq1f1b import _C
from seq1f1b.device import kernel_library
from seq1f1b.device.edge_proof import Chosen, Proof, warn_of_shared_gpus
from seq1f1b.device.edge_ways import WAYS, Way
from seq1f1b.device.placement import compute_stream, ordinal_of
from seq1f1b.transport import RankGroup
from seq1f1b.transport.group import Edge

__all__: list[str] = []


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
    """One rank's ends of the edges of a pipeline on GPUs.

    Args:
        transport: ``"auto"``, or the name of one way, which every edge then goes.
    Attributes:
        chosen: what carries each edge of this rank, its bytes per second and why, once they are open.
    """

    driver: str | None = None  # library; None: the system's libcuda
    proof_bytes = (64 << 20) - 1  # unaligned, and long enough for a rate
    proof_limit_s = 20.0  # for one message, or one connection

    def __init__(self, transport: str, group: RankGroup, device: torch.device) -> None:
        self.transport, self._group, self._torch_device = transport, group, device
        self.chosen: dict[Edge, Chosen] = {}
        self._ends: dict[Edge, Any] = {}
        self._ways: dict[str, Way] = {}
        self.gpu = _C.device_create(self.driver, self.ordinal())
        self._watchdog = _C.watchdog_create(group.group, self.gpu, min(self.proof_limit_s, group.timeout_s / 2))

    @staticmethod
    def serve(device: torch.device, group: RankGroup) -> bool:
        """Whether ``transport="auto"`` leaves messages to these edges. The same on all ranks.

        Ranks that are threads may make their engines one after the other, and nothing can be proven then.
        """
        return device.type == "cuda" and group.size > 1 and not group.is_thread

    def ordinal(self) -> int:
        """Number of the GPU, as the driver counts. Raises ValueError if the stages are not on one."""
        if self._torch_device.type != "cuda":
            raise ValueError(
                f"transport={self.transport!r} moves messages between GPUs, the stages lie on {self._torch_device}: "
                'use "auto", or move the stages'
            )
        return ordinal_of(self._torch_device)

    def identity(self) -> tuple[str, int]:
        """A name that no other GPU has, and how many GPUs this rank sees."""
        properties = torch.cuda.get_device_properties(self._torch_device)
        uuid = getattr(properties, "uuid", None)  # torch before 2.5 has none
        return f"{uuid or f'{os.uname().nodename} {self.ordinal()}'}", torch.cuda.device_count()

    def stream(self) -> int:
        """The CUstream on which units compute."""
        return compute_stream(self._torch_device)

    def place_views(self) -> Callable[..., Any]:
        return functools.partial(self._group.place_views, gpu=self.ordinal())

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that the executor calls for every unit, from the one that runs it."""
        return run

    def warm(self) -> None:
        """Has torch's context, its kernels' module and the allocator ready: loading them waits for the whole GPU, and
        so for a receive that waits for its sender."""
        first = torch.ones(1024, device=self._torch_device)
        (first + first).sum().item()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # whoever uses a kernel is told what is wrong
            kernel_library.operations()

    def open(self, controls: Mapping[Edge, object], is_receiver: Mapping[Edge, bool]) -> dict[Edge, Any]:
        """Ends over the given ones, which carry headers. Collective: all ranks of the pipeline are here at once.

        Raises:
            ValueError: the transport does not reach a peer.
            RuntimeError: on all ranks: an edge fails its proof, and no other way is left, or one was asked for by name.
        """
        _warn_of_few_queues(len(controls))
        identities = self._group.all_gather_object(self.identity())
        if self._group.rank == 0:
            warn_of_shared_gpus(identities)
        self._ways = {kind.name: kind(self._group, self._watchdog) for kind in WAYS}
        asked = None if self.transport == "auto" else self.transport
        if asked is not None:
            self._check_reach(self._ways[asked], controls)
        self.warm()
        proof = Proof(
            self._group,
            [way for name, way in self._ways.items() if asked in (None, name)],
            controls,
            is_receiver,
            asked=asked,
            begin_step=self.begin_step,
            place_views=self.place_views(),
            room=self.free_bytes() // 2 // max(1, len(controls)),
            size=self.proof_bytes,
            device=self._torch_device,
        )
        proof.run()
        self._ends, self.chosen = proof.ends, proof.chosen
        return dict(self._ends)  # the caller lets go of its own before close() ends them

    def _check_reach(self, way: Way, controls: Mapping[Edge, object]) -> None:
        for edge in controls:
            other = self._group.transport_to(self._group.peer_of(edge))
            if other not in way.over:
                raise ValueError(
                    f'transport="{way.name}" is for ranks of one host; the edge of stage {edge[0]} to {edge[1]} '
                    f'goes over {other}: use "auto" or "nccl"'
                )

    def begin_step(self) -> None:
        _C.device_begin_step(self.gpu, self.stream())

    def free_bytes(self) -> int:
        """Memory of the GPU that is free now."""
        return _C.device_free_bytes(self.gpu)

    def close(self) -> None:
        """Leaves together with the other ranks, where these still can."""
        self._meet()  # a receiver whose last message is on its way takes a sender that left for one that is lost
        for edge, end in self._ends.items():
            self._ways[self.chosen[edge].transport].leave(end)
        for end in self._ends.values():
            _C.device_end_close(end)
        self._meet()  # an end may use events, and a sender memory, that the other one owns
        self._ends.clear()

    def _meet(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody may be gone
            self._group.barrier()
