"""torchtitan's models in segments, made to be copied: a ``ModelSpec`` with causal_attention and its own pipelining.

A function in a registry of train configs takes another config and changes its spec::

    from torchtitan_segmented import segmented

    def llama3_8b_seq1f1b() -> Trainer.Config:
        config = llama3_8b()
        config.model_spec = segmented(config.model_spec, n_segments=4)
        config.parallelism.pipeline_parallel_schedule = "1F1B"
        return config

Needs ``pip install "seq1f1b[torchtitan]"``. ``docs/how-to/torchtitan.md`` says what was run, and what not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, get_schedule_class
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import FlexAttention, GQAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

import seq1f1b


def segmented(spec: ModelSpec, *, n_segments: int, **engine_options: Any) -> ModelSpec:
    """A spec with the names, parameters and checkpoints of `spec`; its pipeline runs every micro-batch in segments.

    :class:`seq1f1b.ScheduleSeq1F1B` runs the stages, or :class:`seq1f1b.ScheduleSeqInterleaved1F1B` if a rank has
    several: ``pipeline_parallel_schedule`` is ``"1F1B"`` or ``"Interleaved1F1B"``. The number of micro-batches is
    ``local_batch_size / pipeline_parallel_microbatch_size``. The spec also trains without a pipeline.

    Args:
        spec: the spec of a decoder with grouped-query attention, such as Llama 3 or Qwen3. It stays as it is.
        n_segments: k, the number of segments of every sequence. A ``ChunkedLossWrapper`` chunks each segment.
        engine_options: any other argument of :class:`seq1f1b.PipelineEngine`; for segments of equal FLOPs
            ``segment_sizes=shape_of(spec.model)``.
    Raises:
        ValueError: the model's attention, or something else in it, cannot run by segments; or, when torchtitan calls
            the spec's ``pipelining_fn``, a parallelism does not work with segments. The message names it.
    """
    if spec.pipelining_fn is None:
        raise ValueError(f"{spec.name} has no pipelining_fn: torchtitan cannot cut it into stages")
    pipeline = pipelining_fn(n_segments=n_segments, base=spec.pipelining_fn, **engine_options)
    return dataclasses.replace(spec, model=convert(spec.model), pipelining_fn=pipeline)


# -- The pipeline ------------------------------------------------------------------------------------------------------


def pipelining_fn(
    *, n_segments: int, base: Callable[..., Any] = pipeline_llm, **engine_options: Any
) -> Callable[..., Any]:
    """Makes the ``pipelining_fn`` of a spec whose model :func:`convert` made; arguments as of :func:`segmented`.

    ``base``, the spec's own, cuts the model and parallelizes its parts.
    """

    def pipeline(
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        device: Any,
        loss_fn: Callable[..., Any],
        **others: Any,
    ) -> tuple[Any, list[nn.Module], bool, bool]:
        check_parallelism(parallelism, training, n_segments)
        others |= {"parallel_dims": parallel_dims, "training": training, "parallelism": parallelism}
        _, parts, has_first, has_last = base(model, device=device, loss_fn=loss_fn, **others)
        mesh = parallel_dims.get_mesh("pp")
        rank, size = mesh.get_local_rank(), mesh.size()
        stages = [
            PipelineStage(part, rank + i * size, size * len(parts), device, group=mesh.get_group())
            for i, part in enumerate(parts)
        ]

        def scalar_loss(*args: Any, **kwargs: Any) -> Tensor:
            loss, _ = loss_fn(*args, **kwargs)  # and its metrics
            return loss

        options = {
            "arg_rules": {"positions": "slice"},
            **engine_options,
            "n_segments": n_segments,
            "scale_grads": False,  # losses are sums over tokens, divided by the count of the whole step
            "loss": seq1f1b.Loss(reduction="sum"),
        }
        M = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        if get_schedule_class(parallelism.pipeline_parallel_schedule) is ScheduleInterleaved1F1B:
            schedule: Any = seq1f1b.ScheduleSeqInterleaved1F1B(stages, M, scalar_loss, **options)
        else:
            schedule = seq1f1b.ScheduleSeq1F1B(stages[0], M, scalar_loss, **options)
        return schedule, parts, has_first, has_last

    return pipeline


def check_parallelism(parallelism: Any, training: Any, n_segments: int) -> None:
    if parallelism.pipeline_parallel_schedule_csv:
        raise ValueError("pipeline_parallel_schedule_csv says an order without segments: leave it empty")
    name = parallelism.pipeline_parallel_schedule
    if get_schedule_class(name) not in (Schedule1F1B, ScheduleInterleaved1F1B):
        raise ValueError(
            f"pipeline_parallel_schedule is {name!r}, must be '1F1B', or 'Interleaved1F1B' for several stages per "
            "rank, in whose place Seq1F1B runs"
        )
    if parallelism.context_parallel_degree > 1:
        raise ValueError("context parallelism cuts the sequence too: set context_parallel_degree to 1")
    if parallelism.tensor_parallel_degree > 1 and parallelism.spmd_backend != "spmd_types":
        raise ValueError(
            f"stages under spmd_backend {parallelism.spmd_backend!r} hand DTensors to one another: tensor parallelism "
            "needs 'spmd_types'"
        )
    if not 1 <= n_segments <= training.seq_len:
        raise ValueError(
            f"n_segments is {n_segments}, must be from 1 to the sequence's length: seq_len is {training.seq_len}"
        )


# -- The model ---------------------------------------------------------------------------------------------------------


def convert(model_config: Decoder.Config) -> Decoder.Config:
    """A copy of a model's config whose attention is :func:`seq1f1b.causal_attention`, document by document."""
    if not isinstance(model_config, Decoder.Config):
        raise ValueError(f"{type(model_config).__qualname__} is not the config of a decoder")
    if getattr(model_config, "vision_encoder", None) is not None:
        raise ValueError("a vision encoder sees whole sequences: its model cannot run by segments")
    converted = copy.deepcopy(model_config)
    for i, layer in enumerate(converted.layers):
        layer.attention = convert_attention(layer.attention, i)
    return converted


