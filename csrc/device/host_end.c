/* host_end.c - moving payloads through pageable host memory. */
#include "host_end.h"

/* Its transfers are over as they begin: neither receive nor send is called. */
static const s1f_mover host_mover = {
    .name = "host",
    .receive_staged = s1f_device_end_from_host,
    .prepare_send = s1f_device_end_to_host,
    .is_one_sided = 1,
    .is_late = 1,
};

s1f_status s1f_host_end_create(s1f_edge_end *control, s1f_watchdog *watchdog, s1f_edge_end **out)
{
    s1f_device_end *end;
    S1F_TRY(s1f_device_end_create(sizeof *end, &host_mover, control, watchdog, &end));
    *out = &end->head;
    return S1F_OK;
}
