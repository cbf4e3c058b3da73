"""Stages under DDP and FSDP2: gradients are reduced once per step, in the last backward or after the last W.

DDP and FSDP2 reduce in every backward if left alone. DDP would then go wrong, because forwards and backwards
alternate.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__: list[str] = []


class Ddp:
    """Handler of a module under DDP, for an engine's life: around passes of units."""

    def __init__(self, module: DistributedDataParallel) -> None:
        if module.static_graph:
            raise ValueError("DDP with static_graph=True takes one backward per forward: a pipeline step has many")
        self._module = module
        self._is_reducing = False  # from the begin of a reduction to its end

    @property
    def divisor(self) -> float:
        """The number by which DDP divides the sum of the replicas' gradients."""
        return dist.get_world_size(self._module.process_group)

    def sum(self, value: float, device: torch.device) -> float:
        """Sums a number over the replicas. Collective."""
        return _sum(value, device, [self._module.process_group])

    def begin_step(self) -> None:
        self._module.require_backward_grad_sync = False  # as its no_sync() does

    @contextmanager
    def backward(self, is_last: bool, outputs: Sequence[Tensor]) -> Iterator[None]:
        """Surrounds a backward.

        Args:
            outputs: outputs of the module, in which the reducer finds unused parameters.
        """
        if is_last:
            self._is_reducing = self._module.require_backward_grad_sync = True
            self._module.reducer.prepare_for_backward(list(outputs))
        yield
        self._is_reducing = False

    def after_weight(self, is_last: bool) -> None:
        """Starts the reduction after the last W: a backward that adds zeros tells DDP of each parameter."""
        if not is_last:
            return
        parameters = [p for p in self._module.parameters() if p.requires_grad and p.grad is not None]
        outputs = [p.view_as(p) for p in parameters]
        with self.backward(True, outputs), without_hooks(parameters):
            torch.autograd.backward(outputs, [torch.zeros_like(p) for p in parameters])

    def end_step(self) -> None:
        """Ends the step; after a failed reduction gives DDP new buckets, as after unpickling.

        DDP would refuse each forward, and the reduction under way still writes to the old buckets.
        """
        ddp: Any = self._module
        if self._is_reducing:
            parameters, are_sparse = ddp._build_params_for_reducer()
            names = ddp._build_debug_param_to_name_mapping(parameters)
            ddp._ddp_init_helper(parameters, are_sparse, names, static_graph=False)
            for hook, state in ddp._comm_hooks:
                dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
        self._is_reducing, ddp.require_backward_grad_sync = False, True


