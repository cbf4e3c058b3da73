"""Edges between GPUs by the first way that passes its proof, copies or NCCL, or else messages through host memory.

This module sets up the edges; C code orders host, streams and events (``csrc/device/device_end.h``). Headers and
credits use the edges of host memory opened by :mod:`seq1f1b.transport`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device import kernel_library
from seq1f1b.placement import stream_of, through_host
from seq1f1b.transport import RankGroup
from seq1f1b.transport.edges import DTYPES, TRANSPORTS, Edge, place_views

__all__: list[str] = []


def find_nccl() -> str | None:
    """Returns the path of the NCCL to use, ``SEQ1F1B_NCCL``; None: torch's loaded copy, or the loader's default."""
    return os.environ.get("SEQ1F1B_NCCL") or None


def found_nccl() -> str:
    """Returns the version and path of NCCL, or the reason why it was not found."""
    try:
        version, path = _C.nccl_find(find_nccl())
    except RuntimeError as error:
        return f"not found ({error}): no transport='nccl'"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}, {path}"


class Way(NamedTuple):
    """A way for messages between GPUs, with the function that makes its ends.

    Attributes:
        needs: advice after a failure, a sentence without a full stop.
        make: makes an end of this rank from its control end, the watchdog and the sender's offer; does not wait.
        offer: returns bytes for the receiver, sent before the ends of an edge are made.
    """

    name: str
    needs: str
    make: Callable[[Any, Any, bytes], object]
    offer: Callable[[], bytes] = bytes


COPIES = Way(
    "copy",
    "CUDA IPC needs processes of one host that share its IPC namespace (docker run --ipc=host) and GPUs that reach "
    "each other (nvidia-smi topo -p2p r); wrong bytes point to an IOMMU, or to PCIe ACS, that is switched on",
    lambda control, watchdog, offered: _C.copy_end(control, watchdog),
)
NCCL = Way(
    "nccl",
    "NCCL says more with NCCL_DEBUG=INFO; in a container it needs room in /dev/shm (docker run --shm-size=1g), "
    "between hosts the right network (NCCL_SOCKET_IFNAME), and it takes one rank per GPU",
    lambda control, watchdog, offered: _C.nccl_end(find_nccl(), offered, control, watchdog),
    lambda: _C.nccl_unique_id(find_nccl()),
)
EDGE_WAYS = (COPIES, NCCL)
"""In the order in which ``transport="auto"`` tries them."""


def _warn_of_shared_gpus(gpus: Sequence[str], num_visible: int) -> None:
    """Warns of ranks whose GPUs have equal identifiers although several GPUs are visible."""
    shared = [str(rank) for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    if shared and num_visible > 1:
        warnings.warn(
            f"ranks {', '.join(shared)} do not have a GPU each, and {num_visible} are visible: give each rank its own, "
            'as by torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the stages are made',
            stacklevel=2,
        )


class DeviceEdges:
    """One rank's ends of a pipeline's edges on GPUs, by the first way that reaches both ranks and passes its proof.

    The proof of a way sends one message over each of its edges, and a failure refuses the way for all of them. After
    each part of the proof the ranks exchange their failures: all ranks then know the same and go on alike, so no rank
    waits for an action that its peer has given up. C code runs the ends' part, with time limits
    (``csrc/device/device_end.h``).

    Args:
        transport: ``"auto"``, or the name of the way for every edge.
    Attributes:
        chosen: for each edge of this rank, the name of its way, bytes per second of the proof's message and the reason
            for the choice; set by :meth:`open`.
    """

    driver: str | None = None  # path of the library; None: the system's libcuda
    proof_bytes = (32 << 20) - 1  # unaligned, and as long as messages of a long sequence
    proof_limit_s = 20.0  # for one message, or one connection

    def __init__(self, transport: str, group: RankGroup, device: torch.device) -> None:
        self.transport, self.group, self.device = transport, group, device
        self.chosen: dict[Edge, tuple[str, float, str]] = {}
        self._ends: dict[Edge, Any] = {}
        self._controls: Mapping[Edge, object] = {}  # carry headers
        self._is_receiver: Mapping[Edge, bool] = {}
        self._refused: list[str] = []  # the ways that failed, and why; equal on all ranks
        has_cache = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's has no types
        make_room = torch.cuda.empty_cache if has_cache else None
        self.gpu = _C.device_create(self.driver, self.ordinal(), make_room)
        self.watchdog = _C.watchdog_create(group.group, self.gpu, min(self.proof_limit_s, group.timeout_s / 2))

    @staticmethod
    def serve(device: torch.device, group: RankGroup) -> bool:
        """Returns whether ``transport="auto"`` uses edges between GPUs; equal on all ranks.

        Ranks in threads may create their engines one after another, and a proof needs all ranks at once.
        """
        return device.type == "cuda" and group.size > 1 and not group.is_thread

    def ordinal(self) -> int:
        """Returns the driver's number of the GPU. Raises ValueError if the stages are on no GPU."""
        if self.device.type != "cuda":
            raise ValueError(
                f"transport={self.transport!r} moves messages between GPUs, the stages lie on {self.device}: "
                'use "auto", or move the stages'
            )
        return self.device.index

    def identity(self) -> str:
        """Returns a unique identifier of the GPU."""
        return f"{torch.cuda.get_device_properties(self.device).uuid}"

    def gpu_views(self) -> Callable[..., Any]:
        """Returns the function that makes tensors over received messages in the GPU's memory."""
        return functools.partial(place_views, gpu=self.ordinal())

    def place_views(self) -> Callable[..., Any]:
        """Returns the function that makes tensors over received messages."""
        return self.gpu_views() if self._ends else place_views

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that the executor calls for every unit; ``run`` runs the unit."""
        return run if self._ends else through_host(run, self.device, self.gpu)

    def warm(self) -> None:
        """Loads torch's context, kernels and allocator before the edges open."""
        # A later load would wait for the whole GPU, including a receive that waits for its sender.
        first = torch.ones(1024, device=self.device)
        (first + first).sum().item()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the use of a kernel reports the error
            kernel_library.operations()

    def open(self, controls: Mapping[Edge, object], is_receiver: Mapping[Edge, bool]) -> dict[Edge, Any]:
        """Returns GPU ends over the control ends, which carry headers, or the control ends themselves.

        Collective over all ranks of the pipeline. The control ends carry all messages through host memory if
        ``transport="auto"`` finds no way for an edge.

        Raises:
            ValueError: the transport does not reach a peer.
            RuntimeError: an edge fails the proof of the way asked for, or a transfer does not end; raised on all ranks.
        """
        _warn_of_shared_gpus(self.group.all_gather_object(self.identity()), torch.cuda.device_count())
        over = {edge: self.group.transport_to(self.group.peer_of(edge)) for edge in controls}
        for edge, other in over.items():
            if self.transport != "auto" and other not in TRANSPORTS[self.transport].over:
                raise ValueError(
                    f'transport="{self.transport}" is for ranks of one host; the edge of stage {edge[0]} to {edge[1]} '
                    f'goes over {other}: use "auto" or "nccl"'
                )
        self.warm()
        self._controls, self._is_receiver, ends = controls, is_receiver, dict[Edge, Any]()
        for way in EDGE_WAYS:
            is_wanted = self.transport in ("auto", way.name)
            mine = [edge for edge in sorted(over) if edge not in ends and over[edge] in TRANSPORTS[way.name].over]
            if is_wanted and any(self.group.all_gather_object(bool(mine))):
                ends |= self._try(way, mine)
        if any(self.group.all_gather_object(len(ends) < len(controls))):
            _close(ends, is_receiver)
            ends = {}
            why = "; ".join(["no way between the GPUs proved itself", *self._refused])
            self.chosen = {edge: (name, 0.0, why) for edge, name in over.items()}
        self._controls, self._ends = {}, ends
        return dict(ends or controls)  # the caller drops its references before close() ends the edges

    def begin_step(self) -> None:
        _C.device_begin_step(self.gpu, stream_of(self.device.index))

    def close(self) -> None:
        """Closes all ends, together with all ranks that still can."""
        self._meet()  # a receiver with a message on its way would take a closed sender for a lost one
        kept = _close(self._ends, self._is_receiver)
        self._meet()  # an end may use its peer's events
        self._ends.clear()
        if kept:
            warnings.warn(
                f"{', '.join(kept)}: the GPU of this rank, or of a peer, does not end what it has begun, and to free "
                "memory would wait for that: what these edges hold on the GPU stays until this process ends",
                RuntimeWarning,
                stacklevel=4,  # where the engine is closed
            )

    def _meet(self) -> None:
        with contextlib.suppress(RuntimeError):  # a rank may be gone
            self.group.barrier()

    # -- the proof of a way

    def _try(self, way: Way, edges: Sequence[Edge]) -> dict[Edge, Any]:
        """Returns the ends of edges by a way; none if the way fails its proof. Collective.

        Raises:
            RuntimeError: the way asked for fails, or a transfer does not end; raised on every rank.
        """
        self.group.begin_step(training=False)
        self.begin_step()
        ends, seconds = dict[Edge, Any](), dict[Edge, float]()
        kept: list[Tensor] = []  # sent messages, until all transfers have ended
        refused = next(filter(None, self._proof(way, edges, ends, seconds, kept)), None)
        if refused is not None:
            self._refuse(way, *refused, ends, kept)
            ends = {}
        first = "the first that proved itself" if self.transport == "auto" else "asked for"
        for edge in ends:
            rate = self.proof_bytes / max(seconds[edge], 1e-9)
            self.chosen[edge] = (way.name, rate, "; ".join([first, *self._refused]))
        self.group.end_step(failed=False)
        return ends

    def _proof(
        self, way: Way, edges: Sequence[Edge], ends: dict[Edge, Any], seconds: dict[Edge, float], kept: list[Tensor]
    ) -> Iterator[tuple[str, str] | None]:
        """Yields for each part of a proof what has failed, as :meth:`_failure`. Fills ``ends``, ``seconds`` of each
        edge's message, and ``kept``."""
        offers = dict[Edge, bytes]()
        sends = [edge for edge in edges if not self._is_receiver[edge]]
        receives = [edge for edge in edges if self._is_receiver[edge]]

        def offer(edge: Edge) -> None:
            offers[edge] = way.offer()

        def make(edge: Edge) -> None:
            ends[edge] = way.make(self._controls[edge], self.watchdog, offers[edge])

        def move(edge: Edge) -> None:
            _C.group_progress(self.group.group, "the proof of an edge")
            size, known = self.proof_bytes, self._known_bytes(way, edge)
            if not self._is_receiver[edge]:
                kept.append(known.to(self.device))
                seconds[edge] = _C.edge_proof_send(ends[edge], kept[-1].data_ptr(), size)
                return
            address, seconds[edge] = _C.edge_proof_receive(ends[edge])
            [found], _ = self.gpu_views()(ends[edge], address, [(DTYPES.index(torch.uint8), 0, (size,), 0)])
            wrong = (found.cpu() != known).nonzero()
            if len(wrong):
                raise RuntimeError(f"{len(wrong)} of {size} bytes arrived wrong, the first is byte {int(wrong[0])}")

        yield self._failure(sends, offer)
        for theirs in self.group.all_gather_object(offers):
            offers |= theirs
        yield self._failure(edges, make)
        yield self._failure(edges, lambda edge: _C.device_end_connect(ends[edge]))
        yield self._failure(receives, lambda edge: _C.edge_proof_post(ends[edge], self.proof_bytes))
        for edge in sorted(offers):  # of all ranks, one after another: each has the machine for itself
            yield self._failure([edge] if edge in ends else [], move)
        yield self._failure(sends + receives, lambda edge: _C.edge_proof_end(ends[edge]))

    def _failure(self, edges: Iterable[Edge], call: Callable[[Edge], object]) -> tuple[str, str] | None:
        """Runs a part of a proof for edges, up to a failure. Collective: returns on all ranks the first edge that
        failed, in words, and why; None if none failed."""
        mine: dict[Edge, tuple[str, str]] = {}
        for edge in edges:
            try:
                call(edge)
            except _C.PipelineError:  # a rank is gone or has failed: another way would not help
                raise
            except (RuntimeError, ValueError, MemoryError, OSError) as error:
                first = (str(error) or type(error).__name__).splitlines()[0]
                text = _C.edge_end_text(self._controls[edge])
                mine[edge] = text, first.removeprefix(text).lstrip(",: ")
                break
        failed = [found for theirs in self.group.all_gather_object(mine) for found in theirs.items()]
        if not failed:
            return None
        edge, (text, _) = min(failed)  # later edges may have failed because a rank came no further
        return text, "; ".join(why for each, (_, why) in failed if each == edge)

    def _known_bytes(self, way: Way, edge: Edge) -> Tensor:
        """Returns the message: each edge and way has different bytes, so old bytes in memory never match."""
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{way.name} {edge}".encode()))
        words = torch.empty(self.proof_bytes // 8 + 1, dtype=torch.int64, device="cpu").random_(generator=generator)
        return words.view(torch.uint8)[: self.proof_bytes]

    def _refuse(self, way: Way, edge: str, why: str, ends: Mapping[Edge, Any], kept: Sequence[Tensor]) -> None:
        """Closes the ends of a way that failed at an edge.

        Raises:
            RuntimeError: a transfer cannot be ended, or the way was asked for by name; raised on every rank.
        """
        if any(self.group.all_gather_object(_close(ends, self._is_receiver))):
            for each in kept:  # the GPU may still read the message
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
            others = " or ".join(f'"{name}"' for name in ("nccl", "shm") if name != way.name)
            raise RuntimeError(
                f"{edge}: messages by transport={way.name!r} do not arrive ({why}), "
                f"and what the GPU has begun cannot be undone. {way.needs}; "
                f"start again with another transport=, as {others}"
            )
        failed = f"{edge}: transport={way.name!r} failed its proof"
        if self.transport != "auto":
            raise RuntimeError(f'{failed}: {why}. {way.needs}; or use transport="auto", which takes another way')
        self._refused.append(f"{way.name}: {edge}: {why}")
        if self.group.rank == 0:
            warnings.warn(
                f"{failed} and is not used: {why}. {way.needs}. engine.edges says what is used instead",
                stacklevel=2,
            )


def _close(ends: Mapping[Edge, Any], is_receiver: Mapping[Edge, bool]) -> list[str]:
    """Closes ends, senders first, which opened peers' memory; returns the edges that still use memory, in words."""
    in_order = [ends[edge] for edge in sorted(ends, key=is_receiver.__getitem__)]
    return [_C.edge_end_text(end) for end in in_order if not _C.device_end_close(end)]
