/* sm80_attention_forward.cu - the forward kernels that are compiled, and their launcher. No line here is one that only
 * nvcc takes, so the tests compile it for the CPU. */
#include "attention_launch.cuh"
#include "kernel_table.h"
#include "sm80_attention_forward.cuh"

using namespace s1f;

/* X(element, dtype, head_dim, rows, keys, warps, slots, KB of the configuration). The launcher takes the first that
 * fits. Two blocks of 80 KB fit an SM of sm_80. */
#define TILES(X, element, dtype)                                                                                       \
    X(element, dtype, 64, 128, 64, 4, 3, 99)                                                                           \
    X(element, dtype, 128, 128, 64, 4, 3, 99)
#define ALL(X)                                                                                                         \
    TILES(X, bf16, S1F_BFLOAT16)                                                                                       \
    TILES(X, fp16, S1F_FLOAT16)

#define NAME(element, head_dim, rows, keys, warps, slots)                                                              \
    s1f_attention_forward_##element##_d##head_dim##_m##rows##n##keys##w##warps##s##slots
#define ENTRY(element, dtype, head_dim, rows, keys, warps, slots, limit)                                               \
    S1F_KERNEL(NAME(element, head_dim, rows, keys, warps, slots),                                                      \
               attention_forward<element, head_dim, rows, keys, warps, slots>)
ALL(ENTRY)
S1F_KERNEL(s1f_attention_merge_bf16_d64, merge_parts<bf16, 64>)
S1F_KERNEL(s1f_attention_merge_bf16_d128, merge_parts<bf16, 128>)
S1F_KERNEL(s1f_attention_merge_fp16_d64, merge_parts<fp16, 64>)
S1F_KERNEL(s1f_attention_merge_fp16_d128, merge_parts<fp16, 128>)
S1F_KERNEL(s1f_attention_forward_document_ranges, document_ranges)

