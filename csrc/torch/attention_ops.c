/* attention_ops.c - attention on the CPU: the arguments of a call become s1f_attention_args, and the kernels run on
 * torch's threads. */
#include "../../kernels/attention.h"
#include "ops.h"
#include "segment_rows.h"

#include <string.h>

static s1f_strides strides_of(const s1f_op_tensor *t)
{
    return (s1f_strides){.batch = t->strides[0], .head = t->strides[1], .row = t->strides[2]};
}

/* (batch, heads, tokens, head_dim) of the call, in its dtype. */
static int has_shape(const s1f_op_tensor *t, const s1f_attention_args *args, int64_t heads, int64_t head_dim)
{
    return t->dtype == args->dtype && t->ndim == 4 && t->sizes[0] == args->batch && t->sizes[1] == heads &&
           t->sizes[2] == args->segment_len && t->sizes[3] == head_dim;
}

/* What every attention op takes: q's shape; slopes, document ids and sinks, which follow one another in the schema; and
 * the numbers behind all tensors. */
static s1f_status start_arguments(s1f_op_call *call, s1f_op_tensor *q, s1f_op_tensor options[3],
                                  s1f_attention_args *args)
{
    s1f_op_tensor *slopes = &options[0], *docs = &options[1], *sinks = &options[2];
    S1F_TRY(s1f_op_require(q->ndim == 4 && q->numel > 0, "q", q,
                           "must be (batch, heads, tokens, head_dim), none of them 0"));
    S1F_TRY(s1f_op_require(q->dtype == S1F_FLOAT32 || q->dtype == S1F_FLOAT64 || q->dtype == S1F_BFLOAT16 ||
                               q->dtype == S1F_FLOAT16,
                           "q", q, "must be float32, float64, bfloat16 or float16"));
    S1F_TRY(s1f_op_unit_last_stride(call, q));
    *args = (s1f_attention_args){
        .dtype = q->dtype,
        .batch = q->sizes[0],
        .heads = q->sizes[1],
        .segment_len = q->sizes[2],
        .head_dim = q->sizes[3],
        .q = q->data,
        .q_strides = strides_of(q),
        .scale = s1f_op_float(call->scalars[0]),
        .window = (int64_t)call->scalars[1],
        .softcap = s1f_op_float(call->scalars[2]),
    };
    if (slopes->numel > 0) {
        int per_batch = slopes->ndim == 2 && slopes->sizes[0] == args->batch && slopes->sizes[1] == args->heads;
        S1F_TRY(s1f_op_require(slopes->dtype == S1F_FLOAT32 &&
                                   (per_batch || (slopes->ndim == 1 && slopes->sizes[0] == args->heads)),
                               "slopes", slopes, "must be (heads) or (batch, heads) of float32"));
        S1F_TRY(s1f_op_restride(call, slopes, NULL));
        args->slopes = slopes->data;
        args->slopes_batch_stride = per_batch ? args->heads : 0;
    }
    if (docs->numel > 0)
        S1F_TRY(s1f_op_require(docs->dtype == S1F_INT32 && docs->ndim == 2 && docs->sizes[0] == args->batch &&
                                   docs->sizes[1] == args->segment_len,
                               "doc_ids", docs, "must be (batch, tokens) of int32"));
    if (sinks->numel > 0) {
        S1F_TRY(s1f_op_require(sinks->dtype == s1f_dtype_of_sums(args->dtype) && sinks->ndim == 1 &&
                                   sinks->sizes[0] == args->heads,
                               "sinks", sinks, "must be (heads) of float32, float64 for float64"));
        S1F_TRY(s1f_op_restride(call, sinks, NULL));
        args->sinks = sinks->data;
    }
    return S1F_OK;
}

/* k and v of q's batch, tokens and dtype, k of its head_dim. */
static s1f_status take_keys(const s1f_op_tensor *k, const s1f_op_tensor *v, s1f_attention_args *args)
{
    S1F_TRY(s1f_op_require(k->ndim == 4 && k->numel > 0 && has_shape(k, args, k->sizes[1], args->head_dim) &&
                               args->heads % k->sizes[1] == 0,
                           "k", k, "must agree with q, and its heads divide q's"));
    S1F_TRY(s1f_op_require(v->ndim == 4 && v->numel > 0 && has_shape(v, args, k->sizes[1], v->sizes[3]), "v", v,
                           "must agree with k in all but head_dim"));
    args->kv_heads = k->sizes[1];
    args->v_head_dim = v->sizes[3];
    return S1F_OK;
}

