"""Compiles and runs the C tests: under Address- and UndefinedBehaviorSanitizer, and under valgrind's leak check.

    python tests/c/run.py [sanitize | valgrind] ... [test_name ...]

Each ``test_*.c`` of this folder becomes one program, linked with the core: all of csrc/ and kernels/ but what needs
Python or torch. Flags and sources are those of setup.py. Without a mode, both run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NEEDS_PYTHON_OR_TORCH = ("csrc/binding/", "csrc/torch_abi.c", "csrc/ops.c")
WRAPPED = ("malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign")  # allocation.c
MODES = {
    "sanitize": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "valgrind": [],
}
VALGRIND = [
    "valgrind",
    "--quiet",
    "--leak-check=full",
    "--show-leak-kinds=definite,indirect,possible",
    "--error-exitcode=9",
]
TIMEOUT = 300  # seconds per program


def load_setup():
    """setup.py as a module, for its flags and list of sources."""
    spec = importlib.util.spec_from_file_location("seq1f1b_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_mode(mode: str, tests: list[Path], work: Path) -> list[str]:
    """Builds the core once and each test on it; returns the names of the tests that failed."""
    setup = load_setup()
    compiler = os.environ.get("CC", "cc").split()
    flags = [*setup.FLAGS, "-Werror", "-O1", "-g", "-UNDEBUG", *MODES[mode]]
    flags += [f"-D{name}={value}" for name, value in setup.MACROS]
    core = [name for name in setup.sources() if not name.startswith(NEEDS_PYTHON_OR_TORCH)]
    sources = [*core, "tests/c/allocation.c", *(str(test.relative_to(ROOT)) for test in tests)]

    def compile_one(source: str) -> Path:
        target = work / (source.replace("/", "_") + ".o")
        command = [
            *compiler,
            *flags,
            *setup.instruction_set_flags(source),
            "-Icsrc",
            "-Ikernels",
            "-c",
            source,
            "-o",
            target,
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip(sources, pool.map(compile_one, sources), strict=True))
    shared = [objects[name] for name in (*core, "tests/c/allocation.c")]
    link = [f"-Wl,--wrap={name}" for name in WRAPPED] + [f"-l{name}" for name in setup.LIBRARIES]

    failed = []
    for test in tests:
        program = work / test.stem
        test_object = objects[str(test.relative_to(ROOT))]
        subprocess.run([*compiler, *MODES[mode], test_object, *shared, *link, "-o", program], check=True)
        began = time.monotonic()
        command = [*(VALGRIND if mode == "valgrind" else []), program, mode]  # a long test runs a slice of itself
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT).returncode
        except subprocess.TimeoutExpired:
            code = -1
        verdict = "ok" if code == 0 else "timed out" if code == -1 else f"exit code {code}"
        print(f"{mode:9} {test.stem:28} {verdict}, {time.monotonic() - began:.1f} s", flush=True)
        if code != 0:
            failed.append(f"{mode} {test.stem}")
    return failed


def main(arguments: list[str]) -> int:
    modes = [word for word in arguments if word in MODES] or list(MODES)
    names = [word for word in arguments if word not in MODES]
    tests = [HERE / f"{name}.c" for name in names] or sorted(HERE.glob("test_*.c"))
    os.chdir(ROOT)
    failed = []
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix=f"seq1f1b-{mode}-") as work:
            failed += run_mode(mode, tests, Path(work))
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
