"""Weight gradients of linear layers: added by whole backwards in one call, or left by a unit's I to its W.

While a training step runs, a stage's ``nn.Linear`` layers compute their output as always. Where the order splits the
backward, I makes only the gradients of input and bias; the pair (input, output gradient) goes to the unit's tape, and W
makes the weight's gradient from it. In a whole backward the layer adds the product to the gradient itself, where the
device has an op for that (``linear.py``). All else is autograd's as ever, at I or B: what does not go this way costs
time, never correctness. [Zero Bubble, arXiv:2401.10241]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine import linear
from seq1f1b.engine.compiled import runs_compiled
from seq1f1b.engine.linear import Layer, Use, Weights
from seq1f1b.engine.measure import storages_of
from seq1f1b.engine.parts import Part, Pass, Received
from seq1f1b.engine.replicas import is_reduced
from seq1f1b.engine.stage import Stage, StageStep

__all__: list[str] = []

_WIDEST = 8  # times as many outputs as inputs: of a wider layer, a head, the output gradients would fill the memory


class WeightGradients(Part):
    """Makes gradients of weights by the product itself, and in W where an order splits the backward.

    A unit whose backward is I and W has a tape.
    """

    def __init__(self, stage: Stage, options: Any, tier: Any) -> None:
        self._layers: dict[int, Layer] = {}
        # DDP and FSDP wait for autograd to accumulate; and a whole model, to which segments are compared, is torch's.
        self._may_add = not stage.wrappers and not stage.is_whole and linear.are_one_call(stage.device)
        self.serves = "" if self._may_add else "W"

    def start(self, step: StageStep) -> bool:
        self._adds = self._may_add and step.arguments.training
        self._noted: dict[int, int] = {}  # elements of weights that I left to W, by the weight's id
        self._added: dict[int, int] = {}  # the same of those whose layers added products themselves
        return bool(step.order.split) or self._adds

    def passes(self) -> Mapping[str, Pass]:
        return {"W": self.weight, "fill": self.fill}

    @contextmanager
    def in_step(self, others: Sequence[nn.Module]) -> Iterator[None]:
        """Layers that may leave products to W, or add them, run as ``linear.py`` says.

        They are looked for in each step, for users change modules in between. What losses hold leaves nothing to W, nor
        does a layer that shares its weight with anything but a linear layer of the stage.
        """
        torch.clear_autocast_cache()  # casts in it hold nodes of weights, as a user who waits for a gradient does
        weights, found = Weights(), dict[int, Layer]()
        for root in self._step.stage.modules:
            for layer in _layers_of(root, [m for m in (*self._step.stage.modules, *others) if m is not root]):
                layer.waits &= root is self._step.stage.module
                if layer.waits or self._adds:
                    own = self._layers.get(id(layer.module))
                    if own is None or own.module is not layer.module:
                        own, layer.in_step = layer, layer.forward
                    own.waits, own.adds, own.weights = layer.waits, layer.adds, weights
                    found[id(layer.module)] = own
        self._layers.clear()
        self._layers.update(found)
        for layer in found.values():
            vars(layer.module)["forward"] = layer.in_step  # no attribute of torch's: it would be seen as a submodule
            if layer.module.weight.requires_grad:
                weights.is_hooked(layer.module.weight)  # now, for graphs of units hold nodes as well
        try:
            yield
        finally:
            for layer in found.values():
                vars(layer.module).pop("forward", None)
                layer.weights = Weights()

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> None:
        """Gives a unit whose backward is I and W its tape."""
        if not unit.is_again:
            unit.tape = Tape(self._noted) if unit.cell in self._step.order.split else None
            unit.added = self._added if self._adds else None

    def weight(self, cell: int, received: Received) -> None:
        """W(m.s): the gradients of weights that I left."""
        unit, parallel = self._step.units[cell], self._step.stage.parallel
        tape, unit.tape = unit.tape, None
        assert tape is not None
        is_last = self._step.order.last_gradients == ("W", cell)
        is_left = bool(tape.products)  # else it has all run in waits
        while tape.run_next():
            continue
        if parallel is not None and (is_left or is_last):
            parallel.after_weight(is_last)

    def fill(self, cell: int, received: Received) -> bool:
        """Runs one product of W(m.s) while the rank waits; its I has run. Returns whether any is left."""
        tape = self._step.units[cell].tape
        is_left = tape is not None and tape.run_next()
        if self._step.stage.parallel is not None and not is_left:
            # The last one has its place in the order, alike on all replicas.
            self._step.stage.parallel.after_weight(is_last=False)
        return is_left

    def figures(self) -> Mapping[str, Any]:
        return {
            "deferred_weights": sum(self._noted.values()),
            "fused_weights": sum((self._noted | self._added).values()),
        }


class Tape:
    """The products that one unit leaves to its W, in the order in which its backward came to them.

    Attributes:
        products: the use of a weight, inputs (tokens, inputs) and output gradients (tokens, outputs), and the versions
            of all three, which tell whether they have been changed meanwhile.
    """

    is_open = False  # True from I on: until then a gradient is one that the stage takes for itself

    def __init__(self, noted: dict[int, int]) -> None:
        self.products: deque[tuple[Use, Tensor, Tensor, list[int]]] = deque()
        self._noted = noted  # gets the elements of every weight that a product is for, by the weight's id

    def note(self, use: Use, x: Tensor, dy: Tensor) -> None:
        if not self.is_open or torch.is_grad_enabled():
            raise RuntimeError(
                f"{use.layer.name}: the stage takes a gradient through this layer inside its forward (as by "
                "torch.autograd.grad), and a schedule that splits the backward would lose the weight's part. Use a "
                "schedule with whole backwards"
            )
        self.products.append((use, x, dy, [t._version for t in (use.weight, x, dy)]))
        self._noted[id(use.weight)] = use.weight.numel()

    def run_next(self) -> bool:
        """Adds the next product to its weight's gradient, and drops it; returns whether any is left."""
        if not self.products:
            return False
        use, x, dy, versions = self.products.popleft()
        if [t._version for t in (use.weight, x, dy)] != versions:
            raise RuntimeError(
                f"{use.layer.name}: its weight, its input or its output's gradient was changed in place between I and "
                "W, which needs all three as they were"
            )
        if use.layer.weights.is_hooked(use.weight) or not linear.add_product(use.weight, x, dy):
            torch.autograd.backward([use.weight], [(dy.t() @ x).to(use.weight.dtype)])
        return bool(self.products)

    def held_bytes(self, excluded: set[int]) -> tuple[int, int]:
        """Bytes of inputs and of output gradients, each storage once; ``excluded``: addresses that do not count."""
        held = []
        seen = set(excluded)
        for tensors in ([x for _, x, *_ in self.products], [dy for _, _, dy, _ in self.products]):
            storages = {address: size for t in tensors for address, size in storages_of(t).items()}
            held.append(sum(size for address, size in storages.items() if address not in seen))
            seen |= storages.keys()
        return held[0], held[1]


