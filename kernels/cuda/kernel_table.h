/* kernel_table.h - what the shared object of CUDA kernels tells of itself. Plain C, read without a GPU.
 *
 * Each .cu of this folder is one operation: its kernels and one launcher. A name that begins with smNN_ says for which
 * architecture a file is written; newer ones run it too. A .cu exports one s1f_cuda_operation under the name
 * s1f_cuda_<name of the file, without its architecture>, by which the caller finds the launcher. */
#ifndef S1F_CUDA_KERNEL_TABLE_H
#define S1F_CUDA_KERNEL_TABLE_H

#include <stdint.h>

#define S1F_CUDA_ABI 3 /* of the structs of this folder's headers; the loader refuses an object of another */

#define S1F_CUDA_INVALID_VALUE 1 /* the cudaError_t of arguments that no kernel takes */

typedef struct {
    int32_t abi;
    const char *compiler;      /* "13.0.88" */
    const char *architectures; /* "sm_80 sm_90 compute_80" */
    /* Bytes of device memory that the launch needs of its caller, 16-byte aligned; minus the cudaError_t where it would
     * fail. Follows no pointer. */
    int64_t (*scratch_bytes)(const void *arguments);
    /* Launches on `stream` (a CUstream) of the current device and returns: no allocation, no wait. 0, or the
     * cudaError_t. */
    int32_t (*launch)(const void *arguments, void *stream);
    const char *(*error_text)(int32_t error);
} s1f_cuda_operation;

#ifdef __cplusplus /* a .cu ends with S1F_CUDA_OPERATION; setup.py defines the texts */
#ifndef S1F_CUDA_COMPILER
#define S1F_CUDA_COMPILER "" /* not compiled by nvcc: the emulation of the tests */
#define S1F_CUDA_ARCHITECTURES ""
#endif
#define S1F_CUDA_OPERATION(operation, scratch_bytes, launch, error_text)                                               \
    extern "C" __attribute__((visibility("default"))) const s1f_cuda_operation s1f_cuda_##operation;                   \
    const s1f_cuda_operation s1f_cuda_##operation = {                                                                  \
        S1F_CUDA_ABI, S1F_CUDA_COMPILER, S1F_CUDA_ARCHITECTURES, scratch_bytes, launch, error_text}
#endif

#endif
