/* fuzz_group.c - does a rank read the block that all ranks share within its bounds, whatever another wrote there? */
#include "fuzz.h"

#include "run/group.h"

enum { NUM_RANKS = 3, MOST_EDITS = 12 };

/* Overwrites the same place of the block with the same byte many times, or a word once. */
static void corrupt(fuzz_input *in, char *block, size_t block_bytes)
{
    size_t at = take_bits(in, 2) % block_bytes;
    uint8_t how = (uint8_t)take_bits(in, 1);
    if (how % 4 == 0) {
        size_t count = take_bits(in, 2);
        memset(block + at, how, count < block_bytes - at ? count : block_bytes - at);
        return;
    }
    int64_t value = take_int64(in);
    size_t bytes = how % 4 == 1 ? 4 : 8;
    at = at / bytes * bytes;
    if (at + bytes <= block_bytes)
        memcpy(block + at, &value, bytes);
}

static void read_failure(const s1f_group *group)
{
    s1f_failure failure;
    s1f_status status = s1f_group_check(group);
    REQUIRE(status == S1F_OK ? !s1f_group_has_failed(group) : status == S1F_ERR_PEER);
    s1f_group_failure(group, &failure);
    REQUIRE(status != S1F_OK || failure.rank == -1);
    REQUIRE(memchr(failure.unit, '\0', sizeof failure.unit) != NULL);
    REQUIRE(memchr(failure.edge, '\0', sizeof failure.edge) != NULL);
    REQUIRE(memchr(failure.text, '\0', sizeof failure.text) != NULL);
}

/* Waits for nothing that comes. It takes 20 ms. */
static void wait_in_vain(s1f_group *group)
{
    s1f_signal never = {0};
    s1f_wait_reason reason = {.peer_rank = 1, .hangup_fd = -1, .purpose = "waiting for", .edge = "edge"};
    s1f_status status = s1f_group_wait(group, &never, 1, &reason);
    REQUIRE((status == S1F_ERR_PEER || status == S1F_ERR_TIMEOUT) && s1f_last_error()[0] != '\0');
    read_failure(group);
}

/* All have come. What they gave is taken, or refused. */
static void gather(s1f_group *group, char *block, int32_t recovering)
{
    static char out[NUM_RANKS * S1F_GATHER_BYTES];
    size_t mailboxes = s1f_group_block_bytes(0) + NUM_RANKS * 64,
           mailbox = s1f_group_block_bytes(1) - s1f_group_block_bytes(0) - 64, contribution = 64 + S1F_GATHER_BYTES;
    /* A mailbox has what it is, and then room for two rounds of one epoch and two of the next one. */
    s1f_failure failure;
    if (s1f_group_passed(group, 1, &failure)) {
        REQUIRE(memchr(failure.unit, '\0', sizeof failure.unit) != NULL);
        REQUIRE(memchr(failure.text, '\0', sizeof failure.text) != NULL);
    }
    for (size_t rank = 1; rank < NUM_RANKS; rank++) {
        char *theirs = block + mailboxes + rank * mailbox;
        atomic_store(&((s1f_signal *)theirs)->position, UINT64_C(1) << 32 | 1);
        atomic_store((_Atomic uint64_t *)(theirs + mailbox - 2 * contribution), UINT64_C(1) << 32 | 1);
    }
    int32_t out_bytes[NUM_RANKS];
    s1f_status status = s1f_group_gather(group, 1, 0, recovering, "12345678", 8, NULL, out, out_bytes);
    if (status != S1F_OK)
        REQUIRE(s1f_last_error()[0] != '\0');
    else
        for (int32_t rank = 0; rank < NUM_RANKS; rank++)
            REQUIRE(out_bytes[rank] >= 0 && out_bytes[rank] <= S1F_GATHER_BYTES);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    size_t block_bytes = s1f_group_block_bytes(NUM_RANKS);
    char *block = aligned_alloc(64, block_bytes);
    memset(block, 0, block_bytes);
    s1f_group *groups[NUM_RANKS];
    for (int32_t rank = 0; rank < NUM_RANKS; rank++) {
        REQUIRE(s1f_group_create(block, NUM_RANKS, rank, &groups[rank]) == S1F_OK);
        s1f_group_set_limits(groups[rank], 0, 0);
        s1f_group_begin_step(groups[rank], 1);
    }
    uint8_t flags = (uint8_t)take_bits(&in, 1);
    static int waits_left = 200; /* they take 20 ms each */
    int waits = take_bits(&in, 2) == 0xfffe && waits_left-- > 0;
    if (flags & 1)
        s1f_group_fail(groups[2], 2, "it failed");
    int32_t num_edits = take_below(&in, MOST_EDITS);
    for (int32_t i = 0; i < num_edits; i++)
        corrupt(&in, block, block_bytes);

    if (flags & 4)
        s1f_group_set_progress(groups[0], 1, "F0.0", take_int64(&in), take_int32(&in));
    read_failure(groups[0]);
    for (int32_t rank = 0; rank < NUM_RANKS; rank++) {
        s1f_progress found = s1f_group_get_progress(groups[0], rank);
        REQUIRE(memchr(found.what, '\0', sizeof found.what) != NULL && found.age_ns >= -1);
        REQUIRE(found.waiting_for >= -1 && found.waiting_for < NUM_RANKS);
    }
    if (waits)
        wait_in_vain(groups[0]);
    gather(groups[0], block, flags >> 1 & 1);
    for (int32_t rank = 0; rank < NUM_RANKS; rank++)
        s1f_group_free(groups[rank]);
    free(block);
    return 0;
}
