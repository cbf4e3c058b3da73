"""Does every mistake end in an error that names the rule and the values, and does the next correct step work?

One table per moment at which a mistake can be seen: when the engine is made, before a step runs anything, at a unit
before its output is sent, and when ranks disagree.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seq1f1b
from seq1f1b import (
    LoopbackGroup,
    Loss,
    Memory,
    PipelineEngine,
    PipelineError,
    Schedule,
    build_schedule,
)
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=2)
M, K, LENGTH = 2, 2, 8
MODEL = whole_model(CONFIG)
TOKENS, TARGET = batch(CONFIG, M, LENGTH)
LOSSES, TRUTH = run_whole(MODEL, TOKENS, TARGET, M)


class Counted(nn.Module):
    """A stage of the model that counts its forwards and, while it has a fault, does that instead."""

    def __init__(self, index: int = 0, num_stages: int = 1, fault: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.stage = stage_of(MODEL, CONFIG, index, num_stages)
        self.fault, self.calls = fault, 0

    def forward(self, x: Tensor, **ignored: Any) -> Any:
        self.calls += 1
        return self.stage(x) if self.fault is None else self.fault(self.stage, x, self.calls - 1)


def make_engine(stage: Any = None, **options: Any) -> PipelineEngine:
    settings = {"num_microbatches": M, "num_segments": K, "loss_fn": cross_entropy}
    return PipelineEngine(Counted() if stage is None else stage, **(settings | options))


def good_step(engine: PipelineEngine) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A correct step after a failed one: losses, and gradients from zero."""
    for parameter in engine.parameters():
        parameter.grad = None
    losses = engine.step(TOKENS, target=TARGET)
    return losses, {n.removeprefix("stage."): p.grad for n, p in engine.named_parameters() if p.grad is not None}


def check_good(results: list[tuple[list[Tensor], dict[str, Tensor]]]) -> None:
    assert all(abs(float(a) - float(b)) < 1e-12 for a, b in zip(results[-1][0], LOSSES, strict=True))
    assert gradient_error({name: g for _, own in results for name, g in own.items()}, TRUTH) <= 1e-10


def check_error(error: Any, words: str) -> None:
    """A row of a table has words for an error: its type, and what its text holds."""
    kind, _, text = words.partition(": ")
    assert type(error).__name__ == kind and re.search(text, str(error)), f"{type(error).__name__}: {error}"


# -- when the engine is made -------------------------------------------------------------------------------------------


def orders(name: str, num_ranks: int, num_segments: int) -> Schedule:
    return build_schedule(name, num_ranks=num_ranks, num_microbatches=M, num_segments=num_segments)


MAKING: list[tuple[dict[str, Any], str]] = [
    ({"num_microbatches": 0}, "ValueError: num_microbatches is 0, must be at least 1"),
    ({"num_segments": 2.0}, "TypeError: num_segments must be an int, got float"),
    ({"seq_dim": 0}, "ValueError: seq_dim is 0, must be at least 1"),
    ({"limits": 300.0}, "TypeError: limits must be a seq1f1b.Limits, got float"),
    ({"segment_sizes": [3, 3, 2]}, "ValueError: segment_sizes has 3 entries, num_segments is 2"),
    ({"segment_sizes": [8, 0]}, r"ValueError: segment_sizes\[1\] is 0, must be at least 1"),
    ({"segment_sizes": [4, 4.5]}, r"TypeError: segment_sizes\[1\] must be an int, got float"),
    ({"segment_sizes": 4}, "TypeError: segment_sizes must be None, a ModelShape or a list"),
    ({"segment_sizes": {8: None}}, r"TypeError: segment_sizes\[8\] must be a list, got None"),
    ({"segment_sizes": "flops"}, "ValueError: segment_sizes is 'flops'; it must be None, a ModelShape"),
    ({"segment_sizes": "balanced"}, r"ValueError: give segment_sizes=ModelShape\(...\)"),
    ({"loss_fn": 3.0}, "TypeError: loss_fn must be callable, got float"),
    ({"grad_dtype": torch.int32}, "TypeError: grad_dtype is torch.int32, must be a floating"),
    ({"transport": "mpi"}, "ValueError: transport is 'mpi', must be one of 'auto', 'shm', 'c10d'"),
    ({"group": LoopbackGroup(2)}, r"TypeError: LoopbackGroup\(P\)\[rank\]"),
    ({"group": "gloo"}, "TypeError: group= takes a ProcessGroup, .* got str"),
    ({"stage": 5}, "TypeError: stage must be a module or a list of modules, got int"),
    (
        {"stage": nn.Linear(2, 2, device="meta")},
        "ValueError: parameters lie on meta: the engine runs on the CPU and on CUDA devices",
    ),
    (
        {"stage": [nn.Identity(), nn.Identity()], "schedule": orders("seq1f1b", 1, K)},
        r"ValueError: rank 0 holds stages \[0\] in this schedule, 2 modules were given",
    ),
    ({"stage": [], "schedule": orders("seq1f1b", 1, K)}, "ValueError: 0 modules were given"),
    (
        {"schedule": orders("seq1f1b", 3, K)},
        r"ValueError: the schedule is for .* = \(3, 2, 2\), the engine has \(1, 2, 2\)",
    ),
    ({"schedule": orders("1f1b", 1, 4)}, r"ValueError: \(1, 2, 4\), .*\(1, 2, 2\)"),
    ({"schedule": "zigzag"}, "ValueError: zigzag.*1f1b"),
    ({"schedule": 3}, "TypeError: schedule must be a name, a seq1f1b.Schedule, a plan .* got int"),
    ({"arg_rules": {"mask": "cut"}}, r"ValueError: arg_rules\['mask'\] is 'cut'; it must be 'slice'"),
    ({"lossfn": 2}, "TypeError: unexpected keyword argument 'lossfn'"),
    ({"arg_rules": ["mask"]}, "TypeError: arg_rules must be a dict of rules by name, got list"),
]


