"""Fuzzes what reads texts, files, messages and arguments; or runs the stored corpus.

    python tests/fuzz/run.py [--inputs N] [--python-seconds N] [--jobs N] [--work FOLDER] [--out FILE] [target ...]
    python tests/fuzz/run.py --corpus [target ...]

The first form runs each target on N inputs that libFuzzer makes, under Address- and UndefinedBehaviorSanitizer, and
prints a table. It needs clang with its fuzzer (Debian: ``apt-get install clang libclang-rt-dev``) and, for what Python
reads, ``pip install atheris``. An input that fails stays in the work folder, and its target ends there. ``--corpus``
runs the inputs of ``corpus/`` under gcc's sanitizers, without clang: CI does that. libFuzzer's ``-merge=1`` chooses
inputs of the work folder for it.

A target in C is one file ``fuzz_<name>.c``; targets in Python stand in ``python_targets.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from seq1f1b.table import table_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORPUS = HERE / "corpus"
SHARED = ("tests/fuzz/order.c",)
NOT_CORE = ("csrc/binding/", "csrc/torch/", "kernels/")
PYTHON_TARGETS = ("profile", "plan", "machine", "report", "csv", "weight_index", "values", "arguments")
SANITIZERS = "address,undefined"
COMMON = ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-Itests/fuzz"]
LONGEST = 512  # bytes of an input in C
LONGEST_FILE = 8192  # of one in Python
LIMITS = ["-timeout=20", "-rss_limit_mb=3072", "-print_final_stats=1"]
STATS = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/(\S+)")
HEAD = ("target", "inputs", "seconds", "inputs/s", "edges", "of", "corpus", "findings")


def c_runner():
    """tests/c/run.py as a module: it knows how the core is compiled."""
    spec = importlib.util.spec_from_file_location("seq1f1b_c_tests", ROOT / "tests" / "c" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def c_targets() -> list[str]:
    return sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.c"))


def build(targets: list[str], work: Path, compiler: list[str], flags: list[str], link: list[str], own: tuple[str, ...]):
    """One program per target, each in C linked with the core. ``own``: further sources of each."""
    runner = c_runner()
    setup = runner.load_setup()
    core = [name for name in setup.sources() if not name.startswith(NOT_CORE)] + [*SHARED, *own]
    mains = {target: f"tests/fuzz/fuzz_{target}.c" for target in targets}
    objects = runner.compile_sources([*core, *mains.values()], compiler, [*COMMON, *flags], work)
    shared = [objects[name] for name in core]
    libraries = [f"-l{name}" for name in setup.LIBRARIES]

    def link_one(target: str) -> Path:
        program = work / f"fuzz_{target}"
        subprocess.run([*compiler, *link, objects[mains[target]], *shared, *libraries, "-o", program], check=True)
        return program

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(targets, pool.map(link_one, targets), strict=True))


# -- the stored corpus -------------------------------------------------------------------------------------------------


def run_corpus(targets: list[str]) -> int:
    """Every stored input, with a compiler that need not have a fuzzer. Returns how many targets failed."""
    compiler = os.environ.get("CC", "cc").split()
    sanitize = [f"-fsanitize={SANITIZERS}"]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="seq1f1b-fuzz-") as work:
        flags = ["-Werror", "-O0", *sanitize]
        programs = build(targets, Path(work), compiler, flags, sanitize, ("tests/fuzz/replay.c",))
        for target, program in programs.items():
            files = sorted((CORPUS / target).iterdir())
            done = subprocess.run(
                [program, *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            print(f"{target:14} {len(files)} inputs, {'ok' if done.returncode == 0 else 'failed'}", flush=True)
            if done.returncode != 0:
                print(done.stdout)
                failed += 1
    return failed


# -- fuzzing -----------------------------------------------------------------------------------------------------------


def command_of(target: str, programs: dict[str, Path]) -> tuple[list[str], dict[str, str]]:
    """What runs a target with libFuzzer's options behind it, and the environment."""
    if target in programs:
        dictionary = HERE / f"{target}.dict"
        options = [f"-max_len={LONGEST}", *([f"-dict={dictionary}"] if dictionary.exists() else [])]
        return [str(programs[target]), *options], dict(os.environ)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    options = [f"-max_len={LONGEST_FILE}", "-mutate_depth=1"]
    command = [sys.executable, str(HERE / "fuzz_python.py"), target, *options]
    return command, {**os.environ, "PYTHONPATH": path}


