/* status.c - the last error message of each thread. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MESSAGE_BYTES = 2048 }; /* longer messages are cut; the longest we write name two units and a rule */

static _Thread_local char last_message[MESSAGE_BYTES];

s1f_status s1f_fail(s1f_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_message, sizeof last_message, format, arguments);
    va_end(arguments);
    return status;
}

s1f_status s1f_fail_prefixed(s1f_status status, const char *format, ...)
{
    char old[MESSAGE_BYTES];
    memcpy(old, last_message, sizeof old);
    va_list arguments;
    va_start(arguments, format);
    int prefix_bytes = vsnprintf(last_message, sizeof last_message, format, arguments);
    va_end(arguments);
    if (prefix_bytes >= 0 && prefix_bytes < MESSAGE_BYTES)
        snprintf(last_message + prefix_bytes, (size_t)(MESSAGE_BYTES - prefix_bytes), "%s", old);
    return status;
}

const char *s1f_last_error(void)
{
    return last_message;
}

s1f_status (*s1f_interrupted)(void);

s1f_status s1f_check_interrupted(void)
{
    return s1f_interrupted == NULL ? S1F_OK : s1f_interrupted();
}
