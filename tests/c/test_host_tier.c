/* Does the tier of pinned memory copy at the right time, wait for nothing on the host, and tell what fails? */
#include "../../csrc/device/host_tier.h"
#include "check.h"
#include "stand_in.h"

#include "cuda_api.h"

#include <stdlib.h>

static const char LIBRARY[] = ""; /* this program: the stand-ins are linked with it */
enum { BUFFERS = 3, BYTES = 6000, ROOM = 8192, UNITS = 4, WAVES = 2 };

static int slow; /* under valgrind: fewer timings */

#define OK(call) CHECK((call) == 0)

static void *host(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

static void expect_no_misuse(void)
{
    for (int64_t i = 0; stand_in_misuse(i) != NULL; i++) {
        fprintf(stderr, "misuse \"%s\"\n", stand_in_misuse(i));
        CHECK(!"no misuse");
    }
}

static void begin(uint64_t seed, int64_t queues)
{
    CUcontext context;
    expect_no_misuse();
    stand_in_reset(seed);
    OK(stand_in_set("queues", queues));
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxPushCurrent_v2(context));
}

static CUstream new_stream(void)
{
    CUstream stream = NULL;
    OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -1));
    return stream;
}

static CUdeviceptr new_memory(size_t bytes)
{
    CUdeviceptr address = 0;
    OK(cuMemAlloc_v2(&address, bytes));
    return address;
}

static int drained(void)
{
    return stand_in_drain(10000) == 0;
}

typedef struct {
    s1f_device *device;
    s1f_host_tier *tier;
    CUstream compute;
    CUdeviceptr buffers[BUFFERS];
} scene;

typedef struct { /* what a kernel of the test does */
    char *memory;
    int unit;
    int *num_wrong;
} kernel;
static kernel kernels[512];
static int num_kernels;

static void fill(void *argument)
{
    kernel *k = argument;
    memset(k->memory, k->unit, BYTES);
}

static void compare(void *argument)
{
    kernel *k = argument;
    for (int i = 0; i < BYTES; i++)
        if (k->memory[i] != (char)k->unit) {
            ++*k->num_wrong;
            return;
        }
}

static void launch(const scene *s, CUhostFn function, int buffer, int unit, int *num_wrong)
{
    kernel *k = &kernels[num_kernels++ % 512];
    *k = (kernel){host(s->buffers[buffer]), unit, num_wrong};
    OK(cuLaunchHostFunc(s->compute, function, k));
}

static void open_scene(scene *s, uint64_t seed)
{
    begin(seed, 8);
    CHECK_STATUS(s1f_device_create(LIBRARY, 0, &s->device), S1F_OK, "");
    CHECK_STATUS(s1f_host_tier_create(s->device, NULL, NULL, &s->tier), S1F_OK, "");
    s->compute = new_stream();
    for (int i = 0; i < BUFFERS; i++)
        s->buffers[i] = new_memory(BYTES);
}

static void close_scene(scene *s)
{
    int is_stuck = s->device->is_stuck;
    s1f_host_tier_free(s->tier);
    stand_in_damage("", 0, STAND_IN_CORRUPT);
    CHECK(drained());
    s1f_device_free(s->device);
    OK(cuStreamDestroy_v2(s->compute));
    for (int i = 0; i < BUFFERS; i++)
        OK(cuMemFree_v2(s->buffers[i]));
    CHECK((stand_in_count("live_pinned_bytes") == 0) == !is_stuck &&
          (stand_in_count("live_streams") == 0) == !is_stuck);
    CHECK((stand_in_count("live_events") == 0) == !is_stuck && stand_in_count("live_allocations") == 0);
    expect_no_misuse();
}

static s1f_status begin_step(const scene *s)
{
    s1f_status status = s1f_device_begin_step(s->device, s->compute);
    return status == S1F_OK ? s1f_host_tier_begin_step(s->tier, UNITS) : status;
}

static s1f_status out(const scene *s, int64_t number, int buffer, int64_t bytes)
{
    s1f_tier_part part = {host(s->buffers[buffer]), bytes, number * ROOM};
    return s1f_host_tier_move(s->tier, 1, number, &part, 1);
}

