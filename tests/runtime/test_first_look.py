"""Does the first step tell, by values, of every way to mix tokens, and of no model that is right?"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_processes
from slices import one_in
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import seq1f1b
from seq1f1b import PipelineEngine, SegmentWarning
from seq1f1b.runtime.by_values import Look
from seq1f1b.testing import run_ranks

HIDDEN, HEADS, VOCAB, ROWS, LENGTH = 32, 4, 64, 2, 42
ATTENTION, POSITIONS, STATE = "attention not in segments", "positions from zero", "state across tokens"
MIXED, STATISTICS = "tokens mixed", "batch statistics"
Mix = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """Our attention, a feed-forward part, and ``mix`` in a branch of its own between them."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix
        self.norm, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.proj, self.conv, self.gru = nn.Linear(HIDDEN, HIDDEN), nn.Conv1d(HIDDEN, HIDDEN, 3), nn.GRU(HIDDEN, HIDDEN)
        self.table, self.bn, self.drop = nn.Embedding(128, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3)
        self.router = nn.Linear(HIDDEN, 4)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])
        self.layer, self.own = seq1f1b.layer_handle(0), seq1f1b.layer_handle(1)
        self.sinks, self.slopes = nn.Parameter(torch.zeros(HEADS)), 0.5 ** torch.arange(1.0, HEADS + 1)
        self.gate = nn.Parameter(torch.ones(HIDDEN))

    def heads(self, x: Tensor) -> Any:
        return self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)

    def attend(self, x: Tensor, layer: Any = None, **options: Any) -> Tensor:
        y = seq1f1b.causal_attention(*self.heads(x), layer=self.own if layer is None else layer, **options)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = x + self.attend(self.norm(x), self.layer)
        x = x + self.proj(self.mix(self, self.after(x), **kwargs)) * self.gate
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, mix: Mix, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if first else nn.Identity()
        self.block = Block(mix)
        self.head = nn.Linear(HIDDEN, VOCAB) if last else nn.Identity()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.head(self.block(self.embedding(x), **kwargs))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def batch(rows: int = 2 * ROWS) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens, seq1f1b.shift_labels(tokens)


def engine_of(model: nn.Module, group: Any = None, **options: Any) -> PipelineEngine:
    group = seq1f1b.LoopbackGroup(1)[0] if group is None else group
    return PipelineEngine(model, num_microbatches=2, num_segments=3, loss_fn=cross_entropy, group=group, **options)


def told_by(step: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(warning.message) for warning in caught if warning.category is SegmentWarning]


def told(model: nn.Module, *, rows: int = 2 * ROWS, kwargs: Any = None, **options: Any) -> list[str]:
    tokens, target = batch(rows)
    engine = engine_of(model, **options)
    return told_by(lambda: engine.step(tokens, target=target, kwargs=kwargs))


def made(mix: Mix, **ends: bool) -> Model:
    torch.manual_seed(0)
    return Model(mix, **ends)


# -- wrong ones --------------------------------------------------------------------------------------------------------


def own_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def kernel_of_distances(self: Any, x: Tensor) -> Tensor:
    tokens = torch.arange(x.shape[1])
    distances = tokens[:, None] - tokens[None]
    return torch.exp(-distances.to(x.dtype)).masked_fill(distances < 0, 0.0) @ x


def quantized(self: Any, x: Tensor) -> Tensor:
    scale = x.abs().max() / 7
    return (x / scale).round() * scale


def kept_by_the_module(self: Any, x: Tensor) -> Tensor:
    """The last token of the segment before, in an attribute: its values are right, and no gradient flows."""
    before = self.last if hasattr(self, "last") else torch.zeros_like(x[:, :1])
    self.last = x[:, -1:].detach()
    return torch.cat([before, x[:, :-1]], 1)


