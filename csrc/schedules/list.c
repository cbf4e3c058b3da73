/* list.c - list scheduling, whose orders are starts of a search: a walk in time for each rule.
 *
 * A free rank takes the first unit, by its rule, among the units that are ready or, with patience, will be soon; it
 * takes a W if there is time left, or memory is short. No rule fills a rank with forwards that leave no room for the
 * rest of the oldest micro-batch, so ranks never wait for each other for ever [Dijkstra's banker: micro-batches end in
 * their order].
 *
 * Each stage has one unit of F, one of I and one of W that comes next in plain order, and when these can start is known
 * as soon as what they wait for has started. So a choice looks at 2 v numbers, and a unit that starts changes those of
 * its own stage and of the one that waits for it. */
#include "search.h"

#include <math.h>
#include <string.h>

enum { NUM_PREFERENCES = 5, NUM_LIMITS = 4, NUM_RULES = 4 * NUM_PREFERENCES * NUM_LIMITS };
enum { MOST_LISTED = 8000000 }; /* units placed by all rules together: a second at the most */

typedef enum { BACKWARD_FIRST, ALTERNATING, LONGEST_TAIL, OLDEST_FIRST, FORWARD_FIRST } preference;
enum { FORWARD, INPUT, WEIGHT }; /* rows of tables by pass */

typedef struct {
    preference prefers;
    int limit;       /* of memory, below the cap: 0 none; else ever fewer micro-batches */
    int is_patient;  /* a rank waits for the rule's first unit if that comes within the time it takes */
    int may_delay_w; /* 1: W run only in gaps; 0: whenever no other unit could start at once */
} rule;

typedef struct {
    int32_t pass, stage;
    double begin; /* seconds; INFINITY: the rank waits for other ranks */
} choice;

/* The next F or I of a stage. */
typedef struct {
    int32_t number;
    double ready;   /* time of its last input; INFINITY: an input has not started, or no unit is left */
    int is_refused; /* there is no room for it; as looked at last */
} next_unit;

typedef struct {
    int64_t batch_bytes; /* of the largest micro-batch */
    int64_t limit;       /* bytes under this rule */
    int64_t held;        /* bytes */
    double free;         /* seconds: when its last unit ends */
    double left;         /* seconds of its units that have not started */
    int32_t *behind;     /* behind its last unit in the start that is written */
    int32_t last_pass;   /* F or I */
    choice choice;
} rank_state;

typedef struct {
    const s1f_problem *problem;
    s1f_search *search;
    s1f_pool pool; /* of all arrays */
    rule rule;
    rank_state *ranks;
    int32_t *stages;       /* [rank][v] ascending */
    int32_t *going_back;   /* [i]: the cell that goes back as the i-th */
    int64_t *bytes_before; /* [stage][num_cells + 1]: of the first so many Fs in plain order */
    double *end;           /* [number] seconds; INFINITY: not started */
    int32_t *num_started;  /* [pass][stage], in plain order */
    next_unit *next;       /* [F, I][stage] */
} lister;

