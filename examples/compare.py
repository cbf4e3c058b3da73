"""The other side of ``train_gpt.py --compare``: the same model under torch's own Schedule1F1B, and the verdict."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

FIRST_LOSSES = 10  # steps whose losses are compared one by one
# Relative difference of each. In bfloat16 the spacing of its numbers, 2^-8, averaged over at least 256 tokens.
FIRST_LIMITS = {"float32": 1e-5, "bfloat16": 2**-12}
LAST_LIMIT = 0.01  # relative difference of the mean of the last tenth


class TorchPipeline:
    """torch.distributed.pipelining behind the two calls that training makes."""

    def __init__(self, stage: nn.Module, *, num_microbatches: int, loss_fn: Any) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.module = stage
        self.device = next(stage.parameters()).device
        pipeline_stage = PipelineStage(stage, self.rank, self.num_ranks, self.device)
        self.schedule = Schedule1F1B(pipeline_stage, num_microbatches, loss_fn=loss_fn)

    def step(self, inputs: Tensor, *, target: Tensor) -> list[Tensor]:
        first, last = self.rank == 0, self.rank == self.num_ranks - 1
        losses: list[Tensor] = []
        self.schedule.step(
            *([inputs.to(self.device)] if first else []),
            target=target.to(self.device) if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        return losses

    def modules(self) -> list[nn.Module]:
        return [self.module]

    def all_gather_object(self, value: Any) -> list[Any]:
        return ranks.gather(value)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        square = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2 for grad in gradients]).sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        for grad in gradients:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class Growth:
    mebibytes = float("nan")


@contextmanager
def peak_growth(measure: bool) -> Iterator[Growth]:
    """How much this process's resident memory, or what its tensors hold of its GPU, grows at most while the block runs.

    Resident memory is Linux's; nan elsewhere.
    """
    growth = Growth()
    if measure and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield growth
        growth.mebibytes = (torch.cuda.max_memory_allocated() - before) / 2**20
        return
    if not measure or not Path("/proc/self/clear_refs").exists():
        yield growth
        return
    ctypes.CDLL(None).malloc_trim(0)  # free memory goes back to the system, so that later use counts as growth
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark starts again from here
    before = _status("VmRSS")
    yield growth
    growth.mebibytes = (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """A field of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def print_comparison(ours: Sequence[dict[str, Any]], torchs: Sequence[dict[str, Any]], *, dtype: str) -> bool:
    """Prints the log rows of both side by side; whether their losses agree."""
    pairs = list(zip(ours, torchs, strict=True))
    print(f"\n{'':24}{'Seq1F1B':>12}{'torch 1F1B':>12}")

    def line(what: str, a: float, b: float, form: str, note: str) -> None:
        print(f"{what:24}{a:>12{form}}{b:>12{form}}  {note}")

    def difference(a: float, b: float) -> float:
        return abs(a - b) / abs(b)

    first = [difference(a["loss"], b["loss"]) for a, b in pairs[:FIRST_LOSSES]]
    for (a, b), apart in zip(pairs, first, strict=False):
        line(f"loss, step {a['step']}", a["loss"], b["loss"], ".6f", f"{apart:.1e} apart")
    tenth = pairs[-max(1, len(pairs) // 10) :]
    a_end, b_end = fmean(a["loss"] for a, _ in tenth), fmean(b["loss"] for _, b in tenth)
    line(f"loss, mean of last {len(tenth)}", a_end, b_end, ".6f", f"{difference(a_end, b_end):.1e} apart")

    timed = [(a["tokens_per_second"], b["tokens_per_second"]) for a, b in pairs[1:] if "peak_growth_mib" not in a]
    if timed:
        a_speed, b_speed = median(a for a, _ in timed), median(b for _, b in timed)
        ratio = median(a / b for a, b in timed)
        line("tokens/s, median", a_speed, b_speed, ".0f", f"{ratio:.2f} x (median of {len(timed)} pairs of steps)")
    weighed = [(a["peak_growth_mib"], b["peak_growth_mib"]) for a, b in pairs[1:] if "peak_growth_mib" in a]
    if weighed:
        for rank in range(len(weighed[0][0])):
            a_peak, b_peak = median(a[rank] for a, _ in weighed), median(b[rank] for _, b in weighed)
            line(f"MiB in a step, rank {rank}", a_peak, b_peak, ".1f", f"{a_peak / b_peak:.2f} x (peak growth)")

    first_limit = FIRST_LIMITS[dtype]
    agree = max(first) <= first_limit and difference(a_end, b_end) <= LAST_LIMIT
    verdict = "agree" if agree else "DISAGREE"
    print(
        f"losses {verdict}: the first {len(first)} within {max(first):.1e} relative (limit {first_limit:.0e}), "
        f"the mean of the last {len(tenth)} within {difference(a_end, b_end):.1e} (limit {LAST_LIMIT:.0e})"
    )
    return agree
