"""Compiles and runs the C tests: under Address- and UndefinedBehaviorSanitizer, under valgrind's leak check, and for
aarch64, emulated.

    python tests/c/run.py [sanitize | valgrind | aarch64] ... [test_name ...]

Each ``test_*.c`` of this folder becomes one program, linked with the core (all of csrc/ and kernels/ but what needs
Python or torch) and with the stand-ins for the CUDA driver and NCCL (tests/stand_ins/). Flags and sources are those of
setup.py. Without a mode all run, the last one only where a cross compiler and qemu are installed (Debian:
gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Without sanitizers and with -O3: as the others are compiled it would take half the time of all C tests.
PLAIN_TRUTH = "tests/c/attention_sequence.c"
SHARED = ("tests/c/allocation.c", PLAIN_TRUTH, *sorted(glob("tests/stand_ins/*.c", root_dir=ROOT)))
NEEDS_PYTHON_OR_TORCH = ("csrc/binding/", "csrc/torch/")
WRAPPED = ("malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign")  # allocation.c
MODES = {
    # -O2 would compile for twice as long, and the tests would run no faster.
    "sanitize": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "valgrind": [],
    "aarch64": ["-static"],
}
AARCH64_TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")
# test_p2p counts the resident pages of shared memory, of which qemu keeps more; test_device_end binds the
# stand-ins as a library, which a static program cannot.
NOT_EMULATED = ("test_p2p", "test_device_end")
RUNNERS = {
    "valgrind": [
        "valgrind",
        "--quiet",
        "--leak-check=full",
        "--show-leak-kinds=definite,indirect,possible",
        "--error-exitcode=9",
        "--fair-sched=try",  # threads that spin would keep the one that they wait for from its turn
    ],
    "aarch64": ["qemu-aarch64-static"],
}
# The rest of what is sliced under sanitizers runs without, in the program that is built for valgrind.
ALSO_PLAIN = ("test_attention",)
TIMEOUT = 300  # seconds per program


def load_setup():
    """setup.py as a module, for its flags and list of sources."""
    spec = importlib.util.spec_from_file_location("seq1f1b_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_sources(
    sources: list[str], compiler: list[str], flags: list[str], work: Path, plain: tuple[str, ...] = ()
) -> dict[str, Path]:
    """Compiles them side by side. Returns the objects by source.

    Args:
        flags: of the compiler, beside those of setup.py. plain: flags that PLAIN_TRUTH is compiled without.
    """
    setup = load_setup()
    common = [*setup.FLAGS, "-g", *setup.DEBUG, *flags]
    common += [f"-D{name}={value}" for name, value in setup.MACROS]

    def compile_one(source: str) -> Path:
        target = work / (source.replace("/", "_") + ".o")
        command = [
            *compiler,
            *(flag for flag in common if source != PLAIN_TRUTH or flag not in plain),
            *(["-O3"] if source == PLAIN_TRUTH else []),
            *setup.instruction_set_flags(source),
            "-Icsrc",
            "-Ikernels",
            "-Itests/stand_ins",
            "-c",
            source,
            "-o",
            target,
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(sources, pool.map(compile_one, sources), strict=True))


def run_mode(mode: str, tests: list[Path], work: Path) -> list[str]:
    """Builds the core once and each test on it; returns the names of the tests that failed."""
    setup = load_setup()
    emulated = mode == "aarch64"
    compiler = [AARCH64_TOOLS[0]] if emulated else os.environ.get("CC", "cc").split()
    files = setup.sources("aarch64" if emulated else platform.machine())
    core = [name for name in files if not name.startswith(NEEDS_PYTHON_OR_TORCH)]
    core += SHARED
    sources = [*core, *(str(test.relative_to(ROOT)) for test in tests)]
    flags = ["-Werror", "-O2", *MODES[mode]]
    objects = compile_sources(sources, compiler, flags, work, tuple(MODES["sanitize"]))
    shared = [objects[name] for name in core]
    link = [f"-Wl,--wrap={name}" for name in WRAPPED] + [f"-l{name}" for name in setup.LIBRARIES]
    link += [] if emulated else ["-rdynamic"]  # so that the loaders of csrc/device find the stand-ins

    failed = []
    for test in tests:
        program = work / test.stem
        test_object = objects[str(test.relative_to(ROOT))]
        subprocess.run([*compiler, *MODES[mode], test_object, *shared, *link, "-o", program], check=True)
        for how in (mode, "plain") if mode == "valgrind" and test.stem in ALSO_PLAIN else (mode,):
            if not passes(how, program):
                failed.append(f"{how} {test.stem}")
    return failed


def passes(mode: str, program: Path) -> bool:
    began = time.monotonic()
    command = [*RUNNERS.get(mode, []), program, mode]  # a long test runs a slice of itself
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=TIMEOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = -1, (error.stdout or b"").decode(errors="replace")
    verdict = "ok" if code == 0 else "timed out" if code == -1 else f"exit code {code}"
    print(f"{output}{mode:9} {program.stem:28} {verdict}, {time.monotonic() - began:.1f} s", flush=True)
    return code == 0


def main(arguments: list[str]) -> int:
    modes = [word for word in arguments if word in MODES]
    if not modes:
        modes = list(MODES)
        missing = [tool for tool in AARCH64_TOOLS if shutil.which(tool) is None]
        if missing:
            modes.remove("aarch64")
            print(f"aarch64   not run: there is no {' and no '.join(missing)}")
    names = [word for word in arguments if word not in MODES]
    tests = [HERE / f"{name}.c" for name in names] or sorted(HERE.glob("test_*.c"))
    os.chdir(ROOT)

    def run(mode: str) -> list[str]:
        with tempfile.TemporaryDirectory(prefix=f"seq1f1b-{mode}-") as work:
            mine = [test for test in tests if mode != "aarch64" or test.stem not in NOT_EMULATED]
            return run_mode(mode, mine, Path(work))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = [name for names in pool.map(run, modes) for name in names]
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