@contextmanager
def without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Takes Python hooks off the parameters within the context: the hooks have seen the gradients already."""
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
    """Handler of a module under FSDP2, or of a module with submodules under FSDP2, for an engine's life.

    Parameters stay whole from their first use in a step to the last backward, or to the end of an evaluation. So all
    replicas gather equally often, even if a loss that holds the head is not called for segments without targets.
    """

    def __init__(self, module: Any) -> None:
        self._module, self.roots = module, _outermost_sharded(module)

    @property
    def divisor(self) -> float:
        """The number by which FSDP2 divides the sum of the replicas' gradients; torch has only a setter."""
        factors = (group.gradient_divide_factor for group in self._groups())
        return float(next(factors, None) or self.replicas)

    @property
    def replicas(self) -> int:
        return next((int(group.mesh_info.mesh.size()) for group in self._groups()), 1)

    def sum(self, value: float, device: torch.device) -> float:
        """Sums a number over the replicas. Collective."""
        groups = next((group.mesh_info.mesh.get_all_groups() for group in self._groups()), ())
        return _sum(value, device, groups)

    def begin_step(self) -> None:
        self._shard()
        for group in self._groups():
            group.post_forward_mesh_info = None  # as set_reshard_after_forward(False), which not all kinds have
        self._set_last(False)

    @contextmanager
    def backward(self, is_last: bool, outputs: Sequence[Tensor]) -> Iterator[None]:
        if is_last:
            self._set_last(True)
            # Every parameter is whole. FSDP2 would gather again what this backward has resharded, for forwards that it
            # has seen and no backward followed: F of units that are recomputed.
            for group in self._groups():
                group._post_forward_indices.clear()
        yield
        if is_last and self.roots != [self._module]:  # submodules that this unit has not used reduce as well
            self._reduce()

    def after_weight(self, is_last: bool) -> None:
        """Reduces gradients after the last W; else moves gradients to the reduction's dtype, as after a backward.

        Without the move, the products of several W would be summed in the parameters' dtype.
        """
        if is_last:
            self._set_last(True)
            self._reduce()
            return
        for parameter in (p for group in self._groups() for p in group.fsdp_params if p.reduce_dtype is not None):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

    def end_step(self) -> None:
        """Shards parameters left whole by an evaluation or a failed step, and drops gradients that were not reduced."""
        self._shard()
        for parameter in (p for group in self._groups() for p in group.fsdp_params if torch.is_grad_enabled()):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        self._set_last(True)

    def _reduce(self) -> None:
        for group in self._groups():
            group.post_backward()
        for root in self.roots:
            root._get_fsdp_state()._root_post_backward_final_callback()

    def _shard(self) -> None:
        """Shards all parameters after a failure: FSDP2 would go on in a forward or backward that did not end, and in a
        forward ``reshard()`` does nothing.
        """
        sharded: Iterator[Any] = filter(_is_sharded, self._module.modules())
        for module in sharded:
            state = module._get_fsdp_state()
            for group in _parameter_groups(state) if state._is_root is not None else ():  # else no forward has begun
                group.finalize_backward()
                group.comm_ctx.post_forward_order.clear()
            for each in (state, *_parameter_groups(state)):
                each._training_state = type(each._training_state).IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            state._modules_to_run_forward.clear()
            module.reshard()

    def _groups(self) -> Iterator[Any]:
        sharded: Iterator[Any] = filter(_is_sharded, self._module.modules())
        return (group for module in sharded for group in _parameter_groups(module._get_fsdp_state()))

    def _set_last(self, is_last: bool) -> None:
        for root in self.roots:
            root.set_is_last_backward(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_requires_gradient_sync(is_last)


def _sum(value: float, device: torch.device, groups: Sequence[Any]) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return float(total)


def _parameter_groups(state: Any) -> list[Any]:
    """Returns a wrapped module's groups of parameters; torch versions keep one or several."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(type(module), "_get_fsdp_state")  # of the type: some wrappers pass attributes of their module on


def _outermost_sharded(module: nn.Module) -> list[Any]:
    if _is_sharded(module):
        return [module]
    return [part for child in module.children() for part in _outermost_sharded(child)]


def data_parallel(place: str, module: nn.Module) -> Ddp | Fsdp | None:
    """Returns the handler of a module; None if nothing in the module is under DDP or FSDP2.

    Refuses DDP on parts of the module, and warns of trained parameters outside of submodules under FSDP2.
    """
    if isinstance(module, DistributedDataParallel):
        return Ddp(module)
    inner = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    if any(dist.get_world_size(part.process_group) > 1 for part in inner):
        raise ValueError(
            f"{place} holds DDP inside, which takes one backward per forward: a pipeline step has many. Wrap the whole "
            "stage, after torch.compile"
        )
    parallel = Fsdp(module)
    if not parallel.roots:
        return None
    held = {id(p) for root in parallel.roots for p in root.parameters()}
    names = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if parallel.replicas > 1 and names:
        warnings.warn(
            f"{place}: parts of it are under FSDP2, and {len(names)} parameters, as {names[0]!r}, are not: the "
            f"{parallel.replicas} replicas train these apart unless the script reduces their gradients. Call "
            "fully_shard on the whole module, too, after its parts",
            stacklevel=4,  # where the engine is made
        )
    return parallel


def is_reduced(module: nn.Module) -> bool:
    """Returns whether DDP, FSDP or FSDP2 was applied to the module, as a wrapper or in place.

    Hooks of DDP and FSDP, held by C++, wait for autograd to accumulate gradients.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return isinstance(module, (DistributedDataParallel, *wrappers)) or any(
        str(name).startswith("__composable_api") for name in vars(module)
    )


def without_wrapper(module: Any) -> Any:
    """Returns the user's module: DDP wraps it in a module, FSDP2 does not."""
    return module.module if isinstance(module, DistributedDataParallel) else module
