"""Builds seq1f1b._C: plain C11, limited API, no link to libtorch, CUDA or NCCL. Metadata lives in pyproject.toml.

Switches, by environment:
    SEQ1F1B_DEBUG=1       -O0 -g, assertions on
    SEQ1F1B_SANITIZE=1    AddressSanitizer and UndefinedBehaviorSanitizer (preload libasan to import it)
    SEQ1F1B_COVERAGE=1    gcov counters
    SEQ1F1B_WERROR=1      warnings are errors (CI)
"""

import os
import platform
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wpointer-arith", "-Wstrict-prototypes", "-Wmissing-prototypes",
            "-Wundef", "-Wvla", "-Wwrite-strings", "-Wformat=2"]  # fmt: skip
# -fexceptions: errors of libtorch unwind through our frames; without it the process is terminated.
FLAGS = ["-std=c11", "-fexceptions", "-fvisibility=hidden", *WARNINGS]
MACROS: list[tuple[str, str | None]] = [("_GNU_SOURCE", "1")]
LIBRARIES = ["m", "dl", "pthread"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# One source per micro-kernel, compiled for one instruction set by its file name; chosen at run time.
INSTRUCTION_SETS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
        "_avx512.c": AVX512,
        "_avx512bf16.c": [*AVX512, "-mavx512bf16"],
    },
    "aarch64": {"_neon.c": []},
}


def switch(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def compile_and_link_flags() -> tuple[list[str], list[str]]:
    compile_flags, link_flags = list(FLAGS), []
    if switch("SEQ1F1B_DEBUG"):
        compile_flags += ["-O0", "-g", "-UNDEBUG"]
    else:
        compile_flags += ["-O3", "-g1"]
    if switch("SEQ1F1B_SANITIZE"):
        compile_flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
        link_flags += ["-fsanitize=address,undefined"]
    if switch("SEQ1F1B_COVERAGE"):
        compile_flags += ["--coverage"]
        link_flags += ["--coverage"]
    if switch("SEQ1F1B_WERROR"):
        compile_flags += ["-Werror"]
    return compile_flags, link_flags


def instruction_set_flags(source: str) -> list[str]:
    sets = {suffix: flags for of_machine in INSTRUCTION_SETS.values() for suffix, flags in of_machine.items()}
    return next((flags for suffix, flags in sets.items() if source.endswith(suffix)), [])


class BuildExt(build_ext):
    """Adds the instruction-set flags of a file to its own compilation only."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def compile_with_isa(obj, src, ext, cc_args, extra_postargs, pp_opts):
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *instruction_set_flags(src)], pp_opts)

        self.compiler._compile = compile_with_isa
        super().build_extensions()


def sources(machine: str = platform.machine()) -> list[str]:
    files = sorted(glob("csrc/**/*.c", recursive=True) + glob("kernels/*.c"))
    foreign = [suffix for other, sets in INSTRUCTION_SETS.items() if other != machine for suffix in sets]
    return [name for name in files if not name.endswith(tuple(foreign))]


def main() -> None:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # no limited API there
    compile_flags, link_flags = compile_and_link_flags()
    extension = Extension(
        "seq1f1b._C",
        sources(),
        depends=glob("csrc/**/*.h", recursive=True) + glob("kernels/*.h"),
        define_macros=MACROS + ([] if free_threaded else [("Py_LIMITED_API", "0x030A0000")]),
        extra_compile_args=compile_flags,
        extra_link_args=link_flags,
        libraries=LIBRARIES,
        py_limited_api=not free_threaded,
    )
    wheel = {} if free_threaded else {"py_limited_api": "cp310"}
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildExt}, options={"bdist_wheel": wheel})


if __name__ == "__main__":  # tests/c/run.py imports this file for its flags and sources
    main()
