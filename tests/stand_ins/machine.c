/* machine.c - see machine.h and, for what it means, stand_in.h. */
#include "machine.h"

#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { KEPT_BYTES = 1 << 28, POLL_NS = 100000, DELAY_PERCENT = 50, MAX_CALLS = 64, MAX_LINES = 64, LINE_BYTES = 256 };
static const int64_t WAIT_LIMIT_NS = INT64_C(10) * 1000 * 1000 * 1000, STOPPED_NS = 200 * 1000 * 1000;
static const char UNITS[] = "stand_in_synchronise"; /* which goes on where a test has stopped a stream */

machine_state machine;

static pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP; /* held for less than a microsecond */
static pthread_cond_t work_came = PTHREAD_COND_INITIALIZER, work_ended = PTHREAD_COND_INITIALIZER;
static pthread_t worker;
static int worker_runs, worker_stops, worker_busy; /* busy: in a host function or a slow copy, without the lock */
static _Atomic int callers;                        /* hosts that are at the lock: the worker lets them in */
static uint64_t random_state;
static int64_t last_progress_ns;
static char *kept; /* what keep() gives: KEPT_BYTES, of which pages are used as they are touched */
static size_t kept_used;
static int64_t num_misuses;
static char misuses[MAX_LINES][LINE_BYTES];
static struct {
    api_call name;
    int64_t count;
} calls[MAX_CALLS];

static void *work(void *unused);

/* -- small things ------------------------------------------------------------------------------------------------ */

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Gives up the lock until the condition is signalled, but not for longer than so. */
static void wait_a_while(pthread_cond_t *condition, int64_t ns)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ns;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(condition, &lock, &until);
}

