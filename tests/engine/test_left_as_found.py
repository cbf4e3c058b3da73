"""Does an engine leave modules, parameters and the process as it found them, whatever it runs and however it ends?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from as_found import as_found, thread_names
from replicas import take_head
from tiny_model import Config, batch, cross_entropy, whole_model
from torch import Tensor, nn

import seq1f1b
from seq1f1b import Memory, PipelineEngine, PipelineError, build_schedule

CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=2)
TOKENS, TARGET = batch(CONFIG, 2, 8)


class Model(nn.Module):
    """A decoder with buffers, attributes, hooks, a frozen parameter and an unused one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = whole_model(CONFIG, dtype)
        self.register_buffer("scale", torch.ones((), dtype=dtype))
        self.register_buffer("counter", torch.zeros(3), persistent=False)
        self.frozen = nn.Parameter(torch.ones((), dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))
        self.note, self.notes, self.cache = "a text", [1, 2], torch.ones(2)
        self.fails = ""
        self.body.blocks["0"].up.register_forward_hook(lambda module, args, output: None)
        self.body.blocks["1"].down.register_full_backward_hook(lambda module, given, made: None)
        self.body.blocks["0"].q.weight.register_hook(lambda gradient: None)
        self.body.blocks["1"].q.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    @property
    def blocks(self) -> nn.ModuleDict:
        return self.body.blocks

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "F" and torch.is_grad_enabled():
            raise ArithmeticError("broken on purpose")
        output = self.body(x) * self.scale * self.frozen
        if self.fails == "B" and output.requires_grad:
            output.register_hook(lambda gradient: 1 / 0)
        return output


def run_all(model: Model, make: Callable[[], PipelineEngine], others: tuple[nn.Module, ...] = ()) -> None:
    """Everything that an engine does, good and bad, each of which must leave all as it was."""
    modules = (model, *others)
    with as_found("made", *modules):
        engine = make()
    for what in ("first step", "second step", "another length"):
        tokens, target = (TOKENS, TARGET) if what != "another length" else (TOKENS[:, :6], TARGET[:, :6])
        with as_found(what, *modules):
            engine.step(tokens, target=target)
        gradients = [p.grad for p in model.parameters()]
        assert all(g is None or g.dtype == p.dtype for g, p in zip(gradients, model.parameters(), strict=True))
        assert model.unused.grad is None and model.frozen.grad is None
    with as_found("eval", *modules):
        engine.eval(TOKENS, target=TARGET, return_outputs=True)
    for fault, error in (("F", ArithmeticError), ("B", ZeroDivisionError)):
        model.fails = fault
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with as_found(f"error in {fault}", *modules), pytest.raises((error, PipelineError)):
            engine.step(TOKENS, target=TARGET)
        model.fails = ""
        if before[0] is not None and before[0].dtype == torch.bfloat16:  # those that a step makes apart
            assert all(a is p.grad or torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    with as_found("an argument that is wrong", *modules), pytest.raises(ValueError, match="batch size"):
        engine.step(TOKENS[:3], target=TARGET[:3])
    with as_found("step after errors", *modules):
        engine.step(TOKENS, target=TARGET)
    with as_found("report", *modules):
        engine.report(gather=True).advice  # noqa: B018
    with as_found("closed", *modules):
        engine.close()
    assert thread_names("seq1f1b offload") == []  # an engine with a file has one of them, until it is closed


def engine_of(model: nn.Module, **options: Any) -> PipelineEngine:
    return PipelineEngine(model, num_microbatches=2, num_segments=2, **({"loss_fn": cross_entropy} | options))


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "split": {"schedule": "seq-zb-h1"},
    "fill": {"schedule": partial(build_schedule, "seq1f1b", weights="fill")},
    "recompute": {"memory": Memory(recompute="all")},
    "blocks": {"memory": Memory(blocks=("blocks", 0.5))},
    "own dtype": {"grad_dtype": None},
    "any attention": {"attention": "any"},
    "offload": {"memory": Memory(offload="set to a folder of the test", units="all")},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_engine_leaves_all_as_it_was(options, dtype, tmp_path):
    model = Model(dtype)
    if (memory := options.get("memory", Memory())).offload is not None:
        options = {"memory": replace(memory, offload=tmp_path)}
    run_all(model, lambda: engine_of(model, **options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["head", "vocabulary"])
def test_a_head_in_the_loss_is_left_as_it_was(kind, dtype):
    model = Model(dtype)
    head: nn.Module = take_head(model.body)
    if kind == "vocabulary":
        head = seq1f1b.VocabularyParallelHead(8, 11, rank=0, num_ranks=1, dtype=dtype)
    run_all(model, lambda: engine_of(model, loss_fn=head), (head,))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_segments": 0}, ValueError),
        ({"schedule": "no-such-order"}, ValueError),
        ({"memory": Memory(blocks=("nothing", 0.5))}, (ValueError, AttributeError)),
        ({"memory": Memory(offload="/no/such/folder")}, (ValueError, OSError)),
        ({"transport": "carrier pigeon"}, ValueError),
    ],
)
def test_a_constructor_that_fails_leaves_all_as_it_was(options, error):
    model = Model(torch.bfloat16)
    with as_found("not made", model), pytest.raises(error):
        PipelineEngine(model, **({"num_microbatches": 2, "loss_fn": cross_entropy} | options))


