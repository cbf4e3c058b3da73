/* staging_relay.c - bytes between a ring of pinned memory and a connection. */
#include "staging_relay.h"

#include "../run/group.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_MS = 20 };              /* how often a thread that waits for the peer asks whether it is to end */
static const long PAUSE_NS = 20000; /* between two looks at a word that the GPU writes */

typedef struct { /* before the bytes of a message, and in the sender's queue; behind them its position again, or 0 */
    uint64_t position;
    int64_t stride, bytes; /* a change of the stride lays the ring out anew */
    int32_t slot, reserved;
} frame;

typedef enum { RUNS, LEFT, BROKEN } relay_state; /* LEFT: the peer has, between two messages */

struct s1f_staging_relay {
    s1f_staging_ring *ring;
    int64_t ring_bytes;
    int32_t is_receiver;
    int fd;
    pthread_t thread;
    atomic_int is_ending, state;
    char why[128];             /* it is BROKEN; written before that */
    _Atomic uint64_t disowned; /* step */
    atomic_int gives_up;       /* sender: on all that it has not sent */
    int64_t disowned_since_ns;
    int64_t stride;                   /* receiver's thread: the ring's layout, */
    uint64_t last[S1F_STAGING_SLOTS]; /* and what each slot held last */
    pthread_mutex_t lock;             /* sender: of what follows */
    pthread_cond_t given;
    frame *queue;
    int64_t capacity, first, num_frames; /* those from `first` on have not been sent */
};

static int broken(s1f_staging_relay *relay, const char *why)
{
    snprintf(relay->why, sizeof relay->why, "the connection: %s", why);
    atomic_store(&relay->state, BROKEN);
    return 0;
}

typedef enum { HEAD, BODY, END } part;

/* Moves all bytes of a part of a message, or returns 0: the thread ends. */
static int move(s1f_staging_relay *relay, part which, void *bytes, int64_t num_bytes)
{
    struct pollfd ready = {.fd = relay->fd, .events = relay->is_receiver ? POLLIN : POLLOUT};
    int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (which == END ? 0 : MSG_MORE);
    int64_t done = 0;
    while (done < num_bytes) {
        if (atomic_load(&relay->is_ending))
            return 0;
        if (poll(&ready, 1, LOOK_MS) <= 0)
            continue;
        char *at = (char *)bytes + done;
        size_t rest = (size_t)(num_bytes - done);
        ssize_t moved = relay->is_receiver ? recv(relay->fd, at, rest, MSG_DONTWAIT) : send(relay->fd, at, rest, flags);
        if (moved > 0)
            done += moved;
        else if (moved == 0 && which == HEAD && done == 0) {
            atomic_store(&relay->state, LEFT);
            return 0;
        } else if (moved == 0)
            return broken(relay, "it ended within a message");
        else if (errno != EAGAIN && errno != EINTR)
            return broken(relay, strerror(errno));
    }
    return 1;
}

static int is_disowned(const s1f_staging_relay *relay, uint64_t position)
{
    uint64_t step = position >> 32, disowned = atomic_load(&relay->disowned);
    if (atomic_load(&relay->gives_up))
        return 1;
    return relay->is_receiver ? step <= disowned : step == disowned; /* it may be a step ahead of the receiver */
}

/* Returns 0 if the thread is to end. */
static int wait_for_word(s1f_staging_relay *relay, const _Atomic uint64_t *word, uint64_t position)
{
    struct timespec pause = {.tv_nsec = PAUSE_NS};
    while (atomic_load(word) < position && !is_disowned(relay, position)) {
        if (atomic_load(&relay->is_ending))
            return 0;
        nanosleep(&pause, NULL);
    }
    return 1;
}

/* An end that releases its stream raises the same word, and higher. */
static void raise_word(_Atomic uint64_t *word, uint64_t position)
{
    uint64_t found = atomic_load(word);
    while (found < position && !atomic_compare_exchange_weak(word, &found, position))
        continue;
}

static int next_frame(s1f_staging_relay *relay, frame *out)
{
    pthread_mutex_lock(&relay->lock);
    while (relay->first == relay->num_frames && !atomic_load(&relay->is_ending))
        pthread_cond_wait(&relay->given, &relay->lock);
    int found = relay->first < relay->num_frames;
    if (found)
        *out = relay->queue[relay->first];
    pthread_mutex_unlock(&relay->lock);
    return found;
}

static char *bytes_of(const s1f_staging_relay *relay, const frame *message)
{
    return (char *)(relay->ring + 1) + message->slot * message->stride;
}

static int send_message(s1f_staging_relay *relay, frame *message)
{
    if (!wait_for_word(relay, &relay->ring->written[message->slot], message->position) ||
        !move(relay, HEAD, message, sizeof *message) || !move(relay, BODY, bytes_of(relay, message), message->bytes))
        return 0;
    uint64_t end = is_disowned(relay, message->position) ? 0 : message->position;
    return move(relay, END, &end, sizeof end);
}

static void *send_all(void *context)
{
    s1f_staging_relay *relay = context;
    for (frame next; next_frame(relay, &next) && send_message(relay, &next);) {
        raise_word(&relay->ring->drained[next.slot], next.position);
        pthread_mutex_lock(&relay->lock);
        relay->first++;
        pthread_mutex_unlock(&relay->lock);
    }
    return NULL;
}

static int is_sound(const s1f_staging_relay *relay, const frame *found)
{
    return found->slot >= 0 && found->slot < S1F_STAGING_SLOTS && found->bytes > 0 && found->bytes <= found->stride &&
           found->stride <= (relay->ring_bytes - (int64_t)sizeof *relay->ring) / (found->slot + 1);
}

