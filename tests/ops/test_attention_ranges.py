"""Is attention right where the keys of a path lie in several ranges of rows, and where siblings share keys?"""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch
from attention_kernel import ISAS, Call, Ranges, Results, formula, has, instruction_set, run
from slices import every_pair, whole
from torch import Tensor

MACHINES = [name for name in ISAS if has(name)]
BLOCKED = [name for name in MACHINES if name != "reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
# window, ALiBi, documents, soft cap, sinks, where the gradients that are kept end
OPTIONS = every_pair(
    [
        (window, alibi, docs, softcap, sinks, kept)
        for window in (0, 70)
        for alibi in (False, True)
        for docs in ("", "docs", "shared")
        for softcap in (0.0, 1.5)
        for sinks in (False, True)
        for kept in ("none", "all", "a range", "inside")
        if docs != "shared" or not (window or alibi)
    ]
)
SHAPES = [(4, 2, 24, 24), (2, 2, 64, 40), (3, 1, 16, 33), (2, 1, 128, 128)]  # heads, kv heads, their sizes


def random_ranges(rng: random.Random, lengths: list[int]) -> Ranges:
    """Ranges of these lengths, in a random order of rows with gaps between them."""
    begins, rows, at = [sum(lengths[:i]) for i in range(len(lengths))], [0] * len(lengths), 0
    for i in rng.sample(range(len(lengths)), len(lengths)):
        at += rng.choice((0, 1, 7))
        rows[i] = at
        at += lengths[i]
    return [(begin, begin + n, row) for begin, n, row in zip(begins, lengths, rows, strict=True)]


def random_call(seed: int, dtype: torch.dtype, longest: int = 300, options: tuple | None = None) -> tuple[Call, Ranges]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    window, alibi, docs, softcap, sinks, kept = options or rng.choice(OPTIONS)
    lengths = [rng.choice((1, rng.randint(2, 20), rng.randint(1, longest))) for _ in range(rng.randint(1, 6))]
    ranges = random_ranges(rng, lengths)
    begin = ranges[-1][0] + rng.choice((0, lengths[-1] // 3))
    heads, kv_heads, dim, v_dim = SHAPES[seed % len(SHAPES)]
    batch, tokens = rng.choice((1, 1, 2)), sum(lengths)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(batch, *sizes, generator=generator, dtype=torch.float64).to(dtype)

    ids = torch.sort(torch.randint(4, (batch, tokens), generator=generator, dtype=torch.int32), dim=1).values
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return Call(
        q=normal(heads, tokens - begin, dim),
        k=normal(kv_heads, tokens, dim),
        v=normal(kv_heads, tokens, v_dim),
        dout=normal(heads, tokens - begin, v_dim),
        window=window,
        softcap=softcap,
        slopes=torch.linspace(0.02, 0.3, batch * heads).reshape(batch, heads) if alibi else None,
        docs=ids if docs else None,
        shared=rng.choice((begin, begin // 2)) if docs == "shared" else 0,
        sinks=torch.linspace(-1, 2, heads, dtype=sums) if sinks else None,
        kept={"none": 0, "all": tokens, "a range": rng.choice(ranges)[1], "inside": rng.randint(0, tokens)}[kept],
        owns=rng.random() < 0.5,
        token_major=rng.random() < 0.5,
    ), ranges


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference by the norm, or by 0.1 per element if that is less: dq of a row with one key is 0."""
    return float((got.double() - want).norm() / max(want.norm(), 0.1 * want.numel() ** 0.5)) if want.numel() else 0.0


def is_right(got: Results, want: Results, tolerance: float) -> bool:
    """NaN is not."""
    return got.is_clean and all(error(a, b) <= tolerance for a, b in zip(got.tensors(), want.tensors(), strict=True))


def same_bits(a: Results, b: Results) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


def check(call: Call, ranges: Ranges) -> None:
    """Against the formula, and to the bit against keys that lie one after another, on one worker and on three."""
    got = run(call, ranges)
    assert is_right(got, formula(call), TOLERANCE[call.q.dtype])
    assert same_bits(got, run(call))
    assert same_bits(got, run(call, ranges, threads=3))


def test_the_truth() -> None:
    with instruction_set("reference"):
        for seed, options in enumerate(OPTIONS):
            check(*random_call(seed, torch.float64, longest=24, options=options))


@pytest.mark.parametrize("isa", BLOCKED)
def test_each_instruction_set(isa: str) -> None:
    with instruction_set(isa):
        for seed, options in enumerate(OPTIONS):
            check(*random_call(seed, DTYPES[seed % 3], options=options))


@pytest.mark.full
@pytest.mark.parametrize("seed", whole(range(150)))
@pytest.mark.parametrize("isa", whole(MACHINES))
def test_many_ranges(isa: str, seed: int) -> None:
    with instruction_set(isa):
        for dtype in (torch.float64,) if isa == "reference" else DTYPES:
            check(*random_call(1000 + seed, dtype, longest=24 if isa == "reference" else 300))


def siblings_call(lengths: list[int], prefix: int, dtype: torch.dtype, **options: object) -> Call:
    """Siblings of these lengths over one prefix, a document each."""
    generator = torch.Generator().manual_seed(3)

    def normal(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(1, heads, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)

    own, tokens = sum(lengths), prefix + sum(lengths)
    ids = torch.repeat_interleave(torch.arange(1 + len(lengths), dtype=torch.int32), torch.tensor([prefix, *lengths]))
    qkv = (normal(heads, n, dim) for heads, n, dim in ((4, own, 24), (2, tokens, 24), (2, tokens, 40), (4, own, 40)))
    q, k, v, dout = qkv
    return Call(q, k, v, dout, docs=ids[None], shared=prefix, **options)  # type: ignore[arg-type]


SIBLINGS = [([5, 1, 9], 14), ([37, 200, 1, 90], 310), ([92, 200, 1], 100)]  # the last: of a block with the prefix


@pytest.mark.parametrize(
    "isa, lengths, prefix", [("reference", *SIBLINGS[0]), *((isa, *s) for isa in BLOCKED for s in SIBLINGS[1:])]
)
def test_siblings_equal_calls_of_their_own(isa: str, lengths: list[int], prefix: int) -> None:
    """The prefix's gradients are the sums over the siblings."""
    ranges = [(0, prefix // 3, 400), (prefix // 3, prefix - 1, 7), (prefix - 1, prefix + sum(lengths), 600)]
    sinks = torch.tensor([0.5, -1, 2, 0], dtype=torch.float64 if isa == "reference" else torch.float32)
    for dtype in (torch.float64,) if isa == "reference" else DTYPES:
        call = siblings_call(lengths, prefix, dtype, softcap=2.0, sinks=sinks)
        with instruction_set(isa):
            together, begin, each = run(call, ranges), prefix, []
            for n in lengths:
                own = slice(begin, begin + n)
                rows = slice(begin - prefix, begin - prefix + n)
                alone = Call(
                    q=call.q[:, :, rows],
                    k=torch.cat((call.k[:, :, :prefix], call.k[:, :, own]), 2),
                    v=torch.cat((call.v[:, :, :prefix], call.v[:, :, own]), 2),
                    dout=call.dout[:, :, rows],
                    softcap=2.0,
                    sinks=sinks,
                )
                last = (prefix - 1, prefix, 600), (prefix, prefix + n, 601 + rows.start)
                each.append(run(alone, [*ranges[:2], *last]))
                begin += n
        of_prefix = [sum(getattr(r, name)[:, :, :prefix].double() for r in each) for name in ("dk", "dv")]
        of_own = [torch.cat([getattr(r, name)[:, :, prefix:] for r in each], 2) for name in ("dk", "dv")]
        want = Results(
            *(torch.cat([getattr(r, name) for r in each], 2).double() for name in ("out", "lse", "dq")),
            *(torch.cat((a, b.double()), 2) for a, b in zip(of_prefix, of_own, strict=True)),
            dsinks=torch.stack([r.dsinks for r in each]).double().sum(0),
        )
        assert is_right(together, want, TOLERANCE[dtype])


@pytest.mark.parametrize("isa", BLOCKED)
def test_blocks_of_other_siblings_are_left_out(isa: str) -> None:
    """What is computed of them would be NaN. Siblings begin with a block of keys, and of rows."""
    block = 192
    call = siblings_call([block, block], 2 * block, torch.bfloat16)
    with instruction_set(isa):
        clean = run(call)
        call.k[:, :, 2 * block : 3 * block] = call.v[:, :, 2 * block : 3 * block] = float("nan")
        got = run(call)
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(got, name)[:, :, block:], getattr(clean, name)[:, :, block:])
        assert getattr(got, name)[:, :, :block].isnan().all()


REFUSED = {
    "0 ranges of keys: there must be at least 1": {"ranges": []},
    "range 0 has keys [1, 10) from row 0 on: it must begin at key 0": {"ranges": [(1, 10, 0)]},
    "range 1 has keys [5, 10) from row 9 on: it must begin at key 4": {"ranges": [(0, 4, 0), (5, 10, 9)]},
    "range 1 has keys [4, 4) from row 9 on": {"ranges": [(0, 4, 0), (4, 4, 9), (4, 10, 20)]},
    "range 0 has keys [0, 10) from row -1 on": {"ranges": [(0, 10, -1)]},
    "the last range has keys [4, 9): it must end at key 10": {"ranges": [(0, 4, 0), (4, 9, 9)]},
    "the last range has keys [8, 10): it must end at key 10, and have all keys of the segment, from 7 on": {
        "ranges": [(0, 8, 0), (8, 10, 20)]
    },
    "kept_kv_grads is -1, must be among the 10 keys": {"kept": -1},
    "kept_kv_grads is 11, must be among the 10 keys": {"kept": 11},
    "shared_keys is -1, must be from 0 to the segment's begin, which is 7": {"shared": -1},
    "shared_keys is 8, must be from 0 to the segment's begin, which is 7": {"shared": 8},
    "siblings share 7 keys: a window or ALiBi would count distances across them": {"shared": 7, "window": 3},
    "siblings share 6 keys: a window or ALiBi": {"shared": 6, "slopes": torch.ones(1, 4)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    changes = dict(REFUSED[message])
    ranges = changes.pop("ranges", [(0, 10, 0)])
    call = siblings_call([1, 2], 7, torch.float32)
    told = dataclasses.replace(call, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(call, [(0, 10, 0)], told=(told, ranges))
