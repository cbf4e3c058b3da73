"""Does verify agree with itself over ranks, orders and kinds of stages, and does it leave everything as it was?"""

from __future__ import annotations

import math
import random
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixers import HIDDEN, Case, Mixer, Net, attention, pooling, torchs_attention
from mixers import batch as mixers_batch
from processes import run_processes
from slices import each_value, full_only
from tiny_model import Config, batch, cross_entropy, run_whole, stage_of, whole_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack

import seq1f1b
from seq1f1b import PipelineEngine, SegmentWarning, verify_stage
from seq1f1b.runtime import model_state
from seq1f1b.testing import run_ranks

CONFIG = Config()
LENGTH, M, K = 18, 3, 3


def engine_for(group: Any, stages: list[nn.Module], **options: Any) -> PipelineEngine:
    defaults = {"num_microbatches": M, "num_segments": K, "loss_fn": cross_entropy, "group": group}
    return PipelineEngine(stages if len(stages) > 1 else stages[0], **{**defaults, **options})


def over_ranks(
    P: int, schedule: str = "seq1f1b", per_rank: int = 1, dtype: torch.dtype = torch.float32, **options: Any
):
    """verify of the tests' decoder over P ranks that are threads; each rank's result."""
    tokens, target = batch(CONFIG, M, LENGTH)
    model = whole_model(CONFIG, dtype)
    order = seq1f1b.build_schedule(schedule, num_ranks=P, num_microbatches=M, num_segments=K, stages_per_rank=per_rank)

    def run(group):
        own = [stage for stage, rank in enumerate(order.rank_of_stage) if rank == group.rank]
        stages = [stage_of(model, CONFIG, stage, order.num_stages) for stage in own]
        return engine_for(group, stages, schedule=order, **options).verify(tokens, target=target, show=False)

    return run_ranks(P, run)


ORDERS = [
    (1, "seq1f1b", 1), (2, "seq1f1b", 1), (3, "seq1f1b", 1), (4, "seq1f1b", 1), (2, "seq1f1b-interleaved", 2),
    (2, "seq-zb-h1", 1), (2, "seq-zbv", 2), (4, "gpipe", 1), (1, "seq1f1b-interleaved", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "P", "schedule", "per_rank"), each_value([torch.float32, torch.bfloat16], ORDERS), ids=str
)
def test_a_right_model_over_ranks_and_orders(P, schedule, per_rank, dtype):
    results = over_ranks(P, schedule, per_rank, dtype)
    assert all(result == results[0] for result in results)
    assert results[0].ok, str(results[0])
    assert len(results[0].parameters) == len(list(whole_model(CONFIG).parameters()))
    assert max(results[0].exact.values()) < 1e-12


def test_the_whole_model_is_the_truth():
    """The reference's gradients are those of the unsplit model in float64, which a test of its own computes."""
    tokens, target = batch(CONFIG, M, LENGTH)
    model = whole_model(CONFIG)
    losses, truth = run_whole(model, tokens, target, M)
    from seq1f1b.runtime import verify_runs as module
    from seq1f1b.runtime.batch import StepArguments

    def run(group):
        engine = engine_for(group, [stage_of(model, CONFIG, group.rank, 2)])
        session = module.Session(engine._runner, StepArguments(True, tokens, target, None))
        result = session.run(whole=True, dtype=torch.float64)
        names = [name for name, _ in engine.named_parameters()]
        return result.losses, dict(zip(names, result.gradients, strict=True))

    (_, first), (found, last) = run_ranks(2, run)
    assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=1e-14, atol=0)
    for name, gradient in {**first, **last}.items():
        assert torch.allclose(gradient, truth[name], rtol=1e-12, atol=1e-16), name


def in_process(rank: int, world: int, transport: str) -> None:
    tokens, target = batch(CONFIG, M, LENGTH)
    stage = stage_of(whole_model(CONFIG, torch.float32), CONFIG, rank, world)
    engine = engine_for(None, [stage], transport=transport)
    assert engine.verify(tokens, target=target, show=False).ok
    assert len(engine.step(tokens, target=target)) == M * (rank == world - 1)
    if rank == 1:  # one stage alone is wrong, and all ranks are told where
        stage.blocks["2"].attend = lambda x: x.mean(1, keepdim=True).expand_as(x)
    result = engine.verify(tokens, target=target, show=False)
    assert not result.ok and result.causes[0].startswith("later tokens"), str(result)
    engine.close()