def deferrable(module: Any) -> list[nn.Linear]:
    """The linear layers that leave their weights' gradients to W where no other module has a part in them."""
    return [layer.module for layer in _layers_of(module, ()) if layer.waits] if isinstance(module, nn.Module) else []


def _layers_of(module: nn.Module, others: Sequence[nn.Module]) -> Iterator[Layer]:
    """The layers of a module that run otherwise in a step. What runs as compiled code stays as it is."""
    shared: set[int] = set()  # parameters of other modules than linear layers, and those that a module's hook may read
    reduced: set[int] = set()  # parameters for whose gradients DDP or FSDP wait
    compiled: set[int] = set()  # modules within compiled code
    for root in (module, *others):
        for owner in root.modules():
            if type(owner) is not nn.Linear or _is_own(owner) or root is not module:
                shared.update(map(id, owner._parameters.values()))
            if owner._backward_hooks or nn.modules.module._global_backward_hooks:
                shared.update(map(id, owner.parameters()))
            if is_reduced(owner):
                reduced.update(map(id, owner.parameters()))
            if root is module and runs_compiled(owner):
                compiled.update(map(id, owner.modules()))
    for name, part in module.named_modules():
        if type(part) in (nn.Linear, nn.Embedding) and not _is_own(part) and id(part) not in compiled:
            weight = part._parameters["weight"]
            assert weight is not None
            waits = type(part) is nn.Linear and weight.shape[0] <= _WIDEST * weight.shape[1]
            yield Layer(name, part, waits and id(weight) not in shared, id(weight) not in reduced)


def _is_own(module: nn.Module) -> bool:
    """Whether a linear layer or an embedding computes something else than its class does."""
    if type(module) is nn.Embedding and (module.sparse or module.scale_grad_by_freq or module.max_norm is not None):
        return True  # its gradient is not the sum over tokens
    return "forward" in module.__dict__ or "weight" not in module._parameters
