"""Lists what each extra of seq1f1b brings, with its licence, as it is installed where this runs.

    python .ci/licences.py            # prints the page
    python .ci/licences.py --write    # writes docs/reference/dependencies.md; in an environment with all extras

Fails where a package is missing, names no licence or an unknown one, or asks for more than ALLOWED licences do.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "dependencies.md"
EXTRAS = ("", "plot", "train", "exact", "transformers", "torchtitan", "docs", "test")
# Licences that let anybody use, change and pass on. A new one is added by a person who has read it.
ALLOWED = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla|HPND|CMU|Unlicense|Zlib|0BSD)\b"
)
REFUSED = re.compile(r"GPL|GNU|Proprietary|NVIDIA|Commercial|NonCommercial|-NC-", re.IGNORECASE)
READ = {"docutils": "GPL is that of one file for Emacs, which nothing imports"}  # by a person, in spite of REFUSED
INTRODUCTION = """# Dependencies

What comes with `pip install seq1f1b`, and with each extra? `python .ci/licences.py --write` makes this table from the
packages' metadata, on Linux with Python {python} and torch for the CPU. Nothing of them is copied into this package or
its wheels. A build of torch for CUDA also brings NVIDIA's libraries (`nvidia-*`, `cuda-*`), under NVIDIA's own terms.

Neither import nor a training step uses the network; ranks talk with each other alone
([who can reach a pipeline](../how-to/several-machines.md#who-can-reach-a-pipeline)): tests hold that. Extras may use
it: transformers fetches a model or a tokenizer that is given by name.

"""


def licence_of(found: Distribution) -> str:
    metadata = found.metadata
    said = metadata.get("License-Expression") or ""
    if not said:
        classifiers = [x.split(" :: ")[-1] for x in metadata.get_all("Classifier") or [] if x.startswith("License ::")]
        said = ", ".join(one for one in classifiers if one != "OSI Approved") or metadata.get("License") or ""
    return said.strip().splitlines()[0] if said.strip() else ""


def brought_by(extra: str) -> dict[str, Distribution | None]:
    """All packages that an extra brings, those that its packages need included."""
    found: dict[str, Distribution | None] = {}
    waiting = [("seq1f1b", extra)]
    seen = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            here = distribution(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        if name != "seq1f1b":
            found[name] = here
        for text in here.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": wanted}):
                other = canonicalize_name(needed.name)
                waiting += [(other, "")] + [(other, more) for more in needed.extras]
    return found


def main() -> None:
    extras_of: dict[str, list[str]] = {}
    found: dict[str, Distribution | None] = {}
    for extra in EXTRAS:
        for name, here in brought_by(extra).items():
            found[name] = here
            if not (extra and "" in extras_of.get(name, ())):
                extras_of.setdefault(name, []).append(extra)
    problems = []
    packages: dict[tuple[bool, str], list[str]] = {}  # by whether an extra brings them, and by licence
    for name, here in sorted(found.items(), key=lambda item: (extras_of[item[0]] != [""], item[0])):
        if here is None:
            problems.append(f"{name} is not installed: comes with {extras_of[name]}")
            continue
        licence = licence_of(here)
        if name not in READ and (not ALLOWED.search(licence) or REFUSED.search(licence)):
            problems.append(f"{name} {here.version}: {licence or 'names no licence'}")
        extras = ", ".join(f"`{extra}`" for extra in extras_of[name] if extra)
        licence += f" ({READ[name]})" if name in READ else ""
        text = name + (f" ({extras})" if extras else "")
        packages.setdefault((bool(extras), licence), []).append(text)
    rows = [
        f"| {'extras' if of_extra else 'every installation'} | {licence} | {', '.join(names)} |"
        for (of_extra, licence), names in packages.items()
    ]
    head = "| comes with | licence | packages, with their extras |\n| --- | --- | --- |\n"
    page = INTRODUCTION.format(python=".".join(map(str, sys.version_info[:2]))) + head + "\n".join(rows) + "\n"
    print(page)
    if problems:
        sys.exit("\n".join(problems))
    if "--write" in sys.argv:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
