"""How many layers each stage of a transformers model gets, by what the layers and the head cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__: list[str] = []

_BACKWARD_OF_ATTENTION = 2.5  # products of flash attention's backward over those of its forward: 5 / 2
_VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "top_k")


def layer_work(
    model: Any, layers: Sequence[nn.Module], limits: Sequence[tuple[int | None, int | None]], seq_len: int
) -> tuple[list[float], float]:
    """Floating-point operations per token of a step: of each layer, and of the head.

    Counted are products with weight matrices, of experts as many as a token visits, and attention: every token attends
    to the earlier ones of ``seq_len``, or of the layer's window or chunk (``limits``). Each has a forward, a backward
    to its input unless nothing below is trained, and one to its weights where they are trained.
    """
    config = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    trained = any(p.requires_grad for p in embedding.parameters())  # up to here
    work = []
    for layer, (window, chunk) in zip(layers, limits, strict=True):
        length = min(seq_len, chunk or seq_len)
        in_layer = any(p.requires_grad for p in layer.parameters())
        passes = 1.0 + (trained or in_layer)
        matrices = [(name, p) for name, p in layer.named_parameters() if p.dim() >= 2]
        of_weights = sum(_products(name, p, layer, config) * (passes + p.requires_grad) for name, p in matrices)
        attended = _attended(layer, config, min(length, window or length), length) * (
            1 + _BACKWARD_OF_ATTENTION * (trained or in_layer)
        )
        work.append(of_weights + attended)
        trained = trained or in_layer
    weight = head.weight
    return work, 2.0 * weight.numel() * (1.0 + trained + weight.requires_grad)


def _products(name: str, parameter: Tensor, layer: nn.Module, config: Any) -> float:
    """Two operations for each element that a token meets."""
    path = name.split(".")
    at = next((i for i, part in enumerate(path) if part.endswith("experts") and not part.startswith("shared")), None)
    share = 1.0
    if at is not None:
        experts = layer.get_submodule(".".join(path[: at + 1]))
        total = len(experts) if isinstance(experts, nn.ModuleList) else parameter.shape[0] if parameter.dim() > 2 else 1
        visited = next((n for n in (getattr(config, key, None) for key in _VISITED) if n), 1)
        share = min(1.0, visited / total)
    return 2.0 * parameter.numel() * share


def _attended(layer: nn.Module, config: Any, window: int, seq_len: int) -> float:
    """Operations of a token's attention in one forward, in the mean of a sequence."""
    found: list[Any] = [m for m in layer.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    if not found:
        return 0.0
    attention = found[0]
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    of_keys: int = getattr(attention, "qk_head_dim", None) or size
    of_values: int = getattr(attention, "v_head_dim", None) or size
    pairs = window - window * (window - 1) / 2 / seq_len  # in the mean of seq_len tokens, each with itself
    return 2.0 * heads * (of_keys + of_values) * pairs