@pytest.mark.parametrize("transport", ["shm", *full_only(("c10d",))])
def test_processes(transport):
    run_processes(2, in_process, transport)


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
        engine = engine_for(
            group,
            [stages[group.rank]],
            num_microbatches=2,
            loss_fn=head,
            arg_rules={"scale": "slice"},
        )
        scale = torch.linspace(0.5, 2, 40)[None, :, None].expand(len(tokens), 40, 1)
        kwargs = {"scale": scale} if group.rank == 1 else None
        return engine.verify(tokens, target=target, kwargs=kwargs, show=False)

    result, other = run_ranks(2, run)
    assert result == other and result.ok, str(result)
    assert result.exact["stage 0: net.embedding.weight"] < 1e-12
    assert {"loss: weight", "stage 0: unused", "stage 1: other.weight"} <= result.parameters.keys()
    assert "stage 0: net.mlp.0.weight" not in result.parameters
    assert torch.equal(head.weight, stages[0].net.embedding.weight)


class Stateful(Net):
    """Has every kind of state that a run may change."""

    def __init__(self) -> None:
        super().__init__(Mixer(self.mix_and_count, normed=nn.BatchNorm1d(HIDDEN)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen: list[int] = []
        self.fails = False

    def mix_and_count(self, mixer: Any, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(x.shape[1])
        self.last = x
        random.random()
        if self.fails and len(self.seen) > 3:
            raise ValueError("in the middle")
        return mixer.attend(mixer.normed(x.transpose(1, 2)).transpose(1, 2) + torch.randn(HIDDEN, dtype=x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(dtype, fails):
    torch.manual_seed(0)
    module = Stateful().to(dtype)
    tokens, target = mixers_batch()
    engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [module], num_microbatches=2)
    optimizer = torch.optim.Adam(module.parameters())
    engine.step(tokens, target=target)
    optimizer.step()
    hooked = []
    module.head.weight.register_post_accumulate_grad_hook(lambda p: hooked.append(1))
    module.seen.clear()
    state = {name: (t, t.data_ptr(), t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in module.named_parameters() if p.grad is not None}
    attributes, drawn, last = dict(module.__dict__), (torch.get_rng_state(), random.getstate()), module.last
    adam = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}

    module.fails = fails
    attributes["fails"] = fails
    if fails:
        with pytest.raises(ValueError, match="in the middle"):
            engine.verify(tokens, target=target, show=False)
    else:
        assert not engine.verify(tokens, target=target, show=False).ok
    for name, t in module.state_dict(keep_vars=True).items():
        same, address, value = state[name]
        assert t is same and t.data_ptr() == address and torch.equal(t, value), name
    for name, p in module.named_parameters():
        own, value = gradients.get(name, (None, None))
        assert p.grad is own and (own is None or torch.equal(own, value)), name
    assert all(torch.equal(v, adam[id(p)][k]) for p, s in optimizer.state.items() for k, v in s.items())
    assert module.__dict__.keys() == attributes.keys() and module.last is last and module.seen == []
    assert torch.equal(torch.get_rng_state(), drawn[0]) and random.getstate() == drawn[1]
    assert not hooked and not model_state._originals
    module.fails = False
    engine.step(tokens, target=target)  # and the engine goes on
    assert hooked


def test_a_stage_of_one_dtype_is_compared_in_that():
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(Mixer(attention), first=False)

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            return self.net(x)

    tokens, target = mixers_batch()
    torch.manual_seed(0)
    stages = [Net(Mixer(attention), last=False), Single()]

    def run(group):
        engine = engine_for(group, [stages[group.rank]], num_microbatches=2)
        return engine.verify(tokens, target=target, show=False)

    result, other = run_ranks(2, run)
    assert result == other and result.ok and not result.exact, str(result)
    assert any("[1]F0.0: " in note and "float32 only" in note for note in result.notes)


def refused(rank: int, world: int) -> None:
    module = DistributedDataParallel(Net(Mixer(attention)))
    engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [module], num_microbatches=2)
    with pytest.raises(ValueError, match="under DDP or FSDP2: verify an engine over the bare"):
        engine.verify(*mixers_batch()[:1], target=mixers_batch()[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SegmentWarning)
        engine.step(mixers_batch()[0], target=mixers_batch()[1])
    wrong = engine_for(
        seq1f1b.LoopbackGroup(1)[0], [DistributedDataParallel(Net(Mixer(torchs_attention)))], num_microbatches=2
    )
    with pytest.raises(ValueError, match="attention not in segments"):
        wrong.step(mixers_batch()[0], target=mixers_batch()[1])


def test_ddp_is_looked_at_and_not_verified():
    run_processes(2, refused)


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
    tokens, target = mixers_batch()

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output["logits"], target) + output["mean"].square() * reads_it

    engine = engine_for(
        seq1f1b.LoopbackGroup(1)[0], [WithScalar(Mixer(attention))], num_microbatches=2, loss_fn=loss_fn
    )
    result = engine.verify(tokens, target=target, show=False)
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
    tokens, target = mixers_batch()
    for mix in mixes:
        module: Any = Net(Mixer(mix))
        if what == "module":
            module = torch.compile(module, backend="aot_eager")
        elif what == "method":
            module.mixer.forward = torch.compile(module.mixer.forward, backend="aot_eager")
        else:
            module.mlp[1] = Calls(compiled_gelu)
        engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [module], num_microbatches=2)
        result = engine.verify(tokens, target=target, show=False)
        assert result.ok == (mix is attention) and result.exact, str(result)
        if mix is torchs_attention:
            with pytest.raises(ValueError, match="attention not in segments"):
                engine.step(tokens, target=target)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error", SegmentWarning)
                engine.step(tokens, target=target)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = (function,)  # not an attribute that is seen to be compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](x)


# -- looks -------------------------------------------------------------------------------------------------------------


class Probe(Net):
    def __init__(self, mix: Any = attention) -> None:
        super().__init__(Mixer(mix))
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(len(_get_current_function_mode_stack()))
        return super().forward(x)


def test_one_forward_of_the_first_step_is_looked_at_and_no_other():
    tokens, target = mixers_batch()
    module = Probe()
    engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [module], num_microbatches=2)
    for width, expected in ((40, 1), (40, 0), (36, 0), (40, 0)):
        module.modes.clear()
        engine.step(tokens[:, :width], target=target[:, :width])
        assert len(module.modes) == 2 * K and sum(module.modes) == expected
    engine_of_one = engine_for(seq1f1b.LoopbackGroup(1)[0], [module], num_microbatches=2, num_segments=1)
    module.modes.clear()
    engine_of_one.step(tokens, target=target)
    assert sum(module.modes) == 0


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


class Mixed(nn.Module):
    """One layer attends as it should, another does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.more = Net(Mixer(attention), last=False), Net(Mixer(torchs_attention), first=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self.net(x))


def test_a_stage_that_also_attends_as_it_should_gets_a_warning():
    engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [Mixed()], num_microbatches=2)
    with pytest.warns(SegmentWarning, match=r"stage 0, more.mixer \(Mixer\) begins anew"):
        engine.step(mixers_batch()[0], target=mixers_batch()[1])


def test_tokens_and_features_of_one_number_are_told_apart():
    """12 tokens in a segment and 12 features: a sum along either has the same sizes."""
    tokens, target = mixers_batch()
    for dim, is_right in ((-1, True), (1, False)):
        net = Net(Mixer(lambda self, x, dim=dim: self.attend(x.cumsum(dim))))
        engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [net], num_microbatches=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SegmentWarning)
            engine.step(tokens[:, :36], target=target[:, :36])
        assert ["mixer (Mixer) begins anew" in str(warning.message) for warning in caught] == [True] * (not is_right)
        assert engine.verify(tokens[:, :36], target=target[:, :36], show=False).ok == is_right


def test_attention_within_a_token_is_not_attention_along_the_sequence():
    """As many heads as a segment has tokens, 3: scores look the same, but the rows are tokens."""

    def by_heads(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(0, 1).unflatten(-1, (3, 3, 4)).unbind(1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return (F.scaled_dot_product_attention(q, k, v) + scores @ v).flatten(1).view_as(x)

    tokens, target = mixers_batch()
    engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [Net(Mixer(by_heads))], num_microbatches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SegmentWarning)
        engine.step(tokens[:4, :9], target=target[:4, :9])
    assert engine.verify(tokens[:4, :9], target=target[:4, :9], show=False).ok


class Letters(nn.Module):
    """A recurrence over the letters of each token, and torch's module for attention over the sequence."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.mha = nn.MultiheadAttention(HIDDEN, 3) if attends else None

    def forward(self, x: Tensor) -> Tensor:
        letters = x.reshape(-1, 1, HIDDEN).expand(-1, 5, HIDDEN)
        x = self.rnn(letters)[0][:, -1].view_as(x)
        return x if self.mha is None else self.mha(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1)


@pytest.mark.parametrize("rows", [2, 1])
def test_a_recurrence_within_a_token_is_right_and_attention_over_tokens_first_is_not(rows):
    tokens, target = (t[: 2 * rows] for t in mixers_batch())
    engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [Net(Letters(False))], num_microbatches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SegmentWarning)
        engine.step(tokens, target=target)
    assert engine.verify(tokens, target=target, show=False).ok
    engine = engine_for(seq1f1b.LoopbackGroup(1)[0], [Net(Letters(True))], num_microbatches=2)
    with pytest.raises(ValueError, match=r"attention not in segments: stage 0, mixer\.mha"):
        engine.step(tokens, target=target)


