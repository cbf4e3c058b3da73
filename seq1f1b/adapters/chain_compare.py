"""Compares the stages of a cut, in a row, with the model itself: outputs, gradients and buffers, on a few tokens."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from seq1f1b.adapters.chain_trace import Refused
from seq1f1b.runtime.data_parallel import without_hooks
from seq1f1b.runtime.model_state import RandomState, attributes_of, keep_state, put_back, uncompiled

__all__ = ["Composite", "compare"]

_BATCH, _TOKENS = 2, 8  # of the sample that is made
_ROUNDINGS = 8  # units of the last place, by which sums that are added in another order may differ


class Composite(Refused):
    """A stage would hand on several tensors as one value, which is taken apart in the graph.

    Attributes:
        name, value: of the graph's node.
    """

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"{name} is a {type(value).__name__}, and stages hand on tensors")
        self.name, self.value = name, value


def compare(
    model: nn.Module,
    graph: fx.Graph,
    without: Sequence[str],
    parts: Sequence[Any],
    handed_on: Sequence[Sequence[str]],
    sample: Any,
) -> None:
    """Raises ValueError, which names the first output, buffer or gradient that differs, unless all are equal.

    Warns where nothing was compared. The model is as before afterwards: parameters, gradients, buffers, modes,
    attributes of modules, and generators.

    Args:
        graph: the model's.
        without: arguments of a loss, which stages do not take.
        handed_on: names of the values that each stage hands on.
        sample: as :func:`seq1f1b.split` takes it.
    """
    whose = type(model).__name__
    needed = [str(node.target) for node in graph.nodes if node.op == "placeholder" and not node.args]
    arguments = _token_ids(model, graph) if sample is None else _bound(model, sample)
    text = "the sample" if sample is not None else f"token ids of shape {(_BATCH, _TOKENS)}"
    why = "its arguments are unknown"
    if arguments is not None:
        given = {n: v.detach() if isinstance(v, Tensor) else v for n, v in arguments.items() if n not in without}
        rest = {name: value for name, value in given.items() if name not in needed}
        why = ""
        state = RandomState(next((p.device for p in model.parameters()), torch.device("cpu")))
        for is_training in (True, False):
            where = f"{text}, in {'training' if is_training else 'evaluation'} mode"
            try:
                with _as_found((model, *parts), is_training):
                    whole = _Row(model, [model])
                    whole.forward((), given, [()])
                    _check_buffers(model, parts, whole.changed)
                    whole.backward()
            except Refused:
                raise
            except Exception as error:  # of the model itself
                why = f"forward of {whose} fails on {text}: {type(error).__name__}: {error}"
                if sample is not None:
                    raise ValueError(why) from error
                break
            finally:
                state.restore()
            try:
                with _as_found((model, *parts), is_training):
                    stages = _Row(model, parts)
                    stages.forward([given[name] for name in needed], rest, handed_on)
                    stages.backward()
            except Refused:
                raise
            except Exception as error:
                raise Refused(
                    f"the stages of {whose} fail on {where}, and the model does not: {type(error).__name__}: {error}"
                ) from error
            finally:
                state.restore()
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
    """The arguments that were given, by name."""
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
    """Ids below the smallest embedding, where the only argument that must be given feeds one; None: unknown."""
    needed = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    called = [user for node in needed for user in node.users if user.op == "call_module" and user.args[:1] == (node,)]
    fed = [m for user in called for m in model.get_submodule(str(user.target)).modules()]
    if len(needed) != 1 or not any(isinstance(m, nn.Embedding) for m in fed):
        return None
    table = min((m for m in model.modules() if isinstance(m, nn.Embedding)), key=lambda m: m.num_embeddings)
    ids = (torch.arange(_BATCH * _TOKENS, device=table.weight.device) * 7 + 3) % table.num_embeddings
    return {str(needed[0].target): ids.view(_BATCH, _TOKENS)}


# -- runs --------------------------------------------------------------------------------------------------------------


class _Row:
    """Modules that are run in a row, forward and backward: the stages, or the model by itself.

    Attributes:
        outputs: tensors and plain values of the output, by their place in it.
        gradients: by the parameter's first name in the model.
        sizes: norms of the gradients, or the sum of those of its parts.
        changed: names of the buffers that forward has changed.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Any]) -> None:
        self._model, self._parts = model, parts
        self._names = {id(p): name for name, p in model.named_parameters()}
        for part in parts:
            self._names |= {id(p): name for name, p in getattr(part, "tied_parameters", {}).items()}
        self._leaves = {id(p): p for m in (model, *parts) for p in m.parameters() if p.is_leaf}
        self._steps: list[tuple[list[Any], list[Any]]] = []  # what each part was given, and has returned
        self.outputs: dict[str, Any] = {}
        self.gradients: dict[str, Tensor] = {}
        self.sizes: dict[str, float] = {}
        self.buffers: dict[str, Tensor] = {}
        self.changed: set[str] = set()

    def forward(self, values: Sequence[Any], kwargs: Mapping[str, Any], handed_on: Sequence[Sequence[str]]) -> None:
        """handed_on: names of the values that each part hands on."""
        whose = type(self._model).__name__
        before = _buffers(self._parts)
        apart = [attributes_of(part.modules()) for part in self._parts]  # each runs in a process of its own
        for index, part in enumerate(self._parts):
            own = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values]
            put_back(apart[index])
            output = part(*own, **kwargs)
            if not torch.is_grad_enabled():
                raise Refused(f"stage {index} of {whose} leaves gradients off for the next one")
            values = output if isinstance(output, tuple) else (output,)
            self._steps.append((own, list(values)))
            for name, value in zip(handed_on[index], values, strict=False):
                if isinstance(value, (tuple, list, dict)):
                    raise Composite(name, value)
                if not isinstance(value, Tensor):
                    raise Refused(
                        f"stage {index} of {whose} would hand on {name}, a {type(value).__name__}, and stages hand on "
                        "tensors: take it apart before the cut, or cut elsewhere by at="
                    )
        found = {place: value for place, value in _places(output) if value is not None}
        self._steps[-1] = own, list(found.values())
        self.outputs = {place: _kept(value) for place, value in found.items()}
        self.buffers = _buffers(self._parts)
        self.changed = {name for name, buffer in self.buffers.items() if not _equal(before[name], buffer)}

    def backward(self) -> None:
        """Starts with fixed gradients of the outputs."""
        outputs = self._steps[-1][1]
        seeds = [_seed(i, output) if isinstance(output, Tensor) else None for i, output in enumerate(outputs)]
        for index, (own, returned) in reversed(list(enumerate(self._steps))):
            pairs = zip(returned, seeds, strict=True)
            known = [(o, s) for o, s in pairs if s is not None and isinstance(o, Tensor) and o.requires_grad]
            if known:
                torch.autograd.backward([o for o, _ in known], [s for _, s in known])
            seeds = [value.grad if isinstance(value, Tensor) else None for value in own]
            self._take_gradients(index)

    def _take_gradients(self, index: int) -> None:
        """Takes the gradients that a backward of a part has left on parameters."""
        own = {id(p) for p in self._parts[index].parameters()}
        for key, parameter in self._leaves.items():
            if parameter.grad is None:
                continue
            name, gradient = self._names[key], parameter.grad
            if key not in own:
                raise Refused(
                    f"stage {index} of {type(self._model).__name__} computes with {name}, which it does not hold: a "
                    "copy of a module refers to the original by a closure, a hook or a forward that was set on the "
                    "instance"
                )
            parameter.grad = None
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient
            self.sizes[name] = self.sizes.get(name, 0.0) + _norm(gradient)


