"""Are copies of a tied parameter that change after they were listed, or come apart, seen by every rank?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_processes
from slices import pairs_of
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

SIZE, TOKENS = 6, 8


class Stage(nn.Module):
    """Two matrices that the other stage has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.own = (nn.Linear(SIZE, SIZE, bias=name == "own") for name in ("a", "b", "own"))
        self.list_ties()

    def list_ties(self) -> None:
        self.tied_parameters = {name: getattr(self, name).weight for name in "ab"}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(self.b(torch.tanh(self.a(x)))))


class Computed(Stage):
    """It returns what it holds now."""

    def list_ties(self) -> None: ...

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        return {name: getattr(self, name).weight for name in "ab"}


def make(kind: Callable[[], Stage] = Stage) -> list[Stage]:
    """Copies of other values: those of the first one count."""
    torch.manual_seed(0)
    return [kind().double(), kind().double()]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, TOKENS, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def engine_of(stages: list[Any], group: Any, **options: Any) -> seq1f1b.PipelineEngine:
    given = {"num_microbatches": 2, "num_segments": 2, "loss_fn": F.mse_loss, "group": group, **options}
    return seq1f1b.PipelineEngine(stages[group.rank], **given)


def whole_gradients(stages: list[Any]) -> dict[str, Tensor]:
    """Those of one model, whose second half has the first one's matrices."""
    halves = copy.deepcopy(stages)
    for name in "ab":
        getattr(halves[1], name).weight = getattr(halves[0], name).weight
    x, y = batch()
    (sum(F.mse_loss(halves[1](halves[0](a)), b) for a, b in zip(x.split(1), y.split(1), strict=True)) / 2).backward()
    return {name: getattr(halves[0], name).weight.grad for name in "ab"}


def outcomes(run: Callable[[Any], Any], ranks: int = 2) -> list[str]:
    """What each rank's call raises, "" if nothing; the others' PipelineErrors count."""

    def work(group: Any) -> str:
        try:
            run(group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(ranks, work)


def step(engine: seq1f1b.PipelineEngine) -> list[Tensor]:
    x, y = batch()
    return engine.step(x, target=y)


def assert_right(stages: list[Any], before: list[Any]) -> None:
    """The gradients of one step are those of the whole model, on both stages."""
    for name, gradient in whole_gradients(before).items():
        for stage in stages:
            found = stage.get_parameter(f"{name}.weight").grad
            torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)


def listed(stages: list[Any], *lists: dict[str, str]) -> list[Any]:
    """Stages that list other names, each for one of its matrices."""
    for stage, names in zip(stages, lists, strict=True):
        stage.tied_parameters = {name: getattr(stage, own).weight for name, own in names.items()}
    return stages


def test_one_parameter_under_several_names():
    one, other = {"x": "a", "y": "a", "b": "b"}, {"y": "a", "b": "b", "x": "a"}
    stages = listed(make(), one, other)
    before = copy.deepcopy(stages)

    def work(group: Any) -> list[str]:
        engine = engine_of(stages, group)
        step(engine)
        return [name for name, _ in engine.named_parameters()]

    assert [names[:2] for names in run_ranks(2, work)] == [["x", "b"]] * 2
    assert_right(stages, before)
    stages = listed(make(), one, {"x": "a", "b": "b"})
    texts = outcomes(lambda group: step(engine_of(stages, group)))
    assert all("tied parameter 'x' differs between ranks" in text and "also listed as ['y']" in text for text in texts)


def test_a_frozen_tie_gets_the_first_ones_values_and_no_gradient():
    stages = make()
    for stage in stages:
        stage.b.weight.requires_grad_(False)
    run_ranks(2, lambda group: step(engine_of(stages, group)))
    assert torch.equal(stages[0].b.weight, stages[1].b.weight) and stages[1].b.weight.grad is None


# -- parameters that are replaced --------------------------------------------------------------------------------------


def assigned(stage: Any) -> None:
    stage.load_state_dict({name: value.clone() for name, value in stage.state_dict().items()}, assign=True)


