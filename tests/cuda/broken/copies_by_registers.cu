/* Copies to shared memory by loads and stores, which hold registers and wait. */
#define COPY_THROUGH_REGISTERS
#include "../toy.inc.h"
S1F_CUDA_OPERATION(copies_by_registers, kernels, scratch_bytes, launch, error_text);
