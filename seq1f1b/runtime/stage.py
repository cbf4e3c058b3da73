"""One stage's part of a step: what happens at F and at B. The executor says when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from seq1f1b.ops.context import LiveUnit, set_process_current, set_thread_current
from seq1f1b.runtime.data_parallel import Fsdp, data_parallel
from seq1f1b.runtime.measure import SavedBytes, is_compiled
from seq1f1b.schedule import Unit

__all__: list[str] = []


Received: TypeAlias = "tuple[tuple[Sequence[Any], Sequence[bool]], ...] | None"
"""What came for a unit from other ranks: of each message, in the order in which the program waits for them, its tensors
(None for a gradient that is none) and which of them require grad. None where no message comes."""


class StageRuntime:
    """Runs a stage's module on one unit at a time.

    Every segment has a graph of its own: its inputs are leaves, keys and values pass between segments through the
    cache, other state through ``carry``. B is ``torch.autograd.backward`` on that graph, so hooks on parameters fire.
    """

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        index: int,
        *,
        num_stages: int,
        num_segments: int,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        device: torch.device,
        thread_scope: bool,
        order: Sequence[Unit],
    ) -> None:
        self.module = module
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.loss_fn = loss_fn if self.is_last else None
        # A loss that holds parameters is the model's head: its logits live only inside F.
        self.loss_is_head = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters())
        self.previous: StageRuntime | None = None  # neighbours on the same rank: handed over without a transfer
        self.following: StageRuntime | None = None
        self._num_segments = num_segments
        self._device = device
        self._set_current = set_thread_current if thread_scope else set_process_current
        own = [(u.kind, u.microbatch * num_segments + u.segment) for u in order if u.stage == index]
        self._forwards = [key for kind, key in own if kind == "F"]
        self._last_backward = next((key for kind, key in reversed(own) if kind == "B"), -1)
        self.parallel = data_parallel(module)
        self.head_parallel = data_parallel(self.loss_fn)
        self.begin_step(training=False)

    @property
    def gradient_divisor(self) -> float | None:
        """What the sum of the gradients of this stage's replicas is divided by; None if nothing here reduces them."""
        parallel = self.parallel or self.head_parallel
        return None if parallel is None else parallel.divisor

    def begin_step(
        self,
        *,
        training: bool,
        sizes: Sequence[int] = (),
        inputs: list[list[tuple[Any, ...]]] | None = None,
        kwargs: list[list[dict[str, Any]]] | None = None,
        targets: list[list[Any]] | None = None,
        seeds: list[list[Tensor]] | None = None,
        shares: list[list[float]] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        auxiliary_seed: list[float] | None = None,
        keep_outputs: bool = False,
        measure_activations: bool = False,
    ) -> None:
        """Arguments of the step by [micro-batch][segment]; forgets what a failed step left behind."""
        self.training, self.sizes = training, sizes
        self.inputs, self.kwargs, self.targets = inputs, kwargs, targets
        self.seeds, self.shares, self.auxiliary_seed = seeds, shares, auxiliary_seed
        self.loss_kwargs = loss_kwargs or {}
        self.keep_outputs = keep_outputs
        self.live: dict[int, LiveUnit] = {}
        self.handed: dict[int, tuple[Any, ...]] = {}  # outputs or gradients from a neighbour on this rank
        self.carried_back: dict[int, dict[int, Tensor]] = {}  # leaves of segment s + 1, for B of segment s
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.output_spec: dict[int, list[tuple[torch.Size, torch.dtype]]] = {}  # by segment length
        sharded = isinstance(self.parallel, Fsdp) or isinstance(
            self.head_parallel, Fsdp
        )  # their graphs keep parameters
        self.measure_activations = measure_activations and not sharded and not any(map(is_compiled, self._modules()))
        self.saved_bytes = self.saved_tokens = self.peak_saved_bytes = 0  # of all units, where measured
        self._head_bytes = 0  # of the graph of a unit's head, which is gone at the end of its F
        self._last_head = -1
        if self.head_parallel is not None and shares is not None:
            counted = [share != 0.0 for row in shares for share in row]
            self._last_head = next((key for key in reversed(self._forwards) if counted[key]), -1)
        for parallel in (self.parallel, self.head_parallel):
            if parallel is not None:
                parallel.begin_step()

    def end_step(self) -> None:
        for parallel in (self.parallel, self.head_parallel):
            if parallel is not None:
                parallel.end_step()

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, m: int, s: int, received: Received) -> tuple[Tensor, ...] | None:
        """F(m.s). Returns what crosses to the next stage, None from the last one."""
        length = self.sizes[s]
        key = m * self._num_segments + s
        unit = LiveUnit(self.index, m, s, self.training, self.live.get(key - 1) if s else None)
        arguments = self._arguments(key, m, s, received, unit)
        self.live[key] = unit
        self._set_current(unit)
        try:
            if self.measure_activations:
                result = self._measured(key, m, s, length, arguments, unit)
            else:
                result = self._compute(key, m, s, length, arguments, unit)
        finally:
            self._set_current(None)
        if not self.training:
            self._forget_in_eval(key, s, unit)
        return result

    def _compute(
        self, key: int, m: int, s: int, length: int, arguments: tuple[Any, ...], unit: LiveUnit
    ) -> tuple[Tensor, ...] | None:
        kwargs = None if self.kwargs is None else self.kwargs[m][s]
        if self.parallel is None:
            output = self.module(*arguments, **kwargs) if kwargs else self.module(*arguments)
        else:
            with self.parallel.forward():
                output = self.module(*arguments, **(kwargs or {}))
            if self.training and key == self._last_backward:
                unit.outputs = tuple([o for o in _tensors(output) if o.requires_grad])
        if not self.is_last:
            return self._finish_middle(key, length, output, unit)
        self._finish_last(key, m, s, output, unit)
        return None

    def _measured(
        self, key: int, m: int, s: int, length: int, arguments: tuple[Any, ...], unit: LiveUnit
    ) -> tuple[Tensor, ...] | None:
        """The same, counting the bytes that the unit's graph keeps."""
        self._head_bytes = 0
        with SavedBytes(self._modules(), arguments) as saved:
            result = self._compute(key, m, s, length, arguments, unit)
        unit.saved_bytes = saved.bytes
        self.saved_bytes += saved.bytes
        self.saved_tokens += length
        live = sum(other.saved_bytes for other in self.live.values())
        self.peak_saved_bytes = max(self.peak_saved_bytes, live + self._head_bytes)
        return result

    def _modules(self) -> list[nn.Module]:
        return [module for module in (self.module, self.loss_fn) if isinstance(module, nn.Module)]

    def _arguments(self, key: int, m: int, s: int, received: Received, unit: LiveUnit) -> tuple[Any, ...]:
        if received is not None:
            tensors, requires_grad = received[0]
        elif self.is_first:
            assert self.inputs is not None
            return self.inputs[m][s]
        else:
            tensors, requires_grad = self.handed.pop(key), None
        leaves = []
        for i, tensor in enumerate(tensors):
            leaf = tensor.detach()
            if self.training and (tensor.requires_grad if requires_grad is None else requires_grad[i]):
                leaf.requires_grad_()
            leaves.append(leaf)
        unit.leaves = tuple(leaves)
        return unit.leaves

    def _finish_middle(self, key: int, length: int, output: Any, unit: LiveUnit) -> tuple[Tensor, ...] | None:
        outputs = output if isinstance(output, tuple) else (output,)
        self._check_outputs(outputs, length)
        outputs = tuple([o if o.is_contiguous() else o.contiguous() for o in outputs])
        if self.training:
            # Only the edge is kept, so that the storage goes once the output is sent.
            unit.roots = tuple([get_gradient_edge(o) if o.requires_grad else None for o in outputs])
            unit.seeds = None
        if self.following is None:
            return outputs
        self.following.handed[key] = outputs
        return None

    def _check_outputs(self, outputs: tuple[Any, ...], length: int) -> None:
        known = self.output_spec.get(length)
        if known is not None and len(known) == len(outputs):
            for o, (shape, dtype) in zip(outputs, known, strict=True):
                if (
                    not isinstance(o, Tensor)
                    or o.shape != shape
                    or o.dtype != dtype
                    or o.device != self._device
                    or o.layout != torch.strided
                ):
                    break
            else:
                return
        for o in outputs:
            if not isinstance(o, Tensor):
                raise TypeError(
                    f"a stage must return a tensor or a tuple of tensors, "
                    f"stage {self.index} returned {type(o).__name__}"
                )
            if hasattr(o, "to_local"):
                raise TypeError(f"stage {self.index} returned a DTensor; return its to_local() instead")
            if o.device != self._device or o.layout != torch.strided:
                raise ValueError(
                    f"stage {self.index} returned a {o.layout} tensor on {o.device}; "
                    f"its outputs must be strided tensors on {self._device}"
                )
        spec = [(o.shape, o.dtype) for o in outputs]
        if known is not None:
            raise ValueError(
                f"stage {self.index} returned {_spec_text(spec)} for a segment of {length} tokens, and "
                f"{_spec_text(known)} for another of the same length in this step"
            )
        self.output_spec[length] = spec

    def _finish_last(self, key: int, m: int, s: int, output: Any, unit: LiveUnit) -> None:
        if self.keep_outputs:
            self.outputs[key] = _detached(output)
        if self.targets is None:
            if self.training:
                raise ValueError("a training step needs loss_fn and target on the rank of the last stage")
            return
        assert self.loss_fn is not None
        share = 1.0 if self.shares is None else self.shares[m][s]
        if share == 0.0:
            # No counted target: a mean over none is NaN. B still runs, for later segments' dK and dV.
            if self.training:
                unit.roots = tuple([o for o in _tensors(output) if o.requires_grad])
                unit.seeds = tuple([torch.zeros_like(o) for o in unit.roots])
            return
        target = self.targets[m][s]
        if self.loss_is_head and self.training:
            self._run_head(key, m, s, output, target, unit)
            return
        loss = self._loss(output, target)
        self.losses[key] = loss.detach()
        if self.training and loss.requires_grad:
            unit.roots = (loss,)
            unit.seeds = (self._seed(m, s, loss),)

    def _run_head(self, key: int, m: int, s: int, output: Any, target: Any, unit: LiveUnit) -> None:
        """Forward and backward of the head at once: one segment's logits are alive, only the hidden gradient stays."""
        if not isinstance(output, Tensor):
            raise TypeError(
                f"loss_fn holds parameters, so the last stage must return one tensor, got {type(output).__name__}"
            )
        hidden = output.detach().requires_grad_(output.requires_grad)
        parallel = self.head_parallel
        head = SavedBytes(self._modules(), (hidden,)) if self.measure_activations else nullcontext()
        with head, parallel.forward() if parallel is not None else nullcontext():
            loss = self._loss(hidden, target)
        if isinstance(head, SavedBytes):
            self._head_bytes = head.bytes
        self.losses[key] = loss.detach()
        if not loss.requires_grad:
            return
        around = parallel.backward(key == self._last_head, (loss,)) if parallel is not None else nullcontext()
        with around, torch.autocast(self._device.type, enabled=False):
            torch.autograd.backward(loss, self._seed(m, s, loss))
        if hidden.grad is not None:
            unit.roots = (get_gradient_edge(output),)
            unit.seeds = (hidden.grad,)

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self.loss_fn is not None
        loss = self.loss_fn(output, target, **self.loss_kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, got {what}")
        if self.training and not loss.requires_grad and any(o.requires_grad for o in _tensors(output)):
            raise ValueError("loss_fn returned a loss that does not require grad, its input does")
        return loss

    def _seed(self, m: int, s: int, loss: Tensor) -> Tensor:
        assert self.seeds is not None
        seed = self.seeds[m][s]
        if seed.dtype != loss.dtype:  # the first loss of the step tells the dtype
            self.seeds = [[seed.to(loss.dtype) for seed in row] for row in self.seeds]
            seed = self.seeds[m][s]
        return seed if seed.shape == loss.shape else seed.reshape(loss.shape)

    def _forget_in_eval(self, key: int, s: int, unit: LiveUnit) -> None:
        unit.previous = None
        self.live.pop(key - 1, None)
        if s == self._num_segments - 1:
            self.live.pop(key, None)

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, m: int, s: int, received: Received) -> tuple[Tensor | None, ...] | None:
        """B(m.s). Returns the gradients of the stage's inputs, None from the first one."""
        key = m * self._num_segments + s
        unit = self.live.pop(key)
        unit.forward = False
        roots, seeds = self._roots(key, m, s, unit, received)
        if roots:
            self._set_current(unit)
            try:
                if self.parallel is None:
                    torch.autograd.backward(roots, seeds)
                else:
                    with self.parallel.backward(key == self._last_backward, unit.outputs):
                        torch.autograd.backward(roots, seeds)
            finally:
                self._set_current(None)
        unit.roots = unit.outputs = ()
        unit.previous = None
        if unit.carried_in is not None and s:
            self.carried_back[key - 1] = unit.carried_in
        if self.is_first:
            return None
        gradients = tuple([_contiguous_grad(leaf) for leaf in unit.leaves])
        unit.leaves = ()
        if self.previous is None:
            return gradients
        self.previous.handed[key] = gradients
        return None

    def _roots(
        self, key: int, m: int, s: int, unit: LiveUnit, received: Received
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        roots, seeds = unit.roots, unit.seeds
        if seeds is None:  # a middle stage: gradients come from the next one
            gradients = received[0][0] if received is not None else self.handed.pop(key)
            seeds = tuple(gradients)  # not the cached views themselves: roots are added below
            if None in roots or any(g is None for g in gradients):
                pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if r is not None and g is not None]
                roots, seeds = tuple([r for r, _ in pairs]), tuple([g for _, g in pairs])
        if unit.auxiliary is not None:
            assert self.auxiliary_seed is not None
            roots += tuple(unit.auxiliary)
            seeds += tuple([torch.full_like(a, self.auxiliary_seed[s]) for a in unit.auxiliary])
        if unit.carried_out is not None and key in self.carried_back:
            for name, leaf in self.carried_back.pop(key).items():
                if leaf.grad is not None:
                    roots += (get_gradient_edge(unit.carried_out[name]),)
                    seeds += (leaf.grad,)
        return roots, seeds


def _contiguous_grad(leaf: Tensor) -> Tensor | None:
    gradient = leaf.grad
    if gradient is None or gradient.is_contiguous():
        return gradient
    return gradient.contiguous()


def _tensors(output: Any) -> list[Tensor]:
    """Tensors of a loss's input, which may be nested."""
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


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
