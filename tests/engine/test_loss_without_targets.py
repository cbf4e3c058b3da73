"""Does a loss of a sum and a divisor train where segments lack targets? After an error, are gradients as they were?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_model import Attends
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b import Loss, Memory, PipelineEngine
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN = 11, 8


def summed(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(y.transpose(1, 2), t, ignore_index=-100, reduction="none")
    return losses.sum(), (t != -100).sum()


def with_z_loss(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """A term over all tokens, targets or not."""
    total, divisor = summed(y, t)
    return total + 0.1 * y.logsumexp(-1).square().sum(), divisor


def over_all_tokens(y: Tensor, t: Tensor) -> tuple[Tensor, float]:
    total, _ = with_z_loss(y, t)
    return total, float(t.numel())


def leaves_early(y: Tensor, t: Tensor) -> tuple[Tensor, int]:
    if not bool((t != -100).any()):
        return y.new_zeros(()), 0
    total, divisor = summed(y, t)
    return total, int(divisor)


LOSSES = [summed, with_z_loss, over_all_tokens, leaves_early]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), Attends(HIDDEN, 0), nn.Linear(HIDDEN, VOCAB)).double()


def make_engine(loss_fn: Any, **options: Any) -> PipelineEngine:
    return PipelineEngine(make_model(), num_microbatches=2, num_segments=3, loss_fn=loss_fn, **options)


def make_batch(*, first: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which so many first ones count nothing."""
    made = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, 4, 12), generator=made)
    labels[:, :first] = -100
    return tokens, labels


def gradients_of(engine: PipelineEngine) -> dict[str, Tensor]:
    return {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("first", [4, 12])
def test_verify(loss_fn: Any, first: int) -> None:
    tokens, labels = make_batch(first=first)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the divisors that loss_fn returned in this step are all 0")
        found = make_engine(loss_fn).verify(tokens, target=labels, show=False)
    assert found.ok, str(found)


def test_a_step_without_targets_adds_nothing_though_its_sum_is_not_finite() -> None:
    def infinite(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        total, divisor = summed(y, t)
        return total + (y.sum() * 0.0).log(), divisor  # -inf, with gradients that are NaN

    tokens, labels = make_batch(first=12)
    engine = make_engine(infinite)
    with pytest.warns(UserWarning, match="divisors that loss_fn returned in this step are all 0"):
        losses = engine.step(tokens, target=labels)
    assert [float(loss) for loss in losses] == [0.0, 0.0]
    assert gradients_of(engine) and all(not g.any() for g in gradients_of(engine).values())


def mean_of_targets(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), t)


def mean_that_needs_targets(y: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(y.transpose(1, 2), t, reduction="none")[t != -100]
    return losses.mean() + 0.0 * losses.max()  # max raises where there is none


def mean_that_draws(y: Tensor, t: Tensor) -> Tensor:
    return mean_of_targets(y + 0.0 * torch.rand_like(y), t)


@pytest.mark.parametrize("loss_fn", [mean_of_targets, mean_that_needs_targets, mean_that_draws])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_mean_is_left_out_where_nothing_counts(loss_fn: Any, recompute: str) -> None:
    """Though it is called once, to see what it returns: neither a NaN comes of it, nor a random number is drawn."""
    tokens, labels = make_batch()
    engine = make_engine(loss_fn, loss=Loss(weight="targets"), memory=Memory(recompute=recompute))
    torch.manual_seed(3)
    first = engine.step(tokens, target=labels)
    drawn = torch.rand(1)
    gradients = {name: g.clone() for name, g in gradients_of(engine).items()}
    for _, parameter in engine.named_parameters():
        parameter.grad = None
    torch.manual_seed(3)
    assert [float(x) for x in first] == [float(x) for x in engine.step(tokens, target=labels)]
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(g, gradients[name]) for name, g in gradients_of(engine).items())
    whole = make_model()
    mean_of_targets(whole(tokens), labels).backward()
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def of_tokens(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), t, reduction="none")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"memory": Memory(recompute="all")}, {"schedule": "seq-zb-h1"}])
def test_losses_of_tokens_have_their_shape_where_nothing_counts(is_first: bool, options: dict[str, Any]) -> None:
    """In the first step and in a later one, in an evaluation too; and other steps are as without it."""
    engine, (tokens, labels), (_, nothing) = make_engine(of_tokens, **options), make_batch(), make_batch(first=12)
    if not is_first:
        engine.step(tokens, target=labels)
    before = {name: g.clone() for name, g in gradients_of(engine).items()}
    with pytest.warns(UserWarning, match="no target of this step is counted"):
        found = [engine.step(tokens, target=nothing), engine.eval(tokens, target=nothing)]
    for losses in found:
        assert [loss.dtype for loss in losses] == [torch.float64] * 2
        assert torch.equal(torch.cat(losses), torch.zeros(4, 12, dtype=torch.float64))
    for name, gradient in gradients_of(engine).items():
        assert torch.equal(gradient, before.get(name, torch.zeros_like(gradient)))
    with torch.no_grad():
        wanted = of_tokens(make_model()(tokens), labels)
    torch.testing.assert_close(torch.cat(engine.step(tokens, target=labels)), wanted)


