"""How often does a step read values of tensors? The host waits for a GPU in each read, so at most once.

The first step of a shape looks at the model by values, and may read more.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_model
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import seq1f1b

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
