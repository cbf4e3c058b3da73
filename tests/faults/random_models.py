"""Does anything tell of a model that is wrong in segments, and of none that is right? Random models, by seed.

    python tests/faults/random_models.py --seed 0 --models 400

Half of the models have one fault of a kind below; the others have none. Half run over two ranks, and every fourth in
bfloat16. ``verdicts.py`` judges each: a model is wrong if the engine's gradients, in float64, are not the whole model's
(by more than 1e-3), or if its fault draws random numbers, which no two runs have in common. It is found if the first
step warns or raises an error, if ``engine.verify`` says so, or, where ``seq1f1b.split`` cuts the model, if that refuses
it.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import torch.nn.functional as F
from tiny_model import cross_entropy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verdicts import NOT_ASKED, NOTHING, Trial, Verdict
from verdicts import Model as Asked

import seq1f1b

HIDDEN, HEADS, VOCAB, BLOCKS, LENGTH, ROWS = 16, 2, 37, 4, 30, 2
WAYS = ("look", "verify", "split")
Mix = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Adds what ``mix`` makes of the normed tokens, then a feed-forward part."""

    def __init__(self, index: int, mix: Mix) -> None:
        super().__init__()
        self.mix = mix
        self.norm, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.conv, self.cell = nn.Conv1d(HIDDEN, HIDDEN, 3), nn.GRUCell(HIDDEN, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(HIDDEN), nn.GroupNorm(2, HIDDEN)
        self.drop, self.shared_drop = nn.Dropout(0.3), nn.Dropout1d(0.3)
        self.router, self.gate = nn.Linear(HIDDEN, 3), nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.table = nn.Parameter(torch.randn(64, HIDDEN))
        self.register_buffer("running", torch.zeros(HIDDEN))
        self.layer, self.state = seq1f1b.layer_handle(2 * index), seq1f1b.layer_handle(2 * index + 1)

    def heads(self, x: Tensor) -> Any:
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.mix(self, self.norm(x)))
        return x + self.mlp(self.after(x))


# -- right ways to mix -------------------------------------------------------------------------------------------------


def attend(self: Block, x: Tensor, **options: Any) -> Tensor:
    return seq1f1b.causal_attention(*self.heads(x), layer=self.layer, **options).transpose(1, 2).flatten(2)


def attend_window(self: Block, x: Tensor) -> Tensor:
    return attend(self, x, window=5) + 0.0 * self.qkv(x).mean(-1, keepdim=True)


