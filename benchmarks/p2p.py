"""One-way latency of a message between two processes: seq1f1b over shared memory beside torch's gloo send/recv.

    python benchmarks/p2p.py [--repeats 15] [--bytes 64 1048576 16777216]

Half a ping-pong. Both sides spin for a message instead of sleeping; gloo cannot. The two take turns within one run. Our
time includes the binding and the copy from the sender's tensor into the place, where the receiver's tensor lies; gloo's
ends in the receiver's own tensor.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from core_extension import core

from seq1f1b import transport
from seq1f1b.transport.group import place_tensor

SPIN_US = 1e6
WARM_UP = 3


class Ours:
    """Two edges with one place each; a message is one uint8 tensor."""

    def __init__(self, rank: int) -> None:
        self.group = transport.connect(None, "shm")
        self.group.set_limits(60.0, SPIN_US)
        text = "benchmark"
        ends = [self.group.edge_end((s, 1 - s), 1 - rank, s != rank, text) for s in (0, 1)]
        self.out, self.back = ends[rank], ends[1 - rank]
        self.rank = rank

    def run(self, tensor: torch.Tensor, count: int) -> float:
        """Seconds per round trip over ``count`` of them."""
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
            core.edge_wait(back, n, n % 2)
            if rank == 1:
                core.edge_send(out, n, n % 2, header)
        seconds = (time.perf_counter() - begin) / count
        self.group.end_step(failed=False)
        return seconds

    def check(self, tensor: torch.Tensor) -> bool:
        """Sends a pattern, and compares the one that came."""
        self.group.begin_step()
        core.edge_begin_step(self.out, 2)
        core.edge_begin_step(self.back, 2)
        core.edge_post(self.back, 0, 0)
        code = transport.DTYPES.index(torch.uint8)
        core.edge_send(self.out, 0, 0, [(code, 0, tuple(tensor.shape), tensor.data_ptr())])
        ((_, _, sizes, address),) = core.edge_wait(self.back, 0, 0)
        same = bool(torch.equal(place_tensor(self.back, address, code, sizes), tensor))
        self.group.end_step(failed=False)
        return same


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


def worker(rank: int, port: int, sizes: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ours, gloo = Ours(rank), Gloo(rank)
    if rank == 0:
        print(f"{'bytes':>10}  {'seq1f1b [us]':>24}  {'gloo [us]':>24}  {'gloo / seq1f1b':>14}")
    for size in sizes:
        tensor = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        if not ours.check(tensor):
            raise SystemExit(f"{size} bytes arrived changed")
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
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 1 << 16, 1 << 20, 1 << 24])
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"one-way message, median (lowest..highest) of {arguments.repeats} interleaved runs after {WARM_UP} untimed")
    print(f"commit {commit}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(worker, args=(port, arguments.bytes, arguments.repeats), nprocs=2)


if __name__ == "__main__":
    main()
