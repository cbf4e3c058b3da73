"""Does torchtitan's own Trainer, with segments, take the steps that it takes with the stock model unsplit?"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from tiny_model import gradient_error

pytest.importorskip("torchtitan", reason='needs the extra: pip install "seq1f1b[torchtitan]"')

import titan_runs  # before all of torchtitan: gives it its device, and the example its path
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
from torchtitan.models.common.attention import GQAttention, VarlenAttention
from torchtitan_segmented import convert, pipelining_fn, segmented, shape_of

UNEVEN = {"n_segments": 3, "segment_sizes": [40, 33, 23]}
EVEN = {"n_segments": 3}  # of 32 tokens, which the chunks of a chunked loss divide
CASES: dict[str, dict[str, Any]] = {
    "llama-chunked-selective": {"chunked": True, "checkpointing": "selective", "segments": EVEN},
    "llama-saving": {"checkpointing": "saving attention", "segments": UNEVEN},
    "llama-compiled": {"compiled": True, "segments": UNEVEN, "validate": True},
    "qwen-interleaved-full": {
        "model": "qwen",
        "interleaved": True,
        "checkpointing": "full",
        "segments": {"n_segments": 3, "segment_sizes": shape_of(titan_runs.model_spec("qwen").model)},
    },
}
WIDE_CASES = {"fsdp": {"dp": 2, "segments": UNEVEN}, "fsdp-chunked": {"dp": 2, "chunked": True, "segments": EVEN}}


def stock(rank: int, world: int, folder: str) -> None:
    for model in ("llama", "qwen"):
        case = titan_runs.Case(model=model, validate=True)
        found = titan_runs.run_trainer(case, rank, world, 1, None)
        found["truth"] = titan_runs.true_gradients(case, found["state"])
        torch.save(found, os.path.join(folder, model))


def pipelined(rank: int, world: int, folder: str, cases: dict[str, dict[str, Any]]) -> None:
    for name, arguments in cases.items():
        case = titan_runs.Case(**arguments)
        state = torch.load(os.path.join(folder, case.model))["state"]
        found = titan_runs.run_trainer(case, rank, world, 2, state)
        torch.save(found, os.path.join(folder, f"{name}-{rank}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("titan")
    run_processes(1, stock, str(path))
    return path


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    run_processes(2, pipelined, str(folder), CASES)
    return folder


def check(folder: Path, name: str, case: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """Gradients as near to fp64 as the stock model's; losses and norms of three steps with the optimizer between."""
    expected = torch.load(folder / case.get("model", "llama"))
    ranks = [torch.load(folder / f"{name}-{rank}") for rank in range(world)]
    gradients = {name: g for found in ranks for name, g in found["gradients"].items()}
    own = gradient_error(expected["gradients"], expected["truth"])
    assert 0 < own < 1e-4, "the stock model itself is not near its own gradients in fp64"
    assert gradient_error(gradients, expected["truth"]) <= 2 * own + 1e-7
    close = {"rtol": 1e-5, "atol": 0.0}  # a hundred roundings of fp32: Adam's quotients amplify them
    torch.testing.assert_close(ranks[-1]["losses"][:3], expected["losses"][:3], **close)
    if "dp" not in case:  # in fp32 the norm of a whole tensor and of its shards round apart, here by 4e-5
        for found in ranks:
            torch.testing.assert_close(found["norms"][:3], expected["norms"][:3], **close)
    return ranks


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_the_steps_of_the_stock_trainer(two_ranks: Path, name: str) -> None:
    case = CASES[name]
    ranks = check(two_ranks, name, case, 2)
    schedule = "ScheduleSeqInterleaved1F1B" if case.get("interleaved") else "ScheduleSeq1F1B"
    assert {found["schedule"] for found in ranks} == {schedule}
    if case.get("validate"):  # and a step after it, of which it leaves nothing behind
        expected = torch.load(two_ranks / "llama")
        assert ranks[-1]["validation"] == pytest.approx(expected["validation"], rel=1e-5)
        assert ranks[-1]["losses"][3] == pytest.approx(expected["losses"][3], rel=1e-5)


