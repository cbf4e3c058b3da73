"""Command line ``seq1f1b``, also ``python -m seq1f1b``: one file per command, and a few shared files."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from seq1f1b import __version__
from seq1f1b.cli import compare, doctor, draw, explorer, plan, profile, report, simulate
from seq1f1b.extras import torch_remedy

__all__ = ["main", "make_parser"]

COMMANDS = {
    draw: "draw schedules as text, picture, HTML page or Perfetto trace",
    simulate: "print makespan, bubble and peaks of schedules",
    compare: "compare schedules over the same work, within a cap",
    plan: "find the fastest schedule, segments and split that fit in memory",
    profile: "measure what a model's layers and ends cost on this machine",
    report: "say why a measured step is slow, from a file that PipelineReport.save wrote",
    explorer: "say where the schedule explorer is: a page to design a step in, for any browser, without a network",
    doctor: "say what was found on this machine, and what each absence costs",
}
DESCRIPTION = "Draws, simulates, compares and plans pipeline schedules for training on long sequences."
EXAMPLES = """\
examples:
  1F1B above Seq1F1B, as text:
    seq1f1b draw 1f1b seq1f1b
  time, bubble and peaks in seconds and bytes of a model on a machine:
    seq1f1b simulate 1f1b seq1f1b --model llama3-8b --seq 8192
  all schedules that hold at most 4 micro-batches, fastest first:
    seq1f1b compare --cap 4
  the fastest way to train a model that fits in memory:
    seq1f1b plan --model llama3-8b --seq 131072 --ranks 8 --microbatches 16

seq1f1b COMMAND --help lists the options of a command.
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line, from which the reference page is made."""
    parser = argparse.ArgumentParser(
        prog="seq1f1b",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"seq1f1b {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for module, about in COMMANDS.items():
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        command.set_defaults(run=module.run)
        module.add(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 2, after one line on stderr, for a mistake of the caller."""
    parser = make_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()  # a full disk is reported like any other error
        return status
    except BrokenPipeError:  # the reader of the output has ended, as after | head
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, MemoryError, OverflowError) as error:
        text = str(error)
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            text = f"{options.command} needs torch, which is not installed; {torch_remedy()}"
        print(f"seq1f1b: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("seq1f1b: interrupted", file=sys.stderr)
        return 130
