"""A unit of the running step: state handed from pass to pass, and to neighbouring units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from seq1f1b import _C

__all__: list[str] = []


class LiveUnit:
    """State of one segment of one micro-batch at one stage, from F on. Fields of the engine's features come last."""

    is_last = True  # no segment of the micro-batch follows
    of_tree = False  # the micro-batch's segments are a tree
    num_parts = 1  # leaves in the segment
    num_waiting = 1  # children whose F has yet to run
    in_backward = False  # True from the start of B: a block recomputed there carries no state out
    is_whole = False  # a whole micro-batch: attention and carried state work as outside a step
    leaves: tuple[Any, ...] = ()  # detached inputs: leaves of the segment's own graph
    roots: tuple[Any, ...] = ()  # starts of B: losses, or gradient edges of outputs
    seeds: tuple[Tensor, ...] = ()  # gradients of losses; gradients of outputs come from the next stage
    handed: tuple[Any, ...] | None = None  # outputs or gradients for a neighbouring stage on this rank
    outputs: tuple[Tensor, ...] = ()  # kept for the step's last B, where DDP needs them to find unused parameters
    carried_in: dict[int, Tensor] | None = None
    carried_out: dict[int, Tensor] | None = None
    carried_back: dict[int, Tensor] | None = None  # states carried in by following segments, with gradients
    auxiliary: list[tuple[Tensor, bool]] | None = None  # auxiliary losses; True: of the whole sequence
    output: Any = None  # the last stage's output, if the caller asks for outputs

    starts: Sequence[Sequence[int]] = ((),)  # of transformers/state.py: the documents' first tokens, by row
    watch: Any = None  # of checks/first_look.py: notes calls of attention and of carried state
    kept: Any = None  # recompute.py: R's starting state, from F to R
    is_again = False  # recompute.py: True while R runs
    away: Any = None  # offload.py: saved tensors of a moved unit
    tape: Any = None  # split_backward.py: I's inputs and gradients for W
    blocks_again = 0  # recompute.py: number of first blocks that the backward recomputes one by one
    saved_bytes = 0  # measure.py: bytes saved in the graph
    kept_bytes = gradient_bytes = 0  # measure.py: bytes on the tape: layers' inputs, and outputs' gradients

    def __init__(
        self, stage: int, microbatch: int, segment: int, cell: int, training: bool, previous: LiveUnit | None
    ) -> None:
        self.stage = stage
        self.microbatch = microbatch
        self.segment = segment
        self.cell = cell  # number of the segment within its stage, counted over all micro-batches
        self.training = training
        self.previous = previous  # unit of the parent segment, for carried state

    def take_handed(self) -> tuple[Any, ...]:
        handed, self.handed = self.handed, None
        assert handed is not None
        return handed

    def waits_for_others(self) -> bool:
        """Counts a child's F; returns whether further children have yet to go forward."""
        self.num_waiting -= 1
        return self.num_waiting > 0

    def forget(self) -> None:
        """Drops the graph and all state for the unit's own passes. The output and handed tensors stay."""
        self.leaves = self.roots = self.seeds = self.outputs = ()
        self.kept = self.away = None
        self.previous = self.carried_in = self.carried_out = self.carried_back = self.auxiliary = None
        self.saved_bytes = 0

    # -- backward

    def start(self, gradients: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the roots of the backward that get a gradient, and these gradients. States that later segments have
        carried in are roots, too.

        Args:
            gradients: a gradient for each of ``roots``, or None.
        """
        pairs = [(r, g) for r, g in zip(self.roots, gradients, strict=True) if r is not None and g is not None]
        roots, seeds = tuple([r for r, _ in pairs]), tuple([g for _, g in pairs])
        if self.carried_out is not None and self.carried_back is not None:
            for name, leaf in self.carried_back.items():
                state = self.carried_out[name]
                if leaf.grad is not None and state.requires_grad:  # F without a graph could not know
                    roots += (get_gradient_edge(state),)
                    seeds += (leaf.grad,)
        return roots, seeds

    def carry_back(self) -> None:
        """Adds the gradients of carried-in state to the gradients from siblings, other children of the parent."""
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
        """Returns gradients of the inputs, for the previous stage."""
        return tuple([None if leaf.grad is None else as_message(leaf.grad) for leaf in self.leaves])


def as_message(tensor: Tensor) -> Tensor:
    """Returns the tensor in the form of a message: contiguous, and without torch's lazy conjugation or negation."""
    tensor = tensor.contiguous()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def enter(unit: LiveUnit | None) -> None:
    """Makes the unit's state visible to the modules on this thread, until the executor ends the unit.

    Ops of attention read the unit's offset and slot of the cache from C (``csrc/run/current_unit.h``).
    """
    _C.current_unit_set_state(unit, unit is not None and unit.is_whole)


def current() -> LiveUnit | None:
    """Returns the unit running on this thread."""
    return _C.unit_state()  # type: ignore[no-any-return]
