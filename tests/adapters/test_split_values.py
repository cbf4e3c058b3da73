"""Are stages compared with the model by values, and what forward has read of Python before each step?"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from split_parts import HIDDEN, VOCAB, Plain, model_of
from torch import Tensor, nn

import seq1f1b
from seq1f1b.adapters import chain_compare

SCALE, LEVELS = 1.0, {"a": 1.0}


# -- what only values tell ---------------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Leaves a loss as an attribute, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux = nn.Linear(HIDDEN, HIDDEN), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return self.linear(x)


class Remembering(nn.Module):
    """The first block leaves a value that later ones add, in a dict that all of them hold."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.linear, self.values = nn.Linear(HIDDEN, HIDDEN), values

    def forward(self, x: Tensor) -> Tensor:
        if "first" not in self.values:
            self.values["first"] = x.detach()
        return self.linear(x) + self.values["first"]


class SwitchingOff(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        torch.set_grad_enabled(False)
        return out


class SwitchingOn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return super().forward(x)


def with_aux(self: Any, tokens: Tensor) -> Tensor:
    out = Plain.forward(self, tokens)
    return out + sum(block.aux for block in self.blocks)


def noting() -> Any:
    return model_of(with_aux, blocks=nn.ModuleList(Noting() for _ in range(4)))


def remembering() -> Any:
    class Forgetting(Plain):
        def forward(self, tokens: Tensor) -> Any:
            out = super().forward(self.reset(tokens))
            return out

    values: dict[str, Tensor] = {}
    model = Forgetting()
    model.reset = Resetting(values)
    model.blocks = nn.ModuleList(Remembering(values) for _ in range(4))
    return model


class Resetting(nn.Module):
    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def forward(self, tokens: Tensor) -> Tensor:
        self.values.clear()
        return tokens


def switching() -> Any:
    model = Plain()
    model.blocks[1], model.blocks[2] = SwitchingOff(HIDDEN, HIDDEN), SwitchingOn(HIDDEN, HIDDEN)
    return model


def closed_over(hook: bool) -> Any:
    """A block of two stages that computes with its own parameters by a closure, which no copy follows."""
    model = Plain()
    block = model.blocks[3] = model.blocks[0]
    if hook:
        block.register_forward_hook(lambda module, args, output: output + block.bias)
    else:
        forward = block.forward
        block.forward = lambda x: forward(x) * 2
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (noting, r"do not compute what it does, on token ids of shape \(2, 8\), in training mode: output is off by"),
        (switching, "stage 0 of Plain leaves gradients off for the next one"),
        (lambda: closed_over(True), "computes with blocks.0.(weight|bias), which it does not hold"),
        (lambda: closed_over(False), "computes with blocks.0.(weight|bias), which it does not hold"),
    ],
)
def test_what_only_values_tell(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        seq1f1b.split(make(), 2)
    assert len(seq1f1b.split(make(), 2, check=False)) == 2


def test_what_a_stage_leaves_in_python_for_another_is_not_there() -> None:
    """The second stage of another process would take the first one's input for the first block's."""
    with pytest.raises(ValueError, match=r"do not compute what it does.*: output is off by"):
        seq1f1b.split(remembering(), 2, sample=torch.arange(10).view(2, 5))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda run: run.outputs.update(output=run.outputs["output"] + 1e-3), "output is off by"),
        (lambda run: run.outputs.update(output=run.outputs["output"].double()), "output has dtype torch.float64"),
        (lambda run: run.outputs.update(output=run.outputs["output"].detach()), "output has requires_grad False"),
        (lambda run: run.gradients["blocks.2.bias"].mul_(1.001), "the gradient of blocks.2.bias is off by 1.0e-03"),
        (lambda run: run.gradients.pop("head.weight"), r"the gradient of head.weight is off by 1.0e\+00"),
    ],
)
def test_a_difference_is_named(change: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = chain_compare._Row.backward

    def changed(self: Any) -> None:
        backward(self)
        if len(self._parts) > 1:
            change(self)

    monkeypatch.setattr(chain_compare._Row, "backward", changed)
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


def test_the_model_is_as_before() -> None:
    def forward(self: Any, tokens: Tensor) -> Tensor:
        return Plain.forward(self, tokens) + self.drop(self.norm(self.embedding(tokens).transpose(1, 2))).sum()

    model = model_of(forward, norm=nn.BatchNorm1d(HIDDEN), drop=nn.Dropout(0.5))
    model.blocks[1].eval()
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    calls = []
    model.head.weight.register_hook(calls.append)
    modes = [module.training for module in model.modules()]
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    seq1f1b.split(model, 2)
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), random)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight"}
    assert model.head.weight.grad.unique().tolist() == [3.0] and not calls


