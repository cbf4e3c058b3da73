"""Compares the stages of a cut, run in a row, with the model: outputs, gradients and buffers, on a few tokens.

The runs are in training, in evaluation without gradients, and under autocast, because forward may ask for each mode.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from seq1f1b.adapters.chain_trace import RefusedCode
from seq1f1b.checks.first_look import Look, sample_of
from seq1f1b.engine.findings import STATE
from seq1f1b.engine.model_state import RandomState, attributes_of, keep_state, put_back, uncompiled
from seq1f1b.engine.replicas import without_hooks
from seq1f1b.nested import distance, norm

__all__ = ["NoTensor", "compare"]

_BATCH, _TOKENS = 2, 8  # shape of the sample when the caller gives none
_TRAINING, _AUTOCAST = "training mode", "evaluation mode under autocast"
_MODES = (_TRAINING, "evaluation mode without gradients", _AUTOCAST)
_ROUNDINGS = 8  # tolerance for sums in another order, in units in the last place
_Run: TypeAlias = "tuple[dict[str, Any], dict[str, Tensor]]"


class NoTensor(RefusedCode):
    """The error for a stage that hands on another value than a tensor; ``split`` takes containers apart in the graph.

    Attributes:
        name, value: name and value of the graph's node.
    """

    def __init__(self, stage: str, name: str, value: Any) -> None:
        super().__init__(
            f"{stage} would hand on {name}, a {type(value).__name__}, and stages hand on tensors: take it apart before "
            "the cut, or cut elsewhere by at="
        )
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
    """
    whose, known = type(model).__name__, [node for node in graph.nodes if node.op == "placeholder"]
    arguments = _token_ids(model, graph) if sample is None else _bound(model, sample)
    text = "the sample" if sample is not None else f"token ids of shape {(_BATCH, _TOKENS)}"
    why = "its arguments are unknown" if arguments is None else ""
    given = {node.target: arguments[node.target] for node in known if arguments and node.target in arguments}
    needed = [given.pop(node.target) for node in known if node.target in given and not node.args]
    for mode in () if why else _MODES:
        where, whole = f"{text}, in {mode}", None
        try:
            whole = _run(model, [model], needed, given, [()], mode)
            stages = _run(model, parts, needed, given, handed_on, mode)
        except RefusedCode:
            raise
        except Exception as error:  # raised by code of the model
            problem = f"{type(error).__name__}: {error}"
            if whole is not None:
                raise RefusedCode(
                    f"the stages of {whose} fail on {where}, and the model does not: {problem}"
                ) from error
            if mode != _TRAINING:  # not every model runs in bfloat16, or without gradients
                continue
            why = f"forward of {whose} fails on {text}: {problem}"
            if sample is not None:
                raise ValueError(why) from error
            break
        difference = _difference(whole, stages)
        if difference:
            raise RefusedCode(
                f"the stages of {whose} do not compute what it does, on {where}: {difference}. Outside of its blocks, "
                "forward does what a trace does not record, such as a context or a mode, or stages share a buffer that "
                "one changes. Move that into a block, with buffers of its own"
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
        raise ValueError(f"sample does not fit forward of {type(model).__name__}: {error}") from None
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


def _run(
    model: nn.Module,
    parts: Sequence[Any],
    values: Sequence[Any],
    kwargs: Mapping[str, Any],
    handed_on: Sequence[Sequence[str]],
    mode: str,
) -> _Run:
    """Runs the parts forward in a row; in training also backward, from fixed gradients. Restores all state.

    Returns:
        the leaves of the output and the buffers, by name; and gradients, by first name in the model.
    """
    whose, is_training = type(model).__name__, mode == _TRAINING
    parameters = list({id(p): p for whole in (model, *parts) for p in whole.parameters() if p.is_leaf}.values())
    names = {id(p): name for name, p in model.named_parameters()}
    names |= {id(p): n for part in parts for n, p in getattr(part, "tied_parameters", {}).items()}
    with ExitStack() as stack:
        device = next((p.device for p in parameters), torch.device("cpu"))
        stack.callback(RandomState(device).restore)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(is_training))
        if mode == _AUTOCAST:
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        stack.enter_context(uncompiled())
        stack.enter_context(keep_state((model, *parts), None, parameters=False))
        stack.enter_context(without_hooks(parameters))
        for module in (module for part in parts for module in part.modules()):
            module.training = is_training
        # Each stage runs in a separate process, so no stage sees what another one changes.
        apart = [attributes_of(part.modules()) for part in parts]
        starts = [[(buffer, buffer.detach().clone()) for buffer in part.buffers()] for part in parts]
        values = [value.detach() if isinstance(value, Tensor) else value for value in values]
        for index, part in enumerate(parts):
            put_back(apart[index])
            for buffer, start in starts[index]:
                buffer.data = start
            torch.set_grad_enabled(is_training)
            if mode == _MODES[1] and part is not model:
                stage = SimpleNamespace(module=part, index=index, device=device, in_threads=False)
                _check_segments(whose, stage, tuple(values), kwargs)
            output = part(*values, **kwargs)
            values = output if isinstance(output, tuple) else (output,)
            for name, value in zip(handed_on[index], values, strict=False):
                if not isinstance(value, Tensor):
                    raise NoTensor(f"stage {index} of {whose}", name, value)
        leaves = [leaf for leaf in tree_leaves(vars(output) if is_dataclass(output) else output) if leaf is not None]
        trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if trained:
            torch.autograd.backward(trained, [_seed(leaf) for leaf in trained])
        found = {f"output {i}": leaf for i, leaf in enumerate(leaves)}
        found |= {f"buffer {n}": b for part in parts for n, b in part.named_buffers(remove_duplicate=False)}
        for name, value in found.items():
            if isinstance(value, Tensor):
                found[name] = value.detach().clone().requires_grad_(value.requires_grad)
        gradients: dict[str, Tensor] = {}
        for p in (p for p in parameters if p.grad is not None):
            name = names[id(p)]
            gradients[name] = gradients[name] + p.grad if name in gradients else p.grad  # copies of one parameter
        return found, gradients


