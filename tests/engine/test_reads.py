"""Does the host wait for a device within units? Never, and at most once before them, whatever the feature.

The first step of a shape looks at the model by values, and may wait more. ``pytest -s`` shows a table.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aten_stand_ins
import pytest
import tiny_model
import torch
import torch.nn.functional as F
from stand_in_engine import StandInEngine
from stand_in_library import stand_in
from torch import Tensor, nn
from waits import Waits

import seq1f1b
from seq1f1b.attention.causal import causal_attention
from seq1f1b.device import document_layout
from seq1f1b.testing import run_ranks

_CALLS = itertools.count()
CONFIG = tiny_model.Config(hidden=32, heads=2, kv_heads=1, ffn=48, vocab=17, layers=4)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def divided(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return summed(output, target), (target != -100).sum()


def divided_or_nothing(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """It returns zeros of its own for some segments, as a loss may that counts nothing there."""
    return divided(output, target) if next(_CALLS) % 3 else (output.new_zeros(()), torch.zeros(()))


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def token_loss(log_probs: Tensor, given: dict[str, Tensor]) -> Tensor:
    return -log_probs


def with_auxiliary(output: Tensor, target: Tensor) -> Tensor:
    seq1f1b.add_loss(output.square().mean(), of="segment")
    return tiny_model.cross_entropy(output, target)


class HeadAndLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CONFIG.vocab, CONFIG.vocab).double()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return tiny_model.cross_entropy(self.linear(output), target)


def stage(rank: int, num_ranks: int, *, embeds: bool = True, heads: bool = True) -> nn.Module:
    found = tiny_model.stage_of(tiny_model.whole_model(CONFIG), CONFIG, rank, num_ranks)
    if rank == 0 and not embeds:
        found.embedding = nn.Identity()
    if rank == num_ranks - 1 and not heads:
        found.head = nn.Identity()
    return found


def spread(rank: int, num_ranks: int, *, embeds: bool, **options: Any) -> dict[str, Any]:
    """A vocabulary over the ranks."""
    of_rank = {"rank": rank, "num_ranks": num_ranks, "dtype": torch.float64}
    found = {
        "stages": stage(rank, num_ranks, embeds=not embeds, heads=False),
        "loss_fn": seq1f1b.VocabularyParallelHead(CONFIG.hidden, CONFIG.vocab, **of_rank, **options),
    }
    if embeds:
        found["embedding"] = seq1f1b.VocabularyParallelEmbedding(CONFIG.vocab, CONFIG.hidden, **of_rank)
    return found


class Tied(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = stage(rank, 2)
        self.tied_parameters = {"word": (self.inner.embedding if rank == 0 else self.inner.head).weight}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@dataclass
class Feature:
    """Options of the engine, arguments of a step, and how often the host may wait before its units and after them."""

    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    of_rank: Callable[[int, int], dict[str, Any]] = lambda rank, num_ranks: {"stages": stage(rank, num_ranks)}
    engine: type[seq1f1b.PipelineEngine] = seq1f1b.PipelineEngine
    before: int = 1
    after: int = 0


ROWS = {"segment_sizes": [[20, 20], [10, 10, 20], [40]]}
TREES = {"segment_sizes": [[8, [6, 6], 20], [20, 20], [40]], "parents": [[-1, 0, 0], [-1, 0], None]}
IDS = torch.tensor([0, 0, 0, 3, 3] + [5] * 35, dtype=torch.int32).expand(6, 40).contiguous()
FEATURES = {
    "plain": Feature(),
    "whole sequences": Feature({"num_segments": 1}),
    "two ranks": Feature(num_ranks=2),
    "interleaved": Feature(
        {"schedule": "seq1f1b-interleaved", "num_microbatches": 4}, num_ranks=2,
        of_rank=lambda rank, num_ranks: {"stages": [stage(rank, 4), stage(rank + 2, 4)]},
    ),
    "split backward": Feature({"schedule": "seq-zb-h1"}, num_ranks=2),
    "recomputed": Feature({"memory": seq1f1b.Memory(recompute="all")}),
    "blocks recomputed": Feature({"memory": seq1f1b.Memory(blocks=("blocks", 0.5))}),
    "moved to pinned memory": Feature(
        {"memory": seq1f1b.Memory(offload=seq1f1b.HOST), "transport": "copy", "schedule": "gpipe"}, num_ranks=2,
        engine=StandInEngine,
    ),
    "mean over all targets": Feature({"loss": seq1f1b.Loss(weight="targets")}),
    "targets counted by a callable": Feature({"loss": seq1f1b.Loss(weight=lambda target: (target != -100).sum())}),
    "sum": Feature({"loss": seq1f1b.Loss(reduction="sum"), "loss_fn": summed}, before=0),
    "sum and divisor": Feature({"loss_fn": divided}, before=0, after=1),
    "sum and divisor, of some segments nothing": Feature({"loss_fn": divided_or_nothing}, before=0, after=1),
    "sum by a given number": Feature(
        {"loss": seq1f1b.Loss(reduction="sum"), "loss_fn": summed}, {"loss_weight": 7.0}, before=0
    ),
    "losses of tokens": Feature({"loss_fn": of_tokens}),
    "head in the loss": Feature({"loss_fn": HeadAndLoss()}),
    "auxiliary losses": Feature({"loss_fn": with_auxiliary}),
    "unequal rows": Feature({}, ROWS),
    "trees": Feature({}, TREES),
    "packed documents": Feature({"arg_rules": {"doc_ids": "slice"}}, {"kwargs": {"doc_ids": IDS}}, num_ranks=2),
    "vocabulary over ranks": Feature(num_ranks=2, of_rank=lambda *rank: spread(*rank, embeds=False)),
    "vocabulary and embedding over ranks": Feature(num_ranks=2, of_rank=lambda *rank: spread(*rank, embeds=True)),
    "vocabulary over ranks, split backward": Feature(
        {"schedule": "seq-zb-h1"}, num_ranks=2,
        of_rank=lambda *rank: spread(*rank, embeds=True, label_smoothing=0.1, z_loss=1e-3),
    ),
    "vocabulary over ranks, losses of tokens": Feature(
        num_ranks=2, of_rank=lambda *rank: spread(*rank, embeds=True, token_loss=token_loss)
    ),
    "tied copies": Feature(num_ranks=2, of_rank=lambda rank, num_ranks: {"stages": Tied(rank)}, after=1),
}  # fmt: skip


def waits_of(feature: Feature) -> tuple[Counter[str], list[str]]:
    """Most of any rank in its third step, and what they were. In the second, copies of tied parameters are compared."""
    num_microbatches = feature.options.get("num_microbatches", 3)
    tokens, target = tiny_model.batch(CONFIG, num_microbatches, 40)
    rows = feature.arguments.get("segment_sizes")

    def run(group: Any) -> Waits:
        options = {"num_microbatches": num_microbatches, "num_segments": 4, "loss_fn": tiny_model.cross_entropy}
        options |= feature.options | feature.of_rank(group.rank, group.size)
        engine = feature.engine(options.pop("stages"), **options, group=group)
        for _ in range(3):
            inputs, goal = (list(each.chunk(num_microbatches)) if rows else each for each in (tokens, target))
            with Waits() as waits:
                engine.step(inputs, target=goal if engine.has_last else None, **feature.arguments)
        engine.close()
        return waits

    every = run_ranks(feature.num_ranks, run)
    most: Counter[str] = Counter()
    for waits in every:
        most |= waits.found
    return most, [name for waits in every for name in waits.names]


@pytest.mark.filterwarnings("ignore:micro-batches count different numbers")
@pytest.mark.parametrize("name", FEATURES)
def test_the_host_waits_once_and_never_within_units(name: str) -> None:
    """Tied gradients go over the host, which waits once more for each parameter of that kind."""
    feature = FEATURES[name]
    if feature.engine is StandInEngine:
        stand_in().reset(1)
    most, names = waits_of(feature)
    print(f"\n{name:45} before {most['before']}  within {most['within']}  after {most['after']}", end="")
    assert most == Counter(before=feature.before, after=feature.after), names


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
