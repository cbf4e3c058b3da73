"""Builds seq1f1b._C: plain C11, limited API, no link to libtorch, CUDA or NCCL. Metadata lives in pyproject.toml.

Where nvcc is found, also seq1f1b/libseq1f1b_cuda.so: the CUDA kernels with the CUDA runtime inside, which _C opens when
it is to launch one. If they do not compile, the rest is installed without them.

Switches, by environment:
    SEQ1F1B_DEBUG=1       -O0 -g, assertions on, places of messages filled with NaN once they are free
    SEQ1F1B_SANITIZE=1    AddressSanitizer and UndefinedBehaviorSanitizer (preload libasan to import it)
    SEQ1F1B_COVERAGE=1    gcov counters
    SEQ1F1B_WERROR=1      warnings are errors (CI)
    SEQ1F1B_CUDA=0        no CUDA kernels, even where nvcc is found; 1: an error where they cannot be built
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wpointer-arith", "-Wstrict-prototypes", "-Wmissing-prototypes",
            "-Wundef", "-Wvla", "-Wwrite-strings", "-Wformat=2"]  # fmt: skip
# -fexceptions: errors of libtorch unwind through our frames; without it the process is terminated.
FLAGS = ["-std=c11", "-fexceptions", "-fvisibility=hidden", *WARNINGS]
MACROS: list[tuple[str, str | None]] = [("_GNU_SOURCE", "1")]
DEBUG = ["-UNDEBUG", "-DS1F_POISON"]  # assertions; memory that a reader has given back is filled with NaN
LIBRARIES = ["m", "dl", "pthread"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# One source per micro-kernel, compiled for one machine and instruction set by its file name; chosen at run time.
INSTRUCTION_SETS: dict[str, tuple[str, list[str]]] = {
    "_avx2.c": ("x86_64", ["-mavx2", "-mfma", "-mf16c"]),
    "_avx512.c": ("x86_64", AVX512),
    "_avx512bf16.c": ("x86_64", [*AVX512, "-mavx512bf16"]),
    "_neon.c": ("aarch64", []),
}

ROOT = Path(__file__).resolve().parent
CUDA_LIBRARY = "libseq1f1b_cuda"
# Code for these, and PTX of the oldest GPU with bf16 tensor cores, from which the driver makes the code of any other.
CUDA_ARCHITECTURES = ["sm_80", "sm_90", "compute_80"]
CODE_FLAGS = [f"-gencode=arch={name.replace('sm_', 'compute_')},code={name}" for name in CUDA_ARCHITECTURES]
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xptxas", "-v,-warn-spills,-warn-lmem-usage"]
# For the host's side: without exceptions and guarded statics it needs no C++ library.
NVCC_HOST_FLAGS = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"]
NVCC_LINK_FLAGS = ["-shared", "-cudart", "static", "-Xlinker", "--as-needed,--exclude-libs,ALL,--no-undefined"]


def switch(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def compile_and_link_flags() -> tuple[list[str], list[str]]:
    compile_flags, both = list(FLAGS), []
    if switch("SEQ1F1B_DEBUG"):
        compile_flags += ["-O0", "-g", *DEBUG]
    else:
        compile_flags += ["-O1" if switch("SEQ1F1B_SANITIZE") else "-O3", "-g1"]
    if switch("SEQ1F1B_SANITIZE"):
        compile_flags += ["-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
        both += ["-fsanitize=address,undefined"]
    if switch("SEQ1F1B_COVERAGE"):
        both += ["--coverage"]
    if switch("SEQ1F1B_WERROR"):
        compile_flags += ["-Werror"]
    return compile_flags + both, both


def instruction_set_flags(source: str) -> list[str]:
    return next((flags for suffix, (_, flags) in INSTRUCTION_SETS.items() if source.endswith(suffix)), [])


# -- CUDA kernels ----------------------------------------------------------------------------------------------------


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = [shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes]
    return next(filter(None, [*found, shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]), None)


def cuda_sources() -> list[str]:
    return sorted(glob("kernels/cuda/*.cu", root_dir=ROOT))


def build_cuda_library(sources: list[str], library: Path, work: Path, werror: bool = True) -> dict[str, str]:
    """Compiles them side by side and links; returns what the compiler said of each."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompileError("SEQ1F1B_CUDA=1, but there is no nvcc: not in CUDA_HOME, PATH or /usr/local/cuda")
    work.mkdir(parents=True, exist_ok=True)

    def run(*command: str) -> str:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise CompileError(f"{' '.join(command)}\n{done.stdout}")
        return done.stdout

    version = re.findall(r"V(\d+\.\d+\.\d+)", run(nvcc, "--version"))[0]
    texts = {"COMPILER": version, "ARCHITECTURES": " ".join(CUDA_ARCHITECTURES)}
    flags = [*NVCC_FLAGS, *NVCC_HOST_FLAGS, "--threads", str(len(CUDA_ARCHITECTURES)), *CODE_FLAGS]
    flags += [f'-DS1F_CUDA_{name}="{text}"' for name, text in texts.items()]
    if werror:
        flags += ["-Werror", "all-warnings", "-Xptxas", "-Werror"]
    objects = {source: str(work / f"{Path(source).stem}.cu.o") for source in sources}

    def compile_one(source: str) -> str:
        seed = f"-frandom-seed={Path(source).stem}"  # for names of symbols, so that two builds are alike
        return run(nvcc, *flags, seed, "-c", str(ROOT / source), "-o", objects[source])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = dict(zip(sources, pool.map(compile_one, sources), strict=True))
    library.parent.mkdir(parents=True, exist_ok=True)
    run(nvcc, *NVCC_LINK_FLAGS, *CODE_FLAGS, *objects.values(), "-o", str(library))
    return said


