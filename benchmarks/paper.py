"""Does the cost model predict the tables of the Seq1F1B paper better than guessing?

Four numbers of the model are fitted on the rows marked "fit" of data/seq1f1b_paper.json: the share of the peak rate and
the seconds per unit on throughput, the activation factor and the buffers of tensor parallelism on memory. All other
rows are predicted, beside two naive predictors: "constant" keeps what the fitted row shows (ratio to 1F1B, TFLOPS, GB
per token), "formula" takes 1F1B of the fitted row and the published bubble or activation formula. Where the model's
mean error is not below both, the line says "not decidable".
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from common import header

from seq1f1b import Costs, Links
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import Hardware, load_hardware, load_model
from seq1f1b.schedule import Schedule, build_schedule

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "seq1f1b_paper.json")
K = 4
COLUMNS = {"1f1b": (1, 1), "interleaved-1f1b": (1, 2), "seq1f1b": (K, 1), "seq1f1b-interleaved": (K, 2)}  # k, v
MEMORY_MICROBATCHES = 16  # of the memory table, not stated: peaks are the same from 2 P on
GIB = 1 << 30  # the authors' code logs max_memory_reserved() / 1024**3


class Case(NamedTuple):
    """One cell: its order, segment sizes and cost model."""

    schedule: Schedule
    sizes: list[int]
    cost: CostModel


def make_case(row: dict[str, Any], column: str, hardware: Hardware) -> Case:
    k, v = COLUMNS[column]
    model = padded(load_model(row["model"]), row["tensor"])
    layout = Layout(tensor=row["tensor"], head_in_loss=False, copies_prefix=k > 1)
    cost = CostModel(
        model, hardware, num_ranks=row["pipeline"], stages_per_rank=v, seq_len=row["seq_len"], layout=layout
    )
    sizes = partition_sequence(row["seq_len"], k, model=model, multiple_of=row["tensor"]) if k > 1 else [row["seq_len"]]
    microbatches = row.get("microbatches", MEMORY_MICROBATCHES)
    counts = {"num_ranks": row["pipeline"], "num_microbatches": microbatches}
    return Case(build_schedule(column, **counts, num_segments=k, stages_per_rank=v), sizes, cost)


def padded(model: ModelShape, tensor: int) -> ModelShape:
    """The words of GPT-2 as Megatron-LM pads them."""
    return model._replace(vocab=-(-50257 // (128 * tensor)) * 128 * tensor)


# -- throughput


def authors_flop(model: ModelShape, seq_len: int) -> float:
    """Forward FLOP of one sequence as the authors count them: get_seq_tflops of their sp_utils.py. The embedding counts
    as a product, and softmax as 3 FLOP per pair of tokens and head."""
    h, s = model.hidden, seq_len
    pairs = s * s / 2
    layer = 8 * s * h * h + 4 * s * h * 4 * h + 4 * pairs * h + 3 * pairs * model.heads
    return model.layers * layer + 4 * s * h * model.vocab


def on_machine(hardware: Hardware, rate: float, overhead: float) -> Hardware:
    names = ("linear_efficiency", "attention_forward_efficiency", "attention_backward_efficiency")
    scaled = {name: rate * getattr(hardware, name) for name in names}
    return replace(hardware, unit_overhead=overhead, **scaled)


def tflops(row: dict[str, Any], column: str, hardware: Hardware) -> float:
    case = make_case(row, column, hardware)
    seconds = case.cost.unit_seconds(case.sizes)
    latencies, rates = case.cost.links(case.schedule.rank_of_stage)
    run = case.schedule.simulate(
        Costs(
            seconds.forward,
            seconds.backward,
            links=Links(latency=latencies, bandwidth=rates, message_bytes=case.cost.message_bytes(case.sizes)),
        )
    )
    step = run.makespan + case.cost.step_seconds()
    work = 3 * row["microbatches"] * authors_flop(case.cost.model, row["seq_len"])
    return work / step / row["gpus"] / 1e12


def fit_rate(row: dict[str, Any], hardware: Hardware) -> tuple[float, float]:
    """Share of the assumed efficiencies and seconds per unit, of least squared log error over the row: a grid that
    shrinks round its best point."""
    rate, overhead, wide_rate, wide_overhead = 1.0, 0.02, 0.6, 0.02

    def loss(point: tuple[float, float]) -> float:
        machine = on_machine(hardware, *point)
        return sum(np.log(tflops(row, c, machine) / row[c]) ** 2 for c in COLUMNS if row[c])

    for _ in range(12):
        around = [
            (max(0.05, rate + i * wide_rate / 2), max(0.0, overhead + j * wide_overhead / 2))
            for i in (-2, -1, 0, 1, 2)
            for j in (-2, -1, 0, 1, 2)
        ]
        rate, overhead = min(around, key=loss)
        wide_rate, wide_overhead = wide_rate * 0.6, wide_overhead * 0.6
    return rate, overhead


def bubble_formula(row: dict[str, Any], column: str) -> float:
    k, v = COLUMNS[column]
    return (row["pipeline"] - 1) / (row["microbatches"] * k * v)


# -- memory


def features(row: dict[str, Any], column: str, hardware: Hardware) -> list[tuple[float, float, float]]:
    """For each rank, in GiB: weights and optimizer; live activations at factor 1; the longest segment's hidden states
    gathered from all tensor-parallel ranks."""
    case = make_case(row, column, replace(hardware, activation_factor=1.0))
    gathered = max(case.sizes) * case.cost.model.hidden * hardware.element_bytes if row["tensor"] > 1 else 0.0
    ranks = case.cost.rank_bytes(case.schedule, case.sizes)
    if COLUMNS[column][0] == 1:  # no prefix to copy: K and V once per live micro-batch, as a cache holds them
        return [(r.static / GIB, (r.activations + r.kv) / GIB, gathered / GIB) for r in ranks]
    return [(r.static / GIB, r.activations / GIB, gathered / GIB) for r in ranks]


def gib(row: dict[str, Any], column: str, hardware: Hardware, factor: float, buffers: float) -> float:
    return max(a + factor * b + buffers * c for a, b, c in features(row, column, hardware))


def fit_memory(rows: list[dict[str, Any]], hardware: Hardware) -> tuple[float, float]:
    """Activation factor and number of gathered hidden states, of least squares over rank 0, the fullest."""
    left, right = [], []
    for row in rows:
        for column in COLUMNS:
            if row[column]:
                static, live, gathered = features(row, column, hardware)[0]
                left.append((live, gathered))
                right.append(row[column] - static)
    (factor, buffers), *_ = np.linalg.lstsq(np.array(left), np.array(right), rcond=None)
    return float(factor), float(buffers)


def activation_formula(row: dict[str, Any], column: str) -> float:
    """Micro-batches of activations on the first rank, as published."""
    k, v = COLUMNS[column]
    p = row["pipeline"]
    return (p - 1 + k) / k if v == 1 else ((v - 1) * p + 2 * (p - 1) + k) / (v * k)


# -- the table


class Errors:
    """Relative errors of the model and of the two naive predictors, cell by cell."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.cells: list[tuple[float, float, float]] = []

    def add(self, where: str, measured: float, model: float, constant: float, formula: float) -> None:
        errors = tuple(abs(x / measured - 1) for x in (model, constant, formula))
        self.cells.append(errors)  # type: ignore[arg-type]
        texts = (f"{x:8.3f} ({e:5.1%})" for x, e in zip((model, constant, formula), errors, strict=True))
        print(f"{where:<48}{measured:>9.3f}  {'  '.join(texts)}  {self.unit}")

    def summary(self) -> str:
        model, constant, formula = (statistics.mean(column) for column in zip(*self.cells, strict=True))
        verdict = "the model is better than both" if model < min(constant, formula) else "not decidable"
        return (
            f"{self.name}: n {len(self.cells)}, mean error: model {model:.1%}, constant {constant:.1%}, "
            f"formula {formula:.1%}: {verdict}"
        )


