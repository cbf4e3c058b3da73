"""Splits a batch into the arguments of each unit: micro-batches along the batch, segments along the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from seq1f1b.nested import mapped, tensors_of
from seq1f1b.partition import ModelShape, partition_sequence

Rule: TypeAlias = "str | Callable[[Segment], Any]"


@dataclass(frozen=True, slots=True)
class Segment:
    """Argument of a callable rule: the tokens and the micro-batch of a unit on the rank.

    The offset is the position of the first token, in a tree counted along the segment's path.
    """

    microbatch: int
    segment: int
    offset: int
    length: int


Sizes: TypeAlias = "ModelShape | Sequence[int] | Mapping[int, Sequence[int]] | Callable[[int], Sequence[int]] | None"
"""Sizes of segments, as an engine is given them in ``segment_sizes``."""

TokenPart: TypeAlias = tuple[int, int]
"""(rank, size) among the ranks that each hold an equal part of every segment's tokens; (0, 1): all of them."""


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


def check_rules(kwargs: Any, rules: Mapping[str, Rule], *, is_split: bool = False) -> None:
    """Raises unless every tensor keyword has a rule: a guess from sizes could be silently wrong.

    Args:
        is_split: each micro-batch is one segment, so a list of micro-batches needs no rule.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(f"arg_rules must be a dict of rules by name, got {type(rules).__name__}")
    for name, rule in rules.items():
        if rule not in ("slice", "replicate") and not callable(rule):
            raise ValueError(f"arg_rules[{name!r}] is {rule!r}; it must be 'slice', 'replicate' or a callable")
    for microbatch in kwargs if isinstance(kwargs, list) else [kwargs or {}]:
        if not isinstance(microbatch, Mapping):
            raise TypeError(f"kwargs must be a dict, or a list of them, got {type(microbatch).__name__}")
        for name, value in microbatch.items():
            if isinstance(value, Tensor) and name not in rules and not (is_split and isinstance(kwargs, list)):
                raise ValueError(
                    f"keyword argument {name!r} is a tensor of shape {tuple(value.shape)} without a rule: say "
                    f"arg_rules={{{name!r}: 'slice'}} (along batch and sequence), 'replicate' or a callable of the unit"
                )


def split_kwargs(
    kwargs: Any,
    rules: Mapping[str, Rule],
    rows: Sequence[Sequence[int]],
    dim: int,
    part: TokenPart,
    positions: Callable[[int], Sequence[int]] | None = None,
) -> list[list[dict[str, Any]]]:
    """Returns keyword arguments of a stage, per micro-batch and segment.

    Args:
        rows: tokens of the segments of each micro-batch.
        positions: returns the first position of each segment of a micro-batch; None: segments follow each other.
    """
    per_microbatch: list[dict[str, Any]]
    if isinstance(kwargs, list):
        per_microbatch = microbatches(kwargs, len(rows), "kwargs")
    else:
        kwargs = kwargs or {}
        per_microbatch = [{**kwargs, **part} for part in microbatches(_sliced(kwargs, rules), len(rows), "kwargs")]
    found = []
    for m, (own, sizes) in enumerate(zip(per_microbatch, rows, strict=True)):
        begins = [0, *accumulate(sizes)] if positions is None else positions(m)
        units = [{**own, **cut} for cut in split_sequence(_sliced(own, rules), sizes, dim, "kwargs", part)]
        for s, unit in enumerate(units):
            length = sizes[s] // part[1]
            segment = Segment(m, s, begins[s] + part[0] * length, length)
            unit.update({name: rule(segment) for name, rule in rules.items() if callable(rule)})
        found.append(units)
    return found


def _sliced(kwargs: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if rules.get(name) == "slice"}


# -- sizes of segments -------------------------------------------------------------------------------------------------


_partition = lru_cache(64)(partition_sequence)


def segment_sizes(
    choice: Sizes, length: int, num_segments: int, num_parts: int, documents: tuple[int, ...] | None
) -> list[int]:
    """Returns the tokens of the segments of a sequence of ``length`` tokens.

    Args:
        choice: the engine's ``segment_sizes``.
        num_parts: ranks that share the tokens of each segment.
        documents: lengths of packed documents, for a ``ModelShape``; None: the sequence is one document.
    Raises:
        ValueError: the sequence is too short, or the choice is for another length.
    """
    if length < num_segments:
        raise ValueError(f"a sequence of {length} tokens has fewer than num_segments = {num_segments}")
    if choice is None:
        sizes = _partition(length, num_segments, strategy="even", multiple_of=num_parts)
    elif isinstance(choice, ModelShape):
        sizes = _partition(length, num_segments, model=choice, documents=documents, multiple_of=num_parts)
    elif isinstance(choice, Mapping):
        if length not in choice:
            known = ", ".join(map(str, sorted(choice)))
            raise ValueError(f"segment_sizes are for {known} tokens, the sequence has {length}: pad it")
        sizes = list(choice[length])
    elif callable(choice):
        sizes = list(choice(length))
    else:
        sizes = list(choice)
        if sum(choice) != length:
            raise ValueError(f"segment_sizes sum to {sum(choice)} tokens, the sequence has {length}")
    for s, size in enumerate(sizes):
        if size % num_parts:
            raise ValueError(
                f"segment {s} has {size} tokens, which the {num_parts} ranks of sequence_parallel= do not divide: "
                f"pad the sequence of {length} tokens to a multiple of {num_parts}, and give segment_sizes of "
                f"partition_sequence(multiple_of={num_parts})"
            )
    return list(sizes)
