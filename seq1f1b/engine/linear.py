"""Layers of a stage that make their weights' gradients themselves while a training step runs.

Autograd makes a gradient of the weight's size in each unit, casts it to the dtype in which gradients grow, and adds it:
three passes, two of them in float32 (``grad_dtype``). An embedding's table of 128,000 words and hidden 4096 takes 1 GB
in 16 bits, mostly zeros. Here a layer's backward adds to the gradient itself, or leaves the product to W
(``split_backward.py``). Wherever somebody waits for the gradient, the layer returns it, and autograd does the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from seq1f1b.attention.unit import LiveUnit, current
from seq1f1b.engine.gradients import REDUCED, dense

__all__: list[str] = []

_BLOCK = 1 << 18  # elements of a temporary on the CPU, where a gradient is wider than its product: so it stays in cache
_SPARSE = 4  # times as many rows as tokens: a smaller table is added whole


class Layer:
    """An ``nn.Linear``, or an ``nn.Embedding`` with a dense gradient that is the sum over tokens; for an engine's life.

    Attributes:
        in_step: its forward; one object for all steps, for compiled code that calls the layer looks at it.
        waits: whether it may leave its product to W.
        adds: whether it may add to the gradient itself.
        weights: what the step knows of weights. All layers of a stage share it.
    """

    weights: Weights
    in_step: Callable[[Tensor], Tensor]

    def __init__(self, name: str, module: Any, waits: bool, adds: bool) -> None:
        self.name, self.module, self.waits, self.adds = name, module, waits, adds

    def forward(self, input: Tensor) -> Tensor:
        """In place of the module's own forward, while the step runs."""
        module, unit = self.module, self._unit(input)
        tape = unit.tape if unit is not None and self.waits else None
        if unit is None or (tape is None and not (unit.added is not None and self.adds)):
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        weight, use = module.weight, Use(self, module.weight, tape, unit.added)
        if type(module) is nn.Embedding:
            return _LookUp.apply(weight, input, module.padding_idx, use)  # type: ignore[no-any-return, no-untyped-call]
        bias, value, kind = module.bias, weight.detach(), input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, value, bias = _autocast(input, dtype), self.weights.cast(weight, dtype), _autocast(bias, dtype)
        edge = weight
        if tape is not None:
            is_seen = input.requires_grad or (bias is not None and bias.requires_grad)
            edge = None if is_seen else torch.zeros((), device=input.device, requires_grad=True)
        return _Product.apply(edge, input, bias, value, use)  # type: ignore[no-any-return, no-untyped-call]

    def _unit(self, input: Tensor) -> LiveUnit | None:
        """The running unit, if the weight's gradient may go another way than autograd's in it."""
        if torch.compiler.is_compiling():  # what a compiled backward keeps may be overwritten
            return None
        unit, weight, bias = current(), self.module.weight, getattr(self.module, "bias", None)
        if (
            unit is None
            or (unit.tape is None and unit.added is None)
            or type(weight) is not nn.Parameter
            or not all(is_plain(t) for t in (weight, input, bias) if t is not None)
            or not weight.requires_grad
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            # DDP holds the nodes of its weights, and takes their gradients after W.
            or (self.weights.is_hooked(weight) if self.adds else has_hooks(weight))
        ):
            return None
        return unit


