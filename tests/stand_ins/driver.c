/* driver.c - the CUDA driver's functions over the machine. They mean what NVIDIA says; stand_in.h has what differs. */
#include "machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 256, CONTEXT_DEPTH = 16, MAX_SHARED_EVENTS = 4096 };

typedef struct allocation {
    struct allocation *next;
    char *address;
    size_t bytes;
    int64_t id;
    int32_t device;
    int32_t fd;       /* of shared memory, else -1 */
    int32_t imported; /* opened from a handle: not ours to free */
    int32_t handles;  /* imported, or opened in this process without shared memory: times opened */
    int64_t exporter_pid, exporter_id;
} allocation;

typedef struct {
    uint64_t magic;
    int64_t pid, id;
    uint64_t bytes;
    int32_t fd;
} ipc_handle;
_Static_assert(sizeof(ipc_handle) <= sizeof(CUipcMemHandle), "a handle is 64 bytes");
static const uint64_t IPC_MAGIC = 0x73746e642d696e21u;

typedef struct {
    uint64_t magic;
    int64_t pid;
    event_board *board; /* in its own process */
    int32_t fd, index;  /* and in others; fd -1: not shared */
} ipc_event_handle;
_Static_assert(sizeof(ipc_event_handle) <= sizeof(CUipcEventHandle), "a handle is 64 bytes");

/* The boards of a process's events, as this process sees them. */
typedef struct shared_boards {
    struct shared_boards *next;
    int64_t pid;
    int32_t fd; /* -1: another process's */
    int32_t used;
    event_board *boards;
} shared_boards;

static shared_boards *all_boards;
static allocation *allocations;
static int64_t num_allocations; /* over the life of the process: ids never repeat */

static _Thread_local struct {
    int64_t generation;
    int32_t depth;
    CUcontext stack[CONTEXT_DEPTH];
    CUstreamCaptureMode capture_mode;
} thread;

/* -- contexts ---------------------------------------------------------------------------------------------------- */

static void renew_thread(void)
{
    if (thread.generation != machine.generation) {
        memset(&thread, 0, sizeof thread);
        thread.generation = machine.generation;
    }
}

static CUcontext current_context(void)
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

static int is_context(CUcontext context)
{
    for (int32_t d = 0; d < machine.options.devices; d++)
        if (context == &machine.devices[d].context)
            return 1;
    return 0;
}

static int is_device(CUdevice index)
{
    return index >= 0 && index < machine.options.devices;
}

#define NEEDS_INIT()                                                                                                   \
    if (!machine.initialised)                                                                                          \
    return CUDA_ERROR_NOT_INITIALIZED

/* Sets `name` to the current device, or leaves the function. */
#define NEEDS_CONTEXT(name)                                                                                            \
    NEEDS_INIT();                                                                                                      \
    int32_t name = current_device();                                                                                   \
    if (name < 0)                                                                                                      \
    return current_context() == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED

#define NEEDS_ARGUMENT(condition)                                                                                      \
    if (!(condition))                                                                                                  \
    return CUDA_ERROR_INVALID_VALUE

