"""Seconds and bytes of stages, summed over the parts of a model: layers by kind, the embedding in the first stage, the
head in the last stage."""

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

_ATTENTION_BACKWARD = 2.5  # flash attention: five matrix products in backward for two in forward
_WHOLE = {"tensor": "heads", "expert": "experts of the model, and data"}
_COLLECTIVES, _COLLECTIVES_BACK = 4, 6  # per layer in F, and in I, which gathers the inputs of two products again


class StageKind(NamedTuple):
    """Parts in a stage. ``counts``: layers of each kind."""

    counts: tuple[int, ...]
    is_first: bool
    is_last: bool


class UnitBytes(NamedTuple):
    """Arrays of bytes, per unit: saved activations, the part kept until W, and the gradients that I adds for W."""

    saved: Any
    kept: Any
    added: Any


class ByParts:
    """Source of the seconds and bytes of units: a model in stages on a machine, computed from the model's shape.

    One layer, per token, h = hidden, q = heads * head_dim, g = kv_heads * head_dim, f = ffn of a token's experts:
    F is 2 (2 h q + 2 h g + 3 h f) FLOP of products and 4 q per earlier token of attention; I and W each repeat the
    products; I has 2.5 times the attention of F, W none. Every pass also has elementwise traffic, exposed collectives
    (4 in F, 6 in I, which gathers two inputs again), costs that do not depend on the number of rows (ends of
    attention's tiles, latencies, sums of weight gradients), and the kernel launches as a lower bound. The first stage
    has the embedding (bytes only), the last stage the head.

    Each kind of layer has products and pairs of tokens of its own. A layer with a window counts the pairs within the
    window, a constant number per token far from the begin. A recurrence has constant work per token, at attention's
    rates, and saves the inputs and outputs of the fused kernels. Each unit keeps one state, whatever the unit's length.

    Args:
        model: a shape; hardware: a machine; layout: degrees and choices.
        layers: number of layers of each stage.
        num_ranks: ranks that share a spread vocabulary.

    Attributes:
        kinds: index into ``stages`` for each stage; stages of one kind have equal costs.
        stages: the kinds of stages.
        layer_kinds: sizes of layers, by kind. places: the kind of each layer; counts: the number of layers of each.
        windows: the layers' windows, ascending.
        shards: devices that share a token's work.
        spreads: whether the vocabulary is over the ranks.
        message_bytes: bytes of a token in a message, on one of the devices of a stage.
        cache_bytes: bytes of keys and values, and of the gradients of both, of one token and layer, by kind of layer.
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
        """Returns a copy of the parts for another machine."""
        other = copy.copy(self)
        other._use(hardware)
        return other

    def _use(self, hardware: Hardware) -> None:
        """Computes the attributes that depend on the machine, but not on a span of tokens."""
        self.hardware, shards, model, layout = hardware, self.shards, self.model, self.layout
        self.message_bytes = model.hidden * hardware.element_bytes / shards
        rows = [layer.keys / shards for layer in self.layer_kinds]
        self.cache_bytes = [(row * hardware.element_bytes, row * 4) for row in rows]
        # Saved activations of one token and layer without recomputation, by kind of layer.
        self._all_saved = [self._saved_bytes(layer, "none") for layer in self.layer_kinds]
        # Products of q with a key, and of a weight with its value, in whole tiles of heads, by kind of layer.
        tile, self._pair_flops = hardware.head_tile, list[float]()
        for layer in self.layer_kinds:
            sizes = [size / layer.heads for size in (layer.queries, layer.values)] if layer.heads else []
            self._pair_flops.append(2 * layer.heads * tile * sum(math.ceil(size / tile) for size in sizes))
        # A loss that does not contain the head saves an fp32 probability for each word.
        self._saved_logits = 0.0 if layout.head_in_loss else model.vocab / shards * 4

    # -- seconds

    beyond = NO_SECONDS
    """Seconds of a unit beyond those of its layers."""

    def layer(self, span: Span, kind: int = 0, floor: bool = True) -> PassSeconds:
        """Returns the seconds of one layer of a kind. floor: False leaves out the costs that do not depend on the
        unit's length; the rest adds up over segments."""
        hw, layer, layout, hidden = self.hardware, self.layer_kinds[kind], self.layout, self.model.hidden
        t, c, e = layout.tensor, layout.context, layout.expert
        tokens, width = span.tokens / self.shards, hidden * hw.element_bytes
        # Attention, or a recurrence, whose work per token is constant.
        pairs = span.within[self.windows.index(layer.window)] if layer.window else span.pairs
        flops = (self._pair_flops[kind] * pairs + layer.scan * span.tokens) / self.shards
        attention = flops / (hw.peak * hw.attention_forward_efficiency)
        attention_back = _ATTENTION_BACKWARD * flops / (hw.peak * hw.attention_backward_efficiency)
        products = 3 * hidden * layer.ffn  # numbers in the feed-forward's matrices
        weight = 2 * (layer.mixer + products) * tokens / (hw.peak * hw.linear_efficiency)
        # F writes each saved tensor and the next operation reads it; backward reads the tensor and moves its gradient.
        traffic = hw.saved_moves * self._all_saved[kind] * tokens / hw.bandwidth
        forward = weight + attention + traffic
        # Exchange of tokens with experts, there and back; all-gathers and reduce-scatters of hidden states.
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
            rows = np.maximum(span.tokens / c, 1.0)  # ends of attention's tiles cost as much as more rows would
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
            if c > 1:  # keys and values of the prefix come round the ring of devices, hidden while attention lasts
                seen = np.minimum(span.end, span.tokens + layer.window) if layer.window else span.end
                ring = (c - 1) / c * seen * layer.keys / t * hw.element_bytes / hw.link(c * t)
                forward = forward + np.maximum(0.0, ring - attention)
                back = back + np.maximum(0.0, 2 * ring - attention_back)
            weight = np.maximum(weight + summed, hw.launch * hw.weight_kernels)
        forward, back = forward + collectives, back + collectives_back
        return PassSeconds(forward, back, weight, back + weight, forward)

    def vocabulary(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        """Returns the seconds of the whole embedding, zero, since its traffic is not counted, and of the whole head: a
        product for each of F, I and W, and logits written and read in fp32."""
        hw, words = self.hardware, self.model.vocab / self.shards * span.tokens
        each = 2 * self.model.hidden * words / (hw.peak * hw.linear_efficiency)
        each += hw.saved_moves * 4 * words / hw.bandwidth
        return NO_SECONDS, PassSeconds(each, each, each, 2 * each, 0.0 if self.layout.head_in_loss else each)

    def ends(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        """Returns the seconds of embedding and head in the first and the last stage: zeros for a spread vocabulary."""
        return (NO_SECONDS, NO_SECONDS) if self.spreads else self.vocabulary(span, floor)

    def seconds(self, span: Span) -> list[PassSeconds]:
        """Returns the seconds of a unit over the span, by kind of stage."""
        own, (embedding, head) = self.hardware.unit_overhead, self.ends(span)
        split = 1 + self.hardware.split_backward_extra
        layers = [self.layer(span, kind) for kind in range(len(self.counts))]
        found = []
        for counts, is_first, is_last in self.stages:
            each = []
            for i, factor in enumerate((1.0, split, split, 1.0, 1.0)):  # only I and W pay for the split of a backward
                whole = is_first * embedding[i] + is_last * head[i]
                for count, layer in zip(counts, layers, strict=True):
                    whole = whole + count * layer[i]
                each.append(whole * factor + any(counts) * self.beyond[i] + own)
            found.append(PassSeconds(*each))
        return found

    def shard(self, span: Span) -> ShardSeconds:
        """Returns the seconds of one rank's share of a spread head and embedding, unit overhead included."""
        (embedding, head), own = self.vocabulary(span), self.hardware.unit_overhead
        whole = (head.forward, head.total - head.forward, embedding.forward, embedding.total - embedding.forward)
        return ShardSeconds(*(seconds / self.num_ranks + own for seconds in whole))

    # -- bytes

    def held(self, tokens: Any) -> list[UnitBytes]:
        """Returns the bytes that units of so many tokens hold beside the cache, arrays, by kind of stage."""
        found, words = [], self._saved_logits
        gradients = 0.0 if self.layout.head_in_loss else self.model.vocab * self.hardware.element_bytes / self.shards
        for (saved, kept, left, state), (_, _, is_last) in zip(self._stage_bytes, self.stages, strict=True):
            head, of_gradients = (words * tokens, gradients * tokens) if is_last else (0.0, 0.0)
            whole = (saved * tokens + state + head, kept * tokens, left * tokens + of_gradients)
            found.append(UnitBytes(*map(whole_bytes, whole)))
        return found

    def work(self, tokens: Any) -> list[tuple[Any, Any]]:
        """Returns the most temporary bytes of F, and of B or I, by kind of stage; an empty list means unknown."""
        return []

    def standing_work(self, tokens: int, is_last: bool) -> float:
        """Returns the most temporary bytes of a rank's longest unit, for parts whose ``work`` is unknown."""
        work = 0.0 if self.layout.inside == "none" else max(self._all_saved) * tokens / self.shards
        return max(work, self.logits(tokens)) if is_last and not self.spreads else work

    def cached(self, counts: Sequence[int], tokens: int) -> tuple[float, float]:
        """Returns the bytes of keys and values, and of the gradients of both. counts: layers of each kind."""
        sizes = [
            (n * (tokens * keys), n * (tokens * back)) for n, (keys, back) in zip(counts, self.cache_bytes, strict=True)
        ]
        keys, gradients = zip(*sizes, strict=True)
        return sum(keys), sum(gradients)

    @cached_property
    def stage_parameters(self) -> list[float]:
        """Parameters on one device of each stage, by stage."""
        m, tensor, found, last = self.model, self.layout.tensor, [], len(self.layers) - 1
        words = m.hidden * m.vocab
        for stage, kind in enumerate(self.kinds):
            layers = sum(map(operator.mul, self.stages[kind].counts, self.layer_parameters))
            ends = 1 if m.tied and last == 0 else (stage == 0) + (stage == last)
            if self.spreads:  # a shard of embedding and head, counted for the first stage of every rank
                found.append(layers + (stage < self.num_ranks) * ((2 - m.tied) * words / self.num_ranks / tensor))
            else:
                found.append(layers + ends * words / tensor)
        return found

    @cached_property
    def layer_parameters(self) -> list[float]:
        """Parameters of one layer on one device, by kind of layer."""
        h, found = self.model.hidden, []
        for layer in self.layer_kinds:
            router = h * layer.experts if layer.experts > 1 else 0
            dense = layer.mixer + 3 * h * layer.shared + layer.norms * h + layer.other + router
            shared_by = self.layout.expert if layer.experts > 1 else 1
            found.append((dense + 3 * h * layer.expert * layer.experts / shared_by) / self.layout.tensor)
        return found

    def logits(self, tokens: int) -> float:
        """Returns the temporary bytes of a unit's logits: logits, fp32 copy and fp32 gradient, less the saved part."""
        words = self.model.vocab / self.shards
        return words * tokens * (self.hardware.element_bytes + 8) - self._saved_logits * tokens

    @property
    def _stage_bytes(self) -> list[tuple[float, ...]]:
        """Bytes of all layers, by kind of stage, per token: saved activations; the part that W reads; additions of I
        for W, namely gradients of q, k, v, gate, up and two outputs, and recomputed inputs. The fourth number is per
        unit of any length: the state handed to the next segment and kept for backward."""
        h, e, of_kinds = self.model.hidden, self.hardware.element_bytes, []
        for layer in self.layer_kinds:
            saved = self._saved_bytes(layer, self.layout.inside)
            saved += layer.keys * e if self.layout.copies_prefix else 0.0
            routed = e * h * layer.experts_per_token if layer.experts > 1 else 0.0
            hidden = min(layer.norms, 2) * h  # inputs, or outputs, of the mixer and of the feed-forward
            of_norms, of_ffn = e * (hidden + layer.outer) + routed, e * layer.ffn
            again = {"none": 0.0, "ffn": of_ffn, "full": of_norms + of_ffn}[self.layout.inside]
            left = e * (hidden + layer.inner + 2 * layer.ffn) + routed + again
            of_token = [self.hardware.activation_factor * x for x in (saved, of_norms + of_ffn - again, left)]
            of_kinds.append([x / self.shards for x in (*of_token, 4 * layer.state + e * layer.tail)])
        columns = list(zip(*of_kinds, strict=True))
        return [tuple([sum(map(operator.mul, kind.counts, column)) for column in columns]) for kind in self.stages]

    def _saved_bytes(self, layer: Layer, inside: str) -> float:
        """Returns the activation bytes of one token and layer: inputs and outputs of norms, q, attention's output and
        softmax sums, gate, up and the product of both. Keys and values are counted with the cache."""
        h, e = self.model.hidden, self.hardware.element_bytes
        if inside == "full":
            return e * h
        saved = e * (2 * layer.norms * h + layer.kept) + 4 * layer.heads
        if inside == "none":
            saved += e * 3 * layer.ffn
        if layer.experts > 1:
            saved += 2 * e * h * layer.experts_per_token  # inputs sent to the experts, and outputs of the experts
        return saved


def whole_bytes(size: Any) -> Any:
    """Rounds a number or an array up to whole bytes."""
    return np.ceil(size).astype(np.int64)


def check_layout(layout: Layout, model: ModelShape, num_stages: int, seq_len: int) -> None:
    """Raises ``ValueError`` unless model, stages and degrees fit, and the documents sum to the sequence."""
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
        raise ValueError("vocabulary 'ranks' needs a model with vocab, and head_in_loss, as the shards hold the loss")
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
    """Source of the seconds and bytes of units from a profile.

    If the layout has the head in the loss, F of the last stage includes the head's backward, as in the engine.

    Raises:
        ValueError: the profile is of another model, or lacks a measurement for the layout.
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
        """Returns the most temporary bytes of F and of B, by kind of stage; a head in the loss counts for F alone."""
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
    """Returns the seconds of a part of the profile, times the machine's factors."""
    if part is None:
        return NO_SECONDS
    found = map(operator.mul, part.seconds(span.tokens, span.pairs, floor), factors)
    return PassSeconds(*((span.tokens > 0) * seconds for seconds in found))


def check_profile(profile: Profile, model: ModelShape, layout: Layout) -> None:
    """Raises ``ValueError`` unless the profile is of the model, and has measurements for the layout."""
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
