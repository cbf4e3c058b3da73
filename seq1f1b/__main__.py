"""Command line: ``python -m seq1f1b`` or ``seq1f1b``.

seq1f1b draw seq1f1b --ranks 4 --microbatches 8 --segments 4          the order as a text timeline
seq1f1b draw seq1f1b --ranks 4 --microbatches 8 --png timeline.png    or as a picture; or --svg, --html, --trace FILE
seq1f1b draw 1f1b seq1f1b --segments 4 --html both.html               one above the other, in a page to zoom into
seq1f1b simulate seq1f1b 1f1b --ranks 4 --microbatches 8 --segments 4 makespan, bubble and peaks of each
seq1f1b simulate 1f1b zbv --model llama3-8b --seq 8192                the same in a model's seconds and bytes; draw too
seq1f1b compare --ranks 4 --microbatches 8 --segments 4 --cap 4       families side by side in 4 micro-batches of memory
seq1f1b plan --model llama3-8b --seq 131072 --ranks 8 --microbatches 16 --memory 80GiB   the fastest orders that fit
seq1f1b profile --model m.json --seq 4096 --output p.json             what a model's layers and ends cost here, measured
seq1f1b doctor                                                        what was found here, and what each absence costs
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import seq1f1b
from seq1f1b import _C, Schedule, Simulation
from seq1f1b.partition import ModelShape, make_model
from seq1f1b.planning.compare import compare, table_text
from seq1f1b.planning.cost import (
    RECOMPUTE,
    CostModel,
    Hardware,
    Layout,
    ProfiledHardware,
    load_hardware,
    load_model,
    presets,
)
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.search import search_plans
from seq1f1b.schedule import families, nearest_name
from seq1f1b.view import draw, page

MOST_UNITS = 10_000_000  # that a command holds at once, about 300 bytes each
MOST_RUN = 1_000_000_000  # that simulate runs over all steps: a minute or two
PICTURES = {
    "png": "a picture (needs matplotlib)",
    "svg": "the same as SVG",
    "html": "a page to zoom into, for any browser, without a network (needs bokeh)",
    "trace": "for ui.perfetto.dev or chrome://tracing",
}


def make_parser() -> argparse.ArgumentParser:
    """Of the whole command line; the documentation is made from it."""
    parser = argparse.ArgumentParser(
        prog="seq1f1b", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    kinds = f"one of {', '.join(seq1f1b.schedules())}, or a file of Schedule.to_text, or of to_csv if it ends in .csv"
    drawing = commands.add_parser("draw", help="draw schedules as text, PNG, SVG, HTML page or Perfetto trace")
    drawing.add_argument("schedule", nargs="+", help=kinds)
    drawing.add_argument("--width", type=int, help="columns of the text timeline (default: the terminal's, or 100)")
    for form, what in PICTURES.items():
        drawing.add_argument(f"--{form}", metavar="FILE", help=what)
    simulating = commands.add_parser("simulate", help="makespan, bubble and peaks of schedules")
    simulating.add_argument("schedule", nargs="+", help=kinds)
    simulating.add_argument("--steps", type=int, default=1, help="in a row, for the period of a step")
    simulating.add_argument("--optimizer", type=float, help="seconds after each step (default: 0, or the model's)")
    simulating.add_argument("--sync", action="store_true", help="the optimizer waits for all ranks (a norm over all)")
    comparing = commands.add_parser("compare", help="table of families over the same work, within a cap")
    comparing.add_argument("schedule", nargs="*", help="families (default: all)")
    comparing.add_argument("--bandwidth", metavar="BYTES", help="bytes per second from one stage to the next")
    comparing.add_argument("--token-bytes", metavar="BYTES", help="activations that a rank keeps of a token")
    comparing.add_argument("--message-bytes", metavar="BYTES", help="of a token between two stages")
    comparing.add_argument(
        "--cap", help="a rank's activations at most: 4 (micro-batches), or 4GiB; a model's: all bytes"
    )
    for command in (drawing, simulating, comparing):
        command.add_argument("--ranks", type=int, default=4, help="P (default: 4)")
        command.add_argument("--microbatches", type=int, default=8, help="M (default: 8)")
        command.add_argument("--segments", type=int, default=1, help="k (default: 1)")
        command.add_argument("--stages", type=int, metavar="V", help="stages per rank (default: the family's least)")
        command.add_argument("--forward", type=float, help="seconds of a micro-batch's F on one rank (default: 1)")
        command.add_argument("--backward", type=float, help="seconds of its B (default: 2)")
        command.add_argument("--weight", type=float, help="seconds of B that a split backward puts off (default: half)")
        command.add_argument("--transfer", type=float, help="seconds from one stage to the next (default: 0)")
        command.add_argument("--seq", type=int, metavar="TOKENS", help="of a micro-batch, one sequence")
        command.add_argument("--sizes", metavar="N,N,...", help="tokens of each segment")
        costs = command.add_argument_group("costs of a model, in place of those seconds (needs --seq)")
        add_model_options(costs)
        costs.add_argument("--recompute", choices=RECOMPUTE, default="none")
    for command in (simulating, comparing):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (drawing, simulating):
        command.add_argument("--jitter", type=float, default=0.0, help="share by which a unit's seconds vary, seeded")
        command.add_argument("--transfer-jitter", type=float, default=0.0, help="the same of a message's time")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="NAME=NUMBER",
            help="of a family (default: none); "
            + "; ".join(f"{family.name}: {', '.join(family.options)}" for family in families() if family.options),
        )
    add_plan_options(commands.add_parser("plan", help="the fastest schedule, segments and split that fit in memory"))
    add_profile_options(commands.add_parser("profile", help="measure what a model's layers and ends cost here"))
    commands.add_parser("doctor", help="what was found on this machine")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        check_seconds(options)
        commands_of = {
            "draw": draw_schedules,
            "simulate": simulate,
            "compare": compare_families,
            "plan": plan,
            "profile": profile,
            "doctor": doctor,
        }
        done = commands_of[options.command](options)
        sys.stdout.flush()  # an error of it is told like any other
        return done
    except BrokenPipeError:  # nobody reads on
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, MemoryError, OverflowError) as error:
        print(f"seq1f1b: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("seq1f1b: interrupted", file=sys.stderr)
        return 130


def check_seconds(options: argparse.Namespace) -> None:
    for name in ("forward", "backward", "weight", "transfer", "jitter", "optimizer"):
        seconds = getattr(options, name, None)
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"--{name} is {seconds:g}, must be finite and at least 0")
        if seconds is not None and name in SECONDS:
            if options.model is not None:
                raise ValueError(f"--{name} and --model: the model has costs of its own, give one of the two")
        elif name in SECONDS and hasattr(options, name):
            setattr(options, name, SECONDS[name])
    if getattr(options, "model", None) is None:
        unused = [name for name, default in OF_A_MODEL.items() if getattr(options, name, default) != default]
        if options.command in ("draw", "simulate"):
            unused += [name for name in ("seq", "sizes") if getattr(options, name) is not None]
        if unused:
            raise ValueError(f"--{unused[0].replace('_', '-')} says nothing without --model")


OF_A_MODEL = {  # options that say nothing without one, with their defaults
    **dict.fromkeys(("hardware", "profile", "documents")),
    **dict.fromkeys(("tensor", "context", "expert", "data"), 1),
    "all_logits": False,
    "recompute": "none",
}
SECONDS = {"forward": 1.0, "backward": 2.0, "weight": None, "transfer": 0.0}  # where no model is given


def read_bytes(text: str) -> int:
    """4096, 1.5e9, 80GiB or 25GB."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = 0.0
    if match is not None:
        number, prefix, binary = match.groups()
        size = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    if not 1 <= size < 1 << 60:
        raise ValueError(f"{text!r} is no number of bytes from 1 to 2^60; write 4096, 80GiB or 25GB")
    return int(size)


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--cap {text}: a cap is written 4 (micro-batches) or 4GiB") from None


