"""Options of a script from a file: ``--config run.json`` holds {"steps": 200, "out": "runs/long", "even": true}."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def with_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> list[str]:
    """Adds --config to the parser. Returns the arguments to parse: the file's, then those of the command line."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="options as JSON; the command line wins over them")
    given = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    file = first.parse_known_args(given)[0].config
    if file is None:
        return given
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--config {file}: {error}")
    if not isinstance(options, dict):
        parser.error(f'--config {file} holds no object of options, as {{"steps": 200}}')
    known = {action.dest: action for action in parser._actions if action.option_strings}
    arguments: list[str] = []
    for name, value in options.items():
        action = known.get(name.replace("-", "_"))
        if action is None or action.dest in ("help", "config"):
            parser.error(f"--config {file}: {name} is no option; there are {', '.join(sorted(known))}")
        if action.nargs == 0:
            if not isinstance(value, bool):
                parser.error(f"--config {file}: {name} is {json.dumps(value)}, must be true or false")
            arguments += [action.option_strings[0]] if value else []
        elif value is not None:  # null: the default
            if not isinstance(value, (str, int, float)) or isinstance(value, bool):
                parser.error(f"--config {file}: {name} is {json.dumps(value)}, must be a number or a text")
            arguments.append(f"{action.option_strings[0]}={value}")
    return arguments + given
