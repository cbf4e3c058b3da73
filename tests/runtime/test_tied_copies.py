"""Are copies of a tied parameter that change after they were listed, or come apart, seen by every rank?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import run_processes
from slices import pairs_of
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

SIZE, TOKENS = 6, 8


class Stage(nn.Module):
    """Two matrices that the other stage has, too."""

    def __init__(self, order: str = "ab", sizes: tuple[int, int] = (SIZE, SIZE), by: str = "dict") -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(SIZE, size, bias=False) for size in sizes)
        self.own, self._by = nn.Linear(SIZE, SIZE), by
        if by == "dict":
            self.tied_parameters = {name: getattr(self, name).weight for name in order}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(self.b(torch.tanh(self.a(x)))))


class Computed(Stage):
    """It returns what it holds now."""

    def __init__(self, order: str = "ab") -> None:
        super().__init__(by="property")
        self._order = order

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        return {name: getattr(self, name).weight for name in self._order}


def make(kind: Callable[..., Stage] = Stage, orders: str = "ab ab", **options: Any) -> list[Stage]:
    torch.manual_seed(0)
    first, second = (kind(order, **options).double() for order in orders.split())
    with torch.no_grad():
        for name in "ab":
            if getattr(first, name).weight.shape == getattr(second, name).weight.shape:
                getattr(second, name).weight.copy_(getattr(first, name).weight)
    return [first, second]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, TOKENS, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def engine_of(stages: list[Any], group: Any, **options: Any) -> seq1f1b.PipelineEngine:
    return seq1f1b.PipelineEngine(
        stages[group.rank], num_microbatches=2, num_segments=2, loss_fn=F.mse_loss, group=group, **options
    )


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


# -- one order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orders", ["ab ab", "ab ba", "ba ab"])
def test_the_order_of_the_list_does_not_matter(orders):
    stages = make(orders=orders)
    before = copy.deepcopy(stages)
    run_ranks(2, lambda group: step(engine_of(stages, group)))
    for stage, was in zip(stages, before, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(stage.parameters(), was.parameters(), strict=True))
    assert_right(stages, before)


def step_unlike(rank: int, world: int, transport: str) -> None:
    """Sizes that differ only in the order of the list would fit each other."""
    stage = Stage(("ab", "ba")[rank], sizes=((SIZE, 2 * SIZE), (2 * SIZE, SIZE))[rank])
    engine = seq1f1b.PipelineEngine(stage, num_microbatches=2, loss_fn=F.mse_loss, transport=transport)
    before = copy.deepcopy(stage.state_dict())
    with pytest.raises(ValueError, match="tied parameter 'a' differs between ranks") as caught:
        engine._tied_elsewhere()
    assert "'a.weight' of stage 0 on rank 0 is (6, 6), float32, trained" in str(caught.value)
    assert "'a.weight' of stage 1 on rank 1 is (12, 6), float32, trained" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in stage.state_dict().items())
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_unlike_sizes_are_an_error_by_name_on_every_rank(transport):
    run_processes(2, step_unlike, transport)


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


# -- parameters that are replaced --------------------------------------------------------------------------------------


def new_parameter(stage: Any) -> None:
    stage.b.weight = nn.Parameter(stage.b.weight.detach().clone())


def assigned(stage: Any) -> None:
    stage.load_state_dict({name: value.clone() for name, value in stage.state_dict().items()}, assign=True)


def emptied(stage: Any) -> None:
    """As after the meta device, which ``to_empty`` leaves with new parameters."""
    values = stage.state_dict()
    stage.to("meta").to_empty(device="cpu")
    stage.load_state_dict(values)


def new_module(stage: Any) -> None:
    stage.b = copy.deepcopy(stage.b)


def swapped(stage: Any) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        stage.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


REPLACE: dict[str, Callable[[Any], None]] = {
    "a new parameter": new_parameter,
    "load_state_dict(assign=True)": assigned,
    "to_empty": emptied,
    "a new module": new_module,
    "to, with new parameters": swapped,
}


WHEN = [(Stage, "before the first step"), (Stage, "between two steps"), (Computed, "between two steps")]


@pytest.mark.parametrize(("name", "ranks", "kind", "when"), pairs_of(list(REPLACE), [[1], [0, 1]], WHEN))
def test_what_is_summed_is_what_the_modules_hold(name, ranks, when, kind):
    stages = make(kind)
    if name == "to, with new parameters":
        for stage in stages:
            stage.float().double()  # values that survive it
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


def test_a_copy_that_is_replaced_by_other_values_is_named_on_every_rank():
    stages = make()

    def work(group: Any) -> tuple[str, list[bool]]:
        engine = engine_of(stages, group)
        step(engine)
        if group.rank == 1:
            stages[1].b.weight = nn.Parameter(stages[1].b.weight.detach() + 0.5)
        gradients = [p.grad.clone() for p in (stages[group.rank].a.weight, stages[group.rank].own.weight)]
        with pytest.raises(ValueError, match="tied parameter 'b' have come apart") as caught:
            step(engine)
        for _ in range(2):  # until they are equal
            with pytest.raises(ValueError, match="tied parameter 'b' have come apart"):
                step(engine)
        if group.rank == 1:
            with torch.no_grad():
                stages[1].b.weight.copy_(stages[0].b.weight)
        step(engine)
        return str(caught.value), [torch.equal(stages[group.rank].a.weight.grad, 2 * gradients[0])]

    (first, alike), (second, others) = run_ranks(2, work)
    assert first == second and alike == others == [True]
    assert "'b.weight' of stage 1 on rank 1 differs from 'b.weight' of stage 0 on rank 0 by up to 5.0e-01" in first


@pytest.mark.parametrize("change", ["frozen", "dtype", "shape"])
def test_a_copy_that_becomes_another_kind_is_named_on_every_rank(change):
    stages = make()

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        step(engine)
        if group.rank == 1:
            weight = stages[1].b.weight
            if change == "frozen":
                weight.requires_grad_(False)
            elif change == "dtype":
                stages[1].b.weight = nn.Parameter(weight.detach().float())
                stages[1].b.forward = lambda x: F.linear(x, stages[1].b.weight.double())
            else:
                stages[1].b.weight = nn.Parameter(torch.zeros(2 * SIZE, SIZE, dtype=torch.float64))
                stages[1].b.forward = lambda x: F.linear(x, stages[1].b.weight[:SIZE])
        step(engine)

    texts = outcomes(work)
    assert texts[0] == texts[1]
    assert "tied parameter 'b' differs between ranks [0, 1]" in texts[0]


def test_what_cannot_be_found_again_is_named():
    """The list holds what no module does, and nobody knows where it was."""
    stages = make()
    for stage in stages:
        assigned(stage)
    texts = outcomes(lambda group: step(engine_of(stages, group)))
    assert texts[0] == texts[1]
    assert "rank 0: tied parameter 'a' of stage 0 is none of its parameters, and got no gradient" in texts[0]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1], "tied_parameters of Stage is a list, must be a dict of parameters"),
        ({"a": None}, "tied parameter 'a' of stage 1 is a NoneType, not an nn.Parameter"),
        ({"a": torch.zeros(2)}, "tied parameter 'a' of stage 1 is a Tensor, not an nn.Parameter"),
    ],
)
def test_a_list_that_is_none_is_named(given, told):
    stages = make()
    stages[1].tied_parameters = given
    assert any(told in text for text in outcomes(lambda group: step(engine_of(stages, group))))


def test_a_property_that_fails_is_named_and_hides_no_tie():
    stages = make(Computed)

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        step(engine)
        if group.rank == 1:
            stages[1].b = nn.Identity()
        step(engine)

    texts = outcomes(work)
    assert all("tied_parameters of Computed raises an error" in text for text in texts)


# -- hooks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("when", ["before the engine", "before the first step", "after a step"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_hooks_of_copies_are_refused_on_every_rank(ranks, when, kind):
    stages = make()

    def add(rank: int) -> None:
        if rank in ranks:
            getattr(stages[rank].b.weight, kind)(lambda given: None)

    if when == "before the engine":
        add(0), add(1)

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        if when == "before the first step":
            add(group.rank)
        if when == "after a step":
            step(engine)
            add(group.rank)
        step(engine)

    for text in outcomes(work):
        assert "tied parameter 'b' has copies on several stages, and hooks for its gradient" in text
        assert "engine.named_parameters() has every copy by the name 'b'" in text


def test_a_hook_that_is_removed_is_forgotten_and_one_without_copies_is_no_matter():
    stages = make()
    before = copy.deepcopy(stages)
    stages[1].own.weight.register_hook(lambda gradient: gradient)

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        step(engine)
        handle = stages[0].a.weight.register_hook(lambda gradient: gradient * 0) if group.rank == 0 else None
        with pytest.raises((ValueError, seq1f1b.PipelineError), match="hooks for its gradient"):
            step(engine)
        if handle is not None:
            handle.remove()
        stages[group.rank].zero_grad()
        step(engine)

    run_ranks(2, work)
    assert_right(stages, before)


# -- copies that come apart --------------------------------------------------------------------------------------------

PARTS = "the copies of tied parameter 'b' have come apart"


@pytest.mark.parametrize("accumulated", [1, 3, 10])
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
    assert first[0] == {1: 2, 3: 4, 10: 16}[accumulated]
    assert f"{PARTS}: 'b.weight' of stage 1 on rank 1 differs from 'b.weight' of stage 0 on rank 0 by up to" in first[1]
    assert "same optimizer, learning rate, weight decay" in first[1] and "docs/how-to/tied-weights.md" in first[1]


@pytest.mark.parametrize("caller", ["verify", "state_dict"])
def test_who_looks_at_the_weights_tells_that_copies_came_apart(caller):
    every = {"a": "a", "b": "b", "own": "own"}
    stages = listed(make(), every, every)
    stages[1].own.bias = None

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        state = seq1f1b.PipelineState(engine)
        for _ in range(3):
            step(engine)
        if group.rank == 0:
            with torch.no_grad():
                stages[0].b.weight.add_(0.25)
        if caller == "verify":
            engine.verify(batch()[0], target=batch()[1], show=False)
        else:
            with pytest.raises(ValueError, match=PARTS):
                state.state_dict()
            state.state_dict()  # it is told once, so that a checkpoint may be loaded
            step(engine)

    texts = outcomes(work)
    assert texts[0] == texts[1] and PARTS in texts[0] and "by up to 2.5e-01" in texts[0]


def test_a_checkpoint_is_loaded_over_copies_that_came_apart(tmp_path):
    stages = listed(make(), {"a": "a", "b": "b", "own0": "own"}, {"a": "a", "b": "b", "own1": "own"})
    stages[0].own.bias = stages[1].own.bias = None
    engine = seq1f1b.PipelineEngine(
        stages, schedule="seq1f1b-interleaved", num_microbatches=2, num_segments=2, loss_fn=F.mse_loss
    )
    state, before = seq1f1b.PipelineState(engine), stages[0].b.weight.detach().clone()
    step(engine)
    dcp.save({"train": state}, checkpoint_id=tmp_path / "before")
    step(engine)
    with torch.no_grad():
        stages[1].b.weight.add_(0.25)
    step(engine)  # the third, which does not compare
    with pytest.raises(Exception, match=PARTS):
        dcp.save({"train": state}, checkpoint_id=tmp_path / "after")
    with pytest.raises(ValueError, match=PARTS):
        step(engine)
    dcp.load({"train": state}, checkpoint_id=tmp_path / "before")
    assert torch.equal(stages[0].b.weight, before) and torch.equal(stages[1].b.weight, before)
    step(engine)


def test_copies_that_came_apart_are_told_after_a_failed_step_too():
    stages = make()

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        step(engine)
        with torch.no_grad():
            stages[group.rank].b.weight.add_(group.rank)
        stages[1].forward, kept = None, stages[1].forward  # type: ignore[method-assign, assignment]
        with pytest.raises(Exception, match="not callable"):
            step(engine)
        stages[1].forward = kept  # type: ignore[method-assign]
        step(engine)

    texts = outcomes(work)
    assert texts[0] == texts[1] and PARTS in texts[0]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_stay_equal_beside_parameters_of_their_own(name):
    """Float32, clipped; a rank's own parameters lie in other groups of tensors than those of the other one."""
    stages = make()
    stages[0].more = nn.ParameterList([nn.Parameter(torch.ones(3))])  # type: ignore[assignment]
    for stage in stages:
        stage.float()

    def work(group: Any) -> None:
        engine = engine_of(stages, group)
        optimizer = OPTIMIZERS[name](engine.parameters())
        x, y = batch()
        for _ in range(9):
            optimizer.zero_grad()
            engine.step(x.float(), target=y.float())
            engine.clip_grad_norm_(0.1)
            optimizer.step()

    run_ranks(2, work)
    for key in "ab":
        assert torch.equal(*(stage.get_parameter(f"{key}.weight") for stage in stages))


