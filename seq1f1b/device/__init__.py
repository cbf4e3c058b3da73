"""GPUs: attention of CUDA tensors, our kernels for it, edges between GPUs, the tier in pinned host memory.

Begin with ``cuda_attention.py``, which chooses what runs a call, and ``edges.py``, which finds what carries messages.
Lower rooms ask for these by name (``seq1f1b/above.py``); nothing here is loaded on a machine without a GPU.
"""
