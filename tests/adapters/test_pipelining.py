"""Do our schedules take the place of torch's: same stages, same calls, same losses, gradients and outputs?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_processes
from tiny_model import Config, Stage, batch, cross_entropy, run_whole, stage_of, whole_model
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from seq1f1b import (
    Limits,
    Loss,
    PipelineError,
    ScheduleError,
    ScheduleSeq1F1B,
    ScheduleSeqInterleaved1F1B,
    build_schedule,
)

CPU = torch.device("cpu")
FILLED = partial(build_schedule, "seq1f1b", weights="fill")


def roles(rank: int, world: int, tokens: Any, target: Any) -> tuple[tuple[Any, ...], Any]:
    """Positional arguments and target of a rank, as torch's schedules want them."""
    return (tokens,) if rank == 0 else (), target if rank == world - 1 else None


def made(kind: Any, rank: int, world: int, model: Stage, config: Config, M: int, *more: Any, **options: Any) -> Any:
    """The rank's modules and their schedule; interleaved ones have two stages on each rank."""
    own = [rank, rank + world] if "Interleaved" in kind.__name__ else [rank]
    total = world * len(own)
    modules = [stage_of(model, config, index, total) for index in own]
    stages = [PipelineStage(module, index, total, CPU) for module, index in zip(modules, own, strict=True)]
    return modules, kind(stages if len(own) > 1 else stages[0], M, cross_entropy, *more, **options)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def check_gradients(stages: list[Stage], model: Stage) -> None:
    want = gradients(model)
    for stage in stages:
        for name, found in gradients(stage).items():
            torch.testing.assert_close(found, want[name], rtol=1e-9, atol=1e-11)


# -- beside torch's own ------------------------------------------------------------------------------------------------


def beside(rank: int, world: int, kinds: tuple[Any, Any], M: int, dtype: torch.dtype, scale_grads: bool) -> None:
    config = Config(kv_heads=2)
    model = whole_model(config, dtype)
    args, target = roles(rank, world, *batch(config, M, 19))
    results = []
    for kind in kinds:
        modules, schedule = made(kind, rank, world, model, config, M, None, None, None, scale_grads)
        for _ in range(2 - scale_grads):  # torch divides once more what an earlier step has left
            losses: list[Tensor] = []
            output = schedule.step(*args, target=target, losses=losses)
        assert len(losses) == (M if rank == world - 1 else 0)
        results.append((losses, output, [gradients(module) for module in modules]))
    is_exact = ScheduleSeq1F1B in kinds and (not scale_grads or M & (M - 1) == 0)  # else sums and 1 / M are rounded
    torch.testing.assert_close(*results, **({"rtol": 0, "atol": 0} if is_exact else {}))


@pytest.mark.parametrize(
    ("kinds", "M", "dtype", "scale_grads"),
    [
        ((Schedule1F1B, ScheduleSeq1F1B), 3, torch.float64, False),
        ((Schedule1F1B, ScheduleSeq1F1B), 5, torch.float32, True),
        ((Schedule1F1B, ScheduleSeq1F1B), 4, torch.bfloat16, True),
        ((ScheduleInterleaved1F1B, ScheduleSeqInterleaved1F1B), 4, torch.float32, True),
    ],
)
def test_with_one_segment_it_is_torchs_schedule(kinds, M, dtype, scale_grads):
    """1F1B bit for bit, but for 1 / M."""
    run_processes(2, beside, kinds, M, dtype, scale_grads)


# -- segments against the model run whole ------------------------------------------------------------------------------


