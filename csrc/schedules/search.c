/* search.c - times orders of one problem and moves units of their critical paths. */
#include "search.h"

#include <math.h>
#include <string.h>

enum {
    NUM_STARTS = 4,       /* orders to improve, the shortest first */
    MOST_STEPS = 20000,   /* of each; small problems settle within */
    MOST_TIMED = 8000000, /* units timed for each: some tenths of a second */
    HISTORY = 250         /* steps back whose makespan a new one may reach again */
};
static const double SLACK = 1e-9;        /* of the makespan: sums in another order */
static const double HISTORY_RISE = 1.01; /* how much longer than its start a search may begin to go */

typedef struct {
    double makespan;
    int32_t *order;
} start;

typedef struct {
    double *start, *end; /* [id] seconds */
} times;

struct s1f_search {
    const s1f_problem *problem;
    int32_t *order; /* ids, rank by rank */
    int32_t *place; /* [id]: index of the unit in the order */
    int64_t *live;  /* [index]: bytes of the rank before the unit */
    times now, trial;

    int32_t *from, *at, *awaited, *stack; /* [rank] while times are taken */
    double *rank_free, *rank_left;
    double *left, *trial_left; /* [index]: seconds of the rank's units from there on */

    uint64_t random;
    double history[HISTORY];
    int32_t num_starts;
    start starts[NUM_STARTS + 1]; /* shortest first; the last one is for writing */
};

s1f_status s1f_search_create(const s1f_problem *problem, s1f_pool *pool, s1f_search **out)
{
    s1f_search *x = s1f_pool_take(pool, 1, sizeof *x);
    S1F_TRY(s1f_pool_status(pool, "a search of orders"));
    size_t P = (size_t)problem->shape.num_ranks, N = (size_t)problem->num_units;
    x->problem = problem;
    x->order = s1f_pool_take(pool, N, sizeof *x->order);
    x->place = s1f_pool_take(pool, N, sizeof *x->place);
    x->live = s1f_pool_take(pool, N, sizeof *x->live);
    x->now.start = s1f_pool_take(pool, N, sizeof(double));
    x->now.end = s1f_pool_take(pool, N, sizeof(double));
    x->trial.start = s1f_pool_take(pool, N, sizeof(double));
    x->trial.end = s1f_pool_take(pool, N, sizeof(double));
    x->from = s1f_pool_take(pool, P, sizeof *x->from);
    x->at = s1f_pool_take(pool, P, sizeof *x->at);
    x->awaited = s1f_pool_take(pool, P, sizeof *x->awaited);
    x->stack = s1f_pool_take(pool, P, sizeof *x->stack);
    x->rank_free = s1f_pool_take(pool, P, sizeof *x->rank_free);
    x->rank_left = s1f_pool_take(pool, P, sizeof *x->rank_left);
    x->left = s1f_pool_take(pool, N, sizeof *x->left);
    x->trial_left = s1f_pool_take(pool, N, sizeof *x->trial_left);
    for (int i = 0; i <= NUM_STARTS; i++)
        x->starts[i].order = s1f_pool_take(pool, N, sizeof *x->order);
    S1F_TRY(s1f_pool_status(pool, "a search of orders"));
    *out = x;
    return S1F_OK;
}

double s1f_search_limit(const s1f_search *x)
{
    return x->num_starts == NUM_STARTS ? x->starts[NUM_STARTS - 1].makespan * (1 + SLACK) : INFINITY;
}

/* -- the time of an order ------------------------------------------------------------------------------------------ */

static double later_of(double a, double b)
{
    return a > b ? a : b;
}

/* Marks the times of all units as unknown. */
static void time_all(s1f_search *x)
{
    memcpy(x->from, x->problem->first, (size_t)x->problem->shape.num_ranks * sizeof *x->from);
}

