/* fuzz.h - what every fuzz target in C is written with.
 *
 * A target is one file fuzz_<what>.c with LLVMFuzzerTestOneInput. It reads its arguments from the input, calls the
 * core, and holds the result to sentences (REQUIRE). run.py links it with libFuzzer, or with replay.c, which runs
 * files. */
#ifndef S1F_TESTS_FUZZ_H
#define S1F_TESTS_FUZZ_H

#include "core/status.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size); /* returns 0 */

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold (last error: %s)\n", __FILE__, __LINE__, #condition,              \
                    s1f_last_error());                                                                                 \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A failure is one of the caller's mistakes, and says something. */
#define REQUIRE_REFUSED(status)                                                                                        \
    do {                                                                                                               \
        REQUIRE((status) == S1F_ERR_ARG || (status) == S1F_ERR_SCHEDULE);                                              \
        REQUIRE(s1f_last_error()[0] != '\0');                                                                          \
    } while (0)

/* -- arguments from an input; all of them are 0 where it has ended ------------------------------------------------- */

typedef struct {
    const uint8_t *at;
    size_t left;
} fuzz_input;

static inline uint64_t take_bits(fuzz_input *in, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes && in->left > 0; i++, in->at++, in->left--)
        value |= (uint64_t)*in->at << 8 * i;
    return value;
}

static inline int32_t take_below(fuzz_input *in, int32_t end)
{
    return (int32_t)(take_bits(in, end <= 256 ? 1 : 4) % (uint32_t)end);
}

/* Small, at an edge of what int32_t or int64_t holds, or anything. */
static inline int64_t take_int64(fuzz_input *in)
{
    static const int64_t edges[] = {-1,        0,         1,          INT32_MAX,        INT32_MIN,
                                    INT64_MAX, INT64_MIN, UINT32_MAX, INT64_C(1) << 40, (INT64_C(1) << 40) + 1};
    uint8_t kind = (uint8_t)take_bits(in, 1);
    if (kind < 200)
        return kind;
    if (kind < 230)
        return (int64_t)take_bits(in, 2);
    if (kind < 245)
        return edges[kind % (sizeof edges / sizeof *edges)];
    return (int64_t)take_bits(in, 8);
}

static inline int32_t take_int32(fuzz_input *in)
{
    int64_t value = take_int64(in);
    return value < INT32_MIN ? INT32_MIN : value > INT32_MAX ? INT32_MAX : (int32_t)value;
}

/* A few halves, what is no ordinary number, or any bits. */
static inline double take_double(fuzz_input *in)
{
    static const double edges[] = {
        NAN, INFINITY, -INFINITY, -0.0, -1, 0x1p-1074, 1e-300, 1e300, 0x1.fffffffffffffp1023};
    uint8_t kind = (uint8_t)take_bits(in, 1);
    if (kind < 220)
        return kind * 0.5;
    if (kind < 245)
        return edges[kind % (sizeof edges / sizeof *edges)];
    uint64_t bits = take_bits(in, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
