"""Is attention of CUDA tensors right, as far as that can be told without a GPU?

All of device/cuda_attention.py and of the cache runs here on CPU tensors, over stand-ins of aten's CUDA-only ops; what
the real ops do is for tests/gpu to show, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import OPTIONS, errors, formula, gradients, gradients_by_layout, random_qkv, segmented
from op_counts import launches
from simulated_step import SimulatedStep
from slices import pairs_of
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor

import seq1f1b
import seq1f1b.engine.runner
import seq1f1b.engine.set_up
import seq1f1b.transport
from seq1f1b.attention.causal import causal_attention, layer_handle
from seq1f1b.device import attention_parts, attention_ways, cuda_attention, kernel_library
from seq1f1b.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

HEADS = [(4, 4), (4, 2), (4, 1)]
SIZES = [(8, 8), (24, 16), (8, 24), (8, 6), (6, 8)]  # of heads: of q and k, of v
WAYS = {"flash": torch.bfloat16, "plain": torch.float64}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 3)
    monkeypatch.setattr(cuda_attention, "PLAIN_LOGITS", 0)  # ranges of 16 keys, the fewest
    with cuda_kernels_on_the_cpu() as calls:
        yield calls


def check(got: list[Tensor], options: dict[str, Any], qkv: list[Tensor], dout: Tensor, *, factor: float = 1.5) -> None:
    """Against fp64 of the same numbers; a 16-bit result as far off as the formula in 16 bit, or so much further."""
    dtype = qkv[0].dtype
    truth = gradients(lambda *t: formula(*t, **options), *(t.double() for t in (*qkv, dout)))
    assert all(t.dtype == dtype for t in got)
    if dtype in (torch.float64, torch.float32):
        assert max(errors(got, truth)) < (1e-12 if dtype == torch.float64 else 2e-6)
        return
    peer = gradients(lambda *t: formula(*t, **options), *qkv, dout)
    for ours, theirs in zip(errors(got, truth), errors(peer, truth), strict=True):
        assert ours <= factor * theirs + torch.finfo(dtype).eps / 16


@pytest.mark.parametrize(
    "name, heads, kv_heads, head_dim, v_head_dim, dtype",
    pairs_of(list(OPTIONS), HEADS, SIZES, [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_segments_equal_the_formula(
    name: str, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, calls: list[Call]
) -> None:
    """Values whose heads have another size: what takes it, gets it, and flash gets zeros."""
    qkv = random_qkv(heads, kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
    dout = random_qkv(heads, kv_heads, head_dim=v_head_dim, dtype=dtype, seed=1)[0]
    for segments in [5, 2, 4, 1], [1, 11]:
        check(segmented(segments, OPTIONS[name], [qkv], [dout])[0], OPTIONS[name], qkv, dout)
    whole = gradients(lambda *t: causal_attention(*t, layer=0, **OPTIONS[name]), *qkv, dout)
    check(whole, OPTIONS[name], qkv, dout)
    used = {call[0] for call in calls}
    plain = name in ("softcap", "slopes", "slopes per batch", "all") or dtype in (torch.float64, torch.float32)
    assert used == (set() if plain else {"_flash_attention_forward", "_flash_attention_backward"})


# -- cuDNN -----------------------------------------------------------------------------------------------------------

CUDNN, FLASH = "_scaled_dot_product_cudnn_attention", "_flash_attention_forward"


@pytest.fixture
def cudnn_calls(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """cuDNN takes every shape that it can, from its first call on."""
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda *of: True)
    monkeypatch.setattr(cuda_attention, "OFTEN", 0)
    return calls


@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 8), (torch.float16, 8), (torch.bfloat16, 24)], ids=str)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_cudnn_equals_the_formula(
    heads: int, kv_heads: int, dtype: torch.dtype, head_dim: int, cudnn_calls: list[Call]
) -> None:
    """The own keys and those before, merged; a pass with one token or key, which cuDNN does not take, by flash. Heads
    of values that are narrower than those of keys it gets as they are."""
    given = {"head_dim": head_dim, "v_head_dim": 8, "dtype": dtype}
    qkv, dout = random_qkv(heads, kv_heads, **given), random_qkv(heads, heads, **given, seed=1)[2:]
    for sizes, flash_forwards in ([5, 2, 5], 0), ([5, 2, 4, 1], 1), ([1, 11], 2):
        cudnn_calls.clear()
        check(segmented(sizes, {"scale": 0.3}, [qkv], [dout[0]])[0], {"scale": 0.3}, qkv, dout[0])
        names = [name for name, *_ in cudnn_calls]
        assert names.count(FLASH) == flash_forwards
        assert names.count(CUDNN) == 2 * (len(sizes) - flash_forwards) - (flash_forwards < 2)
        assert (f"{CUDNN}_backward" in names) == (flash_forwards < 2)
    whole = gradients(lambda *t: causal_attention(*t, layer=0), *qkv, dout[0])
    check(whole, {}, qkv, dout[0])


def test_a_shape_goes_by_cudnn_once_it_has_come_often(cudnn_calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape on its own, forward and backward."""
    monkeypatch.setattr(cuda_attention, "OFTEN", 3)
    qkv = [t.requires_grad_() for t in random_qkv(4, 2, head_dim=8, dtype=torch.bfloat16)]
    for tokens, times, wanted in ((12, 5, 2), (11, 4, 1), (12, 2, 2)):
        cudnn_calls.clear()
        for _ in range(times):
            out = causal_attention(*(t[:, :, :tokens].contiguous() for t in qkv), layer=0)
            out.backward(out.detach())
        found = [call[0].startswith(CUDNN) for call in cudnn_calls]
        assert found[::2] == found[1::2] == [False] * (times - wanted) + [True] * wanted


