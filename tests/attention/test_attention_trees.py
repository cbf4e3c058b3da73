"""Does attention over a tree of segments equal that of every path alone, whatever the order and the rows?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_runs import OPTIONS, errors, random_qkv
from path_runs import Case, by_paths, by_units, errors_of_tree
from simulated_step import SimulatedStep
from torch import Tensor

from seq1f1b.attention.causal import causal_attention, layer_handle, positions, token_offset


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_units_equal_paths(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        found = errors_of_tree(seed, name, dtype)
        assert max(found) < (1e-12 if dtype == torch.float64 else 8e-3), (seed, found)


def test_a_layer_through_which_some_branches_do_not_go_back() -> None:
    """The first gradient of a row is stored and later ones are added, whichever segment below it they come from."""
    for seed in range(10):
        case = Case(seed)
        qkv, (dout, *_) = (random_qkv(2, 1, tokens=case.tokens, head_dim=8, seed=seed) for seed in (0, 1))
        skipped = [s for s in range(len(case.parents)) if any(t % 2 for t in case.step.path(s))]
        of_others = dout.clone()
        for s in skipped:
            of_others[:, :, case.step.slice(s)] = 0
        wanted = [a + b for a, b in zip(*(by_paths(case.step, {}, qkv, d) for d in (dout, of_others)), strict=True)]
        assert max(errors(by_units(case.step, case.order, {}, qkv, dout, skipped), wanted)) < 1e-12, seed


def test_positions_go_along_the_path() -> None:
    """A part begins where its parent's path ends, also for a rank that has a part of the segment."""
    step = SimulatedStep([4, 3, 6, 2], parents=[-1, 0, 1, 0], parts={2: [1, 3, 2]}, rows=[0, 4, 7, 13])
    wanted = {0: [0, 1, 2, 3], 1: [4, 5, 6], 2: [7, 7, 8, 9, 7, 8], 3: [4, 5]}
    for segment, of_segment in wanted.items():
        with step.unit("F", 0, segment):
            assert positions(torch.empty(1, len(of_segment))).tolist() == of_segment
            assert token_offset() == of_segment[0]
            if len(of_segment) % 2 == 0:
                half = len(of_segment) // 2
                assert positions(torch.empty(1, half), sequence_parallel=(1, 2)).tolist() == of_segment[half:]
                assert token_offset(sequence_parallel=(1, 2)) == of_segment[half]
    starts = torch.tensor([[0, 0, 8, 8, 0, 8]])
    step = SimulatedStep([7, 6], parents=[-1, 0], parts={1: [1, 3, 2]})
    with step.unit("F", 0, 0):
        pass
    with step.unit("F", 0, 1):
        assert positions(torch.empty(1, 6), doc_ids=starts).tolist() == [[7, 7, 0, 1, 7, 0]]


def run_shared(docs: Tensor | None = None, **options: Any) -> None:
    step = SimulatedStep([3, 4], parents=[-1, 0], parts={1: [2, 2]})
    q, k, v = random_qkv(2, 1, tokens=7, batch=1)
    for s in range(2):
        mine = {} if docs is None else {"doc_ids": docs[:, step.slice(s)]}
        with step.unit("F", 0, s):
            causal_attention(*(t[:, :, step.slice(s)] for t in (q, k, v)), layer=layer_handle(0), **options, **mine)


@pytest.mark.parametrize("options", [{"window": 3}, {"alibi_slopes": torch.ones(2)}], ids=str)
def test_siblings_of_one_unit_have_no_distances(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"F0\.1: layer 0 has a window or ALiBi slopes.* 2 siblings share this unit"):
        run_shared(**options)


def test_siblings_of_one_unit_are_of_one_document() -> None:
    run_shared(torch.full((1, 7), 5))
    with pytest.raises(RuntimeError, match=r"doc_ids of several documents \(5 and 6\), and 2 siblings share this unit"):
        run_shared(torch.tensor([[5, 5, 5, 5, 6, 5, 5]]))


def test_a_forward_after_its_parents_backward() -> None:
    """The parent said that nothing follows it."""
    step = SimulatedStep([2, 2, 2], parents=[-1, 0, 1])
    place = step.place
    step.place = lambda s: (place(s)[0], 0, *place(s)[2:]) if s == 1 else place(s)  # type: ignore[method-assign] # leaf
    for unit, segment in (("F", 0), ("F", 1), ("B", 1)):
        with step.unit(unit, 0, segment):
            pass
    message = "forward of segment 2 after the backward of segment 1, which it follows"
    with pytest.raises(RuntimeError, match=message), step.unit("F", 0, 2):
        pass