def units_of(options: argparse.Namespace, stages_per_rank: int) -> int:
    return int(2 * options.ranks * stages_per_rank * options.microbatches * options.segments)


def check_size(name: str, options: argparse.Namespace, stages_per_rank: int) -> None:
    if (num_units := units_of(options, stages_per_rank)) > MOST_UNITS:
        raise ValueError(f"{name}: {num_units} units, more than the {MOST_UNITS} that the command line takes")


def make_schedule(name: str, options: argparse.Namespace) -> Schedule:
    if name not in seq1f1b.schedules():
        if os.path.isfile(name):
            return read_schedule(name, options.segments)
        raise ValueError(f"there is no schedule and no file named {name!r}{nearest_name(name, seq1f1b.schedules())}")
    known = next(family for family in families() if family.name == name)
    stages = known.stages_per_rank if options.stages is None else options.stages
    check_size(name, options, stages)
    counts = {"num_ranks": options.ranks, "num_segments": options.segments, "stages_per_rank": stages}
    given: dict[str, Any] = dict(map(read_option, options.option))
    if "costs" in known.options and min(counts.values()) > 0:
        given["costs"] = pass_costs(options, **counts)
    if "transfer" in known.options and options.model is None:
        given.setdefault("transfer", options.transfer)
    return seq1f1b.build_schedule(name, num_microbatches=options.microbatches, options=given, **counts)


