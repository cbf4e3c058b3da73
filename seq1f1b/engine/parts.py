"""Features of an engine: what it does around the units of a stage beyond running them, each a :class:`Part`.

``runner.py`` lists all of them. A step in which a stage has none to run with runs as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor, nn

from seq1f1b.attention.unit import LiveUnit

__all__: list[str] = []

Received: TypeAlias = "tuple[tuple[Sequence[Any], Sequence[bool]], ...] | None"
"""Messages that came for a unit from other ranks, in the order in which the program waits for them: the tensors of each
(None for a gradient that does not exist), and which of them require grad. None if no message comes."""

Pass: TypeAlias = Callable[[int, Received], "tuple[Any, ...] | None"]
"""Runs a unit, given its cell and what came for it; returns what it sends to other stages."""


class Part:
    """Surrounds the units of one stage, for an engine's life. Each method here does nothing; a part has those it needs.

    Args:
        stage: holds the part, so the part must not hold it between steps.
        options: the engine's.
        tier: where units of this rank may move what they saved; None: nowhere.
    """

    _step: Any = None  # the stage's, while a step runs

    def __init__(self, stage: Any, options: Any, tier: Any) -> None:
        pass

    def start(self, step: Any) -> bool:
        """In a step, before its units. Returns whether there is anything to do in this one."""
        raise NotImplementedError

    def passes(self) -> Mapping[str, Pass]:
        """Units that the part runs itself, by the letter of their pass."""
        return {}

    def in_step(self, others: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
        """Around all units of the step; ``others``: modules of this rank's other stages."""

    def begin(self, unit: LiveUnit) -> None:
        """At the begin of F."""

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        """Around the module and what becomes of its output, in F and in R."""

    def returned(self, unit: LiveUnit, output: Any) -> None:
        """In F and in R, once the module has returned."""

    def end(self, unit: LiveUnit) -> None:
        """At the end of F."""

    def before_backward(self, unit: LiveUnit) -> None:
        """In B or I, before the backward."""

    def after_backward(self, unit: LiveUnit, received: Received) -> None:
        """In B or I, after the backward; the unit still has its inputs."""

    def fill(self, cell: int) -> bool:
        """While the rank waits, a piece of the W of a cell whose I has run. Returns whether any is left."""
        return False

    def look_back(self) -> None:
        """After the last unit, once nothing surrounds the units any more, and before ranks meet at the step's end."""

    def figures(self) -> Mapping[str, Any]:
        """Figures for the report, by name."""
        return {}


class Source:
    """Gives the units of a stage their inputs: here those that the step was given, by cell."""

    def __init__(self, given: Sequence[tuple[Any, ...]] = ()) -> None:
        self._given = given

    def inputs(self, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        """For F: the module's positional arguments."""
        return self._given[unit.cell]

    def give_back(self, unit: LiveUnit) -> tuple[Tensor | None, ...] | None:
        """After the backward: what crosses to another rank of their gradients."""
        return None


class Sink(Part):
    """Takes the outputs of a stage's units in one step."""

    def __init__(self) -> None:
        pass

    def take(self, unit: LiveUnit, output: Any) -> tuple[Tensor, ...] | None:
        """In F and R: gives the unit its roots and seeds, and returns what crosses to another rank."""
        raise NotImplementedError

    def gradients(self, unit: LiveUnit, received: Received) -> Sequence[Tensor | None]:
        """For B: the gradients of the unit's outputs, unless it has seeds of its own."""
        raise NotImplementedError


def hooks(parts: Iterable[Part], name: str) -> tuple[Callable[..., Any], ...]:
    """The methods of this name that any of the parts has itself: an empty tuple costs nothing."""
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(Part, name))


class Constants(Part):
    """Calls ``check_before_step(step)`` of a stage's modules that have it, as those of :func:`seq1f1b.split` do."""

    def __init__(self, stage: Any, options: Any, tier: Any) -> None:
        modules = stage.module.modules() if isinstance(stage.module, nn.Module) else ()
        holders: list[Any] = [part for part in modules if hasattr(type(part), "check_before_step")]
        self._checks = [part.check_before_step for part in holders]

    def start(self, step: Any) -> bool:
        """Raises ValueError where a constant has changed, or an argument is refused."""
        for check in self._checks:
            check(step)
        return False
