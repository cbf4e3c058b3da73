/* ops.c - boxed kernels: arguments from torch's stack to s1f_attention_args, and back. */
#include "ops.h"

#include "../../kernels/attention.h"
#include "../run/current_unit.h"
#include "../run/kv_cache.h"
#include "torch_abi.h"

#include <stdio.h>
#include <string.h>

enum { MAX_INPUTS = 8, MAX_OUTPUTS = 6, MAX_TEMPORARIES = 12 };

typedef struct {
    AtenTensorHandle handle;
    int64_t ndim, numel;
    int64_t *sizes, *strides; /* borrowed from the tensor */
    int32_t dtype;            /* s1f_dtype, -1: one we have no use for */
    int32_t device_type, device_index;
    void *data;
} tensor;

/* One call of an op. Everything in it is owned, and released when the call ends, however it ends. */
typedef struct {
    tensor inputs[MAX_INPUTS];
    const StableIValue *scalars; /* the arguments after the tensors; borrowed */
    tensor outputs[MAX_OUTPUTS];
    AtenTensorHandle temporaries[MAX_TEMPORARIES];
    int num_temporaries;
} op_call;

/* -- tensors --------------------------------------------------------------------------------------------------- */

static s1f_status torch_failed(const char *function)
{
    return s1f_fail(S1F_ERR_SYSTEM, "libtorch's %s failed", function);
}

static s1f_status describe(tensor *t)
{
    int32_t dtype = 0;
    if (s1f_torch.aoti_torch_get_device_type(t->handle, &t->device_type) != 0 ||
        s1f_torch.aoti_torch_get_device_index(t->handle, &t->device_index) != 0 ||
        s1f_torch.aoti_torch_get_dtype(t->handle, &dtype) != 0 ||
        s1f_torch.aoti_torch_get_dim(t->handle, &t->ndim) != 0 ||
        s1f_torch.aoti_torch_get_numel(t->handle, &t->numel) != 0 ||
        s1f_torch.aoti_torch_get_sizes(t->handle, &t->sizes) != 0 ||
        s1f_torch.aoti_torch_get_strides(t->handle, &t->strides) != 0)
        return torch_failed("tensor description");
    t->dtype = s1f_dtype_from_torch(dtype);
    if (s1f_torch.aoti_torch_get_data_ptr(t->handle, &t->data) != 0)
        return torch_failed("aoti_torch_get_data_ptr");
    return S1F_OK;
}

static s1f_status new_tensor(int32_t dtype, int64_t ndim, const int64_t *sizes, const int64_t *strides, tensor *out)
{
    if (s1f_torch.aoti_torch_empty_strided(ndim, sizes, strides, s1f_dtype_to_torch(dtype), s1f_torch_device_cpu(), 0,
                                           &out->handle) != 0) {
        out->handle = NULL;
        return s1f_fail(S1F_ERR_MEMORY, "libtorch could not allocate a tensor of %s", s1f_dtype_name(dtype));
    }
    return describe(out);
}

static s1f_status new_temporary(op_call *call, int32_t dtype, int64_t ndim, const int64_t *sizes,
                                const int64_t *strides, tensor *out)
{
    s1f_status status = new_tensor(dtype, ndim, sizes, strides, out);
    if (out->handle != NULL)
        call->temporaries[call->num_temporaries++] = out->handle;
    return status;
}

static void row_major(int64_t ndim, const int64_t *sizes, int64_t *strides)
{
    int64_t stride = 1;
    for (int64_t i = ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= sizes[i];
    }
}

/* (B, H, S, D) whose memory is (B, S, H, D). */
static void token_major(const int64_t sizes[4], int64_t strides[4])
{
    strides[0] = sizes[2] * sizes[1] * sizes[3];
    strides[1] = sizes[3];
    strides[2] = sizes[1] * sizes[3];
    strides[3] = 1;
}

static s1f_status new_output(op_call *call, int index, int32_t dtype, int64_t batch, int64_t heads, int64_t rows,
                             int64_t head_dim)
{
    int64_t sizes[4] = {batch, heads, rows, head_dim}, strides[4];
    token_major(sizes, strides);
    return new_tensor(dtype, 4, sizes, strides, &call->outputs[index]);
}

/* Sizes of 1 have no stride to speak of. */
static int strides_agree(const tensor *t, const int64_t *strides)
{
    for (int64_t i = 0; i < t->ndim; i++)
        if (t->sizes[i] != 1 && t->strides[i] != strides[i])
            return 0;
    return 1;
}

/* *t becomes a copy of itself with these strides, unless it has them. */
static s1f_status restride(op_call *call, tensor *t, const int64_t *strides)
{
    if (strides_agree(t, strides))
        return S1F_OK;
    tensor copy = {0};
    s1f_status status = new_temporary(call, t->dtype, t->ndim, t->sizes, strides, &copy);
    if (status != S1F_OK)
        return status;
    if (s1f_torch.aoti_torch_copy_(copy.handle, t->handle, 0) != 0)
        return torch_failed("aoti_torch_copy_");
    *t = copy;
    return S1F_OK;
}

