/* attention.c - chooses the attention kernels of a call: the blocked kernels of the fastest instruction set of this
 * machine, or the reference (attention_ref.c) for calls that those do not take. */
#include "attention_internal.h"
#include "rate.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Fastest first; the reference, which every machine has, last. */
static const s1f_attention_kernels *const all_kernels[] = {
#if defined(__x86_64__)
    &s1f_attention_avx512bf16, &s1f_attention_avx512,    &s1f_attention_avx2,
#elif defined(__aarch64__)
    &s1f_attention_neon,
#endif
    &s1f_attention_portable,   &s1f_attention_reference,
};
enum { NUM_KERNELS = sizeof all_kernels / sizeof *all_kernels };

static const s1f_attention_kernels *_Atomic chosen;

static int machine_has(const char *name)
{
#if defined(__x86_64__)
    if (strcmp(name, "avx512bf16") == 0)
        return machine_has("avx512") && __builtin_cpu_supports("avx512bf16");
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__aarch64__)
    if (strcmp(name, "neon") == 0)
        return 1;
#endif
    return strcmp(name, "portable") == 0 || strcmp(name, "reference") == 0;
}

static const s1f_attention_kernels *find(const char *name)
{
    for (int i = 0; i < NUM_KERNELS; i++)
        if (machine_has(all_kernels[i]->name) && (!name || strcmp(name, all_kernels[i]->name) == 0))
            return all_kernels[i];
    return NULL;
}

static const s1f_attention_kernels *fastest(void)
{
    const s1f_attention_kernels *kernels = find(NULL);
#if defined(__x86_64__)
    /* Dot products of bf16 run at twice the rate of fp32 ones on some machines and at half of it on others. */
    if (kernels == &s1f_attention_avx512bf16) {
        s1f_rates rates = s1f_measure_rates(0.001);
        kernels = rates.bf16 > 1.2 * rates.fma ? kernels : &s1f_attention_avx512;
    }
#endif
    return kernels;
}

/* SEQ1F1B_ISA, where it names kernels of this machine, is for tests; anything else in it is ignored. */
static const s1f_attention_kernels *kernels_in_use(void)
{
    const s1f_attention_kernels *kernels = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!kernels) {
        const char *forced = getenv("SEQ1F1B_ISA");
        kernels = forced ? find(forced) : NULL;
        kernels = kernels ? kernels : fastest();
        atomic_store_explicit(&chosen, kernels, memory_order_release);
    }
    return kernels;
}

const char *s1f_attention_isa(void)
{
    return kernels_in_use()->name;
}

s1f_status s1f_attention_set_isa(const char *name)
{
    const s1f_attention_kernels *kernels = name ? find(name) : fastest();
    if (!kernels)
        return s1f_fail(S1F_ERR_ARG, "no attention kernels for instruction set '%s' on this machine", name);
    atomic_store_explicit(&chosen, kernels, memory_order_release);
    return S1F_OK;
}

/* The kernels in use, or the next in the list that take the call; the reference takes every call. */
static const s1f_attention_kernels *kernels_for(const s1f_attention_args *args)
{
    const s1f_attention_kernels *first = kernels_in_use();
    for (int i = 0, met = 0; i < NUM_KERNELS - 1; i++) {
        met |= all_kernels[i] == first;
        if (met && machine_has(all_kernels[i]->name) && all_kernels[i]->covers(args))
            return all_kernels[i];
    }
    return &s1f_attention_reference;
}

s1f_status s1f_attention_forward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    s1f_status status = s1f_attention_check(args);
    return status == S1F_OK ? kernels_for(args)->forward(args, context) : status;
}

s1f_status s1f_attention_backward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    s1f_status status = s1f_attention_check(args);
    return status == S1F_OK ? kernels_for(args)->backward(args, context) : status;
}

int64_t s1f_attention_scratch_bytes(const s1f_attention_args *args, int32_t num_threads, int backward)
{
    return s1f_attention_check(args) == S1F_OK ? kernels_for(args)->scratch_bytes(args, num_threads, backward) : 0;
}

