/* attention_launch.cuh - checks and helpers that the launchers of attention share. */
#ifndef S1F_CUDA_ATTENTION_LAUNCH_CUH
#define S1F_CUDA_ATTENTION_LAUNCH_CUH

#include "attention_options.cuh"
#include "kernel_table.h"

/* X(element, dtype, head_dim) of all that the kernels of attention take. */
#define S1F_ATTENTION_HEADS(X)                                                                                         \
    X(bf16, S1F_BFLOAT16, 64)                                                                                          \
    X(bf16, S1F_BFLOAT16, 128)                                                                                         \
    X(fp16, S1F_FLOAT16, 64)                                                                                           \
    X(fp16, S1F_FLOAT16, 128)

namespace s1f
{

inline int64_t round_up(int64_t x, int64_t multiple)
{
    return (x + multiple - 1) / multiple * multiple;
}

/* Tells whether each row begins at a multiple of 16 bytes, which `chunk_elements` make. */
inline bool fits_chunks(const void *address, const s1f_strides &strides, int chunk_elements = CHUNK_BYTES / 2)
{
    return (uintptr_t)address % CHUNK_BYTES == 0 && strides.batch % chunk_elements == 0 &&
           strides.head % chunk_elements == 0 && strides.row % chunk_elements == 0;
}

/* Checks the rules of attention_arguments.h, but for arguments that only backward has. */
inline bool is_supported(const s1f_cuda_attention &a)
{
    const int64_t limit = 1 << 30, grid_limit = 65535;
    return (a.dtype == S1F_BFLOAT16 || a.dtype == S1F_FLOAT16) && (a.head_dim == 64 || a.head_dim == 128) &&
           a.batch >= 1 && a.batch <= grid_limit && a.kv_heads >= 1 && a.kv_heads <= grid_limit && a.heads >= 1 &&
           a.heads % a.kv_heads == 0 && a.segment_len >= 1 && a.q_start >= 0 && a.q_start < limit &&
           a.segment_len < limit && a.q_start + a.segment_len < limit &&
           a.segment_len * (a.heads / a.kv_heads) < limit && a.scale > 0 && a.softcap >= 0 && a.window >= 0 &&
           fits_chunks(a.q, a.q_strides) && fits_chunks(a.k, a.kv_strides) && fits_chunks(a.v, a.kv_strides) &&
           fits_chunks(a.out, a.out_strides);
}

/* The cudaError of arguments for which there is no kernel; without a device what CUDA says of that. */
inline int error_of_no_kernel()
{
    const int limit = shared_memory_limit();
    return limit < 0 ? -limit : INVALID_VALUE;
}

} // namespace s1f

#endif
