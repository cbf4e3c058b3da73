/* attention_blocked.inc.h - blocked attention: the one source of every instruction set's kernels.
 *
 * Forward: a task is a chunk of rows of all the query heads that share a kv head. It walks its keys in blocks; each
 * block is packed once for the whole chunk, and then, for a few rows at a time,
 *   S = Q K^T,   m' = max(m, rowmax S),   P = 2^(S - m'),   l = l 2^(m - m') + rowsum P,   O = O 2^(m - m') + P V
 * with scale log2(e) folded into the packed Q, so that every exponential is a power of two.
 *
 * Backward: a task is a range of keys of one kv head; so each tile of dk and dv has one owner, which adds it to the
 * accumulators once. With S and P as above from the stored lse, D = rowsum(dout * out):
 *   dP = dO V^T,   dS = P (dP - D),   dV += P^T dO,   dK += dS^T Q,   dQ += dS K
 * dQ of each range of keys is its own, and the ranges are summed in order at the end.
 *
 * Work on the diagonal is trimmed per micro-tile of rows: no product runs over keys that none of its rows sees.
 * A product may run over up to TILE_ROWS - 1 keys with a p of 0; so a NaN or infinity in one token can reach the few
 * rows before it, which the truth keeps clean. Rows of k and v from T on are never read.
 * Every sum has one order, whatever the number of threads.
 *
 * Not here, and handed to the truth: fp64, head_dim above MAX_DIM, window, softcap, slopes, docs. 16-bit is widened to
 * fp32 as it is packed. */
#include "attention_internal.h"
#include "attention_micro.inc.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

enum {
    MAX_DIM = 256,
    KEYS = 192,             /* of a packed block, which stays in L2: rates are flat from 128 to 384 */
    ROWS = 48,              /* of S at a time: rates are flat from 24 to 96 */
    ALIGNED = 16,           /* floats in a cache line */
    CHUNK_ROWS = 512,       /* of a forward task, over its heads: they share packed keys and stay in L2 */
    BACKWARD_TASKS = 8,     /* that the ranges of keys are cut for, where they are long enough */
    MIN_RANGE = 512,        /* keys of a backward task, unless there are fewer */
    PITCH = KEYS + ALIGNED, /* of S: its rows lie on different sets of the L1 cache */
};

_Static_assert(KEYS % PANEL == 0, "a block of keys is whole panels");
_Static_assert(KEYS % TILE_ROWS == 0, "a tile of dk is TILE_ROWS keys");
_Static_assert(ROWS % TILE_ROWS == 0, "a block of rows is whole micro-tiles");
_Static_assert((KEYS + TILE_ROWS + VEC_LANES - 1) / VEC_LANES * VEC_LANES <= PITCH, "zeros past the keys fit");

static const double LOG2_E = 1.44269504088896340736;
static const double LN_2 = 0.69314718055994530942;
static const float LOWEST = -0x1p126f; /* below every logit, and finite, so that differences stay numbers */

/* ---- tasks, taken in order by whoever is free ---- */

typedef struct attention_job attention_job;
typedef void (*task_body)(const attention_job *job, int64_t task, float *scratch);

struct attention_job {
    const s1f_attention_args *args;
    int64_t dim;       /* head_dim, rounded up to whole vectors */
    int64_t rows;      /* forward: segment rows of a chunk; backward: of the segment; rounded up to whole micro-tiles */
    int64_t parts;     /* forward: chunks of the segment; backward: ranges of the keys */
    int64_t part_keys; /* backward: keys of a range */

    float *q, *dout, *lse, *delta; /* backward: packed (B, Hq, rows, dim), (B, Hq, rows) */
    float *dq;                     /* (parts, B, Hq, rows, dim) */

    task_body body;
    int64_t num_tasks;
    float *scratch;
    int64_t scratch_floats, workers; /* of one worker; how many there are */
    _Atomic int64_t *next_task;
};

/* Worker `begin` takes tasks until none is left, so the other workers up to `end` have nothing to do. */
static void work(int64_t begin, int64_t end, void *context)
{
    const attention_job *job = context;
    if (begin == end)
        return;
    for (int64_t task; (task = atomic_fetch_add(job->next_task, 1)) < job->num_tasks;)
        job->body(job, task, job->scratch + begin * job->scratch_floats);
}

