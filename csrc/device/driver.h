/* driver.h - the part of the CUDA driver API that moves data and orders streams, bound at run time.
 *
 * A table of our own prototypes, filled by dlopen + dlsym from libcuda or from whatever library is named instead, so
 * that nothing here needs a toolkit or a GPU to be built, and tests can put another library in its place. */
#ifndef S1F_DRIVER_H
#define S1F_DRIVER_H

#include "../core/status.h"

#include <stddef.h>
#include <stdint.h>

typedef int32_t s1f_cu_result; /* CUresult */
typedef void *s1f_cu_context, *s1f_cu_stream, *s1f_cu_event;
typedef uint64_t s1f_cu_address; /* CUdeviceptr */
typedef struct {
    char bytes[64];
} s1f_cu_handle; /* CUipcMemHandle, CUipcEventHandle: passed by value */

enum { S1F_CU_SUCCESS = 0, S1F_CU_ERROR_OUT_OF_MEMORY = 2, S1F_CU_ERROR_NOT_READY = 600 };
enum { S1F_CU_STREAM_NON_BLOCKING = 1 };
enum { S1F_CU_EVENT_TIMED = 0, S1F_CU_EVENT_DISABLE_TIMING = 2, S1F_CU_EVENT_INTERPROCESS = 4 };
enum { S1F_CU_IPC_LAZY_PEER_ACCESS = 1, S1F_CU_CAPTURE_RELAXED = 2 };

/* X(name in the table, symbol, arguments) */
#define S1F_DRIVER_FUNCTIONS(X)                                                                                        \
    X(init, cuInit, (unsigned int flags))                                                                              \
    X(error_name, cuGetErrorName, (s1f_cu_result error, const char **name))                                            \
    X(error_string, cuGetErrorString, (s1f_cu_result error, const char **text))                                        \
    X(device_get, cuDeviceGet, (int *device, int ordinal))                                                             \
    X(context_retain, cuDevicePrimaryCtxRetain, (s1f_cu_context * context, int device))                                \
    X(context_release, cuDevicePrimaryCtxRelease_v2, (int device))                                                     \
    X(context_push, cuCtxPushCurrent_v2, (s1f_cu_context context))                                                     \
    X(context_pop, cuCtxPopCurrent_v2, (s1f_cu_context * context))                                                     \
    X(stream_priorities, cuCtxGetStreamPriorityRange, (int *least, int *greatest))                                     \
    X(stream_create, cuStreamCreateWithPriority, (s1f_cu_stream * stream, unsigned int flags, int priority))           \
    X(stream_destroy, cuStreamDestroy_v2, (s1f_cu_stream stream))                                                      \
    X(stream_wait_event, cuStreamWaitEvent, (s1f_cu_stream stream, s1f_cu_event event, unsigned int flags))            \
    X(stream_synchronize, cuStreamSynchronize, (s1f_cu_stream stream))                                                 \
    X(stream_query, cuStreamQuery, (s1f_cu_stream stream))                                                             \
    X(event_create, cuEventCreate, (s1f_cu_event * event, unsigned int flags))                                         \
    X(event_destroy, cuEventDestroy_v2, (s1f_cu_event event))                                                          \
    X(event_record, cuEventRecord, (s1f_cu_event event, s1f_cu_stream stream))                                         \
    X(event_query, cuEventQuery, (s1f_cu_event event))                                                                 \
    X(event_elapsed, cuEventElapsedTime, (float *milliseconds, s1f_cu_event start, s1f_cu_event end))                  \
    X(memory_allocate, cuMemAlloc_v2, (s1f_cu_address * address, size_t bytes))                                        \
    X(memory_free, cuMemFree_v2, (s1f_cu_address address))                                                             \
    X(copy, cuMemcpyAsync, (s1f_cu_address destination, s1f_cu_address source, size_t bytes, s1f_cu_stream stream))    \
    X(copy_to_host, cuMemcpyDtoHAsync_v2, (void *host, s1f_cu_address source, size_t bytes, s1f_cu_stream stream))     \
    X(copy_from_host, cuMemcpyHtoDAsync_v2,                                                                            \
      (s1f_cu_address destination, const void *host, size_t bytes, s1f_cu_stream stream))                              \
    X(ipc_export_memory, cuIpcGetMemHandle, (s1f_cu_handle * handle, s1f_cu_address address))                          \
    X(ipc_open_memory, cuIpcOpenMemHandle_v2, (s1f_cu_address * address, s1f_cu_handle handle, unsigned int flags))    \
    X(ipc_close_memory, cuIpcCloseMemHandle, (s1f_cu_address address))                                                 \
    X(ipc_export_event, cuIpcGetEventHandle, (s1f_cu_handle * handle, s1f_cu_event event))                             \
    X(ipc_open_event, cuIpcOpenEventHandle, (s1f_cu_event * event, s1f_cu_handle handle))                              \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))

typedef struct {
#define S1F_DECLARE(name, symbol, arguments) s1f_cu_result(*name) arguments;
    S1F_DRIVER_FUNCTIONS(S1F_DECLARE)
#undef S1F_DECLARE
} s1f_driver;

/* The functions of a library, loaded once per process and path and never unloaded. path NULL: libcuda.so.1.
 * S1F_ERR_STATE names the library, or the function that it lacks. */
s1f_status s1f_driver_load(const char *path, const s1f_driver **out);

/* Calls a function of the table: its status, which names it. */
#define S1F_CU(driver, name, ...) s1f_driver_status(driver, (driver)->name(__VA_ARGS__), s1f_driver_symbols.name)

typedef struct {
#define S1F_DECLARE(name, symbol, arguments) const char *name;
    S1F_DRIVER_FUNCTIONS(S1F_DECLARE)
#undef S1F_DECLARE
} s1f_driver_names;
extern const s1f_driver_names s1f_driver_symbols;

/* "cuEventRecord: CUDA_ERROR_..., text" as S1F_ERR_STATE (S1F_ERR_MEMORY where memory is short), S1F_OK for success.
 * symbol: without what follows "_", its version. */
s1f_status s1f_driver_status(const s1f_driver *driver, s1f_cu_result result, const char *symbol);

/* An event where there is none yet. */
s1f_status s1f_driver_event_make(const s1f_driver *driver, s1f_cu_event *event, unsigned int flags);
void s1f_driver_event_destroy(const s1f_driver *driver, s1f_cu_event event); /* NULL is fine */

/* A library that is loaded once per process and path and never unloaded, and the table of its functions, which begins
 * with their pointers: for driver.c and nccl.c. */
typedef struct {
    const char *name;           /* "NCCL", for errors */
    const char *default_path;   /* for the loader, unless the process has it already */
    const char *const *symbols; /* of the functions, in the table's order */
    size_t num_symbols, table_bytes;
    s1f_status (*check)(void *library, void *table); /* once, when the functions are there; or NULL */
} s1f_library;
s1f_status s1f_library_load(const s1f_library *library, const char *path, const void **table);

#endif
