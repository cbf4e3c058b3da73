/* sm80_key_gradients.cuh - dK and dV of a tile of keys, and what these keys add to dQ.
 *
 * P and dS are made transposed, a key per row: what a warp made of them is then, in its registers, the first factor of
 * P^T dO and dS^T Q. What other warps made comes through shared memory, as does dS for dQ. With KEY_WARPS x QUERY_WARPS
 * warps, warp (i, j) makes keys i, queries j of P and dS, and keys i, columns j of dK and dV. There are two barriers
 * per pair of tiles, three with one stage of dO; products of a warp's own P and dS run between them, so that warps
 * seldom wait for each other. */
#ifndef S1F_CUDA_SM80_KEY_GRADIENTS_CUH
#define S1F_CUDA_SM80_KEY_GRADIENTS_CUH

#include "sm80_attention_backward.cuh"

namespace s1f
{

/* Grid: tiles of keys from first_key on, kv heads, batch. */
template <typename Element, int HEAD_DIM, int QUERY_ROWS, int KEY_ROWS, int KEY_WARPS, int QUERY_WARPS, int DOUT_STAGES>
struct key_gradients {
    using arguments = attention_backward_arguments;
    static constexpr int WARPS = KEY_WARPS * QUERY_WARPS, THREADS = WARPS * WARP_SIZE;
    static constexpr int BLOCKS_PER_SM = WARPS > 4 ? 1 : 2; /* 255 registers per thread either way */
    static constexpr int TILE_ROWS = QUERY_ROWS;
    /* A warp's corners: KEYS x QUERIES of P and dS, KEYS x COLUMNS of dK and dV, DQ_ROWS x DQ_COLUMNS of dQ. */
    static constexpr int KEYS = KEY_ROWS / KEY_WARPS, QUERIES = QUERY_ROWS / QUERY_WARPS;
    static constexpr int COLUMNS = HEAD_DIM / QUERY_WARPS;
    static constexpr int DQ_ROWS = 32, DQ_ROW_WARPS = QUERY_ROWS / DQ_ROWS;
    static constexpr int DQ_COLUMNS = HEAD_DIM * DQ_ROW_WARPS / WARPS;
    static_assert(KEYS % 16 == 0 && QUERIES % 16 == 0 && COLUMNS % 16 == 0 && DQ_COLUMNS % 16 == 0, "whole fragments");
    static_assert(ROW_PADDING % QUERY_ROWS == 0, "lse2 and delta have whole tiles");

    /* Shared memory, bytes: K, V; two stages of Q, DOUT_STAGES of dO; P and dS, a key per row; lse2 and delta, two
     * stages of each. */
    static constexpr int KEY_TILE = KEY_ROWS * HEAD_DIM * 2, QUERY_TILE = QUERY_ROWS * HEAD_DIM * 2;
    static constexpr int PAIR_TILE = KEY_ROWS * QUERY_ROWS * 2, STATISTICS = QUERY_ROWS * 4;
    static constexpr int K = 0, V = K + KEY_TILE, Q = V + KEY_TILE, DOUT = Q + 2 * QUERY_TILE;
    static constexpr int P = DOUT + DOUT_STAGES * QUERY_TILE, DS = P + PAIR_TILE;
    static constexpr int LSE2 = DS + PAIR_TILE, DELTA = LSE2 + 2 * STATISTICS;
    static constexpr int SHARED_BYTES = DELTA + 2 * STATISTICS;

    using corner = float[KEYS / 16][QUERIES / 8][4];
    using factors = uint32_t[QUERIES / 16][KEYS / 16][4]; /* a corner, rounded */
    using key_sums = float[KEYS / 16][COLUMNS / 8][4];

    /* The place of a block, and its turns: pairs of a query head and a tile of queries, tiles fastest. Little is kept,
     * for registers are short; what few turns need is found again. */
    struct place {
        int first_key, first_tile, num_tiles; /* tiles of queries that see some of the keys, but for documents */
        int end;                              /* of the turns */

        S1F_DEVICE place(const arguments &a)
        {
            const int num_tokens = a.options.num_tokens, q_start = a.q_start;
            first_key = a.first_key + block_index().x * KEY_ROWS;
            const int last_key = (first_key + KEY_ROWS < num_tokens ? first_key + KEY_ROWS : num_tokens) - 1;
            const int first_row = first_key > q_start ? first_key - q_start : 0;
            const int seen_to = a.options.window < num_tokens - last_key ? last_key + a.options.window : num_tokens;
            first_tile = first_row / QUERY_ROWS;
            num_tiles = seen_to > q_start + first_row ? (seen_to - q_start - 1) / QUERY_ROWS - first_tile + 1 : 0;
            end = num_tiles * a.group;
        }

