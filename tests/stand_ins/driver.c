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

static CUresult check_context(CUcontext context)
{
    for (int32_t d = 0; d < MAX_DEVICES; d++)
        if (context == &machine.devices[d].context)
            return context->references > 0 ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return CUDA_ERROR_INVALID_CONTEXT;
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
    X(CUDA_ERROR_NOT_READY, "device not ready"),
    X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
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

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    ENTER(cuDeviceGet, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(out != NULL);
    NEEDS_DEVICE(ordinal);
    *out = ordinal;
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
