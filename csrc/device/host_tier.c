/* host_tier.c - pinned memory, the two streams that copy, and the events between them and compute. */
#include "host_tier.h"

#include "../run/group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIECE_BYTES = 8 << 20 }; /* memory is pinned in multiples of a piece: pinning takes long */
enum { OUT, IN };
static const int64_t FAREWELL_NS = INT64_C(5) * 1000 * 1000 * 1000; /* for copies that are given up to end */

typedef struct { /* a piece of the room, pinned by one call */
    char *memory;
    int64_t offset, bytes;
} piece;

typedef struct { /* one copy of a load; events are made once and used again by every step */
    s1f_cu_event begin, end;
    int64_t number, bytes;
    int32_t way;
} copy;

struct s1f_host_tier {
    s1f_device *device;
    s1f_status (*check_host)(void *context, int64_t bytes);
    void *context;
    pid_t process;
    s1f_cu_stream streams[2];
    s1f_cu_event given; /* what compute has been given, for a stream that is to wait for it */
    piece *pieces;
    int64_t num_pieces, pinned;
    int64_t most_loads; /* out at once in this step */
    copy *copies;       /* of this step, in the order in which they were asked for */
    int64_t num_copies, capacity;
    char broken[256]; /* "" while copies work */
};

/* Another library may capture a graph meanwhile, which forbids such calls to threads that do not say that they have
 * nothing to do with it. */
static s1f_status enter(const s1f_host_tier *tier, int *mode)
{
    s1f_status status = s1f_device_enter(tier->device);
    *mode = S1F_CU_CAPTURE_RELAXED;
    if (status == S1F_OK && (status = S1F_CU(tier->device->driver, capture_mode, mode)) != S1F_OK)
        s1f_device_leave(tier->device, status);
    return status;
}

static s1f_status leave(const s1f_host_tier *tier, int mode, s1f_status status)
{
    (void)tier->device->driver->capture_mode(&mode);
    return s1f_device_leave(tier->device, status);
}

/* -- room ---------------------------------------------------------------------------------------------------------- */

static s1f_status pin(const s1f_host_tier *tier, int64_t bytes, void **memory)
{
    if (S1F_CU(tier->device->driver, host_allocate, memory, (size_t)bytes, 0) == S1F_OK)
        return S1F_OK;
    char text[256];
    snprintf(text, sizeof text, "%s", s1f_last_error());
    return s1f_fail(S1F_ERR_MEMORY,
                    "Memory(offload=HOST): GPU %d could not pin %lld bytes of host memory beside %lld: %s; move fewer "
                    "units by Memory(units=), or use shorter segments",
                    (int)tier->device->ordinal, (long long)bytes, (long long)tier->pinned, text);
}

/* Pins what is missing for a load. The first load of a step tells how much all of them need, so that a host which is
 * too small is told of before its memory is full. */
