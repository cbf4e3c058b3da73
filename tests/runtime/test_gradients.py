"""Are losses and gradients those of the unsplit model, for every P, M, k, split, head layout and checkpointing?"""

from __future__ import annotations

import itertools

import pytest
import torch
from slices import every_pair, whole
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model

from seq1f1b import PipelineEngine
from seq1f1b.testing import run_ranks

LENGTH = 23


def uneven(k: int) -> list[int]:
    """Wildly uneven sizes that sum to LENGTH, length 1 included."""
    return {1: [23], 2: [22, 1], 3: [1, 17, 5], 4: [13, 1, 2, 7], 7: [1, 1, 9, 2, 1, 6, 3]}[k]


def run_pipeline(model, config, P, M, k, sizes, tokens, target, **options):
    """Losses of the last stage and gradients of all, by name, with ranks as threads."""

    def run(group):
        stage = stage_of(model, config, group.rank, P)
        engine = PipelineEngine(
            stage,
            num_microbatches=M,
            num_segments=k,
            segment_sizes=sizes,
            loss_fn=cross_entropy,
            group=group,
            **options,
        )
        losses = engine.step(tokens if engine.has_first else None, target=target if engine.has_last else None)
        return losses, {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}

    results = run_ranks(P, run)
    gradients = {}
    for _, found in results:
        gradients.update(found)
    return results[-1][0], gradients


GRID = [
    (P, M, k, split, kv_heads, checkpointed, dtype)
    for P, M, k, split, kv_heads, checkpointed, dtype in itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4, 7), ("even", "uneven"), (4, 2), (False, True), ("fp64", "fp32")
    )
    if not (k == 1 and split == "uneven")
]
SLICE = every_pair(GRID)  # CI: any two of P, M, k, split, heads, checkpointing and dtype meet in every value


def check(P, M, k, split, kv_heads, checkpointed, dtype):
    config = Config(kv_heads=kv_heads, checkpoint=checkpointed)
    tokens, target = batch(config, M, LENGTH)
    model64 = whole_model(config)
    losses64, gradients64 = run_whole(model64, tokens, target, M)
    sizes = uneven(k) if split == "uneven" else None
    model = model64 if dtype == "fp64" else whole_model(config).float()
    losses, gradients = run_pipeline(model, config, P, M, k, sizes, tokens, target)
    error = gradient_error(gradients, gradients64)
    loss_error = max(abs(float(a) - float(b)) / abs(float(b)) for a, b in zip(losses, losses64, strict=True))
    if dtype == "fp64":
        assert error <= 1e-10
        assert loss_error <= 1e-12
    else:
        whole_losses, whole_gradients = run_whole(model, tokens, target, M)
        own = gradient_error(whole_gradients, gradients64)
        own_loss = max(abs(float(a) - float(b)) / abs(float(b)) for a, b in zip(whole_losses, losses64, strict=True))
        assert error <= 2 * own + 1e-6
        assert loss_error <= 2 * own_loss + 1e-6


@pytest.mark.parametrize(("P", "M", "k", "split", "kv_heads", "checkpointed", "dtype"), SLICE)
def test_slice_of_grid(P, M, k, split, kv_heads, checkpointed, dtype):
    check(P, M, k, split, kv_heads, checkpointed, dtype)


@pytest.mark.full
@pytest.mark.parametrize(("P", "M", "k", "split", "kv_heads", "checkpointed", "dtype"), whole(GRID))
def test_whole_grid(P, M, k, split, kv_heads, checkpointed, dtype):
    check(P, M, k, split, kv_heads, checkpointed, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bit_equal_from_run_to_run(dtype):
    config = Config(kv_heads=2)
    tokens, target = batch(config, 3, LENGTH)
    model = whole_model(config, dtype)
    first = run_pipeline(model, config, 2, 3, 4, uneven(4), tokens, target)
    for _ in range(3):
        again = run_pipeline(model, config, 2, 3, 4, uneven(4), tokens, target)
        assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))
        assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
