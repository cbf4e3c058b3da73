"""Comparison of every gradient of the pipeline with the whole model's, on one batch.

A second runner over the same stages, ranks and edges runs the whole model: one segment, and one micro-batch after
another. Its units count as outside a step, so ``causal_attention`` is plain attention there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.checks.verify_model import WholeModel
from seq1f1b.checks.verify_runs import Pass, Session, WholeModelError, names_of, odd_kind, refuse
from seq1f1b.engine.batch import StepArguments
from seq1f1b.engine.engine import LoneEngine
from seq1f1b.engine.findings import RANDOMNESS, STATE, WEIGHTING
from seq1f1b.engine.options import Loss
from seq1f1b.engine.runner import Runner
from seq1f1b.nested import distance, norm
from seq1f1b.placement import free_bytes
from seq1f1b.transport import LoopbackGroup

__all__ = ["Verification", "verify_stage"]

NOT_FINITE = "not finite"
_SHOWN = 8  # parameters in the printed table
# In float64, a correct pipeline differs from the whole model by 1e-12 and a wrong one by more than 1e-3. Between these
# lies the error of a model that computes parts in float32 whatever its dtype: 6e-8 times a condition of 1e3.
_SAME = 1e-4
# In the engine's dtype, the whole model's distance from float64 shows the effect of rounding on this model and batch.
# Segments round in another order, so each parameter may err by this factor times the distance, plus as many roundings
# of one number, because the whole model may be exact by chance. For 600 correct models in fp32, bf16 and fp16, the
# largest error was half of the allowed one.
_ROUNDINGS = 4.0


@dataclass(frozen=True)
class Verification:
    """Result of :meth:`seq1f1b.PipelineEngine.verify`, equal on all ranks. ``str()`` returns the printed table.

    The truth value is ``ok``, so ``assert engine.verify(...)`` fails on a difference.

    Errors are relative to the whole model's value: the norm of the difference, divided by the norm. For a gradient
    smaller than 1e-3 of the root mean square of all gradients' norms, this bound is the divisor.

    Attributes:
        ok: whether rounding explains all errors; False if the whole model's loss or gradients are not finite, which
            leaves nothing to compare with.
        parameters: error of each parameter's gradient in the engine's dtype, by stage and name; also errors of the
            gradients of inputs that require grad.
        loss_error, output_error: largest error of a micro-batch's loss, and of its output on the last stage.
        allowed: largest error explained by rounding, for each parameter, ``"loss"`` and ``"output"``.
        exact: errors with both sides in float64, by the names of ``allowed``; empty without a float64 reference.
        causes: likely causes of a difference, one line each; empty if ``ok``.
        notes: facts about the comparison, such as its reference.
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


_MOST_STEPS = 16  # five runs, and the meetings of ranks before and between them


def verify(runner: Runner, arguments: StepArguments, dtype: torch.dtype | None, model: Any = None) -> Verification:
    """Runs ``engine.verify``, with its arguments."""
    with runner.pipeline.group.as_one(_MOST_STEPS):
        return _verify(runner, arguments, dtype, model)


def _verify(runner: Runner, arguments: StepArguments, dtype: torch.dtype | None, model: Any) -> Verification:
    group = runner.pipeline.group
    refuse(group, _refusal(runner))
    everyones = group.all_gather_object([str(_own_dtype(runner)), _fits(runner), model is not None])
    if arguments.rows is None:
        runner.settle(arguments)
    runner.pipeline.tied.compare(always=True)  # makes tied parameters equal before a run copies them
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
            except WholeModelError as error:  # for example a stage for one dtype only
                problem = f"does not run in {wide}: {error}"
            if problem:
                notes.append(f"The whole model {problem}")
                wide = None
        try:
            plain = run_whole(None)
        except WholeModelError as error:
            raise ValueError(f"the whole model does not run: {error}") from error
        where = _first_not_finite(runner, plain)
        exact = session.run(whole=False, dtype=wide) if wide is not None else None
        if wide is None:
            truth = plain
        differences = [] if whole is None else whole.compare(plain, found)
        if where:
            differences = [f"{NOT_FINITE}: {where} where the model runs whole, so there is nothing to compare with"]
        result = _compare(runner, truth, plain, found, exact, differences)
        is_random = any(cause.startswith(RANDOMNESS) for cause in result.causes)  # then no two runs are alike
        if whole is not None and not result and not where and not is_random:
            chain = session.run(whole=True, dtype=wide)
            cut = _compare(runner, truth, plain, chain, None if wide is None else chain)
            tolerance = math.sqrt(torch.finfo(_own_dtype(runner)).eps) if wide is None else _SAME
            first = whole.first_difference(truth, chain, tolerance)
            if not cut:
                result = replace(result, causes=(f"the cut: {first or _without_module(cut)}", *differences))
    finally:
        session.end()
    shown = (str(wide) if wide is not None else ", ".join(own)).replace("torch.", "")
    name = "the stages in a chain" if whole is None else "the model itself on rank 0"
    notes.insert(0, f"Reference: {name}, one segment, one micro-batch at a time, in {shown}.")
    if whole is not None:
        notes += whole.notes
    return replace(result, notes=tuple(notes))