def convert_attention(config: Any, index: int) -> SegmentAttention.Config:
    if type(config) is not GQAttention.Config:
        name = "no attention" if config is None else type(config).__qualname__.removesuffix(".Config")
        raise ValueError(
            f"layer {index} has {name}, only torchtitan's GQAttention runs by segments: write other attention, and "
            "other state along the sequence, with seq1f1b.causal_attention and seq1f1b.carry_in"
        )
    inner, window = config.inner_attention, None
    if isinstance(inner, VarlenAttention.Config):
        left, right = inner.window_size
        if right != 0:
            raise ValueError(f"layer {index} has window_size {inner.window_size}: its attention is not causal")
        window = left + 1 if left >= 0 else None
    elif not isinstance(inner, (FlexAttention.Config, ScaledDotProductAttention.Config)):
        raise ValueError(f"layer {index} has inner attention {type(inner).__qualname__.removesuffix('.Config')}")
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields["inner_attention"] = InnerAttention.Config(
        layer=index, window=window, param_init=inner.param_init, sharding_config=inner.sharding_config
    )
    return SegmentAttention.Config(**fields)


class SegmentAttention(GQAttention):
    """Grouped-query attention of the current segment over all before it.

    torchtitan's data loaders give each token its position in its document; without any a sequence is one document.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    # Names of arguments are torchtitan's, which shards them by name.
    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            documents, positions = None, seq1f1b.positions(x_BLD)[None]
        else:
            documents = seq1f1b.positions(positions) - positions  # where each token's document begins, in any segment
            documents = documents.expand(x_BLD.shape[0], -1)
        return super().forward(x_BLD, documents, positions)


class InnerAttention(Module):
    """Stands in the place of ``FlexAttention`` and ``VarlenAttention``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int
        window: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer = seq1f1b.layer_handle(config.layer)
        self.window = config.window

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = seq1f1b.causal_attention(
            q, k, v, layer=self.layer, scale=scale, window=self.window, doc_ids=attention_masks
        )
        return out.transpose(1, 2)


def shape_of(config: Any) -> seq1f1b.ModelShape:
    """The shape of a dense model, which a split into equal FLOPs and ``seq1f1b plan`` need."""
    layer = config.layers[0]
    if layer.feed_forward is None:
        raise ValueError(
            "shape_of knows dense models alone: give segment_sizes=ModelShape(...) of a mixture of experts"
        )
    attention = layer.attention
    return seq1f1b.ModelShape(
        hidden=config.dim,
        layers=len(config.layers),
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads or attention.n_heads,
        ffn=layer.feed_forward.w1.out_features,
        vocab=config.vocab_size,
        head_dim=attention.head_dim or 0,
    )
