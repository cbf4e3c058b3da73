"""Does the pipeline compute what the whole model does? Runs both on one batch and compares every gradient.

The whole model is a second runner over the same stages, ranks and edges, with one segment and an order that runs one
micro-batch after the other; its units count as outside a step, so ``causal_attention`` is plain attention there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.checks.verify_model import WholeModel
from seq1f1b.checks.verify_runs import NotRun, Pass, Session, names_of, refuse
from seq1f1b.engine.batch import StepArguments
from seq1f1b.engine.engine import LoneEngine
from seq1f1b.engine.findings import RANDOMNESS, STATE, STATISTICS, WEIGHTING
from seq1f1b.engine.options import Loss
from seq1f1b.engine.replicas import data_parallel
from seq1f1b.engine.runner import Runner
from seq1f1b.nested import distance, norm
from seq1f1b.placement import free_bytes
from seq1f1b.transport import LoopbackGroup

__all__ = ["Verification", "verify_stage"]

NOT_FINITE = "not finite"
_SHOWN = 8  # parameters in the printed table
# In float64 the pipeline and the whole model differ by 1e-12 where all is right, and by more than 1e-3 where something
# is wrong. Between them lies what a model computes in float32 whatever its dtype: 6e-8, and a condition of 1e3.
_SAME = 1e-4
# In the engine's dtype the yardstick is the whole model in that dtype: its distance from float64 is what rounding does
# to this model and batch. Segments round in another order, so each parameter is allowed this many times as much, plus
# as many roundings of one number, for what the whole model happens to round to exactly. Over 600 right models in fp32,
# bf16 and fp16 the largest error was half of what is allowed.
_ROUNDINGS = 4.0
CUT = "the cut"


@dataclass(frozen=True)
class Verification:
    """Result of :meth:`seq1f1b.PipelineEngine.verify`, equal on all ranks. ``str()`` is the table that it prints.

    It is true or false as ``ok``, so ``assert engine.verify(...)`` checks it.

    Errors are relative to the whole model's value: the norm of the difference, divided by the norm. A gradient smaller
    than 1e-3 of the model's gradients (root mean square of their norms) is compared with that.

    Attributes:
        ok: whether all errors are as small as rounding makes them; False if the whole model's loss or gradients are
            not finite, so that there is nothing to compare with.
        parameters: error of each parameter's gradient in the engine's dtype, by stage and name; and of the gradients of
            inputs that require grad.
        loss_error, output_error: largest error of a micro-batch's loss, and of its output on the last stage.
        allowed: what rounding explains of these errors, for each parameter, ``"loss"`` and ``"output"``.
        exact: the errors with both sides in float64, by the same names; empty if there is no float64 reference.
        causes: what is likely wrong, one line each; empty if ``ok``.
        notes: how it was compared.
    """

    ok: bool
    parameters: dict[str, float]
    loss_error: float
    output_error: float
    allowed: dict[str, float]
    exact: dict[str, float]
    causes: tuple[str, ...]
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        errors = {"loss": self.loss_error, "output": self.output_error, **self.parameters}

        def excess(name: str) -> tuple[float, float]:
            exact = self.exact.get(name, 0.0)
            return exact if exact > _SAME else 0.0, errors[name] / self.allowed[name]

        worst = sorted(self.parameters, key=excess, reverse=True)[:_SHOWN]
        shown = ["loss", "output", *worst]
        width = max(len("relative error of"), *map(len, shown))
        if self.ok:
            lines = ["The pipeline computes what the whole model does."]
        else:
            is_compared = not self.causes[0].startswith(NOT_FINITE)
            lines = ["The pipeline differs:" if is_compared else "The pipeline cannot be compared:"]
        lines += [f"- {cause}" for cause in self.causes]
        lines += [f"{'relative error of':<{width}}     found   allowed" + "  in float64" * bool(self.exact)]
        for name in shown:
            exact = f"  {self.exact[name]:10.1e}" if self.exact else ""
            lines.append(f"{name:<{width}}  {errors[name]:8.1e}  {self.allowed[name]:8.1e}{exact}")
        if len(self.parameters) > len(worst):
            lines.append(f"... and {len(self.parameters) - len(worst)} more, with less")
        return "\n".join([*lines, *self.notes])


_MOST_STEPS = 16  # five runs, and what meets again before and between them


def verify(runner: Runner, arguments: StepArguments, dtype: torch.dtype | None, model: Any = None) -> Verification:
    """Runs ``engine.verify``.

    Args:
        dtype: of the reference; None: float64 if it fits.
        model: the reference, on rank 0; None on all ranks: the stages in a chain.
    """
    with runner.pipeline.group.as_one(_MOST_STEPS):
        return _verify(runner, arguments, dtype, model)


def _verify(runner: Runner, arguments: StepArguments, dtype: torch.dtype | None, model: Any) -> Verification:
    group = runner.pipeline.group
    refuse(group, _refusal(runner))
    everyones = group.all_gather_object([str(_own_dtype(runner)), _fits(runner), model is not None])
    if arguments.rows is None:
        runner.settle(arguments)
    runner.pipeline.tied.compare(always=True)  # makes copies equal first, before a run has its own copies
    whole = WholeModel(runner, arguments, model) if any(given for *_, given in everyones) else None
    fits = all(fits for _, fits, _ in everyones) and (whole is None or whole.fits_wide)
    own = sorted({name for name, *_ in everyones})
    wide = dtype if dtype is not None else torch.float64 if fits else None
    if [str(wide)] == own:
        wide = None
    notes: list[str] = []
    session = Session(runner, arguments)
    run_whole = session.run_whole if whole is None else whole.run
    try:
        found = session.run(whole=False, dtype=None)
        if whole is not None:
            whole.note(found)
        if wide is not None:
            try:
                truth = run_whole(wide)
                where = _first_not_finite(runner, truth)
                problem = f"is not finite in {wide}: {where}." if where else ""
            except NotRun as error:  # a stage that takes one dtype only, say
                problem = f"does not run in {wide}: {error}"
            if problem:
                notes.append(f"The whole model {problem}")
                wide = None
        try:
            plain = run_whole(None)
        except NotRun as error:
            raise ValueError(f"the whole model does not run: {error}") from error
        where = _first_not_finite(runner, plain)
        exact = session.run(whole=False, dtype=wide) if wide is not None else None
        if wide is None:
            truth = plain
        comparison = _Comparison(runner, truth, plain, found, exact)
        differences = [] if whole is None else whole.compare_with(found)
        if where:
            differences = [f"{NOT_FINITE}: {where} where the model runs whole, so there is nothing to compare with"]
        result = comparison.verdict(differences, is_compared=not where)
        is_random = any(cause.startswith(RANDOMNESS) for cause in result.causes)  # then no two runs are alike
        if whole is not None and not result and not where and not is_random:
            chain = session.run(whole=True, dtype=wide)
            cut = _Comparison(runner, truth, plain, chain, None if wide is None else chain).verdict()
            first = whole.first_difference(chain, wide, comparison.tolerance)
            if not cut:
                result = replace(result, causes=(f"{CUT}: {first or _without_module(cut)}", *differences))
    finally:
        session.end()
        if whole is not None:
            whole.end()
    shown = (str(wide) if wide is not None else ", ".join(own)).replace("torch.", "")
    name = "the stages in a chain" if whole is None else "the model itself on rank 0"
    notes.insert(0, f"Reference: {name}, one segment, one micro-batch at a time, in {shown}.")
    equal = runner.pipeline.tied.equal
    if whole is not None:
        notes += whole.notes
    elif equal:
        more = f" and {len(equal) - 1} more pairs" if len(equal) > 1 else ""
        notes.append(f"Assumed not to be tied, though bit-equal: {equal[0]}{more}.")
    return replace(result, notes=(*notes, *result.notes))


def _without_module(cut: Verification) -> str:
    """Says what is known of stages whose modules all return what the model's do."""
    is_output = cut.output_error > cut.allowed["output"] or cut.exact.get("output", 0.0) > _SAME
    if is_output:
        return "all modules return what the model's do, and the output is another one: look at the code between modules"
    worst = sorted(cut.parameters, key=lambda name: cut.parameters[name] / cut.allowed[name], reverse=True)[:3]
    return (
        f"forwards agree and gradients do not, most of all {', '.join(worst)}: stages lack a tie (tied_parameters), a "
        "no_grad, a detach or a hook of gradients that the model has"
    )


