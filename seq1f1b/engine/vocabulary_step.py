"""Shards of a vocabulary in one step: passes S and T of the output layer, E and G of the input embedding.

The last stage's outputs go to the shards of all ranks, and the first stage's inputs come from the shards of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine.batch import StepRead
from seq1f1b.engine.features import Pass, Received
from seq1f1b.engine.pipeline import Pipeline
from seq1f1b.engine.stage import Source, StageStep, ToStage, detached
from seq1f1b.engine.vocabulary import Statistics, VocabularyParallelEmbedding, VocabularyParallelHead, VocabularyShard
from seq1f1b.engine.weighting import Weighting

__all__: list[str] = []


class _ShardStep:
    """A shard in one step; under DDP or FSDP2, gradients are reduced once, in the last backward.

    Args:
        module: the shard, as given to the engine.
        last: the cell of the rank's last T or G, for the reduction of gradients; -1: no T or G.
    """

    def __init__(self, module: Any, pipeline: Pipeline, last: int, training: bool) -> None:
        self._module, self._last, self._training = module, last, training
        self._parallel = pipeline.parallels.get(id(module))

    def _backward(self, output: Tensor, gradient: Tensor, cell: int) -> None:
        is_last = cell == self._last
        with self._parallel.backward(is_last, (output,)) if self._parallel is not None else nullcontext():
            torch.autograd.backward(output, gradient)


def _by_rank(mine: Any, rank: int, received: Received) -> list[Any]:
    found = [] if received is None else [tensors for tensors, _ in received]
    found.insert(rank, mine)
    return found


def _check_range(what: str, numbers: Sequence[Tensor], shard: VocabularyShard, read: StepRead) -> None:
    """Requests a check that all numbers are rows of the vocabulary; the check raises ValueError."""

    def take(found: list[list[float]]) -> None:
        for number in chain.from_iterable(found):
            if not 0 <= number < shard.vocab:
                raise ValueError(f"{what} {int(number)}, must be in 0..{shard.vocab - 1}")

    read.ask([torch.stack(each.aminmax()) for each in numbers], take)


class HeadStep(_ShardStep):
    """The rank's shard of the output layer in one step: passes S and T."""

    def __init__(self, head: VocabularyParallelHead, pipeline: Pipeline, last: int, training: bool) -> None:
        super().__init__(pipeline.options.loss_fn, pipeline, last, training)
        self.head, self._is_on_last = head, pipeline.has_last
        self._is_mean = pipeline.options.loss.reduction == "mean"  # over targets, not their sum
        self._kept: dict[int, tuple[Any, ...]] = {}  # from S to T, by cell: hidden state, logits, target and more
        self.handed: dict[int, tuple[Tensor, ...]] = {}  # from the last stage to S, on its own rank
        self.gradients: dict[int, Tensor | None] = {}  # from T to the last stage, on its own rank
        # On the rank of the last stage, by cell: losses; with token_loss, losses of tokens, and the number of targets
        # that their mean is over.
        self.losses: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.counts: dict[int, float] = {}
        self.peak_bytes = 0  # most bytes of logits held between S and T

    def passes(self) -> dict[str, Pass]:
        return {"S": self.statistics, "T": self.loss}

    def check(self, targets: Sequence[Any], read: StepRead) -> None:
        """Requests a check that targets of all micro-batches are in the vocabulary."""
        every = [self.head.read_target(target)[0] for target in targets]
        whole = [labels for labels in every if isinstance(labels, Tensor) and not labels.is_floating_point()]
        counted = [labels.masked_fill(labels == self.head.ignore_index, 0) for labels in whole]
        _check_range("the target holds", counted, self.head, read)

    def divisor(self, target: Tensor, count: float) -> Tensor | float:
        """Returns the divisor of the sum over a segment's tokens; ``count``: counted targets, for a loss of tokens."""
        if self.head.token_loss is not None:
            return count or 1.0
        return (target != self.head.ignore_index).sum().clamp(min=1) if self._is_mean else 1.0

    def statistics(self, cell: int, received: Received) -> tuple[Tensor, ...]:
        """S(m.s): computes the shard's logits; returns statistics of the logits for all ranks."""
        if received is not None:
            (hidden, target, scale, *more), (requires_grad, *_) = received[0]
            hidden = hidden.detach().requires_grad_(bool(requires_grad) and self._training)
        else:
            hidden, target, scale, *more = self.handed.pop(cell)
        named = [value if value.numel() else None for value in more]
        logits = self._module(hidden)
        with torch.no_grad():
            found = self.head.statistics(logits.detach(), target)
        self._kept[cell] = hidden, logits, target, scale, named, found
        held = sum(kept.numel() * kept.element_size() for _, kept, *_ in self._kept.values())
        self.peak_bytes = max(self.peak_bytes, held)
        return (found,)

    def loss(self, cell: int, received: Received) -> tuple[Tensor | None, ...]:
        """T(m.s): makes the loss, on the rank of the last stage, and the shard's gradients.

        Returns the shard's summand of the hidden state's gradient.
        """
        hidden, logits, target, scale, more, statistics = self._kept.pop(cell)
        everyones = [tensors[0] for tensors in _by_rank((statistics,), self.head.rank, received)]
        with torch.no_grad():
            found = self.head.combine(everyones)
            if self.head.token_loss is not None:
                scale = self._of_tokens(cell, target, scale, more, found)
            elif self._is_on_last:
                counted = (target != self.head.ignore_index).reshape(-1)
                self.losses[cell] = (self.head.token_losses(found) * counted).sum() / self.divisor(target, 1.0)
            if not self._training:
                return (None,)
            gradient = self.head.logit_gradients(logits, target, statistics, found, scale)
        if logits.requires_grad:
            self._backward(logits, gradient, cell)
        if self._is_on_last:
            self.gradients[cell] = hidden.grad
        return (hidden.grad,)

    def _of_tokens(
        self, cell: int, labels: Tensor, scale: Tensor, more: list[Tensor | None], found: Statistics
    ) -> Tensor:
        """Stores losses of tokens, 0 if no target counts; returns the gradients of the tokens' cross entropies."""
        if not self._training and cell not in self.counts:
            return scale
        head = self.head
        with torch.set_grad_enabled(self._training):
            log_probs = head.log_probs(found, labels).requires_grad_(self._training)
            values = head.losses_of_tokens(log_probs, labels, more)
        if self._is_on_last:
            self.values[cell] = values.detach() if self.counts[cell] else torch.zeros_like(values)
        if not self._training:
            return scale
        if not values.requires_grad:
            raise ValueError("token_loss returned values that do not require grad, its log-probabilities do")
        (gradient,) = torch.autograd.grad(values, log_probs, torch.ones_like(values))
        counts = (labels != head.ignore_index) & (scale != 0)
        return torch.where(counts, -gradient * scale, 0.0).reshape(-1)


