"""One stage: what it is in every step, and its part of one step, a method for each pass. The executor says when."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from seq1f1b.ops.context import LiveUnit, enter
from seq1f1b.runtime.backward import carry_back, input_gradients, start_of
from seq1f1b.runtime.blocks import Blocks
from seq1f1b.runtime.data_parallel import Fsdp, data_parallel, without_wrapper
from seq1f1b.runtime.deferred import Tape
from seq1f1b.runtime.divided import split_loss
from seq1f1b.runtime.looks import WEIGHTING, Finding, Looks
from seq1f1b.runtime.loss_look import LossLook
from seq1f1b.runtime.nested import tensors_of
from seq1f1b.runtime.offload import Aside, Tier
from seq1f1b.runtime.recompute import Kept, digest, one_at_a_time
from seq1f1b.runtime.saved_bytes import Activations, SavedBytes, is_compiled
from seq1f1b.runtime.shards import EmbeddingStep, HeadStep
from seq1f1b.schedule import Unit

__all__: list[str] = []

Received: TypeAlias = "tuple[tuple[Sequence[Any], Sequence[bool]], ...] | None"
"""Messages that came for a unit from other ranks, in the order in which the program waits for them: the tensors of each
(None for a gradient that does not exist), and which of them require grad. None if no message comes."""


class Stage:
    """A stage of this rank, the same in every step: its module, its place in the pipeline, and what wraps it."""

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        index: int,
        *,
        num_stages: int,
        first_cells: Sequence[int],
        loss_fn: Callable[[Any, Any], Tensor] | None,
        device: torch.device,
        order: Sequence[Unit],
        unchecked: bool = False,
        is_whole: bool = False,
        in_threads: bool = False,
        recomputes: bool = False,
        tier: Tier | None = None,
        blocks: Blocks | None = None,
        spreads_vocabulary: bool = False,
    ) -> None:
        self.module = module
        self.index = index
        self.device = device
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.spreads_vocabulary = spreads_vocabulary and self.is_last  # its output goes to the shards of all ranks
        self.loss_fn = loss_fn if self.is_last and not spreads_vocabulary else None
        # A loss that holds parameters is the model's head: its logits live only inside F.
        self.loss_is_head = isinstance(self.loss_fn, nn.Module) and any(True for _ in self.loss_fn.parameters())
        self.tier = tier  # where moved units go
        self.blocks = blocks  # that some units compute again
        self.in_threads = in_threads  # other ranks are threads that draw from the same generators
        self._take_order(order, first_cells, recomputes)
        self.is_whole = is_whole  # units are whole micro-batches, as outside a step
        self.looks = Looks(index, self.modules, unchecked)
        self.parallel = data_parallel(module)
        self.head_parallel = data_parallel(self.loss_fn)

    def _take_order(self, order: Sequence[Unit], first_cells: Sequence[int], recomputes: bool) -> None:
        self.first_cells = first_cells
        self.shares_random = self.in_threads and (recomputes or self.blocks is not None)
        own = [(u.kind, first_cells[u.microbatch] + u.segment) for u in order if u.stage == self.index]
        self.forwards = [key for kind, key in own if kind == "F"]
        self.split = {key for kind, key in own if kind == "W"}  # units whose backward is I and W
        self.recomputed = {key for kind, key in own if kind == "R"}
        self.moved = {key for kind, key in own if kind == "O"}
        # After it all gradients of weights are there: B, or W.
        self.last_gradients = next(((kind, key) for kind, key in reversed(own) if kind in "BW"), ("", -1))

    def with_order(self, order: Sequence[Unit], first_cells: Sequence[int], recomputes: bool) -> Stage:
        """The same stage under another order: order: this rank's units; first_cells: of the whole; recomputes: whether
        any rank has an R."""
        stage = copy.copy(self)
        stage._take_order(order, first_cells, recomputes)
        return stage

    @property
    def modules(self) -> list[nn.Module]:
        """The stage's module, and its loss if that is a module."""
        return [module for module in (self.module, self.loss_fn) if isinstance(module, nn.Module)]

    @property
    def wrappers(self) -> list[Any]:
        """What the module and the head need around passes under DDP or FSDP2."""
        return [parallel for parallel in (self.parallel, self.head_parallel) if parallel is not None]

    @property
    def gradient_divisor(self) -> float | None:
        """The number by which the sum of this stage's replicas' gradients is divided; None if nothing reduces them."""
        return next((parallel.divisor for parallel in self.wrappers), None)

    @property
    def trained_weights(self) -> int:
        """Elements of all parameters that require grad, each once."""
        parameters = {id(p): p.numel() for module in self.modules for p in module.parameters() if p.requires_grad}
        return sum(parameters.values())

    @property
    def shows_saved_bytes(self) -> bool:
        """Whether the bytes that graphs keep are measurable: FSDP2's hold parameters too, compiled ones hide theirs."""
        sharded = any(isinstance(parallel, Fsdp) for parallel in self.wrappers)
        return not sharded and not any(map(is_compiled, self.modules))

    def begin(self, arguments: StageArguments) -> StageStep:
        """Enters a step."""
        return StageStep(self, arguments)


