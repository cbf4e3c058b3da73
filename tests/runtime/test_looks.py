"""Are tokens told from features, heads and rows where their numbers agree, as where all sizes are powers of two?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seq1f1b
from seq1f1b import Memory, PipelineEngine, SegmentWarning
from seq1f1b.testing import run_ranks

HIDDEN = VOCAB = 64
HEADS, WIDTH, MOST = 4, 16, 512
POSITIONS, STATE, ATTENTION = "positions from zero", "state across tokens", "attention not in segments"


class Layer(nn.Module):
    """Attention as it should be, over what ``change`` makes of its input."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.table, self.norm = nn.Embedding(MOST, HIDDEN), nn.LayerNorm(HIDDEN)
        self.register_buffer("ids", torch.arange(MOST)[None])
        self.register_buffer("waves", torch.outer(torch.arange(MOST), frequencies()).sin().repeat(1, HIDDEN // 8))
        self.layer = seq1f1b.layer_handle(0)
        self.block_size, self.made = 0, None

    def heads(self, x: Tensor) -> Any:
        return self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)

    def attend(self, x: Tensor) -> Tensor:
        return self.join(seq1f1b.causal_attention(*self.heads(x), layer=self.layer))

    def join(self, y: Tensor) -> Tensor:
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(self, x)


def frequencies() -> Tensor:
    return 0.5 ** torch.arange(8)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = torch.outer(positions.float(), frequencies())
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def rotary(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    q, k = rotated(q, positions), rotated(k, positions)
    return self.join(seq1f1b.causal_attention(q, k, v, layer=self.layer))


def own_numbers(self: Any, x: Tensor) -> Tensor:
    rows, tokens, _ = x.shape
    positions = torch.arange(0, tokens, 1, device=x.device).unsqueeze(0).expand(rows, -1)
    return self.attend(x + self.table(positions))


def einsum_of_lists(self: Any, x: Tensor) -> Tensor:
    angles = torch.einsum("i,j->ij", torch.arange(x.size(-2)).type_as(x), frequencies())
    q, k, v = self.heads(x)
    q = q * angles.cos().repeat(1, 2)
    return self.join(seq1f1b.causal_attention(q, k, v, layer=self.layer))


def decays(self: Any, x: Tensor) -> Tensor:
    return self.attend(x * (0.9 ** torch.arange(x.shape[1]))[:, None])


def through_another_module(self: Any, x: Tensor) -> Tensor:
    self.block_size = x.shape[1]
    return self.attend(x + F.embedding(torch.arange(self.block_size), self.table.weight))


def table_of_a_length(self: Any, x: Tensor) -> Tensor:
    if self.made is None or self.made.shape[0] != x.shape[1]:
        self.made = torch.outer(torch.arange(x.shape[1]), frequencies()).cos().repeat(1, HIDDEN // 8)
    return self.attend(x * self.made)


# By the tokens' own number, in every way in which a model may ask for it.
FROM_ZERO: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "shape": lambda self, x: self.attend(x + self.table(torch.arange(x.shape[1]))),
    "size": lambda self, x: self.attend(x + self.table(torch.arange(x.size(1), device=x.device))),
    "size of a head": lambda self, x: rotary(self, x, torch.arange(self.heads(x)[0].size(-2))),
    "unpacked": own_numbers,
    "len of a row": lambda self, x: self.attend(x + self.table(torch.arange(len(x[0])))),
    "int": lambda self, x: self.attend(x + self.table(torch.arange(int(x.shape[1])))),
    "range": lambda self, x: self.attend(x + self.table(torch.tensor(range(x.shape[1])))),
    "list": lambda self, x: self.attend(x + self.table(torch.tensor([i for i, _ in enumerate(x[0])]))),
    "from one": lambda self, x: self.attend(x + self.table(torch.arange(1, x.shape[1] + 1))),
    "shifted by two": lambda self, x: self.attend(x + self.table(torch.arange(x.shape[1]) + 2)),
    "product of sizes": lambda self, x: self.attend(x + self.table(torch.arange(x[..., 0].numel() // x.shape[0]))),
    "cumsum of ones": lambda self, x: self.attend(x + self.table(torch.ones_like(x[..., 0]).long().cumsum(-1) - 1)),
    "cumsum of a mask": lambda self, x: self.attend(
        x + self.table((torch.ones(x.shape[:2], dtype=torch.int64).cumsum(1) - 1).clamp(min=0))
    ),
    "buffer of numbers": lambda self, x: self.attend(x + self.table(self.ids[:, : x.shape[1]])),
    "buffer of waves": lambda self, x: self.attend(x + self.waves[: x.shape[1]]),
    "narrow": lambda self, x: self.attend(x + self.waves.narrow(0, 0, x.shape[1])),
    "rows of a table": lambda self, x: self.attend(x + self.table.weight[: x.shape[1]]),
    "rows of a table by len": lambda self, x: self.attend(x + self.table.weight[: len(x[0])]),
    "index": lambda self, x: self.attend(x + self.waves[torch.arange(x.shape[1])]),
    "index_select": lambda self, x: self.attend(x + self.waves.index_select(0, torch.arange(x.shape[1]))),
    "rotary": lambda self, x: rotary(self, x, torch.arange(x.shape[1])),
    "rotary by len": lambda self, x: rotary(self, x, torch.arange(len(x[0]))),
    "rotary by einsum": einsum_of_lists,
    "decay": decays,
    "a linear layer of numbers": lambda self, x: self.attend(
        x + F.linear(torch.arange(x.shape[1], dtype=x.dtype)[:, None] / MOST, self.table.weight[:1].T)
    ),
    "kept as an attribute": through_another_module,
    "numbers that padding has no part in": lambda self, x: self.attend(
        x + self.table(torch.ones_like(x[..., 0], dtype=torch.int64).cumsum(1) * (x[..., 0] < 99) + 1)
    ),
    "numbers chosen by a mask": lambda self, x: self.attend(
        x + self.table(torch.where(x[..., 0] < 99, torch.arange(x.shape[1]), 0))
    ),
    "linspace": lambda self, x: self.attend(x + torch.linspace(0, 1, x.shape[1])[:, None]),
    "numbers added as they are": lambda self, x: self.attend(x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]),
    "a table made for one length": table_of_a_length,
    "a parameter for one length": lambda self, x: self.attend(x + self.places),
}

# (what is done, the cause that is named)
MIXES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "cumsum": (lambda self, x: self.attend(x.cumsum(1)), STATE),
    "cumsum of heads": (lambda self, x: self.attend(self.join(self.heads(x)[2].cumsum(-2))), STATE),
    "roll": (lambda self, x: self.attend(x + x.roll(1, 1)), STATE),
    "flip": (lambda self, x: self.attend(x + x.flip(1)), STATE),
    "softmax over tokens": (lambda self, x: self.attend(x * x.softmax(1)), STATE),
    "norm over tokens": (lambda self, x: self.attend(F.layer_norm(x.mT, x.shape[1:2]).mT), STATE),
    "convolution": (lambda self, x: self.attend(convolved(F.pad(x.mT, (2, 0)), self.out.weight).mT), STATE),
    "attention by hand": (lambda self, x: self.attend(x + self.join(by_hand(*self.heads(x)))), ATTENTION),
    "attention by einsum": (lambda self, x: self.attend(x + self.join(by_einsum(*self.heads(x)))), ATTENTION),
    "cumsum of what was put together": (
        lambda self, x: self.attend(torch.cat([x.chunk(2, -1)[1], x[..., :32]], -1).cumsum(1)), STATE,
    ),
    "cumsum of means": (lambda self, x: self.attend(x + torch.stack([x, x]).mean((0, 3)).cumsum(1)[..., None]), STATE),
    "cumsum of what was looked up": (lambda self, x: self.attend(self.table.weight[x.argmax(-1)].cumsum(1)), STATE),
    "softmax of products": (lambda self, x: self.attend(products(self, x).softmax(1)), STATE),
    "torch's attention": (
        lambda self, x: self.attend(x + self.join(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))),
        ATTENTION,
    ),
}  # fmt: skip


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2]).tril().log()
    return torch.einsum("bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) + mask).softmax(-1), v)


def products(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("...d,ed->...e", x, self.out.weight)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight[..., None].expand(-1, -1, 3))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~mask, -math.inf).softmax(-1) @ v


