"""The smallest training script: two processes, each with half of a language model, learn to count.

    torchrun --standalone --nproc-per-node 2 examples/use.py

The README quotes this file. Where it says "your", put your own; everything else is what Seq1F1B needs.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b import Loss, PipelineEngine

VOCAB, HIDDEN, HEADS, BLOCKS, BATCH, LENGTH, STEPS = 64, 64, 4, 4, 8, 128, 20


# -- In the model
class Attention(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layer = seq1f1b.layer_handle(index)  # the name of the layer's entry in the KV cache

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens of a segment, hidden)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attended = seq1f1b.causal_attention(q, k, v, layer=self.layer)  # sees the earlier segments, too
        return self.out(attended.transpose(1, 2).flatten(2))  # heads side by side again


# -- Around it: your model, loss and data
class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(index), nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


def build_stage(rank: int, num_ranks: int) -> nn.Sequential:
    """This rank's blocks, with the embedding on the first rank and the head on the last."""
    torch.manual_seed(rank)
    blocks = [Block(i) for i in range(BLOCKS) if i * num_ranks // BLOCKS == rank]
    first = [nn.Embedding(VOCAB, HIDDEN)] if rank == 0 else []
    last = [nn.Linear(HIDDEN, VOCAB)] if rank == num_ranks - 1 else []
    return nn.Sequential(*first, *blocks, *last)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that count on from a random number, and the same one token later. Every rank has equal rows."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        row = (start + torch.arange(LENGTH + 1)) % VOCAB
        yield row[:, :-1], row[:, 1:]


# -- In the training script
seq1f1b.init_process_group("gloo")  # torchrun has set address, rank and number of ranks
rank, num_ranks = dist.get_rank(), dist.get_world_size()
stage = build_stage(rank, num_ranks)  # your layers of this rank, an nn.Module
engine = PipelineEngine(stage, num_microbatches=4, num_segments=4, loss_fn=loss_fn, loss=Loss(weight="targets"))
optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
for step, (tokens, target) in enumerate(batches()):
    losses = engine.step(tokens, target=target)  # the same batch on every rank; losses: on the last rank, else []
    engine.clip_grad_norm_(1.0)  # not torch's, which sees the gradients of one rank alone
    optimizer.step()
    optimizer.zero_grad()
    # -- What to look at
    if losses and step % 5 == 4:
        print(f"step {step + 1:2}  loss {torch.stack(losses).mean():.2f}", flush=True)

report = engine.report(gather=True)  # every rank calls this
if rank == 0:
    held = [each.peak_live_units for one in report.ranks for each in one.stages]
    print(f"last step {report.makespan * 1e3:.0f} ms, bubble {report.bubble:.0%}, segments held at most {held}")
dist.barrier()
engine.close()
dist.destroy_process_group()
