"""Does a tensor that no file holds have the value that transformers gives it, and never uninitialized memory?"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from slices import slice_of
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

import decoders  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from seq1f1b.transformers import pipeline_stage  # noqa: E402

ON_PAGE = {name: row.what.get(decoders.RELEASE) for name, row in decoders.read_page().items()}
RIGHT = [name for name, what in ON_PAGE.items() if what in (decoders.RIGHT, decoders.WITHOUT_DOCUMENTS)]
PLAIN = [  # types whose buffers are made in ways of their own
    "bert",  # token types, which the embedding reads as the model is cut
    "falcon_h1",  # by the model, in its layers
    "gemma3n_text",  # of many kinds; the layers get some of the embedding's
    "gpt_neo",  # masks
    "gptj",  # angles that are rounded otherwise where they are computed in bfloat16
    "minimax",  # decays, likewise
    "modernbert-decoder",  # initializes its head from above
]
DTYPES = [torch.float32, torch.bfloat16]
GRID = [(name, dtype) for name in RIGHT for dtype in DTYPES]
SLICE = [(name, DTYPES[i % 2]) for i, name in enumerate(PLAIN)]
IN_FILES = [  # types whose files hold other tensors than the model
    ("llama", torch.bfloat16),
    ("gpt2", torch.float32),  # tied, and a prefix that files may leave out
    ("mixtral", torch.bfloat16),  # experts are one tensor in memory, and many in files
    ("deepseek_v3", torch.bfloat16),  # a buffer in the files, and weights that stay in float32
]


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def small(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model of a type, with all its values."""
    model = decoders.build(name)
    return type(model)._from_config(model.config, dtype=dtype)


def without_memory(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def computed(folder: Path, model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's buffers as from_pretrained gives them if no file holds any."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    buffers = dict(model.named_buffers())
    save_file({key: tensor for key, tensor in load_file(file).items() if key not in buffers}, file, {"format": "pt"})
    with poisoned():
        found = tensors_of(type(model).from_pretrained(folder, dtype=dtype))
    return {key: found[key] for key in buffers}


def assert_same(found: Any, want: dict[str, Tensor]) -> None:
    for key, tensor in found:
        assert tensor.dtype == want[key].dtype and tensor.device.type == "cpu", key
        assert torch.equal(tensor, want[key]), f"{key} is {tensor.flatten()[:4]}, want {want[key].flatten()[:4]}"


def assert_no_tensor_without_memory(stage: nn.Module) -> None:
    """Nor one that is a plain attribute."""
    for path, module in stage.named_modules():
        for key, value in vars(module).items():
            assert not isinstance(value, Tensor) or not value.is_meta, f"{path}.{key}"


@pytest.mark.parametrize(
    ("name", "dtype"), slice_of([case for case in GRID if case[0] not in decoders.NEED_MEMORY], SLICE)
)
def test_a_stage_without_memory_gets_the_buffers_of_from_pretrained(tmp_path, name, dtype):
    model = small(name, dtype)
    want, found = computed(tmp_path, model, dtype), set()
    for rank in range(2):
        with poisoned():
            stage = pipeline_stage(without_memory(model, dtype), rank, 2)
            stage.materialize()
        assert_same(stage.named_buffers(), want)
        assert_no_tensor_without_memory(stage)
        for key, parameter in stage.named_parameters():
            assert torch.isfinite(parameter).all(), key
            initial = model.get_parameter(key)
            if initial.numel() == 1 or (initial == initial.flatten()[0]).all():  # not at random
                assert torch.equal(parameter, initial), key
        found |= {key for key, _ in stage.named_buffers()}
    assert found == want.keys()


@pytest.mark.parametrize(("name", "dtype"), slice_of(GRID, [*SLICE, *IN_FILES]))
def test_a_stage_of_a_folder_has_all_that_from_pretrained_gives(tmp_path, name, dtype):
    model = small(name)
    if type(model.config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        pytest.skip(f"a folder of {type(model).__name__} is of a {model.config.model_type}, which nothing loads by it")
    shards = ["5GB", "20KB"][len(name) % 2]
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "20KB")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    want, found = tensors_of(whole), set[str]()
    for rank in range(2):
        with poisoned():
            stage = pipeline_stage(tmp_path, rank, 2, dtype=dtype)
        own = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers()]
        assert_same(own, want)
        assert_no_tensor_without_memory(stage)
        assert not stage.training and stage.config.to_dict() == whole.config.to_dict() | {"_name_or_path": ANY}
        found |= {key for key, _ in own}
    assert found == want.keys()


# -- what is in no file and is not known -------------------------------------------------------------------------------


class Unknown(nn.Module):
    """Has a value that only its caller knows."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_value_that_transformers_does_not_know_is_named():
    model = without_memory(small("llama"))
    model.model.layers[0].mlp.act_fn = Unknown(torch.ones(3, device="meta"))
    model.model.layers[0].mlp.act_fn.forward = lambda x: x
    stage = pipeline_stage(model, 0, 2)
    text = r"LlamaForCausalLM on the meta device does not tell the initial values of model.layers.0.mlp.act_fn.scale"
    with pytest.raises(ValueError, match=text):
        stage.materialize()
    for name in decoders.NEED_MEMORY:
        with pytest.raises(ValueError, match=r"initial values of model.layers.0.mlp.act_fn.alpha_n, .* with memory"):
            pipeline_stage(without_memory(small(name)), 0, 2).materialize()
