/* Copies to shared memory 4 bytes at a time. */
#define COPY_BYTES 4
#include "../toy.inc.h"
S1F_CUDA_OPERATION(narrow_copies, kernels, scratch_bytes, launch, error_text);
