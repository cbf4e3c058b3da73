/* stand_in_library.c - a library of CUDA kernels without any: launches nothing, or fails as told.
 *
 * Built by tests/device/test_cuda_library.py, with VERSION and OPERATION. */
#include "../../kernels/cuda/attention_arguments.h"
#include "../../kernels/cuda/kernel_table.h"

enum { FAILING_WINDOW = 35, SCRATCH_BYTES = 48 };

static int64_t scratch_bytes(const void *arguments)
{
    return ((const s1f_cuda_attention *)arguments)->head_dim == 128 ? -S1F_CUDA_INVALID_VALUE : SCRATCH_BYTES;
}

static int32_t launch(const void *arguments, void *stream)
{
    (void)stream;
    return ((const s1f_cuda_attention *)arguments)->window == FAILING_WINDOW ? 35 : 0;
}

static const char *error_text(int32_t error)
{
    return error == 35 ? "no driver" : "bad value";
}

const s1f_cuda_operation OPERATION = {
    VERSION, "5a", "13.0.88", "sm_80 sm_90 compute_80", scratch_bytes, launch, error_text,
};