@pytest.mark.parametrize(("options", "words"), MAKING)
def test_making_an_engine(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception) as caught:
        make_engine(**options)
    check_error(caught.value, words)


# -- before a step runs anything ---------------------------------------------------------------------------------------

MASK = torch.ones(2 * M, LENGTH)


def sliced(length: int) -> dict[str, Any]:
    return {"arg_rules": {"mask": "slice"}, "kwargs": {"mask": torch.ones(2 * M, length)}}


# options of the engine and arguments of the step, together
BEFORE: list[tuple[dict[str, Any], str]] = [
    ({"inputs": None}, "ValueError: inputs are needed on the rank of the first stage"),
    ({"inputs": "text"}, "TypeError: inputs must begin with a tensor, got str"),
    ({"inputs": {"x": TOKENS}}, "TypeError: inputs must begin with a tensor, got dict"),
    ({"inputs": TOKENS[:, 0]}, r"ValueError: shape \(4,\) have no sequence dimension 1"),
    ({"inputs": TOKENS[:3]}, "ValueError: inputs has batch size 3, which 2 micro-batches do not divide"),
    ({"inputs": TOKENS[:0]}, r"ValueError: inputs of shape \(0, 8\) hold no token"),
    ({"inputs": TOKENS[:, :0]}, r"ValueError: inputs of shape \(4, 0\) hold no token"),
    ({"inputs": list(TOKENS.chunk(4))}, "ValueError: inputs is a list of 4 micro-batches, the engine runs 2"),
    (
        {"inputs": [TOKENS[:2], TOKENS[2:, :7]]},
        r"ValueError: inputs of micro-batch 1 of shape \(2, 7\) has no dimension 1 of 8 tokens",
    ),
    (
        {"inputs": (TOKENS, TOKENS[:, :5])},
        r"ValueError: inputs of micro-batch 0 of shape \(2, 5\) has no dimension 1 of 8 tokens",
    ),
    (
        {"inputs": TOKENS[:, :1], "target": TARGET[:, :1]},
        "ValueError: a sequence of 1 tokens has fewer than num_segments = 2",
    ),
    ({"segment_sizes": [4, 3]}, "ValueError: segment_sizes sum to 7 tokens, the sequence has 8"),
    ({"target": None}, "ValueError: ^target missing on rank 0, which holds the last stage"),
    ({"loss_fn": None}, "ValueError: ^loss_fn of the engine missing on rank 0, which holds the last stage"),
    ({"loss_fn": None, "target": None}, "ValueError: ^loss_fn of the engine and target missing on rank 0"),
    (
        {"target": TARGET[:, :6]},
        r"ValueError: target of micro-batch 0 of shape \(2, 6\) has no dimension 1 of 8 tokens",
    ),
    ({"target": TARGET[:, 0]}, r"ValueError: target of micro-batch 0 of shape \(2,\) has no dimension 1 of 8 tokens"),
    ({"target": [TARGET]}, "ValueError: target is a list of 1 micro-batches, the engine runs 2"),
    (
        {"target": {"labels": "of many"}},
        r"TypeError: target is a dict: give the engine loss=Loss\(weight=...\), a callable that counts",
    ),
    (
        {"loss": Loss(weight=lambda target: -1.0)},
        "ValueError: Loss.weight of micro-batch 0, segment 0 is -1.0, must be at least 0",
    ),
    ({"count": 0}, "ValueError: loss_weight is 0, must be above 0"),
    ({"count": "12"}, "TypeError: loss_weight must be a number, got str"),
    (
        {"kwargs": {"mask": MASK}},
        r"ValueError: keyword argument 'mask' is a tensor of shape \(4, 8\) without a rule: say arg_rules=",
    ),
    (sliced(5), r"ValueError: kwargs\['mask'\] of shape \(2, 5\) has no dimension 1 of 8 tokens"),
    (
        sliced(8) | {"kwargs": {"mask": MASK[:3]}},
        r"ValueError: kwargs\['mask'\] has batch size 3, which 2 micro-batches do not divide",
    ),
    ({"kwargs": [{"scale": 1.0}]}, "ValueError: kwargs is a list of 1 micro-batches, the engine runs 2"),
    ({"kwargs": (MASK,)}, "TypeError: kwargs must be a dict, .* got tuple"),
    ({"grad": False}, "RuntimeError: step needs gradients; use eval, or leave torch.no_grad"),
]