/* The kernels read any strides but the last, which is 1. */
static s1f_status unit_last_stride(op_call *call, tensor *t)
{
    if (t->sizes[3] == 1 || t->strides[3] == 1)
        return S1F_OK;
    int64_t strides[4];
    token_major(t->sizes, strides);
    return restride(call, t, strides);
}

static s1f_strides strides_of(const tensor *t)
{
    return (s1f_strides){.batch = t->strides[0], .head = t->strides[1], .row = t->strides[2]};
}

/* Copies `t` into memory of ours on its device. */
static s1f_status copy_into(void *memory, const int64_t *strides, int64_t offset, const tensor *t)
{
    AtenTensorHandle view = NULL;
    if (s1f_torch.aoti_torch_create_tensor_from_blob(memory, t->ndim, t->sizes, strides, offset,
                                                     s1f_dtype_to_torch(t->dtype), t->device_type, t->device_index,
                                                     &view) != 0)
        return torch_failed("aoti_torch_create_tensor_from_blob");
    AOTITorchError failed = s1f_torch.aoti_torch_copy_(view, t->handle, 0);
    s1f_torch.aoti_torch_delete_tensor_object(view);
    return failed != 0 ? torch_failed("aoti_torch_copy_") : S1F_OK;
}

/* -- arguments ------------------------------------------------------------------------------------------------- */

static double scalar_float(StableIValue value)
{
    double number;
    memcpy(&number, &value, sizeof number);
    return number;
}

static int64_t scalar_int(StableIValue value)
{
    return (int64_t)value;
}

static s1f_status require(int condition, const char *name, const tensor *t, const char *rule)
{
    if (condition)
        return S1F_OK;
    char shape[128] = "";
    size_t used = 0;
    for (int64_t i = 0; i < t->ndim && used < sizeof shape; i++)
        used +=
            (size_t)snprintf(shape + used, sizeof shape - used, "%s%lld", i > 0 ? ", " : "", (long long)t->sizes[i]);
    return s1f_fail(S1F_ERR_ARG, "%s is (%s) of %s, %s", name, shape, s1f_dtype_name(t->dtype), rule);
}

static int is_shape(const tensor *t, int32_t dtype, int64_t batch, int64_t heads, int64_t rows, int64_t head_dim)
{
    return t->dtype == dtype && t->ndim == 4 && t->sizes[0] == batch && t->sizes[1] == heads && t->sizes[2] == rows &&
           t->sizes[3] == head_dim;
}

static int32_t sum_dtype(int32_t dtype) /* of lse, dK and dV while they add up */
{
    return dtype == S1F_FLOAT64 ? S1F_FLOAT64 : S1F_FLOAT32;
}

/* What every attention op takes: q's shape, then the options, which follow the tensors in the order of the schema. */
static s1f_status start_arguments(op_call *call, tensor *q, tensor *slopes, tensor *docs, s1f_attention_args *args)
{
    s1f_status status =
        require(q->ndim == 4 && q->numel > 0, "q", q, "must be (batch, heads, tokens, head_dim), none of them 0");
    if (status == S1F_OK)
        status = require(q->dtype == S1F_FLOAT32 || q->dtype == S1F_FLOAT64 || q->dtype == S1F_BFLOAT16 ||
                             q->dtype == S1F_FLOAT16,
                         "q", q, "must be float32, float64, bfloat16 or float16");
    if (status == S1F_OK)
        status = unit_last_stride(call, q);
    if (status != S1F_OK)
        return status;
    *args = (s1f_attention_args){
        .dtype = q->dtype,
        .batch = q->sizes[0],
        .heads = q->sizes[1],
        .segment_len = q->sizes[2],
        .head_dim = q->sizes[3],
        .q = q->data,
        .q_strides = strides_of(q),
        .scale = scalar_float(call->scalars[0]),
        .window = scalar_int(call->scalars[1]),
        .softcap = scalar_float(call->scalars[2]),
    };
    if (slopes->numel > 0) {
        int per_batch = slopes->ndim == 2 && slopes->sizes[0] == args->batch && slopes->sizes[1] == args->heads;
        status = require(slopes->dtype == S1F_FLOAT32 &&
                             (per_batch || (slopes->ndim == 1 && slopes->sizes[0] == args->heads)),
                         "slopes", slopes, "must be (heads) or (batch, heads) of float32");
        int64_t strides[2];
        row_major(slopes->ndim, slopes->sizes, strides);
        if (status == S1F_OK)
            status = restride(call, slopes, strides);
        args->slopes = slopes->data;
        args->slopes_batch_stride = per_batch ? args->heads : 0;
    }
    if (status == S1F_OK && docs->numel > 0)
        status = require(docs->dtype == S1F_INT32 && docs->ndim == 2 && docs->sizes[0] == args->batch &&
                             docs->sizes[1] == args->segment_len,
                         "doc_ids", docs, "must be (batch, tokens) of int32");
    return status;
}

/* k and v of q's batch, tokens, head_dim and dtype. */
static s1f_status take_keys(const tensor *k, const tensor *v, s1f_attention_args *args)
{
    s1f_status status =
        require(k->ndim == 4 && k->numel > 0 &&
                    is_shape(k, args->dtype, args->batch, k->sizes[1], args->segment_len, args->head_dim) &&
                    args->heads % k->sizes[1] == 0,
                "k", k, "must agree with q, and its heads divide q's");
    if (status == S1F_OK)
        status = require(is_shape(v, k->dtype, k->sizes[0], k->sizes[1], k->sizes[2], k->sizes[3]), "v", v,
                         "must agree with k");
    if (status == S1F_OK)
        args->kv_heads = k->sizes[1];
    return status;
}

