"""Makes runs of a model comparable, and restores the model's state afterwards, bit for bit.

A comparable run has no dropout, no compiled code, and a single floating dtype.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seq1f1b.attention.unit import current

__all__: list[str] = []

_OURS = current.__module__.rpartition(".")[0]  # the operations of this package
_CONTAINERS = (dict, OrderedDict, list, set, deque)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}
_DROPOUTS = frozenset(
    ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


@contextmanager
def keep_state(
    modules: Iterable[nn.Module], dtype: torch.dtype | None, *, parameters: bool = True, gradients: bool = True
) -> Iterator[None]:
    """Puts copies of values into parameters, buffers and tensor attributes within the context; sets gradients aside.

    The tensor objects stay, so optimizers, modules and losses that refer to a tensor see the copy.

    Args:
        dtype: dtype of copies of floating tensors; None: unchanged.
        parameters: False: parameters are not copied; for code that does not change parameters.
        gradients: False: gradients stay; for code without a backward. Ranks that are threads may share a parameter.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    tensors = {id(t): t for part in parts for t in _tensors_of(part)}
    own = {} if parameters else {key: t for key, t in tensors.items() if isinstance(t, nn.Parameter)}
    tensors = {key: t for key, t in tensors.items() if key not in own}
    taken_gradients = [(t, t.grad) for t in own.values() if t.is_leaf and gradients]
    attributes = attributes_of(parts)
    taken: list[Tensor] = []
    try:
        for parameter, _ in taken_gradients:
            parameter.grad = None
        for tensor in tensors.values():
            _take(tensor, dtype)
            taken.append(tensor)
        yield
    finally:
        for parameter, gradient in taken_gradients:
            parameter.grad = gradient
        put_back(attributes)
        for tensor in reversed(taken):
            _give_back(tensor)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for value in module.__dict__.values():
        if type(value) is Tensor and value.is_leaf and not value.is_inference():
            yield value


# -- tensors -----------------------------------------------------------------------------------------------------------


@dataclass
class _Original:
    users: int
    data: Tensor
    grad: Tensor | None
    grad_dtype: torch.dtype | None


# Ranks that are threads may share a tensor: the first rank takes the value away, the last rank gives it back.
_lock = threading.Lock()
_originals: dict[int, _Original] = {}


def _take(tensor: Tensor, dtype: torch.dtype | None) -> None:
    with _lock:
        known = _originals.get(id(tensor))
        if known is not None:
            known.users += 1
            return
        trained = tensor.is_floating_point() and tensor.requires_grad
        original = _Original(1, tensor.data, tensor.grad, tensor.grad_dtype if trained else None)
        wanted = tensor.dtype
        if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            wanted = dtype.to_complex() if tensor.is_complex() else dtype
        copy = tensor.data.to(wanted, copy=True)
        tensor.grad = None
        tensor.data = copy
        if trained and tensor.grad_dtype != wanted:  # set by somebody, so it does not follow the dtype
            tensor.grad_dtype = wanted
        _originals[id(tensor)] = original


def _give_back(tensor: Tensor) -> None:
    with _lock:
        original = _originals[id(tensor)]
        original.users -= 1
        if original.users:
            return
        del _originals[id(tensor)]
        tensor.grad = None
        tensor.data = original.data
        if tensor.is_floating_point() and tensor.requires_grad and tensor.grad_dtype != original.grad_dtype:
            tensor.grad_dtype = original.grad_dtype
        tensor.grad = original.grad


def has_changed(tensor: Tensor) -> bool:
    """Returns whether a tensor within :func:`keep_state` differs from its original."""
    with _lock:
        original = _originals[id(tensor)].data
    return not (original.is_meta or torch.equal(tensor.data.to(original.dtype).to_dense(), original.to_dense()))


# -- attributes: what a module keeps from one forward to the next beside its buffers -----------------------------------


_ABSENT: Any = object()
Attributes: TypeAlias = "list[tuple[nn.Module, dict[str, tuple[Any, Any]]]]"


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """Returns modules' attributes for :func:`put_back`: values, and copies of plain containers."""
    return [
        (module, {n: (v, v.copy() if type(v) in _CONTAINERS else None) for n, v in module.__dict__.items()})
        for module in modules
    ]


def put_back(saved: Attributes) -> None:
    """Restores modules' attributes, and the elements of plain containers."""
    for module, own in saved:
        for name in module.__dict__.keys() - own.keys():
            del module.__dict__[name]
        for name, (value, elements) in own.items():
            module.__dict__[name] = value
            if elements is not None and _ids(value) != _ids(elements):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(elements)


def _ids(container: Any) -> list[int]:
    items = [*container, *container.values()] if isinstance(container, dict) else container
    ids = map(id, items)
    return sorted(ids) if isinstance(container, set) else list(ids)


def first_changed(saved: Attributes) -> tuple[nn.Module, str] | None:
    """Returns the first changed attribute, parameter, buffer or submodule: its module and name; None: no change."""
    for module, own in saved:
        now = module.__dict__
        for name in (*own, *(now.keys() - own.keys())):
            value, elements = own.get(name, (_ABSENT, None))
            if now.get(name, _ABSENT) is not value:
                return module, name
            if elements is not None and _ids(value) != _ids(elements):
                registered = value if name in ("_parameters", "_buffers", "_modules") else ()
                return module, next((key for key in registered if value[key] is not elements.get(key)), name)
    return None


