"""Do stages of forwards with code of their own between the blocks train, in segments, as the model does whole?"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN, TOKENS = 16, 8, 12


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(blocks))

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.trunk(self.embedding(tokens)))


def model_of(forward: Callable[..., Any], prepare: Callable[[Any], None] | None = None) -> Any:
    torch.manual_seed(0)
    model = type("Own", (Model,), {"forward": forward})()
    if prepare is not None:
        prepare(model)
    return model.double()


# -- forwards ----------------------------------------------------------------------------------------------------------


def constants(self: Any, tokens: Tensor) -> Tensor:
    ramp, mask = torch.linspace(0, 1, HIDDEN), torch.ones(HIDDEN, HIDDEN).tril()
    x = self.embedding(tokens) * torch.tensor(8.0).sqrt()
    for block in self.blocks:
        x = x + (block(x) * ramp).float().double() @ mask.double()  # in float32 it would round as the rows are cut
    return self.head(x + torch.arange(HIDDEN))


def sizes(self: Any, tokens: Tensor) -> Tensor:
    batch, length = tokens.shape
    x = self.embedding(tokens)
    x = x + torch.zeros(batch, length, HIDDEN, device=tokens.device) + x.new_ones(x.shape) + torch.ones_like(x)
    return self.head(self.trunk(x) * tokens.size(0) ** 0.5)


def size_behind_the_cut(self: Any, tokens: Tensor) -> Tensor:
    batch, length = tokens.shape
    return self.head(self.trunk(self.embedding(tokens)).view(batch, length, 2, -1).flatten(2))


def running_sum(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    before = seq1f1b.carry_in(0, torch.zeros(1, 1, HIDDEN, dtype=torch.float64))
    total = before + x.cumsum(1)
    seq1f1b.carry_out(0, total[:, -1:])
    return self.head(self.trunk(total))


def with_loss(self: Any, tokens: Tensor, targets: Tensor | None = None) -> Any:
    logits, loss = self.head(self.trunk(self.embedding(tokens))), None
    if targets is not None:
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
    return logits, loss


def logits_or_both(self: Any, tokens: Tensor, targets: Tensor | None = None) -> Any:
    logits = self.head(self.trunk(self.embedding(tokens)))
    return logits if targets is None else (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def with_weighed_loss(self: Any, tokens: Tensor, targets: Tensor | None = None, weight: Tensor | None = None) -> Any:
    logits = self.head(self.trunk(self.embedding(tokens)))
    if targets is None:
        return logits, None
    return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), weight=weight)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(x), x.mean(-1, keepdim=True)


class Named(Pair):
    def forward(self, *, x: Tensor) -> Any:
        return {"x": x + self.linear(x), "times": 2}


def pairs(self: Any, tokens: Tensor) -> Tensor:
    x, total = self.embedding(tokens), 0.0
    for block in self.blocks:
        x, mean = block(x)
        total = total + mean
    return self.head(x + total)


def names(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    for block in self.blocks:
        made = block(x=x)
        x = made["x"] * made["times"]
    return self.head(x)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.rand(HIDDEN), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.rates
        return angles.cos(), angles.sin()


class Turned(Pair):
    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return x + self.linear(x) * rotary[0] + rotary[1]


class State(Pair):
    def forward(self, state: Any) -> Any:  # type: ignore[override]
        return {"x": state["x"] + self.linear(state["x"]), "before": [state["x"], None]}


def rotary(self: Any, tokens: Tensor) -> Tensor:
    x, turn = self.embedding(tokens), self.turn(seq1f1b.positions(tokens))
    for block in self.blocks:
        x = block(x, turn)
    return self.head(x)


def turned(model: Any) -> None:
    model.turn, model.blocks = Rotary(), nn.ModuleList(Turned() for _ in range(4))


def state_of_blocks(self: Any, tokens: Tensor) -> Tensor:
    state = {"x": self.embedding(tokens), "before": None}
    for block in self.blocks:
        state = block(state)
    return self.head(state["x"] + state["before"][0])


def gains(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    for block in self.blocks:
        x = x + block(x) * block.gain
    return self.head(x)


def gained(model: Any) -> None:
    for block in model.blocks:
        block.gain = torch.full((HIDDEN,), 2.0, dtype=torch.float64)  # no buffer


def blocks_of(kind: type[nn.Module]) -> Callable[[Any], None]:
    return lambda model: setattr(model, "blocks", nn.ModuleList(kind() for _ in range(4)))


def shared(model: Any) -> None:
    model.blocks[2] = model.blocks[3] = model.blocks[0]


def all_shared(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)


def tied_in_forward(self: Any, tokens: Tensor) -> Tensor:
    return F.linear(self.trunk(self.embedding(tokens)), self.embedding.weight) + self.head(
        tokens.new_zeros(HIDDEN).double()
    )


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[1])
    nn.utils.parametrizations.weight_norm(model.blocks[3])


def frozen(model: Any) -> None:
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)


def single(model: Any) -> None:
    model.head = nn.Sequential(model.head, nn.Identity())


MODELS: dict[str, tuple[Callable[..., Any], Callable[[Any], None] | None]] = {
    "plain": (Model.forward, None),
    "constants": (constants, None),
    "sizes": (sizes, None),
    "size behind the cut": (size_behind_the_cut, None),
    "carried outside of the blocks": (running_sum, None),
    "with a loss": (with_loss, None),
    "with a loss of two arguments": (with_weighed_loss, None),
    "logits, or both": (logits_or_both, None),
    "pairs": (pairs, blocks_of(Pair)),
    "dicts, by keyword": (names, blocks_of(Named)),
    "a tuple for all blocks": (rotary, turned),
    "a dict from block to block": (state_of_blocks, blocks_of(State)),
    "tensors of blocks": (gains, gained),
    "a block three times": (Model.forward, shared),
    "one block alone": (Model.forward, all_shared),
    "tied in forward": (tied_in_forward, None),
    "parametrized": (Model.forward, parametrized),
    "frozen": (Model.forward, frozen),
    "nested": (Model.forward, single),
}


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("name", MODELS)
def test_stages_train_as_the_model(name: str) -> None:
    model = model_of(*MODELS[name])
    whole = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # every one is compared
        stages = seq1f1b.split(model, 2)
    tokens = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    target = tokens.roll(-1, 1)

    def run(group: Any) -> Any:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank], num_microbatches=2, num_segments=3, loss_fn=loss_fn, group=group
        )
        return engine.step(tokens, target=target)

    found = run_ranks(2, run)[-1]
    logits = [whole(row[None]) for row in tokens]
    losses = [
        loss_fn(out[0] if isinstance(out, tuple) else out, row[None]) for out, row in zip(logits, target, strict=True)
    ]
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-10, atol=1e-10)
    gradients = {key: p.grad for stage in stages for key, p in stage.named_parameters(remove_duplicate=False)}
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_the_model(name: str) -> None:
    model = model_of(*MODELS[name])
    want = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = {key: tensor for stage in seq1f1b.split(model, 2) for key, tensor in stage.state_dict().items()}
    assert state.keys() == want.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in want.items())


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def as_dataclass(self: Any, tokens: Tensor) -> Output:
    hidden = self.trunk(self.embedding(tokens))
    return Output(self.head(hidden), hidden)


@pytest.mark.parametrize(
    "forward",
    [
        as_dataclass,
        lambda self, tokens: {"logits": self.head(self.trunk(self.embedding(tokens)))},
        lambda self, tokens: (self.head(self.trunk(self.embedding(tokens))), 3),
    ],
)
def test_outputs_of_other_kinds(forward: Any) -> None:
    model, tokens = model_of(forward), torch.arange(10).view(2, 5)
    want = model(tokens)
    first, last = seq1f1b.split(model, 2)
    found = last(first(tokens))
    assert type(found) is type(want)
    torch.testing.assert_close(dict(vars(found)) if isinstance(found, Output) else found,
                               dict(vars(want)) if isinstance(want, Output) else want)  # fmt: skip


def test_a_stage_begins_with_a_call_of_a_shared_block() -> None:
    model = model_of(Model.forward, shared)
    first, last = seq1f1b.split(model, at=["blocks.3"])
    assert {key.split(".")[1] for key, _ in first.named_parameters(remove_duplicate=False) if "blocks" in key} == {
        "0",
        "1",
        "2",
    }
    assert set(last.tied_parameters) == {"blocks.0.weight", "blocks.0.bias"} == set(first.tied_parameters)
    assert last.get_parameter("blocks.3.weight") is not first.get_parameter("blocks.0.weight")


@pytest.mark.parametrize("place", ["", "bn"])
def test_statistics_of_two_stages_are_refused(place: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.linear(x).transpose(1, 2)).transpose(1, 2)

    model = model_of(Model.forward, blocks_of(Normed))
    assert len(seq1f1b.split(copy.deepcopy(model), 2)) == 2
    if place:
        model.blocks[3].bn = model.blocks[0].bn
    else:
        model.blocks[3] = model.blocks[0]
    with pytest.raises(ValueError, match=r"blocks.*bn' \(BatchNorm1d\) keeps statistics .* stages \[0, 1\] use it"):
        seq1f1b.split(model, 2)


def test_a_buffer_that_blocks_of_two_stages_change_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count.clone()

    def prepare(model: Any) -> None:
        model.blocks[0] = model.blocks[3] = Counting()

    with pytest.raises(ValueError, match=r"changes buffer blocks.0.count, and stages \[0, 1\] use it"):
        seq1f1b.split(model_of(Model.forward, prepare), 2)
