/* sm80_attention_parts.cuh - bodies of the kernels that merge and add up results over ranges of keys.
 *
 * They read and write each element once and compute next to nothing, so memory alone limits them. Each thread takes a
 * few neighbouring elements of one row. Threads go over a batch entry in the order (row, head, column), that of
 * token-major memory, which is how attention leaves its results; a slab, whose heads lie apart, is touched in whole
 * rows of a head. All loads of a thread come before its first sum, so that they are under way at once.
 *
 * Widths    8 elements where all tensors have 16 bits: 16 bytes. 4 where a slab of floats takes part: 16 bytes of it,
 *           so that the accesses of a warp to the slab have no gaps between them */
#ifndef S1F_SM80_ATTENTION_PARTS_CUH
#define S1F_SM80_ATTENTION_PARTS_CUH

#include "attention_options.cuh"
#include "attention_parts_arguments.h"

namespace s1f
{

struct parts_place { /* of a thread's elements in each tensor */
    int64_t batch, head, row;
    int column;
};

/* Whether there is something for this thread to do, and where. */
template <int THREADS, int WIDTH>
S1F_DEVICE bool find_place(const s1f_attention_parts &a, int64_t head_dim, parts_place &at)
{
    const uint32_t heads = (uint32_t)a.heads, in_row = (uint32_t)head_dim / WIDTH;
    const uint32_t item = (uint32_t)block_index().x * THREADS + (uint32_t)thread_index();
    const uint32_t of_head = item / in_row;
    at.batch = block_index().z;
    at.head = of_head % heads;
    at.row = of_head / heads;
    at.column = (int)(item % in_row) * WIDTH;
    return at.row < a.rows;
}

template <typename Element> S1F_DEVICE Element *element_of(const s1f_parts_rows &rows, const parts_place &at)
{
    return (Element *)rows.memory + at.batch * rows.strides.batch + at.head * rows.strides.head +
           at.row * rows.strides.row + at.column;
}

template <typename T> S1F_DEVICE float_quad unpack_quad(const word_pair &words)
{
    float_quad quad;
    unpack<T>(words.word[0], quad.element[0], quad.element[1]);
    unpack<T>(words.word[1], quad.element[2], quad.element[3]);
    return quad;
}

template <typename T> struct parts_merge {
    using arguments = s1f_attention_parts;
    static constexpr int THREADS = 256, BLOCKS_PER_SM = 4, WIDTH = 8;

    static S1F_DEVICE void run(const arguments &a)
    {
        parts_place at;
        if (!find_place<THREADS, WIDTH>(a, a.head_dim[0], at))
            return;
        const int64_t index = (at.batch * a.heads + at.head) * a.rows + at.row;
        const chunk own = global_load((const chunk *)element_of<uint16_t>(a.parts[0], at));
        const chunk before = global_load((const chunk *)element_of<uint16_t>(a.parts[1], at));
        const float own_lse = global_load(a.lse[0] + index), before_lse = global_load(a.lse[1] + index);

        const float most = maximum(own_lse, before_lse), from = most == -S1F_INFINITY ? 0.0f : most;
        const float own_sum = exp2_fast((own_lse - from) * LOG2_E);
        const float before_sum = exp2_fast((before_lse - from) * LOG2_E);
        const float sum = own_sum + before_sum, factor = sum == 0.0f ? 0.0f : reciprocal_fast(sum);
        const float own_share = own_sum * factor, before_share = before_sum * factor;
        chunk merged;
        S1F_UNROLL
        for (int i = 0; i < 4; i++) {
            float x[2], y[2];
            unpack<T>(own.word[i], x[0], x[1]);
            unpack<T>(before.word[i], y[0], y[1]);
            merged.word[i] = pack<T>(x[0] * own_share + y[0] * before_share, x[1] * own_share + y[1] * before_share);
        }
        global_store((chunk *)element_of<uint16_t>(a.outs[0], at), merged);
        if (at.column == 0)
            global_store(a.lse[2] + index, from + log2_fast(sum) * LN_2);
    }
};

/* Adds a part to a slab; what comes of it stays there, or is rounded and leaves it. Blocks (.., 0, ..) take the tensors
 * of k, blocks (.., 1, ..) those of v. */
template <typename T, bool IS_LAST> struct parts_sum {
    using arguments = s1f_attention_parts;
    static constexpr int THREADS = 256, BLOCKS_PER_SM = 4, WIDTH = 4;

    static S1F_DEVICE void run(const arguments &a)
    {
        const int i = block_index().y;
        parts_place at;
        if (!find_place<THREADS, WIDTH>(a, a.head_dim[i], at))
            return;
        float_quad *slab = (float_quad *)element_of<float>(a.slabs[i], at);
        const word_pair part = global_load((const word_pair *)element_of<uint16_t>(a.parts[i], at));
        float_quad sum = {};
        if (!a.store)
            sum = global_load(slab);
        const float_quad added = unpack_quad<T>(part);
        S1F_UNROLL
        for (int j = 0; j < 4; j++)
            sum.element[j] += added.element[j];
        if (IS_LAST)
            global_store((word_pair *)element_of<uint16_t>(a.outs[i], at),
                         {{pack<T>(sum.element[0], sum.element[1]), pack<T>(sum.element[2], sum.element[3])}});
        else
            global_store(slab, sum);
    }
};

template <typename T> using parts_add = parts_sum<T, false>;
template <typename T> using parts_finish = parts_sum<T, true>;

template <typename T> struct parts_total {
    using arguments = s1f_attention_parts;
    static constexpr int THREADS = 256, BLOCKS_PER_SM = 4, WIDTH = 8;

    static S1F_DEVICE void run(const arguments &a)
    {
        parts_place at;
        if (!find_place<THREADS, WIDTH>(a, a.head_dim[0], at))
            return;
        chunk parts[S1F_MOST_PARTS];
        S1F_UNROLL
        for (int i = 0; i < S1F_MOST_PARTS; i++)
            if (i < a.num_parts)
                parts[i] = global_load((const chunk *)element_of<uint16_t>(a.parts[i], at));
        float sums[WIDTH] = {};
        S1F_UNROLL
        for (int i = 0; i < S1F_MOST_PARTS; i++)
            if (i < a.num_parts) {
                S1F_UNROLL
                for (int j = 0; j < 4; j++) {
                    float x, y;
                    unpack<T>(parts[i].word[j], x, y);
                    sums[2 * j] += x;
                    sums[2 * j + 1] += y;
                }
            }
        chunk rounded;
        S1F_UNROLL
        for (int j = 0; j < 4; j++)
            rounded.word[j] = pack<T>(sums[2 * j], sums[2 * j + 1]);
        global_store((chunk *)element_of<uint16_t>(a.outs[0], at), rounded);
    }
};

} // namespace s1f

#endif
