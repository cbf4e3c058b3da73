"""GPUs: attention of CUDA tensors, our kernels for it, placement of stages, edges between GPUs."""
