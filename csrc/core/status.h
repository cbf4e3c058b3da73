/* status.h - how every fallible call of the core reports.
 *
 * A call that can fail returns an s1f_status. On anything but S1F_OK the message, with the offending
 * numbers, waits in s1f_last_error() of the calling thread. The library never prints, exits or aborts. */
#ifndef S1F_STATUS_H
#define S1F_STATUS_H

typedef enum {
    S1F_OK = 0,
    S1F_ERR_ARG,      /* the caller's mistake: ValueError */
    S1F_ERR_SCHEDULE, /* an order breaks a rule: ScheduleError */
    S1F_ERR_MEMORY,   /* an allocation failed: MemoryError */
    S1F_ERR_STATE,    /* used out of order: RuntimeError */
    S1F_ERR_SYSTEM,   /* the operating system refused: OSError */
    S1F_ERR_PEER,     /* another rank died, or ended the step: PipelineError */
    S1F_ERR_TIMEOUT,  /* a peer made no progress in time: PipelineError */
    S1F_ERR_PYTHON    /* a Python exception is already set (binding only) */
} s1f_status;

/* Records a printf-formatted message for this thread and returns `status`, so that a failure reads
 * `return s1f_fail(S1F_ERR_ARG, "num_segments is %d, must be at least 1", k);`.
 * Arguments may not point into s1f_last_error() itself, except through s1f_fail_prefixed. */
s1f_status s1f_fail(s1f_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Ends the function that it stands in with the status of a call that has failed: for where nothing is to be undone. */
#define S1F_TRY(call)                                                                                                  \
    do {                                                                                                               \
        s1f_status status_of_call = (call);                                                                            \
        if (status_of_call != S1F_OK)                                                                                  \
            return status_of_call;                                                                                     \
    } while (0)

/* Puts a printf-formatted prefix before the message already recorded; the status is unchanged. */
s1f_status s1f_fail_prefixed(s1f_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Message of the last failure on this thread, "" if none. Borrowed: valid until the next failure on this thread. */
const char *s1f_last_error(void);

/* Asked now and then by what may take long, from the thread that called it: anything but S1F_OK ends it. The binding
 * sets it, for Python's signals; NULL: nobody asks. */
extern s1f_status (*s1f_interrupted)(void);
s1f_status s1f_check_interrupted(void);

#endif
