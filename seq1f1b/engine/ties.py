"""Tied parameters: copies of one parameter on several stages, for example of an embedding that is also the head.

The copies are made when a model is cut. A step sums the copies' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from seq1f1b.engine.gradients import StepGradients, dense
from seq1f1b.transport import RankGroup
from seq1f1b.transport.agreement import Disagreement

__all__: list[str] = []

# Unlike optimizers drive copies apart in their first step, perhaps after many steps of the engine.
_COMPARED_IN, _COMPARED_EVERY = (2, 4, 8, 16, 32, 64), 100  # steps
_LIST = "tied_parameters"
_PAGE = "docs/how-to/tied-weights.md"

Described: TypeAlias = "dict[str, list[list[Any]]]"
"""Each copy of a rank for the other ranks, by the names of the ties: as text, what must be alike, how many hooks it
has, and its id, by which a rank tells that it holds another one now."""


class TiedParameters:
    """Tied parameters of a rank: sums the copies' gradients over the ranks, so that equal copies stay equal.

    A stage's attribute ``tied_parameters``, a dict by name, lists parameters with copies on other stages. A tie is a
    name in these lists: its copies are one parameter of the unsplit model. Exchanges go through ties in sorted order.

    Args:
        modules: modules of the rank, each with its place in words.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], group: RankGroup) -> None:
        self._group, self._modules = group, modules
        self._met_in = -1  # the group's epoch of the last meeting
        self.has_lists = False  # a module lists ties
        # By a module's id and a tie: the listed parameter, and its paths in the stage.
        self._known: dict[tuple[int, str], tuple[Any, list[str]]] = {}
        self._copies: dict[str, list[nn.Parameter]] = {}  # this rank's distinct copies, by tie
        self._described: Described = {}  # `_copies`, as other ranks get it
        self._everyones: list[Described] = []  # `_described` of all ranks, as last taken over
        self._holders: dict[str, list[int]] = {}
        self._steps = self._compared = 0  # training steps: all, and up to the last comparison
        self._is_apart = False
        self._read()

    # -- this rank's copies --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Reads the modules' lists. Raises ValueError if a list is wrong, or has a parameter that no module has."""
        # By tie and id, each copy with its name and place; and what `_known` becomes.
        found, listings = dict[str, dict[int, tuple[str, Any]]](), dict[tuple[int, str], tuple[Any, list[str]]]()
        registered = {id(parameter) for _, root in self._modules for parameter in root.parameters()}
        for place, root in self._modules:
            named: dict[int, list[str]] = {}
            for path, parameter in root.named_parameters(remove_duplicate=False):
                named.setdefault(id(parameter), []).append(path)
            for part, listed in ((part, _listed(part)) for part in root.modules()):
                self.has_lists |= listed is not None
                for name, parameter in list((listed or {}).items()):
                    paths = named.get(id(parameter), [])
                    known, before = self._known.get((id(part), name), (None, paths))
                    if known is parameter and len(paths) < len(before):  # the stage has a new one instead
                        parameter, paths = held(root, {name: before}, place)[name], before
                        if isinstance(listed, (MutableMapping, nn.ParameterDict)):
                            listed[name] = parameter  # so that readers of the list see the module's
                    _check(name, parameter, place, registered)
                    listings[id(part), name] = parameter, paths
                    text = f"{(paths[0] if paths else name)!r} of {place}"
                    found.setdefault(name, {}).setdefault(id(parameter), (text, parameter))  # perhaps listed twice
        self._copies = {name: [copy for _, copy in own.values()] for name, own in found.items()}
        self._described = {
            name: [[text, _kind(copy, name, found), num_hooks(copy), key] for key, (text, copy) in own.items()]
            for name, own in found.items()
        }
        self._known = listings

    def parameters(self) -> list[nn.Parameter]:
        """Returns the rank's copies."""
        return [copy for own in self._copies.values() for copy in own]

    def names(self) -> dict[int, str]:
        """Returns the names of the rank's copies in the whole model, by id of the copy."""
        if self.has_lists:
            self._read()
        return {id(copy): name for name in sorted(self._copies, reverse=True) for copy in self._copies[name]}

    def counted_elsewhere(self) -> set[int]:
        """Returns the ids of the rank's copies to leave out of a norm over all ranks."""
        return {
            id(copy)
            for name, own in self._held()
            for i, copy in enumerate(own)
            if i > 0 or self._holders[name][0] != self._group.rank
        }

    # -- the ranks meet ------------------------------------------------------------------------------------------------

    def meet(self, beside: Callable[[], Any] | None = None) -> list[Any]:
        """Finds the copies of all ranks, and makes copies equal; after the first training step compares copies instead.

        Collective over the pipeline, within a step or between steps. The ranks meet once, and again after a failed
        step, because a rank may fail before all ranks have left the meeting.

        Args:
            beside: makes a value for all ranks.
        Returns:
            the values of all ranks; an empty list if the ranks have met before.
        """
        if self._met_in == self._group.epoch:
            if self.has_lists:  # modules may hold or list other parameters now
                self._read()
                if late := self._copies.keys() - self._holders.keys():
                    raise ValueError(f"tied parameters {sorted(late)} were listed after the first step")
            return []
        self._read()
        mine = self._described, self._steps > 0, None if beside is None else beside()
        found = self._group.all_gather_object(mine)
        self._take([described for described, *_ in found])
        if any(has_stepped for _, has_stepped, _ in found):
            self._compare()
        else:  # copies take the values of the first copy, as DistributedDataParallel's replicas do
            with torch.no_grad():
                for name, own in self._held():
                    first = self._of_first(name, own[0])
                    for copy in own:
                        if copy is not first:
                            copy.copy_(first)
        self._met_in = self._group.epoch
        return [told for *_, told in found]

    def _take(self, everyones: list[Described]) -> None:
        """Takes over the copies of each rank. Raises on every rank if copies are unlike, or have hooks."""
        self._everyones = []  # after an error the next step takes over anew
        holders = {
            name: [rank for rank, theirs in enumerate(everyones) if name in theirs]
            for name in sorted(set().union(*everyones))
        }
        for name, ranks in holders.items():
            copies = [(f"{text} on rank {rank}", *of) for rank in ranks for text, *of in everyones[rank][name]]
            if len({kind for _, kind, *_ in copies}) > 1:
                raise Disagreement(
                    f"tied parameter {name!r} differs between ranks {ranks}: "
                    f"{'; '.join(f'{text} is {kind}' for text, kind, *_ in copies)}. Copies must be alike"
                )
            hooks = [f"{text} has {num}" for text, _, num, _ in copies if num]
            if hooks and len(copies) > 1:
                raise Disagreement(_hooks_refused(name, hooks[0]))
        self._holders, self._everyones = holders, everyones

    def _held(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        for name in self._holders:
            if name in self._copies:
                yield name, self._copies[name]

    def _of_first(self, name: str, own: nn.Parameter) -> Tensor:
        """Returns the values of a tie's first copy. Collective over the tie's ranks."""
        first, *others = self._holders[name]
        if first == self._group.rank:
            self._group.exchange(own.detach(), others, [], own)
            return own
        return self._group.exchange(None, [], [first], own.detach())[first]

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def end_step(self, gradients: StepGradients) -> None:
        """Ends a step: sums the copies' gradients in rank order, so that all copies get equal bits.

        Compares the copies now and then, and after a rank's copies were replaced. Raises on every rank if copies have
        come apart.
        """
        if not self._holders:
            return
        self._steps += 1
        is_due = self._is_apart or self._steps in _COMPARED_IN or self._steps % _COMPARED_EVERY == 0
        sums = {name: _sum([gradients.added(copy) for copy in own]) for name, own in self._held()}
        dtypes = {name: str(added.dtype).removeprefix("torch.") for name, added in sums.items() if added is not None}
        # All ranks wait here: afterwards no rank fails the step with a transfer under way.
        found = self._group.all_gather_object((dtypes, self._described, self._bytes() if is_due else None))
        described = [theirs for _, theirs, _ in found]
        if described != self._everyones:
            self._take(described)
            self._compare()
        elif is_due:
            self._compare([sums_of_bytes for *_, sums_of_bytes in found])
        for name, own in self._held():
            having = [rank for rank in self._holders[name] if name in found[rank][0]]
            if not having:
                continue
            dtype = reduce(torch.promote_types, (getattr(torch, found[rank][0][name]) for rank in having))
            others = [rank for rank in self._holders[name] if rank != self._group.rank]
            like = own[0].new_empty((), dtype=dtype).expand_as(own[0])
            mine = None if (added := sums[name]) is None else added.to(dtype)
            parts = self._group.exchange(mine, others, [rank for rank in having if rank in others], like)
            total = parts[having[0]].clone()
            for rank in having[1:]:
                total.add_(parts[rank])
            for copy in own:
                gradients.replace(copy, total)

    # -- comparing -----------------------------------------------------------------------------------------------------

    def compare(self, *, always: bool = False) -> None:
        """Raises, on every rank, if copies have come apart in the training steps since the last comparison. Collective.

        Does nothing after a failed step: a checkpoint may be loaded then.

        Args:
            always: compares even if no step has run, or one has failed.
        """
        if not always and (not self._holders or self._compared == self._steps or self._group.has_failed):
            return
        with nullcontext() if always else self._group.telling():  # a list may be wrong on this rank alone
            self.meet()
        if self._holders:
            self._compare()

    def _bytes(self) -> dict[str, list[int]]:
        return {name: [_sum_of_bytes(copy) for copy in own] for name, own in self._held()}

    @torch.no_grad()
    def _compare(self, everyones: Sequence[Any] | None = None) -> None:
        """Compares copies by sums over their bytes.

        Args:
            everyones: sums of all ranks, by rank; None: gathers the sums.
        """
        if everyones is None:
            everyones = self._group.all_gather_object(self._bytes())
        self._compared = self._steps
        sums = {name: [s for rank in ranks for s in everyones[rank][name]] for name, ranks in self._holders.items()}
        apart = [name for name, each in sums.items() if any(one != each[0] for one in each)]
        self._is_apart = bool(apart)
        if not apart:
            return
        name, mine = apart[0], list[float]()
        if name in self._copies:
            own = self._copies[name]
            first = self._of_first(name, own[0])
            mine = [float((copy - first).abs().max()) for copy in own]
        distances = [distance for theirs in self._group.all_gather_object(mine) for distance in theirs]
        texts = [f"{text} on rank {rank}" for rank in self._holders[name] for text, *_ in self._everyones[rank][name]]
        other = next(i for i, each in enumerate(sums[name]) if each != sums[name][0])
        more = f"; {len(apart) - 1} more ties have come apart" if len(apart) > 1 else ""
        raise Disagreement(
            f"the copies of tied parameter {name!r} have come apart: {texts[other]} differs from {texts[0]} by up to "
            f"{distances[other]:.1e}{more}: give all copies the same optimizer, learning rate, weight decay and "
            "options, by the names of engine.named_parameters(), clip by engine.clip_grad_norm_, and start again from "
            f"weights that are equal ({_PAGE})"
        )


def _listed(part: nn.Module) -> Any:
    """Returns the parameters that a module lists as ``tied_parameters``; None without such an attribute."""
    computed: Any = getattr(type(part), _LIST, None)
    try:  # an AttributeError of a property would pass for a missing attribute
        listed = computed.__get__(part) if isinstance(computed, property) else getattr(part, _LIST, None)
    except AttributeError as error:
        raise ValueError(f"tied_parameters of {type(part).__name__} raises an error: {error}") from error
    if listed is not None and not isinstance(listed, (Mapping, nn.ParameterDict)):
        raise ValueError(
            f"tied_parameters of {type(part).__name__} is a {type(listed).__name__}, must be a dict of parameters"
        )
    return listed


def _check(name: str, parameter: Any, place: str, registered: Collection[int]) -> None:
    """Raises ValueError unless a listed parameter is one of the modules'; ``registered``: the ids of all of them."""
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"tied parameter {name!r} of {place} is a {type(parameter).__name__}, not an nn.Parameter")
    if hasattr(parameter, "to_local"):
        raise ValueError(f"tied parameter {name!r} is a DTensor: tied parameters must lie whole on a rank")
    if id(parameter) not in registered:
        raise ValueError(
            f"tied parameter {name!r} of {place} is none of its parameters: a module holds another one in its place "
            "(to_empty, load_state_dict(assign=True) and fully_shard do that). Make tied_parameters a property that "
            "returns what the module holds, or fill it again"
        )


