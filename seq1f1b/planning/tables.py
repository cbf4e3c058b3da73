"""Costs of the units of a step, in arrays: seconds and bytes of each pass, stage and segment.

A stage is a sum of parts: layers by kind, the embedding in the first stage, the head in the last stage. The costs of a
part come from the model's shape and the machine's rates, or from a profile.
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from seq1f1b.flat import whole
from seq1f1b.partition import MOST_TOKENS, Layer, ModelShape, has_equal_layers, layers_of
from seq1f1b.plan import INSIDE, Layout
from seq1f1b.planning.profile import Part, Profile
from seq1f1b.seconds import NO_SECONDS, PassSeconds, Span

if TYPE_CHECKING:
    from seq1f1b.planning.hardware import Hardware, ProfiledHardware

__all__: list[str] = []

_ATTENTION_BACKWARD = 2.5  # flash attention: five matrix products in backward for two in forward
_WHOLE = {"tensor": "heads", "expert": "experts of the model, and data"}
_NARROW = 32  # least rank whose products reach the rate: with 8 they take as long (torch 2.13 on an EPYC, one thread)
_COLLECTIVES, _COLLECTIVES_BACK = 4, 6  # per layer in F, and in I, which gathers the inputs of two products again


class ByParts:
    """Costs of the parts of a model on a machine, from the model's shape and the machine's rates.

    One layer, per token, h = hidden, q = heads * head_dim, g = kv_heads * head_dim, f = ffn of a token's experts:
    F is 2 (2 h q + 2 h g + 3 h f) FLOP of products and 4 q per earlier token of attention; I and W each repeat the
    products; I has 2.5 times the attention of F, W none. Every pass also has elementwise traffic, exposed collectives
    (4 in F, 6 in I, which gathers two inputs again), costs that do not depend on the number of rows (ends of
    attention's tiles, latencies, sums of weight gradients), and the kernel launches as a lower bound. The first stage
    has the embedding (bytes only), the last stage the head.

    Each kind of layer has products and pairs of tokens of its own. A layer with a window counts the pairs within the
    window, a constant number per token far from the begin. A recurrence has constant work per token, at attention's
    rates, and saves the inputs and outputs of the fused kernels. Each unit keeps one state, whatever the unit's length.
    """

    def __init__(
        self, model: ModelShape, hardware: Hardware, layout: Layout, layers: tuple[int, ...], num_ranks: int
    ) -> None:
        self.model, self.hardware, self.layout = model, hardware, layout
        self.layers, self.num_ranks = layers, num_ranks  # layers of each stage; ranks that share a spread vocabulary
        self.layer_kinds, self.places = layers_of(model)  # sizes of layers, by kind; the kind of each layer
        self.windows = tuple(sorted({layer.window for layer in self.layer_kinds} - {0}))
        of_stages = [self.places[begin:end] for begin, end in pairwise([0, *accumulate(layers)])]
        kinds = range(len(self.layer_kinds))
        self.counts: Any = np.array([[own.count(kind) for kind in kinds] for own in of_stages])  # [stage, kind]
        stages = np.arange(len(layers))[:, None]
        self.spreads = layout.vocabulary == "ranks"
        # The stages with the whole embedding and the whole head, [stage, 1]; none if all ranks have shards.
        self.first: Any = (stages == 0) * (1 - self.spreads)
        self.last: Any = (stages == len(layers) - 1) * (1 - self.spreads)
        self.devices = layout.tensor * layout.context  # share a token's work
        # Bytes per second among the neighbouring devices of each group.
        groups = {"tensor": layout.tensor, "context": self.devices, "expert": layout.expert * self.devices}
        groups["data"] = layout.data * self.devices * num_ranks
        near, far = (hardware.link_efficiency * x for x in (hardware.inside_bandwidth, hardware.between_bandwidth))
        self._rates = {name: near if size <= hardware.node_size else far for name, size in groups.items()}
        self.message_bytes = model.hidden * hardware.element_bytes / self.devices  # of a token, on one of the devices
        self._weight_bits = layout.weight_bits or 8 * hardware.element_bytes
        self._is_frozen = layout.is_frozen
        self._has_w = not self._is_frozen or layout.lora > 0  # matrices save their inputs for W alone
        # A loss that does not contain the head saves an fp32 probability for each word.
        self._saved_logits = 0.0 if layout.head_in_loss else model.vocab / self.devices * 4
        # By kind of layer: bytes of activations that a token saves, by recomputation inside of blocks; products of q
        # with a key, and of a weight with its value, in whole tiles of heads; and parameters on one device.
        self.saved_bytes = list[dict[str, float]]()
        self._pair_flops, self.layer_parameters = list[float](), list[float]()
        h, e, tile = model.hidden, hardware.element_bytes, hardware.head_tile
        for layer in self.layer_kinds:
            # Inputs and outputs of norms, q, attention's output and softmax sums; keys and values are the cache's. Then
            # gate, up and the product of both, and what the experts get and return.
            saved = e * ((1 + self._has_w) * layer.norms * h + layer.kept) + 4 * layer.heads
            of_ffn = e * (2 + self._has_w) * layer.ffn
            routed = 2 * e * h * layer.experts_per_token if layer.experts > 1 else 0.0
            self.saved_bytes.append({"none": saved + of_ffn + routed, "ffn": saved + routed, "full": e * h})
            sizes = [size / layer.heads for size in (layer.queries, layer.values)] if layer.heads else []
            self._pair_flops.append(2 * layer.heads * tile * sum(math.ceil(size / tile) for size in sizes))
            router, shared_by = (h * layer.experts, layout.expert) if layer.experts > 1 else (0, 1)
            dense = layer.mixer + 3 * h * layer.shared + layer.norms * h + layer.other + router
            self.layer_parameters.append((dense + 3 * h * layer.expert * layer.experts / shared_by) / layout.tensor)
        # Bytes of a token's logits, temporary: logits, fp32 copy and fp32 gradient, less the saved part.
        self.logit_bytes = model.vocab / self.devices * (e + 8) - self._saved_logits
        # By stage, of a token: keys and values, and the gradients of both; temporary bytes of the longest unit, which
        # are at least another number.
        keys: Any = self.counts @ [layer.keys / self.devices for layer in self.layer_kinds]
        self.cache_bytes: Any = np.array([keys * e, keys * 4])
        again = 0.0 if layout.inside == "none" else max(each["none"] for each in self.saved_bytes) / self.devices
        self.work_bytes: Any = np.maximum(again, self.last[:, 0] * self.logit_bytes)
        self.least_work: Any = np.zeros(len(layers))
        # By stage: parameters on one device, all and trained; bytes of frozen weights; seconds for the exposed part of
        # the gradients' reduction, and for the optimizer.
        copies: Any = self.first + self.last - (model.tied and len(layers) == 1)
        if self.spreads:  # a shard of embedding and head, counted for the first stage of every rank
            copies = (stages < num_ranks) * (2 - model.tied) / num_ranks
        parameters: Any = self.counts @ self.layer_parameters + copies[:, 0] * h * model.vocab / layout.tensor
        self.stage_parameters: list[float] = parameters.tolist()
        self.trained_parameters, self.frozen_bytes = self.stage_parameters, [0.0] * len(layers)
        if self._is_frozen:
            adapters = [layout.lora * self._adapted(layer) / layout.tensor for layer in self.layer_kinds]
            self.trained_parameters = list(map(float, self.counts @ adapters))
            scale = 0.5 * (layout.weight_bits in (4, 8))  # a block of 64 weights has a scale in float32
            self.frozen_bytes = [n * (self._weight_bits + scale) / 8 for n in self.stage_parameters]
        written, data = hardware.gradient_bytes + hardware.element_bytes, layout.data
        self.trained_bytes = written + hardware.optimizer_bytes / data  # weight, gradient and state of a parameter
        moved, touched = (data - 1) / data * written, (written + 2 * hardware.optimizer_bytes) / data
        of_parameter = hardware.data_exposed * moved / self._rates["data"] + touched / hardware.bandwidth
        self.optimizer_seconds = [of_parameter * n for n in self.trained_parameters]

    # -- seconds

    def layer(self, span: Span, kind: int = 0, floor: bool = True) -> PassSeconds:
        """Returns the seconds of one layer of a kind. floor: see :meth:`seconds`."""
        hw, layer, layout, hidden = self.hardware, self.layer_kinds[kind], self.layout, self.model.hidden
        t, c, e = layout.tensor, layout.context, layout.expert
        tokens, width = span.tokens / self.devices, hidden * hw.element_bytes
        # Attention, or a recurrence, whose work per token is constant.
        pairs = span.within[self.windows.index(layer.window)] if layer.window else span.pairs
        flops = (self._pair_flops[kind] * pairs + layer.scan * span.tokens) / self.devices
        attention = flops / (hw.peak * hw.attention_forward_efficiency)
        attention_back = _ATTENTION_BACKWARD * flops / (hw.peak * hw.attention_backward_efficiency)
        products = 3 * hidden * layer.ffn  # numbers in the feed-forward's matrices
        weight = 2 * (layer.mixer + products) * tokens / (hw.peak * hw.linear_efficiency)
        # F writes each saved tensor and the next operation reads it; backward reads the tensor and moves its gradient.
        traffic = hw.saved_moves * self.saved_bytes[kind]["none"] * tokens / hw.bandwidth
        forward = weight + attention + traffic
        # Exchange of tokens with experts, there and back; all-gathers and reduce-scatters of hidden states.
        routed = 0.0
        if layer.experts > 1:
            moved = 2 * (e - 1) / e * tokens * layer.experts_per_token * width
            routed = hw.expert_exposed * moved / self._rates["expert"]
        collectives = collectives_back = routed
        if t > 1:
            each = hw.tensor_exposed * (t - 1) / t * span.tokens / c * width / self._rates["tensor"]
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
                prefix = layer.keys * hw.element_bytes * span.end / self.devices / hw.bandwidth
            fixed = attention * hw.attention_forward_rows / rows + _COLLECTIVES * latency + 2 * prefix
            fixed_back = attention_back * hw.attention_backward_rows / rows + _COLLECTIVES_BACK * latency + 3 * prefix
            fixed_back += fixed if layout.inside == "full" else 0.0
            if self._weight_bits < 8 * hw.element_bytes:  # written in activations' dtype, and read again
                opened = self.layer_parameters[kind] * (self._weight_bits / 8 + 2 * hw.element_bytes) / hw.bandwidth
                fixed, fixed_back = fixed + opened, fixed_back + opened
            summed = 2 * hw.gradient_bytes * self.layer_parameters[kind] / hw.bandwidth  # sums of weight gradients
            forward = np.maximum(forward + fixed, hw.launch * hw.forward_kernels)
            back = np.maximum(back + fixed_back, hw.launch * hw.input_kernels)
            if c > 1:  # keys and values of the prefix come round the ring of devices, hidden while attention lasts
                seen = np.minimum(span.end, span.tokens + layer.window) if layer.window else span.end
                ring = (c - 1) / c * seen * layer.keys / t * hw.element_bytes / self._rates["context"]
                forward = forward + np.maximum(0.0, ring - attention)
                back = back + np.maximum(0.0, 2 * ring - attention_back)
            weight = np.maximum(weight + summed, hw.launch * hw.weight_kernels)
        forward, back = forward + collectives, back + collectives_back
        if not self._is_frozen:
            return PassSeconds(forward, back, weight, back + weight, forward)
        each = 0.0 * weight
        if layout.lora:  # in each of F, I and W, at the rate of W but for a low rank; inputs and outputs are moved
            numbers = self._adapted(layer)
            each = weight * max(layout.lora, _NARROW) * numbers / (layer.mixer + products)
            each = each + 2 * numbers * hw.element_bytes * tokens / hw.bandwidth
        return PassSeconds(forward + each, back + each, each, back + each + each, forward + each)

    def _adapted(self, layer: Layer) -> Any:
        """Returns how many numbers of a token the matrices with adapters read and write: all but those of experts."""
        h, ffn = self.model.hidden, layer.ffn if layer.experts == 1 else layer.shared
        of_mixer = (4 if layer.heads else 2) * h + layer.inner + layer.outer
        return of_mixer + 3 * (h + ffn) * (ffn > 0)

    def vocabulary(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        """Returns the seconds of the whole embedding, zero, since its traffic is not counted, and of the whole head: a
        product for each of F, I and W, and logits written and read in fp32."""
        hw, words = self.hardware, self.model.vocab / self.devices * span.tokens
        each = 2 * self.model.hidden * words / (hw.peak * hw.linear_efficiency)
        each += hw.saved_moves * 4 * words / hw.bandwidth
        weight = 0.0 * each if self._is_frozen else each
        return NO_SECONDS, PassSeconds(each, each, weight, each + weight, 0.0 if self.layout.head_in_loss else each)

    def seconds(self, span: Span, floor: bool = True) -> tuple[Any, dict[str, Any]]:
        """Returns the seconds of units, a ``PassSeconds`` of arrays [stage, unit]; and of S, T, E and G of one rank's
        share of a vocabulary over the ranks, if there is one: arrays by names of :class:`seq1f1b.Costs`.

        floor: False leaves out the costs that do not depend on the unit's length; the rest adds up over segments.
        """
        (embedding, head), unit = self.vocabulary(span, floor), 0.0 * span.tokens
        layers = [self.layer(span, kind, floor) for kind in range(len(self.layer_kinds))]
        split, overhead = 1 + self.hardware.split_backward_extra, floor * self.hardware.unit_overhead
        found = []
        for i, factor in enumerate((1.0, split, split, 1.0, 1.0)):  # only I and W pay for the split of a backward
            whole = self.first * embedding[i] + self.last * head[i] + unit
            for kind, layer in enumerate(layers):
                whole = whole + self.counts[:, kind, None] * layer[i]
            found.append(whole * factor + overhead)
        shares = {}
        if self.spreads:
            shares = {"statistics": head.forward, "loss": head.backward}
            shares |= {"embed": embedding.forward, "embed_gradient": embedding.backward}
        shards = {name: 0.0 * found[0] + each / self.num_ranks + overhead for name, each in shares.items()}
        return PassSeconds(*found), shards

    # -- bytes

    def held(self, tokens: Any) -> tuple[Any, Any, Any]:
        """Returns the bytes that units of so many tokens hold beside the cache, arrays [stage, unit]: saved
        activations, the part kept until W, and the gradients that I adds for W."""
        h, e, of_kinds = self.model.hidden, self.hardware.element_bytes, []
        for layer, bytes_of in zip(self.layer_kinds, self.saved_bytes, strict=True):
            saved = bytes_of[self.layout.inside]
            saved += layer.keys * e if self.layout.copies_prefix else 0.0
            routed = e * h * layer.experts_per_token if layer.experts > 1 else 0.0
            hidden = min(layer.norms, 2) * h  # inputs, or outputs, of the mixer and of the feed-forward
            of_norms, of_ffn = e * (hidden + layer.outer) + routed, e * layer.ffn
            if not self._has_w:  # nothing is kept for W, or left to W
                of_norms = of_ffn = 0.0
            # I leaves gradients of q, k, v, gate, up and two outputs to W, and recomputed inputs.
            again = {"none": 0.0, "ffn": of_ffn, "full": of_norms + of_ffn}[self.layout.inside]
            left = e * (hidden + layer.inner + 2 * layer.ffn) + routed + again
            of_token = [self.hardware.activation_factor * x for x in (saved, of_norms + of_ffn - again, left)]
            state = 4 * layer.state + e * layer.tail  # handed to the next segment, whatever the unit's length
            of_kinds.append([x / self.devices for x in (*of_token, state)])
        columns = [sum(map(operator.mul, self.counts.T, column)) for column in zip(*of_kinds, strict=True)]
        saved, kept, left, state = (column[:, None] for column in columns)
        words, gradients = self._saved_logits * tokens, 0.0
        if not self.layout.head_in_loss:
            gradients = self.model.vocab * self.hardware.element_bytes / self.devices * tokens
        return saved * tokens + state + self.last * words, kept * tokens, left * tokens + self.last * gradients


def check_layout(layout: Layout, model: ModelShape, num_stages: int, seq_len: int) -> None:
    """Raises ``ValueError`` unless model, stages and degrees fit, and the documents sum to the sequence."""
    whole("seq_len", seq_len, 1, MOST_TOKENS)
    layers, _ = layers_of(model)  # raises unless the shape is sound
    if num_stages < 1 or num_stages > model.layers:
        raise ValueError(f"there are {num_stages} stages, must be in 1..{model.layers}, the model's layers")
    for name, least in {"tensor": 1, "context": 1, "expert": 1, "data": 1, "lora": 0}.items():
        whole(name, getattr(layout, name), least)
    if layout.context > 1 and any(layer.scan or layer.state or layer.tail for layer in layers):
        raise ValueError(
            f"context is {layout.context}, must be 1: the model has layers that keep a state along the sequence"
        )
    for degree, name, total in (
        *((layout.tensor, "tensor", layer.heads) for layer in layers),
        *((layout.expert, "expert", experts) for experts in {layer.experts for layer in layers} - {1} or {1}),
        (layout.expert, "expert", layout.data),
    ):
        if total % degree != 0:
            raise ValueError(f"{name} is {degree}, must divide {total} ({_WHOLE[name]})")
    for name, word, words in (("inside", layout.inside, INSIDE), ("vocabulary", layout.vocabulary, ("ends", "ranks"))):
        if word not in words:
            raise ValueError(f"{name} is {word!r}, must be one of {', '.join(words)}")
    if layout.vocabulary == "ranks" and (model.vocab == 0 or not layout.head_in_loss):
        raise ValueError("vocabulary 'ranks' needs a model with vocab, and head_in_loss, as the shards hold the loss")
    if layout.layers is not None and (
        len(layout.layers) != num_stages or sum(layout.layers) != model.layers or min(layout.layers) < 0
    ):
        raise ValueError(
            f"layers are {list(layout.layers)}: must be {num_stages} numbers, one per stage, "
            f"that sum to the model's {model.layers}"
        )
    if layout.weight_bits is not None and (layout.weight_bits not in (4, 8, 16) or not layout.is_frozen):
        raise ValueError(
            f"weight_bits is {layout.weight_bits}, must be 4, 8 or 16, of frozen weights: give frozen or lora"
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
        self._profile, runs, layer = hardware.profile, hardware.measured_runs, hardware.profile.layer
        self.message_bytes = layer.message_bytes
        self.cache_bytes = np.outer((layer.kv_bytes, layer.kv_gradient_bytes), layers)
        # B's gradients of a layer, and of the embedding.
        self.work_bytes = np.maximum(self.work_bytes, layer.gradient_token_bytes)
        if hardware.profile.embedding is not None and not self._is_frozen:
            self.least_work = self.first[:, 0] * hardware.gradient_bytes * model.hidden * model.vocab
        names = PassSeconds._fields
        self._of_layer = PassSeconds(*(runs * getattr(hardware, f"measured_{name}") for name in names))
        self._of_ends = PassSeconds(*[runs * hardware.measured_ends] * len(names))

    # -- seconds

    def layer(self, span: Span, kind: int = 0, floor: bool = True) -> PassSeconds:
        return _scaled(self._profile.layer, self._of_layer, span, floor)

    def vocabulary(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        profile, factors = self._profile, self._of_ends
        embedding, head = (_scaled(part, factors, span, floor) for part in (profile.embedding, profile.head))
        if self._is_frozen:
            embedding = NO_SECONDS._replace(forward=embedding.forward)
            head = head._replace(weight=0.0, backward=head.input)
        if self.layout.head_in_loss and not self.spreads:
            head = NO_SECONDS._replace(forward=head.total)
        return embedding, head

    # -- bytes

    def held(self, tokens: Any) -> tuple[Any, Any, Any]:
        profile = self._profile
        head = None if self.layout.head_in_loss else profile.head
        parts = ((self.counts, profile.layer), (self.first, profile.embedding), (self.last, head))
        units = [part.unit_bytes(tokens, count) for count, part in parts if part is not None]
        saved, kept, added = (reduce(operator.add, each) for each in zip(*units, strict=True))
        return saved, kept, added


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
    measured = {"tensor": 1, "context": 1, "expert": 1, "inside": "none", "copies_prefix": False, "weight_bits": None}
    measured |= {"lora": profile.lora, "frozen": layout.frozen and profile.lora > 0}
    for name, value in measured.items():
        if (asked := getattr(layout, name)) != value:
            remedy = f"measure with seq1f1b profile --lora {asked}, or " * (name == "lora") + "plan without a profile"
            raise ValueError(f"{name} is {asked!r}, the profile is of layers with {name} {value!r}: {remedy}")
