"""Is what a trace of a forward does not record refused by name, with the line, and is the process left as it was?"""

from __future__ import annotations

import copy
import datetime
import random
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from split_parts import HIDDEN, VOCAB, Plain, model_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import seq1f1b


def whole(self: Any, tokens: Tensor) -> Tensor:
    return Plain.forward(self, tokens)


# -- contexts ----------------------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


CONTEXTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, r"torch.no_grad, torch.enable_grad, torch.set_grad_enabled"),
    "enable_grad": (torch.enable_grad, r"torch.no_grad, torch.enable_grad, torch.set_grad_enabled"),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), "torch.set_grad_enabled"),
    "inference_mode": (torch.inference_mode, "torch.inference_mode"),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "torch.autocast"),
    "autocast of another device": (lambda: torch.autocast("cuda", dtype=torch.bfloat16), "torch.autocast"),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), "torch.autocast"),
    "device": (lambda: torch.device("cpu"), "a mode of torch's functions"),
    "function mode": (Functions, "a mode of torch's functions"),
    "dispatch mode": (Operations, "TorchDispatchMode"),
    "saved tensors": (lambda: torch.autograd.graph.save_on_cpu(), "saved_tensors_hooks"),
    "anomaly": (torch.autograd.detect_anomaly, "set_detect_anomaly"),
    "attention": (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), "sdpa_kernel"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_around_a_part(name: str) -> None:
    make, text = CONTEXTS[name]

    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with make():
            x = self.blocks[0](x)  # the line
        for block in list(self.blocks)[1:]:
            x = x + block(x)
        return self.head(x)

    with pytest.raises(ValueError, match=rf"test_split_watch.py:\d+: .*{text}"):
        seq1f1b.split(model_of(forward), 2)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and not torch.is_anomaly_enabled()


