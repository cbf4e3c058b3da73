"""Parameters that several stages hold as copies of one, as an embedding that is also the head."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.runtime.gradients import StepGradients
from seq1f1b.runtime.recompute import digest
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
        unlisted = self._unlisted() if self.equal is None else []
        found = self._group.all_gather_object((described, unlisted, None if beside is None else beside()))
        everyones: list[dict[str, Any]] = [theirs for theirs, _, _ in found]
        if self.equal is None:
            self._look_at_equal([_Unlisted(rank, *entry) for rank, each in enumerate(found) for entry in each[1]])
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

    def _unlisted(self) -> list[tuple[Any, ...]]:
        """The parameters that are not listed and whose values are not a constant's, for a comparison: see _Unlisted."""
        listed = {id(copy) for own in self._own.values() for copy in own}
        found: list[tuple[Any, ...]] = []
        for place, module in self._modules:
            parts = module.named_modules() if isinstance(module, nn.Module) else ()
            order = 0
            for prefix, part in parts:
                for name, parameter in part.named_parameters(recurse=False):
                    is_plain = type(parameter) is nn.Parameter and parameter.is_floating_point()
                    if id(parameter) in listed or not is_plain or parameter.is_meta:
                        continue
                    listed.add(id(parameter))
                    step = max(1, parameter.numel() // _SAMPLE)
                    values = parameter.detach().reshape(-1)[::step].contiguous().view(torch.uint8)
                    if len(values.unique()) < _FEWEST:
                        continue
                    kind = f"{type(part).__module__}.{type(part).__qualname__}"
                    values_of = (tuple(parameter.shape), str(parameter.dtype), *digest([values])[0][2:])
                    text = f"{prefix}.{name}".lstrip(".")
                    found.append((place, text, kind, order, parameter.requires_grad, values_of))
                    order += 1
        return found

    def _look_at_equal(self, everyones: Sequence[_Unlisted]) -> None:
        """Finds the pairs, and warns, on the rank of the first one, of those that are likely one parameter."""
        self.equal = []
        pairs = _equal_pairs(everyones)
        stages = Counter((first.rank, first.place, second.rank, second.place) for first, second in pairs)
        for first, second in pairs:
            if len(first.values[0]) < 2:
                continue
            both = f"{first.name} of {first.place} and {second.name} of {second.place}"
            self.equal.append(both)
            # Layers that were made from one seed, or copied, are equal and not tied: they are of one type, and either
            # more of their parameters are equal, or these are the first ones of their stages.
            is_alone = stages[first.rank, first.place, second.rank, second.place] == 1
            is_tie = first.kind != second.kind or (is_alone and first.order + second.order > 0)
            if is_tie and first.rank == self._group.rank:
                warnings.warn(
                    f"{both} are bit-equal: if the model ties them, list both in the dict attribute tied_parameters of "
                    "their stages, else their gradients are not summed and they come apart (docs/tutorial.md, Tied "
                    "embeddings)",
                    stacklevel=2,
                )

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


_SAMPLE, _FEWEST = 256, 8  # values of a parameter that are compared, and different bytes among them


@dataclass(frozen=True)
class _Unlisted:
    """
    Attributes:
        kind: type of the module that holds it.
        order: how many parameters of its stage come before it.
        values: its shape, its dtype and sums over a sample of its bytes.
    """

    rank: int
    place: str
    name: str
    kind: str
    order: int
    is_trained: bool
    values: Any


def _equal_pairs(everyones: Iterable[_Unlisted]) -> list[tuple[_Unlisted, _Unlisted]]:
    """Parameters of different stages that hold the same values, and are not both frozen."""
    alike: dict[Any, list[_Unlisted]] = {}
    for parameter in everyones:
        alike.setdefault(parameter.values, []).append(parameter)
    return [
        (first, second)
        for several in alike.values()
        for first, second in combinations(several, 2)
        if (first.rank, first.place) != (second.rank, second.place) and (first.is_trained or second.is_trained)
    ]


def _sum(added: Sequence[Tensor | None]) -> Tensor | None:
    """Sum of the gradients of copies on one rank."""
    gradients = [gradient for gradient in added if gradient is not None]
    return None if not gradients else gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
