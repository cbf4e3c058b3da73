"""Is the gradient that of the whole batch's loss, whatever the loss divides by, and is it told where it is not?"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from slices import each_value
from tiny_model import Attends
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b import Loss, Memory, PipelineEngine, PipelineError, SegmentWarning, build_schedule
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN, LENGTH = 16, 8, 24
PAD = 0


def make_model(*, head: bool = True) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [
        nn.Embedding(VOCAB, HIDDEN),
        Attends(HIDDEN, 0),
        Attends(HIDDEN, 1),
        *([nn.Linear(HIDDEN, VOCAB)] if head else []),
    ]
    return [nn.Sequential(*layers[:2]).double(), nn.Sequential(*layers[2:]).double()]


def make_batch(M: int) -> dict[str, Tensor]:
    """Rows padded to different lengths, answers of different lengths, and weights."""
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCAB, (2 * M, LENGTH), generator=made)
    padded = tokens.roll(-1, 1)
    ends = torch.randint(5, LENGTH, (2 * M, 1), generator=made)
    padded[torch.arange(LENGTH) >= ends] = PAD
    return {
        "tokens": tokens,
        "padded": padded,
        "ignored": padded.masked_fill(padded == PAD, -100),
        "mask": (torch.rand(2 * M, LENGTH, generator=made) < 0.4).double(),
        "weights": torch.rand(2 * M, LENGTH, generator=made, dtype=torch.float64),
        "classes": torch.rand(VOCAB, generator=made, dtype=torch.float64),
    }


BATCH = make_batch(3)


def tokens_loss(y: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), target, reduction="none", **options)


# -- losses that return their sum and their divisor ------------------------------------------------------------------


def pad(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return tokens_loss(y, t, ignore_index=PAD).sum(), (t != PAD).sum()


def mean_pad(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), t, ignore_index=PAD)


def masked(y: Tensor, t: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return (tokens_loss(y, t[0]) * t[1]).sum(), t[1].sum()


TARGETS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "ignore_index of padding": (pad, lambda: BATCH["padded"]),
    "a mask beside the labels": (masked, lambda: (BATCH["padded"], BATCH["mask"])),
    "a dict of labels and weights": (
        lambda y, t: masked(y, (t["labels"], t["weights"])),
        lambda: {"labels": BATCH["padded"], "weights": BATCH["weights"]},
    ),
    "a number of tokens": (lambda y, t: (tokens_loss(y, t).square().sum(), t.numel()), lambda: BATCH["padded"]),
    "label smoothing": (
        lambda y, t: (tokens_loss(y, t, label_smoothing=0.1).sum(), float((t != -100).sum())),
        lambda: BATCH["ignored"],
    ),
}


def whole_gradients(stages: list[nn.Module], loss_fn: Callable[..., Any], target: Any) -> list[Tensor]:
    model = nn.Sequential(*copy.deepcopy(stages))
    total, divisor = loss_fn(model(BATCH["tokens"]), target)
    (total / divisor).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def train(
    stages: list[nn.Module],
    loss_fn: Any,
    target: Any,
    *,
    steps: int = 1,
    M: int = 3,
    k: int = 3,
    P: int = 2,
    **options: Any,
) -> list[Tensor]:
    """Gradients of the model, after so many steps of one batch."""
    call = options.pop("call", {})
    own = stages if P == 2 else [nn.Sequential(*stages)]

    def work(group: Any) -> None:
        engine = PipelineEngine(
            own[group.rank], num_microbatches=M, num_segments=k, loss_fn=loss_fn, group=group, **options
        )
        for _ in range(steps):
            engine.step(BATCH["tokens"], target=target, **call)

    run_ranks(P, work)
    modules = [*stages, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def check(found: list[Tensor], expected: list[Tensor], times: float = 1.0) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, times * theirs, rtol=1e-9, atol=1e-12)


FILL = partial(build_schedule, "seq1f1b", weights="fill")
SHAPES: list[dict[str, Any]] = [
    {"schedule": "seq-zb-h1"},
    {"P": 1, "M": 1, "k": 2, "memory": Memory(recompute="all")},
    {"k": 1, "schedule": FILL},
    {"M": 6, "k": 4, "grad_dtype": None},
    {"segment_sizes": [1, 20, 3], "schedule": "gpipe"},
]


@pytest.mark.parametrize(("name", "options"), each_value(list(TARGETS), SHAPES))
def test_a_sum_and_its_divisor(name: str, options: dict[str, Any]) -> None:
    loss_fn, target = TARGETS[name][0], TARGETS[name][1]()
    stages = make_model()
    expected = whole_gradients(stages, loss_fn, target)
    with warnings.catch_warnings(action="error"):
        check(train(stages, loss_fn, target, **options), expected)


class Head(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.loss = nn.Linear(HIDDEN, VOCAB).double(), loss

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.linear(hidden), target)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": Loss(reduction="sum")}, "for some segments, and one loss for others|one loss"),
        ({"loss": Loss(scale_grads=False)}, "scale_grads=False"),
        ({}, r"an auxiliary loss \(add_loss\) has no part in that divisor"),
    ],
)
def test_what_is_refused(options: dict[str, Any], match: str) -> None:
    stages = make_model()
    if not options:
        stages[0].register_forward_hook(lambda stage, given, y: seq1f1b.add_loss(y.square().mean()))
    with pytest.raises((ValueError, RuntimeError), match=match):
        train(stages, pad, BATCH["padded"], **options)


class Outside:
    """A loss that is no module, and uses a layer and a bare parameter."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.layer, self.scale = nn.Linear(HIDDEN, VOCAB).double(), nn.Parameter(torch.tensor(0.7).double())

    def __call__(self, y: Tensor, t: Any) -> tuple[Tensor, Tensor]:
        return masked(self.layer(y) * self.scale, t)

    def checkpointed(self, y: Tensor, t: Any) -> tuple[Tensor, Tensor]:
        return masked(torch.utils.checkpoint.checkpoint(self.layer, y, use_reentrant=False) * self.scale, t)


