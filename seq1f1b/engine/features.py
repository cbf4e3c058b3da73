"""Features of an engine: work around the units of a stage, each feature a subclass of :class:`Feature`.

``runner.py`` lists all features. A step calls only features with work in the step.
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


class Feature:
    """A feature at work on one stage, for an engine's life: empty hooks, of which each feature overrides some.

    Args:
        stage: the stage. A stage holds its features, so a feature must not hold the stage between steps.
        options: the engine's options.
    Attributes:
        serves: letters of passes: the feature is idle in an order that has none of the passes; empty: never.
        is_for_new: True: the feature is idle except in the first step of a shape.
        is_idle: True: the feature is idle in this engine.
    """

    serves = ""
    is_for_new = False
    is_idle = False
    _step: Any = None  # the stage's, while a step runs

    def __init__(self, stage: Any, options: Any) -> None:
        pass

    def start(self, step: Any) -> bool:
        """Prepares for a step, before its units. Returns whether the feature has work in this step."""
        raise NotImplementedError

    def passes(self) -> Mapping[str, Pass]:
        """Returns the functions that run units of the feature, by the letter of their pass.

        The function under ``"fill"`` runs a piece of W while the rank waits, and returns whether any is left.
        """
        return {}

    def in_step(self, others: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
        """Returns a context around all units of a step; ``others``: modules of the rank's other stages."""

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        """Returns a context around the module and the sink of a unit, in F and in R (``unit.is_again``)."""

    def look_back(self) -> None:
        """Called after the last unit, when nothing surrounds the units, and before ranks meet at the step's end."""

    def figures(self) -> Mapping[str, Any]:
        """Returns figures for the report, by name."""
        return {}
