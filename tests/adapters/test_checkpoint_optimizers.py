"""Does saving change nothing of any optimizer, and does loading give back what it had, whatever that was?"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_flatten

from seq1f1b import PipelineEngine, PipelineState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEPS, JOINS = 5, 3  # in steps before the latter, some parameters have no gradient


class Odd(optim.Optimizer):
    """Keeps what torch's optimizers do not: numbers, None, empty and nested containers; draws random numbers."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "note": {"name": "odd", 2: None}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.rand(3), random.random(), np.random.rand()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = self.state[p]
                if not own:
                    nested = {"moment": torch.zeros_like(p), "rates": {"now": 1.0, 3: "x"}, "list": [torch.ones(2), {}]}
                    own.update(count=0, nothing=None, nested=nested, empty={}, pair=(1, 2.5), sizes=[*p.shape])
                own["count"] += 1
                own["nested"]["rates"]["now"] *= 0.5
                own["nested"]["list"][0].add_(1)
                own["nested"]["moment"].mul_(0.9).add_(p.grad)
                factor = own["nested"]["rates"]["now"] + 0.01 * float(own["nested"]["list"][0].sum())
                p.add_(own["nested"]["moment"] * factor, alpha=-group["lr"])


NO_OPTIMIZER_OF_PARAMETERS = {"LBFGS", "SparseAdam", "Optimizer"}
"""LBFGS is none of a pipeline's: its line search asks for the loss again, on each rank alone. SparseAdam refuses
gradients that are not sparse, which the engine's are not."""
MAKERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    name: partial(kind, lr=1e-2, weight_decay=0.1)
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and name not in NO_OPTIMIZER_OF_PARAMETERS
} | {
    "Adagrad": lambda p: optim.Adagrad(p, initial_accumulator_value=0.3),
    "Adam": lambda p: optim.Adam(p, torch.tensor(1e-2), amsgrad=True),
    "Adam, fused": lambda p: optim.Adam(p, fused=True),
    "Muon": lambda p: optim.Muon([each for each in p if each.dim() == 2]),
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": optim.Rprop,
    "SGD, dampening": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "odd": lambda p: Odd(p, 0.1),
}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.frozen(self.second(x) + (self.late(x) if self.is_late else 0))