# -- gradients of several kinds ----------------------------------------------------------------------------------------


def test_a_sparse_gradient_meets_a_dense_one():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(9, SIZE, sparse=True).double(), nn.Linear(SIZE, 9, bias=False).double()
    whole = nn.Sequential(nn.Embedding(9, SIZE), nn.Linear(SIZE, 9, bias=False)).double()
    for part, other in ((embedding, head), (whole[0], whole[1])):
        part.tied_parameters = {"w": part.weight}
        with torch.no_grad():
            part.weight.copy_(embedding.weight)
            other.weight.copy_(embedding.weight)
    head.tied_parameters = {"w": head.weight}
    whole[1].weight = whole[0].weight
    tokens = torch.randint(9, (2, TOKENS))

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    def work(group: Any) -> None:
        engine = seq1f1b.PipelineEngine(
            [embedding, head][group.rank], num_microbatches=2, num_segments=2, loss_fn=loss_fn, group=group
        )
        for _ in range(2):
            engine.step(tokens, target=seq1f1b.shift_labels(tokens))

    run_ranks(2, work)
    for _ in range(2):
        loss_fn(whole(tokens), seq1f1b.shift_labels(tokens)).backward()
    for found in (embedding.weight.grad, head.weight.grad):
        torch.testing.assert_close(found, whole[0].weight.grad, rtol=1e-12, atol=1e-15)


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
    engine.step(x, target=y)
    handle = stage.b.weight.register_hook(lambda gradient: gradient) if rank == 2 else None
    with pytest.raises((ValueError, seq1f1b.PipelineError), match="tied parameter 'b' has copies on several stages"):
        engine.step(x, target=y)
    if handle is not None:
        handle.remove()
    engine.step(x, target=y)
    if rank == 2:
        stage.b.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"tied parameter 'b' differs between ranks \[0, 2\]"):
        engine.step(x, target=y)
    if rank == 2:
        stage.b.weight.requires_grad_(True)
        with torch.no_grad():
            stage.b.weight.add_(1.0)
    apart = r"'b' have come apart: 'b\.weight' of stage 2 on rank 2 .* up to 1\.0e.* clip by engine\.clip_grad_norm_"
    with pytest.raises(ValueError, match=apart):
        engine.step(x, target=y)
    if rank == 2:
        with torch.no_grad():
            stage.b.weight.sub_(1.0)
            stage.b.weight.copy_(stage.a.weight)
    if rank == 0:
        with torch.no_grad():
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
