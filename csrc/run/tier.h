/* tier.h - a second place for what units have saved: a file that one thread writes and reads beside the units.
 *
 * The file has no name, so that nothing of it stays when the process ends, however it ends. Where the file system takes
 * it, transfers go past the page cache; elsewhere its pages are given up at once. What moves is a *load*: the parts of
 * one unit, under a number of the caller's. A load is out from s1f_tier_out to the s1f_tier_wait that follows
 * s1f_tier_in; its room in the file then serves another one, so the file is as large as most loads that are out at
 * once.
 *
 * Transfers take place one after the other in the order in which they were asked for. Memory of a part is the tier's
 * from the call until the wait has returned, or the tier was reset. Used by one thread. */
#ifndef S1F_TIER_H
#define S1F_TIER_H

#include "group.h"

typedef struct s1f_tier s1f_tier;

typedef struct {
    void *
        data; /* on the way out: only read. On the way in: on a multiple of S1F_TIER_ALIGNMENT, and what lies behind the
                   part up to the next multiple is overwritten as well */
    int64_t bytes;
} s1f_tier_part;
enum { S1F_TIER_ALIGNMENT = 4096 }; /* bytes: of transfers that go past the page cache */

typedef struct {
    char file_system[24]; /* "ext4" */
    int32_t is_direct;    /* transfers go past the page cache */
    int32_t is_memory;    /* the file system lies in memory */
    int64_t file_bytes;
    int64_t bytes_out, bytes_in; /* of all transfers that have ended well */
    int64_t ns_out, ns_in;       /* that these took, without the time in which they waited for others */
} s1f_tier_facts;

/* Makes the file in this directory, tries one block of it, and starts the thread. S1F_ERR_SYSTEM names directory and
 * cause. *out is owned by the caller and untouched on error. */
s1f_status s1f_tier_create(const char *directory, s1f_tier **out);
/* Ends the thread, after the transfer that runs. NULL is fine; a forked process leaves the tier as it is. */
void s1f_tier_free(s1f_tier *tier);
void s1f_tier_get_facts(s1f_tier *tier, s1f_tier_facts *out);

/* Begins to write the load, or to read it back into parts of the same sizes. S1F_ERR_STATE: the number is out already,
 * or it is not, or nobody has waited for it; S1F_ERR_ARG: sizes differ; S1F_ERR_MEMORY. */
s1f_status s1f_tier_out(s1f_tier *tier, int64_t load, const s1f_tier_part *parts, int32_t num_parts);
s1f_status s1f_tier_in(s1f_tier *tier, int64_t load, const s1f_tier_part *parts, int32_t num_parts);
/* Waits for what was asked last of the load. S1F_ERR_SYSTEM where this or an earlier transfer has failed: what, where,
 * and what to do. Ends as every wait of the group does where another rank fails (S1F_ERR_PEER), or on a signal. */
s1f_status s1f_tier_wait(s1f_tier *tier, s1f_group *group, int64_t load);
/* Forgets all loads and a failure. Returns when no memory of theirs is touched any more. */
void s1f_tier_reset(s1f_tier *tier);

#endif
