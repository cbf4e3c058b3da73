/* nccl.c - loading NCCL. */
#include "nccl.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

enum { OLDEST = 21800 };

static s1f_status check_version(void *library, void *functions)
{
    s1f_nccl *table = functions;
    struct link_map *map = NULL;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name != NULL)
        strncpy(table->path, map->l_name, sizeof table->path - 1);
    int version = 0;
    S1F_TRY(s1f_nccl_status(table, table->get_version(&version), NULL, "ncclGetVersion"));
    if (version < OLDEST)
        return s1f_fail(S1F_ERR_STATE, "%s is NCCL %d, at least %d is needed", table->path, version, (int)OLDEST);
    table->version = version;
    return S1F_OK;
}

s1f_status s1f_nccl_load(const char *path, const s1f_nccl **out)
{
#define S1F_NAME(type, name, symbol, arguments) #symbol,
    static const char *const symbols[] = {S1F_NCCL_FUNCTIONS(S1F_NAME)};
#undef S1F_NAME
    static const s1f_library library = {.name = "NCCL",
                                        .default_path = "libnccl.so.2",
                                        .symbols = symbols,
                                        .num_symbols = sizeof symbols / sizeof symbols[0],
                                        .table_bytes = sizeof **out,
                                        .check = check_version};
    const void *table;
    S1F_TRY(s1f_library_load(&library, path, &table));
    *out = table;
    return S1F_OK;
}

s1f_status s1f_nccl_status(const s1f_nccl *nccl, int32_t result, s1f_nccl_comm comm, const char *what)
{
    if (result == S1F_NCCL_SUCCESS || result == S1F_NCCL_IN_PROGRESS)
        return S1F_OK;
    const char *last = nccl->last_error(comm);
    return s1f_fail(S1F_ERR_STATE, "%s: %s (%d)%s%s", what, nccl->error_string(result), (int)result,
                    last == NULL || last[0] == '\0' ? "" : ", ", last == NULL ? "" : last);
}
