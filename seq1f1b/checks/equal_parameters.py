"""Search for bit-equal parameters of two stages outside the ``tied_parameters``: likely one parameter of the model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn

from seq1f1b.engine.linear import is_plain
from seq1f1b.nested import digest
from seq1f1b.transport.values import sendable

__all__: list[str] = []

_SAMPLE, _FEWEST = 256, 8  # compared values of a parameter, and the fewest different bytes among them


@sendable
class UnlistedTie(NamedTuple):
    """A parameter outside the list of ties.

    Attributes:
        place: the stage, in words.
        kind: type of the module that holds the parameter.
        order: position among the stage's unlisted parameters, from 0.
        values: shape, dtype, and sums over a sample of the bytes.
    """

    place: str
    name: str
    kind: str
    order: int
    is_trained: bool
    values: tuple[Any, ...]


def unlisted(modules: Sequence[tuple[str, nn.Module]], listed: Collection[int]) -> list[UnlistedTie]:
    """Returns the unlisted parameters whose values are no constant.

    Args:
        modules: this rank's modules, each with its place in words.
        listed: ids of the listed parameters.
    """
    seen = set(listed)
    found: list[UnlistedTie] = []
    for place, module in modules:
        order = 0
        for prefix, part in module.named_modules() if isinstance(module, nn.Module) else ():
            for name, parameter in part.named_parameters(recurse=False):
                is_floating = is_plain(parameter) and parameter.is_floating_point()
                if id(parameter) in seen or not is_floating or parameter.is_meta:
                    continue
                seen.add(id(parameter))
                step = max(1, parameter.numel() // _SAMPLE)
                sample = parameter.detach().reshape(-1)[::step].contiguous().view(torch.uint8)
                if len(sample.unique()) < _FEWEST:
                    continue
                text, kind = f"{prefix}.{name}".lstrip("."), f"{type(part).__module__}.{type(part).__qualname__}"
                values = tuple(parameter.shape), str(parameter.dtype), *digest([sample])[0][2:]
                found.append(UnlistedTie(place, text, kind, order, parameter.requires_grad, values))
                order += 1
    return found


def look_at_equal(everyones: Sequence[Sequence[UnlistedTie]], own_rank: int) -> list[str]:
    """Returns the bit-equal pairs in words. Warns of likely ties on the rank of a pair's first parameter.

    Args:
        everyones: results of :func:`unlisted` by rank.
    """
    found, alike = [], dict[Any, list[tuple[int, UnlistedTie]]]()
    for rank, each in ((rank, each) for rank, theirs in enumerate(everyones) for each in theirs):
        alike.setdefault(each.values, []).append((rank, each))
    pairs = [
        (rank, first, second)
        for several in alike.values()
        for (rank, first), (other, second) in combinations(several, 2)
        if (rank, first.place) != (other, second.place) and (first.is_trained or second.is_trained)
    ]
    stages = Counter((first.place, second.place) for _, first, second in pairs)
    for rank, first, second in (pair for pair in pairs if len(pair[1].values[0]) > 1):
        both = f"{first.name} of {first.place} and {second.name} of {second.place}"
        found.append(both)
        # Layers made from one seed, or copied, are equal without a tie. Their modules have one type, and either more
        # of their parameters are equal, or the equal parameters are the first of their stages.
        is_alone = stages[first.place, second.place] == 1
        is_tie = first.kind != second.kind or (is_alone and first.order + second.order > 0)
        if is_tie and rank == own_rank:
            warnings.warn(
                f"{both} are bit-equal: if the model ties them, list both in the dict attribute tied_parameters of "
                "their stages, else their gradients are not summed and they come apart (docs/tutorial.md, Tied "
                "embeddings)",
                stacklevel=2,
            )
    return found
