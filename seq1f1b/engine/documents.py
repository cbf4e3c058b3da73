"""Tells attention the documents of a step's rows, and warns of stages that may mix documents.

A row is a micro-batch's sequence. In a planned step with several documents in a row, ``causal_attention`` without
``doc_ids`` is refused at the write of its keys (``csrc/torch/segment_rows.c``), so in compiled code, too. If a stage
carries state along a row and gets no tensor that may tell documents apart, the engine warns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seq1f1b import _C
from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine.features import Feature
from seq1f1b.engine.findings import DOCUMENTS, Finding
from seq1f1b.engine.stage import StageStep
from seq1f1b.nested import tensors_of

__all__: list[str] = []


class AskingForDocuments(Feature):
    """The feature of planned steps with several documents in a row: gives attention the number of documents."""

    needs = "has_documents"

    def start(self, step: StageStep) -> bool:
        return True

    @contextmanager
    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> Iterator[None]:
        count = self._step.batch.documents[unit.microbatch]
        _C.current_unit_set_documents(count)
        yield
        carries = unit.carried_in is not None or unit.carried_out is not None
        if carries and count > 1 and not unit.is_again and not self._is_told(unit):
            what, stage = "carries state along packed documents, and is not told where they begin", self._step.stage
            stage.findings.judge([Finding(DOCUMENTS, f"stage {stage.index}", what)])

    def _is_told(self, unit: LiveUnit) -> bool:
        """Returns whether the stage gets a tensor beside tokens or hidden states, perhaps ids of documents."""
        given: list[Any] = [*self._step.kwargs_of(unit).values()]
        if self._step.stage.is_first and self._step.batch.inputs is not None:
            given += self._step.batch.inputs[unit.cell][1:]
        return any(tensors_of(value) for value in given)
