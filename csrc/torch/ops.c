/* ops.c - registers the ops with torch's dispatcher. */
#include "ops.h"

#include <stddef.h>

#define S1F_BOXED(name, num_tensors, num_outputs, any_device, schema)                                                  \
    static void boxed_##name(StableIValue *stack, uint64_t num_arguments, uint64_t num_results)                        \
    {                                                                                                                  \
        static const s1f_op op = {#name, s1f_op_##name, num_tensors, num_outputs, any_device};                         \
        (void)num_arguments, (void)num_results;                                                                        \
        s1f_op_run(&op, stack);                                                                                        \
    }
S1F_OPS(S1F_BOXED)
#undef S1F_BOXED

s1f_status s1f_ops_register(void)
{
#define S1F_ENTRY(name, num_tensors, num_outputs, any_device, schema) {#name, #name schema, boxed_##name, any_device},
    static const struct {
        const char *name, *schema;
        void (*kernel)(StableIValue *, uint64_t, uint64_t);
        int any_device;
    } entries[] = {S1F_OPS(S1F_ENTRY)};
#undef S1F_ENTRY
    /* They stay for the life of the process: deleting a library takes its ops away. */
    TorchLibraryHandle definitions, cpu, any_device;
    if (s1f_torch.aoti_torch_library_init_fragment("seq1f1b", __FILE__, __LINE__, &definitions) != 0 ||
        s1f_torch.aoti_torch_library_init_impl("seq1f1b", "CPU", __FILE__, __LINE__, &cpu) != 0 ||
        s1f_torch.aoti_torch_library_init_impl("seq1f1b", "CompositeExplicitAutograd", __FILE__, __LINE__,
                                               &any_device) != 0)
        return s1f_torch_failed("aoti_torch_library_init_impl");
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
        if (s1f_torch.aoti_torch_library_def(definitions, entries[i].schema) != 0 ||
            s1f_torch.torch_library_impl(entries[i].any_device ? any_device : cpu, entries[i].name, entries[i].kernel,
                                         S1F_TORCH_FLOOR) != 0)
            return s1f_fail(S1F_ERR_SYSTEM, "libtorch refused to register seq1f1b::%s", entries[i].name);
    return S1F_OK;
}
