"""Do models of transformers train on trees as the library does on every path alone?"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

import decoders  # noqa: E402
import test_transformers  # noqa: E402
from slices import slice_of  # noqa: E402
from test_transformers import ARCHITECTURES, Float64, check, loss_fn  # noqa: E402
from tree_runs import Trees, run_paths  # noqa: E402

import seq1f1b  # noqa: E402
from seq1f1b import Memory  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402

ALONE = Trees([[5, 3, 4, 1, 6, 2], [7, 2]], [[-1, 0, 0, 1, 1, 2], None])
"""A window of 6 and chunks of 5 tokens lie over one border and over two, whose rows do not follow one another."""
CHAINS = Trees([[5, [4, 1, 2]], [7, 2]], [[-1, 0], None])
"""Their order is that of chains."""
SIBLINGS = Trees([[5, 3, [4, 1, 2], [6, 2]], [7, [2, 2]]], [[-1, 0, 0, 1], [-1, 0]])


def build(name: str, **options: Any) -> Any:
    return test_transformers.build(name, **options) if name in ARCHITECTURES else decoders.build(name)


def data_of(trees: Trees) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [sum(sum(s) if isinstance(s, list) else s for s in sizes) for sizes in trees.sizes]
    tokens, targets = ([torch.randint(64, (1, n), generator=generator) for n in lengths] for _ in range(2))
    targets[0][0, :6] = -100
    return tokens, targets


def check_paths(model: Any, trees: Trees, **options: Any) -> None:
    tokens, targets = data_of(trees)
    whole = copy.deepcopy(model)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = whole

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.model(x, use_cache=False).logits
            return logits

    with Float64():
        losses, truth, _ = run_paths(Logits(), trees, tokens, targets)

    def run(group: Any) -> Any:
        with Float64():
            stage = pipeline_stage(model, group.rank, 2)
            engine = seq1f1b.PipelineEngine(stage, num_microbatches=2, loss_fn=loss_fn, group=group, **options)
            given: dict[str, Any] = {"target": targets, "segment_sizes": trees.sizes, "parents": trees.parents}
            evaluated = engine.eval(tokens, **given)
            return evaluated, engine.step(tokens, **given), stage

    (_, _, first), (evaluated, stepped, last) = run_ranks(2, run)
    for found in (evaluated, stepped):
        torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-12, atol=0)
    check([first, last], {name.removeprefix("model."): gradient for name, gradient in truth.items()})


def a_slice(*names: str) -> list[Any]:
    """These, and all others under the full mark."""
    right = [name for name, row in decoders.read_page().items() if row.what.get(decoders.RELEASE) == decoders.RIGHT]
    return slice_of(((name,) for name in right), [(name,) for name in names])


@pytest.mark.parametrize("name", a_slice("llama", "gemma2", "qwen3_next", "llama4_text"))
def test_every_path_alone(name: str) -> None:
    """Positions, windows, chunks and states along the path: dense, sliding, hybrid, and chunked with experts."""
    check_paths(build(name), ALONE)


@pytest.mark.parametrize("name", a_slice("llama"))
def test_siblings_in_one_unit(name: str) -> None:
    """Their positions step back within a unit, which is no packed document; a layer that cannot have them says so."""
    try:
        check_paths(build(name), CHAINS)
        check_paths(build(name), SIBLINGS)
    except ValueError as error:
        assert re.search("a segment of its own", str(error)) and name != "llama"


@pytest.mark.parametrize(("name", "message"), [("mistral", "window or ALiBi"), ("mamba", "one state for all of them")])
def test_layers_that_siblings_cannot_share(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.* give each .* a segment of its own"):
        check_paths(build(name), SIBLINGS)


def test_a_hybrid_that_is_recomputed_and_split() -> None:
    check_paths(build("lfm2"), ALONE, memory=Memory(recompute="all"), schedule="seq-zb-h1")
