/* critical.c - the walk of simulate.c once more, from the last completed unit to the first. */
#include "critical.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
    const s1f_tape *tape;
    const s1f_costs *costs;
    s1f_simulation *simulation;
    int64_t *sender;  /* [edge][message] number of the unit that sends it, on the source's rank */
    int64_t *granter; /* [edge][message] number of the unit after which its place is posted, on the
                                               destination's rank; -1: at the start */
    double *latest_arrival, *latest_credit; /* [edge][message] seconds */
    int64_t *first;                         /* [edge] where its messages start in the arrays above */
    int64_t *num_sent, *num_posted;         /* [edge] by the units not yet walked back over */
    double *latest_transfer;                /* [edge] latest begin of the next message */
    int64_t *left;                          /* [rank] units not yet walked back over */
    double *latest_start;                   /* [rank] of the unit walked back over last */
} walk;

static void free_walk(walk *w)
{
    free(w->sender);
    free(w->granter);
    free(w->latest_arrival);
    free(w->latest_credit);
    free(w->first);
    free(w->num_sent);
    free(w->num_posted);
    free(w->latest_transfer);
    free(w->left);
    free(w->latest_start);
}

static int create_walk(walk *w)
{
    size_t num_edges = (size_t)w->tape->num_edges, num_ranks = (size_t)w->tape->num_ranks, total = 1; /* never 0 */
    if ((w->first = calloc(num_edges + 1, sizeof *w->first)) == NULL)
        return 0;
    for (size_t e = 0; e < num_edges; e++) {
        w->first[e] = (int64_t)total;
        total += (size_t)w->tape->edges[e].num_messages;
    }
    w->sender = malloc(total * sizeof *w->sender);
    w->granter = malloc(total * sizeof *w->granter);
    w->latest_arrival = malloc(total * sizeof *w->latest_arrival);
    w->latest_credit = malloc(total * sizeof *w->latest_credit);
    w->num_sent = calloc(num_edges + 1, sizeof *w->num_sent);
    w->num_posted = calloc(num_edges + 1, sizeof *w->num_posted);
    w->latest_transfer = malloc((num_edges + 1) * sizeof *w->latest_transfer);
    w->left = malloc(num_ranks * sizeof *w->left);
    w->latest_start = malloc(num_ranks * sizeof *w->latest_start);
    return w->sender && w->granter && w->latest_arrival && w->latest_credit && w->num_sent && w->num_posted &&
           w->latest_transfer && w->left && w->latest_start;
}

static const s1f_tape_kind *kind_of(const walk *w, int32_t rank, int64_t i)
{
    return &w->tape->kinds[w->tape->units[rank][i].kind];
}

/* Who sends each message, and who grants its place. */
static void find_ends(walk *w)
{
    for (int32_t e = 0; e < w->tape->num_edges; e++) {
        const s1f_edge *edge = &w->tape->edges[e];
        for (; w->num_posted[e] < edge->num_places && w->num_posted[e] < edge->num_messages; w->num_posted[e]++)
            w->granter[w->first[e] + w->num_posted[e]] = -1;
    }
    for (int32_t rank = 0; rank < w->tape->num_ranks; rank++)
        for (int64_t i = 0; i < w->tape->num_units[rank]; i++) {
            const s1f_tape_kind *kind = kind_of(w, rank, i);
            if (kind->out >= 0)
                w->sender[w->first[kind->out] + w->num_sent[kind->out]++] = i;
            for (int j = 0; j < 2; j++) {
                int32_t e = kind->posts[j];
                if (e >= 0 && w->num_posted[e] < w->tape->edges[e].num_messages)
                    w->granter[w->first[e] + w->num_posted[e]++] = i;
            }
        }
}

/* Seconds of the edge's link for one byte, or its latency. */
static double of_edge(const walk *w, const double *values, int32_t edge)
{
    return values == NULL ? 0 : values[s1f_edge_boundary(&w->tape->edges[edge])];
}

static double lesser(double a, double b)
{
    return a < b ? a : b;
}

/* 1 for the second unit of a pair. */
static int is_second(const walk *w, int32_t rank, int64_t i)
{
    return i > 0 && w->tape->units[rank][i - 1].is_pair;
}

static void walk_back_over(walk *w, int32_t rank)
{
    int64_t i = --w->left[rank];
    const s1f_tape_unit *unit = &w->tape->units[rank][i];
    const s1f_tape_kind *kind = kind_of(w, rank, i);
    double through = w->latest_start[rank]; /* latest time at which the rank is through with the unit */
    for (int j = 1; j >= 0; j--) {
        int32_t e = kind->posts[j];
        int64_t last = e >= 0 ? w->first[e] + w->num_posted[e] - 1 : 0;
        if (e >= 0 && w->num_posted[e] > 0 && w->granter[last] == i) {
            w->num_posted[e]--;
            through = lesser(through, w->latest_credit[last]);
        }
    }
    double latest_end = through;
    if (kind->out >= 0) {
        int32_t e = kind->out;
        int64_t message = w->first[e] + --w->num_sent[e];
        double scale = s1f_message_scale(w->tape, w->costs, e, w->num_sent[e]);
        double latency = scale * of_edge(w, w->costs->latency, e);
        double bytes = w->costs->message_bytes == NULL ? 0 : (double)w->costs->message_bytes[unit->segment];
        double passed = lesser(w->latest_arrival[message] - latency, w->latest_transfer[e]);
        w->latest_transfer[e] = passed - scale * (bytes * of_edge(w, w->costs->seconds_per_byte, e));
        latest_end = lesser(through, w->latest_transfer[e]) - w->costs->send;
        w->latest_credit[message] = latest_end;
    }
    if (is_second(w, rank, i)) { /* it ends when the first does, which leaves first */
        w->latest_start[rank] = latest_end;
        return;
    }
    double start = w->simulation->start[rank][i], end = w->simulation->end[rank][i];
    latest_end = lesser(latest_end, w->simulation->makespan);
    w->latest_start[rank] = latest_end - (end - start);
    for (int64_t j = i; j <= i + unit->is_pair; j++) {
        int32_t in = kind_of(w, rank, j)->in;
        w->simulation->slack[rank][j] = latest_end > end ? latest_end - end : 0; /* below 0 by rounding */
        if (in >= 0)
            w->latest_arrival[w->first[in] + w->tape->units[rank][j].awaited] = w->latest_start[rank];
    }
}

