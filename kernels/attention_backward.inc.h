/* attention_backward.inc.h - blocked attention, backward. Included by attention_blocked.inc.h.
 *
 * A task is a kv head, or a part of its keys where there are few heads; so each tile of dk and dv has one
 * owner, which adds it to the accumulators once. With X and P as in forward from the stored lse,
 * D = rowsum(dout * out):
 *   dP = dO V^T,   dS = P (dP - D),   dV += P^T dO,   dK += dS^T Q,   dQ += dS K,   dsink = -sum 2^(sink - lse) D
 * A micro-tile of S and dP becomes P and dS while it is in L1, so no block of them is written and read again as fp32.
 * Packed rows and dQ of a whole head are in the worker's scratch, and so near. Parts of a head share the rows; dQ of
 * each is its own, and they are summed in order at the end. */

enum {
    BACKWARD_ROWS = 2 * ROWS, /* of P and dS at a time, 96 operands deep for dk and dv */
    BACKWARD_TASKS = 8,       /* tasks that keys are cut into, if the parts are long enough */
    /* With fewer heads, one head in FINER comes last and is cut into FINER times as many parts: no core waits long for
     * a slower core that has one of these small tasks. */
    FEW_HEADS = 32,
    FINER = 4,
    MIN_PART = 512, /* keys of a task, unless there are fewer */
    /* A block of keys meets PASS_ROWS rows at a time, over its heads, so that q, dout and dq stay in the cache; all
     * rows at once if there are no more than WHOLE_PASS_ROWS. */
    PASS_ROWS = 1024,
    WHOLE_PASS_ROWS = 2048,
    AHEAD = 12, /* rows of dk and dv that are prefetched before a sum is added */
    MICRO_TILE = TILE_ROWS * PANEL,
    BLOCK = BACKWARD_ROWS / PER_OPERAND * PITCH, /* operands of P */
};

typedef struct {                     /* what the rows of a kv head's query heads become, in their order (group, rows) */
    operand *q, *dout;               /* (.., depth), (.., v_depth) */
    operand *q_across, *dout_across; /* (.. / PER_OPERAND, dim or v_dim); the same memory where both are the same */
    float *lse, *delta;              /* (..): in powers of two; rowsum(dout * out) */
    float *dq;                       /* (parts, .., dim) */
} row_group;

static key_cut cut_keys(int64_t heads, int64_t keys, int64_t parts)
{
    int64_t of_part = round_up(s1f_max((keys + parts - 1) / parts, MIN_PART), KEYS);
    return (key_cut){heads, (keys + of_part - 1) / of_part, of_part};
}

/* Floats of a row_group: q and dout, as fp32 once, as pairs of bf16 along rows and across them; dq; lse, delta. */
static int64_t row_group_floats(const attention_job *job, int64_t parts)
{
    int64_t rows = group_of(job->args) * job->rows;
    return rows * ((1 + parts) * job->dim + job->v_dim) + 2 * round_up(rows, ALIGNED);
}

static row_group row_group_at(const attention_job *job, float *memory, int64_t parts)
{
    int64_t rows = group_of(job->args) * job->rows;
    row_group g = {.dq = memory, .q = memory + parts * rows * job->dim};
    g.dout = g.q + rows * job->depth;
    g.q_across = OPERAND_PAIRS ? g.dout + rows * job->v_depth : g.q;
    g.dout_across = OPERAND_PAIRS ? g.q_across + rows * job->depth : g.dout;
    g.lse = g.dq + rows * ((1 + parts) * job->dim + job->v_dim);
    g.delta = g.lse + round_up(rows, ALIGNED);
    return g;
}

/* Floats of a key_block, which begins a worker's scratch. */
static int64_t key_block_floats(const attention_job *job)
{
    return 3 * MICRO_TILE + (2 + OPERAND_PAIRS) * BLOCK + KEYS * (2 * job->depth + job->v_depth) +
           KEYS * (job->dim + job->v_dim) + BLOCK_ROWS * s1f_max(job->dim, job->v_dim);
}

