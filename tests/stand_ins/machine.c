/* machine.c - see machine.h and, for what it means, stand_in.h. */
#include "machine.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK_BYTES = 1 << 20, POLL_NS = 100000, MAX_LINES = 10000, DELAY_PERCENT = 50 };
static const int64_t WAIT_LIMIT_NS = INT64_C(10) * 1000 * 1000 * 1000;

typedef struct chunk {
    struct chunk *next;
    size_t bytes, used;
} chunk;

typedef struct line {
    struct line *next;
    char text[];
} line;

typedef struct {
    line *first, *last;
    int64_t count;
} line_list;

typedef struct waiter {
    struct waiter *next;
    int (*done)(const void *argument);
    const void *argument;
    int broken; /* by a deadlock */
    pthread_cond_t wake;
} waiter;

machine_state machine;

static pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP; /* held for less than a microsecond */
static pthread_cond_t work_came = PTHREAD_COND_INITIALIZER;
static pthread_t worker;
static int worker_runs, worker_idle, worker_stops, worker_busy; /* busy: in a host function, without the lock */
static _Atomic int callers; /* hosts that are at the lock: the worker lets them in */
static uint64_t random_state;
static int64_t last_progress_ns;
static chunk *chunks;
static operation *free_operations;
static line_list misuses;
static waiter *waiters;

static _Thread_local int on_worker;
static _Thread_local char thread_name[64];

static void set_defaults(void);
static void *work(void *unused);

/* -- small things ------------------------------------------------------------------------------------------------ */

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int64_t thread_id(void)
{
    return (int64_t)syscall(SYS_gettid);
}

const char *call_name(api_call call)
{
    static const char *const names[] = {
#define X(name) #name,
        DRIVER_CALLS(X) NCCL_CALLS(X)
#undef X
    };
    return names[call];
}

/* Not malloc: tests count and fail the allocations of what they test. */
void *keep(size_t bytes)
{
    bytes = (bytes + 15) / 16 * 16;
    if (chunks == NULL || chunks->bytes - chunks->used < bytes) {
        size_t size = bytes + sizeof(chunk) > CHUNK_BYTES ? bytes + sizeof(chunk) : CHUNK_BYTES;
        chunk *fresh = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fresh == MAP_FAILED) {
            fprintf(stderr, "stand-in: out of memory\n");
            abort();
        }
        *fresh = (chunk){.next = chunks, .bytes = size, .used = (sizeof(chunk) + 15) / 16 * 16};
        chunks = fresh;
    }
    void *out = (char *)chunks + chunks->used;
    chunks->used += bytes;
    return out;
}

int64_t draw(int64_t bound)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (int64_t)(z % (uint64_t)bound);
}

int chance(int64_t percent)
{
    return draw(100) < percent;
}

/* Beyond MAX_LINES only counts. */
static void add_line(line_list *list, const char *text)
{
    if (list->count++ >= MAX_LINES)
        return;
    size_t bytes = strlen(text) + 1;
    line *added = keep(sizeof *added + bytes);
    memcpy(added->text, text, bytes);
    if (list->last != NULL)
        list->last->next = added;
    else
        list->first = added;
    list->last = added;
}

static const char *this_thread(void)
{
    if (thread_name[0] == '\0')
        snprintf(thread_name, sizeof thread_name, "thread %lld", (long long)thread_id());
    return thread_name;
}

void misuse(api_call call, const char *format, ...)
{
    char text[512];
    int used = snprintf(text, sizeof text, "%s on %s: ", call_name(call), on_worker ? "a device" : this_thread());
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, arguments);
    va_end(arguments);
    add_line(&misuses, text);
}

int called_from_device(api_call call)
{
    if (!on_worker)
        return 0;
    LOCKED;
    misuse(call, "called by a function that a device runs");
    return 1;
}

int call_fails(api_call call)
{
    const char *wanted = machine.failing_call;
    if (wanted[0] == '\0' || strncmp(call_name(call), wanted, strlen(wanted)) != 0 || machine.failing_in-- > 0)
        return 0;
    machine.failing_call[0] = '\0';
    return 1;
}

