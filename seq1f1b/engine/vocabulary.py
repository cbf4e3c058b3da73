"""A vocabulary spread over the ranks: the output layer with its loss, and the input embedding, a shard on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seq1f1b.transport import RankGroup

__all__ = ["VocabularyParallelEmbedding", "VocabularyParallelHead"]


class VocabularyShard(nn.Module):
    """Base of layers with a row for each word of a vocabulary, whose rows are split over the ranks."""

    def __init__(self, vocab: int, hidden: int, rank: int | None, num_ranks: int | None, name: str) -> None:
        super().__init__()
        is_launched = dist.is_available() and dist.is_initialized()
        self.num_ranks = (dist.get_world_size() if is_launched else 1) if num_ranks is None else num_ranks
        self.rank = (dist.get_rank() if is_launched else 0) if rank is None else rank
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank is {self.rank}, must be in 0..{self.num_ranks - 1}")
        if vocab < self.num_ranks or hidden < 1:
            raise ValueError(f"a vocabulary of {vocab} rows of {hidden} has none for each of {self.num_ranks} ranks")
        self.hidden, self.vocab, self.name = hidden, vocab, name
        self.first_row = sum(self.shard_sizes[: self.rank])

    @property
    def shard_sizes(self) -> list[int]:
        """The number of rows on each rank."""
        base, more = divmod(self.vocab, self.num_ranks)
        return [base + (rank < more) for rank in range(self.num_ranks)]

    def _add_layer(self, layer: nn.Module) -> None:
        """Adds the layer under its name in the unsplit model, which may be a path."""
        first, *inner = self.name.split(".")
        for name in reversed(inner):
            outer = nn.Module()
            outer.add_module(name, layer)
            layer = outer
        self.add_module(first, layer)

    @property
    def layer(self) -> nn.Module:
        """The layer with the shard's rows."""
        return self.get_submodule(self.name)

    @property
    def rows(self) -> slice:
        """The shard's range of rows in the whole weight."""
        return slice(self.first_row, self.first_row + self.shard_sizes[self.rank])

    def holds(self, tokens: Tensor) -> Tensor:
        """Returns, for each token, whether the shard holds the token's row."""
        return torch.logical_and(tokens >= self.rows.start, tokens < self.rows.stop)

    @property
    def row_shards(self) -> dict[nn.Parameter, tuple[int, int]]:
        """The first row of each parameter, and the number of rows of all shards; for checkpoints."""
        return dict.fromkeys(self.layer.parameters(), (self.first_row, self.vocab))

    @torch.no_grad()
    def load_whole(self, weight: Tensor) -> None:
        """Copies the shard's rows of the whole weight, (vocab, hidden)."""
        if weight.shape != (self.vocab, self.hidden):
            raise ValueError(f"the weight is {tuple(weight.shape)}, must be {(self.vocab, self.hidden)}")
        self.layer.get_parameter("weight").copy_(weight[self.rows])

    def check_place(self, rank: int, num_ranks: int) -> None:
        """Raises unless the shard belongs to the rank of a pipeline."""
        if (self.rank, self.num_ranks) != (rank, num_ranks):
            raise ValueError(
                f"the {type(self).__name__} holds shard {self.rank} of {self.num_ranks}, on rank {rank} of {num_ranks} "
                f"of the pipeline: make it with rank={rank}, num_ranks={num_ranks}"
            )


