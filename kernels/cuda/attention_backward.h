/* attention_backward.h - gradients of causal attention of one segment over the KV cache.
 *
 *   P = 2^(x - lse2)    dP = dO V^T    dS = P (dP - delta) cap'    delta = rowsum(dO out)    x: attention_options.h
 *   dV += P^T dO        dK += scale dS^T Q                         dQ = scale dS K
 *
 * Kernels   prepare_rows      delta and lse2 = lse log2 e, of rows padded to whole tiles; zeroes the sums of dQ
 *           key_gradients     dK and dV: a block owns a tile of keys of a kv head and goes over the tiles of queries of all
 *                             heads that read it, so each sum has one owner and one order. dQ: sums in memory to which
 *                             blocks add in any order; left out where dQ is to be deterministic
 *           add_parts         where blocks are few, the way over the queries is cut into parts: adds up what they summed,
 *                             in the order of their index
 *           round_queries     dQ of its sums
 *           query_gradients   deterministic dQ: a block owns a tile of queries and makes P and dS again (7 products of a
 *                             pair of tiles in all instead of 5)
 * Tiles     key_gradients makes P and dS transposed, a key per row: what a warp made of them is then, in its registers,
 *           the first factor of P^T dO and dS^T Q. What other warps made comes through shared memory, as does dS for dQ.
 *           Of KEY_WARPS x QUERY_WARPS warps, warp (i, j) makes keys i, queries j of P and dS, and keys i, columns j of dK
 *           and dV. Two barriers per pair of tiles, three with one stage of dO; products of a warp's own P and dS run
 *           between them, so that warps seldom wait for each other
 * Numerics  bf16 or fp16 in and out, P and dS rounded to that; fp32 sums
 * Bits      dK and dV of equal inputs are equal; dQ too by query_gradients
 * Truth     s1f_attention_ref_backward() of ../attention_ref.c */
#ifndef S1F_CUDA_ATTENTION_BACKWARD_H
#define S1F_CUDA_ATTENTION_BACKWARD_H

#include "attention_options.h"
#include "products.h"

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
    float *dq_sums;      /* (B, Hq, padded_len, D), in tiles as global_add_4 lays them out; NULL: not asked for */
    int32_t num_parts;
    float *part_dk,
        *part_dv;      /* (parts, B, Hkv, num_tokens - first_key, D) each; NULL: one part, that goes to the slab */
    int32_t first_key; /* of the first block of key_gradients: no query sees those before, or it is 0 */
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

/* -- corners of P and dS: element r of lane's in the 16 x 8 corner (i, j), as matrix_multiply_add leaves it ----------- */

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

/* What a hidden product, or its tanh, becomes: its P is 0 by any factor above 2^-50, its square finite. */
constexpr float HIDDEN = -0x1p60f;

/* Of products, or the tanh of what is capped: P, rounded, and in place of s P cap', by which dS = s (dP - delta). */
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

/* -- delta and lse2; grid: padded_len / ROW_PADDING, query heads, batch --------------------------------------------- */

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
        if (a.dq_sums != nullptr) {
            float_quad *sums = (float_quad *)(a.dq_sums + (first + first_row) * HEAD_DIM);
            S1F_UNROLL
            for (int i = 0; i < ROW_PADDING * HEAD_DIM / 4; i += THREADS)
                global_store(sums + i + thread, float_quad{});
        }
    }
};

