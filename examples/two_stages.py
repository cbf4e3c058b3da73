"""The smallest pipeline: two stages, two micro-batches, four segments; checked against the model run whole.

    python examples/two_stages.py

The two ranks are threads of one process here; with torchrun they are processes, and `group` is left out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN, HEADS, BATCH, LENGTH = 64, 32, 4, 2, 24


class Block(nn.Module):
    """Causal attention and a small MLP. Attention is all that a segment needs of those before it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))
        self.layer = seq1f1b.layer_handle(index)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def build_stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), Block(0), Block(1))
    last = nn.Sequential(Block(2), nn.Linear(HIDDEN, VOCAB))
    return [first.double(), last.double()]  # fp64: what is left of a difference is a mistake


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    inputs, target = tokens[:, :-1], tokens[:, 1:]

    whole = nn.Sequential(*build_stages())
    loss = loss_fn(whole(inputs), target)
    loss.backward()

    stages = build_stages()

    def run(group: Any) -> list[Tensor]:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank],
            num_microbatches=2,
            num_segments=4,
            segment_sizes=[9, 6, 5, 4],  # later segments attend to more: shorter ones cost the same
            loss_fn=loss_fn,
            group=group,
        )
        return engine.step(inputs, target=target)

    losses = run_ranks(2, run)[-1]  # of the last stage's rank
    pipelined = torch.stack(losses).mean()
    gradients = [parameter.grad for stage in stages for parameter in stage.parameters()]
    pairs = zip(whole.parameters(), gradients, strict=True)
    worst = max(((a.grad - b).norm() / a.grad.norm()).item() for a, b in pairs)
    print(f"loss {pipelined:.12f}, whole model {loss:.12f}; gradients differ by {worst:.1e} relative at most")
    assert abs(pipelined - loss) < 1e-12 and worst < 1e-10, "the pipeline and the whole model disagree"


if __name__ == "__main__":
    main()
