"""Runs of a verification: one batch through a pipeline, in segments or whole. All runs start from one state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seq1f1b import _C
from seq1f1b.documents.rows import read_rows
from seq1f1b.engine.batch import StepArguments
from seq1f1b.engine.findings import Finding
from seq1f1b.engine.model_state import ComparableRun, RandomState, has_changed, is_abstract, keep_state
from seq1f1b.engine.replicas import without_hooks
from seq1f1b.engine.runner import Runner
from seq1f1b.engine.split_backward import is_plain
from seq1f1b.nested import mapped, tensors_of
from seq1f1b.schedule import Schedule
from seq1f1b.transport import RankGroup
from seq1f1b.transport.values import sendable

__all__: list[str] = []


@dataclass
class Pass:
    """Results of one run of the batch on this rank."""

    losses: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor | None]  # by compared tensor
    draws: bool  # whether the run draws random numbers, apart from dropout
    drops: Counter[float]  # by probability, the count of numbers that forwards would drop with dropout on
    findings: list[Finding]
    forwards: dict[str, Forward]  # by module name, in the order of the calls' ends
    returns_tensor: bool = False  # whether the last stage is here and returns a bare tensor
    changed: Sequence[str] = ()  # buffers changed by the run


@sendable
class Forward(NamedTuple):
    """The result of a module's first call in a run, or of its first call with a result that is not finite.

    Attributes:
        place: the module, in words.
        kind: type of the module.
        odd: "nan" or "inf" if the result holds such a value; "" otherwise. -inf counts as finite, as in a mask.
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


class WholeModelError(ValueError):
    """Error of a whole model that does not run in some dtype. Raised on every rank, between two exchanges."""


class Session:
    """Several runs of one batch from one state; :meth:`end` restores the state."""

    def __init__(self, runner: Runner, arguments: StepArguments) -> None:
        self._runner, self._arguments = runner, arguments
        self._state = RandomState(runner.pipeline.device)

    def run(self, *, whole: bool, dtype: torch.dtype | None, fill: Callable[[], None] = lambda: None) -> Pass:
        """Runs the pipeline or the whole model once. An error is raised on all ranks or on none.

        Args:
            fill: called before the run, to change the initial values.
        """
        pipeline = self._runner.pipeline
        step = pipeline.group.step + 1
        try:
            # Ranks in threads share tensors: no rank starts before all have restored them.
            pipeline.group.all_gather_object(True)
            with ExitStack() as stack:
                stack.enter_context(without_hooks([p for _, p in pipeline.named_parameters()]))
                stack.enter_context(keep_state(pipeline.bare_modules(), dtype))
                fill()
                result = self._run(dtype, whole)
                pipeline.group.all_gather_object(True)
            return result
        except BaseException as error:
            if not isinstance(error, _C.PipelineError):
                pipeline.group.fail(f"{type(error).__name__}: {error}")  # ignored if the group has failed already
            pipeline.group.fail_step(step)
            raise

    def run_whole(self, dtype: torch.dtype | None, fill: Callable[[], None] = lambda: None) -> Pass:
        """Runs the whole model once.

        Raises:
            WholeModelError: the run ended with an error; raised on every rank, after all ranks have met again.
        """
        try:
            return self.run(whole=True, dtype=dtype, fill=fill)
        except Exception as error:
            group = self._runner.pipeline.group
            group.begin_step()  # waits until all ranks have left the failed run
            group.end_step(failed=False)
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            texts = group.all_gather_object([isinstance(error, _C.PipelineError), text])
            raise WholeModelError(min(texts)[1]) from error  # the text from the rank with the original error

    def end(self) -> None:
        self._state.restore()

    def _run(self, dtype: torch.dtype | None, whole: bool) -> Pass:
        given, runner = self._arguments, self._runner
        options, schedule, build = replace(runner.options, attention="any"), runner.schedule, runner.build
        if whole:
            options = replace(options, num_segments=1, segment_sizes=None)
            build = partial(one_by_one, schedule, are_rows=True)
            schedule = one_by_one(schedule)
        own = Runner(runner.pipeline, options, schedule, build, is_whole=whole)  # with its own memory
        own.divides = runner.divides
        for stage in own.stages.values():
            stage.findings.tells = False

        def prepared(tensor: Tensor) -> Tensor:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            leaf = tensor.detach().to(wanted)  # no gradient reaches the caller's graph
            return leaf.clone().requires_grad_() if tensor.requires_grad else leaf

        inputs, target, kwargs = (mapped(value, prepared) for value in (given.inputs, given.target, given.kwargs))
        tracked = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
        arguments = replace(given, inputs=inputs, target=target, kwargs=kwargs, return_outputs=True)
        if whole and given.rows is not None:  # each in one segment; paths of a tree one after another
            rows, trees = read_rows(given.rows, given.parents)
            arguments = replace(arguments, rows=[[sum(row)] for row in rows], parents=None, plan=None, paths=trees)
        self._state.restore()
        runner.pipeline.group.all_gather_object(True)  # ranks in threads share generators: all are restored first
        forwards: dict[str, Forward] = {}
        with ComparableRun(dtype) as run, _noted(runner, forwards):
            losses, outputs = own.run(arguments)
        draws = not self._state.is_current()
        compared = [*(p for _, p in runner.pipeline.named_parameters() if p.requires_grad), *tracked]
        gradients = [None if t.grad is None else t.grad.detach().to_dense() for t in compared]
        findings = [finding for stage in own.stages.values() for finding in stage.findings.found]
        floating = [tensor for output in outputs or [] for tensor in _tensors(output)]
        returns_tensor = bool(outputs) and all(isinstance(output, Tensor) for output in outputs or [])
        held = named_tensors(own_modules(runner))
        changed = [each.name for each in held if each.kind != "parameter" and has_changed(each.tensor)]
        return Pass(losses, floating, gradients, draws, run.drops, findings, forwards, returns_tensor, changed)


