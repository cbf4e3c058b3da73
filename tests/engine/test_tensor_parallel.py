"""Are gradients of stages whose heads are split over ranks those of one process?"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_processes
from tiny_model import cross_entropy, full_gradient, gradient_error
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import seq1f1b
from seq1f1b import Memory, PipelineEngine

HIDDEN, HEAD_DIM, HEADS, KV_HEADS, VOCAB, LENGTH, M, K = 32, 8, 4, 2, 19, 14, 2, 3


class Block(nn.Module):
    """Takes as many heads as its projections give it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = seq1f1b.layer_handle(index)
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k, self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM), nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (
            projection(normed).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        attended = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if index == 0 else None
        self.block = Block(index)
        self.head = nn.Linear(HIDDEN, VOCAB) if index == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x if self.embedding is None else self.embedding(x))
        return x if self.head is None else self.head(x)


def make_stages() -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(index).double() for index in range(2)]


PLAN = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel()}  # fmt: skip


def split_heads(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    index = mesh.get_local_rank("pipeline")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (M, LENGTH), generator=generator)
    target = seq1f1b.shift_labels(tokens)

    whole = make_stages()
    outputs = whole[1](whole[0](tokens))
    losses = [cross_entropy(o, t) for o, t in zip(outputs[:, None], target[:, None], strict=True)]
    torch.stack(losses).mean().backward()
    truth = {name: p.grad for name, p in whole[index].named_parameters()}

    for schedule, recompute in (("seq1f1b", "none"), ("seq-zb-h1", "none"), ("seq1f1b", "all")):
        stage = make_stages()[index]
        parallelize_module(stage.block, mesh["tensor"], PLAN)
        engine = PipelineEngine(
            stage, schedule=schedule, num_microbatches=M, num_segments=K, segment_sizes=[7, 1, 6],
            loss_fn=cross_entropy, group=mesh.get_group("pipeline"), memory=Memory(recompute=recompute),
        )  # fmt: skip
        found_losses = engine.step(tokens if index == 0 else None, target=target if index == 1 else None)
        torch.testing.assert_close(found_losses, [loss.detach() for loss in losses] if index == 1 else [])
        found = {name: full_gradient(p.grad) for name, p in engine.named_parameters()}
        assert gradient_error(found, truth) < 1e-10
        # Weights that are DTensors have their whole backward at I; the head is an ordinary layer.
        left_to_w = VOCAB * HIDDEN if schedule == "seq-zb-h1" and index == 1 else 0
        assert engine.report().stages[0].deferred_weights == left_to_w
        norm = engine.clip_grad_norm_(1e-3)
        want = torch.stack([p.grad.norm() for s in whole for p in s.parameters()]).norm()
        torch.testing.assert_close(norm, want, rtol=1e-9, atol=0)
        dist.barrier()
        engine.close()


def compiled(rank: int, world: int) -> None:
    """One stage on both ranks. Where weights are DTensors, torch 2.13 fails in a RecursionError at dynamic lengths."""
    stages = [dist.new_group([r]) for r in range(world)]
    sizes = {14: [8, 6], 17: [6, 11]}
    counter = CompileCounterWithBackend("aot_eager")
    found = []
    for backend in (None, counter):
        stage = make_stages()[0]
        parallelize_module(stage.block, init_device_mesh("cpu", (world,)), PLAN)
        if backend is not None:
            stage.block.compile(fullgraph=True, backend=backend, dynamic=False)
        engine = PipelineEngine(
            stage, num_microbatches=M, num_segments=2, segment_sizes=sizes,
            loss_fn=lambda output, target: (output.mean(-1) * target).sum(), group=stages[rank],
        )  # fmt: skip
        graphs, losses = [], []
        for length in (14, 14, 17, 14, 17):
            tokens = torch.arange(M * length).view(M, length) % VOCAB
            losses += engine.step(tokens, target=tokens)
            graphs.append(counter.frame_count)
        found.append((losses, [full_gradient(p.grad) for p in stage.parameters()]))
        engine.close()
    assert graphs == [2, 2, 3, 3, 3], "a graph per length of a segment, each in the first step that has it"
    torch.testing.assert_close(found[1], found[0])


def test_heads_split_over_two_ranks_in_each_of_two_stages():
    run_processes(4, split_heads)


def test_each_length_is_compiled_once():
    run_processes(2, compiled)
