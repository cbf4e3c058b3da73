/* host_end.h - edges between GPUs whose payloads go over the control edge, through pageable host memory.
 *
 * The last resort: it needs nothing but copies to and from the host, and works over whatever carries the control edge.
 * The host waits for two copies a message. A message is as one between CPUs: `on_device` is 0. */
#ifndef S1F_HOST_END_H
#define S1F_HOST_END_H

#include "device_end.h"

/* control: an edge end of host memory, borrowed, must outlive the new end. */
s1f_status s1f_host_end_create(s1f_edge_end *control, s1f_watchdog *watchdog, s1f_edge_end **out);

#endif
