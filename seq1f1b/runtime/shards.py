"""What a shard of a vocabulary does in one step: passes S and T of the output layer, E and G of the input embedding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from seq1f1b.runtime.data_parallel import data_parallel
from seq1f1b.runtime.vocabulary import embedding_of, head_of
from seq1f1b.schedule import Unit

__all__: list[str] = []

Received: TypeAlias = "tuple[tuple[Sequence[Any], Sequence[bool]], ...] | None"  # as in stage.py


class _Replicas:
    """A module in one step, perhaps under DDP or FSDP2: its gradients are reduced once, in its last backward."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._parallel = module, data_parallel(module)
        if self._parallel is not None:
            self._parallel.begin_step()

    def forward(self, x: Tensor) -> Tensor:
        with self._parallel.forward() if self._parallel is not None else nullcontext():
            output: Tensor = self._module(x)
        return output

    def backward(self, output: Tensor, gradient: Tensor, is_last: bool) -> None:
        with self._parallel.backward(is_last, (output,)) if self._parallel is not None else nullcontext():
            torch.autograd.backward(output, gradient)

    def end_step(self) -> None:
        if self._parallel is not None:
            self._parallel.end_step()


class _ShardStep:
    """A shard in one step.

    Args:
        module: the shard, as it was given to the engine.
        first_cells: of the order (:attr:`seq1f1b.Schedule.first_cells`).
        order: this rank's units.
        last_pass: in whose last unit gradients are reduced.
    """

    def __init__(self, module: nn.Module, first_cells: Sequence[int], order: Sequence[Unit], last_pass: str) -> None:
        self._replicas, self._first_cells = _Replicas(module), first_cells
        self._last = next((self._key(u.microbatch, u.segment) for u in reversed(order) if u.kind == last_pass), -1)

    def _key(self, m: int, s: int) -> int:
        return self._first_cells[m] + s

    def end(self) -> None:
        self._replicas.end_step()


def _by_rank(mine: Any, rank: int, received: Received) -> list[Any]:
    """Messages of all ranks: those that came, in the order of ranks, and this one's own."""
    found = [] if received is None else [tensors for tensors, _ in received]
    found.insert(rank, mine)
    return found


@dataclass
class _Cell:
    """What S of a segment leaves to T."""

    hidden: Tensor
    logits: Tensor
    target: Tensor
    scale: Tensor
    statistics: Tensor


class HeadStep(_ShardStep):
    """This rank's shard of the output layer in one step: passes S and T.

    Args:
        loss_fn: the shard, as it was given to the engine.
        last_rank: the rank of the last stage.
        is_mean: the loss is a mean over targets, not their sum.
        first_cells: of the order (:attr:`seq1f1b.Schedule.first_cells`).
        order: this rank's units.
    """

    def __init__(
        self,
        loss_fn: nn.Module,
        last_rank: int,
        *,
        first_cells: Sequence[int],
        training: bool,
        is_mean: bool,
        order: Sequence[Unit],
    ) -> None:
        super().__init__(loss_fn, first_cells, order, "T")
        head = head_of(loss_fn)
        assert head is not None
        self._head, self._training, self._is_mean = head, training, is_mean
        self._is_on_last = head.rank == last_rank
        self._cells: dict[int, _Cell] = {}
        self._handed: dict[int, tuple[Tensor, ...]] = {}  # from the last stage to S, on its own rank
        self._gradients: dict[int, Tensor | None] = {}  # from T to the last stage, the same
        self.losses: dict[int, Tensor] = {}  # by cell, on the rank of the last stage
        self.peak_bytes = 0  # of logits between S and T

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
        logits = self._replicas.forward(hidden)
        with torch.no_grad():
            found = self._head.statistics(logits.detach(), target)
        self._cells[key] = _Cell(hidden, logits, target, scale, found)
        held = sum(cell.logits.numel() * cell.logits.element_size() for cell in self._cells.values())
        self.peak_bytes = max(self.peak_bytes, held)
        return (found,)

    def loss(self, m: int, s: int, received: Received) -> tuple[Tensor | None, ...]:
        """T(m.s): the loss, on the rank of the last stage, and the gradients of this shard.

        Returns the shard's part of the hidden state's gradient.
        """
        key = self._key(m, s)
        cell = self._cells.pop(key)
        everyones = [tensors[0] for tensors in _by_rank((cell.statistics,), self._head.rank, received)]
        with torch.no_grad():
            found = self._head.combine(everyones)
            counted = (cell.target != self._head.ignore_index).reshape(-1)
            if self._is_on_last and bool(counted.any()):
                total = (self._head.token_losses(found) * counted).sum()
                self.losses[key] = total / counted.sum() if self._is_mean else total
            if not self._training:
                return (None,)
            gradient = self._head.logit_gradients(cell.logits, cell.target, cell.statistics, found, cell.scale)
        if cell.logits.requires_grad:
            self._replicas.backward(cell.logits, gradient, key == self._last)
        if self._is_on_last:
            self._gradients[key] = cell.hidden.grad
        return (cell.hidden.grad,)

    def hidden_gradient(self, m: int, s: int, received: Received) -> tuple[Tensor | None, ...]:
        """The gradient of the last stage's output: the shards' parts, summed in the order of ranks."""
        parts = _by_rank((self._gradients.pop(self._key(m, s)),), self._head.rank, received)
        present = [part for (part,) in parts if part is not None]
        if not present:
            return (None,)
        total = present[0].to(torch.promote_types(present[0].dtype, torch.float32), copy=True)
        for part in present[1:]:
            total += part
        return (total.to(present[0].dtype),)


