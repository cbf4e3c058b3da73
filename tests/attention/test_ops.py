"""Do the raw ops keep torch's contract: registration, fake kernels, compiled code, ownership of arguments, errors?"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from processes import resident_bytes
from simulated_step import SimulatedStep
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seq1f1b import _C
from seq1f1b.attention.causal import causal_attention, layer_handle, positions

ops = torch.ops.seq1f1b
OPTIONS = (0.5, 0, 0.0)  # scale, window, softcap
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors(dtype: torch.dtype = torch.float64, tokens: int = 6, v_dim: int = 4) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, heads, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)
        for heads, dim in ((4, 4), (2, 4), (2, v_dim), (4, v_dim))
    )
    return [q, k, v], dout


def none() -> Tensor:
    return torch.empty(0)


def extras_of(is_plain: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes, documents and sinks."""
    if is_plain:
        return none(), none(), none()
    docs = torch.tensor([[0] * 3 + [1] * 3, [0] * 6], dtype=torch.int32)
    return torch.rand(4), docs, torch.randn(4, dtype=dtype if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "options"])
def test_opcheck_of_the_plain_ops(dtype: torch.dtype, is_plain: bool) -> None:
    (qkv, dout), extras = tensors(dtype, v_dim=4 if is_plain else 3), extras_of(is_plain, dtype)
    torch.library.opcheck(ops.causal_attention, (*qkv, *extras, *OPTIONS))
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
    torch.library.opcheck(ops.causal_attention, (*strided, *extras, 0.5, 3, 2.0))
    out, lse = ops.causal_attention(*qkv, *extras, *OPTIONS)
    torch.library.opcheck(ops.causal_attention_backward, (dout, *qkv, out, lse, *extras, *OPTIONS))


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "options"])
def test_opcheck_of_the_segment_ops(is_plain: bool) -> None:
    (qkv, dout), extras = tensors(v_dim=4 if is_plain else 3), extras_of(is_plain)
    layer = layer_handle(0)
    step = SimulatedStep([6])
    with step.unit("F", 0, 0):
        out, lse = ops.segment_attention(*qkv, layer, *extras, *OPTIONS)
    with step.unit("B", 0, 0):  # where it may run any number of times
        torch.library.opcheck(ops.segment_attention, (*qkv, layer, *extras, *OPTIONS))
    # A backward adds to the cache, so each of opcheck's runs needs a step of its own.
    for check in ("test_schema", "test_autograd_registration", "test_faketensor"):
        step = SimulatedStep([6])
        with step.unit("F", 0, 0):
            ops.segment_attention(*qkv, layer, *extras, *OPTIONS)
        with step.unit("B", 0, 0):
            arguments = (dout, qkv[0], out, lse, layer, *extras, *OPTIONS, 2)
            torch.library.opcheck(ops.segment_attention_backward, arguments, test_utils=check)


def test_opcheck_of_positions() -> None:
    torch.library.opcheck(ops.positions, (torch.zeros(2, 5), none(), 1, 0, 1))
    starts = torch.tensor([[0, 0, 0, 3, 3], [0, 1, 2, 2, 4]], dtype=torch.int32)
    torch.library.opcheck(ops.positions, (torch.zeros(2, 5), starts, 1, 0, 1))
    step = SimulatedStep([3, 5])
    with step.unit("F", 0, 0):
        pass
    with step.unit("F", 0, 1):
        torch.library.opcheck(ops.positions, (torch.zeros(2, 5), none(), -1, 0, 1))


