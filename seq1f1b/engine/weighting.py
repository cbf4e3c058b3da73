"""Weights of segments' losses in the losses of whole micro-batches, and in their gradients.

A mean over a micro-batch's counted targets is the sum over its segments of (segment's share) x (segment's mean). The
share enters as the seed of the backward, so the graph is that of the plain loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from seq1f1b.attention.unit import LiveUnit
from seq1f1b.documents.rows import Rows
from seq1f1b.engine.batch import Batch, part_sizes, split_sequence
from seq1f1b.nested import tensors_of

__all__: list[str] = []

IGNORED = -100  # torch's ignore_index


class Weighting:
    """Weights of the losses of a step's segments, by the engine's options and the step's arguments.

    A micro-batch's loss is the sum of share x loss over segments. Gradients are of the sum of weight x loss over
    micro-batches. So the backward of a segment starts with the product of share and weight.
    """

    scale: Tensor  # the shares on the device, float64
    seeds: Tensor  # by cell, with which backwards start, float64 on the device; for losses without a divisor
    sum_seed: float  # with which backwards start, for losses with a divisor; :meth:`factor` divides

    def __init__(self, batch: Batch, device: torch.device) -> None:
        options = batch.options
        self.batch, self.rows, self.options, self._device = batch, batch.rows, options, device
        self.arguments = batch.arguments
        self._totals: list[float] = []  # targets of the micro-batches, if losses are means
        self.shares = list[float]()  # by cell, the segment's share in the micro-batch's loss; set by :meth:`weigh`
        self.counts = list[float]()  # by cell, targets of a mean; 1.0 for losses that are added without weights
        self._counter = options.loss.weight if callable(options.loss.weight) else None  # the caller's
        # Counts the targets of any piece of a sequence; None: losses are added without weights.
        self.count = None if options.loss.reduction == "sum" else self._counter or count_default
        # Weights of micro-batches: equal, until :meth:`weigh` or another rank sets weights by targets.
        alike = batch.arguments.gradient_scale / (len(self.rows) if options.loss.scale_grads else 1.0)
        self.weights = [alike] * len(self.rows)

    def auxiliary_seeds(self, unit: LiveUnit) -> tuple[float, float]:
        """Returns the gradients of an auxiliary loss of a unit's segment, and of its micro-batch's whole sequence."""
        weight, row = self.weights[unit.microbatch], self.rows[unit.microbatch]
        if self.options.loss.reduction == "sum":
            return (weight * self.options.sequence_parallel[1],) * 2
        return weight * row[unit.segment] / sum(row), weight

    def weigh(self, last: Any) -> None:
        """Sets the shares of the rank's segments, the weights of micro-batches, and the seeds of backwards.

        If n ranks share the tokens of segments, shares are n times as large, because the loss is the mean over the n
        ranks.
        """
        options, arguments = self.options, self.arguments
        rank, num_parts = options.sequence_parallel
        if options.loss.reduction == "sum" or (arguments.divides and self._counter is None):  # nothing is weighed
            totals = [1.0] * len(self.rows)
            self.counts = [1.0] * sum(map(len, self.rows))
            self.shares = [float(num_parts)] * len(self.counts)
        else:
            pieces = [part_sizes(row, options.sequence_parallel) for row in self.rows]
            every = self._count_targets(pieces)
            totals = self._totals = [sum(row) for row in every]
            for row, own in zip(every, totals, strict=True):
                self.counts += row[rank::num_parts]
                self.shares += [num_parts * (count / own if own else 0.0) for count in row[rank::num_parts]]
        total, scale = arguments.loss_weight, arguments.gradient_scale
        self.sum_seed = scale
        if total is not None:
            scale *= last.wrappers[0].divisor / num_parts if last.wrappers else 1.0
            self.sum_seed = scale * num_parts / total
        elif self.batch.by_targets:
            total = sum(totals)
            if options.loss.weight == "targets" and arguments.training and last.wrappers:
                # The sum over n ranks per replica has each target n times, and the shares are n times as large.
                scale *= last.wrappers[0].divisor
                total = last.wrappers[0].sum(total, self._device)
            total = total or 1.0
        if total is not None:
            self.weights = [scale * own / total for own in totals]
        by_cell = chain.from_iterable([weight] * len(row) for weight, row in zip(self.weights, self.rows, strict=True))
        seeds = [share * weight for share, weight in zip(self.shares, by_cell, strict=True)]
        on_host = torch.tensor([seeds, self.shares], dtype=torch.float64, device="cpu")
        self.seeds, self.scale = on_host.to(self._device, non_blocking=True).unbind()  # the host waits for nothing

    def _count_targets(self, rows: Rows) -> list[list[float]]:
        """Counts the targets of each [micro-batch][segment]: elements other than -100, or by the caller's count.

        Args:
            rows: tokens of each segment, or of each part of each segment, of every micro-batch.
        """
        count, dim, asked = self._counter, self.options.seq_dim, list[Any]()
        for m, (target, sizes) in enumerate(zip(self.batch.target, rows, strict=True)):
            first: Any = next(iter(tensors_of(target)), None)
            if count is not None:
                cut = [target] if len(sizes) == 1 else split_sequence(target, sizes, dim, f"target of micro-batch {m}")
                asked += map(count, cut)
            elif first is None and len(sizes) > 1:
                raise TypeError(
                    f"target is a {type(target).__name__}: give the engine loss=Loss(weight=...), a callable that "
                    "counts it"
                )
            elif first is None or first.is_floating_point():
                asked += [1.0] if first is None else map(float, sizes)
            else:
                counted = [first != IGNORED] if len(sizes) == 1 else (first != IGNORED).split(list(sizes), dim)
                asked.append(torch.stack([part.sum() for part in counted]))
        found: list[list[float]] = []
        self.batch.read.ask(asked, found.extend)
        self.batch.read.read()
        numbers = iter(found if count is not None else [[number] for several in found for number in several])
        counts = [[next(numbers) for _ in sizes] for sizes in rows]
        for m, segments in enumerate(counts):
            for s, value in enumerate(segments):
                if len(value) != 1 or not value[0] >= 0.0:
                    text = ", ".join(map(str, value))
                    raise ValueError(
                        f"Loss.weight of micro-batch {m}, segment {s} is {text}, must be at least 0, and one number"
                    )
        return [[value for (value,) in segments] for segments in counts]

    def factor(self, last: Any, divisors: Mapping[int, float]) -> float:
        """Returns the factor for gradients of sums, once all segments' divisors are known. Collective over replicas."""
        if self.arguments.loss_weight is not None:
            return 1.0
        total, divisor = sum_divisors(divisors.values()), 1.0
        if last.wrappers:
            total, divisor = last.wrappers[0].sum(total, self._device), last.wrappers[0].divisor
        elif self.options.sequence_parallel[1] > 1:
            raise ValueError(
                "loss_fn returned its sum and its divisor; with sequence_parallel= the ranks of DDP or FSDP2 add up "
                "sums and divisors: put the stage under DDP or FSDP2"
            )
        if not total:
            last.findings.say("the divisors that loss_fn returned in this step are all 0: gradients stay as they were")
        return divisor / total if total else 0.0

    def divided(self, losses: dict[int, Tensor], divisors: Mapping[int, float]) -> list[Tensor]:
        """Returns losses of the M micro-batches from sums and divisors of segments (by cell); 0 for a divisor of 0."""
        found, cells = [], iter(range(sum(map(len, self.rows))))
        for row in self.rows:
            own = list(islice(cells, len(row)))
            total = torch.stack([losses[i].reshape(()) for i in own]).sum()
            divisor = sum_divisors(divisors[i] for i in own)
            found.append(total / divisor if divisor else torch.zeros_like(total))
        return found

    def combined(self, losses: dict[int, Tensor]) -> list[Tensor]:
        """Joins losses of segments (by cell) to losses of the M micro-batches; zero without counted targets."""
        counts = list(map(len, self.rows))
        zero = torch.zeros_like(next(iter(losses.values()))) if losses else torch.zeros((), device=self.scale.device)
        values = torch.stack([losses.get(i, zero).reshape(()) for i in range(sum(counts))])
        values = values * self.scale.to(values.dtype)
        if min(counts) == max(counts):
            return list(values.view(len(counts), -1).sum(1).unbind())
        return [part.sum() for part in torch.split(values, counts)]

    def tell_of_counts(self, last: Any) -> None:
        """Warns of means over unlike numbers of targets, for losses without a divisor."""
        options, arguments, counts = self.options, self.arguments, self._totals
        says_nothing = options.loss.weight is None and arguments.loss_weight is None and options.loss.scale_grads
        if not counts:
            return
        if not sum(counts):
            last.findings.say(
                "no target of this step is counted, all are -100 or have the weight 0: losses are 0, and gradients "
                "stay as they were"
            )
        elif arguments.training and len(set(counts)) > 1 and says_nothing and not self.batch.by_targets:
            last.findings.say(
                f"micro-batches count different numbers of targets, {min(counts):g} to {max(counts):g}, and the loss "
                "is the mean of their means, in which a target among few weighs more. Give the engine "
                'loss=Loss(weight="targets") for the mean over all targets, or "microbatches" if this is meant'
            )