/* What backward takes of the forward: dout, out and lse. */
static s1f_status take_results(op_call *call, tensor *dout, tensor *out, tensor *lse, s1f_attention_args *args)
{
    int64_t lse_sizes[3] = {args->batch, args->heads, args->segment_len}, lse_strides[3];
    row_major(3, lse_sizes, lse_strides);
    s1f_status status =
        require(is_shape(dout, args->dtype, args->batch, args->heads, args->segment_len, args->head_dim), "dout", dout,
                "must agree with q");
    if (status == S1F_OK)
        status = require(is_shape(out, args->dtype, args->batch, args->heads, args->segment_len, args->head_dim), "out",
                         out, "must agree with q");
    if (status == S1F_OK)
        status = require(lse->ndim == 3 && memcmp(lse->sizes, lse_sizes, sizeof lse_sizes) == 0 &&
                             lse->dtype == sum_dtype(args->dtype),
                         "lse", lse, "must be (batch, heads, tokens) of float32, float64 for float64");
    if (status == S1F_OK)
        status = unit_last_stride(call, dout);
    if (status == S1F_OK)
        status = unit_last_stride(call, out);
    if (status == S1F_OK)
        status = restride(call, lse, lse_strides);
    args->dout = dout->data;
    args->dout_strides = strides_of(dout);
    args->out = out->data;
    args->out_strides = strides_of(out);
    args->lse = lse->data;
    return status;
}

/* -- kernels --------------------------------------------------------------------------------------------------- */

static _Thread_local int parallel_failed;

static void torch_parallel(int64_t begin, int64_t end, int64_t grain, s1f_parallel_body body, void *context)
{
    if (s1f_torch.torch_parallel_for(begin, end, grain, body, context) != 0)
        parallel_failed = 1;
}

/* Scratch of a call: within a step the KV cache's, else a temporary of torch's. */
static s1f_status take_scratch(op_call *call, int64_t bytes, s1f_kv_cache *cache, s1f_attention_context *context)
{
    context->scratch_bytes = bytes;
    if (bytes == 0)
        return S1F_OK;
    if (cache != NULL)
        return s1f_kv_cache_scratch(cache, bytes, &context->scratch);
    int64_t one = 1;
    tensor temporary = {0};
    s1f_status status = new_temporary(call, S1F_UINT8, 1, &bytes, &one, &temporary);
    context->scratch = temporary.data;
    return status;
}

/* Runs the kernel on torch's threads. cache: of the step that the call is part of, NULL outside. */
static s1f_status run_kernel(op_call *call, const s1f_attention_args *args, s1f_kv_cache *cache, int backward)
{
    uint32_t num_threads = 1;
    if (s1f_torch.torch_get_num_threads(&num_threads) != 0)
        return torch_failed("torch_get_num_threads");
    s1f_attention_context context = {.parallel_for = torch_parallel, .num_threads = (int32_t)num_threads};
    s1f_status status =
        take_scratch(call, s1f_attention_scratch_bytes(args, context.num_threads, backward), cache, &context);
    if (status != S1F_OK)
        return status;
    parallel_failed = 0;
    status = backward ? s1f_attention_backward(args, &context) : s1f_attention_forward(args, &context);
    return status == S1F_OK && parallel_failed ? torch_failed("torch_parallel_for") : status;
}

static s1f_status run_forward(op_call *call, s1f_attention_args *args, s1f_kv_cache *cache)
{
    int64_t lse_sizes[3] = {args->batch, args->heads, args->segment_len}, lse_strides[3];
    row_major(3, lse_sizes, lse_strides);
    tensor *out = &call->outputs[0], *lse = &call->outputs[1];
    s1f_status status = new_output(call, 0, args->dtype, args->batch, args->heads, args->segment_len, args->head_dim);
    if (status == S1F_OK)
        status = new_tensor(sum_dtype(args->dtype), 3, lse_sizes, lse_strides, lse);
    if (status != S1F_OK)
        return status;
    args->out = out->data;
    args->out_strides = strides_of(out);
    args->lse = lse->data;
    return run_kernel(call, args, cache, 0);
}

static s1f_status run_backward(op_call *call, s1f_attention_args *args, s1f_kv_cache *cache)
{
    tensor *dq = &call->outputs[0];
    s1f_status status = new_output(call, 0, args->dtype, args->batch, args->heads, args->segment_len, args->head_dim);
    if (status != S1F_OK)
        return status;
    args->dq = dq->data;
    args->dq_strides = strides_of(dq);
    return run_kernel(call, args, cache, 1);
}

/* The outputs dk and dv, alike in strides. */
static s1f_status new_key_gradients(op_call *call, s1f_attention_args *args)
{
    for (int i = 1; i <= 2; i++) {
        s1f_status status =
            new_output(call, i, args->dtype, args->batch, args->kv_heads, args->segment_len, args->head_dim);
        if (status != S1F_OK)
            return status;
    }
    args->own_dk = call->outputs[1].data;
    args->own_dv = call->outputs[2].data;
    args->own_dkv_strides = strides_of(&call->outputs[1]);
    return S1F_OK;
}