        S1F_DEVICE int head(const arguments &a, int turn) const
        {
            return kv_head() * a.group + turn / num_tiles;
        }

        S1F_DEVICE int row(int turn) const
        {
            return (first_tile + turn % num_tiles) * QUERY_ROWS;
        }
    };

    static S1F_DEVICE int batch()
    {
        return block_index().z;
    }

    static S1F_DEVICE int kv_head()
    {
        return block_index().y;
    }

    /* Documents of ROWS tokens, of the keys or of the queries of a turn. */
    template <int ROWS> static S1F_DEVICE id_range ids_of(const visibility &rule, int token)
    {
        return ids_between(rule, token, (token + ROWS < rule.num_tokens ? token + ROWS : rule.num_tokens) - 1);
    }

    /* The first turn from `turn` on of which documents do not hide all; end: none. All lanes of a warp ask alike. */
    static S1F_DEVICE int next_turn(const arguments &a, const place &here, int turn)
    {
        if (a.options.docs == nullptr)
            return turn;
        const visibility rule = visibility_of(a.options, batch(), RANGE_TOKENS);
        const id_range keys = ids_of<KEY_ROWS>(rule, here.first_key);
        const int lane = lane_index();
        for (; turn < here.end; turn += WARP_SIZE) {
            const bool is_seen =
                turn + lane < here.end && overlap(keys, ids_of<QUERY_ROWS>(rule, a.q_start + here.row(turn + lane)));
            const uint32_t lanes = warp_ballot(is_seen);
            if (lanes != 0)
                return turn + lowest_bit(lanes);
        }
        return here.end;
    }

    /* Whether one of the queries from `token` on may not see one of the keys. */
    static S1F_DEVICE bool hides_some(const arguments &a, const place &here, int token)
    {
        if (here.first_key + KEY_ROWS - 1 > token || token + QUERY_ROWS - 1 - here.first_key >= a.options.window)
            return true;
        if (a.options.docs == nullptr)
            return false;
        const visibility rule = visibility_of(a.options, batch(), RANGE_TOKENS);
        const id_range keys = ids_of<KEY_ROWS>(rule, here.first_key), queries = ids_of<QUERY_ROWS>(rule, token);
        return keys.low != keys.high || queries.low != queries.high;
    }

    static S1F_DEVICE void run(const arguments &a)
    {
        const place here(a);
        int turn = next_turn(a, here, 0);
        if (turn == here.end && !a.store_kv_grads)
            return; /* nothing to add; the segment's own keys see themselves */

        const uint32_t shared = shared_base();
        key_sums dk = {}, dv = {};

        if (turn < here.end) {
            copy_keys(a, here, shared);
            copy_queries(a, here, turn, shared, 0);
            copy_dout(a, here, turn, shared + DOUT);
        }
        copy_async_commit();
        int stage = 0;
        S1F_KEEP_LOOP
        while (turn < here.end) {
            const int next = next_turn(a, here, turn + 1);
            const int warp = warp_index(), own = warp % QUERY_WARPS;
            const int key = warp / QUERY_WARPS * KEYS, query = own * QUERIES, column = own * COLUMNS;
            const uint32_t q_tile = shared + Q + stage * QUERY_TILE;
            const uint32_t dout_tile = shared + DOUT + (DOUT_STAGES == 2 ? stage * QUERY_TILE : 0);
            copy_async_wait<0>();
            block_barrier(); /* the turn's tiles are there; all have left the turn before */
            if (next < here.end) {
                copy_queries(a, here, next, shared, stage ^ 1);
                if (DOUT_STAGES == 2)
                    copy_dout(a, here, next, shared + DOUT + (stage ^ 1) * QUERY_TILE);
            }
            copy_async_commit();

            factors x;
            float_pair statistic[QUERIES / 8] = {};
            const auto of_query = [&](int, int j, int r) { return statistic[j].element[r % 2]; };

            corner s = {};
            multiply_rows<Element, HEAD_DIM>(s, shared + K, key, q_tile, query);
            cap_products(s, a.options);
            const int token = a.q_start + here.row(turn);
            if (hides_some(a, here, token))
                hide(s, visibility_of(a.options, batch(), RANGE_TOKENS), token + query, here.first_key + key);
            load_statistics(statistic, shared + LSE2 + stage * STATISTICS, query);
            probabilities<Element>(s, x, a.options, of_query);
            store_factors<QUERY_ROWS>(shared + P, key, query, x);
            multiply_columns<Element, HEAD_DIM>(dv, x, dout_tile, query, column);

            corner dp = {};
            multiply_rows<Element, HEAD_DIM>(dp, shared + V, key, dout_tile, query);
            load_statistics(statistic, shared + DELTA + stage * STATISTICS, query);
            for_each(s, [&](float &ds, int i, int j, int r) { ds *= dp[i][j][r] - of_query(i, j, r); });
            round_to_factors<Element>(x, s);
            store_factors<QUERY_ROWS>(shared + DS, key, query, x);
            multiply_columns<Element, HEAD_DIM>(dk, x, q_tile, query, column);
            block_barrier(); /* P and dS are there */

            multiply_others(dv, shared + P, dout_tile);
            if (DOUT_STAGES == 1) {
                block_barrier(); /* all have left dO */
                if (next < here.end)
                    copy_dout(a, here, next, dout_tile);
                copy_async_commit();
            }
            multiply_others(dk, shared + DS, q_tile);
            add_queries(a, here, (int)opaque((uint32_t)turn), shared);
            turn = next;
            stage ^= 1;
        }
        copy_async_wait<0>();
        store(a, here, dk, a.scale, a.dk, a.own_dk);
        store(a, here, dv, 1, a.dv, a.own_dv);
    }

