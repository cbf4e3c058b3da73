"""gpu.py without a GPU: torch's CUDA-only ops, our kernels, the driver, NCCL and the CUDA tools are stand-ins.

python benchmarks/gpu_rehearsal.py FOLDER       compiles the kernels for the CPU (tests/cuda) into FOLDER
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "emulated.so"
TOOL = '''#!{python}
"""Stands in for compute-sanitizer and ncu: refuses options that these do not have, and runs the command."""
import os, subprocess, sys
options = {{}}
arguments = sys.argv[1:]
flags = ["--csv"]
valued = ["--tool", "--error-exitcode", "--kernel-name", "--report-api-errors"]
if os.path.basename(sys.argv[0]) == "ncu":
    valued = ["--clock-control", "--kernel-name", "--page", "--metrics"]
while arguments and arguments[0].startswith("--"):
    option = arguments.pop(0)
    if option not in flags + valued:
        sys.exit(f"no option {{option}}")
    options[option] = "" if option in flags else arguments.pop(0)
code = subprocess.run(arguments, stdout=subprocess.DEVNULL).returncode
metrics = options.get("--metrics", "").split(",")
print(",".join(f'"{{name}}"' for name in ["Kernel Name", *metrics]))
print(",".join('"1"' for _ in ["s1f_stand_in", *metrics]))
sys.exit(code)
'''


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    import emulated_cuda

    folder = Path(sys.argv[1])
    for tool in ("compute-sanitizer", "ncu"):
        path = folder / "bin" / tool
        path.parent.mkdir(exist_ok=True)
        path.write_text(TOOL.format(python=sys.executable), encoding="utf-8")
        path.chmod(0o755)
    kernels = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels/cuda").glob("*.cu"))
    emulated_cuda.build(kernels, folder, flags=["-O1"])


@contextmanager
def rehearsing(folder: Path) -> Iterator[None]:
    """CPU tensors go the way of CUDA tensors meanwhile, and our kernels are the emulated ones of the folder."""
    from aten_stand_ins import cuda_kernels_on_the_cpu
    from emulated_cuda import emulated_kernels

    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced
        stack.enter_context(cuda_kernels_on_the_cpu())
        stack.enter_context(emulated_kernels(folder / LIBRARY))
        yield


if __name__ == "__main__":
    main()
