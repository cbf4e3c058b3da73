/* order.h - sentences that hold for any order, whoever wrote it. */
#ifndef S1F_TESTS_FUZZ_ORDER_H
#define S1F_TESTS_FUZZ_ORDER_H

#include "core/lower.h"
#include "fuzz.h"

/* Text that an order prints reads back as an order that prints the same. */
void require_text_reads_back(const s1f_schedule *schedule);

/* An order either breaks a rule, and then nothing takes it, or it is lowered, simulated, deferred and written, each as
 * its header says. Returns whether it keeps the rules. */
int require_order_is_sound(const s1f_schedule *schedule, int32_t prefetch);

#endif
