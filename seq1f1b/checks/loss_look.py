"""Check of a loss in the first step of a shape: do the weighted losses of the segments add up to the whole loss?

The sum is right if the loss divides by the engine's count of targets and no token's loss depends on another token. The
loss of an untrained model is equal for all tokens, so its value says little. The check therefore compares gradients of
a few tokens' outputs, because a wrong divisor changes every gradient. Each output is scaled by a factor of its own: a
ratio to a reference model is 1 for every token in the first step, and would hide its dependence on other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seq1f1b.engine.findings import COUPLING, WEIGHTING
from seq1f1b.engine.model_state import RandomState, uncompiled
from seq1f1b.engine.weighting import Weighting
from seq1f1b.nested import distance, mapped, norm, tensors_of

__all__: list[str] = []

_TOKENS = 8  # per part
_DIFFERS, _DIFFERS_NARROW = 1e-3, 5e-2  # relative difference in float32, and with any 16-bit dtype


class LossLook:
    """A few tokens of some segments of one micro-batch, collected during the step.

    Args:
        microbatch: index of the micro-batch.
        sizes: tokens of each segment's parts: one part, several siblings, or the halves of the only segment. Empty once
            the loss is trusted.
        count: counts one part's targets; None: losses of segments are summed.
        dim: the sequence dimension.
        is_halved: whether parts are halves of one segment. Tokens may then depend on the other half, so only a wrong
            divisor is a finding.
    Attributes:
        cause: kind of the finding.
    """

    def __init__(
        self,
        microbatch: int,
        sizes: Mapping[int, Sequence[int]],
        count: Callable[[Any], float] | None,
        dim: int,
        is_halved: bool,
    ) -> None:
        self.microbatch, self.sizes, self.cause = microbatch, sizes, WEIGHTING
        self._count, self._dim, self._num_parts, self._is_halved = count, dim, sum(map(len, sizes.values())), is_halved
        self._parts: list[tuple[Any, Any]] = []  # outputs and targets

    def take(self, output: Any, target: Any, segment: int, leaves: bool) -> bool:
        """Keeps a copy of some of a segment's tokens. Returns whether all segments are there.

        Args:
            leaves: whether the loss carries state between segments or runs a backward itself. Such a loss is trusted
                without a second call, like a loss whose input has no tokens.
        """
        length, begin = sum(self.sizes[segment]), 0
        tensors = tensors_of(output)
        has_tokens = any(t.dim() > self._dim and t.shape[self._dim] == length for t in tensors)
        if leaves or not has_tokens or any(t.is_meta for t in tensors):
            self.sizes = {}
            return False
        for size in self.sizes[segment]:
            tokens = min(size, _TOKENS)
            rows = torch.linspace(begin, begin + size - 1, tokens, dtype=torch.float64, device="cpu").long()

            def some(tensor: Tensor, rows: Tensor = rows) -> Tensor:
                if tensor.dim() <= self._dim or tensor.shape[self._dim] != length:
                    return tensor.detach()
                return tensor.detach().index_select(self._dim, rows.to(tensor.device))

            self._parts.append((mapped(output, some), mapped(target, some)))
            begin += size
        return len(self._parts) == self._num_parts

    def difference(self, loss_fn: Callable[..., Any], kwargs: Mapping[str, Any], device: torch.device) -> str:
        """Compares the gradient of the parts with the gradient of the whole, and returns the error in words or "".

        A loss that draws random numbers or refuses fewer tokens cannot be compared: the result is "".
        """
        state = RandomState(device)
        try:
            with torch.enable_grad(), uncompiled():
                found = self._compare(loss_fn, kwargs)
            return found if state.is_current() else ""
        except Exception:  # a loss may refuse other lengths, and a check must not end a correct step
            return ""
        finally:
            state.restore()

    def _compare(self, loss_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
        counts = [1.0 if self._count is None else float(self._count(target)) for _, target in self._parts]
        parts = [part for part, count in zip(self._parts, counts, strict=True) if count > 0.0]
        counts = [count for count in counts if count > 0.0]
        if len(parts) < 2:
            return ""
        total = 1.0 if self._count is None else sum(counts)
        leaves = [mapped(output, _scaled) for output, _ in parts]
        flat = [[t for t in tensors_of(leaf) if t.requires_grad] for leaf in leaves]
        every = [t for each in flat for t in each]

        def gradients(output: Any, target: Any, count: float, of: Sequence[Tensor]) -> Sequence[Tensor | None]:
            loss = loss_fn(output, target, **kwargs)
            if isinstance(loss, tuple):  # (sum, divisor) and losses by token have no wrong divisor: sums are added
                self.cause, loss = COUPLING, loss[0]
            elif loss.numel() > 1:
                self.cause, loss = COUPLING, loss.sum() / total
            else:
                loss = loss * (count / total)
            with torch.autocast(every[0].device.type, enabled=False):  # as in every backward
                return torch.autograd.grad(loss, of, allow_unused=True)

        apart: list[Tensor | None] = []  # one part at a time: each graph is freed before the next
        for leaf, own, (_, target), count in zip(leaves, flat, parts, counts, strict=True):
            apart += gradients(leaf, target, count, own)
        together = gradients(self._joined(leaves), self._joined([target for _, target in parts]), total, every)
        pairs = [(a, b) for a, b in zip(apart, together, strict=True) if a is not None and b is not None]
        size, off = math.hypot(*(norm(b) for _, b in pairs)), math.hypot(*(distance(a, b) for a, b in pairs))
        narrow = torch.is_autocast_enabled(every[0].device.type) or any(t.dtype.itemsize < 4 for t in every)
        if not 0.0 < size < math.inf or off <= (_DIFFERS_NARROW if narrow else _DIFFERS) * size:
            return ""
        if self._is_halved and (self.cause == COUPLING or not _is_divided(pairs, counts)):
            return ""
        what = "divides by something else than the number of targets that are counted"
        if self.cause == COUPLING:
            what = "of a token depends on other tokens, in a segment on others than in the whole sequence"
        elif self._count is None:
            what = 'is not the sum over targets that Loss(reduction="sum") takes it for'
        return f"{what}: the gradient of its segments together is {off / size:.1%} off that of the whole"

    def _joined(self, values: Sequence[Any]) -> Any:
        every = zip(*map(tensors_of, values), strict=True)
        whole = iter([torch.cat(same, self._dim) if same[0].dim() > self._dim else same[0] for same in every])
        return mapped(values[0], lambda _: next(whole))


def look_of(step: Weighting) -> LossLook | None:
    """Returns the check of the loss for the first step of a shape; None if there is nothing to compare."""
    options = step.options
    if options.head is not None:
        return None
    every = {m: _looked_at(step, m) for m in range(len(step.rows))}
    found = {m: sizes for m, sizes in every.items() if sum(map(len, sizes.values())) > 1}
    if is_halved := not found and step.batch.by_targets:
        some = {m: sizes for m, sizes in every.items() if sizes}
        found = {m: {s: (n // 2, n - n // 2) for s, (n,) in sizes.items()} for m, sizes in some.items()}
    if not found:
        return None
    m = max(found, key=lambda m: (max(map(len, found[m].values())), len(found[m])))  # most siblings, longest path
    return LossLook(m, found[m], step.count, options.seq_dim, is_halved)


def _looked_at(step: Weighting, m: int) -> dict[int, Sequence[int]]:
    """Returns the tokens of the parts of a micro-batch's segments whose losses must add up to the whole loss.

    In a tree, the segments are one with siblings, or the longest path.
    """
    first = sum(map(len, step.rows[:m]))
    counted = [s for s in range(len(step.rows[m])) if step.shares[first + s] > 0.0]
    trees, num_parts = step.arguments.trees, step.options.sequence_parallel[1]
    if trees is None:
        return {s: (step.rows[m][s] // num_parts,) for s in counted}
    paths = list[list[int]]()
    for s, parent in enumerate(trees.parents[m]):
        paths.append([*(paths[parent] if parent >= 0 else ()), *([s] if s in counted else ())])
    siblings = [[s] for s in counted if len(trees.parts[m][s]) > 1]
    return {s: trees.parts[m][s] for s in (siblings or sorted(paths, key=len))[-1]}


def _scaled(tensor: Tensor) -> Tensor:
    """Returns a leaf whose elements are scaled by different factors in 0.7..1: a probability stays a probability."""
    if not tensor.is_floating_point():
        return tensor
    numbers = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)
    return (tensor * (1.0 - 0.3 * (numbers * 0.6180339887 % 1.0)).to(tensor.dtype)).requires_grad_()


def _is_divided(pairs: Sequence[tuple[Tensor, Tensor]], counts: Sequence[float]) -> bool:
    """Returns whether a wrong divisor explains the difference: one factor per part; factors add up or are alike."""
    factors = [float((a * b).sum() / a.square().sum().clamp(min=1e-30)) for a, b in pairs]  # NaN: loss without targets
    rest = max(float((b - f * a).norm() / b.norm()) for f, (a, b) in zip(factors, pairs, strict=True))
    divisors = [factor * count / sum(counts) for factor, count in zip(factors, counts, strict=True)]
    unlike = min(abs(sum(divisors) - 1.0), max(divisors) - min(divisors))
    return not (rest > _DIFFERS or unlike > _DIFFERS)
