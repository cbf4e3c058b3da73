"""Seconds and bytes of stages from those of a model's parts: equal layers, the embedding at the begin, the head at the
end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout
from seq1f1b.seconds import NO_SECONDS, PassSeconds, ShardSeconds, Span

if TYPE_CHECKING:
    from seq1f1b.planning.hardware import Hardware

__all__: list[str] = []


class StageKind(NamedTuple):
    """The parts that a stage holds."""

    layers: int
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
        shards: devices that share a token's work.
        spreads: whether the vocabulary is over the ranks.
        message_bytes: of a token in a message, on one of the devices that share a stage.
        cache_bytes: keys and values of one token and layer, and their gradients.
    """

    def __init__(
        self, model: ModelShape, hardware: Hardware, layout: Layout, layers: tuple[int, ...], num_ranks: int
    ) -> None:
        self.model, self.hardware, self.layout, self.layers, self.num_ranks = model, hardware, layout, layers, num_ranks
        kinds = [StageKind(n, stage == 0, stage + 1 == len(layers)) for stage, n in enumerate(layers)]
        self.stages = list(dict.fromkeys(kinds))
        self.kinds = [self.stages.index(kind) for kind in kinds]
        head_dim = model.head_dim or model.hidden // model.heads
        self._q, self._g = model.heads * head_dim, model.kv_heads * head_dim
        self._f = model.ffn * model.experts_per_token
        self.shards = layout.tensor * layout.context
        self.spreads = layout.vocabulary == "ranks"
        self.message_bytes, row = model.hidden * hardware.element_bytes / self.shards, 2 * self._g / self.shards
        self.cache_bytes = (row * hardware.element_bytes, row * 4)

    # -- seconds

    beyond = NO_SECONDS
    """Seconds of a unit beyond those of its layers."""

    @abstractmethod
    def layer(self, span: Span) -> PassSeconds:
        """One layer."""

    @abstractmethod
    def flow(self, span: Span) -> float:
        """F and B of one layer without floors: segments share them alike."""

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
        passes = list(zip(self.layer(span), embedding, head, self._factors, self.beyond, strict=True))
        found = []
        for layers, is_first, is_last in self.stages:
            each = [
                (layers * layer + is_first * begin + is_last * end) * factor + (layers > 0) * beyond + own
                for layer, begin, end, factor, beyond in passes
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

    @property
    def copied_bytes(self) -> float:
        """The last copy of one token and layer and its gradients, where segments copy their prefix. They stay from the
        first backward of a micro-batch to its last."""
        return 2 * self.cache_bytes[0] if self.layout.copies_prefix else 0.0

    def parameters(self, stage: int) -> float:
        """Parameters that one device of those that share the stage holds."""
        m, h, layer = self.model, self.model.hidden, self.layer_parameters
        if self.spreads:  # a shard of each, on the first stage of every rank
            of_rank = (2 - m.tied) * h * m.vocab / self.num_ranks / self.layout.tensor
            return self.layers[stage] * layer + (stage < self.num_ranks) * of_rank
        ends = (stage == 0) + (stage + 1 == len(self.layers))
        if m.tied and len(self.layers) == 1:
            ends = 1
        return self.layers[stage] * layer + ends * h * m.vocab / self.layout.tensor

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters of one layer, on one device."""
        m, h = self.model, self.model.hidden
        dense = 2 * h * self._q + 2 * h * self._g + 2 * h + (h * m.experts if m.experts > 1 else 0)
        return (dense + 3 * h * m.ffn * m.experts / self.layout.expert) / self.layout.tensor

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