/* The i-th unit of a stage in plain order: I and W take segments backwards. */
static int32_t number_at(const lister *l, int32_t pass, int32_t stage, int32_t i)
{
    int32_t cell = pass == FORWARD ? i : l->going_back[i];
    return (pass * l->problem->shape.num_stages + stage) * l->problem->num_cells + cell;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

/* Bytes of the forwards of a stage that have started, of micro-batches from `from` on; none of them has gone back. */
static int64_t bytes_started(const lister *l, int32_t stage, int32_t from)
{
    const int64_t *before = &l->bytes_before[(int64_t)stage * (l->problem->num_cells + 1)];
    int64_t first = s1f_first_cell(&l->problem->shape, from), started = l->num_started[stage];
    return started > first ? before[started] - before[first] : 0;
}

static int32_t microbatch_of(const lister *l, int32_t cell)
{
    return l->problem->units[cell].microbatch; /* the first numbers are those of stage 0 */
}

/* The micro-batch of the next F of a stage, M where none is left. */
static int32_t next_microbatch(const lister *l, int32_t stage)
{
    int32_t i = l->num_started[stage];
    return i < l->problem->num_cells ? microbatch_of(l, i) : l->problem->shape.num_microbatches;
}

/* Whether an F fits on its rank now, with room left for the rest of the rank's oldest micro-batch. */
static int fits(const lister *l, int32_t rank, int32_t stage)
{
    const s1f_problem *p = l->problem;
    int64_t limit = l->ranks[rank].limit, bytes = l->problem->bytes[l->next[stage].number], later = 0;
    if (limit == INT64_MAX)
        return 1;
    if (l->ranks[rank].held > limit - bytes)
        return 0;
    int32_t v = p->shape.num_stages / p->shape.num_ranks, oldest = p->shape.num_microbatches;
    for (int32_t i = 0; i < v; i++) {
        int32_t next = next_microbatch(l, l->stages[rank * v + i]);
        oldest = next < oldest ? next : oldest;
    }
    if (next_microbatch(l, stage) == oldest)
        return 1;
    for (int32_t i = 0; i < v; i++)
        later += bytes_started(l, l->stages[rank * v + i], oldest + 1);
    return later + bytes <= limit - l->ranks[rank].batch_bytes;
}

/* -- the next unit of a rank --------------------------------------------------------------------------------------- */

/* Looks anew at the next F or I of a stage. */
static void look(lister *l, int32_t pass, int32_t stage)
{
    int32_t S = l->problem->shape.num_stages, i = l->num_started[pass * S + stage];
    next_unit *next = &l->next[pass * S + stage];
    *next = (next_unit){-1, INFINITY, 0};
    if (i == l->problem->num_cells)
        return;
    next->number = number_at(l, pass, stage, i);
    int32_t source = l->problem->source[next->number];
    if (pass == INPUT && l->going_back[i] >= l->num_started[stage])
        return; /* the cell's own F has not started */
    next->ready = source < 0 ? 0 : l->end[source] + l->problem->lag[next->number];
}

/* The stage of the rank's oldest W; -1: none. */
static int32_t find_weight(const lister *l, int32_t rank)
{
    int32_t S = l->problem->shape.num_stages, v = S / l->problem->shape.num_ranks, found = -1;
    double oldest = INFINITY;
    for (int32_t i = 0; i < v; i++) {
        int32_t stage = l->stages[rank * v + i], done = l->num_started[WEIGHT * S + stage];
        if (done == l->num_started[INPUT * S + stage])
            continue;
        double end = l->end[number_at(l, INPUT, stage, done)];
        if (end < oldest) {
            oldest = end;
            found = stage;
        }
    }
    return found;
}

/* What a rule puts first has the least rank; the deeper stage among equals. */
static double standing(const lister *l, int32_t rank, int32_t pass, int32_t stage)
{
    double twice = 2.0 * l->problem->shape.num_stages;
    int32_t number = l->next[pass * l->problem->shape.num_stages + stage].number;
    switch (l->rule.prefers) {
    case BACKWARD_FIRST: return (pass == FORWARD) * twice - stage;
    case FORWARD_FIRST: return (pass != FORWARD) * twice - stage;
    case ALTERNATING: return (pass == l->ranks[rank].last_pass) * twice - stage;
    case OLDEST_FIRST:
        return twice * microbatch_of(l, number % l->problem->num_cells) - (pass == FORWARD ? stage : twice - stage);
    case LONGEST_TAIL: break;
    }
    return -l->problem->tail[number];
}

/* When any of the rank's next F and I could start; looks at which have room. */
static double find_earliest(lister *l, int32_t rank, double *full_standing)
{
    int32_t S = l->problem->shape.num_stages, v = S / l->problem->shape.num_ranks;
    double now = l->ranks[rank].free, earliest = INFINITY;
    *full_standing = INFINITY;
    for (int32_t i = 0; i < v; i++) {
        int32_t stage = l->stages[rank * v + i];
        next_unit *forward = &l->next[stage], *input = &l->next[S + stage];
        earliest = fmin(earliest, input->ready);
        forward->is_refused = !isinf(forward->ready) && !fits(l, rank, stage);
        if (!forward->is_refused)
            earliest = fmin(earliest, forward->ready);
        else if (forward->ready <= now)
            *full_standing = fmin(*full_standing, standing(l, rank, FORWARD, stage));
    }
    return fmax(earliest, now);
}

/* Among the next F and I of the rank's stages. *is_full: an F would have gone first, but for memory. */
static choice choose_on_path(lister *l, int32_t rank, int *is_full)
{
    int32_t S = l->problem->shape.num_stages, v = S / l->problem->shape.num_ranks;
    double best_standing = INFINITY, full_standing, now = l->ranks[rank].free;
    double earliest = find_earliest(l, rank, &full_standing);
    choice best = {FORWARD, -1, INFINITY};
    for (int32_t i = 0; i < 2 * v && !isinf(earliest); i++) {
        int32_t stage = l->stages[rank * v + i / 2], pass = i % 2 == 0 ? FORWARD : INPUT;
        const next_unit *next = &l->next[pass * S + stage];
        if (isinf(next->ready) || next->is_refused)
            continue;
        double begin = fmax(next->ready, now), patience = l->rule.is_patient ? l->problem->seconds[next->number] : 0;
        if (begin > earliest + patience)
            continue;
        double place = standing(l, rank, pass, stage);
        if (place < best_standing) {
            best_standing = place;
            best = (choice){pass, stage, begin};
        }
    }
    *is_full = full_standing < best_standing;
    return best;
}

static choice choose(lister *l, int32_t rank)
{
    int is_full;
    double now = l->ranks[rank].free;
    choice best = choose_on_path(l, rank, &is_full);
    int32_t stage = find_weight(l, rank);
    if (stage < 0)
        return best;
    choice weight = {WEIGHT, stage, now};
    double seconds =
        l->problem->seconds[number_at(l, WEIGHT, stage, l->num_started[WEIGHT * l->problem->shape.num_stages + stage])];
    if (seconds <= 0) /* frees its memory for nothing */
        return weight;
    if (best.begin <= now && !is_full)
        return best;
    return is_full || l->rule.may_delay_w || now + seconds <= best.begin * (1 + 1e-12) ? weight : best;
}

/* -- a walk -------------------------------------------------------------------------------------------------------- */

/* Starts the chosen unit; its number. */
static int32_t start_unit(lister *l, int32_t rank, choice chosen)
{
    int32_t S = l->problem->shape.num_stages, *started = &l->num_started[chosen.pass * S + chosen.stage];
    int32_t number = number_at(l, chosen.pass, chosen.stage, (*started)++);
    l->ranks[rank].free = l->end[number] = chosen.begin + l->problem->seconds[number];
    l->ranks[rank].left -= l->problem->seconds[number];
    l->ranks[rank].held += l->problem->bytes[number];
    if (chosen.pass != WEIGHT) {
        l->ranks[rank].last_pass = chosen.pass;
        look(l, chosen.pass, chosen.stage);
    }
    if (chosen.pass == FORWARD)
        look(l, INPUT, chosen.stage); /* which may have waited for it */
    *l->ranks[rank].behind++ = number;
    return number;
}

/* The unit that waits for this one can start, if it is the next of its stage: its rank may choose anew. */
static void tell_target(lister *l, int32_t number)
{
    int32_t target = l->problem->target[number], S = l->problem->shape.num_stages;
    if (target < 0)
        return;
    int32_t row = target / l->problem->num_cells; /* [pass][stage] */
    if (l->next[row].number != target)
        return;
    look(l, row / S, row % S);
    l->ranks[l->problem->rank[target]].choice = choose(l, l->problem->rank[target]);
}

/* Memory of as many micro-batches as keep P ranks busy there and back (limit 1), as 1F1B does (2), or half of it
 * (3). */
static int64_t limit_of(const lister *l, int32_t rank)
{
    const s1f_problem *p = l->problem;
    static const double share[NUM_LIMITS] = {0, 2, 1, 0.5};
    double extra = share[l->rule.limit] * (p->shape.num_ranks - 1) / p->shape.num_segments;
    double limit = (double)l->ranks[rank].batch_bytes * (1 + extra);
    int is_below = l->rule.limit > 0 && limit < (double)p->cap_bytes[rank];
    return is_below ? (int64_t)ceil(limit) : p->cap_bytes[rank];
}

static void reset(lister *l)
{
    const s1f_problem *p = l->problem;
    for (int32_t i = 0; i < l->problem->num_units; i++)
        l->end[i] = INFINITY;
    memset(l->num_started, 0, (size_t)(S1F_SPLIT_PASSES * p->shape.num_stages) * sizeof *l->num_started);
    for (int32_t stage = 0; stage < p->shape.num_stages; stage++) {
        look(l, FORWARD, stage);
        look(l, INPUT, stage);
    }
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++) {
        l->ranks[rank] = (rank_state){.batch_bytes = l->ranks[rank].batch_bytes,
                                      .limit = limit_of(l, rank),
                                      .left = p->work[rank],
                                      .behind = s1f_search_order(l->search) + p->first[rank],
                                      .last_pass = INPUT};
    }
}

