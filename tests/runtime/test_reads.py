"""How often does a step read values of tensors? The host waits for a GPU in each read, so at most once.

The first step of a shape looks at the model by values, and may read more.
"""

from __future__ import annotations

from typing import Any

import aten_stand_ins
import pytest
import tiny_model
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import seq1f1b
from seq1f1b.device import document_layout
from seq1f1b.ops.attention import causal_attention
from seq1f1b.runtime import counted_documents

READS = {
    getattr(Tensor, name)
    for name in ("tolist", "item", "__float__", "__bool__", "__int__", "__index__", "cpu", "numpy", "nonzero")
}


class Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def divided(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return summed(output, target), (target != -100).sum()


CASES: dict[str, dict[str, Any]] = {
    "in segments": {},
    "whole": {"num_segments": 1},
    "by targets": {"loss": seq1f1b.Loss(weight="targets")},
    "sum": {"loss": seq1f1b.Loss(reduction="sum"), "loss_fn": summed},
    "divided": {"loss_fn": divided},
    "split backward": {"schedule": "seq-zb-h1"},
    "recomputed": {"memory": seq1f1b.Memory(recompute="all")},
}


def reads_of_steps(options: dict[str, Any], given_as: Any = lambda whole: whole, **arguments: Any) -> list[list[str]]:
    config = tiny_model.Config(kv_heads=2)
    tokens, target = tiny_model.batch(config, 3, 40)
    options = {"num_microbatches": 3, "num_segments": 4, "loss_fn": tiny_model.cross_entropy} | options
    engine = seq1f1b.PipelineEngine(tiny_model.whole_model(config), **options)
    found = []
    for _ in range(3):
        with Reads() as reads:
            engine.step(given_as(tokens), target=given_as(target), **arguments)
        found.append(reads.names)
    return found


@pytest.mark.filterwarnings("ignore:micro-batches count different numbers")
@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_values_once(name: str) -> None:
    _, *later = reads_of_steps(CASES[name])
    assert all(len(reads) == (name != "sum") for reads in later), later


@pytest.mark.filterwarnings("ignore:micro-batches count different numbers")
def test_a_step_of_rows_reads_values_once() -> None:
    rows = [[20, 20], [10, 10, 20], [40]]
    _, *later = reads_of_steps({}, lambda whole: list(whole.chunk(3)), segment_sizes=rows)
    assert all(len(reads) == 1 for reads in later), later


class Documents(nn.Module):
    def __init__(self, num_layers: int, anew: bool = False) -> None:
        super().__init__()
        self.layers = [seq1f1b.layer_handle(index) for index in range(num_layers)]
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in self.layers)
        self.anew = anew

    def forward(self, x: Tensor, doc_ids: Tensor) -> Tensor:
        x = self.embedding(x)
        ids = doc_ids + 0 if self.anew else doc_ids
        for layer, qkv in zip(self.layers, self.qkv, strict=True):
            q, k, v = qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            of_layer = ids[:, None, None][:, 0, 0]  # a view of its own, as Hugging Face's masks are
            x = x + causal_attention(q, k, v, layer=layer, doc_ids=of_layer).transpose(1, 2).flatten(2)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:micro-batches count different numbers")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced
@pytest.mark.parametrize("sizes", [[[7, 7, 6]] * 2, [[20]] * 2, [[9, 11], [20]]], ids=str)
@pytest.mark.parametrize("anew, most_at_once", [(False, 1 << 20), (False, 50), (True, 1 << 20)])
def test_documents_are_counted_in_the_same_read(
    anew: bool, most_at_once: int, sizes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where torch's flash ops take documents. The first step finds out that it must count, and computes
    the same. Ids that a stage makes are read by each unit, whose layers and backward share what was read."""
    counted: list[int] = []
    read = document_layout.read
    monkeypatch.setattr(document_layout, "read", lambda *given: counted.append(1) or read(*given))
    monkeypatch.setattr(counted_documents, "MOST_AT_ONCE", most_at_once)
    engine = seq1f1b.PipelineEngine(
        Documents(2, anew).bfloat16(), num_microbatches=2, loss_fn=tiny_model.cross_entropy,
        arg_rules={"doc_ids": "slice"},
    )  # fmt: skip
    tokens, of_steps, results = torch.arange(80).view(4, 20) % 50, [], []
    with aten_stand_ins.cuda_kernels_on_the_cpu():
        for _ in range(3):
            counted.clear()
            docs = torch.stack([torch.arange(20) // length * length for length in (9, 20, 1, 6)]).int()
            target = seq1f1b.shift_labels(tokens, doc_ids=docs)
            kwargs = [{"doc_ids": part} for part in docs.chunk(2)]
            for parameter in engine.parameters():
                parameter.grad = None
            with Reads() as reads:
                losses = engine.step(
                    list(tokens.chunk(2)), target=list(target.chunk(2)), kwargs=kwargs, segment_sizes=sizes
                )
            of_steps.append((len(counted), len(reads.names)))
            results.append([*losses, *(p.grad for p in engine.parameters())])
    units = sum(map(len, sizes))
    assert of_steps[0][0] >= units  # and those of its look at the model
    assert of_steps[1:] == [(units if anew else 0, 1)] * 2
    assert all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))
