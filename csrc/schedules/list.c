/* list.c - a walk for each rule, in which every free rank chooses its next unit. */
#include "list.h"

#include "in_time.h"

#include <math.h>
#include <stdlib.h>

enum { NUM_PREFERENCES = 5, NUM_LIMITS = 4, NUM_RULES = 4 * NUM_PREFERENCES * NUM_LIMITS };
enum { MOST_LISTED = 20000000 }; /* units placed by all rules together: seconds at the most */

typedef enum { BACKWARD_FIRST, ALTERNATING, LONGEST_TAIL, OLDEST_FIRST, FORWARD_FIRST } preference;

typedef struct {
    preference prefers;
    int limit;       /* of memory, below the cap: 0 none; else ever fewer micro-batches */
    int is_patient;  /* waits for the unit that it puts first where that comes within the time it takes */
    int may_delay_w; /* W run only in gaps, else whenever no other unit could start at once */
} rule;

typedef struct {
    s1f_unit unit;
    double begin; /* seconds; INFINITY: waits for other ranks */
} choice;

typedef struct {
    const s1f_problem *problem;
    const double *tails; /* [F, I, W][stage][column] */
    s1f_search *search;
    rule rule;
    int32_t *stages;       /* [rank][v] ascending */
    int64_t *bytes_before; /* [stage][num_cells + 1]: of the first so many units in plain order */
    int64_t *batch_bytes;  /* [rank] of the largest micro-batch */
    int64_t *limits;       /* [rank] bytes under this rule */
    s1f_board board;
    s1f_edges *edges;
    int64_t *num_forwards; /* [stage] that have started, in plain order */
    int64_t *num_inputs;   /* [stage] */
    int64_t *num_weights;  /* [stage] */
    int64_t *held;         /* [rank] bytes */
    double *rank_free;     /* [rank] seconds */
    int32_t *last_pass;    /* [rank] F or I */
    choice *choices;       /* [rank] */
} lister;

static int64_t units_per_stage(const s1f_problem *p)
{
    return p->first_cell != NULL ? p->first_cell[p->num_microbatches] : (int64_t)p->num_microbatches * p->num_segments;
}

/* The i-th unit of a stage in plain order: I and W take segments backwards. */
static s1f_unit unit_at(const lister *l, s1f_pass pass, int32_t stage, int64_t i)
{
    return pass == S1F_PASS_FORWARD ? s1f_unit_of_cell(&l->board.shape, pass, stage, i)
                                    : s1f_unit_going_back(&l->board.shape, pass, stage, i);
}

static int64_t cell_of(const lister *l, s1f_unit unit)
{
    return unit.stage * s1f_num_columns(&l->board.shape) + s1f_column(&l->board.shape, unit);
}

static int table_of(s1f_unit unit)
{
    return unit.pass == S1F_PASS_FORWARD ? 0 : unit.pass == S1F_PASS_BACKWARD_INPUT ? 1 : 2;
}

