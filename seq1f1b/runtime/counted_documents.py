"""Counts the documents of all units of a step before its units run, in the one read that the step has anyway.

On a GPU attention by torch's flash ops must know on the host where documents lie (``device/document_layout.py``), and a
read waits for the device. So a step counts for all units at once, if attention on that device has asked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from seq1f1b.device.placement import gpu_part
from seq1f1b.runtime.divided import StepRead

__all__: list[str] = []

_layout = gpu_part("documents")


def count_documents(kwargs: Sequence[dict[str, Any]] | None, rows: Sequence[Sequence[int]], read: StepRead) -> None:
    """Asks for the documents of a step's units, and tells attention once they are read.

    Args:
        kwargs: by cell. Those named ``doc_ids`` are counted, if they are int32 as the op takes them.
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
