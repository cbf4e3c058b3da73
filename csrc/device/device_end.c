/* device_end.c - the order of host, streams and events around a transfer between GPUs. */
#include "device_end.h"

#include "../core/pool.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int64_t FAREWELL_NS = INT64_C(5) * 1000 * 1000 * 1000; /* for transfers still under way at the end */

/* The GPU's context and the watchdog's lock, for calls that do not wait. */
static s1f_status enter(s1f_device_end *end)
{
    if (end->is_closed)
        return s1f_fail(S1F_ERR_STATE, "the edge is closed");
    S1F_TRY(s1f_device_enter(end->device));
    pthread_mutex_lock(&end->watchdog->lock);
    if (!end->is_aborted)
        return S1F_OK;
    pthread_mutex_unlock(&end->watchdog->lock);
    s1f_status status = s1f_device_leave(end->device, s1f_group_check(end->head.group));
    return status != S1F_OK ? status
                            : s1f_fail(S1F_ERR_STATE, "its transfers were aborted when a step failed: build the engine "
                                                      "again to go on");
}

static s1f_status leave(s1f_device_end *end, s1f_status status)
{
    pthread_mutex_unlock(&end->watchdog->lock);
    return s1f_device_leave(end->device, status);
}

void s1f_device_end_abort(s1f_device_end *end)
{
    if (!end->is_aborted && end->mover->abort != NULL) {
        end->is_aborted = 1;
        end->mover->abort(end);
    }
}

/* -- transfers ----------------------------------------------------------------------------------------------------- */

int s1f_device_end_has(s1f_device_end *end, s1f_cu_event event, int64_t sequence)
{
    const s1f_driver *driver = end->device->driver;
    s1f_cu_result found = driver->event_query(event);
    if (found != S1F_CU_SUCCESS && found != S1F_CU_ERROR_NOT_READY && end->proof_ns == 0) {
        s1f_driver_status(driver, found, "cuEventQuery");
        s1f_device_end_fail(end, sequence, 0, s1f_last_error());
    }
    return found == S1F_CU_SUCCESS;
}

int s1f_device_end_is_over(s1f_device_end *end, int64_t sequence)
{
    const s1f_transfer *transfer = &end->transfers[sequence];
    return transfer->is_over || s1f_device_end_has(end, transfer->done, sequence);
}

static void count_over(s1f_device_end *end)
{
    while (end->over < end->started && s1f_device_end_is_over(end, end->over))
        end->over++;
}

/* The next transfer, with its events. Under the lock: the watchdog reads the list. */
static s1f_status begin_transfer(s1f_device_end *end, const s1f_message *message, s1f_transfer **out)
{
    const s1f_driver *driver = end->device->driver;
    if (end->started == end->capacity)
        S1F_TRY(s1f_array_grow(&end->transfers, &end->capacity, end->capacity == 0 ? 16 : 2 * end->capacity,
                               sizeof *end->transfers, "transfers"));
    s1f_transfer *transfer = &end->transfers[end->started];
    unsigned int flags = end->head.is_receiver ? S1F_CU_EVENT_TIMED : S1F_CU_EVENT_DISABLE_TIMING;
    S1F_TRY(s1f_driver_event_make(driver, &transfer->started, S1F_CU_EVENT_DISABLE_TIMING));
    S1F_TRY(s1f_driver_event_make(driver, &transfer->done, flags));
    transfer->unit = (s1f_unit){message->pass, message->source_stage, message->microbatch, message->segment};
    transfer->is_over = message->payload_bytes == 0 || !message->on_device;
    *out = transfer;
    return S1F_OK;
}

/* The mover's last call: 1 is enqueued, 0 not yet, -1 has failed or is aborted. */
static int settled(s1f_device_end *end)
{
    pthread_mutex_lock(&end->watchdog->lock);
    int found = end->is_aborted ? -1 : end->mover->settled == NULL ? 1 : end->mover->settled(end);
    pthread_mutex_unlock(&end->watchdog->lock);
    return found;
}