class VocabularyParallelHead(VocabularyShard):
    """The output layer of a language model and its cross entropy, with a shard of the vocabulary on each rank.

    Every rank of a :class:`seq1f1b.PipelineEngine` gives its shard as ``loss_fn``; the last stage returns the hidden
    state. Each rank then computes the logits of its rows for every segment, and the ranks exchange three or four
    numbers per token. So the last rank holds no more weights, optimizer state and logits than other ranks. The mean is
    over targets other than ``ignore_index``, as in :func:`torch.nn.functional.cross_entropy`.

    Args:
        hidden, vocab: sizes of the hidden state and of the whole vocabulary; ranks hold rows in order, the first ranks
            a row more if the number of ranks does not divide the vocabulary.
        rank, num_ranks: number of the shard and of all shards; default: as in the default process group, or 0 of 1.
        bias: whether the layer has a bias.
        name: name of the layer in the unsplit model, for checkpoints: the parameters are ``head.weight`` and
            ``head.bias``.
        label_smoothing: as in ``cross_entropy``.
        z_loss: weight of the mean of squares of the logarithm of the softmax's denominator, added to the loss.
        ignore_index: targets that do not count. Values other than -100 need the engine's ``loss_weight``, too.
        token_loss: in place of cross entropy, a loss of one value per token: called with the targets' log-probabilities
            (...), 0 for ignored targets, and a dict of ``"labels"`` and ``per_token``; returns (...), the result of
            ``step`` and ``eval``. Every rank calls the function, so no random numbers may be drawn.
        per_token: names of tensors in the target, then a dict, beside ``"labels"``, each (..., more), as in the
            target of :class:`seq1f1b.data.PrefixTrees`: ``("weights", "advantages")``.
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
        token_loss: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = None,
        per_token: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(vocab, hidden, rank, num_ranks, name)
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, must be in 0..1")
        if not z_loss >= 0.0:
            raise ValueError(f"z_loss is {z_loss}, must be at least 0")
        if token_loss is not None and (label_smoothing or z_loss):
            raise ValueError("token_loss makes the loss from log-probabilities: label_smoothing and z_loss must be 0")
        if isinstance(per_token, str) or (per_token and token_loss is None):
            raise ValueError(f"per_token is {per_token!r}, must be a list of names for token_loss")
        self.label_smoothing, self.z_loss, self.ignore_index = label_smoothing, z_loss, ignore_index
        self.token_loss, self.per_token = token_loss, tuple(per_token)
        rows = self.shard_sizes[self.rank]
        self._add_layer(nn.Linear(hidden, rows, bias=bias, dtype=dtype, device=device))

    @property
    def linear(self) -> nn.Linear:
        """The ``nn.Linear`` with the shard's rows."""
        return self.layer  # type: ignore[return-value]

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copies the shard's rows of the whole weight, (vocab, hidden), and of the bias, (vocab)."""
        super().load_whole(weight)
        if bias is not None:
            self.linear.bias.copy_(bias[self.rows])

    @property
    def settings(self) -> str:
        """Settings that must be equal on every rank, as text."""
        of_tokens = "" if self.token_loss is None else f", token_loss, per_token={self.per_token}"
        return (
            f"VocabularyParallelHead({self.hidden}, {self.vocab}, label_smoothing={self.label_smoothing}, "
            f"z_loss={self.z_loss}, ignore_index={self.ignore_index}{of_tokens})"
        )

    def forward(self, hidden: Tensor, target: Any = None) -> Tensor:
        """Returns the shard's logits, (..., rows); with a target, on a single rank, the mean loss or ``token_loss``'s.

        Args:
            hidden: (..., hidden). target: (...), row numbers of the whole vocabulary, or ``ignore_index``.
        """
        logits: Tensor = self.linear(hidden)
        if target is None:
            return logits
        if self.num_ranks > 1:
            raise RuntimeError("a shard of the vocabulary has no loss of its own: give it to PipelineEngine as loss_fn")
        labels, more = self.read_target(target)
        found = self.combine([self.statistics(logits, labels)])
        if self.token_loss is not None:
            return self.losses_of_tokens(self.log_probs(found, labels), labels, more)
        losses = self.token_losses(found)
        counted: Tensor = (labels != self.ignore_index).reshape(-1)
        return (losses * counted).sum() / counted.sum()

    # -- a loss of tokens

    def read_target(self, target: Any) -> tuple[Any, list[Tensor | None]]:
        """Returns the labels, and each tensor of ``per_token`` (None if left out). Raises ValueError if unfit."""
        if not isinstance(target, Mapping):
            return target, [None] * len(self.per_token)
        if self.token_loss is None:
            raise ValueError(
                f"the target is a dict of {list(target)}, and cross entropy takes labels alone: give the "
                "VocabularyParallelHead token_loss=, which makes the loss of each token from its log-probability"
            )
        unknown = [name for name in target if name not in ("labels", *self.per_token)]
        if unknown or "labels" not in target:
            raise ValueError(
                f"the target is a dict of {list(target)}, must hold 'labels', and no other names than those of the "
                f"VocabularyParallelHead's per_token={self.per_token}"
            )
        labels = target["labels"]
        for name in target:
            if not isinstance(target[name], Tensor) or target[name].shape[: labels.dim()] != labels.shape:
                raise ValueError(f"{name!r} of the target must have a value for each label, {tuple(labels.shape)}")
        return labels, [target.get(name) for name in self.per_token]

    def log_probs(self, found: Statistics, labels: Tensor) -> Tensor:
        """Returns log-probabilities of the labels, in their shape; 0 for ignored labels."""
        of_labels = (found.of_target - found.log_sum).view(labels.shape)
        return torch.where(labels != self.ignore_index, of_labels, 0.0)

    def losses_of_tokens(self, log_probs: Tensor, labels: Tensor, more: Sequence[Tensor | None]) -> Tensor:
        """Returns ``token_loss`` of log-probabilities. Raises ValueError unless each token has a value."""
        assert self.token_loss is not None
        named = {name: value for name, value in zip(self.per_token, more, strict=True) if value is not None}
        values = self.token_loss(log_probs, {"labels": labels, **named})
        if not isinstance(values, Tensor) or values.shape != labels.shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"token_loss must return one value per token, {tuple(labels.shape)}, got {got}")
        return values

    # -- the arithmetic of S and T

    def statistics(self, logits: Tensor, target: Tensor) -> Tensor:
        """Returns statistics of the shard's logits for all ranks, (3 or 4, tokens).

        Rows: the maximum, the sum of exponentials, the target's logit, and, with smoothed labels, the sum of logits.
        """
        flat = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        most = flat.amax(1)
        # max(log_softmax) = -log(sum(exp(logit - maximum))), so exp of its negative is the sum.
        index, is_here = self._row_of(target)
        of_target = flat.gather(1, index[:, None])[:, 0] * is_here
        rows = [most, torch.log_softmax(flat, 1).amax(1).neg_().exp_(), of_target]
        return torch.stack([*rows, flat.sum(1)] if self.label_smoothing else rows)

    def combine(self, everyones: Sequence[Tensor]) -> Statistics:
        """Joins the statistics of all ranks in their order, so each rank gets equal bits."""
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

    def logit_gradients(self, logits: Tensor, target: Tensor, own: Tensor, found: Statistics, scale: Tensor) -> Tensor:
        """Returns gradients of the shard's logits; 0 for ignored targets.

        Args:
            own: :meth:`statistics` of the logits.
            scale: gradient of one token's loss.
        """
        flat = logits.detach().reshape(-1, logits.shape[-1])
        scales = (target != self.ignore_index).reshape(-1) * scale.to(own.dtype)
        share = own[1] * (own[0] - found.log_sum).exp()  # the shard's, of the softmax's denominator
        if self.z_loss:
            share *= 1 + 2 * self.z_loss * found.log_sum
        gradient = torch.softmax(flat, 1, dtype=own.dtype)
        gradient *= (share * scales)[:, None]
        if self.label_smoothing:
            gradient -= (self.label_smoothing / self.vocab * scales)[:, None]
        index, is_here = self._row_of(target)
        rows = torch.arange(len(index), device=index.device)  # a mask as index would make the host wait
        gradient[rows, index] -= (1 - self.label_smoothing) * scales * is_here
        return gradient.to(logits.dtype).view_as(logits)

    def _row_of(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the targets' rows in the shard (any row if elsewhere), and whether a target counts and lies here."""
        flat = target.reshape(-1)
        index = (flat - self.first_row).clamp(0, self.shard_sizes[self.rank] - 1)
        return index, self.holds(flat) & (flat != self.ignore_index)


class VocabularyParallelEmbedding(VocabularyShard):
    """The input embedding of a language model, with a shard of the vocabulary on each rank.

    Every rank of a :class:`seq1f1b.PipelineEngine` gives its shard as ``embedding``, and ``inputs``, the tokens, to
    each step. Each rank looks up its rows for every segment, and the first stage gets the embedded tokens
    (batch, tokens, hidden) as its input. So the first rank holds no more weights and optimizer state than other ranks.
    An embedding that is also the head is one parameter on each rank: ``head.linear.weight = embedding.layer.weight``.

    Args:
        vocab, hidden, rank, num_ranks: as of :class:`VocabularyParallelHead`.
        name: name of the layer in the unsplit model, for checkpoints: the parameter is ``embedding.weight``.
        padding_idx: as of :class:`torch.nn.Embedding`: a row without gradient.
        dtype, device: of the weight, (rows of the shard, hidden).
    Raises:
        ValueError: a number is out of range, or a shard would have no row.
    Source: vocabulary parallelism, arXiv:2411.05288.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        rank: int | None = None,
        num_ranks: int | None = None,
        name: str = "embedding",
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(vocab, hidden, rank, num_ranks, name)
        own_padding = None
        if padding_idx is not None and self.rows.start <= padding_idx < self.rows.stop:
            own_padding = padding_idx - self.first_row
        rows = self.shard_sizes[self.rank]
        self._add_layer(nn.Embedding(rows, hidden, padding_idx=own_padding, dtype=dtype, device=device))

    @property
    def settings(self) -> str:
        """Settings that must be equal on every rank, as text."""
        return f"VocabularyParallelEmbedding({self.vocab}, {self.hidden})"

    def forward(self, rows: Tensor) -> Tensor:
        """Embeds numbers of rows in the shard: (...) -> (..., hidden)."""
        return self.layer(rows)  # type: ignore[no-any-return]

    def find(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns positions of the tokens with a row in the shard, and the numbers of the rows in the shard.

        Args:
            count: number of tokens with a row in the shard: counting here would wait for the device.
        """
        flat = tokens.reshape(-1)
        places = self.holds(flat).byte().argsort(descending=True, stable=True)[:count]
        return places, flat[places] - self.first_row


class Statistics(NamedTuple):
    """Statistics of all logits, by token: the log of the softmax's denominator, the target's logit, the sum."""

    log_sum: Tensor
    of_target: Tensor
    total: Tensor


@torch.no_grad()
def join_shards(shards: Sequence[VocabularyShard], group: RankGroup, last_rank: int) -> dict[str, Tensor]:
    """Returns the parameters of whole layers on one rank, each once; an empty dict elsewhere. Collective."""
    found: dict[str, Tensor] = {}
    seen = set()
    for shard in shards:
        rows = max(shard.shard_sizes)
        others = [rank for rank in range(shard.num_ranks) if rank != last_rank]
        for name, parameter in shard.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            padded = parameter.new_zeros(rows, *parameter.shape[1:])
            padded[: len(parameter)] = parameter
            if shard.rank != last_rank:
                group.exchange(padded, [last_rank], [], padded)
                continue
            everyones = group.exchange(padded, [], others, padded)
            found[name] = torch.cat([everyones[rank][:count] for rank, count in enumerate(shard.shard_sizes)])
    return found