static s1f_status in(const scene *s, int64_t number, int buffer, int64_t bytes)
{
    s1f_tier_part part = {host(s->buffers[buffer]), bytes, number * ROOM};
    return s1f_host_tier_move(s->tier, 0, number, &part, 1);
}

/* A step in which memory is used again as soon as the order lets it: forwards write two buffers in turn, whose units
 * move out, and backwards read what came back to a buffer that something else used just before. Returns how many
 * backwards read wrong bytes. */
static int run_step(const scene *s)
{
    static int num_wrong;
    num_wrong = 0;
    CHECK_STATUS(begin_step(s), S1F_OK, "");
    for (int wave = 0; wave < WAVES; wave++) {
        for (int u = 0; u < UNITS; u++) {
            if (u > 1)
                CHECK_STATUS(s1f_host_tier_wait(s->tier, u - 2), S1F_OK, "");
            launch(s, fill, u % 2, 1 + wave * UNITS + u, NULL);
            CHECK_STATUS(out(s, u, u % 2, BYTES), S1F_OK, "");
        }
        for (int u = UNITS - 2; u < UNITS; u++) {
            CHECK_STATUS(s1f_host_tier_wait(s->tier, u), S1F_OK, "");
            launch(s, fill, u % 2, 100, NULL);
        }
        for (int u = 0; u < UNITS; u++) {
            launch(s, fill, u % BUFFERS, 100, NULL);
            CHECK_STATUS(in(s, u, u % BUFFERS, BYTES), S1F_OK, "");
            CHECK_STATUS(s1f_host_tier_wait(s->tier, u), S1F_OK, "");
            launch(s, compare, u % BUFFERS, 1 + wave * UNITS + u, &num_wrong);
        }
    }
    CHECK(drained());
    return num_wrong;
}

/* Waits of a step behind that of its begin. */
enum { WAITS = WAVES * UNITS * 4 };

static void test_order(void)
{
    for (uint64_t seed = 0; seed < (slow ? 3 : 20); seed++) {
        scene s;
        open_scene(&s, seed);
        CHECK(run_step(&s) == 0 && run_step(&s) == 0);
        CHECK(stand_in_count("cuStreamWaitEvent") == 2 * (WAITS + 1));
        close_scene(&s);
    }
}

/* The next step computes on another stream, which has waited for no copy. Its first load takes the room that the last
 * one of the step before may still be read from. */
static void test_another_stream(void)
{
    int num_wrong = 0;
    for (uint64_t seed = 0; seed < (slow ? 2 : 60); seed++) {
        scene s;
        open_scene(&s, seed);
        CHECK_STATUS(begin_step(&s), S1F_OK, "");
        launch(&s, fill, 0, 1, NULL);
        CHECK_STATUS(out(&s, 0, 0, BYTES), S1F_OK, "");
        CHECK_STATUS(s1f_host_tier_wait(s.tier, 0), S1F_OK, "");
        CHECK_STATUS(in(&s, 0, 1, BYTES), S1F_OK, "");
        CHECK_STATUS(s1f_host_tier_wait(s.tier, 0), S1F_OK, "");
        launch(&s, compare, 1, 1, &num_wrong);
        CUstream first = s.compute;
        s.compute = new_stream();
        CHECK_STATUS(begin_step(&s), S1F_OK, "");
        launch(&s, fill, 2, 2, NULL);
        CHECK_STATUS(out(&s, 0, 2, BYTES), S1F_OK, "");
        CHECK(drained());
        OK(cuStreamDestroy_v2(first));
        close_scene(&s);
    }
    CHECK(num_wrong == 0);
}

