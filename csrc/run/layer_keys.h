/* layer_keys.h - the numbers that name attention calls in KV caches. One registry for the process; any thread. */
#ifndef S1F_LAYER_KEYS_H
#define S1F_LAYER_KEYS_H

#include "../core/status.h"

#include <stdint.h>

s1f_status s1f_layer_register(int64_t layer); /* S1F_ERR_ARG below 0; again is fine */
int s1f_layer_is_registered(int64_t layer);

#endif
