"""Compares the stages of a cut, run in a row, with the model: outputs, gradients and buffers, on a few tokens."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from seq1f1b.adapters.chain_trace import Refused
from seq1f1b.engine.model_state import RandomState, attributes_of, keep_state, put_back, uncompiled
from seq1f1b.engine.replicas import without_hooks
from seq1f1b.nested import distance, norm

__all__ = ["Composite", "compare"]

_BATCH, _TOKENS = 2, 8  # shape of the sample when the caller gives none
_ROUNDINGS = 8  # tolerance for sums in another order, in units in the last place


class Composite(Refused):
    """The error for a stage that hands on several tensors as one value; ``split`` takes the value apart in the graph.

    Attributes:
        name, value: name and value of the graph's node.
    """

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"{name} is a {type(value).__name__}, and stages hand on tensors")
        self.name, self.value = name, value


def compare(
    model: nn.Module, graph: fx.Graph, parts: Sequence[Any], handed_on: Sequence[Sequence[str]], sample: Any
) -> None:
    """Raises ValueError if an output, buffer or gradient of the stages differs from the model's.

    The message names the first difference. If nothing was compared, a warning says why. The comparison restores
    parameters, gradients, buffers, modes, attributes of modules, and random generators.

    Args:
        graph: graph of the model, without the arguments of a loss, which stages do not take.
        handed_on: names of the values that each stage hands on.
        sample: the argument of :func:`seq1f1b.split`.
    """
    whose, known = type(model).__name__, [node for node in graph.nodes if node.op == "placeholder"]
    arguments = _token_ids(model, graph) if sample is None else _bound(model, sample)
    text = "the sample" if sample is not None else f"token ids of shape {(_BATCH, _TOKENS)}"
    why = "its arguments are unknown" if arguments is None else ""
    given = {node.target: arguments[node.target] for node in known if arguments and node.target in arguments}
    needed = [given.pop(node.target) for node in known if node.target in given and not node.args]
    holders = {n: [i for i, part in enumerate(parts) if b in set(part.buffers())] for n, b in model.named_buffers()}
    shared = {name: stages for name, stages in holders.items() if len(stages) > 1}
    for is_training in () if why else (True, False):
        where = f"{text}, in {'training' if is_training else 'evaluation'} mode"
        try:
            whole = _run(model, [model], needed, given, [()], is_training, shared)
        except Refused:
            raise
        except Exception as error:  # raised by the model
            why = f"forward of {whose} fails on {text}: {type(error).__name__}: {error}"
            if sample is not None:
                raise ValueError(why) from error
            break
        try:
            stages = _run(model, parts, needed, given, handed_on, is_training, shared)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"the stages of {whose} fail on {where}, and the model does not: {type(error).__name__}: {error}"
            ) from error
        difference = _difference(whole, stages)
        if difference:
            raise Refused(
                f"the stages of {whose} do not compute what it does, on {where}: {difference}. Outside of its "
                "blocks, forward does what a trace does not record: it reads a value that changes, swaps a "
                "function or a tensor, changes a buffer, or stops gradients. Move that into a block"
            )
    if why:
        warnings.warn(
            f"the stages of {whose} were not compared with it: {why}. Give split the arguments of a small call as "
            "sample=, or check=False",
            stacklevel=4,
        )


def _bound(model: nn.Module, sample: Any) -> dict[str, Any]:
    """Returns the sample's arguments by name."""
    positional = sample if isinstance(sample, tuple) else () if isinstance(sample, Mapping) else (sample,)
    try:
        named = sample if isinstance(sample, Mapping) else {}
        bound = inspect.signature(type(model).forward).bind(model, *positional, **named)
    except TypeError as error:
        raise ValueError(
            f"sample does not fit forward of {type(model).__name__}: {error}. Give its argument, a tuple of them, or a "
            "dict by name"
        ) from None
    return dict(list(bound.arguments.items())[1:])


