"""Arguments of a step: checked, and split for the rank's units once the sequence length is known.

Micro-batches lie along the batch, segments along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from seq1f1b.attention.packing import document_lengths
from seq1f1b.documents.rows import PlannedRows, Rows, Trees, paths_of
from seq1f1b.engine.gradients import StepGradients
from seq1f1b.engine.options import Options, Rule, Segment, TokenPart, check_rules
from seq1f1b.engine.pipeline import Pipeline
from seq1f1b.files import check_number
from seq1f1b.nested import mapped, tensors_of
from seq1f1b.partition import ModelShape

__all__: list[str] = []


@dataclass(frozen=True)
class StepArguments:
    """A caller's arguments of a step, described at :meth:`seq1f1b.PipelineEngine.step`."""

    training: bool
    inputs: Any
    target: Any
    kwargs: Any
    loss_weight: float | None = None
    gradient_scale: float = 1.0
    loss_kwargs: Mapping[str, Any] | None = None
    return_outputs: bool = False
    rows: Rows | None = None
    parents: Any = None  # as the caller gave them
    trees: Trees | None = None  # read from `parents`: the segment that each segment of `rows` follows
    plan: PlannedRows | None = None
    paths: Trees | None = None  # units are whole micro-batches, and run path by path
    divides: bool | None = None  # whether loss_fn returns (sum, divisor); None: not known yet


@dataclass
class StepRead:
    """All reads of device values in a step, joined, because the host waits for the device in each read."""

    asked: list[tuple[Sequence[Tensor | float], Callable[[list[list[float]]], None]]] = field(default_factory=list)

    def ask(self, values: Sequence[Tensor | float], take: Callable[[list[list[float]]], None]) -> None:
        """Requests a read of values; ``take`` later gets the elements of each value."""
        self.asked.append((values, take))

    def read(self) -> None:
        """Reads all requested values: one copy per device, and tensors of subclasses apart."""
        asked, self.asked = self.asked, []
        flat: dict[torch.device, list[Tensor]] = {}
        for value in (value for values, _ in asked for value in values):
            if type(value) is Tensor:
                flat.setdefault(value.device, []).append(value.detach().reshape(-1).double())
        read = {device: iter(torch.cat(every).tolist()) for device, every in flat.items()}
        for values, take in asked:
            take([
                list(islice(read[value.device], value.numel())) if type(value) is Tensor
                else [float(element) for element in value.detach().reshape(-1)] if isinstance(value, Tensor)
                else [float(value)]
                for value in values
            ])  # fmt: skip


