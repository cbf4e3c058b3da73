"""Looks at a loss in the first step of a shape: do its segments, weighted as they are, make the loss of the whole?

They do if the loss divides by what the engine counts. Its value says little, because an untrained model's is the same
for every token; so the gradients of a few tokens' outputs are compared, of which a wrong divisor changes each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seq1f1b.runtime.model_state import RandomState, uncompiled
from seq1f1b.runtime.nested import mapped, tensors_of

__all__: list[str] = []

_MOST = 1 << 20  # elements of the outputs that are compared: 4 MiB in float32
_LEAST_TOKENS = 8  # of each segment
_SHARE = 8  # all tokens together are so small a part of a segment: the head may be in the loss, and logits are large
_DIFFERS, _DIFFERS_NARROW = 1e-3, 5e-2  # relative; in float32, and where anything is computed in 16 bits


class LossLook:
    """The segments of one micro-batch, as they come; a few tokens of each.

    Args:
        microbatch: whose segments it takes.
        count: counts one segment's targets; None: segments are summed.
        dim: the sequence dimension.
        num_parts: segments that will come.
        num_token_parts: among which the tokens of a segment are shared.
    """

    def __init__(
        self, microbatch: int, count: Callable[[Any], float] | None, dim: int, num_parts: int, num_token_parts: int
    ) -> None:
        self.microbatch = microbatch
        self._count, self._dim, self._num_parts, self._num_token_parts = count, dim, num_parts, num_token_parts
        self._parts: list[tuple[Any, Any]] = []  # outputs and targets
        self._is_believed = False

    def take(self, output: Any, target: Any, length: int, leaves: bool) -> bool:
        """Keeps a copy of some of a segment's tokens. Returns whether all segments have come.

        Args:
            leaves: the loss carries state from segment to segment, or runs a backward itself. It is believed, and not
                called again; nor is one whose input has no tokens.
        """
        length //= self._num_token_parts
        tensors = tensors_of(output)
        has_tokens = any(t.dim() > self._dim and t.shape[self._dim] == length for t in tensors)
        self._is_believed |= leaves or not has_tokens or any(t.is_meta for t in tensors)
        if self._is_believed:
            return False
        elements = sum(t.numel() for t in tensors)
        share = min(length * _MOST // max(1, elements), length // _SHARE) // self._num_parts
        tokens = max(_LEAST_TOKENS, share)
        with torch.no_grad():
            rows = torch.linspace(0, length - 1, min(length, tokens), dtype=torch.float64, device="cpu").long()

            def some(tensor: Tensor) -> Tensor:
                if tensor.dim() <= self._dim or tensor.shape[self._dim] != length:
                    return tensor.detach()
                return tensor.detach().index_select(self._dim, rows.to(tensor.device))

            self._parts.append((mapped(output, some), mapped(target, some)))
        return len(self._parts) == self._num_parts

    def difference(self, loss_fn: Callable[..., Any], kwargs: Mapping[str, Any], device: torch.device) -> str:
        """Compares the gradient of the parts with that of the whole; says in words what is wrong, or returns "".

        Nothing can be compared if the loss draws random numbers or does not take fewer tokens.
        """
        state = RandomState(device)
        try:
            with torch.enable_grad(), uncompiled():
                found = self._compare(loss_fn, kwargs)
            return "" if found is None or not state.is_current() else found
        except Exception:  # of a loss that does not take other lengths, say: a look must not end a right step
            return ""
        finally:
            state.restore()

    def _compare(self, loss_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
        parts = self._parts if len(self._parts) > 1 else self._halves()
        counts = [1.0 if self._count is None else float(self._count(target)) for _, target in parts]
        parts = [part for part, count in zip(parts, counts, strict=True) if count > 0.0]
        counts = [count for count in counts if count > 0.0]
        if len(parts) < 2:
            return None
        total = 1.0 if self._count is None else sum(counts)
        leaves = [mapped(output, lambda t: t.clone().requires_grad_(t.is_floating_point())) for output, _ in parts]
        flat = [[t for t in tensors_of(leaf) if t.requires_grad] for leaf in leaves]
        every = [t for each in flat for t in each]

        def gradients(loss: Tensor, of: Sequence[Tensor]) -> Sequence[Tensor | None]:
            with torch.autocast(every[0].device.type, enabled=False):  # as every backward
                return torch.autograd.grad(loss, of, allow_unused=True)

        apart: list[Tensor | None] = []  # what one part saves is gone before the next
        for leaf, own, (_, target), count in zip(leaves, flat, parts, counts, strict=True):
            apart += gradients(loss_fn(leaf, target, **kwargs) * (count / total), own)
        joined = self._joined([target for _, target in parts])
        together = gradients(loss_fn(self._joined(leaves), joined, **kwargs), every)
        pairs = [(a, b) for a, b in zip(apart, together, strict=True) if a is not None and b is not None]
        size = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
        distance = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5
        narrow = torch.is_autocast_enabled(every[0].device.type) or any(t.dtype.itemsize < 4 for t in every)
        if not size > 0.0 or distance <= (_DIFFERS_NARROW if narrow else _DIFFERS) * size:
            return None
        what = (
            'is not the sum over targets that Loss(reduction="sum") takes it for'
            if self._count is None
            else "divides by something else than the number of targets that are counted"
        )
        return f"{what}: the gradient of its segments together is {distance / size:.1%} off that of the whole"

    def _halves(self) -> list[tuple[Any, Any]]:
        """Two parts of the only segment."""
        output, target = self._parts[0]
        length = next(t.shape[self._dim] for t in tensors_of(output) if t.dim() > self._dim)

        def half(first: bool) -> Callable[[Tensor], Tensor]:
            def cut(tensor: Tensor) -> Tensor:
                if tensor.dim() <= self._dim or tensor.shape[self._dim] != length:
                    return tensor
                return tensor.tensor_split([length // 2], self._dim)[0 if first else 1]

            return cut

        return [(mapped(output, half(first)), mapped(target, half(first))) for first in (True, False)]

    def _joined(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            return torch.cat(list(values), self._dim) if first.dim() > self._dim else first
        if isinstance(first, (tuple, list)):
            return type(first)(self._joined([value[i] for value in values]) for i in range(len(first)))
        if isinstance(first, dict):
            return {key: self._joined([value[key] for value in values]) for key in first}
        return first


def choose_microbatch(targets: Sequence[Any], shares: Sequence[Sequence[float]], *, least: int) -> int:
    """The micro-batch whose targets have the fewest values: a mask or padding is likeliest there. -1: none.

    Args:
        least: segments with targets that it must have.
    """
    found = [m for m, row in enumerate(shares) if sum(share > 0.0 for share in row) >= least]
    return min(found, key=lambda m: sum(map(_count_values, tensors_of(targets[m]))), default=-1)


def _count_values(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    flat = tensor.detach().reshape(-1)
    return len(torch.unique(flat[:: max(1, flat.numel() // 4096)]))