@contextmanager
def _noted(runner: Runner, forwards: dict[str, Forward]) -> Iterator[None]:
    """Records the results of all modules in the block."""

    def note(name: str, place: str, module: nn.Module, output: Any) -> None:
        tensors = [] if is_abstract() else _tensors(output)
        odd = next((kind for t in tensors if (kind := odd_kind(t.detach().clamp(min=0)))), "")
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


def odd_kind(tensor: Tensor) -> str:
    """Returns "nan" or "inf" if any element is NaN or infinite; else ""."""
    if bool(tensor.isfinite().all()):
        return ""
    return "nan" if bool(tensor.isnan().any()) else "inf"


def one_by_one(schedule: Schedule, *, num_microbatches: int = 0, are_rows: bool = False, **others: Any) -> Schedule:
    """Returns the order of the whole model on the schedule's ranks: single micro-batches, each in one segment.

    Args:
        num_microbatches: number of micro-batches; 0: the schedule's number.
        are_rows: whether micro-batches have lengths of their own.
        others: counts of a step with rows, ignored here.
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


def _tensors(output: Any) -> list[Tensor]:
    """Returns the plain floating-point tensors of a module's output, nested or not."""
    return [tensor for tensor in tensors_of(output) if is_plain(tensor) and tensor.is_floating_point()]


def names_of(runner: Runner, run: Pass) -> list[str]:
    """Returns the names of the compared tensors: the trained parameters by stage, then inputs that require grad."""
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


class NamedTensor(NamedTuple):
    """A parameter or a buffer under one of its names in the whole model.

    Attributes:
        kind: "parameter", "buffer" or, for a buffer outside the checkpoint, "constant".
    """

    name: str
    place: str
    kind: str
    tensor: Tensor


def own_modules(runner: Runner) -> Iterator[tuple[str, str, nn.Module]]:
    """Yields the prefix of tensor names, the place and the module, for each module of this rank with tensors."""
    for (place, _), module in zip(runner.pipeline.placed_modules(), runner.pipeline.bare_modules(), strict=True):
        yield "" if place.startswith("stage") else f"{place.removeprefix('the ')}: ", place, module


def named_tensors(owners: Iterable[tuple[str, str, nn.Module]]) -> Iterator[NamedTensor]:
    """Yields every name of every tensor of some modules, given as by :func:`own_modules`."""
    for prefix, place, module in owners:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield NamedTensor(prefix + plain_name(name), place, "parameter", parameter)
        saved = module.state_dict(keep_vars=True).keys()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield NamedTensor(prefix + plain_name(name), place, "buffer" if name in saved else "constant", buffer)


def refuse(group: RankGroup, text: str) -> None:
    """Raises ValueError on every rank if any rank has a text. Collective."""
    for rank, theirs in enumerate(group.all_gather_object(text)):
        if theirs:
            raise ValueError(f"rank {rank}: {theirs}")


def plain_name(name: str) -> str:
    """Returns a tensor's or module's name without the parts added by torch's wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").removesuffix("._orig_mod")
