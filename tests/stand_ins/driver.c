/* driver.c - the CUDA driver's functions. They mean what NVIDIA says; stand_in.h has what differs.
 *
 * Memory and the records of events of a process lie in one mapping, its arena, which other processes map as a whole:
 * a handle for them is a process and a place in its arena. */
#include "machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CONTEXT_DEPTH = 16, ALIGNMENT = 256, MAX_PROCESSES = 8, IPC_MAGIC = 0x2d696e21 };
static const size_t ARENA_BYTES = (size_t)1 << 32; /* pages are there once they are touched */

typedef struct allocation {
    struct allocation *next;
    char *address;
    size_t bytes;
    int64_t id;
    int32_t device;  /* -1: pinned memory of the host */
    int32_t foreign; /* another process's: not ours to free */
    int32_t handles; /* times that a handle of it was opened here */
} allocation;

typedef struct {
    uint64_t magic;
    int64_t pid;
    size_t place, bytes;
    int32_t fd; /* of the arena */
} ipc_handle;
_Static_assert(sizeof(ipc_handle) <= sizeof(CUipcMemHandle) && sizeof(CUipcMemHandle) == sizeof(CUipcEventHandle),
               "a handle is 64 bytes");

static allocation *allocations;
static int64_t num_allocations; /* over the life of the process: ids never repeat */
static struct {
    int64_t pid;
    int32_t fd;
    char *memory;
} arenas[MAX_PROCESSES]; /* the first: our own, as a device begins with events */
static size_t arena_used;

static _Thread_local struct {
    int64_t generation;
    int32_t depth;
    CUcontext stack[CONTEXT_DEPTH];
} thread;

/* Sets `name` to the current device, or leaves the function. */
#define NEEDS_CONTEXT(name)                                                                                            \
    const int32_t name __attribute__((unused)) = current_device();                                                     \
    if (name < 0)                                                                                                      \
    return CUDA_ERROR_INVALID_CONTEXT

#define NEEDS_ARGUMENT(condition)                                                                                      \
    if (!(condition))                                                                                                  \
    return CUDA_ERROR_INVALID_VALUE

#define NEEDS_DEVICE(index)                                                                                            \
    if ((index) < 0 || (index) >= MAX_DEVICES)                                                                         \
    return CUDA_ERROR_INVALID_DEVICE

#define NEEDS_STREAM(name)                                                                                             \
    CUresult name##_error;                                                                                             \
    name = find_stream(this_call, name, &name##_error);                                                                \
    if (name == NULL)                                                                                                  \
    return name##_error

#define NEEDS_EVENT(name)                                                                                              \
    if (name == NULL || !name->alive) {                                                                                \
        misuse(this_call, "event %d is destroyed", name == NULL ? 0 : name->number);                                   \
        return CUDA_ERROR_INVALID_HANDLE;                                                                              \
    }

/* -- errors ------------------------------------------------------------------------------------------------------ */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CUDA_ERROR_ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
};

static CUresult find_error(CUresult error, const char **name, const char **text)
{
    *name = *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors && *name == NULL; i++)
        if (errors[i].code == error) {
            *name = errors[i].name;
            *text = errors[i].text;
        }
    return *name != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    ENTER(cuGetErrorName);
    const char *text;
    return find_error(error, name, &text);
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    ENTER(cuGetErrorString);
    const char *name;
    return find_error(error, &name, text);
}

/* -- devices and contexts ---------------------------------------------------------------------------------------- */

int32_t current_device(void)
{
    if (thread.generation != machine.generation) {
        memset(&thread, 0, sizeof thread);
        thread.generation = machine.generation;
    }
    CUcontext context = thread.depth > 0 ? thread.stack[thread.depth - 1] : NULL;
    return context != NULL && context->references > 0 ? context->device : -1;
}

CUresult cuInit(unsigned int flags)
{
    ENTER(cuInit);
    NEEDS_ARGUMENT(flags == 0);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    ENTER(cuDeviceGet);
    NEEDS_DEVICE(ordinal);
    *out = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice index)
{
    ENTER(cuDevicePrimaryCtxRetain);
    NEEDS_DEVICE(index);
    *context = &machine.devices[index].context;
    (*context)->references++;
    return CUDA_SUCCESS;
}

