"""Does verify agree with itself over ranks, orders and kinds of stages, and does it leave everything as it was?"""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from as_found import as_found
from mixers import HIDDEN, Mixer, Net, attention, pooling, told_by, torchs_attention
from mixers import batch as mixers_batch
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import Tensor, nn

import seq1f1b
from seq1f1b import PipelineEngine, SegmentWarning, verify_stage
from seq1f1b.engine import model_state
from seq1f1b.testing import run_ranks

CONFIG = Config()
LENGTH, M, K = 18, 3, 3


def engine_for(group: Any, stages: list[nn.Module], **options: Any) -> PipelineEngine:
    defaults = {"num_microbatches": M, "num_segments": K, "loss_fn": cross_entropy, "group": group}
    return PipelineEngine(stages if len(stages) > 1 else stages[0], **{**defaults, **options})


def engine_of(module: nn.Module, **options: Any) -> PipelineEngine:
    """One rank over a model of mixers."""
    return engine_for(seq1f1b.LoopbackGroup(1)[0], [module], num_microbatches=2, **options)


def verified(module: nn.Module, rows: int = 6, tokens: int = 40, **options: Any) -> Any:
    x, y = (t[:rows, :tokens] for t in mixers_batch())
    return engine_of(module, **options).verify(x, target=y, show=False)


def stepped(module: nn.Module, rows: int = 6, **options: Any) -> list[str]:
    """What one step tells by itself: warnings, or an error."""
    x, y = (t[:rows] for t in mixers_batch())
    try:
        return told_by(lambda: engine_of(module, **options).step(x, target=y))
    except ValueError as error:
        return [str(error)]


class Pair(nn.Module):
    """Returns two tensors, or takes them; one of its parameters is frozen, one gets no gradient."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.net, self.other = Net(Mixer(attention), first=first, last=False), nn.Linear(HIDDEN, HIDDEN)
        self.unused = nn.Parameter(torch.ones(2))
        self.net.mlp[0].weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: Tensor | None = None) -> Any:
        hidden = self.net(x)
        other = self.other(hidden if y is None else y)
        return (hidden, other) if self.first else hidden + other * scale


class TiedHead(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.tied_parameters = {"embedding": self.weight}

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight).flatten(0, 1), target.flatten())


def test_tuples_keywords_frozen_tied_and_a_loss_that_is_a_module():
    tokens, target = mixers_batch()
    torch.manual_seed(0)
    stages = [Pair(True), Pair(False)]
    stages[0].tied_parameters = {"embedding": stages[0].net.embedding.weight}
    head = TiedHead(stages[0].net.embedding.weight.detach())

    def run(group):
        rules = {"scale": "slice"}
        engine = engine_for(group, [stages[group.rank]], num_microbatches=2, loss_fn=head, arg_rules=rules)
        scale = torch.linspace(0.5, 2, 40)[None, :, None].expand(len(tokens), 40, 1)
        return engine.verify(tokens, target=target, kwargs={"scale": scale} if group.rank else None, show=False)

    result, other = run_ranks(2, run)
    assert result == other and result.ok, str(result)
    assert result.exact["stage 0: net.embedding.weight"] < 1e-12
    assert {"loss: weight", "stage 0: unused", "stage 1: other.weight"} <= result.parameters.keys()
    assert "stage 0: net.mlp.0.weight" not in result.parameters
    assert torch.equal(head.weight, stages[0].net.embedding.weight)


class Stateful(Net):
    """Has every kind of state that a run may change."""

    def __init__(self, draws: bool = True) -> None:
        super().__init__(Mixer(self.mix_and_count, normed=nn.BatchNorm1d(HIDDEN)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen: list[int] = []
        self.fails, self.draws = False, draws

    def mix_and_count(self, mixer: Any, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(x.shape[1])
        self.last = x
        if self.fails and len(self.seen) > 3:
            raise ValueError("in the middle")
        y = mixer.dropout(mixer.normed(x.transpose(1, 2)).transpose(1, 2))
        if self.draws:
            random.random()
            y = y + torch.randn(HIDDEN, dtype=x.dtype)
        return mixer.attend(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(dtype, fails):
    torch.manual_seed(0)
    module, hooked = Stateful().to(dtype), []
    tokens, target = mixers_batch()
    engine = engine_of(module)
    engine.step(tokens, target=target)
    module.head.weight.register_post_accumulate_grad_hook(lambda p: hooked.append(1))
    module.seen.clear()
    module.fails = fails
    error = pytest.raises(ValueError, match="in the middle") if fails else contextlib.nullcontext()
    with as_found("verify", module, is_put_back=True), error:
        assert not engine.verify(tokens, target=target, show=False).ok
    assert not hooked and not model_state._originals
    module.fails = False
    engine.step(tokens, target=target)  # and the engine goes on
    assert hooked


def test_a_refusal_is_heard_on_every_rank():
    def run(group):
        stage = stage_of(whole_model(CONFIG), CONFIG, group.rank, 2)
        engine = engine_for(group, [stage], sequence_parallel=(0, 2), num_microbatches=M)
        with pytest.raises(ValueError, match=r"rank 0: .*without sequence_parallel="):
            engine.verify(*batch(CONFIG, M, LENGTH)[:1], target=batch(CONFIG, M, LENGTH)[1])

    run_ranks(2, run)


class WithScalar(Net):
    """Returns logits and a mean over the tokens, which is no part of the sequence."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"logits": logits, "mean": logits.mean()}


