/* host_memory.h - what a host can still give: free memory, and the limits of control groups. */
#ifndef S1F_HOST_MEMORY_H
#define S1F_HOST_MEMORY_H

#include <stdint.h>

typedef struct {
    int64_t bytes;  /* that may be taken; INT64_MAX: not known */
    char from[256]; /* what says so: "free memory", "the limit of control group /x" */
} s1f_host_room;

/* The least of the host's free memory and of what every control group of this process leaves, versions 1 and 2. A
 * sixteenth of what limits is left for others: where memory ends, a control group kills. root: the folder in which
 * /proc and /sys lie, "" for the machine's own. */
void s1f_host_room_find(const char *root, s1f_host_room *out);

#endif
