"""Steps of rows: micro-batches with unequal lengths and numbers of segments.

Segments may form trees: each follows a parent, and leaves of one parent, siblings, may share a unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from seq1f1b.flat import whole
from seq1f1b.nested import mapped, tensors_of
from seq1f1b.partition import MOST_TOKENS
from seq1f1b.transport import RankGroup
from seq1f1b.transport.agreement import check_agreement

__all__: list[str] = []

Rows: TypeAlias = Sequence[Sequence[int]]
"""Tokens of the segments of every micro-batch."""

PlannedRows: TypeAlias = Any
"""A planned step of rows: a :class:`seq1f1b.planning.step_plan.StepPlan`, which a higher room makes."""

MOST_SHOWN = 200  # characters of the rows in a message


@dataclass(frozen=True)
class Trees:
    """The trees of a step: parents and siblings of all segments, ``[micro-batch][segment]``."""

    parents: tuple[tuple[int, ...], ...]  # -1 for the first segment
    parts: tuple[tuple[tuple[int, ...], ...], ...]  # tokens of each sibling; a single number without siblings

    def __str__(self) -> str:
        """Returns the parents and siblings as text."""
        shared = {(m, s): part for m, row in enumerate(self.parts) for s, part in enumerate(row) if len(part) > 1}
        text = repr([list(row) for row in self.parents])
        return text + "".join(f", {list(part)} in segment {s} of {m}" for (m, s), part in shared.items())

    def positions(self, m: int) -> list[int]:
        """Returns the first position, along the path, of each segment of a micro-batch."""
        return positions_of(self.parents[m], [sum(part) for part in self.parts[m]])

    @cached_property
    def followed(self) -> tuple[tuple[int, ...], ...] | None:
        """Returns ``parents`` for an order; None if all micro-batches are chains, with or without siblings."""
        is_tree = any(own != tuple(range(-1, len(own) - 1)) for own in self.parents)
        return self.parents if is_tree else None

    @cached_property
    def siblings(self) -> tuple[list[int], list[int]]:
        """Returns the tokens of all siblings, and for each cell the index of its first sibling; both empty without
        siblings.

        The list of indices ends with the number of all siblings.
        """
        cells = [part if len(part) > 1 else () for row in self.parts for part in row]
        if not any(cells):
            return [], []
        return list(chain.from_iterable(cells)), list(accumulate(map(len, cells), initial=0))


class Path(NamedTuple):
    """A path from the root to a leaf, in a micro-batch whose segments lie one after another."""

    tokens: Tensor  # places in the micro-batch of the path's tokens
    own: Tensor  # indices in `tokens` of the tokens in no earlier path


def paths_of(parents: Sequence[int], parts: Sequence[Sequence[int]]) -> list[Path]:
    """Returns every path of a micro-batch; each sibling is a leaf, and has a path."""
    begins = list(accumulate(map(sum, parts), initial=0))
    above: list[list[range]] = []  # each segment's ancestors, as ranges of tokens
    seen: set[int] = set()
    found = []
    for parent in parents:
        above.append([*above[parent], range(begins[parent], begins[parent + 1])] if parent >= 0 else [])
    for s in (s for s in range(len(parents)) if s not in parents):
        own = begins[s]
        for part in parts[s]:
            tokens = list(chain.from_iterable([*above[s], range(own, own + part)]))
            new = [i for i, token in enumerate(tokens) if token not in seen]
            found.append(Path(torch.tensor(tokens, device="cpu"), torch.tensor(new, device="cpu")))
            seen.update(tokens)
            own += part
    return found


def by_paths(
    run: Callable[..., Any],
    paths: Sequence[Path],
    dim: int,
    inputs: Iterable[Any],
    kwargs: dict[str, Any],
    sliced: Callable[[str], bool],
) -> Any:
    """Runs ``run`` on every path alone; returns the outputs in the order of the micro-batch's tokens.

    Args:
        dim: the dimension of tokens.
        sliced: says whether a keyword argument, given by name, has values for each token.
    """
    length = sum(len(path.own) for path in paths)
    outputs = []
    for path in paths:

        def on_path(value: Any, tokens: Tensor = path.tokens) -> Any:
            return mapped(value, lambda t: t.index_select(dim, tokens.to(t.device)) if _is_of(t, dim, length) else t)

        given = {name: on_path(value) if sliced(name) else value for name, value in kwargs.items()}
        outputs.append(run(*(on_path(value) for value in inputs), **given))
    places = torch.cat([path.tokens[path.own] for path in paths]).argsort()
    every = [list(tensors_of(output)) for output in outputs]

    def joined(several: tuple[Tensor, ...]) -> Tensor:
        if not all(_is_of(t, dim, len(p.tokens)) for t, p in zip(several, paths, strict=True)):
            return several[0]
        own = [t.index_select(dim, p.own.to(t.device)) for t, p in zip(several, paths, strict=True)]
        return torch.cat(own, dim).index_select(dim, places.to(own[0].device))

    tensors = iter([joined(several) for several in zip(*every, strict=True)])
    return mapped(outputs[0], lambda _: next(tensors))


def _is_of(tensor: Tensor, dim: int, length: int) -> bool:
    return tensor.dim() > dim and tensor.size(dim) == length


def positions_of(parents: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns the first position, along the path, of each segment: the end of the parent."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + sizes[parent])
    return found


def runs_of(
    rows: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None, siblings: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Returns the runs of consecutive tokens in a step of rows: a pair of first position along the path, and length.

    Args:
        rows: tokens of the segments of every micro-batch.
        parents: parent of each segment; None: the segment before.
        siblings: tokens of the siblings in each cell, empty for a cell without; empty if no cell has siblings.
    """
    found, cell = [], 0
    for m, sizes in enumerate(rows):
        own = range(-1, len(sizes) - 1) if parents is None else parents[m]
        for begin, size in zip(positions_of(own, sizes), sizes, strict=True):
            found += [(begin, tokens) for tokens in (siblings and siblings[cell]) or (size,)]
            cell += 1
    return found