def emptied(stage: Any) -> None:
    """As after the meta device, which ``to_empty`` leaves with new parameters."""
    values = stage.state_dict()
    stage.to("meta").to_empty(device="cpu")
    stage.load_state_dict(values)


REPLACE: dict[str, Callable[[Any], None]] = {
    "a new parameter": lambda stage: setattr(stage.b, "weight", nn.Parameter(stage.b.weight.detach().clone())),
    "load_state_dict(assign=True)": assigned,
    "to_empty": emptied,
    "a new module": lambda stage: setattr(stage, "b", copy.deepcopy(stage.b)),
}


WHEN = [(Stage, "before the first step"), (Stage, "between two steps"), (Computed, "between two steps")]


@pytest.mark.parametrize(("name", "ranks", "kind", "when"), pairs_of(list(REPLACE), [[1], [0, 1]], WHEN))
def test_what_is_summed_is_what_the_modules_hold(name, ranks, when, kind):
    stages = make(kind)
    before = copy.deepcopy(stages)

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        if when == "between two steps":
            step(engine)
        if group.rank in ranks:
            REPLACE[name](stages[group.rank])
        stages[group.rank].zero_grad()
        step(engine)
        assert dict(engine.named_parameters())["b"] is stages[group.rank].b.weight
        assert stages[group.rank].tied_parameters["b"] is stages[group.rank].b.weight

    run_ranks(2, work)
    assert_right(stages, before)


# -- what is wrong with a copy -----------------------------------------------------------------------------------------


def other_dtype(stage: Any) -> None:
    stage.b.weight = nn.Parameter(stage.b.weight.detach().float())
    stage.b.forward = lambda x: F.linear(x, stage.b.weight.double())


def other_shape(stage: Any) -> None:
    stage.b.weight = nn.Parameter(torch.zeros(2 * SIZE, SIZE, dtype=torch.float64))
    stage.b.forward = lambda x: F.linear(x, stage.b.weight[:SIZE])


def gives(value: Any) -> Callable[[Any], None]:
    return lambda stage: setattr(stage, "tied_parameters", value)


HOOKED = "tied parameter 'b' has copies on several stages, and hooks for its gradient ('b.weight' of stage 1 on rank 1"
UNLIKE = "tied parameter 'b' differs between ranks [0, 1]: 'b.weight' of stage 0 on rank 0 is (6, 6), float64, trained"
# What is done to the second stage, and what every rank hears
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "values": (
        lambda stage: setattr(stage.b, "weight", nn.Parameter(stage.b.weight.detach() + 0.5)),
        "'b.weight' of stage 1 on rank 1 differs from 'b.weight' of stage 0 on rank 0 by up to 5.0e-01",
    ),
    "frozen": (lambda stage: stage.b.weight.requires_grad_(False), UNLIKE),
    "dtype": (other_dtype, UNLIKE),
    "shape": (other_shape, UNLIKE),
    "hook": (lambda stage: stage.b.weight.register_hook(lambda given: None), HOOKED),
    "hook afterwards": (
        lambda stage: stage.b.weight.register_post_accumulate_grad_hook(lambda given: None), HOOKED,
    ),
    "a list": (gives([1]), "tied_parameters of Stage is a list, must be a dict of parameters"),
    "nothing": (gives({"a": None}), "tied parameter 'a' of stage 1 is a NoneType, not an nn.Parameter"),
    "tensor": (gives({"a": torch.zeros(2)}), "tied parameter 'a' of stage 1 is a Tensor, not an nn.Parameter"),
    "late": (
        lambda stage: stage.tied_parameters.update(c=stage.own.weight), "['c'] were listed after the first step",
    ),
    "a property that fails": (
        lambda stage: setattr(stage, "b", nn.Identity()), "tied_parameters of Computed raises an error",
    ),
    "one parameter at two places": (assigned, "a.weight, b.weight were one parameter of stage 1 and are several now"),
}  # fmt: skip
OF_KIND = {"a property that fails": lambda: make(Computed), "one parameter at two places": lambda: at_two_places()}
AT_FIRST = ("frozen", "dtype", "shape", "hook", "hook afterwards")


