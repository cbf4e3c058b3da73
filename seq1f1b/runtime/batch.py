"""Arguments of a step: checked, and split for this rank's units once the length of the sequences is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from seq1f1b.ops.packing import document_lengths
from seq1f1b.partition import ModelShape
from seq1f1b.runtime.arguments import Options, check_number
from seq1f1b.runtime.nested import mapped
from seq1f1b.runtime.pipeline import Pipeline
from seq1f1b.runtime.rows import PlannedRows, Rows
from seq1f1b.runtime.splitting import (
    Leaves,
    check_count,
    check_equal_batches,
    check_rules,
    microbatches,
    sequence_length,
    split_inputs,
    split_kwargs,
    split_sequence,
)
from seq1f1b.runtime.trees import Trees

__all__: list[str] = []


@dataclass(frozen=True)
class StepArguments:
    """A caller's arguments of one step; :meth:`seq1f1b.PipelineEngine.step` says what they mean."""

    training: bool
    inputs: Any
    target: Any
    kwargs: Any
    loss_weight: float | None = None
    gradient_scale: float = 1.0
    gradient_divisor: int = 1  # of what the step adds, after its last backward
    loss_kwargs: Mapping[str, Any] | None = None
    return_outputs: bool = False
    rows: Rows | None = None
    parents: Any = None  # as the caller gave them
    trees: Trees | None = None  # what these rows' segments follow, once they are read
    plan: PlannedRows | None = None
    paths: Trees | None = None  # units are whole micro-batches, and run path by path
    divides: bool | None = None  # whether the loss comes with its divisor; None: not known yet


class Batch:
    """The arguments of one step on this rank.

    Attributes:
        rows: tokens of the segments of every micro-batch, where the step was given them; else empty.
        length: tokens of the longest micro-batch; 0: this rank learns it from the first message.
        target: of the M micro-batches, where this rank has them.
    """

    def __init__(self, arguments: StepArguments, options: Options, pipeline: Pipeline) -> None:
        self.arguments, self._options, device = arguments, options, pipeline.device
        self._rank, self._has_last = pipeline.rank, pipeline.has_last
        self._takes_inputs = pipeline.has_first or options.embedding is not None
        self._hands_on = (pipeline.has_first or pipeline.has_last) and pipeline.num_stages > 1
        self._inputs, self.target, self._kwargs = arguments.inputs, arguments.target, arguments.kwargs
        if device.type != "cpu":  # the host waits for pinned memory alone, which a caller may write again
            self._inputs, self.target, self._kwargs = (
                mapped(value, lambda tensor: tensor.to(device, non_blocking=not tensor.is_pinned()))
                for value in (self._inputs, self.target, self._kwargs)
            )
        self.leaves = Leaves()
        self.rows: Rows = arguments.rows or ()
        self.num_microbatches = len(self.rows) or options.num_microbatches
        self.length = 0

    def check(self) -> None:
        """Raises where the arguments break a rule."""
        options, target, training = self._options, self.target, self.arguments.training
        if training and not torch.is_grad_enabled():
            raise RuntimeError("step needs gradients; use eval, or leave torch.no_grad()")
        if self._has_last and training and (options.loss_fn is None or target is None):
            missing = {"loss_fn of the engine": options.loss_fn, "target": target}
            names = " and ".join(name for name, value in missing.items() if value is None)
            raise ValueError(
                f"{names} missing on rank {self._rank}, which holds the last stage: training needs both there"
            )
        if self._has_last and target is not None and options.loss_fn is None:
            raise ValueError("target was given, but the engine has no loss_fn")
        if self.arguments.loss_weight is not None:
            check_number("loss_weight", self.arguments.loss_weight)
        is_split = all(len(row) == 1 for row in self.rows) if self.rows else options.num_segments == 1
        check_rules(self._kwargs, options.arg_rules, is_split=is_split)
        if self._has_last and target is not None:
            self.target = self.leaves.replace(microbatches(target, self.num_microbatches, "target"))
        if self._takes_inputs:
            self._check_inputs()
        if self.rows:  # every rank was given them
            self.length = max(map(sum, self.rows))

    def _check_inputs(self) -> None:
        options = self._options
        if self._inputs is None:
            where = (
                "the rank of the first stage" if options.embedding is None else "every rank: the embedding is spread"
            )
            raise ValueError(f"inputs are needed on {where}")
        check_count(self._inputs, self.num_microbatches, "inputs")
        if isinstance(self._inputs, list) and self._hands_on:
            check_equal_batches(self._inputs)
        self._inputs = self.leaves.replace(self._inputs)
        self.length = sequence_length(self._inputs, options.seq_dim)

    def split(self, length: int) -> tuple[Rows, list[int], Any, Any, Any]:
        """Cuts what this rank was given into segments.

        Returns:
            Tokens of the segments of every micro-batch; the same as the executor takes them, alike for all or in a row;
            and by cell, over all micro-batches, the inputs, keyword arguments and targets, or None.
        """
        options = self._options
        dim, part = options.seq_dim, options.sequence_parallel
        if self.rows:
            rows, sizes = self.rows, [size for row in self.rows for size in row]
        else:
            sizes = options.sizes_of(length, self._documents())
            rows = (sizes,) * self.num_microbatches
        inputs = kwargs = targets = None
        if self._takes_inputs:
            inputs = _flat(split_inputs(self._inputs, rows, dim, part))
        if self._kwargs or options.arg_rules:
            trees, given = self.arguments.trees, self.leaves.replace(self._kwargs)
            positions = None if trees is None else trees.positions
            kwargs = _flat(split_kwargs(given, options.arg_rules, rows, dim, part, positions))
        if self._has_last and self.target is not None:
            targets = list(self.target)
            if part[1] > 1 or any(len(row) > 1 for row in rows):
                targets = _flat(
                    split_sequence(target, rows[m], dim, f"target of micro-batch {m}", part)
                    for m, target in enumerate(targets)
                )
        return rows, sizes, inputs, kwargs, targets

    def _documents(self) -> list[int] | None:
        """Lengths of the packed documents of all rows, where segments have equal FLOPs by them."""
        options = self._options
        if not isinstance(options.segment_sizes, ModelShape) or options.arg_rules.get("doc_ids") != "slice":
            return None
        kwargs = self._kwargs if isinstance(self._kwargs, list) else [self._kwargs or {}]
        rows = [microbatch["doc_ids"] for microbatch in kwargs if isinstance(microbatch.get("doc_ids"), Tensor)]
        return [length for doc_ids in rows for length in document_lengths(doc_ids)] or None


def _flat(nested: Any) -> list[Any]:
    """By cell, what is by [micro-batch][segment]."""
    return list(chain.from_iterable(nested))


def merge(parts: list[Any], dim: int) -> Any:
    """One output from those of segments or micro-batches; tensors in nested tuples and dicts are joined.

    Scalars become a vector.
    """
    if isinstance(parts[0], (tuple, list)):
        return tuple(merge([part[i] for part in parts], dim) for i in range(len(parts[0])))
    if isinstance(parts[0], dict):
        return {key: merge([part[key] for part in parts], dim) for key in parts[0]}
    if not isinstance(parts[0], Tensor) or len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts[0].dim() else torch.stack(parts)
