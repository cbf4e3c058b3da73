/* attention_forward.inc.h - blocked attention, forward. Included by attention_blocked.inc.h.
 *
 * A task is a chunk of rows of all the query heads that share a kv head. It walks its keys in blocks; each
 * block is packed once for the whole chunk, and then, for a few rows at a time,
 *   S = Q K^T,   m' = max(m, rowmax X),   P = 2^(X - m'),   l = l 2^(m - m') + rowsum P,   O = O 2^(m - m') + P V
 * with exponents X = scale log2(e) S, or what the options make of S (attention_options.inc.h). At the end a sink's
 * power is added to l, and out is O / l. */

enum { CHUNK_ROWS = 1024 /* of a task, over its heads: they share packed keys and stay in L2 */ };

/* At least two tasks per thread: no row's sums depend on its chunk, so these may follow the number of threads. */
static attention_job forward_job(const s1f_attention_args *args, int32_t num_threads)
{
    int64_t heads = args->batch * args->kv_heads;
    int64_t dim = round_up(args->head_dim, VEC_LANES), v_dim = round_up(args->v_head_dim, VEC_LANES);
    int64_t wanted = num_threads > 1 ? (2 * num_threads + heads - 1) / heads : 1; /* chunks of the segment */
    int64_t rows = s1f_min(CHUNK_ROWS / group_of(args), (args->segment_len + wanted - 1) / wanted);
    rows = s1f_min(round_up(s1f_max(rows, 2 * ROWS), ROWS), round_up(args->segment_len, TILE_ROWS));
    int64_t depth = dim / PER_OPERAND, v_depth = v_dim / PER_OPERAND;
    int64_t chunk = group_of(args) * rows; /* q (chunk, depth), out (chunk, v_dim); highest (chunk), sums of vectors */
    return (attention_job){.args = args,
                           .dim = dim,
                           .v_dim = v_dim,
                           .depth = depth,
                           .v_depth = v_depth,
                           .rows = rows,
                           .chunks = (args->segment_len + rows - 1) / rows,
                           .main_tasks = heads * ((args->segment_len + rows - 1) / rows),
                           .scratch_floats = round_up(chunk * (depth + v_dim + 1 + VEC_LANES), ALIGNED) + ROWS * PITCH +
                                             KEYS * (depth + v_depth) + BLOCK_ROWS * dim};
}

static int64_t forward_scratch_bytes(const s1f_attention_args *args, int32_t num_threads)
{
    attention_job job = forward_job(args, num_threads);
    return num_workers(&job, num_threads) * job.scratch_floats * (int64_t)sizeof(float);
}

/* One row: S becomes P over the keys seen, as operands, and 0 up to the next whole vector after `until`. Exponents are
 * factor S, factor >= 0. Returns 2^(m - m'). Pairs take half of the room of S, so what is written was read before. */
ALWAYS_INLINE float softmax_row(float *s, float factor, int64_t num_seen, int64_t until, float *highest, float *sums)
{
    vec top = VEC_ALL(HIDDEN), other = top, zero = VEC_ALL(0), sum = zero;
    int64_t c = 0, whole = num_seen / VEC_LANES * VEC_LANES, rest = num_seen - whole;
    for (; c + 2 * VEC_LANES <= whole; c += 2 * VEC_LANES) {
        top = VEC_MAX(top, VEC_LOAD(s + c));
        other = VEC_MAX(other, VEC_LOAD(s + c + VEC_LANES));
    }
    if (c < whole)
        top = VEC_MAX(top, VEC_LOAD(s + c));
    if (rest)
        other = VEC_MAX(other, VEC_FIRST(VEC_LOAD(s + whole), rest, VEC_ALL(HIDDEN)));
    float before = *highest, now = VEC_HIGHEST(VEC_MAX(top, other)) * factor;
    now = num_seen > 0 && now > before ? now : before;
    vec shift = VEC_ALL(-now), by = VEC_ALL(factor);

    for (c = 0; c < whole; c += VEC_LANES) {
        vec p = exp2_vec(VEC_FMA(VEC_LOAD(s + c), by, shift));
        store_operands(s, c, p);
        sum = VEC_ADD(sum, p);
    }
    if (rest) {
        vec p = VEC_FIRST(exp2_vec(VEC_FMA(VEC_LOAD(s + whole), by, shift)), rest, zero);
        store_operands(s, whole, p);
        sum = VEC_ADD(sum, p);
        c += VEC_LANES;
    }
    for (; c < until; c += VEC_LANES)
        store_operands(s, c, zero);

    float shrink = 1;
    if (now != before) {
        shrink = before == LOWEST ? 0 : exp2f(before - now);
        *highest = now;
    }
    VEC_STORE(sums, VEC_FMA(VEC_LOAD(sums), VEC_ALL(shrink), sum));
    return shrink;
}

