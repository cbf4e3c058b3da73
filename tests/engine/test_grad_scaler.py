"""Do all ranks skip the step on overflow of one, and does clipping know of the scale? Numbers: test_random_steps.py."""

from __future__ import annotations

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model

from seq1f1b import PipelineEngine
from seq1f1b.testing import run_ranks

M, LENGTH, CONFIG = 3, 14, Config(kv_heads=2)


def test_every_rank_skips_a_step_that_overflows_on_one():
    model = whole_model(CONFIG, torch.float32)

    def run(group):
        stage, moved = stage_of(model, CONFIG, group.rank, 2), []
        engine = PipelineEngine(stage, num_microbatches=M, num_segments=2, loss_fn=cross_entropy, group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step in range(4):
            before = [p.detach().clone() for p in engine.parameters()]
            if step == 1 and group.rank == 0:
                overflow = next(engine.parameters()).register_hook(lambda g: torch.full_like(g, float("inf")))
            tokens, target = batch(CONFIG, M, LENGTH, seed=step)
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
