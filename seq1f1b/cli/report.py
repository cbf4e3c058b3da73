"""``seq1f1b report``."""

from __future__ import annotations

import argparse

from seq1f1b.table import table_text, wrapped


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", help="reports, one per line; the last report is printed")
    command.add_argument("--all", action="store_true", help="a line for each report, with means over ranks")


def run(options: argparse.Namespace) -> int:
    from seq1f1b.report.idle import CAUSES, mean_idle  # here, so that other commands run without torch
    from seq1f1b.report.report import PipelineReport

    if not options.all:
        print(wrapped(str(PipelineReport.load(options.file))))
        return 0
    rows = [("step", "seconds", "busy", *CAUSES)]
    for report in PipelineReport.load_all(options.file):
        mean = mean_idle(report.idle)
        busy = f"{1 - mean.total / report.makespan:.1%}"
        rows.append((str(report.ranks[0].step), f"{report.makespan:.4g}", busy, *mean.shares(report.makespan)))
    print(table_text(rows), end="")
    return 0
