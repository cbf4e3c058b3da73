/* sm80_attention_backward.cu - the backward kernels that are compiled, and their launcher. No line here is one that
 * only nvcc takes, so the tests compile it for the CPU. */
#include "attention_launch.cuh"
#include "sm80_key_gradients.cuh"

using namespace s1f;

/* X(element, dtype, head_dim, query rows, key rows, key warps, query warps, stages of dO). The launcher takes the last
 * of which a block fits: in 99 KB of shared memory on sm_86, sm_89 and sm_120, in 163 KB on sm_80, more on sm_90. */
#define TILES(X, element, dtype)                                                                                       \
    X(element, dtype, 64, 64, 128, 4, 2, 2)                                                                            \
    X(element, dtype, 64, 128, 128, 4, 2, 2)                                                                           \
    X(element, dtype, 128, 64, 64, 2, 4, 1)                                                                            \
    X(element, dtype, 128, 64, 128, 4, 2, 2)
#define ALL(X)                                                                                                         \
    TILES(X, bf16, S1F_BFLOAT16)                                                                                       \
    TILES(X, fp16, S1F_FLOAT16)

#define NAME(what, element, head_dim, rows, keys)                                                                      \
    s1f_attention_backward_##what##_##element##_d##head_dim##_m##rows##n##keys
#define PREPARE(element, head_dim) s1f_attention_backward_prepare_##element##_d##head_dim
#define ENTRIES(element, dtype, head_dim, rows, keys, ...)                                                             \
    S1F_KERNEL(NAME(keys, element, head_dim, rows, keys), key_gradients<element, head_dim, rows, keys, __VA_ARGS__>)   \
    S1F_KERNEL(NAME(round, element, head_dim, rows, keys),                                                             \
               round_queries<element, head_dim, key_gradients<element, head_dim, rows, keys, __VA_ARGS__>>)
ALL(ENTRIES)
#define PREPARE_ENTRY(element, dtype, head_dim) S1F_KERNEL(PREPARE(element, head_dim), prepare_rows<element, head_dim>)
S1F_ATTENTION_HEADS(PREPARE_ENTRY)
S1F_KERNEL(s1f_attention_backward_document_ranges, document_ranges)

namespace
{

struct kernels_of_tile {
    int32_t dtype;
    int64_t head_dim;
    int query_rows, key_rows, threads, shared_bytes;
    void (*prepare)(attention_backward_arguments);
    void (*key_gradients)(attention_backward_arguments);
    void (*round)(attention_backward_arguments);
};
#define ROW(element, dtype, head_dim, rows, keys, ...)                                                                 \
    {dtype,                                                                                                            \
     head_dim,                                                                                                         \
     rows,                                                                                                             \
     keys,                                                                                                             \
     key_gradients<element, head_dim, rows, keys, __VA_ARGS__>::THREADS,                                               \
     key_gradients<element, head_dim, rows, keys, __VA_ARGS__>::SHARED_BYTES,                                          \
     PREPARE(element, head_dim),                                                                                       \
     NAME(keys, element, head_dim, rows, keys),                                                                        \
     NAME(round, element, head_dim, rows, keys)},
const kernels_of_tile tiles[] = {ALL(ROW)};

/* -- what can be launched, and how --------------------------------------------------------------------------------- */

bool is_supported_backward(const s1f_cuda_attention &a)
{
    const int64_t grid_limit = 65535;
    return is_supported(a) && a.heads <= grid_limit && fits_chunks(a.dout, a.dout_strides) &&
           fits_chunks(a.dq, a.dq_strides) && fits_chunks(a.dk, a.dkv_strides, 4) &&
           fits_chunks(a.dv, a.dkv_strides, 4) && fits_chunks(a.own_dk, a.own_dkv_strides) &&
           fits_chunks(a.own_dv, a.own_dkv_strides) && (a.own_dk == nullptr) == (a.own_dv == nullptr);
}

/* NULL: there is none for these arguments, as without a device. */
const kernels_of_tile *choose_tile(const s1f_cuda_attention &a)
{
    const kernels_of_tile *chosen = nullptr;
    const int limit = shared_memory_limit();
    for (const kernels_of_tile &found : tiles)
        if (is_supported_backward(a) && found.dtype == a.dtype && found.head_dim == a.head_dim &&
            found.shared_bytes <= limit)
            chosen = &found;
    return chosen;
}

struct scratch_layout { /* offsets behind the ranges, in this order, and the size */
    int64_t lse2, delta, dq_sums, bytes;
};

scratch_layout scratch_of(const s1f_cuda_attention &a)
{
    const int64_t rows = a.batch * a.heads * round_up(a.segment_len, ROW_PADDING), size = sizeof(float);
    scratch_layout layout;
    layout.lse2 = round_up(range_bytes(a, RANGE_TOKENS), CHUNK_BYTES);
    layout.delta = layout.lse2 + rows * size;
    layout.dq_sums = layout.delta + rows * size;
    layout.bytes = layout.dq_sums + rows * a.head_dim * size;
    return layout;
}

int64_t scratch_bytes(const void *arguments)
{
    const s1f_cuda_attention &a = *(const s1f_cuda_attention *)arguments;
    return choose_tile(a) == nullptr ? -error_of_no_kernel() : scratch_of(a).bytes;
}

/* -- launch -------------------------------------------------------------------------------------------------------- */

attention_backward_arguments arguments_of(const s1f_cuda_attention &a, const kernels_of_tile &tile)
{
    const scratch_layout layout = scratch_of(a);
    char *scratch = (char *)a.scratch;
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
    b.padded_len = (int32_t)round_up(a.segment_len, ROW_PADDING);
    b.lse2 = (float *)(scratch + layout.lse2);
    b.delta = (float *)(scratch + layout.delta);
    b.dq_sums = (float *)(scratch + layout.dq_sums);
    if (!a.store_kv_grads && b.q_start >= b.options.window) /* else rows that no query sees are stored too: zeros */
        b.first_key = (b.q_start - b.options.window + 1) / tile.key_rows * tile.key_rows;
    return b;
}

int32_t launch_backward(const void *arguments, void *stream)
{
    const s1f_cuda_attention &a = *(const s1f_cuda_attention *)arguments;
    const kernels_of_tile *tile = choose_tile(a);
    if (tile == nullptr)
        return error_of_no_kernel();
    if (a.scratch_bytes < scratch_of(a).bytes || (uintptr_t)a.scratch % CHUNK_BYTES != 0)
        return INVALID_VALUE;
    const attention_backward_arguments b = arguments_of(a, *tile);
    const int key_tiles = (b.options.num_tokens - b.first_key + tile->key_rows - 1) / tile->key_rows;
    const int query_tiles = (b.segment_len + tile->query_rows - 1) / tile->query_rows;

    int error = 0;
    if (a.docs != nullptr)
        error = launch_document_ranges(s1f_attention_backward_document_ranges, a, b.options, RANGE_TOKENS,
                                       (id_range *)a.scratch, stream);
    if (error == 0)
        error = launch(tile->prepare, {b.padded_len / ROW_PADDING, b.heads, b.batch}, prepare_rows<bf16, 64>::THREADS,
                       0, b, stream);
    if (error == 0)
        error =
            launch(tile->key_gradients, {key_tiles, b.kv_heads, b.batch}, tile->threads, tile->shared_bytes, b, stream);
    if (error == 0)
        error = launch(tile->round, {query_tiles, b.heads, b.batch}, tile->threads, 0, b, stream);
    return error;
}

} // namespace

S1F_CUDA_OPERATION(attention_backward, scratch_bytes, launch_backward, s1f::error_text);
