"""The stage of gpu.py that trains: what a segment costs on one GPU, where segments cannot save anything.

Two models in bfloat16, each by torch alone over whole sequences and by an engine of one rank. Times are compared within
a model and a run: torch alone runs first and last, and its time is the mean of the two.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import decoder
import gpu
import torch
from gpu_cases import Case, Machine, Unmeasured, use_cudnn
from gpu_llama import Sizes, sizes_on, stage_on
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import seq1f1b
from seq1f1b.device import kernel_library

WARM_UPS, TIMED = 3, 3
LAST_BEGIN = 165  # seconds after which no further arm begins: what comes last is worth least
LOSS_DIFFERENCE = 0.02
GRADIENT_DIFFERENCE = 0.03  # of a parameter's gradient to torch alone's, by norms: both are sums in bfloat16
KINDS = (  # of kernels, by what their names hold; the first that fits
    ("copy/cast", ("memcpy", "memset")),
    ("attention", ("sdpa", "flash", "fmha", "attention")),
    ("products", ("gemm", "cutlass", "nvjet", "xmma", "splitk")),
    ("other", ("softmax", "nll", "embedding")),
    ("norm", ("norm", "gammabeta")),
    ("copy/cast", ("copy", "cat")),
    ("add", ("add",)),
)

Step = Callable[[], float]  # returns the mean of its losses, and leaves gradients
Gradients = dict[str, Tensor]


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")


def device_times(machine: Machine, step: Callable[[], Any]) -> dict[str, Any]:
    """What the device does in one step, by torch's profiler. A rehearsal has the CPU's ops in place of kernels."""
    activity = ProfilerActivity.CUDA if machine.is_cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
        machine.sync()
    wanted = torch.autograd.DeviceType.CUDA if machine.is_cuda else torch.autograd.DeviceType.CPU
    spans, kinds = [], Counter[str]()
    for event in profile.profiler.kineto_results.events():  # events() of the profile takes seconds for 50,000 kernels
        if event.device_type() == wanted:
            start, nanoseconds = event.start_ns(), event.duration_ns()
            spans.append((start, start + nanoseconds))
            kinds[kind_of(event.name())] += nanoseconds
    busy = end = 0
    for begin, until in sorted(spans):  # kernels of two streams may overlap
        busy += max(0, until - max(begin, end))
        end = max(end, until)
    by_kind = {kind: round(nanoseconds * 1e-6, 1) for kind, nanoseconds in kinds.most_common()}
    return {"busy ms": round(busy * 1e-6, 1), "launches": len(spans), "ms by kind": by_kind}


@dataclass
class Model:
    """A model, its batch, and what torch alone has found with it.

    Args:
        make: the model, or the stage of a rank; is_ours: with the attention of this package.
    """

    name: str
    make: Callable[[bool, int, int], nn.Module]
    tokens: Tensor
    loss: float | None = None
    gradients: Gradients = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)  # of each arm


def drop_gradients(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def compare(model: Model, modules: Sequence[nn.Module], loss: float) -> dict[str, Any]:
    """The gradients after the first step beside those of torch alone, one parameter at a time."""
    assert model.loss is not None, f"{gpu.ALONE} has to run before"
    assert abs(loss - model.loss) < LOSS_DIFFERENCE, f"the loss is {loss}, torch alone's {model.loss}"
    differences = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            theirs = model.gradients[name].float()
            norm = torch.linalg.vector_norm(theirs)
            differences[name] = torch.linalg.vector_norm(parameter.grad.float() - theirs) / norm
    assert differences.keys() == model.gradients.keys(), "some parameters were not compared"
    values = torch.stack(list(differences.values())).tolist()
    worst, name = max(zip(values, differences, strict=True))
    are_near = all(value <= GRADIENT_DIFFERENCE for value in values)  # NaN is not
    assert are_near, f"the gradient of {name} is {worst:.2%} off torch alone's"
    return {"gradient difference": round(worst, 5), "worst gradient": name}


def measure(machine: Machine, model: Model, arm: str, modules: Sequence[nn.Module], step: Step) -> dict[str, Any]:
    """Warm steps, of which the first is compared; timed ones; and one under the profiler."""
    loss = step()
    found: dict[str, Any] = {"loss": round(loss, 4)}
    if arm == gpu.ALONE:
        model.loss = loss
        model.gradients = {name: p.grad for m in modules for name, p in m.named_parameters() if p.grad is not None}
    else:
        found |= compare(model, modules, loss)
    drop_gradients(modules)

    def once() -> None:
        step()
        drop_gradients(modules)

    for _ in range(WARM_UPS - 1):
        once()
    machine.sync()
    if machine.is_cuda:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if machine.is_cuda else 0
    seconds = []
    for _ in range(TIMED):
        machine.sync()
        start = time.perf_counter()
        once()
        machine.sync()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before if machine.is_cuda else 0
    ms = statistics.median(seconds) * 1e3
    model.ms[arm] = ms
    times = device_times(machine, once)
    return found | {
        "ms": round(ms, 1),
        "ms range": [round(min(seconds) * 1e3, 1), round(max(seconds) * 1e3, 1)],
        "tokens/s": round(model.tokens.numel() / ms * 1e3),
        "busy share": round(times["busy ms"] / ms, 3),
        "peak growth MB": round(peak / 1e6),
        **times,
    }


def alone(machine: Machine, model: Model, arm: str) -> dict[str, Any]:
    """The whole model by torch's own attention, one micro-batch after the other."""
    module = model.make(False, 0, 1)
    tokens, target = model.tokens, seq1f1b.shift_labels(model.tokens)
    num_microbatches = len(tokens)

    def step() -> float:
        losses = []
        for x, y in zip(tokens.chunk(num_microbatches), target.chunk(num_microbatches), strict=True):
            loss = decoder.cross_entropy(module(x), y)
            (loss / num_microbatches).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    return measure(machine, model, arm, [module], step)


