/* test_staging_relay.c - do bytes go from ring to ring in order, and never those of a step that has failed?
 *
 * The two rings lie in this process, the connection is a pair of sockets with little room, and the test does what
 * streams would. */
#include "check.h"

#include "device/staging_relay.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 4, STRIDE = 65536, MESSAGES = 200, MOST_TENTHS_MS = 100000 };

static const int64_t RING_BYTES = (int64_t)sizeof(s1f_staging_ring) + SLOTS * STRIDE;

typedef struct { /* of each: the sender's, the receiver's */
    s1f_staging_ring *rings[2];
    s1f_staging_relay *relays[2];
    int sockets[2];
} link_of_two;

static link_of_two make_link(int with_sender)
{
    link_of_two link = {0};
    int room = 8192;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, link.sockets) == 0);
    for (int end = 0; end < 2; end++) {
        CHECK(setsockopt(link.sockets[end], SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0);
        link.rings[end] = calloc(1, (size_t)RING_BYTES);
        if (end == 1 || with_sender)
            CHECK_STATUS(
                s1f_staging_relay_create(link.sockets[end], end, link.rings[end], RING_BYTES, &link.relays[end]),
                S1F_OK, "");
    }
    return link;
}

static void free_link(link_of_two *link)
{
    for (int end = 0; end < 2; end++) {
        s1f_staging_relay_free(link->relays[end]);
        free(link->rings[end]);
        close(link->sockets[end]);
    }
}

static unsigned char *slot_of(s1f_staging_ring *ring, int slot, int64_t stride)
{
    return (unsigned char *)(ring + 1) + slot * stride;
}

static void pause_a_little(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

/* Whether a word comes to say so within ten seconds. */
static int comes(const _Atomic uint64_t *word, uint64_t position)
{
    for (int i = 0; i < MOST_TENTHS_MS && atomic_load(word) < position; i++)
        pause_a_little();
    return atomic_load(word) >= position;
}

/* Whether a word has not come to say so in 30 ms. */
static int stays_below(const _Atomic uint64_t *word, uint64_t position)
{
    for (int i = 0; i < 300; i++)
        pause_a_little();
    return atomic_load(word) < position;
}

static uint64_t at(uint64_t step, uint64_t message)
{
    return step << 32 | (message + 1);
}

static void put(link_of_two *link, int slot, int64_t stride, uint64_t position, int value, int64_t bytes)
{
    CHECK_STATUS(s1f_staging_relay_send(link->relays[0], slot, stride, position, bytes), S1F_OK, "");
    pause_a_little(); /* the stream comes to it later */
    memset(slot_of(link->rings[0], slot, stride), value, (size_t)bytes);
    atomic_store(&link->rings[0]->written[slot], position);
}

static int holds(link_of_two *link, int slot, int64_t stride, int value, int64_t bytes)
{
    const unsigned char *found = slot_of(link->rings[1], slot, stride);
    while (bytes > 0 && found[bytes - 1] == (unsigned char)value)
        bytes--;
    return bytes == 0;
}

static int64_t bytes_of(int message)
{
    return 1 + (int64_t)message * 7919 % STRIDE;
}

static void *send_messages(void *context)
{
    link_of_two *link = context;
    for (int i = 0; i < MESSAGES; i++) {
        int slot = i % SLOTS;
        CHECK(i < SLOTS || comes(&link->rings[0]->drained[slot], at(1, (uint64_t)(i - SLOTS))));
        put(link, slot, STRIDE, at(1, (uint64_t)i), i, bytes_of(i));
    }
    return NULL;
}

static void test_messages_come_in_order(void)
{
    link_of_two link = make_link(1);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, send_messages, &link) == 0);
    for (int i = 0; i < MESSAGES; i++) {
        int slot = i % SLOTS;
        CHECK(comes(&link.rings[1]->written[slot], at(1, (uint64_t)i)));
        CHECK(atomic_load(&link.rings[1]->written[slot]) == at(1, (uint64_t)i)); /* not overwritten before it is read */
        CHECK(holds(&link, slot, STRIDE, i, bytes_of(i)));
        atomic_store(&link.rings[1]->drained[slot], at(1, (uint64_t)i));
    }
    pthread_join(thread, NULL);
    CHECK(s1f_staging_relay_is_idle(link.relays[0]));
    free_link(&link);
}