static void run_tasks(attention_job *job, const s1f_attention_context *context, int64_t num_tasks, task_body body)
{
    _Atomic int64_t next_task = 0;
    job->body = body;
    job->num_tasks = num_tasks;
    job->next_task = &next_task;
    if (context && context->parallel_for)
        context->parallel_for(0, s1f_min(job->workers, num_tasks), 1, work, job);
    else
        work(0, 1, job);
}

static int32_t threads_of(const s1f_attention_context *context)
{
    return context ? context->num_threads : 1;
}

/* ---- shapes ---- */

static int covers(const s1f_attention_args *args)
{
    int sees_all = args->window == 0 || args->window >= args->q_start + args->segment_len;
    return args->dtype != S1F_FLOAT64 && args->head_dim <= MAX_DIM && sees_all && args->softcap == 0 && !args->slopes &&
           !args->docs;
}

static int64_t group_of(const s1f_attention_args *args)
{
    return args->heads / args->kv_heads;
}

/* At least two tasks per thread: no row's sums depend on its chunk, so these may follow the number of threads. */
static attention_job forward_job(const s1f_attention_args *args, int32_t num_threads)
{
    int64_t heads = args->batch * args->kv_heads, dim = round_up(args->head_dim, VEC_LANES);
    int64_t wanted = num_threads > 1 ? (2 * num_threads + heads - 1) / heads : 1; /* chunks of the segment */
    int64_t rows = s1f_min(CHUNK_ROWS / group_of(args), (args->segment_len + wanted - 1) / wanted);
    rows = s1f_min(round_up(s1f_max(rows, 2 * ROWS), ROWS), round_up(args->segment_len, TILE_ROWS));
    int64_t chunk = group_of(args) * rows; /* q, out (chunk, dim); highest (chunk); sums (chunk) of vectors */
    return (attention_job){.args = args,
                           .dim = dim,
                           .rows = rows,
                           .parts = (args->segment_len + rows - 1) / rows,
                           .scratch_floats = round_up(chunk * (2 * dim + 1 + VEC_LANES), ALIGNED) + ROWS * PITCH +
                                             2 * KEYS * dim + 4 * dim};
}

static attention_job backward_job(const s1f_attention_args *args)
{
    int64_t heads = args->batch * args->kv_heads, dim = round_up(args->head_dim, VEC_LANES);
    int64_t keys = args->q_start + args->segment_len, parts = (BACKWARD_TASKS + heads - 1) / heads;
    int64_t part_keys = round_up(s1f_max((keys + parts - 1) / parts, MIN_RANGE), KEYS);
    return (attention_job){.args = args,
                           .dim = dim,
                           .rows = round_up(args->segment_len, TILE_ROWS),
                           .part_keys = part_keys,
                           .parts = (keys + part_keys - 1) / part_keys,
                           .scratch_floats = 2 * ROWS * PITCH + 5 * KEYS * dim + 4 * dim};
}

/* Floats that backward shares among its tasks: q, dout, dq of each range; lse, delta. */
static int64_t backward_shared_floats(const attention_job *job)
{
    int64_t rows = job->args->batch * job->args->heads * job->rows;
    return (2 + job->parts) * rows * job->dim + 2 * round_up(rows, ALIGNED);
}

static int64_t main_tasks(const attention_job *job)
{
    return job->args->batch * job->args->kv_heads * job->parts;
}

static int64_t num_workers(const attention_job *job, int32_t num_threads)
{
    return s1f_max(1, s1f_min(num_threads, main_tasks(job)));
}

static int64_t scratch_bytes(const s1f_attention_args *args, int32_t num_threads, int backward)
{
    attention_job job = backward ? backward_job(args) : forward_job(args, num_threads);
    int64_t shared = backward ? backward_shared_floats(&job) : 0;
    return (shared + num_workers(&job, num_threads) * job.scratch_floats) * (int64_t)sizeof(float);
}

/* ---- forward ---- */

/* Rows [0, keys) of k or v from `from` on, widened into (padded, dim); zero from `keys` on. */
static void pack_rows(const s1f_attention_args *args, const void *x, int64_t at, int64_t keys, int64_t padded,
                      int64_t dim, float *rows)
{
    for (int64_t key = 0; key < keys; key++)
        widen_row(args->dtype, x, at + key * args->kv_strides.row, args->head_dim, 1, rows + key * dim, dim);
    if (padded > keys)
        memset(rows + keys * dim, 0, (size_t)((padded - keys) * dim) * sizeof *rows);
}

