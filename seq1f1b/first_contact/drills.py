"""Do engines train right here: every kind of order, with delays at random, poisoned memory, replicas, a killed rank?"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seq1f1b._C import PipelineError
from seq1f1b.first_contact.cases import SILENCE_S, Case, Figures, Rank, drilled_transports
from seq1f1b.first_contact.model import (
    Config,
    Stage,
    batch,
    cross_entropy,
    gradient_error,
    run_whole,
    stage_of,
    whole_model,
)
from seq1f1b.schedule import build_schedule

__all__: list[str] = []

LENGTH = 40
STEPS = 3  # the first of a shape goes other ways than later ones
LONGEST_DELAY_S = 1e-3
VICTIM = 1  # the rank that is killed


class Order(NamedTuple):
    """A kind of order: a family of schedules, its stages on each rank, and how sequences are cut."""

    schedule: str
    stages_per_rank: int
    sizes: tuple[int, ...]


ORDERS = {
    "1F1B": Order("1f1b", 1, (LENGTH,)),
    "Seq1F1B": Order("seq1f1b", 1, (17, 4, 12, 7)),
    "interleaved": Order("seq1f1b-interleaved", 2, (23, 17)),
    "V": Order("seq-v-half", 2, (23, 17)),
    "split backward": Order("seq-zb-h1", 1, (17, 4, 12, 7)),
}


def delays(rank: Rank) -> Callable[[Tensor], Tensor]:
    """For a stage: each unit, forwards and backwards, ends late at random, on the host or on the device."""
    source = random.Random(rank.rank)

    def wait() -> None:
        seconds = source.random() * LONGEST_DELAY_S
        if rank.is_cuda and source.random() < 0.5:
            torch.cuda._sleep(int(seconds * 1e9))  # type: ignore[no-untyped-call] # cycles
        else:
            time.sleep(seconds)

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            wait()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            wait()
            return gradients[0]

    return Late.apply


class Truth:
    """The right results of a step: gradients in float64, and how far the whole model in the same dtype is from them."""

    def __init__(self, rank: Rank, layers: int, dtype: torch.dtype) -> None:
        self.config = Config(layers=layers, length=LENGTH)
        self._exact = whole_model(self.config).to(rank.device)
        self.model = whole_model(self.config).to(rank.device, dtype)
        self._device, self._dtype = rank.device, dtype

    def batch(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        tokens, target = batch(self.config, rows, LENGTH, seed)
        return tokens.to(self._device), target.to(self._device)

    def check(self, own: dict[str, Tensor], names: list[str], tokens: Tensor, target: Tensor, count: int) -> Figures:
        """Raises where the gradients of the names are further from the truth than those of the whole model may be.

        Args:
            count: micro-batches.
        """
        truth = run_whole(self._exact, tokens, target, count)
        whole = run_whole(self.model, tokens, target, count)
        missing = sorted(set(names) - set(own))
        assert not missing, f"no gradient came to {', '.join(missing)}"
        theirs, ours = gradient_error(whole, truth), gradient_error(own, truth, names)
        assert theirs < 0.1, f"the whole model itself is {theirs:.1e} off float64 in {self._dtype}"
        floor = 1e-12 if self._dtype == torch.float64 else torch.finfo(self._dtype).eps
        limit = 2 * theirs + floor
        assert ours <= limit, f"gradients are {ours:.1e} off float64, the whole model in {self._dtype} {theirs:.1e}"
        return {"error": ours, "whole model's error": theirs}


class Pipeline(NamedTuple):
    """The pipeline that a rank is in, and the replica of the model that it is. wrap: of a stage, over the replicas."""

    place: int
    size: int
    group: Any = None
    replica: int = 0
    replicas: int = 1
    wrap: Callable[[Stage], nn.Module] = lambda stage: stage


def run_steps(
    rank: Rank, transport: str, order: Order, dtype: torch.dtype, pipeline: Pipeline, *, thorough: bool = True
) -> Figures:
    """Steps of different batches: what an earlier step has left is wrong in a later one."""
    P, k = pipeline.size, len(order.sizes)
    M = 2 * P if P < 4 else P
    schedule = build_schedule(
        order.schedule, num_ranks=P, num_microbatches=M, num_segments=k, stages_per_rank=order.stages_per_rank
    )
    truth = Truth(rank, max(4, schedule.num_stages), dtype)
    own = [i for i, holder in enumerate(schedule.rank_of_stage) if holder == pipeline.place]
    stages = [stage_of(truth.model, truth.config, i, schedule.num_stages) for i in own]
    for stage in stages if thorough else ():
        stage.delay = delays(rank)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    rank.poison_device()
    engine = rank.make_engine(
        [pipeline.wrap(stage) for stage in stages], transport=transport, group=pipeline.group, schedule=schedule,
        num_microbatches=M, num_segments=k, segment_sizes=list(order.sizes), loss_fn=cross_entropy,
    )  # fmt: skip
    found: Figures = {}
    count = STEPS + rank.is_cuda  # copies go through host memory in the first step of a shape
    for step in range(count):
        for parameter in engine.parameters():
            parameter.grad = None
        tokens, target = truth.batch(2 * M * pipeline.replicas, step)
        part = slice(2 * M * pipeline.replica, 2 * M * (pipeline.replica + 1))
        rank.poison()
        engine.step(tokens[part], target=target[part])
        if not thorough and step < count - 1:
            continue
        gradients = {n: whole_gradient(p.grad) for n, p in engine.named_parameters() if p.grad is not None}
        found = truth.check(gradients, names, tokens, target, M * pipeline.replicas)
    engine.close()
    return found


def whole_gradient(gradient: Any) -> Tensor:
    """The whole of what may be a shard of it (DTensor)."""
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def drill(
    rank: Rank, transport: str, order: str, dtype: torch.dtype = torch.float32, *, thorough: bool = True
) -> Figures:
    """thorough: units end late, at random, and every step is looked at; else the last one is."""
    rank.need(transport)
    pipeline = Pipeline(rank.rank, rank.world, rank.group)
    return run_steps(rank, transport, ORDERS[order], dtype, pipeline, thorough=thorough)


def replicas(rank: Rank, transport: str, kind: str) -> Figures:
    """Two replicas of two stages; neighbours in a pipeline are neighbours among the ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard  # here: it takes seconds

    rank.need(transport)
    pipelines, data = ([rank.new_group(ranks) for ranks in rows] for rows in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    replica, index = divmod(rank.rank, 2)
    own = data[index]

    def wrap(stage: Stage) -> nn.Module:
        if kind == "DDP":
            return DistributedDataParallel(stage, process_group=own, init_sync=False)
        mesh = DeviceMesh.from_group(own, rank.device.type)
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh)
        sharded: nn.Module = fully_shard(stage, mesh=mesh)  # type: ignore[assignment] # it is the stage
        return sharded

    pipeline = Pipeline(index, 2, pipelines[replica], replica, 2, wrap)
    return run_steps(rank, transport, ORDERS["Seq1F1B"], torch.float32, pipeline)


