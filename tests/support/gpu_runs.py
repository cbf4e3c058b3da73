"""Ranks on GPUs, or on stand-ins for these, and steps of a small pipeline against the same model run whole."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import PipedProcesses, join_and_run
from tiny_model import Config, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor, nn

from seq1f1b import Limits, Memory, PipelineEngine, PipelineError, build_schedule, init_process_group
from seq1f1b.testing import run_ranks
from seq1f1b.transport.edges import TRANSPORTS

MOVERS = ["auto", *(name for name, row in TRANSPORTS.items() if row.between_gpus)]
LIMITS = Limits(step=20.0, first_step=40.0)
PROCESS_LIMIT_S = 120.0  # for a rank's whole function, set-up included
LENGTH = 40
STAND_IN_OF_NCCL = "the stand-in for NCCL connects threads of one process only"


@dataclass
class Rank:
    """One rank of the processes, or threads, that run a test together.

    Attributes:
        group: of the pipeline; None: torch's default process group.
        engine: the class; that of a rehearsal has GPUs that are stand-ins.
    """

    rank: int
    world: int
    device: torch.device
    group: Any = None
    engine: type[PipelineEngine] = PipelineEngine

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


class Ranks:
    """Starts the ranks of a test.

    Args:
        is_torchruns: whether torchrun has started this process as one rank of several.
        is_rehearsed: GPUs are stand-ins (tests/stand_ins).
    """

    def __init__(self, is_torchruns: bool, is_rehearsed: bool) -> None:
        self.is_torchruns, self.is_rehearsed = is_torchruns, is_rehearsed
        self._own: Rank | None = None
        self.world = int(os.environ["WORLD_SIZE"]) if is_torchruns else max(2, torch.cuda.device_count())
        self.of_host = int(os.environ["LOCAL_WORLD_SIZE"]) if is_torchruns else self.world

    @property
    def share_gpus(self) -> bool:
        return not self.is_rehearsed and self.of_host > torch.cuda.device_count()

    def why_not(self, transport: str) -> str:
        """Why a transport cannot connect these ranks; "" if it can."""
        if transport == "nccl" and self.share_gpus:
            return "NCCL takes one rank for each GPU, and there are fewer GPUs than ranks"
        if transport == "nccl" and self.is_rehearsed and self.is_torchruns:
            return STAND_IN_OF_NCCL
        if self.of_host < self.world and "c10d" not in TRANSPORTS[transport].over:
            return f"{transport} is for ranks of one host"
        return ""

    def run(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of ``fn(rank, *arguments)`` by rank; under torchrun that of this process alone."""
        if self.is_torchruns:
            own = int(os.environ["RANK"]), self.world, "", self.share_gpus, self.is_rehearsed
            self._own = self._own or join(*own)
            return [fn(self._own, *arguments)]
        if self.is_rehearsed:
            return run_ranks(2, lambda group: fn(stand_in_rank(group.rank, 2, group), *arguments))
        return self.run_processes(self.world, fn, *arguments)

    def leave(self) -> None:
        if self._own is not None:
            dist.destroy_process_group()

    def run_processes(self, world: int, fn: Callable[..., Any], *arguments: Any, lost: int = -1) -> list[Any]:
        """As ``run``, in new processes of this host, which end with the call. The rank ``lost`` returns nothing."""
        stand_ins = ""
        if self.is_rehearsed:
            from stand_in_library import stand_in

            stand_ins = stand_in().path
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/store"
            with PipedProcesses(world, start, world, path, stand_ins, self.share_gpus, fn, *arguments) as ranks:
                found = [ranks.receive(rank, PROCESS_LIMIT_S) for rank in range(world) if rank != lost]
                if lost >= 0:
                    ranks.processes[lost].kill()
        errors = [value for kind, value in found if kind == "error"]
        assert not errors, "\n".join(errors)
        return [value for _, value in found]


def start(
    rank: int, pipe: Any, world: int, path: str, stand_ins: str, share_gpus: bool, fn: Any, *arguments: Any
) -> None:
    """A process of one rank."""
    own: list[Rank] = []

    def enter(rank: int) -> None:
        if stand_ins:
            os.environ |= {"SEQ1F1B_STAND_IN": stand_ins, "SEQ1F1B_NCCL": stand_ins}
        own.append(join(rank, world, path, share_gpus, bool(stand_ins)))

    join_and_run(rank, pipe, enter, lambda rank, pipe: fn(own[0], *arguments))


def join(rank: int, world: int, path: str, share_gpus: bool, is_rehearsed: bool) -> Rank:
    """Joins the process group: that of torchrun, or one that meets in the file."""
    backend = "gloo" if share_gpus or is_rehearsed else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(path, world) if path else None
    if not is_rehearsed:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    init_process_group(backend, store=store, rank=rank, world_size=world)
    if not is_rehearsed:
        return Rank(rank, world, torch.device("cuda", torch.cuda.current_device()))
    from stand_in_library import stand_in

    stand_in().reset(rank)
    return stand_in_rank(rank, world)


def stand_in_rank(rank: int, world: int, group: Any = None) -> Rank:
    from stand_in_engine import StandInEngine

    return Rank(rank, world, torch.device("cpu"), group, StandInEngine)


def poison(device: torch.device, *, of_driver: bool = False) -> None:
    """Fills what torch's allocator, or the driver, hands out next with NaN: a read before any write shows it."""
    sizes = range(8, 25 if device.type == "cuda" else 17)
    blocks = [torch.full((1 << bits,), float("nan"), device=device) for bits in sizes]
    del blocks
    if of_driver and device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# -- steps -----------------------------------------------------------------------------------------------------------


