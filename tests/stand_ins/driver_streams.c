/* driver_streams.c - the CUDA driver's functions for streams and events, also events of other processes. */
#include "driver.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_SHARED_EVENTS = 4096 };

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

/* -- streams ----------------------------------------------------------------------------------------------------- */

CUstream find_stream(api_call call, CUstream stream, CUresult *error)
{
    *error = CUDA_SUCCESS;
    if (!machine.initialised) {
        *error = CUDA_ERROR_NOT_INITIALIZED;
        return NULL;
    }
    if (stream == NULL) {
        int32_t index = current_device();
        if (index < 0) {
            *error = current_context() == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED;
            return NULL;
        }
        return &machine.devices[index].null_stream;
    }
    if (!stream->alive) {
        misuse(call, "stream %d is destroyed", stream->number);
        *error = CUDA_ERROR_INVALID_HANDLE;
        return NULL;
    }
    return stream;
}

static marker last_record(const struct CUevent_st *event)
{
    if (event->board == NULL)
        return event->recorded;
    return (marker){.board = event->board, .issue = __atomic_load_n(&event->board->recorded, __ATOMIC_ACQUIRE)};
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    ENTER(cuStreamCreateWithPriority, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(stream != NULL && flags == CU_STREAM_NON_BLOCKING);
    NEEDS_CONTEXT(index);
    (void)priority; /* any is allowed, and clamped; nothing here depends on it */
    *stream = new_stream(index);
    return CUDA_SUCCESS;
}

/* Returns at once; what was enqueued is still executed. */
CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(cuStreamDestroy_v2, CUDA_ERROR_NOT_PERMITTED);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    stream->alive = 0;
    machine.counters.live_streams--;
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

int marker_reached(const void *argument)
{
    const marker *point = argument;
    return reached(*point);
}

CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER(cuStreamSynchronize, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    machine.counters.synchronisations++;
    marker point = {.stream = stream, .issue = stream->first != NULL ? stream->last->issue : stream->ended};
    return wait_until(this_call, marker_reached, &point) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    ENTER(cuLaunchHostFunc, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(function != NULL);
    NEEDS_STREAM(stream);
    check_no_group_in_progress(this_call, stream);
    /* As lazy loading of modules does. */
    if (injection_drawn() && !synchronise_device(this_call, stream->device))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    operation *op = new_operation(HOST_FUNCTION, this_call);
    op->function = function;
    op->argument = argument;
    enqueue(op, stream);
    return CUDA_SUCCESS;
}

/* -- events ------------------------------------------------------------------------------------------------------ */

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

void boards_reset(void)
{
    for (shared_boards *b = all_boards; b != NULL; b = b->next) {
        munmap(b->boards, MAX_SHARED_EVENTS * sizeof(event_board));
        if (b->fd >= 0)
            close(b->fd);
    }
    all_boards = NULL;
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
    machine.counters.interprocess_events += interprocess;
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
    op->clock = keep(sizeof *op->clock);
    if (event->board != NULL)
        op->record = __atomic_add_fetch(&event->board->recorded, 1, __ATOMIC_ACQ_REL);
    enqueue(op, stream);
    event->recorded = (marker){.stream = stream, .issue = op->issue, .clock = op->clock};
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
    ENTER(cuEventQuery, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_EVENT(event);
    return reached(last_record(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
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
    int64_t ns = end->reached_ns - start->reached_ns;
    if (machine.options.virtual_clock)
        ns = *end->recorded.clock - *start->recorded.clock;
    *milliseconds = (float)ns * 1e-6f;
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

/* -- events of other processes ------------------------------------------------------------------------------------ */

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

/* The process that exported it may open a handle, as with memory; another one needs shared_memory in the exporting
 * process. */
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