/* What backward takes of the forward: dout, out and lse, with the head_dim of v. */
static s1f_status take_results(s1f_op_call *call, s1f_op_tensor *dout, s1f_op_tensor *out, s1f_op_tensor *lse,
                               s1f_attention_args *args)
{
    int64_t lse_sizes[3] = {args->batch, args->heads, args->segment_len};
    S1F_TRY(
        s1f_op_require(has_shape(dout, args, args->heads, args->v_head_dim), "dout", dout, "must agree with q and v"));
    S1F_TRY(s1f_op_require(has_shape(out, args, args->heads, args->v_head_dim), "out", out, "must agree with q and v"));
    S1F_TRY(s1f_op_require(lse->ndim == 3 && memcmp(lse->sizes, lse_sizes, sizeof lse_sizes) == 0 &&
                               lse->dtype == s1f_dtype_of_sums(args->dtype),
                           "lse", lse, "must be (batch, heads, tokens) of float32, float64 for float64"));
    S1F_TRY(s1f_op_unit_last_stride(call, dout));
    S1F_TRY(s1f_op_unit_last_stride(call, out));
    S1F_TRY(s1f_op_restride(call, lse, NULL));
    args->dout = dout->data;
    args->dout_strides = strides_of(dout);
    args->out = out->data;
    args->out_strides = strides_of(out);
    args->lse = lse->data;
    return S1F_OK;
}

/* -- kernels ------------------------------------------------------------------------------------------------------ */

static _Thread_local int parallel_failed;

static void torch_parallel(int64_t begin, int64_t end, int64_t grain, s1f_parallel_body body, void *context)
{
    if (s1f_torch.torch_parallel_for(begin, end, grain, body, context) != 0)
        parallel_failed = 1;
}

/* Scratch of a call: within a step the KV cache's, else a temporary of torch's. */
static s1f_status take_scratch(s1f_op_call *call, int64_t bytes, s1f_kv_cache *cache, s1f_attention_context *context)
{
    context->scratch_bytes = bytes;
    if (cache != NULL)
        return s1f_kv_cache_scratch(cache, bytes, &context->scratch);
    s1f_op_tensor temporary = {0};
    s1f_status status = s1f_op_new_temporary(call, S1F_UINT8, 1, &bytes, NULL, &temporary);
    context->scratch = temporary.data;
    return status;
}

/* Runs the kernel on torch's threads. cache: of the step that the call is part of, NULL outside. */
static s1f_status run_kernel(s1f_op_call *call, const s1f_attention_args *args, s1f_kv_cache *cache, int backward)
{
    uint32_t num_threads = 1;
    if (s1f_torch.torch_get_num_threads(&num_threads) != 0)
        return s1f_torch_failed("torch_get_num_threads");
    s1f_attention_context context = {.parallel_for = torch_parallel, .num_threads = (int32_t)num_threads};
    S1F_TRY(take_scratch(call, s1f_attention_scratch_bytes(args, context.num_threads, backward), cache, &context));
    parallel_failed = 0;
    s1f_status status = backward ? s1f_attention_backward(args, &context) : s1f_attention_forward(args, &context);
    return status == S1F_OK && parallel_failed ? s1f_torch_failed("torch_parallel_for") : status;
}

static s1f_status new_output(s1f_op_call *call, int index, const s1f_attention_args *args, int64_t heads,
                             int64_t head_dim)
{
    int64_t sizes[4] = {args->batch, heads, args->segment_len, head_dim}, strides[4];
    s1f_token_major(sizes, strides);
    return s1f_op_new_tensor(args->dtype, 4, sizes, strides, &call->outputs[index]);
}

