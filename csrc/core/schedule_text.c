/* schedule_text.c - a schedule as text, written and read back. */
#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNIT_TEXT_BYTES = 64, MOST_QUOTED = 39, PARENT_BYTES = 16 };
enum { LEAST_UNIT_BYTES = 5 /* of "F0.0" and a blank */ };

static const char parents_word[] = "parents"; /* begins a line that holds no unit */

/* -- writing ----------------------------------------------------------------------------------------------------- */

/* "parents -1,0,0 -": returns the bytes written, at most PARENT_BYTES for each segment and the word. */
static size_t write_parents(const s1f_shape *shape, char *text)
{
    size_t used = (size_t)snprintf(text, PARENT_BYTES, "%s", parents_word);
    for (int32_t m = 0; m < shape->num_microbatches; m++) {
        const int32_t *parents = shape->trees->parent + s1f_first_cell(shape, m);
        int32_t count = s1f_segments_of(shape, m), is_chain = 1;
        for (int32_t s = 0; s < count; s++)
            is_chain &= parents[s] == s - 1;
        for (int32_t s = 0; s < (is_chain ? 0 : count); s++)
            used += (size_t)snprintf(text + used, PARENT_BYTES, "%c%d", s == 0 ? ' ' : ',', (int)parents[s]);
        if (is_chain)
            used += (size_t)snprintf(text + used, PARENT_BYTES, " -");
    }
    text[used++] = '\n';
    return used;
}

/* Every unit takes at most UNIT_TEXT_BYTES with its separator. */
s1f_status s1f_schedule_to_text(const s1f_schedule *schedule, char **text)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int32_t num_ranks = shape.num_ranks;
    int64_t num_units, total = s1f_schedule_num_units(schedule);
    size_t capacity = (size_t)total * UNIT_TEXT_BYTES + (size_t)num_ranks + 1, used = 0;
    capacity += shape.trees != NULL ? ((size_t)s1f_num_cells(&shape) + 2) * PARENT_BYTES : 0;
    char *lines = malloc(capacity);
    if (lines == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the text of %lld units", (long long)total);
    int with_stage = s1f_schedule_shows_stages(schedule);
    if (shape.trees != NULL)
        used = write_parents(&shape, lines);
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units; i++) {
            if (i > 0)
                lines[used++] = ' ';
            s1f_unit_text(units[i], with_stage, lines + used, UNIT_TEXT_BYTES - 1);
            used += strlen(lines + used);
        }
        lines[used++] = '\n';
    }
    lines[used++] = '\0';
    *text = lines;
    return S1F_OK;
}

/* -- reading ----------------------------------------------------------------------------------------------------- */

typedef struct {
    s1f_unit unit;
    int32_t rank;   /* its line among the lines with units, from 0 */
    const char *at; /* in the text */
} parsed_unit;

typedef struct {
    const char *text;
    const char *parents; /* text behind the word, NULL: none */
    parsed_unit *units;
    int64_t count;
} parsed_text;

/* The next word at or behind `at`, behind comments and ends of lines; NULL: there is none. */
static const char *next_word(const char *at)
{
    for (;;) {
        at += strspn(at, " \t\r\n");
        if (*at != '#')
            return *at == '\0' ? NULL : at;
        at += strcspn(at, "\n");
    }
}

static const char *end_of(const char *word)
{
    return word + strcspn(word, " \t\r\n#");
}

/* Counts lines and the words of the line from 1. */
static s1f_status fail_at(const char *text, const char *at, const char *why)
{
    int line = 1, number = 0;
    const char *begin = text;
    for (const char *end = text; (end = memchr(end, '\n', (size_t)(at - end))) != NULL; line++)
        begin = ++end;
    for (const char *word = begin; (word = next_word(word)) != NULL && word <= at; word = end_of(word))
        number++;
    int bytes = (int)(end_of(at) - at);
    return s1f_fail(S1F_ERR_ARG, "line %d, unit %d, '%.*s': %s", line, number,
                    bytes < MOST_QUOTED ? bytes : MOST_QUOTED, at, why);
}

