/* messages.h - what units hand to each other, between Python's tensors and the headers of messages.
 *
 * Tensors over receive places are made once per (edge, place) and kept as long as messages there look alike. All calls
 * need the GIL. */
#ifndef S1F_MESSAGES_H
#define S1F_MESSAGES_H

#include "binding.h"

#include "../core/pool.h"
#include "../run/executor.h"

typedef struct s1f_place_views s1f_place_views;

typedef struct {
    PyObject *ends, *make_views; /* borrowed, as the next two; make_views: during a step */
    PyObject *dtype_codes;       /* {torch.dtype: s1f_dtype} */
    PyObject *leave;             /* (tensors) -> whether any lies elsewhere now */
    const s1f_edge *edges;       /* the program's */
    int32_t num_edges;
    s1f_pool pool;
    s1f_place_views **views; /* the pool's: [edge][place] */
} s1f_messages;

/* Fills what follows from the others; 0 with the exception set, and it is freed as usual. */
int s1f_messages_create(s1f_messages *messages);
void s1f_messages_free(s1f_messages *messages);

/* What a unit receives: None, or its messages in the program's order. New reference. */
PyObject *s1f_messages_received(s1f_messages *messages, const s1f_input *inputs, int32_t num_inputs);
/* The place may be overwritten from here on: tensors that somebody holds move elsewhere, and the views with them. */
s1f_status s1f_messages_leave(s1f_messages *messages, int32_t edge, int32_t place);
/* After a step: other executors have views of their own over the same places. */
s1f_status s1f_messages_leave_all(s1f_messages *messages);
int s1f_messages_has_views(const s1f_messages *messages, int32_t edge, int32_t place); /* needs no GIL */
/* The headers of what a unit hands over; on success the result keeps the tuple. */
s1f_status s1f_messages_describe(const s1f_messages *messages, PyObject *tensors, s1f_result *result);

#endif
