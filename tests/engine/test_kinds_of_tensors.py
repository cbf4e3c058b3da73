"""Does a stage train as the whole model whatever its tensors are: complex, nested, sparse, wrapped, transformed?"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.nn.functional as F
from slices import pairs_of
from torch import Tensor, func, nn
from torch.utils._pytree import tree_map
from wide_products import wide_products

from seq1f1b import Memory, PipelineEngine
from seq1f1b.testing import run_ranks

M, K, HIDDEN = 2, 3, 8
D, C = torch.float64, torch.complex128


class Scaled(torch.Tensor):
    """A wrapper without a storage, as quantized weights are; torch cannot look inside."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=D)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values_, args[0].scale)
        plain = tree_map(lambda a: a.values_.to(D) * a.scale if isinstance(a, Scaled) else a, args)
        return func(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl


class Flat(Scaled):
    """Torch can look inside."""

    def __tensor_flatten__(self) -> Any:
        return ["values_", "scale"], None


class Body(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN, dtype=D), nn.Linear(HIDDEN, HIDDEN, dtype=D)
        self.bare = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=D)
        self.c = nn.Linear(HIDDEN, HIDDEN, dtype=C if "complex" in kind else D)
        eye = torch.eye(HIDDEN, dtype=D).roll(1, 0)
        if "sparse" in kind:
            self.register_buffer("mix", eye.to_sparse_csr() if "csr" in kind else eye.to_sparse())
        if "sparse parameter" in kind:
            self.other = nn.Parameter(eye.to_sparse(), requires_grad=True)
        if "wrapped" in kind:
            wrapper = Flat if "flat" in kind else Scaled
            weight = wrapper(torch.randint(-9, 9, (HIDDEN, HIDDEN), dtype=torch.int8), torch.rand(HIDDEN, 1, dtype=D))
            self.b.weight = nn.Parameter(weight, requires_grad="trained" in kind)
        if "meta" in kind:
            self.unused = nn.Linear(HIDDEN, HIDDEN, device="meta")
            self.register_buffer("also_unused", torch.empty(3, device="meta"))
        self.of = KINDS[kind]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + self.of(self, x)


def mixed(m: Any, x: Tensor, by: Tensor) -> Tensor:
    return m.b(torch.sparse.mm(by, m.b(x).reshape(-1, HIDDEN).t()).t().reshape(x.shape))


def in_list(m: Any, x: Tensor, layout: torch.layout) -> Tensor:
    nested = torch.nested.as_nested_tensor([m.a(t) for t in x], layout=layout)
    return torch.stack(list(m.b(nested).unbind()))


def forward_mode(m: Any, x: Tensor) -> Tensor:
    with fw.dual_level():
        y, slope = fw.unpack_dual(F.gelu(m.b(fw.make_dual(x, torch.ones_like(x)))))
    return y + slope


def sparse_gradient(m: Any, x: Tensor) -> Tensor:
    rows = m.bare(x.flatten(0, 1))
    return torch.gather(rows, 1, torch.arange(HIDDEN).expand(len(rows), -1), sparse_grad=True).view_as(x)


def norm(z: Tensor) -> Tensor:
    return F.gelu(z).square().sum()


KINDS: dict[str, Any] = {
    "complex": lambda m, x: m.c(torch.complex(m.b(x), x)).conj().abs(),
    "complex bias alone": lambda m, x: F.linear(m.b(x).to(C), m.c.weight, m.c.bias).imag,
    "nested": lambda m, x: in_list(m, x, torch.strided),
    "jagged": lambda m, x: in_list(m, x, torch.jagged),
    "forward mode": forward_mode,
    "sparse gradient": sparse_gradient,
    "gradients of both layouts": lambda m, x: m.b(x) + F.embedding(torch.arange(3), m.b.weight, sparse=True).sum(0),
    "sparse buffer": lambda m, x: mixed(m, x, m.mix),
    "csr sparse buffer": lambda m, x: mixed(m, x, m.mix),
    "sparse parameter": lambda m, x: mixed(m, x, m.other),
    "wrapped": lambda m, x: m.b(x),
    "flat wrapped": lambda m, x: F.linear(x, m.b.weight),
    "wrapped, trained": lambda m, x: m.b(x),
    "meta": lambda m, x: m.b(x),
    "functionalize": lambda m, x: func.functionalize(lambda z: m.b(z).mul_(2))(x),
    "vmap": lambda m, x: torch.vmap(m.b)(x),
    "hessian": lambda m, x: torch.vmap(torch.vmap(func.hessian(lambda z: norm(m.b(z)))))(x).sum(-1),
    "jacfwd": lambda m, x: torch.vmap(torch.vmap(func.jacfwd(lambda z: F.gelu(m.b(z)))))(x).sum(-1),
    "linearize": lambda m, x: func.linearize(lambda z: F.gelu(m.b(z)), x)[1](x),
    "grad": lambda m, x: func.grad(lambda z: norm(m.b(z)))(x),
}
UNCOUNTED = (
    "sparse buffer",
    "csr sparse buffer",
    "sparse parameter",
    "hessian",
    "jacfwd",
    "linearize",
    "grad",
    "forward mode",
)


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(4, 12, HIDDEN, dtype=D), torch.randn(4, 12, HIDDEN, dtype=D)


