"""Is causal attention right, whole and over the KV cache, forward and backward, with every option and dtype?"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from attention_runs import OPTIONS, backward, formula, gradients, gradients_by_layout, random_qkv, segmented
from simulated_step import SimulatedStep
from torch import Tensor
from torch.autograd import forward_ad

import seq1f1b.attention.causal as attention
from seq1f1b import _C
from seq1f1b.attention.causal import causal_attention, layer_handle, positions, token_offset

SPLITS = [[12], [6, 6], [1, 11], [11, 1], [1, 1, 1, 9], [5, 2, 4, 1], [1] * 12]
SIZES = [(1, 1, 6, 6), (4, 4, 6, 4), (4, 2, 5, 8), (4, 2, 6, 1), (4, 1, 1, 6)]  # heads, of k and v; of q and k, of v


@pytest.mark.parametrize("heads, kv_heads, head_dim, v_head_dim", SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_formula(name: str, heads: int, kv_heads: int, head_dim: int, v_head_dim: int) -> None:
    """Whole and by segments; heads of v may have another size, as in latent attention."""
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][..., :heads]
    if "sinks" in options:
        options["sinks"] = options["sinks"][:heads]
    sizes = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    microbatches = [random_qkv(heads, kv_heads, seed=m, **sizes) for m in range(2)]
    douts = [random_qkv(heads, kv_heads, seed=10 + m, head_dim=v_head_dim)[0] for m in range(2)]
    runs = [[gradients(lambda *t: causal_attention(*t, layer=0, **options), *microbatches[0], douts[0])]]
    runs += [segmented(split, options, microbatches, douts) for split in SPLITS]
    for m, (qkv, dout) in enumerate(zip(microbatches, douts, strict=True)):
        truth = gradients(lambda *t: formula(*t, **options), *qkv, dout)
        for run in runs[m:]:
            for got, expected in zip(run[m], truth, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    leaves = [t.requires_grad_() for t in random_qkv(2, 1, batch=1, tokens=5, head_dim=3)]
    leaves.append(torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True))
    options = {"window": 3, "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25])}
    assert torch.autograd.gradcheck(lambda *t: causal_attention(*t[:3], layer=0, sinks=t[3], **options), leaves)
    leaves[2] = random_qkv(2, 1, batch=1, tokens=5, head_dim=3, v_head_dim=2)[2].requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: causal_attention(*t[:3], layer=0, sinks=t[3], **options), leaves)


def test_rates_are_those_of_this_machines_instructions() -> None:
    fma, bf16 = _C.attention_rates(0.005)
    with open("/proc/cpuinfo") as file:
        assert fma > 0 and (bf16 > 0) == ("avx512_bf16" in file.read())


@pytest.mark.parametrize("in_step", [False, True])
def test_strided_inputs(in_step: bool) -> None:
    qkv, dout = random_qkv(4, 2), random_qkv(4, 2, seed=1)[0]
    expected = gradients(lambda *t: causal_attention(*t, layer=0), *qkv, dout)
    for got in gradients_by_layout(*qkv, dout, in_step):
        assert all(map(torch.equal, got, expected))


def test_expanded_gradient_and_slopes() -> None:
    """sum() gives a gradient with strides of 0."""
    q, k, v = random_qkv(4, 2)
    slopes = torch.tensor([0.5]).expand(4)
    ours = gradients(
        lambda *t: causal_attention(*t, layer=0, alibi_slopes=slopes), q, k, v, torch.ones(()).expand(q.shape)
    )
    truth = gradients(lambda *t: formula(*t, alibi_slopes=slopes), q, k, v, torch.ones_like(q))
    for got, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_grad_mode_off_saves_nothing() -> None:
    q, k, v = (t.requires_grad_() for t in random_qkv(4, 2))
    with torch.no_grad():
        assert causal_attention(q, k, v, layer=0).grad_fn is None
    frozen = causal_attention(*(t.detach() for t in (q, k, v)), layer=0)
    assert not frozen.requires_grad


def test_inference_mode() -> None:
    q, k, v = random_qkv(4, 2)
    expected = formula(q, k, v)
    step, parts = SimulatedStep([5, 7], training=False), []
    with torch.inference_mode():
        torch.testing.assert_close(causal_attention(q, k, v, layer=0), expected, rtol=1e-10, atol=1e-12)
        for s in range(2):
            with step.unit("F", 0, s):
                parts.append(causal_attention(*(t[:, :, step.slice(s)] for t in (q, k, v)), layer=0))
    torch.testing.assert_close(torch.cat(parts, dim=2), expected, rtol=1e-10, atol=1e-12)


def test_handles_survive_what_modules_go_through() -> None:
    """Copies, a meta device, to_empty and casts: a handle is no buffer and stays what it is."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_handle(3)
            self.weight = torch.nn.Parameter(torch.zeros(2))

    with torch.device("meta"):
        module = Module()
    module = copy.deepcopy(module.to_empty(device="cpu").to(torch.bfloat16))
    assert module.layer.device.type == "cpu" and module.layer.dtype == torch.int64 and module.layer.item() == 3
    assert "layer" not in module.state_dict()


