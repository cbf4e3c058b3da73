"""One page to attach to an issue: a verdict on each part, and what it was made from."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import seq1f1b
from seq1f1b.first_contact.computing import ALONE
from seq1f1b.first_contact.drills import ORDERS
from seq1f1b.first_contact.facts import WARNINGS
from seq1f1b.first_contact.messages import BY, PROOF, RATE
from seq1f1b.first_contact.parts import PARTS
from seq1f1b.first_contact.supervisor import Outcome, Record
from seq1f1b.transport.table import TRANSPORTS

__all__: list[str] = []

REMEDIES = {  # of a part in which something failed; {good} are transports that passed, or a word for none
    "machine": "see the row that failed; a container may need --ipc host, --gpus all and --shm-size 8g",
    "messages": "use transport={good}; a way that failed here is not to be trusted in training",
    "drills": "use transport={good} until this is understood; verify() on your own model says whether it trains right",
    "killed": "a lost rank may be heard of late by this transport: set Limits(step=...) low, or use transport={good}",
    "training": "the drills say whether numbers are right; then compare the losses of both",
    "blocks": "leave NCCL_MIN_CTAS and NCCL_MAX_CTAS unset",
}
HUNG = "it hung: the archive has the stacks of each rank, what each waits for, and NCCL's log"

Table = list[tuple[str, ...]]


def verdict(records: Sequence[Record]) -> str:
    """passed, failed, or not measured; and how many cases."""
    states = [record["state"] for record in records]
    if "failed" in states:
        return f"**failed**: {states.count('failed')} of {len(states)}"
    if "passed" not in states:
        reasons = dict.fromkeys(record["why"] for record in records)
        return f"not measured: {'; '.join(reasons) or 'no case was asked for'}"
    return f"passed: {states.count('passed')} of {len(states)}" + (
        f" (not measured: {states.count('unmeasured')})" if "unmeasured" in states else ""
    )


def good_transports(outcome: Outcome) -> str:
    """Transports with no failure in messages, drills and the killed rank, and something that passed."""
    found = []
    for transport in TRANSPORTS:
        own = [
            record
            for part in ("messages", "drills", "killed")
            for record in outcome.records.get(part, [])
            if transport_of(record) == transport
        ]
        states = {record["state"] for record in own}
        if "passed" in states and "failed" not in states:
            found.append(f'"{transport}"')
    return " or ".join(found) or "another one (none passed here)"


def transport_of(record: Record) -> str:
    """The transport that a case is about, "" if it is about none."""
    words = [word.strip() for word in record["case"].split(",")]
    return next((word for word in words if word in TRANSPORTS), "")


def markdown(table: Table) -> Iterator[str]:
    head, *rows = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in table)
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def shown(record: Record, figure: Callable[[dict[str, Any]], str]) -> str:
    """A cell of a table: the figure of a case that passed, else its state."""
    state = record["state"]
    if state == "passed":
        return figure(record["figures"])
    return "**hung**" if record.get("hung") else "**failed**" if state == "failed" else f"- ({record['why']})"


def in_words(value: Any) -> str:
    return ", ".join(f"{k} {in_words(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def of_machine(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        state = {"failed": " **failed**: ", "unmeasured": " not measured: "}.get(record["state"], "")
        yield f"**{record['case']}**:{state}{record['why'] if state else ''}"
        yield ""
        for name, value in sorted(record["figures"].items()):
            if name == WARNINGS:
                continue
            if "\n" in str(value):
                yield from (f"- {name}", "", "```text", *str(value).splitlines(), "```")
            else:
                yield f"- {name}: {in_words(value)}"
        if record["figures"]:
            yield ""


def rate_of(pair: str, transport: str, figures: dict[str, Any]) -> str:
    """The rate in steps; what carried the messages, where the engine chose it; and the rate of the edge's proof."""
    way, proof = figures.get(f"{BY} {pair}", ""), figures.get(f"{PROOF} {pair}")
    notes = [way] if way not in ("", transport) else []
    notes += [f"{proof} alone"] if proof else []
    rate = str(figures.get(f"{RATE} {pair}", "-"))
    return f"{rate} ({', '.join(notes)})" if notes else rate