# -- one module --------------------------------------------------------------------------------------------------------


def test_one_module_in_one_process(capsys):
    torch.manual_seed(0)
    sample = torch.randn(3, 40, HIDDEN)
    right, wrong = Mixer(attention), Mixer(torchs_attention)
    for segments in (2, 4, [7, 13, 20]):
        result = verify_stage(right, sample, segments)
        assert result.ok and "input" in result.parameters, str(result)
        assert str(result) in capsys.readouterr().out
        result = verify_stage(wrong, sample, segments, show=False)
        assert not result.ok and result.causes[0].startswith("attention not in segments")
    assert not sample.requires_grad and all(p.grad is None for p in right.parameters())
    assert not verify_stage(Mixer(pooling), sample, show=False).ok
    tokens = torch.randint(29, (3, 40))
    assert verify_stage(Net(right), tokens, 4, show=False).ok


def test_a_verification_is_true_or_false_as_its_ok():
    sample = torch.randn(3, 40, HIDDEN)
    right, wrong = (verify_stage(Mixer(mix), sample, show=False) for mix in (attention, pooling))
    assert right
    assert not wrong
    assert (bool(right), bool(wrong)) == (right.ok, wrong.ok) == (True, False)


def test_one_module_in_another_layout():
    """(batch, features, tokens): the sequence dimension is an argument."""

    class Transposed(nn.Module):
        def __init__(self, mixer: nn.Module) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(x.transpose(1, 2)).transpose(1, 2).contiguous()

    sample = torch.randn(2, HIDDEN, 30)
    assert verify_stage(Transposed(Mixer(attention)), sample, 3, seq_dim=2, show=False).ok
    assert not verify_stage(Transposed(Mixer(torchs_attention)), sample, 3, seq_dim=2, show=False).ok


