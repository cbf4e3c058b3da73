"""The layout of a segment's documents, as the host knows it.

How many documents a segment has is the size of a tensor, so the host must know it before it can launch attention over
them one by one. It reads that once for all units of a step (``engine/documents.py``), or once in a unit for
ids that the step has not counted: such a read waits for the device. What has been read is remembered for as long as the
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

FIGURES = 5
"""The numbers that :func:`figures` finds for each row and segment."""

MOST_REMEMBERED = 1024
"""Layouts, before those of ids that are gone are looked for."""


class Row(NamedTuple):
    """The documents of one row of a batch within a segment. Their tokens follow one another."""

    num_documents: int
    start: int  # of the first one's tokens, in the whole row: it may lie in an earlier segment
    num_first: int  # tokens of the first one that are the segment's
    longest: int  # most tokens of a document that are the segment's


class Layout:
    """The documents of a segment, and where they end, on the device: made at the first use."""

    def __init__(self, offset: int, rows: Sequence[Row]) -> None:
        self.offset, self.rows = offset, tuple(rows)
        self._bounds: tuple[Tensor, ...] = ()
        self._key_bounds: dict[tuple[int, int], Tensor] = {}

    def bounds(self, docs: Tensor) -> tuple[Tensor, ...]:
        """For each row (documents + 1) in int32: 0, and the end of each document within the segment.

        Args:
            docs: (batch, tokens), the ids.
        """
        if not self._bounds:
            begins = torch.ones(docs.shape, dtype=torch.int32, device=docs.device)
            torch.ne(docs[:, 1:], docs[:, :-1], out=begins[:, 1:])
            most = max(row.num_documents for row in self.rows)
            order = torch.arange(1, most + 2, dtype=torch.int32, device=docs.device).expand(len(docs), -1)
            found = torch.searchsorted(begins.cumsum(1, dtype=torch.int32), order.contiguous(), out_int32=True)
            self._bounds = tuple(of_row[: row.num_documents + 1] for of_row, row in zip(found, self.rows, strict=True))
        return self._bounds

    def key_bounds(self, docs: Tensor, row: int, before: int) -> Tensor:
        """The bounds of a row's keys, of which the first document has so many more ``before`` the segment."""
        own = self.bounds(docs)[row]
        if not before:
            return own
        found = self._key_bounds.get((row, before))
        if found is None:
            found = self._key_bounds[row, before] = own + before
            found[:1] = 0
        return found


def figures(ids: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """Counts on the device what layouts need, (segments of all rows, ``FIGURES``) in int64; :func:`layouts` reads them.

    Args:
        ids: (tokens of all rows) in int32, one row behind another.
        rows: tokens of the segments of each row.
    """
    device, num_tokens = ids.device, len(ids)
    sizes = torch.tensor([size for row in rows for size in row], device="cpu")
    lengths = torch.tensor([sum(row) for row in rows], device="cpu")
    counts = torch.tensor([len(row) for row in rows], device="cpu")
    last = sizes.cumsum(0) - 1
    of_segments = torch.stack([
        sizes, last - sizes + 1, last, (lengths.cumsum(0) - lengths).repeat_interleave(counts, output_size=len(sizes))
    ])  # fmt: skip
    sizes, first, last, row_begin = of_segments.to(device, non_blocking=True).unbind()
    lengths = lengths.to(device, non_blocking=True)

    position = torch.arange(num_tokens, device=device)
    row = torch.repeat_interleave(position[: len(rows)], lengths, output_size=num_tokens)
    segment = torch.repeat_interleave(position[: len(sizes)], sizes, output_size=num_tokens)
    ids = ids + (row << 32)  # other numbers in each row
    begins = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=begins[1:])
    start = torch.where(begins, position, 0).cummax(0).values
    within = position - torch.maximum(start, first.index_select(0, segment)) + 1  # of its document, up to this token
    longest = torch.zeros_like(sizes).scatter_reduce_(0, segment, within, "amax")
    first_start = start.index_select(0, first)
    num_first = _between(start == first_start.index_select(0, segment), first, last) + 1
    num_documents = _between(begins, first, last) + 1
    comes_back = _between(_returns(ids, begins), row_begin, last) > 0
    return torch.stack([comes_back, num_documents, first_start - row_begin, num_first, longest], 1)


def _between(flags: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """How many are set behind ``first``, up to ``last``."""
    so_far = flags.cumsum(0)
    return so_far.index_select(0, last) - so_far.index_select(0, first)


def _returns(ids: Tensor, begins: Tensor) -> Tensor:
    """Whether a token is the first of an id that comes back after another one."""
    order = ids.sort(stable=True)
    again = begins.gather(0, order.indices)
    again[1:] &= order.values[1:] == order.values[:-1]
    again[:1] = False
    return torch.empty_like(again).scatter_(0, order.indices, again)


def layouts(read: Sequence[float], num_rows: int, sizes: Sequence[int]) -> list[Layout | None]:
    """For each segment; None if a document's tokens do not follow one another there or before.

    Args:
        read: the elements of :func:`figures` of so many rows of equal segments, as numbers of the host.
    """
    found: list[Layout | None] = []
    offset = 0
    for segment, size in enumerate(sizes):
        rows = []
        for row in range(num_rows):
            at = (row * len(sizes) + segment) * FIGURES
            rows.append(tuple(int(number) for number in read[at : at + FIGURES]))
        comes_back = any(row[0] for row in rows)
        found.append(None if comes_back else Layout(offset, [Row(*row[1:]) for row in rows]))
        offset += size
    return found


# -- what is remembered ----------------------------------------------------------------------------------------------

_lock = threading.Lock()  # a backward on a GPU runs in a thread of autograd's
_remembered: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[StorageWeakRef, int, Layout | None]] = {}
_asking: set[torch.device] = set()


def is_asked_for(device: torch.device) -> bool:
    """Whether attention over ids of that device has asked for a layout: the next steps count before their units."""
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


def read(key_docs: Tensor, tokens: int) -> Layout | None:
    """The layout of the last ``tokens`` of all. The host waits for the device."""
    offset = key_docs.shape[1] - tokens
    sizes = [offset, tokens] if offset else [tokens]
    found = figures(key_docs.flatten(), [sizes] * len(key_docs))
    return layouts(found.flatten().tolist(), len(key_docs), sizes)[-1]
