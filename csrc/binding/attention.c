/* attention.c - conversions for the attention room. */
#include "binding.h"

PyMethodDef s1f_attention_methods[] = {{NULL, NULL, 0, NULL}};
