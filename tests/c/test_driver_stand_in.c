/* test_driver_stand_in.c - does the stand-in for the CUDA driver keep the rules that transports rely on, block where
 * the real one may block, and report each trap? What a GPU would do is not tested here: there is none. */
#include "stand_in_test.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

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
    CUdeviceptr words = new_memory(2 << 20), few = new_memory(WORDS * 8), open;
    for (uint64_t i = 0; i < WORDS; i++)
        ((uint64_t *)host(words))[i] = i;
    exported sent;
    OK(cuIpcGetMemHandle(&sent.words, few));
    expect_misuse("no multiple of 2 MiB");
    OK(cuMemFree_v2(few));
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
    expect_no_misuse();
    return check_failures();
}
