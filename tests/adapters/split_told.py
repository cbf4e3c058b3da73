"""Models that split refuses, by the trace of their forward or by values, and what a message of it says; and others
whose user changes something after the cut, or which look like those."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from split_parts import HIDDEN, Plain, model_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LEVELS = {"a": 1.0}


def whole(self: Any, tokens: Tensor) -> Tensor:
    return Plain.forward(self, tokens)


# -- contexts ----------------------------------------------------------------------------------------------------------


VALUES = "do not compute what it does"
CONTEXTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, VALUES),
    "enable_grad": (torch.enable_grad, ""),
    "inference_mode": (torch.inference_mode, "does not run: .*Inference tensors"),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "does not run: .*the same dtype"),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), ""),
}


def under(make: Callable[[], Any]) -> nn.Module:
    """A context around a part."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with make():
            x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = x + block(x)
        return self.head(x)

    return model_of(forward)


def decorated(self: Any, tokens: Tensor) -> Tensor:
    return self.head(self.trunk(embed(self, tokens)))


@torch.no_grad()
def embed(self: Any, tokens: Tensor) -> Tensor:
    return self.embedding(tokens)


def checkpointed(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    for block in self.blocks:
        x = x + checkpoint(block, x, use_reentrant=False)
    return self.head(x)


class Trebled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


# -- what forward asks of Python ---------------------------------------------------------------------------------------


def layers_left_out(draw: Callable[[], Any]) -> nn.Module:
    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if draw() >= 0.1:
                x = x + block(x)
        return self.head(x)

    return model_of(forward)


def seeded(self: Any, tokens: Tensor) -> Tensor:
    torch.manual_seed(0)
    return whole(self, tokens)


def asserts(self: Any, tokens: Tensor) -> Tensor:
    _, length = tokens.shape
    assert length <= 64, f"{length} tokens"
    return whole(self, tokens)


def counts(self: Any, tokens: Tensor) -> Tensor:
    self.calls += 1
    return whole(self, tokens)


def keeps_in_a_buffer(self: Any, tokens: Tensor) -> Tensor:
    self.count = self.count + 1
    return whole(self, tokens)


def counts_tokens(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    return self.head(self.trunk(x + self.places(torch.arange(tokens.shape[1], device=tokens.device))))


def loss_of_other_logits(self: Any, tokens: Tensor, targets: Tensor | None = None) -> Any:
    x = self.trunk(self.embedding(tokens))
    if targets is not None:
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
    return self.head(x[:, [-1], :]), None


def many(self: Any, *tokens: Tensor) -> Tensor:
    return whole(self, tokens[0])


def several(self: Any, tokens: Tensor) -> Tensor:
    """Changes a buffer in the first stage that the last one reads."""
    self.count.add_(1)
    return whole(self, tokens) * self.count


def grad_mode_asked(self: Any, tokens: Tensor) -> Tensor:
    return whole(self, tokens) * (2 if torch.is_grad_enabled() else 1)


def autocast_asked(self: Any, tokens: Tensor) -> Tensor:
    return whole(self, tokens) * (2 if torch.is_autocast_enabled("cpu") else 1)


NUMBERS = "draws random numbers in Python, once for all calls"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "decorated": (lambda: model_of(decorated), VALUES),
    "checkpoint": (lambda: model_of(checkpointed), r"calls torch.utils.checkpoint: .*Memory\(recompute="),
    "autograd.Function": (
        lambda: model_of(lambda self, tokens: Trebled.apply(whole(self, tokens))),
        rf"{VALUES}.*: the gradient of \S+ is off by",
    ),
    "random": (lambda: layers_left_out(random.random), NUMBERS),
    "random of torch": (lambda: layers_left_out(lambda: torch.rand(1)), "draws random numbers by rand, once"),
    "a mask for each sequence": (
        lambda: model_of(lambda self, x: whole(self, self.embedding(x).new_empty(2, 1, 1).bernoulli_(0.5))),
        "draws random numbers by bernoulli_",
    ),
    "own generator": (
        lambda: model_of(lambda self, x: whole(self, x) * self.rng.random(), rng=random.Random(0)),
        VALUES,
    ),
    "seed": (lambda: model_of(seeded), "changes the state of a generator"),
    "dropout": (
        lambda: model_of(lambda self, x: F.dropout(whole(self, x), 0.1, self.training)),
        VALUES,
    ),
    "is_grad_enabled": (lambda: model_of(grad_mode_asked), "evaluation mode without gradients"),
    "is_autocast_enabled": (lambda: model_of(autocast_asked), "evaluation mode under autocast"),
    "assert": (lambda: model_of(asserts), "cannot be traced: TraceError.* Leave asserts out"),
    "counter": (lambda: model_of(counts, calls=0), "changes 'calls' of Own in each call"),
    "kept in a buffer": (
        lambda: model_of(keeps_in_a_buffer, count=nn.Buffer(torch.zeros(()))),
        "changes 'count' of Own in each call",
    ),
    "a buffer of two stages": (
        lambda: model_of(several, count=nn.Buffer(torch.zeros(()))),
        VALUES,
    ),
    "count of tokens": (lambda: model_of(counts_tokens, places=nn.Embedding(32, HIDDEN)), r"seq1f1b.positions"),
    "nanoGPT's loss": (lambda: model_of(loss_of_other_logits), "output 0 has shape"),
    "any number of arguments": (lambda: model_of(many), r"takes \*args"),
    "compiled": (lambda: torch.compile(Plain()), "split takes the model itself, got OptimizedModule"),
}  # fmt: skip


# -- what the trace of a model's own code leaves out -------------------------------------------------------------------


HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_hook": lambda module, args, output: output * 2,
    "register_full_backward_pre_hook": lambda module, gradients: tuple(2 * each for each in gradients),
}