static attention_job backward_job(const s1f_attention_args *args)
{
    int64_t heads = args->batch * args->kv_heads;
    int64_t dim = round_up(args->head_dim, VEC_LANES), v_dim = round_up(args->v_head_dim, VEC_LANES);
    int64_t keys = args->q_start + args->segment_len, parts = (BACKWARD_TASKS + heads - 1) / heads;
    int64_t last = heads < FEW_HEADS ? heads / FINER : 0;
    key_cut first_cut = cut_keys(heads - last, keys, parts), last_cut = cut_keys(last, keys, FINER * parts);
    attention_job job = {.args = args,
                         .dim = dim,
                         .v_dim = v_dim,
                         .depth = dim / PER_OPERAND,
                         .v_depth = v_dim / PER_OPERAND,
                         .rows = round_up(args->segment_len, TILE_ROWS),
                         .cuts = {first_cut, last_cut},
                         .main_tasks = first_cut.heads * first_cut.parts + last_cut.heads * last_cut.parts};
    job.scratch_floats = key_block_floats(&job) + (first_cut.parts == 1 ? row_group_floats(&job, 1) : 0);
    return job;
}

static key_cut cut_of(const attention_job *job, int64_t kv_head)
{
    return job->cuts[kv_head >= job->cuts[0].heads];
}

/* The first kv head of (B, Hkv) that is cut into parts; all after it are. */
static int64_t first_cut_head(const attention_job *job)
{
    int64_t whole = job->cuts[0].parts == 1 ? job->cuts[0].heads : 0;
    return job->cuts[1].parts == 1 ? whole + job->cuts[1].heads : whole;
}

/* Floats of the row groups of the cut heads before `kv_head`. */
static int64_t shared_floats(const attention_job *job, int64_t kv_head)
{
    int64_t first = first_cut_head(job), of_last = s1f_max(0, kv_head - s1f_max(first, job->cuts[0].heads));
    return (kv_head - first - of_last) * row_group_floats(job, job->cuts[0].parts) +
           of_last * row_group_floats(job, job->cuts[1].parts);
}

static row_group shared_row_group(const attention_job *job, int64_t kv_head)
{
    return row_group_at(job, job->shared + shared_floats(job, kv_head), cut_of(job, kv_head).parts);
}

/* The first row that sees a key from `key` on, from a whole micro-tile on. */
static int64_t first_row_seeing(const s1f_attention_args *args, int64_t key)
{
    return s1f_max(0, key - args->q_start) / TILE_ROWS * TILE_ROWS;
}

/* Pieces of the rows of a segment, in which they are prepared and given out. */
static int64_t num_pieces(const attention_job *job)
{
    return (job->rows + ROWS - 1) / ROWS;
}

/* Floats of the sums for the gradients of the sinks, which begin the scratch. */
static int64_t sink_floats(const attention_job *job)
{
    const s1f_attention_args *args = job->args;
    int64_t sums = args->sinks && args->dsinks ? args->batch * args->heads * num_pieces(job) : 0;
    return round_up(sums * (int64_t)(sizeof(double) / sizeof(float)), ALIGNED);
}

static int64_t backward_scratch_bytes(const s1f_attention_args *args, int32_t num_threads)
{
    attention_job job = backward_job(args);
    int64_t shared = sink_floats(&job) + shared_floats(&job, args->batch * args->kv_heads);
    return (shared + num_workers(&job, num_threads) * job.scratch_floats) * (int64_t)sizeof(float);
}

/* Packs a piece of query head g of a kv head: q and dout, lse in powers of two, rowsum(dout * out), and sums up what it
 * gives to the sink. Rows that fill up the last micro-tile are zero, and their p as well, so they add nothing to dk and
 * dv. */