def _first_not_finite(runner: Runner, run: Pass) -> str:
    """The place, of all ranks, where the run's loss or gradients became infinite or NaN; "" if they are finite."""
    found = [place for place in runner.pipeline.group.all_gather_object(run.not_finite) if place]
    return str(min(found)[1]) if found else ""


# -- one module --------------------------------------------------------------------------------------------------------


def verify_stage(
    module: nn.Module, sample: Tensor, segments: int | Sequence[int] = 2, *, seq_dim: int = 1, show: bool = True
) -> Verification:
    """Runs one module on a whole sample and in segments, and compares its output and gradients. Needs no group.

    The loss is half the squared distance of the output from fixed values that look random. The state of the module
    does not change.

    Args:
        module: takes ``sample`` and returns a tensor, both with the tokens along ``seq_dim``: (batch, tokens, ...).
        sample: if it is floating, its gradient is compared, too.
        segments: their number, or the tokens of each.
        show: prints the result.
    """
    count, sizes = (segments, None) if isinstance(segments, int) else (len(segments), list(segments))
    engine = LoneEngine(
        module,
        num_microbatches=1,
        num_segments=count,
        segment_sizes=sizes,
        seq_dim=seq_dim,
        loss_fn=_distance_from_fixed,
        loss=Loss(reduction="sum"),
        group=LoopbackGroup(1)[0],
        attention="any",
    )
    if sample.is_floating_point():
        sample = sample.detach().requires_grad_()
    tokens = torch.arange(sample.shape[seq_dim], dtype=torch.float64, device=sample.device)
    target = tokens.view([-1 if dim == seq_dim else 1 for dim in range(seq_dim + 1)])
    try:
        return engine.verify(sample, target=target, show=show)
    finally:
        engine.close()


