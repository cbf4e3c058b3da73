"""The trace of a model's forward: its graph, with the blocks left whole, or the error that says why there is none."""

from __future__ import annotations

import inspect
import linecache
import math
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

import seq1f1b
from seq1f1b.adapters.chain_checks import check_lengths, has_effect, line_of
from seq1f1b.adapters.chain_frozen import Frozen
from seq1f1b.ops import attention, context, packing, ulysses
from seq1f1b.runtime.model_state import RandomState, attributes_of, first_changed, put_back

__all__ = ["Refused", "Traced", "trace"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NOT_THE_USERS = (_TORCH, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<frozen ")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_HOOKS = [
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
]
_GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")]


class Refused(ValueError):
    """Something that no stage would do as the model does. Its text is a whole sentence."""


@dataclass
class Traced:
    """The result of a trace.

    Attributes:
        constants: tensors that belong to no module, by the names that the graph has for them.
        frozen: what forward read of Python.
        without: names of the arguments that serve the loss alone, and are left out with it.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    frozen: Frozen
    without: list[str]


def trace(model: nn.Module, names: Sequence[str]) -> Traced:
    """Traces forward, with the modules of these names left whole, and everything beside the modules that hold them.

    What a comparison of values would not see is found by a second trace, in which the mode, gradients and autocast are
    other ones, and no optional argument is given: its graph must be the same.
    """
    whose = f"forward of {type(model).__name__}"
    inside = {model: ""}
    for name in names:
        path = name.split(".")
        inside |= {model.get_submodule(".".join(path[:i])): ".".join(path[:i]) for i in range(1, len(path))}
    _check_entered(inside)
    frozen = Frozen(model)

    def once(given: Mapping[str, Any], is_usual: bool = True) -> _Tracer:
        tracer = _Tracer(model, set(inside), whose)
        modes = [(module, module.training) for module in model.modules()]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if is_usual else torch.inference_mode())
            for device in () if is_usual else ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                stack.enter_context(torch.autocast(device))
            stack.enter_context(frozen.noted())
            try:
                for module, _ in modes:
                    module.training = is_usual
                tracer.run(model, dict(given))
                return tracer
            finally:
                for module, mode in modes:
                    module.training = mode

    first = once({})
    graph = first.graph
    check_lengths(model, graph)
    without: list[str] = []
    defaults = {node.target: node.args[0] for node in graph.nodes if node.op == "placeholder" and node.args}
    for name, default in defaults.items():
        plain = _text(once({name: default, **dict.fromkeys(without)}).graph, {})
        if _text(graph, {name: default}) == plain:
            continue
        _leave_out(graph, name)
        if default is not None or _text(graph, {}) != plain:
            raise Refused(
                f"{whose} depends on whether {name} is given: put that into a module of its own. If {name} serves the "
                "loss, return the same logits with it and without it, and give the loss as loss_fn to the engine"
            )
        without.append(name)
    text, other = _text(graph, defaults), _text(once(defaults, is_usual=False).graph, {})
    if text != other:
        place = next((a.place or b.place for a, b in zip(text, other, strict=False) if a != b), "")
        raise Refused(
            f"{whose} is another one in training than in evaluation (self.training, or F.dropout), with gradients than "
            f"without (torch.is_grad_enabled()), under autocast, without {', '.join(defaults) or 'an argument'}, or in "
            f"each call{place}: put what differs into a module of its own, as nn.Dropout"
        )
    return Traced(graph, first.constants, frozen, without)


def _check_entered(inside: Mapping[nn.Module, str]) -> None:
    """Raises for what torch would do around or in place of the forward of modules that the trace enters."""
    for name in _GLOBAL_HOOKS:
        if getattr(torch_module, name) and "registration" not in name:
            raise Refused(
                f"torch has {name.strip('_').replace('_', ' ')} for all modules, which run for the model and not for "
                "its stages: remove them before split, and put hooks on its blocks"
            )
    for module, name in inside.items():
        where = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        hooks = ", ".join(kind.strip("_").replace("_", " ") for kind in _HOOKS if getattr(module, kind, None))
        if hooks:
            raise Refused(f"{where} has hooks, which no stage would run ({hooks}): put them on its blocks")
        if "forward" in vars(module):
            raise Refused(f"{where} has a forward that was set on the instance: define it in the class")
        kinds = {parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()}
        if not name and kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise Refused(f"forward of {where} takes *args or **kwargs: name its arguments")


# -- one trace ---------------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """Enters only the modules that hold a block at which the model is cut. A module's calls have its names in turn.

    Args:
        whose: the forward, in words.
    Attributes:
        constants: tensors that belong to no module, by the names that the graph has for them.
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
        self._finding: Refused | None = None  # told once forward has returned: it may catch what is raised in it

    def run(self, model: nn.Module, given: dict[str, Any]) -> None:
        """Traces forward, with these arguments as constants. All else is left as it was found."""
        attributes, outside = attributes_of(model.modules()), RandomState(torch.device("cpu"))
        _draw()  # so that a seed within forward is seen, even that of the state which is there
        self._start, self._random = _ambient(), RandomState(torch.device("cpu"))
        try:
            with _Recording(self), _recorded(self, self._inside):
                self.trace(model, given or None)
        except Exception as error:  # whatever forward does with a value that it does not have yet
            if self._finding is None:
                raise Refused(
                    f"{self._whose} cannot be traced{_place(error)}: {type(error).__name__}: {error}. What depends on "
                    "values or sizes, or takes anything but tensors, must lie in a module of its own"
                ) from error
            raise self._finding from error
        finally:
            changed = first_changed(attributes)
            put_back(attributes)
            outside.restore()
            torch.set_default_dtype(self._start[_DTYPE])
            is_on, warns = self._start[_DETERMINISTIC]
            torch.use_deterministic_algorithms(is_on, warn_only=warns)
        if self._finding is None and changed is not None:
            module, name = changed
            self.refuse(
                f"it changes {name!r} of {type(module).__name__} in each call, which no stage would do: move that into "
                "a block, or make it a buffer"
            )
        if self._finding is not None:
            raise self._finding

    def refuse(self, what: str, place: str = "") -> Refused:
        """Makes an error to be raised. It stands although forward may catch it."""
        found = Refused(f"{self._whose} cannot be cut{place}: {what}")
        self._finding = self._finding or found
        return found

    def path_of_module(self, module: nn.Module) -> str:
        if module not in self._all_names:
            raise self.refuse(
                f"it calls a {type(module).__name__} that is no part of the model: make it an attribute in __init__",
                _place(),
            )
        names = self._all_names[module]
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return names[min(call, len(names) - 1)]

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module not in self._inside

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Raises where an operation runs in another state than forward began in: a stage would run it without that."""
        place = _place()
        with torch._C.DisableTorchFunction():
            now = _ambient()
            changed = next((name for name, value in now.items() if value != self._start[name]), None)
            if changed is not None:
                raise self.refuse(
                    f"what runs there under {changed} would run without it in a stage: move it into a block, whole",
                    place,
                )
            if not self._random.is_current():
                raise self.refuse(
                    "it draws random numbers in Python, once for all calls, or changes the state of a generator: do "
                    "that in a block, or draw by torch's functions of a tensor, as torch.rand_like(x)",
                    place,
                )
        if args[0] == "call_method" and args[1] in _DRAWS:
            raise self.refuse(_DRAWN.format(args[1]), place)
        node = super().create_node(*args, **kwargs)
        node.meta["seq1f1b_line"] = place
        return node

    def create_arg(self, value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if is_plain and not any(value is buffer for buffer in self.root.buffers()):
            constants = self.constants
            name = next((n for n, t in constants.items() if t is value), f"seq1f1b_constant_{len(constants)}")
            constants[name] = value
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(value)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def unknown(self, *_: Any) -> Any:
        """Raises, because forward asks a value for what only a run can tell."""
        raise self.refuse(
            "its control flow, or an assert, asks for a value that a trace does not have: the number, the truth, the "
            "length or the items of a tensor, a size or an argument. Leave the assert out, write the names out as in "
            "a, b = value, and move what depends on values or sizes into a block",
            _place(),
        )

    to_bool = iter = keys = unknown  # type: ignore[assignment]


class _Value(fx.Proxy):
    """A value of the trace. What asks it for a number is refused, even where forward would catch a TypeError."""

    tracer: _Tracer

    def _unknown(self, *_: Any) -> Any:
        self.tracer.unknown()

    __int__ = __float__ = __complex__ = __len__ = __contains__ = __round__ = _unknown

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self.tracer.refuse(
            "it assigns to a part of a tensor, which a trace does not record: use torch.where, or move it into a block",
            _place(),
        )


class _Recording(TorchFunctionMode):
    """Has the trace record functions of torch that are given no value of it: ``torch.arange(16)``, say."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        is_of_tensors = any(isinstance(item, (Tensor, fx.Proxy)) for item in tree_leaves((args, kwargs)))
        if name in _DESCRIBES or not (is_of_tensors or function in _FACTORIES):
            return function(*args, **kwargs)
        if name in _DRAWS or (name.startswith("rand") and not name.endswith("_like")):
            raise self._tracer.refuse(_DRAWN.format(name), _place())
        kind = "call_method" if is_tensor_method_or_property(function) else "call_function"
        return self._tracer.create_proxy(kind, name if kind == "call_method" else function, args, kwargs)


_DESCRIBES = frozenset(  # what is known of a tensor without its values
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
_FACTORIES = frozenset(_device_constructors())  # what makes tensors of nothing
_TAKE_SIZES = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
_OURS = (
    *(attention.positions, attention.causal_attention, packing.document_starts, ulysses.ulysses_attention),
    *(context.carry_in, context.carry_out, context.add_loss, attention.token_offset),
)
for _function in _OURS:
    getattr(seq1f1b, _function.__name__)  # is there once it was used


@contextmanager
def _recorded(tracer: _Tracer, inside: set[nn.Module]) -> Iterator[None]:
    """Within, this thread's calls of our operations are recorded, wherever the model's files import them.

    So is ``torch.zeros(length, 4)``, which torch parses before it asks a mode.
    """
    this_thread = threading.get_ident()

    def recorder(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            is_recorded = function in _OURS or any(isinstance(size, fx.Proxy) for size in args)
            if threading.get_ident() != this_thread or not is_recorded:
                return function(*args, **kwargs)
            if function is attention.token_offset:
                raise tracer.refuse("it uses token_offset(), a number of the segment: use positions(x)", _place())
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
_DEVICES = [d for d in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(d)]
_sdp: Any = torch.backends.cuda  # whose functions have no types
_function_modes: Any = torch.overrides._get_current_function_mode_stack


def _ambient() -> dict[str, Any]:
    """The state that operations run under, by what may change it."""
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    operations = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return {
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.no_grad, torch.enable_grad, torch.set_grad_enabled, a reentrant torch.utils.checkpoint or a "
        "torch.autograd.Function": torch.is_grad_enabled(),
        "torch.autocast": (
            torch.is_autocast_cache_enabled(),
            [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES],
        ),
        _DTYPE: torch.get_default_dtype(),
        _DETERMINISTIC: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "a mode of torch's functions, as torch.device(...)": [
            id(mode) for mode in _function_modes() if not isinstance(mode, _Recording)
        ],
        "a mode of torch's operations (TorchDispatchMode)": [id(mode) for mode in operations],
        "torch.utils.checkpoint or torch.autograd.graph.saved_tensors_hooks": saving and tuple(map(id, saving)),
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.nn.attention.sdpa_kernel": (
            _sdp.flash_sdp_enabled(),
            _sdp.mem_efficient_sdp_enabled(),
            _sdp.math_sdp_enabled(),
            _sdp.cudnn_sdp_enabled(),
        ),
        "torch.backends.cudnn.flags": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "torch.backends.mkldnn.flags": torch.backends.mkldnn.enabled,
    }


def _draw() -> None:
    """Draws a number from each generator of the process."""
    random.random(), torch.rand((), device="cpu")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.random()


# -- lines of the model ------------------------------------------------------------------------------------------------


def _place(error: BaseException | None = None) -> str:
    """Names the innermost line of the model, here or where an error was raised, as ``, at FILE:LINE: "TEXT"``."""
    here = traceback.walk_stack(sys._getframe(1))
    for frame, line in here if error is None else reversed(list(traceback.walk_tb(error.__traceback__))):
        if error is None and frame.f_globals is globals() and frame.f_code.co_name == "run":
            break  # beyond it nothing is traced
        file = frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD) and "-packages" not in file
        if not is_standard and not file.startswith(_NOT_THE_USERS):
            text = linecache.getline(file, line).strip()
            return f", at {file}:{line}" + (f": {text!r}" if text else "")
    return ""


# -- graphs ------------------------------------------------------------------------------------------------------------


class _Line(str):
    """A line of a graph as text."""

    place = ""  # the model's


def _text(graph: fx.Graph, defaults: Mapping[str, Any]) -> list[_Line]:
    """Writes down the computation of a graph, for a comparison. What an output lacks (None) is not told.

    Args:
        defaults: values of optional arguments.
    """
    value = graph.output_node().args[0]
    items: Any = value.items() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value]
    outputs = [i for i in items if not (i is None or (isinstance(value, dict) and i[1] is None))]
    live, names, lines = set[fx.Node](), dict[fx.Node, Any](), list[_Line]()
    fx.node.map_arg(outputs, live.add)
    for node in reversed(graph.nodes):
        if node.op == "call_module" or has_effect(node) or any(u in live and u.op != "output" for u in node.users):
            live.add(node)
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = defaults.get(node.target, node.target)
        elif node in live and node.op != "output":
            names[node] = f"%{len(lines)}"
            lines.append(_Line(f"{node.op} {node.target} {_named((node.args, node.kwargs), names)}"))
            lines[-1].place = line_of(node)
    return [*lines, _Line(f"output {_named(tuple(outputs), names)}")]


def _named(value: Any, names: Mapping[fx.Node, Any]) -> Any:
    return fx.node.map_arg(value, lambda node: names[node])


def _leave_out(graph: fx.Graph, name: str) -> None:
    """Removes an argument and all that comes of it, and the places that this leaves empty in the output."""
    output = graph.output_node()
    gone = [node for node in graph.nodes if node.op == "placeholder" and node.target == name]
    for node in graph.nodes:
        if node is not output and not set(gone).isdisjoint(node.all_input_nodes):
            gone.append(node)

    def is_kept(item: Any) -> bool:
        found = set[fx.Node]()
        fx.node.map_arg(item, found.add)
        return item is not None and found.isdisjoint(gone)

    value: Any = output.args[0]
    if isinstance(value, dict):
        value = {key: item if is_kept(item) else None for key, item in value.items()}
    else:
        rest = tuple(filter(is_kept, value if isinstance(value, (tuple, list)) else (value,)))
        value = rest[0] if len(rest) == 1 else rest
    output.args = (value,)
    for node in reversed(gone):
        graph.erase_node(node)
