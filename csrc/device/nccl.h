/* nccl.h - the part of NCCL that point-to-point transfers need, bound at run time: NCCL 2.18 and newer. */
#ifndef S1F_NCCL_H
#define S1F_NCCL_H

#include "../core/status.h"
#include "driver.h"

#include <stdint.h>

enum {
    S1F_NCCL_SUCCESS = 0,
    S1F_NCCL_REMOTE_ERROR = 6,
    S1F_NCCL_IN_PROGRESS = 7,
    S1F_NCCL_UINT8 = 1, /* ncclDataType_t */
    S1F_NCCL_UNIQUE_ID_BYTES = 128
};

typedef void *s1f_nccl_comm;
typedef struct {
    char bytes[S1F_NCCL_UNIQUE_ID_BYTES];
} s1f_nccl_id; /* passed by value */

typedef struct { /* ncclConfig_t as NCCL 2.18 lays it out: newer libraries fill in what follows themselves */
    size_t size;
    uint32_t magic, version;
    int32_t blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int32_t split_share;
} s1f_nccl_config;

#define S1F_NCCL_FUNCTIONS(X)                                                                                          \
    X(int32_t, get_version, ncclGetVersion, (int *version))                                                            \
    X(int32_t, get_unique_id, ncclGetUniqueId, (s1f_nccl_id * id))                                                     \
    X(const char *, error_string, ncclGetErrorString, (int32_t result))                                                \
    X(const char *, last_error, ncclGetLastError, (s1f_nccl_comm comm))                                                \
    X(int32_t, comm_init, ncclCommInitRankConfig,                                                                      \
      (s1f_nccl_comm * comm, int num_ranks, s1f_nccl_id id, int rank, s1f_nccl_config *config))                        \
    X(int32_t, comm_abort, ncclCommAbort, (s1f_nccl_comm comm))                                                        \
    X(int32_t, async_error, ncclCommGetAsyncError, (s1f_nccl_comm comm, int32_t * result))                             \
    X(int32_t, group_start, ncclGroupStart, (void))                                                                    \
    X(int32_t, group_end, ncclGroupEnd, (void))                                                                        \
    X(int32_t, send, ncclSend,                                                                                         \
      (const void *data, size_t count, int32_t type, int peer, s1f_nccl_comm comm, s1f_cu_stream stream))              \
    X(int32_t, receive, ncclRecv,                                                                                      \
      (void *data, size_t count, int32_t type, int peer, s1f_nccl_comm comm, s1f_cu_stream stream))

typedef struct {
#define S1F_DECLARE(type, name, symbol, arguments) type(*name) arguments;
    S1F_NCCL_FUNCTIONS(S1F_DECLARE)
#undef S1F_DECLARE
    int32_t version; /* 22809: 2.28.9 */
    char path[512];  /* what was opened, as the loader names it */
} s1f_nccl;

/* The library, loaded once per process and path and never unloaded. path NULL: the copy that the process has loaded
 * already (torch's), or else what the loader finds as libnccl.so.2.
 * S1F_ERR_STATE: no such library, a function is missing, or it is older than 2.18. */
s1f_status s1f_nccl_load(const char *path, const s1f_nccl **out);

/* "ncclSend: unhandled system error (5), last error" as S1F_ERR_STATE; S1F_OK for success and for in progress.
 * comm may be NULL. */
s1f_status s1f_nccl_status(const s1f_nccl *nccl, int32_t result, s1f_nccl_comm comm, const char *what);

#endif
