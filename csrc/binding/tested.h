/* tested.h - what tests call and Python code of the package does not: a table of functions, the module's _tested.
 *
 * The tests' own extension, tests/c/core_extension.c, is compiled from the product's headers and holds no code of the
 * product: what it makes current, and the errors that it raises, are those of this module. */
#ifndef S1F_TESTED_H
#define S1F_TESTED_H

#include "../../kernels/attention.h"
#include "../run/current_unit.h"
#include "../run/kv_cache.h"
#include "../run/p2p.h"
#include "binding.h"

#define S1F_TESTED(X)                                                                                                  \
    X(s1f_raise_for_group)                                                                                             \
    X(s1f_p2p_begin_step)                                                                                              \
    X(s1f_p2p_post)                                                                                                    \
    X(s1f_p2p_wait)                                                                                                    \
    X(s1f_p2p_send)                                                                                                    \
    X(s1f_kv_cache_begin_step)                                                                                         \
    X(s1f_kv_cache_begin_unit)                                                                                         \
    X(s1f_kv_cache_finish_unit)                                                                                        \
    X(s1f_current_unit_set_thread)                                                                                     \
    X(s1f_attention_set_isa)
#define S1F_TESTED_MEMBER(function) __typeof__(function) *function;
typedef struct {
    S1F_TESTED(S1F_TESTED_MEMBER)
} s1f_tested;
#define S1F_TESTED_NAME "seq1f1b._C._tested"

#endif
