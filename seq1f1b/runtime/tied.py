"""Parameters that several stages hold as copies of one, as an embedding that is also the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.runtime.equal_parameters import look_at_equal, unlisted
from seq1f1b.runtime.gradients import StepGradients
from seq1f1b.transport import RankGroup

__all__: list[str] = []


class TiedParameters:
    """Sums the gradients of each parameter's copies over the ranks, so that equal copies stay equal.

    A stage says by its attribute ``tied_parameters``, a dict of parameters by name, which of its parameters have copies
    on other stages: copies have the name in common. Parameters that are bit-equal and not listed are named in a warning
    where they are likely one parameter of the model.

    Args:
        modules: of this rank, each with its place in words.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], group: RankGroup) -> None:
        self._group, self._modules = group, modules
        is_alone = group.size == 1 and len(modules) == 1
        # Pairs that are bit-equal and not listed, once the ranks have met.
        self.equal: list[str] | None = [] if is_alone else None
        self._met_in = -1  # the group's epoch in which the ranks told each other what they hold
        self._holders: dict[str, list[int]] = {}
        self._own: dict[str, list[nn.Parameter]] = {}
        for _, module in modules:
            parts = module.modules() if isinstance(module, nn.Module) else ()
            for part in parts:  # the stage may be wrapped, as by DDP
                for name, parameter in getattr(part, "tied_parameters", {}).items():
                    if hasattr(parameter, "to_local"):
                        raise ValueError(
                            f"tied parameter {name!r} is a DTensor: tied parameters must lie whole on a rank"
                        )
                    own = self._own.setdefault(name, [])
                    if not any(parameter is copy for copy in own):  # one parameter at both ends of one stage
                        own.append(parameter)

    def meet(self, beside: Callable[[], Any] | None = None) -> list[Any]:
        """Finds the copies, and makes them equal. Collective over the pipeline, within a step or between two.

        A rank may fail when others have not yet left; so all meet again after a failed step.

        Args:
            beside: makes what is told to the other ranks, too.
        Returns:
            what all ranks told so; nothing where they have met before.
        """
        if self._met_in == self._group.epoch:
            return []
        described = {
            name: (tuple(own[0].shape), str(own[0].dtype), "trained" if own[0].requires_grad else "frozen")
            for name, own in self._own.items()
        }
        listed = {id(copy) for copy in self.parameters()}
        others = unlisted(self._modules, listed) if self.equal is None else []
        found = self._group.all_gather_object((described, others, None if beside is None else beside()))
        everyones: list[dict[str, Any]] = [theirs for theirs, _, _ in found]
        if self.equal is None:
            self.equal = look_at_equal([theirs for _, theirs, _ in found], self._group.rank)
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
        return [told for *_, told in found]

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
