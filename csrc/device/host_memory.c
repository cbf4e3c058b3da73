/* host_memory.c - reads /proc and /sys; no text in them is relied upon to be there. */
#include "host_memory.h"

#include <stdio.h>
#include <string.h>

enum { PATH_BYTES = 1024, LEFT_SHARE = 16 };

/* The first number of a file, or that behind a word which begins a line; below 0 if there is none ("max"). */
static int64_t read_number(const char *path, const char *word)
{
    FILE *file = fopen(path, "re");
    char line[256];
    long long found = -1;
    size_t length = strlen(word);
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, word, length) == 0) {
            if (sscanf(line + length, " %lld", &found) != 1)
                found = -1;
            break;
        }
    if (file != NULL)
        fclose(file);
    return found;
}

static void take_least(s1f_host_room *room, int64_t limit, int64_t left, const char *from)
{
    left -= limit / LEFT_SHARE;
    left = left < 0 ? 0 : left;
    if (left < room->bytes) {
        room->bytes = left;
        snprintf(room->from, sizeof room->from, "%.*s", (int)sizeof room->from - 1, from);
    }
}

/* One control group's. Pages of files that nobody used lately are given up before it kills. */
static void look_at_group(const char *folder, const char *group, int is_v2, s1f_host_room *room)
{
    char path[3 * PATH_BYTES], from[256];
    snprintf(path, sizeof path, "%s%s/%s", folder, group, is_v2 ? "memory.max" : "memory.limit_in_bytes");
    int64_t limit = read_number(path, "");
    snprintf(path, sizeof path, "%s%s/%s", folder, group, is_v2 ? "memory.current" : "memory.usage_in_bytes");
    int64_t used = read_number(path, "");
    if (limit < 0 || used < 0 || limit >= INT64_MAX / 2) /* version 1 writes a very large number for none */
        return;
    snprintf(path, sizeof path, "%s%s/memory.stat", folder, group);
    int64_t given_up = read_number(path, is_v2 ? "inactive_file " : "total_inactive_file ");
    snprintf(from, sizeof from, "the limit of control group %.200s", group[0] == '\0' ? "/" : group);
    take_least(room, limit, limit - used + (given_up < 0 ? 0 : given_up), from);
}

/* A group and all that it lies in. In a container the path may name what only the host sees; then its root stands. */
static void look_at_groups(const char *folder, char *group, int is_v2, s1f_host_room *room)
{
    for (;;) {
        size_t length = strlen(group);
        while (length > 0 && group[length - 1] == '/')
            group[--length] = '\0';
        look_at_group(folder, group, is_v2, room);
        if (length == 0)
            return;
        while (length > 0 && group[length - 1] != '/')
            group[--length] = '\0';
    }
}

void s1f_host_room_find(const char *root, s1f_host_room *out)
{
    char path[PATH_BYTES], line[PATH_BYTES], folder[PATH_BYTES];
    *out = (s1f_host_room){.bytes = INT64_MAX};
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    int64_t total = read_number(path, "MemTotal:"), available = read_number(path, "MemAvailable:");
    if (total >= 0 && available >= 0)
        take_least(out, total * 1024, available * 1024, "free memory");
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) { /* number:controllers:path */
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':'), *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (group == NULL)
            continue;
        *group++ = '\0';
        controllers++;
        int is_v2 = controllers[0] == '\0';
        if (!is_v2 && strcmp(controllers, "memory") != 0)
            continue;
        snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s", root, is_v2 ? "" : "/memory");
        look_at_groups(folder, group, is_v2, out);
    }
    if (file != NULL)
        fclose(file);
}