/* Writes one start under l->rule and offers it, unless it would be forgotten. */
static void walk(lister *l)
{
    const s1f_problem *p = l->problem;
    double limit = s1f_search_limit(l->search);
    reset(l);
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        l->ranks[rank].choice = choose(l, rank);
    for (;;) {
        int32_t rank = 0;
        for (int32_t other = 1; other < p->shape.num_ranks; other++)
            if (l->ranks[other].choice.begin < l->ranks[rank].choice.begin)
                rank = other;
        if (isinf(l->ranks[rank].choice.begin))
            break; /* all have ended */
        int32_t number = start_unit(l, rank, l->ranks[rank].choice);
        if (l->ranks[rank].free + fmax(l->ranks[rank].left, p->tail[number]) > limit)
            return; /* the rank ends too late for the order to be kept */
        l->ranks[rank].choice = choose(l, rank);
        tell_target(l, number);
    }
    s1f_search_offer(l->search);
}

static void count_bytes(lister *l)
{
    const s1f_problem *p = l->problem;
    int64_t count = l->problem->num_cells;
    for (int32_t stage = 0; stage < p->shape.num_stages; stage++) {
        int64_t *before = &l->bytes_before[stage * (count + 1)];
        for (int64_t i = 0; i < count; i++)
            before[i + 1] = before[i] + l->problem->bytes[stage * count + i];
    }
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        for (int32_t m = 0; m < p->shape.num_microbatches; m++) {
            int64_t bytes = 0;
            for (int32_t stage = 0; stage < p->shape.num_stages; stage++) {
                const int64_t *before = &l->bytes_before[stage * (count + 1)];
                if (p->shape.rank_of_stage[stage] == rank)
                    bytes += before[s1f_first_cell(&p->shape, m + 1)] - before[s1f_first_cell(&p->shape, m)];
            }
            l->ranks[rank].batch_bytes = bytes > l->ranks[rank].batch_bytes ? bytes : l->ranks[rank].batch_bytes;
        }
}

