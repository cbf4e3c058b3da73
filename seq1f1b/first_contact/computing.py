"""The cost of messages beside computing: NCCL with several numbers of thread blocks, and training beside torch's."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from seq1f1b.first_contact.cases import NO_GPU, Case, Figures, Rank, Unmeasured, drilled_transports
from seq1f1b.first_contact.messages import exchange, mean
from seq1f1b.first_contact.model import Config, Stage, batch, cross_entropy

__all__: list[str] = []

WARM_UPS, TIMED = 3, 3
LOSS_DIFFERENCE = 0.02
ALONE = "torch"


def median_ms(rank: Rank, step: Callable[[], Any]) -> float:
    """Milliseconds of a step, after warm ones."""
    seconds = []
    for turn in range(WARM_UPS + TIMED):
        rank.sync()
        start = time.perf_counter()
        step()
        rank.sync()
        if turn >= WARM_UPS:
            seconds.append(time.perf_counter() - start)
    return round(statistics.median(seconds) * 1e3, 2)


# -- thread blocks ---------------------------------------------------------------------------------------------------


class Products(nn.Module):
    """A stage that multiplies, and sends what it has multiplied: 32 MiB on a GPU."""

    def __init__(self, rank: Rank, count: int) -> None:
        super().__init__()
        hidden, dtype = (4096, torch.bfloat16) if rank.is_cuda else (64, torch.float32)
        eye = torch.eye(hidden, device=rank.device, dtype=dtype)
        self.weights = nn.ParameterList([eye.clone() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def beside_computing(rank: Rank, transport: str) -> Figures:
    """A step of two ranks that multiply and send, beside the products of a rank alone."""
    microbatches = 8
    stage = Products(rank, 8)
    weight = stage.weights[0]
    x = torch.ones(microbatches, 4096 if rank.is_cuda else 16, len(weight), device=rank.device, dtype=weight.dtype)

    def alone() -> None:
        for part in x.chunk(microbatches):
            mean(stage(part), part[..., :1]).backward()  # type: ignore[no-untyped-call]

    found = {"ms of products alone": median_ms(rank, alone)}
    engine = rank.make_engine(
        stage, transport=transport, schedule="1f1b", num_microbatches=microbatches, num_segments=1, loss_fn=mean
    )
    found["ms a step"] = median_ms(rank, lambda: engine.step(x, target=x[..., :1]))
    engine.close()
    # A step takes M + 1 units of a rank's time, and what messages add to that.
    units = found["ms of products alone"] / microbatches
    found["times the products"] = round(found["ms a step"] / (units * (microbatches + 1)), 3)
    group = rank.new_group(range(rank.world))
    found["GB/s alone"] = float(f"{exchange(rank, transport, group, rank.rank == 0):.3g}")
    return found


def thread_blocks(rank: Rank) -> Iterator[Case]:
    """In an environment that sets how many NCCL may use. A rehearsal takes the same way by another transport."""

    def case() -> Figures:
        if rank.is_cuda:
            return beside_computing(rank, "nccl")
        beside_computing(rank, "auto")
        raise Unmeasured(NO_GPU)

    yield "nccl", case


# -- training --------------------------------------------------------------------------------------------------------


def sizes_of(rank: Rank) -> tuple[Config, int, torch.dtype]:
    """The model, tokens of a sequence, and dtype. As many layers on each rank, however many there are."""
    if not rank.is_cuda:
        return Config(layers=rank.world, length=32), 32, torch.float32
    hidden, length = (2048, 8192) if rank.share == 1 else (1024, 4096)
    config = Config(
        hidden=hidden, heads=hidden // 128, kv_heads=hidden // 128, ffn=4 * hidden, vocab=32000,
        layers=2 * rank.world, length=length,
    )  # fmt: skip
    return config, length, torch.bfloat16


class Training:
    """One model and batch under several arms, each from the same weights."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.config, self.length, self.dtype = sizes_of(rank)
        self.microbatches = 2 * max(4, rank.world) if rank.is_cuda else 2 * rank.world
        self.loss: float | None = None  # of torch

    def stage(self, is_ours: bool) -> Stage:
        torch.manual_seed(self.rank.rank)
        with self.rank.device:
            return Stage(self.config, self.rank.rank, self.rank.world, is_ours=is_ours).to(self.dtype)

    def batch(self) -> tuple[Tensor, Tensor]:
        tokens, target = batch(self.config, self.microbatches, self.length, 0)
        return tokens.to(self.rank.device), target.to(self.rank.device)

    def measure(self, stage: nn.Module, step: Callable[[], list[Tensor]]) -> Figures:
        losses: list[Tensor] = []

        def once() -> None:
            nonlocal losses
            losses = step()
            stage.zero_grad()

        if self.rank.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        ms = median_ms(self.rank, once)
        found: Figures = {"ms": ms, "tokens/s": round(self.microbatches * self.length / ms * 1e3)}
        if self.rank.is_cuda:
            found["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        if losses:
            found["loss"] = round(float(torch.stack([loss.detach() for loss in losses]).float().mean()), 4)
        return found

    def alone(self) -> Figures:
        """torch: its 1F1B, or one micro-batch after the other where there is one rank."""
        stage = self.stage(False)
        tokens, target = self.batch()
        if self.rank.world == 1:
            step = functools.partial(self._by_hand, stage, tokens, target)
        else:
            pipe = PipelineStage(stage, self.rank.rank, self.rank.world, self.rank.device)
            schedule = Schedule1F1B(pipe, self.microbatches, loss_fn=cross_entropy)
            step = functools.partial(self._by_schedule, schedule, tokens, target)
        found = self.measure(stage, step)
        self.loss = found.get("loss")
        return found

    def _by_hand(self, stage: Stage, tokens: Tensor, target: Tensor) -> list[Tensor]:
        losses = []
        for x, y in zip(tokens.chunk(self.microbatches), target.chunk(self.microbatches), strict=True):
            losses.append(cross_entropy(stage(x), y))
            (losses[-1] / self.microbatches).backward()  # type: ignore[no-untyped-call]
        return losses

    def _by_schedule(self, schedule: Any, tokens: Tensor, target: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        is_first, is_last = self.rank.rank == 0, self.rank.rank == self.rank.world - 1
        arguments = [tokens] if is_first else []
        schedule.step(
            *arguments, target=target if is_last else None, losses=losses if is_last else None, return_outputs=False
        )
        return losses

    def ours(self, transport: str, schedule: str, segments: int) -> Figures:
        self.rank.need(transport)
        stage = self.stage(True)
        tokens, target = self.batch()
        engine = self.rank.make_engine(
            stage, transport=transport, schedule=schedule, num_microbatches=self.microbatches, num_segments=segments,
            loss_fn=cross_entropy,
        )  # fmt: skip
        found = self.measure(stage, lambda: engine.step(tokens, target=target))
        engine.close()
        if self.loss is not None and "loss" in found:
            apart = abs(self.loss - found["loss"])
            assert apart < LOSS_DIFFERENCE, f"the loss is {found['loss']}, under torch {self.loss}"
        return found

    def run(self, arm: Callable[..., Figures], *arguments: Any) -> Figures:
        gc.collect()
        if self.rank.is_cuda:
            torch.cuda.empty_cache()
        return arm(*arguments)


def training(rank: Rank) -> Iterator[Case]:
    model = functools.cache(Training)  # made by the first arm that runs

    def arm(name: str, *arguments: Any) -> Case:
        def run() -> Figures:
            own = model(rank)
            return own.run(own.alone) if not arguments else own.run(own.ours, *arguments)

        return name, run

    yield arm(ALONE)
    transports = drilled_transports() if rank.world > 1 else ["auto"]
    for transport in transports:
        yield arm(f"Seq1F1B k 4, {transport}", transport, "seq1f1b", 4)
    if rank.world > 1:
        yield arm("1F1B, auto", "auto", "1f1b", 1)
        yield arm("split backward k 4, auto", "auto", "seq-zb-h1", 4)
