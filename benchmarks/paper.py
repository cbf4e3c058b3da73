"""Does the cost model predict the tables of the Seq1F1B paper?

The machine is data/seq1f1b_machine.json: an A100 as the authors' code uses it, with the source of every number. Four of
them are fitted on the rows marked "fit" of data/seq1f1b_paper.json: on throughput the share of the peak rate that
products reach and a rank's own seconds per message between nodes, on memory the activation factor and the buffers of
collectives per layer. All other rows are predicted. The last tables have mean error and bias for each model and each
family.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
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
from seq1f1b.planning.tables import ByParts
from seq1f1b.schedule import Schedule, build_schedule

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
DATA, MACHINE = (os.path.join(FOLDER, f"seq1f1b_{name}.json") for name in ("paper", "machine"))
K = 4
COLUMNS = {"1f1b": (1, 1), "interleaved-1f1b": (1, 2), "seq1f1b": (K, 1), "seq1f1b-interleaved": (K, 2)}  # k, v
MEMORY_MICROBATCHES = 16  # of the memory table, not stated: peaks are the same from 2 P on
GIB = 1 << 30  # the authors' code logs max_memory_reserved() / 1024**3


class AuthorsCode(ByParts):
    """What the authors' code, a fork of Megatron-LM, saves beside the tensors that the cost model counts."""

    def __init__(self, model: ModelShape, hardware: Hardware, layout: Layout, *counts: Any) -> None:
        super().__init__(model, hardware, layout, *counts)
        # The masks of two dropouts, kept at rate 0, too, and cosines and sines for q and k, which every tensor-parallel
        # device has for all its tokens.
        rotary = 4 * model.hidden / model.heads * hardware.element_bytes * layout.tensor
        for saved in self.saved_bytes:
            saved["none"] += 2 * model.hidden + rotary
        self.cache_bytes[1] = 0.0  # gradients of keys and values stay only from segment to segment

    def held(self, tokens: Any) -> tuple[Any, Any, Any]:
        """With the embedding's output: a device saves a part of it, which is a view of the whole."""
        whole = np.int64((1 - 1 / self.layout.tensor) * self.model.hidden * self.hardware.element_bytes * tokens)
        saved, kept, added = super().held(tokens)
        return saved + whole * self.first, kept, added


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
    cost.parts = cost.source = AuthorsCode(model, hardware, layout, cost.layers, cost.num_ranks)
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


def fitted_on(
    rows: list[dict[str, Any]], hardware: Hardware, predict: Callable[..., float], names: tuple[str, str]
) -> Hardware:
    """The machine with those values of two fields that have the least squared log error."""

    def at(point: tuple[float, float]) -> Hardware:
        return replace(hardware, **dict(zip(names, point, strict=True)))

    begin = getattr(hardware, names[0]), getattr(hardware, names[1])
    return at(least_squares(lambda point: squares(rows, partial(predict, hardware=at(point))), begin))


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


def tflops(row: dict[str, Any], column: str, hardware: Hardware) -> float:
    case = make_case(row, column, hardware)
    costs = case.cost.price(case.sizes).costs(case.schedule)
    step = case.schedule.simulate(costs).makespan + max(costs.optimizer)
    work = 3 * row["microbatches"] * authors_flop(case.cost.model, row["seq_len"])
    return float(work / step / row["gpus"] / 1e12)


# -- memory


def gib(row: dict[str, Any], column: str, hardware: Hardware) -> float:
    """The fullest rank's bytes. A message that has come is the input of its unit, which is counted there."""
    case = make_case(row, column, hardware)
    return max(rank.total - rank.receive for rank in case.cost.price(case.sizes).rank_bytes(case.schedule)) / GIB


# -- the table


class Errors:
    """Relative errors of the predictions, cell by cell."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.cells: list[float] = []
        self.groups: dict[str, list[float]] = {}  # by model and by family

    def add(self, row: dict[str, Any], column: str, measured: float, predicted: float) -> None:
        error = predicted / measured - 1
        self.cells.append(error)
        for group in (row["model"], column):
            self.groups.setdefault(group, []).append(error)
        print(f"{place(row, column):<48}{measured:>9.3f}  {predicted:8.3f} ({error:+6.1%})  {self.unit}")

    def summary(self) -> str:
        return f"{self.name}: n {len(self.cells)}, mean error {statistics.mean(map(abs, self.cells)):.1%}"

    def by_group(self) -> str:
        """Mean error and bias of each model and family."""
        lines = [
            f"  {group:<24}{len(each):>4}{statistics.mean(map(abs, each)):>10.1%}{statistics.mean(each):>+10.1%}"
            for group, each in self.groups.items()
        ]
        return "\n".join([f"{self.name + ', by':<26}{'n':>4}{'error':>10}{'bias':>10}", *lines])


def place(row: dict[str, Any], column: str) -> str:
    microbatches = f" M {row['microbatches']}" if "microbatches" in row else ""
    return f"{row['model']} {row['seq_len']}{microbatches} {column}"


def print_fitted(rows: list[dict[str, Any]], predict: Callable[[dict[str, Any], str], float], unit: str) -> None:
    for row, column in cells(rows):
        print(f"  {place(row, column):<46}{row[column]:>9.3f}  {predict(row, column):8.3f}  {unit}, fit")


def predict_throughput(rows: list[dict[str, Any]], hardware: Hardware) -> Errors:
    fitted = [row for row in rows if row["use"] == "fit"]
    machine = fitted_on(fitted, hardware, tflops, ("linear_efficiency", "between_send"))
    rate, send = machine.linear_efficiency, machine.between_send
    print(f"fitted: products at {rate:.3f} of the peak, {send * 1e3:.1f} ms per message between nodes")
    print_fitted(fitted, partial(tflops, hardware=machine), "TFLOPS")
    errors = Errors("TFLOPS per GPU", "TFLOPS")
    for row, column in cells(row for row in rows if row["use"] != "fit"):
        errors.add(row, column, row[column], tflops(row, column, machine))
    return errors


def predict_memory(rows: list[dict[str, Any]], hardware: Hardware) -> Errors:
    fitted = [row for row in rows if row["use"] == "fit"]
    machine = fitted_on(fitted, hardware, gib, ("activation_factor", "collective_buffers"))
    factor, buffers = machine.activation_factor, machine.collective_buffers
    print(f"fitted: activation factor {factor:.3f}, {buffers:.2f} hidden states of a segment per layer of a unit")
    print_fitted(fitted, partial(gib, hardware=machine), "GB")
    errors = Errors("GB", "GB")
    for row, column in itertools.product((row for row in rows if row["use"] != "fit"), COLUMNS):
        predicted = gib(row, column, machine)
        if row[column] is None:
            state = "out of memory" if predicted > hardware.memory / GIB else "fits: WRONG"
            print(f"{place(row, column):<48}   out of memory; model {predicted:.1f} GB: {state}")
        else:
            errors.add(row, column, row[column], predicted)
    return errors


def main() -> None:
    with open(DATA, encoding="utf-8") as file:
        tables = json.load(file)
    assert tables["num_segments"] == K and tables["split"] == "flops"
    hardware = load_hardware(MACHINE)
    print(header("Predictions of the tables of the Seq1F1B paper, arXiv:2406.03488"))
    print(f"{'cell':<48}{'measured':>9}  {'predicted':>9}")
    errors = predict_throughput(tables["throughput"], hardware), predict_memory(tables["memory_gb"], hardware)
    print("\n".join(each.summary() for each in errors))
    print("\n".join(each.by_group() for each in errors))


if __name__ == "__main__":
    main()
