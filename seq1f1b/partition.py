"""How one sequence is cut into segments: even, of equal FLOPs, or of equal measured cost; and layers into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from seq1f1b import _C
from seq1f1b.files import load
from seq1f1b.flat import numbers, whole

__all__ = ["LayerKind", "ModelShape", "check_model", "check_segment_sizes", "make_model", "partition_sequence"]


_PIECES = 1024  # a split by a profile balances the costs of so many pieces of the sequence
MOST_TOKENS = 1 << 40  # in a sequence
MOST_LAYERS = 1 << 16  # in a model, because ``layers_of`` lists all layers
_PIECES_OF_KINDS = 16384  # pieces, for a split by operations of unequal layers


class PieceCosts(Protocol):
    """Costs of a model: :class:`seq1f1b.planning.profile.Profile`, :class:`seq1f1b.planning.cost.CostModel`."""

    def piece_costs(self, seq_len: int, num_pieces: int) -> list[float]:
        """Returns seconds of F and B of the whole model over each of ``num_pieces`` equal pieces of a sequence."""


class LayerKind(NamedTuple):
    """Differences between one kind of layers and the layers of :class:`ModelShape`. None: as in ``ModelShape``.

    Attributes:
        heads: heads of causal attention; 0: no attention.
        kv_heads, head_dim, ffn, experts, experts_per_token: as in ``ModelShape``.
        value_dim: size of a head of values; None: ``head_dim``.
        window: tokens that a token attends to, itself included; 0: all before it.
        shared: inner width of a gated feed-forward beside the experts, visited by every token.
        mixer: weights of the matrices of attention, or of attention's replacement; None: of q, k, v and the output.
        inner, outer, kept: numbers per token written by the mixer's first matrices, read by the last matrix, and kept
            for the backward; None: q, k and v, attention's output, and q with attention's output.
        scan: floating-point operations of a token in a recurrence.
        state, tail: numbers of a sequence that a segment hands to the next, in float32, and in the dtype of weights.
        norms: number of norms of hidden states.
        other: parameters beyond matrices, a router and ``norms``: biases, sinks, norms of heads, convolutions.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    value_dim: int | None = None
    window: int = 0
    shared: int = 0
    mixer: int | None = None
    inner: int | None = None
    outer: int | None = None
    kept: int | None = None
    scan: int = 0
    state: int = 0
    tail: int = 0
    norms: int = 2
    other: int = 0


class Layer(SimpleNamespace):
    """Sizes of a layer, per token except for weights.

    Attributes:
        queries, values, keys: numbers of q, of attention's output, and of keys and values together.
        ffn: inner width of all feed-forwards that a token visits.
        expert: inner width of one of the ``experts``.
        Other fields are those of :class:`LayerKind`.
    """