def test_a_case_of_the_tables_can_be_cut():
    """A wrong mixer in the second of two stages: the causes name the stage."""
    case = Case("", torchs_attention)
    tokens, target = mixers_batch()

    def run(group):
        first = group.rank == 0
        module = Net(Mixer(attention), last=False) if first else case.module(first=False)
        return engine_for(group, [module], num_microbatches=2).verify(tokens, target=target, show=False)

    result, other = run_ranks(2, run)
    assert result == other and not result.ok
    assert "stage 1, mixer" in result.causes[0]


# -- numbers that are not finite ---------------------------------------------------------------------------------------


class Faulty(nn.Module):
    """One of two stages, with one fault, and attention as it should be or not."""

    def __init__(self, first: bool, fault: Any, mix: Any = attention) -> None:
        super().__init__()
        self.net = Net(Mixer(mix), first=first, last=not first)
        self.scale, self.fault = nn.Parameter(torch.ones(HIDDEN if first else 29)), fault

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(self, self.net(x))


def in_float64(scale: Tensor) -> float:
    return math.nan if scale.dtype == torch.float64 else 1.0


# On stage 0 or 1: (what is done to the stage's output, what is named)
FAULTS: dict[str, tuple[int, Any, str]] = {
    "output nan": (0, lambda self, y: y * math.nan, r"stage 0, itself \(Faulty\) returns nan"),
    "output inf": (1, lambda self, y: y * math.inf, r"stage 1, itself \(Faulty\) returns (nan|inf)"),
    "one element": (0, lambda self, y: y.index_fill(1, torch.tensor(2), math.inf), "stage 0, itself"),
    "parameter": (1, lambda self, y: y * self.scale.data.fill_(math.nan), "stage 1, itself"),
    "gradient nan": (1, lambda self, y: y + (self.scale * 0).sqrt() * 0, "the gradient of stage 1: scale is nan"),
    "gradient inf": (
        0, lambda self, y: y + (self.scale - self.scale.detach()).sqrt(), "the gradient of stage 0: scale is (nan|inf)",
    ),
    "gradient of one element": (
        1, lambda self, y: y + F.pad(self.scale[:1] * 0, (0, 28)).sqrt() * 0, "the gradient of stage 1: scale is nan",
    ),
    "log of zero": (1, lambda self, y: y + (y * 0).abs().log(), "stage 1|the loss|the gradient"),
}  # fmt: skip