int is_damaged(api_call call, size_t bytes, stand_in_damage_kind kind)
{
    const char *wanted = machine.damaged_call;
    return wanted[0] != '\0' && machine.damage == kind && strncmp(call_name(call), wanted, strlen(wanted)) == 0 &&
           (machine.damaged_bytes < 0 || (size_t)machine.damaged_bytes == bytes);
}

void damage(api_call call, char *arrived, size_t bytes)
{
    if (is_damaged(call, bytes, STAND_IN_CORRUPT))
        arrived[bytes - 1] ^= 1;
    if (is_damaged(call, bytes, STAND_IN_SHORT))
        memset(arrived + bytes / 2, 0xFF, bytes - bytes / 2);
}

/* -- what can run ------------------------------------------------------------------------------------------------ */

int reached(marker point)
{
    if (point.board != NULL)
        return __atomic_load_n(&point.board->ended[point.issue % BOARD_RECORDS], __ATOMIC_ACQUIRE) >= point.issue;
    return point.stream == NULL || point.stream->ended >= point.issue;
}

static int64_t oldest_issue(const struct CUstream_st *stream)
{
    return stream->first != NULL ? stream->first->issue : INT64_MAX;
}

/* Streams by device: the null stream and those in this list. */
typedef struct stream_entry {
    struct stream_entry *next;
    struct CUstream_st stream;
} stream_entry;
static stream_entry *streams;

CUstream new_stream(int32_t device_index)
{
    device *of = &machine.devices[device_index];
    stream_entry *entry = keep(sizeof *entry);
    entry->stream = (struct CUstream_st){
        .alive = 1, .number = ++machine.num_streams, .device = device_index, .queue = of->next_queue};
    of->next_queue = (of->next_queue + 1) % (int32_t)machine.options.queues;
    entry->next = streams;
    streams = entry;
    machine.counters.live_streams++;
    return &entry->stream;
}

int device_reached(int32_t device_index, int64_t issue)
{
    if (oldest_issue(&machine.devices[device_index].null_stream) <= issue)
        return 0;
    for (stream_entry *entry = streams; entry != NULL; entry = entry->next)
        if (entry->stream.device == device_index && oldest_issue(&entry->stream) <= issue)
            return 0;
    return 1;
}

void check_no_group_in_progress(api_call call, const struct CUstream_st *stream)
{
    if (stream->groups_in_progress > 0)
        misuse(call, "on stream %d while an NCCL group that uses it is in progress: its operations come later",
               stream->number);
}

static int can_run(operation *op)
{
    switch (op->kind) {
    case WAIT_EVENT: return reached(op->awaited);
    case HOLD: return machine.num_releases > op->value;
    case NCCL: return nccl_can_run(op);
    case COPY: return !is_damaged(op->call, op->destination.bytes, STAND_IN_STALLED);
    default: return 1;
    }
}

/* Calls `visit` for the head of each queue that holds work. */
static void each_head(void (*visit)(operation *head, void *argument), void *argument)
{
    for (int32_t d = 0; d < MAX_DEVICES; d++)
        for (uint32_t busy = machine.devices[d].busy; busy != 0; busy &= busy - 1)
            visit(machine.devices[d].queues[__builtin_ctz(busy)].first, argument);
}

typedef struct {
    int32_t blocked, delayed, ready;
    int32_t polled; /* among the blocked, those that wait for another process's record */
    operation *ready_heads[MAX_DEVICES * MAX_QUEUES];
} choice;

static void sort_head(operation *head, void *argument)
{
    choice *found = argument;
    if (!can_run(head)) {
        found->blocked++;
        found->polled += head->kind == WAIT_EVENT && head->awaited.board != NULL;
    } else if (head->delay > 0) {
        found->delayed++;
    } else {
        found->ready_heads[found->ready++] = head;
    }
}

static void age_head(operation *head, void *unused)
{
    (void)unused;
    if (head->delay > 0 && can_run(head))
        head->delay--;
}

static int nothing_can_run(void)
{
    choice found = {0};
    each_head(sort_head, &found);
    return !worker_busy && found.ready + found.delayed == 0;
}

/* Mostly short, now and then long enough for hosts to run far ahead. */
static int32_t draw_delay(void)
{
    if (!chance(DELAY_PERCENT))
        return 0;
    return (int32_t)(1 + draw(chance(80) ? 4 : chance(70) ? 40 : 400));
}

/* -- waiting ----------------------------------------------------------------------------------------------------- */

