"""Does the host wait for a device within units? Never, and at most once before them, whatever the feature.

The first step of a shape looks at the model by values, and may wait more. ``pytest -s`` shows a table.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import aten_stand_ins
import pytest
import tiny_model
import torch
from stand_in_engine import StandInEngine
from stand_in_library import stand_in
from torch import Tensor, nn
from waits import Waits

import seq1f1b
from seq1f1b.attention.causal import causal_attention
from seq1f1b.device import document_layout
from seq1f1b.testing import run_ranks

CONFIG = tiny_model.Config(hidden=32, heads=2, kv_heads=1, ffn=48, vocab=17, layers=4)


def with_auxiliary(output: Tensor, target: Tensor) -> Tensor:
    seq1f1b.add_loss(output.square().mean(), of="segment")
    return tiny_model.cross_entropy(output, target)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "moved to pinned memory": {
        "memory": seq1f1b.Memory(offload=seq1f1b.HOST), "transport": "copy", "schedule": "gpipe",
    },
    "targets counted by a callable": {"loss": seq1f1b.Loss(weight=lambda target: (target != -100).sum())},
    "auxiliary losses": {"loss_fn": with_auxiliary},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:micro-batches count different numbers")
@pytest.mark.parametrize("name", FEATURES)
def test_the_host_waits_once_and_never_within_units(name: str) -> None:
    """In the third step; what test_random_steps.py draws is counted there."""
    stand_in().reset(1)
    tokens, target = tiny_model.batch(CONFIG, 3, 40)
    kind = StandInEngine if "pinned" in name else seq1f1b.PipelineEngine

    def run(group: Any) -> Waits:
        stage = tiny_model.stage_of(tiny_model.whole_model(CONFIG), CONFIG, group.rank, 2)
        options = {"loss_fn": tiny_model.cross_entropy, **FEATURES[name]}
        engine = kind(stage, num_microbatches=3, num_segments=4, group=group, **options)
        for _ in range(3):
            with Waits() as waits:
                engine.step(tokens, target=target if engine.has_last else None)
        engine.close()
        return waits

    first, last = run_ranks(2, run)
    assert first.found | last.found == Counter(before=1), (first.names, last.names)


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
@pytest.mark.parametrize("anew", [False, True])
def test_documents_are_read_before_the_units(
    anew: bool, sizes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where torch's flash ops take documents. The first step finds out that it must read, and computes
    the same. Ids that a stage makes are read by each unit, whose layers and backward share what was read."""
    counted: list[int] = []
    read = document_layout.read
    monkeypatch.setattr(document_layout, "read", lambda *given: counted.append(1) or read(*given))
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
            with Waits() as waits:
                losses = engine.step(
                    list(tokens.chunk(2)), target=list(target.chunk(2)), kwargs=kwargs, segment_sizes=sizes
                )
            of_steps.append((len(counted), sum(waits.found.values())))
            results.append([*losses, *(p.grad for p in engine.parameters())])
    units = sum(map(len, sizes))
    assert of_steps[0][0] >= units  # and those of its look at the model
    assert of_steps[1:] == [(units if anew else 0, 1 + 2 * len(sizes))] * 2  # two for each micro-batch
    assert all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))