/* A call that the capture of a graph by another thread forbids. */
#define UNSAFE_IN_CAPTURE()                                                                                            \
    renew_thread();                                                                                                    \
    if (machine.options.capturing && thread.capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) {                          \
        misuse(this_call, "while a graph is captured, from a thread that is not in relaxed mode");                     \
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;                                                                  \
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
    if (!is_device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
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
    if (!is_device(index))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)bytes, "stand-in device");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice index)
{
    ENTER(cuDeviceGetAttribute, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(value != NULL);
    if (!is_device(index))
        return CUDA_ERROR_INVALID_DEVICE;
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
    if (!is_device(index) || !is_device(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *can = index != peer;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice index)
{
    ENTER(cuDevicePrimaryCtxRetain, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    NEEDS_ARGUMENT(context != NULL);
    if (!is_device(index))
        return CUDA_ERROR_INVALID_DEVICE;
    *context = &machine.devices[index].context;
    (*context)->references++;
    return CUDA_SUCCESS;
}

/* The last release destroys the context. What lives in it stays here, unusable, and counts as not freed. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice index)
{
    ENTER(cuDevicePrimaryCtxRelease_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    if (!is_device(index))
        return CUDA_ERROR_INVALID_DEVICE;
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
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->references == 0)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
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
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->references == 0)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
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

/* -- streams ----------------------------------------------------------------------------------------------------- */

CUstream find_stream(api_call call, CUstream stream, CUresult *error)
{
    *error = CUDA_SUCCESS;
    if (!machine.initialised) {
        *error = CUDA_ERROR_NOT_INITIALIZED;
        return NULL;
    }
    if (stream == NULL || stream == CU_STREAM_LEGACY) {
        int32_t index = current_device();
        if (index < 0) {
            *error = current_context() == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED;
            return NULL;
        }
        return &machine.devices[index].null_stream;
    }
    if (stream == CU_STREAM_PER_THREAD) {
        misuse(call, "the stand-in has no per-thread default streams");
        *error = CUDA_ERROR_NOT_SUPPORTED;
        return NULL;
    }
    if (!stream->alive) {
        misuse(call, "stream %d is destroyed", stream->number);
        *error = CUDA_ERROR_INVALID_HANDLE;
        return NULL;
    }
    return stream;
}

#define NEEDS_STREAM(name)                                                                                             \
    CUresult name##_error;                                                                                             \
    name = find_stream(this_call, name, &name##_error);                                                                \
    if (name == NULL)                                                                                                  \
    return name##_error

static marker last_record(const struct CUevent_st *event)
{
    if (event->board == NULL)
        return event->recorded;
    return (marker){.board = event->board, .issue = __atomic_load_n(&event->board->recorded, __ATOMIC_ACQUIRE)};
}

#define NEEDS_EVENT(name)                                                                                              \
    NEEDS_INIT();                                                                                                      \
    if (name == NULL)                                                                                                  \
        return CUDA_ERROR_INVALID_HANDLE;                                                                              \
    if (!name->alive) {                                                                                                \
        misuse(this_call, "event %d is destroyed", name->number);                                                      \
        return CUDA_ERROR_INVALID_HANDLE;                                                                              \
    }

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    ENTER(cuStreamCreateWithPriority, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(stream != NULL && (flags == CU_STREAM_DEFAULT || flags == CU_STREAM_NON_BLOCKING));
    NEEDS_CONTEXT(index);
    (void)priority; /* any is allowed, and clamped; nothing here depends on it */
    *stream = new_stream(index, flags);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    ENTER(cuStreamCreate, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(stream != NULL && (flags == CU_STREAM_DEFAULT || flags == CU_STREAM_NON_BLOCKING));
    NEEDS_CONTEXT(index);
    *stream = new_stream(index, flags);
    return CUDA_SUCCESS;
}

/* Returns at once; what was enqueued is still executed. */
CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(cuStreamDestroy_v2, CUDA_ERROR_NOT_PERMITTED);
    if (stream == NULL || stream == CU_STREAM_LEGACY)
        return CUDA_ERROR_INVALID_HANDLE;
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    stream->alive = 0;
    machine.counters.live_streams--;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    ENTER(cuStreamGetCtx, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(context != NULL);
    NEEDS_STREAM(stream);
    *context = &machine.devices[stream->device].context;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    ENTER(cuStreamWaitEvent, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(flags == 0);
    NEEDS_EVENT(event);
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    operation *op = new_operation(WAIT_EVENT, this_call);
    op->event = event;
    op->awaited = last_record(event); /* later records do not matter; without one there is nothing to wait for */
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

static int marker_reached(const void *argument)
{
    const marker *point = argument;
    return reached(*point);
}

CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER(cuStreamSynchronize, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_STREAM(stream);
    UNSAFE_IN_CAPTURE();
    check_no_group_in_progress(this_call, stream);
    list_synchronisation(call_name(this_call), stream->device);
    marker point = {.stream = stream, .issue = stream->first != NULL ? stream->last->issue : stream->ended};
    return wait_until(call_name(this_call), marker_reached, &point) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}

CUresult cuStreamQuery(CUstream stream)
{
    ENTER(cuStreamQuery, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_STREAM(stream);
    UNSAFE_IN_CAPTURE();
    check_no_group_in_progress(this_call, stream);
    return stream->first == NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult check_value(api_call call, CUdeviceptr address, span *out)
{
    const void *pointer = (const void *)(uintptr_t)address;
    if (address == 0 || address % 8 != 0 || !find_span(call, pointer, 8, 0, out))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags)
{
    ENTER(cuStreamWaitValue64_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT((flags & ~(unsigned int)CU_STREAM_WAIT_VALUE_FLUSH) <= CU_STREAM_WAIT_VALUE_NOR);
    NEEDS_STREAM(stream);
    span found;
    CUresult result = check_value(this_call, address, &found);
    if (result != CUDA_SUCCESS)
        return result;
    check_no_group_in_progress(this_call, stream);
    operation *op = new_operation(WAIT_VALUE, this_call);
    op->source = found;
    op->value = value;
    op->flags = flags;
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags)
{
    ENTER(cuStreamWriteValue64_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(flags == CU_STREAM_WRITE_VALUE_DEFAULT || flags == CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER);
    NEEDS_STREAM(stream);
    span found;
    CUresult result = check_value(this_call, address, &found);
    if (result != CUDA_SUCCESS)
        return result;
    check_no_group_in_progress(this_call, stream);
    operation *op = new_operation(WRITE_VALUE, this_call);
    op->destination = found;
    op->value = value;
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

/* What stands between a launch and its stream: lazy module loading, for one, synchronises the device. */
static CUresult before_launch(api_call call, const struct CUstream_st *stream)
{
    check_no_group_in_progress(call, stream);
    machine.counters.launches++;
    if (injection_drawn() && !synchronise_device(call_name(call), stream->device, 1))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    ENTER(cuLaunchHostFunc, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(function != NULL);
    NEEDS_STREAM(stream);
    CUresult result = before_launch(this_call, stream);
    if (result != CUDA_SUCCESS)
        return result;
    operation *op = new_operation(HOST_FUNCTION, this_call);
    op->function = function;
    op->argument = argument;
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

/* -- events ------------------------------------------------------------------------------------------------------ */

static char *map_of_process(int64_t pid, int32_t fd, size_t bytes)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)pid, fd);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0)
        return NULL;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    close(opened);
    return memory != MAP_FAILED ? memory : NULL;
}

static void *make_shared(size_t bytes, int32_t *fd)
{
    *fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (*fd < 0)
        return NULL;
    void *memory = MAP_FAILED;
    if (ftruncate(*fd, (off_t)bytes) == 0)
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (memory != MAP_FAILED)
        return memory;
    close(*fd);
    return NULL;
}

static shared_boards *find_boards(int64_t pid)
{
    shared_boards *found = all_boards;
    while (found != NULL && found->pid != pid)
        found = found->next;
    return found;
}

static shared_boards *add_boards(int64_t pid, int32_t fd, void *memory)
{
    shared_boards *added = keep(sizeof *added);
    *added = (shared_boards){.next = all_boards, .pid = pid, .fd = fd, .boards = memory};
    all_boards = added;
    return added;
}

/* NULL if there are too many: boards are not used again, since other processes may know them. */
static event_board *new_board(void)
{
    if (!machine.options.shared_memory)
        return keep(sizeof(event_board));
    shared_boards *own = find_boards(getpid());
    if (own == NULL) {
        int32_t fd;
        void *memory = make_shared(MAX_SHARED_EVENTS * sizeof(event_board), &fd);
        if (memory == NULL)
            return NULL;
        own = add_boards(getpid(), fd, memory);
    }
    return own->used < MAX_SHARED_EVENTS ? &own->boards[own->used++] : NULL;
}

static CUevent new_event(int32_t index, unsigned int flags, event_board *board)
{
    CUevent event = keep(sizeof *event);
    *event = (struct CUevent_st){
        .alive = 1, .number = ++machine.num_events, .device = index, .flags = flags, .board = board};
    machine.counters.live_events++;
    return event;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    ENTER(cuEventCreate, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(event != NULL && flags < 8);
    int interprocess = (flags & CU_EVENT_INTERPROCESS) != 0;
    NEEDS_ARGUMENT(!interprocess || (flags & CU_EVENT_DISABLE_TIMING) != 0);
    NEEDS_CONTEXT(index);
    event_board *board = interprocess ? new_board() : NULL;
    if (interprocess && board == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *event = new_event(index, flags, board);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(cuEventRecord, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_EVENT(event);
    NEEDS_STREAM(stream);
    if (stream->device != event->device)
        return CUDA_ERROR_INVALID_HANDLE;
    check_no_group_in_progress(this_call, stream);
    operation *op = new_operation(RECORD, this_call);
    op->event = event;
    if (event->board != NULL)
        op->record = __atomic_add_fetch(&event->board->recorded, 1, __ATOMIC_ACQ_REL);
    enqueue(op, stream);
    event->recorded = (marker){.stream = stream, .issue = op->issue};
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
    ENTER(cuEventQuery, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_EVENT(event);
    UNSAFE_IN_CAPTURE();
    return reached(last_record(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event)
{
    ENTER(cuEventSynchronize, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_EVENT(event);
    UNSAFE_IN_CAPTURE();
    list_synchronisation(call_name(this_call), event->device);
    marker point = last_record(event);
    return wait_until(call_name(this_call), marker_reached, &point) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER(cuEventElapsedTime, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(milliseconds != NULL);
    NEEDS_EVENT(start);
    NEEDS_EVENT(end);
    if (start->recorded.stream == NULL || end->recorded.stream == NULL || start->device != end->device ||
        ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!reached(start->recorded) || !reached(end->recorded))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)(end->reached_ns - start->reached_ns) * 1e-6f;
    return CUDA_SUCCESS;
}

/* Allowed before the event is reached; waits that were enqueued stay. */
CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(cuEventDestroy_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_EVENT(event);
    event->alive = 0;
    machine.counters.live_events--;
    return CUDA_SUCCESS;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

static allocation *find_allocation(const void *address)
{
    const char *wanted = address;
    for (allocation *a = allocations; a != NULL; a = a->next)
        if (wanted >= a->address && wanted < a->address + a->bytes)
            return a;
    return NULL;
}

int find_span(api_call call, const void *address, size_t bytes, int host_allowed, span *out)
{
    *out = (span){.address = (char *)(uintptr_t)address, .bytes = bytes};
    if (bytes == 0)
        return 1;
    const char *first = address;
    allocation *owner = find_allocation(address);
    if (owner != NULL && bytes <= (size_t)(owner->address + owner->bytes - first)) {
        out->allocation = owner->id;
        out->device = owner->device;
        return 1;
    }
    if (owner != NULL) {
        misuse(call, "%zu bytes at offset %zu of an allocation of %zu bytes", bytes, (size_t)(first - owner->address),
               owner->bytes);
        return 0;
    }
    for (allocation *a = allocations; a != NULL; a = a->next)
        if (first < a->address && a->address < first + bytes) {
            misuse(call, "%zu bytes that begin %zu before an allocation", bytes, (size_t)(a->address - first));
            return 0;
        }
    if (address == NULL || (!host_allowed && !machine.options.foreign_memory)) {
        misuse(call, "%zu bytes at %p, which is not device memory", bytes, address);
        return 0;
    }
    return 1;
}

int span_lives(operation *op, const span *memory)
{
    if (op->faulty)
        return 0;
    if (memory->allocation == 0)
        return 1;
    allocation *owner = find_allocation(memory->address);
    if (owner != NULL && owner->id == memory->allocation)
        return 1;
    misuse(op->call, "use after free: its memory at %p was freed before it was executed", (void *)memory->address);
    op->faulty = 1;
    return 0;
}

static void add_allocation(allocation entry)
{
    allocation *added = keep(sizeof *added);
    *added = entry;
    added->id = ++num_allocations;
    added->next = allocations;
    allocations = added;
}

static void remove_allocation(allocation *entry)
{
    allocation **link = &allocations;
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
}

static void give_back(const allocation *entry)
{
    if (entry->imported || entry->fd >= 0)
        munmap(entry->address, entry->bytes);
    else
        free(entry->address);
    if (entry->fd >= 0)
        close(entry->fd);
}

void driver_reset(void)
{
    for (allocation *a = allocations; a != NULL; a = a->next)
        give_back(a);
    allocations = NULL;
    for (shared_boards *b = all_boards; b != NULL; b = b->next) {
        munmap(b->boards, MAX_SHARED_EVENTS * sizeof(event_board));
        if (b->fd >= 0)
            close(b->fd);
    }
    all_boards = NULL;
}

static void *take_memory(size_t bytes, int32_t *fd)
{
    if (machine.options.shared_memory)
        return make_shared(bytes, fd);
    void *memory = NULL;
    *fd = -1;
    return posix_memalign(&memory, ALIGNMENT, bytes) == 0 ? memory : NULL;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    ENTER(cuMemAlloc_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(address != NULL && bytes > 0);
    NEEDS_CONTEXT(index);
    UNSAFE_IN_CAPTURE();
    if (machine.options.synchronous_memory && !synchronise_device(call_name(this_call), index, 0))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    int64_t used = 0;
    for (allocation *a = allocations; a != NULL; a = a->next)
        used += a->device == index && !a->imported ? (int64_t)a->bytes : 0;
    if (bytes > (size_t)(machine.options.memory_bytes - used))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int32_t fd;
    char *memory = take_memory(bytes, &fd);
    if (memory == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, 0xFF, bytes);
    add_allocation((allocation){.address = memory, .bytes = bytes, .device = index, .fd = fd});
    machine.counters.live_allocations++;
    machine.counters.live_bytes += (int64_t)bytes;
    *address = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(cuMemFree_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    if (address == 0)
        return CUDA_SUCCESS;
    UNSAFE_IN_CAPTURE();
    allocation *entry = find_allocation((const void *)(uintptr_t)address);
    if (entry == NULL || entry->address != (char *)(uintptr_t)address || entry->imported) {
        misuse(this_call, "%p is not what cuMemAlloc gave, or freed already", (void *)(uintptr_t)address);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (machine.options.synchronous_memory && !synchronise_device(call_name(this_call), entry->device, 0))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    if (entry->handles > 0)
        misuse(this_call, "%p is still open through %d handles", (void *)entry->address, entry->handles);
    for (allocation *a = allocations; a != NULL; a = a->next)
        if (a->imported && a->exporter_pid == getpid() && a->exporter_id == entry->id)
            misuse(this_call, "%p is still open through %d handles", (void *)entry->address, a->handles);
    memset(entry->address, 0xFF, entry->bytes);
    machine.counters.live_allocations--;
    machine.counters.live_bytes -= (int64_t)entry->bytes;
    machine.runnable_changed = 1; /* a wait for a value in it is void */
    remove_allocation(entry);
    give_back(entry);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(cuMemGetInfo_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(free_bytes != NULL && total_bytes != NULL);
    NEEDS_CONTEXT(index);
    *free_bytes = *total_bytes = (size_t)machine.options.memory_bytes;
    for (allocation *a = allocations; a != NULL; a = a->next)
        *free_bytes -= a->device == index && !a->imported ? a->bytes : 0;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    ENTER(cuMemGetAddressRange_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_CONTEXT(index);
    (void)index;
    allocation *entry = find_allocation((const void *)(uintptr_t)address);
    if (entry == NULL)
        return CUDA_ERROR_NOT_FOUND;
    if (base != NULL)
        *base = (CUdeviceptr)(uintptr_t)entry->address;
    if (bytes != NULL)
        *bytes = entry->bytes;
    return CUDA_SUCCESS;
}

static CUresult copy(api_call call, const void *destination, int to_host, const void *source, int from_host,
                     size_t bytes, CUstream stream)
{
    const api_call this_call = call;
    NEEDS_STREAM(stream);
    span to, from;
    if (!find_span(call, destination, bytes, to_host, &to) || !find_span(call, source, bytes, from_host, &from))
        return CUDA_ERROR_INVALID_VALUE;
    check_no_group_in_progress(call, stream);
    operation *op = new_operation(COPY, call);
    op->destination = to;
    op->source = from;
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

/* Host memory counts as pinned in every copy: it is read and written when the copy runs. */
CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyAsync, CUDA_ERROR_NOT_PERMITTED);
    return copy(this_call, (const void *)(uintptr_t)destination, 1, (const void *)(uintptr_t)source, 1, bytes, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyDtoDAsync_v2, CUDA_ERROR_NOT_PERMITTED);
    return copy(this_call, (const void *)(uintptr_t)destination, 0, (const void *)(uintptr_t)source, 0, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *destination, CUdeviceptr source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyDtoHAsync_v2, CUDA_ERROR_NOT_PERMITTED);
    return copy(this_call, destination, 1, (const void *)(uintptr_t)source, 0, bytes, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void *source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyHtoDAsync_v2, CUDA_ERROR_NOT_PERMITTED);
    return copy(this_call, (const void *)(uintptr_t)destination, 0, source, 1, bytes, stream);
}

CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, size_t bytes, CUstream stream)
{
    ENTER(cuMemsetD8Async, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_STREAM(stream);
    span to;
    if (!find_span(this_call, (const void *)(uintptr_t)destination, bytes, 0, &to))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = before_launch(this_call, stream);
    if (result != CUDA_SUCCESS)
        return result;
    operation *op = new_operation(MEMSET, this_call);
    op->destination = to;
    op->value = value;
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

/* -- memory and events of other processes -------------------------------------------------------------------------- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER(cuIpcGetMemHandle, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(handle != NULL);
    NEEDS_CONTEXT(index);
    (void)index;
    allocation *entry = find_allocation((const void *)(uintptr_t)address);
    if (entry == NULL || entry->address != (char *)(uintptr_t)address || entry->imported)
        return CUDA_ERROR_INVALID_VALUE;
    ipc_handle made;
    memset(&made, 0, sizeof made); /* padding too: a handle is sent as bytes */
    made.magic = IPC_MAGIC;
    made.pid = getpid();
    made.id = entry->id;
    made.bytes = entry->bytes;
    made.fd = entry->fd;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    return CUDA_SUCCESS;
}

/* The real driver opens a handle in another process only. Here ranks may be threads, so the same process is allowed:
 * with shared_memory at another address, as another process would see it, else at the same one. */
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    ENTER(cuIpcOpenMemHandle_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(address != NULL && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    NEEDS_CONTEXT(index);
    ipc_handle from;
    memcpy(&from, &handle, sizeof from);
    if (from.magic != IPC_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    allocation *entry = allocations;
    while (entry != NULL &&
           !(entry->imported && entry->device == index && entry->exporter_pid == from.pid &&
             entry->exporter_id == from.id) &&
           !(from.fd < 0 && from.pid == getpid() && entry->id == from.id))
        entry = entry->next;
    if (entry == NULL) {
        char *memory = from.fd >= 0 ? map_of_process(from.pid, from.fd, from.bytes) : NULL;
        if (memory == NULL)
            return CUDA_ERROR_MAP_FAILED;
        add_allocation((allocation){.address = memory,
                                    .bytes = from.bytes,
                                    .device = index,
                                    .fd = -1,
                                    .imported = 1,
                                    .exporter_pid = from.pid,
                                    .exporter_id = from.id});
        entry = allocations;
    }
    entry->handles++;
    machine.counters.open_handles++;
    *address = (CUdeviceptr)(uintptr_t)entry->address;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    ENTER(cuIpcCloseMemHandle, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_CONTEXT(index);
    (void)index;
    allocation *entry = find_allocation((const void *)(uintptr_t)address);
    if (entry == NULL || entry->address != (char *)(uintptr_t)address || entry->handles == 0) {
        misuse(this_call, "%p was not opened", (void *)(uintptr_t)address);
        return CUDA_ERROR_INVALID_VALUE;
    }
    machine.counters.open_handles--;
    if (--entry->handles == 0 && entry->imported) {
        remove_allocation(entry);
        give_back(entry);
    }
    return CUDA_SUCCESS;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
    ENTER(cuIpcGetEventHandle, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(handle != NULL);
    NEEDS_EVENT(event);
    NEEDS_ARGUMENT(event->board != NULL && !event->imported);
    const shared_boards *own = find_boards(getpid());
    int is_shared = own != NULL && event->board >= own->boards && event->board < own->boards + own->used;
    ipc_event_handle made;
    memset(&made, 0, sizeof made);
    made.magic = IPC_MAGIC;
    made.pid = getpid();
    made.board = event->board;
    made.fd = is_shared ? own->fd : -1;
    made.index = is_shared ? (int32_t)(event->board - own->boards) : 0;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    return CUDA_SUCCESS;
}

/* As for memory, the same process is allowed as well; another one needs shared_memory in the exporting process. */
CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle)
{
    ENTER(cuIpcOpenEventHandle, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(event != NULL);
    NEEDS_CONTEXT(index);
    ipc_event_handle from;
    memcpy(&from, &handle, sizeof from);
    if (from.magic != IPC_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    if (from.pid != getpid()) {
        const shared_boards *found = find_boards(from.pid);
        if (found == NULL && from.fd >= 0) {
            void *memory = map_of_process(from.pid, from.fd, MAX_SHARED_EVENTS * sizeof(event_board));
            found = memory != NULL ? add_boards(from.pid, -1, memory) : NULL;
        }
        if (found == NULL)
            return CUDA_ERROR_MAP_FAILED;
        from.board = &found->boards[from.index];
    }
    *event = new_event(index, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS, from.board);
    (*event)->imported = 1;
    return CUDA_SUCCESS;
}