static double seconds_of(const lister *l, s1f_unit unit)
{
    return l->problem->seconds[table_of(unit)][cell_of(l, unit)];
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

/* Bytes of the forwards of a stage that have started, of micro-batches from `from` on; none of them has gone back. */
static int64_t bytes_started(const lister *l, int32_t stage, int64_t from)
{
    const int64_t *before = &l->bytes_before[stage * (units_per_stage(l->problem) + 1)];
    int64_t first = s1f_first_cell(&l->board.shape, (int32_t)from);
    return l->num_forwards[stage] > first ? before[l->num_forwards[stage]] - before[first] : 0;
}

/* Whether an F fits on its rank now, with room left for the rest of the rank's oldest micro-batch. */
static int fits(const lister *l, int32_t rank, s1f_unit forward)
{
    const s1f_problem *p = l->problem;
    int64_t limit = l->limits[rank], bytes = p->unit_bytes[cell_of(l, forward)], oldest = p->num_microbatches;
    if (limit == INT64_MAX)
        return 1;
    if (l->held[rank] > limit - bytes)
        return 0;
    int32_t v = p->num_stages / p->num_ranks;
    for (int32_t i = 0; i < v; i++) {
        int64_t num_forwards = l->num_forwards[l->stages[rank * v + i]], next = p->num_microbatches;
        if (num_forwards < units_per_stage(p))
            next = s1f_unit_of_cell(&l->board.shape, S1F_PASS_FORWARD, 0, num_forwards).microbatch;
        oldest = next < oldest ? next : oldest;
    }
    if (forward.microbatch == oldest)
        return 1;
    int64_t later = 0;
    for (int32_t i = 0; i < v; i++)
        later += bytes_started(l, l->stages[rank * v + i], oldest + 1);
    return later + bytes <= limit - l->batch_bytes[rank];
}

/* -- the next unit of a rank --------------------------------------------------------------------------------------- */

/* The next F (I) of a stage and when its inputs are there; 0 where that is not known, or none is left. */
static int next_on_path(const lister *l, s1f_pass pass, int32_t stage, choice *next)
{
    int64_t i = pass == S1F_PASS_FORWARD ? l->num_forwards[stage] : l->num_inputs[stage];
    if (i == units_per_stage(l->problem))
        return 0;
    next->unit = unit_at(l, pass, stage, i);
    next->begin = s1f_board_ready(&l->board, next->unit);
    return !isinf(next->begin);
}

/* The rank's oldest W; 0: none. */
static int next_weight(const lister *l, int32_t rank, s1f_unit *weight)
{
    int32_t v = l->problem->num_stages / l->problem->num_ranks;
    double oldest = INFINITY;
    for (int32_t i = 0; i < v; i++) {
        int32_t stage = l->stages[rank * v + i];
        if (l->num_weights[stage] == l->num_inputs[stage])
            continue;
        s1f_unit unit = unit_at(l, S1F_PASS_BACKWARD_WEIGHT, stage, l->num_weights[stage]);
        double end = s1f_board_end(&l->board, unit, S1F_PRODUCT_INPUT_GRADIENT);
        if (end < oldest) {
            oldest = end;
            *weight = unit;
        }
    }
    return !isinf(oldest);
}

/* What a rule puts first has the least rank; the deeper stage among equals. */
static double standing(const lister *l, int32_t rank, s1f_unit unit)
{
    const s1f_problem *p = l->problem;
    int is_forward = unit.pass == S1F_PASS_FORWARD;
    double depth = is_forward ? unit.stage : 2.0 * p->num_stages - unit.stage;
    switch (l->rule.prefers) {
    case BACKWARD_FIRST: return is_forward * 2.0 * p->num_stages - unit.stage;
    case FORWARD_FIRST: return !is_forward * 2.0 * p->num_stages - unit.stage;
    case ALTERNATING: return (unit.pass == l->last_pass[rank]) * 2.0 * p->num_stages - unit.stage;
    case OLDEST_FIRST: return 2.0 * p->num_stages * unit.microbatch - depth;
    case LONGEST_TAIL: break;
    }
    return -l->tails[table_of(unit) * p->num_stages * s1f_num_columns(&l->board.shape) + cell_of(l, unit)];
}

/* Among the next F and I of the rank's stages. *is_full: an F would have gone first, but for memory. */
static choice choose_on_path(const lister *l, int32_t rank, int *is_full)
{
    int32_t v = l->problem->num_stages / l->problem->num_ranks;
    choice found = {.begin = INFINITY}, best = found;
    double now = l->rank_free[rank], earliest = INFINITY, best_standing = INFINITY, full_standing = INFINITY;
    for (int round = 0; round < 2; round++) /* first: when could any start? */
        for (int32_t i = 0; i < 2 * v; i++) {
            int32_t stage = l->stages[rank * v + i / 2];
            if (!next_on_path(l, i % 2 == 0 ? S1F_PASS_FORWARD : S1F_PASS_BACKWARD_INPUT, stage, &found))
                continue;
            found.begin = fmax(found.begin, now);
            int is_refused = found.unit.pass == S1F_PASS_FORWARD && !fits(l, rank, found.unit);
            double place = standing(l, rank, found.unit);
            if (is_refused) {
                if (found.begin <= now)
                    full_standing = fmin(full_standing, place);
                continue;
            }
            if (round == 0) {
                earliest = fmin(earliest, found.begin);
                continue;
            }
            double patience = l->rule.is_patient ? seconds_of(l, found.unit) : 0;
            if (found.begin <= earliest + patience && place < best_standing) {
                best_standing = place;
                best = found;
            }
        }
    *is_full = full_standing < best_standing;
    return best;
}

static choice choose(const lister *l, int32_t rank)
{
    int is_full;
    double now = l->rank_free[rank];
    choice best = choose_on_path(l, rank, &is_full);
    s1f_unit weight = {0};
    if (!next_weight(l, rank, &weight))
        return best;
    if (seconds_of(l, weight) <= 0) /* frees its memory for nothing */
        return (choice){weight, now};
    if (best.begin <= now && !is_full)
        return best;
    if (is_full || l->rule.may_delay_w || now + seconds_of(l, weight) <= best.begin * (1 + 1e-12))
        best = (choice){weight, now};
    return best;
}

/* -- a walk -------------------------------------------------------------------------------------------------------- */

static void start_unit(lister *l, int32_t rank, choice chosen)
{
    s1f_unit unit = chosen.unit;
    int64_t bytes = l->problem->unit_bytes[cell_of(l, unit)];
    double end = chosen.begin + seconds_of(l, unit);
    l->rank_free[rank] = end;
    s1f_board_start(&l->board, unit, end);
    if (unit.pass == S1F_PASS_FORWARD) {
        l->num_forwards[unit.stage]++;
        l->held[rank] += bytes;
    } else if (unit.pass == S1F_PASS_BACKWARD_INPUT) {
        l->num_inputs[unit.stage]++;
    } else {
        l->num_weights[unit.stage]++;
        l->held[rank] -= bytes;
    }
    if (unit.pass != S1F_PASS_BACKWARD_WEIGHT)
        l->last_pass[rank] = unit.pass;
    s1f_search_append(l->search, unit);
}

/* Memory of as many micro-batches as keep P ranks busy there and back (limit 1), as 1F1B does (2), or half of it
 * (3). */
static int64_t limit_of(const lister *l, int32_t rank)
{
    const s1f_problem *p = l->problem;
    static const double share[NUM_LIMITS] = {0, 2, 1, 0.5};
    double extra = share[l->rule.limit] * (p->num_ranks - 1) / p->num_segments;
    double limit = (double)l->batch_bytes[rank] * (1 + extra);
    int is_below = l->rule.limit > 0 && limit < (double)p->cap_bytes[rank];
    return is_below ? (int64_t)ceil(limit) : p->cap_bytes[rank];
}

/* Writes one start under l->rule and offers it. */
static void walk(lister *l)
{
    const s1f_problem *p = l->problem;
    s1f_board_clear(&l->board);
    for (int32_t stage = 0; stage < p->num_stages; stage++)
        l->num_forwards[stage] = l->num_inputs[stage] = l->num_weights[stage] = 0;
    for (int32_t rank = 0; rank < p->num_ranks; rank++) {
        l->limits[rank] = limit_of(l, rank);
        l->held[rank] = 0;
        l->rank_free[rank] = 0;
        l->last_pass[rank] = S1F_PASS_BACKWARD_INPUT;
    }
    for (int32_t rank = 0; rank < p->num_ranks; rank++)
        l->choices[rank] = choose(l, rank);
    s1f_search_begin(l->search);
    for (;;) {
        int32_t rank = 0;
        for (int32_t other = 1; other < p->num_ranks; other++)
            if (l->choices[other].begin < l->choices[rank].begin)
                rank = other;
        if (isinf(l->choices[rank].begin))
            break; /* all have ended */
        s1f_unit unit = l->choices[rank].unit;
        start_unit(l, rank, l->choices[rank]);
        l->choices[rank] = choose(l, rank);
        s1f_edge_list out = l->edges->kinds[s1f_kind(unit)].out;
        for (int32_t i = 0; i < out.count; i++) {
            int32_t other = l->edges->edges[out.edges[i]].destination_rank;
            l->choices[other] = choose(l, other);
        }
    }
    s1f_search_offer(l->search);
}

static void free_lister(lister *l)
{
    free(l->choices);
    free(l->last_pass);
    free(l->rank_free);
    free(l->held);
    free(l->num_weights);
    free(l->num_inputs);
    free(l->num_forwards);
    s1f_edges_free(l->edges);
    s1f_board_free(&l->board);
    free(l->limits);
    free(l->batch_bytes);
    free(l->bytes_before);
    free(l->stages);
}

static void count_bytes(lister *l)
{
    const s1f_problem *p = l->problem;
    const s1f_shape *shape = &l->board.shape;
    int64_t count = units_per_stage(p);
    for (int32_t stage = 0; stage < p->num_stages; stage++) {
        int64_t *before = &l->bytes_before[stage * (count + 1)];
        before[0] = 0;
        for (int64_t i = 0; i < count; i++)
            before[i + 1] = before[i] + p->unit_bytes[cell_of(l, unit_at(l, S1F_PASS_FORWARD, stage, i))];
    }
    for (int32_t rank = 0; rank < p->num_ranks; rank++)
        for (int32_t m = 0; m < p->num_microbatches; m++) {
            int64_t bytes = 0;
            for (int32_t stage = 0; stage < p->num_stages; stage++) {
                const int64_t *before = &l->bytes_before[stage * (count + 1)];
                bytes += p->rank_of_stage[stage] == rank
                             ? before[s1f_first_cell(shape, m + 1)] - before[s1f_first_cell(shape, m)]
                             : 0;
            }
            l->batch_bytes[rank] = bytes > l->batch_bytes[rank] ? bytes : l->batch_bytes[rank];
        }
}

static s1f_status create_lister(lister *l)
{
    const s1f_problem *p = l->problem;
    size_t P = (size_t)p->num_ranks, S = (size_t)p->num_stages;
    if ((l->stages = malloc(S * sizeof *l->stages)) == NULL ||
        (l->bytes_before = malloc(S * ((size_t)units_per_stage(p) + 1) * sizeof *l->bytes_before)) == NULL ||
        (l->batch_bytes = calloc(P, sizeof *l->batch_bytes)) == NULL ||
        (l->limits = malloc(P * sizeof *l->limits)) == NULL ||
        (l->num_forwards = malloc(S * sizeof *l->num_forwards)) == NULL ||
        (l->num_inputs = malloc(S * sizeof *l->num_inputs)) == NULL ||
        (l->num_weights = malloc(S * sizeof *l->num_weights)) == NULL ||
        (l->held = malloc(P * sizeof *l->held)) == NULL || (l->rank_free = malloc(P * sizeof *l->rank_free)) == NULL ||
        (l->last_pass = malloc(P * sizeof *l->last_pass)) == NULL ||
        (l->choices = malloc(P * sizeof *l->choices)) == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to list the units of %zu ranks", P);
    int32_t num_placed = 0;
    for (int32_t rank = 0; rank < p->num_ranks; rank++)
        for (int32_t stage = 0; stage < p->num_stages; stage++)
            if (p->rank_of_stage[stage] == rank)
                l->stages[num_placed++] = stage;
    s1f_shape shape = s1f_problem_shape(p);
    s1f_status status = s1f_board_create(&shape, p->transfer, &l->board);
    if (status == S1F_OK)
        count_bytes(l);
    return status != S1F_OK ? status : s1f_edges_create(&shape, &l->edges);
}

s1f_status s1f_offer_lists(const s1f_problem *problem, s1f_search *search)
{
    lister l = {.problem = problem, .search = search};
    int64_t columns = problem->first_cell != NULL ? units_per_stage(problem) : problem->num_segments, num_listed = 0;
    int64_t cells = problem->num_stages * columns;
    int64_t num_units = S1F_SPLIT_PASSES * problem->num_stages * units_per_stage(problem);
    double *tails = malloc((size_t)(S1F_SPLIT_PASSES * cells) * sizeof *tails);
    s1f_status status = tails != NULL ? create_lister(&l)
                                      : s1f_fail(S1F_ERR_MEMORY, "no memory to list %lld units", (long long)num_units);
    if (status == S1F_OK)
        s1f_problem_tails(problem, tails);
    l.tails = tails;
    for (int i = 0; i < NUM_RULES && num_listed <= MOST_LISTED && status == S1F_OK; i++) {
        l.rule = (rule){.prefers = (preference)(i % NUM_PREFERENCES),
                        .is_patient = i / NUM_PREFERENCES % 2,
                        .may_delay_w = i / NUM_PREFERENCES / 2 % 2,
                        .limit = i / NUM_PREFERENCES / 4};
        walk(&l);
        num_listed += num_units;
        status = s1f_check_interrupted();
    }
    free_lister(&l);
    free(tails);
    return status;
}