/* -- causal_attention: the whole sequence at once --------------------------------------------------------------- */

/* The kernels take k and v of the same strides. */
static s1f_status take_whole(op_call *call, tensor *k, tensor *v, tensor *docs, s1f_attention_args *args)
{
    s1f_status status = take_keys(k, v, args);
    if (status == S1F_OK)
        status = unit_last_stride(call, k);
    if (status == S1F_OK && !strides_agree(v, k->strides)) {
        int64_t strides[4];
        token_major(k->sizes, strides);
        status = restride(call, k, strides);
        if (status == S1F_OK)
            status = restride(call, v, strides);
    }
    if (status == S1F_OK && docs->numel > 0) {
        int64_t strides[2];
        row_major(2, docs->sizes, strides);
        status = restride(call, docs, strides);
        args->docs = docs->data;
        args->docs_batch_stride = strides[0];
    }
    args->k = k->data;
    args->v = v->data;
    args->kv_strides = strides_of(k);
    return status;
}

static s1f_status causal_attention(op_call *call)
{
    tensor *t = call->inputs, *q = &t[0], *k = &t[1], *v = &t[2], *slopes = &t[3], *docs = &t[4];
    s1f_attention_args args;
    s1f_status status = start_arguments(call, q, slopes, docs, &args);
    if (status == S1F_OK)
        status = take_whole(call, k, v, docs, &args);
    return status == S1F_OK ? run_forward(call, &args, NULL) : status;
}

static s1f_status causal_attention_backward(op_call *call)
{
    tensor *t = call->inputs, *dout = &t[0], *q = &t[1], *k = &t[2], *v = &t[3], *out = &t[4], *lse = &t[5];
    tensor *slopes = &t[6], *docs = &t[7], *dk = &call->outputs[1], *dv = &call->outputs[2];
    s1f_attention_args args;
    s1f_status status = start_arguments(call, q, slopes, docs, &args);
    if (status == S1F_OK)
        status = take_whole(call, k, v, docs, &args);
    if (status == S1F_OK)
        status = take_results(call, dout, out, lse, &args);
    if (status == S1F_OK)
        status = new_key_gradients(call, &args);
    if (status != S1F_OK)
        return status;

    /* 16-bit gradients add up in fp32 and are rounded once. */
    tensor dk_sum = *dk, dv_sum = *dv;
    if (sum_dtype(args.dtype) != args.dtype) {
        status = new_temporary(call, S1F_FLOAT32, 4, dk->sizes, dk->strides, &dk_sum);
        if (status == S1F_OK)
            status = new_temporary(call, S1F_FLOAT32, 4, dv->sizes, dv->strides, &dv_sum);
    } else {
        args.own_dk = args.own_dv = NULL; /* the sums are the gradients */
    }
    args.dk = dk_sum.data;
    args.dv = dv_sum.data;
    args.dkv_strides = strides_of(&dk_sum);
    args.store_kv_grads = 1;
    return status == S1F_OK ? run_backward(call, &args, NULL) : status;
}

/* -- segment_attention: one segment over the KV cache ------------------------------------------------------------ */

static s1f_status current_segment(const tensor *layer, int64_t tokens, const s1f_current_unit **unit, int64_t *key)
{
    *unit = s1f_current_unit_get();
    if (*unit == NULL)
        return s1f_fail(S1F_ERR_STATE, "segment_attention outside a step: there is no current unit whose KV cache it "
                                       "could use");
    s1f_status status =
        require(layer->numel == 1 && layer->dtype == S1F_INT64 && layer->device_type == s1f_torch_device_cpu(), "layer",
                layer, "must be a handle made by seq1f1b.layer_handle: one int64 on the CPU");
    if (status != S1F_OK)
        return status;
    memcpy(key, layer->data, sizeof *key);
    char name[64];
    s1f_unit_text((*unit)->unit, 1, name, sizeof name);
    if (tokens != (*unit)->length)
        return s1f_fail(S1F_ERR_ARG, "%s: layer %lld attends with %lld tokens, the segment has %lld", name,
                        (long long)*key, (long long)tokens, (long long)(*unit)->length);
    return S1F_OK;
}

/* Strides of [batch][kv_heads][sequence_length][head_dim]. */
static void slab_strides(int64_t kv_heads, int64_t sequence_length, int64_t head_dim, int64_t strides[4])
{
    const int64_t sizes[4] = {1, kv_heads, sequence_length, head_dim};
    row_major(4, sizes, strides);
}

/* k, v and docs go to the segment's rows of the layer's slab. */
static s1f_status write_rows(const s1f_current_unit *unit, int64_t key, const s1f_layer_shape *shape, const tensor *k,
                             const tensor *v, const tensor *docs, s1f_kv_rows *rows)
{
    s1f_status status = s1f_kv_cache_write(unit->cache, unit, key, shape, rows);
    if (status != S1F_OK)
        return status;
    int64_t strides[4], doc_strides[2] = {rows->sequence_length, 1};
    slab_strides(shape->kv_heads, rows->sequence_length, shape->head_dim, strides);
    status = copy_into(rows->k, strides, unit->offset * shape->head_dim, k);
    if (status == S1F_OK)
        status = copy_into(rows->v, strides, unit->offset * shape->head_dim, v);
    if (status == S1F_OK && rows->docs != NULL)
        status = copy_into(rows->docs, doc_strides, unit->offset, docs);
    return status;
}

