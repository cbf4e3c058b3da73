"""Is the shape that the planner reads from a config.json the model that transformers builds from it?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from decoders import small_config  # noqa: E402
from slices import slice_of  # noqa: E402
from test_transformers import SIZES  # noqa: E402

from seq1f1b.partition import layers_of, make_model  # noqa: E402
from seq1f1b.planning.configs import MODELS, shape_of  # noqa: E402
from seq1f1b.planning.cost import CostModel  # noqa: E402
from seq1f1b.planning.hardware import load_hardware  # noqa: E402
from seq1f1b.transformers.layers import find_layers  # noqa: E402
from seq1f1b.transformers.look import attentions_of  # noqa: E402

SLICE = ["qwen2", "gemma2", "gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_next", "jamba", "falcon_h1", "lfm2", "mamba2"]
WINDOWS = {  # options by which layers get one that they have not by default
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "layer_types": None},
    "phi3": {"sliding_window": 6},
    "dots1": {"sliding_window": 6, "max_window_layers": 1, "layer_types": None},
}


def config_of(name: str, **options: Any) -> tuple[Any, CostModel]:
    """A small one, and its price on one rank, read from the text of its config.json."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = small_config(transformers.CONFIG_MAPPING[name])
    if options:
        config = type(config)(**{**config.to_dict(), **options})
    shape = make_model(shape_of(json.loads(config.to_json_string(use_diff=False)), "config.json"), "config.json")
    machine = replace(load_hardware("cpu-zen5"), element_bytes=8.0)
    return config, CostModel(shape, machine, num_ranks=1, seq_len=sum(SIZES))


def size_of(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", slice_of([(name,) for name in MODELS], [(name,) for name in SLICE]))
def test_parameters_and_windows_are_those_of_every_layer(name):
    config, cost = config_of(name, **WINDOWS.get(name, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    _, layers = find_layers(model)
    kinds, places = layers_of(cost.model)
    assert [size_of(layer) for layer in layers] == [cost.parts.layer_parameters[place] for place in places]
    beside = size_of(model) - sum(map(size_of, layers)) - config.hidden_size  # the last norm
    assert beside == (2 - cost.model.tied) * config.hidden_size * config.vocab_size
    assert cost.parts.stage_parameters[0] == size_of(model) - config.hidden_size
    for layer, place in zip(layers, places, strict=True):
        attentions = attentions_of(layer)
        assert bool(attentions) == bool(kinds[place].heads)
        for attention in attentions:
            window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None)) or 0
            assert kinds[place].window == window * getattr(attention, "is_sliding", True)
    assert name not in WINDOWS or any(layer.window for layer in kinds)


@pytest.mark.parametrize(
    "name", slice_of([(name,) for name in MODELS if MODELS[name].mixers], [("qwen3_next",), ("jamba",), ("lfm2",)])
)
def test_state_is_what_the_library_keeps_between_calls(name):
    """Recurrent states and convolutions' tails, and keys and values of the layers that have them."""
    config, cost = config_of(name)
    model, tokens = transformers.AutoModelForCausalLM.from_config(config).eval(), 12
    with torch.no_grad():
        output = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True)
    cache: Any = output.get("past_key_values", output.get("cache_params"))
    kinds, places = layers_of(cost.model)
    of_linear = getattr(cache, "linear_cache", None)  # of MiniMax
    for i, place in enumerate(places):
        found = {
            field: numbers_in(value)
            for field, value in (vars(cache.layers[i]) if i < len(cache.layers) else {}).items()
        }
        if of_linear:
            found["recurrent_states"] = numbers_in(of_linear[i : i + 1])
        kind = kinds[place]
        assert found.get("recurrent_states", 0) == kind.state
        assert found.get("conv_states", 0) == kind.tail
        assert found.get("keys", 0) + found.get("values", 0) == tokens * kind.keys


def numbers_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(numbers_in, values))
