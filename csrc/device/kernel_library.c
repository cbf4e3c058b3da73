/* kernel_library.c - finds the operations of the shared object of CUDA kernels by name, and launches them. */
#include "kernel_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct s1f_cuda_library {
    void *handle;
    char path[]; /* for messages */
};

s1f_status s1f_cuda_library_open(const char *path, s1f_cuda_library **out)
{
    int path_bytes = snprintf(NULL, 0, "%s", path) + 1;
    s1f_cuda_library *library = malloc(sizeof *library + (size_t)path_bytes);
    if (library == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "out of memory");
    snprintf(library->path, (size_t)path_bytes, "%s", path);
    library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library->handle == NULL) {
        const char *why = dlerror();
        s1f_fail(S1F_ERR_SYSTEM, "cannot open the CUDA kernels: %s", why != NULL ? why : path);
        free(library);
        return S1F_ERR_SYSTEM;
    }
    *out = library;
    return S1F_OK;
}

void s1f_cuda_library_free(s1f_cuda_library *library)
{
    free(library);
}

s1f_status s1f_cuda_library_find(const s1f_cuda_library *library, const char *name, const s1f_cuda_operation **out)
{
    char symbol[64];
    int symbol_length = snprintf(symbol, sizeof symbol, "s1f_cuda_%s", name);
    const s1f_cuda_operation *operation = symbol_length < (int)sizeof symbol ? dlsym(library->handle, symbol) : NULL;
    if (operation == NULL)
        return s1f_fail(S1F_ERR_ARG, "%s has no operation %s", library->path, name);
    if (operation->abi != S1F_CUDA_ABI)
        return s1f_fail(S1F_ERR_ARG,
                        "%s was built with version %d of its tables, this extension needs %d: install again",
                        library->path, (int)operation->abi, S1F_CUDA_ABI);
    *out = operation;
    return S1F_OK;
}

static s1f_status fail_of_cuda(const s1f_cuda_operation *operation, int32_t error)
{
    return s1f_fail(error == S1F_CUDA_INVALID_VALUE ? S1F_ERR_ARG : S1F_ERR_STATE, "CUDA error %d: %s", (int)error,
                    operation->error_text(error));
}

s1f_status s1f_cuda_scratch(const s1f_cuda_operation *operation, const void *arguments, int32_t kernel, int64_t *bytes)
{
    *bytes = operation->scratch_bytes(arguments, kernel);
    return *bytes < 0 ? fail_of_cuda(operation, (int32_t) - *bytes) : S1F_OK;
}

s1f_status s1f_cuda_launch(const s1f_cuda_operation *operation, const void *arguments, int32_t kernel, void *stream)
{
    int32_t error = operation->launch(arguments, kernel, stream);
    return error != 0 ? fail_of_cuda(operation, error) : S1F_OK;
}
