/* torch_abi.c - finds libtorch's C ABI in the process, checks its version and reads its codes once. */
#include "torch_abi.h"

#include <dlfcn.h>
#include <string.h>

s1f_torch_functions s1f_torch;

static int32_t torch_dtype[S1F_NUM_DTYPES]; /* torch's code of ours, -1: not used */
static int32_t device_cpu;

static s1f_status find_function(void *library, const char *name, void *entry)
{
    void *address = dlsym(library, name);
    if (address == NULL)
        return s1f_fail(S1F_ERR_ARG, "libtorch has no %s; seq1f1b needs torch 2.10 or newer", name);
    memcpy(entry, &address, sizeof address); /* ISO C converts no object pointer to a function pointer */
    return S1F_OK;
}

static s1f_status check_version(void *library)
{
    S1F_TRY(find_function(library, "aoti_torch_abi_version", &s1f_torch.aoti_torch_abi_version));
    uint64_t version = s1f_torch.aoti_torch_abi_version();
    if (version < S1F_TORCH_FLOOR)
        return s1f_fail(S1F_ERR_ARG, "torch %d.%d.%d is too old, seq1f1b needs torch 2.10 or newer",
                        (int)(version >> 56 & 0xff), (int)(version >> 48 & 0xff), (int)(version >> 40 & 0xff));
    return S1F_OK;
}

static s1f_status find_functions(void *library)
{
#define S1F_TORCH_ENTRY(result, name, arguments) {#name, &s1f_torch.name},
    const struct {
        const char *name;
        void *entry;
    } entries[] = {S1F_TORCH_FUNCTIONS(S1F_TORCH_ENTRY)};
#undef S1F_TORCH_ENTRY
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
        S1F_TRY(find_function(library, entries[i].name, entries[i].entry));
    return S1F_OK;
}

static void read_codes(void)
{
    for (int i = 0; i < S1F_NUM_DTYPES; i++)
        torch_dtype[i] = -1;
    torch_dtype[S1F_FLOAT32] = s1f_torch.aoti_torch_dtype_float32();
    torch_dtype[S1F_FLOAT64] = s1f_torch.aoti_torch_dtype_float64();
    torch_dtype[S1F_BFLOAT16] = s1f_torch.aoti_torch_dtype_bfloat16();
    torch_dtype[S1F_FLOAT16] = s1f_torch.aoti_torch_dtype_float16();
    torch_dtype[S1F_INT64] = s1f_torch.aoti_torch_dtype_int64();
    torch_dtype[S1F_INT32] = s1f_torch.aoti_torch_dtype_int32();
    torch_dtype[S1F_UINT8] = s1f_torch.aoti_torch_dtype_uint8();
    device_cpu = s1f_torch.aoti_torch_device_type_cpu();
}

s1f_status s1f_torch_bind(const char *path)
{
    void *library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    if (library == NULL && path != NULL)
        library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
    if (library == NULL)
        return s1f_fail(S1F_ERR_STATE, "libtorch_cpu.so is not loaded: import torch first");
    s1f_status status = check_version(library);
    if (status == S1F_OK)
        status = find_functions(library);
    if (status != S1F_OK) {
        dlclose(library);
        return status;
    }
    read_codes(); /* the library stays open for the life of the process: our kernels are registered with it */
    return S1F_OK;
}

int32_t s1f_dtype_from_torch(int32_t code)
{
    for (int32_t i = 0; i < S1F_NUM_DTYPES; i++)
        if (torch_dtype[i] == code)
            return i;
    return -1;
}

int32_t s1f_dtype_to_torch(int32_t dtype)
{
    return torch_dtype[dtype];
}

int32_t s1f_torch_device_cpu(void)
{
    return device_cpu;
}