/* Rows [0, keys) of k or v as panels of their transpose, by way of four rows at a time. */
static void pack_panels(const s1f_attention_args *args, const void *x, int64_t at, int64_t keys, int64_t dim,
                        float *four_rows, float *panels)
{
    for (int64_t key = 0; key < round_up(keys, PANEL); key += 4) {
        int64_t present = s1f_max(0, s1f_min(4, keys - key));
        pack_rows(args, x, at + key * args->kv_strides.row, present, 4, dim, four_rows);
        transpose_to_panels(four_rows, 4, dim, panels + key / PANEL * PANEL * dim + key % PANEL);
    }
}

/* Keys of a block that the row sees, of those from `first_key` on; `token` is the row's own. */
static int64_t seen(int64_t token, int64_t first_key, int64_t keys)
{
    return s1f_max(0, s1f_min(keys, token + 1 - first_key));
}

/* One row: S becomes P over the keys seen, and 0 up to the next whole vector after `until`. Returns 2^(m - m'). */
ALWAYS_INLINE float softmax_row(float *s, int64_t num_seen, int64_t until, float *highest, float *sums)
{
    vec top = VEC_ALL(LOWEST), other = top, zero = VEC_ALL(0), sum = zero;
    int64_t c = 0, whole = num_seen / VEC_LANES * VEC_LANES, rest = num_seen - whole;
    for (; c + 2 * VEC_LANES <= whole; c += 2 * VEC_LANES) {
        top = VEC_MAX(top, VEC_LOAD(s + c));
        other = VEC_MAX(other, VEC_LOAD(s + c + VEC_LANES));
    }
    if (c < whole)
        top = VEC_MAX(top, VEC_LOAD(s + c));
    if (rest)
        other = VEC_MAX(other, VEC_FIRST(VEC_LOAD(s + whole), rest, VEC_ALL(LOWEST)));
    float before = *highest, now = VEC_HIGHEST(VEC_MAX(top, other));
    now = now > before ? now : before;
    vec shift = VEC_ALL(now);

    for (c = 0; c < whole; c += VEC_LANES) {
        vec p = exp2_vec(VEC_SUB(VEC_LOAD(s + c), shift));
        VEC_STORE(s + c, p);
        sum = VEC_ADD(sum, p);
    }
    if (rest) {
        vec p = VEC_FIRST(exp2_vec(VEC_SUB(VEC_LOAD(s + whole), shift)), rest, zero);
        VEC_STORE(s + whole, p);
        sum = VEC_ADD(sum, p);
        c += VEC_LANES;
    }
    for (; c < until; c += VEC_LANES)
        VEC_STORE(s + c, zero);

    float shrink = 1;
    if (now != before) {
        shrink = before == LOWEST ? 0 : exp2f(before - now);
        *highest = now;
    }
    VEC_STORE(sums, VEC_FMA(VEC_LOAD(sums), VEC_ALL(shrink), sum));
    return shrink;
}

/* `rows` (whole micro-tiles) against one packed block of keys. token: of the first row. */
static void forward_block(int64_t dim, int64_t rows, int64_t token, int64_t first_key, int64_t keys, const float *q,
                          const float *k_panels, const float *v, float *s, float *out, float *highest, float *sums)
{
    for (int64_t panel = 0; panel < keys; panel += PANEL)
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            multiply_panel(s + r * PITCH + panel, PITCH, q + r * dim, dim, k_panels + panel * dim, dim,
                           seen(token + r + TILE_ROWS - 1, first_key, keys) - panel);

    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        int64_t until = seen(token + r + TILE_ROWS - 1, first_key, keys);
        for (int64_t row = r; row < r + TILE_ROWS; row++) {
            float shrink = softmax_row(s + row * PITCH, seen(token + row, first_key, keys), until, &highest[row],
                                       sums + row * VEC_LANES);
            if (shrink != 1)
                for (int64_t c = 0; c < dim; c += VEC_LANES)
                    VEC_STORE(out + row * dim + c, VEC_MUL(VEC_LOAD(out + row * dim + c), VEC_ALL(shrink)));
        }
        multiply_add(out + r * dim, s + r * PITCH, PITCH, v, until, dim);
    }
}

static void forward_store(const attention_job *job, int64_t batch, int64_t head, int64_t row, const float *out,
                          float highest, const float *sums)
{
    const s1f_attention_args *args = job->args;
    float sum = sum_of_lanes(VEC_LOAD(sums));
    narrow_row(args->dtype, args->out, s1f_at(args->out_strides, batch, head, row), args->head_dim, 1 / sum, out);
    ((float *)args->lse)[(batch * args->heads + head) * args->segment_len + row] =
        (float)(((double)highest + log2((double)sum)) * LN_2);
}