/* `rows` (whole micro-tiles) against one packed block of keys. token: of the first row. */
static void forward_block(const attention_job *job, const exponent_rule *rule, int64_t rows, int64_t token,
                          int64_t first_key, int64_t keys, const operand *q, const operand *k_panels, const operand *v,
                          float *s, float *out, float *highest, float *sums)
{
    int64_t v_dim = job->v_dim, depth = job->depth;
    visibility seen_keys = block_visibility(rule, token, rows, first_key, keys);
    if (seen_keys == ALL_HIDDEN)
        return;
    for (int64_t panel = 0; panel < keys; panel += PANEL)
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            multiply_panel(s + r * PITCH + panel, PITCH, q + r * depth, depth, k_panels + panel * depth, depth,
                           seen(token + r + TILE_ROWS - 1, first_key, keys) - panel);

    float factor = rule->transforms ? 1 : rule->factor;
    if (rule->transforms || seen_keys == SOME_HIDDEN)
        exponents_of_rows(rule, seen_keys, rows, token, first_key, keys, PITCH, s, NULL);
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        int64_t until = seen(token + r + TILE_ROWS - 1, first_key, keys);
        for (int64_t row = r; row < r + TILE_ROWS; row++) {
            float shrink = softmax_row(s + row * PITCH, factor, seen(token + row, first_key, keys), until,
                                       &highest[row], sums + row * VEC_LANES);
            if (shrink != 1)
                for (int64_t c = 0; c < v_dim; c += VEC_LANES)
                    VEC_STORE(out + row * v_dim + c, VEC_MUL(VEC_LOAD(out + row * v_dim + c), VEC_ALL(shrink)));
        }
        multiply_add(out + r * v_dim, s + r * PITCH, PITCH, 1, v, depth_of(until), v_dim);
    }
}

static void forward_store(const attention_job *job, int64_t batch, int64_t head, int64_t row, const float *out,
                          float highest, const float *sums)
{
    const s1f_attention_args *args = job->args;
    double sum = (double)sum_of_lanes(VEC_LOAD(sums)), top = (double)highest, shrink = 1;
    if (args->sinks) {
        double sink = s1f_sink(args, head) * LOG2_E;
        if (sink > top) {
            shrink = exp2(top - sink);
            top = sink;
            sum = sum * shrink + 1;
        } else {
            sum += exp2(sink - top);
        }
    }
    narrow_row(args->dtype, args->out, s1f_at(args->out_strides, batch, head, row), args->v_head_dim,
               (float)(shrink / sum), out);
    ((float *)args->lse)[(batch * args->heads + head) * args->segment_len + row] = (float)((top + log2(sum)) * LN_2);
}

/* A chunk of rows of one kv head's query heads. Later rows see more keys, so the last chunks come first. */
static void forward_task(const attention_job *job, int64_t task, float *scratch)
{
    const s1f_attention_args *args = job->args;
    int64_t kv_heads = args->batch * args->kv_heads, dim = job->dim, v_dim = job->v_dim, group = group_of(args);
    int64_t batch = task % kv_heads / args->kv_heads, kv_head = task % kv_heads % args->kv_heads;
    int64_t first_row = (job->chunks - 1 - task / kv_heads) * job->rows;
    int64_t num_rows = s1f_min(job->rows, args->segment_len - first_row), rows = round_up(num_rows, TILE_ROWS);
    int64_t first_token = args->q_start + first_row, last = first_token + num_rows, chunk = group * rows;

    operand *k_panels = scratch + ROWS * PITCH, *v_room = k_panels + KEYS * job->depth;
    operand *room = v_room + KEYS * job->v_depth, *q = room + BLOCK_ROWS * dim;
    float *s = scratch, *out = q + chunk * job->depth, *sums = out + chunk * v_dim, *highest = sums + chunk * VEC_LANES;

    memset(out, 0, (size_t)(chunk * (v_dim + VEC_LANES)) * sizeof *out);
    for (int64_t r = 0; r < chunk; r++)
        highest[r] = LOWEST;
    for (int64_t g = 0; g < group; g++) {
        source_rows from =
            rows_of(args, args->q, args->q_strides, args->head_dim, batch, kv_head * group + g, first_row, num_rows);
        pack_rows(&from, rows, dim, q + g * rows * job->depth);
    }

    exponent_rule any = rule_of(args, batch, kv_head * group); /* the heads of a group hide the same keys */
    for (int64_t key = first_visible(&any, first_token) / KEYS * KEYS; key < last; key += KEYS) {
        int64_t keys = s1f_min(KEYS, last - key);
        int64_t first_seeing = s1f_max(0, key - first_token) / TILE_ROWS * TILE_ROWS;
        if (block_visibility(&any, first_token + first_seeing, rows - first_seeing, key, keys) == ALL_HIDDEN)
            continue;
        source_rows k = keys_of(args, args->k, args->k_strides, args->head_dim, batch, kv_head, key, keys);
        source_rows values = keys_of(args, args->v, args->v_strides, args->v_head_dim, batch, kv_head, key, keys);
        pack_panels(&k, dim, room, k_panels);
        const operand *v = pack_across(&values, round_up(keys, PER_OPERAND), v_dim, v_room);
        for (int64_t g = 0; g < group; g++) {
            exponent_rule rule = rule_of(args, batch, kv_head * group + g);
            for (int64_t row = first_seeing; row < rows; row += ROWS) {
                int64_t r = g * rows + row;
                forward_block(job, &rule, s1f_min(ROWS, rows - row), first_token + row, key, keys, q + r * job->depth,
                              k_panels, v, s, out + r * v_dim, highest + r, sums + r * VEC_LANES);
            }
        }
    }

    for (int64_t g = 0; g < group; g++)
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t r = g * rows + row;
            forward_store(job, batch, kv_head * group + g, first_row + row, out + r * v_dim, highest[r],
                          sums + r * VEC_LANES);
        }
}

static s1f_status forward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    attention_job job = forward_job(args, threads_of(context));
    void *scratch, *owned;
    S1F_TRY(s1f_attention_scratch(context, forward_scratch_bytes(args, threads_of(context)), &scratch, &owned));
    job.scratch = scratch;
    job.workers = num_workers(&job, threads_of(context));
    run_tasks(&job, context, job.main_tasks, forward_task);
    free(owned);
    return S1F_OK;
}
