"""Which layouts fit a model, and which of them a profile tells of."""

from __future__ import annotations

from seq1f1b.partition import ModelShape, has_equal_layers, layers_of
from seq1f1b.plan import Layout
from seq1f1b.planning.profile import Profile

__all__ = ["INSIDE", "check_layout", "check_profile"]

INSIDE = ("none", "ffn", "full")
"""Recomputation inside the backward: nothing, the feed-forward's inner activations, or all but each layer's input."""
_WHOLE = {"tensor": "heads", "expert": "experts of the model, and data"}


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
