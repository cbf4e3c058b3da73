"""A unit of the running step: what its passes leave to each other, and to the units beside it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seq1f1b import _C

__all__: list[str] = []


class LiveUnit:
    """One segment of one micro-batch at one stage, from its F on. What a part adds to it stands at the end."""

    is_last = True  # of its micro-batch's segments; in a tree, none follows it
    of_tree = False  # its micro-batch's segments are a tree
    num_parts = 1  # leaves in it
    num_waiting = 1  # segments that follow it and have not gone forward
    forward = True  # False while B runs: recomputation reads and never writes
    is_whole = False  # not a segment: a whole micro-batch, as the model is outside a step
    leaves: tuple[Any, ...] = ()  # inputs, as leaves of the segment's own graph
    roots: tuple[Any, ...] = ()  # where B starts: losses, or edges of the outputs that were handed over
    seeds: tuple[Any, ...] | None = ()  # their gradients; None: they come from the next stage
    handed: tuple[Any, ...] | None = None  # outputs, or gradients, until the neighbour on this rank takes them
    outputs: tuple[Tensor, ...] = ()  # kept for the step's last B: DDP finds unused parameters by them
    carried_in: dict[int, Tensor] | None = None
    carried_out: dict[int, Tensor] | None = None
    carried_back: dict[int, Tensor] | None = None  # what those behind it carried in, with gradients
    auxiliary: list[tuple[Tensor, bool]] | None = None  # losses, and whether each is of the whole sequence
    loss: Tensor | None = None
    output: Any = None  # what the last stage returned, if the caller asked for it

    watch: Any = None  # watch.py: told what the module asks of the step
    kept: Any = None  # recompute.py: from F to R, what R starts from
    is_again = False  # recompute.py: True while R runs
    digest: Any = None  # recompute.py: of what F computed, where R is compared with it
    away: Any = None  # offload.py: what its graph saves, if it is moved
    tape: Any = None  # deferred.py: what I leaves to W
    added: dict[int, int] | None = None  # layer.py: notes weights whose layers add to gradients; None: no layer may
    blocks_again = 0  # blocks.py: the first blocks of the stage, which its backward computes again one by one
    saved_bytes = 0  # measure.py: held by its graph
    kept_bytes = gradient_bytes = 0  # measure.py: by its tape: inputs of layers, and gradients of their outputs

    def __init__(
        self, stage: int, microbatch: int, segment: int, cell: int, training: bool, previous: LiveUnit | None
    ) -> None:
        self.stage = stage
        self.microbatch = microbatch
        self.segment = segment
        self.cell = cell  # number of the segment within its stage, counted over all micro-batches
        self.training = training
        self.previous = previous  # the segment that it follows, for what that carried out

    def take_handed(self) -> tuple[Any, ...]:
        handed, self.handed = self.handed, None
        assert handed is not None
        return handed

    def waits_for_others(self) -> bool:
        """Whether more than the one that has just gone forward follow this segment."""
        self.num_waiting -= 1
        return self.num_waiting > 0

    def forget(self) -> None:
        """Drops the graph and all that only this unit's passes read; the loss and the output stay."""
        self.leaves = self.roots = self.seeds = self.outputs = ()
        self.kept = self.away = None
        self.previous = self.carried_in = self.carried_out = self.carried_back = self.auxiliary = None
        self.saved_bytes = 0


def live_unit() -> LiveUnit | None:
    """The unit that runs on this thread."""
    return _C.unit_state()  # type: ignore[no-any-return]