    /* -- copies ------------------------------------------------------------------------------------------------- */

    static S1F_DEVICE void copy_keys(const arguments &a, const place &here, uint32_t shared)
    {
        const int num_rows = a.options.num_tokens - here.first_key;
        copy_tile<KEY_ROWS, HEAD_DIM, THREADS>(
            shared + K, row_of((const Element *)a.k, a.kv_strides, batch(), kv_head(), here.first_key),
            a.kv_strides.row, num_rows);
        copy_tile<KEY_ROWS, HEAD_DIM, THREADS>(
            shared + V, row_of((const Element *)a.v, a.kv_strides, batch(), kv_head(), here.first_key),
            a.kv_strides.row, num_rows);
    }

    static S1F_DEVICE void copy_queries(const arguments &a, const place &here, int turn, uint32_t shared, int stage)
    {
        const int head = here.head(a, turn), row = here.row(turn);
        copy_tile<QUERY_ROWS, HEAD_DIM, THREADS>(shared + Q + stage * QUERY_TILE,
                                                 row_of((const Element *)a.q, a.q_strides, batch(), head, row),
                                                 a.q_strides.row, a.segment_len - row);
        constexpr int CHUNKS = STATISTICS / CHUNK_BYTES;
        const int index = thread_index() % CHUNKS, which = thread_index() / CHUNKS;
        const int64_t first = padded_row(a, batch(), head) + row + index * 4;
        if (which < 2)
            copy_async_16(shared + (which == 0 ? LSE2 : DELTA) + stage * STATISTICS + index * CHUNK_BYTES,
                          (which == 0 ? a.lse2 : a.delta) + first, true);
    }

    static S1F_DEVICE void copy_dout(const arguments &a, const place &here, int turn, uint32_t tile)
    {
        const int head = here.head(a, turn), row = here.row(turn);
        copy_tile<QUERY_ROWS, HEAD_DIM, THREADS>(tile,
                                                 row_of((const Element *)a.dout, a.dout_strides, batch(), head, row),
                                                 a.dout_strides.row, a.segment_len - row);
    }

    /* -- corners ------------------------------------------------------------------------------------------------ */

    /* lse2 or delta of the queries in whose columns this lane has elements. */
    static S1F_DEVICE void load_statistics(float_pair (&statistic)[QUERIES / 8], uint32_t shared, int query)
    {
        const int lane = lane_index();
        S1F_UNROLL
        for (int j = 0; j < QUERIES / 8; j++)
            statistic[j] = shared_load_pair(shared + (query + j * 8 + lane % 4 * 2) * 4);
    }

