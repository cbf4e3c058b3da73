"""Does a stage give a few tokens in two segments what it gives them in one? Runs it alone, forward only.

It runs three times on a sample: as one segment, as two, and as one again with each row twice. The last two round
otherwise; what the third differs by from the first is the stage's own rounding, and what the second differs by beyond
that is a finding. Whatever mixes tokens shows, causal or not, and whatever counts them from zero.

A token counts as different only if it differs in every row: a router may send one token of a row to another expert,
because its scores rounded otherwise. On a difference, two more runs under hooks find the first module that differs, and
``operations.py`` says which operation it called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.runtime.arguments import Agreement, Limits, Loss, Memory, Options
from seq1f1b.runtime.batch import StepArguments
from seq1f1b.runtime.data_parallel import without_wrapper
from seq1f1b.runtime.findings import ATTENTION, MIXING, RANDOMNESS, STATE, Finding
from seq1f1b.runtime.model_state import ComparableRun, RandomState, keep_state
from seq1f1b.runtime.nested import tensors_of
from seq1f1b.runtime.operations import Noted, Operations, findings_of, places_of
from seq1f1b.runtime.pipeline import Pipeline
from seq1f1b.runtime.samples import ROWS, Sample
from seq1f1b.runtime.traces import Hidden, Hooks, Trace
from seq1f1b.runtime.unit import live_unit
from seq1f1b.schedule import build_schedule
from seq1f1b.transport.loopback import LoopbackGroup

__all__: list[str] = []

# A token differs if it does by this much of its norm, whatever the rounding that was measured: by the coarsest dtype in
# which the stage computes. The types of docs/reference/models.md, which are right, differ by 4e-7 in float32 and by
# 1.2e-2 in bfloat16 at most.
_LEAST = {"float64": 1e-9, "float32": 2e-5, "tf32": 5e-3, "float16": 5e-3, "bfloat16": 3e-2}
_TIMES = 8.0  # as much as the rounding that was measured. It is none beyond the root of the smallest difference.


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The results of the stage, for each segment.

    Attributes:
        inputs, inner: what is compared beside its outputs.
    """

    outputs: list[list[Tensor]] = field(default_factory=list)
    inputs: list[list[Tensor]] = field(default_factory=list)
    inner: list[list[Tensor]] = field(default_factory=list)
    seen: list[Operations] = field(default_factory=list)


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
        self._index, self._device, self._sample = stage.index, stage.device, sample
        self._shares = shares_generators
        self._tokens = [t for t in sample.tokens if t is not None]
        self._places = places_of(self._index, self._modules)
        self.attends = False

    def findings(self) -> list[Finding] | None:
        """The findings; None if the stage cannot be looked at in this way, as it draws random numbers, say."""
        sample, tokens = self._sample, self._tokens
        hidden = Hidden(self._modules)
        try:
            with hidden:
                one = self._run(tokens, (sample.length,), hidden)
                two = self._run(tokens, sample.sizes, hidden)
                again: _Run | None = _Run([[]])
                with suppress(Exception):  # of a stage that keeps something for each row, say
                    again = self._run([torch.cat([t, t]) for t in tokens], (sample.length,), hidden)
        except Exception:  # of a stage that takes no other number of tokens, say
            return self._without_values()
        if one is None or two is None or again is None:
            return None
        self.attends = any(each.attends for each in two.seen)
        with torch._C.DisableTorchFunction():  # a verification's mode is for what the stage computes
            comparison, differs = self._compare(one, two, again)
        shared = findings_of([n for n in two.seen[-1].sure() if n.cause == RANDOMNESS], self._places)
        if differs:
            shared = [*self._explain(comparison, all(differs)), *shared]
        return shared

    def _compare(self, one: _Run, two: _Run, again: _Run) -> tuple[_Comparison, list[bool]]:
        """Says for each tensor that differs whether its first segment is as in the whole."""
        seen = [*one.seen, *two.seen, *again.seen]
        comparison = _Comparison(self._sample.sizes, _least(self._module, self._tokens, [each.eps for each in seen]))
        for tensors in zip(one.outputs[0], *two.outputs, again.outputs[0], strict=False):
            comparison.measure(*tensors)
        compared = list(zip(one.outputs[0], *two.outputs, strict=False))
        for name in ("inputs", "inner"):
            lists = [*getattr(one, name), *getattr(two, name)]
            is_alike = len({len(each) for each in lists}) == 1
            if is_alike and (name == "inputs" or not any(each.carries for each in seen)):
                compared += zip(*lists, strict=True)
        return comparison, [told for tensors in compared if (told := comparison.is_causal(*tensors)) is not None]

    def _run(self, tokens: list[Tensor], sizes: Sequence[int], hooks: Hooks) -> _Run | None:
        """None: the stage has drawn random numbers."""
        from seq1f1b.runtime.runner import Runner  # it lists the features, of which a look is one

        result, device = _Run(), self._device

        def call(*parts: Tensor) -> Any:
            unit = live_unit()
            assert unit is not None
            offset, given = sum(sizes[: unit.segment]), [(part, True) for part in parts]
            seen = unit.watch = Operations(self._modules, given, offset, sizes[unit.segment])
            args, kwargs = self._sample.arguments(parts)
            # What the module itself keeps from one segment to the next has no gradient, and is not the micro-batch's.
            with self._kept(), seen, hooks.segment(seen):
                output = self._module(*args, **kwargs)
            unit.watch = None
            result.seen.append(seen)
            result.outputs.append([t.detach().clone() for t in tensors_of(output)])
            inputs, inner = hooks.taken()
            result.inputs.append(inputs)
            result.inner.append(inner)
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
                runner.run(StepArguments(False, tuple(tokens), None, None))
        finally:
            pipeline.close()
            draws = not state.is_current()
            if draws and not self._shares:
                state.restore()
        return None if draws else result

    def _kept(self) -> AbstractContextManager[None]:
        return keep_state(self._modules, None, parameters=False, gradients=False)

    # -- what is said ----------------------------------------------------------------------------------------------

    def _without_values(self) -> list[Finding] | None:
        """After a run that failed: a table of the segment's length is the same for every segment."""
        with Trace(self._modules) as trace, suppress(Exception):
            self._run(self._tokens, self._sample.sizes, trace)
        seen = trace.seen
        return None if seen is None or seen.fixed is None else findings_of([seen.fixed], self._places)

    def _explain(self, comparison: _Comparison, is_causal: bool) -> list[Finding]:
        """Names the first module that differs, and the operation it called."""
        culprit, noted = id(self._module), list[Noted]()
        time: int | None = None
        with Trace(self._modules) as trace, suppress(Exception):
            self._run(self._tokens, (self._sample.length,), trace)
            self._run(self._tokens, self._sample.sizes, trace)
            with torch._C.DisableTorchFunction():
                first = trace.first_difference(comparison.is_causal)
            assert trace.seen is not None
            noted = trace.seen.noted
            if first is not None:
                culprit, time, is_causal = first
        found = _operation_of(noted, culprit, time)
        foreign = [n for n in noted if n.cause == ATTENTION and n.what.startswith("calls") and not self.attends]
        if found is None:
            place = self._places.get(culprit, f"stage {self._index}")
            explained = [Finding(*((STATE, place, _ANEW) if is_causal else (MIXING, place, _LATER)))]
        else:
            explained = findings_of([found], self._places)
        return list(dict.fromkeys([*explained, *findings_of(foreign, self._places)]))


