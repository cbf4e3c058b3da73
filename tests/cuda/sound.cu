/* The toy kernel as it is. */
#include "toy.inc.h"
S1F_CUDA_OPERATION(sound, kernels, scratch_bytes, launch, error_text);
