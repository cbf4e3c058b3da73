"""Small models that are wrong in segments, and models that are right: looks and verifications must tell them apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seq1f1b

HIDDEN, HEADS, VOCAB, EXPERTS = 12, 3, 29, 5
WIDTH = HIDDEN // HEADS
ROWS, MICROBATCHES, LENGTH, SEGMENTS = 3, 2, 40, 4  # 10 tokens in a segment: no size of a weight


class Net(nn.Module):
    """Tokens, or hidden states, in; logits, or hidden states, out: a mixer of tokens between two layers."""

    def __init__(self, mixer: nn.Module, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if first else nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.mixer = nn.LayerNorm(HIDDEN), mixer
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCAB) if last else nn.Identity()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.embedding(x)
        x = x + self.mixer(self.norm(x), **kwargs)
        return self.head(x + self.mlp(x))


class Mixer(nn.Module):
    """What most need: projections to queries, keys and values, and names for state."""

    def __init__(self, mix: Callable[..., Tensor] | None = None, **parts: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layer, self.state = seq1f1b.layer_handle(0), seq1f1b.layer_handle(1)
        self.mix = mix
        for name, part in parts.items():
            setattr(self, name, part)

    def heads(self, x: Tensor) -> Any:
        return self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)

    def join(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))

    def attend(self, x: Tensor, **options: Any) -> Tensor:
        return self.join(seq1f1b.causal_attention(*self.heads(x), layer=self.layer, **options))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.mix(self, x, **kwargs)


def causal_mask(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    frequencies = 0.5 ** torch.arange(WIDTH // 2, dtype=x.dtype)
    angles = positions.to(x.dtype)[:, None] * frequencies
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


# -- wrong -------------------------------------------------------------------------------------------------------------


def torchs_attention(self: Any, x: Tensor) -> Tensor:
    return self.join(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


def positions_by_arange(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + self.table(torch.arange(x.shape[1], device=x.device)))


def positions_by_cumsum(self: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[:2], dtype=torch.int64)
    return self.attend(x + self.table(mask.cumsum(1) - 1))


def recurrent(self: Any, x: Tensor) -> Tensor:
    return self.rnn(x)[0]


def batch_norm(self: Any, x: Tensor) -> Tensor:
    return self.attend(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


def convolution(self: Any, x: Tensor) -> Tensor:
    return self.attend(self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2))


def own_alibi(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    tokens = torch.arange(x.shape[1])
    slopes = 0.5 ** torch.arange(1, HEADS + 1, dtype=x.dtype)
    bias = -slopes[:, None, None] * (tokens[:, None] - tokens[None]).to(x.dtype)
    bias = bias.masked_fill(~causal_mask(len(tokens), len(tokens)), -math.inf)
    return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


def rotary_from_zero(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    tokens = torch.arange(x.shape[1])
    q, k = rotate(q, tokens), rotate(k, tokens)
    return self.join(seq1f1b.causal_attention(q, k, v, layer=self.layer))


def sliced_table(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + self.table.weight[: x.shape[1]])


def cache_left_on(self: Any, x: Tensor) -> Tensor:
    """A cache of keys and values that grows in the module, as generation needs it."""
    q, k, v = self.heads(x)
    if self.cache is not None and self.cache[0].shape[2] < LENGTH and self.cache[0].dtype == k.dtype:
        k, v = (torch.cat([old, new], 2) for old, new in zip(self.cache, (k, v), strict=True))
    self.cache = (k.detach(), v.detach())
    return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q.shape[2], k.shape[2])))


def batch_norm_by_hand(self: Any, x: Tensor) -> Tensor:
    return self.attend((x - x.mean((0, 1))) / x.std((0, 1)))


def cumulative_sum(self: Any, x: Tensor) -> Tensor:
    return self.attend(x.cumsum(1) * 0.1)


def padded_shift(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


def rolled_shift(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + torch.roll(x, 1, 1))


def norm_of_sequence(self: Any, x: Tensor) -> Tensor:
    return self.attend(F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2))


def attention_by_hand(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(~causal_mask(x.shape[1], x.shape[1]), -math.inf)
    return self.join(scores.softmax(-1) @ v)


def pooling(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + x.mean(1, keepdim=True))


def torchs_module(self: Any, x: Tensor) -> Tensor:
    return self.mha(x, x, x, attn_mask=~causal_mask(x.shape[1], x.shape[1]), need_weights=False)[0]


def shared_dropout(self: Any, x: Tensor) -> Tensor:
    return self.attend(self.dropout(x.transpose(1, 2)).transpose(1, 2))


def drop_path(self: Any, x: Tensor) -> Tensor:
    return self.attend(x) * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.7) / 0.7


def cell_by_token(self: Any, x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(x.shape[0], HIDDEN), []
    for token in x.unbind(1):
        h = self.cell(token, h)
        outputs.append(h)
    return torch.stack(outputs, 1)


def detached_state(self: Any, x: Tensor) -> Tensor:
    """A running sum that later segments get without its gradient."""
    total = x.cumsum(1) + seq1f1b.carry_in(self.state, x.new_zeros(()))
    seq1f1b.carry_out(self.state, total[:, -1:].detach())
    return self.attend(total * 0.1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch_mean(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / len(target)


def own_count(logits: Tensor, target: Tensor) -> Tensor:
    """Divides by a number of targets that the engine does not know of: it leaves out token 0, and more in places."""
    counted = (target > 0) & (target % 3 > 0)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def shifts_labels(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1], target[:, 1:])


# -- right -------------------------------------------------------------------------------------------------------------


def attention(self: Any, x: Tensor, **options: Any) -> Tensor:
    return self.attend(x, **options)


def our_positions(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + self.table(seq1f1b.positions(x)))


def our_rotary(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    q, k = (rotate(t, seq1f1b.positions(x)) for t in (q, k))
    return self.join(seq1f1b.causal_attention(q, k, v, layer=self.layer))


def arange_and_offset(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + self.table(torch.arange(x.shape[1]) + seq1f1b.token_offset()))


def offset_to_end(self: Any, x: Tensor) -> Tensor:
    offset = seq1f1b.token_offset()
    return self.attend(x + self.table.weight[offset : offset + x.shape[1]])


def alibi(self: Any, x: Tensor) -> Tensor:
    return self.attend(x, alibi_slopes=self.slopes)


def window(self: Any, x: Tensor) -> Tensor:
    return self.attend(x, window=7, softcap=3.0)


def carried_convolution(self: Any, x: Tensor) -> Tensor:
    before = seq1f1b.carry_in(self.state, x.new_zeros(x.shape[0], 2, HIDDEN))
    whole = torch.cat([before, x], 1)
    seq1f1b.carry_out(self.state, whole[:, -2:])
    return self.conv(whole.transpose(1, 2)).transpose(1, 2)


def carried_recurrence(self: Any, x: Tensor) -> Tensor:
    zero = x.new_zeros(1, x.shape[0], HIDDEN)
    if isinstance(self.rnn, nn.LSTM):
        state = seq1f1b.carry_in(0, zero), seq1f1b.carry_in(1, zero)
        y, after = self.rnn(x, state)
        for i, value in enumerate(after):
            seq1f1b.carry_out(i, value)
        return y
    y, h = self.rnn(x, seq1f1b.carry_in(self.state, zero))
    seq1f1b.carry_out(self.state, h)
    return y


def carried_cell(self: Any, x: Tensor) -> Tensor:
    h, outputs = seq1f1b.carry_in(self.state, x.new_zeros(x.shape[0], HIDDEN)), []
    for token in x.unbind(1):
        h = self.cell(token, h)
        outputs.append(h)
    seq1f1b.carry_out(self.state, h)
    return torch.stack(outputs, 1)


def carried_sum(self: Any, x: Tensor) -> Tensor:
    total = x.cumsum(1) + seq1f1b.carry_in(self.state, x.new_zeros(()))
    seq1f1b.carry_out(self.state, total[:, -1:])
    return self.attend(total * 0.1)


def carried_shift(self: Any, x: Tensor) -> Tensor:
    before = seq1f1b.carry_in(self.state, torch.zeros_like(x[:, :1]))
    seq1f1b.carry_out(self.state, x[:, -1:])
    return self.attend(x + torch.cat([before, x[:, :-1]], 1))


def carried_keys(self: Any, x: Tensor) -> Tensor:
    """The model's own cache of keys and values, handed on with its gradient, and torch's attention."""
    q, k, v = self.heads(x)
    k = torch.cat([seq1f1b.carry_in(0, k[:, :, :0]), k], 2)
    v = torch.cat([seq1f1b.carry_in(1, v[:, :, :0]), v], 2)
    seq1f1b.carry_out(0, k)
    seq1f1b.carry_out(1, v)
    return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q.shape[2], k.shape[2])))


def experts(self: Any, x: Tensor) -> Tensor:
    """A mixture of experts: a softmax over experts, tokens sorted by expert, and a loss for the balance."""
    shares = self.router(x).softmax(-1)
    best, choice = shares.max(-1)
    flat, order = x.flatten(0, 1), choice.flatten().argsort(stable=True)
    counts = torch.bincount(choice.flatten(), minlength=EXPERTS)
    parts = flat[order].split(counts.tolist())
    made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    seq1f1b.add_loss(0.1 * shares.square().sum(-1).mean())
    return made[back].view_as(x) * best[..., None] + self.attend(x)


def dropout(self: Any, x: Tensor) -> Tensor:
    return F.dropout(self.attend(self.dropout(x)), 0.2, self.training)


def feature_norms(self: Any, x: Tensor) -> Tensor:
    flat = self.group_norm(x.flatten(0, 1)).view_as(x)
    return self.attend(F.rms_norm(flat, (HIDDEN,)))


def cross_attention(self: Any, x: Tensor, memory: Tensor) -> Tensor:
    """Every token attends to a memory that is no part of the sequence."""
    q = self.heads(self.attend(x))[0]
    _, k, v = self.heads(memory)
    return self.join(F.scaled_dot_product_attention(q, k, v))


def within_a_token(self: Any, x: Tensor) -> Tensor:
    """Attention over the heads of one token, a convolution along its features, a product along them."""
    q, k, v = self.qkv(x).flatten(0, 1).unflatten(-1, (3, HEADS, WIDTH)).unbind(1)
    mixed = F.scaled_dot_product_attention(q, k, v).flatten(1).view_as(x)
    features = self.narrow(x.reshape(-1, 1, HIDDEN)).view_as(x)
    return self.attend(mixed) + features + x.cumsum(-1) * 0.1 + x.softmax(-1)


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.attend, x, use_reentrant=False)


def rows_by_arange(self: Any, x: Tensor) -> Tensor:
    """Indices by arange that are no positions: of rows and tokens, to pick each token's largest feature."""
    rows, tokens = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]
    largest = x[rows, tokens, x.argmax(-1)]
    return self.attend(x + largest[..., None])