static int ranges_are_sound(const s1f_attention_args *args)
{
    int64_t end = 0;
    for (int32_t i = 0; i < args->num_ranges; i++) {
        const s1f_key_range *range = &args->ranges[i];
        if (range->begin != end || range->end <= range->begin || range->row < 0)
            return 0;
        end = range->end;
    }
    return args->num_ranges > 0 && end == args->q_start + args->segment_len &&
           args->ranges[args->num_ranges - 1].begin <= args->q_start;
}

static s1f_status check_keys(const s1f_attention_args *args)
{
    int64_t tokens = args->q_start + args->segment_len;
    if (args->kept_kv_grads < 0 || args->kept_kv_grads > tokens)
        return s1f_fail(S1F_ERR_ARG, "kept_kv_grads is %lld, must be among the %lld keys, or their number",
                        (long long)args->kept_kv_grads, (long long)tokens);
    if (args->shared_keys < 0 || args->shared_keys > args->q_start ||
        (args->shared_keys > 0 && (args->window > 0 || args->slopes)))
        return s1f_fail(S1F_ERR_ARG,
                        "shared_keys is %lld, must be from 0 to the segment's begin, which is %lld, and 0 beside a "
                        "window or ALiBi",
                        (long long)args->shared_keys, (long long)args->q_start);
    if (args->ranges && !ranges_are_sound(args))
        return s1f_fail(S1F_ERR_ARG,
                        "the %d ranges of keys must have all keys up to %lld in order, none empty or from a negative "
                        "row on, and those of the segment, from %lld on, in the last",
                        (int)args->num_ranges, (long long)tokens, (long long)args->q_start);
    return S1F_OK;
}

s1f_status s1f_attention_check(const s1f_attention_args *args)
{
    if (args->dtype != S1F_FLOAT32 && args->dtype != S1F_FLOAT64 && args->dtype != S1F_BFLOAT16 &&
        args->dtype != S1F_FLOAT16)
        return s1f_fail(S1F_ERR_ARG, "attention of %s: must be float32, float64, bfloat16 or float16",
                        s1f_dtype_name(args->dtype));
    if (args->batch < 1 || args->heads < 1 || args->kv_heads < 1 || args->segment_len < 1 || args->head_dim < 1 ||
        args->v_head_dim < 1)
        return s1f_fail(S1F_ERR_ARG,
                        "attention of batch %lld, heads %lld, kv_heads %lld, segment_len %lld, head_dim %lld, "
                        "v_head_dim %lld: each must be at least 1",
                        (long long)args->batch, (long long)args->heads, (long long)args->kv_heads,
                        (long long)args->segment_len, (long long)args->head_dim, (long long)args->v_head_dim);
    if (args->heads % args->kv_heads != 0)
        return s1f_fail(S1F_ERR_ARG, "kv_heads %lld does not divide heads %lld", (long long)args->kv_heads,
                        (long long)args->heads);
    if (args->q_start < 0 || args->window < 0)
        return s1f_fail(S1F_ERR_ARG, "q_start %lld and window %lld must not be negative", (long long)args->q_start,
                        (long long)args->window);
    if (!(args->softcap >= 0))
        return s1f_fail(S1F_ERR_ARG, "softcap is %g, must be positive, or 0 for none", args->softcap);
    return check_keys(args);
}

s1f_status s1f_attention_scratch(const s1f_attention_context *context, int64_t bytes, void **scratch, void **owned)
{
    *owned = NULL;
    if (context && context->scratch) {
        if (context->scratch_bytes < bytes)
            return s1f_fail(S1F_ERR_ARG, "attention scratch holds %lld bytes, needs %lld",
                            (long long)context->scratch_bytes, (long long)bytes);
        *scratch = context->scratch;
        return S1F_OK;
    }
    *scratch = *owned = aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
    if (!*scratch)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld bytes of attention scratch", (long long)bytes);
    return S1F_OK;
}