/* The layer's slab holds what a backward of q with so many kv heads needs. */
static s1f_status check_layer(const tensor *q, int64_t kv_heads, int64_t key, const s1f_layer_shape *shape)
{
    if (shape->batch == q->sizes[0] && shape->kv_heads == kv_heads && shape->head_dim == q->sizes[3] &&
        shape->dtype == q->dtype)
        return S1F_OK;
    return s1f_fail(S1F_ERR_ARG,
                    "layer %lld: backward with batch %lld, %lld kv heads of %lld, %s; its cache holds "
                    "%lld, %lld of %lld, %s",
                    (long long)key, (long long)q->sizes[0], (long long)kv_heads, (long long)q->sizes[3],
                    s1f_dtype_name(q->dtype), (long long)shape->batch, (long long)shape->kv_heads,
                    (long long)shape->head_dim, s1f_dtype_name(shape->dtype));
}

static void attend_to_rows(s1f_attention_args *args, const s1f_current_unit *unit, const s1f_kv_rows *rows)
{
    int64_t strides[4];
    slab_strides(args->kv_heads, rows->sequence_length, args->head_dim, strides);
    args->q_start = unit->offset;
    args->k = rows->k;
    args->v = rows->v;
    args->kv_strides = (s1f_strides){.batch = strides[0], .head = strides[1], .row = strides[2]};
    args->docs = rows->docs;
    args->docs_batch_stride = rows->sequence_length;
}

static s1f_status segment_attention(op_call *call)
{
    tensor *t = call->inputs, *q = &t[0], *k = &t[1], *v = &t[2], *layer = &t[3], *slopes = &t[4], *docs = &t[5];
    s1f_attention_args args;
    const s1f_current_unit *unit = NULL;
    int64_t key = 0;
    s1f_kv_rows rows;
    s1f_status status = start_arguments(call, q, slopes, docs, &args);
    if (status == S1F_OK)
        status = take_keys(k, v, &args);
    if (status == S1F_OK)
        status = current_segment(layer, args.segment_len, &unit, &key);
    if (status != S1F_OK)
        return status;
    s1f_layer_shape shape = {
        .batch = args.batch,
        .kv_heads = args.kv_heads,
        .head_dim = args.head_dim,
        .dtype = args.dtype,
        .with_docs = docs->numel > 0,
    };
    status = write_rows(unit, key, &shape, k, v, docs, &rows);
    if (status != S1F_OK)
        return status;
    attend_to_rows(&args, unit, &rows);
    return status == S1F_OK ? run_forward(call, &args, unit->cache) : status;
}

static s1f_status segment_attention_backward(op_call *call)
{
    tensor *t = call->inputs, *dout = &t[0], *q = &t[1], *out = &t[2], *lse = &t[3], *layer = &t[4];
    tensor *slopes = &t[5], *docs = &t[6];
    s1f_attention_args args;
    const s1f_current_unit *unit = NULL;
    int64_t key = 0;
    s1f_layer_shape shape;
    s1f_kv_rows rows;
    s1f_kv_grads grads;
    s1f_status status = start_arguments(call, q, slopes, docs, &args);
    if (status == S1F_OK)
        status = take_results(call, dout, out, lse, &args);
    if (status == S1F_OK)
        status = current_segment(layer, args.segment_len, &unit, &key);
    if (status == S1F_OK)
        status = s1f_kv_cache_read(unit->cache, unit, key, &shape, &rows, &grads);
    if (status != S1F_OK)
        return status;
    args.kv_heads = scalar_int(call->scalars[3]);
    status = check_layer(q, args.kv_heads, key, &shape);
    if (status != S1F_OK)
        return status;

    attend_to_rows(&args, unit, &rows);
    args.dk = grads.dk;
    args.dv = grads.dv;
    args.dkv_strides = args.kv_strides;
    args.store_kv_grads = grads.first;
    status = new_key_gradients(call, &args); /* later segments went backward before, so they are complete */
    return status == S1F_OK ? run_backward(call, &args, unit->cache) : status;
}

/* -- cache_write, cache_read: the cache's rows as tensors, on any device, for attention by torch's own ops ---------- */

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

static s1f_status check_devices(op_call *call, int num_tensors)
{
    const tensor *first = &call->inputs[0];
    for (int i = 1; i < num_tensors; i++)
        if (call->inputs[i].device_type != first->device_type || call->inputs[i].device_index != first->device_index)
            return s1f_fail(S1F_ERR_ARG, "q, k, v and doc_ids must be on one device");
    return S1F_OK;
}

