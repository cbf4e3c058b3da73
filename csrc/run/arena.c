/* arena.c - edges whose places lie in mapped memory: loopback and shm, and c10d by a relay.
 *
 * The arena starts with two positions, each (step, messages so far) in one 64-bit number that only one end raises:
 *   granted  by the receiver: messages up to here may be written
 *   sent     by the sender:   messages up to here have been written
 * A step's positions are above those of every earlier step, so an aborted step leaves nothing to clean up. */
#include "arena.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    PAGE_BYTES = 65536, /* places start on multiples of it: a multiple of every page size we meet */
    CACHE_LINE = 64
};

#define S1F_MORE_SPACE "lift its limit: ulimit -v unlimited"

typedef struct { /* the first page */
    _Alignas(CACHE_LINE) s1f_signal granted;
    _Alignas(CACHE_LINE) s1f_signal sent;
    _Atomic int32_t num_open;
} arena_control;

_Static_assert(sizeof(arena_control) <= PAGE_BYTES, "the control words fit");

typedef struct {
    s1f_edge_end head;
    arena_control *control;
    int64_t bytes, stride; /* of the arena; of one place */
    int32_t num_places;    /* 0 before the first step */
    int64_t posted, sent;  /* messages of this step */
    s1f_relay *relay;      /* NULL: both ends map the arena */
    void *context;
    uint64_t *busy_until; /* sender with a relay, per place: position from which it may be written again */
} arena_end;

static uint64_t position_of(const arena_end *arena, int64_t messages)
{
    return ((uint64_t)s1f_group_step(arena->head.group) << 32) + (uint64_t)messages;
}

