"""Does one module compute in segments what it does over the whole sequence? In one process, without a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seq1f1b.checks.verify import Verification
from seq1f1b.engine.engine import LoneEngine
from seq1f1b.engine.options import Loss
from seq1f1b.transport import LoopbackGroup

__all__ = ["verify_stage"]


def verify_stage(
    module: nn.Module, sample: Tensor, segments: int | Sequence[int] = 2, *, seq_dim: int = 1, show: bool = True
) -> Verification:
    """Runs one module on a whole sample and in segments, and compares its output and gradients. Needs no group.

    The loss is half the squared distance of the output from fixed values that look random. The state of the module
    does not change.

    Args:
        module: takes ``sample`` and returns a tensor, both with the tokens along ``seq_dim``: (batch, tokens, ...).
        sample: if it is floating, its gradient is compared, too.
        segments: their number, or the tokens of each.
        show: prints the result.
    """
    count, sizes = (segments, None) if isinstance(segments, int) else (len(segments), list(segments))
    engine = LoneEngine(
        module,
        num_microbatches=1,
        num_segments=count,
        segment_sizes=sizes,
        seq_dim=seq_dim,
        loss_fn=_distance_from_fixed,
        loss=Loss(reduction="sum"),
        group=LoopbackGroup(1)[0],
        attention="any",
    )
    if sample.is_floating_point():
        sample = sample.detach().requires_grad_()
    tokens = torch.arange(sample.shape[seq_dim], dtype=torch.float64, device=sample.device)
    target = tokens.view([-1 if dim == seq_dim else 1 for dim in range(seq_dim + 1)])
    try:
        return engine.verify(sample, target=target, show=show)
    finally:
        engine.close()


def _distance_from_fixed(output: Tensor, positions: Tensor) -> Tensor:
    """Half the squared distance from values that look random and depend on a token's position in the sequence."""
    rest = output.dim() - positions.dim()
    others = math.prod(output.shape) // output.shape[positions.dim() - 1]
    shape = [1 if dim == positions.dim() - 1 else size for dim, size in enumerate(output.shape)]
    numbers = torch.arange(others, dtype=torch.float64, device=output.device).view(shape)
    values = torch.cos(positions.double().view(*positions.shape, *[1] * rest) * 12.9898 + numbers * 78.233)
    return 0.5 * (output - values.to(output.dtype)).square().sum()