def fuzz(target: str, programs: dict[str, Path], work: Path, inputs: int, python_seconds: int) -> tuple[str, ...]:
    """A row of the table."""
    corpus = work / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    command, environment = command_of(target, programs)
    artifacts = work / f"{target}-"
    options = [f"-runs={inputs}", "-seed=1", f"-artifact_prefix={artifacts}", *LIMITS]
    if target not in programs:
        options.append(f"-max_total_time={python_seconds}")
    began = time.monotonic()
    with open(work / f"{target}.log", "w+", errors="replace") as log:
        code = subprocess.run(
            [*command, *options, str(corpus), str(CORPUS / target)], env=environment, stdout=log, stderr=log
        ).returncode
        seconds = time.monotonic() - began
        log.seek(0)
        text = log.read()
    ran = re.findall(r"stat::number_of_executed_units: (\d+)", text)
    counters = re.findall(r"\((\d+) inline 8-bit counters\)", text)
    cov, _, corp, _ = (STATS.findall(text) or [("?", "?", "?", "?")])[-1]
    number = int(ran[-1]) if ran else 0
    row = (
        target,
        f"{number}",
        f"{seconds:.0f}",
        f"{number / seconds:.0f}",
        cov,
        counters[0] if counters else "-",
        corp,
    )
    return (*row, "0" if code == 0 else f"1: see {artifacts.name}* and {target}.log")


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def clang() -> list[str]:
    found = shutil.which("clang")
    if found is None:
        sys.exit("there is no clang: apt-get install clang libclang-rt-dev")
    return [found]


def header_of(targets: list[str]) -> str:
    """The top of a result, with the versions of the fuzzers."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import header  # needs torch

    sys.argv[1:] = re.sub(r"--(work|out)[ =]\S+", "", " ".join(sys.argv[1:])).split()  # folders of this machine
    lines = [header("fuzzing: any input ends in a value or in a documented error")]
    if set(targets) & set(c_targets()):
        version = subprocess.run([*clang(), "--version"], capture_output=True, text=True, check=True).stdout
        lines.append(f"# {version.splitlines()[0]}, -fsanitize=fuzzer,{SANITIZERS}")
    if set(targets) & set(PYTHON_TARGETS):
        from importlib import metadata

        lines.append(f"# atheris {metadata.version('atheris')}: the package's Python is instrumented, its C is not")
    return "\n".join(lines)


def run_fuzzers(targets: list[str], work: Path, options: argparse.Namespace) -> int:
    (work / "build").mkdir(parents=True, exist_ok=True)
    in_c, flags = [target for target in targets if target not in PYTHON_TARGETS], ["-O2"]
    flags.append(f"-fsanitize=fuzzer-no-link,{SANITIZERS}")
    programs = build(in_c, work / "build", clang(), flags, [f"-fsanitize=fuzzer,{SANITIZERS}"], ()) if in_c else {}
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(
            pool.map(lambda target: fuzz(target, programs, work, options.inputs, options.python_seconds), targets)
        )
    text = table_text([HEAD, *rows])
    print(text, end="")
    if options.out is not None:
        options.out.write_text(f"{header_of(targets)}\n\n{text}")
    return sum(row[-1] != "0" for row in rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join([*c_targets(), *PYTHON_TARGETS]))
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target")
    parser.add_argument("--python-seconds", type=int, default=600, help="most seconds of each target in Python")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--work", type=Path, help="programs, logs, the growing corpus and inputs that fail")
    parser.add_argument("--out", type=Path, help="the table, with a header, as a file")
    parser.add_argument("--corpus", action="store_true", help="run the stored inputs of the targets in C")
    options = parser.parse_args(arguments)
    unknown = set(options.targets) - {*c_targets(), *PYTHON_TARGETS}
    if unknown:
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    os.chdir(ROOT)
    if options.corpus:
        return run_corpus([target for target in options.targets or c_targets() if target in c_targets()])
    targets = options.targets or [*c_targets(), *(PYTHON_TARGETS if has_atheris() else ())]
    if not options.targets and not has_atheris():
        print("what Python reads is left out: there is no atheris (pip install atheris)")
    work = (options.work or Path(tempfile.mkdtemp(prefix="seq1f1b-fuzz-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    print(f"work folder: {work}", flush=True)
    return 1 if run_fuzzers(targets, work, options) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
