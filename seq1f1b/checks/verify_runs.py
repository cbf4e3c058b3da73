"""Runs of a verification: one batch through a pipeline, in segments or whole, from one state that they restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seq1f1b import _C
from seq1f1b.documents.rows import read_rows
from seq1f1b.engine.batch import StepArguments
from seq1f1b.engine.findings import Finding
from seq1f1b.engine.linear import is_plain
from seq1f1b.engine.model_state import ComparableRun, RandomState, has_changed, is_abstract, keep_state
from seq1f1b.engine.options import Options
from seq1f1b.engine.pipeline import Pipeline
from seq1f1b.engine.replicas import without_hooks
from seq1f1b.engine.runner import Runner
from seq1f1b.nested import mapped, tensors_of
from seq1f1b.schedule import Schedule
from seq1f1b.transport import LoopbackGroup, RankGroup
from seq1f1b.transport.agreement import Agreement
from seq1f1b.transport.values import sendable

__all__: list[str] = []


@dataclass
class Pass:
    """One run of the batch on this rank: its results."""

    losses: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor | None]  # of the compared tensors
    draws: bool  # random numbers, dropout apart
    drops: Counter[float]  # numbers that forwards would drop with each probability, if dropout were on
    findings: list[Finding]
    sizes: list[int]  # of the segments
    forwards: dict[str, Forward]  # by name of the module, in the order of their ends
    not_finite: list[Any] = field(default_factory=list)  # where it became so: a key to sort by, and a text
    returns_tensor: bool = False  # whether the last stage returns one tensor, here
    changed: list[str] = field(default_factory=list)  # buffers that the run changed


@sendable
class Forward(NamedTuple):
    """The result of one module when it was first called in a run, or first returned numbers that are not finite.

    Attributes:
        place: of the module, in words; kind: its type.
        odd: "nan" or "inf", which it holds; "" if it is finite, but for -inf alone, which is a mask.
    """

    place: str
    kind: str
    dtype: str
    norm: float
    total: float
    odd: str

    def is_like(self, truth: Forward, tolerance: float) -> bool:
        scale = tolerance * max(abs(truth.norm), 1e-30)
        return abs(self.norm - truth.norm) <= scale and abs(self.total - truth.total) <= 10 * scale


class NotRun(ValueError):
    """The whole model does not run in some dtype. Raised on every rank, between two exchanges."""


class Session:
    """Runs one batch several times from one state, which :meth:`end` restores."""

    def __init__(self, runner: Runner, arguments: StepArguments) -> None:
        self._runner, self._arguments = runner, arguments
        self._state = RandomState(runner.pipeline.device)

    def run(self, *, whole: bool, dtype: torch.dtype | None, fill: Callable[[], None] = lambda: None) -> Pass:
        """One run of the pipeline, or of the whole model. Ends with an error on all ranks or on none.

        Args:
            fill: called before the run, to change the values with which it begins.
        """
        pipeline = self._runner.pipeline
        step = pipeline.group.step + 1
        try:
            # Tensors that ranks share: nobody takes them before all gave them back.
            pipeline.group.all_gather_object(True)
            with ExitStack() as stack:
                stack.enter_context(without_hooks([p for _, p in pipeline.named_parameters()]))
                stack.enter_context(keep_state(pipeline.bare_modules(), dtype))
                fill()
                result = self._run(_variant(self._runner, whole), dtype, whole)
                pipeline.group.all_gather_object(True)
            return result
        except BaseException as error:
            if not isinstance(error, _C.PipelineError):
                pipeline.group.fail(f"{type(error).__name__}: {error}")  # heard only where none failed before
            pipeline.group.fail_step(step)
            raise

    def run_whole(self, dtype: torch.dtype | None, fill: Callable[[], None] = lambda: None) -> Pass:
        """One run of the whole model.

        Raises:
            NotRun: it ended with an error, which every rank hears; all have met again.
        """
        try:
            return self.run(whole=True, dtype=dtype, fill=fill)
        except Exception as error:
            group = self._runner.pipeline.group
            group.begin_step()  # waits until all ranks have left the failed run
            group.end_step(failed=False)
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            texts = group.all_gather_object([isinstance(error, _C.PipelineError), text])
            raise NotRun(min(texts)[1]) from error  # that of the rank where it arose

    def end(self) -> None:
        self._state.restore()

    def _run(self, runner: Runner, dtype: torch.dtype | None, whole: bool) -> Pass:
        leaves: list[Tensor] = []

        def prepared(value: Any) -> Any:
            return mapped(value, lambda tensor: _prepared(tensor, dtype, leaves))

        given = self._arguments
        inputs = prepared(given.inputs)
        tracked = list(leaves)
        arguments = replace(
            given, inputs=inputs, target=prepared(given.target), kwargs=prepared(given.kwargs), return_outputs=True
        )
        if whole and given.rows is not None:  # each in one segment; paths of a tree one after another
            rows, trees = read_rows(given.rows, given.parents)
            arguments = replace(arguments, rows=[[sum(row)] for row in rows], parents=None, plan=None, paths=trees)
        self._state.restore()
        runner.pipeline.group.all_gather_object(True)  # ranks that are threads share generators: none draws before
        forwards: dict[str, Forward] = {}
        with ComparableRun(dtype) as run, _noted(runner, forwards):
            losses, outputs = runner.run(arguments)
        draws = not self._state.is_current()
        compared = [*(p for _, p in runner.pipeline.named_parameters() if p.requires_grad), *tracked]
        gradients = [None if t.grad is None else t.grad.detach().to_dense() for t in compared]
        findings = [finding for stage in runner.stages.values() for finding in stage.findings.found]
        floating = [tensor for output in outputs or [] for tensor in _tensors(output)]
        assert runner.last_step is not None
        sizes = runner.last_step.sizes
        result = Pass(losses, floating, gradients, draws, run.drops, findings, sizes, forwards)
        result.not_finite += _not_finite(runner, result)
        result.returns_tensor = bool(outputs) and all(isinstance(output, Tensor) for output in outputs or [])
        held = named_tensors(own_modules(runner))
        result.changed += [each.name for each in held if each.kind != "parameter" and has_changed(each.tensor)]
        return result


@contextmanager
def _noted(runner: Runner, forwards: dict[str, Forward]) -> Iterator[None]:
    """Notes the results of all modules in the block."""

    def note(name: str, place: str, module: nn.Module, output: Any) -> None:
        tensors = [] if is_abstract() else _tensors(output)
        odd = next((kind for t in tensors if (kind := _kind(t.detach().clamp(min=0)))), "")
        if tensors and (name not in forwards or (odd and not forwards[name].odd)):
            first = tensors[0].detach().double()
            dtype, figures = str(tensors[0].dtype), (float(first.norm()), float(first.sum()))
            forwards[name] = Forward(place, type(module).__name__, dtype, *figures, odd)

    with ExitStack() as stack:
        for stage, module in runner.pipeline.placed_modules():
            for name, part in module.named_modules():
                place = f"{stage}, {name or 'itself'} ({type(part).__name__})"
                key = plain_name(name) or stage
                hook = part.register_forward_hook(lambda m, _, y, key=key, place=place: note(key, place, m, y))
                stack.callback(hook.remove)
        yield


def _not_finite(runner: Runner, run: Pass) -> list[Any]:
    """Finds the first place that is not finite: a module, if one is the cause, else a loss, else a gradient."""
    losses = [f"the loss of micro-batch {m} is {kind}" for m, t in enumerate(run.losses) if (kind := _kind(t))]
    names = zip(names_of(runner, run), run.gradients, strict=True)
    gradients = [f"the gradient of {n} is {kind}" for n, t in names if t is not None and (kind := _kind(t))]
    if not losses and not gradients:
        return []
    odd = next((forward for forward in run.forwards.values() if forward.odd), None)
    if odd is not None:
        return [[0, min(runner.stages)], f"{odd.place} returns {odd.odd}"]
    # Backwards run from the last stage to the first, and within a stage from its last parameter to its first.
    return [[1, 0], losses[0]] if losses else [[2, -max(runner.stages)], gradients[-1]]


def _kind(tensor: Tensor) -> str:
    """ "nan" or "inf" if any element is; else ""."""
    if bool(tensor.isfinite().all()):
        return ""
    return "nan" if bool(tensor.isnan().any()) else "inf"


def _variant(runner: Runner, whole: bool) -> Runner:
    """A second runner over the same pipeline, with memory of its own."""
    options, schedule, build = replace(runner.options, attention="any"), runner.schedule, runner.build
    if whole:
        options = replace(options, num_segments=1, segment_sizes=None)
        build = partial(one_by_one, schedule, are_rows=True)
        schedule = one_by_one(schedule)
    other = Runner(runner.pipeline, options, schedule, build, is_whole=whole, tells=False)
    other.divides = runner.divides
    return other


def alone(
    stage: Any,
    device: torch.device,
    options: Options,
    schedule: Schedule,
    build: Callable[..., Schedule] | None = None,
) -> Runner:
    """Makes a runner over one stage in this process. It tells nothing; with one segment, its units are the whole."""
    group = LoopbackGroup(1)[0]
    pipeline = Pipeline([stage], device, options, group, schedule, Agreement(group, {}))
    return Runner(pipeline, options, schedule, build, is_whole=options.num_segments == 1, tells=False)


def one_by_one(schedule: Schedule, *, num_microbatches: int = 0, are_rows: bool = False, **others: Any) -> Schedule:
    """The order of the whole model on the same ranks: one micro-batch after the other, in one segment.

    Args:
        num_microbatches: 0: as many as the schedule has.
        are_rows: whether micro-batches have lengths of their own.
        others: counts of a step of rows, which say nothing of the whole model.
    """
    lines = []
    for rank in range(schedule.num_ranks):
        own = [stage for stage, holder in enumerate(schedule.rank_of_stage) if holder == rank]
        units = [
            f"[{stage}]{kind}{m}.0"
            for m in range(num_microbatches or schedule.num_microbatches)
            for kind, stages in (("F", own), ("B", own[::-1]))
            for stage in stages
        ]
        lines.append(" ".join(units))
    if are_rows:
        lines.insert(0, "parents" + " -" * num_microbatches)
    order = Schedule.from_text("\n".join(lines)).replace(prefetch=schedule.prefetch)
    kinds = schedule.kinds
    return order.spread_vocabulary(0, head="S" in kinds, embedding="E" in kinds) if kinds & {"S", "E"} else order


def _prepared(tensor: Tensor, dtype: torch.dtype | None, leaves: list[Tensor]) -> Tensor:
    """A leaf of its own, so that nothing reaches the caller's graph."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    leaf = tensor.detach().to(wanted)
    if tensor.requires_grad:
        leaf = leaf.clone().requires_grad_()
        leaves.append(leaf)
    return leaf


