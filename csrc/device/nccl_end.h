/* nccl_end.h - edges whose payloads move by NCCL: a communicator of two ranks, and a stream, per directed edge.
 *
 * NCCL's sends and receives need each other (rendezvous), so the program has to have RECEIVEs (receives.h). */
#ifndef S1F_NCCL_END_H
#define S1F_NCCL_END_H

#include "device_end.h"
#include "nccl.h"

/* Starts to create the communicator and returns at once; s1f_device_end_settle waits for it, and for the peer. So all
 * ends of a rank
 * can be created before any is connected, and no order among edges is needed. control: an edge end of host memory with
 * the same peer, borrowed, must outlive the new end. id: the same 128 bytes at both ends, used once. */
s1f_status s1f_nccl_end_create(const s1f_nccl *nccl, const s1f_nccl_id *id, s1f_edge_end *control,
                               s1f_watchdog *watchdog, s1f_edge_end **out);

#endif
