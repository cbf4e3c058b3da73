"""Parameters that several stages hold as copies of one, as an embedding that is also the head.

Copies are made where a model is cut, by the functions at the end. A step sums their gradients.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from functools import reduce
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from seq1f1b.engine.gradients import StepGradients, dense
from seq1f1b.engine.linear import is_plain
from seq1f1b.nested import digest
from seq1f1b.transport import RankGroup
from seq1f1b.transport.agreement import Disagreement
from seq1f1b.transport.values import sendable

__all__: list[str] = []

# Copies come apart with the first step of an optimizer that differs, be it after many steps of the engine.
_COMPARED_IN, _COMPARED_EVERY = (2, 4, 8, 16, 32, 64), 100  # steps
_LIST = "tied_parameters"
_PAGE = "docs/how-to/tied-weights.md"
_SAMPLE, _FEWEST = 256, 8  # values of an unlisted parameter that are compared, and different bytes among them

Described: TypeAlias = "dict[str, list[list[Any]]]"
"""Each copy of a rank for the other ranks, by the names of the ties: as text, what must be alike, how many hooks it
has, and its id, by which a rank tells that it holds another one now."""


_Home: TypeAlias = "tuple[str, nn.Module, str]"
"""Where a parameter is held: a stage in words, its module, and the path in it."""


class _Copy(NamedTuple):
    """A parameter of this rank that others hold, too.

    Attributes:
        text: its own name and its place; the tie's name where no module has registered it.
        homes: several where one stage uses it twice, none where no module has registered it.
    """

    text: str
    parameter: nn.Parameter
    homes: Sequence[_Home]


class TiedParameters:
    """Sums the gradients of each parameter's copies over the ranks, so that equal copies stay equal.

    A stage says by its attribute ``tied_parameters``, a dict of parameters by name, which of its parameters have copies
    on other stages: copies have the name in common. Every exchange goes by the sorted names of all ranks. Parameters
    that are bit-equal and not listed are named in a warning where they are likely one parameter of the model.

    Args:
        modules: of this rank, each with its place in words.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], group: RankGroup) -> None:
        self._group, self._modules = group, modules
        is_alone = group.size == 1 and len(modules) == 1
        # Pairs that are bit-equal and not listed, once the ranks have met.
        self.equal: list[str] | None = [] if is_alone else None
        self._met_in = -1  # the group's epoch in which the ranks told each other what they hold
        self.has_lists = False  # a module lists ties
        self._copies: dict[str, list[_Copy]] = {}  # this rank's, distinct ones, by the names of their ties
        self._described: Described = {}  # the same for the others
        self._everyones: list[Described] = []  # of all ranks, as they were taken over
        self._holders: dict[str, list[int]] = {}
        self._problem = ""  # why this rank's copies cannot be taken
        self._steps = self._compared = 0  # training steps, and of these up to the last comparison
        self._is_apart = False
        self._read()
        if self._problem:
            raise ValueError(self._problem)

    # -- this rank's copies --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Reads what all modules list and hold now."""
        homes: dict[int, list[_Home]] = {}
        lists: list[tuple[str, nn.Module, nn.Module]] = []
        for place, root in self._modules:
            for path, part in root.named_modules():
                for key, held in part._parameters.items():
                    if held is not None:
                        homes.setdefault(id(held), []).append((place, root, f"{path}.{key}".lstrip(".")))
                if _LIST in part.__dict__ or hasattr(type(part), _LIST) or _LIST in part._modules:
                    lists.append((place, root, part))
        self.has_lists, self._problem = bool(lists), ""
        before = {id(copy.parameter): copy for own in self._copies.values() for copy in own}
        found: dict[str, list[_Copy]] = {}
        try:
            for place, root, part in lists:
                listed = _listed(part)
                for name, parameter in list(listed.items()):
                    known = before.get(id(parameter))
                    if known is not None and len(homes.get(id(parameter), ())) < len(known.homes):
                        parameter = _replaced(name, parameter, place, root, known.homes)
                        if isinstance(listed, (MutableMapping, nn.ParameterDict)):
                            listed[name] = parameter  # so that all who read it see what the module holds
                    own = found.setdefault(name, [])
                    if not any(parameter is copy.parameter for copy in own):  # one parameter at both ends of one stage
                        own.append(_copy(name, parameter, place, homes.get(id(parameter), ())))
            self._copies, self._described = found, _described(found)
        except ValueError as error:
            self._problem = str(error)

    def parameters(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return [copy.parameter for own in self._copies.values() for copy in own]

    def names(self) -> dict[int, str]:
        """Names that this rank's copies have in the whole model, by their ids."""
        if self.has_lists:
            self._read()
        return {id(copy.parameter): name for name in sorted(self._copies, reverse=True) for copy in self._copies[name]}

    def counted_elsewhere(self) -> set[int]:
        """Ids of the copies on this rank that a norm over all ranks must leave out."""
        return {
            id(copy)
            for name, own in self._held()
            for i, copy in enumerate(own)
            if i > 0 or self._holders[name][0] != self._group.rank
        }

    # -- the ranks meet ------------------------------------------------------------------------------------------------

    def meet(self, beside: Callable[[], Any] | None = None) -> list[Any]:
        """Finds the copies, and makes them equal; after a failed step compares them. Collective over the pipeline,
        within a step or between two.

        A rank may fail when others have not yet left; so all meet again after a failed step.

        Args:
            beside: makes what is told to the other ranks, too.
        Returns:
            what all ranks told so; nothing where they have met before.
        """
        if self._met_in == self._group.epoch:
            if self.has_lists:  # whose modules may hold or list other parameters now, or changed ones
                self._read()
            return []
        self._read()
        others = _unlisted(self._modules, {id(own) for own in self.parameters()}) if self.equal is None else []
        mine = self._described, self._problem, self._steps > 0, others, None if beside is None else beside()
        found = self._group.all_gather_object(mine)
        _refuse([problem for _, problem, *_ in found])
        if self.equal is None:
            self.equal = _look_at_equal([theirs for *_, theirs, _ in found], self._group.rank)
        self._take([described for described, *_ in found])
        if any(has_stepped for _, _, has_stepped, *_ in found):
            self._compare()
        else:  # copies take the values of the first one, as DistributedDataParallel's replicas do
            with torch.no_grad():
                for name, own in self._held():
                    first = self._of_first(name, own[0])
                    for copy in own:
                        if copy is not first:
                            copy.copy_(first)
        self._met_in = self._group.epoch
        return [told for *_, told in found]

    def check(self) -> None:
        """In a step, before its units: raises if what this rank holds now cannot be taken. The others hear of it."""
        late = self._copies.keys() - self._holders.keys()
        if self._problem or late:
            text = f"tied parameters {sorted(late)} were listed after the first step: list them before"
            raise ValueError(self._problem or text)

    def _take(self, everyones: list[Described]) -> None:
        """Takes over who holds which copies. Raises on every rank if they are not alike, or have hooks."""
        self._everyones = []  # where this raises, the next step takes them over anew
        holders = {
            name: [rank for rank, theirs in enumerate(everyones) if name in theirs]
            for name in sorted(set().union(*everyones))
        }
        for name, ranks in holders.items():
            copies = [(f"{text} on rank {rank}", *of) for rank in ranks for text, *of in everyones[rank][name]]
            if len({kind for _, kind, *_ in copies}) > 1:
                raise Disagreement(
                    f"tied parameter {name!r} differs between ranks {ranks}: "
                    f"{'; '.join(f'{text} is {kind}' for text, kind, *_ in copies)}. Copies of one parameter are alike"
                )
            hooks = [f"{text} has {num}" for text, _, num, _ in copies if num]
            if hooks and len(copies) > 1:
                raise Disagreement(hooks_refused(name, hooks[0]))
        self._holders, self._everyones = holders, everyones

    def _held(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """This rank's copies, by the names that all ranks go through in one order."""
        for name in self._holders:
            if name in self._copies:
                yield name, [copy.parameter for copy in self._copies[name]]

    def _of_first(self, name: str, own: nn.Parameter) -> Tensor:
        """The values of a tie's first copy. Collective over its holders."""
        first, *others = self._holders[name]
        if first == self._group.rank:
            self._group.exchange(own.detach(), others, [], own)
            return own
        return self._group.exchange(None, [], [first], own.detach())[first]

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def end_step(self, gradients: StepGradients) -> None:
        """Sums what the step added to the copies' gradients, in rank order, so that all get the same bits.

        Now and then the copies are compared, too, and where a rank holds others than before. Raises on every rank if
        they have come apart.
        """
        if not self._holders:
            return
        self._steps += 1
        is_due = self._is_apart or self._steps in _COMPARED_IN or self._steps % _COMPARED_EVERY == 0
        sums = {name: _sum([gradients.added(copy) for copy in own]) for name, own in self._held()}
        dtypes = {name: str(added.dtype).removeprefix("torch.") for name, added in sums.items() if added is not None}
        lost = self._lost(dtypes) if self._steps == 1 else ""
        # Also where the ranks meet: from here on nobody fails the step with a transfer under way.
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
        """Tells of a copy that no module holds, and that has got no gradient; ``having`` are names that have."""
        for name, (copy, *_) in self._copies.items():
            if name not in having and not copy.homes and copy.parameter.requires_grad:
                return (
                    f"tied parameter {copy.text} is none of its parameters, and got no gradient: "
                    "a module holds another one in its place (to_empty, load_state_dict(assign=True) and fully_shard "
                    "do that). Make tied_parameters a property that returns what the module holds, or fill it again"
                )
        return ""

    # -- comparing -----------------------------------------------------------------------------------------------------

    def compare(self, *, always: bool = False) -> None:
        """Raises, on every rank, if copies have come apart in the training steps since they were compared. Collective.

        After a failed step it does nothing: a checkpoint may be loaded then.

        Args:
            always: also where no step has run, or one has failed.
        """
        if always or (self._holders and self._compared < self._steps and not self._group.has_failed):
            self.meet()
            if self._holders:
                self._compare()

    def _bytes(self) -> dict[str, list[int]]:
        return {name: [_sum_of_bytes(copy) for copy in own] for name, own in self._held()}

    @torch.no_grad()
    def _compare(self, everyones: Sequence[Any] | None = None) -> None:
        """Args:
        everyones: sums over the bytes of all ranks' copies, by rank; None: they are gathered.
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
            f"start again from weights that are equal ({_PAGE})"
        )


def _refuse(texts: Sequence[str]) -> None:
    """Raises, on every rank, what one of them has to say."""
    for rank, text in enumerate(texts):
        if text:
            raise Disagreement(f"rank {rank}: {text}")


def _listed(part: nn.Module) -> Any:
    """Parameters that a module lists as ``tied_parameters``."""
    computed: Any = getattr(type(part), _LIST, None)
    try:  # an AttributeError of a property would pass for a missing attribute
        is_property = isinstance(computed, property) and computed.fget is not None
        listed = computed.fget(part) if is_property else getattr(part, _LIST, None)
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


def _copy(name: str, parameter: Any, place: str, homes: Sequence[_Home]) -> _Copy:
    """Args:
    place: where the parameter is listed.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"tied parameter {name!r} of {place} is a {type(parameter).__name__}, not an nn.Parameter")
    if hasattr(parameter, "to_local"):
        raise ValueError(f"tied parameter {name!r} is a DTensor: tied parameters must lie whole on a rank")
    place, _, own_name = homes[0] if homes else (place, None, name)
    return _Copy(f"{own_name!r} of {place}", parameter, homes)


def _replaced(name: str, parameter: Any, place: str, root: nn.Module, homes: Sequence[_Home]) -> Any:
    """The parameter that the module which lists it has now in the place of one that it had."""
    lost = [home for home in homes if home[1] is root] or homes
    every = [dict(module.named_parameters(remove_duplicate=False)).get(path) for _, module, path in lost]
    now = {id(one): one for one in every if one is not None}
    if len(now) > 1:
        raise ValueError(
            f"tied parameter {name!r} was one parameter at several places of {place}, which are different ones "
            "now (load_state_dict(assign=True) does that): make them one again, or list each of them"
        )
    return next(iter(now.values()), parameter)


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
    """What must be alike in all copies; ``names``: of all ties whose copy each parameter is."""
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
    """Sum of the gradients of copies on one rank."""
    found = [dense(gradient) for gradient in added if gradient is not None]
    return None if not found else found[0] if len(found) == 1 else torch.stack(found).sum(0)


# -- ties that nobody has listed ---------------------------------------------------------------------------------------


@sendable
class Unlisted(NamedTuple):
    """
    Attributes:
        place: of its stage, in words; kind: type of the module that holds it.
        order: how many parameters of its stage come before it.
        values: shape, dtype, and sums over a sample of its bytes.
    """

    place: str
    name: str
    kind: str
    order: int
    is_trained: bool
    values: tuple[Any, ...]


def _unlisted(modules: Sequence[tuple[str, nn.Module]], listed: Collection[int]) -> list[Unlisted]:
    """The parameters that are not listed and whose values are not a constant's.

    Args:
        modules: of this rank, each with its place in words.
        listed: ids of the parameters that are.
    """
    seen = set(listed)
    found: list[Unlisted] = []
    for place, module in modules:
        order = 0
        for prefix, part in module.named_modules() if isinstance(module, nn.Module) else ():
            for name, parameter in part.named_parameters(recurse=False):
                is_floating = is_plain(parameter) and parameter.is_floating_point()
                if id(parameter) in seen or not is_floating or parameter.is_meta:
                    continue
                seen.add(id(parameter))
                step = max(1, parameter.numel() // _SAMPLE)
                sample = parameter.detach().reshape(-1)[::step].contiguous().view(torch.uint8)
                if len(sample.unique()) < _FEWEST:
                    continue
                text, kind = f"{prefix}.{name}".lstrip("."), f"{type(part).__module__}.{type(part).__qualname__}"
                values = tuple(parameter.shape), str(parameter.dtype), *digest([sample])[0][2:]
                found.append(Unlisted(place, text, kind, order, parameter.requires_grad, values))
                order += 1
    return found


def _look_at_equal(everyones: Sequence[Sequence[Unlisted]], own_rank: int) -> list[str]:
    """Returns the pairs in words. Warns, on the rank of the first one, of those that are likely one parameter.

    Args:
        everyones: what :func:`_unlisted` has found, by rank.
    """
    found, alike = [], dict[Any, list[tuple[int, Unlisted]]]()
    for rank, each in ((rank, each) for rank, theirs in enumerate(everyones) for each in theirs):
        alike.setdefault(each.values, []).append((rank, each))
    pairs = [
        (rank, first, second)
        for several in alike.values()
        for (rank, first), (other, second) in combinations(several, 2)
        if (rank, first.place) != (other, second.place) and (first.is_trained or second.is_trained)
    ]
    stages = Counter((first.place, second.place) for _, first, second in pairs)
    for rank, first, second in (pair for pair in pairs if len(pair[1].values[0]) > 1):
        both = f"{first.name} of {first.place} and {second.name} of {second.place}"
        found.append(both)
        # Layers that were made from one seed, or copied, are equal and not tied: they are of one type, and either
        # more of their parameters are equal, or these are the first ones of their stages.
        is_alone = stages[first.place, second.place] == 1
        is_tie = first.kind != second.kind or (is_alone and first.order + second.order > 0)
        if is_tie and rank == own_rank:
            warnings.warn(
                f"{both} are bit-equal: if the model ties them, list both in the dict attribute tied_parameters of "
                "their stages, else their gradients are not summed and they come apart (docs/tutorial.md, Tied "
                "embeddings)",
                stacklevel=2,
            )
    return found


# -- where a model is cut ----------------------------------------------------------------------------------------------


def held(stage: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, nn.Parameter]:
    """The parameters that a stage holds now, by the names of their ties.

    Args:
        names: own names of each parameter, by those of the ties.
    Raises:
        ValueError: the stage has no such parameter any more, or several in its place.
    """
    found = {}
    for tie, own in names.items():
        try:
            first, *others = (stage.get_parameter(name) for name in own)
        except AttributeError as error:
            raise ValueError(
                f"the stage has no parameter {' or '.join(own)} any more, of which another stage holds a copy "
                f"({tie!r}): change the model before it is cut"
            ) from error
        if any(other is not first for other in others):
            raise ValueError(
                f"{', '.join(own)} were one parameter of the stage and are several now "
                "(load_state_dict(assign=True) does that): make them one again"
            )
        found[tie] = first
    return found


def carried(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of a parameter for another stage, with its values, its gradient and its attributes."""
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
    """Optimizer groups go by attributes such as ``no_weight_decay``. Tensors among them are copied."""
    for key, value in vars(parameter).items():
        setattr(to, key, value.detach().clone() if isinstance(value, Tensor) else value)


def check_hooks(name: str, parameter: nn.Parameter) -> None:
    """Raises ValueError if a parameter that is to be copied has hooks."""
    if num_hooks(parameter):
        raise ValueError(hooks_refused(name, f"the model's {name!r} has {num_hooks(parameter)}"))


def num_hooks(parameter: nn.Parameter) -> int:
    """Hooks that a backward calls with the parameter's gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def hooks_refused(name: str, where: str) -> str:
    """The sentence that refuses hooks on a tied parameter."""
    return (
        f"tied parameter {name!r} has copies on several stages, and hooks for its gradient ({where}): each copy's hook "
        "would see a part of the gradient, before the copies' gradients are summed. Remove the hook, and change the "
        "sum instead: the .grad of every copy between engine.step and the optimizer's step; engine.named_parameters() "
        f"has every copy by the name {name!r} ({_PAGE})"
    )
