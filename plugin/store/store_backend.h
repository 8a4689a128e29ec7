/* What a store is built from: one vtable with a backend per way to meet (tcp, file, local, host callbacks).
 *
 * store.c checks keys and sizes, refuses calls in a forked child, and dispatches here; a backend does the
 * work and records its own errors. Backends are called from any thread, several at once, so each does its own
 * locking, and none may hold a lock while it waits for a key or calls the host.
 *
 * Integers made by `add` are kept as decimal text, so `set` may give the first value and `get` can read the
 * sum. */
#ifndef FSDP_STORE_BACKEND_H
#define FSDP_STORE_BACKEND_H

#include <time.h>

#include "base/error.h"

#define STORE_KEY_MAX 255
#define STORE_VALUE_MAX 65536
#define STORE_WORLD_MAX (1 << 20)
#define STORE_TEXT_MAX 800 /* a sentence that one rank sends to another */

/* Who this rank is. A backend keeps its own copy. */
struct store_config {
    int32_t rank, world_size;
    int64_t timeout_ms;
    char job_key[STORE_KEY_MAX + 1]; /* "": none */
};

/* First member of every backend's object. */
struct store_backend {
    const struct store_backend_ops *ops;
};

struct store_backend_ops {
    const char *name;
    fsdp_status (*set)(struct store_backend *self, const char *key, const void *value, size_t bytes);
    fsdp_status (*get)(struct store_backend *self, const char *key, void *buffer, size_t capacity, size_t *bytes,
                       int64_t timeout_ms);
    fsdp_status (*add)(struct store_backend *self, const char *key, int64_t amount, int64_t *result);
    fsdp_status (*wait)(struct store_backend *self, const char *key);
    void (*close)(struct store_backend *self); /* the last reference is gone; no call is running */
    /* The same in a forked child: give back this process's memory and descriptors, and reach nobody else. No
     * other thread exists, and locks may be held for ever: take none. `torn`: another thread was inside a
     * call when the process forked, so data that calls change may be half changed: leave it unfreed. */
    void (*abandon)(struct store_backend *self, int torn);
};

/* What is at the end of a tcp:// address. */
struct store_endpoint {
    char host[256];
    uint16_t port;
};

fsdp_status store_local_open(const struct store_config *config, struct store_backend **out);
fsdp_status store_tcp_open(const struct store_endpoint *at, const struct store_config *config,
                           struct store_backend **out);
fsdp_status store_file_open(const char *path, const struct store_config *config, struct store_backend **out);
fsdp_status store_callback_open(const fsdp_store_callbacks *callbacks, const struct store_config *config,
                                struct store_backend **out);

/* Sentences that several backends say (store.c). */
fsdp_status store_err_key_timeout(const char *key, int64_t timeout_ms);
fsdp_status store_err_too_large(const char *key, size_t bytes, size_t capacity);

/* Ranks as a compact list, "1, 4-7, 9", cut with "..." where text is full. `is_missing` says which to list.
 */
void store_list_ranks(char *text, size_t size, int32_t world_size, int (*is_missing)(const void *ctx, int32_t rank),
                      const void *ctx);

/* Deadlines are absolute, in monotonic milliseconds. */
static inline int64_t store_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static inline int64_t store_deadline(int64_t timeout_ms)
{
    const int64_t ten_years = INT64_C(315360000000);
    return store_now_ms() + (timeout_ms < ten_years ? timeout_ms : ten_years);
}

static inline void store_sleep_ms(int64_t ms)
{
    struct timespec t = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL); /* a signal ends it early: every caller loops on a deadline */
}

#endif
