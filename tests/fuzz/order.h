/* order.h - sentences that hold for any order, whoever wrote it. */
#ifndef S1F_TESTS_FUZZ_ORDER_H
#define S1F_TESTS_FUZZ_ORDER_H

#include "core/lower.h"
#include "fuzz.h"

/* Whether two schedules have the same counts, placement and units. */
int same_order(const s1f_schedule *a, const s1f_schedule *b);

/* Text that an order prints reads back as an order that prints the same. */
void require_text_reads_back(const s1f_schedule *schedule);

/* An order either breaks a rule, and then nothing takes it, or it is lowered, simulated, deferred and written, each as
 * its header says. Returns whether it keeps the rules. */
int require_order_is_sound(const s1f_schedule *schedule, int32_t prefetch);

/* What a lowered program promises: each message is posted, sent and waited for once, in turn, in a free place. */
void require_program_is_sound(const s1f_program *program);

#endif
