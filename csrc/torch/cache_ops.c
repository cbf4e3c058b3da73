/* cache_ops.c - the rows of the KV cache as tensors, on any device, for attention by torch's own ops. */
#include "ops.h"
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
static s1f_status view_pair(s1f_op_call *call, int index, const s1f_segment *segment, void *k, void *v, int32_t dtype,
                            int64_t begin, int64_t end)
{
    const s1f_layer_shape *shape = &segment->shape;
    int64_t sizes[4] = {shape->batch, shape->kv_heads, end - begin, shape->head_dim}, strides[4];
    s1f_segment_strides(segment, shape->head_dim, strides);
    S1F_TRY(view_rows(call, index, k, begin * shape->head_dim, dtype, 4, sizes, strides));
    sizes[3] = shape->v_head_dim;
    s1f_segment_strides(segment, shape->v_head_dim, strides);
    return view_rows(call, index + 1, v, begin * shape->v_head_dim, dtype, 4, sizes, strides);
}

/* Rows of a slab that are shown: up to the segment's last if the keys of its path lie in the first rows, else all. */
static int64_t shown_rows(const s1f_segment *segment)
{
    return s1f_segment_is_in_place(segment) ? segment->unit->offset + segment->unit->length : segment->rows.num_rows;
}

/* (batch, rows shown), or (batch, 0) without document ids. */
static s1f_status view_docs(s1f_op_call *call, int index, const s1f_segment *segment)
{
    const s1f_kv_rows *rows = &segment->rows;
    int64_t sizes[2] = {segment->shape.batch, rows->docs != NULL ? shown_rows(segment) : 0};
    int64_t strides[2] = {rows->num_rows, 1};
    return view_rows(call, index, rows->docs != NULL ? (void *)rows->docs : rows->k, 0, S1F_INT32, 2, sizes, strides);
}

s1f_status s1f_op_cache_write(s1f_op_call *call)
{
    s1f_op_tensor *t = call->inputs, *k = &t[0], *v = &t[1], *docs = &t[2], *layer = &t[3];
    s1f_segment segment;
    S1F_TRY(s1f_op_require(k->ndim == 4 && k->numel > 0 && v->ndim == 4 && v->numel > 0 && v->dtype == k->dtype &&
                               memcmp(v->sizes, k->sizes, 3 * sizeof *k->sizes) == 0,
                           "k", k,
                           "must be (batch, kv_heads, tokens, head_dim), none of them 0, as v in all but "
                           "head_dim"));
    S1F_TRY(s1f_op_require(docs->numel == 0 || (docs->dtype == S1F_INT32 && docs->ndim == 2 &&
                                                docs->sizes[0] == k->sizes[0] && docs->sizes[1] == k->sizes[2]),
                           "doc_ids", docs, "must be (batch, tokens) of int32"));
    S1F_TRY(check_devices(call, 3));
    S1F_TRY(s1f_segment_forward(layer, k, v, docs, &torch_memory,
                                (int64_t)k->device_type << 32 | (uint32_t)k->device_index, &segment));
    const s1f_kv_rows *rows = &segment.rows;
    int64_t begin = segment.unit->row, end = begin + (rows->is_written ? 0 : segment.unit->length);
    S1F_TRY(view_pair(call, 0, &segment, rows->k, rows->v, k->dtype, 0, shown_rows(&segment)));
    S1F_TRY(view_docs(call, 2, &segment));
    return view_pair(call, 3, &segment, rows->k, rows->v, k->dtype, begin, end);
}

s1f_status s1f_op_cache_read(s1f_op_call *call)
{
    const s1f_op_tensor *q = &call->inputs[0], *out = &call->inputs[1], *layer = &call->inputs[2];
    s1f_segment segment;
    S1F_TRY(s1f_op_require(q->ndim == 4 && q->numel > 0, "q", q, "must be (batch, heads, tokens, head_dim)"));
    S1F_TRY(s1f_op_require(out->ndim == 4, "out", out, "must be (batch, heads, tokens, head_dim of v)"));
    S1F_TRY(s1f_segment_backward(layer, q, out, (int64_t)call->scalars[0], &segment));
    const s1f_kv_grads *grads = &segment.grads;
    int64_t held = grads->kept, one = 1, shown = shown_rows(&segment);
    int32_t of_sums = s1f_dtype_of_sums(q->dtype);
    S1F_TRY(view_pair(call, 0, &segment, segment.rows.k, segment.rows.v, q->dtype, 0, shown));
    S1F_TRY(view_pair(call, 2, &segment, grads->dk, grads->dv, of_sums, 0, shown));
    S1F_TRY(view_docs(call, 4, &segment));
    return view_rows(call, 5, grads->dk, 0, of_sums, 1, &held, &one);
}