def _distance_from_fixed(output: Tensor, positions: Tensor) -> Tensor:
    """Half the squared distance from values that look random and depend on a token's position in the sequence."""
    rest = output.dim() - positions.dim()
    others = math.prod(output.shape) // output.shape[positions.dim() - 1]
    shape = [1 if dim == positions.dim() - 1 else size for dim, size in enumerate(output.shape)]
    numbers = torch.arange(others, dtype=torch.float64, device=output.device).view(shape)
    values = torch.cos(positions.double().view(*positions.shape, *[1] * rest) * 12.9898 + numbers * 78.233)
    return 0.5 * (output - values.to(output.dtype)).square().sum()


# -- what can be verified ----------------------------------------------------------------------------------------------


def _refusal(runner: Runner) -> str:
    if runner.options.sequence_parallel != (0, 1):
        return (
            "verify compares whole segments: verify an engine without sequence_parallel= first, then share the tokens"
        )
    for _, module in runner.pipeline.placed_modules():
        if data_parallel(module) is not None:
            return (
                "verify runs a stage by itself, and this one is under DDP or FSDP2: verify an engine over the bare "
                "modules first, then wrap them"
            )
    for name, parameter in runner.pipeline.named_parameters():
        if hasattr(parameter, "to_local"):
            return f"parameter {name!r} is a DTensor: verify an engine over the modules before they are sharded"
    return ""


def _own_dtype(runner: Runner) -> torch.dtype:
    dtypes = [p.dtype for _, p in runner.pipeline.named_parameters() if p.is_floating_point()]
    return min(dtypes, key=lambda d: torch.finfo(d).bits, default=torch.get_default_dtype())


def _fits(runner: Runner) -> bool:
    """Whether float64 fits in the memory that is free: values, gradients twice, and one micro-batch's activations."""
    activations = 0.0
    if runner.last_step is not None:
        measured = sum(stage.saved for stage in runner.activations.values())  # bytes per token
        activations = measured * sum(runner.last_step.sizes) * 64 / torch.finfo(_own_dtype(runner)).bits
    wanted = 3 * 8 * sum(p.numel() for _, p in runner.pipeline.named_parameters()) + activations
    free = free_bytes(runner.pipeline.device)
    is_shared = runner.pipeline.device.type != "cuda"  # as if all ranks were on this machine
    return wanted < (free / runner.pipeline.num_ranks if is_shared else free)


# -- comparison --------------------------------------------------------------------------------------------------------


