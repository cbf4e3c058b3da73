"""Seconds and bytes of stages from those of a model's parts: its layers by their kinds, the embedding at the begin, the
head at the end."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from seq1f1b.partition import Layer, ModelShape, has_equal_layers, layers_of
from seq1f1b.plan import INSIDE, Layout
from seq1f1b.planning.profile import Part, Profile
from seq1f1b.seconds import NO_SECONDS, PassSeconds, ShardSeconds, Span

if TYPE_CHECKING:
    from typing import Self

    from seq1f1b.planning.hardware import Hardware, ProfiledHardware

__all__: list[str] = []

_ATTENTION_BACKWARD = 2.5  # products of flash attention's backward over those of its forward: 5 / 2
_WHOLE = {"tensor": "heads", "expert": "experts of the model, and data"}
_COLLECTIVES, _COLLECTIVES_BACK = 4, 6  # of a layer: backward gathers the inputs of two products again


class StageKind(NamedTuple):
    """The parts that a stage holds. ``counts``: layers of each kind."""

    counts: tuple[int, ...]
    is_first: bool
    is_last: bool


class UnitBytes(NamedTuple):
    """Bytes of units, arrays: activations, what of them stays until W, and what I adds to all of them."""

    saved: Any
    kept: Any
    added: Any


class ByParts:
    """A source of the seconds of units, and of their bytes: a model in stages on a machine, by its shape.

    One layer, per token, h = hidden, q = heads * head_dim, g = kv_heads * head_dim, f = ffn of a token's experts:
    F is 2 (2 h q + 2 h g + 3 h f) FLOP of products and 4 q per earlier token of attention; I and W each repeat the
    products, and I has the 2.5-fold attention, W none. To each pass come its elementwise traffic, exposed collectives
    (4 in F, 6 in I, which gathers two inputs again), what few rows take as long as many for (the ends of attention's
    tiles, latencies, sums of weight gradients), and the floor of its kernel launches. The first stage has the embedding
    (bytes only), the last the head.

    A kind of layer has its own products and pairs: those within its window, of which there are as many for every token
    far behind the begin. A recurrence has as much work for every token, at attention's rates, and keeps what its fused
    kernels keep: its inputs and outputs. Each unit keeps the state that it hands on, whatever its length.

    Args:
        model: a shape; hardware: a machine; layout: degrees and choices.
        layers: of each stage.
        num_ranks: over which a vocabulary is spread, if it is.

    Attributes:
        kinds: of each stage, a number: stages of one kind cost alike.
        stages: each kind.
        layer_kinds: sizes of layers, by kind. places: the kind of each layer; counts: how many are of each.
        windows: of the layers, ascending.
        shards: devices that share a token's work.
        spreads: whether the vocabulary is over the ranks.
        message_bytes: of a token in a message, on one of the devices that share a stage.
        cache_bytes: keys and values of one token and layer, and their gradients, by kind of layer.
    """

    def __init__(
        self, model: ModelShape, hardware: Hardware, layout: Layout, layers: tuple[int, ...], num_ranks: int
    ) -> None:
        self.model, self.layout, self.layers, self.num_ranks = model, layout, layers, num_ranks
        self.layer_kinds, self.places = layers_of(model)
        self.windows = tuple(sorted({layer.window for layer in self.layer_kinds} - {0}))
        of_stages = []
        for stage, (end, n) in enumerate(zip(accumulate(layers), layers, strict=True)):
            counts = tuple(map(self.places[end - n : end].count, range(len(self.layer_kinds))))
            of_stages.append(StageKind(counts, stage == 0, stage == len(layers) - 1))
        self.counts = tuple(map(sum, zip(*(kind.counts for kind in of_stages), strict=True)))
        self.stages = list(dict.fromkeys(of_stages))
        self.kinds = [self.stages.index(kind) for kind in of_stages]
        self.shards = layout.tensor * layout.context
        self.spreads = layout.vocabulary == "ranks"
        self._use(hardware)

    def on(self, hardware: Hardware) -> Self:
        """These parts on another machine."""
        other = copy.copy(self)
        other._use(hardware)
        return other

    def _use(self, hardware: Hardware) -> None:
        """Finds what depends on the machine and on no span."""
        self.hardware, shards, model, layout = hardware, self.shards, self.model, self.layout
        self.message_bytes = model.hidden * hardware.element_bytes / shards
        rows = [layer.keys / shards for layer in self.layer_kinds]
        self.cache_bytes = [(row * hardware.element_bytes, row * 4) for row in rows]
        # Activations of one token and layer that recompute nothing, by kind of layer.
        self._all_saved = [self._saved_bytes(layer, "none") for layer in self.layer_kinds]
        # Products of q with a key, and of a weight with its value, in whole tiles of heads, by kind of layer.
        tile, self._pair_flops = hardware.head_tile, list[float]()
        for layer in self.layer_kinds:
            sizes = [size / layer.heads for size in (layer.queries, layer.values)] if layer.heads else []
            self._pair_flops.append(2 * layer.heads * tile * sum(math.ceil(size / tile) for size in sizes))
        # A loss apart from the head saves fp32 probabilities of each word.
        self._saved_logits = 0.0 if layout.head_in_loss else model.vocab / shards * 4

    # -- seconds

    beyond = NO_SECONDS
    """Seconds of a unit beyond those of its layers."""

    def layer(self, span: Span, kind: int = 0, floor: bool = True) -> PassSeconds:
        """One layer of a kind. floor: False leaves out what a unit takes however few tokens it has; segments share the
        rest alike."""
        hw, layer, layout, hidden = self.hardware, self.layer_kinds[kind], self.layout, self.model.hidden
        t, c, e = layout.tensor, layout.context, layout.expert
        tokens, width = span.tokens / self.shards, hidden * hw.element_bytes
        # Attention, and a recurrence, which has as much work for every token.
        pairs = span.within[self.windows.index(layer.window)] if layer.window else span.pairs
        flops = (self._pair_flops[kind] * pairs + layer.scan * span.tokens) / self.shards
        attention = flops / (hw.peak * hw.attention_forward_efficiency)
        attention_back = _ATTENTION_BACKWARD * flops / (hw.peak * hw.attention_backward_efficiency)
        products = 3 * hidden * layer.ffn  # of the feed-forward
        weight = 2 * (layer.mixer + products) * tokens / (hw.peak * hw.linear_efficiency)
        # What is saved was written once, and is read once by what follows; backward reads it and moves its gradient.
        traffic = hw.saved_moves * self._all_saved[kind] * tokens / hw.bandwidth
        forward = weight + attention + traffic
        # Tokens on their way to their experts and back; all-gathers and reduce-scatters of hidden states.
        routed = 0.0
        if layer.experts > 1:
            moved = 2 * (e - 1) / e * tokens * layer.experts_per_token * width
            routed = hw.expert_exposed * moved / hw.link(e * self.shards)
        collectives = collectives_back = routed
        if t > 1:
            each = hw.tensor_exposed * (t - 1) / t * span.tokens / c * width / hw.link(t)
            collectives, collectives_back = _COLLECTIVES * each + routed, _COLLECTIVES_BACK * each + routed
        again = 0.0
        if layout.inside == "full":
            again = forward + collectives
        elif layout.inside == "ffn" and products:
            again = 2 / 3 * (products / (layer.mixer + products)) * weight
        back = weight + attention_back + 1.5 * traffic + again
        if floor:
            rows = np.maximum(span.tokens / c, 1.0)  # begin and end of attention's tiles, as if there were more rows
            latency = hw.collective_latency * hw.tensor_exposed * (t > 1)
            prefix = 0.0
            if layout.copies_prefix:  # read and written in F; read, read and written in the sum of gradients
                prefix = layer.keys * hw.element_bytes * span.end / self.shards / hw.bandwidth
            fixed = attention * hw.attention_forward_rows / rows + _COLLECTIVES * latency + 2 * prefix
            fixed_back = attention_back * hw.attention_backward_rows / rows + _COLLECTIVES_BACK * latency + 3 * prefix
            fixed_back += fixed if layout.inside == "full" else 0.0
            summed = 2 * hw.gradient_bytes * self.layer_parameters[kind] / hw.bandwidth  # sums of weight gradients
            forward = np.maximum(forward + fixed, hw.launch * hw.forward_kernels)
            back = np.maximum(back + fixed_back, hw.launch * hw.input_kernels)
            if c > 1:  # the ring's other devices hold keys and values of the prefix: hidden as far as attention lasts
                seen = np.minimum(span.end, span.tokens + layer.window) if layer.window else span.end
                ring = (c - 1) / c * seen * layer.keys / t * hw.element_bytes / hw.link(c * t)
                forward = forward + np.maximum(0.0, ring - attention)
                back = back + np.maximum(0.0, 2 * ring - attention_back)
            weight = np.maximum(weight + summed, hw.launch * hw.weight_kernels)
        forward, back = forward + collectives, back + collectives_back
        return PassSeconds(forward, back, weight, back + weight, forward)

    def vocabulary(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        """The whole embedding, whose traffic is not counted, and the whole head: F, I and W are each a product, and
        logits written and read in fp32."""
        hw, words = self.hardware, self.model.vocab / self.shards * span.tokens
        each = 2 * self.model.hidden * words / (hw.peak * hw.linear_efficiency)
        each += hw.saved_moves * 4 * words / hw.bandwidth
        return NO_SECONDS, PassSeconds(each, each, each, 2 * each, 0.0 if self.layout.head_in_loss else each)

    def ends(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        """The embedding and the head as far as the first and the last stage have them."""
        return (NO_SECONDS, NO_SECONDS) if self.spreads else self.vocabulary(span, floor)

    def seconds(self, span: Span) -> list[PassSeconds]:
        """A unit over the span, by kind of its stage."""
        own, (embedding, head) = self.hardware.unit_overhead, self.ends(span)
        split = 1 + self.hardware.split_backward_extra
        layers = [self.layer(span, kind) for kind in range(len(self.counts))]
        found = []
        for counts, is_first, is_last in self.stages:
            each = []
            for i, factor in enumerate((1.0, split, split, 1.0, 1.0)):  # of I and W, where the order splits a backward
                whole = is_first * embedding[i] + is_last * head[i]
                for count, layer in zip(counts, layers, strict=True):
                    whole = whole + count * layer[i]
                each.append(whole * factor + any(counts) * self.beyond[i] + own)
            found.append(PassSeconds(*each))
        return found

    def shard(self, span: Span) -> ShardSeconds:
        """Shares of the head and the embedding, by as many as there are ranks, and the unit's own time."""
        (embedding, head), own = self.vocabulary(span), self.hardware.unit_overhead
        whole = (head.forward, head.total - head.forward, embedding.forward, embedding.total - embedding.forward)
        return ShardSeconds(*(seconds / self.num_ranks + own for seconds in whole))

    # -- bytes

    def held(self, tokens: Any) -> list[UnitBytes]:
        """Bytes that units of so many tokens hold beside the cache, arrays, by kind of their stage."""
        found, words = [], self._saved_logits
        gradients = 0.0 if self.layout.head_in_loss else self.model.vocab * self.hardware.element_bytes / self.shards
        for (saved, kept, left, state), (_, _, is_last) in zip(self._stage_bytes, self.stages, strict=True):
            head, of_gradients = (words * tokens, gradients * tokens) if is_last else (0.0, 0.0)
            whole = (saved * tokens + state + head, kept * tokens, left * tokens + of_gradients)
            found.append(UnitBytes(*map(whole_bytes, whole)))
        return found

    def work(self, tokens: Any) -> list[tuple[Any, Any]]:
        """Most that F, and B or I, of units allocate for a while, by kind of their stage; empty if it is not known."""
        return []

    def standing_work(self, tokens: int, is_last: bool) -> float:
        """Most that the longest unit of a rank allocates for a while, where that of each is not known."""
        work = 0.0 if self.layout.inside == "none" else max(self._all_saved) * tokens / self.shards
        return max(work, self.logits(tokens)) if is_last and not self.spreads else work

    def cached(self, counts: Sequence[int], tokens: int) -> tuple[float, float]:
        """Keys and values of so many tokens in layers of so many of each kind, and their gradients."""
        sizes = [
            (n * (tokens * keys), n * (tokens * back)) for n, (keys, back) in zip(counts, self.cache_bytes, strict=True)
        ]
        keys, gradients = zip(*sizes, strict=True)
        return sum(keys), sum(gradients)

    @cached_property
    def stage_parameters(self) -> list[float]:
        """Parameters that one device of each stage holds, by stage."""
        m, tensor, found, last = self.model, self.layout.tensor, [], len(self.layers) - 1
        words = m.hidden * m.vocab
        for stage, kind in enumerate(self.kinds):
            layers = sum(map(operator.mul, self.stages[kind].counts, self.layer_parameters))
            ends = 1 if m.tied and last == 0 else (stage == 0) + (stage == last)
            if self.spreads:  # a shard of each, on the first stage of every rank
                found.append(layers + (stage < self.num_ranks) * ((2 - m.tied) * words / self.num_ranks / tensor))
            else:
                found.append(layers + ends * words / tensor)
        return found

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

    def logits(self, tokens: int) -> float:
        """Bytes of a unit's logits for a while: they, their fp32 copy, and its gradient, but for what is saved."""
        words = self.model.vocab / self.shards
        return words * tokens * (self.hardware.element_bytes + 8) - self._saved_logits * tokens

    @property
    def _stage_bytes(self) -> list[tuple[float, ...]]:
        """Bytes by kind of stage, of all layers: what a token saves; what of that W reads; what I leaves beside it,
        gradients of q, k, v, gate, up and two outputs, and inputs that were computed again. And the state that a unit
        of any length hands to the next of its sequence, and keeps for its backward."""
        h, e, of_kinds = self.model.hidden, self.hardware.element_bytes, []
        for layer in self.layer_kinds:
            saved = self._saved_bytes(layer, self.layout.inside)
            saved += layer.keys * e if self.layout.copies_prefix else 0.0
            routed = e * h * layer.experts_per_token if layer.experts > 1 else 0.0
            hidden = min(layer.norms, 2) * h  # inputs of the mixer and of the feed-forward, or their outputs
            of_norms, of_ffn = e * (hidden + layer.outer) + routed, e * layer.ffn
            again = {"none": 0.0, "ffn": of_ffn, "full": of_norms + of_ffn}[self.layout.inside]
            left = e * (hidden + layer.inner + 2 * layer.ffn) + routed + again
            of_token = [self.hardware.activation_factor * x for x in (saved, of_norms + of_ffn - again, left)]
            of_kinds.append([x / self.shards for x in (*of_token, 4 * layer.state + e * layer.tail)])
        columns = list(zip(*of_kinds, strict=True))
        return [tuple([sum(map(operator.mul, kind.counts, column)) for column in columns]) for kind in self.stages]

    def _saved_bytes(self, layer: Layer, inside: str) -> float:
        """Activations of one token and layer: norms' inputs and outputs, q, attention's output and its sums, gate, up
        and their product. Keys and values are counted with the cache."""
        h, e = self.model.hidden, self.hardware.element_bytes
        if inside == "full":
            return e * h
        saved = e * (2 * layer.norms * h + layer.kept) + 4 * layer.heads
        if inside == "none":
            saved += e * 3 * layer.ffn
        if layer.experts > 1:
            saved += 2 * e * h * layer.experts_per_token  # tokens as sent to the experts, and what came back
        return saved


