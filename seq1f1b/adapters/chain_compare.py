"""Compares the stages of a cut, in a row, with the model itself: outputs, gradients and buffers, on a few tokens."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from seq1f1b.adapters.chain_watch import Refused
from seq1f1b.runtime.data_parallel import without_hooks
from seq1f1b.runtime.model_state import RandomState, attributes_of, keep_state, put_back, uncompiled

__all__ = ["Composite", "Sample", "compare", "sample_of"]

_BATCH, _TOKENS = 2, 8  # of the sample that is made
_ROUNDINGS = 8  # units of the last place, by which sums that are added in another order may differ
_BLOCK = 4096  # elements of a gradient that one number of its digest stands for


class Composite(Refused):
    """A stage would hand on several tensors as one value, which is taken apart in the graph.

    Attributes:
        name, value: of the graph's node.
    """

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"{name} is a {type(value).__name__}, and stages hand on tensors")
        self.name, self.value = name, value


@dataclass(frozen=True)
class Sample:
    """Arguments of the model's forward, by name.

    Attributes:
        needed: names of those that the first stage takes, in its order.
        text: what they are.
        is_made: nobody has given them.
    """

    arguments: dict[str, Any]
    needed: list[str]
    text: str
    is_made: bool


def sample_of(model: nn.Module, graph: fx.Graph, given: Any) -> Sample | None:
    """The arguments that were given, or token ids where forward takes these alone; None: unknown."""
    whose = type(model).__name__
    needed = [str(node.target) for node in graph.nodes if node.op == "placeholder" and not node.args]
    if given is not None:
        positional = given if isinstance(given, tuple) else () if isinstance(given, Mapping) else (given,)
        named = dict(given) if isinstance(given, Mapping) else {}
        try:
            bound = inspect.signature(type(model).forward).bind(model, *positional, **named)
        except TypeError as error:
            raise ValueError(
                f"sample does not fit forward of {whose}: {error}. Give its argument, a tuple of them, or a dict by "
                "name"
            ) from None
        arguments = dict(list(bound.arguments.items())[1:])
        return Sample(arguments, needed, "the sample", False)
    tokens = _token_ids(model, graph)
    if tokens is None:
        return None
    return Sample({needed[0]: tokens}, needed, f"token ids of shape {tuple(tokens.shape)}", True)


def _token_ids(model: nn.Module, graph: fx.Graph) -> Tensor | None:
    """Ids below the smallest embedding, where the only argument that must be given feeds one."""
    needed = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    if len(needed) != 1:
        return None
    tables = [(m.num_embeddings, m.weight.device) for m in model.modules() if isinstance(m, nn.Embedding)]
    feeds = False
    for user in needed[0].users:
        is_first = bool(user.args) and user.args[0] is needed[0]
        if user.op == "call_module" and is_first:
            feeds |= any(isinstance(m, nn.Embedding) for m in model.get_submodule(str(user.target)).modules())
        elif user.op == "call_function" and user.target in (F.embedding, torch.embedding):
            weight = next((n for n in user.all_input_nodes if n.op == "get_attr"), None)
            if weight is not None:
                table = model.get_parameter(str(weight.target))
                tables.append((table.shape[0], table.device))
                feeds = True
    if not feeds:
        return None
    count, device = min(tables, key=lambda table: table[0])
    ids = (torch.arange(_BATCH * _TOKENS, device=device) * 7 + 3) % count
    return ids.view(_BATCH, _TOKENS)


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The results of one run.

    Attributes:
        outputs: tensors and plain values of the output, by their place in it.
        gradients: digests, by the parameter's first name in the model.
        sizes: norms of the gradients, or the sum of those of its parts.
    """

    outputs: dict[str, Any]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, gradient: Tensor) -> None:
        found = _digest(gradient)
        self.gradients[name] = self.gradients[name] + found if name in self.gradients else found
        self.sizes[name] = self.sizes.get(name, 0.0) + float(torch.linalg.vector_norm(found))


