"""Stages under data parallelism, and a loss that holds the last stage's head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_model import Stage, cross_entropy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Head(nn.Module):
    """The last stage's norm and head, inside the loss."""

    def __init__(self, stage: Stage, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.norm, self.head, self.loss_fn = stage.norm, stage.head, loss_fn

    def forward(self, hidden: Tensor, target: Tensor) -> Any:
        return self.loss_fn(self.head(self.norm(hidden)), target)


def take_head(stage: Stage, loss_fn: Callable[..., Any] = cross_entropy) -> Head:
    head = Head(stage, loss_fn)
    del stage.norm, stage.head
    return head


def wrap(kind: str, module: nn.Module, group: Any, mesh: Any) -> nn.Module:
    if kind == "fsdp":
        for block in module.blocks.values() if hasattr(module, "blocks") else ():
            fully_shard(block, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    return DistributedDataParallel(
        module, process_group=group, find_unused_parameters=kind == "ddp unused", init_sync=False
    )
