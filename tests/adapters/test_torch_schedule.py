"""With one segment, is a step bit-equal to torch's own Schedule1F1B with the same attention?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from seq1f1b import Loss, PipelineEngine


def compare(rank: int, world: int, M: int, dtype: torch.dtype) -> None:
    config = Config(kv_heads=2)
    model = whole_model(config, dtype)
    tokens, target = batch(config, M, 19)
    ours, theirs = stage_of(model, config, rank, world), stage_of(model, config, rank, world)
    device = torch.device("cpu")

    stage = PipelineStage(theirs, rank, world, device)
    schedule = Schedule1F1B(stage, M, cross_entropy, scale_grads=False)
    losses: list[torch.Tensor] = []
    first, last = rank == 0, rank == world - 1
    schedule.step(*([tokens] if first else []), target=target if last else None, losses=losses if last else None)

    engine = PipelineEngine(ours, num_microbatches=M, loss_fn=cross_entropy, loss=Loss(scale_grads=False))
    found = engine.step(tokens if first else None, target=target if last else None)
    assert len(found) == len(losses)
    for a, b in zip(found, losses, strict=True):
        assert torch.equal(a, b)
    names = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, names[name]), name
    dist.barrier()
    engine.close()


@pytest.mark.parametrize(("M", "dtype"), [(2, torch.float32), (3, torch.float64), (5, torch.float32)])
def test_one_segment_is_torchs_1f1b_bit_for_bit(M, dtype):
    run_processes(2, compare, M, dtype)
