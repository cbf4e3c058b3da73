"""Do GPUs (stand-ins) of ranks that share no memory and have no NCCL train one model, and hear of one that dies?"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import AT_ONCE, PipedProcesses, join_and_run, outcome
from stand_in_engine import StandInEngine
from stand_in_library import stand_in
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor, nn

from seq1f1b.transport.handshake import Handshake

CONFIG = Config(kv_heads=2)
M, K = 4, 2
TOKENS, TARGET = batch(CONFIG, M, 16)


def join_strangers(folder: Path, world: int, rank: int) -> None:
    """Processes of one host, of which the last cannot meet the others in memory."""
    dial = Handshake._dial

    def refuse(handshake: Handshake, name: str) -> Any:
        if handshake.rank == world - 1:
            raise ConnectionRefusedError("Connection refused")
        return dial(handshake, name)

    Handshake._dial = refuse  # type: ignore[method-assign]  # of this process, which nobody needs afterwards
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)


class Faulty(nn.Module):
    """A stage that raises in one forward, and stays in another one after saying so."""

    def __init__(self, rank: int, raises_at: int, pipe: Connection) -> None:
        super().__init__()
        self.stage, self.calls, self.pipe = stage_of(whole_model(CONFIG), CONFIG, rank, 2), 0, pipe
        self.raises_at, self.stays_at = raises_at, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.raises_at:
            raise ArithmeticError("planted")
        if self.calls == self.stays_at:
            self.pipe.send(("result", "in the trap"))
            time.sleep(120)
        return self.stage(x)


def train(rank: int, pipe: Connection, library: str) -> Any:
    """A good step, one in which rank 1 raises, two good ones, and one in which rank 0 stays in its third forward."""
    os.environ["SEQ1F1B_STAND_IN"] = library
    os.environ["SEQ1F1B_NCCL"] = "libnothing.so"
    stand_in().reset(rank)
    options: dict[str, Any] = {"num_microbatches": M, "num_segments": K, "segment_sizes": [9, 7]}
    stage = Faulty(rank, raises_at=M * K + 3 if rank == 1 else -1, pipe=pipe)
    engine = StandInEngine(stage, loss_fn=cross_entropy, **options)
    engine.step(TOKENS, target=TARGET)
    kind, text, *_ = outcome(lambda: engine.step(TOKENS, target=TARGET))
    for _ in range(2):
        for p in engine.parameters():
            p.grad = None
        engine.step(TOKENS, target=TARGET)
    gradients = {name.removeprefix("stage."): p.grad.numpy() for name, p in engine.named_parameters()}
    carried = {edge.transport for edge in engine.edges}
    pipe.send(("result", (carried, gradients, stand_in().complaints(), f"{kind}: {text}")))
    stage.stays_at = stage.calls + 3 if rank == 0 else -1
    failure = outcome(lambda: engine.step(TOKENS, target=TARGET))
    engine.close()
    return failure, time.monotonic()


def test_strangers_train_and_hear_of_a_death(tmp_path: Path) -> None:
    with PipedProcesses(2, join_and_run, partial(join_strangers, tmp_path, 2), train, stand_in().path) as ranks:
        found = {}
        for rank in range(2):
            carried, gradients, complaints, failed = ranks.result(rank)
            assert carried == {"host"} and complaints == []
            assert failed.startswith(
                "ArithmeticError: planted" if rank == 1 else "PipelineError: rank 1 ended the step"
            )
            found |= {name: torch.from_numpy(g) for name, g in gradients.items()}
        assert gradient_error(found, run_whole(whole_model(CONFIG), TOKENS, TARGET, M)[1]) < 1e-10
        assert ranks.result(0) == "in the trap"
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        (name, text, (rank, _, edge), ended), closed = ranks.result(1)
    assert name == "PipelineError" and rank == 0 and edge in ("activations of stage 0 to stage 1", "gradients"), text
    assert ended - killed < AT_ONCE and closed - ended < AT_ONCE