def test_a_sum_that_cannot_be_computed_without_targets_is_named() -> None:
    def needs_targets(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(y.transpose(1, 2), t, reduction="none")[t != -100]
        return losses.sum() + 0.0 * losses.max(), (t != -100).sum()

    tokens, labels = make_batch()
    with pytest.raises(ValueError, match=r"raised .* for micro-batch 0, segment 0, which has no target, and re"):
        make_engine(needs_targets).step(tokens, target=labels)


# -- the form of a loss ------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "three values": (lambda total, divisor: (total, divisor, divisor), "returned 3 values"),
    "no divisor": (lambda total, divisor: total, "and one loss for others"),
    "a number": (lambda total, divisor: 3.0, "or one value per token, got float"),
    "a list": (lambda total, divisor: [total, divisor], "or one value per token, got list"),
    "a vector": (lambda total, divisor: (total.expand(2), divisor), r"or one value per token, got \(2,\)"),
    "no gradient": (lambda total, divisor: (total.detach(), divisor), "does not require grad"),
    "two divisors": (lambda total, divisor: (total, divisor.expand(2)), r"must be one number, got \(2,\)"),
    "a divisor with a gradient": (lambda total, divisor: (total, total), "requires grad"),
    "NaN": (lambda total, divisor: (total, float("nan")), "sum to nan"),
    "a negative divisor of a micro-batch": (lambda total, divisor: (total, -0.5), "sum to -"),
}


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("name", list(FORMS))
def test_an_error_leaves_gradients_as_they_were(name: str, steps_before: int) -> None:
    """On every rank, bit for bit, where a form is met first in the step's fifth segment; the next step runs."""
    spoil, match = FORMS[name]
    tokens, labels = make_batch()
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Embedding(VOCAB, HIDDEN), Attends(HIDDEN, 0)).double(),
        nn.Sequential(Attends(HIDDEN, 1), nn.Linear(HIDDEN, VOCAB)).double(),
    ]

    def work(group: Any) -> str:
        calls = [-100]

        def loss_fn(y: Tensor, t: Tensor) -> Any:
            calls[0] += 1
            return spoil(*summed(y, t)) if calls[0] > 4 else summed(y, t)

        stage = stages[group.rank]
        engine = PipelineEngine(stage, num_microbatches=2, num_segments=3, loss_fn=loss_fn, group=group)
        for _ in range(steps_before):
            engine.step(tokens, target=labels)
        for parameter in stage.parameters():
            parameter.grad = torch.randn_like(parameter)
        before = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
        calls[0] = 0
        with pytest.raises((ValueError, seq1f1b.PipelineError)) as error:
            engine.step(tokens, target=labels)
        for parameter, gradient in zip(stage.parameters(), before, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
        calls[0] = -100
        engine.step(tokens, target=labels)
        return str(error.value)

    for text in run_ranks(2, work):
        assert re.search(match, text), text


def test_another_form_in_a_later_step_is_named() -> None:
    tokens, labels = make_batch()
    for forms in ((summed, mean_of_targets), (mean_of_targets, summed)):
        forms_left = iter(forms)
        form = [next(forms_left)]
        engine = make_engine(lambda y, t, form=form: form[0](y, t), loss=Loss(weight="targets"))
        engine.step(tokens, target=labels)
        before = {name: g.clone() for name, g in gradients_of(engine).items()}
        form[0] = next(forms_left)
        with pytest.raises(ValueError, match="for some segments or steps, and one loss for others"):
            engine.step(tokens, target=labels)
        assert all(torch.equal(before[name], g) for name, g in gradients_of(engine).items())
