"""A small language model learns to count in text: "0 1 2 3 ..."."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b.view.draw import timeline_text

VOCAB, HIDDEN, HEADS, BLOCKS, LENGTH, BATCH = 128, 64, 4, 4, 240, 8
SHAPE = seq1f1b.ModelShape(
    HIDDEN, BLOCKS, HEADS, kv_heads=HEADS, ffn=8 * HIDDEN // 3, vocab=VOCAB
)
TEXT = torch.tensor(list(" ".join(map(str, range(20000))).encode()))


class Attention(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layer = seq1f1b.layer_handle(index)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention(index)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)

    def forward(self, tokens):
        return self.words(tokens) + self.places(seq1f1b.positions(tokens))


def build_model():
    torch.manual_seed(0)
    blocks = [Block(i) for i in range(BLOCKS)]
    return nn.Sequential(Embedding(), *blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))


def build_stage(rank, num_ranks):
    *blocks, norm, head = build_model()
    cut = [len(blocks) * i // num_ranks for i in range(num_ranks + 1)]
    return nn.Sequential(*blocks[cut[rank] : cut[rank + 1]]), HeadLoss(norm, head)


def batch(step):
    starts = torch.randint(
        len(TEXT) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]  # shifted here, over the whole sequence


class HeadLoss(nn.Module):
    def __init__(self, norm, head):
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, hidden, target):
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), target.flatten())


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    stage, loss_fn = build_stage(dist.get_rank(), dist.get_world_size())
    engine = seq1f1b.PipelineEngine(
        stage,
        num_microbatches=4,
        num_segments=4,
        segment_sizes=SHAPE,
        loss_fn=loss_fn,
    )
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    for step in range(21):
        tokens, target = batch(step)
        losses = engine.step(tokens, target=target)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and losses:  # on the last rank
            print(f"step {step:2}  loss {torch.stack(losses).mean():.4f}")
    report = engine.report(gather=True)
    if engine.rank == 0:
        most = [rank.stages[0].peak_live_units for rank in report.ranks]
        print("segments", list(report.ranks[0].segment_sizes), "most units live", most)
        print(timeline_text(report.timeline, width=100))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
