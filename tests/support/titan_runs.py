"""torchtitan's own Trainer on the CPU, stock and with segments, over a small Llama 3 or Qwen3 and packed documents.

Import it in processes of its own: it gives torchtitan another device.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torchtitan.tools.utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

# torchtitan takes a GPU for granted. Before its modules copy the device: the CPU, with what they ask a GPU for.
torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=2**33),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    set_device=lambda device: None,
    synchronize=lambda *device: None,
)

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common import attention as titan_attention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from torchtitan_segmented import segmented  # noqa: E402

VOCAB, LENGTH, STEPS, BATCH = 2048, 96, 3, 4


@dataclass(frozen=True)
class Case:
    """What one run of the Trainer differs in."""

    model: str = "llama"
    chunked: bool = False
    checkpointing: str = ""
    compiled: bool = False
    interleaved: bool = False
    validate: bool = False
    dp: int = 1
    segments: dict[str, Any] = field(default_factory=dict)  # of segmented()


def dense_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, Any]:
    """flex_attention has no backward on the CPU: its mask as a tensor, and torch's plain attention."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=None)


titan_attention.FlexAttention._compiled_flex_attn = staticmethod(dense_flex_attention)
titan_attention._compiled_create_block_mask = create_block_mask


class Documents(BaseDataLoader):
    """Random tokens in documents of about 25 tokens, packed; some labels are ignored."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._replicas, self._replica = dp_world_size, dp_rank
        self._length, self._size = seq_len, local_batch_size
        self._generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for replica in range(self._replicas):  # one stream of batches, dealt out
                batch = self._batch()
                if replica == self._replica:
                    yield batch

    def _batch(self) -> tuple[dict[str, Tensor], Tensor]:
        rows = [self._sequence() for _ in range(self._size)]
        tokens, positions, labels = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return {"input": tokens, "positions": positions}, labels

    def _sequence(self) -> tuple[Tensor, Tensor, Tensor]:
        n = self._length
        tokens = torch.randint(VOCAB, (n + 1,), generator=self._generator)
        starts = torch.rand(n, generator=self._generator) < 0.04
        starts[0] = True
        index = torch.arange(n)
        positions = index - torch.where(starts, index, 0).cummax(0).values
        labels = tokens[1:].masked_fill(torch.rand(n, generator=self._generator) < 0.1, -100)
        return tokens[:-1], positions, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCAB


class SavingAttention(SelectiveAC):
    """As docs/how-to/torchtitan.md has it."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {torch.ops.seq1f1b.segment_attention.default}


def model_spec(model: str) -> Any:
    spec = {"llama": llama3, "qwen": qwen3}[model].model_registry("debugmodel", attn_backend="flex")
    config = spec.model
    config.layers = config.layers[:4]
    if model == "qwen":  # torchtitan pipelines no tied embeddings
        config.enable_weight_tying = False
        config.tok_embeddings = dataclasses.replace(config.tok_embeddings, param_init=config.lm_head.param_init)
    return spec


def summed(parallelize: Callable[..., Any], model: Any, **arguments: Any) -> Any:
    """FSDP2 with gradients that are summed and not divided, as torchtitan has them, in an operation that gloo has."""
    model = parallelize(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def train_config(case: Case, pp: int) -> Trainer.Config:
    """Configuration of the stock model if pp is 1, else of the model in segments."""
    config = llama3_debugmodel()
    config.model_spec = model_spec(case.model)
    if pp > 1:
        config.model_spec = segmented(config.model_spec, **case.segments)
    config.dataloader, config.tokenizer = Documents.Config(), NoTokenizer.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = BATCH // case.dp, LENGTH, 20
    config.training.global_batch_size = BATCH
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.pipeline_parallel_degree = pp
    config.parallelism.data_parallel_shard_degree = case.dp
    if case.dp > 1:
        config.parallelism.spmd_backend = (
            "partial_dtensor"  # fully_shard of torch 2.13 does not take the default's meshes
        )
        config.model_spec.parallelize_fn = partial(summed, config.model_spec.parallelize_fn)
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B" if case.interleaved else "1F1B"
    config.checkpoint.enable = False
    policies = {"full": FullAC, "selective": SelectiveAC, "saving attention": SavingAttention}
    config.activation_checkpoint = policies[case.checkpointing].Config() if case.checkpointing else None
    config.compile = CompileConfig(enable=case.compiled, components=["model"], backend="aot_eager")
    config.loss = ChunkedLossWrapper.Config(num_chunks=4) if case.chunked else CrossEntropyLoss.Config()
    config.validator = Validator.Config(enable=case.validate, steps=2, dataloader=Documents.Config())
    return config


def run_trainer(case: Case, rank: int, world: int, pp: int, state: dict[str, Tensor] | None) -> dict[str, Any]:
    """Some steps of the Trainer, from given parameters or its own.

    Returns:
        state: parameters before the steps; gradients, after clipping, of the first; losses and norms of every step;
        graphs compiled up to each; the validation's loss.
    """
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = train_config(case, 1 if state is None else pp).build()
    found: dict[str, Any] = {"losses": [], "norms": [], "graphs": [], "gradients": {}}
    if state is not None:
        with torch.no_grad():
            for name, parameter in _parameters(trainer):
                _copy_whole(parameter, state[name])
    found["state"] = {name: _whole(p) for name, p in _parameters(trainer)}
    step_optimizers = trainer.optimizers.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if not found["gradients"]:
            found["gradients"] = {name: _whole(p.grad) for name, p in _parameters(trainer)}
        return step_optimizers(*args, **kwargs)

    def log(step: int, average: float, greatest: float, norm: float, **_: Any) -> None:
        found["losses"].append(average)
        found["norms"].append(norm)

    trainer.optimizers.step = step
    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda loss, step: found.update(validation=loss)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(STEPS):
        trainer.step += 1
        trainer.train_step(batches)
        found["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    if case.validate:
        trainer.validator.validate(trainer.model_parts, trainer.step)
        trainer.step += 1
        trainer.train_step(batches)  # evaluation leaves nothing behind
        found["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    if hasattr(trainer, "pp_schedule"):
        found["schedule"] = type(trainer.pp_schedule).__name__
        trainer.pp_schedule.close()
    trainer.close()
    return found


def true_gradients(case: Case, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clipped gradients of the stock model's first step, with parameters in fp64; its rotations and losses are fp32."""
    config = train_config(case, 1)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=torch.device("cpu"))
    model.double()
    for rope in (module for module in model.modules() if isinstance(module, titan_attention.RoPE)):
        rope._init_self_buffers()  # which double() has cast
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    data = iter(Documents(None, dp_world_size=1, dp_rank=0, seq_len=LENGTH, local_batch_size=1))
    batches = [next(data) for _ in range(BATCH)]
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    for inputs, labels in batches:
        positions = inputs["positions"]
        output = model(inputs["input"], positions, model.get_attention_masks(positions))
        (F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _parameters(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            yield name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""), parameter


def _whole(t: Any) -> Tensor:
    whole = t.full_tensor() if hasattr(t, "full_tensor") else t
    return copy.deepcopy(whole.detach())


def _copy_whole(parameter: Any, value: Tensor) -> None:
    if hasattr(parameter, "full_tensor"):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