namespace
{

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

template <typename Kernel>
constexpr s1f_cuda_kernel row_of(const char *name, int32_t dtype, int32_t head_dim, int32_t rows, int32_t keys,
                                 int32_t warps, int32_t slots, int32_t limit)
{
    return {name, dtype, head_dim, rows, keys, warps, slots, 2, Kernel::SHARED_BYTES, limit};
}

constexpr s1f_cuda_kernel row_of_helper(const char *name, int32_t dtype, int32_t head_dim)
{
    return {name, dtype, head_dim, 0, 0, 4, 0, 0, 0, S1F_CUDA_SHARED_99_KB};
}

#define ROW(element, dtype, head_dim, rows, keys, warps, slots, limit)                                                 \
    row_of<attention_forward<element, head_dim, rows, keys, warps, slots>>(                                            \
        TEXT(NAME(element, head_dim, rows, keys, warps, slots)), dtype, head_dim, rows, keys, warps, slots,            \
        S1F_CUDA_SHARED_##limit##_KB),
#define HELPER(name, dtype, head_dim) row_of_helper(#name, dtype, head_dim)
constexpr s1f_cuda_kernel kernels[] = {
    ALL(ROW) HELPER(s1f_attention_merge_bf16_d64, S1F_BFLOAT16, 64),
    HELPER(s1f_attention_merge_bf16_d128, S1F_BFLOAT16, 128),
    HELPER(s1f_attention_merge_fp16_d64, S1F_FLOAT16, 64),
    HELPER(s1f_attention_merge_fp16_d128, S1F_FLOAT16, 128),
    HELPER(s1f_attention_forward_document_ranges, -1, 0),
};

#define POINTER(element, dtype, head_dim, rows, keys, warps, slots, limit)                                             \
    NAME(element, head_dim, rows, keys, warps, slots),
void (*const entries[])(attention_forward_arguments) = {ALL(POINTER)};
constexpr int NUM_ENTRIES = sizeof entries / sizeof entries[0];

/* -- what can be launched, and how --------------------------------------------------------------------------------- */

/* Index of the kernel: the one asked for if it is for these arguments; -1: none, as without a device. */
int choose_kernel(const s1f_cuda_attention &a, int32_t asked)
{
    const int limit = shared_memory_limit();
    for (int i = 0; i < NUM_ENTRIES; i++)
        if (kernels[i].dtype == a.dtype && kernels[i].head_dim == a.head_dim && (asked == -1 || asked == i) &&
            kernels[i].shared_bytes <= limit)
            return i;
    return -1;
}

int64_t num_tiles_of(const s1f_cuda_attention &a, const s1f_cuda_kernel &kernel)
{
    return (a.segment_len * (a.heads / a.kv_heads) + kernel.query_rows - 1) / kernel.query_rows;
}

/* Keys are split where there would be fewer than one block per SM of the large GPUs (108 to 144 SMs), into parts of at
 * least 4 blocks of keys, so that about two per SM run. By the shape and these constants alone, so that results do not
 * depend on the device. */
int32_t num_parts_of(const s1f_cuda_attention_args &args, const s1f_cuda_kernel &kernel)
{
    const s1f_cuda_attention &a = args.attention;
    const int64_t blocks = num_tiles_of(a, kernel) * a.kv_heads * a.batch, few = 128, wanted = 256, fewest_per_part = 4;
    int64_t keys = a.q_start + a.segment_len;
    if (a.window > 0 && a.window + a.segment_len < keys)
        keys = a.window + a.segment_len;
    if (args.num_parts != 0)
        return args.num_parts;
    const int64_t longest = keys / kernel.key_rows / fewest_per_part, most = wanted / blocks;
    const int64_t parts = most < longest ? most : longest;
    return blocks >= few || parts < 1 ? 1 : (int32_t)parts;
}

struct scratch_layout { /* offsets; in this order */
    int64_t part_lse, part_out, bytes;
};

scratch_layout scratch_of(const s1f_cuda_attention &a, const s1f_cuda_kernel &kernel, int32_t num_parts)
{
    const int64_t rows = num_parts > 1 ? num_parts * a.batch * a.heads * a.segment_len : 0;
    scratch_layout layout;
    layout.part_lse = round_up(range_bytes(a, kernel.key_rows), CHUNK_BYTES);
    layout.part_out = layout.part_lse + round_up(rows * (int64_t)sizeof(float), CHUNK_BYTES);
    layout.bytes = layout.part_out + rows * a.head_dim * (int64_t)sizeof(float);
    return layout;
}

int64_t scratch_bytes(const void *arguments, int32_t asked)
{
    const s1f_cuda_attention_args &args = *(const s1f_cuda_attention_args *)arguments;
    const int index = is_supported(args.attention) ? choose_kernel(args.attention, asked) : -1;
    return index < 0 ? -error_of_no_kernel()
                     : scratch_of(args.attention, kernels[index], num_parts_of(args, kernels[index])).bytes;
}

/* -- launch -------------------------------------------------------------------------------------------------------- */

int merge(const s1f_cuda_attention &a, const attention_forward_arguments &arguments, void *stream)
{
    const int64_t threads = arguments.all_rows * a.head_dim / 4;
    const index3 blocks = {(int)((threads + 127) / 128), 1, 1};
    auto *kernel = a.dtype == S1F_BFLOAT16
                       ? (a.head_dim == 64 ? s1f_attention_merge_bf16_d64 : s1f_attention_merge_bf16_d128)
                       : (a.head_dim == 64 ? s1f_attention_merge_fp16_d64 : s1f_attention_merge_fp16_d128);
    return launch(kernel, blocks, 128, 0, arguments, stream);
}

int32_t launch_forward(const void *arguments, int32_t asked, void *stream)
{
    const s1f_cuda_attention_args &args = *(const s1f_cuda_attention_args *)arguments;
    const s1f_cuda_attention &a = args.attention;
    const int index = is_supported(a) ? choose_kernel(a, asked) : -1;
    if (index < 0)
        return error_of_no_kernel();
    const s1f_cuda_kernel &kernel = kernels[index];
    const int32_t num_parts = num_parts_of(args, kernel);
    const scratch_layout layout = scratch_of(a, kernel, num_parts);
    if (num_parts < 1 || num_tiles_of(a, kernel) * num_parts > INT32_MAX)
        return INVALID_VALUE;
    if (args.scratch_bytes < layout.bytes || (layout.bytes > 0 && (uintptr_t)args.scratch % CHUNK_BYTES != 0))
        return INVALID_VALUE;
    char *scratch = (char *)args.scratch;
    id_range *ranges = a.docs == nullptr ? nullptr : (id_range *)scratch;

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
    forward.num_tiles = (int32_t)num_tiles_of(a, kernel);
    forward.num_parts = num_parts;
    forward.all_rows = a.batch * a.heads * a.segment_len;
    forward.part_lse = num_parts > 1 ? (float *)(scratch + layout.part_lse) : nullptr;
    forward.part_out = num_parts > 1 ? (float *)(scratch + layout.part_out) : nullptr;
    forward.options = options_of(a, ranges);

    int error = 0;
    if (ranges != nullptr)
        error = launch_document_ranges(s1f_attention_forward_document_ranges, a, forward.options, kernel.key_rows,
                                       ranges, stream);
    const index3 blocks = {forward.num_tiles * num_parts, (int)a.kv_heads, (int)a.batch};
    if (error == 0)
        error = launch(entries[index], blocks, kernel.warps * WARP_SIZE, kernel.shared_bytes, forward, stream);
    if (error == 0 && num_parts > 1)
        error = merge(a, forward, stream);
    return error;
}

} // namespace

S1F_CUDA_OPERATION(attention_forward, kernels, scratch_bytes, launch_forward, s1f::error_text);
