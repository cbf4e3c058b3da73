"""The end of a run: held-out loss, a step with its times and memory, pictures, and the files of the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import data
from matplotlib.figure import Figure

from seq1f1b import Simulation
from seq1f1b.report.report import PipelineReport
from seq1f1b.view.draw import timeline_png, trace_json


def print_run(rows: Sequence[Mapping[str, Any]], text: data.Header) -> None:
    """Prints the loss on held-out text, beside the loss of a model that knows only how often each token occurs."""
    loss, entropy = rows[-1]["held_out"], text.unigram_entropy
    speed = median(row["tokens_per_second"] for row in rows[1:] or rows)
    where = "below" if loss <= entropy else "ABOVE"
    print(
        f"held-out loss {loss:.3f} nats per token, {abs(entropy - loss):.3f} {where} the unigram entropy of "
        f"{entropy:.3f}; {speed:.0f} tokens/s, the median of all steps"
    )


def print_step(step: int, report: PipelineReport, predicted: Simulation | None) -> None:
    """Prints the time and bubble of a step, and the most that its stages and ranks held."""
    simulated = report.simulated
    times = {"predicted": predicted, "simulated": simulated}
    shown = {name: simulation for name, simulation in times.items() if simulation is not None}

    def line(what: str, *values: str) -> None:
        print(f"{what:28}" + "".join(f"{value:>13}" for value in values))

    print()
    line(f"step {step}", *shown, "measured")
    line("seconds", *(f"{each.makespan:.3f}" for each in shown.values()), f"{report.makespan:.3f}")
    line("bubble, all ranks", *(f"{each.bubble_ratio:.1%}" for each in shown.values()), f"{report.bubble:.1%}")
    for rank in report.ranks:
        idle = [f"{each.bubble[rank.rank] / each.makespan:.1%}" for each in shown.values()]
        line(f"bubble, rank {rank.rank}", *idle, f"{1 - rank.busy / report.makespan:.1%}")
    if predicted is not None:
        print("predicted: from the profile, before the run")
    print("simulated: the measured units in the same order, with messages that take no time")
    print()
    line("at most", "by the order", "measured")
    for rank in report.ranks:
        for stage in rank.stages:
            name = f"stage {stage.stage}"
            line(f"live units, {name}", f"{stage.planned_live_units}", f"{stage.peak_live_units}")
            line(f"live tokens, {name}", f"{stage.planned_live_tokens}", f"{stage.peak_live_tokens}")
            if stage.activation_bytes is not None and stage.planned_activation_bytes is not None:
                line(
                    f"activations, {name}", mebibytes(stage.planned_activation_bytes), mebibytes(stage.activation_bytes)
                )
        line(f"keys and values, rank {rank.rank}", mebibytes(rank.planned_kv_bytes), mebibytes(rank.kv_bytes))
        line(f"their gradients, rank {rank.rank}", mebibytes(rank.planned_grad_bytes), mebibytes(rank.grad_bytes))
        line(f"process, rank {rank.rank}", "", mebibytes(rank.process_peak_bytes))
    print()
    print(report.advice)


def draw_step(folder: Path, step: int, report: PipelineReport) -> None:
    """One step as a picture and as a trace: what the order allows above what was measured."""
    sizes = report.ranks[0].segment_sizes
    title = f"step {step}, segments of {', '.join(map(str, sizes))} tokens"
    if not all(isinstance(size, int) for size in sizes):
        title = f"step {step}, {len(sizes)} rows in {sum(map(len, sizes))} segments"
    tracks = {"simulated with the measured units": report.simulated.timeline, "measured": report.timeline}
    timeline_png(folder / "timeline.png", tracks, title=title)
    trace_json(folder / "trace.json", tracks)


FILES = {
    "log.jsonl": "a row for each step: loss, seconds, bubble, memory",
    "log_torch.jsonl": "the same of torch's Schedule1F1B",
    "report.jsonl": "the times of the step above, for seq1f1b report",
    "loss.png": "the loss over the steps",
    "timeline.png": "the step above as a picture",
    "trace.json": "the same, for https://ui.perfetto.dev",
    "tokenizer.json": "turns text into the model's tokens",
    "checkpoints": "weights and optimizer, for --resume and examples/generate.py",
}


def print_files(folder: Path) -> None:
    """Prints the files of the run folder."""
    print(f"\n{folder} holds")
    for name in sorted(path.name for path in folder.iterdir()):
        print(f"  {name:16} {FILES.get(name, '')}".rstrip())


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append(total / mass)
    return smoothed


def plot_loss(file: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]], *, text: data.Header) -> None:
    """Loss over steps from the rows of the logs, held-out losses, and the level of a model that only counts tokens."""
    unigram_entropy = text.unigram_entropy
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (name, rows), (colour, style) in zip(curves.items(), (("C0", "-"), ("C1", ":")), strict=False):
        steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
        axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=1)
        axes.plot(
            steps, smooth(losses), color=colour, linestyle=style, linewidth=2, label=f"training, {name} (smoothed)"
        )
        held_out = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o-", color="C3", linewidth=1, markersize=5, label="held-out text")
            step, loss = held_out[-1]
            axes.annotate(
                f"{loss:.2f}", (step, loss), xytext=(0, 8), textcoords="offset points", ha="center", color="C3"
            )
    axes.axhline(unigram_entropy, color="grey", linestyle="--", linewidth=1)
    axes.annotate(
        f"unigram entropy {unigram_entropy:.2f}",
        (1, unigram_entropy),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color="dimgrey",
    )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file)
