"""Tries a wheel in environments that hold it and nothing else, and have no compiler.

    python .ci/try_wheel.py WHEEL                # of this machine's kind: on every Python here, from 3.11 on
    python .ci/try_wheel.py --with-torch WHEEL   # and trains, with the torch of the environment that runs this
    python .ci/try_wheel.py WHEEL_FOR_AARCH64    # under qemu, with Debian's Python, and the tests of the core

What works without torch is checked by .ci/check_wheel.py. For aarch64, packages of Debian (libc6, python3 and what they
need, 9 MB) are unpacked into a folder, and nothing is installed. apt-get, dpkg-deb and qemu-aarch64-static are needed,
and pytest in the environment that runs this.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = (
    *("libc6", "libgcc-s1", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
    *("libexpat1", "zlib1g", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libuuid1"),
)
PURE = (
    "pytest",
    "_pytest",
    "py.py",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
)  # in plain Python, for any machine
CORE_TESTS = (
    *("core/test_schedule.py", "core/test_schedule_text.py", "core/test_fit.py", "core/test_orders_that_give_up.py"),
    "schedules/test_families.py",
)


def run(*command: str | Path, **named: object) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **named)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))} failed")
    return str(done.stdout)


def python_of(version: str) -> str | None:
    places = [
        f"python{version}",
        *map(str, sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))),
    ]
    for python in filter(shutil.which, places):
        said = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
        if said.stdout.decode().strip() == version:
            return python
    return None


def packages() -> list[Path]:
    """Folders of the packages of the environment that runs this."""
    return [Path(folder) for folder in sys.path if folder.endswith("site-packages")]


def environment(python: str, place: Path, wheel: Path, version: str = "") -> dict[str, str]:
    """Makes a virtual environment with the wheel alone. Returns the variables of a run there: PATH has no compiler.

    version: of that Python, where it may be another one than this; then there are no scripts.
    """
    install = ("-q", "install", "--no-deps", "--no-index")
    if version:  # by this pip, which knows what fits there: to bring a pip there takes longer than all else
        run(python, "-m", "venv", "--without-pip", place)
        site = place / "lib" / f"python{version}" / "site-packages"
        there = ("--target", site, "--python-version", version, "--only-binary", ":all:")
        run(sys.executable, "-m", "pip", *install, *there, wheel)
    else:
        run(python, "-m", "venv", place)
        run(place / "bin" / "python", "-m", "pip", *install, wheel)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "SEQ1F1B"))
    }
    return kept | {"PATH": str(place / "bin")}


def try_here(wheel: Path, work: Path, with_torch: bool) -> None:
    absent = []
    for version in PYTHONS:
        python = python_of(version)
        if python is None:
            absent.append(version)
            continue
        place = work / f"python{version}"
        variables = environment(python, place, wheel, version)
        cuda = str(int("+cuda" in wheel.name))
        print(run(place / "bin" / "python", ROOT / ".ci" / "check_wheel.py", cuda, cwd=work, env=variables), end="")
    print(f"Python versions not found: {', '.join(absent) or 'none'}")
    if with_torch:
        place = work / "with-torch"
        variables = environment(sys.executable, place, wheel)
        # Packages of the environment that runs this come after the wheel on the path, so its own seq1f1b is not found.
        inner = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (inner / "outer.pth").write_text("".join(f"{folder}\n" for folder in packages()), encoding="utf-8")
        python = place / "bin" / "python"
        where = run(python, "-c", "import seq1f1b; print(seq1f1b.__file__)", cwd=work, env=variables)
        assert where.startswith(str(place)), where
        assert shutil.which("gcc", path=variables["PATH"]) is shutil.which("cc", path=variables["PATH"]) is None
        explorer = run(place / "bin" / "seq1f1b", "explorer", cwd=work, env=variables)
        assert Path(explorer.strip()).is_relative_to(place), explorer
        print(run(place / "bin" / "seq1f1b", "doctor", cwd=work, env=variables), end="")
        shutil.copy(ROOT / "examples" / "use.py", work)
        began = time.monotonic()
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "use.py")
        print(run(python, *ranks, cwd=work, env=variables | {"OMP_NUM_THREADS": "1"}), end="")
        print(f"examples/use.py: {time.monotonic() - began:.0f} s without a compiler")


def debian_root(place: Path) -> Path:
    """A folder with Debian's Python for aarch64."""
    for folder in ("state/lists/partial", "cache/archives/partial", "debs", "root"):
        (place / folder).mkdir(parents=True)
    (place / "status").touch()
    settings = {
        "Dir::State": place / "state",
        "Dir::State::status": place / "status",
        "Dir::Cache": place / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    run(*apt, "update")
    run(*apt, "download", *PACKAGES, cwd=place / "debs")
    for package in (place / "debs").iterdir():
        run("dpkg-deb", "-x", package, place / "root")
    return place / "root"


def try_emulated(wheel: Path, work: Path) -> None:
    root, site = debian_root(work / "debian"), work / "site"
    tag = next(part for part in wheel.stem.split("-") if part.startswith("manylinux"))
    fits = ["--platform", tag, "--python-version", "3.11", "--only-binary", ":all:"]
    run(sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-index", "--target", site, *fits, wheel)
    pure = work / "pure"
    pure.mkdir()
    for name in PURE:
        found = next(folder / name for folder in packages() if (folder / name).exists())
        (pure / name).symlink_to(found)
    qemu = shutil.which("qemu-aarch64-static") or "qemu-aarch64-static"
    python = [qemu, "-L", str(root), str(root / "usr" / "bin" / "python3.11")]
    variables = {"PATH": "", "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    print(run(*python, ROOT / ".ci" / "check_wheel.py", "0", cwd=work, env=variables), end="")
    tests = work / "tests"
    shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("corpus", "__pycache__"))
    (work / "pytest.ini").write_text(
        "[pytest]\npythonpath = tests/support\nmarkers =\n    full\n    faults\n", encoding="utf-8"
    )
    variables["PYTHONPATH"] = f"{site}{os.pathsep}{pure}"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not full and not faults",
        "--rootdir",
        work,
        "-c",
        work / "pytest.ini",
    ]
    print(
        run(*python, "-m", "pytest", *options, *(tests / name for name in CORE_TESTS), cwd=work, env=variables), end=""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--with-torch", action="store_true", help="train with the torch that is installed here")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="seq1f1b-try-") as folder:
        if wheel.name.endswith("_aarch64.whl"):
            try_emulated(wheel, Path(folder))
        else:
            try_here(wheel, Path(folder), options.with_torch)


if __name__ == "__main__":
    main()