class Run:
    """A model, its engine, an optimizer and its schedule."""

    def __init__(self, name: str = "AdamW", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module = Part().double()
        self.engine = PipelineEngine(self.module, num_microbatches=2, num_segments=2, loss_fn=F.mse_loss)
        self.optimizer = MAKERS[name](list(self.engine.parameters()))
        self.schedule = optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state = PipelineState(self.engine, self.optimizer)
        self.calls = 0
        self.optimizer.register_step_pre_hook(self._called)
        self.optimizer.register_step_post_hook(self._called)

    def _called(self, *_: Any) -> None:
        self.calls += 1

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randn(4, 8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
            self.module.is_late = step >= JOINS
            self.engine.step(x, target=y)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return self

    def trained(self) -> Any:
        """A copy of what decides how training goes on."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = [dict(self.optimizer.state[p]) if p in self.optimizer.state else None for p in self.engine.parameters()]
        return copy.deepcopy([self.module.state_dict(), state, groups])

    def everything(self) -> Any:
        gradients = [None if p.grad is None else p.grad.clone() for p in self.engine.parameters()]
        numbers = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
        others = [sorted(vars(self.optimizer)), self.schedule.state_dict(), self.calls]
        return [self.trained(), gradients, copy.deepcopy(numbers), copy.deepcopy(others)]


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, and of one type."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y)
        return type(x) is type(y) and bool(np.all(x == y))

    (own, form), (others, other_form) = tree_flatten(a), tree_flatten(b)
    return form == other_form and all(map(same, own, others))


@pytest.mark.parametrize("name", MAKERS)
def test_saving_changes_nothing_and_a_run_goes_on_as_if_nothing_had_interrupted_it(name, tmp_path):
    run, saved = Run(name), []
    for saved_at in (0, JOINS):  # before the first step; where some parameters have state, others none
        run.train(0, saved_at)
        before = run.everything()
        state = run.state.state_dict()
        dcp.save({"train": run.state}, checkpoint_id=tmp_path / f"{saved_at}")
        dcp.save({**state, "step": torch.tensor(saved_at)}, checkpoint_id=tmp_path / f"{saved_at}, parts")
        assert equal(before, run.everything())
        if saved_at == 0 and name != "Adagrad":  # which has state as it is made
            assert not [key for key in state["optimizer"] if key.startswith("state.")]
        saved.append((saved_at, run.trained(), copy.deepcopy(state), copy.deepcopy(run.schedule.state_dict())))
    truth = run.train(JOINS, STEPS).trained()
    assert equal(truth, Run(name).train(0, STEPS).trained())

    def load(state: PipelineState, way: str, saved_at: int, snapshot: dict[str, Any]) -> None:
        wanted = {**state.state_dict(), "step": torch.tensor(-1)}
        if way == "whole":
            dcp.load({"train": state}, checkpoint_id=tmp_path / f"{saved_at}")
        elif way == "parts":
            dcp.load(wanted, checkpoint_id=tmp_path / f"{saved_at}, parts")
            state.load_state_dict(wanted)
            assert wanted["step"] == saved_at
        else:
            state.load_state_dict(snapshot)

    for saved_at, at_save, snapshot, schedule in saved:
        # A new process, and the one that saved, after later steps.
        for other, way in ((Run(name, 1), "whole"), (Run(name, 1), "parts"), (Run(name, 1), "copy"), (run, "whole")):
            load(other.state, way, saved_at, snapshot)
            other.schedule.load_state_dict(schedule)
            assert equal(other.trained(), at_save), way
            assert equal(other.train(saved_at, STEPS).trained(), truth), way


@pytest.mark.parametrize("trained", [0, JOINS])
def test_a_state_that_dcp_does_not_ask_for_is_an_error_not_a_loss(trained, tmp_path):
    """trained: steps of the run that loads; its optimizer has no state, or some of what the checkpoint has."""
    dcp.save({"train": Run().train(0, STEPS).state}, checkpoint_id=tmp_path)
    other = Run(seed=1).train(0, trained)
    before = other.everything()
    with pytest.raises(dcp.CheckpointException, match=r"give each PipelineState itself to DCP: dcp.load\({"):
        dcp.load({"train": other.state.state_dict()}, checkpoint_id=tmp_path)  # a dict in a dict
    assert equal(before, other.everything())


class Application:
    """Whatever holds a script's state, as DCP's tutorial has it."""

    def __init__(self, *runs: Run) -> None:
        self.runs = runs

    def state_dict(self) -> dict[str, Any]:
        return {f"run{i}": run.state.state_dict() for i, run in enumerate(self.runs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, run in enumerate(self.runs):
            run.state.load_state_dict(state[f"run{i}"])


def test_states_inside_a_stateful_and_beside_each_other_keep_their_own(tmp_path):
    runs = [Run(seed=seed).train(0, 1 + seed) for seed in (0, 1)]
    others = [Run(seed=seed) for seed in (2, 3)]
    dcp.save({"app": Application(runs[0])}, checkpoint_id=tmp_path / "one")
    dcp.load({"app": Application(others[0])}, checkpoint_id=tmp_path / "one")
    assert equal(others[0].trained(), runs[0].trained())
    dcp.save({"a": runs[0].state, "b": runs[1].state}, checkpoint_id=tmp_path / "two")
    dcp.load({"a": others[1].state, "b": others[0].state}, checkpoint_id=tmp_path / "two")
    assert all(equal(run.trained(), other.trained()) for run, other in zip(runs, reversed(others), strict=True))
    dcp.save({"app": Application(*runs)}, checkpoint_id=tmp_path / "several")
    with pytest.raises(ValueError, match=r"has 2 states of pipelines, .*: give each PipelineState itself"):
        dcp.load({"app": Application(*others)}, checkpoint_id=tmp_path / "several")


def test_an_asynchronous_save_takes_the_state_of_its_moment(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        run = Run("odd").train(0, 1)
        at_save = run.trained()
        future = dcp.async_save({"train": run.state}, checkpoint_id=tmp_path / "saved")
        future.result()
        run.train(1, 2)
        dcp.load({"train": run.state}, checkpoint_id=tmp_path / "saved")
        assert equal(run.trained(), at_save)
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_under_keys_that_a_checkpoint_cannot_hold_are_refused():
    run = Run()
    run.optimizer.state[run.module.first.weight]["blocks"] = {0: torch.ones(2)}
    with pytest.raises(ValueError, match=r"dict with keys \[0\], and checkpoints hold str keys"):
        run.state.state_dict()
