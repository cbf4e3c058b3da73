/* p2p.c - conversions for the p2p room. */
#include "binding.h"

PyMethodDef s1f_p2p_methods[] = {{NULL, NULL, 0, NULL}};