static void wake_done(void)
{
    for (waiter *w = waiters; w != NULL; w = w->next)
        if (w->broken || w->done(w->argument))
            pthread_cond_signal(&w->wake);
}

static void declare_deadlock(api_call call)
{
    misuse(call, "waits, and nothing can run");
    for (waiter *w = waiters; w != NULL; w = w->next)
        w->broken = 1;
    wake_done();
}

int wait_until(api_call call, int (*done)(const void *argument), const void *argument)
{
    if (done(argument))
        return 1;
    waiter me = {.next = waiters, .done = done, .argument = argument};
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&me.wake, &attributes);
    pthread_condattr_destroy(&attributes);
    waiters = &me;
    if (machine.runnable_changed)
        pthread_cond_signal(&work_came);
    wake_done();
    const int64_t began = now_ns();
    while (!me.broken && !done(argument)) {
        int64_t deadline = (last_progress_ns > began ? last_progress_ns : began) + WAIT_LIMIT_NS;
        if (!worker_busy && now_ns() >= deadline) {
            declare_deadlock(call);
            break;
        }
        if (worker_busy) /* a host function may take its time */
            deadline = now_ns() + WAIT_LIMIT_NS;
        struct timespec until = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
        pthread_cond_timedwait(&me.wake, &lock, &until);
    }
    waiter **link = &waiters;
    while (*link != &me)
        link = &(*link)->next;
    *link = me.next;
    pthread_cond_destroy(&me.wake);
    return done(argument);
}

typedef struct {
    int32_t device_index;
    int64_t issue;
} device_point;

static int point_reached(const void *argument)
{
    const device_point *point = argument;
    return device_reached(point->device_index, point->issue);
}

int synchronise_device(api_call call, int32_t device_index)
{
    machine.counters.synchronisations++;
    return wait_until(call, point_reached, &(device_point){device_index, machine.issued});
}

int injection_drawn(void)
{
    return machine.options.injected_sync_permille > 0 && draw(1000) < machine.options.injected_sync_permille;
}

pthread_mutex_t *take_lock(void)
{
    atomic_fetch_add(&callers, 1);
    pthread_mutex_lock(&lock);
    atomic_fetch_sub(&callers, 1);
    if (machine.generation == 0)
        set_defaults();
    return &lock;
}

void release_lock(pthread_mutex_t **held)
{
    if (waiters != NULL)
        wake_done();
    if (machine.runnable_changed && worker_idle)
        pthread_cond_signal(&work_came);
    pthread_mutex_unlock(*held);
}

/* -- execution --------------------------------------------------------------------------------------------------- */

operation *new_operation(operation_kind kind, api_call call)
{
    operation *op = free_operations;
    if (op != NULL)
        free_operations = op->next_in_queue;
    else
        op = keep(sizeof *op);
    *op = (operation){.kind = kind, .call = call};
    return op;
}

void enqueue(operation *op, CUstream stream)
{
    device *of = &machine.devices[stream->device];
    op->stream = stream;
    op->issue = ++machine.issued;
    op->delay = draw_delay();
    if (stream->first == NULL)
        stream->first = op;
    else
        stream->last->next_in_stream = op;
    stream->last = op;
    if (of->queues[stream->queue].first == NULL)
        of->queues[stream->queue].first = op;
    else
        of->queues[stream->queue].last->next_in_queue = op;
    of->queues[stream->queue].last = op;
    of->busy |= 1u << stream->queue;
    machine.runnable_changed = 1;
    if (!worker_runs) {
        worker_runs = 1;
        worker_stops = 0;
        if (pthread_create(&worker, NULL, work, NULL) != 0) {
            fprintf(stderr, "stand-in: no thread for the devices\n");
            abort();
        }
    }
}

static void end(operation *op)
{
    CUstream stream = op->stream;
    device *of = &machine.devices[stream->device];
    of->queues[stream->queue].first = op->next_in_queue;
    if (op->next_in_queue == NULL)
        of->busy &= ~(1u << stream->queue);
    stream->first = op->next_in_stream;
    stream->ended = op->issue;
    op->next_in_queue = free_operations;
    free_operations = op;
}

