"""What the ranks of a run tell each other between steps; without a process group, one rank agrees with itself."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

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


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


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
        except (ValueError, OSError) as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
