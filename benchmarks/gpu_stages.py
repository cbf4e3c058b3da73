"""The stages of gpu.py: lists of cases, each a function that returns figures and raises where something is wrong."""

from __future__ import annotations

import argparse
import csv
import ctypes
import functools
import gc
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cuda"))

import aten_stand_ins
import attention_runs
import gpu
import kernel_table
import model as benchmark_model
import probes as probes_of_primitives
import processes as local_processes
import tiny_model
import torch
import torch.nn.functional as F
from torch import Tensor

import seq1f1b
from seq1f1b import _C
from seq1f1b.device import cuda, cuda_kernels
from seq1f1b.device.devices import step_on
from seq1f1b.testing import run_ranks

Case = tuple[str, Callable[[], dict[str, Any]]]
aten = torch.ops.aten


class Unmeasured(Exception):
    """What a case needs is not here."""


class Machine:
    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.emulated = False  # a test runs our CUDA kernels on the CPU
        self.device = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")

    def need_cuda(self) -> None:
        if not self.is_cuda:
            raise Unmeasured("needs a CUDA device")

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 15, budget: float = 0.4) -> float:
        """Median of a call, warm; by events of the device. Fewer repeats where they would take more than the budget."""
        run()
        self.sync()
        start = time.perf_counter()
        run()
        self.sync()
        repeats = max(3, min(repeats, int(budget / max(time.perf_counter() - start, 1e-6))))
        if not self.is_cuda:
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            return statistics.median(times)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        self.sync()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e-3

    def poison(self) -> None:
        """NaN in what the caching allocator hands out next: a kernel that reads what nobody wrote shows it."""
        if self.is_cuda:
            blocks = [torch.full((1 << bits,), float("nan"), device=self.device) for bits in range(8, 25)]
            del blocks

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """More than before, at most, that torch's allocator held while the call ran."""
        if not self.is_cuda:
            run()
            return 0
        gc.collect()
        self.sync()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.sync()
        return torch.cuda.max_memory_allocated() - before


def random(machine: Machine, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device=machine.device, dtype=torch.float32).to(dtype)


# -- environment -----------------------------------------------------------------------------------------------------


def environment(machine: Machine) -> Iterator[Case]:
    def versions() -> dict[str, Any]:
        found: dict[str, Any] = {
            "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "libc": " ".join(platform.libc_ver()), "kernel": platform.release(), "cores": os.cpu_count(),
            "seq1f1b": seq1f1b.__version__, "isa": _C.attention_isa(), "own CUDA kernels": {
                name: {"source": operation.source, "compiler": operation.compiler, "code": operation.architectures}
                for name, operation in cuda_kernels.operations().items()
            },
        }  # fmt: skip
        found |= {name: shutil.which(name) or "none" for name in ("gcc", "nvcc", "ncu", "compute-sanitizer")}
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
        if machine.is_cuda:
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "device": properties.name, "sm": f"{properties.major}{properties.minor}",
                "multiprocessors": properties.multi_processor_count, "bytes": properties.total_memory,
                "free bytes": torch.cuda.mem_get_info()[0], "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())), "devices": torch.cuda.device_count(),
            }  # fmt: skip
        return found

    def driver() -> dict[str, Any]:
        machine.need_cuda()
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,compute_mode"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        values = (
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip().split(", ")
        )
        return dict(zip(fields.split(","), values, strict=True))

    def binding() -> dict[str, Any]:
        """The extension was built without torch: its functions are found in this one, and its ops run."""
        out = seq1f1b.causal_attention(*(torch.ones(1, 1, 3, 8, device=machine.device) for _ in range(3)), layer=0)
        torch.testing.assert_close(out, torch.ones_like(out))
        return {"functions": len(_C.torch_functions()), "file": _C.__file__.rpartition("/")[2]}

    def schemas() -> dict[str, Any]:
        drift = {name: text for name in aten_stand_ins.SCHEMAS if (text := aten_stand_ins.schema_drift(name))}
        assert not drift, drift
        newer = aten._flash_attention_forward.default._schema.arguments
        return {
            "num_splits": any(argument.name == "num_splits" for argument in newer),
            "inplace flash": hasattr(aten, "_flash_attention_forward_no_dropout_inplace"),
        }

    yield from (("versions", versions), ("driver", driver), ("binding", binding), ("schemas", schemas))


# -- attention: against fp64 of the whole sequence -------------------------------------------------------------------


def attention_errors(
    machine: Machine, dtype: torch.dtype, head_dim: int, kv_heads: int, sizes: list[int], options: dict[str, Any],
    kernels: str, key_range: int = cuda.KEY_RANGE,
) -> dict[str, Any]:  # fmt: skip
    """Errors of segments and of the whole, forward and backward, and whether a second run gives the same bits."""
    os.environ["SEQ1F1B_CUDA_KERNELS"] = kernels
    heads, cuda.KEY_RANGE = 8, key_range
    options = {k: v.to(machine.device) if isinstance(v, Tensor) else v for k, v in options.items()}
    qkv, (dout, *_) = (
        [
            t.to(machine.device)
            for t in attention_runs.random_qkv(
                heads, kv_heads, tokens=sum(sizes), head_dim=head_dim, seed=seed, dtype=dtype
            )
        ]
        for seed in (0, 1)
    )
    whole = functools.partial(seq1f1b.causal_attention, layer=0, **options)
    truth = attention_runs.gradients(
        lambda *t: attention_runs.formula(*t, **options), *(t.double() for t in (*qkv, dout))
    )
    peer = attention_runs.gradients(lambda *t: attention_runs.formula(*t, **options), *qkv, dout)
    machine.poison()
    with step_on(machine.device):
        runs = [attention_runs.segmented(sizes, options, [qkv], [dout])[0] for _ in range(2)]
    found = {
        "segmented": attention_runs.errors(runs[0], truth),
        "whole": attention_runs.errors(attention_runs.gradients(whole, *qkv, dout), truth),
        "formula": attention_runs.errors(peer, truth),
    }
    floor = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps / 16)
    for name in ("segmented", "whole"):
        for error, theirs in zip(found[name], found["formula"], strict=True):
            assert error <= 2 * theirs + floor, {k: [f"{e:.1e}" for e in v] for k, v in found.items()}
    equal = dict(zip(("out", "dq", "dk", "dv"), (torch.equal(*pair) for pair in zip(*runs, strict=True)), strict=True))
    texts = {name: " ".join(f"{e:.1e}" for e in values) for name, values in found.items()}
    return {**texts, "reruns equal": equal}