class _Comparison:
    """The errors of all ranks, gathered, and what they mean. Numbers and texts only cross between ranks.

    Args:
        truth: the whole model in the reference's dtype; plain: in the engine's; found: the pipeline in the engine's
            dtype; exact: in the reference's, None if that is the engine's.
    """

    def __init__(self, runner: Runner, truth: Pass, plain: Pass, found: Pass, exact: Pass | None) -> None:
        self._num_segments, self._has_exact = runner.options.num_segments, exact is not None
        eps = torch.finfo(_own_dtype(runner)).eps
        self.tolerance = _SAME if exact is not None else math.sqrt(eps)
        runs = [plain, found, exact or found]
        rows: list[Any] = [
            [name, norm(value), *(distance(run.gradients[i], value) for run in runs)]
            for i, (name, value) in enumerate(zip(names_of(runner, truth), truth.gradients, strict=True))
        ]
        losses = [_worst(run.losses, truth.losses) for run in runs]
        outputs = [_worst(run.outputs, truth.outputs) for run in runs]
        start = self._first_segment(runs[2], truth, runner.options.seq_dim)
        findings = [str(finding) for finding in dict.fromkeys(found.findings)]
        draws, drops = truth.draws or found.draws, bool(truth.drops or found.drops)
        mine = [rows, losses, outputs, start, findings, draws, drops, eps]
        everyones = list(zip(*runner.pipeline.group.all_gather_object(mine), strict=True))
        self._start, self._draws, self._drops, self._eps = min(everyones[3]), *map(max, everyones[5:])
        self._seen = dict.fromkeys(text for texts in everyones[4] for text in texts)
        rows = [row for theirs in everyones[0] for row in theirs]
        floor = 1e-3 * math.sqrt(sum(row[1] ** 2 for row in rows) / max(1, len(rows)))
        # Errors of the plain, the found and the exact run by name; and their root mean squares over the gradients.
        self._errors = {row[0]: [_ratio(distance, max(row[1], floor)) for distance in row[2:]] for row in rows}
        columns = list(zip(*self._errors.values(), strict=True)) or [(), ()]
        self._common = [math.sqrt(sum(e**2 for e in column) / max(1, len(column))) for column in columns]
        self._errors |= {
            "loss": list(map(max, *everyones[1], losses)),
            "output": list(map(max, *everyones[2], outputs)),
        }

    def _first_segment(self, found: Pass, truth: Pass, dim: int) -> int:
        """The first segment whose output differs; k if none does."""
        first = self._num_segments
        for mine, theirs in zip(found.outputs, truth.outputs, strict=False):
            if mine.shape != theirs.shape or mine.dim() <= dim or mine.shape[dim] != sum(found.sizes):
                continue
            pairs = zip(torch.split(mine, found.sizes, dim), torch.split(theirs, found.sizes, dim), strict=True)
            wrong = [s for s, (a, b) in enumerate(pairs) if not _ratio(distance(a, b), norm(b)) <= self.tolerance]
            first = min([first, *wrong])
        return first

    def verdict(self, differences: Sequence[str] = (), *, is_compared: bool = True) -> Verification:
        """
        Args:
            differences: what is known to differ, beside numbers.
            is_compared: False: the whole model itself gave numbers that are not finite, as ``differences`` says.
        """
        errors, eps = dict(self._errors), self._eps
        allowed, right = {}, {}
        for name, (plain, found, exact) in errors.items():
            allowed[name] = _ROUNDINGS * (max(plain, self._common[0]) + eps) if self._has_exact else math.sqrt(eps)
            right[name] = found <= allowed[name] and (not self._has_exact or exact <= _SAME)  # False for nan
        notes: tuple[str, ...] = ()
        if self._drops:
            notes = ("Dropout was off: it draws other numbers for segments than for a whole sequence.",)
        exact_errors = {name: exact for name, (_, _, exact) in errors.items()} if self._has_exact else {}
        loss, output = errors.pop("loss")[1], errors.pop("output")[1]
        parameters = {name: found for name, (_, found, _) in errors.items()}
        causes = tuple(differences)
        if is_compared and not all(right.values()):
            causes += self._causes(right)
        return Verification(not causes, parameters, loss, output, allowed, exact_errors, causes, notes)

    def _causes(self, right: dict[str, bool]) -> tuple[str, ...]:
        """Likely causes: those seen in the stages' forwards, else the one that the numbers tell."""
        causes = list(self._seen)
        if self._draws:
            causes.append(
                f"{RANDOMNESS}: the model draws random numbers of its own, other ones for segments than for a "
                "whole sequence; verify without them"
            )
        if causes:
            return tuple(causes)
        if right["output"] and not right["loss"]:
            cause = (
                f"{WEIGHTING}: the outputs agree and the losses do not. A segment's loss must be its sum and its "
                "divisor, (sum, divisor), or the mean over the targets that loss_weight counts (default: those that "
                'are not -100), or their sum with Loss(reduction="sum"); labels are shifted before the step'
            )
        elif right["output"]:
            cause = (
                f"{STATE}: outputs and losses agree and gradients do not, so a gradient that flows to earlier "
                "tokens in the whole model stops between segments; hand state on by seq1f1b.carry_in and carry_out, "
                "without detach"
            )
        elif self._num_segments == 1:
            cause = "state across micro-batches: one segment differs, too, when micro-batches run in this order"
        elif self._start == 0:
            cause = f"{STATISTICS}: the first segment differs, so a token depends on later ones or on their number"
        else:
            cause = (
                f"{STATE}: segment {self._start} is the first that differs, so something begins anew in each segment"
            )
        return (cause,)


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _ratio(distance: float, norm: float) -> float:
    return 0.0 if distance == 0.0 else distance / norm if norm > 0.0 else math.inf


def _worst(values: list[Tensor], truths: list[Tensor]) -> float:
    """Largest error, relative to the truths' root mean square: a loss may be near zero in one micro-batch."""
    if len(values) != len(truths):
        return math.inf
    finite = [norm(t.nan_to_num(0.0, 0.0, 0.0)) for t in truths]
    scale = math.sqrt(sum(norm**2 for norm in finite) / max(1, len(truths)))
    # A part of the output without tokens has another shape in segments: what comes of it is in loss and gradients.
    pairs = [(v, t) for v, t in zip(values, truths, strict=True) if v.shape == t.shape]
    return max((_ratio(distance(v, t), scale) for v, t in pairs), default=0.0, key=_or_infinite)
