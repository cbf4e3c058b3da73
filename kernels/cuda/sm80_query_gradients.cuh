/* sm80_query_gradients.cuh - dQ of a tile of queries with one order of its sums: equal inputs give equal bits. */
#ifndef S1F_CUDA_SM80_QUERY_GRADIENTS_CUH
#define S1F_CUDA_SM80_QUERY_GRADIENTS_CUH

#include "sm80_attention_backward.cuh"

namespace s1f
{

/* Grid: tiles of queries, query heads, batch. */
template <typename Element, int HEAD_DIM, int QUERY_ROWS> struct query_gradients {
    using arguments = attention_backward_arguments;
    static constexpr int KEYS = RANGE_TOKENS; /* at a time: blocks of keys of which documents are known */
    static constexpr int WARPS = QUERY_ROWS / 16, THREADS = WARPS * WARP_SIZE;
    static constexpr int BLOCKS_PER_SM = WARPS > 4 ? 1 : 2; /* 255 registers per thread either way */
    static_assert(ROW_PADDING % QUERY_ROWS == 0, "lse2 and delta have whole tiles");

    /* Shared memory, bytes: Q, dO; two stages of K and V. */
    static constexpr int QUERY_TILE = QUERY_ROWS * HEAD_DIM * 2, KEY_TILE = KEYS * HEAD_DIM * 2;
    static constexpr int Q = 0, DOUT = Q + QUERY_TILE, KV = DOUT + QUERY_TILE;
    static constexpr int SHARED_BYTES = KV + 4 * KEY_TILE;

    using corner = float[1][KEYS / 8][4];

    static S1F_DEVICE void run(const arguments &a)
    {
        const int num_tiles = (a.segment_len + QUERY_ROWS - 1) / QUERY_ROWS;
        const int tile_row = (num_tiles - 1 - block_index().x) * QUERY_ROWS; /* those that see most keys first */
        const int head = block_index().y, batch = block_index().z, kv_head = head / a.group;
        const int warp_row = warp_index() * 16, lane = lane_index();
        const int first_row = tile_row + warp_row + lane / 4;
        const int last_row = (tile_row + QUERY_ROWS < a.segment_len ? tile_row + QUERY_ROWS : a.segment_len) - 1;
        const seen_blocks<KEYS> keys(visibility_of(a.options, batch, KEYS), a.q_start + tile_row, a.q_start + last_row);
        const uint32_t shared = shared_base();

        float lse2[2], delta[2]; /* of the lane's rows */
        S1F_UNROLL
        for (int half = 0; half < 2; half++) {
            const int64_t row = padded_row(a, batch, head) + first_row + half * 8;
            lse2[half] = global_load(a.lse2 + row);
            delta[half] = global_load(a.delta + row);
        }

        copy_tile<QUERY_ROWS, HEAD_DIM, THREADS>(shared + Q,
                                                 row_of((const Element *)a.q, a.q_strides, batch, head, tile_row),
                                                 a.q_strides.row, a.segment_len - tile_row);
        copy_tile<QUERY_ROWS, HEAD_DIM, THREADS>(shared + DOUT,
                                                 row_of((const Element *)a.dout, a.dout_strides, batch, head, tile_row),
                                                 a.dout_strides.row, a.segment_len - tile_row);
        int block = keys.next(keys.begin), stage = 0;
        copy_keys(a, block, batch, kv_head, shared + KV); /* a query sees itself, so there is one */
        copy_async_commit();

        float dq[1][HEAD_DIM / 8][4] = {};
        S1F_KEEP_LOOP
        while (block < keys.end) {
            const int next = keys.next(block + 1);
            const uint32_t k_tile = shared + KV + stage * 2 * KEY_TILE, v_tile = k_tile + KEY_TILE;
            copy_async_wait<0>();
            block_barrier(); /* the tiles are there; all have left those before */
            if (next < keys.end)
                copy_keys(a, next, batch, kv_head, shared + KV + (stage ^ 1) * 2 * KEY_TILE);
            copy_async_commit();

            corner s = {}, dp = {};
            uint32_t x[KEYS / 16][1][4];
            multiply_rows<Element, HEAD_DIM>(s, shared + Q, warp_row, k_tile, 0);
            cap_products(s, a.options);
            if (keys.hides_some(block))
                hide(s, keys.rule, a.q_start + first_row, block * KEYS + lane % 4 * 2);
            probabilities<Element>(s, x, a.options, [&](int, int, int r) { return lse2[r / 2]; });
            multiply_rows<Element, HEAD_DIM>(dp, shared + DOUT, warp_row, v_tile, 0);
            for_each(s, [&](float &ds, int i, int j, int r) { ds *= dp[i][j][r] - delta[r / 2]; });
            round_to_factors<Element>(x, s);
            multiply_columns<Element, HEAD_DIM>(dq, x, k_tile, 0, 0);
            block = next;
            stage ^= 1;
        }
        copy_async_wait<0>();

        S1F_UNROLL
        for (int half = 0; half < 2; half++) {
            const int row = first_row + half * 8;
            if (row >= a.segment_len)
                continue;
            Element *to = row_of((Element *)a.dq, a.dq_strides, batch, head, row) + lane % 4 * 2;
            S1F_UNROLL
            for (int j = 0; j < HEAD_DIM / 8; j++)
                global_store((uint32_t *)(to + j * 8),
                             pack<Element>(dq[0][j][half * 2] * a.scale, dq[0][j][half * 2 + 1] * a.scale));
        }
    }

    static S1F_DEVICE void copy_keys(const arguments &a, int block, int batch, int kv_head, uint32_t tiles)
    {
        const int first_key = block * KEYS, num_rows = a.options.num_tokens - first_key;
        copy_tile<KEYS, HEAD_DIM, THREADS>(tiles, row_of((const Element *)a.k, a.kv_strides, batch, kv_head, first_key),
                                           a.kv_strides.row, num_rows);
        copy_tile<KEYS, HEAD_DIM, THREADS>(tiles + KEY_TILE,
                                           row_of((const Element *)a.v, a.kv_strides, batch, kv_head, first_key),
                                           a.kv_strides.row, num_rows);
    }

    /* Hides what the lane's queries, `token` and `token` + 8, do not see of keys from `key` on. */
    static S1F_DEVICE void hide(corner &s, const visibility &rule, int token, int key)
    {
        for_each(s, [&](float &x, int, int j, int r) {
            x = sees(rule, token + r / 2 * 8, key + j * 8 + r % 2) ? x : HIDDEN;
        });
        if (rule.docs == nullptr)
            return;
        const int32_t id[2] = {document_of(rule, token), document_of(rule, token + 8)};
        S1F_UNROLL
        for (int j = 0; j < KEYS / 8; j++) {
            const int32_t key_id[2] = {document_of(rule, key + j * 8), document_of(rule, key + j * 8 + 1)};
            S1F_UNROLL
            for (int r = 0; r < 4; r++)
                s[0][j][r] = key_id[r % 2] == id[r / 2] ? s[0][j][r] : HIDDEN;
        }
    }
};

} // namespace s1f

#endif