# -- what forward reads of Python --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    rate: float = 0.1
    inner: Any = None


class Scaled:
    factor = 1.0

    def of(self, x: Tensor) -> Tensor:
        return x * self.factor


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: globals().__setitem__(name, value)


def closure() -> tuple[Callable[..., Any], Callable[[Any], None]]:
    scale = 1.0

    def forward(self: Any, tokens: Tensor) -> Tensor:
        return Plain.forward(self, tokens) * scale

    def change(model: Any) -> None:
        nonlocal scale
        scale = 2.0

    return forward, change


def by_block(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    for block in self.blocks:
        x = x + block(x) * block.gain
    return self.head(x)


def scaled_by(read: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, tokens: Plain.forward(self, tokens) * read(self)


def gained() -> nn.ModuleList:
    blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
    for block in blocks:
        block.gain = 1.0
    return blocks


CLOSURE = closure()
READS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Any], None], str | None]] = {
    "attribute": (scaled_by(lambda m: m.scale), {"scale": 1.0}, lambda m: setattr(m, "scale", 2.0),
                  "self.scale was 1.0 when the model was cut, is 2.0 now"),
    "by getattr": (scaled_by(lambda m: getattr(m, f"scale_{1}")), {"scale_1": 1.0},
                   lambda m: setattr(m, "scale_1", 2.0), "self.scale_1 was 1.0"),
    "of another object": (scaled_by(lambda m: m.config.scale), {"config": Config()},
                          lambda m: setattr(m.config, "scale", 2.0), "self.config.scale was 1.0"),
    "another object": (scaled_by(lambda m: m.config.scale), {"config": Config()},
                       lambda m: setattr(m, "config", Config(3.0)), "self.config.scale was 1.0 .* is 3.0"),
    "not read": (scaled_by(lambda m: m.config.scale), {"config": Config()},
                 lambda m: setattr(m.config, "rate", 2.0), None),
    "deeper": (scaled_by(lambda m: m.config.inner.scale), {"config": Config(inner=Config())},
               lambda m: setattr(m.config.inner, "scale", 2.0), "self.config.inner.scale was 1.0"),
    "list": (scaled_by(lambda m: m.scales[1]), {"scales": [1.0, 2.0]},
             lambda m: m.scales.__setitem__(1, 3.0), r"self.scales was \[1.0, 2.0\] .* is \[1.0, 3.0\] now"),
    "dict": (scaled_by(lambda m: m.scales["a"]), {"scales": {"a": 1.0}},
             lambda m: m.scales.update(a=3.0), r"self.scales was \{'a': 1.0\}"),
    "method's": (lambda self, tokens: self.scaled.of(Plain.forward(self, tokens)), {"scaled": Scaled()},
                 lambda m: setattr(m.scaled, "factor", 2.0), "self.scaled.factor was 1.0"),
    "block's": (by_block, {"blocks": gained()}, lambda m: setattr(m.blocks[2], "gain", 2.0),
                "self.blocks.2.gain was 1.0"),
    "global": (scaled_by(lambda m: SCALE), {}, set_global("SCALE", 2.0), None),
    "global list": (scaled_by(lambda m: LEVELS["a"]), {}, lambda m: LEVELS.update(a=5.0), None),
    "closure": (CLOSURE[0], {}, CLOSURE[1], None),
    "absent": (scaled_by(lambda m: 2 if hasattr(m, "extra") else 1), {}, lambda m: setattr(m, "extra", 1),
               "self.extra was 'nothing' when"),
    "function": (lambda self, tokens: self.act(Plain.forward(self, tokens)), {"act": F.gelu},
                 lambda m: setattr(m, "act", F.relu), "self.act was"),
    "environment": (scaled_by(lambda m: float(os.environ.get("SPLIT_SCALE", "1"))), {},
                    lambda m: os.environ.__setitem__("SPLIT_SCALE", "2"), None),
    "within a block": (Plain.forward, {"blocks": nn.ModuleList(nn.Dropout(0.1) for _ in range(4))},
                       lambda m: setattr(m.blocks[0], "p", 0.5), None),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_what_forward_has_read_must_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, attributes, change, text = READS[name]
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(LEVELS, "a", 1.0)
    monkeypatch.delenv("SPLIT_SCALE", raising=False)
    model = model_of(forward, **attributes)
    stages = seq1f1b.split(model, 2)
    stages[0].check_before_step(None)
    change(model)
    with pytest.raises(ValueError, match=text) if text is not None else nullcontext():
        stages[0].check_before_step(None)
