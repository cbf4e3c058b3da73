"""Does the cost model predict the tables of the Seq1F1B paper better than guessing?

The machine is data/seq1f1b_machine.json: an A100 as the authors' code uses it, with the source of every number. Four of
them are fitted on the rows marked "fit" of data/seq1f1b_paper.json, or of a file of the same form that is given: on
throughput the share of the peak rate that products reach and a rank's own seconds per message between nodes, on memory
the activation factor and the buffers of collectives per layer. All other rows are predicted, beside two naive
predictors: "constant" keeps what the fitted row shows (ratio to 1F1B, TFLOPS, GB per token), "formula" takes 1F1B of
the fitted row and the published bubble or activation formula. Where the model's mean error is not below both, the line
says "not decidable". The last tables have mean error and bias of the model for each model and each family.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from common import header

from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import Hardware, load_hardware, load_model
from seq1f1b.schedule import Schedule, build_schedule

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
DATA, MACHINE = (os.path.join(FOLDER, f"seq1f1b_{name}.json") for name in ("paper", "machine"))
K = 4
COLUMNS = {"1f1b": (1, 1), "interleaved-1f1b": (1, 2), "seq1f1b": (K, 1), "seq1f1b-interleaved": (K, 2)}  # k, v
MEMORY_MICROBATCHES = 16  # of the memory table, not stated: peaks are the same from 2 P on
PARTS: dict[str, dict[str, float]] = {
    "products": {"linear_efficiency": 1e9},
    "attention": {"attention_forward_efficiency": 1e9, "attention_backward_efficiency": 1e9},
    "element-wise": {"saved_moves": 0.0},
    "collectives": {"tensor_exposed": 0.0},
    "messages": {"between_send": 0.0, "inside_send": 0.0},
}
GIB = 1 << 30  # the authors' code logs max_memory_reserved() / 1024**3


class AuthorsCode(CostModel):
    """What the authors' code, a fork of Megatron-LM, saves beside the tensors that the cost model counts."""

    def _saved_bytes(self, recompute: str) -> float:
        """With the masks of two dropouts, kept at rate 0, too, and cosines and sines for q and k, which every
        tensor-parallel device has for all its tokens."""
        masks = 2 * self.model.hidden
        rotary = 4 * self.model.hidden / self.model.heads * self.hardware.element_bytes * self.layout.tensor
        return super()._saved_bytes(recompute) + masks + rotary

    def _unit_bytes(self, sizes: Any) -> Any:
        """With the embedding's output: a device saves a part of it, which is a view of the whole."""
        activations, kept, left = super()._unit_bytes(sizes)
        others = (1 - 1 / self.layout.tensor) * self.model.hidden * self.hardware.element_bytes
        first = [held + int(others * size) for held, size in zip(activations[0], sizes, strict=True)]
        return [first, *activations[1:]], kept, left

    def _cache_bytes(self) -> tuple[float, float]:
        """Gradients of keys and values stay only from segment to segment."""
        return super()._cache_bytes()[0], 0.0


class Case(NamedTuple):
    """One cell: its order, segment sizes and cost model."""

    schedule: Schedule
    sizes: list[int]
    cost: CostModel


def make_case(row: dict[str, Any], column: str, hardware: Hardware) -> Case:
    k, v = COLUMNS[column]
    model = padded(load_model(row["model"]), row["tensor"])
    layout = Layout(tensor=row["tensor"], head_in_loss=False, copies_prefix=k > 1)
    cost = AuthorsCode(
        model, hardware, num_ranks=row["pipeline"], stages_per_rank=v, seq_len=row["seq_len"], layout=layout
    )
    sizes = partition_sequence(row["seq_len"], k, model=model, multiple_of=row["tensor"]) if k > 1 else [row["seq_len"]]
    microbatches = row.get("microbatches", MEMORY_MICROBATCHES)
    counts = {"num_ranks": row["pipeline"], "num_microbatches": microbatches}
    return Case(build_schedule(column, **counts, num_segments=k, stages_per_rank=v), sizes, cost)