def _kind(parameter: nn.Parameter, name: str, found: Mapping[str, Collection[int]]) -> str:
    """Returns what must be alike in all copies of a tie, as text: shape, dtype, training, other ties.

    Args:
        name: the tie.
        found: by tie, the ids of its copies.
    """
    others = [other for other in sorted(found) if other != name and id(parameter) in found[other]]
    dtype = str(parameter.dtype).removeprefix("torch.")
    kind = f"{tuple(parameter.shape)}, {dtype}, {'trained' if parameter.requires_grad else 'frozen'}"
    kind += ", without memory (meta)" if parameter.is_meta else ""
    return f"{kind}, also listed as {others}" if others else kind


def _sum_of_bytes(tensor: Tensor) -> int:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
    return int(tensor.detach().contiguous().reshape(-1).view(kind).sum())


def _sum(added: Sequence[Tensor | None]) -> Tensor | None:
    found = [dense(gradient) for gradient in added if gradient is not None]
    return None if not found else found[0] if len(found) == 1 else torch.stack(found).sum(0)


# -- copies for the stages of a model that is cut ----------------------------------------------------------------------


def held(stage: nn.Module, names: Mapping[str, Sequence[str]], place: str = "the stage") -> dict[str, nn.Parameter]:
    """Returns the tied parameters of a stage as they are now, by tie: the name in the unsplit model.

    Args:
        names: by tie, the parameter's names in the stage.
        place: the stage in words.
    Raises:
        ValueError: a tied parameter is gone, or its names in the stage mean different parameters now.
    """
    found = {}
    for tie, own in names.items():
        try:
            first, *others = (stage.get_parameter(name) for name in own)
        except AttributeError as error:
            raise ValueError(
                f"{place} has no parameter {' or '.join(own)} any more, of which another stage holds a copy "
                f"({tie!r}): change the model before it is cut"
            ) from error
        if any(other is not first for other in others):
            raise ValueError(f"{', '.join(own)} were one parameter of {place} and are several now: make them one again")
        found[tie] = first
    return found


