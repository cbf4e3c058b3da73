/* nccl_api.h - the part of NCCL that the stand-in defines, in our own words; the configuration as of release 2.18.
 * With STAND_IN_REAL_NCCL_H the vendor's header takes its place, so that the compiler reports any difference. */
#ifndef STAND_IN_NCCL_API_H
#define STAND_IN_NCCL_API_H

#include "cuda_api.h"

#ifdef STAND_IN_REAL_NCCL_H
#include <nccl.h>
#else
#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

typedef enum { ncclUint8 = 1 } ncclDataType_t;

typedef struct {
    size_t size;          /* of this struct */
    unsigned int magic;   /* 0xcafebeef */
    unsigned int version; /* of the release that this layout is of */
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;
} ncclConfig_t;

#define NCCL_VERSION(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))
#pragma GCC visibility push(default)
ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result);
ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      CUstream stream);
ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
#pragma GCC visibility pop
#endif
#endif