static void prepare_piece(const attention_job *job, const row_group *to, int64_t kv_head, int64_t g, int64_t piece,
                          float *scratch)
{
    const s1f_attention_args *args = job->args;
    int64_t begin = piece * ROWS, dim = job->dim, v_dim = job->v_dim, first = g * job->rows + begin;
    int64_t batch = kv_head / args->kv_heads, head = kv_head % args->kv_heads * group_of(args) + g;
    int64_t rows = s1f_min(ROWS, job->rows - begin), count = s1f_min(rows, args->segment_len - begin);
    source_rows q = rows_of(args, args->q, args->q_strides, args->head_dim, batch, head, begin, count);
    source_rows dout = rows_of(args, args->dout, args->dout_strides, args->v_head_dim, batch, head, begin, count);
    source_rows out = rows_of(args, args->out, args->out_strides, args->v_head_dim, batch, head, begin, count);
    fetch_rows(&q);
    fetch_rows(&dout);
    fetch_rows(&out);
    pack_rows(&q, rows, dim, to->q + first * job->depth);
    pack_rows(&dout, rows, v_dim, to->dout + first * job->v_depth);
    if (OPERAND_PAIRS) {
        pack_across(&q, rows, dim, to->q_across + first / PER_OPERAND * dim);
        pack_across(&dout, rows, v_dim, to->dout_across + first / PER_OPERAND * v_dim);
    }
    float *lse = to->lse + first, *delta = to->delta + first;
    operand *out_row = scratch;
    const float *from = (const float *)args->lse + (batch * args->heads + head) * args->segment_len + begin;
    double sink = job->sink_sums ? s1f_sink(args, head) : 0, sink_sum = 0;
    for (int64_t row = 0; row < rows; row++) {
        if (row >= count) {
            lse[row] = -LOWEST;
            delta[row] = 0;
            continue;
        }
        pack_row(&out, row, out_row, v_dim);
        const operand *dout_row = to->dout + (first + row) * job->v_depth;
        vec sum = VEC_ALL(0);
        int64_t c = 0;
        for (; c + VEC_LANES <= job->v_depth; c += VEC_LANES)
            sum = VEC_DOT(VEC_LOAD(dout_row + c), VEC_LOAD(out_row + c), sum);
        if (c < job->v_depth)
            sum = VEC_DOT(VEC_FIRST(VEC_LOAD(dout_row + c), job->v_depth - c, VEC_ALL(0)),
                          VEC_FIRST(VEC_LOAD(out_row + c), job->v_depth - c, VEC_ALL(0)), sum);
        delta[row] = sum_of_lanes(sum);
        if (job->sink_sums)
            sink_sum -= exp(sink - (double)from[row]) * (double)delta[row];
        double powers = (double)from[row] * LOG2_E; /* finite, also where a sink is next to float's largest */
        lse[row] = (float)(powers > -(double)LOWEST ? -(double)LOWEST : powers);
    }
    if (job->sink_sums)
        job->sink_sums[(batch * args->heads + head) * num_pieces(job) + piece] = sink_sum;
}

/* dq of a piece of query head g of a kv head: the sum over its parts of keys, in order. */
static void store_query_gradient(const attention_job *job, const row_group *rows, int64_t kv_head, int64_t g,
                                 int64_t piece)
{
    const s1f_attention_args *args = job->args;
    int64_t begin = piece * ROWS, dim = job->dim, part_floats = group_of(args) * job->rows * dim;
    int64_t batch = kv_head / args->kv_heads, head = kv_head % args->kv_heads * group_of(args) + g;
    key_cut cut = cut_of(job, kv_head);
    for (int64_t row = begin; row < s1f_min(begin + ROWS, args->segment_len); row++) {
        float *dq = rows->dq + (g * job->rows + row) * dim;
        for (int64_t part = 1; part < cut.parts && row >= first_row_seeing(args, part * cut.keys); part++)
            for (int64_t c = 0; c < dim; c++)
                dq[c] += dq[part * part_floats + c];
        narrow_row(args->dtype, args->dq, s1f_at(args->dq_strides, batch, head, row), args->head_dim,
                   (float)args->scale, dq);
    }
}

/* Finds the piece of a query head that a task is for, among the kv heads that are cut. Returns the kv head. */
static int64_t cut_piece(const attention_job *job, int64_t task, int64_t *g, int64_t *piece)
{
    int64_t pieces = num_pieces(job), group = group_of(job->args);
    *piece = task % pieces;
    *g = task / pieces % group;
    return first_cut_head(job) + task / pieces / group;
}

static void prepare_task(const attention_job *job, int64_t task, float *scratch)
{
    int64_t g, piece, kv_head = cut_piece(job, task, &g, &piece);
    row_group rows = shared_row_group(job, kv_head);
    prepare_piece(job, &rows, kv_head, g, piece, scratch);
}

