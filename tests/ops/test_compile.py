"""Does compiled code run any segment of any layer without being traced again, with the results of eager code?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from simulated_step import SimulatedStep
from torch import Tensor, nn

from seq1f1b.ops import attention
from seq1f1b.ops.attention import causal_attention, layer_handle, positions

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
WIDTH = HEADS * HEAD_DIM


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Block(nn.Module):
    """Rotary attention with a residual."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = layer_handle(index)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = positions(x).to(x.dtype)[:, None] * torch.arange(1, HEAD_DIM // 2 + 1, dtype=x.dtype) / 8
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attended = causal_attention(rotate(q, angles), rotate(k, angles), v, layer=self.layer)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def make_blocks(layers: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block(i) for i in range(layers)]).double()


def run_blocks(blocks: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def run_step(blocks: list[Callable[[Tensor], Tensor]], x: Tensor, sizes: list[int]) -> Tensor:
    """Forward and backward of one micro-batch by segments; the gradient of x. The loss is the sum of squares."""
    step = SimulatedStep(sizes)
    leaves, outs = [], []
    for s in range(len(sizes)):
        leaves.append(x[:, step.slice(s)].detach().clone().requires_grad_())
        with step.unit("F", 0, s):
            outs.append(run_blocks(blocks, leaves[s]))
    for s in reversed(range(len(sizes))):
        with step.unit("B", 0, s):
            outs[s].square().sum().backward()
    return torch.cat([leaf.grad for leaf in leaves], dim=1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    attention.set_stepping(False)
    torch._dynamo.reset()


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
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_inductor() -> None:
    """Inductor's own layouts and its memory planning around the ops; in scalar C++, which compiles faster."""
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    blocks = make_blocks(2)
    whole = x.clone().requires_grad_()
    run_blocks(list(blocks), whole).square().sum().backward()
    attention.set_stepping(True)
    options = {"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}
    compiled = [torch.compile(block.forward, fullgraph=True, options=options) for block in blocks]
    blocks.zero_grad()
    torch.testing.assert_close(run_step(compiled, x, [5, 7]), whole.grad, rtol=1e-10, atol=1e-10)


def test_export_and_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Plain(nn.Module):
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