/* Units of a rank from an index on have moved: what starts before the unit ahead of them ends keeps its time. */
static void time_behind(s1f_search *x, int32_t rank, int32_t index)
{
    const s1f_problem *p = x->problem;
    double moved = index > p->first[rank] ? x->now.end[x->order[index - 1]] : 0;
    for (int32_t other = 0; other < p->shape.num_ranks; other++) {
        int32_t low = p->first[other], high = p->first[other + 1];
        while (low < high && other != rank) {
            int32_t middle = low + (high - low) / 2;
            if (x->now.start[x->order[middle]] < moved)
                low = middle + 1;
            else
                high = middle;
        }
        x->from[other] = other == rank ? index : low;
    }
}

/* Fills x->trial for the units of x->order from x->from on; those before have their times in x->now. INFINITY where
 * ranks wait for each other, or the order is sure to take more than `limit`. */
static double time_order(s1f_search *x, double limit)
{
    const s1f_problem *p = x->problem;
    int32_t P = p->shape.num_ranks, num_stacked = 0, num_ended = 0;
    double last = 0;
    for (int32_t rank = P - 1; rank >= 0; rank--) {
        int32_t from = x->at[rank] = x->from[rank], is_first = from == p->first[rank];
        x->awaited[rank] = -1;
        x->rank_free[rank] = is_first ? 0 : x->now.end[x->order[from - 1]];
        x->rank_left[rank] = is_first ? p->work[rank] : from < p->first[rank + 1] ? x->left[from] : 0;
        x->stack[num_stacked++] = rank;
    }
    while (num_stacked > 0) {
        int32_t rank = x->stack[--num_stacked], i = x->at[rank], behind = p->first[rank + 1];
        double now = x->rank_free[rank], left = x->rank_left[rank];
        for (; i < behind; i++) {
            int32_t id = x->order[i], source = p->source[id], target = p->target[id];
            x->at[rank] = i;
            if (source >= 0) {
                int32_t place = x->place[source], of_source = p->rank[source];
                if (place >= x->at[of_source]) {
                    x->awaited[rank] = source;
                    break;
                }
                double end = place < x->from[of_source] ? x->now.end[source] : x->trial.end[source];
                now = later_of(now, end + p->lag[id]);
            }
            x->trial_left[i] = left;
            x->trial.start[id] = now;
            now += p->seconds[id];
            left -= p->seconds[id];
            if (now + later_of(left, p->tail[id]) > limit)
                return INFINITY;
            x->trial.end[id] = now;
            if (target >= 0 && x->awaited[p->rank[target]] == id) {
                x->awaited[p->rank[target]] = -1;
                x->stack[num_stacked++] = p->rank[target];
            }
        }
        x->at[rank] = i;
        x->rank_free[rank] = now;
        x->rank_left[rank] = left;
        if (i == behind) {
            num_ended++;
            last = later_of(last, now);
        }
    }
    return num_ended == P ? last : INFINITY;
}

/* Takes the tried times as those of the order. */
static void take_times(s1f_search *x)
{
    for (int32_t rank = 0; rank < x->problem->shape.num_ranks; rank++)
        for (int32_t i = x->from[rank]; i < x->problem->first[rank + 1]; i++) {
            int32_t id = x->order[i];
            x->now.start[id] = x->trial.start[id];
            x->now.end[id] = x->trial.end[id];
            x->left[i] = x->trial_left[i];
        }
}

/* Bytes before each unit of the rank from index `from` up to `to`, whose own bytes follow; 0 where the cap is
 * broken. */
static int count_live(s1f_search *x, int32_t rank, int32_t from, int32_t to)
{
    const s1f_problem *p = x->problem;
    int64_t cap = p->cap_bytes[rank], live = from == p->first[rank] ? 0 : x->live[from];
    for (int32_t i = from; i <= to; i++) {
        int64_t bytes = p->bytes[x->order[i]];
        x->live[i] = live;
        live += bytes;
        if (bytes > 0 && live > cap)
            return 0;
    }
    return 1;
}

/* -- starts -------------------------------------------------------------------------------------------------------- */

int32_t *s1f_search_order(s1f_search *x)
{
    return x->order;
}

static void find_places(s1f_search *x)
{
    for (int32_t i = 0; i < x->problem->num_units; i++)
        x->place[x->order[i]] = i;
}

