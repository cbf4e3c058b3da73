"""Hooks for ``by_values.py``: what the modules of a stage are given and return while it runs by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from seq1f1b.runtime.layer import is_plain
from seq1f1b.runtime.nested import tensors_of
from seq1f1b.runtime.operations import Operations

if TYPE_CHECKING:
    from typing_extensions import Self

__all__: list[str] = []


class Hooks:
    """Hooks on modules, while it is entered."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._register()
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _register(self) -> None:
        raise NotImplementedError

    @contextmanager
    def segment(self, seen: Operations) -> Iterator[None]:
        """Around the forward of one segment."""
        yield

    def taken(self) -> tuple[list[Tensor], list[Tensor]]:
        """After it: tensors that are compared beside the stage's outputs, and others if nothing is carried."""
        return [], []


class Hidden(Hooks):
    """Values that flow into weights that are zero, as projections are before their first step: no output tells of them.

    A module's own parameter that is zero may scale what its children return.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        parts = [part for module in modules for part in module.modules()]
        self._zero = [part for part in parts if any(_is_zero(n, p) for n, p in part.named_parameters(recurse=False))]
        self._inputs: list[Tensor] = []
        self._inner: list[Tensor] = []

    def _register(self) -> None:
        for part in self._zero:
            self._handles.append(part.register_forward_pre_hook(lambda _, args: self._take(self._inputs, args)))
            for child in part.children():
                self._handles.append(
                    child.register_forward_hook(lambda _, args, output: self._take(self._inner, output))
                )

    def _take(self, taken: list[Tensor], value: Any) -> None:
        taken += [t.detach().clone() for t in tensors_of(value)]

    @contextmanager
    def segment(self, seen: Operations) -> Iterator[None]:
        self._inputs, self._inner = [], []
        yield

    def taken(self) -> tuple[list[Tensor], list[Tensor]]:
        return self._inputs, self._inner


def _is_zero(name: str, parameter: Tensor) -> bool:
    is_floating = is_plain(parameter) and parameter.is_floating_point()
    if "bias" in name or not is_floating or parameter.is_meta or not parameter.numel():
        return False
    values = parameter.detach()
    while values.dim() > 1:
        values = values[0]
    return not bool(values[:64].any() if values.dim() else values.any()) and not bool(parameter.any())


@dataclass(frozen=True)
class _Event:
    """A module is called, or has returned.

    Attributes:
        key: id of the module, "in" or "out", and how many of these came before.
        module: whose code made the tensors.
    """

    key: tuple[int, str, int]
    module: int
    tensors: list[Tensor]


class Trace(Hooks):
    """Arguments and results of every module of a stage, in runs of it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._segments: list[list[_Event]] = []
        self._stack: list[int] = []
        self._counts: Counter[tuple[int, str]] = Counter()
        self.seen: Operations | None = None

    def _register(self) -> None:
        for part in dict.fromkeys(part for module in self._modules for part in module.modules()):
            self._handles.append(part.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(part.register_forward_hook(self._after))

    @contextmanager
    def segment(self, seen: Operations) -> Iterator[None]:
        self.seen = seen
        self._segments.append([])
        self._stack.clear()
        self._counts.clear()
        yield

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._note(module, "in", self._stack[-1] if self._stack else 0, (args, kwargs))
        self._stack.append(id(module))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != id(module):
            pass
        self._note(module, "out", id(module), output)

    def _note(self, module: nn.Module, kind: str, by: int, value: Any) -> None:
        assert self.seen is not None
        count = self._counts[id(module), kind]
        self._counts[id(module), kind] += 1
        tensors = [t.detach().clone() for t in tensors_of(value)]
        self._segments[-1].append(_Event((id(module), kind, count), by, tensors))
        self.seen.time = len(self._segments[-1])

    def first_difference(self, is_causal: Callable[..., bool | None]) -> tuple[int, int, bool] | None:
        """After a run as one segment and one as two: the module, its time in the last segment, whether it is causal.

        Args:
            is_causal: of a tensor in one segment, and its two parts: whether the first part is as in the whole; None:
                both are.
        """
        whole, first, second = self._segments
        events = {event.key: event for event in first}
        times = {event.key: time for time, event in enumerate(second)}
        for event in whole:
            if event.key not in events or event.key not in times:
                continue
            time = times[event.key]
            parts = zip(event.tensors, events[event.key].tensors, second[time].tensors, strict=False)
            found = [answer for tensors in parts if (answer := is_causal(*tensors)) is not None]
            if found:
                return event.module, time, all(found)
        return None