# -- dtypes ------------------------------------------------------------------------------------------------------------


def use(engine: PipelineEngine, how: str) -> None:
    (partial(engine.verify, show=False) if how == "verify" else engine.step)(TOKENS, target=TARGET)


@pytest.mark.parametrize("how", ["step", "verify", "error", "two steps"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", [torch.float32, torch.float64])
def test_gradients_follow_the_parameters_dtype_afterwards(how, dtype, to):
    model = Model(dtype)
    engine = engine_of(model)
    model.fails = "B" if how == "error" else ""
    with contextlib.nullcontext() if how != "error" else pytest.raises(ZeroDivisionError):
        use(engine, how)
    if how == "two steps":
        use(engine, how)
    model.fails = ""
    model.zero_grad()
    model.to(to)
    cross_entropy(model(TOKENS), TARGET).backward()
    assert all(p.grad is None or p.grad.dtype == to for p in model.parameters())
    torch.optim.AdamW(model.parameters()).step()
    model.zero_grad()
    engine.step(TOKENS, target=TARGET)
    assert all(p.grad is None or p.grad.dtype == to for p in model.parameters())


@pytest.mark.parametrize("how", ["step", "verify"])
@pytest.mark.parametrize("chosen", [torch.float32, None])
def test_a_grad_dtype_that_somebody_chose_stays(how, chosen):
    model = Model(torch.bfloat16)
    weight = model.blocks["0"].q.weight
    weight.grad_dtype = chosen
    engine = engine_of(model)
    use(engine, how)
    assert weight.grad_dtype == chosen and model.blocks["1"].q.weight.grad_dtype == torch.bfloat16
    use(engine, "step")
    assert weight.grad.dtype == (chosen or torch.bfloat16)


def test_a_gradient_that_is_there_stays_the_same_tensor():
    """A view of a flat buffer, as optimizers keep them: the step adds to it."""
    model = nn.Linear(4, 4).bfloat16()
    flat = torch.zeros(20, dtype=torch.bfloat16)
    model.weight.grad, model.bias.grad = flat[:16].view(4, 4), flat[16:]
    x = torch.randn(2, 6, 4).bfloat16()
    engine = PipelineEngine(model, num_microbatches=2, num_segments=3, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        engine.step(x, target=x)
    once = flat.clone()
    model.zero_grad()
    for _ in range(2):
        engine.step(x, target=x)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), once)
    assert once.any()


def test_only_the_first_step_of_a_shape_counts_what_graphs_save():
    """The hooks that count cost time in every product, so later steps run without them."""
    hooked = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: hooked.append(torch._C._autograd._top_saved_tensors_default_hooks(True)))
    engine = PipelineEngine(model, num_microbatches=1, loss_fn=nn.functional.mse_loss)
    for length in (6, 6, 3, 3):
        x = torch.randn(1, length, 4)
        engine.step(x, target=x)
    assert [bool(each) for each in hooked] == [True, False, True, False]