@dataclass(frozen=True)
class StageArguments:
    """A stage's arguments for one step; lists are by [micro-batch][segment].

    Attributes:
        rows: tokens of each segment.
        inputs: positional arguments of the first stage.
        seeds: gradients of the last stage's losses.
        shares: what part of the micro-batch's loss each of these losses is.
        sum_seed: gradient of a loss that comes with its divisor.
        divides: whether the loss comes with a divisor; None: the first one tells.
        loss_look: of the first step of a shape.
        auxiliary_seeds: gradients of an auxiliary loss of a segment, and of one of the sequence.
        measures: whether to count the bytes that graphs keep.
        looks: whether to look for what mixes tokens without the engine's knowledge; it finds tokens in ``inputs`` and
            ``kwargs`` by ``seq_dim`` and ``arg_rules``.
        compares: whether R has to compute what F did.
    """

    training: bool
    rows: Sequence[Sequence[int]]
    inputs: list[list[tuple[Any, ...]]] | None = None
    kwargs: list[list[dict[str, Any]]] | None = None
    targets: list[list[Any]] | None = None
    seeds: list[list[Tensor]] | None = None
    shares: list[list[float]] | None = None
    sum_seed: float = 1.0
    divides: bool | None = None
    loss_look: LossLook | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    auxiliary_seeds: Sequence[Sequence[tuple[float, float]]] = ()
    keep_outputs: bool = False
    measures: bool = False
    looks: bool = False
    compares: bool = False
    seq_dim: int = 1
    arg_rules: Mapping[str, Any] = field(default_factory=dict)


