"""Keeps a model's state aside while it runs for a look: afterwards everything is as it was, bit for bit."""

from __future__ import annotations

import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@contextmanager
def modules_aside(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Within, parameters, buffers and tensors that are attributes hold copies, and no parameter has a gradient.

    The tensors are the same objects, so whoever refers to them sees the copies: an optimizer, another module, a loss.

    Args:
        dtype: of the copies of floating tensors; None: their own.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    tensors = {id(t): t for part in parts for t in _tensors_of(part)}
    attributes = [(part, _copied(part.__dict__)) for part in parts]
    taken: list[Tensor] = []
    try:
        for tensor in tensors.values():
            _take(tensor, dtype)
            taken.append(tensor)
        yield
    finally:
        for part, saved in attributes:
            _put_back(part.__dict__, saved)
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


# Ranks that are threads may share a tensor: the first one takes it, the last one gives it back.
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
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        copy = tensor.data.to(wanted, copy=True)
        tensor.grad = None
        tensor.data = copy
        if trained and tensor.grad_dtype != wanted:  # it does not follow the dtype: somebody has set it
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


# -- attributes: what a module keeps from one forward to the next beside its buffers -----------------------------------


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of its elements if it is a plain container."""
    return {name: (value, value.copy() if type(value) in _CONTAINERS else None) for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - saved.keys():
        del attributes[name]
    for name, (value, elements) in saved.items():
        attributes[name] = value
        if elements is not None and not _same(value, elements):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(elements)


def _same(left: Any, right: Any) -> bool:
    if len(left) != len(right):
        return False
    if isinstance(left, dict):
        return all(a is b and left[a] is right[b] for a, b in zip(left, right, strict=True))
    if isinstance(left, set):
        return {id(item) for item in left} == {id(item) for item in right}
    return all(a is b for a, b in zip(left, right, strict=True))


# -- random state ------------------------------------------------------------------------------------------------------


class RandomState:
    """The state of the generators of torch (the CPU's and one device's), of Python and of numpy, where it is used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        numpy = sys.modules.get("numpy")
        self._states: list[tuple[Callable[[Any], Any], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
        ]
        if device.type == "cuda":
            self._states.append((lambda s: torch.cuda.set_rng_state(s, device), torch.cuda.get_rng_state(device)))
        if numpy is not None:
            self._states.append((numpy.random.set_state, numpy.random.get_state()))

    def restore(self) -> None:
        for restore, state in self._states:
            restore(state)

    def is_current(self) -> bool:
        """Whether nobody has drawn a number since."""
        return all(
            _equal(ours, now)
            for (_, ours), (_, now) in zip(self._states, RandomState(self._device)._states, strict=True)
        )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return all(_equal(a, b) for a, b in zip(left, right, strict=True))
    return bool((left == right).all()) if hasattr(left, "all") else bool(left == right)