def _check_segments(whose: str, stage: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if code around a stage's blocks begins anew in every segment, as a count of tokens does."""
    tokens = args[0] if args else None
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return
    sample = sample_of((args, dict(kwargs)), 1, tokens.shape[1], tokens.shape[1], [stage.module])
    for finding in (Look(stage, sample).findings() if sample is not None else None) or ():
        if finding.cause == STATE and ", itself (" in finding.place:  # in a block, the first step tells
            raise RefusedCode(f"{whose} would compute other values in segments: {finding}")


# -- values ------------------------------------------------------------------------------------------------------------


def _seed(output: Tensor) -> Tensor:
    """Returns a gradient for an output: fixed values without a pattern."""
    return torch.arange(output.numel(), dtype=torch.float64, device="cpu").square().cos().view(output.shape).to(output)


def _difference(whole: _Run, stages: _Run) -> str:
    """Returns the first difference in words, "" for equal runs.

    Floating values may differ by rounding, in proportion to their norm; gradients also to the typical gradient's.
    """
    (values, gradients), (others, other_gradients) = whole, stages
    real = [value for value in values.values() if isinstance(value, Tensor) and value.is_floating_point()]
    bound = _ROUNDINGS * max((torch.finfo(value.dtype).eps for value in real), default=2**-24)
    sizes = [size for gradient in gradients.values() if math.isfinite(size := norm(gradient))]
    typical = math.sqrt(sum(size**2 for size in sizes) / max(1, len(sizes)))
    names = [name for name in values if name in others or name.startswith("output")]
    pairs = [(name, values[name], others.get(name), 0.0) for name in names]
    for name in dict.fromkeys((*gradients, *other_gradients)):
        zero = torch.zeros_like(gradients[name] if name in gradients else other_gradients[name])
        here = gradients.get(name, zero), other_gradients.get(name, zero)
        pairs.append((f"the gradient of {name}", *here, typical))
    return next((f"{name} {off}" for name, a, b, size in pairs if (off := _off(a, b, bound, size))), "")


def _off(value: Any, found: Any, bound: float, typical: float) -> str:
    """Returns how a value differs from the model's; "" within ``bound`` times norm plus ``typical``."""
    if not isinstance(value, Tensor) or not isinstance(found, Tensor):
        differs = type(value) is not type(found) or (isinstance(value, (int, float, str, bool)) and value != found)
        return f"is {found!r:.80}, the model's is {value!r:.80}" if differs else ""
    for what in ("dtype", "shape", "requires_grad"):
        if getattr(value, what) != getattr(found, what):
            return f"has {what} {getattr(found, what)}, the model's has {getattr(value, what)}"
    off, size = distance(found, value), norm(value.to_dense().nan_to_num(0.0, 0.0, 0.0))
    return "" if not off or off <= bound * (size + typical) else f"is off by {off / (size or 1):.1e} of its size"
