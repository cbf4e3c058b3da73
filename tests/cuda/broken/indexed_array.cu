/* Indexes an array by a number that the compiler does not know, so that the array lies in local memory. */
#define BEFORE_THE_LOOP sums[0][0] = __uint_as_float(q[arguments.index % (DEPTH / 16)][arguments.index / 4 % 4]);
#include "../toy.inc.h"
S1F_CUDA_OPERATION(indexed_array, kernels, scratch_bytes, launch, error_text);
