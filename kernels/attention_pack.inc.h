/* attention_pack.inc.h - q, k, v and dout become operands, results become elements. Included by attention_blocked.inc.h.
 *
 *   rows     (rows, depth), depth = dim / PER_OPERAND: operands along a row; the left side of q k^T and dout v^T
 *   panels   (rows / PANEL, depth, PANEL): rows transposed; the right side of the same products
 *   across   (rows / PER_OPERAND, dim): operands across rows; the right side of p v, p^T dout, ds k and ds^T q
 *
 * What lies beyond the given rows and columns becomes zero. fp32 operands take any dtype, and there rows and across are
 * the same; pairs of bf16 take bf16 as it is. */

static void widen_row(int32_t dtype, const void *x, int64_t ix, int64_t n, float *row, int64_t dim)
{
    if (dtype == S1F_FLOAT32) {
        memcpy(row, (const float *)x + ix, (size_t)n * sizeof *row);
    } else if (dtype == S1F_BFLOAT16) {
        const uint16_t *from = (const uint16_t *)x + ix;
        for (int64_t c = 0; c < n; c++)
            row[c] = s1f_from_bf16(from[c]);
    } else {
        const uint16_t *from = (const uint16_t *)x + ix;
        for (int64_t c = 0; c < n; c++)
            row[c] = s1f_from_fp16(from[c]);
    }
    for (int64_t c = n; c < dim; c++)
        row[c] = 0;
}

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

/* Rows to be packed: `count` of them, each `n` elements, the first at element `at`. */
typedef struct {
    const void *x;
    int64_t at, stride, count, n;
    int32_t dtype;
} source_rows;

static void pack_row(const source_rows *from, int64_t row, operand *to, int64_t dim)
{
#if OPERAND_PAIRS
    size_t bytes = (size_t)from->n * sizeof(uint16_t), all = (size_t)dim * sizeof(uint16_t);
    memcpy(to, (const uint16_t *)from->x + from->at + row * from->stride, bytes);
    memset((char *)to + bytes, 0, all - bytes);
#else
    widen_row(from->dtype, from->x, from->at + row * from->stride, from->n, to, dim);
#endif
}

static void pack_rows(const source_rows *from, int64_t padded, int64_t dim, operand *rows)
{
    int64_t depth = dim / PER_OPERAND;
    for (int64_t row = 0; row < from->count; row++)
        pack_row(from, row, rows + row * depth, dim);
    memset(rows + from->count * depth, 0, (size_t)((padded - from->count) * depth) * sizeof *rows);
}

/* `padded` is a multiple of PER_OPERAND. */
static void pack_across(const source_rows *from, int64_t padded, int64_t dim, operand *across)
{
#if OPERAND_PAIRS
    int64_t packed = round_up(from->count, 2);
    for (int64_t row = 0; row < packed; row += 2) {
        const uint16_t *low = (const uint16_t *)from->x + from->at + row * from->stride, *high = low + from->stride;
        uint32_t *to = (uint32_t *)(void *)(across + row / 2 * dim);
        if (row + 1 < from->count)
            for (int64_t c = 0; c < from->n; c++)
                to[c] = (uint32_t)low[c] | (uint32_t)high[c] << 16;
        else
            for (int64_t c = 0; c < from->n; c++)
                to[c] = low[c];
        memset(to + from->n, 0, (size_t)(dim - from->n) * sizeof *to);
    }
    memset(across + packed / 2 * dim, 0, (size_t)((padded - packed) / 2 * dim) * sizeof *across);
#else
    pack_rows(from, padded, dim, across);
#endif
}

/* to[c to_row + r] = from[r from_row + c], 4 x 4 */
static inline void transpose_4x4(const operand *from, int64_t from_row, operand *to, int64_t to_row)
{
#if defined(__SSE__)
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_row), c = _mm_loadu_ps(from + 2 * from_row),
           d = _mm_loadu_ps(from + 3 * from_row);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_row, b);
    _mm_storeu_ps(to + 2 * to_row, c);
    _mm_storeu_ps(to + 3 * to_row, d);
#else
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++)
            to[c * to_row + r] = from[r * from_row + c];
#endif
}

/* As many panels as the rows need, by way of four rows at a time. four_rows: (4, dim). */
static void pack_panels(const source_rows *from, int64_t dim, operand *four_rows, operand *panels)
{
    int64_t depth = dim / PER_OPERAND;
    for (int64_t row = 0; row < round_up(from->count, PANEL); row += 4) {
        operand *to = panels + row / PANEL * PANEL * depth + row % PANEL;
        for (int64_t r = 0; r < 4; r++)
            if (row + r < from->count)
                pack_row(from, row + r, four_rows + r * depth, dim);
            else
                memset(four_rows + r * depth, 0, (size_t)depth * sizeof *four_rows);
        for (int64_t c = 0; c < depth; c += 4)
            transpose_4x4(four_rows + c, depth, to + c * PANEL, PANEL);
    }
}
