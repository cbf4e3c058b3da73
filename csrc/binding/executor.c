/* executor.c - conversions for the executor room. */
#include "binding.h"

PyMethodDef s1f_executor_methods[] = {{NULL, NULL, 0, NULL}};
