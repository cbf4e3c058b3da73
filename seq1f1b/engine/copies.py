"""Makes copies of tied parameters when a model is cut into stages; ``ties.py`` sums the copies' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

from torch import Tensor, nn

__all__: list[str] = []

PAGE = "docs/how-to/tied-weights.md"


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
        raise ValueError(hooks_refused(name, f"the model's {name!r} has {num_hooks(parameter)}"))


def num_hooks(parameter: nn.Parameter) -> int:
    """Returns the number of hooks on the parameter's gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def hooks_refused(name: str, where: str) -> str:
    """Returns the error text for hooks on a tied parameter."""
    return (
        f"tied parameter {name!r} has copies on several stages, and hooks for its gradient ({where}), which would see "
        "a part of the gradient: remove them, and change the .grad of every copy between engine.step and the "
        f"optimizer's step ({PAGE})"
    )
