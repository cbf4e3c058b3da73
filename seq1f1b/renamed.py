"""Names of 1.0.0rc1 that have gone. Whoever uses one gets an error that says what there is now.

docs/from-rc1.md has the same names for a reader.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar, cast

__all__ = [
    "GONE",
    "missing",
    "refuse_old_arguments",
    "refuse_old_names",
    "renamed",
    "renamed_arguments",
    "watch_old_paths",
]

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

GONE: dict[str, dict[str, str]] = {
    "PipelineEngine": {
        "unchecked=": 'attention="own" (False), "any" (True) or "unchecked" ("all")',
        "plan": "engine.found_order()",
        "run": "engine.step() or engine.eval()",
        "sizes_of": "engine.report().segment_sizes",
        "tied_elsewhere": "engine.clip_grad_norm_(), which counts tied parameters once",
        "last_step": "engine.report()",
    },
    "Schedule": {
        "lower": "Schedule.check(), or Schedule.simulate()",
        "places_text": "Schedule.places",
        "byte_changes": "Schedule.peak_memory()",
        "first_cells": "Schedule.segments_of",
    },
    "seq1f1b": {"check_segment_sizes": "the check of partition_sequence and of PipelineEngine"},
    "seq1f1b.runtime.report": {"read_reports": "PipelineReport.load_all"},
    "Layout": {"recompute=": "inside=", "recompute": "inside"},
    "seq1f1b.torchtitan": {"convert": "segmented", "pipelining_fn": "segmented"},
}
"""By class, function or module: an argument (with =), an attribute or a name that has gone, and what takes its place.
``seq1f1b/planning/renamed.py`` adds the planner's."""

WENT: dict[str, str] = {}
"""By the path of a module of the planner: what takes its place."""

_SAME = "balance folder pretrained trainer trainer_batch trainer_checks trainer_replicas trainer_state weight_files"
_OTHER = {"transformers": "cut", "transformers_attention": "attention_function"}
MOVED = {name: name for name in _SAME.split()} | _OTHER
MOVED |= {f"transformers_{name}": name for name in ("initial", "layers", "look", "own", "stage", "state")}
"""By the name of a module that was in seq1f1b.adapters: its name in seq1f1b.transformers."""


def missing(module: str, name: str) -> ImportError | AttributeError:
    """The error for a name that a module lacks.

    One that 1.0.0rc1 had is an ImportError: ``from module import name`` shows no text of another one.
    """
    if name in GONE.get(module, ()):
        return ImportError(_told(f"module {module!r}", name, GONE[module][name]), name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def _told(what: str, name: str, now: str) -> str:
    return f"{what} has no attribute {name!r}: 1.0.0rc1 had it, and now there is {now}"


def refuse_old_names(module: str) -> None:
    """Lets a module of ``GONE`` raise for the names that it had in 1.0.0rc1. Called as it is imported."""

    def __getattr__(name: str) -> Any:
        raise missing(module, name)

    vars(sys.modules[module])["__getattr__"] = __getattr__


def refuse_old_arguments(owner: str, named: Iterable[str], whose: str) -> None:
    """Raises TypeError for an argument that a class of ``GONE`` took in 1.0.0rc1; ``whose``: who was given it."""
    for name in named:
        if f"{name}=" in GONE[owner]:
            raise TypeError(f"{whose} takes no {name}=: 1.0.0rc1 did, and now there is {GONE[owner][f'{name}=']}")


def renamed(cls: T) -> T:
    """Decorates a class of ``GONE``: its old arguments raise TypeError, its old attributes AttributeError."""
    changed: Any = cls
    init, gone = changed.__init__, GONE[cls.__name__]

    @wraps(init)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        refuse_old_arguments(cls.__name__, named, cls.__name__)
        init(self, *args, **named)

    def __getattr__(self: Any, name: str) -> Any:
        what = f"{type(self).__name__!r} object"
        text = _told(what, name, gone[name]) if name in gone else f"{what} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self)

    changed.__init__, changed.__getattr__ = __init__, __getattr__
    return cls


def renamed_arguments(function: F) -> F:
    """Decorates a function of ``GONE``: its old arguments raise TypeError."""

    @wraps(function)
    def refusing(*args: Any, **named: Any) -> Any:
        refuse_old_arguments(function.__name__, named, function.__name__)
        return function(*args, **named)

    return cast(F, refusing)


class OldPaths:
    """Finds modules under the paths that they had in 1.0.0rc1, to name the new ones. Python asks it last."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        if package == "seq1f1b.adapters" and module in MOVED:
            raise ImportError(f"{name} of 1.0.0rc1 is seq1f1b.transformers.{MOVED[module]} now", name=name)
        if name in WENT:
            raise ImportError(f"{name} of 1.0.0rc1 is {WENT[name]} now", name=name)
        return None


def watch_old_paths() -> None:
    """Has Python ask about modules that nobody else finds."""
    if OldPaths not in sys.meta_path:
        sys.meta_path.append(OldPaths)