def at_two_places() -> list[Any]:
    stages = make()
    stages[1].a.weight = stages[1].b.weight
    return listed(stages, {"b": "b"}, {"b": "b"})


@pytest.mark.parametrize(("name", "is_late"), [*((n, True) for n in WRONG), *((n, False) for n in AT_FIRST)])
def test_what_is_wrong_with_a_copy_is_named_on_every_rank(name, is_late):
    stages, (change, told) = OF_KIND.get(name, make)(), WRONG[name]

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        if is_late:
            step(engine)
        if group.rank == 1:
            change(stages[1])
        step(engine)

    assert all(told in text for text in outcomes(work))


def test_what_cannot_be_found_again_is_named():
    """The list holds what no module does, and nobody knows where it was."""
    stages = make()
    for stage in stages:
        assigned(stage)
    texts = outcomes(lambda group: step(engine_of(stages, group)))
    assert all("is none of its parameters: a module holds another one in its place" in text for text in texts)


# -- copies that come apart --------------------------------------------------------------------------------------------

PARTS = "the copies of tied parameter 'b' have come apart"


@pytest.mark.parametrize("accumulated", [1, 10])
def test_optimizers_that_differ_are_told_on_every_rank_and_no_gradient_is_lost(accumulated):
    stages = make()

    def work(group: Any) -> tuple[int, str]:
        engine = engine_of(stages, group)
        named = dict(engine.named_parameters())
        decayed = named.pop("b") if group.rank == 1 else None
        groups = [{"params": list(named.values())}, {"params": [] if decayed is None else [decayed], "weight_decay": 1}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for count in range(1, 40):
            grad = None if stages[group.rank].b.weight.grad is None else stages[group.rank].b.weight.grad.clone()
            try:
                step(engine)
            except ValueError as error:
                assert torch.equal(stages[group.rank].b.weight.grad, grad) or grad is None
                return count, str(error)
            if count % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        raise AssertionError("nothing was told")

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0] == {1: 2, 10: 16}[accumulated]
    assert f"{PARTS}: 'b.weight' of stage 1 on rank 1 differs from 'b.weight' of stage 0 on rank 0 by up to" in first[1]
    assert "same optimizer, learning rate, weight decay" in first[1] and "docs/how-to/tied-weights.md" in first[1]


@pytest.mark.parametrize("when", ["by verify", "after a failed step"])
def test_copies_that_came_apart_are_told(when):
    stages = make()

    def work(group: Any) -> None:
        engine, (x, y) = engine_of(stages, group), batch()
        for _ in range(3 if when == "by verify" else 1):
            step(engine)
        with torch.no_grad():
            stages[group.rank].b.weight.add_(0.25 * group.rank)
        if when == "by verify":
            engine.verify(x, target=y, show=False)
        with pytest.raises((RuntimeError, seq1f1b.PipelineError)):
            engine.step(x[..., 1:], target=y)
        step(engine)

    texts = outcomes(work)
    assert texts[0] == texts[1] and PARTS in texts[0] and "by up to 2.5e-01" in texts[0]


def test_copies_that_came_apart_are_not_saved_and_a_checkpoint_is_loaded_over_them():
    stages = listed(make(), {"a": "a", "b": "b", "own0": "own"}, {"a": "a", "b": "b", "own1": "own"})
    stages[0].own.bias = stages[1].own.bias = None
    engine = engine_of([stages], seq1f1b.LoopbackGroup(1)[0], schedule="seq1f1b-interleaved")
    state, before = seq1f1b.PipelineState(engine), stages[0].b.weight.detach().clone()
    step(engine)
    saved = copy.deepcopy(state.state_dict())
    step(engine)
    with torch.no_grad():
        stages[1].b.weight.add_(0.25)
    step(engine)  # the third, which does not compare
    for tells in (state.state_dict, lambda: step(engine)):
        with pytest.raises(ValueError, match=PARTS):
            tells()
    state.load_state_dict(saved)
    assert torch.equal(stages[0].b.weight, before) and torch.equal(stages[1].b.weight, before)
    step(engine)


