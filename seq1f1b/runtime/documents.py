"""Asks the stages of a planned step, whose rows hold several documents, to tell these from each other.

``causal_attention`` without ``doc_ids`` is refused where it writes its keys (``csrc/torch/segment_rows.c``), so in
compiled code, too. State that is carried along a row is told of where the stage cannot know the documents at all.
"""

from __future__ import annotations

from typing import Any

from seq1f1b import _C
from seq1f1b.ops.unit import LiveUnit
from seq1f1b.runtime.findings import DOCUMENTS, Finding
from seq1f1b.runtime.nested import tensors_of
from seq1f1b.runtime.parts import Feature, Part
from seq1f1b.runtime.stage import StageStep

__all__: list[str] = []


class AskingForDocuments(Feature):
    """In steps whose plan has a row of several documents."""

    def begin(self, step: StageStep) -> Part | None:
        return _Rows(step) if any(count > 1 for count in step.arguments.documents) else None


class _Rows(Part):
    def __init__(self, step: StageStep) -> None:
        self._step, self._documents = step, step.arguments.documents

    def begin(self, unit: LiveUnit) -> None:
        _C.unit_set_documents(self._documents[unit.microbatch])

    def end(self, unit: LiveUnit) -> None:
        carries = unit.carried_in is not None or unit.carried_out is not None
        if carries and self._documents[unit.microbatch] > 1 and not self._is_told(unit):
            what, stage = "carries state along a row of several documents, and is not told them", self._step.stage
            stage.findings.judge([Finding(DOCUMENTS, f"stage {stage.index}", what)])

    def _is_told(self, unit: LiveUnit) -> bool:
        """Whether anything that the stage is given, beside its tokens or hidden states, may tell documents apart."""
        given: list[Any] = [*self._step.kwargs_of(unit).values()]
        if self._step.stage.is_first and self._step.arguments.inputs is not None:
            given += self._step.arguments.inputs[unit.cell][1:]
        return any(tensors_of(value) for value in given)
