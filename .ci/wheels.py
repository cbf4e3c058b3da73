"""Builds what a release holds, and refuses what should not leave this machine. On Debian 12, x86-64.

    python .ci/wheels.py [--out dist] [--twice] [--cuda] [--machine x86_64] [--machine aarch64]

The sdist comes first, from the tracked files and the schedule explorer's page, which clang builds for WebAssembly
(Debian: clang lld wasi-libc libclang-rt-dev-wasm32). Each wheel is built from the sdist alone, offline, for every
CPython from 3.11:

    x86_64     with gcc
    aarch64    with gcc-aarch64-linux-gnu and libc6-dev-arm64-cross
    --cuda     x86-64 with the CUDA kernels, as version ...+cuda, with nvcc

A wheel's platform tag is the oldest glibc that its symbols ask for. Each wheel must hold no path of this machine, link
the C library alone, and fit its tag. --twice builds all in two folders and compares the bytes. The times in the files
are those of the last commit, or SOURCE_DATE_EPOCH. .ci/try_wheel.py tries a wheel.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
FIRST_GLIBC = {"x86_64": "2.5", "aarch64": "2.17"}  # of the manylinux tags
# Debug information goes, since it names files of this machine. libdl and libpthread are linked by name, because before
# glibc 2.34 their functions were not in libc.
LINK = "-Wl,--strip-debug -Wl,--no-as-needed -l:libdl.so.2 -l:libpthread.so.0"
EXPLORER = "seq1f1b/view/explorer.html"
CORE = re.compile(rb'<script id="wasm" type="text/plain">(.+?)</script>')  # of that page
LINKED = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux.*\.so\.\d+")
FILES = re.compile(r"seq1f1b/[\w./-]+\.(py|pyi|json|so|js|css|html|typed)|seq1f1b-[\w.+]+\.dist-info/[\w./]+")
# NVIDIA's linker notes where its toolkit lies, which is the same everywhere.
PATH = re.compile(rb"(?<![\w.:/-])/(?:home|root|tmp|build|opt|usr/(?:include|lib/gcc|local(?!/cuda-)|src))/[\w.+-]+")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))} failed in {cwd}")
    return done.stdout


def git(*arguments: str) -> str:
    return run("git", "-c", f"safe.directory={ROOT}", *arguments)


def write_archive(path: Path, folder: Path, epoch: int) -> None:
    """folder as a .tar.gz that depends on names and contents alone."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(file.relative_to(folder.parent)))
            entry.size, entry.mtime = file.stat().st_size, epoch
            entry.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(file.read_bytes()))
    path.write_bytes(gzip.compress(plain.getvalue(), compresslevel=9, mtime=0))


def build_explorer(source: Path, work: Path) -> None:
    """Writes the explorer's page into the package of these sources, where `seq1f1b explorer` finds it."""
    built = work / "for-explorer"  # the page's facts come from the package: unoptimized, since it runs once
    build = ("build", "--build-base", work / "objects", "--build-lib", built)
    run(sys.executable, "-W", "ignore", "setup.py", "-q", *build, cwd=source, SEQ1F1B_CUDA="0", SEQ1F1B_DEBUG="1")
    run(sys.executable, source / "docs" / "explorer" / "build.py", source / EXPLORER, PYTHONPATH=str(built))


