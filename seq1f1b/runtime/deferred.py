"""Weight gradients of linear layers that a unit's I leaves to its W.

While a step runs an order that splits the backward, a stage's ``nn.Linear`` layers compute their output as always, but
in I only the gradients of input and bias. The pair (input, output gradient) goes to the unit's tape, and W makes the
weight's gradient from it. All else has its whole backward at I: what is not deferred costs balance, never correctness.
[Zero Bubble, arXiv:2401.10241]
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from seq1f1b.runtime.parts import Feature, Part, Pass, Received
from seq1f1b.runtime.stage import StageStep
from seq1f1b.runtime.unit import LiveUnit, live_unit

__all__: list[str] = []

_WIDEST = 8  # times as many outputs as inputs: of a wider layer, a head, the output gradients would fill the memory
_BLOCK = 1 << 18  # elements of a temporary, where a gradient is wider than its product


class Deferring(Feature):
    """Makes gradients of weights in W, where an order splits the backward of a stage's units."""

    def begin(self, step: StageStep) -> Deferred | None:
        return Deferred(step) if step.order.split else None


class Deferred(Part):
    """A tape for each unit whose backward is I and W; and W."""

    def __init__(self, step: StageStep) -> None:
        self._step, self._stage = step, step.stage
        self._noted: dict[int, int] = {}  # elements of weights that I left to W, by the weight's id

    def passes(self) -> Mapping[str, Pass]:
        return {"W": self.weight}

    def in_step(self, others: Sequence[nn.Module]) -> AbstractContextManager[None]:
        loss = [module for module in self._stage.modules if module is not self._stage.module]
        return deferring(self._stage.module, [*others, *loss])

    def begin(self, unit: LiveUnit) -> None:
        if unit.cell in self._step.order.split:
            unit.tape = Tape(self._noted)

    def before_backward(self, unit: LiveUnit) -> None:
        if unit.tape is not None:
            unit.tape.is_open = True

    def weight(self, cell: int, received: Received) -> None:
        """W(m.s): the gradients of weights that I left."""
        unit, parallel = self._step.units[cell], self._stage.parallel
        tape, unit.tape = unit.tape, None
        if tape is None:
            raise RuntimeError("W finds nothing that I has left: it has run already")
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

    def finish(self) -> None:
        """Raises where I of a unit has left what no W took: gradients of weights would be missing."""
        for unit in self._step.units.values():
            if unit.tape is not None:
                m, s = unit.microbatch, unit.segment
                raise RuntimeError(f"stage {self._stage.index}: no W{m}.{s} has taken what I{m}.{s} left")

    def figures(self) -> Mapping[str, Any]:
        return {"deferred_weights": sum(self._noted.values())}


class Use(NamedTuple):
    """One call of a layer in a unit's forward. A plain object: autograd does not look for the weight inside."""

    layer: Layer
    weight: nn.Parameter
    tape: Tape


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
        use.layer.check(use.weight)
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
        _accumulate(use.weight, x, dy, use.layer.is_hooked)
        return bool(self.products)

    def held_bytes(self, excluded: set[int]) -> tuple[int, int]:
        """Bytes of inputs and of output gradients, each storage once; ``excluded``: addresses that do not count."""
        held = []
        seen = set(excluded)
        for tensors in ([p.x for p in self.products], [p.dy for p in self.products]):
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            held.append(sum(size for address, size in storages.items() if address not in seen))
            seen |= storages.keys()
        return held[0], held[1]


class Layer:
    """A linear layer of a stage, for the life of one step."""

    def __init__(self, name: str, parent: nn.Module, child: str, module: nn.Linear) -> None:
        self.name = name
        self.module = module
        self._parent, self._child = parent, child
        self._cast: tuple[int, Tensor] | None = None  # for autocast: the weight's version, and its copy

    @cached_property
    def is_hooked(self) -> bool:
        """Whether somebody waits for the weight's gradient: then autograd itself must accumulate it.

        Hooks of the node that accumulates live as long as somebody in Python holds it.
        """
        weight = self.module.weight
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return True
        edge = get_gradient_edge(weight)
        return sys.getrefcount(edge.node) > 2  # the edge's, and the argument's

    def check(self, weight: nn.Parameter) -> None:
        """Raises where the module or the weight of a forward is no longer the stage's."""
        if self._parent._modules.get(self._child) is not self.module or self.module._parameters["weight"] is not weight:
            raise RuntimeError(f"{self.name}: the layer or its weight was replaced between F and I")

    def forward(self, input: Tensor) -> Tensor:
        """In place of the module's own forward, while the step runs."""
        weight, bias = self.module.weight, self.module.bias
        if torch.compiler.is_compiling():  # what a compiled backward keeps may be overwritten
            return F.linear(input, weight, bias)
        unit = live_unit()
        if (
            unit is None
            or unit.tape is None
            or type(weight) is not nn.Parameter
            or type(input) not in (Tensor, nn.Parameter)
            or not weight.requires_grad
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
        ):
            return F.linear(input, weight, bias)
        value = weight.detach()
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, value, bias = autocast(input, dtype), self._autocast(value, dtype), autocast(bias, dtype)
        is_seen = input.requires_grad or (bias is not None and bias.requires_grad)
        anchor = None if is_seen else torch.zeros((), device=input.device, requires_grad=True)
        output: Tensor = _linear(input, bias, anchor, value, Use(self, weight, unit.tape))
        return output

    def _autocast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in autocast's dtype, cast once per step as autocast does."""
        if self._cast is None or self._cast[0] != value._version:
            self._cast = value._version, autocast(value, dtype)
        return self._cast[1]