/* The last release destroys the context. What lives in it stays here, unusable, and counts as not freed. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice index)
{
    ENTER(cuDevicePrimaryCtxRelease_v2);
    NEEDS_DEVICE(index);
    NEEDS_ARGUMENT(machine.devices[index].context.references > 0);
    machine.devices[index].context.references--;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(cuCtxPushCurrent_v2);
    (void)current_device();
    if (context == NULL || context->references == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    NEEDS_ARGUMENT(thread.depth < CONTEXT_DEPTH);
    thread.stack[thread.depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(cuCtxPopCurrent_v2);
    NEEDS_CONTEXT(index);
    *context = thread.stack[--thread.depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER(cuCtxGetStreamPriorityRange);
    NEEDS_CONTEXT(index);
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    ENTER(cuThreadExchangeStreamCaptureMode);
    static _Thread_local CUstreamCaptureMode of_thread;
    CUstreamCaptureMode before = of_thread;
    of_thread = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* -- streams ----------------------------------------------------------------------------------------------------- */

CUstream find_stream(api_call call, CUstream stream, CUresult *error)
{
    int32_t index = current_device();
    *error = CUDA_ERROR_INVALID_CONTEXT;
    if (stream == NULL)
        return index < 0 ? NULL : &machine.devices[index].null_stream;
    if (stream->alive)
        return stream;
    misuse(call, "stream %d is destroyed", stream->number);
    *error = CUDA_ERROR_INVALID_HANDLE;
    return NULL;
}

void check_no_group_in_progress(api_call call, const struct CUstream_st *stream)
{
    if (stream->groups_in_progress > 0)
        misuse(call, "on stream %d while an NCCL group that uses it is in progress: its operations come later",
               stream->number);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    ENTER(cuStreamCreateWithPriority);
    NEEDS_ARGUMENT(flags == CU_STREAM_NON_BLOCKING);
    NEEDS_CONTEXT(index);
    (void)priority; /* any is allowed, and clamped; nothing here depends on it */
    device *of = &machine.devices[index];
    int32_t queue = of->next_queue % (int32_t)machine.options.queues;
    of->next_queue = queue + 1;
    *stream = keep(sizeof **stream);
    **stream = (struct CUstream_st){.alive = 1, .number = ++machine.num_streams, .device = index, .queue = queue};
    machine.counters.live_streams++;
    return CUDA_SUCCESS;
}

/* Returns at once; what was enqueued is still executed. */
CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(cuStreamDestroy_v2);
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    stream->alive = 0;
    machine.counters.live_streams--;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER(cuStreamSynchronize);
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    return wait_for_stream(this_call, stream, stream->issued) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}

CUresult cuStreamQuery(CUstream stream)
{
    ENTER(cuStreamQuery);
    NEEDS_STREAM(stream);
    return stream->ended >= stream->issued ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    ENTER(cuLaunchHostFunc);
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    /* As lazy loading of modules does. */
    if (injection_drawn() && !wait_for_device(this_call, stream->device))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    operation *op = new_operation(HOST_FUNCTION, this_call);
    op->function = function;
    op->argument = argument;
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

/* -- arenas ------------------------------------------------------------------------------------------------------ */

/* The arena of a process, mapped at the first call; NULL if that fails. fd: its, in the process. */
static char *find_arena(int64_t pid, int32_t fd)
{
    int32_t i = 0;
    while (i < MAX_PROCESSES && arenas[i].memory != NULL && arenas[i].pid != pid)
        i++;
    if (i == MAX_PROCESSES || arenas[i].memory != NULL)
        return i == MAX_PROCESSES ? NULL : arenas[i].memory;
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)pid, fd);
    arenas[i].fd = pid == getpid() ? memfd_create("stand-in", MFD_CLOEXEC) : open(path, O_RDWR | O_CLOEXEC);
    if (arenas[i].fd < 0 || (pid == getpid() && ftruncate(arenas[i].fd, (off_t)ARENA_BYTES) != 0))
        return NULL;
    void *memory = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arenas[i].fd, 0);
    arenas[i].pid = pid;
    arenas[i].memory = memory == MAP_FAILED ? NULL : memory;
    return arenas[i].memory;
}

