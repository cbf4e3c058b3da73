"""An engine of a model's stage alone."""

from __future__ import annotations

from typing import Any

from seq1f1b.engine.engine import PipelineEngine

__all__: list[str] = []


class LoneEngine(PipelineEngine):
    """Engine of a model's stage alone, to look at the stage or to time it."""

    _needs_whole_model = False

    def activations_of(self, stage: int) -> Any:
        """Returns the bytes in graphs of the stage's units in the last step; None if the step did not count them."""
        return self._runner.activations.get(stage)
