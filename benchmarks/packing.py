"""What packed documents save in training steps: attention within the documents against attention over the whole row.

Two processes of one thread each, fp32, hidden 256, 4 blocks, heads of 64, vocabulary 1024, 2 micro-batches of one row
of 4096 tokens, 8 segments. Rows are filled with documents of one length, or with short ones before a long one; segments
are balanced by FLOPs, as of one document or of those in the row. Each pair of steps runs A B, the next B A; a pair
counts only while other processes use less than 8 % of a core. Behind it stand the losses of its arms: attention over
the whole row, which sees other documents, has another one than attention within; two ways to cut a row have one.

    python benchmarks/packing.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from arms import Arm
from common import FOREIGN_LIMIT, header, spawn
from decoder import HEAD_DIM, cross_entropy
from torch import Tensor, nn
from torch.nn import functional as F
from train import compare

import seq1f1b

HIDDEN, BLOCKS, VOCAB, M, K = 256, 4, 1024, 2, 8
SHAPE = seq1f1b.ModelShape(HIDDEN, BLOCKS, HIDDEN // HEAD_DIM, HIDDEN // HEAD_DIM, 8 * HIDDEN // 3, VOCAB)


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = seq1f1b.layer_handle(index)
        self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, doc_ids: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        attended = seq1f1b.causal_attention(q, k, v, layer=self.layer, doc_ids=doc_ids)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Stage(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if rank == 0 else None
        self.blocks = nn.ModuleList(Block(i) for i in range(rank * BLOCKS // 2, (rank + 1) * BLOCKS // 2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if rank == 1 else None

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x, doc_ids)
        return x if self.head is None else self.head(x)


class PackedArm(Arm):
    def __init__(self, rank: int, lengths: list[int], *, within: bool, sizes: list[int]) -> None:
        torch.manual_seed(rank)
        self.modules = [Stage(rank)]
        self.engine = seq1f1b.PipelineEngine(
            self.modules[0],
            num_microbatches=M,
            num_segments=K,
            segment_sizes=sizes,
            arg_rules={"doc_ids": "slice"},
            loss_fn=cross_entropy,
        )
        tokens = torch.randint(VOCAB, (M, sum(lengths)), generator=torch.Generator().manual_seed(1))
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        doc_ids = seq1f1b.document_starts(ids.expand(M, -1))
        self.arguments: dict[str, Any] = {"target": seq1f1b.shift_labels(tokens, doc_ids=doc_ids)}
        if within:
            self.arguments["kwargs"] = {"doc_ids": doc_ids}
        self.inputs = tokens

    def step(self) -> float | None:
        losses = self.engine.step(self.inputs, **self.arguments)
        return sum(map(float, losses)) / M if losses else None


def measure(rank: int, row: int, pairs: int, limit: float) -> None:
    plain, mixed = seq1f1b.partition_sequence(row, K, model=SHAPE), [row // 32] * 16 + [row // 2]
    for length in (row // 4, row // 16):
        lengths = [length] * (row // length)
        sizes = seq1f1b.partition_sequence(row, K, model=SHAPE, documents=lengths)
        whole = PackedArm(rank, lengths, within=False, sizes=plain)
        show(
            rank,
            f"documents of {length}: whole row against within",
            pairs,
            limit,
            whole,
            PackedArm(rank, lengths, within=True, sizes=sizes),
        )
    sizes = seq1f1b.partition_sequence(row, K, model=SHAPE, documents=mixed)
    one, own = (PackedArm(rank, mixed, within=True, sizes=of) for of in (plain, sizes))
    name = f"16 documents of {row // 32}, one of {row // 2}: segments as of one against by documents"
    show(rank, name, pairs, limit, one, own)


def show(rank: int, name: str, pairs: int, limit: float, a: PackedArm, b: PackedArm) -> None:
    result, losses = compare(pairs, a, b, limit), [(a.step(), b.step())] * 2
    dist.broadcast_object_list(losses, src=1)
    for arm in (a, b):
        dist.barrier()
        arm.engine.close()
    if rank == 0:
        print(f"{result.describe(name)}; losses {losses[0][0]:.6f}, {losses[0][1]:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row (%(default)s)")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--foreign", type=float, default=FOREIGN_LIMIT, help="cores that others may use in a step that counts; inf: any"
    )
    options = parser.parse_args()
    print(header("Steps over packed documents, two processes of one thread"))
    spawn(2, measure, options.length, options.pairs, options.foreign)


if __name__ == "__main__":
    main()
