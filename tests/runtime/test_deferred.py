"""What I may leave to W, what it must not, and that nothing of it is lost, doubled or forgotten."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from seq1f1b import Memory, PipelineEngine, Schedule, build_schedule
from seq1f1b.runtime import deferred, products
from seq1f1b.runtime import linear as layers
from seq1f1b.testing import run_ranks

SPLIT = Schedule.from_text("F0.0 F0.1 I0.1 I0.0 F1.0 F1.1 W0.1 W0.0 I1.1 I1.0 W1.1 W1.0")
M, K, LENGTH, HIDDEN = 2, 2, 6, 8


def engine_of(module, **options):
    options = {"schedule": SPLIT, "num_segments": K, "loss_fn": mean_of_squares} | options
    return PipelineEngine(module, num_microbatches=M, **options)


def mean_of_squares(output, target):
    return (output.float() - target).square().mean()


def data(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.randn(2 * M, LENGTH, HIDDEN, dtype=dtype), torch.zeros(2 * M, LENGTH, HIDDEN, dtype=dtype)


def gradients_of(module, run):
    module.zero_grad()
    run()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def compare(module, *, x=None, tolerance=1e-12, **options):
    """Gradients by I and W against those of the module run whole by torch; returns the engine."""
    inputs, target = data(next(module.parameters()).dtype)
    inputs = inputs if x is None else x

    def whole():
        for one, wanted in zip(inputs.chunk(M), target.chunk(M), strict=True):
            (mean_of_squares(module(one), wanted) / M).backward()

    truth = gradients_of(module, whole)
    engine = engine_of(module, **options)
    found = gradients_of(module, lambda: engine.step(inputs, target=target))
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        assert (found[name] - gradient).norm() <= tolerance * max(float(gradient.norm()), 1e-3), name
    return engine


class Deferred:
    """Notes which layers leave products."""

    def __init__(self, monkeypatch):
        self.names = []
        note = deferred.Tape.note

        def noted(tape, use, x, dy):
            self.names.append(use.layer.name)
            note(tape, use, x, dy)

        monkeypatch.setattr(deferred.Tape, "note", noted)


@pytest.fixture
def noted(monkeypatch):
    return Deferred(monkeypatch).names


def mlp(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 12, bias=bias), nn.GELU(), nn.Linear(12, HIDDEN, bias=bias)).double()


# -- what is deferred --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers(noted, bias):
    """Without a bias nothing that autograd sees requires grad at the first layer."""
    compare(mlp(bias))
    assert sorted(noted) == ["0"] * M * K + ["2"] * M * K


def test_nothing_is_deferred_in_whole_backwards_and_outside_of_steps(noted):
    module = mlp()
    compare(module, schedule="seq1f1b")
    engine = compare(module)
    del noted[:]
    engine.eval(data()[0])
    module(data()[0]).sum().backward()
    assert noted == []


class Body(nn.Module):
    """Two linear layers, and what happens between them."""

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


def fill_where(m, x):
    y = m.up(x)
    return y.masked_fill_(y < 0, 0.5)


def set_column(m, x):
    y = m.up(x)
    y[..., 0] = m.side(x)[..., 1]
    return y


def change_through_view(m, x):
    y = m.up(x)
    y.view(-1, 6)[:, ::2].mul_(m.shift[0] + 2)
    return y.transpose(0, 1).tanh_().transpose(0, 1)


IN_PLACE = {
    "ReLU": lambda m, x: nn.ReLU(inplace=True)(m.up(x)),
    "SiLU": lambda m, x: nn.SiLU(inplace=True)(m.up(x)),
    "Dropout": lambda m, x: nn.Dropout(0.0, inplace=True)(m.up(x)),
    "a layer added": lambda m, x: m.up(x).add_(m.side(x)),
    "a product": lambda m, x: m.up(x).mul_(m.side(x)).sigmoid_(),
    "a parameter added": lambda m, x: m.up(x).add_(m.shift),
    "a slice": add_to_slice,
    "a mask": fill_where,
    "a column": set_column,
    "a view": change_through_view,
    "four dimensions": lambda m, x: m.up(x[:, None]).relu_()[:, 0],
    "two dimensions": lambda m, x: m.up(x.flatten(0, 1)).relu_().view(*x.shape[:2], -1),
    "one dimension": lambda m, x: torch.stack([m.up(r).relu_() for r in x.flatten(0, 1)]).view(*x.shape[:2], -1),
    "not contiguous": lambda m, x: m.up(x.transpose(0, 1)).relu_().transpose(0, 1),
    "checkpoint": lambda m, x: checkpoint(lambda x: m.up(x).relu_(), x.requires_grad_(), use_reentrant=False),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("between", IN_PLACE.values(), ids=IN_PLACE)
def test_an_output_may_be_changed_in_place(noted, between, bias):
    compare(Body(between, bias))
    assert {"up", "down"} <= set(noted)


@pytest.mark.parametrize(
    "options", [{"schedule": "seq-zb-h1"}, {"schedule": partial(build_schedule, "seq1f1b", weights="fill")}]
)
@pytest.mark.parametrize("between", [IN_PLACE["ReLU"], IN_PLACE["a slice"]])
def test_an_output_may_be_changed_in_place_in_other_orders(between, options):
    compare(Body(between), **options)
    compare(Body(between), memory=Memory(recompute="all"), **options)


def test_an_output_may_be_changed_in_place_under_autocast(noted):
    module = Body(IN_PLACE["a layer added"]).float()
    with torch.autocast("cpu", torch.bfloat16):
        compare(module, tolerance=2e-2)
    assert "up" in noted


def test_the_output_is_no_copy():
    """A view of the product before, the product now."""
    made, linear = [], F.linear

    def noting(*args):
        made.append(linear(*args))
        return made[-1]

    x = torch.randn(2, 3, HIDDEN)
    layer = nn.Linear(HIDDEN, 12)
    use = layers.Use(layers.Linear("", layer), layer.weight, deferred.Tape({}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.F, "linear", noting)
        output = layers._leave(x, layer.bias, None, layer.weight.detach(), use)
    assert output.data_ptr() == made[0].data_ptr() and not output._is_view()
    assert torch.equal(output, linear(x, layer.weight, layer.bias))


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


@pytest.mark.parametrize("between", [change_input, change_part_of_input, change_weight])
@pytest.mark.parametrize("schedule", ["seq1f1b", SPLIT])
def test_what_a_layer_has_used_may_not(between, schedule):
    """Torch's own error, as in a whole backward."""
    x, target = data()
    engine = engine_of(
        nn.Sequential(nn.Identity(), nn.Linear(HIDDEN, HIDDEN).double(), Body(between)), schedule=schedule
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.step(x, target=target)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def test_a_layer_called_twice_leaves_two_products(noted):
    compare(Twice().double())
    assert noted == ["layer"] * 2 * M * K


class Tied(nn.Module):
    """The weight is a layer's and an operation's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head.weight = self.embedding.weight
        self.other = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.head(x @ self.embedding.weight) + self.other(x) + F.linear(x, self.other.weight)


def test_a_weight_that_another_module_has_is_whole_at_i(noted):
    compare(Tied().double())
    assert noted == ["other"] * M * K  # its use in F.linear arrives at I, and both add up


class Various(nn.Module):
    """Layers that are no plain Linear."""

    def __init__(self):
        super().__init__()

        class Own(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        self.norm, self.own = nn.LayerNorm(HIDDEN), Own(HIDDEN, HIDDEN)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
        self.wide = nn.Linear(HIDDEN, 9 * HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.plain = nn.Linear(9 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.frozen(self.plain(self.wide(self.scaled(self.own(self.norm(x))))))


def test_all_else_is_whole_at_i(noted):
    compare(Various().double())
    assert set(noted) == {"plain"}


class Experts(nn.Module):
    """The first expert takes every token, the last one none."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        out = scores[..., :1] * self.experts[0](x)
        flat, picked = x.flatten(0, 1), (x.flatten(0, 1)[:, 0] > 0).nonzero().squeeze(1)
        some = torch.zeros_like(flat).index_put((picked,), self.experts[1](flat[picked]))
        none = self.experts[2](flat[:0])
        return out + some.view_as(x) + none.sum()


def test_experts_without_tokens():
    compare(Experts().double())


class Recomputed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = mlp(), use_reentrant
        self.first = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_notes_what_the_recomputed_forward_saw(noted, use_reentrant):
    compare(Recomputed(use_reentrant).double())
    assert noted == ["inner.2", "inner.0", "first"] * M * K


def report_of(module):
    x, target = data()
    engine = engine_of(module)
    engine.step(x, target=target)
    (stage,) = engine.report().stages
    return stage.deferred_weights, stage.trained_weights


def test_the_report_tells_how_much_w_made():
    weights, biases = 2 * 12 * HIDDEN, 12 + HIDDEN
    assert report_of(mlp()) == (weights, weights + biases)
    frozen = mlp()
    frozen[0].requires_grad_(False)
    assert report_of(frozen) == (weights // 2, weights // 2 + HIDDEN)
    assert report_of(Twice().double()) == (HIDDEN * HIDDEN, HIDDEN * (HIDDEN + 1))  # a weight counts once
    compiled = mlp()
    compiled.compile(backend="eager")
    assert report_of(compiled) == (0, weights + biases)
    engine = compare(mlp(), schedule="seq1f1b")
    assert engine.report().stages[0].deferred_weights == 0
    engine = compare(mlp())
    engine.eval(data()[0])
    assert engine.report().stages[0].deferred_weights == 0


# -- dtypes ------------------------------------------------------------------------------------------------------------


def relative(found, truth):
    return max(float((found[n] - truth[n]).norm() / truth[n].norm()) for n in truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_defers_what_it_casts(noted, dtype):
    module, (x, target) = mlp().float(), data(torch.float32)

    def run(schedule):
        engine = engine_of(module, schedule=schedule)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gradients_of(module, lambda: engine.step(x, target=target))

    truth = run("seq1f1b")
    assert noted == []
    found = run(SPLIT)
    assert len(noted) == 2 * M * K and all(g.dtype == torch.float32 for g in found.values())
    assert relative(found, truth) <= 1e-6  # the same products, added up in another order


@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
@pytest.mark.parametrize("blocks", [1, 1 << 18])
def test_16_bit_gradients_grow_in_grad_dtype(monkeypatch, grad_dtype, blocks):
    """Also in pieces of one row, as wide weights do."""
    monkeypatch.setattr(products, "_BLOCK", blocks)
    module, (x, target) = mlp().bfloat16(), data(torch.bfloat16)

    def run(schedule):
        engine = engine_of(module, schedule=schedule, grad_dtype=grad_dtype)
        return gradients_of(module, lambda: engine.step(x, target=target))

    truth, found = run("seq1f1b"), run(SPLIT)
    assert all(found[name].dtype == truth[name].dtype for name in truth)
    assert relative(found, truth) <= (1e-6 if grad_dtype else 1e-2)


def test_grad_scaler():
    module, (x, target) = mlp().float(), data(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    truth = gradients_of(module, lambda: engine_of(module).step(x, target=target))
    found = gradients_of(module, lambda: engine_of(module).step(x, target=target, grad_scaler=scaler))
    assert relative({n: g / 1024 for n, g in found.items()}, truth) <= 1e-6


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hooks_fire_as_often_as_in_whole_backwards():
    """On the parameter, after its accumulation, and on the node that accumulates, which its user keeps alive."""

    def count(schedule):
        module, calls = mlp(), {"tensor": 0, "post": 0, "node": 0}

        def hook(name):
            def called(*_):
                calls[name] += 1

            return called

        module[0].weight.register_hook(hook("tensor"))
        module[2].weight.register_post_accumulate_grad_hook(hook("post"))
        module.append(nn.Linear(HIDDEN, HIDDEN).double())
        node = get_gradient_edge(module[3].weight).node
        node.register_hook(hook("node"))
        compare(module, schedule=schedule)
        return calls

    assert count(SPLIT) == count("seq1f1b")


def clamp(seen, m):
    """Not linear: of parts it makes another sum."""
    m.up.weight.register_hook(lambda g: seen.append(g) or g.clamp(-1e-3, 1e-3))


def sign_after(seen, m):
    def hook(weight):
        seen.append(weight.grad.clone())
        weight.grad.sign_()

    m.up.weight.register_post_accumulate_grad_hook(hook)


def several(seen, m):
    m.handle = register_multi_grad_hook([m.up.weight, m.side.weight], lambda gs: seen.extend(gs))


def of_a_leaf(seen, m):
    m.leaf.register_hook(lambda g: seen.append(g) or g.sign())


def of_a_module(seen, m):
    """It reads the gradient that the unit has added."""
    m.down.register_full_backward_hook(lambda module, _, dy: seen.extend([dy[0], module.weight.grad.clone()]))


USES = {
    "twice": lambda m, x: m.up(x) + m.up(torch.tanh(x)) * m.leaf + m.side(x),
    "shared": lambda m, x: m.up(x) * m.leaf + m.shared(torch.tanh(x)) + m.side(x),
    "by a function": lambda m, x: F.linear(x, m.up.weight) * m.leaf + m.up(x.sin()) + m.up.weight.norm() + m.side(x),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("add", [clamp, sign_after, several, of_a_leaf, of_a_module])
def test_hooks_see_what_they_see_in_whole_backwards(add, use):
    def run(schedule):
        seen, module, (x, target) = [], Body(USES[use]), data()
        module.shared = nn.Linear(HIDDEN, 12).double()
        module.shared.weight = module.up.weight
        module.leaf = torch.linspace(0, 1, 12, dtype=torch.float64, requires_grad=True)
        add(seen, module)
        engine_of(module, schedule=schedule).step(x, target=target)
        return [*seen, module.leaf.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

    found, truth = run(SPLIT), run("seq1f1b")
    assert len(found) == len(truth)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(found, truth, strict=True))


# -- nothing is left, lost or changed ----------------------------------------------------------------------------------


def test_five_steps_leave_no_tensors():
    module, (x, target) = mlp(), data()
    engine = engine_of(module)
    counts = []
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

    module, (x, target) = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Exp()).double(), data()

    def loss_fn(output, target):
        if len(kept) == M:
            raise ValueError("the last one fails")
        return mean_of_squares(output, target)

    with pytest.raises(Exception, match="the last one fails"):
        engine_of(module, loss_fn=loss_fn, schedule="gpipe", num_segments=1).step(x, target=target)
    gc.collect()
    assert len(kept) == M
    assert all(storage.expired() for storage in kept)


def test_products_are_dropped_as_they_are_done(monkeypatch):
    module, (x, target) = mlp(), data()
    seen = []
    accumulate = products.accumulate

    def watched(weight, x, dy, *others):
        assert all(ref() is None for ref in seen[:-1])
        seen.append(weakref.ref(dy))
        accumulate(weight, x, dy, *others)

    monkeypatch.setattr(products, "accumulate", watched)
    engine_of(module).step(x, target=target)
    assert len(seen) == 2 * M * K


class Penalised(nn.Module):
    """Adds the norm of its layer's gradient by the input, as a gradient penalty does."""

    def __init__(self, create_graph):
        super().__init__()
        self.layer, self.create_graph = nn.Linear(HIDDEN, HIDDEN), create_graph

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = torch.tanh(self.layer(x))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=self.create_graph, retain_graph=True)
        return y + slope


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_gradient_inside_the_forward_is_refused_or_right(create_graph):
    """Its product must not reach the tape: with I of the unit it would be taken for a gradient of the loss."""
    module, (x, target) = Penalised(create_graph).double(), data()
    with pytest.raises(RuntimeError, match=r"layer: the stage takes a gradient .* schedule with whole backwards"):
        engine_of(module).step(x, target=target)
    compare(module, schedule="seq1f1b")


class Meddling(nn.Module):
    """Does something in one of its forwards, or in that one's backward."""

    def __init__(self, what, call):
        super().__init__()
        self.layer, self.what, self.call, self.calls = nn.Linear(HIDDEN, HIDDEN), what, call, 0

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
        module.layer.weight.data.add_(0.0)  # unseen by versions
        with torch.no_grad():
            module.layer.weight.add_(1.0)

    h.register_hook(change)


def test_what_changes_between_the_passes_is_an_error():
    """Call 1 is F0.0, whose I is the last one of its micro-batch: no other backward reads the weight before a W."""
    module, (x, target) = Meddling(change_weight_after_i, 1).double(), data()
    with pytest.raises(RuntimeError, match="layer: its weight, its input or its output's gradient was changed in"):
        engine_of(module).step(x.requires_grad_(), target=target)


@pytest.mark.parametrize("what", [replace_layer, replace_weight])
def test_the_gradient_goes_to_the_weight_that_f_has_read(what):
    """As in a whole backward, whatever is replaced before I."""

    def run(schedule):
        torch.manual_seed(0)
        module, (x, target) = Meddling(what, 2).double(), data()
        before = module.layer.weight
        engine_of(module, schedule=schedule).step(x, target=target)
        return before.grad, module.layer.weight.grad

    for found, truth in zip(run(SPLIT), run("seq1f1b"), strict=True):
        assert torch.allclose(found, truth, rtol=1e-12)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["seq-zb-h1", "seq-zb-h2"])
def test_peaks_are_the_plans(name):
    """Bytes of activations and of what waits for W, of the order that is lowered; stage by stage, ranks as threads."""
    config = Config(layers=4)
    tokens, target = batch(config, 4, 32)
    model = whole_model(config)
    schedule = build_schedule(name, num_ranks=2, num_microbatches=4, num_segments=4)

    def run(group):
        engine = PipelineEngine(
            stage_of(model, config, group.rank, 2),
            schedule=schedule,
            num_microbatches=4,
            num_segments=4,
            loss_fn=cross_entropy,
            group=group,
        )
        engine.step(tokens, target=target)
        return engine.report().stages[0]

    for stage in run_ranks(2, run):
        assert (
            stage.gradient_bytes == pytest.approx(stage.planned_gradient_bytes, rel=0.02) and stage.gradient_bytes > 0
        )
        assert stage.activation_bytes == pytest.approx(stage.planned_activation_bytes, rel=0.05)
