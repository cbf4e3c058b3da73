"""Blocks of a stage that a unit computes again in its backward, one by one, and so saves their inputs alone.

Between a unit that keeps all and one that is recomputed whole: a share of the blocks. It needs no unit of its own in
the order, since every block is computed again just before its own backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seq1f1b.ops.unit import LiveUnit, current
from seq1f1b.runtime.arguments import Options, check_share
from seq1f1b.runtime.compiled import is_compiled_whole
from seq1f1b.runtime.data_parallel import without_wrapper
from seq1f1b.runtime.parts import Feature, Part
from seq1f1b.runtime.stage import Stage, StageStep
from seq1f1b.schedule import Unit

__all__: list[str] = []

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class BlockRecomputing(Feature):
    """Lets units compute some blocks of a stage again, each just before its own backward: of the list that
    ``Memory.blocks`` names, the first ones, by its share of them, rounded up.

    Raises:
        ValueError: the stage has no such list, or a block is compiled.
    """

    def __init__(self, stage: Stage, options: Options, tier: Any) -> None:
        self.modules: Sequence[nn.Module] = ()
        if options.memory.blocks is None:
            return
        module: Any = without_wrapper(stage.module)  # type: ignore[arg-type]
        self.index, (name, self.share) = stage.index, options.memory.blocks
        try:
            found = module.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"Memory.blocks: stage {self.index} has no list of blocks named {name!r}: {error}"
            ) from None
        if not isinstance(found, _LISTS):
            raise ValueError(
                f"Memory.blocks: {name!r} of stage {self.index} is a {type(found).__name__}, must be a ModuleList, a "
                "ModuleDict or a Sequential"
            )
        self.modules = [*found.children()]
        path = name.split(".")
        around = [".".join(path[:n]) for n in range(len(path))]
        for where in (*around, *(f"{name}.{block}" for block, _ in found.named_children())):
            if is_compiled_whole(module.get_submodule(where)):
                raise ValueError(
                    f"Memory.blocks: {where or 'the module'} of stage {self.index} is compiled, so its blocks cannot "
                    "be computed again in some units alone; use Memory(recompute=...), which runs the whole stage again"
                )

    def begin(self, step: StageStep) -> BlocksAgain | None:
        return BlocksAgain(step, self) if self.modules and step.arguments.training else None


class BlocksAgain(Part):
    """Says of each unit how many blocks its backward computes again."""

    def __init__(self, step: StageStep, blocks: BlockRecomputing) -> None:
        self._step, self._blocks = step, blocks
        self._count = 0  # in all units

    def begin(self, unit: LiveUnit) -> None:
        share, m, s = self._blocks.share, unit.microbatch, unit.segment
        if unit.cell in self._step.order.recomputed:
            return
        if callable(share):
            share = check_share(share(Unit("F", self._blocks.index, m, s)), f"of F{m}.{s}")
        unit.blocks_again = math.ceil(share * len(self._blocks.modules))
        self._count += unit.blocks_again

    def figures(self) -> Mapping[str, Any]:
        return {"blocks_again": self._count}

    @contextmanager
    def in_step(self, others: Sequence[nn.Module]) -> Iterator[None]:
        """Within, a block looks at the running unit to see whether its backward computes it again."""
        for at, block in enumerate(self._blocks.modules):
            block.__dict__["forward"] = _Forward(block.forward, at)
        try:
            yield
        finally:
            for block in self._blocks.modules:
                forward = block.__dict__.pop("forward", None)
                own = forward.own if isinstance(forward, _Forward) else forward
                if own is not None and getattr(own, "__func__", None) is not type(block).forward:
                    block.__dict__["forward"] = own  # the instance had one of its own


class _Forward:
    """In place of a block's own forward, while a training step runs."""

    def __init__(self, own: Callable[..., Any], at: int) -> None:
        self.own, self._at = own, at

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        unit = current()
        if unit is None or self._at >= unit.blocks_again or not torch.is_grad_enabled():
            return self.own(*arguments, **named)
        return checkpoint(self.own, *arguments, use_reentrant=False, **named)