@pytest.mark.parametrize("name", ["__call__", "checkpointed"])
@pytest.mark.parametrize("options", [{}, {"schedule": "seq-zb-h1"}, {"memory": Memory(recompute="all"), "P": 1}])
def test_a_divisor_reaches_what_no_module_holds(name: str, options: dict[str, Any]) -> None:
    stages, loss, target = make_model(head=False), Outside(), (BATCH["padded"], BATCH["weights"])
    truth = copy.deepcopy(loss)
    expected = whole_gradients(stages, getattr(truth, name), target)
    check(train(stages, getattr(loss, name), target, steps=2, **options), expected, 2.0)
    mine, theirs = ([*each.layer.parameters(), each.scale] for each in (loss, truth))
    check([p.grad for p in mine], [p.grad for p in theirs], 2.0)
    with pytest.raises(ValueError, match="sum to nan"):  # puts back what was there
        train(stages, lambda y, t: (getattr(loss, name)(y, t)[0], float("nan")), target, **options)
    check([p.grad for p in mine], [p.grad for p in theirs], 2.0)


# -- losses that are looked at ---------------------------------------------------------------------------------------


def mean_masked(y: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
    total, divisor = masked(y, t)
    return total / divisor


def plain(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), t)


def whitened(y: Tensor, t: Tensor) -> Tensor:
    """By token; gains are whitened over all that count."""
    log_probs, counted = -tokens_loss(y, t), t != -100
    gains = log_probs.detach()[counted]
    return -torch.where(counted, (log_probs.detach() - gains.mean()) / gains.std(correction=0), 0.0) * log_probs


def pairs(y: Tensor, t: Tensor) -> Tensor:
    """By token, the loss of the two answers that a pair of rows holds."""
    margin = -tokens_loss(y, t).sum(1).unflatten(0, (-1, 2)).diff(dim=1)
    return -F.logsigmoid(margin).repeat_interleave(2, 0) * (t != -100) / (t != -100).sum(1, keepdim=True).clamp(min=1)


