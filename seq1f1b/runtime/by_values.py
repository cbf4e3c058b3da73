"""Does a stage give a few tokens in two segments what it gives them in one? Runs it alone, forward only.

It runs three times on a sample: as one segment, as two, and as one again with each row twice. The last two round
otherwise; what the third differs by from the first is the stage's own rounding, and what the second differs by beyond
that is a finding. Whatever mixes tokens shows, causal or not, and whatever counts them from zero.

A token counts as different only if it differs in every row: a router may send one token of a row to another expert,
because its scores rounded otherwise. On a difference, two more runs under hooks find the first module that differs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from seq1f1b.ops.unit import current
from seq1f1b.runtime.arguments import Agreement, Limits, Loss, Memory, Options
from seq1f1b.runtime.batch import StepArguments
from seq1f1b.runtime.data_parallel import without_wrapper
from seq1f1b.runtime.findings import ATTENTION, RANDOMNESS, STATE, STATISTICS, Finding
from seq1f1b.runtime.linear import is_plain
from seq1f1b.runtime.model_state import ComparableRun, RandomState, keep_state
from seq1f1b.runtime.nested import tensors_of
from seq1f1b.runtime.pipeline import Pipeline
from seq1f1b.runtime.samples import ROWS, Sample
from seq1f1b.runtime.watch import Watch, sizes_of
from seq1f1b.schedule import build_schedule
from seq1f1b.transport.loopback import LoopbackGroup

if TYPE_CHECKING:
    from typing_extensions import Self

__all__: list[str] = []

# A token differs if it does by this much of its norm, whatever the rounding that was measured: by the coarsest eps with
# which the stage computes, of bfloat16, of float16 and TF32, of float32, of float64. The types of
# docs/reference/models.md, which are right, differ by 4e-7 in float32 and by 1.2e-2 in bfloat16 at most.
_LEAST = ((5e-3, 3e-2), (5e-4, 5e-3), (1e-10, 2e-5), (0.0, 1e-9))
_TF32 = 1e-3
_TIMES = 8.0  # as much as the rounding that was measured. It is none beyond the root of the smallest difference.


# -- what modules are given and return ---------------------------------------------------------------------------------

Event: TypeAlias = "tuple[int, int, str, int]"
"""A module is called, or has returned: id of the module whose code made the tensors, id of this one, "in" or "out", and
how many of these came before."""


_Values: TypeAlias = "dict[Event, list[Tensor]]"  # of a segment
_OUTPUT: Event = (0, 0, "stage", 0)


class Trace:
    """Takes copies of tensors while it is entered.

    Args:
        given, returned: modules of whose arguments and results.
    Attributes:
        values: by event, in order.
    """

    def __init__(self, given: Collection[nn.Module], returned: Collection[nn.Module]) -> None:
        self._given, self._returned = given, returned
        self.begin()

    def begin(self) -> None:
        """Forgets what came before."""
        self.values: dict[Event, list[Tensor]] = {}
        self._stack: list[int] = []

    def __enter__(self) -> Self:
        self._handles: list[Any] = [m.register_forward_pre_hook(self._before, with_kwargs=True) for m in self._given]
        self._handles += [m.register_forward_hook(self._after) for m in self._returned]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, *given: Any) -> None:
        self._note(self._stack[-1] if self._stack else 0, module, "in", given)
        self._stack.append(id(module))

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != id(module):
            pass
        self._note(id(module), module, "out", output)

    def _note(self, maker: int, module: nn.Module, kind: str, value: Any) -> None:
        events = ((maker, id(module), kind, before) for before in count())
        event = next(event for event in events if event not in self.values)
        self.values[event] = [t.detach().clone() for t in tensors_of(value)]


def hidden_of(modules: Sequence[nn.Module]) -> Trace:
    """A trace of values that flow into weights that are zero, as projections are before their first step.

    No output tells of them. A module's own parameter that is zero may scale what its children return.
    """
    parts = [part for module in modules for part in module.modules()]
    zero = [part for part in parts if any(_is_zero(n, p) for n, p in part.named_parameters(recurse=False))]
    return Trace(zero, [child for part in zero for child in part.children()])


def _is_zero(name: str, parameter: Tensor) -> bool:
    is_floating = is_plain(parameter) and parameter.is_floating_point()
    if "bias" in name or not is_floating or parameter.is_meta or not parameter.numel():
        return False
    first = parameter.detach()[(0,) * (parameter.dim() - 1)].reshape(-1)[:64]  # of most, these tell
    return not bool(first.any()) and not bool(parameter.any())


# -- runs --------------------------------------------------------------------------------------------------------------


class Look:
    """Runs of one stage by itself.

    Args:
        stage: its module, index and device are read.
        shares_generators: other threads draw from the same generators, which are therefore not put back.
    """

    def __init__(self, stage: Any, sample: Sample, *, shares_generators: bool) -> None:
        module = stage.module
        self._module = without_wrapper(module) if isinstance(module, nn.Module) else module
        self._modules = [self._module] if isinstance(self._module, nn.Module) else []
        self._stage, self._sample, self._shares = stage, sample, shares_generators
        self._sizes = sizes_of(self._modules)
        self._watches: list[Watch] = []  # of all segments

    def findings(self) -> list[Finding] | None:
        """The findings; None if the stage cannot be looked at in this way, as it draws random numbers, say."""
        sample, place, again = self._sample, f"stage {self._stage.index}", list[_Values]()
        try:
            with hidden_of(self._modules) as trace:
                one, two = self._run(trace, (sample.length,)), self._run(trace, sample.sizes)
                with suppress(Exception):  # of a stage that keeps something for each row, say
                    again = self._run(trace, (sample.length,), is_twice=True)
        except Exception:  # of a stage that takes no other number of tokens, say
            table = "adds or multiplies by a table that fits segments of one length, the same one in every segment"
            return [Finding(STATE, place, table)] if any(watch.has_table for watch in self._watches) else None
        carries = any("carries" in watch.noted for watch in self._watches)
        with torch._C.DisableTorchFunction():  # a verification's mode is for what the stage computes
            comparison = _Comparison(sample.sizes, self._least())
            for tensors in zip(*(values[_OUTPUT] for values in (*one, *two, *again)), strict=False):
                comparison.measure(*tensors)
            found = [each for each in comparison.differences(one, two) if not (carries and each[0][2] == "out")]
        dropouts = dict.fromkeys(watch.dropout for watch in self._watches if watch.dropout)
        told = [Finding(RANDOMNESS, place, f"calls {name}, which draws one number for all tokens") for name in dropouts]
        return [*([self._explain(comparison, found)] if found else []), *told]

    def _run(self, trace: Trace, sizes: Sequence[int], *, is_twice: bool = False) -> list[_Values]:
        """The tensors to compare of each segment. Raises RuntimeError if the stage has drawn random numbers.

        Args:
            is_twice: each row comes twice.
        """
        from seq1f1b.runtime.runner import Runner  # it lists the features, of which a look is one

        result, device = list[_Values](), self._stage.device
        rows = ROWS * (1 + is_twice)

        def call(_: Tensor) -> Any:
            unit = current()
            assert unit is not None
            begin, length = sum(sizes[: unit.segment]), sizes[unit.segment]
            watch = unit.watch = Watch(rows, begin, length, self._sizes)
            self._watches.append(watch)
            args, kwargs = self._sample.arguments(begin, length, is_twice=is_twice)
            trace.begin()
            # What the module itself keeps from one segment to the next has no gradient, and is not the micro-batch's.
            with keep_state(self._modules, None, parameters=False, gradients=False), watch:
                output = self._module(*args, **kwargs)
            unit.watch = None
            result.append({**trace.values, _OUTPUT: [t.detach().clone() for t in tensors_of(output)]})
            return output

        options = Options(
            num_microbatches=1, num_segments=len(sizes), segment_sizes=sizes, seq_dim=1, arg_rules={}, loss_fn=None,
            loss=Loss(), transport="auto", limits=Limits(), grad_dtype=None, memory=Memory(), sequence_parallel=(0, 1),
            attention="unchecked", embedding=None,
        )  # fmt: skip
        group = LoopbackGroup(1)[0]
        schedule = build_schedule("seq1f1b", num_ranks=1, num_microbatches=1, num_segments=len(sizes))
        alone: Any = call
        pipeline = Pipeline([alone], device, options, group, schedule, Agreement(group, {}))
        state = RandomState(device)
        try:
            with torch.no_grad(), ComparableRun(None):
                runner = Runner(pipeline, options, schedule, is_whole=len(sizes) == 1, tells=False)
                runner.run(StepArguments(False, torch.zeros(rows, sum(sizes), device=device), None, None))
        finally:
            pipeline.close()
            draws = not state.is_current()
            if draws and not self._shares:
                state.restore()
        if draws:
            raise RuntimeError("no two runs are alike")
        return result

    def _least(self) -> float:
        """The smallest difference that counts, relative."""
        given = [*tensors_of(self._sample.values), *(p for module in self._modules for p in module.parameters())]
        dtypes = {t.dtype for t in given if t.is_floating_point() and t.dtype.itemsize > 1}
        eps = max([torch.finfo(dtype).eps for dtype in dtypes or {torch.float32}])
        eps = max([eps, *(watch.eps for watch in self._watches)])
        is_exact = self._stage.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
        if eps > 1e-10 and not is_exact:
            eps = max(eps, _TF32)
        return next(least for above, least in _LEAST if eps > above)

    def _explain(self, comparison: _Comparison, found: list[_Difference]) -> Finding:
        """Names the first module that differs, and says what that means."""
        maker, is_causal, error = 0, all(causal for _, causal, _ in found), max(error for *_, error in found)
        parts = dict.fromkeys(part for module in self._modules for part in module.modules())
        with suppress(Exception), Trace(parts, parts) as trace:
            one, two = self._run(trace, (self._sample.length,)), self._run(trace, self._sample.sizes)
            with torch._C.DisableTorchFunction():
                (maker, *_), is_causal, error = next(comparison.differences(one, two))
        place = f"stage {self._stage.index}"
        for name, part in ((name, part) for module in self._modules for name, part in module.named_modules()):
            if id(part) == maker or (not maker and part is self._module):
                place += f", {name.removeprefix('_orig_mod').lstrip('.') or 'itself'} ({type(part).__name__})"
                break
        what = f"{_ANEW if is_causal else _LATER}: a token differs by {error:.2g} of its norm"
        foreign = [watch.foreign for watch in self._watches if watch.foreign]
        if foreign and not any("attends" in watch.noted for watch in self._watches):
            return Finding(ATTENTION, place, f"differs by {error:.2g} of a token's norm, and the stage {foreign[0]}")
        return Finding(STATE if is_causal else STATISTICS, place, what)


_ANEW = "begins anew in every segment"
_LATER = "gives a token another value where later tokens are in its segment, or where the segment is longer"


# -- comparison --------------------------------------------------------------------------------------------------------

_Difference: TypeAlias = "tuple[Event, bool, float]"
"""The event that differs, whether it is as in the whole in the first segment, and the largest error of a token."""


class _Comparison:
    """Tells a difference from rounding.

    Args:
        sizes: tokens of the two segments.
        allowed: the largest error of a token that is none, relative to its norm.
    """

    def __init__(self, sizes: tuple[int, int], allowed: float) -> None:
        self._sizes, self._allowed, self._most = sizes, allowed, math.sqrt(allowed)

    def measure(self, one: Tensor, first: Tensor, second: Tensor, again: Tensor | None = None) -> None:
        """Allows for the stage's rounding. again: the same as ``one``, of each row twice."""
        if again is None or one.dim() != again.dim():
            return
        twice = [i for i, (x, y) in enumerate(zip(one.shape, again.shape, strict=True)) if y == 2 * x]
        if len(twice) != 1:
            return
        again = again.narrow(twice[0], 0, one.shape[twice[0]])
        for dim, a, _, _, b in self._ways(one, first, second, again):
            self._allowed = max(self._allowed, min(_TIMES * float(_errors(a, b, dim).max()), self._most))

    def differences(self, one: list[_Values], two: list[_Values]) -> Iterator[_Difference]:
        """In a run as one segment and a run as two, in order."""
        (whole,), (first, second) = one, two
        for event in (event for event in whole if event in first and event in second):
            parts = zip(whole[event], first[event], second[event], strict=False)
            errors = [found for tensors in parts if (found := self._errors(*tensors)) is not None]
            if errors:
                is_causal = not any(bool((each[: self._sizes[0]] > self._allowed).any()) for each in errors)
                yield event, is_causal, max(float(each.max()) for each in errors)

    def _errors(self, one: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
        """By token, of a tensor that differs in two segments. None: it does not differ, or has no tokens."""
        errors = None
        for dim, a, b, c in self._ways(one, first, second):
            errors = _errors(a, torch.cat([b, c], dim), dim)
            if not (errors > self._allowed).any():
                return None
        return errors

    def _ways(self, one: Tensor, first: Tensor, second: Tensor, *others: Tensor) -> Iterator[tuple[Any, ...]]:
        """The tokens' dimension, and the tensors; in two ways where tokens and rows share a dimension.

        Args:
            others: in the shape of ``one``.
        """
        length, (a, b), tensors = sum(self._sizes), self._sizes, (one, first, second, *others)
        is_strided = type(one) is Tensor and one.layout == torch.strided and not one.is_nested
        for dim, size in enumerate(one.shape if is_strided else ()):
            rows = size // length
            shapes = [(*one.shape[:dim], rows * n, *one.shape[dim + 1 :]) for n in (length, a, b)]
            if rows and [tuple(t.shape) for t in tensors[:3]] == shapes:
                if rows == 1:
                    yield dim, *tensors
                else:
                    yield dim + 1, *(torch.unflatten(t, dim, (rows, -1)) for t in tensors)
                    yield dim, *(torch.unflatten(t, dim, (-1, rows)) for t in tensors)
                return


def _errors(one: Tensor, other: Tensor, dim: int) -> Tensor:
    """By token, the error of the row in which it is the smallest."""
    row = next((i for i, size in enumerate(one.shape) if i != dim and size == ROWS), None)
    a, b = (_by_token(t, row, dim) for t in (one, other))
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, b - a).norm(dim=2).nan_to_num(math.inf)
    size = a.nan_to_num(0.0, 0.0, 0.0).norm(dim=2)
    size = size.maximum(0.1 * size.square().mean().sqrt())  # a token may be near zero where others are not
    return torch.where(apart == 0.0, 0.0, apart / size).amin(0)


def _by_token(tensor: Tensor, row: int | None, dim: int) -> Tensor:
    """(rows, tokens, rest), float64."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    tensor = tensor.movedim(dim, 0)[None] if row is None else tensor.movedim((row, dim), (0, 1))
    return tensor.reshape(*tensor.shape[:2], -1).double()
