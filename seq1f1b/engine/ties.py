"""Tied parameters: copies of one parameter on several stages, for example of an embedding that is also the head.

``copies.py`` makes the copies when a model is cut. A step sums the copies' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from seq1f1b.engine.copies import PAGE, held, hooks_refused, num_hooks
from seq1f1b.engine.gradients import StepGradients, dense
from seq1f1b.transport import RankGroup
from seq1f1b.transport.agreement import Disagreement

__all__: list[str] = []

# Unlike optimizers drive copies apart in their first step, perhaps after many steps of the engine.
_COMPARED_IN, _COMPARED_EVERY = (2, 4, 8, 16, 32, 64), 100  # steps
_LIST = "tied_parameters"

Described: TypeAlias = "dict[str, list[list[Any]]]"
"""Each copy of a rank for the other ranks, by the names of the ties: as text, what must be alike, how many hooks it
has, and its id, by which a rank tells that it holds another one now."""


class _Copy(NamedTuple):
    """A parameter of the rank with copies on other ranks.

    Attributes:
        text: name and place; the tie's name if no module has registered the parameter.
        is_held: whether a module has registered the parameter.
    """

    text: str
    parameter: nn.Parameter
    is_held: bool


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
        self._copies: dict[str, list[_Copy]] = {}  # this rank's distinct copies, by tie
        self._described: Described = {}  # `_copies`, as other ranks get it
        self._everyones: list[Described] = []  # `_described` of all ranks, as last taken over
        self._holders: dict[str, list[int]] = {}
        self._problem = ""  # why this rank's copies cannot be taken
        self._steps = self._compared = 0  # training steps: all, and up to the last comparison
        self._is_apart = False
        self._read()
        if self._problem:
            raise ValueError(self._problem)

    # -- this rank's copies --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        found, listings = dict[str, list[_Copy]](), dict[tuple[int, str], tuple[Any, list[str]]]()
        self._problem = ""
        try:
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
                        listings[id(part), name] = parameter, paths
                        own = found.setdefault(name, [])
                        is_known = any(parameter is copy.parameter for copy in own)  # listed twice on a stage
                        if not is_known:
                            own.append(_copy(name, parameter, place, paths))
            self._copies, self._described, self._known = found, _described(found), listings
        except ValueError as error:
            self._problem, self.has_lists = str(error), True

    def parameters(self) -> list[nn.Parameter]:
        """Returns the rank's copies."""
        return [copy.parameter for own in self._copies.values() for copy in own]

    def names(self) -> dict[int, str]:
        """Returns the names of the rank's copies in the whole model, by id of the copy."""
        if self.has_lists:
            self._read()
        return {id(copy.parameter): name for name in sorted(self._copies, reverse=True) for copy in self._copies[name]}

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
            return []
        self._read()
        mine = self._described, self._problem, self._steps > 0, None if beside is None else beside()
        found = self._group.all_gather_object(mine)
        _refuse([problem for _, problem, *_ in found])
        self._take([described for described, *_ in found])
        if any(has_stepped for _, _, has_stepped, *_ in found):
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

    def check(self) -> None:
        """Raises ValueError before a step's units if the rank's lists are wrong or late. The step then fails on all."""
        late = self._copies.keys() - self._holders.keys()
        if self._problem or late:
            text = f"tied parameters {sorted(late)} were listed after the first step: list them before"
            raise ValueError(self._problem or text)

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
                    f"{'; '.join(f'{text} is {kind}' for text, kind, *_ in copies)}. Copies must be alike in all of it"
                )
            hooks = [f"{text} has {num}" for text, _, num, _ in copies if num]
            if hooks and len(copies) > 1:
                raise Disagreement(hooks_refused(name, hooks[0]))
        self._holders, self._everyones = holders, everyones

    def _held(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        for name in self._holders:
            if name in self._copies:
                yield name, [copy.parameter for copy in self._copies[name]]

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
        lost = self._lost(dtypes) if self._steps == 1 else ""
        # All ranks wait here: afterwards no rank fails the step with a transfer under way.
        found = self._group.all_gather_object((dtypes, self._described, self._bytes() if is_due else None, lost))
        _refuse([text for *_, text in found])
        described = [theirs for _, theirs, *_ in found]
        if described != self._everyones:
            self._take(described)
            self._compare()
        elif is_due:
            self._compare([sums_of_bytes for *_, sums_of_bytes, _ in found])
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

    def _lost(self, having: Collection[str]) -> str:
        """Returns an error if a copy outside of all modules got no gradient; ``having``: ties with a gradient."""
        for name, (copy, *_) in self._copies.items():
            if name not in having and not copy.is_held and copy.parameter.requires_grad:
                return (
                    f"tied parameter {copy.text} is none of its parameters, and got no gradient: "
                    "a module holds another one in its place (to_empty, load_state_dict(assign=True) and fully_shard "
                    "do that). Make tied_parameters a property that returns what the module holds, or fill it again"
                )
        return ""

    # -- comparing -----------------------------------------------------------------------------------------------------

    def compare(self, *, always: bool = False) -> None:
        """Raises, on every rank, if copies have come apart in the training steps since the last comparison. Collective.

        Does nothing after a failed step: a checkpoint may be loaded then.

        Args:
            always: compares even if no step has run, or one has failed.
        """
        if always or (self._holders and self._compared < self._steps and not self._group.has_failed):
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
            own = [copy.parameter for copy in self._copies[name]]
            first = self._of_first(name, own[0])
            mine = [float((copy - first).abs().max()) for copy in own]
        distances = [distance for theirs in self._group.all_gather_object(mine) for distance in theirs]
        texts = [f"{text} on rank {rank}" for rank in self._holders[name] for text, *_ in self._everyones[rank][name]]
        other = next(i for i, each in enumerate(sums[name]) if each != sums[name][0])
        more = f"; {len(apart) - 1} more ties have come apart" if len(apart) > 1 else ""
        raise Disagreement(
            f"the copies of tied parameter {name!r} have come apart: {texts[other]} differs from {texts[0]} by up to "
            f"{distances[other]:.1e}{more}. Each copy is stepped by its own rank's optimizer, "
            "with the same gradient: give all copies the same optimizer, learning rate, weight decay and options, and "
            "clip by engine.clip_grad_norm_, since torch's clip_grad_norm_ takes another norm on each rank. "
            f"Groups by name are alike if they are made of engine.named_parameters(), where every copy is {name!r}; "
            f"start again from weights that are equal ({PAGE})"
        )


def _refuse(texts: Sequence[str]) -> None:
    for rank, text in enumerate(texts):
        if text:
            raise Disagreement(f"rank {rank}: {text}")


def _listed(part: nn.Module) -> Any:
    """Returns the parameters that a module lists as ``tied_parameters``; None without such an attribute."""
    computed: Any = getattr(type(part), _LIST, None)
    if computed is None and _LIST not in part.__dict__ and _LIST not in part._modules:
        return None
    try:  # an AttributeError of a property would pass for a missing attribute
        is_property = isinstance(computed, property) and computed.fget is not None
        listed = computed.fget(part) if is_property else getattr(part, _LIST)
    except AttributeError as error:
        raise ValueError(f"tied_parameters of {type(part).__name__} raises an error: {error}") from error
    if listed is None:
        return {}
    if not isinstance(listed, (Mapping, nn.ParameterDict)):
        raise ValueError(
            f"tied_parameters of {type(part).__name__} is a {type(listed).__name__}, must be a dict of parameters, by "
            "their names in the whole model"
        )
    return listed


def _copy(name: str, parameter: Any, place: str, paths: Sequence[str]) -> _Copy:
    """Makes the record of a copy.

    Args:
        place: stage with the list. paths: names of the parameter in the stage.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"tied parameter {name!r} of {place} is a {type(parameter).__name__}, not an nn.Parameter")
    if hasattr(parameter, "to_local"):
        raise ValueError(f"tied parameter {name!r} is a DTensor: tied parameters must lie whole on a rank")
    return _Copy(f"{(paths[0] if paths else name)!r} of {place}", parameter, bool(paths))


def _described(copies: Mapping[str, Sequence[_Copy]]) -> Described:
    names: dict[int, list[str]] = {}
    for name in sorted(copies):
        for copy in copies[name]:
            names.setdefault(id(copy.parameter), []).append(name)
    return {
        name: [[c.text, _kind(c.parameter, names, name), num_hooks(c.parameter), id(c.parameter)] for c in own]
        for name, own in copies.items()
    }


def _kind(parameter: nn.Parameter, names: Mapping[int, Sequence[str]], name: str) -> str:
    """Returns shape, dtype and training of a copy, equal within a tie; ``names``: by id, the ties of a parameter."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    kind = f"{tuple(parameter.shape)}, {dtype}, {'trained' if parameter.requires_grad else 'frozen'}"
    kind += ", without memory (meta)" if parameter.is_meta else ""
    others = [other for other in names[id(parameter)] if other != name]
    return f"{kind}, also listed as {others}" if others else kind


def _sum_of_bytes(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    end = len(flat) // 8 * 8
    return int(flat[:end].view(torch.int64).sum()) + int(flat[end:].sum())


def _sum(added: Sequence[Tensor | None]) -> Tensor | None:
    found = [dense(gradient) for gradient in added if gradient is not None]
    return None if not found else found[0] if len(found) == 1 else torch.stack(found).sum(0)