class _Linear(torch.autograd.Function):
    """The weight comes as a value that autograd does not see, so that nothing of its own fires at I.

    ``anchor`` gives the output a graph where nothing else does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor | None, value: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.use = use
        output = F.linear(x, value, bias)
        # With more than two dimensions the output is a view of the product, which no caller may change in place.
        return output if output._base is None else torch.ops.aten._unsafe_view(output._base, output.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, value = ctx.saved_tensors
        dx = dy @ value if ctx.needs_input_grad[0] else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        ctx.use.tape.note(ctx.use, x, dy)
        return dx, db, None, None, None


_linear: Callable[..., Tensor] = _Linear.apply


def _versions(use: Use, x: Tensor, dy: Tensor) -> tuple[int, int, int]:
    return use.weight._version, x._version, dy._version


def autocast(tensor: Any, dtype: torch.dtype) -> Any:
    """Casts what autocast would cast: floating tensors but doubles."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _accumulate(weight: nn.Parameter, x: Tensor, dy: Tensor, is_hooked: bool) -> None:
    """Adds the product to the weight's gradient as autograd would, but without a temporary of the weight's size."""
    if is_hooked:
        torch.autograd.backward([weight], [(dy.t() @ x).to(weight.dtype)])
        return
    dtype = weight.grad_dtype or weight.dtype if weight.grad is None else weight.grad.dtype
    if dtype == dy.dtype and weight.grad is None:
        weight.grad = dy.t() @ x
    elif dtype == dy.dtype:
        weight.grad.addmm_(dy.t(), x)  # type: ignore[union-attr]
    else:
        if weight.grad is None:
            weight.grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        rows = max(1, _BLOCK // x.shape[1])
        for i in range(0, dy.shape[1], rows):
            weight.grad[i : i + rows].add_(dy[:, i : i + rows].t() @ x)


# -- which layers ------------------------------------------------------------------------------------------------------


@contextmanager
def deferring(module: Any, others: Iterable[nn.Module]) -> Iterator[None]:
    """Within, linear layers of the module leave their weights' gradients to the tape of the running unit.

    Compiled modules stay as they are, and so do layers that share their weight with anything but a linear layer.

    Args:
        others: modules of the same rank, whose parameters count as shared where the module has them too.
    """
    layers = list(_layers(module, others)) if isinstance(module, nn.Module) else []
    for layer in layers:
        layer.module.__dict__["forward"] = (
            layer.forward
        )  # no attribute of torch's: it would be looked at as a submodule
    try:
        yield
    finally:
        for layer in layers:
            layer.module.__dict__.pop("forward", None)


def deferrable(module: Any) -> list[nn.Linear]:
    """The linear layers that leave their weights' gradients where no other module has a part in them."""
    return [layer.module for layer in _layers(module, ())] if isinstance(module, nn.Module) else []


def _layers(module: nn.Module, others: Iterable[nn.Module]) -> Iterator[Layer]:
    shared = {
        id(parameter)
        for root in (module, *others)
        for owner in root.modules()
        if not _is_linear(owner) or root is not module
        for parameter in owner._parameters.values()
    }
    for name, parent in _named_uncompiled("", module):
        for child, layer in parent._modules.items():
            if layer is None or not _is_linear(layer) or runs_compiled(layer):
                continue
            if id(layer._parameters["weight"]) not in shared and layer.out_features <= _WIDEST * layer.in_features:
                yield Layer(f"{name}{child}", parent, child, layer)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A subclass may compute something else, and so may an instance with a forward or a weight of its own."""
    return type(module) is nn.Linear and "forward" not in module.__dict__ and "weight" in module._parameters


def runs_compiled(module: nn.Module) -> bool:
    """Whether the module itself is compiled; a part of it may be in any case."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _named_uncompiled(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and its parts, none of which runs as compiled code, with the prefix of their children's names."""
    if runs_compiled(module):
        return
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_uncompiled(f"{prefix}{name}.", child)
