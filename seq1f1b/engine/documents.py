"""Tells attention the documents of a step's rows, and warns of stages that may mix documents.

A row is a micro-batch's sequence. In a planned step with several documents in a row, ``causal_attention`` without
``doc_ids`` is refused at the write of its keys (``csrc/torch/segment_rows.c``), so in compiled code, too. If a stage
carries state along a row and gets no tensor that may tell documents apart, the engine warns.

On a GPU, attention by torch's flash ops needs the places of documents on the host (``device/document_layout.py``), and
a read waits for the device. So after the first request each step reads the documents of all units at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.above import above
from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine.features import Feature
from seq1f1b.engine.findings import DOCUMENTS, Finding
from seq1f1b.engine.stage import StageStep
from seq1f1b.nested import tensors_of

__all__: list[str] = []

_layout = above("documents")


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


def read_documents(kwargs: Sequence[dict[str, Any]], rows: Sequence[Sequence[int]]) -> None:
    """Reads the documents of a step's units for attention, before the units run.

    Args:
        kwargs: keyword arguments by cell; only int32 ``doc_ids``, the dtype of the flash op, are read.
        rows: tokens of the segments of every micro-batch.
    """
    cells = iter(kwargs)
    for sizes in rows:
        given = [next(cells).get("doc_ids") for _ in sizes]
        ids = [each for each, size in zip(given, sizes, strict=True) if _is_read(each, size)]
        if len(ids) == len(sizes):
            _layout.learn(ids)


def _is_read(ids: Any, size: int) -> TypeGuard[Tensor]:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int32 or ids.dim() != 2:
        return False
    return ids.shape[1] == size and len(ids) > 0 and _layout.is_asked_for(ids.device)