def pass_costs(options: argparse.Namespace, num_ranks: int, num_segments: int, stages_per_rank: int) -> Sequence[Any]:
    """Of F, I and W, for families that make their order for them."""
    if options.model is not None:
        cost, sizes = cost_of(options, num_ranks, num_segments, stages_per_rank)
        return tuple(cost.unit_seconds(sizes, split_backward=True))
    weight = options.backward / 2 if options.weight is None else options.weight
    parts = stages_per_rank * num_segments
    return [seconds / parts for seconds in (options.forward, max(options.backward - weight, 0.0), weight)]


def read_schedule(name: str, num_segments: int) -> Schedule:
    """A hand-written order: torch's CSV or our text."""
    try:
        with open(name) as file:
            text = file.read()
        schedule = (
            Schedule.from_csv(text, num_segments=num_segments) if name.endswith(".csv") else Schedule.from_text(text)
        )
        schedule.check()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return schedule


def read_option(text: str) -> tuple[str, int | str]:
    name, _, value = text.partition("=")
    if name == "costs":
        raise ValueError(f"--option {text}: costs come from --forward, --backward and --weight, or from --model")
    if name in ("placement", "backward"):
        return name, value
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError(f"--option {text}: an option is written NAME=NUMBER, placement=loop|v or backward=split|whole")
    return name, int(value)


def units_per_microbatch(schedule: Schedule) -> int:
    """Of one rank and pass."""
    return schedule.num_segments * schedule.num_stages // schedule.num_ranks


def read_sizes(options: argparse.Namespace) -> list[int] | None:
    if options.sizes is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", options.sizes):
        raise ValueError(f"--sizes {options.sizes}: the tokens of each segment are written 10880,8448,7168")
    return [int(size) for size in options.sizes.split(",")]


def tokens_of(options: argparse.Namespace) -> int:
    """Of a micro-batch, for a model."""
    sizes = read_sizes(options)
    if sizes is None and options.seq is None:
        raise ValueError("--model needs --seq, the tokens of a micro-batch")
    if sizes is not None and options.seq not in (None, sum(sizes)):
        raise ValueError(f"--sizes holds {sum(sizes)} tokens, --seq is {options.seq}")
    return options.seq if sizes is None else sum(sizes)


