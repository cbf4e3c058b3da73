"""Seconds and bytes of stages from those of a model's parts: its layers by their kinds, the embedding at the begin, the
head at the end."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from seq1f1b.partition import ModelShape, layers_of
from seq1f1b.plan import Layout
from seq1f1b.seconds import NO_SECONDS, PassSeconds, ShardSeconds, Span

if TYPE_CHECKING:
    from seq1f1b.planning.hardware import Hardware

__all__: list[str] = []


class StageKind(NamedTuple):
    """The parts that a stage holds. ``counts``: layers of each kind."""

    counts: tuple[int, ...]
    is_first: bool
    is_last: bool


class UnitBytes(NamedTuple):
    """Bytes of a unit: activations, what of them stays until W, and what I adds to all of them."""

    saved: int
    kept: int
    added: int


class ByParts(ABC):
    """A source of the seconds of units, and of their bytes: a model in stages on a machine.

    Args:
        model: a shape; hardware: a machine; layout: degrees and choices.
        layers: of each stage.
        num_ranks: over which a vocabulary is spread, if it is.

    Attributes:
        kinds: of each stage, a number: stages of one kind cost alike.
        stages: each kind.
        layer_kinds: sizes of layers, by kind. counts: how many layers are of each kind.
        windows: of the layers, ascending.
        shards: devices that share a token's work.
        spreads: whether the vocabulary is over the ranks.
        message_bytes: of a token in a message, on one of the devices that share a stage.
        cache_bytes: keys and values of one token and layer, and their gradients, by kind of layer.
    """

    def __init__(
        self, model: ModelShape, hardware: Hardware, layout: Layout, layers: tuple[int, ...], num_ranks: int
    ) -> None:
        self.model, self.hardware, self.layout, self.layers, self.num_ranks = model, hardware, layout, layers, num_ranks
        self.layer_kinds, self._places = layers_of(model)
        self.counts = self._counts(0, model.layers)
        self.windows = tuple(sorted({layer.window for layer in self.layer_kinds} - {0}))
        last, ends = len(layers) - 1, accumulate(layers)
        kinds = [
            StageKind(self._counts(end - n, end), stage == 0, stage == last)
            for (stage, n), end in zip(enumerate(layers), ends, strict=True)
        ]
        self.stages = list(dict.fromkeys(kinds))
        self.kinds = [self.stages.index(kind) for kind in kinds]
        self.shards = layout.tensor * layout.context
        self.spreads = layout.vocabulary == "ranks"
        self.message_bytes = model.hidden * hardware.element_bytes / self.shards
        rows = [layer.keys / self.shards for layer in self.layer_kinds]
        self.cache_bytes = [(row * hardware.element_bytes, row * 4) for row in rows]

    def _counts(self, begin: int, end: int) -> tuple[int, ...]:
        """Layers of each kind among the layers ``[begin, end)``."""
        places = self._places[begin:end]
        return tuple(places.count(number) for number in range(len(self.layer_kinds)))

    # -- seconds

    beyond = NO_SECONDS
    """Seconds of a unit beyond those of its layers."""

    @abstractmethod
    def layer(self, span: Span, kind: int = 0) -> PassSeconds:
        """One layer of a kind."""

    @abstractmethod
    def flow(self, span: Span, kind: int = 0) -> float:
        """F and B of one layer of a kind without floors: segments share them alike."""

    def flows(self, span: Span) -> list[float]:
        """F and B without floors of each layer of the model, in their order."""
        of_kinds = [self.flow(span, kind) if n else 0.0 for kind, n in enumerate(self.counts)]
        return [of_kinds[place] for place in self._places]

    @abstractmethod
    def head(self, span: Span, floor: bool = True) -> PassSeconds:
        """The whole head."""

    @abstractmethod
    def embedding(self, span: Span, floor: bool = True) -> PassSeconds:
        """The whole embedding."""

    def _last(self, span: Span, floor: bool = True) -> PassSeconds:
        """The head as the last stage runs it."""
        return self.head(span, floor)

    def ends(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        """The embedding and the head as far as the first and the last stage have them."""
        if self.spreads:
            return NO_SECONDS, NO_SECONDS
        return self.embedding(span, floor), self._last(span, floor)

    @cached_property
    def _factors(self) -> PassSeconds:
        split = 1 + self.hardware.split_backward_extra
        return PassSeconds(forward=1.0, input=split, weight=split, backward=1.0, recompute=1.0)

    def seconds(self, span: Span) -> list[PassSeconds]:
        """A unit over the span, by kind of its stage."""
        own, (embedding, head) = self.hardware.unit_overhead, self.ends(span)
        layers = [self.layer(span, kind) for kind in range(len(self.counts))]
        ends = list(zip(embedding, head, self._factors, self.beyond, strict=True))
        count, sums = 0, layers[0]
        found = []
        for counts, is_first, is_last in self.stages:
            if len(layers) == 1:
                count = counts[0]
            else:
                count = 1 if any(counts) else 0
                sums = PassSeconds(*(sum_of(counts, column) for column in zip(*layers, strict=True)))
            has_layers = count > 0
            each = [
                (count * layer + is_first * begin + is_last * end) * factor + has_layers * beyond + own
                for layer, (begin, end, factor, beyond) in zip(sums, ends, strict=True)
            ]
            found.append(PassSeconds(*each))
        return found

    def shard(self, span: Span) -> ShardSeconds:
        """Shares of the head and the embedding, by as many as there are ranks, and the unit's own time."""
        head, embedding, own = self.head(span), self.embedding(span), self.hardware.unit_overhead
        whole = (head.forward, head.total - head.forward, embedding.forward, embedding.total - embedding.forward)
        return ShardSeconds(*(seconds / self.num_ranks + own for seconds in whole))

    # -- bytes

    @abstractmethod
    def held(self, tokens: int) -> list[UnitBytes]:
        """Bytes that a unit holds beside the cache, by kind of its stage."""

    @abstractmethod
    def work(self, tokens: int) -> list[tuple[int, int]]:
        """Most that F, and B or I, of a unit allocate for a while, by kind of its stage; empty if it is not known."""

    @abstractmethod
    def standing_work(self, tokens: int, is_last: bool) -> float:
        """Most that the longest unit of a rank allocates for a while, where that of each is not known."""

    def cached(self, counts: Sequence[int], tokens: int) -> tuple[float, float]:
        """Keys and values of so many tokens in layers of so many of each kind, and their gradients."""
        keys, gradients = zip(*self.cache_bytes, strict=True)
        return sum_of(counts, [tokens * size for size in keys]), sum_of(counts, [tokens * size for size in gradients])

    def copied(self, counts: Sequence[int], tokens: int) -> float:
        """The last copy of so many tokens in such layers and its gradients, where segments copy their prefix. They stay
        from the first backward of a micro-batch to its last."""
        return 2 * self.cached(counts, tokens)[0] if self.layout.copies_prefix else 0.0

    def counts_of(self, stage: int) -> tuple[int, ...]:
        """Layers of each kind on a stage."""
        return self.stages[self.kinds[stage]].counts

    def parameters(self, stage: int) -> float:
        """Parameters that one device of those that share the stage holds."""
        m, h, layers = self.model, self.model.hidden, sum_of(self.counts_of(stage), self.layer_parameters)
        if self.spreads:  # a shard of each, on the first stage of every rank
            of_rank = (2 - m.tied) * h * m.vocab / self.num_ranks / self.layout.tensor
            return layers + (stage < self.num_ranks) * of_rank
        ends = (stage == 0) + (stage + 1 == len(self.layers))
        if m.tied and len(self.layers) == 1:
            ends = 1
        return layers + ends * h * m.vocab / self.layout.tensor

    @cached_property
    def layer_parameters(self) -> list[float]:
        """Parameters of one layer, on one device, by kind."""
        h, found = self.model.hidden, []
        for layer in self.layer_kinds:
            router = h * layer.experts if layer.experts > 1 else 0
            dense = layer.mixer + 3 * h * layer.shared + layer.norms * h + layer.other + router
            shared_by = self.layout.expert if layer.experts > 1 else 1
            found.append((dense + 3 * h * layer.expert * layer.experts / shared_by) / self.layout.tensor)
        return found

    def _logits(self, tokens: int) -> float:
        """Logits, their fp32 copy, and its gradient."""
        return self.model.vocab / self.shards * tokens * (self.hardware.element_bytes + 8)

    def shard_logits(self, tokens: int) -> float:
        """Bytes of logits of a shard of the vocabulary; 0 where the last stage has the head."""
        return self._logits(tokens) / self.num_ranks if self.spreads else 0.0

    @property
    def _saved_logits(self) -> float:
        """Bytes that a loss apart from the head saves of one token: fp32 probabilities."""
        return 0.0 if self.layout.head_in_loss else self.model.vocab / self.shards * 4

    def logit_work(self, tokens: int) -> float:
        """The other logits of a unit of the last stage, for a while."""
        return 0.0 if self.spreads else self._logits(tokens) - self._saved_logits * tokens


def sum_of(counts: Sequence[int], each: Sequence[float]) -> float:
    found: float = sum(map(operator.mul, counts, each))
    return found
