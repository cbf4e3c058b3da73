"""Are gradients under DDP and FSDP2 those of one model over all replicas' batches, reduced once per step?"""

from __future__ import annotations

import itertools
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from replicas import take_head, wrap
from slices import full_only
from tiny_model import (
    Config,
    batch,
    cross_entropy,
    full_gradient,
    gradient_error,
    run_whole,
    stage_of,
    whole_model,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from seq1f1b import Loss, Memory, PipelineEngine, ScheduleSeq1F1B, add_loss, build_schedule

LENGTH, M, K = 13, 2, 3
FSDP_COLLECTIVES = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")  # of older torch
)


def counting(name: str) -> Any:
    """A patch under which calls of one of torch's collectives are counted."""
    return mock.patch.object(dist, name, wraps=getattr(dist, name))


def alone(rank: int, world: int) -> dist.ProcessGroup:
    """The group of this rank, a pipeline of one stage."""
    return [dist.new_group([r]) for r in range(world)][rank]


def gradients_of(module: Any, times: int = 1) -> dict[str, Tensor]:
    return {name: full_gradient(p.grad) / times for name, p in module.named_parameters()}


def count_reductions(state, bucket):  # torch refuses annotations that are text
    group, reductions = state
    reductions.append(bucket.index())
    return allreduce_hook(group, bucket)


PLAIN = [("seq1f1b", 2, K, 1, "planned")]
# Three that split the backward, the last of them in part: the last gradients of its stage 3 come from a whole B. In the
# second W runs in waits, which fall anywhere.
SPLIT = [("seq-zb-h1", 2, K, 1, "planned"), ("seq-zbv", 2, K, 2, "fill"), ("dualpipev", 4, 1, 2, "planned")]


