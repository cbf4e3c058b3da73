"""Recomputation: what F of a unit leaves to its R, and how R comes to what F would have saved.

F runs without a graph. R runs the stage once more from the same input, under the same unit, with the same random
numbers. The order says which units have an R (``csrc/core/unit.h``); nothing here decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__: list[str] = []

_Run = TypeVar("_Run", bound=Callable[..., Any])
_generators = threading.RLock()  # torch's default ones belong to the whole process


class Kept:
    """What F of a unit leaves to its R: the arguments of the stage, and the state of the random number generators.

    Args:
        trains: whether the stage has parameters that require grad.
    """

    def __init__(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, trains: bool) -> None:
        self.inputs = inputs
        self._kwargs, self._device, self._trains = kwargs, device, trains
        self._random = _random_state(device)
        self._read: list[tuple[Tensor, int]] = []  # what F has been given, with its version
        for value in (*inputs, *kwargs.values()):
            self.note(value)

    def note(self, value: Any) -> None:
        """F reads this, and R will."""
        if isinstance(value, Tensor):
            self._read.append((value, value._version))

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around F: no graph.

        Nor autocast's cache: in torch without the fix of pytorch#158232, R would find a weight cast here, without a
        graph, and the weight's gradient would be lost.
        """
        kind = self._device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        without_cache = nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype, cache_enabled=False)
        with torch.no_grad(), without_cache:
            yield
        if any(tensor._version != version for tensor, version in self._read):
            raise RuntimeError(
                "the stage has changed its input, or a state that it carried in, in place. A recomputed unit starts "
                "from them once more: let it work on a copy, or leave the unit out of recompute="
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around R: the random numbers of F, and then those that would have come."""
        before = _random_state(self._device)
        _set_random_state(self._device, self._random)
        try:
            yield
        finally:
            _set_random_state(self._device, before)

    def with_gradient(self, output: Tensor, carried: Mapping[int, Tensor] | None) -> Tensor:
        """What F computed, saying that a gradient may come back for it: that is known only once R has run."""
        if not (output.is_floating_point() or output.is_complex()):
            return output
        given = (*self.inputs, *self._kwargs.values(), *(carried or {}).values())
        may = self._trains or any(isinstance(t, Tensor) and t.requires_grad for t in given)
        return output.detach().requires_grad_(may)


def digest(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """The shape, the dtype and two sums over the bytes of each tensor; one sum weighs bytes by their places.

    What differs in a bit, or in the order of its values, has another.
    """
    found = []
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(data.numel(), device=data.device) % 8191 + 1
        found.append((tuple(tensor.shape), tensor.dtype, int(data.sum()), int((data * places).sum())))
    return found


def one_at_a_time(run: _Run) -> _Run:
    """For ranks that are threads: no other thread draws random numbers between F's, or between R's."""

    def alone(*arguments: Any) -> Any:
        with _generators:
            return run(*arguments)

    return alone  # type: ignore[return-value]


def _random_state(device: torch.device) -> list[Tensor]:
    """The state of the CPU's generator, and of the device's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_random_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