class _Comparison:
    """
    Args:
        parts: the stages.
        handed_on: names of the values that each stage but the last hands on.
        without: arguments of a loss, which the model returns beside what the stages return.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Any],
        handed_on: Sequence[Sequence[str]],
        sample: Sample,
        without: Sequence[str],
    ) -> None:
        self._model, self._parts, self._handed_on = model, parts, handed_on
        self._sample, self._without = sample, without
        self._names = {id(p): name for name, p in model.named_parameters()}
        for part in parts:
            self._names |= {id(p): name for name, p in part.tied_parameters.items()}
        self._parameters = {id(p): p for module in (model, *parts) for p in module.parameters()}

    def run(self, is_training: bool) -> None:
        """Raises where the stages differ from the model."""
        mode = "training" if is_training else "evaluation"
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        state = RandomState(device)
        try:
            with self._as_found(is_training):
                whole = self._whole()
            state.restore()
            with self._as_found(is_training):
                try:
                    stages = self._in_a_row()
                except Refused:
                    raise
                except Exception as error:
                    raise Refused(
                        f"the stages of {type(self._model).__name__} fail on {self._sample.text}, in {mode} mode, and "
                        f"the model does not: {_told(error)}"
                    ) from error
        finally:
            state.restore()
        _Difference(type(self._model).__name__, f"on {self._sample.text}, in {mode} mode", whole, stages).check()

    @contextmanager
    def _as_found(self, is_training: bool) -> Iterator[None]:
        modules = [module for whole in (self._model, *self._parts) for module in whole.modules()]
        modes = [(module, module.training) for module in modules]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(uncompiled())
            stack.enter_context(keep_state((self._model, *self._parts), None, parameters=False))
            stack.enter_context(without_hooks([p for p in self._parameters.values() if p.is_leaf]))
            try:
                for module in modules:
                    module.training = is_training
                yield
            finally:
                for module, was in modes:
                    module.training = was

    def _whole(self) -> _Run:
        before = _buffers(self._model)
        output = self._model(**self._arguments(self._sample.arguments))
        tensors = dict(_places(output))
        if self._without:
            tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        run = _Run({name: _kept(value) for name, value in tensors.items()}, buffers=_buffers(self._model))
        self._check_buffers(before, run.buffers)
        with self._gradients_to(run, self._model):
            _backward([value for value in tensors.values() if isinstance(value, Tensor)], None)
        return run

    def _check_buffers(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Raises where several stages hold a buffer that forward changes: each would change its own."""
        for name, buffer in self._model.named_buffers():
            holders = [part.pipeline_place[0] for part in self._parts if any(b is buffer for b in part.buffers())]
            if len(holders) > 1 and not _equal(before[name], after[name]):
                raise Refused(
                    f"forward of {type(self._model).__name__} changes buffer {name}, and stages {holders} use it: each "
                    "would change its own. Make the modules that use it two modules"
                )

    def _in_a_row(self) -> _Run:
        given, needed = self._arguments(self._sample.arguments), self._sample.needed
        values: tuple[Any, ...] = tuple(given[name] for name in needed)
        kwargs = {name: value for name, value in given.items() if name not in needed and name not in self._without}
        steps: list[tuple[Any, list[Any], Any]] = []
        apart = [attributes_of(part.modules()) for part in self._parts]  # each runs in a process of its own
        for index, part in enumerate(self._parts):
            own = [_leaf(value) for value in values] if index else list(values)
            put_back(apart[index])
            output = part(*own, **kwargs)
            if not torch.is_grad_enabled():
                raise Refused(f"stage {index} of {type(self._model).__name__} leaves gradients off for the next one")
            steps.append((part, own, output))
            values = output if isinstance(output, tuple) else (output,)
            for name, value in zip(self._handed_on[index], values, strict=False):
                if isinstance(value, (tuple, list, dict)):
                    raise Composite(name, value)
                if not isinstance(value, Tensor):
                    raise Refused(
                        f"stage {index} of {type(self._model).__name__} would hand on {name}, a "
                        f"{type(value).__name__}, and stages hand on tensors: take it apart before the cut, or cut "
                        "elsewhere by at="
                    )
        found = dict(_places(steps[-1][2]))
        if self._without:
            found = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        run = _Run({name: _kept(value) for name, value in found.items()})
        gradients: Any = None
        for part, own, output in reversed(steps):
            tensors = [v for v in found.values() if isinstance(v, Tensor)] if gradients is None else None
            with self._gradients_to(run, part):
                if tensors is not None:
                    _backward(tensors, None)
                else:
                    _backward(list(output if isinstance(output, tuple) else (output,)), gradients)
            gradients = [value.grad if isinstance(value, Tensor) else None for value in own]
            self._check_stray(part)
        for part in self._parts:
            run.buffers |= _buffers(part)
        return run

    def _arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: v.detach() if isinstance(v, Tensor) else v for name, v in arguments.items()}

    @contextmanager
    def _gradients_to(self, run: _Run, module: nn.Module) -> Iterator[None]:
        """Within, a gradient of the module's parameters goes to the run as soon as it is complete, and is dropped."""

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            run.take(self._names[id(parameter)], parameter.grad)
            parameter.grad = None

        trained = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
        handles = [p.register_post_accumulate_grad_hook(take) for p in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_stray(self, part: Any) -> None:
        for key, parameter in self._parameters.items():
            if parameter.is_leaf and parameter.grad is not None:
                raise Refused(
                    f"stage {part.pipeline_place[0]} of {type(self._model).__name__} computes with {self._names[key]}, "
                    "which it does not hold: a copy of a module refers to the original by a closure, a hook or a "
                    "forward that was set on the instance"
                )


def compare(
    model: nn.Module, parts: Sequence[Any], handed_on: Sequence[Sequence[str]], sample: Sample, without: Sequence[str]
) -> str | None:
    """Raises ValueError, which names the first output, buffer or gradient that differs, unless all are equal.

    Returns why nothing was compared; None: all was. The model is as before afterwards: parameters, gradients, buffers,
    modes, attributes of modules, and generators.
    """
    comparison = _Comparison(model, parts, handed_on, sample, without)
    for is_training in (True, False):
        try:
            comparison.run(is_training)
        except Refused:
            raise
        except Exception as error:  # of the model itself
            text = f"forward of {type(model).__name__} fails on {sample.text}: {type(error).__name__}: {error}"
            if not sample.is_made:
                raise ValueError(text) from error
            return text
    return None


def tell_not_compared(model: nn.Module, why: str) -> None:
    warnings.warn(
        f"the stages of {type(model).__name__} were not compared with it: {why}. Give split the arguments of a small "
        "call "
        "as sample=, or check=False",
        stacklevel=5,
    )


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


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in module.named_buffers(remove_duplicate=False)}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _told(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".rstrip(".")
    if "leaf Variable that requires grad" not in text:
        return text
    return (
        f"{text}. A stage must not begin with an operation that changes what it is given in place: cut elsewhere by "
        "at=, or leave out inplace=True"
    )


def _backward(outputs: list[Any], gradients: Sequence[Tensor | None] | None) -> None:
    """Backward of what requires grad; gradients None: of fixed values that look random."""
    roots, seeds = [], []
    for i, output in enumerate(outputs):
        if not isinstance(output, Tensor) or not output.requires_grad:
            continue
        if gradients is None:
            numbers = torch.arange(output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
            seed: Tensor | None = torch.cos(numbers * 12.9898 + 78.233 * (i + 1)).to(output.dtype)
        else:
            seed = gradients[i]
        if seed is not None:
            roots.append(output)
            seeds.append(seed)
    if roots:
        torch.autograd.backward(roots, seeds)


def _digest(gradient: Tensor) -> Tensor:
    """A linear image of a gradient, in float64: distances of images estimate those of the gradients."""
    values = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    if values.numel() <= _BLOCK:
        return values.to("cpu", torch.float64)
    weights = torch.randn(_BLOCK, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")
    weights = weights.to(values.device)
    whole = values.numel() // _BLOCK * _BLOCK
    rows = [part.to(torch.float64) @ weights for part in torch.split(values[:whole].view(-1, _BLOCK), _BLOCK)]
    rest = values[whole:].to(torch.float64)
    return torch.cat([*rows, rest]).cpu()


@dataclass(frozen=True)
class _Difference:
    whose: str
    where: str
    whole: _Run
    stages: _Run

    def check(self) -> None:
        """Raises for the first difference."""
        whole, stages = self.whole, self.stages
        theirs, ours = list(whole.outputs.items()), list(stages.outputs.values())
        if len(theirs) != len(ours):
            self._refuse(f"the model returns {len(theirs)} values, the last stage {len(ours)}", _OUTPUT)
        for (name, value), found in zip(theirs, ours, strict=True):
            self._compare_output(name, value, found)
        for name, buffer in stages.buffers.items():
            if name in whole.buffers and not _equal(buffer, whole.buffers[name]):
                self._refuse(f"buffer {name} holds other values after a forward", _BUFFER)
        typical = math.sqrt(sum(size**2 for size in whole.sizes.values()) / max(1, len(whole.sizes)))
        eps = max((torch.finfo(v.dtype).eps for _, v in theirs if _is_real(v)), default=2**-24)
        for name in [*whole.gradients, *(stages.gradients.keys() - whole.gradients.keys())]:
            wanted, found = whole.gradients.get(name), stages.gradients.get(name)
            if wanted is None or found is None:
                present = found if wanted is None else wanted
                assert present is not None
                zero = torch.zeros_like(present)
                wanted, found = zero if wanted is None else wanted, zero if found is None else found
            distance = float(torch.linalg.vector_norm(wanted - found))
            size = max(whole.sizes.get(name, 0.0), stages.sizes.get(name, 0.0))
            both_not_finite = not math.isfinite(whole.sizes.get(name, 0.0)) and not math.isfinite(size)
            if not distance <= _ROUNDINGS * eps * (size + typical) and not both_not_finite:
                self._refuse(f"the gradient of {name} is off by {distance / (size or 1):.1e} of its size", _GRADIENT)

    def _compare_output(self, name: str, value: Any, found: Any) -> None:
        if not isinstance(value, Tensor) or not isinstance(found, Tensor):
            if type(value) is not type(found) or (isinstance(value, (int, float, str, bool)) and value != found):
                self._refuse(f"{name} is {found!r}, the model's is {value!r}", _OUTPUT)
            return
        for what in ("dtype", "shape", "requires_grad"):
            if getattr(value, what) != getattr(found, what):
                text = f"{name} has {what} {getattr(found, what)}, the model's has {getattr(value, what)}"
                self._refuse(text, _GRADIENT if what == "requires_grad" else _OUTPUT)
        if not _is_real(value):
            if not torch.equal(value, found):
                self._refuse(f"{name} has other values", _OUTPUT)
            return
        wanted, had = value.detach().double(), found.detach().double()
        if torch.equal(wanted.isfinite(), had.isfinite()):
            wanted, had = wanted.nan_to_num(0.0, 0.0, 0.0), had.nan_to_num(0.0, 0.0, 0.0)
        distance, size = float(torch.linalg.vector_norm(wanted - had)), float(torch.linalg.vector_norm(wanted))
        if not distance <= _ROUNDINGS * torch.finfo(value.dtype).eps * size:
            self._refuse(f"{name} is off by {distance / (size or 1):.1e} of its size", _OUTPUT)

    def _refuse(self, what: str, cause: str) -> None:
        raise Refused(f"the stages of {self.whose} do not compute what it does, {self.where}: {what}. {cause}")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_OUTPUT = (
    "Outside of its blocks, forward does what a trace does not record: it reads a value that changes, swaps a "
    "function or a tensor, or has a generator begin anew. Move that into a block"
)
_BUFFER = (
    "Outside of its blocks, forward changes a buffer in a way that a trace does not record: move that into a block"
)
_GRADIENT = (
    "Outside of its blocks, forward stops or changes gradients in a way that a trace does not record: move that into a "
    "block"
)
