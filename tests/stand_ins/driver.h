/* driver.h - checks and helpers of the driver's functions; for driver.c, driver_streams.c and driver_memory.c. */
#ifndef STAND_IN_DRIVER_H
#define STAND_IN_DRIVER_H

#include "machine.h"

#define NEEDS_INIT()                                                                                                   \
    if (!machine.initialised)                                                                                          \
    return CUDA_ERROR_NOT_INITIALIZED

/* Sets `name` to the current device, or leaves the function. */
#define NEEDS_CONTEXT(name)                                                                                            \
    NEEDS_INIT();                                                                                                      \
    int32_t name = current_device();                                                                                   \
    if (name < 0)                                                                                                      \
    return current_context() == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED

#define NEEDS_ARGUMENT(condition)                                                                                      \
    if (!(condition))                                                                                                  \
    return CUDA_ERROR_INVALID_VALUE

#define NEEDS_DEVICE(index)                                                                                            \
    if ((index) < 0 || (index) >= MAX_DEVICES)                                                                         \
    return CUDA_ERROR_INVALID_DEVICE

#define NEEDS_STREAM(name)                                                                                             \
    CUresult name##_error;                                                                                             \
    name = find_stream(this_call, name, &name##_error);                                                                \
    if (name == NULL)                                                                                                  \
    return name##_error

#define NEEDS_EVENT(name)                                                                                              \
    NEEDS_INIT();                                                                                                      \
    if (name == NULL)                                                                                                  \
        return CUDA_ERROR_INVALID_HANDLE;                                                                              \
    if (!name->alive) {                                                                                                \
        misuse(this_call, "event %d is destroyed", name->number);                                                      \
        return CUDA_ERROR_INVALID_HANDLE;                                                                              \
    }

CUcontext current_context(void);
int marker_reached(const void *argument); /* of a marker, for wait_until */
void memory_reset(void);
void boards_reset(void);

/* Memory that other processes may map, by a descriptor that stays open; NULL if there is none. */
void *make_shared(size_t bytes, int32_t *fd);
char *map_of_process(int64_t pid, int32_t fd, size_t bytes);
/* Begins every handle for other processes. */
enum { IPC_MAGIC = 0x2d696e21 };

#endif