/* Whether each unit comes after all that it waits for at its own stage, and each rank keeps the cap. */
static int is_order(s1f_search *x)
{
    const s1f_problem *p = x->problem;
    for (int32_t id = 0; id < p->num_units; id++)
        for (int i = 0; i < 2; i++)
            if (p->earlier[id][i] >= 0 && x->place[p->earlier[id][i]] >= x->place[id])
                return 0;
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        if (!count_live(x, rank, p->first[rank], p->first[rank + 1] - 1))
            return 0;
    return 1;
}

void s1f_search_offer(s1f_search *x)
{
    find_places(x);
    if (!is_order(x))
        return;
    time_all(x);
    double makespan = time_order(x, s1f_search_limit(x));
    if (isinf(makespan))
        return;
    for (int32_t other = 0; other < x->num_starts; other++)
        if (fabs(x->starts[other].makespan - makespan) <= SLACK * makespan)
            return; /* most likely the same order in another guise */
    start entry = {makespan, x->starts[NUM_STARTS].order};
    memcpy(entry.order, x->order, (size_t)x->problem->num_units * sizeof *x->order);
    int32_t i = x->num_starts;
    if (i < NUM_STARTS)
        x->starts[NUM_STARTS] = x->starts[x->num_starts++];
    for (; i > 0 && x->starts[i - 1].makespan > makespan; i--)
        x->starts[i] = x->starts[i - 1];
    x->starts[i] = entry;
}

/* -- search -------------------------------------------------------------------------------------------------------- */

/* 0 .. below - 1. [xorshift64*, Vigna 2016] */
static int32_t draw(s1f_search *x, int32_t below)
{
    x->random ^= x->random >> 12;
    x->random ^= x->random << 25;
    x->random ^= x->random >> 27;
    return (int32_t)((x->random * 2685821657736338717u >> 33) % (uint64_t)below);
}

static int follows_at_once(const s1f_search *x, int32_t i)
{
    return x->now.end[x->order[i - 1]] == x->now.start[x->order[i]];
}

/* The index of a unit on a random critical path that waits for the one before it on its rank, each with the same
 * chance; -1: no unit does, and nothing can be gained. */
static int32_t find_critical(s1f_search *x, double makespan)
{
    const s1f_problem *p = x->problem;
    int32_t rank = draw(x, p->shape.num_ranks), chosen = -1, num_seen = 0;
    while (x->now.end[x->order[p->first[rank + 1] - 1]] < makespan)
        rank = rank + 1 < p->shape.num_ranks ? rank + 1 : 0;
    int32_t id = x->order[p->first[rank + 1] - 1];
    for (;;) {
        int32_t i = x->place[id], source = p->source[id];
        int on_rank = i > p->first[p->rank[id]] && follows_at_once(x, i);
        int from_source = source >= 0 && x->now.end[source] + p->lag[id] == x->now.start[id];
        if (on_rank && !(from_source && draw(x, 2))) {
            if (draw(x, ++num_seen) == 0)
                chosen = i;
            id = x->order[i - 1];
        } else if (from_source) {
            id = source;
        } else {
            return chosen;
        }
    }
}

/* Moves the unit at index `from` to index `to`, those between by one. */
static void move(s1f_search *x, int32_t from, int32_t to)
{
    int32_t id = x->order[from], step = from < to ? 1 : -1;
    for (int32_t i = from; i != to; i += step) {
        x->order[i] = x->order[i + step];
        x->place[x->order[i]] = i;
    }
    x->order[to] = id;
    x->place[id] = to;
}

/* How far from index `from` towards `to` a unit may go without passing one that it must follow or precede. */
static int32_t reach(const s1f_search *x, int32_t from, int32_t to)
{
    s1f_unit unit = x->problem->units[x->order[from]];
    int32_t step = from < to ? 1 : -1, i = from;
    for (; i != to; i += step) {
        s1f_unit other = x->problem->units[x->order[i + step]];
        if (step > 0 ? s1f_problem_precedes(x->problem, unit, other) : s1f_problem_precedes(x->problem, other, unit))
            break;
    }
    return i;
}

/* A move of one of two units that follow each other on a critical path: past the other, to the end of their busy block,
 * or anywhere between. *from == *to where a rule stands against it. */
