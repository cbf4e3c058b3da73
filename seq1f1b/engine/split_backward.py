"""Weight gradients of a stage's layers: added by B in one call, or left by a unit's I to its W.

In a training step layers compute outputs as always, and graphs lead to weights as always. If the order splits the
backward, the I of an ``nn.Linear`` makes only the gradients of input and bias; the pair (input, output gradient) goes
to the unit's tape, and W makes the weight's gradient from the pair. In B a layer adds to the weight's gradient without
autograd, on devices with an op for the sum. Autograd makes all remaining gradients at I or B: slower, never wrong.
[Zero Bubble, arXiv:2401.10241]

Autograd makes a gradient of the weight's size in each unit, casts the gradient to the dtype in which gradients grow,
and adds: three passes, two in float32 (``grad_dtype``). For an embedding of 128,000 words and hidden 4096 the gradient
takes 1 GB in 16 bits, mostly zeros. Here one op multiplies and adds (``aten::addmm`` with a wider result, on CUDA
alone), and an embedding's gradient gets only the rows of the unit's tokens.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from seq1f1b.attention.unit import LiveUnit, current
from seq1f1b.engine.features import Feature, Pass, Received
from seq1f1b.engine.gradients import REDUCED, dense
from seq1f1b.engine.measure import storages_of
from seq1f1b.engine.model_state import runs_compiled
from seq1f1b.engine.replicas import is_reduced
from seq1f1b.engine.stage import Stage, StageStep
from seq1f1b.engine.ties import num_hooks

__all__: list[str] = []

_WIDEST = 8  # outputs per input: the output gradients of a wider layer, a head, would fill the memory until W
_BLOCK = 1 << 18  # elements of a temporary product on the CPU, if gradients are wider: small enough for the cache
_SPARSE = 4  # rows per token: a table with fewer rows is added whole


class WeightGradients(Feature):
    """The feature that makes weight gradients without autograd: in B, or in W if an order splits the backward.

    Attributes:
        adds: whether layers add to gradients without autograd in this step.
        left, added: by id of a weight, the elements of its gradient that I left to W, and that B added.
    """

    def __init__(self, stage: Stage, options: Any) -> None:
        self._layers: dict[nn.Module, Layer] = {}
        # DDP and FSDP wait for autograd to accumulate; a whole model, the reference of verify, runs in plain torch.
        self._may_add = not stage.wrappers and not stage.is_whole and are_one_call(stage.device)
        self.serves = "" if self._may_add else "W"

    def start(self, step: StageStep) -> bool:
        self.adds = self._may_add and step.batch.training
        self.left: dict[int, int] = {}
        self.added: dict[int, int] = {}
        self._held: dict[int, bool] = {}  # by the weight's id: whether a Python object holds its node
        self._casts: dict[int, tuple[Tensor, Any, Tensor]] = {}  # weight, its key in `cast`, and its copy for autocast
        return bool(step.order.split) or self.adds

    def passes(self) -> Mapping[str, Pass]:
        return {"W": self.weight, "fill": self.fill}

    @contextmanager
    def in_step(self, others: Sequence[nn.Module]) -> Iterator[None]:
        """Replaces forwards by :meth:`Layer.forward`, in layers that leave products to W or add to gradients.

        Layers are looked up in each step, because users change modules in between. Layers of a loss leave no product to
        W, nor does a layer whose weight is used by a module other than linear layers of the stage.
        """
        torch.clear_autocast_cache()  # cached casts hold nodes of weights, and would pass for hooks of a user
        found = {}
        for name, module, waits, adds in _layers_of(self._step.stage, others):
            if waits or self.adds:
                layer = found[module] = self._layers.get(module) or Layer(self, module)
                layer.name, layer.waits, layer.adds = name, waits, adds
        self._layers = found
        for module, layer in found.items():
            vars(module)["forward"] = layer.in_step  # past nn.Module.__setattr__
            if module.weight.requires_grad:
                self.is_hooked(module.weight)  # asked now, before graphs of units hold nodes, too
        try:
            yield
        finally:
            for module in found:
                vars(module).pop("forward", None)
            self._held.clear()
            self._casts.clear()

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> None:
        """Gives the unit a tape if its backward is I and W."""
        if not unit.is_again and unit.cell in self._step.order.split:
            unit.tape = Tape()

    def weight(self, cell: int, received: Received) -> None:
        """W(m.s): makes the weight gradients that I left."""
        unit, parallel = self._step.units[cell], self._step.stage.parallel
        tape, unit.tape = unit.tape, None
        assert tape is not None
        is_last = self._step.order.last_gradients == ("W", cell)
        is_left = bool(tape.products)  # else all products have run in waits
        while tape.run_next():
            continue
        if parallel is not None and (is_left or is_last):
            parallel.after_weight(is_last)

    def fill(self, cell: int, received: Received) -> bool:
        """Runs a product of W(m.s) while the rank waits, after I(m.s); returns whether any is left."""
        tape = self._step.units[cell].tape
        is_left = tape is not None and tape.run_next()
        if self._step.stage.parallel is not None and not is_left:
            # Reductions come with the last W, at its place in the order, equal on all replicas.
            self._step.stage.parallel.after_weight(is_last=False)
        return is_left

    def figures(self) -> Mapping[str, Any]:
        return {
            "deferred_weights": sum(self.left.values()),
            "fused_weights": sum((self.left | self.added).values()),
        }

    def is_hooked(self, weight: Tensor) -> bool:
        """Returns whether a hook may wait for the weight's gradient: then autograd must accumulate the gradient.

        Hooks of the accumulating node live as long as a Python object holds the node. The first call for a weight must
        come before a graph of the stage holds the node, too.
        """
        if id(weight) not in self._held:
            edge = get_gradient_edge(weight)
            self._held[id(weight)] = sys.getrefcount(edge.node) > 2  # the edge's, and the argument's
        return num_hooks(weight) > 0 or self._held[id(weight)]

    def cast(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Returns the weight in autocast's dtype, cast once per step as by autocast."""
        key = weight.data_ptr(), weight._version, dtype
        known = self._casts.get(id(weight))
        if known is None or known[1] != key:
            known = self._casts[id(weight)] = weight, key, _autocast(weight.detach(), dtype)
        return known[2]


