"""Two replicas of a pipeline of two stages."""

import torch
import torch.distributed as dist
from model import Config, build_stage, cross_entropy  # examples/model.py, PYTHONPATH=examples
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import seq1f1b

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
config = Config(vocab=64, hidden=32, layers=4, heads=4, kv_heads=2, ffn=64)
stage = build_stage(config, mesh.get_local_rank("pipeline"), 2)
engine = seq1f1b.PipelineEngine(
    DistributedDataParallel(stage, process_group=mesh.get_group("data")),
    num_microbatches=2,
    num_segments=4,
    loss_fn=cross_entropy,
    group=mesh.get_group("pipeline"),
)
tokens = torch.randint(64, (4, 129), generator=torch.Generator().manual_seed(0))
own = tokens.chunk(2)[mesh.get_local_rank("data")]  # each replica has its part of the batch
engine.step(own[:, :-1], target=own[:, 1:])
norm = engine.clip_grad_norm_(1.0)

if dist.get_rank() == 0:
    whole = build_stage(config)
    cross_entropy(whole(tokens[:, :-1]), tokens[:, 1:]).backward()
    plain = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    print(f"gradient norm {norm:.3f}, of the whole model in one process {plain:.3f}")
dist.barrier()
engine.close()
dist.destroy_process_group()
