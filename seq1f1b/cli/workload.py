"""Options shared by commands, and the objects that they describe: a model on a machine, schedules, counts, costs."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from typing import Any

import seq1f1b
from seq1f1b import _C, Costs, Links, Noise, Schedule, Simulation
from seq1f1b.cli.values import add_options, read_counts, read_parents, read_sizes, read_tokens
from seq1f1b.families import families_named
from seq1f1b.files import nearest_name, read
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.plan import INSIDE, Layout
from seq1f1b.planning.cost import CostModel, Price
from seq1f1b.planning.hardware import Hardware, ProfiledHardware, load_hardware, load_model, presets
from seq1f1b.planning.profile import Profile
from seq1f1b.schedule import families

MOST_UNITS = 10_000_000  # most units of an order, at about 300 bytes each
SECONDS = {"forward": 1.0, "backward": 2.0, "weight": None, "transfer": 0.0}  # defaults without a model


def add_order_options(command: argparse.ArgumentParser, *, microbatches: int = 8, segments: int = 4) -> None:
    """Adds the counts and costs of draw, simulate and compare.

    Args:
        microbatches, segments: defaults; the segments count only for families that cut micro-batches.
    """
    command.set_defaults(default_segments=segments)
    command.epilog = "Passes: " + ", ".join(map("{} {}".format, _C.PASSES, _C.PASS_TEXTS)) + ". I and W are a split B."
    whole = "schedules without segments run whole micro-batches"
    options = {
        "--ranks P": (int, 4, "pipeline ranks (default: 4)"),
        "--microbatches M": (int, microbatches, f"micro-batches (default: {microbatches})"),
        "--segments K": (int, None, f"segments of each micro-batch (default: {segments}); {whole}"),
        "--stages V": (int, None, "stages per rank (default: the schedule's least)"),
        "--forward S": (float, None, "seconds that a rank takes for F of a micro-batch (default: 1)"),
        "--backward S": (float, None, "seconds that a rank takes for B of a micro-batch (default: 2)"),
        "--weight S": (float, None, "the part of B that a split backward puts off as W (default: half)"),
        "--transfer S": (float, None, "seconds of a message between two stages (default: 0)"),
    }
    add_options(command, options)
    costs = command.add_argument_group("the costs of a model in place of those seconds; they need --seq")
    of_model = {
        "--seq TOKENS": (read_tokens, None, "tokens of a micro-batch, which is one sequence: 131072 or 128k"),
        "--sizes N,N,...": (read_sizes, None, "tokens of each segment (default: equal time)"),
        "--inside": (INSIDE, "none", "parts of the blocks that the backward recomputes (default: none)"),
    }
    command.set_defaults(of_a_model=add_model_options(costs) | add_options(costs, of_model))


def add_variation_options(command: argparse.ArgumentParser) -> None:
    """Adds the schedules of draw and simulate, recomputation and offload, noise, trees, and options of a family."""
    kinds = f"one of {', '.join(seq1f1b.schedules())}; or a file with an order as text, or as torch's CSV (.csv)"
    command.add_argument("schedule", nargs="+", help=kinds)
    again = "all: the order holds an R before the backward of every unit (default: none)"
    tier = "move saved activations to a tier and back: seconds each way, for a micro-batch on a rank"
    trees = (
        "trees of segments: for each micro-batch a word with the parent of each segment, -1 for none, or - for a "
        'chain, as --parents="-1,0,0 -1,0,1,1,0 -"; a single word, --parents=-1,0,0, is for all micro-batches'
    )
    options = {
        "--recompute none|all": (("none", "all"), "none", again),
        "--tier S": (float, None, tier),
        "--jitter X": (float, 0.0, "vary the seconds of each unit by up to this share"),
        "--transfer-jitter X": (float, 0.0, "vary the time of each message by up to this share"),
        "--seed N": (int, 0, "seed of these variations (default: 0)"),
        "--parents TREES": (read_parents, None, trees),
    }
    add_options(command, options)
    known = "; ".join(f"{family.name}: {', '.join(family.options)}" for family in families() if family.options)
    text = f"an option of the schedule; {known}"
    command.add_argument("--option", action="append", default=[], metavar="NAME=NUMBER", help=text)


def add_model_options(command: argparse._ActionsContainer, required: bool = False) -> dict[str, Any]:
    """Adds a model, a machine, and the layout of the model on the machine. Returns the defaults by name."""
    models, machines = ", ".join(presets("models")), ", ".join(presets("hardware"))
    model = f"{models}; or a .json file: of the same form, or a config.json"
    profile = (
        "measured seconds and bytes, from seq1f1b profile; memory, links and optimizer still come from --hardware "
        "(whose default is then cpu-zen5)"
    )
    logits = "count the logits of all live segments: the output head is not inside the loss"
    options = {
        "--model": (str, ... if required else None, model),
        "--hardware": (str, None, f"{machines}; or a .json file of the same form (default: h100)"),
        "--profile FILE": (str, None, profile),
        **{f"--{name} N": (int, 1, f"{name}-parallel degree") for name in ("tensor", "context", "expert", "data")},
        "--documents N,N": (read_counts, None, "tokens of the documents packed in a sequence"),
        "--all-logits": (bool, False, logits),
        "--lora R": (int, 0, "train only adapters of rank R, beside frozen weights"),
        "--frozen": (bool, False, "train no weight of the model"),
        "--weight-bits": ((4, 8, 16), None, "bits of a frozen weight (default: those of activations)"),
    }
    return add_options(command, options)


def check_costs(options: argparse.Namespace) -> None:
    """Fills in the default seconds; refuses options without an effect."""
    for name, default in SECONDS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.model is not None:
            raise ValueError(f"--{name} and --model: the model has costs of its own, give one of the two")
    unused = [name for name, default in options.of_a_model.items() if getattr(options, name) != default]
    if options.model is None and unused:
        raise ValueError(f"--{unused[0].replace('_', '-')} says nothing without --model")


# -- a model on a machine ----------------------------------------------------------------------------------------------


def read_workload(options: argparse.Namespace, inside: str = "none") -> tuple[ModelShape, Hardware, Layout]:
    model = load_model(options.model)
    profile = None if options.profile is None else Profile.load(options.profile)
    is_of_cpu = profile is not None and profile.device == "cpu"
    hardware = load_hardware(options.hardware or ("cpu-zen5" if is_of_cpu else "h100"))
    if profile is not None:
        hardware = ProfiledHardware.of(profile, hardware)
    same = ("tensor", "context", "expert", "data", "lora", "frozen", "weight_bits")
    layout = Layout(
        **{name: getattr(options, name) for name in same},
        inside=inside,
        documents=tuple(options.documents) if options.documents else None,
        head_in_loss=not options.all_logits,
    )
    return model, hardware, layout


def tokens_of(options: argparse.Namespace) -> int:
    """Returns the tokens of a micro-batch, from --seq or --sizes."""
    seq_len = options.seq if options.sizes is None else sum(options.sizes)
    if seq_len is None:
        raise ValueError("--model needs --seq, the tokens of a micro-batch")
    if options.seq not in (None, seq_len):
        raise ValueError(f"--sizes holds {seq_len} tokens, --seq is {options.seq}")
    return int(seq_len)


def price_of(options: argparse.Namespace, num_ranks: int, num_segments: int, stages_per_rank: int) -> Price:
    """Returns the seconds and bytes of the units of the model, in stages of balanced layers."""
    model, hardware, layout = read_workload(options, options.inside)
    counts = {"num_ranks": num_ranks, "stages_per_rank": stages_per_rank, "seq_len": tokens_of(options)}
    cost = CostModel.balanced(model, hardware, layout=layout, **counts)
    # A schedule without segments runs whole micro-batches, whatever --sizes says.
    sizes = options.sizes
    if num_segments == 1 or sizes is None:
        sizes = partition_sequence(cost.seq_len, num_segments, strategy="profiled", profile=cost)
    if len(sizes) != num_segments:
        raise ValueError(f"--sizes holds {len(sizes)} numbers, the order has {num_segments} segments")
    return cost.price(sizes)


# -- schedules ---------------------------------------------------------------------------------------------------------


def wanted_segments(options: argparse.Namespace) -> int:
    """Returns k for the families that cut micro-batches into segments."""
    if options.segments is not None:
        return int(options.segments)
    return int(options.default_segments) if options.sizes is None else len(options.sizes)


def check_size(name: str, options: argparse.Namespace, num_segments: int, stages_per_rank: int) -> None:
    num_units = 2 * options.ranks * stages_per_rank * options.microbatches * num_segments
    if num_units > MOST_UNITS:
        raise ValueError(f"{name}: {num_units} units, more than the {MOST_UNITS} that the command line takes")


def make_schedule(name: str, options: argparse.Namespace) -> Schedule:
    """Returns the order of a named family with the counts and costs asked for, or the order in a file."""
    moved = "none" if options.tier is None else "all"
    if name not in seq1f1b.schedules():
        if os.path.isfile(name):
            if options.parents is not None:
                raise ValueError(f"{name}: an order in a file has its parents there; leave out --parents")
            schedule = read_schedule(name, 1 if options.segments is None else options.segments)
            moves = "O" in schedule.kinds  # the file itself says which units move
            return schedule.recompute(options.recompute).offload("none" if moves else moved)
        raise ValueError(f"there is no schedule and no file named {name!r}{nearest_name(name, seq1f1b.schedules())}")
    [known] = families_named([name])
    stages = known.stages_per_rank if options.stages is None else options.stages
    segments = wanted_segments(options) if known.has_segments else 1
    check_size(name, options, segments, stages)
    counts: dict[str, Any] = {"num_ranks": options.ranks, "num_segments": segments, "stages_per_rank": stages}
    given: dict[str, Any] = dict(map(read_option, options.option))
    if "costs" in known.options and min(counts.values()) > 0:
        if options.model is None:
            weight = options.backward / 2 if options.weight is None else options.weight
            passes: Any = (options.forward, max(options.backward - weight, 0.0), weight)
            given["costs"] = [seconds / (stages * segments) for seconds in passes]
        else:
            given["costs"] = price_of(options, **counts).seconds[:3]  # of F, I and W
    if "transfer" in known.options and options.model is None:
        given.setdefault("transfer", options.transfer)
    changes: dict[str, Any] = {"recompute": options.recompute, "offload_units": moved}
    if options.parents is None or not known.has_segments:
        return seq1f1b.build_schedule(name, num_microbatches=options.microbatches, options=given, **counts, **changes)
    if options.model is not None:
        raise ValueError("--parents goes with seconds of F and B, not with --model")
    trees = [list(range(-1, segments - 1)) if own is None else own for own in options.parents]
    if not trees:
        raise ValueError("--parents holds no word")
    trees *= options.microbatches if len(trees) == 1 else 1
    counts["num_segments"] = [len(own) for own in trees]
    return seq1f1b.build_schedule(name, num_microbatches=len(trees), options=given, parents=trees, **counts, **changes)


def read_schedule(name: str, num_segments: int) -> Schedule:
    """Reads an order from a file: torch's CSV or our text."""

    def parse(text: str) -> Schedule:
        is_csv = name.endswith(".csv")
        schedule = Schedule.from_csv(text, num_segments=num_segments) if is_csv else Schedule.from_text(text)
        schedule.check()
        return schedule

    return read(name, parse)