/* A decimal number below INT32_MAX, so that one more is a number, too, at *at; moves *at past it. */
static int read_number(const char **at, int32_t *value)
{
    const char *begin = *at;
    int64_t sum = 0;
    for (; **at >= '0' && **at <= '9'; ++*at)
        if ((sum = 10 * sum + (**at - '0')) >= INT32_MAX)
            return 0;
    *value = (int32_t)sum;
    return *at > begin;
}

static int read_character(const char **at, char c)
{
    int is_there = **at == c;
    *at += is_there;
    return is_there;
}

static const char syntax[] =
    "a unit is written F1.0 or [2]F1.0: a pass (F, B, I, W, R, S, T, E, G, O, A, L), micro-batch, segment";

static int read_unit(const char *at, s1f_unit *unit)
{
    const char *end = end_of(at);
    if (read_character(&at, '[') && !(read_number(&at, &unit->stage) && read_character(&at, ']')))
        return 0;
    unit->pass = s1f_pass_from_letter(*at++);
    return unit->pass >= 0 && read_number(&at, &unit->microbatch) && read_character(&at, '.') &&
           read_number(&at, &unit->segment) && at == end;
}

/* Fills t->units, which has room. */
static s1f_status read_units(parsed_text *t)
{
    const char *word = next_word(t->text), *before = word;
    if (word != NULL && strncmp(word, parents_word, strlen(parents_word)) == 0 &&
        end_of(word) == word + strlen(parents_word)) {
        t->parents = end_of(word);
        before = word = next_word(word + strcspn(word, "\n"));
    }
    for (int32_t rank = 0; word != NULL; word = next_word(end_of(word))) {
        rank += memchr(before, '\n', (size_t)(word - before)) != NULL;
        t->units[t->count] = (parsed_unit){{0, rank, 0, 0}, rank, word};
        if (!read_unit(word, &t->units[t->count++].unit))
            return fail_at(t->text, word, syntax);
        before = word;
    }
    return t->count > 0 ? S1F_OK : s1f_fail(S1F_ERR_ARG, "the order holds no unit");
}

static const char parents_syntax[] =
    "parents are written -1,0,0: for each segment the one that it follows, or - for a chain; blanks part micro-batches";

/* One word of parents: "-", or "-1,0,0". */
static s1f_status read_parents_of(const char *text, const char *word, int32_t microbatch, int32_t num_segments,
                                  int32_t *parents)
{
    const char *at = word, *end = end_of(word);
    int32_t count = 0;
    for (int32_t s = 0; s < num_segments; s++)
        parents[s] = s - 1;
    if (*at == '-' && at + 1 == end)
        return S1F_OK;
    do {
        int32_t parent = 1, is_none = *at == '-';
        at += is_none;
        if (!read_number(&at, &parent) || (is_none && parent != 1))
            return fail_at(text, word, parents_syntax);
        if (count < num_segments)
            parents[count] = is_none ? -1 : parent;
        count++;
    } while (*at == ',' && at++ < end);
    if (at != end)
        return fail_at(text, word, parents_syntax);
    if (count != num_segments)
        return s1f_fail(S1F_ERR_ARG, "micro-batch %d has parents for %d segments, and its units name %d",
                        (int)microbatch, (int)count, (int)num_segments);
    return S1F_OK;
}

