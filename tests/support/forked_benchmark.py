"""Runs a benchmark whose own processes are forked from this one, which has imported torch: SCRIPT ARGUMENTS..."""

import runpy
import sys
from functools import partial
from pathlib import Path

import torch.multiprocessing as mp

mp.spawn = partial(mp.start_processes, start_method="fork")
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