static void query_gradient_task(const attention_job *job, int64_t task, float *scratch)
{
    int64_t g, piece, kv_head = cut_piece(job, task, &g, &piece);
    row_group rows = shared_row_group(job, kv_head);
    (void)scratch;
    store_query_gradient(job, &rows, kv_head, g, piece);
}

typedef struct {
    float *s, *dp;     /* (TILE_ROWS, PANEL) */
    float *derivative; /* (TILE_ROWS, PANEL), of the soft cap */
    operand *p, *ds;   /* (BACKWARD_ROWS / PER_OPERAND, PITCH): P and dS across rows */
    operand *ds_rows;  /* (BACKWARD_ROWS, PITCH / PER_OPERAND): dS along rows; ds itself in fp32 */
    operand *k_panels, *v_panels, *k_room, *room; /* packed */
    const operand *k_across;
    float *dk, *dv; /* (KEYS, dim), (KEYS, v_dim) */
} key_block;

/* VEC_LANES pairs of a row from c on, of which the first `num_seen` - c are seen: p and ds. */
ALWAYS_INLINE void gradient_vec(const float *s, const float *dp, const float *derivative, int64_t c, int64_t num_seen,
                                float factor, float lse, float delta, vec *p, vec *ds)
{
    if (c >= num_seen) {
        *p = *ds = VEC_ALL(0);
        return;
    }
    *p = exp2_vec(VEC_FMA(VEC_LOAD(s + c), VEC_ALL(factor), VEC_ALL(-lse)));
    *ds = VEC_MUL(*p, VEC_SUB(VEC_LOAD(dp + c), VEC_ALL(delta)));
    if (derivative)
        *ds = VEC_MUL(*ds, VEC_LOAD(derivative + c));
    if (c + VEC_LANES > num_seen) {
        *p = VEC_FIRST(*p, num_seen - c, VEC_ALL(0));
        *ds = VEC_FIRST(*ds, num_seen - c, VEC_ALL(0));
    }
}

/* A micro-tile of S and dP, the rows from r and the columns from `panel` on, becomes P and dS; all 0 from the keys seen
 * up to the next whole vector after `until`. num_seen and until count from the first column. */
ALWAYS_INLINE void gradient_tile(const key_block *b, int capped, int64_t r, int64_t panel, const int64_t *num_seen,
                                 int64_t until, float factor, const float *lse, const float *delta)
{
    for (int64_t i = 0; i < TILE_ROWS; i += PER_OPERAND) {
        const float *s = b->s + i * PANEL, *dp = b->dp + i * PANEL, *derivative = b->derivative + i * PANEL;
        operand *to_p = b->p + (r + i) / PER_OPERAND * PITCH + panel, *to_ds = b->ds + (to_p - b->p);
        vec p, ds;
        for (int64_t c = 0; c < until; c += VEC_LANES) {
            gradient_vec(s, dp, capped ? derivative : NULL, c, num_seen[i], factor, lse[i], delta[i], &p, &ds);
#if OPERAND_PAIRS
            vec p1, ds1;
            operand *rows = b->ds_rows + (r + i) * (PITCH / 2) + panel / 2;
            gradient_vec(s + PANEL, dp + PANEL, capped ? derivative + PANEL : NULL, c, num_seen[i + 1], factor,
                         lse[i + 1], delta[i + 1], &p1, &ds1);
            store_operands(rows, c, ds);
            store_operands(rows + PITCH / 2, c, ds1);
            p = VEC_JOIN_BF16(p, p1);
            ds = VEC_JOIN_BF16(ds, ds1);
#endif
            VEC_STORE(to_p + c, p);
            VEC_STORE(to_ds + c, ds);
        }
    }
}

/* `rows` (whole micro-tiles) of one head against one packed block of keys. token: of the first row; first: its place in
 * the row group. */