/* 1 once it has ended. */
static int copy(operation *op)
{
    span *to = &op->destination, *from = &op->source;
    if (to->bytes == 0 || !span_lives(op, to) || !span_lives(op, from))
        return 1;
    int apart = to->address + to->bytes <= from->address || from->address + to->bytes <= to->address;
    if (!op->started && apart) {
        memset(to->address, 0xFF, to->bytes);
        op->started = 1;
        op->delay = draw_delay();
        return 0;
    }
    memmove(to->address, from->address, to->bytes);
    damage(op->call, to->address, to->bytes);
    return 1;
}

static void end_record(event_board *board, int64_t record)
{
    int64_t *ended = &board->ended[record % BOARD_RECORDS], before = __atomic_load_n(ended, __ATOMIC_ACQUIRE);
    while (before < record &&
           !__atomic_compare_exchange_n(ended, &before, record, 0, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE))
        ;
}

static void execute(operation *op)
{
    switch (op->kind) {
    case COPY:
        if (!copy(op))
            return;
        op->stream->clock += (int64_t)op->destination.bytes * machine.options.copy_ns_per_kib / 1024;
        break;
    case RECORD:
        if (op->event->board != NULL)
            end_record(op->event->board, op->record);
        else if (op->event->recorded.issue == op->issue)
            op->event->reached_ns = now_ns();
        *op->clock = op->stream->clock;
        break;
    case WAIT_EVENT:
        if (op->awaited.clock != NULL && *op->awaited.clock > op->stream->clock)
            op->stream->clock = *op->awaited.clock;
        break;
    case HOLD: break;
    case HOST_FUNCTION:
        worker_busy = 1;
        pthread_mutex_unlock(&lock);
        op->function(op->argument);
        pthread_mutex_lock(&lock);
        worker_busy = 0;
        break;
    case WORK: op->stream->clock += op->value; break;
    case NCCL:
        if (!nccl_run(op)) {
            op->delay = draw_delay();
            return;
        }
        break;
    }
    end(op);
}

static void *work(void *unused)
{
    on_worker = 1;
    uint32_t passes = 0; /* in which nothing was executed */
    pthread_mutex_lock(&lock);
    while (!worker_stops) {
        choice found = {0};
        machine.runnable_changed = 0;
        if (!machine.options.paused)
            each_head(sort_head, &found);
        if (found.delayed > 0)
            each_head(age_head, NULL);
        if (found.ready > 0) {
            execute(found.ready_heads[draw(found.ready)]);
            last_progress_ns = now_ns();
            wake_done();
        }
        if (found.ready + found.delayed > 0) {
            pthread_mutex_unlock(&lock);
            if (atomic_load(&callers) > 0 || (found.ready == 0 && ++passes % 16 == 0))
                sched_yield();
            pthread_mutex_lock(&lock);
            continue;
        }
        worker_idle = 1;
        if (found.polled > 0) {
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_nsec += POLL_NS;
            until.tv_sec += until.tv_nsec / 1000000000;
            until.tv_nsec %= 1000000000;
            pthread_cond_timedwait(&work_came, &lock, &until);
        } else {
            pthread_cond_wait(&work_came, &lock);
        }
        worker_idle = 0;
    }
    pthread_mutex_unlock(&lock);
    return unused;
}

/* -- control ----------------------------------------------------------------------------------------------------- */

static void set_defaults(void)
{
    machine.generation++;
#define X(name, initial, least, greatest) machine.options.name = initial;
    OPTIONS(X)
#undef X
    for (int32_t d = 0; d < MAX_DEVICES; d++) {
        machine.devices[d].context.device = d;
        machine.devices[d].null_stream = (struct CUstream_st){.alive = 1, .device = d};
        machine.devices[d].next_queue = 1 % (int32_t)machine.options.queues;
    }
}

static void sleep_shortly(void)
{
    pthread_mutex_unlock(&lock);
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    pthread_mutex_lock(&lock);
}

void stand_in_reset(uint64_t seed)
{
    LOCKED;
    while (worker_busy)
        sleep_shortly();
    driver_reset();
    nccl_reset();
    while (chunks != NULL) {
        chunk *next = chunks->next;
        munmap(chunks, chunks->bytes);
        chunks = next;
    }
    free_operations = NULL;
    streams = NULL;
    misuses = (line_list){0};
    int64_t generation = machine.generation;
    machine = (machine_state){.generation = generation};
    random_state = seed;
    set_defaults();
}

