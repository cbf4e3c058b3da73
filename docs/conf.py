"""The site. From the repository's root: sphinx-build -W -n docs site"""

import os
import runpy
import sys
from pathlib import Path

import seq1f1b

project = "seq1f1b"
author = "the seq1f1b authors"
project_copyright = "the seq1f1b authors, Apache License 2.0"
version = release = seq1f1b.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["site"]


def build_explorer(app, error):
    """Writes the schedule explorer beside the pages; says so where no compiler can."""
    if error is not None or app.builder.format != "html":
        return
    explorer = runpy.run_path(str(Path(__file__).parent / "explorer/build.py"))
    page = Path(app.outdir, "explorer", "index.html")
    page.parent.mkdir(exist_ok=True)
    try:
        explorer["build"](page)
    except OSError as missing:
        text = f"the schedule explorer was not built with these pages: {missing}"
        page.write_text(
            f"<!doctype html>\n<meta charset=utf-8>\n<p>{text}\n", encoding="utf-8"
        )
        print(text, file=sys.stderr)


def setup(app):
    app.connect("build-finished", build_explorer)


myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings: "k, v: ..." names two arguments or attributes at once, which this form can hold.
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
# Types of others have no page here; the build must not need the network to look theirs up.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|nn|dist|os|np|numpy|collections|datetime|typing|argparse|pathlib)\b.*",
    )
]
nitpick_ignore = [
    ("py:class", name)
    for name in (
        "Path",
        "array",
        "Tensor",
        "Timeline",
        "Rule",
        "Offload",
        "Ragged",
        "Terms",
        "seq1f1b.seconds.Span",
        "seq1f1b.planning.tables.ByParts",
        "seq1f1b.testing.T",
        "seq1f1b.engine.batch.StepArguments",
        "seq1f1b.engine.step.StepRecord",
        "seq1f1b.partition.PieceCosts",
        "LayerKind",
        "tuple[LayerKind",
        "seq1f1b.partition.LayerKind",
        "PlannedRows",
        "seq1f1b.documents.rows.PlannedRows",
        "seq1f1b.adapters.chain.ChainStage",
        "types.EllipsisType",
        "tuple[int",  # of a signature that Sphinx cuts at its comma
    )
]

html_theme = "furo"
html_title = f"seq1f1b {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
# Sites of other versions, as "v1.0.0=v1.0.0/ main=../": a name, and its place from here.
html_context = {
    "versions": [pair.split("=") for pair in os.environ.get("SEQ1F1B_VERSIONS", "").split()]
}
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = (
    "$ "  # copies the commands of a console block and not what they print
)
copybutton_only_copy_prompt_lines = True
highlight_language = "text"
