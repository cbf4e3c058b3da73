/* machine.h - devices, hardware queues and the thread that executes them; shared by the driver's files and nccl.c.
 * Everything is guarded by one lock; whatever is declared here is called with it held, unless it says otherwise. */
#ifndef STAND_IN_MACHINE_H
#define STAND_IN_MACHINE_H

#include "nccl_api.h"
#include "stand_in.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_DEVICES = 16, MAX_QUEUES = 32 };

/* -- calls ------------------------------------------------------------------------------------------------------- */

#define DRIVER_CALLS(X)                                                                                                \
    X(cuInit)                                                                                                          \
    X(cuGetErrorName)                                                                                                  \
    X(cuGetErrorString)                                                                                                \
    X(cuDeviceGet)                                                                                                     \
    X(cuDeviceGetPCIBusId)                                                                                             \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuDevicePrimaryCtxRelease_v2)                                                                                    \
    X(cuCtxSetCurrent)                                                                                                 \
    X(cuCtxPushCurrent_v2)                                                                                             \
    X(cuCtxPopCurrent_v2)                                                                                              \
    X(cuCtxGetStreamPriorityRange)                                                                                     \
    X(cuStreamCreateWithPriority)                                                                                      \
    X(cuStreamDestroy_v2)                                                                                              \
    X(cuStreamWaitEvent)                                                                                               \
    X(cuStreamSynchronize)                                                                                             \
    X(cuLaunchHostFunc)                                                                                                \
    X(cuThreadExchangeStreamCaptureMode)                                                                               \
    X(cuEventCreate)                                                                                                   \
    X(cuEventRecord)                                                                                                   \
    X(cuEventQuery)                                                                                                    \
    X(cuEventElapsedTime)                                                                                              \
    X(cuEventDestroy_v2)                                                                                               \
    X(cuMemAlloc_v2)                                                                                                   \
    X(cuMemFree_v2)                                                                                                    \
    X(cuMemHostAlloc)                                                                                                  \
    X(cuMemFreeHost)                                                                                                   \
    X(cuMemcpyAsync)                                                                                                   \
    X(cuMemcpyDtoHAsync_v2)                                                                                            \
    X(cuMemcpyHtoDAsync_v2)                                                                                            \
    X(cuIpcGetMemHandle)                                                                                               \
    X(cuIpcOpenMemHandle_v2)                                                                                           \
    X(cuIpcCloseMemHandle)                                                                                             \
    X(cuIpcGetEventHandle)                                                                                             \
    X(cuIpcOpenEventHandle)

#define NCCL_CALLS(X)                                                                                                  \
    X(ncclGetVersion)                                                                                                  \
    X(ncclGetUniqueId)                                                                                                 \
    X(ncclGetErrorString)                                                                                              \
    X(ncclGetLastError)                                                                                                \
    X(ncclCommInitRankConfig)                                                                                          \
    X(ncclCommFinalize)                                                                                                \
    X(ncclCommDestroy)                                                                                                 \
    X(ncclCommAbort)                                                                                                   \
    X(ncclCommGetAsyncError)                                                                                           \
    X(ncclSend)                                                                                                        \
    X(ncclRecv)                                                                                                        \
    X(ncclGroupStart)                                                                                                  \
    X(ncclGroupEnd)

typedef enum {
#define X(name) CALL_##name,
    DRIVER_CALLS(X) NCCL_CALLS(X)
#undef X
        NUM_CALLS
} api_call;

const char *call_name(api_call call);

/* Takes the lock and counts the call; unlocked at the end of the block. LOCKED: without counting. */
pthread_mutex_t *take_lock(void);
void release_lock(pthread_mutex_t **lock);
#define LOCKED __attribute__((cleanup(release_lock), unused)) pthread_mutex_t *held_lock = take_lock()
#define ENTER_TEXT(name)                                                                                               \
    const api_call this_call = CALL_##name;                                                                            \
    LOCKED;                                                                                                            \
    machine.calls[this_call]++
