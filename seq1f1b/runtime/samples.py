"""A few tokens of a unit's arguments, with which a stage is run by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seq1f1b.ops.unit import LiveUnit
from seq1f1b.runtime.nested import mapped, tensors_of
from seq1f1b.runtime.stage import StageStep
from seq1f1b.runtime.watch import sizes_of

__all__: list[str] = []

ROWS, _MOST = 2, 16  # of a sample: 32 tokens, and 64 where each row comes twice


@dataclass(frozen=True)
class Sample:
    """The first tokens of a unit's arguments.

    Attributes:
        values: the positional and the keyword arguments.
        places: of each tensor in them, as they come, the dimensions of rows and of tokens; -1: it has none.
        sizes: tokens of the two segments.
    """

    values: Any
    places: list[tuple[int, int]]
    sizes: tuple[int, int]

    @property
    def length(self) -> int:
        return sum(self.sizes)

    def arguments(self, begin: int, length: int, *, is_twice: bool) -> Any:
        """The arguments for some of the tokens. is_twice: each row comes twice."""
        places = iter(self.places)

        def part(tensor: Tensor) -> Tensor:
            row, dim = next(places)
            part = tensor.narrow(dim, begin, length) if dim >= 0 else tensor
            return torch.cat([part, part], row) if is_twice and row >= 0 else part.clone()

        return mapped(self.values, part)


def take_samples(step: StageStep, unit: LiveUnit, inputs: tuple[Any, ...]) -> list[Sample]:
    """Copies the first tokens of a unit's arguments; [] if it is not known where they are.

    Positional arguments of the first stage have their tokens along ``seq_dim``, as keyword arguments have them that are
    sliced. Another stage may hand on another layout: if sizes do not tell which, there is a sample for each.
    """
    stage, rules, seq_dim = step.stage, step.arguments.arg_rules, step.arguments.seq_dim
    kwargs, length = dict(step.kwargs_of(unit)), step.lengths[unit.cell]
    most = min(_MOST, sum(step.arguments.rows[unit.microbatch]))
    given, named = tensors_of(inputs), tensors_of(kwargs)
    is_known = all(rules.get(name) == "slice" for name, value in kwargs.items() if tensors_of(value))
    if not is_known or not given or most < 2:  # a mask, say: nobody knows what it is for other tokens
        return []
    dims = [seq_dim] if stage.is_first else [dim for dim, size in enumerate(given[0].shape) if size == length]
    chosen = _choose_sizes(most, sizes_of(stage.modules))
    samples = []
    for dim in sorted(dims, key=lambda dim: dim != seq_dim):
        places = [_place(given[0], dim, length, None)]
        rows = given[0].shape[places[0][0]] if places[0] is not None and places[0][0] >= 0 else 0
        places += [_place(t, dim, length, rows) for t in given[1:]] + [_place(t, seq_dim, length, rows) for t in named]
        pairs = list(zip([*given, *named], places, strict=True))
        if rows and all(place is not None or length not in t.shape for t, place in pairs):
            taken = iter([_taken(t, place, chosen, i == 0) for i, (t, place) in enumerate(pairs)])
            values = mapped((inputs, kwargs), partial(_next_of, taken))
            samples.append(Sample(values, [place or (-1, -1) for place in places], chosen))
    return samples


def _next_of(taken: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(taken)


def _place(tensor: Tensor, dim: int, length: int, rows: int | None) -> tuple[int, int] | None:
    """The dimensions of rows and of tokens; rows are -1 where there are none. None: it has no tokens.

    Args:
        dim: of the tokens, if it has so many.
        rows: of the stage's first tensor; None: it is that.
    """
    shape = tuple(tensor.shape)
    if dim >= len(shape) or shape[dim] != length:
        if shape.count(length) != 1:
            return None
        dim = shape.index(length)
    row = 1 if dim == 0 else 0
    if rows is None:
        return (row, dim) if row == 0 or len(shape) > 2 else (-1, dim)
    return (row, dim) if row < len(shape) and shape[row] == rows else (-1, dim)


def _taken(tensor: Tensor, place: tuple[int, int] | None, sizes: tuple[int, int], is_tokens: bool) -> Tensor:
    """A copy of some tokens of a tensor. is_tokens: it is the first, whose tokens may stand anywhere."""
    if place is None:
        return tensor.detach().clone()
    row, dim = place
    tensor = tensor.detach()
    if row >= 0:
        tensor = tensor.narrow(row, 0, min(ROWS, tensor.shape[row]))
    wanted = torch.arange(sum(sizes), device=tensor.device)  # a short unit's come again, of others the last one does
    wanted = wanted % tensor.shape[dim] if is_tokens else wanted.clamp(max=tensor.shape[dim] - 1)
    tokens = tensor.index_select(dim, wanted)
    if row >= 0 and tokens.shape[row] < ROWS:  # another row has the tokens in another order
        tokens = torch.cat([tokens, tokens.roll(1 + sum(sizes) // 3, dim) if is_tokens else tokens], row)
    return _varied(tokens, dim) if is_tokens else tokens


def _choose_sizes(most: int, taken: set[int]) -> tuple[int, int]:
    """Tokens of two segments of unequal length; neither is a size of the stage, nor is their sum, if that can be."""
    unwanted = taken | {ROWS, 2 * ROWS}
    for length in range(most, max(2, most // 2), -1):
        for size in range(length // 2 + 1, length - 1):
            if not {length, size, length - size} & unwanted:
                return size, length - size
    return most // 2 + most % 2, most // 2


def _varied(tokens: Tensor, dim: int) -> Tensor:
    """Tokens that are all alike would hide what mixes them: these differ."""
    if bool((tokens != tokens.narrow(dim, 0, 1)).any()):
        return tokens
    numbers = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    if tokens.is_floating_point():
        return tokens + torch.cos(numbers * 1.7).to(tokens.dtype) * (0.1 + tokens.abs())
    return numbers.to(tokens.dtype) % (tokens + 1) if bool((tokens > 0).all()) else tokens
