"""Does ``verify(model=)`` compare with the model itself, see what a cut lost, and see nothing where all is right?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from as_found import as_found
from processes import run_processes
from split_parts import HIDDEN, VOCAB, Base, Block
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import Tensor, nn

import seq1f1b
from seq1f1b.checks import verify_model
from seq1f1b.testing import run_ranks

LENGTH, M, K = 18, 2, 3
CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=24)


class Model(nn.Module):
    """A tied decoder with a branch without gradients, an autocast, buffers of both kinds and a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Block(i) for i in range(4))
        self.side, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("gain", torch.full((HIDDEN,), 1.5))
        self.register_buffer("shift", torch.full((HIDDEN,), 0.2), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale, self.grad_of_side, self.autocasts, self.has_norm = 0.7, True, True, True
        self.first, self.last = 0, len(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        if self.first == 0:
            x = (self.words(x) + self.places(seq1f1b.positions(x))) * self.scale
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.grad_of_side):
                side = self.side(x)
            x = x + side
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocasts):
            for block in self.blocks:
                x = block(x)
        if self.last < 4:
            return x
        self.calls += 1
        return self.head((self.norm(x) if self.has_norm else x) * self.gain + self.shift)


def stages_of(model: Model) -> list[Model]:
    """Two stages with values of their own and the model's names, as a careful user writes them."""
    stages = []
    for first, last in ((0, 2), (2, 4)):
        stage = copy.deepcopy(model)
        for i in range(4):
            if not first <= i < last:
                del stage.blocks._modules[str(i)]
        stage.first, stage.last = first, last
        stages.append(stage)
    for name in ("norm", "head", "gain", "shift", "calls"):
        delattr(stages[0], name)
    for name in ("words", "places", "side"):
        delattr(stages[1], name)
    stages[0].tied_parameters = {"words.weight": stages[0].words.weight}
    stages[1].tied_parameters = {"words.weight": stages[1].head.weight}
    return stages


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    model.blocks[1].register_forward_hook(lambda _, args, y: y * 1.1)
    return model


