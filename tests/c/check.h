/* check.h - what every C test is written with.
 *
 * A test is one file test_<noun>.c with a main that returns check_failures(). run.py links it with the core (all of
 * csrc/ but the binding and the torch part, and kernels/), once under sanitizers and once for valgrind. */
#ifndef S1F_TESTS_CHECK_H
#define S1F_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int check_failed;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                              \
            check_failed++;                                                                                            \
        }                                                                                                              \
    } while (0)

/* A call returned `wanted`, and where that is a failure its message holds `part`. Needs status.h. */
#define CHECK_STATUS(call, wanted, part)                                                                               \
    do {                                                                                                               \
        s1f_status check_status = (call);                                                                              \
        if (check_status != (wanted) || (check_status != S1F_OK && strstr(s1f_last_error(), (part)) == NULL)) {        \
            fprintf(stderr, "%s:%d: %s is status %d (%s), wanted %d with \"%s\"\n", __FILE__, __LINE__, #call,         \
                    (int)check_status, s1f_last_error(), (int)(wanted), (part));                                       \
            check_failed++;                                                                                            \
        }                                                                                                              \
    } while (0)

static inline int check_failures(void)
{
    if (check_failed > 0)
        fprintf(stderr, "%d checks failed\n", check_failed);
    return check_failed > 0;
}

/* Lets allocation number n from now (0: the next one) by malloc, calloc, realloc, aligned_alloc or posix_memalign of
 * the core fail, and only that one; below 0: none. Returns how many were asked for since the last call. So
 *     for (int64_t n = 0;; n++) {
 *         fail_allocation(n); status = call(); asked = fail_allocation(-1);
 *         if (asked <= n) break;
 *         ...
 *     }
 * fails each allocation of a call in turn. */
int64_t fail_allocation(int64_t n);

#endif