def _without_module(cut: Verification) -> str:
    """Returns the cause, in words, for wrong stages whose modules all return the model's values."""
    is_output = cut.output_error > cut.allowed["output"] or cut.exact.get("output", 0.0) > _SAME
    if is_output:
        return "all modules return the model's values, and the output differs: look at the code between modules"
    worst = sorted(cut.parameters, key=lambda name: cut.parameters[name] / cut.allowed[name], reverse=True)[:3]
    return (
        f"forwards agree and gradients do not, most of all {', '.join(worst)}: stages lack a tie (tied_parameters), a "
        "no_grad, a detach or a hook of gradients that the model has"
    )


def _first_not_finite(runner: Runner, run: Pass) -> str:
    """Returns the first module with an infinite or NaN result, else the first such loss or gradient.

    The result is "" if the losses and gradients of all ranks are finite. Collective.
    """
    losses = [f"the loss of micro-batch {m} is {kind}" for m, t in enumerate(run.losses) if (kind := odd_kind(t))]
    names = zip(names_of(runner, run), run.gradients, strict=True)
    gradients = [f"the gradient of {n} is {kind}" for n, t in names if t is not None and (kind := odd_kind(t))]
    modules = [f"{forward.place} returns {forward.odd}" for forward in run.forwards.values() if forward.odd]
    # Backwards run from the last stage to the first and, within a stage, from the last parameter to the first.
    first, last = min(runner.stages), max(runner.stages)
    ways = [([0, first], modules[:1]), ([1, 0], losses[:1]), ([2, -last], gradients[-1:])]
    mine = [[*key, text] for key, texts in ways for text in texts]
    found = [place for places in runner.pipeline.group.all_gather_object(mine) for place in places]
    return str(min(found)[-1]) if any(key for key, *_ in found) else ""


# -- one module --------------------------------------------------------------------------------------------------------


def verify_stage(
    module: nn.Module, sample: Tensor, segments: int | Sequence[int] = 2, *, seq_dim: int = 1, show: bool = True
) -> Verification:
    """Runs one module on a whole sample and in segments, and compares output and gradients. Needs no group.

    The loss is half the squared distance of the output from fixed pseudo-random values. The module's state does not
    change.

    Args:
        module: takes ``sample`` and returns a tensor, both with the tokens along ``seq_dim``: (batch, tokens, ...).
        sample: input of the module; the gradient of a floating-point sample is compared, too.
        segments: number of segments, or the tokens of each.
        show: whether to print the result.
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
    """Returns half the squared distance from pseudo-random values that depend on a token's position."""
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
    if runner.pipeline.parallels:
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
    """Returns whether free memory holds values, and gradients twice, in float64."""
    wanted = 3 * 8 * sum(p.numel() for _, p in runner.pipeline.named_parameters())
    free = free_bytes(runner.pipeline.device)
    is_shared = runner.pipeline.device.type != "cuda"  # assumes that all ranks are on this machine
    return wanted < (free / runner.pipeline.num_ranks if is_shared else free)


# -- comparison --------------------------------------------------------------------------------------------------------


