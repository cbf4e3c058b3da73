/* host_end.c - moving payloads through pageable host memory. */
#include "host_end.h"

#include <stdlib.h>

static s1f_status host_prepare_send(s1f_device_end *end, int64_t sequence, int32_t number, s1f_message *message,
                                    const void **tensors)
{
    (void)sequence;
    (void)number;
    return s1f_device_end_to_host(end, message, tensors);
}

static void host_close(s1f_device_end *end)
{
    (void)end;
}

/* Its transfers are over as they begin: neither receive nor send is called. */
static const s1f_mover host_mover = {
    .name = "host",
    .receive_staged = s1f_device_end_from_host,
    .prepare_send = host_prepare_send,
    .is_one_sided = 1,
    .is_late = 1,
    .close = host_close,
};

s1f_status s1f_host_end_create(s1f_edge_end *control, s1f_watchdog *watchdog, s1f_edge_end **out)
{
    s1f_device_end *end = calloc(1, sizeof *end);
    if (end == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for an end of an edge");
    s1f_status status = s1f_device_end_init(end, &host_mover, control, watchdog);
    if (status != S1F_OK) {
        s1f_edge_end_free(&end->head);
        return status;
    }
    *out = &end->head;
    return S1F_OK;
}