/* After the first step nothing is pinned, and the host waits for nothing, as it would for pageable copies. */
static void test_steady_steps(void)
{
    scene s;
    open_scene(&s, 3);
    OK(stand_in_set("copy_ns_per_kib", 10000));
    CHECK(run_step(&s) == 0);
    s1f_host_tier_facts facts = s1f_host_tier_get_facts(s.tier);
    CHECK(facts.room_bytes == 8 << 20);
    CHECK(facts.bytes_out == WAVES * UNITS * BYTES && facts.bytes_in == facts.bytes_out);
    CHECK(facts.ns_out > facts.bytes_out * 9 && facts.ns_in > facts.bytes_in * 9);
    int64_t made = stand_in_count("cuEventCreate");
    for (int step = 0; step < 3; step++)
        CHECK(run_step(&s) == 0);
    CHECK(stand_in_count("cuMemHostAlloc") == 1 && stand_in_count("cuEventCreate") == made);
    CHECK(stand_in_count("synchronisations") == 0 && stand_in_count("pageable_copies") == 0);
    close_scene(&s);
}

/* A load that lies across two calls' memory comes back whole. */
static void test_loads_across_pieces(void)
{
    enum { LARGE = 5 << 20 };
    scene s;
    open_scene(&s, 4);
    CUdeviceptr memory = new_memory(3 * LARGE), again = new_memory(3 * LARGE);
    for (int64_t i = 0; i < 3 * LARGE; i++)
        ((char *)host(memory))[i] = (char)(i * 7 + i / 4096);
    CHECK_STATUS(begin_step(&s), S1F_OK, "");
    for (int i = 0; i < 3; i++) {
        s1f_tier_part part = {(char *)host(memory) + (size_t)i * LARGE, LARGE, (int64_t)i * LARGE};
        CHECK_STATUS(s1f_host_tier_move(s.tier, 1, i, &part, 1), S1F_OK, "");
        CHECK_STATUS(s1f_host_tier_wait(s.tier, i), S1F_OK, "");
    }
    for (int i = 0; i < 3; i++) {
        s1f_tier_part part = {(char *)host(again) + (size_t)i * LARGE, LARGE, (int64_t)i * LARGE};
        CHECK_STATUS(s1f_host_tier_move(s.tier, 0, i, &part, 1), S1F_OK, "");
        CHECK_STATUS(s1f_host_tier_wait(s.tier, i), S1F_OK, "");
    }
    CHECK(drained() && stand_in_count("cuMemHostAlloc") == 2 &&
          stand_in_count("cuMemcpyDtoHAsync_v2") + stand_in_count("cuMemcpyHtoDAsync_v2") == 8);
    CHECK(memcmp(host(memory), host(again), 3 * LARGE) == 0);
    OK(cuMemFree_v2(memory));
    OK(cuMemFree_v2(again));
    close_scene(&s);
}