def place(row: dict[str, Any], column: str) -> str:
    microbatches = f" M {row['microbatches']}" if "microbatches" in row else ""
    return f"{row['model']} {row['seq_len']}{microbatches} {column}"


def predict_throughput(rows: list[dict[str, Any]], hardware: Hardware) -> list[Errors]:
    fitted = next(row for row in rows if row["use"] == "fit")
    rate, overhead = fit_rate(fitted, hardware)
    machine = on_machine(hardware, rate, overhead)
    print(f"fitted: {rate:.3f} of the assumed efficiencies, {overhead * 1e3:.1f} ms per unit")
    for column in COLUMNS:
        predicted = tflops(fitted, column, machine)
        print(f"  {place(fitted, column):<46}{fitted[column]:>9.3f}  {predicted:8.3f}  TFLOPS, fit")
    absolute, ratio = Errors("TFLOPS per GPU", "TFLOPS"), Errors("throughput over 1F1B's", "ratio")
    for row in (row for row in rows if row["use"] != "fit"):
        peak = fitted["1f1b"] * (1 + bubble_formula(fitted, "1f1b"))
        values = {
            column: (
                row[column],
                tflops(row, column, machine),
                fitted[column],
                peak / (1 + bubble_formula(row, column)),
            )
            for column in COLUMNS
            if row[column]
        }
        add_all(row, values, absolute, ratio)
    return [absolute, ratio]