/* -- dK and dV, and sums of dQ; grid: tiles of keys from first_key on times parts, kv heads, batch ------------------- */

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

    /* Shared memory, bytes: K, V; two stages of Q, DOUT_STAGES of dO; P and dS, a key per row; lse2 and delta, two stages
     * of each. */
    static constexpr int KEY_TILE = KEY_ROWS * HEAD_DIM * 2, QUERY_TILE = QUERY_ROWS * HEAD_DIM * 2;
    static constexpr int PAIR_TILE = KEY_ROWS * QUERY_ROWS * 2, STATISTICS = QUERY_ROWS * 4;
    static constexpr int K = 0, V = K + KEY_TILE, Q = V + KEY_TILE, DOUT = Q + 2 * QUERY_TILE;
    static constexpr int P = DOUT + DOUT_STAGES * QUERY_TILE, DS = P + PAIR_TILE;
    static constexpr int LSE2 = DS + PAIR_TILE, DELTA = LSE2 + 2 * STATISTICS;
    static constexpr int SHARED_BYTES = DELTA + 2 * STATISTICS;

    using corner = float[KEYS / 16][QUERIES / 8][4];
    using factors = uint32_t[QUERIES / 16][KEYS / 16][4]; /* a corner, rounded */
    using key_sums = float[KEYS / 16][COLUMNS / 8][4];

    /* Where a block works, and its turns: pairs of a query head and a tile of queries, tiles fastest. Little is kept, for
     * registers are short; what few turns need is found again. */
    struct place {
        int first_key, first_tile, num_tiles; /* tiles of queries that see some of the keys, but for documents */
        int begin, end;                       /* turns of the part */

        S1F_DEVICE place(const arguments &a)
        {
            const int part = block_index().x % a.num_parts, num_tokens = a.options.num_tokens, q_start = a.q_start;
            first_key = a.first_key + block_index().x / a.num_parts * KEY_ROWS;
            const int last_key = (first_key + KEY_ROWS < num_tokens ? first_key + KEY_ROWS : num_tokens) - 1;
            const int first_row = first_key > q_start ? first_key - q_start : 0;
            const int seen_to = a.options.window < num_tokens - last_key ? last_key + a.options.window : num_tokens;
            first_tile = first_row / QUERY_ROWS;
            num_tiles = seen_to > q_start + first_row ? (seen_to - q_start - 1) / QUERY_ROWS - first_tile + 1 : 0;
            const int64_t turns = (int64_t)num_tiles * a.group;
            begin = (int)(turns * part / a.num_parts);
            end = (int)(turns * (part + 1) / a.num_parts);
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
        int turn = next_turn(a, here, here.begin);
        if (turn == here.end && a.part_dk == nullptr && !a.store_kv_grads)
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
            if (a.dq_sums != nullptr)
                add_queries(a, here, (int)opaque((uint32_t)turn), shared);
            turn = next;
            stage ^= 1;
        }
        copy_async_wait<0>();
        store(a, here, dk, a.scale, a.part_dk, a.dk, a.own_dk);
        store(a, here, dv, 1, a.part_dv, a.dv, a.own_dv);
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

    /* To the part's sums; or to the slab, or onto what it holds, and complete rows of the segment to its own. */
    static S1F_DEVICE void store(const arguments &a, const place &here, const key_sums &d, float factor, float *parts,
                                 float *slab, void *own_rows)
    {
        const int lane = lane_index(), warp = warp_index();
        const int column = warp % QUERY_WARPS * COLUMNS + lane % 4 * 2;
        const int first_token = here.first_key + warp / QUERY_WARPS * KEYS + lane / 4;
        const bool adds = parts == nullptr && !a.store_kv_grads;
        float *to = row_of(slab, a.dkv_strides, batch(), kv_head(), first_token) + column;
        int64_t row_stride = a.dkv_strides.row;
        if (parts != nullptr) {
            const int64_t strip = (block_index().x % a.num_parts * (int64_t)a.batch + batch()) * a.kv_heads + kv_head();
            row_stride = HEAD_DIM;
            to = parts + (strip * (a.options.num_tokens - a.first_key) + first_token - a.first_key) * HEAD_DIM + column;
        }
        S1F_UNROLL
        for (int i = 0; i < KEYS / 8; i++) {
            const int token = first_token + i * 8;
            if (token >= a.options.num_tokens)
                break;
            const bool is_complete = parts == nullptr && own_rows != nullptr && token >= a.q_start;
            Element *own = nullptr;
            if (is_complete)
                own = row_of((Element *)own_rows, a.own_dkv_strides, batch(), kv_head(), token - a.q_start) + column;
            S1F_UNROLL
            for (int j = 0; j < COLUMNS / 8; j++) {
                float_pair *sums = (float_pair *)(to + i * 8 * row_stride + j * 8);
                float_pair sum = {d[i / 2][j][i % 2 * 2] * factor, d[i / 2][j][i % 2 * 2 + 1] * factor};
                if (adds) {
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

/* -- sums of the parts; grid: num_blocks(), kv heads, batch; a thread takes 4 elements of dK or of dV ------------------ */

template <typename Element, int HEAD_DIM> struct add_parts {
    using arguments = attention_backward_arguments;
    static constexpr int THREADS = 256, BLOCKS_PER_SM = 4, SHARED_BYTES = 0;
    static constexpr int ROWS_AT_ONCE = THREADS * 4 / HEAD_DIM;

    /* Where rows are stored, those that no query sees become 0. */
    static int num_blocks(const arguments &a)
    {
        const int rows = a.options.num_tokens - (a.store_kv_grads ? 0 : a.first_key);
        return 2 * ((rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE);
    }

    static S1F_DEVICE void run(const arguments &a)
    {
        const int kv_head = block_index().y, batch = block_index().z, which = block_index().x % 2;
        const int num_tokens = a.options.num_tokens, column = thread_index() * 4 % HEAD_DIM;
        const int token =
            (a.store_kv_grads ? 0 : a.first_key) + block_index().x / 2 * ROWS_AT_ONCE + thread_index() * 4 / HEAD_DIM;
        if (token >= num_tokens)
            return;

        float_quad sum = {};
        float *slab = row_of(which == 0 ? a.dk : a.dv, a.dkv_strides, batch, kv_head, token) + column;
        if (!a.store_kv_grads)
            sum = global_load((const float_quad *)slab);
        if (token >= a.first_key) {
            const int64_t rows = num_tokens - a.first_key, strips = (int64_t)a.batch * a.kv_heads;
            const int64_t row = (batch * (int64_t)a.kv_heads + kv_head) * rows + token - a.first_key;
            const float *parts = (which == 0 ? a.part_dk : a.part_dv) + row * HEAD_DIM + column;
            float_quad added = {};
            for (int part = 0; part < a.num_parts; part++) {
                const float_quad of_part = global_load((const float_quad *)(parts + part * strips * rows * HEAD_DIM));
                S1F_UNROLL
                for (int i = 0; i < 4; i++)
                    added.element[i] += of_part.element[i];
            }
            S1F_UNROLL
            for (int i = 0; i < 4; i++)
                sum.element[i] += added.element[i];
        }
        void *own = which == 0 ? a.own_dk : a.own_dv;
        if (own != nullptr && token >= a.q_start) {
            Element *to = row_of((Element *)own, a.own_dkv_strides, batch, kv_head, token - a.q_start) + column;
            global_store((word_pair *)to, word_pair{{pack<Element>(sum.element[0], sum.element[1]),
                                                     pack<Element>(sum.element[2], sum.element[3])}});
        } else {
            global_store((float_quad *)slab, sum);
        }
    }
};

/* -- dQ of its sums, as key_gradients `Gradients` laid them out; grid: tiles of queries, query heads, batch ----------- */

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

/* -- deterministic dQ; grid: tiles of queries, query heads, batch ----------------------------------------------------- */

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
