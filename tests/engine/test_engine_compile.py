"""Does a compiled module keep its few graphs under the engine, and does autocast around a step hold in every unit?"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from replicas import wrap
from slices import full_only
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

import seq1f1b
from seq1f1b import PipelineEngine
from seq1f1b.testing import run_ranks

CONFIG = Config(kv_heads=2, layers=2, v_head_dim=5)
M, K, LENGTH = 2, 4, 23
UNEVEN, WITH_ONE = [9, 2, 5, 7], [13, 1, 2, 7]
BY_LENGTH = {23: UNEVEN, 37: [13, 11, 8, 5]}


def compile_all(modules: Iterable[nn.Module]) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    for module in modules:
        module.compile(fullgraph=True, backend=counter)
    return counter


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("what", "sizes", "limit", "checkpoint"),
    [
        *(("stage", UNEVEN, 2, True), ("blocks", WITH_ONE, 3, False)),
        *full_only(("stage", UNEVEN, 2, False), ("blocks", UNEVEN, 2, False), ("stage", WITH_ONE, 3, False)),
    ],
)
def test_graphs_of_training_evaluation_and_outside(what: str, sizes: list[int], limit: int, checkpoint: bool) -> None:
    """At most 2 per code and grad mode, 1 more for length 1, whatever the layer, segment or step; numbers are exact."""
    config = replace(CONFIG, checkpoint=checkpoint)
    model = whole_model(config)
    tokens, target = batch(config, M, LENGTH)
    losses, truth = run_whole(model, tokens, target, M)
    with torch.no_grad():
        outputs = model(tokens)

    stage = stage_of(model, config, 0, 1)
    counter = compile_all(stage.blocks.values() if what == "blocks" else [stage])
    engine = PipelineEngine(stage, num_microbatches=M, num_segments=K, segment_sizes=sizes, loss_fn=cross_entropy)

    found = engine.step(tokens, target=target)
    trained = counter.frame_count
    assert 0 < trained <= limit
    assert gradient_error({name: p.grad for name, p in stage.named_parameters()}, truth) <= 1e-10
    torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-12, atol=0)

    evaluated = engine.eval(tokens, target=target)
    assert counter.frame_count - trained <= limit
    torch.testing.assert_close(torch.stack(evaluated), torch.stack(losses), rtol=1e-12, atol=0)

    before = counter.frame_count
    with torch.no_grad():
        torch.testing.assert_close(stage(tokens), outputs, rtol=1e-12, atol=1e-12)  # plain attention outside a step
    assert counter.frame_count - before <= 2

    before = counter.frame_count
    stage.zero_grad()
    engine.step(tokens, target=target)
    assert counter.frame_count == before, "a step that was seen before compiled again"
    assert gradient_error({name: p.grad for name, p in stage.named_parameters()}, truth) <= 1e-10


# -- stages in wrappers ------------------------------------------------------------------------------------------------


def check(stage: nn.Module, counter: CompileCounterWithBackend, **options: Any) -> None:
    """Counts after steps of one length, of another, evaluations and steps again: all is compiled in the first ones."""
    engine = PipelineEngine(
        stage, num_microbatches=M, num_segments=K, segment_sizes=BY_LENGTH, loss_fn=cross_entropy, **options
    )

    def run(call: Any, length: int) -> int:
        tokens, target = batch(CONFIG, M, length)
        call(tokens, target=target)
        return counter.frame_count

    trained = run(engine.step, 23)
    assert 0 < trained <= 2, "one graph of the first length and one of any, for all blocks and segments"
    assert [run(engine.step, 23), run(engine.step, 37), run(engine.step, 23)] == [trained] * 3
    evaluated = run(engine.eval, 37)
    assert evaluated <= trained + 2
    again = [run(engine.eval, 23), run(engine.step, 37), run(engine.eval, 37), run(engine.step, 23)]
    assert again == [evaluated] * 4
    engine.close()


def wrap_and_check(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for wrapper in ("ddp", "fsdp"):
        torch._dynamo.reset()
        stage = stage_of(whole_model(CONFIG), CONFIG, 0, 1)
        counter = compile_all(stage.blocks.values())
        check(wrap(wrapper, stage, None, mesh), counter, group=alone)


def test_wrapped_stages() -> None:
    run_processes(2, wrap_and_check)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra transformers")
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.full)])
def test_many_layers_of_transformers(kind: str) -> None:
    """More than dynamo would compile one by one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from seq1f1b.transformers import pipeline_stage

    sizes = {"vocab_size": CONFIG.vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 10}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads)).double()
    stage = pipeline_stage(model, 0, 1)
    check(stage, compile_all(stage.get_submodule("model.layers").children()))