static void test_what_fails(void)
{
    static const struct {
        const char *call;
        int result;
        s1f_status status;
        const char *text;
    } cases[] = {
        {"cuMemHostAlloc", CUDA_ERROR_OUT_OF_MEMORY, S1F_ERR_MEMORY,
         "Memory(offload=HOST): GPU 0 could not pin 8388608 bytes of host memory beside 0: cuMemHostAlloc: "},
        {"cuMemcpyDtoHAsync", CUDA_ERROR_INVALID_VALUE, S1F_ERR_STATE,
         "Memory(offload=HOST): GPU 0: moving 6000 bytes out to pinned host memory: cuMemcpyDtoHAsync: "},
        {"cuEventRecord", CUDA_ERROR_LAUNCH_TIMEOUT, S1F_ERR_STATE, "out to pinned host memory: cuEventRecord: "},
        {"cuEventCreate", CUDA_ERROR_OUT_OF_MEMORY, S1F_ERR_MEMORY, "cuEventCreate: "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        scene s;
        open_scene(&s, i);
        CHECK_STATUS(begin_step(&s), S1F_OK, "");
        stand_in_fail_call(cases[i].call, 0, cases[i].result);
        CHECK_STATUS(out(&s, 0, 0, BYTES), cases[i].status, cases[i].text);
        s1f_host_tier_reset(s.tier);
        CHECK(run_step(&s) == 0); /* nothing is lost */
        close_scene(&s);
    }
}

/* A GPU that has failed, and copies that do not end: the tier is of no use then, and frees nothing. */
static void test_what_does_not_end(void)
{
    for (int fails = 0; fails < 2; fails++) {
        scene s;
        open_scene(&s, 9);
        CHECK_STATUS(begin_step(&s), S1F_OK, "");
        if (!fails)
            stand_in_damage("cuMemcpyDtoH", -1, STAND_IN_STALLED);
        CHECK_STATUS(out(&s, 0, 0, BYTES), S1F_OK, "");
        if (fails)
            stand_in_fail_call("cuStreamQuery", 0, CUDA_ERROR_LAUNCH_TIMEOUT);
        s1f_host_tier_reset(s.tier);
        CHECK_STATUS(begin_step(&s), S1F_ERR_STATE,
                     fails ? "copies of GPU 0 have failed (cuStreamQuery: " : "have failed (they do not end)");
        close_scene(&s);
    }
}

/* A reset returns when the copies have ended: memory of theirs may go. */
static void test_reset(void)
{
    for (uint64_t seed = 0; seed < 20; seed++) {
        scene s;
        open_scene(&s, seed);
        CHECK_STATUS(begin_step(&s), S1F_OK, "");
        CUdeviceptr memory = new_memory(BYTES), room = new_memory(BYTES);
        s1f_tier_part part = {host(memory), BYTES, 0}, back = {host(room), BYTES, 0},
                      other = {host(memory), BYTES, ROOM};
        CHECK_STATUS(s1f_host_tier_move(s.tier, 1, 0, &part, 1), S1F_OK, "");
        CHECK_STATUS(s1f_host_tier_wait(s.tier, 0), S1F_OK, "");
        CHECK_STATUS(s1f_host_tier_move(s.tier, 1, 1, &other, 1), S1F_OK, "");
        CHECK_STATUS(s1f_host_tier_move(s.tier, 0, 0, &back, 1), S1F_OK, "");
        s1f_host_tier_reset(s.tier);
        OK(cuMemFree_v2(memory));
        OK(cuMemFree_v2(room));
        close_scene(&s);
    }
}

static void test_failing_allocations(void)
{
    scene s;
    open_scene(&s, 1);
    s1f_host_tier_free(s.tier);
    CHECK_STATUS(s1f_device_begin_step(s.device, s.compute), S1F_OK, "");
    for (int64_t n = 0;; n++) {
        s1f_host_tier *tier = NULL;
        fail_allocation(n);
        s1f_status status = s1f_host_tier_create(s.device, NULL, NULL, &tier);
        s.tier = tier;
        if (status == S1F_OK)
            status = out(&s, 0, 0, BYTES);
        int64_t asked = fail_allocation(-1);
        s1f_host_tier_free(tier);
        if (asked <= n)
            break;
        CHECK(status == S1F_ERR_MEMORY);
    }
    s.tier = NULL;
    close_scene(&s);
}

/* -- the host's memory --------------------------------------------------------------------------------------------- */

static s1f_status refuse(void *most, int64_t bytes)
{
    return bytes <= *(int64_t *)most ? S1F_OK : s1f_fail(S1F_ERR_MEMORY, "%lld bytes more", (long long)bytes);
}

/* What all loads of the step need is refused at the first of them, before memory is full. */
static void test_host_too_small(void)
{
    scene s;
    open_scene(&s, 2);
    s1f_host_tier_free(s.tier);
    int64_t most = 80 << 20;
    CHECK_STATUS(s1f_host_tier_create(s.device, refuse, &most, &s.tier), S1F_OK, "");
    CHECK_STATUS(begin_step(&s), S1F_OK, "");
    CUdeviceptr large = new_memory((20 << 20) + 1);
    s1f_tier_part part = {host(large), (20 << 20) + 1, 0};
    CHECK_STATUS(s1f_host_tier_move(s.tier, 1, 0, &part, 1), S1F_ERR_MEMORY, "83886084 bytes more");
    CHECK(stand_in_count("cuMemHostAlloc") == 0);
    s1f_host_tier_reset(s.tier);
    CHECK(run_step(&s) == 0);
    OK(cuMemFree_v2(large));
    close_scene(&s);
}

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "valgrind") == 0;
    test_order();
    test_another_stream();
    test_steady_steps();
    test_loads_across_pieces();
    test_what_fails();
    test_what_does_not_end();
    test_reset();
    test_failing_allocations();
    test_host_too_small();
    return check_failures();
}
