/* sm80_attention_backward.cuh - gradients of causal attention of one segment over the KV cache.
 *
 *   P = 2^(x - lse2)    dP = dO V^T    dS = P (dP - delta) cap'    delta = rowsum(dO out)    x: attention_options.cuh
 *   dV += P^T dO        dK += scale dS^T Q                         dQ = scale dS K
 *
 * Kernels   prepare_rows      delta and lse2 = lse log2 e, of rows padded to whole tiles; zeroes the sums of dQ
 *           key_gradients     dK and dV: a block owns a tile of keys of a kv head and goes over the tiles of queries of
 *                             all heads that read it, so each sum has one owner and one order. dQ: sums in memory to
 *                             which blocks add in any order
 *           round_queries     dQ of its sums
 * Numerics  bf16 or fp16 in and out, P and dS rounded to that; fp32 sums
 * Bits      dK and dV of equal inputs are equal, dQ is not
 * Truth     s1f_attention_ref_backward() of ../attention_ref.c */
#ifndef S1F_CUDA_SM80_ATTENTION_BACKWARD_CUH
#define S1F_CUDA_SM80_ATTENTION_BACKWARD_CUH

#include "attention_options.cuh"
#include "sm80_products.cuh"

namespace s1f
{

/* lse2, delta and the sums of dQ have a multiple of so many rows per head: whole tiles of queries. */
constexpr int ROW_PADDING = 128;
/* Tokens of a block whose lowest and highest document id are known. */
constexpr int RANGE_TOKENS = 64;

struct attention_backward_arguments {
    const void *q, *k, *v, *out, *dout;
    s1f_strides q_strides, kv_strides, out_strides, dout_strides;
    const float *lse; /* (B, Hq, S) */
    void *dq;
    s1f_strides dq_strides;
    float *dk, *dv; /* of the slab */
    s1f_strides dkv_strides;
    int32_t store_kv_grads;
    void *own_dk, *own_dv; /* or NULL */
    s1f_strides own_dkv_strides;
    int32_t batch, heads, kv_heads, group; /* group: query heads per kv head */
    int32_t segment_len, q_start;
    float scale;
    attention_options options;

