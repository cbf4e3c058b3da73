/* sm80_attention_backward.cu - the backward kernels that are compiled, and their launcher. No line here is one that
 * only nvcc takes, so the tests compile it for the CPU. */
#include "attention_launch.cuh"
#include "kernel_table.h"
#include "sm80_key_gradients.cuh"
#include "sm80_query_gradients.cuh"

using namespace s1f;

/* X(element, dtype, head_dim, query rows, key rows, key warps, query warps, stages of dO, KB of the configuration). The
 * launcher takes the last that fits; nobody has timed them yet. */
#define TILES(X, element, dtype)                                                                                       \
    X(element, dtype, 64, 64, 128, 4, 2, 2, 99)                                                                        \
    X(element, dtype, 64, 128, 128, 4, 2, 2, 163)                                                                      \
    X(element, dtype, 128, 64, 64, 2, 4, 1, 99)                                                                        \
    X(element, dtype, 128, 64, 128, 4, 2, 2, 163)
/* The tiles of query_gradients: X(element, dtype, head_dim, query rows, warps, KB). */
#define QUERY_TILES(X, element, dtype)                                                                                 \
    X(element, dtype, 64, 128, 8, 99)                                                                                  \
    X(element, dtype, 128, 64, 4, 99)                                                                                  \
    X(element, dtype, 128, 128, 8, 163)
#define ALL(X)                                                                                                         \
    TILES(X, bf16, S1F_BFLOAT16)                                                                                       \
    TILES(X, fp16, S1F_FLOAT16)
#define ALL_QUERY_TILES(X)                                                                                             \
    QUERY_TILES(X, bf16, S1F_BFLOAT16)                                                                                 \
    QUERY_TILES(X, fp16, S1F_FLOAT16)
#define HELPERS(X)                                                                                                     \
    X(bf16, S1F_BFLOAT16, 64)                                                                                          \
    X(bf16, S1F_BFLOAT16, 128)                                                                                         \
    X(fp16, S1F_FLOAT16, 64)                                                                                           \
    X(fp16, S1F_FLOAT16, 128)

/* -- entries: key_gradients and what goes with it, query_gradients, what any tile needs ---------------------------- */

#define KEYS_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages)                                       \
    s1f_attention_backward_##element##_d##head_dim##_m##rows##n##keys##w##key_warps##x##query_warps##s##stages
#define ROUND_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages)                                      \
    s1f_attention_backward_round_##element##_d##head_dim##_m##rows##n##keys##w##key_warps##x##query_warps##s##stages
#define QUERIES_NAME(element, head_dim, rows, warps)                                                                   \
    s1f_attention_backward_dq_##element##_d##head_dim##_m##rows##n64w##warps##s2
#define KEY_GRADIENTS(element, head_dim, rows, keys, key_warps, query_warps, stages)                                   \
    key_gradients<element, head_dim, rows, keys, key_warps, query_warps, stages>

#define KEYS_ENTRY(element, dtype, head_dim, rows, keys, key_warps, query_warps, stages, limit)                        \
    S1F_KERNEL(KEYS_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages),                               \
               KEY_GRADIENTS(element, head_dim, rows, keys, key_warps, query_warps, stages))                           \
    S1F_KERNEL(ROUND_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages),                              \
               round_queries<element, head_dim,                                                                        \
                             KEY_GRADIENTS(element, head_dim, rows, keys, key_warps, query_warps, stages)>)
ALL(KEYS_ENTRY)
#define QUERIES_ENTRY(element, dtype, head_dim, rows, warps, limit)                                                    \
    S1F_KERNEL(QUERIES_NAME(element, head_dim, rows, warps), query_gradients<element, head_dim, rows>)