def build_sdist(out: Path, work: Path, epoch: int) -> Path:
    source = work / "source"
    for name in git("ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
            (source / name).chmod((ROOT / name).stat().st_mode)
    build_explorer(source, work)
    run(sys.executable, "setup.py", "-q", "sdist", "-d", work / "sdist", cwd=source)
    (made,) = (work / "sdist").glob("*.tar.gz")
    (work / "unpacked").mkdir()
    run("tar", "-xzf", made, "-C", work / "unpacked")  # tarfile's filters came with Python 3.11.4
    (folder,) = (work / "unpacked").iterdir()
    (folder / "setup.cfg").unlink(missing_ok=True)  # made by sdist, of no use
    write_archive(out / made.name, folder, epoch)
    return out / made.name


def python_header(machine: str, folder: Path) -> Path:
    """A folder with pyconfig.h of this Python where Debian's Python looks for that of the machine, which it lacks: both
    are 64-bit, with types of equal sizes."""
    place = Path(f"{machine}-linux-gnu", f"python{sys.version_info.major}.{sys.version_info.minor}", "pyconfig.h")
    own = Path("/usr/include", str(sysconfig.get_config_var("MULTIARCH")), *place.parts[1:])
    (folder / place).parent.mkdir(parents=True)
    if own.exists():
        (folder / place).write_bytes(own.read_bytes())
    return folder


def build_wheel(sdist: Path, machine: str, out: Path, work: Path, epoch: int, cuda: bool = False) -> Path:
    run("tar", "-xzf", sdist, "-C", work)
    (source,) = work.iterdir()
    compiler = COMPILERS[machine]
    environment = {
        "SOURCE_DATE_EPOCH": str(epoch),
        "SEQ1F1B_CUDA": str(int(cuda)),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what sysconfig.get_platform() says
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",  # without the paths to libraries that a Python's own command may hold
        "CFLAGS": f"-include {ROOT / '.ci' / 'glibc_2_28.h'} -I{python_header(machine, work / 'headers')}",
        "LDFLAGS": LINK,
    }
    os.umask(0o022)
    run(sys.executable, "-W", "ignore", "setup.py", "-q", "build", cwd=source, **environment)
    for library in source.glob("build/lib*/**/libseq1f1b_cuda.so"):
        run("strip", "--strip-all", library)  # its symbols name temporary files of nvcc
    tag = platform_tag(machine, [path.read_bytes() for path in source.glob("build/lib*/**/*.so")])
    version = ["egg_info", "--tag-build=+cuda"] if cuda else []
    bdist = ["bdist_wheel", "--skip-build", "--plat-name", tag, "-d", str(out.resolve())]
    before = set(out.glob("*.whl"))
    run(sys.executable, "-W", "ignore", "setup.py", "-q", *version, *bdist, cwd=source, **environment)
    (wheel,) = set(out.glob("*.whl")) - before
    return wheel


def readelf(library: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(library)
        file.flush()
        return run("readelf", "-W", option, file.name)


def platform_tag(machine: str, libraries: list[bytes]) -> str:
    """manylinux_X_Y of the newest version of a glibc symbol among the libraries."""
    versions = {FIRST_GLIBC[machine]}
    for library in libraries:
        versions |= set(re.findall(r"Name: GLIBC_(2\.\d+)\b", readelf(library, "-V")))
    newest = max(versions, key=lambda version: int(version.partition(".")[2]))
    return f"manylinux_{newest.replace('.', '_')}_{machine}"


def breaches(wheel: Path, machine: str, places: list[Path]) -> list[str]:
    """What is wrong with a wheel, by its file."""
    found, libraries = [], []
    with zipfile.ZipFile(wheel) as archive:
        if EXPLORER not in archive.namelist():
            found.append(f"{EXPLORER} is not in it")
        for name in archive.namelist():
            data = archive.read(name)
            if name == EXPLORER:
                data += b"".join(map(base64.b64decode, CORE.findall(data)))
                found += [f"{name} holds {path.decode()}" for path in set(PATH.findall(data))]
            if not FILES.fullmatch(name):
                found.append(f"{name}: no file of ours")
            found += [f"{name} holds {place}" for place in places if str(place).encode() in data]
            if name.endswith(".so"):
                libraries.append(data)
                found += [f"{name} holds {path.decode()}" for path in set(PATH.findall(data))]
                dynamic = readelf(data, "-d")
                found += [
                    f"{name} links {x}" for x in re.findall(r"NEEDED.*\[(.*)\]", dynamic) if not LINKED.fullmatch(x)
                ]
                found += [f"{name} has a path to libraries: {x}" for x in re.findall(r"\(R(?:UN)?PATH\).*", dynamic)]
                elf = {"x86_64": "X86-64", "aarch64": "AArch64"}[machine]
                if elf not in readelf(data, "-h"):
                    found.append(f"{name} is not for {machine}")
    tag = platform_tag(machine, libraries)
    if not wheel.name.endswith(f"-cp311-abi3-{tag}.whl"):
        found.append(f"its symbols ask for {tag}")
    return [f"{wheel.name}: {what}" for what in found]


def build(machines: list[str], cuda: bool, out: Path, epoch: int) -> list[str]:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="seq1f1b-release-") as folder:
        work = Path(folder)
        sdist = build_sdist(out, work, epoch)
        wheels = {}
        for machine, with_cuda in [*((machine, False) for machine in machines), *([("x86_64", True)] if cuda else [])]:
            place = work / f"{machine}-{with_cuda}"
            place.mkdir()
            wheels[build_wheel(sdist, machine, out, place, epoch, with_cuda)] = machine
        places = [work, ROOT, Path.home() / ".pyenv", Path(sysconfig.get_path("include"))]
        for file in [sdist, *wheels]:
            print(
                f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}  {file.stat().st_size} bytes", flush=True
            )
        return [line for wheel, machine in wheels.items() for line in breaches(wheel, machine, places)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("dist"), help="folder for the files; old ones there are replaced"
    )
    parser.add_argument(
        "--machine", action="append", choices=list(COMPILERS), help="the wheels to build (default: all)"
    )
    parser.add_argument("--cuda", action="store_true", help="also a wheel with the CUDA kernels")
    parser.add_argument("--twice", action="store_true", help="build again in another folder, and compare the bytes")
    options = parser.parse_args()
    machines = options.machine or list(COMPILERS)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    for old in [*options.out.glob("seq1f1b-*.whl"), *options.out.glob("seq1f1b-*.tar.gz")]:
        old.unlink()
    found = build(machines, options.cuda, options.out, epoch)
    if options.twice:
        with tempfile.TemporaryDirectory(prefix="seq1f1b-another-folder-") as folder:
            found += build(machines, options.cuda, Path(folder), epoch)
            for file in sorted(options.out.glob("seq1f1b-*")):
                same = file.read_bytes() == (Path(folder) / file.name).read_bytes()
                print(f"{file.name}: {'equal bytes' if same else 'DIFFERS'}")
                found += [] if same else [f"{file.name} differs between two builds"]
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