# (what is done, the cause that is named, words of what is named)
WRONG: dict[str, tuple[Mix, str, str]] = {
    "mean": (lambda self, x: x - x.mean(1, keepdim=True), STATISTICS, "takes a mean over the tokens"),
    "amax": (lambda self, x: x + x.amax(1, keepdim=True), STATISTICS, "takes an amax over the tokens"),
    "normalize": (lambda self, x: F.normalize(x, dim=1), STATISTICS, "calls normalize over the tokens"),
    "mean of rows and tokens": (lambda self, x: x - x.mean((0, 1)), STATISTICS, "a mean over the tokens"),
    "maximum of all": (lambda self, x: x / x.abs().max(), STATISTICS, "a max over the tokens"),
    "standard deviation of all": (lambda self, x: x / x[..., :3].std(), STATISTICS, "a std over the tokens"),
    "median": (lambda self, x: x - x.median(1, keepdim=True).values, STATISTICS, "a median over the tokens"),
    "squeeze and excite": (lambda self, x: x * self.proj(x.mean(1, keepdim=True)).sigmoid(), STATISTICS, "a mean"),
    "quantized by one scale": (quantized, STATISTICS, "a max over the tokens"),
    "batch norm": (lambda self, x: self.bn(x.mT).mT, STATISTICS, "block.bn (BatchNorm1d) calls batch_norm"),
    "instance norm": (lambda self, x: F.instance_norm(x.mT).mT, STATE, "calls instance_norm over the tokens"),
    "group norm of features and tokens": (lambda self, x: F.group_norm(x.mT, 4).mT, STATE, "calls group_norm"),
    "previous token by cat": (
        lambda self, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1), STATE, "shifts the tokens of a segment",
    ),
    "previous token by pad": (lambda self, x: F.pad(x, (0, 0, 1, 0))[:, :-1], STATE, "by pad"),
    "previous token by roll": (lambda self, x: x.roll(1, 1), STATE, "calls roll along the tokens"),
    "previous token by index": (lambda self, x: x[:, (torch.arange(x.shape[1]) - 1).clamp(min=0)], POSITIONS, "counts"),
    "flip": (lambda self, x: x.flip(1), STATE, "calls flip along the tokens"),
    "sort": (lambda self, x: x.sort(1).values, MIXED, "calls sort along the tokens"),
    "largest": (lambda self, x: x + x.topk(3, 1).values.sum(1, keepdim=True), MIXED, "calls topk along the tokens"),
    "fft": (lambda self, x: torch.fft.fft(x, dim=1).real, MIXED, "calls fft along the tokens"),
    "fft of both": (lambda self, x: torch.fft.fft2(x).real, MIXED, "gives a token another value"),
    "einsum": (lambda self, x: torch.einsum("bsh,bth->bth", x, x), MIXED, "gives a token another value"),
    "division by length": (lambda self, x: x / x.shape[1], MIXED, "where the segment is longer"),
    "logarithm of length": (lambda self, x: x * math.log(x.shape[1]), MIXED, "where the segment is longer"),
    "number of elements": (lambda self, x: x / x.numel() * 1000, MIXED, "where the segment is longer"),
    "last token": (lambda self, x: x + x[:, -1:], MIXED, "gives a token another value"),
    "first token": (lambda self, x: x + x[:, :1], STATE, "begins anew in every segment"),
    "lower triangle": (lambda self, x: torch.ones(x.shape[1], x.shape[1]).tril() @ x, STATE, "begins anew"),
    "cumsum": (lambda self, x: x.cumsum(1), STATE, "takes a cumsum along the tokens"),
    "softmax": (lambda self, x: x * x.softmax(1), STATE, "takes a softmax over the tokens"),
    "convolution": (lambda self, x: self.conv(F.pad(x.mT, (2, 0))).mT, STATE, "block.conv (Conv1d) calls conv1d"),
    "pooling": (lambda self, x: F.avg_pool1d(F.pad(x.mT, (2, 0)), 3, 1).mT, STATE, "by pad"),
    "recurrence": (lambda self, x: self.gru(x.transpose(0, 1))[0].transpose(0, 1), STATE, "block.gru (GRU) calls gru"),
    "kept by the module": (kept_by_the_module, STATE, "shifts the tokens of a segment by cat"),
    "positions by arange": (lambda self, x: x + self.table(torch.arange(x.shape[1])), POSITIONS, "counts the tokens"),
    "positions from the end": (
        lambda self, x: x + self.table(x.shape[1] - 1 - torch.arange(x.shape[1])), POSITIONS, "counts the tokens",
    ),
    "rows of a table": (lambda self, x: x + self.table.weight[: x.shape[1]], POSITIONS, "takes the first rows"),
    "every other token": (lambda self, x: x * (torch.arange(x.shape[1]) % 2)[:, None], POSITIONS, "counts the tokens"),
    "count of large ones": (lambda self, x: x + self.table((x[..., 0] > 0).long().cumsum(1)), POSITIONS, "counts"),
    "kernel of distances": (kernel_of_distances, POSITIONS, "counts the tokens"),
    "attention of torch": (own_attention, ATTENTION, "calls scaled_dot_product_attention on a segment alone"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_mixes_tokens_is_told(what):
    mix, cause, words = WRONG[what]
    (text,) = told(made(mix))
    assert text.startswith(f"{cause}: stage 0, block") and words in text


def test_one_row_tells_as_much():
    """A batch of one row in each micro-batch: the stage gets its tokens in another order as the second."""
    silent = [what for what, (mix, *_) in WRONG.items() if not told(made(mix), rows=2)]
    assert silent == ["kept by the module"]  # what is kept has the step's row, and the sample has two


@pytest.mark.parametrize("what", ["cumsum", "mean", "attention of torch", "previous token by cat", "rows of a table"])
@pytest.mark.parametrize("zero", ["proj", "gate"])
def test_a_branch_that_begins_at_zero_is_looked_into(what, zero):
    """Its output tells nothing before the first update of its weights."""
    mix, cause, _ = WRONG[what]
    model = made(mix)
    nn.init.zeros_(model.block.gate if zero == "gate" else model.block.proj.weight)
    nn.init.zeros_(model.block.proj.bias)
    (text,) = told(model)
    assert text.startswith(cause)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("what", ["cumsum", "mean", "positions by arange", "convolution", "attention of torch", "sort"])
def test_other_dtypes(what, dtype):
    assert len(told(made(WRONG[what][0]).to(dtype))) == 1


class FromHidden(nn.Module):
    """A stage of floating inputs."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.block = Block(mix)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.parametrize("what", ["mean", "cumsum", "sort", "previous token by cat"])
def test_tokens_that_are_all_alike_hide_nothing(what):
    torch.manual_seed(0)
    group = seq1f1b.LoopbackGroup(1)[0]
    engine = PipelineEngine(
        FromHidden(WRONG[what][0]), num_microbatches=2, num_segments=3, loss_fn=nn.MSELoss(), group=group
    )
    x = torch.zeros(4, LENGTH, HIDDEN)
    (text,) = told_by(lambda: engine.step(x, target=torch.ones_like(x)))
    assert text.startswith(WRONG[what][1])


@pytest.mark.parametrize("wrong", [0, 1, None])
@pytest.mark.parametrize("what", ["mean", "previous token by cat"])
def test_the_stage_that_is_wrong_is_named_and_no_other(what, wrong):
    torch.manual_seed(0)
    stages = [
        Model(WRONG[what][0] if index == wrong else RIGHT["plain"], first=index == 0, last=index == 1)
        for index in range(2)
    ]
    tokens, target = batch()

    def run(group: Any) -> None:
        engine_of(stages[group.rank], group).step(tokens, target=target)

    texts = told_by(lambda: run_ranks(2, run))
    assert [text.partition(", block")[0] for text in texts] == (
        [] if wrong is None else [f"{WRONG[what][1]}: stage {wrong}"]
    )


# -- right ones --------------------------------------------------------------------------------------------------------


def carried(self: Any, x: Tensor, name: int, width: int) -> Tensor:
    """The segment with the last tokens of the one before."""
    whole = torch.cat([seq1f1b.carry_in(name, x.new_zeros(x.shape[0], width, x.shape[2])), x], 1)
    seq1f1b.carry_out(name, whole[:, -width:])
    return whole


def running(self: Any, values: Tensor, name: int = 9) -> Tensor:
    total = values.cumsum(1) + seq1f1b.carry_in(name, torch.zeros_like(values[:, :1]))
    seq1f1b.carry_out(name, total[:, -1:])
    return total


def running_mean(self: Any, x: Tensor) -> Tensor:
    return running(self, x) / (seq1f1b.positions(x) + 1)[:, None]


def scanned(self: Any, x: Tensor) -> Tensor:
    """A decaying state in chunks of four tokens, as state-space models compute it."""
    state, outputs = seq1f1b.carry_in(9, x.new_zeros(x.shape[0], x.shape[2])), []
    for chunk in x.split(4, 1):
        steps = torch.arange(chunk.shape[1])
        decay = (0.9 ** (steps[:, None] - steps[None]).clamp(min=0)).tril().to(x.dtype)
        outputs.append(decay @ chunk + (0.9 ** (steps + 1)).to(x.dtype)[:, None] * state[:, None])
        state = outputs[-1][:, -1]
    seq1f1b.carry_out(9, state)
    return torch.cat(outputs, 1)


def cells(self: Any, x: Tensor) -> Tensor:
    h, outputs = seq1f1b.carry_in(9, x.new_zeros(x.shape[0], HIDDEN)), []
    for token in x.unbind(1):
        h = torch.tanh(self.router(token).sum(-1, keepdim=True) + h * 0.5)
        outputs.append(h)
    seq1f1b.carry_out(9, h)
    return torch.stack(outputs, 1)


def gru(self: Any, x: Tensor) -> Tensor:
    y, h = self.gru(x.transpose(0, 1), seq1f1b.carry_in(9, x.new_zeros(1, x.shape[0], HIDDEN)))
    seq1f1b.carry_out(9, h)
    return y.transpose(0, 1)


def keys_carried(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    k = torch.cat([seq1f1b.carry_in(8, k[:, :, :0]), k], 2)
    v = torch.cat([seq1f1b.carry_in(9, v[:, :, :0]), v], 2)
    seq1f1b.carry_out(8, k)
    seq1f1b.carry_out(9, v)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def experts(self: Any, x: Tensor, *, capacity: float = math.inf) -> Tensor:
    """The best of four experts for every token, as far as it takes so many; a loss for their balance."""
    shares = self.router(x).softmax(-1)
    best, choice = shares.max(-1)
    chosen = F.one_hot(choice.flatten(), 4)
    fits = ((chosen.cumsum(0) * chosen).sum(-1) <= capacity).view_as(best)
    made = torch.stack([expert(x) for expert in self.experts], -1)
    y = made.gather(-1, choice[..., None, None].expand(*x.shape, 1)).squeeze(-1)
    seq1f1b.add_loss(0.1 * shares.square().sum(-1).mean())
    return y * (best * fits)[..., None]


def two_experts(self: Any, x: Tensor) -> Tensor:
    scores, choice = self.router(x).topk(2, -1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        rows, tokens, places = (choice == i).nonzero(as_tuple=True)
        y = y.index_put((rows, tokens), expert(x[rows, tokens]) * scores[rows, tokens, places, None], accumulate=True)
    return y


def rotary(self: Any, x: Tensor) -> Tensor:
    angles = seq1f1b.positions(x)[:, None].to(x.dtype) * 0.5 ** torch.arange(HIDDEN // HEADS // 2).to(x.dtype)
    q, k, v = self.heads(x)

    def turned(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    y = seq1f1b.causal_attention(turned(q), turned(k), v, layer=self.own)
    return self.out(y.transpose(1, 2).flatten(2))


def over_heads(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).view(-1, 3, HEADS, HIDDEN // HEADS).unbind(1)
    return F.scaled_dot_product_attention(q, k, v).reshape(x.shape)


def frozen_norm(self: Any, x: Tensor) -> Tensor:
    self.bn.eval()
    return self.bn(x.mT).mT


def by_token_scale(self: Any, x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 7
    return (x / scale).round() * scale


def in_float16(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x).half()
    return self.out(seq1f1b.causal_attention(q, k, v, layer=self.own).to(x.dtype).transpose(1, 2).flatten(2))


def own_rows(self: Any, x: Tensor) -> Tensor:
    """A table of one row for every token, made where it is first needed."""
    if not hasattr(self, "made"):
        self.made = torch.outer(torch.arange(128.0), 0.9 ** torch.arange(HIDDEN)).sin()
    start = seq1f1b.token_offset()
    return x + self.made[start : start + x.shape[1]].to(x.dtype)


RIGHT: dict[str, Mix] = {
    "plain": lambda self, x: self.proj(x),
    "attention": lambda self, x: self.attend(x),
    "window": lambda self, x: self.attend(x, window=5),
    "window of one": lambda self, x: self.attend(x, window=1),
    "soft cap": lambda self, x: self.attend(x, softcap=3.0),
    "ALiBi": lambda self, x: self.attend(x, alibi_slopes=self.slopes),
    "sinks": lambda self, x: self.attend(x, sinks=self.sinks),
    "scale": lambda self, x: self.attend(x, scale=0.3),
    "shared keys": lambda self, x: self.out(
        seq1f1b.causal_attention(self.heads(x)[0], *(t[:, :2] for t in self.heads(x)[1:]), layer=self.own)
        .transpose(1, 2).flatten(2)
    ),
    "learned positions": lambda self, x: x + self.table(seq1f1b.positions(x)),
    "positions from the offset": lambda self, x: x + self.table(torch.arange(x.shape[1]) + seq1f1b.token_offset()),
    "rotary": rotary,
    "a table of its own": own_rows,
    "convolution": lambda self, x: self.conv(carried(self, x, 9, 2).mT).mT,
    "convolution of width 4 by channel": lambda self, x: F.conv1d(
        carried(self, x, 9, 3).mT, self.proj.weight[:, None, :4], groups=HIDDEN
    ).mT,
    "previous token": lambda self, x: carried(self, x, 9, 1)[:, :-1],
    "running sum": lambda self, x: running(self, x) * 0.1,
    "running mean": running_mean,
    "running maximum": lambda self, x: carried_maximum(x),
    "chunks of a state": scanned,
    "cells": cells,
    "GRU": gru,
    "linear attention": lambda self, x: (running(self, x[..., :4, None] * x[..., None, :]) * x[..., :4, None]).sum(2),
    "keys and values by carry": keys_carried,
    "experts": experts,
    "experts with capacity": lambda self, x: experts(self, x, capacity=2 * x.shape[0] * x.shape[1]),
    "the best two experts": two_experts,
    "dropout": lambda self, x: self.drop(self.attend(self.drop(x))),
    "dropout of features": lambda self, x: F.dropout(x, 0.5) + F.alpha_dropout(x, 0.1, self.training),
    "batch norm that is frozen": frozen_norm,
    "group norm of a token": lambda self, x: F.group_norm(x.flatten(0, 1), 4).view_as(x),
    "RMS norm by hand": lambda self, x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "softmax of features": lambda self, x: x.softmax(-1) + x.cumsum(-1) * 0.1 + x.flip(-1) + x.roll(1, -1),
    "sorted features": lambda self, x: x.sort(-1).values + x.topk(3, -1).values.sum(-1, True),
    "attention over heads": over_heads,
    "quantized token by token": by_token_scale,
    "in half precision": in_float16,
    "gated": lambda self, x: self.mlp(x) * self.router(x).sigmoid().mean(-1, keepdim=True),
    "flat tokens": lambda self, x: self.proj(x.reshape(-1, HIDDEN)).view_as(x),
    "tokens first": lambda self, x: self.proj(x.transpose(0, 1)).transpose(0, 1).contiguous(),
    "a loss over tokens": lambda self, x: (seq1f1b.add_loss(x.square().mean()), x)[1],
    "indices of rows and tokens": lambda self, x: x
    + x[torch.arange(len(x))[:, None], torch.arange(x.shape[1])[None], x.argmax(-1)][..., None],
}  # fmt: skip


def carried_maximum(x: Tensor) -> Tensor:
    largest = torch.maximum(x.cummax(1).values, seq1f1b.carry_in(9, torch.full_like(x[:, :1], -math.inf)))
    seq1f1b.carry_out(9, largest[:, -1:])
    return largest


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What looks by values found: None where they could tell nothing."""
    found: list[Any] = []
    findings = Look.findings

    def noted(look: Look) -> Any:
        found.append(findings(look))
        return found[-1]

    monkeypatch.setattr(Look, "findings", noted)
    return found


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_model_is_not_blamed(what, looks):
    assert told(made(RIGHT[what]).to(torch.float32)) == []
    assert looks.pop() == [] and not looks


@pytest.mark.parametrize("what", one_in(3, RIGHT))
def test_a_right_model_is_right(what):
    """In float64 its gradients in segments are those of the whole."""
    tokens, target = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = engine_of(made(RIGHT[what])).verify(tokens, target=target, show=False)
    assert result.ok, str(result)


@pytest.mark.parametrize("what", one_in(2, RIGHT, always=["in half precision"]))
def test_a_right_model_is_not_blamed_in_other_dtypes(what, looks):
    for dtype in (torch.bfloat16, torch.float64):
        if dtype is not torch.bfloat16 or what != "in half precision":
            assert told(made(RIGHT[what]).to(dtype)) == []
            assert looks.pop() == [] and not looks


def documents(self: Any, x: Tensor, doc_ids: Tensor) -> Tensor:
    return self.attend(x + self.table(seq1f1b.positions(x, doc_ids=doc_ids)), doc_ids=doc_ids)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_sliced_arguments_come_with_their_tokens(is_wrong, looks):
    ids = torch.tensor([[0] * 5 + [1] * 10 + [2] * 27, [0] * 42, [0] * 13 + [1] * 29, [0] * 2 + [1] * 40])
    kwargs = {"doc_ids": seq1f1b.document_starts(ids)}
    mix: Any = (lambda self, x, doc_ids: x.cumsum(1) + doc_ids[..., None]) if is_wrong else documents
    texts = told(made(mix), kwargs=kwargs, arg_rules={"doc_ids": "slice"})
    assert len(looks) == 1 and len(texts) == is_wrong == len(looks[0])


# -- what the look leaves as it was, and what it costs -----------------------------------------------------------------


class Stateful(nn.Module):
    """Draws, counts, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(RIGHT["dropout"])
        self.bn = nn.BatchNorm1d(VOCAB).eval()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[tuple[int, ...]] = []
        self.draws = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        self.last = x
        if self.draws:
            random.random()
            torch.rand(3)
        return self.bn(self.model(x).mT).mT


@pytest.mark.parametrize("draws", [False, True])
def test_all_is_left_as_it_was(draws, looks):
    """Against a step without a look, from one state: numbers, generators, buffers, attributes, modes, gradients."""
    tokens, target = batch()
    results = []
    for attention in ("own", "unchecked"):
        torch.manual_seed(0)
        random.seed(0)
        module = Stateful()
        module.draws = draws
        engine = engine_of(module, attention=attention)
        losses = engine.step(tokens, target=target)
        tensors = [*losses, *module.state_dict().values(), *(p.grad for p in module.parameters() if p.grad is not None)]
        others = module.seen, [m.training for m in module.modules()], random.getstate(), sorted(module.__dict__)
        results.append(([t.clone() for t in tensors], torch.get_rng_state(), module.last, others))
    (tensors, state, last, others), (tensors_, state_, last_, others_) = results
    assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_, strict=True))
    assert torch.equal(state, state_) and torch.equal(last, last_) and others == others_
    assert looks == [None if draws else []]  # and nothing was looked at in the other


class Counting(Model):
    """Counts its forwards, and their tokens, outside of what a look puts back."""

    calls: list[tuple[int, int]] = []  # noqa: RUF012

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.calls.append((x.shape[0] * x.shape[1], self.embedding.weight.data_ptr()))
        return super().forward(x, **kwargs)


def test_three_forwards_of_few_tokens_and_no_copy_of_a_parameter():
    tokens, target = batch()
    model = Counting(RIGHT["attention"])
    engine = engine_of(model)
    Counting.calls.clear()
    engine.step(tokens, target=target)
    looked, Counting.calls[:] = Counting.calls[6:], []
    assert 0.0 < engine.report().look_seconds < 10.0
    sizes = [size for size, _ in looked]
    assert len(sizes) == 4 and sizes[1] + sizes[2] == sizes[0] == sizes[3] // 2 and sizes[0] >= 8 and sizes[3] <= 64
    assert {address for _, address in looked} == {model.embedding.weight.data_ptr()}
    engine.step(tokens, target=target)
    engine.step(tokens[:, :36], target=target[:, :36])  # a new length tells nothing new
    assert len(Counting.calls) == 12 and engine.report().look_seconds > 0.0
    engine.eval(tokens, target=target)
    assert len(Counting.calls) == 12 + 6 + 4  # another mode may


def test_a_router_that_rounds_otherwise_is_no_finding(looks):
    """In segments, one token of one row goes to another expert."""

    def flips(self: Any, x: Tensor) -> Tensor:
        y = x.clone()
        if x.shape[1] < 14:
            y[0, 1] = self.proj(x[0, 1])
        return y

    assert told(made(flips)) == [] and looks == [[]]
    mix: Mix = lambda self, x: torch.cat([self.proj(x[:, :1]), x[:, 1:]], 1)  # noqa: E731
    assert len(told(made(mix))) == 1  # of every row


# -- where it is off, or falls back ------------------------------------------------------------------------------------


def test_it_is_off_by_an_option(looks):
    assert told(made(WRONG["mean"][0]), attention="unchecked") == [] and looks == []
    assert told(made(WRONG["attention of torch"][0]), attention="unchecked") == []
    with pytest.raises(ValueError, match=r"^attention is 'none', must be 'own', 'any' or 'unchecked'$"):
        engine_of(made(RIGHT["plain"]), attention="none")


def masked(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    start = seq1f1b.token_offset()
    return x.cumsum(1) * mask[start : start + x.shape[1], None]


@pytest.mark.parametrize("rule", ["replicate", "callable"])
def test_arguments_that_nobody_can_cut_leave_it_to_the_operations(rule, looks):
    mask = torch.ones(LENGTH)
    rules = {"mask": "replicate" if rule == "replicate" else lambda unit: mask}
    kwargs = {"mask": mask} if rule == "replicate" else None
    (text,) = told(made(masked), kwargs=kwargs, arg_rules=rules)
    assert text.startswith(f"{STATE}: stage 0, block (Block) takes a cumsum") and looks == []


def test_a_stage_that_takes_no_other_length_is_left_to_the_operations(looks):
    def fixed(self: Any, x: Tensor) -> Tensor:
        if x.shape[1] != LENGTH // 3:
            raise ValueError("14 tokens only")
        return x.cumsum(1)

    (text,) = told(made(fixed))
    assert text.startswith(STATE) and looks == [None]


class Foreign(nn.Module):
    """No call of causal_attention."""

    def __init__(self, attend: Mix) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.attend = attend

    heads = Block.heads

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(self, self.embedding(x)))


def by_hand(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return ((q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("attend", [own_attention, by_hand, lambda self, x: own_attention(self, x + x.mean(1, True))])
def test_attention_of_another_kind_is_an_error(attend):
    for _ in range(2):
        with pytest.raises(ValueError, match=r'attention not in segments: stage 0, .*pass attention="any"'):
            told(Foreign(attend))


def test_a_router_is_no_attention(looks):
    """As many experts as a segment has tokens: scores of tokens by tokens, to look at them."""

    def routed(self: Any, x: Tensor) -> Tensor:
        scores = x[..., : LENGTH // 3].softmax(-1)
        return x * scores.max(-1, keepdim=True).values

    assert told(Foreign(routed)) == [] and looks == [[]]


def replicas(rank: int, world: int) -> None:
    tokens, target = batch()
    texts = []
    for mix in (RIGHT["attention"], WRONG["mean"][0], talks):
        torch.manual_seed(0)
        engine = engine_of(DistributedDataParallel(made(mix)))
        texts.append(told_by(lambda engine=engine: engine.step(tokens, target=target)))
    assert texts[0] == [] and texts[1][0].startswith(STATISTICS) and texts[2] == []
    assert len(calls) == 6  # as often as the units of its step: one more would wait for the other rank's


calls: list[int] = []


def talks(self: Any, x: Tensor) -> Tensor:
    """Talks to the other replica, as experts do that are spread over processes."""
    calls.append(1)
    total = x.detach().sum()
    torch.distributed.all_reduce(total)
    return x * total.sigmoid()


def test_replicas_are_looked_at_bare_and_those_that_talk_are_not():
    run_processes(2, replicas)
