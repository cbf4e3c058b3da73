"""Documents of a step's rows: attention must keep them apart, and on GPUs must know where they lie.

In a planned step with several documents in a row, ``causal_attention`` without ``doc_ids`` is refused at the write of
its keys (``csrc/torch/segment_rows.c``), so in compiled code, too. If a stage carries state along a row but gets
nothing by which to tell documents apart, the engine warns.

On a GPU, attention by torch's flash ops needs the places of documents on the host (``device/document_layout.py``), and
a read waits for the device. So after the first such request a step counts documents for all units in one read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.above import above
from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine.batch import StepRead
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
        count = self._step.arguments.documents[unit.microbatch]
        _C.unit_set_documents(count)
        yield
        carries = unit.carried_in is not None or unit.carried_out is not None
        if carries and count > 1 and not unit.is_again and not self._is_told(unit):
            what, stage = "carries state along a row of several documents, and is not told them", self._step.stage
            stage.findings.judge([Finding(DOCUMENTS, f"stage {stage.index}", what)])

    def _is_told(self, unit: LiveUnit) -> bool:
        """Returns whether the stage gets any tensor, beside tokens or hidden states, that may tell documents apart."""
        given: list[Any] = [*self._step.kwargs_of(unit).values()]
        if self._step.stage.is_first and self._step.arguments.inputs is not None:
            given += self._step.arguments.inputs[unit.cell][1:]
        return any(tensors_of(value) for value in given)


def count_documents(kwargs: Sequence[dict[str, Any]] | None, rows: Sequence[Sequence[int]], read: StepRead) -> None:
    """Requests the documents of a step's units in the step's one read, and tells attention the result.

    Args:
        kwargs: by cell. Arguments named ``doc_ids`` are counted if they are int32, the dtype of the op.
        rows: tokens of the segments of every micro-batch.
    """
    ends = [0, *accumulate(map(len, rows))] if kwargs and "doc_ids" in kwargs[0] else []
    counted = list[tuple[list[Tensor], Sequence[int]]]()  # by micro-batch, (batch, tokens) of each segment
    for (begin, end), sizes in zip(pairwise(ends), rows, strict=False):
        assert kwargs is not None
        found = [of_cell.get("doc_ids") for of_cell in kwargs[begin:end]]
        ids = [each for each, size in zip(found, sizes, strict=True) if _is_counted(each, size)]
        if len(ids) == len(sizes):
            counted.append((ids, sizes))

    def take(found: Sequence[Sequence[float]]) -> None:
        begin = 0
        for ids, sizes in counted:
            batch = len(ids[0])
            end = begin + batch * len(sizes) * _layout.FIGURES
            for of_segment, layout in zip(ids, _layout.layouts(found[0][begin:end], batch, sizes), strict=True):
                _layout.remember(of_segment, layout)
            begin = end

    if counted:
        whole = torch.cat([torch.cat(ids, 1).flatten() for ids, _ in counted])
        read.ask([_layout.figures(whole, [sizes for ids, sizes in counted for _ in range(len(ids[0]))])], take)


def _is_counted(ids: Any, size: int) -> TypeGuard[Tensor]:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int32 or ids.dim() != 2:
        return False
    return ids.shape[1] == size and len(ids) > 0 and _layout.is_asked_for(ids.device)
