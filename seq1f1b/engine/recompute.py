"""Recomputation of whole units, or of some blocks: makes tensors again that F did not save.

F runs without a graph. R runs the stage again with the input, the unit and the random numbers of F. The order says
which units have an R (``csrc/core/unit.h``); nothing here decides.

``Memory.blocks`` recomputes a share of the blocks: a recomputed block saves only its input, and is computed again just
before its own backward, so the order needs no unit for the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seq1f1b.attention.unit import LiveUnit, current, enter
from seq1f1b.engine.features import Feature, Pass, Received
from seq1f1b.engine.model_state import GENERATORS, generator_states, is_compiled_whole, set_generator_states
from seq1f1b.engine.options import Options, check_share
from seq1f1b.engine.replicas import without_wrapper
from seq1f1b.engine.stage import Stage, StageStep
from seq1f1b.schedule import Unit

__all__: list[str] = []


class Recomputing(Feature):
    """The feature that recomputes whole units: F runs without a graph and keeps only arguments, R runs again."""

    serves = "R"

    def start(self, step: StageStep) -> bool:
        trained = (p.requires_grad for module in step.stage.modules for p in module.parameters())
        self._trains = not isinstance(step.stage.module, nn.Module) or any(trained)
        return bool(step.order.recomputed)

    def passes(self) -> Mapping[str, Pass]:
        return {"R": self.recompute}

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        if unit.is_again or unit.cell not in self._step.order.recomputed:
            return None
        unit.kept = StartingState(inputs, self._step.kwargs_of(unit), self._step.stage.device, self._trains)
        return unit.kept.first()  # type: ignore[no-any-return]

    def recompute(self, cell: int, received: Received) -> None:
        """R(m.s): makes the tensors that F would have saved. The loss and the outputs are F's."""
        unit = self._step.units[cell]
        kept, unit.kept = unit.kept, None
        left, unit.carried_out = unit.carried_out or {}, None  # R carries the states out again, with graphs
        unit.auxiliary = None
        unit.is_again = True
        enter(unit)
        with kept.again():
            self._step.run(unit, kept.inputs)
        unit.is_again = False
        again: dict[int, Tensor] = unit.carried_out or {}
        if left.keys() != again.keys():
            raise RuntimeError(
                f"stage {unit.stage} has carried out states {sorted(again)} in R, and {sorted(left)} in F: "
                "a stage that is recomputed must do the same both times"
            )


