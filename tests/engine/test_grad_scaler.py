"""Do gradients scaled by GradScaler train like plain ones, and do all ranks skip the step together on overflow?"""

from __future__ import annotations

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model

from seq1f1b import PipelineEngine, add_loss
from seq1f1b.testing import run_ranks

M, K, LENGTH = 3, 2, 14
CONFIG = Config(kv_heads=2)
MODEL = whole_model(CONFIG, torch.float32)


def auxiliary(module, inputs, output):
    add_loss(output.square().mean() * 0.1)


def scaler_of():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def engine_of(group):
    """An engine of one of two stages, whose stage adds an auxiliary loss."""
    stage = stage_of(MODEL, CONFIG, group.rank, group.size)
    stage.register_forward_hook(auxiliary)
    return PipelineEngine(stage, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=group)


@pytest.mark.parametrize(("steps", "loss_weight"), [(1, None), (2, 31.0)])
def test_scaled_gradients_are_the_plain_ones_and_clipping_knows_of_the_scale(steps, loss_weight):
    """A power of two scales without rounding, so all is bit-equal; the steps may be accumulated."""

    def run(group):
        engine, scaler = engine_of(group), scaler_of()
        optimizer, found = torch.optim.SGD(engine.parameters(), lr=0.0), []
        for kind in ("plain", "forgotten", "scaled", "forgotten", "scaled"):
            for step in range(steps):
                tokens, target = batch(CONFIG, M, LENGTH, seed=step)
                given = None if kind == "plain" else scaler
                losses = engine.step(tokens, target=target, grad_scaler=given, loss_weight=loss_weight)
            if kind == "forgotten":
                with pytest.raises(ValueError, match=r"still scaled by grad_scaler, by 1024: call scaler\.unscale_"):
                    engine.clip_grad_norm_(1e9)
            else:
                if kind == "scaled":
                    scaler.unscale_(optimizer)
                gradients = [p.grad.clone() for p in engine.parameters()]
                found.append([*losses, engine.clip_grad_norm_(1e9), *gradients])
            if kind == "scaled":
                scaler.step(optimizer), scaler.update(1024.0)
            optimizer.zero_grad()
        return found

    for plain, *scaled in run_ranks(2, run):
        assert all(all(map(torch.equal, plain, others)) for others in scaled)


def test_every_rank_skips_a_step_that_overflows_on_one():
    def run(group):
        engine, scaler, moved = engine_of(group), scaler_of(), []
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step in range(4):
            before = [p.detach().clone() for p in engine.parameters()]
            if step == 1 and group.rank == 0:
                overflow = next(engine.parameters()).register_hook(lambda g: torch.full_like(g, float("inf")))
            tokens, target = batch(CONFIG, M, LENGTH, seed=step)
            engine.step(tokens, target=target, grad_scaler=scaler)
            if step == 1 and group.rank == 0:
                overflow.remove()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True)))
        return moved, scaler.get_scale()

    # Halved at the overflow, doubled after two steps without one.
    assert run_ranks(2, run) == [([True, False, True, True], 2.0**10)] * 2
