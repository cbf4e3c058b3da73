/* Leaves a loop around the products, so that an iteration of it holds fewer than a pair of tiles has. */
#define ROLLED
#include "../toy.inc.h"
S1F_CUDA_OPERATION(rolled_products, kernels, scratch_bytes, launch, error_text);
