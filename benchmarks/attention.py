"""Attention of a segment over its prefix, forward and backward, beside what torch offers for it on the CPU.

    python benchmarks/attention.py            # everything, in half an hour
    python benchmarks/attention.py --rows latent sinks plain --shapes few  # what one of these costs beside the other

Ours is the op as a model calls it inside a step, over the KV cache; the backward adds dK and dV of all keys to fp32, as
every peer's does here. The segment is not the last one, so that ours adds as well and does not store. "two calls" is
torch's flash attention over the prefix and over the segment, merged: the best of torch that computes no masked block.

Rows are measured in rounds, minutes apart, since a machine's slow moments last for seconds. In a repetition all take
their turn, with the machine's peak before and after. "of peak" is the median rate by the median peak of the same
repetitions: of fp32 multiply-adds, in bfloat16 the faster of those and vdpbf16ps, on registers alone. A peak is one
that lasts: the median of looks of a millisecond, since on some machines clocks rise by a sixth for some microseconds.
FLOPs are those of visible keys: forward 2 H (d + dv) (s o + s (s + 1) / 2), backward 2 H (3 d + 2 dv) times the same.
dv is d, but in rows with heads of 192/128, as latent attention has them. "sinks" behind d says that each head has one.
Torch's flash attention wants one head size, so "two calls" pads v to 192; with sinks it rescales out and lse, as we do
on a GPU. What else torch has is one more key, with the sink as its bias. Flex attention has no backward on a CPU (torch
2.13), and so is no peer.

Two threads are timed by the clock, one by its CPU time. A repetition is discarded if others used the cores meanwhile:
by /proc/stat, for two threads, and where a peak is a tenth below what it usually is, as beside another virtual machine
on the same core. One that fills caches, but leaves the multipliers free, is not seen so.

+- is half the range by the median. Errors are the largest differences from fp64 by its largest element, in the first kv
head; backward: the worst of dQ, dK, dV and of the sinks' gradient. Peers but the two calls take part in the first round
alone. In plain rows those with masks stay away from one thread and from more than 8192 keys, eager attention in float32
from one thread.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import torch_attention
from common import FOREIGN_LIMIT, ForeignLoad, header, keep_heap, look_at_rates
from simulated_step import SimulatedStep
from torch import Tensor

from seq1f1b import _C, causal_attention

HEADS = 8
SHAPES = [(512, 0), (512, 3584), (1024, 7168), (2048, 0), (2048, 6144), (4096, 0), (4096, 8192)]  # s, o
OTHER_HEADS_SHAPE = (2048, 6144)  # for 8 heads over 2 kv heads, and for one head
FEW_SHAPES = [(512, 0), (2048, 0), (2048, 6144)]  # of the rows with latent heads and with sinks
LATENT, SINKS_DIM = (192, 128), 128  # d and dv, and d
ROWS = ("plain", "latent", "sinks")
REPETITIONS = 2  # of a round
MAX_DISCARDED = 30
SLOWED = 0.9  # of the usual peak: below, others are on the core
MASK_KEYS = 8192  # peers with masks take part up to here
ROUNDS = 3  # of all rows, one after the other
REPETITION_SECONDS = 0.3  # at least, so that the 10 ms ticks of /proc/stat tell who used the cores
ALWAYS = ("ours", "two calls")  # in every row and round
FORWARD, BACKWARD = 0, 1
PASSES = ("forward", "backward")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # a peer beyond is wrong, not inexact


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    dim: int
    heads: int
    kv_heads: int
    tokens: int  # s
    prefix: int  # o
    v_dim: int
    sinks: bool = False

    @property
    def keys(self) -> int:
        return self.prefix + self.tokens

    @property
    def is_plain(self) -> bool:
        return self.v_dim == self.dim and not self.sinks

    @property
    def dims(self) -> str:
        return f"{self.dim}/{self.v_dim}" if self.v_dim != self.dim else f"{self.dim}{' sinks' if self.sinks else ''}"

    def flops(self, which: int) -> float:
        visible = self.tokens * self.prefix + self.tokens * (self.tokens + 1) / 2
        return 2 * self.heads * visible * (self.dim + self.v_dim, 3 * self.dim + 2 * self.v_dim)[which]


class Data:
    """Random inputs of a case: k and v of prefix and segment, and what fp64 makes of the first kv head."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(tokens: int, heads: int, dim: int) -> Tensor:  # laid out as the projections of a model give it
            return torch.randn(1, tokens, heads, dim, generator=generator).to(case.dtype).transpose(1, 2)

        self.q, self.dout = (random(case.tokens, case.heads, dim) for dim in (case.dim, case.v_dim))
        self.k, self.v = (random(case.keys, case.kv_heads, dim) for dim in (case.dim, case.v_dim))
        self.sinks = [torch.randn(case.heads, generator=generator)] if case.sinks else []
        self.truth = in_fp64(*self.first_head(self.q, self.k, self.v, self.dout, *self.sinks))

    def first_head(self, *tensors: Tensor) -> list[Tensor]:
        """Heads of each tensor that belong to the first kv head; sinks are (heads)."""
        kv_heads = self.k.shape[1]
        return [t[:, : t.shape[1] // kv_heads] if t.dim() == 4 else t[: len(t) // kv_heads] for t in tensors]

    def errors(self, results: Sequence[Tensor]) -> tuple[float, float]:
        """Errors of the forward and of the backward, from (out, dq, dk, dv, and of sinks)."""
        errors = [
            float((got.double() - exact).abs().max() / exact.abs().max())
            for got, exact in zip(self.first_head(*(t.detach() for t in results)), self.truth, strict=True)
        ]
        return errors[0], max(errors[1:])


def in_fp64(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *sinks: Tensor) -> tuple[Tensor, ...]:
    """out, dq, dk, dv, and the sinks' gradient, by eager attention."""
    leaves = [t.double().requires_grad_() for t in (q, k, v, *sinks)]
    out = torch_attention.eager(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


Clock = Callable[[], float]


class Ours:
    """The segment inside a step: after its prefix, before a short last segment, whose backward comes first."""

    LAST = 16  # tokens

    def __init__(self, case: Case, data: Data) -> None:
        self.case, self.dout = case, data.dout
        self.sizes = [size for size in (case.prefix, case.tokens, self.LAST) if size]
        self.timed = len(self.sizes) - 2
        self.cache = _C.kv_cache_create()
        self.leaves = []
        for s, size in enumerate(self.sizes):
            where = slice(sum(self.sizes[:s]), sum(self.sizes[:s]) + size)
            parts = [data.k[:, :, where], data.v[:, :, where]]
            if s == len(self.sizes) - 1:  # its gradient is 0, so nothing of it shows
                parts = [t.new_zeros(1, size, *t.shape[1::2]).transpose(1, 2) for t in (data.k, data.v)]
            q = data.q if s == self.timed else data.q.new_zeros(1, size, case.heads, case.dim).transpose(1, 2)
            leaves = [*map(copy_of, (q, *parts)), *(t.clone() for t in data.sinks)]
            self.leaves.append([t.requires_grad_() for t in leaves])

    def forward(self, s: int) -> Tensor:
        """A window of one key makes the other segments cheap: only what they write is needed."""
        q, k, v, *sinks = self.leaves[s]
        options = {"sinks": sinks[0]} if sinks else {}
        return causal_attention(q, k, v, layer=0, window=None if s == self.timed else 1, **options)

    def backward(self, s: int, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves[s], self.dout if s == self.timed else torch.zeros_like(out))

    def step(self, clock: Clock, through: int) -> tuple[list[float], list[Tensor], list[tuple[Tensor, ...]]]:
        """Seconds of the timed segment's passes; outputs and gradients of the segments from ``through`` on."""
        step = SimulatedStep(self.sizes, cache=self.cache)
        seconds, outs, grads = [], [], []
        for kind, segments in (
            (FORWARD, range(len(self.sizes))),
            (BACKWARD, range(len(self.sizes) - 1, through - 1, -1)),
        ):
            for s in segments:
                with step.unit("FB"[kind], 0, s):
                    start = clock()
                    if kind == FORWARD:
                        outs.append(self.forward(s))
                    else:
                        grads.append(self.backward(s, outs[s]))
                    if s == self.timed:
                        seconds.append(clock() - start)
        return seconds, outs, grads[::-1]

    def times(self, clock: Clock) -> list[float]:
        return self.step(clock, self.timed)[0]

    def results(self) -> list[Tensor]:
        _, outs, grads = self.step(time.perf_counter, 0)
        dk, dv = (torch.cat([g[i] for g in grads[: self.timed + 1]], dim=2) for i in (1, 2))
        return [outs[self.timed], grads[self.timed][0], dk, dv, *grads[self.timed][3:]]


class Torchs:
    """A peer, over keys and values that lie as in a KV cache; dK and dV are added to fp32 tensors of all keys."""

    def __init__(self, case: Case, data: Data, peer: Callable[..., Tensor], cuts: Sequence[int]) -> None:
        self.peer, self.dout = peer, data.dout
        k, v = data.k.contiguous(), data.v.contiguous()
        self.ranges = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        parts = [t[:, :, where] for where in self.ranges for t in (k, v)]
        self.leaves = [t.detach().requires_grad_() for t in (copy_of(data.q), *parts, *data.sinks)]
        self.dk, self.dv = (torch.zeros(t.shape) for t in (k, v))

    def step(self, clock: Clock) -> tuple[list[float], Tensor, Tensor, list[Tensor]]:
        start = clock()
        out = self.peer(*self.leaves)
        middle = clock()
        dq, *grads = torch.autograd.grad(out, self.leaves, self.dout, materialize_grads=True)
        of_keys = 2 * len(self.ranges)
        for where, dk, dv in zip(self.ranges, grads[:of_keys:2], grads[1:of_keys:2], strict=True):
            self.dk[:, :, where] += dk
            self.dv[:, :, where] += dv
        return [middle - start, clock() - middle], out, dq, grads[of_keys:]

    def times(self, clock: Clock) -> list[float]:
        return self.step(clock)[0]

    def results(self) -> list[Tensor]:
        self.dk.zero_(), self.dv.zero_()
        _, out, dq, of_sinks = self.step(time.perf_counter)
        return [out, dq, self.dk, self.dv, *of_sinks]


def copy_of(t: Tensor) -> Tensor:
    """With the strides that a model's tensor of (batch, tokens, heads, dim) has after its transpose."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def make_arms(case: Case, data: Data) -> dict[str, Ours | Torchs]:
    arms: dict[str, Ours | Torchs] = {"ours": Ours(case, data)}
    arms["two calls"] = Torchs(case, data, torch_attention.two_calls, (0, case.prefix, case.keys))
    whole = torch_attention.WHOLE_WITH_SINKS if case.sinks else torch_attention.WHOLE
    for name, peer in (torch_attention.WHOLE_LATENT if case.v_dim != case.dim else whole).items():
        if name == "eager" or case.keys <= MASK_KEYS:
            arms[name] = Torchs(case, data, peer, (0, case.keys))
    return arms


class Peak:
    """FLOP/s of so many threads at once that last: fp32 multiply-adds, vdpbf16ps."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.seen = [self._look() for _ in range(20)]

    def _look(self) -> tuple[float, float]:
        time.sleep(0.01)  # torch's threads spin a while after their work
        start = threading.Barrier(self.threads)

        def measure(_: int) -> list[tuple[float, float]]:
            start.wait()
            return look_at_rates()

        with ThreadPoolExecutor(self.threads) as pool:
            looks = list(zip(*pool.map(measure, range(self.threads)), strict=True))
        fma, bf16 = (statistics.median(sum(each[i] for each in look) for look in looks) for i in range(2))
        return fma, bf16

    def look(self) -> tuple[tuple[float, float], bool]:
        """The rates, and whether they are what they usually are: the upper quartile of all that was seen."""
        self.seen.append(self._look())
        return self.seen[-1], self.seen[-1][0] >= SLOWED * self.usual()[0]

    def usual(self) -> tuple[float, float]:
        fma, bf16 = (statistics.quantiles((rates[i] for rates in self.seen), n=4)[2] for i in range(2))
        return fma, bf16


@dataclass
class Row:
    """What the repetitions of one case measured on so many threads."""

    threads: int
    times: dict[str, list[list[float]]] = field(default_factory=dict)  # by arm: per repetition forward, backward
    peaks: list[float] = field(default_factory=list)
    discarded: int = 0

    def seconds(self, arm: str, which: int) -> list[float]:
        return [t[which] for t in self.times[arm]]

    def ratio(self, arm: str, which: int) -> float:
        """How much faster ours is: median over the repetitions that the arm took part in."""
        pairs = zip(self.seconds(arm, which), self.seconds("ours", which), strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def measure(case: Case, arms: dict[str, Ours | Torchs], warm: dict[str, float], row: Row, peak: Peak) -> None:
    """Adds the repetitions of a round. ``warm`` is how long each arm took when it was checked: short ones run several
    times in a repetition."""
    torch.set_num_threads(row.threads)
    clock = time.thread_time if row.threads == 1 else time.perf_counter
    if row.threads == 1 and case.is_plain:
        single = ALWAYS if case.dtype == torch.float32 else (*ALWAYS, "eager")
        arms = {name: arm for name, arm in arms.items() if name in single}
    repeats = {name: max(1, round(REPETITION_SECONDS / len(arms) / warm[name])) for name in arms}
    load, wanted = ForeignLoad([os.getpid()]), len(row.peaks) + REPETITIONS
    while len(row.peaks) < wanted and row.discarded <= MAX_DISCARDED:
        load.start()
        before_arms, calm_before = peak.look()
        taken = {}
        for name in arms if wanted == REPETITIONS else ALWAYS:
            runs = [arms[name].times(clock) for _ in range(repeats[name])]
            taken[name] = [statistics.median(run[which] for run in runs) for which in (FORWARD, BACKWARD)]
        after_arms, calm_after = peak.look()
        alone = row.threads == 1 or load.cores() < FOREIGN_LIMIT
        if not (alone and calm_before and calm_after):
            row.discarded += 1
            continue
        fma, bf16 = (statistics.mean(rates) for rates in zip(before_arms, after_arms, strict=True))
        row.peaks.append(max(fma, bf16) if case.dtype == torch.bfloat16 else fma)
        for name, times in taken.items():
            row.times.setdefault(name, []).append(times)


class Measured:
    """A case with its rows, over all rounds."""

    def __init__(self, case: Case, threads: Sequence[int]) -> None:
        self.case = case
        self.rows = [Row(n) for n in threads if n > 1 or case.heads > 1]
        self.errors: dict[str, tuple[float, float]] = {}
        self._warm: dict[str, float] = {}

    def add(self, peaks: dict[int, Peak]) -> None:
        """A round, the first one after a check of every arm: a wrong one ends the program.

        What memory an arm touches first in a round is not timed: pages are new then.
        """
        torch.set_num_threads(max(row.threads for row in self.rows))
        data = Data(self.case)
        arms = make_arms(self.case, data)
        for name, arm in arms.items():
            if name not in self.errors:
                start = time.perf_counter()
                results = arm.results()
                self._warm[name] = time.perf_counter() - start
                self.errors[name] = data.errors(results)
                if not max(self.errors[name]) < TOLERANCE[self.case.dtype]:
                    sys.exit(f"{name} is wrong: {self.case}, errors {self.errors[name]}")
            elif name in ALWAYS:
                arm.times(time.perf_counter)
        for row in self.rows:
            measure(self.case, arms, self._warm, row, peaks[row.threads])


# -- the table --------------------------------------------------------------------------------------------------------

COLUMNS = (
    f"{'dtype':8} {'d':>9} {'thr':>3} {'H/kv':>4} {'s':>5} {'o':>5} {'pass':8} | "
    f"{'ours GF/s':>9} {'+-%':>3} {'of peak':>7} {'error':>7} | {'two calls':>9} {'+-%':>3} {'error':>7} "
    f"{'ours x':>6} | {'best other, GF/s':>24} {'ours x':>6}"
)


def rate(case: Case, row: Row, arm: str, which: int) -> tuple[float, float]:
    """GF/s, and half the range of the times in per cent of their median."""
    seconds = row.seconds(arm, which)
    middle = statistics.median(seconds)
    return case.flops(which) / middle / 1e9, 50 * (max(seconds) - min(seconds)) / middle


def print_row(case: Case, row: Row, which: int, errors: dict[str, tuple[float, float]]) -> None:
    dtype = str(case.dtype).removeprefix("torch.")
    heads = f"{case.heads}/{case.kv_heads}"
    start = f"{dtype:8} {case.dims:>9} {row.threads:3} {heads:>4} {case.tokens:5} {case.prefix:5} {PASSES[which]:8} | "
    if len(row.peaks) < ROUNDS * REPETITIONS:
        print(f"{start}unmeasured: others used the cores in {row.discarded} repetitions", flush=True)
        return
    ours, spread = rate(case, row, "ours", which)
    peak = statistics.median(row.peaks)
    text = f"{start}{ours:9.0f} {spread:3.0f} {ours * 1e9 / peak:7.2f} {errors['ours'][which]:7.1e} | "
    theirs, spread = rate(case, row, "two calls", which)
    text += f"{theirs:9.0f} {spread:3.0f} {errors['two calls'][which]:7.1e} {row.ratio('two calls', which):6.2f} | "
    others = [name for name, times in row.times.items() if name not in ALWAYS and times]
    if others:
        other = max(others, key=lambda name: rate(case, row, name, which)[0])
        other_text = f"{other} {rate(case, row, other, which)[0]:5.0f}"
        text += f"{other_text:>24} {row.ratio(other, which):6.2f}"
    print(text.rstrip(" |"), flush=True)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for name in options.dtype:
        dtype = getattr(torch, name)
        for dim in options.dim if "plain" in options.rows else ():
            for shape in FEW_SHAPES if options.shapes == "few" else SHAPES:
                yield Case(dtype, dim, HEADS, HEADS, *shape, v_dim=dim)
            if options.shapes == "all":
                yield Case(dtype, dim, HEADS, 2, *OTHER_HEADS_SHAPE, v_dim=dim)
                yield Case(dtype, dim, 1, 1, *OTHER_HEADS_SHAPE, v_dim=dim)
        for shape in FEW_SHAPES:
            if "latent" in options.rows:
                yield Case(dtype, LATENT[0], HEADS, HEADS, *shape, v_dim=LATENT[1])
            if "sinks" in options.rows:
                yield Case(dtype, SINKS_DIM, HEADS, HEADS, *shape, v_dim=SINKS_DIM, sinks=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="latent: heads of 192/128; sinks: d 128")
    parser.add_argument("--shapes", choices=("all", "few"), default="all", help="of the plain rows")
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    options = parser.parse_args()
    keep_heap()
    print(header("Attention of a segment of s tokens over a prefix of o"))
    print(f"# attention kernels: {_C.attention_isa()}")
    peaks = {threads: Peak(threads) for threads in options.threads}
    for threads, peak in peaks.items():
        fma, bf16 = peak.usual()
        print(
            f"# peak, {threads} thread{'s'[: threads > 1]}: {fma / 1e9:.0f} GF/s fp32, {bf16 / 1e9:.0f} GF/s vdpbf16ps"
        )
    measured = {case: Measured(case, options.threads) for case in cases(options)}
    for turn in range(ROUNDS):
        for m in measured.values():
            m.add(peaks)
        print(f"round {turn + 1} of {ROUNDS}", file=sys.stderr)
    print(COLUMNS)
    for m in measured.values():
        for row in m.rows:
            for which in (FORWARD, BACKWARD):
                print_row(m.case, row, which, m.errors)
    discarded = sum(row.discarded for m in measured.values() for row in m.rows)
    print(f"# {discarded} repetitions discarded; {time.process_time():.0f} s of CPU time")


if __name__ == "__main__":
    main()
