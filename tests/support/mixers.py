"""Small models that are wrong in segments, and models that are right: looks and verifications must tell them apart."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seq1f1b
from seq1f1b import carry_in, carry_out

HIDDEN, HEADS, VOCAB, EXPERTS, MOST = 12, 3, 29, 5, 64
WIDTH = HIDDEN // HEADS
ROWS, MICROBATCHES, LENGTH, SEGMENTS = 3, 2, 40, 4  # 10 tokens in a segment: no size of a weight
Mix = Callable[..., Tensor]


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
    """Tokens are mixed by ``mix``, a function of this module and its input; the parts are what such functions need."""

    def __init__(self, mix: Mix, **parts: nn.Module) -> None:
        super().__init__()
        self.mix = mix
        for name, part in parts.items():
            setattr(self, name, part)
        self.qkv, self.out, self.proj = (nn.Linear(HIDDEN, n) for n in (3 * HIDDEN, HIDDEN, HIDDEN))
        self.gate, self.slopes = nn.Parameter(torch.ones(HIDDEN)), 0.5 ** torch.arange(1.0, HEADS + 1)
        self.table, self.dropout = nn.Embedding(MOST, HIDDEN), nn.Dropout(0.3)
        self.conv, self.narrow = nn.Conv1d(HIDDEN, HIDDEN, 3), nn.Conv1d(1, 1, 3, padding=1)
        self.lstm, self.gru = (kind(HIDDEN, HIDDEN, batch_first=True) for kind in (nn.LSTM, nn.GRU))
        self.cell, self.mha = nn.GRUCell(HIDDEN, HIDDEN), nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(HIDDEN), nn.GroupNorm(3, HIDDEN)
        self.router, self.experts = (
            nn.Linear(HIDDEN, EXPERTS),
            nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in "12345"),
        )
        self.layer, self.cache, self.last = seq1f1b.layer_handle(0), None, None

    def heads(self, x: Tensor) -> Any:
        return self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)

    def join(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))

    def attend(self, x: Tensor, **options: Any) -> Tensor:
        return self.join(seq1f1b.causal_attention(*self.heads(x), layer=self.layer, **options))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.mix(self, x, **kwargs)


def beside(mix: Mix) -> Mix:
    """Attention as it should be, and this in a branch of its own."""
    return lambda self, x, **kwargs: self.attend(x) + self.proj(mix(self, x, **kwargs)) * self.gate


def causal_mask(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def rotary(self: Any, x: Tensor, positions: Tensor, layer: int = 0) -> Tensor:
    def rotated(x: Tensor) -> Tensor:
        angles = positions.to(x.dtype)[:, None] * 0.5 ** torch.arange(WIDTH // 2, dtype=x.dtype)
        (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    q, k, v = self.heads(x)
    return self.join(seq1f1b.causal_attention(rotated(q), rotated(k), v, layer=layer))


def attention(self: Any, x: Tensor, **options: Any) -> Tensor:
    return self.attend(x, **options)


# -- wrong -------------------------------------------------------------------------------------------------------------


def torchs_attention(self: Any, x: Tensor) -> Tensor:
    return self.join(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


def own_alibi(self: Any, x: Tensor) -> Tensor:
    tokens = torch.arange(x.shape[1])
    bias = -self.slopes.to(x.dtype)[:, None, None] * (tokens[:, None] - tokens[None]).to(x.dtype)
    bias = bias.masked_fill(~causal_mask(len(tokens), len(tokens)), -math.inf)
    return self.join(F.scaled_dot_product_attention(*self.heads(x), attn_mask=bias))


def cache_left_on(self: Any, x: Tensor) -> Tensor:
    """A cache of keys and values that grows in the module, as generation needs it."""
    q, k, v = self.heads(x)
    if self.cache is not None and self.cache[0].shape[2] < LENGTH and self.cache[0].dtype == k.dtype:
        k, v = (torch.cat([old, new], 2) for old, new in zip(self.cache, (k, v), strict=True))
    self.cache = (k.detach(), v.detach())
    return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q.shape[2], k.shape[2])))


def attention_by_hand(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~causal_mask(x.shape[1], x.shape[1]), -math.inf)
    return self.join(scores.softmax(-1) @ v)


def attention_by_einsum(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + causal_mask(x.shape[1], x.shape[1]).to(x.dtype).log()
    return self.join(torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v))


def torchs_module(self: Any, x: Tensor) -> Tensor:
    return self.mha(x, x, x, attn_mask=~causal_mask(x.shape[1], x.shape[1]), need_weights=False)[0]


def pooling(self: Any, x: Tensor) -> Tensor:
    return self.attend(x + x.mean(1, keepdim=True))


def drop_path(self: Any, x: Tensor) -> Tensor:
    return self.attend(x) * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.7) / 0.7


def cells(self: Any, x: Tensor, h: Tensor | None = None) -> Tensor:
    h, outputs = x.new_zeros(x.shape[0], HIDDEN) if h is None else h, []
    for token in x.unbind(1):
        h = self.cell(token, h)
        outputs.append(h)
    return torch.stack(outputs, 1)


def detached_state(self: Any, x: Tensor) -> Tensor:
    """A running sum that later segments get without its gradient."""
    total = x.cumsum(1) + carry_in(1, x.new_zeros(()))
    carry_out(1, total[:, -1:].detach())
    return self.attend(total * 0.1)


def kernel_of_distances(self: Any, x: Tensor) -> Tensor:
    tokens = torch.arange(x.shape[1])
    distances = tokens[:, None] - tokens[None]
    return torch.exp(-distances.to(x.dtype)).masked_fill(distances < 0, 0.0) @ x


def kept_by_the_module(self: Any, x: Tensor) -> Tensor:
    """The last token of the segment before, in an attribute: its values are right, and no gradient flows."""
    before = torch.zeros_like(x[:, :1]) if self.last is None else self.last
    self.last = x[:, -1:].detach()
    return torch.cat([before, x[:, :-1]], 1)


def table_of_a_length(self: Any, x: Tensor) -> Tensor:
    if self.cache is None or self.cache.shape[0] != x.shape[1]:
        self.cache = torch.outer(torch.arange(x.shape[1]), 0.5 ** torch.arange(HIDDEN)).cos()
    return x * self.cache


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)


def own_count(logits: Tensor, target: Tensor) -> Tensor:
    """Divides by a number of targets that the engine does not know of: it leaves out token 0, and more in places."""
    counted = (target > 0) & (target % 3 > 0)
    losses = cross_entropy(logits, target, reduction="none").view_as(target)
    return (losses * counted).sum() / counted.sum().clamp(min=1)


# -- right -------------------------------------------------------------------------------------------------------------


def carried(x: Tensor, width: int) -> Tensor:
    """The segment with the last tokens of the one before."""
    whole = torch.cat([carry_in(1, x.new_zeros(x.shape[0], width, HIDDEN)), x], 1)
    carry_out(1, whole[:, -width:])
    return whole


def running(values: Tensor, dim: int = 1) -> Tensor:
    total = values.cumsum(dim) + carry_in(1, torch.zeros_like(values.narrow(dim, 0, 1)))
    carry_out(1, total.narrow(dim, -1, 1))
    return total


def running_maximum(self: Any, x: Tensor) -> Tensor:
    largest = torch.maximum(x.cummax(1).values, carry_in(1, torch.full_like(x[:, :1], -math.inf)))
    carry_out(1, largest[:, -1:])
    return largest


def scanned(self: Any, x: Tensor) -> Tensor:
    """A decaying state in chunks of four tokens, as state-space models compute it."""
    state, outputs = carry_in(1, x.new_zeros(x.shape[0], HIDDEN)), []
    for chunk in x.split(4, 1):
        steps = torch.arange(chunk.shape[1])
        decay = (0.9 ** (steps[:, None] - steps[None]).clamp(min=0)).tril().to(x.dtype)
        outputs.append(decay @ chunk + (0.9 ** (steps + 1)).to(x.dtype)[:, None] * state[:, None])
        state = outputs[-1][:, -1]
    carry_out(1, state)
    return torch.cat(outputs, 1)


def carried_lstm(self: Any, x: Tensor) -> Tensor:
    zero = x.new_zeros(1, x.shape[0], HIDDEN)
    y, (h, c) = self.lstm(x, (carry_in(1, zero), carry_in(2, zero)))
    carry_out(1, h)
    carry_out(2, c)
    return y


def carried_gru(self: Any, x: Tensor) -> Tensor:
    y, h = self.gru(x, carry_in(1, x.new_zeros(1, x.shape[0], HIDDEN)))
    carry_out(1, h)
    return y


def carried_cells(self: Any, x: Tensor) -> Tensor:
    y = cells(self, x, carry_in(1, x.new_zeros(x.shape[0], HIDDEN)))
    carry_out(1, y[:, -1])
    return y


def carried_keys(self: Any, x: Tensor) -> Tensor:
    """The model's own cache of keys and values, handed on with its gradient, and torch's attention."""
    q, k, v = self.heads(x)
    k, v = (torch.cat([carry_in(i, t[:, :, :0]), t], 2) for i, t in ((1, k), (2, v)))
    carry_out(1, k)
    carry_out(2, v)
    return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q.shape[2], k.shape[2])))


def linear_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x)
    sums = running(k.sigmoid()[..., None] * v[..., None, :], 2)
    return self.join((q.sigmoid()[..., None] * sums).sum(-2) * 0.1)


def experts(self: Any, x: Tensor) -> Tensor:
    """A mixture of experts: a softmax over experts, tokens sorted by expert, and a loss for the balance."""
    shares = self.router(x).softmax(-1)
    best, choice = shares.max(-1)
    flat, order = x.flatten(0, 1), choice.flatten().argsort(stable=True)
    parts = flat[order].split(torch.bincount(choice.flatten(), minlength=EXPERTS).tolist())
    made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    seq1f1b.add_loss(0.1 * shares.square().sum(-1).mean())
    return made[back].view_as(x) * best[..., None]


def experts_with_capacity(self: Any, x: Tensor) -> Tensor:
    """Each takes so many tokens that none is left out."""
    best, choice = self.router(x).softmax(-1).max(-1)
    chosen = F.one_hot(choice.flatten(), EXPERTS)
    fits = ((chosen.cumsum(0) * chosen).sum(-1) <= 2 * choice.numel()).view_as(best)
    made = torch.stack([expert(x) for expert in self.experts], -1)
    return made.gather(-1, choice[..., None, None].expand(*x.shape, 1)).squeeze(-1) * (best * fits)[..., None]


def two_experts(self: Any, x: Tensor) -> Tensor:
    scores, choice = self.router(x).topk(2, -1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        rows, tokens, nth = (choice == i).nonzero(as_tuple=True)
        y = y.index_put((rows, tokens), expert(x[rows, tokens]) * scores[rows, tokens, nth, None], accumulate=True)
    return y


def cross_attention(self: Any, x: Tensor, memory: Tensor) -> Tensor:
    """Every token attends to a memory that is no part of the sequence."""
    q = self.heads(self.attend(x))[0]
    _, k, v = self.heads(memory)
    return self.join(F.scaled_dot_product_attention(q, k, v))


def latents(self: Any, x: Tensor) -> Tensor:
    """Every token attends to rows of a table, by torch's attention and by hand."""
    k = self.table(torch.arange(HIDDEN)).view(1, HIDDEN, HEADS, WIDTH).transpose(1, 2).expand(len(x), -1, -1, -1)
    q = self.heads(x)[0]
    return self.join(F.scaled_dot_product_attention(q, k, k) + (q @ k.mT).softmax(-1) @ k)


