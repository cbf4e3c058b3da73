/* sm80_attention_forward.cu - the forward kernels that are compiled, and their launcher. No line here is one that only
 * nvcc takes, so the tests compile it for the CPU. */
#include "attention_launch.cuh"
#include "sm80_attention_forward.cuh"

using namespace s1f;

/* The tile of a block: rows of queries, keys, warps, and slots of the ring. Two blocks of 80 KB fit an SM of sm_80. */
constexpr int ROWS = 128, KEYS = 64, WARPS = 4, SLOTS = 3;
template <typename Element, int HEAD_DIM>
using forward_kernel = attention_forward<Element, HEAD_DIM, ROWS, KEYS, WARPS, SLOTS>;

#define NAME(element, head_dim) s1f_attention_forward_##element##_d##head_dim
#define ENTRY(element, dtype, head_dim) S1F_KERNEL(NAME(element, head_dim), forward_kernel<element, head_dim>)
S1F_ATTENTION_HEADS(ENTRY)
S1F_KERNEL(s1f_attention_forward_document_ranges, document_ranges)

namespace
{

struct kernel {
    int32_t dtype;
    int64_t head_dim;
    int shared_bytes;
    void (*entry)(attention_forward_arguments);
};
#define KERNEL(element, dtype, head_dim)                                                                               \
    {dtype, head_dim, forward_kernel<element, head_dim>::SHARED_BYTES, NAME(element, head_dim)},
const kernel kernels[] = {S1F_ATTENTION_HEADS(KERNEL)};

/* NULL: there is none for these arguments, as without a device. */
const kernel *choose_kernel(const s1f_cuda_attention &a)
{
    const int limit = shared_memory_limit();
    for (const kernel &found : kernels)
        if (is_supported(a) && found.dtype == a.dtype && found.head_dim == a.head_dim && found.shared_bytes <= limit)
            return &found;
    return nullptr;
}

int64_t scratch_bytes(const void *arguments)
{
    const s1f_cuda_attention &a = *(const s1f_cuda_attention *)arguments;
    return choose_kernel(a) == nullptr ? -error_of_no_kernel() : round_up(range_bytes(a, KEYS), CHUNK_BYTES);
}

int32_t launch_forward(const void *arguments, void *stream)
{
    const s1f_cuda_attention &a = *(const s1f_cuda_attention *)arguments;
    const kernel *chosen = choose_kernel(a);
    if (chosen == nullptr)
        return error_of_no_kernel();
    const int64_t needed = range_bytes(a, KEYS);
    if (a.scratch_bytes < needed || (needed > 0 && (uintptr_t)a.scratch % CHUNK_BYTES != 0))
        return INVALID_VALUE;
    id_range *ranges = a.docs == nullptr ? nullptr : (id_range *)a.scratch;

    attention_forward_arguments forward = {};
    forward.q = a.q;
    forward.k = a.k;
    forward.v = a.v;
    forward.out = a.out;
    forward.lse = (float *)a.lse;
    forward.q_strides = a.q_strides;
    forward.kv_strides = a.kv_strides;
    forward.out_strides = a.out_strides;
    forward.heads = (int32_t)a.heads;
    forward.group = (int32_t)(a.heads / a.kv_heads);
    forward.segment_len = (int32_t)a.segment_len;
    forward.q_start = (int32_t)a.q_start;
    forward.num_tiles = (int32_t)((a.segment_len * forward.group + ROWS - 1) / ROWS);
    forward.options = options_of(a, ranges);

    int error = 0;
    if (ranges != nullptr)
        error = launch_document_ranges(s1f_attention_forward_document_ranges, a, forward.options, KEYS, ranges, stream);
    const index3 blocks = {forward.num_tiles, (int)a.kv_heads, (int)a.batch};
    return error != 0 ? error : launch(chosen->entry, blocks, WARPS * WARP_SIZE, chosen->shared_bytes, forward, stream);
}

} // namespace

S1F_CUDA_OPERATION(attention_forward, scratch_bytes, launch_forward, s1f::error_text);