def predict_memory(rows: list[dict[str, Any]], hardware: Hardware) -> list[Errors]:
    fitted = {row["model"]: row for row in rows if row["use"] == "fit"}
    factor, buffers = fit_memory(list(fitted.values()), hardware)
    print(f"fitted: activation factor {factor:.3f}, {buffers:.1f} gathered hidden states of the longest segment")
    for row in fitted.values():
        for column in COLUMNS:
            predicted = gib(row, column, hardware, factor, buffers)
            print(f"  {place(row, column):<46}{row[column]:>9.3f}  {predicted:8.3f}  GB, fit")
    absolute, ratio = Errors("GB", "GB"), Errors("memory over 1F1B's", "ratio")
    for row in (row for row in rows if row["use"] != "fit"):
        base = fitted[row["model"]]
        longer = row["seq_len"] / base["seq_len"]
        values = {}
        for column in COLUMNS:
            predicted = gib(row, column, hardware, factor, buffers)
            if row[column] is None:
                state = "out of memory" if predicted > hardware.memory / GIB else "fits: WRONG"
                print(f"{place(row, column):<48}   out of memory; model {predicted:.1f} GB: {state}")
                continue
            units = activation_formula(row, column) / activation_formula(row, "1f1b")
            values[column] = (row[column], predicted, base[column] * longer, base["1f1b"] * longer * units)
        add_all(row, values, absolute, ratio)
    return [absolute, ratio]


def add_all(row: dict[str, Any], values: dict[str, tuple[float, ...]], absolute: Errors, ratio: Errors) -> None:
    for column, cell in values.items():
        absolute.add(place(row, column), *cell)
    for column, cell in values.items():
        if column != "1f1b" and "1f1b" in values:
            ratio.add(place(row, column) + " / 1f1b", *(x / y for x, y in zip(cell, values["1f1b"], strict=True)))


def main() -> None:
    with open(DATA) as file:
        tables = json.load(file)
    assert tables["num_segments"] == K and tables["split"] == "flops"
    hardware = load_hardware("a100")
    print(header("Predictions of the tables of the Seq1F1B paper, arXiv:2406.03488"))
    print(f"{'cell':<48}{'measured':>9}  {'model':>8}            {'constant':>8}          {'formula':>8}")
    errors = predict_throughput(tables["throughput"], hardware) + predict_memory(tables["memory_gb"], hardware)
    print("\n".join(each.summary() for each in errors))


if __name__ == "__main__":
    main()
