/* stand_in.h - what tests say to, and ask of, the stand-ins for the CUDA driver and for NCCL.
 *
 * The stand-ins define the functions of cuda_api.h and nccl_api.h under their real names: link them into a test, or
 * dlopen gpu_stand_in.so in place of libcuda.so.1 and libnccl.so.2. Nothing is computed on a device: device memory is
 * host memory, a launch is cuLaunchHostFunc, and one worker thread executes what was enqueued. They show that calls are
 * legal, ordered, free of deadlock and of use after free; they say nothing about speed or about real hardware.
 *
 * Launches     One at a time over all devices: a function that waits for another hangs, one that sleeps holds up all.
 * Copies       The host waits for a copy from or to memory of the host that is not pinned, until it has been executed.
 * Queues       A stream belongs to one hardware queue of its device, dealt round robin as streams are created (a
 *              device's null stream to queue 0). A queue executes in order of issue, whatever the stream: an operation
 *              that waits for an event or a match, or is stalled, keeps all behind it waiting. Hardware is less strict:
 *              a kernel that has started lets those of other streams pass.
 * Order        Among the heads of queues that can run the seed chooses, and delays some. A copy first fills its
 *              destination with 0xFF (NaN) and copies later, so what reads too early or overwrites too early is seen.
 * Streams      All are CU_STREAM_NON_BLOCKING, and communicators nonblocking: nothing else is modelled.
 * Misuse       What a real driver would leave undefined, and each trap, is written to a list: a test that ends asserts
 *              that it is empty. Errors that the real call returns are returned as well.
 * Processes    Memory and events can be opened by other processes, which reset together with the one that made them.
 * Freeing      It is misuse where a test has stopped the device's work for good: a real driver waits for that first.
 * Waiting      A host call that waits while nothing can ever run again returns CUDA_ERROR_LAUNCH_TIMEOUT (NCCL:
 *              ncclInternalError) instead of hanging; that is on the list as well.
 *
 * Every function here may be called from any thread, but not from a function that the stand-in runs. Not after fork. */
#ifndef STAND_IN_H
#define STAND_IN_H

#include <stdint.h>

#define STAND_IN_API __attribute__((visibility("default")))

/* Forgets streams, events, memory, communicators, counters, faults and misuse, and sets every option to its default. No
 * other thread may be in a call. */
STAND_IN_API void stand_in_reset(uint64_t seed);

/* Sets an option by its name; 0, or -1 if there is no such option or value.
 *   queues                 8      hardware queues per device, at most 32; set before streams are made
 *   nccl_version           22907  of ncclGetVersion
 *   injected_sync_permille 0      launches before which the device is synchronised (lazy module loading does); above
 *                                 0 cuMemAlloc and cuMemFree synchronise it as well
 *   copy_ns_per_kib        0      nanoseconds that a copy takes at least
 *   foreign_memory         0      1: operations may use memory that cuMemAlloc did not give */
STAND_IN_API int stand_in_set(const char *option, int64_t value);

/* A counter since the last reset, by its name; -1 if there is none of that name. The name of a function of either API
 * counts its calls. Further:
 *   synchronisations                                times that a host waited for a device, or might have
 *   interprocess_events                             events made with CU_EVENT_INTERPROCESS
 *   pageable_copies                                 copies that held up their caller
 *   live_pinned_bytes, live_allocations,
 *   live_streams, live_events, live_communicators   not yet freed or destroyed */
STAND_IN_API int64_t stand_in_count(const char *counter);

/* One of the misuses so far as text, valid until reset; NULL beyond the last, or 64. */
STAND_IN_API const char *stand_in_misuse(int64_t index);

/* Waits, without being counted, until all queues are empty (0) or stuck (1) for `patience_ms` on end. */
STAND_IN_API int stand_in_drain(int64_t patience_ms);

/* From now on message `index` (0: the next) from the rank on device `source` to that on device `destination` is lost:
 * its send (sends: 1), or its receive (0), never takes place, so the other end waits, until they are aborted. With a
 * `result` that is no success (an ncclResult_t) the communicator of the end that is to blame reports it as asynchronous
 * error. Messages are counted over all communicators, in the order in which that end issues. One request is kept. */
STAND_IN_API void stand_in_fault(int32_t sends, int32_t source, int32_t destination, int64_t index, int32_t result);
/* Waits for a device's null stream; in vain, for a moment, where a test has stopped something. */
STAND_IN_API void stand_in_synchronise(int32_t device);

/* Among the calls from now on to functions whose names begin with `function` ("cuMemAlloc_v2"; "cu": any of the
 * driver), number `index` (0: the next, below 0: each) does nothing but return `result`. One request is kept. */
STAND_IN_API void stand_in_fail_call(const char *function, int64_t index, int32_t result);

/* At number `index` (0: the next) of the queries of events and streams of the device it fails for good, as by an assert
 * in a kernel: its queues stand still, and what is asked of it returns CUDA_ERROR_ASSERT. */
STAND_IN_API void stand_in_assert(int32_t device, int64_t index);

/* From now on what moves `bytes` bytes (below 0: any) by a function whose name begins with `function` ("cuMemcpyAsync",
 * "nccl") is damaged in this way. One such request is kept; function "": none. */
typedef enum {
    STAND_IN_CORRUPT = 0, /* its last byte arrives wrong */
    STAND_IN_STALLED = 1, /* a copy, or a launch (below 0), that does not begin */
} stand_in_damage_kind;
STAND_IN_API void stand_in_damage(const char *function, int64_t bytes, stand_in_damage_kind kind);

#endif