static s1f_status read_parents(const parsed_text *t, const s1f_shape *shape, int32_t *parents)
{
    const char *end = t->parents + strcspn(t->parents, "\n"), *word = next_word(t->parents);
    int32_t m = 0;
    for (; word != NULL && word < end; word = next_word(end_of(word)), m++)
        if (m < shape->num_microbatches)
            S1F_TRY(read_parents_of(t->text, word, m, s1f_segments_of(shape, m), parents + s1f_first_cell(shape, m)));
    if (m != shape->num_microbatches)
        return s1f_fail(S1F_ERR_ARG, "parents are given for %d micro-batches, the order has %d", (int)m,
                        (int)shape->num_microbatches);
    return S1F_OK;
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* Finds the counts, the rank of every stage from the lines that name it, and in segments[m + 1] how many micro-batch m
 * names. A complete order has a unit for every stage, micro-batch and segment, so indices beyond the number of units
 * are a slip of the pen, not a wish for memory: the arrays have room for as many, and rank_of_stage holds -1. */
static s1f_status find_shape(const parsed_text *t, int32_t num_segments, s1f_shape *shape, int32_t *rank_of_stage,
                             int64_t *segments)
{
    *shape = (s1f_shape){
        .num_ranks = t->units[t->count - 1].rank + 1, .num_segments = num_segments, .rank_of_stage = rank_of_stage};
    for (const parsed_unit *own = t->units; own < t->units + t->count; own++) {
        s1f_unit unit = own->unit;
        if ((*own->at == '[') != (*t->units->at == '['))
            return fail_at(t->text, own->at, "either every unit names its stage or none does");
        if (unit.stage >= t->count || unit.microbatch >= t->count || (num_segments == 0 && unit.segment >= t->count))
            return fail_at(t->text, own->at, "an index is larger than the number of units in the text");
        if (rank_of_stage[unit.stage] >= 0 && rank_of_stage[unit.stage] != own->rank)
            return fail_at(t->text, own->at, "another line holds this stage already");
        rank_of_stage[unit.stage] = own->rank;
        shape->num_stages = larger(shape->num_stages, unit.stage + 1);
        shape->num_microbatches = larger(shape->num_microbatches, unit.microbatch + 1);
        shape->num_segments = larger(shape->num_segments, unit.segment + 1);
        segments[unit.microbatch + 1] = larger((int32_t)segments[unit.microbatch + 1], unit.segment + 1);
    }
    for (int32_t stage = 0; stage < shape->num_stages; stage++)
        if (rank_of_stage[stage] < 0)
            return s1f_fail(S1F_ERR_ARG, "no line holds stage %d, the text names stages up to %d", stage,
                            shape->num_stages - 1);
    return S1F_OK;
}

/* Makes the first cell of each micro-batch from its segments; returns whether micro-batches differ in them. A
 * micro-batch that no unit names misses its first segment. */
static int add_up_segments(const s1f_shape *shape, int64_t *first_cell)
{
    int differ = 0;
    for (int32_t m = 0; m < shape->num_microbatches; m++) {
        first_cell[m + 1] += first_cell[m + 1] == 0;
        differ |= first_cell[m + 1] != shape->num_segments;
        first_cell[m + 1] += first_cell[m];
    }
    return differ;
}

static s1f_status create(const parsed_text *t, int32_t num_segments, s1f_pool *pool, s1f_schedule **out)
{
    s1f_shape shape;
    int32_t *parents = NULL, *rank_of_stage = s1f_pool_take(pool, (size_t)t->count, sizeof *rank_of_stage);
    int64_t *first_cell = s1f_pool_take(pool, (size_t)t->count + 1, sizeof *first_cell);
    S1F_TRY(s1f_pool_status(pool, "the placement of stages"));
    for (int64_t i = 0; i < t->count; i++)
        rank_of_stage[i] = -1;
    S1F_TRY(find_shape(t, num_segments, &shape, rank_of_stage, first_cell));
    int has_rows = num_segments == 0 && (add_up_segments(&shape, first_cell) || t->parents != NULL);
    shape.first_cell = has_rows ? first_cell : NULL;
    if (has_rows && t->parents != NULL) {
        parents = s1f_pool_take(pool, (size_t)s1f_num_cells(&shape), sizeof *parents);
        S1F_TRY(s1f_pool_status(pool, "parents"));
        S1F_TRY(read_parents(t, &shape, parents));
    }
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_create(&shape, parents, &schedule);
    for (int64_t i = 0; i < t->count && status == S1F_OK; i++)
        status = s1f_schedule_append(schedule, t->units[i].unit);
    return s1f_schedule_finish(schedule, status, out);
}

s1f_status s1f_schedule_from_text(const char *text, int32_t num_segments, s1f_schedule **out)
{
    s1f_pool pool = {0};
    size_t most = strlen(text) / LEAST_UNIT_BYTES + 1;
    parsed_text t = {.text = text, .units = s1f_pool_take(&pool, most, sizeof *t.units)};
    s1f_status status = s1f_pool_status(&pool, "the units of a text");
    if (status == S1F_OK)
        status = read_units(&t);
    if (status == S1F_OK)
        status = create(&t, num_segments, &pool, out);
    s1f_pool_free(&pool);
    return status;
}
