"""Are gradients under DDP and FSDP2 those of one model over all replicas' batches, reduced once per step?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from replicas import take_head, wrap
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from seq1f1b import PipelineEngine, ScheduleSeq1F1B

LENGTH, M, K = 13, 2, 3
FSDP_COLLECTIVES = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")  # of older torch
)


@contextmanager
def counted(*names: str) -> Iterator[Counter[str]]:
    """Calls of torch's collectives."""
    counts: Counter[str] = Counter()

    def counting(name: str, collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return collective(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield counts


def count_reductions(state, bucket):  # torch refuses annotations that are text
    group, reductions = state
    reductions.append(bucket.index())
    return allreduce_hook(group, bucket)


def replicas(rank: int, world: int, kind: str, head_in_loss: bool, drop_in: bool) -> None:
    """Two replicas of two stages, under our engine or by ScheduleSeq1F1B in the place of torch's schedule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    replica, index = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    config = Config(kv_heads=2)
    model = whole_model(config)
    tokens, target = batch(config, 2 * M, LENGTH)
    _, truth = run_whole(model, tokens, target, 2 * M)

    stage = stage_of(model, config, index, 2)
    loss_fn: Any = take_head(stage) if head_in_loss and index == 1 else cross_entropy
    modules = [stage, loss_fn] if isinstance(loss_fn, nn.Module) else [stage]
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    group, data_mesh = mesh.get_group("data"), mesh["data"]
    wrapped = wrap(kind, stage, group, data_mesh)
    if isinstance(loss_fn, nn.Module):
        loss_fn = wrap(kind, loss_fn, group, data_mesh)
    driver: Any
    if drop_in:
        torch_stage = PipelineStage(wrapped, index, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
        driver = ScheduleSeq1F1B(torch_stage, M, loss_fn, n_segments=K, segment_sizes=[1, 7, 5])
        engine = driver.engine
    else:
        driver = engine = PipelineEngine(
            wrapped, num_microbatches=M, num_segments=K, segment_sizes=[1, 7, 5], loss_fn=loss_fn,
            group=mesh.get_group("pipeline"),
        )  # fmt: skip
    own = slice(replica * 2 * M, (replica + 1) * 2 * M)
    arguments = (tokens[own],) if index == 0 else ()
    own_target = target[own] if index == 1 else None

    driver.eval(*arguments, target=own_target)
    for _ in range(2):
        driver.step(*arguments, target=own_target)
        found = {name: full_gradient(p.grad) for name, p in engine.named_parameters()}
        assert found.keys() == set(names.values())
        assert gradient_error(found, {name: truth[name] for name in found}) < 1e-10
        for parameter in engine.parameters():
            parameter.grad = None

    if kind == "fsdp":
        # Blocks, the embedding of the first stage, norm and head of the last, wherever these are.
        groups = len(stage.blocks) + 1
        with counted(*FSDP_COLLECTIVES) as counts:
            driver.step(*arguments, target=own_target)
        assert counts == dict.fromkeys(FSDP_COLLECTIVES, groups)
    else:
        reductions: list[int] = []
        wrapped.register_comm_hook((group, reductions), count_reductions)
        driver.step(*arguments, target=own_target)
        assert sorted(reductions) == list(range(len(reductions))) and reductions  # every bucket once

    norm = engine.clip_grad_norm_(1e-3)
    want = torch.stack([g.norm() for g in truth.values()]).norm()
    torch.testing.assert_close(norm, want, rtol=1e-9, atol=0)
    dist.barrier()
    engine.close()


@pytest.mark.parametrize("head_in_loss", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_replicas_of_two_stages(kind, head_in_loss):
    run_processes(4, replicas, kind, head_in_loss, False)


def test_ddp_by_the_schedule_in_torchs_place():
    run_processes(4, replicas, "ddp", True, True)


def global_count(rank: int, world: int) -> None:
    """Replicas of one stage, of which the second counts a third as many targets."""
    config = Config(kv_heads=2)
    model = whole_model(config)
    tokens, target = batch(config, 2 * M, LENGTH)
    target[2 * M :, ::3] = -100
    target[2 * M :, 1::3] = -100
    model.zero_grad()
    cross_entropy(model(tokens), target).backward()  # the mean over all tokens
    truth = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    own = slice(rank * 2 * M, (rank + 1) * 2 * M)
    mesh = init_device_mesh("cpu", (world,))
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for kind in ("ddp", "fsdp", "fsdp that sums"):
        stage = stage_of(model, config, 0, 1)
        wrapped = wrap(kind.split()[0], stage, mesh.get_group(), mesh)
        if kind == "fsdp that sums":
            for module in wrapped.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
        engine = PipelineEngine(wrapped, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=alone)
        engine.step(tokens[own], target=target[own], loss_weight=float((target != -100).sum()))
        found = {name: full_gradient(p.grad) for name, p in engine.named_parameters()}
        assert gradient_error(found, truth) < 1e-10, kind
        engine.close()


def test_a_global_count_of_targets_gives_the_mean_over_all_tokens():
    run_processes(2, global_count)


class Sometimes(nn.Module):
    """A stage whose second parameter takes part in segments of more than two tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.tensor([3.0, 5.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x[..., None] * self.always
        return y * self.sometimes if x.shape[1] > 2 else y


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def unused(rank: int, world: int) -> None:
    """The last backward is that of the first segment, of one token: it leaves a parameter out."""
    x = torch.arange(1.0, 13.0, dtype=torch.float64).view(2, 6)
    target = torch.zeros(2, 6, 2, dtype=torch.float64)
    model = Sometimes()
    outputs = [torch.cat([model(row[:, :1]), model(row[:, 1:])], 1) for row in x[:, None]]
    torch.stack([square(o, t) for o, t in zip(outputs, target[:, None], strict=True)]).mean().backward()

    module = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    group = [dist.new_group([r]) for r in range(world)][rank]
    engine = PipelineEngine(
        module, num_microbatches=1, num_segments=2, segment_sizes=[1, 5], loss_fn=square, group=group
    )
    for _ in range(2):
        engine.step(x[rank : rank + 1], target=target[rank : rank + 1])
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
        module.zero_grad()
    with pytest.raises(ValueError, match="static_graph"):
        PipelineEngine(DistributedDataParallel(Sometimes(), static_graph=True), num_microbatches=1, group=group)


def test_a_parameter_that_the_last_backward_leaves_out():
    run_processes(2, unused)
