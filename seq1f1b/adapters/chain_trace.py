"""Traces a model's forward with the blocks left whole, or raises an error that says why tracing failed."""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

import seq1f1b
from seq1f1b.adapters.chain_checks import check_lengths, has_effect
from seq1f1b.attention import carry, causal, packing, ulysses
from seq1f1b.engine.model_state import RandomState, attributes_of, first_changed, put_back

__all__ = ["RefusedCode", "Tracer", "trace"]

_HOOKS = [
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
]


class RefusedCode(ValueError):
    """The error for code that a stage would run differently from the model. The message is a whole sentence."""


def trace(model: nn.Module, names: Sequence[str]) -> Tracer:
    """Traces forward, entering only the modules that contain a named module.

    A second trace, in evaluation mode, without gradients and under autocast, must give the same graph.
    """
    whose = f"forward of {type(model).__name__}"
    inside = {model: ""}
    for name in names:
        path = name.split(".")
        inside |= {model.get_submodule(".".join(path[:i])): ".".join(path[:i]) for i in range(1, len(path))}
    _check_entered(inside)
    modes = [(module, module.training) for module in model.modules()]

    def once(is_usual: bool) -> Tracer:
        tracer = Tracer(model, set(inside), whose)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if is_usual else torch.inference_mode())
            for device in () if is_usual else ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                stack.enter_context(torch.autocast(device))
            try:
                for module, _ in modes:
                    module.training = is_usual
                tracer.run(model)
                return tracer
            finally:
                for module, mode in modes:
                    module.training = mode

    first, other = once(True), once(False)
    if str(first.graph) != str(other.graph):
        raise RefusedCode(
            f"{whose} differs between training and evaluation (self.training, or F.dropout), with and without "
            "gradients (torch.is_grad_enabled()), under autocast, or between calls: put what differs into a module of "
            "its own, as nn.Dropout"
        )
    check_lengths(model, first.graph)
    _leave_losses_out(first.graph)
    return first


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


def _check_entered(inside: Mapping[nn.Module, str]) -> None:
    """Raises RefusedCode for hooks and replaced forwards of modules that the trace enters, and for ``*args``."""
    for module, name in inside.items():
        where = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        hooks = ", ".join(kind.strip("_").replace("_", " ") for kind in _HOOKS if getattr(module, kind, None))
        if hooks:
            raise RefusedCode(f"{where} has hooks, which no stage would run ({hooks}): put them on its blocks")
        if "forward" in vars(module):
            raise RefusedCode(f"{where} has a forward that was set on the instance: define it in the class")
        kinds = {parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()}
        if not name and kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise RefusedCode(f"forward of {where} takes *args or **kwargs: name its arguments")


# -- one trace ---------------------------------------------------------------------------------------------------------


class Tracer(fx.Tracer):
    """A tracer of ``inside`` modules; all others stay whole. A module with several names gets the next at each call.

    Args:
        whose: "forward of <class>", for messages.
    Attributes:
        constants: tensors that belong to no module, keyed by name in the graph.
    """

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, inside: set[nn.Module], whose: str) -> None:
        super().__init__(autowrap_modules=(math,))
        self._inside, self._whose = inside, whose
        self.constants: dict[str, Tensor] = {}
        self._all_names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._all_names.setdefault(module, []).append(name)
        self._calls: dict[nn.Module, int] = {}

    def run(self, model: nn.Module) -> None:
        """Traces forward and restores attributes, random state and torch's global settings."""
        attributes, self._random = attributes_of(model.modules()), RandomState(torch.device("cpu"))
        self._start = _surroundings()
        try:
            with _Recording(self), _recorded(self, self._inside):
                self.trace(model)
        except RefusedCode:
            raise
        except Exception as error:  # forward may fail in any way on a value without contents
            raise RefusedCode(
                f"{self._whose} cannot be traced: {type(error).__name__}: {error}. Leave asserts out, write the names "
                "out as in a, b = value, and move what depends on values or sizes, assigns to a part of a tensor, or "
                "takes anything but tensors, into a module of its own"
            ) from error
        finally:
            changed = first_changed(attributes)
            put_back(attributes)
            self._random.restore()
            torch.set_default_dtype(self._start[_DTYPE])
            torch.set_deterministic_debug_mode(self._start[_DETERMINISTIC])
        if changed is not None:
            module, name = changed
            raise self.refuse(
                f"it changes {name!r} of {type(module).__name__} in each call, which no stage would do: move that into "
                "a block, or make it a buffer"
            )

    def refuse(self, what: str) -> RefusedCode:
        """Returns an error to raise."""
        return RefusedCode(f"{self._whose} cannot be cut: {what}")

    def path_of_module(self, module: nn.Module) -> str:
        if module not in self._all_names:
            raise self.refuse(
                f"it calls a {type(module).__name__} that is no part of the model: make it an attribute in __init__"
            )
        names = self._all_names[module]
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return names[min(call, len(names) - 1)]

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module not in self._inside

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a node; raises RefusedCode if torch's state has changed since forward began, as no stage would."""
        with torch._C.DisableTorchFunction():
            now = _surroundings()
            changed = next((name for name, value in now.items() if value != self._start[name]), None)
            if changed is not None:
                raise self.refuse(f"what runs under {changed} would run without it in a stage: move it into a block")
            if not self._random.is_current():
                raise self.refuse(
                    "it draws random numbers in Python, once for all calls, or changes the state of a generator: do "
                    "that in a block, or draw by torch's functions of a tensor, as torch.rand_like(x)"
                )
        if args[0] == "call_method" and args[1] in _DRAWS:
            raise self.refuse(_DRAWN.format(args[1]))
        return super().create_node(*args, **kwargs)

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
        if name in _DRAWS or (name.startswith("rand") and not name.endswith("_like")):
            raise self._tracer.refuse(_DRAWN.format(name))
        kind = "call_method" if is_tensor_method_or_property(function) else "call_function"
        return self._tracer.create_proxy(kind, name if kind == "call_method" else function, args, kwargs)


