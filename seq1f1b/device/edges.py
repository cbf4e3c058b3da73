"""Edges between GPUs, each by the way that proves itself there: copies, NCCL, or host memory.

Set-up is here; how host, streams and events are ordered is C (``csrc/device/device_end.h``). Headers and credits go
over the edges of host memory that :mod:`seq1f1b.transport` opens.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device import kernel_library
from seq1f1b.placement import compute_stream
from seq1f1b.transport import RankGroup
from seq1f1b.transport.edges import DTYPES, TRANSPORTS, Edge, place_views
from seq1f1b.transport.restart import QUEUES

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


def found_nccl() -> str:
    """The version and path of NCCL, or why it was not found."""
    try:
        version, path = _C.nccl_find(find_nccl())
    except RuntimeError as error:
        return f"not found ({error}): no transport='nccl'"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}, {path}"


class Way(NamedTuple):
    """One way by which messages go, and how an end of it is made.

    Attributes:
        over: what may carry its headers, by ``RankGroup.transport_to``.
        needs: what to look at where it fails, a sentence without a full stop.
        make: makes an end of this rank from its control end, the watchdog and what was offered; waits for nobody.
        offer: the facts that a sender tells the receiver before the ends of an edge are made.
        is_one_sided: a send takes place without its receive.
    """

    name: str
    over: tuple[str, ...]
    needs: str
    make: Callable[[Any, Any, bytes], object]
    offer: Callable[[], bytes] = bytes
    is_one_sided: bool = True


COPIES = Way(
    "copy",
    TRANSPORTS["copy"].over,
    "CUDA IPC needs processes of one host that share its IPC namespace (docker run --ipc=host) and GPUs that reach "
    "each other (nvidia-smi topo -p2p r); wrong bytes point to an IOMMU, or to PCIe ACS, that is switched on",
    lambda control, watchdog, offered: _C.device_end(True, control, watchdog),
)
NCCL = Way(
    "nccl",
    TRANSPORTS["nccl"].over,
    "NCCL says more with NCCL_DEBUG=INFO; in a container it needs room in /dev/shm (docker run --shm-size=1g), "
    "between hosts the right network (NCCL_SOCKET_IFNAME), and it takes one rank per GPU",
    lambda control, watchdog, offered: _C.nccl_end(find_nccl(), offered, control, watchdog),
    lambda: _C.nccl_unique_id(find_nccl()),
    is_one_sided=False,
)
HOST = Way(  # the last resort
    "host",
    TRANSPORTS["auto"].over,
    "this way needs no more than copies between the GPU and the host: look at the GPU itself (nvidia-smi, dmesg)",
    lambda control, watchdog, offered: _C.device_end(False, control, watchdog),
)
WAYS = (COPIES, NCCL, HOST)
"""In the order in which ``transport="auto"`` tries them."""


def _warn_of_few_queues(num_streams: int) -> None:
    """Streams that share a hardware queue wait for each other: right, as receives are ordered for that, but slow."""
    queues = os.environ.get(QUEUES) or "8"  # CUDA's own
    if queues.isdigit() and int(queues) < num_streams + 2:  # torch computes on one, and copies on another
        warnings.warn(
            f"{QUEUES} is {queues}: the {num_streams} streams of this rank's edges share hardware "
            "queues with its units and wait for them; let it be 32 when CUDA starts, as init_process_group does",
            stacklevel=2,
        )


def _warn_of_gpus(gpus: Sequence[str], num_visible: int) -> None:
    """Warns of ranks that compute on one GPU although there are several, and of several kinds of GPUs.

    Args:
        gpus: by rank, the kind of its GPU, a space and what identifies it.
    """
    kinds = sorted({gpu.rpartition(" ")[0] for gpu in gpus})
    if len(kinds) > 1:
        warnings.warn(
            f"the ranks compute on GPUs of several kinds, {', '.join(kinds)}, and wait for the slowest: give it fewer "
            "layers, or every rank the same kind",
            stacklevel=2,
        )
    shared = [str(rank) for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    if shared and num_visible > 1:
        warnings.warn(
            f"ranks {', '.join(shared)} do not have a GPU each, and {num_visible} are visible: give each rank its own, "
            'as by torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the stages are made',
            stacklevel=2,
        )


def _give_back_cache(device: torch.device) -> int:
    """Has torch give back the memory of GPUs that it holds free, as a place finds none; returns how much stays."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class DeviceEdges:
    """One rank's ends of the edges of a pipeline on GPUs.

    Args:
        transport: ``"auto"``, or the name of one way, which every edge then goes.
    Attributes:
        chosen: by edge of this rank, the name of its way, bytes per second of the proof's message and why it goes that
            way, once they are open.
    """

    driver: str | None = None  # library; None: the system's libcuda
    proof_bytes = (32 << 20) - 1  # unaligned, and as long as messages of a long sequence
    proof_limit_s = 20.0  # for one message, or one connection

    def __init__(self, transport: str, group: RankGroup, device: torch.device) -> None:
        self.transport, self.group, self.device = transport, group, device
        self.chosen: dict[Edge, tuple[str, float, str]] = {}
        self._ends: dict[Edge, Any] = {}
        self._is_receiver: Mapping[Edge, bool] = {}
        has_cache = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's has no types
        make_room = functools.partial(_give_back_cache, device) if has_cache else None
        self.gpu = _C.device_create(self.driver, self.ordinal(), make_room)
        self.watchdog = _C.watchdog_create(group.group, self.gpu, min(self.proof_limit_s, group.timeout_s / 2))

    @staticmethod
    def serve(device: torch.device, group: RankGroup) -> bool:
        """Whether ``transport="auto"`` leaves messages to these edges. The same on all ranks.

        Ranks that are threads may make their engines one after the other, and nothing can be proven then.
        """
        return device.type == "cuda" and group.size > 1 and not group.is_thread

    def ordinal(self) -> int:
        """Number of the GPU, as the driver counts. Raises ValueError if the stages are not on one."""
        if self.device.type != "cuda":
            raise ValueError(
                f"transport={self.transport!r} moves messages between GPUs, the stages lie on {self.device}: "
                'use "auto", or move the stages'
            )
        return self.device.index

    def identity(self) -> str:
        """The kind of the GPU, and after a space what no other one has."""
        return f"{torch.cuda.get_device_name(self.device)} {torch.cuda.get_device_properties(self.device).uuid}"

    def place_views(self) -> Callable[..., Any]:
        return functools.partial(place_views, gpu=self.ordinal())

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that the executor calls for every unit, from the one that runs it."""
        return run

    def warm(self) -> None:
        """Has torch's context, its kernels' module and the allocator ready: loading them waits for the whole GPU, and
        so for a receive that waits for its sender."""
        first = torch.ones(1024, device=self.device)
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
        gpus = self.group.all_gather_object(self.identity())
        if self.group.rank == 0:
            _warn_of_gpus(gpus, torch.cuda.device_count())
        ways = [way for way in WAYS if self.transport in ("auto", way.name)]
        if self.transport != "auto":
            self._check_reach(ways[0], controls)
        self.warm()
        self._is_receiver = is_receiver
        self._ends, self.chosen = Proof(self, ways, controls, is_receiver).run()
        return dict(self._ends)  # the caller lets go of its own before close() ends them

    def _check_reach(self, way: Way, controls: Mapping[Edge, object]) -> None:
        for edge in controls:
            other = self.group.transport_to(self.group.peer_of(edge))
            if other not in way.over:
                raise ValueError(
                    f'transport="{way.name}" is for ranks of one host; the edge of stage {edge[0]} to {edge[1]} '
                    f'goes over {other}: use "auto" or "nccl"'
                )

    def begin_step(self) -> None:
        _C.device_begin_step(self.gpu, compute_stream(self.device))

    def close(self) -> None:
        """Leaves together with the other ranks, where these still can."""
        self._meet()  # a receiver whose last message is on its way takes a sender that left for one that is lost
        kept: list[str] = []
        for edge in sorted(self._ends, key=self._is_receiver.__getitem__):  # who opened the other's memory goes first
            if not _C.device_end_close(self._ends[edge]):
                kept.append(_C.edge_end_text(self._ends[edge]))
        self._meet()  # an end may use events that the other one owns
        self._ends.clear()
        if kept:
            warnings.warn(
                f"{', '.join(kept)}: the GPU of this rank, or of a peer, does not end what it has begun, and to free "
                "memory would wait for that: what these edges hold on the GPU stays until this process ends",
                RuntimeWarning,
                stacklevel=4,  # where the engine is closed
            )

    def _meet(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody may be gone
            self.group.barrier()


class Proof:
    """Finds, together with all other ranks, the way that carries each edge of this rank: the first that proves itself.

    A way is tried on all edges that still have none at once, with one message for each. Between two parts of an attempt
    the ranks exchange what failed, so that both ends of an edge, and all ranks, know the same and go on alike; nobody
    waits for what another rank will not do. What an end does, and within which time, is C
    (``csrc/device/edge_proof.h``).

    Args:
        edges: those of the rank, with their device, limits and the transport that was asked for.
        ways: in the order in which they are tried.
        controls: ends of this rank's edges that carry headers.
        is_receiver: by edge.
    """

    def __init__(
        self,
        edges: DeviceEdges,
        ways: Sequence[Way],
        controls: Mapping[Edge, object],
        is_receiver: Mapping[Edge, bool],
    ) -> None:
        self._edges, self._ways, self._controls, self._is_receiver = edges, ways, controls, is_receiver
        self._group, self._is_free = edges.group, edges.transport == "auto"
        self._reasons: dict[Edge, list[str]] = {}  # why an earlier way is not it
        self._refused: dict[Edge, str] = {}  # why an edge cannot go the way that is tried; equal on all ranks
        self._chosen: dict[Edge, tuple[str, float, str]] = {}
        self._ends: dict[Edge, Any] = {}

    def run(self) -> tuple[dict[Edge, Any], dict[Edge, tuple[str, float, str]]]:
        """The ends, and what is chosen (:class:`DeviceEdges`). Collective.

        Raises:
            RuntimeError: on every rank: an edge has no way, or a transfer does not end.
        """
        texts = {edge: _C.edge_end_text(control) for edge, control in self._controls.items()}
        self._texts: dict[Edge, str] = {}
        self._ranks: dict[Edge, set[int]] = {}  # at an edge
        for rank, theirs in enumerate(self._group.all_gather_object(texts)):
            self._texts |= theirs
            for edge in theirs:
                self._ranks.setdefault(edge, set()).add(rank)
        for way in self._ways:
            mine = [edge for edge in sorted(self._controls) if edge not in self._ends]
            mine = [edge for edge in mine if self._group.transport_to(self._group.peer_of(edge)) in way.over]
            if any(self._group.all_gather_object(bool(mine))):
                self._try(way, mine)
        if self._refused:
            raise RuntimeError(f"{self._texts[min(self._refused)]}: no transport carries its messages between GPUs")
        return self._ends, self._chosen

    def _each(self, edges: Iterable[Edge], call: Callable[[Edge], object]) -> None:
        """Does a part of an attempt for edges that have not failed; then all ranks know which have. Collective."""
        mine: dict[Edge, str] = {}
        for edge in [each for each in edges if each not in self._refused]:
            try:
                call(edge)
            except _C.PipelineError:  # a rank is gone, or has failed: no way helps
                raise
            except (RuntimeError, ValueError, MemoryError, OSError) as error:
                first = (str(error) or type(error).__name__).splitlines()[0]
                mine[edge] = first.removeprefix(self._texts[edge]).lstrip(",: ")
        for theirs in self._group.all_gather_object(mine):
            for edge, reason in theirs.items():
                self._refused[edge] = f"{self._refused[edge]}; {reason}" if edge in self._refused else reason

    def _try(self, way: Way, edges: list[Edge]) -> None:
        self._group.begin_step(training=False)
        self._edges.begin_step()
        self._refused = {}
        sends = [edge for edge in edges if not self._is_receiver[edge]]
        receives = [edge for edge in edges if self._is_receiver[edge]]
        offers: dict[Edge, bytes] = {}
        ends: dict[Edge, Any] = {}
        seconds: dict[Edge, float] = {}
        kept: list[Tensor] = []  # until nothing is under way
        size = self._edges.proof_bytes

        def offer(edge: Edge) -> None:
            offers[edge] = way.offer()

        def make(edge: Edge) -> None:
            ends[edge] = way.make(self._controls[edge], self._edges.watchdog, offers[edge])

        def move(edge: Edge) -> None:
            _C.group_progress(self._group.group, "the proof of an edge")
            known = self._known_bytes(way, edge)
            if not self._is_receiver[edge]:
                kept.append(known.to(self._edges.device))
                seconds[edge] = _C.edge_proof_send(ends[edge], kept[-1].data_ptr(), size)
                return
            address, seconds[edge] = _C.edge_proof_receive(ends[edge], size)
            [found], _ = self._edges.place_views()(ends[edge], address, [(DTYPES.index(torch.uint8), 0, (size,), 0)])
            wrong = (found.cpu() != known).nonzero()
            if len(wrong):
                raise RuntimeError(f"{len(wrong)} of {size} bytes arrived wrong, the first is byte {int(wrong[0])}")

        self._each(sends, offer)
        for theirs in self._group.all_gather_object(offers):
            offers |= theirs
        self._each(edges, make)
        self._each(edges, lambda edge: _C.device_end_connect(ends[edge]))
        self._each(receives, lambda edge: _C.edge_proof_post(ends[edge], size))
        for part in (sends, receives) if way.is_one_sided else _rounds_of(self._ranks):
            self._each([edge for edge in edges if edge in part], move)
        self._look_for_stuck(way, ends, kept)
        self._close(sends, receives, ends)
        self._tell(way)
        everyones = self._group.all_gather_object(seconds)
        for edge in ends:
            took = [theirs[edge] for theirs in everyones if edge in theirs]
            rate = size / max(1e-9, sum(took) if way.is_one_sided else max(took))
            why = ["the first that proved itself" if self._is_free else "asked for", *self._reasons.get(edge, [])]
            self._chosen[edge] = (way.name, rate, "; ".join(why))
        self._ends |= ends
        self._group.end_step(failed=False)

    def _known_bytes(self, way: Way, edge: Edge) -> Tensor:
        """The message: each edge and way has bytes of its own, so that what another one left is not taken for it."""
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{way.name} {self._texts[edge]}".encode()))
        size = self._edges.proof_bytes
        words = torch.empty(size // 8 + 1, dtype=torch.int64, device="cpu").random_(generator=generator)
        return words.view(torch.uint8)[:size]

    def _look_for_stuck(self, way: Way, ends: Mapping[Edge, Any], kept: Sequence[Tensor]) -> None:
        """Ends what has failed. Raises, on every rank, if a transfer cannot be ended."""
        mine = [edge for edge in ends if edge in self._refused and not _C.edge_proof_give_up(ends[edge])]
        stuck = sorted(set().union(*self._group.all_gather_object(mine)))
        if not stuck:
            return
        for each in kept:  # the GPU may still read it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        others = " or ".join(f'"{name}"' for name in ("nccl", "shm") if name != way.name)
        raise RuntimeError(
            f"{self._texts[stuck[0]]}: messages by transport={way.name!r} do not arrive ({self._refused[stuck[0]]}), "
            f"and what the GPU has begun cannot be undone. {way.needs}; "
            f"start again with another transport=, as {others}"
        )

    def _close(self, sends: Sequence[Edge], receives: Sequence[Edge], ends: dict[Edge, Any]) -> None:
        """Closes ends that have failed; all others give back the memory of the proof."""
        for part in (sends, receives):  # who opened the other's memory goes first
            for edge in [edge for edge in part if edge in self._refused and edge in ends]:
                _C.device_end_close(ends.pop(edge))
            self._each(part, lambda edge: _C.edge_proof_end(ends[edge]))
        for edge in self._refused:
            ends.pop(edge, None)

    def _tell(self, way: Way) -> None:
        """An error for a way that was asked for by name; else one warning."""
        if not self._refused:
            return
        edge = min(self._refused)
        reason = f"{self._refused[edge]}. {way.needs}"
        if not self._is_free:
            raise RuntimeError(
                f"{self._texts[edge]}: transport={way.name!r} failed its proof: {reason}; "
                'or use transport="auto", which takes another way'
            )
        for each, why in self._refused.items():
            self._reasons.setdefault(each, []).append(f"{way.name}: {why}")
        if self._group.rank == 0:
            others = f" (and {len(self._refused) - 1} more edges)" if len(self._refused) > 1 else ""
            warnings.warn(
                f"{self._texts[edge]}{others}: transport={way.name!r} failed its proof and is not used: {reason}. "
                "engine.edges says what is used instead",
                stacklevel=2,
            )


def _rounds_of(ranks: Mapping[Edge, set[int]]) -> list[set[Edge]]:
    """Edges, in order, each in the first round in which neither of its ranks has one yet."""
    rounds: list[tuple[set[Edge], set[int]]] = []
    for edge in sorted(ranks):
        found = next((each for each in rounds if each[1].isdisjoint(ranks[edge])), None)
        if found is None:
            rounds.append(found := (set(), set()))
        found[0].add(edge)
        found[1].update(ranks[edge])
    return [edges for edges, _ in rounds]
