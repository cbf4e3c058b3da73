/* group.c - progress and failure in one block of memory; waiting. Collectives are in gather.c. */
#include "group.h"

#include "group_block.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SLICE_NS = 20 * 1000 * 1000,      /* nanoseconds between looks of a sleeping waiter */
    INTERRUPT_NS = 100 * 1000 * 1000, /* nanoseconds between questions for signals, which take the GIL */
    POLL_NS = 50 * 1000,              /* between two questions whether it is done */
    SPINS_PER_CLOCK = 32
};

int64_t s1f_now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* -- creation ---------------------------------------------------------------------------------------------------- */

size_t s1f_group_block_bytes(int32_t num_ranks)
{
    return FAILURE_BLOCK_BYTES + (size_t)num_ranks * (sizeof(progress_row) + sizeof(mailbox));
}

s1f_status s1f_group_create(void *block, int32_t num_ranks, int32_t rank, s1f_group **out)
{
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks)
        return s1f_fail(S1F_ERR_ARG, "rank %d of %d ranks", (int)rank, (int)num_ranks);
    if ((uintptr_t)block % CACHE_LINE != 0)
        return s1f_fail(S1F_ERR_ARG, "the shared block must lie on a multiple of %d bytes", (int)CACHE_LINE);
    s1f_group *group = calloc(1, sizeof *group);
    if (group == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the group of rank %d", (int)rank);
    char *memory = block;
    group->failure = (failure_block *)memory;
    group->spoiled = &group->failure->spoiled;
    group->rows = (progress_row *)(memory + FAILURE_BLOCK_BYTES);
    group->mailboxes = (mailbox *)(memory + FAILURE_BLOCK_BYTES + (size_t)num_ranks * sizeof(progress_row));
    group->num_ranks = num_ranks;
    group->rank = rank;
    group->turn = 1;
    group->timeout_ns = INT64_C(300) * 1000000000;
    group->spin_ns = 20 * 1000;
    *out = group;
    return S1F_OK;
}

void s1f_group_free(s1f_group *group)
{
    free(group);
}

void s1f_group_set_limits(s1f_group *group, int64_t timeout_ns, int64_t spin_ns)
{
    group->timeout_ns = timeout_ns;
    group->spin_ns = spin_ns;
}

int64_t s1f_group_timeout_ns(const s1f_group *group)
{
    return group->timeout_ns;
}

void s1f_group_enter(s1f_group *group, int64_t step)
{
    group->turn = step;
}

void s1f_group_begin_step(s1f_group *group, int64_t step)
{
    char what[S1F_WHAT_BYTES];
    group->step = group->turn = step;
    atomic_store(&group->mailboxes[group->rank].begun, step);
    snprintf(what, sizeof what, "the start of step %lld", (long long)step);
    s1f_group_progress(group, what);
}

s1f_status s1f_group_finish_step(s1f_group *group, int32_t last_rank, int hangup_fd)
{
    uint64_t step = (uint64_t)group->step;
    s1f_signal_raise(&group->mailboxes[group->rank].finished, step);
    s1f_wait_reason reason = {.peer_rank = last_rank,
                              .hangup_fd = hangup_fd,
                              .purpose = "waiting for",
                              .edge = "the end of the step",
                              .sequence = -1};
    return s1f_group_wait(group, &group->mailboxes[last_rank].finished, step, &reason);
}

int64_t s1f_group_step(const s1f_group *group)
{
    return group->step;
}

int32_t s1f_group_rank(const s1f_group *group)
{
    return group->rank;
}

/* -- progress ---------------------------------------------------------------------------------------------------- */

