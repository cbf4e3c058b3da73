/* machine.h - devices, hardware queues and the thread that executes them; shared by driver.c and nccl.c.
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

typedef const char *api_call; /* its name */

/* Takes the lock; unlocked at the end of the block. */
pthread_mutex_t *take_lock(void);
void release_lock(pthread_mutex_t **lock);
#define LOCKED __attribute__((cleanup(release_lock), unused)) pthread_mutex_t *held_lock = take_lock()
/* Begins each function of both APIs: counts the call, which a test may want to fail. */
#define ENTER_TEXT(name)                                                                                               \
    static const char this_call[] = #name;                                                                             \
    LOCKED;                                                                                                            \
    count_call(this_call)
#define ENTER(name)                                                                                                    \
    ENTER_TEXT(name);                                                                                                  \
    if (call_fails(this_call))                                                                                         \
    return machine.failing_result

void count_call(api_call call);
int call_fails(api_call call);
/* A test has stopped something, for good: nobody may wait for it. */
int is_stopped(void);
/* What this call frees must not be in use by work of the device that does not end. */
void check_frees(api_call call, int32_t device_index);
/* A test wants what this call moves to be damaged in this way. */
int is_damaged(api_call call, size_t bytes, stand_in_damage_kind kind);
/* Damages what has arrived, if a test wants that. */
void damage(api_call call, char *arrived, size_t bytes);
__attribute__((format(printf, 2, 3))) void misuse(api_call call, const char *format, ...);

/* -- options and counters ---------------------------------------------------------------------------------------- */

/* name, default, least, greatest; what they mean: stand_in.h */
#define OPTIONS(X)                                                                                                     \
    X(queues, 8, 1, MAX_QUEUES)                                                                                        \
    X(nccl_version, 22907, 0, INT32_MAX)                                                                               \
    X(injected_sync_permille, 0, 0, 1000)                                                                              \
    X(copy_ns_per_kib, 0, 0, INT32_MAX)                                                                                \
    X(foreign_memory, 0, 0, 1)

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

typedef enum { COPY, RECORD, WAIT_EVENT, HOST_FUNCTION, NCCL } operation_kind;

typedef struct operation operation;
typedef struct nccl_message nccl_message; /* nccl.c */

/* The records of an event, in memory that processes share: record n (1, 2, ...) is reached once
 * ended[n % BOARD_RECORDS] is n or greater. Only BOARD_RECORDS records that overtake each other are told apart. */
enum { BOARD_RECORDS = 63 };
typedef struct {
    int64_t recorded; /* records so far */
    int64_t ended[BOARD_RECORDS];
} event_board;

/* Memory that an operation reads or writes; the id of its allocation (0: not ours) shows a free in between. */
typedef struct {
    char *address;
    size_t bytes;
    int64_t allocation;
    int32_t device; /* of the allocation */
} span;

struct operation {
    operation *next; /* in its queue */
    CUstream stream;
    operation_kind kind;
    int64_t issue; /* number, in the order in which hosts issued, over all devices */
    int32_t delay; /* times that it is passed over although it could run */
    int32_t started;
    int32_t faulty; /* misuse was noted: it does nothing */
    api_call call;  /* that issued it */
    span destination, source;
    CUevent event;  /* of RECORD and WAIT_EVENT */
    int64_t record; /* of these, on the event's board; 0: none, for which nobody waits */
    CUhostFn function;
    void *argument;
    ncclComm_t comm; /* NCCL */
    nccl_message *messages;
    int32_t is_lost; /* a test wants that: it never takes place */
};

/* Handles stay readable after they are destroyed, until reset, so that their use is seen. */
struct CUstream_st {
    int32_t alive, number, device, queue;
    int64_t issued, ended;      /* issue numbers of the last operation, and of the last one that ended */
    int32_t groups_in_progress; /* NCCL groups that have yet to reach this stream */
};

struct CUevent_st {
    int32_t alive, number, device;
    unsigned int flags;
    event_board *board;
    int32_t is_foreign; /* another process records it */
    int64_t reached_ns;
};

struct CUctx_st {
    int32_t device, references;
};

typedef struct {
    struct CUctx_st context;
    struct CUstream_st null_stream;
    int32_t next_queue;
    uint32_t busy;      /* bit q: queue q holds work */
    int64_t asserts_in; /* so many queries from now; 0: never, below 0: it has failed */
    struct {
        operation *first, *last;
    } queues[MAX_QUEUES];
} device;

typedef struct {
    struct {
#define X(name, initial, least, greatest) int64_t name;
        OPTIONS(X)
#undef X
    } options;
    struct {
#define X(name) int64_t name;
        COUNTERS(X)
#undef X
    } counters;
    char failing_call[64]; /* how the names of calls begin of which one is to fail */
    int64_t failing_in;    /* after so many more */
    int32_t failing_result;
    char damaged_call[64]; /* how the names begin of calls whose bytes are damaged */
    int64_t damaged_bytes; /* how many those are, below 0: any */
    stand_in_damage_kind damage;
    device devices[MAX_DEVICES];
    int32_t num_streams, num_events;
    int64_t issued;     /* issue number of the last operation */
    int64_t generation; /* resets so far: what threads keep from before is void */
} machine_state;
extern machine_state machine;

/* Zeroed memory until the next reset. */
void *keep(size_t bytes);
/* Uniform in 0 .. bound - 1; 1 with the given chance. */
int64_t draw(int64_t bound);
int chance(int64_t percent);

operation *new_operation(operation_kind kind, api_call call);
/* Appends to the queue of the stream. */
void enqueue(operation *op, CUstream stream);
/* Something happened that may let an operation run: the worker looks. */
void look_again(void);
int reached(const event_board *board, int64_t record);
/* All that was issued to a device up to `issue` has ended. */
int device_reached(int32_t device_index, int64_t issue);

/* These two wait, the lock given up meanwhile, and count it as a synchronisation: until the stream has come so far, or
 * the device has done all that it was given. 0: nothing can ever run, which is noted as a misuse. */
int wait_for_stream(api_call call, const struct CUstream_st *stream, int64_t issue);
int wait_for_device(api_call call, int32_t device_index);
/* Draws whether this launch synchronises the device first. */
int injection_drawn(void);

/* -- the driver, as others see it (driver.c) ----------------------------------------------------------------------- */

/* The device of this thread's current context, below 0 if it has none. */
int32_t current_device(void);
/* The stream itself, or the null stream of the current context; NULL, with *error set, if there is neither. */
CUstream find_stream(api_call call, CUstream stream, CUresult *error);
/* Misuse if an NCCL group has yet to reach the stream. */
void check_no_group_in_progress(api_call call, const struct CUstream_st *stream);
/* Memory at `address`, which must be ours unless that is allowed; 0, with misuse noted, if it is not, or ends early. */
int find_span(api_call call, const void *address, size_t bytes, int host_allowed, span *out);
/* Still what it was when the operation was issued; notes the misuse if not, once per operation. */
int span_lives(operation *op, const span *memory);
void driver_reset(void);

/* -- NCCL, as the worker sees it (nccl.c) ------------------------------------------------------------------------ */

int nccl_can_run(operation *op);
/* One step of the operation; 1 once it has ended. */
int nccl_run(operation *op);
void nccl_reset(void);
#endif