class EmbeddingStep(_ShardStep, Source):
    """The rank's shard of the input embedding in one step: passes E and G, and the first stage's inputs."""

    def __init__(self, shard: VocabularyParallelEmbedding, pipeline: Pipeline, last: int, training: bool) -> None:
        super().__init__(pipeline.options.embedding, pipeline, last, training)
        self._shard = shard
        self._tokens: list[Tensor] = []  # inputs of the pipeline, by cell
        self._counts: list[list[float]] = []  # number of tokens with a row here, by cell
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # places and rows, from E to G
        self._handed: dict[int, Tensor | None] = {}  # from the first stage to G, on its own rank

    def passes(self) -> dict[str, Pass]:
        return {"E": self.embed, "G": self.gradient}

    def take(self, inputs: Sequence[tuple[Any, ...]], read: StepRead) -> None:
        """Takes the pipeline's inputs, by cell; requests a check of the range and a count of tokens with a row here.

        Raises:
            TypeError: inputs are not one tensor of whole numbers.
        """
        for tokens, *others in inputs:
            if others or not isinstance(tokens, Tensor) or tokens.is_floating_point():
                raise TypeError("inputs must be one tensor of token numbers, (batch, tokens), for a spread embedding")
            self._tokens.append(tokens)
        _check_range("inputs hold", self._tokens, self._shard, read)
        read.ask([self._shard.holds(tokens).sum() for tokens in self._tokens], self._counts.extend)

    def embed(self, cell: int, received: Received) -> tuple[Tensor, ...]:
        """E(m.s): embeds tokens with a row in the shard; returns the tokens' places in the segment, and the rows."""
        places, own = self._shard.find(self._tokens[cell], int(self._counts[cell][0]))
        rows = self._module(own)
        if self._training or self._shard.rank == 0:  # rank 0 has the first stage
            self._kept[cell] = places, rows
        return places, rows

    def inputs(self, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        """Returns the input of the first stage: the rows of all shards, each in the token's place."""
        tokens, cell = self._tokens[unit.cell], unit.cell
        own = self._kept[cell] if self._training else self._kept.pop(cell)
        found = own[1].new_empty(tokens.numel(), own[1].shape[1])
        for places, rows in _by_rank(own, self._shard.rank, received):
            found[places] = rows.detach()
        trains = own[1].requires_grad or any(any(flags) for _, flags in received or ())
        unit.leaves = (found.detach().view(*tokens.shape, -1).requires_grad_(trains and self._training),)
        return unit.leaves

    def give_back(self, unit: LiveUnit) -> tuple[Tensor | None, ...]:
        gradients = unit.input_gradients()
        self._handed[unit.cell] = gradients[0]
        return gradients

    def gradient(self, cell: int, received: Received) -> None:
        """G(m.s): makes gradients of the shard's rows."""
        gradient = self._handed.pop(cell) if received is None else received[0][0][0]
        places, rows = self._kept.pop(cell)
        if gradient is not None and rows.requires_grad:
            self._backward(rows, gradient.reshape(-1, gradient.shape[-1])[places], cell)


class ToHead(ToStage):
    """Sink that sends the last stage's hidden states to the shards of all ranks."""

    def __init__(self, step: StageStep, shard: HeadStep, weighting: Weighting) -> None:
        super().__init__(step, None)
        self._shard, self._weighting, self._targets = shard, weighting, step.batch.targets

    def take(self, unit: LiveUnit, output: Any) -> tuple[Tensor, ...] | None:
        """Returns, in F, the message to every shard: output, targets, gradient of a token's loss, further arguments."""
        if self.step.batch.arguments.return_outputs and not unit.is_again:
            unit.output = detached(output)
        outputs = super().take(unit, output)
        if outputs is None:
            return None
        hidden, head, cell = outputs[0], self._shard.head, unit.cell
        if len(outputs) > 1 or hidden.dim() < 2 or hidden.shape[-1] != head.hidden:
            raise ValueError(
                f"the last stage must return the hidden state, (..., {head.hidden}), for a vocabulary over the "
                f"ranks; it returned {', '.join(str(tuple(each.shape)) for each in outputs)}"
            )
        shape, scale = hidden.shape[:-1], torch.zeros(1, dtype=torch.float64, device=hidden.device)
        target, more = head.read_target(None if self._targets is None else self._targets[cell])
        if target is None:
            target = torch.full(shape, head.ignore_index, device=hidden.device)
        if not isinstance(target, Tensor) or target.shape != shape or target.is_floating_point():
            what = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(f"the target is {what}, must be whole numbers of the shape {tuple(shape)}")
        if self._targets is not None:
            count = self._shard.counts[cell] = self._weighting.counts[cell]
            scale = (self._weighting.seeds[cell] / self._shard.divisor(target, count)).reshape(1).double()
        named = [hidden.new_empty(0) if value is None else value.detach().contiguous() for value in more]
        beside = target.long().contiguous(), scale, *named
        self._shard.handed[cell] = hidden.detach().requires_grad_(hidden.requires_grad), *beside
        return hidden, *beside

    def gradients(self, unit: LiveUnit, received: Received) -> Sequence[Tensor | None]:
        """Returns, in B or I, the sum of the shards' gradients of the output, in the order of ranks."""
        parts = _by_rank((self._shard.gradients.pop(unit.cell),), self._shard.head.rank, received)
        present = [part for (part,) in parts if part is not None]
        if not present:
            return (None,)
        total = present[0].to(torch.promote_types(present[0].dtype, torch.float32), copy=True)
        for part in present[1:]:
            total += part
        return (total.to(present[0].dtype),)