# -- layers ------------------------------------------------------------------------------------------------------------


class Layer:
    """The forward in a step of an ``nn.Linear``, or of an ``nn.Embedding`` whose gradient is a dense sum over tokens.

    Attributes:
        in_step: :meth:`forward` as one object for all steps, because compiled callers of the layer check the object.
        waits: whether the product waits for W, in units with a W.
        adds: whether B may add to the gradient without autograd; False if DDP or FSDP waits for autograd.
    """

    name: str
    waits: bool
    adds: bool

    def __init__(self, part: WeightGradients, module: Any) -> None:
        self.part, self.module, self.in_step = part, module, self.forward

    def forward(self, input: Tensor) -> Tensor:
        """Replaces the module's own forward while the step runs."""
        module = self.module
        unit = None if torch.compiler.is_compiling() else current()  # memory of a compiled backward may be overwritten
        tape = unit.tape if unit is not None and self.waits else None
        is_ours = tape is not None or (unit is not None and self.adds and self.part.adds)
        if not is_ours or self._is_autograds(input):
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        weight, use = module.weight, Use(self, module.weight, tape)
        if type(module) is nn.Embedding:
            return _LookUp.apply(weight, input, module.padding_idx, use)  # type: ignore[no-any-return, no-untyped-call]
        bias, value, kind = module.bias, weight.detach(), input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, value, bias = _autocast(input, dtype), self.part.cast(weight, dtype), _autocast(bias, dtype)
        return _Product.apply(weight, input, bias, value, use)  # type: ignore[no-any-return, no-untyped-call]

    def _is_autograds(self, input: Tensor) -> bool:
        """Returns whether autograd must make the weight's gradient in this call."""
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        return (
            type(weight) is not nn.Parameter
            or not all(is_plain(t) for t in (weight, input, bias) if t is not None)
            or not weight.requires_grad
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or (self.part.is_hooked(weight) if self.adds else num_hooks(weight) > 0)
        )


class Use(NamedTuple):
    """A call of a layer. A plain object: autograd does not look for the weight inside.

    Attributes:
        tape: takes the product from I; None: B adds the product.
    """

    layer: Layer
    weight: nn.Parameter
    tape: Tape | None

    def is_ours(self, ctx: Any) -> bool:
        """Returns, in a backward, whether autograd would accumulate the weight's gradient, and need not."""
        if torch.is_grad_enabled() or num_hooks(self.weight):  # create_graph=True, or a hook
            return False
        try:  # False: torch.autograd.grad, or backward(inputs=...), of other tensors
            return bool(torch._C._will_engine_execute_node(ctx.next_functions[0][0]))
        except RuntimeError:  # raised if autograd.grad names the weight
            return False

    def take_product(self, x: Tensor, dy: Tensor) -> bool:
        """Leaves the product ``dy.t() @ x`` to W, or adds the product; returns False if only autograd can."""
        part, key = self.layer.part, id(self.weight)
        if self.tape is not None:
            self.tape.products.append((self, x, dy, [t._version for t in (self.weight, x, dy)]))
            part.left[key] = self.weight.numel()
        elif add_product(self.weight, x, dy):
            part.added[key] = self.weight.numel()
        else:
            return False
        return True