def carried(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a copy of a parameter for another stage, with values, gradient and attributes."""
    if type(parameter) is nn.Parameter:
        new = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    else:
        new = deepcopy(parameter)
    if parameter.is_floating_point() and parameter.requires_grad and parameter.grad_dtype != parameter.dtype:
        new.grad_dtype = parameter.grad_dtype
    if parameter.grad is not None:
        new.grad = parameter.grad.detach().clone()
    carry_attributes(parameter, new)
    return new


def carry_attributes(parameter: nn.Parameter, to: nn.Parameter) -> None:
    """Copies attributes like ``no_weight_decay``, used by optimizers to group parameters; clones tensors."""
    for key, value in vars(parameter).items():
        setattr(to, key, value.detach().clone() if isinstance(value, Tensor) else value)


def check_hooks(name: str, parameter: nn.Parameter) -> None:
    """Raises ValueError if a parameter to be copied has hooks."""
    if num_hooks(parameter):
        raise ValueError(_hooks_refused(name, f"the model's {name!r} has {num_hooks(parameter)}"))


def num_hooks(parameter: Tensor) -> int:
    """Returns the number of hooks on the parameter's gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def _hooks_refused(name: str, where: str) -> str:
    """Returns the error text for hooks on a tied parameter."""
    return (
        f"tied parameter {name!r} has copies on several stages, and hooks for its gradient ({where}), which would see "
        "a part of the gradient: remove them, and change the .grad of every copy between engine.step and the "
        f"optimizer's step ({_PAGE})"
    )