s1f_status s1f_device_end_wait(s1f_device_end *end, int (*is_done)(void *end), const s1f_wait_reason *reason)
{
    if (end->proof_ns == 0)
        return s1f_group_poll(end->head.group, is_done, end, reason);
    struct timespec pause = {.tv_nsec = 20 * 1000};
    int done;
    for (int64_t began = s1f_now_ns(); (done = is_done(end)) == 0; nanosleep(&pause, NULL)) {
        S1F_TRY(s1f_group_check_peer(end->head.group, reason));
        S1F_TRY(s1f_group_check(end->head.group));
        if (settled(end) < 0)
            return S1F_ERR_STATE;
        if (s1f_now_ns() - began > end->proof_ns)
            return s1f_fail(S1F_ERR_STATE, "%s for %.1f s", reason->purpose, (double)(s1f_now_ns() - began) * 1e-9);
    }
    return done > 0 ? S1F_OK : S1F_ERR_STATE;
}

/* The unit is the message's where the rank to blame has run it, else what that rank last reported. */
void s1f_device_end_fail(s1f_device_end *end, int64_t sequence, int32_t is_peers, const char *why)
{
    s1f_group *group = end->watchdog->group;
    s1f_failure failure = {.rank = is_peers ? end->head.peer_rank : s1f_group_rank(group)};
    char unit[sizeof failure.unit], message[sizeof unit + 32] = "";
    if (sequence >= 0) {
        s1f_unit_text(end->transfers[sequence].unit, 0, unit, sizeof unit);
        snprintf(message, sizeof message, ", message %lld (%s)", (long long)sequence, unit);
        if (is_peers == end->head.is_receiver)
            memcpy(failure.unit, unit, sizeof unit);
    }
    snprintf(failure.edge, sizeof failure.edge, "%s", end->head.text);
    snprintf(failure.text, sizeof failure.text, "%s%s, %s rank %d: %s", end->head.text, message,
             end->head.is_receiver ? "from" : "to", (int)end->head.peer_rank, why);
    s1f_group_fail_with(group, &failure);
}

/* An error of the mover is everybody's: the peer of a transfer that failed would wait for it. */
static s1f_status moved(s1f_device_end *end, int32_t is_peers, s1f_status status)
{
    if (status != S1F_ERR_STATE || end->proof_ns != 0)
        return status;
    char why[256];
    snprintf(why, sizeof why, "%s", s1f_last_error());
    count_over(end); /* the oldest that is not over is what has failed, or the one that is being started */
    s1f_device_end_fail(end, end->over < end->capacity ? end->over : -1, is_peers, why);
    return s1f_group_check(end->head.group);
}

static int is_settled(void *context)
{
    return settled(context) != 0;
}

/* NCCL enqueues a call of a nonblocking communicator in a thread of its own. Until it has, no event may be recorded on
 * the stream (NCCL user guide, "Nonblocking Group Operation"). */
s1f_status s1f_device_end_settle(s1f_device_end *end, const char *purpose, int64_t sequence)
{
    if (end->mover->settled == NULL)
        return S1F_OK;
    s1f_wait_reason reason = s1f_edge_reason(&end->head, purpose, sequence);
    S1F_TRY(s1f_device_enter(end->device));
    S1F_TRY(s1f_device_leave(end->device, s1f_device_end_wait(end, is_settled, &reason)));
    S1F_TRY(enter(end));
    int found = end->mover->settled(end);
    return leave(end, found < 0 ? moved(end, found == -2, S1F_ERR_STATE) : S1F_OK);
}

/* -- the transport ------------------------------------------------------------------------------------------------- */

static s1f_status set_places(s1f_device_end *end, int32_t num_places)
{
    unsigned int flags = S1F_CU_EVENT_DISABLE_TIMING | (end->mover->post != NULL ? S1F_CU_EVENT_INTERPROCESS : 0);
    /* Places beyond those stay for a step that needs them. */
    S1F_TRY(s1f_array_grow(&end->places, &end->num_places, num_places, sizeof *end->places, "places"));
    for (int32_t i = 0; end->head.is_receiver && i < num_places; i++)
        S1F_TRY(s1f_driver_event_make(end->device->driver, &end->places[i].freed, flags));
    return S1F_OK;
}

static s1f_status device_begin_step(s1f_edge_end *head, int32_t num_places)
{
    s1f_device_end *end = (s1f_device_end *)head;
    S1F_TRY(s1f_p2p_begin_step(end->control, num_places));
    S1F_TRY(enter(end));
    s1f_status status = set_places(end, num_places);
    end->started = end->over = end->seen_over = 0;
    end->seen_started = 0;
    end->is_finished = 0;
    return leave(end, status);
}

