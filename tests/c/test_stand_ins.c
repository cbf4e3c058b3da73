/* test_stand_ins.c - do the stand-ins for the CUDA driver and NCCL keep the rules that transports rely on, block where
 * the real ones may block, and report each trap? What a GPU would do is not tested here: there is none. */
#include "check.h"

#include "nccl_api.h"
#include "stand_in.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_MS = 30, MAX_RANKS = 4 };

static int slow; /* under valgrind and emulation: fewer timings */
static int64_t misuses_seen;

#define OK(call) CHECK((call) == 0)

static CUdeviceptr at(const void *memory)
{
    return (CUdeviceptr)(uintptr_t)memory;
}

static void *host(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

/* The next misuse that was noted holds `part`. */
static void expect_misuse(const char *part)
{
    const char *text = stand_in_misuse(misuses_seen++);
    CHECK(text != NULL && strstr(text, part) != NULL);
    if (text == NULL || strstr(text, part) == NULL)
        fprintf(stderr, "misuse \"%s\", wanted \"%s\"\n", text != NULL ? text : "none", part);
}

static void expect_no_misuse(void)
{
    for (const char *text; (text = stand_in_misuse(misuses_seen)) != NULL; misuses_seen++) {
        fprintf(stderr, "misuse \"%s\"\n", text);
        CHECK(!"no misuse");
    }
}

static void use_device(int index)
{
    CUcontext context;
    OK(cuDevicePrimaryCtxRetain(&context, index));
    OK(cuCtxSetCurrent(context));
}

static void begin(uint64_t seed, int64_t queues)
{
    expect_no_misuse();
    stand_in_reset(seed);
    misuses_seen = 0;
    OK(stand_in_set("queues", queues));
    OK(cuInit(0));
    use_device(0);
}

static CUstream new_stream(void)
{
    CUstream stream = NULL;
    OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -1));
    return stream;
}

