/* cache_ops.c - the rows of the KV cache as tensors, on any device, for attention by torch's own ops. */
#include "op_table.h"
#include "segment_rows.h"

#include <string.h>

/* Slabs of torch's allocator, on the device whose type is the upper and whose index the lower half of `device`. */
static s1f_status torch_allocate(int64_t device, int64_t bytes, void **data, void **owner)
{
    int64_t one = 1;
    AtenTensorHandle handle = NULL;
    if (s1f_torch.aoti_torch_empty_strided(1, &bytes, &one, s1f_dtype_to_torch(S1F_UINT8), (int32_t)(device >> 32),
                                           (int32_t)device, &handle) != 0)
        return S1F_ERR_MEMORY;
    if (s1f_torch.aoti_torch_get_data_ptr(handle, data) != 0) {
        s1f_torch.aoti_torch_delete_tensor_object(handle);
        return S1F_ERR_SYSTEM;
    }
    *owner = handle;
    return S1F_OK;
}

static void torch_free(void *owner)
{
    s1f_torch.aoti_torch_delete_tensor_object(owner);
}

static const s1f_slab_memory torch_memory = {torch_allocate, torch_free};

static s1f_status check_devices(s1f_op_call *call, int num_tensors)
{
    const s1f_op_tensor *first = &call->inputs[0];
    for (int i = 1; i < num_tensors; i++)
        if (call->inputs[i].device_type != first->device_type || call->inputs[i].device_index != first->device_index)
            return s1f_fail(S1F_ERR_ARG, "q, k, v and doc_ids must be on one device");
    return S1F_OK;
}

/* The output becomes a view of rows of ours, from element `offset` on, borrowed: it is for use before the unit ends. */
static s1f_status view_rows(s1f_op_call *call, int index, void *memory, int64_t offset, int32_t dtype, int64_t ndim,
                            const int64_t *sizes, const int64_t *strides)
{
    return s1f_op_view(memory, dtype, ndim, sizes, strides, offset, &call->inputs[0], &call->outputs[index].handle);
}

/* Outputs `index` and the one after it: rows [begin, end) of k and v, or dk and dv. */
static s1f_status view_pair(s1f_op_call *call, int index, void *k, void *v, int32_t dtype, const s1f_layer_shape *shape,
                            int64_t begin, int64_t end, int64_t rows_per_head)
{
    int64_t sizes[4] = {shape->batch, shape->kv_heads, end - begin, shape->head_dim}, strides[4];
    s1f_slab_strides(shape->kv_heads, rows_per_head, shape->head_dim, strides);
    S1F_TRY(view_rows(call, index, k, begin * shape->head_dim, dtype, 4, sizes, strides));
    sizes[3] = shape->v_head_dim;
    s1f_slab_strides(shape->kv_heads, rows_per_head, shape->v_head_dim, strides);
    return view_rows(call, index + 1, v, begin * shape->v_head_dim, dtype, 4, sizes, strides);
}

/* Rows of a slab that are shown: up to the segment's last if the keys of its path lie in the first rows, else all. */
static int64_t shown_rows(const s1f_current_unit *unit, const s1f_kv_rows *rows)
{
    return unit->num_ranges == 1 && unit->ranges[0].row == 0 ? unit->offset + unit->length : rows->num_rows;
}

/* (batch, rows shown), or (batch, 0) without document ids. */
static s1f_status view_docs(s1f_op_call *call, int index, const s1f_kv_rows *rows, const s1f_layer_shape *shape,
                            const s1f_current_unit *unit)
{
    int64_t sizes[2] = {shape->batch, rows->docs != NULL ? shown_rows(unit, rows) : 0};
    int64_t strides[2] = {rows->num_rows, 1};
    return view_rows(call, index, rows->docs != NULL ? (void *)rows->docs : rows->k, 0, S1F_INT32, 2, sizes, strides);
}

s1f_status s1f_op_cache_write(s1f_op_call *call)
{
    s1f_op_tensor *t = call->inputs, *k = &t[0], *v = &t[1], *docs = &t[2], *layer = &t[3];
    const s1f_current_unit *unit = NULL;
    int64_t key = 0;
    s1f_kv_rows rows;
    S1F_TRY(s1f_op_require(k->ndim == 4 && k->numel > 0 && v->ndim == 4 && v->numel > 0 && v->dtype == k->dtype &&
                               memcmp(v->sizes, k->sizes, 3 * sizeof *k->sizes) == 0,
                           "k", k,
                           "must be (batch, kv_heads, tokens, head_dim), none of them 0, as v in all but "
                           "head_dim"));
    S1F_TRY(s1f_op_require(docs->numel == 0 || (docs->dtype == S1F_INT32 && docs->ndim == 2 &&
                                                docs->sizes[0] == k->sizes[0] && docs->sizes[1] == k->sizes[2]),
                           "doc_ids", docs, "must be (batch, tokens) of int32"));
    S1F_TRY(check_devices(call, 3));
    S1F_TRY(s1f_current_segment(layer, k->sizes[2], &unit, &key));
    s1f_layer_shape shape = {
        .batch = k->sizes[0],
        .kv_heads = k->sizes[1],
        .head_dim = k->sizes[3],
        .v_head_dim = v->sizes[3],
        .dtype = k->dtype,
        .with_docs = docs->numel > 0,
        .memory = &torch_memory,
        .device = (int64_t)k->device_type << 32 | (uint32_t)k->device_index,
    };
    int64_t begin = unit->row, end = unit->row + unit->length;
    S1F_TRY(s1f_segment_rows(unit, key, &shape, docs, &rows));
    S1F_TRY(view_pair(call, 0, rows.k, rows.v, shape.dtype, &shape, 0, shown_rows(unit, &rows), rows.num_rows));
    S1F_TRY(view_docs(call, 2, &rows, &shape, unit));
    return view_pair(call, 3, rows.k, rows.v, shape.dtype, &shape, begin, rows.is_written ? begin : end, rows.num_rows);
}

s1f_status s1f_op_cache_read(s1f_op_call *call)
{
    const s1f_op_tensor *q = &call->inputs[0], *out = &call->inputs[1], *layer = &call->inputs[2];
    const s1f_current_unit *unit = NULL;
    int64_t key = 0;
    s1f_layer_shape shape;
    s1f_kv_rows rows;
    s1f_kv_grads grads;
    S1F_TRY(s1f_op_require(q->ndim == 4 && q->numel > 0, "q", q, "must be (batch, heads, tokens, head_dim)"));
    S1F_TRY(s1f_op_require(out->ndim == 4, "out", out, "must be (batch, heads, tokens, head_dim of v)"));
    S1F_TRY(s1f_current_segment(layer, q->sizes[2], &unit, &key));
    S1F_TRY(s1f_kv_cache_read(unit->cache, unit, key, &shape, &rows, &grads));
    S1F_TRY(s1f_segment_check_layer(q, out, s1f_op_int(call->scalars[0]), key, &shape));
    int64_t held = grads.kept, one = 1;
    int32_t of_sums = s1f_dtype_of_sums(shape.dtype);
    S1F_TRY(view_pair(call, 0, rows.k, rows.v, shape.dtype, &shape, 0, shown_rows(unit, &rows), rows.num_rows));
    S1F_TRY(view_pair(call, 2, grads.dk, grads.dv, of_sums, &shape, 0, shown_rows(unit, &rows), rows.num_rows));
    S1F_TRY(view_docs(call, 4, &rows, &shape, unit));
    return view_rows(call, 5, grads.dk, 0, of_sums, 1, &held, &one);
}