# -- random state ------------------------------------------------------------------------------------------------------


GENERATORS = threading.RLock()  # ranks that are threads use torch's generators, of the whole process, one at a time


def generator_states(device: torch.device) -> tuple[Tensor, ...]:
    """Returns the states of torch's generators: the CPU's, and the device's."""
    with GENERATORS:
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return tuple(states)


def set_generator_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    with GENERATORS:
        torch.set_rng_state(states[0])
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states[1], device)


class RandomState:
    """The state of the generators of torch (the CPU's and one device's), of Python and of numpy, if imported."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._numpy = device, sys.modules.get("numpy")
        of_numpy = None if self._numpy is None else self._numpy.random.get_state()
        self._states = generator_states(device), random.getstate(), of_numpy

    def restore(self) -> None:
        set_generator_states(self._device, self._states[0])
        random.setstate(self._states[1])
        if self._numpy is not None:
            self._numpy.random.set_state(self._states[2])

    def is_current(self) -> bool:
        """Returns whether no number has been drawn since."""
        return _equal(self._states, RandomState(self._device)._states)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return all(_equal(a, b) for a, b in zip(left, right, strict=True))
    return bool((left == right).all()) if hasattr(left, "all") else bool(left == right)


# -- runs that can be compared -----------------------------------------------------------------------------------------


_stance_lock = threading.Lock()
_uncompiled = 0  # threads inside `uncompiled`: several if ranks are threads
_stance: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs compiled functions uncompiled within the context, because dynamo would trace the effects of a mode."""
    global _uncompiled, _stance
    with _stance_lock:
        _uncompiled += 1
        if _uncompiled == 1 and "torch._dynamo" in sys.modules:  # imported by torch.compile
            _stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _stance_lock:
            _uncompiled -= 1
            if _uncompiled == 0 and _stance is not None:
                _stance.__exit__(None, None, None)  # back to the caller's stance
                _stance = None


class ComparableRun(TorchFunctionMode):
    """Mode in which dropout returns its input, and compiled functions run uncompiled.

    Args:
        dtype: dtype of the run; None: the model's own. Casts to a narrower dtype, as for norms or a softmax, and new
            tensors of torch's default dtype get the run's dtype, too; autocast is off.
    Attributes:
        drops: by probability, the number of elements that forwards gave to dropout, without recomputation.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._others = ExitStack()
        self.drops: Counter[float] = Counter()

    def __enter__(self) -> ComparableRun:
        for device in ("cpu", "cuda") if self._dtype is not None else ():
            if torch.is_autocast_enabled(device):
                self._others.enter_context(torch.autocast(device, enabled=False))
        self._others.enter_context(uncompiled())
        super().__enter__()  # type: ignore[no-untyped-call] # torch's has no types
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._others.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _DROPOUTS and args:
            is_training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
            self._count(args[1] if len(args) > 1 else kwargs.get("p", 0.5), is_training, args[0])
            return args[0]
        if name == "scaled_dot_product_attention":
            args, kwargs = self._without_dropout(args, kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if self._dtype is None or caller.startswith(_OURS):  # attention casts slopes to a kernel's dtype
            return func(*args, **kwargs)
        return self._run_wide(func, name, args, kwargs)

    def _without_dropout(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        self._count(p, True, args[0] if args else kwargs["query"])
        if len(args) > 4:
            return (*args[:4], 0.0, *args[5:]), kwargs
        return args, ({**kwargs, "dropout_p": 0.0} if p else kwargs)

    def _count(self, p: float, is_training: bool, dropped: Tensor) -> None:
        unit = current()
        is_again = torch._C._current_graph_task_id() != -1 or (unit is not None and unit.is_again)
        if is_training and p and not is_again:
            self.drops[float(p)] += dropped.numel()

    def _run_wide(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = [a for a in args if isinstance(a, Tensor)]
        if given and given[0].dtype == self._dtype:
            if name in _CASTS and not func.__name__.startswith("__"):  # not Python's float(tensor)
                return given[0]
            args = tuple(self._dtype if isinstance(a, torch.dtype) and a in _NARROW else a for a in args)
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"] in _NARROW:
            kwargs = {**kwargs, "dtype": self._dtype}
        result = func(*args, **kwargs)
        is_new = isinstance(result, Tensor) and result.dtype in _NARROW and not given
        return result.to(self._dtype) if is_new else result


def is_abstract() -> bool:
    """Returns whether tensors have no values, as within torch.func."""
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


# -- compiled modules, from which the engine keeps its own code: dynamo would trace it, too ----------------------------


def is_compiled_whole(module: nn.Module) -> bool:
    """Returns whether a call of the module runs compiled code (``torch.compile`` or ``nn.Module.compile``)."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def runs_compiled(module: nn.Module) -> bool:
    """Returns whether the module is compiled, whole or in a method; does not look at submodules."""
    kind: Any = type(module)
    return is_compiled_whole(module) or any(
        type(value) is FunctionType and hasattr(value, "_torchdynamo_orig_callable")
        for owner in (module, *_own_kinds(kind))
        for value in vars(owner).values()
    )


@cache
def _own_kinds(kind: type) -> tuple[type, ...]:
    return tuple([base for base in kind.__mro__ if not base.__module__.startswith(("torch.nn.", "builtins"))])
