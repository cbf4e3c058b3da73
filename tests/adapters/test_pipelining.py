"""Do our schedules take the place of torch's: same stages, same calls, same losses, gradients and outputs?"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_processes
from tiny_model import Config, Stage, batch, cross_entropy, stage_of, whole_model
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from seq1f1b import (
    Limits,
    Memory,
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


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def whole_results(config: Config, model: Stage, tokens: Tensor, target: Tensor, M: int) -> tuple[list[Tensor], Tensor]:
    """Losses of the micro-batches and the output of the model run whole; gradients of the losses' mean."""
    model.zero_grad()
    output = model(tokens)
    losses = [cross_entropy(o, t) for o, t in zip(output.tensor_split(M), target.tensor_split(M), strict=True)]
    torch.stack(losses).mean().backward()
    return [loss.detach() for loss in losses], output.detach()


def check_gradients(stages: list[Stage], model: Stage) -> None:
    want = gradients(model)
    for stage in stages:
        for name, found in gradients(stage).items():
            torch.testing.assert_close(found, want[name], rtol=1e-9, atol=1e-11)


# -- beside torch's own ------------------------------------------------------------------------------------------------


def beside_1f1b(rank: int, world: int, M: int, dtype: torch.dtype, scale_grads: bool) -> None:
    config = Config(kv_heads=2)
    model = whole_model(config, dtype)
    tokens, target = batch(config, M, 19)
    args, target = roles(rank, world, tokens, target)
    results = []
    for kind in (Schedule1F1B, ScheduleSeq1F1B):
        module = stage_of(model, config, rank, world)
        schedule = kind(PipelineStage(module, rank, world, CPU), M, cross_entropy, None, None, None, scale_grads)
        for _ in range(2 - scale_grads):  # torch divides once more what an earlier step has left
            losses: list[Tensor] = []
            output = schedule.step(*args, target=target, losses=losses)
        results.append((losses, output, gradients(module)))
    (their_losses, their_output, theirs), (losses, output, ours) = results
    assert len(losses) == len(their_losses) == (M if rank == world - 1 else 0)
    assert all(torch.equal(a, b) for a, b in zip(losses, their_losses, strict=True))
    assert (output is None and their_output is None) or torch.equal(output, their_output)
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert torch.equal(found, theirs[name]), name


@pytest.mark.parametrize(
    ("M", "dtype", "scale_grads"),
    [(2, torch.float32, True), (3, torch.float64, False), (5, torch.float32, True), (4, torch.bfloat16, True)],
)
def test_with_one_segment_it_is_1f1b_bit_for_bit(M, dtype, scale_grads):
    run_processes(2, beside_1f1b, M, dtype, scale_grads)


def beside_interleaved(rank: int, world: int) -> None:
    M, config = 4, Config(kv_heads=2)
    model = whole_model(config, torch.float32)
    tokens, target = batch(config, M, 16)
    args, target = roles(rank, world, tokens, target)
    results = []
    for kind in (ScheduleInterleaved1F1B, ScheduleSeqInterleaved1F1B):
        modules = [stage_of(model, config, index, 2 * world) for index in (rank, rank + world)]
        stages = [
            PipelineStage(module, index, 2 * world, CPU)
            for module, index in zip(modules, (rank, rank + world), strict=True)
        ]
        losses: list[Tensor] = []
        output = kind(stages, M, cross_entropy).step(*args, target=target, losses=losses)
        results.append((losses, output, [gradients(module) for module in modules]))
    (their_losses, their_output, theirs), (losses, output, ours) = results
    torch.testing.assert_close(losses, their_losses)
    torch.testing.assert_close(output, their_output)
    torch.testing.assert_close(ours, theirs)


def test_several_stages_per_rank_beside_interleaved_1f1b():
    run_processes(2, beside_interleaved)


# -- segments against the model run whole ------------------------------------------------------------------------------


