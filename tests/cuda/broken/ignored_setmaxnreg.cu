/* For sm_90a: asks for registers where the compiler cannot tell how many there are; it only says so (C7508). */
#define LAUNCH_BOUNDS
#define BEFORE_THE_LOOP asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#include "../toy.inc.h"
S1F_CUDA_OPERATION(ignored_setmaxnreg, kernels, scratch_bytes, launch, error_text);
