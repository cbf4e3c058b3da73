/* sm80_attention_parts.cu - the kernels around attention over ranges of keys that are compiled, and their launcher. No
 * line here is one that only nvcc takes, so the tests compile it for the CPU. */
#include "attention_launch.cuh"
#include "sm80_attention_parts.cuh"

using namespace s1f;

/* X(operation, its constant, element, dtype). */
#define ALL(X)                                                                                                         \
    X(merge, MERGE, bf16, S1F_BFLOAT16)                                                                                \
    X(merge, MERGE, fp16, S1F_FLOAT16)                                                                                 \
    X(add, ADD, bf16, S1F_BFLOAT16)                                                                                    \
    X(add, ADD, fp16, S1F_FLOAT16)                                                                                     \
    X(finish, FINISH, bf16, S1F_BFLOAT16)                                                                              \
    X(finish, FINISH, fp16, S1F_FLOAT16)                                                                               \
    X(total, TOTAL, bf16, S1F_BFLOAT16)                                                                                \
    X(total, TOTAL, fp16, S1F_FLOAT16)
#define ENTRY(operation, constant, element, dtype)                                                                     \
    S1F_KERNEL(s1f_attention_parts_##operation##_##element, parts_##operation<element>)
ALL(ENTRY)

namespace
{

struct entry {
    int32_t what, dtype;
    int threads, width;
    void (*kernel)(s1f_attention_parts);
};
#define POINTER(operation, constant, element, dtype)                                                                   \
    {S1F_PARTS_##constant, dtype, parts_##operation<element>::THREADS, parts_##operation<element>::WIDTH,              \
     s1f_attention_parts_##operation##_##element},
constexpr entry entries[] = {ALL(POINTER)};
constexpr int NUM_ENTRIES = sizeof entries / sizeof entries[0];

/* -- checks: the rules of attention_parts_arguments.h -------------------------------------------------------------- */

bool begins_at_chunks(const s1f_attention_parts &a, const s1f_parts_rows &rows, int element_bytes)
{
    const int elements = CHUNK_BYTES / element_bytes;
    s1f_strides strides = rows.strides; /* that of a dimension of size 1 leads nowhere */
    strides.batch = a.batch == 1 ? 0 : strides.batch;
    strides.head = a.heads == 1 ? 0 : strides.head;
    strides.row = a.rows == 1 ? 0 : strides.row;
    return rows.memory != nullptr && fits_chunks(rows.memory, strides, elements);
}

bool is_supported(const s1f_attention_parts &a)
{
    const int64_t grid_limit = 65535, item_limit = INT32_MAX - 1024;
    const bool has_slabs = a.what == S1F_PARTS_ADD || a.what == S1F_PARTS_FINISH, is_merge = a.what == S1F_PARTS_MERGE;
    const int num_tensors = has_slabs ? 2 : 1;
    if (a.what < 0 || a.what >= S1F_NUM_PARTS_OPERATIONS || a.batch < 1 || a.batch > grid_limit || a.heads < 1 ||
        a.rows < 1 || a.heads > item_limit || a.rows > item_limit || a.num_parts < 1 || a.num_parts > S1F_MOST_PARTS)
        return false;
    if ((has_slabs || is_merge) && a.num_parts != 2)
        return false;
    for (int i = 0; i < num_tensors; i++) { /* a thread has 4 elements or 8, and its number has 31 bits */
        const int64_t head_dim = a.head_dim[i];
        if (head_dim < 8 || head_dim % 8 != 0 || head_dim > item_limit || a.heads > item_limit / (head_dim / 4) ||
            a.rows > item_limit / (head_dim / 4 * a.heads))
            return false;
        const bool has_slab = has_slabs && !(a.what == S1F_PARTS_FINISH && a.store);
        if ((has_slab && !begins_at_chunks(a, a.slabs[i], sizeof(float))) ||
            (a.what != S1F_PARTS_ADD && !begins_at_chunks(a, a.outs[i], sizeof(uint16_t))))
            return false;
    }
    for (int i = 0; i < a.num_parts; i++)
        if (!begins_at_chunks(a, a.parts[i], sizeof(uint16_t)))
            return false;
    for (int i = 0; is_merge && i < 3; i++)
        if (a.lse[i] == nullptr || (uintptr_t)a.lse[i] % sizeof(float) != 0)
            return false;
    return true;
}

int64_t scratch_bytes(const void *)
{
    return 0;
}

/* -- launch -------------------------------------------------------------------------------------------------------- */

int32_t launch_parts(const void *arguments, void *stream)
{
    const s1f_attention_parts &a = *(const s1f_attention_parts *)arguments;
    int index = 0;
    while (index < NUM_ENTRIES && (entries[index].what != a.what || entries[index].dtype != a.dtype))
        index++;
    if (index == NUM_ENTRIES || !is_supported(a))
        return INVALID_VALUE;
    const entry &chosen = entries[index];
    const bool has_slabs = a.what == S1F_PARTS_ADD || a.what == S1F_PARTS_FINISH;
    const int64_t head_dim = has_slabs && a.head_dim[1] > a.head_dim[0] ? a.head_dim[1] : a.head_dim[0];
    const int64_t items = a.rows * a.heads * (head_dim / chosen.width);
    const index3 blocks = {(int)((items + chosen.threads - 1) / chosen.threads), has_slabs ? 2 : 1, (int)a.batch};
    return launch(chosen.kernel, blocks, chosen.threads, 0, a, stream);
}

} // namespace

S1F_CUDA_OPERATION(attention_parts, scratch_bytes, launch_parts, s1f::error_text);