def attention_options(tokens: int) -> dict[str, dict[str, Any]]:
    docs = torch.arange(tokens).mul(5).div(tokens, rounding_mode="floor").expand(2, -1)
    slopes = 2.0 ** -torch.arange(1, 9)
    every: dict[str, dict[str, Any]] = {
        "window": {"window": tokens // 5}, "softcap": {"softcap": 20.0}, "alibi": {"alibi_slopes": slopes},
        "documents": {"doc_ids": docs}, "scale": {"scale": 0.3},
    }  # fmt: skip
    return every | {"all": {name: value for options in every.values() for name, value in options.items()}}


def attention(machine: Machine) -> Iterator[Case]:
    """By torch's ops."""
    bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    tokens = 512 if machine.is_cuda else 24
    odd = [113, 7, 1, 391] if machine.is_cuda else [9, 3, 1, 11]
    halves, many = [tokens // 2] * 2, [tokens // 8] * 8
    every = attention_options(tokens)
    shapes: list[tuple[torch.dtype, int, int, list[int], str]] = []
    few_keys = 100 if machine.is_cuda else 4
    shapes += [(dtype, 64, 2, odd, "") for dtype in (bf16, fp16, fp32, fp64)]
    shapes += [(bf16, 128, kv_heads, sizes, "") for kv_heads in (8, 2, 1) for sizes in (halves, odd, many)]
    shapes += [(dtype, 64, 2, odd, name) for name in every for dtype in (bf16, fp32)]
    shapes += [(bf16, head_dim, 2, odd, "") for head_dim in (32, 40, 80, 96, 192, 256, 36)]
    shapes += [(fp32, head_dim, kv_heads, odd, "") for head_dim in (128, 36) for kv_heads in (8, 1)]
    shapes += [(fp16, 128, 2, [tokens - 1, 1], ""), (bf16, 64, 2, [1, tokens - 1], "window")]
    for dtype, head_dim, kv_heads, sizes, name in shapes if machine.is_cuda else shapes[::5]:
        text = f"{str(dtype).removeprefix('torch.')} d{head_dim} kv{kv_heads} {sizes} {name}".rstrip()
        arguments = (machine, dtype, head_dim, kv_heads, sizes, every.get(name, {}), "library")
        yield text, functools.partial(attention_errors, *arguments)
        if sizes == odd and head_dim == 64:
            yield f"{text}, backward by {few_keys} keys", functools.partial(attention_errors, *arguments, few_keys)


# -- the package's own kernels ---------------------------------------------------------------------------------------


def own_operations(machine: Machine) -> dict[str, cuda_kernels.Operation]:
    if not machine.emulated:
        machine.need_cuda()
    found = cuda_kernels.operations()
    if not found:
        raise Unmeasured(f"there is no {cuda_kernels.LIBRARY.name}: it was not built")
    return found


def primitives(machine: Machine) -> Iterator[Case]:
    """Each primitive of the kernels alone, on numbers that tell which came where."""

    def one(check: Callable[[probes_of_primitives.Prober], None]) -> dict[str, Any]:
        own_operations(machine)
        try:
            operation = kernel_table.find_operation(cuda_kernels.LIBRARY, "primitive_probes")
        except ValueError:
            raise Unmeasured("the library has no probes: build it with SEQ1F1B_CUDA_TILES=all") from None
        check(probes_of_primitives.on_the_gpu(operation))
        return {}

    for check in probes_of_primitives.CHECKS:
        yield check.__name__, functools.partial(one, check)


def own_kernels(machine: Machine) -> Iterator[Case]:
    """Against fp64, with NaN in all that they are given to write; out, dk and dv have the same bits again."""

    def one(*arguments: Any) -> dict[str, Any]:
        own_operations(machine)
        found = attention_errors(machine, *arguments, "own")
        assert all(found["reruns equal"][name] for name in ("out", "dk", "dv")), found
        return found

    tokens = 1024 if machine.is_cuda else 150
    odd, many = [113, 7, 1, tokens - 121], [tokens // 4] * 3 + [tokens - tokens // 4 * 3]
    every = attention_options(tokens)
    del every["alibi"], every["all"]["alibi_slopes"]
    shapes: list[tuple[torch.dtype, int, int, list[int], str]] = []
    for dtype, head_dim in itertools.product((torch.bfloat16, torch.float16), (64, 128)):
        shapes += [(dtype, head_dim, kv_heads, odd, "") for kv_heads in (8, 2, 1)]
        shapes += [(dtype, head_dim, 2, odd, name) for name in every]
        shapes += [(dtype, head_dim, 2, sizes, "") for sizes in ([tokens], many, [tokens - 1, 1], [1, tokens - 1])]
    for dtype, head_dim, kv_heads, sizes, name in shapes:
        text = f"{str(dtype).removeprefix('torch.')} d{head_dim} kv{kv_heads} {sizes} {name}".rstrip()
        yield text, functools.partial(one, dtype, head_dim, kv_heads, sizes, every.get(name, {}))


def tiny(machine: Machine) -> Iterator[Case]:
    """Each kind of launch once on few tokens: for the tools that watch every access."""

    def one(head_dim: int, kv_heads: int, options: dict[str, Any]) -> dict[str, Any]:
        own_operations(machine)
        return attention_errors(machine, torch.bfloat16, head_dim, kv_heads, [150, 1, 49], options, "own")

    docs = attention_options(200)["documents"]
    for head_dim, kv_heads, options in (
        (64, 2, {}),
        (128, 8, {"window": 70}),
        (128, 1, {"softcap": 20.0}),
        (64, 2, docs),
    ):
        yield f"d{head_dim} kv{kv_heads} {' '.join(options)}", functools.partial(one, head_dim, kv_heads, options)


def watched(machine: Machine, tool: str, options: list[str], stage: str, seconds: float) -> str:
    """A stage of this file under a tool of the CUDA toolkit; its output."""
    own_operations(machine)
    if shutil.which(tool) is None:
        raise Unmeasured(f"there is no {tool}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "watched.jsonl"
        command = [tool, *options, sys.executable, __file__, "--device", "cuda", "--stage", stage, "--out", str(out)]
        done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True, timeout=seconds)
        states = [record["state"] for record in gpu.read(out) if record.get("case")]
    assert done.returncode == 0 and states and set(states) == {"passed"}, (
        states,
        done.stdout[-1200:],
        done.stderr[-200:],
    )
    return done.stdout


def sanitizer(machine: Machine) -> Iterator[Case]:
    def one(tool: str) -> dict[str, Any]:
        options = ["--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=s1f_"]
        said = watched(machine, "compute-sanitizer", options, "tiny", 40)
        return {"said": said.strip().splitlines()[-1]}

    for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
        yield tool, functools.partial(one, tool)


METRICS = {  # of ncu
    "us": "gpu__time_duration.sum",
    "tensor cores %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "SM %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "bank conflicts of loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "bank conflicts of stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "waits for long scoreboard": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "waits for a barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "waits for the math pipe": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
}


def one_shape(machine: Machine) -> Iterator[Case]:
    """What ncu looks at: our kernels once, on a shape of the table."""

    def run() -> dict[str, Any]:
        inputs = Segment(machine, *SHAPES[0] if machine.is_cuda else SMALL)
        operations = own_operations(machine)
        out, lse = cuda._own_forward(operations["attention_forward"], *inputs.qkv, inputs.options)
        if "attention_backward" in operations:
            inputs.own_backward(operations["attention_backward"], out, lse)
        machine.sync()
        return {}

    yield "32/8 heads of 128, 4096 tokens of 16384", run


def ncu(machine: Machine) -> Iterator[Case]:
    def run() -> dict[str, Any]:
        options = ["--kernel-name", "regex:s1f_", "--csv", "--page", "raw", "--metrics", ",".join(METRICS.values())]
        said = watched(machine, "ncu", options, "one shape", 55)
        lines = [line for line in said.splitlines() if line.startswith('"')]
        found = {}
        for row in csv.DictReader(lines):
            values = {name: row.get(metric, "") for name, metric in METRICS.items()}
            if any(values.values()) and row.get("Kernel Name"):  # the row of units has no kernel
                found[row["Kernel Name"]] = values
        assert found, said[-1000:]
        return found

    yield "32/8 heads of 128, 4096 tokens of 16384", run


# -- engine: against the same model run whole ------------------------------------------------------------------------


Step = Callable[[tiny_model.Config, tiny_model.Stage, Tensor, Tensor], dict[str, Tensor]]


def compare_with_whole(machine: Machine, dtype: torch.dtype, run: Step) -> dict[str, Any]:
    """The error of a step's gradients beside that of the whole model in the same dtype, both from fp64."""
    config = tiny_model.Config(kv_heads=2)
    tokens, target = tiny_model.batch(config, 3, 40)
    on_device = tokens.to(machine.device), target.to(machine.device)
    exact = tiny_model.whole_model(config).to(machine.device)
    _, truth = tiny_model.run_whole(exact, *on_device, 3)
    model = tiny_model.whole_model(config).to(machine.device, dtype)
    _, whole = tiny_model.run_whole(model, *on_device, 3)
    theirs = tiny_model.gradient_error(whole, truth)
    ours = tiny_model.gradient_error(run(config, model, tokens, target), truth)
    floor = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps  # the whole model in fp64 is the truth itself
    assert ours <= 2 * theirs + floor, f"{ours:.1e}, the whole model in {dtype} {theirs:.1e}"
    return {"error": f"{ours:.1e}", "whole": f"{theirs:.1e}"}


def step_of_rank(
    group: Any,
    num_ranks: int,
    transport: str,
    config: tiny_model.Config,
    model: tiny_model.Stage,
    tokens: Tensor,
    target: Tensor,
) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    stage = tiny_model.stage_of(model, config, group.rank, num_ranks).to(device)
    engine = seq1f1b.PipelineEngine(
        stage, num_microbatches=3, num_segments=4, segment_sizes=[17, 4, 12, 7], loss_fn=tiny_model.cross_entropy,
        group=group, transport=transport, timeout=30.0, first_step_timeout=50.0,
    )  # fmt: skip
    for _ in range(3):  # copies go through host memory in the first step of a shape
        stage.zero_grad()
        engine.step(tokens, target=target)
    engine.close()
    return {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}


def engine(machine: Machine) -> Iterator[Case]:
    def ranks(num_ranks: int, dtype: torch.dtype, transport: str) -> dict[str, Any]:
        if transport != "auto":
            machine.need_cuda()

        def run(*arguments: Any) -> dict[str, Tensor]:
            found = run_ranks(num_ranks, lambda group: step_of_rank(group, num_ranks, transport, *arguments))
            return {name: g for grads in found for name, g in grads.items()}

        return compare_with_whole(machine, dtype, run)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for num_ranks in (1, 2, 4):
            yield f"{num_ranks} ranks as threads, {dtype}", functools.partial(ranks, num_ranks, dtype, "auto")
    for num_ranks, dtype in ((2, torch.float32), (4, torch.bfloat16)):
        name = f"{num_ranks} ranks as threads, copies on the device, {dtype}"
        yield name, functools.partial(ranks, num_ranks, dtype, "copy")

    def steady() -> dict[str, Any]:
        """No memory is added after the third step, and how often the host waits for the device in a step."""
        config = tiny_model.Config(kv_heads=2)
        stage = tiny_model.whole_model(config).to(machine.device, torch.bfloat16)
        tokens, target = (t.to(machine.device) for t in tiny_model.batch(config, 3, 40))
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=3, num_segments=4, loss_fn=tiny_model.cross_entropy)
        held, waits = [], 0
        for step in range(6):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if machine.is_cuda and step == 5:
                    torch.cuda.set_sync_debug_mode("warn")
                pipeline.step(tokens, target=target)
                if machine.is_cuda:
                    torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchroniz" in str(warning.message) for warning in caught)
            stage.zero_grad()
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if machine.is_cuda else (0, 0))
        assert held[2] == held[5], held
        return {"allocated": held[5][0], "reserved": held[5][1], "waits in a step": waits}

    def own_thread() -> dict[str, Any]:
        """Backward runs in the thread of the rank."""
        seen = []
        config = tiny_model.Config(layers=1)
        stage = tiny_model.whole_model(config).to(machine.device, torch.float32)
        next(stage.blocks["0"].parameters()).register_hook(lambda grad: seen.append(threading.get_ident()))
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=1, num_segments=2, loss_fn=tiny_model.cross_entropy)
        tokens, target = tiny_model.batch(config, 1, 16)
        pipeline.step(tokens, target=target)
        assert set(seen) == {threading.get_ident()}, "another thread"
        return {}

    def autocast() -> dict[str, Any]:
        config = tiny_model.Config(layers=2)
        stage = tiny_model.whole_model(config).to(machine.device, torch.float32)
        tokens, target = tiny_model.batch(config, 2, 32)
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=tiny_model.cross_entropy)
        with torch.autocast(machine.device.type, torch.bfloat16):
            losses = pipeline.step(tokens, target=target)
            whole, _ = tiny_model.run_whole(stage, tokens.to(machine.device), target.to(machine.device), 2)
        difference = max(abs(float(a) - float(b)) for a, b in zip(losses, whole, strict=True))
        assert difference < 0.02, difference
        return {"difference of losses": f"{difference:.1e}"}

    def compiled() -> dict[str, Any]:
        machine.need_cuda()  # compiling on the CPU is tests/runtime/test_engine_compile.py's
        config = tiny_model.Config(layers=2)
        stage = torch.compile(tiny_model.whole_model(config).to(machine.device, torch.bfloat16))
        tokens, target = tiny_model.batch(config, 2, 32)
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=tiny_model.cross_entropy)
        start = time.perf_counter()
        losses = pipeline.step(tokens, target=target)
        assert all(bool(torch.isfinite(loss)) for loss in losses)
        return {"seconds": round(time.perf_counter() - start, 1)}

    yield from (("steady memory", steady), ("own thread", own_thread), ("autocast", autocast), ("compiled", compiled))


