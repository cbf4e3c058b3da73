"""Does saving change nothing of any optimizer, and does loading give back what it had, whatever that was?"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from slices import slice_of
from torch import Tensor, nn, optim

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


class WithClosure(optim.SGD):
    """Its step needs a closure."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step()


MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    "Adadelta": lambda p, **k: optim.Adadelta(p, weight_decay=0.1, **k),
    "Adafactor": lambda p, **k: optim.Adafactor(p, 1e-2, weight_decay=0.1, **k),
    "Adagrad": lambda p, **k: optim.Adagrad(p, 1e-2, initial_accumulator_value=0.3, weight_decay=0.1, **k),
    "Adam": lambda p, **k: optim.Adam(p, torch.tensor(1e-2), weight_decay=0.1, amsgrad=True, **k),
    "AdamW": lambda p, **k: optim.AdamW(p, 1e-2, weight_decay=0.1, **k),
    "Adamax": lambda p, **k: optim.Adamax(p, 1e-2, weight_decay=0.1, **k),
    "ASGD": lambda p, **k: optim.ASGD(p, 1e-2, weight_decay=0.1, **k),
    "Muon": lambda p, **k: optim.Muon([each for each in p if each.dim() == 2], 1e-2, **k),
    "NAdam": lambda p, **k: optim.NAdam(p, 1e-2, weight_decay=0.1, **k),
    "RAdam": lambda p, **k: optim.RAdam(p, 1e-2, weight_decay=0.1, **k),
    "RMSprop": lambda p, **k: optim.RMSprop(p, 1e-2, centered=True, momentum=0.9, weight_decay=0.1, **k),
    "Rprop": lambda p, **k: optim.Rprop(p, 1e-2, **k),
    "SGD": lambda p, **k: optim.SGD(p, 0.1, weight_decay=0.1, **k),
    "SGD, dampening": lambda p, **k: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1, **k),
    "SGD, nesterov": lambda p, **k: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **k),
    "odd": lambda p: Odd(p, 0.1),
    "closure": lambda p: WithClosure(p, 0.1, momentum=0.9, weight_decay=0.1),
}
"""LBFGS is none of a pipeline's: its line search asks for the loss again, on each rank alone. SparseAdam refuses
gradients that are not sparse, which the engine's are not."""
NO_OPTIMIZER_OF_PARAMETERS = {"LBFGS", "SparseAdam", "Optimizer"}


def ways(name: str) -> list[dict[str, bool]]:
    """Those of its implementations that there are on the CPU."""
    found: list[dict[str, bool]] = []
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        try:
            MAKERS[name]([nn.Parameter(torch.ones(2, 2))], **options)
        except (TypeError, RuntimeError, ValueError):
            continue
        if not (name.startswith("SGD,") and "fused" in options):  # torch's own takes parameters of one age only
            found.append(options)
    return found or [{}]


CASES = [(name, options) for name in MAKERS for options in ways(name)]


