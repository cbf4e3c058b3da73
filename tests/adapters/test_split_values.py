"""Is a difference between stages and their model named, and what sample are they compared with?"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from split_parts import HIDDEN, VOCAB, Plain, model_of
from torch import Tensor, nn

import seq1f1b
from seq1f1b.adapters import chain_compare


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda run: run[0].update(output=run[0]["output"] + 1e-3), "output is off by"),
        (lambda run: run[0].update(output=run[0]["output"].double()), "output has dtype torch.float64"),
        (lambda run: run[0].update(output=run[0]["output"].detach()), "output has requires_grad False"),
        (lambda run: run[1]["blocks.2.bias"].mul_(1.001), "the gradient of blocks.2.bias is off by 1.0e-03"),
        (lambda run: run[1].pop("head.weight"), r"the gradient of head.weight is off by 1.0e\+00"),
    ],
)
def test_a_difference_is_named(change: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = chain_compare._run

    def changed(model: Any, parts: Any, *given: Any) -> Any:
        found = run(model, parts, *given)
        if len(parts) > 1:
            change(found)
        return found

    monkeypatch.setattr(chain_compare, "_run", changed)
    with pytest.raises(ValueError, match=text):
        seq1f1b.split(Plain(), 2)


# -- samples -----------------------------------------------------------------------------------------------------------


def of_numbers(self: Any, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
    for block in self.blocks:
        x = x + block(x)
    return self.head(x + shift) * scale + self.embedding.weight.sum()


X, SHIFT = torch.randn(2, 5, HIDDEN), torch.randn(HIDDEN)


@pytest.mark.parametrize("sample", [(X, SHIFT), {"shift": SHIFT, "x": X}, (X, SHIFT, 2.0)])
def test_a_sample(sample: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stages = seq1f1b.split(model_of(of_numbers), 2, sample=sample)
    assert len(stages) == 2


def test_a_sample_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="sample does not fit forward of Own: missing a required argument: 'shift'"):
        seq1f1b.split(model_of(of_numbers), 2, sample=X)
    with pytest.raises(ValueError, match="forward of Plain fails on the sample: IndexError: index out of range"):
        seq1f1b.split(Plain(), 2, sample=torch.tensor([[VOCAB]]))


def test_without_a_sample_nothing_is_compared_and_one_warning_says_so() -> None:
    with pytest.warns(UserWarning, match=r"Own were not compared with it: .* sample=, or check=False") as told:
        seq1f1b.split(model_of(of_numbers), 2)
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seq1f1b.split(model_of(of_numbers), 2, check=False)
        with torch.device("meta"):
            seq1f1b.split(model_of(of_numbers), 2)


def test_ids_are_below_the_smallest_embedding() -> None:
    def two(self: Any, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) + self.kinds(tokens) + self.blocks[0](self.kinds(tokens)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seq1f1b.split(
            model_of(two, kinds=nn.Embedding(3, HIDDEN), blocks=nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])), 1
        )