def rows_given(segment_sizes: Any, parents: Any, plan: PlannedRows | None) -> dict[str, Any]:
    """Returns the arguments of a step of rows, by name, from an engine's arguments."""
    if plan is None:
        if parents is not None and segment_sizes is None:
            raise ValueError("parents need segment_sizes of the step: for every micro-batch the tokens of its segments")
        return {"rows": segment_sizes, "parents": parents}
    for name, given in (("segment_sizes", segment_sizes), ("parents", parents)):
        if given is not None:
            raise ValueError(f"plan= stands for {name}: give one of them")
    return {"rows": plan.segment_sizes, "parents": plan.parents, "plan": plan}


def read_rows(sizes: object, parents: object, num_parts: int = 1) -> tuple[Rows, Trees | None]:
    """Returns the tokens of all segments, and the trees; raises if an argument breaks a rule.

    Args:
        sizes: ``segment_sizes`` of :meth:`seq1f1b.PipelineEngine.step`.
        parents: ``parents`` of ``step``; None: each segment follows the segment before.
        num_parts: ranks that share the tokens of a segment.
    """
    if parents is not None and num_parts > 1:
        raise ValueError("parents are not for ranks that share the tokens of a segment (sequence_parallel=)")
    parts = _read_sizes(sizes, num_parts, may_share=parents is not None)
    rows = [list(map(sum, row)) for row in parts]
    if parents is None:
        return rows, None
    if isinstance(parents, str) or not isinstance(parents, Sequence) or len(parents) != len(rows):
        raise ValueError(f"parents must hold {len(rows)} lists: for every micro-batch the parent of each segment")
    read = []
    for m, (own, row) in enumerate(zip(parents, parts, strict=True)):
        own = range(-1, len(row) - 1) if own is None else own
        if isinstance(own, str) or not isinstance(own, Sequence) or len(own) != len(row):
            raise ValueError(f"parents[{m}] must name one parent for each of its {len(row)} segments, got {own!r}")
        for s, parent in enumerate(own):
            whole(f"parents[{m}][{s}]", parent, -1)
        inner = next((s for s, part in enumerate(row) if len(part) > 1 and s in own), None)
        if inner is not None:
            raise ValueError(
                f"segment_sizes[{m}][{inner}] is {list(row[inner])}, siblings in one unit, and segment "
                f"{list(own).index(inner)} follows it: nothing can follow several leaves at once"
            )
        if len(row[0]) > 1:
            raise ValueError(
                f"segment_sizes[{m}][0] is {list(row[0])}: siblings follow a segment, and segment 0 is the first"
            )
        read.append(tuple(own))
    return rows, Trees(tuple(read), tuple(map(tuple, parts)))


def _read_sizes(sizes: object, num_parts: int, *, may_share: bool) -> list[list[tuple[int, ...]]]:
    """Returns the tokens of each segment, [micro-batch][segment]: a number for each sibling, or a single number."""
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise TypeError("segment_sizes of a step must be a list: for every micro-batch the tokens of its segments")
    found: list[list[tuple[int, ...]]] = []
    for m, row in enumerate(sizes):
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"segment_sizes[{m}] of a step must be a list of token counts, got {type(row).__name__}")
        if not row:
            raise ValueError(f"segment_sizes[{m}] is empty: every micro-batch has at least one segment")
        found.append([])
        for s, size in enumerate(row):
            name, is_shared = f"segment_sizes[{m}][{s}]", isinstance(size, (list, tuple))
            if is_shared and not may_share:
                raise TypeError(f"{name} is {size}, siblings in one unit: they need parents=")
            if is_shared and not size:
                raise ValueError(f"{name} is an empty list: siblings in one unit are at least one leaf")
            part = tuple(size) if is_shared else (size,)
            for i, tokens in enumerate(part):
                whole(f"{name}[{i}]" if is_shared else name, tokens, 1)
            whole(name, sum(part), 1, MOST_TOKENS)
            if sum(part) % num_parts:
                raise ValueError(
                    f"{name} is {sum(part)}, which the {num_parts} ranks of sequence_parallel= do not divide"
                )
            found[-1].append(part)
    return found


def check_equal_rows(group: RankGroup, rows: Rows | None, trees: object, plan: PlannedRows | None, order: str) -> None:
    """Raises, on every rank, unless all ranks have equal rows, plans and orders. Collective."""
    planned = "None" if plan is None else plan.digest
    own = {
        "segment_sizes": _shown(repr(None if rows is None else [list(row) for row in rows])),
        "plan": (planned, planned),
        "parents": _shown(str(trees)),
        "schedule": (order, f"order {order}"),
    }
    check_agreement(group.all_gather_object(own))


def _shown(text: str) -> tuple[str, str]:
    """Returns a digest of a text for comparison, and the begin of the text for errors."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return digest, text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({digest})"