static void backward_block(const attention_job *job, const exponent_rule *rule, const row_group *of, int64_t first,
                           int64_t rows, int64_t token, int64_t first_key, int64_t keys, const key_block *b)
{
    int64_t dim = job->dim, depth = job->depth, v_dim = job->v_dim, v_depth = job->v_depth;
    visibility seen_keys = block_visibility(rule, token, rows, first_key, keys);
    if (seen_keys == ALL_HIDDEN)
        return;
    float factor = rule->transforms ? 1 : rule->factor;
    int capped = rule->cap != 0;
    for (int64_t panel = 0; panel < round_up(keys, TILE_ROWS); panel += PANEL)
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            int64_t key = first_key + panel, width = s1f_min(keys - panel, PANEL), num_seen[TILE_ROWS];
            for (int64_t i = 0; i < TILE_ROWS; i++)
                num_seen[i] = seen(token + r + i, key, width);
            int64_t columns = num_seen[TILE_ROWS - 1];
            const operand *q = of->q + (first + r) * depth, *dout = of->dout + (first + r) * v_depth;
            if (panel == 0 && r + TILE_ROWS < rows) { /* a sweep over all rows finds them in L3, not in L2 */
                fetch_bytes(q + TILE_ROWS * depth, TILE_ROWS * depth * (int64_t)sizeof *q);
                fetch_bytes(dout + TILE_ROWS * v_depth, TILE_ROWS * v_depth * (int64_t)sizeof *dout);
            }
            multiply_panel(b->s, PANEL, q, depth, b->k_panels + panel * depth, depth, columns);
            multiply_panel(b->dp, PANEL, dout, v_depth, b->v_panels + panel * v_depth, v_depth, columns);
            if (rule->transforms || seen_keys == SOME_HIDDEN)
                exponents_of_rows(rule, seen_keys, TILE_ROWS, token + r, key, width, PANEL, b->s,
                                  capped ? b->derivative : NULL);
            /* Up to a whole micro-tile of keys past those that the last row sees, for dk and dv below. */
            int64_t until = s1f_min(seen(token + r + TILE_ROWS - 1, first_key, keys) + TILE_ROWS - panel, PANEL);
            if (capped)
                gradient_tile(b, 1, r, panel, num_seen, until, factor, of->lse + first + r, of->delta + first + r);
            else
                gradient_tile(b, 0, r, panel, num_seen, until, factor, of->lse + first + r, of->delta + first + r);
        }
    for (int64_t key = 0; key < keys; key += TILE_ROWS) {
        /* Rows that see this key, from a whole operand on. */
        int64_t from = s1f_max(0, first_key + key - token) / PER_OPERAND, left = rows / PER_OPERAND - from;
        if (left <= 0)
            break;
        int64_t at = from * PITCH + key, row = first / PER_OPERAND + from;
        multiply_add(b->dv + key * v_dim, b->p + at, 1, PITCH, of->dout_across + row * v_dim, left, v_dim);
        multiply_add(b->dk + key * dim, b->ds + at, 1, PITCH, of->q_across + row * dim, left, dim);
    }
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        if (r + TILE_ROWS < rows)
            fetch_bytes(of->dq + (first + r + TILE_ROWS) * dim, TILE_ROWS * dim * (int64_t)sizeof *of->dq);
        multiply_add(of->dq + (first + r) * dim, b->ds_rows + r * (PITCH / PER_OPERAND), PITCH / PER_OPERAND, 1,
                     b->k_across, depth_of(seen(token + r + TILE_ROWS - 1, first_key, keys)), dim);
    }
}

/* A row of dk or dv, `dim` wide: `sum` is added to `to`; or, where `own` is not NULL, both together become elements
 * there. */
static void add_key_gradient(int32_t dtype, int64_t dim, int stores, float factor, float *sum, float *to, void *own,
                             int64_t own_at)
{
    if (own == NULL) {
        if (stores)
            for (int64_t c = 0; c < dim; c++)
                to[c] = factor * sum[c];
        else
            for (int64_t c = 0; c < dim; c++)
                to[c] += factor * sum[c];
        return;
    }
    if (!stores) {
        for (int64_t c = 0; c < dim; c++)
            sum[c] = to[c] + factor * sum[c];
        factor = 1;
    }
    narrow_row(dtype, own, own_at, dim, factor, sum);
}

typedef struct {
    int64_t batch, kv_head;
    int64_t first_key, last_key;
    row_group rows; /* dq: its own, (group, rows, dim) */
} key_part;

/* Adds the sums of a block to the rows of its keys in dk and dv, or stores them where no pass was before and no segment
 * after. begin, end: the rows of the pass. */
