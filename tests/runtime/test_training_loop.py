"""Does an ordinary training loop stay one: optimizers, learning-rate schedules, accumulation, clipping, masters?"""

from __future__ import annotations

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, run_whole, stage_of, whole_model

from seq1f1b import PipelineEngine
from seq1f1b.testing import run_ranks

M, K, LENGTH, UPDATES, ACCUMULATED = 2, 3, 17, 5, 2
CONFIG = Config(kv_heads=2)
MAX_NORM = 0.1  # below the norms of these gradients, so that every update is clipped


class Whole:
    """The engine's part of the loop for the model run whole, by torch alone."""

    def __init__(self, model):
        self.model = model

    def step(self, tokens, target):
        before = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        _, gradients = run_whole(self.model, tokens, target, M)
        for name, p in self.model.named_parameters():
            p.grad = gradients[name] + before[name] if name in before else gradients[name]

    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


def train(module, engine, make_optimizer, masters):
    """Parameters after the updates, and the norm before each clipping. Batches shrink and grow."""
    parameters = dict(module.named_parameters())
    trained = {n: p.detach().float().requires_grad_() for n, p in parameters.items()} if masters else parameters
    optimizer = make_optimizer(trained.values())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=UPDATES + 1)
    norms = []
    for update in range(UPDATES):
        for part in range(ACCUMULATED):
            tokens, target = batch(CONFIG, M, LENGTH - 3 * part, seed=10 * update + part)
            engine.step(tokens, target=target)
        norms.append(float(engine.clip_grad_norm_(MAX_NORM)))
        if masters:
            for name, p in parameters.items():
                trained[name].grad = p.grad.float()
        optimizer.step()
        schedule.step()
        if masters:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(trained[name])
        module.zero_grad()
    return {name: p.detach() for name, p in trained.items()}, norms


def train_stages(model, make_optimizer, masters=False):
    def run(group):
        stage = stage_of(model, CONFIG, group.rank, group.size)
        engine = PipelineEngine(stage, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=group)
        return train(stage, engine, make_optimizer, masters)

    results = run_ranks(2, run)
    assert results[0][1] == results[1][1], "the ranks clipped by different norms"
    return results[0][0] | results[1][0], results[0][1]


def train_whole(model, make_optimizer, masters=False):
    copy = stage_of(model, CONFIG, 0, 1)
    return train(copy, Whole(copy), make_optimizer, masters)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.02, foreach=True, amsgrad=True),
    ],
    ids=["AdamW", "SGD", "Adam-foreach"],
)
def test_updates_are_those_of_the_model_trained_whole(make_optimizer):
    model = whole_model(CONFIG)
    truth, norms = train_whole(model, make_optimizer)
    found, found_norms = train_stages(model, make_optimizer)
    assert min(norms) > 2 * MAX_NORM, "nothing was clipped"
    assert found_norms == pytest.approx(norms, rel=1e-8)
    assert found.keys() == truth.keys()
    for name, parameter in truth.items():
        # A key's bias has no gradient but rounding, which Adam divides by its own size: its updates mean nothing.
        kv = CONFIG.kv_heads * CONFIG.hidden // CONFIG.heads
        rows = slice(kv, None) if name.endswith("kv.bias") else slice(None)
        torch.testing.assert_close(found[name][rows], parameter[rows], rtol=1e-6, atol=1e-8)


def test_16_bit_parameters_with_masters_in_fp32():
    """As near to fp64 as the unsplit model in 16 bits, trained by the same loop."""

    def adam(parameters):
        return torch.optim.AdamW(
            parameters, lr=0.02, eps=1e-3
        )  # large: the sign of a rounding must not become an update

    model = whole_model(CONFIG, torch.bfloat16)
    truth, _ = train_whole(stage_of(model, CONFIG, 0, 1).double(), adam)

    def flat(parameters):
        return torch.cat([parameters[name].detach().double().flatten() for name in truth])

    def error(trained):
        return float((flat(trained) - flat(truth)).norm() / (flat(truth) - flat(dict(model.named_parameters()))).norm())

    plain, _ = train_whole(model, adam, masters=True)
    found, _ = train_stages(model, adam, masters=True)
    assert all(p.dtype == torch.float32 for p in found.values())
    assert error(found) < 1.25 * error(plain) < 0.05
