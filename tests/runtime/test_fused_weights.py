"""Weight gradients that a product adds in one call: equal to autograd's, and autograd's own wherever somebody waits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from order_runs import CONFIG, LENGTH, SIZES, few_cases, run_order
from slices import by_family, slice_of
from tiny_model import batch, gradient_error, run_whole, whole_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from wide_products import Shape, wide_products

from seq1f1b import Memory, PipelineEngine, build_schedule
from seq1f1b.runtime import embedding, products
from seq1f1b.runtime.layers import Layers

M, K, TOKENS, HIDDEN = 2, 2, 6, 8
UNITS = M * K


@pytest.fixture
def calls() -> Iterator[list[Shape]]:
    """Every product that was added to a float32 gradient in one call: (tokens, inputs, outputs)."""
    with wide_products() as found:
        assert products.are_one_call(torch.device("cpu"))  # which computes one of each dtype
        del found[:]
        yield found


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def engine_of(module: nn.Module, **options: Any) -> PipelineEngine:
    options = {"num_segments": K, "loss_fn": mean_of_squares, "attention": "any"} | options
    return PipelineEngine(module, num_microbatches=M, **options)


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(2 * M, TOKENS, HIDDEN, dtype=dtype), torch.zeros(2 * M, TOKENS, HIDDEN)


def gradients(module: nn.Module, **options: Any) -> dict[str, Tensor]:
    """The gradients of one step."""
    x, target = data(next(module.parameters()).dtype)
    engine = engine_of(module, **options)
    engine.step(x, target=target)
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def compare(make: Callable[[], nn.Module], *, tolerance: float = 2e-2, **options: Any) -> PipelineEngine:
    """A step of the 16-bit model beside float64, run whole by torch. Returns the engine."""
    torch.manual_seed(0)
    exact = make().double()
    module = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(module.state_dict())
    x, target = data(torch.bfloat16)
    for one, wanted in zip(x.double().chunk(M), target.double().chunk(M), strict=True):
        ((exact(one) - wanted).square().mean() / M).backward()
    engine = engine_of(module, **options)
    engine.step(x, target=target)
    truth = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert gradient_error(found, truth) <= tolerance
    return engine


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN))


# -- every family ------------------------------------------------------------------------------------------------------

GRID = [own[0] for own in by_family(sorted(few_cases(5)))]


@pytest.mark.parametrize(("name", "P", "M", "k", "v", "uneven"), GRID)
def test_every_family(calls: list[Shape], name: str, P: int, M: int, k: int, v: int, uneven: bool) -> None:
    """No further from the whole model in float64 than the same model run whole by torch in bfloat16."""
    check_family(calls, torch.bfloat16, name, P, M, k, v, uneven)
    layers = sum(isinstance(part, nn.Linear) for part in whole_model(CONFIG).modules())
    assert len(calls) == M * k * layers  # one for each layer and unit


@pytest.mark.parametrize(("name", "P", "M", "k", "v", "uneven"), slice_of(GRID, GRID[::2]))
def test_every_family_in_float64(calls: list[Shape], name: str, P: int, M: int, k: int, v: int, uneven: bool) -> None:
    """As the whole model."""
    check_family(calls, torch.float64, name, P, M, k, v, uneven)
    assert calls == []  # of one dtype: no wide result


@pytest.mark.full
@pytest.mark.parametrize(("name", "P", "M", "k", "v", "uneven"), GRID)
def test_every_family_in_float32(calls: list[Shape], name: str, P: int, M: int, k: int, v: int, uneven: bool) -> None:
    check_family(calls, torch.float32, name, P, M, k, v, uneven)


def check_family(
    calls: list[Shape], dtype: torch.dtype, name: str, P: int, M: int, k: int, v: int, uneven: bool
) -> None:
    schedule = build_schedule(name, num_ranks=P, num_microbatches=M, num_segments=k, stages_per_rank=v)
    tokens, target = batch(CONFIG, M, LENGTH)
    model = whole_model(CONFIG, dtype)
    exact = run_whole(copy.deepcopy(model).double(), tokens, target, M)[1]
    whole = gradient_error(run_whole(model, tokens, target, M)[1], exact)
    found = run_order(model, schedule, tokens, target, sizes=SIZES[k] if uneven else None)[1]
    assert gradient_error(found, exact) <= max(1e-10 if dtype == torch.float64 else 0.0, 1.5 * whole)


# -- one call, and only where nobody waits -----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
def test_one_call_for_each_layer_and_unit(calls: list[Shape], schedule: str) -> None:
    engine = compare(mlp, schedule=schedule)
    tokens = 2 * TOKENS // K
    assert sorted(calls) == sorted([(tokens, HIDDEN, 12), (tokens, 12, HIDDEN)] * UNITS)
    (stage,) = engine.report().stages
    assert stage.fused_weights == 2 * 12 * HIDDEN < stage.trained_weights
    assert stage.deferred_weights == (stage.fused_weights if schedule == "seq-zb-h1" else 0)


def test_autograd_does_it_without_the_op() -> None:
    """On the CPU, whose engines go on as ever."""
    engine = compare(mlp)
    assert engine.report().stages[0].fused_weights == 0


def test_a_step_whose_only_addition_is_a_fused_one_keeps_its_gradient(calls: list[Shape]) -> None:
    """A gradient that nothing was added to counts as none."""
    compare(lambda: nn.Linear(HIDDEN, HIDDEN, bias=False), num_segments=1)
    assert len(calls) == M


class Head(nn.Module):
    """A loss that holds the output layer, ten times as wide as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, 10 * HIDDEN)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.out(output).float().square().mean()


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
@pytest.mark.parametrize("memory", [Memory(), Memory(recompute="all")])
def test_heads(calls: list[Shape], schedule: str, memory: Memory) -> None:
    """Wide ones in a stage, and those within the loss, add their products in whole backwards, and before W too."""

    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        stage, head = mlp().append(nn.Linear(HIDDEN, 10 * HIDDEN)).append(nn.Linear(10 * HIDDEN, HIDDEN)), Head()
        both = nn.ModuleList([stage, head]).bfloat16()
        x, target = data(torch.bfloat16)
        engine_of(stage, loss_fn=head, schedule=schedule, memory=memory).step(x, target=target)
        return {name: p.grad for name, p in both.named_parameters()}

    fused = run()
    assert len(calls) == 5 * UNITS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        assert gradient_error(fused, run()) <= 1e-2
    assert len(calls) == 5 * UNITS


