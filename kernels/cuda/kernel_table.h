/* kernel_table.h - what the shared object of CUDA kernels tells of itself. Plain C, read without a GPU.
 *
 * Each .cu of this folder is one operation: kernels of it in several shapes, and one launcher. A name that begins with
 * smNN_ says for which architecture a file is written; newer ones run it too. A .cu exports one s1f_cuda_operation
 * under the name s1f_cuda_<name of the file, without its architecture>, by which the caller finds the launcher, the
 * table of verified kernels finds what was compiled, and tests/cuda/sass.py finds what has matrix products. */
#ifndef S1F_CUDA_KERNEL_TABLE_H
#define S1F_CUDA_KERNEL_TABLE_H

#include <stdint.h>

#define S1F_CUDA_ABI 1 /* of the structs of this folder's headers; the loader refuses an object of another */

/* Shared memory that a block may have: on sm_86, sm_89 and sm_120, the smallest, and on sm_80; sm_90 has more. */
#define S1F_CUDA_SHARED_99_KB (99 * 1024)
#define S1F_CUDA_SHARED_163_KB (163 * 1024)

#define S1F_CUDA_INVALID_VALUE 1 /* the cudaError_t of arguments that no kernel takes */

typedef struct {
    const char *name;                   /* of the __global__ function, extern "C": what a disassembly calls it */
    int32_t dtype, head_dim;            /* as in dtype.h */
    int32_t query_rows, key_rows;       /* tile of one block */
    int32_t warps, stages;              /* of it; stages: tiles of shared memory that copies run ahead */
    int32_t products;                   /* matrix products of a pair of tiles: 2 forward, 5 backward; 0: none */
    int32_t shared_bytes, shared_limit; /* dynamic, as launched; what the block may have in all */
} s1f_cuda_kernel;

typedef struct {
    int32_t abi, num_kernels;
    const char *source;        /* sha256 of the code of the .cu and of what it includes, and of the compiler's flags */
    const char *compiler;      /* "13.0.88" */
    const char *architectures; /* "sm_80 sm_90 compute_80" */
    const s1f_cuda_kernel *kernels;
    /* Bytes of device memory that the launch needs of its caller, 16-byte aligned; minus the cudaError_t where it would
     * fail. Follows no pointer. */
    int64_t (*scratch_bytes)(const void *arguments, int32_t kernel);
    /* Launches on `stream` (a CUstream) of the current device and returns: no allocation, no wait. `kernel` is an index
     * of kernels, -1: the best known for the arguments. 0, or the cudaError_t. */
    int32_t (*launch)(const void *arguments, int32_t kernel, void *stream);
    const char *(*error_text)(int32_t error);
} s1f_cuda_operation;

#ifdef __cplusplus /* a .cu ends with S1F_CUDA_OPERATION; setup.py defines the texts */
#ifndef S1F_CUDA_SOURCE
#define S1F_CUDA_SOURCE "" /* not compiled by nvcc: the emulation of the tests */
#define S1F_CUDA_COMPILER ""
#define S1F_CUDA_ARCHITECTURES ""
#endif
#define S1F_CUDA_OPERATION(operation, kernels, scratch_bytes, launch, error_text)                                      \
    extern "C" __attribute__((visibility("default"))) const s1f_cuda_operation s1f_cuda_##operation;                   \
    const s1f_cuda_operation s1f_cuda_##operation = {S1F_CUDA_ABI,                                                     \
                                                     (int32_t)(sizeof(kernels) / sizeof((kernels)[0])),                \
                                                     S1F_CUDA_SOURCE,                                                  \
                                                     S1F_CUDA_COMPILER,                                                \
                                                     S1F_CUDA_ARCHITECTURES,                                           \
                                                     kernels,                                                          \
                                                     scratch_bytes,                                                    \
                                                     launch,                                                           \
                                                     error_text}
#endif

#endif