def replicas(
    rank: int, world: int, kind: str, head_in_loss: bool, orders: Any, drop_in: bool = False, recompute: str = "none"
) -> None:
    """Two replicas of two ranks, under our engine or by ScheduleSeq1F1B in the place of torch's schedule.

    Gradients of two steps add up, and each step reduces once, in the last backward or after the last W.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    replica, index = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    group, data_mesh = mesh.get_group("data"), mesh["data"]
    config = Config(hidden=16, kv_heads=2, checkpoint=head_in_loss)  # I recomputes, under the wrapper's hooks
    model = whole_model(config)
    for name, M, k, v, weights in orders:
        tokens, target = batch(config, 2 * M, LENGTH)
        _, truth = run_whole(model, tokens, target, 2 * M)
        schedule = build_schedule(name, num_ranks=2, num_microbatches=M, num_segments=k, stages_per_rank=v)
        schedule = schedule.replace(weights=weights)
        own = [s for s, owner in enumerate(schedule.rank_of_stage) if owner == index]
        plain: list[nn.Module] = [stage_of(model, config, s, schedule.num_stages) for s in own]
        has_last = schedule.num_stages - 1 in own
        loss_fn: Any = take_head(plain[-1]) if head_in_loss and has_last else cross_entropy
        modules = [*plain, loss_fn] if isinstance(loss_fn, nn.Module) else plain
        names = {name for module in modules for name, _ in module.named_parameters()}
        wrapped = [wrap(kind, stage, group, data_mesh) for stage in plain]
        if isinstance(loss_fn, nn.Module):
            loss_fn = wrap(kind, loss_fn, group, data_mesh)
        sizes, pipeline = [1, 7, 5] if k == K else None, mesh.get_group("pipeline")
        driver: Any
        if drop_in:
            torch_stage = PipelineStage(wrapped[0], index, 2, torch.device("cpu"), group=pipeline)
            driver = ScheduleSeq1F1B(torch_stage, M, loss_fn, n_segments=k, segment_sizes=sizes)
        else:
            driver = PipelineEngine(
                wrapped, schedule=schedule, num_microbatches=M, num_segments=k, segment_sizes=sizes, loss_fn=loss_fn,
                group=pipeline, memory=Memory(recompute=recompute),
            )  # fmt: skip
        engine = driver.engine if drop_in else driver
        half = slice(replica * 2 * M, (replica + 1) * 2 * M)
        arguments, own_target = (tokens[half],) if index == 0 else (), target[half] if has_last else None
        driver.eval(*arguments, target=own_target)
        reductions: list[list[int]] = []
        for stage in wrapped if kind != "fsdp" else []:
            reductions.append([])
            stage.register_comm_hook((group, reductions[-1]), count_reductions)
        for step in (1, 2):
            with counting(FSDP_COLLECTIVES[0]) as gathers, counting(FSDP_COLLECTIVES[1]) as scatters:
                driver.step(*arguments, target=own_target)
            found = gradients_of(engine)
            assert found.keys() == names
            assert gradient_error(found, {name: step * truth[name] for name in found}) < 1e-10, (name, step)
            if kind == "fsdp":
                outer = sum(any("blocks" not in n for n, _ in stage.named_parameters()) for stage in plain)
                groups = sum(len(stage.blocks) for stage in plain) + outer + isinstance(loss_fn, nn.Module)
                assert gathers.call_count == scatters.call_count == groups, (name, step)
            for buckets in reductions:
                assert sorted(buckets) == list(range(len(buckets))) and buckets, (name, step)  # every bucket once
                buckets.clear()
        norm = engine.clip_grad_norm_(1e-3)
        torch.testing.assert_close(norm, 2 * torch.stack([g.norm() for g in truth.values()]).norm(), rtol=1e-9, atol=0)
        assert ("I" in schedule.kinds) == (sum(stage.deferred_weights for stage in engine.report().stages) > 0)
        dist.barrier()
        engine.close()


WAYS = {
    "plain": {"orders": PLAIN},
    "recomputed": {"orders": PLAIN, "recompute": "all"},
    "in torch's place": {"orders": PLAIN, "drop_in": True},
    "split": {"orders": SPLIT},
}


@pytest.mark.parametrize(
    ("kind", "head_in_loss", "way"),
    [
        *(("ddp", True, "recomputed"), ("fsdp", False, "recomputed")),
        *(("ddp", True, "in torch's place"), ("fsdp", False, "in torch's place")),
        *(("ddp", False, "split"), ("ddp unused", True, "split"), ("fsdp", True, "split")),
        *full_only(("ddp", True, "plain"), ("fsdp", True, "plain"), ("fsdp", False, "split")),
    ],
)
def test_two_replicas_of_two_ranks(kind, head_in_loss, way):
    run_processes(4, partial(replicas, **WAYS[way]), kind, head_in_loss)


def global_count(rank: int, world: int) -> None:
    """Replicas of one stage, of which the second counts a third as many targets."""
    config = Config(kv_heads=2)
    model = whole_model(config)
    tokens, target = batch(config, 2 * M, LENGTH)
    target[2 * M :, ::3] = -100
    target[2 * M :, 1::3] = -100
    model.zero_grad()
    cross_entropy(model(tokens), target).backward()  # the mean over all tokens
    truth = gradients_of(model)

    own = slice(rank * 2 * M, (rank + 1) * 2 * M)
    mesh = init_device_mesh("cpu", (world,))
    own_group = alone(rank, world)
    for kind, schedule in itertools.product(("ddp", "fsdp", "fsdp that sums"), ("seq1f1b", "seq-zb-h1")):
        stage = stage_of(model, config, 0, 1)
        wrapped = wrap(kind.split()[0], stage, mesh.get_group(), mesh)
        if kind == "fsdp that sums":
            for module in wrapped.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
        engine = PipelineEngine(
            wrapped, schedule=schedule, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=own_group
        )
        evaluate_other_weights(wrapped, tokens[own])
        counted, total = (float((each != -100).sum()) for each in (target[own], target))
        engine.step(tokens[own], target=target[own], loss_weight=total)
        found = gradients_of(engine)
        assert gradient_error(found, truth) < 1e-10, (kind, schedule)
        wrapped.zero_grad()
        factor = 1 if kind == "fsdp that sums" else world
        (cross_entropy(wrapped(tokens[own]), target[own]) * (factor * counted / total)).backward()
        assert gradient_error(gradients_of(engine), truth) < 1e-10, "of the script's own backward"
        engine.close()
    # An auxiliary loss weighs by the targets of its micro-batch among those of all replicas.
    model.zero_grad()
    for part, counted in zip(model(tokens).chunk(2 * M), target.chunk(2 * M), strict=True):
        share = float((counted != -100).sum()) / float((target != -100).sum())
        (share * (cross_entropy(part, counted) + 0.1 * part.square().mean())).backward(retain_graph=True)
    truth = gradients_of(model)
    for options, weight in (({}, float((target != -100).sum())), ({"loss": Loss(weight="targets")}, None)):
        stage = stage_of(model, config, 0, 1)
        stage.register_forward_hook(lambda module, inputs, output: add_loss(0.1 * output.square().mean()))
        wrapped = wrap("ddp", stage, mesh.get_group(), mesh)
        engine = PipelineEngine(
            wrapped, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=own_group, **options
        )
        engine.step(tokens[own], target=target[own], loss_weight=weight)
        assert gradient_error(gradients_of(engine), truth) < 1e-10, options
        engine.close()


def evaluate_other_weights(module: nn.Module, tokens: Tensor) -> None:
    """Evaluates a module whose weights are zero for once; FSDP2 keeps what it gathered."""
    parameters = list(module.parameters())
    weights = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
        module(tokens)
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


class Gated(nn.Module):
    """A layer for some segments of more than two tokens only, one for the others, and one that no unit uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.some, self.others, self.never = (nn.Linear(4, 4, bias=False).double() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        if x.shape[1] > 2:
            y = y + (self.some(x) if x[0, 0, 0] > 0 else self.others(x))
        return y


def unused(rank: int, world: int) -> None:
    """The last backward is that of the first segment, of one token: it leaves layers out, each replica another one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=generator)
    x[:, 1, 0] = torch.tensor([1.0, -1.0])
    target = torch.zeros(2, 6, 4, dtype=torch.float64)
    model = Gated()
    outputs = [torch.cat([model(row[:, :1]), model(row[:, 1:])], 1) for row in x[:, None]]
    torch.stack([mse_loss(o, t) for o, t in zip(outputs, target[:, None], strict=True)]).mean().backward()

    group = alone(rank, world)
    for schedule, is_view in (("seq1f1b", False), ("seq-zb-h1", True)):
        module = DistributedDataParallel(Gated(), find_unused_parameters=True, gradient_as_bucket_view=is_view)
        engine = PipelineEngine(
            module, schedule=schedule, num_microbatches=1, num_segments=2, segment_sizes=[1, 5],
            loss_fn=mse_loss, loss=Loss(weight=torch.numel), group=group,
        )  # fmt: skip
        for step in (1, 2, 3):
            engine.step(x[rank : rank + 1], target=target[rank : rank + 1])
            for name, parameter in engine.named_parameters():
                want = model.get_parameter(name).grad
                assert (parameter.grad is None) == (want is None), name
                if want is not None:
                    torch.testing.assert_close(parameter.grad, step * want)
    with pytest.raises(ValueError, match="static_graph"):
        PipelineEngine(DistributedDataParallel(Gated(), static_graph=True), num_microbatches=1, group=group)


def freed(rank: int, world: int) -> None:
    """Until its backward, only the unit that reduces holds its output: those of all would be as large as logits are."""
    outputs: list[Any] = []
    alive: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        alive.append(sum(each() is not None for each in outputs))
        outputs.append(weakref.ref(output))
        return output.sum()  # whose backward does not need the output

    module, x = DistributedDataParallel(nn.Linear(4, 4)), torch.randn(4, 6, 4)
    options = {"schedule": "gpipe", "num_microbatches": 4, "group": alone(rank, world)}
    PipelineEngine(module, loss_fn=loss_fn, **options).step(x, target=x)
    assert len(alive) == 4 and max(alive) <= 1, alive


def hooks(rank: int, world: int) -> None:
    """What tells DDP of gradients that are there calls no hook on a parameter."""
    x = torch.arange(48.0, dtype=torch.float64).view(2, 6, 4)
    group = alone(rank, world)
    calls: dict[str, list[str]] = {}
    for schedule in ("seq1f1b", "seq-zb-h1"):
        module = DistributedDataParallel(Gated(), find_unused_parameters=True)
        own = calls[schedule] = []
        weight = module.module.always.weight
        weight.register_hook(lambda gradient, own=own: own.append("tensor"))
        weight.register_post_accumulate_grad_hook(lambda parameter, own=own: own.append("accumulated"))
        engine = PipelineEngine(
            module, schedule=schedule, num_microbatches=2, num_segments=2, loss_fn=mse_loss,
            loss=Loss(weight=torch.numel), group=group,
        )  # fmt: skip
        engine.step(x, target=torch.zeros_like(x))
    assert calls["seq-zb-h1"] == calls["seq1f1b"] == ["tensor", "accumulated"] * 4


def mixed_precision(rank: int, world: int) -> None:
    """Gradients of 16-bit products are summed in the dtype of their reduction, as after each whole backward."""
    config = Config(kv_heads=2, hidden=16, layers=2)
    model = whole_model(config, torch.float32)
    tokens, target = batch(config, 4 * M, LENGTH)
    _, truth = run_whole(whole_model(config), tokens, target, 4 * M)
    own = slice(rank * 4 * M, (rank + 1) * 4 * M)
    mesh = init_device_mesh("cpu", (world,))
    own_group = alone(rank, world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for schedule in ("seq1f1b", "seq-zb-h1"):
        stage = stage_of(model, config, 0, 1)
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(stage, mesh=mesh, mp_policy=policy)
        engine = PipelineEngine(
            stage, schedule=schedule, num_microbatches=2 * M, num_segments=K, loss_fn=cross_entropy, group=own_group
        )
        engine.step(tokens[own], target=target[own])
        found[schedule] = gradients_of(engine)
        engine.close()
    assert gradient_error(found["seq-zb-h1"], found["seq1f1b"]) < 1e-5
    assert gradient_error(found["seq-zb-h1"], truth) < 0.05


def parts(rank: int, world: int) -> None:
    """A stage of which only parts are under FSDP2 is told, unless they hold all that trains; steps: failed_steps.py."""
    config = Config(hidden=16, layers=2)
    model, mesh, own_group = whole_model(config), init_device_mesh("cpu", (world,)), alone(rank, world)

    def make(stage: nn.Module) -> None:
        PipelineEngine(stage, num_microbatches=M, loss_fn=cross_entropy, group=own_group).close()

    for left_out in ("head", "", "frozen"):
        stage = stage_of(model, config, 0, 1)
        for part in (stage.embedding, stage.position, *stage.blocks.values(), stage.norm, stage.head):
            if part is not stage.head or not left_out:
                fully_shard(part, mesh=mesh)
        stage.head.requires_grad_(left_out != "frozen")
        with warnings.catch_warnings(record=True, action="always") as caught:
            make(stage)
        told = [str(w.message) for w in caught if "fully_shard" in str(w.message)]
        assert len(told) == (left_out == "head") and all("'head.weight'" in text for text in told)
    for number, replicas in ((0, mesh.get_group()), (1, own_group)):
        stage = stage_of(model, config, 0, 1)
        stage.blocks[str(number)] = wrap("ddp", stage.blocks[str(number)], replicas, mesh)
        with pytest.raises(ValueError, match="holds DDP inside") if number == 0 else nullcontext():
            make(stage)


def refused(rank: int, world: int) -> None:
    """Replicas would tune an order each, and a comparison needs the bare stage."""
    config, group = Config(hidden=16, layers=2), alone(rank, world)
    stage, (tokens, target) = DistributedDataParallel(whole_model(config)), batch(config, M, LENGTH)
    options = {"num_microbatches": M, "loss_fn": cross_entropy, "group": group}
    with pytest.raises(ValueError, match="another order in each replica"):
        PipelineEngine(stage, schedule="tuned", **options)
    with pytest.raises(ValueError, match="under DDP or FSDP2: verify an engine over the bare"):
        PipelineEngine(stage, **options).verify(tokens, target=target, show=False)


def every_question(rank: int, world: int) -> None:
    for question in (global_count, unused, freed, hooks, mixed_precision, parts, refused):
        question(rank, world)


def test_two_replicas_of_one_rank():
    run_processes(2, every_question)