def attend_rotated(self: Block, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    angles = seq1f1b.positions(x)[:, None] * torch.arange(1, HIDDEN // HEADS + 1) * 0.1
    q, k = (t * angles.cos().to(t.dtype) + t.roll(1, -1) * angles.sin().to(t.dtype) for t in (q, k))
    return seq1f1b.causal_attention(q, k, v, layer=self.layer).transpose(1, 2).flatten(2)


def sum_so_far(self: Block, x: Tensor, scale: float = 0.1) -> Tensor:
    before = seq1f1b.carry_in(self.state, torch.zeros_like(x[:, 0]))
    total = before[:, None] + x.cumsum(1) * scale
    seq1f1b.carry_out(self.state, total[:, -1])
    return total + attend(self, x)


def shift_carried(self: Block, x: Tensor) -> Tensor:
    before = seq1f1b.carry_in(self.state, torch.zeros_like(x[:, :1]))
    seq1f1b.carry_out(self.state, x[:, -1:])
    return torch.cat([before, x[:, :-1]], 1) + attend(self, x)


def conv_carried(self: Block, x: Tensor) -> Tensor:
    before = seq1f1b.carry_in(self.state, torch.zeros_like(x[:, :2]))
    padded = torch.cat([before, x], 1)
    seq1f1b.carry_out(self.state, padded[:, -2:])
    return self.conv(padded.transpose(1, 2)).transpose(1, 2) + attend(self, x)


def gru_carried(self: Block, x: Tensor) -> Tensor:
    y, state = self.gru(x, seq1f1b.carry_in(self.state, x.new_zeros(1, len(x), HIDDEN)))
    seq1f1b.carry_out(self.state, state)
    return y + attend(self, x)


def routed(self: Block, x: Tensor) -> Tensor:
    weights = self.router(x).softmax(-1)
    return attend(self, x) + sum(w[..., None] * e(x) for w, e in zip(weights.unbind(-1), self.experts, strict=True))


def gated(self: Block, x: Tensor) -> Tensor:
    return attend(self, x) * self.gate(x).sigmoid()


def over_features(self: Block, x: Tensor) -> Tensor:
    """What only looks like mixing: a softmax, a sort, sums and a flip, each over features."""
    return attend(self, x.softmax(-1) + x.sort(-1)[0] + x.flip(-1) / (1 + x.square().sum(-1, keepdim=True)))


def at_positions(self: Block, x: Tensor) -> Tensor:
    return attend(self, x + self.table[seq1f1b.positions(x)])


def checkpointed(self: Block, x: Tensor) -> Tensor:
    return checkpoint(lambda y: attend(self, y), x, use_reentrant=False)


def with_dropout(self: Block, x: Tensor) -> Tensor:
    return attend(self, self.drop(x))


RIGHT: list[Mix] = [
    attend, attend_window, attend_rotated, sum_so_far, shift_carried, conv_carried, gru_carried, routed, gated,
    over_features, at_positions, checkpointed, with_dropout,
]  # fmt: skip


# -- faults: ways to mix -----------------------------------------------------------------------------------------------


def alone(self: Block, x: Tensor, is_causal: bool = True) -> Tensor:
    q, k, v = self.heads(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)


def scores_by_hand(self: Block, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -1e4).softmax(-1)
    return (scores @ v).transpose(1, 2).flatten(2)


def linear_attention(self: Block, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    state = torch.einsum("bhsd,bhse->bhsde", k.sigmoid(), v).cumsum(2)
    return torch.einsum("bhsd,bhsde->bhse", q.sigmoid(), state).transpose(1, 2).flatten(2)


def padded_conv(self: Block, x: Tensor) -> Tensor:
    return attend(self, x) + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


def gru_anew(self: Block, x: Tensor) -> Tensor:
    return attend(self, x) + self.gru(x)[0]


def cell_loop(self: Block, x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = self.cell(token, state)
        states.append(state)
    return attend(self, x) + torch.stack(states, 1)


def detached_state(self: Block, x: Tensor) -> Tensor:
    before = seq1f1b.carry_in(self.state, torch.zeros_like(x[:, 0]))
    total = before[:, None] + x.cumsum(1)
    seq1f1b.carry_out(self.state, total[:, -1].detach())
    return total + attend(self, x)


def kept_in_python(self: Block, x: Tensor) -> Tensor:
    """Its numbers are right, and no gradient flows from a segment to the one before."""
    offset = int(seq1f1b.token_offset())
    before = self.__dict__["kept"] if offset else torch.zeros_like(x[:, 0])
    total = before[:, None] + x.cumsum(1)
    self.__dict__["kept"] = total[:, -1].detach()
    return total + attend(self, x)


def running_mean(self: Block, x: Tensor) -> Tensor:
    self.running.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)).to(self.running.dtype))
    return attend(self, x - self.running)


def counted_calls(self: Block, x: Tensor) -> Tensor:
    self.running.add_(1.0)
    return attend(self, x * (1.0 + 0.1 * self.running))


def of_random_segment(self: Block, x: Tensor) -> Tensor:
    return attend(self, x * (0.5 + torch.rand(len(x), 1, 1).to(x.dtype)))


def plus(change: Callable[[Block, Tensor], Tensor]) -> Mix:
    """Our attention, and a change of its input."""

    def mix(self: Block, x: Tensor) -> Tensor:
        return attend(self, change(self, x))

    return mix


MIXES: dict[str, list[Mix]] = {
    "later tokens": [
        lambda self, x: alone(self, x, is_causal=False),
        plus(lambda self, x: F.avg_pool1d(F.pad(x.transpose(1, 2), (0, 2)), 3, 1).transpose(1, 2)),
        plus(lambda self, x: x + x.mean(1, keepdim=True)), plus(lambda self, x: x + x.flip(1)),
        plus(lambda self, x: x.roll(-1, 1)), plus(lambda self, x: x.sort(1)[0]),
        plus(lambda self, x: x * x.softmax(1)), plus(lambda self, x: torch.fft.fft(x.float(), dim=1).real.to(x.dtype)),
        plus(lambda self, x: x + x.amax(1, keepdim=True)), plus(lambda self, x: x - x[:, -1:]),
    ],
    "statistics": [
        plus(lambda self, x: self.batch_norm(x.transpose(1, 2)).transpose(1, 2)),
        plus(lambda self, x: self.group_norm(x.transpose(1, 2)).transpose(1, 2)),
        plus(lambda self, x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2)),
        plus(lambda self, x: F.layer_norm(x, x.shape[1:])), plus(lambda self, x: F.normalize(x, dim=1)),
        plus(lambda self, x: x / x.abs().max()), plus(lambda self, x: (x - x.mean()) / x.std()),
        plus(lambda self, x: x / x.norm()),
    ],
    "positions": [
        plus(lambda self, x: x + self.table[: x.shape[1]]),
        plus(lambda self, x: x + self.table[torch.arange(x.shape[1])]),
        plus(lambda self, x: x + torch.sin(torch.arange(x.shape[1])[:, None] * 0.3).to(x.dtype)),
        plus(lambda self, x: x * torch.linspace(0.5, 1.5, x.shape[1])[:, None].to(x.dtype)),
        plus(lambda self, x: x + 0.05 * torch.ones_like(x).cumsum(1)),
        plus(lambda self, x: x * (1.0 - 0.5 * (torch.arange(x.shape[1]) % 2)[:, None].to(x.dtype))),
        plus(lambda self, x: x * (1.0 + 0.02 * x.shape[1])),
    ],
    "state": [alone, scores_by_hand, linear_attention, padded_conv, gru_anew, cell_loop,
              plus(lambda self, x: x.cumsum(1)), plus(lambda self, x: torch.cat([x[:, :1], x[:, :-1]], 1)),
              plus(lambda self, x: x.cummax(1)[0]), plus(lambda self, x: x - x[:, :1])],
    "contexts": [detached_state, kept_in_python],
    "buffers": [running_mean, counted_calls],
    "dropout": [plus(lambda self, x: self.shared_drop(x.transpose(1, 2)).transpose(1, 2)), of_random_segment,
                plus(lambda self, x: F.dropout(torch.ones_like(x[:, :1]), 0.4, self.training) * x)],
}  # fmt: skip


