/* gather.c - small collectives in the block of memory that ranks share. */
#include "group.h"
#include "group_block.h"

#include <stdio.h>
#include <string.h>

static uint64_t position_in(uint32_t epoch, uint32_t round)
{
    return ((uint64_t)epoch << 32) + round + 1;
}

static void give(s1f_group *group, uint32_t epoch, uint32_t round, const void *data, int32_t bytes)
{
    contribution *own = &group->mailboxes[group->rank].buffers[group->buffer][round % 2];
    uint64_t position = position_in(epoch, round);
    atomic_store_explicit(&own->position, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    own->bytes = bytes;
    memcpy(own->data, data, (size_t)bytes);
    atomic_store_explicit(&own->position, position, memory_order_release);
    s1f_signal_raise(&group->mailboxes[group->rank].given, position);
}

/* Copies what a rank gave to this round. *is_there becomes 0 if it gave nothing, or writes over it already. */
static s1f_status take(s1f_group *group, int32_t rank, uint64_t position, uint32_t round, char *out, int32_t *out_bytes,
                       int *is_there)
{
    const contribution *theirs = &group->mailboxes[rank].buffers[0][round % 2];
    out_bytes[rank] = 0;
    if (atomic_load_explicit(&theirs->position, memory_order_acquire) != position)
        theirs = &group->mailboxes[rank].buffers[1][round % 2];
    *is_there = atomic_load_explicit(&theirs->position, memory_order_acquire) == position;
    if (!*is_there)
        return S1F_OK;
    int32_t bytes = theirs->bytes;
    int is_sound = bytes >= 0 && bytes <= S1F_GATHER_BYTES;
    if (is_sound)
        memcpy(out + (size_t)rank * S1F_GATHER_BYTES, theirs->data, (size_t)bytes);
    atomic_thread_fence(memory_order_acquire);
    *is_there = atomic_load_explicit(&theirs->position, memory_order_relaxed) == position;
    if (!*is_there)
        return S1F_OK;
    if (!is_sound)
        return s1f_fail(S1F_ERR_STATE, "rank %d gave %d bytes to a gather", (int)rank, (int)bytes);
    out_bytes[rank] = bytes;
    return S1F_OK;
}

/* What a rank is told that waited to meet one that will not come, or that is gone from where it waited. */
static s1f_status find_why(s1f_group *group, int32_t rank, int32_t recovering)
{
    s1f_failure failure;
    if (!recovering) {
        S1F_TRY(s1f_group_check(group));
        snprintf(failure.text, sizeof failure.text,
                 "rank %d has left the step, to meet all ranks again (waiting for all ranks to meet)", (int)rank);
        s1f_group_fail(group, rank, failure.text);
        return s1f_fail(S1F_ERR_PEER, "%s", failure.text);
    }
    if (s1f_group_passed(group, group->turn, &failure))
        return s1f_fail(S1F_ERR_PEER, "rank %d ended the step: %s", (int)failure.rank, failure.text);
    return s1f_fail(S1F_ERR_PEER, "rank %d did not meet the others", (int)rank);
}

s1f_status s1f_group_gather(s1f_group *group, uint32_t epoch, uint32_t round, int32_t recovering, const void *data,
                            int32_t bytes, const int *hangup_fds, char *out, int32_t *out_bytes)
{
    if (bytes < 0 || bytes > S1F_GATHER_BYTES)
        return s1f_fail(S1F_ERR_ARG, "a gather takes 0 to %d bytes of a rank, not %d", (int)S1F_GATHER_BYTES,
                        (int)bytes);
    if (epoch != group->epoch)
        group->buffer = !group->buffer;
    group->epoch = epoch;
    if (recovering)
        s1f_group_pass(group, (int64_t)epoch - 1);
    give(group, epoch, round, data, bytes);
    for (int32_t rank = 0; rank < group->num_ranks; rank++) {
        uint64_t position = position_in(epoch, round);
        s1f_wait_reason reason = {.peer_rank = rank,
                                  .recovering = recovering,
                                  .meets = 1,
                                  .hangup_fd = hangup_fds == NULL ? -1 : hangup_fds[rank],
                                  .purpose = "waiting for",
                                  .edge = "all ranks to meet",
                                  .sequence = -1};
        int is_there = 0;
        s1f_status status = s1f_group_wait(group, &group->mailboxes[rank].given, position, &reason);
        if (status == S1F_OK)
            status = take(group, rank, position, round, out, out_bytes, &is_there);
        if (status == S1F_OK && !is_there) /* the rank has left for a later epoch */
            status = find_why(group, rank, recovering);
        if (status != S1F_OK)
            return status;
    }
    return S1F_OK;
}