def test_a_segment_saves_no_keys_and_no_values() -> None:
    q, k, v = (t.requires_grad_() for t in random_qkv(4, 4))
    saved: list[Tensor] = []
    step = SimulatedStep([12])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), step.unit("F", 0, 0):
        causal_attention(q, k, v, layer=0)
    kept = {t.data_ptr() for t in saved}
    assert q.data_ptr() in kept and not kept & {k.data_ptr(), v.data_ptr()}
    assert sum(t.numel() for t in saved) == 2 * q.numel() + 2 * 4 * 12 + 1  # q, out, lse and the handle


def test_only_one_query_gradient_is_needed() -> None:
    q, k, v = random_qkv(4, 2)
    q.requires_grad_()
    causal_attention(q, k, v, layer=0).sum().backward()
    expected = gradients(formula, q, k, v, torch.ones_like(q))[1]
    torch.testing.assert_close(q.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_in_a_step(use_reentrant: bool) -> None:
    """Recomputation in B writes the same rows again."""
    qkv, dout = random_qkv(4, 2, v_head_dim=3), random_qkv(4, 2, head_dim=3, seed=1)[0]
    expected = gradients(lambda *t: causal_attention(*t, layer=0), *qkv, dout)
    step, sizes = SimulatedStep([5, 6, 1]), [5, 6, 1]
    handle, leaves, outs = layer_handle(0), {}, {}
    for s in range(3):
        leaves[s] = [t[:, :, step.slice(s)].detach().clone().requires_grad_() for t in qkv]
        with step.unit("F", 0, s):
            outs[s] = torch.utils.checkpoint.checkpoint(
                lambda q, k, v: causal_attention(q, k, v, layer=handle), *leaves[s], use_reentrant=use_reentrant
            )
    for s in reversed(range(3)):
        with step.unit("B", 0, s):
            outs[s].backward(dout[:, :, step.slice(s)])
    got = [torch.cat([leaves[s][i].grad for s in range(len(sizes))], dim=2) for i in range(3)]
    for a, b in zip(got, expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_autocast_casts_as_torchs_attention_does() -> None:
    q, k, v = (t.float().requires_grad_() for t in random_qkv(4, 4))
    low = v.detach().to(torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = causal_attention(q, k, low, layer=0)  # an fp32 rotary table leaves q and k in fp32 beside a bf16 v
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, low, is_causal=True)
        double = causal_attention(q.double(), k.double(), v.double(), layer=0)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and double.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    ours.backward(torch.ones_like(ours))
    assert q.grad is not None and q.grad.dtype == torch.float32
    assert low.grad is not None and low.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("in_step", [False, True])
def test_frozen_sinks_and_sinks_alone(in_step: bool) -> None:
    qkv, dout = random_qkv(4, 2), random_qkv(4, 2, seed=1)[0]
    sinks = OPTIONS["sinks"]["sinks"].double().requires_grad_()
    expected = torch.autograd.grad(formula(*qkv, sinks=sinks), sinks, dout)[0]
    backward(qkv, dout, in_step, sinks=sinks)
    torch.testing.assert_close(sinks.grad, expected, rtol=1e-10, atol=1e-12)
    leaves = [t.clone().requires_grad_() for t in qkv]
    backward(leaves, dout, in_step, sinks=sinks.detach())
    truth = gradients(lambda *t: formula(*t, sinks=sinks.detach()), *qkv, dout)
    for leaf, exact in zip(leaves, truth[1:], strict=True):
        torch.testing.assert_close(leaf.grad, exact, rtol=1e-10, atol=1e-12)


def test_positions_and_offset() -> None:
    x = torch.zeros(2, 12, 3)
    assert torch.equal(positions(x), torch.arange(12)) and token_offset() == 0
    assert torch.equal(positions(x, dim=-3), torch.arange(2))
    assert positions(x.to(torch.bool)).dtype == torch.int64
    step = SimulatedStep([5, 7])
    with step.unit("F", 0, 0):
        assert torch.equal(positions(x[:, :5]), torch.arange(5))
    with step.unit("F", 0, 1):
        assert torch.equal(positions(x[:, 5:]), torch.arange(5, 12)) and token_offset() == 5
        with pytest.raises(ValueError, match="positions of dimension 1, which has 12 elements; the segment has 7"):
            positions(x)
    with pytest.raises(ValueError, match="dim is 3, x has 3 dimensions"):
        positions(x, dim=3)


BAD = {
    "rank 3": (lambda q, k, v: {"q": q[0]}, ValueError, r"q is \(4, 12, 6\), must be \(batch, heads, t"),
    "integer": (lambda q, k, v: {"q": q.long(), "k": k.long(), "v": v.long()}, TypeError, "q is torch.int64, must"),
    "dtypes": (lambda q, k, v: {"k": k.float()}, TypeError, "one dtype: torch.float64, torch.float32"),
    "no tokens": (lambda q, k, v: {"q": q[:, :, :0], "k": k[:, :, :0], "v": v[:, :, :0]}, ValueError, "size may be 0"),
    "head_dim": (lambda q, k, v: {n: torch.zeros(1, 1, 2, 257) for n in "qkv"}, ValueError, "257, must be at most 256"),
    "head_dim of v": (lambda q, k, v: {"v": torch.zeros(2, 2, 12, 257).double()}, ValueError, "head_dim of v is 257"),
    "no head_dim of v": (lambda q, k, v: {"v": v[..., :0]}, ValueError, r"v is \(2, 2, 12, 0\): no size may be 0"),
    "heads": (lambda q, k, v: {"q": q[:, :3]}, ValueError, "kv_heads must divide heads: k has 2, q has 3"),
    "tokens": (lambda q, k, v: {"k": k[:, :, 1:], "v": v[:, :, 1:]}, ValueError, "must agree with q"),
    "v": (lambda q, k, v: {"v": v[:, :1]}, ValueError, r"v is \(2, 1, 12, 6\): must agree with k .* but head_dim"),
    "window": (lambda q, k, v: {"window": 0}, ValueError, "window is 0, must be at least 1"),
    "softcap": (lambda q, k, v: {"softcap": -1.0}, ValueError, "softcap is -1.0, must be above 0"),
    "slopes": (lambda q, k, v: {"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes is \(3,\), must be \(4\)"),
    "slopes that learn": (
        lambda q, k, v: {"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError, "slopes are constants",
    ),
    "documents": (lambda q, k, v: {"doc_ids": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, r"\(2, 12\)"),
    "float documents": (lambda q, k, v: {"doc_ids": torch.zeros(2, 12)}, TypeError, "must be an integer type"),
    "no tensor": (lambda q, k, v: {"k": None}, TypeError, "k is None, must be a tensor"),
    "slopes in a list": (lambda q, k, v: {"alibi_slopes": [1, 2]}, TypeError, r"alibi_slopes is \[1, 2\], must be a"),
    "documents in a list": (lambda q, k, v: {"doc_ids": [1]}, TypeError, r"doc_ids is \[1\], must be a tensor or None"),
    "sinks": (lambda q, k, v: {"sinks": torch.ones(2)}, ValueError, r"sinks is \(2,\), must be \(4\): one of each"),
    "whole sinks": (lambda q, k, v: {"sinks": torch.ones(4, dtype=torch.int32)}, TypeError, "must be a floating type"),
    "sinks in a list": (lambda q, k, v: {"sinks": [1.0] * 4}, TypeError, "must be a tensor or None"),
    "sinks elsewhere": (lambda q, k, v: {"sinks": torch.ones(4, device="meta")}, ValueError, "sinks is on meta, q on"),
    "layer": (lambda q, k, v: {"layer": -1}, ValueError, "layer key is -1, must be at least 0"),
    "wide window": (lambda q, k, v: {"window": 2**63}, ValueError, "window is 9223372036854775808, must be"),
    "half a window": (lambda q, k, v: {"window": 2.5}, TypeError, "window is 2.5, must be an int"),
    "infinite softcap": (lambda q, k, v: {"softcap": math.inf}, ValueError, "softcap is inf, must be"),
    "scale": (lambda q, k, v: {"scale": math.nan}, ValueError, "scale is nan, must be finite"),
    "complex slopes": (
        lambda q, k, v: {"alibi_slopes": torch.ones(4, dtype=torch.complex64)}, TypeError, "must be real",
    ),
    "wide documents": (
        lambda q, k, v: {"doc_ids": torch.full((2, 12), 2**31)}, ValueError, "they reach from 2147483648 to 2147483648",
    ),
    "layout": (lambda q, k, v: {"q": q.to_sparse()}, ValueError, "layout torch.sparse_coo"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    change, error, message = BAD[name]
    q, k, v = random_qkv(4, 2)
    with pytest.raises(error, match=message):
        causal_attention(**{"q": q, "k": k, "v": v, "layer": 0, **change(q, k, v)})


@pytest.mark.parametrize("layer, error", [(-1, ValueError), (True, TypeError), (1.0, TypeError), ("0", TypeError)])
def test_bad_layer_handles(layer: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        layer_handle(layer)  # type: ignore[arg-type] # what is refused


def test_compiled_code_refuses_wide_documents() -> None:
    q, k, v = random_qkv(4, 2)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(doc_ids: Tensor) -> Tensor:
        return causal_attention(q, k, v, layer=0, doc_ids=doc_ids)

    ids = torch.arange(12).expand(2, 12) // 5
    torch.testing.assert_close(compiled(ids), causal_attention(q, k, v, layer=0, doc_ids=ids))
    with pytest.raises(RuntimeError, match="doc_ids must lie in"):
        compiled(ids + 2**32)


@pytest.mark.parametrize("learns", [False, True])
def test_tangents_are_refused(learns: bool) -> None:
    q, k, v = random_qkv(4, 2)
    q.requires_grad_(learns)

    def attend(k: Tensor) -> Tensor:
        return causal_attention(q, k, v, layer=0)

    for differentiate in (lambda: torch.func.jvp(attend, (k,), (k,)), lambda: torch.func.jacfwd(attend)(k)):
        with pytest.raises(RuntimeError, match="k has a tangent: attention has no forward-mode derivative"):
            differentiate()
    with forward_ad.dual_level():
        attend(k)  # of no interest
        with pytest.raises(RuntimeError, match="k has a tangent"):
            attend(forward_ad.make_dual(k, k))


def test_other_devices_are_refused() -> None:
    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("xpu:0")

    q, k, v = random_qkv(4, 2)
    with pytest.raises(ValueError, match="q is on xpu:0: attention runs on the CPU and on CUDA devices"):
        causal_attention(q.as_subclass(Elsewhere), k, v, layer=0)
    with pytest.raises(ValueError, match="k is on meta, q on cpu: they must be on one device"):
        causal_attention(q, k.to("meta"), v, layer=0)
    assert attention.causal_attention(*(t.to("meta") for t in (q, k, v)), layer=0).shape == q.shape
