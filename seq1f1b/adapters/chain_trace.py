"""Traces a model's forward with the blocks left whole, or raises an error that says why tracing failed."""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import inplace_methods
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import seq1f1b
from seq1f1b.attention import carry, causal, packing, ulysses
from seq1f1b.engine.model_state import RandomState, attributes_of, first_changed, put_back

__all__ = ["RefusedCode", "Tracer", "constants_of", "has_effect", "is_size", "trace"]


class RefusedCode(ValueError):
    """The error for code that a stage would run differently from the model. The message is a whole sentence."""


def trace(model: nn.Module, names: Sequence[str]) -> Tracer:
    """Traces forward in training mode, entering only the modules that contain a named module.

    Restores modes, attributes and random state.

    Raises:
        RefusedCode: forward cannot be traced, draws random numbers in Python, or changes an attribute.
    """
    whose = f"forward of {type(model).__name__}"
    kinds = {parameter.kind for parameter in inspect.signature(type(model).forward).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise RefusedCode(f"{whose} takes *args or **kwargs: name its arguments")
    inside = {model}
    for name in names:
        path = name.split(".")
        inside |= {model.get_submodule(".".join(path[:i])) for i in range(1, len(path))}
    tracer = Tracer(model, inside)
    before, random = attributes_of(model.modules()), RandomState(torch.device("cpu"))
    try:
        for module in model.modules():
            module.training = True
        attributes = attributes_of(model.modules())
        with torch.enable_grad(), _Recording(tracer):
            tracer.trace(model)
        draws, changed = not random.is_current(), first_changed(attributes)
    except RefusedCode:
        raise
    except Exception as error:  # forward may fail in any way on a value without contents
        raise RefusedCode(
            f"{whose} cannot be traced: {type(error).__name__}: {error}. Leave asserts out, write the names out as in "
            "a, b = value, and move what depends on values or sizes, assigns to a part of a tensor, or takes anything "
            "but tensors, into a module of its own"
        ) from error
    finally:
        put_back(before)
        random.restore()
    if draws:
        raise tracer.refuse(
            "it draws random numbers in Python, once for all calls, or changes the state of a generator: do that in a "
            "block, or draw by torch's functions of a tensor, as torch.rand_like(x)"
        )
    if changed is not None:
        module, name = changed
        raise tracer.refuse(
            f"it changes {name!r} of {type(module).__name__} in each call, which no stage would do: move that into a "
            "block, or make it a buffer"
        )
    called = {node.target for node in tracer.graph.nodes}
    if carry.carry_out in called and carry.carry_in not in called:
        raise tracer.refuse("it gives carry_in a constant, which a trace does not record: give torch.zeros(...)")
    _leave_losses_out(tracer.graph)
    return tracer


def _leave_losses_out(graph: fx.Graph) -> None:
    """Removes targets and the loss: optional arguments that feed no module and only some of the outputs.

    Outputs computed from a removed argument are removed, too; a named output becomes None.
    """
    output = graph.output_node()
    for argument in [node for node in graph.nodes if node.op == "placeholder" and node.args == (None,)]:
        gone = [argument]
        for node in graph.nodes:
            if node is not output and not set(gone).isdisjoint(node.all_input_nodes):
                gone.append(node)

        def is_kept(item: Any, gone: Sequence[fx.Node] = gone) -> bool:
            found = set[fx.Node]()
            fx.node.map_arg(item, found.add)
            return item is not None and found.isdisjoint(gone)

        value: Any = output.args[0]
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, tuple) else {}
        kept = {key: item for key, item in items.items() if is_kept(item)}
        if is_kept(value) or not kept or any(node.op == "call_module" or has_effect(node) for node in gone):
            continue
        rest: Any = tuple(kept.values())
        rest = dict.fromkeys(items) | kept if isinstance(value, dict) else rest if len(rest) > 1 else rest[0]
        output.args = (rest,)
        for node in reversed(gone):
            graph.erase_node(node)


# -- one trace ---------------------------------------------------------------------------------------------------------


