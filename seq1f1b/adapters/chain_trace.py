"""The trace of a model's forward: its graph, with the blocks left whole, or the error that says why there is none."""

from __future__ import annotations

import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

import seq1f1b
from seq1f1b.adapters.chain_frozen import Frozen, is_generator
from seq1f1b.adapters.chain_watch import (
    OURS,
    Refused,
    Watch,
    check_entered,
    check_global_hooks,
    is_of_user,
    place_of,
    reason_of_bool,
    users_frame,
)

__all__ = ["Traced", "has_effect", "is_size", "line_of", "trace"]

_WRAPPED: Any = (math, seq1f1b)
for _function in OURS:
    getattr(seq1f1b, _function.__name__)  # is there once it was used, and only then does fx see it


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
    without: list[str] = field(default_factory=list)


class _Tracer(fx.Tracer):
    """Enters only the modules that hold a block at which the model is cut. A module's calls have its names in turn."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, inside: set[nn.Module], watch: Watch) -> None:
        super().__init__(autowrap_modules=_WRAPPED, autowrap_functions=OURS)
        mine = [m for m in list(sys.modules.values()) if any(vars(m).get(f.__name__) is f for f in OURS)]
        self._autowrap_search.extend(mine)  # functions of other files, which forward calls
        self._inside, self._watch = inside, watch
        self._all_names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._all_names.setdefault(module, []).append(name)
        self._calls: dict[nn.Module, int] = {}
        self.constants: dict[str, Tensor] = {}

    def path_of_module(self, module: nn.Module) -> str:
        if module not in self._all_names:
            raise self.refused(
                f"it calls a {type(module).__name__} that is no part of the model: make it an attribute in __init__"
            )
        names = self._all_names[module]
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return names[min(call, len(names) - 1)]

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module not in self._inside

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        frame = self._watch.look()
        if args[0] == "call_method" and args[1] in _DRAWS:
            raise self._watch.refuse(_DRAWN.format(args[1]), frame)
        node = super().create_node(*args, **kwargs)
        node.meta["seq1f1b_line"] = place_of(frame)
        return node

    def create_arg(self, value: Any) -> Any:
        if is_generator(value):
            raise self.refused("a trace cannot hold its generator of random numbers: draw from it in a block")
        is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if is_plain and not any(value is buffer for buffer in self.root.buffers()):
            name = next((n for n, t in self.constants.items() if t is value), f"seq1f1b_constant_{len(self.constants)}")
            self.constants[name] = value
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(value)

    def refused(self, what: str) -> Refused:
        return self._watch.refuse(what, users_frame(sys._getframe(1)))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def to_bool(self, value: fx.Proxy) -> bool:
        frame = users_frame(sys._getframe(1))
        raise self._watch.refuse(reason_of_bool(frame), frame)

    def iter(self, value: fx.Proxy) -> Iterator[fx.Proxy]:
        raise self.refused(
            "it loops over a value, or unpacks it, of a length that a trace does not know: write the names out, as "
            "a, b = value, or move it into a block"
        )

    def keys(self, value: fx.Proxy) -> Any:
        raise self.refused(
            "it asks a value for its keys, which a trace does not know: name them, or move it into a block"
        )


class _Value(fx.Proxy):
    """A value of the trace. What asks it for a number is refused, even where forward would catch a TypeError."""

    tracer: _Tracer

    def _refuse(self, *_: Any) -> Any:
        raise self.tracer.refused(
            "it asks for the number of a value that a trace does not have: what depends on values or sizes must lie "
            "in a module of its own"
        )

    __int__ = __float__ = __complex__ = __len__ = __contains__ = __round__ = _refuse

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self.tracer.refused(
            "it assigns to a part of a tensor, which a trace does not record: use torch.where, or move it into a block"
        )


class _Recording(TorchFunctionMode):
    """Has the trace record functions of torch that are given no value of it: ``torch.arange(16)``, say."""

    tracer: _Tracer | None = None

    def trace(self, tracer: _Tracer, model: nn.Module, concrete: Any) -> fx.Graph:
        self.tracer = tracer
        try:
            return tracer.trace(model, concrete_args=concrete)
        finally:
            self.tracer = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        is_of_tensors = any(isinstance(item, (Tensor, fx.Proxy)) for item in tree_leaves((args, kwargs)))
        if self.tracer is None or name in _DESCRIBES or not (is_of_tensors or function in _FACTORIES):
            return function(*args, **kwargs)
        if name in _READS and not any(isinstance(arg, fx.Proxy) for arg in args):
            raise self.tracer.refused(
                "it reads the values of a tensor, once for all calls: what depends on values must lie in a module of "
                "its own"
            )
        if name in _DRAWS or (name.startswith("rand") and not name.endswith("_like")):
            raise self.tracer.refused(_DRAWN.format(name))
        if is_tensor_method_or_property(function):
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", function, args, kwargs)


_READS = frozenset(
    (
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__"),
    )
)
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
_TAKE_SIZES = ("zeros", "ones", "empty", "rand", "randn")  # torch parses their sizes before it asks a mode


def trace(model: nn.Module, names: Sequence[str], check: Callable[[fx.Graph], None]) -> Traced:
    """Traces forward, with the modules of these names left whole, and everything beside the modules that hold them.

    check: raises for a graph whose fault is to be told before forward is traced again with other arguments.
    """
    inside: dict[nn.Module, str] = {model: ""}
    for name in names:
        path = name.split(".")
        for i in range(1, len(path)):
            inside.setdefault(model.get_submodule(".".join(path[:i])), ".".join(path[:i]))
    check_global_hooks()
    for module, name in inside.items():
        check_entered(module, f"{name!r} ({type(module).__name__})" if name else type(module).__name__)
    _check_arguments(model)
    return _Traces(model, set(inside), check).traced()


def _check_arguments(model: nn.Module) -> None:
    code = getattr(type(model).forward, "__code__", None)
    if code is not None and code.co_flags & 0x0C:
        raise Refused(f"forward of {type(model).__name__} takes *args or **kwargs: name its arguments")


class _Traces:
    """All traces of one model."""

    def __init__(self, model: nn.Module, inside: set[nn.Module], check: Callable[[fx.Graph], None]) -> None:
        self._model, self._inside, self._whose = model, inside, type(model).__name__
        self._check = check
        self._frozen = Frozen({module: name for name, module in model.named_modules()})
        self._constants: dict[str, Tensor] = {}

    def traced(self) -> Traced:
        modes = {module: module.training for module in self._model.modules()}
        try:
            return self._traced()
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _traced(self) -> Traced:
        graph = self._once(True)
        constants = self._constants
        defaults = {node.target: node.args[0] for node in graph.nodes if node.op == "placeholder" and node.args}
        self._check_generators()
        text = _text(graph, {})
        if text != _text(self._once(False, gradients=False, autocast=True), {}):
            self._name_difference(text)
        self._check(graph)
        without: list[str] = []
        for name, default in defaults.items():
            plain = self._once(True, {name: default})
            if _text(graph, {name: default}) == _text(plain, {}):
                continue
            if default is not None or _text(graph, {}, beside=name) != _text(plain, {}, beside=name):
                self._refuse_argument(graph, plain, name)
            without.append(name)
        if without:
            graph = self._once(True, dict.fromkeys(without))
            constants = self._constants
            _leave_out(graph, defaults.keys() - set(without))
        rest = {name: default for name, default in defaults.items() if name not in without}
        absent = self._once(True, defaults) if rest else graph
        if rest and without:
            _leave_out(absent, ())
        if _text(graph, rest) != _text(absent, rest):
            raise Refused(
                f"forward of {self._whose} depends on whether {', '.join(map(str, rest))} are given: put that into a "
                "module of its own"
            )
        self._check_generators()
        self._frozen.close()
        return Traced(graph, constants, self._frozen, without)

    def _check_generators(self) -> None:
        generators = self._frozen.generators()
        if generators:
            raise Refused(
                f"forward of {self._whose} uses {generators[0]}, a generator of random numbers, outside of its blocks: "
                "a trace draws from it once for all calls, so draw in a block"
            )

    def _refuse_argument(self, graph: fx.Graph, plain: fx.Graph, name: str) -> None:
        given, absent = graph.output_node().args[0], plain.output_node().args[0]
        is_loss = isinstance(given, (tuple, list)) != isinstance(absent, (tuple, list)) or (
            isinstance(absent, (tuple, list)) and None in absent
        )
        if is_loss:
            raise Refused(
                f"forward of {self._whose} computes other logits where {name} is given than where it is not, or "
                f"returns a loss in their place: return the logits of all tokens in any case, without {name}, and give "
                "the loss as loss_fn to the engine"
            )
        raise Refused(
            f"forward of {self._whose} depends on whether {name} is given: put that into a module of its own (if "
            f"{name} serves a loss, return logits alone, and give the loss as loss_fn to the engine)"
        )

    def _name_difference(self, text: list[_Line]) -> None:
        """Raises: forward is another one in the second trace, by its mode, its gradients or autocast."""
        traces: tuple[tuple[str, Callable[[], fx.Graph]], ...] = (
            ("in training than in evaluation (self.training, or F.dropout)", lambda: self._once(False)),
            ("with gradients than without (torch.is_grad_enabled())", lambda: self._once(True, gradients=False)),
            ("under autocast (torch.is_autocast_enabled())", lambda: self._once(True, autocast=True)),
        )
        for what, once in traces:
            other = _text(once(), {})
            if text != other:
                pairs = zip_longest(text, other, fillvalue=_Line())
                place = next(a.place or b.place for a, b in pairs if a != b)
                raise Refused(
                    f"forward of {self._whose} is another one {what}{place}: put that into a module of its own"
                    + (", as nn.Dropout" if "dropout" in what else "")
                )
        raise Refused(
            f"forward of {self._whose} is another one in each call: put what differs into a module of its own"
        )

    def _once(
        self,
        training: bool,
        defaults: Mapping[str, Any] | None = None,
        *,
        gradients: bool = True,
        autocast: bool = False,
    ) -> fx.Graph:
        """One trace. Contexts that are on already hide those of forward, so two traces have opposite ones."""
        for module in self._model.modules():
            module.training = training
        recording = _Recording()
        watch = Watch(self._whose, self._frozen, (recording,))
        tracer = _Tracer(self._model, self._inside, watch)
        concrete: Any = dict(defaults) if defaults else None
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if gradients else torch.inference_mode())
            stack.enter_context(_autocast(autocast))
            stack.enter_context(recording)
            stack.enter_context(self._unchanged())
            stack.enter_context(_sizes_taken(recording))
            stack.enter_context(_attributes_noted(self._frozen))
            try:
                graph: fx.Graph = watch.run(partial(recording.trace, tracer, self._model, concrete))
            except Refused:
                raise
            except Exception as error:  # whatever forward does with a value that it does not have yet
                raise self._explained(error) from error
        watch.check()
        self._constants = tracer.constants
        return graph

    def _explained(self, error: Exception) -> Refused:
        frames, following = [], error.__traceback__
        while following is not None:
            if is_of_user(following.tb_frame):
                frames.append((following.tb_frame, following.tb_lineno))
            following = following.tb_next
        place = ""
        if frames:
            frame, line = frames[-1]
            place = f", at {frame.f_code.co_filename}:{line}"
        return Refused(
            f"forward of {self._whose} cannot be traced{place}: {type(error).__name__}: {error}. What depends on "
            "values or sizes, or takes anything but tensors, must lie in a module of its own"
        )

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raises, and undoes it, where forward changes attributes of modules: in a stage it would not."""
        before: dict[Any, dict[str, Any]] = {module: dict(vars(module)) for module in self._model.modules()}
        registered = [(m, own[kind], dict(own[kind])) for m, own in before.items() for kind in _REGISTERED]
        lengths = {
            (module, name): len(value)
            for module, own in before.items()
            for name, value in own.items()
            if type(value) in (list, dict, set) and not name.startswith("_")
        }
        try:
            yield
        finally:
            changed = []
            for module, own in before.items():
                now = vars(module)
                names = [n for n in own.keys() | now.keys() if own.get(n, before) is not now.get(n, before)]
                changed += [(module, name) for name in names if name not in ("training", "_backward_hooks")]
                for name in names:
                    if name in own:
                        now[name] = own[name]
                    else:
                        del now[name]
            changed += [at for at, length in lengths.items() if len(vars(at[0])[at[1]]) != length]
            for module, now, own in registered:
                names = [n for n in own.keys() | now.keys() if own.get(n, before) is not now.get(n, before)]
                changed += [(module, name) for name in names]
                if names:
                    now.clear()
                    now.update(own)
        if changed:
            module, name = changed[0]
            raise Refused(
                f"forward of {self._whose} changes {name!r} of {type(module).__name__} in each call, which no stage "
                "would do: move that into a block, or make it a buffer"
            )