# -- processes: two on one device ------------------------------------------------------------------------------------


def process_rank(rank: int, world: int, device: str, transport: str, dtype: torch.dtype) -> None:
    """Steps over two processes. Every rank has the whole model, so it checks the gradients of its own stage."""
    if transport == "nccl":  # takes two ranks of one GPU for two hosts
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    machine = Machine(device)

    def run(config: Any, model: Any, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        stage = tiny_model.stage_of(model, config, rank, world).to(machine.device)
        pipeline = seq1f1b.PipelineEngine(
            stage, num_microbatches=3, num_segments=4, segment_sizes=[17, 4, 12, 7], loss_fn=tiny_model.cross_entropy,
            transport=transport, timeout=20.0, first_step_timeout=30.0,
        )  # fmt: skip
        for _ in range(3):
            stage.zero_grad()
            pipeline.step(tokens, target=target)
        mine = {name: p.grad.cpu() for name, p in pipeline.named_parameters() if p.grad is not None}
        gathered = pipeline.all_gather_object({name: g.float().tolist() for name, g in mine.items()})
        pipeline.close()
        return {name: torch.tensor(g, device=machine.device) for grads in gathered for name, g in grads.items()}

    compare_with_whole(machine, dtype, run)


def processes(machine: Machine) -> Iterator[Case]:
    def pair(transport: str, dtype: torch.dtype) -> dict[str, Any]:
        if transport in ("copy", "nccl"):
            machine.need_cuda()
        local_processes.run_processes(2, process_rank, machine.device.type, transport, dtype)
        return {}

    for transport in ("shm", "copy", "nccl", "c10d"):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{transport}, {dtype}", functools.partial(pair, transport, dtype)


# -- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(machine: Machine) -> Iterator[Case]:
    size, side = (1 << 31, 8192) if machine.is_cuda else (1 << 22, 256)

    def copy() -> dict[str, Any]:
        source, target = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
        return {"GB/s read and written": round(2 * size / machine.seconds(lambda: target.copy_(source)) / 1e9)}

    def product() -> dict[str, Any]:
        a, b = (random(machine, side, side) for _ in range(2))
        return {"TFLOP/s": round(2 * side**3 / machine.seconds(lambda: a @ b) / 1e12, 3)}

    def over_host() -> dict[str, Any]:
        """A message of 16 MiB to host memory and back, as it goes between stages, and by pinned memory."""
        machine.need_cuda()
        data = torch.empty(1 << 24, dtype=torch.uint8, device=machine.device)
        pageable, pinned = torch.empty(1 << 24, dtype=torch.uint8), torch.empty(1 << 24, dtype=torch.uint8).pin_memory()
        runs: dict[str, Callable[[], Any]] = {
            "to pageable": lambda: pageable.copy_(data), "from pageable": lambda: data.copy_(pageable),
            "to pinned": lambda: pinned.copy_(data), "from pinned": lambda: data.copy_(pinned), "cpu()": data.cpu,
        }  # fmt: skip
        return {f"{name} GB/s": round((1 << 24) / machine.seconds(run) / 1e9, 1) for name, run in runs.items()}

    yield from (("device copy", copy), ("bf16 product", product), ("over host memory", over_host))


# -- speed of attention: one segment over its prefix -----------------------------------------------------------------


class Segment:
    """One segment over its prefix: what attention takes and gives."""

    def __init__(self, machine: Machine, heads: int, kv_heads: int, head_dim: int, tokens: int, end: int) -> None:
        on_cpu = torch.bfloat16 if machine.emulated else torch.float64  # of the plain way, the one that the CPU has
        dtype = torch.bfloat16 if machine.is_cuda else on_cpu
        self.offset = end - tokens
        self.q, self.dout = (random(machine, 1, tokens, heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(2))
        self.keys, self.values = (random(machine, 1, kv_heads, end, head_dim, dtype=dtype) for _ in range(2))
        self.qkv = (self.q, self.keys, self.values)
        wide = torch.promote_types(dtype, torch.float32)
        self.dk, self.dv = (torch.zeros_like(self.keys, dtype=wide) for _ in range(2))
        empty = self.q.new_empty(0)
        self.options = cuda.Options(head_dim**-0.5, 0, 0.0, empty, empty, empty)
        self.flops = 4 * heads * head_dim * (tokens * self.offset + tokens * (tokens + 1) / 2)

    def own_backward(
        self, operation: cuda_kernels.Operation, out: Tensor, lse: Tensor, kernel: int = -1
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cuda._own_backward(
            operation, self.dout, *self.qkv, out, lse, self.options, self.dk, self.dv, kernel=kernel
        )

    def timed(self, machine: Machine, name: str, run: Callable[[], Any]) -> str:
        seconds = machine.seconds(run, budget=0.25)
        rate = (2.5 if "backward" in name else 1.0) * self.flops / seconds / 1e12
        return f"{seconds * 1e3:.3f} ms {rate:.0f} TFLOP/s"


def speed(machine: Machine) -> Iterator[Case]:
    def cell(heads: int, kv_heads: int, head_dim: int, tokens: int, end: int) -> dict[str, Any]:
        """ms and TFLOP/s of the library path, of our kernels, and of torch's flash ops alone over the same numbers.

        recipe: of the Seq1F1B reference: keys concatenated, variable-length flash, dK and dV added in bf16.
        """
        os.environ["SEQ1F1B_CUDA_KERNELS"] = "library"
        inputs = Segment(machine, heads, kv_heads, head_dim, tokens, end)
        q, options = inputs.q, inputs.options
        out, lse = cuda._forward(*inputs.qkv, options)
        runs: dict[str, Callable[[], Any]] = {
            "forward": lambda: cuda._forward(*inputs.qkv, options),
            "backward": lambda: cuda._backward(inputs.dout, *inputs.qkv, out, lse, options, inputs.dk, inputs.dv),
        }
        if machine.is_cuda:
            runs |= peers(machine, *inputs.qkv, inputs.dout, out, lse, inputs.offset)
            dense = aten._flash_attention_forward.default(
                *(t.transpose(1, 2) for t in inputs.qkv), None, None, tokens, end, 0.0, True, False
            )[0].transpose(1, 2)
            check_close("our forward and the dense op", out, dense)
        if machine.is_cuda or machine.emulated:
            runs |= own_runs(inputs, out, lse)
        found: dict[str, Any] = {"way": cuda.way(q, options), "dtype": str(q.dtype).removeprefix("torch.")}
        found |= {name: inputs.timed(machine, name, run) for name, run in runs.items()}
        found["backward MB"] = round(machine.peak_bytes(runs["backward"]) / 1e6)
        return found

    for heads, kv_heads, head_dim, tokens, end in cells(machine):
        name = f"{heads}/{kv_heads} heads of {head_dim}, {tokens} tokens of {end}"
        yield name, functools.partial(cell, heads, kv_heads, head_dim, tokens, end)

    def key_ranges() -> dict[str, Any]:
        """Of 4096 tokens behind 61440: time and memory of the backward over the most keys that one call takes."""
        machine.need_cuda()
        found = {}
        for longest in (2048, 4096, 8192, 16384, 65536):
            cuda.KEY_RANGE = longest
            result = cell(32, 8, 128, 4096, 65536)
            found[longest] = f"{result['backward']}, {result['backward MB']} MB"
        return found

    yield "ranges of keys in the backward", key_ranges

    def call() -> dict[str, Any]:
        """What a call costs the host beside the device's work: one token, one head."""
        q, k, v = (random(machine, 1, 1, 1, 64).requires_grad_() for _ in range(3))

        def both() -> None:
            seq1f1b.causal_attention(q, k, v, layer=0).backward(q)

        both()
        start = time.perf_counter()
        for _ in range(50):
            both()
        machine.sync()
        return {"us, forward and backward": round((time.perf_counter() - start) / 50 * 1e6)}

    yield "cost of a call", call


def cells(machine: Machine) -> list[tuple[int, int, int, int, int]]:
    """(heads, kv_heads, head_dim, tokens, end): 12 shapes, forward and backward of each: the 24 cells of the table."""
    if not machine.is_cuda:
        return [SMALL]
    grid = [(32, 8, 128, tokens, end) for tokens in (4096, 2048, 8192) for end in (tokens, 16384, 65536)]
    return [*grid, (8, 8, 128, 1024, 32768), (32, 32, 128, 4096, 32768), (32, 8, 64, 4096, 16384)]


def check_close(what: str, ours: Tensor, theirs: Tensor, allowed: float = 2**-7) -> None:
    """Within an ulp of bf16, of the largest number: each side rounds its inner products and its result."""
    if theirs.numel() == 0:
        return
    difference = float((ours.double() - theirs.double()).abs().max())
    allowed *= max(1.0, float(theirs.abs().max()))
    assert difference <= allowed, f"{what} differ by {difference}, more than {allowed}"


SMALL = (4, 2, 64, 64, 256)
SHAPES = [(32, 8, 128, 4096, 16384), (8, 8, 128, 1024, 32768), (32, 8, 64, 4096, 16384), (32, 32, 128, 8192, 8192)]


def own_runs(inputs: Segment, out: Tensor, lse: Tensor) -> dict[str, Callable[[], Any]]:
    """Our kernels, where they were built, once their results were found to be those of the library path."""
    operations = cuda_kernels.operations()
    runs: dict[str, Callable[[], Any]] = {}
    if forward := operations.get("attention_forward"):
        own_out, own_lse = cuda._own_forward(forward, *inputs.qkv, inputs.options)
        check_close("out of own kernels and of the dense op", own_out, out)
        check_close("lse of own kernels and of the dense op", own_lse, lse, 2**-16)  # sums in float32
        runs["own forward"] = lambda: cuda._own_forward(forward, *inputs.qkv, inputs.options)
    if backward := operations.get("attention_backward"):
        found, prefix = [], slice(0, inputs.offset)  # its own rows are returned
        for own in (True, False):
            inputs.dk.zero_()
            inputs.dv.zero_()
            if own:
                grads = inputs.own_backward(backward, out, lse)
            else:
                grads = cuda._backward(inputs.dout, *inputs.qkv, out, lse, inputs.options, inputs.dk, inputs.dv)
            found.append((*grads, inputs.dk[:, :, prefix].clone(), inputs.dv[:, :, prefix].clone()))
        for name, ours, theirs in zip(("dq", "own dk", "own dv", "dk", "dv"), *found, strict=True):
            check_close(f"{name} of own kernels and of the library path", ours, theirs)
        runs["own backward"] = lambda: inputs.own_backward(backward, out, lse)
    return runs


def sweep(machine: Machine) -> Iterator[Case]:
    """Every tile of our kernels that is compiled, on four shapes of attention, each held to the launcher's choice."""

    def one(heads: int, kv_heads: int, head_dim: int, tokens: int, end: int) -> dict[str, Any]:
        operations, found = own_operations(machine), {}
        inputs = Segment(machine, heads, kv_heads, head_dim, tokens, end)
        out, lse = cuda._own_forward(operations["attention_forward"], *inputs.qkv, inputs.options)
        for name, operation in operations.items():
            if name == "attention_forward":
                run = functools.partial(cuda._own_forward, operation, *inputs.qkv, inputs.options)
            else:
                run = functools.partial(inputs.own_backward, operation, out, lse)
            chosen = run()
            for index, kernel in enumerate(operation.kernels):
                if (kernel.dtype, kernel.head_dim, kernel.query_rows > 0) != ("bfloat16", head_dim, True):
                    continue
                of_kernel = functools.partial(run, kernel=index)
                try:
                    results = of_kernel()
                except ValueError as error:  # not one to choose, or more shared memory than this GPU has
                    found[kernel.name] = str(error)
                    continue
                for ours, theirs in zip(results, chosen, strict=True):
                    check_close(f"{kernel.name} and the launcher's choice", ours, theirs)
                found[kernel.name] = inputs.timed(machine, name, of_kernel)
        return found

    for shape in SHAPES if machine.is_cuda else [SMALL, (2, 1, 128, 64, 192)]:
        heads, kv_heads, head_dim, tokens, end = shape
        name = f"{heads}/{kv_heads} heads of {head_dim}, {tokens} tokens of {end}"
        yield name, functools.partial(one, *shape)


def peers(
    machine: Machine, q: Tensor, keys: Tensor, values: Tensor, dout: Tensor, out: Tensor, lse: Tensor, offset: int
) -> dict[str, Callable[[], Any]]:
    tokens, end = q.shape[2], keys.shape[2]
    dense = [t.transpose(1, 2).contiguous() for t in (q, keys, values)]
    packed = [t[0] for t in dense]
    dense_dout, dense_out = (t.transpose(1, 2).contiguous() for t in (dout, out))
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=machine.device) for n in (tokens, end)]
    empty = torch.empty(0, dtype=torch.int64, device=machine.device)
    packed_lse = aten._flash_attention_forward.default(*packed, *bounds, tokens, end, 0.0, True, False)[1]
    before = [torch.zeros_like(t) for t in packed[1:]]
    sums = [torch.zeros(t.shape, device=machine.device) for t in dense[1:]]
    prefix, new = [t[:offset] for t in packed[1:]], [t[offset:] for t in packed[1:]]

    def dense_backward() -> None:
        _, dk, dv = aten._flash_attention_backward.default(
            dense_dout, *dense, dense_out, lse, None, None, tokens, end, 0.0, True, empty, empty
        )
        for total, part in zip(sums, (dk, dv), strict=True):
            total += part

    def recipe_forward() -> None:
        whole = [torch.cat(pair) for pair in zip(prefix, new, strict=True)]
        aten._flash_attention_forward.default(packed[0], *whole, *bounds, tokens, end, 0.0, True, False)

    def recipe_backward() -> None:
        _, dk, dv = aten._flash_attention_backward.default(
            dense_dout[0], *packed, dense_out[0], packed_lse, *bounds, tokens, end, 0.0, True, empty, empty
        )
        dk += before[0]
        dv += before[1]

    found: dict[str, Callable[[], Any]] = {
        "dense forward": lambda: aten._flash_attention_forward.default(
            *dense, None, None, tokens, end, 0.0, True, False
        ),
        "varlen forward": lambda: aten._flash_attention_forward.default(
            *packed, *bounds, tokens, end, 0.0, True, False
        ),
        "recipe forward": recipe_forward,
        "dense backward + fp32 add": dense_backward,
        "recipe backward": recipe_backward,
    }
    if offset == 0:
        expanded = [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (keys, values)]
        found["cudnn forward"] = lambda: aten._scaled_dot_product_cudnn_attention.default(
            q, *expanded, None, True, 0.0, True, False
        )
    return found


# -- training: steps of a model --------------------------------------------------------------------------------------


def training(machine: Machine) -> Iterator[Case]:
    shape = (
        {"hidden": 2048, "blocks": 8, "vocab": 32000} if machine.is_cuda else {"hidden": 64, "blocks": 2, "vocab": 50}
    )
    length, microbatches = (16384, 4) if machine.is_cuda else (32, 2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape["vocab"], (microbatches, length), generator=generator).to(machine.device)
    target = seq1f1b.shift_labels(tokens)
    dtype = torch.bfloat16 if machine.is_cuda else torch.float32

    first_losses: list[float] = []  # of each arm: the same model

    def measured(step: Callable[[], float]) -> dict[str, Any]:
        losses = [step()]
        first_losses.append(losses[0])
        assert abs(losses[0] - first_losses[0]) < 0.02, first_losses
        peak = machine.peak_bytes(lambda: losses.append(step()))
        times = []
        for _ in range(3):
            machine.sync()
            start = time.perf_counter()
            losses.append(step())
            machine.sync()
            times.append(time.perf_counter() - start)
        rate = microbatches * length / statistics.median(times)
        return {"tokens/s": round(rate), "peak growth MB": round(peak / 1e6), "loss": round(losses[0], 4)}

    def plain() -> dict[str, Any]:
        """The whole model by torch's own attention, one micro-batch after the other."""
        stage = benchmark_model.Stage(0, 1, attention="whole sequences", **shape).to(machine.device, dtype)

        def step() -> float:
            losses = []
            for x, y in zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True):
                loss = benchmark_model.cross_entropy(stage(x), y)
                (loss / microbatches).backward()
                losses.append(loss.detach())
            stage.zero_grad()
            return float(torch.stack(losses).mean())

        return measured(step)

    def pipelined(num_ranks: int, num_segments: int) -> dict[str, Any]:
        def rank(group: Any) -> Any:
            stage = benchmark_model.Stage(group.rank, num_ranks, **shape).to(machine.device, dtype)
            return seq1f1b.PipelineEngine(
                stage, num_microbatches=microbatches, num_segments=num_segments,
                loss_fn=benchmark_model.cross_entropy, group=group,
            )  # fmt: skip

        groups = seq1f1b.LoopbackGroup(num_ranks)
        engines = [rank(groups[index]) for index in range(num_ranks)]

        def step() -> float:
            losses: list[Any] = [None] * num_ranks

            def run(index: int) -> None:
                try:
                    losses[index] = engines[index].step(tokens, target=target)
                    for parameter in engines[index].parameters():
                        parameter.grad = None
                except BaseException as error:
                    losses[index] = error

            threads = [threading.Thread(target=run, args=(index,)) for index in range(num_ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for found in losses:
                if isinstance(found, BaseException):
                    raise found
            return float(torch.stack(losses[-1]).mean())

        return measured(step)

    yield "torch, whole sequences", plain
    for num_ranks, num_segments in ((1, 1), (1, 4), (1, 8), (2, 4)):
        yield f"{num_ranks} ranks, {num_segments} segments", functools.partial(pipelined, num_ranks, num_segments)


# -- probes: what later work needs to know ---------------------------------------------------------------------------


def ipc_child(handle: Any, done: Any) -> None:
    shared = handle.get()
    shared += 1
    torch.cuda.synchronize()
    done.put(float(shared.sum()))


def nccl_pair(rank: int, store_path: str) -> None:
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    torch.cuda.set_device(0)
    store = torch.distributed.FileStore(store_path, 2)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=2)
    data = torch.full((1 << 20,), float(rank), device="cuda")
    if rank == 0:
        torch.distributed.send(data, 1)
    else:
        torch.distributed.recv(data, 0)
        assert float(data.sum()) == 0.0
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


def probes(machine: Machine) -> Iterator[Case]:
    def driver_attributes() -> dict[str, Any]:
        machine.need_cuda()
        wanted = {  # of CUdevice_attribute
            "compute mode": 20, "opt-in shared memory": 97, "64-bit stream memory operations": 122,
            "stream wait nor": 123, "file descriptor handles": 103, "IPC events": 125, "tensor maps": 132,
        }  # fmt: skip
        library, value, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), {}
        for name, attribute in wanted.items():
            status = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
            found[name] = value.value if status == 0 else f"error {status}"
        return found

    def layouts() -> dict[str, Any]:
        machine.need_cuda()
        q = random(machine, 2, 100, 4, 64)
        bhsd = q.transpose(1, 2)
        flash = aten._flash_attention_forward.default(q, q, q, None, None, 100, 100, 0.0, True, False)
        efficient = aten._efficient_attention_forward.default(q, q, q, None, None, None, None, None, 0.0, 2, True)
        cudnn = aten._scaled_dot_product_cudnn_attention.default(bhsd, bhsd, bhsd, None, True, 0.0, True, False)
        named = {"flash": flash, "efficient": efficient, "cudnn": cudnn}
        return {f"lse of {name}": f"{tuple(r[1].shape)} {r[1].dtype} {r[1].stride()}" for name, r in named.items()}

    def alibi() -> dict[str, Any]:
        machine.need_cuda()
        q = random(machine, 1, 64, 4, 64)
        slopes = torch.ones(4, device=machine.device)
        try:
            aten._flash_attention_forward.default(q, q, q, None, None, 64, 64, 0.0, True, False, alibi_slopes=slopes)
        except RuntimeError as error:
            return {"torch's flash with ALiBi": str(error).splitlines()[0]}
        return {"torch's flash with ALiBi": "runs"}

    def ipc() -> dict[str, Any]:
        machine.need_cuda()
        context = torch.multiprocessing.get_context("spawn")
        handle, done = context.Queue(), context.Queue()
        child = context.Process(target=ipc_child, args=(handle, done))
        child.start()
        data = torch.ones(1 << 20, device=machine.device)
        handle.put(data)
        try:
            assert done.get(timeout=25) == float(2 << 20)
        finally:
            child.join(5)
            if child.is_alive():
                child.kill()
        assert float(data.sum()) == float(2 << 20)
        return {}

    def nccl_self() -> dict[str, Any]:
        """A communicator of one rank sends to itself: loads the library, and orders by the stream."""
        machine.need_cuda()
        library = ctypes.CDLL("libnccl.so.2")

        class UniqueId(ctypes.Structure):
            _fields_ = (("internal", ctypes.c_char * 128),)

        def check(status: int) -> None:
            library.ncclGetErrorString.restype = ctypes.c_char_p
            assert status == 0, library.ncclGetErrorString(status).decode()

        identity, communicator, version = UniqueId(), ctypes.c_void_p(), ctypes.c_int()
        torch.zeros(1, device=machine.device)  # makes the context
        check(library.ncclGetVersion(ctypes.byref(version)))
        check(library.ncclGetUniqueId(ctypes.byref(identity)))
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
        check(library.ncclCommInitRank(ctypes.byref(communicator), 1, identity, 0))
        source, target = (random(machine, 1 << 20, dtype=torch.float32) for _ in range(2))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        operand = [
            ctypes.c_size_t(source.numel()),
            ctypes.c_int(7),
            ctypes.c_int(0),
            communicator,
            stream,
        ]  # 7: float32
        check(library.ncclGroupStart())
        check(library.ncclSend(ctypes.c_void_p(source.data_ptr()), *operand))
        check(library.ncclRecv(ctypes.c_void_p(target.data_ptr()), *operand))
        check(library.ncclGroupEnd())
        machine.sync()
        assert torch.equal(source, target)
        check(library.ncclCommDestroy(communicator))
        return {"version": version.value}

    def nccl_two_processes() -> dict[str, Any]:
        """Two ranks on one GPU that take each other for another host's."""
        machine.need_cuda()
        with tempfile.TemporaryDirectory() as folder:
            context = torch.multiprocessing.get_context("spawn")
            children = [context.Process(target=nccl_pair, args=(rank, f"{folder}/store")) for rank in range(2)]
            for child in children:
                child.start()
            deadline = time.monotonic() + 25
            for child in children:
                child.join(max(0.1, deadline - time.monotonic()))
            codes = [child.exitcode for child in children]
            for child in children:
                if child.is_alive():
                    child.kill()
        return {"works": codes == [0, 0], "exit codes": codes}

    def default_attention() -> dict[str, Any]:
        """What torch itself would take for this shape, and that ours gives the same bits as its flash op."""
        machine.need_cuda()
        q = random(machine, 1, 8, 1024, 128)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            flash = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return {"equal": torch.equal(flash, seq1f1b.causal_attention(q, q, q, layer=0))}

    yield from (
        ("driver attributes", driver_attributes), ("layouts of lse", layouts), ("ALiBi", alibi),
        ("default attention", default_attention), ("NCCL to itself", nccl_self), ("CUDA IPC", ipc),
        ("NCCL, two processes on one GPU", nccl_two_processes),
    )  # fmt: skip