class Tracer(fx.Tracer):
    """A tracer of ``inside`` modules; all others stay whole. A module with several names gets the next at each call.

    Attributes:
        constants: tensors that belong to no module, keyed by name in the graph.
    """

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, inside: set[nn.Module]) -> None:
        super().__init__(autowrap_modules=(math,), autowrap_functions=(*_TAKE_SIZES, *_OURS, checkpoint))
        skipped = ("torch.", "seq1f1b.")  # fx records calls of these functions by any imported name in other modules
        self._autowrap_search += [own for name, own in list(sys.modules.items()) if not name.startswith(skipped)]
        self._autowrap_search.append(torch.utils.checkpoint)
        self._inside, self._whose = inside, f"forward of {type(model).__name__}"
        self.constants: dict[str, Tensor] = {}
        self._all_names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._all_names.setdefault(module, []).append(name)
        self._calls: dict[nn.Module, int] = {}

    def refuse(self, what: str) -> RefusedCode:
        """Returns an error to raise."""
        return RefusedCode(f"{self._whose} cannot be cut: {what}")

    def path_of_module(self, module: nn.Module) -> str:
        names = self._all_names.get(module) or [super().path_of_module(module)]
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return names[min(call, len(names) - 1)]

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module not in self._inside

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a node; raises RefusedCode for a draw that each segment would repeat, and for a checkpoint."""
        if target is checkpoint:
            raise self.refuse("it calls torch.utils.checkpoint: give Memory(recompute=...) instead")
        name = target if kind == "call_method" else getattr(target, "__name__", "")
        if name.rstrip("_") in _DRAWS or (name.startswith("rand") and not name.endswith("_like")):
            raise self.refuse(
                f"it draws random numbers by {name}, once for each segment where the model draws once for the "
                "sequence: draw one for each element, as torch.rand_like(x) or dropout do, or move it into a block"
            )
        return super().create_node(kind, target, *args, **kwargs)

    def create_arg(self, value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if is_plain and not any(value is buffer for buffer in self.root.buffers()):
            constants = self.constants
            name = next((n for n, t in constants.items() if t is value), f"seq1f1b_constant_{len(constants)}")
            constants[name] = value
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(value)


class _Recording(TorchFunctionMode):
    """A mode that records calls of torch without a traced value among the arguments: ``torch.arange(16)``."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        is_of_tensors = any(isinstance(item, (Tensor, fx.Proxy)) for item in tree_leaves((args, kwargs)))
        if name in _DESCRIBES or not (is_of_tensors or function in _FACTORIES):
            return function(*args, **kwargs)
        kind = "call_method" if is_tensor_method_or_property(function) else "call_function"
        return self._tracer.create_proxy(kind, name if kind == "call_method" else function, args, kwargs)


_DESCRIBES = frozenset(  # metadata of a tensor: no values are read
    (
        *("__get__", "__set__", "__len__", "__repr__", "__format__", "__hash__", "size", "dim", "numel", "nelement"),
        *("stride", "element_size", "data_ptr", "is_floating_point", "is_complex", "is_contiguous", "storage_offset"),
        *("is_tensor", "is_storage", "get_device"),
    )
)
_DRAWS = frozenset(
    (
        *("normal", "bernoulli", "multinomial", "poisson", "uniform", "random", "exponential", "geometric"),
        *("cauchy", "log_normal"),
    )
)
_FACTORIES = frozenset(_device_constructors())  # functions that make tensors from no tensor
_TAKE_SIZES = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
_OURS = (
    *(causal.positions, causal.causal_attention, packing.document_starts, ulysses.ulysses_attention),
    *(carry.carry_in, carry.carry_out, carry.add_loss),
)
for _function in _OURS:
    getattr(seq1f1b, _function.__name__)  # a lazy name of the package exists after the first use


# -- values of a trace -------------------------------------------------------------------------------------------------


_RANDOM = ("dropout", "alpha_dropout", "feature_dropout", "rrelu")  # with the functions called rand..._like


def constants_of(model: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Returns the values that depend on constants and buffers alone: every stage computes a copy."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    changed = set[fx.Node]()  # values changed in place, and all inputs of these values
    for node in reversed(graph.nodes):
        if has_effect(node) or node in changed:
            changed.update(node.all_input_nodes)
    found = set[fx.Node]()
    for node in graph.nodes:
        name = _name(node)
        draws = name.startswith("rand") or name in _RANDOM
        if node.op == "get_attr":
            is_constant = node.target not in parameters
        else:
            is_constant = node.op in ("call_function", "call_method") and not draws
        if is_constant and not has_effect(node) and node not in changed and set(node.all_input_nodes) <= found:
            found.add(node)
    return found


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def is_size(node: fx.Node) -> bool:
    """Returns whether a value is surely not a tensor."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "stride", "item", "tolist")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    of_numbers = getattr(node.target, "__module__", "") in ("_operator", "operator", "math")
    return of_numbers and any(map(is_size, node.all_input_nodes))


def has_effect(node: fx.Node) -> bool:
    """Returns whether a node changes a tensor in place or state outside of the graph: unused nodes must stay, too."""
    name = _name(node)
    if node.op == "call_method":
        return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "backward")
    is_in_place = node.target in (*_IN_PLACE, operator.setitem, carry.carry_out, carry.add_loss)
    is_in_place |= "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    return node.op == "call_function" and (is_in_place or (name.endswith("_") and not name.endswith("__")))


_IN_PLACE = [getattr(operator, name) for name in inplace_methods]
