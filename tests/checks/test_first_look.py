"""Does the first step tell, by values, of every way to mix tokens, and of no model that is right?"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mixers import (
    ALSO_RIGHT,
    ALSO_WRONG,
    HIDDEN,
    LATER,
    LENGTH,
    VOCAB,
    WIDTH,
    Mix,
    Mixer,
    Net,
    attention,
    beside,
    cross_entropy,
    told_by,
    torchs_attention,
)
from processes import run_processes
from test_verify import Stateful
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seq1f1b
from seq1f1b import PipelineEngine
from seq1f1b.checks.first_look import Look
from seq1f1b.testing import run_ranks

SEGMENTS = 4
Told = list[str]


def made(mix: Mix, **ends: bool) -> Net:
    torch.manual_seed(0)
    return Net(Mixer(beside(mix)), **ends)


def batch(rows: int = 6, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    return tokens, seq1f1b.shift_labels(tokens)


def engine_of(model: nn.Module, group: Any = None, **options: Any) -> PipelineEngine:
    group = seq1f1b.LoopbackGroup(1)[0] if group is None else group
    options = {"num_segments": SEGMENTS, "loss_fn": cross_entropy, **options}
    return PipelineEngine(model, num_microbatches=2, group=group, **options)


def told(model: nn.Module, *, rows: int = 6, length: int = LENGTH, kwargs: Any = None, **options: Any) -> Told:
    tokens, target = batch(rows, length)
    engine = engine_of(model, **options)
    return told_by(lambda: engine.step(tokens, target=target, kwargs=kwargs))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What looks by values found: None where they could tell nothing."""
    found: list[Any] = []
    findings = Look.findings

    def noted(look: Look) -> Any:
        found.append(findings(look))
        return found[-1]

    monkeypatch.setattr(Look, "findings", noted)
    return found


def test_tokens_that_are_all_alike_hide_nothing():
    for what in ("maximum", "cumsum of heads", "sort", "previous token by cat"):
        engine = engine_of(made(ALSO_WRONG[what][0], first=False, last=False), loss_fn=nn.MSELoss())
        x = torch.zeros(4, LENGTH, HIDDEN)
        (text,) = told_by(lambda engine=engine, x=x: engine.step(x, target=torch.ones_like(x)))
        assert text.startswith(ALSO_WRONG[what][1])


def test_a_router_that_rounds_otherwise_is_no_finding(looks):
    """In segments, one token of one row goes to another expert."""

    def flips(self: Any, x: Tensor) -> Tensor:
        y = x.clone()
        if x.shape[1] < 14:
            y[0, 1] = self.router(x[0, 1])[:1] + y[0, 1]
        return y

    assert told(made(flips)) == [] and looks == [[]]
    mix: Mix = lambda self, x: torch.cat([self.experts[0](x[:, :1]), x[:, 1:]], 1)  # noqa: E731
    assert len(told(made(mix))) == 1  # of every row


def documents(self: Any, x: Tensor, doc_ids: Tensor) -> Tensor:
    return self.table(seq1f1b.positions(x, doc_ids=doc_ids)) + x


@pytest.mark.parametrize("is_wrong", [False, True])
def test_sliced_arguments_come_with_their_tokens(is_wrong, looks):
    ids = (torch.arange(LENGTH)[None] >= torch.tensor([5, 9, 40, 13, 2, 39])[:, None]).long()
    mix: Any = (lambda self, x, doc_ids: x.cumsum(1) + doc_ids[..., None]) if is_wrong else documents
    texts = told(made(mix), kwargs={"doc_ids": seq1f1b.document_starts(ids)}, arg_rules={"doc_ids": "slice"})
    assert len(looks) == 1 and len(texts) == is_wrong == len(looks[0])


@dataclass
class Output:
    logits: Tensor


class InAForm(Net):
    """Returns its logits in some form."""

    form: Any = None

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.form[0](super().forward(x, **kwargs))


@pytest.mark.parametrize(
    ("form", "read", "is_seen"),
    [
        (Output, lambda output: output.logits, False),  # no place of a tensor that is known
        (lambda y: {"logits": y, "mean": y.mean()}, lambda output: output["logits"], True),
        (lambda y: (y.mT.contiguous(), y.to_sparse()), lambda output: output[0].mT, True),
    ],
)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_outputs_in_any_form_end_no_step(form, read, is_seen, is_wrong, looks):
    model = InAForm(Mixer(beside(ALSO_WRONG["maximum"][0]) if is_wrong else attention))
    model.form = [form]
    texts = told(model, loss_fn=lambda output, target: cross_entropy(read(output), target))
    assert len(looks) == 1 and len(texts) == (is_wrong and is_seen)


# -- several stages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, HIDDEN, WIDTH])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_the_stage_that_is_wrong_is_named_and_no_other(wrong, length):
    mixes = [ALSO_WRONG["last token"][0] if i == wrong else ALSO_RIGHT["features by number"] for i in range(3)]
    stages = [made(mix, first=i == 0, last=i == 2) for i, mix in enumerate(mixes)]
    tokens, target = batch(4, SEGMENTS * length)
    texts = told_by(
        lambda: run_ranks(3, lambda group: engine_of(stages[group.rank], group).step(tokens, target=target))
    )
    assert [text.partition(",")[0] for text in texts] == ([] if wrong is None else [f"{LATER}: stage {wrong}"])


