/* kernel_library.h - the shared object of CUDA kernels, libseq1f1b_cuda.so.
 *
 * It is opened at run time, for nothing here links CUDA. It loads on a machine without a GPU, where its tables can be
 * read and every launch fails with CUDA's own words. */
#ifndef S1F_KERNEL_LIBRARY_H
#define S1F_KERNEL_LIBRARY_H

#include "../../kernels/cuda/kernel_table.h"
#include "../core/status.h"

typedef struct s1f_cuda_library s1f_cuda_library;

/* Opens the object of that path. S1F_ERR_SYSTEM where the system cannot. */
s1f_status s1f_cuda_library_open(const char *path, s1f_cuda_library **out);
/* No launch may follow. The object itself stays in the process: its kernels may still run. NULL is fine. */
void s1f_cuda_library_free(s1f_cuda_library *library);

/* One of its operations, "attention_forward" for instance. Borrowed: lives as long as the process. S1F_ERR_ARG where
 * the object has none of that name, or was built for other headers than this file was. */
s1f_status s1f_cuda_library_find(const s1f_cuda_library *library, const char *name, const s1f_cuda_operation **out);

/* Bytes of scratch memory that a launch with these arguments needs, and the launch; see s1f_cuda_operation. With CUDA's
 * words S1F_ERR_ARG where no kernel is for such arguments, S1F_ERR_STATE where CUDA fails otherwise. */
s1f_status s1f_cuda_scratch(const s1f_cuda_operation *operation, const void *arguments, int32_t kernel, int64_t *bytes);
s1f_status s1f_cuda_launch(const s1f_cuda_operation *operation, const void *arguments, int32_t kernel, void *stream);

#endif
