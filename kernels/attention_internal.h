/* attention_internal.h - what the files of the attention kernel share. Not for other rooms. */
#ifndef S1F_ATTENTION_INTERNAL_H
#define S1F_ATTENTION_INTERNAL_H

#include "attention.h"

#include <stdint.h>
#include <string.h>

/* One instruction set's kernels. They take arguments that s1f_attention_check has passed. */
typedef struct {
    const char *name;
    int (*covers)(const s1f_attention_args *args); /* 0: attention_ref.c takes the call; its own: NULL */
    s1f_status (*forward)(const s1f_attention_args *args, const s1f_attention_context *context);
    s1f_status (*backward)(const s1f_attention_args *args, const s1f_attention_context *context);
    int64_t (*scratch_bytes)(const s1f_attention_args *args, int32_t num_threads, int backward);
} s1f_attention_kernels;

extern const s1f_attention_kernels s1f_attention_reference, s1f_attention_portable;
#if defined(__x86_64__)
extern const s1f_attention_kernels s1f_attention_avx2, s1f_attention_avx512, s1f_attention_avx512bf16;
#elif defined(__aarch64__)
extern const s1f_attention_kernels s1f_attention_neon;
#endif

static inline double s1f_sink(const s1f_attention_args *args, int64_t head)
{
    return args->dtype == S1F_FLOAT64 ? ((const double *)args->sinks)[head]
                                      : (double)((const float *)args->sinks)[head];
}

/* S1F_ERR_ARG, with the numbers, on sizes, dtype or options that no kernel can take. */
s1f_status s1f_attention_check(const s1f_attention_args *args);

/* Scratch of a call: the context's, or allocated (then *owned is what free() takes, else NULL). S1F_ERR_ARG if the
 * context's is too small. */
s1f_status s1f_attention_scratch(const s1f_attention_context *context, int64_t bytes, void **scratch, void **owned);

static inline void s1f_run(const s1f_attention_context *context, int64_t count, s1f_parallel_body body, void *job)
{
    if (context && context->parallel_for && count > 1)
        context->parallel_for(0, count, 1, body, job);
    else
        body(0, count, job);
}

static inline int64_t s1f_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t s1f_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The row of k, v, dk and dv in which a key lies. *run: as many keys from it on lie in the rows after it. */
static inline int64_t s1f_key_row(const s1f_attention_args *args, int64_t key, int64_t *run)
{
    if (!args->ranges) {
        *run = args->q_start + args->segment_len - key;
        return key;
    }
    const s1f_key_range *first = args->ranges;
    for (int32_t left = args->num_ranges; left > 1;) { /* the row lies in one of so many ranges, from `first` on */
        int32_t half = left / 2;
        if (first[half].begin <= key) {
            first += half;
            left -= half;
        } else {
            left = half;
        }
    }
    *run = first->end - key;
    return first->row + key - first->begin;
}

/* First element of row `row` of head `head`, in elements. */
static inline int64_t s1f_at(s1f_strides strides, int64_t batch, int64_t head, int64_t row)
{
    return batch * strides.batch + head * strides.head + row * strides.row;
}

/* 16-bit floats, rounded to nearest even. */
static inline float s1f_float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t s1f_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float s1f_from_bf16(uint16_t half)
{
    return s1f_float_from_bits((uint32_t)half << 16);
}

static inline uint16_t s1f_to_bf16(float value)
{
    uint32_t bits = s1f_bits_of_float(value);
    if (value != value)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Without branches, so that loops over it become vectors. The factor moves the exponent to float's and makes subnormals
 * normal; infinity and NaN come out from 2^16 on and get float's highest exponent back. */
static inline float s1f_from_fp16(uint16_t half)
{
    float rest = s1f_float_from_bits((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, special = rest >= 0x1p16f ? 0x7f800000 : 0;
    return s1f_float_from_bits(s1f_bits_of_float(rest) | special | sign);
}

static inline uint16_t s1f_to_fp16(float value)
{
    uint32_t bits = s1f_bits_of_float(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* below 2^-14: adding 0.5 leaves the multiple of 2^-24 in the low bits */
        float shifted = s1f_float_from_bits(rest) + 0.5f;
        return (uint16_t)(sign | (s1f_bits_of_float(shifted) - 0x3f000000));
    }
    return (uint16_t)(sign | ((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13));
}

#endif