# -- gradients of several kinds ----------------------------------------------------------------------------------------


def test_a_sparse_gradient_meets_a_dense_one():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(9, SIZE, sparse=True), nn.Linear(SIZE, 9, bias=False)).double()
    stages = copy.deepcopy(list(whole))
    whole[1].weight = whole[0].weight
    for stage in stages:  # the head takes the embedding's values
        stage.tied_parameters = {"w": stage.weight}
    tokens = torch.randint(9, (2, TOKENS))

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    def work(group: Any) -> None:
        engine = engine_of(stages, group, loss_fn=loss_fn)
        for _ in range(2):
            engine.step(tokens, target=seq1f1b.shift_labels(tokens))

    run_ranks(2, work)
    for _ in range(2):
        loss_fn(whole(tokens), seq1f1b.shift_labels(tokens)).backward()
    for stage in stages:
        torch.testing.assert_close(stage.weight.grad, whole[0].weight.grad.to_dense(), rtol=1e-12, atol=1e-15)


def test_gradients_of_two_dtypes_meet_in_the_wider_one():
    stages = make()
    for stage in stages:
        stage.bfloat16()
    stages[1].b.weight.grad_dtype = torch.float32

    def work(group: Any) -> None:
        x, y = batch()
        engine_of(stages, group, grad_dtype=None).step(x.bfloat16(), target=y.bfloat16())

    run_ranks(2, work)
    first, second = (stage.b.weight.grad for stage in stages)
    assert first.dtype == torch.bfloat16 and second.dtype == torch.float32
    assert torch.equal(first, second.bfloat16()) and first.abs().max() > 0


# -- other ranks -------------------------------------------------------------------------------------------------------


def break_things(rank: int, world: int, transport: str) -> None:
    """A tie of the first and the last rank; the one between them has no copy, and hears the same."""
    torch.manual_seed(0)
    stage: Any = Stage() if rank != 1 else nn.Linear(SIZE, SIZE)
    x, y = (value.float() for value in batch())
    engine = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=F.mse_loss, transport=transport)
    if rank == 2:
        stage.own.weight.register_hook(lambda gradient: gradient)  # it has no copies
    engine.step(x, target=y)
    handle = stage.b.weight.register_hook(lambda gradient: gradient) if rank == 2 else None
    with pytest.raises((ValueError, seq1f1b.PipelineError), match="tied parameter 'b' has copies on several stages"):
        engine.step(x, target=y)
    if handle is not None:
        handle.remove()
    engine.step(x, target=y)
    if rank == 2:
        with torch.no_grad():
            stage.b.weight.add_(1.0)
    apart = r"'b' have come apart: 'b\.weight' of stage 2 on rank 2 .* up to 1\.0e.* clip by engine\.clip_grad_norm_"
    with pytest.raises(ValueError, match=apart):
        engine.step(x, target=y)
    with torch.no_grad():
        if rank != 1:
            stage.b.weight.copy_(stage.a.weight)
    assert len(engine.step(x, target=y)) == 2 * (rank == 2)
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_rank_between_the_copies_hears_the_same(transport):
    run_processes(3, break_things, transport)


def train_replicas(rank: int, world: int) -> None:
    """Two stages under DDP, over two replicas each."""
    stages, grads = make(), {}
    replicas = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    pipelines = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    stage: Any = nn.parallel.DistributedDataParallel(stages[rank // 2], process_group=replicas[rank // 2])
    engine = seq1f1b.PipelineEngine(
        stage, num_microbatches=2, num_segments=2, loss_fn=F.mse_loss, group=pipelines[rank % 2]
    )
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)
    x, y = batch()
    want = whole_gradients(stages)
    for count in range(4):
        engine.step(x, target=y)
        if count == 0:
            grads = {name: stages[rank // 2].get_parameter(f"{name}.weight").grad.clone() for name in "ab"}
        optimizer.step()
        optimizer.zero_grad()
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-12, atol=1e-15)
    assert [name for name, _ in engine.named_parameters()][:2] == ["a", "b"]
    engine.close()


def test_copies_under_ddp():
    run_processes(4, train_replicas)