ALL_QUERY_TILES(QUERIES_ENTRY)
#define HELPER_ENTRIES(element, dtype, head_dim)                                                                       \
    S1F_KERNEL(s1f_attention_backward_prepare_##element##_d##head_dim, prepare_rows<element, head_dim>)                \
    S1F_KERNEL(s1f_attention_backward_add_##element##_d##head_dim, add_parts<element, head_dim>)
HELPERS(HELPER_ENTRIES)
S1F_KERNEL(s1f_attention_backward_document_ranges, document_ranges)

namespace
{

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define KEYS_ROW(element, dtype, head_dim, rows, keys, key_warps, query_warps, stages, limit)                          \
    {TEXT(KEYS_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages)),                                   \
     dtype,                                                                                                            \
     head_dim,                                                                                                         \
     rows,                                                                                                             \
     keys,                                                                                                             \
     (key_warps) * (query_warps),                                                                                      \
     2,                                                                                                                \
     5,                                                                                                                \
     KEY_GRADIENTS(element, head_dim, rows, keys, key_warps, query_warps, stages)::SHARED_BYTES,                       \
     S1F_CUDA_SHARED_##limit##_KB},
/* A kernel without matrix products, whose rows have no tile. */
#define PLAIN_ROW(name, dtype, head_dim, warps) {name, dtype, head_dim, 0, 0, warps, 0, 0, 0, S1F_CUDA_SHARED_99_KB},
#define ROUND_ROW(element, dtype, head_dim, rows, keys, key_warps, query_warps, stages, limit)                         \
    PLAIN_ROW(TEXT(ROUND_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages)), dtype, head_dim,        \
              (key_warps) * (query_warps))
#define QUERIES_ROW(element, dtype, head_dim, rows, warps, limit)                                                      \
    {TEXT(QUERIES_NAME(element, head_dim, rows, warps)),                                                               \
     dtype,                                                                                                            \
     head_dim,                                                                                                         \
     rows,                                                                                                             \
     64,                                                                                                               \
     warps,                                                                                                            \
     2,                                                                                                                \
     3,                                                                                                                \
     query_gradients<element, head_dim, rows>::SHARED_BYTES,                                                           \
     S1F_CUDA_SHARED_##limit##_KB},
#define HELPER_ROWS(element, dtype, head_dim)                                                                          \
    PLAIN_ROW(TEXT(s1f_attention_backward_prepare_##element##_d##head_dim), dtype, head_dim, 8)                        \
    PLAIN_ROW(TEXT(s1f_attention_backward_add_##element##_d##head_dim), dtype, head_dim, 8)
const s1f_cuda_kernel kernels[] = {ALL(KEYS_ROW) ALL(ROUND_ROW) ALL_QUERY_TILES(QUERIES_ROW) HELPERS(HELPER_ROWS)
                                       PLAIN_ROW("s1f_attention_backward_document_ranges", -1, 0, 4)};

using entry = void (*)(attention_backward_arguments);
#define KEYS_POINTER(element, dtype, head_dim, rows, keys, key_warps, query_warps, stages, limit)                      \
    KEYS_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages),
#define ROUND_POINTER(element, dtype, head_dim, rows, keys, key_warps, query_warps, stages, limit)                     \
    ROUND_NAME(element, head_dim, rows, keys, key_warps, query_warps, stages),
#define QUERIES_POINTER(element, dtype, head_dim, rows, warps, limit) QUERIES_NAME(element, head_dim, rows, warps),
const entry key_entries[] = {ALL(KEYS_POINTER)}, round_entries[] = {ALL(ROUND_POINTER)},
            query_entries[] = {ALL_QUERY_TILES(QUERIES_POINTER)};
constexpr int NUM_TILES = sizeof key_entries / sizeof key_entries[0];
constexpr int NUM_QUERY_TILES = sizeof query_entries / sizeof query_entries[0];

/* -- what can be launched, and how --------------------------------------------------------------------------------- */

bool is_supported_backward(const s1f_cuda_attention &a)
{
    const int64_t grid_limit = 65535;
    return is_supported(a) && a.heads <= grid_limit && fits_chunks(a.dout, a.dout_strides) &&
           fits_chunks(a.dq, a.dq_strides) && fits_chunks(a.dk, a.dkv_strides, 4) &&
           fits_chunks(a.dv, a.dkv_strides, 4) && fits_chunks(a.own_dk, a.own_dkv_strides) &&
           fits_chunks(a.own_dv, a.own_dkv_strides) && (a.own_dk == nullptr) == (a.own_dv == nullptr);
}

/* Index of the last of `count` kernels from `first` on that is for these arguments and needs at most `limit` bytes of
 * shared memory; -1: none. */
int last_that_fits(const s1f_cuda_attention &a, int first, int count, int limit)
{
    int found = -1;
    for (int i = first; i < first + count; i++)
        if (kernels[i].dtype == a.dtype && kernels[i].head_dim == a.head_dim && kernels[i].shared_bytes <= limit)
            found = i;
    return found;
}

/* How a call is carried out. */
struct plan {
    int tile, query_tile;                 /* indices of kernels; tile -1: not at all */
    int num_parts, first_key, num_blocks; /* num_blocks: tiles of keys */
    int64_t padded_len, all_rows;         /* all_rows: padded, of all query heads */
    int64_t lse2, delta, dq_sums, part_dk, part_dv,
        bytes; /* offsets into the scratch, behind the ranges; and its size */
};

/* The way over the queries is cut where there would be fewer than two blocks of key_gradients per SM of the large GPUs
 * (132 SMs), but into parts of at least 4 turns. By the shape and these constants alone, so that results do not depend
 * on the device. */
int parts_for(const s1f_cuda_attention_args &args, int64_t blocks, int64_t turns)
{
    const int64_t wanted = 264, fewest_turns = 4;
    if (args.num_parts > 0)
        return args.num_parts;
    const int64_t most = (wanted + blocks - 1) / blocks, longest = turns / fewest_turns;
    const int64_t parts = most < longest ? most : longest;
    return parts < 1 ? 1 : (int)parts;
}

plan plan_of(const s1f_cuda_attention_args &args, int32_t asked)
{
    const s1f_cuda_attention &a = args.attention;
    plan p = {};
    p.tile = !is_supported_backward(a) || asked < -1 || asked >= NUM_TILES ? -1
             : asked == -1 ? last_that_fits(a, 0, NUM_TILES, shared_memory_limit())
                           : last_that_fits(a, asked, 1, shared_memory_limit());
    if (p.tile < 0)
        return p;
    const s1f_cuda_kernel &kernel = kernels[p.tile];
    p.query_tile = last_that_fits(a, 2 * NUM_TILES, NUM_QUERY_TILES, kernel.shared_limit);

    const int num_tokens = (int)(a.q_start + a.segment_len), window = options_of(a, nullptr).window;
    const int first_seen = a.q_start < window ? 0 : (int)a.q_start - window + 1;
    p.first_key = first_seen / kernel.key_rows * kernel.key_rows;
    p.num_blocks = (num_tokens - p.first_key + kernel.key_rows - 1) / kernel.key_rows;
    const int64_t tiles = (a.segment_len + kernel.query_rows - 1) / kernel.query_rows;
    p.num_parts = parts_for(args, p.num_blocks * a.kv_heads * a.batch, tiles * (a.heads / a.kv_heads));
    if (p.num_parts == 1 && a.store_kv_grads) { /* rows that no query sees are stored too: zeros */
        p.first_key = 0;
        p.num_blocks = (num_tokens + kernel.key_rows - 1) / kernel.key_rows;
    }

    p.padded_len = round_up(a.segment_len, ROW_PADDING);
    p.all_rows = a.batch * a.heads * p.padded_len;
    const int64_t part_rows = p.num_parts > 1 ? p.num_parts * a.batch * a.kv_heads * (num_tokens - p.first_key) : 0;
    const int64_t size = sizeof(float);
    p.lse2 = round_up(range_bytes(a, RANGE_TOKENS), CHUNK_BYTES);
    p.delta = p.lse2 + p.all_rows * size;
    p.dq_sums = p.delta + p.all_rows * size;
    p.part_dk = p.dq_sums + (args.deterministic ? 0 : p.all_rows * a.head_dim * size);
    p.part_dv = p.part_dk + part_rows * a.head_dim * size;
    p.bytes = p.part_dv + part_rows * a.head_dim * size;
    return p;
}

int64_t scratch_bytes(const void *arguments, int32_t asked)
{
    const plan p = plan_of(*(const s1f_cuda_attention_args *)arguments, asked);
    return p.tile < 0 ? -error_of_no_kernel() : p.bytes;
}

/* -- launch -------------------------------------------------------------------------------------------------------- */

attention_backward_arguments arguments_of(const s1f_cuda_attention_args &args, const plan &p)
{
    const s1f_cuda_attention &a = args.attention;
    char *scratch = (char *)args.scratch;
    attention_backward_arguments b = {};
    b.q = a.q;
    b.k = a.k;
    b.v = a.v;
    b.out = a.out;
    b.dout = a.dout;
    b.q_strides = a.q_strides;
    b.kv_strides = a.kv_strides;
    b.out_strides = a.out_strides;
    b.dout_strides = a.dout_strides;
    b.lse = (const float *)a.lse;
    b.dq = a.dq;
    b.dq_strides = a.dq_strides;
    b.dk = (float *)a.dk;
    b.dv = (float *)a.dv;
    b.dkv_strides = a.dkv_strides;
    b.store_kv_grads = a.store_kv_grads;
    b.own_dk = a.own_dk;
    b.own_dv = a.own_dv;
    b.own_dkv_strides = a.own_dkv_strides;
    b.batch = (int32_t)a.batch;
    b.heads = (int32_t)a.heads;
    b.kv_heads = (int32_t)a.kv_heads;
    b.group = (int32_t)(a.heads / a.kv_heads);
    b.segment_len = (int32_t)a.segment_len;
    b.q_start = (int32_t)a.q_start;
    b.scale = (float)a.scale;
    b.options = options_of(a, a.docs == nullptr ? nullptr : (id_range *)scratch);
    b.padded_len = (int32_t)p.padded_len;
    b.lse2 = (float *)(scratch + p.lse2);
    b.delta = (float *)(scratch + p.delta);
    b.dq_sums = args.deterministic ? nullptr : (float *)(scratch + p.dq_sums);
    b.num_parts = p.num_parts;
    b.part_dk = p.num_parts > 1 ? (float *)(scratch + p.part_dk) : nullptr;
    b.part_dv = p.num_parts > 1 ? (float *)(scratch + p.part_dv) : nullptr;
    b.first_key = p.first_key;
    return b;
}

int helper_index(const s1f_cuda_attention &a)
{
    return (a.dtype == S1F_FLOAT16 ? 2 : 0) + (a.head_dim == 128 ? 1 : 0);
}

#define PREPARE_POINTER(element, dtype, head_dim) s1f_attention_backward_prepare_##element##_d##head_dim,
#define ADD_POINTER(element, dtype, head_dim) s1f_attention_backward_add_##element##_d##head_dim,
const entry prepare_entries[] = {HELPERS(PREPARE_POINTER)}, add_entries[] = {HELPERS(ADD_POINTER)};

int32_t launch_backward(const void *arguments, int32_t asked, void *stream)
{
    const s1f_cuda_attention_args &args = *(const s1f_cuda_attention_args *)arguments;
    const s1f_cuda_attention &a = args.attention;
    const plan p = plan_of(args, asked);
    if (p.tile < 0)
        return error_of_no_kernel();
    if (args.scratch_bytes < p.bytes || (uintptr_t)args.scratch % CHUNK_BYTES != 0)
        return INVALID_VALUE;
    const s1f_cuda_kernel &tile = kernels[p.tile], &query_tile = kernels[p.query_tile];
    const attention_backward_arguments b = arguments_of(args, p);
    const int heads = b.heads, kv_heads = b.kv_heads, batch = b.batch, helper = helper_index(a);
    const int query_tiles = (b.segment_len + tile.query_rows - 1) / tile.query_rows;
    const int add_blocks = a.head_dim == 64 ? add_parts<bf16, 64>::num_blocks(b) : add_parts<bf16, 128>::num_blocks(b);

    int error = 0;
    if (a.docs != nullptr)
        error = launch_document_ranges(s1f_attention_backward_document_ranges, a, b.options, RANGE_TOKENS,
                                       (id_range *)args.scratch, stream);
    if (error == 0)
        error = launch(prepare_entries[helper], {b.padded_len / ROW_PADDING, heads, batch},
                       prepare_rows<bf16, 64>::THREADS, 0, b, stream);
    if (error == 0)
        error = launch(key_entries[p.tile], {p.num_blocks * p.num_parts, kv_heads, batch}, tile.warps * WARP_SIZE,
                       tile.shared_bytes, b, stream);
    if (error == 0 && p.num_parts > 1)
        error = launch(add_entries[helper], {add_blocks, kv_heads, batch}, add_parts<bf16, 64>::THREADS, 0, b, stream);
    if (error == 0 && !args.deterministic)
        error = launch(round_entries[p.tile], {query_tiles, heads, batch}, tile.warps * WARP_SIZE, 0, b, stream);
    if (error == 0 && args.deterministic)
        error = launch(query_entries[p.query_tile - 2 * NUM_TILES],
                       {(b.segment_len + query_tile.query_rows - 1) / query_tile.query_rows, heads, batch},
                       query_tile.warps * WARP_SIZE, query_tile.shared_bytes, b, stream);
    return error;
}

} // namespace

S1F_CUDA_OPERATION(attention_backward, kernels, scratch_bytes, launch_backward, s1f::error_text);