def within_a_token(self: Any, x: Tensor) -> Tensor:
    """Attention over the heads of one token, a convolution along its features, a sum and an order of them."""
    q, k, v = self.qkv(x).flatten(0, 1).unflatten(-1, (3, HEADS, WIDTH)).unbind(1)
    mixed = F.scaled_dot_product_attention(q, k, v) + (q @ k.mT).softmax(-1) @ v
    features = self.narrow(x.reshape(-1, 1, HIDDEN)).view_as(x) + x.flip(-1) + x.roll(1, -1) + x.sort(-1).values
    return mixed.flatten(1).view_as(x) + features + x.cumsum(-1) * 0.1 + x.softmax(-1)


def documents_by_cumsum(self: Any, x: Tensor, starts: Tensor) -> Tensor:
    """Documents counted from their first tokens; the count so far is carried."""
    return self.attend(x, doc_ids=running(starts))


def frozen_batch_norm(self: Any, x: Tensor) -> Tensor:
    self.batch_norm.eval()
    return self.batch_norm(x.mT).mT


def rows_and_tokens(self: Any, x: Tensor) -> Tensor:
    """Indices by arange that are no positions: of rows and tokens, to pick each token's largest feature."""
    rows, tokens = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]
    return x + x[rows, tokens, x.argmax(-1)][..., None]


