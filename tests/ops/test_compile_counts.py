"""Is everything compiled in the first step, whatever the stage is wrapped in?"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seq1f1b import PipelineEngine

M, K = 2, 4
SIZES = {23: [9, 2, 5, 7], 37: [13, 11, 8, 5]}
CONFIG = Config(kv_heads=2, vocab=19, v_head_dim=5)  # of every model here


def compile_all(modules: Any, counter: Any) -> None:
    for module in modules:
        module.compile(fullgraph=True, backend=counter)


def tiny_stage(counter: Any) -> nn.Module:
    stage = stage_of(whole_model(CONFIG), CONFIG, 0, 1)
    compile_all(stage.blocks.values(), counter)
    return stage


def ddp(counter: Any, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(tiny_stage(counter))


def fsdp(counter: Any, mesh: DeviceMesh) -> nn.Module:
    stage = tiny_stage(counter)
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


def check(engine: PipelineEngine, counter: Any) -> None:
    """Counts after steps of one length, of another, evaluations and steps again."""

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


def counts(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for make in (ddp, fsdp):
        counter = fresh_counter()
        module = make(counter, mesh)
        engine = PipelineEngine(
            module, num_microbatches=M, num_segments=K, segment_sizes=SIZES, loss_fn=cross_entropy, group=alone
        )
        check(engine, counter)
        engine.close()


def fresh_counter() -> CompileCounterWithBackend:
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


def test_wrapped_stages() -> None:
    run_processes(2, counts)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra transformers")
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.full)])
def test_a_stage_of_transformers_with_more_layers_than_dynamo_would_compile_one_by_one(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from seq1f1b.transformers import pipeline_stage

    sizes = {"vocab_size": CONFIG.vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 10}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads)).double()
    stage = pipeline_stage(model, 0, 1)
    counter = fresh_counter()
    compile_all(stage.get_submodule("model.layers").children(), counter)
    engine = PipelineEngine(stage, num_microbatches=M, num_segments=K, segment_sizes=SIZES, loss_fn=cross_entropy)
    check(engine, counter)
    torch._dynamo.reset()
