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
from test_transformers import SIZES, Float64, M, batch, check_pipeline, engine_of, run_whole  # noqa: E402

from seq1f1b import Memory  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402

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
    with pytest.raises(ValueError, match="do not know their doc_ids: use a PipelineEngine"):
        pipeline_stage(build("mamba"), 0, 1)(batch()[0], doc_ids=torch.zeros(M, sum(SIZES), dtype=torch.int64))


# In float32 single roundings decide where gradients sum to 0: of a router's bias of gpt_oss, of norms of qwen3_next.
NARROW = [(name, torch.bfloat16) for name in SLICE] + [(name, torch.float32) for name in ("mamba", "gemma3n_text")]
FEW_NARROW = [("qwen3_next", torch.bfloat16), ("mamba", torch.float32)]


LAYERS = {"qwen3_next": {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}}


@pytest.mark.parametrize(("name", "dtype"), slice_of(NARROW, FEW_NARROW))
def test_narrow_dtypes_are_as_near_to_float64_as_the_whole_model(name, dtype):
    """Twice the error of the whole model at most, and an ulp of each gradient's norm for every unit that adds to it."""
    options = LAYERS.get(name, {})
    exact = build(name, **options)
    exact.load_state_dict(build(name, dtype, **options).state_dict())
    with Float64():
        want = {n: g for n, g in run_whole(exact)[1].items() if g is not None}
    _, plain = run_whole(build(name, dtype, **options))
    tokens, target = batch()

    def run(group: Any) -> Any:
        stage = pipeline_stage(model, group.rank, 2)
        engine_of(stage, group).step(tokens, target=target)
        return {n: p.grad for n, p in stage.named_parameters()}

    model = build(name, dtype, **options)
    found = {n: g for gradients in run_ranks(2, run) for n, g in gradients.items()}
    floor = 1e-3 * torch.stack([g.norm() for g in want.values()]).square().mean().sqrt()

    def error(gradient: Tensor, n: str) -> float:
        return float((gradient.double() - want[n]).norm() / torch.maximum(want[n].norm(), floor))

    for n in want:
        assert error(found[n], n) <= 2 * error(plain[n], n) + M * len(SIZES) * torch.finfo(dtype).eps, n


@pytest.mark.parametrize("name", [*SLICE, "minimax"])
def test_a_model_without_memory_is_cut_and_a_stage_is_copied(name):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build(name).config)
    assert all(pipeline_stage(model, rank, 2) is not None for rank in range(2))
    stage = pipeline_stage(build(name, torch.float32), 0, 2)
    x = torch.arange(12)[None]
    torch.testing.assert_close(copy.deepcopy(stage)(x), stage(x), rtol=0, atol=0)
