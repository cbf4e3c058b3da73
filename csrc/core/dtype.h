/* dtype.h - element types, as they stand in messages, slabs and kernel arguments. Never torch's own codes: those are
 * read from the running torch and translated at the edge. */
#ifndef S1F_DTYPE_H
#define S1F_DTYPE_H

#include <stdint.h>

typedef enum {
    S1F_FLOAT32 = 0,
    S1F_FLOAT64,
    S1F_BFLOAT16,
    S1F_FLOAT16,
    S1F_INT64,
    S1F_INT32,
    S1F_INT16,
    S1F_INT8,
    S1F_UINT8,
    S1F_BOOL,
    S1F_COMPLEX64,
    S1F_COMPLEX128,
    S1F_NUM_DTYPES
} s1f_dtype;

static inline int64_t s1f_dtype_bytes(int32_t dtype)
{
    static const int8_t bytes[S1F_NUM_DTYPES] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16};
    return dtype >= 0 && dtype < S1F_NUM_DTYPES ? bytes[dtype] : 0;
}

static inline const char *s1f_dtype_name(int32_t dtype)
{
    static const char *const names[S1F_NUM_DTYPES] = {"float32", "float64", "bfloat16",  "float16",
                                                      "int64",   "int32",   "int16",     "int8",
                                                      "uint8",   "bool",    "complex64", "complex128"};
    return dtype >= 0 && dtype < S1F_NUM_DTYPES ? names[dtype] : "unknown dtype";
}

/* The dtype of lse, and of dK and dV while they add up. */
static inline int32_t s1f_dtype_of_sums(int32_t dtype)
{
    return dtype == S1F_FLOAT64 ? S1F_FLOAT64 : S1F_FLOAT32;
}

#endif