class CudaKernels(Extension):
    """The shared object of the CUDA kernels: no module of Python's, but built, installed and packed where those are."""

    def __init__(self) -> None:
        required = os.environ.get("SEQ1F1B_CUDA") == "1"
        depends = [*cuda_sources(), *glob("kernels/**/*.*h", recursive=True), *glob("csrc/core/*.h")]
        super().__init__(f"seq1f1b.{CUDA_LIBRARY}", cuda_sources(), depends=depends, optional=not required)


def wants_cuda() -> bool:
    wish = os.environ.get("SEQ1F1B_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"SEQ1F1B_CUDA is {wish!r}, must be 0 or 1")
    return bool(cuda_sources()) and (wish == "1" or (wish == "" and find_nvcc() is not None))


# --------------------------------------------------------------------------------------------------------------------


class BuildExt(build_ext):
    """Adds the instruction-set flags of a file to its own compilation only, and has nvcc compile the CUDA kernels."""

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        return os.path.join(*package, f"{name}.so") if name == CUDA_LIBRARY else super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        if not isinstance(ext, CudaKernels):
            return super().build_extension(ext)
        library = Path(self.get_ext_fullpath(ext.name))
        needed = max(os.path.getmtime(path) for path in (__file__, *ext.depends))
        if self.force or not library.exists() or library.stat().st_mtime < needed:
            library.unlink(missing_ok=True)  # one of other sources would be worse than none
            werror = switch("SEQ1F1B_WERROR")
            said = build_cuda_library(ext.sources, library, Path(self.build_temp), werror=werror)
            if self.verbose:
                print("".join(said.values()), file=sys.stderr)

    def build_extensions(self) -> None:
        command = getattr(self.compiler, "compiler_so", ["cc"])[0]
        if shutil.which(command) is None:
            raise CompileError(
                f"seq1f1b is built from C, and there is no compiler {command!r}: install one (Debian, Ubuntu: apt-get "
                "install gcc libc6-dev), name another in the environment (CC=clang), or install a wheel"
            )
        compile_one = self.compiler._compile

        def compile_with_isa(obj, src, ext, cc_args, extra_postargs, pp_opts):
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *instruction_set_flags(src)], pp_opts)

        self.compiler._compile = compile_with_isa
        super().build_extensions()


def sources(machine: str = sysconfig.get_platform().rpartition("-")[2]) -> list[str]:
    files = sorted(glob("csrc/**/*.c", recursive=True) + glob("kernels/*.c"))
    foreign = [suffix for suffix, (other, _) in INSTRUCTION_SETS.items() if other != machine]
    return [name for name in files if not name.endswith(tuple(foreign))]


def main() -> None:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # no limited API there
    compile_flags, link_flags = compile_and_link_flags()
    extension = Extension(
        "seq1f1b._C",
        sources(),
        depends=glob("csrc/**/*.h", recursive=True) + glob("kernels/**/*.h", recursive=True),
        define_macros=MACROS + ([] if free_threaded else [("Py_LIMITED_API", "0x030B0000")]),
        extra_compile_args=compile_flags,
        extra_link_args=link_flags,
        libraries=LIBRARIES,
        py_limited_api=not free_threaded,
    )
    extensions = [extension, *([CudaKernels()] if wants_cuda() else [])]
    wheel = {} if free_threaded else {"py_limited_api": "cp311"}
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildExt}, options={"bdist_wheel": wheel})


if __name__ == "__main__":  # tests/c/run.py imports this file for its flags and sources
    main()
