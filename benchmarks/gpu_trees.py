"""The stage of gpu.py that trains trees of segments: are they right on a GPU, are they faster than rows, and what does
a path cost whose keys lie in several ranges?

Right: attention of random trees, unit by unit, and whole steps of an engine, against every path alone in float64. Fast:
a prompt with its responses as a tree, beside the same responses as rows, by this engine too.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import decoder
import gpu
import path_runs
import tiny_model
import torch
from attention_ranges import ranges_of
from attention_runs import OPTIONS, errors, random_qkv
from gpu_cases import Case, Machine, Unmeasured, hold, use_cudnn, worst_difference
from gpu_llama import Sizes, sizes_on, stage_on
from gpu_speed import Segment, check_close
from gpu_times import engine_of
from torch import Tensor
from tree_runs import Trees, random_tree, run_paths, tokens_of
from tree_steps import Prompts, Step, in_turns, ratio

from seq1f1b.device import cuda_attention, kernel_library
from seq1f1b.device.attention_calls import Place
from seq1f1b.device.placement import step_on

WAYS = {  # by which attention over a path goes, and what goes by it there: dtypes and options of attention_runs
    "cudnn": [(torch.bfloat16, ("none", "sinks")), (torch.float16, ("none",))],
    "flash": [(torch.bfloat16, ("none", "scale", "window", "sinks")), (torch.float16, ("none",))],
    "efficient": [(torch.float32, ("none", "sinks"))],
    "plain": [
        (torch.bfloat16, ("softcap", "slopes", "documents")),
        (torch.float32, ("window",)),
        (torch.float64, ("none", "all")),
    ],
}
BY_DISTANCE = ("window", "slopes", "documents", "all")  # which siblings that share a unit refuse
STEPS = [(torch.bfloat16, "cudnn"), (torch.bfloat16, "flash"), (torch.float32, "efficient"), (torch.float64, "plain")]
GRADIENT_DIFFERENCE = 0.03  # of a parameter's gradient as a tree and as rows, by norms: both are sums in bfloat16
LOSS_DIFFERENCE = {torch.bfloat16: 0.02, torch.float32: 1e-5, torch.float64: 1e-12}
# By tokens of a prompt, its responses, and their tokens: the least that rows' time over a tree's may be.
FASTER = {(2048, 8, 256): 2.5, (512, 4, 512): 1.0}
ROUNDS = 9
RANGES_COST = 1.05  # of eight ranges of keys, over one


def prepare(machine: Machine, way: str) -> None:
    """Attention goes by cuDNN from the first call on, or never."""
    if way == "cudnn":
        machine.need_cuda()
        if not cuda_attention._has_cudnn(machine.device):
            raise Unmeasured("cuDNN's attention is for Hopper and newer")
    kernel_library.use_kernels("library")
    use_cudnn(way == "cudnn")


def looked_at(way: str) -> dict[str, Any]:
    """Figures of the calls over paths since plans were forgotten. Raises where one went another way."""
    plans = [plan for plan in cuda_attention._plans.recent.values() if plan.place is not None]
    ways = {plan.way for plan in plans}
    others = {"flash"} if way == "cudnn" else set()  # of one query or key, and of siblings that have a call each
    assert way in ways and ways <= {way, *others}, f"attention went by {sorted(ways)}, expected {way}"
    return {
        "most ranges": max(len(plan.place.ranges) for plan in plans),
        "most siblings": max(len(plan.place.parts) for plan in plans),
        "most in one call": max(len(plan.packs) for plan in plans),
    }


# -- right -----------------------------------------------------------------------------------------------------------


def attention(machine: Machine, dtype: torch.dtype, name: str, way: str) -> dict[str, Any]:
    """Random trees in a random order of units, in random rows: units against paths."""
    prepare(machine, way)
    found, most = {"units": [0.0] * 4, "formula": [0.0] * 4}, Counter[str]()
    longest = 150 if machine.is_cuda else 9
    for seed in range(3):
        case = path_runs.Case(seed, longest=longest, with_parts=name not in BY_DISTANCE, most_parts=6)
        drawn = [*draw(case.tokens, dtype, seed), draw(case.tokens, dtype, seed + 100)[0]]
        *qkv, dout = (t.to(machine.device) for t in drawn)
        options = {k: v.to(machine.device) if isinstance(v, Tensor) else v for k, v in OPTIONS[name].items()}
        if "doc_ids" in options:
            options["doc_ids"] = torch.arange(2 * case.tokens, device=machine.device).view(2, -1) // (2 * longest)
        truth = path_runs.by_paths(case.step, options, qkv, dout)
        peer = path_runs.by_paths(case.step, options, qkv, dout, dtype)
        cuda_attention.forget_plans()
        machine.poison()
        with step_on(machine.device):
            units = path_runs.by_units(case.step, case.order, options, qkv, dout)
        most |= Counter(looked_at(way))  # the larger of each
        for key, results in (("units", units), ("formula", peer)):
            found[key] = list(map(max, found[key], errors(results, truth)))
    assert most["most ranges"] > 1 and (name in BY_DISTANCE or most["most siblings"] > 1), most
    return {**hold(found, dtype), **most}


def draw(tokens: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    return random_qkv(4, 2, tokens=tokens, head_dim=64, dtype=dtype, seed=seed)


def trees_of(seed: int, longer: int) -> Trees:
    """A prompt with siblings in one unit, and random trees."""
    numbers, found = random.Random(seed), Trees([[11, 6, [5, 3, 7], 4]], [[-1, 0, 1, 1]])
    for _ in range(3):
        sizes, parents = random_tree(numbers, 9)
        found.sizes.append(sizes)
        found.parents.append(parents)
    found.sizes = [[s * longer if isinstance(s, int) else [t * longer for t in s] for s in own] for own in found.sizes]
    return found


def step(machine: Machine, dtype: torch.dtype, way: str) -> dict[str, Any]:
    """A step of the engine, whose gradients may be twice as far from float64 as those of paths alone in its dtype."""
    prepare(machine, way)
    config = tiny_model.Config(hidden=128, heads=4, kv_heads=2, ffn=192, vocab=61, layers=4)
    generator, trees = torch.Generator().manual_seed(1), trees_of(1, 3 if machine.is_cuda else 1)
    shapes = [(2, sum(map(tokens_of, sizes))) for sizes in trees.sizes]
    tokens, targets = ([torch.randint(config.vocab, s, generator=generator) for s in shapes] for _ in range(2))
    for target in targets:
        target[torch.rand(target.shape, generator=generator) < 0.3] = -100
    losses, truth, _ = run_paths(tiny_model.whole_model(config), trees, tokens, targets)
    tokens, targets = ([t.to(machine.device) for t in own] for own in (tokens, targets))
    model = tiny_model.whole_model(config).to(machine.device, dtype)
    _, paths, _ = run_paths(model, trees, tokens, targets)
    model.zero_grad()
    loss_fn = tiny_model.cross_entropy if dtype == torch.float64 else decoder.cross_entropy  # the latter in float32
    engine = engine_of(model, 4, num_microbatches=len(tokens), loss_fn=loss_fn)
    cuda_attention.forget_plans()
    found = engine.step(tokens, target=targets, segment_sizes=trees.sizes, parents=trees.parents)
    seen = looked_at(way)
    engine.close()
    assert seen["most ranges"] > 1 and seen["most siblings"] > 1, seen
    own = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    theirs = tiny_model.gradient_error({name: gradient.cpu() for name, gradient in paths.items()}, truth)
    ours, floor = tiny_model.gradient_error(own, truth), 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    figures = {"error": f"{ours:.1e}", "paths alone": f"{theirs:.1e}"}
    assert theirs < 0.1 and ours <= 2 * theirs + floor, figures
    off = max(float((a.cpu().double() - b).abs()) for a, b in zip(found, losses, strict=True))
    assert off < LOSS_DIFFERENCE[dtype], f"a loss is {off:.1e} off float64"
    return {**figures, "loss error": f"{off:.1e}", **seen}


# -- fast ------------------------------------------------------------------------------------------------------------


def beside_rows(machine: Machine, prompt: int, responses: int, response: int, wanted: float) -> dict[str, Any]:
    """Steps of one prompt as a tree, and as rows, in turn: the best of some cuts of each."""
    kernel_library.use_kernels("library")
    use_cudnn(True)  # as it is after some steps
    sizes = [prompt, response] if machine.is_cuda else [prompt // 64, response // 64]
    vocab = sizes_on(machine, Sizes()).vocab
    prompts = Prompts(sizes[0], responses, sizes[1], count=1, vocab=vocab, device=machine.device)
    stage = stage_on(machine, Sizes())
    engine = engine_of(stage, 2)
    arms: dict[str, Step] = {f"rows, k {k}": prompts.as_rows(k) for k in (1, 2)}
    arms |= {f"tree, siblings {n}": prompts.as_trees(n, 1) for n in (8, 4, 2) if responses % n == 0}

    def run(name: str) -> float:
        inputs, target, options = arms[name]
        machine.sync()
        start = time.perf_counter()
        losses = engine.step(inputs, target=target, **options)
        machine.sync()
        seconds = time.perf_counter() - start
        loss[name] = float(torch.stack(losses).mean())
        return seconds

    def once(name: str) -> float:
        stage.zero_grad()
        return run(name)

    loss: dict[str, float] = {}
    truth: dict[str, Tensor] = {}
    difference = 0.0
    for name in arms:
        once(name)
        gradients = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
        truth = truth or gradients
        difference = max(difference, worst_difference(gradients, truth, GRADIENT_DIFFERENCE))
    assert max(loss.values()) - min(loss.values()) < LOSS_DIFFERENCE[torch.bfloat16], loss
    del truth, gradients
    stage.zero_grad()
    peak = {}
    for name in arms:
        gc.collect()
        peak[name] = round(machine.peak_bytes(functools.partial(run, name)) / 1e9, 3)
        stage.zero_grad()
    seconds = in_turns([*arms], ROUNDS if machine.is_cuda else 1, once)
    engine.close()
    best = {
        kind: min((n for n in arms if n.startswith(kind)), key=lambda n: statistics.median(seconds[n]))
        for kind in ("rows", "tree")
    }
    middle, least, most = ratio(seconds[best["rows"]], seconds[best["tree"]])
    found = {
        "ratio": [round(each, 3) for each in (middle, least, most)],
        "of": list(best.values()),
        "ways of the tree": sorted({p.way for p in cuda_attention._plans.recent.values() if p.place is not None}),
        "ms": {name: [round(1e3 * f(own), 2) for f in (statistics.median, min, max)] for name, own in seconds.items()},
        "peak growth GB": peak,
        "gradient difference": difference,
    }
    if machine.is_cuda:  # a tiny step on a CPU says nothing
        assert middle >= wanted, f"{found}: {wanted} is wanted"
        found[gpu.ROWS_OVER_TREE] = round(middle, 3)
    return found


# -- the keys of a path ----------------------------------------------------------------------------------------------


def ranges(machine: Machine, way: str) -> dict[str, Any]:
    """Attention of a segment at the end of 4096 keys in eight ranges, with gaps, in any order, beside one range."""
    prepare(machine, way)
    tokens, segment = (4096, 256) if machine.is_cuda else (64, 4)
    heads, kv_heads, head_dim = (32, 8, 128) if machine.is_cuda else (4, 2, 64)
    places = {"one": [(0, tokens, 0)], "eight": ranges_of(tokens // 8, tokens, segment)}
    one = Segment(machine, heads, kv_heads, head_dim, segment, tokens)
    runs: dict[str, dict[str, Any]] = {}
    results: dict[str, list[Tensor]] = {}
    for name, own in places.items():
        rows = max(row + end - begin for begin, end, row in own)
        inputs = Segment(machine, heads, kv_heads, head_dim, segment, rows)
        inputs.q.copy_(one.q)
        inputs.dout.copy_(one.dout)
        for begin, end, row in own:
            for to, of in ((inputs.keys, one.keys), (inputs.values, one.values)):
                to[:, :, row : row + end - begin] = of[:, :, begin:end]
        options = inputs.options._replace(place=Place(tuple(own), (), tokens))
        qkv = inputs.q, inputs.keys, inputs.values
        out, lse = cuda_attention._forward(*qkv, options)
        given = inputs.dout, *qkv, out, lse, options, inputs.dk, inputs.dv
        dq, *of_segment, _ = cuda_attention._backward(*given)
        of_keys = (torch.cat([t[:, :, r : r + e - b] for b, e, r in own], 2) for t in (inputs.dk, inputs.dv))
        results[name] = [out, dq, *of_segment, *(t[:, :, :-segment] for t in of_keys)]
        runs[name] = {
            "forward": functools.partial(cuda_attention._forward, *qkv, options),
            "backward": functools.partial(cuda_attention._backward, *given),
        }
    looked_at(way)
    names = "out", "dq", "the segment's dk", "the segment's dv", "dk", "dv"
    for what, of_eight, of_one in zip(names, results["eight"], results["one"], strict=True):
        check_close(what, of_eight, of_one, 2**-6)
    found: dict[str, Any] = {}
    for what in ("forward", "backward"):
        of_what = {name: run[what] for name, run in runs.items()}
        seconds = in_turns([*places], ROUNDS, lambda name, of=of_what: machine.seconds(of[name], budget=0.05))
        middle, least, most = ratio(seconds["eight"], seconds["one"])
        found[f"{what} us"] = {name: round(1e6 * statistics.median(own), 1) for name, own in seconds.items()}
        found[f"{what} ratio"] = [round(middle, 3), round(least, 3), round(most, 3)]
    if machine.is_cuda:
        assert all(found[f"{what} ratio"][0] <= RANGES_COST for what in ("forward", "backward")), found
    return found


def trees(machine: Machine) -> Iterator[Case]:
    for way, cases in WAYS.items():
        for dtype, names in cases:
            for name in names:
                text = f"paths: attention by {way}, {str(dtype).removeprefix('torch.')}, {name}"
                yield text, functools.partial(attention, machine, dtype, name, way)
    for dtype, way in STEPS:
        text = f"paths: step, attention by {way}, {str(dtype).removeprefix('torch.')}"
        yield text, functools.partial(step, machine, dtype, way)
    for (prompt, responses, response), wanted in FASTER.items():
        arguments = (machine, prompt, responses, response, wanted)
        yield f"{prompt} + {responses} x {response}", functools.partial(beside_rows, *arguments)
    for way in ("cudnn", "flash"):
        yield f"eight ranges of keys beside one, {way}", functools.partial(ranges, machine, way)
