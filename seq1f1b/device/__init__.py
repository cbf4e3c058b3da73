"""GPUs: attention of CUDA tensors and its kernels, edges between GPUs, the tier in pinned host memory.

Begin with ``cuda_attention.py``, the choice of kernels for a call, and ``edges.py``, the choice of a way for messages.
Lower rooms load these modules by name (``seq1f1b/above.py``), and only on a machine with a GPU.
"""
