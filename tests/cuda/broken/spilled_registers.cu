/* Is held to fewer registers than it needs. */
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS, 16)
#include "../toy.inc.h"
S1F_CUDA_OPERATION(spilled_registers, kernels, scratch_bytes, launch, error_text);
