"""Does a pipeline grow? Many steps of changing lengths over both transports: memory, descriptors, threads of each rank.

Two processes of one thread train in fp32 over lengths drawn by seed, every fifth step evaluates. Resident memory is
taken after a collection and after malloc has given back what it can. oneDNN, in torch, keeps a compiled product for
each new shape, 4 MB in all here, with or without a pipeline: its cache is off. What must hold: nothing grows after step
100.

    python benchmarks/endurance.py --steps 10000
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time

import torch
from common import header, resident_bytes, spawn
from decoder import Stage, cross_entropy

import seq1f1b

M, K, LONGEST, VOCAB = 2, 2, 256, 64
SLACK = 1 << 20  # bytes of resident memory: pages that malloc keeps after steps of another length


def train(rank: int, transport: str, steps: int, path: str) -> None:
    engine = seq1f1b.PipelineEngine(
        Stage(rank, 2, hidden=64, blocks=2, vocab=VOCAB, attention="ours"),
        num_microbatches=M,
        num_segments=K,
        loss_fn=cross_entropy,
        transport=transport,
    )
    generator = torch.Generator().manual_seed(0)
    looks = sorted({100, *(steps * n // 10 for n in range(1, 11))})
    found, began = [], time.monotonic()
    for step in range(1, steps + 1):
        length = int(torch.randint(K, LONGEST // K, (1,), generator=generator)) * K
        tokens = torch.randint(VOCAB, (M, length + 1), generator=generator)
        run = engine.eval if step % 5 == 0 else engine.step
        run(tokens[:, :-1], target=tokens[:, 1:])
        for parameter in engine.parameters():
            parameter.grad = None
        if step in looks:
            found.append((step, resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()))
    seconds = time.monotonic() - began
    rows = engine.all_gather_object(found)
    if rank == 0:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"transport": transport, "seconds": seconds, "rows": rows}) + "\n")
    engine.close()


def show(record: dict) -> bool:
    """Prints a transport's figures; returns whether nothing grew."""
    steps = record["rows"][0][-1][0]
    print(f"\n## {record['transport']}, {steps} steps in {record['seconds']:.0f} s")
    print(f"{'rank':>4} {'step':>6} {'resident MB':>11} {'descriptors':>11} {'threads':>7}")
    is_well = True
    for rank, rows in enumerate(record["rows"]):
        for step, resident, descriptors, threads in rows:
            print(f"{rank:4} {step:6} {resident / 2**20:11.2f} {descriptors:11} {threads:7}")
        after = [row for row in rows if row[0] >= 100]
        growth = [after[-1][i] - after[0][i] for i in (1, 2, 3)]
        grown = growth[0] > SLACK or growth[1] > 0 or growth[2] > 0
        is_well = is_well and not grown
        verdict = "GREW" if grown else "nothing grew"
        memory = f"{growth[0] / 2**10:+.0f} KiB"
        print(f"     after step 100: {memory}, {growth[1]:+} descriptors, {growth[2]:+} threads: {verdict}")
    return is_well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--transports", nargs="+", default=["shm", "c10d"], choices=["shm", "c10d"])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
    print(header("A pipeline of two ranks over many steps of changing lengths"))
    with tempfile.TemporaryDirectory() as folder:
        for transport in options.transports:
            spawn(2, train, transport, options.steps, f"{folder}/found")
        with open(f"{folder}/found", encoding="utf-8") as file:
            is_well = [show(json.loads(line)) for line in file]
    raise SystemExit(0 if all(is_well) else 1)


if __name__ == "__main__":
    main()