_REGISTERED = ("_parameters", "_buffers", "_modules")

# -- around a trace ----------------------------------------------------------------------------------------------------


@contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    devices = [device for device in ("cpu", "cuda") if torch.amp.is_autocast_available(device)] if enabled else []
    before = [torch.is_autocast_enabled(device) for device in devices]
    for device in devices:
        torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        for device, was in zip(devices, before, strict=True):
            torch.set_autocast_enabled(device, was)


@contextmanager
def _sizes_taken(recording: _Recording) -> Iterator[None]:
    """Within, ``torch.zeros(length, 4)`` takes a size of the trace."""
    originals = {name: getattr(torch, name) for name in _TAKE_SIZES}

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        def take(*sizes: Any, **options: Any) -> Any:
            if recording.tracer is not None and any(isinstance(size, fx.Proxy) for size in sizes):
                return recording.tracer.create_proxy("call_function", function, sizes, options)
            return function(*sizes, **options)

        return take

    for name, function in originals.items():
        setattr(torch, name, taking(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)


@contextmanager
def _attributes_noted(frozen: Frozen) -> Iterator[None]:
    """Within, attributes of modules that the model's code reads are noted."""
    code_is_users: dict[Any, bool] = {}
    this_thread = threading.get_ident()

    def read(module: nn.Module, name: str) -> Any:
        if threading.get_ident() != this_thread:  # a step of another rank
            return object.__getattribute__(module, name)
        frame = sys._getframe(1)
        known = code_is_users.get(frame.f_code)
        if known is None:
            known = code_is_users[frame.f_code] = is_of_user(frame)
        if known and name != "training" and not name.startswith("__"):
            tensors = vars_of(module)
            if not any(name in tensors.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")):
                frozen.note_attribute(module, name)
        return object.__getattribute__(module, name)

    def vars_of(module: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = object.__getattribute__(module, "__dict__")
        return found

    nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


# -- graphs ------------------------------------------------------------------------------------------------------------


def line_of(node: fx.Node) -> str:
    """The line of the model that made a value, as :func:`place_of` shows it."""
    return str(node.meta.get("seq1f1b_line", ""))


def is_size(node: fx.Node) -> bool:
    """Whether a value is known to be no tensor."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "stride", "item", "tolist")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    parents = [parent for parent in node.all_input_nodes if parent.op != "placeholder"]
    of_numbers = getattr(node.target, "__module__", "") in ("_operator", "operator", "math")
    return of_numbers and any(map(is_size, parents))


def has_effect(node: fx.Node) -> bool:
    """Whether a value changes another one in place, or something outside of the graph, so that nobody need use it."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "backward")
    if node.op != "call_function" or node.target in _CHECKS:
        return False
    name = getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return (
        is_in_place
        or node.target in (*_IN_PLACE, operator.setitem, seq1f1b.carry_out, seq1f1b.add_loss)
        or "out" in node.kwargs
        or bool(node.kwargs.get("inplace"))
    )


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = [getattr(operator, f"i{name}") for name in _BINARY]
_CHECKS = (torch._assert, fx._symbolic_trace._assert_is_none)


class _Line(str):
    """A line of a graph as text."""

    place = ""  # the model's


def _text(graph: fx.Graph, defaults: Mapping[str, Any], beside: str | None = None) -> list[_Line]:
    """Writes down the computation of a graph, for a comparison.

    Args:
        defaults: values of optional arguments.
        beside: leaves out what comes of this argument.
    """
    left_out = {node for node in graph.nodes if node.op == "placeholder" and node.target == beside}
    if beside is not None:
        for node in graph.nodes:
            if node.op != "output" and any(n in left_out for n in node.all_input_nodes):
                left_out.add(node)
    value = graph.output_node().args[0]
    outputs: list[Any] = [value]
    if beside is not None:  # what else the output consists of
        if isinstance(value, (dict, tuple, list)):
            outputs = list(value.items() if isinstance(value, dict) else value)
        outputs = [item for item in outputs if not (item is None or _nodes_of(item) & left_out)]
        outputs = [item for item in outputs if not (isinstance(item, tuple) and item[1:] == (None,))]
    live = set[fx.Node]()
    used = _nodes_of(outputs)
    for node in reversed(graph.nodes):
        is_root = node in used or node.op == "call_module" or has_effect(node)
        if node not in left_out and (is_root or any(user in live for user in node.users)):
            live.add(node)
    names: dict[fx.Node, Any] = {}
    lines: list[_Line] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = defaults.get(node.target, node.target)
        elif node in live:
            names[node] = f"%{len(lines)}"
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])
            lines.append(_Line(f"{node.op} {node.target} {arguments}"))
            lines[-1].place = line_of(node)
    return [*lines, _Line(f"output {fx.node.map_arg(tuple(outputs), lambda n: names[n])}")]


def _nodes_of(value: Any) -> set[fx.Node]:
    found = set[fx.Node]()
    fx.node.map_arg(value, found.add)
    return found


def _leave_out(graph: fx.Graph, kept: Any) -> None:
    """Removes the arguments of a loss, and the places that it leaves empty in the output."""
    output = graph.output_node()
    value = output.args[0]
    if isinstance(value, (tuple, list)):
        rest = tuple(item for item in value if item is not None)
        output.args = (rest[0] if len(rest) == 1 else rest,)
    for node in reversed(graph.nodes):
        if node.op == "placeholder" and node.args and node.target not in kept:
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)
