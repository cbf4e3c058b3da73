"""Small cases that check the two kernels of attention, and ways by torch's ops, at their first use (proof.py).

A case is a segment over a prefix, with ragged sizes: without options, with documents, with a window, and with all
options of the kernels; or a segment at the end of a tree's path, with keys in two or three ranges. The reference is
computed on the CPU, by matrix products in float64. A result may have twice the error of products whose intermediate
results are rounded to 16 bits; tests/gpu uses this bound for larger cases. Memory around the results must not change.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b.device.attention_calls import PathRows
from seq1f1b.proof import Use, apart, numbers

__all__: list[str] = []

BATCH, HEADS, KV_HEADS, PREFIX, TOKENS, BEHIND = 2, 4, 2, 68, 70, 3
KEYS = PREFIX + TOKENS  # keys and queries are a few more than whole tiles of the kernels
DOCUMENTS = ((0, 41, 90, 131), (0, 100))  # first tokens, by row of the batch
SPREAD = 32.0
"""How far one element may be off, in root mean squares of what all may be off."""

LSE_ERROR = 1e-4
"""As a part of 1 + lse: sums in float32, of logits up to 10, by approximations of 2^-20."""

Launch = Callable[..., None]
"""kernel_library.launch_attention of one operation."""


class Options(NamedTuple):
    name: str
    has_documents: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    store: bool = False  # False: a backward adds to sums
    place: PathRows | None = None  # place of the keys in a tree; None: the first rows
    prefix: int = PREFIX
    logit: float = 0.0  # approximate logit of all pairs

    @property
    def keys(self) -> int:
        return self.prefix + TOKENS

    @property
    def kept(self) -> int:
        """Returns the number of keys with sums in dk and dv; the backward adds to these rows."""
        return self.place.kept if self.place is not None else 0 if self.store else self.keys


CASES = (
    Options("a segment"),
    Options("documents", has_documents=True, store=True),
    Options("a window", window=45),
    Options("documents, a window and a soft cap", True, 70, 2.0, 0.3, store=True),
)

DOCUMENT_CASES = (
    CASES[1],
    Options("documents that are added to", has_documents=True),
    Options("documents and a window", True, 45, scale=0.3),
    Options("documents and a window of one tile, stored", True, 64, store=True),
)
"""For what takes documents, and neither a soft cap nor calls without documents."""

_PATH = (0, 25, 116), (25, KEYS, 2)
_SIBLINGS = (0, 30, 75), (30, PREFIX, 5), (PREFIX, KEYS, 110)
PATH_CASES = (
    Options("a path of two ranges", place=PathRows(_PATH, (), kept=40)),
    Options("a path of two ranges and a window", window=50, place=PathRows(_PATH, (), kept=10)),
    Options("siblings over two ranges", place=PathRows(_SIBLINGS, (1, 40, 29), kept=PREFIX)),
    Options("siblings over two ranges that are stored", scale=0.3, place=PathRows(_SIBLINGS, (40, 29, 1))),
)
"""For what takes the keys of a tree's path."""

BARE_CASES = (
    CASES[0],
    Options("a segment behind 192 keys with logits near -100", prefix=192, logit=-100.0, store=True),
    PATH_CASES[0],
    PATH_CASES[2],
)
"""For what takes no options. Versions of cuDNN are known to fail with few heads of keys, with 64 keys behind whole
tiles, and for small sums."""


def prove(launch: Launch, use: Use, cases: tuple[Options, ...] = CASES) -> None:
    """Compares attention_forward or attention_backward with float64 on the small cases.

    Raises:
        AssertionError, RuntimeError, ...: the operation is wrong, or does not run.
    """
    with apart(use.device):
        for options in cases:
            case = _Case(use, options)
            (_prove_forward if use.kernel == "attention_forward" else _prove_backward)(launch, case)


class _Rows(NamedTuple):
    """Rows of a tensor and the memory around them, filled with NaN."""

    memory: Tensor
    rows: Tensor
    of_keys: Tensor | None = None  # indices of the rows with keys; None: all rows

    def holding(self, values: Tensor | float) -> _Rows:
        of_keys = slice(None) if self.of_keys is None else self.of_keys
        self.rows[:, :, of_keys] = torch.as_tensor(values, device="cpu").to(self.rows)
        return self

    def keys(self) -> Tensor:
        """Returns the rows in the order of the keys."""
        return self.rows if self.of_keys is None else self.rows[:, :, self.of_keys]

    def are_alone(self) -> bool:
        """Returns whether memory around the rows still is NaN. Fills the rows with NaN, too."""
        return bool(self.holding(math.nan).memory.isnan().all())


