"""Splits a batch into the arguments of each unit: micro-batches along the batch, segments along the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from seq1f1b.nested import mapped, taken_apart, tensors_of

Rule: TypeAlias = "str | Callable[[Segment], Any]"


@dataclass(frozen=True, slots=True)
class Segment:
    """Argument of a callable rule: which tokens of which micro-batch a unit of this rank works on.

    The offset is the position of its first token, which is counted along its path in a tree.
    """

    microbatch: int
    segment: int
    offset: int
    length: int


def split_batch(value: Any, num_microbatches: int, name: str) -> list[Any]:
    """M micro-batches of a tensor, or of a tuple or dict of tensors; anything else is repeated."""

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

    return taken_apart(value, num_microbatches, name, cut)


TokenPart: TypeAlias = tuple[int, int]
"""(rank, size) among the ranks that each hold an equal part of every segment's tokens; (0, 1): all of them."""


def split_sequence(value: Any, sizes: Sequence[int], dim: int, name: str, part: TokenPart = (0, 1)) -> list[Any]:
    """k segments of a tensor, or of a tuple or dict of tensors, or this part of each; anything else is repeated."""

    def cut(tensor: Tensor, name: str) -> list[Any]:
        length = sum(sizes)
        if tensor.dim() <= dim or tensor.size(dim) != length:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has no dimension {dim} of {length} tokens to split into "
                "segments"
            )
        return list(torch.split(tensor, part_sizes(sizes, part), dim)[part[0] :: part[1]])

    return taken_apart(value, len(sizes), name, cut)


def part_sizes(sizes: Sequence[int], part: TokenPart) -> list[int]:
    """Tokens of every part of every segment, in the order of the sequence."""
    return [size // part[1] for size in sizes for _ in range(part[1])]


def check_count(value: Any, num_microbatches: int, name: str) -> None:
    if isinstance(value, list) and len(value) != num_microbatches:
        raise ValueError(f"{name} is a list of {len(value)} micro-batches, the engine runs {num_microbatches}")


def check_equal_batches(inputs: Any) -> None:
    """Stages hand on messages of one batch size: raises before anything runs where a list's micro-batches differ."""
    firsts = [item[0] if isinstance(item, tuple) and item else item for item in inputs]
    sizes = [first.size(0) if isinstance(first, Tensor) and first.dim() else None for first in firsts]
    for m, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(
                f"micro-batch {m} of inputs has batch size {size} and micro-batch 0 has {sizes[0]}: all micro-batches "
                "of a step must have one batch size. Leave out a last batch that num_microbatches does not divide "
                "(DataLoader(drop_last=True)), or pad it with rows whose targets are -100"
            )


def microbatches(value: Any, num_microbatches: int, name: str) -> list[Any]:
    """A list is M micro-batches already; a tensor or tuple is the whole batch."""
    if isinstance(value, list):
        check_count(value, num_microbatches, name)
        return value
    return split_batch(value, num_microbatches, name)


def sequence_length(inputs: Any, dim: int) -> int:
    """Tokens of the first tensor among the first micro-batch's positional arguments."""
    first = inputs[0] if isinstance(inputs, (list, tuple)) and len(inputs) else inputs
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    if not isinstance(first, Tensor):
        raise TypeError(f"inputs must begin with a tensor, got {type(first).__name__}")
    if first.dim() <= dim:
        raise ValueError(f"inputs of shape {tuple(first.shape)} have no sequence dimension {dim} (seq_dim)")
    if first.numel() == 0:
        raise ValueError(f"inputs of shape {tuple(first.shape)} hold no token: leave such a batch out, or pad its rows")
    return int(first.size(dim))


class Leaves:
    """Arguments that require grad: units see leaves, whose summed gradients are propagated once at the step's end.

    Two segments that shared the graph behind an argument would run backward through it a second time, and so would two
    arguments that come from one graph: all of them are propagated together.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def replace(self, value: Any) -> Any:
        """The value with a leaf in place of each tensor that requires grad."""

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            self._pairs.append((tensor, leaf))
            return leaf

        return mapped(value, leaf_of) if any(tensor.requires_grad for tensor in tensors_of(value)) else value

    def propagate(self, factor: float = 1.0) -> None:
        """factor: by which the gradients are multiplied; 0: they are nothing, even if they are not finite."""
        reached = [(value, leaf.grad) for value, leaf in self._pairs if leaf.grad is not None]
        self._pairs.clear()
        if reached:
            values, gradients = zip(*reached, strict=True)
            if factor != 1.0:
                gradients = tuple(g * factor if factor else torch.zeros_like(g) for g in gradients)
            torch.autograd.backward(values, gradients)


def split_inputs(inputs: Any, rows: Sequence[Sequence[int]], dim: int, part: TokenPart) -> list[list[tuple[Any, ...]]]:
    """Positional arguments of the first stage, per micro-batch and segment. rows: tokens of the segments of each."""
    units = []
    for m, microbatch in enumerate(microbatches(inputs, len(rows), "inputs")):
        arguments = microbatch if isinstance(microbatch, tuple) else (microbatch,)
        units.append(split_sequence(arguments, rows[m], dim, f"inputs of micro-batch {m}", part))
    return units


def check_rules(kwargs: Any, rules: Mapping[str, Rule], *, is_split: bool = False) -> None:
    """Every tensor keyword needs a rule: to guess from its sizes would be silently wrong.

    Args:
        is_split: micro-batches are whole segments, so that a list of them needs no rule.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(f"arg_rules must be a dict of rules by name, got {type(rules).__name__}")
    for name, rule in rules.items():
        if rule not in ("slice", "replicate") and not callable(rule):
            raise ValueError(
                f"arg_rules[{name!r}] is {rule!r}; it must be 'slice', 'replicate' or a callable of the unit"
            )
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
    """Keyword arguments of a stage, per micro-batch and segment.

    Args:
        rows: tokens of the segments of each micro-batch.
        positions: where those of a micro-batch begin; None: one after another.
    """
    per_microbatch: list[dict[str, Any]]
    if isinstance(kwargs, list):
        per_microbatch = microbatches(kwargs, len(rows), "kwargs")
    else:
        kwargs = kwargs or {}
        per_microbatch = [{**kwargs, **part} for part in split_batch(_sliced(kwargs, rules), len(rows), "kwargs")]
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
