/* partition.c - conversions for the partition room. */
#include "binding.h"

PyMethodDef s1f_partition_methods[] = {{NULL, NULL, 0, NULL}};
