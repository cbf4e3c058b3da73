/* tier.h - a second place for what units have saved: they go there beside the units, and come back.
 *
 * There are two kinds: a file (file_tier.h) for memory of the host, pinned host memory (device/host_tier.h) for that of
 * a GPU. What moves is a *load*: the parts of one unit, under a number of the caller's. A load is out from s1f_tier_out
 * to the s1f_tier_wait that follows s1f_tier_in; its room then serves another one. Each load takes the first gap that
 * holds it, so a tier is as large as most loads that are out at once, and equal steps find the same room in it.
 *
 * Transfers of each way take place one after the other in the order in which they were asked for. Memory of a part is
 * the tier's from the call until the wait has returned, or the tier was reset. Used by one thread. */
#ifndef S1F_TIER_H
#define S1F_TIER_H

#include "group.h"

typedef struct s1f_tier s1f_tier;

typedef struct {
    void *data; /* on the way out: only read. On the way in: on a multiple of the kind's alignment, and what lies
                   behind the part up to the next multiple is overwritten as well */
    int64_t bytes;
} s1f_tier_part;
enum { S1F_TIER_ALIGNMENT = 4096 }; /* bytes: of a part's room in a tier, and of memory that a file is read into */

typedef struct s1f_tier_load {
    int64_t number, offset, bytes; /* place in the tier; each part begins on a multiple of the alignment */
    uint64_t ticket;               /* the kind's ticket of the last transfer asked for */
    int32_t comes_in, is_awaited;  /* direction of the last transfer; whether s1f_tier_wait has returned for it */
    int32_t num_parts;
    struct s1f_tier_load *next;     /* by offset */
    struct s1f_tier_load *next_job; /* the kind's */
    s1f_tier_part parts[];
} s1f_tier_load;

typedef struct {
    char medium[24];   /* "ext4"; "pinned memory" */
    int32_t is_memory; /* the medium lies in memory of the host */
    int64_t room_bytes;
    int64_t bytes_out, bytes_in; /* of the step's transfers that have ended well */
    int64_t ns_out, ns_in;       /* nanoseconds of these transfers, without waiting for others */
} s1f_tier_facts;

typedef struct {       /* one static table per kind. NULL: nothing to do */
    int32_t alignment; /* of the memory into which parts come back */
    void (*get_facts)(s1f_tier *tier, s1f_tier_facts *out);
    s1f_status (*begin_step)(s1f_tier *tier, int64_t most_loads);
    /* Room for a load, up to the end of its place, and the transfer. */
    s1f_status (*begin)(s1f_tier *tier, s1f_tier_load *load);
    s1f_status (*wait)(s1f_tier *tier, s1f_group *group, s1f_tier_load *load);
    s1f_status (*came_back)(s1f_tier *tier, int64_t number, int64_t *ns);
    void (*reset)(s1f_tier *tier); /* afterwards nothing touches memory of a load */
    void (*free)(s1f_tier *tier);
} s1f_tier_kind;

struct s1f_tier { /* head of every kind's own struct */
    const s1f_tier_kind *kind;
    s1f_tier_load *loads;
    s1f_tier_facts facts; /* facts of the kind; those of a step begin with zeros */
};

/* For kinds: bytes up to the next multiple of the alignment. */
int64_t s1f_tier_rounded(int64_t bytes);

void s1f_tier_free(s1f_tier *tier); /* NULL is fine; a forked process leaves the tier as it is */
void s1f_tier_get_facts(s1f_tier *tier, s1f_tier_facts *out);

/* Before the units of a step. most_loads: that are out at once in it, for a tier that looks ahead. S1F_ERR_STATE: the
 * tier is of no use any more. */
s1f_status s1f_tier_begin_step(s1f_tier *tier, int64_t most_loads);
/* Begins to take the load out, or to bring one that is out, and was waited for, back into parts of the same sizes.
 * S1F_ERR_MEMORY: no room can be had. */
s1f_status s1f_tier_out(s1f_tier *tier, int64_t load, const s1f_tier_part *parts, int32_t num_parts);
s1f_status s1f_tier_in(s1f_tier *tier, int64_t load, const s1f_tier_part *parts, int32_t num_parts);
/* Waits for what was asked last of the load: the host, or the stream on which a GPU's units compute, which makes the
 * host wait for nothing. S1F_ERR_SYSTEM where this or an earlier transfer has failed: what, where, and what to do. A
 * host that waits ends as every wait of the group does where another rank fails (S1F_ERR_PEER), or on a signal. */
s1f_status s1f_tier_wait(s1f_tier *tier, s1f_group *group, int64_t load);
/* After a step whose times on a GPU are settled (device.h): when a load was back, on the monotonic clock; *ns is left
 * as it is where the host has waited. */
s1f_status s1f_tier_came_back(s1f_tier *tier, int64_t load, int64_t *ns);
/* Forgets all loads and a failure. Returns when no memory of theirs is touched any more. */
void s1f_tier_reset(s1f_tier *tier);

#endif
