"""The output layer spread over the ranks: a loss that holds a shard of its rows, and the passes S and T of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seq1f1b.runtime.data_parallel import data_parallel, without_wrapper
from seq1f1b.schedule import Unit
from seq1f1b.transport import RankGroup

__all__ = ["VocabularyParallelHead"]

Received: TypeAlias = "tuple[tuple[Sequence[Any], Sequence[bool]], ...] | None"  # as in stage.py


class VocabularyParallelHead(nn.Module):
    """The output layer of a language model and its cross entropy, with a shard of the vocabulary on each rank.

    Every rank of a :class:`seq1f1b.PipelineEngine` gives its own as ``loss_fn``; the last stage returns the hidden
    state. Each rank then computes the logits of its rows for every segment, and the ranks exchange three or four
    numbers per token. So the last rank holds no more weights, optimizer state and logits than the others. The mean is
    over targets that are not ``ignore_index``, as in :func:`torch.nn.functional.cross_entropy`.

    Args:
        hidden, vocab: sizes of the hidden state and of the whole vocabulary; ranks hold its rows in order, the first
            ones a row more where the number of ranks does not divide it.
        rank, num_ranks: this shard and how many there are; default: those of the default process group, or 0 of 1.
        bias: whether the layer has one.
        name: of the layer in the unsplit model, for checkpoints: its parameters are ``head.weight`` and ``head.bias``.
        label_smoothing: as of ``cross_entropy``.
        z_loss: weight of the mean of squares of the logarithm of the softmax's denominator, added to the loss.
        ignore_index: targets that do not count. Another one than -100 needs the engine's ``loss_weight``, too.
        dtype, device: of the weight, (rows of the shard, hidden), and of the bias.
    Raises:
        ValueError: a number is out of range, or a shard would have no row.
    Source: vocabulary parallelism, arXiv:2411.05288.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        *,
        rank: int | None = None,
        num_ranks: int | None = None,
        bias: bool = False,
        name: str = "head",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int = -100,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        is_launched = dist.is_available() and dist.is_initialized()
        self.num_ranks = (dist.get_world_size() if is_launched else 1) if num_ranks is None else num_ranks
        self.rank = (dist.get_rank() if is_launched else 0) if rank is None else rank
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank is {self.rank}, must be in 0..{self.num_ranks - 1}")
        if vocab < self.num_ranks or hidden < 1:
            raise ValueError(f"a vocabulary of {vocab} rows of {hidden} has none for each of {self.num_ranks} ranks")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, must be in 0..1")
        if not z_loss >= 0.0:
            raise ValueError(f"z_loss is {z_loss}, must be at least 0")
        self.hidden, self.vocab = hidden, vocab
        self.label_smoothing, self.z_loss, self.ignore_index = label_smoothing, z_loss, ignore_index
        self.first_row = sum(self.shard_sizes[: self.rank])
        self.name = name
        self.add_module(name, nn.Linear(hidden, self.shard_sizes[self.rank], bias=bias, dtype=dtype, device=device))

    @property
    def shard_sizes(self) -> list[int]:
        """Rows of each rank."""
        base, more = divmod(self.vocab, self.num_ranks)
        return [base + (rank < more) for rank in range(self.num_ranks)]

    @property
    def linear(self) -> nn.Linear:
        """The rows of this shard."""
        linear = self.get_submodule(self.name)
        assert isinstance(linear, nn.Linear)
        return linear

    @property
    def rows(self) -> slice:
        """The rows of the whole weight that this shard holds."""
        return slice(self.first_row, self.first_row + self.linear.out_features)

    @property
    def row_shards(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Of each parameter the first row and the rows of the whole, for checkpoints."""
        return dict.fromkeys(self.linear.parameters(), (self.first_row, self.vocab))

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copies this shard's rows of the whole weight, (vocab, hidden), and of the bias, (vocab)."""
        if weight.shape != (self.vocab, self.hidden):
            raise ValueError(f"the weight is {tuple(weight.shape)}, must be {(self.vocab, self.hidden)}")
        self.linear.weight.copy_(weight[self.rows])
        if bias is not None:
            self.linear.bias.copy_(bias[self.rows])

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, vocab={self.vocab}, rank={self.rank} of {self.num_ranks}"

    @property
    def settings(self) -> str:
        """What must be the same on every rank."""
        return (
            f"VocabularyParallelHead({self.hidden}, {self.vocab}, label_smoothing={self.label_smoothing}, "
            f"z_loss={self.z_loss}, ignore_index={self.ignore_index})"
        )

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """The logits of this shard, (..., rows); with a target, and on one rank, the mean loss.

        Args:
            hidden: (..., hidden). target: (...), row numbers of the whole vocabulary, or ``ignore_index``.
        """
        logits: Tensor = self.linear(hidden)
        if target is None:
            return logits
        if self.num_ranks > 1:
            raise RuntimeError(
                "a shard of the vocabulary has no loss of its own: give it to PipelineEngine as loss_fn, on every rank"
            )
        losses = self.token_losses(self.combine([self.statistics(logits, target)]))
        counted = (target != self.ignore_index).reshape(-1)
        return (losses * counted).sum() / counted.sum()

    # -- the arithmetic of S and T

    def statistics(self, logits: Tensor, target: Tensor) -> Tensor:
        """What the other ranks need to know, (3 or 4, tokens).

        The maximum, the sum of exponentials, the target's logit, and, where labels are smoothed, the sum of logits.
        """
        flat = _wide(logits.reshape(-1, logits.shape[-1]))
        most = flat.max(1).values
        rows = [most, (flat - most[:, None]).exp_().sum(1), self._of_target(flat, target)]
        return torch.stack([*rows, flat.sum(1)] if self.label_smoothing else rows)

    def combine(self, everyones: Sequence[Tensor]) -> Statistics:
        """Those of all ranks, in their order: so each rank gets the same bits."""
        most = torch.stack([each[0] for each in everyones]).max(0).values
        denominator, of_target, total = torch.zeros_like(most), torch.zeros_like(most), torch.zeros_like(most)
        for each in everyones:
            denominator = denominator + each[1] * (each[0] - most).exp()
            of_target = of_target + each[2]
            if self.label_smoothing:
                total = total + each[3]
        return Statistics(most + denominator.log(), of_target, total)

    def token_losses(self, found: Statistics) -> Tensor:
        losses = found.log_sum - (1 - self.label_smoothing) * found.of_target
        if self.label_smoothing:
            losses = losses - self.label_smoothing / self.vocab * found.total
        return losses + self.z_loss * found.log_sum.square() if self.z_loss else losses

    def logit_gradients(self, logits: Tensor, target: Tensor, found: Statistics, scale: Tensor) -> Tensor:
        """Gradients of the logits of this shard; ``scale``: of one token's loss. Ignored targets have none."""
        flat = _wide(logits.detach().reshape(-1, logits.shape[-1]))
        gradient = (flat - found.log_sum[:, None]).exp_()
        if self.z_loss:
            gradient *= 1 + 2 * self.z_loss * found.log_sum[:, None]
        if self.label_smoothing:
            gradient -= self.label_smoothing / self.vocab
        index, is_here = self._row_of(target)
        gradient[is_here, index[is_here]] -= 1 - self.label_smoothing
        gradient *= ((target != self.ignore_index).reshape(-1) * scale.to(gradient.dtype))[:, None]
        return gradient.to(logits.dtype).view_as(logits)

    def _row_of(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this shard, and which targets are among them."""
        index = target.reshape(-1) - self.first_row
        return index, (index >= 0) & (index < self.linear.out_features) & (target.reshape(-1) != self.ignore_index)

    def _of_target(self, flat: Tensor, target: Tensor) -> Tensor:
        index, is_here = self._row_of(target)
        return flat.gather(1, index.clamp(0, flat.shape[1] - 1)[:, None])[:, 0] * is_here


@dataclass(frozen=True)
class Statistics:
    """Of all ranks' logits, by token: the logarithm of the softmax's denominator, the target's logit, the sum."""

    log_sum: Tensor
    of_target: Tensor
    total: Tensor


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def head_of(loss_fn: Any) -> VocabularyParallelHead | None:
    """The shard that an engine's ``loss_fn`` holds, under DDP or not; None for another loss."""
    inner = without_wrapper(loss_fn) if isinstance(loss_fn, nn.Module) else None
    return inner if isinstance(inner, VocabularyParallelHead) else None


@torch.no_grad()
def join_shards(head: VocabularyParallelHead, group: RankGroup, last_rank: int) -> dict[str, Tensor]:
    """The parameters of the whole layer on one rank; empty on the others. Collective."""
    rows = -(-head.vocab // head.num_ranks)  # of the largest shard
    others = [rank for rank in range(head.num_ranks) if rank != last_rank]
    found = {}
    for name, parameter in head.named_parameters():
        padded = parameter.new_zeros(rows, *parameter.shape[1:])
        padded[: len(parameter)] = parameter
        if head.rank != last_rank:
            group.exchange(padded, [last_rank], [], padded)
            continue
        shards = group.exchange(padded, [], others, padded)
        found[name] = torch.cat([shards[rank][:count] for rank, count in enumerate(head.shard_sizes)])
    return found


@dataclass
class _Cell:
    """What S of a segment leaves to T."""

    hidden: Tensor
    logits: Tensor
    target: Tensor
    scale: Tensor
    statistics: Tensor


class ShardStep:
    """This rank's part of the output layer in one step: passes S and T.

    Args:
        loss_fn: the shard, as it was given to the engine.
        last_rank: the rank of the last stage.
        is_mean: the loss is a mean over targets, not their sum.
        order: this rank's units.
    """

    def __init__(
        self,
        loss_fn: nn.Module,
        last_rank: int,
        *,
        num_segments: int,
        training: bool,
        is_mean: bool,
        order: Sequence[Unit],
    ) -> None:
        head = head_of(loss_fn)
        assert head is not None
        self._module, self._head, self._parallel = loss_fn, head, data_parallel(loss_fn)
        self._num_segments, self._training, self._is_mean = num_segments, training, is_mean
        self._is_on_last = head.rank == last_rank
        self._cells: dict[int, _Cell] = {}
        self._handed: dict[int, tuple[Tensor, ...]] = {}  # from the last stage to S, on its own rank
        self._gradients: dict[int, Tensor | None] = {}  # from T to the last stage, the same
        self.losses: dict[int, Tensor] = {}  # by m k + s, on the rank of the last stage
        self._last = next((self._key(u.microbatch, u.segment) for u in reversed(order) if u.kind == "T"), -1)
        if self._parallel is not None:
            self._parallel.begin_step()

    def _key(self, m: int, s: int) -> int:
        return m * self._num_segments + s

    def message(
        self, m: int, s: int, outputs: Sequence[Tensor], target: Any, seed: Tensor | None
    ) -> tuple[Tensor, ...]:
        """What F of the last stage sends to every shard: its output, the targets, the gradient of a token's loss."""
        hidden = outputs[0]
        if len(outputs) > 1 or hidden.dim() < 2 or hidden.shape[-1] != self._head.hidden:
            raise ValueError(
                f"the last stage must return the hidden state, (..., {self._head.hidden}), for a vocabulary over the "
                f"ranks; it returned {', '.join(str(tuple(each.shape)) for each in outputs)}"
            )
        shape = hidden.shape[:-1]
        if target is None:
            target = torch.full(shape, self._head.ignore_index, device=hidden.device)
        if not isinstance(target, Tensor) or target.shape != shape or target.is_floating_point():
            what = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(f"the target is {what}, must be whole numbers of the shape {tuple(shape)}")
        counted = target != self._head.ignore_index
        outside = counted & ((target < 0) | (target >= self._head.vocab))
        if bool(outside.any()):
            raise ValueError(f"the target holds {int(target[outside][0])}, must be in 0..{self._head.vocab - 1}")
        scale = torch.zeros(1, dtype=torch.float64, device=hidden.device)
        if seed is not None:
            scale = (seed / counted.sum().clamp(min=1) if self._is_mean else seed).reshape(1).double()
        found = hidden, target.long().contiguous(), scale
        self._handed[self._key(m, s)] = (hidden.detach().requires_grad_(hidden.requires_grad), *found[1:])
        return found

    def statistics(self, m: int, s: int, received: Received) -> tuple[Tensor, ...]:
        """S(m.s): the logits of this shard; returns what the others need to know of them."""
        key = self._key(m, s)
        if received is not None:
            (hidden, target, scale), (requires_grad, *_) = received[0]
            hidden = hidden.detach().requires_grad_(bool(requires_grad) and self._training)
        else:
            hidden, target, scale = self._handed.pop(key)
        with self._parallel.forward() if self._parallel is not None else nullcontext():
            logits = self._module(hidden)
        with torch.no_grad():
            found = self._head.statistics(logits.detach(), target)
        self._cells[key] = _Cell(hidden, logits, target, scale, found)
        return (found,)

    def loss(self, m: int, s: int, received: Received) -> tuple[Tensor | None, ...]:
        """T(m.s): the loss, on the rank of the last stage, and the gradients of this shard.

        Returns the shard's part of the hidden state's gradient.
        """
        key = self._key(m, s)
        cell = self._cells.pop(key)
        everyones = [] if received is None else [tensors[0] for tensors, _ in received]
        everyones.insert(self._head.rank, cell.statistics)
        with torch.no_grad():
            found = self._head.combine(everyones)
            counted = (cell.target != self._head.ignore_index).reshape(-1)
            if self._is_on_last and bool(counted.any()):
                total = (self._head.token_losses(found) * counted).sum()
                self.losses[key] = total / counted.sum() if self._is_mean else total
            if not self._training:
                return (None,)
            gradient = self._head.logit_gradients(cell.logits, cell.target, found, cell.scale)
        if cell.logits.requires_grad:
            parallel, is_last = self._parallel, key == self._last
            with parallel.backward(is_last, (cell.logits,)) if parallel is not None else nullcontext():
                torch.autograd.backward(cell.logits, gradient)
        if self._is_on_last:
            self._gradients[key] = cell.hidden.grad
        return (cell.hidden.grad,)

    def hidden_gradient(self, m: int, s: int, received: Received) -> tuple[Tensor | None, ...]:
        """The gradient of the last stage's output: the shards' parts, summed in the order of ranks."""
        parts = [] if received is None else [tensors[0] for tensors, _ in received]
        parts.insert(self._head.rank, self._gradients.pop(self._key(m, s)))
        present = [part for part in parts if part is not None]
        if not present:
            return (None,)
        total = present[0].to(torch.promote_types(present[0].dtype, torch.float32), copy=True)
        for part in present[1:]:
            total += part
        return (total.to(present[0].dtype),)

    def end(self) -> None:
        if self._parallel is not None:
            self._parallel.end_step()
