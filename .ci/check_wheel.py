"""Run by .ci/run in a bare environment that holds the wheel and nothing else: what works without torch, does it?"""

import base64
import ctypes
import re
import sys
from pathlib import Path

import seq1f1b

assert "torch" not in sys.modules
assert seq1f1b._C.__file__.endswith(".abi3.so"), seq1f1b._C.__file__
assert seq1f1b.partition_sequence(10, 3, strategy="even") == [4, 3, 3]
for name in seq1f1b._NEEDS_TORCH:
    try:
        getattr(seq1f1b, name)
    except ImportError as error:
        assert f"seq1f1b.{name} needs torch" in str(error) and 'pip install "torch' in str(error), error
    else:
        raise AssertionError(f"seq1f1b.{name} came without torch")
with_cuda = bool(int(sys.argv[1]))
library = Path(seq1f1b.__file__).with_name("libseq1f1b_cuda.so")
assert library.exists() == with_cuda, library
if with_cuda:  # opens without a GPU and without torch
    abi = ctypes.c_int32.in_dll(ctypes.CDLL(str(library)), "s1f_cuda_attention_forward")
    assert abi.value == 3, abi
page = Path(seq1f1b.__file__).with_name("view").joinpath("explorer.html").read_text(encoding="utf-8")
(core,) = re.findall(r'<script id="wasm" type="text/plain">(.*?)</script>', page)
assert base64.b64decode(core).startswith(b"\0asm") and '"seq1f1b"' in page
print(f"imports on Python {sys.version.split()[0]}")
