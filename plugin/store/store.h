/* Rendezvous: the key-value store behind fsdp_store, one vtable with four backends (tcp, file, local for one rank
 * alone, host callbacks).
 *
 * `api.c` checks the public arguments, so no pointer here is NULL; these functions do the work. All are callable from
 * any thread; a store serialises its own requests. Waits are bounded by the store's timeout. */
#ifndef FSDP_STORE_STORE_H
#define FSDP_STORE_STORE_H

#include "base/error.h"
#include "base/ref.h"

struct fsdp_store {
    struct ref ref;
    int32_t rank, world_size;
    int64_t timeout_ms;
    atomic_int_fast64_t groups; /* made from it */
    atomic_int calls;           /* running now, on any thread */
    struct store_backend *backend;
};

fsdp_status store_open(const char *url, const fsdp_store_options *options, fsdp_store **out);
fsdp_status store_from_callbacks(const fsdp_store_callbacks *callbacks, const fsdp_store_options *options,
                                 fsdp_store **out);

int store_is(const fsdp_store *store); /* a live store, as far as can be told */
int32_t store_rank(const fsdp_store *store);
int32_t store_world_size(const fsdp_store *store);

/* The n-th group made from this store, from 0: gives each group its own key prefix. The same on all ranks,
 * since they make groups in the same order. */
int64_t store_next_group(fsdp_store *store);

fsdp_status store_set(fsdp_store *store, const char *key, const void *value, size_t bytes);
fsdp_status store_get(fsdp_store *store, const char *key, void *buffer, size_t capacity, size_t *bytes);
/* The same, waiting at most timeout_ms where that is less than the store's. */
fsdp_status store_get_within(fsdp_store *store, const char *key, void *buffer, size_t capacity, size_t *bytes,
                             int64_t timeout_ms);
fsdp_status store_add(fsdp_store *store, const char *key, int64_t amount, int64_t *result);
fsdp_status store_wait(fsdp_store *store, const char *key);
void store_retain(fsdp_store *store);
void store_release(fsdp_store *store);

#endif