def _tensors(output: Any) -> list[Tensor]:
    """Floating tensors of what a module returned, which may be nested."""
    return [tensor for tensor in tensors_of(output) if is_plain(tensor) and tensor.is_floating_point()]


def names_of(runner: Runner, run: Pass) -> list[str]:
    """Names of the compared tensors: parameters that require grad, by stage, then inputs that do."""
    pipeline, shard = runner.pipeline, f"shard {runner.pipeline.rank}: "
    places = {"the embedding": shard, "the loss": "loss: " if runner.options.head is None else shard}
    names: dict[int, str] = {}
    for _, place, module in own_modules(runner):
        before = places.get(place, f"{place}: " if pipeline.num_stages > 1 else "")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                names.setdefault(id(parameter), before + name)
    inputs = len(run.gradients) - len(names)
    return [*names.values(), *(f"input {i}" if inputs > 1 else "input" for i in range(inputs))]


class Held(NamedTuple):
    """A parameter or a buffer under one of its names in the whole model.

    Attributes:
        kind: "parameter", "buffer" or, if no checkpoint holds it, "constant".
    """

    name: str
    place: str
    kind: str
    tensor: Tensor


def own_modules(runner: Runner) -> Iterator[tuple[str, str, nn.Module]]:
    """Modules of this rank that hold its tensors: what stands before names in them, their place, and the module."""
    for (place, _), module in zip(runner.pipeline.placed_modules(), runner.pipeline.bare_modules(), strict=True):
        yield "" if place.startswith("stage") else f"{place.removeprefix('the ')}: ", place, module


def named_tensors(owners: Iterable[tuple[str, str, nn.Module]]) -> Iterator[Held]:
    """Every name of every tensor of some modules, as of :func:`own_modules`."""
    for prefix, place, module in owners:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield Held(prefix + plain_name(name), place, "parameter", parameter)
        saved = module.state_dict(keep_vars=True).keys()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield Held(prefix + plain_name(name), place, "buffer" if name in saved else "constant", buffer)


def refuse(group: RankGroup, text: str) -> None:
    """Raises ValueError on every rank if one of them has a text. Collective."""
    for rank, theirs in enumerate(group.all_gather_object(text)):
        if theirs:
            raise ValueError(f"rank {rank}: {theirs}")


def plain_name(name: str) -> str:
    """A tensor's or module's name without what torch's wrappers add to it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").removesuffix("._orig_mod")
