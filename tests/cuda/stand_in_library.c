/* stand_in_library.c - a library of CUDA kernels without any: launches nothing, or fails as told.
 *
 * Built by tests/device/test_cuda_library.py, with VERSION and OPERATION. */
#include "../../kernels/cuda/attention_arguments.h"
#include "../../kernels/cuda/kernel_table.h"

enum { FAILING_PARTS = 35, SCRATCH_BYTES = 48 };

static int64_t scratch_bytes(const void *arguments, int32_t kernel)
{
    (void)kernel;
    return ((const s1f_cuda_attention_args *)arguments)->attention.head_dim == 128 ? -S1F_CUDA_INVALID_VALUE
                                                                                   : SCRATCH_BYTES;
}

static int32_t launch(const void *arguments, int32_t kernel, void *stream)
{
    (void)kernel, (void)stream;
    return ((const s1f_cuda_attention_args *)arguments)->num_parts == FAILING_PARTS ? 35 : 0;
}

static const char *error_text(int32_t error)
{
    return error == 35 ? "no driver" : "bad value";
}

static const s1f_cuda_kernel kernels[] = {
    {"stand_in_64", S1F_BFLOAT16, 64, 128, 64, 4, 2, 2, 4096, S1F_CUDA_SHARED_99_KB},
    {"stand_in_128", S1F_FLOAT16, 128, 128, 64, 4, 2, 2, 8192, S1F_CUDA_SHARED_163_KB},
};

const s1f_cuda_operation OPERATION = {
    VERSION, 2, "5a", "13.0.88", "sm_80 sm_90 compute_80", kernels, scratch_bytes, launch, error_text,
};