class ModelShape(NamedTuple):
    """The shape on which a token's cost depends: a decoder with grouped-query attention and a SwiGLU feed-forward.

    Attributes:
        ffn: inner width of the feed-forward's three matrices, of one expert if there are several; 0: none. A plain
            two-matrix feed-forward of width f counts as 2 f / 3.
        vocab: words of the embedding and of the output head; 0: neither.
        head_dim: size of a head; 0: ``hidden / heads``.
        experts, experts_per_token: feed-forwards of a layer, and the number that a token visits.
        tied: whether the head is the embedding; a pipeline of several ranks still holds both.
        kinds: kinds of layers, ``seq1f1b.partition.LayerKind``, which is provisional: for windows, recurrences or
            unequal layers, which the fields above cannot describe; (): all layers are as above.
        pattern: layer i is of the kind with number ``pattern[i % len(pattern)]``; (): all are of the first kind.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    experts: int = 1
    experts_per_token: int = 1
    tied: bool = False
    kinds: tuple[LayerKind, ...] = ()
    pattern: tuple[int, ...] = ()

    def flops(self, begin: int, end: int) -> float:
        """Returns forward floating-point operations of tokens ``[begin, end)`` that attend causally to ``[0, end)``.

        A backward pass costs twice as much at every position. Norms, rotary positions, the router of experts and the
        embedding look-up are left out.
        """
        if not 0 <= begin <= end <= MOST_TOKENS:
            raise ValueError(f"tokens [{begin}, {end}) are not a range within [0, {MOST_TOKENS})")
        return float(_flops_of(self, [begin, end - begin], (end,))[1])


def layers_of(model: ModelShape) -> tuple[list[Layer], list[int]]:
    """Returns the kinds of the model's layers, and the kind of each layer.

    Raises:
        ValueError, TypeError: the shape is not sound.
    """
    if not isinstance(model, ModelShape):
        raise TypeError(f"model is {model!r:.80}, must be a seq1f1b.ModelShape")
    if not 1 <= model.experts_per_token <= model.experts:
        raise ValueError(
            f"model experts_per_token is {model.experts_per_token}, must be in 1..experts = {model.experts}"
        )
    count, layers, pattern = max(1, len(model.kinds)), list[Layer](), model.pattern or (0,)
    if (count > 1 and not model.pattern) or not all(0 <= number < count for number in pattern):
        raise ValueError(
            f"model pattern is {list(model.pattern)[:20]}, must be numbers of kinds, 0..{count - 1}, layer after layer"
        )
    for number, kind in enumerate(model.kinds):
        given = {name: value for name, value in kind._asdict().items() if value is not None}
        for name, value in given.items():
            whole(f"model kinds[{number}] {name}", value, 0)
        own = {name: value for name, value in given.items() if name in model._fields and (name != "heads" or value)}
        try:
            layers_of(model._replace(**own, kinds=(), pattern=()))
        except ValueError as error:
            raise ValueError(f"model kinds[{number}]: {error}") from None
    for name, least in {"hidden": 1, "heads": 1, "kv_heads": 1, "ffn": 0, "vocab": 0, "head_dim": 0}.items():
        whole(f"model {name}", getattr(model, name), least)
    whole("model layers", model.layers, 1, MOST_LAYERS)
    if model.head_dim == 0 and model.hidden % model.heads:
        raise ValueError(f"model heads is {model.heads}, must divide hidden {model.hidden}")
    if model.heads % model.kv_heads:
        raise ValueError(f"model kv_heads is {model.kv_heads}, must divide heads {model.heads}")
    for kind in model.kinds or (LayerKind(),):
        own = model._asdict() | {name: value for name, value in kind._asdict().items() if value is not None}
        heads, size = own["heads"], own["head_dim"] or model.hidden // model.heads
        of_values = own.get("value_dim", size)
        queries, values, keys = heads * size, heads * of_values, own["kv_heads"] * (size + of_values) if heads else 0
        usual = {"mixer": model.hidden * (queries + keys + values), "inner": queries + keys}
        usual |= {"outer": values, "kept": queries + values}
        found = usual | own | {"queries": queries, "values": values, "keys": keys, "expert": own["ffn"]}
        found["ffn"] = own["ffn"] * own["experts_per_token"] + kind.shared
        layers.append(Layer(**found))
    return layers, [pattern[i % len(pattern)] for i in range(model.layers)]


def has_equal_layers(model: ModelShape) -> bool:
    """Returns whether the shape's own fields describe all layers, but for parameters outside of products."""
    return len(model.kinds) < 2 and all(kind._replace(other=0) == LayerKind() for kind in model.kinds)


def _work_of(model: ModelShape) -> tuple[float, dict[int, int]]:
    """Returns the floating-point operations of a token in products, and of a pair of a query and a key by window."""
    kinds, places = layers_of(model)
    products, of_pairs = 2.0 * model.hidden * model.vocab, dict.fromkeys((layer.window for layer in kinds), 0)
    for number in places:
        layer = kinds[number]
        products += 2 * layer.mixer + 6 * model.hidden * layer.ffn + layer.scan
        of_pairs[layer.window] += 2 * (layer.queries + layer.values)
    return products, of_pairs


def _flops_of(model: ModelShape, sizes: Sequence[int], documents: Sequence[int]) -> Any:
    """Returns the floating-point operations of each segment, an array."""
    from seq1f1b.seconds import spans_of  # imports numpy, which ``import seq1f1b`` does without

    products, of_pairs = _work_of(model)
    span = spans_of(sizes, documents, tuple(of_pairs))
    pairs = zip(of_pairs.values(), span.within, strict=True)
    return products * span.tokens + sum(float(flops) * seen for flops, seen in pairs)


def make_model(data: Mapping[str, Any], name: str) -> ModelShape:
    """Returns a shape from named fields; errors begin with ``name``."""
    shape: ModelShape = load(ModelShape, data, name)
    check_model(shape, name)
    return shape


