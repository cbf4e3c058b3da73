"""Layers of four kinds from transformers, measured on the CPU, beside what a shape says of them.

    python benchmarks/kinds.py [--seq 2048] [--repeats 3]

Each model is a small one with random weights, in float32. `measure_stage`, by which `seq1f1b profile` measures, runs
two of its layers as the middle stage of three; a clock of the thread counts the seconds of each forward, so that other
processes may run. The shape is read from the model's own config.json, as `plan --model` reads it. Two rates of the
machine, of pairs of attention and of all else, come from the first model, a dense Llama: a line through its eight
segments. The ratios of all others are predicted by these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import transformers
from common import header

import seq1f1b
from seq1f1b.partition import make_model
from seq1f1b.plan import Layout
from seq1f1b.planning.configs import shape_of
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import Hardware, load_hardware
from seq1f1b.planning.profiler import StageTimes, measure_stage
from seq1f1b.seconds import spans_of
from seq1f1b.transformers import pipeline_stage

COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 1 << 16, "pad_token_id": 0,
}  # fmt: skip
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
CASES: list[tuple[str, str, tuple[str, str] | None, dict[str, Any]]] = [
    ("dense", "llama", None, {}),
    ("experts", "mixtral", None, {**EXPERTS, "sliding_window": None}),
    ("full", "gemma2", (FULL, FULL), {"sliding_window": 128}),
    ("window", "gemma2", (SLIDING, SLIDING), {"sliding_window": 128}),
    ("window, full", "gemma2", (SLIDING, FULL), {"sliding_window": 128}),
    ("sinks, full", "gpt_oss", (FULL, FULL), {**EXPERTS, "sliding_window": 128}),
    ("sinks, window", "gpt_oss", (SLIDING, SLIDING), {**EXPERTS, "sliding_window": 128}),
    ("sinks, both", "gpt_oss", (SLIDING, FULL), {**EXPERTS, "sliding_window": 128}),
    ("linear", "qwen3_next", (LINEAR, LINEAR), DELTA),
    ("linear, full", "qwen3_next", (LINEAR, FULL), DELTA),
]


def build(kind: str, types: tuple[str, str] | None, options: dict[str, Any]) -> Any:
    """A model of four layers, of which the two in the middle are of these types."""
    layer_types = {} if types is None else {"layer_types": [types[0], *types, types[1]]}
    config = transformers.CONFIG_MAPPING[kind](**{**COMMON, **options, **layer_types})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def measured(model: Any, seq_len: int, repeats: int) -> tuple[StageTimes, list[float]]:
    """What `measure_stage` tells, and CPU seconds of F of the eight segments: the median of all steps."""
    stage, hidden, began = pipeline_stage(model, 1, 3, balance=[1, 2, 1]), model.config.hidden_size, [0.0]
    spent: dict[tuple[int, int], list[float]] = {}

    def begin(*_: Any) -> None:
        began[0] = time.thread_time()

    def end(_: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            seconds = time.thread_time() - began[0]
            spent.setdefault((seq1f1b.token_offset(), output.shape[1]), []).append(seconds)

    stage.register_forward_pre_hook(begin)
    stage.register_forward_hook(end)
    times = measure_stage(
        stage, lambda n: torch.randn(1, n, hidden), seq_len=seq_len, layers=2, segments=(4, 8), repeats=repeats
    )
    size = seq_len // 8
    return times, [statistics.median(spent[i * size, size]) for i in range(8)]


def cost_of(model: Any, hardware: Hardware, seq_len: int) -> CostModel:
    shape = make_model(shape_of(json.loads(model.config.to_json_string(use_diff=False)), "config.json"), "config.json")
    return CostModel(shape, hardware, num_ranks=3, seq_len=seq_len, layout=Layout(layers=(1, 2, 1)))


def fitted(model: Any, forward: list[float], sizes: list[int]) -> Hardware:
    """A machine on which F of two such layers takes what was measured: a time of all tokens, one of each pair.

    The first scales the preset's rates of products and of memory alike.
    """
    zeros = dict.fromkeys(("launch", "attention_forward_rows", "attention_backward_rows", "unit_overhead"), 0.0)
    machine = replace(load_hardware("cpu-zen5"), **zeros, head_tile=1.0, activation_factor=1.0)
    cost, spans = cost_of(model, machine, sum(sizes)), spans_of(sizes)
    slope, fixed = statistics.linear_regression([span.pairs for span in spans], forward)
    without_pairs = 2 * cost.parts.layer(spans[0]._replace(pairs=0.0)).forward
    layer = cost.parts.layer_kinds[0]
    slower = fixed / without_pairs
    attention = 2 * 2.0 * (layer.queries + layer.values) / slope
    return replace(
        machine,
        peak=machine.peak / slower,
        bandwidth=machine.bandwidth / slower,
        attention_forward_efficiency=attention * slower / machine.peak,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    names = [name for name, *_ in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some rows; the first is always there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    print(header("Units of layers of some kinds: measured, and predicted by the shape"))
    print(
        f"transformers {transformers.__version__}, float32, {options.seq} tokens in 8 segments, a stage of two layers"
    )
    print(
        "F 1: ms of the first segment, measured and predicted; F 4, F 8: of segments 4 and 8 over it, likewise; off:\n"
        "the most of any ratio, relative; saved: measured bytes of a unit over predicted ones, and that over the same\n"
        "of the dense model; kv: measured bytes of the cache over predicted ones"
    )
    print(f"{'layers':<14}{'model':<12}{'F 1':>7}{'said':>6}{'F 4':>6}{'said':>6}{'F 8':>6}{'said':>6}{'off':>7}"
          f"{'saved':>7}{'of dense':>9}{'kv':>6}")  # fmt: skip
    machine, dense, sizes = None, 1.0, [options.seq // 8] * 8
    for name, kind, types, given in (c for c in CASES if c[0] in (names[0], *options.only)):
        model = build(kind, types, given)
        times, forward = measured(model, options.seq, options.repeats)
        machine = machine or fitted(model, forward, sizes)
        cost = cost_of(model, machine, options.seq)
        said = cost.price(sizes).seconds.forward[1]
        ratios = [[f / of[0] for f in of] for of in (forward, said)]
        off = max((wanted / found - 1 for found, wanted in zip(*ratios, strict=True)), key=abs)
        held = cost.parts.held(sizes[0])[cost.parts.kinds[1]]
        saved = statistics.fmean(size / 8 for _, k, size in times.saved if k == 8) / held.saved
        dense = saved if name == "dense" else dense
        keys = cost.parts.cached(cost.parts.counts_of(1), 1)[0]
        print(
            f"{name:<14}{kind:<12}{forward[0] * 1e3:>7.1f}{said[0] * 1e3:>6.1f}"
            f"{ratios[0][3]:>6.2f}{ratios[1][3]:>6.2f}{ratios[0][7]:>6.2f}{ratios[1][7]:>6.2f}"
            f"{off:>+7.0%}{saved:>7.2f}{saved / dense:>9.2f}{times.kv / keys if keys else 1:>6.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