static s1f_status grow(s1f_host_tier *tier, const s1f_tier_part *parts, int32_t num_parts)
{
    if (num_parts == 0)
        return S1F_OK;
    int64_t end = parts[num_parts - 1].offset + parts[num_parts - 1].bytes, load_bytes = end - parts[0].offset;
    int64_t missing = end - tier->pinned, expected = tier->most_loads * load_bytes - tier->pinned;
    if (missing <= 0)
        return S1F_OK;
    missing = (missing + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
    if (tier->check_host != NULL)
        S1F_TRY(tier->check_host(tier->context, expected > missing ? expected : missing));
    piece *pieces = realloc(tier->pieces, ((size_t)tier->num_pieces + 1) * sizeof *pieces);
    if (pieces == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld pieces of a tier", (long long)tier->num_pieces + 1);
    tier->pieces = pieces;
    void *memory = NULL;
    S1F_TRY(pin(tier, missing, &memory));
    pieces[tier->num_pieces++] = (piece){memory, tier->pinned, missing};
    tier->pinned += missing;
    return S1F_OK;
}

static const piece *piece_at(const s1f_host_tier *tier, int64_t offset)
{
    const piece *found = tier->pieces;
    while (offset >= found->offset + found->bytes)
        found++;
    return found;
}

/* -- copies -------------------------------------------------------------------------------------------------------- */

static s1f_status next_copy(s1f_host_tier *tier, copy **out)
{
    const s1f_driver *driver = tier->device->driver;
    if (tier->num_copies == tier->capacity) {
        copy *copies = realloc(tier->copies, ((size_t)tier->capacity + 1) * sizeof *copies);
        if (copies == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld copies of a tier", (long long)tier->capacity + 1);
        tier->copies = copies;
        copies[tier->capacity++] = (copy){0};
    }
    copy *next = &tier->copies[tier->num_copies];
    if (next->begin == NULL)
        S1F_TRY(S1F_CU(driver, event_create, &next->begin, S1F_CU_EVENT_TIMED));
    if (next->end == NULL)
        S1F_TRY(S1F_CU(driver, event_create, &next->end, S1F_CU_EVENT_TIMED));
    tier->num_copies++;
    *out = next;
    return S1F_OK;
}

/* A part, in as many copies as its room has pieces. */
static s1f_status copy_part(const s1f_host_tier *tier, int32_t way, const s1f_tier_part *part)
{
    const s1f_driver *driver = tier->device->driver;
    for (int64_t done = 0; done < part->bytes;) {
        const piece *at = piece_at(tier, part->offset + done);
        int64_t left = at->offset + at->bytes - (part->offset + done), bytes = part->bytes - done;
        bytes = bytes < left ? bytes : left;
        char *host = at->memory + (part->offset + done - at->offset);
        s1f_cu_address device = (s1f_cu_address)(uintptr_t)part->data + (s1f_cu_address)done;
        if (way == OUT)
            S1F_TRY(S1F_CU(driver, copy_to_host, host, device, (size_t)bytes, tier->streams[OUT]));
        else
            S1F_TRY(S1F_CU(driver, copy_from_host, device, host, (size_t)bytes, tier->streams[IN]));
        done += bytes;
    }
    return S1F_OK;
}

static s1f_status start_copy(s1f_host_tier *tier, int32_t way, int64_t number, const s1f_tier_part *parts,
                             int32_t num_parts)
{
    const s1f_driver *driver = tier->device->driver;
    s1f_cu_stream stream = tier->streams[way];
    copy *next = NULL;
    S1F_TRY(next_copy(tier, &next));
    *next = (copy){next->begin, next->end, number, 0, way};
    S1F_TRY(S1F_CU(driver, event_record, tier->given, tier->device->compute));
    S1F_TRY(S1F_CU(driver, stream_wait_event, stream, tier->given, 0));
    S1F_TRY(S1F_CU(driver, event_record, next->begin, stream));
    for (int32_t i = 0; i < num_parts; i++) {
        S1F_TRY(copy_part(tier, way, &parts[i]));
        next->bytes += parts[i].bytes;
    }
    return S1F_CU(driver, event_record, next->end, stream);
}

/* "GPU 0: moving 4096 bytes out to pinned host memory: ..." */
static s1f_status tell(const s1f_host_tier *tier, int32_t way, int64_t bytes, s1f_status status)
{
    char text[256];
    snprintf(text, sizeof text, "%s", s1f_last_error());
    return s1f_fail(status, "Memory(offload=HOST): GPU %d: %s %lld bytes %s pinned host memory: %s",
                    (int)tier->device->ordinal, way == IN ? "bringing" : "moving", (long long)bytes,
                    way == IN ? "back from" : "out to", text);
}

s1f_status s1f_host_tier_move(s1f_host_tier *tier, int32_t is_out, int64_t number, const s1f_tier_part *parts,
                              int32_t num_parts)
{
    int64_t bytes = 0;
    int mode;
    for (int32_t i = 0; i < num_parts; i++)
        bytes += parts[i].bytes;
    S1F_TRY(enter(tier, &mode));
    s1f_status status = grow(tier, parts, num_parts);
    if (status == S1F_OK && (status = start_copy(tier, is_out ? OUT : IN, number, parts, num_parts)) != S1F_OK)
        status = tell(tier, is_out ? OUT : IN, bytes, status);
    return leave(tier, mode, status);
}

/* What was asked last of the load in this step; NULL: nothing. */
static const copy *last_copy(const s1f_host_tier *tier, int64_t number)
{
    for (int64_t i = tier->num_copies; i-- > 0;)
        if (tier->copies[i].number == number)
            return &tier->copies[i];
    return NULL;
}

s1f_status s1f_host_tier_wait(s1f_host_tier *tier, int64_t number)
{
    const copy *asked = last_copy(tier, number);
    int mode;
    if (asked == NULL)
        return s1f_fail(S1F_ERR_STATE, "load %lld does not move in this step", (long long)number);
    S1F_TRY(enter(tier, &mode));
    s1f_status status =
        leave(tier, mode, S1F_CU(tier->device->driver, stream_wait_event, tier->device->compute, asked->end, 0));
    return status == S1F_OK ? S1F_OK : tell(tier, asked->way, asked->bytes, status);
}

/* -- times --------------------------------------------------------------------------------------------------------- */

s1f_host_tier_facts s1f_host_tier_get_facts(s1f_host_tier *tier)
{
    const s1f_driver *driver = tier->device->driver;
    s1f_host_tier_facts found = {.room_bytes = tier->pinned};
    int mode;
    if (enter(tier, &mode) != S1F_OK)
        return found;
    for (int64_t i = 0; i < tier->num_copies; i++) {
        const copy *one = &tier->copies[i];
        float milliseconds = 0;
        if (driver->event_query(one->end) != S1F_CU_SUCCESS ||
            driver->event_elapsed(&milliseconds, one->begin, one->end) != S1F_CU_SUCCESS)
            continue;
        *(one->way == IN ? &found.bytes_in : &found.bytes_out) += one->bytes;
        *(one->way == IN ? &found.ns_in : &found.ns_out) += (int64_t)((double)milliseconds * 1e6);
    }
    leave(tier, mode, S1F_OK);
    return found;
}

s1f_status s1f_host_tier_came_back(const s1f_host_tier *tier, int64_t number, int64_t *ns)
{
    const copy *asked = last_copy(tier, number);
    return asked == NULL ? S1F_OK : s1f_device_time_of(tier->device, asked->end, ns);
}

/* -- steps --------------------------------------------------------------------------------------------------------- */

/* Units may compute on another stream now, which has not waited for the copies that read the room last. */
s1f_status s1f_host_tier_begin_step(s1f_host_tier *tier, int64_t most_loads)
{
    const s1f_driver *driver = tier->device->driver;
    int mode;
    if (tier->broken[0] != '\0')
        return s1f_fail(S1F_ERR_STATE,
                        "Memory(offload=HOST): copies of GPU %d have failed (%s): what waits there cannot go on; end "
                        "this process and start it again",
                        (int)tier->device->ordinal, tier->broken);
    tier->most_loads = most_loads;
    tier->num_copies = 0;
    S1F_TRY(enter(tier, &mode));
    s1f_status status = S1F_CU(driver, event_record, tier->given, tier->streams[IN]);
    if (status == S1F_OK)
        status = S1F_CU(driver, stream_wait_event, tier->streams[OUT], tier->given, 0);
    return leave(tier, mode, status);
}

/* Waits for the copies. What they use can be freed only once they have ended. */
static int is_idle(s1f_host_tier *tier)
{
    int64_t until = s1f_now_ns() + FAREWELL_NS;
    int idle = 1;
    for (int way = OUT; way <= IN && idle == 1; way++)
        if (tier->streams[way] != NULL)
            idle = s1f_device_is_idle_by(tier->device, tier->streams[way], until);
    if (idle != 1)
        snprintf(tier->broken, sizeof tier->broken, "%s", idle == 0 ? "they do not end" : s1f_last_error());
    tier->device->is_stuck |= idle != 1;
    return idle == 1;
}

void s1f_host_tier_reset(s1f_host_tier *tier)
{
    int mode;
    if (enter(tier, &mode) != S1F_OK)
        return;
    is_idle(tier);
    leave(tier, mode, S1F_OK);
}

/* -- life ---------------------------------------------------------------------------------------------------------- */

static s1f_status open_streams(s1f_host_tier *tier)
{
    const s1f_driver *driver = tier->device->driver;
    int mode;
    S1F_TRY(enter(tier, &mode));
    s1f_status status = S1F_OK;
    for (int way = OUT; way <= IN && status == S1F_OK; way++)
        status = S1F_CU(driver, stream_create, &tier->streams[way], S1F_CU_STREAM_NON_BLOCKING, 0);
    if (status == S1F_OK)
        status = S1F_CU(driver, event_create, &tier->given, S1F_CU_EVENT_DISABLE_TIMING);
    return leave(tier, mode, status);
}

static void close_streams(const s1f_host_tier *tier)
{
    const s1f_driver *driver = tier->device->driver;
    for (int way = OUT; way <= IN; way++)
        if (tier->streams[way] != NULL)
            driver->stream_destroy(tier->streams[way]);
    for (int64_t i = 0; i < tier->capacity; i++) {
        s1f_driver_event_destroy(driver, tier->copies[i].begin);
        s1f_driver_event_destroy(driver, tier->copies[i].end);
    }
    s1f_driver_event_destroy(driver, tier->given);
    for (int64_t i = 0; i < tier->num_pieces; i++)
        driver->host_free(tier->pieces[i].memory);
}

void s1f_host_tier_free(s1f_host_tier *tier)
{
    if (tier == NULL || tier->process != getpid())
        return;
    int mode, entered = enter(tier, &mode) == S1F_OK;
    if (entered && !tier->device->is_stuck && is_idle(tier))
        close_streams(tier);
    if (entered)
        leave(tier, mode, S1F_OK);
    free(tier->copies);
    free(tier->pieces);
    free(tier);
}

s1f_status s1f_host_tier_create(s1f_device *device, s1f_status (*check_host)(void *context, int64_t bytes),
                                void *context, s1f_host_tier **out)
{
    s1f_host_tier *tier = calloc(1, sizeof *tier);
    if (tier == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a tier");
    tier->device = device;
    tier->check_host = check_host;
    tier->context = context;
    tier->process = getpid();
    s1f_status status = open_streams(tier);
    if (status != S1F_OK) {
        s1f_host_tier_free(tier);
        return s1f_fail_prefixed(status, "Memory(offload=HOST): ");
    }
    *out = tier;
    return S1F_OK;
}
