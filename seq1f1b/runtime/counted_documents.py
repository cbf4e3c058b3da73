"""Counts the documents of all units of a step before its units run, in the one read that the step has anyway.

On a GPU attention by torch's flash ops must know on the host where documents lie (``device/document_layout.py``), and a
read waits for the device. So a step counts for all units at once, if attention on that device has asked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from seq1f1b.device.placement import gpu_part
from seq1f1b.runtime.divided import read_at_once

__all__: list[str] = []

_layout = gpu_part("documents")

MOST_AT_ONCE = 1 << 20
"""Tokens that are counted by the same launches, which hold some hundred bytes of each meanwhile."""


class DocumentCounts:
    """Made at the start of a step.

    Args:
        kwargs: by cell. Those named ``doc_ids`` are counted, if they are int32 as the op takes them.
        rows: tokens of the segments of every micro-batch.
    Attributes:
        tensors: what is to be read of the device.
    """

    def __init__(self, kwargs: Sequence[dict[str, Any]] | None, rows: Sequence[Sequence[int]]) -> None:
        self._groups: list[list[_Microbatch]] = []
        ends = [0, *accumulate(map(len, rows))] if kwargs and "doc_ids" in kwargs[0] else []
        num_tokens = 0
        for (begin, end), sizes in zip(pairwise(ends), rows, strict=False):
            assert kwargs is not None
            found = [of_cell.get("doc_ids") for of_cell in kwargs[begin:end]]
            ids = [each for each, size in zip(found, sizes, strict=True) if _is_counted(each, size)]
            if len(ids) < len(sizes):
                continue
            own_tokens = sum(each.numel() for each in ids)
            if not self._groups or num_tokens + own_tokens > MOST_AT_ONCE:
                self._groups.append([])
                num_tokens = 0
            num_tokens += own_tokens
            self._groups[-1].append(_Microbatch(ids, sizes))
        self.tensors = [_figures(group) for group in self._groups]

    def take(self, read: Sequence[Sequence[float]]) -> None:
        """Tells attention what has been read of ``tensors``."""
        self.tensors, clean = [], True
        for group, numbers in zip(self._groups, read, strict=True):
            begin = 0
            for ids, sizes in group:
                batch = len(ids[0])
                end = begin + batch * len(sizes) * _layout.FIGURES
                for of_segment, layout in zip(ids, _layout.layouts(numbers[begin:end], batch, sizes), strict=True):
                    _layout.remember(of_segment, layout, clean)
                    clean = False
                begin = end

    def read(self) -> None:
        """Reads what has not been read beside other things of the step."""
        if self.tensors:
            self.take(read_at_once(self.tensors))


class _Microbatch(NamedTuple):
    ids: list[Tensor]  # (batch, tokens), by segment
    sizes: Sequence[int]


def _figures(group: Sequence[_Microbatch]) -> Tensor:
    rows = [sizes for ids, sizes in group for _ in range(len(ids[0]))]
    whole = [(ids[0] if len(ids) == 1 else torch.cat(ids, 1)).flatten() for ids, _ in group]
    found: Tensor = _layout.figures(torch.cat(whole), rows)
    return found


def _is_counted(ids: Any, size: int) -> TypeGuard[Tensor]:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int32 or ids.dim() != 2:
        return False
    return ids.shape[1] == size and len(ids) > 0 and _layout.is_asked_for(ids.device)