# -- faults beside blocks ----------------------------------------------------------------------------------------------


def hooked_output(model: Model, block: Block) -> None:
    block.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))


def hooked_gradient(model: Model, block: Block) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / gradient.norm())

    block.register_forward_hook(hook)


HOOKS = [hooked_output, hooked_gradient]
Losses = list[Callable[[Tensor, Tensor], Tensor]]


def _of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten(), reduction="none", ignore_index=-100)


LOSSES: Losses = [
    lambda output, target: _of_tokens(output, target).square().mean().sqrt(),
    lambda output, target: _of_tokens(output, target).sum() / target.numel(),
    lambda output, target: _of_tokens(output, target).mean() + output.float().mean((0, 1)).square().sum(),
    lambda output, target: _of_tokens(output, target).topk(6)[0].mean(),
    lambda output, target: cross_entropy(output.float(), target) * target.shape[1],
    lambda output, target: cross_entropy(output.float() / output.float().std(), target),
    lambda output, target: _of_tokens(output, target).sum() / 20.0,
]
RIGHT_LOSSES: Losses = [
    lambda output, target: cross_entropy(output.float(), target),
    lambda output, target: _of_tokens(output, target).sum() / (target != -100).sum().clamp(min=1),
    lambda output, target: cross_entropy(output.float(), target) + 1e-3 * (
        (output.float().logsumexp(-1).square() * (target != -100)).sum() / (target != -100).sum().clamp(min=1)),
]  # fmt: skip