def alone_again(machine: Machine, model: Model, arm: str) -> dict[str, Any]:
    found = alone(machine, model, arm)
    return found | {"ratios": gpu.ratios_to_alone(model.ms)}


def pipelined(
    machine: Machine, model: Model, arm: str, k: int, *, num_ranks: int = 1, kernels: str = "cuDNN", **options: Any
) -> dict[str, Any]:
    """The engine; its ranks, if there are more, are threads."""
    kernel_library.use_kernels({"own": "own", "flash": "library"}.get(kernels, ""))
    use_cudnn(kernels == "cuDNN")  # as it is after some steps
    modules = [model.make(True, rank, num_ranks) for rank in range(num_ranks)]
    tokens, target = model.tokens, seq1f1b.shift_labels(model.tokens)
    groups = seq1f1b.LoopbackGroup(num_ranks)
    engines = [
        seq1f1b.PipelineEngine(
            module, num_microbatches=len(tokens), num_segments=k, loss_fn=decoder.cross_entropy, group=groups[rank],
            **options,
        )
        for rank, module in enumerate(modules)
    ]  # fmt: skip
    with ExitStack() as stack:
        # A rank keeps its thread, as a plan of cuDNN's is of one.
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in engines[1:]]

        def step() -> float:
            steps = [
                thread.submit(engine.step, tokens, target=target)
                for thread, engine in zip(threads, engines[:-1], strict=True)
            ]
            losses = engines[-1].step(tokens, target=target)
            for other in steps:
                other.result()
            return float(torch.stack(losses).mean())

        found = measure(machine, model, arm, modules, step)
        fused = sum(
            engine._runner.last_step.total("fused_weights")
            for engine in engines
            if engine._runner.last_step is not None
        )
        trained = sum(p.numel() for engine in engines for p in engine.parameters() if p.requires_grad)
        found["fused weights"] = round(fused / trained, 3)
    for engine in engines:
        engine.close()
    return found


def models(machine: Machine) -> list[Model]:
    """The tiny ones of a rehearsal are in float32."""
    dtype = torch.bfloat16 if machine.is_cuda else torch.float32
    shape = (
        {"hidden": 2048, "blocks": 8, "vocab": 32000} if machine.is_cuda else {"hidden": 64, "blocks": 2, "vocab": 50}
    )
    generator = torch.Generator().manual_seed(0)

    def batch(vocab: int, rows: int, length: int) -> Tensor:
        length = length if machine.is_cuda else 32
        return torch.randint(vocab, (rows, length), generator=generator).to(machine.device)

    def llama(is_ours: bool, rank: int, num_ranks: int) -> nn.Module:
        assert num_ranks == 1
        return stage_on(machine, Sizes(), is_ours=is_ours)

    def plain_decoder(is_ours: bool, rank: int, num_ranks: int) -> nn.Module:
        attention = "ours" if is_ours else "whole sequences"
        with machine.device:
            return decoder.Stage(rank, num_ranks, attention=attention, **shape).to(dtype)

    return [
        Model("Llama stage", llama, batch(sizes_on(machine, Sizes()).vocab, 2, 32768)),
        Model("hidden 2048", plain_decoder, batch(shape["vocab"], 4, 16384)),
    ]


def training(machine: Machine) -> Iterator[Case]:
    begin = time.monotonic()

    def arm(model: Model, name: str, run: Callable[..., dict[str, Any]], *arguments: Any, **options: Any) -> Case:
        def timely() -> dict[str, Any]:
            if machine.is_cuda and time.monotonic() - begin > LAST_BEGIN:
                raise Unmeasured("the time of the stage was up")
            if machine.is_cuda:
                torch.cuda.empty_cache()
            return run(machine, model, name, *arguments, **options)

        return f"{model.name}, {name}", timely

    device_times(machine, lambda: torch.ones(8, device=machine.device) + 1)  # sets the profiler up, for all arms alike
    everything = models(machine)
    for model in everything:
        yield arm(model, gpu.ALONE, alone)
        for k in (4, 1, 8):
            yield arm(model, f"k {k}", pipelined, k)
        yield arm(model, "k 4, seq-zb-h1", pipelined, 4, schedule="seq-zb-h1")
        yield arm(model, "k 16", pipelined, 16)
        recompute = seq1f1b.Memory(recompute="all")
        yield arm(model, "k 4, recompute", pipelined, 4, memory=recompute)
        yield arm(model, gpu.ALONE_AGAIN, alone_again)
    for name, k, options in (
        ("k 4, 2 ranks", 4, {"num_ranks": 2}),
        ("k 4, flash kernels", 4, {"kernels": "flash"}),
        ("k 4, own kernels", 4, {"kernels": "own"}),
    ):
        yield arm(everything[-1], name, pipelined, k, **options)
