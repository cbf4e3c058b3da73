"""Weight gradients of linear layers: added by whole backwards in one call, or left by a unit's I to its W.

While a training step runs, a stage's ``nn.Linear`` layers compute their output as always. Where the order splits the
backward, I makes only the gradients of input and bias; the pair (input, output gradient) goes to the unit's tape, and W
makes the weight's gradient from it. In a whole backward the layer adds the product to the gradient itself, where the
device has an op for that (``products.py``). All else is autograd's as ever, at I or B: what does not go this way costs
time, never correctness. [Zero Bubble, arXiv:2401.10241]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seq1f1b.runtime import products
from seq1f1b.runtime.layers import Layers
from seq1f1b.runtime.linear import Use
from seq1f1b.runtime.measure import storages_of
from seq1f1b.runtime.parts import Feature, Part, Pass, Received
from seq1f1b.runtime.stage import Stage, StageStep
from seq1f1b.runtime.unit import LiveUnit

__all__: list[str] = []


class WeightGradients(Feature):
    """Makes gradients of weights by the product itself, and in W where an order splits the backward."""

    def __init__(self, stage: Stage, options: Any, tier: Any) -> None:
        self._layers = Layers()

    def begin(self, step: StageStep) -> Deferred | None:
        stage = step.stage
        # DDP and FSDP wait for autograd to accumulate; and a whole model, to which segments are compared, is torch's.
        adds = (
            step.arguments.training
            and not stage.wrappers
            and not stage.is_whole
            and products.are_one_call(stage.device)
        )
        return Deferred(step, self._layers, adds) if step.order.split or adds else None


class Deferred(Part):
    """A tape for each unit whose backward is I and W; and W.

    Args:
        adds: whether layers add their products themselves, where they leave none to W.
    """

    def __init__(self, step: StageStep, layers: Layers, adds: bool) -> None:
        self._step, self._stage, self._layers, self._adds = step, step.stage, layers, adds
        self._noted: dict[int, int] = {}  # elements of weights that I left to W, by the weight's id
        self._added: dict[int, int] = {}  # the same of those whose layers added products themselves

    def passes(self) -> Mapping[str, Pass]:
        return {"W": self.weight}

    def in_step(self, others: Sequence[nn.Module]) -> AbstractContextManager[None]:
        losses = [module for module in self._stage.modules if module is not self._stage.module]
        return self._layers.replaced(self._stage.module, losses, others, adds=self._adds)

    def begin(self, unit: LiveUnit) -> None:
        if unit.cell in self._step.order.split:
            unit.tape = Tape(self._noted)
        if self._adds:
            unit.added = self._added

    def before_backward(self, unit: LiveUnit) -> None:
        if unit.tape is not None:
            unit.tape.is_open = True

    def weight(self, cell: int, received: Received) -> None:
        """W(m.s): the gradients of weights that I left."""
        unit, parallel = self._step.units[cell], self._stage.parallel
        tape, unit.tape = unit.tape, None
        assert tape is not None
        is_last = self._step.order.last_gradients == ("W", cell)
        is_left = bool(tape.products)  # else it has all run in waits
        tape.run()
        if parallel is not None and (is_left or is_last):
            parallel.after_weight(is_last)

    def fill(self, cell: int) -> bool:
        """Runs one product of W(m.s), whose I has run; returns whether any is left."""
        tape = self._step.units[cell].tape
        is_left = tape is not None and tape.run_next()
        if self._stage.parallel is not None and not is_left:
            # The last one has its place in the order, alike on all replicas.
            self._stage.parallel.after_weight(is_last=False)
        return is_left

    def figures(self) -> Mapping[str, Any]:
        return {
            "deferred_weights": sum(self._noted.values()),
            "fused_weights": sum((self._noted | self._added).values()),
        }


class Product(NamedTuple):
    """Inputs of W from one use of a weight, with versions that tell whether they have been changed meanwhile."""

    use: Use
    x: Tensor  # (tokens, inputs)
    dy: Tensor  # (tokens, outputs)
    versions: tuple[int, int, int]


class Tape:
    """The products that one unit leaves to its W, in the order in which its backward came to them."""

    is_open = False  # True from I on: until then a gradient is one that the stage takes for itself

    def __init__(self, noted: dict[int, int]) -> None:
        self.products: deque[Product] = deque()
        self._noted = noted  # gets the elements of every weight that a product is for, by the weight's id

    def note(self, use: Use, x: Tensor, dy: Tensor) -> None:
        if not self.is_open or torch.is_grad_enabled():
            raise RuntimeError(
                f"{use.layer.name}: the stage takes a gradient through this layer inside its forward (as by "
                "torch.autograd.grad), and a schedule that splits the backward would lose the weight's part. Use a "
                "schedule with whole backwards"
            )
        x, dy = x.detach().reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        self.products.append(Product(use, x, dy, _versions(use, x, dy)))
        self._noted[id(use.weight)] = use.weight.numel()

    def run(self) -> None:
        """W: adds every product to its weight's gradient."""
        while self.run_next():
            continue

    def run_next(self) -> bool:
        """Adds the next product and drops it; returns whether any is left. An empty tape does nothing."""
        if not self.products:
            return False
        use, x, dy, versions = self.products.popleft()
        if _versions(use, x, dy) != versions:
            raise RuntimeError(
                f"{use.layer.name}: its weight, its input or its output's gradient was changed in place between I and "
                "W, which needs all three as they were"
            )
        products.accumulate(use.weight, x, dy, use.layer.is_hooked(use.weight))
        return bool(self.products)

    def held_bytes(self, excluded: set[int]) -> tuple[int, int]:
        """Bytes of inputs and of output gradients, each storage once; ``excluded``: addresses that do not count."""
        held = []
        seen = set(excluded)
        for tensors in ([p.x for p in self.products], [p.dy for p in self.products]):
            storages = {address: size for t in tensors for address, size in storages_of(t).items()}
            held.append(sum(size for address, size in storages.items() if address not in seen))
            seen |= storages.keys()
        return held[0], held[1]


def _versions(use: Use, x: Tensor, dy: Tensor) -> tuple[int, int, int]:
    return use.weight._version, x._version, dy._version