/* Waits until the stream has what the message's bytes will overwrite. */
static int make_room(s1f_staging_relay *relay, const frame *message)
{
    int is_new = message->stride != relay->stride;
    relay->stride = message->stride;
    for (int32_t i = is_new ? 0 : message->slot; i < (is_new ? S1F_STAGING_SLOTS : message->slot + 1); i++)
        if (!wait_for_word(relay, &relay->ring->drained[i], relay->last[i]))
            return 0;
    return 1;
}

static void *receive_all(void *context)
{
    s1f_staging_relay *relay = context;
    for (frame next; move(relay, HEAD, &next, sizeof next);) {
        uint64_t end;
        if (!is_sound(relay, &next)) {
            broken(relay, "what came does not fit in the ring");
            return NULL;
        }
        if (!make_room(relay, &next) || !move(relay, BODY, bytes_of(relay, &next), next.bytes) ||
            !move(relay, END, &end, sizeof end))
            return NULL;
        if (end != next.position)
            continue;
        relay->last[next.slot] = next.position;
        raise_word(&relay->ring->written[next.slot], next.position);
    }
    return NULL;
}

s1f_status s1f_staging_relay_send(s1f_staging_relay *relay, int32_t slot, int64_t stride, uint64_t position,
                                  int64_t bytes)
{
    s1f_status status = S1F_OK;
    pthread_mutex_lock(&relay->lock);
    if (relay->first == relay->num_frames)
        relay->first = relay->num_frames = 0;
    if (relay->num_frames == relay->capacity) {
        int64_t capacity = relay->capacity == 0 ? 64 : 2 * relay->capacity;
        frame *grown = realloc(relay->queue, (size_t)capacity * sizeof *grown);
        if (grown == NULL)
            status = s1f_fail(S1F_ERR_MEMORY, "no memory for %lld messages that wait", (long long)capacity);
        else {
            relay->queue = grown;
            relay->capacity = capacity;
        }
    }
    if (status == S1F_OK) {
        relay->queue[relay->num_frames++] =
            (frame){.position = position, .stride = stride, .bytes = bytes, .slot = slot};
        pthread_cond_signal(&relay->given);
    }
    pthread_mutex_unlock(&relay->lock);
    return status;
}

void s1f_staging_relay_disown(s1f_staging_relay *relay, int64_t step)
{
    if (atomic_load(&relay->disowned) < (uint64_t)step)
        relay->disowned_since_ns = s1f_now_ns();
    raise_word(&relay->disowned, (uint64_t)step);
}

/* Whether all messages of earlier steps than this one are on their way; or none will be. */
static int has_sent(s1f_staging_relay *relay, uint64_t step)
{
    pthread_mutex_lock(&relay->lock);
    int has = relay->first == relay->num_frames || relay->queue[relay->first].position >> 32 >= step;
    pthread_mutex_unlock(&relay->lock);
    return has || atomic_load(&relay->state) != RUNS;
}

int s1f_staging_relay_may_release(s1f_staging_relay *relay, int64_t step, int64_t patience_ns)
{
    if (atomic_load(&relay->disowned) != (uint64_t)step)
        return 0;
    if (has_sent(relay, (uint64_t)step))
        return 1;
    if (s1f_now_ns() - relay->disowned_since_ns <= patience_ns)
        return 0;
    atomic_store(&relay->gives_up, 1);
    atomic_store(&relay->is_ending, 1);
    shutdown(relay->fd, SHUT_RDWR);
    return 1;
}

int s1f_staging_relay_is_idle(s1f_staging_relay *relay)
{
    return has_sent(relay, UINT64_MAX);
}

s1f_status s1f_staging_relay_check(const s1f_staging_relay *relay, int32_t awaits)
{
    int state = atomic_load(&relay->state);
    if (atomic_load(&relay->gives_up))
        return s1f_fail(S1F_ERR_STATE, "the connection: given up, as the other rank took nothing");
    if (state == BROKEN)
        return s1f_fail(S1F_ERR_STATE, "%s", relay->why);
    if (state == LEFT && awaits)
        return s1f_fail(S1F_ERR_STATE, "the connection: the other rank has ended it");
    return S1F_OK;
}

s1f_status s1f_staging_relay_create(int fd, int32_t is_receiver, s1f_staging_ring *ring, int64_t ring_bytes,
                                    s1f_staging_relay **out)
{
    s1f_staging_relay *relay = calloc(1, sizeof *relay);
    if (relay == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a relay");
    relay->ring = ring;
    relay->ring_bytes = ring_bytes;
    relay->is_receiver = is_receiver;
    relay->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    int error = relay->fd < 0 ? errno : 0;
    pthread_mutex_init(&relay->lock, NULL);
    pthread_cond_init(&relay->given, NULL);
    if (error == 0 &&
        (error = pthread_create(&relay->thread, NULL, is_receiver ? receive_all : send_all, relay)) == 0) {
        *out = relay;
        return S1F_OK;
    }
    if (relay->fd >= 0)
        close(relay->fd);
    pthread_cond_destroy(&relay->given);
    pthread_mutex_destroy(&relay->lock);
    free(relay);
    return s1f_fail(S1F_ERR_SYSTEM, "no thread for a connection: %s", strerror(error));
}

void s1f_staging_relay_free(s1f_staging_relay *relay)
{
    if (relay == NULL)
        return;
    pthread_mutex_lock(&relay->lock);
    atomic_store(&relay->is_ending, 1);
    pthread_cond_signal(&relay->given);
    pthread_mutex_unlock(&relay->lock);
    pthread_join(relay->thread, NULL);
    close(relay->fd);
    pthread_cond_destroy(&relay->given);
    pthread_mutex_destroy(&relay->lock);
    free(relay->queue);
    free(relay);
}