def test_every_option_compiles() -> None:
    leaves = [torch.randn(2, h, 9, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    leaves.append(torch.randn(4, requires_grad=True))  # sinks
    options = {
        "scale": 0.7,
        "window": 5,
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "doc_ids": torch.tensor([[0] * 4 + [1] * 5, [2] * 9]),
    }

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return causal_attention(q, k, v, layer=0, sinks=sinks, **options)

    expected = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_export_and_fake_tensors() -> None:
    class Plain(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(q, k, v, layer=0) + positions(q, 2)[:, None]

    tensors = tuple(torch.randn(1, h, 6, 4) for h in (4, 2, 2))
    exported = torch.export.export(Plain(), tensors)
    torch.testing.assert_close(exported.module()(*tensors), Plain()(*tensors))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        out = Plain()(*fakes)
        assert out.shape == (1, 4, 6, 4)
        with pytest.raises(Exception, match="device"):
            torch.ops.seq1f1b.causal_attention(
                fakes[0], fakes[1].to("meta"), fakes[2], *(fakes[0].new_empty(0) for _ in range(3)), 1.0, 0, 0.0
            )


def bad_calls() -> list[tuple[str, Callable[[], object]]]:
    (q, k, v), dout = tensors()
    out, lse = ops.causal_attention(q, k, v, none(), none(), none(), *OPTIONS)
    extras = (none(), none(), none())
    back = ops.causal_attention_backward
    return [
        ("q is .* of int64, must be float32", lambda: ops.causal_attention(q.long(), k, v, *extras, *OPTIONS)),
        (r"q is \(4, 6, 4\) of float64", lambda: ops.causal_attention(q[0], k, v, *extras, *OPTIONS)),
        ("heads divide q's", lambda: ops.causal_attention(q[:, :3], k, v, *extras, *OPTIONS)),
        ("k is .* must agree with q", lambda: ops.causal_attention(q, k.float(), v, *extras, *OPTIONS)),
        ("v is .* must agree with k", lambda: ops.causal_attention(q, k, v[:, :1], *extras, *OPTIONS)),
        ("slopes is", lambda: ops.causal_attention(q, k, v, torch.ones(3), none(), none(), *OPTIONS)),
        ("doc_ids is", lambda: ops.causal_attention(q, k, v, none(), torch.zeros(2, 6), none(), *OPTIONS)),
        ("sinks is", lambda: ops.causal_attention(q, k, v, none(), none(), torch.zeros(4), *OPTIONS)),
        ("window -1 must not be negative", lambda: ops.causal_attention(q, k, v, *extras, 0.5, -1, 0.0)),
        ("softcap is -1", lambda: ops.causal_attention(q, k, v, *extras, 0.5, 0, -1.0)),
        ("dout is", lambda: back(dout[:, :2], q, k, v, out, lse, *extras, *OPTIONS)),
        ("lse is", lambda: back(dout, q, k, v, out, lse.float(), *extras, *OPTIONS)),
        ("segment_attention outside", lambda: ops.segment_attention(q, k, v, layer_handle(0), *extras, *OPTIONS)),
        ("dout is .* agree with q and v", lambda: back(q[..., :3], q, k, v, out, lse, *extras, *OPTIONS)),
        (
            "segment_attention outside a step",
            lambda: ops.segment_attention_backward(dout, q, out, lse, layer_handle(0), *extras, *OPTIONS, 2),
        ),
    ]


@pytest.mark.parametrize(("message", "call"), bad_calls())
def test_an_error_names_rule_and_values(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()


def test_a_failure_keeps_its_status() -> None:
    q, k, v = tensors()[0]
    _C.take_op_failure()
    with pytest.raises(RuntimeError):
        ops.causal_attention(q, k, v, none(), none(), none(), 0.5, -1, 0.0)
    failure = _C.take_op_failure()
    assert type(failure) is ValueError and "window -1 must not be negative" in str(failure)
    assert _C.take_op_failure() is None
    with pytest.raises(RuntimeError):
        ops.segment_attention(q, k, v, layer_handle(0), none(), none(), none(), *OPTIONS)
    assert type(_C.take_op_failure()) is RuntimeError


def test_nothing_leaks() -> None:
    """Hundreds of calls, also failing ones and ones that copy their inputs, keep no memory."""
    (q, k, v), dout = tensors(torch.bfloat16, tokens=64)  # 16 bit: with temporaries in the backward
    columns = [t.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for t in (q, k, v)]
    layer, cache = layer_handle(0), _C.kv_cache_create()

    def calls() -> None:
        causal_attention(*columns, layer=0).backward(dout)
        step = SimulatedStep([64], cache=cache)
        with step.unit("F", 0, 0):
            out = causal_attention(*columns, layer=layer)
        with step.unit("B", 0, 0):
            out.backward(dout)
        for t in columns:
            t.grad = None
        big = torch.ones(1, 4, 64, 64).transpose(2, 3)  # new for each call; one that is kept is 64 KiB
        with pytest.raises(RuntimeError, match="slopes is"):  # the first tensor has been copied by then
            ops.causal_attention(big, big, big, torch.ones(3), none(), none(), *OPTIONS)
        with pytest.raises(RuntimeError, match="window -1"):  # the outputs have been allocated by then
            ops.causal_attention(big, big, big, none(), none(), none(), 0.5, -1, 0.0)
        with pytest.raises(RuntimeError, match="outside a step"):
            ops.segment_attention(big, big, big, layer, none(), none(), none(), *OPTIONS)

    for _ in range(20):
        calls()
    gc.collect()
    before = resident_bytes()
    for _ in range(300):
        calls()
    gc.collect()
    assert resident_bytes() - before < 4 << 20
