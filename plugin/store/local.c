/* The store of a job of one rank: a table in this process. Threads of the process may still wait for each
 * other's keys, so a reader that finds nothing sleeps on a condition variable until a writer wakes it or its
 * time is up. One lock guards the table. */
#include <pthread.h>
#include <string.h>

#include "base/mem.h"
#include "store/table.h"

struct local {
    struct store_backend base;
    int64_t timeout_ms;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct store_table table; /* under lock */
};

static fsdp_status local_set(struct store_backend *base, const char *key, const void *value, size_t bytes)
{
    struct local *self = (struct local *)base;
    pthread_mutex_lock(&self->lock);
    fsdp_status status = store_table_set(&self->table, key, strlen(key), value, bytes);
    if (status == FSDP_OK) pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
    return status;
}

/* With no buffer it only waits. */
static fsdp_status local_read(struct local *self, const char *key, void *buffer, size_t capacity, size_t *bytes,
                              int64_t timeout_ms)
{
    int64_t deadline = store_deadline(timeout_ms);
    struct timespec until = {.tv_sec = (time_t)(deadline / 1000), .tv_nsec = (long)(deadline % 1000) * 1000000};
    const void *value;
    size_t have;
    fsdp_status status = FSDP_OK;

    pthread_mutex_lock(&self->lock);
    while (!store_table_get(&self->table, key, strlen(key), &value, &have)) {
        if (store_now_ms() >= deadline) {
            status = store_err_key_timeout(key, timeout_ms);
            break;
        }
        pthread_cond_timedwait(&self->changed, &self->lock, &until);
    }
    if (status == FSDP_OK && bytes) {
        *bytes = have;
        if (have > capacity)
            status = store_err_too_large(key, have, capacity);
        else if (have)
            memcpy(buffer, value, have);
    }
    pthread_mutex_unlock(&self->lock);
    return status;
}

static fsdp_status local_get(struct store_backend *base, const char *key, void *buffer, size_t capacity, size_t *bytes,
                             int64_t timeout_ms)
{
    return local_read((struct local *)base, key, buffer, capacity, bytes, timeout_ms);
}

static fsdp_status local_wait(struct store_backend *base, const char *key)
{
    struct local *self = (struct local *)base;
    return local_read(self, key, NULL, 0, NULL, self->timeout_ms);
}

static fsdp_status local_add(struct store_backend *base, const char *key, int64_t amount, int64_t *result)
{
    struct local *self = (struct local *)base;
    pthread_mutex_lock(&self->lock);
    fsdp_status status = store_table_add(&self->table, key, strlen(key), amount, result);
    if (status == FSDP_OK) pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static void local_abandon(struct store_backend *base, int torn)
{
    struct local *self = (struct local *)base;
    if (torn) return;
    store_table_free(&self->table);
    mem_free(self);
}

static void local_close(struct store_backend *base)
{
    struct local *self = (struct local *)base;
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->lock);
    local_abandon(base, 0);
}

static const struct store_backend_ops local_ops = {
    .name = "local",
    .set = local_set,
    .get = local_get,
    .add = local_add,
    .wait = local_wait,
    .close = local_close,
    .abandon = local_abandon,
};

fsdp_status store_local_open(const struct store_config *config, struct store_backend **out)
{
    struct local *self = mem_alloc(sizeof *self);
    if (!self) return mem_none("a store", sizeof *self);
    self->base.ops = &local_ops;
    self->timeout_ms = config->timeout_ms;
    pthread_mutex_init(&self->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&self->changed, &attr);
    pthread_condattr_destroy(&attr);
    *out = &self->base;
    return FSDP_OK;
}
