"""The layout of a segment's documents, as the host knows it.

How many documents a segment has is the size of a tensor, so the host must know it before it can launch attention over
them one by one. It reads the ids of all units before the first (``engine/documents.py``), or once in a unit those that
the step does not know: a read waits for the device. What has been read is remembered for as long as the
memory of the ids lives, and holds for each tensor that shows the same elements of it: so all layers of a unit share it,
and their backwards. Outside a step each call reads: ids may change in place there, and the tensors that compiled code
makes of them have no version that would tell.
"""

from __future__ import annotations

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


class Row(NamedTuple):
    """The documents of one row of a batch within a segment. Their tokens follow one another."""

    start: int  # of the first one's tokens, in the whole row: it may lie in an earlier segment
    num_first: int  # tokens of the first one that are the segment's
    longest: int  # most tokens of a document that are the segment's
    bounds: Tensor  # (documents + 1), int32, on the device: 0, and the end of each document within the segment

    def key_bounds(self, before: int) -> Tensor:
        """The bounds of the keys, of which the first document has so many more ``before`` the segment."""
        return torch.cat([self.bounds[:1], self.bounds[1:] + before]) if before else self.bounds


class Layout(NamedTuple):
    """The documents of a segment, by row of the batch."""

    offset: int  # tokens before the segment
    rows: tuple[Row, ...]


def _layout_in(ids: Tensor, tokens: int, device: torch.device) -> Layout | None:
    """The layout of the last ``tokens``; None if a document's tokens do not follow one another, there or before.

    Args:
        ids: (batch, tokens up to the segment's last), on the host.
    """
    rows, offset = [], ids.shape[1] - tokens
    for of_row in ids:
        names = torch.unique_consecutive(of_row)
        if len(names.unique()) < len(names):
            return None
        sizes = torch.unique_consecutive(of_row[offset:], return_counts=True)[1]
        start = int((of_row == of_row[offset]).int().argmax())
        bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int().to(device, non_blocking=True)
        rows.append(Row(start, int(sizes[0]), int(sizes.max()), bounds))
    return Layout(offset, tuple(rows))


# -- what is remembered ----------------------------------------------------------------------------------------------

_lock = threading.Lock()  # a backward on a GPU runs in a thread of autograd's
_remembered: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[StorageWeakRef, int, Layout | None]] = {}
_asking: set[torch.device] = set()


def is_asked_for(device: torch.device) -> bool:
    """Whether attention over ids of that device has asked for a layout: the next steps read before their units."""
    return device in _asking


def remember(docs: Tensor, layout: Layout | None) -> None:
    """Keeps the layout of a segment's ids."""
    if docs.is_inference():  # no version tells whether its elements have changed
        return
    with _lock:
        if len(_remembered) >= MOST_REMEMBERED:
            for key in [key for key, (memory, *_) in _remembered.items() if _is_gone(memory)]:
                del _remembered[key]
        memory = StorageWeakRef(docs.untyped_storage())  # type: ignore[no-untyped-call] # torch's has no types
        _remembered[docs.data_ptr(), docs.shape, docs.stride()] = memory, docs._version, layout


def _is_gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call] # torch's has no types


def forget() -> None:
    """All that is remembered. For tests."""
    with _lock:
        _remembered.clear()
    _asking.clear()


def layout_of(docs: Tensor, key_docs: Tensor) -> Layout | None:
    """The layout of a segment's documents; None if tokens of one do not follow one another, or if that cannot be known
    now, as a CUDA graph is captured.

    Args:
        docs: (batch, tokens), ids of the segment.
        key_docs: (batch, keys), of all tokens up to the segment's last.
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


def learn(microbatches: Sequence[Sequence[Tensor]]) -> None:
    """Remembers the layouts of all segments of micro-batches, (batch, tokens) each, by one read of their ids."""
    whole = torch.cat([torch.cat(list(segments), 1).flatten() for segments in microbatches]).cpu()
    for segments in microbatches:
        size = sum(ids.numel() for ids in segments)
        of_rows, whole = whole[:size].view(len(segments[0]), -1), whole[size:]
        end = 0
        for ids in segments:
            end += ids.shape[1]
            remember(ids, _layout_in(of_rows[:, :end], ids.shape[1], ids.device))


def read(key_docs: Tensor, tokens: int) -> Layout | None:
    """The layout of the last ``tokens`` of all. The host waits for the device."""
    return _layout_in(key_docs.cpu(), tokens, key_docs.device)
