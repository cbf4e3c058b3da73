/* Declares a tile of other rows than it multiplies. */
#define ROWS_DECLARED (2 * ROWS)
#include "../toy.inc.h"
S1F_CUDA_OPERATION(other_tile, kernels, scratch_bytes, launch, error_text);