def within_a_token(self: Any, x: Tensor) -> Tensor:
    """Attention over the heads of one token."""
    q, k, v = self.qkv(x).view(-1, 3, HEADS, WIDTH).unbind(1)
    return self.attend(F.scaled_dot_product_attention(q, k, v).reshape(x.shape))


def latents(self: Any, x: Tensor) -> Tensor:
    """Every token attends to 64 rows of a table, by torch's attention and by hand."""
    rows = self.table(torch.arange(HIDDEN))
    k = rows.view(1, HIDDEN, HEADS, WIDTH).transpose(1, 2).expand(len(x), -1, -1, -1)
    q = self.heads(x)[0]
    return self.attend(self.join(F.scaled_dot_product_attention(q, k, k) + (q @ k.mT).softmax(-1) @ k))


def memory(self: Any, x: Tensor) -> Tensor:
    """A gate by the number of each feature, and a mean over features."""
    features = torch.arange(HIDDEN, dtype=x.dtype) / HIDDEN
    return self.attend(x * features + x * features.cos() + x.cumsum(-1) / HIDDEN)


RIGHT_ONES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "positions": lambda self, x: self.attend(x + self.table(seq1f1b.positions(x))),
    "arange plus offset": lambda self, x: self.attend(
        x + self.table(torch.arange(x.shape[1]) + seq1f1b.token_offset())
    ),
    "arange from offset": lambda self, x: self.attend(
        x + self.table(torch.arange(seq1f1b.token_offset(), seq1f1b.token_offset() + x.shape[1]))
    ),
    "rows from offset": lambda self, x: self.attend(
        x + self.waves[seq1f1b.token_offset() : seq1f1b.token_offset() + len(x[0])]
    ),
    "rotary": lambda self, x: rotary(self, x, seq1f1b.positions(x)),
    "features by number": memory,
    "features by embedding": lambda self, x: self.attend(x + self.table(torch.arange(HIDDEN)).mean(0)),
    "first rows of a weight": lambda self, x: self.attend(F.linear(x, self.qkv.weight[:HIDDEN])),
    "attention within a token": within_a_token,
    "attention to a table": latents,
    "softmax over features": lambda self, x: self.attend(x * x.softmax(-1)),
    "softmax over a head": lambda self, x: self.attend(x + self.join(self.heads(x)[0].softmax(-1))),
    "norm over features": lambda self, x: self.attend(F.layer_norm(x, x.shape[2:])),
    "roll of features": lambda self, x: self.attend(x + x.roll(1, -1)),
    "convolution along features": lambda self, x: self.attend(
        F.conv1d(x.reshape(-1, 1, HIDDEN), self.qkv.weight[:1, None, :3], padding=1).view(x.shape)
    ),
    "products of features": lambda self, x: self.attend(
        products(self, x).softmax(-1) + torch.cat([x[..., 32:], x[..., :32]], -1).cumsum(-1)
    ),
    "features of what was looked up": lambda self, x: self.attend(
        self.table.weight[x.argmax(-1)].cumsum(-1) + torch.stack([x, x]).mean(0).roll(1, -1)
    ),
    "rows and tokens by number": lambda self, x: self.attend(
        x + x[torch.arange(len(x))[:, None], torch.arange(len(x[0]))[None], x.argmax(-1)][..., None]
    ),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, layer: nn.Module, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if first else nn.Identity()
        self.layer = layer
        self.head = nn.Linear(HIDDEN, VOCAB) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def looked_at(model: nn.Module, *, rows: int, length: int, group: Any = None) -> list[str]:
    """What the first step tells of two micro-batches of so many rows, in segments of this length."""
    group = seq1f1b.LoopbackGroup(1)[0] if group is None else group
    engine = PipelineEngine(
        model, num_microbatches=2, num_segments=3, loss_fn=cross_entropy, group=group, attention="any"
    )
    tokens = torch.randint(VOCAB, (2 * rows, 3 * length), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SegmentWarning)
        engine.step(tokens, target=seq1f1b.shift_labels(tokens))
    return [str(warning.message) for warning in caught if warning.category is SegmentWarning]