def given() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (M * 2, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, seq1f1b.shift_labels(tokens)


def engine_of(stage: Any, group: Any = None, **options: Any) -> seq1f1b.PipelineEngine:
    given = {"num_microbatches": M, "num_segments": K, "loss_fn": cross_entropy, "group": group, **options}
    return seq1f1b.PipelineEngine(stage, **given)


def verified(model: Any, stages: list[Any], **options: Any) -> Any:
    """verify on ranks that are threads, each given no more than it must be."""
    tokens, target = given()
    last = len(stages) - 1

    def run(group: Any) -> Any:
        is_first = group.rank == 0
        return engine_of(stages[group.rank], group).verify(
            tokens if is_first else None,
            target=target if group.rank == last else None,
            show=False,
            model=model if is_first else None,
            **options,
        )

    results = run_ranks(len(stages), run)
    assert all(str(result) == str(results[0]) for result in results)
    return results[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_right_stages_are_the_model(dtype):
    model = make_model(dtype)
    result = verified(model, stages_of(model))
    assert result, str(result)
    assert any("the model itself on rank 0" in note for note in result.notes)
    assert len(result.parameters) == len(dict(model.named_parameters())) + 1  # the head's copy
    if dtype == torch.float32:
        assert max(result.exact.values()) < 1e-12


# -- ways to lose something of a model ---------------------------------------------------------------------------------


def untied(first: Model, last: Model) -> None:
    for stage in (first, last):
        del stage.tied_parameters


def untied_and_trained(first: Model, last: Model) -> None:
    untied(first, last)
    with torch.no_grad():
        last.head.weight += 0.1


def of(stage: int, path: str, **values: Any) -> Callable[[Model, Model], None]:
    """A fault: attributes of one module have other values."""

    def plant(*stages: Model) -> None:
        for name, value in values.items():
            setattr(stages[stage].get_submodule(path), name, value)

    return plant


# what is planted, and what the result says of it
PLANTED: dict[str, tuple[Callable[[Model, Model], Any], str]] = {
    "no_grad": (of(0, "", grad_of_side=False), "the cut: forwards agree and gradients do not, .* stage 0: side"),
    "scale": (of(0, "", scale=1.0), "the cut: .*is the first module that returns something else"),
    "eps": (of(1, "norm", eps=1e-3), r"the cut: norm \(LayerNorm\) is the first module"),
    "residual": (of(1, "blocks.2", residual=0.9), r"the cut: blocks\.2"),
    "untied": (untied, r"the cut: forwards agree and gradients do not, .*(words|head)\.weight.* lack a tie"),
    "untied and trained": (untied_and_trained, "untied parameters: .*(head|words).weight"),
    "activation": (of(1, "blocks.3", activation=F.relu), r"the cut: blocks\.3\.down \(Linear\)"),
    "dropout": (of(0, "blocks.0.drop", p=0.0), r"dropout: with p = 0\.1 the stages drop \d+ numbers"),
    "mode": (of(1, "blocks.2.drop", training=False), r"dropout: with p = 0\.1 .* the training mode"),
    "final norm": (of(1, "", has_norm=False), r"the cut: head \(Linear\)"),
    "order of blocks": (
        lambda first, last: setattr(first.blocks, "_modules", dict(reversed(first.blocks._modules.items()))),
        r"the cut: blocks\.0",
    ),
    "buffer": (of(1, "", gain=torch.full((HIDDEN,), 1.6)), "buffers: the model has another value, .*: gain"),
    "constant": (of(1, "", shift=torch.full((HIDDEN,), 0.3)), r"the cut: head \(Linear\)"),
    "hook": (lambda first, last: first.blocks[1]._forward_hooks.clear(), r"the cut: blocks\.1 \(Block\)"),
    "autocast": (
        lambda *stages: [setattr(stage, "autocasts", False) for stage in stages],
        r"precision: blocks\.0\.qkv \(Linear\) returns torch.bfloat16 in the model, torch.float32 in its stage",
    ),
    "autocast of a stage": (of(1, "", autocasts=False), r"precision: blocks\.2\.qkv \(Linear\) returns torch.bfloat16"),
    "frozen": (
        lambda first, last: last.get_parameter("blocks.2.up.weight").requires_grad_(False),
        r"frozen parameters: requires_grad differs in the model: blocks\.2\.up\.weight",
    ),
}  # fmt: skip


def test_a_fault_in_segments_keeps_its_own_cause():
    """The stages in a chain are the model; it is the segments that they do not bear."""
    model = make_model()
    for block in model.blocks:
        block.activation = mean_centred
    result = verified(model, stages_of(model))
    assert not result and result.causes[0].startswith("later tokens"), str(result)


def mean_centred(x: Tensor) -> Tensor:
    return F.gelu(x - x.mean(1, keepdim=True))


# -- values ------------------------------------------------------------------------------------------------------------


def test_stages_that_have_trained_give_the_model_their_values():
    model = make_model(torch.float64)
    stages = stages_of(model)
    with torch.no_grad():
        for stage in stages:
            for name, p in stage.named_parameters():
                p *= 1.25 if name not in ("words.weight", "head.weight") else 1.1
        stages[1].gain.mul_(2.0)  # a loop changes it, as it does biases of a router
    result = verified(model, stages)
    assert result, str(result)
    assert any(
        note.startswith("The model had other values, and took the stages': words.weight") for note in result.notes
    )


def test_the_model_is_left_as_it_was():
    model = make_model()
    stages = stages_of(model)
    with torch.no_grad():
        stages[0].side.weight.mul_(2)
    for block in (model.blocks[2], stages[1].get_submodule("blocks.2")):
        block.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with as_found("verify", model, is_put_back=True):
        assert verified(model, stages)


# -- where it runs -----------------------------------------------------------------------------------------------------


def sum_and_divisor(logits: Tensor, target: Tensor) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


@pytest.mark.parametrize(
    ("P", "schedule", "per_rank", "options"),
    [
        (1, "seq1f1b", 1, {}),
        (3, "seq1f1b", 1, {"memory": seq1f1b.Memory(recompute="all")}),
        (2, "seq1f1b-interleaved", 2, {"loss_fn": sum_and_divisor}),
        (2, "seq-zbv", 2, {"loss": seq1f1b.Loss(weight="targets")}),
    ],
)
def test_over_ranks_orders_and_losses(P, schedule, per_rank, options):
    tokens, target = batch(CONFIG, M, LENGTH)
    model = whole_model(CONFIG, torch.float32)
    order = seq1f1b.build_schedule(schedule, num_ranks=P, num_microbatches=M, num_segments=K, stages_per_rank=per_rank)

    def run(group: Any, eps: float) -> Any:
        own = [stage for stage, rank in enumerate(order.rank_of_stage) if rank == group.rank]
        stages = [stage_of(model, CONFIG, stage, order.num_stages) for stage in own]
        for stage in stages:
            if "3" in stage.blocks:
                stage.blocks["3"].norm_1.eps = eps
        engine = engine_of(stages, group, schedule=order, **options)
        return engine.verify(tokens, target=target, show=False, model=model)

    assert all(run_ranks(P, lambda group: run(group, 1e-5)))
    wrong = run_ranks(P, lambda group: run(group, 1e-2))
    assert not any(wrong) and "blocks.3.norm_1 (LayerNorm)" in wrong[0].causes[0]


def in_process(rank: int, world: int, transport: str) -> None:
    model = make_model()
    stage = stages_of(model)[rank]
    tokens, target = given()
    engine = engine_of(stage, transport=transport)
    whole = model if rank == 0 else None
    assert engine.verify(tokens, target=target if rank else None, show=False, model=whole)
    engine.step(tokens, target=target)
    with torch.no_grad():
        for p in stage.parameters():
            p -= 0.1 if p.grad is None else 0.1 * p.grad
    assert engine.verify(tokens, target=target, show=False, model=whole)
    assert engine.verify(tokens, target=target, show=False)
    if rank == 1:
        stage.norm.eps = 1e-2
    result = engine.verify(tokens, target=target, show=False, model=whole)
    assert not result and "norm (LayerNorm)" in result.causes[0], str(result)
    with pytest.raises(ValueError, match="the model has what no stage holds: more"):
        if rank == 0:
            model.more = nn.Parameter(torch.ones(1))
        engine.verify(tokens, target=target, show=False, model=whole)
    assert len(engine.step(tokens, target=target)) == M * rank  # and the engine goes on
    engine.close()


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_processes(transport):
    run_processes(2, in_process, transport)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_stages_of_split_and_a_model_that_shares_their_tensors(is_fresh):
    torch.manual_seed(0)
    model = Base()
    model.head.weight = model.words.weight
    whole = copy.deepcopy(model) if is_fresh else model
    stages = seq1f1b.split(model, 2)
    assert verified(whole, stages)
    assert verified(nn.parallel.DataParallel(whole).module, stages)
    stages[1].get_submodule("blocks.2").activation = F.relu
    assert bool(verified(whole, stages)) == (not is_fresh)  # else it is the model's own block


class Scaled(nn.Module):
    """Takes a keyword argument."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        if first:
            self.words = nn.Embedding(VOCAB, HIDDEN)
        if last:
            self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        if hasattr(self, "words"):
            x = self.words(x).tanh()
        return self.head(x * scale) if hasattr(self, "head") else x


class Head(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, VOCAB))

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output + self.bias, target)


def test_keyword_arguments_of_one_rank_and_a_loss_that_is_a_module():
    """Rank 0 is told what the last rank was given."""
    torch.manual_seed(0)
    model, stages = Scaled(True, True), [Scaled(True, False), Scaled(False, True)]
    for stage in stages:
        stage.load_state_dict(model.state_dict(), strict=False)
    (tokens, target), losses = given(), [Head(), Head()]
    scale = torch.linspace(0.5, 2, LENGTH)[None, :, None].expand(len(tokens), LENGTH, 1)

    def run(group: Any, times: float) -> Any:
        rules = {"arg_rules": {"scale": "slice"}} if group.rank else {}
        engine = engine_of(stages[group.rank], group, loss_fn=losses[group.rank], **rules)
        kwargs = {"scale": scale * times} if group.rank else None
        return engine.verify(tokens, target=target, kwargs=kwargs, show=False, model=None if group.rank else model)

    result = run_ranks(2, lambda group: run(group, 1.0))[1]
    assert result and "loss: bias" in result.parameters, str(result)
    stages[1].head.bias.data += 1.0  # and the values of stages are those of the comparison
    assert run_ranks(2, lambda group: run(group, 2.0))[0]


class Returns(nn.Module):
    """Returns its logits in some form; the last stage returns them in another one."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.words, self.form = nn.Embedding(VOCAB, VOCAB), form

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        return self.form(self.words(x))


@pytest.mark.parametrize(
    ("whole", "stage"),
    [
        (lambda y: (y, None), lambda y: y),
        (lambda y: {"logits": y, "loss": None}, lambda y: y),
        (lambda y: {"logits": y}, lambda y: {"logits": y}),
        (lambda y: (y, y * 2), lambda y: (y, y * 2)),
    ],
)
def test_forms_of_what_a_model_returns(whole, stage):
    torch.manual_seed(0)
    model, only = Returns(whole), Returns(stage)
    only.load_state_dict(model.state_dict())
    tokens, target = given()

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        logits = output["logits"] if isinstance(output, dict) else output
        return sum(cross_entropy(each, target) for each in (logits if isinstance(logits, tuple) else [logits]))

    engine = engine_of(only, seq1f1b.LoopbackGroup(1)[0], loss_fn=loss_fn)
    assert engine.verify(tokens, target=target, show=False, model=model)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Raises(Model):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not here")


# What is done to the model, or given in its place, and what every rank hears
REFUSED: dict[str, tuple[Callable[[Model], Any], str]] = {
    "more": (
        lambda model: setattr(model, "more", nn.Linear(2, 2)),
        "the model has what no stage holds: more.weight, more.bias",
    ),
    "less": (
        lambda model: delattr(model, "side"),
        r"stages hold what the model lacks: side.weight \(stage 0, rank 0\), side.bias",
    ),
    "shape": (
        lambda model: setattr(model, "side", nn.Linear(HIDDEN, HIDDEN + 1)),
        r"side.weight is \(16, 16\) in stage 0, \(17, 16\) in the model",
    ),
    "kind": (lambda model: [model], "rank 0: model must be a torch.nn.Module, the whole one, .* got list"),
    "meta": (lambda model: copy.deepcopy(model).to("meta"), "rank 0: the model lies on the meta device"),
    "on another rank alone": (lambda model: None, r"rank 0: model must be a torch\.nn\.Module, .* got NoneType"),
    "no loss on rank 0": (lambda model: None, r"rank 0: .* give this rank's engine loss_fn, too"),
    "does not run": (lambda model: setattr(model, "__class__", Raises), "the whole model does not run: .*not here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_on_every_rank(name):
    change, text = REFUSED[name]
    model = make_model()
    stages = stages_of(model)
    whole = change(model) or model
    tokens, target = given()

    def run(group: Any) -> int:
        has_loss = name != "no loss on rank 0" or group.rank
        engine = engine_of(stages[group.rank], group, loss_fn=cross_entropy if has_loss else None)
        is_given = group.rank == (name == "on another rank alone")
        with pytest.raises(ValueError, match=text):
            engine.verify(tokens, target=target, show=False, model=whole if is_given else None)
        assert engine.verify(tokens, target=target, show=False)  # and the engine goes on
        return len(engine.step(tokens, target=target))

    assert run_ranks(2, run) == [0, M]


def test_a_model_that_does_not_fit(monkeypatch):
    model = make_model()
    model.autocasts = False
    monkeypatch.setattr(verify_model, "free_bytes", lambda device: 10_000)
    with pytest.raises(ValueError, match="rank 0: the model does not fit beside the stages: values and gradients need"):
        verified(model, stages_of(model))
    need = 5 * 8 * sum(t.numel() for t in {*model.parameters(), *model.buffers()})
    monkeypatch.setattr(verify_model, "free_bytes", lambda device: need)
    result = verified(model, stages_of(model))
    assert result and not result.exact  # in the engine's own dtype