/* A chunk of rows of one kv head's query heads. Later rows see more keys, so the last chunks come first. */
static void forward_task(const attention_job *job, int64_t task, float *scratch)
{
    const s1f_attention_args *args = job->args;
    int64_t kv_heads = args->batch * args->kv_heads, dim = job->dim, group = group_of(args);
    int64_t batch = task % kv_heads / args->kv_heads, kv_head = task % kv_heads % args->kv_heads;
    int64_t first_row = (job->parts - 1 - task / kv_heads) * job->rows;
    int64_t num_rows = s1f_min(job->rows, args->segment_len - first_row), rows = round_up(num_rows, TILE_ROWS);
    int64_t first_token = args->q_start + first_row, last = first_token + num_rows, chunk = group * rows;

    float *s = scratch, *k_panels = s + ROWS * PITCH, *v = k_panels + KEYS * dim;
    float *four_rows = v + KEYS * dim, *q = four_rows + 4 * dim, *out = q + chunk * dim;
    float *sums = out + chunk * dim, *highest = sums + chunk * VEC_LANES;

    memset(q, 0, (size_t)(chunk * (2 * dim + VEC_LANES)) * sizeof *q);
    for (int64_t g = 0; g < group; g++)
        for (int64_t row = 0; row < num_rows; row++)
            widen_row(args->dtype, args->q, s1f_at(args->q_strides, batch, kv_head * group + g, first_row + row),
                      args->head_dim, (float)(args->scale * LOG2_E), q + (g * rows + row) * dim, dim);
    for (int64_t r = 0; r < chunk; r++)
        highest[r] = LOWEST;

    for (int64_t key = 0; key < last; key += KEYS) {
        int64_t keys = s1f_min(KEYS, last - key), at = s1f_at(args->kv_strides, batch, kv_head, key);
        int64_t first_seeing = s1f_max(0, key - first_token) / TILE_ROWS * TILE_ROWS;
        pack_panels(args, args->k, at, keys, dim, four_rows, k_panels);
        pack_rows(args, args->v, at, keys, keys, dim, v);
        for (int64_t g = 0; g < group; g++)
            for (int64_t row = first_seeing; row < rows; row += ROWS) {
                int64_t r = g * rows + row;
                forward_block(dim, s1f_min(ROWS, rows - row), first_token + row, key, keys, q + r * dim, k_panels, v, s,
                              out + r * dim, highest + r, sums + r * VEC_LANES);
            }
    }

    for (int64_t g = 0; g < group; g++)
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t r = g * rows + row;
            forward_store(job, batch, kv_head * group + g, first_row + row, out + r * dim, highest[r],
                          sums + r * VEC_LANES);
        }
}

static s1f_status forward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    attention_job job = forward_job(args, threads_of(context));
    void *scratch, *owned;
    s1f_status status = s1f_attention_scratch(context, scratch_bytes(args, threads_of(context), 0), &scratch, &owned);
    if (status != S1F_OK)
        return status;
    job.scratch = scratch;
    job.workers = num_workers(&job, threads_of(context));
    run_tasks(&job, context, main_tasks(&job), forward_task);
    free(owned);
    return S1F_OK;
}

/* ---- backward ---- */

/* Packs one query head: q with scale log2(e), dout, lse in powers of two, rowsum(dout * out). Rows that fill up the
 * last micro-tile are zero throughout, so they add nothing to dk and dv. */
static void prepare_task(const attention_job *job, int64_t task, float *scratch)
{
    const s1f_attention_args *args = job->args;
    int64_t batch = task / args->heads, head = task % args->heads, dim = job->dim, rows = job->rows;
    float *q = job->q + task * rows * dim, *dout = job->dout + task * rows * dim;
    for (int64_t row = 0; row < rows; row++, q += dim, dout += dim) {
        float *lse = &job->lse[task * rows + row], *delta = &job->delta[task * rows + row];
        if (row >= args->segment_len) {
            memset(q, 0, (size_t)dim * sizeof *q);
            memset(dout, 0, (size_t)dim * sizeof *dout);
            *lse = *delta = 0;
            continue;
        }
        widen_row(args->dtype, args->q, s1f_at(args->q_strides, batch, head, row), args->head_dim,
                  (float)(args->scale * LOG2_E), q, dim);
        widen_row(args->dtype, args->dout, s1f_at(args->dout_strides, batch, head, row), args->head_dim, 1, dout, dim);
        widen_row(args->dtype, args->out, s1f_at(args->out_strides, batch, head, row), args->head_dim, 1, scratch, dim);
        vec sum = VEC_ALL(0);
        for (int64_t c = 0; c < dim; c += VEC_LANES)
            sum = VEC_FMA(VEC_LOAD(dout + c), VEC_LOAD(scratch + c), sum);
        *delta = sum_of_lanes(sum);
        *lse = (float)((double)((const float *)args->lse)[task * args->segment_len + row] * LOG2_E);
    }
}

