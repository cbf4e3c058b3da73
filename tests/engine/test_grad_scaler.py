"""Do gradients scaled by GradScaler train like plain ones, and do all ranks skip the step together on overflow?"""

from __future__ import annotations

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import Tensor

from seq1f1b import PipelineEngine, add_loss
from seq1f1b.testing import run_ranks

M, K, LENGTH = 3, 2, 14
CONFIG = Config(kv_heads=2)
MODEL = whole_model(CONFIG, torch.float32)


def auxiliary(module, inputs, output):
    add_loss(output.square().mean() * 0.1)


def train(group, scaler, *, steps=1, overflow_at=None, loss_weight=None):
    """Losses, unscaled gradients, parameters, which steps moved them. In step ``overflow_at`` rank 0 overflows."""
    stage = stage_of(MODEL, CONFIG, group.rank, group.size)
    stage.register_forward_hook(auxiliary)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    engine = PipelineEngine(stage, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=group)
    losses: list[Tensor] = []
    moved = []
    for step in range(steps):
        before = [p.detach().clone() for p in stage.parameters()]
        hook = None
        if step == overflow_at and group.rank == 0:
            hook = next(iter(stage.parameters())).register_hook(lambda g: torch.full_like(g, float("inf")))
        tokens, target = batch(CONFIG, M, LENGTH, seed=step)
        arguments = {"target": target if engine.has_last else None, "loss_weight": loss_weight}
        losses = engine.step(tokens if engine.has_first else None, grad_scaler=scaler, **arguments)
        if hook is not None:
            hook.remove()
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        gradients = [p.grad.clone() for p in stage.parameters()]
        optimizer.zero_grad()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, stage.parameters(), strict=True)))
    return losses, gradients, [p.detach() for p in stage.parameters()], moved


def scaler_of(**options):
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **options)


def test_scaled_gradients_are_the_plain_ones():
    """A power of two scales without rounding, so all is bit-equal."""
    for loss_weight in (None, 31.0):
        plain = run_ranks(2, lambda group, w=loss_weight: train(group, None, steps=3, loss_weight=w))
        scaled = run_ranks(2, lambda group, w=loss_weight: train(group, scaler_of(), steps=3, loss_weight=w))
        off = run_ranks(2, lambda group, w=loss_weight: train(group, scaler_of(enabled=False), steps=3, loss_weight=w))
        assert plain[1][0]
        for others in (scaled, off):
            for want, found in zip(plain, others, strict=True):
                for a, b in zip(want[:3], found[:3], strict=True):
                    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("steps", [1, 2])
def test_clipping_knows_of_the_scale(steps):
    """The steps may be accumulated; after an update the engine asks anew."""

    def run(group):
        stage, scaler = stage_of(MODEL, CONFIG, group.rank, group.size), scaler_of()
        engine = PipelineEngine(stage, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=group)
        optimizer, norms = torch.optim.SGD(stage.parameters(), lr=0.0), []
        for kind in ("plain", "forgotten", "scaled", "forgotten", "scaled"):
            for step in range(steps):
                tokens, target = batch(CONFIG, M, LENGTH, seed=step)
                engine.step(tokens, target=target, grad_scaler=None if kind == "plain" else scaler)
            if kind == "forgotten":
                with pytest.raises(ValueError, match=r"still scaled by grad_scaler, by 1024: call scaler\.unscale_"):
                    engine.clip_grad_norm_(1e9)
            else:
                if kind == "scaled":
                    scaler.unscale_(optimizer)
                norms.append(float(engine.clip_grad_norm_(1e9)))
            if kind == "scaled":
                scaler.step(optimizer), scaler.update(1024.0)
            optimizer.zero_grad()
        return norms

    for norms in run_ranks(2, run):
        assert norms == [norms[0]] * 3


def test_every_rank_skips_a_step_that_overflows_on_one():
    scalers = [scaler_of(), scaler_of()]
    results = run_ranks(2, lambda group: train(group, scalers[group.rank], steps=4, overflow_at=1))
    assert [moved for *_, moved in results] == [[True, False, True, True]] * 2
    # Halved at the overflow, doubled after two steps without one.
    assert [scaler.get_scale() for scaler in scalers] == [2.0**10, 2.0**10]