def arguments_of(schedule: Schedule, options: argparse.Namespace) -> dict[str, Any]:
    """Of its simulation. Without a model segments of a micro-batch cost the same, and so do the stages."""
    arguments = {name: getattr(options, name) for name in ("jitter", "transfer_jitter", "seed")}
    optimizer = getattr(options, "optimizer", None)
    if options.model is None:
        parts = units_per_microbatch(schedule)
        weight = None if options.weight is None else options.weight / parts
        return arguments | {
            "forward": options.forward / parts,
            "backward": options.backward / parts,
            "weight": weight,
            "transfer": options.transfer,
            "optimizer": optimizer or 0.0,
        }
    if schedule.num_stages % schedule.num_ranks != 0:
        raise ValueError(f"{schedule!r}: a model needs as many stages on every rank")
    stages = schedule.num_stages // schedule.num_ranks
    cost, sizes = cost_of(options, schedule.num_ranks, schedule.num_segments, stages)
    is_split = any(unit.kind == "W" for unit in schedule.ranks[0])
    return {
        **arguments,
        **cost.simulation_arguments(schedule, sizes, split_backward=is_split),
        "memory": cost.step_memory(sizes),
        **({} if optimizer is None else {"optimizer": optimizer}),
    }


def cost_of(
    options: argparse.Namespace, num_ranks: int, num_segments: int, stages_per_rank: int
) -> tuple[CostModel, list[int]]:
    """The model over the stages, and the tokens of the segments."""
    model, hardware, layout = read_workload(options)
    sizes, seq_len = read_sizes(options), tokens_of(options)
    cost = CostModel.balanced(
        model,
        hardware,
        num_ranks=num_ranks,
        stages_per_rank=stages_per_rank,
        seq_len=seq_len,
        layout=replace(layout, recompute=options.recompute),
    )
    if sizes is None:
        sizes = cost.split(num_segments)
    if len(sizes) != num_segments:
        raise ValueError(f"--sizes holds {len(sizes)} numbers, the order has {num_segments} segments")
    return cost, sizes


def draw_schedules(options: argparse.Namespace) -> int:
    if options.width is not None and not 20 <= options.width <= 10000:
        raise ValueError(f"--width is {options.width}, must be in 20..10000")
    for form in PICTURES:
        if getattr(options, form) == "":
            raise ValueError(f"--{form} needs the name of a file")
    schedules = {name: make_schedule(name, options) for name in options.schedule}
    least = sum(2 * each.num_stages * each.num_microbatches * each.num_segments for each in schedules.values())
    for form, what in (("png", "picture"), ("svg", "picture"), ("html", "page"), ("trace", "trace")):
        if getattr(options, form) is not None:
            draw.check_size(what, least)  # before minutes of simulating
    runs = {
        name: schedule.simulate(**arguments_of(schedule, options), critical=options.html is not None)
        for name, schedule in schedules.items()
    }
    tracks = {name: simulation.timeline for name, simulation in runs.items()}
    [first, *others] = tracks
    drawn = tracks if others else tracks[first]
    if options.png:
        draw.timeline_png(options.png, drawn, title=None if others else first)
    if options.svg:
        draw.timeline_svg(options.svg, drawn, title=None if others else first)
    if options.html:
        page.timeline_html(options.html, runs if others else runs[first], title=" and ".join(tracks))
    if options.trace:
        draw.trace_json(options.trace, drawn)
    if not any(getattr(options, form) for form in PICTURES):
        width = options.width
        if width is None:
            width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        for name, simulation in runs.items():
            print(f"{name}\n" * bool(others) + simulation.to_text(width))
    return 0


def compare_families(options: argparse.Namespace) -> int:
    sizes, workload = read_sizes(options), dict[str, Any]()
    if options.model is not None:
        model, hardware, layout = read_workload(options)
        layout = replace(layout, recompute=options.recompute)
        workload = {"model": model, "hardware": hardware, "layout": layout, "seq_len": tokens_of(options)}
    elif sizes is None and options.seq is not None:
        sizes = seq1f1b.partition_sequence(options.seq, options.segments, strategy="even")
    bytes_of: dict[str, Any] = {}
    for name in ("bandwidth", "token_bytes", "message_bytes"):
        if (text := getattr(options, name)) is not None:
            bytes_of[name] = read_bytes(text)
    cap = options.cap
    in_bytes = cap is not None and cap.endswith("B")
    check_size("compare", options, 2 if options.stages is None else options.stages)
    table = compare(
        options.schedule,
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        num_segments=options.segments,
        stages_per_rank=options.stages,
        **{name: value for name in SECONDS if (value := getattr(options, name)) is not None},
        **workload,
        segment_sizes=sizes,
        cap_microbatches=None if cap is None or in_bytes else read_number(cap),
        cap_bytes=read_bytes(cap) if in_bytes else None,
        **bytes_of,
    )
    print(table.to_json() + "\n" if options.json else table.to_text(), end="")
    return 0