def quantized_token_by_token(self: Any, x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 7
    return (x / scale).round() * scale


def in_float16(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.heads(x).half()
    return self.join(seq1f1b.causal_attention(q, k, v, layer=5).to(x.dtype))


def own_rows(self: Any, x: Tensor) -> Tensor:
    """A table of one row for every token, made where it is first needed."""
    if self.cache is None:
        self.cache = torch.outer(torch.arange(128.0), 0.9 ** torch.arange(HIDDEN)).sin()
    start = seq1f1b.token_offset()
    return x + self.cache[start : start + x.shape[1]].to(x.dtype)


class Head(nn.Module):
    """A loss that holds the model's head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(VOCAB, VOCAB)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden), target)


# -- tables: models that docs/how-to/verify.md names -------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        cause: that is named of a wrong one.
        options: makes those of the engine.
        kwargs: makes the step's keyword arguments.
    """

    name: str
    mix: Mix = attention
    cause: str = ""
    options: Callable[[], dict[str, Any]] = dict
    kwargs: Callable[[], dict[str, Any]] = dict
    autocast: bool = False

    def module(self, **ends: bool) -> Net:
        torch.manual_seed(0)
        return Net(Mixer(self.mix), **ends)


def of_loss(loss_fn: Callable[..., Tensor], **others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"loss_fn": loss_fn, **others}


def sliced(name: str, value: Callable[[], Tensor]) -> dict[str, Any]:
    """Options and arguments of a case whose mixer gets one that is cut as the tokens are."""
    return {
        "options": lambda: {"arg_rules": {name: "slice"}},
        "kwargs": lambda: {name: value().expand(ROWS * MICROBATCHES, LENGTH)},
    }


ATTENTION, STATE, LATER = "attention not in segments", "state across tokens", "later tokens"
RANDOMNESS, WEIGHTING = "randomness that differs", "loss weighting"

WRONG = [
    Case("torch's scaled_dot_product_attention", torchs_attention, ATTENTION),
    Case("position embedding by arange", lambda m, x: m.attend(x + m.table(torch.arange(x.shape[1]))), STATE),
    Case("LSTM", lambda m, x: m.lstm(x)[0], STATE),
    Case("BatchNorm", lambda m, x: m.attend(m.batch_norm(x.mT).mT), LATER),
    Case("causal convolution without carry", lambda m, x: m.attend(m.conv(F.pad(x.mT, (2, 0))).mT), STATE),
    Case("ALiBi by an own mask", own_alibi, ATTENTION),
    Case("rotary positions from zero", lambda m, x: rotary(m, x, torch.arange(x.shape[1])), STATE),
    Case(
        "positions by a mask's cumsum",
        lambda m, x: m.attend(x + m.table(torch.ones(x.shape[:2], dtype=torch.int64).cumsum(1) - 1)), STATE,
    ),
    Case("first rows of a position table", lambda m, x: m.attend(x + m.table.weight[: x.shape[1]]), STATE),
    Case("KV cache of the module left on", cache_left_on, ATTENTION),
    Case(
        "loss: sum over the number of rows", cause=WEIGHTING,
        options=of_loss(lambda y, t: cross_entropy(y, t, reduction="sum") / len(t)),
    ),
    Case("loss: sum over its own count", cause=WEIGHTING, options=of_loss(own_count)),
    Case(
        "loss that shifts the labels", cause=WEIGHTING,
        options=of_loss(lambda y, t: cross_entropy(y[:, :-1], t[:, 1:])),
    ),
    Case("batch statistics by hand", lambda m, x: m.attend((x - x.mean((0, 1))) / x.std((0, 1))), LATER),
    Case("cumulative sum over tokens", lambda m, x: m.attend(x.cumsum(1) * 0.1), STATE),
    Case("token shift by pad", lambda m, x: m.attend(x + F.pad(x, (0, 0, 1, 0))[:, :-1]), STATE),
    Case("token shift by roll", lambda m, x: m.attend(x + x.roll(1, 1)), LATER),
    Case("layer norm over the sequence", lambda m, x: m.attend(F.layer_norm(x.mT, (x.shape[1],)).mT), LATER),
    Case("attention by hand", attention_by_hand, ATTENTION),
    Case("GRU", lambda m, x: m.gru(x)[0], STATE),
    Case("GRUCell in a loop", cells, STATE),
    Case("mean pooling over the sequence", pooling, LATER),
    Case("nn.MultiheadAttention", torchs_module, ATTENTION),
    Case("dropout of whole features", lambda m, x: m.attend(F.dropout1d(x.mT, 0.3).mT), RANDOMNESS),
    Case("DropPath: one random number per row", drop_path, RANDOMNESS),
    Case("carried state without its gradient", detached_state, STATE),
]  # fmt: skip

RIGHT = [
    Case("causal_attention"),
    Case("positions", lambda m, x: m.attend(x + m.table(seq1f1b.positions(x)))),
    Case("rotary by positions", lambda m, x: rotary(m, x, seq1f1b.positions(x))),
    Case(
        "arange plus token_offset",
        lambda m, x: m.attend(x + m.table(torch.arange(x.shape[1]) + seq1f1b.token_offset())),
    ),
    Case("a table's rows from token_offset", lambda m, x: m.attend(x + m.table.weight[seq1f1b.positions(x)])),
    Case("alibi_slopes", lambda m, x: m.attend(x, alibi_slopes=m.slopes)),
    Case("window and softcap", lambda m, x: m.attend(x, window=7, softcap=3.0)),
    Case("convolution with carry", lambda m, x: m.conv(carried(x, 2).mT).mT),
    Case("LSTM with carry", carried_lstm),
    Case("GRU with carry", carried_gru),
    Case("GRUCell in a loop with carry", carried_cells),
    Case("cumulative sum with carry", lambda m, x: m.attend(running(x) * 0.1)),
    Case("token shift with carry", lambda m, x: m.attend(x + carried(x, 1)[:, :-1])),
    Case("own keys and values by carry, torch's attention", carried_keys),
    Case("mixture of experts with add_loss", lambda m, x: experts(m, x) + m.attend(x)),
    Case("dropout", lambda m, x: F.dropout(m.attend(m.dropout(x)), 0.2, m.training)),
    Case(
        "GroupNorm, RMSNorm over features",
        lambda m, x: m.attend(F.rms_norm(m.group_norm(x.flatten(0, 1)).view_as(x), (HIDDEN,))),
    ),
    Case(
        "packed documents",
        **sliced("doc_ids", lambda: seq1f1b.document_starts(torch.arange(LENGTH)[None] // 13)),
    ),
    Case(
        "document ids by cumsum with carry", documents_by_cumsum,
        **sliced("starts", lambda: (torch.arange(LENGTH) % 13 == 0).long()),
    ),
    Case(
        "cross-attention to a memory", cross_attention,
        options=lambda: {"arg_rules": {"memory": lambda unit: torch.ones(ROWS, 7, HIDDEN).cumsum(1) / 7}},
    ),
    Case("attention and convolution within a token", lambda m, x: m.attend(x) + within_a_token(m, x)),
    Case("checkpointing", lambda m, x: checkpoint(m.attend, x, use_reentrant=False)),
    Case("indices of rows and tokens by arange", lambda m, x: m.attend(rows_and_tokens(m, x))),
    Case("BatchNorm in evaluation mode", lambda m, x: m.attend(frozen_batch_norm(m, x))),
    Case("linear attention with carry", linear_attention),
    Case("a loss that holds the head", options=lambda: {"loss_fn": Head()}),
    Case(
        "a summed loss",
        options=of_loss(lambda y, t: cross_entropy(y, t, reduction="sum"), loss=seq1f1b.Loss(reduction="sum")),
    ),
    Case("autocast to bfloat16", lambda m, x: m.attend(x + m.table(seq1f1b.positions(x))), autocast=True),
]  # fmt: skip

# -- tables: others, of which the first step must tell -----------------------------------------------------------------

# (what is done in a branch beside attention, the cause that is named)
ALSO_WRONG: dict[str, tuple[Mix, str]] = {
    "maximum": (lambda m, x: x + x.amax(1, keepdim=True), LATER),
    "instance norm": (lambda m, x: F.instance_norm(x.mT).mT, LATER),
    "group norm of features and tokens": (lambda m, x: F.group_norm(x.mT, 4).mT, LATER),
    "previous token by cat": (lambda m, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1), STATE),
    "previous token by index": (lambda m, x: x[:, (torch.arange(x.shape[1]) - 1).clamp(min=0)], STATE),
    "flip": (lambda m, x: x.flip(1), LATER),
    "sort": (lambda m, x: x.sort(1).values, LATER),
    "fft": (lambda m, x: torch.fft.fft2(x).real, LATER),
    "einsum": (lambda m, x: torch.einsum("bsh,bth->bth", x, x), LATER),
    "division by length": (lambda m, x: x / x.shape[1], LATER),
    "logarithm of length": (lambda m, x: x * math.log(x.shape[1]), LATER),
    "number of elements": (lambda m, x: x / x.numel() * 1000, LATER),
    "last token": (lambda m, x: x + x[:, -1:], LATER),
    "first token": (lambda m, x: x + x[:, :1], STATE),
    "lower triangle": (lambda m, x: torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x, STATE),
    "softmax": (lambda m, x: x * x.softmax(1), LATER),
    "cumsum of heads": (lambda m, x: m.join(m.heads(x)[2].cumsum(-2)), STATE),
    "cumsum of what was looked up": (lambda m, x: m.table.weight[x.argmax(-1)].cumsum(1), STATE),
    "pooling": (lambda m, x: F.avg_pool1d(F.pad(x.mT, (2, 0)), 3, 1).mT, STATE),
    "kept by the module": (kept_by_the_module, STATE),
    "every other token": (lambda m, x: x * ((torch.arange(x.shape[1]) + 1) % 4)[:, None], STATE),
    "count of large ones": (lambda m, x: x + m.table((x[..., 0] > 0).long().cumsum(1)), STATE),
    "decay": (lambda m, x: x * (0.9 ** torch.arange(x.shape[1], dtype=x.dtype))[:, None], STATE),
    "kernel of distances": (kernel_of_distances, STATE),
    "a table made for one length": (table_of_a_length, STATE),
    "attention of torch beside ours": (torchs_attention, STATE),
    "attention by hand beside ours": (attention_by_hand, STATE),
    "attention by einsum beside ours": (attention_by_einsum, STATE),
    "positions by linear": (lambda m, x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] * m.gate / 9, STATE),
    "positions by einsum": (
        lambda m, x: x * torch.einsum("i,j->ij", torch.arange(x.size(-2)).type_as(x), m.gate / 9).cos(), STATE,
    ),
}  # fmt: skip

ALSO_RIGHT: dict[str, Mix] = {
    "plain": lambda m, x: m.proj(x),
    "window of one": lambda m, x: m.join(seq1f1b.causal_attention(*m.heads(x), layer=5, window=1)),
    "scale and sinks": lambda m, x: m.join(
        seq1f1b.causal_attention(*m.heads(x), layer=5, scale=0.3, sinks=m.gate[:HEADS] * 0)
    ),
    "shared keys": lambda m, x: m.join(
        seq1f1b.causal_attention(m.heads(x)[0], *(t[:, :1] for t in m.heads(x)[1:]), layer=5)
    ),
    "a table of its own": own_rows,
    "features by number": lambda m, x: x * torch.arange(HIDDEN, dtype=x.dtype) + m.table(torch.arange(HIDDEN)).mean(0),
    "convolution of width 4 by channel": lambda m, x: (
        F.conv1d(carried(x, 3).mT, m.proj.weight[:, None, :4], groups=HIDDEN).mT
    ),
    "running mean": lambda m, x: running(x) / (seq1f1b.positions(x) + 1)[:, None],
    "running maximum": running_maximum,
    "chunks of a state": scanned,
    "experts with capacity": experts_with_capacity,
    "the best two experts": two_experts,
    "attention to a table": latents,
    "quantized token by token": quantized_token_by_token,
    "in half precision": in_float16,
    "gated": lambda m, x: x * m.router(x).sigmoid().mean(-1, keepdim=True),
    "flat tokens": lambda m, x: m.proj(x.reshape(-1, HIDDEN)).view_as(x),
    "tokens first": lambda m, x: m.proj(x.transpose(0, 1)).transpose(0, 1).contiguous(),
    "a loss over tokens": lambda m, x: (seq1f1b.add_loss(x.square().mean()), x)[1],
}  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS * MICROBATCHES, LENGTH), generator=generator)
    target = seq1f1b.shift_labels(tokens)
    target[:, 3:9] = -100
    return tokens, target


def told_by(step: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        step()
    return [str(warning.message) for warning in caught if warning.category is seq1f1b.SegmentWarning]