def whole_bytes(size: Any) -> Any:
    """Rounded up: a number, or an array."""
    return np.ceil(size).astype(np.int64)


def check_layout(layout: Layout, model: ModelShape, num_stages: int, seq_len: int) -> None:
    """Raises ``ValueError`` unless the model can be laid over so many stages, and the sequence over its documents."""
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}, must be at least 1")
    model.flops(0, seq_len)  # raises unless shape and length are sound
    if num_stages < 1 or num_stages > model.layers:
        raise ValueError(f"there are {num_stages} stages, must be in 1..{model.layers}, the model's layers")
    for name in ("tensor", "context", "expert", "data"):
        degree = getattr(layout, name)
        if degree < 1:
            raise ValueError(f"{name} is {degree}, must be at least 1")
    layers, _ = layers_of(model)
    if layout.context > 1 and any(layer.scan or layer.state or layer.tail for layer in layers):
        raise ValueError(
            f"context is {layout.context}, must be 1: the model has layers that keep a state along the sequence"
        )
    for degree, name, whole in (
        *((layout.tensor, "tensor", layer.heads) for layer in layers),
        *((layout.expert, "expert", experts) for experts in {layer.experts for layer in layers} - {1} or {1}),
        (layout.expert, "expert", layout.data),
    ):
        if whole % degree != 0:
            raise ValueError(f"{name} is {degree}, must divide {whole} ({_WHOLE[name]})")
    if layout.inside not in INSIDE:
        raise ValueError(f"inside is {layout.inside!r}, must be one of {', '.join(INSIDE)}")
    if layout.vocabulary not in ("ends", "ranks"):
        raise ValueError(f"vocabulary is {layout.vocabulary!r}, must be 'ends' or 'ranks'")
    if layout.vocabulary == "ranks" and (model.vocab == 0 or not layout.head_in_loss):
        raise ValueError("a vocabulary over the ranks needs a vocabulary, and has its loss in its shards: head_in_loss")
    if layout.layers is not None and (
        len(layout.layers) != num_stages or sum(layout.layers) != model.layers or min(layout.layers) < 0
    ):
        raise ValueError(
            f"layers are {list(layout.layers)}: must be {num_stages} numbers, one per stage, "
            f"that sum to the model's {model.layers}"
        )
    documents = layout.documents
    if documents is not None and (sum(documents) != seq_len or min(documents, default=0) < 1):
        raise ValueError(f"documents hold {sum(documents)} tokens, each must be at least 1 and all together {seq_len}")


