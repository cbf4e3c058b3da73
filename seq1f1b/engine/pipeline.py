"""A rank's place in a pipeline: modules of the rank's stages, and state shared by all orders.

Modules may carry their place among a model's stages; the pipeline must then have each stage once, in order.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from seq1f1b import _C, where
from seq1f1b.above import above
from seq1f1b.engine.offload import FileTier, Tier
from seq1f1b.engine.options import Options
from seq1f1b.engine.replicas import data_parallel, without_wrapper
from seq1f1b.engine.ties import TiedParameters
from seq1f1b.schedule import Schedule
from seq1f1b.transport import DTYPES, RankGroup
from seq1f1b.transport.agreement import Agreement, Disagreement
from seq1f1b.transport.edges import TRANSPORTS, Edge, leave_place
from seq1f1b.transport.failure import has_been_told
from seq1f1b.transport.group import OfOneProcess
from seq1f1b.transport.values import sendable
from seq1f1b.unit import ProgramEdge, edges_of

__all__: list[str] = []

_CHANNELS = (  # messages of an edge, by channel
    "activations",
    "gradients",
    "the hidden state",
    "statistics",
    "gradients of the hidden state",
    "embedded tokens",
    "gradients of embedded tokens",
)
_DTYPE_CODES: dict[object, int] = {dtype: code for code, dtype in enumerate(DTYPES)}


@sendable
@dataclass(frozen=True)
class EdgeReport:
    """The transport of an edge, the messages from one stage to another, seen from one of the edge's two ranks.

    Attributes:
        peer_rank: the rank at the other end.
        transport: "shm" (memory that both ranks map), "c10d" (the process group), or "loopback" (threads). Between GPUs
            also "copy" or "nccl".
        rate: between GPUs: bytes per second of the test message at set-up; else 0.
        why: between GPUs: the reason for this transport, in words.
    """

    source_stage: int
    destination_stage: int
    peer_rank: int
    transport: str
    rate: float = 0.0
    why: str = ""


class Pipeline(OfOneProcess):
    """The rank's place in a pipeline, equal for every order: modules, edges, tier, tied copies.

    Args:
        modules: modules of the rank's stages, in ascending order.
        schedule: an order with the rank of each stage.
        agreement: comparison of all ranks' arguments.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        options: Options,
        group: RankGroup,
        schedule: Schedule,
        agreement: Agreement,
        gpu_part: Callable[[str], Any] = above,
    ) -> None:
        self.group, self.device, self.options, self.agreement = group, device, options, agreement
        self.rank, self.num_ranks = group.rank, group.size
        self.num_stages, self.rank_of_stage = schedule.num_stages, schedule.rank_of_stage
        stages = [i for i, rank in enumerate(self.rank_of_stage) if rank == self.rank]
        if len(stages) != len(modules):
            raise ValueError(
                f"rank {self.rank} holds stages {stages} in this schedule, {len(modules)} modules were given"
            )
        self.modules = dict(zip(stages, modules, strict=True))  # by stage
        self.has_first, self.has_last = 0 in self.modules, self.num_stages - 1 in self.modules
        for shard in (options.head, options.embedding_shard):
            if shard is not None:
                shard.check_place(self.rank, self.num_ranks)
        self.parallels: dict[int, Any] = {}  # Ddp or Fsdp of the rank's modules that are wrapped, by id
        for place, module in self.placed_modules():
            if (found := data_parallel(place, module)) is not None:
                self.parallels[id(module)] = found
        self._gpu_part = gpu_part
        self.tier: Tier | None = None
        if (offload := options.memory.offload) is where.HOST:
            host_tier = gpu_part("host tier")
            host_tier.check(device)
            self.tier = host_tier(device, group)
        elif offload is not None:
            where.check("folder", f"Memory.offload={os.fspath(offload)!r}", device)
            self.tier = FileTier(offload, group.group)
        self.tied = TiedParameters([(place, without_wrapper(m)) for place, m in self.placed_modules()], group)
        self.edges: tuple[EdgeReport, ...] = ()  # of the rank, once open
        self.device_edges: Any = None  # edges between GPUs
        self.gpu: Any = None  # the core's handle of the stages' GPU, once edges are open
        # Whether messages of this pipeline go over edges between GPUs.
        self.is_between_gpus: bool = TRANSPORTS[options.transport].between_gpus or (
            options.transport == "auto" and gpu_part("edges").serve(device, group)
        )
        self._is_receiver: dict[Edge, bool] = {}
        self._ends: dict[Edge, Any] = {}
        self._closed = self._running = False

    def placed_modules(self) -> list[tuple[str, nn.Module]]:
        """Returns the rank's modules as given, each with its place in words: embedding, stages, loss module."""
        options = self.options
        modules = [(f"stage {i}", module) for i, module in self.modules.items() if isinstance(module, nn.Module)]
        if options.embedding is not None:
            modules.insert(0, ("the embedding", options.embedding))
        if (self.has_last or options.head is not None) and isinstance(options.loss_fn, nn.Module):
            modules.append(("the loss", options.loss_fn))
        return modules

    def bare_modules(self) -> list[nn.Module]:
        """Returns the modules of the rank without wrappers, in the order of :meth:`placed_modules`."""
        return [without_wrapper(module) for _, module in self.placed_modules()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the rank's parameters, each once, by names in modules; copies of a tied parameter have one name."""
        seen: set[int] = set()
        tied = self.tied.names()
        for module in self.bare_modules():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield tied.get(id(parameter), name), parameter

    def connect(self, program: Any) -> None:
        """Opens the rank's ends of all edges of a program; all ranks take the edges in equal order."""
        for found in edges_of(program):
            if self.rank in (found.source_rank, found.destination_rank):
                edge, receiver = _edge_of(found), self.rank == found.destination_rank
                text = f"{_CHANNELS[edge.channel]} of stage {edge.source} to stage {edge.destination}"
                peer = found.source_rank if receiver else found.destination_rank
                self._is_receiver[edge] = receiver
                self._ends[edge] = self.group.edge_end(edge, peer, receiver, text)
        self.edges = tuple(self._edge_reports())
        if self.device.type == "cuda" and not self.is_between_gpus:
            self.gpu = _C.device_create(None, self.device.index)

    def connect_gpus(self) -> None:
        """Chooses the transport of each edge between GPUs, once all ranks have called :meth:`connect`. Collective."""
        self.device_edges = self._gpu_part("edges")(self.options.transport, self.group, self.device)
        self._ends = self.device_edges.open(self._ends, self._is_receiver)
        self.gpu = self.device_edges.gpu
        self.edges = tuple(self._edge_reports())

    def _edge_reports(self) -> Iterator[EdgeReport]:
        chosen = {} if self.device_edges is None else self.device_edges.chosen
        for edge in self._ends:
            peer = self.group.peer_of(edge)
            found = chosen[edge] if edge in chosen else (self.group.transport_to(peer),)
            yield EdgeReport(edge.source, edge.destination, peer, *found)

    def make_executor(self, program: Any, cache: Any, *, fills: bool) -> Any:
        """Makes the executor that runs a program over the open edges; ``fills``: W runs in waits."""
        ends = [self._ends.get(_edge_of(edge)) for edge in edges_of(program)]
        order = program, self.rank, self.group.group, cache, ends, self.group.is_thread
        return _C.executor_create(*order, _DTYPE_CODES, fills, leave_place, self.gpu, self.tier)

    # -- use -------------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Raises if the pipeline is closed, or inside a step."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._running:
            raise RuntimeError("the engine is inside a step already: a stage or a loss called step or eval again")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Marks the pipeline as running, on this thread, within the context; raises if a step runs already, or after
        close."""
        if self._closed or self._running:
            self.check_idle()
        self._running, self.thread = True, threading.get_ident()
        try:
            yield
        finally:
            self._running = False

    def fail(self, reason: str) -> None:
        """Ends the other ranks' work or waiting, in place of the rank's next step; see PipelineEngine.fail."""
        if self._closed or has_been_told(sys.exc_info()[1]):
            return
        if self._running:
            self.group.fail(reason)
        else:
            self.group.give_up(reason)

    def close(self) -> None:
        """Leaves the transports, once nobody holds an executor."""
        self._closed = True
        self._ends.clear()
        if self.device_edges is not None:
            self.device_edges.close()
        if self.tier is not None:
            self.tier.close()
        self.group.close()


def _edge_of(found: ProgramEdge) -> Edge:
    return Edge(found.source_stage, found.destination_stage, found.channel)


# -- which stages of a model a pipeline has ----------------------------------------------------------------------------

Place: TypeAlias = "tuple[int, int, int]"
"""A stage of the pipeline, and what its module says: the index of the model's stage, and their number."""


def places_of(stages: Iterable[tuple[int, Any]]) -> list[Place]:
    """Returns the places in the attribute ``pipeline_place``, (index, count), of stages' modules.

    A module may be wrapped, as by DDP, or hold several stages of the model in order.

    Raises:
        ValueError: the attribute has another form.
    """
    found: list[Place] = []
    for stage, module in stages:
        place = getattr(module, "pipeline_place", None)
        if place is None:
            children = module.children() if isinstance(module, nn.Module) else ()
            found += places_of((stage, child) for child in children)
            continue
        is_pair = isinstance(place, tuple) and len(place) == 2 and all(type(number) is int for number in place)
        if not is_pair or not 0 <= place[0] < place[1]:
            raise ValueError(
                f"pipeline_place of {type(module).__name__} is {place!r}, must be (index, count): the stage's index, "
                "and the number of stages of the model"
            )
        found.append((stage, *place))
    return found


def check_places(everyones: Sequence[Sequence[Place]], rank_of_stage: Sequence[int]) -> None:
    """Raises :class:`Disagreement` unless the stages with a place make one whole model, in order.

    Args:
        everyones: by rank, :func:`places_of` the rank's stages.
        rank_of_stage: the pipeline's rank of each stage.
    """
    found = sorted((place for theirs in everyones for place in theirs), key=lambda place: place[0])
    wanted = [(index, found[0][2]) for index in range(found[0][2])] if found else []
    if [(index, count) for _, index, count in found] == wanted:
        return
    given = ", ".join(f"stage {index} of {count} as stage {s} on rank {rank_of_stage[s]}" for s, index, count in found)
    count = len(rank_of_stage)
    raise Disagreement(
        f"the pipeline has {count} stage{'s' * (count > 1)}, and was given {given}: it needs all stages of one model, "
        f"each once and in order. Cut the model into {count}, and give each rank its own (the order of a rank's stages "
        "is that of engine.schedule.rank_of_stage)"
    )
