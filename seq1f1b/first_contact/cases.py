"""Cases, and the rank that runs its share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from seq1f1b import _C
from seq1f1b.runtime.arguments import Limits
from seq1f1b.runtime.engine import PipelineEngine
from seq1f1b.transport.table import TRANSPORTS

__all__: list[str] = []

NO_GPU = "no GPU"
SILENCE_S = 20.0  # of a peer in a step
FIRST_SILENCE_S = 40.0  # in the first one, where kernels are loaded and connections made

Figures = dict[str, Any]
Case = tuple[str, Callable[[], Figures]]


class Unmeasured(Exception):
    """Something that a case needs is not here."""


def drilled_transports() -> list[str]:
    """The transport that users get unless they ask, and each one whose messages stay on GPUs."""
    return ["auto", *(name for name, row in TRANSPORTS.items() if row.between_gpus)]


class Rank:
    """One rank of the processes, or threads, that run cases together.

    Args:
        hosts: for each rank, the number of its host.
        share: how many ranks use one GPU.
        group: of a pipeline over all ranks; None: torch's default process group.
        gather: returns every rank's value of JSON; collective.
        engine: the class; that of the tests has GPUs that are stand-ins.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        *,
        hosts: Sequence[int] = (),
        share: int = 1,
        group: Any = None,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        engine: type[PipelineEngine] = PipelineEngine,
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.hosts, self.share = tuple(hosts) or (0,) * world, share
        self.group, self.gather, self._engine = group, gather, engine
        self.pipeline: Any = None  # the RankGroup of the last engine: the watcher tells what its ranks do
        self.edges: Any = ()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_gpus(self) -> bool:
        """Whether edges between GPUs can be, on stand-ins for them perhaps."""
        return self.is_cuda or self._engine is not PipelineEngine

    def need(self, transport: str, ranks: Sequence[int] | None = None) -> None:
        """Raises Unmeasured where the transport cannot connect these ranks, or all."""
        row = TRANSPORTS[transport]
        if row.between_gpus and not self.has_gpus:
            raise Unmeasured(NO_GPU)
        hosts = {self.hosts[rank] for rank in (range(self.world) if ranks is None else ranks)}
        if len(hosts) > 1 and "c10d" not in row.over:
            raise Unmeasured("it is for ranks of one host")

    def make_engine(self, *arguments: Any, transport: str, group: Any = None, **options: Any) -> PipelineEngine:
        limits = Limits(step=SILENCE_S, first_step=FIRST_SILENCE_S)
        group = self.group if group is None else group
        defaults = {"limits": limits, "group": group}
        engine = self._engine(*arguments, transport=transport, **(defaults | options))
        self.pipeline, self.edges = engine._pipeline.group, engine.edges
        return engine

    def new_group(self, ranks: Sequence[int]) -> Any:
        """A process group of some of the ranks; collective over all. Threads have the one that they are in."""
        return self.group if self.group is not None else dist.new_group(list(ranks))

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def poison(self) -> None:
        """Fills what torch's allocator hands out next with NaN: who reads what nobody wrote shows it."""
        sizes = range(8, 25) if self.is_cuda else range(8, 17)
        blocks = [torch.full((1 << bits,), float("nan"), device=self.device) for bits in sizes]
        del blocks

    def poison_device(self) -> None:
        """Also fills what the driver hands out, as it does for an edge's places."""
        self.poison()
        if self.is_cuda:
            self.sync()
            torch.cuda.empty_cache()

    def edge_states(self) -> list[dict[str, Any]]:
        """How far each edge of the last engine is, by its headers and credits: step and messages of it."""
        group, found = self.pipeline, []
        ways = {(edge.source_stage, edge.destination_stage): edge.transport for edge in self.edges}
        for edge, end in [] if group is None else list(group._ends.items()):
            granted, sent = _C.edge_positions(end)
            found.append({
                "stages": list(edge[:2]), "channel": edge[2],
                "rank at the other end": group.peer_of(edge), "by": ways.get(edge[:2], "?"),
                "places for (step, messages)": granted, "sent (step, messages)": sent,
            })  # fmt: skip
        return found

    def progress(self) -> list[dict[str, Any]]:
        """Says what each rank of the last engine's pipeline does, for how many seconds, and whom it waits for."""
        group = self.pipeline
        if group is None:
            return []
        found = [_C.group_get_progress(group.group, rank) for rank in range(group.size)]
        return [
            {"rank": rank, "in": what, "seconds": round(age, 1), "waits for rank": waits_for}
            for rank, (what, age, waits_for) in enumerate(found)
        ]