static void add_key_gradients(const attention_job *job, const key_part *part, int64_t begin, int64_t end,
                              int64_t first_key, int64_t keys, const key_block *b)
{
    const s1f_attention_args *args = job->args;
    s1f_strides dk_strides = args->dk_strides, dv_strides = args->dv_strides;
    for (int64_t i = 0, run_end = 0; i < keys; i = run_end) {
        int64_t key = first_key + i, row = s1f_key_row(args, key, &run_end);
        float *dk = (float *)args->dk + s1f_at(dk_strides, part->batch, part->kv_head, row);
        float *dv = (float *)args->dv + s1f_at(dv_strides, part->batch, part->kv_head, row);
        run_end = s1f_min(keys, i + run_end);
        for (; i < run_end; i++, key++, dk += dk_strides.row, dv += dv_strides.row) {
            if (i + AHEAD < run_end) {
                fetch_bytes(dk + AHEAD * dk_strides.row, args->head_dim * (int64_t)sizeof *dk);
                fetch_bytes(dv + AHEAD * dv_strides.row, args->v_head_dim * (int64_t)sizeof *dv);
            }
            int stores = end == job->rows && key >= args->kept_kv_grads;
            int64_t own_row = key - args->q_start;
            int is_own = args->own_dk && own_row >= begin; /* and no row before sees it */
            add_key_gradient(args->dtype, args->head_dim, stores, (float)args->scale, b->dk + i * job->dim, dk,
                             is_own ? args->own_dk : NULL,
                             is_own ? s1f_at(args->own_dk_strides, part->batch, part->kv_head, own_row) : 0);
            add_key_gradient(args->dtype, args->v_head_dim, stores, 1, b->dv + i * job->v_dim, dv,
                             is_own ? args->own_dv : NULL,
                             is_own ? s1f_at(args->own_dv_strides, part->batch, part->kv_head, own_row) : 0);
        }
    }
}

/* A part of keys against rows [begin, end) of the query heads of its kv head. */
static void backward_pass(const attention_job *job, const key_part *part, int64_t begin, int64_t end, key_block *b)
{
    const s1f_attention_args *args = job->args;
    int64_t dim = job->dim, v_dim = job->v_dim, group = group_of(args), rows = job->rows;
    int64_t last_key = s1f_min(part->last_key, args->q_start + s1f_min(end, args->segment_len));
    int is_first_pass = end == rows; /* the last rows come first, and see every key */
    exponent_rule any = rule_of(args, part->batch, part->kv_head * group); /* its heads hide the same keys */
    for (int64_t key = part->first_key; key < last_key; key += KEYS) {
        int64_t keys = s1f_min(KEYS, last_key - key);
        int64_t first = s1f_max(begin, first_row_seeing(args, key));
        int is_hidden = block_visibility(&any, args->q_start + first, end - first, key, keys) == ALL_HIDDEN;
        if (is_hidden && !(is_first_pass && key + keys > args->kept_kv_grads)) /* nor is a zero to be stored */
            continue;
        memset(b->dk, 0, (size_t)(KEYS * (dim + v_dim)) * sizeof *b->dk);
        if (!is_hidden) {
            int64_t batch = part->batch, kv_head = part->kv_head;
            source_rows k = keys_of(args, args->k, args->k_strides, args->head_dim, batch, kv_head, key, keys);
            source_rows v = keys_of(args, args->v, args->v_strides, args->v_head_dim, batch, kv_head, key, keys);
            pack_panels(&k, dim, b->room, b->k_panels);
            pack_panels(&v, v_dim, b->room, b->v_panels);
            b->k_across = pack_across(&k, round_up(keys, PER_OPERAND), dim, b->k_room);
        }
        for (int64_t g = 0; g < group && !is_hidden; g++) {
            exponent_rule rule = rule_of(args, part->batch, part->kv_head * group + g);
            for (int64_t row = first; row < end; row += BACKWARD_ROWS)
                backward_block(job, &rule, &part->rows, g * rows + row, s1f_min(BACKWARD_ROWS, end - row),
                               args->q_start + row, key, keys, b);
        }
        add_key_gradients(job, part, begin, end, key, keys, b);
    }
}

/* A part of keys of one kv head, against every row of its query heads; with all that is to be done for these, where
 * it is the only part. */