class Tape:
    """Products that a unit's I leaves to W, in the order of the backward.

    Attributes:
        products: the use of a weight, inputs (tokens, inputs) and output gradients (tokens, outputs), and the versions
            of all three tensors: W refuses tensors changed in place since I.
    """

    def __init__(self) -> None:
        self.products: deque[tuple[Use, Tensor, Tensor, list[int]]] = deque()

    def run_next(self) -> bool:
        """Adds the next product to the weight's gradient, and drops the product; returns whether any is left."""
        if not self.products:
            return False
        use, x, dy, versions = self.products.popleft()
        if [t._version for t in (use.weight, x, dy)] != versions:
            raise RuntimeError(
                f"{use.layer.name}: its weight, its input or its output's gradient was changed in place between I and "
                "W, which needs all three as they were"
            )
        if use.layer.part.is_hooked(use.weight) or not add_product(use.weight, x, dy):
            torch.autograd.backward([use.weight], [(dy.t() @ x).to(use.weight.dtype)])
        return bool(self.products)

    def held_bytes(self, excluded: set[int]) -> tuple[int, int]:
        """Returns bytes of inputs and output gradients, each storage once, without the ``excluded`` addresses."""
        held = []
        seen = set(excluded)
        for tensors in ([x for _, x, *_ in self.products], [dy for _, _, dy, _ in self.products]):
            storages = {address: size for t in tensors for address, size in storages_of(t).items()}
            held.append(sum(size for address, size in storages.items() if address not in seen))
            seen |= storages.keys()
        return held[0], held[1]


# -- what autograd runs ------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """``F.linear`` with a backward that adds the weight's gradient, or leaves a product to a tape."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, value: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.use = use
        # The parameter, not `value`: a product's last bits may depend on whether the weight requires grad.
        output = F.linear(x, use.weight if value.dtype == use.weight.dtype else value, bias)
        # With more than two dimensions the output is a view of the product, which no caller may change in place.
        return output if output._base is None else torch.ops.aten._unsafe_view(output._base, output.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, value), dy, use = ctx.saved_tensors, dense(dy), ctx.use
        if torch.is_grad_enabled():  # create_graph=True
            value = use.weight.to(dy.dtype)
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (rows @ value).view(x.shape) if ctx.needs_input_grad[1] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        is_taken = use.is_ours(ctx) and use.take_product(flat.detach(), rows)
        return None if is_taken else (rows.t() @ flat).to(use.weight.dtype), dx, db, None, None


class _LookUp(torch.autograd.Function):
    """``F.embedding`` with a backward that adds only the rows of the tokens; autograd would add a whole table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.use = -1 if padding is None else padding, use
        return F.embedding(ids, use.weight, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), use, padding = ctx.saved_tensors, ctx.use, ctx.padding
        if use.is_ours(ctx) and add_rows(use.weight, ids, dy, padding):
            use.layer.part.added[id(use.weight)] = use.weight.numel()
            return None, None, None, None
        return dense_rows(dy, ids, len(use.weight), padding), None, None, None


def _autocast(tensor: Any, dtype: torch.dtype) -> Any:
    """Casts a tensor as autocast would: floating tensors except doubles."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


# -- which layers ------------------------------------------------------------------------------------------------------


def _layers_of(stage: Stage, others: Sequence[nn.Module]) -> Iterator[tuple[str, Any, bool, bool]]:
    """Yields the layers of a stage to replace in a step: a name, the layer, whether the product may wait for W, and
    whether neither DDP nor FSDP waits for the gradient. Leaves out layers in compiled modules.
    """
    shared: set[int] = set()  # parameters that a module other than the stage's linear layers, or a hook, may read
    reduced: set[int] = set()  # parameters for whose gradients DDP or FSDP wait
    compiled: set[int] = set()  # modules within compiled code
    own = stage.modules
    for root in (*own, *others):
        for owner in root.modules():
            if type(owner) is not nn.Linear or _is_own(owner) or root is not stage.module:
                shared.update(map(id, owner._parameters.values()))
            if owner._backward_hooks or nn.modules.module._global_backward_hooks:
                shared.update(map(id, owner.parameters()))
            if is_reduced(owner):
                reduced.update(map(id, owner.parameters()))
            if root in own and runs_compiled(owner):
                compiled.update(map(id, owner.modules()))
    for name, part in (named for module in own for named in module.named_modules()):
        if type(part) in (nn.Linear, nn.Embedding) and not _is_own(part) and id(part) not in compiled:
            weight: Any = part._parameters["weight"]
            waits = type(part) is nn.Linear and weight.shape[0] <= _WIDEST * weight.shape[1]
            yield name, part, waits and id(weight) not in shared, id(weight) not in reduced


