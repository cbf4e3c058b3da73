"""Do models train in our pipeline as whole whose layers are more than attention over keys and values of their own?

Linear attention and state spaces, which keep state along the sequence; sinks; several streams of hidden states, inputs
of the embedding, keys and values of other layers.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from decoders import build  # noqa: E402
from slices import slice_of  # noqa: E402
from test_transformers import (  # noqa: E402
    SIZES,
    Float64,
    M,
    batch,
    check_pipeline,
    doc_ids,
    loss_fn,
    run_pipeline,
    run_whole,
)

import seq1f1b  # noqa: E402
from seq1f1b import Memory  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402
from seq1f1b.transformers import state as transformers_state  # noqa: E402

SLICE = ["qwen3_next", "mamba", "gpt_oss", "gemma3n_text"]  # of each kind of scan one; sinks; streams


NAMES = [*SLICE, "mamba2", "lfm2", "kimi_linear", "minimax", "gemma4_text"]
ORDERS: list[tuple[bool, dict[str, Any]]] = [  # whether documents are packed
    *((False, {"sizes": sizes}) for sizes in ([1, 1, 1, 21], [9, 1, 13, 1], [24])),
    *((packed, {"memory": Memory(recompute="all")}) for packed in (False, True)),
    *((packed, {"schedule": "seq-zb-h1"}) for packed in (False, True)),
    (False, {"per_rank": 2, "schedule": "seq1f1b-interleaved"}),
]


@pytest.mark.parametrize(
    ("name", "packed", "options"),
    [
        pytest.param(name, *case, marks=() if (place + other) % 4 == 0 else pytest.mark.full)
        for (place, name), (other, case) in itertools.product(enumerate(NAMES), enumerate(ORDERS))
    ],
)
def test_segments_orders_and_recomputation(name, packed, options):
    check_pipeline(build(name), packed=packed, **options)


def test_documents_that_a_layer_would_not_know_are_refused():
    with pytest.raises(ValueError, match="do not know their doc_ids; run the stage by a PipelineEngine"):
        pipeline_stage(build("mamba"), 0, 1)(batch()[0], doc_ids=doc_ids())


# Single roundings decide in float32 where a router's bias of gpt_oss has a gradient that sums to 0, and where the norms
# of qwen3_next do.
ROUNDED = [("gpt_oss", "float32"), ("qwen3_next", "float32")]
NARROW = [case for case in itertools.product(SLICE, ("autocast", "bfloat16", "float32")) if case not in ROUNDED]
FEW_NARROW = [("qwen3_next", "autocast"), ("gpt_oss", "bfloat16"), ("mamba", "float32"), ("gemma3n_text", "float32")]


LAYERS = {"qwen3_next": {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}}


@pytest.mark.parametrize(("name", "how"), slice_of(NARROW, FEW_NARROW))
def test_narrow_dtypes_are_as_near_to_float64_as_the_whole_model(name, how):
    """Twice the error of the whole model at most, and an ulp of each gradient's norm for every unit that adds to it."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    options = LAYERS.get(name, {})
    exact = build(name, **options)
    exact.load_state_dict(build(name, dtype, **options).state_dict())
    with Float64():
        want = {n: g for n, g in run_whole(exact)[1].items() if g is not None}
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        _, plain = run_whole(build(name, dtype, **options))

    class Cast(torch.nn.Module):
        def __init__(self, stage: Any) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, *given: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                return self.stage(*given)

    tokens, target = batch()

    def run(group: Any) -> Any:
        stage = pipeline_stage(model, group.rank, 2)
        engine = seq1f1b.PipelineEngine(
            Cast(stage), num_microbatches=M, num_segments=len(SIZES), segment_sizes=SIZES, loss_fn=loss_fn, group=group
        )
        engine.step(tokens, target=target)
        return {n: p.grad for n, p in stage.named_parameters()}

    model = build(name, dtype, **options)
    found = {n: g for gradients in run_ranks(2, run) for n, g in gradients.items()}
    floor = 1e-3 * torch.stack([g.norm() for g in want.values()]).square().mean().sqrt()
    narrow = torch.float32 if how == "float32" else torch.bfloat16

    def error(gradient: Tensor, n: str) -> float:
        return float((gradient.double() - want[n]).norm() / torch.maximum(want[n].norm(), floor))

    for n in want:
        assert error(found[n], n) <= 2 * error(plain[n], n) + M * len(SIZES) * torch.finfo(narrow).eps, n


@pytest.mark.parametrize("name", [*SLICE, "minimax"])
def test_a_model_without_memory_is_cut_and_a_stage_is_copied_and_pickled(name, tmp_path):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build(name).config)
    assert all(pipeline_stage(model, rank, 2) is not None for rank in range(2))
    stage = pipeline_stage(build(name, torch.float32), 0, 2)
    x = torch.arange(12)[None]
    torch.save(stage, tmp_path / "stage.pt")
    for other in (copy.deepcopy(stage), torch.load(tmp_path / "stage.pt", weights_only=False)):
        torch.testing.assert_close(other(x), stage(x), rtol=0, atol=0)


def ignores_its_state(scan: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    return scan(*args, **kwargs)


def without_gradient(scan: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    out, last = scan(*args, **{**kwargs, "initial_states": states.before(states.asked)})
    return out, last.detach()


def test_a_mixer_whose_state_would_be_lost_is_found(monkeypatch):
    """By the first step; where the gradient alone would be lost, by verify."""
    monkeypatch.setitem(transformers_state._SCANS, "mamba2_chunk_scan", ignores_its_state)
    with pytest.warns(seq1f1b.SegmentWarning, match="state across tokens: stage 0"):
        run_pipeline(build("mamba2", torch.float32))
    monkeypatch.setitem(transformers_state._SCANS, "mamba2_chunk_scan", without_gradient)
    tokens, target = batch()
    engine = seq1f1b.PipelineEngine(
        pipeline_stage(build("mamba2", torch.float32), 0, 1), num_microbatches=M, num_segments=4, loss_fn=loss_fn
    )
    assert not engine.verify(tokens, target=target, show=False).ok