/* One row: S becomes P and dP becomes dS, both 0 from the keys seen up to the next whole vector after `until`. */
ALWAYS_INLINE void gradient_row(float *s, float *dp, int64_t num_seen, int64_t until, float lse, float delta)
{
    vec shift = VEC_ALL(lse), mean = VEC_ALL(delta), zero = VEC_ALL(0);
    int64_t c = 0, whole = num_seen / VEC_LANES * VEC_LANES, rest = num_seen - whole;
    for (; c < whole; c += VEC_LANES) {
        vec p = exp2_vec(VEC_SUB(VEC_LOAD(s + c), shift));
        VEC_STORE(s + c, p);
        VEC_STORE(dp + c, VEC_MUL(p, VEC_SUB(VEC_LOAD(dp + c), mean)));
    }
    if (rest) {
        vec p = exp2_vec(VEC_SUB(VEC_LOAD(s + c), shift));
        vec ds = VEC_MUL(p, VEC_SUB(VEC_LOAD(dp + c), mean));
        VEC_STORE(s + c, VEC_FIRST(p, rest, zero));
        VEC_STORE(dp + c, VEC_FIRST(ds, rest, zero));
        c += VEC_LANES;
    }
    for (; c < until; c += VEC_LANES) {
        VEC_STORE(s + c, zero);
        VEC_STORE(dp + c, zero);
    }
}

typedef struct {
    float *s, *dp;                              /* (ROWS, PITCH) */
    float *k_panels, *v_panels, *k, *four_rows; /* packed; k (KEYS, dim) */
    float *dk, *dv;                             /* (KEYS, dim) */
} key_block;

/* `rows` (whole micro-tiles) against one packed block of keys. token: of the first row. */
static void backward_block(int64_t dim, int64_t rows, int64_t token, int64_t first_key, int64_t keys,
                           const key_block *b, const float *q, const float *dout, const float *lse, const float *delta,
                           float *dq)
{
    for (int64_t panel = 0; panel < keys; panel += PANEL)
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            int64_t at = r * PITCH + panel, columns = seen(token + r + TILE_ROWS - 1, first_key, keys) - panel;
            multiply_panel(b->s + at, PITCH, q + r * dim, dim, b->k_panels + panel * dim, dim, columns);
            multiply_panel(b->dp + at, PITCH, dout + r * dim, dim, b->v_panels + panel * dim, dim, columns);
        }
    /* Up to a whole micro-tile of keys past those that the last row of a micro-tile sees, for dk and dv below. */
    for (int64_t r = 0; r < rows; r++)
        gradient_row(b->s + r * PITCH, b->dp + r * PITCH, seen(token + r, first_key, keys),
                     seen(token + r / TILE_ROWS * TILE_ROWS + TILE_ROWS - 1, first_key, keys) + TILE_ROWS, lse[r],
                     delta[r]);
    for (int64_t key = 0; key < keys; key += TILE_ROWS) {
        int64_t first = s1f_max(0, first_key + key - token), depth = rows - first; /* rows that see this key */
        if (depth <= 0)
            break;
        multiply_add_transposed(b->dv + key * dim, b->s + first * PITCH + key, PITCH, dout + first * dim, depth, dim);
        multiply_add_transposed(b->dk + key * dim, b->dp + first * PITCH + key, PITCH, q + first * dim, depth, dim);
    }
    for (int64_t r = 0; r < rows; r += TILE_ROWS)
        multiply_add(dq + r * dim, b->dp + r * PITCH, PITCH, b->k, seen(token + r + TILE_ROWS - 1, first_key, keys),
                     dim);
}

static void add_key_gradients(const s1f_attention_args *args, float *to, const float *from, float factor)
{
    if (args->store_kv_grads)
        for (int64_t c = 0; c < args->head_dim; c++)
            to[c] = factor * from[c];
    else
        for (int64_t c = 0; c < args->head_dim; c++)
            to[c] += factor * from[c];
}