/* The output becomes a view of rows of ours, borrowed: it is for use before the unit ends. */
static s1f_status view_rows(op_call *call, int index, void *memory, int32_t dtype, int64_t ndim, const int64_t *sizes,
                            const int64_t *strides)
{
    const tensor *like = &call->inputs[0];
    tensor *out = &call->outputs[index];
    if (s1f_torch.aoti_torch_create_tensor_from_blob(memory, ndim, sizes, strides, 0, s1f_dtype_to_torch(dtype),
                                                     like->device_type, like->device_index, &out->handle) != 0) {
        out->handle = NULL;
        return torch_failed("aoti_torch_create_tensor_from_blob");
    }
    return S1F_OK;
}

/* Outputs `index` and the one after it: rows [0, end of the segment) of both. */
static s1f_status view_pair(op_call *call, int index, void *first, void *second, int32_t dtype,
                            const s1f_layer_shape *shape, const s1f_current_unit *unit)
{
    int64_t sizes[4] = {shape->batch, shape->kv_heads, unit->offset + unit->length, shape->head_dim}, strides[4];
    slab_strides(shape->kv_heads, unit->sequence_length, shape->head_dim, strides);
    s1f_status status = view_rows(call, index, first, dtype, 4, sizes, strides);
    return status == S1F_OK ? view_rows(call, index + 1, second, dtype, 4, sizes, strides) : status;
}

/* (batch, end of the segment), or (batch, 0) without document ids. */
static s1f_status view_docs(op_call *call, int index, const s1f_kv_rows *rows, const s1f_layer_shape *shape,
                            const s1f_current_unit *unit)
{
    int64_t sizes[2] = {shape->batch, rows->docs != NULL ? unit->offset + unit->length : 0};
    int64_t strides[2] = {rows->sequence_length, 1};
    return view_rows(call, index, rows->docs != NULL ? (void *)rows->docs : rows->k, S1F_INT32, 2, sizes, strides);
}

static s1f_status cache_write(op_call *call)
{
    tensor *t = call->inputs, *k = &t[0], *v = &t[1], *docs = &t[2], *layer = &t[3];
    const s1f_current_unit *unit = NULL;
    int64_t key = 0;
    s1f_kv_rows rows;
    s1f_status status = require(k->ndim == 4 && k->numel > 0 && v->ndim == 4 && v->dtype == k->dtype &&
                                    memcmp(v->sizes, k->sizes, 4 * sizeof *k->sizes) == 0,
                                "k", k, "must be (batch, kv_heads, tokens, head_dim), none of them 0, as v");
    if (status == S1F_OK)
        status = require(docs->numel == 0 || (docs->dtype == S1F_INT32 && docs->ndim == 2 &&
                                              docs->sizes[0] == k->sizes[0] && docs->sizes[1] == k->sizes[2]),
                         "doc_ids", docs, "must be (batch, tokens) of int32");
    if (status == S1F_OK)
        status = check_devices(call, 3);
    if (status == S1F_OK)
        status = current_segment(layer, k->sizes[2], &unit, &key);
    if (status != S1F_OK)
        return status;
    s1f_layer_shape shape = {
        .batch = k->sizes[0],
        .kv_heads = k->sizes[1],
        .head_dim = k->sizes[3],
        .dtype = k->dtype,
        .with_docs = docs->numel > 0,
        .memory = &torch_memory,
        .device = (int64_t)k->device_type << 32 | (uint32_t)k->device_index,
    };
    status = write_rows(unit, key, &shape, k, v, docs, &rows);
    if (status == S1F_OK)
        status = view_pair(call, 0, rows.k, rows.v, shape.dtype, &shape, unit);
    return status == S1F_OK ? view_docs(call, 2, &rows, &shape, unit) : status;
}

static s1f_status cache_read(op_call *call)
{
    const tensor *q = &call->inputs[0], *layer = &call->inputs[1];
    const s1f_current_unit *unit = NULL;
    int64_t key = 0;
    s1f_layer_shape shape;
    s1f_kv_rows rows;
    s1f_kv_grads grads;
    s1f_status status = require(q->ndim == 4 && q->numel > 0, "q", q, "must be (batch, heads, tokens, head_dim)");
    if (status == S1F_OK)
        status = current_segment(layer, q->sizes[2], &unit, &key);
    if (status == S1F_OK)
        status = s1f_kv_cache_read(unit->cache, unit, key, &shape, &rows, &grads);
    if (status == S1F_OK)
        status = check_layer(q, scalar_int(call->scalars[0]), key, &shape);
    if (status == S1F_OK)
        status = view_pair(call, 0, rows.k, rows.v, shape.dtype, &shape, unit);
    if (status == S1F_OK)
        status = view_pair(call, 2, grads.dk, grads.dv, sum_dtype(shape.dtype), &shape, unit);
    if (status == S1F_OK)
        status = view_docs(call, 4, &rows, &shape, unit);
    int64_t held = grads.first ? 0 : unit->offset + unit->length, one = 1;
    return status == S1F_OK ? view_rows(call, 5, grads.dk, sum_dtype(shape.dtype), 1, &held, &one) : status;
}

/* -- positions -------------------------------------------------------------------------------------------------- */

/* Ids of packed documents: the position of the document's first token. Each token begins one or goes on with that before
 * it, so that ids of another kind are seen here, and not in a loss that is a little off. */
