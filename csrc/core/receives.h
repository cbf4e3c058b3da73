/* receives.h - where a rank starts its receives, if a transfer takes place only while both ends are at it (rendezvous).
 *
 * NCCL promises no buffer, streams may share a hardware queue, and a wait for the device is a wait for all work started
 * there. So the transfers of all ranks get one total order, in which each stands right after the unit that produces its
 * message, and a rank starts its own transfers (sends and receives) and its units in that order. Then the first
 * transfer that is not complete never waits for a later transfer, whatever shares a queue and wherever a host waits;
 * and when a receive starts, all work for which it waits has been started.
 *
 * The order is that of a run in which F takes 1, B 2, I and W 1 units of time: a receive then starts beside the unit
 * during which its message is due. */
#ifndef S1F_RECEIVES_H
#define S1F_RECEIVES_H

#include "program.h"

/* Adds RECEIVEs to the instructions of every rank. Once per program; it is unchanged on an error. Each unit and
 * each transfer looks at all ranks. */
s1f_status s1f_program_add_receives(s1f_program *program);

#endif