def segments(rank: int, world: int, M: int, sizes: Any, kind: str) -> None:
    config = Config(kv_heads=2)
    model = whole_model(config)
    tokens, target = batch(config, M, 24)
    want_losses, want_output = whole_results(config, model, tokens, target, M)
    stages_per_rank = 2 if kind == "interleaved" else 1
    indices = [rank + world * i for i in range(stages_per_rank)]
    modules = [stage_of(model, config, index, world * stages_per_rank) for index in indices]
    stages = [
        PipelineStage(module, index, world * stages_per_rank, CPU)
        for module, index in zip(modules, indices, strict=True)
    ]
    options: dict[str, Any] = {"n_segments": 3, "segment_sizes": sizes}
    schedule = (
        ScheduleSeqInterleaved1F1B(stages, M, cross_entropy, **options)
        if kind == "interleaved"
        else ScheduleSeq1F1B(stages[0], M, cross_entropy, **options)
    )
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
        (2, 3, None, "single"),
        (2, 1, [1, 20, 3], "single"),  # fewer micro-batches than stages
        (3, 2, [9, 8, 7], "single"),
        (2, 2, None, "interleaved"),
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


def accumulated(rank: int, world: int, M: int, dtype: torch.dtype, every: int, options: dict[str, Any]) -> None:
    """Each step adds the gradients of the mean of its M losses to what was there, which every n-th parameter has."""
    config, options = Config(kv_heads=2), dict(options)
    model = whole_model(config, dtype)
    kind = options.pop("kind", "single")
    own = [rank] if kind == "single" else [rank, rank + world]
    modules = [stage_of(model, config, index, world * len(own)) for index in own]
    stages = [PipelineStage(m, i, world * len(own), CPU) for m, i in zip(modules, own, strict=True)]
    schedule = (
        ScheduleSeq1F1B(stages[0], M, cross_entropy, **options)
        if kind == "single"
        else ScheduleSeqInterleaved1F1B(stages, M, cross_entropy, **options)
    )
    named = [pair for module in modules for pair in module.named_parameters()]
    whole = whole_model(config)
    whole.load_state_dict(model.state_dict())
    want = {name: torch.zeros_like(p) for name, p in whole.named_parameters()}
    for name, p in named[:: every or len(named) + 1][: len(named) * bool(every)]:
        p.grad = torch.randn_like(p)
        want[name] += p.grad
    objects = [p.grad for _, p in named]
    for seed in (1, 2, 3):
        tokens, target = batch(config, M, 12, seed=seed)
        args, own_target = roles(rank, world, tokens, target)
        schedule.step(*args, target=own_target)
        whole_results(config, whole, tokens, target, M)
        for name, gradient in gradients(whole).items():
            want[name] += gradient
    limit = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for (name, p), old in zip(named, objects, strict=True):
        assert (p.grad.double() - want[name]).norm() <= limit * want[name].norm().clamp(min=1.0), name
        assert p.grad.dtype == dtype and (old is None or p.grad is old)
    schedule.close()


@pytest.mark.parametrize(
    ("M", "dtype", "every", "options"),  # every: 0 for none
    [
        (3, torch.float64, 0, {"n_segments": 3}),
        (4, torch.float64, 2, {"n_segments": 2, "schedule": FILLED}),
        (3, torch.bfloat16, 1, {"n_segments": 3}),
        (3, torch.float32, 2, {}),
        (2, torch.float64, 1, {"n_segments": 2, "kind": "interleaved", "memory": Memory(recompute="all")}),
    ],
)
def test_a_step_divides_only_what_it_adds(M, dtype, every, options):
    run_processes(2, accumulated, M, dtype, every, options)


def frozen_and_unused(rank: int, world: int) -> None:
    """Gradients to which a step adds nothing: bits of a frozen parameter's, and of all where M is a power of two."""
    for M in (3, 4):
        module = nn.Linear(4, 4)
        module.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        module.unused = nn.Parameter(torch.randn(9))
        module.frozen.grad, module.unused.grad = torch.randn(9), torch.randn(9)
        before = gradients(module)
        schedule = ScheduleSeq1F1B(PipelineStage(module, rank, world, CPU), M, F.mse_loss, n_segments=2)
        x = torch.randn(M, 6, 4)
        for _ in range(2):
            schedule.step(*((x,) if rank == 0 else ()), target=x if rank == world - 1 else None)
        assert torch.equal(module.frozen.grad, before["frozen"])
        torch.testing.assert_close(module.unused.grad, before["unused"], rtol=0 if M == 4 else 5e-7, atol=0)
        schedule.close()


def test_gradients_to_which_a_step_adds_nothing():
    run_processes(1, frozen_and_unused)


