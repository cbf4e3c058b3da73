/* attention_blocked.inc.h - blocked attention: the one source of every instruction set's kernels.
 *
 * attention_forward.inc.h and attention_backward.inc.h say what a task of each does, and how. Here is what both share:
 * the sizes of blocks, how tasks are handed out, and the rows of a block.
 *
 * Products are of fp32, or of pairs of bf16 (OPERAND_PAIRS), where P and dS are rounded to bf16; sums, row statistics,
 * exponents and D are fp32 in both.
 *
 * Work on the diagonal is trimmed per micro-tile of rows: no product runs over keys that none of its rows sees, but for
 * the second half of a pair. A product may run over up to TILE_ROWS - 1 keys with a p of 0; so a NaN or infinity in one
 * token can reach the few rows before it, which the truth keeps clean. Rows of k and v that hold none of the T keys are
 * never read. A block of keys takes its rows from wherever its ranges have them, as it is packed, so results are those
 * of keys that lie one after another, to the bit.
 * Every sum has one order, whatever the number of threads.
 *
 * fp64 and heads wider than MAX_DIM are handed to the truth. */
#include "attention_internal.h"
#include "attention_micro.inc.h"

#include "attention_options.inc.h"
#include "attention_pack.inc.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

enum {
    MAX_DIM = 256,
    KEYS = 192,              /* of a packed block, which stays in L2: rates are flat from 128 to 384 */
    ROWS = 48 * PER_OPERAND, /* of S at a time in forward: rates are flat from 24 to 96 */
    ALIGNED = 16,            /* floats in a cache line */
    PITCH = KEYS + ALIGNED,  /* of S, P and dS: their rows lie on different sets of the L1 cache */
};

_Static_assert(KEYS % PANEL == 0, "a block of keys is whole panels");
_Static_assert(KEYS % TILE_ROWS == 0, "a tile of dk is TILE_ROWS keys");
_Static_assert(ROWS % TILE_ROWS == 0, "a block of rows is whole micro-tiles");
_Static_assert((KEYS + TILE_ROWS + VEC_LANES - 1) / VEC_LANES * VEC_LANES <= PITCH, "zeros past the keys fit");

/* ---- tasks, taken in order by whoever is free ---- */

typedef struct attention_job attention_job;
typedef void (*task_body)(const attention_job *job, int64_t task, float *scratch);

typedef struct {                /* backward: how the keys of some kv heads are cut into parts */
    int64_t heads, parts, keys; /* parts of a head, keys of a part */
} key_cut;

struct attention_job {
    const s1f_attention_args *args;
    int64_t dim, v_dim;     /* head_dim and v_head_dim, rounded up to whole vectors */
    int64_t depth, v_depth; /* the same number in operands */
    int64_t rows;    /* forward: segment rows of a chunk; backward: of the segment; rounded up to whole micro-tiles */
    int64_t chunks;  /* forward: of the segment */
    key_cut cuts[2]; /* backward: of the first of (B, Hkv), and of the last */
    int64_t main_tasks;
    float *shared;     /* backward: row groups of the heads that are cut, in their order */
    double *sink_sums; /* backward: of the pieces of each of (B, Hq), in their order; NULL: not asked for */

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
    s1f_run(context, s1f_min(job->workers, num_tasks), work, job);
}

static int32_t threads_of(const s1f_attention_context *context)
{
    return context ? context->num_threads : 1;
}

/* ---- shapes ---- */

static int covers(const s1f_attention_args *args)
{
    int takes_dtype = OPERAND_PAIRS ? args->dtype == S1F_BFLOAT16 : args->dtype != S1F_FLOAT64;
    return takes_dtype && args->head_dim <= MAX_DIM && args->v_head_dim <= MAX_DIM;
}

static int64_t group_of(const s1f_attention_args *args)
{
    return args->heads / args->kv_heads;
}

static int64_t num_workers(const attention_job *job, int32_t num_threads)
{
    return s1f_max(1, s1f_min(num_threads, job->main_tasks));
}

/* ---- rows of a block ---- */

/* Rows of a tensor whose heads are `dim` wide. */
static source_rows rows_of(const s1f_attention_args *args, const void *x, s1f_strides strides, int64_t dim,
                           int64_t batch, int64_t head, int64_t row, int64_t count)
{
    return (source_rows){.x = x,
                         .at = s1f_at(strides, batch, head, row),
                         .stride = strides.row,
                         .count = count,
                         .n = dim,
                         .dtype = args->dtype};
}

/* Keys [key, key + count) of k or v. */
static source_rows keys_of(const s1f_attention_args *args, const void *x, s1f_strides strides, int64_t dim,
                           int64_t batch, int64_t kv_head, int64_t key, int64_t count)
{
    source_rows all = rows_of(args, x, strides, dim, batch, kv_head, 0, args->q_start + args->segment_len);
    all.args = args->ranges ? args : NULL;
    return part_of(&all, key, count);
}

/* Keys of a block that the row sees, of those from `first_key` on; `token` is the row's own. */
static int64_t seen(int64_t token, int64_t first_key, int64_t keys)
{
    return s1f_max(0, s1f_min(keys, token + 1 - first_key));
}

/* x[c..] of a row of operands, from floats: as they are, or rounded to bf16. */
ALWAYS_INLINE void store_operands(float *row, int64_t c, vec x)
{
#if OPERAND_PAIRS
    VEC_STORE_BF16((uint16_t *)(void *)row + c, x);
#else
    VEC_STORE(row + c, x);
#endif
}

static int64_t depth_of(int64_t elements)
{
    return (elements + PER_OPERAND - 1) / PER_OPERAND;
}

/* S of `rows` rows, `pitch` apart, becomes exponents. token: of the first row. */
static void exponents_of_rows(const exponent_rule *rule, visibility seen_keys, int64_t rows, int64_t token,
                              int64_t first_key, int64_t keys, int64_t pitch, float *s, float *derivative)
{
    float hidden[PITCH];
    for (int64_t r = 0; r < rows; r++) {
        int64_t num_seen = seen(token + r, first_key, keys);
        if (seen_keys == SOME_HIDDEN)
            hide_keys(rule, token + r, first_key, num_seen, hidden);
        exponents_row(rule, s + r * pitch, derivative ? derivative + r * pitch : NULL,
                      seen_keys == SOME_HIDDEN ? hidden : NULL, token + r, first_key, num_seen);
    }
}

#include "attention_forward.inc.h"

#include "attention_backward.inc.h"

static int64_t scratch_bytes(const s1f_attention_args *args, int32_t num_threads, int backward)
{
    return backward ? backward_scratch_bytes(args, num_threads) : forward_scratch_bytes(args, num_threads);
}

const s1f_attention_kernels KERNELS = {KERNELS_NAME, covers, forward, backward, scratch_bytes};
