"""Steps of rows whose segments are trees: each follows a parent, and leaves of one parent may share a unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from seq1f1b.runtime.arguments import check_int
from seq1f1b.runtime.rows import Rows, check_rows

__all__: list[str] = []


@dataclass(frozen=True)
class Trees:
    """What the segments of every micro-batch follow.

    Attributes:
        parents: the segment that each segment of each micro-batch follows, -1 for its first.
        parts: tokens of the siblings that share a segment, ``[micro-batch][segment]``; one number where it is alone.
    """

    parents: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[tuple[int, ...], ...], ...]

    def __str__(self) -> str:
        """The parents, and the siblings if there are any."""
        shared = {(m, s): part for m, row in enumerate(self.parts) for s, part in enumerate(row) if len(part) > 1}
        text = repr([list(row) for row in self.parents])
        return text + "".join(f", {list(part)} in segment {s} of {m}" for (m, s), part in shared.items())

    def positions(self, m: int) -> list[int]:
        """Where the segments of a micro-batch begin along their paths."""
        return positions_of(self.parents[m], [sum(part) for part in self.parts[m]])

    @cached_property
    def siblings(self) -> tuple[list[int], list[int]]:
        """Tokens of the siblings of cells that hold several, and by cell where its own begin; both empty if none do.

        Behind the last cell stands the number of all.
        """
        cells = [part if len(part) > 1 else () for row in self.parts for part in row]
        if not any(cells):
            return [], []
        return list(chain.from_iterable(cells)), list(accumulate(map(len, cells), initial=0))


def positions_of(parents: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Where segments begin along their paths: each at the end of its parent."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + sizes[parent])
    return found


def read_rows(sizes: object, parents: object, num_parts: int = 1) -> tuple[Rows, Trees | None]:
    """The tokens of the segments of every micro-batch, and what they follow; raises where either breaks a rule.

    Args:
        sizes: as :meth:`seq1f1b.PipelineEngine.step` takes ``segment_sizes``.
        parents: as it takes ``parents``; None: each segment follows the one before it.
        num_parts: ranks that share the tokens of a segment.
    """
    if parents is None:
        check_rows(sizes, num_parts)
        return sizes, None  # type: ignore[return-value]  # checked
    if num_parts > 1:
        raise ValueError("parents are not for ranks that share the tokens of a segment (sequence_parallel=)")
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError("parents need segment_sizes of the step: for every micro-batch the tokens of its segments")
    parts = [_parts(m, row) if isinstance(row, Sequence) else row for m, row in enumerate(sizes)]
    rows = [[sum(part) for part in row] if isinstance(row, list) else row for row in parts]
    check_rows(rows)
    if isinstance(parents, str) or not isinstance(parents, Sequence) or len(parents) != len(rows):
        raise ValueError(f"parents must be a list of {len(rows)}, for every micro-batch what each segment follows")
    read = []
    for m, (own, row) in enumerate(zip(parents, parts, strict=True)):
        own = range(-1, len(row) - 1) if own is None else own
        if isinstance(own, str) or not isinstance(own, Sequence) or len(own) != len(row):
            raise ValueError(f"parents[{m}] must name one parent for each of its {len(row)} segments, got {own!r}")
        for s, parent in enumerate(own):
            check_int(f"parents[{m}][{s}]", parent, -1)
        inner = next((s for s, part in enumerate(row) if len(part) > 1 and s in own), None)
        if inner is not None:
            raise ValueError(
                f"segment_sizes[{m}][{inner}] is {list(row[inner])}, siblings in one unit, and segment "
                f"{list(own).index(inner)} follows it: nothing can follow several leaves at once"
            )
        if len(row[0]) > 1:
            raise ValueError(
                f"segment_sizes[{m}][0] is {list(row[0])}: siblings follow a segment, and this is the first"
            )
        read.append(tuple(own))
    return rows, Trees(tuple(read), tuple(tuple(row) for row in parts))


def _parts(m: int, row: Sequence[Any]) -> list[tuple[int, ...]]:
    """Tokens of the leaves in each segment; one number where it is no list. That is checked with the rows."""
    found: list[tuple[Any, ...]] = []
    for s, size in enumerate(row):
        if not isinstance(size, Sequence) or isinstance(size, str):
            found.append((size,))
            continue
        if not size:
            raise ValueError(f"segment_sizes[{m}][{s}] is an empty list: siblings in one unit are at least one leaf")
        for i, tokens in enumerate(size):
            check_int(f"segment_sizes[{m}][{s}][{i}]", tokens, 1)
        found.append(tuple(size))
    return found
