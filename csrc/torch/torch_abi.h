/* torch_abi.h - the calls that we make of libtorch's C ABI, found at run time.
 *
 * libtorch's own shim headers are C++ and would need torch to build; these are our prototypes of the functions we use,
 * one line each, from which the table below is made. tests/attention/torch_abi_headers.cpp compares every line with the
 * installed headers, so that drift is a compile error. All of them exist since torch 2.10, which is the floor.
 *
 * Ownership, as in libtorch: a handle that comes through an out-parameter is a new reference, given back by
 * aoti_torch_delete_tensor_object; sizes, strides and data pointers are borrowed from the tensor. A boxed kernel owns
 * its arguments. Every call but the codes returns 0, or not 0 on failure; aoti_torch_check(0, ...) throws a C++
 * exception that becomes RuntimeError, and must be the last thing a kernel does. */
#ifndef S1F_TORCH_ABI_H
#define S1F_TORCH_ABI_H

#include "../core/dtype.h"
#include "../core/status.h"

#include <stdbool.h>
#include <stdint.h>

typedef int32_t AOTITorchError;
typedef uint64_t StableIValue; /* a boxed argument: a handle, an int64_t, the bits of a double */
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;

#define S1F_TORCH_FUNCTIONS(X)                                                                                         \
    X(uint64_t, aoti_torch_abi_version, (void))                                                                        \
    X(int32_t, aoti_torch_dtype_float32, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_float64, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                                      \
    X(int32_t, aoti_torch_dtype_float16, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int64, (void))                                                                         \
    X(int32_t, aoti_torch_dtype_int32, (void))                                                                         \
    X(int32_t, aoti_torch_dtype_uint8, (void))                                                                         \
    X(int32_t, aoti_torch_device_type_cpu, (void))                                                                     \
    X(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle, int64_t *))                                               \
    X(AOTITorchError, aoti_torch_get_numel, (AtenTensorHandle, int64_t *))                                             \
    X(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle, int64_t **))                                            \
    X(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle, int64_t **))                                          \
    X(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle, int32_t *))                                             \
    X(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle, int32_t *))                                       \
    X(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle, int32_t *))                                      \
    X(AOTITorchError, aoti_torch_get_data_ptr, (AtenTensorHandle, void **))                                            \
    X(AOTITorchError, aoti_torch_empty_strided,                                                                        \
      (int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,                 \
       int32_t device_index, AtenTensorHandle *))                                                                      \
    X(AOTITorchError, aoti_torch_create_tensor_from_blob,                                                              \
      (void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t storage_offset, int32_t dtype,  \
       int32_t device_type, int32_t device_index, AtenTensorHandle *))                                                 \
    X(AOTITorchError, aoti_torch_copy_, (AtenTensorHandle self, AtenTensorHandle source, int32_t non_blocking))        \
    X(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle))                                             \
    X(AOTITorchError, aoti_torch_library_init_fragment,                                                                \
      (const char *name, const char *file, uint32_t line, TorchLibraryHandle *))                                       \
    X(AOTITorchError, aoti_torch_library_init_impl,                                                                    \
      (const char *name, const char *dispatch_key, const char *file, uint32_t line, TorchLibraryHandle *))             \
    X(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle, const char *schema))                                \
    X(AOTITorchError, torch_library_impl,                                                                              \
      (TorchLibraryHandle, const char *name, void (*kernel)(StableIValue *, uint64_t, uint64_t), uint64_t version))    \
    X(AOTITorchError, torch_parallel_for,                                                                              \
      (int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *), void *context))              \
    X(AOTITorchError, torch_get_num_threads, (uint32_t *))                                                             \
    X(void, aoti_torch_check,                                                                                          \
      (bool condition, const char *function, const char *file, uint32_t line, const char *message))

#define S1F_TORCH_MEMBER(result, name, arguments) result(*name) arguments;
typedef struct {
    S1F_TORCH_FUNCTIONS(S1F_TORCH_MEMBER)
} s1f_torch_functions;
#undef S1F_TORCH_MEMBER

#define S1F_TORCH_FLOOR UINT64_C(0x020A000000000000) /* 2.10: major << 56 | minor << 48 | patch << 40 */

/* Filled by s1f_torch_bind; every entry is set once that has returned S1F_OK. */
extern s1f_torch_functions s1f_torch;

/* Fills the table from the libtorch that this process has loaded: by its usual name, else by `path` (may be NULL). It
 * never loads one. S1F_ERR_STATE if none is loaded; S1F_ERR_ARG, naming the version found and the one needed, if it is
 * too old, and if a function is missing. */
s1f_status s1f_torch_bind(const char *path);

/* Our code of one of torch's, -1 for a dtype that we have no use for; and back (of the dtypes in the table above). */
int32_t s1f_dtype_from_torch(int32_t code);
int32_t s1f_dtype_to_torch(int32_t dtype);
int32_t s1f_torch_device_cpu(void);

#endif
