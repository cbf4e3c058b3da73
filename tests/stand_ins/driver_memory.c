/* driver_memory.c - the CUDA driver's functions for memory and copies, also memory of other processes. */
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 256 };

typedef struct allocation {
    struct allocation *next;
    char *address;
    size_t bytes;
    int64_t id;
    int32_t device;
    int32_t fd;       /* of shared memory, else -1 */
    int32_t imported; /* opened from a handle: not ours to free */
    int32_t handles;  /* imported, or opened in this process without shared memory: times opened */
    int64_t exporter_pid, exporter_id;
} allocation;

typedef struct {
    uint64_t magic;
    int64_t pid, id;
    uint64_t bytes;
    int32_t fd;
} ipc_handle;
_Static_assert(sizeof(ipc_handle) <= sizeof(CUipcMemHandle), "a handle is 64 bytes");

static allocation *allocations;
static int64_t num_allocations; /* over the life of the process: ids never repeat */

/* -- memory ------------------------------------------------------------------------------------------------------ */

static allocation *find_allocation(const void *address)
{
    const char *wanted = address;
    for (allocation *a = allocations; a != NULL; a = a->next)
        if (wanted >= a->address && wanted < a->address + a->bytes)
            return a;
    return NULL;
}

int find_span(api_call call, const void *address, size_t bytes, int host_allowed, span *out)
{
    *out = (span){.address = (char *)(uintptr_t)address, .bytes = bytes};
    if (bytes == 0)
        return 1;
    const char *first = address;
    allocation *owner = find_allocation(address);
    if (owner != NULL && bytes <= (size_t)(owner->address + owner->bytes - first)) {
        out->allocation = owner->id;
        out->device = owner->device;
        return 1;
    }
    for (const allocation *a = allocations; a != NULL; a = a->next)
        if (first < a->address + a->bytes && a->address < first + bytes) {
            misuse(call, "%zu bytes at offset %td of an allocation of %zu bytes", bytes, first - a->address, a->bytes);
            return 0;
        }
    if (address == NULL || (!host_allowed && !machine.options.foreign_memory)) {
        misuse(call, "%zu bytes at %p, which is not device memory", bytes, address);
        return 0;
    }
    return 1;
}

int span_lives(operation *op, const span *memory)
{
    if (op->faulty)
        return 0;
    if (memory->allocation == 0)
        return 1;
    allocation *owner = find_allocation(memory->address);
    if (owner != NULL && owner->id == memory->allocation)
        return 1;
    misuse(op->call, "use after free: its memory at %p was freed before it was executed", (void *)memory->address);
    op->faulty = 1;
    return 0;
}

static void add_allocation(allocation entry)
{
    allocation *added = keep(sizeof *added);
    *added = entry;
    added->id = ++num_allocations;
    added->next = allocations;
    allocations = added;
}

static void remove_allocation(allocation *entry)
{
    allocation **link = &allocations;
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
}

static void give_back(const allocation *entry)
{
    if (entry->imported || entry->fd >= 0)
        munmap(entry->address, entry->bytes);
    else
        free(entry->address);
    if (entry->fd >= 0)
        close(entry->fd);
}

void memory_reset(void)
{
    for (allocation *a = allocations; a != NULL; a = a->next)
        give_back(a);
    allocations = NULL;
}

static void *take_memory(size_t bytes, int32_t *fd)
{
    if (machine.options.shared_memory)
        return make_shared(bytes, fd);
    void *memory = NULL;
    *fd = -1;
    return posix_memalign(&memory, ALIGNMENT, bytes) == 0 ? memory : NULL;
}

CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    ENTER(cuMemHostAlloc, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(memory != NULL && bytes > 0 && flags == 0);
    NEEDS_CONTEXT(index);
    (void)index;
    if (bytes > (size_t)(machine.options.pinned_bytes - machine.counters.live_pinned_bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int32_t fd;
    *memory = take_memory(bytes, &fd);
    if (*memory == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*memory, 0xFF, bytes);
    add_allocation((allocation){.address = *memory, .bytes = bytes, .device = -1, .fd = fd});
    machine.counters.live_pinned_bytes += (int64_t)bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *memory)
{
    ENTER(cuMemFreeHost, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    allocation *entry = find_allocation(memory);
    if (entry == NULL || entry->address != memory || entry->device >= 0) {
        misuse(this_call, "%p is not what cuMemHostAlloc gave, or freed already", memory);
        return CUDA_ERROR_INVALID_VALUE;
    }
    memset(entry->address, 0xFF, entry->bytes);
    machine.counters.live_pinned_bytes -= (int64_t)entry->bytes;
    remove_allocation(entry);
    give_back(entry);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    ENTER(cuMemAlloc_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(address != NULL && bytes > 0);
    NEEDS_CONTEXT(index);
    if (machine.options.synchronous_memory && !synchronise_device(this_call, index))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    int32_t fd;
    char *memory = take_memory(bytes, &fd);
    if (memory == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, 0xFF, bytes);
    add_allocation((allocation){.address = memory, .bytes = bytes, .device = index, .fd = fd});
    machine.counters.live_allocations++;
    *address = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(cuMemFree_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_INIT();
    if (address == 0)
        return CUDA_SUCCESS;
    allocation *entry = find_allocation((const void *)(uintptr_t)address);
    if (entry == NULL || entry->address != (char *)(uintptr_t)address || entry->imported || entry->device < 0) {
        misuse(this_call, "%p is not what cuMemAlloc gave, or freed already", (void *)(uintptr_t)address);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (machine.options.synchronous_memory && !synchronise_device(this_call, entry->device))
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    if (entry->handles > 0)
        misuse(this_call, "%p is still open through %d handles", (void *)entry->address, entry->handles);
    for (allocation *a = allocations; a != NULL; a = a->next)
        if (a->imported && a->exporter_pid == getpid() && a->exporter_id == entry->id)
            misuse(this_call, "%p is still open through %d handles", (void *)entry->address, a->handles);
    memset(entry->address, 0xFF, entry->bytes);
    machine.counters.live_allocations--;
    remove_allocation(entry);
    give_back(entry);
    return CUDA_SUCCESS;
}

static CUresult copy(api_call call, const void *destination, int to_host, const void *source, int from_host,
                     size_t bytes, CUstream stream)
{
    const api_call this_call = call;
    NEEDS_STREAM(stream);
    span to, from;
    if (!find_span(call, destination, bytes, to_host, &to) || !find_span(call, source, bytes, from_host, &from))
        return CUDA_ERROR_INVALID_VALUE;
    check_no_group_in_progress(call, stream);
    operation *op = new_operation(COPY, call);
    op->destination = to;
    op->source = from;
    enqueue(op, stream);
    int is_pageable = (to_host && to.allocation == 0) || (from_host && from.allocation == 0);
    if (!is_pageable || !machine.options.pageable_waits)
        return CUDA_SUCCESS;
    machine.counters.pageable_copies++;
    machine.counters.synchronisations++;
    marker end = {.stream = stream, .issue = op->issue};
    return wait_until(call, marker_reached, &end) ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}

/* Host memory is read and written when the copy runs; where it is not pinned the host waits for that, if so wanted. */
CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyAsync, CUDA_ERROR_NOT_PERMITTED);
    return copy(this_call, (const void *)(uintptr_t)destination, 1, (const void *)(uintptr_t)source, 1, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *destination, CUdeviceptr source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyDtoHAsync_v2, CUDA_ERROR_NOT_PERMITTED);
    return copy(this_call, destination, 1, (const void *)(uintptr_t)source, 0, bytes, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void *source, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyHtoDAsync_v2, CUDA_ERROR_NOT_PERMITTED);
    return copy(this_call, (const void *)(uintptr_t)destination, 0, source, 1, bytes, stream);
}

/* -- memory of other processes ----------------------------------------------------------------------------------- */

char *map_of_process(int64_t pid, int32_t fd, size_t bytes)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)pid, fd);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0)
        return NULL;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    close(opened);
    return memory != MAP_FAILED ? memory : NULL;
}

void *make_shared(size_t bytes, int32_t *fd)
{
    *fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (*fd < 0)
        return NULL;
    void *memory = MAP_FAILED;
    if (ftruncate(*fd, (off_t)bytes) == 0)
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (memory != MAP_FAILED)
        return memory;
    close(*fd);
    return NULL;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER(cuIpcGetMemHandle, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(handle != NULL);
    NEEDS_CONTEXT(index);
    (void)index;
    allocation *entry = find_allocation((const void *)(uintptr_t)address);
    if (entry == NULL || entry->address != (char *)(uintptr_t)address || entry->imported)
        return CUDA_ERROR_INVALID_VALUE;
    if (entry->bytes % ((size_t)2 << 20) != 0) /* CUDA C++ Programming Guide, "Interprocess Communication" */
        misuse(this_call, "%zu bytes, no multiple of 2 MiB: other memory may be shared with them", entry->bytes);
    ipc_handle made;
    memset(&made, 0, sizeof made); /* padding too: a handle is sent as bytes */
    made.magic = IPC_MAGIC;
    made.pid = getpid();
    made.id = entry->id;
    made.bytes = entry->bytes;
    made.fd = entry->fd;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    return CUDA_SUCCESS;
}

/* The real driver opens a handle in another process only. Here ranks may be threads, so the same process is allowed:
 * with shared_memory at another address, as another process would see it, else at the same one. */
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    ENTER(cuIpcOpenMemHandle_v2, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_ARGUMENT(address != NULL && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    NEEDS_CONTEXT(index);
    ipc_handle from;
    memcpy(&from, &handle, sizeof from);
    if (from.magic != IPC_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    allocation *entry = allocations;
    while (entry != NULL &&
           !(entry->imported && entry->device == index && entry->exporter_pid == from.pid &&
             entry->exporter_id == from.id) &&
           !(from.fd < 0 && from.pid == getpid() && entry->id == from.id))
        entry = entry->next;
    if (entry == NULL) {
        char *memory = from.fd >= 0 ? map_of_process(from.pid, from.fd, from.bytes) : NULL;
        if (memory == NULL)
            return CUDA_ERROR_MAP_FAILED;
        add_allocation((allocation){.address = memory,
                                    .bytes = from.bytes,
                                    .device = index,
                                    .fd = -1,
                                    .imported = 1,
                                    .exporter_pid = from.pid,
                                    .exporter_id = from.id});
        entry = allocations;
    }
    entry->handles++;
    *address = (CUdeviceptr)(uintptr_t)entry->address;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    ENTER(cuIpcCloseMemHandle, CUDA_ERROR_NOT_PERMITTED);
    NEEDS_CONTEXT(index);
    (void)index;
    allocation *entry = find_allocation((const void *)(uintptr_t)address);
    if (entry == NULL || entry->address != (char *)(uintptr_t)address || entry->handles == 0) {
        misuse(this_call, "%p was not opened", (void *)(uintptr_t)address);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (--entry->handles == 0 && entry->imported) {
        remove_allocation(entry);
        give_back(entry);
    }
    return CUDA_SUCCESS;
}