class Batch:
    """The arguments of one step on the rank; after :meth:`split` by cell, a segment's number over all micro-batches.

    A row is the list of a micro-batch's segments.
    """

    inputs: list[tuple[Any, ...]] | None = None  # by cell, positional arguments of the first stage
    kwargs: list[dict[str, Any]] | None = None  # by cell, keyword arguments of the rank's stages
    targets: list[Any] | None = None  # by cell
    is_new = True  # the first step of a shape: features look, measure and compare
    gradients: StepGradients | None = None  # apart from earlier ones; `loss.py` adds tensors outside of modules

    def __init__(self, arguments: StepArguments, options: Options, pipeline: Pipeline) -> None:
        self.arguments, self.options, device = arguments, options, pipeline.device
        self.training, self.seq_dim, self.arg_rules = arguments.training, options.seq_dim, options.arg_rules
        self._rank, self._has_last = pipeline.rank, pipeline.has_last
        self._takes_inputs = pipeline.has_first or options.embedding is not None
        self._hands_on = (pipeline.has_first or pipeline.has_last) and pipeline.num_stages > 1
        self._inputs, self.target, self._kwargs = arguments.inputs, arguments.target, arguments.kwargs
        if device.type != "cpu":  # pinned memory is copied while the host waits: the caller may overwrite it
            self._inputs, self.target, self._kwargs = (
                mapped(value, lambda tensor: tensor.to(device, non_blocking=not tensor.is_pinned()))
                for value in (self._inputs, self.target, self._kwargs)
            )
        self.leaves, self.read = Leaves(), StepRead()  # tensors of autograd; values of the device, read before units
        # Whether a segment weighs by its share of the targets of all micro-batches, not of its micro-batch.
        is_asked = options.loss.weight == "targets" or arguments.rows is not None
        self.by_targets = is_asked and options.loss.scale_grads and options.loss.reduction == "mean"
        self.rows: Rows = arguments.rows or ()  # before the split only in steps of rows
        self.num_microbatches = len(self.rows) or options.num_microbatches
        self.length = 0  # tokens of the longest micro-batch; 0: the rank learns the length from the first message
        self.sizes = [0] * options.num_segments  # for the executor: of one micro-batch if all are alike, else of all
        trees, whole, plan = arguments.trees, arguments.paths, arguments.plan
        self.siblings = ((), ()) if trees is None else trees.siblings
        # Sibling leaves in each cell of a step of trees; paths of units that run path by path; documents in each row.
        self.num_parts = [] if trees is None else [len(part) for row in trees.parts for part in row]
        self.paths = [] if whole is None else list(map(paths_of, whole.parents, whole.parts))
        self.documents = [] if plan is None else [len(row) for row in plan.rows]
        self.has_documents = any(count > 1 for count in self.documents)

    def check(self) -> None:
        """Checks the arguments; cuts the target into micro-batches, makes leaves of autograd, and sets the length."""
        options, target, training = self.options, self.target, self.arguments.training
        if training and not torch.is_grad_enabled():
            raise RuntimeError("step needs gradients; use eval, or leave torch.no_grad()")
        if self._has_last and training and (options.loss_fn is None or target is None):
            missing = {"loss_fn of the engine": options.loss_fn, "target": target}
            names = " and ".join(name for name, value in missing.items() if value is None)
            raise ValueError(f"{names} missing on rank {self._rank}, which holds the last stage: training needs both")
        if self._has_last and target is not None and options.loss_fn is None:
            raise ValueError("target was given, but the engine has no loss_fn")
        if self.arguments.loss_weight is not None:
            check_number("loss_weight", self.arguments.loss_weight)
        if self._kwargs:
            is_split = all(len(row) == 1 for row in self.rows) if self.rows else options.num_segments == 1
            check_rules(self._kwargs, options.arg_rules, is_split=is_split)
        if self._has_last and target is not None:
            self.target = self.leaves.replace(microbatches(target, self.num_microbatches, "target"))
        if self._takes_inputs:
            if self._inputs is None:
                where = "the rank of the first stage"
                where = where if options.embedding is None else "every rank: the embedding is spread"
                raise ValueError(f"inputs are needed on {where}")
            if isinstance(self._inputs, list):
                self._inputs = microbatches(self._inputs, self.num_microbatches, "inputs")
                if self._hands_on:
                    check_equal_batches(self._inputs)
            self._inputs = self.leaves.replace(self._inputs)
            self.length = sequence_length(self._inputs, options.seq_dim)
        if self.rows:  # all ranks know the rows, and so the length
            self.length = max(map(sum, self.rows))

    def split(self, length: int) -> None:
        """Cuts the rank's arguments into segments, for micro-batches of ``length`` tokens."""
        options, self.length = self.options, length
        dim, part = options.seq_dim, options.sequence_parallel
        if self.rows:
            self.sizes = [size for row in self.rows for size in row]
        else:
            is_packed = isinstance(options.segment_sizes, ModelShape) and options.arg_rules.get("doc_ids") == "slice"
            documents = self._documents() if is_packed else None
            self.sizes = options.sizes_of(length, documents)
            self.rows = (self.sizes,) * self.num_microbatches
        if self._takes_inputs:
            self.inputs = []
            for m, given in enumerate(microbatches(self._inputs, self.num_microbatches, "inputs")):
                given = given if isinstance(given, tuple) else (given,)
                self.inputs += split_sequence(given, self.rows[m], dim, f"inputs of micro-batch {m}", part)
        if self._kwargs or options.arg_rules:
            self.kwargs = self._split_kwargs(self.leaves.replace(self._kwargs))
        if self._has_last and self.target is not None:
            self.targets = list(self.target)
            if part[1] > 1 or any(len(row) > 1 for row in self.rows):
                self.targets = []
                for m, target in enumerate(self.target):
                    self.targets += split_sequence(target, self.rows[m], dim, f"target of micro-batch {m}", part)

    def _split_kwargs(self, kwargs: Any) -> list[dict[str, Any]]:
        """Returns keyword arguments of a stage, by cell."""
        rules, part, trees = self.arg_rules, self.options.sequence_parallel, self.arguments.trees
        if not isinstance(kwargs, list):
            kwargs = kwargs or {}
            sliced = microbatches(_sliced(kwargs, rules), len(self.rows), "kwargs")
            kwargs = [{**kwargs, **own} for own in sliced]
        found = list[dict[str, Any]]()
        for m, own in enumerate(microbatches(kwargs, len(self.rows), "kwargs")):
            sizes = self.rows[m]
            begins = [0, *accumulate(sizes)] if trees is None else trees.positions(m)
            units = [{**own, **cut} for cut in split_sequence(_sliced(own, rules), sizes, self.seq_dim, "kwargs", part)]
            for s, unit in enumerate(units):
                length = sizes[s] // part[1]
                segment = Segment(m, s, begins[s] + part[0] * length, length)
                unit.update({name: rule(segment) for name, rule in rules.items() if callable(rule)})
            found += units
        return found

    def _documents(self) -> tuple[int, ...] | None:
        """Returns the lengths of all packed documents; None without ``doc_ids``."""
        kwargs = self._kwargs if isinstance(self._kwargs, list) else [self._kwargs or {}]
        rows = [microbatch["doc_ids"] for microbatch in kwargs if isinstance(microbatch.get("doc_ids"), Tensor)]
        return tuple(length for doc_ids in rows for length in document_lengths(doc_ids)) or None


