"""Steps over documents of every length: planned rows beside equal packing, fixed k and ChunkFlow.

    python benchmarks/lengths.py simulate    # 200 lists of lengths on paper: two minutes
    python benchmarks/lengths.py measure     # beside torch's 1F1B and our fixed k, P 2: a quarter of an hour

Simulated: Llama 3 8B on H100s, tensor parallel 8, 4 and 8 pipeline ranks, steps of 8 * 65536 tokens in documents of up
to 65536. Equal packing has rows of the longest document, padded, by 1F1B or in k segments of equal FLOPs. ChunkFlow
(arXiv:2503.02356) packs short documents into chunks of equal tokens, cuts long ones into such chunks, and keeps the
activations of the last K chunks of a document; it is given the best of five chunk sizes. All orders have the same costs
and no limit of memory.

Measured: the model of examples/train_gpt.py on the documents that it trains on, up to 8192 tokens, in steps of 32768;
the model is profiled first. Each part writes its own file into the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    ForeignLoad,
    Pairs,
    Records,
    gathered,
    header,
    parser_of,
    resident_bytes,
    show_and_write,
    spawn,
    status_bytes,
)
from memory import mib
from pipeline import reset_peak
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seq1f1b
from seq1f1b import build_schedule, pack_documents
from seq1f1b.attention.packing import document_lengths
from seq1f1b.data import DocumentBatches
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel, PackedRow
from seq1f1b.planning.hardware import ProfiledHardware, load_hardware, load_model
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.step_plan import StepPlan, padded_rows, plan_step

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import model as example

LISTS, LONGEST, ROWS = 200, 65536, 8  # of the simulated steps; ROWS times LONGEST tokens each
FIXED, CHUNKS, KEPT = (2, 4, 8), (1024, 2048, 4096, 8192, 16384), (1, 2)
THOUSANDS = 4096  # documents of the plan that is timed
TOKENS, STEP_TOKENS, FIXED_K = 8192, 4 * 8192, 4  # measured
MEASURED_STEPS, TORCH_ROUNDS = 8, 3  # torch is slower by far: fewer rounds tell it

# -- on paper ----------------------------------------------------------------------------------------------------------


def draw(rng: random.Random, shape: str) -> list[int]:
    """Lengths of a step's documents."""
    lengths: list[int] = []
    while sum(lengths) < ROWS * LONGEST:
        match shape:
            case "log-normal":
                length = int(rng.lognormvariate(7.5, 1.5))
            case "uniform":
                length = rng.randint(1, LONGEST)
            case _:  # bimodal: one in ten is long
                is_long = rng.random() < 0.1
                length = rng.randint(LONGEST * 3 // 4, LONGEST) if is_long else rng.randint(64, LONGEST // 16)
        lengths.append(max(1, min(LONGEST, length)))
    return lengths


def chunk_rows(lengths: Sequence[int], chunk: int) -> list[PackedRow]:
    """Chunks of equal tokens: packed short documents, and parts of long ones; the longest first."""
    short = [length for length in lengths if length <= chunk]
    rows = []
    for packed in pack_documents(short, chunk).rows if short else ():
        documents = tuple(short[i] for i in packed)
        rows.append(PackedRow(documents, (sum(documents),)))
    for length in lengths:
        if length > chunk:
            rest = length % chunk
            rows.append(PackedRow((length,), (chunk,) * (length // chunk) + ((rest,) if rest else ())))
    return sorted(rows, key=lambda row: -len(row.sizes))


def price(rows: Sequence[PackedRow], cost: CostModel, kept: int | None = None) -> tuple[float, int]:
    """Seconds and bytes of a step; ``kept``: of a row's segments, all but the last so many are recomputed."""
    costs, counts = cost.price_rows(rows), [len(row.sizes) for row in rows]
    order = build_schedule("seq1f1b", num_ranks=cost.num_ranks, num_microbatches=len(rows), num_segments=counts)
    if kept is not None:
        order = order.recompute(lambda unit: unit.segment < counts[unit.microbatch] - kept)
    seconds = order.simulate(costs.costs(order)).makespan
    return seconds, max(rank.total for rank in costs.rank_bytes(order))


def peers(lengths: Sequence[int], cost: CostModel) -> dict[str, float]:
    """Seconds of a step."""
    found = {"1F1B": price(padded_rows(lengths, 1, cost.model), cost)[0]}
    found |= {f"Seq1F1B k {k}": price(padded_rows(lengths, k, cost.model), cost)[0] for k in FIXED}
    for kept in KEPT:
        found[f"ChunkFlow K {kept}"] = min(price(chunk_rows(lengths, chunk), cost, kept)[0] for chunk in CHUNKS)
    return found


def costs_on_paper(num_ranks: int) -> CostModel:
    layout = Layout(tensor=8)
    counts = {"num_ranks": num_ranks, "seq_len": LONGEST}
    return CostModel.balanced(load_model("llama3-8b"), load_hardware("h100"), layout=layout, **counts)


def simulate(options: argparse.Namespace) -> None:
    shapes, lists = ("log-normal", "uniform", "bimodal"), 6 if options.quick else LISTS
    rows: dict[str, list[tuple[float, str, int]]] = {shape: [] for shape in shapes}
    machines = [costs_on_paper(4), costs_on_paper(8)]
    for number in range(lists):
        shape, cost = shapes[number % 3], machines[number // 3 % 2]
        lengths = draw(random.Random(number), shape)
        others = peers(lengths, cost)
        name = min(others, key=others.__getitem__)
        rows[shape].append((others[name] / plan_step(lengths, cost).seconds, name, len(lengths)))
    print(header("planned steps over documents of every length, on paper"))
    print(f"# Llama 3 8B, H100, tensor parallel 8, P 4 and 8, {ROWS} * {LONGEST} tokens a step\n")
    head = f"{'lengths':12}{'lists':>6}{'documents':>11}{'gain over the best: mean':>26}{'least':>7}"
    print(f"{head}   the best of the others")
    for shape, found in rows.items():
        gains, names, counts = zip(*found, strict=True)
        best = ", ".join(f"{name} {names.count(name)}" for name in sorted(set(names), key=names.count, reverse=True))
        print(
            f"{shape:12}{len(found):6}{statistics.mean(counts):11.0f}{statistics.mean(gains):26.3f}{min(gains):7.3f}"
            f"   {best}"
        )
    every = [entry for found in rows.values() for entry in found]
    mean, least = statistics.mean(entry[0] for entry in every), min(entry[0] for entry in every)
    many = random.Random(1)
    lengths = [max(1, min(LONGEST, int(many.lognormvariate(6.5, 1.4)))) for _ in range(THOUSANDS)]
    took = []
    for _ in range(7):
        began = time.perf_counter()
        plan_step(lengths, machines[1])
        took.append(1e3 * (time.perf_counter() - began))
    median, spread = statistics.median(took), f"{min(took):.0f} to {max(took):.0f}"
    print(f"\ngain over the best of the others: mean {mean:.3f}, least {least:.3f}")
    print(f"a plan of {THOUSANDS} documents for P 8 takes {median:.0f} ms ({spread})")


# -- training ----------------------------------------------------------------------------------------------------------


def read_documents(quick: bool) -> tuple[Any, list[int], list[int], int]:
    """Tokens of the example's text, begins and lengths of its documents, and its vocabulary."""
    import data
    import documents

    most = 300_000 if quick else 6_000_000
    folder = data.prepare(data.Corpus(max_bytes=most), Path(tempfile.gettempdir()) / "seq1f1b-lengths", vocab=1536)
    tokens = data.Tokens(folder, seq_len=64 if quick else TOKENS)
    return tokens.train, *documents.pieces_of(tokens.train, tokens.seq_len), tokens.header.vocab


def by_document(q: Tensor, k: Tensor, v: Tensor, *, layer: Tensor, doc_ids: Tensor) -> Tensor:
    """Torch's attention, document by document: the least work that whole rows allow."""
    parts, begin = [], 0
    for length in document_lengths(doc_ids):
        own = [x[:, :, begin : begin + length] for x in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True))
        begin += length
    return torch.cat(parts, 2)


class Batch:
    """One step's documents as each arm takes them."""

    def __init__(self, text: Any, begins: Sequence[int], lengths: Sequence[int], documents: Sequence[int]) -> None:
        self.lengths = [lengths[i] for i in documents]
        spans = [(begins[i], lengths[i]) for i in documents]
        read = [torch.from_numpy(text[a : a + n + 1].astype("int64")) for a, n in spans]
        self.inputs, self.target = [x[:-1] for x in read], [x[1:] for x in read]
        self.tokens = sum(self.lengths)
        self.packing = pack_documents(self.lengths, max(self.lengths))

    def equal(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the longest document: inputs, targets, document ids."""
        packing = self.packing
        return packing.join(self.inputs, fill=0), packing.join(self.target, fill=-100), packing.doc_ids


class Arms:
    """The three ways to train the same documents, in this rank's process, each with weights of its own."""

    def __init__(self, rank: int, vocab: int, cost: CostModel, shape: seq1f1b.ModelShape) -> None:
        config = example.Config(vocab=vocab)
        self.rank, self.cost = rank, cost
        self._torch: dict[tuple[int, int], Any] = {}  # schedules by (rows, row)

        def stage(attend: Any = seq1f1b.causal_attention, head: bool = False) -> Any:
            return example.build_stage(config, rank, 2, head=head, attend=attend)

        def engine(**options: Any) -> seq1f1b.PipelineEngine:
            return seq1f1b.PipelineEngine(
                stage(),
                loss_fn=example.HeadLoss(config) if rank == 1 else None,
                arg_rules={"doc_ids": "slice"},
                loss=seq1f1b.Loss(scale_grads=False),
                **options,
            )

        self.planned = engine(num_microbatches=1)
        self._engine, self._fixed, self._shape = engine, {}, shape
        self._stage = stage(by_document, True)

    def ours(self, batch: Batch, plan: StepPlan) -> None:
        kwargs = [{"doc_ids": ids} for ids in plan.doc_ids]
        inputs, target = plan.join(batch.inputs), plan.join(batch.target)
        self.planned.step(inputs, target=target, kwargs=kwargs, plan=plan, loss_weight=batch.tokens)

    def fixed(self, batch: Batch) -> None:
        inputs, target, doc_ids = batch.equal()
        engine = self._fixed.get(len(inputs))
        if engine is None:
            engine = self._fixed[len(inputs)] = self._engine(
                num_microbatches=len(inputs), num_segments=FIXED_K, segment_sizes=self._shape
            )
        engine.step(inputs, target=target, kwargs={"doc_ids": doc_ids}, loss_weight=batch.tokens)

    def torchs(self, batch: Batch) -> None:
        inputs, target, doc_ids = batch.equal()
        key = tuple(inputs.shape)
        if key not in self._torch:
            stage = PipelineStage(self._stage, self.rank, 2, torch.device("cpu"))

            def loss(logits: Tensor, y: Tensor) -> Tensor:
                return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")

            self._torch[key] = Schedule1F1B(stage, len(inputs), loss_fn=loss, scale_grads=False)
        own = (inputs,) if self.rank == 0 else ()
        self._torch[key].step(*own, target=target if self.rank == 1 else None, doc_ids=doc_ids, return_outputs=False)

    def close(self) -> None:
        for engine in (self.planned, *self._fixed.values()):
            engine.close()

    def gradients(self, arm: str, batch: Batch) -> dict[str, Tensor]:
        """Gradients of the mean over the step's tokens; afterwards there are none."""
        engine = self.planned if arm == "ours" else self._fixed.get(len(batch.packing.rows))
        modules, scale = (engine.modules(), 1.0) if engine and arm != "torchs" else ([self._stage], 1 / batch.tokens)
        found = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    found[name] = parameter.grad * scale
                    parameter.grad = None
        return found


ARMS = ("ours", "fixed", "torchs")


def error_of(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    return max(float((found[name] - truth[name]).norm() / truth[name].norm()) for name in truth)


class Work:
    """The steps to measure, the same for every arm."""

    def __init__(self, rank: int, quick: bool, profile: str) -> None:
        text, begins, lengths, self.vocab = read_documents(quick)
        self.rank, self.shape = rank, example.Config(vocab=self.vocab).shape
        self.cost = costs_here(profile, self.shape, self.vocab)
        batches = DocumentBatches(lengths, self.cost, tokens_per_step=4 * max(lengths) if quick else STEP_TOKENS)
        steps = islice(batches, 2 if quick else MEASURED_STEPS)
        self.batches = [Batch(text, begins, lengths, step.documents) for step in steps]
        self.budget = price(padded_rows([max(lengths)] * 4, FIXED_K, self.shape), self.cost)[1]  # what fixed k holds
        self.plans = [plan_step(batch.lengths, self.cost, memory=self.budget) for batch in self.batches]

    def arms(self) -> Arms:
        return Arms(self.rank, self.vocab, self.cost, self.shape)

    def run(self, arms: Arms, arm: str, number: int) -> None:
        batch = self.batches[number]
        if arm == "ours":
            arms.ours(batch, self.plans[number])
        else:
            (arms.fixed if arm == "fixed" else arms.torchs)(batch)


def look_at_memory(rank: int, quick: bool, profile: str, path: str, arm: str) -> None:
    """Peak of resident memory of one arm over what is resident before its model is made; its code is loaded before."""
    work = Work(rank, quick, profile)
    warm = work.arms()
    tiny = Batch(torch.zeros(200, dtype=torch.int64).numpy(), [0, 50], [40, 30], [0, 1])
    for run in (warm.fixed, warm.torchs):
        run(tiny)
    warm.ours(tiny, plan_step(tiny.lengths, work.cost))
    warm.close()
    del warm
    resident_bytes()  # gives back what is free
    dist.barrier()
    empty, arms = reset_peak(), work.arms()
    peaks = []
    for number in range(min(4, len(work.batches))):
        work.run(arms, arm, number)
        peaks.append(status_bytes("VmHWM") - empty)
        arms.gradients(arm, work.batches[number])
    everyone = gathered(peaks)
    if rank == 0:
        Records(path).add(what="memory", arm=arm, peaks=everyone)
    arms.close()


def train(rank: int, quick: bool, profile: str, path: str, rounds: int) -> None:
    work = Work(rank, quick, profile)
    arms, load = work.arms(), ForeignLoad(gathered(os.getpid()))
    for number, batch in enumerate(work.batches):
        plan, gradients = work.plans[number], {}
        for arm in ARMS:  # makes buffers
            work.run(arms, arm, number)
            gradients[arm] = arms.gradients(arm, batch)
        errors = max(error_of(gradients[arm], gradients["torchs"]) for arm in ("ours", "fixed"))
        everyone = gathered(errors)
        if rank == 0:
            Records(path).add(
                what="step",
                step=number,
                documents=len(batch.lengths),
                tokens=batch.tokens,
                longest=max(batch.lengths),
                waste=batch.packing.waste,
                planned_rows=plan.schedule.segments_of,
                predicted=plan.seconds,
                remedied=plan.remedied,
                budget=work.budget,
                reserve=[held.reserve for held in plan.ranks],
                planned_bytes=[held.total for held in plan.ranks],
                error=max(everyone),
            )
        for turn in range(rounds):
            seconds = {}
            for arm in (*ARMS[turn % 3 :], *ARMS[: turn % 3]):
                if arm == "torchs" and turn >= TORCH_ROUNDS:
                    continue
                dist.barrier()
                load.start()
                began = time.perf_counter()
                work.run(arms, arm, number)
                dist.barrier()
                seconds[arm] = time.perf_counter() - began, load.cores()
                arms.gradients(arm, batch)
            if rank == 0:
                Records(path).add(what="round", step=number, seconds=seconds)
    arms.close()


def costs_here(profile: str, shape: seq1f1b.ModelShape, vocab: int) -> CostModel:
    """The example's two stages, as they were profiled."""
    config = example.Config(vocab=vocab)
    layers = tuple(len(example.blocks_of(config, stage, 2)) for stage in range(2))
    machine = ProfiledHardware.of(Profile.load(profile), load_hardware("cpu-zen5"))
    return CostModel(shape, machine, num_ranks=2, seq_len=TOKENS, layout=Layout(layers=layers))


def make_profile(options: argparse.Namespace, path: Path) -> None:
    given = {"model": path.with_name("lengths-model.json"), "seq": 64 if options.quick else TOKENS, "processes": 2}
    given |= {"output": path} | ({"repeats": 2} if options.quick else {})
    shape = example.Config(vocab=read_documents(options.quick)[3]).shape
    given["model"].write_text(json.dumps(shape._asdict()), encoding="utf-8")
    command = [sys.executable, "-m", "seq1f1b", "profile", *(f"--{name}={value}" for name, value in given.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(options: argparse.Namespace) -> None:
    folder = Path(options.output)
    results = Records(str(folder / "lengths-measured.jsonl"))
    results.begin("steps over documents of every length, measured")
    profile = folder / "lengths-profile.json"
    if not profile.exists():
        make_profile(options, profile)
    spawn(2, train, options.quick, str(profile), results.path, options.rounds)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed memory is seen to go
    for arm in ARMS:
        spawn(2, look_at_memory, options.quick, str(profile), results.path, arm)


def show_measured(folder: Path, limit: float) -> None:
    results = Records(str(folder / "lengths-measured.jsonl"))
    print(results.header())
    print("# P 2, one thread each, fp32; gradients of all arms are those of the mean over the step's tokens\n")
    print(
        f"{'step':>4}{'documents':>10}{'tokens':>8}{'longest':>8}{'padding %':>10}{'planned rows':>14}{'redone':>7}"
        f"{'tokens/s ours':>15}{'fixed k':>9}{'torch':>8}{'planned, measured s':>21}{'error':>9}"
    )
    over, totals = {"torchs": Pairs(), "fixed": Pairs()}, dict.fromkeys(ARMS, 0.0)
    steps = [r for r in results.records if r["what"] == "step"]
    for step in steps:
        rounds = [r["seconds"] for r in results.records if r["what"] == "round" and r["step"] == step["step"]]
        for name, pairs in over.items():
            for r in (r for r in rounds if name in r):
                pairs.add(r[name][0], r["ours"][0], r[name][1] < limit and r["ours"][1] < limit)
        quiet = {name: [r[name][0] for r in rounds if name in r and r[name][1] < limit] for name in ARMS}
        medians = {name: statistics.median(found) if found else float("nan") for name, found in quiet.items()}
        totals = {name: totals[name] + medians[name] for name in ARMS}
        rates = {name: step["tokens"] / seconds for name, seconds in medians.items()}
        rows, seconds = step["planned_rows"], f"{step['predicted']:.2f}, {medians['ours']:.2f}"
        print(
            f"{step['step']:4}{step['documents']:10}{step['tokens']:8}{step['longest']:8}{100 * step['waste']:10.1f}"
            f"{f'{len(rows)} of {sum(rows)} units':>14}{step['remedied']:7}{rates['ours']:15.0f}{rates['fixed']:9.0f}"
            f"{rates['torchs']:8.0f}{seconds:>21}{step['error']:9.0e}"
        )
    print()
    shown = {"torchs": "torch's 1F1B", "fixed": f"our fixed k {FIXED_K}"}
    for name, pairs in over.items():
        print(pairs.describe(f"a step of {shown[name]} over one of ours"))
    room = [steps[0]["budget"] - reserve for reserve in steps[0]["reserve"]]
    print(f"\npeaks over what is resident before a model is made, MiB of ranks 0 and 1; budget {mib(room)}")
    peaks = {r["arm"]: [max(rank) for rank in r["peaks"]] for r in results.records if r["what"] == "memory"}
    for name, found in peaks.items():
        print(f"  {({'ours': 'planned'} | shown)[name]:14}{mib(found)}")
    for name in over:
        print(f"all steps take {totals[name] / totals['ours']:.3f} of our time under {shown[name]}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=("simulate", "measure"))
    parser.add_argument("--output", default=str(Path(__file__).parent / "results"), help="folder of the results")
    parser.add_argument("--rounds", type=int, default=4, help="measured steps of each arm and batch (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small: whether it runs")
    options = parser.parse_args()
    folder = Path(options.output)
    if options.part == "measure":
        measure(options)
        show_and_write(lambda: show_measured(folder, options.foreign), folder / "lengths-measured.txt")
    else:
        show_and_write(lambda: simulate(options), folder / "lengths-simulate.txt")


if __name__ == "__main__":
    main()
