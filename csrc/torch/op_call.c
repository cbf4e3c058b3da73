/* op_call.c - arguments from torch's stack, tensors of a call, and its release. */
#include "op_call.h"

#include <stdio.h>
#include <string.h>

s1f_status s1f_torch_failed(const char *function)
{
    return s1f_fail(S1F_ERR_SYSTEM, "libtorch's %s failed", function);
}

static s1f_status describe(s1f_op_tensor *t)
{
    int32_t dtype = 0;
    if (s1f_torch.aoti_torch_get_device_type(t->handle, &t->device_type) != 0 ||
        s1f_torch.aoti_torch_get_device_index(t->handle, &t->device_index) != 0 ||
        s1f_torch.aoti_torch_get_dtype(t->handle, &dtype) != 0 ||
        s1f_torch.aoti_torch_get_dim(t->handle, &t->ndim) != 0 ||
        s1f_torch.aoti_torch_get_numel(t->handle, &t->numel) != 0 ||
        s1f_torch.aoti_torch_get_sizes(t->handle, &t->sizes) != 0 ||
        s1f_torch.aoti_torch_get_strides(t->handle, &t->strides) != 0 ||
        s1f_torch.aoti_torch_get_data_ptr(t->handle, &t->data) != 0)
        return s1f_torch_failed("tensor description");
    t->dtype = s1f_dtype_from_torch(dtype);
    return S1F_OK;
}

void s1f_row_major(int64_t ndim, const int64_t *sizes, int64_t *strides)
{
    int64_t stride = 1;
    for (int64_t i = ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= sizes[i];
    }
}

enum { MOST_DIMS = 4 }; /* of what the ops make */

static const int64_t *strides_or_row_major(int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t *room)
{
    if (strides == NULL)
        s1f_row_major(ndim, sizes, room);
    return strides == NULL ? room : strides;
}

s1f_status s1f_op_new_tensor(int32_t dtype, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                             s1f_op_tensor *out)
{
    int64_t room[MOST_DIMS];
    strides = strides_or_row_major(ndim, sizes, strides, room);
    if (s1f_torch.aoti_torch_empty_strided(ndim, sizes, strides, s1f_dtype_to_torch(dtype), s1f_torch_device_cpu(), 0,
                                           &out->handle) != 0) {
        out->handle = NULL;
        return s1f_fail(S1F_ERR_MEMORY, "libtorch could not allocate a tensor of %s", s1f_dtype_name(dtype));
    }
    return describe(out);
}

s1f_status s1f_op_new_temporary(s1f_op_call *call, int32_t dtype, int64_t ndim, const int64_t *sizes,
                                const int64_t *strides, s1f_op_tensor *out)
{
    s1f_status status = s1f_op_new_tensor(dtype, ndim, sizes, strides, out);
    if (out->handle != NULL)
        call->temporaries[call->num_temporaries++] = out->handle;
    return status;
}

void s1f_token_major(const int64_t sizes[4], int64_t strides[4])
{
    strides[0] = sizes[2] * sizes[1] * sizes[3];
    strides[1] = sizes[3];
    strides[2] = sizes[1] * sizes[3];
    strides[3] = 1;
}

s1f_status s1f_op_restride(s1f_op_call *call, s1f_op_tensor *t, const int64_t *strides)
{
    int64_t room[MOST_DIMS];
    strides = strides_or_row_major(t->ndim, t->sizes, strides, room);
    int agree = 1;
    for (int64_t i = 0; i < t->ndim; i++) /* sizes of 1 have no stride to speak of */
        agree &= t->sizes[i] == 1 || t->strides[i] == strides[i];
    if (agree)
        return S1F_OK;
    s1f_op_tensor copy = {0};
    S1F_TRY(s1f_op_new_temporary(call, t->dtype, t->ndim, t->sizes, strides, &copy));
    if (s1f_torch.aoti_torch_copy_(copy.handle, t->handle, 0) != 0)
        return s1f_torch_failed("aoti_torch_copy_");
    *t = copy;
    return S1F_OK;
}

s1f_status s1f_op_unit_last_stride(s1f_op_call *call, s1f_op_tensor *t)
{
    if (t->sizes[3] == 1 || t->strides[3] == 1)
        return S1F_OK;
    int64_t strides[4];
    s1f_token_major(t->sizes, strides);
    return s1f_op_restride(call, t, strides);
}

s1f_status s1f_op_view(void *memory, int32_t dtype, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                       int64_t offset, const s1f_op_tensor *like, AtenTensorHandle *out)
{
    if (s1f_torch.aoti_torch_create_tensor_from_blob(memory, ndim, sizes, strides, offset, s1f_dtype_to_torch(dtype),
                                                     like->device_type, like->device_index, out) == 0)
        return S1F_OK;
    *out = NULL;
    return s1f_torch_failed("aoti_torch_create_tensor_from_blob");
}

s1f_status s1f_op_copy_into(void *memory, const int64_t *strides, int64_t offset, const s1f_op_tensor *t)
{
    AtenTensorHandle view = NULL;
    S1F_TRY(s1f_op_view(memory, t->dtype, t->ndim, t->sizes, strides, offset, t, &view));
    AOTITorchError failed = s1f_torch.aoti_torch_copy_(view, t->handle, 0);
    s1f_torch.aoti_torch_delete_tensor_object(view);
    return failed != 0 ? s1f_torch_failed("aoti_torch_copy_") : S1F_OK;
}

/* -- arguments ---------------------------------------------------------------------------------------------------- */

double s1f_op_float(StableIValue value)
{
    double number;
    memcpy(&number, &value, sizeof number);
    return number;
}

s1f_status s1f_op_require(int condition, const char *name, const s1f_op_tensor *t, const char *rule)
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

/* -- a call ------------------------------------------------------------------------------------------------------- */

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

void s1f_op_run(const s1f_op *op, StableIValue *stack)
{
    s1f_op_call call = {.scalars = stack + op->num_tensors};
    s1f_status status = S1F_OK;
    for (int i = 0; i < op->num_tensors && status == S1F_OK; i++) {
        call.inputs[i].handle = (AtenTensorHandle)(uintptr_t)stack[i];
        status = describe(&call.inputs[i]);
        if (status == S1F_OK && !op->any_device && call.inputs[i].device_type != s1f_torch_device_cpu())
            status = s1f_fail(S1F_ERR_ARG, "every tensor of %s must be on the CPU", op->name);
    }
    if (status == S1F_OK)
        status = op->body(&call);

    for (int i = 0; i < op->num_tensors; i++) /* which we own, whatever the body has done to call.inputs */
        release((AtenTensorHandle)(uintptr_t)stack[i]);
    for (int i = 0; i < call.num_temporaries; i++)
        release(call.temporaries[i]);
    if (status == S1F_OK) {
        for (int i = 0; i < op->num_outputs; i++)
            stack[i] = (StableIValue)(uintptr_t)call.outputs[i].handle;
        return;
    }
    for (int i = 0; i < op->num_outputs; i++)
        release(call.outputs[i].handle);
    failure.status = status;
    snprintf(failure.text, sizeof failure.text, "%s", s1f_last_error());
    s1f_torch.aoti_torch_check(false, op->name, __FILE__, __LINE__, failure.text); /* throws */
}