def simulate(options: argparse.Namespace) -> int:
    found = []
    for name in options.schedule:
        schedule = make_schedule(name, options)
        arguments = arguments_of(schedule, options) | {"steps": options.steps, "optimizer_sync": options.sync}
        num_units = 2 * schedule.num_stages * schedule.num_microbatches * schedule.num_segments * max(options.steps, 1)
        if num_units > MOST_RUN:
            raise ValueError(f"{name}: {num_units} units in {options.steps} steps, more than {MOST_RUN}")
        with progress_bar(num_units) as progress:
            run = schedule.simulate(**arguments, progress=progress)
        found.append((name, schedule, run))
    if options.json:
        print(json.dumps([simulation_json(*each) for each in found], indent=1))
        return 0
    rows = [("schedule", "makespan", "period", "bubble", "peak units", "= micro-batches", "tensors GiB")]
    for name, schedule, run in found:
        peak = max(run.peak)
        rows.append(
            (
                name,
                f"{run.makespan:.3f}",
                "" if run.period is None else f"{run.period:.3f}",
                f"{run.bubble_ratio:.1%}",
                str(peak),
                f"{peak / units_per_microbatch(schedule):.2f}",
                "" if run.memory is None else f"{max(run.memory.total) / 2**30:.2f}",
            )
        )
    print(table_text(rows), end="")
    return 0


def simulation_json(name: str, schedule: Schedule, run: Simulation) -> dict[str, Any]:
    """Times in seconds, memory in bytes; lists hold one value per rank."""
    figures = ("makespan", "period", "bubble_ratio", "span", "busy", "wait", "bubble", "peak")
    counts = ("num_ranks", "num_stages", "num_microbatches", "num_segments")
    return {
        "schedule": name,
        **{count: getattr(schedule, count) for count in counts},
        **{figure: getattr(run, figure) for figure in figures},
        "peak_microbatches": max(run.peak) / units_per_microbatch(schedule),
        "memory": None if run.memory is None else asdict(run.memory),
    }


def add_model_options(command: argparse._ActionsContainer, required: bool = False) -> None:
    """What a model's costs follow from."""
    models, machines = ", ".join(presets("models")), ", ".join(presets("hardware"))
    command.add_argument("--model", required=required, help=f"{models}, or a .json of the same form")
    command.add_argument("--hardware", help=f"{machines}, or a .json of the same form (default: h100)")
    command.add_argument(
        "--profile",
        metavar="FILE",
        help="of seq1f1b profile: measured units and bytes; memory, links and optimizer stay those of --hardware "
        "(then cpu-zen5 by default)",
    )
    for degree in ("tensor", "context", "expert", "data"):
        command.add_argument(f"--{degree}", type=int, default=1, metavar="N", help=f"{degree}-parallel degree")
    command.add_argument(
        "--documents", type=argument(read_counts), metavar="N,N", help="tokens of the documents in a sequence"
    )
    command.add_argument("--all-logits", action="store_true", help="the head is not inside loss_fn: all logits live")


def read_workload(options: argparse.Namespace) -> tuple[ModelShape, Hardware, Layout]:
    model = load_model(options.model)
    hardware = load_hardware(options.hardware or ("cpu-zen5" if options.profile else "h100"))
    if options.profile:
        hardware = ProfiledHardware.of(Profile.load(options.profile), hardware)
    layout = Layout(
        tensor=options.tensor,
        context=options.context,
        expert=options.expert,
        data=options.data,
        documents=tuple(options.documents) if options.documents else None,
        head_in_loss=not options.all_logits,
    )
    return model, hardware, layout


