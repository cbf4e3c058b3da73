"""How one sequence is cut into segments: even, of equal FLOPs, or of equal measured cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from seq1f1b import _C
from seq1f1b.files import load

__all__ = ["ModelShape", "check_model", "check_segment_sizes", "make_model", "partition_sequence"]


_PIECES = 1024  # a split by a profile balances the costs of so many pieces of the sequence


class PieceCosts(Protocol):
    """A model's measured costs: a :class:`seq1f1b.planning.profile.Profile`, for one."""

    def piece_costs(self, seq_len: int, num_pieces: int) -> list[float]:
        """Seconds of F and B of the whole model over each of ``num_pieces`` equal pieces of a sequence."""


class ModelShape(NamedTuple):
    """The shape that a token's cost depends on: a decoder with grouped-query attention and a SwiGLU feed-forward.

    Attributes:
        ffn: inner width of the feed-forward's three matrices, of one expert if there are several; 0: none. A plain
            two-matrix feed-forward of width f counts as 2 f / 3.
        vocab: words of the embedding and of the output head; 0: neither.
        head_dim: size of a head; 0: ``hidden / heads``.
        experts, experts_per_token: feed-forwards of a layer, and those that a token visits.
        tied: whether the head is the embedding; a pipeline of several ranks still holds both.
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

    def flops(self, begin: int, end: int) -> float:
        """Forward floating-point operations of tokens ``[begin, end)`` that attend causally to ``[0, end)``.

        The formula stands in ``csrc/core/partition.h``; a backward pass costs twice as much at every position.
        """
        return _C.model_flops(_token_shape(self), begin, end)


def _token_shape(model: ModelShape) -> tuple[int, int, int, int, int, int, int]:
    """The part of the model that one token meets, as the core reads it."""
    if not isinstance(model, ModelShape):
        raise TypeError(f"model is {model!r:.80}, must be a seq1f1b.ModelShape")
    if not 1 <= model.experts_per_token <= model.experts:
        raise ValueError(
            f"model experts_per_token is {model.experts_per_token}, must be in 1..experts = {model.experts}"
        )
    return (*model[:4], model.ffn * model.experts_per_token, model.vocab, model.head_dim)


def make_model(data: Mapping[str, Any], name: str) -> ModelShape:
    """A shape from named fields; errors begin with ``name``."""
    shape = load(ModelShape, data, name)
    check_model(shape, name)
    return shape


def check_model(shape: ModelShape, name: str) -> None:
    """Raises ``ValueError``, which begins with ``name``, unless a shape is sound."""
    try:
        shape.flops(0, 1)
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
    """Cuts a sequence into segments so that the costliest one is as cheap as possible.

    Args:
        seq_len: tokens, up to 2**40.
        num_segments: at least 1, at most the multiples of ``multiple_of`` that the sequence holds.
        strategy: ``"even"`` (equal lengths), ``"flops"`` (equal floating-point operations of ``model``), or
            ``"profiled"`` (equal measured ``costs``, or equal time by a ``profile``).
        model: shape of the model, for ``"flops"``.
        costs: for ``"profiled"``: the sequence is cut into ``len(costs)`` pieces of equal length and ``costs[i]`` is
            what piece ``i`` costs, in any unit. One cost per token, or the times of a few equal segments.
        profile: for ``"profiled"``, in place of costs: the whole model as ``seq1f1b profile`` measured it.
        documents: for ``"flops"``: lengths of the documents packed into the sequence, with padding as one of them.
            Several rows may follow one another; they are cut alike. Attention stays within a document.
        mix: 1 balances the cost, 0 is the even split; between them the cost of a token is mixed with the mean cost.
        multiple_of: every size is a multiple of it, except that one segment holds the remainder of ``seq_len``, placed
            where it keeps the costliest segment cheapest.
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
    needs = {"even": None, "flops": "model", "profiled": "costs"}
    if strategy not in needs:
        raise ValueError(f"strategy is {strategy!r}, must be one of {', '.join(map(repr, needs))}")
    for name, value in (("model", model), ("costs", costs)):
        if (value is None) == (needs[strategy] == name):
            other = " or profile=" if name == "costs" and value is None else ""
            raise ValueError(f"strategy {strategy!r} {'needs' if value is None else 'takes no'} {name}={other}")
    if documents is not None and model is None:
        raise ValueError(f"documents= is for strategy 'flops', the strategy is {strategy!r}")
    if model is not None:
        return _C.partition_flops(seq_len, num_segments, _token_shape(model), documents, mix, multiple_of)
    if costs is not None:
        return _C.partition_profiled(seq_len, num_segments, costs, mix, multiple_of)
    return _C.partition_even(seq_len, num_segments, multiple_of)


def check_segment_sizes(sizes: Sequence[int], seq_len: int) -> None:
    """Raises ``ValueError``, naming the segment or the sum, unless ``sizes`` are at least 1 and sum to ``seq_len``."""
    _C.partition_check(sizes, seq_len)
