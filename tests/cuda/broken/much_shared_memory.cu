/* Asks for more shared memory than the configuration has. */
#define SHARED_BYTES (S1F_CUDA_SHARED_99_KB + 1)
#include "../toy.inc.h"
S1F_CUDA_OPERATION(much_shared_memory, kernels, scratch_bytes, launch, error_text);
