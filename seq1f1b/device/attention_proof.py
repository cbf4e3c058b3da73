"""Checks each of our kernels against float64 at its first use, on small cases.

Nobody can test every GPU and compiler in advance. So a kernel must pass a check in the process before its use: once for
each kernel, dtype, head size and device. A warning names each wrong kernel, and the process does not use the kernel
again.

A case of attention is a segment over a prefix, with ragged sizes: with documents, with a window and a soft cap, and
with all options. The reference is computed on the CPU, by matrix products in float64. A result may have twice the error
of products whose intermediate results are rounded to 16 bits; tests/gpu uses this bound for larger cases. Memory around
the results must not change. ``attention_parts.py`` has the cases of its own kernels.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Use(NamedTuple):
    """A kernel in one use: every dtype, head size and device needs a check of its own."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    device: torch.device

    def __str__(self) -> str:
        heads = self.head_dim if self.head_dim == self.v_head_dim else f"{self.head_dim} and {self.v_head_dim}"
        return f"{self.kernel} ({DTYPES[self.dtype]}, heads of {heads})"


REBUILD = "Install seq1f1b again to build its kernels anew, or set SEQ1F1B_CUDA_KERNELS=library to do without them"


class Proofs:
    """Results of the checks of a family of kernels in the process.

    Args:
        instead: end of the warning about a wrong kernel: the replacement, and the remedy.
        family: beginning of the warning: text before the kernel's name.
    """

    PATIENCE = 10.0  # seconds to wait for another thread's check, which may itself wait for work of this thread

    def __init__(self, instead: str, family: str = "") -> None:
        self.instead, self.family = instead, family
        self.lock = threading.Lock()
        self.results: dict[Use, bool] = {}

    def holds(self, use: Use, prove: Callable[[], None]) -> bool:
        """Returns whether the kernel is right, after a check at the first call.

        Returns False without a check while a CUDA graph is captured, or while another thread's check takes long; a
        later call checks.

        Args:
            prove: raises if the kernel is wrong or does not run.
        """
        found = self.results.get(use)
        if found is not None:
            return found
        if is_capturing() or not self.lock.acquire(timeout=self.PATIENCE):
            return False
        try:
            if use not in self.results:
                prove()
                self.results[use] = True
        except Exception as error:
            self.results[use] = False
            self._warn(use, error)
        finally:
            self.lock.release()
        return self.results[use]

    def _warn(self, use: Use, error: Exception) -> None:
        name = torch.cuda.get_device_name(use.device) if use.device.type == "cuda" else "this machine"
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"{self.family}{use} failed its check on {use.device}, {name}: {first}. {self.instead}",
            stacklevel=2,
        )


def is_capturing() -> bool:
    """Returns whether a CUDA graph is being captured. A check must not run then: it waits for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Surrounds a check: no gradients, no autocast, and a new stream, as earlier work may wait for another rank."""
    of_device = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), of_device:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # no types
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            yield


def numbers() -> Callable[..., Tensor]:
    """Returns a function that makes random tensors of given sizes on the CPU: float32, equal in each process."""
    generator = torch.Generator("cpu").manual_seed(1)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")


# -- the cases of attention ------------------------------------------------------------------------------------------

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


CASES = (
    Options("documents", has_documents=True),
    Options("a window and a soft cap", window=45, softcap=2.0),
    Options("documents, a window and a soft cap", True, 70, 2.0, 0.3, store=True),
)


def prove(launch: Launch, use: Use) -> None:
    """Compares attention_forward or attention_backward with float64 on the small cases.

    Raises:
        AssertionError, RuntimeError, ...: the operation is wrong, or does not run.
    """
    with apart(use.device):
        for options in CASES:
            case = _Case(use, options)
            (_prove_forward if use.kernel == "attention_forward" else _prove_backward)(launch, case)