# -- one stage -------------------------------------------------------------------------------------------------------

STAGES: dict[str, Callable[[Machine], Iterator[Case]]] = {
    "environment": environment,
    "primitives": primitives,
    "attention": attention,
    "own kernels": own_kernels,
    "sanitizer": sanitizer,
    "engine": engine,
    "processes": processes,
    "ceilings": ceilings,
    "speed": speed,
    "sweep": sweep,
    "ncu": ncu,
    "training": training,
    "probes": probes,
    "tiny": tiny,  # of sanitizer
    "one shape": one_shape,  # of ncu
}


def run_cases(name: str, cases: list[Case], path: Path, machine: Machine) -> None:
    gpu.append(path, {"stage": name, "planned": [case for case, _ in cases]})
    for case, run in cases:
        record: dict[str, Any] = {"stage": name, "case": case, "state": "passed"}
        start = time.monotonic()
        try:
            record |= run()
        except Unmeasured as reason:
            record |= {"state": "unmeasured", "why": str(reason)}
        except Exception as error:
            record |= {"state": "failed", "why": f"{type(error).__name__}: {error}"[:1500]}
        record["seconds"] = round(time.monotonic() - start, 2)
        gpu.append(path, record)
        print(f"{name}: {case}: {record['state']} {record.get('why', '')}", flush=True)
        gc.collect()
        machine.sync()  # a broken context ends the stage here, and the next one has a new process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--stage", required=True, choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)  # ends this process from outside
    options = parser.parse_args()
    machine = Machine(options.device)
    torch.manual_seed(0)
    run_cases(options.stage, list(STAGES[options.stage](machine)), options.out, machine)


if __name__ == "__main__":
    main()