static void backward_task(const attention_job *job, int64_t task, float *scratch)
{
    const s1f_attention_args *args = job->args;
    int64_t dim = job->dim, group = group_of(args), rows = job->rows;
    key_block b = {.s = scratch, .dp = scratch + MICRO_TILE, .derivative = scratch + 2 * MICRO_TILE};
    b.p = scratch + 3 * MICRO_TILE;
    b.ds = b.p + BLOCK;
    b.ds_rows = OPERAND_PAIRS ? b.ds + BLOCK : b.ds;
    b.k_panels = b.ds + (1 + OPERAND_PAIRS) * BLOCK;
    b.v_panels = b.k_panels + KEYS * job->depth;
    b.k_room = b.v_panels + KEYS * job->v_depth;
    b.dk = b.k_room + KEYS * job->depth;
    b.dv = b.dk + KEYS * dim;
    b.room = b.dv + KEYS * job->v_dim;

    int64_t before = job->cuts[0].heads * job->cuts[0].parts, is_last = task >= before;
    int64_t in_cut = is_last ? task - before : task, cut_heads = job->cuts[is_last].heads;
    int64_t kv_head = (is_last ? job->cuts[0].heads : 0) + in_cut % cut_heads, index = in_cut / cut_heads;
    int64_t is_whole = job->cuts[is_last].parts == 1, cut_keys = job->cuts[is_last].keys, pieces = num_pieces(job);
    key_part part = {.batch = kv_head / args->kv_heads,
                     .kv_head = kv_head % args->kv_heads,
                     .first_key = index * cut_keys,
                     .last_key = s1f_min((index + 1) * cut_keys, args->q_start + args->segment_len),
                     .rows = is_whole ? row_group_at(job, scratch + key_block_floats(job), 1)
                                      : shared_row_group(job, kv_head)};
    part.rows.dq += index * group * rows * dim;
    if (is_whole)
        for (int64_t piece = 0; piece < group * pieces; piece++)
            prepare_piece(job, &part.rows, kv_head, piece / pieces, piece % pieces, scratch);
    for (int64_t g = 0, first = first_row_seeing(args, part.first_key); g < group; g++)
        memset(part.rows.dq + (g * rows + first) * dim, 0, (size_t)((rows - first) * dim) * sizeof *part.rows.dq);

    int64_t pass_rows =
        group * rows <= WHOLE_PASS_ROWS ? rows : s1f_max(PASS_ROWS / group / BACKWARD_ROWS, 1) * BACKWARD_ROWS;
    for (int64_t begin = (rows - 1) / pass_rows * pass_rows; begin >= 0; begin -= pass_rows)
        backward_pass(job, &part, begin, s1f_min(begin + pass_rows, rows), &b);
    if (is_whole)
        for (int64_t piece = 0; piece < group * pieces; piece++)
            store_query_gradient(job, &part.rows, kv_head, piece / pieces, piece % pieces);
}

static void store_sink_gradients(const attention_job *job)
{
    const s1f_attention_args *args = job->args;
    int64_t pieces = num_pieces(job);
    for (int64_t head = 0; head < args->heads; head++) {
        double sum = 0;
        for (int64_t batch = 0; batch < args->batch; batch++)
            for (int64_t piece = 0; piece < pieces; piece++)
                sum += job->sink_sums[(batch * args->heads + head) * pieces + piece];
        ((float *)args->dsinks)[head] = (float)sum;
    }
}

static s1f_status backward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    attention_job job = backward_job(args);
    void *scratch, *owned;
    S1F_TRY(s1f_attention_scratch(context, backward_scratch_bytes(args, threads_of(context)), &scratch, &owned));
    int64_t heads = args->batch * args->kv_heads;
    int64_t cut_tasks = (heads - first_cut_head(&job)) * group_of(args) * num_pieces(&job);
    job.sink_sums = args->sinks && args->dsinks ? scratch : NULL;
    job.shared = (float *)scratch + sink_floats(&job);
    job.scratch = job.shared + shared_floats(&job, heads);
    job.workers = num_workers(&job, threads_of(context));
    run_tasks(&job, context, cut_tasks, prepare_task);
    run_tasks(&job, context, job.main_tasks, backward_task);
    run_tasks(&job, context, cut_tasks, query_gradient_task);
    if (job.sink_sums)
        store_sink_gradients(&job);
    free(owned);
    return S1F_OK;
}