/* Not malloc: tests count and fail the allocations of what they test. */
void *keep(size_t bytes)
{
    if (kept == NULL)
        kept = mmap(NULL, KEPT_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (kept == MAP_FAILED || kept_used + bytes > KEPT_BYTES) {
        fprintf(stderr, "stand-in: out of memory\n");
        abort();
    }
    void *out = kept + kept_used;
    kept_used += (bytes + 15) / 16 * 16;
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
void misuse(api_call call, const char *format, ...)
{
    if (num_misuses++ >= MAX_LINES)
        return;
    char *text = misuses[num_misuses - 1];
    int used = snprintf(text, LINE_BYTES, "%s: ", call);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, LINE_BYTES - (size_t)used, format, arguments);
    va_end(arguments);
}

void count_call(api_call call)
{
    size_t i = 0;
    while (i + 1 < MAX_CALLS && calls[i].name != NULL && strcmp(calls[i].name, call) != 0)
        i++;
    calls[i].name = call;
    calls[i].count++;
}

static int begins_with(api_call call, const char *wanted)
{
    return wanted[0] != '\0' && strncmp(call, wanted, strlen(wanted)) == 0;
}

/* Counts queries; contexts, texts of errors and threads are used as before. */
static int gpu_has_failed(api_call call)
{
    int32_t index = begins_with(call, "cu") ? current_device() : -1;
    int64_t *in = index < 0 ? NULL : &machine.devices[index].asserts_in;
    if (in == NULL || *in == 0 || begins_with(call, "cuCtx") || begins_with(call, "cuGet") || begins_with(call, "cuTh"))
        return 0;
    if (*in > 0 && strstr(call, "Query") != NULL && --*in == 0)
        *in = -1;
    return *in < 0;
}

int call_fails(api_call call)
{
    if (gpu_has_failed(call)) {
        machine.failing_result = CUDA_ERROR_ASSERT;
        return 1;
    }
    if (!begins_with(call, machine.failing_call))
        return 0;
    if (machine.failing_in == 0)
        machine.failing_call[0] = '\0';
    return machine.failing_in <= 0 || machine.failing_in-- < 0;
}

int is_damaged(api_call call, size_t bytes, stand_in_damage_kind kind)
{
    return machine.damage == kind && begins_with(call, machine.damaged_call) &&
           (machine.damaged_bytes < 0 || (size_t)machine.damaged_bytes == bytes);
}

int is_stopped(void)
{
    int stopped = machine.damage == STAND_IN_STALLED && machine.damaged_call[0] != '\0';
    for (int32_t d = 0; d < MAX_DEVICES; d++)
        stopped |= machine.devices[d].asserts_in < 0;
    return stopped;
}

void check_frees(api_call call, int32_t device_index)
{
    if (is_stopped() && machine.devices[device_index].busy != 0)
        misuse(call, "it waits for work of device %d that does not end", device_index);
}

void damage(api_call call, char *arrived, size_t bytes)
{
    if (is_damaged(call, bytes, STAND_IN_CORRUPT))
        arrived[bytes - 1] ^= 1;
}

/* -- what can run ------------------------------------------------------------------------------------------------ */

void look_again(void)
{
    pthread_cond_signal(&work_came);
}

int reached(const event_board *board, int64_t record)
{
    return __atomic_load_n(&board->ended[record % BOARD_RECORDS], __ATOMIC_ACQUIRE) >= record;
}

/* Each queue executes in order of issue. */
int device_reached(int32_t device_index, int64_t issue)
{
    const device *of = &machine.devices[device_index];
    for (uint32_t busy = of->busy; busy != 0; busy &= busy - 1)
        if (of->queues[__builtin_ctz(busy)].first->issue <= issue)
            return 0;
    return 1;
}

static int can_run(operation *op)
{
    if (machine.devices[op->stream->device].asserts_in < 0)
        return 0;
    switch (op->kind) {
    case WAIT_EVENT: return reached(op->event->board, op->record);
    case NCCL: return nccl_can_run(op);
    default: return !is_damaged(op->call, op->destination.bytes, STAND_IN_STALLED);
    }
}

typedef struct { /* heads of the queues that hold work */
    int32_t blocked, delayed, ready;
    int32_t foreign; /* among the blocked, those that wait for another process's record */
    operation *ready_heads[MAX_DEVICES * MAX_QUEUES];
} choice;

static void look_at_heads(choice *found)
{
    for (int32_t d = 0; d < MAX_DEVICES; d++)
        for (uint32_t busy = machine.devices[d].busy; busy != 0; busy &= busy - 1) {
            operation *head = machine.devices[d].queues[__builtin_ctz(busy)].first;
            if (!can_run(head)) {
                found->blocked++;
                found->foreign += head->kind == WAIT_EVENT && head->event->is_foreign;
            } else if (head->delay > 0) {
                head->delay--;
                found->delayed++;
            } else {
                found->ready_heads[found->ready++] = head;
            }
        }
}

/* Mostly short, now and then long enough for hosts to run far ahead. */
static int32_t draw_delay(void)
{
    if (!chance(DELAY_PERCENT))
        return 0;
    return (int32_t)(1 + draw(chance(80) ? 4 : chance(70) ? 40 : 400));
}

/* -- waiting ----------------------------------------------------------------------------------------------------- */

static int is_stuck_since(int64_t began, int64_t patience_ns)
{
    return !worker_busy && now_ns() - (last_progress_ns > began ? last_progress_ns : began) >= patience_ns;
}

/* stream NULL: for the device. */
static int wait_for(api_call call, const struct CUstream_st *stream, int32_t device_index, int64_t issue)
{
    machine.counters.synchronisations++;
    for (const int64_t began = now_ns();; wait_a_while(&work_ended, POLL_NS * 1000)) {
        if (stream != NULL ? stream->ended >= issue : device_reached(device_index, issue))
            return 1;
        if (is_stuck_since(began, is_stopped() ? STOPPED_NS : WAIT_LIMIT_NS))
            break;
    }
    if (call != UNITS || !is_stopped())
        misuse(call, "waits, and nothing can run");
    return 0;
}

int wait_for_stream(api_call call, const struct CUstream_st *stream, int64_t issue)
{
    return wait_for(call, stream, 0, issue);
}

int wait_for_device(api_call call, int32_t device_index)
{
    return wait_for(call, NULL, device_index, machine.issued);
}

int injection_drawn(void)
{
    return machine.options.injected_sync_permille > 0 && draw(1000) < machine.options.injected_sync_permille;
}

static void set_defaults(void)
{
    machine.generation++;
#define X(name, initial, least, greatest) machine.options.name = initial;
    OPTIONS(X)
#undef X
    for (int32_t d = 0; d < MAX_DEVICES; d++) {
        machine.devices[d].context.device = d;
        machine.devices[d].null_stream = (struct CUstream_st){.alive = 1, .device = d};
        machine.devices[d].next_queue = 1;
    }
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
    pthread_mutex_unlock(*held);
}

/* -- execution --------------------------------------------------------------------------------------------------- */

operation *new_operation(operation_kind kind, api_call call)
{
    operation *op = keep(sizeof *op);
    *op = (operation){.kind = kind, .call = call};
    return op;
}

void enqueue(operation *op, CUstream stream)
{
    device *of = &machine.devices[stream->device];
    op->stream = stream;
    op->issue = stream->issued = ++machine.issued;
    op->delay = draw_delay();
    if ((of->busy & 1u << stream->queue) == 0)
        of->queues[stream->queue].first = op;
    else
        of->queues[stream->queue].last->next = op;
    of->queues[stream->queue].last = op;
    of->busy |= 1u << stream->queue;
    look_again();
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
    device *of = &machine.devices[op->stream->device];
    of->queues[op->stream->queue].first = op->next;
    if (op->next == NULL)
        of->busy &= ~(1u << op->stream->queue);
    op->stream->ended = op->issue;
}

static void without_lock(void (*function)(void *argument), void *argument)
{
    worker_busy = 1;
    pthread_mutex_unlock(&lock);
    function(argument);
    pthread_mutex_lock(&lock);
    worker_busy = 0;
}

static void sleep_for(void *ns)
{
    nanosleep(&(struct timespec){.tv_sec = *(int64_t *)ns / 1000000000, .tv_nsec = *(int64_t *)ns % 1000000000}, NULL);
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
        int64_t ns = (int64_t)to->bytes * machine.options.copy_ns_per_kib / 1024;
        if (ns > 0)
            without_lock(sleep_for, &ns);
        return 0;
    }
    memmove(to->address, from->address, to->bytes);
    damage(op->call, to->address, to->bytes);
    return 1;
}