class Model(nn.Module):
    """Embedding, blocks and head.

    Args:
        around: what surrounds the second half of the blocks; "" for nothing.
    """

    def __init__(self, mixes: Sequence[Mix], around: str = "", is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block(i, mix) for i, mix in enumerate(mixes)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.around, self.scale = around, 1.0
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[:2]:
            x = block(x)
        for block in self.blocks[2:]:
            x = AROUND[self.around](self, block, x) if self.around else block(x)
        return self.head(self.norm(x))


def _under(context: Callable[[], Any]) -> Callable[[Model, Block, Tensor], Tensor]:
    def run(model: Model, block: Block, x: Tensor) -> Tensor:
        with context():
            return block(x)

    return run


def _no_grad_part(model: Model, block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = block(x)
    return x + 0.5 * y


def _swapped(model: Model, block: Block, x: Tensor) -> Tensor:
    model.scale = model.scale + 0.5
    return block(x) * model.scale


AROUND: dict[str, Callable[[Model, Block, Tensor], Tensor]] = {
    "no_grad": _no_grad_part,
    "autocast": _under(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "branch on values": lambda model, block, x: block(x) if float(x.detach().abs().sum()) > 0.0 else x,
    "a mean between blocks": lambda model, block, x: block(x - x.mean(1, keepdim=True)),
    "an arange between blocks": lambda model, block, x: block(x * torch.arange(1, x.shape[1] + 1)[:, None] * 0.1),
    "an attribute that changes": _swapped,
    "a shift between blocks": lambda model, block, x: block(torch.cat([x[:, :1], x[:, :-1]], 1)),
}
RIGHT_AROUND = {
    "a scale": lambda model, block, x: block(x * model.scale),
    "a sum": lambda model, block, x: x + block(x) * 0.5,
    "positions": lambda model, block, x: block(x + 0.1 * seq1f1b.positions(x)[:, None].to(x.dtype).cos()),
}
AROUND |= RIGHT_AROUND
SPLIT = "between blocks"
KINDS = [*MIXES, "hooks", "losses", "ties", SPLIT]


class Slice(nn.Module):
    """Some blocks of a model under its names, with the embedding or the head."""

    def __init__(self, model: Model, rank: int, ranks: int) -> None:
        super().__init__()
        first, last = rank * BLOCKS // ranks, (rank + 1) * BLOCKS // ranks
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        if rank == 0:
            self.embedding = model.embedding
        if rank == ranks - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class Case:
    """A model by its seed, with a fault of one kind, or none."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed, self.is_faulty = seed, seed % 2 == 0
        self.kind = KINDS[seed // 2 % len(KINDS)]
        self.ranks = 2 if self.kind in ("ties", SPLIT) else 1 + seed // 2 // len(KINDS) % 2
        self.dtype = torch.bfloat16 if rng.random() < 0.25 and self.kind != "ties" else torch.float32
        self.k, self.has_model = rng.choice((2, 3)), rng.random() < 0.5
        mixes, around, self.loss_fn = rng.choices(RIGHT, k=BLOCKS), "", rng.choice(RIGHT_LOSSES)
        if self.is_faulty and self.kind in MIXES:
            mixes[rng.randrange(BLOCKS)] = rng.choice(MIXES[self.kind])
        elif self.is_faulty and self.kind == "losses":
            self.loss_fn = rng.choice(LOSSES)
        elif self.kind == SPLIT:
            around = rng.choice(list(AROUND)[: -len(RIGHT_AROUND)] if self.is_faulty else list(RIGHT_AROUND))
        torch.manual_seed(seed)
        self.what = f"{self.kind}: {around or [getattr(m, '__name__', '?') for m in mixes]}"
        self.model = Model(mixes, around, is_tied=self.kind == "ties" and self.is_faulty)
        if self.is_faulty and self.kind == "hooks":
            hook = rng.choice(HOOKS)
            hook(self.model, self.model.blocks[rng.randrange(BLOCKS)])
            self.what += f" {hook.__name__}"
        self.tokens = torch.randint(VOCAB, (2 * ROWS, LENGTH))
        self.target = seq1f1b.shift_labels(self.tokens)
        self.target[torch.rand(self.target.shape) < 0.3] = -100

    def cut(self, model: Model, **options: Any) -> list[nn.Module]:
        """Raises ValueError where split refuses the model."""
        if self.kind == SPLIT:
            return seq1f1b.split(model, at=["blocks.2"], sample=self.tokens[:2, :8], **options)
        stages: list[Any] = [Slice(model, rank, self.ranks) for rank in range(self.ranks)]
        if self.kind == "ties" and self.is_faulty:  # a copy that nobody lists
            stages[-1].head = copy.deepcopy(stages[-1].head)
        return stages

    def verdict(self) -> Verdict:
        """What look, verify and split say of it."""
        options = {"loss_fn": self.loss_fn}
        found = Trial(
            Asked(
                lambda: copy.deepcopy(self.model), self.cut, has_whole=True, is_given=self.has_model,
                is_split=self.kind == SPLIT, dtype=self.dtype, batch=lambda: (self.tokens, self.target),
                options=lambda: options, segments=self.k,
            )
        ).verdict()  # fmt: skip
        is_random = self.is_faulty and self.kind == "dropout"
        return replace(found, error=math.inf) if is_random else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=400)
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    began = time.monotonic()
    for seed in range(options.seed, options.seed + options.models):
        case = Case(seed)
        verdict = case.verdict()
        told = [way for way in WAYS if getattr(verdict, way) not in (NOTHING, NOT_ASKED)]
        is_wrong = verdict.truth != "right"
        row = counts[case.kind if is_wrong else "right"]
        row.update(["models", *told, *(["found"] if told else [])])
        if bool(told) != is_wrong:
            print(f"seed {seed}: {'LOST' if is_wrong else 'BLAMED by ' + ', '.join(told)}, {verdict.error}, "
                  f"{case.what}, {case.ranks} ranks, k {case.k}, {case.dtype}", flush=True)  # fmt: skip
    for kind, row in sorted(counts.items()):
        print(f"{kind:<16}", ", ".join(f"{name} {row[name]}" for name in ("models", "found", *WAYS)))
    print(f"{options.models} models, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