static s1f_status device_post(s1f_edge_end *head, int64_t sequence, int32_t number)
{
    s1f_device_end *end = (s1f_device_end *)head;
    const s1f_driver *driver = end->device->driver;
    assert(number >= 0 && number < end->num_places);
    S1F_TRY(enter(end));
    s1f_device_place *place = &end->places[number];
    place->message = NULL;
    S1F_TRY(leave(end, S1F_CU(driver, event_record, place->freed, end->device->compute)));
    if (end->mover->post != NULL) {
        S1F_TRY(s1f_device_enter(end->device));
        S1F_TRY(s1f_device_leave(end->device, end->mover->post(end, number)));
    }
    return s1f_p2p_post(end->control, sequence, number);
}

/* Enqueues a send, or a receive (tensors NULL), behind what it needs. */
static s1f_status start(s1f_device_end *end, int32_t number, const s1f_message *message, const void *const *tensors)
{
    const s1f_driver *driver = end->device->driver;
    s1f_transfer *transfer = NULL;
    S1F_TRY(begin_transfer(end, message, &transfer));
    s1f_cu_event needed = tensors != NULL ? end->ready : end->places[number].freed;
    s1f_cu_event unit_start = tensors != NULL ? NULL : s1f_device_unit_start(end->device);
    if (tensors != NULL)
        S1F_TRY(S1F_CU(driver, event_record, end->ready, end->device->compute));
    S1F_TRY(S1F_CU(driver, stream_wait_event, end->stream, needed, 0));
    if (unit_start != NULL)
        S1F_TRY(S1F_CU(driver, stream_wait_event, end->stream, unit_start, 0));
    S1F_TRY(S1F_CU(driver, event_record, transfer->started, end->stream));
    return transfer->is_over ? S1F_OK : moved(end, 0, end->mover->move(end, number, message, tensors));
}

static s1f_status move_message(s1f_device_end *end, int64_t sequence, int32_t number, const s1f_message *message,
                               const void *const *tensors)
{
    S1F_TRY(enter(end));
    S1F_TRY(leave(end, start(end, number, message, tensors)));
    S1F_TRY(s1f_device_end_settle(end, tensors != NULL ? "starting to send" : "starting to receive", sequence));
    S1F_TRY(enter(end));
    s1f_status status = S1F_CU(end->device->driver, event_record, end->transfers[end->started].done, end->stream);
    if (status == S1F_OK)
        end->started++; /* the watchdog sees the transfer from here on */
    return leave(end, status);
}

static s1f_status device_receive(s1f_edge_end *head, int64_t sequence, int32_t number)
{
    s1f_device_end *end = (s1f_device_end *)head;
    assert(sequence == end->started && number >= 0 && number < end->num_places);
    s1f_device_place *place = &end->places[number];
    S1F_TRY(end->control->transport->wait(end->control, sequence, number, &place->message, &place->host_payload));
    S1F_TRY(s1f_message_check_sound(place->message, sequence));
    S1F_TRY(s1f_device_enter(end->device));
    end->largest = place->message->payload_bytes > end->largest ? place->message->payload_bytes : end->largest;
    s1f_status status = s1f_device_place_grow(end, place, place->message->payload_bytes);
    if (status == S1F_OK && !place->message->on_device)
        status = s1f_device_end_from_host(end, place);
    S1F_TRY(s1f_device_leave(end->device, status));
    return move_message(end, sequence, number, place->message, NULL);
}

static s1f_status device_wait(s1f_edge_end *head, int64_t sequence, int32_t number, const s1f_message **message,
                              const void **payload)
{
    s1f_device_end *end = (s1f_device_end *)head;
    assert(sequence < end->started); /* the program has receives */
    S1F_TRY(enter(end));
    s1f_status status = S1F_OK;
    if (!end->transfers[sequence].is_over)
        status = S1F_CU(end->device->driver, stream_wait_event, end->device->compute, end->transfers[sequence].done, 0);
    *message = end->places[number].message;
    *payload = (const void *)(uintptr_t)end->places[number].address;
    return leave(end, status);
}

