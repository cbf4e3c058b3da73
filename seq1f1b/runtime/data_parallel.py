"""Stages under DDP and FSDP2: their gradients are reduced once per step, in the last backward or after the last W.

Each would reduce in every backward; and DDP, whose forward and backward alternate in a pipeline, would do it wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__: list[str] = []


class Ddp:
    """Surrounds the passes of a stage under DDP, for the life of an engine."""

    def __init__(self, module: DistributedDataParallel) -> None:
        if module.static_graph:
            raise ValueError("DDP with static_graph=True takes one backward per forward: a pipeline step has many")
        self._module = module

    @property
    def divisor(self) -> float:
        """The number by which DDP divides the sum of the replicas' gradients."""
        return dist.get_world_size(self._module.process_group)

    def sum(self, value: float, device: torch.device) -> float:
        """The sum of a number over the replicas. Collective."""
        return _sum(value, device, [self._module.process_group])

    def begin_step(self) -> None:
        pass

    def forward(self) -> AbstractContextManager[Any]:
        return self._module.no_sync()

    def backward(self, is_last: bool, outputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Returns a context to run a backward in.

        Args:
            outputs: the module's, for the last backward; the reducer finds unused parameters by them.
        """
        if not is_last:
            return self._module.no_sync()
        self._module.reducer.prepare_for_backward(list(outputs))
        return nullcontext()

    def after_weight(self, is_last: bool) -> None:
        """After the last W all gradients are there: a backward that adds nothing tells DDP of each parameter."""
        if not is_last:
            return
        parameters = [p for p in self._module.parameters() if p.requires_grad and p.grad is not None]
        roots = [p.view_as(p) for p in parameters]
        self._module.reducer.prepare_for_backward(roots)
        with without_hooks(parameters):
            torch.autograd.backward(roots, [torch.zeros_like(p) for p in parameters])

    def end_step(self) -> None:
        pass


@contextmanager
def without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, a backward calls no Python hook on the parameters: each has seen its gradients already."""
    registered = [hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]
    taken = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(registered, taken, strict=True):
            hooks.update(own)


class Fsdp:
    """Surrounds the passes of a stage under FSDP2.

    Parameters stay whole from their first use in a step to the last backward, and in an evaluation to its end. So all
    replicas gather equally often, even if a loss that holds the head is not called for segments without targets.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._is_reduced = True  # False from a training step's first F to the reduction of its gradients

    @property
    def divisor(self) -> float:
        """The number by which FSDP2 divides the sum of the replicas' gradients. Torch has only a setter for it."""
        for group in self._groups():
            mesh = group.mesh_info
            replicas = mesh.shard_mesh_size * getattr(mesh, "replicate_mesh_size", 1)
            return float(group.gradient_divide_factor or replicas)
        return 1.0

    def sum(self, value: float, device: torch.device) -> float:
        """The sum of a number over the replicas. Collective."""
        for group in self._groups():
            meshes = ("shard_process_group", "replicate_process_group")
            return _sum(
                value, device, [getattr(group.mesh_info, name) for name in meshes if hasattr(group.mesh_info, name)]
            )
        return value

    def begin_step(self) -> None:
        if not self._is_reduced:
            self._forget()
        self._module.set_reshard_after_forward(False)
        self._set_last(False)

    def forward(self) -> AbstractContextManager[Any]:
        if torch.is_grad_enabled():  # not in an evaluation, nor in F of a unit that is recomputed
            self._is_reduced = False
        return nullcontext()

    @contextmanager
    def backward(self, is_last: bool, outputs: Sequence[Tensor]) -> Iterator[None]:
        if is_last:
            self._set_last(True)
            # Every parameter is whole. FSDP2 would gather again what this backward has resharded, for forwards that it
            # has seen and no backward followed: F of units that are recomputed.
            for group in self._groups():
                group._post_forward_indices.clear()
        yield
        self._is_reduced = is_last

    def after_weight(self, is_last: bool) -> None:
        """Does FSDP2's work after a backward: the last W reduces, others move gradients to the reduction's dtype.

        Otherwise the products of several W would be summed in the parameters' dtype.
        """
        if is_last:
            self._set_last(True)
            for group in self._groups():
                group.post_backward()
            self._module._get_fsdp_state()._root_post_backward_final_callback()
            self._is_reduced = True
            return
        for parameter in (p for group in self._groups() for p in group.fsdp_params if p.reduce_dtype is not None):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

    def end_step(self) -> None:
        """After an evaluation, or a step that failed, whole parameters are left."""
        for module in self._module.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def _forget(self) -> None:
        """After a training step that failed: FSDP2 would go on with its gradients, and in its backward."""
        if hasattr(self._module, "reset_iter_state"):
            self._module.reset_iter_state()
        else:  # older torch
            state = self._module._get_fsdp_state()
            state._state_ctx.iter_forward_root = None
            self._module.set_is_last_backward(True)
            self._module.set_requires_gradient_sync(False)
            state._root_post_backward_final_callback()
        for parameter in (p for group in self._groups() for p in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        self._is_reduced = True

    def _groups(self) -> Iterator[Any]:
        """Groups of parameters that are sharded and reduced together."""
        for module in self._module.modules():
            if hasattr(module, "_get_fsdp_state"):
                yield from _parameter_groups(module._get_fsdp_state())

    def _set_last(self, is_last: bool) -> None:
        self._module.set_is_last_backward(is_last)
        self._module.set_reshard_after_backward(is_last)
        self._module.set_requires_gradient_sync(is_last)


def _sum(value: float, device: torch.device, groups: Sequence[Any]) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return float(total)


def _parameter_groups(state: Any) -> list[Any]:
    """Some torch versions keep one group of parameters per wrapped module, others several."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def data_parallel(module: Any) -> Ddp | Fsdp | None:
    """The part of this file that a module needs; None for a module that is under neither DDP nor FSDP2."""
    if isinstance(module, DistributedDataParallel):
        return Ddp(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever wrapped the module has imported it
    return Fsdp(module) if fsdp is not None and isinstance(module, fsdp.FSDPModule) else None


def is_reduced(module: nn.Module) -> bool:
    """Whether DDP, FSDP or FSDP2 was applied to the module, as a wrapper or in place: their hooks, which C++ holds,
    wait for autograd to accumulate gradients."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return isinstance(module, (DistributedDataParallel, *wrappers)) or any(
        str(name).startswith("__composable_api") for name in vars(module)
    )


def without_wrapper(module: nn.Module) -> nn.Module:
    """The user's module: DDP puts its own around it, FSDP2 does not."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, nn.Module)
    return inner
