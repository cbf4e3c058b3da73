"""Documents of a step's rows: attention must keep them apart, and on GPUs must know where they lie.

In a planned step with several documents in a row, ``causal_attention`` without ``doc_ids`` is refused at the write of
its keys (``csrc/torch/segment_rows.c``), so in compiled code, too. If a stage carries state along a row but gets
nothing by which to tell documents apart, the engine warns.

On a GPU, attention by torch's flash ops needs the places of documents on the host (``device/document_layout.py``), and
a read waits for the device. So after the first such request a step reads documents for all units at once.
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
from seq1f1b.engine.findings import DOCUMENTS, Finding
from seq1f1b.engine.parts import Part
from seq1f1b.engine.stage import StageStep
from seq1f1b.nested import tensors_of

__all__: list[str] = []

_layout = above("documents")


class AskingForDocuments(Part):
    """Tells attention how many documents a row has, in steps whose plan has a row of several documents."""

    needs = "has_documents"

    def start(self, step: StageStep) -> bool:
        return True

    @contextmanager
    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> Iterator[None]:
        count = self._step.batch.documents[unit.microbatch]
        _C.unit_set_documents(count)
        yield
        carries = unit.carried_in is not None or unit.carried_out is not None
        if carries and count > 1 and not unit.is_again and not self._is_told(unit):
            what, stage = "carries state along a row of several documents, and is not told them", self._step.stage
            stage.findings.judge([Finding(DOCUMENTS, f"stage {stage.index}", what)])

    def _is_told(self, unit: LiveUnit) -> bool:
        """Returns whether the stage gets any tensor, beside tokens or hidden states, that may tell documents apart."""
        given: list[Any] = [*self._step.kwargs_of(unit).values()]
        if self._step.stage.is_first and self._step.batch.inputs is not None:
            given += self._step.batch.inputs[unit.cell][1:]
        return any(tensors_of(value) for value in given)


def read_documents(kwargs: Sequence[dict[str, Any]], rows: Sequence[Sequence[int]]) -> None:
    """Tells attention of the documents of a step's units, before they run.

    Args:
        kwargs: by cell. Arguments named ``doc_ids`` are read if they are int32, the dtype of the op.
        rows: tokens of the segments of every micro-batch.
    """
    cells, found = iter(kwargs), list[list[Tensor]]()
    for sizes in rows:
        given = [next(cells).get("doc_ids") for _ in sizes]
        ids = [each for each, size in zip(given, sizes, strict=True) if _is_read(each, size)]
        if len(ids) == len(sizes):
            found.append(ids)
    if found:
        _layout.learn(found)


def _is_read(ids: Any, size: int) -> TypeGuard[Tensor]:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int32 or ids.dim() != 2:
        return False
    return ids.shape[1] == size and len(ids) > 0 and _layout.is_asked_for(ids.device)