static void write_row(progress_row *row, const char *what, int64_t time_ns)
{
    uint64_t words[WHAT_WORDS] = {0};
    memcpy(words, what, strnlen(what, S1F_WHAT_BYTES - 1));
    uint32_t version = atomic_load_explicit(&row->version, memory_order_relaxed);
    atomic_store_explicit(&row->version, version + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    for (int i = 0; i < WHAT_WORDS; i++)
        atomic_store_explicit(&row->what[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&row->time_ns, time_ns, memory_order_relaxed);
    atomic_store_explicit(&row->version, version + 2, memory_order_release);
}

void s1f_group_progress(s1f_group *group, const char *what)
{
    write_row(&group->rows[group->rank], what, s1f_now_ns());
}

void s1f_group_set_progress(s1f_group *group, int32_t rank, const char *what, int64_t age_ns, int32_t waiting_for)
{
    int64_t time_ns;
    if (__builtin_sub_overflow(s1f_now_ns(), age_ns, &time_ns))
        time_ns = 0; /* as if the rank had never reported */
    write_row(&group->rows[rank], what, time_ns);
    int32_t peer = waiting_for < group->num_ranks ? waiting_for + 1 : 0; /* whoever reads it checks it */
    atomic_store_explicit(&group->rows[rank].waiting_for, peer, memory_order_relaxed);
}

s1f_progress s1f_group_get_progress(const s1f_group *group, int32_t rank)
{
    enum { TRIES = 1000 }; /* a rank killed while it writes leaves the version odd: then take what is there */
    progress_row *row = &group->rows[rank];
    uint64_t words[WHAT_WORDS];
    int64_t time_ns;
    for (int i = 0; i < TRIES; i++) {
        uint32_t version = atomic_load_explicit(&row->version, memory_order_acquire);
        for (int w = 0; w < WHAT_WORDS; w++)
            words[w] = atomic_load_explicit(&row->what[w], memory_order_relaxed);
        time_ns = atomic_load_explicit(&row->time_ns, memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (version % 2 == 0 && atomic_load_explicit(&row->version, memory_order_relaxed) == version)
            break;
    }
    s1f_progress found;
    memcpy(found.what, words, S1F_WHAT_BYTES);
    found.what[S1F_WHAT_BYTES - 1] = '\0';
    if (time_ns == 0 || __builtin_sub_overflow(s1f_now_ns(), time_ns, &found.age_ns) || found.age_ns < 0)
        found.age_ns = -1; /* a time that is still to come would let a peer be silent until then */
    int32_t peer = atomic_load_explicit(&row->waiting_for, memory_order_relaxed);
    found.waiting_for = peer >= 1 && peer <= group->num_ranks ? peer - 1 : -1;
    return found;
}

/* -- failure ----------------------------------------------------------------------------------------------------- */

/* The failure that stands, or is being written, ends this step, too. */
static void end_from(failure_block *block, int64_t step)
{
    int64_t first = atomic_load(&block->step);
    while ((first == 0 || step < first) && !atomic_compare_exchange_weak(&block->step, &first, step))
        continue;
}

int s1f_group_fail_with(s1f_group *group, const s1f_failure *failure)
{
    failure_block *block = group->failure;
    uint32_t none = FAILURE_NONE;
    int is_first = atomic_compare_exchange_strong(&block->failed, &none, FAILURE_BEING_WRITTEN);
    if (is_first) {
        block->failure = *failure;
        if (failure->step == 0 && failure->unit[0] == '\0' && failure->rank >= 0 && failure->rank < group->num_ranks)
            memcpy(block->failure.unit, s1f_group_get_progress(group, failure->rank).what, S1F_WHAT_BYTES);
    }
    end_from(block, failure->step > 0 ? failure->step : group->turn);
    if (is_first)
        atomic_store_explicit(&block->failed, FAILURE_STANDS, memory_order_release);
    return is_first;
}

s1f_failure s1f_failure_of(int32_t rank, const char *text, const char *unit, const char *edge, int64_t step)
{
    s1f_failure failure = {.rank = rank, .step = step};
    strncpy(failure.text, text, sizeof failure.text - 1);
    strncpy(failure.unit, unit, sizeof failure.unit - 1);
    strncpy(failure.edge, edge, sizeof failure.edge - 1);
    return failure;
}

void s1f_group_fail(s1f_group *group, int32_t rank, const char *text)
{
    s1f_failure failure = s1f_failure_of(rank, text, "", "", 0);
    s1f_group_fail_with(group, &failure);
}

int s1f_group_has_failed(const s1f_group *group)
{
    return atomic_load_explicit(&group->failure->failed, memory_order_acquire) == FAILURE_STANDS &&
           atomic_load(&group->failure->step) <= group->turn;
}

int64_t s1f_group_failed_step(const s1f_group *group)
{
    int64_t step = s1f_group_step(group); /* first: what stands after this is not of an earlier one */
    return s1f_group_has_failed(group) && atomic_load(&group->failure->step) <= step ? step : 0;
}

void s1f_group_failure(const s1f_group *group, s1f_failure *out)
{
    if (s1f_group_has_failed(group)) {
        *out = group->failure->failure;
        out->step = atomic_load(&group->failure->step);
        out->unit[sizeof out->unit - 1] = out->edge[sizeof out->edge - 1] = out->text[sizeof out->text - 1] = '\0';
        return;
    }
    memset(out, 0, sizeof *out);
    out->rank = -1;
}

s1f_status s1f_group_check(const s1f_group *group)
{
    if (!s1f_group_has_failed(group))
        return S1F_OK;
    s1f_failure failure;
    s1f_group_failure(group, &failure);
    if (failure.step < group->turn)
        return s1f_fail(S1F_ERR_PEER, "rank %d ended step %lld, which rank %d had left well: %s", (int)failure.rank,
                        (long long)failure.step, (int)group->rank, failure.text);
    return s1f_fail(S1F_ERR_PEER, "rank %d ended the step: %s", (int)failure.rank, failure.text);
}

void s1f_group_spoil(s1f_group *group, int64_t step)
{
    atomic_store(&group->spoiled->steps[step % S1F_SPOILED_STEPS], step);
}

int s1f_group_is_spoiled(const s1f_group *group)
{
    return atomic_load(&group->spoiled->steps[group->step % S1F_SPOILED_STEPS]) == group->step;
}

void s1f_group_share_spoiled(s1f_group *group, s1f_spoiled *spoiled)
{
    group->spoiled = spoiled;
}

/* -- steps that a rank has left ---------------------------------------------------------------------------------- */

void s1f_group_pass(s1f_group *group, int64_t step)
{
    _Atomic int64_t *passed = &group->mailboxes[group->rank].passed;
    if (atomic_load(passed) < step)
        atomic_store(passed, step);
}

void s1f_group_leave(s1f_group *group, int64_t step, const s1f_failure *failure)
{
    s1f_failure *own = &group->mailboxes[group->rank].failure;
    *own = *failure;
    own->step = step;
    s1f_group_pass(group, step); /* before the look at what stands: see clear */
    s1f_group_fail_with(group, own);
}

int s1f_group_passed(const s1f_group *group, int64_t step, s1f_failure *out)
{
    out->rank = -1;
    for (int32_t rank = 0; rank < group->num_ranks; rank++) {
        const mailbox *box = &group->mailboxes[rank];
        if (rank == group->rank || atomic_load(&box->passed) < step)
            continue;
        *out = box->failure;
        if (out->step < step) /* the peer has come to a later step */
            *out = (s1f_failure){.rank = rank};
        out->unit[sizeof out->unit - 1] = out->edge[sizeof out->edge - 1] = out->text[sizeof out->text - 1] = '\0';
        return 1;
    }
    return 0;
}

void s1f_group_clear(s1f_group *group)
{
    s1f_failure failure;
    atomic_store(&group->failure->step, 0); /* first: whoever fails from here on finds none */
    atomic_store(&group->failure->failed, FAILURE_NONE);
    /* A rank may have left this step just before, and found the failure that is forgotten now. */
    if (s1f_group_passed(group, group->turn, &failure)) {
        failure.step = group->turn;
        s1f_group_fail_with(group, &failure);
    }
}

/* -- waiting ----------------------------------------------------------------------------------------------------- */

/* The half of the position that changes within a step. Two steps may agree in it, so a sleeper may miss a wake-up; it
 * then finds the position at the end of its slice. */
static uint32_t *futex_word(s1f_signal *signal)
{
    return (uint32_t *)(void *)&signal->position + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

void s1f_signal_raise(s1f_signal *signal, uint64_t position)
{
    atomic_store(&signal->position, position); /* sequentially consistent, before the look at the sleepers */
    if (atomic_load(&signal->sleepers) != 0)
        syscall(SYS_futex, futex_word(signal), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Returns 1 if a signal handler ran. */
static int sleep_slice(s1f_signal *signal, uint64_t target)
{
    struct timespec slice = {.tv_nsec = SLICE_NS};
    int handler_ran = 0;
    atomic_fetch_add(&signal->sleepers, 1); /* before the look at the position */
    uint64_t position = atomic_load(&signal->position);
    if (position < target)
        handler_ran = syscall(SYS_futex, futex_word(signal), FUTEX_WAIT, (uint32_t)position, &slice, NULL, 0) == -1 &&
                      errno == EINTR;
    atomic_fetch_sub(&signal->sleepers, 1);
    return handler_ran;
}

static int hung_up(int fd)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLRDHUP};
    return fd >= 0 && poll(&poll_fd, 1, 0) == 1 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

static void describe(const s1f_wait_reason *reason, char *text, size_t bytes)
{
    if (reason->sequence < 0)
        snprintf(text, bytes, "%s %s", reason->purpose, reason->edge);
    else
        snprintf(text, bytes, "%s %s, message %lld", reason->purpose, reason->edge, (long long)reason->sequence);
}

/* Every rank then reads the failure that came first, so that text, rank, unit and edge belong together. */
static s1f_status fail_wait(s1f_group *group, const s1f_wait_reason *reason, s1f_status status, int32_t rank,
                            const char *text)
{
    s1f_failure failure = s1f_failure_of(rank, text, "", reason->edge, 0);
    if (!s1f_group_fail_with(group, &failure) && !reason->recovering && s1f_group_has_failed(group))
        return s1f_group_check(group);
    return s1f_fail(status, "%s", text);
}

static s1f_status fail_lost(s1f_group *group, const s1f_wait_reason *reason)
{
    char waiting[S1F_WHAT_BYTES * 4], text[S1F_FAILURE_BYTES];
    int32_t rank = reason->peer_rank;
    s1f_progress last = s1f_group_get_progress(group, rank);
    describe(reason, waiting, sizeof waiting);
    snprintf(text, sizeof text, "rank %d is gone%s%s (%s)", (int)rank, last.age_ns < 0 ? "" : ", last seen in ",
             last.what, waiting);
    if (strcmp(last.what, "close()") == 0)
        snprintf(text, sizeof text,
                 "the script of rank %d has ended, or closed its engine (%s): did its data end earlier?", (int)rank,
                 waiting);
    atomic_store(&group->failure->lost, rank + 1);
    return fail_wait(group, reason, S1F_ERR_PEER, rank, text);
}

/* The rank at the end of the chain of waits that starts at the peer, and the latest progress on that chain: stages that
 * wait in turn for one that compiles are not stuck themselves. */
static int32_t follow_waits(const s1f_group *group, int32_t peer, int64_t *latest_age_ns)
{
    int32_t rank = peer;
    *latest_age_ns = INT64_MAX;
    for (int32_t i = 0; i < group->num_ranks; i++) {
        s1f_progress found = s1f_group_get_progress(group, rank);
        if (found.age_ns >= 0 && found.age_ns < *latest_age_ns)
            *latest_age_ns = found.age_ns;
        if (found.waiting_for < 0 || found.waiting_for == group->rank)
            break;
        rank = found.waiting_for;
    }
    return rank;
}

static s1f_status check_time(s1f_group *group, const s1f_wait_reason *reason, int64_t waited_ns)
{
    int64_t latest_age_ns;
    if (waited_ns <= group->timeout_ns || reason->patient)
        return S1F_OK;
    int32_t rank = follow_waits(group, reason->peer_rank, &latest_age_ns);
    if (latest_age_ns <= group->timeout_ns)
        return S1F_OK;
    char waiting[S1F_WHAT_BYTES * 4], text[S1F_FAILURE_BYTES];
    s1f_progress last = s1f_group_get_progress(group, rank);
    describe(reason, waiting, sizeof waiting);
    double seconds = (double)(last.age_ns < 0 ? waited_ns : last.age_ns) * 1e-9;
    snprintf(text, sizeof text, "rank %d has %s%s for %.*f s (%s)", (int)rank,
             last.age_ns < 0 ? "not entered a step" : "been in ", last.age_ns < 0 ? "" : last.what, seconds < 10,
             seconds, waiting);
    return fail_wait(group, reason, S1F_ERR_TIMEOUT, rank, text);
}

typedef struct { /* the awaited: a signal, or an answer */
    s1f_signal *signal;
    uint64_t target;
    int (*is_done)(void *context);
    void *context;
} awaited;

static int is_over(const awaited *what)
{
    if (what->signal == NULL)
        return what->is_done(what->context);
    return atomic_load_explicit(&what->signal->position, memory_order_acquire) >= what->target;
}

s1f_status s1f_group_check_peer(s1f_group *group, const s1f_wait_reason *reason)
{
    return hung_up(reason->hangup_fd) ? fail_lost(group, reason) : S1F_OK;
}

static s1f_status look_around(s1f_group *group, const awaited *what, const s1f_wait_reason *reason, int64_t waited_ns)
{
    s1f_failure failure;
    int32_t lost = atomic_load(&group->failure->lost);
    if (reason->recovering && lost > 0)
        return s1f_fail(S1F_ERR_PEER, "rank %d is gone since an earlier step", (int)lost - 1);
    if (reason->recovering && s1f_group_passed(group, group->turn, &failure))
        return s1f_fail(S1F_ERR_PEER, "rank %d ended the step: %s", (int)failure.rank, failure.text);
    if (!reason->recovering)
        S1F_TRY(s1f_group_check(group));
    int64_t begun = reason->meets ? atomic_load(&group->mailboxes[reason->peer_rank].begun) : 0;
    if (!reason->recovering && begun > group->step && !is_over(what)) { /* it may have given the message before */
        char text[S1F_FAILURE_BYTES];
        snprintf(text, sizeof text, "rank %d has begun step %lld without a collective that rank %d waits in",
                 (int)reason->peer_rank, (long long)begun, (int)group->rank);
        return fail_wait(group, reason, S1F_ERR_PEER, reason->peer_rank, text);
    }
    if (hung_up(reason->hangup_fd)) /* messages that the peer sent before its end still count */
        return is_over(what) ? S1F_OK : fail_lost(group, reason);
    return check_time(group, reason, waited_ns);
}

/* Returns 1 if a signal handler ran. */
static int sleep_a_while(const awaited *what)
{
    if (what->signal != NULL)
        return sleep_slice(what->signal, what->target);
    struct timespec pause = {.tv_nsec = POLL_NS};
    return nanosleep(&pause, NULL) != 0;
}

static s1f_status sleep_until(s1f_group *group, const awaited *what, const s1f_wait_reason *reason)
{
    int64_t start = s1f_now_ns(), asked = start, looked = start;
    for (;;) {
        int handler_ran = sleep_a_while(what);
        if (is_over(what))
            return S1F_OK;
        int64_t now = s1f_now_ns();
        if (what->signal == NULL && now - looked < SLICE_NS && !handler_ran)
            continue;
        looked = now;
        S1F_TRY(look_around(group, what, reason, now - start));
        if (handler_ran || now - asked >= INTERRUPT_NS) {
            S1F_TRY(s1f_check_interrupted());
            asked = now;
        }
    }
}

static s1f_status wait_until(s1f_group *group, const awaited *what, const s1f_wait_reason *reason)
{
    if (is_over(what))
        return S1F_OK;
    if (group->spin_ns > 0) {
        int64_t end = s1f_now_ns() + group->spin_ns;
        do {
            for (int i = 0; i < SPINS_PER_CLOCK; i++) {
                if (is_over(what))
                    return S1F_OK;
                cpu_relax();
            }
        } while (s1f_now_ns() < end);
    }
    progress_row *row = &group->rows[group->rank];
    atomic_store_explicit(&row->waiting_for, reason->peer_rank + 1, memory_order_relaxed);
    s1f_status status = sleep_until(group, what, reason);
    atomic_store_explicit(&row->waiting_for, 0, memory_order_relaxed);
    return status;
}

s1f_status s1f_group_wait(s1f_group *group, s1f_signal *signal, uint64_t target, const s1f_wait_reason *reason)
{
    awaited what = {.signal = signal, .target = target};
    return wait_until(group, &what, reason);
}

s1f_status s1f_group_poll(s1f_group *group, int (*is_done)(void *context), void *context, const s1f_wait_reason *reason)
{
    awaited what = {.is_done = is_done, .context = context};
    return wait_until(group, &what, reason);
}