def _is_own(module: nn.Module) -> bool:
    """Returns whether a linear layer or an embedding computes differently from its class."""
    if type(module) is nn.Embedding and (module.sparse or module.scale_grad_by_freq or module.max_norm is not None):
        return True  # its gradient is not the sum over tokens
    return "forward" in module.__dict__ or "weight" not in module._parameters


# -- sums in one pass --------------------------------------------------------------------------------------------------


def is_plain(tensor: Any) -> bool:
    """Returns whether a tensor is strided, real and of torch's own type, as products and sums of rows here need."""
    is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_strided and not (tensor.is_complex() or tensor.is_nested)


def are_one_call(device: torch.device) -> bool:
    """Returns whether torch on this device adds products of 16-bit operands, bfloat16 too, to float32 in one call."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def add_product(weight: nn.Parameter, x: Tensor, dy: Tensor) -> bool:
    """Adds ``dy.t() @ x`` to the weight's gradient; returns False, and adds nothing, if only autograd can.

    Args:
        x: (tokens, inputs).
        dy: (tokens, outputs).
    """
    if weight.grad is None and (weight.grad_dtype or weight.dtype) == dy.dtype:
        weight.grad = dy.t() @ x
        return True
    gradient = _gradient_of(weight)
    if gradient is None:
        return False
    dtype = gradient.dtype
    if dtype == dy.dtype:
        gradient.addmm_(dy.t(), x)
    elif dtype == torch.float32 and dy.dtype in REDUCED and len(x) and are_one_call(dy.device):
        torch.ops.aten.addmm.dtype_out(gradient, dy.t(), x, dtype, out=gradient)
        torch.autograd.graph.increment_version(gradient)  # the op does not, and `StepGradients.added` needs it
    else:
        rows = max(1, _BLOCK // max(1, x.shape[1])) if dy.device.type == "cpu" else dy.shape[1]
        for i in range(0, dy.shape[1], rows):
            gradient[i : i + rows].add_(dy[:, i : i + rows].t() @ x)
    return True


def dense_rows(dy: Tensor, ids: Tensor, num_rows: int, padding: int) -> Tensor:
    """Returns the gradient of the whole table, in dy's dtype."""
    gradient: Tensor = torch.ops.aten.embedding_dense_backward.default(dy, ids, num_rows, padding, False)
    return gradient


def add_rows(weight: nn.Parameter, ids: Tensor, dy: Tensor, padding: int) -> bool:
    """Adds ``dy`` to rows of an embedding's gradient; returns False, and adds nothing, if only autograd can.

    Rows of equal tokens are summed first, in an order that depends on the tokens alone, so equal inputs give equal
    bits.

    Args:
        ids: of any shape.
        dy: (*ids' shape, hidden).
        padding: the row without gradient; -1: none.
    """
    num_rows, gradient = len(weight), _gradient_of(weight) if ids.numel() else None
    if gradient is None:
        return False
    if ids.numel() * _SPARSE > num_rows or torch.are_deterministic_algorithms_enabled():
        gradient.add_(dense_rows(dy, ids, num_rows, padding))
        return True
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    in_order = ids.sort().values
    numbers = torch.searchsorted(in_order, ids)  # first position of each token's id in the sorted ids
    if padding >= 0:
        numbers = numbers.masked_fill(ids == padding, len(ids))
    # One row more than tokens, for the padding's gradient. Float32, so that partial sums are not rounded.
    sums = dense_rows(dy.to(torch.promote_types(dy.dtype, torch.float32)), numbers, len(ids) + 1, len(ids))
    # `sums` is zero where an id comes again: counting distinct ids would wait for the device.
    gradient.index_add_(0, in_order, sums[:-1].to(gradient.dtype))
    return True


def _gradient_of(weight: nn.Parameter) -> Tensor | None:
    """Returns the weight's gradient, new zeros if absent; None if only autograd can add to the gradient."""
    if weight.grad is None:
        weight.grad = torch.zeros(weight.shape, dtype=weight.grad_dtype or weight.dtype, device=weight.device)
    return weight.grad if is_plain(weight.grad) else None
