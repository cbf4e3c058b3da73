"""Finds, together with all other ranks, the way that carries each edge between GPUs: the first that proves itself.

A way is tried on all edges that still have none at once. Between two parts of an attempt the ranks exchange what
failed, so that both ends of an edge, and all ranks, know the same and go on alike; nobody waits for what another rank
will not do. What an end shows, and within which time, is C (``csrc/device/edge_proof.h``).
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from seq1f1b import _C
from seq1f1b.device.edge_ways import Way
from seq1f1b.transport import RankGroup
from seq1f1b.transport.group import Edge

__all__: list[str] = []


_LATE = ("its transfer has been under way", "no header has come", "it does not come to an end")  # csrc/device


class Chosen(NamedTuple):
    """The way that carries an edge.

    Attributes:
        rate: bytes per second of the largest message of the proof, from its start to its arrival, sent alone.
        why: in words.
    """

    transport: str
    rate: float
    why: str


class Attempt:
    """One way on the edges that are to try it. Every method is collective.

    Args:
        rounds: all edges of the pipeline, so that a rank has one in each round at most: where both ends must be there
            at once, one that fails keeps nobody from another edge.
    Attributes:
        refused: why an edge cannot go this way; equal on all ranks after each exchange.
    """

    def __init__(
        self,
        group: RankGroup,
        way: Way,
        edges: Sequence[Edge],
        controls: Mapping[Edge, object],
        sends: set[Edge],
        rounds: Sequence[set[Edge]],
    ) -> None:
        self._group, self._way, self._controls = group, way, controls
        self._edges, self._sends, self._rounds = edges, sends, rounds
        self.ends: dict[Edge, Any] = {}
        self.refused: dict[Edge, str] = {}
        self.seconds: dict[Edge, float] = {}  # of the last message, on this rank

    def _each(self, edges: Iterable[Edge], call: Callable[[Edge], object]) -> None:
        for edge in edges:
            if edge in self.refused:
                continue
            try:
                call(edge)
            except _C.PipelineError:  # a rank is gone, or has failed: no way helps
                raise
            except (RuntimeError, ValueError, MemoryError, OSError) as error:
                text = _C.edge_end_text(self._controls[edge])
                first = (str(error) or type(error).__name__).splitlines()[0]
                self.refused[edge] = first.removeprefix(text).lstrip(",: ")

    def _agree(self, beside: Any = None) -> list[Any]:
        found = self._group.all_gather_object((self.refused, beside))
        reasons: dict[Edge, list[str]] = {}
        for theirs, _ in found:
            for edge, reason in theirs.items():
                reasons.setdefault(edge, []).append(reason)
        # All ranks use one of the texts: not that of an end which has waited in vain, and does not know why.
        self.refused = {edge: min(texts, key=lambda text: text.startswith(_LATE)) for edge, texts in reasons.items()}
        return [each for _, each in found]

    def make(self) -> None:
        offers: dict[Edge, bytes] = {}
        sending = [edge for edge in self._edges if edge in self._sends]
        try:
            offers = self._way.offer(sending) if self._edges else {}
        except (RuntimeError, ValueError, OSError) as error:
            self.refused |= dict.fromkeys(self._edges, str(error).splitlines()[0])
        for theirs in self._agree(offers):
            offers |= theirs

        def make(edge: Edge) -> None:
            self.ends[edge] = self._way.make(edge, self._controls[edge], offers.get(edge, b""))

        self._each(self._edges, make)
        self._agree()

        def connect(edge: Edge) -> None:
            _C.edge_proof_begin(self.ends[edge])
            self._way.connect(edge, self.ends[edge])

        self._each(self._edges, connect)
        self._agree()

    def send(self, sequence: int, sizes: Mapping[Edge, int]) -> None:
        """Message ``sequence`` of every edge, of so many bytes."""
        receivers = [edge for edge in self._edges if edge not in self._sends]

        def move(edge: Edge) -> None:
            _C.group_progress(self._group.group, "the proof of an edge")
            self.seconds[edge] = _C.edge_proof_move(self.ends[edge], sequence, sizes[edge])

        self._each(receivers, lambda edge: _C.edge_proof_post(self.ends[edge], sequence, sizes[edge]))
        self._agree()
        if self._way.is_one_sided:
            self._each(sorted(self._sends & set(self._edges)), move)
            self._agree()
            self._each(receivers, move)
            self._agree()
            return
        for together in self._rounds:
            self._each(together & set(self._edges), move)
            self._agree()

    def end(self) -> tuple[dict[Edge, Any], list[Edge]]:
        """The ends that have proven themselves; and edges whose transfers do not end. All other ends are closed."""
        failed = [edge for edge in self._edges if edge in self.refused and edge in self.ends]
        stuck = [edge for edge in failed if not _C.edge_proof_give_up(self.ends[edge])]
        all_stuck = sorted(set().union(*self._agree(stuck)))
        if all_stuck:
            for end in self.ends.values():  # to free them would wait for the GPU, for ever
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(end))
            return {}, all_stuck
        for senders in (True, False):  # who opened the other's memory goes first
            for edge in self._edges:
                if edge not in self.ends or (edge in self._sends) != senders:
                    continue
                if edge in self.refused:
                    _C.device_end_close(self.ends.pop(edge))
                else:
                    _C.edge_proof_end(self.ends[edge])
                    self._each([edge], lambda edge: _C.device_end_forget(self.ends[edge]))
            self._agree()
        return self.ends, []


class Proof:
    """The choice of a way for each edge of this rank.

    Args:
        ways: in the order in which they are tried.
        controls: ends of this rank's edges that carry headers.
        is_receiver: by edge.
        asked: the transport that was asked for by name; None: any may be.
        begin_step: begins a step on this rank's device.
        room: bytes that this rank can give to one message of the proof.
        sizes: of the messages.
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
        room: int,
        sizes: Sequence[int],
    ) -> None:
        self._group, self._ways, self._controls = group, ways, controls
        self._sends = {edge for edge in controls if not is_receiver[edge]}
        self._asked, self._begin_step = asked, begin_step
        self._room, self._sizes = room, sizes
        self._reasons: dict[Edge, list[str]] = {}  # why an earlier way is not it
        self.chosen: dict[Edge, Chosen] = {}
        self.ends: dict[Edge, Any] = {}

    def run(self) -> None:
        """Raises RuntimeError, on every rank, if an edge has no way, or a transfer that does not end. Collective."""
        everyones = self._group.all_gather_object(
            (self._room, {edge: _C.edge_end_text(control) for edge, control in self._controls.items()})
        )
        room: dict[Edge, int] = {}
        self._texts: dict[Edge, str] = {}
        self._ranks: dict[Edge, list[int]] = {}  # at an edge
        for rank, (theirs, texts) in enumerate(everyones):
            room |= {edge: min(theirs, room.get(edge, theirs)) for edge in texts}
            self._texts |= texts
            for edge in texts:
                self._ranks.setdefault(edge, []).append(rank)
        self._rounds = _rounds_of(self._ranks)
        self._most = {edge: min(self._sizes[-1], max(1, room[edge])) for edge in room}
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

    def _try(self, way: Way, edges: list[Edge]) -> None:
        self._group.begin_step(training=False)
        self._begin_step()
        attempt = Attempt(self._group, way, edges, self._controls, self._sends, self._rounds)
        attempt.make()
        for sequence, size in enumerate(self._sizes):
            attempt.send(sequence, {edge: min(size, self._most[edge]) for edge in edges})
        ends, stuck = attempt.end()
        refused = attempt.refused
        if stuck:
            raise RuntimeError(
                f"{self._texts[stuck[0]]}: messages by transport={way.name!r} do not arrive "
                f"({refused[stuck[0]]}), and what the GPU has begun cannot be undone. {way.needs}; "
                f"start again with another transport=, as {self._other(way)}"
            )
        if refused and self._asked is not None:
            edge = min(refused)
            raise RuntimeError(
                f"{self._texts[edge]}: transport={way.name!r} failed its proof: {refused[edge]}. {way.needs}; "
                'or use transport="auto", which takes another way'
            )
        self._warn(way, refused)
        for edge in edges:
            if edge in refused:
                self._reasons.setdefault(edge, []).append(f"{way.name}: {refused[edge]}")
        rates = self._rates(way, attempt, ends)
        for edge, end in ends.items():
            self.ends[edge] = end
            self.chosen[edge] = Chosen(way.name, rates[edge], self._why(edge))
        self._group.end_step(failed=False)

    def _rates(self, way: Way, attempt: Attempt, ends: Mapping[Edge, Any]) -> dict[Edge, float]:
        """Bytes per second of the largest message: a one-sided send is over before its receive begins."""
        everyones = self._group.all_gather_object({edge: attempt.seconds[edge] for edge in ends})
        both = {edge: [theirs[edge] for theirs in everyones if edge in theirs] for edge in ends}
        return {
            edge: self._most[edge] / max(1e-9, sum(seconds) if way.is_one_sided else max(seconds))
            for edge, seconds in both.items()
        }

    def _why(self, edge: Edge) -> str:
        reasons = self._reasons.get(edge, [])
        found = "asked for" if self._asked is not None else "; ".join(["the first that proved itself", *reasons])
        short = self._most[edge] < self._sizes[-1]
        return f"{found}; proven with {self._most[edge]} bytes at most, as memory is short" if short else found

    def _warn(self, way: Way, refused: Mapping[Edge, str]) -> None:
        """One warning of the whole pipeline, by a rank that is at one of the edges."""
        if not refused or self._ranks[min(refused)][0] != self._group.rank:
            return
        edge = min(refused)
        others = f" (and {len(refused) - 1} more edges)" if len(refused) > 1 else ""
        warnings.warn(
            f"{self._texts[edge]}{others}: transport={way.name!r} failed its proof and is not used: {refused[edge]}. "
            f"{way.needs}. engine.edges says what is used instead",
            stacklevel=2,
        )

    def _other(self, way: Way) -> str:
        return " or ".join(f'"{name}"' for name in ("nccl", "shm") if name != way.name)


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