static void draw_move(s1f_search *x, int32_t i, int32_t *from, int32_t *to)
{
    const s1f_problem *p = x->problem;
    int32_t rank = p->rank[x->order[i]], last = i, way = draw(x, 6);
    if (way < 3) {
        *from = i;
        for (last = i - 1; last > p->first[rank] && follows_at_once(x, last);)
            last--;
        *to = way == 0 ? i - 1 : way == 1 ? last : last + draw(x, i - last);
    } else {
        *from = i - 1;
        while (last + 1 < p->first[rank + 1] && follows_at_once(x, last + 1))
            last++;
        *to = way == 3 ? i : way == 4 ? last : i + draw(x, last - i + 1);
    }
    *to = reach(x, *from, *to);
}

/* Tries one move from x->order, whose times are x->now; the makespan after it, `current` where it was taken back. */
static double step(s1f_search *x, double current, double limit)
{
    int32_t i = find_critical(x, current), from, to;
    if (i < 0)
        return current;
    draw_move(x, i, &from, &to);
    if (from == to)
        return current;
    int32_t rank = x->problem->rank[x->order[from]], low = from < to ? from : to, high = from < to ? to : from;
    time_behind(x, rank, low);
    move(x, from, to);
    double makespan = count_live(x, rank, low, high) ? time_order(x, limit) : INFINITY;
    if (isinf(makespan)) {
        move(x, to, from);
        count_live(x, rank, low, high);
        return current;
    }
    take_times(x);
    return makespan;
}

/* Late acceptance: a step stays where it is no longer than the order before it or the one HISTORY steps back. */
static void improve(s1f_search *x, start *best)
{
    const s1f_problem *p = x->problem;
    double current = best->makespan, slack = SLACK * current;
    int64_t most = MOST_TIMED / x->problem->num_units;
    memcpy(x->order, best->order, (size_t)x->problem->num_units * sizeof *x->order);
    find_places(x);
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        count_live(x, rank, x->problem->first[rank], x->problem->first[rank + 1] - 1);
    time_all(x);
    time_order(x, INFINITY);
    take_times(x);
    for (int i = 0; i < HISTORY; i++)
        x->history[i] = current * HISTORY_RISE;
    for (int64_t i = 0; i < most && i < MOST_STEPS && best->makespan > x->problem->bound + slack; i++) {
        double *late = &x->history[i % HISTORY];
        current = step(x, current, fmax(current, *late) + slack);
        *late = fmin(*late, current);
        if (current < best->makespan - slack) {
            memcpy(best->order, x->order, (size_t)x->problem->num_units * sizeof *x->order);
            best->makespan = current;
        }
    }
}

s1f_status s1f_search_run(s1f_search *x)
{
    double enough = x->problem->bound * (1 + SLACK);
    x->random = 88172645463325252u; /* anything but 0 */
    for (int32_t i = 0; i < x->num_starts && x->problem->words > 0 && s1f_search_makespan(x) > enough; i++) {
        S1F_TRY(s1f_check_interrupted());
        improve(x, &x->starts[i]);
    }
    return S1F_OK;
}

static const start *shortest(const s1f_search *x)
{
    const start *best = &x->starts[0];
    for (int32_t i = 1; i < x->num_starts; i++)
        best = x->starts[i].makespan < best->makespan ? &x->starts[i] : best;
    return best;
}

double s1f_search_makespan(const s1f_search *x)
{
    return x->num_starts > 0 ? shortest(x)->makespan : INFINITY;
}

s1f_status s1f_search_take(const s1f_search *x, int is_split, s1f_schedule *schedule)
{
    for (int32_t i = 0; i < x->problem->num_units; i++) {
        s1f_unit unit = x->problem->units[shortest(x)->order[i]];
        if (!is_split && unit.pass == S1F_PASS_BACKWARD_WEIGHT)
            continue;
        if (!is_split && unit.pass == S1F_PASS_BACKWARD_INPUT)
            unit.pass = S1F_PASS_BACKWARD;
        S1F_TRY(s1f_schedule_append(schedule, unit));
    }
    return S1F_OK;
}