def with_divisor(of_tokens: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda y, t: (of_tokens(y, t).sum(), (t != -100).sum())


def mean_of(of_tokens: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda y, t: of_tokens(y, t).sum() / (t != -100).sum()


def of_rows(y: Tensor, t: Tensor) -> Tensor:
    """A token depends on those of other rows at its place."""
    return (tokens_loss(y, t) - tokens_loss(y, t).mean(0, keepdim=True)).square() * (t != -100)


WRONG: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "ignore_index of padding": (mean_pad, lambda: BATCH["padded"], {}),
    "the same, all micro-batches in one": (mean_pad, lambda: BATCH["padded"], {"M": 1}),
    "the same, one segment, over all targets": (
        mean_pad, lambda: BATCH["padded"], {"k": 1, "loss": Loss(weight="targets")}
    ),
    "a mask beside the labels": (mean_masked, lambda: (BATCH["padded"], BATCH["mask"]), {}),
    "class weights": (
        lambda y, t: F.cross_entropy(y.transpose(1, 2), t, weight=BATCH["classes"].to(y.dtype)),
        lambda: BATCH["padded"], {},
    ),
    "a loss of the sequence": (
        lambda y, t: y.mean(1).square().sum() + 0.0 * t.sum(), lambda: BATCH["padded"], {}
    ),
    "a mean that is summed": (plain, lambda: BATCH["padded"], {"loss": Loss(reduction="sum")}),
    "a sum that is averaged": (lambda y, t: tokens_loss(y, t).sum(), lambda: BATCH["padded"], {}),
    "a count of something else": (
        plain, lambda: BATCH["padded"], {"loss": Loss(weight=lambda t: float((t != PAD).sum()))}
    ),
    "a head within the loss": (Head(mean_pad), lambda: BATCH["padded"], {}),
    "whitened": (mean_of(whitened), lambda: BATCH["ignored"], {}),
    "whitened, by token": (whitened, lambda: BATCH["ignored"], {"loss": Loss(weight="targets")}),
    "whitened, a sum and its divisor": (with_divisor(whitened), lambda: BATCH["ignored"], {"P": 1}),
    "pairs, a sum and its divisor": (with_divisor(pairs), lambda: BATCH["ignored"], {"k": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_divisor_is_told_once(name: str) -> None:
    loss_fn, target, options = WRONG[name]
    stages = make_model(head=not isinstance(loss_fn, Head))
    with pytest.warns(SegmentWarning, match=r"(loss weighting|a loss of several tokens): stage \d, the loss") as found:
        train(stages, loss_fn, target(), steps=2, **options)
    assert sum(", the loss" in str(warning.message) for warning in found) == 1


class Dropped(nn.Module):
    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return plain(F.dropout(y, 0.1), t)


class Carrying(nn.Module):
    """A loss of differences between neighbours, whose state passes between segments."""

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        before = seq1f1b.carry_in(9, y[:, :1].detach() * 0.0)
        seq1f1b.carry_out(9, y[:, -1:])
        return (y - torch.cat([before, y[:, :-1]], 1)).square().sum() + 0.0 * t.sum()


class RunsItsBackward(nn.Module):
    """A loss that keeps few logits alive by a backward of its own, as chunked losses do."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.__dict__["head"] = head  # the stage's

    def forward(self, hidden: Tensor, t: Tensor) -> Tensor:
        leaf = hidden.detach().requires_grad_()
        loss = plain(self.head(leaf), t) / 3.0  # gradients of the mean over three micro-batches
        if torch.is_grad_enabled():
            loss.backward()
        return plain(self.head(hidden.detach()), t).detach() + (0.0 if leaf.grad is None else (hidden * 0.0).sum())


def test_a_loss_that_runs_its_backward_is_not_called_again() -> None:
    class Last(nn.Module):
        def __init__(self, body: nn.Module, head: nn.Linear) -> None:
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x: Tensor) -> Any:
            return self.body(x)

    first, last = make_model()
    head = last[-1]
    stages = [first, Last(last[:-1], head)]
    calls: list[int] = []
    head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    train(stages, RunsItsBackward(head), BATCH["padded"])
    assert len(calls) == 9  # M k


RIGHT: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "a mean": (plain, lambda: BATCH["ignored"], {}),
    "a mean of the first": (lambda y, t: plain(y, t[0]), lambda: (BATCH["ignored"], BATCH["mask"]), {}),
    "a sum": (lambda y, t: tokens_loss(y, t).sum(), lambda: BATCH["ignored"], {"loss": Loss(reduction="sum")}),
    "squares": (lambda y, t: F.mse_loss(y, F.one_hot(t, VOCAB).double()), lambda: BATCH["padded"], {}),
    "label smoothing": (
        lambda y, t: F.cross_entropy(y.transpose(1, 2), t, label_smoothing=0.2), lambda: BATCH["ignored"], {}
    ),
    "z-loss": (
        lambda y, t: plain(y, t) + 0.1 * (y.logsumexp(-1).square() * (t != -100)).sum() / (t != -100).sum(),
        lambda: BATCH["ignored"], {},
    ),
    "a callable that counts": (
        mean_pad, lambda: BATCH["padded"], {"loss": Loss(weight=lambda t: float((t != PAD).sum()))}
    ),
    "a mask, counted": (
        mean_masked, lambda: (BATCH["padded"], BATCH["mask"]), {"loss": Loss(weight=lambda t: float(t[1].sum()))}
    ),
    "random numbers": (Dropped(), lambda: BATCH["padded"], {}),
    "state of its own": (Carrying(), lambda: BATCH["padded"], {"loss": Loss(reduction="sum")}),
    "a head within the loss": (Head(plain), lambda: BATCH["ignored"], {}),
    "all targets of a step": (plain, lambda: BATCH["ignored"], {"loss": Loss(weight="targets")}),
    "a wrong mean of one segment": (mean_pad, lambda: BATCH["padded"], {"k": 1}),
    "half precision": (lambda y, t: plain(y.bfloat16(), t), lambda: BATCH["ignored"], {}),
    "rows at one place, by token": (of_rows, lambda: BATCH["ignored"], {}),
    "rows at one place, a sum and its divisor": (with_divisor(of_rows), lambda: BATCH["ignored"], {}),
    "whitened in one segment": (mean_of(whitened), lambda: BATCH["ignored"], {"k": 1, "loss": Loss(weight="targets")}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_right_loss_is_not_blamed(name: str) -> None:
    loss_fn, target, options = RIGHT[name]
    with warnings.catch_warnings(action="error", category=SegmentWarning):
        warnings.filterwarnings("ignore", message="micro-batches count different")
        train(make_model(head=not isinstance(loss_fn, Head)), loss_fn, target(), **options)


@pytest.mark.parametrize(("k", "most"), [(4, 32), (16, 128)])
def test_the_look_takes_few_tokens(k: int, most: int) -> None:
    """Eight of each segment: the head may be in the loss, and no plan has room for more logits."""
    lengths: list[int] = []

    def counting(y: Tensor, t: Tensor) -> Tensor:
        lengths.append(y.shape[1])
        return plain(y, t)

    tokens = torch.randint(1, VOCAB, (2, 4096), generator=torch.Generator().manual_seed(1))
    stage = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB))
    engine = PipelineEngine(stage, num_microbatches=2, num_segments=k, loss_fn=counting)
    engine.step(tokens, target=tokens.roll(-1, 1))
    looked_at = [length for length in lengths if length <= most]
    assert sorted(lengths)[-2 * k :] == [4096 // k] * 2 * k and sum(looked_at[:-1]) == looked_at[-1] == most
    engine.close()


# -- segments and steps without targets --------------------------------------------------------------------------------


def engine_of(loss_fn: Any, **options: Any) -> PipelineEngine:
    """An engine of one rank, for three micro-batches in three segments."""
    model = nn.Sequential(*make_model())
    return PipelineEngine(model, num_microbatches=3, num_segments=3, loss_fn=loss_fn, **options)


def gradients_of(engine: PipelineEngine) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}


TOKENS, NOTHING = BATCH["tokens"], torch.full_like(BATCH["tokens"], -100)
LATE = BATCH["padded"].where(torch.arange(LENGTH) >= 9, NOTHING)  # none in the first segment


def summed(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return tokens_loss(y, t).sum(), (t != -100).sum()


def test_verify_takes_a_batch_without_targets() -> None:
    assert engine_of(summed).verify(TOKENS, target=NOTHING, show=False)


def test_a_step_without_targets_adds_nothing_though_its_sum_is_not_finite() -> None:
    def infinite(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        total, divisor = summed(y, t)
        return total + (y.sum() * 0.0).log(), divisor  # -inf, with gradients that are NaN

    engine = engine_of(infinite)
    with pytest.warns(UserWarning, match="divisors that loss_fn returned in this step are all 0"):
        losses = engine.step(TOKENS, target=NOTHING)
    assert [float(loss) for loss in losses] == [0.0] * 3
    assert gradients_of(engine) and all(not g.any() for g in gradients_of(engine).values())


def mean_that_needs_targets(y: Tensor, t: Tensor) -> Tensor:
    losses = tokens_loss(y, t)[t != -100]
    return losses.mean() + 0.0 * losses.max()  # max raises where there is none


def mean_that_draws(y: Tensor, t: Tensor) -> Tensor:
    return plain(y + 0.0 * torch.rand_like(y), t)


@pytest.mark.parametrize("loss_fn", [mean_that_needs_targets, mean_that_draws])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_mean_is_left_out_where_nothing_counts(loss_fn: Any, recompute: str) -> None:
    """Though it is called once, to see what it returns: neither a NaN comes of it, nor a random number is drawn."""
    engine = engine_of(loss_fn, loss=Loss(weight="targets"), memory=Memory(recompute=recompute))
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        losses = engine.step(TOKENS, target=LATE)
        found.append([*losses, torch.rand(1), *gradients_of(engine).values()])
        for parameter in engine.parameters():
            parameter.grad = None
    assert all(map(torch.equal, *found))
    check(found[0][4:], whole_gradients(make_model(), summed, LATE))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"memory": Memory(recompute="all")}, {"schedule": "seq-zb-h1"}])
def test_losses_of_tokens_have_their_shape_where_nothing_counts(is_first: bool, options: dict[str, Any]) -> None:
    """In the first step and in a later one, in an evaluation too; and other steps are as without it."""
    engine = engine_of(tokens_loss, **options)
    if not is_first:
        engine.step(TOKENS, target=LATE)
    before = gradients_of(engine)
    with pytest.warns(UserWarning, match="no target of this step is counted"):
        found = [engine.step(TOKENS, target=NOTHING), engine.eval(TOKENS, target=NOTHING)]
    for losses in found:
        assert torch.equal(torch.cat(losses), torch.zeros(6, LENGTH, dtype=torch.float64))
    for name, gradient in gradients_of(engine).items():
        assert torch.equal(gradient, before.get(name, torch.zeros_like(gradient)))
    with torch.no_grad():
        wanted = tokens_loss(nn.Sequential(*make_model())(TOKENS), LATE)
    torch.testing.assert_close(torch.cat(engine.step(TOKENS, target=LATE)), wanted)


def test_a_sum_that_cannot_be_computed_without_targets_is_named() -> None:
    with pytest.raises(ValueError, match=r"raised .* for micro-batch 0, segment 0, which has no target, and re"):
        engine_of(lambda y, t: (mean_that_needs_targets(y, t), 1)).step(TOKENS, target=LATE)


# -- the form of a loss ------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "three values": (lambda total, divisor: (total, divisor, divisor), "returned 3 values"),
    "no divisor": (lambda total, divisor: total, "and one loss for others"),
    "a number": (lambda total, divisor: 3.0, "or one value per token, got float"),
    "a list": (lambda total, divisor: [total, divisor], "or one value per token, got list"),
    "a vector": (lambda total, divisor: (total.expand(2), divisor), r"or one value per token, got \(2,\)"),
    "no gradient": (lambda total, divisor: (total.detach(), divisor), "does not require grad"),
    "two divisors": (lambda total, divisor: (total, divisor.expand(2)), r"must be one number, got \(2,\)"),
    "a divisor that is a text": (lambda total, divisor: (total, "many"), "must be one number, got str"),
    "a divisor with a gradient": (lambda total, divisor: (total, total), "requires grad"),
    "NaN": (lambda total, divisor: (total, float("nan")), "sum to nan"),
    "a negative divisor of a micro-batch": (lambda total, divisor: (total, -0.5), "sum to -"),
}


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("name", list(FORMS))
def test_an_error_leaves_gradients_as_they_were(name: str, steps_before: int) -> None:
    """On every rank, bit for bit, where a form is met first in the step's fifth segment; the next step runs."""
    spoil, match = FORMS[name]
    stages = make_model()

    def work(group: Any) -> str:
        calls = [-100]

        def loss_fn(y: Tensor, t: Tensor) -> Any:
            calls[0] += 1
            return spoil(*summed(y, t)) if calls[0] > 4 else summed(y, t)

        stage = stages[group.rank]
        engine = PipelineEngine(stage, num_microbatches=3, num_segments=3, loss_fn=loss_fn, group=group)
        for _ in range(steps_before):
            engine.step(TOKENS, target=LATE)
        for parameter in stage.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        calls[0] = 0
        with pytest.raises((ValueError, PipelineError)) as error:
            engine.step(TOKENS, target=LATE)
        assert all((p.grad == 0.3).all() for p in stage.parameters() if p.grad is not None)
        calls[0] = -100
        engine.step(TOKENS, target=LATE)
        return str(error.value)

    for text in run_ranks(2, work):
        assert re.search(match, text), text


# -- micro-batches with different numbers of targets -----------------------------------------------------------------


def test_the_mean_of_means_is_told_once() -> None:
    stages = make_model()
    with pytest.warns(UserWarning, match="micro-batches count different numbers of targets") as found:
        train(stages, plain, BATCH["ignored"], steps=3)
    texts = [str(warning.message) for warning in found if "count different" in str(warning.message)]
    assert len(texts) == 1
    assert 'Loss(weight="targets")' in texts[0]


@pytest.mark.parametrize(
    ("loss_fn", "target", "options"),
    [
        (plain, "ignored", {"loss": Loss(weight="microbatches")}),
        (plain, "ignored", {"loss": Loss(weight=lambda t: float((t != -100).sum()))}),
        (plain, "ignored", {"call": {"loss_weight": 50.0}}),
        (plain, "padded", {}),
        (lambda y, t: tokens_loss(y, t).sum(), "ignored", {"loss": Loss(reduction="sum")}),
        (plain, "ignored", {"M": 1}),
    ],
)
def test_nothing_is_told_where_it_was_said(loss_fn: Any, target: str, options: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="error"):
        train(make_model(), loss_fn, BATCH[target], **options)


def test_the_look_changes_nothing() -> None:
    """Neither a gradient, nor a random number, nor what is measured, nor a buffer."""
    calls: list[int] = []

    def counting(y: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        return plain(y, t)

    stages = make_model()
    torch.manual_seed(5)
    found = train(stages, counting, BATCH["padded"])
    after_first = len(calls)
    drawn = torch.rand(1)
    for stage in stages:
        stage.zero_grad()
    torch.manual_seed(5)
    again = train(stages, counting, BATCH["padded"], loss=Loss(weight="microbatches"))
    assert torch.equal(drawn, torch.rand(1))
    for mine, theirs in zip(found, again, strict=True):
        assert torch.equal(mine, theirs)
    assert after_first == 9 + 4  # segments of the batch; those of one micro-batch again, and joined


def test_another_form_in_a_later_step_is_named() -> None:
    for forms in ((summed, plain), (plain, summed)):
        form = [forms[0]]
        engine = engine_of(lambda y, t, form=form: form[0](y, t), loss=Loss(weight="targets"))
        engine.step(TOKENS, target=LATE)
        before = gradients_of(engine)
        form[0] = forms[1]
        with pytest.raises(ValueError, match="for some segments or steps, and one loss for others"):
            engine.step(TOKENS, target=LATE)
        assert all(torch.equal(before[name], g) for name, g in gradients_of(engine).items())


def test_no_target_at_all_is_told() -> None:
    stages = make_model()
    with pytest.warns(UserWarning, match="no target of this step is counted"):
        found = train(stages, plain, torch.full_like(BATCH["ignored"], -100), steps=2)
    assert all(not gradient.any() for gradient in found)
