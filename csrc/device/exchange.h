/* exchange.h - gradients of tied parameters: tensors between a few ranks at the end of a step, between GPUs.
 *
 * Each two of these ranks have an edge either way that carries nothing else. A tensor goes in pieces, each a message,
 * so that places stay small however large a parameter is. All ranks walk through (piece, sender, receiver) in this
 * order, and what one of them waits for comes before it there. So nobody waits for ever, not even where all streams of
 * a GPU share one hardware queue. On every rank a step has
 *
 *     begin    of every end
 *     move     of every tensor, in one order on all ranks
 *     end */
#ifndef S1F_EXCHANGE_H
#define S1F_EXCHANGE_H

#include "device_end.h"

typedef struct {
    s1f_edge_end *end;
    s1f_cu_address data; /* what is sent, or where it is put, on the GPU */
} s1f_parcel;

/* After s1f_group_begin_step and s1f_device_begin_step. */
s1f_status s1f_exchange_begin(s1f_edge_end *end);
/* The parcels of this rank, by ascending ranks of sender and receiver, each of so many bytes; in pieces of piece_bytes,
 * the same on all ranks. Waits for the hosts of the peers, not for a GPU. What is started after this on the stream that
 * computes finds what has come, and may overwrite what was sent. */
s1f_status s1f_exchange_move(const s1f_parcel *parcels, int32_t count, int64_t bytes, int64_t piece_bytes);
/* Waits until all has come, here and at every peer: what a rank does afterwards, be it to fail, takes nothing from the
 * others. An end that gives up calls s1f_p2p_finish instead. parcels: their ends alone count. */
s1f_status s1f_exchange_end(const s1f_parcel *parcels, int32_t count);

#endif
