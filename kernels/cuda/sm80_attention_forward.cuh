/* sm80_attention_forward.cuh - out and lse of one segment over its prefix; attention.h says what they are.
 *
 * A block takes ROWS rows of queries that share a kv head and goes over the keys they see, KEYS at a time, with a
 * running maximum and sum per row (online softmax). Queries of a group are packed: row r is token r / group, head r %
 * group of it, so that K and V are read once for the group, and short segments fill a tile.
 *
 *   S = Q K^T        ldmatrix of Q (kept in registers where they suffice) and K; sums in registers
 *   P = 2^(S - max)  in registers
 *   O = O 2^(max' - max) + P V
 *
 * Copies   K and V tiles take turns in a ring of SLOTS slots of shared memory: K0 V0 K1 V1 ... While one is used, the
 *          next SLOTS - 1 are on their way. One barrier per tile: behind it the tile is there for all threads, and all
 *          have left the one before, whose slot takes the next copy.
 * Mask     only where a block of keys has one that some row does not see
 * Bits     equal inputs give equal bits: no atomics, and all orders follow from the shape */
#ifndef S1F_CUDA_SM80_ATTENTION_FORWARD_CUH
#define S1F_CUDA_SM80_ATTENTION_FORWARD_CUH

#include "attention_options.cuh"
#include "sm80_products.cuh"

namespace s1f
{

struct attention_forward_arguments {
    const void *q, *k, *v;
    void *out;
    float *lse;
    s1f_strides q_strides, kv_strides, out_strides;
    int32_t heads, group; /* group: query heads per kv head */
    int32_t segment_len, q_start;
    int32_t num_tiles;
    attention_options options;
};

struct packed_row {
    int token, head; /* of the segment, of the group */

    S1F_DEVICE packed_row(int row, int group) : token(row / group), head(row - token * group)
    {
    }

