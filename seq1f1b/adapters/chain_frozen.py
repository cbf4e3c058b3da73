"""Values of Python that a traced forward has read: attributes, globals, closures. Stages keep them: they must stay."""

from __future__ import annotations

import dis
import enum
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Frozen", "is_generator"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, range)
_SKIPPED = frozenset(("torch", "numpy", "math", "seq1f1b", "typing", "functools", "einops", "warnings", "logging"))
_MISSING = "nothing"  # shown where an attribute does not exist
_DEPTH, _MOST = 4, 4096  # containers in containers; entries of one


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[Any, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


class Frozen:
    """Values that forward read outside of its blocks when it was traced.

    Args:
        names: of the model's modules.
    """

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._codes: dict[Any, dict[str, Any]] = {}  # code of the model that ran, and its globals
        self._reads: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self._readers: dict[str, Callable[[], Any]] = {}
        self._fields: frozenset[str] = frozenset()
        self._values: dict[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> Frozen:
        return self  # it refers to the model, which a copy of a stage does not hold

    # -- while forward is traced ---------------------------------------------------------------------------------------

    def knows_code(self, frame: FrameType) -> bool:
        return frame.f_code in self._codes

    def note_code(self, frame: FrameType) -> None:
        self._codes[frame.f_code] = frame.f_globals

    def note_attribute(self, module: nn.Module, name: str) -> None:
        self._reads.setdefault((id(module), name), (module, name))

    def note_environment(self, key: Any) -> None:
        self._readers.setdefault(f"os.environ[{key!r}]", partial(os.environ.get, key, _MISSING))

    def note_call(self, text: str, reader: Callable[[], Any]) -> None:
        self._readers.setdefault(text, reader)

    def close(self) -> None:
        """After the last trace: takes the values."""
        self._fields = frozenset(name for code in self._codes for name in code.co_names)
        for module, name in self._reads.values():
            if isinstance(getattr(type(module), name, None), property):
                continue  # what it reads was noted
            path = f"self.{self._names[module]}.{name}" if self._names.get(module) else f"self.{name}"
            self._readers.setdefault(path, partial(getattr, module, name, _MISSING))
        for code, around in self._codes.items():
            for name in {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}:
                if name in around:
                    where = around.get("__name__", "?")
                    self._readers.setdefault(f"{name} of module {where}", partial(around.get, name, _MISSING))
            for name, cell in _cells(code):
                self._readers.setdefault(f"{name} around {code.co_name}", partial(_content, cell))
        self._codes.clear()
        self._values = dict(self._read())
        used = {path for path, reader in self._readers.items() if any(True for _ in self._walk(path, reader(), _DEPTH))}
        self._readers = {path: reader for path, reader in self._readers.items() if path in used}

    def generators(self) -> list[str]:
        """Generators of random numbers that forward has read so far, by name."""
        found = [f"self.{name}" for m, name in self._reads.values() if is_generator(vars(m).get(name))]
        for code, around in self._codes.items():
            found += [name for name in code.co_names if is_generator(around.get(name))]
        return found

    # -- later -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ValueError where a value is another one now."""
        now = dict(self._read())
        if now == self._values:
            return
        for path in (*self._values, *now):
            before, after = self._values.get(path, _MISSING), now.get(path, _MISSING)
            if before != after:
                raise ValueError(
                    f"{path} was {_shown(before)} when the model was cut, is {_shown(after)} now, and its stages keep "
                    "to the first: cut the model again, or make it a buffer, which stages read in each call"
                )

    def _read(self) -> Iterator[tuple[str, Any]]:
        for path, reader in self._readers.items():
            yield from self._walk(path, reader(), _DEPTH)

    def _walk(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        """The plain values that a value consists of, by path."""
        if isinstance(value, _PLAIN):
            yield path, (value, type(value)) if value == value else repr(value)
        elif isinstance(value, (Tensor, nn.Module)) or is_generator(value):
            if not isinstance(value, (nn.Parameter, nn.Module)) and path.startswith("self."):
                yield path, _Same(value)
        elif isinstance(value, (FunctionType, BuiltinFunctionType)):
            if path.startswith("self."):
                yield path, _Same(value)
        elif depth == 0 or isinstance(value, MethodType):
            return
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            items: Any = value.items() if isinstance(value, dict) else enumerate(value)
            if isinstance(value, (set, frozenset)):
                items = enumerate(sorted(value, key=repr))
            yield f"len({path})", len(value)
            for _, (key, item) in zip(range(_MOST), items, strict=False):
                yield from self._walk(f"{path}[{key!r}]", item, depth - 1)
        elif isinstance(value, ModuleType):
            top = value.__name__.partition(".")[0]
            if top not in _SKIPPED and top not in sys.stdlib_module_names:
                yield from self._walk_fields(path.partition(" ")[0], vars(value), depth=1)
        elif isinstance(value, type):
            if value.__module__.partition(".")[0] not in _SKIPPED and not issubclass(value, nn.Module):
                yield from self._walk_fields(path.partition(" ")[0], vars(value), depth - 1)
        else:
            fields: dict[str, Any] = {}
            for kind in reversed(type(value).__mro__):
                fields |= vars(kind)
            fields |= getattr(value, "__dict__", {})
            for name in getattr(type(value), "__slots__", ()):
                if isinstance(name, str) and hasattr(value, name):
                    fields[name] = getattr(value, name)
            yield from self._walk_fields(path, fields, depth - 1)

    def _walk_fields(self, path: str, fields: Any, depth: int) -> Iterator[tuple[str, Any]]:
        for name in self._fields.intersection(fields):
            yield from self._walk(f"{path}.{name}", fields[name], depth)


class _Same:
    """Stands for an object that must stay the same one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return f"{type(self._value).__name__} {id(self._value):#x}"


def _shown(value: Any) -> str:
    return repr(value[0]) if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], type) else str(value)


def _cells(code: Any) -> Iterator[tuple[str, Any]]:
    """Variables around a function of this code."""
    if not code.co_freevars:
        return
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__code__ is code and function.__closure__:
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
                if name != "__class__":
                    yield name, cell
            return


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING
