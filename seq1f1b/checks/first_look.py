"""Check of a stage in the first step of a shape, for modules that mix tokens without the engine's knowledge.

At the end of the step, after all units, the stage runs again, alone and forward only, on the first tokens of a unit: as
two segments and as one. A difference above the rounding of the stage's dtype is a finding, placed at the first module
that differs. Modules that mix tokens show, causal or not, and modules that count tokens from zero.

A token counts as different only if every row differs there: different rounding of its scores may make a router send one
token of a row to another expert.

Some stages cannot run alone, and a warning says so: stages under FSDP2 or ``sequence_parallel``, stages that talk to
other processes or draw random numbers, stages with arguments of unknown value for other tokens, and stages that take a
fixed number of tokens. Later steps are not checked.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from seq1f1b import _C
from seq1f1b.attention.causal import inside_step
from seq1f1b.attention.unit import LiveUnit, current, enter
from seq1f1b.engine.features import Feature, Received
from seq1f1b.engine.findings import ATTENTION, RANDOMNESS, STATE, STATISTICS, Finding
from seq1f1b.engine.model_state import ComparableRun, RandomState, is_abstract, keep_state
from seq1f1b.engine.replicas import Fsdp, without_wrapper
from seq1f1b.engine.split_backward import is_plain
from seq1f1b.engine.stage import StageStep
from seq1f1b.nested import mapped, tensors_of
from seq1f1b.placement import step_on
from seq1f1b.transport import LoopbackGroup

__all__: list[str] = []

_ROWS, _TOKENS = 2, 16  # largest sample
_FEWEST = 8  # tokens that make a sample; a shorter unit's tokens are repeated
# (eps, difference relative to a token's norm): the first row below the coarsest eps of the stage's dtypes holds. Rows:
# bfloat16; float16 and TF32; float32; float64. The correct model types of docs/reference/models.md differ by at most
# 4e-7 in float32 and 1.2e-2 in bfloat16.
_LEAST = ((5e-3, 3e-2), (5e-4, 5e-3), (1e-10, 2e-5), (0.0, 1e-9))
_TF32 = 1e-3
_SHARED_DROPOUTS = ("feature_dropout", "dropout1d", "dropout2d", "dropout3d")
_MOST = 1 << 20  # elements of the largest tensor compared between modules
_alone = threading.Lock()  # ranks in threads share modules: only one rank at a time saves and restores module state


class FirstLook(Feature):
    """The check of a stage, once for every kind of step: training or not, and names of keyword arguments."""

    is_for_new = True

    def __init__(self, stage: Any, options: Any) -> None:
        self.is_idle = options.attention == "unchecked"
        self._shares_tokens = options.sequence_parallel != (0, 1)
        self._known: set[Any] = set()  # kinds of steps already compared by values

    def start(self, step: StageStep) -> bool:
        rows, stage = step.batch.rows, step.stage
        several = next((m for m, row in enumerate(rows) if len(row) > 1), None)
        if several is None:
            return False
        parameters = [p for module in stage.modules for p in module.parameters()]
        is_sharded = any(isinstance(p, Fsdp) for p in stage.wrappers) or any(hasattr(p, "to_local") for p in parameters)
        why = "shares its tokens with other ranks" if self._shares_tokens else "is sharded" if is_sharded else ""
        # The reason why the stage cannot run alone; "" if there is none.
        self._why = "has no values" if any(p.is_meta for p in parameters) else why
        first = max(range(len(rows)), key=lambda m: min(rows[m][0], _FEWEST))
        self._first = sum(map(len, rows[:first]))  # cell of the unit whose tokens are taken
        self._heard = sum(map(len, rows[:several])) + 1  # not the first unit, in which DDP may exchange its buckets
        self._sample: Sample | None = None
        self._kind: Any = None
        self._figures: dict[str, Any] = {}
        return True

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        if unit.is_again:
            return None
        if unit.cell == self._first and not self._why:
            batch, length, kwargs = self._step.batch, self._step.lengths[unit.cell], dict(self._step.kwargs_of(unit))
            self._kind = batch.training, tuple(sorted(kwargs))
            # Another argument with a tensor, a mask for example, has no known value for other tokens.
            if all(batch.arg_rules.get(name) == "slice" for name, value in kwargs.items() if tensors_of(value)):
                most = length if length >= _FEWEST else sum(batch.rows[unit.microbatch])
                self._sample = sample_of((inputs, kwargs), batch.seq_dim, length, most, self._step.stage.modules)
        return self._listening() if unit.cell == self._heard else None

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Finds whether the unit talks to other processes, as experts over several processes do.

        Such a stage must not run more often than its partners.
        """
        own = self._step.stage.group and self._step.stage.group.process_group
        before = _collectives(own)
        yield
        if before != _collectives(own):
            self._why = "talks to other processes"

    def look_back(self) -> None:
        stage, start = self._step.stage, time.perf_counter()
        sample, self._sample = self._sample, None
        if sample is not None and self._kind in self._known:
            return
        found = None if sample is None or self._why else Look(stage, sample).findings()
        if found is None:
            why = self._why or "draws random numbers, or takes no other tokens or arguments"
            stage.findings.say(
                f"stage {stage.index} was not compared in segments with the whole, because it {why}: let engine.verify "
                "compare its bare modules"
            )
            return
        self._figures = {"look_seconds": time.perf_counter() - start}
        stage.findings.judge(found)
        self._known.add(self._kind)  # not after an error of judge: the next try raises the error again

    def figures(self) -> dict[str, Any]:
        return self._figures


def _collectives(own: Any) -> list[int]:
    """Returns the number of collectives begun by this process in each process group except the pipeline's own."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    counts = []
    for group in list(distributed._world.pg_map) if distributed is not None else ():
        if group is not own:
            try:
                counts.append(group._get_sequence_number_for_group())
            except RuntimeError:  # from a backend without a count
                counts.append(-1)
    return counts


# -- a few tokens of a unit's arguments --------------------------------------------------------------------------------


@dataclass
class Sample:
    """The first tokens of a unit's arguments.

    Attributes:
        values: the positional and the keyword arguments.
        dims: token dimension of each tensor in ``values``, in order; -1: a tensor without tokens.
        sizes: tokens of the two segments.
    """

    values: Any
    dims: list[int]
    sizes: tuple[int, int]

    def arguments(self, begin: int, length: int) -> Any:
        """Returns the arguments for ``length`` tokens from ``begin``."""
        dims = iter(self.dims)

        def part(tensor: Tensor) -> Tensor:
            dim = next(dims)
            return (tensor if dim < 0 else tensor.narrow(dim, begin, length)).clone()

        return mapped(self.values, part)


def sample_of(values: Any, seq_dim: int, length: int, most: int, modules: Iterable[nn.Module]) -> Sample | None:
    """Copies up to ``most`` tokens of arguments of ``length`` tokens, for a stage of these modules.

    Tokens lie along ``seq_dim``, as in sliced keyword arguments. In another layout from an earlier stage, the only
    dimension of the segment's length holds the tokens. Returns None if the token dimension is unknown.
    """
    tensors, most = tensors_of(values), min(_TOKENS, most)
    dims = [dim for tensor in tensors if (dim := _tokens_of(tensor, seq_dim, length)) is not None]
    if not tensors_of(values[0]) or most < 2 or len(dims) < len(tensors) or dims[0] == -1:
        return None
    sizes = _choose_sizes(most, modules)
    rows = tensors[0].shape[_row_of(tensors[0], dims[0])]
    pairs = enumerate(zip(tensors, dims, strict=True))
    taken = iter([_taken(tensor.detach(), dim, rows, sizes, is_first=i == 0) for i, (tensor, dim) in pairs])
    return Sample(mapped(values, lambda _: next(taken)), dims, sizes)


def _tokens_of(tensor: Tensor, seq_dim: int, length: int) -> int | None:
    """Returns the token dimension of a tensor; -1: no tokens; None: several dimensions may be the tokens'."""
    if tensor.dim() > seq_dim and tensor.shape[seq_dim] == length:
        return seq_dim
    found = [dim for dim, size in enumerate(tensor.shape) if size == length]
    return found[0] if len(found) == 1 else None if found else -1


def _row_of(tensor: Tensor, dim: int) -> int:
    return min(1, tensor.dim() - 1) if dim == 0 else 0


def _taken(tensor: Tensor, dim: int, rows: int, sizes: tuple[int, int], *, is_first: bool) -> Tensor:
    """Copies some tokens of a tensor. ``is_first``: the tensor holds the tokens themselves, so their order is free."""
    if dim < 0:
        return tensor.clone()
    row = _row_of(tensor, dim)
    has_rows = row != dim and tensor.shape[row] == rows and (dim > 0 or tensor.dim() > 2)
    if has_rows:
        tensor = tensor.narrow(row, 0, min(_ROWS, rows))
    wanted = torch.arange(sum(sizes), device=tensor.device)  # a short unit repeats its tokens, a short mask its last
    wanted = wanted % tensor.shape[dim] if is_first else wanted.clamp(max=tensor.shape[dim] - 1)
    tokens = tensor.index_select(dim, wanted)
    if has_rows and rows < _ROWS:  # the second row holds the tokens in another order
        tokens = torch.cat([tokens, tokens.roll(1 + sum(sizes) // 3, dim) if is_first else tokens], row)
    return _varied(tokens, dim) if is_first else tokens


def _choose_sizes(most: int, modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Returns the tokens of two unequal segments; if possible, no weight has a dimension of such a size or the sum."""
    unwanted = {size for module in modules for p in module.parameters() for size in p.shape} | {_ROWS}
    for length in range(most, max(2, most // 2), -1):
        for size in range(length // 2 + 1, length - 1):
            if not {length, size, length - size} & unwanted:
                return size, length - size
    second = max(1, most * 3 // 8)
    return most - second, second


def _varied(tokens: Tensor, dim: int) -> Tensor:
    # Equal tokens would hide a module that mixes tokens.
    if bool((tokens != tokens.narrow(dim, 0, 1)).any()):
        return tokens
    numbers = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    if tokens.is_floating_point():
        return tokens + torch.cos(numbers * 1.7).to(tokens.dtype) * (0.1 + tokens.abs())
    return numbers.to(tokens.dtype) % (tokens + 1) if bool((tokens > 0).all()) else tokens


# -- notes -------------------------------------------------------------------------------------------------------------


class _Watch(ComparableRun):
    """A comparable run of a stage, with notes on the stage's calls. Tokens are recognized by the size of a dimension.

    Args:
        lengths: numbers of tokens in the calls, of segments and of all segments so far.
    Attributes:
        noted: calls of this package: "attends" for causal_attention, "carries" for carry_in and carry_out.
        foreign: the last attention of tokens to tokens by code other than this package's, in words; "" if none.
        dropout: name of a called dropout with one random number for all tokens; "" if none.
        eps: eps of the narrowest dtype of a result.
    """

    def __init__(self, lengths: Collection[int]) -> None:
        super().__init__(None)
        self._lengths = lengths
        self.noted: set[str] = set()
        self.foreign = self.dropout = ""
        self.eps = torch.finfo(torch.float64).eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self.eps = max([self.eps, *map(_eps, tensors_of(result))])
        with suppress(Exception):  # a call may have an unknown form, and a check must not end a correct step
            self._note(func, [*args, *(kwargs or {}).values()])
        return result

    def _note(self, func: Any, given: Sequence[Tensor]) -> None:
        name = func.__name__.partition(".")[0].strip("_")
        if name in ("softmax", "log_softmax"):
            if self._tokens_in(given[0].shape) > 1:
                self.foreign = f"takes a {name} over scores of tokens by tokens"
        elif ("attention" in name or "flash_attn" in name) and getattr(func, "namespace", "") != "seq1f1b":
            if "varlen" in name or all(self._tokens_in(tensor.shape) for tensor in given[:2]):
                self.foreign = f"calls {name}"
        elif name in _SHARED_DROPOUTS and self._tokens_in(given[0].shape[2:]):
            self.dropout = name

    def _tokens_in(self, shape: Sequence[int]) -> int:
        """Returns the number of dimensions that hold tokens."""
        return sum(size in self._lengths for size in shape)


# -- runs --------------------------------------------------------------------------------------------------------------

Event: TypeAlias = "tuple[int, int, str, int]"
"""A module is called, or has returned: id of the module whose code made the tensors, id of this one, "in" or "out", and
how many of these came before."""


_Values: TypeAlias = "dict[Event, list[Tensor | None]]"  # for one segment
_OUTPUT: Event = (0, 0, "stage", 0)


@contextmanager
def _noted(parts: Collection[nn.Module], unit: LiveUnit, values: _Values) -> Iterator[None]:
    """Copies the arguments and results of the unit's modules, in order, without large tensors."""
    # Forward hooks would also run for ranks in other threads of a shared module, so __call__ is replaced.
    call, stack = nn.Module.__call__, [0]

    def note(maker: int, module: nn.Module, kind: str, value: Any) -> None:
        event = next(event for i in count() if (event := (maker, id(module), kind, i)) not in values)
        tensors = [] if is_abstract() else tensors_of(value)
        values[event] = [t.detach().clone() if t.numel() <= _MOST else None for t in tensors]

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if current() is not unit or module not in parts:
            return call(module, *args, **kwargs)
        note(stack[-1], module, "in", (args, kwargs))
        stack.append(id(module))
        try:
            output = call(module, *args, **kwargs)
        finally:
            stack.pop()
        note(id(module), module, "out", output)
        return output

    nn.Module.__call__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def _run_segments(run: Callable[[LiveUnit], None], sizes: Sequence[int], device: torch.device) -> None:
    """Calls a function for each segment of one micro-batch, forward only, with a KV cache and a step of its own."""
    group = LoopbackGroup(1)[0]
    order = _C.schedule_from_text(" ".join(f"F0.{s}" for s in range(len(sizes))), 0)
    program = _C.program_lower(order, 0, False, 0, None)
    executor = _C.executor_create(program, 0, group.group, _C.kv_cache_create(), [], True, {})
    units: list[LiveUnit] = []

    def run_unit(kind: int, stage: int, cell: int, received: Received) -> None:
        unit = LiveUnit(stage, 0, cell, cell, False, units[-1] if units else None)
        unit.is_last, unit.is_whole = cell == len(sizes) - 1, len(sizes) == 1
        units.append(unit)
        enter(unit)
        run(unit)

    step = group.begin_step(training=False)
    with inside_step(), step_on(device):
        _C.executor_step(executor, step, False, sum(sizes), array("q", sizes), run_unit)


class Look:
    """Runs of one stage outside the pipeline.

    Args:
        stage: the stage, or an object with the attributes that are read here.
    """

    def __init__(self, stage: Any, sample: Sample) -> None:
        module = stage.module
        self._module = without_wrapper(module) if isinstance(module, nn.Module) else module
        self._modules = [self._module] if isinstance(self._module, nn.Module) else []
        self._parts = dict.fromkeys(part for module in self._modules for part in module.modules())
        self._stage, self._sample = stage, sample
        named = ((part, part.named_parameters(recurse=False)) for part in self._parts)
        self._zero = [part for part, own in named if any(_is_zero(name, p) for name, p in own)]
        self._watch = _Watch({*sample.sizes, sum(sample.sizes)})

    def findings(self) -> list[Finding] | None:
        """Returns the findings; None if the stage cannot run alone, for example because it draws random numbers."""
        sizes, found = self._sample.sizes, list[Finding]()
        try:
            first, second = self._run(sizes)
            (whole,) = self._run((sum(sizes),))
            with torch._C.DisableTorchFunction():  # a verification's mode counts the stage's operations, not ours
                differences = list(_differences(whole, first, second, sizes, self._least()))
                if any(self._tells(event) for event, _, _ in differences):
                    found.append(self._explained(*differences[0]))
        except Exception:  # for example from a stage that takes a fixed number of tokens
            return None
        if self._watch.dropout:
            what = f"calls {self._watch.dropout}, which draws one number for all tokens"
            found.append(Finding(RANDOMNESS, f"stage {self._stage.index}", what))
        return found

    def _run(self, sizes: Sequence[int]) -> list[_Values]:
        """Returns each segment's tensors to compare. Raises RuntimeError if the stage has drawn random numbers."""
        result = list[_Values]()

        def run(unit: LiveUnit) -> None:
            unit.watch = self._watch
            args, kwargs = self._sample.arguments(sum(sizes[: unit.segment]), sizes[unit.segment])
            values: _Values = {}
            # State that the module itself keeps between segments has no gradient and belongs to no micro-batch.
            kept = keep_state(self._modules, None, parameters=False, gradients=False)
            with _alone, kept, _noted(self._parts, unit, values), self._watch:
                output = self._module(*args, **kwargs)
            result.append({**values, _OUTPUT: [t.detach().clone() for t in tensors_of(output)]})

        state = RandomState(self._stage.device)
        try:
            with torch.no_grad():
                _run_segments(run, sizes, self._stage.device)
        finally:
            draws = not state.is_current()
            if draws and not (self._stage.in_threads and self._stage.num_stages > 1):  # threads share generators
                state.restore()
        if draws:
            raise RuntimeError("no two runs are alike")
        return result

    def _least(self) -> float:
        """Returns the smallest relative difference of a token that counts."""
        given = [*tensors_of(self._sample.values), *(p for module in self._modules for p in module.parameters())]
        eps = max([self._watch.eps, *map(_eps, given)])
        is_exact = self._stage.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
        if eps > 1e-10 and not is_exact:
            eps = max(eps, _TF32)
        return next(least for above, least in _LEAST if eps > above)

    def _tells(self, event: Event) -> bool:
        """Returns whether a difference at the event is the stage's: in its output, or before zero weights."""
        # Zero weights, as of projections before their first step, hide a difference from the output.
        _, module, kind, _ = event
        if kind == "out":  # a zero parameter may scale the results of the children; carried state may correct these
            carries = "carries" in self._watch.noted
            return not carries and any(module == id(child) for part in self._zero for child in part.children())
        return event == _OUTPUT or any(module == id(part) for part in self._zero)

    def _explained(self, event: Event, is_causal: bool, error: float) -> Finding:
        """Returns the finding for an event: the module's name and the likely cause."""
        place, maker = f"stage {self._stage.index}", event[0]
        for name, part in ((name, part) for module in self._modules for name, part in module.named_modules()):
            if id(part) == maker or (not maker and part is self._module):
                place += f", {name.removeprefix('_orig_mod').lstrip('.') or 'itself'} ({type(part).__name__})"
                break
        if self._watch.foreign and "attends" not in self._watch.noted:  # each segment would only see itself
            what = f"differs by {error:.2g} of a token's norm, and the stage {self._watch.foreign}"
            return Finding(ATTENTION, place, what)
        cause, what = STATE, "begins anew in every segment"
        if not is_causal:
            cause = STATISTICS
            what = "gives a token another value where later tokens are in its segment, or where the segment is longer"
        return Finding(cause, place, f"{what}: a token differs by {error:.2g} of its norm")


def _eps(tensor: Tensor) -> float:
    is_usual = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return torch.finfo(tensor.dtype).eps if is_usual else 0.0


def _is_zero(name: str, parameter: Tensor) -> bool:
    is_weight = "bias" not in name and is_plain(parameter) and parameter.is_floating_point() and parameter.numel() > 0
    return is_weight and not bool(parameter.any())


# -- comparison --------------------------------------------------------------------------------------------------------


def _differences(
    whole: _Values, first: _Values, second: _Values, sizes: tuple[int, int], allowed: float
) -> Iterator[tuple[Event, bool, float]]:
    """Yields the events that differ by more than rounding allows between runs in one and in two segments, in order.

    With each come whether the first segment agrees with the whole, and the largest error relative to a token's norm.
    """
    for event in (event for event in whole if event in first and event in second):
        found = list[Tensor]()
        for tensors in zip(whole[event], first[event], second[event], strict=False):
            ways = [_errors(a, torch.cat([b, c], dim), dim) for dim, a, b, c in _ways(*tensors, sizes)]
            found += ways[-1:] if all(bool((errors > allowed).any()) for errors in ways) else []
        if found:
            is_causal = not any(bool((errors[: sizes[0]] > allowed).any()) for errors in found)
            yield event, is_causal, max(float(errors.max()) for errors in found)


def _ways(one: Any, first: Any, second: Any, sizes: tuple[int, int]) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yields the token dimension and the tensors; twice if tokens and rows share a dimension, for the two layouts."""
    length, tensors = sum(sizes), (one, first, second)
    is_strided = all(type(t) is Tensor and t.layout == torch.strided and not t.is_nested for t in tensors)
    for dim, size in enumerate(one.shape if is_strided else ()):
        rows = size // length
        shapes = [(*one.shape[:dim], rows * n, *one.shape[dim + 1 :]) for n in (length, *sizes)]
        if rows and [tuple(t.shape) for t in tensors] == shapes:
            if rows == 1:
                yield dim, one, first, second
            else:
                for at, apart in ((dim + 1, (rows, -1)), (dim, (-1, rows))):
                    a, b, c = (torch.unflatten(t, dim, apart) for t in tensors)
                    yield at, a, b, c
            return


def _errors(one: Tensor, other: Tensor, dim: int) -> Tensor:
    """Returns the error of each token in the row with the smallest error."""
    row = next((i for i, size in enumerate(one.shape) if i != dim and size == _ROWS), None)
    a, b = (_by_token(t, row, dim) for t in (one, other))
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, b - a).norm(dim=2).nan_to_num(math.inf)
    size = a.nan_to_num(0.0, 0.0, 0.0).norm(dim=2)
    size = size.maximum(0.1 * size.square().mean().sqrt())  # a single token's values may be near zero
    return torch.where(apart == 0.0, 0.0, apart / size).amin(0)


def _by_token(tensor: Tensor, row: int | None, dim: int) -> Tensor:
    """Returns the tensor as (rows, tokens, rest) in float64."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    tensor = tensor.movedim(dim, 0)[None] if row is None else tensor.movedim((row, dim), (0, 1))
    return tensor.reshape(*tensor.shape[:2], -1).double()