    /* Hides what the queries from `token` on do not see of the keys from `key` on. */
    static S1F_DEVICE void hide(corner &s, const visibility &rule, int token, int key)
    {
        const int lane = lane_index();
        token += lane % 4 * 2;
        key += lane / 4;
        for_each(s, [&](float &x, int i, int j, int r) {
            x = sees(rule, token + j * 8 + r % 2, key + i * 16 + r / 2 * 8) ? x : HIDDEN;
        });
        if (rule.docs == nullptr)
            return;
        int32_t key_id[KEYS / 8];
        S1F_UNROLL
        for (int i = 0; i < KEYS / 8; i++)
            key_id[i] = document_of(rule, key + i * 8);
        S1F_UNROLL
        for (int j = 0; j < QUERIES / 8; j++) {
            const int32_t id[2] = {document_of(rule, token + j * 8), document_of(rule, token + j * 8 + 1)};
            S1F_UNROLL
            for (int i = 0; i < KEYS / 16; i++) {
                S1F_UNROLL
                for (int r = 0; r < 4; r++)
                    s[i][j][r] = key_id[i * 2 + r / 2] == id[r % 2] ? s[i][j][r] : HIDDEN;
            }
        }
    }

    /* d += what the queries add of which other warps made P or dS (`corners`), by their rows of dO or Q. */
    static S1F_DEVICE void multiply_others(key_sums &d, uint32_t corners, uint32_t rows)
    {
        const int warp = warp_index(), own = warp % QUERY_WARPS;
        S1F_UNROLL
        for (int other = 1; other < QUERY_WARPS; other++) {
            const int query = (own + other) % QUERY_WARPS * QUERIES;
            const uint32_t at =
                opaque(corners + matrix_rows<QUERY_ROWS>(warp / QUERY_WARPS * KEYS, query / CHUNK_ELEMENTS));
            factors x;
            S1F_UNROLL
            for (int k = 0; k < QUERIES / 16; k++) {
                S1F_UNROLL
                for (int i = 0; i < KEYS / 16; i++)
                    load_matrices(x[k][i], corner_at<QUERY_ROWS>(at, i * 16, k * 16));
            }
            multiply_columns<Element, HEAD_DIM>(d, x, rows, query, own * COLUMNS);
        }
    }

    static S1F_DEVICE void add_queries(const arguments &a, const place &here, int turn, uint32_t shared)
    {
        const int warp = warp_index();
        float dq[DQ_ROWS / 16][DQ_COLUMNS / 8][4] = {};
        multiply_transposed<Element, KEY_ROWS, QUERY_ROWS, HEAD_DIM>(dq, shared + DS, warp % DQ_ROW_WARPS * DQ_ROWS,
                                                                     shared + K, warp / DQ_ROW_WARPS * DQ_COLUMNS);
        float *tile = a.dq_sums + (padded_row(a, batch(), here.head(a, turn)) + here.row(turn)) * HEAD_DIM;
        S1F_UNROLL
        for (int i = 0; i < DQ_ROWS / 16; i++) {
            S1F_UNROLL
            for (int j = 0; j < DQ_COLUMNS / 8; j++)
                global_add_4<THREADS>(tile + (i * (DQ_COLUMNS / 8) + j) * 4 * THREADS, dq[i][j]);
        }
    }

    /* -- results ------------------------------------------------------------------------------------------------ */

    /* Stores sums to the slab, or adds to what it holds; complete rows of the segment go to its own. */
    static S1F_DEVICE void store(const arguments &a, const place &here, const key_sums &d, float factor, float *slab,
                                 void *own_rows)
    {
        const int lane = lane_index(), warp = warp_index();
        const int column = warp % QUERY_WARPS * COLUMNS + lane % 4 * 2;
        const int first_token = here.first_key + warp / QUERY_WARPS * KEYS + lane / 4;
        float *to = row_of(slab, a.dkv_strides, batch(), kv_head(), first_token) + column;
        S1F_UNROLL
        for (int i = 0; i < KEYS / 8; i++) {
            const int token = first_token + i * 8;
            if (token >= a.options.num_tokens)
                break;
            const bool is_complete = own_rows != nullptr && token >= a.q_start;
            Element *own = nullptr;
            if (is_complete)
                own = row_of((Element *)own_rows, a.own_dkv_strides, batch(), kv_head(), token - a.q_start) + column;
            S1F_UNROLL
            for (int j = 0; j < COLUMNS / 8; j++) {
                float_pair *sums = (float_pair *)(to + i * 8 * a.dkv_strides.row + j * 8);
                float_pair sum = {d[i / 2][j][i % 2 * 2] * factor, d[i / 2][j][i % 2 * 2 + 1] * factor};
                if (!a.store_kv_grads) {
                    const float_pair before = global_load(sums);
                    sum = {before.element[0] + sum.element[0], before.element[1] + sum.element[1]};
                }
                if (is_complete)
                    global_store((uint32_t *)(own + j * 8), pack<Element>(sum.element[0], sum.element[1]));
                else
                    global_store(sums, sum);
            }
        }
    }
};

} // namespace s1f

#endif