@pytest.mark.parametrize(("changes", "words"), BEFORE)
def test_before_a_step(changes: dict[str, Any], words: str) -> None:
    """The module has not run, and the next correct step of the same engine is right where its options are."""
    call = {key: changes[key] for key in ("inputs", "target", "kwargs") if key in changes}
    options = {k: v for k, v in changes.items() if k not in ("inputs", "target", "kwargs", "count", "grad")}
    stage = Counted()
    engine = make_engine(stage, **options)
    arguments = {"inputs": TOKENS, "target": TARGET, "loss_weight": changes.get("count")} | call
    with torch.set_grad_enabled(changes.get("grad", True)), pytest.raises(Exception) as caught:
        engine.step(**arguments)
    check_error(caught.value, words)
    assert not str(caught.value).startswith("["), "no unit has to do with it"
    assert stage.calls == 0
    if not options:
        check_good([good_step(engine)])


def test_a_mistake_before_a_later_step_names_no_unit_of_an_earlier_one() -> None:
    engine = make_engine()
    good_step(engine)
    with pytest.raises(ValueError, match=r"^inputs are needed"):
        engine.step(target=TARGET)
    check_good([good_step(engine)])


def test_a_closed_engine() -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.step(TOKENS, target=TARGET)


BOUND: dict[str, Callable[[PipelineEngine], object]] = {
    "engine": lambda engine: engine,
    "group": lambda engine: engine._group,
    "pipeline": lambda engine: engine._pipeline,
    "runner": lambda engine: engine._runner,
    "record of a step": lambda engine: [engine._runner.last_step],
    "ranks that are threads": lambda _: seq1f1b.LoopbackGroup(2),
}


@pytest.mark.parametrize("name", BOUND)
def test_what_is_bound_to_its_process_says_what_to_copy(name: str) -> None:
    engine = make_engine()
    good_step(engine)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"neither copied nor pickled: copy engine\.stages or their state_dict"):
            make(BOUND[name](engine))
    for result in (engine.report(), engine.report(gather=True), engine.edges, engine.schedule):
        assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result


@pytest.mark.parametrize("again", ["step", "eval"])
def test_a_step_inside_a_step(again: str) -> None:
    stage = Counted()
    engine = make_engine(stage)
    stage.fault = lambda inner, x, call: getattr(engine, again)(TOKENS, target=TARGET)
    with pytest.raises(RuntimeError, match=r"\[0\]F0.0: the engine is inside a step already"):
        engine.step(TOKENS, target=TARGET)
    stage.fault = None
    check_good([good_step(engine)])


# -- at a unit, before its output is sent ------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor | None = None, v: Tensor | None = None, layer: Any = 1000, **options: Any) -> Tensor:
    k = q if k is None else k
    return seq1f1b.causal_attention(q, k, k if v is None else v, layer=layer, **options)


def heads(x: Tensor, num_heads: int = 2, head_dim: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(x.size(0), num_heads, x.size(1), head_dim, dtype=dtype)


def in_unit(call: int, do: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor, int], Any]:
    """``do`` in the stage's forward number ``call``, what is right in the others."""
    return lambda stage, x, found: do(stage, x) if found == call else stage(x)


