"""Packs documents into rows, and marks the first token of each.

The id of a document in a row is the position of the document's first token. So one integer per token decides which
tokens attend to one another, and gives a token's position in the document, in any segment of the document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packing", "document_starts", "pack_documents"]


@dataclass(frozen=True)
class Packing:
    """Documents in rows of one length, padded at the end. Made by :func:`seq1f1b.pack_documents`.

    Attributes:
        lengths: tokens of each document.
        row_len: tokens of a row.
        rows: indices of the documents of each row, in order.
    """

    lengths: tuple[int, ...]
    row_len: int
    rows: tuple[tuple[int, ...], ...]

    @property
    def waste(self) -> float:
        """Share of padding among all tokens."""
        return 1.0 - sum(self.lengths) / (len(self.rows) * self.row_len)

    @property
    def doc_ids(self) -> Tensor:
        """Document of each token, (rows, row_len), as the position of its first token. Padding is a document."""
        ids = torch.empty(len(self.rows), self.row_len, dtype=torch.int32)
        for row, documents in zip(ids, self.rows, strict=True):
            lengths = [self.lengths[index] for index in documents]
            whole = torch.tensor([*lengths, self.row_len - sum(lengths)])
            row.copy_((whole.cumsum(0) - whole).repeat_interleave(whole))
        return ids

    def join(self, documents: Sequence[Tensor], *, fill: int) -> Tensor:
        """Returns rows of tokens, or of labels, from documents.

        Args:
            documents: one-dimensional tensors of the packed lengths: tokens, or labels.
            fill: the value of padding; -100 for labels.
        Returns:
            (rows, row_len) of the documents' dtype.
        Raises:
            ValueError: number or lengths of the documents differ from the packed ones.
        """
        found = tuple(len(document) for document in documents)
        if found != self.lengths:
            raise ValueError(
                f"documents have lengths {_some(found)}, but documents of lengths {_some(self.lengths)} were packed"
            )
        joined = documents[0].new_full((len(self.rows), self.row_len), fill)
        for row, indices in zip(joined, self.rows, strict=True):
            if indices:
                tokens = torch.cat([documents[index] for index in indices])
                row[: len(tokens)] = tokens
        return joined


def pack_documents(lengths: Sequence[int], row_len: int, *, multiple_of: int = 1) -> Packing:
    """Packs whole documents into few rows: the longest first, each into the row with the least sufficient room (best
    fit).

    Args:
        lengths: tokens of each document.
        row_len: tokens of a row.
        multiple_of: divisor of the number of rows, reached by rows of padding; for instance the batch size.
    Raises:
        ValueError: there is no document, or a document is empty or longer than a row; the message names it.
    Source: Fewer Truncations Improve Language Modeling, arXiv:2404.10830.
    """
    if not lengths:
        raise ValueError("there are no documents to pack")
    for index, length in enumerate(lengths):
        if not 1 <= length <= row_len:
            raise ValueError(f"document {index} has {length} tokens, must have 1 to {row_len}, a row: cut or drop it")
    rows = best_fit(lengths, row_len)
    rows += [[] for _ in range(-len(rows) % multiple_of)]
    return Packing(tuple(lengths), row_len, tuple(map(tuple, rows)))


def best_fit(sizes: Sequence[int], capacity: int, taken: Sequence[int] = ()) -> list[list[int]]:
    """Puts items into few bins: the largest first, each into the bin with the least sufficient room.

    Args:
        sizes: size of each item, 1 to ``capacity``.
        capacity: size of a bin.
        taken: the taken part of each existing bin.
    Returns:
        For each bin the indices of its items; bins of ``taken`` come first.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # bins by free room
    rooms: list[int] = []  # keys of with_room, ascending

    def leave(room: int, index: int) -> None:
        if room and room not in with_room:
            insort(rooms, room)
            with_room[room] = []
        if room:
            with_room[room].append(index)

    for amount in taken:
        leave(capacity - amount, len(bins))
        bins.append([])
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(rooms, sizes[index])
        if at == len(rooms):
            room, place = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[at]
            place = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        bins[place].append(index)
        leave(room - sizes[index], place)
    return bins


def document_starts(doc_ids: Tensor) -> Tensor:
    """Converts any document ids of whole rows to ids for ``causal_attention`` and ``positions``.

    Args:
        doc_ids: (batch, row), integers; tokens of one document follow one another.
    Returns:
        (batch, row), int32: the position in the row of the document's first token. Converted ids stay unchanged.
    Raises:
        ValueError: an id comes back after another id; the message names row and position.
    """
    begins = _begins(doc_ids)
    positions = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    starts = torch.where(begins, positions, 0).cummax(1).values
    order = doc_ids.sort(dim=1, stable=True)
    again = begins.gather(1, order.indices)  # in ascending order of ids: True once per id if no id comes back
    again[:, 1:] &= order.values[:, 1:] == order.values[:, :-1]
    again[:, :1] = False
    if bool(again.any()):
        row, at = (int(i) for i in again.nonzero()[0])
        position = int(order.indices[row, at])
        raise ValueError(
            f"document {int(doc_ids[row, position])} of row {row} comes back at token {position}: tokens of one "
            "document must follow one another"
        )
    return starts.to(torch.int32)


def document_lengths(doc_ids: Tensor) -> list[int]:
    """Returns the lengths of the documents, row after row, for ``partition_sequence(documents=)``.

    Args:
        doc_ids: (batch, row), integers.
    """
    begins = _begins(doc_ids).flatten().nonzero().flatten()
    return begins.diff(append=begins.new_tensor([doc_ids.numel()])).tolist()


def _begins(doc_ids: Tensor) -> Tensor:
    """Returns, (batch, row), whether each token begins a document."""
    if doc_ids.dim() != 2 or doc_ids.is_floating_point() or not doc_ids.numel():
        raise ValueError(f"doc_ids is {tuple(doc_ids.shape)} of {doc_ids.dtype}, must be (batch, row) of integers")
    begins = torch.ones_like(doc_ids, dtype=torch.bool)
    begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return begins


def _some(lengths: tuple[int, ...]) -> str:
    return str(list(lengths[:8]))[:-1] + (", ...]" if len(lengths) > 8 else "]")
