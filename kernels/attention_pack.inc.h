/* attention_pack.inc.h - q, k, v and dout become operands, results become elements. Included by
 * attention_blocked.inc.h.
 *
 *   rows     (rows, depth), depth = dim / PER_OPERAND: operands along a row; the left side of q k^T and dout v^T
 *   panels   (rows / PANEL, depth, PANEL): rows transposed; the right side of the same products
 *   across   (rows / PER_OPERAND, dim): operands across rows; the right side of p v, p^T dout, ds k and ds^T q
 *
 * What lies beyond the given rows and columns becomes zero. fp32 operands take any dtype, and there rows and across are
 * the same; pairs of bf16 take bf16 as it is. */

static void narrow_row(int32_t dtype, void *x, int64_t ix, int64_t n, float factor, const float *row)
{
    if (dtype == S1F_FLOAT32)
        for (int64_t c = 0; c < n; c++)
            ((float *)x)[ix + c] = factor * row[c];
    else if (dtype == S1F_BFLOAT16)
        for (int64_t c = 0; c < n; c++)
            ((uint16_t *)x)[ix + c] = s1f_to_bf16(factor * row[c]);
    else
        for (int64_t c = 0; c < n; c++)
            ((uint16_t *)x)[ix + c] = s1f_to_fp16(factor * row[c]);
}

/* Rows to be packed: `count` of them, each `n` elements, the first at element `at`; `args` is NULL. But keys of several
 * ranges do not follow one another: there `args` says where row i, which is key first_key + i, lies from `at` on. */
typedef struct {
    const void *x;
    int64_t at, stride, count, n;
    int32_t dtype;
    const s1f_attention_args *args;
    int64_t first_key;
} source_rows;

static inline int64_t element_of(const source_rows *from, int64_t row)
{
    int64_t run;
    return from->at + (from->args ? s1f_key_row(from->args, from->first_key + row, &run) : row) * from->stride;
}

/* Rows [row, row + count). */
static source_rows part_of(const source_rows *from, int64_t row, int64_t count)
{
    source_rows part = *from;
    part.count = count;
    int64_t run = count, place = from->args ? s1f_key_row(from->args, from->first_key + row, &run) : row;
    if (run >= count) {
        part.at += place * from->stride;
        part.args = NULL;
    } else {
        part.first_key += row;
    }
    return part;
}

/* Asks for memory that is about to be used: rows of different tokens lie in different pages, where no hardware looks
 * ahead. */
static inline void fetch_bytes(const void *from, int64_t bytes)
{
    enum { LINE = 64 };
    for (int64_t b = 0; b < bytes; b += LINE)
        __builtin_prefetch((const char *)from + b);
}

static void fetch_rows(const source_rows *rows)
{
    int64_t bytes = s1f_dtype_bytes(rows->dtype);
    for (int64_t row = 0; row < rows->count; row++)
        fetch_bytes((const char *)rows->x + element_of(rows, row) * bytes, rows->n * bytes);
}

static void pack_row(const source_rows *from, int64_t row, operand *to, int64_t dim)
{
    int64_t at = element_of(from, row), n = from->n;
    const uint16_t *halves = (const uint16_t *)from->x + at;
#if OPERAND_PAIRS
    uint16_t *elements = (uint16_t *)(void *)to;
    for (int64_t c = 0; c < n; c++)
        elements[c] = halves[c];
#else
    float *elements = to;
    if (from->dtype == S1F_FLOAT32)
        memcpy(to, (const float *)from->x + at, (size_t)n * sizeof *to);
    else if (from->dtype == S1F_BFLOAT16)
        for (int64_t c = 0; c < n; c++)
            to[c] = s1f_from_bf16(halves[c]);
    else
        for (int64_t c = 0; c < n; c++)
            to[c] = s1f_from_fp16(halves[c]);
#endif
    for (int64_t c = n; c < dim; c++)
        elements[c] = 0;
}

static void pack_rows(const source_rows *from, int64_t padded, int64_t dim, operand *rows)
{
    int64_t depth = dim / PER_OPERAND;
    for (int64_t row = 0; row < from->count; row++)
        pack_row(from, row, rows + row * depth, dim);
    memset(rows + from->count * depth, 0, (size_t)((padded - from->count) * depth) * sizeof *rows);
}

