"""With what sample are stages compared with their model?"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from split_parts import HIDDEN, VOCAB, Plain, model_of
from torch import Tensor, nn

import seq1f1b


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
