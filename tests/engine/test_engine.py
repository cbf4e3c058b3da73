"""Does a step do what the surface says: arguments, clipping, a scaler of gradients, 16-bit, peaks?"""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from slices import pairs_of
from tiny_model import Config, batch, cross_entropy, gradient_error, stage_of, whole_model
from torch import Tensor, nn

import seq1f1b
from seq1f1b import Loss, Memory, PipelineEngine, build_schedule
from seq1f1b.testing import run_ranks

LENGTH = 16


def grads(engine):
    return {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}


def engine_of(stage, group, M, k, **options):
    options = {"loss_fn": cross_entropy, "group": group} | options
    return PipelineEngine(stage, num_microbatches=M, num_segments=k, **options)


class TwoTensors(nn.Module):
    """Hands over a float tensor, an integer one and one without gradient; reads keyword arguments."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(4, 4)

    def forward(self, x, ids, extra=None, *, mask, scale, name="", shift=None):
        y = self.linear(x) * mask.unsqueeze(-1) * scale
        if shift is not None:
            y = y + shift
        y = y + 0.1 * ids.unsqueeze(-1)
        if self.index == 2:
            return y
        return y, ids + 1, x.detach() if extra is None else extra


@pytest.mark.parametrize(("recompute", "is_frozen"), [("none", False), ("all", False), ("all", True)])
def test_tuples_and_keyword_arguments_by_rule(recompute, is_frozen):
    torch.manual_seed(0)
    stages = [TwoTensors(i).double().requires_grad_(not is_frozen) for i in range(3)]
    x, y = torch.randn(2, 4, LENGTH, 4).double().unbind()
    ids, mask, shift = torch.randint(5, (4, LENGTH)), torch.rand(4, LENGTH).double(), torch.randn(LENGTH).double()
    given = {"x": x.requires_grad_(), "scale": torch.rand(4).double().requires_grad_()}

    def whole(rows):
        value = (x[rows], ids[rows])
        for stage in stages:
            value = stage(*value, mask=mask[rows], scale=given["scale"], shift=shift.view(1, -1, 1))
        return F.mse_loss(value, y[rows])

    def gradients():
        named = {f"{i}.{n}": p.grad for i, s in enumerate(stages) for n, p in s.named_parameters() if not is_frozen}
        return named | {name: value.grad for name, value in given.items()}

    losses = [whole(slice(0, 2)), whole(slice(2, 4))]
    (sum(losses) / 2).backward()
    truth = {name: gradient.clone() for name, gradient in gradients().items()}
    for value in (*given.values(), *(p for stage in stages for p in stage.parameters())):
        value.grad = None

    def run(group):
        rules = {
            "mask": "slice",
            "scale": "replicate",
            "shift": lambda unit: shift[unit.offset : unit.offset + unit.length].view(1, -1, 1),
        }
        options = {"segment_sizes": [5, 1, 10], "loss_fn": F.mse_loss, "memory": Memory(recompute=recompute)}
        engine = engine_of(stages[group.rank], group, 2, 3, arg_rules=rules, **options)
        own = given["scale"].detach().clone().requires_grad_()
        return engine.step((x, ids), target=y, kwargs={"mask": mask, "scale": own, "name": "same"}), own.grad

    results = run_ranks(3, run)
    torch.testing.assert_close(results[-1][0], [loss.detach() for loss in losses], rtol=0, atol=1e-12)
    given["scale"].grad = sum(gradient for _, gradient in results)
    assert gradient_error(gradients(), truth) <= 1e-10


@pytest.mark.parametrize(
    ("ranks", "per_rank", "dtype", "norm_type", "wrong"),
    pairs_of(
        [(1, 1), (2, 1), (4, 1), (2, 2)], [torch.float32, torch.float64], [2.0, 1, "2", "inf", math.inf],
        [None, math.nan, math.inf],
    ),
)  # fmt: skip
def test_clipping_is_that_of_one_process_bit_for_bit(ranks, per_rank, dtype, norm_type, wrong):
    """One rank's gradient that is not finite decides on all of them, before any is clipped."""
    config, stages = Config(), ranks * per_rank
    model = whole_model(config).to(dtype)
    tokens, target = batch(config, 2, LENGTH)

    def run(group):
        order = build_schedule("interleaved-1f1b" if per_rank > 1 else "1f1b", num_ranks=ranks, num_microbatches=2,
                               stages_per_rank=per_rank)  # fmt: skip
        own = [stage_of(model, config, i, stages) for i, at in enumerate(order.rank_of_stage) if at == group.rank]
        engine = engine_of(own, group, 2, 1, schedule=order)
        engine.step(tokens, target=target)
        if wrong is not None and group.rank == ranks - 1:
            next(engine.parameters()).grad[0] = wrong
        before = {name: g.clone() for name, g in grads(engine).items()}
        try:
            norm = engine.clip_grad_norm_(0.05, norm_type, True)
        except RuntimeError as error:
            assert f"is {wrong}, which cannot clip" in str(error)
            torch.testing.assert_close(grads(engine), before, rtol=0, atol=0, equal_nan=True)
            norm = engine.clip_grad_norm_(0.05, norm_type)
        return before, norm, grads(engine)

    results = run_ranks(ranks, run)
    before, after = ({name: g for result in results for name, g in result[i].items()} for i in (0, 2))
    assert before.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = before[name].clone()
    with nullcontext() if wrong is None else pytest.raises(RuntimeError, match="non-finite"):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, error_if_nonfinite=True)
    if wrong is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
    assert wrong is not None or norm > 0.05
    for _, found, _ in results:
        torch.testing.assert_close(found, norm, rtol=0, atol=0, equal_nan=True)
    truth = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(after, truth, rtol=0, atol=0, equal_nan=True)