def merge(parts: list[Any], dim: int) -> Any:
    """Joins outputs of segments or micro-batches into a whole output. Scalars become a vector.

    Args:
        parts: outputs in order: tensors, or tensors in nested tuples and dicts.
    """
    joined = iter([
        same[0] if len(same) == 1 else torch.cat(same, dim) if same[0].dim() else torch.stack(same)
        for same in zip(*map(tensors_of, parts), strict=True)
    ])  # fmt: skip
    return mapped(parts[0], lambda _: next(joined))


# -- parts of arguments ------------------------------------------------------------------------------------------------


def split_sequence(value: Any, sizes: Sequence[int], dim: int, name: str, part: TokenPart = (0, 1)) -> list[Any]:
    """Returns k segments of a tensor, tuple or dict of tensors, or the rank's part of each; repeats other values."""

    rank, num_parts = part

    def cut(tensor: Tensor, name: str) -> list[Any]:
        length = sum(sizes)
        if tensor.dim() <= dim or tensor.size(dim) != length:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} has no dimension {dim} of {length} tokens")
        return list(torch.split(tensor, every, dim)[rank::num_parts])

    every = list(sizes) if num_parts == 1 else part_sizes(sizes, part)
    return taken_apart(value, len(sizes), name, cut)


def part_sizes(sizes: Sequence[int], part: TokenPart) -> list[int]:
    """Returns the tokens of every part of every segment, in the order of the sequence."""
    return [size // part[1] for size in sizes for _ in range(part[1])]


def check_equal_batches(inputs: Any) -> None:
    """Raises ValueError if micro-batches of a list differ in batch size, because messages have a single size."""
    firsts = [item[0] if isinstance(item, tuple) and item else item for item in inputs]
    sizes = [first.size(0) if isinstance(first, Tensor) and first.dim() else None for first in firsts]
    for m, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(
                f"micro-batch {m} of inputs has batch size {size} and micro-batch 0 has {sizes[0]}: all micro-batches "
                "of a step must have one batch size. Leave out a last batch that num_microbatches does not divide "
                "(DataLoader(drop_last=True)), or pad it with rows whose targets are -100"
            )


def taken_apart(value: Any, count: int, name: str, cut: Callable[[Tensor, str], list[Any]]) -> list[Any]:
    """Returns ``count`` parts of a value; ``cut`` makes the parts of a tensor.

    Tuples and dicts become tuples and dicts of parts; other values are repeated.

    Args:
        name: name of the value, for errors of ``cut``.
    """
    if isinstance(value, Tensor):
        return cut(value, name)
    if isinstance(value, tuple):
        each = [taken_apart(item, count, name, cut) for item in value]
        return [tuple(parts[i] for parts in each) for i in range(count)]
    if isinstance(value, dict):
        named = {key: taken_apart(item, count, f"{name}[{key!r}]", cut) for key, item in value.items()}
        return [{key: parts[i] for key, parts in named.items()} for i in range(count)]
    return [value] * count


def microbatches(value: Any, num_microbatches: int, name: str) -> list[Any]:
    """Returns M micro-batches of a tensor, tuple or dict of tensors; repeats other values. A list has M already."""

    def cut(tensor: Tensor, name: str) -> list[Any]:
        if tensor.dim() == 0:
            return [tensor] * num_microbatches
        size = tensor.size(0)
        if size == 0:
            raise ValueError(f"{name} has batch size 0")
        if size % num_microbatches:
            raise ValueError(
                f"{name} has batch size {size}, which {num_microbatches} micro-batches do not divide; pass a list of "
                f"{num_microbatches} micro-batches of one size instead"
            )
        return list(torch.split(tensor, size // num_microbatches))

    if not isinstance(value, list):
        return taken_apart(value, num_microbatches, name, cut)
    if len(value) != num_microbatches:
        raise ValueError(f"{name} is a list of {len(value)} micro-batches, the engine runs {num_microbatches}")
    return value


def sequence_length(inputs: Any, dim: int) -> int:
    """Returns the tokens of the first tensor among the first micro-batch's positional arguments."""
    first = inputs
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    if not isinstance(first, Tensor):
        raise TypeError(f"inputs must begin with a tensor, got {type(first).__name__}")
    if first.dim() <= dim:
        raise ValueError(f"inputs of shape {tuple(first.shape)} have no sequence dimension {dim} (seq_dim)")
    if first.numel() == 0:
        raise ValueError(f"inputs of shape {tuple(first.shape)} hold no token: leave such a batch out, or pad its rows")
    return int(first.size(dim))


@dataclass
class Leaves:
    """Arguments that require grad, each with the leaf of autograd that units see in place of the argument.

    Without leaves every segment would run backward through the graph behind an argument. The leaves' summed gradients
    are propagated in one backward at the step's end, because arguments may share a graph.
    """

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def replace(self, value: Any) -> Any:
        """Returns the value with a leaf in place of each tensor that requires grad."""

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            self.pairs.append((tensor, leaf))
            return leaf

        if isinstance(value, Tensor):
            return leaf_of(value) if value.requires_grad else value
        return mapped(value, leaf_of) if any(tensor.requires_grad for tensor in tensors_of(value)) else value

    def propagate(self, factor: float = 1.0) -> None:
        """Propagates the leaves' gradients times ``factor``; 0 makes them zero, even if they are not finite."""
        reached = [(value, leaf.grad) for value, leaf in self.pairs if leaf.grad is not None]
        self.pairs.clear()
        if reached:
            values, gradients = zip(*reached, strict=True)
            if factor != 1.0:
                gradients = tuple(g * factor if factor else torch.zeros_like(g) for g in gradients)
            torch.autograd.backward(values, gradients)


def _sliced(kwargs: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if rules.get(name) == "slice"}