def verified_over_two(stages: list[nn.Module], loss_fn: Any = cross_entropy, target: Any = None) -> Any:
    tokens, targets = mixers_batch()

    def run(group: Any) -> Any:
        engine = engine_for(group, [stages[group.rank]], num_microbatches=2, loss_fn=loss_fn)
        return engine.verify(tokens, target=targets if target is None else target, show=False)

    result, other = run_ranks(2, run)
    assert str(result) == str(other)  # nan is not equal to itself
    return result


def nothing(self: Any, y: Tensor) -> Tensor:
    return y


@pytest.mark.parametrize("name", FAULTS)
def test_a_reference_that_is_not_finite_is_none(name):
    place, fault, named = FAULTS[name]
    result = verified_over_two([Faulty(i == 0, fault if i == place else nothing) for i in range(2)])
    assert not result.ok
    (cause,) = result.causes
    assert re.match(rf"not finite: ({named})", cause), cause
    assert "not finite in torch.float64" in str(result) and "cannot be compared" in str(result)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("every", [True, False])
def test_a_loss_that_is_not_finite_has_no_finite_reference(value, every):
    """The gradients are finite, and right."""

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target) + (value if every or bool((target == 7).sum() % 2) else 0.0)

    result = verified_over_two([Faulty(i == 0, nothing) for i in range(2)], loss_fn)
    assert not result.ok and re.match("not finite: the loss of micro-batch . is", result.causes[0]), str(result)


@pytest.mark.parametrize("mix", [attention, pooling])
def test_a_model_that_is_finite_in_its_own_dtype_only_is_compared_in_that(mix):
    stages = [Faulty(True, nothing), Faulty(False, lambda self, y: y * in_float64(self.scale), mix)]
    result = verified_over_two([stage.float() for stage in stages])
    assert result.ok == (mix is attention) and not result.exact, str(result)
    assert any(
        note == "The whole model is not finite in torch.float64: stage 1, itself (Faulty) returns nan."
        for note in result.notes
    )
    assert result.ok or result.causes[0].startswith("later tokens")


def test_a_model_that_is_finite_in_float64_only_cannot_be_compared_in_its_own():
    def overflows(self: Any, y: Tensor) -> Tensor:
        return y + self.scale * 300 * 300 * 0

    stages = [Faulty(True, nothing), Faulty(False, overflows)]
    result = verified_over_two([stage.half() for stage in stages])
    assert not result.ok and result.causes[0].startswith("not finite: stage 1, itself (Faulty) returns"), str(result)
    assert not any("not finite" in note for note in result.notes)


def test_infinities_that_no_gradient_sees_are_compared():
    """Logits of words that do not exist, and a micro-batch whose targets are all masked."""

    def masked(self: Any, y: Tensor) -> Tensor:
        return y.masked_fill(torch.arange(29) > 26, -math.inf)

    target = mixers_batch()[1].clamp(max=26)
    target[: len(target) // 2] = -100
    result = verified_over_two([Faulty(True, nothing), Faulty(False, masked)], target=target)
    assert result.ok and result.exact, str(result)


def test_a_pipeline_that_is_not_finite_where_the_model_is_differs():
    def second_is_not(self: Any, y: Tensor) -> Tensor:
        return y * (math.nan if y.shape[1] < 40 and seq1f1b.token_offset() else 1.0)

    result = verified_over_two([Faulty(True, second_is_not), Faulty(False, nothing)])
    assert not result.ok and result.causes[0].startswith("state across tokens"), str(result)
