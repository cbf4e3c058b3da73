/* schedule.c - conversions for the schedule room. */
#include "binding.h"

PyMethodDef s1f_schedule_methods[] = {{NULL, NULL, 0, NULL}};