static s1f_status device_arrived(s1f_edge_end *head, int64_t sequence, int64_t *ns)
{
    s1f_device_end *end = (s1f_device_end *)head;
    return s1f_device_time_of(end->device, end->transfers[sequence].done, ns);
}

/* Finds out how the message goes; it may go through host memory. */
static s1f_status prepare_send(s1f_device_end *end, int64_t sequence, int32_t number, s1f_message *message,
                               const void **tensors)
{
    message->on_device = 1;
    if (end->mover->prepare_send != NULL)
        S1F_TRY(end->mover->prepare_send(end, sequence, number, message));
    return message->on_device ? S1F_OK : s1f_device_end_to_host(end, message, tensors);
}

/* If the data needs the peer, its header goes first: the peer then starts its receive. */
static s1f_status device_send(s1f_edge_end *head, int64_t sequence, int32_t number, const s1f_message *message,
                              const void *const *tensors)
{
    s1f_device_end *end = (s1f_device_end *)head;
    s1f_message sent = *message;
    const void *data[S1F_MAX_TENSORS];
    memcpy(data, tensors, (size_t)message->num_tensors * sizeof *data);
    S1F_TRY(s1f_device_enter(end->device));
    S1F_TRY(s1f_device_leave(end->device, prepare_send(end, sequence, number, &sent, data)));
    s1f_message_seal(&sent);
    if (end->mover->is_one_sided)
        S1F_TRY(move_message(end, sequence, number, &sent, data));
    S1F_TRY(end->control->transport->send(end->control, sequence, number, &sent, data));
    return end->mover->is_one_sided ? S1F_OK : move_message(end, sequence, number, &sent, data);
}

static s1f_status device_count_sent(s1f_edge_end *head, int64_t *count)
{
    s1f_device_end *end = (s1f_device_end *)head;
    S1F_TRY(enter(end));
    count_over(end);
    *count = end->is_finished ? INT64_MAX : end->over;
    return leave(end, S1F_OK);
}

static int has_all(void *context)
{
    s1f_device_end *end = context;
    int64_t before = end->over;
    pthread_mutex_lock(&end->watchdog->lock);
    if (!end->is_aborted)
        count_over(end);
    if (end->over != before) { /* hosts may wait for the GPU as long as it works */
        char unit[32], what[S1F_WHAT_BYTES];
        s1f_unit_text(end->transfers[end->over - 1].unit, 0, unit, sizeof unit);
        snprintf(what, sizeof what, "%s on the GPU", unit);
        s1f_group_progress(end->head.group, what);
    }
    int done = end->over == end->started || end->is_aborted;
    pthread_mutex_unlock(&end->watchdog->lock);
    return done;
}

static s1f_status device_finish(s1f_edge_end *head, int32_t failed)
{
    s1f_device_end *end = (s1f_device_end *)head;
    S1F_TRY(enter(end));
    s1f_status status = S1F_OK;
    if (failed) {
        s1f_group_spoil(head->group, s1f_group_step(head->group));
        s1f_device_end_abort(end);
    }
    if (!head->is_receiver && end->started > 0) /* the stream's last transfer is the edge's */
        status = S1F_CU(end->device->driver, stream_wait_event, end->device->compute,
                        end->transfers[end->started - 1].done, 0);
    end->is_finished = 1;
    status = leave(end, status);
    if (failed || status != S1F_OK || !head->is_receiver)
        return status;
    s1f_wait_reason reason = s1f_edge_reason(head, "waiting on the GPU for", end->started - 1);
    reason.patient = 1; /* the watchdog knows which transfer is late; who waits for whom tells little here */
    S1F_TRY(s1f_device_enter(end->device));
    S1F_TRY(s1f_device_leave(end->device, s1f_group_poll(head->group, has_all, end, &reason)));
    return s1f_group_check(head->group);
}

/* -- the end ------------------------------------------------------------------------------------------------------- */

static void unlink_end(s1f_device_end *end)
{
    s1f_device_end **link = &end->watchdog->ends;
    while (*link != NULL && *link != end)
        link = &(*link)->next;
    if (*link == end)
        *link = end->next;
}