def _compare(
    runner: Runner,
    truth: Pass,
    plain: Pass,
    found: Pass,
    exact: Pass | None,
    differences: Sequence[str] = (),
) -> Verification:
    """Compares the runs of all ranks, which exchange only numbers and texts. Collective.

    Args:
        truth: run of the whole model in the reference's dtype.
        plain: run of the whole model in the engine's dtype.
        found: run of the pipeline in the engine's dtype.
        exact: run of the pipeline in the reference's dtype; None if the engine has this dtype.
        differences: known differences, beside those of numbers; or the place of a number that is not finite.
    """
    runs = [plain, found, exact or found]
    own: list[Any] = [
        [name, norm(value), *(distance(run.gradients[i], value) for run in runs)]
        for i, (name, value) in enumerate(zip(names_of(runner, truth), truth.gradients, strict=True))
    ]
    losses = [_worst(run.losses, truth.losses) for run in runs]
    outputs = [_worst(run.outputs, truth.outputs) for run in runs]
    texts = [str(finding) for finding in dict.fromkeys(found.findings)]
    mine = [own, losses, outputs, texts, truth.draws or found.draws, torch.finfo(_own_dtype(runner)).eps]
    everyones = list(zip(*runner.pipeline.group.all_gather_object(mine), strict=True))
    seen, (draws, eps) = [text for theirs in everyones[3] for text in theirs], map(max, everyones[4:])
    rows = [row for theirs in everyones[0] for row in theirs]
    floor = 1e-3 * math.sqrt(sum(row[1] ** 2 for row in rows) / max(1, len(rows)))
    # Errors of the plain, the found and the exact run by name; the root mean square of the plain run's gradients.
    errors = {row[0]: [_ratio(distance, max(row[1], floor)) for distance in row[2:]] for row in rows}
    common = math.sqrt(sum(error**2 for error, _, _ in errors.values()) / max(1, len(errors)))
    errors |= {"loss": list(map(max, *everyones[1], losses)), "output": list(map(max, *everyones[2], outputs))}
    allowed, right = {}, {}
    for name, (of_plain, of_found, of_exact) in errors.items():
        allowed[name] = math.sqrt(eps) if exact is None else _ROUNDINGS * (max(of_plain, common) + eps)
        right[name] = of_found <= allowed[name] and (exact is None or of_exact <= _SAME)  # False for nan
    in_wide = {} if exact is None else {name: of_exact for name, (_, _, of_exact) in errors.items()}
    loss, output = errors.pop("loss")[1], errors.pop("output")[1]
    causes = tuple(differences)
    if not all(right.values()) and not any(cause.startswith(NOT_FINITE) for cause in causes):
        if draws:
            seen.append(
                f"{RANDOMNESS}: the model draws random numbers of its own, other ones for segments than for a whole "
                "sequence; verify without them"
            )
        causes += tuple(dict.fromkeys(seen)) or (_cause(right, runner.options.num_segments),)
    parameters = {name: of_found for name, (_, of_found, _) in errors.items()}
    return Verification(not causes, parameters, loss, output, allowed, in_wide, causes, ())


def _cause(right: dict[str, bool], num_segments: int) -> str:
    """Returns the likely cause of wrong numbers, without a finding from the stages' forwards."""
    if right["output"] and not right["loss"]:
        return (
            f"{WEIGHTING}: the outputs agree and the losses do not. A segment's loss must be its sum and its divisor, "
            "(sum, divisor), or the mean over the targets that loss_weight counts (default: those that are not -100), "
            'or their sum with Loss(reduction="sum"); labels are shifted before the step'
        )
    if right["output"]:
        return (
            f"{STATE}: outputs and losses agree and gradients do not, so a gradient that flows to earlier tokens in "
            "the whole model stops between segments; hand state on by seq1f1b.carry_in and carry_out, without detach"
        )
    if num_segments == 1:
        return "state across micro-batches: one segment differs, too, when micro-batches run in this order"
    return f"{STATE}: something begins anew in each segment, or a token depends on later ones"


def _ratio(distance: float, norm: float) -> float:
    return 0.0 if distance == 0.0 else distance / norm if norm > 0.0 else math.inf


def _worst(values: list[Tensor], truths: list[Tensor]) -> float:
    """Returns the largest error, relative to the truths' root mean square."""
    if len(values) != len(truths):
        return math.inf
    finite = [norm(t.nan_to_num(0.0, 0.0, 0.0)) for t in truths]  # a mean, as one micro-batch's loss may be near zero
    scale = math.sqrt(sum(norm**2 for norm in finite) / max(1, len(truths)))
    # An output without tokens has another shape in segments; its errors show in loss and gradients.
    pairs = [(v, t) for v, t in zip(values, truths, strict=True) if v.shape == t.shape]
    errors = [_ratio(distance(v, t), scale) for v, t in pairs]
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)