def test_every_optimizer_of_torch_is_looked_at() -> None:
    names = {name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert names - NO_OPTIMIZER_OF_PARAMETERS == {name for name in MAKERS if name[0].isupper() and "," not in name}


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

    def __init__(self, name: str, options: dict[str, bool], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module = Part().double()
        self.engine = PipelineEngine(self.module, num_microbatches=2, num_segments=2, loss_fn=F.mse_loss)
        self.optimizer = MAKERS[name](list(self.engine.parameters()), **options)
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

            def closure(x: Tensor = x, y: Tensor = y) -> None:
                self.engine.step(x, target=y)

            if isinstance(self.optimizer, WithClosure):
                self.optimizer.step(closure)
            else:
                closure()
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
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return [*a] == [*b] and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize(("name", "options"), slice_of(CASES, [(name, ways(name)[0]) for name in MAKERS]))
def test_saving_changes_nothing(name, options, tmp_path):
    run = Run(name, options)
    for step in range(STEPS):
        before = run.everything()
        state = run.state.state_dict()
        dcp.save({"train": run.state}, checkpoint_id=tmp_path / f"{step}")
        assert equal(before, run.everything()), step
        if step == 0 and name != "Adagrad":  # which has state as it is made
            assert not [key for key in state["optimizer"] if key.startswith("state.")]
        run.train(step, step + 1)
    plain = Run(name, options).train(0, STEPS)
    assert equal(run.trained(), plain.trained())


@pytest.mark.parametrize(
    ("name", "options", "saved_at"),  # JOINS: some parameters have state, others none
    slice_of(
        [(*case, saved_at) for case in CASES for saved_at in (JOINS, 0)],
        # Each optimizer's ways once: the first where some parameters have joined, the others in turn.
        [(name, way, (JOINS, 0)[i % 2]) for name in MAKERS for i, way in enumerate(ways(name))],
    ),
)
def test_a_run_goes_on_as_if_nothing_had_interrupted_it(name, options, saved_at, tmp_path):
    run = Run(name, options).train(0, saved_at)
    at_save = run.trained()
    dcp.save({"train": run.state}, checkpoint_id=tmp_path / "whole")
    dcp.save({**run.state.state_dict(), "step": torch.tensor(saved_at)}, checkpoint_id=tmp_path / "parts")
    snapshot, schedule = copy.deepcopy(run.state.state_dict()), copy.deepcopy(run.schedule.state_dict())
    truth = run.train(saved_at, STEPS).trained()

    def whole(state: PipelineState) -> None:
        dcp.load({"train": state}, checkpoint_id=tmp_path / "whole")

    def parts(state: PipelineState) -> None:
        wanted = {**state.state_dict(), "step": torch.tensor(0)}
        dcp.load(wanted, checkpoint_id=tmp_path / "parts")
        state.load_state_dict(wanted)

    loads = {"whole": whole, "parts": parts, "snapshot": lambda state: state.load_state_dict(snapshot)}
    for way, load in loads.items():
        # A new process; and the one that saved, after later steps.
        for other in (Run(name, options, seed=1), *([run] if way == "whole" else [])):
            load(other.state)
            other.schedule.load_state_dict(schedule)
            assert equal(other.trained(), at_save), way
            assert equal(other.train(saved_at, STEPS).trained(), truth), way


def test_a_state_that_nobody_asked_for_is_an_error_not_a_loss(tmp_path):
    run = Run("AdamW", {}).train(0, 1)
    dcp.save({"train": run.state}, checkpoint_id=tmp_path)
    other = Run("AdamW", {}, seed=1)
    wanted = {"train": other.state.state_dict()}  # a dict in a dict: DCP does not ask again
    dcp.load(wanted, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"was not asked for: give the PipelineState itself to DCP: dcp.load\({"):
        other.state.load_state_dict(wanted["train"])


class Application:
    """Whatever holds a script's state, as DCP's tutorial has it."""

    def __init__(self, *runs: Run) -> None:
        self.runs = runs

    def state_dict(self) -> dict[str, Any]:
        return {f"run{i}": run.state.state_dict() for i, run in enumerate(self.runs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, run in enumerate(self.runs):
            run.state.load_state_dict(state[f"run{i}"])


def test_a_state_inside_a_stateful_of_the_script_is_asked_for_in_whole(tmp_path):
    run = Run("AdamW", {}).train(0, 2)
    dcp.save({"app": Application(run)}, checkpoint_id=tmp_path)
    other = Run("AdamW", {}, seed=1)
    dcp.load({"app": Application(other)}, checkpoint_id=tmp_path)
    assert equal(other.trained(), run.trained())


def test_two_models_of_the_same_names_in_one_checkpoint_keep_their_own(tmp_path):
    runs = [Run("AdamW", {}, seed=seed).train(0, 1 + seed) for seed in (0, 1)]
    dcp.save({"a": runs[0].state, "b": runs[1].state}, checkpoint_id=tmp_path)
    others = [Run("AdamW", {}, seed=seed) for seed in (2, 3)]
    dcp.load({"a": others[0].state, "b": others[1].state}, checkpoint_id=tmp_path)
    assert all(equal(run.trained(), other.trained()) for run, other in zip(runs, others, strict=True))


def test_an_asynchronous_save_takes_the_state_of_its_moment(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        run = Run("odd", {}).train(0, 1)
        at_save = run.trained()
        future = dcp.async_save({"train": run.state}, checkpoint_id=tmp_path / "saved")
        future.result()
        run.train(1, 2)
        dcp.load({"train": run.state}, checkpoint_id=tmp_path / "saved")
        assert equal(run.trained(), at_save)
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_under_keys_that_a_checkpoint_cannot_hold_are_refused():
    run = Run("AdamW", {})
    run.optimizer.state[run.module.first.weight]["blocks"] = {0: torch.ones(2)}
    with pytest.raises(ValueError, match=r"keys that are no texts, in blocks of 'first.weight'"):
        run.state.state_dict()


def older_optimizer_state(run: Run) -> None:
    """State that an older PipelineState made for all that had none, by a step with rate and gradients 0."""
    for p in run.engine.parameters():
        if p.requires_grad and p not in run.optimizer.state:
            run.optimizer.state[p] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


@pytest.mark.parametrize("saved_at", [0, 2])
def test_a_checkpoint_of_an_older_form_is_loaded(saved_at, tmp_path):
    run = Run("AdamW", {}).train(0, saved_at)
    older_optimizer_state(run)
    state = run.state.state_dict()
    # Its format: "shapes" is the shapes alone, and the optimizer's entries are a plain dict.
    shapes = {name: list(value.shape) for name, value in run.module.state_dict().items()}
    assert state["model"].keys() == shapes.keys()
    old = {"model": state["model"], "optimizer": dict(state["optimizer"]), "shapes": json.dumps(shapes)}
    dcp.save({"train": old}, checkpoint_id=tmp_path)
    at_save = run.trained()
    other = Run("AdamW", {}, seed=1)
    dcp.load({"train": other.state}, checkpoint_id=tmp_path)
    assert equal(other.trained(), at_save)
    wanted = {"train": Run("AdamW", {}, seed=1).state.state_dict()}
    dcp.load(wanted, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="give the PipelineState itself to DCP"):
        other.state.load_state_dict(wanted["train"])
