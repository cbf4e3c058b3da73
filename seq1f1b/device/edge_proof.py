"""Finds, together with all other ranks, the way that carries each edge between GPUs: the first that proves itself.

A way is tried on all edges that still have none at once, with one message for each. Between two parts of an attempt the
ranks exchange what failed, so that both ends of an edge, and all ranks, know the same and go on alike; nobody waits for
what another rank will not do. What an end does, and within which time, is C (``csrc/device/edge_proof.h``).
"""

from __future__ import annotations

import ctypes
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device.edge_ways import Way
from seq1f1b.transport import RankGroup
from seq1f1b.transport.group import DTYPES, Edge

__all__: list[str] = []


_LATE = ("its transfer has been under way", "no header has come", "starting to", "connecting")  # csrc/device


class Chosen(NamedTuple):
    """The way that carries an edge.

    Attributes:
        rate: bytes per second of the proof's message, from its start to its arrival.
        why: in words.
    """

    transport: str
    rate: float
    why: str


class Proof:
    """The choice of a way for each edge of this rank.

    Args:
        ways: in the order in which they are tried.
        controls: ends of this rank's edges that carry headers.
        is_receiver: by edge.
        asked: the transport that was asked for by name; None: any may be.
        begin_step: begins a step on this rank's device.
        place_views: gives tensors over a message that has come.
        room: bytes that this rank can give to one message.
        size: of a message, in bytes.
        device: on which messages lie.
    """

    def __init__(
        self,
        group: RankGroup,
        ways: Sequence[Way],
        controls: Mapping[Edge, object],
        is_receiver: Mapping[Edge, bool],
        *,
        asked: str | None,
        begin_step: Callable[[], None],
        place_views: Callable[..., Any],
        room: int,
        size: int,
        device: torch.device,
    ) -> None:
        self._group, self._ways, self._controls, self._is_receiver = group, ways, controls, is_receiver
        self._asked, self._begin_step, self._place_views = asked, begin_step, place_views
        self._room, self._size, self._device = room, size, device
        self._reasons: dict[Edge, list[str]] = {}  # why an earlier way is not it
        self._refused: dict[Edge, str] = {}  # why an edge cannot go the way that is tried; equal on all ranks
        self.chosen: dict[Edge, Chosen] = {}
        self.ends: dict[Edge, Any] = {}

    def run(self) -> None:
        """Raises RuntimeError, on every rank, if an edge has no way, or a transfer that does not end. Collective."""
        everyones = self._group.all_gather_object(
            (self._room, {edge: _C.edge_end_text(control) for edge, control in self._controls.items()})
        )
        self._texts: dict[Edge, str] = {}
        self._ranks: dict[Edge, list[int]] = {}  # at an edge
        for rank, (_, texts) in enumerate(everyones):
            self._texts |= texts
            for edge in texts:
                self._ranks.setdefault(edge, []).append(rank)
        self._bytes = {
            edge: max(1, min(self._size, *(everyones[rank][0] for rank in ranks)))
            for edge, ranks in self._ranks.items()
        }
        for way in self._ways:
            mine = [edge for edge in sorted(self._controls) if edge not in self.ends and self._can(way, edge)]
            if any(self._group.all_gather_object(bool(mine))):
                self._try(way, mine)
        missing = [edge for edge in self._controls if edge not in self.ends]
        left: set[Edge] = set().union(*self._group.all_gather_object(missing))
        if left:
            raise RuntimeError(f"{self._texts[min(left)]}: no transport carries its messages between GPUs")

    def _can(self, way: Way, edge: Edge) -> bool:
        return self._group.transport_to(self._group.peer_of(edge)) in way.over

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
        reasons: dict[Edge, list[str]] = {}
        for theirs in self._group.all_gather_object(mine):
            for edge, reason in theirs.items():
                reasons.setdefault(edge, []).append(reason)
        # All ranks use one of the texts: not that of an end which has waited in vain, and does not know why.
        self._refused |= {edge: min(texts, key=lambda text: text.startswith(_LATE)) for edge, texts in reasons.items()}

    def _try(self, way: Way, edges: list[Edge]) -> None:
        self._group.begin_step(training=False)
        self._begin_step()
        self._refused = {}
        sends = [edge for edge in edges if not self._is_receiver[edge]]
        receives = [edge for edge in edges if self._is_receiver[edge]]
        offers: dict[Edge, bytes] = {}
        ends: dict[Edge, Any] = {}
        seconds: dict[Edge, float] = {}
        kept: list[Tensor] = []  # until nothing is under way

        def offer(edge: Edge) -> None:
            offers[edge] = way.offer()

        def make(edge: Edge) -> None:
            ends[edge] = way.make(self._controls[edge], offers[edge])

        def move(edge: Edge) -> None:
            _C.group_progress(self._group.group, "the proof of an edge")
            size, known = self._bytes[edge], self._known_bytes(way, edge)
            if not self._is_receiver[edge]:
                kept.append(known.to(self._device))
                seconds[edge] = _C.edge_proof_send(ends[edge], kept[-1].data_ptr(), size)
                return
            address, seconds[edge] = _C.edge_proof_receive(ends[edge], size)
            [found], _ = self._place_views(ends[edge], address, [(DTYPES.index(torch.uint8), 0, (size,), 0)])
            wrong = (found.cpu() != known).nonzero()
            if len(wrong):
                raise RuntimeError(f"{len(wrong)} of {size} bytes arrived wrong, the first is byte {int(wrong[0])}")

        self._each(sends, offer)
        for theirs in self._group.all_gather_object(offers):
            offers |= theirs
        self._each(edges, make)
        self._each(edges, lambda edge: way.connect(ends[edge]))
        self._each(receives, lambda edge: _C.edge_proof_post(ends[edge], self._bytes[edge]))
        for part in (sends, receives) if way.is_one_sided else _rounds_of(self._ranks):
            self._each([edge for edge in edges if edge in part], move)
        self._look_for_stuck(way, ends, kept)
        self._close(sends, receives, ends)
        self._tell(way)
        everyones = self._group.all_gather_object(seconds)
        for edge in ends:
            took = [theirs[edge] for theirs in everyones if edge in theirs]
            rate = self._bytes[edge] / max(1e-9, sum(took) if way.is_one_sided else max(took))
            self.chosen[edge] = Chosen(way.name, rate, self._why(edge))
        self.ends |= ends
        self._group.end_step(failed=False)

    def _known_bytes(self, way: Way, edge: Edge) -> Tensor:
        """The message: each edge and way has bytes of its own, so that what another one left is not taken for it."""
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{way.name} {self._texts[edge]}".encode()))
        words = torch.empty(self._bytes[edge] // 8 + 1, dtype=torch.int64, device="cpu").random_(generator=generator)
        return words.view(torch.uint8)[: self._bytes[edge]]

    def _look_for_stuck(self, way: Way, ends: Mapping[Edge, Any], kept: Sequence[Tensor]) -> None:
        """Ends what has failed. Raises, on every rank, if a transfer cannot be ended."""
        mine = [edge for edge in ends if edge in self._refused and not _C.edge_proof_give_up(ends[edge])]
        stuck = sorted(set().union(*self._group.all_gather_object(mine)))
        if not stuck:
            return
        for each in (*ends.values(), *kept):  # to free them would wait for the GPU, for ever
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        others = " or ".join(f'"{name}"' for name in ("nccl", "shm") if name != way.name)
        raise RuntimeError(
            f"{self._texts[stuck[0]]}: messages by transport={way.name!r} do not arrive ({self._refused[stuck[0]]}), "
            f"and what the GPU has begun cannot be undone. {way.needs}; "
            f"start again with another transport=, as {others}"
        )

    def _close(self, sends: Sequence[Edge], receives: Sequence[Edge], ends: dict[Edge, Any]) -> None:
        """Closes ends that have failed; all others give back the memory of the proof."""
        failed = set(self._refused)

        def close(edge: Edge) -> None:
            if edge not in failed:
                _C.edge_proof_end(ends[edge])
                _C.device_end_forget(ends[edge])

        for part in (sends, receives):  # who opened the other's memory goes first
            for edge in [edge for edge in part if edge in failed and edge in ends]:
                _C.device_end_close(ends.pop(edge))
            self._each(part, close)
        for edge in self._refused:
            ends.pop(edge, None)

    def _tell(self, way: Way) -> None:
        """An error for a way that was asked for by name; else one warning, by a rank that is at one of the edges."""
        if not self._refused:
            return
        edge = min(self._refused)
        reason = f"{self._refused[edge]}. {way.needs}"
        if self._asked is not None:
            raise RuntimeError(
                f"{self._texts[edge]}: transport={way.name!r} failed its proof: {reason}; "
                'or use transport="auto", which takes another way'
            )
        for each, why in self._refused.items():
            self._reasons.setdefault(each, []).append(f"{way.name}: {why}")
        if self._ranks[edge][0] == self._group.rank:
            others = f" (and {len(self._refused) - 1} more edges)" if len(self._refused) > 1 else ""
            warnings.warn(
                f"{self._texts[edge]}{others}: transport={way.name!r} failed its proof and is not used: {reason}. "
                "engine.edges says what is used instead",
                stacklevel=2,
            )

    def _why(self, edge: Edge) -> str:
        reasons = self._reasons.get(edge, [])
        found = "asked for" if self._asked is not None else "; ".join(["the first that proved itself", *reasons])
        short = self._bytes[edge] < self._size
        return f"{found}; proven with {self._bytes[edge]} bytes, as memory is short" if short else found


def _rounds_of(ranks: Mapping[Edge, Sequence[int]]) -> list[set[Edge]]:
    """Edges, in order, each in the first round in which neither of its ranks has one yet."""
    rounds: list[tuple[set[Edge], set[int]]] = []
    for edge in sorted(ranks):
        found = next((each for each in rounds if each[1].isdisjoint(ranks[edge])), None)
        if found is None:
            rounds.append(found := (set(), set()))
        found[0].add(edge)
        found[1].update(ranks[edge])
    return [edges for edges, _ in rounds]


def warn_of_shared_gpus(found: Sequence[tuple[str, int]]) -> None:
    """Warns of ranks that compute on one GPU although there are several.

    Args:
        found: by rank, what identifies its GPU, and how many GPUs it sees.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (gpu, _) in enumerate(found):
        ranks.setdefault(gpu, []).append(rank)
    shared = [theirs for theirs in ranks.values() if len(theirs) > 1 and max(found[rank][1] for rank in theirs) > 1]
    if shared:
        groups = "; ".join(f"ranks {', '.join(map(str, theirs))} share one GPU" for theirs in shared)
        warnings.warn(
            f"{groups}, and {found[shared[0][0]][1]} are visible: give each rank its own, as by "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the stages are made',
            stacklevel=2,
        )