class Weights:
    """The weights of a stage as one step knows them, by their ids."""

    def __init__(self) -> None:
        self._held: dict[int, bool] = {}
        self._casts: dict[int, tuple[Any, Any, Tensor]] = {}  # for autocast: a weight, what it was, and its copy

    def is_hooked(self, weight: Tensor) -> bool:
        """Whether somebody waits for the weight's gradient: then autograd itself must accumulate it.

        Hooks of the node that accumulates live as long as somebody in Python holds it. The first answer for a weight
        must come before a graph of the stage holds its node, too.
        """
        if id(weight) not in self._held:
            edge = get_gradient_edge(weight)
            self._held[id(weight)] = sys.getrefcount(edge.node) > 2  # the edge's, and the argument's
        return has_hooks(weight) or self._held[id(weight)]

    def cast(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The weight in autocast's dtype, cast once per step as autocast does."""
        key = weight.data_ptr(), weight._version, dtype
        known = self._casts.get(id(weight))
        if known is None or known[1] != key:
            known = self._casts[id(weight)] = weight, key, _autocast(weight.detach(), dtype)
        return known[2]


class Use(NamedTuple):
    """One call of a layer. A plain object: autograd does not look for the weight inside.

    Attributes:
        tape: to which I leaves the product (``split_backward.py``); None: B adds it.
        added: gets the elements of weights to whose gradients B has added, by the weight's id.
    """

    layer: Layer
    weight: nn.Parameter
    tape: Any
    added: dict[int, int] | None

    def gradient(self, ctx: Any, add: Callable[[nn.Parameter], bool], make: Callable[[], Tensor]) -> Tensor | None:
        """In a B: adds to the weight's gradient and returns None, or returns what autograd is to have.

        The layer has given its weight to ``apply`` as the first tensor, so the graph leads to it as ever.

        Args:
            add: adds to the gradient of a weight; False: it cannot, and has done nothing.
            make: makes the gradient.
        """
        if torch.is_grad_enabled():  # this backward is to be differentiated: all of it is autograd's
            return make()
        try:
            if not torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
                return None  # torch.autograd.grad, or backward(inputs=...), of other tensors
        except RuntimeError:  # torch's answer where autograd.grad names the weight
            return make()
        if has_hooks(self.weight) or not add(self.weight):
            return make()
        assert self.added is not None
        self.added[id(self.weight)] = self.weight.numel()
        return None


class _Product(torch.autograd.Function):
    """``F.linear``, whose backward adds the weight's gradient itself, or leaves it to a tape.

    The first argument is the weight where B adds. For a tape the graph must not know the weight, so that nothing of its
    own fires at I; where nothing else gives the output a graph, another leaf does.
    """

    @staticmethod
    def forward(ctx: Any, edge: Tensor | None, x: Tensor, bias: Tensor | None, value: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.use = use
        # A product may come out otherwise, in its last bits, of a weight that needs no gradient.
        output = F.linear(x, use.weight if value.dtype == use.weight.dtype else value, bias)
        # With more than two dimensions the output is a view of the product, which no caller may change in place.
        return output if output._base is None else torch.ops.aten._unsafe_view(output._base, output.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, value), dy, use = ctx.saved_tensors, dense(dy), ctx.use
        if torch.is_grad_enabled():  # this backward is to be differentiated
            value = use.weight.to(dy.dtype)
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (rows @ value).view(x.shape) if ctx.needs_input_grad[1] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        if use.tape is not None:
            use.tape.note(use, flat.detach(), rows)
            return None, dx, db, None, None
        dw = use.gradient(ctx, lambda w: add_product(w, flat, rows), lambda: (rows.t() @ flat).to(use.weight.dtype))
        return dw, dx, db, None, None


class _LookUp(torch.autograd.Function):
    """Adds the table's gradient in its own backward, where autograd would have added it; else returns it."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, padding: int | None, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.use = -1 if padding is None else padding, use
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), padding, use = ctx.saved_tensors, ctx.padding, ctx.use
        make = partial(dense_rows, dy, ids, len(use.weight), padding)
        return use.gradient(ctx, lambda weight: add_rows(weight, ids, dy, padding), make), None, None, None


def _autocast(tensor: Any, dtype: torch.dtype) -> Any:
    """Casts what autocast would cast: floating tensors but doubles."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


# -- sums to the gradient of a weight; aten::addmm with a wider result, one pass, is there on CUDA alone ---------------


def is_plain(tensor: Any) -> bool:
    """Whether it is a strided, real tensor of torch's own type: what products and sums of rows here are written for."""
    is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_strided and not (tensor.is_complex() or tensor.is_nested)


def are_one_call(device: torch.device) -> bool:
    """Whether torch adds products of 16-bit operands to float32 in one call there, bfloat16 among them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def add_product(weight: nn.Parameter, x: Tensor, dy: Tensor) -> bool:
    """Adds ``dy.t() @ x`` to the weight's gradient; False: only autograd can, and nothing has been done.

    Args:
        x: (tokens, inputs).
        dy: (tokens, outputs).
    """
    gradient = weight.grad
    dtype = weight.grad_dtype or weight.dtype if gradient is None else gradient.dtype
    if gradient is None and dtype == dy.dtype:
        weight.grad = dy.t() @ x
        return True
    if gradient is None:
        gradient = weight.grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    if not is_plain(gradient):
        return False
    if dtype == dy.dtype:
        gradient.addmm_(dy.t(), x)
    elif dtype == torch.float32 and dy.dtype in REDUCED and len(x) and are_one_call(dy.device):
        torch.ops.aten.addmm.dtype_out(gradient, dy.t(), x, dtype, out=gradient)
        torch.autograd.graph.increment_version(gradient)  # by which a step tells whether a gradient has been added to
    else:
        rows = max(1, _BLOCK // max(1, x.shape[1])) if dy.device.type == "cpu" else dy.shape[1]
        for i in range(0, dy.shape[1], rows):
            gradient[i : i + rows].add_(dy[:, i : i + rows].t() @ x)
    return True


def dense_rows(dy: Tensor, ids: Tensor, num_rows: int, padding: int) -> Tensor:
    """The gradient of the whole table, in dy's dtype."""
    gradient: Tensor = torch.ops.aten.embedding_dense_backward.default(dy, ids, num_rows, padding, False)
    return gradient


def add_rows(weight: nn.Parameter, ids: Tensor, dy: Tensor, padding: int) -> bool:
    """Adds the gradient of a table's rows to the table's; False: that cannot be, and nothing has been done.

    Rows of equal tokens are summed first, in an order that the tokens alone decide, so equal inputs give equal bits.

    Args:
        ids: of any shape.
        dy: (*ids' shape, hidden).
        padding: the row that gets nothing; -1: there is none.
    """
    if not ids.numel():
        return False
    gradient, num_rows = weight.grad, weight.shape[0]
    if gradient is None:
        gradient = weight.grad = torch.zeros(
            weight.shape, dtype=weight.grad_dtype or weight.dtype, device=weight.device
        )
    if type(gradient) is not Tensor or gradient.layout != torch.strided:
        return False
    if ids.numel() * _SPARSE > num_rows or torch.are_deterministic_algorithms_enabled():
        gradient.add_(dense_rows(dy, ids, num_rows, padding))
        return True
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    in_order = ids.sort().values
    numbers = torch.searchsorted(in_order, ids)  # where each token's id comes first: equal tokens have one number
    if padding >= 0:
        numbers = numbers.masked_fill(ids == padding, len(ids))
    # One row more than tokens, for the padding's. Float32, for a sum of few of many is not to be rounded.
    sums = dense_rows(dy.to(torch.promote_types(dy.dtype, torch.float32)), numbers, len(ids) + 1, len(ids))
    # An id's sum stands where it comes first, zeros where it comes again: to count them would wait for the device.
    gradient.index_add_(0, in_order, sums[:-1].to(gradient.dtype))
    return True