class StartingState:
    """State that F leaves to R: arguments of the stage, and states of random number generators.

    Args:
        trains: whether the stage has parameters that require grad.
    """

    def __init__(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, trains: bool) -> None:
        self.inputs = inputs
        self._kwargs, self._device, self._trains = kwargs, device, trains
        self._random = generator_states(device)
        self._read: list[tuple[Tensor, int]] = []  # tensors given to F, and versions
        for value in (*inputs, *kwargs.values()):
            self.note(value)

    def note(self, value: Any) -> None:
        """Notes a value that F reads, and R will read again."""
        if isinstance(value, Tensor):
            self._read.append((value, value._version))

    @contextmanager
    def first(self) -> Iterator[None]:
        """Runs F without a graph and without autocast's cache; raises RuntimeError if F changed its input.

        In torch without the fix of pytorch#158232, R would find in the cache a weight cast by F without a graph, and
        the weight's gradient would be lost.
        """
        kind = self._device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        without_cache = nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype, cache_enabled=False)
        with torch.no_grad(), without_cache:
            yield
        if any(tensor._version != version for tensor, version in self._read):
            raise RuntimeError(
                "the stage has changed its input, or a state that it carried in, in place. A recomputed unit starts "
                "from them once more: let it work on a copy, or leave the unit out of Memory.recompute"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Sets the random state of F for R; afterwards restores the state before R."""
        before = generator_states(self._device)
        set_generator_states(self._device, self._random)
        try:
            yield
        finally:
            set_generator_states(self._device, before)

    def with_gradient(self, output: Tensor, carried: Mapping[int, Tensor] | None) -> Tensor:
        """Returns F's output, marked if a gradient may come: whether the graph needs a gradient, only R will show."""
        if not (output.is_floating_point() or output.is_complex()):
            return output
        given = (*self.inputs, *self._kwargs.values(), *(carried or {}).values())
        may = self._trains or any(isinstance(t, Tensor) and t.requires_grad for t in given)
        return output.detach().requires_grad_(may)


def one_at_a_time(run: Pass) -> Pass:
    """Returns ``run`` under a lock on random numbers, for ranks that are threads and share generators."""

    def alone(cell: int, received: Received) -> Any:
        with GENERATORS:
            return run(cell, received)

    return alone


# -- blocks ------------------------------------------------------------------------------------------------------------

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class BlockRecomputing(Feature):
    """The feature that computes some blocks of a stage again, each just before its own backward.

    Recomputed are the first blocks of the list in ``Memory.blocks``: the share of the list's length, rounded up.

    Raises:
        ValueError: the stage has no list of the name, or a block is compiled.
    """

    def __init__(self, stage: Stage, options: Options) -> None:
        self.is_idle = options.memory.blocks is None
        if options.memory.blocks is None:
            return
        module: Any = without_wrapper(stage.module)
        self.index, (name, self.share) = stage.index, options.memory.blocks
        try:
            found = module.get_submodule(name)
        except AttributeError:
            raise ValueError(f"Memory.blocks: stage {self.index} has no list of blocks named {name!r}") from None
        if not isinstance(found, _LISTS):
            raise ValueError(
                f"Memory.blocks: {name!r} of stage {self.index} is a {type(found).__name__}, must be a ModuleList, "
                "ModuleDict or Sequential"
            )
        self.modules: Sequence[nn.Module] = [*found.children()]
        path = name.split(".")
        around = [".".join(path[:n]) for n in range(len(path))]
        for where in (*around, *(f"{name}.{block}" for block, _ in found.named_children())):
            if is_compiled_whole(module.get_submodule(where)):
                raise ValueError(
                    f"Memory.blocks: {where or 'the module'} of stage {self.index} is compiled, so its blocks cannot "
                    "be computed again in some units alone; use Memory(recompute=...), which runs the whole stage again"
                )

    def start(self, step: StageStep) -> bool:
        self._count = 0  # in all units
        return bool(self.modules) and step.batch.training

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> None:
        """Sets the number of blocks that the unit's backward computes again."""
        share, m, s = self.share, unit.microbatch, unit.segment
        if unit.cell in self._step.order.recomputed:
            return
        if callable(share):
            share = check_share(share(Unit("F", self.index, m, s)), f"of F{m}.{s}")
        unit.blocks_again = math.ceil(share * len(self.modules))
        self._count += unit.blocks_again

    def figures(self) -> Mapping[str, Any]:
        return {"blocks_again": self._count}

    @contextmanager
    def in_step(self, others: Sequence[nn.Module]) -> Iterator[None]:
        """Replaces the forwards of blocks: a block asks the running unit whether to compute the block again."""
        replaced = [block.__dict__.get("forward") for block in self.modules]  # None: the forward of its class
        for at, block in enumerate(self.modules):
            block.__dict__["forward"] = partial(_run_block, block.forward, at)
        try:
            yield
        finally:
            for block, own in zip(self.modules, replaced, strict=True):
                block.__dict__.pop("forward", None)
                if own is not None:
                    block.__dict__["forward"] = own


def _run_block(own: Callable[..., Any], at: int, *arguments: Any, **named: Any) -> Any:
    """Runs a block's own forward in a training step, under a checkpoint if the block is computed again."""
    unit = current()
    if unit is None or at >= unit.blocks_again or not torch.is_grad_enabled():
        return own(*arguments, **named)
    return checkpoint(own, *arguments, use_reentrant=False, **named)