class _Rows(NamedTuple):
    """Rows of a tensor and the memory around them, filled with NaN."""

    memory: Tensor
    rows: Tensor

    def holding(self, values: Tensor | float) -> _Rows:
        self.rows[:] = torch.as_tensor(values, device="cpu").to(self.rows)
        return self

    def are_alone(self) -> bool:
        """Returns whether memory around the rows still is NaN. Fills the rows with NaN, too."""
        return bool(self.holding(math.nan).memory.isnan().all())


class _Case:
    """Inputs on the CPU, and their copies on the device within memory that no operation may read or write."""

    def __init__(self, use: Use, options: Options) -> None:
        self.use, self.options, self.numbers = use, options, numbers()
        self.q, self.dout = (self._numbers(HEADS, TOKENS, size) for size in use[2:4])
        self.k, self.v = (self._numbers(KV_HEADS, KEYS, size) for size in use[2:4])
        self.scale = options.scale or use.head_dim**-0.5
        self.docs = torch.zeros(BATCH, KEYS, dtype=torch.int32, device="cpu")
        for row, starts in zip(self.docs, DOCUMENTS if options.has_documents else (), strict=False):
            for start in starts:
                row[start:] = start

    def _numbers(self, heads: int, tokens: int, size: int) -> Tensor:
        return self.numbers(BATCH, heads, tokens, size).to(self.use.dtype)

    @functools.cached_property
    def hidden(self) -> Tensor:
        """Returns the mask of hidden pairs, (batch, 1, 1, queries, keys)."""
        position = torch.arange(KEYS, device="cpu")
        distance = position[PREFIX:, None] - position
        hidden = (distance < 0) | (distance >= (self.options.window or KEYS))
        other = self.docs[:, PREFIX:, None] != self.docs[:, None, :]
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
        memory = self._memory(dtype, BATCH, KV_HEADS, KEYS + BEHIND, values.shape[3])
        return _Rows(memory, memory[:, :, :KEYS]).holding(values)

    def lse(self, values: Tensor | float = math.nan) -> _Rows:
        count = BATCH * HEADS * TOKENS
        memory = self._memory(torch.float32, 4 + count + 4)
        return _Rows(memory, memory[4 : 4 + count].view(BATCH, HEADS, TOKENS)).holding(values)

    def _memory(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.full(sizes, float("nan"), dtype=dtype, device=self.use.device)

    def launch(self, launch: Launch, out: Tensor, lse: Tensor, **of_backward: Any) -> None:
        docs = self.docs.to(self.use.device) if self.options.has_documents else self.docs[:, :0]
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
    store, dtype = case.options.store, case.use.dtype
    (out, lse, *truths), (_, _, *in_16_bits) = case.truth(), case.in_16_bits()
    dq, own = case.for_results(case.q), [case.for_results(like) for like in (case.k, case.v)]
    empty = functools.partial(torch.full, fill_value=math.nan, device="cpu")
    before = [empty(t.shape) if store else case.numbers(*t.shape) for t in (case.k, case.v)]
    sums = [case.slab(values, torch.float32) for values in before]
    case.launch(
        launch, case.queries(out).rows, case.lse(lse).rows, dout=case.queries(case.dout).rows, dq=dq.rows,
        dk=sums[0].rows, dv=sums[1].rows, own_dk=own[0].rows, own_dv=own[1].rows, store=store,
    )  # fmt: skip
    case.hold("dq", dq.rows, truths[0], in_16_bits[0])
    case.hold_around("dq", dq)
    for i, (name, slab, of_own) in enumerate(zip(("dk", "dv"), sums, own, strict=True)):
        added = before[i].nan_to_num(0.0)
        truth, peer = (added + of[1 + i] for of in (truths, in_16_bits))
        got = torch.cat([slab.rows[:, :, :PREFIX], of_own.rows.float()], 2)
        case.hold(name, got, truth, peer.to(dtype))
        case.hold_around(name, slab)
        case.hold_around(f"the segment's {name}", of_own)