def with_tensor_hook(module: nn.Module) -> Any:
    module[0].weight.register_hook(lambda gradient: 3 * gradient)


def with_post_hook(module: nn.Module) -> Any:
    def double(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(2)

    module[0].weight.register_post_accumulate_grad_hook(double)


def with_node_hook(module: nn.Module) -> Any:
    node = get_gradient_edge(module[0].weight).node
    seen: list[int] = []
    node.register_hook(lambda *_: seen.append(1))
    return node, seen


@pytest.mark.parametrize("add", [with_tensor_hook, with_post_hook, with_node_hook])
def test_hooks_see_what_autograd_accumulates(calls: list[Shape], add: Callable[[nn.Module], Any]) -> None:
    def run() -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(0)
        module = mlp().bfloat16()
        kept = add(module)
        return gradients(module), kept

    found, kept = run()
    assert len(calls) == UNITS  # of the other layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        truth, others = run()
    assert gradient_error(found, truth) <= 1e-2
    assert kept is None or kept[1] == others[1] == [1] * UNITS


def test_a_hook_between_forward_and_backward(calls: list[Shape]) -> None:
    """Autograd accumulates, with a gradient for the hook, though the forward had chosen otherwise."""
    seen = []

    class Hooking(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if not seen:
                self[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
            seen.append(None)
            return output

    engine = engine_of(Hooking(nn.Linear(HIDDEN, HIDDEN)).bfloat16(), schedule="gpipe", num_segments=1)
    x, target = data(torch.bfloat16)
    engine.step(x, target=target)
    assert seen.count((HIDDEN, HIDDEN)) == M and not calls


class Own(nn.Linear):
    pass


class Various(nn.Module):
    """Layers that autograd alone knows, one whose weight an embedding shares, and one that nothing keeps from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(HIDDEN, HIDDEN)
        self.tied = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.tied.weight = self.embedding.weight
        self.own, self.frozen = Own(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
        self.experts = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.own(self.frozen(x))) + self.embedding.weight.sum(0)
        return self.normed(x + (x @ self.experts[0]) * (x @ self.experts[1]))


def test_what_is_no_plain_layer(calls: list[Shape]) -> None:
    compare(Various)
    assert len(calls) == UNITS  # the tied one, whose other use autograd adds to the same gradient


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_repeats_the_choice(calls: list[Shape], use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(HIDDEN, HIDDEN), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=use_reentrant)

    compare(Checkpointed)
    assert len(calls) == 3 * UNITS


def inside(module: nn.Module, x: Tensor, of: str) -> Tensor:
    y = module.layer(x.requires_grad_())
    if of == "input":
        return y + torch.autograd.grad(y.float().sum(), x, retain_graph=True)[0]
    if of == "weight":
        return y + torch.autograd.grad(y.float().sum(), module.layer.weight, retain_graph=True)[0].sum()
    if of == "backward":
        module.layer(x.detach()).float().square().mean().backward()
        return y
    slope = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)[0]  # a gradient penalty
    return y + slope.square()


class Inside(nn.Module):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(HIDDEN, HIDDEN), of

    def forward(self, x: Tensor) -> Tensor:
        return inside(self, x, self.of)


@pytest.mark.parametrize(("of", "added"), [("input", 1), ("weight", 1), ("backward", 2), ("penalty", 1)])
def test_gradients_that_a_stage_takes_in_its_forward(calls: list[Shape], of: str, added: int) -> None:
    """They are autograd's; and nothing is added for a gradient that goes elsewhere than to the weight's own."""

    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        return gradients(Inside(of).bfloat16())

    found = run()
    assert len(calls) == added * UNITS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        assert gradient_error(found, run()) <= 1e-2


def test_a_weight_that_is_replaced_in_the_forward(calls: list[Shape]) -> None:
    """The gradient goes to the weight that the forward has read."""
    read = []

    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            read.append(self.layer.weight)
            y = self.layer(x)
            if len(read) == UNITS:
                self.layer.weight = nn.Parameter(torch.zeros(HIDDEN, HIDDEN, dtype=x.dtype))
            return y

    module = Replacing().bfloat16()
    x, target = data(torch.bfloat16)
    engine_of(module, schedule="gpipe", grad_dtype=None).step(x, target=target)
    assert read[0].grad is not None and module.layer.weight.grad is None


def test_gradients_add_up_over_steps(calls: list[Shape]) -> None:
    torch.manual_seed(0)
    module = mlp().bfloat16()
    once = gradients(module)
    twice = gradients(module)
    assert gradient_error(twice, {name: 2 * gradient for name, gradient in once.items()}) <= 1e-2


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
def test_autocast(calls: list[Shape], schedule: str) -> None:
    """Operands are cast first; gradients are the weights', in float32."""
    torch.manual_seed(0)
    module = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(module, schedule=schedule)
    assert len(calls) == 2 * UNITS and all(gradient.dtype == torch.float32 for gradient in found.values())
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        assert gradient_error(found, gradients(module, schedule=schedule)) <= 1e-2


class Several(nn.Module):
    """One layer with the weights of several: given by ``functional_call``, or swapped."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(HIDDEN, HIDDEN), how
        self.others = nn.ParameterList([nn.Parameter(torch.randn(HIDDEN, HIDDEN)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer.weight
        for other in self.others:
            if self.how == "functional_call":
                x = x + functional_call(self.layer, {"weight": other}, (x.tanh(),))
            else:
                self.layer.weight = other
                x = x + self.layer(x.tanh())
        self.layer.weight = own
        return self.layer(x)


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
@pytest.mark.parametrize("how", ["functional_call", "swap"])
def test_autocast_casts_each_weight_of_a_layer(calls: list[Shape], schedule: str, how: str) -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(Several(how), schedule=schedule)

    found = run()
    assert len(calls) == 3 * UNITS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        schedule = "seq1f1b"
        assert gradient_error(found, run()) <= 1e-2


def test_gradients_in_the_parameters_dtype(calls: list[Shape]) -> None:
    compare(mlp, grad_dtype=None)
    assert not calls


def test_experts_without_tokens(calls: list[Shape]) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.some(x) + self.none(x.flatten(0, 1)[:0]).sum()

    compare(Experts)
    assert len(calls) == UNITS


# -- embeddings --------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A table that is many times as long as a unit has tokens."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).relu()


TABLES = {
    "many rows": (400, {}),
    "few rows": (20, {}),
    "padding": (400, {"padding_idx": 3}),
    "padding of few": (20, {"padding_idx": 3}),
    "scaled by frequency": (400, {"scale_grad_by_freq": True}),
    "clipped": (400, {"max_norm": 1.0}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("which", TABLES)
def test_embeddings_add_the_rows_of_their_tokens(calls: list[Shape], which: str, dtype: torch.dtype) -> None:
    """As autograd does, which makes the whole table's gradient; over two steps, with tokens that come often."""
    rows, options = TABLES[which]
    torch.manual_seed(0)
    x = torch.randint(rows, (2 * M, TOKENS))
    x[:, ::3] = 3
    x[:, 1] = 0
    x[0] = rows - 1
    target = torch.zeros(2 * M, TOKENS, HIDDEN)

    def run() -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        module = Words(rows, **options).to(dtype)
        engine = engine_of(module)
        for _ in range(2):
            engine.step(x, target=target)
        return {name: p.grad for name, p in module.named_parameters()}, engine.report().stages[0].fused_weights

    found, fused = run()
    assert fused == (0 if which in ("scaled by frequency", "clipped") else rows * HIDDEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        truth, _ = run()
    assert gradient_error(found, truth) <= (1e-12 if dtype == torch.float64 else 1e-2)
    assert torch.equal(found["table.weight"].ne(0), truth["table.weight"].ne(0))


def test_a_sparse_embedding_is_autograds(calls: list[Shape]) -> None:
    module = Words(400, sparse=True)
    engine_of(module).step(torch.randint(400, (2 * M, TOKENS)), target=torch.zeros(2 * M, TOKENS, HIDDEN))
    assert module.table.weight.grad is not None and module.table.weight.grad.is_sparse


def test_a_table_that_the_head_shares(calls: list[Shape]) -> None:
    """Both add to one gradient."""

    class Both(Words):
        def __init__(self) -> None:
            super().__init__(400)
            self.head = nn.Linear(HIDDEN, 400, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x))

    def run(schedule: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module, x = Both().bfloat16(), torch.randint(400, (2 * M, TOKENS))
        engine_of(module, schedule=schedule).step(x, target=torch.zeros(2 * M, TOKENS, 400))
        return {name: p.grad for name, p in module.named_parameters()}

    found = {schedule: run(schedule) for schedule in ("seq1f1b", "seq-zb-h1")}
    assert len(calls) == 2 * UNITS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        for schedule, gradient in found.items():
            assert gradient_error(gradient, run(schedule)) <= 1e-2


# -- data parallelism, compiled code -----------------------------------------------------------------------------------


@pytest.fixture
def one_replica(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("where", ["the stage", "a part of it"])
def test_ddp_sees_what_autograd_accumulates(calls: list[Shape], one_replica: None, where: str) -> None:
    stage = mlp().bfloat16()
    if where == "the stage":
        gradients(DistributedDataParallel(stage))
        assert not calls
    else:
        outer = nn.Sequential(DistributedDataParallel(stage), nn.Linear(HIDDEN, HIDDEN).bfloat16())
        with outer[0].no_sync():
            gradients(outer)
        assert len(calls) == UNITS  # of the layer outside


def test_fsdp2_sees_what_autograd_accumulates(calls: list[Shape], one_replica: None) -> None:
    from torch.distributed.fsdp import fully_shard

    stage = mlp().append(nn.Linear(HIDDEN, HIDDEN)).bfloat16()
    places = {place.name: place.adds for place in _places_of(stage)}
    fully_shard(stage[0])
    assert places == {"0": True, "2": True, "3": True}
    assert {place.name: place.adds for place in _places_of(stage)} == {"2": True, "3": True}


def _places_of(module: nn.Module) -> Any:
    from seq1f1b.runtime.layers import _places

    return _places(module, ())


@pytest.mark.parametrize("how", ["module", "forward", "method", "class"])
def test_compiled_layers_are_left_alone_and_compiled_once(calls: list[Shape], how: str) -> None:
    """As many graphs as engines make that add nothing themselves, over steps and evaluations."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

        def run(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

    def graphs() -> tuple[list[int], int]:
        torch._dynamo.reset()
        counter, block = CompileCounterWithBackend("eager"), Block()
        if how == "module":
            block.compile(backend=counter)
        elif how == "forward":
            block.forward = torch.compile(block.forward, backend=counter)  # type: ignore[method-assign]
        elif how == "method":
            block.run = torch.compile(block.run, backend=counter)  # type: ignore[method-assign]
        else:
            Block.run = torch.compile(Block.run, backend=counter)  # type: ignore[method-assign]
        stage = nn.Sequential(block, nn.Linear(HIDDEN, HIDDEN)).bfloat16()
        engine, (x, target), found = engine_of(stage), data(torch.bfloat16), []
        for _ in range(3):
            engine.step(x, target=target)
            engine.eval(x, target=target)
            found.append(counter.frame_count)
        return found, engine.report().stages[0].trained_weights

    with_op = graphs()
    assert len(calls) == 3 * UNITS  # of the layer beside the block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WITH_WIDE_RESULT", ())
        assert with_op == graphs()
    torch._dynamo.reset()


def test_a_compiled_function_that_is_given_a_layer_is_compiled_once(calls: list[Shape]) -> None:
    """It sees the same forward in every step, and the layer's own between them."""

    class Calling(nn.Module):
        def __init__(self, apply: Callable[..., Tensor]) -> None:
            super().__init__()
            self.layer, self.apply_to = nn.Linear(HIDDEN, HIDDEN), [apply]

        def forward(self, x: Tensor) -> Tensor:
            return self.apply_to[0](self.layer, x)

    def graphs() -> list[int]:
        torch._dynamo.reset()
        counter, found = CompileCounterWithBackend("eager"), []
        stage = Calling(torch.compile(lambda layer, x: layer(x).relu(), backend=counter)).bfloat16()
        engine, (x, target) = engine_of(stage, grad_dtype=None), data(torch.bfloat16)
        for _ in range(4):
            engine.step(x, target=target)
            engine.eval(x, target=target)
            found.append(counter.frame_count)
        return found

    with_op = graphs()
    assert with_op == with_op[:1] * 4
    torch._dynamo.reset()


def test_layers_keep_their_forwards_over_steps_and_lose_them_after() -> None:
    stage, layers, seen = mlp(), Layers(), []
    for _ in range(2):
        with layers.replaced(stage, [], [], adds=True):
            seen.append([part.__dict__["forward"] for part in stage if isinstance(part, nn.Linear)])
        assert all("forward" not in part.__dict__ for part in stage)
    assert all(a is b for a, b in zip(*seen, strict=True))


# -- an op that is not there, or wrong ---------------------------------------------------------------------------------


def test_an_op_that_is_wrong_is_told_once_and_not_used() -> None:
    with wide_products(scale=1.001) as calls:
        with pytest.warns(
            UserWarning, match=r"aten::addmm.dtype_out failed its check on cpu.*in torch.bfloat16 are wrong"
        ):
            compare(mlp)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            compare(mlp)
        assert len(calls) == 1  # the proof's


def test_an_op_that_is_missing_is_told_once_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WITH_WIDE_RESULT", ("cuda", "cpu"))
    products._proofs.results.clear()
    with pytest.warns(UserWarning, match=r"aten::addmm.dtype_out failed its check on cpu.*Could not run"):
        compare(mlp)
    products._proofs.results.clear()


def test_rows_that_are_wrong_are_told_once_and_left_to_autograd(
    calls: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "dense", lambda dy, ids, rows, padding: dy.new_zeros(rows, dy.shape[-1]))
    x, target = torch.randint(400, (2 * M, TOKENS)), torch.zeros(2 * M, TOKENS, HIDDEN)
    engine = engine_of(Words(400))
    with pytest.warns(UserWarning, match="the sum of an embedding's rows failed its check on cpu.*sums of rows are"):
        engine.step(x, target=target)
    assert engine.report().stages[0].fused_weights == 0
