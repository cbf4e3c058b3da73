/* layer_keys.c - the registry of layer keys: a sorted array under a lock. */
#include "layer_keys.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t *registry; /* ascending */
static int64_t registry_size, registry_capacity;

static int64_t registry_position(int64_t layer) /* of the first key >= layer */
{
    int64_t low = 0, high = registry_size;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (registry[middle] < layer)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static s1f_status registry_insert(int64_t layer)
{
    int64_t position = registry_position(layer);
    if (position < registry_size && registry[position] == layer)
        return S1F_OK;
    if (registry_size == registry_capacity) {
        int64_t capacity = registry_capacity > 0 ? 2 * registry_capacity : 64;
        int64_t *grown = realloc(registry, (size_t)capacity * sizeof *grown);
        if (grown == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld layer keys", (long long)capacity);
        registry = grown;
        registry_capacity = capacity;
    }
    memmove(registry + position + 1, registry + position, (size_t)(registry_size - position) * sizeof *registry);
    registry[position] = layer;
    registry_size++;
    return S1F_OK;
}

s1f_status s1f_layer_register(int64_t layer)
{
    if (layer < 0)
        return s1f_fail(S1F_ERR_ARG, "layer key is %lld, must be at least 0", (long long)layer);
    pthread_mutex_lock(&registry_lock);
    s1f_status status = registry_insert(layer);
    pthread_mutex_unlock(&registry_lock);
    return status;
}

int s1f_layer_is_registered(int64_t layer)
{
    pthread_mutex_lock(&registry_lock);
    int64_t position = registry_position(layer);
    int found = position < registry_size && registry[position] == layer;
    pthread_mutex_unlock(&registry_lock);
    return found;
}

/* When the extension is unloaded or the process ends. */
__attribute__((destructor)) static void registry_free(void)
{
    pthread_mutex_lock(&registry_lock);
    free(registry);
    registry = NULL;
    registry_size = registry_capacity = 0;
    pthread_mutex_unlock(&registry_lock);
}