def left_without_gradients(stage: Any, x: Tensor) -> Tensor:
    y = stage(x)

    def inner(y: Tensor) -> Tensor:
        seq1f1b.carry_out(0, y[:, -1])
        return y * 2

    return checkpoint(inner, y, use_reentrant=True)


def left_twice(stage: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        seq1f1b.carry_out(0, torch.zeros(1))
    return stage(x)


def twice(stage: Any, x: Tensor) -> Tensor:
    return attend(attend(heads(x)))


def like_dtensor(stage: Any, x: Tensor) -> Tensor:
    class Distributed(torch.Tensor):
        def to_local(self) -> Tensor:
            return self.as_subclass(torch.Tensor)

    return stage(x).as_subclass(Distributed)


class Refused(Exception):
    pass


def refuse(stage: Any, x: Tensor) -> Any:
    raise Refused("not today")


SAME_LENGTH = "for a segment of 4 tokens, and .* for another of the same length in this step"

# of the first of two stages: F0.0 is its forward 0, F0.1 its forward 1
AT_UNIT: list[tuple[Callable[..., Any], str]] = [
    (
        in_unit(1, lambda stage, x: None),
        r"TypeError: ^\[0\]F0.1: a stage must return a tensor or a tuple of tensors, stage 0 returned NoneType",
    ),
    (in_unit(0, lambda stage, x: (stage(x), 3)), "TypeError: returned int"),
    (in_unit(0, like_dtensor), r"TypeError: returned a DTensor; return its to_local\(\)"),
    (
        in_unit(1, lambda stage, x: stage(x).to("meta")),
        r"ValueError: ^\[0\]F0.1: stage 0 returned a torch.strided tensor on meta",
    ),
    (
        in_unit(0, lambda stage, x: stage(x).detach().to_sparse()),
        r"ValueError: ^\[0\]F0.0: stage 0 returned a torch.sparse_coo tensor on cpu; its outputs must be strided",
    ),
    (
        in_unit(1, lambda stage, x: stage(x)[:, :3]),
        r"ValueError: ^\[0\]F0.1: stage 0 returned \(2, 3, 8\) torch.float64 " + SAME_LENGTH,
    ),
    (
        in_unit(1, lambda stage, x: stage(x)[..., :7]),
        r"ValueError: ^\[0\]F0.1: stage 0 returned \(2, 4, 7\) torch.float64 " + SAME_LENGTH,
    ),
    (
        in_unit(1, lambda stage, x: stage(x).float()),
        r"ValueError: ^\[0\]F0.1: stage 0 returned \(2, 4, 8\) torch.float32 " + SAME_LENGTH,
    ),
    (
        in_unit(2, lambda stage, x: (stage(x), x)),
        r"ValueError: ^\[0\]F1.0: stage 0 returned .* torch.int64 " + SAME_LENGTH,
    ),
    (
        in_unit(0, lambda stage, x: stage(x).detach().to(torch.float8_e4m3fn)),
        r"TypeError: ^\[0\]F0.0: a stage cannot hand over a tensor of dtype torch.float8_e4m3fn",
    ),
    (
        in_unit(0, lambda stage, x: (stage(x),) * 17),
        r"ValueError: ^\[0\]F0.0: a stage hands over at most 16 tensors, got 17",
    ),
    (in_unit(1, refuse), "Refused: ^not today$"),
    (
        lambda stage, x, call: stage(x) + attend(heads(x, dtype=(torch.float64, torch.float32)[call])).sum(),
        r"ValueError: ^\[0\]F0.1: layer 1000 changed within a step: .* float32.* its first use had .* float64",
    ),
    (
        in_unit(0, twice),
        r"RuntimeError: ^\[0\]F0.0: layer 1000 is used twice in one forward, .* give each use its own layer_handle",
    ),
    (
        in_unit(1, lambda stage, x: seq1f1b.carry_in(7, stage(x))),
        r"RuntimeError: ^\[0\]F0.1: .*segment 1 reads carried state 7, which segment 0 did not leave",
    ),
    (in_unit(0, left_twice), r"ValueError: ^\[0\]F0.0: carried state 0 is left twice"),
    (
        in_unit(0, left_without_gradients),
        r"RuntimeError: ^\[0\]F0.0: carry_out with gradients off .* use_reentrant=False",
    ),
    (
        in_unit(1, lambda stage, x: seq1f1b.add_loss(stage(x))),
        r"ValueError: ^\[0\]F0.1: add_loss needs a tensor of one element, got shape \(2, 4, \d+\)",
    ),
    (
        in_unit(0, lambda stage, x: seq1f1b.add_loss(stage(x).sum(), of="tokens")),
        r"ValueError: ^\[0\]F0.0: of is 'tokens', must be \"segment\" or \"sequence\"",
    ),
]


def step(engine: PipelineEngine, **changes: Any) -> Any:
    return engine.step(**({"inputs": TOKENS, "target": TARGET} | changes))


def run_two(
    faults: tuple[Any, Any] = (None, None), calls: tuple[Any, Any] = (step, step)
) -> tuple[list[Exception | None], list[int]]:
    """Two ranks make a failing call, then a correct step. Errors and forwards of the failing call."""

    def run(group: Any) -> Any:
        stage = Counted(group.rank, 2, faults[group.rank])
        engine = make_engine(stage, group=group)
        failed: Exception | None = None
        try:
            calls[group.rank](engine)
        except Exception as error:
            failed = error
        stage.fault, count = None, stage.calls
        return failed, count, good_step(engine)

    results = run_ranks(2, run)
    check_good([r[2] for r in results])
    return [r[0] for r in results], [r[1] for r in results]


@pytest.mark.parametrize(("fault", "words"), AT_UNIT)
def test_at_a_unit(fault: Callable[..., Any], words: str) -> None:
    """The rank gets the error itself, the other one a PipelineError with rank and cause; what was wrong is not sent."""
    (own, other), calls = run_two((fault, None))
    check_error(own, words)
    assert type(other) is PipelineError and other.rank == 0
    unit = f"[0]F{(calls[0] - 1) // K}.{(calls[0] - 1) % K}"
    assert str(other) == f"rank 0 ended the step: {unit}: {type(own).__name__}: {str(own).removeprefix(f'{unit}: ')}"
    assert calls[1] < calls[0], "the next stage ran on an output that was wrong"


# -- ranks that disagree -----------------------------------------------------------------------------------------------


# what each rank does first, and the rank that sees it: error and text
DISAGREE: list[tuple[tuple[Any, Any], int, str]] = [
    (
        (lambda e: e.eval(TOKENS, target=TARGET), step),
        1,
        r"RuntimeError: F\d.\d of step 1 \(eval\), .*: do all ranks run the same schedule",
    ),
    (
        (step, lambda e: e.eval(TOKENS, target=TARGET)),
        1,
        r"RuntimeError: received F0.0 of step 1 \(train\), .* but the program expects F0.0 of step 1 \(eval\)",
    ),
    ((step, torch.no_grad()(step)), 1, "RuntimeError: ^step needs gradients; use eval"),
    (
        (step, lambda e: step(e, target=TARGET[:, :7])),
        1,
        r"ValueError: target of micro-batch 0 of shape \(2, 7\) has no dimension 1 of 8 tokens",
    ),
    ((lambda e: step(e, inputs=None), step), 0, "ValueError: ^inputs are needed on the rank of the first stage"),
]


@pytest.mark.parametrize(("first", "rank", "words"), DISAGREE)
def test_ranks_that_disagree(first: tuple[Any, Any], rank: int, words: str) -> None:
    errors, calls = run_two(calls=first)
    check_error(errors[rank], words)
    other = errors[1 - rank]
    assert type(other) is PipelineError and other.rank == rank and f"rank {rank} ended the step: " in str(other)
    assert calls[rank] == 0, "the rank ran a unit of a step that could not be right"


# -- a stage that changes its input in place ---------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda x: x.mul_(2.0), lambda x: x.view(-1).clamp_(-1, 1).view_as(x)])
@pytest.mark.parametrize(("recompute", "remedy"), [("none", r"work on a copy: x = x \* 2"), ("all", "work on a copy")])
def test_a_stage_that_changes_its_input_in_place_is_told_to_copy_it(change, recompute, remedy):
    class Changing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(change(x))

    stages, x = [nn.Linear(4, 4), Changing(4, 4)], torch.randn(2, 8, 4)

    def run(group: Any) -> None:
        options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "memory": Memory(recompute=recompute)}
        make_engine(stages[group.rank], group=group, **options).step(x, target=x)

    with pytest.raises((RuntimeError, PipelineError), match=rf"\[1\]F0.0: .*{remedy}"):
        run_ranks(2, run)
