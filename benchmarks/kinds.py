"""Do layers of some kinds take what their shape says? F of transformers' layers, beside the planner's prediction.

    python benchmarks/kinds.py [--tokens 1024] [--passes 6]

Each model has two layers with random weights in float32 and the proportions of a real one (data/kinds.json). It has a
quarter of its experts, at least 8, as segments of 1,024 tokens are a quarter of usual ones. Experts run as transformers
runs them by default. A process of one thread evaluates a sequence in 8 segments; the thread's clock counts the seconds
of both layers, and the shortest of all passes counts, because other processes only add to it. The shape is read from
the config as `plan --model` reads it. Two rates, of pairs of tokens and of all else, are fitted to the first row. They
predict the other rows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import KEPT_HEAP, header, spawn

import seq1f1b
from seq1f1b.partition import make_model
from seq1f1b.planning.configs import shape_of
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.transformers import pipeline_stage

DATA = json.loads((Path(__file__).parent / "data" / "kinds.json").read_text(encoding="utf-8"))
SEGMENTS = 8


def measured(config: Any, tokens: int, passes: int) -> Any:
    """Least seconds of F of both layers, by segment."""
    torch.manual_seed(0)
    model, began = transformers.AutoModelForCausalLM.from_config(config), [0.0]
    spent: list[list[float]] = [[] for _ in range(SEGMENTS)]

    def end(*_: Any) -> None:
        spent[seq1f1b.token_offset() // tokens].append(time.thread_time() - began[-1])

    first, last = model.model.layers
    first.register_forward_pre_hook(lambda *_: began.append(time.thread_time()))
    last.register_forward_hook(end)
    stage = pipeline_stage(model, 0, 1)
    engine = seq1f1b.PipelineEngine(stage, num_microbatches=1, num_segments=SEGMENTS, attention="unchecked")
    for _ in range(1 + passes):
        engine.eval(torch.randint(config.vocab_size, (1, SEGMENTS * tokens)))
    engine.close()
    return np.array([min(seconds[1:]) for seconds in spent])  # the first pass allocates


def predicted(config: Any, tokens: int) -> Any:
    """Seconds of F by the preset's rates, of all but pairs of tokens, and of these: an array [segment, 2]."""
    shape = make_model(shape_of(json.loads(config.to_json_string(use_diff=False)), "config.json"), "config.json")
    machine, costs = replace(load_hardware("cpu-zen5"), launch=0.0, unit_overhead=0.0), []
    for each in (machine, replace(machine, attention_forward_efficiency=np.inf)):
        cost = CostModel(shape._replace(vocab=0), each, num_ranks=1, seq_len=SEGMENTS * tokens)
        costs.append(cost.price([tokens] * SEGMENTS).seconds.forward[0])
    return np.stack([costs[1], costs[0] - costs[1]], axis=1)


def show(_: int, only: list[str], tokens: int, passes: int) -> None:
    transformers.utils.logging.set_verbosity_error()
    print(f"{'layers':<14}{'model':<11}{'F 1':>7}{'said':>7}{'F 4':>6}{'said':>6}{'F 8':>6}{'said':>6}{'off':>6}")
    rates = None
    for name in dict.fromkeys(["dense", *only]):
        kind, *types = DATA["rows"][name]
        fields = DATA["common"] | DATA["models"][kind] | ({"layer_types": types} if types else {})
        config = transformers.CONFIG_MAPPING[kind](**fields)
        found, parts = measured(config, tokens, passes), predicted(config, tokens)
        if rates is None:  # least squares of relative errors
            rates = np.linalg.lstsq(parts / found[:, None], np.ones(SEGMENTS), rcond=None)[0]
        said = parts @ rates
        ratios, off = (found / found[0], said / said[0]), max(said / said[0] * found[0] / found - 1, key=abs)
        cells = [f"{ratio[i]:6.2f}" for i in (3, 7) for ratio in ratios]
        print(f"{name:<14}{kind:<11}{found[0] * 1e3:7.1f}{said[0] * 1e3:7.1f}{''.join(cells)}{off:+6.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of each segment (%(default)s)")
    parser.add_argument("--passes", type=int, default=6, help="over the sequence (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=DATA["rows"], default=[*DATA["rows"]], help="rows beside the first"
    )
    options = parser.parse_args()
    os.environ.update(KEPT_HEAP)
    print(header("F of layers of some kinds: measured, and predicted by the shape"))
    print(f"transformers {transformers.__version__}, float32, two layers, 8 segments of {options.tokens} tokens")
    print("F 1: ms of the first segment; F 4, F 8: segments 4 and 8 over it; off: the most of any ratio, relative")
    spawn(1, show, options.only, options.tokens, options.passes)


if __name__ == "__main__":
    main()
