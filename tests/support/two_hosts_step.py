"""What torchrun runs in test_machines.py: one step, checked on every rank against the model run whole."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model

from seq1f1b import PipelineEngine

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = Config(kv_heads=2)
model = whole_model(config)
tokens, target = batch(config, 3, 13)
losses, truth = run_whole(model, tokens, target, 3)
engine = PipelineEngine(stage_of(model, config, rank, world), num_microbatches=3, num_segments=2, loss_fn=cross_entropy)
mine = engine.step(tokens, target=target)
found = {name: p.grad for name, p in engine.named_parameters()}
report = engine.report(gather=True)
result = {
    "gradient_error": gradient_error(found, {name: truth[name] for name in found}),
    "losses": [float(a - b) for a, b in zip(mine, losses, strict=False)],
    "edges": [[edge.source_stage, edge.destination_stage, edge.transport] for edge in engine.edges],
    "seen by all": [[[e.source_stage, e.destination_stage, e.transport] for e in r.edges] for r in report.ranks],
}
Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(result))
engine.close()
dist.destroy_process_group()
