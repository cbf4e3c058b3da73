/* Does the tier keep to its memory, whatever fails, and give its room to the next load? */
#include "../../csrc/run/file_tier.h"
#include "check.h"

#include <stdlib.h>
#include <string.h>

static s1f_group *group;
static const char *const directory = "/tmp";

enum { ROOM = 3 * S1F_TIER_ALIGNMENT };

static void fill(char *bytes, int64_t count, int seed)
{
    for (int64_t i = 0; i < count; i++)
        bytes[i] = (char)(i * 7 + seed);
}

/* Sends three parts out and brings them back. */
static s1f_status go_and_come(s1f_tier *tier, int64_t number, char *rooms)
{
    static const int64_t sizes[3] = {5000, 1, 2 * S1F_TIER_ALIGNMENT};
    char *sent = malloc(ROOM);
    s1f_tier_part parts[3];
    if (sent == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the test");
    fill(sent, ROOM, (int)number);
    for (int i = 0; i < 3; i++)
        parts[i] = (s1f_tier_part){sent + i, sizes[i]};
    s1f_status status = s1f_tier_out(tier, number, parts, 3);
    if (status == S1F_OK)
        status = s1f_tier_wait(tier, group, number);
    for (int i = 0; i < 3; i++)
        parts[i].data = rooms + (size_t)i * ROOM;
    if (status == S1F_OK)
        status = s1f_tier_in(tier, number, parts, 3);
    if (status == S1F_OK)
        status = s1f_tier_wait(tier, group, number);
    for (int i = 0; i < 3 && status == S1F_OK; i++)
        CHECK(memcmp(parts[i].data, sent + i, (size_t)sizes[i]) == 0);
    if (status != S1F_OK)
        s1f_tier_reset(tier);
    free(sent);
    return status;
}

static s1f_status whole_life(void)
{
    s1f_tier *tier = NULL;
    void *rooms = NULL;
    s1f_status status = s1f_file_tier_create(directory, &tier);
    CHECK((status == S1F_OK) == (tier != NULL));
    if (status == S1F_OK && posix_memalign(&rooms, S1F_TIER_ALIGNMENT, 3 * ROOM) != 0)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for the test");
    for (int64_t number = 0; number < 3 && status == S1F_OK; number++)
        status = go_and_come(tier, number, rooms);
    if (status == S1F_OK) {
        s1f_tier_facts facts;
        s1f_tier_get_facts(tier, &facts);
        CHECK(facts.room_bytes == 5 * S1F_TIER_ALIGNMENT);
        CHECK(facts.bytes_out == 3 * (5001 + 2 * S1F_TIER_ALIGNMENT) && facts.bytes_in == facts.bytes_out);
        CHECK(facts.ns_out > 0 && facts.ns_in > 0);
    }
    s1f_tier_free(tier);
    free(rooms);
    return status;
}

static void test_failing_allocations(void)
{
    int64_t n = 0;
    for (;; n++) {
        fail_allocation(n);
        s1f_status status = whole_life();
        if (fail_allocation(-1) <= n)
            break;
        if (status == S1F_ERR_SYSTEM) /* the thread's own memory, in a static program */
            CHECK_STATUS(status, S1F_ERR_SYSTEM, "no thread for the offload directory");
        else
            CHECK_STATUS(status, S1F_ERR_MEMORY, "no memory for");
    }
    CHECK(n >= 8);
}

/* A tier that is freed, or reset, while transfers wait touches no memory afterwards. */
static void test_reset_while_busy(void)
{
    enum { PARTS = 64, BYTES = 1 << 20 };
    s1f_tier *tier = NULL;
    s1f_tier_part parts[PARTS];
    CHECK_STATUS(s1f_file_tier_create(directory, &tier), S1F_OK, "");
    for (int round = 0; round < 3; round++) {
        char *bytes = calloc(1, BYTES);
        for (int i = 0; i < PARTS; i++)
            parts[i] = (s1f_tier_part){bytes, BYTES};
        for (int64_t number = 0; number < 4; number++)
            CHECK_STATUS(s1f_tier_out(tier, number, parts, PARTS), S1F_OK, "");
        s1f_tier_reset(tier);
        free(bytes);
        CHECK_STATUS(s1f_tier_wait(tier, group, 3), S1F_ERR_STATE, "load 3 is not out");
    }
    s1f_tier_free(tier);
}

int main(void)
{
    void *block = NULL;
    size_t bytes = s1f_group_block_bytes(1);
    CHECK(posix_memalign(&block, 64, bytes) == 0);
    memset(block, 0, bytes);
    CHECK_STATUS(s1f_group_create(block, 1, 0, NULL, NULL, &group), S1F_OK, "");
    test_failing_allocations();
    test_reset_while_busy();
    s1f_group_free(group);
    free(block);
    return check_failures();
}