def documents_by_cumsum(self: Any, x: Tensor, starts: Tensor) -> Tensor:
    """Documents counted from their first tokens; the count so far is carried."""
    documents = starts.cumsum(1) + seq1f1b.carry_in(self.state, starts.new_zeros(()))
    seq1f1b.carry_out(self.state, documents[:, -1:])
    return self.attend(x, doc_ids=documents)


def frozen_batch_norm(self: Any, x: Tensor) -> Tensor:
    self.batch_norm.eval()
    return self.attend(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


def linear_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    sums = (k.sigmoid()[..., None] * v[..., None, :]).cumsum(2)
    sums = sums + seq1f1b.carry_in(self.state, torch.zeros_like(sums[:, :, :1]))
    seq1f1b.carry_out(self.state, sums[:, :, -1:])
    return self.join((q.sigmoid()[..., None] * sums).sum(-2) * 0.1)


class Head(nn.Module):
    """A loss that holds the model's head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(VOCAB, VOCAB)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden), target)


def summed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


# -- the tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        parts: makes what the mixer needs beside its projections.
        options: of the engine.
        kwargs: makes the step's keyword arguments.
    """

    name: str
    mix: Callable[..., Tensor] = attention
    parts: Callable[[], dict[str, Any]] = dict
    options: Callable[[], dict[str, Any]] = dict
    kwargs: Callable[[], dict[str, Any]] = dict
    seen: bool = True  # wrong ones: by the engine itself
    told: bool = True  # wrong ones: by verify
    cause: str = ""
    autocast: bool = field(default=False)

    def module(self, **ends: bool) -> Net:
        torch.manual_seed(0)
        return Net(Mixer(self.mix, **self.parts()), **ends)


def table() -> dict[str, Any]:
    return {"table": nn.Embedding(64, HIDDEN)}


def loss_options(loss_fn: Callable[..., Tensor], **others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"loss_fn": loss_fn, **others}


ATTENTION, POSITIONS, STATE = "attention not in segments", "positions from zero", "state across tokens"
STATISTICS, RANDOMNESS, WEIGHTING = "batch statistics", "randomness that differs", "loss weighting"
LSTM: Callable[[], dict[str, Any]] = lambda: {"rnn": nn.LSTM(HIDDEN, HIDDEN, batch_first=True)}  # noqa: E731
GRU: Callable[[], dict[str, Any]] = lambda: {"rnn": nn.GRU(HIDDEN, HIDDEN, batch_first=True)}  # noqa: E731
CONVOLUTION: Callable[[], dict[str, Any]] = lambda: {"conv": nn.Conv1d(HIDDEN, HIDDEN, 3)}  # noqa: E731
BATCH_NORM: Callable[[], dict[str, Any]] = lambda: {"batch_norm": nn.BatchNorm1d(HIDDEN)}  # noqa: E731

WRONG = [
    Case("torch's scaled_dot_product_attention", torchs_attention, cause=ATTENTION),
    Case("position embedding by arange", positions_by_arange, table, cause=POSITIONS),
    Case("LSTM", recurrent, LSTM, cause=STATE),
    Case("BatchNorm", batch_norm, BATCH_NORM, cause=STATISTICS),
    Case("causal convolution without carry", convolution, CONVOLUTION, cause=STATE),
    Case("ALiBi by an own mask", own_alibi, cause=ATTENTION),
    Case("rotary positions from zero", rotary_from_zero, cause=POSITIONS),
    Case("positions by a mask's cumsum", positions_by_cumsum, table, cause=POSITIONS),
    Case("first rows of a position table", sliced_table, table, cause=POSITIONS),
    Case("KV cache of the module left on", cache_left_on, lambda: {"cache": None}, cause=ATTENTION),
    Case("loss: sum over the number of rows", options=loss_options(batch_mean), cause=WEIGHTING),
    Case("loss: sum over its own count", options=loss_options(own_count), cause=WEIGHTING),
    Case("loss that shifts the labels", options=loss_options(shifts_labels), cause=WEIGHTING),
    Case("batch statistics by hand", batch_norm_by_hand, cause=STATISTICS),
    Case("cumulative sum over tokens", cumulative_sum, cause=STATE),
    Case("token shift by pad", padded_shift, cause=STATE),
    Case("token shift by roll", rolled_shift, cause=STATE),
    Case("layer norm over the sequence", norm_of_sequence, cause=STATE),
    Case("attention by hand", attention_by_hand, cause=ATTENTION),
    Case("GRU", recurrent, GRU, cause=STATE),
    Case("GRUCell in a loop", cell_by_token, lambda: {"cell": nn.GRUCell(HIDDEN, HIDDEN)}, cause=STATE),
    Case("mean pooling over the sequence", pooling, cause=STATISTICS),
    Case(
        "nn.MultiheadAttention",
        torchs_module,
        lambda: {"mha": nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)},
        cause=ATTENTION,
    ),
    Case(
        "dropout of whole features", shared_dropout, lambda: {"dropout": nn.Dropout1d(0.3)}, told=False,
        cause=RANDOMNESS,
    ),
    Case("DropPath: one random number per row", drop_path, seen=False, cause=RANDOMNESS),
    Case("carried state without its gradient", detached_state, seen=False, cause=STATE),
]  # fmt: skip