@pytest.mark.parametrize("reads_it", [False, True])
def test_an_output_without_tokens_counts_by_what_comes_of_it(reads_it):
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output["logits"], target) + output["mean"].square() * reads_it

    result = verified(WithScalar(Mixer(attention)), loss_fn=loss_fn)
    assert result.ok != reads_it, str(result)
    if reads_it:
        assert result.causes[0].startswith("loss weighting")


@torch.compile(fullgraph=True, backend="aot_eager")
def compiled_gelu(x: Tensor) -> Tensor:
    return F.gelu(x) * torch.arange(x.shape[-1], dtype=x.dtype)


@pytest.mark.parametrize(
    ("what", "mixes"),
    [("module", [attention, torchs_attention]), ("method", [torchs_attention]), ("function", [attention])],
)
def test_compiled_code_runs_as_it_was_written(what, mixes):
    """In a verification and in a look."""
    for mix in mixes:
        module: Any = Net(Mixer(mix))
        if what == "module":
            module = torch.compile(module, backend="aot_eager")
        elif what == "method":
            module.mixer.forward = torch.compile(module.mixer.forward, backend="aot_eager")
        else:
            module.mlp[1] = Calls(compiled_gelu)
        result, told = verified(module), stepped(module)
        assert result.ok == (mix is attention) and result.exact, str(result)
        assert ["attention not in segments" in text for text in told] == [True] * (mix is torchs_attention)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = (function,)  # not an attribute that is seen to be compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](x)


# -- looks -------------------------------------------------------------------------------------------------------------


def test_attention_of_another_kind_is_an_error_on_every_rank_unless_any_is_taken():
    tokens, target = mixers_batch()

    def run(group, taken):
        torch.manual_seed(group.rank)
        first = group.rank == 0
        module = Net(Mixer(attention if first else torchs_attention), first=first, last=not first)
        engine = engine_for(group, [module], num_microbatches=2, attention=taken)
        for _ in range(2):  # a second try is no way around it
            text = ""
            try:
                engine.step(tokens, target=target)
            except (ValueError, seq1f1b.PipelineError) as error:
                text = str(error)
        return text

    for text in run_ranks(2, lambda group: run(group, "own")):
        assert "stage 1, mixer (Mixer)" in text and 'attention="any"' in text
    with pytest.warns(SegmentWarning, match="attention not in segments: stage 1, mixer"):
        assert run_ranks(2, lambda group: run(group, "any")) == ["", ""]


# -- one module --------------------------------------------------------------------------------------------------------


def test_one_module_in_one_process(capsys):
    torch.manual_seed(0)
    sample = torch.randn(3, 40, HIDDEN)
    right, wrong = Mixer(attention), Mixer(torchs_attention)
    for segments in (2, 4, [7, 13, 20]):
        result = verify_stage(right, sample, segments)
        assert result and result.ok and "input" in result.parameters, str(result)
        assert str(result) in capsys.readouterr().out
        result = verify_stage(wrong, sample, segments, show=False)
        assert not result and not result.ok and result.causes[0].startswith("attention not in segments")
    assert not sample.requires_grad and all(p.grad is None for p in right.parameters())
    assert not verify_stage(Mixer(pooling), sample, show=False)
    assert verify_stage(Net(right), torch.randint(29, (3, 40)), 4, show=False)
    for mixer in (right, wrong):  # (batch, features, tokens)
        assert verify_stage(Transposed(mixer), sample.mT, 3, seq_dim=2, show=False).ok == (mixer is right)


class Transposed(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x.transpose(1, 2)).transpose(1, 2).contiguous()


# -- two stages: numbers that are not finite, and other faults of one of them -----------------------------------------


def nothing(self: Any, y: Tensor) -> Tensor:
    return y


