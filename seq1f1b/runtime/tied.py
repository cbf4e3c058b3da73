"""Parameters that several stages hold as copies of one, as an embedding that is also the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.runtime.gradients import StepGradients
from seq1f1b.transport import RankGroup

__all__: list[str] = []


class TiedParameters:
    """Sums the gradients of each parameter's copies over the ranks, so that equal copies stay equal.

    A stage says by its attribute ``tied_parameters``, a dict of parameters by name, which of its parameters have copies
    on other stages: copies have the name in common.
    """

    def __init__(self, modules: Sequence[nn.Module], group: RankGroup) -> None:
        self._group = group
        self._met_in = -1  # the group's epoch in which the ranks told each other what they hold
        self._holders: dict[str, list[int]] = {}
        self._own: dict[str, list[nn.Parameter]] = {}
        for module in modules:
            parts = module.modules() if isinstance(module, nn.Module) else ()
            for part in parts:  # the stage may be wrapped, as by DDP
                for name, parameter in getattr(part, "tied_parameters", {}).items():
                    if hasattr(parameter, "to_local"):
                        raise ValueError(
                            f"tied parameter {name!r} is a DTensor: tied parameters must lie whole on a rank"
                        )
                    self._own.setdefault(name, []).append(parameter)

    def meet(self) -> None:
        """Finds the copies, and makes them equal. Collective over the pipeline, within a step or between two.

        A rank may fail when others have not yet left; so all meet again after a failed step.
        """
        if self._met_in == self._group.epoch:
            return
        described = {
            name: (tuple(own[0].shape), str(own[0].dtype), "trained" if own[0].requires_grad else "frozen")
            for name, own in self._own.items()
        }
        everyones: list[dict[str, Any]] = self._group.all_gather_object(described)
        self._holders = {
            name: [rank for rank, theirs in enumerate(everyones) if name in theirs]
            for name in sorted(set().union(*everyones))
        }
        for name, holders in self._holders.items():
            kinds = {everyones[rank][name] for rank in holders}
            if len(kinds) > 1:
                raise ValueError(f"tied parameter {name!r} differs between ranks {holders}: {sorted(kinds)}")
        self._make_equal()
        self._met_in = self._group.epoch

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Copies take the values of the first one, as DistributedDataParallel's replicas do."""
        for name, own in self._own.items():
            first, others = self._holders[name][0], self._holders[name][1:]
            if first == self._group.rank:
                self._group.exchange(own[0].detach(), others, [], own[0])
            else:
                own[0].copy_(self._group.exchange(None, [], [first], own[0].detach())[first])
            for copy in own[1:]:
                copy.copy_(own[0])

    def parameters(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return [copy for own in self._own.values() for copy in own]

    @torch.no_grad()
    def end_step(self, gradients: StepGradients) -> None:
        """Sums what the step added to the copies' gradients, in rank order, so that all get the same bits."""
        if not self._holders:
            return
        sums = {name: _sum([gradients.added(copy) for copy in own]) for name, own in self._own.items()}
        # Also where the ranks meet: from here on nobody fails the step with a transfer under way.
        everyones = self._group.all_gather_object([name for name, added in sums.items() if added is not None])
        for name, holders in self._holders.items():
            if name not in self._own:
                continue
            own = self._own[name]
            having = [rank for rank in holders if name in everyones[rank]]
            others = [rank for rank in holders if rank != self._group.rank]
            like = own[0].new_empty((), dtype=gradients.dtype_of(own[0])).expand_as(own[0])
            parts = self._group.exchange(sums[name], others, [rank for rank in having if rank in others], like)
            total = None
            for rank in having:
                total = parts[rank].clone() if total is None else total.add_(parts[rank])
            for copy in own:
                if total is not None:
                    gradients.replace(copy, total)

    def counted_elsewhere(self) -> set[int]:
        """Ids of the copies on this rank that a norm over all ranks must leave out."""
        return {
            id(copy)
            for name, own in self._own.items()
            for i, copy in enumerate(own)
            if i > 0 or self._holders[name][0] != self._group.rank
        }


def _sum(added: Sequence[Tensor | None]) -> Tensor | None:
    """Sum of the gradients of copies on one rank."""
    gradients = [gradient for gradient in added if gradient is not None]
    return None if not gradients else gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