@pytest.mark.parametrize("length", [64, 192, 320, 63, 128, 200])
def test_cudnn_gets_no_64_keys_behind_whole_tiles(length: int) -> None:
    """Tiles have 128 keys. Its backward makes NaN of such keys before the own ones on Hopper (cudnn-frontend#628)."""
    for longest in (length + 8, 100, 192):
        calls = attention_ways.calls_of("cudnn", attention_ways.chain(length + 8), 8, 0, longest, True)
        sizes = [call.size for call in calls if not call.is_own]
        assert sum(sizes) == length and all(size % 128 != 64 for size in sizes)
        assert [call.begin for call in calls[1:]] == [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize(
    ("version", "capability", "found"),
    [(91501, (9, 0), True), (91500, (9, 0), False), (None, (9, 0), False), (92000, (10, 3), False),
     (92000, (8, 9), False)],
)  # fmt: skip
def test_where_cudnn_is_taken(
    version: int | None, capability: tuple[int, int], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, asked = torch.device("cuda", 0), (torch.bfloat16, 64, 64)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(kernel_library, "capability", lambda device: capability)
    monkeypatch.setattr(cuda_attention, "_cudnn_takes", lambda *of: True)
    assert cuda_attention._has_cudnn(device, *asked) is found
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not cuda_attention._has_cudnn(device, *asked)
    monkeypatch.setattr(cuda_attention, "_cudnn_takes", lambda *of: of != (device, *asked))
    assert not cuda_attention._has_cudnn(device, *asked)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not cuda_attention._has_cudnn(device, torch.float16, 64, 64)


# -- ranges of keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, heads, dtype, wanted",
    [
        (1, 32, torch.bfloat16, 16384),  # over 8 heads of keys: as many as queries have count
        (1, 32, torch.float32, 8192),
        (16, 64, torch.bfloat16, 4096),  # no fewer than the own keys, which are a call themselves
    ],
)
def test_ranges_of_keys_are_bounded_in_bytes(batch: int, heads: int, dtype: torch.dtype, wanted: int) -> None:
    q, values = (torch.empty(batch, n, 4096, 128, dtype=dtype, device="meta") for n in (heads, heads // 4))
    assert cuda_attention._key_range(q, values) == wanted


# -- each way's own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5, 8, 30])
def test_windows_over_ranges_of_keys(window: int, calls: list[Call]) -> None:
    """Every place of a window's end in a range, and ranges that no row sees, which no call is for."""
    qkv, dout = (random_qkv(2, 1, tokens=24, head_dim=8, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    for sizes in [15, 9], [4, 7, 13], [23, 1]:
        calls.clear()
        check(segmented(sizes, {"window": window}, [qkv], [dout[0]])[0], {"window": window}, qkv, dout[0])
        backwards = sum(name == "_flash_attention_backward" for name, *_ in calls)
        assert backwards - len(sizes) <= sum(min(window - 1, sum(sizes[:s])) for s in range(len(sizes)))


@pytest.mark.parametrize("name", WAYS)
def test_sinks_in_every_way(name: str, calls: list[Call]) -> None:
    """Their gradients in segments against the formula's in float64; and none of infinity or far away leaves a NaN."""
    dtype = WAYS[name]
    qkv, dout = (random_qkv(4, 2, head_dim=8, dtype=dtype, seed=seed) for seed in (0, 1))
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    sinks, exact = (torch.tensor([0.5, -1.25, 2.0, -0.75], dtype=t, requires_grad=True) for t in (sums, torch.float64))
    formula(*(t.double() for t in qkv), sinks=exact).backward(dout[0].double())
    segmented([5, 2, 4, 1], {"sinks": sinks}, [qkv], [dout[0]])
    assert sinks.grad is not None and exact.grad is not None
    bound = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(sinks.grad.double(), exact.grad, rtol=bound, atol=bound * float(exact.grad.abs().max()))

    far = torch.tensor([-float("inf"), -3e38, 1e4, 3e38], dtype=sums, requires_grad=True)
    plain = segmented([5, 7], {}, [qkv], [dout[0]])[0]
    found = segmented([5, 7], {"sinks": far}, [qkv], [dout[0]])[0]
    assert far.grad is not None and not far.grad.any()
    assert torch.equal(found[0][:, :2], plain[0][:, :2]) and not found[0][:, 2:].any()
    assert all(bool(t.isfinite().all()) for t in found)


def test_gradients_add_up_in_float32(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many segments contribute, dK and dV are rounded twice: a contribution by the op, and the sum."""
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 8192)
    tokens, sizes = 96, [6] * 16
    qkv, dout = (random_qkv(2, 2, tokens=tokens, head_dim=8, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    truth = gradients(formula, *(t.double() for t in (*qkv, dout[0])))
    split = errors(segmented(sizes, {}, [qkv], [dout[0]])[0], truth)
    whole = errors(gradients(lambda *t: causal_attention(*t, layer=0), *qkv, dout[0]), truth)
    for of_segments, of_whole in zip(split, whole, strict=True):  # the whole has one contribution: sqrt(2) expected
        assert of_segments <= 1.5 * of_whole


@pytest.mark.parametrize("in_step", [False, True])
def test_any_strides(in_step: bool, calls: list[Call]) -> None:
    qkv, (dout, *_) = (random_qkv(4, 2, head_dim=8, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    first, *others = gradients_by_layout(*qkv, dout, in_step)
    assert all(torch.equal(a, b) for result in others for a, b in zip(result, first, strict=True))


# By way, launches of a forward and a backward of one layer over a prefix: attention, attention_parts, and what torch's
# ops compute or copy. By cuDNN, forward: keys and values into the cache, two attention ops, merged; backward: two
# ops, what each adds to dK and dV, and dQ.
LAUNCHES = {"cudnn": (1 + 2 + 1, 2 + 2 + 1), "flash": (2, 5), "window": (2, 6)}


@pytest.mark.parametrize("way", LAUNCHES)
def test_launches_are_few(way: str, cudnn_calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(attention_parts, "_operation", lambda k, v: object() if k.dtype.itemsize == 2 else None)
    monkeypatch.setattr(attention_parts, "_launch", lambda operation, work: launched.append(work.what) or True)
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda *of: way == "cudnn")
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 100)
    step, layer, options = SimulatedStep([8, 8, 8]), layer_handle(0), {"window": 6} if way == "window" else {}
    outs: list[Tensor] = []

    qkv = [t.transpose(1, 2) for t in random_qkv(4, 2, tokens=8, head_dim=8, dtype=torch.bfloat16)]
    qkv = [t.contiguous().transpose(1, 2).requires_grad_() for t in qkv]

    def forward(s: int) -> None:
        with step.unit("F", 0, s):
            outs.append(causal_attention(*qkv, layer=layer, **options))

    def backward(s: int) -> None:
        with step.unit("B", 0, s):
            torch.autograd.grad(outs[s], qkv, outs[s].detach())

    def count(run: Callable[[int], None], segment: int) -> int:
        launched.clear()
        return sum(launches(lambda: run(segment)).values()) + len(launched)

    _, forwards, *_ = [count(forward, s) for s in range(3)]
    _, backwards, *_ = [count(backward, s) for s in (2, 1, 0)]
    assert (forwards, backwards) == LAUNCHES[way]


def test_layouts_are_those_of_the_fake_kernels(calls: list[Call]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in WAYS.values():
        qkv, dout = (random_qkv(4, 2, head_dim=8, dtype=dtype, seed=seed) for seed in (0, 1))
        ops, none = torch.ops.seq1f1b, torch.empty(0)
        real = ops.causal_attention(*qkv, none, none, none, 0.5, 0, 0.0)
        real = *real, *ops.causal_attention_backward(dout[0], *qkv, *real, none, none, none, 0.5, 0, 0.0)
        with FakeTensorMode() as mode:
            fake_qkv, fake_dout = [mode.from_tensor(t) for t in qkv], mode.from_tensor(dout[0])
            fake = ops.causal_attention(*fake_qkv, torch.empty(0), torch.empty(0), torch.empty(0), 0.5, 0, 0.0)
            grads = ops.causal_attention_backward(
                fake_dout, *fake_qkv, *fake, torch.empty(0), torch.empty(0), torch.empty(0), 0.5, 0, 0.0
            )
        for a, b in zip(real, (*fake, *grads), strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_errors_of_the_cache(calls: list[Call]) -> None:
    _, k, v = random_qkv(4, 2, head_dim=8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="outside a step"):
        torch.ops.seq1f1b.cache_write(k, v, torch.empty(0), layer_handle(0))
    step = SimulatedStep([12])
    with step.unit("F", 0, 0):
        with pytest.raises(RuntimeError, match=r"k is .* as v"):
            torch.ops.seq1f1b.cache_write(k, v[:, :1], torch.empty(0), layer_handle(2))
        with pytest.raises(RuntimeError, match="must be on one device"):
            torch.ops.seq1f1b.cache_write(k, v, torch.empty(0, device="meta"), layer_handle(2))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_engine(num_ranks: int, checkpoint: bool, calls: list[Call]) -> None:
    """A step of the engine over these kernels against the whole model over the CPU's, in fp32 and the same numbers."""
    config = Config(kv_heads=2, checkpoint=checkpoint)
    model = whole_model(config)
    tokens, target = batch(config, 3, 20)
    losses, truth = run_whole(model, tokens, target, 3)
    narrow = whole_model(config, torch.float32)

    def rank(group: Any) -> Any:
        stage = stage_of(narrow, config, group.rank, num_ranks)
        engine = seq1f1b.PipelineEngine(
            stage, num_microbatches=3, num_segments=3, segment_sizes=[9, 4, 7], loss_fn=cross_entropy, group=group
        )
        found = engine.step(tokens, target=target)
        return found, {name: p.grad for name, p in engine.named_parameters()}

    results = run_ranks(num_ranks, rank)
    torch.testing.assert_close(torch.stack(results[-1][0]).double(), torch.stack(losses), rtol=1e-6, atol=1e-6)
    assert gradient_error({name: g for _, grads in results for name, g in grads.items()}, truth) < 1e-5


def test_a_step_moves_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a step makes or is given is on the stages' device: torch refuses to mix the CPU with the meta device."""
    monkeypatch.setattr(seq1f1b.engine.set_up, "common_device", lambda modules: torch.device("meta"))
    monkeypatch.setattr(seq1f1b.engine.runner, "step_on", lambda device: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it knows no meta device
    config = Config(kv_heads=2)
    tokens, target = batch(config, 3, 20)
    model = whole_model(config).to("meta")
    engine = seq1f1b.PipelineEngine(
        model,
        num_microbatches=3,
        num_segments=3,
        loss_fn=cross_entropy,
        loss=seq1f1b.Loss(weight=lambda target: target.numel()),
    )
    losses = engine.step(tokens, target=target)
    assert {loss.device.type for loss in losses} == {p.grad.device.type for p in model.parameters()} == {"meta"}


def test_a_group_without_cpu_tensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(ValueError, match=r"no backend for CPU tensors \(cuda:nccl\)"):
        seq1f1b.transport.connect(None, meeting=SimpleNamespace())
