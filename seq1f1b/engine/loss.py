"""The loss of the last stage in one step: a loss for each segment, from which the backwards start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from seq1f1b.above import above
from seq1f1b.attention.unit import LiveUnit, enter
from seq1f1b.documents.rows import Path, by_paths
from seq1f1b.engine.features import Received
from seq1f1b.engine.findings import Finding
from seq1f1b.engine.model_state import RandomState
from seq1f1b.engine.replicas import Fsdp, without_wrapper
from seq1f1b.engine.stage import StageStep, detached
from seq1f1b.engine.weighting import Weighting
from seq1f1b.nested import tensors_of

__all__: list[str] = []


class ToLoss:
    """Sink of the last stage: calls ``loss_fn`` on outputs.

    Mean losses are not called for segments without counted targets: a mean over nothing is NaN. Losses with a divisor
    are called for each segment, and so is a loss of unknown kind, before its first result. In a step without targets a
    loss is called once, to see whether the loss returns one value per token.
    """

    def __init__(self, step: StageStep, weighting: Weighting) -> None:
        batch = self._batch = step.batch
        self._step, self._stage, self._weighting, self._targets = step, step.stage, weighting, batch.targets
        self._loss_fn: Any = step.stage.loss_fn
        self._loss_kwargs = batch.leaves.replace(dict(batch.arguments.loss_kwargs or {}))
        self._loss_look: Any = None
        if batch.targets is not None and batch.is_new:
            self._loss_look = above("look at a loss")(weighting)
        self.divides = batch.arguments.divides  # whether the loss comes with a divisor; None before the first result
        self.divisors: dict[int, Tensor | float] = {}  # by cell
        self.constants: dict[int, Tensor] = {}  # by cell, sums without gradient: 0 as their divisors, as a read checks
        self.losses: dict[int, Tensor] = {}  # by cell
        self.values: dict[int, Tensor] = {}  # by cell, losses of tokens, if `loss_fn` returns one value per token
        self._seeds: tuple[Tensor, ...] = ()  # by cell, in the dtype of the losses
        self._looked_at: Any = None  # arguments of a loss that is looked at
        is_reduced = self._stage.head_parallel is not None  # under DDP or FSDP2 each forward needs a backward
        self._is_unseen = not any(weighting.shares) and not is_reduced
        self._passed_over = ""  # in words: the answer to a segment without targets, if no divisor

    def take(self, unit: LiveUnit, output: Any) -> None:
        if self._batch.arguments.return_outputs and not unit.is_again:
            unit.output = detached(output)
        if self._targets is None:
            return
        needs_counts = unit.is_again or (self.divides is False and not self._is_unseen)
        is_called = self.divides or self._counts(unit.cell) or not needs_counts
        if is_called and self._stage.loss_is_head and unit.training:
            with torch.enable_grad():
                self._run_head(unit, output, self._targets[unit.cell])
        elif is_called:
            loss = self._loss(unit, output, self._targets[unit.cell])
            if loss is not None and not unit.is_again:
                self.losses[unit.cell] = loss.detach()
            if unit.training and loss is not None and loss.requires_grad:
                if self.divides:
                    self._find_leaves(loss, output)
                unit.roots = (loss,)
                unit.seeds = (self._seed(unit, loss),)
        if unit.training and unit.kept is None and not unit.roots:  # B must still run, for later segments' dK and dV
            unit.roots = tuple([o for o in tensors_of(output) if o.requires_grad])
            unit.seeds = tuple([torch.zeros_like(o) for o in unit.roots])

    def _counts(self, cell: int) -> bool:
        return self._weighting.shares[cell] != 0.0

    def gradients(self, unit: LiveUnit, received: Received) -> Sequence[Tensor | None]:
        return unit.seeds

    def _run_head(self, unit: LiveUnit, output: Any, target: Any) -> None:
        """Runs the head's forward and backward at once: logits of one segment are alive, the hidden gradient stays."""
        if unit.is_again:  # the head has run, and left the gradient of its input
            unit.roots = (get_gradient_edge(output),) if unit.seeds and output.requires_grad else ()
            return
        if not isinstance(output, Tensor):
            raise TypeError(f"loss_fn has parameters: the last stage must return a tensor, got {type(output).__name__}")
        if unit.kept is not None:
            output = unit.kept.with_gradient(output, unit.carried_in)
        hidden = output.detach().requires_grad_(output.requires_grad)
        parallel, measure = self._stage.head_parallel, self._step.measure
        measured = measure.around_head(hidden) if measure is not None else nullcontext()
        with measured:
            loss = self._loss(unit, hidden, target)
        if loss is not None:
            self.losses[unit.cell] = loss.detach()
        if loss is None or not loss.requires_grad:
            return
        if self.divides:
            self._find_leaves(loss, hidden)
        is_last = unit.cell == self._last_head
        around = parallel.backward(is_last, (loss,)) if parallel is not None else nullcontext()
        with around, torch.autocast(self._stage.device.type, enabled=False):
            torch.autograd.backward(loss, self._seed(unit, loss))
        if hidden.grad is not None:
            unit.roots = () if unit.kept is not None else (get_gradient_edge(output),)
            unit.seeds = (hidden.grad,)

    def _find_leaves(self, loss: Tensor, output: Any) -> None:
        """Sets apart gradients of autograd leaves that no module holds, for example a layer in the loss's closure."""
        own, gradients = tensors_of(output), self._batch.gradients
        assert gradients is not None
        seen: set[Any] = {None, *(o.grad_fn for o in own)}
        nodes: set[Any] = {loss.grad_fn}
        while nodes := nodes - seen:
            seen |= nodes
            for leaf in [node.variable for node in nodes if hasattr(node, "variable")]:
                if id(leaf) not in self._known and not any(leaf is o for o in own):
                    gradients.set_apart(leaf)
            nodes = {before for node in nodes for before, _ in node.next_functions}

    @cached_property
    def _known(self) -> set[int]:
        """Ids of the modules' parameters; under FSDP2 of whole parameters, once the modules have run."""
        return {id(p) for module in self._stage.modules for p in module.parameters()}

    @cached_property
    def _last_head(self) -> int:
        """The last cell with a backward of the head; known once the first loss has returned."""
        return next(cell for cell in reversed(self._step.order.forwards) if self.divides or self._counts(cell))

    def _loss(self, unit: LiveUnit, output: Any, target: Any) -> Tensor | None:
        """Returns the loss of a segment; None for a mean over no target."""
        if not self.divides and not self._counts(unit.cell):
            return self._loss_without_targets(unit, output, target)
        look = self._loss_look
        is_looked_at = look is not None and look.microbatch == unit.microbatch and unit.segment in look.sizes
        is_looked_at &= not unit.is_again
        left = self._left_by_loss(unit) if is_looked_at else None
        every = self._batch.paths
        if every and len(every[unit.cell]) > 1:
            result = self._path_by_path(unit, every[unit.cell], output, target)
        else:
            result = self._loss_fn(output, target, **self._loss_kwargs)
        loss = self._learn(unit, output, result)
        if is_looked_at and not any(isinstance(p, Fsdp) for p in self._stage.wrappers):
            self._looked_at = output, target, left != self._left_by_loss(unit)
        return loss

    def _path_by_path(self, unit: LiveUnit, paths: Sequence[Path], output: Any, target: Any) -> Any:
        """Returns the loss of a tree that runs path by path: joins the losses of each path's own tokens."""
        results, count = list[Any](), self._weighting.count

        def alone(output: Any, target: Any) -> Any:
            loss = self._loss_fn(output, target, **self._loss_kwargs)
            results.append((loss, 1.0 if count is None else count(target)))
            return results[-1][0]

        own = [Path(path.tokens[path.own], torch.arange(len(path.own), device="cpu")) for path in paths]
        joined = by_paths(alone, own, self._batch.seq_dim, (output, target), {}, lambda name: False)
        if isinstance(joined, tuple):
            return tuple(map(sum, zip(*(pair for pair, _ in results), strict=True)))
        total = 1.0 if count is None else sum(number for _, number in results)
        is_of_tokens = self._is_of_tokens(unit, joined)
        return joined if is_of_tokens else sum(loss * (number / total) for loss, number in results if number)

    def _loss_without_targets(self, unit: LiveUnit, output: Any, target: Any) -> Tensor | None:
        """Calls the loss on a segment without targets: returns the sum if a divisor comes, else undoes the call."""
        state, carried = RandomState(self._stage.device), unit.carried_out and dict(unit.carried_out)
        auxiliary = unit.auxiliary and list(unit.auxiliary)
        place = f"micro-batch {unit.microbatch}, segment {unit.segment}"
        try:
            result: Any = self._loss_fn(output, target, **self._loss_kwargs)
        except Exception as error:  # many means have no value without targets
            self._passed_over = f"raised {type(error).__name__} ({error}) for {place}, which has no target"
        else:
            if isinstance(result, tuple):
                return self._learn(unit, output, result)
            if isinstance(result, Tensor):
                self.divides = self._is_unseen = False
                if self._is_of_tokens(unit, result):
                    self.values[unit.cell] = torch.zeros_like(result)
            self._passed_over = f"returned {_shown(result)} alone for {place}, which has no target"
        state.restore()
        unit.carried_out, unit.auxiliary = carried, auxiliary
        return None

    def _learn(self, unit: LiveUnit, output: Any, result: Any) -> Tensor:
        loss, divisor = _split_loss(result) if isinstance(result, tuple) else (result, None)
        if divisor is None and self._is_of_tokens(unit, loss):
            self.values[unit.cell] = loss.detach()
            loss = loss.sum() / self._weighting.counts[unit.cell]  # over the number of targets of the mean
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must return a scalar tensor, or one value per token, got {_shown(loss)}")
        records = unit.training and torch.is_grad_enabled()  # not in F of a unit that is recomputed
        if records and not loss.requires_grad and any(o.requires_grad for o in tensors_of(output)):
            if divisor is None or self._stage.head_parallel is not None:  # its reduction waits for the last backward
                raise ValueError("loss_fn returned a loss that does not require grad, its input does")
            self.constants[unit.cell] = loss
        if self.divides is None:
            self.divides = divisor is not None
        if self.divides != (divisor is not None):
            raise ValueError(
                "loss_fn returned a sum and its divisor for some segments or steps, and one loss for others"
            )
        if divisor is not None and self._passed_over:
            raise ValueError(
                f"loss_fn {self._passed_over}, and returned a sum and its divisor for another segment: let it return "
                "both for all, also for those without targets"
            )
        if divisor is not None:
            self.divisors[unit.cell] = divisor
        return loss

    def _is_of_tokens(self, unit: LiveUnit, loss: Any) -> bool:
        dim, length = self._batch.seq_dim, self._step.lengths[unit.cell]
        return isinstance(loss, Tensor) and loss.dim() == dim + 1 and loss.size(dim) == length

    def _left_by_loss(self, unit: LiveUnit) -> Any:
        """Returns state to compare before and after a loss: carried tensors, and versions of gradients."""
        parameters = (p for module in self._stage.modules for p in module.parameters() if p.grad is not None)
        gradients = [(id(p.grad), p.grad._version) for p in parameters]  # type: ignore[union-attr]
        return unit.carried_in, len(unit.carried_out or ()), gradients

    def end(self, unit: LiveUnit) -> None:
        """Checks, outside of the stage's own unit, whether weighted losses of segments add up to the whole loss."""
        if self._looked_at is None:
            return
        (output, target, leaves), self._looked_at = self._looked_at, None
        look, loss_fn, stage = self._loss_look, self._loss_fn, self._stage
        if isinstance(loss_fn, nn.Module):  # DDP would count this forward
            loss_fn = without_wrapper(loss_fn)
        if not look.take(output, target, unit.segment, leaves):
            return
        enter(None)
        found = look.difference(loss_fn, self._loss_kwargs, stage.device)
        enter(unit)
        if found:
            stage.findings.judge([Finding(look.cause, f"stage {stage.index}, the loss", found)])

    def _seed(self, unit: LiveUnit, loss: Tensor) -> Tensor:
        if self.divides:
            return torch.full_like(loss, self._weighting.sum_seed)
        if not self._seeds or self._seeds[0].dtype != loss.dtype:  # the first loss of the step tells the dtype
            self._seeds = self._weighting.seeds.to(loss.dtype).unbind()
        seed = self._seeds[unit.cell]
        return seed if seed.shape == loss.shape else seed.reshape(loss.shape)


def _split_loss(result: tuple[Any, ...]) -> tuple[Any, Tensor | float]:
    if len(result) != 2:
        raise ValueError(f"loss_fn returned {len(result)} values, must be a scalar loss, or its sum and its divisor")
    total, divisor = result
    is_number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
    if not is_number and not (isinstance(divisor, Tensor) and divisor.numel() == 1):
        what = tuple(divisor.shape) if isinstance(divisor, Tensor) else type(divisor).__name__
        raise ValueError(f"the divisor that loss_fn returned beside its sum must be one number, got {what}")
    if isinstance(divisor, Tensor) and divisor.requires_grad:
        raise ValueError(
            "the divisor that loss_fn returned beside its sum requires grad, and the sum is divided once all segments "
            "have gone back: return divisor.detach() if no gradient is to flow through it"
        )
    return total, divisor


def _shown(result: Any) -> str:
    return str(tuple(result.shape)) if isinstance(result, Tensor) else type(result).__name__
