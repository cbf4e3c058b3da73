"""One set of stages under torch's Schedule1F1B and under Seq1F1B."""

import torch
import torch.distributed as dist
from model import Config, build_stage, cross_entropy  # examples/model.py, PYTHONPATH=examples
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seq1f1b

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
config = Config(vocab=64, hidden=32, layers=4, heads=4, kv_heads=2, ffn=64)
tokens = torch.randint(64, (4, 129), generator=torch.Generator().manual_seed(0))


def run(make_schedule):
    module = build_stage(config, rank, num_ranks)
    schedule = make_schedule(PipelineStage(module, rank, num_ranks, device))
    losses = []
    if rank == 0:
        schedule.step(tokens[:, :-1])
    else:
        schedule.step(target=tokens[:, 1:], losses=losses)
    gradients = [parameter.grad for parameter in module.parameters()]
    return [f"{loss:.6f}" for loss in losses], gradients


losses, gradients = run(lambda stage: Schedule1F1B(stage, 4, cross_entropy))
for segments in (1, 4):
    options = {"n_segments": segments}
    found = run(
        lambda stage, o=options: seq1f1b.ScheduleSeq1F1B(stage, 4, cross_entropy, **o)
    )
    pairs = list(zip(gradients, found[1], strict=True))
    equal = all(torch.equal(a, b) for a, b in pairs)
    close = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    if rank == 1:
        same = found[0] == losses
        print(
            f"{segments} segments: same losses {same}, gradients equal {equal}, close {close}"
        )
dist.barrier()
dist.destroy_process_group()