# Rows, and tokens of a segment: as many as features and words; as rows and features of a head; as heads; as none.
LENGTHS = [(2, 64), (16, 16), (1, 4), (2, 10)]


def at_lengths(ways: Iterable[str]) -> list[tuple[str, int, int]]:
    """Each way at the lengths that agree with most, and at one of the others in turn."""
    return [(way, *size) for place, way in enumerate(ways) for size in (LENGTHS[0], LENGTHS[1 + place % 3])]


@pytest.mark.parametrize(("how", "rows", "length"), at_lengths(FROM_ZERO))
def test_positions_from_zero_are_found(how, rows, length):
    layer = Layer(FROM_ZERO[how])
    layer.places = nn.Parameter(torch.randn(1, length, HIDDEN))
    (seen,) = looked_at(Model(layer), rows=rows, length=length)
    assert seen.startswith(POSITIONS) and "stage 0, layer" in seen


@pytest.mark.parametrize(("what", "rows", "length"), at_lengths(MIXES))
def test_what_mixes_tokens_is_found(what, rows, length):
    mix, cause = MIXES[what]
    (seen,) = looked_at(Model(Layer(mix)), rows=rows, length=length)
    assert seen.startswith(cause)


@pytest.mark.parametrize(("what", "rows", "length"), at_lengths(RIGHT_ONES))
def test_right_models_are_not_blamed(what, rows, length):
    assert looked_at(Model(Layer(RIGHT_ONES[what])), rows=rows, length=length) == []


