"""GPUs: CUDA kernels of attention, devices of a stage, edges between GPUs."""
