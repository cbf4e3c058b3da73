/* driver.c - loading the CUDA driver's library, and others. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct loaded_library {
    const s1f_library *kind;
    void *handle;
    struct loaded_library *next;
    _Alignas(max_align_t) char table[];
} loaded_library;

#define S1F_NAME(name, symbol, arguments) #symbol,
const s1f_driver_names s1f_driver_symbols = {S1F_DRIVER_FUNCTIONS(S1F_NAME)};
#undef S1F_NAME

static loaded_library *loaded; /* never freed: their streams and communicators may live to the end of the process */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static s1f_status bind_symbols(const s1f_library *library, const char *path, void *handle, void *table)
{
    void **functions = table;
    for (size_t i = 0; i < library->num_symbols; i++)
        if ((functions[i] = dlsym(handle, library->symbols[i])) == NULL)
            return s1f_fail(S1F_ERR_STATE, "%s has no %s: it is too old, or another library", path,
                            library->symbols[i]);
    return library->check == NULL ? S1F_OK : library->check(handle, table);
}

static s1f_status load(const s1f_library *library, const char *path, const void **table)
{
    void *handle = path == NULL ? dlopen(library->default_path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    path = path == NULL ? library->default_path : path;
    if (handle == NULL)
        handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return s1f_fail(S1F_ERR_STATE, "no %s: %s", library->name, dlerror());
    for (const loaded_library *found = loaded; found != NULL; found = found->next)
        if (found->handle == handle && found->kind == library) {
            dlclose(handle);
            *table = found->table;
            return S1F_OK;
        }
    loaded_library *made = calloc(1, sizeof *made + library->table_bytes);
    if (made == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the table of %s", library->name);
    s1f_status status = bind_symbols(library, path, handle, made->table);
    if (status != S1F_OK) {
        free(made);
        return status;
    }
    made->kind = library;
    made->handle = handle;
    made->next = loaded;
    loaded = made;
    *table = made->table;
    return S1F_OK;
}

s1f_status s1f_library_load(const s1f_library *library, const char *path, const void **table)
{
    pthread_mutex_lock(&loading);
    s1f_status status = load(library, path, table);
    pthread_mutex_unlock(&loading);
    return status;
}

s1f_status s1f_driver_load(const char *path, const s1f_driver **out)
{
    static const s1f_library library = {.name = "CUDA driver",
                                        .default_path = "libcuda.so.1",
                                        .symbols = (const char *const *)&s1f_driver_symbols,
                                        .num_symbols = sizeof s1f_driver_symbols / sizeof(char *),
                                        .table_bytes = sizeof **out};
    const void *table;
    S1F_TRY(s1f_library_load(&library, path, &table));
    *out = table;
    return s1f_driver_status(*out, (*out)->init(0), "cuInit");
}

s1f_status s1f_driver_event_make(const s1f_driver *driver, s1f_cu_event *event, unsigned int flags)
{
    return *event != NULL ? S1F_OK : S1F_CU(driver, event_create, event, flags);
}

void s1f_driver_event_destroy(const s1f_driver *driver, s1f_cu_event event)
{
    if (event != NULL)
        driver->event_destroy(event);
}

s1f_status s1f_driver_status(const s1f_driver *driver, s1f_cu_result result, const char *symbol)
{
    if (result == S1F_CU_SUCCESS)
        return S1F_OK;
    const char *name = NULL, *text = NULL;
    driver->error_name(result, &name);
    driver->error_string(result, &text);
    return s1f_fail(result == S1F_CU_ERROR_OUT_OF_MEMORY ? S1F_ERR_MEMORY : S1F_ERR_STATE, "%.*s: %s (%d), %s",
                    (int)strcspn(symbol, "_"), symbol, name == NULL ? "unknown error" : name, (int)result,
                    text == NULL ? "no description" : text);
}