static s1f_status check_document_starts(const tensor *docs, int64_t batch, const int32_t *starts, int64_t first)
{
    for (int64_t i = 0; i < docs->sizes[1]; i++) {
        int64_t position = first + i, start = starts[i];
        int goes_on = i > 0 ? start == starts[i - 1] : start >= 0 && start < first;
        if (start != position && !goes_on)
            return s1f_fail(S1F_ERR_ARG,
                            "doc_ids of row %lld, token %lld is %lld, must be the position of its document's first "
                            "token: seq1f1b.document_starts makes such ids of a whole row's",
                            (long long)batch, (long long)position, (long long)start);
    }
    return S1F_OK;
}

static s1f_status positions_in_documents(op_call *call, tensor *docs, int64_t length, int64_t first)
{
    s1f_status status = require(docs->dtype == S1F_INT32 && docs->ndim == 2 && docs->sizes[1] == length, "doc_ids",
                                docs, "must be (batch, tokens) of int32, tokens as many as x has");
    int64_t strides[2];
    if (status == S1F_OK) {
        row_major(2, docs->sizes, strides);
        status = restride(call, docs, strides);
    }
    if (status == S1F_OK)
        status = new_tensor(S1F_INT64, 2, docs->sizes, strides, &call->outputs[0]);
    for (int64_t b = 0; status == S1F_OK && b < docs->sizes[0]; b++) {
        const int32_t *starts = (const int32_t *)docs->data + b * length;
        int64_t *position = (int64_t *)call->outputs[0].data + b * length;
        status = check_document_starts(docs, b, starts, first);
        for (int64_t i = 0; i < length; i++)
            position[i] = first + i - starts[i];
    }
    return status;
}

static s1f_status positions(op_call *call)
{
    const tensor *x = &call->inputs[0];
    tensor *docs = &call->inputs[1];
    int64_t dim = scalar_int(call->scalars[0]), rank = scalar_int(call->scalars[1]), one = 1;
    int64_t num_shards = scalar_int(call->scalars[2]);
    if (dim < -x->ndim || dim >= x->ndim)
        return s1f_fail(S1F_ERR_ARG, "dim is %lld, x has %lld dimensions", (long long)dim, (long long)x->ndim);
    if (rank < 0 || rank >= num_shards)
        return s1f_fail(S1F_ERR_ARG, "shard is (%lld, %lld), must be (rank, size) with 0 <= rank < size",
                        (long long)rank, (long long)num_shards);
    int64_t length = x->sizes[dim < 0 ? dim + x->ndim : dim], first = rank * length;
    const s1f_current_unit *unit = s1f_current_unit_get();
    if (unit != NULL) {
        char name[64];
        s1f_unit_text(unit->unit, 1, name, sizeof name);
        if (length * num_shards != unit->length)
            return s1f_fail(S1F_ERR_ARG,
                            "%s: positions of dimension %lld, which has %lld elements; the segment has %lld tokens "
                            "(shards: %lld)",
                            name, (long long)dim, (long long)length, (long long)unit->length, (long long)num_shards);
        first += unit->offset;
    }
    if (docs->numel > 0)
        return positions_in_documents(call, docs, length, first);
    s1f_status status = new_tensor(S1F_INT64, 1, &length, &one, &call->outputs[0]);
    int64_t *position = call->outputs[0].data;
    for (int64_t i = 0; i < length && status == S1F_OK; i++)
        position[i] = first + i;
    return status;
}

/* -- registration ----------------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    s1f_status (*body)(op_call *call);
    int num_tensors, num_outputs; /* the tensors come first in the schema */
    int any_device;               /* registered for every device, not the CPU alone */
} op;

static _Thread_local struct {
    s1f_status status;
    char text[1024];
} failure;

s1f_status s1f_op_failure_take(const char **text)
{
    s1f_status status = failure.status;
    *text = status == S1F_OK ? "" : failure.text;
    failure.status = S1F_OK;
    return status;
}

static void release(AtenTensorHandle handle)
{
    if (handle != NULL)
        s1f_torch.aoti_torch_delete_tensor_object(handle);
}

static void run_op(const op *definition, StableIValue *stack)
{
    op_call call = {.scalars = stack + definition->num_tensors};
    for (int i = 0; i < definition->num_tensors; i++)
        call.inputs[i].handle = (AtenTensorHandle)(uintptr_t)stack[i];
    AtenTensorHandle inputs[MAX_INPUTS]; /* what we own, whatever the body makes of call.inputs */
    for (int i = 0; i < definition->num_tensors; i++)
        inputs[i] = call.inputs[i].handle;

    s1f_status status = S1F_OK;
    for (int i = 0; i < definition->num_tensors && status == S1F_OK; i++)
        status = describe(&call.inputs[i]);
    for (int i = 0; i < definition->num_tensors && status == S1F_OK && !definition->any_device; i++)
        if (call.inputs[i].device_type != s1f_torch_device_cpu())
            status = s1f_fail(S1F_ERR_ARG, "every tensor of %s must be on the CPU", definition->name);
    if (status == S1F_OK)
        status = definition->body(&call);

    for (int i = 0; i < definition->num_tensors; i++)
        release(inputs[i]);
    for (int i = 0; i < call.num_temporaries; i++)
        release(call.temporaries[i]);
    if (status == S1F_OK) {
        for (int i = 0; i < definition->num_outputs; i++)
            stack[i] = (StableIValue)(uintptr_t)call.outputs[i].handle;
        return;
    }
    for (int i = 0; i < definition->num_outputs; i++)
        release(call.outputs[i].handle);
    failure.status = status;
    snprintf(failure.text, sizeof failure.text, "%s", s1f_last_error());
    s1f_torch.aoti_torch_check(false, definition->name, __FILE__, __LINE__, failure.text); /* throws */
}