    /* scratch */
    int32_t padded_len;
    float *lse2, *delta; /* (B, Hq, padded_len); behind the segment infinity, which makes P 0, and 0 */
    float *dq_sums;      /* (B, Hq, padded_len, D), in tiles as global_add_4 lays them out */
    int32_t first_key;   /* of the first block of key_gradients: no query sees those before, or it is 0 */
};

/* First row of a head in lse2, delta and the sums of dQ. */
S1F_DEVICE int64_t padded_row(const attention_backward_arguments &a, int batch, int head)
{
    return (batch * (int64_t)a.heads + head) * a.padded_len;
}

template <typename Element>
S1F_DEVICE Element *row_of(Element *tensor, const s1f_strides &strides, int batch, int head, int row)
{
    return tensor + batch * strides.batch + head * strides.head + row * strides.row;
}

/* Document ids of tokens [first, last], and of those beside them in their blocks of RANGE_TOKENS. */
S1F_DEVICE id_range ids_between(const visibility &rule, int first, int last)
{
    id_range ids = {INT32_MAX, INT32_MIN};
    for (int block = first / RANGE_TOKENS; rule.docs != nullptr && block <= last / RANGE_TOKENS; block++) {
        const id_range of_block = global_load(rule.ranges + block);
        ids.low = of_block.low < ids.low ? of_block.low : ids.low;
        ids.high = of_block.high > ids.high ? of_block.high : ids.high;
    }
    return ids;
}

/* -- corners of P and dS: element r of lane's in the 16 x 8 corner (i, j), as matrix_multiply_add leaves it -------- */

template <int ROWS, int COLUMNS, typename Body> S1F_DEVICE void for_each(float (&s)[ROWS][COLUMNS][4], Body body)
{
    S1F_UNROLL
    for (int i = 0; i < ROWS; i++) {
        S1F_UNROLL
        for (int j = 0; j < COLUMNS; j++) {
            S1F_UNROLL
            for (int r = 0; r < 4; r++)
                body(s[i][j][r], i, j, r);
        }
    }
}

/* A hidden product, or its tanh, becomes this: its P is 0 by any factor above 2^-50, its square finite. */
constexpr float HIDDEN = -0x1p60f;

/* From products, or the tanh of what is capped: p becomes P, rounded, and s becomes P cap', so that dS = s (dP -
 * delta). */
template <typename Element, int ROWS, int COLUMNS, typename Statistic>
S1F_DEVICE void probabilities(float (&s)[ROWS][COLUMNS][4], uint32_t (&p)[COLUMNS / 2][ROWS][4],
                              const attention_options &options, Statistic lse2)
{
    if (options.cap == 0) {
        for_each(s, [&](float &x, int i, int j, int r) { x = exp2_fast(options.factor * x - lse2(i, j, r)); });
        round_to_factors<Element>(p, s);
        return;
    }
    S1F_UNROLL
    for (int j = 0; j < COLUMNS; j += 2) { /* few at a time: registers are short */
        S1F_UNROLL
        for (int i = 0; i < ROWS; i++) {
            float slope[1][2][4], corner[1][2][4]; /* slope: cap' */
            for_each(corner, [&](float &x, int, int side, int r) {
                const float t = s[i][j + side][r];
                slope[0][side][r] = 1 - t * t;
                x = exp2_fast(options.cap * t - lse2(i, j + side, r));
            });
            uint32_t rounded[1][1][4];
            round_to_factors<Element>(rounded, corner);
            S1F_UNROLL
            for (int word = 0; word < 4; word++)
                p[j / 2][i][word] = rounded[0][0][word];
            for_each(corner, [&](float &x, int, int side, int r) { s[i][j + side][r] = x * slope[0][side][r]; });
        }
    }
}

template <int ROWS, int COLUMNS>
S1F_DEVICE void cap_products(float (&s)[ROWS][COLUMNS][4], const attention_options &options)
{
    if (options.cap != 0)
        for_each(s, [&](float &x, int, int, int) { x = tanh_fast(options.inner * x); });
}

/* -- delta and lse2; grid: padded_len / ROW_PADDING, query heads, batch -------------------------------------------- */

template <typename Element, int HEAD_DIM> struct prepare_rows {
    using arguments = attention_backward_arguments;
    static constexpr int THREADS = 256, BLOCKS_PER_SM = 4, SHARED_BYTES = 0;
    static constexpr int LANES = HEAD_DIM / CHUNK_ELEMENTS; /* of a row, 16 bytes each */
    static constexpr int ROWS_AT_ONCE = THREADS / LANES;

    static S1F_DEVICE void run(const arguments &a)
    {
        const int thread = thread_index(), head = block_index().y, batch = block_index().z;
        const int column = thread % LANES * CHUNK_ELEMENTS, first_row = block_index().x * ROW_PADDING;
        const int64_t first = padded_row(a, batch, head);

        S1F_UNROLL
        for (int i = 0; i < ROW_PADDING; i += ROWS_AT_ONCE) {
            const int row = first_row + i + thread / LANES;
            float delta = 0, lse2 = S1F_INFINITY;
            if (row < a.segment_len) {
                const Element *out = row_of((const Element *)a.out, a.out_strides, batch, head, row) + column;
                const Element *dout = row_of((const Element *)a.dout, a.dout_strides, batch, head, row) + column;
                const chunk x = global_load((const chunk *)out), y = global_load((const chunk *)dout);
                S1F_UNROLL
                for (int word = 0; word < 4; word++) {
                    float x0, x1, y0, y1;
                    unpack<Element>(x.word[word], x0, x1);
                    unpack<Element>(y.word[word], y0, y1);
                    delta += x0 * y0;
                    delta += x1 * y1;
                }
                lse2 = LOG2_E * global_load(a.lse + (batch * (int64_t)a.heads + head) * a.segment_len + row);
            }
            S1F_UNROLL
            for (int mask = LANES / 2; mask > 0; mask /= 2)
                delta += shuffle_xor(delta, mask);
            if (column == 0) {
                global_store(a.delta + first + row, delta);
                global_store(a.lse2 + first + row, lse2);
            }
        }
        float_quad *sums = (float_quad *)(a.dq_sums + (first + first_row) * HEAD_DIM);
        S1F_UNROLL
        for (int i = 0; i < ROW_PADDING * HEAD_DIM / 4; i += THREADS)
            global_store(sums + i + thread, float_quad{});
    }
};

/* -- dQ of its sums, as key_gradients `Gradients` laid them out; grid: tiles of queries, query heads, batch -------- */

template <typename Element, int HEAD_DIM, typename Gradients> struct round_queries {
    using arguments = attention_backward_arguments;
    static constexpr int THREADS = Gradients::THREADS, BLOCKS_PER_SM = 2, SHARED_BYTES = 0;

    static S1F_DEVICE void run(const arguments &a)
    {
        constexpr int ROWS = Gradients::DQ_ROWS, COLUMNS = Gradients::DQ_COLUMNS;
        const int tile_row = block_index().x * Gradients::TILE_ROWS, head = block_index().y, batch = block_index().z;
        const int warp = warp_index(), lane = lane_index();
        const int first_row = tile_row + warp % Gradients::DQ_ROW_WARPS * ROWS + lane / 4;
        const int first_column = warp / Gradients::DQ_ROW_WARPS * COLUMNS + lane % 4 * 2;
        const float *tile = a.dq_sums + (padded_row(a, batch, head) + tile_row) * HEAD_DIM;
        S1F_UNROLL
        for (int i = 0; i < ROWS / 16; i++) {
            S1F_UNROLL
            for (int j = 0; j < COLUMNS / 8; j++) {
                float sum[4];
                global_load_4<THREADS>(sum, tile + (i * (COLUMNS / 8) + j) * 4 * THREADS);
                S1F_UNROLL
                for (int half = 0; half < 2; half++) {
                    const int row = first_row + i * 16 + half * 8;
                    if (row < a.segment_len)
                        global_store((uint32_t *)(row_of((Element *)a.dq, a.dq_strides, batch, head, row) +
                                                  first_column + j * 8),
                                     pack<Element>(sum[half * 2] * a.scale, sum[half * 2 + 1] * a.scale));
                }
            }
        }
    }
};

} // namespace s1f

#endif