def check_model(shape: ModelShape, name: str) -> None:
    """Raises ``ValueError``, which begins with ``name``, unless a shape is sound."""
    try:
        layers_of(shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def partition_sequence(
    seq_len: int,
    num_segments: int,
    *,
    strategy: str = "flops",
    model: ModelShape | None = None,
    costs: Sequence[float] | None = None,
    profile: PieceCosts | None = None,
    documents: Sequence[int] | None = None,
    mix: float = 1.0,
    multiple_of: int = 1,
) -> list[int]:
    """Cuts a sequence into segments so that the costliest segment is as cheap as possible.

    Args:
        seq_len: tokens, up to 2**40.
        num_segments: at least 1, at most the multiples of ``multiple_of`` that the sequence holds.
        strategy: ``"even"`` (equal lengths), ``"flops"`` (equal floating-point operations of ``model``), or
            ``"profiled"`` (equal measured ``costs``, or equal time by a ``profile``).
        model: shape of the model, for ``"flops"``.
        costs: for ``"profiled"``: the sequence is cut into ``len(costs)`` pieces of equal length and ``costs[i]`` is
            the cost of piece ``i``, in any unit. One cost per token, or the times of a few equal segments.
        profile: for ``"profiled"``, in place of costs: a measured profile, or a cost model, of the whole model.
        documents: for ``"flops"``: lengths of the documents packed into the sequence, with padding as a document.
            Several rows may follow one another; they are cut alike. Attention stays within a document.
        mix: 1 balances the cost, 0 is the even split; between them the cost of a token is mixed with the mean cost.
        multiple_of: divisor of every size but one: one segment also holds the remainder of ``seq_len``, at the place
            that keeps the costliest segment cheapest.
    Returns:
        ``num_segments`` sizes, each at least 1, that sum to ``seq_len``.
    Raises:
        ValueError: a count is out of range, the model or costs do not fit the strategy, or a cost is negative or not
            finite; the message names the rule and the values.
    Source: computation-wise partition of Seq1F1B, arXiv:2406.03488.
    """
    if profile is not None:
        if strategy != "profiled" or costs is not None:
            raise ValueError("profile= is for strategy 'profiled', in place of costs=")
        costs = profile.piece_costs(seq_len, max(1, min(seq_len, _PIECES)))
        costs = costs if any(costs) else [1.0]  # units have floors alone: all cuts are alike
    needs = {"even": None, "flops": "model", "profiled": "costs"}
    if strategy not in needs:
        raise ValueError(f"strategy is {strategy!r}, must be one of {', '.join(map(repr, needs))}")
    for name, value in (("model", model), ("costs", costs)):
        if (value is None) == (needs[strategy] == name):
            other = " or profile=" if name == "costs" and value is None else ""
            raise ValueError(f"strategy {strategy!r} {'needs' if value is None else 'takes no'} {name}={other}")
    mix = numbers("mix", "d", [mix])[0]
    if documents is not None and model is None:
        raise ValueError(f"documents= is for strategy 'flops', the strategy is {strategy!r}")
    if isinstance(model, ModelShape) and model.kinds:
        rows = numbers("documents", "q", documents or (seq_len,))
        _C.partition(seq_len, 1, 1.0, 0.0, rows, None, 1.0, 1)  # raises unless documents fill whole rows
        pieces, count = min(seq_len, _PIECES_OF_KINDS), sum(rows) // seq_len
        sizes = [seq_len * (i + 1) // pieces - seq_len * i // pieces for i in range(pieces)]
        costs = list(map(float, _flops_of(model, sizes * count, rows).reshape(count, pieces).sum(axis=0)))
    elif model is not None:
        of_rows = None if documents is None else numbers("documents", "q", documents)
        linear, of_pairs = _work_of(model)
        return _C.partition(seq_len, num_segments, linear, of_pairs[0] / 2, of_rows, None, mix, multiple_of)
    of_pieces = None if costs is None else numbers("costs", "d", costs)
    return _C.partition(seq_len, num_segments, 1.0, 0.0, None, of_pieces, 0.0 if costs is None else mix, multiple_of)


def check_segment_sizes(sizes: Sequence[int], seq_len: int) -> None:
    """Raises ``ValueError``, naming the segment or the sum, unless ``sizes`` are at least 1 and sum to ``seq_len``."""
    if not sizes:
        raise ValueError("there are 0 segment sizes, must be at least 1")
    for i, size in enumerate(numbers("sizes", "q", sizes)):
        if size < 1:
            raise ValueError(f"segment {i} has {size} tokens, must have at least 1")
    if sum(sizes) != seq_len:
        raise ValueError(f"segment sizes sum to {sum(sizes)}, the sequence has {seq_len} tokens")


def balanced(work: Sequence[float], head: float, num_stages: int) -> list[int]:
    """Returns layers per stage, at least one, that make the slowest stage fastest; the last stage also has the head."""
    total = [0.0, *accumulate(work)]

    def split(measure: Callable[[float, float], float], limit: float) -> tuple[float, tuple[int, ...]]:
        """Returns the least measure of all splits with stages of at most ``limit``, and the layers of the best."""
        found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by number of layers in the stages so far
        for stage in range(1, num_stages + 1):
            options: dict[int, list[tuple[float, int, tuple[int, ...]]]] = {}
            for (start, (before, counts)), stop in product(found.items(), range(1, len(total))):
                cost = total[stop] - total[start] + (head if stage == num_stages else 0.0)
                if start < stop and cost <= limit:
                    options.setdefault(stop, []).append((measure(before, cost), stop - start, counts))
            best = {stop: min(splits) for stop, splits in options.items()}
            found = {stop: (least, (*counts, last)) for stop, (least, last, counts) in best.items()}
        return found[len(work)]

    slowest, _ = split(max, math.inf)
    # Among splits with an equally fast slowest stage, take the most even split.
    return list(split(lambda before, cost: before + cost * cost, slowest * (1 + 1e-9))[1])