#define S1F_OPTIONS "float scale, SymInt window, float softcap"
#define S1F_OPS(X)                                                                                                      \
    X(causal_attention, 5, 2, 0,                                                                                        \
      "(Tensor q, Tensor k, Tensor v, Tensor slopes, Tensor doc_ids, " S1F_OPTIONS ") -> (Tensor, Tensor)")             \
    X(causal_attention_backward, 8, 3, 0,                                                                               \
      "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor slopes, Tensor doc_ids, " S1F_OPTIONS \
      ") -> (Tensor, Tensor, Tensor)")                                                                                  \
    X(segment_attention, 6, 2, 0,                                                                                       \
      "(Tensor q, Tensor k, Tensor v, Tensor layer, Tensor slopes, Tensor doc_ids, " S1F_OPTIONS                        \
      ") -> (Tensor, Tensor)")                                                                                          \
    X(segment_attention_backward, 7, 3, 0,                                                                              \
      "(Tensor dout, Tensor q, Tensor out, Tensor lse, Tensor layer, Tensor slopes, Tensor doc_ids, " S1F_OPTIONS       \
      ", SymInt kv_heads) -> (Tensor, Tensor, Tensor)")                                                                 \
    X(cache_write, 4, 3, 1, "(Tensor k, Tensor v, Tensor doc_ids, Tensor layer) -> (Tensor, Tensor, Tensor)")           \
    X(cache_read, 2, 6, 1,                                                                                              \
      "(Tensor q, Tensor layer, SymInt kv_heads) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")                  \
    X(positions, 2, 1, 0, "(Tensor x, Tensor doc_ids, SymInt dim, SymInt rank, SymInt num_shards) -> Tensor")

#define S1F_BOXED(name, num_tensors, num_outputs, any_device, schema)                                                  \
    static void boxed_##name(StableIValue *stack, uint64_t num_arguments, uint64_t num_results)                        \
    {                                                                                                                  \
        static const op definition = {#name, name, num_tensors, num_outputs, any_device};                              \
        (void)num_arguments, (void)num_results;                                                                        \
        run_op(&definition, stack);                                                                                    \
    }
S1F_OPS(S1F_BOXED)
#undef S1F_BOXED

static s1f_status define_ops(TorchLibraryHandle definitions, TorchLibraryHandle cpu, TorchLibraryHandle any_device)
{
#define S1F_ENTRY(name, num_tensors, num_outputs, any_device, schema) {#name, #name schema, boxed_##name, any_device},
    static const struct {
        const char *name, *schema;
        void (*kernel)(StableIValue *, uint64_t, uint64_t);
        int any_device;
    } entries[] = {S1F_OPS(S1F_ENTRY)};
#undef S1F_ENTRY
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
        if (s1f_torch.aoti_torch_library_def(definitions, entries[i].schema) != 0 ||
            s1f_torch.torch_library_impl(entries[i].any_device ? any_device : cpu, entries[i].name, entries[i].kernel,
                                         S1F_TORCH_FLOOR) != 0)
            return s1f_fail(S1F_ERR_SYSTEM, "libtorch refused to register seq1f1b::%s", entries[i].name);
    return S1F_OK;
}

static s1f_status kernel_library(const char *dispatch_key, TorchLibraryHandle *out)
{
    if (s1f_torch.aoti_torch_library_init_impl("seq1f1b", dispatch_key, __FILE__, __LINE__, out) == 0)
        return S1F_OK;
    *out = NULL;
    return torch_failed("aoti_torch_library_init_impl");
}

s1f_status s1f_ops_register(void)
{
    static int registered;
    if (registered)
        return S1F_OK;
    if (!s1f_torch_is_bound())
        return s1f_fail(S1F_ERR_STATE, "libtorch is not bound yet");
    /* They stay for the life of the process: deleting a library takes its ops away. */
    TorchLibraryHandle definitions = NULL, cpu = NULL, any_device = NULL;
    if (s1f_torch.aoti_torch_library_init_fragment("seq1f1b", __FILE__, __LINE__, &definitions) != 0)
        return torch_failed("aoti_torch_library_init_fragment");
    s1f_status status = kernel_library("CPU", &cpu);
    if (status == S1F_OK)
        status = kernel_library("CompositeExplicitAutograd", &any_device);
    if (status == S1F_OK)
        status = define_ops(definitions, cpu, any_device);
    if (status != S1F_OK) { /* so that it can be tried again */
        if (any_device != NULL)
            s1f_torch.aoti_torch_delete_library_object(any_device);
        if (cpu != NULL)
            s1f_torch.aoti_torch_delete_library_object(cpu);
        s1f_torch.aoti_torch_delete_library_object(definitions);
        return status;
    }
    registered = 1;
    return S1F_OK;
}
