"""Weight gradients that I leaves to W, or that a product adds in one call: as autograd's, nothing lost or doubled."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from slices import pairs_of
from tiny_model import Config, batch, cross_entropy, gradient_error, stage_of, whole_model
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from wide_products import wide_products

from seq1f1b import PipelineEngine, Schedule, build_schedule
from seq1f1b.engine import split_backward
from seq1f1b.testing import run_ranks

SPLIT = Schedule.from_text("F0.0 F0.1 I0.1 I0.0 F1.0 F1.1 W0.1 W0.0 I1.1 I1.0 W1.1 W1.0")
M, K, TOKENS, HIDDEN = 2, 2, 6, 8
UNITS = M * K
ROUTES = {"W": (SPLIT, nullcontext), "one call": ("seq1f1b", wide_products), "both": (SPLIT, wide_products)}
"""By name: the schedule, and what a step runs in."""


def engine_of(module, **options):
    options = {"num_segments": K, "loss_fn": mean_of_squares, "attention": "unchecked"} | options
    return PipelineEngine(module, num_microbatches=M, **options)


def mean_of_squares(output, target):
    return (output.float() if output.dtype != torch.float64 else output).sub(target).square().mean()


def data(dtype=torch.float64):
    torch.manual_seed(3)
    target = torch.zeros(2 * M, TOKENS, HIDDEN, dtype=torch.promote_types(dtype, torch.float32))
    return torch.randn(2 * M, TOKENS, HIDDEN, dtype=dtype), target


def of(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def step(module, **options):
    """The gradients of one step, and the report of its stage."""
    module.zero_grad()
    x, target = data(next(module.parameters()).dtype)
    engine = engine_of(module, **options)
    engine.step(x, target=target)
    return of(module), engine.report().stages[0]


def compare(module, route, calls=None, **options):
    """A step's gradients beside those of the module run whole by torch in float64; returns the report.

    Args:
        calls: gets the shapes of products whose sums are wider.
    """
    exact, (x, target) = copy.deepcopy(module).double(), data(next(module.parameters()).dtype)
    for one, wanted in zip(x.double().chunk(M), target.double().chunk(M), strict=True):
        (mean_of_squares(exact(one), wanted) / M).backward()
    schedule, around = ROUTES[route]
    with around() as wide:
        found, report = step(module, **{"schedule": schedule} | options)
    if calls is not None:
        calls.extend(wide)
    truth = of(exact)
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        bound = 1e-12 if x.dtype == torch.float64 else 2e-2
        assert (found[name] - gradient).norm() <= bound * max(float(gradient.norm()), 1e-3), name
    return report


def mlp(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 12, bias=bias), nn.GELU(), nn.Linear(12, HIDDEN, bias=bias)).double()


# -- every kind of stage -----------------------------------------------------------------------------------------------


class Body(nn.Module):
    """Layers, and what happens between them."""

    def __init__(self, between, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.side = nn.Linear(HIDDEN, 12, bias=bias), nn.Linear(HIDDEN, 12, bias=bias)
        self.down = nn.Linear(12, HIDDEN, bias=bias)
        self.shift = nn.Parameter(torch.linspace(-1, 1, 12))
        self.between = between
        self.double()

    def forward(self, x):
        return self.down(self.between(self, x))


def add_to_slice(m, x):
    y = m.up(x)
    y[..., :2] += m.shift[:2]
    return y


def change_through_view(m, x):
    y = m.up(x)
    y.view(-1, 6)[:, ::2].mul_(m.shift[0] + 2)
    return y.transpose(0, 1).tanh_().transpose(0, 1)


def experts(m, x):
    """The first takes some tokens, the second none."""
    flat = x.flatten(0, 1)
    picked = (flat[:, 0] > 0).nonzero().squeeze(1)
    some = torch.zeros(len(flat), 12, dtype=x.dtype).index_put((picked,), m.up(flat[picked]))
    return some.view(*x.shape[:2], 12) + m.side(flat[:0]).sum()


BETWEEN = {
    "ReLU in place": lambda m, x: nn.ReLU(inplace=True)(m.up(x)),
    "a layer added": lambda m, x: m.up(x).add_(m.side(x)),
    "a product": lambda m, x: m.up(x).mul_(m.side(x)).sigmoid_(),
    "a slice": add_to_slice,
    "a view": change_through_view,
    "four dimensions": lambda m, x: m.up(x[:, None]).relu_()[:, 0],
    "two dimensions": lambda m, x: m.up(x.flatten(0, 1)).relu_().view(*x.shape[:2], -1),
    "one dimension": lambda m, x: torch.stack([m.up(r).relu_() for r in x.flatten(0, 1)]).view(*x.shape[:2], -1),
    "not contiguous": lambda m, x: m.up(x.transpose(0, 1)).relu_().transpose(0, 1),
    "checkpoint": lambda m, x: checkpoint(lambda x: m.up(x).relu_(), x.requires_grad_(), use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(lambda x: m.up(x).relu_(), m.up(x)[..., :8], use_reentrant=True),
    "a layer twice": lambda m, x: m.up(torch.tanh(m.up(x))[..., :HIDDEN]),
    "experts": experts,
}


@pytest.mark.parametrize(("between", "route", "bias"), pairs_of(list(BETWEEN), list(ROUTES), [True, False]))
def test_what_happens_between_layers(between, route, bias):
    """Outputs are changed in place, layers run often, again or never."""
    weights = 12 * HIDDEN
    report = compare(Body(BETWEEN[between], bias), route)
    assert 2 * weights <= report.fused_weights <= 3 * weights
    assert report.deferred_weights == (0 if route == "one call" else report.fused_weights)


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Various(nn.Module):
    """Layers that are no plain ones, weights that have two uses, and a plain layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.tied = nn.Embedding(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.tied.weight = self.embedding.weight
        self.norm, self.own, self.other = nn.LayerNorm(HIDDEN), Own(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
        self.wide, self.plain = nn.Linear(HIDDEN, 9 * HIDDEN), nn.Linear(9 * HIDDEN, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.hooked = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
        self.hooked.register_full_backward_hook(lambda *_: None)

    def forward(self, x):
        x = self.tied(self.own(self.norm(x))) + self.embedding.weight.sum(0)
        x = self.plain(self.wide(self.scaled(x))) + F.linear(x, self.other.weight) + self.other(x)
        return self.frozen(self.hooked(x))


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_no_plain_layer_is_autograds(route):
    """And what is shared or wide is whole at I, where a product may add it in one call."""
    report, square = compare(Various().double(), route), HIDDEN * HIDDEN
    assert report.deferred_weights == (0 if route == "one call" else 10 * square)  # plain and other
    assert report.fused_weights == (10 if route == "W" else 21) * square  # and tied, wide and hooked
    frozen = mlp()
    frozen[0].requires_grad_(False)
    report = compare(frozen, route)
    assert (report.fused_weights, report.trained_weights) == (12 * HIDDEN, 12 * HIDDEN + HIDDEN)


def test_evaluations_and_steps_on_a_device_without_the_op_are_autograds():
    engine = engine_of(mlp(), schedule=SPLIT)
    engine.eval(data()[0])
    assert engine.report().stages[0].deferred_weights == 0
    assert step(mlp())[1].fused_weights == 0


# -- 16 bits -----------------------------------------------------------------------------------------------------------


class Several(nn.Module):
    """One layer with the weights of several: given by ``functional_call``, or swapped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.others = nn.ParameterList([nn.Parameter(torch.randn(HIDDEN, HIDDEN)) for _ in range(2)])

    def forward(self, x):
        x = x + functional_call(self.layer, {"weight": self.others[0]}, (x.tanh(),))
        own, self.layer.weight = self.layer.weight, self.others[1]
        x = x + self.layer(x.tanh())
        self.layer.weight = own
        return self.layer(x)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("make", "kind", "num_calls", "options"),
    [
        (mlp, torch.bfloat16, 2 * UNITS, {}),
        (mlp, torch.bfloat16, 2 * M, {"num_segments": 1}),
        (lambda: nn.Linear(HIDDEN, HIDDEN, bias=False), torch.bfloat16, UNITS, {}),
        (lambda: Body(experts), torch.bfloat16, 2 * UNITS - 1, {}),  # a unit without tokens for either
        (mlp, torch.float32, 2 * UNITS, {}),  # under autocast
        (Several, torch.float32, 3 * UNITS, {}),
        (lambda: Body(BETWEEN["a layer added"]), torch.float32, 3 * UNITS, {}),
        (mlp, torch.bfloat16, 0, {"grad_dtype": None}),
    ],
)
def test_gradients_of_16_bit_products(monkeypatch, make, kind, num_calls, options, route):
    """In the dtype in which gradients grow, by one call for each layer and unit; also in pieces of one row on a CPU."""
    if route != "one call" and options.get("num_segments"):
        options = options | {"schedule": Schedule.from_text("F0.0 I0.0 F1.0 W0.0 I1.0 W1.0")}
    if route == "W":
        monkeypatch.setattr(split_backward, "_BLOCK", 1)
    calls = None if route == "W" else []
    with torch.autocast("cpu", torch.bfloat16) if kind == torch.float32 else nullcontext():
        compare(make().to(kind), route, calls, **options)
    assert calls is None or len(calls) == num_calls


# -- embeddings --------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A table, which may be the output layer's, too."""

    def __init__(self, rows, tied=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, HIDDEN, **options)
        self.head = nn.Linear(HIDDEN, rows, bias=False) if tied else None
        if self.head is not None:
            self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x).relu()
        return x if self.head is None else self.head(x)[..., :HIDDEN]


TABLES = {
    "many rows": (400, {}),
    "few rows": (20, {}),
    "padding": (400, {"padding_idx": 3}),
    "padding of few": (20, {"padding_idx": 3}),
    "a table that the head shares": (400, {"tied": True}),
    "scaled by frequency": (400, {"scale_grad_by_freq": True}),
    "clipped": (400, {"max_norm": 1.0}),
    "sparse": (400, {"sparse": True}),
}


@pytest.mark.parametrize("schedule", ["seq1f1b", SPLIT])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("which", TABLES)
def test_embeddings_add_the_rows_of_their_tokens(which, dtype, schedule):
    """As autograd does, which makes the whole table's gradient; over two steps, with tokens that come often."""
    rows, options = TABLES[which]
    torch.manual_seed(0)
    x = torch.randint(rows, (2 * M, TOKENS))
    x[:, ::3] = 3
    x[:, 1] = 0
    x[0] = rows - 1

    def run():
        module = Words(rows, **options).to(dtype)
        engine = engine_of(module, schedule=schedule)
        for _ in range(2):
            engine.step(x, target=torch.zeros(2 * M, TOKENS, HIDDEN))
        return module.table.weight.grad, engine.report().stages[0].fused_weights

    with wide_products():
        found, fused = run()
    assert fused == (0 if which in ("scaled by frequency", "clipped", "sparse") else rows * HIDDEN)
    truth, _ = run()
    assert found.is_sparse == truth.is_sparse == (which == "sparse")
    found, truth = found.to_dense(), truth.to_dense()
    assert (found - truth).norm() <= (1e-12 if dtype == torch.float64 else 1e-2) * truth.norm()
    assert torch.equal(found.ne(0), truth.ne(0))


# -- who else looks at gradients ---------------------------------------------------------------------------------------


def clamp(seen, m):
    """Not linear: of parts it makes another sum."""
    m.up.weight.register_hook(lambda g: seen.append(g) or g.clamp(-1e-3, 1e-3))


def sign_after(seen, m):
    def hook(weight):
        seen.append(weight.grad.clone())
        weight.grad.sign_()

    m.up.weight.register_post_accumulate_grad_hook(hook)


def of_a_node(seen, m):
    """It lives as long as somebody keeps the node."""
    m.node = get_gradient_edge(m.up.weight).node
    m.node.register_hook(lambda _, gradients: seen.append(gradients[0]))


def several(seen, m):
    m.handle = register_multi_grad_hook([m.up.weight, m.side.weight], lambda gs: seen.extend(gs))


def of_a_leaf(seen, m):
    m.leaf.register_hook(lambda g: seen.append(g) or g.sign())


def of_a_module(seen, m):
    """It reads the gradient that the unit has added."""
    m.down.register_full_backward_hook(lambda module, _, dy: seen.extend([dy[0], module.weight.grad.clone()]))


def between_the_passes(seen, m):
    """The forward had chosen to add the product."""

    def hook(module, *_):
        if module.up.weight._backward_hooks is None:
            module.up.weight.register_hook(lambda g: seen.append(g) or g.sign())

    m.register_forward_hook(hook)


USES = {
    "twice": lambda m, x: m.up(x) + m.up(torch.tanh(x)) * m.leaf + m.side(x),
    "shared": lambda m, x: m.up(x) * m.leaf + m.shared(torch.tanh(x)) + m.side(x),
    "by a function": lambda m, x: F.linear(x, m.up.weight) * m.leaf + m.up(x.sin()) + m.up.weight.norm() + m.side(x),
}
HOOKS = [clamp, sign_after, of_a_node, several, of_a_leaf, of_a_module]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("add", "route"), [*itertools.product(HOOKS, ROUTES), (between_the_passes, "one call")])
def test_hooks_see_what_they_see_in_whole_backwards(add, use, route):
    """As often, and what they return counts."""

    def run(schedule):
        seen, module, (x, target) = [], Body(USES[use]), data()
        module.shared = nn.Linear(HIDDEN, 12).double()
        module.shared.weight = module.up.weight
        module.leaf = torch.linspace(0, 1, 12, dtype=torch.float64, requires_grad=True)
        add(seen, module)
        engine_of(module, schedule=schedule).step(x, target=target)
        return [*seen, module.leaf.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

    schedule, around = ROUTES[route]
    with around():
        found = run(schedule)
    truth = run("seq1f1b")
    assert len(found) == len(truth) > 1
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(found, truth, strict=True))


@pytest.fixture
def one_replica(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_and_fsdp2_see_what_autograd_accumulates(one_replica):
    from torch.distributed.fsdp import fully_shard

    with wide_products() as calls:
        step(DistributedDataParallel(mlp().bfloat16()))
        assert not calls
        outer = nn.Sequential(DistributedDataParallel(mlp().bfloat16()), nn.Linear(HIDDEN, HIDDEN).bfloat16())
        with outer[0].no_sync():
            step(outer)
        assert len(calls) == UNITS  # of the layer outside
        stage = mlp().append(nn.Linear(HIDDEN, HIDDEN)).bfloat16()
        fully_shard(stage[0])
        assert step(stage)[1].fused_weights == 0  # parts that FSDP2 shards make it the stage's wrapper


def inside(m, x, of):
    y = m.up(x.requires_grad_())
    if of == "input":
        return y + torch.autograd.grad(y.sum(), x, retain_graph=True)[0].sum()
    if of == "weight":
        return y + torch.autograd.grad(y.sum(), m.up.weight, retain_graph=True)[0].sum()
    if of == "backward":
        m.up(x.detach()).square().mean().backward()
        return y
    return y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0].square().sum()  # a gradient penalty


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("of", ["input", "weight", "backward", "penalty"])
def test_a_gradient_that_a_stage_takes_in_its_forward(of, route):
    """It is no gradient of the loss, unless it goes to the weight as well."""
    make = partial(Body, partial(inside, of=of))
    schedule, around = ROUTES[route]
    with around():
        found, report = step(make(), schedule=schedule)
    truth, _ = step(make())
    assert report.fused_weights == 2 * 12 * HIDDEN and gradient_error(found, truth) <= 1e-12
    assert report.deferred_weights == (0 if route == "one call" else report.fused_weights)


# -- what changes meanwhile, and what is left --------------------------------------------------------------------------


def change_input(m, x):
    h = x * 1.0
    y = m.up(h)
    h.mul_(2.0)
    return y + m.side(h)


def change_part_of_input(m, x):
    h = x * 1.0
    y = m.up(h)
    h[:, :1] = 0.0
    return y


def change_weight(m, x):
    y = m.up(x)
    with torch.no_grad():
        m.up.weight.add_(1.0)
    return y


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("between", [change_input, change_part_of_input, change_weight])
def test_what_a_layer_has_used_may_not_change(between, route):
    """Torch's own error, as in a whole backward."""
    schedule, around = ROUTES[route]
    module = nn.Sequential(nn.Identity(), nn.Linear(HIDDEN, HIDDEN).double(), Body(between))
    with around(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(module, schedule=schedule)


class Meddling(nn.Module):
    """Does something in one of its forwards, or in that one's backward."""

    def __init__(self, what, call):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.what, self.call, self.calls = nn.Linear(HIDDEN, HIDDEN), what, call, 0
        self.double()

    def forward(self, x):
        h = torch.tanh(x) + 0.0
        y = self.layer(h)
        self.calls += 1
        if self.calls == self.call:
            self.what(self, h, y)
        return y


def replace_layer(module, h, y):
    module.layer = nn.Linear(HIDDEN, HIDDEN).double()


def replace_weight(module, h, y):
    module.layer.weight = nn.Parameter(module.layer.weight.detach().clone())


def change_weight_after_i(module, h, y):
    def change(_):
        with torch.no_grad():
            module.layer.weight.add_(1.0)

    h.register_hook(change)


def test_what_changes_between_i_and_w_is_an_error():
    """Call 1 is F0.0, whose I is the last one of its micro-batch: no other backward reads the weight before a W."""
    x, target = data()
    with pytest.raises(RuntimeError, match="layer: its weight, its input or its output's gradient was changed in"):
        engine_of(Meddling(change_weight_after_i, 1), schedule=SPLIT).step(x.requires_grad_(), target=target)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("what", [replace_layer, replace_weight])
def test_the_gradient_goes_to_the_weight_that_f_has_read(what, route):
    """As in a whole backward, whatever is replaced before I."""

    def run(schedule):
        module = Meddling(what, 2)
        before = module.layer.weight
        step(module, schedule=schedule)
        return before.grad, module.layer.weight.grad

    schedule, around = ROUTES[route]
    with around():
        found = run(schedule)
    for own, truth in zip(found, run("seq1f1b"), strict=True):
        assert torch.allclose(own, truth, rtol=1e-12)


@pytest.mark.parametrize("route", ["W", "one call"])
def test_five_steps_leave_no_tensors(route):
    module, (x, target) = mlp(), data()
    schedule, around = ROUTES[route]
    engine = engine_of(module, schedule=schedule)
    counts = []
    with around():
        for _ in range(5):
            engine.step(x, target=target)
            module.zero_grad()
            gc.collect()
            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert len(set(counts[1:])) == 1, counts


def test_a_step_that_fails_leaves_no_graph():
    kept = []

    class Exp(nn.Module):
        def forward(self, x):
            output = x.exp()  # which its own backward takes
            kept.append(StorageWeakRef(output.untyped_storage()))
            return output

    def loss_fn(output, target):
        if len(kept) == UNITS:
            raise ValueError("the last one fails")
        return mean_of_squares(output, target)

    module = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Exp()).double()
    with wide_products(), pytest.raises(Exception, match="the last one fails"):
        step(module, loss_fn=loss_fn, schedule="gpipe")
    gc.collect()
    assert len(kept) == UNITS
    assert all(storage.expired() for storage in kept)


def test_products_are_dropped_as_they_are_done(monkeypatch):
    seen, add = [], split_backward.add_product

    def watched(weight, x, dy):
        assert all(ref() is None for ref in seen[:-1])
        seen.append(weakref.ref(dy))
        return add(weight, x, dy)

    monkeypatch.setattr(split_backward, "add_product", watched)
    step(mlp(), schedule=SPLIT)
    assert len(seen) == 2 * UNITS


@pytest.mark.parametrize("name", ["seq-zb-h1", "seq-zb-h2"])
def test_peaks_are_the_plans(name):
    """Bytes of activations and of what waits for W, of the order that is lowered; stage by stage, ranks as threads."""
    config = Config(layers=4)
    tokens, target = batch(config, 4, 32)
    model = whole_model(config)
    schedule = build_schedule(name, num_ranks=2, num_microbatches=4, num_segments=4)

    def run(group):
        stage, options = stage_of(model, config, group.rank, 2), {"num_microbatches": 4, "num_segments": 4}
        engine = PipelineEngine(stage, schedule=schedule, loss_fn=cross_entropy, group=group, **options)
        engine.step(tokens, target=target)
        return engine.report().stages[0]

    for stage in run_ranks(2, run):
        assert stage.gradient_bytes == pytest.approx(stage.planned_gradient_bytes, rel=0.02)
        assert stage.gradient_bytes > 0
        assert stage.activation_bytes == pytest.approx(stage.planned_activation_bytes, rel=0.05)
