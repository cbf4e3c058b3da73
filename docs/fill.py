"""Copies into the pages what is made elsewhere, so that they can be read as they lie.

    python docs/fill.py            # writes the pages
    python docs/fill.py --check    # names what is not as it should be, and writes nothing

A page says what goes between two comments, ``<!-- fill: WHAT -->`` and ``<!-- end -->``.
WHAT is one of these; files are named from the repository's root:

    file FILE            the file as a code block
    part FILE HEADING    its lines from the comment ``# -- HEADING`` to the next such comment
    changes FILE FILE    what was changed from the first file to the second
    timeline 1f1b seq1f1b/2 [transfer=0.25]
                         a picture of one simulated step of each family, over so many segments
    documents UNIT LENGTH LENGTH ...
                         a picture of a planned step of these documents, beside padded rows
    trees NUMBER PROMPT ANSWER ANSWERS
                         a picture of a planned step of so many such trees, beside their rows
    families             a table of the schedule families
    commands             the commands of ``seq1f1b`` with their options
    recipes MODEL/HARDWARE/MEMORY/TOKENS/P/M/K ...
                         what ``seq1f1b plan`` says for each, as a table, and a command
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PICTURES = DOCS / "pictures"
PLACE = re.compile(r"^<!-- fill: (.*?) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json"}


def fence(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def cell(text: str) -> str:
    """Text for one cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(cell, row)) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def whole_file(_page: Path, name: str) -> str:
    path = ROOT / name
    return fence(LANGUAGES.get(path.suffix, "text"), path.read_text(encoding="utf-8"))