/* The receiver is a step behind: it gets all of that step, and nothing of the one that fails at the sender. */
static void test_what_a_failed_step_sends_is_not_given(void)
{
    link_of_two link = make_link(1);
    put(&link, 0, STRIDE, at(1, 0), 10, STRIDE);
    CHECK(comes(&link.rings[1]->written[0], at(1, 0)));
    CHECK(comes(&link.rings[0]->drained[0], at(1, 0)));
    put(&link, 0, STRIDE, at(1, 1), 11, STRIDE); /* held back: the slot has not been drained */
    put(&link, 1, STRIDE, at(2, 0), 20, STRIDE);
    put(&link, 2, STRIDE, at(2, 1), 21, STRIDE);
    s1f_staging_relay_disown(link.relays[0], 2);
    CHECK(!s1f_staging_relay_may_release(link.relays[0], 2, INT64_MAX)); /* as message (1, 1) is still to go */
    CHECK(holds(&link, 0, STRIDE, 10, STRIDE));
    atomic_store(&link.rings[1]->drained[0], at(1, 0));
    CHECK(comes(&link.rings[1]->written[0], at(1, 1)) && holds(&link, 0, STRIDE, 11, STRIDE));
    CHECK(comes(&link.rings[0]->drained[2], at(2, 1))); /* for nothing */
    CHECK(s1f_staging_relay_may_release(link.relays[0], 2, INT64_MAX));
    put(&link, 2, STRIDE, at(3, 0), 30, 5);
    CHECK(comes(&link.rings[1]->written[2], at(3, 0)) && holds(&link, 2, STRIDE, 30, 5));
    CHECK(atomic_load(&link.rings[1]->written[1]) == 0);
    free_link(&link);
}

/* A message that is half-way when its step fails: its end says that it counts for nothing. */
static void test_a_message_that_is_cut(void)
{
    link_of_two link = make_link(1);
    put(&link, 0, STRIDE, at(1, 0), 10, 5);
    CHECK(comes(&link.rings[1]->written[0], at(1, 0)));
    CHECK(comes(&link.rings[0]->drained[0], at(1, 0)));
    put(&link, 0, STRIDE, at(2, 0), 20, STRIDE);
    CHECK(stays_below(&link.rings[0]->drained[0], at(2, 0)));
    s1f_staging_relay_disown(link.relays[0], 2);
    CHECK(s1f_staging_relay_may_release(link.relays[0], 2, INT64_MAX));
    memset(slot_of(link.rings[0], 0, STRIDE), 99, STRIDE); /* as the stream does that has been released */
    s1f_staging_relay_disown(link.relays[1], 2);           /* the receiver hears of it, and has not drained the slot */
    CHECK(comes(&link.rings[0]->drained[0], at(2, 0)));
    put(&link, 1, STRIDE, at(3, 0), 30, 5);
    CHECK(comes(&link.rings[1]->written[1], at(3, 0)) && holds(&link, 1, STRIDE, 30, 5));
    CHECK(atomic_load(&link.rings[1]->written[0]) == at(1, 0));
    free_link(&link);
}

static int says(link_of_two *link, int32_t awaits, const char *part);

/* A receiver that hangs in the step before: its sender is let go after a while, and then sends it nothing more. */
static void test_a_receiver_that_hangs(void)
{
    link_of_two link = make_link(1);
    put(&link, 0, STRIDE, at(1, 0), 10, 5);
    CHECK(comes(&link.rings[1]->written[0], at(1, 0)) && comes(&link.rings[0]->drained[0], at(1, 0)));
    put(&link, 0, STRIDE, at(1, 1), 11, STRIDE); /* half-way */
    CHECK(stays_below(&link.rings[0]->drained[0], at(1, 1)));
    s1f_staging_relay_disown(link.relays[0], 2);
    CHECK(!s1f_staging_relay_may_release(link.relays[0], 2, INT64_C(60000000000)));
    CHECK(s1f_staging_relay_may_release(link.relays[0], 2, 0));
    memset(slot_of(link.rings[0], 0, STRIDE), 99, STRIDE);
    atomic_store(&link.rings[1]->drained[0], at(1, 0)); /* it goes on */
    CHECK(says(&link, 1, "the connection: "));
    CHECK(atomic_load(&link.rings[1]->written[0]) == at(1, 0));
    CHECK_STATUS(s1f_staging_relay_check(link.relays[0], 0), S1F_ERR_STATE, "given up");
    free_link(&link);
}