static CUevent new_event(void)
{
    CUevent event = NULL;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

static CUdeviceptr new_memory(size_t bytes)
{
    CUdeviceptr address = 0;
    OK(cuMemAlloc_v2(&address, bytes));
    return address;
}

/* What ran, as letters; written by functions that the device runs, one at a time. */
static char trace[64];
static size_t traced;

static void note(void *letter)
{
    if (traced + 1 < sizeof trace)
        trace[traced++] = *(const char *)letter;
    trace[traced] = '\0';
}

static void run_letter(CUstream stream, const char *letter)
{
    OK(cuLaunchHostFunc(stream, note, (void *)(uintptr_t)letter));
}

static void clear_trace(void)
{
    traced = 0;
    trace[0] = '\0';
}

/* A value in device memory that holds streams back until it is opened. */
static CUdeviceptr new_gate(CUstream stream)
{
    CUdeviceptr gate = new_memory(8);
    OK(cuMemsetD8Async(gate, 0, 8, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuStreamWaitValue64_v2(stream, gate, 1, CU_STREAM_WAIT_VALUE_EQ));
    return gate;
}

static void open_gate(CUdeviceptr gate)
{
    __atomic_store_n((uint64_t *)host(gate), 1, __ATOMIC_RELEASE);
}

static int stuck_with(const char *part)
{
    const char *text;
    int stuck = stand_in_drain(PATIENCE_MS) == 1 && stand_in_stuck(&text) == 1;
    if (stuck && strstr(text, part) == NULL)
        fprintf(stderr, "stuck with\n%swanted \"%s\"\n", text, part);
    return stuck && strstr(text, part) != NULL;
}

static int drained(void)
{
    return stand_in_drain(10000) == 0;
}

/* -- the driver -------------------------------------------------------------------------------------------------- */

static void test_basics(void)
{
    stand_in_reset(1);
    misuses_seen = 0;
    int number;
    CUdevice index;
    CUcontext first, second, current;
    CUstream stream;
    const char *text;
    CHECK(cuDeviceGetCount(&number) == CUDA_ERROR_NOT_INITIALIZED);
    CHECK(cuStreamCreate(&stream, 0) == CUDA_ERROR_NOT_INITIALIZED);
    OK(cuInit(0));
    CHECK(stand_in_set("device", 2) == -1 && stand_in_set("queues", 33) == -1 && stand_in_count("cuFree") == -1);
    OK(stand_in_set("devices", 2));
    OK(cuDeviceGetCount(&number));
    CHECK(number == 2);
    CHECK(cuDeviceGet(&index, 2) == CUDA_ERROR_INVALID_DEVICE);
    OK(cuDriverGetVersion(&number));
    CHECK(number == 13000);
    OK(cuGetErrorName(CUDA_ERROR_NOT_READY, &text));
    CHECK(strcmp(text, "CUDA_ERROR_NOT_READY") == 0);
    CHECK(cuGetErrorString((CUresult)12345, &text) == CUDA_ERROR_INVALID_VALUE && text == NULL);

    CHECK(cuStreamCreate(&stream, 0) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuCtxPopCurrent_v2(NULL) == CUDA_ERROR_INVALID_CONTEXT);
    OK(cuDevicePrimaryCtxRetain(&first, 0));
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(first));
    OK(cuCtxPushCurrent_v2(second));
    OK(cuCtxGetDevice(&index));
    CHECK(index == 1);
    OK(cuStreamCreate(&stream, 0));
    OK(cuCtxPopCurrent_v2(&current));
    CHECK(current == second);
    OK(cuStreamGetCtx(stream, &current));
    CHECK(current == second);
    OK(cuStreamDestroy_v2(stream));
    CHECK(cuStreamQuery(stream) == CUDA_ERROR_INVALID_HANDLE);
    expect_misuse("destroyed");
    OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK(cuStreamCreate(&stream, 0) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    OK(cuCtxSetCurrent(NULL));
    OK(cuCtxGetCurrent(&current));
    CHECK(current == NULL);

    CUresult (*driver_version)(int *);
    CUdriverProcAddressQueryResult found;
    OK(cuGetProcAddress_v2("cuDriverGetVersion", (void **)&driver_version, 12000, 0, &found));
    CHECK(driver_version == cuDriverGetVersion && found == CU_GET_PROC_ADDRESS_SUCCESS);
    void *function;
    OK(cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, NULL)); /* without its version */
    CHECK(function != NULL && cuGetProcAddress_v2("cuMem", &function, 12000, 0, NULL) == CUDA_ERROR_NOT_FOUND);
    CHECK(stand_in_count("cuInit") == 1 && stand_in_count("cuStreamCreate") == 4);
}

static void test_queues(void)
{
    for (int64_t queues = 1; queues <= 2; queues++) { /* streams 1 and 2 share a queue, or have one each */
        begin(3, queues);
        clear_trace();
        CUstream waits = new_stream(), other = new_stream();
        CUdeviceptr gate = new_gate(waits);
        run_letter(waits, "a");
        run_letter(other, "b");
        CHECK(stuck_with("stream 1, value wait"));
        CHECK(strcmp(trace, queues == 1 ? "" : "b") == 0); /* a false dependency, or none */
        CHECK(cuStreamQuery(other) == (queues == 1 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS));
        open_gate(gate);
        CHECK(drained());
        CHECK(strcmp(trace, queues == 1 ? "ab" : "ba") == 0);
        OK(cuMemFree_v2(gate));
    }
}

static void test_order_is_seeded(void)
{
    char orders[8][sizeof trace];
    int distinct = 0;
    for (uint64_t run = 0; run < 8; run++) {
        begin(run / 2, 8);
        clear_trace();
        OK(stand_in_set("delay_percent", 0));
        OK(stand_in_set("paused", 1));
        CUstream streams[4] = {new_stream(), new_stream(), new_stream(), new_stream()};
        for (int i = 0; i < 16; i++)
            run_letter(streams[i % 4], &"abcdefghijklmnop"[i]);
        CHECK(stand_in_stuck(NULL) == 0 && traced == 0);
        OK(stand_in_set("paused", 0));
        CHECK(drained() && traced == 16);
        for (size_t i = 0; i < 16; i++) /* each stream in order: a before e before i before m */
            CHECK(trace[i] < 'e' || memchr(trace, trace[i] - 4, i) != NULL);
        strcpy(orders[run], trace);
        if (run % 2 == 1)
            CHECK(strcmp(orders[run - 1], orders[run]) == 0);
        else
            distinct += run == 0 || strcmp(orders[run - 2], orders[run]) != 0;
    }
    CHECK(distinct >= 3);
}

/* An operation alone on its queue, beside sixteen on another: by choice alone it is hardly ever last. */
static void test_delays(void)
{
    int last[2] = {0, 0};
    for (int delays = 0; delays <= 1; delays++)
        for (uint64_t seed = 0; seed < 200; seed++) {
            begin(seed, 8);
            clear_trace();
            OK(stand_in_set("delay_percent", delays ? 50 : 0));
            OK(stand_in_set("paused", 1));
            run_letter(new_stream(), "a");
            CUstream other = new_stream();
            for (int i = 0; i < 16; i++)
                run_letter(other, "b");
            OK(stand_in_set("paused", 0));
            OK(cuCtxSynchronize());
            last[delays] += trace[16] == 'a';
        }
    CHECK(last[0] == 0 && last[1] > 0);
}

static void test_events(void)
{
    begin(5, 8);
    clear_trace();
    CUstream gated = new_stream(), waits = new_stream(), open = new_stream();
    CUevent event = new_event(), timed;
    OK(cuEventQuery(event)); /* never recorded: reached */
    OK(cuEventSynchronize(event));
    OK(cuStreamWaitEvent(waits, event, 0));
    run_letter(waits, "a");
    CHECK(drained() && strcmp(trace, "a") == 0);

    CUdeviceptr gate = new_gate(gated);
    OK(cuEventRecord(event, gated));
    CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    OK(cuStreamWaitEvent(waits, event, 0)); /* that record, whatever becomes of the event */
    run_letter(waits, "b");
    OK(cuEventRecord(event, open));
    OK(cuEventSynchronize(event));
    CHECK(stuck_with("event wait for event 1") && strcmp(trace, "a") == 0);
    OK(cuEventDestroy_v2(event));
    open_gate(gate);
    CHECK(drained() && strcmp(trace, "ab") == 0);
    CHECK(cuEventQuery(event) == CUDA_ERROR_INVALID_HANDLE);
    expect_misuse("event 1 is destroyed");

    event = new_event();
    OK(cuEventRecord(event, open));
    OK(cuStreamWaitEvent(waits, event, 0));
    CUdeviceptr second_gate = new_gate(gated);
    OK(cuEventRecord(event, gated)); /* does not hold back the wait before it */
    run_letter(waits, "c");
    OK(cuStreamSynchronize(waits));
    CHECK(strcmp(trace, "abc") == 0 && cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    open_gate(second_gate);
    OK(cuEventSynchronize(event));

    CHECK(cuEventCreate(&timed, CU_EVENT_INTERPROCESS) == CUDA_ERROR_INVALID_VALUE);
    OK(cuEventCreate(&timed, CU_EVENT_DEFAULT));
    float milliseconds;
    CHECK(cuEventElapsedTime(&milliseconds, timed, timed) == CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventRecord(timed, open));
    OK(cuEventSynchronize(timed));
    OK(cuEventElapsedTime(&milliseconds, timed, timed));
    CHECK(milliseconds == 0);
    use_device(1);
    CHECK(cuEventRecord(timed, new_stream()) == CUDA_ERROR_INVALID_HANDLE); /* of another device */
    OK(cuStreamWaitEvent(new_stream(), timed, 0));                          /* which waits may cross */
    CHECK(drained());
    OK(cuMemFree_v2(gate));
    OK(cuMemFree_v2(second_gate));
}

static void test_values(void)
{
    static const struct {
        unsigned int flags;
        uint64_t held, wanted;
        int holds;
    } cases[] = {
        {CU_STREAM_WAIT_VALUE_GEQ, 5, 5, 1},          {CU_STREAM_WAIT_VALUE_GEQ, 4, 5, 0},
        {CU_STREAM_WAIT_VALUE_GEQ, 2, UINT64_MAX, 1}, /* it has wrapped around */
        {CU_STREAM_WAIT_VALUE_EQ, 6, 5, 0},           {CU_STREAM_WAIT_VALUE_EQ, 5, 5, 1},
        {CU_STREAM_WAIT_VALUE_AND, 6, 2, 1},          {CU_STREAM_WAIT_VALUE_AND, 6, 9, 0},
        {CU_STREAM_WAIT_VALUE_NOR, 6, 9, 1},          {CU_STREAM_WAIT_VALUE_NOR, UINT64_MAX, 0, 0},
        {CU_STREAM_WAIT_VALUE_FLUSH, 5, 5, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(i, 8);
        CUstream stream = new_stream();
        CUdeviceptr value = new_memory(8);
        OK(cuStreamWriteValue64_v2(stream, value, cases[i].held, CU_STREAM_WRITE_VALUE_DEFAULT));
        OK(cuStreamWaitValue64_v2(stream, value, cases[i].wanted, cases[i].flags));
        CHECK(stand_in_drain(5) == !cases[i].holds);
        OK(stand_in_set("paused", 1));
        OK(cuMemFree_v2(value));
        OK(stand_in_set("paused", 0));
        CHECK(drained());
        if (!cases[i].holds)
            expect_misuse("use after free");
    }
    begin(1, 1);
    CUstream here = new_stream();
    CUdeviceptr value = new_memory(16);
    memset(host(value), 0, 16);
    CHECK(cuStreamWaitValue64_v2(here, value + 4, 1, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuStreamWaitValue64_v2(here, value + 16, 1, 0) == CUDA_ERROR_INVALID_VALUE);
    expect_misuse("not device memory");
    OK(cuStreamWaitValue64_v2(here, value, 7, CU_STREAM_WAIT_VALUE_GEQ));
    use_device(1); /* a device writes, another waits */
    OK(cuStreamWriteValue64_v2(new_stream(), value, 8, CU_STREAM_WRITE_VALUE_DEFAULT));
    CHECK(drained());
    OK(cuMemFree_v2(value));
}

static void test_memory(void)
{
    begin(7, 8);
    CUstream stream = new_stream();
    unsigned char bytes[64] = {0};
    CUdeviceptr memory = new_memory(40), other = new_memory(24), base;
    size_t free_bytes, total, length;
    OK(cuMemcpyDtoHAsync_v2(bytes, memory, 40, stream));
    OK(cuStreamSynchronize(stream));
    for (int i = 0; i < 64; i++)
        CHECK(bytes[i] == (i < 40 ? 0xFF : 0)); /* NaN until written */
    OK(cuMemGetAddressRange_v2(&base, &length, memory + 39));
    CHECK(base == memory && length == 40);
    CHECK(cuMemAlloc_v2(&base, 0) == CUDA_ERROR_INVALID_VALUE);

    CHECK(cuMemcpyDtoDAsync_v2(other, memory + 17, 24, stream) == CUDA_ERROR_INVALID_VALUE);
    expect_misuse("24 bytes at offset 17 of an allocation of 40 bytes");
    CHECK(cuMemcpyHtoDAsync_v2(other - 8, bytes, 16, stream) == CUDA_ERROR_INVALID_VALUE);
    expect_misuse("before an allocation");
    CHECK(cuMemsetD8Async(at(bytes), 0, 64, stream) == CUDA_ERROR_INVALID_VALUE);
    expect_misuse("not device memory");
    OK(stand_in_set("foreign_memory", 1));
    OK(cuMemsetD8Async(at(bytes), 3, 64, stream));
    OK(cuMemcpyAsync(memory, at(bytes), 40, stream));
    OK(cuMemcpyDtoDAsync_v2(other, memory + 16, 24, stream));
    OK(cuStreamSynchronize(stream));
    CHECK(*(unsigned char *)host(other + 23) == 3);

    OK(stand_in_set("paused", 1));
    OK(cuMemcpyDtoDAsync_v2(other, memory, 24, stream));
    OK(cuMemFree_v2(memory));
    OK(stand_in_set("paused", 0));
    CHECK(drained());
    expect_misuse("use after free");
    CHECK(cuMemFree_v2(memory) == CUDA_ERROR_INVALID_VALUE);
    expect_misuse("freed already");
    CHECK(stand_in_count("live_allocations") == 1 && stand_in_count("live_bytes") == 24);

    OK(stand_in_set("memory_bytes", 100));
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    CHECK(free_bytes == 76 && total == 100);
    CHECK(cuMemAlloc_v2(&base, 77) == CUDA_ERROR_OUT_OF_MEMORY);
    fail_allocation(0);
    CHECK(cuMemAlloc_v2(&base, 70) == CUDA_ERROR_OUT_OF_MEMORY);
    fail_allocation(-1);

    CHECK(stand_in_count("synchronisations") == 2);
    OK(stand_in_set("synchronous_memory", 1));
    OK(cuMemFree_v2(other));
    CHECK(stand_in_count("synchronisations") == 3 && stand_in_count("cuMemAlloc_v2") == 5);
}

/* What reads a copy's destination too early gets what was there or NaN under some seeds; what waits never does. */
static void test_early_reads(void)
{
    int early = 0, midway = 0, in_time = 0;
    const uint32_t old = 0x40000000, from = 0x40400000;
    for (uint64_t seed = 0; seed < 40; seed++)
        for (int ordered = 0; ordered <= 1; ordered++) {
            begin(seed, 8);
            OK(stand_in_set("paused", 1));
            CUstream writes = new_stream(), reads = new_stream();
            CUevent written = new_event();
            uint32_t to = 0;
            CUdeviceptr memory = new_memory(4);
            memcpy(host(memory), &old, 4);
            OK(cuMemcpyHtoDAsync_v2(memory, &from, 4, writes));
            OK(cuEventRecord(written, writes));
            if (ordered)
                OK(cuStreamWaitEvent(reads, written, 0));
            OK(cuMemcpyDtoHAsync_v2(&to, memory, 4, reads));
            OK(stand_in_set("paused", 0));
            OK(cuStreamSynchronize(reads));
            CHECK(to == from || (!ordered && (to == old || to == UINT32_MAX)));
            if (!ordered)
                *(to == from ? &in_time : to == old ? &early : &midway) += 1;
            CHECK(drained());
            OK(cuMemFree_v2(memory));
        }
    CHECK(early >= 4 && midway >= 4 && in_time >= 4);
}

static void test_null_stream(void)
{
    begin(9, 8);
    clear_trace();
    CUstream blocking, nonblocking = new_stream();
    OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    CUdeviceptr gate = new_gate(blocking);
    run_letter(NULL, "n"); /* waits for `blocking` */
    run_letter(nonblocking, "x");
    OK(cuStreamSynchronize(nonblocking));
    CHECK(stuck_with("null stream") && strcmp(trace, "x") == 0);
    open_gate(gate);
    CHECK(drained() && strcmp(trace, "xn") == 0);
    OK(cuMemFree_v2(gate));

    gate = new_gate(NULL);
    run_letter(blocking, "b"); /* waits for the null stream */
    run_letter(nonblocking, "y");
    OK(cuStreamSynchronize(nonblocking));
    CHECK(stuck_with("stream 0, value wait") && strcmp(trace, "xny") == 0);
    open_gate(gate);
    CHECK(drained() && strcmp(trace, "xnyb") == 0);
    OK(cuMemFree_v2(gate));
}

static void *query_event(void *event)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CHECK(cuEventQuery(event) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(cuEventQuery(event));
    return NULL;
}

static void test_capture(void)
{
    begin(10, 8);
    OK(stand_in_set("capturing", 1));
    pthread_t thread;
    OK(pthread_create(&thread, NULL, query_event, new_event()));
    OK(pthread_join(thread, NULL));
    expect_misuse("not in relaxed mode");
}

static void call_from_device(void *stream)
{
    CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_PERMITTED);
}

static void test_synchronisations(void)
{
    begin(11, 8);
    CUstream stream = new_stream();
    stand_in_name_thread("main");
    OK(cuLaunchHostFunc(stream, call_from_device, stream));
    OK(cuCtxSynchronize());
    use_device(3);
    OK(cuStreamSynchronize(stream));
    OK(cuEventSynchronize(new_event()));
    CHECK(stand_in_count("synchronisations") == 3);
    CHECK(strcmp(stand_in_synchronisation(0), "cuCtxSynchronize device 0 main") == 0);
    CHECK(strcmp(stand_in_synchronisation(1), "cuStreamSynchronize device 0 main") == 0);
    CHECK(strcmp(stand_in_synchronisation(2), "cuEventSynchronize device 3 main") == 0);
    CHECK(stand_in_synchronisation(3) == NULL && stand_in_count("launches") == 1);
    expect_misuse("cuStreamQuery on a device: called by a function that a device runs");
}

/* A stream waits for what the host enqueues after a launch: fine, unless the launch synchronises the device. */
static void test_injected_synchronisation(void)
{
    for (int64_t permille = 0; permille <= 1000; permille += 1000) {
        begin(12, 8);
        CUstream waits = new_stream(), other = new_stream();
        clear_trace();
        CUdeviceptr gate = new_gate(waits);
        OK(stand_in_set("hosts", 1));
        OK(stand_in_set("injected_sync_permille", permille));
        CUresult result = cuLaunchHostFunc(other, note, (char[]){"k"});
        CHECK(result == (permille == 0 ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT));
        const char *deadlock = stand_in_deadlock();
        CHECK((deadlock != NULL) == (permille != 0));
        if (deadlock != NULL)
            CHECK(strstr(deadlock, "value wait") != NULL && strstr(deadlock, "main waits in cuLaunchHostFunc") != NULL);
        CHECK(stand_in_count("injected_synchronisations") == (permille != 0));
        OK(cuStreamWriteValue64_v2(other, gate, 1, 0));
        CHECK(drained() && traced == (permille == 0));
        OK(cuMemFree_v2(gate));
    }
}

static void test_wait_limit(void)
{
    begin(13, 8);
    CUstream stream = new_stream();
    CUdeviceptr gate = new_gate(stream);
    OK(stand_in_set("wait_limit_ms", 20)); /* the number of hosts is not known */
    CHECK(cuStreamSynchronize(stream) == CUDA_ERROR_LAUNCH_TIMEOUT);
    CHECK(stand_in_deadlock() != NULL && strstr(stand_in_deadlock(), "main waits in cuStreamSynchronize") != NULL);
    open_gate(gate);
    OK(cuStreamSynchronize(stream)); /* a deadlock ends those who wait, not those who come later */
    OK(cuMemFree_v2(gate));
}

/* -- memory and events of another process ---------------------------------------------------------------------- */

enum { WORDS = 1024 };

/* Waits for word 0 to become 1, doubles the others, sets word 0 to 2; all on a stream. */
static void double_words(void *words)
{
    uint64_t *w = words;
    for (int i = 1; i < WORDS; i++)
        w[i] *= 2;
}

typedef struct {
    CUipcMemHandle words;
    CUipcEventHandle ready;
} exported;

static CUevent new_shared_event(CUipcEventHandle *handle)
{
    CUevent event = NULL;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    OK(cuIpcGetEventHandle(handle, event));
    return event;
}

static int importing_process(int from_exporter, int to_exporter)
{
    exported got;
    CHECK(read(from_exporter, &got, sizeof got) == sizeof got);
    begin(2, 1);
    OK(stand_in_set("shared_memory", 1));
    CUdeviceptr words;
    CUevent ready, doubled;
    CUipcEventHandle handle;
    OK(cuIpcOpenMemHandle_v2(&words, got.words, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cuIpcOpenEventHandle(&ready, got.ready));
    CHECK(cuEventQuery(ready) == CUDA_ERROR_NOT_READY);
    CUstream stream = new_stream();
    OK(cuStreamWaitEvent(stream, ready, 0));
    OK(cuStreamWaitValue64_v2(stream, words, 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuLaunchHostFunc(stream, double_words, host(words)));
    OK(cuStreamWriteValue64_v2(stream, words, 2, CU_STREAM_WRITE_VALUE_DEFAULT));
    doubled = new_shared_event(&handle);
    OK(cuEventRecord(doubled, stream));
    CHECK(write(to_exporter, &handle, sizeof handle) == sizeof handle);
    CHECK(drained());
    OK(cuIpcCloseMemHandle(words));
    CHECK(cuIpcCloseMemHandle(words) == CUDA_ERROR_INVALID_VALUE);
    expect_misuse("was not opened");
    expect_no_misuse();
    char byte;
    CHECK(read(from_exporter, &byte, 1) == 1); /* its event lives until the other process has waited for it */
    stand_in_stop();
    return check_failures();
}

/* Before this process has any thread. */
static void test_two_processes(void)
{
    int to_importer[2], to_exporter[2], status;
    CHECK(pipe(to_importer) == 0 && pipe(to_exporter) == 0);
    fflush(stderr);
    pid_t child = fork();
    if (child == 0)
        _exit(importing_process(to_importer[0], to_exporter[1]));
    begin(1, 8);
    OK(stand_in_set("shared_memory", 1));
    CUstream stream = new_stream(), after = new_stream();
    CUdeviceptr words = new_memory(WORDS * 8), open;
    for (uint64_t i = 0; i < WORDS; i++)
        ((uint64_t *)host(words))[i] = i;
    exported sent;
    CHECK(cuIpcGetMemHandle(&sent.words, words + 8) == CUDA_ERROR_INVALID_VALUE); /* not its first byte */
    OK(cuIpcGetMemHandle(&sent.words, words));
    CHECK(cuIpcGetEventHandle(&sent.ready, new_event()) == CUDA_ERROR_INVALID_VALUE); /* not CU_EVENT_INTERPROCESS */
    CUevent ready = new_shared_event(&sent.ready), doubled;
    CUdeviceptr gate = new_gate(stream);
    OK(cuEventRecord(ready, stream));
    CHECK(write(to_importer[1], &sent, sizeof sent) == sizeof sent);

    CUipcEventHandle handle;
    CHECK(read(to_exporter[0], &handle, sizeof handle) == sizeof handle);
    OK(cuIpcOpenEventHandle(&doubled, handle));
    OK(cuStreamWaitEvent(after, doubled, 0));
    OK(cuStreamWriteValue64_v2(after, words, 3, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWriteValue64_v2(new_stream(), words, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    CHECK(stuck_with("record 1 of interprocess event") && *(uint64_t *)host(words) == 1);
    CHECK(cuEventQuery(ready) == CUDA_ERROR_NOT_READY && cuEventQuery(doubled) == CUDA_ERROR_NOT_READY);
    open_gate(gate);
    OK(cuEventSynchronize(doubled));
    OK(cuStreamSynchronize(after));
    CHECK(*(uint64_t *)host(words) == 3);
    for (uint64_t i = 1; i < WORDS; i++)
        CHECK(((uint64_t *)host(words))[i] == 2 * i);
    CHECK(write(to_importer[1], "", 1) == 1);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);

    OK(cuIpcOpenMemHandle_v2(&open, sent.words, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)); /* as another rank would */
    CHECK(open != words && ((uint64_t *)host(open))[9] == 18 && stand_in_count("open_handles") == 1);
    CHECK(cuMemFree_v2(open) == CUDA_ERROR_INVALID_VALUE);
    expect_misuse("not what cuMemAlloc gave");
    OK(cuMemFree_v2(words));
    expect_misuse("still open");
    OK(cuIpcCloseMemHandle(open));
    OK(cuMemFree_v2(gate));
    for (int i = 0; i < 2; i++) {
        close(to_importer[i]);
        close(to_exporter[i]);
    }
}

/* An event under two names keeps the rules: a wait is for the record that was the last when it was enqueued. */
static void test_names_of_an_event(void)
{
    for (int shared = 0; shared <= 1; shared++) {
        begin(6, 8);
        clear_trace();
        OK(stand_in_set("shared_memory", shared));
        CUipcEventHandle handle;
        CUevent event = new_shared_event(&handle), name;
        CUstream gated = new_stream(), free_stream = new_stream();
        CUdeviceptr gate = new_gate(gated);
        OK(cuIpcOpenEventHandle(&name, handle));
        OK(cuStreamWaitEvent(free_stream, name, 0)); /* never recorded */
        run_letter(free_stream, "a");
        OK(cuStreamSynchronize(free_stream));
        OK(cuEventRecord(event, gated));
        CHECK(cuEventQuery(name) == CUDA_ERROR_NOT_READY);
        use_device(1);
        CUstream waits = new_stream();
        OK(cuStreamWaitEvent(waits, name, 0));
        run_letter(waits, "b");
        use_device(0);
        OK(cuEventRecord(name, free_stream));
        OK(cuEventSynchronize(event));
        CHECK(stuck_with("record 1 of interprocess event") && strcmp(trace, "a") == 0);
        open_gate(gate);
        CHECK(drained() && strcmp(trace, "ab") == 0);
        CHECK(cuIpcGetEventHandle(&handle, name) == CUDA_ERROR_INVALID_VALUE); /* from its first name only */
        OK(cuEventDestroy_v2(event));
        OK(cuEventDestroy_v2(name));
        CHECK(stand_in_count("live_events") == 0);
        OK(cuMemFree_v2(gate));
    }
}

/* -- NCCL -------------------------------------------------------------------------------------------------------- */

static ncclConfig_t nonblocking(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

/* Asks until the communicator is no longer in progress; ncclInProgress if it stays so for 10 s. */
static ncclResult_t poll(ncclComm_t comm)
{
    ncclResult_t result = ncclInProgress, asked = ncclSuccess;
    time_t began = time(NULL);
    while (asked == ncclSuccess && result == ncclInProgress && time(NULL) - began < 10) {
        asked = ncclCommGetAsyncError(comm, &result);
        sched_yield();
    }
    CHECK(asked == ncclSuccess);
    return result;
}

static int settled(ncclResult_t result, ncclComm_t comm)
{
    return (result == ncclSuccess || result == ncclInProgress) && poll(comm) == ncclSuccess;
}

/* Two ranks, on devices 0 and 1, both of this thread, with a stream, a sent and a received word of memory each. */
typedef struct {
    ncclComm_t comm[2];
    CUstream stream[2];
    CUdeviceptr sent[2], received[2];
} pair;

static pair new_pair(uint64_t seed, int64_t queues, int blocking)
{
    pair made;
    ncclUniqueId id;
    ncclConfig_t config = nonblocking();
    config.blocking = blocking;
    begin(seed, queues);
    OK(ncclGetUniqueId(&id));
    OK(ncclGroupStart());
    for (int rank = 0; rank < 2; rank++) {
        use_device(rank);
        OK(ncclCommInitRankConfig(&made.comm[rank], 2, id, rank, &config));
        made.stream[rank] = new_stream();
        made.sent[rank] = new_memory(8);
        made.received[rank] = new_memory(8);
        *(uint64_t *)host(made.sent[rank]) = (uint64_t)rank + 40;
    }
    ncclResult_t result = ncclGroupEnd();
    for (int rank = 0; rank < 2; rank++)
        CHECK(settled(result, made.comm[rank]));
    return made;
}

static void end_pair(const pair *p)
{
    for (int rank = 0; rank < 2; rank++) {
        OK(cuMemFree_v2(p->sent[rank]));
        OK(cuMemFree_v2(p->received[rank]));
    }
}

static ncclResult_t send_from(const pair *p, int rank)
{
    use_device(rank);
    return ncclSend(host(p->sent[rank]), 1, ncclInt64, 1 - rank, p->comm[rank], p->stream[rank]);
}

static ncclResult_t receive_on(const pair *p, int rank)
{
    use_device(rank);
    return ncclRecv(host(p->received[rank]), 1, ncclInt64, 1 - rank, p->comm[rank], p->stream[rank]);
}

static uint64_t received_on(const pair *p, int rank)
{
    return *(const uint64_t *)host(p->received[rank]);
}

static void test_message(void)
{
    for (uint64_t seed = 0; seed < 20; seed++) {
        pair p = new_pair(seed, 1, 0);
        int number;
        OK(ncclCommCount(p.comm[1], &number));
        CHECK(number == 2);
        OK(ncclCommUserRank(p.comm[1], &number));
        CHECK(number == 1);
        void *registration;
        OK(ncclCommRegister(p.comm[1], host(p.received[1]), 8, &registration));
        OK(ncclCommDeregister(p.comm[1], registration));

        clear_trace();
        OK(stand_in_set("in_progress_percent", 100));
        *(uint64_t *)host(p.received[1]) = 5;
        ncclResult_t received = receive_on(&p, 1), sent = send_from(&p, 0);
        CHECK(settled(received, p.comm[1]));
        use_device(1);
        run_letter(new_stream(), "k"); /* on the same queue: behind the receive */
        if (seed == 0)                 /* the receive has begun, so what was there is gone */
            CHECK(stuck_with("receive of message 0, 8 bytes, from device 0") && traced == 0 &&
                  received_on(&p, 1) == UINT64_MAX);
        CHECK(settled(sent, p.comm[0]));
        CHECK(drained() && traced == 1 && received_on(&p, 1) == 40);
        CHECK(stand_in_count("send") == 1 && stand_in_count("receive") == 1 && stand_in_count("nccl") == 2);

        ncclResult_t first = ncclCommFinalize(p.comm[0]), again;
        CHECK(first == ncclInProgress); /* whoever comes first waits for the others */
        for (int i = 0; i < 10; i++) {
            OK(ncclCommGetAsyncError(p.comm[0], &again));
            CHECK(again == ncclInProgress);
        }
        CHECK(settled(ncclCommFinalize(p.comm[1]), p.comm[1]) && settled(first, p.comm[0]));
        CHECK(stand_in_count("live_communicators") == 2);
        OK(ncclCommDestroy(p.comm[0]));
        OK(ncclCommDestroy(p.comm[1]));
        CHECK(stand_in_count("live_communicators") == 0);
        end_pair(&p);
    }
}

/* The second receive, free to run, does not take the first message. */
static void test_messages_keep_their_order(void)
{
    pair p = new_pair(27, 8, 0);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    use_device(1);
    CUstream second = new_stream();
    CUdeviceptr gate = new_gate(p.stream[1]), word = new_memory(8);
    OK(receive_on(&p, 1));
    OK(ncclRecv(host(word), 1, ncclInt64, 0, p.comm[1], second));
    OK(send_from(&p, 0));
    CHECK(stuck_with("receive of message 1"));
    open_gate(gate);
    *(uint64_t *)host(p.received[0]) = 41;
    OK(ncclSend(host(p.received[0]), 1, ncclInt64, 1, p.comm[0], p.stream[0]));
    CHECK(drained() && received_on(&p, 1) == 40 && *(uint64_t *)host(word) == 41);
    OK(cuMemFree_v2(gate));
    OK(cuMemFree_v2(word));
    end_pair(&p);
}

/* A receive that has not begun: what it should have filled is undefined all the same. */
static void test_abort_before_it_begins(void)
{
    pair p = new_pair(28, 8, 0);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    use_device(1);
    CUdeviceptr gate = new_gate(p.stream[1]);
    *(uint64_t *)host(p.received[1]) = 5;
    OK(receive_on(&p, 1));
    OK(ncclCommAbort(p.comm[1]));
    CHECK(stuck_with("value wait") && received_on(&p, 1) == 5);
    open_gate(gate);
    CHECK(drained() && received_on(&p, 1) == UINT64_MAX);
    OK(cuMemFree_v2(gate));
    end_pair(&p);
}

static void test_configuration(void)
{
    begin(20, 8);
    ncclComm_t comm = NULL;
    ncclUniqueId id, other = {{0}};
    int version;
    OK(ncclGetVersion(&version));
    CHECK(version == 22907 && strcmp(ncclGetErrorString(ncclInProgress), "NCCL operation in progress") == 0);
    OK(ncclGetUniqueId(&id));
    CHECK(ncclCommInitRank(&comm, 1, other, 0) == ncclInvalidArgument);
    expect_misuse("not one of ncclGetUniqueId");
    CHECK(ncclCommInitRank(&comm, 2, id, 2) == ncclInvalidArgument);
    expect_misuse("rank 2 of 2");
    CHECK(strstr(ncclGetLastError(NULL), "ncclCommInitRank: rank 2 of 2") != NULL);

    ncclConfig_t config = nonblocking();
    config.magic++;
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    expect_misuse("NCCL_CONFIG_INITIALIZER");
    config = nonblocking();
    config.size = 40; /* as of 2.17, yet it says 2.18 */
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    expect_misuse("version 21801 has 40 bytes");
    config = nonblocking();
    config.blocking = 2;
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    expect_misuse("blocking is 2");
    config = nonblocking();
    config.minCTAs = 3;
    config.maxCTAs = 2;
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument && comm == NULL);
    expect_misuse("minCTAs 3, maxCTAs 2");

    config = nonblocking();
    config.version = NCCL_VERSION(2, 14, 3); /* knows `blocking` and no more: what follows is not read */
    config.size = 24;
    config.minCTAs = -5;
    ncclResult_t result = ncclCommInitRankConfig(&comm, 1, id, 0, &config);
    CHECK(settled(result, comm));
    OK(ncclCommDestroy(comm)); /* a rank alone need not wait for others */
    CHECK(ncclCommDestroy(comm) == ncclInvalidArgument);
    expect_misuse("communicator 1 is destroyed");

    OK(ncclGetUniqueId(&id));
    config = nonblocking();
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInProgress);
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 1, &config) == ncclInvalidUsage); /* one GPU for two ranks */
    expect_misuse("both on device 0");
    OK(cuCtxSetCurrent(NULL)); /* then the runtime takes device 0 */
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 1, &config) == ncclInvalidUsage);
    expect_misuse("both on device 0");
    OK(ncclCommAbort(comm));
}

static void *use_communicator(void *comm)
{
    ncclResult_t result;
    int count;
    OK(ncclCommGetAsyncError(comm, &result)); /* these two may come from any thread */
    OK(ncclCommCount(comm, &count));
    return NULL;
}

static void *abort_communicator(void *comm)
{
    OK(ncclCommAbort(comm));
    return NULL;
}

static void in_thread(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    OK(pthread_create(&thread, NULL, function, argument));
    OK(pthread_join(thread, NULL));
}

static void test_traps(void)
{
    pair p = new_pair(21, 8, 0);
    OK(stand_in_set("in_progress_percent", 100));
    CUevent event = new_event();
    CHECK(receive_on(&p, 1) == ncclInProgress);
    CHECK(receive_on(&p, 1) == ncclInvalidArgument);
    expect_misuse("still in progress");
    use_device(0);
    event = new_event();
    CHECK(send_from(&p, 0) == ncclInProgress);
    OK(cuEventRecord(event, p.stream[0]));
    expect_misuse("cuEventRecord on main: on stream 1 while an NCCL group");
    OK(cuEventSynchronize(event)); /* reached before the send that it should follow has begun */
    CHECK(stand_in_count("nccl") == 0);
    OK(cuStreamQuery(p.stream[1]));
    expect_misuse("cuStreamQuery on main: on stream 2 while an NCCL group");
    OK(cuCtxSynchronize());
    expect_misuse("cuCtxSynchronize on main: on stream 1 while an NCCL group");
    CHECK(poll(p.comm[0]) == ncclSuccess && poll(p.comm[1]) == ncclSuccess);
    CHECK(drained() && received_on(&p, 1) == 40);

    in_thread(use_communicator, p.comm[0]);
    expect_misuse("ncclCommCount");
    use_device(1);
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], p.stream[0]) == ncclInvalidUsage);
    expect_misuse("is of device 0, the thread's current one is 1");
    use_device(0);
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], p.stream[1]) == ncclUnhandledCudaError);
    expect_misuse("the stream is not");
    CHECK(ncclSend(host(p.sent[1]), 1, ncclInt64, 1, p.comm[0], p.stream[0]) == ncclInvalidArgument);
    expect_misuse("is of device 0, the memory of device 1");
    CHECK(ncclSend(host(p.sent[0]), 2, ncclInt64, 1, p.comm[0], p.stream[0]) == ncclInvalidArgument);
    expect_misuse("16 bytes at offset 0 of an allocation of 8 bytes");
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 2, p.comm[0], p.stream[0]) == ncclInvalidArgument);
    expect_misuse("peer 2 of 2");
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 0, p.comm[0], p.stream[0]) == ncclInvalidUsage);
    expect_misuse("to itself");
    OK(ncclGroupStart());
    OK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], p.stream[0]));
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], new_stream()) == ncclInvalidUsage);
    expect_misuse("not modelled");
    CHECK(ncclGroupEnd() == ncclInvalidUsage); /* and nothing of it is executed */
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    expect_misuse("no ncclGroupStart");
    CHECK(stand_in_count("nccl") == 2);

    CHECK(receive_on(&p, 1) == ncclInProgress);
    in_thread(abort_communicator, p.comm[1]);
    CHECK(drained()); /* it never reached its stream */
    CHECK(ncclCommAbort(p.comm[1]) == ncclInvalidArgument);
    expect_misuse("destroyed or aborted");
    OK(ncclCommAbort(p.comm[0]));
    end_pair(&p);

    p = new_pair(22, 8, 0);
    ncclUniqueId id;
    ncclComm_t blocking;
    OK(ncclGetUniqueId(&id));
    use_device(0);
    OK(ncclCommInitRank(&blocking, 1, id, 0));
    OK(ncclGroupStart());
    OK(send_from(&p, 0));
    OK(ncclSend(host(p.sent[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    OK(ncclRecv(host(p.received[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    expect_misuse("blocking and nonblocking");
    OK(ncclGroupStart()); /* a rank may send to itself, both ends in one group */
    OK(ncclSend(host(p.sent[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    OK(ncclRecv(host(p.received[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    OK(ncclGroupEnd());
    OK(cuStreamSynchronize(p.stream[0]));
    CHECK(received_on(&p, 0) == 40);
    OK(ncclCommDestroy(blocking));
    end_pair(&p);
}

/* Three ranks of one communicator, all of this thread: what one group holds goes its own ways. */
static void test_groups(void)
{
    begin(29, 1);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    ncclUniqueId id;
    ncclConfig_t config = nonblocking();
    ncclComm_t comm[3];
    CUstream stream[3];
    CUdeviceptr words[3];
    OK(ncclGetUniqueId(&id));
    OK(ncclGroupStart());
    for (int rank = 0; rank < 3; rank++) {
        use_device(rank);
        OK(ncclCommInitRankConfig(&comm[rank], 3, id, rank, &config));
        stream[rank] = new_stream();
        words[rank] = new_memory(32);
        for (int i = 0; i < 4; i++)
            ((uint64_t *)host(words[rank]))[i] = (uint64_t)(10 * rank + i);
    }
    OK(ncclGroupEnd());
    uint64_t *held[3] = {host(words[0]), host(words[1]), host(words[2])};

    use_device(0); /* one word to rank 2, and two to rank 1, in order */
    OK(ncclGroupStart());
    OK(ncclSend(held[0] + 2, 1, ncclInt64, 2, comm[0], stream[0]));
    OK(ncclGroupStart()); /* only the outermost end counts */
    OK(ncclSend(held[0], 1, ncclInt64, 1, comm[0], stream[0]));
    OK(ncclGroupEnd());
    OK(ncclSend(held[0] + 1, 1, ncclInt64, 1, comm[0], stream[0]));
    CHECK(stand_in_count("issued") == 0);
    OK(ncclGroupEnd());
    CHECK(stand_in_count("issued") == 1);
    use_device(2); /* rank 2 gets its word though rank 1 has not come */
    OK(ncclRecv(held[2], 1, ncclInt64, 0, comm[2], stream[2]));
    OK(cuStreamSynchronize(stream[2]));
    CHECK(held[2][0] == 2 && stuck_with("send of message 0, 8 bytes, to device 1"));
    use_device(1);
    OK(ncclRecv(held[1], 1, ncclInt64, 0, comm[1], stream[1]));
    OK(ncclRecv(held[1] + 1, 1, ncclInt64, 0, comm[1], stream[1]));
    CHECK(drained() && held[1][0] == 0 && held[1][1] == 1);
    CHECK(stand_in_count("send") == 3 && stand_in_count("receive") == 3 && stand_in_count("nccl") == 4);

    OK(ncclGroupStart()); /* over the communicators of two ranks: an operation on the stream of each */
    OK(ncclSend(held[1] + 3, 1, ncclInt64, 2, comm[1], stream[1]));
    use_device(2);
    OK(ncclRecv(held[2] + 1, 1, ncclInt64, 1, comm[2], stream[2]));
    OK(ncclGroupEnd());
    CHECK(drained() && held[2][1] == 13);
    for (int rank = 0; rank < 3; rank++) {
        OK(ncclCommAbort(comm[rank]));
        OK(cuMemFree_v2(words[rank]));
    }
}

/* NCCL may synchronise the device before it launches: the group stays in progress until the device is idle. */
static void test_injected_synchronisation_of_nccl(void)
{
    pair p = new_pair(30, 8, 0);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    OK(stand_in_set("injected_sync_permille", 1000));
    use_device(0);
    CUstream other = new_stream();
    CUdeviceptr gate = new_memory(8);
    *(uint64_t *)host(gate) = 0;
    OK(cuStreamWaitValue64_v2(other, gate, 1, CU_STREAM_WAIT_VALUE_EQ));
    ncclResult_t asked;
    CHECK(send_from(&p, 0) == ncclInProgress);
    for (int i = 0; i < 10; i++) {
        OK(ncclCommGetAsyncError(p.comm[0], &asked));
        CHECK(asked == ncclInProgress);
    }
    OK(receive_on(&p, 1)); /* its device is idle */
    CHECK(stuck_with("value wait") && stand_in_count("injected_synchronisations") == 2);
    open_gate(gate);
    CHECK(poll(p.comm[0]) == ncclSuccess && drained() && received_on(&p, 1) == 40);
    OK(cuMemFree_v2(gate));
    end_pair(&p);
}

/* The first message of a pair waits for both hosts, the second does not. */
static void test_connection(void)
{
    for (int setup = 0; setup <= 1; setup++) {
        pair p = new_pair(23, 8, 0);
        OK(stand_in_set("connection_setup", setup));
        for (int message = 0; message < 2; message++) {
            ncclResult_t sent = send_from(&p, 0), asked = sent;
            for (int i = 0; i < 10 && asked == ncclInProgress; i++)
                OK(ncclCommGetAsyncError(p.comm[0], &asked));
            CHECK(asked == (setup && message == 0 ? ncclInProgress : ncclSuccess));
            CHECK(settled(receive_on(&p, 1), p.comm[1]) && settled(sent, p.comm[0]) && drained());
        }
        end_pair(&p);
    }
}

static void test_failing_calls(void)
{
    pair p = new_pair(26, 8, 0);
    size_t free_bytes, total;
    stand_in_fail_call("cuMem", 1, CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    OK(cuCtxSynchronize());
    CHECK(stand_in_count("failed_calls") == 0);
    CHECK(cuMemGetInfo_v2(&free_bytes, &total) == CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    CHECK(stand_in_count("failed_calls") == 1 && stand_in_count("cuMemGetInfo_v2") == 3);

    ncclResult_t result;
    stand_in_fail_call("ncclSend", 0, ncclSystemError);
    CHECK(send_from(&p, 0) == ncclSystemError);
    stand_in_break_communicators(1, 2, ncclRemoteError); /* no rank is on device 2 */
    OK(ncclCommGetAsyncError(p.comm[1], &result));
    CHECK(result == ncclSuccess);
    stand_in_break_communicators(1, 0, ncclRemoteError);
    OK(ncclCommGetAsyncError(p.comm[1], &result));
    CHECK(result == ncclRemoteError && receive_on(&p, 1) == ncclRemoteError);
    OK(ncclCommGetAsyncError(p.comm[0], &result));
    CHECK(result == ncclSuccess);
    end_pair(&p);
}

static void test_unequal_sizes(void)
{
    pair p = new_pair(24, 8, 0);
    use_device(1);
    ncclResult_t received = ncclRecv(host(p.received[1]), 4, ncclUint8, 0, p.comm[1], p.stream[1]), result;
    ncclResult_t sent = send_from(&p, 0);
    CHECK(settled(sent, p.comm[0]));
    /* Both may have run by the time the second is asked. */
    while (received == ncclInProgress)
        OK(ncclCommGetAsyncError(p.comm[1], &received));
    CHECK(drained());
    expect_misuse("rank 0 sends 1 elements of type 4, rank 1 receives 4 of type 1");
    OK(ncclCommGetAsyncError(p.comm[0], &result));
    CHECK(result == ncclInvalidUsage && received_on(&p, 1) == UINT64_MAX);
    CHECK(send_from(&p, 0) == ncclInvalidUsage); /* a failed communicator refuses */
    end_pair(&p);
}

static void test_faults(void)
{
    for (int kind = STAND_IN_SENDER_LOST; kind <= STAND_IN_RECEIVER_FAILS; kind++)
        for (int aborts = 0; aborts <= 1; aborts++) {
            pair p = new_pair(25, 8, 0);
            stand_in_fault((stand_in_fault_kind)kind, 0, 1, 1, ncclRemoteError);
            for (int message = 0; message < 2; message++) {
                ncclResult_t received = receive_on(&p, 1), sent = send_from(&p, 0);
                ncclResult_t ends[2] = {poll(p.comm[0]), poll(p.comm[1])};
                if (message == 1) /* it may have failed by now */
                    continue;
                CHECK(received == ncclSuccess || received == ncclInProgress);
                CHECK(sent == ncclSuccess || sent == ncclInProgress);
                CHECK(ends[0] == ncclSuccess && ends[1] == ncclSuccess && drained() && received_on(&p, 1) == 40);
            }
            CHECK(stuck_with("lost by a fault"));
            for (int rank = 0; rank < 2; rank++) {
                ncclResult_t result, wanted = ncclSuccess;
                if (kind == (rank == 0 ? STAND_IN_SENDER_FAILS : STAND_IN_RECEIVER_FAILS))
                    wanted = ncclRemoteError;
                OK(ncclCommGetAsyncError(p.comm[rank], &result));
                CHECK(result == wanted);
                if (aborts)
                    in_thread(abort_communicator, p.comm[rank]);
            }
            if (!aborts)
                stand_in_end_faults();
            CHECK(drained());
            CHECK(received_on(&p, 1) == (aborts ? UINT64_MAX : 40));
            end_pair(&p);
        }
}

/* -- ranks as threads -------------------------------------------------------------------------------------------- */

typedef struct ranks ranks;
struct ranks {
    int num_ranks;
    ncclUniqueId ids[MAX_RANKS];
    void (*body)(ranks *all, int rank);
    int variant;
    atomic_int failed; /* ranks that saw a deadlock */
};
typedef struct {
    ranks *all;
    int rank;
} rank_argument;

static void *run_rank(void *argument)
{
    rank_argument *me = argument;
    char name[16];
    snprintf(name, sizeof name, "rank %d", me->rank);
    stand_in_name_thread(name);
    use_device(me->rank);
    me->all->body(me->all, me->rank);
    return NULL;
}

static void run_ranks(ranks *all)
{
    pthread_t threads[MAX_RANKS];
    rank_argument arguments[MAX_RANKS];
    for (int i = 0; i < MAX_RANKS; i++)
        OK(ncclGetUniqueId(&all->ids[i]));
    for (int rank = 0; rank < all->num_ranks; rank++) {
        arguments[rank] = (rank_argument){all, rank};
        OK(pthread_create(&threads[rank], NULL, run_rank, &arguments[rank]));
    }
    for (int rank = 0; rank < all->num_ranks; rank++)
        OK(pthread_join(threads[rank], NULL));
}

enum { SEND_FIRST, IN_GROUP };

/* Two ranks exchange a word: each sends, then receives on its other stream, or both in one group. */
static void exchange(ranks *all, int rank)
{
    ncclComm_t comm;
    CUstream sends = new_stream(), receives = new_stream();
    CUdeviceptr sent = new_memory(8), received = new_memory(8);
    *(uint64_t *)host(sent) = (uint64_t)rank + 70;
    OK(ncclCommInitRank(&comm, 2, all->ids[0], rank));
    if (all->variant == IN_GROUP)
        OK(ncclGroupStart());
    int failed = ncclSend(host(sent), 1, ncclInt64, 1 - rank, comm, sends) != ncclSuccess;
    if (!failed) {
        CUstream other = all->variant == IN_GROUP ? sends : receives; /* one group takes one stream */
        OK(ncclRecv(host(received), 1, ncclInt64, 1 - rank, comm, other));
        if (all->variant == IN_GROUP)
            OK(ncclGroupEnd());
        failed = cuCtxSynchronize() != CUDA_SUCCESS;
    }
    if (failed) {
        OK(ncclCommAbort(comm));
        OK(cuCtxSynchronize());
    } else {
        OK(ncclCommDestroy(comm));
    }
    all->failed += failed;
    CHECK(*(uint64_t *)host(received) == (failed ? UINT64_MAX : (uint64_t)(1 - rank) + 70));
}

static void test_rendezvous(void)
{
    static const struct {
        int64_t queues, setup, buffered;
        int variant;
        const char *deadlock;
    } cases[] = {
        {1, 0, 0, SEND_FIRST, "send of message 0, 8 bytes, to device 1"}, /* nothing buffers */
        {2, 0, 0, SEND_FIRST, NULL},
        {1, 0, 8, SEND_FIRST, NULL},
        {1, 0, 7, SEND_FIRST, "send of message 0"}, /* larger than what is buffered */
        {1, 0, 0, IN_GROUP, NULL},
        {8, 1, 0, SEND_FIRST, "rank 0 waits in ncclSend"}, /* hosts: each comes with the end that the other does not */
        {1, 1, 0, IN_GROUP, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint64_t seed = 0; seed < (slow ? 2 : 20); seed++) {
            begin(seed, cases[i].queues);
            OK(stand_in_set("connection_setup", cases[i].setup));
            OK(stand_in_set("buffered_bytes", cases[i].buffered));
            OK(stand_in_set("hosts", 2));
            ranks all = {.num_ranks = 2, .body = exchange, .variant = cases[i].variant};
            run_ranks(&all);
            const char *deadlock = stand_in_deadlock();
            CHECK((deadlock != NULL) == (cases[i].deadlock != NULL));
            CHECK(all.failed == (cases[i].deadlock != NULL ? 2 : 0));
            if (deadlock != NULL && cases[i].deadlock != NULL && strstr(deadlock, cases[i].deadlock) == NULL) {
                fprintf(stderr, "%swanted \"%s\"\n", deadlock, cases[i].deadlock);
                CHECK(!"the deadlock that was wanted");
            }
            CHECK(drained());
        }
}

/* A chain of ranks: each receives a word, adds one and sends it on, message after message, through two buffers, with a
 * communicator and a stream per edge. What the last rank gets tells whether each wait was honoured. */
enum { MESSAGES = 6, BUFFERS = 2, NO_REUSE_WAIT = 1 };

static void add_one(void *words)
{
    uint64_t *const *w = words;
    *w[1] = *w[0] + 1;
}

static void chain(ranks *all, int rank)
{
    int first = rank == 0, last = rank == all->num_ranks - 1;
    ncclComm_t before = NULL, after = NULL;
    ncclConfig_t config = nonblocking();
    ncclResult_t results[2] = {ncclSuccess, ncclSuccess};
    if (!first)
        results[0] = ncclCommInitRankConfig(&before, 2, all->ids[rank - 1], 1, &config);
    if (!last)
        results[1] = ncclCommInitRankConfig(&after, 2, all->ids[rank], 0, &config);
    CHECK((first || settled(results[0], before)) && (last || settled(results[1], after)));
    CUstream receives = new_stream(), computes = new_stream(), sends = new_stream();
    CUevent received[BUFFERS], computed[BUFFERS], sent[BUFFERS];
    CUdeviceptr in = new_memory(BUFFERS * 8), out = new_memory(BUFFERS * 8);
    uint64_t *words[BUFFERS][2], results_of[MESSAGES] = {0}, *result_words[MESSAGES][2];
    for (int b = 0; b < BUFFERS; b++) {
        received[b] = new_event();
        computed[b] = new_event();
        sent[b] = new_event();
        words[b][0] = (uint64_t *)host(in) + b;
        words[b][1] = (uint64_t *)host(out) + b;
    }
    uint64_t inputs[MESSAGES];
    for (int m = 0; m < MESSAGES; m++) {
        int b = m % BUFFERS;
        inputs[m] = (uint64_t)m * 100;
        if (all->variant != NO_REUSE_WAIT)
            OK(cuStreamWaitEvent(receives, computed[b], 0)); /* its buffer was read */
        if (first)
            OK(cuMemcpyHtoDAsync_v2(in + (CUdeviceptr)b * 8, &inputs[m], 8, receives));
        else
            CHECK(settled(ncclRecv(words[b][0], 1, ncclInt64, 0, before, receives), before));
        OK(cuEventRecord(received[b], receives));
        OK(cuStreamWaitEvent(computes, received[b], 0));
        OK(cuStreamWaitEvent(computes, sent[b], 0));
        result_words[m][0] = words[b][0];
        result_words[m][1] = &results_of[m];
        OK(cuLaunchHostFunc(computes, add_one, last ? result_words[m] : words[b]));
        OK(cuEventRecord(computed[b], computes));
        if (!last) {
            OK(cuStreamWaitEvent(sends, computed[b], 0));
            CHECK(settled(ncclSend(words[b][1], 1, ncclInt64, 1, after, sends), after));
            OK(cuEventRecord(sent[b], sends));
        }
    }
    CHECK(stand_in_deadlock() == NULL);
    OK(cuCtxSynchronize());
    for (int m = 0; last && m < MESSAGES; m++)
        all->failed += results_of[m] != (uint64_t)(m * 100 + all->num_ranks);
    if (!first)
        results[0] = ncclCommFinalize(before);
    if (!last)
        results[1] = ncclCommFinalize(after);
    CHECK((first || settled(results[0], before)) && (last || settled(results[1], after)));
    OK(ncclCommDestroy(before));
    OK(ncclCommDestroy(after));
    OK(cuMemFree_v2(in));
    OK(cuMemFree_v2(out));
}

static void test_chain(void)
{
    int wrong_without_wait = 0;
    for (int variant = 0; variant <= NO_REUSE_WAIT; variant++)
        for (uint64_t seed = 0; seed < (slow ? 4 : 40); seed++) {
            static const int64_t queues[] = {8, 1, 2, 32};
            begin(seed, queues[seed % 4]);
            ranks all = {.num_ranks = 2 + (int)(seed % 3), .body = chain, .variant = variant};
            run_ranks(&all);
            CHECK(variant == NO_REUSE_WAIT || all.failed == 0);
            wrong_without_wait += variant == NO_REUSE_WAIT && all.failed > 0;
            CHECK(stand_in_count("synchronisations") == all.num_ranks && stand_in_count("live_allocations") == 0);
            CHECK(stand_in_count("receive") == MESSAGES * (all.num_ranks - 1));
        }
    CHECK(slow || wrong_without_wait > 0); /* the timings differ enough to find a missing wait */
}

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "sanitize") != 0;
    test_two_processes();
    test_basics();
    test_queues();
    test_order_is_seeded();
    test_delays();
    test_events();
    test_names_of_an_event();
    test_values();
    test_memory();
    test_early_reads();
    test_null_stream();
    test_capture();
    test_synchronisations();
    test_injected_synchronisation();
    test_wait_limit();
    test_message();
    test_messages_keep_their_order();
    test_abort_before_it_begins();
    test_configuration();
    test_traps();
    test_groups();
    test_injected_synchronisation_of_nccl();
    test_connection();
    test_failing_calls();
    test_unequal_sizes();
    test_faults();
    test_rendezvous();
    test_chain();
    expect_no_misuse();
    return check_failures();
}
