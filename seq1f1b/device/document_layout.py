"""Layout of a segment's documents, for the host.

The number of documents is the size of a tensor, so the host must know the layout before a launch of attention over
single documents. A read waits for the device: the ids of all units are read before the first unit
(``engine/documents.py``), and ids unknown to the step once in a unit. A layout is remembered for the lifetime of the
ids' memory and holds for every tensor over the same elements, so all layers of a unit and their backwards share one
read. Outside a step each call reads: ids may change in place there, and tensors made by compiled code have no version
to show a change.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from seq1f1b import _C, proof

__all__: list[str] = []

MOST_REMEMBERED = 1024
"""Layouts, before those of ids that are gone are looked for."""


class RowDocuments(NamedTuple):
    """The documents of one row of a batch within a segment. The tokens of a document are contiguous."""

    start: int  # first token of the first document, in the whole row: an earlier segment may hold this token
    num_first: int  # the first document's tokens within the segment
    longest: int  # most tokens of a document within the segment
    bounds: Tensor  # (documents + 1), int32, on the device: 0, and the end of each document within the segment

    def key_bounds(self, before: int) -> Tensor:
        """Returns the bounds of the keys; the first document has ``before`` keys before the segment."""
        return torch.cat([self.bounds[:1], self.bounds[1:] + before]) if before else self.bounds


class DocumentLayout(NamedTuple):
    """The documents of a segment, by row of the batch."""

    offset: int  # tokens before the segment
    rows: tuple[RowDocuments, ...]


def _runs_of(ids: Tensor) -> list[list[tuple[int, int]]]:
    """Returns each row's runs of equal ids: the first token and the id. The host waits for the device."""
    begins = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    torch.ne(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
    row, token = begins.nonzero().unbind(1)
    runs: list[list[tuple[int, int]]] = [[] for _ in ids]
    for of_row, start, name in torch.stack([row, token, ids[row, token]], 1).tolist():
        runs[of_row].append((start, name))
    return runs


def _layout_in(
    runs: Sequence[Sequence[tuple[int, int]]], offset: int, tokens: int, like: Tensor
) -> DocumentLayout | None:
    """Returns the layout of a segment, on the device of ``like``; None if the tokens of a document up to the segment's
    end are not contiguous."""
    rows = []
    for of_row in runs:
        seen = [(start, name) for start, name in of_row if start < offset + tokens]
        if len({name for _, name in seen}) < len(seen):
            return None
        ends = [*(start - offset for start, _ in seen if start > offset), tokens]
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device="cpu").to(like.device, non_blocking=True)
        longest = max(end - begin for begin, end in itertools.pairwise([0, *ends]))
        rows.append(RowDocuments(seen[-len(ends)][0], ends[0], longest, bounds))
    return DocumentLayout(offset, tuple(rows))


# -- what is remembered ----------------------------------------------------------------------------------------------

_lock = threading.Lock()  # a backward on a GPU runs in a thread of autograd
_remembered: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[StorageWeakRef, int, DocumentLayout | None]] = {}
_asking: set[torch.device] = set()


def is_asked_for(device: torch.device) -> bool:
    """Returns whether attention on the device has asked for a layout; later steps then read before their units."""
    return device in _asking


def remember(docs: Tensor, layout: DocumentLayout | None) -> None:
    """Keeps the layout of a segment's ids."""
    if docs.is_inference():  # an inference tensor has no version to show a change
        return
    with _lock:
        if len(_remembered) >= MOST_REMEMBERED:
            for key in [key for key, (memory, *_) in _remembered.items() if _is_gone(memory)]:
                del _remembered[key]
        memory = StorageWeakRef(docs.untyped_storage())  # type: ignore[no-untyped-call] # torch's has no types
        _remembered[docs.data_ptr(), docs.shape, docs.stride()] = memory, docs._version, layout


def _is_gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call] # torch's has no types


def layout_of(docs: Tensor, key_docs: Tensor) -> DocumentLayout | None:
    """Returns the layout of a segment's documents; None if a document is not contiguous, or if a CUDA graph is being
    captured and the layout is unknown.

    Args:
        docs: (batch, tokens), ids of the segment.
        key_docs: (batch, keys), ids of all tokens up to the segment's end.
    """
    tokens = docs.shape[1]
    offset = key_docs.shape[1] - tokens
    in_unit = _C.unit_tokens() is not None
    found = _remembered.get((docs.data_ptr(), docs.shape, docs.stride())) if in_unit else None
    if found is not None and not docs.is_inference():
        memory, version, layout = found
        is_it = memory.cdata == docs.untyped_storage()._cdata and version == docs._version
        if is_it and (layout is None or layout.offset == offset):
            return layout
    if proof.is_capturing():
        return None
    _asking.add(docs.device)
    layout = read(key_docs, tokens)
    if in_unit:
        remember(docs, layout)
    return layout


def learn(segments: Sequence[Tensor]) -> None:
    """Remembers the layouts of all segments of a micro-batch, (batch, tokens) each. The host waits for the device."""
    runs, offset = _runs_of(torch.cat(list(segments), 1)), 0
    for ids in segments:
        remember(ids, _layout_in(runs, offset, ids.shape[1], ids))
        offset += ids.shape[1]


def read(key_docs: Tensor, tokens: int) -> DocumentLayout | None:
    """Returns the layout of the last ``tokens`` tokens. The host waits for the device."""
    return _layout_in(_runs_of(key_docs), key_docs.shape[1] - tokens, tokens, key_docs)
