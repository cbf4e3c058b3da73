"""A pipeline step of one stage without an engine: sets the current unit as the executor does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from core_extension import core

from seq1f1b import _C


class SimulatedStep:
    def __init__(
        self,
        sizes: Sequence[int],
        *,
        kv_slots: int = 1,
        grad_slots: int = 1,
        training: bool = True,
        cache: object = None,
        parents: Sequence[int] | None = None,
        parts: Mapping[int, Sequence[int]] | None = None,
        rows: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> None:
        """
        Args:
            parents: of the segments, each a number below its own, -1 for none; None: a chain.
            parts: of a segment that siblings share, the tokens of each.
            rows: the first row of each segment in its slab, None: its position; num_rows: that a slab has.
        """
        self.sizes = list(sizes)
        self.training = training
        self.parents = list(range(-1, len(self.sizes) - 1)) if parents is None else list(parents)
        self.parts = dict(parts or {})
        self.rows = [self.position(s) for s in range(len(self.sizes))] if rows is None else list(rows)
        self.cache = _C.kv_cache_create() if cache is None else cache
        slots = [(0, kv_slots, grad_slots)]
        core.kv_cache_begin_step(self.cache, slots, sum(self.sizes) if num_rows is None else num_rows, len(self.sizes))

    def slice(self, segment: int) -> slice:
        """Its tokens in the inputs, where segments lie one after another."""
        offset = sum(self.sizes[:segment])
        return slice(offset, offset + self.sizes[segment])

    def path(self, segment: int) -> list[int]:
        before = self.parents[segment]
        return [*([] if before < 0 else self.path(before)), segment]

    def position(self, segment: int) -> int:
        return sum(self.sizes[s] for s in self.path(segment)[:-1])

    def place(self, segment: int) -> tuple[int, int, list[tuple[int, int, int]], list[int]]:
        """Parent, children, (begin, end, row) of ranges of keys, and parts: as ``core.current_unit_set`` takes them."""
        ranges: list[tuple[int, int, int]] = []
        for s in self.path(segment):
            begin, row = self.position(s), self.rows[s]
            if ranges and ranges[-1][2] + ranges[-1][1] - ranges[-1][0] == row:
                ranges[-1] = (ranges[-1][0], begin + self.sizes[s], ranges[-1][2])
            else:
                ranges.append((begin, begin + self.sizes[s], row))
        parts = list(self.parts.get(segment, [self.sizes[segment]]))
        return self.parents[segment], self.parents.count(segment), ranges, parts

    def own_tokens(self, segment: int) -> list[list[int]]:
        """The tokens in the inputs, part by part."""
        where = self.slice(segment)
        ends = list(itertools.accumulate(self.parts.get(segment, [self.sizes[segment]]), initial=where.start))
        return [list(range(*pair)) for pair in itertools.pairwise(ends)]

    @contextmanager
    def unit(self, kind: str, microbatch: int, segment: int, *, slot: int = 0, grad_slot: int = 0) -> Iterator[None]:
        """Runs the body as unit ``F<microbatch>.<segment>`` (or B); a body that raises leaves the unit unfinished."""
        core.current_unit_set(
            self.cache, _C.PASSES.index(kind), 0, microbatch, segment, len(self.sizes), slot,
            -1 if kind == "F" else grad_slot, self.training, self.position(segment), self.sizes[segment],
            sum(self.sizes), self.place(segment),
        )  # fmt: skip
        finished = False
        try:
            yield
            finished = True
        finally:
            core.current_unit_clear(finished)