static s1f_status create_lister(lister *l)
{
    const s1f_problem *p = l->problem;
    size_t P = (size_t)p->shape.num_ranks, S = (size_t)p->shape.num_stages;
    size_t count = (size_t)l->problem->num_cells;
    l->stages = s1f_pool_take(&l->pool, S, sizeof *l->stages);
    l->going_back = s1f_pool_take(&l->pool, count, sizeof *l->going_back);
    l->bytes_before = s1f_pool_take(&l->pool, S * (count + 1), sizeof *l->bytes_before);
    l->end = s1f_pool_take(&l->pool, (size_t)l->problem->num_units, sizeof *l->end);
    l->num_started = s1f_pool_take(&l->pool, S1F_SPLIT_PASSES * S, sizeof *l->num_started);
    l->next = s1f_pool_take(&l->pool, 2 * S, sizeof *l->next);
    l->ranks = s1f_pool_take(&l->pool, P, sizeof *l->ranks);
    S1F_TRY(s1f_pool_status(&l->pool, "lists of units"));
    int32_t num_placed = 0;
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        for (int32_t stage = 0; stage < p->shape.num_stages; stage++)
            if (p->shape.rank_of_stage[stage] == rank)
                l->stages[num_placed++] = stage;
    for (int32_t i = 0; i < p->num_cells; i++)
        l->going_back[i] = (int32_t)s1f_cell(&p->shape, s1f_unit_going_back(&p->shape, S1F_PASS_BACKWARD_INPUT, 0, i));
    count_bytes(l);
    return S1F_OK;
}

/* Whether the rule walks as one before it does: W that take no time are never put off, and a limit may be the cap. */
static int is_repeated(const lister *l)
{
    const s1f_problem *p = l->problem;
    int is_below = l->rule.limit == 0, has_weights = !l->rule.may_delay_w;
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        is_below |= limit_of(l, rank) < p->cap_bytes[rank];
    for (int32_t i = WEIGHT * p->shape.num_stages * l->problem->num_cells; i < l->problem->num_units; i++)
        has_weights |= l->problem->seconds[i] > 0;
    return !is_below || !has_weights;
}

s1f_status s1f_offer_lists(const s1f_problem *problem, s1f_search *search)
{
    lister l = {.problem = problem, .search = search};
    int64_t num_listed = 0;
    s1f_status status = create_lister(&l);
    for (int i = 0; i < NUM_RULES && num_listed <= MOST_LISTED && status == S1F_OK; i++) {
        l.rule = (rule){.prefers = (preference)(i % NUM_PREFERENCES),
                        .is_patient = i / NUM_PREFERENCES % 2,
                        .may_delay_w = i / NUM_PREFERENCES / 2 % 2,
                        .limit = i / NUM_PREFERENCES / 4};
        if (!is_repeated(&l))
            walk(&l);
        num_listed += problem->num_units;
        status = s1f_check_interrupted();
    }
    s1f_pool_free(&l.pool);
    return status;
}