_ANEW = "begins anew in every segment: its first tokens come out otherwise where others precede them"
_LATER = "gives a token another value where later tokens are in its segment, or where the segment is longer"


def _operation_of(noted: Sequence[Noted], culprit: int, time: int | None) -> Noted | None:
    """The operation in a module that explains a difference best: called since all was equal, or else before."""
    own = [n for n in noted if culprit in n.around and (time is None or n.time <= time)]
    for chosen in ([n for n in own if n.time == time], own[::-1]):
        for cause in (ATTENTION, None):
            for is_sure in (True, False):
                for n in chosen:
                    if n.is_sure == is_sure and cause in (None, n.cause) and n.cause != RANDOMNESS:
                        return n
    return None


def _least(module: Any, tokens: Sequence[Tensor], seen: Sequence[float]) -> float:
    """The smallest difference that counts, relative."""
    given = [*tokens, *(module.parameters() if isinstance(module, nn.Module) else ())]
    dtypes = {t.dtype for t in given if t.is_floating_point()}
    eps = max([torch.finfo(d).eps for d in dtypes if d.itemsize > 1], default=torch.finfo(torch.float32).eps)
    eps = max([eps, *seen])
    if eps > 5e-3:
        return _LEAST["bfloat16"]
    if eps > 5e-4:
        return _LEAST["float16"]
    if eps > 1e-10:
        is_narrowed = tokens[0].device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
        return _LEAST["tf32" if is_narrowed else "float32"]
    return _LEAST["float64"]


# -- comparison --------------------------------------------------------------------------------------------------------


class _Comparison:
    """Tells a difference from rounding.

    Args:
        sizes: tokens of the two segments.
        allowed: the largest error of a token that is none, relative to its norm.
    """

    def __init__(self, sizes: tuple[int, int], allowed: float) -> None:
        self._sizes, self.allowed, self._most = sizes, allowed, math.sqrt(allowed)

    def measure(self, one: Tensor, first: Tensor, second: Tensor, again: Tensor) -> None:
        """Allows for the stage's rounding. again: the same as ``one``, of each row twice."""
        twice = [i for i, (x, y) in enumerate(zip(one.shape, again.shape, strict=False)) if y == 2 * x]
        if one.dim() != again.dim() or len(twice) != 1:
            return
        again = again.narrow(twice[0], 0, one.shape[twice[0]])
        for (a, _, _, dim), (b, _, _, _) in zip(
            self._ways(one, first, second), self._ways(again, first, second), strict=False
        ):
            found = float(_errors(a, b, dim).max())
            self.allowed = max(self.allowed, min(_TIMES * found, self._most))

    def is_causal(self, one: Tensor, first: Tensor, second: Tensor) -> bool | None:
        """Whether a tensor that differs in two segments is as in the whole in the first one.

        None: it does not differ, or has no tokens.
        """
        found = None
        for a, b, c, dim in self._ways(one, first, second):
            found = _errors(a, torch.cat([b, c], dim), dim) > self.allowed
            if not found.any():
                return None
        return None if found is None else not bool(found[: self._sizes[0]].any())

    def _ways(self, one: Tensor, first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        """The three with their tokens in one dimension; in two ways where tokens and rows share one."""
        length, (a, b) = sum(self._sizes), self._sizes
        is_strided = type(one) is Tensor and one.layout == torch.strided and not one.is_nested
        for dim, size in enumerate(one.shape if is_strided else ()):
            rows = size // length
            shapes = [(*one.shape[:dim], rows * n, *one.shape[dim + 1 :]) for n in (length, a, b)]
            if not rows or [tuple(t.shape) for t in (one, first, second)] != shapes:
                continue
            if rows == 1:
                yield one, first, second, dim
                return
            for ways, place in (((rows, -1), dim + 1), ((-1, rows), dim)):
                x, y, z = (torch.unflatten(t, dim, ways) for t in (one, first, second))
                yield x, y, z, place
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