def _token_ids(model: nn.Module, graph: fx.Graph) -> dict[str, Any] | None:
    """Returns ids below the smallest embedding's size if the one required argument feeds an embedding, else None."""
    needed = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    called = [user for node in needed for user in node.users if user.op == "call_module" and user.args[:1] == (node,)]
    fed = [m for user in called for m in model.get_submodule(str(user.target)).modules()]
    if len(needed) != 1 or not any(isinstance(m, nn.Embedding) for m in fed):
        return None
    table = min((m for m in model.modules() if isinstance(m, nn.Embedding)), key=lambda m: m.num_embeddings)
    ids = (torch.arange(_BATCH * _TOKENS, device=table.weight.device) * 7 + 3) % table.num_embeddings
    return {str(needed[0].target): ids.view(_BATCH, _TOKENS)}


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The results of one forward and backward: through the stages in a row, or through the whole model.

    Attributes:
        outputs: tensors and plain values of the output, keyed by path.
        gradients: keyed by the parameter's first name in the model.
    """

    outputs: dict[str, Any]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _run(
    model: nn.Module,
    parts: Sequence[Any],
    values: Sequence[Any],
    kwargs: Mapping[str, Any],
    handed_on: Sequence[Sequence[str]],
    is_training: bool,
    shared: Mapping[str, Sequence[int]],
) -> _Run:
    """Runs the parts forward, then backward from fixed gradients of the outputs; restores all state.

    Args:
        handed_on: names of the values that each part hands on.
        shared: for each buffer held by several stages, the stages.
    """
    whose, steps = type(model).__name__, list[tuple[list[Any], list[Any]]]()  # inputs and outputs of each part
    parameters = list({id(p): p for whole in (model, *parts) for p in whole.parameters() if p.is_leaf}.values())
    with ExitStack() as stack:
        device = next((p.device for p in parameters), torch.device("cpu"))
        stack.callback(RandomState(device).restore)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncompiled())
        stack.enter_context(keep_state((model, *parts), None, parameters=False))
        stack.enter_context(without_hooks(parameters))
        for module in (module for part in parts for module in part.modules()):
            module.training = is_training
        before = _buffers(parts)
        apart = [attributes_of(part.modules()) for part in parts]  # each stage runs in a separate process
        for index, part in enumerate(parts):
            own = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values]
            put_back(apart[index])
            output = part(*own, **kwargs)
            if not torch.is_grad_enabled():
                raise Refused(f"stage {index} of {whose} leaves gradients off for the next one")
            values = output if isinstance(output, tuple) else (output,)
            steps.append((own, list(values)))
            for name, value in zip(handed_on[index], values, strict=False):
                if isinstance(value, (tuple, list, dict)):
                    raise Composite(name, value)
                if not isinstance(value, Tensor):
                    raise Refused(
                        f"stage {index} of {whose} would hand on {name}, a {type(value).__name__}, and stages hand on "
                        "tensors: take it apart before the cut, or cut elsewhere by at="
                    )
        outputs = _places(output)
        steps[-1] = own, list(outputs.values())
        tensors = {place: value for place, value in outputs.items() if isinstance(value, Tensor)}
        outputs |= {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
        buffers = _buffers(parts)
        for name in (name for name in shared if _off(before[name], buffers[name])):
            raise Refused(
                f"forward of {whose} changes buffer {name}, and stages {shared[name]} use it: each would change its "
                "own. Move it into a block, and make a module that several stages use several modules"
            )
        return _Run(outputs, _backward(model, parts, parameters, steps), buffers)


def _backward(
    model: nn.Module,
    parts: Sequence[Any],
    parameters: Sequence[nn.Parameter],
    steps: Sequence[tuple[list[Any], list[Any]]],
) -> dict[str, Tensor]:
    """Returns the gradients of the parameters, summed over all parts."""
    names = {id(p): name for name, p in model.named_parameters()}
    for part in parts:
        names |= {id(p): name for name, p in getattr(part, "tied_parameters", {}).items()}
    found: dict[str, Tensor] = {}
    seeds = [_seed(i, output) if isinstance(output, Tensor) else None for i, output in enumerate(steps[-1][1])]
    for index, (own, returned) in reversed(list(enumerate(steps))):
        pairs = zip(returned, seeds, strict=True)
        known = [(o, s) for o, s in pairs if s is not None and isinstance(o, Tensor) and o.requires_grad]
        if known:
            torch.autograd.backward([o for o, _ in known], [s for _, s in known])
        seeds = [value.grad if isinstance(value, Tensor) else None for value in own]
        held = {id(p) for p in parts[index].parameters()}
        for parameter in parameters:
            name, gradient, parameter.grad = names[id(parameter)], parameter.grad, None
            if gradient is None:
                continue
            if id(parameter) not in held:
                raise Refused(
                    f"stage {index} of {type(model).__name__} computes with {name}, which it does not hold: a copy of "
                    "a module refers to the original by a closure, a hook or a forward that was set on the instance"
                )
            found[name] = found[name] + gradient if name in found else gradient
    return found


# -- values ------------------------------------------------------------------------------------------------------------


def _places(value: Any) -> dict[str, Any]:
    """Returns the leaves of an output, keyed by path."""
    leaves = tree_leaves_with_path(vars(value) if is_dataclass(value) else value)
    return {f"output{keystr(path)}": leaf for path, leaf in leaves if leaf is not None}


def _buffers(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {n: t.detach().clone() for part in parts for n, t in part.named_buffers(remove_duplicate=False)}


def _seed(index: int, output: Tensor) -> Tensor:
    """Returns a gradient for an output: fixed values that look random."""
    numbers = torch.arange(output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
    return torch.cos(numbers * 12.9898 + 78.233 * (index + 1)).to(output.dtype)


def _difference(whole: _Run, stages: _Run) -> str:
    """Returns the first difference in words, "" for equal runs."""
    if len(whole.outputs) != len(stages.outputs):
        return f"the model returns {len(whole.outputs)} values, the last stage {len(stages.outputs)}"
    real = [v for v in whole.outputs.values() if isinstance(v, Tensor) and v.is_floating_point()]
    eps = max((torch.finfo(value.dtype).eps for value in real), default=2**-24)
    pairs = [(name, a, b, 0.0) for (name, a), b in zip(whole.outputs.items(), stages.outputs.values(), strict=True)]
    pairs += [(f"buffer {n}", whole.buffers[n], b, 0.0) for n, b in stages.buffers.items() if n in whole.buffers]
    sizes = [size for gradient in whole.gradients.values() if math.isfinite(size := norm(gradient))]
    typical = math.sqrt(sum(size**2 for size in sizes) / max(1, len(sizes)))
    for name in [*whole.gradients, *(stages.gradients.keys() - whole.gradients.keys())]:
        here = [gradients[name] for gradients in (whole.gradients, stages.gradients) if name in gradients]
        zero = torch.zeros_like(here[0])
        one, other = whole.gradients.get(name, zero), stages.gradients.get(name, zero)
        pairs.append((f"the gradient of {name}", one, other, typical))
    return next((f"{name} {off}" for name, a, b, size in pairs if (off := _off(a, b, eps, size))), "")


def _off(value: Any, found: Any, eps: float = 0.0, typical: float = 0.0) -> str:
    """Returns how a value differs from the model's; "" within rounding, in proportion to norm plus ``typical``."""
    if not isinstance(value, Tensor) or not isinstance(found, Tensor):
        differs = type(value) is not type(found) or (isinstance(value, (int, float, str, bool)) and value != found)
        return f"is {found!r}, the model's is {value!r}" if differs else ""
    for what in ("dtype", "shape", "requires_grad"):
        if getattr(value, what) != getattr(found, what):
            return f"has {what} {getattr(found, what)}, the model's has {getattr(value, what)}"
    off, size = distance(found, value), norm(value.to_dense().nan_to_num(0.0, 0.0, 0.0))
    return (
        ""
        if not off or off <= _ROUNDINGS * eps * (size + typical)
        else f"is off by {off / (size or 1):.1e} of its size"
    )
