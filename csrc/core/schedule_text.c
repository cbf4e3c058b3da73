/* schedule_text.c - a schedule as text, written and read back. */
#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNIT_TEXT_BYTES = 64, QUOTED_TOKEN_BYTES = 40, PARENT_BYTES = 16 };

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

/* Every unit takes at most UNIT_TEXT_BYTES with its separator; the text is cut to size at the end. */
s1f_status s1f_schedule_to_text(const s1f_schedule *schedule, char **text)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int32_t num_ranks = shape.num_ranks;
    int64_t num_units, total = 0;
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        s1f_schedule_units(schedule, rank, &num_units);
        total += num_units;
    }
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
    char *cut = realloc(lines, used);
    *text = cut != NULL ? cut : lines;
    return S1F_OK;
}

/* -- reading ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *begin;
    size_t bytes;
    int32_t line, number; /* for messages, both from 1 */
    int32_t rank;         /* lines that hold units, from 0 */
} token;

typedef struct {
    s1f_unit unit;
    int32_t rank, names_stage;
    token where;
} parsed_unit;

typedef struct {
    const char *at;
    int32_t line, number, rank;
    int line_has_units;
} scanner;

static int is_separator(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* The next token; 0 at the end of the text. */
static int next_token(scanner *s, token *t)
{
    for (;;) {
        while (is_separator(*s->at))
            s->at++;
        if (*s->at == '#')
            s->at += strcspn(s->at, "\n");
        if (*s->at == '\0')
            return 0;
        if (*s->at != '\n')
            break;
        s->at++;
        s->line++;
        s->number = 0;
        s->rank += s->line_has_units;
        s->line_has_units = 0;
    }
    t->begin = s->at;
    while (*s->at != '\0' && *s->at != '\n' && *s->at != '#' && !is_separator(*s->at))
        s->at++;
    t->bytes = (size_t)(s->at - t->begin);
    t->line = s->line;
    t->number = ++s->number;
    t->rank = s->rank;
    s->line_has_units = 1;
    return 1;
}

static s1f_status fail_at(const token *t, const char *why)
{
    char text[QUOTED_TOKEN_BYTES];
    snprintf(text, sizeof text, "%.*s", (int)(t->bytes < sizeof text ? t->bytes : sizeof text - 1), t->begin);
    return s1f_fail(S1F_ERR_ARG, "line %d, unit %d, '%s': %s", t->line, t->number, text, why);
}

/* A decimal number of at most INT32_MAX at *at, before `end`; moves *at past it. */
static int read_number(const char **at, const char *end, int32_t *value)
{
    const char *begin = *at;
    int64_t sum = 0;
    for (; *at < end && **at >= '0' && **at <= '9'; ++*at)
        if ((sum = 10 * sum + (**at - '0')) > INT32_MAX)
            return 0;
    *value = (int32_t)sum;
    return *at > begin;
}

static int read_pass(const char **at, const char *end, int32_t *pass)
{
    if (*at == end || (*pass = s1f_pass_from_letter(**at)) < 0)
        return 0;
    ++*at;
    return 1;
}

static int read_character(const char **at, const char *end, char c)
{
    if (*at == end || **at != c)
        return 0;
    ++*at;
    return 1;
}

static const char syntax[] =
    "a unit is written F1.0 or [2]F1.0: a pass (F, B, I, W, R, S, T, E, G, O, A, L), micro-batch, segment";

static s1f_status parse(const token *t, parsed_unit *out)
{
    const char *at = t->begin, *end = t->begin + t->bytes;
    s1f_unit unit = {0, t->rank, 0, 0};
    int names_stage = read_character(&at, end, '[');
    if ((names_stage && !(read_number(&at, end, &unit.stage) && read_character(&at, end, ']'))) ||
        !read_pass(&at, end, &unit.pass) || !read_number(&at, end, &unit.microbatch) ||
        !read_character(&at, end, '.') || !read_number(&at, end, &unit.segment) || at != end)
        return fail_at(t, syntax);
    *out = (parsed_unit){.unit = unit, .rank = t->rank, .names_stage = names_stage, .where = *t};
    return S1F_OK;
}

static s1f_status append_parsed(parsed_unit **units, int64_t *count, int64_t *capacity, parsed_unit unit)
{
    if (*count == *capacity) {
        int64_t larger = *capacity == 0 ? 256 : 2 * *capacity;
        parsed_unit *moved = realloc(*units, (size_t)larger * sizeof **units);
        if (moved == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "no memory to read %lld units", (long long)larger);
        *units = moved;
        *capacity = larger;
    }
    (*units)[(*count)++] = unit;
    return S1F_OK;
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* Segments of all micro-batches, and their parents one after another; no micro-batches: all are chains. */
typedef struct {
    int32_t num_microbatches;
    int64_t num_parents;
    int32_t *segments_of; /* [num_microbatches]; 0: a chain, of the segments that it names */
    int32_t *parents;
} named_trees;

static s1f_status set_trees(s1f_schedule *schedule, const named_trees *named, const int32_t *segments_of)
{
    int64_t total = 0, at = 0, next = 0;
    for (int32_t m = 0; m < named->num_microbatches; m++)
        total += segments_of[m];
    int32_t *parents = malloc((size_t)(total + 1) * sizeof *parents);
    if (parents == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the parents of %lld segments", (long long)total);
    for (int32_t m = 0; m < named->num_microbatches; m++)
        for (int32_t s = 0; s < segments_of[m]; s++)
            parents[at++] = named->segments_of[m] > 0 ? named->parents[next++] : s - 1;
    s1f_status status = s1f_schedule_set_parents(schedule, parents);
    free(parents);
    return status;
}

/* Gives each micro-batch its own segments, if micro-batches differ in those that they name or some are trees. */
static s1f_status set_named_rows(s1f_schedule *schedule, const parsed_unit *units, int64_t count,
                                 const named_trees *trees)
{
    int32_t M = s1f_schedule_shape(schedule).num_microbatches, differ = trees->num_microbatches > 0;
    if (differ && trees->num_microbatches != M)
        return s1f_fail(S1F_ERR_ARG, "parents are given for %d micro-batches, the order has %d",
                        (int)trees->num_microbatches, (int)M);
    int32_t *segments_of = calloc((size_t)M, sizeof *segments_of);
    if (segments_of == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %d micro-batches", (int)M);
    for (int32_t m = 0; m < M; m++)
        segments_of[m] = 1; /* of one that no unit names its first is missing */
    for (int64_t i = 0; i < count; i++) {
        int32_t *own = &segments_of[units[i].unit.microbatch];
        *own = larger(*own, units[i].unit.segment + 1);
    }
    s1f_status status = S1F_OK;
    for (int32_t m = 0; m < trees->num_microbatches && status == S1F_OK; m++)
        if (trees->segments_of[m] > 0 && trees->segments_of[m] != segments_of[m])
            status = s1f_fail(S1F_ERR_ARG, "micro-batch %d has parents for %d segments, and its units name %d", (int)m,
                              (int)trees->segments_of[m], (int)segments_of[m]);
    for (int32_t m = 0; m < M; m++)
        differ |= segments_of[m] != s1f_schedule_shape(schedule).num_segments;
    if (status == S1F_OK && differ)
        status = s1f_schedule_set_rows(schedule, segments_of);
    if (status == S1F_OK && trees->num_parents > 0)
        status = set_trees(schedule, trees, segments_of);
    free(segments_of);
    return status;
}

/* The rank of every stage from the lines that name it. A complete order has a unit for every stage, micro-batch and
 * segment, so indices beyond the number of units are a slip of the pen, not a wish for memory. */
static s1f_status create_from_parsed(const parsed_unit *units, int64_t count, int32_t num_segments,
                                     const named_trees *trees, s1f_schedule **out)
{
    s1f_unit most = {0, 0, 0, num_segments - 1};
    int32_t num_ranks = units[count - 1].rank + 1;
    for (int64_t i = 0; i < count; i++) {
        s1f_unit unit = units[i].unit;
        if (units[i].names_stage != units[0].names_stage)
            return fail_at(&units[i].where, "either every unit names its stage or none does");
        if (unit.stage >= count || unit.microbatch >= count || (num_segments == 0 && unit.segment >= count))
            return fail_at(&units[i].where, "an index is larger than the number of units in the text");
        most.stage = larger(most.stage, unit.stage);
        most.microbatch = larger(most.microbatch, unit.microbatch);
        most.segment = larger(most.segment, unit.segment);
    }
    int32_t num_stages = most.stage + 1;
    int32_t *rank_of_stage = malloc((size_t)num_stages * sizeof *rank_of_stage);
    if (rank_of_stage == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the placement of %d stages", num_stages);
    s1f_schedule *schedule = NULL;
    s1f_status status = S1F_OK;
    for (int32_t stage = 0; stage < num_stages; stage++)
        rank_of_stage[stage] = -1;
    for (int64_t i = 0; i < count && status == S1F_OK; i++) {
        int32_t *rank = &rank_of_stage[units[i].unit.stage];
        if (*rank >= 0 && *rank != units[i].rank)
            status = fail_at(&units[i].where, "another line holds this stage already");
        *rank = units[i].rank;
    }
    for (int32_t stage = 0; stage < num_stages && status == S1F_OK; stage++)
        if (rank_of_stage[stage] < 0)
            status = s1f_fail(S1F_ERR_ARG, "no line holds stage %d, the text names stages up to %d", stage, most.stage);
    if (status == S1F_OK)
        status =
            s1f_schedule_create(num_ranks, num_stages, most.microbatch + 1, most.segment + 1, rank_of_stage, &schedule);
    if (status == S1F_OK && num_segments == 0)
        status = set_named_rows(schedule, units, count, trees);
    for (int64_t i = 0; i < count && status == S1F_OK; i++)
        status = s1f_schedule_append(schedule, units[i].unit);
    free(rank_of_stage);
    if (status != S1F_OK) {
        s1f_schedule_free(schedule);
        return status;
    }
    *out = schedule;
    return S1F_OK;
}

static s1f_status grow(int32_t **array, int64_t wanted)
{
    int32_t *grown = realloc(*array, (size_t)wanted * sizeof *grown);
    if (grown == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld parents", (long long)wanted);
    *array = grown;
    return S1F_OK;
}

/* One word: "-", or "-1,0,0". */
static s1f_status read_parents_word(const token *word, named_trees *trees)
{
    const char *at = word->begin, *end = at + word->bytes;
    S1F_TRY(grow(&trees->segments_of, trees->num_microbatches + 1));
    int32_t *count = &trees->segments_of[trees->num_microbatches++];
    *count = 0;
    if (word->bytes == 1 && *at == '-')
        return S1F_OK;
    S1F_TRY(grow(&trees->parents, trees->num_parents + (int64_t)word->bytes));
    do {
        int32_t parent = 1, is_none = read_character(&at, end, '-');
        if (!read_number(&at, end, &parent) || (is_none && parent != 1))
            return fail_at(word, "parents are written -1,0,0: for each segment the one that it follows, or - for a "
                                 "chain");
        trees->parents[trees->num_parents++] = is_none ? -1 : parent;
        ++*count;
    } while (read_character(&at, end, ','));
    return at == end ? S1F_OK : fail_at(word, "parents are separated by commas, micro-batches by blanks");
}

/* The rest of a line that began with `parents`. It is no line of a rank. */
static s1f_status read_parents(scanner *s, named_trees *trees)
{
    int32_t line = s->line;
    token word;
    for (const scanner *here = s;;) {
        scanner ahead = *here;
        if (!next_token(&ahead, &word) || word.line != line)
            break;
        *s = ahead;
        S1F_TRY(read_parents_word(&word, trees));
    }
    s->line_has_units = 0;
    if (trees->num_microbatches == 0)
        return s1f_fail(S1F_ERR_ARG, "line %d: no parents follow the word, must be a word for each micro-batch", line);
    return S1F_OK;
}

static s1f_status read_text(const char *text, int32_t num_segments, named_trees *trees, s1f_schedule **out)
{
    scanner s = {.at = text, .line = 1};
    parsed_unit *units = NULL;
    int64_t count = 0, capacity = 0;
    token t;
    s1f_status status = S1F_OK;
    while (status == S1F_OK && next_token(&s, &t)) {
        parsed_unit unit = {0};
        if (count == 0 && trees->num_microbatches == 0 && t.bytes == sizeof parents_word - 1 &&
            memcmp(t.begin, parents_word, t.bytes) == 0) {
            status = read_parents(&s, trees);
            continue;
        }
        status = parse(&t, &unit);
        if (status == S1F_OK)
            status = append_parsed(&units, &count, &capacity, unit);
    }
    if (status == S1F_OK && count == 0)
        status = s1f_fail(S1F_ERR_ARG, "the order holds no unit");
    if (status == S1F_OK)
        status = create_from_parsed(units, count, num_segments, trees, out);
    free(units);
    return status;
}

s1f_status s1f_schedule_from_text(const char *text, int32_t num_segments, s1f_schedule **out)
{
    named_trees trees = {.num_microbatches = 0};
    s1f_status status = read_text(text, num_segments, &trees, out);
    free(trees.segments_of);
    free(trees.parents);
    return status;
}