class _Case:
    """Inputs on the CPU, and their copies on the device within memory that no operation may read or write."""

    def __init__(self, use: Use, options: Options) -> None:
        self.use, self.options, self.numbers = use, options, numbers()
        self.q, self.dout = (self._numbers(HEADS, TOKENS, size) for size in use[2:4])
        self.k, self.v = (self._numbers(KV_HEADS, options.keys, size) for size in use[2:4])
        self.scale = options.scale or use.head_dim**-0.5
        shift = math.sqrt(abs(options.logit) / (self.scale * use.head_dim))
        self.q, self.k = self.q + shift, self.k + math.copysign(shift, options.logit)
        self.docs = torch.zeros(BATCH, options.keys, dtype=torch.int32, device="cpu")
        for row, starts in zip(self.docs, DOCUMENTS if options.has_documents else (), strict=False):
            for start in starts:
                row[start:] = start

    def _numbers(self, heads: int, tokens: int, size: int) -> Tensor:
        return self.numbers(BATCH, heads, tokens, size).to(self.use.dtype)

    @functools.cached_property
    def hidden(self) -> Tensor:
        """Returns the mask of hidden pairs, (batch, 1, 1, queries, keys)."""
        prefix, position = self.options.prefix, torch.arange(self.options.keys, device="cpu")
        distance = position[prefix:, None] - position
        hidden = (distance < 0) | (distance >= (self.options.window or self.options.keys))
        other = self.docs[:, prefix:, None] != self.docs[:, None, :]
        parts = self.options.place.parts if self.options.place is not None else ()
        for begin, end in itertools.pairwise(itertools.accumulate(parts, initial=prefix)):
            hidden[begin - prefix : end - prefix, prefix:begin] = True  # keys of earlier siblings
        return (hidden | other)[:, None, None]

    def results(self, wide: torch.dtype, rounded: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yields out, lse, dq, dk and dv by matrix products in dtype ``wide``, with each intermediate result
        ``rounded``. A caller that stops early saves the rest of the work."""
        group = HEADS // KV_HEADS
        q, dout = (t.to(wide).view(BATCH, KV_HEADS, group, TOKENS, -1) for t in (self.q, self.dout))
        k, v = (t.to(wide)[:, :, None] for t in (self.k, self.v))
        logits, softcap = rounded(rounded(q @ k.mT) * self.scale), self.options.softcap
        slope = None
        if softcap:
            capped = rounded(torch.tanh(rounded(logits / softcap)))
            logits, slope = rounded(softcap * capped), 1.0 - capped.square()
        logits = logits.masked_fill(self.hidden, float("-inf"))
        weights = rounded(torch.softmax(logits, -1))
        yield rounded(weights @ v).flatten(1, 2)
        yield logits.logsumexp(-1).flatten(1, 2)
        dweights = rounded(dout @ v.mT)
        dlogits = rounded(weights * (dweights - (weights * dweights).sum(-1, keepdim=True)))
        if slope is not None:
            dlogits = rounded(dlogits * slope)
        dlogits = rounded(dlogits * self.scale)
        yield rounded(dlogits @ k).flatten(1, 2)
        yield rounded(rounded(dlogits.mT @ q).sum(2))
        yield rounded(rounded(weights.mT @ dout).sum(2))

    def truth(self) -> Iterator[Tensor]:
        return self.results(torch.float64, lambda t: t)

    def in_16_bits(self) -> Iterator[Tensor]:
        return self.results(torch.float32, lambda t: t.to(self.use.dtype).float())

    def queries(self, values: Tensor) -> _Rows:
        """Returns token-major rows of the queries' tokens that hold the values."""
        return self.for_results(values).holding(values)

    def for_results(self, like: Tensor) -> _Rows:
        """Returns token-major rows of the queries' tokens, filled with NaN, with heads like those of ``like``."""
        memory = self._memory(self.use.dtype, BATCH, BEHIND + TOKENS + BEHIND, like.shape[1], like.shape[3])
        return _Rows(memory, memory[:, BEHIND:-BEHIND].transpose(1, 2))

    def slab(self, values: Tensor, dtype: torch.dtype) -> _Rows:
        """Returns the rows of all keys in a longer slab."""
        place = self.options.place
        ranges = ((0, self.options.keys, 0),) if place is None else place.ranges
        num_rows = max(row + end - begin for begin, end, row in ranges)
        memory = self._memory(dtype, BATCH, KV_HEADS, num_rows + BEHIND, values.shape[3])
        rows = torch.cat([torch.arange(row, row + end - begin, device=memory.device) for begin, end, row in ranges])
        return _Rows(memory, memory[:, :, :num_rows], None if place is None else rows).holding(values)

    def lse(self, values: Tensor | float = math.nan) -> _Rows:
        count = BATCH * HEADS * TOKENS
        memory = self._memory(torch.float32, 4 + count + 4)
        return _Rows(memory, memory[4 : 4 + count].view(BATCH, HEADS, TOKENS)).holding(values)

    def _memory(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.full(sizes, float("nan"), dtype=dtype, device=self.use.device)

    def launch(self, launch: Launch, out: Tensor, lse: Tensor, **of_backward: Any) -> None:
        docs = self.docs.to(self.use.device) if self.options.has_documents else self.docs[:, :0]
        if self.options.place is not None:
            of_backward["place"] = self.options.place
        launch(
            self.queries(self.q).rows, self.slab(self.k, self.use.dtype).rows, self.slab(self.v, self.use.dtype).rows,
            out, lse,
            scale=self.scale, window=self.options.window, softcap=self.options.softcap, docs=docs, **of_backward,
        )  # fmt: skip

    def hold(self, name: str, got: Tensor, truth: Tensor, in_16_bits: Tensor) -> None:
        got = got.cpu().double()
        size = truth.norm()
        limit = 2.0 * (in_16_bits - truth).norm() / size + torch.finfo(self.use.dtype).eps / 16
        error = (got - truth).norm() / size
        if not error <= limit:
            raise AssertionError(f"{name} of {self.options.name} is off by {error:.1e} of its norm, not {limit:.1e}")
        furthest = (got - truth).abs().max() / truth.square().mean().sqrt()
        if not furthest <= SPREAD * limit:
            raise AssertionError(f"an element of {name} of {self.options.name} is off by {furthest:.1e} of their size")

    def hold_around(self, name: str, of: _Rows) -> None:
        if not of.are_alone():
            raise AssertionError(f"memory around {name} of {self.options.name} was written")


def _prove_forward(launch: Launch, case: _Case) -> None:
    out, lse = case.for_results(case.dout), case.lse()
    case.launch(launch, out.rows, lse.rows)
    true_out, true_lse = itertools.islice(case.truth(), 2)
    case.hold("out", out.rows, true_out, next(case.in_16_bits()))
    error = ((lse.rows.cpu() - true_lse).abs() / (1.0 + true_lse.abs())).max()
    if not error <= LSE_ERROR:
        raise AssertionError(f"lse of {case.options.name} is off by {error:.1e}")
    case.hold_around("out", out)
    case.hold_around("lse", lse)


def _prove_backward(launch: Launch, case: _Case) -> None:
    kept, dtype = case.options.kept, case.use.dtype
    (out, lse, *truths), (_, _, *in_16_bits) = case.truth(), case.in_16_bits()
    dq, own = case.for_results(case.q), [case.for_results(like) for like in (case.k, case.v)]
    before = [case.numbers(*like.shape) for like in (case.k, case.v)]
    for values in before:
        values[:, :, kept:] = float("nan")
    sums = [case.slab(values, torch.float32) for values in before]
    case.launch(
        launch, case.queries(out).rows, case.lse(lse).rows, dout=case.queries(case.dout).rows, dq=dq.rows,
        dk=sums[0].rows, dv=sums[1].rows, own_dk=own[0].rows, own_dv=own[1].rows, store=kept == 0,
    )  # fmt: skip
    case.hold("dq", dq.rows, truths[0], in_16_bits[0])
    case.hold_around("dq", dq)
    for i, (name, slab, of_own) in enumerate(zip(("dk", "dv"), sums, own, strict=True)):
        added = before[i].nan_to_num(0.0)
        truth, peer = (added + of[1 + i] for of in (truths, in_16_bits))
        got = torch.cat([slab.keys()[:, :, : case.options.prefix], of_own.rows.float()], 2)
        case.hold(name, got, truth, peer.to(dtype))
        case.hold_around(name, slab)
        case.hold_around(f"the segment's {name}", of_own)
