/* current_unit.c - the ambient unit: the thread's, else the process's. */
#include "current_unit.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

static _Thread_local const s1f_current_unit *unit_of_thread;
static _Atomic(const s1f_current_unit *) unit_of_process;

int64_t s1f_position_in_unit(const s1f_current_unit *unit, int64_t i)
{
    for (int32_t part = 0; part + 1 < unit->num_parts && i >= unit->parts[part]; part++)
        i -= unit->parts[part];
    return unit->offset + i;
}

const s1f_current_unit *s1f_current_unit_get(void)
{
    if (unit_of_thread != NULL)
        return unit_of_thread;
    return atomic_load_explicit(&unit_of_process, memory_order_acquire);
}

void s1f_current_unit_set_thread(const s1f_current_unit *unit)
{
    unit_of_thread = unit;
}

s1f_status s1f_current_unit_set_process(const s1f_current_unit *unit)
{
    if (unit == NULL) {
        atomic_store_explicit(&unit_of_process, NULL, memory_order_release);
        return S1F_OK;
    }
    const s1f_current_unit *current = NULL;
    if (atomic_compare_exchange_strong_explicit(&unit_of_process, &current, unit, memory_order_acq_rel,
                                                memory_order_acquire) ||
        current == unit)
        return S1F_OK;
    char running[64], wanted[64];
    s1f_unit_text(current->unit, 1, running, sizeof running);
    s1f_unit_text(unit->unit, 1, wanted, sizeof wanted);
    return s1f_fail(S1F_ERR_STATE,
                    "%s cannot start while %s runs: two engines are inside a step in one process (ranks that are "
                    "threads of one process need a LoopbackGroup)",
                    wanted, running);
}

static s1f_current_unit *unit_to_change(void)
{
    return (s1f_current_unit *)(uintptr_t)s1f_current_unit_get();
}

void s1f_current_unit_set_state(void *state, int32_t is_whole)
{
    s1f_current_unit *unit = unit_to_change();
    if (unit == NULL)
        return;
    unit->state = state;
    unit->is_whole |= is_whole;
}

void s1f_current_unit_set_documents(int64_t num_documents)
{
    if (unit_to_change() != NULL)
        unit_to_change()->num_documents = num_documents;
}