/* A range of keys of one kv head, against every row of its query heads. */
static void backward_task(const attention_job *job, int64_t task, float *scratch)
{
    const s1f_attention_args *args = job->args;
    int64_t kv_heads = args->batch * args->kv_heads, dim = job->dim, group = group_of(args), rows = job->rows;
    int64_t batch = task % kv_heads / args->kv_heads, kv_head = task % kv_heads % args->kv_heads;
    int64_t part = task / kv_heads, first_key = part * job->part_keys;
    int64_t last_key = s1f_min(first_key + job->part_keys, args->q_start + args->segment_len);
    int64_t tile = ROWS * PITCH, block = KEYS * dim;
    int64_t head = batch * args->heads + kv_head * group; /* the first of the group, of (B, Hq) */
    key_block b = {.s = scratch, .dp = scratch + tile};
    b.k_panels = b.dp + tile;
    b.v_panels = b.k_panels + block;
    b.k = b.v_panels + block;
    b.dk = b.k + block;
    b.dv = b.dk + block;
    b.four_rows = b.dv + block;

    float *dq = job->dq + (part * args->batch * args->heads + head) * rows * dim;
    memset(dq, 0, (size_t)(group * rows * dim) * sizeof *dq);

    for (int64_t key = first_key; key < last_key; key += KEYS) {
        int64_t keys = s1f_min(KEYS, last_key - key), at = s1f_at(args->kv_strides, batch, kv_head, key);
        int64_t first_seeing = s1f_max(0, key - args->q_start) / TILE_ROWS * TILE_ROWS;
        pack_rows(args, args->k, at, keys, round_up(keys, PANEL), dim, b.k);
        transpose_to_panels(b.k, round_up(keys, PANEL), dim, b.k_panels);
        pack_panels(args, args->v, at, keys, dim, b.four_rows, b.v_panels);
        memset(b.dk, 0, (size_t)(2 * block) * sizeof *b.dk);
        for (int64_t g = 0; g < group; g++)
            for (int64_t row = first_seeing; row < rows; row += ROWS) {
                int64_t r = (head + g) * rows + row;
                backward_block(dim, s1f_min(ROWS, rows - row), args->q_start + row, key, keys, &b, job->q + r * dim,
                               job->dout + r * dim, job->lse + r, job->delta + r, dq + (g * rows + row) * dim);
            }
        for (int64_t i = 0; i < keys; i++) { /* the packed q has a factor log2(e) that dk must not have */
            int64_t to = s1f_at(args->dkv_strides, batch, kv_head, key + i);
            add_key_gradients(args, (float *)args->dk + to, b.dk + i * dim, (float)LN_2);
            add_key_gradients(args, (float *)args->dv + to, b.dv + i * dim, 1);
        }
    }
}

/* dq of one query head: the sum over the ranges of keys, in order. */
static void query_gradient_task(const attention_job *job, int64_t task, float *scratch)
{
    const s1f_attention_args *args = job->args;
    int64_t dim = job->dim, part_floats = args->batch * args->heads * job->rows * dim;
    (void)scratch;
    for (int64_t row = 0; row < args->segment_len; row++) {
        float *dq = job->dq + (task * job->rows + row) * dim;
        for (int64_t part = 1; part < job->parts; part++)
            for (int64_t c = 0; c < dim; c++)
                dq[c] += dq[part * part_floats + c];
        narrow_row(args->dtype, args->dq, s1f_at(args->dq_strides, task / args->heads, task % args->heads, row),
                   args->head_dim, (float)args->scale, dq);
    }
}

static s1f_status backward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    attention_job job = backward_job(args);
    void *scratch, *owned;
    s1f_status status = s1f_attention_scratch(context, scratch_bytes(args, threads_of(context), 1), &scratch, &owned);
    if (status != S1F_OK)
        return status;
    int64_t heads = args->batch * args->heads, rows = heads * job.rows;
    job.q = scratch;
    job.dout = job.q + rows * job.dim;
    job.dq = job.dout + rows * job.dim;
    job.lse = job.dq + job.parts * rows * job.dim;
    job.delta = job.lse + round_up(rows, ALIGNED);
    job.scratch = job.delta + round_up(rows, ALIGNED);
    job.workers = num_workers(&job, threads_of(context));
    run_tasks(&job, context, heads, prepare_task);
    run_tasks(&job, context, main_tasks(&job), backward_task);
    run_tasks(&job, context, heads, query_gradient_task);
    free(owned);
    return S1F_OK;
}

const s1f_attention_kernels KERNELS = {KERNELS_NAME, covers, forward, backward, scratch_bytes};
