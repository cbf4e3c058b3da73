/* threads.c - helper threads that are still inside torch when the interpreter ends. */
#include "binding.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*terminate_handler)(void);

static _Thread_local int is_helper;
static atomic_int is_ending, is_set;
static terminate_handler others;

/* Python before 3.14 ends a daemon thread that comes back to an interpreter that is gone by pthread_exit, which unwinds
 * the C++ above it. Where that must not throw, C++ calls std::terminate, and the process dies of SIGABRT, whatever its
 * exit code was to be. Such a thread stays here instead, as it does in later Pythons, until the process is gone. */
static void stay_or_terminate(void)
{
    while (is_helper && atomic_load(&is_ending))
        pause();
    if (others != NULL)
        others();
    abort();
}

static void set_handler(void)
{
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD); /* torch's; without one nothing can terminate */
    void *address = library == NULL ? NULL : dlsym(library, "_ZSt13set_terminatePFvvE");
    terminate_handler (*set_terminate)(terminate_handler);
    if (address == NULL || atomic_exchange(&is_set, 1))
        return;
    memcpy(&set_terminate, &address, sizeof address); /* ISO C converts no object pointer to a function pointer */
    others = set_terminate(stay_or_terminate);
}

S1F_METHOD(s1f_status, thread_is_helper)
{
    is_helper = 1;
    return S1F_OK;
}

S1F_METHOD(s1f_status, thread_interpreter_ends)
{
    set_handler();
    atomic_store(&is_ending, 1);
    return S1F_OK;
}

PyMethodDef s1f_thread_methods[] = {
    S1F_ROW(thread_is_helper, "This thread may be inside torch when the interpreter ends."),
    S1F_ROW(thread_interpreter_ends, "Helper threads that come back to it from here on end with the process."),
    {NULL, NULL, 0, NULL}};