def add_plan_options(command: argparse.ArgumentParser) -> None:
    add_model_options(command, required=True)
    command.add_argument("--seq", type=int, help="tokens of a micro-batch, one sequence")
    command.add_argument(
        "--lengths",
        metavar="N:COUNT,...|FILE",
        help="or a mix from step to step: how many sequences have N tokens, or a file with a line for each length, "
        "'N COUNT', or for each sequence, 'N'",
    )
    command.add_argument("--ranks", type=int, required=True, help="pipeline ranks")
    command.add_argument("--microbatches", type=int, required=True)
    command.add_argument(
        "--memory", type=argument(read_bytes), help="cap of a device, as 80GiB or 24e9 (default: all it has)"
    )
    command.add_argument("--schedules", type=read_names, metavar="A,B", help="families to try (default: all but auto)")
    command.add_argument(
        "--segments", type=argument(read_counts), metavar="K,K", help="default: powers of two up to 16"
    )
    command.add_argument(
        "--stages", type=argument(read_counts), metavar="V,V", default=[1, 2, 4], help="stages per rank"
    )
    command.add_argument("--recompute", type=read_names, metavar="A,B", help="none,ffn,full (with a profile: none)")
    command.add_argument(
        "--no-optimizer-sync", action="store_true", help="a rank begins the next step without waiting for the others"
    )
    command.add_argument("--best", type=int, default=5, help="how many plans to print")
    command.add_argument(
        "--for-engine", action="store_true", help="only orders that PipelineEngine runs: with the backward whole"
    )
    command.add_argument("--json", action="store_true", help="print the search as JSON")
    command.add_argument(
        "--output", metavar="FILE", help="write the best plan, for PipelineEngine(plan=FILE); implies --for-engine"
    )


