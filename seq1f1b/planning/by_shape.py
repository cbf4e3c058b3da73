"""Seconds and bytes of a model's parts from its shape and the rates of a machine."""

from __future__ import annotations

import math
from functools import cached_property

from seq1f1b.planning.by_parts import ByParts, UnitBytes
from seq1f1b.seconds import NO_SECONDS, PassSeconds, Span

__all__: list[str] = []

_ATTENTION_BACKWARD = 2.5  # products of flash attention's backward over those of its forward: 5 / 2
_COLLECTIVES, _COLLECTIVES_BACK = 4, 6  # of a layer: backward gathers the inputs of two products again


class ByShape(ByParts):
    """The parts of a model whose shape is known.

    One layer, per token, h = hidden, q = heads * head_dim, g = kv_heads * head_dim, f = ffn of a token's experts:
    F is 2 (2 h q + 2 h g + 3 h f) FLOP of products and 4 q per earlier token of attention; I and W each repeat the
    products, and I has the 2.5-fold attention, W none. To each pass come its elementwise traffic, exposed collectives
    (4 in F, 6 in I, which gathers two inputs again), what few rows take as long as many for (the ends of attention's
    tiles, latencies, sums of weight gradients), and the floor of its kernel launches. The first stage has the embedding
    (bytes only), the last the head.
    """

    # -- seconds

    def layer(self, span: Span) -> PassSeconds:
        hw, attention = self.hardware, self._attention(span)
        (work, collectives), fixed = self._work(span, attention), self._fixed(span, attention)
        ring = self._ring(span)  # hidden behind attention as far as that lasts
        forward = max(work.forward + fixed.forward, hw.launch * hw.forward_kernels)
        back = max(work.input + fixed.input, hw.launch * hw.input_kernels)
        weight = max(work.weight + fixed.weight, hw.launch * hw.weight_kernels)
        forward += collectives[0] + max(0.0, ring - attention[0])
        back += collectives[1] + max(0.0, 2 * ring - attention[1])
        return PassSeconds(forward, back, weight, back + weight, forward)

    def flow(self, span: Span) -> float:
        work, collectives = self._work(span, self._attention(span))
        return work.total + sum(collectives)

    def head(self, span: Span, floor: bool = True) -> PassSeconds:
        """F, I and W are each a product, and logits written and read in fp32."""
        hw, words = self.hardware, self.model.vocab / self.shards * span.tokens
        each = 2 * self.model.hidden * words / (hw.peak * hw.linear_efficiency)
        each += hw.saved_moves * 4 * words / hw.bandwidth
        return PassSeconds(each, each, each, 2 * each, 0.0 if self.layout.head_in_loss else each)

    def embedding(self, span: Span, floor: bool = True) -> PassSeconds:
        """No seconds: the traffic of an embedding is not counted."""
        return NO_SECONDS

    def _attention(self, span: Span) -> tuple[float, float]:
        """Attention's part of F and of I."""
        hw = self.hardware
        head_dim = hw.head_tile * math.ceil(self._q / self.model.heads / hw.head_tile)
        flops = 4 * self.model.heads * head_dim * span.pairs / self.shards
        back = _ATTENTION_BACKWARD * flops / (hw.peak * hw.attention_backward_efficiency)
        return flops / (hw.peak * hw.attention_forward_efficiency), back

    def _work(self, span: Span, attention: tuple[float, float]) -> tuple[PassSeconds, tuple[float, float]]:
        """One layer without what is fixed, and the collectives of F and of I."""
        hw, h, tokens = self.hardware, self.model.hidden, span.tokens / self.shards
        linear = 2 * (2 * h * self._q + 2 * h * self._g + 3 * h * self._f) * tokens / (hw.peak * hw.linear_efficiency)
        # What is saved was written once, and is read once by what follows; backward reads it and moves its gradient.
        traffic = hw.saved_moves * self._all_saved * tokens / hw.bandwidth
        experts = self._experts(tokens)
        collectives = self._gathers(span.tokens, _COLLECTIVES) + experts
        collectives_back = self._gathers(span.tokens, _COLLECTIVES_BACK) + experts
        forward = linear + attention[0] + traffic
        again = 0.0
        if self.layout.inside != "none":
            again = forward + collectives if self.layout.inside == "full" else 2 / 3 * self._ffn_share() * linear
        back = linear + attention[1] + 1.5 * traffic + again
        return PassSeconds(forward, back, linear, back + linear), (collectives, collectives_back)

    def _fixed(self, span: Span, attention: tuple[float, float]) -> PassSeconds:
        """Seconds of F, I and W of one layer, however few rows a unit has: the begin and end of attention's tiles, the
        latency of collectives, sums of weight gradients, a copied prefix."""
        hw = self.hardware
        rows = max(span.tokens / self.layout.context, 1.0)
        latency = hw.collective_latency * hw.tensor_exposed * (self.layout.tensor > 1)
        prefix = 0.0
        if self.layout.copies_prefix:  # read and written in F; read, read and written in the sum of gradients
            prefix = 2 * self._g * hw.element_bytes * span.end / self.shards / hw.bandwidth
        summed = 2 * hw.gradient_bytes * self.layer_parameters / hw.bandwidth
        forward = attention[0] * hw.attention_forward_rows / rows + _COLLECTIVES * latency + 2 * prefix
        back = attention[1] * hw.attention_backward_rows / rows + _COLLECTIVES_BACK * latency + 3 * prefix
        if self.layout.inside == "full":
            back += forward
        return PassSeconds(forward, back, summed, back + summed, forward)

    def _ffn_share(self) -> float:
        h = self.model.hidden
        return 3 * h * self._f / (2 * h * self._q + 2 * h * self._g + 3 * h * self._f)

    def _gathers(self, tokens: int, count: int) -> float:
        """So many all-gathers and reduce-scatters of hidden states."""
        hw, t = self.hardware, self.layout.tensor
        if t == 1:
            return 0.0
        moved = count * (t - 1) / t * tokens / self.layout.context * self.model.hidden * hw.element_bytes
        return hw.tensor_exposed * moved / hw.link(t)

    def _experts(self, tokens: float) -> float:
        """Tokens to their experts and back."""
        hw, e = self.hardware, self.layout.expert
        if self.model.experts == 1:
            return 0.0
        moved = 2 * (e - 1) / e * tokens * self.model.experts_per_token * self.model.hidden * hw.element_bytes
        return hw.expert_exposed * moved / hw.link(e * self.layout.tensor * self.layout.context)

    def _ring(self, span: Span) -> float:
        """Keys and values of the prefix that the other devices of the ring hold."""
        c, hw = self.layout.context, self.hardware
        if c == 1:
            return 0.0
        moved = (c - 1) / c * span.end * 2 * self._g / self.layout.tensor * hw.element_bytes
        return moved / hw.link(c * self.layout.tensor)

    # -- bytes

    def held(self, tokens: int) -> list[UnitBytes]:
        (saved, kept, left), words, gradients = self._token_bytes
        found = []
        for layers, _, is_last in self.stages:
            head, of_gradients = (words * tokens, gradients * tokens) if is_last else (0.0, 0.0)
            whole = (layers * saved * tokens + head, layers * kept * tokens, layers * left * tokens + of_gradients)
            found.append(UnitBytes(*map(math.ceil, whole)))
        return found

    def work(self, tokens: int) -> list[tuple[int, int]]:
        return []

    def standing_work(self, tokens: int, is_last: bool) -> float:
        work = 0.0 if self.layout.inside == "none" else self._all_saved * tokens / self.shards
        return max(work, self.logit_work(tokens)) if is_last else work

    @cached_property
    def _token_bytes(self) -> tuple[tuple[float, float, float], float, float]:
        """Saved, kept and left bytes of a layer, and the head's logits and their gradients, per token."""
        saved, (kept, left) = self._saved_bytes(self.layout.inside), self._left_bytes()
        own = 2 * self._g * self.hardware.element_bytes if self.layout.copies_prefix else 0.0
        of_layer = [self.hardware.activation_factor * each / self.shards for each in (saved + own, kept, left)]
        gradients = 0.0 if self.layout.head_in_loss else self.model.vocab * self.hardware.element_bytes
        return (of_layer[0], of_layer[1], of_layer[2]), self._saved_logits, gradients / self.shards

    @cached_property
    def _all_saved(self) -> float:
        return self._saved_bytes("none")

    def _saved_bytes(self, inside: str) -> float:
        """Activations of one token and layer: norms' inputs and outputs, q, attention's output and its sums, gate, up
        and their product. Keys and values are counted with the cache."""
        m, e = self.model, self.hardware.element_bytes
        if inside == "full":
            return e * m.hidden
        saved = e * (4 * m.hidden + 2 * self._q) + 4 * m.heads
        if inside == "none":
            saved += e * 3 * self._f
        if m.experts > 1:
            saved += 2 * e * m.hidden * m.experts_per_token  # tokens as sent to the experts, and what came back
        return saved

    def _left_bytes(self) -> tuple[float, float]:
        """Bytes that W reads of one token and layer: inputs that F saved, and what I leaves beside them.

        I leaves gradients of q, k, v, gate, up and two outputs, and inputs that were computed again.
        """
        m, e = self.model, self.hardware.element_bytes
        routed = e * m.hidden * m.experts_per_token if m.experts > 1 else 0.0
        inputs = {"norms": e * (2 * m.hidden + self._q) + routed, "ffn": e * self._f}
        gradients = e * (2 * m.hidden + self._q + 2 * self._g + 2 * self._f) + routed
        again = {"none": (), "ffn": ("ffn",), "full": ("norms", "ffn")}[self.layout.inside]
        left = gradients + sum(inputs[name] for name in again)
        return sum(inputs.values()) + gradients - left, left