class EmbeddingStep(_ShardStep):
    """This rank's shard of the input embedding in one step: passes E and G.

    Args:
        module: the shard, as it was given to the engine.
        first_cells: of the order (:attr:`seq1f1b.Schedule.first_cells`).
        order: this rank's units.
    """

    def __init__(self, module: nn.Module, *, first_cells: Sequence[int], training: bool, order: Sequence[Unit]) -> None:
        super().__init__(module, first_cells, order, "G")
        shard = embedding_of(module)
        assert shard is not None
        self._shard, self._training = shard, training
        self.inputs: Sequence[Sequence[tuple[Any, ...]]] = ()  # of the pipeline, by [micro-batch][segment]
        self._cells: dict[int, tuple[Tensor, Tensor]] = {}  # places and rows, from E to G
        self._handed: dict[int, Tensor | None] = {}  # gradients, from the first stage on its own rank

    def embed(self, m: int, s: int, received: Received) -> tuple[Tensor, ...]:
        """E(m.s): the tokens of this shard; returns their places among all tokens of the segment, and their rows."""
        given = self.inputs[m][s]
        tokens = given[0]
        if len(given) != 1 or not isinstance(tokens, Tensor) or tokens.is_floating_point():
            raise TypeError(
                "inputs must be one tensor of token numbers, (batch, tokens), where the embedding is spread"
            )
        outside = (tokens < 0) | (tokens >= self._shard.vocab)
        if bool(outside.any()):
            raise ValueError(f"inputs hold {int(tokens[outside][0])}, must be in 0..{self._shard.vocab - 1}")
        places, own = self._shard.find(tokens)
        rows = self._replicas.forward(own)
        if self._training or self._shard.rank == 0:  # which holds the first stage
            self._cells[self._key(m, s)] = places, rows
        return places, rows

    def embedded(self, m: int, s: int, received: Received) -> Tensor:
        """What the first stage gets: the rows of all shards in their places."""
        key, tokens = self._key(m, s), self.inputs[m][s][0]
        own = self._cells[key] if self._training else self._cells.pop(key)
        found = own[1].new_empty(tokens.numel(), own[1].shape[1])
        for places, rows in _by_rank(own, self._shard.rank, received):
            found[places] = rows.detach()
        trains = own[1].requires_grad or any(any(flags) for _, flags in received or ())
        return found.detach().view(*tokens.shape, -1).requires_grad_(trains and self._training)

    def hand(self, m: int, s: int, gradient: Tensor | None) -> None:
        """The gradient of what the first stage got, to G on its own rank."""
        self._handed[self._key(m, s)] = gradient

    def gradient(self, m: int, s: int, received: Received) -> None:
        """G(m.s): gradients of the rows of this shard."""
        key = self._key(m, s)
        gradient = self._handed.pop(key) if received is None else received[0][0][0]
        places, rows = self._cells.pop(key)
        if gradient is not None and rows.requires_grad:
            self._replicas.backward(rows, gradient.reshape(-1, gradient.shape[-1])[places], key == self._last)