static s1f_status run_forward(s1f_op_call *call, s1f_attention_args *args, s1f_kv_cache *cache)
{
    int64_t lse_sizes[3] = {args->batch, args->heads, args->segment_len};
    s1f_op_tensor *out = &call->outputs[0], *lse = &call->outputs[1];
    S1F_TRY(new_output(call, 0, args, args->heads, args->v_head_dim));
    S1F_TRY(s1f_op_new_tensor(s1f_dtype_of_sums(args->dtype), 3, lse_sizes, NULL, lse));
    args->out = out->data;
    args->out_strides = strides_of(out);
    args->lse = lse->data;
    return run_kernel(call, args, cache, 0);
}

static s1f_status run_backward(s1f_op_call *call, s1f_attention_args *args, s1f_kv_cache *cache)
{
    s1f_op_tensor *dq = &call->outputs[0];
    int64_t num_sinks = args->sinks != NULL ? args->heads : 0;
    S1F_TRY(new_output(call, 0, args, args->heads, args->head_dim));
    S1F_TRY(s1f_op_new_tensor(s1f_dtype_of_sums(args->dtype), 1, &num_sinks, NULL, &call->outputs[3]));
    args->dq = dq->data;
    args->dq_strides = strides_of(dq);
    args->dsinks = call->outputs[3].data;
    return run_kernel(call, args, cache, 1);
}

/* The outputs dk and dv. */
static s1f_status new_key_gradients(s1f_op_call *call, s1f_attention_args *args)
{
    const s1f_op_tensor *dk = &call->outputs[1], *dv = &call->outputs[2];
    S1F_TRY(new_output(call, 1, args, args->kv_heads, args->head_dim));
    S1F_TRY(new_output(call, 2, args, args->kv_heads, args->v_head_dim));
    args->own_dk = dk->data;
    args->own_dk_strides = strides_of(dk);
    args->own_dv = dv->data;
    args->own_dv_strides = strides_of(dv);
    return S1F_OK;
}

/* -- causal_attention: the whole sequence at once ----------------------------------------------------------------- */

static s1f_status take_whole(s1f_op_call *call, s1f_op_tensor *k, s1f_op_tensor *v, s1f_op_tensor *docs,
                             s1f_attention_args *args)
{
    S1F_TRY(take_keys(k, v, args));
    S1F_TRY(s1f_op_unit_last_stride(call, k));
    S1F_TRY(s1f_op_unit_last_stride(call, v));
    if (docs->numel > 0) {
        S1F_TRY(s1f_op_restride(call, docs, NULL));
        args->docs = docs->data;
        args->docs_batch_stride = args->segment_len;
    }
    args->k = k->data;
    args->k_strides = strides_of(k);
    args->v = v->data;
    args->v_strides = strides_of(v);
    return S1F_OK;
}

s1f_status s1f_op_causal_attention(s1f_op_call *call)
{
    s1f_op_tensor *t = call->inputs;
    s1f_attention_args args;
    S1F_TRY(start_arguments(call, &t[0], &t[3], &args));
    S1F_TRY(take_whole(call, &t[1], &t[2], &t[4], &args));
    return run_forward(call, &args, NULL);
}

s1f_status s1f_op_causal_attention_backward(s1f_op_call *call)
{
    s1f_op_tensor *t = call->inputs, *dk = &call->outputs[1], *dv = &call->outputs[2];
    s1f_attention_args args;
    S1F_TRY(start_arguments(call, &t[1], &t[6], &args));
    S1F_TRY(take_whole(call, &t[2], &t[3], &t[7], &args));
    S1F_TRY(take_results(call, &t[0], &t[4], &t[5], &args));
    S1F_TRY(new_key_gradients(call, &args));

    /* 16-bit gradients add up in fp32 and are rounded once. */
    s1f_op_tensor dk_sum = *dk, dv_sum = *dv;
    if (s1f_dtype_of_sums(args.dtype) != args.dtype) {
        S1F_TRY(s1f_op_new_temporary(call, S1F_FLOAT32, 4, dk->sizes, dk->strides, &dk_sum));
        S1F_TRY(s1f_op_new_temporary(call, S1F_FLOAT32, 4, dv->sizes, dv->strides, &dv_sum));
    } else {
        args.own_dk = args.own_dv = NULL; /* the sums are the gradients */
    }
    args.dk = dk_sum.data;
    args.dk_strides = strides_of(&dk_sum);
    args.dv = dv_sum.data;
    args.dv_strides = strides_of(&dv_sum);
    return run_backward(call, &args, NULL);
}

