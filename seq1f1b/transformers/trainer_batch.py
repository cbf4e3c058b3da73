"""Converts a batch of a Hugging Face Trainer to the arguments of one engine step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seq1f1b.attention.packing import document_starts
from seq1f1b.engine.weighting import IGNORED, shift_labels
from seq1f1b.nested import mapped, tensors_of

__all__: list[str] = []

COLUMNS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
_OF_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Names that collators of packed documents derive from position_ids, for kernels that take rows of one document."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a step.

    Attributes:
        tokens, target: (rows, tokens). Rows are padded to a multiple of the number of micro-batches, tokens to at least
            the number of segments. Padding has no targets, and no token attends to padding.
        doc_ids: ids of packed documents.
        shape: rows and tokens of the batch without padding.
    """

    tokens: Tensor
    target: Tensor | None
    doc_ids: Tensor | None
    shape: tuple[int, int]

    @property
    def kwargs(self) -> dict[str, Tensor] | None:
        return None if self.doc_ids is None else {"doc_ids": self.doc_ids}

    def counts(self, num_microbatches: int) -> list[int]:
        """Returns the number of targets of each micro-batch."""
        assert self.target is not None
        return [int(part.ne(IGNORED).sum()) for part in self.target.chunk(num_microbatches)]

    def part(self, index: int, count: int) -> Batch:
        """Returns part ``index`` of ``count`` equal parts of the rows."""
        whole = self.tokens, self.target, self.doc_ids
        tokens, target, doc_ids = mapped(whole, lambda tensor: tensor.chunk(count)[index])
        return Batch(tokens, target, doc_ids, self.shape)

    def digest(self) -> int:
        """Returns a checksum, to compare the batches of ranks."""
        value = 0
        for tensor in tensors_of((self.tokens, self.target, self.doc_ids)):
            value = zlib.crc32(tensor.cpu().contiguous().numpy().data, value)
        return value


def make_batch(inputs: Mapping[str, Any], num_microbatches: int, num_segments: int) -> Batch:
    """Returns the batch for a step. Raises ValueError for inputs that a stage does not take."""
    derived = () if inputs.get("position_ids") is None else _OF_KERNELS
    unknown = sorted(name for name, value in inputs.items() if name not in (*COLUMNS, *derived) and value is not None)
    if unknown:
        raise ValueError(
            f"the batch holds {unknown}, a stage takes {list(COLUMNS)}: leave the others out of the data; what tells "
            "documents apart (seq_lengths, cu_seq_lens) must come with the position_ids that a collator makes of it"
        )
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise ValueError("the batch must hold input_ids, a tensor of (rows, tokens)")
    shape = tokens.shape[0], tokens.shape[1]
    target = inputs.get("shift_labels")
    if target is None and inputs.get("labels") is not None:
        target = shift_labels(inputs["labels"])
    if target is not None and target.shape != tokens.shape:
        raise ValueError(f"labels are {tuple(target.shape)}, must be of the shape of input_ids, {shape}")
    mask, doc_ids = inputs.get("attention_mask"), _documents(inputs.get("position_ids"), tokens)
    if mask is not None:
        _check_mask(mask, target)
        if doc_ids is not None:
            raise ValueError("the batch holds position_ids of packed documents and an attention_mask: leave it out")
    more_tokens, more_rows = max(0, num_segments - shape[1]), -shape[0] % num_microbatches
    if more_tokens or more_rows:
        tokens = F.pad(tokens, (0, more_tokens, 0, more_rows))
        if target is not None:
            target = F.pad(target, (0, more_tokens, 0, more_rows), value=IGNORED)
        if doc_ids is not None:  # padding extends the last document of a row; a padding row is one document
            doc_ids = torch.cat([doc_ids, doc_ids[:, -1:].expand(-1, more_tokens)], 1)
            doc_ids = F.pad(doc_ids, (0, 0, 0, more_rows))
    return Batch(tokens, target, doc_ids, shape)


def _check_mask(mask: Tensor, target: Tensor | None) -> None:
    """Raises ValueError unless padding is on the right, where causal attention ignores it, and has no targets."""
    is_token = mask != 0
    if mask.dim() != 2 or bool((is_token[:, 1:] & ~is_token[:, :-1]).any()):
        raise ValueError("the attention_mask has padding before tokens: set padding_side='right' of the tokenizer")
    if target is not None and bool(((target != IGNORED) & ~is_token).any()):
        raise ValueError("padding has labels: give it the label -100, as DataCollatorForLanguageModeling does")


def _documents(position_ids: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Returns the doc_ids of documents whose positions each count from 0; None if each row is one document."""
    if position_ids is None:
        return None
    if position_ids.shape != tokens.shape:
        raise ValueError(f"position_ids are {tuple(position_ids.shape)}, must be {tuple(tokens.shape)} as input_ids")
    doc_ids = document_starts((position_ids == 0).cumsum(1))
    if not torch.equal(torch.arange(tokens.shape[1], device=tokens.device) - doc_ids, position_ids):
        raise ValueError("position_ids must count from 0 in every document of a row, by one")
    return doc_ids if bool(doc_ids.any()) else None
