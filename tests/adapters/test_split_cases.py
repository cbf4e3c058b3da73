"""Are models cut so that their stages are the model, and is each other model refused by its line or attribute?

The stages are compared here by themselves, in a row against a copy of the model from before the cut.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slices import is_in_slice, one_in, slice_of
from split_models import CASES, CUT, Case, build
from split_parts import VOCAB, tokens
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

ACCEPTED = [name for name, case in CASES.items() if case.expected == CUT]
REFUSED = [name for name in CASES if name not in ACCEPTED]


def leaves(value: Any) -> list[Tensor]:
    """Tensors of an output of any form."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for each in value for tensor in leaves(each)] if isinstance(value, (tuple, list)) else []


def split_of(case: Case, model: nn.Module) -> list[Any]:
    """split as a user calls it; a warning is an error."""
    sample = {"sample": case.inputs()} if case.needs_sample else {}
    with case.around(), warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message=".*not compared")
        return seq1f1b.split(model, **case.cut, **sample)


def in_a_row(stages: list[Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for stage in stages:
        output = stage(*inputs, **kwargs)
        inputs = output if isinstance(output, tuple) else (output,)
    return output


def seeded() -> None:
    torch.manual_seed(5)
    random.seed(5)


def distance_from_fixed(outputs: list[Tensor]) -> Tensor:
    """A loss that gives every number of every output a gradient of its own."""
    fixed = [torch.arange(output.numel(), dtype=torch.float64).view_as(output).sin() for output in outputs]
    parts = [(output.double() - value).square().mean() for output, value in zip(outputs, fixed, strict=True)]
    return torch.stack(parts).sum()


def gradients_by_name(model: nn.Module, stages: list[Any]) -> dict[str, Tensor | None]:
    """Those of the stages, by the first name of the model's parameters: copies that are tied are summed."""
    names = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in reversed(list(names.items()))}
    copies: dict[str, dict[int, nn.Parameter]] = {}
    for stage in stages:
        for name, p in stage.named_parameters(remove_duplicate=False):
            copies.setdefault(first[id(names[name])], {})[id(p)] = p
    found: dict[str, Tensor | None] = {}
    for name, own in copies.items():
        gradients = [p.grad for p in own.values() if p.grad is not None]
        found[name] = torch.stack(gradients).sum(0) if gradients else None
    return found


def close(found: Any, wanted: Any, what: str) -> None:
    double = wanted.dtype == torch.float64
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if double else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, wanted, msg=lambda text: f"{what}: {text}", **tolerance)


def compare(name: str, model: nn.Module, stages: list[Any], training: bool) -> None:
    case = CASES[name]
    for module in (model, *stages):
        module.train(training)
        module.zero_grad()
    seeded()
    wanted = leaves(model(*case.inputs(), **case.kwargs()))
    distance_from_fixed(wanted).backward()
    seeded()
    found = leaves(in_a_row(stages, case.inputs(), case.kwargs()))
    distance_from_fixed(found).backward()
    assert len(found) == len(wanted)
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        close(mine, theirs, f"output {i}")
    gradients = gradients_by_name(model, stages)
    assert gradients.keys() == {key for key, _ in model.named_parameters()}
    for key, p in model.named_parameters():
        if p.grad is None or not p.grad.any():
            assert gradients[key] is None or not gradients[key].any(), key
        else:
            close(gradients[key], p.grad, key)
    buffers = {key: buffer for stage in stages for key, buffer in stage.named_buffers()}
    for key, buffer in model.named_buffers():
        close(buffers[key], buffer, key)


TRAINED = [name for name in ACCEPTED if CASES[name].engine]
# Stages that the plain run trains in an engine are in a row for the full run; none of them is another in training.
IN_A_ROW = [(name,) for name in ACCEPTED if not (CASES[name].engine and is_in_slice(2, name))]


@pytest.mark.parametrize("name", slice_of([(name,) for name in ACCEPTED], IN_A_ROW))
def test_stages_in_a_row_are_the_model(name):
    """Outputs, gradients and buffers, in training and in evaluation, and what the stages own."""
    model = build(name)
    whole = copy.deepcopy(model)
    stages = split_of(CASES[name], model)
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    count = CASES[name].cut.get("num_stages") or len(CASES[name].cut["at"]) + 1
    assert len(stages) == count and all(list(stage.parameters()) for stage in stages)
    assert set().union(*(stage.state_dict() for stage in stages)) == set(whole.state_dict())
    for training in (True, False):
        compare(name, whole, stages, training)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_lost_by_a_cut_is_refused_by_name(name):
    case = CASES[name]
    model = build(name)
    before, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    with pytest.raises(ValueError) as caught:
        split_of(case, model)
    text = str(caught.value)
    assert case.expected in text and case.names in text, text
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# -- in an engine ------------------------------------------------------------------------------------------------------


def first_of(output: Any) -> Tensor:
    return leaves(output)[0]


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(first_of(output).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("name", one_in(2, TRAINED))
def test_an_engine_trains_the_stages_as_the_whole_model(name):
    """Two steps in segments, over ranks that are threads, and a verification with the model itself."""
    case = CASES[name]
    model = build(name).eval()  # dropout draws other numbers in segments
    whole = copy.deepcopy(model)
    stages = split_of(case, model)
    for stage in stages:
        stage.eval()
    x = tokens()
    target = seq1f1b.shift_labels(x)

    def run(group: Any) -> Any:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank], num_microbatches=2, num_segments=3, loss_fn=loss_fn, group=group
        )
        optimizer, losses = torch.optim.SGD(engine.parameters(), lr=0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            losses += engine.step(x, target=target)
            optimizer.step()
        result = engine.verify(x, target=target, show=False, model=whole if group.rank == 0 else None)
        return losses, str(result), bool(result)

    found = run_ranks(len(stages), run)
    optimizer, losses = torch.optim.SGD(whole.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        for row, labels in zip(x, target, strict=True):
            loss = loss_fn(whole(row[None]), labels[None])
            losses.append(loss.detach())
            (loss / 2).backward()
        optimizer.step()
    close(torch.stack(found[-1][0]), torch.stack(losses), "losses")
    values = {key: t for stage in stages for key, t in stage.named_parameters(remove_duplicate=False)}
    for key, p in whole.named_parameters():
        close(values[key], p, key)
    assert all(ok for *_, ok in found), found[0][1]


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].change])
def test_a_value_of_python_that_changes_later_stops_the_step(name):
    case = CASES[name]
    assert case.change is not None
    change, text = case.change
    model = build(name)
    stages = split_of(case, model)
    x = tokens()
    target = x.clone()

    def run(group: Any) -> None:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank], num_microbatches=2, num_segments=2, loss_fn=loss_fn, group=group
        )
        engine.step(x, target=target)
        engine.all_gather_object(None)
        if group.rank == 0:
            change(model)
        engine.all_gather_object(None)
        with pytest.raises((ValueError, seq1f1b.PipelineError), match=text):
            engine.step(x, target=target)

    run_ranks(2, run)


def test_the_models_have_the_vocabulary_that_the_tokens_need():
    assert int(tokens().max()) < VOCAB