def segments(rank: int, world: int, M: int, sizes: Any, kind: Any) -> None:
    config = Config(kv_heads=2)
    model = whole_model(config)
    tokens, target = batch(config, M, 24)
    want_losses, _ = run_whole(model, tokens, target, M)
    want_output = model(tokens).detach()
    modules, schedule = made(kind, rank, world, model, config, M, n_segments=3, segment_sizes=sizes)
    args, target = roles(rank, world, tokens, target)
    evaluated: list[Tensor] = []
    eval_output = schedule.eval(*args, target=target, losses=evaluated)
    assert all(p.grad is None for module in modules for p in module.parameters())
    losses: list[Tensor] = [torch.tensor(7.0)]  # forgotten, as torch's schedules do
    output = schedule.step(*args, target=target, losses=losses)
    if rank == world - 1:
        torch.testing.assert_close(losses, want_losses, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(evaluated, losses, rtol=0, atol=0)
        torch.testing.assert_close(output, want_output, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(eval_output, output, rtol=0, atol=0)
    else:
        assert output is None and eval_output is None and len(losses) == 1
    check_gradients(modules, model)
    assert schedule.step(*args, target=target, return_outputs=False) is None


@pytest.mark.parametrize(
    ("world", "M", "sizes", "kind"),
    [
        (2, 3, None, ScheduleSeq1F1B),
        (2, 1, [1, 20, 3], ScheduleSeq1F1B),  # fewer micro-batches than stages
        (3, 2, [9, 8, 7], ScheduleSeq1F1B),
        (2, 2, None, ScheduleSeqInterleaved1F1B),
    ],
)
def test_segments_equal_the_model_run_whole(world, M, sizes, kind):
    run_processes(world, segments, M, sizes, kind)


class Conditioned(nn.Module):
    """A stage with keyword arguments: a bias of every token, one of every micro-batch, and a plain number."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, *, bias: Tensor, shift: Tensor, factor: float) -> Tensor:
        output = self.stage(x)
        return output * factor + bias[..., None] + shift[:, None, None]


def with_kwargs(rank: int, world: int, k: int) -> None:
    M, config = 2, Config()
    model = whole_model(config)
    tokens, target = batch(config, M, 12)
    bias, shift = (torch.linspace(-1, 1, n, dtype=torch.float64) for n in (24 * M, 2 * M))
    bias = bias.view(2 * M, 12)
    wholes = [Conditioned(stage_of(model, config, index, world)) for index in range(world)]
    hidden: Tensor = tokens
    for whole in wholes:
        hidden = whole(hidden, bias=bias, shift=shift, factor=0.5)
    torch.stack(
        [weighted(o, t, 3.0) for o, t in zip(hidden.tensor_split(M), target.tensor_split(M), strict=True)]
    ).mean().backward()

    module = Conditioned(stage_of(model, config, rank, world))
    rules: dict[str, Any] = {"bias": "slice", "shift": "replicate"}
    schedule = ScheduleSeq1F1B(
        PipelineStage(module, rank, world, CPU), M, weighted,
        kwargs_chunk_spec={"bias": TensorChunkSpec(0), "shift": TensorChunkSpec(0), "factor": _Replicate},
        n_segments=k, arg_rules=rules if k > 1 else None,
    )  # fmt: skip
    args, target = roles(rank, world, tokens, target)
    schedule.step(*args, target=target, loss_kwargs={"factor": 3.0}, bias=bias, shift=shift, factor=0.5)
    want = gradients(wholes[rank])
    torch.testing.assert_close(gradients(module), want, rtol=1e-9, atol=1e-11)

    module.zero_grad()  # the same as lists of micro-batches
    kwarg_mbs = [{"bias": b, "shift": s, "factor": 0.5} for b, s in zip(bias.chunk(M), shift.chunk(M), strict=True)]
    schedule.step(
        arg_mbs=[(t,) for t in tokens.chunk(M)] if args else None,
        kwarg_mbs=kwarg_mbs,
        target_mbs=None if target is None else list(target.chunk(M)),
        loss_kwargs={"factor": 3.0},
    )
    torch.testing.assert_close(gradients(module), want, rtol=1e-9, atol=1e-11)


def weighted(output: Tensor, target: Tensor, factor: float) -> Tensor:
    return factor * F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("k", [1, 3])
def test_keyword_arguments_of_stages_and_loss(k):
    run_processes(2, with_kwargs, k)


# -- gradients that are there already ----------------------------------------------------------------------------------


def accumulated(rank: int, world: int, variants: list[tuple[int, torch.dtype, int, dict[str, Any]]]) -> None:
    """Steps add to what was there: the gradients of the mean of their M losses."""
    for M, dtype, stride, options in variants:
        config = Config(kv_heads=2)
        model = whole_model(config, dtype)
        options = {"kind": ScheduleSeq1F1B, **options}
        modules, schedule = made(options.pop("kind"), rank, world, model, config, M, **options)
        named = {p: name for module in modules for name, p in module.named_parameters()}
        generator = torch.Generator().manual_seed(rank)
        for p in [*named][::stride]:  # others have none
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
        start = {p: (p.grad, p.grad.to(torch.float64, copy=True)) for p in [*named][::stride]}
        whole = whole_model(config)
        whole.load_state_dict(model.state_dict())
        want = {name: torch.zeros_like(p) for name, p in whole.named_parameters()}
        for seed in (1, 2, 3):
            tokens, target = batch(config, M, 12, seed=seed)
            args, own_target = roles(rank, world, tokens, target)
            schedule.step(*args, target=own_target)
            for name, gradient in run_whole(whole, tokens, target, M)[1].items():
                want[name] += gradient
        for p, name in named.items():
            before, value = start.get(p, (p.grad, torch.zeros_like(want[name])))
            expected = want[name] + value
            limit = 1e-11 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 5e-2
            assert (p.grad.double() - expected).norm() <= limit * expected.norm().clamp(min=1.0), name
            assert p.grad is before and p.grad.dtype == dtype
        schedule.close()


def test_a_step_divides_only_what_it_adds():
    variants: list[tuple[int, torch.dtype, int, dict[str, Any]]] = [
        (4, torch.float64, 2, {"n_segments": 2, "schedule": FILLED}),
        (3, torch.bfloat16, 1, {"n_segments": 3}),
        (3, torch.float32, 2, {"n_segments": 2, "kind": ScheduleSeqInterleaved1F1B}),
    ]
    run_processes(2, accumulated, variants)


# -- patterns of torch's own tests -------------------------------------------------------------------------------------


def uneven_microbatches(rank: int, world: int) -> None:
    """Torch splits a batch of 5 into 3 and 2, which neither its stages nor our cache take."""
    config = Config()
    tokens, target = batch(config, 3, 12)
    [module], schedule = made(ScheduleSeq1F1B, rank, world, whole_model(config), config, 2, n_segments=2)
    args, own_target = roles(rank, world, tokens[:5], target[:5])
    with pytest.raises((ValueError, PipelineError), match=r"must have one batch size.*drop_last=True") as found:
        schedule.step(*args, target=own_target)
    assert "micro-batch 1 of inputs has batch size 2 and micro-batch 0 has 3" in str(found.value)
    assert not gradients(module)
    dist.barrier()  # both have left the step that failed
    args, own_target = roles(rank, world, tokens, target)
    schedule.step(*args, target=own_target)  # goes on with the next batch


def test_uneven_microbatches_are_refused_on_every_rank():
    run_processes(2, uneven_microbatches)


def refusals(rank: int, world: int) -> None:
    config = Config()
    stage = PipelineStage(stage_of(whole_model(config), config, rank, world), rank, world, CPU)
    tokens, target = batch(config, 2, 8)
    schedule = ScheduleSeq1F1B(stage, 2, cross_entropy, n_segments=2)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call eval\(\)"):
        schedule.step(tokens, target=target)
    with pytest.raises(ValueError, match="arg_mbs stands for an argument of the whole batch"):
        schedule.step(tokens, arg_mbs=[(tokens,), (tokens,)], target=target)
    with pytest.raises(ValueError, match="Expecting 2 arg_mbs but got 1"):
        schedule.step(arg_mbs=[(tokens,)], target=target)
    counts = {"num_ranks": 1, "num_microbatches": 2, "num_segments": 3, "parents": [[-1, 0, 0]] * 2}
    trees = build_schedule("seq1f1b", **counts)
    for error, message, options in (
        (ValueError, "segments of this schedule are trees.*: use PipelineEngine", {"n_segments": 3, "schedule": trees}),
        (ValueError, "num_microbatches is 0", {"n_microbatches": 0}),
        (ScheduleError, "stages per rank", {"kind": ScheduleSeqInterleaved1F1B, "stages": [stage]}),
        (ValueError, "give the schedule its own argument scale_grads=False", {"loss": Loss(scale_grads=False)}),
        (TypeError, "loss must be a seq1f1b.Loss, got str", {"loss": "sum"}),
        (TypeError, "unexpected keyword argument 'limit'", {"limit": Limits()}),
        (TypeError, "multiple values for keyword argument 'num_segments'", {"num_segments": 2}),
    ):
        given: dict[str, Any] = {"n_microbatches": 2, "loss_fn": cross_entropy, **options}
        kind = given.pop("kind", ScheduleSeq1F1B)
        with pytest.raises(error, match=message):
            kind(given.pop("stages", stage), **given)


def test_refusals():
    run_processes(1, refusals)