@pytest.mark.parametrize("length", [64, 16, 10])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_later_stages_are_looked_at_by_what_they_get(wrong, length):
    def run(group: Any) -> list[str]:
        rank = group.rank
        layer = Layer(FROM_ZERO["shape"] if rank == wrong else RIGHT_ONES["features by number"])
        return looked_at(Model(layer, first=rank == 0, last=rank == 2), rows=2, length=length, group=group)

    with warnings.catch_warnings(record=True) as caught:  # one filter for all threads
        warnings.simplefilter("always", SegmentWarning)
        seen = {text for texts in run_ranks(3, run) for text in texts} | {str(w.message) for w in caught}
    assert [text.partition(",")[0] for text in seen] == ([] if wrong is None else [f"{POSITIONS}: stage {wrong}"])


class Turned(nn.Module):
    """Hands on (rows, features, tokens)."""

    def __init__(self, layer: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.model, self.first = Model(layer, first=first, last=not first), first

    def forward(self, x: Tensor) -> Tensor:
        y = self.model(x if self.first else x.mT)
        return y.mT if self.first else y


@pytest.mark.parametrize("length", [64, 16, 10])
def test_another_layout_between_stages_is_not_blamed(length):
    def run(group: Any) -> list[str]:
        layer = Layer(RIGHT_ONES["norm over features"])
        return looked_at(Turned(layer, first=group.rank == 0), rows=2, length=length, group=group)

    with warnings.catch_warnings():
        warnings.simplefilter("error", SegmentWarning)
        assert run_ranks(2, run) == [[], []]


class Conditioned(Model):
    """Attends to a memory of as many rows as a segment has tokens, and adds to each token what was given for it."""

    def forward(self, x: Tensor, memory: Tensor, beside: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(x) + beside
        q = x.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
        k = memory.view(*memory.shape[:2], HEADS, WIDTH).transpose(1, 2)
        x = x + self.layer.join(F.scaled_dot_product_attention(q, k, k) + (q @ k.mT).softmax(-1) @ k)
        return self.head(self.layer.attend(x))


@pytest.mark.parametrize("length", [64, 16, 10])
@pytest.mark.parametrize("rule", ["replicate", "unit"])
def test_a_memory_as_long_as_a_segment_is_none(rule, length):
    memory = torch.ones(2, length, HIDDEN)
    engine = PipelineEngine(
        Conditioned(Layer(RIGHT_ONES["positions"])),
        num_microbatches=1,
        num_segments=3,
        loss_fn=cross_entropy,
        group=seq1f1b.LoopbackGroup(1)[0],
        arg_rules={"memory": "replicate" if rule == "replicate" else lambda unit: memory, "beside": "slice"},
    )
    tokens = torch.randint(VOCAB, (2, 3 * length))
    kwargs = {"memory": memory if rule == "replicate" else None, "beside": torch.ones(2, 3 * length, HIDDEN)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", SegmentWarning)
        engine.step(
            tokens, target=seq1f1b.shift_labels(tokens), kwargs={k: v for k, v in kwargs.items() if v is not None}
        )


def dropped(self: Any, x: Tensor) -> Tensor:
    noise = torch.rand(len(x), 1, 1) + F.dropout(torch.randn_like(x))
    return self.attend(F.dropout(x) * noise + torch.empty_like(x).bernoulli_())


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_look_changes_nothing(recompute):
    """A step that is looked at, and one that is not, of one state: numbers and what was drawn are the same."""
    tokens = torch.randint(VOCAB, (4, 128))
    torch.manual_seed(0)
    model = Model(Layer(dropped))
    engine = PipelineEngine(
        model, num_microbatches=2, num_segments=2, loss_fn=cross_entropy, group=seq1f1b.LoopbackGroup(1)[0],
        memory=Memory(recompute=recompute),
    )  # fmt: skip
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        model.zero_grad()
        losses = engine.step(tokens, target=seq1f1b.shift_labels(tokens))
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([*losses, *gradients, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