class ByProfile(ByParts):
    """The parts of a profile.

    F of the last stage holds the head's backward as well where the layout has it in the loss, as the engine runs it.

    Raises:
        ValueError: the profile is of another model, or of less than the layout asks for.
    """

    def __init__(
        self,
        model: ModelShape,
        hardware: ProfiledHardware,
        layout: Layout,
        layers: tuple[int, ...],
        num_ranks: int,
    ) -> None:
        check_profile(hardware.profile, model, layout)
        super().__init__(model, hardware, layout, layers, num_ranks)

    def _use(self, hardware: Any) -> None:
        super()._use(hardware)
        self._profile, runs, layer = hardware.profile, hardware.measured_runs, hardware.profile.layer
        self.message_bytes, self.cache_bytes = layer.message_bytes, [(layer.kv_bytes, layer.kv_gradient_bytes)]
        self.beyond = PassSeconds(*(runs * seconds for seconds in self._profile.unit))
        names = PassSeconds._fields
        self._of_layer = PassSeconds(*(runs * getattr(hardware, f"measured_{name}") for name in names))
        self._of_ends = PassSeconds(*[runs * hardware.measured_ends] * len(names))

    # -- seconds

    def layer(self, span: Span, kind: int = 0, floor: bool = True) -> PassSeconds:
        return _scaled(self._profile.layer, self._of_layer, span, floor)

    def vocabulary(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        profile, factors = self._profile, self._of_ends
        return _scaled(profile.embedding, factors, span, floor), _scaled(profile.head, factors, span, floor)

    def ends(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        embedding, head = super().ends(span, floor)
        return embedding, NO_SECONDS._replace(forward=head.total) if self.layout.head_in_loss else head

    # -- bytes

    def held(self, tokens: Any) -> list[UnitBytes]:
        profile, found = self._profile, []
        head = None if self.layout.head_in_loss else profile.head
        for (layers,), is_first, is_last in self.stages:
            parts = ((layers, profile.layer), (is_first, profile.embedding), (is_last, head))
            units = [part.unit_bytes(tokens, count) for count, part in parts if part is not None]
            found.append(UnitBytes(*(whole_bytes(sum(kind)) for kind in zip(*units, strict=True))))
        return found

    def work(self, tokens: Any) -> list[tuple[Any, Any]]:
        """F of a head in the loss goes back, too: it saves for a while, and no backward is left to the unit's B."""
        profile, found = self._profile, []
        for _, is_first, is_last in self.stages:
            embedding = profile.embedding if is_first and not self.spreads else None
            head = profile.head if is_last and not self.spreads else None
            parts = [part for part in (profile.layer, embedding, head) if part is not None]
            backward = [part.workspace(tokens) for part in parts]
            forward = [part.forward_workspace(tokens) for part in parts]
            if self.layout.head_in_loss and head is not None:
                forward.append(backward.pop() + head.unit_bytes(tokens)[0])
            found.append((whole_bytes(reduce(np.maximum, forward)), whole_bytes(reduce(np.maximum, backward))))
        return found

    def standing_work(self, tokens: int, is_last: bool) -> float:
        return 0.0


def _scaled(part: Part | None, factors: PassSeconds, span: Span, floor: bool) -> PassSeconds:
    """The passes of a part of the profile, times the factors of the machine."""
    if part is None:
        return NO_SECONDS
    found = map(operator.mul, part.seconds(span.tokens, span.pairs, floor), factors)
    return PassSeconds(*((span.tokens > 0) * seconds for seconds in found))


def check_profile(profile: Profile, model: ModelShape, layout: Layout) -> None:
    """Raises ``ValueError`` unless the profile is of this model, and of what the layout asks for."""
    if not has_equal_layers(model):
        raise ValueError(
            "a profile is of equal layers with full attention, and the model's kinds say more: plan without a profile"
        )
    wanted, found = (shape._replace(layers=1, tied=False, kinds=(), pattern=()) for shape in (model, profile.model))
    if wanted != found:
        differing = [name for name in found._fields if getattr(found, name) != getattr(wanted, name)]
        raise ValueError(
            f"the profile is of {', '.join(f'{name} {getattr(found, name)}' for name in differing)}, the model has "
            f"{', '.join(f'{name} {getattr(wanted, name)}' for name in differing)}: profile this model"
        )
    if (layout.tensor, layout.context, layout.expert) != (1, 1, 1):
        raise ValueError("a profile is of whole layers on one device: tensor, context and expert must be 1")
    if layout.inside != "none" or layout.copies_prefix:
        raise ValueError(
            f"a profile is of stages that recompute nothing and share a cache: inside is {layout.inside!r}, "
            f"copies_prefix is {layout.copies_prefix}; they must be 'none' and False"
        )
