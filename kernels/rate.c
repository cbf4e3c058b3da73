/* rate.c - loops of independent multiply-adds on registers, timed in short slices.
 *
 * In assembly, because GCC 12 spills the accumulators of vdpbf16ps, and because the file builds without flags for an
 * instruction set. Two units, each with a new multiply-add per cycle and its result 4 to 6 cycles later, are kept busy
 * by 12 independent sums. */
#include "rate.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Rounds of a slice, which takes 2 to 20 us: short beside a time slice of the system, long beside reading the clock. */
enum { ROUNDS = 1000 };

typedef struct {
    void (*slice)(void); /* ROUNDS rounds */
    double flops;        /* of a round */
} rate_loop;

#if defined(__x86_64__)

enum { NUM_SUMS = 14 };
#define FOR_EACH_SUM(text) ".irp r, 0,1,2,3,4,5,6,7,8,9,10,11,12,13\n\t" text "\n\t.endr\n\t"
#define CLEAR FOR_EACH_SUM("vxorps %%xmm\\r, %%xmm\\r, %%xmm\\r") /* and what lies above xmm */
#define MULTIPLY_ADD(instruction, width) FOR_EACH_SUM(instruction " %%" width "14, %%" width "14, %%" width "\\r")
#define LOAD(width) "vbroadcastss %[one], %%" width "14\n\t"
#define REPEAT "dec %[rounds]\n\tjnz 1b\n\tvzeroupper"
#define SLICE_OF(name, instruction, width)                                                                             \
    static void name(void)                                                                                             \
    {                                                                                                                  \
        const float one = 1;                                                                                           \
        int32_t rounds = ROUNDS;                                                                                       \
        __asm__ volatile(CLEAR LOAD(width) "1:\n\t" MULTIPLY_ADD(instruction, width) REPEAT                            \
                         : [rounds] "+r"(rounds)                                                                       \
                         : [one] "m"(one)                                                                              \
                         : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",       \
                           "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                      \
    }
SLICE_OF(avx512_bf16, "vdpbf16ps", "zmm")
SLICE_OF(avx512_fma, "vfmadd231ps", "zmm")
SLICE_OF(avx2_fma, "vfmadd231ps", "ymm")

#endif

/* Uses the compiler's own vectors, as attention_portable.c does. */
typedef float vec __attribute__((vector_size(16)));
enum { NUM_VEC_SUMS = 12 };

static void portable_fma(void)
{
    vec sums[NUM_VEC_SUMS] = {{0}}, factor = {1, 1, 1, 1};
    __asm__ volatile("" : "+m"(factor)); /* now unknown to the compiler */
    for (int32_t round = 0; round < ROUNDS; round++)
        for (int32_t i = 0; i < NUM_VEC_SUMS; i++)
            sums[i] = factor * factor + sums[i];
    __asm__ volatile("" : : "m"(sums));
}

/* Those of fp32 and of bf16, whose slice is NULL if the machine lacks it. */
static void find_loops(rate_loop *fma, rate_loop *bf16)
{
    *fma = (rate_loop){portable_fma, 2 * 4 * NUM_VEC_SUMS};
    *bf16 = (rate_loop){NULL, 0};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        *fma = (rate_loop){avx512_fma, 2 * 16 * NUM_SUMS};
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        *fma = (rate_loop){avx2_fma, 2 * 8 * NUM_SUMS};
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16"))
        *bf16 = (rate_loop){avx512_bf16, 2 * 32 * NUM_SUMS};
#endif
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* At least one slice of each, in turn: the rates are compared, and another user of the core slows both or none. The
 * first ones also wake the wide units: they are slow and do not count. */
s1f_rates s1f_measure_rates(double seconds)
{
    rate_loop loops[2];
    find_loops(&loops[0], &loops[1]);
    double shortest[] = {INFINITY, INFINITY}, begin = now(), end = begin;
    do {
        for (int i = 0; i < 2; i++) {
            if (!loops[i].slice)
                continue;
            double start = end;
            loops[i].slice();
            end = now();
            if (end - start < shortest[i])
                shortest[i] = end - start;
        }
    } while (end - begin < seconds);
    return (s1f_rates){.fma = loops[0].flops * ROUNDS / shortest[0], .bf16 = loops[1].flops * ROUNDS / shortest[1]};
}