def hooked(kind: str) -> nn.Module:
    model = Plain()
    getattr(model, kind)(HOOKS[kind])
    return model


def with_own_forward() -> nn.Module:
    model = Plain()
    model.forward = types.MethodType(lambda self, tokens: type(self).forward(self, tokens) * 2, model)
    return model


# -- what only values tell ---------------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Leaves a loss as an attribute, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux = nn.Linear(HIDDEN, HIDDEN), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return self.linear(x)


class Remembering(nn.Module):
    """The first block leaves a value that later ones add, in a dict that all of them hold."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.linear, self.values = nn.Linear(HIDDEN, HIDDEN), values

    def forward(self, x: Tensor) -> Tensor:
        if "first" not in self.values:
            self.values["first"] = x.detach()
        return self.linear(x) + self.values["first"]


def with_aux(self: Any, tokens: Tensor) -> Tensor:
    out = Plain.forward(self, tokens)
    return out + sum(block.aux for block in self.blocks)


def noting() -> Any:
    return model_of(with_aux, blocks=nn.ModuleList(Noting() for _ in range(4)))


def remembering() -> Any:
    class Forgetting(Plain):
        def forward(self, tokens: Tensor) -> Any:
            return super().forward(self.reset(tokens))

    values: dict[str, Tensor] = {}
    model = Forgetting()
    model.reset = Resetting(values)
    model.blocks = nn.ModuleList(Remembering(values) for _ in range(4))
    return model


class Resetting(nn.Module):
    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def forward(self, tokens: Tensor) -> Tensor:
        self.values.clear()
        return tokens


# What only values tell
TOLD_BY_VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    **{f"{kind} of the model": (partial(hooked, kind), VALUES) for kind in HOOKS},
    "an own forward of the model": (with_own_forward, VALUES),
    "a loss in a block": (
        noting, r"do not compute what it does, on token ids of shape \(2, 8\), in training mode: output 0 is off by",
    ),
    # the second stage of another process would take the first one's input for the first block's
    "a dict of two stages": (remembering, r"do not compute what it does.*: output 0 is off by"),
}  # fmt: skip


# -- what forward reads of Python --------------------------------------------------------------------------------------


def scaled_by(read: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, tokens: Plain.forward(self, tokens) * read(self)


READS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Any], None]]] = {
    "attribute": (scaled_by(lambda m: m.scale), {"scale": 1.0}, lambda m: setattr(m, "scale", 2.0)),
    "global": (scaled_by(lambda m: LEVELS["a"]), {}, lambda m: LEVELS.update(a=5.0)),
}  # fmt: skip


def reading(name: str) -> nn.Module:
    """A model that reads something of Python, as it is before the change."""
    LEVELS["a"] = 1.0
    forward, attributes, _ = READS[name]
    return model_of(forward, **copy.deepcopy(attributes))
