"""The stages of gpu.py that train: what messages between two processes take, and what a segment costs on one GPU.

Segments cannot save time on one GPU. Two models in bfloat16 train there, each by torch alone over whole sequences, by
torch's Schedule1F1B and by an engine of one rank. Times are compared within a model and a run: torch alone runs first
and last, and its time is the mean of the two.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import decoder
import gpu_runs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu import ALONE, Case, Machine, Record
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity

import seq1f1b

# -- edges -------------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A stage that computes next to nothing, and sends as much as it gets."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), device=device, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def first_of_output(output: Tensor, target: Tensor) -> Tensor:
    return output[..., :1].float().mean() + 0 * target.sum()


def exchange(rank: gpu_runs.Rank, transport: str) -> float:
    """GB/s of messages of 16 MiB there and back between two ranks, by steps; what the stages compute is included."""
    if transport == "nccl" and torch.cuda.device_count() == 1:  # NCCL takes two ranks of a GPU for two hosts
        os.environ |= {"NCCL_HOSTID": f"rank {rank.rank}", "NCCL_SOCKET_IFNAME": "lo"}
    num_microbatches, tokens, hidden = 8, *((2048, 4096) if rank.is_cuda else (64, 128))
    engine = rank.engine(
        Scale(rank.device), transport=transport, group=rank.group, schedule="1f1b", num_microbatches=num_microbatches,
        num_segments=1, loss_fn=first_of_output,
    )  # fmt: skip
    x = torch.ones(num_microbatches, tokens, hidden, device=rank.device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        engine.step(x, target=x[..., 0])
        if rank.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    engine.close()
    return 2 * x.numel() * x.element_size() / min(seconds[3:]) / 1e9


def edges(machine: Machine) -> Iterator[Case]:
    ranks = gpu_runs.Ranks(is_torchruns=False, is_rehearsed=not machine.is_cuda)

    def between(transport: str) -> Record:
        return {"GB/s": round(ranks.run_processes(2, exchange, transport)[0], 2)}

    for transport in (*gpu_runs.MOVERS, "shm", "c10d") if machine.is_cuda else ("auto", "copy"):
        yield transport, functools.partial(between, transport)


# -- a stage of Llama 3 8B ---------------------------------------------------------------------------------------------


def rotary(x: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the tokens' positions, (tokens, head_dim) each."""
    rates = 500_000.0 ** (torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / -head_dim)
    angles = (seq1f1b.positions(x).float()[:, None] * rates).repeat(1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, index: int, is_ours: bool) -> None:
        super().__init__()
        self.head_dim, self.is_ours, self.layer = hidden // heads, is_ours, seq1f1b.layer_handle(index)
        of_kv = kv_heads * self.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.q, self.out = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = nn.Linear(hidden, of_kv, bias=False), nn.Linear(hidden, of_kv, bias=False)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotated(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat([-second, first], -1) * sin

        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.is_ours:
            attended = seq1f1b.causal_attention(rotated(q), rotated(k), v, layer=self.layer)
        else:
            attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaStage(nn.Module):
    """Layers between a small embedding and head: those of the model belong to other stages."""

    def __init__(self, layers: int, vocab: int, sizes: tuple[int, int, int, int], is_ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = sizes[0]
        self.embedding, self.head_dim = nn.Embedding(vocab, hidden), hidden // sizes[1]
        self.layers = nn.ModuleList(Layer(*sizes, index, is_ours) for index in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary(x, self.head_dim)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


# -- arms --------------------------------------------------------------------------------------------------------------

WARM_UPS, TIMED = 3, 3
MOST_TUNING = 80  # steps
LOSS_DIFFERENCE = 0.02
GRADIENT_DIFFERENCE = 0.03  # of a parameter's gradient to torch alone's, by norms: both are sums in bfloat16
Step = Callable[[], float]  # returns the mean of its losses, and leaves gradients


@dataclass
class Model:
    """A model by its attention, ours or torch's, its batch, and what torch alone has found with it."""

    name: str
    make: Callable[[bool], nn.Module]
    tokens: Tensor
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def target(self) -> Tensor:
        return seq1f1b.shift_labels(self.tokens)


def device_times(machine: Machine, step: Callable[[], Any]) -> Record:
    """What the device does in one step, by torch's profiler. A rehearsal has the CPU's ops in place of kernels."""
    activity = ProfilerActivity.CUDA if machine.is_cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
        machine.sync()
    wanted = torch.autograd.DeviceType.CUDA if machine.is_cuda else torch.autograd.DeviceType.CPU
    events = profile.profiler.kineto_results.events()  # events() of the profile takes seconds for 50,000 kernels
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.device_type() == wanted]
    busy = end = 0
    for begin, until in sorted(spans):  # kernels of two streams may overlap
        busy += max(0, until - max(begin, end))
        end = max(end, until)
    return {"busy ms": round(busy * 1e-6, 1), "launches": len(spans)}


def compare(model: Model, module: nn.Module, loss: float) -> Record:
    """The gradients after the first step beside those of torch alone."""
    assert model.gradients, f"{ALONE[0]} has to run before"
    assert abs(loss - model.loss) < LOSS_DIFFERENCE, f"the loss is {loss}, torch alone's {model.loss}"
    differences = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        theirs = model.gradients[name].float()
        norm = torch.linalg.vector_norm(theirs)
        differences[name] = float(torch.linalg.vector_norm(parameter.grad.float() - theirs) / norm)
    assert differences.keys() == model.gradients.keys(), "some parameters were not compared"
    worst = max(differences, key=differences.__getitem__)
    are_near = all(value <= GRADIENT_DIFFERENCE for value in differences.values())  # NaN is not
    assert are_near, f"the gradient of {worst} is {differences[worst]:.2%} off torch alone's"
    return {"gradient difference": round(differences[worst], 5), "worst gradient": worst}


def measure(machine: Machine, model: Model, module: nn.Module, step: Step, *, is_truth: bool = False) -> Record:
    """Warm steps, of which the first is compared; timed ones; and one under the profiler."""
    loss = step()
    found: Record = {"loss": round(loss, 4)}
    if is_truth:
        model.loss = loss
        model.gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    else:
        found |= compare(model, module, loss)
    module.zero_grad()

    def once() -> None:
        step()
        module.zero_grad()

    for _ in range(WARM_UPS - 1):
        once()
    gc.collect()
    if machine.is_cuda:
        machine.sync()
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
    ms = [round(each * 1e3, 1) for each in seconds]
    found |= {"ms": statistics.median(ms), "ms range": [min(ms), max(ms)], "peak growth MB": round(peak / 1e6)}
    return found | device_times(machine, once)


def alone(machine: Machine, model: Model, *, is_truth: bool = False) -> Record:
    """The whole model by torch's own attention, one micro-batch after the other."""
    module, count = model.make(False), len(model.tokens)

    def step() -> float:
        losses = []
        for x, y in zip(model.tokens.chunk(count), model.target.chunk(count), strict=True):
            loss = decoder.cross_entropy(module(x), y)
            (loss / count).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    return measure(machine, model, module, step, is_truth=is_truth)


def torchs(machine: Machine, model: Model) -> Record:
    """The model by torch's Schedule1F1B, whose only rank this is."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = model.make(False)
    stage = PipelineStage(module, 0, 1, machine.device)
    schedule = Schedule1F1B(stage, len(model.tokens), loss_fn=decoder.cross_entropy)

    def step() -> float:
        losses: list[Tensor] = []
        schedule.step(model.tokens, target=model.target, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().mean())

    return measure(machine, model, module, step)


def ours(machine: Machine, model: Model, k: int, **options: Any) -> Record:
    """An engine of one rank; with "tuned", once its order is found."""
    module = model.make(True)
    engine = seq1f1b.PipelineEngine(
        module, num_microbatches=len(model.tokens), num_segments=k, loss_fn=decoder.cross_entropy,
        group=seq1f1b.LoopbackGroup(1)[0], **options,
    )  # fmt: skip

    def step() -> float:
        return float(torch.stack(engine.step(model.tokens, target=model.target)).mean())

    found: Record = {}
    if options.get("schedule") == "tuned":
        for _ in range(MOST_TUNING):
            step()
            module.zero_grad()
            if engine.report(gather=True).is_tuned:
                break
        assert engine.report(gather=True).is_tuned, f"no order was found in {MOST_TUNING} steps"
        found = {"tuning": str(engine.report(gather=True).tuning)}
    found |= measure(machine, model, module, step)
    report = engine.report()
    found |= {"clock": report.clock, "ms of the report": round(report.seconds * 1e3, 1)}
    if report.moved_units:
        found |= {"GB/s out, back": [round(rate / 1e9, 1) for rate in (report.move_out_rate, report.move_in_rate)]}
    engine.close()
    return found


def models(machine: Machine) -> list[Model]:
    """The tiny ones of a rehearsal are in float32."""
    generator = torch.Generator().manual_seed(0)
    is_cuda, dtype = machine.is_cuda, torch.bfloat16 if machine.is_cuda else torch.float32
    layers, vocab, sizes = (4, 2048, (4096, 32, 8, 14336)) if is_cuda else (1, 50, (64, 4, 2, 96))
    shape = {"hidden": 2048, "blocks": 8, "vocab": 32000} if is_cuda else {"hidden": 64, "blocks": 2, "vocab": 50}

    def batch(vocab: int, rows: int, length: int) -> Tensor:
        return torch.randint(vocab, (rows, length if is_cuda else 32), generator=generator).to(machine.device)

    def llama(is_ours: bool) -> nn.Module:
        with machine.device:
            return LlamaStage(layers, vocab, sizes, is_ours).to(dtype)

    def plain_decoder(is_ours: bool) -> nn.Module:
        with machine.device:
            return decoder.Stage(0, 1, attention="ours" if is_ours else "whole sequences", **shape).to(dtype)

    return [
        Model("Llama stage", llama, batch(vocab, 2, 32768)),
        Model("hidden 2048", plain_decoder, batch(shape["vocab"], 4, 16384)),
    ]


def training(machine: Machine) -> Iterator[Case]:
    place = seq1f1b.HOST if machine.is_cuda else tempfile.gettempdir()
    arms: list[tuple[str, Callable[..., Record], dict[str, Any]]] = [
        (ALONE[0], alone, {"is_truth": True}),
        *((f"k {k}", ours, {"k": k}) for k in (4, 1, 8)),
        ("torch Schedule1F1B", torchs, {}),
        ("k 4, seq-zb-h1", ours, {"k": 4, "schedule": "seq-zb-h1"}),
        ("k 16", ours, {"k": 16}),
        ("k 4, recompute", ours, {"k": 4, "memory": seq1f1b.Memory(recompute="all")}),
        ("k 4, moved", ours, {"k": 4, "memory": seq1f1b.Memory(offload=place)}),
        (ALONE[1], alone, {}),
        ("tuned", ours, {"k": 4, "schedule": "tuned"}),
    ]
    device_times(machine, lambda: torch.ones(8, device=machine.device) + 1)  # sets the profiler up, for all arms alike
    for model in models(machine):
        for name, run, options in arms if machine.is_cuda or model.name == "Llama stage" else arms[:2]:
            if machine.is_cuda:
                gc.collect()
                torch.cuda.empty_cache()
            yield f"{model.name}, {name}", functools.partial(run, machine, model, **options)
        model.gradients.clear()
