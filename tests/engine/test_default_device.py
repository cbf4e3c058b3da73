"""Does what the package makes for itself lie where it belongs, whatever ``torch.set_default_device`` says?

"meta" stands for a GPU beside stages on the CPU: a tensor that followed it would have no values.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from tiny_model import Config, stage_of, whole_model
from torch.utils._device import _device_constructors

import seq1f1b
from seq1f1b import ModelShape
from seq1f1b.data import DocumentBatches
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.decoder import profile_model
from seq1f1b.planning.hardware import load_hardware

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
