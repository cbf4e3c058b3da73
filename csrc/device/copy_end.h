/* copy_end.h - edges whose payloads the sender's copy engine writes straight into the receiver's places: ranks of one
 * host, on one GPU or on several. No multiprocessor takes part, and no transfer waits for another one's start.
 *
 * With POST the receiver says where the place is; with the header the sender says which event ends the copy: both by
 * CUDA's IPC handles, which a driver opens in another process only. A message that is larger than its place (in the
 * first step of a shape) goes through host memory, and the place has grown when it is posted again.
 *
 * The control edge is over an arena that both ranks map (s1f_arena_end_create). */
#ifndef S1F_COPY_END_H
#define S1F_COPY_END_H

#include "device_end.h"

extern const s1f_mover s1f_copy_mover;

#endif