static char *place_memory(const arena_end *arena, int32_t place)
{
    return (char *)arena->control + PAGE_BYTES + place * arena->stride;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

s1f_status s1f_mapping_create(int fd, int64_t bytes, s1f_mapping **out)
{
    if (bytes < 1)
        return s1f_fail(S1F_ERR_ARG, "cannot map %lld bytes", (long long)bytes);
    s1f_mapping *mapping = malloc(sizeof *mapping);
    if (mapping == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a mapping");
    mapping->bytes = bytes;
    mapping->memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapping->memory == MAP_FAILED) {
        int error = errno;
        free(mapping);
        if (error == ENOMEM)
            return s1f_fail(S1F_ERR_MEMORY,
                            "no address space for a mapping of %lld bytes; lift its limit: ulimit -v unlimited",
                            (long long)bytes);
        return s1f_fail(S1F_ERR_SYSTEM, "mapping %lld bytes of shared memory: %s", (long long)bytes, strerror(error));
    }
    *out = mapping;
    return S1F_OK;
}

void s1f_mapping_free(s1f_mapping *mapping)
{
    if (mapping == NULL)
        return;
    munmap(mapping->memory, (size_t)mapping->bytes);
    free(mapping);
}

/* -- steps ------------------------------------------------------------------------------------------------------- */

static s1f_status wait_for_place(arena_end *arena, uint64_t position, int64_t sequence)
{
    s1f_wait_reason reason = s1f_edge_reason(&arena->head, "waiting for a free place for", sequence);
    return s1f_group_wait(arena->head.group, &arena->control->granted, position, &reason);
}

s1f_status s1f_relay_flush(s1f_edge_end *end)
{
    arena_end *arena = (arena_end *)end;
    for (int32_t place = 0; arena->busy_until != NULL && place < arena->num_places; place++)
        S1F_TRY(wait_for_place(arena, arena->busy_until[place], -1));
    return S1F_OK;
}

/* Cuts the arena into places. The side that owns them (the receiver; with a relay, each) gives the old pages back. */
static s1f_status set_places(arena_end *arena, int32_t num_places)
{
    int64_t stride = (arena->bytes - PAGE_BYTES) / num_places / PAGE_BYTES * PAGE_BYTES;
    if (stride < PAGE_BYTES)
        return s1f_fail(S1F_ERR_ARG,
                        "%s: %d places do not fit in the edge's %lld bytes of address space; " S1F_MORE_SPACE,
                        arena->head.text, (int)num_places, (long long)arena->bytes);
    if (arena->relay != NULL && !arena->head.is_receiver) {
        S1F_TRY(s1f_relay_flush(&arena->head));
        uint64_t *busy_until = calloc((size_t)num_places, sizeof *busy_until);
        if (busy_until == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "%s: no memory for %d places", arena->head.text, (int)num_places);
        free(arena->busy_until);
        arena->busy_until = busy_until;
    }
    if (arena->num_places != 0 && (arena->head.is_receiver || arena->relay != NULL) &&
        madvise((char *)arena->control + PAGE_BYTES, (size_t)(arena->bytes - PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES,
                MADV_REMOVE) != 0)
        return s1f_fail(S1F_ERR_SYSTEM, "%s: giving pages back: %s", arena->head.text, strerror(errno));
    arena->num_places = num_places;
    arena->stride = stride;
    return S1F_OK;
}

static s1f_status arena_begin_step(s1f_edge_end *end, int32_t num_places)
{
    arena_end *arena = (arena_end *)end;
    if (num_places != arena->num_places)
        S1F_TRY(set_places(arena, num_places));
    arena->posted = arena->sent = 0;
    if (arena->relay == NULL)
        return S1F_OK;
    return arena->relay(arena->context, "begin_step", s1f_group_step(end->group), NULL,
                        arena->stride - S1F_HEADER_BYTES);
}

static s1f_status check_turn(const arena_end *arena, int32_t is_receiver, int64_t sequence, int64_t next, int32_t place)
{
    if (arena->head.is_receiver != is_receiver)
        return s1f_fail(S1F_ERR_STATE, "this is the %s's end", arena->head.is_receiver ? "receiver" : "sender");
    if (sequence != next || place < 0 || place >= arena->num_places)
        return s1f_fail(S1F_ERR_STATE, "in place %d of %d, but message %lld is next", (int)place,
                        (int)arena->num_places, (long long)next);
    return S1F_OK;
}

/* -- messages ---------------------------------------------------------------------------------------------------- */

static s1f_status arena_post(s1f_edge_end *end, int64_t sequence, int32_t place)
{
    arena_end *arena = (arena_end *)end;
    S1F_TRY(check_turn(arena, 1, sequence, arena->posted, place));
#ifdef S1F_POISON /* whoever reads a place that is free again meets NaN */
    s1f_message *last = (s1f_message *)place_memory(arena, place);
    if (!last->on_device && last->payload_bytes >= 0 && last->payload_bytes <= arena->stride - S1F_HEADER_BYTES)
        memset((char *)last + S1F_HEADER_BYTES, 0xFF, (size_t)last->payload_bytes);
#endif
    arena->posted++;
    if (arena->relay != NULL)
        return arena->relay(arena->context, "post", sequence, place_memory(arena, place), 0);
    s1f_signal_raise(&arena->control->granted, position_of(arena, arena->posted));
    return S1F_OK;
}

static int arena_has_come(s1f_edge_end *end, int64_t sequence)
{
    arena_end *arena = (arena_end *)end;
    return atomic_load_explicit(&arena->control->sent.position, memory_order_acquire) >=
           position_of(arena, sequence + 1);
}

static s1f_status arena_wait(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message **message,
                             const void **payload)
{
    arena_end *arena = (arena_end *)end;
    if (!end->is_receiver || sequence < 0 || sequence >= arena->posted || place < 0 || place >= arena->num_places)
        return s1f_fail(S1F_ERR_STATE, "waited for in place %d of %d without having been posted", (int)place,
                        (int)arena->num_places);
    s1f_wait_reason reason = s1f_edge_reason(end, "waiting for", sequence);
    S1F_TRY(s1f_group_wait(end->group, &arena->control->sent, position_of(arena, sequence + 1), &reason));
    *message = (const s1f_message *)place_memory(arena, place);
    *payload = place_memory(arena, place) + S1F_HEADER_BYTES;
    if (!(*message)->on_device && (*message)->payload_bytes > arena->stride - S1F_HEADER_BYTES)
        return s1f_fail(S1F_ERR_STATE, "its header says %lld bytes, its place holds %lld",
                        (long long)(*message)->payload_bytes, (long long)(arena->stride - S1F_HEADER_BYTES));
    return S1F_OK;
}

static void fill_place(char *place, const s1f_message *message, const void *const *tensors)
{
    memcpy(place, message, offsetof(s1f_message, tensors) + (size_t)message->num_tensors * sizeof message->tensors[0]);
    for (int32_t i = 0; i < message->num_tensors && !message->on_device; i++)
        if (message->tensors[i].bytes > 0)
            memcpy(place + S1F_HEADER_BYTES + message->tensors[i].offset, tensors[i],
                   (size_t)message->tensors[i].bytes);
}

static s1f_status arena_send(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message *message,
                             const void *const *tensors)
{
    arena_end *arena = (arena_end *)end;
    S1F_TRY(check_turn(arena, 0, sequence, arena->sent, place));
    int64_t payload_bytes = message->on_device ? 0 : message->payload_bytes;
    if (payload_bytes > arena->stride - S1F_HEADER_BYTES)
        return s1f_fail(S1F_ERR_ARG,
                        "%lld bytes do not fit in a place of %lld (%d places in the edge's "
                        "%lld bytes of address space); " S1F_MORE_SPACE,
                        (long long)payload_bytes, (long long)(arena->stride - S1F_HEADER_BYTES), (int)arena->num_places,
                        (long long)arena->bytes);
    uint64_t position = position_of(arena, sequence + 1);
    S1F_TRY(wait_for_place(arena, arena->relay == NULL ? position : arena->busy_until[place], sequence));
    fill_place(place_memory(arena, place), message, tensors);
    arena->sent++;
    if (arena->relay != NULL) {
        arena->busy_until[place] = position;
        return arena->relay(arena->context, "send", sequence, place_memory(arena, place), payload_bytes);
    }
    s1f_signal_raise(&arena->control->sent, position);
    return S1F_OK;
}

void *s1f_arena_place(s1f_edge_end *end, int32_t place)
{
    return place_memory((arena_end *)end, place);
}

s1f_status s1f_arena_wait_posted(s1f_edge_end *end, int64_t sequence)
{
    arena_end *arena = (arena_end *)end;
    return wait_for_place(arena, position_of(arena, sequence + 1), sequence);
}

_Atomic int32_t *s1f_arena_num_open(s1f_edge_end *end)
{
    return &((arena_end *)end)->control->num_open;
}

void s1f_relay_done(s1f_edge_end *end, int64_t step, int64_t sequence)
{
    arena_end *arena = (arena_end *)end;
    uint64_t position = ((uint64_t)step << 32) + (uint64_t)sequence + 1;
    s1f_signal_raise(end->is_receiver ? &arena->control->sent : &arena->control->granted, position);
}

static void arena_free(s1f_edge_end *end)
{
    arena_end *arena = (arena_end *)end;
    free(arena->busy_until);
    free(arena);
}

static const s1f_transport arena_transport = {
    .begin_step = arena_begin_step,
    .post = arena_post,
    .has_come = arena_has_come,
    .wait = arena_wait,
    .send = arena_send,
    .free = arena_free,
};

/* -- creation ---------------------------------------------------------------------------------------------------- */

s1f_status s1f_arena_end_create(s1f_group *group, void *memory, int64_t bytes, int hangup_fd, int32_t peer_rank,
                                int32_t is_receiver, const char *text, s1f_edge_end **out)
{
    if (bytes < 2 * PAGE_BYTES)
        return s1f_fail(S1F_ERR_ARG, "%s: an arena needs at least %d bytes, not %lld", text, 2 * PAGE_BYTES,
                        (long long)bytes);
    arena_end *arena = calloc(1, sizeof *arena);
    if (arena == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "%s: no memory for an end", text);
    arena->head.transport = &arena_transport;
    arena->head.group = group;
    arena->head.peer_rank = peer_rank;
    arena->head.is_receiver = is_receiver;
    arena->head.hangup_fd = hangup_fd;
    strncpy(arena->head.text, text, sizeof arena->head.text - 1);
    arena->control = memory;
    arena->bytes = bytes;
    *out = &arena->head;
    return S1F_OK;
}

void s1f_arena_use_relay(s1f_edge_end *end, s1f_relay *relay, void *context)
{
    ((arena_end *)end)->relay = relay;
    ((arena_end *)end)->context = context;
}
