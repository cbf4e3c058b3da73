"""What the site makes when it is built: timelines, changes of scripts, schedule families."""

import difflib
import hashlib
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import seq1f1b
from seq1f1b.schedule import families
from seq1f1b.view.draw import timeline_svg


class Timeline(SphinxDirective):
    """``{timeline} 1f1b seq1f1b/2``: a step of each family over so many segments, one axis.

    A rank takes 1 s for the forward of a micro-batch and 2 s for its backward. The content is
    the caption.
    """

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "ranks": int,
        "microbatches": int,
        "transfer": float,
        "alt": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        counts = {
            "num_ranks": self.options.get("ranks", 4),
            "num_microbatches": self.options.get("microbatches", 4),
        }
        stages = {family.name: family.stages_per_rank for family in families()}
        tracks = {}
        for item in self.arguments[0].split():
            name, _, segments = item.partition("/")
            k, v = int(segments or 1), stages[name]
            order = seq1f1b.build_schedule(name, **counts, num_segments=k, stages_per_rank=v)
            run = order.simulate(
                1 / (k * v), 2 / (k * v), transfer=self.options.get("transfer", 0.0)
            )
            tracks[name + (f", {k} segments" if k > 1 else "")] = run.timeline
        what = f"{self.arguments[0]} {self.options}"
        file = f"_pictures/{hashlib.sha256(what.encode()).hexdigest()[:12]}.svg"
        Path(self.env.srcdir, "_pictures").mkdir(exist_ok=True)
        timeline_svg(Path(self.env.srcdir, file), tracks)
        picture = nodes.image(
            uri=f"/{file}",
            alt=self.options.get("alt", f"Timeline of {', '.join(tracks)}"),
            width="100%",
        )
        caption = nodes.caption("", "", *self.parse_inline(" ".join(self.content))[0])
        return [nodes.figure("", picture, caption, classes=["timeline"])]


class Changes(SphinxDirective):
    """``{changes} tutorial/single.py tutorial/segments.py``: from one script to the next."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        files = [Path(self.env.srcdir, name) for name in self.arguments]
        for file in files:
            self.env.note_dependency(str(file))
        old, new = (file.read_text().splitlines(keepends=True) for file in files)
        text = "".join(difflib.unified_diff(old, new, files[0].name, files[1].name, n=2))
        return [nodes.literal_block(text, text, language="diff")]


class Families(SphinxDirective):
    """What ``seq1f1b.schedule.families()`` tells, as a list of definitions."""

    def run(self) -> list[nodes.Node]:
        rows = nodes.definition_list()
        for family in families():
            facts = [f"{family.description}; for {family.validity}."]
            if family.options:
                facts.append(f"Options: {', '.join(family.options)}.")
            facts.append(f"Source: {family.source}.")
            rows += nodes.definition_list_item(
                "",
                nodes.term("", "", nodes.literal("", family.name)),
                nodes.definition("", nodes.paragraph("", " ".join(facts))),
            )
        return [rows]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("timeline", Timeline)
    app.add_directive("changes", Changes)
    app.add_directive("families", Families)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
