/* watchdog.c - a thread that looks at every end's oldest transfer, 50 times a second. */
#include "device_end.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct timespec WATCH_PERIOD = {.tv_nsec = 20 * 1000 * 1000};

/* Looks at an end's oldest transfer. */
static void watch_transfer(s1f_watchdog *watchdog, s1f_device_end *end, int64_t now)
{
    int64_t before = end->seen_over;
    while (end->seen_over < end->started && s1f_device_end_is_over(end, end->seen_over))
        end->seen_over++;
    if (end->seen_over != before) {
        watchdog->progress_ns = now;
        end->seen_started = 0;
    }
    if (end->seen_over == end->started) {
        if (end->started > 0) /* an error of the GPU comes with the answer for any event */
            s1f_device_end_has(end, end->transfers[end->started - 1].done, end->started - 1);
        return;
    }
    if (!end->seen_started) {
        if (!s1f_device_end_has(end, end->transfers[end->seen_over].started, end->seen_over))
            return;
        end->seen_started = 1;
        end->stuck_since_ns = now;
    }
    int64_t since = end->stuck_since_ns > watchdog->progress_ns ? end->stuck_since_ns : watchdog->progress_ns;
    if (now - since <= s1f_group_timeout_ns(watchdog->group))
        return;
    char why[96];
    snprintf(why, sizeof why, "its transfer has been under way for %.1f s", (double)(now - since) * 1e-9);
    s1f_device_end_fail(end, end->seen_over, 1, why);
}

static void watch_end(s1f_watchdog *watchdog, s1f_device_end *end, int64_t now)
{
    int64_t oldest = end->seen_over < end->started ? end->seen_over : -1;
    s1f_wait_reason reason = s1f_edge_reason(&end->head, "watching", oldest);
    if (end->is_aborted || s1f_group_check_peer(watchdog->group, &reason) != S1F_OK || end->proof_ns != 0)
        return;
    watch_transfer(watchdog, end, now); /* first: NCCL does not say what is wrong with the GPU */
    int found = end->mover->settled == NULL ? 1 : end->mover->settled(end);
    if (found < 0)
        s1f_device_end_fail(end, reason.sequence, found == -2, s1f_last_error());
}

static void end_step(s1f_watchdog *watchdog)
{
    int64_t failed = s1f_group_failed_step(watchdog->group);
    if (failed > 0)
        s1f_group_spoil(watchdog->group, failed);
    for (s1f_device_end *end = watchdog->ends; end != NULL; end = end->next)
        s1f_device_end_abort(end);
}

int s1f_watchdog_is_idle_by(s1f_watchdog *watchdog, int64_t until_ns)
{
    s1f_device *device = watchdog->device;
    int idle = !device->is_stuck && s1f_device_is_idle_by(device, device->compute, until_ns) == 1;
    for (const s1f_device_end *end = watchdog->ends; idle && end != NULL; end = end->next)
        idle = s1f_device_is_idle_by(device, end->stream, until_ns) == 1;
    device->is_stuck = !idle;
    return idle;
}

static void *watch(void *context)
{
    s1f_watchdog *watchdog = context;
    int relaxed = S1F_CU_CAPTURE_RELAXED; /* so that its queries are allowed while somebody captures a graph */
    if (s1f_device_enter(watchdog->device) != S1F_OK)
        return NULL;
    watchdog->device->driver->capture_mode(&relaxed);
    pthread_mutex_lock(&watchdog->lock);
    while (!watchdog->is_ending) {
        int64_t now = s1f_now_ns();
        for (s1f_device_end *end = watchdog->ends; end != NULL; end = end->next)
            watch_end(watchdog, end, now);
        if (watchdog->ends != NULL && s1f_group_has_failed(watchdog->group))
            end_step(watchdog);
        pthread_mutex_unlock(&watchdog->lock);
        nanosleep(&WATCH_PERIOD, NULL);
        pthread_mutex_lock(&watchdog->lock);
    }
    pthread_mutex_unlock(&watchdog->lock);
    s1f_device_leave(watchdog->device, S1F_OK);
    return NULL;
}

s1f_status s1f_watchdog_create(s1f_group *group, s1f_device *device, int64_t proof_ns, s1f_watchdog **out)
{
    s1f_watchdog *watchdog = calloc(1, sizeof *watchdog);
    if (watchdog == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a watchdog");
    watchdog->group = group;
    watchdog->device = device;
    watchdog->proof_ns = proof_ns;
    pthread_mutex_init(&watchdog->lock, NULL);
    int error = pthread_create(&watchdog->thread, NULL, watch, watchdog);
    if (error != 0) {
        pthread_mutex_destroy(&watchdog->lock);
        free(watchdog);
        return s1f_fail(S1F_ERR_SYSTEM, "no thread for the watchdog: %s", strerror(error));
    }
    *out = watchdog;
    return S1F_OK;
}

void s1f_watchdog_free(s1f_watchdog *watchdog)
{
    if (watchdog == NULL)
        return;
    pthread_mutex_lock(&watchdog->lock);
    watchdog->is_ending = 1;
    pthread_mutex_unlock(&watchdog->lock);
    pthread_join(watchdog->thread, NULL);
    pthread_mutex_destroy(&watchdog->lock);
    free(watchdog);
}