    S1F_DEVICE void move_on(const packed_row &by, int group) /* without a division */
    {
        token += by.token;
        head += by.head;
        if (head >= group) {
            head -= group;
            token++;
        }
    }
};

/* Grid: tiles, kv heads, batch. */
template <typename Element, int HEAD_DIM, int ROWS, int KEYS, int WARPS, int SLOTS> struct attention_forward {
    using arguments = attention_forward_arguments;
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int BLOCKS_PER_SM = WARPS > 4 ? 1 : 2; /* 255 registers per thread either way */

    static constexpr int WARP_ROWS = ROWS / WARPS;
    static constexpr int BANDS = WARP_ROWS / 16; /* of 16 rows: with two, each fragment of K and V serves twice */
    static constexpr int LINES = WARP_ROWS / 8;  /* rows that a lane has elements of: row_of(0 .. LINES - 1) */
    static constexpr int HEAD_STEPS = HEAD_DIM / 16, KEY_STEPS = KEYS / 16; /* 16 terms of a sum each */
    static constexpr int Q_BYTES = ROWS * HEAD_DIM * 2, TILE_BYTES = KEYS * HEAD_DIM * 2;
    static constexpr int SHARED_BYTES = Q_BYTES + SLOTS * TILE_BYTES;
    static constexpr int AHEAD = SLOTS - 1;
    /* Q stays in registers where they suffice, of 255, beside the sums. */
    static constexpr bool KEEP_Q = BANDS * (KEYS / 2 + HEAD_DIM / 2 + HEAD_STEPS * 4) <= 200;
    static_assert(ROWS % (16 * WARPS) == 0 && KEYS % 16 == 0 && HEAD_DIM % 64 == 0 && SLOTS >= 2, "whole fragments");

    using scores = float[BANDS][KEYS / 8][4]; /* the elements of line l of a band: [l / 2][column][l % 2 * 2 + 0, 1] */
    using outputs = float[BANDS][HEAD_DIM / 8][4];

    struct place { /* of a block's work, and of a warp's and a lane's in it */
        int warp, lane, kv_head, batch;
        int first_row, num_rows; /* packed */

        S1F_DEVICE int row_of(int line) const /* of the tile */
        {
            return warp * WARP_ROWS + line * 8 + lane / 4;
        }
    };

    struct ring_cursor { /* which tile is copied next, and to where */
        int block, slot;
        bool values;
    };

    static S1F_DEVICE void run(const arguments &a)
    {
        place at;
        at.warp = thread_index() / WARP_SIZE;
        at.lane = thread_index() % WARP_SIZE;
        at.kv_head = block_index().y;
        at.batch = block_index().z;
        at.first_row = (a.num_tiles - 1 - block_index().x) * ROWS; /* those that see most keys first */
        at.num_rows = a.segment_len * a.group;

        const visibility rule = visibility_of(a.options, at.batch, KEYS);
        const int behind = at.first_row + ROWS, last_row = (behind < at.num_rows ? behind : at.num_rows) - 1;
        seen_blocks<KEYS> keys(rule, a.q_start + at.first_row / a.group, a.q_start + last_row / a.group);

        const uint32_t q_tile = shared_base(), ring = q_tile + Q_BYTES;
        int block = keys.next(keys.begin), slot = 0;
        ring_cursor coming = {block, 0, false};
        copy_queries(a, at, q_tile);
        S1F_UNROLL
        for (int i = 0; i < AHEAD; i++)
            copy_next(coming, a, at, keys, ring);

        uint32_t q[HEAD_STEPS][BANDS][4];
        if (KEEP_Q) {
            copy_async_wait<AHEAD>();
            block_barrier();
            load_factors<HEAD_DIM>(q, q_tile, at.warp * WARP_ROWS);
        }
        outputs out = {};
        float highest[LINES], sum[LINES];
        S1F_UNROLL
        for (int line = 0; line < LINES; line++) {
            highest[line] = -S1F_INFINITY;
            sum[line] = 0;
        }

        S1F_KEEP_LOOP
        while (block < keys.end) {
            wait_for_tile(coming, a, at, keys, ring);
            scores score = {};
            if (KEEP_Q)
                multiply_rows<Element>(score, q, ring + slot * TILE_BYTES, 0);
            else
                multiply_rows<Element, HEAD_DIM>(score, q_tile, at.warp * WARP_ROWS, ring + slot * TILE_BYTES, 0);
            slot = after(slot);

            if (a.options.cap != 0)
                cap_scores(score, a.options);
            if (keys.hides_some(block))
                hide_scores(score, rule, a, at, block * KEYS);
            update_rows(score, out, highest, sum, a.options.factor);
            uint32_t p[KEY_STEPS][BANDS][4];
            round_to_factors<Element>(p, score);

            wait_for_tile(coming, a, at, keys, ring);
            multiply_columns<Element, HEAD_DIM>(out, p, ring + slot * TILE_BYTES, 0, 0);
            slot = after(slot);
            block = keys.next(block + 1);
        }
        finish_rows(a, at, out, highest, sum);
        store_out(a, at, out, q_tile);
    }

    /* -- copies ------------------------------------------------------------------------------------------------- */

    static S1F_DEVICE int after(int slot)
    {
        return slot + 1 == SLOTS ? 0 : slot + 1;
    }

    /* A group of copies of its own. */
    static S1F_DEVICE void copy_queries(const arguments &a, const place &at, uint32_t q_tile)
    {
        constexpr int CHUNKS = HEAD_DIM / CHUNK_ELEMENTS;
        const Element *q =
            (const Element *)a.q + at.batch * a.q_strides.batch + at.kv_head * a.group * a.q_strides.head;
        const int column_chunk = thread_index() % CHUNKS, first_row = thread_index() / CHUNKS;
        packed_row from(at.first_row + first_row, a.group);
        const packed_row step(THREADS / CHUNKS, a.group);
        S1F_KEEP_LOOP
        for (int row = first_row; row < ROWS; row += THREADS / CHUNKS) {
            copy_async_16(q_tile + tile_offset<HEAD_DIM>(row, column_chunk),
                          q + from.token * a.q_strides.row + from.head * a.q_strides.head +
                              column_chunk * CHUNK_ELEMENTS,
                          at.first_row + row < at.num_rows);
            from.move_on(step, a.group);
        }
        copy_async_commit();
    }

    /* One group of copies, empty behind the last tile, so that groups count tiles. */
    static S1F_DEVICE void copy_next(ring_cursor &coming, const arguments &a, const place &at,
                                     const seen_blocks<KEYS> &keys, uint32_t ring)
    {
        if (coming.block < keys.end) {
            const int first_key = coming.block * KEYS;
            const Element *source = (const Element *)(coming.values ? a.v : a.k) + at.batch * a.kv_strides.batch +
                                    at.kv_head * a.kv_strides.head + first_key * a.kv_strides.row;
            copy_tile<KEYS, HEAD_DIM, THREADS>(ring + coming.slot * TILE_BYTES, source, a.kv_strides.row,
                                               a.options.num_tokens - first_key);
            coming.slot = after(coming.slot);
            if (coming.values)
                coming.block = keys.next(coming.block + 1);
            coming.values = !coming.values;
        }
        copy_async_commit();
    }

    static S1F_DEVICE void wait_for_tile(ring_cursor &coming, const arguments &a, const place &at,
                                         const seen_blocks<KEYS> &keys, uint32_t ring)
    {
        copy_async_wait<AHEAD - 1>();
        block_barrier();
        copy_next(coming, a, at, keys, ring);
    }

    /* -- rows of scores ----------------------------------------------------------------------------------------- */

    static S1F_DEVICE void cap_scores(scores &score, const attention_options &options)
    {
        S1F_UNROLL
        for (int band = 0; band < BANDS; band++) {
            S1F_UNROLL
            for (int i = 0; i < KEYS / 2; i++) {
                float &s = score[band][i / 4][i % 4];
                s = options.cap * tanh_fast(options.inner * s);
            }
        }
    }

    static S1F_DEVICE void hide_scores(scores &score, const visibility &rule, const arguments &a, const place &at,
                                       int first_key)
    {
        int32_t token[LINES], docs[LINES]; /* token: its position */
        packed_row row(at.first_row + at.row_of(0), a.group);
        const packed_row line_step(8, a.group);
        S1F_UNROLL
        for (int line = 0; line < LINES; line++) {
            token[line] = a.q_start + row.token;
            docs[line] = document_of(rule, token[line]);
            row.move_on(line_step, a.group);
        }
        S1F_UNROLL
        for (int column = 0; column < KEYS / 4; column++) {
            const int key = first_key + column / 2 * 8 + at.lane % 4 * 2 + column % 2;
            const int32_t doc = document_of(rule, key);
            S1F_UNROLL
            for (int line = 0; line < LINES; line++)
                if (!sees(rule, token[line], key) || docs[line] != doc)
                    score[line / 2][column / 2][line % 2 * 2 + column % 2] = -S1F_INFINITY;
        }
    }

    /* Scores become P; `out` and `sum` what they are beside the new maximum. A row that has seen no key yet has a
     * maximum of -infinity, and sums of 0. */
    static S1F_DEVICE void update_rows(scores &score, outputs &out, float (&highest)[LINES], float (&sum)[LINES],
                                       float factor)
    {
        float shrink[LINES];
        bool changed = false;
        S1F_UNROLL
        for (int line = 0; line < LINES; line++) {
            float high = highest[line];
            S1F_UNROLL
            for (int column = 0; column < KEYS / 4; column++)
                high = maximum(high, score[line / 2][column / 2][line % 2 * 2 + column % 2]);
            high = maximum(high, shuffle_xor(high, 1)); /* the four lanes that share a row */
            high = maximum(high, shuffle_xor(high, 2));
            const float top = high > -S1F_INFINITY ? high : 0, level = top * factor;
            /* Exactly 1 where the maximum stays. Products subtracted would not be 0 where one becomes an FMA. */
            shrink[line] = exp2_fast((highest[line] - top) * factor);
            changed = changed || high != highest[line];
            highest[line] = high;

            float total = 0;
            S1F_UNROLL
            for (int column = 0; column < KEYS / 4; column++) {
                float &p = score[line / 2][column / 2][line % 2 * 2 + column % 2];
                p = exp2_fast(p * factor - level);
                total += p;
            }
            sum[line] = sum[line] * shrink[line] + total;
        }
        if (warp_ballot(changed) != 0) /* seldom, behind the first blocks */
            scale_rows(out, shrink);
    }

    static S1F_DEVICE void scale_rows(outputs &out, const float (&scale)[LINES])
    {
        S1F_UNROLL
        for (int band = 0; band < BANDS; band++) {
            S1F_UNROLL
            for (int i = 0; i < HEAD_DIM / 2; i++)
                out[band][i / 4][i % 4] *= scale[band * 2 + i % 4 / 2];
        }
    }

    /* -- results ------------------------------------------------------------------------------------------------ */

    /* Divides by the sums and stores lse: -infinity, and out stays 0, for a row that saw no key. */
    static S1F_DEVICE void finish_rows(const arguments &a, const place &at, outputs &out, const float (&highest)[LINES],
                                       const float (&sum)[LINES])
    {
        float inverse[LINES];
        S1F_UNROLL
        for (int line = 0; line < LINES; line++) {
            float total = sum[line];
            total += shuffle_xor(total, 1);
            total += shuffle_xor(total, 2);
            inverse[line] = total > 0 ? reciprocal_fast(total) : 0;
            const float lse = total > 0 ? highest[line] * a.options.factor + log2_fast(total) : -S1F_INFINITY;
            const int row = at.first_row + at.row_of(line);
            if (row < at.num_rows && at.lane % 4 == 0)
                global_store(a.lse + result_row(a, at, row), lse * LN_2);
        }
        scale_rows(out, inverse);
    }

    static S1F_DEVICE int64_t result_row(const arguments &a, const place &at, int row) /* of (B, Hq, S) */
    {
        const int64_t head = at.batch * (int64_t)a.heads + at.kv_head * a.group + row % a.group;
        return head * a.segment_len + row / a.group;
    }

    /* Through the warp's rows of the Q tile, so that 16 bytes go out at once. Only this warp read them, and it has met
     * a barrier since. */
    static S1F_DEVICE void store_out(const arguments &a, const place &at, const outputs &out, uint32_t q_tile)
    {
        S1F_UNROLL
        for (int line = 0; line < LINES; line++) {
            S1F_UNROLL
            for (int column = 0; column < HEAD_DIM / 8; column++) {
                const float(&o)[4] = out[line / 2][column];
                shared_store_4(q_tile + tile_offset<HEAD_DIM>(at.row_of(line), column) + at.lane % 4 * 4,
                               pack<Element>(o[line % 2 * 2], o[line % 2 * 2 + 1]));
            }
        }
        warp_barrier();
        constexpr int CHUNKS = HEAD_DIM / CHUNK_ELEMENTS, ROWS_AT_ONCE = WARP_SIZE / CHUNKS;
        Element *target = (Element *)a.out + at.batch * a.out_strides.batch + at.kv_head * a.group * a.out_strides.head;
        const int column_chunk = at.lane % CHUNKS, first_row = at.warp * WARP_ROWS + at.lane / CHUNKS;
        packed_row to(at.first_row + first_row, a.group);
        const packed_row step(ROWS_AT_ONCE, a.group);
        S1F_KEEP_LOOP
        for (int row = first_row; row < (at.warp + 1) * WARP_ROWS; row += ROWS_AT_ONCE) {
            const chunk words = shared_load_16(q_tile + tile_offset<HEAD_DIM>(row, column_chunk));
            if (to.token < a.segment_len)
                global_store((chunk *)(target + to.token * a.out_strides.row + to.head * a.out_strides.head +
                                       column_chunk * CHUNK_ELEMENTS),
                             words);
            to.move_on(step, a.group);
        }
    }
};

} // namespace s1f

#endif