/* Joins the worker thread, if it ends within so many seconds. */
static int end_worker(time_t seconds)
{
    pthread_mutex_lock(&lock);
    int runs = worker_runs;
    worker_runs = 0;
    worker_stops = 1;
    pthread_cond_signal(&work_came);
    pthread_mutex_unlock(&lock);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    return !runs || pthread_timedjoin_np(worker, NULL, &until) == 0;
}

/* Not for ever: a host function may wait for what is gone by now, such as an interpreter. */
__attribute__((destructor)) static void stop_at_exit(void)
{
    if (end_worker(1))
        stand_in_reset(0);
}

int stand_in_set(const char *option, int64_t value)
{
    LOCKED;
    machine.runnable_changed = 1;
#define X(name, initial, least, greatest)                                                                              \
    if (strcmp(option, #name) == 0) {                                                                                  \
        if (value < (least) || value > (greatest))                                                                     \
            return -1;                                                                                                 \
        machine.options.name = value;                                                                                  \
        for (int32_t d = 0; d < MAX_DEVICES; d++)                                                                      \
            machine.devices[d].next_queue %= (int32_t)machine.options.queues;                                          \
        return 0;                                                                                                      \
    }
    OPTIONS(X)
#undef X
    return -1;
}

int64_t stand_in_count(const char *counter)
{
    LOCKED;
#define X(name)                                                                                                        \
    if (strcmp(counter, #name) == 0)                                                                                   \
        return machine.counters.name;
    COUNTERS(X)
#undef X
    for (int call = 0; call < NUM_CALLS; call++)
        if (strcmp(counter, call_name((api_call)call)) == 0)
            return machine.calls[call];
    return -1;
}

void stand_in_fail_call(const char *function, int64_t index, int32_t result)
{
    LOCKED;
    snprintf(machine.failing_call, sizeof machine.failing_call, "%s", function);
    machine.failing_in = index;
    machine.failing_result = result;
}

void stand_in_damage(const char *function, int64_t bytes, stand_in_damage_kind kind)
{
    LOCKED;
    snprintf(machine.damaged_call, sizeof machine.damaged_call, "%s", function);
    machine.damaged_bytes = bytes;
    machine.damage = kind;
    machine.runnable_changed = 1;
}

int64_t stand_in_clock(void *stream)
{
    LOCKED;
    CUresult error;
    CUstream found = find_stream(CALL_cuLaunchHostFunc, stream, &error);
    return found == NULL ? -1 : found->clock;
}

static int enqueue_control(operation_kind kind, void *stream, int64_t value)
{
    CUresult error;
    CUstream found = find_stream(CALL_cuLaunchHostFunc, stream, &error);
    if (found == NULL)
        return (int)error;
    operation *op = new_operation(kind, CALL_cuLaunchHostFunc);
    op->value = value;
    enqueue(op, found);
    return 0;
}

int stand_in_work(void *stream, int64_t ns)
{
    LOCKED;
    return enqueue_control(WORK, stream, ns);
}

void stand_in_hold(void *stream)
{
    LOCKED;
    (void)enqueue_control(HOLD, stream, machine.num_releases);
}

void stand_in_release(void)
{
    LOCKED;
    machine.num_releases++;
    machine.runnable_changed = 1;
}

int64_t stand_in_misuses(void)
{
    LOCKED;
    return misuses.count;
}

const char *stand_in_misuse(int64_t index)
{
    LOCKED;
    line *found = misuses.first;
    for (; found != NULL && index > 0; index--)
        found = found->next;
    return found != NULL ? found->text : NULL;
}

static int holds_work(void)
{
    choice found = {0};
    each_head(sort_head, &found);
    return found.blocked + found.delayed + found.ready > 0 || worker_busy;
}

int stand_in_drain(int64_t patience_ms)
{
    LOCKED;
    int64_t stuck_since = 0;
    while (holds_work()) {
        if (!nothing_can_run())
            stuck_since = 0;
        else if (stuck_since == 0)
            stuck_since = now_ns();
        else if (now_ns() - stuck_since >= patience_ms * 1000000)
            return 1;
        if (machine.runnable_changed)
            pthread_cond_signal(&work_came);
        sleep_shortly();
    }
    return 0;
}