static void find_slack(walk *w)
{
    int64_t total = 0;
    for (int32_t rank = 0; rank < w->tape->num_ranks; rank++) {
        w->left[rank] = w->tape->num_units[rank];
        w->latest_start[rank] = INFINITY;
        total += w->tape->num_units[rank];
    }
    for (int32_t e = 0; e < w->tape->num_edges; e++)
        w->latest_transfer[e] = INFINITY;
    while (total > 0)
        walk_back_over(w, w->simulation->completed[--total]);
}

/* The unit that sends the message which decided when message `message` left its link. */
static s1f_numbered_unit first_of_busy_link(const walk *w, int32_t edge, int64_t message)
{
    int32_t rank = w->tape->edges[edge].source_rank;
    while (w->simulation->causes[rank][w->sender[w->first[edge] + message]] & S1F_CAUSE_LINK)
        message--;
    return (s1f_numbered_unit){rank, w->sender[w->first[edge] + message]};
}

/* The unit that granted the place for which the message of this one waited. */
static s1f_numbered_unit granting(const walk *w, s1f_numbered_unit unit)
{
    int32_t e = kind_of(w, unit.rank, unit.i)->out;
    int64_t low = 0, high = w->tape->edges[e].num_messages - 1; /* senders are in ascending order */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (w->sender[w->first[e] + middle] < unit.i)
            low = middle + 1;
        else
            high = middle;
    }
    return (s1f_numbered_unit){w->tape->edges[e].destination_rank, w->granter[w->first[e] + low]};
}

/* The unit that decided when the rank was through with this one: itself, or the one that granted the place for which its
 * message waited. A pair sends the message of its first unit and then that of the second. */
static s1f_numbered_unit deciding(const walk *w, s1f_numbered_unit unit)
{
    for (;;) {
        if (w->simulation->causes[unit.rank][unit.i] & S1F_CAUSE_CREDIT)
            unit = granting(w, unit);
        else if (is_second(w, unit.rank, unit.i))
            unit.i--;
        else
            return unit;
    }
}

/* The unit that this one's start, or that of its pair, waited for; 0: none. */
static int before_on_path(const walk *w, s1f_numbered_unit unit, s1f_numbered_unit *before)
{
    const s1f_tape_unit *units = w->tape->units[unit.rank];
    int64_t first = unit.i - is_second(w, unit.rank, unit.i);
    for (int64_t i = first; i <= first + units[first].is_pair; i++)
        if (w->simulation->causes[unit.rank][i] & S1F_CAUSE_MESSAGE) {
            *before = deciding(w, first_of_busy_link(w, kind_of(w, unit.rank, i)->in, units[i].awaited));
            return 1;
        }
    if (first == 0)
        return 0;
    *before = deciding(w, (s1f_numbered_unit){unit.rank, first - 1});
    return 1;
}

static int find_path(walk *w)
{
    s1f_simulation *simulation = w->simulation;
    s1f_numbered_unit last = {0, 0}, unit;
    double latest = -1;
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++)
        if (simulation->end[rank][simulation->num_units[rank] - 1] > latest) {
            last = (s1f_numbered_unit){rank, simulation->num_units[rank] - 1};
            latest = simulation->end[rank][last.i];
        }
    int64_t length = 1;
    for (unit = last; before_on_path(w, unit, &unit);)
        length++;
    simulation->path = malloc((size_t)length * sizeof *simulation->path);
    if (simulation->path == NULL)
        return 0;
    simulation->path_length = length;
    simulation->path[--length] = last;
    for (unit = last; before_on_path(w, unit, &unit);)
        simulation->path[--length] = unit;
    return 1;
}

s1f_status s1f_simulation_find_slack(const s1f_tape *tape, const s1f_costs *costs, s1f_simulation *simulation)
{
    walk w = {.tape = tape, .costs = costs, .simulation = simulation};
    if (tape->units == NULL || simulation->causes == NULL)
        return s1f_fail(S1F_ERR_STATE, "slack needs a listed order and a simulation that keeps its causes");
    int created = create_walk(&w);
    simulation->slack = calloc((size_t)tape->num_ranks, sizeof *simulation->slack);
    for (int32_t rank = 0; rank < tape->num_ranks && simulation->slack != NULL; rank++)
        if ((simulation->slack[rank] = malloc((size_t)tape->num_units[rank] * sizeof **simulation->slack)) == NULL)
            created = 0;
    if (created && simulation->slack != NULL) {
        find_ends(&w);
        find_slack(&w);
        created = find_path(&w);
    }
    free_walk(&w);
    if (!created || simulation->slack == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the slack of %d ranks", tape->num_ranks);
    return S1F_OK;
}
