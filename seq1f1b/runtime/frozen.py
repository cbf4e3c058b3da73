"""Before each step, has stages look at what they took as constants, or are given, where they ask for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from seq1f1b.runtime.parts import Part

__all__: list[str] = []


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
