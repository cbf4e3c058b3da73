"""The whole method in plain torch, without this package: order, KV cache, messages, engine. Begin reading here.

    torchrun --standalone --nproc-per-node 2 examples/essence.py

Each rank holds a part of a small language model and takes a step; then it compares every gradient with those of the
model run whole. A unit is F or B (forward, backward) of segment s of micro-batch m, as in Seq1F1B, arXiv:2406.03488.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, BLOCKS, MICROBATCHES, SEGMENTS, TOKENS = 64, 32, 4, 4, 4, 4, 32  # a micro-batch is one sequence


def order(P: int, p: int, M: int, k: int) -> list[tuple[str, int, int]]:
    """The units of rank p of P: forwards to warm up, then one forward and one backward in turn, then backwards.

    The last segment goes backward first, so k - 1 more forwards than in 1F1B come before the first backward.
    """
    forwards = [("F", m, s) for m in range(M) for s in range(k)]
    backwards = [("B", m, s) for m in range(M) for s in reversed(range(k))]
    warmup = min(P - p - 2 + k, M * k)
    steady = [unit for pair in zip(forwards[warmup:], backwards, strict=False) for unit in pair]
    return forwards[:warmup] + steady + backwards[M * k - warmup :]


class Block(nn.Module):
    """An attention layer and its KV cache: later segments attend to copies of a segment's keys and values, in whose
    .grad the gradients of all who attend to them add up."""

    unit: tuple[int, int] | None = None  # (m, s) of the unit that runs; None: the sequence is whole

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.made, self.copies = {}, {}  # keys and values by unit, with their graph and as copies

    def forward(self, x: Tensor) -> Tensor:  # (1, tokens of the segment, hidden)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if Block.unit is not None:
            m, s = Block.unit
            self.made[m, s], self.copies[m, s] = (k, v), [t.detach().requires_grad_() for t in (k, v)]
            k, v = (torch.cat(parts, 2) for parts in zip(*[self.copies[m, i] for i in range(s + 1)], strict=True))
            mask = F.pad(mask, (k.shape[2] - x.shape[1], 0), value=True)  # all tokens see the segments before
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def backward_of_keys(self, m: int, s: int) -> None:
        """Goes backward from a segment's keys and values, once all who attend to them have gone backward."""
        gradients = [t.grad for t in self.copies.pop((m, s))]
        torch.autograd.backward(self.made.pop((m, s)), gradients, retain_graph=True)


def step(stage: nn.Sequential, tokens: Tensor, target: Tensor) -> None:
    """A step of a rank: each unit receives, computes and sends. Gradients add up in the stage's parameters."""
    p, P, M, k = dist.get_rank(), dist.get_world_size(), MICROBATCHES, SEGMENTS
    live, sent = {}, []  # inputs and outputs of units that wait for their backward; messages under way

    def received(source: int) -> Tensor:
        place = torch.empty(1, TOKENS // k, HIDDEN, dtype=torch.float64)
        dist.recv(place, source)
        return place

    for kind, m, s in order(P, p, M, k):
        Block.unit = m, s
        if kind == "F":
            x = tokens.chunk(M)[m].chunk(k, 1)[s] if p == 0 else received(p - 1).requires_grad_()
            y = stage(x)
            if p == P - 1:
                y = F.cross_entropy(y.mT, target.chunk(M)[m].chunk(k, 1)[s]) / (M * k)  # equally long segments
            else:
                sent.append((y, dist.isend(y.detach(), p + 1)))
            live[m, s] = x, y
        else:
            x, y = live.pop((m, s))
            y.backward(None if p == P - 1 else received(p + 1), retain_graph=True)
            for block in reversed([layer for layer in stage if isinstance(layer, Block)]):
                block.backward_of_keys(m, s)  # the last block first: keys of earlier blocks feed its input
            if p > 0:
                sent.append((x.grad, dist.isend(x.grad, p - 1)))
    for _, work in sent:
        work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model and batch on all ranks
    whole = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *[Block() for _ in range(BLOCKS)], nn.Linear(HIDDEN, VOCAB))
    tokens, target = torch.randint(VOCAB, (2, MICROBATCHES, TOKENS))
    cuts = [round(i * len(whole) / num_ranks) for i in range(num_ranks + 1)]
    stage = whole.double()[cuts[rank] : cuts[rank + 1]]

    F.cross_entropy(whole(tokens).mT, target).backward()
    wanted = [parameter.grad for parameter in stage.parameters()]
    stage.zero_grad()
    step(stage, tokens, target)
    pairs = zip(stage.parameters(), wanted, strict=True)
    error = max(float((parameter.grad - true).norm() / true.norm()) for parameter, true in pairs)
    print(f"rank {rank}: gradients differ from the whole model's by {error:.0e} of their norm", flush=True)
    assert error < 1e-12
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
