/* driver.c - loading the CUDA driver's library. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const char DEFAULT_LIBRARY[] = "libcuda.so.1";

typedef struct loaded_driver {
    s1f_driver table;
    struct loaded_driver *next;
    char path[];
} loaded_driver;

#define S1F_NAME(name, symbol, arguments) #symbol,
const s1f_driver_names s1f_driver_symbols = {S1F_DRIVER_FUNCTIONS(S1F_NAME)};
#undef S1F_NAME

static loaded_driver *loaded; /* never freed: streams of the library may live to the end of the process */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

s1f_status s1f_symbols_bind(void *library, const char *path, const s1f_symbol *symbols, size_t count, void *table)
{
    for (size_t i = 0; i < count; i++) {
        void *function = dlsym(library, symbols[i].symbol);
        if (function == NULL)
            return s1f_fail(S1F_ERR_STATE, "%s has no %s: it is too old, or another library", path, symbols[i].symbol);
        memcpy((char *)table + symbols[i].offset, &function, sizeof function);
    }
    return S1F_OK;
}

static s1f_status load(const char *path, const s1f_driver **out)
{
    static const s1f_symbol symbols[] = {
#define S1F_SYMBOL(name, symbol, arguments) {#symbol, offsetof(s1f_driver, name)},
        S1F_DRIVER_FUNCTIONS(S1F_SYMBOL)
#undef S1F_SYMBOL
    };
    for (loaded_driver *found = loaded; found != NULL; found = found->next)
        if (strcmp(found->path, path) == 0) {
            *out = &found->table;
            return s1f_driver_status(&found->table, found->table.init(0), "cuInit");
        }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return s1f_fail(S1F_ERR_STATE, "no CUDA driver: %s", dlerror());
    loaded_driver *made = calloc(1, sizeof *made + strlen(path) + 1);
    if (made == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the table of %s", path);
    memcpy(made->path, path, strlen(path) + 1);
    s1f_status status = s1f_symbols_bind(library, path, symbols, sizeof symbols / sizeof symbols[0], &made->table);
    if (status == S1F_OK)
        status = s1f_driver_status(&made->table, made->table.init(0), "cuInit");
    if (status != S1F_OK) {
        free(made);
        return status;
    }
    made->next = loaded;
    loaded = made;
    *out = &made->table;
    return S1F_OK;
}

s1f_status s1f_driver_load(const char *path, const s1f_driver **out)
{
    pthread_mutex_lock(&loading);
    s1f_status status = load(path == NULL ? DEFAULT_LIBRARY : path, out);
    pthread_mutex_unlock(&loading);
    return status;
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