def of_messages(records: Sequence[Record]) -> Iterator[str]:
    rates: dict[str, dict[str, str]] = {}
    for record in records:
        row = rates.setdefault(transport_of(record), {})
        for pair in record["case"].partition(", edges ")[2].split():
            row[pair] = shown(record, functools.partial(rate_of, pair, transport_of(record)))
    pairs = sorted({pair for row in rates.values() for pair in row}, key=lambda pair: int(pair.partition("-")[0]))
    if pairs:
        table = [(f"transport, {RATE}", *pairs)]
        table += [(name, *(row.get(pair, "") for pair in pairs)) for name, row in rates.items()]
        yield from markdown(table)
        yield ""


def of_drills(records: Sequence[Record]) -> Iterator[str]:
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        what = record["case"].partition(", ")[0]
        column = f"{record['group']}, {transport_of(record)}"
        cells.setdefault(what, {})[column] = shown(record, lambda figures: f"{figures['error']:.0e}")
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    order = [*ORDERS, *(what for what in cells if what not in ORDERS)]
    table = [("ranks, transport", *order)]
    table += [(column, *(cells.get(what, {}).get(column, "") for what in order)) for column in columns]
    if columns:
        yield from markdown(table)
        yield ""
    errors = [record["figures"]["error"] for record in records if "error" in record["figures"]]
    if errors:
        yield f"A cell is the largest error of a gradient in float32, from float64; the worst is {max(errors):.1e}."
        yield ""


def of_training(records: Sequence[Record]) -> Iterator[str]:
    alone = {r["group"]: r["figures"].get("ms") for r in records if r["case"] == ALONE and r["state"] == "passed"}
    table: Table = [("ranks", "arm", "ms", "over torch", "tokens/s", "peak GB", "loss")]
    for record in records:
        figures, theirs = record["figures"], alone.get(record["group"])
        ratio = f"{figures['ms'] / theirs:.3f}" if theirs and "ms" in figures else ""
        more = [f"{figures.get(name, '')}" for name in ("tokens/s", "peak GB", "loss")]
        table.append((record["group"], record["case"], shown(record, lambda f: f"{f['ms']}"), ratio, *more))
    yield from markdown(table)
    yield ""


def of_others(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        name = ", ".join(part for part in (record["group"], record["case"]) if part)
        figures = "; ".join(f"{name} {value}" for name, value in record["figures"].items())
        yield f"- {name}: {shown(record, lambda _: figures)}"  # noqa: B023 # called at once
    yield ""


TABLES = {"machine": of_machine, "messages": of_messages, "drills": of_drills, "training": of_training}


def failures(outcome: Outcome) -> Iterator[str]:
    for name, records in outcome.records.items():
        for record in records:
            if record["state"] == "failed":
                where = ", ".join(part for part in (PARTS[name].title, record["group"], record["case"]) if part)
                yield f"- {where}: {record['why']}"


def notes(outcome: Outcome) -> list[str]:
    """Lists what in the environment is in the way, and what the package warned of."""
    found: dict[str, None] = {}
    for records in outcome.records.values():
        for record in records:
            own = [*record.get("warnings", [])]
            own += record["figures"].get(WARNINGS, [])
            found |= dict.fromkeys(own)
    return [f"- {text}" for text in found]


def make(outcome: Outcome, what: str, shares: int, command: str) -> str:
    """Args:
    what: the machine in words. shares: ranks of one GPU at most. command: that was run.
    """
    lines = [f"# First contact: seq1f1b {seq1f1b.__version__} on {what}", ""]
    lines += [f"`{command}`, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC", ""]
    if shares > 1:
        lines += [f"{shares} ranks share a GPU and take turns on it: rates and times are floors, errors are not.", ""]
    table: Table = [("part", "verdict", "seconds", "remedy")]
    for name, records in outcome.records.items():
        bad = [record for record in records if record["state"] == "failed"]
        remedy = REMEDIES[name].format(good=good_transports(outcome)) if bad else ""
        remedy += f"; {HUNG}" if any(record.get("hung") for record in bad) else ""
        table.append((PARTS[name].title, verdict(records), f"{outcome.seconds[name]:.0f}", remedy))
    lines += [*markdown(table), ""]
    for title, body in (("Failures", list(failures(outcome))), ("Warnings", notes(outcome))):
        if body:
            lines += [f"## {title}", "", *body, ""]
    if outcome.archive is not None:
        lines += [f"Attach `{outcome.archive}` as well: what every rank of a failed case did, and NCCL's logs.", ""]
    for name, records in outcome.records.items():
        lines += [f"## {PARTS[name].title}", "", *TABLES.get(name, of_others)(records)]
    return "\n".join(lines).rstrip() + "\n"
