/* segment_rows.c - checks that a call belongs to the running unit, and fills its rows. */
#include "segment_rows.h"

#include <string.h>

static s1f_status find_segment(const s1f_op_tensor *layer, int64_t tokens, s1f_segment *out)
{
    *out = (s1f_segment){.unit = s1f_current_unit_get()};
    if (out->unit == NULL)
        return s1f_fail(S1F_ERR_STATE, "segment_attention outside a step: there is no current unit whose KV cache it "
                                       "could use");
    S1F_TRY(
        s1f_op_require(layer->numel == 1 && layer->dtype == S1F_INT64 && layer->device_type == s1f_torch_device_cpu(),
                       "layer", layer, "must be a handle made by seq1f1b.layer_handle: one int64 on the CPU"));
    memcpy(&out->key, layer->data, sizeof out->key);
    if (tokens != out->unit->length)
        return s1f_fail(S1F_ERR_ARG, "%s: layer %lld attends with %lld tokens, the segment has %lld",
                        s1f_name_of(out->unit).text, (long long)out->key, (long long)tokens,
                        (long long)out->unit->length);
    return S1F_OK;
}

s1f_status s1f_segment_forward(const s1f_op_tensor *layer, const s1f_op_tensor *k, const s1f_op_tensor *v,
                               const s1f_op_tensor *docs, const s1f_slab_memory *memory, int64_t device,
                               s1f_segment *out)
{
    S1F_TRY(find_segment(layer, k->sizes[2], out));
    const s1f_current_unit *unit = out->unit;
    out->shape = (s1f_layer_shape){.batch = k->sizes[0],
                                   .kv_heads = k->sizes[1],
                                   .head_dim = k->sizes[3],
                                   .v_head_dim = v->sizes[3],
                                   .dtype = k->dtype,
                                   .with_docs = docs->numel > 0,
                                   .memory = memory,
                                   .device = device};
    if (unit->num_documents > 1 && docs->numel == 0)
        return s1f_fail(S1F_ERR_ARG,
                        "causal_attention of layer %lld was given no doc_ids, and this row of the plan holds %lld "
                        "documents, which would see each other: give it doc_ids=, those of plan.doc_ids, as "
                        "docs/how-to/documents.md shows; zeros if they are to see each other",
                        (long long)out->key, (long long)unit->num_documents);
    S1F_TRY(s1f_kv_cache_write(unit->cache, unit, out->key, &out->shape, &out->rows));
    if (out->rows.is_written || out->rows.docs == NULL)
        return S1F_OK;
    int64_t doc_strides[2] = {out->rows.num_rows, 1};
    return s1f_op_copy_into(out->rows.docs, doc_strides, unit->row, docs);
}

s1f_status s1f_segment_backward(const s1f_op_tensor *layer, const s1f_op_tensor *q, const s1f_op_tensor *out,
                                int64_t kv_heads, s1f_segment *segment)
{
    s1f_layer_shape *shape = &segment->shape;
    S1F_TRY(find_segment(layer, q->sizes[2], segment));
    S1F_TRY(
        s1f_kv_cache_read(segment->unit->cache, segment->unit, segment->key, shape, &segment->rows, &segment->grads));
    if (shape->batch == q->sizes[0] && shape->kv_heads == kv_heads && shape->head_dim == q->sizes[3] &&
        shape->v_head_dim == out->sizes[3] && shape->dtype == q->dtype)
        return S1F_OK;
    return s1f_fail(S1F_ERR_ARG,
                    "layer %lld: backward with batch %lld, %lld kv heads of %lld, values of %lld, %s; its cache holds "
                    "%lld, %lld of %lld, %lld, %s",
                    (long long)segment->key, (long long)q->sizes[0], (long long)kv_heads, (long long)q->sizes[3],
                    (long long)out->sizes[3], s1f_dtype_name(q->dtype), (long long)shape->batch,
                    (long long)shape->kv_heads, (long long)shape->head_dim, (long long)shape->v_head_dim,
                    s1f_dtype_name(shape->dtype));
}

s1f_status s1f_segment_write(const s1f_segment *segment, const s1f_op_tensor *k, const s1f_op_tensor *v)
{
    int64_t strides[4];
    if (segment->rows.is_written)
        return S1F_OK;
    s1f_segment_strides(segment, k->sizes[3], strides);
    S1F_TRY(s1f_op_copy_into(segment->rows.k, strides, segment->unit->row * k->sizes[3], k));
    s1f_segment_strides(segment, v->sizes[3], strides);
    return s1f_op_copy_into(segment->rows.v, strides, segment->unit->row * v->sizes[3], v);
}

int s1f_segment_is_in_place(const s1f_segment *segment)
{
    return segment->unit->num_ranges == 1 && segment->unit->ranges[0].row == 0;
}

void s1f_segment_strides(const s1f_segment *segment, int64_t head_dim, int64_t strides[4])
{
    const int64_t sizes[4] = {1, segment->shape.kv_heads, segment->rows.num_rows, head_dim};
    s1f_row_major(4, sizes, strides);
}

void s1f_segment_gather_docs(const s1f_segment *segment, int32_t *ids)
{
    const s1f_current_unit *unit = segment->unit;
    int64_t num_keys = unit->offset + unit->length;
    for (int64_t b = 0; b < segment->shape.batch; b++)
        for (int32_t i = 0; i < unit->num_ranges; i++) {
            const s1f_key_range *range = &unit->ranges[i];
            memcpy(ids + b * num_keys + range->begin, segment->rows.docs + b * segment->rows.num_rows + range->row,
                   (size_t)(range->end - range->begin) * sizeof *ids);
        }
}

void s1f_segment_part_ids(const s1f_segment *segment, int32_t *ids)
{
    const s1f_current_unit *unit = segment->unit;
    memset(ids, 0, (size_t)unit->offset * sizeof *ids);
    int32_t *next = ids + unit->offset;
    for (int32_t part = 0; part < unit->num_parts; part++)
        for (int64_t i = 0; i < unit->parts[part]; i++)
            *next++ = part;
}

s1f_status s1f_segment_check_parts(const s1f_segment *segment, int by_distance)
{
    const s1f_current_unit *unit = segment->unit;
    if (by_distance)
        return s1f_fail(S1F_ERR_ARG,
                        "%s: layer %lld has a window or ALiBi slopes, which count the tokens between two, and %d "
                        "siblings share this unit: give each sibling a segment of its own, as "
                        "plan_step(siblings=False) does",
                        s1f_name_of(unit).text, (long long)segment->key, (int)unit->num_parts);
    for (int64_t b = 0; segment->rows.docs != NULL && b < segment->shape.batch; b++)
        for (int32_t i = 0; i < unit->num_ranges; i++) {
            const int32_t *docs = segment->rows.docs + b * segment->rows.num_rows, first = docs[unit->row];
            for (int64_t t = unit->ranges[i].row, end = t + unit->ranges[i].end - unit->ranges[i].begin; t < end; t++)
                if (docs[t] != first)
                    return s1f_fail(
                        S1F_ERR_ARG,
                        "%s: layer %lld was given doc_ids of several documents (%d and %d), and %d siblings "
                        "share this unit: give a tree of siblings one id, or each of them a segment of its "
                        "own",
                        s1f_name_of(unit).text, (long long)segment->key, (int)first, (int)docs[t],
                        (int)unit->num_parts);
        }
    return S1F_OK;
}