# -- rotary attention --------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Attention as under autocast with an fp32 rotary table: q and k reach it in fp32, v in bf16."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = seq1f1b.layer_handle(index)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        wide = torch.promote_types(x.dtype, torch.float32)
        angle = seq1f1b.positions(x).to(wide)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=wide)
        cos, sin = angle.cos(), angle.sin()

        def turn(t: Tensor) -> Tensor:
            even, odd = t.to(wide)[..., 0::2], t.to(wide)[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

        q, k = turn(q), turn(k)
        if torch.is_autocast_enabled("cpu"):
            assert (q.dtype, k.dtype, v.dtype) == (torch.float32, torch.float32, torch.bfloat16)
        out = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        return x + self.out(out.transpose(1, 2).flatten(2))


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.to(target.dtype) - target).square().mean()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the parameters, which have none from here on."""
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def run_plain(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Any) -> dict[str, Tensor]:
    """Gradients of the mean loss over the micro-batches; backwards run outside of autocast."""
    for a, b in zip(x.chunk(M), y.chunk(M), strict=True):
        loss = loss_fn(model(a), b) / M
        with torch.autocast("cpu", enabled=False):
            loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_around_a_step(compiled: bool) -> None:
    """As near to fp32 as the unsplit model under the same autocast is; backwards run outside of it."""
    torch.manual_seed(0)
    whole = nn.Sequential(Rotary(0), Rotary(1))
    x, y = torch.randn(4, LENGTH, 16), torch.randn(4, LENGTH, 16)
    truth = run_plain(whole, x, y, squared)  # fp32: exact beside bf16
    with torch.autocast("cpu", torch.bfloat16):
        own = gradient_error(run_plain(whole, x, y, squared), truth)

    seen = []

    def watched(output: Tensor, target: Tensor) -> Tensor:
        output.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
        return squared(output, target)

    def run(group: Any) -> None:
        stage = whole[group.rank]
        if compiled:
            stage.compile(fullgraph=True, backend="aot_eager")
        engine = PipelineEngine(
            stage, num_microbatches=M, num_segments=K, segment_sizes=UNEVEN, loss_fn=watched, group=group
        )
        engine.step(x, target=y)
        assert torch.is_autocast_enabled("cpu"), "the step left autocast switched off"

    with torch.autocast("cpu", torch.bfloat16):
        run_ranks(2, run)
    error = gradient_error(gradients_of(whole), truth)
    assert own > 1e-4 and error <= 2 * own + 1e-6
    assert not any(seen)
    assert len(seen) == M * K + 2 * K + 1  # the first step looks at the loss of one micro-batch, in parts and whole


def test_inductor() -> None:
    """Inductor's own layouts and its memory planning around the ops; in scalar C++, which compiles faster."""
    torch.manual_seed(0)
    stage = nn.Sequential(Rotary(0), Rotary(1)).double()
    x, y = (torch.randn(2, 12, 16, dtype=torch.float64) for _ in range(2))
    truth = run_plain(stage, x, y, squared)
    for block in stage:
        block.compile(fullgraph=True, options={"cpp.simdlen": 1, "cpp_cache_precompile_headers": False})
    options = {"num_microbatches": M, "num_segments": 2, "segment_sizes": [5, 7], "loss_fn": squared}
    PipelineEngine(stage, **options).step(x, target=y)
    assert gradient_error(gradients_of(stage), truth) <= 1e-10


# -- split backwards ---------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


COMPILE: dict[str, Callable[..., Any]] = {
    "torch.compile": torch.compile,
    "compile": lambda stage, **options: stage.compile(**options),
    "forward": lambda stage, **options: setattr(stage, "forward", torch.compile(stage.forward, **options)),
    "block": lambda stage, **options: stage[0].compile(**options),
    "function of a block": lambda stage, **options: setattr(stage[0], "run", torch.compile(stage[0].run, **options)),
}


@pytest.mark.parametrize("what", COMPILE)
def test_what_is_compiled_stays_whole_where_the_backward_is_split(what: str) -> None:
    """Gradients are right, and there are as many graphs as with whole backwards, evaluation between steps included."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 8, 8).double(), torch.randn(4, 8, 8).double()
    whole = nn.Sequential(Mlp(), Mlp()).double()
    truth = run_plain(whole, x, y, nn.functional.mse_loss)

    def run(schedule: str) -> tuple[list[int], int]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        plain = nn.Sequential(Mlp(), Mlp()).double()
        plain.load_state_dict(whole.state_dict())
        stage = COMPILE[what](plain, fullgraph=True, backend=counter) or plain
        engine = PipelineEngine(
            stage, schedule=schedule, num_microbatches=M, num_segments=2, loss_fn=nn.functional.mse_loss
        )
        graphs = []
        for _ in range(2):
            engine.step(x, target=y)
            graphs.append(counter.frame_count)
            assert gradient_error(gradients_of(plain), truth) <= 1e-10
            left_to_w = engine.report().stages[0].deferred_weights
            engine.eval(x, target=y)
            graphs.append(counter.frame_count)
        return graphs, left_to_w

    graphs, left_to_w = run("seq1f1b")
    assert graphs[0] > 0 and left_to_w == 0
    assert run("seq-zb-h1") == (graphs, 2 * 8 * 12 if "block" in what else 0)