class Turned(nn.Module):
    """Hands on (rows, features, tokens)."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.model, self.first = made(ALSO_RIGHT["plain"], first=first, last=not first), first

    def forward(self, x: Tensor) -> Tensor:
        y = self.model(x if self.first else x.mT)
        return y.mT if self.first else y


@pytest.mark.parametrize("length", [10, HIDDEN])
def test_another_layout_between_stages_is_not_blamed(length):
    tokens, target = batch(4, SEGMENTS * length)
    stages = [Turned(first=True), Turned(first=False)]
    run: Any = lambda group: engine_of(stages[group.rank], group).step(tokens, target=target)  # noqa: E731
    assert told_by(lambda: run_ranks(2, run)) == []


# -- what the look leaves as it was, and what it costs -----------------------------------------------------------------


@pytest.mark.parametrize("draws", [False, True])
def test_all_is_left_as_it_was(draws, looks):
    """Against a step without a look, from one state: numbers, generators, buffers, attributes, modes, gradients."""
    tokens, target = batch()
    results = []
    for attention_ in ("own", "unchecked"):
        torch.manual_seed(0)
        module = Stateful(draws)
        module.mixer.normed.eval()
        random.seed(0)
        losses = engine_of(module, attention=attention_).step(tokens, target=target)
        tensors = [*losses, *module.state_dict().values(), *(p.grad for p in module.parameters() if p.grad is not None)]
        others = module.seen, [m.training for m in module.modules()], random.getstate(), sorted(module.__dict__)
        results.append(([*(t.clone() for t in tensors), torch.get_rng_state(), module.last], others))
    (tensors, others), (tensors_, others_) = results
    assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_, strict=True)) and others == others_
    assert looks == [None if draws else []]  # and nothing was looked at in the other


class Counting(Net):
    """Counts its forwards, and their tokens, outside of what a look puts back."""

    calls: list[tuple[int, int]] = []  # noqa: RUF012

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.calls.append((x.shape[0] * x.shape[1], self.embedding.weight.data_ptr()))
        return super().forward(x, **kwargs)


def test_three_forwards_of_few_tokens_and_no_copy_of_a_parameter():
    tokens, target = batch()
    model = Counting(Mixer(attention))
    engine = engine_of(model)
    Counting.calls.clear()
    engine.step(tokens, target=target)
    looked, Counting.calls[:] = Counting.calls[8:], []
    assert 0.0 < engine.report().look_seconds < 10.0
    sizes = [size for size, _ in looked]
    assert len(sizes) == 3 and sizes[0] > sizes[1] and 8 <= sizes[0] + sizes[1] == sizes[2] <= 32
    assert {address for _, address in looked} == {model.embedding.weight.data_ptr()}
    engine.step(tokens, target=target)
    engine.step(tokens[:, :36], target=target[:, :36])  # a new length tells nothing new
    assert len(Counting.calls) == 16 and engine.report().look_seconds > 0.0
    engine.eval(tokens, target=target)
    assert len(Counting.calls) == 16 + 8 + 3  # another mode may


def test_it_is_off_by_an_option(looks):
    for mix in (beside(ALSO_WRONG["maximum"][0]), torchs_attention):
        assert told(Net(Mixer(mix)), attention="unchecked") == [] and looks == []
    with pytest.raises(ValueError, match=r"^attention is 'none', must be 'own', 'any' or 'unchecked'$"):
        engine_of(Net(Mixer(attention)), attention="none")


# -- stages that cannot be run by themselves ---------------------------------------------------------------------------


class Drawing(Net):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(x, **kwargs) + 0.0 * torch.rand(1)


class OfOneLength(Net):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        if x.shape[1] != LENGTH // SEGMENTS:
            raise ValueError("10 tokens only")
        return super().forward(x, **kwargs)


def not_compared(engine: PipelineEngine) -> Told:
    """What two steps and an evaluation say of what they do not look at."""
    tokens, target = batch()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for call in (engine.step, engine.step, engine.eval):
            call(tokens, target=target)
    return [str(warning.message) for warning in caught if "was not compared in segments" in str(warning.message)]


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (Net, {}, ""),
        (Drawing, {}, "draws random numbers, or takes no other tokens or arguments"),
        (OfOneLength, {}, "draws random numbers, or takes no other tokens or arguments"),
        (Net, {"sequence_parallel": (0, 2)}, "shares its tokens with other ranks"),
    ],
)
def test_what_is_not_looked_at_is_said_once(kind, options, why):
    texts = not_compared(engine_of(kind(Mixer(ALSO_RIGHT["plain"])), **options))
    assert len(texts) == bool(why)
    assert all(re.fullmatch(f"stage 0 was not compared in segments .* {why}: .*", text) for text in texts)


@pytest.mark.parametrize("kind", [Drawing, OfOneLength])
def test_a_stage_that_cannot_run_alone_is_not_judged(kind, looks):
    engine = engine_of(kind(Mixer(torchs_attention)))
    assert told_by(lambda: engine.step(batch()[0], target=batch()[1])) == [] and looks == [None]
    assert engine.report().look_seconds == 0.0


calls: list[int] = []


def talks(self: Any, x: Tensor) -> Tensor:
    """Talks to the other replica, as experts do that are spread over processes."""
    calls.append(1)
    total = x.detach().sum()
    torch.distributed.all_reduce(total)
    return x * total.sigmoid()


def replicas(rank: int, world: int) -> None:
    texts = [told(DistributedDataParallel(made(m))) for m in (ALSO_RIGHT["plain"], ALSO_WRONG["maximum"][0], talks)]
    assert texts[0] == [] and texts[1][0].startswith(LATER) and texts[2] == []
    assert len(calls) == 8  # as often as the units of its step: one more would wait for the other rank's
    (text,) = not_compared(engine_of(fully_shard(Net(Mixer(attention)))))
    assert "is sharded" in text


def test_ddp_is_looked_at_bare_and_what_talks_or_is_sharded_is_not():
    run_processes(2, replicas)