@contextmanager
def _as_found(wholes: Sequence[nn.Module], is_training: bool) -> Iterator[None]:
    modes = [(module, module.training) for whole in wholes for module in whole.modules()]
    parameters = {id(p): p for whole in wholes for p in whole.parameters() if p.is_leaf}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncompiled())
        stack.enter_context(keep_state(wholes, None, parameters=False))
        stack.enter_context(without_hooks(list(parameters.values())))
        try:
            for module, _ in modes:
                module.training = is_training
            yield
        finally:
            for module, mode in modes:
                module.training = mode


# -- values ------------------------------------------------------------------------------------------------------------


def _places(value: Any, place: str = "output") -> Iterator[tuple[str, Any]]:
    """The tensors and other values of an output, by place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _places(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _places(item, f"{place}[{i}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _places(getattr(value, each.name), f"{place}.{each.name}")
    else:
        yield place, value


def _kept(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _buffers(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {n: t.detach().clone() for part in parts for n, t in part.named_buffers(remove_duplicate=False)}


def _seed(index: int, output: Tensor) -> Tensor:
    """Fixed values that look random, as the gradient of an output."""
    numbers = torch.arange(output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
    return torch.cos(numbers * 12.9898 + 78.233 * (index + 1)).to(output.dtype)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense()
    return dense.to(torch.promote_types(dense.dtype, torch.float64))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))


def _check_buffers(model: nn.Module, parts: Sequence[Any], changed: set[str]) -> None:
    """Raises where several stages hold a buffer that forward changes."""
    for name, buffer in model.named_buffers():
        holders = [index for index, part in enumerate(parts) if any(b is buffer for b in part.buffers())]
        if len(holders) > 1 and name in changed:
            raise Refused(
                f"forward of {type(model).__name__} changes buffer {name}, and stages {holders} use it: each would "
                "change its own. Move it into a block, and make a module that several stages use several modules"
            )


def _difference(whole: _Row, stages: _Row) -> str:
    """The first difference, in words; "": none."""
    theirs, ours = list(whole.outputs.items()), list(stages.outputs.values())
    if len(theirs) != len(ours):
        return f"the model returns {len(theirs)} values, the last stage {len(ours)}"
    for (name, value), found in zip(theirs, ours, strict=True):
        difference = _difference_of_output(value, found)
        if difference:
            return f"{name} {difference}"
    for name, buffer in stages.buffers.items():
        if name in whole.buffers and not _equal(buffer, whole.buffers[name]):
            return f"buffer {name} holds other values after a forward"
    typical = math.sqrt(sum(size**2 for size in whole.sizes.values()) / max(1, len(whole.sizes)))
    eps = max((torch.finfo(v.dtype).eps for _, v in theirs if _is_real(v)), default=2**-24)
    for name in [*whole.gradients, *(stages.gradients.keys() - whole.gradients.keys())]:
        here = [_wide(row.gradients[name]) for row in (whole, stages) if name in row.gradients]
        distance = _norm(here[0] - here[1] if len(here) == 2 else here[0])
        before, after = whole.sizes.get(name, 0.0), stages.sizes.get(name, 0.0)
        are_finite = math.isfinite(before) or math.isfinite(after)
        size = max(before, after)
        if not distance <= _ROUNDINGS * eps * (size + typical) and are_finite:
            return f"the gradient of {name} is off by {distance / (size or 1):.1e} of its size"
    return ""


def _difference_of_output(value: Any, found: Any) -> str:
    if not isinstance(value, Tensor) or not isinstance(found, Tensor):
        differs = type(value) is not type(found) or (isinstance(value, (int, float, str, bool)) and value != found)
        return f"is {found!r}, the model's is {value!r}" if differs else ""
    for what in ("dtype", "shape", "requires_grad"):
        if getattr(value, what) != getattr(found, what):
            return f"has {what} {getattr(found, what)}, the model's has {getattr(value, what)}"
    if not _is_real(value):
        return "" if torch.equal(value, found) else "has other values"
    wanted, had = _wide(value), _wide(found)
    if torch.equal(wanted.isfinite(), had.isfinite()):
        wanted, had = wanted.nan_to_num(0.0, 0.0, 0.0), had.nan_to_num(0.0, 0.0, 0.0)
    distance, size = _norm(wanted - had), _norm(wanted)
    is_close = distance <= _ROUNDINGS * torch.finfo(value.dtype).eps * size
    return "" if is_close else f"is off by {distance / (size or 1):.1e} of its size"


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