def failed_step(rank: int, world: int) -> None:
    """What was there is not lost: 16-bit gradients stay as they were, others are not scaled."""
    config = Config()
    for dtype in (torch.bfloat16, torch.float32):
        module = stage_of(whole_model(config, dtype), config, rank, world)
        schedule = ScheduleSeq1F1B(PipelineStage(module, rank, world, CPU), 4, cross_entropy, n_segments=2)
        args, target = roles(rank, world, *batch(config, 4, 8))
        schedule.step(*args, target=target)
        before, objects = gradients(module), {name: p.grad for name, p in module.named_parameters()}
        plain, module.forward = module.forward, None  # type: ignore[assignment, method-assign]
        with pytest.raises((TypeError, PipelineError)):
            schedule.step(*args, target=target)
        module.forward = plain  # type: ignore[method-assign]
        for name, p in module.named_parameters():
            assert p.grad is objects[name] and torch.equal(p.grad, before[name])
        schedule.step(*args, target=target)
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.grad, 2 * before[name])


def test_an_error_keeps_what_was_there():
    run_processes(2, failed_step)


# -- patterns of torch's own tests -------------------------------------------------------------------------------------


def uneven_microbatches(rank: int, world: int) -> None:
    """Torch splits a batch of 5 into 3 and 2, which neither its stages nor our cache take."""
    config = Config()
    tokens, target = batch(config, 3, 12)
    module = stage_of(whole_model(config), config, rank, world)
    schedule = ScheduleSeq1F1B(PipelineStage(module, rank, world, CPU), 2, cross_entropy, n_segments=2)
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
    module = stage_of(whole_model(config), config, rank, world)
    stage = PipelineStage(module, rank, world, CPU)
    schedule = ScheduleSeq1F1B(stage, 2, cross_entropy, n_segments=2)
    tokens, target = batch(config, 2, 8)
    with torch.no_grad(), pytest.raises(RuntimeError, match="step needs gradients; use eval"):
        schedule.step(tokens, target=target)
    with pytest.raises(ValueError, match="arg_mbs stands for the whole batch's"):
        schedule.step(tokens, arg_mbs=[(tokens,), (tokens,)], target=target)
    with pytest.raises(ValueError, match="Expecting 2 arg_mbs but got 1"):
        schedule.step(arg_mbs=[(tokens,)], target=target)
    with pytest.raises(ValueError, match="inputs are needed on the rank of the first stage"):
        schedule.step(target=target)
    with pytest.raises(ValueError, match="segment_sizes has 3 entries, num_segments is 2"):
        ScheduleSeq1F1B(stage, 2, cross_entropy, n_segments=2, segment_sizes=[3, 3, 2]).step(tokens, target=target)
    counts = {"num_ranks": 1, "num_microbatches": 2, "num_segments": 3, "parents": [[-1, 0, 0]] * 2}
    with pytest.raises(ValueError, match="are trees, which torch's have no word for: use PipelineEngine"):
        ScheduleSeq1F1B(stage, 2, cross_entropy, n_segments=3, schedule=build_schedule("seq1f1b", **counts))
    counts = {"num_ranks": 2, "num_microbatches": 2, "num_segments": 1}
    with pytest.raises(ValueError, match=r"rank 1 has stages \[0\] of 1, in .* it has \[1\]"):
        elsewhere = mock.Mock(stage_index=0, num_stages=1, group_rank=1)
        ScheduleSeq1F1B(elsewhere, 2, cross_entropy, schedule=build_schedule("seq1f1b", **counts))
    with pytest.raises(ValueError, match="num_microbatches is 0"):
        ScheduleSeq1F1B(stage, 0, cross_entropy)
    with pytest.raises(ScheduleError, match="stages per rank"):
        ScheduleSeqInterleaved1F1B([stage], 2, cross_entropy)
    with pytest.raises(TypeError, match=r"ScheduleSeq1F1B has no argument 'limit'; did you mean 'limits'\?"):
        ScheduleSeq1F1B(stage, 2, cross_entropy, limit=Limits())
    with pytest.raises(TypeError, match=r"no argument 'num_segments'; did you mean 'n_segments'\?"):
        ScheduleSeqInterleaved1F1B([stage], 2, cross_entropy, n_segments=4, num_segments=2)
    with pytest.raises(TypeError, match=r"loss must be a seq1f1b\.Loss, got str"):
        ScheduleSeq1F1B(stage, 2, cross_entropy, loss="sum")


def test_refusals():
    run_processes(1, refusals)