#define ENTER(name, refusal)                                                                                           \
    const api_call this_call = CALL_##name;                                                                            \
    if (called_from_device(this_call))                                                                                 \
        return refusal;                                                                                                \
    LOCKED;                                                                                                            \
    machine.calls[this_call]++;                                                                                        \
    if (call_fails(this_call))                                                                                         \
    return machine.failing_result

/* -- options and counters ---------------------------------------------------------------------------------------- */

/* name, default, least, greatest; what they mean: stand_in.h */
#define OPTIONS(X)                                                                                                     \
    X(queues, 8, 1, MAX_QUEUES)                                                                                        \
    X(nccl_version, 22907, 0, INT32_MAX)                                                                               \
    X(paused, 0, 0, 1)                                                                                                 \
    X(injected_sync_permille, 0, 0, 1000)                                                                              \
    X(pinned_bytes, 1LL << 34, 0, INT64_MAX)                                                                           \
    X(pageable_waits, 0, 0, 1)                                                                                         \
    X(virtual_clock, 0, 0, 1)                                                                                          \
    X(copy_ns_per_kib, 0, 0, INT32_MAX)                                                                                \
    X(synchronous_memory, 0, 0, 1)                                                                                     \
    X(foreign_memory, 0, 0, 1)                                                                                         \
    X(shared_memory, 0, 0, 1)

#define COUNTERS(X)                                                                                                    \
    X(synchronisations)                                                                                                \
    X(live_allocations)                                                                                                \
    X(live_pinned_bytes)                                                                                               \
    X(pageable_copies)                                                                                                 \
    X(live_streams)                                                                                                    \
    X(live_events)                                                                                                     \
    X(interprocess_events)                                                                                             \
    X(live_communicators)

/* -- operations -------------------------------------------------------------------------------------------------- */

typedef enum { COPY, RECORD, WAIT_EVENT, HOLD, HOST_FUNCTION, WORK, NCCL } operation_kind;

typedef struct operation operation;
typedef struct nccl_message nccl_message; /* nccl.c */

/* The records of an interprocess event, in memory that processes may share: record n (1, 2, ...) is reached once
 * ended[n % BOARD_RECORDS] is n or greater. Only BOARD_RECORDS records that overtake each other are told apart. */
enum { BOARD_RECORDS = 63 };
typedef struct {
    int64_t recorded; /* records so far */
    int64_t ended[BOARD_RECORDS];
} event_board;

/* A point in a stream, reached once the operation `issue` has ended, or record `issue` of a board; else at once. */
typedef struct {
    CUstream stream;
    event_board *board;
    int64_t issue;
    int64_t *clock; /* of a record: the virtual time at which it was reached */
} marker;

/* Memory that an operation reads or writes; the id of its allocation (0: not ours) shows a free in between. */
typedef struct {
    char *address;
    size_t bytes;
    int64_t allocation;
    int32_t device; /* of the allocation */
} span;

struct operation {
    operation *next_in_queue, *next_in_stream;
    CUstream stream;
    operation_kind kind;
    int64_t issue; /* number, in the order in which hosts issued, over all devices */
    int32_t delay; /* times that it is passed over although it could run */
    int32_t started;
    int32_t faulty; /* misuse was noted: it does nothing */
    api_call call;  /* that issued it */
    span destination, source;
    int64_t value;  /* of HOLD: releases before it; of WORK: nanoseconds */
    marker awaited; /* of WAIT_EVENT */
    int64_t *clock; /* of RECORD */
    CUevent event;  /* of RECORD */
    int64_t record; /* of RECORD, on the event's board */
    CUhostFn function;
    void *argument;
    ncclComm_t comm; /* NCCL: its messages progress independently */
    nccl_message *messages;
};

/* Handles stay readable after they are destroyed, until reset, so that their use is seen. */
struct CUstream_st {
    int32_t alive, number, device, queue;
    int64_t ended; /* issue number of the last operation that ended */
    int64_t clock; /* virtual nanoseconds at which it ended */
    operation *first, *last;
    int32_t groups_in_progress; /* NCCL groups that have yet to reach this stream */
};

struct CUevent_st {
    int32_t alive, number, device;
    unsigned int flags;
    marker recorded;    /* the last record; its issue is 0 before the first */
    event_board *board; /* of an interprocess event, in place of `recorded`: handles give it other names */
    int32_t imported;   /* opened from a handle */
    int64_t reached_ns;
};