def test_every_rank_skips_a_step_that_overflows_on_one():
    """Clipping knows of the scale, too. Numbers of scaled steps: test_random_steps.py."""
    config = Config(kv_heads=2)
    model = whole_model(config, torch.float32)

    def run(group):
        stage, moved = stage_of(model, config, group.rank, 2), []
        engine = engine_of(stage, group, 3, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step in range(4):
            before = [p.detach().clone() for p in engine.parameters()]
            if step == 1 and group.rank == 0:
                overflow = next(engine.parameters()).register_hook(lambda g: torch.full_like(g, float("inf")))
            tokens, target = batch(config, 3, LENGTH, seed=step)
            engine.step(tokens, target=target, grad_scaler=scaler)
            if step == 1 and group.rank == 0:
                overflow.remove()
            if step == 3:
                with pytest.raises(ValueError, match=r"still scaled by grad_scaler, by 512: call scaler\.unscale_"):
                    engine.clip_grad_norm_(1e9)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True)))
        return moved, scaler.get_scale()

    # Halved at the overflow, doubled after two steps without one.
    assert run_ranks(2, run) == [([True, False, True, True], 2.0**10)] * 2


def test_16_bit_gradients_are_accumulated_in_fp32():
    """M k = 64 additions in bf16 would cost about 0.8 %."""
    torch.manual_seed(0)
    stage = nn.Linear(8, 8, bias=False).bfloat16()
    x = torch.randn(64, 16, 8).bfloat16()
    y = torch.randn(64, 16, 8).bfloat16()

    def squared(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).float().square().mean()

    def error(grad_dtype):
        stage.weight.grad = None
        engine = PipelineEngine(stage, num_microbatches=16, num_segments=4, loss_fn=squared, grad_dtype=grad_dtype)
        engine.step(x, target=y)
        assert stage.weight.grad.dtype == torch.bfloat16
        weight = stage.weight.detach().double().requires_grad_()
        (F.linear(x.double(), weight) - y.double()).square().mean().backward()
        return float((stage.weight.grad.double() - weight.grad).norm() / weight.grad.norm())

    assert error(torch.float32) < 0.004  # one rounding to bf16, and bf16 products within a segment
    assert error(None) > error(torch.float32)


def test_a_fused_projection_is_not_kept_for_its_queries():
    """Keys and values lie in the cache: of q, k and v from one projection only q may stay for the backward."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
            return seq1f1b.causal_attention(q, k, v, layer=0).transpose(1, 2).flatten(2)

    stage, x = Fused(), torch.randn(1, 64, 16)
    engine = PipelineEngine(
        stage, num_microbatches=1, num_segments=2, loss_fn=lambda o, t: o.sum(), loss=Loss(reduction="sum")
    )
    engine.step(x, target=x)
    floats = 64 * (16 + 16 + 2)  # q, out and one row sum per head; the input is the caller's
    assert engine.report().stages[0].activation_bytes <= 4 * floats + 64


class SineHead(nn.Linear):
    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return super().forward(hidden).sin().mean()


def test_a_head_inside_the_loss_holds_one_segment():
    """Its sine saves the logits, 64 floats of a token, where the stage saves 4: all but one segment's are gone."""
    batch, length = 2, 32
    for k in (1, 4):
        engine = PipelineEngine(nn.Linear(4, 4), num_microbatches=1, num_segments=k, loss_fn=SineHead(4, 64))
        x = torch.randn(batch, length, 4).requires_grad_()
        engine.step(x, target=torch.zeros(batch, length))
        [stage] = engine.report().stages
        tokens = batch * length
        # What the stage's graph keeps is its input, which is not counted.
        assert 4 * 64 * tokens // k <= stage.activation_bytes <= 4 * 64 * tokens // k + 4 * 8 * tokens