def check(found: nn.Module, whole: nn.Module) -> None:
    for (name, p), q in zip(found.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            ours, truth = p.grad.to_dense(), q.grad.to_dense()
            assert (ours - truth).abs().max() <= 1e-12 * max(1.0, truth.abs().max()), name


@pytest.mark.parametrize(("kind", "schedule", "adds"), pairs_of(list(KINDS), ["seq1f1b", "seq-zb-h1"], [False, True]))
def test_a_stage_trains_as_the_whole_model(kind: str, schedule: str, adds: bool, tmp_path: Path) -> None:
    """Also where layers add products themselves, and whatever becomes of activations; unmeasured at worst."""
    (x, y), whole = data(), Body(kind)
    for one, wanted in zip(x.chunk(M), y.chunk(M), strict=True):
        for part, target in zip(one.chunk(K, 1), wanted.chunk(K, 1), strict=True):
            (F.mse_loss(whole(part), target) / (M * K)).backward()
    others = () if adds else (Memory(recompute="all"), Memory(offload=tmp_path))
    with wide_products() if adds else nullcontext():
        for memory in (Memory(), *others):
            engine = PipelineEngine(
                body := Body(kind),
                num_microbatches=M,
                num_segments=K,
                loss_fn=F.mse_loss,
                schedule=schedule,
                memory=memory,
            )
            engine.step(x, target=y)
            check(body, whole)
            held = engine.report().stages[0].activation_bytes
            assert (held is None) == (kind in UNCOUNTED)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_and_clipping_take_it(kind: str) -> None:
    (x, y), body = data(), Body(kind)
    engine = PipelineEngine(body, num_microbatches=M, num_segments=K, loss_fn=F.mse_loss)
    engine.step(x, target=y)
    gradients = [p.grad.to_dense() for p in body.parameters() if p.grad is not None]
    exact = torch.stack([g.abs().square().sum() for g in gradients]).sum().sqrt()
    assert abs(float(engine.clip_grad_norm_(1e9)) - float(exact)) <= 1e-9 * float(exact)
    assert engine.verify(x, target=y, show=False).ok


def test_blocks_that_are_computed_again_cannot_call_torch_func() -> None:
    stage = nn.Sequential(nn.Sequential(Body("grad"), Body("vmap")))
    memory = Memory(blocks=("0", 1.0))
    engine = PipelineEngine(stage, num_microbatches=M, num_segments=K, loss_fn=F.mse_loss, memory=memory)
    with pytest.raises(RuntimeError, match=r"F0.0: .*Memory.blocks: use Memory\(recompute=...\)"):
        engine.step(data()[0], target=data()[1])


class Half(nn.Module):
    """A stage of complex numbers; torch puts conjugation off to where the bytes are read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.kind = nn.Linear(HIDDEN, HIDDEN, dtype=C), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "conjugates its output":
            return self.layer(torch.complex(x, x.roll(1, -1))).conj()
        if self.kind == "conjugates its input":
            return self.layer(x.conj()).abs()
        y = self.layer(torch.complex(x.real, x.real))
        return y if self.kind == "complex" else y.conj().imag if self.kind == "imaginary" else y.abs()


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
@pytest.mark.parametrize(
    "kinds", [("conjugates its output", "real"), ("complex", "conjugates its input"), ("imaginary", "real")]
)
def test_conjugates_cross_to_the_next_stage_and_back(kinds: tuple[str, str], schedule: str) -> None:
    (x, _), whole, stages = data(), nn.Sequential(*map(Half, kinds)), nn.Sequential(*map(Half, kinds))
    whole(x).square().mean().backward()

    def run(group: Any) -> None:
        engine = PipelineEngine(
            stages[group.rank],
            schedule=schedule,
            num_microbatches=M,
            num_segments=K,
            loss_fn=lambda output, target: output.square().mean(),
            group=group,
            memory=Memory(recompute="all"),
        )
        engine.step(x, target=torch.zeros(4, 12))

    run_ranks(2, run)
    check(stages, whole)
