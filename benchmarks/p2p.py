"""One-way latency of a message between two processes: seq1f1b over shared memory beside torch's gloo send/recv.

    python benchmarks/p2p.py [--repeats 15] [--bytes 64 1048576 16777216]

Half a ping-pong. Both sides spin for a message instead of sleeping; gloo cannot. The two take turns within one run. Our
time includes the binding and the copy from the sender's tensor into the place, where the receiver's tensor lies; gloo's
ends in the receiver's own tensor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from common import header, spawn
from core_extension import core

from seq1f1b import _C, transport
from seq1f1b.transport.edges import place_tensor

SPIN_US = 1e6
WARM_UP = 3


class Ours:
    """Two edges with one place each; a message is one uint8 tensor."""

    def __init__(self, rank: int) -> None:
        self.group = transport.connect(None, "shm")
        _C.group_set_limits(self.group.group, 60.0, SPIN_US)
        text = "benchmark"
        ends = [self.group.edge_end((s, 1 - s), 1 - rank, s != rank, text) for s in (0, 1)]
        self.out, self.back = ends[rank], ends[1 - rank]
        self.rank = rank

    def run(self, tensor: torch.Tensor, count: int) -> float:
        """Seconds per round trip over ``count`` of them. Raises RuntimeError if the last message arrived changed."""
        rank, out, back = self.rank, self.out, self.back
        self.group.begin_step()
        header = [(transport.DTYPES.index(torch.uint8), 0, tuple(tensor.shape), tensor.data_ptr())]
        core.edge_begin_step(out, 2)
        core.edge_begin_step(back, 2)
        core.edge_post(back, 0, 0)
        self.group.barrier()
        begin = time.perf_counter()
        for n in range(count):
            if rank == 0:
                core.edge_send(out, n, n % 2, header)
            if n + 1 < count:
                core.edge_post(back, n + 1, (n + 1) % 2)
            ((code, _, sizes, address),) = core.edge_wait(back, n, n % 2)
            if rank == 1:
                core.edge_send(out, n, n % 2, header)
        seconds = (time.perf_counter() - begin) / count
        if not torch.equal(place_tensor(back, address, code, sizes), tensor):
            raise RuntimeError(f"{tensor.numel()} bytes arrived changed")
        self.group.end_step(failed=False)
        return seconds


class Gloo:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(self, tensor: torch.Tensor, count: int) -> float:
        into = torch.empty_like(tensor)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            if self.rank == 0:
                dist.send(tensor, 1)
                dist.recv(into, 1)
            else:
                dist.recv(into, 0)
                dist.send(tensor, 0)
        return (time.perf_counter() - begin) / count


def measure(rank: int, sizes: list[int], repeats: int) -> None:
    ours, gloo = Ours(rank), Gloo(rank)
    if rank == 0:
        print(f"{'bytes':>10}  {'seq1f1b [us]':>24}  {'gloo [us]':>24}  {'gloo / seq1f1b':>14}")
    for size in sizes:
        tensor = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        count = max(20, min(2000, (1 << 26) // size))
        times: dict[str, list[float]] = {"ours": [], "gloo": []}
        for repeat in range(WARM_UP + repeats):
            for name, peer in (("ours", ours), ("gloo", gloo)):
                seconds = peer.run(tensor, count) / 2
                if repeat >= WARM_UP:
                    times[name].append(seconds * 1e6)
        if rank == 0:
            cells = [f"{statistics.median(t):9.1f} ({min(t):.1f}..{max(t):.1f})" for t in times.values()]
            ratio = statistics.median(times["gloo"]) / statistics.median(times["ours"])
            print(f"{size:>10}  {cells[0]:>24}  {cells[1]:>24}  {ratio:>14.1f}", flush=True)
    ours.group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 1 << 16, 1 << 20, 1 << 24])
    arguments = parser.parse_args()
    print(header("One-way message, median (lowest..highest) of runs in turn after some that are untimed"))
    spawn(2, measure, arguments.bytes, arguments.repeats)


if __name__ == "__main__":
    main()