/* -- segment_attention: one segment over the KV cache ------------------------------------------------------------- */

static s1f_strides slab_strides(const s1f_segment *segment, int64_t head_dim)
{
    int64_t strides[4];
    s1f_segment_strides(segment, head_dim, strides);
    return (s1f_strides){.batch = strides[0], .head = strides[1], .row = strides[2]};
}

/* The documents of the path's keys, (batch, keys) or of all rows alike: siblings of one unit are a document each, and
 * all see what comes before them. */
static s1f_status take_path_documents(s1f_op_call *call, s1f_attention_args *args, const s1f_segment *segment)
{
    const s1f_current_unit *unit = segment->unit;
    int is_shared = unit->num_parts > 1;
    if (is_shared)
        S1F_TRY(s1f_segment_check_parts(segment, args->window > 0 || args->slopes != NULL));
    args->docs = segment->rows.docs;
    args->docs_batch_stride = segment->rows.num_rows;
    if (!is_shared && (args->docs == NULL || s1f_segment_is_in_place(segment)))
        return S1F_OK;
    int64_t sizes[2] = {is_shared ? 1 : args->batch, unit->offset + unit->length};
    s1f_op_tensor ids = {0};
    S1F_TRY(s1f_op_new_temporary(call, S1F_INT32, 2, sizes, NULL, &ids));
    args->docs = ids.data;
    args->docs_batch_stride = is_shared ? 0 : sizes[1];
    args->shared_keys = is_shared ? unit->offset : 0;
    if (is_shared)
        s1f_segment_part_ids(segment, ids.data);
    else
        s1f_segment_gather_docs(segment, ids.data);
    return S1F_OK;
}

static s1f_status attend_to_rows(s1f_op_call *call, s1f_attention_args *args, const s1f_segment *segment)
{
    args->q_start = segment->unit->offset;
    args->k = segment->rows.k;
    args->k_strides = slab_strides(segment, args->head_dim);
    args->v = segment->rows.v;
    args->v_strides = slab_strides(segment, args->v_head_dim);
    if (!s1f_segment_is_in_place(segment)) {
        args->ranges = segment->unit->ranges;
        args->num_ranges = segment->unit->num_ranges;
    }
    return take_path_documents(call, args, segment);
}

s1f_status s1f_op_segment_attention(s1f_op_call *call)
{
    s1f_op_tensor *t = call->inputs, *k = &t[1], *v = &t[2];
    s1f_attention_args args;
    s1f_segment segment;
    S1F_TRY(start_arguments(call, &t[0], &t[4], &args));
    S1F_TRY(take_keys(k, v, &args));
    S1F_TRY(s1f_segment_forward(&t[3], k, v, &t[5], NULL, 0, &segment));
    S1F_TRY(s1f_segment_write(&segment, k, v));
    S1F_TRY(attend_to_rows(call, &args, &segment));
    return run_forward(call, &args, segment.unit->cache);
}

s1f_status s1f_op_segment_attention_backward(s1f_op_call *call)
{
    s1f_op_tensor *t = call->inputs, *q = &t[1], *out = &t[2];
    s1f_attention_args args;
    s1f_segment segment;
    S1F_TRY(start_arguments(call, q, &t[5], &args));
    S1F_TRY(s1f_op_require(out->ndim == 4 && out->numel > 0, "out", out, "must agree with q and v"));
    args.v_head_dim = out->sizes[3];
    S1F_TRY(take_results(call, &t[0], out, &t[3], &args));
    args.kv_heads = (int64_t)call->scalars[3];
    S1F_TRY(s1f_segment_backward(&t[4], q, out, args.kv_heads, &segment));

    S1F_TRY(attend_to_rows(call, &args, &segment));
    args.dk = segment.grads.dk;
    args.dk_strides = args.k_strides;
    args.dv = segment.grads.dv;
    args.dv_strides = args.v_strides;
    args.kept_kv_grads = segment.grads.kept;
    S1F_TRY(new_key_gradients(call, &args)); /* later segments went backward before, so they are complete */
    return run_backward(call, &args, segment.unit->cache);
}