def default_dtype(self: Any, tokens: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return whole(self, tokens)


def deterministic(self: Any, tokens: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    return whole(self, tokens)


def grad_off_at_the_end(self: Any, tokens: Tensor) -> Tensor:
    out = whole(self, tokens)
    torch.set_grad_enabled(False)
    return out


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


def checkpointed_reentrant(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    for block in self.blocks:
        x = x + checkpoint(block, x, use_reentrant=True)
    return self.head(x)


class Trebled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


# -- what forward asks of Python ---------------------------------------------------------------------------------------


def layers_left_out(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    for block in self.blocks:
        if random.random() >= 0.1:
            x = x + block(x)
    return self.head(x)


def layers_left_out_by_torch(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    for block in self.blocks:
        if torch.rand(1) >= 0.1:
            x = x + block(x)
    return self.head(x)


def number_or_one(self: Any, tokens: Tensor) -> Tensor:
    try:
        times = int(tokens.sum() > 0)
    except TypeError:
        times = 1
    return whole(self, tokens) * times


def branch_or_nothing(self: Any, tokens: Tensor) -> Tensor:
    out = whole(self, tokens)
    try:
        return out * 2 if out.sum() > 0 else out
    except Exception:
        return out


def seeded(self: Any, tokens: Tensor) -> Tensor:
    torch.manual_seed(0)
    return whole(self, tokens)


def asserts(self: Any, tokens: Tensor) -> Tensor:
    _, length = tokens.shape
    assert length <= 64, f"{length} tokens"
    return whole(self, tokens)


def loops(self: Any, tokens: Tensor) -> Tensor:
    return sum(whole(self, row) for row in tokens)  # type: ignore[return-value]


def counts(self: Any, tokens: Tensor) -> Tensor:
    self.calls += 1
    return whole(self, tokens)


def keeps(self: Any, tokens: Tensor) -> Tensor:
    self.last = self.embedding(tokens)
    return whole(self, tokens)


def keeps_in_a_buffer(self: Any, tokens: Tensor) -> Tensor:
    self.count = self.count + 1
    return whole(self, tokens)


def assigns_in_place(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    x[:, 0] = 0
    return self.head(self.trunk(x))


def counts_tokens(self: Any, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens)
    return self.head(self.trunk(x + self.places(torch.arange(tokens.shape[1], device=tokens.device))))


def first_rows(self: Any, tokens: Tensor) -> Tensor:
    return self.head(self.trunk(self.embedding(tokens) + self.places.weight[: tokens.size(1)]))


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


LINE = r"split_\w+.py:\d+: .*"
NUMBERS = "draws random numbers in Python, once for all calls"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "default dtype": (lambda: model_of(default_dtype), LINE + "another default dtype"),
    "deterministic algorithms": (lambda: model_of(deterministic), LINE + "use_deterministic_algorithms"),
    "grad mode left off": (lambda: model_of(grad_off_at_the_end), "torch.set_grad_enabled"),
    "decorated": (lambda: model_of(decorated), LINE + "torch.no_grad"),
    "checkpoint": (lambda: model_of(checkpointed), LINE + "torch.utils.checkpoint"),
    "reentrant checkpoint": (lambda: model_of(checkpointed_reentrant), LINE + "torch.utils.checkpoint"),
    "autograd.Function": (
        lambda: model_of(lambda self, tokens: Trebled.apply(whole(self, tokens))),
        LINE + "torch.autograd.Function",
    ),
    "random": (lambda: model_of(layers_left_out), LINE + NUMBERS),
    "random of torch": (lambda: model_of(layers_left_out_by_torch), LINE + "draws random numbers by rand, once"),
    "a mask for each sequence": (
        lambda: model_of(lambda self, x: whole(self, self.embedding(x).new_empty(2, 1, 1).bernoulli_(0.5))),
        LINE + "draws random numbers by bernoulli_",
    ),
    "random of numpy": (lambda: model_of(lambda self, x: whole(self, x) * float(np.random.rand())), LINE + NUMBERS),
    "own generator": (
        lambda: model_of(lambda self, x: whole(self, x) * self.rng.random(), rng=random.Random(0)),
        LINE + "self.rng.random",
    ),
    "own generator of numpy": (
        lambda: model_of(lambda self, x: whole(self, x) * float(self.rng.random()), rng=np.random.default_rng(0)),
        "is another one .* in each call",
    ),
    "seed": (lambda: model_of(seeded), LINE + "changes the state of a generator"),
    "dropout": (
        lambda: model_of(lambda self, x: F.dropout(whole(self, x), 0.1, self.training)),
        r"is another one .*, at .*" + LINE,
    ),
    "clock": (lambda: model_of(lambda self, x: whole(self, x) * time.time()), "is another one .* in each call"),
    "is_grad_enabled": (lambda: model_of(grad_mode_asked), r"with gradients than without \(torch.is_grad_enabled"),
    "is_autocast_enabled": (lambda: model_of(autocast_asked), "under autocast"),
    "assert": (lambda: model_of(asserts), LINE + "an assert, asks .* Leave the assert out"),
    "a number, with a way out": (lambda: model_of(number_or_one), LINE + "asks for a value .* the number"),
    "a branch, with a way out": (lambda: model_of(branch_or_nothing), LINE + "asks for a value"),
    "loop": (lambda: model_of(loops), LINE + "the items of a tensor"),
    "counter": (lambda: model_of(counts, calls=0), "changes 'calls' of Own in each call"),
    "kept": (lambda: model_of(keeps), "changes 'last' of Own in each call"),
    "kept in a buffer": (
        lambda: model_of(keeps_in_a_buffer, count=nn.Buffer(torch.zeros(()))),
        "changes 'count' of Own in each call",
    ),
    "a buffer of two stages": (
        lambda: model_of(several, count=nn.Buffer(torch.zeros(()))),
        "changes buffer count, and stages .* use it",
    ),
    "part of a tensor": (lambda: model_of(assigns_in_place), "assigns to a part of a tensor"),
    "count of tokens": (lambda: model_of(counts_tokens, places=nn.Embedding(32, HIDDEN)), LINE + r".*positions\(x\)"),
    "first rows": (lambda: model_of(first_rows, places=nn.Embedding(32, HIDDEN)), r"seq1f1b.positions\(x\)"),
    "nanoGPT's loss": (lambda: model_of(loss_of_other_logits), "targets .* give the loss as loss_fn"),
    "any number of arguments": (lambda: model_of(many), r"takes \*args"),
    "compiled": (lambda: torch.compile(Plain()), "split takes the model itself, got OptimizedModule"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_does_not_record(name: str) -> None:
    make, text = REFUSED[name]
    model = make()
    before, attributes = copy.deepcopy(model.state_dict()), {module: dict(vars(module)) for module in model.modules()}
    generators = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    with pytest.raises(ValueError, match=text):
        seq1f1b.split(model, at=["blocks.2"] if name != "compiled" else ["_orig_mod.blocks.2"])
    assert {key: tensor.tolist() for key, tensor in model.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in before.items()
    }
    assert {module: dict(vars(module)) for module in model.modules()} == attributes
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (generators[0], generators[2])
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert torch.get_default_dtype() == torch.float32 and not torch.are_deterministic_algorithms_enabled()


# -- modules that the trace enters -------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.last = Plain(), nn.Linear(VOCAB, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.decoder(tokens))


KINDS = {
    "register_forward_hook": {},
    "register_forward_pre_hook": {"with_kwargs": True},
    "register_full_backward_hook": {},
    "register_full_backward_pre_hook": {},
    "register_state_dict_post_hook": {},
    "register_load_state_dict_pre_hook": {},
}


@pytest.mark.parametrize("place", ["", "decoder", "decoder.blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_what_is_divided(kind: str, place: str) -> None:
    model = Outer()
    getattr(model.get_submodule(place), kind)(lambda *_, **__: None, **KINDS[kind])
    with pytest.raises(ValueError, match=r"has hooks, which no stage would run \(.*hooks\): put them on its blocks"):
        seq1f1b.split(model, 2)


@pytest.mark.parametrize("kind", ["register_module_forward_hook", "register_module_full_backward_pre_hook"])
def test_hooks_on_all_modules(kind: str) -> None:
    handle = getattr(nn.modules.module, kind)(lambda *_: None)
    try:
        with pytest.raises(ValueError, match=r"torch has global .* hooks for all modules"):
            seq1f1b.split(Outer(), 2)
    finally:
        handle.remove()


def test_hooks_on_blocks_stay() -> None:
    model = Outer()
    model.decoder.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    model.decoder.blocks[3].register_full_backward_hook(lambda module, given, got: (given[0] * 2,))
    whole, tokens = copy.deepcopy(model), torch.arange(10).view(2, 5)
    first, second = seq1f1b.split(model, 2)
    for out in (second(first(tokens)), whole(tokens)):
        out.sum().backward()
    assert torch.equal(model.decoder.embedding.weight.grad, whole.decoder.embedding.weight.grad)


@pytest.mark.parametrize("place", ["", "decoder"])
def test_a_forward_of_the_instance(place: str) -> None:
    model = Outer()
    module = model.get_submodule(place)
    module.forward = types.MethodType(lambda self, tokens: type(self).forward(self, tokens) * 2, module)
    with pytest.raises(ValueError, match=r"has a forward that was set on the instance"):
        seq1f1b.split(model, 2)


def test_a_block_with_a_forward_of_its_own_stays() -> None:
    model = Plain()
    block = model.blocks[1]
    block.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, block)
    tokens = torch.arange(10).view(2, 5)
    want = model(tokens)
    first, second = seq1f1b.split(model, 2)
    assert torch.equal(second(first(tokens)), want)


NOT_REFUSED = {  # changes no number, or is a value at the cut
    "fork_rng without a draw": lambda self, x: torch.random.fork_rng()(whole)(self, x),
    "a date": lambda self, x: whole(self, x) * datetime.datetime.now().day,
    "the seed of a generator": lambda self, x: whole(self, x) * (1 + self.rng.initial_seed() % 2),
}


@pytest.mark.parametrize("name", NOT_REFUSED)
def test_what_changes_no_number_is_not_refused(name: str) -> None:
    model, tokens = model_of(NOT_REFUSED[name], rng=torch.Generator()), torch.arange(10).view(2, 5)
    first, second = seq1f1b.split(model, 2)
    assert torch.equal(second(first(tokens)), model(tokens))
