/* stand_in_test.h - what the tests of the stand-ins for the CUDA driver and NCCL are written with. */
#ifndef S1F_TESTS_STAND_IN_TEST_H
#define S1F_TESTS_STAND_IN_TEST_H

#include "check.h"

#include "nccl_api.h"
#include "stand_in.h"

enum { PATIENCE_MS = 30 };

static int slow; /* under valgrind and emulation: fewer timings */
static int64_t misuses_seen;

#define OK(call) CHECK((call) == 0)

static inline CUdeviceptr at(const void *memory)
{
    return (CUdeviceptr)(uintptr_t)memory;
}

static inline void *host(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

/* The next misuse that was noted holds `part`. */
static inline void expect_misuse(const char *part)
{
    const char *text = stand_in_misuse(misuses_seen++);
    CHECK(text != NULL && strstr(text, part) != NULL);
    if (text == NULL || strstr(text, part) == NULL)
        fprintf(stderr, "misuse \"%s\", wanted \"%s\"\n", text != NULL ? text : "none", part);
}

static inline void expect_no_misuse(void)
{
    for (const char *text; (text = stand_in_misuse(misuses_seen)) != NULL; misuses_seen++) {
        fprintf(stderr, "misuse \"%s\"\n", text);
        CHECK(!"no misuse");
    }
}

static inline void use_device(int index)
{
    CUcontext context;
    OK(cuDevicePrimaryCtxRetain(&context, index));
    OK(cuCtxSetCurrent(context));
}

static inline void begin(uint64_t seed, int64_t queues)
{
    expect_no_misuse();
    stand_in_reset(seed);
    misuses_seen = 0;
    OK(stand_in_set("queues", queues));
    OK(cuInit(0));
    use_device(0);
}

static inline CUstream new_stream(void)
{
    CUstream stream = NULL;
    OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -1));
    return stream;
}

static inline CUevent new_event(void)
{
    CUevent event = NULL;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

static inline CUdeviceptr new_memory(size_t bytes)
{
    CUdeviceptr address = 0;
    OK(cuMemAlloc_v2(&address, bytes));
    return address;
}

/* What ran, as letters; written by functions that the device runs, one at a time. */
static char trace[64];
static size_t traced;

static inline void note(void *letter)
{
    if (traced + 1 < sizeof trace)
        trace[traced++] = *(const char *)letter;
    trace[traced] = '\0';
}

static inline void run_letter(CUstream stream, const char *letter)
{
    OK(cuLaunchHostFunc(stream, note, (void *)(uintptr_t)letter));
}

static inline void clear_trace(void)
{
    traced = 0;
    trace[0] = '\0';
}

/* A value in device memory that holds streams back until it is opened. */
static inline CUdeviceptr new_gate(CUstream stream)
{
    CUdeviceptr gate = new_memory(8);
    OK(cuMemsetD8Async(gate, 0, 8, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuStreamWaitValue64_v2(stream, gate, 1, CU_STREAM_WAIT_VALUE_EQ));
    return gate;
}

static inline void open_gate(CUdeviceptr gate)
{
    __atomic_store_n((uint64_t *)host(gate), 1, __ATOMIC_RELEASE);
}

static inline int stuck_with(const char *part)
{
    const char *text;
    int stuck = stand_in_drain(PATIENCE_MS) == 1 && stand_in_stuck(&text) == 1;
    if (stuck && strstr(text, part) == NULL)
        fprintf(stderr, "stuck with\n%swanted \"%s\"\n", text, part);
    return stuck && strstr(text, part) != NULL;
}

static inline int drained(void)
{
    return stand_in_drain(10000) == 0;
}

#endif