def padded(model: ModelShape, tensor: int) -> ModelShape:
    """The words of GPT-2 as Megatron-LM pads them."""
    return model._replace(vocab=-(-50257 // (128 * tensor)) * 128 * tensor)


def least_squares(loss: Callable[[tuple[float, float]], float], begin: tuple[float, float]) -> tuple[float, float]:
    """The point of least loss: a grid that shrinks round its best point."""
    (x, y), (wide_x, wide_y) = begin, begin
    for _ in range(16):
        around = [
            (max(0.05 * begin[0], x + i * wide_x / 3), max(0.0, y + j * wide_y / 3))
            for i in (-2, -1, 0, 1, 2)
            for j in (-2, -1, 0, 1, 2)
        ]
        x, y = min(around, key=loss)
        wide_x, wide_y = wide_x * 0.65, wide_y * 0.65
    return x, y


def squares(rows: Iterable[dict[str, Any]], predict: Callable[[dict[str, Any], str], float]) -> float:
    return sum(np.log(predict(row, column) / row[column]) ** 2 for row, column in cells(rows))


def cells(rows: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Rows and families that were measured."""
    return [(row, column) for row in rows for column in COLUMNS if row[column]]


# -- throughput


def authors_flop(model: ModelShape, seq_len: int) -> float:
    """Forward FLOP of one sequence as the authors count them: get_seq_tflops of their sp_utils.py. The embedding counts
    as a product, and softmax as 3 FLOP per pair of tokens and head."""
    h, s = model.hidden, seq_len
    pairs = s * s / 2
    layer = 8 * s * h * h + 4 * s * h * 4 * h + 4 * pairs * h + 3 * pairs * model.heads
    return model.layers * layer + 4 * s * h * model.vocab


def on_machine(hardware: Hardware, rate: float, send: float) -> Hardware:
    return replace(hardware, linear_efficiency=rate, between_send=send)


def tflops(row: dict[str, Any], column: str, hardware: Hardware) -> float:
    case = make_case(row, column, hardware)
    costs = case.cost.price(case.sizes).costs(case.schedule)
    step = case.schedule.simulate(costs).makespan + max(costs.optimizer)
    work = 3 * row["microbatches"] * authors_flop(case.cost.model, row["seq_len"])
    return float(work / step / row["gpus"] / 1e12)


def fit_rate(rows: list[dict[str, Any]], hardware: Hardware) -> tuple[float, float]:
    """Share of the peak that products reach and seconds of a message, of least squared log error."""

    def loss(point: tuple[float, float]) -> float:
        machine = on_machine(hardware, *point)
        return squares(rows, lambda row, column: tflops(row, column, machine))

    return least_squares(loss, (hardware.linear_efficiency, hardware.between_send))


def bubble_formula(row: dict[str, Any], column: str) -> float:
    k, v = COLUMNS[column]
    return (row["pipeline"] - 1) / (row["microbatches"] * k * v)


# -- memory


def with_buffers(hardware: Hardware, factor: float, buffers: float) -> Hardware:
    return replace(hardware, activation_factor=factor, collective_buffers=buffers)


def gib(row: dict[str, Any], column: str, hardware: Hardware) -> float:
    """The fullest rank's bytes. A message that has come is the input of its unit, which is counted there."""
    case = make_case(row, column, hardware)
    return max(rank.total - rank.receive for rank in case.cost.price(case.sizes).rank_bytes(case.schedule)) / GIB


def fit_memory(rows: list[dict[str, Any]], hardware: Hardware) -> tuple[float, float]:
    """Activation factor and buffers of collectives, of least squared log error."""

    def loss(point: tuple[float, float]) -> float:
        machine = with_buffers(hardware, *point)
        return squares(rows, lambda row, column: gib(row, column, machine))

    return least_squares(loss, (hardware.activation_factor, hardware.collective_buffers))


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
        self.signed: dict[str, list[float]] = {}  # of the model, by model and by family

    def add(self, row: dict[str, Any], column: str, values: tuple[float, ...], over: str = "") -> None:
        measured, *predicted = values
        errors = tuple(abs(x / measured - 1) for x in predicted)
        self.cells.append(errors)  # type: ignore[arg-type]
        for group in (row["model"], column):
            self.signed.setdefault(group, []).append(predicted[0] / measured - 1)
        texts = (f"{x:8.3f} ({e:5.1%})" for x, e in zip(predicted, errors, strict=True))
        print(f"{place(row, column) + over:<48}{measured:>9.3f}  {'  '.join(texts)}  {self.unit}")

    def summary(self) -> str:
        model, constant, formula = (statistics.mean(column) for column in zip(*self.cells, strict=True))
        verdict = "the model is better than both" if model < min(constant, formula) else "not decidable"
        return (
            f"{self.name}: n {len(self.cells)}, mean error: model {model:.1%}, constant {constant:.1%}, "
            f"formula {formula:.1%}: {verdict}"
        )

    def groups(self) -> str:
        """Mean error and bias of each model and family."""
        lines = [
            f"  {group:<24}{len(each):>4}{statistics.mean(map(abs, each)):>10.1%}{statistics.mean(each):>+10.1%}"
            for group, each in self.signed.items()
        ]
        return "\n".join([f"{self.name + ', by':<26}{'n':>4}{'error':>10}{'bias':>10}", *lines])


def place(row: dict[str, Any], column: str) -> str:
    microbatches = f" M {row['microbatches']}" if "microbatches" in row else ""
    return f"{row['model']} {row['seq_len']}{microbatches} {column}"


def print_fitted(rows: list[dict[str, Any]], predict: Callable[[dict[str, Any], str], float], unit: str) -> None:
    for row, column in cells(rows):
        print(f"  {place(row, column):<46}{row[column]:>9.3f}  {predict(row, column):8.3f}  {unit}, fit")


def predict_throughput(rows: list[dict[str, Any]], hardware: Hardware) -> list[Errors]:
    fitted = [row for row in rows if row["use"] == "fit"]
    rate, send = fit_rate(fitted, hardware)
    machine = on_machine(hardware, rate, send)
    print(f"fitted: products at {rate:.3f} of the peak, {send * 1e3:.1f} ms per message between nodes")
    print_fitted(fitted, partial(tflops, hardware=machine), "TFLOPS")
    print_parts(fitted, machine)
    absolute, ratio = Errors("TFLOPS per GPU", "TFLOPS"), Errors("throughput over 1F1B's", "ratio")
    for row in (row for row in rows if row["use"] != "fit"):
        base = like(row, fitted)
        peak = base["1f1b"] * (1 + bubble_formula(base, "1f1b"))
        values = {
            column: (row[column], tflops(row, column, machine), base[column], peak / (1 + bubble_formula(row, column)))
            for column in COLUMNS
            if row[column]
        }
        add_all(row, values, absolute, ratio)
    return [absolute, ratio]


def print_parts(rows: list[dict[str, Any]], machine: Hardware) -> None:
    """By how much each cell's step would be shorter without a part."""
    print(f"{'shorter without':<48}" + "".join(f"{part:>15}" for part in PARTS))
    for row, column in cells(rows):
        whole = tflops(row, column, machine)
        shares = [1 - whole / tflops(row, column, replace(machine, **changes)) for changes in PARTS.values()]
        print(f"  {place(row, column):<46}" + "".join(f"{share:>15.1%}" for share in shares))


def like(row: dict[str, Any], fitted: list[dict[str, Any]]) -> dict[str, Any]:
    """The fitted row of the same model; if there is none, of the same tensor parallelism; else any."""
    return min(fitted, key=lambda each: (each["model"] != row["model"], each["tensor"] != row["tensor"]))


def predict_memory(rows: list[dict[str, Any]], hardware: Hardware) -> list[Errors]:
    fitted = [row for row in rows if row["use"] == "fit"]
    factor, buffers = fit_memory(fitted, hardware)
    machine = with_buffers(hardware, factor, buffers)
    print(f"fitted: activation factor {factor:.3f}, {buffers:.2f} hidden states of a segment per layer of a unit")
    print_fitted(fitted, partial(gib, hardware=machine), "GB")
    absolute, ratio = Errors("GB", "GB"), Errors("memory over 1F1B's", "ratio")
    for row in (row for row in rows if row["use"] != "fit"):
        base = like(row, fitted)
        longer = row["seq_len"] / base["seq_len"]
        values = {}
        for column in COLUMNS:
            predicted = gib(row, column, machine)
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
        absolute.add(row, column, cell)
    for column, cell in values.items():
        if column != "1f1b" and "1f1b" in values:
            over = tuple(x / y for x, y in zip(cell, values["1f1b"], strict=True))
            ratio.add(row, column, over, " / 1f1b")


def main() -> None:
    with open(sys.argv[1] if len(sys.argv) > 1 else DATA, encoding="utf-8") as file:
        tables = json.load(file)
    assert tables["num_segments"] == K and tables["split"] == "flops"
    hardware = load_hardware(MACHINE)
    print(header("Predictions of the tables of the Seq1F1B paper, arXiv:2406.03488"))
    print(f"{'cell':<48}{'measured':>9}  {'model':>8}            {'constant':>8}          {'formula':>8}")
    errors = predict_throughput(tables["throughput"], hardware) + predict_memory(tables["memory_gb"], hardware)
    print("\n".join(each.summary() for each in errors))
    print("\n".join(each.groups() for each in errors[::2]))


if __name__ == "__main__":
    main()