class Faulty(nn.Module):
    """One of two stages, with one fault, and attention as it should be or not."""

    def __init__(self, first: bool, fault: Any, mix: Any = attention) -> None:
        super().__init__()
        self.net = Net(Mixer(mix), first=first, last=not first)
        self.scale, self.fault = nn.Parameter(torch.ones(HIDDEN if first else 29)), fault

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(self, self.net(x))


def faulty(first: Any = nothing, last: Any = nothing, mix: Any = attention) -> list[nn.Module]:
    return [Faulty(True, first), Faulty(False, last, mix)]


def in_float32_alone(self: Any, y: Tensor) -> Tensor:
    if self.scale.dtype != torch.float32:
        raise TypeError("float32 only")
    return y


def not_in_float64(self: Any, y: Tensor) -> Tensor:
    return y * (math.nan if self.scale.dtype == torch.float64 else 1.0)


def not_in_segments(self: Any, y: Tensor) -> Tensor:
    return y * (math.nan if y.shape[1] < 40 and seq1f1b.token_offset() else 1.0)


def half_masked() -> Tensor:
    target = mixers_batch()[1].clamp(max=26)
    target[: len(target) // 2] = -100
    return target


def plus(value: float, every: bool) -> Any:
    """A loss that is not finite, whose gradients are, and right."""

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target) + (value if every or bool((target == 7).sum() % 2) else 0.0)

    return loss_fn


NAN, WIDE = "not finite: ", "The whole model is not finite in torch.float64: "
OWN_NOTE = WIDE + r"stage 1, itself \(Faulty\) returns nan\.$"
# For tests/faults/verdicts.py: the stages; what else is given; the cause, "" if all is right; a note
FAULTS: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "a wrong stage": (lambda: faulty(mix=torchs_attention), {}, "attention not in segments: stage 1, net.mixer", ""),
    "one dtype": (lambda: faulty(last=in_float32_alone), {}, "", r".*\[1\]F0\.0: .*float32 only"),
    "nan": (lambda: faulty(lambda self, y: y * math.nan), {}, NAN + r"stage 0, itself \(Faulty\) returns nan", WIDE),
    "inf": (lambda: faulty(last=lambda self, y: y * math.inf), {}, NAN + r"stage 1, itself \(Faulty\)", WIDE),
    "one element": (
        lambda: faulty(lambda self, y: y.index_fill(1, torch.tensor(2), math.inf)), {}, NAN + "stage 0, itself", WIDE,
    ),
    "a parameter": (
        lambda: faulty(last=lambda self, y: y * self.scale.data.fill_(math.nan)), {}, NAN + "stage 1, itself", WIDE,
    ),
    "a gradient": (
        lambda: faulty(last=lambda self, y: y + (self.scale * 0).sqrt() * 0), {},
        NAN + "the gradient of stage 1: scale is nan", WIDE,
    ),
    "a gradient of the first stage": (
        lambda: faulty(lambda self, y: y + (self.scale - self.scale.detach()).sqrt()), {},
        NAN + "the gradient of stage 0: scale is (nan|inf)", WIDE,
    ),
    "an element of a gradient": (
        lambda: faulty(last=lambda self, y: y + F.pad(self.scale[:1] * 0, (0, 28)).sqrt() * 0), {},
        NAN + "the gradient of stage 1: scale is nan", WIDE,
    ),
    "log of zero": (
        lambda: faulty(last=lambda self, y: y + (y * 0).abs().log()), {}, NAN + "(stage 1|the loss|the gradient)", WIDE,
    ),
    "every loss": (faulty, {"loss_fn": plus(math.nan, True)}, NAN + "the loss of micro-batch . is", WIDE),
    "one loss": (faulty, {"loss_fn": plus(-math.inf, False)}, NAN + "the loss of micro-batch . is", WIDE),
    "in float64 alone": (lambda: faulty(last=not_in_float64), {}, "", OWN_NOTE),
    "in float64 alone, and wrong": (lambda: faulty(last=not_in_float64, mix=pooling), {}, "later tokens", OWN_NOTE),
    "in float16 alone": (
        lambda: [stage.half() for stage in faulty(last=lambda self, y: y + self.scale * 300 * 300 * 0)], {},
        NAN + r"stage 1, itself \(Faulty\) returns", "",
    ),
    "seen by no gradient": (  # words that do not exist
        lambda: faulty(last=lambda self, y: y.masked_fill(torch.arange(29) > 26, -math.inf)),
        {"target": half_masked()}, "", "",
    ),
    "in segments alone": (lambda: faulty(not_in_segments), {}, "state across tokens", ""),
}  # fmt: skip
