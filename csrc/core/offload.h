/* offload.h - an order whose units are away, in a tier, while nobody reads what their forward saved. */
#ifndef S1F_OFFLOAD_H
#define S1F_OFFLOAD_H

#include "schedule.h"

/* Makes the order with O, A and L of cells chosen[cell of all stages] (NULL: of all). O stands right after F, A one
 * unit later, L one unit before B or I: one unit of the rank runs beside each way. A unit stays here if it would not be
 * away while another one runs, or if R makes again what it saves. An order that does not go back stays as it is.
 * S1F_ERR_ARG where the order moves units already; S1F_ERR_SCHEDULE where it breaks a rule; S1F_ERR_MEMORY. *out is
 * owned by the caller and untouched on error. */
s1f_status s1f_schedule_offload(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out);

#endif
