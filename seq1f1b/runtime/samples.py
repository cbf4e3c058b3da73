"""A few tokens of a unit's arguments, with which a stage is run by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seq1f1b.runtime.nested import mapped, tensors_of

__all__: list[str] = []

ROWS, _MOST = 2, 16  # of a sample: 32 tokens, and 64 where each row comes twice


@dataclass(frozen=True)
class Sample:
    """The first tokens of a unit's arguments.

    Attributes:
        structure: the positional and the keyword arguments.
        tokens: of each tensor in it, as they come: (rows, tokens, ...), None if it has no tokens.
        dims: of each, where rows and tokens belong; -1: it has no rows.
        sizes: tokens of the two segments.
    """

    structure: Any
    tokens: list[Tensor | None]
    dims: list[tuple[int, int]]
    sizes: tuple[int, int]

    @property
    def length(self) -> int:
        return sum(self.sizes)

    def arguments(self, parts: Sequence[Tensor]) -> Any:
        """The arguments for some of the tokens. parts: of each tensor that has tokens, (rows, tokens, ...)."""
        given, places = iter(parts), iter(zip(self.tokens, self.dims, strict=True))

        def put(tensor: Tensor) -> Tensor:
            tokens, (row, dim) = next(places)
            if tokens is None:
                return tensor
            part = next(given)
            return part.squeeze(0).movedim(0, dim) if row < 0 else part.movedim((0, 1), (row, dim))

        return mapped(self.structure, put)


def take_samples(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_sliced: Callable[[str], bool],
    seq_dim: int,
    length: int,
    most: int,
    sizes: set[int],
    *,
    is_first: bool,
) -> list[Sample]:
    """Copies the first tokens of a unit's arguments; [] if it is not known where they are.

    Args:
        is_sliced: whether a keyword argument of this name has tokens along ``seq_dim``.
        length: of the unit, in tokens.
        most: tokens that the stage takes.
        sizes: numbers that segments had better not have: then an operation's sizes tell tokens from all else.
        is_first: positional arguments have their tokens along ``seq_dim``, too. Else the stage before may hand on
            another layout; if sizes do not tell which, there is a sample for each.
    """
    if any(tensors_of(value) and not is_sliced(name) for name, value in kwargs.items()):
        return []  # a mask, say: nobody knows what it is for other tokens
    given, named = tensors_of(inputs), tensors_of(dict(kwargs))
    if not given or most < 2:
        return []
    dims = [seq_dim] if is_first else [dim for dim, size in enumerate(given[0].shape) if size == length]
    chosen = _choose_sizes(min(most, _MOST), sizes)
    samples = []
    for dim in sorted(dims, key=lambda dim: dim != seq_dim):
        places = [_place(t, dim, length, None) for t in given[:1]]
        rows = given[0].shape[places[0][0]] if places[0] is not None and places[0][0] >= 0 else 0
        places += [_place(t, dim, length, rows) for t in given[1:]] + [_place(t, seq_dim, length, rows) for t in named]
        if rows and all(p is not None or length not in t.shape for t, p in zip([*given, *named], places, strict=True)):
            structure = _structure((inputs, dict(kwargs)), places)
            pairs = zip([*given, *named], places, strict=True)
            tokens = [_taken(t, p, chosen, i == 0) for i, (t, p) in enumerate(pairs)]
            samples.append(Sample(structure, tokens, [p or (-1, -1) for p in places], chosen))
    return samples


def _structure(values: Any, places: Sequence[Any]) -> Any:
    """The arguments without what they hold of the unit's memory, which others use again."""
    remaining = iter(places)

    def copied(tensor: Tensor) -> Tensor:
        has_tokens = next(remaining) is not None
        return tensor.new_empty(0) if has_tokens else tensor.detach().clone()

    return mapped(values, copied)


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


def _taken(tensor: Tensor, place: tuple[int, int] | None, sizes: tuple[int, int], is_tokens: bool) -> Tensor | None:
    """Some tokens of a tensor: (rows, tokens, ...). is_tokens: it is the first, whose tokens may stand anywhere."""
    if place is None:
        return None
    row, dim = place
    tensor = tensor.detach()
    tensor = tensor.movedim((row, dim), (0, 1)) if row >= 0 else tensor.movedim(dim, 0)[None]
    tensor = tensor[:ROWS]
    wanted = torch.arange(sum(sizes), device=tensor.device)  # a short unit's come again, of others the last one does
    wanted = wanted % tensor.shape[1] if is_tokens else wanted.clamp(max=tensor.shape[1] - 1)
    tokens = tensor.index_select(1, wanted)
    if row >= 0 and len(tokens) < ROWS:  # another row has the tokens in another order
        tokens = torch.cat([tokens, tokens.roll(1 + sum(sizes) // 3, 1) if is_tokens else tokens])
    return _varied(tokens) if is_tokens else tokens


def _choose_sizes(most: int, taken: set[int]) -> tuple[int, int]:
    """Tokens of two segments of unequal length; neither is a size of the stage, nor is their sum, if that can be."""
    unwanted = taken | {ROWS, 2 * ROWS}
    for length in range(most, max(2, most // 2), -1):
        for size in range(length // 2 + 1, length - 1):
            if not {length, size, length - size} & unwanted:
                return size, length - size
    return most // 2 + most % 2, most // 2


def _varied(tokens: Tensor) -> Tensor:
    """Tokens that are all alike would hide what mixes them: these differ."""
    if bool((tokens != tokens[:, :1]).any()):
        return tokens
    numbers = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    if tokens.is_floating_point():
        return tokens + torch.cos(numbers * 1.7).to(tokens.dtype) * (0.1 + tokens.abs())
    return numbers.to(tokens.dtype) % (tokens + 1) if bool((tokens > 0).all()) else tokens
