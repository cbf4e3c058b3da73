"""Messages between the ranks of a run, outside of steps; without a process group there is one rank."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import seq1f1b

T = TypeVar("T")


class StopRequest:
    """SIGINT and SIGTERM ask for an end of the run; the ranks agree on it between steps, where all can stop alike."""

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; every rank calls it."""
        return total(self.made) > 0


class PlaceError(ValueError):
    """The processes cannot be laid out as asked."""


class Place:
    """Place of this process among replicas and stages: ranks count stages first, so that neighbours are near.

    group: of the pipeline; None: all processes.
    """

    def __init__(self, num_replicas: int = 1, kind: str = "cpu") -> None:
        self.num_replicas, self.num_stages = num_replicas, num_ranks() // num_replicas
        if self.num_replicas * self.num_stages != num_ranks():
            raise PlaceError(f"{num_ranks()} processes are no multiple of --data-parallel {num_replicas}")
        self.replica, self.stage = divmod(rank(), self.num_stages)
        self.group = self._mesh = None
        if num_replicas > 1:
            self._mesh = init_device_mesh(kind, (num_replicas, self.num_stages), mesh_dim_names=("replica", "stage"))
            self.group = self._mesh.get_group("stage")

    def share(self, batch: Tensor) -> Tensor:
        """Returns this replica's part of a batch."""
        return batch.chunk(self.num_replicas)[self.replica]

    def sharded(self, module: nn.Module) -> nn.Module:
        """Cuts the module's parameters, and what hangs on them, over the replicas (FSDP2)."""
        return module if self._mesh is None else fully_shard(module, mesh=self._mesh["replica"])


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def join(kind: str, *, by_nccl: bool) -> None:
    """Meets the other processes, if torchrun started this one.

    by_nccl: whether tensors on GPUs go from process to process by other ways than the engine's.
    """
    by_nccl &= kind == "cuda"
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if by_nccl and 0 < gpus < processes:
        raise PlaceError(f"--compare and --data-parallel go by NCCL, a GPU for each process: {processes} share {gpus}")
    if "RANK" in os.environ and (kind == "cpu" or gpus):
        seq1f1b.init_process_group("cpu:gloo,cuda:nccl" if by_nccl else "gloo")
    device(kind)  # once CUDA knows for how many hardware queues it is asked


def device(kind: str) -> torch.device:
    """Returns the device of this process: "cuda" is the machine's GPUs in turn."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlaceError("--device cuda: torch sees no GPU here")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def restarted() -> bool:
    """Whether torchrun has started this run again; every rank calls it, as each machine counts by itself."""
    return total(float(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) > 0


def total(value: float) -> float:
    """Sum over the ranks; exact where all but one give 0."""
    shared = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(shared)
    return shared.item()


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank."""
    values: list[Any] = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def on_first_rank(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 alone; its result, or its error, on every rank."""
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
