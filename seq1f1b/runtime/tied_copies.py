"""Copies of tied parameters on one rank, as its modules hold them now."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

PAGE = "docs/how-to/tied-weights.md"
_Home = tuple[nn.Module, tuple[str, ...]]  # a module of the rank, and a path from it to a parameter


@dataclass(frozen=True)
class Copy:
    """A parameter of this rank that others hold, too.

    Attributes:
        place: its stage in words.
        name: its own name there; that of the tie, where no module has registered it.
        homes: where modules hold it; several where one stage uses it twice, none where none has registered it.
        kind: what must be alike, as it was read.
    """

    place: str
    name: str
    parameter: nn.Parameter
    homes: tuple[_Home, ...]
    kind: tuple[Any, ...]

    def is_current(self) -> bool:
        """Whether the modules hold this parameter still, and it is what it was."""
        return all(_at(home) is self.parameter for home in self.homes) and _kind(self.parameter) == self.kind

    def __str__(self) -> str:
        return f"{self.name!r} of {self.place}"


class OwnCopies:
    """This rank's copies, by the names that their ties have in the whole model.

    Args:
        modules: of this rank, each with its place in words.
    Attributes:
        by_name: distinct parameters, in the order of modules.
        problem: why they cannot be taken; "" if they can.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self.by_name: dict[str, list[Copy]] = {}
        self.problem = ""
        self._lists: list[tuple[str, nn.Module, nn.Module]] = []  # place and stage of modules that list ties, and they
        self.read()

    def refresh(self) -> bool:
        """Reads the copies again if a module holds another parameter now, or lists another. Returns whether so.

        A few microseconds for each copy; a module that begins to list ties is found by :meth:`read` alone.
        """
        if not self.problem and self._is_current():
            return False
        self.read()
        return True

    def _is_current(self) -> bool:
        if not all(one.is_current() for own in self.by_name.values() for one in own):
            return False
        known = {(name, id(one.parameter)) for name, own in self.by_name.items() for one in own}
        try:
            listed = {(name, id(parameter)) for *_, part in self._lists for name, parameter in _listed(part).items()}
        except ValueError:
            return False
        return listed == known

    def read(self) -> None:
        """Reads what all modules list and hold."""
        homes: dict[int, list[tuple[str, _Home]]] = {}
        self._lists = []
        for place, module in self._modules:
            for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
                for key, parameter in part._parameters.items():
                    if parameter is not None:
                        home = module, (*(path.split(".") if path else ()), key)
                        homes.setdefault(id(parameter), []).append((place, home))
                if _may_list(part):
                    self._lists.append((place, module, part))
        before = {id(one.parameter): one for own in self.by_name.values() for one in own}
        found: dict[str, list[Copy]] = {}
        self.problem = ""
        try:
            for place, module, part in self._lists:
                listed = _listed(part)
                for name, parameter in list(listed.items()):
                    known = before.get(id(parameter))
                    lost: Sequence[_Home] = ()
                    if known is not None and len(homes.get(id(parameter), ())) < len(known.homes):
                        lost = [home for home in known.homes if home[0] is module] or known.homes
                    now = _current(name, parameter, place, lost)
                    if now is not parameter and isinstance(listed, (MutableMapping, nn.ParameterDict)):
                        listed[name] = now  # so that all who read it see what the module holds
                    own = found.setdefault(name, [])
                    if not any(now is one.parameter for one in own):  # one parameter at both ends of one stage
                        own.append(_copy(name, now, place, homes.get(id(now), ())))
            self.by_name = found
        except ValueError as error:
            self.problem = str(error)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (one.parameter for own in self.by_name.values() for one in own)

    def described(self) -> dict[str, list[list[Any]]]:
        """Each copy as text and kind, for the other ranks."""
        names: dict[int, list[str]] = {}
        for name, own in self.by_name.items():
            for one in own:
                names.setdefault(id(one.parameter), []).append(name)
        found: dict[str, list[list[Any]]] = {}
        for name, own in self.by_name.items():
            for one in own:
                shape, dtype, is_trained, hooks, is_meta = one.kind
                others = [other for other in sorted(names[id(one.parameter)]) if other != name]
                kind = f"{tuple(shape)}, {str(dtype).removeprefix('torch.')}, {'trained' if is_trained else 'frozen'}"
                kind += ", without memory (meta)" if is_meta else ""
                kind += f", also listed as {others}" if others else ""
                found.setdefault(name, []).append([str(one), kind, hooks, is_meta])
        return found

    def bytes_of(self, name: str) -> list[int]:
        """A sum over the bytes of each copy."""
        return [_sum_of_bytes(one.parameter) for one in self.by_name.get(name, ())]


def _may_list(part: nn.Module) -> bool:
    name = "tied_parameters"
    return name in part.__dict__ or hasattr(type(part), name) or name in part._modules


def _listed(part: nn.Module) -> Any:
    computed = getattr(type(part), "tied_parameters", None)
    try:  # an AttributeError of a property would pass for a missing attribute
        if isinstance(computed, property) and computed.fget is not None:
            listed = computed.fget(part)
        else:
            listed = getattr(part, "tied_parameters", None)
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


def _copy(name: str, parameter: nn.Parameter, place: str, held: Sequence[tuple[str, _Home]]) -> Copy:
    if held:
        place, name = held[0][0], ".".join(held[0][1][1])
    return Copy(place, name, parameter, tuple(home for _, home in held), _kind(parameter))


def _at(home: _Home) -> nn.Parameter | None:
    """The parameter that a module holds at a place, if it still does."""
    part: nn.Module | None = home[0]
    for key in home[1][:-1]:
        part = None if part is None else part._modules.get(key)
    return None if part is None else part._parameters.get(home[1][-1])


def _current(name: str, parameter: Any, place: str, lost: Sequence[_Home]) -> nn.Parameter:
    """The parameter that is listed, or the one that a module has now in its place.

    Args:
        lost: where it was, if some module does not hold it any more.
    """
    now = {id(one): one for home in lost if (one := _at(home)) is not None}
    if len(now) > 1:
        raise ValueError(
            f"tied parameter {name!r} was one parameter at several places of {place}, which are different ones now "
            "(load_state_dict(assign=True) does that): make them one again, or list each of them"
        )
    parameter = next(iter(now.values()), parameter)
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"tied parameter {name!r} of {place} is a {type(parameter).__name__}, not an nn.Parameter")
    if hasattr(parameter, "to_local"):
        raise ValueError(f"tied parameter {name!r} is a DTensor: tied parameters must lie whole on a rank")
    return parameter


def _kind(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.shape, parameter.dtype, parameter.requires_grad, num_hooks(parameter), parameter.is_meta


def num_hooks(parameter: nn.Parameter) -> int:
    """Hooks that a backward calls with the parameter's gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def _sum_of_bytes(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    rest = len(flat) % 8
    words = flat[: len(flat) - rest].view(torch.int64)
    return int(words.sum()) + int(flat[len(flat) - rest :].sum())


# -- at a cut ----------------------------------------------------------------------------------------------------------


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
        new = copy.deepcopy(parameter)
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


def hooks_refused(name: str, where: str) -> str:
    """The sentence that refuses hooks on a tied parameter."""
    return (
        f"tied parameter {name!r} has copies on several stages, and hooks for its gradient ({where}): each copy's hook "
        "would see a part of the gradient, before the copies' gradients are summed. Remove the hook, and change the "
        "sum instead: the .grad of every copy between engine.step and the optimizer's step; engine.named_parameters() "
        f"has every copy by the name {name!r} ({PAGE})"
    )
