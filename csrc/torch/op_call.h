/* op_call.h - one call of an op: its tensors, what it owns, and how it fails. For the files of the ops, and the
 * engine, which asks for the last failure.
 *
 * A boxed kernel owns its arguments. s1f_op_run takes them from torch's stack, runs the op's body, puts its outputs
 * there, and releases everything else, however the body ends. */
#ifndef S1F_OP_CALL_H
#define S1F_OP_CALL_H

#include "torch_abi.h"

enum { S1F_OP_MAX_INPUTS = 9, S1F_OP_MAX_OUTPUTS = 6, S1F_OP_MAX_TEMPORARIES = 12 };

typedef struct {
    AtenTensorHandle handle;
    int64_t ndim, numel;
    int64_t *sizes, *strides; /* borrowed from the tensor */
    int32_t dtype;            /* s1f_dtype, -1: a dtype without use here */
    int32_t device_type, device_index;
    void *data;
} s1f_op_tensor;

typedef struct {
    s1f_op_tensor inputs[S1F_OP_MAX_INPUTS];
    const StableIValue *scalars; /* the arguments after the tensors; borrowed */
    s1f_op_tensor outputs[S1F_OP_MAX_OUTPUTS];
    AtenTensorHandle temporaries[S1F_OP_MAX_TEMPORARIES];
    int num_temporaries;
} s1f_op_call;

typedef struct {
    const char *name;
    s1f_status (*body)(s1f_op_call *call);
    int num_tensors, num_outputs; /* the tensors come first in the schema */
    int any_device;               /* registered for every device, not the CPU alone */
} s1f_op;

/* The kernel of an op: `stack` holds its arguments, then its results. Throws torch's exception where the body fails;
 * the failure then waits in s1f_op_failure_take. */
void s1f_op_run(const s1f_op *op, StableIValue *stack);

/* The last failure of an op on this thread since the last take: its status and text (borrowed until the next failure),
 * S1F_OK and "" if none. For the engine, which raises it anew by its status: through torch all are RuntimeError. */
s1f_status s1f_op_failure_take(const char **text);

/* S1F_ERR_SYSTEM, naming the function of libtorch. */
s1f_status s1f_torch_failed(const char *function);

double s1f_op_float(StableIValue value);

/* S1F_ERR_ARG with the tensor's name, shape and dtype, and the rule, unless the condition holds. */
s1f_status s1f_op_require(int condition, const char *name, const s1f_op_tensor *t, const char *rule);

/* Strides of row-major memory; and of (B, H, S, D) whose memory is (B, S, H, D). */
void s1f_row_major(int64_t ndim, const int64_t *sizes, int64_t *strides);
void s1f_token_major(const int64_t sizes[4], int64_t strides[4]);

/* On the CPU; strides NULL: of row-major memory. The first is the caller's (an output of the call); the second is
 * released when the call ends. */
s1f_status s1f_op_new_tensor(int32_t dtype, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                             s1f_op_tensor *out);
s1f_status s1f_op_new_temporary(s1f_op_call *call, int32_t dtype, int64_t ndim, const int64_t *sizes,
                                const int64_t *strides, s1f_op_tensor *out);

/* *t becomes a copy of itself with these strides (NULL: of row-major memory), unless it has them. */
s1f_status s1f_op_restride(s1f_op_call *call, s1f_op_tensor *t, const int64_t *strides);
/* The kernels read any strides but the last, which is 1. */
s1f_status s1f_op_unit_last_stride(s1f_op_call *call, s1f_op_tensor *t);

/* A tensor over memory of ours, on the device of `like`: a new reference, which borrows the memory. */
s1f_status s1f_op_view(void *memory, int32_t dtype, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                       int64_t offset, const s1f_op_tensor *like, AtenTensorHandle *out);
/* Copies `t` into memory of ours on its device. */
s1f_status s1f_op_copy_into(void *memory, const int64_t *strides, int64_t offset, const s1f_op_tensor *t);

#endif
