/* nccl.c - loading NCCL. */
#include "nccl.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const char DEFAULT_LIBRARY[] = "libnccl.so.2";
enum { OLDEST = 21800 };

typedef struct loaded_nccl {
    s1f_nccl table;
    void *library;
    struct loaded_nccl *next;
} loaded_nccl;

static loaded_nccl *loaded; /* never freed: communicators may live to the end of the process */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static s1f_status bind_functions(void *library, const char *path, s1f_nccl *table)
{
    static const s1f_symbol symbols[] = {
#define S1F_SYMBOL(type, name, symbol, arguments) {#symbol, offsetof(s1f_nccl, name)},
        S1F_NCCL_FUNCTIONS(S1F_SYMBOL)
#undef S1F_SYMBOL
    };
    struct link_map *map = NULL;
    strncpy(table->path, path, sizeof table->path - 1);
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name != NULL && map->l_name[0] != '\0')
        strncpy(table->path, map->l_name, sizeof table->path - 1);
    S1F_TRY(s1f_symbols_bind(library, table->path, symbols, sizeof symbols / sizeof symbols[0], table));
    int version = 0;
    S1F_TRY(s1f_nccl_status(table, table->get_version(&version), NULL, "ncclGetVersion"));
    if (version < OLDEST)
        return s1f_fail(S1F_ERR_STATE, "%s is NCCL %d, at least %d is needed", table->path, version, (int)OLDEST);
    table->version = version;
    return S1F_OK;
}

static s1f_status load(const char *path, const s1f_nccl **out)
{
    void *library = path == NULL ? dlopen(DEFAULT_LIBRARY, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (library == NULL)
        library = dlopen(path == NULL ? DEFAULT_LIBRARY : path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return s1f_fail(S1F_ERR_STATE, "no NCCL: %s", dlerror());
    for (loaded_nccl *found = loaded; found != NULL; found = found->next)
        if (found->library == library) {
            dlclose(library);
            *out = &found->table;
            return S1F_OK;
        }
    loaded_nccl *made = calloc(1, sizeof *made);
    if (made == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the table of NCCL");
    s1f_status status = bind_functions(library, path == NULL ? DEFAULT_LIBRARY : path, &made->table);
    if (status != S1F_OK) {
        free(made);
        return status;
    }
    made->library = library;
    made->next = loaded;
    loaded = made;
    *out = &made->table;
    return S1F_OK;
}

s1f_status s1f_nccl_load(const char *path, const s1f_nccl **out)
{
    pthread_mutex_lock(&loading);
    s1f_status status = load(path, out);
    pthread_mutex_unlock(&loading);
    return status;
}

s1f_status s1f_nccl_status(const s1f_nccl *nccl, int32_t result, s1f_nccl_comm comm, const char *what)
{
    if (result == S1F_NCCL_SUCCESS || result == S1F_NCCL_IN_PROGRESS)
        return S1F_OK;
    const char *last = nccl->last_error(comm);
    return s1f_fail(S1F_ERR_STATE, "%s: %s (%d)%s%s", what, nccl->error_string(result), (int)result,
                    last == NULL || last[0] == '\0' ? "" : ", ", last == NULL ? "" : last);
}