static void destroy_events(s1f_device_end *end)
{
    const s1f_driver *driver = end->device->driver;
    for (int64_t i = 0; i < end->num_places; i++) {
        s1f_driver_event_destroy(driver, end->places[i].freed);
        s1f_driver_event_destroy(driver, end->places[i].copied);
    }
    for (int64_t i = 0; i < end->capacity; i++) {
        s1f_driver_event_destroy(driver, end->transfers[i].started);
        s1f_driver_event_destroy(driver, end->transfers[i].done);
    }
    s1f_driver_event_destroy(driver, end->ready);
    if (end->stream != NULL)
        driver->stream_destroy(end->stream);
    end->started = end->over = end->capacity = 0;
}

int64_t s1f_device_end_farewell_ns(const s1f_device_end *end)
{
    int64_t limit = s1f_group_timeout_ns(end->head.group);
    return s1f_now_ns() + (limit < FAREWELL_NS ? limit : FAREWELL_NS);
}

int s1f_device_end_close(s1f_edge_end *head)
{
    s1f_device_end *end = (s1f_device_end *)head;
    if (end->is_closed)
        return !end->is_leaked;
    int entered = s1f_device_enter(end->device) == S1F_OK;
    pthread_mutex_lock(&end->watchdog->lock);
    for (s1f_device_end *each = end->watchdog->ends; each != NULL; each = each->next)
        if (each->proof_ns != 0) /* the proof has failed, and no transfer of it is waited for */
            s1f_device_end_abort(each);
    pthread_mutex_unlock(&end->watchdog->lock);
    int idle = entered && s1f_watchdog_is_idle_by(end->watchdog, s1f_device_end_farewell_ns(end));
    pthread_mutex_lock(&end->watchdog->lock);
    unlink_end(end);
    if (idle)
        s1f_device_end_abort(end);
    pthread_mutex_unlock(&end->watchdog->lock);
    end->is_leaked = !idle || (end->mover->forget != NULL && !end->mover->forget(end));
    if (!end->is_leaked)
        destroy_events(end);
    end->is_closed = 1;
    if (entered)
        s1f_device_leave(end->device, S1F_OK);
    return !end->is_leaked;
}

static void device_free(s1f_edge_end *head)
{
    s1f_device_end *end = (s1f_device_end *)head;
    if (s1f_device_end_close(head) && !end->device->is_stuck && s1f_device_enter(end->device) == S1F_OK)
        s1f_device_leave(end->device, s1f_device_end_free_places(end));
    free(end->places);
    free(end->retired);
    free(end->staging);
    free(end->transfers);
    free(end);
}

const s1f_transport s1f_device_transport = {
    .is_between_gpus = 1,
    .begin_step = device_begin_step,
    .post = device_post,
    .receive = device_receive,
    .wait = device_wait,
    .arrived = device_arrived,
    .send = device_send,
    .count_sent = device_count_sent,
    .finish = device_finish,
    .free = device_free,
};

static s1f_status init_end(s1f_device_end *end)
{
    const s1f_driver *driver = end->device->driver;
    S1F_TRY(s1f_device_enter(end->device));
    int least = 0, greatest = 0;
    driver->stream_priorities(&least, &greatest);
    s1f_status status = S1F_CU(driver, stream_create, &end->stream, S1F_CU_STREAM_NON_BLOCKING, greatest);
    if (status == S1F_OK && !end->head.is_receiver)
        status = S1F_CU(driver, event_create, &end->ready, S1F_CU_EVENT_DISABLE_TIMING);
    return s1f_device_leave(end->device, status);
}

s1f_status s1f_device_end_create(size_t bytes, const s1f_mover *mover, s1f_edge_end *control, s1f_watchdog *watchdog,
                                 s1f_device_end **out)
{
    s1f_device_end *end = calloc(1, bytes);
    if (end == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for an end of an edge");
    end->head = *control;
    end->head.transport = &s1f_device_transport;
    end->mover = mover;
    end->control = control;
    end->watchdog = watchdog;
    end->device = watchdog->device;
    s1f_status status = init_end(end);
    if (status != S1F_OK) {
        s1f_edge_end_free(&end->head);
        return status;
    }
    pthread_mutex_lock(&end->watchdog->lock);
    end->proof_ns = watchdog->proof_ns;
    end->next = watchdog->ends;
    watchdog->ends = end;
    pthread_mutex_unlock(&end->watchdog->lock);
    *out = end;
    return S1F_OK;
}
