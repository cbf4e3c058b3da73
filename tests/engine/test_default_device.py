"""Does what the package makes for itself lie where it belongs, whatever ``torch.set_default_device`` says?

"meta" stands for a GPU beside stages on the CPU: a tensor that followed it would have no values.
"""

from __future__ import annotations

import ast
import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import Config, Stage, batch, cross_entropy, stage_of, whole_model
from torch import nn
from torch.utils._device import _device_constructors

import seq1f1b
from seq1f1b import (
    Loss,
    Memory,
    ModelShape,
    PipelineEngine,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    build_schedule,
)
from seq1f1b.data import DocumentBatches
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.decoder import profile_model
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.testing import run_ranks

PACKAGE = Path(seq1f1b.__file__).parent
CONFIG, M, LENGTH = Config(hidden=16, layers=2, ffn=16), 2, 12
FACTORIES = {function.__name__ for function in _device_constructors()} | {"Generator"}
LAYERS = {"Linear", "Embedding", "LayerNorm", "RMSNorm"}
ALLOWED = {  # (file, function): why its tensors follow the default
    ("attention/packing.py", "doc_ids"): "made for the caller, as by torch's own factories",
    ("planning/step_plan.py", "doc_ids"): "made for the caller, as by torch's own factories",
    ("planning/decoder.py", "__init__"): "layers that profile_model makes under torch.device",
    ("planning/decoder.py", "profile_model"): "under torch.device",
}


def factory_calls(file: Path) -> list[tuple[str, int]]:
    """Calls that make a tensor and name no device: function and line."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            makes = (owner == "torch" and node.func.attr in FACTORIES) or (owner == "nn" and node.func.attr in LAYERS)
            named = any(keyword.arg in ("device", None) for keyword in node.keywords)
            if makes and not named and not (node.func.attr == "Generator" and node.args):
                found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(file.read_text()), "")
    return found


def test_every_tensor_that_the_package_makes_names_its_device() -> None:
    unnamed = [
        f"{name}:{line}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for function, line in factory_calls(file)
        if ((name := str(file.relative_to(PACKAGE))), function) not in ALLOWED
    ]
    assert not unnamed, unnamed


# -- what it does ------------------------------------------------------------------------------------------------------

ROWS = [[8, 4], [7]]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven segments": {"segment_sizes": [5, 4, 3]},
    "one micro-batch at a time": {"schedule": "gpipe"},
    "counted by hand": {"loss": Loss(weight=lambda target: float((target != -100).sum()))},
    "recomputed": {"memory": Memory(recompute="all", check=True)},
    "blocks recomputed": {"memory": Memory(blocks=("blocks", 0.5))},
    "split backward": {"schedule": "seq-zb-h1"},
    "filled backward": {"schedule": partial(build_schedule, "seq1f1b", weights="fill")},
    "vocabulary over the ranks": {"vocabulary": True},
    "tied": {"tied": True},
    "rows": {"rows": True},
    "offloaded": {"offloads": True},
    "any attention": {"attention": "any"},
}


def train(
    model: Stage,
    group: Any,
    default: str | None,
    folder: Path,
    *,
    vocabulary: bool = False,
    tied: bool = False,
    rows: bool = False,
    offloads: bool = False,
    **options: Any,
) -> Any:
    """Losses, gradients and norms of a rank, all of whose calls are under a default device."""
    stage = stage_of(model, CONFIG, group.rank, 2)
    tokens, target = batch(CONFIG, M, LENGTH)
    if tied:
        stage.tied_parameters = {"vocabulary": (stage.head if group.rank else stage.embedding).weight}
    loss_fn: Any = cross_entropy
    if vocabulary:
        options["embedding"] = VocabularyParallelEmbedding(CONFIG.vocab, CONFIG.hidden, rank=group.rank, num_ranks=2)
        loss_fn = VocabularyParallelHead(CONFIG.hidden, CONFIG.vocab, rank=group.rank, num_ranks=2)
        for shard, whole in ((options["embedding"], model.embedding), (loss_fn, model.head)):
            shard.double().load_whole(whole.weight)
        if group.rank:
            stage.head = nn.Identity()
        else:
            stage.embedding = nn.Identity()
    if offloads:
        options["memory"] = Memory(offload=folder)
    step: dict[str, Any] = {}
    if rows:
        step["segment_sizes"] = ROWS
        tokens, target = ([x[:2, : sum(sizes)] for sizes in ROWS] for x in (tokens, target))
    else:
        options = {"num_segments": 3} | options
    with contextlib.nullcontext() if default is None else torch.device(default):
        engine = PipelineEngine(stage, num_microbatches=M, loss_fn=loss_fn, group=group, **options)
        found = [engine.step(tokens, target=target, **step), engine.eval(tokens, target=target, **step)]
        norm = engine.clip_grad_norm_(0.1)
        found += [engine.step(tokens, target=target, **step), [norm]]
        engine.report(gather=True)
        engine.close()
    gradients = [parameter.grad for parameter in engine.parameters() if parameter.grad is not None]
    return [x for part in found for x in part] + gradients


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_under_another_default_device(case: str, tmp_path: Path) -> None:
    model = whole_model(CONFIG)
    if case == "tied":
        model.head.weight.data.copy_(model.embedding.weight)
    plain, other = (
        run_ranks(2, lambda group, default=default: train(model, group, default, tmp_path, **CASES[case]))
        for default in (None, "meta")
    )
    for ours, theirs in zip(other, plain, strict=True):
        assert len(ours) == len(theirs) > 5
        for one, two in zip(ours, theirs, strict=True):
            assert one.device.type == "cpu" and torch.equal(one, two)


def test_tools_under_another_default_device() -> None:
    """Verifying a stage, sampling documents, and measuring a model all compute on the CPU."""
    stage, sample = stage_of(whole_model(CONFIG), CONFIG, 0, 2), torch.zeros(1, LENGTH, dtype=torch.int64)
    shape = ModelShape(layers=2, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=29)
    cost = CostModel(shape, load_hardware("cpu-zen5"), num_ranks=2, seq_len=64)
    samples = [DocumentBatches([30, 40, 20, 64], cost, tokens_per_step=128, seed=1) for _ in range(2)]
    plain = next(iter(samples[0])).documents
    with torch.device("meta"):
        assert seq1f1b.verify_stage(stage, sample, segments=3, show=False).ok
        assert next(iter(samples[1])).documents == plain
        measured = profile_model(shape, seq_len=64, layers=1, repeats=1)
    assert set(measured) == {"layer", "embedding", "head"}