def read_lengths(text: str) -> dict[int, int]:
    """How many sequences there are of each length, of a histogram or a file."""
    if re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        where, lines = "--lengths", text.replace(":", " ").split(",")
    else:
        with open(text) as file:
            where, lines = text, [line.partition("#")[0].strip() for line in file]
    lengths: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"(\d+(\s+\d+)?)?", line, re.ASCII):
            raise ValueError(f"{where}, line {number}: {line[:40]!r} must be a length, or a length and a count")
        if line:
            length, count = (*map(int, line.split()), 1)[:2]
            lengths[length] = lengths.get(length, 0) + count
    if not lengths:
        raise ValueError(f"{where}: there is no length")
    return lengths


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader as argparse takes it, so that its message is shown."""

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument


def read_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def read_counts(text: str) -> list[int]:
    if not re.fullmatch(r"-?[0-9]+(,-?[0-9]+)*", text):
        raise ValueError(f"{text!r}: whole numbers are written 1,2,4")
    return [int(count) for count in text.split(",")]


def plan(options: argparse.Namespace) -> int:
    model, hardware, layout = read_workload(options)
    found = search_plans(
        model,
        hardware,
        seq_len=options.seq,
        lengths=None if options.lengths is None else read_lengths(options.lengths),
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        memory=options.memory,
        layout=layout,
        optimizer_sync=not options.no_optimizer_sync,
        names=options.schedules,
        segments=options.segments,
        stages_per_rank=options.stages,
        recompute=options.recompute,
        best=options.best,
        for_engine=options.for_engine or options.output is not None,
        progress=show_progress if sys.stderr.isatty() else None,
    )
    if options.output:
        found.plans[0].save(options.output)
    print(found.to_json() if options.json else found.to_text(options.model))
    return 0


def add_profile_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help=f"{', '.join(presets('models'))}, or a .json of the same form; or give sizes:")
    for name in MODEL_SIZES:
        command.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    command.add_argument("--seq", type=int, required=True, help="longest sequence to measure, in tokens")
    command.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast over fp32 weights")
    command.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    command.add_argument("--processes", type=int, default=1, help="that measure at the same time, as ranks would run")
    command.add_argument("--layers", type=int, default=2, help="of the stage that is measured (default: 2)")
    command.add_argument("--repeats", type=int, default=5, help="measured steps of each cut of the sequence")
    command.add_argument("--output", metavar="FILE", required=True, help="the profile, for plan --profile FILE")


MODEL_SIZES = ("hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim")


def profile(options: argparse.Namespace) -> int:
    sizes = {name: value for name in MODEL_SIZES if (value := getattr(options, name)) is not None}
    if (options.model is None) == (not sizes):
        raise ValueError("profile needs --model, or the sizes of a model (--hidden, --heads, ...), one of the two")
    if options.model is not None:
        model = load_model(options.model)
    else:
        model = make_model({"layers": 1, "kv_heads": sizes.get("heads"), **sizes}, "sizes of the model")
    try:
        profiler = importlib.import_module("seq1f1b.planning.profiler")
    except ModuleNotFoundError as error:
        raise ImportError("profile needs torch, which is not installed") from error
    found: Profile = profiler.profile_decoder(
        model,
        seq_len=options.seq,
        layers=options.layers,
        repeats=options.repeats,
        processes=options.processes,
        threads=options.threads,
        bf16=options.dtype == "bf16",
    )
    found.save(options.output)
    print(found.to_text())
    return 0


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None] | None]:
    """Of units, where somebody looks."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(done: int) -> None:
        filled = 40 * done // max(total, 1)
        bar = "#" * filled + "." * (40 - filled)
        print(f"\r[{bar}] {done / max(total, 1):4.0%} of {total:.3g} units", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def show_progress(done: int, total: int) -> None:
    print(f"\r{done} of {total}", end="" if done + 1 < total else "\r\033[K", file=sys.stderr, flush=True)


def _found_nccl() -> str:
    from seq1f1b.device.edges import find_nccl

    try:
        version, path = _C.nccl_find(find_nccl())
    except RuntimeError as error:
        return f"not found ({error}): no transport='nccl'"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}, {path}"


def doctor(options: argparse.Namespace) -> int:
    print(f"seq1f1b {seq1f1b.__version__}, Python {platform.python_version()}, {platform.machine()}")
    if importlib.util.find_spec("torch") is None:
        print("torch: not found. Partition and schedules work; attention and the engine do not.")
        return 0
    import torch

    importlib.import_module("seq1f1b.ops.attention")  # binds torch's functions

    print(f"torch {torch.__version__}: bound, {len(_C.torch_functions())} functions of its C ABI")
    fma, bf16 = _C.attention_rates(0.02)
    pairs = f", {bf16 / 1e9:.0f} with products of bf16" if bf16 else ""
    print(f"attention on the CPU: {_C.attention_isa()} kernels, {torch.get_num_threads()} threads")
    print(f"GFLOP/s of one core: {fma / 1e9:.0f} in fp32{pairs}; SEQ1F1B_ISA forces other kernels")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        print(f"CUDA device {index}: {device.name}, sm_{device.major}{device.minor}, {device.total_memory >> 30} GiB")
    if not torch.cuda.is_available():
        print(f"CUDA: no device{'' if torch.version.cuda else ', and a torch built without CUDA'}")
    print("attention on CUDA: torch's own ops; never yet run on a GPU (see benchmarks/gpu.py)")
    for line in importlib.import_module("seq1f1b.device.kernel_library").describe():
        print(line)
    print(f"NCCL: {_found_nccl()}")
    print("messages between GPUs: through host memory; transport='nccl' and 'copy' never yet run on a GPU")
    for package, loss in (
        ("matplotlib", "no PNG timelines"),
        ("bokeh", "no HTML pages"),
        ("tokenizers", "no examples/train_gpt.py"),
    ):
        found = importlib.util.find_spec(package) is not None
        print(f"{package}: {'found' if found else 'not found: ' + loss}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