static void test_a_new_layout_waits_for_all_slots(void)
{
    link_of_two link = make_link(1);
    for (int slot = 0; slot < SLOTS; slot++)
        put(&link, slot, STRIDE, at(1, (uint64_t)slot), slot, STRIDE);
    CHECK(comes(&link.rings[1]->written[3], at(1, 3)));
    CHECK(comes(&link.rings[0]->drained[3], at(1, 3)));
    put(&link, 7, STRIDE / 2, at(2, 0), 70, STRIDE / 2); /* lies in the last of the old slots */
    for (int slot = 0; slot < SLOTS; slot++) {
        CHECK(stays_below(&link.rings[1]->written[7], at(2, 0)) && holds(&link, 3, STRIDE, 3, STRIDE));
        atomic_store(&link.rings[1]->drained[slot], at(1, (uint64_t)slot));
    }
    CHECK(comes(&link.rings[1]->written[7], at(2, 0)) && holds(&link, 7, STRIDE / 2, 70, STRIDE / 2));
    free_link(&link);
}

static int says(link_of_two *link, int32_t awaits, const char *part)
{
    for (int i = 0; i < MOST_TENTHS_MS && s1f_staging_relay_check(link->relays[1], awaits) == S1F_OK; i++)
        pause_a_little();
    return s1f_staging_relay_check(link->relays[1], awaits) == S1F_ERR_STATE && strstr(s1f_last_error(), part) != NULL;
}

static void test_what_is_no_message(void)
{
    static const int64_t heads[][4] = {/* position, stride, bytes, slot */
                                       {1, STRIDE, 0, 0},
                                       {1, STRIDE, -1, 0},
                                       {1, STRIDE, STRIDE + 1, 0},
                                       {1, STRIDE, 1, SLOTS},
                                       {1, STRIDE, 1, -1},
                                       {1, STRIDE, 1, S1F_STAGING_SLOTS},
                                       {1, INT64_MAX, INT64_MAX, 0},
                                       {1, INT64_MAX / 2, 1, 3}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        link_of_two link = make_link(0);
        CHECK(write(link.sockets[0], heads[i], sizeof heads[i]) == sizeof heads[i]);
        CHECK(says(&link, 0, "does not fit in the ring"));
        free_link(&link);
    }
    link_of_two link = make_link(0);
    CHECK(shutdown(link.sockets[0], SHUT_WR) == 0);
    CHECK(says(&link, 1, "the other rank has ended it"));
    CHECK_STATUS(s1f_staging_relay_check(link.relays[1], 0), S1F_OK, ""); /* it has left, and nothing is missing */
    free_link(&link);
    link = make_link(0);
    CHECK(write(link.sockets[0], heads[0], 20) == 20);
    CHECK(shutdown(link.sockets[0], SHUT_WR) == 0);
    CHECK(says(&link, 0, "ended within a message"));
    free_link(&link);
}

/* Whatever a thread waits for: a word of the GPU, room on the connection, a slot, the next message. */
static void test_it_ends_when_it_is_told(void)
{
    for (int blocked = 0; blocked < 3; blocked++) {
        link_of_two link = make_link(1);
        CHECK_STATUS(s1f_staging_relay_send(link.relays[0], 0, STRIDE, at(1, 0), STRIDE), S1F_OK, "");
        if (blocked > 0)
            atomic_store(&link.rings[0]->written[0], at(1, 0));
        if (blocked > 1) {
            CHECK(comes(&link.rings[1]->written[0], at(1, 0)) && comes(&link.rings[0]->drained[0], at(1, 0)));
            put(&link, 0, STRIDE, at(1, 1), 1, STRIDE);
            CHECK(stays_below(&link.rings[0]->drained[0], at(1, 1)));
        }
        free_link(&link);
    }
}

int main(void)
{
    test_messages_come_in_order();
    test_what_a_failed_step_sends_is_not_given();
    test_a_message_that_is_cut();
    test_a_receiver_that_hangs();
    test_a_new_layout_waits_for_all_slots();
    test_what_is_no_message();
    test_it_ends_when_it_is_told();
    return check_failures();
}
