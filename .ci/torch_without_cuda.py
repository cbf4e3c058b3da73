"""Lets the CUDA build of torch in an environment run on the CPU without CUDA's libraries, gigabytes that it would load.

    python .ci/torch_without_cuda.py .../site-packages/torch/lib

A small library stands in for each that is missing. It has all functions that torch would call there, and each returns
100, CUDA's "no device". A CPU build is left as it is.
"""

import re
import subprocess
import sys
from pathlib import Path

NO_DEVICE = 100


def read(tool: str, *files: Path) -> str:
    return subprocess.run([*tool.split(), *files], check=True, capture_output=True, text=True).stdout


folder = Path(sys.argv[1])
libraries = list(folder.glob("*.so*"))
loaded = set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)\w*\.so[\d.]*)\]", read("readelf -d", *libraries)))
versions = dict(re.findall(r"File: (\S+) .*\n.*Name: (\S+)", read("readelf -V", *libraries)))
called = set(re.findall(r" U (_*(?:cu|nccl|nv)\w+)", read("nm -D --undefined-only", *libraries)))
source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(called))
for name in sorted(loaded - {file.name for file in libraries}):
    script = folder / f"{name}.versions"
    script.write_text(f"{versions.get(name, name)} {{ *; }};", encoding="utf-8")
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", f"-Wl,--version-script,{script}", "-o", folder / name]
    subprocess.run(["gcc", "-x", "c", "-", *options], input=source, text=True, check=True)
    print(f"{name} has no device")