/* Nothing is given out twice before a reset: others may know it. NULL if there is no more. */
static void *take_memory(size_t bytes)
{
    char *own = find_arena(getpid(), -1);
    if (own == NULL || bytes > ARENA_BYTES - arena_used)
        return NULL;
    void *taken = own + arena_used;
    arena_used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

void driver_reset(void)
{
    allocations = NULL;
    arena_used = 0;
    for (int32_t i = 0; i < MAX_PROCESSES && arenas[i].memory != NULL; i++) {
        munmap(arenas[i].memory, ARENA_BYTES);
        close(arenas[i].fd);
        arenas[i].memory = NULL;
    }
}

static ipc_handle handle_of(const void *address, size_t bytes)
{
    ipc_handle made;
    memset(&made, 0, sizeof made); /* padding too: a handle is sent as bytes */
    made.magic = IPC_MAGIC;
    made.pid = getpid();
    made.place = (size_t)((const char *)address - arenas[0].memory);
    made.bytes = bytes;
    made.fd = arenas[0].fd;
    return made;
}

/* -- events ------------------------------------------------------------------------------------------------------ */

static CUevent new_event(int32_t index, unsigned int flags, event_board *board, int32_t is_foreign)
{
    CUevent event = keep(sizeof *event);
    *event = (struct CUevent_st){.alive = 1,
                                 .number = ++machine.num_events,
                                 .device = index,
                                 .flags = flags,
                                 .board = board,
                                 .is_foreign = is_foreign};
    machine.counters.live_events++;
    return event;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    ENTER(cuEventCreate);
    int is_interprocess = (flags & CU_EVENT_INTERPROCESS) != 0;
    NEEDS_ARGUMENT(flags < 8 && (!is_interprocess || (flags & CU_EVENT_DISABLE_TIMING) != 0));
    NEEDS_CONTEXT(index);
    event_board *board = take_memory(sizeof *board);
    if (board == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *event = new_event(index, flags, board, 0);
    machine.counters.interprocess_events += is_interprocess;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(cuEventRecord);
    NEEDS_EVENT(event);
    NEEDS_STREAM(stream);
    NEEDS_ARGUMENT(stream->device == event->device);
    check_no_group_in_progress(this_call, stream);
    operation *op = new_operation(RECORD, this_call);
    op->event = event;
    op->record = __atomic_add_fetch(&event->board->recorded, 1, __ATOMIC_ACQ_REL);
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

static int64_t last_record(const struct CUevent_st *event)
{
    return __atomic_load_n(&event->board->recorded, __ATOMIC_ACQUIRE);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    ENTER(cuStreamWaitEvent);
    NEEDS_ARGUMENT(flags == 0);
    NEEDS_EVENT(event);
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    operation *op = new_operation(WAIT_EVENT, this_call);
    op->event = event;
    op->record = last_record(event); /* later records do not matter; without one there is nothing to wait for */
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
    ENTER(cuEventQuery);
    NEEDS_EVENT(event);
    return reached(event->board, last_record(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER(cuEventElapsedTime);
    NEEDS_EVENT(start);
    NEEDS_EVENT(end);
    if (last_record(start) == 0 || last_record(end) == 0 || start->device != end->device ||
        ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!reached(start->board, last_record(start)) || !reached(end->board, last_record(end)))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)(end->reached_ns - start->reached_ns) * 1e-6f;
    return CUDA_SUCCESS;
}

/* Allowed before the event is reached; waits that were enqueued stay. */
CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(cuEventDestroy_v2);
    NEEDS_EVENT(event);
    event->alive = 0;
    machine.counters.live_events--;
    return CUDA_SUCCESS;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
    ENTER(cuIpcGetEventHandle);
    NEEDS_EVENT(event);
    NEEDS_ARGUMENT((event->flags & CU_EVENT_INTERPROCESS) != 0);
    ipc_handle made = handle_of(event->board, sizeof *event->board);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    return CUDA_SUCCESS;
}

/* The arena that holds what a handle is of; NULL: the handle is none of this machine's. */
static char *arena_of(const void *handle, ipc_handle *from)
{
    memcpy(from, handle, sizeof *from);
    return from->magic == IPC_MAGIC ? find_arena(from->pid, from->fd) : NULL;
}

/* The real driver opens a handle in another process only. Here ranks may be threads, so the same one may, too. */
CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle)
{
    ENTER(cuIpcOpenEventHandle);
    NEEDS_CONTEXT(index);
    ipc_handle from;
    char *arena = arena_of(&handle, &from);
    if (arena == NULL)
        return CUDA_ERROR_MAP_FAILED;
    *event = new_event(index, CU_EVENT_DISABLE_TIMING, (event_board *)(arena + from.place), from.pid != getpid());
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

/* The one that begins there. */
static allocation *find_beginning(CUdeviceptr address)
{
    allocation *found = find_allocation((const void *)(uintptr_t)address);
    return found != NULL && found->address == (char *)(uintptr_t)address ? found : NULL;
}

int find_span(api_call call, const void *address, size_t bytes, int host_allowed, span *out)
{
    *out = (span){.address = (char *)(uintptr_t)address, .bytes = bytes};
    if (bytes == 0)
        return 1;
    const char *first = address;
    for (const allocation *a = allocations; a != NULL; a = a->next)
        if (first < a->address + a->bytes && a->address < first + bytes) {
            out->allocation = a->id;
            out->device = a->device;
            if (first >= a->address && bytes <= (size_t)(a->address + a->bytes - first))
                return 1;
            misuse(call, "%zu bytes at offset %td of an allocation of %zu bytes", bytes, first - a->address, a->bytes);
            return 0;
        }
    if (address != NULL && (host_allowed || machine.options.foreign_memory))
        return 1;
    misuse(call, "%zu bytes at %p, which is not device memory", bytes, address);
    return 0;
}

int span_lives(operation *op, const span *memory)
{
    if (op->faulty || memory->allocation == 0)
        return !op->faulty;
    allocation *owner = find_allocation(memory->address);
    if (owner != NULL && owner->id == memory->allocation)
        return 1;
    misuse(op->call, "use after free: its memory at %p was freed before it was executed", (void *)memory->address);
    op->faulty = 1;
    return 0;
}

static allocation *add_allocation(char *address, size_t bytes, int32_t of_device, int32_t foreign)
{
    allocation *added = keep(sizeof *added);
    *added = (allocation){allocations, address, bytes, ++num_allocations, of_device, foreign, 0};
    allocations = added;
    return added;
}

static void remove_allocation(const allocation *entry)
{
    allocation **link = &allocations;
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
}

static CUresult allocate(void **memory, size_t bytes, int32_t of_device)
{
    *memory = take_memory(bytes);
    if (*memory == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*memory, 0xFF, bytes);
    add_allocation(*memory, bytes, of_device, 0);
    return CUDA_SUCCESS;
}

/* device: -1 for pinned memory. */
static CUresult release(api_call call, CUdeviceptr address, int is_pinned)
{
    allocation *entry = find_beginning(address);
    if (entry == NULL || entry->foreign || is_pinned != (entry->device < 0)) {
        misuse(call, "%p is not what was allocated so, or freed already", (void *)(uintptr_t)address);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (entry->handles > 0)
        misuse(call, "%p is still open through %d handles", (void *)entry->address, entry->handles);
    for (int32_t d = is_pinned ? 0 : entry->device; d < (is_pinned ? MAX_DEVICES : entry->device + 1); d++)
        check_frees(call, d);
    memset(entry->address, 0xFF, entry->bytes);
    *(is_pinned ? &machine.counters.live_pinned_bytes : &machine.counters.live_allocations) -=
        is_pinned ? (int64_t)entry->bytes : 1;
    remove_allocation(entry);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    ENTER(cuMemHostAlloc);
    NEEDS_ARGUMENT(bytes > 0 && flags == 0);
    NEEDS_CONTEXT(index);
    machine.counters.live_pinned_bytes += (int64_t)bytes;
    return allocate(memory, bytes, -1);
}

CUresult cuMemFreeHost(void *memory)
{
    ENTER(cuMemFreeHost);
    return release(this_call, (CUdeviceptr)(uintptr_t)memory, 1);
}

/* It and its counterpart synchronise the device where launches may. */
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    ENTER(cuMemAlloc_v2);
    NEEDS_ARGUMENT(bytes > 0);
    NEEDS_CONTEXT(index);
    if (machine.options.injected_sync_permille > 0 && !wait_for_device(this_call, index))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    void *memory;
    CUresult result = allocate(&memory, bytes, index);
    machine.counters.live_allocations += result == CUDA_SUCCESS;
    *address = (CUdeviceptr)(uintptr_t)memory;
    return result;
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(cuMemFree_v2);
    const allocation *entry = find_beginning(address);
    if (entry != NULL && entry->device >= 0 && machine.options.injected_sync_permille > 0 &&
        !wait_for_device(this_call, entry->device))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    return release(this_call, address, 0);
}

/* Host memory is read and written when the copy runs; the host waits for that unless it is pinned. */
static CUresult copy(api_call this_call, CUdeviceptr destination, int to_host, CUdeviceptr source, int from_host,
                     size_t bytes, CUstream stream)
{
    NEEDS_STREAM(stream);
    operation *op = new_operation(COPY, this_call);
    if (!find_span(this_call, (void *)(uintptr_t)destination, bytes, to_host, &op->destination) ||
        !find_span(this_call, (void *)(uintptr_t)source, bytes, from_host, &op->source))
        return CUDA_ERROR_INVALID_VALUE;
    check_no_group_in_progress(this_call, stream);
    enqueue(op, stream);
    int is_pageable = (to_host && op->destination.allocation == 0) || (from_host && op->source.allocation == 0);
    machine.counters.pageable_copies += is_pageable;
    return !is_pageable || wait_for_stream(this_call, stream, op->issue) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}

CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyAsync);
    return copy(this_call, destination, 0, source, 0, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *destination, CUdeviceptr source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyDtoHAsync_v2);
    return copy(this_call, (CUdeviceptr)(uintptr_t)destination, 1, source, 0, bytes, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void *source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyHtoDAsync_v2);
    return copy(this_call, destination, 0, (CUdeviceptr)(uintptr_t)source, 1, bytes, stream);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER(cuIpcGetMemHandle);
    NEEDS_CONTEXT(index);
    const allocation *entry = find_beginning(address);
    NEEDS_ARGUMENT(entry != NULL && !entry->foreign);
    if (entry->bytes % ((size_t)2 << 20) != 0) /* CUDA C++ Programming Guide, "Interprocess Communication" */
        misuse(this_call, "%zu bytes, no multiple of 2 MiB: other memory may be shared with them", entry->bytes);
    ipc_handle made = handle_of(entry->address, entry->bytes);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    ENTER(cuIpcOpenMemHandle_v2);
    NEEDS_ARGUMENT(flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    NEEDS_CONTEXT(index);
    ipc_handle from;
    char *arena = arena_of(&handle, &from);
    if (arena == NULL)
        return CUDA_ERROR_MAP_FAILED;
    allocation *entry = find_beginning((CUdeviceptr)(uintptr_t)(arena + from.place));
    if (entry == NULL)
        entry = add_allocation(arena + from.place, from.bytes, index, 1);
    entry->handles++;
    *address = (CUdeviceptr)(uintptr_t)entry->address;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    ENTER(cuIpcCloseMemHandle);
    NEEDS_CONTEXT(index);
    check_frees(this_call, index);
    allocation *entry = find_beginning(address);
    if (entry == NULL || entry->handles == 0) {
        misuse(this_call, "%p was not opened", (void *)(uintptr_t)address);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (--entry->handles == 0 && entry->foreign)
        remove_allocation(entry);
    return CUDA_SUCCESS;
}
