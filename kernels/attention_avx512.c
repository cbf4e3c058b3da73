/* attention_avx512.c - blocked attention on AVX-512. */
#include "attention_avx512.inc.h"

#define KERNELS s1f_attention_avx512
#define KERNELS_NAME "avx512"
#include "attention_blocked.inc.h"
