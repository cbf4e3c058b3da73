/* driver.c - the CUDA driver's functions for devices and contexts. They mean what NVIDIA says, as do those of
 * driver_streams.c and driver_memory.c; stand_in.h has what differs. */
#include "driver.h"

#include <stdio.h>
#include <string.h>

enum { CONTEXT_DEPTH = 16 };

static _Thread_local struct {
    int64_t generation;
    int32_t depth;
    CUcontext stack[CONTEXT_DEPTH];
    CUstreamCaptureMode capture_mode;
} thread;

static void renew_thread(void)
{
    if (thread.generation != machine.generation) {
        memset(&thread, 0, sizeof thread);
        thread.generation = machine.generation;
    }
}

CUcontext current_context(void)
{
    renew_thread();
    return thread.depth > 0 ? thread.stack[thread.depth - 1] : NULL;
}

int32_t current_device(void)
{
    CUcontext context = current_context();
    return context != NULL && context->references > 0 ? context->device : -1;
}

void make_current(int32_t device_index)
{
    CUcontext context = &machine.devices[device_index].context;
    renew_thread();
    machine.initialised = 1;
    context->references++; /* the runtime's own, never given back */
    if (thread.depth == 0)
        thread.depth = 1;
    thread.stack[thread.depth - 1] = context;
}

static CUresult check_context(CUcontext context)
{
    for (int32_t d = 0; d < machine.options.devices; d++)
        if (context == &machine.devices[d].context)
            return context->references > 0 ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return CUDA_ERROR_INVALID_CONTEXT;
}

int unsafe_in_capture(api_call call)
{
    renew_thread();
    if (!machine.options.capturing || thread.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return 0;
    misuse(call, "while a graph is captured, from a thread that is not in relaxed mode");
    return 1;
}

void driver_reset(void)
{
    memory_reset();
    boards_reset();
}

CUresult cuInit(unsigned int flags)
{
    ENTER(cuInit, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(flags == 0);
    machine.initialised = 1;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    ENTER(cuDriverGetVersion, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(version != NULL);
    *version = (int)machine.options.driver_version;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define X(name, text)                                                                                                  \
    {                                                                                                                  \
        name, #name, text                                                                                              \
    }
    X(CUDA_SUCCESS, "no error"),
    X(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    X(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    X(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    X(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    X(CUDA_ERROR_NOT_READY, "device not ready"),
    X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
#undef X
};

CUresult cuGetErrorName(CUresult error, const char **name)
{
    ENTER(cuGetErrorName, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(name != NULL);
    *name = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            *name = errors[i].name;
    return *name != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    ENTER(cuGetErrorString, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(text != NULL);
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            *text = errors[i].text;
    return *text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* `symbol` is a name without its version, as the vendor's headers declare it; the newest version here is given. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    ENTER(cuGetProcAddress_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(symbol != NULL && function != NULL);
    (void)version;
    (void)flags;
    static const struct {
        const char *name;
        void (*function)(void);
    } functions[] = {
#define X(name) {#name, (void (*)(void))name},
        DRIVER_CALLS(X)
#undef X
    };
    *function = NULL;
    size_t length = strlen(symbol);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strncmp(functions[i].name, symbol, length) == 0 &&
            (functions[i].name[length] == '\0' || strcmp(functions[i].name + length, "_v2") == 0))
            memcpy(function, &functions[i].function, sizeof *function);
    if (status != NULL)
        *status = *function != NULL ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    ENTER(cuDeviceGet, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(out != NULL);
    NEEDS_DEVICE(ordinal);
    *out = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER(cuDeviceGetCount, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(count != NULL);
    *count = (int)machine.options.devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice index)
{
    ENTER(cuDeviceGetName, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(name != NULL && bytes > 0);
    NEEDS_DEVICE(index);
    snprintf(name, (size_t)bytes, "stand-in device");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *address, int bytes, CUdevice index)
{
    ENTER(cuDeviceGetPCIBusId, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(address != NULL && bytes >= 13);
    NEEDS_DEVICE(index);
    snprintf(address, (size_t)bytes, "0000:%02X:00.0", index + 0xA0);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice index)
{
    ENTER(cuDeviceGetAttribute, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(value != NULL);
    NEEDS_DEVICE(index);
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: *value = 1; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE; /* not modelled */
    }
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice index, CUdevice peer)
{
    ENTER(cuDeviceCanAccessPeer, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(can != NULL);
    NEEDS_DEVICE(index);
    NEEDS_DEVICE(peer);
    *can = index != peer;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice index)
{
    ENTER(cuDevicePrimaryCtxRetain, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(context != NULL);
    NEEDS_DEVICE(index);
    *context = &machine.devices[index].context;
    (*context)->references++;
    return CUDA_SUCCESS;
}

/* The last release destroys the context. What lives in it stays here, unusable, and counts as not freed. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice index)
{
    ENTER(cuDevicePrimaryCtxRelease_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_DEVICE(index);
    if (machine.devices[index].context.references == 0) {
        misuse(this_call, "device %d is released more often than it was retained", index);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    machine.devices[index].context.references--;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(cuCtxGetCurrent, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(context != NULL);
    *context = current_context();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(cuCtxSetCurrent, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    renew_thread();
    if (context == NULL) {
        thread.depth -= thread.depth > 0;
        return CUDA_SUCCESS;
    }
    CUresult result = check_context(context);
    if (result != CUDA_SUCCESS)
        return result;
    if (thread.depth == 0)
        thread.depth = 1;
    thread.stack[thread.depth - 1] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(cuCtxPushCurrent_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    renew_thread();
    CUresult result = check_context(context);
    if (result != CUDA_SUCCESS)
        return result;
    if (thread.depth == CONTEXT_DEPTH) {
        misuse(this_call, "%d contexts are on this thread's stack already", thread.depth);
        return CUDA_ERROR_INVALID_VALUE;
    }
    thread.stack[thread.depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(cuCtxPopCurrent_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    renew_thread();
    if (thread.depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    thread.depth--;
    if (context != NULL)
        *context = thread.stack[thread.depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *out)
{
    ENTER(cuCtxGetDevice, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(out != NULL);
    NEEDS_CONTEXT(index);
    *out = index;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER(cuCtxGetStreamPriorityRange, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_CONTEXT(index);
    (void)index;
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_CONTEXT(index);
    UNSAFE_IN_CAPTURE();
    check_no_group_on_device(this_call, index);
    return synchronise_device(call_name(this_call), index, 0) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    ENTER(cuThreadExchangeStreamCaptureMode, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(mode != NULL && (int)*mode >= CU_STREAM_CAPTURE_MODE_GLOBAL &&
                   (int)*mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    renew_thread();
    CUstreamCaptureMode before = thread.capture_mode;
    thread.capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