class StageStep:
    """A stage's part of one step: runs its module on one unit at a time, and holds the units until the step ends.

    Every segment has a graph of its own: its inputs are leaves, keys and values pass between segments through the
    cache, other state through ``carry``. B is ``torch.autograd.backward`` on that graph, so hooks on parameters fire.
    """

    def __init__(self, stage: Stage, arguments: StageArguments) -> None:
        self.stage, self.arguments = stage, arguments
        self.training = arguments.training
        self.previous: StageStep | None = None  # neighbours on the same rank: handed over without a transfer
        self.following: StageStep | None = None
        self.shards: HeadStep | None = None  # of the last stage, where the output layer is spread
        self.embedding: EmbeddingStep | None = None  # of the first stage, where the embedding is
        self.units: dict[int, LiveUnit] = {}  # by cell: segments of all micro-batches, counted on
        self.saved_bytes = self.saved_tokens = self.peak_saved_bytes = 0  # of all units, if measured
        self.kept_bytes = self.gradient_bytes = self.kept_tokens = self.peak_gradient_bytes = 0  # of what I leaves to W
        self.deferred_weights: dict[int, int] = {}  # elements of weights that I left to W, by the weight's id
        self._module, self._parallel, self._first_cells = stage.module, stage.parallel, stage.first_cells
        self._seeds = arguments.seeds
        self.divides = arguments.divides
        self.divisors: dict[int, Tensor | float] = {}  # by cell, of losses that come with one
        self.has_auxiliary = False
        self._loss_arguments: tuple[Any, Any, bool] | None = None  # of a loss that is looked at
        self._measures = arguments.measures and stage.shows_saved_bytes
        looks = arguments.looks and not any(map(is_compiled, stage.modules))
        # The first unit that follows another: F0.1, or that of the first micro-batch of several segments.
        several = (m for m, row in enumerate(arguments.rows) if looks and len(row) > 1)
        self._looked_at = next((self._first_cells[m] + 1 for m in several), -1)
        self._output_spec: dict[int, list[tuple[torch.Size, torch.dtype]]] = {}  # by segment length
        self.moved_bytes = 0  # of all units, on their way out
        self.blocks_again = 0  # in all units
        self._head_bytes = 0  # held by the graph of a unit's head, which is gone at the end of its F
        self.head_bytes = self.head_tokens = 0  # of all units, if measured
        self._last_head = -1
        trained = (p.requires_grad for module in stage.modules for p in module.parameters())
        self._trains = bool(stage.recomputed) and (not isinstance(stage.module, nn.Module) or any(trained))
        if stage.head_parallel is not None and arguments.shares is not None:
            counted = [share != 0.0 for row in arguments.shares for share in row]
            self._last_head = next((key for key in reversed(stage.forwards) if counted[key]), -1)
        for parallel in stage.wrappers:
            parallel.begin_step()

    @property
    def passes(self) -> tuple[Callable[[int, int, Received], tuple[Any, ...] | None], ...]:
        """A method for each pass; position = the pass's number in C (``csrc/core/unit.h``)."""
        passes = (self.forward, self.backward, self.backward, self.weight, self.recompute)
        moves = (self.move_out, self.wait_until_out, self.load)
        return (*map(one_at_a_time, passes), *moves) if self.stage.shares_random else (*passes, *moves)

    @property
    def losses(self) -> dict[int, Tensor]:
        """Losses of the units that have one, by cell."""
        if self.shards is not None:
            return self.shards.losses
        return {key: unit.loss for key, unit in self.units.items() if unit.loss is not None}

    def activations(self) -> Activations:
        """What units held, in a step that measures."""
        saved = self.saved_bytes / self.saved_tokens
        kept, gradients = self.kept_bytes / max(1, self.kept_tokens), self.gradient_bytes / max(1, self.kept_tokens)
        head = self.head_bytes / max(1, self.head_tokens)
        return Activations(saved, kept, gradients, head, self.peak_saved_bytes, self.peak_gradient_bytes)

    def check_finished(self) -> None:
        """Raises where I of a unit has left what no W took: gradients of weights would be missing."""
        for unit in self.units.values():
            if unit.tape is not None:
                m, s = unit.microbatch, unit.segment
                raise RuntimeError(f"stage {self.stage.index}: no W{m}.{s} has taken what I{m}.{s} left")

    def end(self) -> None:
        for parallel in self.stage.wrappers:
            parallel.end_step()

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, m: int, s: int, received: Received) -> tuple[Tensor, ...] | None:
        """F(m.s). Returns what crosses to the next stage, None from the last one."""
        key = self._first_cells[m] + s
        unit = LiveUnit(self.stage.index, m, s, self.training, self.units[key - 1] if s else None)
        if self.training and key in self.stage.split:
            unit.tape = Tape(self.deferred_weights)
        if self.training and self.stage.blocks is not None and key not in self.stage.recomputed:
            unit.blocks_again = self.stage.blocks.count(m, s)
            self.blocks_again += unit.blocks_again
        unit.is_whole, unit.is_last = self.stage.is_whole, s + 1 == len(self.arguments.rows[m])
        inputs = self._inputs(key, unit, received)
        self.units[key] = unit
        enter(unit)
        run = self._measured if self._measures else self._compute
        around: AbstractContextManager[Any] = nullcontext()
        if self.training and key in self.stage.recomputed:
            unit.kept = Kept(inputs, self._kwargs(unit), self.stage.device, self._trains)
            around = unit.kept.first()
        if self.training and key in self.stage.moved:
            unit.aside = Aside(self.stage.modules if self._measures else (), inputs)
            around = around if self._measures else unit.aside
        with around:
            result = self._watched(run, key, unit, inputs) if key == self._looked_at else run(key, unit, inputs)
        if self._loss_arguments is not None:
            self._look_at_loss(unit)
        if not self.training:  # no backward follows: only the next segment reads what was carried out
            if unit.previous is not None:
                unit.previous.forget()
            carried_out = unit.carried_out if s + 1 < len(self.arguments.rows[m]) else None
            unit.forget()
            unit.carried_out = carried_out
        return result

    def _compute(self, key: int, unit: LiveUnit, inputs: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        kwargs = self._kwargs(unit)
        if self._parallel is None:
            output = self._module(*inputs, **kwargs) if kwargs else self._module(*inputs)
        else:
            with self._parallel.forward():
                output = self._module(*inputs, **kwargs)
            if self.training and self.stage.last_gradients == ("B", key):
                unit.outputs = tuple([o for o in tensors_of(output) if o.requires_grad])
        if self.arguments.compares and (unit.kept is not None or unit.is_again):
            self._compare(unit, output)
        if self.shards is not None:
            return self._finish_hidden(unit, output)
        if not self.stage.is_last:
            return self._finish_middle(unit, output)
        self._finish_last(key, unit, output)
        return None

    def _compare(self, unit: LiveUnit, output: Any) -> None:
        """Notes what F computes; R must compute the same."""
        found = digest([*tensors_of(output), *(unit.carried_out or {}).values()])
        if not unit.is_again:
            unit.digest = found
        elif found != unit.digest:
            raise RuntimeError(
                f"stage {self.stage.index} has computed something else in R{unit.microbatch}.{unit.segment} than in "
                "its F: a stage that is recomputed must do the same both times. Random numbers of torch are the same; "
                "Python's and NumPy's, counters and buffers that a forward changes are not. Mend that, or leave the "
                "unit out of recompute="
            )

    def _kwargs(self, unit: LiveUnit) -> Mapping[str, Any]:
        given = self.arguments.kwargs
        return given[unit.microbatch][unit.segment] if given is not None else _NO_KWARGS

    def _watched(
        self, run: Callable[..., tuple[Tensor, ...] | None], key: int, unit: LiveUnit, inputs: tuple[Any, ...]
    ) -> tuple[Tensor, ...] | None:
        """The same for one unit, looking for what mixes tokens without the engine's knowledge."""
        m, s, arguments = unit.microbatch, unit.segment, self.arguments
        sizes, dim = arguments.rows[m], arguments.seq_dim
        given: list[tuple[Any, int | None]] = [(value, dim) for value in inputs]
        given += [(v, dim if arguments.arg_rules.get(k) == "slice" else None) for k, v in self._kwargs(unit).items()]
        given += [(arguments.targets[m][s], dim)] if arguments.targets is not None else []
        with self.stage.looks.watch(given, sizes[0], sizes[1]) as unit.watch:
            result = run(key, unit, inputs)
        unit.watch = None
        return result

    def _measured(self, key: int, unit: LiveUnit, inputs: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """The same, counting the bytes that the unit's graph keeps."""
        self._head_bytes = 0
        with SavedBytes(self.stage.modules, inputs) if unit.aside is None else unit.aside as saved:
            result = self._compute(key, unit, inputs)
        tokens = self.arguments.rows[unit.microbatch][unit.segment]
        if unit.kept is None:  # else R saves
            unit.saved_bytes = saved.bytes
            self.saved_bytes += saved.bytes
            self.saved_tokens += tokens
        if self._head_bytes:
            self.head_bytes += self._head_bytes
            self.head_tokens += tokens
        self._note_saved(self._head_bytes)
        return result

    def _note_saved(self, more: int = 0) -> None:
        live = sum(other.saved_bytes + other.kept_bytes for other in self.units.values())
        self.peak_saved_bytes = max(self.peak_saved_bytes, live + more)

    def _inputs(self, key: int, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        if self.embedding is not None:
            unit.leaves = (self.embedding.embedded(unit.microbatch, unit.segment, received),)
            return unit.leaves
        if received is not None:
            tensors, requires_grad = received[0]
        elif self.previous is not None:
            tensors, requires_grad = self.previous.units[key].take_handed(), None
        else:
            assert self.arguments.inputs is not None
            return self.arguments.inputs[unit.microbatch][unit.segment]
        leaves = []
        for i, tensor in enumerate(tensors):
            leaf = tensor.detach()
            if self.training and (tensor.requires_grad if requires_grad is None else requires_grad[i]):
                leaf.requires_grad_()
            leaves.append(leaf)
        unit.leaves = tuple(leaves)
        return unit.leaves

    def _finish_middle(self, unit: LiveUnit, output: Any) -> tuple[Tensor, ...] | None:
        outputs = output if isinstance(output, tuple) else (output,)
        self._check_outputs(outputs, self.arguments.rows[unit.microbatch][unit.segment])
        outputs = tuple([o if o.is_contiguous() else o.contiguous() for o in outputs])
        if unit.kept is not None:
            outputs = tuple([unit.kept.with_gradient(o, unit.carried_in) for o in outputs])
        elif self.training:
            # Only the edge is kept, so that the storage goes once the output is sent.
            unit.roots = tuple([get_gradient_edge(o) if o.requires_grad else None for o in outputs])
            unit.seeds = None
        if unit.is_again:  # F has handed over the same
            return None
        if self.following is None:
            return outputs
        unit.handed = outputs
        return None

    def _check_outputs(self, outputs: tuple[Any, ...], length: int) -> None:
        known, device, index = self._output_spec.get(length), self.stage.device, self.stage.index
        if known is not None and len(known) == len(outputs):
            for o, (shape, dtype) in zip(outputs, known, strict=True):
                if (
                    not isinstance(o, Tensor)
                    or o.shape != shape
                    or o.dtype != dtype
                    or o.device != device
                    or o.layout != torch.strided
                ):
                    break
            else:
                return
        for o in outputs:
            if not isinstance(o, Tensor):
                raise TypeError(
                    f"a stage must return a tensor or a tuple of tensors, stage {index} returned {type(o).__name__}"
                )
            if hasattr(o, "to_local"):
                raise TypeError(f"stage {index} returned a DTensor; return its to_local() instead")
            if o.device != device or o.layout != torch.strided:
                raise ValueError(
                    f"stage {index} returned a {o.layout} tensor on {o.device}; "
                    f"its outputs must be strided tensors on {device}"
                )
        spec = [(o.shape, o.dtype) for o in outputs]
        if known is not None:
            raise ValueError(
                f"stage {index} returned {_spec_text(spec)} for a segment of {length} tokens, and "
                f"{_spec_text(known)} for another of the same length in this step"
            )
        self._output_spec[length] = spec

    def _finish_hidden(self, unit: LiveUnit, output: Any) -> tuple[Tensor, ...] | None:
        """The output of the last stage goes to every shard of the vocabulary, with what these need beside it."""
        assert self.shards is not None
        if self.arguments.keep_outputs and not unit.is_again:
            unit.output = _detached(output)
        outputs = self._finish_middle(unit, output)
        if outputs is None:
            return None
        m, s, targets = unit.microbatch, unit.segment, self.arguments.targets
        if targets is None and self.training:
            raise ValueError("a training step needs loss_fn and target on the rank of the last stage")
        seed = self._seeds[m][s] if self._seeds is not None else None
        return self.shards.message(m, s, outputs, None if targets is None else targets[m][s], seed)

    def _finish_last(self, key: int, unit: LiveUnit, output: Any) -> None:
        if self.arguments.keep_outputs and not unit.is_again:
            unit.output = _detached(output)
        if self.arguments.targets is None:
            if self.training:
                raise ValueError("a training step needs loss_fn and target on the rank of the last stage")
            return
        m, s, shares = unit.microbatch, unit.segment, self.arguments.shares
        share = 1.0 if shares is None else shares[m][s]
        if share == 0.0 and not self.divides:
            # No counted target: a mean over none is NaN. B still runs, for later segments' dK and dV.
            if self.training and unit.kept is None:
                unit.roots = tuple([o for o in tensors_of(output) if o.requires_grad])
                unit.seeds = tuple([torch.zeros_like(o) for o in unit.roots])
            return
        target = self.arguments.targets[m][s]
        if self.stage.loss_is_head and self.training:
            if not unit.is_again:
                with torch.enable_grad():
                    self._run_head(key, unit, output, target)
            elif unit.seeds:  # the head has run, and left the gradient of its input
                unit.roots = (get_gradient_edge(output),) if output.requires_grad else ()
                unit.seeds = unit.seeds if unit.roots else ()
            return
        loss = self._loss(unit, output, target)
        if not unit.is_again:
            unit.loss = loss.detach()
        if self.training and loss.requires_grad:
            unit.roots = (loss,)
            unit.seeds = (self._seed(unit, loss),)

    def _run_head(self, key: int, unit: LiveUnit, output: Any, target: Any) -> None:
        """Forward and backward of the head at once: one segment's logits are alive, only the hidden gradient stays."""
        if not isinstance(output, Tensor):
            raise TypeError(
                f"loss_fn holds parameters, so the last stage must return one tensor, got {type(output).__name__}"
            )
        if unit.kept is not None:
            output = unit.kept.with_gradient(output, unit.carried_in)
        hidden = output.detach().requires_grad_(output.requires_grad)
        parallel = self.stage.head_parallel
        head = SavedBytes(self.stage.modules, (hidden,)) if self._measures else nullcontext()
        with head, parallel.forward() if parallel is not None else nullcontext():
            loss = self._loss(unit, hidden, target)
        if isinstance(head, SavedBytes):
            self._head_bytes = head.bytes
        unit.loss = loss.detach()
        if not loss.requires_grad:
            return
        around = parallel.backward(key == self._last_head, (loss,)) if parallel is not None else nullcontext()
        with around, torch.autocast(self.stage.device.type, enabled=False):
            torch.autograd.backward(loss, self._seed(unit, loss))
        if hidden.grad is not None:
            unit.roots = () if unit.kept is not None else (get_gradient_edge(output),)
            unit.seeds = (hidden.grad,)

    def _loss(self, unit: LiveUnit, output: Any, target: Any) -> Tensor:
        assert self.stage.loss_fn is not None
        look = self.arguments.loss_look
        is_looked_at = look is not None and look.microbatch == unit.microbatch and not unit.is_again
        left = self._left_by_loss(unit) if is_looked_at else None
        loss: Any = self.stage.loss_fn(output, target, **self.arguments.loss_kwargs)
        divisor = None
        if isinstance(loss, tuple):
            loss, divisor = split_loss(loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, got {what}")
        records = self.training and torch.is_grad_enabled()  # not in F of a unit that is recomputed
        if records and not loss.requires_grad and any(o.requires_grad for o in tensors_of(output)):
            raise ValueError("loss_fn returned a loss that does not require grad, its input does")
        if divisor is not None or self.divides is not False:
            self._note_divisor(unit, divisor)
        if is_looked_at and not self.divides and not any(isinstance(p, Fsdp) for p in self.stage.wrappers):
            self._loss_arguments = output, target, left != self._left_by_loss(unit)
        return loss

    def _note_divisor(self, unit: LiveUnit, divisor: Tensor | float | None) -> None:
        if self.divides is None:
            self.divides = divisor is not None
        if self.divides != (divisor is not None):
            raise ValueError(
                "loss_fn returned a sum and its divisor for some segments, and one loss for others: let it return the "
                "same for all"
            )
        if divisor is not None:
            self.divisors[self._first_cells[unit.microbatch] + unit.segment] = divisor

    def _left_by_loss(self, unit: LiveUnit) -> Any:
        """What a loss may change beside what it returns: carried state, or gradients by a backward of its own."""
        parameters = (p for module in self.stage.modules for p in module.parameters() if p.grad is not None)
        gradients = [(id(p.grad), p.grad._version) for p in parameters]  # type: ignore[union-attr]
        return unit.carried_in, len(unit.carried_out or ()), gradients

    def _look_at_loss(self, unit: LiveUnit) -> None:
        """Tells of a divisor that is not what the engine counts; outside of all that looks at the stage's own pass."""
        assert self._loss_arguments is not None
        (output, target, leaves), self._loss_arguments = self._loss_arguments, None
        look, loss_fn = self.arguments.loss_look, self.stage.loss_fn
        assert look is not None and loss_fn is not None
        if isinstance(loss_fn, nn.Module):  # DDP would count its forward
            loss_fn = without_wrapper(loss_fn)
        if not look.take(output, target, self.arguments.rows[unit.microbatch][unit.segment], leaves):
            return
        enter(None)
        found = look.difference(loss_fn, self.arguments.loss_kwargs, self.stage.device)
        enter(unit)
        if found:
            self.stage.looks.judge([Finding(WEIGHTING, f"stage {self.stage.index}, the loss", found)], attends=True)

    def _seed(self, unit: LiveUnit, loss: Tensor) -> Tensor:
        if self.divides:
            return torch.full_like(loss, self.arguments.sum_seed)
        assert self._seeds is not None
        seed = self._seeds[unit.microbatch][unit.segment]
        if seed.dtype != loss.dtype:  # the first loss of the step tells the dtype
            self._seeds = [[seed.to(loss.dtype) for seed in row] for row in self._seeds]
            seed = self._seeds[unit.microbatch][unit.segment]
        return seed if seed.shape == loss.shape else seed.reshape(loss.shape)

    def recompute(self, m: int, s: int, received: Received) -> None:
        """R(m.s): what F would have saved, from what it kept. The loss and the outputs are F's."""
        key = self._first_cells[m] + s
        unit = self.units[key]
        kept, unit.kept = unit.kept, None
        left, unit.carried_out = unit.carried_out or {}, None  # the same states are left again, with their graphs
        unit.auxiliary = None
        unit.is_again = True
        enter(unit)
        run = self._measured if self._measures else self._compute
        with kept.again():
            run(key, unit, kept.inputs)
        unit.is_again = False
        again: dict[int, Tensor] = unit.carried_out or {}
        if left.keys() != again.keys():
            raise RuntimeError(
                f"stage {self.stage.index} has carried out states {sorted(again)} in R, and {sorted(left)} in F: "
                "a stage that is recomputed must do the same both times"
            )

    # -- moves -----------------------------------------------------------------------------------------------------

    def move_out(self, m: int, s: int, received: Received) -> None:
        """O(m.s): what F has saved begins to go to the tier."""
        aside, tier, number = self._moving(m, s)
        aside.out(tier, number)
        self.moved_bytes += aside.moved_bytes

    def wait_until_out(self, m: int, s: int, received: Received) -> None:
        """A(m.s): it has gone."""
        aside, tier, number = self._moving(m, s)
        aside.gone(tier, number)
        unit = self.units[self._first_cells[m] + s]
        unit.saved_bytes -= aside.moved_bytes if self._measures else 0

    def load(self, m: int, s: int, received: Received) -> None:
        """L(m.s): there is room for it, and it begins to come back."""
        aside, tier, number = self._moving(m, s)
        aside.load(tier, number)
        if self._measures:
            self.units[self._first_cells[m] + s].saved_bytes += aside.moved_bytes
            self._note_saved()

    def _moving(self, m: int, s: int) -> tuple[Aside, Tier, int]:
        key, tier = self._first_cells[m] + s, self.stage.tier
        assert tier is not None
        return self.units[key].aside, tier, tier.number(self.stage.index, key)

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, m: int, s: int, received: Received) -> tuple[Tensor | None, ...] | None:
        """B(m.s); or I(m.s), where the unit has a tape.

        Returns the gradients of the stage's inputs, None from the first stage.
        """
        key = self._first_cells[m] + s
        unit = self.units[key]
        unit.forward = False
        self.has_auxiliary |= unit.auxiliary is not None
        roots, seeds = start_of(unit, self._output_gradients(key, unit, received), self.arguments.auxiliary_seeds[m][s])
        enter(unit)
        if unit.aside is not None:
            unit.aside.back()
        if unit.tape is not None:
            unit.tape.is_open = True
        if roots and self._parallel is None:
            torch.autograd.backward(roots, seeds)
        elif roots:
            assert self._parallel is not None
            with self._parallel.backward(self.stage.last_gradients == ("B", key), unit.outputs):
                torch.autograd.backward(roots, seeds)
        carry_back(unit)
        gradients = None if self.stage.is_first and self.embedding is None else input_gradients(unit)
        if unit.tape is not None and self._measures:
            self._measure_tape(unit, received)
        unit.forget()
        if self.embedding is not None and gradients is not None:
            self.embedding.hand(m, s, gradients[0])
        if self.previous is None:
            return gradients
        unit.handed = gradients
        return None

    def weight(self, m: int, s: int, received: Received) -> None:
        """W(m.s): the gradients of weights that I left."""
        key = self._first_cells[m] + s
        unit = self.units[key]
        tape, unit.tape = unit.tape, None
        if tape is None:
            raise RuntimeError("W finds nothing that I has left: it has run already")
        is_last = self.stage.last_gradients == ("W", key)
        is_left = bool(tape.products)  # else it has all run in waits
        tape.run()
        unit.kept_bytes = unit.gradient_bytes = 0
        if self._parallel is not None and (is_left or is_last):
            self._parallel.after_weight(is_last)

    def fill(self, m: int, s: int) -> bool:
        """Runs one product of W(m.s), whose I has run; returns whether any is left."""
        tape = self.units[self._first_cells[m] + s].tape
        is_left = tape is not None and tape.run_next()
        if self._parallel is not None and not is_left:
            self._parallel.after_weight(is_last=False)  # the last one has its place in the order, alike on all replicas
        return is_left

    def _measure_tape(self, unit: LiveUnit, received: Received) -> None:
        """What is in places of receivers does not count."""
        given = [*unit.leaves, *(received[0][0] if received is not None else ())]
        places = {t.untyped_storage().data_ptr() for t in given if isinstance(t, Tensor)}
        kept, gradients = unit.tape.held_bytes(places)
        unit.kept_bytes = min(kept, unit.saved_bytes)  # what a recomputation made, F has not saved
        unit.gradient_bytes = gradients + kept - unit.kept_bytes
        self.kept_bytes += unit.kept_bytes
        self.gradient_bytes += unit.gradient_bytes
        self.kept_tokens += self.arguments.rows[unit.microbatch][unit.segment]
        pending = sum(other.gradient_bytes for other in self.units.values())
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, pending)

    def _output_gradients(self, key: int, unit: LiveUnit, received: Received) -> Sequence[Tensor | None]:
        """Gradients of the unit's outputs, from the next stage; none where the unit has seeds of its own."""
        if unit.seeds is not None:
            return ()
        if self.shards is not None:
            return self.shards.hidden_gradient(unit.microbatch, unit.segment, received)
        if received is not None:  # hooks get tensors of their own, so that what they keep is seen
            return [None if gradient is None else gradient.detach() for gradient in received[0][0]]
        assert self.following is not None
        return self.following.units[key].take_handed()


_NO_KWARGS: Mapping[str, Any] = {}


def _detached(output: Any) -> Any:
    """A copy that nothing else reads: an output may alias its input's place."""
    if isinstance(output, Tensor):
        return output.detach().clone()
    if isinstance(output, (tuple, list)):
        return tuple(_detached(o) for o in output)
    if isinstance(output, dict):
        return {key: _detached(o) for key, o in output.items()}
    return output


def _spec_text(spec: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in spec)