/* `padded` is a multiple of PER_OPERAND. Returns `room`, or the rows themselves where they lie as they should. */
static const operand *pack_across(const source_rows *from, int64_t padded, int64_t dim, operand *room)
{
#if OPERAND_PAIRS
    int64_t packed = round_up(from->count, 2);
    for (int64_t row = 0; row < packed; row += 2) {
        const uint16_t *x = from->x, *low = x + element_of(from, row);
        uint32_t *to = (uint32_t *)(void *)(room + row / 2 * dim);
        const uint16_t *high = row + 1 < from->count ? x + element_of(from, row + 1) : NULL;
        if (high)
            for (int64_t c = 0; c < from->n; c++)
                to[c] = (uint32_t)low[c] | (uint32_t)high[c] << 16;
        else
            for (int64_t c = 0; c < from->n; c++)
                to[c] = low[c];
        memset(to + from->n, 0, (size_t)(dim - from->n) * sizeof *to);
    }
    memset(room + packed / 2 * dim, 0, (size_t)((padded - packed) / 2 * dim) * sizeof *room);
#else
    if (!from->args && from->dtype == S1F_FLOAT32 && from->stride == dim && from->n == dim && padded == from->count)
        return (const operand *)from->x + from->at;
    pack_rows(from, padded, dim, room);
#endif
    return room;
}

/* to[c to_row + r] = row r of `from`, column c: BLOCK_ROWS rows, 4 columns. */
#if defined(__AVX512F__)
enum { BLOCK_ROWS = 16 };

static inline __m512 four_of_rows(const char *from, int64_t row_bytes)
{
    __m512 x = _mm512_castps128_ps512(_mm_loadu_ps((const float *)(const void *)from));
    x = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(const void *)(from + 4 * row_bytes)), 1);
    x = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(const void *)(from + 8 * row_bytes)), 2);
    return _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(const void *)(from + 12 * row_bytes)), 3);
}

static inline void transpose_block(const char *from, int64_t row_bytes, operand *to, int64_t to_row)
{
    /* 128-bit lane i of each holds four columns of row 4 i + 0, 1, 2, 3; a 4 x 4 transpose within lanes is the rest. */
    __m512 a = four_of_rows(from, row_bytes), b = four_of_rows(from + row_bytes, row_bytes);
    __m512 c = four_of_rows(from + 2 * row_bytes, row_bytes), d = four_of_rows(from + 3 * row_bytes, row_bytes);
    __m512 ab_low = _mm512_unpacklo_ps(a, b), ab_high = _mm512_unpackhi_ps(a, b);
    __m512 cd_low = _mm512_unpacklo_ps(c, d), cd_high = _mm512_unpackhi_ps(c, d);
    _mm512_storeu_ps(to, _mm512_shuffle_ps(ab_low, cd_low, 0x44));
    _mm512_storeu_ps(to + to_row, _mm512_shuffle_ps(ab_low, cd_low, 0xee));
    _mm512_storeu_ps(to + 2 * to_row, _mm512_shuffle_ps(ab_high, cd_high, 0x44));
    _mm512_storeu_ps(to + 3 * to_row, _mm512_shuffle_ps(ab_high, cd_high, 0xee));
}
#else
enum { BLOCK_ROWS = 4 };

static inline void transpose_block(const char *from, int64_t row_bytes, operand *to, int64_t to_row)
{
#if defined(__SSE__)
    __m128 a = _mm_loadu_ps((const float *)(const void *)from);
    __m128 b = _mm_loadu_ps((const float *)(const void *)(from + row_bytes));
    __m128 c = _mm_loadu_ps((const float *)(const void *)(from + 2 * row_bytes));
    __m128 d = _mm_loadu_ps((const float *)(const void *)(from + 3 * row_bytes));
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_row, b);
    _mm_storeu_ps(to + 2 * to_row, c);
    _mm_storeu_ps(to + 3 * to_row, d);
#else
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++)
            memcpy(&to[c * to_row + r], from + r * row_bytes + c * (int64_t)sizeof *to, sizeof *to);
#endif
}
#endif

_Static_assert(PANEL % BLOCK_ROWS == 0, "a panel is whole blocks");

/* Packs as many panels as the rows need. Rows that are no operands yet, or too few, go by way of `room`
 * (BLOCK_ROWS, dim). */
static void pack_panels(const source_rows *from, int64_t dim, operand *room, operand *panels)
{
    int64_t depth = dim / PER_OPERAND, element = OPERAND_PAIRS ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float);
    int is_operands = from->n == dim && (OPERAND_PAIRS || from->dtype == S1F_FLOAT32);
    for (int64_t row = 0; row < round_up(from->count, PANEL); row += BLOCK_ROWS) {
        operand *to = panels + row / PANEL * PANEL * depth + row % PANEL;
        int64_t present = s1f_max(0, s1f_min(BLOCK_ROWS, from->count - row)), row_bytes = depth * (int64_t)sizeof *room;
        const char *rows = (const char *)room;
        source_rows part = part_of(from, row, present);
        if (is_operands && present == BLOCK_ROWS && !part.args) {
            rows = (const char *)part.x + part.at * element;
            row_bytes = part.stride * element;
        } else {
            pack_rows(&part, BLOCK_ROWS, dim, room);
        }
        for (int64_t c = 0; c < depth; c += 4)
            transpose_block(rows + c * (int64_t)sizeof *room, row_bytes, to + c * PANEL, PANEL);
    }
}