struct CUctx_st {
    int32_t device, references;
};

typedef struct {
    struct CUctx_st context;
    struct CUstream_st null_stream;
    int32_t next_queue;
    uint32_t busy; /* bit q: queue q holds work */
    struct {
        operation *first, *last;
    } queues[MAX_QUEUES];
} device;

typedef struct {
#define X(name, initial, least, greatest) int64_t name;
    OPTIONS(X)
#undef X
} options;

typedef struct {
#define X(name) int64_t name;
    COUNTERS(X)
#undef X
} counters;

typedef struct {
    options options;
    counters counters;
    int64_t calls[NUM_CALLS];
    char failing_call[64]; /* how the names of calls begin of which one is to fail */
    int64_t failing_in;    /* after so many more */
    int32_t failing_result;
    char damaged_call[64]; /* how the names begin of calls whose bytes are damaged */
    int64_t damaged_bytes; /* how many those are, below 0: any */
    stand_in_damage_kind damage;
    device devices[MAX_DEVICES];
    int32_t initialised; /* cuInit was called */
    int32_t num_streams, num_events;
    int64_t issued;           /* issue number of the last operation */
    int64_t generation;       /* resets so far: what threads keep from before is void */
    int64_t num_releases;     /* of streams that are held */
    int32_t runnable_changed; /* something happened that may let a head run: the worker must look */
} machine_state;
extern machine_state machine;

/* Zeroed memory until the next reset. Never fails: the program ends if the host is out of memory. */
void *keep(size_t bytes);
/* Uniform in 0 .. bound - 1; 1 with the given chance. */
int64_t draw(int64_t bound);
int chance(int64_t percent);
int64_t thread_id(void);

__attribute__((format(printf, 2, 3))) void misuse(api_call call, const char *format, ...);

operation *new_operation(operation_kind kind, api_call call);
/* Appends to the stream and its queue. */
void enqueue(operation *op, CUstream stream);
int reached(marker point);
/* All that was issued to a device up to `issue` has ended. */
int device_reached(int32_t device_index, int64_t issue);
/* Memory at `address`, which must be ours unless that is allowed; 0, with misuse noted, if it is not, or ends early. */
int find_span(api_call call, const void *address, size_t bytes, int host_allowed, span *out); /* driver_memory.c */
/* Still what it was when the operation was issued; notes the misuse if not, once per operation. driver_memory.c */
int span_lives(operation *op, const span *memory);

/* Waits, the lock given up meanwhile, until `done`. 0: it is a deadlock, which is noted as a misuse. */
int wait_until(api_call call, int (*done)(const void *argument), const void *argument);
/* Waits for a device; counts the synchronisation. */
int synchronise_device(api_call call, int32_t device_index);
/* Draws whether this launch synchronises the device first. */
int injection_drawn(void);

/* The device of this thread's current context, below 0 if it has none. driver.c */
int32_t current_device(void);
/* The stream itself, or the null stream of the current context; NULL with *error set if neither. driver_streams.c */
CUstream find_stream(api_call call, CUstream stream, CUresult *error);
/* Misuse if an NCCL group has yet to reach the stream. */
void check_no_group_in_progress(api_call call, const struct CUstream_st *stream);
CUstream new_stream(int32_t device_index);
void driver_reset(void); /* driver.c */
/* In a function that a device runs no call of the API is allowed. Called without the lock. */
int called_from_device(api_call call);
/* A test wants what this call moves to be damaged in this way. */
int is_damaged(api_call call, size_t bytes, stand_in_damage_kind kind);
/* Damages what has arrived, if a test wants that. */
void damage(api_call call, char *arrived, size_t bytes);
/* A test wants this call to fail, with machine.failing_result. */
int call_fails(api_call call);

/* -- NCCL, as the worker sees it (nccl.c) ------------------------------------------------------------------------ */

int nccl_can_run(operation *op);
/* One step of the operation; 1 once it has ended. */
int nccl_run(operation *op);
void nccl_reset(void);
#endif