def drills(rank: Rank) -> Iterator[Case]:
    for name in ORDERS:
        for transport in drilled_transports():
            yield f"{name}, {transport}", functools.partial(drill, rank, transport, name)
    if rank.world == 4:
        for kind in ("DDP", "FSDP2"):
            for transport in drilled_transports():
                name = f"2 replicas by {kind}, {transport}"
                yield name, functools.partial(replicas, rank, transport, kind)


# -- a rank that is killed -------------------------------------------------------------------------------------------


def lose_a_rank(rank: Rank, transport: str) -> Figures:
    """One rank dies in its second step; every other one says so in time."""
    rank.need(transport)
    truth = Truth(rank, 4, torch.float32)
    stage = stage_of(truth.model, truth.config, rank.rank, rank.world)
    units = 0

    def die(x: Tensor) -> Tensor:
        nonlocal units
        units += 1
        if units == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    engine = rank.make_engine(stage, transport=transport, num_microbatches=4, num_segments=2, loss_fn=cross_entropy)
    tokens, target = truth.batch(8, 0)
    engine.step(tokens, target=target)
    if rank.rank == VICTIM:
        stage.delay = die
    start = time.monotonic()
    try:
        engine.step(tokens, target=target)
    except PipelineError as error:
        seconds = time.monotonic() - start
        blamed = getattr(error, "rank", None)
        assert blamed == VICTIM, f"rank {blamed} is to blame for a death of rank {VICTIM}: {error}"
        assert seconds < SILENCE_S + 10, f"rank {rank.rank} took {seconds:.0f} s to say that a rank is gone"
        engine.close()
        return {"seconds to the error": round(seconds, 2), f"rank {rank.rank} says": str(error)[:200]}
    raise AssertionError(f"rank {rank.rank} ended a step well without rank {VICTIM}")


def killed(rank: Rank) -> Iterator[Case]:
    for transport in drilled_transports():
        yield transport, functools.partial(lose_a_rank, rank, transport)
