/* positions_op.c - positions of tokens within the sequence, or within their documents. */
#include "../run/current_unit.h"
#include "op_table.h"

/* Ids of packed documents: the position of the document's first token. Each token begins one or goes on with that
 * before it, the first of a part with one of an earlier segment. So ids of another kind are seen here, and not in a
 * loss that is a little off. */
static s1f_status check_document_starts(const s1f_op_tensor *docs, int64_t batch, const int32_t *starts,
                                        const int64_t *position)
{
    for (int64_t i = 0; i < docs->sizes[1]; i++) {
        int64_t start = starts[i];
        int follows = i > 0 && position[i] == position[i - 1] + 1;
        int goes_on = follows ? start == starts[i - 1] : start >= 0 && start < position[0];
        if (start != position[i] && !goes_on)
            return s1f_fail(S1F_ERR_ARG,
                            "doc_ids of row %lld, token %lld is %lld, must be the position of its document's first "
                            "token: seq1f1b.document_starts makes such ids of a whole row's",
                            (long long)batch, (long long)position[i], (long long)start);
    }
    return S1F_OK;
}

/* unit: NULL outside a step. */
static void fill_positions(const s1f_current_unit *unit, int64_t first, int64_t length, int64_t *position)
{
    int64_t begin = unit == NULL ? first : first + unit->offset;
    for (int64_t i = 0; i < length; i++)
        position[i] = begin + i;
    for (int64_t i = 0; unit != NULL && unit->num_parts > 1 && i < length; i++)
        position[i] = s1f_position_in_unit(unit, first + i);
}

static s1f_status positions_in_documents(s1f_op_call *call, s1f_op_tensor *docs, int64_t length,
                                         const s1f_current_unit *unit, int64_t first)
{
    S1F_TRY(s1f_op_require(docs->dtype == S1F_INT32 && docs->ndim == 2 && docs->sizes[1] == length, "doc_ids", docs,
                           "must be (batch, tokens) of int32, tokens as many as x has"));
    int64_t strides[2];
    s1f_row_major(2, docs->sizes, strides);
    S1F_TRY(s1f_op_restride(call, docs, strides));
    S1F_TRY(s1f_op_new_tensor(S1F_INT64, 2, docs->sizes, strides, &call->outputs[0]));
    for (int64_t b = 0; b < docs->sizes[0]; b++) {
        const int32_t *starts = (const int32_t *)docs->data + b * length;
        int64_t *position = (int64_t *)call->outputs[0].data + b * length;
        fill_positions(unit, first, length, position);
        S1F_TRY(check_document_starts(docs, b, starts, position));
        for (int64_t i = 0; i < length; i++)
            position[i] -= starts[i];
    }
    return S1F_OK;
}

s1f_status s1f_op_positions(s1f_op_call *call)
{
    const s1f_op_tensor *x = &call->inputs[0];
    s1f_op_tensor *docs = &call->inputs[1];
    int64_t dim = s1f_op_int(call->scalars[0]), rank = s1f_op_int(call->scalars[1]), one = 1;
    int64_t num_parts = s1f_op_int(call->scalars[2]);
    if (dim < -x->ndim || dim >= x->ndim)
        return s1f_fail(S1F_ERR_ARG, "dim is %lld, x has %lld dimensions", (long long)dim, (long long)x->ndim);
    if (rank < 0 || rank >= num_parts)
        return s1f_fail(S1F_ERR_ARG, "sequence_parallel is (%lld, %lld), must be (rank, size) with 0 <= rank < size",
                        (long long)rank, (long long)num_parts);
    int64_t length = x->sizes[dim < 0 ? dim + x->ndim : dim], first = rank * length;
    const s1f_current_unit *unit = s1f_current_unit_get();
    if (unit != NULL && !unit->is_whole) {
        char name[64];
        s1f_unit_text(unit->unit, 1, name, sizeof name);
        if (length * num_parts != unit->length)
            return s1f_fail(S1F_ERR_ARG,
                            "%s: positions of dimension %lld, which has %lld elements; the segment has %lld tokens "
                            "(parts: %lld)",
                            name, (long long)dim, (long long)length, (long long)unit->length, (long long)num_parts);
    }
    if (docs->numel > 0)
        return positions_in_documents(call, docs, length, unit, first);
    S1F_TRY(s1f_op_new_tensor(S1F_INT64, 1, &length, &one, &call->outputs[0]));
    fill_positions(unit, first, length, call->outputs[0].data);
    return S1F_OK;
}
