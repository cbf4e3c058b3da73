"""Features of an engine: what it does around the units of a stage beyond running them, each a :class:`Part`.

``runner.py`` lists all of them. A step calls those alone that have something to do in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import nn

from seq1f1b.attention.unit import LiveUnit

__all__: list[str] = []

Received: TypeAlias = "tuple[tuple[Sequence[Any], Sequence[bool]], ...] | None"
"""Messages that came for a unit from other ranks, in the order in which the program waits for them: the tensors of each
(None for a gradient that does not exist), and which of them require grad. None if no message comes."""

Pass: TypeAlias = Callable[[int, Received], Any]
"""Runs a unit, given its cell and what came for it; returns a tuple of what it sends to other stages, or None."""


class Part:
    """Surrounds the units of one stage, for an engine's life. Each hook does nothing here; a part has those it needs.

    Args:
        stage: holds the part, so the part must not hold it between steps.
        options: the engine's.
        tier: where units of this rank may move what they saved; None: nowhere.
    Attributes:
        serves: letters of passes: the part has nothing to do in an order without any of them; empty: in every order.
        needs: an attribute of the step's :class:`Batch`: the part has nothing to do where that is false; "": none.
        is_idle: True: the part has nothing to do in this engine.
    """

    serves = ""
    needs = ""
    is_idle = False
    _step: Any = None  # the stage's, while a step runs

    def __init__(self, stage: Any, options: Any, tier: Any) -> None:
        pass

    def start(self, step: Any) -> bool:
        """In a step, before its units. Returns whether there is anything to do in this one."""
        raise NotImplementedError

    def passes(self) -> Mapping[str, Pass]:
        """Units that the part runs itself, by the letter of their pass.

        By ``"fill"``, a piece of W while the rank waits, which returns whether any is left.
        """
        return {}

    def in_step(self, others: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
        """Around all units of the step; ``others``: modules of this rank's other stages."""

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        """Around the module and what becomes of its output, in F, and in R, where ``unit.is_again``."""

    def returned(self, unit: LiveUnit, output: Any) -> None:
        """In F and in R, once the module has returned."""

    def after_backward(self, unit: LiveUnit, received: Received) -> None:
        """In B or I, after the backward; the unit still has its inputs."""

    def look_back(self) -> None:
        """After the last unit, once nothing surrounds the units any more, and before ranks meet at the step's end."""

    def figures(self) -> Mapping[str, Any]:
        """Figures for the report, by name."""
        return {}


class Constants(Part):
    """Calls ``check_before_step(step)`` of a stage's modules that have it, as those of :func:`seq1f1b.split` do."""

    def __init__(self, stage: Any, options: Any, tier: Any) -> None:
        modules = stage.module.modules() if isinstance(stage.module, nn.Module) else ()
        holders: list[Any] = [part for part in modules if hasattr(type(part), "check_before_step")]
        self._checks = [part.check_before_step for part in holders]
        self.is_idle = not holders

    def start(self, step: Any) -> bool:
        """Raises ValueError where a constant has changed, or an argument is refused."""
        for check in self._checks:
            check(step)
        return False
