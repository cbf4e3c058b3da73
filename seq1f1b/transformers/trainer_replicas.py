"""Trains replicas of a pipeline under a Trainer: each replica takes some rows of every batch; gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seq1f1b.engine.engine import PipelineEngine
from seq1f1b.transformers.saving import together
from seq1f1b.transport.values import pack, unpack

__all__: list[str] = []


class Replicas:
    """The place of this process among all processes of the launcher, which form ``count`` pipelines of equal length.

    The processes of one pipeline have consecutive ranks.

    Attributes:
        count, index: number of pipelines, and index of this process's pipeline.
        rank, num_ranks: index of this process, and number of processes, over all pipelines.
        pipeline: process group of the engine; None: the default group.
    """

    engine: PipelineEngine

    def __init__(self, count: Any, device: torch.device) -> None:
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if not isinstance(count, int) or count < 1 or self.num_ranks % count:
            raise ValueError(f"pipeline={{'replicas': {count!r}}}: give a divisor of {self.num_ranks}, the processes")
        self.count, self._device = count, device
        self.index, self.place = divmod(self.rank, self.num_ranks // count)
        self.pipeline = self._copies = None
        if count > 1:
            ranks = torch.arange(self.num_ranks, device="cpu").view(count, -1)  # by pipeline and stage
            make: Any = dist.new_subgroups_by_enumeration  # of these groups every process gets its own
            (self.pipeline, _), (self._copies, _) = make(ranks.tolist()), make(ranks.T.tolist())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all processes, by rank. Collective; a peer's value is never executed, only data."""
        found = self.engine.all_gather_object(value)
        if self.count == 1:
            return found
        packed = pack(found)  # as JSON, which may end in spaces
        most = torch.tensor(len(packed), device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._copies)
        own = torch.tensor(list(packed.ljust(int(most))), dtype=torch.uint8, device=self._device)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(parts, own, group=self._copies)
        return [each for part in parts for each in unpack(bytes(part.tolist()))]

    def make_alike(self, stage: nn.Module) -> None:
        """Copies the first replica's weights to all replicas."""
        if self.count > 1:
            for tensor in stage.state_dict().values():
                dist.broadcast(tensor, self.place, group=self._copies)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums gradients over the replicas. A missing gradient counts as zero, for example an unused expert's."""
        if self.count == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        has = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=self._device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._copies)
        work = []
        for parameter, anywhere in zip(trained, has.tolist(), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                work.append(dist.all_reduce(parameter.grad, group=self._copies, async_op=True))
        for each in work:
            each.wait()

    def in_one(self, action: Callable[[], None]) -> None:
        """Runs an action on the first replica while the others wait. An error is raised on all replicas."""
        if self.count == 1:
            action()
        else:
            together(self, "the first replica failed", action if self.index == 0 else lambda: None)

    def from_last_stages(self, tensor: Tensor | None) -> Tensor:
        """Returns all replicas' rows on every process. One rank of each pipeline gives a tensor, the others None."""
        described = self.all_gather_object(None if tensor is None else [str(tensor.dtype), list(tensor.shape)])
        parts = []
        for source, (dtype, shape) in ((rank, what) for rank, what in enumerate(described) if what is not None):
            kind = getattr(torch, dtype.removeprefix("torch."))
            part: Any = tensor if source == self.rank else torch.empty(shape, dtype=kind, device=self._device)
            if self.num_ranks > 1:
                dist.broadcast(part, source)
            parts.append(part)
        return torch.cat(parts)