def read_option(text: str) -> tuple[str, int | str]:
    name, _, value = text.partition("=")
    if name == "costs":
        raise ValueError(f"--option {text}: costs come from --forward, --backward and --weight, or from --model")
    if any(known == name and kind == "word" for known, kind, _, _ in _C.FAMILY_OPTIONS):
        return name, value
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError(f"--option {text}: an option is written NAME=NUMBER, placement=loop|v or backward=split|whole")
    return name, int(value)


def units_per_microbatch(schedule: Schedule) -> int:
    """Returns how many units of one pass a rank runs for a micro-batch."""
    return schedule.num_segments * schedule.num_stages // schedule.num_ranks


def simulated(schedule: Schedule, options: argparse.Namespace, **how: Any) -> Simulation:
    """Simulates a step. Without a model, all segments and stages cost equal seconds; with a model, bytes count, too.

    how: further arguments of ``simulate``.
    """
    parts, memory = units_per_microbatch(schedule), None
    if options.model is None:
        weight = None if options.weight is None else options.weight / parts
        costs = Costs(options.forward / parts, options.backward / parts, weight, links=Links(options.transfer))
    else:
        if schedule.num_stages % schedule.num_ranks != 0:
            raise ValueError(f"{schedule!r}: a model needs as many stages on every rank")
        stages_per_rank = schedule.num_stages // schedule.num_ranks
        price = price_of(options, schedule.num_ranks, schedule.num_segments, stages_per_rank)
        costs, memory = price.costs(schedule), price.step_memory(schedule.rank_of_stage)
    optimizer = getattr(options, "optimizer", None)
    costs = replace(
        costs, tier=(options.tier or 0.0) / parts, optimizer=costs.optimizer if optimizer is None else optimizer
    )
    noise = Noise(options.jitter, options.transfer_jitter, options.seed)
    return schedule.simulate(costs, memory=memory, noise=noise, **how)