class Order(NamedTuple):
    """A family of schedules, its stages on each rank, and the tokens of each segment."""

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
    """Makes a function through which units end up to a millisecond late, at random, on the host or on the device."""
    source = random.Random(rank.rank)

    def wait() -> None:
        seconds = source.random() * 1e-3
        if rank.is_cuda and source.random() < 0.5:
            torch.cuda._sleep(int(seconds * 1e9))  # cycles
        else:
            time.sleep(seconds)

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            wait()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            wait()
            return gradient

    return Late.apply


_MAKING = threading.Lock()  # models: ranks that are threads share torch's generator


def train(
    rank: Rank, transport: str, name: str, dtype: torch.dtype = torch.float32, memory: Memory | None = None
) -> dict[str, float]:
    """Steps of different batches with random delays: what an earlier step has left behind is wrong in a later one.

    Returns the worst error of this rank's gradients, and the most that it may be: twice that of the whole model in the
    same dtype, and a rounding.
    """
    order, num_microbatches = ORDERS[name], rank.world * (2 if rank.world < 4 else 1)
    schedule = build_schedule(
        order.schedule, num_ranks=rank.world, num_microbatches=num_microbatches,
        num_segments=len(order.sizes), stages_per_rank=order.stages_per_rank,
    )  # fmt: skip
    config = Config(kv_heads=2, layers=max(4, schedule.num_stages))
    with _MAKING:
        exact, whole = (whole_model(config, each).to(rank.device) for each in (torch.float64, dtype))
        own = [i for i, holder in enumerate(schedule.rank_of_stage) if holder == rank.rank]
        stages = [stage_of(whole, config, i, schedule.num_stages).to(rank.device) for i in own]
    names = {name for stage in stages for name, _ in stage.named_parameters()}
    late = delays(rank)
    for stage in stages:
        stage.register_forward_hook(lambda module, inputs, output: late(output))
    poison(rank.device, of_driver=True)
    engine = rank.engine(
        stages, transport=transport, group=rank.group, schedule=schedule,
        num_microbatches=num_microbatches, num_segments=len(order.sizes), segment_sizes=list(order.sizes),
        loss_fn=cross_entropy, limits=LIMITS, memory=memory or Memory(),
    )  # fmt: skip
    rows, found = 2 * num_microbatches, {"error": 0.0, "limit": 1.0}
    for step in range(3 + rank.is_cuda):  # copies go through host memory in the first step of a shape
        for parameter in engine.parameters():
            parameter.grad = None
        tokens, target = tokens_of(rank, rows, step)
        poison(rank.device)
        engine.step(tokens, target=target)
        gradients = {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}
        truth, peer = (run_whole(model, tokens, target, num_microbatches)[1] for model in (exact, whole))
        limit = 2 * gradient_error(peer, truth) + (1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps)
        assert limit < 0.2, f"the whole model itself is {limit / 2:.1e} off float64 in {dtype}"
        assert gradients.keys() == names, f"no gradient came to {sorted(names - gradients.keys())}"
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        error = gradient_error({**truth, **gradients}, truth) if is_finite else float("inf")
        if error / limit >= found["error"] / found["limit"]:
            found = {"error": error, "limit": limit}
    engine.close()
    return found


def is_right(found: dict[str, float]) -> bool:
    return found["error"] <= found["limit"]


def tokens_of(rank: Rank, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(Config.vocab, (rows, LENGTH + 1), generator=generator).to(rank.device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def small_engine(rank: Rank, transport: str, limits: Limits) -> tuple[nn.Module, PipelineEngine]:
    config = Config(layers=max(4, rank.world))
    with _MAKING:
        stage = stage_of(whole_model(config, torch.float32), config, rank.rank, rank.world).to(rank.device)
    options = {"num_microbatches": 4, "num_segments": 2, "loss_fn": cross_entropy, "limits": limits}
    return stage, rank.engine(stage, transport=transport, group=rank.group, **options)


def steady(rank: Rank, transport: str) -> list[tuple[int, int]]:
    """Bytes that tensors and torch's allocator hold, after each of some equal steps."""
    _, engine = small_engine(rank, transport, LIMITS)
    tokens, target = tokens_of(rank, 8, 0)
    found = []
    for _ in range(6):
        engine.step(tokens, target=target)
        held = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if rank.is_cuda else (0, 0)
        found.append(held)
    engine.close()
    return found


# -- ranks that are lost -----------------------------------------------------------------------------------------------

LOST, STEP_LIMIT_S = 1, 5.0


def lose_a_rank(rank: Rank, transport: str, kind: str) -> tuple[int | None, float, str]:
    """Rank 1 is killed in its second step, or stalls, or its GPU fails in the last forward, while the host goes on.

    Returns whom this rank blames, after how long, and why.
    """
    stage, engine = small_engine(rank, transport, Limits(step=STEP_LIMIT_S, first_step=LIMITS.first_step))
    tokens, target = tokens_of(rank, 8, 0)
    engine.step(tokens, target=target)
    units = itertools.count(1)

    def leave(module: nn.Module, inputs: Any) -> None:
        if rank.rank != LOST or next(units) != (8 if kind == "asserts" else 2):
            return
        if kind == "asserts":
            torch.cuda._sleep(10**8)  # cycles
            torch.ones(1, device=rank.device)[torch.tensor([9], device=rank.device)]
        else:
            os.kill(os.getpid(), signal.SIGKILL) if kind == "killed" else time.sleep(600)

    stage.register_forward_pre_hook(leave)
    begin = time.monotonic()
    try:
        engine.step(tokens, target=target)
    except PipelineError as error:
        blamed, seconds, text = getattr(error, "rank", None), time.monotonic() - begin, str(error)
        engine.close()
        return blamed, seconds, text
    raise AssertionError(f"rank {rank.rank} ended a step well without rank {LOST}")
