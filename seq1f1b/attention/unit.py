"""A unit of the running step: the state that its passes leave to each other, and to neighbouring units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from seq1f1b import _C

__all__: list[str] = []


class LiveUnit:
    """One segment of one micro-batch at one stage, from its F on. Fields of parts stand at the end."""

    is_last = True  # of its micro-batch's segments; in a tree, none follows it
    of_tree = False  # its micro-batch's segments are a tree
    num_parts = 1  # leaves in it
    num_waiting = 1  # segments that follow it and have not gone forward
    in_backward = False  # True from the start of B: a block that is recomputed there reads, and carries nothing out
    is_whole = False  # not a segment: a whole micro-batch, as the model is outside a step
    leaves: tuple[Any, ...] = ()  # inputs, as leaves of the segment's own graph
    roots: tuple[Any, ...] = ()  # where B starts: losses, or edges of the outputs that were handed over
    seeds: tuple[Tensor, ...] = ()  # gradients of the roots, where these are losses; others come from the next stage
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
    tape: Any = None  # split_backward.py: what I leaves to W
    blocks_again = 0  # recompute.py: the first blocks of the stage, which its backward computes again one by one
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
        """Counts a child's F; returns whether further children of this segment are still to go forward."""
        self.num_waiting -= 1
        return self.num_waiting > 0

    def forget(self) -> None:
        """Drops the graph and all state that only this unit's passes read; the loss and the output stay."""
        self.leaves = self.roots = self.seeds = self.outputs = ()
        self.kept = self.away = None
        self.previous = self.carried_in = self.carried_out = self.carried_back = self.auxiliary = None
        self.saved_bytes = 0

    # -- backward

    def start(self, gradients: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the roots of the backward that have a gradient, and the gradients.

        Args:
            gradients: of the roots, None where there is none. States that later segments carried in are added.
        """
        roots, seeds = self.roots, tuple(gradients)
        if any(root is None or seed is None for root, seed in zip(roots, seeds, strict=True)):
            pairs = [(r, g) for r, g in zip(roots, seeds, strict=True) if r is not None and g is not None]
            roots, seeds = tuple([r for r, _ in pairs]), tuple([g for _, g in pairs])
        if self.carried_out is not None and self.carried_back is not None:
            for name, leaf in self.carried_back.items():
                state = self.carried_out[name]
                if leaf.grad is not None and state.requires_grad:  # R may have made one without, F could not tell
                    roots += (get_gradient_edge(state),)
                    seeds += (leaf.grad,)
        return roots, seeds

    def carry_back(self) -> None:
        """Adds the gradients of carried-in state to those of siblings with the same state."""
        if self.carried_in is None or self.previous is None:
            return
        if self.previous.carried_back is None:
            self.previous.carried_back = self.carried_in
            return
        back = self.previous.carried_back
        for name, leaf in self.carried_in.items():
            first = back.setdefault(name, leaf)
            if first is not leaf and leaf.grad is not None:
                first.grad = leaf.grad if first.grad is None else first.grad + leaf.grad

    def input_gradients(self) -> tuple[Tensor | None, ...]:
        """Returns gradients of the inputs, for the stage before."""
        return tuple([None if leaf.grad is None else as_message(leaf.grad) for leaf in self.leaves])


def as_message(tensor: Tensor) -> Tensor:
    """Returns the tensor as bytes for another rank: contiguous, and conjugated if torch has put that off."""
    tensor = tensor.contiguous()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def enter(unit: LiveUnit | None) -> None:
    """Makes the unit's state visible to the modules on this thread, until the executor says that the unit ends.

    Ops of attention read the rest from C (``csrc/run/current_unit.h``): the unit's offset, and its slot of the cache.
    """
    _C.unit_set_state(unit)
    if unit is not None and unit.is_whole:
        _C.unit_set_whole()


def current() -> LiveUnit | None:
    """Returns the unit that runs on this thread."""
    return _C.unit_state()  # type: ignore[no-any-return]