_DESCRIBES = frozenset(  # metadata of a tensor: no values are read
    (
        *("__get__", "__set__", "__len__", "__repr__", "__format__", "__hash__", "size", "dim", "numel", "nelement"),
        *("stride", "element_size", "data_ptr", "is_floating_point", "is_complex", "is_contiguous", "storage_offset"),
        *("is_tensor", "is_storage", "get_device"),
    )
)
_DRAWN = (
    "it draws random numbers by {}, once for each segment where the model draws once for the sequence: draw one for "
    "each element, as torch.rand_like(x) or dropout do, or move it into a block"
)
_DRAWS = frozenset(
    (
        *("normal", "bernoulli", "multinomial", "poisson", "bernoulli_", "uniform_", "normal_", "random_"),
        *("exponential_", "geometric_", "cauchy_", "log_normal_"),
    )
)
_FACTORIES = frozenset(_device_constructors())  # functions that make tensors from no tensor
_TAKE_SIZES = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
_OURS = (
    *(causal.positions, causal.causal_attention, packing.document_starts, ulysses.ulysses_attention),
    *(carry.carry_in, carry.carry_out, carry.add_loss, causal.token_offset),
)
for _function in _OURS:
    getattr(seq1f1b, _function.__name__)  # a lazy name of the package exists after the first use


@contextmanager
def _recorded(tracer: Tracer, inside: set[nn.Module]) -> Iterator[None]:
    """Records this thread's calls of seq1f1b's operations inside the ``with`` block, under any imported name.

    Also records ``torch.zeros(length, 4)`` and similar calls: torch parses the sizes before a mode sees the call.
    """
    this_thread = threading.get_ident()

    def recorder(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            is_recorded = function in _OURS or any(isinstance(size, fx.Proxy) for size in args)
            if threading.get_ident() != this_thread or not is_recorded:
                return function(*args, **kwargs)
            if function is causal.token_offset:
                raise tracer.refuse("it uses token_offset(), a number of the segment: use positions(x)")
            return tracer.create_proxy("call_function", function, args, kwargs)

        return record

    recorders = {id(function): recorder(function) for function in (*_OURS, *_TAKE_SIZES)}
    forwards = [inspect.unwrap(type(module).forward) for module in inside]
    modules = [
        vars(module) for name, module in list(sys.modules.items()) if not name.startswith(("torch.", "seq1f1b."))
    ]
    places = {id(names): names for names in (*modules, *(forward.__globals__ for forward in forwards))}
    patched = [(names, n, f) for names in places.values() for n, f in list(names.items()) if id(f) in recorders]
    for names, name, function in patched:
        names[name] = recorders[id(function)]
    try:
        yield
    finally:
        for names, name, function in patched:
            names[name] = function


# -- what surrounds an operation ---------------------------------------------------------------------------------------


_DTYPE, _DETERMINISTIC = "another default dtype (torch.set_default_dtype)", "torch.use_deterministic_algorithms"
_modes: Any = torch.overrides._get_current_function_mode_stack  # has no type annotations


def _surroundings() -> dict[str, Any]:
    """Returns torch's state around an operation, keyed by the calls that may change the state."""
    modes = [*_modes(), *torch.utils._python_dispatch._get_current_dispatch_mode_stack()]
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.no_grad, torch.enable_grad, torch.set_grad_enabled, a reentrant torch.utils.checkpoint or a "
        "torch.autograd.Function": torch.is_grad_enabled(),
        "torch.autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        _DTYPE: torch.get_default_dtype(),
        _DETERMINISTIC: torch.get_deterministic_debug_mode(),
        "a mode of torch, as torch.device(...)": [id(mode) for mode in modes if not isinstance(mode, _Recording)],
        "torch.utils.checkpoint or torch.autograd.graph.saved_tensors_hooks": saving and tuple(map(id, saving)),
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "torch.nn.attention.sdpa_kernel": torch.nn.attention._cur_sdpa_kernel_backends(),
    }