static void end_record(const operation *op)
{
    event_board *board = op->event->board;
    int64_t *ended = &board->ended[op->record % BOARD_RECORDS];
    if (*ended < op->record) /* this process alone writes it */
        __atomic_store_n(ended, op->record, __ATOMIC_RELEASE);
    if (op->record == board->recorded)
        op->event->reached_ns = now_ns();
}

static void execute(operation *op)
{
    switch (op->kind) {
    case COPY:
        if (!copy(op))
            return;
        break;
    case RECORD: end_record(op); break;
    case WAIT_EVENT: break;
    case HOST_FUNCTION: without_lock(op->function, op->argument); break;
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
    uint32_t passes = 0; /* in which nothing was executed */
    pthread_mutex_lock(&lock);
    while (!worker_stops) {
        choice found = {0};
        look_at_heads(&found);
        if (found.ready > 0) {
            execute(found.ready_heads[draw(found.ready)]);
            last_progress_ns = now_ns();
            pthread_cond_broadcast(&work_ended);
        }
        if (found.ready + found.delayed > 0) {
            pthread_mutex_unlock(&lock);
            if (atomic_load(&callers) > 0 || (found.ready == 0 && ++passes % 16 == 0))
                sched_yield();
            pthread_mutex_lock(&lock);
        } else if (found.foreign > 0) {
            wait_a_while(&work_came, POLL_NS);
        } else {
            pthread_cond_wait(&work_came, &lock);
        }
    }
    pthread_mutex_unlock(&lock);
    return unused;
}

/* -- control ----------------------------------------------------------------------------------------------------- */

void stand_in_reset(uint64_t seed)
{
    LOCKED;
    while (worker_busy)
        wait_a_while(&work_ended, POLL_NS);
    driver_reset();
    nccl_reset();
    if (kept != NULL)
        madvise(kept, (kept_used + 4095) / 4096 * 4096, MADV_DONTNEED); /* zeros again */
    kept_used = 0;
    num_misuses = 0;
    memset(calls, 0, sizeof calls);
    machine = (machine_state){.generation = machine.generation};
    random_state = seed;
    set_defaults();
}

/* Not for ever: a host function may wait for what is gone by now, such as an interpreter. */
__attribute__((destructor)) static void stop_at_exit(void)
{
    pthread_mutex_lock(&lock);
    int runs = worker_runs;
    worker_stops = 1;
    look_again();
    pthread_mutex_unlock(&lock);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    if (!runs || pthread_timedjoin_np(worker, NULL, &until) == 0)
        stand_in_reset(0);
}

int stand_in_set(const char *option, int64_t value)
{
    LOCKED;
    look_again();
#define X(name, initial, least, greatest)                                                                              \
    if (strcmp(option, #name) == 0 && value >= (least) && value <= (greatest)) {                                       \
        machine.options.name = value;                                                                                  \
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
    for (size_t i = 0; i < MAX_CALLS && calls[i].name != NULL; i++)
        if (strcmp(counter, calls[i].name) == 0)
            return calls[i].count;
    return begins_with(counter, "cu") || begins_with(counter, "nccl") ? 0 : -1;
}

void stand_in_fail_call(const char *function, int64_t index, int32_t result)
{
    LOCKED;
    snprintf(machine.failing_call, sizeof machine.failing_call, "%s", function);
    machine.failing_in = index;
    machine.failing_result = result;
}

void stand_in_assert(int32_t device_index, int64_t index)
{
    LOCKED;
    machine.devices[device_index].asserts_in = index + 1;
    look_again();
}

void stand_in_damage(const char *function, int64_t bytes, stand_in_damage_kind kind)
{
    LOCKED;
    snprintf(machine.damaged_call, sizeof machine.damaged_call, "%s", function);
    machine.damaged_bytes = bytes;
    machine.damage = kind;
    look_again();
}

void stand_in_synchronise(int32_t device_index)
{
    LOCKED;
    const struct CUstream_st *stream = &machine.devices[device_index].null_stream;
    wait_for_stream(UNITS, stream, stream->issued);
}

const char *stand_in_misuse(int64_t index)
{
    LOCKED;
    return index < num_misuses && index < MAX_LINES ? misuses[index] : NULL;
}

int stand_in_drain(int64_t patience_ms)
{
    LOCKED;
    for (const int64_t began = now_ns();; wait_a_while(&work_ended, POLL_NS)) {
        uint32_t busy = (uint32_t)worker_busy;
        for (int32_t d = 0; d < MAX_DEVICES; d++)
            busy |= machine.devices[d].busy;
        if (busy == 0 || is_stuck_since(began, patience_ms * 1000000))
            return busy != 0;
    }
}