def test_blocks_that_torchtitan_compiles_are_compiled_in_the_first_step(two_ranks: Path) -> None:
    """On each rank one graph of the block and one of dynamic length, and for evaluation without gradients one more."""
    for rank in range(2):
        *trained, after_evaluation = torch.load(two_ranks / f"llama-compiled-{rank}")["graphs"]
        assert trained == [2, 2, 2]
        assert after_evaluation <= 4


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE_CASES)
def test_fsdp_within_stages(folder: Path, name: str) -> None:
    run_processes(4, pipelined, str(folder), {name: WIDE_CASES[name]})
    check(folder, name, WIDE_CASES[name], 4)


def test_the_spec_that_it_starts_from_stays_as_it_is() -> None:
    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    before = spec.model.to_dict()
    changed = segmented(spec, n_segments=2)
    assert spec.model.to_dict() == before and type(spec.model.layers[0].attention) is GQAttention.Config
    assert [layer.attention.inner_attention.layer for layer in changed.model.layers] == list(range(6))
    with torch.device("meta"):
        names = [name for name, _ in changed.model.build().named_parameters()]
        assert names == [name for name, _ in spec.model.build().named_parameters()]


def test_a_window_counts_the_query_itself() -> None:
    config = llama3.model_registry("debugmodel", attn_backend="varlen").model
    for layer, window in zip(config.layers, [(-1, 0), (0, 0), (7, 0)], strict=False):
        layer.attention.inner_attention = VarlenAttention.Config(window_size=window)
    converted = convert(config)
    assert [layer.attention.inner_attention.window for layer in converted.layers[:3]] == [None, 1, 8]


def test_models_that_cannot_run_by_segments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer 0 has Attention.*GQAttention"):
        convert(deepseek_v3.model_registry("debugmodel").model)
    with pytest.raises(ValueError, match=r"layer 0 has .*GQAttention"):
        convert(gpt_oss.model_registry("debugmodel").model)
    config = llama3.model_registry("debugmodel", attn_backend="varlen").model
    config.layers[0].attention.inner_attention.window_size = (-1, -1)
    with pytest.raises(ValueError, match="not causal"):
        convert(config)
    with pytest.raises(ValueError, match="not the config of a decoder"):
        convert(config.layers[0])
    spec = dataclasses.replace(llama3.model_registry("debugmodel"), pipelining_fn=None)
    with pytest.raises(ValueError, match="has no pipelining_fn"):
        segmented(spec, n_segments=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_schedule": "GPipe"}, "must be '1F1B', or 'Interleaved1F1B'"),
        ({"pipeline_parallel_schedule": "ZBVZeroBubble"}, "must be '1F1B', or 'Interleaved1F1B'"),
        ({"pipeline_parallel_schedule_csv": "order.csv"}, "leave it empty"),
        ({"context_parallel_degree": 2}, "context_parallel_degree"),
        ({"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"}, "spmd_types"),
        ({"n_segments": 65}, "seq_len is 64"),
    ],
)
def test_parallelism_that_segments_cannot_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    n_segments = changes.pop("n_segments", 2)
    arguments = dict.fromkeys(("parallel_dims", "device", "model_config", "loss_fn"))
    with pytest.raises(ValueError, match=message):
        pipelining_fn(n_segments=n_segments)(
            None,
            training=TrainingConfig(seq_len=64),
            parallelism=ParallelismConfig(pipeline_parallel_degree=2, **changes),
            **arguments,
        )


def test_the_shape_of_experts_is_not_known() -> None:
    config = convert(qwen3.model_registry("debugmodel_moe").model)
    with pytest.raises(ValueError, match=r"give segment_sizes=ModelShape\(\.\.\.\) of a mixture of experts"):
        shape_of(config)