def part(_page: Path, name: str, *heading: str) -> str:
    path = ROOT / name
    text = re.split(
        rf"^ *# -- {re.escape(' '.join(heading))}\n",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    if len(text) != 2:
        raise ValueError(f"{name} holds no comment, or several: # -- {' '.join(heading)}")
    return fence(
        LANGUAGES[path.suffix],
        re.split(r"^ *# -- ", text[1], flags=re.MULTILINE)[0].strip("\n"),
    )


def changes(_page: Path, *names: str) -> str:
    """Without the lines of ``---`` and ``+++``, whose dates and folders say nothing."""
    old, new = (
        (ROOT / name).read_text(encoding="utf-8").splitlines(keepends=True) for name in names
    )
    return fence("diff", "".join(list(difflib.unified_diff(old, new, n=2))[2:]))


def timeline(page: Path, *arguments: str) -> str:
    """A rank takes 1 s for the forward of a micro-batch and 2 s for its backward."""
    import seq1f1b
    from seq1f1b.schedule import families

    stages = {family.name: family.stages_per_rank for family in families()}
    options = {
        key: float(value)
        for key, value in (item.split("=") for item in arguments if "=" in item)
    }
    names = [item for item in arguments if "=" not in item]
    tracks = {}
    for item in names:
        name, _, segments = item.partition("/")
        k, v = int(segments or 1), stages[name]
        order = seq1f1b.build_schedule(
            name, num_ranks=4, num_microbatches=4, num_segments=k, stages_per_rank=v
        )
        run = order.simulate(
            seq1f1b.Costs(
                1 / (k * v),
                2 / (k * v),
                links=seq1f1b.Links(latency=options.get("transfer", 0.0)),
            )
        )
        tracks[name + (f", {k} segments" if k > 1 else "")] = run.timeline
    name = "-".join(name.replace("/", "_") for name in names)
    return picture(page, name, f"Timeline of {', '.join(tracks)}", tracks)


def documents(page: Path, unit_tokens: str, *lengths: str) -> str:
    """On four ranks, by the costs of Llama 3 8B without its ends."""
    from seq1f1b import build_schedule
    from seq1f1b.plan import Layout
    from seq1f1b.planning.cost import CostModel
    from seq1f1b.planning.hardware import load_hardware, load_model
    from seq1f1b.planning.step_plan import padded_rows, plan_step

    tokens = [int(length) for length in lengths]
    model = load_model("llama3-8b")._replace(vocab=0)
    cost = CostModel(
        model,
        load_hardware("h100"),
        num_ranks=4,
        seq_len=max(tokens),
        layout=Layout(tensor=8),
    )
    tracks = {
        "planned rows": plan_step(tokens, cost, unit_tokens=int(unit_tokens)).simulation
    }
    for k in (1, 4):
        rows = padded_rows(tokens, k, model)
        order = build_schedule(
            "seq1f1b", num_ranks=4, num_microbatches=len(rows), num_segments=[k] * len(rows)
        )
        run = order.simulate(cost.price_rows(rows).costs(order))
        tracks[f"rows of {max(tokens)} tokens, {f'{k} segments' if k > 1 else '1F1B'}"] = run
    return picture(
        page,
        "documents",
        "Timelines of planned rows and of rows of one length",
        {heading: run.timeline for heading, run in tracks.items()},
    )


def trees(page: Path, *counts: str) -> str:
    """On two ranks, by the costs of Llama 3 8B without its ends; each answer is a unit."""
    from seq1f1b.planning.cost import CostModel
    from seq1f1b.planning.hardware import load_hardware, load_model
    from seq1f1b.planning.step_plan import plan_step
    from seq1f1b.planning.step_rows import TreeShape

    number, prompt, answer, answers = map(int, counts)
    model = load_model("llama3-8b")._replace(vocab=0)
    cost = CostModel(model, load_hardware("h100"), num_ranks=2, seq_len=prompt + answer)
    tree = TreeShape((prompt, *[answer] * answers), (-1, *[0] * answers))
    options: dict[str, Any] = {
        "schedule": "seq1f1b",
        "unit_tokens": prompt + answer,
        "siblings": False,
    }
    tracks = {
        "trees": plan_step([tree] * number, cost, **options),
        "rows": plan_step([prompt + answer] * (number * answers), cost, **options),
    }
    return picture(
        page,
        "trees",
        "Timelines of a step of trees and of its rows",
        {heading: plan.simulation.timeline for heading, plan in tracks.items()},
    )


def picture(page: Path, name: str, shown: str, tracks: dict[str, Any]) -> str:
    """Its name holds a digest of the times shown: a changed order asks for another."""
    times = [
        f"{heading} {unit} {start:.6f} {stop:.6f}"
        for heading, ranks in tracks.items()
        for track in ranks
        for unit, start, stop in track
    ]
    digest = hashlib.sha256("\n".join(times).encode()).hexdigest()[:8]
    path = PICTURES / f"{name}-{digest}.png"
    if not path.exists() and "--check" not in sys.argv:
        draw(path, tracks)
    folder = "../" * len(page.relative_to(DOCS).parent.parts)
    return f"![{shown}]({folder}pictures/{path.name})\n"


def draw(path: Path, tracks: dict[str, Any]) -> None:
    """With 64 colours: a third of the bytes."""
    from PIL import Image

    from seq1f1b.view.draw import timeline_png

    path.parent.mkdir(exist_ok=True)
    timeline_png(path, tracks, width=10.5)  # letters that can be read where a page shows them
    picture = io.BytesIO(path.read_bytes())
    Image.open(picture).convert("RGB").quantize(64).save(path, optimize=True)


def families(_page: Path) -> str:
    from seq1f1b.schedule import families

    return table(
        ("name", "order", "counts", "options", "source"),
        [
            (
                f"`{f.name}`",
                f.description,
                f.validity,
                ", ".join(f"`{o}`" for o in f.options),
                f.source,
            )
            for f in families()
        ],
    )


def option_row(action: argparse.Action) -> tuple[str, str]:
    """An argument of a command, and its help."""
    value = ""
    if action.option_strings and action.nargs != 0 and not action.choices:
        value = f" {action.metavar or action.dest.upper()}"
    text = (action.help or "") % {"prog": "seq1f1b", **vars(action)}
    if action.choices and not action.metavar:
        text = f"{text} ({', '.join(map(str, action.choices))})".strip()
    text = re.sub(r"(?<![`\w-])--[a-z][\w-]*", r"`\g<0>`", text)
    return f"`{', '.join(action.option_strings) or action.dest}{value}`", text


def commands(_page: Path) -> str:
    """Reads the parser, because the form of ``--help`` depends on the version of Python."""
    from seq1f1b.__main__ import make_parser

    parts = make_parser()._actions
    choices = next(a for a in parts if isinstance(a, argparse._SubParsersAction))
    says = {action.dest: action.help or "" for action in choices._choices_actions}
    taken: dict[tuple[str, str], list[str]] = {}  # an argument: the commands that take it
    for name, parser in choices.choices.items():
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                taken.setdefault(option_row(action), []).append(name)
    shared = {row: names for row, names in taken.items() if len(names) > 1}
    rows = [(f"[`{name}`](#{name})", says[name]) for name in choices.choices]
    text = table(("command", "does"), rows)
    for name, _ in choices.choices.items():
        own = [row for row, names in taken.items() if names == [name]]
        text += f"\n## {name}\n\n" + (
            table(("argument", "meaning"), own) if own else "It takes no arguments.\n"
        )
    for takers in dict.fromkeys(tuple(names) for names in shared.values()):
        rows = [row for row, names in shared.items() if tuple(names) == takers]
        text += f"\n## What {', '.join(takers)} take\n\n"
        text += table(("argument", "meaning"), rows)
    return text


def recipes(_page: Path, *wanted: str) -> str:
    """Runs each command as it stands there."""
    import json

    from seq1f1b.__main__ import main as command_line

    rows, commands = [], []
    for each in wanted:
        model, hardware, memory, tokens, ranks, microbatches, segments = each.split("/")
        command = (
            f"seq1f1b plan --model {model} --hardware {hardware} --memory {memory} "
            f"--seq {tokens} \\\n    --ranks {ranks} --microbatches {microbatches} "
            f"--segments {segments} --schedules seq1f1b --stages 1 \\\n    --inside none"
        )
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if command_line([*shlex.split(command.replace("\\\n", ""))[1:], "--json"]):
                raise ValueError(f"{command} finds nothing")
        plan = json.loads(printed.getvalue())["plans"][0]
        units = "".join(plan["units"]).replace(" ", "")
        rows.append(
            (
                model,
                f"{ranks} x {hardware}",
                f"{microbatches} x {int(tokens):,}",
                memory,
                str(plan["num_segments"]),
                f"{units.count('R') / len(units):.0%}" if units else "0%",
                plan["layout"]["vocabulary"],
                f"{plan['seconds']:.3g} ({plan['low']:.3g} to {plan['high']:.3g})",
                f"{plan['tokens_per_second']:,.0f}",
                f"{max(plan['peak']) / 2**30:.1f} ({max(plan['peak_high']) / 2**30:.1f})",
            )
        )
        commands.append(f"{command} --output plan.json")
    head = "model, ranks, M x tokens, cap, k, twice, vocab, seconds, tokens/s, GiB (worst)"
    return f"{table(tuple(head.split(', ')), rows)}\n{fence('bash', commands[0])}"


KINDS: dict[str, Callable[..., str]] = {
    "file": whole_file,
    "part": part,
    "changes": changes,
    "timeline": timeline,
    "documents": documents,
    "trees": trees,
    "families": families,
    "commands": commands,
    "recipes": recipes,
}


def filled(page: Path) -> str:
    """The page's text as it should be."""
    text = page.read_text(encoding="utf-8")

    def fill(place: re.Match[str]) -> str:
        kind, *arguments = shlex.split(place[1])
        try:
            made = KINDS[kind](page, *arguments)
        except (KeyError, ValueError, AttributeError, ImportError, OSError) as error:
            line = text.count("\n", 0, place.start()) + 1
            raise SystemExit(
                f"{page.relative_to(ROOT)}:{line}: fill: {place[1]}: {error!r}"
            ) from error
        return f"<!-- fill: {place[1]} -->\n{made}<!-- end -->"

    return PLACE.sub(fill, text)


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted(DOCS.rglob("*.md"))


def problems() -> Iterator[str]:
    """What `python docs/fill.py` would change, and what it could not."""
    shown: set[str] = set()
    for page in pages():
        text, wanted = page.read_text(encoding="utf-8"), filled(page)
        name = str(page.relative_to(ROOT))
        if text != wanted:
            changed = difflib.unified_diff(
                text.splitlines(), wanted.splitlines(), name, "as it should be", lineterm=""
            )
            yield "\n".join(changed)
        if (opened := text.count("<!-- fill: ")) != len(
            PLACE.findall(text)
        ) or opened != text.count("<!-- end -->"):
            yield f"{name}: a place to fill has no end, or an end no beginning"
        for picture in re.findall(r"\((?:\.\./)*pictures/([^)]*)\)", wanted):
            shown.add(picture)
            if not (PICTURES / picture).exists():
                yield f"{name}: there is no picture docs/pictures/{picture}"
    for picture in sorted({path.name for path in PICTURES.glob("*")} - shown):
        yield f"no page shows docs/pictures/{picture}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check", action="store_true", help="only say what is not as it should be"
    )
    if parser.parse_args().check:
        found = list(problems())
        print("\n".join(found) or "the pages are as they should be")
        raise SystemExit(1 if found else 0)
    texts = {page: filled(page) for page in pages()}
    for page, text in texts.items():
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    shown = set(re.findall(r"pictures/([^)]*)\)", "".join(texts.values())))
    for path in PICTURES.glob("*"):
        if path.name not in shown:
            path.unlink()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