RIGHT = [
    Case("causal_attention"),
    Case("positions", our_positions, table),
    Case("rotary by positions", our_rotary),
    Case("arange plus token_offset", arange_and_offset, table),
    Case("a table's rows from token_offset", offset_to_end, table),
    Case("alibi_slopes", alibi, lambda: {"slopes": 0.5 ** torch.arange(1.0, HEADS + 1)}),
    Case("window and softcap", window),
    Case("convolution with carry", carried_convolution, CONVOLUTION),
    Case("LSTM with carry", carried_recurrence, LSTM),
    Case("GRU with carry", carried_recurrence, GRU),
    Case("GRUCell in a loop with carry", carried_cell, lambda: {"cell": nn.GRUCell(HIDDEN, HIDDEN)}),
    Case("cumulative sum with carry", carried_sum),
    Case("token shift with carry", carried_shift),
    Case("own keys and values by carry, torch's attention", carried_keys),
    Case(
        "mixture of experts with add_loss",
        experts,
        lambda: {
            "router": nn.Linear(HIDDEN, EXPERTS),
            "experts": nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)]),
        },
    ),
    Case("dropout", dropout, lambda: {"dropout": nn.Dropout(0.3)}),
    Case("GroupNorm, RMSNorm over features", feature_norms, lambda: {"group_norm": nn.GroupNorm(3, HIDDEN)}),
    Case(
        "packed documents",
        options=lambda: {"arg_rules": {"doc_ids": "slice"}},
        kwargs=lambda: {
            "doc_ids": seq1f1b.document_starts(
                torch.arange(LENGTH).div(13, rounding_mode="floor").expand(ROWS * MICROBATCHES, LENGTH)
            )
        },
    ),
    Case(
        "document ids by cumsum with carry",
        documents_by_cumsum,
        options=lambda: {"arg_rules": {"starts": "slice"}},
        kwargs=lambda: {"starts": (torch.arange(LENGTH) % 13 == 0).long().expand(ROWS * MICROBATCHES, LENGTH)},
    ),
    Case(
        "cross-attention to a memory",
        cross_attention,
        options=lambda: {"arg_rules": {"memory": lambda unit: torch.ones(ROWS, 7, HIDDEN).cumsum(1) / 7}},
    ),
    Case(
        "attention and convolution within a token",
        within_a_token,
        lambda: {"narrow": nn.Conv1d(1, 1, 3, padding=1)},
    ),
    Case("checkpointing", checkpointed),
    Case("indices of rows and tokens by arange", rows_by_arange),
    Case("BatchNorm in evaluation mode", frozen_batch_norm, BATCH_NORM),
    Case("linear attention with carry", linear_attention),
    Case("a loss that holds the head", options=lambda: {"loss_fn": Head()}),
    Case("a summed loss", options=loss_options(summed, loss=seq1f1b.Loss(reduction="sum"))),
    Case("autocast to bfloat16", our_positions, table, autocast=True),
]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS * MICROBATCHES, LENGTH), generator=generator)
    target = seq1f1b.shift_labels(tokens)
    target[:, 3:9] = -100
    return tokens, target
