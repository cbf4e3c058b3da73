"""A pipeline step of one stage without an engine: sets the current unit as the executor does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        stage: int = 0,
        training: bool = True,
        scope: str = "thread",
        cache: object = None,
    ) -> None:
        self.sizes = list(sizes)
        self.stage, self.training, self.scope = stage, training, scope
        self.cache = _C.kv_cache_create() if cache is None else cache
        core.kv_cache_begin_step(self.cache, [(stage, kv_slots, grad_slots)], sum(self.sizes), len(self.sizes))

    def slice(self, segment: int) -> slice:
        offset = sum(self.sizes[:segment])
        return slice(offset, offset + self.sizes[segment])

    @contextmanager
    def unit(self, kind: str, microbatch: int, segment: int, *, slot: int = 0, grad_slot: int = 0) -> Iterator[None]:
        """Runs the body as unit ``F<microbatch>.<segment>`` (or B); a body that raises leaves the unit unfinished."""
        where = self.slice(segment)
        core.current_unit_set(
            self.cache, _C.PASSES.index(kind), self.stage, microbatch, segment, len(self.sizes), slot,
            -1 if kind == "F" else grad_slot, self.training, where.start, self.sizes[segment], sum(self.sizes),
            self.scope,
        )  # fmt: skip
        finished = False
        try:
            yield
            finished = True
        finally:
            core.current_unit_clear(self.scope, finished)