def count_default(target: Any) -> float:
    """Returns the number of targets in any piece of a sequence: elements other than -100."""
    target = next(iter(tensors_of(target)), None)
    if target is None:
        return 1.0
    return float(target.numel() if target.is_floating_point() else (target != IGNORED).sum())


def sum_divisors(divisors: Iterable[float]) -> float:
    """Returns the sum of the losses' divisors. Raises ValueError unless the sum is finite and at least 0."""
    total = math.fsum(divisors)
    if not 0.0 <= total < math.inf:
        raise ValueError(f"the divisors that loss_fn returned sum to {total}, must be finite and at least 0")
    return total


def shift_labels(tokens: Tensor, dim: int = 1, *, doc_ids: Tensor | None = None) -> Tensor:
    """Makes the targets of next-token prediction: position t gets token t + 1, the last position is ignored (-100).

    Shift before ``step``: a loss that shifts inside a segment silently drops the targets at the borders.

    Args:
        tokens: integer tensor, for example (batch, sequence).
        dim: the sequence dimension.
        doc_ids: ids of packed documents, in the shape of ``tokens``. The last token of each document is ignored, too,
            because the next document's first token follows it.
    """
    if tokens.is_floating_point() or tokens.dim() <= dim:
        raise ValueError(f"shift_labels needs an integer tensor with a dimension {dim}, got {tuple(tokens.shape)}")
    shifted = torch.full_like(tokens, IGNORED)
    length = tokens.size(dim)
    if doc_ids is not None and doc_ids.shape != tokens.shape:
        raise ValueError(f"doc_ids is {tuple(doc_ids.shape)}, must be of tokens' shape {tuple(tokens.shape)}")
    if length > 1:
        shifted.narrow(dim, 0, length - 1).copy_(tokens.narrow(dim, 1, length - 1))
        if doc_ids is not None:
            ends = doc_ids.narrow(dim, 0, length - 1) != doc_ids.narrow(dim, 1, length - 1)
            shifted.narrow(dim, 0, length - 1).masked_fill_(ends, IGNORED)
    return shifted
